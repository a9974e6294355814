"""Hooks that change gradients: what torch.autograd makes of them, our gradients and steps make, too."""

from __future__ import annotations

import pytest
import torch
from stepping import agree, beside, cross_entropy, mlp, plain_step, rows, sgd
from torch import nn

import mycel
from mycel.errors import CaptureError, TrainError

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


def test_a_value_that_is_looked_at_before():
    """What no gradient flows through is no use of a value: its norm scales its gradient."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 5)

        def forward(self, x):
            h = self.layer(x)
            norm = h.detach().norm()
            with torch.no_grad():
                top = h.max()
            h.register_hook(lambda g: g * top / norm)
            return h.square().mean()

    agree(beside(Late, sgd(), lambda _: (X,), steps=3))
    assert "island" not in str(mycel.capture(Late(), X))


class Recorder:
    """A hook that is an object, and one that is a method."""

    def __init__(self):
        self.last, self.count, self.seen = None, 0, []

    def __call__(self, m, given, out):
        self.last, self.count = out.detach(), self.count + 1
        self.seen.append(out.mean().item())

    def before(self, m, given):
        self.seen.append(given[0].sum().item())


def recorded(kind):
    """A model with a hook that keeps something of each call, and what it keeps."""
    model, recorder, features = mlp(), Recorder(), {}
    layer = model[0]
    {
        "a list": lambda: layer.register_forward_hook(lambda m, x, y: recorder.seen.append(y.abs().mean().item())),
        "a dict": lambda: layer.register_forward_hook(lambda m, x, y: features.update(last=y.detach())),
        "an item": lambda: layer.register_forward_hook(lambda m, x, y: features.__setitem__("last", y.detach())),
        "an object": lambda: layer.register_forward_hook(recorder),
        "a method": lambda: layer.register_forward_pre_hook(recorder.before),
        "a module's gradient": lambda: layer.register_full_backward_hook(
            lambda m, into, outof: recorder.seen.append(outof[0].norm().item())
        ),
    }[kind]()
    return model, recorder, features


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")  # what a gradient's hook does besides makes an island
@pytest.mark.parametrize("kind", ["a list", "a dict", "an item", "an object", "a method", "a module's gradient"])
def test_what_hooks_keep_is_of_every_call(kind):
    (model, recorder, features), (twin, expected, kept) = recorded(kind), recorded(kind)
    twin.load_state_dict(model.state_dict())
    step, optimizer = mycel.train_step(model, sgd()(model), loss=cross_entropy, compile=False), sgd()(twin)
    for i in range(3):
        assert float(step(*rows(i))) == pytest.approx(plain_step(twin, optimizer, rows(i), cross_entropy), rel=1e-5)
    assert recorder.count == expected.count and len(recorder.seen) == len(expected.seen)
    assert recorder.seen == pytest.approx(expected.seen, rel=1e-5)
    assert features.keys() == kept.keys()
    for ours, theirs in [*((features[k], kept[k]) for k in kept), (recorder.last, expected.last)]:
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)


def test_what_hooks_keep_of_a_part_of_a_batch_is_refused_by_its_name():
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda m, x, y: seen.append(y.mean().item()))
    step = mycel.train_step(model, sgd()(model), loss=cross_entropy, accumulate=2, compile=False)
    with pytest.raises(TrainError, match="or a hook of it, keeps in seen would be of a part of the batch\n  try"):
        step(*rows(0))
    assert not seen


class Watched(nn.Module):
    """Sets a hook on its first layer when it is first asked for what that gives, as transformers does."""

    def __init__(self):
        super().__init__()
        self.layers, self.taken = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)), []

    def forward(self, x, y):
        if not getattr(self, "is_watched", False):
            self.layers[0].register_forward_hook(lambda m, given, out: self.taken.append(out))
            self.is_watched = True
        self.taken.clear()
        logits = self.layers(x)
        hidden = tuple(self.taken)
        self.taken.clear()
        return nn.functional.cross_entropy(logits, y), hidden


def test_a_hook_that_code_sets_is_set_by_calls_alone():
    torch.manual_seed(0)
    model, twin = Watched(), Watched()
    twin.load_state_dict(model.state_dict())
    x, y = torch.randn(4, 6), torch.randint(0, 5, (4,))
    step = mycel.train_step(model, sgd()(model), outputs=True, accumulate=2, compile=False)
    for _ in range(3):
        loss, (_, (hidden,)) = step(x, y)
        expected, (theirs,) = twin(x, y)
        torch.testing.assert_close((loss, hidden), (expected.detach(), theirs.detach()))
        model.load_state_dict(twin.state_dict())
    fast, again = mycel.jit(Watched()), Watched()
    for n in (2, 3):
        assert len(fast.program(x[:n], y[:n]).results) == 2
    assert len(fast(x, y)[1]) == len(fast(x, y)[1]) == len(again(x, y)[1]) == 1
