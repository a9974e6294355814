"""Plans as files and names: YAML, the ready ones (`mycel/plans/*.yaml`), and several of them laid over each other.

"zero3+tp"      zero3.yaml with what tp.yaml says laid over it: names are added, batch dims joined
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from mycel.errors import PlanError
from mycel.plan.mapping_file import read_mapping

_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times as fast
READY = Path(__file__).parent.parent / "plans"
PIPELINE = "{stages: 2}, a pipeline"  # a plan that has no name, as its number of stages is asked for


def plan_data(source: Any) -> tuple[dict[str, Any], str]:
    """What a file, the names of ready plans or a mapping say, as plain data; and how to call that in an error."""
    if isinstance(source, Path) or (isinstance(source, str) and Path(source).suffix in (".yaml", ".yml")):
        return _file(Path(source)), str(source)
    if isinstance(source, str):
        data: dict[str, Any] = {}
        for name in source.split("+"):
            _over(data, _ready(name.strip()))
        return data, f"plan {source}"
    if isinstance(source, Mapping):
        return dict(source), "the plan"
    raise PlanError(
        f"{source!r} is no plan\n  try       a Plan, a mapping, a .yaml file, or one of {', '.join(ready_plans())}"
    )


def plan_yaml(data: Mapping[str, Any]) -> str:
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120))


def ready_plans() -> list[str]:
    """Names of the plans that ship."""
    return sorted(p.stem for p in READY.glob("*.yaml"))


def _ready(name: str) -> dict[str, Any]:
    path = READY / f"{name}.yaml"
    if name not in ready_plans():
        close = [PIPELINE] if name in ("pp", "pipeline") else get_close_matches(name, ready_plans(), 1)
        raise PlanError(
            f"there is no plan {name!r}\n  ready     {', '.join(ready_plans())}\n"
            f"  try       {close[0] if close else 'one of these, or a .yaml file'}"
        )
    return _file(path)


def _file(path: Path) -> dict[str, Any]:
    return read_mapping(path, "plan", "mesh: {dp: 2}")


def _over(under: dict[str, Any], more: dict[str, Any]) -> None:
    """Lay one plan over another: names are added, batch dims joined, the rest replaced."""
    for key, value in more.items():
        if key in ("parameters", "activations"):
            under[key] = _both(under.get(key) or {}, value or {})
        elif key == "batch" and under.get("batch"):
            under["batch"] = _joined(under["batch"], value)
        else:
            under[key] = value


def _both(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: _joined(a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in (*a, *(k for k in b if k not in a))
    }


def _joined(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    """Dim by dim, the axes of both."""
    longer = [*a, *["-"] * (len(b) - len(a))]
    other = [*b, *["-"] * (len(a) - len(b))]
    return [
        ".".join(dict.fromkeys(w for e in pair if e not in (None, "-") for w in str(e).split("."))) or "-"
        for pair in zip(longer, other, strict=True)
    ]
