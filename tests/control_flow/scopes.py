"""Around branches and loops: assertions, functions, closures, objects and modules, and the statements they stand in."""

from __future__ import annotations

import functools
import math
import types

import torch
from torch import nn

from control_flow.case import CASES, Case, N, T, X, case

# -- assert and raise


@case((X,), (X + 1,), has=())
def asserts(x):
    assert x.sum() > -100, "too small"
    assert x.shape == (3,)
    return x * 2


@case((X,), (-X,), has={"cond"})
def assert_in_a_branch(x):
    if x.sum() > 0:
        assert x.max() < 10
        x = x * 2
    return x


@case((X,), (X + 1,), has=())
def raise_in_a_branch(x):
    if x.sum() > 100:
        raise ValueError("too large")
    return x * 2


@case((X, N(2)), (X, N(5)), has={"loop"})
def assert_in_a_loop(x, n):
    for i in range(n):
        assert i < 100
        x = x + i
    return x


# -- functions -------------------------------------------------------------------------------------------------------


def relu_like(x, slope=0.5):
    if x.sum() > 0:
        return x
    return x * slope


@case((X,), (-X,), has={"cond"})
def calls(x):
    return relu_like(x) + relu_like(-x, slope=0.25)


@case((X,), (-X,), has={"cond"})
def nested_function(x):
    def inner(y, factor=2.0):
        if y.sum() > 0:
            return y * factor
        return y

    return inner(x) + inner(x - 1, factor=x.sum())


@case((X,), (-X,), (X + 1,))
def function_inside_one_that_returns_from_a_loop(x):
    """Its returns are its own."""

    def inner(a):
        return a + 1, a * 2

    for k in range(3):
        if x.sum() > k + 1:
            return x - k
    y, z = inner(x)
    return y * z


@case((X,), (-X,), has={"cond"})
def closure(x):
    w = x.sum()

    def inner(y):
        return y * w if w > 0 else y

    w = w + 1
    return inner(x)


@case((X,), (-X,), has={"cond"})
def nonlocal_closure(x):
    total = x * 0

    def add(y):
        nonlocal total
        if y.sum() > 0:
            total = total + y

    add(x)
    add(x - 2)
    return total


@case((X, N(3)), (X, N(0)), has={"loop"})
def nonlocal_in_a_loop(x, n):
    total = x * 0

    def add(y):
        nonlocal total
        total = total + y

    for i in range(n):
        add(x * i)
    return total


@case((X,), (-X,), has={"cond"})
def lambdas(x):
    f = lambda y: y * 2 if y.sum() > 0 else y
    g = lambda y, h=f: h(y) + 1
    return g(x)


CASES["a_lambda"] = Case(lambda x: x * 2 if x.sum() > 0 else x.exp(), ((X,), (-X,)), frozenset({"cond"}))


@case((X,), (X * 3,), has={"cond"})
def higher_order(x):
    steps = [relu_like, functools.partial(relu_like, slope=0.1), lambda y: y if y[0] > 0 else -y]
    return functools.reduce(lambda y, f: f(y), steps, x) + sum(map(relu_like, [x, -x]))


