"""Bytes on the wire of lowered programs are those of the textbooks: the table of bench/bytes.py, a few of its rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from mycel.ir import Mesh

FILE = Path(__file__).parent.parent / "bench" / "bytes.py"
spec = importlib.util.spec_from_file_location("bench_bytes", FILE)
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)

PARAMS = 2 * table.H * 4 * table.H * 4  # bytes of a layer


@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallelism_and_zero(ranks):
    ring = (ranks - 1) / ranks * PARAMS
    assert (
        table.step_bytes("dp", ranks)
        == table.step_bytes("zero1", ranks)
        == table.step_bytes("zero2", ranks)
        == pytest.approx(2 * ring)
    )
    assert table.step_bytes("zero3", ranks) == pytest.approx(3 * ring)


ENDS = 3  # all-reduces beside those of layers: of embedding, head and loss, and the gradients of norms


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_of_megatron_sends_four_all_reduces(ranks):
    layers, one = table.megatron(ranks, 128, 128, 4)
    assert layers <= table.llama_bytes(ranks, 128, 128) <= layers + ENDS * one


@pytest.mark.parametrize("width", [128, 512])
def test_sums_travel_as_they_are_computed(width):
    """In bf16 a layer sends half of what it sends in fp32; with wide sums more."""
    layers, one = table.megatron(4, 128, width, 2)
    sent = {sums: table.llama_bytes(4, 128, width, "bf16", sums) for sums in ("as computed", "fp32")}
    assert layers <= sent["as computed"] <= layers + ENDS * one < sent["fp32"]
    assert table.llama_bytes(4, 128, width, "bf16", "added in fp32") == sent["as computed"]


@pytest.mark.parametrize("ratio", [1, 4])
def test_two_dims_against_one(ratio):
    e, tokens = ratio * table.H, table.B * table.S
    flat = table.forward_bytes(Mesh(tp=8), e, ["tp", ""], ["", "tp"], "")
    square = table.forward_bytes(Mesh(tx=4, ty=2), e, ["tx", "ty"], ["ty", "tx"], "ty")
    assert flat == pytest.approx(2 * 7 / 8 * tokens * table.H * 4)
    assert square == pytest.approx(2 * tokens * 4 * (e + 3 * table.H) / 8)
