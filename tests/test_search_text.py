"""What a search says where its time was too short, and of modules."""

from __future__ import annotations

import json
import re
import sys

import pytest
from models import llama
from test_search import SLOW, TWO, Blocks, of
from typer.testing import CliRunner

from mycel import search_text
from mycel.candidates import Candidate
from mycel.cli import app
from mycel.errors import PlanError
from mycel.plan import Measured, basis_of, write_down
from mycel.search import Search
from mycel.train.planner import this_machine


def test_a_time_too_short_to_find_what_fits_is_not_called_that_nothing_does(monkeypatch):
    real = Search._price
    full = lambda self, shape: Candidate(shape, why="out of memory by 1.0 GiB", short=1 << 30)
    monkeypatch.setattr(Search, "_price", lambda self, x: real(self, x) if self.candidates else full(self, x))
    with pytest.raises(PlanError) as refused:
        of(llama(), cluster=TWO).run(seconds=0.0)
    said = str(refused.value)
    assert "the time was too short to find a plan that fits 1.00 GiB a device" in said and "no plan fits" not in said
    assert "one plan of those there are" in said and "out of memory by 1.0 GiB" in said and "--seconds" in said
    assert of(llama(), cluster=TWO).run().best.fits


def test_a_module_is_explained_by_its_parameters_and_its_lines():
    plan_search = of(llama(), cluster=TWO)
    said = search_text.explained(plan_search, plan_search.run(), "model.layers.0.mlp")
    parameters = re.findall(r"^parameter  (\S+)", said, re.MULTILINE)
    assert parameters == [f"model.layers.*.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    file, *others = {x.rsplit(":", 1)[0] for x in re.findall(r"first used at (\S+)", said)}
    assert file.endswith("modeling_llama.py") and not others and said.count("first used at") == 3
    equations = said.split("equations")[1]
    assert "silu" in equations and "linear" in equations and "attention" not in equations


def test_a_value_is_explained_by_what_its_other_layouts_cost():
    plan_search = of(Blocks(), cluster=SLOW, given={"mesh": {"dp": 2, "tp": 2}})
    answer = plan_search.run()
    said = search_text.explained(plan_search, answer, "relu")
    assert re.search(r"^value +relu   \[8, 16, 256\]$", said, re.MULTILINE) and "made at" in said
    rows = [line for line in said.splitlines() if line.startswith("  [")]
    assert rows[0].endswith("+0.0 ms   chosen") and len({row.split("]")[0] for row in rows}) == len(rows) > 4
    other = next(row.split("]")[0].strip(" [").split(", ") for row in rows[1:] if " a step, +" in row)
    given = {"mesh": {"dp": 2, "tp": 2}, "zero": answer.best.shape.zero, "activations": {"relu": other}}
    pinned = of(Blocks(), cluster=SLOW, given=given).price(answer.best.shape)
    assert f"[{', '.join(other)}]" in next(row for row in rows if search_text.span(pinned.seconds) in row)


def test_what_runs_here_took_is_in_a_plan_for_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("MYCEL_LEDGER", str(tmp_path / "ledger.jsonl"))
    (tmp_path / "code_for_here.py").write_text(
        "import torch\nclass Tiny(torch.nn.Linear):\n"
        "    def forward(self, x):\n        return super().forward(x).mean()\n"
        "def tiny():\n    return Tiny(256, 64), {'x': torch.ones(64, 256)}\n"
    )
    here = this_machine()
    write_down(Measured("CPU", 1, 0.1, 0.3, 1, 1, "a model", 9, 0.1, 0.0, basis_of(here.hardware)))

    def planned(*more: str) -> str:
        done = CliRunner().invoke(app, ["plan", "code_for_here:tiny", *more])
        assert done.exit_code == 0, done.output
        return done.output

    said = "corrected  computing and messages take 3.00 times"
    assert said in planned() and "corrected" not in planned("--uncorrected")
    assert "corrected" not in planned("--cluster", "h100x1")
    texts = [planned("--json", *how) for how in ((), ("--uncorrected",))]
    times = [json.loads(text[text.index("{") :])["plans"][0]["step_seconds"] for text in texts]
    assert times[0] == pytest.approx(3 * times[1], rel=0.01)
