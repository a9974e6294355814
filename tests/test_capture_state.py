"""What captured code reaches and changes: read anew at every call, updated as eager code would, views and in-place
updates included."""

from __future__ import annotations

import dataclasses
import os
import random
import time
import types

import numpy as np
import pytest
import torch
from models import same, state
from test_capture import Owner, X, agrees
from torch import nn

import mycel

SCALE = torch.tensor(2.0)
LAYERS = {"first": nn.Linear(3, 3), "rest": [nn.Linear(3, 3)]}
OPTIONS = {"power": 2, "nested": {"shift": 1.0}}


# -- what is reached through closures, globals and attributes


def test_closures_are_read_anew():
    weight, factor = torch.ones(3), 2

    def fn(x):
        return x * weight * factor

    fast = mycel.jit(fn)
    same(fast(X), fn(X))
    weight = torch.full((3,), 5.0)
    same(fast(X), fn(X))
    weight.add_(1)
    same(fast(X), fn(X))
    assert len(fast.entries) == 1
    weight = torch.ones(2, 1)
    same(fast(X), fn(X))
    assert len(fast.entries) == 2


def test_globals_are_read_anew(monkeypatch):
    def fn(x):
        return LAYERS["first"](x) * SCALE + LAYERS["rest"][0](x)

    fast = mycel.jit(fn)
    same(fast(X), fn(X))
    monkeypatch.setitem(globals(), "SCALE", torch.tensor(-1.0))
    same(fast(X), fn(X))
    assert len(fast.entries) == 1
    monkeypatch.setitem(LAYERS, "first", nn.Linear(3, 3))
    same(fast(X), fn(X))
    monkeypatch.setitem(LAYERS, "rest", [nn.Linear(3, 3)])
    same(fast(X), fn(X))


def test_attributes_are_read_anew():
    owner = Owner()
    fast = mycel.jit(owner.method)
    same(fast(X), owner.method(X))
    owner.weight = torch.full((3,), 4.0)
    same(fast(X), owner.method(X))
    assert len(fast.entries) == 1
    owner.layer = nn.Linear(3, 3)
    same(fast(X), owner.method(X))
    same(mycel.jit(lambda x: owner.method(x))(X), owner.method(X))


def test_modules_in_containers_of_a_closure():
    modules = [nn.Linear(3, 3), {"a": nn.Linear(3, 3), "b": (nn.Linear(3, 3),)}]

    def fn(x):
        return modules[1]["b"][0](modules[1]["a"](modules[0](x)))

    fast = agrees(fn, X)
    modules[1]["a"] = nn.Linear(3, 3)
    same(fast(X), fn(X))
    modules[0].weight.data.zero_()
    same(fast(X), fn(X))


def test_tensors_in_containers_of_a_closure():
    weights = {"a": [torch.ones(3), torch.ones(3) * 2]}
    fast = mycel.jit(lambda x: x * weights["a"][0] + weights["a"][1])
    same(fast(X), X + 2)
    weights["a"][1] = torch.zeros(3)
    same(fast(X), X)
    weights["a"] = [torch.zeros(3), torch.ones(3)]
    same(fast(X), torch.ones(2, 3))


def test_a_jitted_loss_sees_the_modules_current_weights():
    model = nn.Linear(3, 1)

    def loss(x, y):
        return nn.functional.mse_loss(model(x), y)

    fast, optimizer = mycel.jit(loss), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        value = loss(X, X[:, :1])
        same(fast(X, X[:, :1]), value)
        value.backward()
        optimizer.step()
    assert len(fast.entries) == 1


class Scaled(nn.Module):
    """Reaches everything by name."""

    TABLE = torch.ones(3)

    def forward(self, x):
        return helper(x) * SCALE + self.TABLE ** OPTIONS["power"] + OPTIONS["nested"]["shift"]


def helper(x):
    return LAYERS["first"](x)


def test_what_methods_name_is_read_anew(monkeypatch):
    model = Scaled()
    for fn in (model, lambda x: model(x), types.SimpleNamespace(call=model).call):
        fast = mycel.jit(fn)
        same(fast(X), model(X))
        monkeypatch.setitem(globals(), "SCALE", SCALE + 1)
        monkeypatch.setattr(Scaled, "TABLE", Scaled.TABLE + 1)
        same(fast(X), model(X))
        assert len(fast.entries) == 1
        monkeypatch.setitem(LAYERS, "first", nn.Linear(3, 3))
        same(fast(X), model(X))
        monkeypatch.setitem(OPTIONS, "power", OPTIONS["power"] + 1)
        same(fast(X), model(X))
        monkeypatch.setitem(OPTIONS, "nested", {"shift": OPTIONS["nested"]["shift"] + 1})
        same(fast(X), model(X))
        monkeypatch.setitem(globals(), "helper", lambda x: x * 2)
        same(fast(X), model(X))
        assert len(fast.entries) == 5
        monkeypatch.undo()


