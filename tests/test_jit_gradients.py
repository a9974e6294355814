"""torch's autograd through jitted code: gradients that code gives itself are those that eager code has."""

import pytest
import torch
from torch import distributions as D
from torch import nn

import mycel

X = torch.tensor([1.2, 0.1, -0.7], dtype=torch.float64)


class Round(torch.autograd.Function):
    """A step with three times the gradient of a straight line."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Both(torch.autograd.Function):
    """Two results, one of them of integers, and an operand that has no gradient."""

    @staticmethod
    def forward(ctx, x, y, n):
        ctx.save_for_backward(x, y)
        ctx.n = n
        values, places = (x * y).sort()
        ctx.mark_non_differentiable(places)
        return values, places, x

    @staticmethod
    def backward(ctx, g, _, h):
        x, y = ctx.saved_tensors
        return g * y * ctx.n + h, g.sum() * x.cos(), None


def rounded(x):
    return (Round.apply(x * 2) * x).sum()


def two_results(x):
    values, places, same = Both.apply(x, x * x, 2)
    return (values * values[places]).sum() + (same * same).sum()


def unseen_update(x):
    y = x * 2
    y.detach().clamp_(min=0.5)
    return (y * y).sum()


def hooked(x):
    y = x * 2
    y.register_hook(lambda g: g * 5)
    return (y * y).sum()


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("fn", [rounded, two_results, unseen_update, hooked], ids=lambda f: f.__name__)
def test_gradients_of_ones_own(fn, mode):
    wanted, given = (X.clone().requires_grad_() for _ in range(2))
    want, got = fn(wanted), mycel.jit(fn, strict=True, mode=mode)(given)
    torch.testing.assert_close(got, want)
    want.backward()
    got.backward()
    torch.testing.assert_close(given.grad, wanted.grad)


def test_a_gradient_of_ones_own_twice():
    wanted, given = (X.clone().requires_grad_() for _ in range(2))
    second = []
    for fn, x in ((rounded, wanted), (mycel.jit(rounded, strict=True), given)):
        (g,) = torch.autograd.grad(fn(x), x, create_graph=True)
        second.append(torch.autograd.grad((g * g).sum(), x)[0])
    torch.testing.assert_close(*second)


@pytest.mark.parametrize(
    "draws",
    [
        lambda w: D.Gamma(w, w * 2).rsample((20_000,)).square(),
        lambda w: D.Dirichlet(w).rsample((20_000,)).square(),
        lambda w: D.Wishart(w.sum().expand(20_000) + 3, torch.eye(3, dtype=w.dtype) * w).rsample(),
    ],
    ids=["gamma", "dirichlet", "wishart"],
)
def test_gradients_of_draws(draws):
    """The mean of many draws has the same gradient as that of torch's draws."""
    torch.manual_seed(0)
    grads = []
    for run in (lambda fn: fn, lambda fn: mycel.jit(fn, strict=True)):
        w = nn.Parameter(torch.tensor([2.0, 3.0, 1.5], dtype=torch.float64))
        run(lambda w: draws(w).mean(0).sum())(w).backward()
        grads.append(w.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0.05, atol=0.03)


class Queue(nn.Module):
    """What backward needs is a buffer that the call changes, as a queue of keys is, and a parameter that it sets."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(X.clone())
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("queue", torch.arange(6.0, dtype=torch.float64).view(2, 3))

    def forward(self, x):
        with torch.no_grad():
            self.scale.copy_(x.abs() + 1)
        loss = (self.queue.clone() @ (self.w * x * self.scale)).square().sum()
        with torch.no_grad():
            self.queue[1] = x.detach()
        return loss


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_gradients_through_what_the_call_changes(mode):
    model, twin = Queue(), Queue()
    run = mycel.jit(model, mode=mode, strict=True)
    for x in (X, X * 2):
        got, want = run(x), twin(x)
        torch.testing.assert_close(got, want)
        got.backward()
        want.backward()
        torch.testing.assert_close(model.w.grad, twin.w.grad)
        torch.testing.assert_close(model.scale.grad, twin.scale.grad)
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
