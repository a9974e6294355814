"""torch's own operator database through capture: every operator gives what eager torch gives, or is refused for a
reason listed here; and the gradients that torch's autograd gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

import mycel
from mycel.errors import CaptureError

# needs expecttest
database = pytest.importorskip("torch.testing._internal.common_methods_invocations", exc_type=ImportError)

SAMPLES = 2
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.bool)
ON_VALUES = "its shape depends on values"
READS = "it reads values"
REFUSED = {
    "as_strided": "the strides of an argument may change from call to call",
    "as_strided_copy": "the strides of an argument may change from call to call",
    "as_strided_scatter": "the strides of an argument may change from call to call",
    "resize_": "it makes elements of no value",
    "resize_as_": "it makes elements of no value",
    "sparse.mm": "sparse",
    "sparse.sampled_addmm": "sparse",
    "to_sparse": "sparse",
}
SHAPES_ARGUMENT = "it changes the shape of an argument"
REFUSED_IN_PLACE = {
    "addbmm": SHAPES_ARGUMENT,
    "as_strided": SHAPES_ARGUMENT,
    "polygamma": "torch names the operands of its functional form in another order",
    "resize_": SHAPES_ARGUMENT,
    "squeeze": SHAPES_ARGUMENT,
    "t": SHAPES_ARGUMENT,
    "transpose": SHAPES_ARGUMENT,
    "unsqueeze": SHAPES_ARGUMENT,
}
RANDOM = {  # compared by dtype and shape
    "bernoulli",
    "cauchy",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "exponential",
    "geometric",
    "log_normal",
    "multinomial",
    "new_empty",
    "new_empty_strided",
    "nn.functional.alpha_dropout",
    "nn.functional.dropout",
    "nn.functional.dropout2d",
    "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.rrelu",
    "normal",
    "pca_lowrank",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "svd_lowrank",
    "uniform",
}


def dtype_of(info):
    return next((d for d in DTYPES if d in info.dtypes), None)


def cases():
    seen = set()
    for info in database.op_db:
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        if dtype_of(info) is not None and name not in seen and not name.startswith("jiterator"):  # of GPUs alone
            seen.add(name)
            yield pytest.param(info, id=name)


CASES = list(cases())


def samples_of(info):
    """The first samples; not through info.sample_inputs, which looks at the whole call stack each time."""
    torch.default_generator.manual_seed(1)
    return list(itertools.islice(info.sample_inputs_func(info, "cpu", dtype_of(info), False), SAMPLES))


def prepared(function, sample):
    """A call as a function of its tensors, and those."""
    flat, spec = tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
    at = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]

    def call(*tensors):
        values = list(flat)
        for i, x in zip(at, tensors, strict=True):
            values[i] = x
        first, args, kwargs = tree_unflatten(values, spec)
        return function(first, *args, **kwargs)

    return call, [flat[i] for i in at]


def copied(tensors):
    return tree_map_only(torch.Tensor, torch.clone, tensors)


def draws(info, sample):
    """Random by itself, or by its dropout."""
    return (
        info.name in RANDOM
        or sample.kwargs.get("dropout_p")
        or (info.name.endswith("multi_head_attention_forward") and sample.args[9])
    )


def agree(want, got, by_type):
    assert type(want) is type(got)
    a, b = tree_leaves(want), tree_leaves(got)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if not isinstance(x, torch.Tensor):
            assert x == y
            continue
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if not by_type:
            torch.testing.assert_close(
                y.resolve_conj(), x.resolve_conj(), rtol=2e-5, atol=2e-5, equal_nan=True, check_stride=False
            )


def compare(info, function, listed):
    """Results and operands after the call are eager torch's; or the operator is refused, as listed."""
    refusals = 0
    for sample in samples_of(info):
        call, tensors = prepared(function, sample)
        eager, captured = copied(tensors), copied(tensors)
        try:
            want = call(*eager)
        except RuntimeError:
            continue  # torch itself has no kernel here
        try:
            got = mycel.jit(call, strict=True)(*captured)
        except CaptureError:
            assert info.name in listed, "refused, and not listed above"
            refusals += 1
            continue
        agree((want, eager), (got, captured), by_type=draws(info, sample))
    assert refusals or info.name not in listed, "listed as refused, but captured"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", CASES)
