"""What captured code changes: updated as eager code would, views and in-place updates included."""

from __future__ import annotations

import types

import pytest
import torch
from models import same, state
from test_capture import X, agrees
from torch import nn

import mycel

SCALE = torch.tensor(2.0)


class Stateful(nn.Module):
    """All ways in which modules keep something."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.last = torch.zeros(3)
        self.grown = None

    def forward(self, x):
        self.steps += 1
        self.cache[:2] = x
        self.cache[2:].copy_(x * 2)
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.last = x.sum(0)
        self.grown = x + self.last
        return self.norm(x) + self.mean, self.cache, self.cache[1], self.steps


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_state_of_modules_is_updated(mode):
    model, twin = Stateful(), Stateful()
    fast = mycel.jit(model, mode=mode)
    cache, steps = model.cache, model.steps
    for i in range(4):
        model.train(i < 2)
        twin.train(i < 2)
        same(fast(X * i), twin(X * i))
        same(state(model), state(twin))
        same((model.last, model.grown), (twin.last, twin.grown))
    assert model.cache is cache and model.steps is steps


class Shift(nn.Module):
    """A delay line: buffers and attributes handed on by reference."""

    def __init__(self):
        super().__init__()
        for name in ("a", "b"):
            self.register_buffer(name, torch.zeros(3))
        self.c, self.pair, self.table = (
            torch.zeros(3),
            (torch.zeros(3), None),
            {"x": torch.zeros(3), "y": [torch.zeros(3)]},
        )

    def forward(self, x):
        out = self.a + self.b + self.c + self.pair[0] + self.table["x"] + self.table["y"][0]
        self.c, self.b, self.a = self.b, self.a, x[0]
        self.pair = (self.c + 1, {"n": self.a})
        self.table["x"], self.table["y"][0] = self.table["y"][0], x[1] * 3
        return out


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_state_that_is_handed_on(mode):
    model, twin = Shift(), Shift()
    fast = mycel.jit(model, mode=mode)
    for i in range(5):
        same(fast(X + i), twin(X + i))
        same(state(model), state(twin))
        same((model.c, model.pair, model.table), (twin.c, twin.pair, twin.table))


def test_state_of_plain_objects_is_updated():
    class Average:
        def __init__(self):
            self.mean, self.count = torch.zeros(3), 0

        def __call__(self, x):
            self.mean = 0.5 * self.mean + x.mean(0)
            return self.mean * 2

    average, twin = Average(), Average()
    fast = mycel.jit(average)
    for i in range(3):
        same(fast(X + i), twin(X + i))
        same(average.mean, twin.mean)
    assert len(fast.entries) == 1


def test_results_do_not_change_with_later_updates():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x):
            before = self.count.clone()
            self.count.add_(x)
            return before

    fast = mycel.jit(Counter())
    first = fast(torch.ones(2))
    second = fast(torch.ones(2))
    same((first, second), (torch.zeros(2), torch.ones(2)))


def test_arguments_are_updated_in_place():
    def fn(x, y):
        x.mul_(2)
        y[0] = x[1]
        return x + 1

    for mode in ("graph", "eager"):
        args, twins = (X.clone(), X.clone()), (X.clone(), X.clone())
        fast = mycel.jit(fn, mode=mode)
        for _ in range(2):
            same(fast(*args), fn(*twins))
            same(args, twins)


VIEWS = {
    "slice": lambda x: x[:, 1:].add_(1),
    "select": lambda x: x[0].mul_(3),
    "step": lambda x: x[:, ::2].zero_(),
    "transpose": lambda x: x.t()[0].add_(1),
    "reshape": lambda x: x.view(3, 2)[1].add_(5),
    "flatten": lambda x: x.flatten()[2:4].fill_(7.0),
    "chunk": lambda x: x.chunk(3, 1)[1].neg_(),
    "split": lambda x: x.split([1, 2], 1)[1].add_(1),
    "unbind": lambda x: x.unbind(1)[2].add_(1),
    "diagonal": lambda x: x.diagonal().add_(1),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0).unsqueeze(-1).add_(1),
    "narrow": lambda x: x.narrow(1, 0, 2).clamp_(max=1.0),
    "permute": lambda x: x.permute(1, 0).add_(torch.arange(3.0)[:, None]),
    "expand": lambda x: x[:1].expand(1, 3).add_(1),
    "movedim": lambda x: x.movedim(0, 1)[1].add_(1),
    "index_put": lambda x: x.index_put_((torch.tensor([0, 1]), torch.tensor([1, 2])), torch.tensor([9.0, 8.0])),
    "assign": lambda x: x.__setitem__((slice(None), 1), torch.tensor([5.0, 6.0])),
    "assign_mask": lambda x: x.__setitem__(x > 2, 0.0),
    "assign_number": lambda x: x.__setitem__(0, 4),
    "masked_fill": lambda x: x.masked_fill_(x > 2, -1.0),
    "ellipsis": lambda x: x[..., None, 0].mul_(2),
    "detach": lambda x: x.detach().add_(1),
    "data": lambda x: x.data.add_(1),
    "out": lambda x: torch.add(x, 1, out=x),
    "scatter": lambda x: x.scatter_(1, torch.tensor([[0], [2]]), 5.0),
    "swap": lambda x: x.copy_(x.flip(1)),
    "cumulative": lambda x: x.cumsum_(1),
    "iadd": lambda x: x.__iadd__(x.sum()),
    "real": lambda x: torch.view_as_complex(x[:, :2].clone()).mul_(2j).real.add_(1),
    "imul_view": lambda x: x[1].__imul__(2),
    "t": lambda x: x.T.fill_diagonal_(3.0) if x.shape[0] == x.shape[1] else x.mT.add_(1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_and_in_place_updates(name):
    def fn(x):
        x = x.clone()
        whole, part = x.view(-1), x[1]
        out = VIEWS[name](x)
        return x * 1, whole * 1, part * 1, out

    agrees(fn, X)


def test_dropout_draws_from_torchs_generator():
    drop = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    fast, x = mycel.jit(drop), torch.ones(64, 64)
    torch.manual_seed(3)
    a, b = fast(x), fast(x)
    torch.manual_seed(3)
    same((fast(x), fast(x)), (a, b))
    assert not torch.equal(a, b)
    torch.manual_seed(4)
    assert not torch.equal(fast(x), a)
    assert abs((a > 0).float().mean() - 0.25) < 0.05
    assert fast.program(x).inputs[-1].name == "key"


def test_containers_that_grow_or_shrink_are_noticed():
    items, table, config = [1, 2], {"a": 1}, types.SimpleNamespace(k=2)

    class Config:
        pass

    settings = Config()
    x = torch.ones(2)
    length = mycel.jit(lambda x: x * len(items))
    member = mycel.jit(lambda x: x * 2 if "b" in table else x)
    optional = mycel.jit(lambda x: x * getattr(settings, "k", 1))
    assert [float(f(x)[0]) for f in (length, member, optional)] == [2, 1, 1]
    items.append(3)
    table["b"] = 0
    settings.k = config.k
    assert [float(f(x)[0]) for f in (length, member, optional)] == [3, 2, 2]
    items.clear()
    del table["b"], settings.k
    assert [float(f(x)[0]) for f in (length, member, optional)] == [0, 1, 1]


def test_a_parameter_that_code_gives_another_dtype_is_refused():
    """torch changes it for good, at the first call alone: no program does that."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3).double()

        def forward(self, x):
            return self.inner.to(torch.float32)(x)

    with pytest.raises(mycel.CaptureError, match=r"becomes one of torch\.float32"):
        mycel.jit(Router())(X)
    model = Router()
    want = model(X)
    same(mycel.jit(model)(X), want)


def test_an_argument_that_is_also_reached_otherwise():
    def fn(x):
        return x * SCALE

    fast = mycel.jit(fn)
    for x in (SCALE, SCALE + 1, SCALE):
        same(fast(x), x * SCALE)


class KeyQueue(nn.Module):
    """A window of a buffer, from a place that the call itself moves on, read and written in several ways."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("queue", torch.zeros(8, 3))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        y, at = x * self.w, int(self.at)
        loss = (self.queue.clone()[at : at + 2] + y).pow(2).sum()
        with torch.no_grad():
            self.queue[at : at + 2] = y
            self.queue[at + 1 : at + 2, 1:].mul_(2)
            self.queue[:, :2][at : 2 + at] += 1
            self.at[0] = (at + 2) % 8
        return loss


def test_windows_that_move_on_are_views():
    model, twin = KeyQueue(), KeyQueue()
    run = mycel.jit(model, strict=True)
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(2, 3)
        got, want = run(x), twin(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(model.queue, twin.queue)
        got.backward()
        want.backward()
        torch.testing.assert_close(model.w.grad, twin.w.grad)
    assert len(run.entries) == 1
