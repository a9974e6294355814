"""Gradients against torch.autograd: models, orders, structures of arguments, and what is refused."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from models import MODELS
from torch import nn

import mycel
from mycel import GradientError


def scalar(out):
    """One number of whatever a model returns: all of its float tensors, weighted."""
    total = 0.0
    for i, x in enumerate(leaves(out)):
        if x.is_floating_point():
            weight = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
            total = total + (x * weight).mean() * (i + 1)
    return total


def leaves(out):
    if isinstance(out, torch.Tensor):
        return [out]
    values = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return [x for v in values for x in leaves(v)]


def relative(a, b):
    return float((a - b).abs().max() / (b.abs().max() + 1e-12))


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_models(name, train):
    model = MODELS[name]().train(train)
    batch = MODELS[name].inputs()
    kept = {k: v.clone() for k, v in model.named_buffers()}
    loss = lambda: scalar(model(**batch))
    value, grads = mycel.value_and_grad(loss, wrt=model)()
    with torch.no_grad():
        for k, v in model.named_buffers():
            v.copy_(kept[k])
    want = loss()
    want.backward()
    assert relative(value.detach(), want.detach()) < 1e-5
    exact = exact_gradients(name, train)
    largest = max(float(e.abs().max()) for e in exact.values())
    for k, p in model.named_parameters():
        theirs = torch.zeros_like(p) if p.grad is None else p.grad
        assert grads[k].shape == p.shape and grads[k].dtype == p.dtype
        scale = max(float(exact[k].abs().max()), 1e-2 * largest)
        rounding = float((theirs - exact[k]).abs().max())  # what f32 costs torch itself here
        assert float((grads[k] - theirs).abs().max()) <= 1e-5 * scale + 2 * rounding, k


def exact_gradients(name, train):
    """torch.autograd in double precision."""
    model = MODELS[name]().double().train(train)
    batch = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in MODELS[name].inputs().items()
    }
    torch.set_default_dtype(torch.float64)  # models that make their own constants make them as exact
    try:
        scalar(model(**batch)).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "gpt2", "recurrent", "mixer", "resnet"])
def test_models_in_double_precision(name):
    model = MODELS[name]().double().train()
    batch = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in MODELS[name].inputs().items()
    }
    loss = lambda: scalar(model(**batch))
    _, grads = mycel.value_and_grad(loss, wrt=model)()
    loss().backward()
    for k, p in model.named_parameters():
        theirs = torch.zeros_like(p) if p.grad is None else p.grad
        assert float((grads[k] - theirs).abs().max()) <= 1e-10 * max(1.0, float(theirs.abs().max())), k


def test_a_repeated_layer_is_differentiated_once():
    model = MODELS["llama"]()
    batch = MODELS["llama"].inputs()
    text = str(mycel.value_and_grad(lambda: scalar(model(**batch)), wrt=model).program())
    assert text.count("def llama_decoder_layer_forward") == 1 and text.count("def llama_decoder_layer_backward") == 1
    assert text.count("block=@llama_decoder_layer_backward") == 3


# -- structures of arguments

X, Y = torch.tensor([0.3, -1.2, 2.0], dtype=torch.float64), torch.tensor([1.5, 0.2, -0.7], dtype=torch.float64)


def f(x, y):
    return (torch.sin(x) * y * y).sum()


def test_argnums_and_structures():
    dx, dy = torch.cos(X) * Y * Y, 2 * torch.sin(X) * Y
    assert torch.allclose(mycel.grad(f)(X, Y), dx)
    assert torch.allclose(mycel.grad(f, 1)(X, Y), dy) and torch.allclose(mycel.grad(f, -1)(X, Y), dy)
    both = mycel.grad(f, (0, 1))(X, Y)
    assert isinstance(both, tuple) and torch.allclose(both[0], dx) and torch.allclose(both[1], dy)
    nested = mycel.grad(lambda p: f(p["a"][0], p["b"]))({"a": [X], "b": Y})
    assert list(nested) == ["a", "b"] and torch.allclose(nested["a"][0], dx) and torch.allclose(nested["b"], dy)
    value, g = mycel.value_and_grad(f)(X, Y)
    assert torch.allclose(value, f(X, Y)) and torch.allclose(g, dx)


def test_has_aux():
    fn = lambda x: (f(x, Y), {"seen": x * 2, "n": 3})
    (value, aux), g = mycel.value_and_grad(fn, has_aux=True)(X)
    assert torch.allclose(value, f(X, Y)) and torch.allclose(aux["seen"], X * 2) and aux["n"] == 3
    g2, aux2 = mycel.grad(fn, has_aux=True)(X)
    assert torch.equal(g, g2) and torch.equal(aux2["seen"], X * 2)


def test_a_closure_is_not_the_argument():
    assert torch.allclose(mycel.grad(lambda z: (z * X).sum())(X), X)
    assert torch.allclose(
        mycel.grad(lambda x: mycel.grad(lambda z: (z * x).sum())(x).sum())(X), torch.ones(3, dtype=torch.float64)
    )


def test_unused_and_frozen_parameters():
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2), "c": nn.Linear(3, 2)}).double()
    model["c"].requires_grad_(False)
    g = mycel.grad(lambda: (model["a"](X) + model["c"](X)).sum(), wrt=model)()
    assert list(g) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert torch.equal(g["b.weight"], torch.zeros(2, 3, dtype=torch.float64)) and torch.allclose(
        g["a.weight"], X.expand(2, 3)
    )


def test_stop_gradient_detach_and_no_grad():
    def stopped(x):
        with torch.no_grad():
            s = x * 2
        return (x * s + mycel.stop_gradient({"x": x})["x"] * x + x.detach() ** 2).sum()

    assert torch.allclose(mycel.grad(stopped)(X), 2 * X + X)


# -- orders ----------------------------------------------------------------------------------------------------------


def g(x):
    return (torch.tanh(x) * x.exp()).sum() + (x[0] * x[1] * x[2]) ** 2


def test_second_and_third_derivatives():
    assert torch.allclose(mycel.hessian(g)(X), torch.func.hessian(g)(X), atol=1e-10)
    ours = mycel.grad(lambda x: mycel.hessian(g)(x).pow(2).sum())(X)
    theirs = torch.func.grad(lambda x: torch.func.hessian(g)(x).pow(2).sum())(X)
    assert torch.allclose(ours, theirs, atol=1e-9)
    third = lambda d, h: d(lambda x: d(lambda x: d(h)(x).sum())(x).sum())
    assert torch.allclose(third(mycel.grad, g)(X), third(torch.func.grad, g)(X), atol=1e-9)


def test_forward_mode_and_mixed():
    t = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for ours, theirs in zip(mycel.jvp(g, (X,), (t,)), torch.func.jvp(g, (X,), (t,)), strict=True):
        assert torch.allclose(ours, theirs)
    ours = mycel.jvp(mycel.grad(g), (X,), (t,))[1]
    assert torch.allclose(ours, torch.func.jvp(torch.func.grad(g), (X,), (t,))[1])
    ours = mycel.grad(lambda x: mycel.jvp(g, (x,), (t,))[1])(X)
    assert torch.allclose(ours, torch.func.grad(lambda x: torch.func.jvp(g, (x,), (t,))[1])(X))


def test_vjp():
    fn = lambda x, y: {"a": x * y, "b": (torch.sin(x), 3)}
    out, pull = mycel.vjp(fn, X, Y)
    want, torch_pull = torch.func.vjp(lambda x, y: (x * y, torch.sin(x)), X, Y)
    ours = pull({"a": Y, "b": (X, 3)})
    for a, b in zip(ours, torch_pull((Y, X)), strict=True):
        assert torch.allclose(a, b)
    assert torch.allclose(out["a"], want[0])


@pytest.mark.parametrize(
    "name",
    ["gelu", "silu", "softplus", "layer_norm", "softmax", "logsumexp", "attention", "conv", "cross_entropy", "fft"],
)
def test_second_derivatives_of_operators(name):
    F = nn.functional
    x = torch.linspace(-1, 1.3, 24, dtype=torch.float64).reshape(2, 3, 4)
    w = torch.linspace(-0.5, 1, 6, dtype=torch.float64).reshape(2, 3, 1)
    fns = {
        "gelu": lambda x: F.gelu(x),
        "silu": F.silu,
        "softplus": F.softplus,
        "layer_norm": lambda x: F.layer_norm(x, (4,)),
        "softmax": lambda x: x.softmax(-1),
        "logsumexp": lambda x: x.logsumexp(1),
        "conv": lambda x: F.conv1d(x, w) ** 2,
        "attention": lambda x: F.scaled_dot_product_attention(
            x[:, None], x[:, None] * 2, x[:, None] ** 2, is_causal=True
        ),
        "cross_entropy": lambda x: F.cross_entropy(x.reshape(6, 4), torch.arange(6) % 4),
        "fft": lambda x: torch.fft.fft(x).abs(),
    }
    fn = lambda x: (fns[name](x) ** 3).sum()
    y = x.clone().requires_grad_()
    # torch's other attention kernels have no second derivative
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        (first,) = torch.autograd.grad(fn(y), y, create_graph=True)
        (want,) = torch.autograd.grad((first**2).sum(), y)
    ours = mycel.grad(lambda x: (mycel.grad(fn)(x) ** 2).sum())(x)
    assert relative(ours, want) < 1e-9


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: mycel.grad(lambda x: x * 2)(X), r"scalar; this result is f64\[3\]"),
        (lambda: mycel.grad(lambda x: (x.sum(), 2))(X), "returns a tuple of 2"),
        (lambda: mycel.grad(lambda x: x.sum())(torch.tensor([1, 2])), "not floating point"),
        (lambda: mycel.grad(f, 2)(X, Y), "argnums=2: the function was called with 2"),
        (lambda: mycel.grad(lambda x, n: (x * n).sum(), 1)(X, 2.0), "float 2.0, not a tensor"),
        (lambda: mycel.grad(lambda: X.sum(), wrt=nn.ReLU())(), "no parameter"),
        (lambda: mycel.jvp(f, (X, Y), (X,)), "2 primals and 1 tangents"),
        (lambda: mycel.jvp(f, (X, Y), (X, Y[:2])), r"the tangent of y: f64\[3\] is f64\[2\]"),
        (lambda: mycel.vjp(f, X, Y)[1](X), "a cotangent is"),
        (lambda: mycel.vjp(lambda x: (x, x * 2), X)[1](X), "structure of the result"),
        (lambda: mycel.grad(lambda x: (x.sum(), 1), has_aux=False)(X), "scalar"),
        (lambda: mycel.grad(lambda x: x.sum(), has_aux=True)(X), r"\(value, aux\)"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(GradientError, match=message):
        call()


def test_refusals_name_the_line():
    def not_scalar(x):
        return x * 2

    here = not_scalar.__code__.co_firstlineno
    for call in (lambda: mycel.grad(not_scalar)(X), lambda: mycel.grad(not_scalar)(torch.tensor([1, 2]))):
        with pytest.raises(GradientError, match=rf"(?s)test_gradients.py:{here}\n +def not_scalar"):
            call()

    def no_rule(x):
        return torch.poisson(x.exp()).sum()

    with pytest.raises(
        GradientError,
        match=rf"(?s)no gradient rule for opaque_random.*test_gradients.py:{no_rule.__code__.co_firstlineno + 1}",
    ):
        mycel.grad(no_rule)(X)


def test_check_finite_names_the_line():
    def loss(x):
        a = x - 1
        return torch.log(a).sum()

    x = torch.tensor([2.0, 1.0])
    with pytest.raises(mycel.RunError, match=r"(?s)log made infinity in 1 of 2.*test_gradients.py:\d+"):
        mycel.jit(loss, check_finite=True)(x)

    def root(x):
        return torch.sqrt(x).sum()

    with pytest.raises(mycel.RunError, match=r"(?s)made (NaN|infinity).*test_gradients.py:\d+ backward"):
        mycel.grad(root, check_finite=True)(torch.tensor([0.0, 1.0]))
    assert torch.equal(mycel.jit(loss, check_finite=True)(x + 1), loss(x + 1))


def test_a_gradient_is_python_that_needs_torch_alone(tmp_path):
    """Saved to a file and run without Mycel it gives the same result: loops, branches, constants of all sizes."""
    table = torch.linspace(0, 1, 100, dtype=torch.float64)

    def fn(x):
        y = x * torch.tensor([1.0, -2.0, float("inf")], dtype=torch.float64).clamp(max=3)
        while y.sum() < 50:
            if y[0] > 2:
                y = y * 1.5
            else:
                y = y + torch.tensor(table_values, dtype=torch.float64)[:3]
        return (y * y).sum()

    table_values = table.tolist()
    x = torch.tensor([0.3, 0.1, 2.0], dtype=torch.float64)
    gradient = mycel.grad(fn)
    want = gradient(x)
    y = x.clone().requires_grad_()
    assert torch.allclose(want, torch.autograd.grad(fn(y), y)[0])
    source = gradient.source(x)
    assert "while" in source and "if " in source and "test_gradients.py" in source
    (tmp_path / "gradient.py").write_text(source)
    at = f"torch.tensor({x.tolist()}, dtype=torch.float64)"
    script = f"import sys, torch\nsys.modules['mycel'] = None\nimport gradient\nprint(gradient.main({at})[0].tolist())"
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(want.tolist())


# -- what autograd does not see, and what has no rule of its own


def under_no_grad(x):
    y = x * 2
    with torch.no_grad():
        y.mul_(3)
    return (y * y).sum()


def through_data(x):
    y = x * 2
    y.data.clamp_(min=0)
    return (y * x).sum()


def through_detach(x):
    y = x * 2
    y.detach().mul_(0.5)
    return (y * x).sum()


@pytest.mark.parametrize(
    "fn", [under_no_grad, through_data, through_detach, lambda q: nn.functional.cosine_similarity(q, q.flip(0) * q, 0)]
)
def test_an_unseen_update_changes_the_value_not_the_gradient(fn):
    y = X.clone().requires_grad_()
    (want,) = torch.autograd.grad(fn(y * 1), y)
    value, got = mycel.value_and_grad(fn)(X)
    assert torch.allclose(got, want) and torch.allclose(value, fn(X.clone()))


class SavesItsResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b, g * a


def test_functions_with_their_own_gradient():
    total = lambda x: SavesItsResult.apply(x).sum()
    assert torch.allclose(mycel.grad(total)(X), X.exp())
    assert torch.allclose(mycel.grad(lambda x: mycel.grad(total)(x).square().sum())(X), 2 * (2 * X).exp())
    assert torch.allclose(mycel.jvp(mycel.grad(total), (X,), (X,))[1], X * X.exp())
    assert torch.allclose(mycel.hessian(total)(X), torch.diag(X.exp()))
    assert torch.allclose(mycel.grad(lambda x: Product.apply(x, x).sum())(X), 2 * X)

    @mycel.custom_vjp
    def clipped(x):
        return x * 1

    @clipped.backward
    def _(g, y, x):
        if g.norm() > 1:
            g = g / g.norm()
        return g

    ours = mycel.grad(lambda x, k: (clipped(x) * k).sum())
    for k in (0.1, 3.0):
        g = torch.full_like(X, k)
        assert torch.allclose(ours(X, torch.tensor(k, dtype=torch.float64)), g / max(1.0, float(g.norm())))


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor=2.0):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.factor * g, None


turned = Turned.apply


class Turning(nn.Module):
    turned = Turned.apply

    def __init__(self):
        super().__init__()
        self.own = Turned.apply

    def forward(self, x):
        return self.own(Turning.turned(x, 3.0), 5.0)


@pytest.mark.parametrize("fn", [turned, functools.partial(Turned.apply), lambda x: turned(x, 2.0), Turning()])
def test_an_alias_of_apply_has_the_same_gradient(fn):
    x = X.clone().requires_grad_()
    (want,) = torch.autograd.grad((fn(x) * X).sum(), x)
    assert torch.allclose(mycel.grad(lambda x: (fn(x) * X).sum())(X), want)
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: nn.functional.hardswish(3 * x).sum(),
        lambda x: x.logcumsumexp(0).prod(),
        lambda x: nn.functional.huber_loss(x - x[0].detach(), x * 0),
        lambda x: nn.functional.smooth_l1_loss(x - x[0].detach(), x * 0),
        lambda x: torch.special.i0(x).sum() ** 2,
        lambda x: torch.linalg.inv(x.outer(x) + 3 * torch.eye(3, dtype=torch.float64)).sum(),
    ],
)
def test_hessians_of_what_has_no_simple_rule(fn):
    assert torch.allclose(mycel.hessian(fn)(X), torch.autograd.functional.hessian(fn, X), atol=1e-9)
    t = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    assert torch.allclose(mycel.jvp(fn, (X,), (t,))[1], (torch.func.grad(fn)(X) * t).sum())


def test_no_derivative_in_torch_either():
    def fn(x):
        return torch.special.zeta(x.abs() + 2, x.abs() + 1).sum()

    with pytest.raises(
        GradientError,
        match=rf"(?s)no derivative for aten.special_zeta.*test_gradients.py:{fn.__code__.co_firstlineno + 1}",
    ):
        mycel.grad(fn)(X)


def test_check_finite_lets_masks_be():
    mask = torch.tensor([True, False, False])
    fn = lambda x: torch.zeros(3, dtype=torch.float64).masked_fill(mask, -float("inf")).add(x).softmax(0).pow(2).sum()
    assert torch.allclose(mycel.grad(fn, check_finite=True)(X), mycel.grad(fn)(X))


class Surrogate(torch.autograd.Function):
    """A step function whose backward looks at which arguments ask for a gradient."""

    asked: list = []

    @staticmethod
    def forward(ctx, x, mask, places, slope, frozen):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x > 0).to(x.dtype) * mask + frozen + places

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        Surrogate.asked.append(ctx.needs_input_grad)
        (x,) = ctx.saved_tensors
        mask = g * x if ctx.needs_input_grad[1] else None
        return g * ctx.slope / (1 + x.abs()), mask, None, None, None


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        self.threshold = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.rest = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        membrane = torch.zeros_like(x)
        for _ in range(3):
            membrane = 0.5 * membrane + x - self.threshold
            spike = Surrogate.apply(membrane, torch.sigmoid(x), torch.arange(3), 5.0, self.rest)
            membrane = membrane - spike.detach()
        return (spike * x).sum()


def test_a_function_is_told_which_arguments_ask_for_a_gradient():
    model, twin = Spiking(), Spiking()
    Surrogate.asked.clear()
    twin(X).backward()
    wanted = set(Surrogate.asked)
    Surrogate.asked.clear()
    loss = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), grads=True, strict=True)(X)
    assert wanted == {(True, False, False, False, False)} == set(Surrogate.asked)
    assert torch.allclose(loss, twin(X)) and torch.allclose(model.threshold.grad, twin.threshold.grad)


def test_an_argument_may_be_what_a_function_is_differentiated_by():
    x = X.clone().requires_grad_()
    fn = lambda m: (Surrogate.apply(X, m, torch.arange(3), 5.0, X) * X).sum()
    (want,) = torch.autograd.grad(fn(x), x)
    assert torch.allclose(mycel.grad(fn)(X), want)


class Widening(torch.autograd.Function):
    """Its gradient is as large as its result: torch sums it over what was expanded.  It refuses one by x."""

    @staticmethod
    def forward(ctx, x, scale):
        if ctx.needs_input_grad[0]:
            raise ValueError("x asks for a gradient")
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx, g):
        return None, g * ctx.saved_tensors[0]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1, 1), 0.5, dtype=torch.float64))

    def forward(self, x):
        return x.exp() if x.requires_grad else Widening.apply(x, self.scale)


def test_arguments_of_jit_ask_for_a_gradient_where_the_callers_do():
    model, x = Scaled(), X.reshape(1, 3).clone()
    fast = mycel.jit(model, strict=True)
    for asks in (False, True, False):
        x.requires_grad_(asks)
        assert torch.allclose(fast(x), model(x))
    with torch.no_grad():
        assert torch.allclose(fast(x.requires_grad_()), model(x))


def test_the_gradient_of_a_function_is_summed_over_what_was_expanded():
    model, twin = Scaled(), Scaled()
    x = X.reshape(1, 3)
    twin(x).pow(2).sum().backward()
    loss = lambda x: model(x).pow(2).sum()
    assert torch.allclose(mycel.grad(loss, wrt=model)(x)["scale"], twin.scale.grad)
    mycel.jit(loss)(x).backward()
    assert torch.allclose(model.scale.grad, twin.scale.grad)
