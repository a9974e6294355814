"""A mixture of experts, written so that it is captured as one operator and can be split over ranks:

    weights, ids = torch.topk(router(x).softmax(-1), 2)                        x: [tokens, width]
    y = mycel.experts(x, ids, weights, self.up, self.down, gate=gate)          up: [experts, 2 hidden, width]
                                                                               down: [experts, width, hidden]
    def gate(h):
        a, b = h.chunk(2, dim=-1)
        return F.silu(a) * b

The loop over experts that people write for this, with the tokens of each picked by torch.where or a mask, has shapes
that depend on the routing; this has not.  No token is dropped, whatever the routing, unless a `capacity` is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mycel.capture import TRACING, no_such_expert, refuse, traced_gate, traced_layer
from mycel.errors import CaptureError, RunError

Tensor = torch.Tensor


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    gate: Callable[[Tensor], Tensor],
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    transposed: bool = False,
    capacity: int | None = None,
) -> Tensor:
    """Each token through the experts it chose, `ids`, and the sum of what they give by their `weights`:
    down[i] @ gate(up[i] @ x + up_bias[i]) + down_bias[i].  `gate` works on the elements of hidden rows, or of their
    halves; `transposed`: weights are [experts, in, out], not [experts, out, in].  `capacity`: an expert takes so many
    choices of all tokens, the first ones (a token's own in the order it has them); others count nothing.  None: all."""
    _check(x, ids, weights, up, down, transposed)
    _check_capacity(capacity)
    if not TRACING:
        kept = None if capacity is None else _within(ids, capacity)
        return _eager(
            x, ids, weights if kept is None else weights * kept, up, down, gate, up_bias, down_bias, transposed
        )
    tracer = TRACING[-1]
    as_text = traced_gate(tracer, gate, up.shape[2 if transposed else 1], up.dtype)
    if as_text is None:
        raise refuse(
            "mycel.experts: the gate does more than operators on the elements of a row or of its halves",
            "h.chunk(2, dim=-1), or h[..., ::2] and h[..., 1::2], and activations and products of these",
        )
    return traced_layer(tracer, (x, ids, weights, up, down, up_bias, down_bias), as_text, transposed, capacity)


def _check(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, transposed: bool) -> None:
    shapes = {"x": x, "ids": ids, "weights": weights, "up": up, "down": down}
    dims = [2, 2, 2, 3, 3]
    wrong: Any = next((name for (name, t), n in zip(shapes.items(), dims, strict=True) if t.ndim != n), None)
    if wrong is None and ids.shape != weights.shape:
        wrong = "weights"
    if wrong is None and up.shape[1 if transposed else 2] != x.shape[1]:
        wrong = "up"
    if wrong is None and down.shape[2 if transposed else 1] != x.shape[1]:
        wrong = "down"
    if wrong is not None:
        listed = ", ".join(f"{name}{list(t.shape)}" for name, t in shapes.items())
        raise CaptureError(
            f"mycel.experts: {wrong} does not fit: {listed}",
            hint="x [tokens, width], ids and weights [tokens, chosen], up [experts, hidden, width], "
            "down [experts, width, hidden]",
        )


def _check_capacity(capacity: Any) -> None:
    if capacity is not None and (not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1):
        raise CaptureError(
            f"mycel.experts: capacity={capacity!r}: every choice would be dropped",
            hint="a whole number of choices for each expert, 1.25 * tokens * chosen / experts say, or None",
        )


def _within(ids: Tensor, capacity: int) -> Tensor:
    """Which choices are among the first of their expert."""
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    ordered = flat[order]
    place = torch.arange(len(flat), device=ids.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(flat, dtype=torch.bool).scatter_(0, order, place < capacity).view_as(ids)


def _eager(x: Any, ids: Any, weights: Any, up: Any, down: Any, gate: Any, up_bias: Any, down_bias: Any, t: bool) -> Any:
    """In plain torch, an expert after another."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < up.shape[0]:
        raise RunError(no_such_expert("mycel.experts", up.shape[0]))
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.bincount(ids.reshape(-1), minlength=up.shape[0]).tolist()
    token = order // ids.shape[1]
    rows = []
    for i, part in enumerate(x[token].to(up.dtype).split(counts)):
        h = part @ (up[i] if t else up[i].T)
        a = gate(h if up_bias is None else h + up_bias[i])
        y = a @ (down[i] if t else down[i].T)
        rows.append(y if down_bias is None else y + down_bias[i])
    y = torch.cat(rows) * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(x, dtype=y.dtype).index_add(0, token, y).to(x.dtype)
