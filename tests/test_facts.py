"""Values of the batch that decide what the program is: computed, guarded, and captured again where they differ."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import same
from stepping import adamw, agree, beside, both, cross_entropy
from torch import nn

import mycel
from mycel import feed
from mycel.capture.facts import MOST
from mycel.errors import CaptureError, TrainError

X = torch.arange(6.0).reshape(2, 3)
COUNTS = torch.tensor([1, 2])
WEIGHT = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))


def put(x):
    y = x * 1
    y[x > 1] = x[x > 1] * WEIGHT.sum()
    return y


def grown(x):
    parts = []
    if x.sum() > 20:  # lists of different lengths: no cond
        parts.append(x)
    return torch.cat([*parts, x * WEIGHT])


def counted(x):
    rows = []
    for i in range(x[0, 2].long()):
        rows.append(x * i)
    return torch.cat(rows)


def flagged(x):
    """A flag set in one branch and asked for later, where the ways do not fit together."""
    large = False
    if x.sum() > 20:
        large = True
    scaled = WEIGHT.mul
    if large:
        scaled = lambda y: torch.cat([y, y * WEIGHT])
    return scaled(x)


# name: the function, and how many programs X, X + 1 and X + 2 take
ASKED = {
    "item": (lambda x: x * x.sum().item(), 3),
    "flag": (flagged, 2),
    "bool": (lambda x: [x * 2] * bool(x.any()), 1),
    "int": (lambda x: (x * WEIGHT)[:, : int(x[0, 1])], 3),
    "index": (lambda x: x[:, : (x[0, 0] + 1).long()] * 2, 3),
    "tolist": (lambda x: torch.tensor(x.tolist()) * WEIGHT, 3),
    "numpy": (lambda x: torch.from_numpy(x.numpy()) * WEIGHT, 3),
    "list of numbers": (lambda x: sum(float(v) for v in x[0]) * x, 3),
    "mask": (lambda x: (x * WEIGHT)[x > 1], 3),
    "mask of rows": (lambda x: (x * WEIGHT)[x[:, 0] > 1], 2),
    "put": (put, 3),
    "nonzero": (lambda x: torch.nonzero(x > 3), 3),
    "where": (lambda x: torch.where(x > 1)[0], 3),
    "masked_select": (lambda x: torch.masked_select(x * WEIGHT, x[0] > 1), 3),
    "unique": (lambda x: torch.unique(x), 3),
    "repeat_interleave": (lambda x: torch.repeat_interleave(x[0] * WEIGHT, x[1].long()), 3),
    "bincount": (lambda x: torch.bincount(x.long().flatten()), 3),
    "equal": (lambda x: x * (2 if torch.equal(x, x + 1) else 3), 1),
    "allclose": (lambda x: x * (2 if torch.allclose(x, X) else 3), 2),
    "made of values": (lambda x: torch.tensor([x[0, 1], 2, x[1, 0].long()]) * WEIGHT, 1),
    "contains": (lambda x: x * 2 if 1.0 in x else x, 2),
    "a branch": (grown, 2),
    "turns": (counted, 3),
    "what the code reaches": (lambda x: torch.split(x, COUNTS.tolist(), dim=1)[1] * WEIGHT[1:], 1),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_the_batch(name):
    fn, programs = ASKED[name]
    fast = mycel.jit(fn)
    for x in (X, X + 1, X, X + 2, X + 1):
        same(fast(x), fn(x))
    assert len(fast.entries) == programs


def test_what_the_code_reaches_is_asked_anew(monkeypatch):
    fast = mycel.jit(ASKED["what the code reaches"][0])
    fast(X)
    monkeypatch.setitem(globals(), "COUNTS", torch.tensor([1, 1, 1]))
    with pytest.raises(CaptureError, match="k is 1 and 2"):  # with other counts the parts fit no product
        mycel.jit(lambda x: torch.split(x, COUNTS.tolist(), dim=1)[1] * WEIGHT[1:].reshape(2, 1, 1)[:, :, 0] @ x)(X)
    monkeypatch.setitem(globals(), "COUNTS", torch.tensor([2, 1]))
    same(fast(X), ASKED["what the code reaches"][0](X))
    assert len(fast.entries) == 2


@pytest.mark.parametrize("fn", [
    lambda x: [x] * (x * WEIGHT).sum().long().item(),
    lambda x: x[(x * WEIGHT) > 0],
    lambda x: [x] * (9 * torch.rand(())).long().item(),
    lambda x: [x] * int(torch.nn.functional.dropout(x).sum()),
])  # fmt: skip
def test_what_depends_on_parameters_or_random_numbers_is_refused(fn):
    with pytest.raises(CaptureError, match=r"a Python index was asked|a boolean mask has a shape that depends"):
        mycel.jit(fn, strict=True)(X)


def test_facts_that_hold_for_earlier_ones_alone():
    def fn(x):
        n = int(x[0, 0])
        return x.reshape(n, -1)[: int(x.reshape(n, -1)[0].sum())]

    fast = mycel.jit(fn)
    for k in (1.0, 2.0, 3.0, 1.0):
        x = torch.full((2, 3), k)
        same(fast(x), fn(x))
    assert len(fast.entries) == 3


def test_gradients_hold_the_values():
    def loss(x, w):
        kept = x[x.sum(1) > 4]
        return (kept @ w).square().sum() / len(kept)

    ours = mycel.value_and_grad(loss, argnums=1)
    for x in (X, X + 1, X):
        w = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        want = loss(x, w)
        same(ours(x, w.detach()), (want.detach(), torch.autograd.grad(want, w)[0]))


def test_values_that_keep_changing_are_told_of():
    fast = mycel.jit(lambda x: x * x.sum().item())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(MOST + 3):
            same(fast(X + i), (X + i) * (X + i).sum())
    assert len(fast.entries) == MOST + 1  # and then it is read by an island
    assert any("keep changing" in str(w.message) and "test_facts.py" in str(w.message) for w in caught)


# -- steps -----------------------------------------------------------------------------------------------------------


class Packs(nn.Module):
    """Only what is no padding goes through the layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, ids):
        mask = ids > 0
        h = self.embed(ids)
        out = torch.zeros_like(h)
        out[mask] = torch.tanh(self.layer(h[mask]))
        return self.head(out.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


def sentences(lengths):
    def batch(i):
        g = torch.Generator().manual_seed(i)
        ids = torch.randint(1, 10, (4, 6), generator=g)
        long = torch.tensor(lengths[i % len(lengths)])
        return ids * (torch.arange(6) < long[:, None]), torch.randint(0, 5, (4,), generator=g)

    return batch


def test_steps_on_packed_values():
    pair = agree(beside(Packs, adamw(), sentences([[6, 3, 2, 5], [4, 4, 4, 4], [1, 2, 3, 4]]), cross_entropy, steps=5))
    assert len(pair.step.entries) == 2  # 16 and 10 values


def test_parts_of_a_batch_that_agree():
    agree(beside(Packs, adamw(), sentences([[6, 3, 4, 5], [4, 4, 4, 4]]), cross_entropy, steps=3, accumulate=2))
    pair = both(Packs, adamw(), cross_entropy, accumulate=2)
    with pytest.raises(TrainError, match=r"(?s)parts of a batch decide.*test_facts.py"):
        pair.step(*sentences([[6, 3, 2, 5]])(0))


def test_a_batch_without_data_decides_nothing():
    pair = both(Packs, adamw(), cross_entropy)
    x, y = sentences([[6, 3, 4, 5]])(0)
    with pytest.raises(CaptureError, match="no data"):
        pair.step.prepare(x.to("meta"), y.to("meta"))
    pair.step(x, y)


def test_batches_in_parts_on_ranks_are_refused():
    model = Packs()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 0.1), loss=cross_entropy, compile=False)
    x, y = sentences([[6, 3, 4, 5]])(0)
    step(x, y)
    refused = feed.refusing_parts(step.entries[0].facts)
    with pytest.raises(TrainError, match=r"(?s)whole batch.*test_facts.py"):
        refused((x[:2], y[:2]), {})
