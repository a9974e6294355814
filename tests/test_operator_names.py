"""Facts about an operator stand in its paragraph: code elsewhere asks for fields, or means one operator and says which
(`op is o.cast`)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "mycel"
OWN = ("ops", "ir")  # where operators are made, and where they are written and read as text
TABLES = {
    "transform/identities.py": "rewrites, by the operators they begin with",
    "transform/algebra.py": "reads that table",
    "transform/causal.py": "what it knows of positions, by operator",
    "transform/indexed.py": "what it knows of positions, by operator",
    "transform/microbatch.py": "how a loss is made of its parts, by operator",
    "transform/vjp.py": "rules of control flow, by name",
    "plan/decided.py": "a plan is text and names operators",
    "plan/choices.py": "the search for layouts",
    "plan/preferences.py": "the search for layouts",
    "plan/manual_regions.py": "the search for layouts",
    "capture/bounds.py": "what it knows of sizes, by operator",
    "capture/syntax/decisions.py": "a list of what is cheap enough to compute on both ways",
}


def is_name(node: ast.AST) -> bool:
    """op.name, eqn.op.name"""
    if not (isinstance(node, ast.Attribute) and node.attr == "name"):
        return False
    owner = node.value
    return (isinstance(owner, ast.Attribute) and owner.attr == "op") or (
        isinstance(owner, ast.Name) and owner.id == "op"
    )


def looks(path: Path) -> list[int]:
    """Lines that decide something by an operator's name."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        asked = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Match):
            asked = [node.subject]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = (
                [node.func.value]
                if node.func.attr in ("startswith", "endswith")
                else node.args[:1]
                if node.func.attr == "get"
                else []
            )
        elif isinstance(node, ast.Assign):  # name = eqn.op.name, or unpacked beside other things
            several = isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)
            asked = node.value.elts if several else [node.value]
        if any(map(is_name, asked)):
            lines.append(node.lineno)
    return lines


FILES = [p for p in sorted(ROOT.rglob("*.py")) if p.relative_to(ROOT).parts[0] not in OWN]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nobody_decides_by_an_operators_name(path):
    if str(path.relative_to(ROOT)) not in TABLES:
        assert looks(path) == [], "a field of the operator's paragraph, or `op is o.name`"


def test_the_list_is_short_and_true():
    assert [name for name in TABLES if not looks(ROOT / name)] == []


def test_the_law_can_fail(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        'x = eqn.op.name == "add"\ny = e.op.name in LOW\nz = TABLE.get(op.name)\nw = eqn.op.name.startswith("stack_")\n'
    )
    assert looks(wrong) == [1, 2, 3, 4]
