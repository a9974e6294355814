"""Masks that are data: where they hold nothing but ones attention has none, and any other batch is what it was."""

from __future__ import annotations

import copy

import pytest
import torch

import mycel
from mycel.ir import walk


class Attending(torch.nn.Module):
    """Causal attention over sequences with padding; `kept` says which tokens are none."""

    def __init__(self, window=None):
        super().__init__()
        self.embedding, self.out, self.window = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11), window

    def forward(self, ids, kept):
        x = self.embedding(ids).unflatten(2, (2, 8)).transpose(1, 2)
        at = torch.arange(ids.shape[1])
        seen = at[None, :] <= at[:, None]
        if self.window is not None:
            seen = seen & (at[None, :] > at[:, None] - self.window)
        mask = seen & kept[:, None, None, :].bool()
        y = torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)
        z = self.out(y.transpose(1, 2).flatten(2)[:, :-1])
        targets = torch.where(kept[:, 1:].bool(), ids[:, 1:], -100)
        return torch.nn.functional.cross_entropy(z.flatten(0, 1), targets.flatten())


def batch(seed, padding=0, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (4, 12), generator=generator)
    kept = torch.ones(4, 12, dtype=dtype)
    kept[0, 12 - padding :] = 0
    return ids, kept


def structure(step):
    """(has a mask, causal, window) of attention in the program of the last batch"""
    forms = {
        (e.inputs[3] is not None, e.params.get("causal", False), e.params.get("window"))
        for _, e in walk(step.program)
        if e.op.name == "attention"
    }
    (only,) = forms
    return only


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_masks_of_ones_go_and_come(window, accumulate, dtype):
    torch.manual_seed(0)
    model = Attending(window)
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, other))
    step = mycel.train_step(model, optimizer, accumulate=accumulate)
    shown = []
    for i, padding in enumerate((0, 0, 3, 5, 0)):
        data = batch(i, padding, dtype)
        loss = step(*data)
        want = other(*data)
        want.backward()
        theirs.step()
        theirs.zero_grad()
        assert torch.allclose(loss, want, rtol=1e-5), (i, padding)
        shown.append(structure(step))
    plain = (False, True, None) if window is None else (False, False, (window - 1, 0))
    assert shown[:2] == [plain] * 2 and shown[2:] == [(True, False, None)] * 3
    assert len(step.entries) == 2


@pytest.mark.parametrize("recorded", [False, True])
def test_a_mask_in_fp32_is_added_in_fp64(recorded):
    """Which torch's own attention takes for numbers in fp64 that lie there."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=recorded)
    mask = torch.randn(6, 6)
    got = mycel.jit(torch.nn.functional.scaled_dot_product_attention)(q, q, q, mask)
    torch.testing.assert_close(got, (q @ q.mT / 8**0.5 + mask).softmax(-1) @ q)


def test_ones_that_no_mask_depends_on_are_data():
    class Weighted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(3, 1)

        def forward(self, x, weight):
            return (self.one(x) * weight).sum()

    model = Weighted()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.ones(4, 3), torch.ones(4, 1, dtype=torch.int64))
    step(torch.ones(4, 3), torch.zeros(4, 1, dtype=torch.int64))
    assert len(step.entries) == 1
