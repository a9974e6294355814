"""A mixture of experts, written so that it is captured as one operator and can be split over ranks:

    weights, ids = torch.topk(router(x).softmax(-1), 2)                        x: [tokens, width]
    y = mycel.experts(x, ids, weights, self.up, self.down, gate=gate)          up: [experts, 2 hidden, width]
                                                                               down: [experts, width, hidden]
    def gate(h):
        a, b = h.chunk(2, dim=-1)
        return F.silu(a) * b

The loop over experts that people write for this, with the tokens of each picked by torch.where or a mask, has shapes
that depend on the routing; this has not.  No token is dropped, whatever the routing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mycel.capture import OBSERVED, TRACING, Routing, refuse, traced_gate, traced_layer
from mycel.errors import CaptureError, RunError, TrainError

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
) -> Tensor:
    """Each token through the experts it chose, `ids`, and the sum of what they give by their `weights`:
    down[i] @ gate(up[i] @ x + up_bias[i]) + down_bias[i].  `gate` works on the elements of hidden rows, or of their
    halves; `transposed`: weights are [experts, in, out], not [experts, out, in]."""
    _check(x, ids, weights, up, down, transposed)
    if not TRACING:
        return _eager(x, ids, weights, up, down, gate, up_bias, down_bias, transposed)
    tracer = TRACING[-1]
    as_text = traced_gate(tracer, gate, up.shape[2 if transposed else 1], up.dtype)
    if as_text is None:
        raise refuse(
            "mycel.experts: the gate does more than operators on the elements of a row or of its halves",
            "h.chunk(2, dim=-1), or h[..., ::2] and h[..., 1::2], and activations and products of these",
        )
    return traced_layer(tracer, (x, ids, weights, up, down, up_bias, down_bias), as_text, transposed)


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
        told = ", ".join(f"{name}{list(t.shape)}" for name, t in shapes.items())
        raise CaptureError(
            f"mycel.experts: {wrong} does not fit: {told}",
            hint="x [tokens, width], ids and weights [tokens, chosen], up [experts, hidden, width], "
            "down [experts, width, hidden]",
        )


def _eager(x: Any, ids: Any, weights: Any, up: Any, down: Any, gate: Any, up_bias: Any, down_bias: Any, t: bool) -> Any:
    """In plain torch, an expert after another."""
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


# -- where tokens go


def routing(model: torch.nn.Module) -> Callable[..., dict[str, Any]]:
    """A function of a batch, to be captured: for each layer of experts how many choices each expert got, how many there
    were in all, and whether all their weights are numbers."""

    def seen(*args: Any, **kwargs: Any) -> dict[str, Any]:
        layers: list[Routing] = []
        OBSERVED.append(layers)
        try:
            model(*args, **kwargs)
        finally:
            OBSERVED.remove(layers)
        found: dict[str, Any] = {}
        for layer in layers:
            name = layer.layer.removeprefix("model").removeprefix(".") or "the model"  # as in its state dict
            again = sum(other.partition(" ")[0] == name for other in found)
            found[f"{name} ({again + 1})" if again else name] = _counted(layer)
        return found

    return seen


def _counted(layer: Routing) -> tuple[Tensor, int, Tensor]:
    ids = layer.ids.reshape(-1)
    counts = (ids.unsqueeze(1) == torch.arange(layer.experts, device=ids.device)).sum(0)
    return counts, ids.numel(), torch.isfinite(layer.weights).all()


def checked_load(layers: dict[str, Any]) -> dict[str, Tensor]:
    """How many choices each expert got, by layer; RunError where a router gives what is no number, or no expert."""
    if not layers:
        raise TrainError("the model has no layer of experts\n  try       mycel.experts, or a model of transformers")
    for name, (counts, total, finite) in layers.items():
        if not finite:
            raise RunError(
                f"the router of {name} gives weights that are not finite\n"
                "  try       a smaller learning rate, clip_norm, or a router in fp32"
            )
        if int(counts.sum()) != total:
            raise RunError(
                f"{name}: of {total} choices {int(counts.sum())} are among its {len(counts)} experts\n"
                "  try       ids from torch.topk over as many scores as there are experts"
            )
    return {name: counts.cpu() for name, (counts, _, _) in layers.items()}
