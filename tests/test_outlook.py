"""Before its first step a run says what a step will take on this machine, also where nobody ran `mycel probe`."""

import json
import math
import re
import time

import pytest
import torch
import yaml
from training import config, disk  # noqa: F401

from mycel.ir import Mesh
from mycel.plan import CPU
from mycel.plan.ledger import written_down
from mycel.run import brief_probe as brief_probe_module
from mycel.run import probe as measuring
from mycel.run.brief_probe import brief_probe
from mycel.train import metrics, outlook
from mycel.train.assemble import Assembly
from mycel.train.loop import train
from mycel.train.planner import cluster_of, this_machine

RATES = {"memory": [[1e6, CPU.bytes_s / 20]], "product.fp32": [[1e6, CPU.single / 20]]}
SLOW = {"device": "CPU", "launch_s": 20 * CPU.launch_s, "rates": RATES}


@pytest.fixture
def slow(monkeypatch, tmp_path):
    """A machine of which no probe was made, and which is twenty times slower than the preset."""
    monkeypatch.delenv("MYCEL_PROBE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(outlook, "brief_probe", lambda: SLOW)


def predicted(text: str) -> str:
    return re.search(r"predicted +([\d.]+ (µs|ms|s)) a step", text)[1]


def seconds(text: str) -> float:
    number, unit = predicted(text).split()
    return float(number) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def test_a_run_without_a_probe_looks_at_the_processor(disk, tmp_path, slow, capsys, monkeypatch):  # noqa: F811
    train(config(disk, tmp_path / "run"), dry_run=True)
    seen = capsys.readouterr().out
    assert "by a short look at this processor: mycel probe takes a longer one" in " ".join(seen.split())
    monkeypatch.setenv("MYCEL_PROBE", "")
    train(config(disk, tmp_path / "run"), dry_run=True)
    preset = capsys.readouterr().out
    assert "a short look" not in preset and seconds(seen) == pytest.approx(20 * seconds(preset), rel=0.15)


def test_what_the_run_is_measured_against_is_what_it_said(disk, tmp_path, slow, capsys):  # noqa: F811
    train(config(disk, tmp_path / "run"))
    output = capsys.readouterr().out
    assert re.search(r"measured, (.*) predicted", output)[1] == predicted(output)


def test_what_is_measured_are_steady_steps(disk, tmp_path, slow, capsys, monkeypatch):  # noqa: F811
    """Not the first of each width, in which it is compiled; a few steps say that they are few, and are not written
    down."""
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"text": f"{i:03}" + "a" * (10 * (i % 2))}) for i in range(80))
    )
    monkeypatch.setenv("MYCEL_LEDGER", str(tmp_path / "ledger.jsonl"))
    widths = []

    def slow_at_first(plain):
        def call(**batch):
            width = batch["input_ids"].shape[1]
            time.sleep(0 if width in widths else 1.0)
            widths.append(width)
            return plain(**batch)

        return call

    plain = Assembly.local_step
    monkeypatch.setattr(Assembly, "local_step", lambda parts: slow_at_first(plain(parts)))
    data = {"train": str(tmp_path / "rows.jsonl"), "pack": False, "buckets": [8]}
    train(config(disk, tmp_path / "run", data=data, train={"batch": 1}, log={"every": 12}))
    assert len({*widths}) == 2
    said = json.loads((tmp_path / "run" / "predicted.json").read_text())
    assert said["measured_s"] < 0.3 and said["steps"] == 9, "one of ten steps was timed by its blocks"
    speeds = [r["tokens_per_s"] for r in metrics.read(tmp_path / "run") if r.get("tokens_per_s")]
    assert speeds and min(speeds) > 10 * 4 / 0.9, "nor is it what is said of the speed"
    assert len(written_down()) == 1 and "tell little" not in capsys.readouterr().out
    widths.clear()
    train(config(disk, tmp_path / "short", train={"steps": 3}))
    assert "; of 2 steps, which tell little" in capsys.readouterr().out and len(written_down()) == 1


