"""Steps of recurrent layers in C are those of torch's operators."""

from __future__ import annotations

import itertools

import pytest
import torch

from mycel.ops import recurrent
from mycel.ops.native_recurrent import steps_in_c

SIZES = [(1, 1, 1), (3, 2, 5), (5, 16, 33), (2, 70, 256)]  # the last: shared by threads
pytestmark = pytest.mark.skipif(steps_in_c() is None, reason="there is no compiler for C")


def operands(kind: str, t: int, b: int, n: int, scale: float) -> list[torch.Tensor]:
    """What steps are computed from; states lie otherwise than row by row."""
    gates = {"lstm": 4, "gru": 3}[kind] * n
    x, w = torch.randn(t, b, gates) * scale, torch.randn(gates, n) / n**0.5
    states = [torch.randn(n, b).t() for _ in range({"lstm": 2, "gru": 1}[kind])]
    return [x, w, *([torch.randn(gates)] if kind == "gru" else []), *states]


def forward_and_back(kind: str, given: list[torch.Tensor], cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
    if kind == "lstm":
        x, w, h, c = given
        outs = recurrent.lstm_steps.kernel(x, w, h, c)
        grads = recurrent.lstm_steps_grad.kernel(*cotangents, w, c, *outs[1:])
    else:
        x, w, b, h = given
        outs = recurrent.gru_steps.kernel(x, w, b, h)
        grads = recurrent.gru_steps_grad.kernel(cotangents[0], w, h, *outs)
    return [*outs, *grads]


@pytest.mark.parametrize(("kind", "sizes"), itertools.product(("lstm", "gru"), SIZES))
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_in_c_as_in_torch(kind, sizes, scale, monkeypatch):
    torch.manual_seed(0)
    t, b, n = sizes
    given, cotangents = operands(kind, t, b, n, scale), [torch.randn(t, n, b).transpose(1, 2) for _ in range(2)]
    native = forward_and_back(kind, given, cotangents)
    monkeypatch.setattr(recurrent, "_native", lambda *xs: None)
    exact = forward_and_back(kind, [x.double() for x in given], [x.double() for x in cotangents])
    for got, wanted in zip(native, exact, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), wanted, rtol=3e-5, atol=3e-6)


def test_what_is_not_finite_is_as_in_torch(monkeypatch):
    values = [float("nan"), float("inf"), -float("inf"), 100.0, -100.0, 0.0]
    x, w, zero = torch.tensor([[values * 4]]), torch.zeros(24, 6), torch.zeros(1, 6)
    native = recurrent.lstm_steps.kernel(x, w, zero, zero)
    monkeypatch.setattr(recurrent, "_native", lambda *xs: None)
    for got, wanted in zip(native, recurrent.lstm_steps.kernel(x, w, zero, zero), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)
