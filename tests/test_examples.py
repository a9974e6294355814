"""The examples do what they say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_burgers_learns():
    module = runpy.run_path(str(EXAMPLES / "burgers.py"))
    untrained = module["train"](steps=0, lbfgs=0, quiet=True)
    assert module["train"](steps=60, lbfgs=8, quiet=True) < 0.5 * untrained


def test_newton_agrees_with_the_implicit_function_theorem(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["newton.py"])
    runpy.run_path(str(EXAMPLES / "newton.py"), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:5]]
    for _, _, _, da, exact_da, db, exact_db in rows:
        assert float(da) == float(exact_da) and float(db) == float(exact_db)


def test_lora_learns_another_text():
    before, after = runpy.run_path(str(EXAMPLES / "lora.py"))["main"](steps=40)
    assert after < 0.8 * before


def test_a_vision_transformer_learns():
    assert runpy.run_path(str(EXAMPLES / "vit.py"))["main"](steps=40) > 0.6


def test_a_custom_operator_is_trained_through():
    first, last = runpy.run_path(str(EXAMPLES / "custom_operator.py"))["main"](steps=60)
    assert last < 0.5 * first


def test_every_example_is_run_here():
    assert {p.name for p in EXAMPLES.glob("*.py")} == {*re.findall(r'"(\w+\.py)"', Path(__file__).read_text())}


@pytest.mark.parametrize("name", ["ranks.py", "custom_plan.py"])
def test_examples_on_two_processes(name):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *start, str(EXAMPLES / name)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert float(re.search(r"^loss ([\d.]+)", ran.stdout, re.MULTILINE)[1]) < 0.5
    if name == "custom_plan.py":
        assert "(64, 32) of (128, 32)" in ran.stdout and "all_reduce" in ran.stdout
