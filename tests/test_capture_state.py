"""What captured code reaches: tensors are read anew at every call, other values are guarded."""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch
from models import same
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


def test_counters_count_calls_and_are_no_part_of_the_signature():
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
    assert (count, owner.calls, len(seen)) == (5, 5, 5)
    assert len(fast.entries) == 3  # of X twice: then it is known that they count


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


def test_copies_of_what_lives_on_have_memory_of_their_own():
    layer, kept = nn.Linear(3, 3), types.SimpleNamespace(first=None, log=[])
    layer.register_buffer("seen", torch.zeros(3))

    def fn(x):
        layer.seen += 1
        if kept.first is None:
            kept.first = layer.weight.detach().clone()
        kept.log.append(layer.bias.detach().clone())
        return layer.weight.clone(), layer.weight[0].detach().clone(), layer.seen.clone(), x.clone(), layer.seen

    *copies, seen = mycel.jit(fn, strict=True)(X)
    copies += [kept.first, *kept.log]
    before = [y.detach().tolist() for y in copies]
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, layer.seen, X):
            tensor.add_(1)
    assert [y.detach().tolist() for y in copies] == before and seen is layer.seen
    X.sub_(1)


last = torch.zeros(3)


def test_a_variable_outside_of_the_function_holds_the_tensor_of_the_last_call():
    seen = None

    def fn(x):
        nonlocal seen
        global last
        y = x * 2 if seen is None else x - seen
        seen, last = (y + last).detach(), y.detach() * 3
        return y.sum()

    runs = []
    for call in (fn, mycel.jit(fn, strict=True)):
        seen, globals()["last"] = None, torch.zeros(3)
        runs.append([(call(x), seen, last) for x in (torch.ones(3), torch.arange(3.0), torch.ones(3))])
    for got, want in zip(*runs, strict=True):
        assert all(map(torch.equal, got, want))


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(3, 2)
        self.mean = torch.optim.swa_utils.AveragedModel(self.model)

    def forward(self, x):
        self.mean.update_parameters(self.model)
        return self.model(x).pow(2).mean()


def test_averages_of_weights_follow_them():
    model, twin = Averaged(), Averaged()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
    step = mycel.train_step(model, torch.optim.SGD(model.model.parameters(), lr=0.1), strict=True)
    for _ in range(3):
        optimizer.zero_grad()
        loss = twin(X.reshape(-1, 3))
        loss.backward()
        optimizer.step()
        assert torch.allclose(step(X.reshape(-1, 3)), loss)
    same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("dims", [(), (1,), (0, 1)])
def test_roll_by_a_number_that_a_weight_decides(dims):
    weight = nn.Parameter(torch.tensor(2.4))

    def fn(x):
        by = int((x.sum() * weight).abs())
        return torch.roll(x, (by, -1) if len(dims) == 2 else by, dims) * weight

    fast = mycel.jit(fn, strict=True)
    for x in (torch.arange(12.0).reshape(3, 4), -torch.arange(12.0).reshape(3, 4) / 7):
        weight.data += 0.7
        assert torch.equal(fast(x), fn(x))
