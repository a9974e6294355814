"""From one mesh to another: each rank of the target gets its part, from pieces that overlap and nothing more."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layouts import MESHES, random_layout

from mycel.errors import PlanError
from mycel.ir import Layout, Mesh, type_of
from mycel.launch import launch
from mycel.plan.across import Placed, rounds, transfers
from mycel.run.simulate import part_of


def moved(x, source, target):
    """What the target's ranks hold after the transfers, done one by one."""
    parts = {rank: part_of(x, source.layout, source.mesh, i) for i, rank in enumerate(source.ranks)}
    moves = transfers(type_of(x), source, target)
    received = {
        rank: torch.zeros_like(part_of(x, target.layout, target.mesh, i)) for i, rank in enumerate(target.ranks)
    }
    for t in moves:
        piece = parts[t.source][tuple(slice(a, a + n) for a, n in zip(t.source_start, t.shape, strict=True))]
        received[t.target][tuple(slice(a, a + n) for a, n in zip(t.target_start, t.shape, strict=True))] = piece
    return received, moves


@given(
    st.lists(st.integers(1, 9), min_size=0, max_size=3),
    st.sampled_from(MESHES),
    st.sampled_from(MESHES),
    st.integers(0, 6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_every_rank_gets_its_part(shape, first, second, start, rng):
    x = torch.randn(shape, dtype=torch.float64)
    source = Placed(random_layout(len(shape), first, rng, partial=False), first, tuple(range(first.world)))
    target = Placed(
        random_layout(len(shape), second, rng, partial=False), second, tuple(range(start, start + second.world))
    )
    received, moves = moved(x, source, target)
    for i, rank in enumerate(target.ranks):
        assert torch.equal(received[rank], part_of(x, target.layout, second, i))
    boxes = [target.box(type_of(x), i) for i in range(second.world)]
    # nothing is sent twice to anybody
    assert sum(t.numel for t in moves) == sum(math.prod(b - a for a, b in box) for box in boxes)
    own = {t for t in moves if t.source == t.target}
    in_rounds = [t for r in rounds(moves) for t in r]
    assert sorted(map(repr, in_rounds)) == sorted(repr(t) for t in moves if t not in own)
    for r in rounds(moves):
        assert len({t.source for t in r}) == len(r) == len({t.target for t in r})


def test_senders_share_the_work_and_keep_what_they_have():
    x = torch.zeros(8, 4)
    whole = Placed(Layout(((), ())), Mesh(a=4), (0, 1, 2, 3))
    moves = transfers(type_of(x), whole, Placed(Layout((("b",), ())), Mesh(b=4), (4, 5, 6, 7)))
    assert sorted(t.source for t in moves) == [0, 1, 2, 3] and sum(t.numel for t in moves) == x.numel()
    same = transfers(type_of(x), whole, Placed(Layout((("b",), ())), Mesh(b=4), (0, 1, 2, 3)))
    assert same and all(t.source == t.target for t in same)


def test_by_real_messages(tmp_path):
    assert (
        launch(
            [], 3, program=[str(Path(__file__).parent / "across_child.py")], logs=tmp_path, env={"OMP_NUM_THREADS": "1"}
        )
        == 0
    )


def test_what_is_refused():
    with pytest.raises(PlanError, match="has 2 ranks, was given \\[0\\]"):
        Placed(Layout(()), Mesh(a=2), (0,))
    with pytest.raises(PlanError, match="is a partial sum"):
        Placed(Layout((), (("a", "+"),)), Mesh(a=2), (0, 1))
