"""Whatever captured code reads, a change of it is noticed at the next call: a law over kinds of changes, and over
random sequences of them."""

from __future__ import annotations

import logging
import random
import sys
import types
import warnings
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from models import same
from torch import nn

import mycel
from mycel.capture import versions
from mycel.capture.code_names import global_names

X = torch.linspace(-1, 1, 12).reshape(3, 4)
POWER = 1.0
TABLE = {"shift": 0.5, "deep": [1.0, {"scale": 2.0}]}
SHIFT = torch.tensor(0.25)
gain: list[float] = []  # a log of the script, by the name of an attribute that Layer reads


@dataclass(slots=True)
class Slotted:
    gain: float = 1.5


@dataclass
class Options:
    gain: float = 1.0
    names: list = field(default_factory=lambda: ["a", "b"])


def closed_over():
    factor = 1.0

    def apply(x, offset=0.125, *, twice=1.0):
        return x * factor * twice + offset

    def change(value):
        nonlocal factor
        factor = value

    return apply, change


class Layer(nn.Module):
    bend = 1.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Identity()
        self.register_buffer("seen", torch.ones(4))
        self.options, self.slotted, self.scales = Options(), Slotted(), [1.0, 2.0]
        self.where = "here"

    def forward(self, x):
        x = self.drop(self.norm(self.linear(x))) * self.seen
        x = x * self.options.gain * self.slotted.gain * self.bend * sum(self.scales)
        if self.where == "there":
            x = -x
        return self.also(x) + len(self.options.names)

    def also(self, x):
        return x + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.apply_, self.change = closed_over()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = self.apply_(x) + TABLE["shift"] + TABLE["deep"][1]["scale"] + SHIFT
        return x.abs() ** POWER


HERE = sys.modules[__name__]


def layer(net):
    return net.layers[-1]


def double_data(net):
    layer(net).linear.weight.data = layer(net).linear.weight.data * 2


def shorten(net):
    """The same tensor, of another shape."""
    layer(net).seen.data = torch.full((1,), 2.0)


def widen(net):
    layer(net).seen.data = layer(net).seen.data.double() * 2


def hooked(net):
    layer(net).linear.register_forward_hook(lambda module, args, out: out * 2)


def in_hook_dict(net):
    layer(net).linear._forward_hooks[-1] = lambda module, args, out: out * 3


def replace_code(net):
    layer(net).also.__func__.__code__ = (lambda self, x: x + 2).__code__


