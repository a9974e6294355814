"""What the laws cannot see of losses: values in [0, 1], and torch's own weighted cross entropy."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

import mycel
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


def mixed_losses(weight, target, labels):
    """Losses of x whose weights, or targets, may be of another dtype."""
    chances = torch.nn.functional.one_hot(labels, 3).to(target)
    return {
        "cross entropy": lambda x: F.cross_entropy(x, labels, weight),
        "smoothed": lambda x: F.cross_entropy(x, labels, weight, reduction="sum", label_smoothing=0.1),
        "one row": lambda x: F.cross_entropy(x[0], labels[0], weight),
        "chances": lambda x: F.cross_entropy(x, chances, weight, label_smoothing=0.1),
        "nll": lambda x: F.nll_loss(x.log_softmax(-1), labels, weight, reduction="none").sum(),
        "margin": lambda x: F.multi_margin_loss(x, labels, weight=weight),
        "binary": lambda x: F.binary_cross_entropy(x.sigmoid(), chances.to(x), weight),
        "logits": lambda x: F.binary_cross_entropy_with_logits(x, chances, weight, pos_weight=weight),
        "counts": lambda x: F.binary_cross_entropy_with_logits(x, chances.long()),
        "squares": lambda x: F.mse_loss(x, chances.bool()),
        "smooth": lambda x: F.smooth_l1_loss(x, chances.bool()),
        "soft margin": lambda x: F.soft_margin_loss(x, target),
    }


@pytest.mark.parametrize("loss", mixed_losses(torch.ones(3), torch.ones(1), torch.zeros(1, dtype=torch.int64)))
@pytest.mark.parametrize("dtype, other", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_weights_and_targets_of_another_dtype(loss, dtype, other):
    """As torch has them: in the dtype that it gives, or its own error."""
    x, target, labels = torch.randn(4, 3, dtype=dtype), torch.rand(4, 3).to(other), torch.randint(0, 3, (4,))
    f = mixed_losses(torch.rand(3).to(other), target, labels)[loss]
    try:
        (want,) = torch.autograd.grad(f(leaf := x.clone().requires_grad_()), leaf)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=f"^{re.escape(str(error))}"):
            mycel.value_and_grad(f)(x)
    else:
        y, gradient = mycel.value_and_grad(f)(x)
        torch.testing.assert_close(y, f(x))
        torch.testing.assert_close(gradient, want)


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
