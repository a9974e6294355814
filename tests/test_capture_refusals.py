"""What cannot be captured is refused: with the user's file, line and source text and a way out, and nothing is left
behind."""

from __future__ import annotations

import linecache
import math
import types

import numpy as np
import pytest
import torch
from models import same, state
from torch import nn

import mycel

X = torch.arange(6.0).reshape(2, 3)
TABLE = torch.zeros(3)
ONE = nn.Parameter(torch.ones(()))  # what depends on parameters is not known, what depends on the batch alone may be


class Rows(list):
    """A list with an attribute."""

    def __init__(self, items):
        super().__init__(items)
        self.count = torch.tensor(len(items))


def update_global(x):
    TABLE.add_(x[0])
    return x


def update_global_slice(x):
    TABLE[0] = x[0, 0]
    return x


REFUSED = {
    "nonzero": lambda x: x.nonzero(),
    "nonzero_tuple": lambda x: torch.nonzero(x, as_tuple=True)[0],
    "where": lambda x: torch.where(x > 1)[0],
    "argwhere": lambda x: torch.argwhere(x),
    "mask": lambda x: x[x > 1],
    "mask_rows": lambda x: x[x[:, 0] > 1],
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[0], x[1].long()),
    "bincount": lambda x: torch.bincount(x.long().flatten()),
    "item": lambda x: [x] * x.sum().long().item(),
    "bool": lambda x: [x] * bool(x.any()),
    "float": lambda x: x * math.gamma(float(x[0, 1])),
    "int": lambda x: x[: int(x[0, 1])],
    "index": lambda x: x[:, : x.sum().long()],
    "range": lambda x: [x for _ in range(x[0, 1].long())],
    "tolist": lambda x: torch.split(x[0], x[1].long().tolist()),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "array": lambda x: np.asarray(x),
    "set_of_numbers": lambda x: {float(v) for v in x[0]},
    "equal": lambda x: [x] * torch.equal(x, x + 1),
    "allclose": lambda x: [x] * torch.allclose(x, x + 1),
    "format": lambda x: "%.2f" % x.sum(),  # noqa: UP031
    "contains": lambda x: 1.0 in x,
    "tensor_of_traced": lambda x: torch.tensor([x[0], x[1]]),
    "backward": lambda x: x.sum().backward(),
    "global_update": update_global,
    "global_slice": update_global_slice,
    "shapes": lambda x: x @ x,
    "broadcast": lambda x: x + torch.ones(4),
    "windows": lambda x: x.clone().unfold(1, 2, 1).add_(1),
    "data_ptr": lambda x: x.data_ptr(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_where_and_what_to_try(name):
    kept = TABLE
    with pytest.raises(mycel.CaptureError) as caught:
        mycel.jit(lambda x: REFUSED[name](x * ONE), strict=True)(X)
    error = caught.value
    assert error.file == __file__
    assert error.text == linecache.getline(__file__, error.line).strip() and error.text
    assert error.what and error.hint
    assert f"{error.file}:{error.line}" in str(error) and error.hint in str(error)
    code = REFUSED[name].__code__
    assert error.line in {line for _, _, line in code.co_lines()}
    assert TABLE is kept and torch.equal(TABLE, torch.zeros(3))
    same(mycel.jit(lambda x: x * 2)(X), X * 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
@pytest.mark.parametrize(
    "fn", [lambda x: x.to("cuda"), lambda x: x + torch.ones(3, device="cuda"), lambda x: x + TABLE.cuda()]
)
def test_other_devices_are_refused(fn):
    with pytest.raises(mycel.CaptureError, match="cuda") as caught:
        mycel.jit(fn)(X)
    assert caught.value.file == __file__ and caught.value.hint
    with pytest.raises(mycel.CaptureError, match="cuda"):
        mycel.jit(lambda x, y: x + y)(X, X.cuda())


ARGUMENTS = {
    "strings": lambda: np.array(["a"]),
    "strings_in_list": lambda: [np.array(["a"])],
    "list": lambda: Rows([torch.ones(3)]),
    "set_in_namespace": lambda: types.SimpleNamespace(x={torch.ones(3)}),
    "set": lambda: {torch.ones(3)},
    "generator": lambda: (t for t in [torch.ones(3)]),
    "sparse_but_no_matrix": lambda: torch.ones(2, 2, 2).to_sparse(),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_cannot_be_seen_are_refused(name):
    with pytest.raises(mycel.CaptureError) as caught:
        mycel.jit(lambda x, y: x)(X, ARGUMENTS[name]())
    assert caught.value.file == __file__ and caught.value.hint


class Leaky(nn.Module):
    """Changes all it can, then asks for a number."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("steps", torch.zeros(()))
        self.last, self.seen, self.calls, self.table = torch.zeros(3), [], 0, {}
        self.refuses = True

    def forward(self, x):
        self.steps += 1
        self.steps = self.steps + 1
        self.last = x[0]
        self.new = x
        self.pair = (x, x)
        self.calls += 1
        self.table["x"] = x
        y = self.norm(x)
        self.seen.append(x)
        if self.refuses:
            y = y * y.detach().numpy().sum()
        self.seen.clear()
        return y


def test_nothing_is_left_behind():
    model = Leaky()
    before, slots = state(model), dict(vars(model))
    call, compiling, forward = nn.Module.__call__, torch.compiler.is_compiling(), nn.Module._call_impl
    with pytest.raises(mycel.CaptureError, match="a NumPy array was asked"):
        mycel.jit(model, strict=True)(X)
    assert vars(model) == slots and model.seen == [] and model.table == {} and model.calls == 0
    same(state(model), before)
    assert nn.Module.__call__ is call and nn.Module._call_impl is forward and torch.compiler.is_compiling() is compiling
    assert torch.is_grad_enabled() and torch.is_autocast_cache_enabled()
    model.refuses = False
    twin = Leaky()
    twin.refuses = False
    fast = mycel.jit(model)
    for _ in range(2):
        same(fast(X), twin(X))
        same(state(model), state(twin))
        same((model.last, model.new, model.pair, model.table), (twin.last, twin.new, twin.pair, twin.table))
        assert model.calls == twin.calls
    assert len(fast.entries) == 2  # the second call shows that it counts them


def test_errors_of_the_users_code_are_the_users_errors():
    def fn(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mycel.jit(fn)(X)
    same(mycel.jit(lambda x: x + 1)(X), X + 1)


def test_tensors_of_a_finished_capture_are_refused():
    kept = [None]

    def keep(x, put=kept.__setitem__):
        put(0, x * 2)
        return x

    mycel.jit(keep)(X)
    with pytest.raises(mycel.CaptureError, match="capture that is over"):
        kept[0] + 1


def test_state_of_a_model_library_is_no_obstacle():
    class Counts(nn.BatchNorm1d):
        def forward(self, x):
            self.num_batches_tracked += 1
            return x / float(self.num_batches_tracked)

    model = Counts(3)
    fast = mycel.jit(model, strict=True)
    for calls in (1, 2, 3):  # a number that the code itself changes is no fact
        same(fast(X), X / calls)
    assert model.num_batches_tracked == 3


def test_a_tensor_that_was_left_out_is_named_by_the_call_that_needs_it():
    def loss(logits, target=None):
        return nn.functional.cross_entropy(logits, target)

    with pytest.raises(mycel.CaptureError, match=r"cross_entropy: a tensor is asked for, None was given"):
        mycel.capture(loss, X)
