"""What the laws cannot see of losses: values in [0, 1], and torch's own weighted cross entropy."""

from __future__ import annotations

import pytest
import torch

from mycel.ops import o


def test_binary_cross_entropy_and_its_gradient_to_the_edge():
    x = torch.tensor([0.0, 0.0, 1e-3, 0.3, 0.9, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 1.0, 0.2, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    y, g = torch.nn.functional.binary_cross_entropy(x, t, reduction="none"), torch.randn(7, dtype=torch.float64)
    want = torch.autograd.grad(y, (x, t), g)
    ours = o.binary_cross_entropy(x.detach(), t.detach())
    torch.testing.assert_close(ours, y.detach())
    for a, b in zip(o.binary_cross_entropy.vjp(g, ours, x.detach(), t.detach()), want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_weighted_cross_entropy_is_torchs(reduction, label_smoothing):
    x, target, weight = torch.randn(5, 3, 2), torch.randint(0, 3, (5, 2)), torch.rand(3)
    params = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": 1}
    want = torch.nn.functional.cross_entropy(x, target, weight, **params)
    torch.testing.assert_close(o.cross_entropy(x, target, weight, **params)[0], want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_loss_in_chunks_is_the_whole(monkeypatch, dtype, bias):
    """However many rows are taken at a time, and with rows that do not divide evenly."""
    from mycel.ir import OPS

    torch.manual_seed(0)
    x, w, b = (
        torch.randn(13, 6, dtype=dtype),
        torch.randn(9, 6, dtype=dtype),
        torch.randn(9, dtype=dtype) if bias else None,
    )
    target = torch.randint(0, 9, (13,))
    target[3:6] = -100
    op = OPS["linear_cross_entropy"]
    with torch.no_grad():
        whole = op.kernel(x, w, b, target)
        monkeypatch.setitem(op.kernel.__globals__, "CHUNK", 9 * 4)
        parts = op.kernel(x, w, b, target)
    tol = 1e-10 if dtype == torch.float64 else 2e-2
    for a, c in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, c, rtol=tol, atol=tol)
