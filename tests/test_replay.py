"""Recorded steps: what a recording is given and when it is made anew.  A stand-in for CUDA graphs records nothing but
the code and the memory of its values: replayed with a value that is not theirs, it would go wrong as a graph does."""

from __future__ import annotations

import pytest
import torch

import mycel
from mycel.run import Replayed
from mycel.run.replay import MOST
from mycel.step import Step


class Rerun:
    """The code on the values it was recorded with."""

    count = 0

    def __init__(self, code, values, device):
        Rerun.count += 1
        numbers = [x for x in values if isinstance(x, torch.Tensor) and x.dtype == torch.float64 and not x.ndim]
        if len(numbers) > 2:  # a kernel would have to read them on the host
            raise RuntimeError("a moving number\nsomewhere")
        self.code, self.values = code, list(values)
        self.results = None

    def replay(self):
        new = self.code(*self.values)
        if self.results is None:
            self.results = new
        for x, y in zip(self.results, new, strict=True):
            x.copy_(y)
        return self.results


class Net(torch.nn.Module):
    def __init__(self, dropout=0.5):
        super().__init__()
        self.one, self.two = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)
        self.norm, self.dropout = torch.nn.BatchNorm1d(8), torch.nn.Dropout(dropout)

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.two(self.dropout(self.norm(self.one(x)).relu())), y)


def recorded(patch):
    """Steps are recorded, on the CPU."""
    Rerun.count = 0
    patch.setattr(Step, "_replayed", lambda self, code, program, device, _: Replayed(code, program, device, Rerun))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)) for _ in range(count)
    ]


def losses(step, data, each=lambda i: None):
    torch.manual_seed(3)
    values = []
    for i, batch in enumerate(data):
        values.append(step(*batch))
        each(i)
    return torch.stack(values)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)


def rmsprop(model):
    return torch.optim.RMSprop(model.parameters(), lr=0.01)


def run_both(make, change, monkeypatch, **how):
    """The losses and the models of a recorded step and of a plain one, where `change` is done after each step."""
    data = batches(9)
    results = []
    for replayed in (True, False):
        with monkeypatch.context() as patch:
            if replayed:
                recorded(patch)
            torch.manual_seed(0)
            model = Net()
            optimizer = make(model)
            step = mycel.train_step(model, optimizer, **how)
            curve = losses(step, data, lambda i, s=step: change(i, s))
            results.append((step, curve, list(model.state_dict().values())))
    (ours, a, mine), (_, b, others) = results
    assert torch.equal(a, b) and len(set(a.tolist())) == len(data)
    assert all(torch.equal(x, y) for x, y in zip(mine, others, strict=True))
    return ours.entries[0].replayed


def scheduled(i, step):
    for group in step.optimizer.param_groups:
        group["lr"] *= 0.8


@pytest.mark.parametrize("make", [adam, sgd, rmsprop])
@pytest.mark.parametrize("how", [{}, {"clip_norm": 0.1}], ids=str)
def test_a_recorded_step_is_the_step(make, how, monkeypatch):
    """New batches, keys and learning rates reach it; it is recorded once."""
    replayed = run_both(make, scheduled, monkeypatch, **how)
    assert Rerun.count == 1 and not replayed.why and "second step" in str(replayed)


def test_losses_stay_what_they_were(monkeypatch):
    recorded(monkeypatch)
    torch.manual_seed(0)
    model = Net()
    step = mycel.train_step(model, adam(model))
    tensors = [step(*batch) for batch in batches(4)]
    values = [x.item() for x in tensors]
    step(*batches(1)[0])
    assert [x.item() for x in tensors] == values


def test_memory_that_moved_is_recorded_anew(monkeypatch):
    def change(i, step):
        if i == 4:
            weight = step.model.one.weight
            weight.data = weight.data.clone()
            state = step.optimizer.state[weight]
            state["exp_avg"] = state["exp_avg"].clone()

    assert not run_both(adam, change, monkeypatch).why
    assert Rerun.count == 2


def test_memory_that_moves_at_every_step(monkeypatch):
    kept = []

    def change(i, step):
        weight = step.model.one.weight
        kept.append(weight.data)
        weight.data = weight.data.clone()

    assert "elsewhere" in run_both(adam, change, monkeypatch).why
    assert Rerun.count == MOST


def test_a_number_that_moves(monkeypatch):
    """One that the kernel takes on the device, and one that it does not: then the step runs as it is."""

    def change(i, step):
        for group in step.optimizer.param_groups:
            group["weight_decay"] += 0.01

    assert not run_both(adam, change, monkeypatch).why
    assert Rerun.count == 2

    def change_more(i, step):
        change(i, step)
        for group in step.optimizer.param_groups:
            group["betas"] = (group["betas"][0] * 0.99, 0.99)

    assert "hyper beta1 of group 0" in run_both(adam, change_more, monkeypatch).why


class Scaled(torch.nn.Module):
    """Reads a tensor that others put there."""

    def __init__(self):
        super().__init__()
        self.one, self.by = torch.nn.Linear(6, 3), torch.ones(3)

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.one(x) * self.by, y)


def test_what_is_only_read_may_lie_anywhere(monkeypatch):
    """A tensor that is another at every step is copied in from the second on."""
    results = []
    for replayed in (True, False):
        with monkeypatch.context() as patch:
            if replayed:
                recorded(patch)
            torch.manual_seed(0)
            model = Scaled()
            step = mycel.train_step(model, adam(model))
            kept = []

            def change(i, model=model, kept=kept):
                kept.append(model.by)
                model.by = torch.full((3,), 1.0 + i)

            results.append((step, losses(step, batches(9), change)))
    (ours, a), (_, b) = results
    assert torch.equal(a, b) and not ours.entries[0].replayed.why
    assert Rerun.count == 2


class Deciding(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(6, 3)

    def forward(self, x, y):
        z = self.one(x)
        if z.sum() > 0:
            z = z * 2
        return torch.nn.functional.cross_entropy(z, y)


def test_what_cannot_be_recorded_is_said(monkeypatch):
    recorded(monkeypatch)
    torch.manual_seed(0)
    model = Deciding()
    step = mycel.train_step(model, adam(model))
    losses(step, batches(3))
    assert "decides" in step.entries[0].replayed.why and "test_replay.py" in step.entries[0].replayed.why
    assert Rerun.count == 0
