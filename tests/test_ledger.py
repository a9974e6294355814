"""Runs are written down with what was predicted of them, and say how far predictions are off."""

from __future__ import annotations

import pytest

from mycel.plan.ledger import ENOUGH, Measured, error_bars, ledger_path, write_down, written_down


@pytest.fixture(autouse=True)
def _own_file(tmp_path, monkeypatch):
    monkeypatch.setenv("MYCEL_LEDGER", str(tmp_path / "deep" / "ledger.jsonl"))


def run(ratio: float, device: str = "mine", ranks: int = 1) -> Measured:
    return Measured(device, ranks, 0.1, 0.1 * ratio, 100, 110, "a model")


def test_too_few_runs_say_nothing():
    for _ in range(ENOUGH - 1):
        write_down(run(2.0))
    assert error_bars("mine", 1) is None


def test_bars_are_those_of_the_same_device_alone_or_among_several():
    for ratio in (1.0, 1.1, 1.2, 1.3, 1.4):
        write_down(run(ratio))
        write_down(run(10 * ratio, ranks=4))
        write_down(run(5.0, device="other"))
    alone, several = error_bars("mine", 1), error_bars("mine", 2)
    assert alone.middle == pytest.approx(1.2) and 1.0 <= alone.low < alone.middle < alone.high <= 1.4
    assert several.middle == pytest.approx(12.0) and alone.runs == several.runs == 5
    assert alone.expected(10.0)[1] == pytest.approx(12.0)
    assert str(alone).startswith("1.20 times what was predicted (1.0")
    assert str(several) == (
        "12 times what was predicted in 5 runs here: of steps so small, or on a machine so busy, a prediction says "
        "little"
    )


def test_a_device_is_one_by_its_driver_and_by_its_preset():
    for ratio in (1.0, 1.1, 1.2):
        write_down(run(ratio, "NVIDIA H100 80GB HBM3"))
        write_down(run(3.0, "NVIDIA A100-SXM4-40GB"))
    assert error_bars("H100", 1) == error_bars("NVIDIA H100 80GB HBM3", 1) != error_bars("A100-40", 1)
    assert error_bars("H100", 1).middle == pytest.approx(1.1) and error_bars("A100-40", 1).middle == pytest.approx(3.0)
    assert error_bars("A100-80", 1) is error_bars("H200", 1) is None


def test_what_cannot_be_read_is_left_out():
    write_down(run(1.5))
    path = ledger_path()
    path.write_text(path.read_text() + "no json\n" + '{"device": "mine"}\n' + "[1, 2]\n")
    write_down(run(2.5))
    assert [x.ratio for x in written_down()] == pytest.approx([1.5, 2.5])


def test_nothing_is_written_where_nobody_wants_it(monkeypatch):
    monkeypatch.setenv("MYCEL_LEDGER", "")
    write_down(run(1.0))
    assert written_down() == [] and ledger_path() is None


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MYCEL_LEDGER", str(tmp_path / "file" / "ledger.jsonl"))
    write_down(run(1.0))
