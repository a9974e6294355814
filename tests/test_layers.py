"""Who may look into whom, read from the imports themselves.

errors < ir < ops < {capture | transform | plan} < lower < step < train < cli
ops < run < {api | step}
capture, transform < api < derivatives
capture < hints < comm
capture < {custom | mixture | islands}
capture, transform < routing < step
run < launch < cli
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "mycel"

MAY_IMPORT = {
    "errors": set(),
    "sizes": {"errors"},
    "ir": {"errors"},
    "ops": {"errors", "ir"},
    "capture": {"errors", "ir", "ops"},
    "transform": {"errors", "ir", "ops"},
    "plan": {"errors", "ir", "ops", "sizes"},
    "lower": {"errors", "sizes", "ir", "ops", "transform", "plan"},
    "offloading": {"errors", "sizes", "ir", "plan", "lower"},
    "placing": {"errors", "ir", "ops", "plan", "lower", "offloading"},
    "planning": {"errors", "sizes", "ir", "ops", "plan", "lower", "offloading", "placing"},
    "run": {"errors", "sizes", "ir", "ops"},
    "api": {"errors", "ir", "ops", "capture", "transform", "run", "changing_values", "growing_cache"},
    "derivatives": {"errors", "ir", "ops", "capture", "transform", "run", "api"},
    "custom": {"errors", "capture"},
    "mixture": {"errors", "capture"},
    "routing": {"errors", "capture", "transform"},
    "islands": {"capture"},
    "mapped": {"api", "capture"},
    "rounded_call": {"ir", "ops", "capture", "transform", "api"},
    "hints": {"errors", "ir", "ops", "capture"},
    "comm": {"errors", "ops", "capture", "hints"},
    "objective": {"errors", "ir", "capture", "buckets"},
    "several_optimizers": {"errors"},
    "wrapped_optimizer": {"errors", "several_optimizers"},
    "optimizers": {"errors", "ir", "ops", "transform", "several_optimizers", "wrapped_optimizer"},
    "accumulation": {"errors", "ir", "capture", "transform", "run"},
    "buckets": {"errors", "capture"},
    "changing_values": {"errors", "ir", "capture"},
    "growing_cache": set(),
    "torch_update": {"errors", "plan", "optimizers", "wrapped_optimizer"},
    "feed": {"errors", "ir", "capture", "run"},
    "monitors": {"transform"},
    "expert_rows": {"ir", "ops", "transform"},
    "expert_placement": {"ir", "run", "expert_rows"},
    "replica_batch": {"errors", "ir", "capture", "plan", "feed"},
    "model_guards": {"errors"},
    "held_model": {"ir", "ops", "plan", "run"},
    "held_by_stage": {"errors", "ir", "lower", "plan", "run", "held_model", "model_guards"},
    "parts": {
        "errors",
        "ir",
        "ops",
        "capture",
        "transform",
        "plan",
        "lower",
        "run",
        "optimizers",
        "feed",
        "replica_batch",
        "model_guards",
        "held_model",
        "held_by_stage",
    },
    "placed_model": {"feed", "ir", "plan", "placing", "lower", "parts", "run"},
    "host_parameters": {"ir", "plan", "lower", "run", "held_model", "parts"},
    "corrections": {"plan", "run"},
    "local_forward": {"ir", "plan", "lower", "parts", "placed_model", "placing", "planning"},
    "forward": {
        "ir",
        "ops",
        "capture",
        "transform",
        "plan",
        "run",
        "changing_values",
        "feed",
        "parts",
        "host_parameters",
        "local_forward",
    },
    "message_state": {"ir", "ops", "parts", "run"},
    "outer_steps": {"ir", "lower", "plan", "run", "parts", "message_state"},
    "html_page": set(),
    "schedule_page": {"sizes", "plan", "html_page"},
    "step": {
        "errors",
        "sizes",
        "ir",
        "ops",
        "capture",
        "transform",
        "plan",
        "lower",
        "run",
        "objective",
        "optimizers",
        "several_optimizers",
        "wrapped_optimizer",
        "torch_update",
        "accumulation",
        "buckets",
        "changing_values",
        "corrections",
        "feed",
        "parts",
        "forward",
        "host_parameters",
        "message_state",
        "monitors",
        "outer_steps",
        "planning",
        "placed_model",
        "routing",
        "expert_placement",
        "expert_rows",
        "search",
        "search_space",
        "shallow",
        "schedule_page",
        "islands",
    },
    "shallow": {"ir", "plan", "parts"},
    "search_space": {"ir", "plan"},
    "search_given": {"errors", "ir", "plan", "search_space"},
    "candidates": {"ir", "ops", "plan", "placing", "planning", "search_space"},
    "search_order": {"errors", "ir", "plan", "candidates", "search_given", "search_space"},
    "search_remarks": {"errors", "sizes", "plan", "candidates", "search_order", "search_space"},
    "stage_price": {"errors", "sizes", "ir", "plan", "lower", "planning", "shallow"},
    "search": {
        "errors",
        "sizes",
        "ir",
        "plan",
        "lower",
        "offloading",
        "parts",
        "planning",
        "run",
        "shallow",
        "candidates",
        "search_given",
        "search_order",
        "search_remarks",
        "search_space",
        "stage_price",
    },
    "search_text": {"errors", "sizes", "ir", "plan", "candidates", "search"},
    "search_page": {"sizes", "ir", "plan", "html_page", "schedule_page", "candidates", "search", "search_text"},
    "train": {
        "search",
        "search_given",
        "search_space",
        "replica_batch",
        "errors",
        "sizes",
        "ir",
        "ops",
        "plan",
        "run",
        "api",
        "rounded_call",
        "derivatives",
        "corrections",
        "feed",
        "parts",
        "forward",
        "step",
        "several_optimizers",
    },
    "launch": {"errors", "run"},
    "cli": {"errors", "plan", "run", "train", "launch", "search_text", "search_page", "search_remarks"},
    "__main__": {"cli"},
    "__init__": {
        "errors",
        "ir",
        "plan",
        "api",
        "derivatives",
        "custom",
        "hints",
        "comm",
        "mixture",
        "islands",
        "mapped",
        "step",
    },
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Rooms of ours that a file imports, at any depth of its code."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "mycel":
                rooms |= {a.name for a in node.names}
            elif node.module and node.module.startswith("mycel."):
                rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {a.name.split(".")[1] for a in node.names if a.name.startswith("mycel.")}
    return rooms


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_layers(path):
    mine = room(path)
    assert mine in MAY_IMPORT, f"{mine} is a new room: give it a place in the layers"
    assert imported(path) - {mine} <= MAY_IMPORT[mine]


def test_ir_runs_without_the_rest():
    """The law above can fail: it sees the imports that are there."""
    assert imported(ROOT / "api.py") >= {"ir", "capture", "run"}