def test_plain_values_are_static():
    factor = 2

    def fn(x):
        return x * factor

    fast = mycel.jit(fn)
    same(fast(X), fn(X))
    factor = 3
    same(fast(X), fn(X))
    factor = 3.0
    same(fast(X), fn(X))
    factor = 2
    same(fast(X), fn(X))
    assert len(fast.entries) == 3


def test_counters_of_captures_are_no_part_of_the_signature():
    count, seen, owner = 0, [], types.SimpleNamespace(calls=0)

    def fn(x):
        nonlocal count
        count += 1
        owner.calls += 1
        seen.append(1)
        return x * 2

    fast = mycel.jit(fn)
    for x in (X, X, X[:1], X, X[:1]):
        same(fast(x), x * 2)
    assert (count, owner.calls, len(seen)) == (2, 2, 2)


def test_default_values_that_are_tensors():
    def fn(x, w=torch.ones(3) * 3, *, b=torch.ones(3)):  # noqa: B008
        return x * w + b

    fast = agrees(fn, X)
    fn.__kwdefaults__["b"] = torch.zeros(3)
    same(fast(X), fn(X))


# -- modules ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0
        self.offset = torch.ones(3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.drop(self.second(self.first(x))) * self.scale + self.offset + self.count


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


def test_parameters_and_buffers_are_named_inputs(net):
    names = [v.name for v in mycel.capture(net, X).inputs]
    assert names == ["x", "first.weight", "first.bias", "second.weight", "second.bias", "offset", "count"]


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.first.weight.data.mul_(2),
        lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(3, 3))),
        lambda m: setattr(m, "first", nn.Linear(3, 3)),
        lambda m: setattr(m, "first", nn.Identity()),
        lambda m: setattr(m, "first", nn.Sequential(nn.Linear(3, 3), nn.ReLU())),
        lambda m: setattr(m.first, "bias", None),
        lambda m: setattr(m, "offset", torch.zeros(3)),
        lambda m: setattr(m, "offset", 0.5),
        lambda m: setattr(m, "scale", 5.0),
        lambda m: setattr(m, "count", torch.tensor(7.0)),
        lambda m: m.count.add_(1),
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
        lambda m: setattr(m.second, "weight", m.first.weight),
        lambda m: m.requires_grad_(False),
        lambda m: setattr(m.first, "forward", lambda x: x * 2),
        lambda m: m.first.register_forward_hook(lambda m, a, out: out + 1),
        lambda m: m.first.register_forward_pre_hook(lambda m, a: (a[0] - 1,)),
    ],
)
def test_changes_of_a_module_are_seen(net, change):
    fast = mycel.jit(net)
    same(fast(X), net(X))
    change(net)
    same(fast(X), net(X))
    same(fast(X), net(X))


def test_half_and_double_are_captured_again(net):
    fast = mycel.jit(net)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        net.to(dtype)
        same(fast(X.to(dtype)), net(X.to(dtype)), 2e-2 if dtype == torch.bfloat16 else 1e-5)
    assert len(fast.entries) == 3


def test_train_and_eval_are_respected(net):
    fast = mycel.jit(net)
    same(fast(X), net(X))
    fast.train()
    assert net.training and (fast(X) - net.offset == 0).any()
    net.drop.eval()
    same(fast(X), net(X))
    net.eval()
    same(fast(X), net(X))
    assert len(fast.entries) == 3


def test_tied_parameters_are_one_input():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    x = torch.tensor([[1, 2]])
    fast = agrees(model, x)
    assert len(fast.program(x).inputs) == 2
    model[1].weight = nn.Parameter(torch.randn(5, 3))
    same(fast(x), model(x))
    assert len(fast.program(x).inputs) == 3


def test_a_module_as_an_argument():
    def fn(module, x):
        return module(x) + 1

    fast = mycel.jit(fn)
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    for module in (one, two, one):
        same(fast(module, X), fn(module, X))
    assert len(fast.entries) == 2


def test_a_function_as_an_argument():
    fast = mycel.jit(lambda f, x: f(x) + 1)
    for f in (torch.sin, torch.cos, torch.sin):
        same(fast(f, X), f(X) + 1)


# -- what changes ----------------------------------------------------------------------------------------------------


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


def test_an_argument_that_is_also_reached_otherwise():
    def fn(x):
        return x * SCALE

    fast = mycel.jit(fn)
    for x in (SCALE, SCALE + 1, SCALE):
        same(fast(x), x * SCALE)


# -- guards that hold