CHANGES = {
    "attribute": lambda n: setattr(layer(n), "where", "there"),
    "attribute through __dict__": lambda n: vars(layer(n)).update(where="there"),
    "__dict__ replaced": lambda n: setattr(layer(n), "__dict__", {**vars(layer(n)), "where": "there"}),
    "__dict__ of an object replaced": lambda n: setattr(layer(n).options, "__dict__", {"gain": 3.0, "names": []}),
    "attribute of an object": lambda n: setattr(layer(n).options, "gain", 3.0),
    "object replaced": lambda n: setattr(layer(n), "options", Options(gain=4.0)),
    "slot": lambda n: setattr(layer(n).slotted, "gain", 2.5),
    "list appended to": lambda n: layer(n).scales.append(4.0),
    "list item": lambda n: layer(n).scales.__setitem__(0, 7.0),
    "list in an object": lambda n: layer(n).options.names.append("c"),
    "dict item": lambda n: TABLE.__setitem__("shift", 5.0),
    "item deep in a dict": lambda n: TABLE["deep"][1].__setitem__("scale", 9.0),
    "parameter replaced": lambda n: setattr(layer(n).linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "parameter through _parameters": lambda n: layer(n).linear._parameters.update(bias=nn.Parameter(torch.ones(4))),
    "_parameters replaced": lambda n: setattr(
        layer(n).linear, "_parameters", {"weight": nn.Parameter(torch.ones(4, 4)), "bias": None}
    ),
    "values in place": lambda n: layer(n).linear.weight.data.mul_(3),
    "data swapped": double_data,
    "shape of data": shorten,
    "dtype of data": widen,
    "dtype": lambda n: n.double(),
    "train mode": lambda n: n.train(not n.training),
    "train mode of one": lambda n: layer(n).norm.train(not layer(n).norm.training),
    "buffer replaced": lambda n: setattr(layer(n), "seen", torch.full((4,), 2.0)),
    "buffer through _buffers": lambda n: layer(n)._buffers.update(seen=torch.full((4,), 3.0)),
    "submodule": lambda n: setattr(layer(n), "drop", nn.Tanh()),
    "submodule through _modules": lambda n: layer(n)._modules.update(drop=nn.Tanh()),
    "a layer more": lambda n: n.layers.append(Layer()),
    "a layer less": lambda n: len(n.layers) > 1 and n.layers.pop(0),
    "hook": hooked,
    "hook through its dict": in_hook_dict,
    "forward of an object": lambda n: setattr(layer(n).drop, "forward", lambda x: x * 5),
    "method of an object": lambda n: setattr(layer(n), "also", types.MethodType(lambda self, x: x * 6, layer(n))),
    "method of a class": lambda n: setattr(Layer, "also", lambda self, x: x * 7),
    "code of a method": replace_code,
    "attribute of a class, of an object": lambda n: setattr(layer(n), "bend", 3.0),
    "attribute of a class": lambda n: setattr(Layer, "bend", 2.0),
    "global": lambda n: setattr(HERE, "POWER", 2.0),
    "global tensor": lambda n: setattr(HERE, "SHIFT", torch.tensor(3.0)),
    "closure": lambda n: n.change(2.0),
    "default": lambda n: setattr(n.apply_, "__defaults__", (3.0,)),
    "default by keyword": lambda n: n.apply_.__kwdefaults__.update(twice=2.0),
    "defaults by keyword replaced": lambda n: setattr(n.apply_, "__kwdefaults__", {"twice": 4.0}),
}


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    for name in ("bend", "also"):
        monkeypatch.setattr(Layer, name, getattr(Layer, name))
    code = Layer.also.__code__
    for name, value in {"POWER": 1.0, "SHIFT": torch.tensor(0.25)}.items():
        monkeypatch.setattr(HERE, name, value)
    monkeypatch.setattr(HERE, "TABLE", {"shift": 0.5, "deep": [1.0, {"scale": 2.0}]})
    own = Layer.also
    yield
    own.__code__ = code


def prepared():
    torch.manual_seed(0)
    net = Net().eval()
    return net, mycel.jit(net)


def agrees(net, fast) -> torch.Tensor:
    """Eager's result, which the jitted call gives, too: at once and again."""
    x = X.to(layer(net).linear.weight.dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = net(x)
        buffers = [b.clone() for b in net.buffers()]
        for _ in range(2):
            same(fast(x), eager)
            for now, before in zip(net.buffers(), buffers, strict=True):  # batch norm's, in train mode
                now.copy_(before)
    return eager


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed(change):
    net, fast = prepared()
    before = agrees(net, fast)
    CHANGES[change](net)
    after = agrees(net, fast)
    assert before.shape != after.shape or not torch.equal(before.to(after.dtype), after), "the change changes nothing"


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_changes_is_noticed(seed):
    net, fast = prepared()
    agrees(net, fast)
    draw = random.Random(seed)
    left_out = {"_parameters replaced", "dtype", "dtype of data"}  # which some others do not go with
    for change in draw.choices([c for c in CHANGES if c not in left_out], k=8):
        CHANGES[change](net)
        agrees(net, fast)


def test_without_versions_of_dicts_it_is_the_same(monkeypatch):
    """What an interpreter does whose dicts have no version."""
    monkeypatch.setattr(sys.modules["mycel.capture.bind"], "DICTS_TELL", False)
    net, fast = prepared()
    agrees(net, fast)
    for change in ("attribute through __dict__", "parameter replaced", "method of a class", "hook", "global", "slot"):
        CHANGES[change](net)
        agrees(net, fast)
    assert not any("versions" in entry.call.__globals__ for entry in fast.entries)


def test_dicts_are_looked_at_where_one_changed():
    """No walk without a change: the state is remembered; a change, even one that does not matter, makes one."""
    net, fast = prepared()
    agrees(net, fast)
    seen = fast.entries[0].call.__globals__["SEEN"]
    remembered = seen[0]
    agrees(net, fast)
    assert seen[0] is remembered
    net.layers[0].unread = 1
    agrees(net, fast)
    assert seen[0] is not remembered
    assert len(fast.entries) == 1


def test_a_global_that_only_shares_a_name_with_an_attribute_is_no_guard():
    fast = mycel.jit(Net().eval())
    for _ in range(3):
        gain.append(float(fast(X).detach().sum()))
    assert len(fast.entries) == 1


def test_globals_are_those_that_are_looked_up():
    def fn(x):
        global written

        class Inner:
            kept = SHIFT

        written = 1
        return [x.sum() + POWER for _ in TABLE] + [Inner.kept, x.gain]

    assert set(global_names(fn.__code__)) == {"written", "SHIFT", "POWER", "TABLE", "__name__"}


def test_a_step_notices_what_is_frozen_and_hooked():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    step = mycel.train_step(net, torch.optim.SGD(net.parameters(), lr=0.1), nn.functional.cross_entropy, compile=False)
    y = torch.tensor([0, 1, 2])
    for _ in range(2):
        step(X, y)
    frozen, other = net[0].weight.clone(), net[1].weight.clone()
    net[0].weight.requires_grad_(False)
    step(X, y)
    assert torch.equal(net[0].weight, frozen) and not torch.equal(net[1].weight, other)
    net[0].weight.requires_grad_(True)
    step(X, y)
    assert not torch.equal(net[0].weight, frozen)
    gradient = mycel.value_and_grad(lambda x: net(x).sum(), wrt=net)
    before = [gradient(X)[1]["0.bias"] for _ in range(3)][-1]
    net[0].bias.register_hook(lambda g: g * 3)
    torch.testing.assert_close(gradient(X)[1]["0.bias"], 3 * before)


KINDS = [torch.float32, torch.float16, torch.int32, torch.bool]


@pytest.mark.parametrize("seed", range(3))
def test_types_of_tensors_follow_every_change_in_place(seed):
    """Whatever is done to tensors that stay the same objects: another shape, dtype or device shows."""
    assert versions.TENSORS_TELL
    draw = random.Random(seed)
    tensors = [torch.zeros(draw.choices(range(4), k=n)) for n in range(6)]

    def types():
        return [(x.shape, x.dtype, x.device) for x in tensors]

    def fresh():
        where = draw.choice(["cpu", "cpu", "meta"])
        return torch.zeros(draw.choices(range(4), k=draw.randrange(5)), dtype=draw.choice(KINDS), device=where)

    def set_data(x):
        x.data = fresh() if x.device.type == "cpu" else torch.zeros(2, device="meta")

    ways = [
        lambda x: x.t_() if x.ndim == 2 else x.unsqueeze_(0) if x.ndim < 5 else x.squeeze_(),
        lambda x: x.resize_(draw.choices(range(1, 4), k=draw.randrange(5))),
        lambda x: torch.utils.swap_tensors(x, fresh()),
        lambda x: x.zero_(),
        set_data,
    ]
    n = 0
    for _ in range(150):
        held, old = versions.TensorTypes(tensors), types()
        assert not held.changed()
        x = draw.choice(tensors)
        try:
            draw.choice(ways)(x)
        except (RuntimeError, NotImplementedError):
            continue
        if types() != old:
            n += 1
            assert held.changed()
    assert n > 40


def test_tensors_without_such_words_are_asked(monkeypatch):
    monkeypatch.setattr(sys.modules["mycel.capture.bind"], "TENSORS_TELL", False)
    net, fast = prepared()
    agrees(net, fast)
    for change in ("shape of data", "parameter replaced", "dtype"):
        CHANGES[change](net)
        agrees(net, fast)


def test_outputs_are_as_their_class_makes_them():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    def fn(x):
        return CausalLMOutputWithPast(logits=x * 2, loss=x.sum())

    ours, own = mycel.jit(fn)(X), fn(X)
    assert type(ours) is type(own) and [*ours] == [*own] and [*vars(ours)] == [*vars(own)]
    same(ours.to_tuple(), own.to_tuple())
    assert ours.past_key_values is None and ours["loss"] is ours.loss


def test_versions_follow_every_change_of_a_dict():
    assert versions.DICTS_TELL or sys.version_info >= (3, 13)
    thing = types.SimpleNamespace(a=1)
    read = versions.dict_versions([vars(thing), {}])
    draw, n = random.Random(0), 0
    for _ in range(200):
        before, old = read(), dict(vars(thing))
        key, value = draw.choice("abc"), draw.choice([1, 2, "x"])
        draw.choice(
            [
                lambda k=key, v=value: setattr(thing, k, v),
                lambda k=key, v=value: vars(thing).__setitem__(k, v),
                lambda k=key: vars(thing).pop(k, None),
                lambda k=key, v=value: vars(thing).setdefault(k, v),
                lambda: None,
            ]
        )()
        if vars(thing) != old:
            n += 1
            assert read() != before
    assert n > 50


@pytest.mark.parametrize(
    "functions",
    [(torch.tanh, torch.sin), (F.relu, F.gelu), (torch.Tensor.sin, torch.Tensor.cos), (F.silu, torch.abs)],
    ids=["builtin", "Python", "method", "both"],
)
def test_another_function_of_a_library_is_another_program(functions):
    class Activated(nn.Module):
        def forward(self, x):
            return self.act(x) + self.acts["a"](x) + self.more[0](x)

    model, x = Activated(), torch.linspace(-1, 1, 5)
    fast = mycel.jit(model)
    for i, j, k in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 1, 1), (0, 0, 0)):
        model.act, model.acts, model.more = functions[i], {"a": functions[j]}, [functions[k]]
        assert torch.allclose(fast(x), model(x))


def test_the_level_of_a_logger_that_code_reads_is_guarded():
    logger = logging.getLogger("mycel.tests.levels")
    fast = mycel.jit(lambda x: x * 2 if logger.level == logging.DEBUG else x)
    for level, factor in ((logging.DEBUG, 2), (logging.INFO, 1), (logging.DEBUG, 2)):
        logger.setLevel(level)
        assert torch.equal(fast(X), X * factor)
