"""The order of sequences: every epoch a permutation, any step without the steps before it."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.train.order import Order, mix

counts, batches, seeds = st.integers(1, 300), st.integers(1, 40), st.integers(-(2**70), 2**70)


@given(counts, batches, seeds, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_an_epoch_sees_every_sequence_once_across_batch_borders(count, batch, seed, epoch):
    order = Order(count, seed)
    first, last = epoch * count // batch, ((epoch + 1) * count - 1) // batch
    seen = np.concatenate([order.indices(step, batch) for step in range(first, last + 1)])
    seen = seen[epoch * count - first * batch :][:count]
    assert seen.dtype == np.int64 and sorted(seen) == list(range(count))


@given(counts, batches, seeds, st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_a_step_depends_on_its_place_alone(count, batch, seed, step):
    used = Order(count, seed)
    for other in (0, step + 3, step // 2):
        used.indices(other, batch)
    indices = used.indices(step, batch)
    assert (indices == Order(count, seed).indices(step, batch)).all()
    assert indices[-1:] == Order(count, seed).indices(step * batch + batch - 1, 1)


def test_any_step_of_a_huge_set_costs_the_same():
    order = Order(10**12, 1)
    tracemalloc.start()
    indices = order.indices(10**9, 64)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    assert (
        len(set(indices.tolist())) == 64 and indices.min() >= 0 and indices.max() < 10**12 and np.ptp(indices) > 10**11
    )


def test_epochs_and_seeds_differ():
    orders = {tuple(Order(100, seed).indices(epoch, 100)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("count", [2, 3, 5, 17])
def test_every_sequence_is_equally_likely_at_every_place(count):
    epochs = 3000
    indices = Order(count, 7).indices(0, count * epochs).reshape(epochs, count)
    table = np.stack([np.bincount(indices[:, place], minlength=count) for place in range(count)])
    expected = epochs / count
    chi2, freedom = ((table - expected) ** 2 / expected).sum(), (count - 1) ** 2
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5 + 8


def test_all_permutations_of_three_come_up():
    seen = Counter(map(tuple, Order(3, 0).indices(0, 3 * 3000).reshape(-1, 3).tolist()))
    assert len(seen) == 6 and min(seen.values()) > 400


def test_neighbours_do_not_stay_together():
    indices = Order(4096, 3).indices(0, 4096)
    assert np.mean(np.abs(np.diff(indices)) == 1) < 0.01 and abs(np.corrcoef(indices, np.arange(4096))[0, 1]) < 0.1


def test_the_order_of_a_saved_run_does_not_change():
    assert Order(10, 0).indices(0, 10).tolist() == [2, 0, 5, 1, 4, 6, 7, 8, 3, 9]
    assert Order(1_000_000, 5).indices(77, 4).tolist() == [278843, 821064, 657816, 80255]


def test_mix_is_splitmix64():
    """Its first outputs from state 0, as published."""
    golden = 0x9E3779B97F4A7C15
    states = np.array([i * golden % 2**64 for i in range(3)], np.uint64)
    assert [hex(x) for x in mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_nothing_has_no_order():
    with pytest.raises(ValueError, match="at least one"):
        Order(0)
