"""The examples do what they say."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

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