def power(x, n):
    if n == 0:
        return torch.ones_like(x)
    y = power(x, n // 2)
    if y.sum() > 100:
        y = y * 0.5
    return y * y * x if n % 2 else y * y


@case((X,), (X * 3,), has={"cond"})
def recursion(x):
    return power(x, 5)


def doubled(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        out = fn(*args, **kwargs)
        if out.sum() > 0:
            return out * 2
        return out

    return wrapper


@doubled
def _decorated(x):
    return x.sin() if x.sum() > 0 else x.cos()


@case((X,), (-X,), (X + 3,), has={"cond"})
def decorated(x):
    return _decorated(x)


CASES["decorated_root"] = Case(_decorated, ((X,), (-X,), (X + 3,)), frozenset({"cond"}))


@torch.no_grad()
def _frozen(x):
    if x.sum() > 0:
        return x * 2
    return x


@case((X,), (-X,), has={"cond"})
def library_decorator(x):
    return _frozen(x) * x


@case((X,), (-X,), has={"cond"})
def star_arguments(*xs, **named):
    x = xs[0]
    for k, v in {"a": 1.0, **named}.items():
        if x.sum() > 0:
            x = x * v + len(k)
    return x


class Tally:
    """A plain object."""

    def __init__(self, x):
        self.total, self.count = (x * 0 if x.sum() > -100 else x), 0

    def add(self, x):
        if x.sum() > 0:
            self.total = self.total + x
            self.count += 1
        return self

    def __call__(self, x):
        while self.total.sum() < 6:
            self.add(x.abs())
        return self.total * self.count

    @staticmethod
    def scaled(x):
        return x if x.sum() > 0 else x * 0.5

    @property
    def mean(self):
        return self.total / (self.count + 1)


@case((X,), (-X,), has={"cond"})
def attributes(x):
    tally = Tally(x)
    tally.add(x).add(x + 1).add(x - 3)
    return tally.mean + tally.scaled(x)


@case((X,), (-X,), has={"loop"})
def callable_object(x):
    return Tally(x)(x)


@case((X, N(0)), (X, N(4)), has={"loop"})
def attributes_in_a_loop(x, n):
    box = types.SimpleNamespace(x=x, n=0)
    for i in range(n):
        box.x = box.x + i
        box.n += 1
    return box.x * box.n


@case((X,), (-X,), has={"cond"})
def items_in_branches(x):
    d, items = {"a": x, "b": 1.0}, [x, x]
    if x.sum() > 0:
        d["a"] = x * 2
        d["b"] = 2.0
        items.append(x + 1)
    else:
        items[0] = x * 3
        items.append(x - 1)
    return d["a"] * d["b"] + items[0] + items[2]


class Gate(nn.Module):
    """A module with control flow, buffers and attributes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(T([1.0, -0.5, 0.25]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.last = torch.zeros(3, dtype=torch.float64)

    def forward(self, x):
        if x.sum() > 0:
            self.seen += 1
            self.last = x * self.weight
        return self._tail(x)

    def _tail(self, x):
        while x.abs().sum() > 4:
            x = x * 0.75
        return x + self.last + self.seen


class Stack(Gate):
    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x):
        for gate in self.gates:
            x = gate(x)
            if x.sum() > 20:
                break
        return super().forward(x)


CASES["module"] = Case(Gate, ((X,), (-X,), (X * 5,)), frozenset({"cond", "loop"}))
CASES["modules"] = Case(Stack, ((X,), (-X,), (X * 5,)), frozenset({"cond", "loop"}))


# -- statements around


@case((X,), (-X,), has={"cond"})
def with_no_grad(x):
    with torch.no_grad():
        if x.sum() > 0:
            w = x.sum()
        else:
            w = x.mean()
    return x * w


@case((X,), (-X,), has={"cond"})
def return_inside_with(x):
    with torch.enable_grad():
        if x.sum() > 0:
            return x * 2
        x = x + 1
    return x


@case((X,), (-X,), has={"cond"})
def try_finally(x):
    try:
        if x.sum() > 0:
            return x * 2
        x = x + 1
    finally:
        x = x * 3
    return x


@case((X,), (-X,), has={"cond"})
def try_except(x):
    d = {}
    try:
        y = d["missing"]
    except KeyError:
        y = x * 2 if x.sum() > 0 else x
    else:
        y = x * 100
    return y


@case((X,), (-X,), has={"cond"})
def match_static(x, kind="sin"):
    match kind:
        case "sin" if x.ndim == 1:
            y = x.sin()
        case _:
            y = x
    return y if y.sum() > 0 else -y


@case((X,), (-X,), has={"cond"})
def comprehension(x):
    parts = [v * 2 if v > 0 else v - 1 for v in x]
    return torch.stack(parts) + math.pi


@case((X,), (-X,), has={"cond"})
def delete_and_define(x):
    y = x * 2
    del y
    if x.sum() > 0:
        y = x
        del x
        x = y + 1
    return x


@case((X, N(3)), (X, N(0)), (X * 4, N(8)), has={"loop", "cond"})
def everything(x, n):
    best, steps = x, 0
    for i in range(n):
        y = x + i
        if y.sum() > 9:
            steps += 1
            continue
        k = 0
        while k < 3:
            y = y * 1.1
            if y.max() > 5:
                break
            k += 1
        if y.sum() > 30:
            return y, steps
        best = y if y.sum() > best.sum() else best
    else:  # noqa: PLW0120
        best = best + 0.5
    return best, steps
