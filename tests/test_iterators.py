"""Iterators that live outside of the code: every call goes on with them, and leaves them, as plain PyTorch does."""

import itertools
from collections import deque
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import mycel

pytestmark = pytest.mark.filterwarnings("ignore:.*runs as plain Python")
X = torch.arange(8.0, dtype=torch.float64).reshape(2, 4) / 4


class Scaled(nn.Module):
    """An iterator in an attribute."""

    def __init__(self, items):
        super().__init__()
        self.linear, self.items = nn.Linear(4, 3, dtype=torch.float64), items

    def forward(self, x):
        return (self.linear(x) * next(self.items)).square().sum()


class Counted:
    """An iterator that is no builtin one."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.number


class Looped(Scaled):
    def forward(self, x):
        total = x.new_zeros(())
        for item in self.items:
            total = total + (self.linear(x) * item).square().sum()
            if item % 2 == 0:
                break
        return total


class Restarted(Scaled):
    """The code makes another one where it ends."""

    def forward(self, x):
        try:
            item = next(self.items)
        except StopIteration:
            self.items = iter([0.5, 0.25])
            item = next(self.items)
        return (self.linear(x) * item).square().sum()


class Layers(nn.Module):
    """Items decide which parameters there are gradients for."""

    def __init__(self, of_modules):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 3, dtype=torch.float64) for _ in range(3))
        self.items = itertools.cycle(self.layers if of_modules else range(3))

    def forward(self, x):
        item = next(self.items)
        layer = item if isinstance(item, nn.Module) else self.layers[item]
        return layer(x).square().sum()


class Pair(NamedTuple):
    items: Any
    scale: Any


class Nested(Scaled):
    """An iterator somewhere in what an attribute holds."""

    def __init__(self, held, chosen):
        super().__init__(None)
        self.held, self.chosen = held, chosen

    def forward(self, x):
        return (self.linear(x) * self.chosen(self.held)).square().sum()


def numbers():
    yield from (1.0, 2.0, 0.5, 0.25, 3.0, 1.5, 0.75, 4.0)


def taken_by_default(items):
    return lambda held, items=items: next(items)


def by_default():
    """An iterator that is the default of an argument, and gone through in a loop."""
    items = numbers()
    return lambda held, items=items: [item for _, item in zip(range(1), items, strict=False)].pop()


NESTED = {
    "tuple": lambda: Nested((itertools.cycle([1.0, 2.0, 3.0]), 5), lambda held: next(held[0])),
    "list": lambda: Nested([numbers(), 5], lambda held: next(held[0])),
    "dict": lambda: Nested({"a": (1, numbers())}, lambda held: next(held["a"][1])),
    "tuples": lambda: Nested(((numbers(), 1), [numbers()]), lambda held: next(held[0][0]) + 2 * next(held[1][0])),
    "named": lambda: Nested(Pair(numbers(), 2.0), lambda held: next(held.items) * held.scale),
    "beside a tensor": lambda: Nested([(numbers(), X[0, 1:])], lambda held: next(held[0][0]) * held[0][1]),
    "deque": lambda: Nested((deque([1.0, 2.0, 3.0]), 5), lambda held: [held[0][0], held[0].rotate()][0]),
    "default": lambda: Nested(None, taken_by_default(numbers())),
    "default, in a loop": lambda: Nested(None, by_default()),
}
MODELS = {
    "cycle": lambda: Scaled(itertools.cycle([1.0, 2.0, 3.0])),
    "list": lambda: Scaled(iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
    "count": lambda: Scaled(itertools.count(1)),
    "generator": lambda: Scaled(i / 2 for i in range(1, 9)),
    "map of tensors": lambda: Scaled(map(torch.tensor, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])),
    "own class": lambda: Scaled(Counted()),
    "for": lambda: Looped(iter(range(1, 20))),
    "restarted": lambda: Restarted(iter([1.0, 2.0])),
    "numbers of layers": lambda: Layers(of_modules=False),
    "layers": lambda: Layers(of_modules=True),
}


def twin(make):
    """A model and its optimizer, the same every time: generators cannot be copied."""
    torch.manual_seed(0)
    model = make()
    return model, torch.optim.SGD(model.parameters(), lr=0.02)


def followed(call, optimizer=None, steps=5):
    """Losses of some calls; with an optimizer, of steps in plain PyTorch."""
    losses = []
    for i in range(steps):
        loss = call(X + i)
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_every_call_goes_on(name):
    plain, optimizer = twin(MODELS[name])
    expected = followed(plain, optimizer)
    stepped, mine = twin(MODELS[name])
    assert followed(mycel.train_step(stepped, mine)) == pytest.approx(expected)
    jitted, mine = twin(MODELS[name])
    assert followed(mycel.jit(jitted), mine) == pytest.approx(expected)
    for model in (stepped, jitted):
        assert all(torch.allclose(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    rest = next(plain.items)
    if not isinstance(rest, nn.Module):
        assert next(stepped.items) == rest and next(jitted.items) == rest


@pytest.mark.parametrize("name", NESTED)
def test_every_call_goes_on_wherever_it_is_held(name):
    plain, optimizer = twin(NESTED[name])
    expected = followed(plain, optimizer)
    assert len({round(loss, 9) for loss in expected}) == 5
    stepped, mine = twin(NESTED[name])
    assert followed(mycel.train_step(stepped, mine)) == pytest.approx(expected)
    jitted, mine = twin(NESTED[name])
    assert followed(mycel.jit(jitted), mine) == pytest.approx(expected)
    assert type(stepped.held) is type(plain.held)
    assert torch.equal(torch.as_tensor(stepped.chosen(stepped.held)), torch.as_tensor(plain.chosen(plain.held)))


def test_of_closures_and_beside_captured_code():
    """Around the call that asks for the item everything is captured."""

    def make():
        items, head = itertools.cycle([1.0, 2.0, 3.0]), nn.Linear(4, 4)

        def scaled(x):
            return x * next(items)

        return lambda x: head(scaled(x).tanh()).sum(), head

    torch.manual_seed(0)
    plain, _ = make()
    torch.manual_seed(0)
    fast = mycel.jit(make()[0])
    for i in range(4):
        x = X.float() + i
        assert fast(x).item() == pytest.approx(plain(x).item(), rel=1e-5)
    assert len(fast.entries) == 1 and "tanh" in str(fast.program(X.float()))


def test_one_that_is_replaced_between_calls():
    model, twin_model = Scaled(iter([1.0, 2.0])), Scaled(iter([1.0, 2.0]))
    twin_model.load_state_dict(model.state_dict())
    fast = mycel.jit(model)
    for items in ([1.0, 2.0], [5.0, 6.0]):
        model.items, twin_model.items = iter(items), iter(items)
        for _ in items:
            assert torch.allclose(fast(X), twin_model(X))
        with pytest.raises(StopIteration):
            next(model.items)


def test_of_parameters_is_refused():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(torch.ones(3) * i for i in (1, 2))
            self.items = itertools.cycle([*self.weights])

        def forward(self, x):
            return (x * next(self.items)).sum()

    model = Chosen()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mycel.CaptureError, match="items, a cycle that lives outside of the function, is used"):
        step(torch.ones(3))


def test_strict_refuses():
    with pytest.raises(mycel.CaptureError, match="items, a count that lives outside of the function, is used"):
        mycel.jit(Scaled(itertools.count()), strict=True)(X)


@pytest.mark.parametrize("given", [iter([2.0, 3.0]), (iter([2.0, 3.0]), X), {"items": [itertools.count()]}])
def test_of_arguments_is_refused_by_its_name_and_not_touched(given):
    name = {tuple: "given.0", dict: "given.items.0"}.get(type(given), "given")
    items = {tuple: lambda: given[0], dict: lambda: given["items"][0]}.get(type(given), lambda: given)()
    with pytest.raises(mycel.CaptureError, match=rf"the argument {name}, of type \w+, is an iterator") as refused:
        mycel.jit(lambda x, given: x * 2)(X, given=given)
    assert refused.value.file == __file__ and "next(…) before the call" in refused.value.hint
    assert next(items) in (0, 2.0)