def test_plans_for_this_machine_do_not_rest_on_the_look(slow):
    """They are the same at each start."""
    assert this_machine().hardware.single == CPU.single


def test_the_look_draws_nothing_and_sees_something():
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    data = brief_probe()
    assert torch.equal(before, torch.random.get_rng_state())
    assert {"memory", "product.fp32", "attention_causal.fp32", "attention_grad_causal.fp32"} == data["rates"].keys()
    assert 0 < data["launch_s"] < 1
    assert all(math.isfinite(y) and y > 0 and x > 0 for curve in data["rates"].values() for x, y in curve)


def test_what_others_take_of_the_processor_is_seen(monkeypatch):
    """Each third window of one takes ten times as long, for another process runs: its median says nothing of it."""
    now_s, calls = 0.0, 0

    def disturbed():
        nonlocal now_s, calls
        calls += 1
        now_s += 0.06 if calls % 3 == 0 else 0.006

    def alone():
        nonlocal now_s
        now_s += 0.006

    monkeypatch.setattr(brief_probe_module.time, "perf_counter", lambda: now_s)
    seconds = brief_probe_module._seconds({"a": disturbed, "b": alone})
    assert seconds["a"] == pytest.approx(seconds["b"]) == pytest.approx(0.006 * 168 / 60)


def test_what_a_call_costs_is_that_of_different_operators_one_after_the_other(monkeypatch):
    """One and the same again and again is what the other measurements contain, and have taken from them."""
    took = {"one": 2e-6, "small operators": 12e-5}
    monkeypatch.setattr(brief_probe_module, "_seconds", lambda runs: {key: took.get(key[0], 1e-4) for key in runs})
    data = brief_probe()
    assert data["launch_s"] == pytest.approx(1e-5)
    assert all(work / rate == pytest.approx(98e-6) for curve in data["rates"].values() for work, rate in curve)
    rank = measuring.Probe(measuring.Processes(Mesh(), 0, torch.device("cpu")), print)
    monkeypatch.setattr(rank, "seconds", lambda fn: 12e-5 if fn.__name__ == "chain" else 2e-6)
    assert rank._launch() == pytest.approx((2e-6, 1e-5))


def test_a_second_run_is_predicted_nearer(disk, tmp_path, monkeypatch, capsys):  # noqa: F811
    """By figures that are wrong, which nobody but the ledger knows; without it nothing changes."""
    probe = tmp_path / "probe.yaml"
    fast = {"memory": [[1e6, 1e4 * CPU.bytes_s]], "product.fp32": [[1e6, 1e4 * CPU.single]]}
    probe.write_text(yaml.safe_dump({"device": "CPU", "launch_s": CPU.launch_s / 20, "rates": fast}))
    monkeypatch.setenv("MYCEL_PROBE", str(probe))
    monkeypatch.setenv("MYCEL_LEDGER", str(tmp_path / "ledger.jsonl"))
    for name in ("first", "second"):
        train(config(disk, tmp_path / name))
    assert "corrected: computing and messages take" in " ".join(capsys.readouterr().out.split())
    first, second = written_down()
    assert second.predicted_s > 1.5 * first.predicted_s
    assert second.computing_s == pytest.approx(first.computing_s), "by the figures alone"
    assert abs(math.log(second.ratio)) < abs(math.log(first.ratio))
    assert json.loads((tmp_path / "second" / "predicted.json").read_text())["computing_s"] == second.computing_s
    planned = cluster_of(None, corrected=True)
    assert planned.correction is not None and planned.hardware.single < cluster_of(None).hardware.single
    assert cluster_of("h100x2", corrected=True).correction is None
    monkeypatch.setenv("MYCEL_LEDGER", "")
    assert cluster_of(None, corrected=True) == cluster_of(None)
