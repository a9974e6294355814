"""What earlier runs took corrects what later ones decide and predict, by one rule: for steps of any plan, searches,
runs that go on, and all ranks alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from test_search import Blocks, of
from training import config, disk  # noqa: F401
from typer.testing import CliRunner

from mycel.cli import app
from mycel.corrections import Corrections
from mycel.launch import launch
from mycel.plan import CPU, Correction, Measured, basis_of, hardware_of, write_down
from mycel.plan.cluster import Cluster
from mycel.search_space import Shape
from mycel.train.config import dump
from mycel.train.loop import train

HERE = torch.device("cpu")


@pytest.fixture
def ledger(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MYCEL_LEDGER", str(tmp_path / "ledger.jsonl"))
    return tmp_path / "ledger.jsonl"


def took(times: float, ranks: int = 1) -> None:
    basis = basis_of(hardware_of(HERE))
    write_down(Measured("CPU", ranks, 0.1, 0.1 * times, 1, 1, "a model", 9, 0.1, 0.0, basis))


def test_it_is_looked_up_once_and_a_run_that_goes_on_takes_what_it_began_with(ledger, monkeypatch):
    took(2.0)
    corrections = Corrections()
    assert corrections.hardware(HERE, 1).single == hardware_of(HERE).single / 2
    for _ in range(9):
        took(4.0)
    assert corrections.hardware(HERE, 1).single == hardware_of(HERE).single / 2
    assert Corrections().hardware(HERE, 1).single == hardware_of(HERE).single / 4
    again = Corrections.read(json.loads(json.dumps(corrections.data())))
    assert again.hardware(HERE, 1).single == hardware_of(HERE).single / 2
    assert again.of(hardware_of(HERE), 2) is None and again.data() != corrections.data()
    monkeypatch.setenv("MYCEL_UNCORRECTED", "1")
    assert Corrections().hardware(HERE, 1) == hardware_of(HERE)


def test_ranks_take_what_rank_0_knows_whatever_their_plan(tmp_path):
    child = str(Path(__file__).parent / "corrections_child.py")
    env = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    logs = tmp_path / "logs"
    code = launch([str(tmp_path)], 2, program=[child], env=env, logs=logs)
    assert code == 0, "\n".join(file.read_text() for file in sorted(logs.rglob("*")) if file.is_file())


@pytest.mark.parametrize("shape", [Shape(dp=4), Shape(dp=2, tp=2), Shape(dp=2, pp=2, microbatches=2)])
def test_a_search_prices_every_kind_of_plan_by_it(shape):
    """Where all takes twice as long, so does each plan; where messages alone do, what computes stays."""
    wires = {"device": {"name": "mine", "half": 1e12, "bytes_s": 1e11, "memory": "1GiB"}, "devices": 4}
    wires |= {"levels": [{"name": "host", "bytes_s": 1e9, "start_s": 1e-5}]}

    def price(computing: float, waiting: float):
        plan_search = of(Blocks(), cluster=wires)
        plan_search.cluster = Cluster.read(wires).corrected_by(Correction(3, computing, waiting))
        return plan_search.price(shape)

    plain, slower, waits = price(1.0, 1.0), price(2.0, 2.0), price(1.0, 2.0)
    assert slower.seconds == pytest.approx(2 * plain.seconds)
    assert waits.times.totals["compute"] == pytest.approx(plain.times.totals["compute"])
    assert plain.seconds < waits.seconds <= slower.seconds


def test_a_run_that_goes_on_is_priced_as_it_began(disk, tmp_path, ledger, monkeypatch, capsys):  # noqa: F811
    """Also where others have ended meanwhile; a new run is not, and --uncorrected is by figures alone."""
    monkeypatch.setenv("MYCEL_PROBE", str(tmp_path / "probe.yaml"))
    rates = {"memory": [[1e6, CPU.bytes_s]], "product.fp32": [[1e6, CPU.single]]}
    (tmp_path / "probe.yaml").write_text(yaml.safe_dump({"device": "CPU", "launch_s": CPU.launch_s, "rates": rates}))
    took(2.0)
    how = {"evaluate": {"every": 0}, "train": {"steps": 6}}
    assert train(config(disk, tmp_path / "run", **how)) == 0
    for _ in range(9):
        took(4.0)
    more = config(disk, tmp_path / "run", **{**how, "train": {"steps": 12}})
    assert train(more, resume=tmp_path / "run") == 0
    assert train(config(disk, tmp_path / "new", **how)) == 0
    said = {name: json.loads((tmp_path / name / "corrections.json").read_text()) for name in ("run", "new")}
    assert [[each["computing"] for each in x.values()] for x in said.values()] == [[2.0], [4.0]]
    times = {name: json.loads((tmp_path / name / "predicted.json").read_text()) for name in said}
    assert times["new"]["predicted_s"] == pytest.approx(2 * times["run"]["predicted_s"])
    assert times["new"]["computing_s"] == pytest.approx(times["run"]["computing_s"]), "by figures alone"
    (tmp_path / "plain.yaml").write_text(dump(config(disk, tmp_path / "plain", **how)))
    monkeypatch.setenv("MYCEL_UNCORRECTED", "")  # and back as it was, whatever the command makes of it
    capsys.readouterr()
    done = CliRunner().invoke(app, ["train", str(tmp_path / "plain.yaml"), "--uncorrected"])
    assert done.exit_code == 0, done.output
    plain = json.loads((tmp_path / "plain" / "predicted.json").read_text())
    assert plain["predicted_s"] == pytest.approx(plain["computing_s"]) == pytest.approx(times["new"]["computing_s"])
