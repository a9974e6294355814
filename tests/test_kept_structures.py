"""Lists and dicts that calls leave in objects: added to, or made anew at every call; the next call finds what eager
code would find."""

from __future__ import annotations

import collections
import copy
import io
import random

import numpy as np
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


def by_a_key_that_is_made(m, y):
    for i, row in enumerate(y.detach()):
        if f"first {i}" not in m.log:
            m.log[f"first {i}"] = row.clone()
    return (y - torch.stack([*m.log.values()])).sum()


def by_parameter(m, y):
    return y.sum() * sum(m.log.setdefault(p, p.detach() * 2).sum() for p in m.parameters())


CASES = [
    by_a_key_that_is_made, by_parameter,
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


class Noting(nn.Module):
    """Logs in a default value, and in a tuple."""

    def __init__(self, note):
        super().__init__()
        self.w, self.logs, self.note = nn.Parameter(torch.ones(3, dtype=torch.float64)), ([], {}), note

    def forward(self, x):
        y = self.note((x * self.w).tanh().sum())
        self.logs[0].append(y.item())
        return y


def noted():
    def note(y, log=[]):  # noqa: B006
        log.append(y.item())
        return y

    return note


def counted():
    def note(y, log=[]):  # noqa: B006
        log.append(1)
        return y * len(log)

    return note


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize("make", [noted, counted])
def test_lists_in_defaults_and_tuples(make):
    model, twin = Noting(make()), Noting(make())
    run = mycel.jit(model)
    for i in range(4):
        x = torch.full((3,), i / 3 - 0.5, dtype=torch.float64)
        torch.testing.assert_close(run(x), twin(x))
        assert model.logs == twin.logs and model.note.__defaults__ == twin.note.__defaults__
        assert type(model.logs[0]) is list


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


class Remembers(nn.Module):
    """Keeps what Python alone knows the state of."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.w = fn, nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.recent, self.file, self.kept = collections.deque(maxlen=2), io.StringIO(), []
        self.numbers, self.arrays = random.Random(0), np.random.RandomState(0)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.fn(self, (x * self.w).tanh())


def last_tensors(m, y):
    loss = y.sum() + sum(k.square().sum() for k in m.recent)
    m.recent.append(y.detach())
    return loss


def last_rows_of_a_list(m, y):
    if len(m.kept) > 2:
        m.kept.pop(0)
    m.kept.append(y.detach())
    return y.sum() + torch.stack(m.kept).square().sum()


def deque_made_by_a_call(m, y):
    if not hasattr(m, "later"):
        m.later = collections.deque(maxlen=2)
    m.later.append(y.detach())
    return y.sum() + sum(m.later).sum()


def last_numbers(m, y):
    m.recent.append(y.sum().item())
    return y.sum() * len(m.recent)


def chosen_by_python(m, y):
    return y[m.numbers.randrange(3)] * m.numbers.choice([1.0, 2.0])


def chosen_by_numpy(m, y):
    return y[torch.as_tensor(m.arrays.permutation(3)[:2])].sum()


def noise_of_a_generator(m, y):
    return (y * torch.randn(3, generator=m.generator, dtype=y.dtype)).sum()


def noise_of_a_seed(m, y):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return (y * torch.randn(3, dtype=y.dtype)).sum()


def writes_a_log(m, y):
    m.file.write(f"{round(y.sum().item(), 6)}\n")
    return y.sum()


STATES = [
    last_rows_of_a_list, deque_made_by_a_call,
    last_tensors, last_numbers, chosen_by_python, chosen_by_numpy, noise_of_a_generator, noise_of_a_seed, writes_a_log,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize("fn", STATES, ids=lambda f: f.__name__)
def test_objects_with_a_state_of_their_own_go_on_as_in_eager_code(fn):
    model, twin = Remembers(fn), Remembers(fn)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for i in range(6):
        x = torch.tensor([0.3, -0.2, 0.7], dtype=torch.float64) * (i + 1)
        plain.zero_grad()
        want = twin(x)
        want.backward()
        plain.step()
        torch.testing.assert_close(step(x), want.detach())
        torch.testing.assert_close(model.w, twin.w)
        assert (
            repr((model.recent, model.kept)) == repr((twin.recent, twin.kept))
            and model.file.getvalue() == twin.file.getvalue()
        )
    if fn is noise_of_a_seed:  # one program draws from its key alone, whatever its code seeds
        assert mycel.jit(Remembers(fn), strict=True)(x).shape == ()
        return
    with pytest.raises(mycel.CaptureError, match=r"that lives outside|enerator|a list that|a deque of"):
        mycel.jit(Remembers(fn), strict=True)(x)


class Logs(nn.Module):
    """Two parts, each of which writes to the same file, and to the same deque."""

    def __init__(self, file):
        super().__init__()
        self.recent = collections.deque(maxlen=3)
        self.file, self.parts = file, nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def note(self, y):
        self.recent.append(round(y.sum().item(), 3))
        self.file.write(f"{self.recent[-1]}\n")
        return y * len(self.recent)

    def forward(self, x):
        for part in self.parts:
            x = self.note(part(x).tanh())
        return x.sum()


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
def test_a_log_that_others_write_to_loses_nothing(tmp_path):
    """Lines of all islands are there once, in their order, between those of other writers."""
    files = [(tmp_path / name).open("a+") for name in ("ours", "theirs")]
    models = []
    for file in files:
        torch.manual_seed(0)
        models.append(Logs(file).double())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    step = mycel.train_step(models[0], optimizers[0], compile=False)
    for i in range(4):
        x = torch.linspace(-1, 1, 3, dtype=torch.float64) * (i + 1)
        step(x)
        optimizers[1].zero_grad()
        models[1](x).backward()
        optimizers[1].step()
        for name in ("ours", "theirs"):
            for file in files:
                file.flush()
            with (tmp_path / name).open("a") as other:
                other.write(f"step {i}\n")
        assert models[0].recent == models[1].recent
    assert (tmp_path / "ours").read_text() == (tmp_path / "theirs").read_text()
