"""Runs are written down with what was predicted of them, and say how far predictions are off."""

from __future__ import annotations

import pytest

from mycel.ir import Mesh
from mycel.plan.cluster import Cluster
from mycel.plan.ledger import (
    BLOCK,
    ENOUGH,
    FAR,
    Correction,
    Measured,
    PartTimes,
    basis_of,
    correction,
    error_bars,
    ledger_path,
    part_bars,
    write_down,
    written_down,
)


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


def seen(computing: float, waiting: float, ranks: int = 1, device: str = "mine", basis: str = "figures") -> Measured:
    """A run that computes and waits so many times longer than its figures say: 100 ms and, of several ranks, 50 ms."""
    waiting_s = 0.05 if ranks > 1 else 0.0
    measured_s = computing * 0.1 + waiting * waiting_s
    return Measured(device, ranks, 0.1 + waiting_s, measured_s, 1, 1, "a model", 9, 0.1, waiting_s, basis)


def test_what_runs_took_corrects_the_next_prediction_by_the_same_figures():
    for computing in (1.5, 1.4, 90.0, 1.6, 1.5):  # of which one was disturbed
        write_down(seen(computing, 1.0))
        write_down(seen(4.0, 1.0, device="other"))
        write_down(seen(4.0, 1.0, basis="other figures"))
    for _ in range(3):
        write_down(seen(1.5, 3.0, ranks=4))
    alone, several = correction("mine", 1, "figures"), correction("mine", 4, "figures")
    assert alone.runs == 5 and alone.computing == pytest.approx(1.5)
    assert several.runs == 3 and (several.computing, several.waiting) == pytest.approx((1.5, 3.0))
    assert correction("mine", 8, "figures") is correction("mine", 1, "no such figures") is None
    assert error_bars("mine", 4, several, "figures").middle == pytest.approx(1.0)
    write_down(seen(1e4, 1.0, basis="far off"))
    assert correction("mine", 1, "far off").computing == FAR
    for _ in range(2):  # nobody ran alone: computing and waiting cannot be told apart
        write_down(seen(2.0, 2.0, ranks=2, basis="together"))
    together = correction("mine", 2, "together")
    assert together.computing == together.waiting == pytest.approx(2.0)


def test_a_cluster_is_corrected_by_runs_on_it_and_by_no_others():
    wires = [{"name": "host", "bytes_s": 1e9, "start_s": 1e-5}]
    device = {"name": "mine", "half": 1e12, "bytes_s": 1e11, "memory": "1GiB"}
    cluster = Cluster.read({"device": device, "devices": 2, "levels": wires})
    assert cluster.corrected is cluster
    basis = basis_of(cluster.hardware)
    write_down(seen(2.0, 1.0, basis=basis))
    write_down(seen(2.0, 4.0, ranks=2, basis=basis))
    slower = cluster.corrected
    assert (
        slower.hardware.half == cluster.hardware.half / 2 and slower.hardware.launch_s == 2 * cluster.hardware.launch_s
    )
    links = [each.hardware.links(Mesh(dp=2)).of(("dp",)) for each in (cluster, slower)]
    assert links[0].seconds("all_reduce", 2, 1e6) * 4 == pytest.approx(links[1].seconds("all_reduce", 2, 1e6))
    other = Cluster.read({"device": {**device, "bytes_s": 2e11}, "devices": 2, "levels": wires})
    assert (
        other.corrected is other
        and Cluster.read({"device": device, "devices": 4, "levels": wires}).corrected.correction is None
    )


def test_bars_of_blocks_and_of_collectives_are_their_own():
    """By hand; a level that nobody has seen has the bars of the same collective over others, another one has none."""
    for ratio in (1.0, 2.0, 3.0):
        blocks = tuple(PartTimes(BLOCK, f"layer_{k}", 4, 0.01, 0.01 * ratio * k) for k in (1, 2))
        hidden = PartTimes("all_gather over host", "all_gather over dp", 4, 0.0, 0.5)
        parts = (*blocks, PartTimes("all_reduce over host", "all_reduce over tp", 8, 0.02, 0.1 * ratio), hidden)
        write_down(Measured("mine", 2, 0.1, 0.1, 1, 1, basis="figures", parts=parts))
    assert written_down()[-1].parts == parts
    assert part_bars("mine", 4, BLOCK).middle == pytest.approx(2.5) and part_bars("mine", 4, BLOCK).runs == 3
    assert part_bars("mine", 2, "all_reduce over host") == part_bars("mine", 2, "all_reduce over network")
    assert part_bars("mine", 2, "all_reduce over host").middle == pytest.approx(10.0)
    assert part_bars("mine", 2, "all_gather over host") is part_bars("mine", 1, BLOCK) is None
    by = Correction(3, 2.5, 5.0)
    assert str(by) == "computing takes 2.50 times, messages 5.00 times what the figures say, as in 3 runs here"
    assert (
        str(Correction(1, 2.0, 2.0)) == "computing and messages take 2.00 times what the figures say, as in 1 run here"
    )
    assert part_bars("mine", 2, BLOCK, by, "figures").middle == pytest.approx(1.0)
    assert part_bars("mine", 2, "all_reduce over host", by, "figures").middle == pytest.approx(2.0)
    assert part_bars("mine", 2, BLOCK, by, "other figures") is None
