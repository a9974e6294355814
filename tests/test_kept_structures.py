"""Lists and dicts that calls leave in objects: added to, or made anew at every call; the next call finds what eager
code would find."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mycel

SEEN: list[object] = []


class Keeps(nn.Module):
    """A function of itself and the batch."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.w = fn, nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.kept, self.log, self.count = [], {}, 0
        self.memory = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
        self.state = None

    def forward(self, x):
        return self.fn(self, (x * self.w).tanh())


def losses(m, y):
    m.kept.append(y.sum().detach())
    m.kept += [y.mean().item(), "text", 3]
    return y.sum()


def by_name(m, y):
    m.log.setdefault("loss", []).append(y.sum().item())
    m.log["last"] = y.detach()
    return y.sum()


def where_positive(m, y):
    if y.sum() > 1:
        m.kept.append(y.detach())
    for part in y:
        if part > 0.5:
            m.kept.append(part.item())
    return y.sum()


def outside(m, y):
    SEEN.append(y.sum().item())
    return y.sum()


def window(m, y):
    m.kept.append(y.detach())
    m.kept = m.kept[-3:]
    return y.sum() + sum(m.kept).sum()


def window_made_anew(m, y):
    m.kept = [*m.kept[-2:], y.detach()]
    return y.sum() + sum(k.sum() for k in m.kept)


def memories(m, y):
    new = []
    for h in m.memory:
        y = (y + h).tanh()
        new.append(y.detach())
    m.memory = new
    return y.sum()


def hidden_state(m, y):
    if m.state is None:
        m.state = (torch.zeros_like(y), {"c": torch.zeros_like(y), "n": 0})
    h, rest = m.state
    h = (y + h).tanh()
    m.state = (h.detach(), {"c": (rest["c"] + h).detach(), "n": rest["n"] + 1})
    return rest["c"].sum() + h.sum()


def last_of_a_dict(m, y):
    before = m.log.get("last")
    y = y if before is None else y + before
    m.log = {"last": y.detach(), "kind": "tanh"}
    return y.sum()


CASES = [
    losses, by_name, where_positive, outside, window, window_made_anew, memories, hidden_state, last_of_a_dict,
]  # fmt: skip


@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_what_calls_keep_is_what_eager_code_keeps(fn):
    model = Keeps(fn)
    twin, run = copy.deepcopy(model), mycel.jit(model, strict=True)
    for i in range(6):
        x = torch.full((3,), i / 3 - 0.5, dtype=torch.float64)
        SEEN.clear()
        got, here = run(x), [*SEEN]
        SEEN.clear()
        want = twin(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close([*here], [*SEEN])
        for name in ("kept", "log", "memory", "state"):
            assert repr(getattr(model, name)) == repr(getattr(twin, name)), name


@pytest.mark.parametrize("fn", [memories, losses, where_positive, outside], ids=lambda f: f.__name__)
def test_one_capture_serves_all_calls(fn):
    model = Keeps(fn)
    run = mycel.jit(model, strict=True)
    for i in range(5):
        run(torch.full((3,), i / 3 - 0.5, dtype=torch.float64))
    assert len(run.entries) == 1


def test_a_structure_that_somebody_changes_is_captured_again():
    model = Keeps(memories)
    run = mycel.jit(model, strict=True)
    x = torch.ones(3, dtype=torch.float64)
    run(x)
    model.memory = [torch.ones(3, dtype=torch.float64)]
    twin = copy.deepcopy(model)
    torch.testing.assert_close(run(x), twin(x))
    model.memory = tuple(model.memory)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(run(x), twin(x))


def test_a_step_keeps_what_torch_keeps():
    model = Keeps(losses)
    twin = copy.deepcopy(model)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for i in range(3):
        x = torch.full((3,), i / 3, dtype=torch.float64)
        plain.zero_grad()
        twin(x).backward()
        plain.step()
        step(x)
    torch.testing.assert_close(model.kept[0::4], twin.kept[0::4])
    assert model.kept[1::4] == pytest.approx(twin.kept[1::4]) and model.kept[2::4] == twin.kept[2::4]
