"""torch.autograd.grad inside of captured code: physics-informed losses, gradient penalties, forces."""

from __future__ import annotations

import pytest
import torch
from models import same
from stepping import adam, agree, beside
from torch import nn
from torch.autograd import forward_ad

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


class Attention(nn.Module):
    """The gradients of what lies on the way to another of the tensors that are asked for, and of that."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = x.clone().requires_grad_()
        h = self.body(x).tanh()
        z = h * 2
        scores = self.head(z)
        dz, dx, dh = torch.autograd.grad(scores.max(1).values.sum(), [z, x, h], create_graph=True)
        (twice,) = torch.autograd.grad((dx.square().sum() + dz.square().sum()) * h.sum(), h, create_graph=True)
        return scores.square().mean() + (dh * h).relu().mean() + dx.square().sum() + dz.exp().mean() + twice.sum()


class Curvature(nn.Module):
    """Of second order, by a value that the first order was taken of beside what it is made of."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.body(x).tanh()
        y = self.head(h).square().sum()
        dh, dw = torch.autograd.grad(y, [h, self.body.weight], create_graph=True)
        (twice,) = torch.autograd.grad(dh.square().sum(), h, create_graph=True, allow_unused=True)
        assert twice is not None
        return dw.square().mean() + twice.abs().mean() + y


@pytest.mark.parametrize("make", [Equation, Penalty, Forces, Weights, Attention, Curvature])
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
    with pytest.raises(CaptureError, match=r"of a tensor with several elements|that the outputs do not depend on"):
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


def retained(x):
    x = x.clone().requires_grad_()
    h = x.sin()
    h.retain_grad()
    z = h * x
    z.retain_grad()
    z.square().sum().backward()
    assert z.requires_grad and not h.is_leaf
    return x.grad, h.grad, z.grad


@pytest.mark.parametrize("fn", [leaves, made_here, retained])
def test_backward_leaves_gradients_in_traced_leaves(fn):
    same(mycel.jit(fn, strict=True)(X), fn(X))


def test_backward_to_parameters_is_refused():
    layer = nn.Linear(2, 1).double()
    with pytest.raises(CaptureError, match=r"leaves gradients in \.grad of parameters"):
        mycel.jit(lambda x: layer(x).sum().backward())(X)
    assert layer.weight.grad is None


class Adversary(nn.Module):
    """One step against the model by backward(), whose gradients of parameters are taken away again."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        x = x.clone().requires_grad_()
        self.net(x).sum().backward()
        assert self.net[0].weight.grad is not None
        norm = sum(p.grad.square().sum() for p in self.net.parameters())
        self.zero_grad()
        return self.net(x.detach() + 0.1 * x.grad.sign()).square().mean() * (1 + norm)


def test_backward_to_parameters_whose_gradients_are_taken_away():
    agree(beside(lambda: Adversary().double(), adam(), lambda i: (X + i,), steps=3, strict=True))
    model = Adversary().double()
    run = mycel.jit(model, strict=True)
    run(X).backward()
    first = model.net[0].weight.grad
    run(X)
    assert first.any() and model.net[0].weight.grad is None


# -- forward mode


def smooth():
    return nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2), nn.Tanh())


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 2)

    def forward(self, x):
        return self.conv(x[:, None]).tanh().flatten(1)


def by_jvp(net, x):
    return torch.func.jvp(net, (x,), (x.sin(),))[1]


def by_dual(net, x):
    with forward_ad.dual_level():
        y, t = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.sin())))
        again = forward_ad.make_dual(y, 2 * t)  # what y is made of has no part in it
        return forward_ad.unpack_dual(again.tanh()).tangent + y


def by_linearize(net, x):
    y, push = torch.func.linearize(net, x)
    return push(x.sin()) * y + push(x.cos())


def by_functional(net, x):
    return torch.autograd.functional.jvp(net, x, x.sin(), create_graph=True)[1]


def of_gradients(net, x):
    slope = torch.func.grad(lambda z: net(z).square().sum())
    return torch.func.jvp(slope, (x,), (x.sin(),))[1]


def of_weights(net, x):
    weights = dict(net.named_parameters())
    run = lambda weights: torch.func.functional_call(net, weights, (x,))
    return torch.func.jvp(run, (weights,), ({k: torch.ones_like(p) for k, p in weights.items()},))[1]


def of_tangents(net, x):
    return torch.func.jvp(lambda z: by_jvp(net, z), (x,), (x.cos(),))[1]


def under_no_grad(net, x):
    with torch.no_grad(), forward_ad.dual_level():  # which forward mode does not heed
        along = forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.sin()))).tangent
    return along * net(x)


class Along(nn.Module):
    def __init__(self, way, make):
        super().__init__()
        self.way, self.net = way, make()

    def forward(self, x):
        return self.way(self.net, x).square().mean()


@pytest.mark.parametrize("make", [smooth, Convolved])
@pytest.mark.parametrize(
    "way",
    [by_jvp, by_dual, by_linearize, by_functional, of_gradients, of_weights, of_tangents, under_no_grad],
)
def test_derivatives_along_a_direction(way, make):
    torch.manual_seed(0)
    model = Along(way, make).double()
    twin = Along(way, make).double()
    twin.load_state_dict(model.state_dict())
    loss = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), grads=True, strict=True)(X)
    want = twin(X)
    want.backward()
    assert torch.allclose(loss, want)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        wanted = torch.zeros_like(q) if q.grad is None else q.grad
        assert torch.allclose(torch.zeros_like(p) if p.grad is None else p.grad, wanted, atol=1e-10)


def test_what_has_no_tangent_says_so():
    def fn(x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x.sin())
            assert forward_ad.unpack_dual(x * 2).tangent is None
            assert forward_ad.unpack_dual(dual.detach() * 2).tangent is None
            assert forward_ad.unpack_dual(forward_ad.unpack_dual(dual).primal * 2).tangent is None
            y = dual * x
        assert forward_ad.unpack_dual(y).tangent is None
        return y

    assert torch.equal(mycel.jit(fn, strict=True)(X), fn(X))
