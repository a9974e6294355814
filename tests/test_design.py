"""What can be held of the text of this repository: no line is longer than 120 columns, and DESIGN.md speaks of files,
classes and functions that are there."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections import Counter
from pathlib import Path

import torch
from conftest import ONE_IN, SLOW

import mycel
from mycel.ir.op import OPS

ROOT = Path(__file__).parents[1]
DESIGN = (ROOT / "DESIGN.md").read_text()
SUFFIXES = {".py", ".c", ".md", ".yaml", ".yml", ".toml"}
FOLDERS = ("mycel", "tests", "bench", "docs", "examples")
HOMES = (".", "mycel")
EXAMPLES = {"model.py"}
OF_A_PLAN = {"searched", "vision"}
WRITTEN_BY_OTHERS = ROOT / "bench" / "programs"


def texts() -> list[Path]:
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    files = [path for path in (*ROOT.iterdir(), *inside) if path.suffix in SUFFIXES or path.name == "Makefile"]
    return sorted(path for path in files if WRITTEN_BY_OTHERS not in path.parents)


def test_lines_are_short():
    """ruff looks over a line whose end is a `type: ignore`, and reads Python alone.  A row of a table cannot be
    broken."""
    paths = texts()
    assert len(paths) > 500 and ROOT / "mycel" / "ops" / "few_rows.c" in paths
    lines = [(path, i, line) for path in paths for i, line in enumerate(path.read_text().split("\n"), 1)]
    is_row = lambda path, line: path.suffix == ".md" and line.startswith("|")
    assert [f"{path}:{i}" for path, i, line in lines if len(line) > 120 and not is_row(path, line)] == []


def test_spans_of_time_are_put_into_words_in_one_place():
    """mycel.sizes.span: 40 µs, 12.3 ms, 21.5 s, and never 21,488.59 ms."""
    written = re.compile(r"(\} ?(ms|µs|us)|\.\df\} s)\b")
    assert [p.name for p in (ROOT / "mycel").rglob("*.py") if written.search(p.read_text())] == ["sizes.py"]


def spans(text: str) -> list[str]:
    """What stands between backticks in prose."""
    return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def test_the_files_that_design_names_are_there():
    """By their path from the repository or from mycel/, or by their name alone inside the package."""
    names = {name for name in re.findall(r"[\w/~.]*\w\.(?:py|c|md)\b", DESIGN) if name not in EXAMPLES}
    own = {path.name for path in (ROOT / "mycel").rglob("*")}
    assert len(names) > 100
    assert {
        name for name in names if name not in own and not any((ROOT / at / name).is_file() for at in HOMES)
    } == set()


def names_in_code() -> tuple[set[str], dict[str, set[str]]]:
    """Every name the package defines, and by class what it has, its bases' included."""
    names, classes, bases = set[str](), dict[str, set[str]](), dict[str, set[str]]()
    for path in (ROOT / "mycel").rglob("*.py"):
        names |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text())):
            names |= defined(node)
            if isinstance(node, ast.ClassDef):
                classes[node.name] = set().union(*(defined(inner) for inner in ast.walk(node)))
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}

    def members(name: str) -> set[str]:
        return classes.get(name, set()).union(*map(members, bases.get(name, ())))

    return names, {name: members(name) for name in classes}


def defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.id if isinstance(node, ast.Name) else node.attr}
    return set()


def test_the_names_that_design_speaks_of_are_there():
    """A name alone is defined somewhere, or is a word of Python, torch, a plan or a program; of `Class.name` the class
    has it; `NAME in FILE` is there."""
    names, classes = names_in_code()
    known = {*names, *dir(builtins), *keyword.kwlist, *OPS, *dir(torch), *dir(torch.Tensor), *OF_A_PLAN}
    single = {span.partition("(")[0] for span in spans(DESIGN) if re.fullmatch(r"[A-Za-z_]\w*(\(.*\))?", span)}
    assert {name for name in single if len(name) > 2 and name not in known} == set()
    dotted = {
        m.groups() for span in spans(DESIGN) if (m := re.fullmatch(r"(?:\w+\.)*([A-Z]\w+)\.(\w+)(?:\(.*\))?", span))
    }
    assert ("StepCompiler", "compile") in dotted
    assert {f"{name}.{member}" for name, member in dotted if member not in classes.get(name, ())} == set()
    of_a_step = {name for span in spans(DESIGN) for name in re.findall(r"^step\.(\w+)", span)}
    assert {name for name in of_a_step if name not in classes["Step"]} == set()
    public = set(re.findall(r"\bmycel\.(\w+)", DESIGN))
    assert {name for name in public if not hasattr(mycel, name)} == set()
    for name, path in re.findall(r"`(\w+)` in `([\w/]+\.py)`", DESIGN):
        assert re.search(rf"\b{name}\b", (ROOT / "mycel" / path).read_text()), f"{name} is not in {path}"


VAGUE = {"found", "made", "owed", "meant", "taken", "told", "handed", "joined"}


def test_names_say_what_they_hold():
    """No function, parameter, field or local variable has a name that fits anything; a class name is there once."""
    nodes = [
        (path.relative_to(ROOT), node)
        for path in sorted((ROOT / "mycel").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    assert len(nodes) > 300_000
    assert [f"{path}:{node.lineno}" for path, node in nodes if defined(node) & VAGUE] == []
    classes = Counter(node.name.lstrip("_") for _, node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, n in classes.items() if n > 1} == set()


def test_the_tables_of_the_suite_name_what_is_there():
    """Slow files and long sweeps, in conftest.py."""
    tests = ROOT / "tests"
    assert [name for name in SLOW if not (tests / f"test_{name}.py").is_file()] == []
    defined_there = {name for path in tests.rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert ONE_IN.keys() - defined_there == set()