class Makes(dict):
    """A mapping that makes a new object each time it is asked."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


LAYER_OF = Makes(relu=nn.ReLU, tanh=nn.Tanh)


def test_mappings_that_make_what_they_give(monkeypatch):
    def fn(x):
        return LAYER_OF["tanh"](x - 3)

    fast = agrees(fn, X)
    agrees(fn, X + 1)
    fast(X + 1)
    assert len(fast.entries) == 1
    monkeypatch.setitem(LAYER_OF, "tanh", nn.ReLU)
    same(fast(X), fn(X))
    assert len(fast.entries) == 2


class Solver:
    def __init__(self, rate):
        self.rate = rate


class Remakes(nn.Module):
    """Keeps an object that it makes anew at each call."""

    def __init__(self):
        super().__init__()
        self.solver = Solver(0.5)

    def forward(self, x):
        self.solver = Solver(0.25)
        return x * self.solver.rate


def test_objects_that_the_code_replaces_itself():
    model = Remakes()
    fast = mycel.jit(model)
    same(fast(X), X * 0.25)
    same(fast(X + 1), (X + 1) * 0.25)
    assert len(fast.entries) == 1


# -- what is easily overlooked


class Slotted:
    __slots__ = ("rate", "weight")

    def __init__(self):
        self.rate, self.weight = 2.0, torch.ones(3)


@dataclasses.dataclass(slots=True)
class SlottedOptions:
    power: int = 2
    inner: Slotted = dataclasses.field(default_factory=Slotted)


class Replaced:
    def method(self, x):
        return x * 2

    @property
    def rate(self):
        return 3.0


NAMES = {"square", "negate"}
OWNER = Replaced()


def test_slots_are_read_anew():
    options = SlottedOptions()

    def fn(x):
        return x**options.power * options.inner.rate + options.inner.weight

    fast = agrees(fn, X)
    options.inner.weight = torch.full((3,), 5.0)
    same(fast(X), fn(X))
    assert len(fast.entries) == 1
    options.inner.rate = 3.0
    same(fast(X), fn(X))
    options.power = 3
    same(fast(X), fn(X))
    options.inner = Slotted()
    same(fast(X), fn(X))
    assert len(fast.entries) == 4


def test_sets_and_methods_are_guarded(monkeypatch):
    def fn(x):
        x = x * x if "square" in NAMES else x
        return OWNER.method(x) * OWNER.rate

    fast = agrees(fn, X)
    NAMES.discard("square")
    same(fast(X), fn(X))
    NAMES.add("square")
    same(fast(X), fn(X))
    assert len(fast.entries) == 2
    monkeypatch.setattr(Replaced, "method", lambda self, x: x - 1)
    same(fast(X), fn(X))
    monkeypatch.setattr(Replaced, "rate", property(lambda self: 5.0))
    same(fast(X), fn(X))
    assert len(fast.entries) == 4


# -- random numbers, clocks and iterators of Python


@pytest.mark.parametrize(
    "draw",
    [
        random.random,
        lambda: random.uniform(0.0, 1.0),
        lambda: random.randint(0, 1),
        lambda: random.randrange(2),
        lambda: random.gauss(0.5, 0.3),
        lambda: np.random.rand(),
        lambda: np.random.uniform(0, 1),
        lambda: np.random.randint(2),
        lambda: np.random.normal(0.5, 1.0),
    ],
)
def test_numbers_of_python_are_drawn_at_every_call(draw):
    def fn(x):
        if draw() < 0.5:
            return x * 2
        return x * 3

    torch.manual_seed(0)
    fast = mycel.jit(fn)
    results = [fast(X) for _ in range(30)]
    assert all(torch.equal(y, X * 2) or torch.equal(y, X * 3) for y in results)
    assert 5 <= sum(torch.equal(y, X * 2) for y in results) <= 25
    assert len(fast.entries) == 1
    torch.manual_seed(0)
    assert all(torch.equal(fast(X), y) for y in results)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * random.choice([1, 2]),
        lambda x: x[torch.from_numpy(np.random.permutation(2))],
        lambda x: x * torch.from_numpy(np.random.rand(3)),
        lambda x: x * next(ITEMS),
    ],
)
def test_other_draws_and_iterators_are_refused(fn):
    with pytest.raises(mycel.CaptureError, match="every call would use the same"):
        mycel.jit(fn, strict=True)(X)


ITEMS = iter(range(1, 100))


def test_iterators_of_the_function_itself_and_clocks():
    layer = nn.Linear(3, 3)
    agrees(lambda x: x * next(iter([2.0, 3.0])) * next(layer.parameters()).sum(), X)
    with pytest.warns(UserWarning, match=r"time\(\) is called when the code is captured"):
        mycel.jit(lambda x: x + 0 * time.time())(X)


def test_variables_of_the_process_are_part_of_the_signature(monkeypatch):
    def fn(x):
        factor = float(os.environ.get("MYCEL_TEST_FACTOR", "1"))
        return x * factor if "MYCEL_TEST_SIGN" in os.environ else x - factor

    fast = mycel.jit(fn, strict=True)
    for name, value in ((None, None), ("MYCEL_TEST_FACTOR", "3"), ("MYCEL_TEST_SIGN", "on"), ("OTHER", "x")):
        if name is not None:
            monkeypatch.setenv(name, value)
        same(fast(X), fn(X))
    assert len(fast.entries) == 3
