"""Batches as programs have them: arrays of NumPy, objects of the user's own classes, mappings; each against torch."""

import collections
import copy
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

import mycel
from mycel.errors import CaptureError


class Net(torch.nn.Module):
    """A batch is one argument; whatever it holds, torch.as_tensor makes tensors of it."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.linear, self.read = torch.nn.Linear(4, 3), read

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x, y = self.read(*args, **kwargs)
        return F.cross_entropy(self.linear(torch.as_tensor(x)), torch.as_tensor(y))


@dataclasses.dataclass
class Data:
    x: Any
    y: Any
    name: str = "batch"


class Plain:
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y, self.scale = x, y, 2

    def scaled(self) -> Any:
        return self.x * self.scale


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class Outer:
    def __init__(self, x: Any, y: Any) -> None:
        self.inner, self.labels = Plain(x, None), {"y": [y]}


class Named(NamedTuple):
    x: Any
    y: Any


class ByName:
    """Attributes that are none."""

    def __init__(self, x: Any, y: Any) -> None:
        self._fields_by_name = {"x": x, "y": y}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._fields_by_name[name]


def attributes(batch: Any) -> Any:
    return batch.x, batch.y


def items(batch: Any) -> Any:
    return batch["x"], batch["y"]


FORMS: dict[str, tuple[Any, Any]] = {
    "dataclass": (Data, attributes),
    "plain": (Plain, attributes),
    "method": (Plain, lambda batch: (batch.scaled(), batch.y)),
    "slots": (Slotted, attributes),
    "namespace": (lambda x, y: types.SimpleNamespace(x=x, y=y), attributes),
    "nested": (Outer, lambda batch: (batch.inner.x, batch.labels["y"][0])),
    "named tuple": (Named, attributes),
    "getattr": (ByName, attributes),
    "dict": (lambda x, y: {"x": x, "y": y}, items),
    "user dict": (lambda x, y: collections.UserDict(x=x, y=y), items),
    "encoding": (lambda x, y: transformers.BatchEncoding({"x": x, "y": y}), attributes),
}


def batches(arrays: bool) -> list[tuple[Any, Any]]:
    drawn = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(5, 4, generator=drawn), torch.randint(0, 3, (5,), generator=drawn)) for _ in range(3)]
    return [(x.numpy(), y.numpy()) for x, y in pairs] if arrays else pairs


def losses(model: torch.nn.Module, given: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[float]:
    """Of plain torch."""
    optimizer, values = torch.optim.SGD(model.parameters(), lr=0.5), []
    for args, kwargs in given:
        loss = model(*args, **kwargs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def check(read: Any, given: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """A step and a jitted call give torch's losses, from one program."""
    model = Net(read)
    stepped, jitted = copy.deepcopy(model), mycel.jit(copy.deepcopy(model))
    expected = losses(model, copy.deepcopy(given))
    step = mycel.train_step(stepped, torch.optim.SGD(stepped.parameters(), lr=0.5))
    assert [step(*args, **kwargs).item() for args, kwargs in given] == pytest.approx(expected, abs=1e-5)
    assert losses(jitted, given) == pytest.approx(expected, abs=1e-5)
    assert len(step.entries) == len(jitted.entries) == 1


@pytest.mark.parametrize("arrays", [False, True], ids=["tensors", "arrays"])
@pytest.mark.parametrize("form", FORMS)
def test_batch_in_one_argument(form: str, arrays: bool) -> None:
    make, read = FORMS[form]
    check(read, [((make(x, y),), {}) for x, y in batches(arrays)])


@pytest.mark.parametrize("maker", ["as_tensor", "from_numpy", "tensor"])
def test_arrays_by_position_and_by_name(maker: str) -> None:
    check(lambda x, y: (getattr(torch, maker)(x), y), [((x,), {"y": y}) for x, y in batches(True)])


def test_arrays_keep_their_dtype_and_are_written_in_place() -> None:
    def double(x: Any) -> torch.Tensor:
        return torch.as_tensor(x).mul_(2)

    array = np.arange(3, dtype=np.float64)
    result = mycel.jit(double)(array)
    assert result.dtype == torch.float64
    assert array.tolist() == [0.0, 2.0, 4.0]


def test_numbers_of_numpy_are_tensors() -> None:
    fast = mycel.jit(lambda x, scale, rows: x[:rows] * scale)
    x = torch.arange(6.0).reshape(3, 2)
    for scale, rows in ((np.float32(2), np.int64(2)), (np.float32(3), np.int64(1))):
        assert torch.equal(fast(x, scale, rows), x[: int(rows)] * float(scale))


def test_a_program_fits_arrays_and_tensors() -> None:
    fast = mycel.jit(lambda x: torch.as_tensor(x) * 2)
    x = torch.arange(3.0)
    assert torch.equal(fast(x.numpy()), x * 2)
    assert torch.equal(fast(x), x * 2)
    assert torch.equal(fast(x.numpy() + 1), (x + 1) * 2)
    assert len(fast.entries) == 1


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"pad": {"x": {0: [8]}}}], ids=["accumulate", "pad"])
def test_arrays_in_steps_with_options(options: dict[str, Any]) -> None:
    def loss(model: torch.nn.Module, x: Any, y: Any) -> torch.Tensor:
        return F.cross_entropy(model.linear(x), y)

    model = Net(None)
    other = copy.deepcopy(model)
    steps = [mycel.train_step(m, torch.optim.SGD(m.parameters(), lr=0.5), loss, **options) for m in (model, other)]
    for x, y in batches(False):
        x, y = x[:4], y[:4]
        assert steps[0](x=x.numpy(), y=y.numpy()).item() == pytest.approx(steps[1](x=x, y=y).item(), abs=1e-6)
        assert torch.allclose(steps[0].evaluate(x=x.numpy(), y=y.numpy()), steps[1].evaluate(x=x, y=y))


def test_an_attribute_that_is_there_at_some_calls() -> None:
    fast = mycel.jit(lambda batch: batch.x * getattr(batch, "weight", 1))
    plain, weighted = Plain(torch.ones(2), None), Plain(torch.ones(2), None)
    weighted.weight = torch.tensor([3.0, 4.0])
    for batch in (plain, weighted, plain):
        assert torch.equal(fast(batch), batch.x * getattr(batch, "weight", 1))


class Circle(Plain):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x, y)
        self.parents = {"mine": self}


class Hidden(Plain):
    def __init__(self, x: Any, y: Any) -> None:
        super().__init__(x, y)
        self.parts = {x}


def kept(batch: Any) -> Any:
    batch.hidden = batch.x * 2
    return batch.hidden


@pytest.mark.parametrize(
    "fn, batch, message",
    [
        (attributes, Circle(torch.ones(2), 1), "the argument 0.parents.mine refers back to what holds it"),
        (attributes, Hidden(torch.ones(2), 1), "the argument batch.parts, of type set, holds arrays or tensors that"),
        (
            attributes,
            Plain(np.array(["a"]), torch.ones(2)),
            "the argument batch.x, of type ndarray, is an array of <U1",
        ),
        (kept, Plain(torch.ones(2), 1), r"the code sets batch.hidden: .* try +returning it, or setting it on a copy"),
        (lambda batch: batch.x.astype(np.float64), Plain(np.ones(2), 1), ".astype of an array was asked of a tensor"),
    ],
    ids=["circle", "set", "strings", "kept", "astype"],
)
def test_what_cannot_be_followed_is_named(fn: Any, batch: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        mycel.jit(fn)(batch)
