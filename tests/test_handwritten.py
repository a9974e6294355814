"""Programs as people write them by hand, each beside torch in f64: forward in training and evaluation, gradients, and
two AdamW steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from handwritten import MODELS, D, Mlp
from torch import nn

import mycel


def batch(i):
    g = torch.Generator().manual_seed(i)
    return torch.randn(6, D, generator=g, dtype=torch.float64), torch.randint(0, 4, (6,), generator=g)


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def state(model):
    return {
        **{n: p.detach() for n, p in model.named_parameters()},
        **{n: b for n, b in model.named_buffers() if b is not None},
    }


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-9, atol=1e-11), (name, (a[name] - b[name]).abs().max())


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_forward_is_that_of_torch(name, training):
    plain, twin = made(name).train(training), made(name).train(training)
    fast = mycel.jit(twin)
    for i in range(4):
        expected, loss = plain(*batch(i)), fast(*batch(i))
        assert torch.allclose(loss, expected, rtol=1e-9, atol=1e-11), i
        same(state(twin), state(plain))


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_torch(name):
    plain, twin = made(name), made(name)
    value_and_grad = mycel.value_and_grad(lambda *args: twin(*args), wrt=twin)
    for i in range(2):
        plain.zero_grad()
        expected = plain(*batch(i))
        expected.backward()
        loss, grads = value_and_grad(*batch(i))
        assert torch.allclose(loss, expected, rtol=1e-9, atol=1e-11), i
        for n, p in plain.named_parameters():
            if p.requires_grad:
                wanted = torch.zeros_like(p) if p.grad is None else p.grad
                assert torch.allclose(grads[n], wanted, rtol=1e-8, atol=1e-10), n


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_torch(name):
    plain, twin = made(name), made(name)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    step = mycel.train_step(twin, torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=0.01))
    for i in range(3):
        optimizer.zero_grad()
        expected = plain(*batch(i))
        expected.backward()
        optimizer.step()
        loss = step(*batch(i))
        assert torch.allclose(loss, expected, rtol=1e-9, atol=1e-11), i
    same(state(twin), state(plain))


def test_modules_that_change_places_in_forward_are_refused_and_stay():
    class Swapping(Mlp):
        def __init__(self):
            super().__init__()
            self.c = nn.Linear(8, 4)

        def forward(self, x, y):
            loss = F.cross_entropy(self.b(self.features(x)), y)
            self.b, self.c = self.c, self.b
            return loss

    model = Swapping()
    b, c = model.b, model.c
    with pytest.raises(mycel.CaptureError, match="puts another module in the place of b, c") as refused:
        mycel.jit(model)(*batch(0))
    assert refused.value.hint and model.b is b and model.c is c
