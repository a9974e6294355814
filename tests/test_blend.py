"""Several sources in given shares: exact in every block, each source once an epoch, any rank's rows by themselves."""

from __future__ import annotations

import numpy as np
import training
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from training import config

from mycel.train.assemble import assemble
from mycel.train.blend import BLOCK, BlendOrder
from mycel.train.progress import Progress
from mycel.train.waiting import Waiting

disk = training.disk  # a fixture


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 700), st.floats(0.01, 10)), min_size=2, max_size=4),
    st.integers(40, 90),
    st.integers(0, 5),
)
def test_shares_are_exact_and_every_sequence_comes_once_an_epoch(sources, batch, seed):
    counts, weights = zip(*sources, strict=True)
    order = BlendOrder(counts, weights, seed)
    shares = order.shares()
    assert sum(shares) == BLOCK and min(shares) >= 1
    exact = np.array(weights) / sum(weights) * BLOCK
    assert all(abs(n - x) < 1 or n == 1 or 1 in shares for n, x in zip(shares, exact, strict=True))
    steps = 2 * BLOCK // batch + 1
    seen = np.concatenate([order.indices(i, batch) for i in range(steps)])[: 2 * BLOCK]
    bases = np.concatenate([[0], np.cumsum(counts)])
    for i, count in enumerate(counts):
        mine = (seen >= bases[i]) & (seen < bases[i + 1])
        assert mine[:BLOCK].sum() == mine[BLOCK:].sum() == shares[i]
        times = np.bincount(seen[mine] - bases[i], minlength=count)
        assert times.max() - times.min() <= 1
    rows = range(batch // 3, batch)
    assert np.array_equal(order.indices(7, batch, rows), order.indices(7, batch)[rows.start :])


def test_a_run_sees_its_sources_in_their_shares(disk, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 4000)
    (tmp_path / "b.txt").write_text("b" * 4000)
    named = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    sections = {"data": {"train": named, "weights": [3, 1]}, "train": {"batch": 50}}
    assembled = assemble(config(disk, tmp_path / "run", **sections), Waiting(Progress(Console(quiet=True), 1)))
    ids = np.concatenate([assembled.batch(step)["input_ids"].numpy()[:, 0] for step in range(BLOCK // 50)])
    assert (ids == ord("a")).sum() == 750 and (ids == ord("b")).sum() == 250
    assert "75.0%" in assembled.data.report[0] and assembled.data.validation.count > 1
    held = assembled.data.validation.batch(range(assembled.data.validation.count))["input_ids"]
    assert {chr(i) for i in held[:, 0]} == {"a", "b"}
