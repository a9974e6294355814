"""What a torch.autograd.Function does beside its gradient: states, marks, attributes of its context."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from stepping import agree, beside, sgd
from torch import nn
from torch.autograd import Function

import mycel

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


class Clamped(Function):
    """Updates its argument in place."""

    @staticmethod
    def forward(ctx, x):
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (y > 0) * 0.9


class Averaged(Function):
    """Updates another tensor that it is given, without a word."""

    @staticmethod
    def forward(ctx, x, mean, momentum):
        mean.mul_(1 - momentum).add_(momentum * x.mean(0))
        ctx.save_for_backward(x)
        return x - mean

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g + 0.1 * x, None, None


class Tracked(Function):
    """Updates the state of a module, which its gradient reads."""

    @staticmethod
    def forward(ctx, x, module):
        module.mean.lerp_(x.mean(0), 0.3)
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2 + ctx.module.mean * 0.1, None


class Marked(Function):
    """A result of floats that is marked to have no gradient."""

    @staticmethod
    def forward(ctx, x):
        scale = x.exp()
        ctx.mark_non_differentiable(scale)
        ctx.save_for_backward(x)
        return x.sin(), scale

    @staticmethod
    def backward(ctx, g, of_scale):
        (x,) = ctx.saved_tensors
        return g * x.cos() + of_scale


class Alone(Function):
    """So marked, and no gradient is made up for it."""

    @staticmethod
    def forward(ctx, x):
        scale = x.exp()
        ctx.mark_non_differentiable(scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), scale

    @staticmethod
    def backward(ctx, g, of_scale):
        (x,) = ctx.saved_tensors
        return g * x.cos() if of_scale is None else g


class Keeps(Function):
    """What backward needs lies in attributes of the context."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.mask, ctx.pair, ctx.more, ctx.rows = x > 0, (x, w), {"exp": x.exp()}, len(x)
        return x * ctx.mask * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.pair
        return g * ctx.mask * w + 0.01 * ctx.more["exp"] * g / ctx.rows, (g * x * ctx.mask).sum(0)


class ByNumpy(Function):
    """A forward that cannot be captured, beside a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.as_tensor(np.sinc(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Model(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.layer, self.w, self.use = nn.Linear(3, 3), nn.Parameter(torch.tensor([0.5, -1.0, 2.0])), use
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        return self.use(self, self.layer(x))


def clamped(m, h):
    h = h * 1
    before, after = h + 1, Clamped.apply(h)
    return before.mean() + h.sum() * 0.1 + (after * m.w).pow(2).mean()


def clamped_view(m, h):
    whole = h * 1
    Clamped.apply(whole[1:3])
    return (whole * m.w).pow(2).sum()


def averaged(m, h):
    y = Averaged.apply(h, m.mean, 0.2)
    return (y * m.w).square().mean() + (m.mean * h).sum()


def averaged_in_a_branch(m, h):
    if h.sum() < 100:
        h = Averaged.apply(h, m.mean, 0.2)
    return (h * m.w).square().mean() + (m.mean * h).sum()


def product(pair):
    return (pair[0] * pair[1]).mean()


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize(
    "use",
    [
        clamped,
        clamped_view,
        averaged,
        averaged_in_a_branch,
        lambda m, h: (Tracked.apply(h, m) * m.w).square().mean(),
        lambda m, h: product(Marked.apply(h * m.w)),
        lambda m, h: product(Alone.apply(h * m.w)),
        lambda m, h: Keeps.apply(h, m.w).square().mean(),
        lambda m, h: (ByNumpy.apply(h) * m.w).square().mean(),
    ],
    ids=["dirty", "dirty view", "buffer", "branch", "module", "marked", "alone", "attributes", "numpy"],
)
def test_functions_are_those_of_torch(use):
    torch.manual_seed(0)
    model = Model(use).double()
    twin, plain = copy.deepcopy(model), copy.deepcopy(model)
    value, got = mycel.value_and_grad(twin, wrt=twin)(X)
    loss = plain(X)
    loss.backward()
    assert torch.allclose(value, loss.detach()) and torch.allclose(twin.mean, plain.mean)
    for name, p in plain.named_parameters():
        assert torch.allclose(got[name], p.grad), name
    agree(beside(lambda: model, sgd(), lambda _: (X,), steps=3))


@pytest.mark.parametrize("name", ["Keeps", "Clamped"])
def test_they_are_captured(name):
    """No island: the program has their equations."""
    model = Model({"Keeps": lambda m, h: Keeps.apply(h, m.w).mean(), "Clamped": clamped}[name]).double()
    assert "island" not in str(mycel.capture(model, X))


class Solved(Function):
    """A solve, whose backward is another one."""

    @staticmethod
    def forward(ctx, a, b):
        y = torch.linalg.solve(a, b)
        ctx.save_for_backward(a, y)
        return y

    @staticmethod
    def backward(ctx, g):
        a, y = ctx.saved_tensors
        back = Solved.apply(a.mT, g)
        return -back @ y.mT, back


def test_a_function_that_calls_itself_in_its_backward_is_followed_to_second_derivatives():
    a, b = X @ X.T + torch.eye(4, dtype=X.dtype), X + 1

    def energy(a, b):
        return Solved.apply(a, b).square().sum()

    def slope(a, b):
        return mycel.grad(energy)(a, b).square().sum()

    def plain(a, b):
        return torch.linalg.solve(a, b).square().sum()

    torch.testing.assert_close(mycel.grad(energy, (0, 1))(a, b), torch.func.grad(plain, (0, 1))(a, b))
    second = torch.func.grad(lambda a, b: torch.func.grad(plain)(a, b).square().sum())(a, b)
    torch.testing.assert_close(mycel.grad(slope)(a, b), second)
    with pytest.raises(mycel.errors.GradientError, match="third_derivative"):
        mycel.grad(lambda a, b: mycel.grad(slope)(a, b).sum())(a, b)
