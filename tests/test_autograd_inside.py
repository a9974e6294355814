"""torch.autograd.grad inside of captured code: physics-informed losses, gradient penalties, forces."""

from __future__ import annotations

import pytest
import torch
from models import same
from stepping import adam, agree, beside
from torch import nn

import mycel
from mycel.errors import CaptureError

X = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)


def net(width=2):
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))


class Equation(nn.Module):
    """The residual of a differential equation of second order."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        x = x.clone().requires_grad_(True)
        u = self.net(x)
        (du,) = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), create_graph=True)
        (d2,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
        return (du[:, 1] - 0.1 * d2[:, 0]).square().mean() + u.square().mean()


class Penalty(nn.Module):
    """A critic whose gradient is to have norm one, between two points."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        between = (0.3 * x + 0.7 * x.flip(0)).requires_grad_()
        (g,) = torch.autograd.grad(outputs=self.net(between).sum(), inputs=between, create_graph=True)
        return self.net(x).mean() + 10 * (g.norm(dim=1) - 1).square().mean()


class Forces(nn.Module):
    """Energies, and their gradient without one of its own."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        x.requires_grad_(True)
        energy = self.net(x).sum()
        force = -torch.autograd.grad(energy, x, retain_graph=True)[0]
        return energy * 0.1 + (force * self.net(x)).square().mean()


class Weights(nn.Module):
    """With respect to parameters, one of them unused."""

    def __init__(self):
        super().__init__()
        self.net, self.spare = net(), nn.Parameter(torch.ones(2))

    def forward(self, x):
        loss = self.net(x).square().mean()
        first, none = torch.autograd.grad(loss, [self.net[0].weight, self.spare], create_graph=True, allow_unused=True)
        assert none is None
        return loss + first.square().sum() + 0 * self.spare.sum()


@pytest.mark.parametrize("make", [Equation, Penalty, Forces, Weights])
def test_losses_of_gradients(make):
    def batch(i):
        return (torch.randn(5, 2, generator=torch.Generator().manual_seed(i)),)

    agree(beside(make, adam(), batch, steps=3))


def test_values_of_gradients():
    def fn(x, g):
        x = x.detach().requires_grad_()
        y, z = x.sin() * x, x.exp()
        return torch.autograd.grad([y, z.sum()], [x], [g, None])[0]

    same(mycel.jit(fn)(X, X + 1), fn(X, X + 1))

    def unused(x):
        x, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        return torch.autograd.grad(x.square().sum(), [x, other], materialize_grads=True)

    same(mycel.jit(unused)(X), unused(X))


def test_a_copy_is_a_value_of_its_own():
    def fn(x):
        z = x.clone().requires_grad_()
        w = x.detach().requires_grad_()
        y = (z.square() + 3 * x + w.exp()).sum()
        return torch.autograd.grad(y, [z, w])

    same(mycel.jit(fn)(X), fn(X))


def test_a_seed_of_the_same_values():
    def fn(x):
        x = x.clone().requires_grad_()
        y = x.square()
        (g,) = torch.autograd.grad(y, x, grad_outputs=y, create_graph=True)
        return torch.autograd.grad(g.sum(), x)[0]

    same(mycel.jit(fn)(X), fn(X))


@pytest.mark.parametrize("fn", [
    lambda x: torch.autograd.grad(x.square(), x)[0],
    lambda x: torch.autograd.grad(x.detach().square().sum(), x)[0],
])  # fmt: skip
def test_what_torch_refuses_is_refused(fn):
    with pytest.raises(CaptureError):
        mycel.jit(fn)(X)


def test_gradients_in_a_branch_of_what_came_before_are_refused():
    weight = nn.Parameter(torch.ones(2))

    def fn(x):
        y = (x * weight).square().sum()
        g = x
        if y > 0:
            (g,) = torch.autograd.grad(y * x.sum(), x)
        return g

    with pytest.raises(CaptureError, match="branch or loop"):
        mycel.jit(fn, strict=True)(X.float())


def leaves(x):
    x = x.detach().requires_grad_()
    (x**3).sum().backward(create_graph=True)
    twice = x.grad.sin()
    (x * 2).sum().backward()
    return twice, x.grad


def made_here(x):
    z, w = torch.zeros(2, dtype=x.dtype, requires_grad=True), torch.ones(2, dtype=x.dtype)
    w.requires_grad = True
    (z * w * x).exp().sum().backward(inputs=[z])
    assert w.grad is None
    first, z.grad = z.grad, None
    torch.autograd.backward([(z * w).sum(), w.square()], [None, x[0]])
    return first, z.grad, w.grad


@pytest.mark.parametrize("fn", [leaves, made_here])
def test_backward_leaves_gradients_in_traced_leaves(fn):
    same(mycel.jit(fn, strict=True)(X), fn(X))


def test_backward_to_parameters_is_refused():
    layer = nn.Linear(2, 1).double()
    with pytest.raises(CaptureError, match=r"leaves gradients in \.grad of parameters"):
        mycel.jit(lambda x: layer(x).sum().backward())(X)
    assert layer.weight.grad is None
