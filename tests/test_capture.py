"""Capture keeps Python's meaning: what goes in, what comes out, and all kinds of callables."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import typing

import pytest
import torch
import transformers as hf
from models import MODELS, same
from torch import nn

import mycel

X = torch.arange(6.0).reshape(2, 3)
SCALE = torch.tensor(2.0)


def agrees(fn, *args, calls=2, **kwargs):
    """Both modes give what the function itself gives; returns the jitted function."""
    wanted = fn(*args, **kwargs)
    for mode in ("eager", "graph"):
        fast = mycel.jit(fn, mode=mode)
        for _ in range(calls):
            same(fast(*args, **kwargs), wanted)
        assert len(fast.entries) == 1
    return fast


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: typing.Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str = "x"


class Point(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Kind(enum.Enum):
    SUM = 1
    MEAN = 2


# -- arguments -------------------------------------------------------------------------------------------------------


def test_positional_and_keyword_arguments():
    def fn(a, b, /, c, *rest, d=1.0, **more):
        return a + b * c - d + sum(rest) + sum(more.values())

    agrees(fn, X, X, 2.0)
    agrees(fn, X, 3, X, X, X, d=X, e=X, f=4)
    program = mycel.capture(fn, X, X + 1, X + 2, X + 3, d=X + 4, e=X + 5)
    assert [v.name for v in program.inputs] == ["a", "b", "c", "rest.0", "d", "e"]


def test_nested_structures_go_in_and_out():
    def fn(tree):
        a, (b, c), named = tree["a"], tree["b"], tree["p"]
        return {
            "sum": a + b,
            0: [c, (named.x, Point(named.y, a))],
            "pair": Pair(a, {"k": [b]}),
            "frozen": Frozen(c, "y"),
        }

    agrees(fn, {"a": X, "b": [X + 1, X + 2], "p": Point(X + 3, X + 4)})
    agrees(lambda p, f: p.left + p.right["z"] + f.x + len(f.name), Pair(X, {"z": X}), Frozen(X, "abc"))


def test_a_structure_of_another_shape_is_another_signature():
    fast = mycel.jit(lambda tree: sum(v.sum() for v in (tree.values() if isinstance(tree, dict) else tree)))
    for tree in ({"a": X}, {"a": X, "b": X}, [X], (X,), [X, X], [X, X + 1], {"c": X}):
        same(fast(tree), sum(v.sum() for v in (tree.values() if isinstance(tree, dict) else tree)))
    assert len(fast.entries) == 7


def test_hugging_face_outputs_go_in_and_out():
    from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

    def fn(out):
        return CausalLMOutputWithPast(logits=out.last_hidden_state * 2, hidden_states=out.hidden_states)

    agrees(fn, BaseModelOutput(last_hidden_state=X, hidden_states=(X, X + 1)))
    agrees(lambda out: out[0] + out["last_hidden_state"], BaseModelOutput(last_hidden_state=X))
    agrees(lambda out: out.attentions is None, BaseModelOutput(last_hidden_state=X))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cache_comes_out(name):
    model, batch = MODELS[name]().eval(), MODELS[name].inputs()
    with torch.no_grad():
        wanted = model(input_ids=batch["input_ids"], use_cache=True)
        output = mycel.jit(model)(input_ids=batch["input_ids"], use_cache=True)
        same(output, wanted)
        assert isinstance(output.past_key_values, hf.DynamicCache)
        token = torch.tensor([[5], [6]])
        same(
            model(token, past_key_values=output.past_key_values).logits,
            model(token, past_key_values=wanted.past_key_values).logits,
        )


def test_static_values_decide_the_signature():
    def fn(x, kind, n=1, *, name="a", flag=None, dtype=None):
        y = x.sum() if kind is Kind.SUM else x.mean()
        return (y * n if name == "a" else y / n).to(dtype or x.dtype), flag

    calls = [
        ((X, Kind.SUM), {}),
        ((X, Kind.MEAN), {}),
        ((X, Kind.SUM, 2), {}),
        ((X, Kind.SUM, 2.0), {}),
        ((X, Kind.SUM), {"name": "b"}),
        ((X, Kind.SUM), {"flag": True}),
        ((X, Kind.SUM), {"flag": 1}),
        ((X, Kind.SUM), {"flag": "é"}),
        ((X, Kind.SUM), {"dtype": torch.float64}),
        ((X, Kind.SUM), {"flag": float("nan")}),
        ((X, Kind.SUM), {"flag": (1, (2, None))}),
        ((X, Kind.SUM), {"flag": slice(0, 2)}),
    ]
    fast = mycel.jit(fn)
    for _ in range(2):
        for args, kwargs in calls:
            assert repr(fast(*args, **kwargs)) == repr(fn(*args, **kwargs))
    assert len(fast.entries) == len(calls)


def test_shapes_dtypes_and_train_mode_decide_the_signature():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    fast = mycel.jit(layer)
    for x in (X, X[:1], X.double().float(), X + 1):
        fast(x)
    assert len(fast.entries) == 2
    fast.eval()
    same(fast(X), layer(X))
    layer.double()
    same(fast(X.double()), layer(X.double()))
    assert len(fast.entries) == 4


def test_the_same_tensor_twice():
    def fn(a, b):
        a = a.clone()
        a.add_(1)
        return a * b

    fast = agrees(fn, X, X)
    same(fast(X, X + 1), fn(X, X + 1))
    assert len(fast.entries) == 2
    assert len(fast.program(X, X).inputs) == 1


def test_results_that_are_arguments_or_no_tensors():
    agrees(lambda x, y: (x, y, x), X, X + 1)
    agrees(lambda x: None, X)
    agrees(lambda x: 3, X)
    agrees(lambda x: (x.shape, x.dtype, "a", [x, None, 2.5], x.shape[0]), X)
    agrees(lambda: torch.ones(2) * SCALE)
    agrees(lambda: torch.arange(3) + 1)
    agrees(lambda: None)
    agrees(lambda x: [], X)


def test_mappings_and_objects_keep_their_class():
    table = collections.defaultdict(list, a=X)
    agrees(lambda t: (t["a"] + 1, collections.OrderedDict(b=t["a"]), collections.defaultdict(int, c=t["a"] * 2)), table)
    agrees(lambda b: b["input_ids"] + b.attention_mask, hf.BatchEncoding({"input_ids": X, "attention_mask": X + 1}))
    agrees(lambda b: hf.BatchEncoding({"x": b * 2}), X)

    @dataclasses.dataclass(slots=True)
    class Slim:
        x: torch.Tensor
        y: torch.Tensor = dataclasses.field(init=False)

        def __post_init__(self):
            self.y = self.x + 1

    agrees(lambda s: s.x * s.y, Slim(X))
    result = mycel.jit(Slim)(X)
    same((type(result), result.x, result.y), (Slim, X, X + 1))


# -- kinds of callables


class Owner:
    """A plain object whose method is captured."""

    def __init__(self):
        self.weight, self.layer, self.bias = torch.ones(3), nn.Linear(3, 3), 1.0

    def __call__(self, x):
        return self.method(x) + 1

    def method(self, x):
        return self.layer(x * self.weight) + self.bias

    @classmethod
    def of_class(cls, x):
        return x + 1

    @staticmethod
    def of_none(x):
        return x + 2


@mycel.jit
def decorated(x, n=2):
    """Docs."""
    return x * n


@mycel.jit(mode="eager")
def decorated_eager(x):
    return x * SCALE


def test_kinds_of_callables():
    owner = Owner()
    for fn in (
        owner,
        owner.method,
        Owner.of_class,
        owner.of_none,
        owner.layer,
        torch.sin,
        torch.Tensor.exp,
        nn.functional.gelu,
    ):
        agrees(fn, X)
    agrees(functools.partial(lambda a, b, c=1: a * b - c, X + 1, c=X), X)
    agrees(functools.partial(owner.method), X)
    same(decorated(X), X * 2)
    same(decorated(X, n=5), X * 5)
    same(decorated_eager(X), X * 2)
    assert decorated.__name__ == "decorated" and decorated.__doc__ == "Docs."


def test_methods_of_a_jitted_class():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.loss = mycel.jit(self.loss)

        def loss(self, x):
            return self.layer(x).sum()

    model = Model()
    same(model.loss(X), model.layer(X).sum())


def test_jit_inside_jit_is_one_program():
    inner_module = mycel.jit(nn.Linear(3, 3))
    inner = mycel.jit(lambda x: inner_module(x) * SCALE)
    outer = mycel.jit(lambda x: inner(x) + decorated(x))
    for _ in range(2):
        same(outer(X), inner_module.fn(X) * 2 + X * 2)
    assert not inner.entries and not inner_module.entries
    program = outer.program(X)
    assert {v.name for v in program.inputs} >= {"x"} and len(program.inputs) == 4
    with torch.no_grad():
        inner_module.weight.mul_(2)
    same(outer(X), inner_module.fn(X) * 2 + X * 2)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.fast = mycel.jit(self.layer)

    def forward(self, x):
        return self.fast(x) + 1


def test_a_module_that_calls_a_jitted_module():
    model = Inner()
    fast = agrees(model, X)
    model.layer.weight = nn.Parameter(torch.ones(3, 3))
    same(fast(X), model.layer(X) + 1)


# -- copies are copies


def copied_by_to(x):
    y = x.to(x.dtype, copy=True)
    y.zero_()
    return y


def copied_by_contiguous(x):
    y = x.t().contiguous()
    y.add_(1)
    return y * 1


def copied_by_reshape(x):
    y = x.t().reshape(-1)
    y.add_(1)
    return y * 1


def viewed_by_reshape(x):
    y = x.reshape(-1)
    y.add_(1)
    return y * 1


def viewed_by_contiguous(x):
    y = x.contiguous()
    y.add_(1)
    return y * 1


@pytest.mark.parametrize(
    "fn", [copied_by_to, copied_by_contiguous, copied_by_reshape, viewed_by_reshape, viewed_by_contiguous]
)
def test_updates_reach_what_shares_memory_and_nothing_else(fn):
    a, b = (torch.arange(6.0).reshape(2, 3) for _ in range(2))
    assert torch.equal(mycel.jit(fn)(a), fn(b)) and torch.equal(a, b)


def test_an_updated_argument_that_is_returned_is_that_argument():
    def fn(x):
        x.add_(1)
        return x, x * 2

    a = torch.ones(2)
    same_one, double = mycel.jit(fn)(a)
    assert same_one is a and a.tolist() == [2, 2] and double.tolist() == [4, 4]


def test_modules_made_inside_and_jitted_methods():
    assert mycel.jit(lambda x: torch.nn.Linear(4, 4)(x))(torch.ones(2, 4)).shape == (2, 4)

    class Scaler:
        k = 3

        @mycel.jit
        def scale(self, x):
            return x * self.k

    assert Scaler().scale(torch.ones(2)).tolist() == [3, 3]
    fast = mycel.jit(torch.nn.Linear(2, 2))
    assert fast.eval() is fast and not fast.training and type(copy.deepcopy(fast)) is type(fast)
