"""A zoo of control flow: small functions of f64 tensors, each with argument lists that take its different ways.

    @case((X,), (-X,))            the argument lists; all of one signature, so that one capture must serve them all
    @case(..., has={"cond"})      control-flow operators the program must hold (default: any of cond, loop, scan)

All are differentiable almost everywhere with respect to their float tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types

import torch
from torch import nn

T = functools.partial(torch.tensor, dtype=torch.float64)
X = T([0.5, -1.5, 2.0])
Y = T([1.0, 0.25, -0.75])
N = torch.tensor
ANY = frozenset({"cond", "loop", "scan"})


@dataclasses.dataclass(frozen=True)
class Case:
    fn: object
    arguments: tuple[tuple, ...]
    has: frozenset[str]


CASES: dict[str, Case] = {}


def case(*arguments, has=ANY, name=None):
    def enter(fn):
        key = name or fn.__name__
        assert key not in CASES, key
        CASES[key] = Case(fn, arguments, frozenset(has))
        return fn

    return enter


# -- if ---------------------------------------------------------------------------------------------------------------


@case((X,), (-X,), has={"cond"})
def if_else(x):
    if x.sum() > 0:
        y = x * 2
    else:
        y = -x
    return y + 1


@case((X,), (-X,), has={"cond"})
def if_only(x):
    if x.sum() > 0:
        x = x * 3
    return x.sin()


@case((X,), (X - 1,), (X - 5,), has={"cond"})
def elif_chain(x):
    s = x.sum()
    if s > 0.5:
        y = x.exp()
    elif s > -3:
        y = x * x
    elif s > -100:
        y = x.cos()
    else:
        y = x
    return y


@case((X, Y), (-X, Y), (X, -Y), (-X, -Y), has={"cond"})
def nested_if(x, y):
    if x.sum() > 0:
        if y.sum() > 0:
            z = x + y
        else:
            z = x - y
        z = z * 2
    else:
        z = x * y if y.sum() > 0 else x / (y + 3)
    return z


@case((X,), (-X,), has={"cond"})
def early_return(x):
    if x.sum() > 0:
        return x * 2
    return x.exp()


@case((X,), (X - 1,), (X - 5,), has={"cond"})
def many_returns(x):
    if x.sum() > 0.5:
        return x
    y = x * 2
    if y.sum() > -10:
        return y.sin()
    z = y + 1
    return z.cos()


@case((X,), (-X,), (X + 5,), has={"cond"})
def return_in_the_middle(x):
    if x.sum() > 0:
        x = x * 2
        if x.sum() > 10:
            return x - 1
        x = x + 1
    return x * 3


@case((X,), (-X,), has={"cond"})
def return_tuples(x):
    if x.sum() > 0:
        return x, x * 2, {"a": x.sum()}
    return -x, x + 1, {"a": x.mean()}


@case((X,), (-X,), has={"cond"})
def conditional_expression(x):
    return x * 2 if x.sum() > 0 else x.exp()


@case((X,), (-X,), has={"cond"})
def conditional_number(x):
    return x * (2 if x.sum() > 0 else 0.5)


@case((X,), (-X,), has={"cond"})
def numbers_of_branches(x):
    if x[0] > 0:
        sign, n = 1.0, 3
    else:
        sign, n = -1.0, 5
    return x * sign + n / 7


@case((X,), (-X,), has={"cond"})
def number_or_tensor(x):
    scale = 1.5
    if x.sum() > 0:
        scale = x.abs().sum()
    return x * scale


@case((X,), (-X,), has={"cond"})
def first_defined_in_branches(x):
    if x.sum() > 0:
        a, b = x, x * 2
    else:
        b, a = x.sin(), x + 1
    return a * b


@case((X,), (-X,), has={"cond"})
def temporary_in_one_branch(x):
    if x.sum() > 0:
        t = x.exp()
        y = t * t
    else:
        y = x
    return y


@case((X,), (-X,), has={"cond"})
def unpacking_in_branches(x):
    if x.sum() > 0:
        (a, b), *rest = (x, x + 1), x * 2, x * 3
    else:
        (a, b), *rest = (x - 1, x), x * 5, x * 7
    return a + b * rest[0] - rest[1]


@case((X,), (-X,), has={"cond"})
def augmented(x):
    y = x.clone()
    z = y
    if x.sum() > 0:
        y += 1
        y *= 2
    else:
        y -= x
    return y + z


@case((X,), (-X,), has={"cond"})
def in_place_in_a_branch(x):
    y = torch.zeros(4, dtype=x.dtype)
    if x.sum() > 0:
        y[1:] = x
        y[0].add_(x.sum())
    else:
        y[:3].copy_(x * 2)
    return y * 2


@case((X,), (-X,), has={"cond"})
def same_python_value(x):
    if x.sum() > 0:
        kind, y = "a", x
    else:
        kind, y = "a", -x
    return y * len(kind)


@case((X,), (-X,), has={"cond"})
def pass_and_nothing(x):
    if x.sum() > 0:
        pass
    else:
        x = x - 1
    return x


@case((X,), (-X,), has=())
def static_conditions(x, flag=True, mode="b"):
    if flag and mode == "b":
        x = x * 2
    if not flag or mode is None:
        x = x * 100
    return x


@case((X,), (-X,), has=())
def known_tensors_are_static(x):
    if torch.ones(3).sum() > 2:
        x = x * 2
    return x


# -- logic ------------------------------------------------------------------------------------------------------------


@case((X, Y), (-X, Y), (X, -Y), (-X, -Y), has={"cond"})
def and_or_not(x, y):
    a, b = x.sum() > 0, y.sum() > 0
    if a and not b or b and not a:
        return x + y
    return x * y


@case((T(0.5),), (T(-0.5),), (T(3.0),), has={"cond"})
def chained_comparison(x):
    if 0 < x < 1:
        return x * 2
    return x / 3


@case((T(0.5), T(2.0)), (T(-0.5), T(1.0)), (T(3.0), T(2.0)), (T(3.0), T(3.0)), has={"cond"})
def long_chain(x, y):
    return x * 2 if -1 < x <= y != 3 else y


@case((X, N(0)), (X, N(2)), (X, N(5)), has={"cond"})
def lazy_and(x, i):
    if i < 3 and x[i] > 0:
        return x * 2
    return x


@case((X,), (-X,), has={"cond"})
def python_and_tensor(x, flag=True):
    if flag and x.sum() > 0:
        x = x * 2
    if x is not None and (x.sum() > 0 or not flag):
        x = x + 1
    return x


@case((X,), (-X,), (X * 0 - 0.1,), has={"cond"})
def any_all(x):
    if any(v > 1.5 for v in x):
        return x * 2
    if all(v < 0 for v in x):
        return x * 3
    return x


@case((T(0.5), T(2.0)), (T(2.0), T(0.5)), has={"cond"})
def max_min(x, y):
    return max(x, y) * 2 + min(x, y, x * y) * 3


@case((X,), (-X,), has={"cond"})
def not_of_a_tensor(x):
    if not x.sum() > 0:
        return x * 2
    return x


@case((X,), (X * 0,), has={"cond"})
def truth_of_a_float(x):
    if x.abs().sum():
        return x * 2 + 1
    return x


@case((X[:1],), (-X[:1],), has={"cond"})
def one_element(x):
    if x > 0:
        return x * 2
    return x * 3


@case((X,), (-X,), has={"cond"})
def walrus(x):
    if (s := x.sum()) > 0 and (m := x.max()) > 1:
        return x * s * m
    return x + s


# -- while ------------------------------------------------------------------------------------------------------------


@case((X,), (-X,), (X + 50,), has={"loop"})
def while_tensor(x):
    while x.sum() < 10:
        x = x * 1.5 + 1
    return x


@case((X,), (-X,), (X + 50,), has={"loop"})
def while_counter(x):
    n = 0
    while x.sum() < 10:
        x = x + 1
        n += 1
    return x * n


@case((X, N(0)), (X, N(1)), (X, N(7)), has={"loop"})
def while_python_counter(x, n):
    i = 0
    while i < n:
        x = x + i * 0.1
        i = i + 1
    return x / (i + 1)


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_two(x):
    y = x
    while x.sum() < 20 and y.sum() < 100:
        x, y = x + 1, y + x.abs()
    return x - y


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_break(x):
    while True:
        x = x * 1.5 + 0.5
        if x.abs().sum() > 30:
            break
        x = x + 0.1
    return x


@case((X,), (X * 3,), (X + 50,), has={"loop", "cond"})
def while_break_middle(x):
    n = 0
    while n < 12:
        if x.sum() > 20:
            break
        x = x + 1
        n = n + 1
    return x * n


@case((X,), (X * 3,), (X + 50,), has={"loop", "cond"})
def while_continue(x):
    n = (x.sum() * 0).long()
    while n < 9:
        n = n + 1
        if x.sum() > 10:
            continue
        x = x + n
    return x


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_return(x):
    while x.sum() < 40:
        if x.max() > 12:
            return x * 2
        x = x + 1
    return x - 7


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_else(x):
    while x.sum() < 15:
        x = x + 1
        if x[0] > 4:
            break
    else:
        x = x * 2
    return x


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_walrus(x):
    while (s := x.sum()) < 15:
        x = x + 1
    return x * s


@case((X,), (X + 5,), has={"loop"})
def nested_while(x):
    total = x * 0
    while x.sum() < 12:
        y = x
        while y.max() < 6:
            y = y + 1
        total = total + y
        x = x + 1.25
    return total


@case((X,), (-X,), (X + 30,), has={"loop"})
def while_float_counter(x):
    scale = 1.0
    while x.sum() * scale < 5:
        scale = scale * 1.5
        x = x + 1
    return x * scale


@case((X,), (X * 3,), has={"loop"})
def fixed_point(x):
    y = x
    delta = T(1.0)
    while delta > 1e-3:
        new = (y + x.abs() / (y.abs() + 1)) * 0.5
        delta = (new - y).abs().max()
        y = new
    return y


@case((T(2.0),), (T(5.0),), (T(0.1),), has={"loop"})
def newton(x):
    root = x
    for _ in range(100):
        step = (root * root - x) / (2 * root)
        root = root - step
        if step.abs() < 1e-9:
            break
    return root


@case((X,), (X + 5,), has={"loop"})
def while_tuple_state(x):
    state = (x, x.sum())
    while state[1] < 12:
        a, _ = state
        state = (a + 1, (a + 1).sum())
    return state[0] * state[1]


@case((X,), (X + 5,), has={"loop"})
def while_dict_state(x):
    state = {"x": x, "n": 0}
    while state["x"].sum() < 12:
        state["x"] = state["x"] + 1
        state["n"] += 1
    return state["x"] * state["n"]


@case((X,), (X + 5,), has={"loop"})
def while_list_items(x):
    state = [x, 0.5]
    while state[0].sum() < 12:
        state[0] = state[0] + state[1]
        state[1] = state[1] * 1.1
    return state[0] * state[1]


@case((X,), (X + 5,), has={"loop"})
def while_in_place(x):
    y = x.clone()
    alias = y
    while y.sum() < 12:
        y += 1
        y[0] *= 1.1
    return y * alias


@case((X,), (X + 5,), has={"loop"})
def while_temporary(x):
    while x.sum() < 12:
        t = x * 2
        x = t - x + 1
    return x


@case((X, N(1)), (X, N(4)), has={"loop"})
def defined_in_the_loop(x, n):
    i = 0
    while i < n:
        y = x * i
        i += 1
    return y


# -- for --------------------------------------------------------------------------------------------------------------


@case((X, N(0)), (X, N(1)), (X, N(6)), has={"loop"})
def for_tensor_range(x, n):
    for i in range(n):
        x = x + i * x.sin()
    return x


@case((X, N(0), N(9)), (X, N(3), N(4)), (X, N(5), N(2)), has={"loop"})
def for_range_bounds(x, a, b):
    for i in range(a, b, 2):
        x = x + i
    return x


@case((X, N(0)), (X, N(7)), has={"loop"})
def for_range_down(x, n):
    for i in range(n, 0, -2):
        x = x * 1.1 + i
    return x


@case((X, N(0)), (X, N(7)), has={"loop"})
def for_range_sum(x, n):
    total = 0.0
    for i in range(n):
        total = total + x.sum() * i
    return x * total


@case((X,), has=())
def for_short_range(x):
    for i in range(5):
        x = x + i
    return x


@case((X,), (-X,), has={"scan"})
def for_long_range(x):
    for i in range(40):
        x = x + i * 0.1 * x.cos()
    return x


@case((X,), has={"scan"})
def for_long_sum(x):
    total = 0
    for i in range(3, 60, 2):
        total = total + x * i
    return total


@case((X,), has={"scan"})
def for_long_division(x):
    s = 0.0
    for i in range(1, 30):
        s += 1 / i
    for i in range(1, 30):
        x = x + s / i * x.sin() + i // 3 - i % 4 + 0.5**i
    return x


@case((X,), (X * 3,), has={"scan", "cond"})
def for_long_continue(x):
    for i in range(30):
        if x.sum() > 5 + i:
            continue
        x = x + 1
    return x


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def for_long_break(x):
    for i in range(60):
        if x.sum() > 30:
            break
        x = x + i * 0.5
    return x * i


@case((X, N(20)), (X * 3, N(20)), (X + 50, N(2)), (X, N(2)), has={"loop"})
def for_tensor_break(x, n):
    for _ in range(n):
        x = x + 1
        if x.sum() > 15:
            break
    else:
        x = x * 100
    return x


@case((X,), (X * 3,), (X + 50,), has={"cond"})
def for_short_break(x):
    for i in range(6):
        if x.sum() > 6:
            break
        x = x + i
    return x


@case((X,), (X * 3,), (X + 50,), has={"cond"})
def for_short_return(x):
    for i in range(6):
        if x.sum() > 6:
            return x * i
        x = x + 1
    return x - 1


@case((X,), (X * 3,), (X + 50,), has={"cond"})
def for_list_break(x):
    for w in [1.0, 2.0, 3.0]:
        x = x * w
        if x.sum() > 6:
            break
    return x


@case((X,), (X * 3,), has={"cond"})
def for_zip_enumerate(x):
    for i, (a, b) in enumerate(zip([1.0, 2.0, 3.0], [x, x + 1, x * 2], strict=True)):
        if b.sum() > 2:
            x = x + a * b + i
    return x


@case((X,), (X * 3,), has={"cond"})
def for_dict(x):
    for name, w in {"a": 1.0, "bb": 2.0}.items():
        if x.sum() > w:
            x = x - w * len(name)
    return x


@case((X,), (-X,), has=())
def for_rows(x):
    total = 0
    for row in torch.stack([x, x * 2, x.sin()]):
        total = total + row * row
    return total


@case((torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(20, 3),), (torch.linspace(2, 1, 60, dtype=torch.float64).reshape(20, 3),), has={"scan"})
def for_many_rows(xs):
    h = torch.zeros(3, dtype=torch.float64)
    for x in xs:
        h = torch.tanh(h * 0.5 + x)
    return h


@case((torch.linspace(-1, 1, 20, dtype=torch.float64),), (torch.linspace(2, 1, 20, dtype=torch.float64),), has={"scan", "cond"})
def for_numbers_of_a_tensor(xs):
    s = T(0.0)
    for x in xs:
        if x > 0:
            s = s + x * x
        else:
            s = s - x
    return s


@case((X,), (X * 3,), has={"scan"})
def nested_for(x):
    for i in range(20):
        for j in range(3):
            x = x + i * j * 0.01
    return x


@case((X, N(2)), (X, N(5)), has={"loop"})
def triangle(x, n):
    for i in range(n):
        for j in range(i):
            x = x + j * x.sin() * 0.1
    return x


@case((X, N(2)), (X, N(5)), has={"loop"})
def for_indexing(x, n):
    y = torch.zeros(8, dtype=x.dtype)
    for i in range(n):
        y[i] = x[i % 3] * i
    return y


@case((X, N(0)), (X, N(3)), has={"loop"})
def loop_variable_afterwards(x, n):
    i = 10
    for i in range(n):  # noqa: B007
        x = x + 1
    return x * i


@case((X,), has={"scan"})
def lists_of_long_loops(x):
    table = [k * 0.5 for k in range(30)]
    for _ in range(20):
        x = x + 0.1
    for k in range(30):
        table[k] = table[k] + 1
    return x * table[7]


# -- assert and raise ---------------------------------------------------------------------------------------------------


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


# -- functions ----------------------------------------------------------------------------------------------------------


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


# -- statements around ------------------------------------------------------------------------------------------------------


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
