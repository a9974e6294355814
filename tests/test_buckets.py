"""Sizes that vary are padded to a few: the run is that of the unpadded batches, with one program for each bucket."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from golden import golden
from models import VOCAB, bert, llama
from stepping import agree, beside, cross_entropy, mlp, sgd
from torch import nn

import mycel
from mycel.errors import TrainError

LENGTHS = [5, 16, 7, 12, 9, 8, 3]


def length(i: int) -> int:
    return LENGTHS[i % len(LENGTHS)]


def text(i: int, masked: bool = False, rows: int = 2) -> dict:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(3, VOCAB, (rows, length(i)), generator=g)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if masked:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, 2:] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


@pytest.mark.parametrize(
    ("make", "batches"),
    [(lambda: llama(num_hidden_layers=1), text), (bert, lambda i: text(i, masked=True))],
    ids=["causal", "masked"],
)
def test_lengths_in_buckets(make, batches):
    """Loss by loss the run of the plain loop, which pads nothing."""
    pair = agree(beside(make, sgd(), batches, steps=len(LENGTHS), pad={"input_ids": {1: [8, 16]}}))
    assert len(pair.step.entries) == 2
    assert abs(pair.step.evaluate(**batches(0)).item() - pair.twin.eval()(**batches(0)).loss.item()) < 1e-4


def test_sixty_lengths_are_four_programs(monkeypatch):
    """In any order; loss by loss what torch makes of what was not padded."""
    captured = []
    compile_for = mycel.Step.prepare
    monkeypatch.setattr(mycel.Step, "prepare", lambda *a, **k: captured.append(k) or compile_for(*a, **k))

    def words(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(0, 9, (2, 5 + i * 7 % 60), generator=torch.Generator().manual_seed(i))
        return ids, ids.roll(1, 1)

    def loss(out, labels):
        return cross_entropy(out.transpose(1, 2), labels)

    assert len({words(i)[0].shape[1] for i in range(60)}) == 60
    sizes = {1: [16, 32, 48, 64]}
    make = lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9)).double()
    pad = {0: sizes, 1: {**sizes, "value": -100}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agree(beside(make, sgd(), words, loss, steps=60, pad=pad), loss=1e-9, params=1e-9)
    assert len(captured) == 4


def test_accumulated_calls_and_parts():
    """Padding goes with accumulate and with accumulation over calls."""
    pad = {"input_ids": {1: [16]}}
    one, two = (beside(lambda: llama(num_hidden_layers=1), sgd(), text, steps=1, pad=pad, accumulate=k) for k in (1, 2))
    agree(two)
    loss = one.step.accumulate(**text(1))
    assert abs(loss.item() - one.model(**text(1)).loss.item()) < 1e-5
    one.step.apply()
    assert len(one.step.entries) == 1


def test_rows_in_buckets():
    """A smaller last batch, by position."""

    def rows(i: int):
        g = torch.Generator().manual_seed(i)
        n = (8, 8, 3, 5)[i]
        return torch.randn(n, 6, generator=g), torch.randint(0, 5, (n,), generator=g)

    pad = {0: {0: [8]}, 1: {0: [8], "value": -100}}
    pair = agree(beside(mlp, sgd(), rows, cross_entropy, steps=4, pad=pad))
    assert len(pair.step.entries) == 1


def test_dropout_is_no_part_of_what_is_compared():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Dropout(0.5), nn.Linear(4, 9))

    def loss(out, labels):
        return F.cross_entropy(out.transpose(1, 2), labels)

    step = mycel.train_step(model, sgd()(model), loss=loss, pad={0: {1: [8]}, 1: {1: [8], "value": -100}})
    ids = torch.randint(0, 9, (2, 5))
    assert step(ids, ids).isfinite()


class Mean(nn.Module):
    """A mean over all positions: what is padded counts."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(1, 3), nn.BatchNorm1d(3) if norm else None

    def forward(self, x, labels):
        h = self.up(x[..., None])
        if self.norm is not None:
            h = self.norm(h.transpose(1, 2)).transpose(1, 2)
            return F.cross_entropy(h.transpose(1, 2), labels)
        return h.pow(2).mean() + F.cross_entropy(h.transpose(1, 2), labels)


REFUSED = {
    "attention that sees all": lambda: (bert(), text(0), {"input_ids": {1: [8]}}),
    "mean over positions": lambda: (
        Mean(), {"x": torch.randn(2, 5), "labels": torch.randint(0, 3, (2, 5))}, {"x": {1: [8]}}
    ),
    "batch norm over positions": lambda: (
        Mean(norm=True), {"x": torch.randn(2, 5), "labels": torch.randint(0, 3, (2, 5))}, {"x": {1: [8]}}
    ),
    "labels that count": lambda: (
        Mean(norm=True).eval(), {"x": torch.randn(2, 8), "labels": torch.randint(0, 3, (2, 8))},
        {"x": {1: [8]}, "labels": {1: [8], "value": 0}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_padding_changes_is_refused(case):
    """Also where the first batch fits its bucket: a part of it is tried."""
    torch.manual_seed(0)
    model, batch, pad = REFUSED[case]()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), pad=pad)
    with pytest.raises(TrainError, match="padding changes what is learnt"):
        step(**batch)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


MESSAGES = [
    ({"input_ids": {1: [4]}}, "more than the largest bucket, 4"),
    ({"tokens": {1: [8]}}, "no tensor 'tokens'"),
    ({"input_ids": {2: [8]}}, "no dim 2"),
    ({"input_ids": [8]}, "pad="),
    ({"input_ids": {1: 8}}, "a dim and its sizes"),
]


@pytest.mark.parametrize(("pad", "message"), MESSAGES)
def test_messages(pad, message):
    model = llama(num_hidden_layers=1)
    with pytest.raises(TrainError, match=message):
        mycel.train_step(model, torch.optim.SGD(model.parameters()), pad=pad)(**text(0))


def test_what_follows_is_known_from_the_first_batch():
    """A tensor that is as long by accident in a later batch is left alone; one that no longer is, is an error."""
    buckets = mycel.buckets.Buckets.of({"x": {1: [8]}})
    draw = random.Random(0)
    for i in range(20):
        n, other = (5, 4) if i == 0 else (draw.randint(1, 8), draw.randint(1, 8))
        batch = {"x": torch.ones(2, n), "labels": torch.ones(2, n, dtype=torch.int64), "z": torch.ones(2, other)}
        _, padded = buckets((), batch)
        assert padded["x"].shape == padded["labels"].shape == (2, 8) and padded["z"].shape == (2, other)
        assert padded["x"].sum() == 2 * n and (padded["labels"] == -100).sum() == 2 * (8 - n)
    with pytest.raises(TrainError, match="another size along dim 1"):
        buckets((), {"x": torch.ones(2, 3), "labels": torch.ones(2, 4, dtype=torch.int64)})


def test_many_sizes_without_buckets_are_told_of_once():
    """A program for each length is what one gets without `pad`: it is said, with buckets for the lengths so far."""
    model = torch.nn.Linear(3, 2)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, compile=False)

    def messages_for(lengths):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for n in lengths:
                step(torch.ones(n, 3), torch.zeros(n, dtype=torch.int64))
        return [str(w.message) for w in seen]

    assert not messages_for([5, 6, 5, 6, 7, 8, 9, 10, 11])
    text = messages_for(range(5, 24))
    assert len(text) == 1
    golden("told_many_sizes", text[0])
    pad = {0: {0: [8, 16]}, 1: {0: [8, 16], "value": -100}}
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, compile=False, pad=pad)
    assert not messages_for(range(5, 17)) and len(step.entries) == 2