def test_is_eager_torch(info):
    compare(info, info.op, REFUSED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", [c for c in CASES if c.values[0].inplace_variant])
def test_in_place_is_eager_torch(info):
    compare(info, info.inplace_variant, REFUSED_IN_PLACE)


# -- gradients

NO_GRADIENT = {  # operators that torch's autograd has another gradient of than their results have
    "native_layer_norm": "torch drops the cotangents of mean and deviation",
    "native_batch_norm": "torch drops the cotangents of mean and deviation",
    "_native_batch_norm_legit": "torch drops the cotangents of mean and deviation",
    "_batch_norm_with_update": "torch drops the cotangents of mean and deviation",
}
DIFFERENTIABLE = [
    c
    for c in CASES
    if torch.float64 in c.values[0].dtypes
    and c.values[0].supports_autograd
    and c.values[0].name not in REFUSED | NO_GRADIENT | dict.fromkeys(RANDOM)
]


def number_of(results):
    """A number that depends on all that is differentiable of some results."""
    total = torch.zeros((), dtype=torch.float64)
    for i, x in enumerate(tree_leaves(results)):
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()):
            x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
            total = total + (x * (torch.arange(x.numel(), dtype=x.dtype) * 0.7 + i).cos().reshape(x.shape)).sum()
    return total


def same_gradients(info, sample):
    def processed(first, *args, **kwargs):
        process = sample.output_process_fn_grad or (lambda results: results)
        return process(info.op(first, *args, **kwargs))

    call, tensors = prepared(processed, sample)
    at = tuple(i for i, x in enumerate(tensors) if x.requires_grad)
    wanted = number_of(call(*tensors)) if at else None
    if wanted is None or not wanted.requires_grad or draws(info, sample):
        return
    grads = torch.autograd.grad(wanted, [tensors[i] for i in at], allow_unused=True)
    value, ours = mycel.value_and_grad(lambda *xs: number_of(call(*xs)), argnums=at, strict=True)(
        *(x.detach() for x in tensors)
    )
    close = {"rtol": 1e-6, "atol": 1e-7, "equal_nan": True, "check_stride": False}
    torch.testing.assert_close(value, wanted.detach(), **close)
    for i, g, want in zip(at, ours, grads, strict=True):
        want = torch.zeros_like(tensors[i]) if want is None else want
        torch.testing.assert_close(g.resolve_conj(), want.resolve_conj(), **close)


def same_gradients_of(info, samples):
    for dtype in {torch.float64, torch.complex128} & info.dtypes:
        torch.default_generator.manual_seed(1)
        for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, True), samples):
            same_gradients(info, sample)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", DIFFERENTIABLE)
def test_gradients_are_those_of_autograd(info):
    same_gradients_of(info, 2)


SURPRISING = [
    "_safe_softmax",
    "linear_cross_entropy",
    "lstsq",
    "pinv",
    "logaddexp",
    "rms_norm",
]  # whose gradients a rule of their own has


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("info", [c for c in DIFFERENTIABLE if any(name in c.id for name in SURPRISING)])
def test_gradients_of_some_operators(info):
    same_gradients_of(info, 2)


def test_what_is_computed_of_values_has_no_gradient_to_lose():
    """Its shape depends on values: as torch's own code it keeps its gradient, else it is refused."""
    a, b = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 2, dtype=torch.float64)

    def solved(a, b):
        return torch.linalg.lstsq(a, b, driver="gelsd").solution.sin().sum()

    with pytest.raises(CaptureError, match="its result would have no gradient"):
        mycel.grad(solved, strict=True)(a.detach(), b)
    with pytest.warns(UserWarning, match="runs as plain Python"):
        torch.testing.assert_close(mycel.grad(solved)(a.detach(), b), torch.autograd.grad(solved(a, b), a)[0])
