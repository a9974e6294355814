"""Hooks that change gradients: what torch.autograd makes of them, our gradients and steps make, too."""

from __future__ import annotations

import pytest
import torch
from stepping import agree, beside, cross_entropy, mlp, rows, sgd
from torch import nn

import mycel
from mycel.errors import CaptureError

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


class Inner(nn.Module):
    """Two arguments and two results, one of them an integer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y):
        return torch.tanh(self.a(x) * y), self.b(y).square(), x.argmax()


class Hooked(nn.Module):
    """A value's hook, and a module that is called twice."""

    def __init__(self, hook=None):
        super().__init__()
        self.first, self.inner, self.out, self.hook = nn.Linear(6, 6), Inner(), nn.Linear(6, 5), hook

    def forward(self, x):
        h, k, _ = self.inner(self.first(x), self.first(x) + 1)
        if self.hook is not None:
            k.register_hook(self.hook)
        h, k, _ = self.inner(h, k)
        return self.out(h + k)


def scaled(m, into, outof):
    return (into[0] * outof[0].norm(), into[1].clamp(max=outof[1].mean()))


def clipped(g):
    return g / g.norm() if g.norm() > 0.01 else g


HOOKS = {
    "a parameter": lambda m: m.inner.a.weight.register_hook(lambda g: g.clamp(min=0)),
    "a parameter twice": lambda m: [m.inner.b.weight.register_hook(f) for f in (clipped, lambda g: g * 3)],
    "a module": lambda m: m.inner.register_full_backward_hook(scaled),
    "a module within": lambda m: m.inner.b.register_full_backward_hook(lambda m, i, o: (i[0] * 2 + o[0].sum(),)),
    "a module before": lambda m: m.inner.register_full_backward_pre_hook(lambda m, o: (o[0] * 3, o[1].abs(), None)),
    "a value": lambda m: setattr(m, "hook", clipped),
}


@pytest.mark.parametrize("name", HOOKS)
def test_gradients_are_changed_as_in_torch(name):
    def loss(x):
        return model(x).square().sum()

    torch.manual_seed(0)
    model = Hooked()
    ours = mycel.value_and_grad(loss, wrt=model)
    for change in (None, HOOKS[name]):  # a hook that is added later is seen, too
        if change is not None:
            change(model)
        want = torch.autograd.grad(loss(X), [*model.parameters()])
        value, gradients = ours(X)
        torch.testing.assert_close(value, loss(X).detach())
        torch.testing.assert_close(dict(zip(gradients, want, strict=True)), gradients)


def test_steps_follow_hooks():
    def hook(i, model, _):
        if i == 0:
            model[0].weight.register_hook(lambda g: g * 0.5)
            model[1].register_full_backward_hook(lambda m, i, o: (i[0] + 0.1 * o[0],))

    agree(beside(mlp, sgd(), rows, cross_entropy, steps=3, change=hook), params=1e-5)
    agree(beside(lambda: Hooked(clipped), sgd(), rows, cross_entropy, steps=3), params=1e-5)


@pytest.mark.parametrize("kind", ["looks only", "too late", "old", "removed"])
def test_other_hooks_are_refused(kind):
    model = nn.Linear(6, 6)

    def loss(x):
        y = model(x)
        total = y.sum()
        if kind == "too late":
            y.register_hook(lambda g: g * 2)
        if kind == "removed":
            total.register_hook(lambda g: g * 2).remove()
        return total

    if kind == "looks only":
        model.weight.register_hook(lambda g: None)
    if kind == "old":
        model.register_backward_hook(lambda m, i, o: None)
    with pytest.raises(CaptureError, match="hook"):
        mycel.value_and_grad(loss, wrt=model, strict=True)(X)


class Asks(nn.Module):
    """Asks values whether torch would record their gradient, as code with hooks does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        h = self.a(x)
        if h.requires_grad and not h.is_leaf and h.grad_fn is not None:
            h.register_hook(lambda g: g * 3)
        with torch.no_grad():
            quiet = self.a(x)
        leaf = h.detach().requires_grad_()
        asked = [x, quiet, leaf, h.detach(), h.argmax(1), self.b(h)]
        marks = [t.requires_grad + 2 * t.is_leaf for t in asked]
        return self.b(torch.tanh(h)) * sum(k * 7**i for i, k in enumerate(marks))


@pytest.mark.parametrize("frozen", [(), ("a",), ("a", "b")])
def test_code_asks_whether_a_gradient_is_recorded(frozen):
    torch.manual_seed(0)
    model = Asks()
    fast = mycel.jit(model)
    for quiet in ((), frozen):  # another answer is another program
        for name in ("a", "b"):
            getattr(model, name).requires_grad_(name not in quiet)
        assert torch.allclose(fast(X), model(X))
        with torch.no_grad():
            assert torch.allclose(fast(X), model(X))
    trained = [p for p in model.parameters() if p.requires_grad]
    if trained:
        model(X).square().sum().backward()
        gradients = mycel.value_and_grad(lambda x: model(x).square().sum(), wrt=model)(X)[1]
        for name, p in model.named_parameters():
            assert p.grad is None or torch.allclose(gradients[name], p.grad, rtol=1e-4), name
