"""Gradients where random examples do not reach: ties, bounds and zeros.  There, too, they are torch.autograd's."""

from __future__ import annotations

import math

import pytest
import torch

import mycel.ops  # noqa: F401  fills the table
from mycel.ir import OPS

INF = math.inf
CASES = [
    ("relu", [[-1.0, 0.0, 2.0]], {}),
    ("abs", [[-1.0, 0.0, 2.0]], {}),
    ("hardtanh", [[-1.0, 0.0, 0.5, 1.0, 2.0]], {"lo": 0.0, "hi": 1.0}),
    ("hardsigmoid", [[-3.0, 0.0, 3.0]], {}),
    ("hardswish", [[-3.0, -1.0, 3.0]], {}),
    ("hardshrink", [[-0.5, 0.0, 0.5, 1.0]], {}),
    ("softshrink", [[-0.5, 0.0, 0.5, 1.0]], {}),
    ("leaky_relu", [[-1.0, 0.0, 2.0]], {"slope": 0.1}),
    ("prelu", [[-1.0, 0.0, 2.0], [0.1, 0.1, 0.1]], {}),
    ("elu", [[-1.0, 0.0, 2.0]], {"alpha": 1.5}),
    ("threshold", [[0.2, 0.3, 0.4]], {"threshold": 0.3, "value": 1.0}),
    ("nan_to_num", [[1.0, INF, -INF, math.nan]], {}),
    ("maximum", [[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]], {}),
    ("minimum", [[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]], {}),
    ("clamp", [[0.0, 0.5, 1.0, 2.0], 0.0, 1.0], {}),
    ("clamp", [[0.0, 0.5, 1.0, 2.0], [0.0, 0.6, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0]], {}),
    ("clamp", [[0.0, 0.5, 1.0], [0.0, 0.6, 0.0], None], {}),
    ("pow", [[0.0, 2.0, 0.0, -1.0], [0.0, 0.0, 2.0, 2.0]], {}),
    ("pow", [[0.0, 2.0], 0], {}),
    ("pow", [0, [0.0, 2.0]], {}),
    ("pow", [-2.0, [1.0, 2.0]], {}),
    ("xlogy", [[0.0, 0.0, 1.0], [0.0, 2.0, 2.0]], {}),
    ("xlogy", [[0.0, 1.0], 0.0], {}),
    ("copysign", [[0.0, -2.0], [1.0, 1.0]], {}),
    ("hypot", [[0.0, 3.0], [1.0, 4.0]], {}),
    ("logaddexp", [[1.0, -INF], [1.0, 0.0]], {}),
    ("amax", [[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]], {"dims": (1,)}),
    ("amin", [[[1.0, 1.0, 3.0], [2.0, 2.0, 2.0]]], {"dims": (0, 1)}),
    ("max_dim", [[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]], {"dim": 1}),
    ("min_dim", [[[1.0, 1.0, 3.0], [2.0, 2.0, 2.0]]], {"dim": 0, "keepdim": True}),
    ("cummax", [[[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]], {"dim": 1}),
    ("cummin", [[[1.0, 3.0, 3.0], [2.0, 2.0, 1.0]]], {"dim": 1}),
    ("prod", [[[1.0, 0.0, 3.0], [0.0, 2.0, 0.0], [1.0, 2.0, 3.0]]], {"dims": (1,)}),
    ("cumprod", [[[1.0, 0.0, 3.0, 2.0], [2.0, 0.0, 2.0, 0.0], [1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 1.0, 1.0]]], {"dim": 1}),
    ("std", [[[1.0, 1.0], [1.0, 2.0]]], {"dims": (1,)}),
    ("norm", [[[0.0, 0.0], [1.0, 0.0]]], {"dims": (1,)}),
    ("norm", [[[0.0, 0.0], [1.0, 0.0]]], {"dims": (1,), "ord": 1}),
    ("norm", [[[0.0, 0.0], [1.0, 0.0]]], {"dims": (1,), "ord": 3}),
    ("norm", [[[1.0, -1.0], [1.0, 0.0]]], {"dims": (1,), "ord": INF}),
    ("logsumexp", [[[1.0, 1.0], [1.0, -INF]]], {"dims": (1,)}),
    ("logcumsumexp", [[[-INF, 1.0, 2.0], [1.0, -INF, 0.0]]], {"dim": 1}),
]


@pytest.mark.parametrize("name, values, params", CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_ties_are_autograds(name, values, params):
    op = OPS[name]
    inputs = [torch.tensor(v, dtype=torch.float64, requires_grad=True) if isinstance(v, list) else v for v in values]
    out = op.kernel(*inputs, **params)
    y = out[0] if isinstance(out, tuple) else out
    g = torch.arange(1, y.numel() + 1, dtype=torch.float64).reshape(y.shape)
    leaves = [x for x in inputs if isinstance(x, torch.Tensor)]
    wanted = iter(torch.autograd.grad(y, leaves, g, allow_unused=True))
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    ys, gs = (tuple(t.detach() for t in out), (g, None)) if isinstance(out, tuple) else (y.detach(), g)
    for x, ours in zip(plain, op.vjp(gs, ys, *plain, **params), strict=True):
        if isinstance(x, torch.Tensor):
            theirs = next(wanted)
            zero = torch.zeros_like(x)
            ours, theirs = (zero if t is None else t for t in (ours, theirs))
            assert torch.allclose(ours, theirs, equal_nan=True), (ours, theirs)
