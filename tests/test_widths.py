"""data.buckets: a run on rows of unequal length is the same in batches that are as wide as they need."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import training
from training import LLAMA, config, measured

from mycel.errors import TrainError
from mycel.train import widths
from mycel.train.labelled import Examples
from mycel.train.loop import train

disk = training.disk  # a fixture
QUIET = {**LLAMA, "attention_dropout": 0.0}
DRAW = random.Random(3)
CALL = widths.LocalSteps.__call__


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    records = [
        {"prompt": "a" * DRAW.randint(1, 4), "response": "b c" * DRAW.choice([1, 1, 1, 3, 9])} for _ in range(60)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def run(disk, folder, rows, monkeypatch, **data):
    """Losses of a run, and the widths it was compiled for."""
    seen = set()

    def watched(self, **part):
        seen.add(part["input_ids"].shape[1])
        out = CALL(self, **part)
        assert len(self.step.entries) <= len(self.forms)
        return out

    monkeypatch.setattr(widths.LocalSteps, "__call__", watched)
    data = {"train": str(rows), "pack": False, "length": 32, **data}
    quick = {"train": {"batch": 2, "steps": 6}, "evaluate": {"every": 6, "batches": 1}, "checkpoint": {"every": 6}}
    assert train(config(disk, folder, data=data, model={"config": QUIET}, **quick)) == 0
    return [m["loss"] for m in measured(folder) if "loss" in m], seen


def test_the_same_run_in_narrower_batches(disk, tmp_path, rows, monkeypatch):
    plain, none = run(disk, tmp_path / "plain", rows, monkeypatch)
    narrow, used = run(disk, tmp_path / "narrow", rows, monkeypatch, buckets=[16])
    assert not none and len(used) > 1 and used == {16, 32}
    np.testing.assert_allclose(narrow, plain, rtol=1e-5)


@pytest.mark.parametrize("shape", [(5, 9), (5, 2, 9)])
def test_widths_hold_the_longest_row(shape):
    """Whatever rows are asked for: nothing that counts is cut, and no smaller bucket would do."""
    g = np.random.default_rng(0)
    lengths = g.integers(1, 10, shape[:-1])
    mask = (np.arange(9) < lengths[..., None]).astype(np.int64)
    split = Examples({"input_ids": mask * 7, "attention_mask": mask, "labels": np.arange(5)}, 9, np.zeros(5, np.uint64))
    in_buckets = widths.Widths.of(split, [6, 2, 4, 100])
    assert in_buckets.sizes == (2, 4, 6, 9)
    for _ in range(20):
        at = g.integers(0, 5, 3)
        narrow = in_buckets.at(at)
        batch = narrow.batch(at)
        longest = lengths[at].max()
        assert batch["attention_mask"].sum() == lengths[at].sum() and batch["labels"].shape == (3,)
        assert narrow.width >= longest and not any(longest <= n < narrow.width for n in in_buckets.sizes)


def test_rows_of_one_length_have_no_buckets(disk, tmp_path, capsys):
    with pytest.raises(TrainError, match=r"data\.buckets is for rows of unequal length"):
        train(config(disk, tmp_path / "run", data={"buckets": [8]}))
