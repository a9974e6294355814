"""A function with a gradient of its own, where torch's autograd records what a program does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class OwnGradient(torch.autograd.Function):
    """`forward` of operands, whose gradient with respect to the first `wrt` of them is `backward`, given operands,
    results and cotangents of the first `outs` results; both know floats alone, as cotangents go."""

    @staticmethod
    def of(
        forward: Callable[..., Sequence[Any]], backward: Callable[..., Sequence[Any]], wrt: int, outs: int, *args: Any
    ) -> Sequence[Any]:
        if not torch.is_grad_enabled():
            return forward(*args)
        results: Sequence[Any] = OwnGradient.apply(forward, backward, wrt, outs, *args)
        return results

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, wrt: int, outs: int, *args: Any) -> Any:
        results = tuple(forward(*args))
        results = (
            *results[:outs],
            *(x.detach() for x in results[outs:]),
        )  # what backward is given may be a result, too
        ctx.backward, ctx.wrt, ctx.outs, ctx.args = backward, wrt, outs, len(args)
        held = (*args, *results)
        ctx.plain = [None if isinstance(x, torch.Tensor) else x for x in held]
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in held))
        ctx.mark_non_differentiable(
            *(x for i, x in enumerate(results) if i >= outs or not (x.is_floating_point() or x.is_complex()))
        )
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        held = [x if x is not None else plain for x, plain in zip(ctx.saved_tensors, ctx.plain, strict=True)]
        flows = [isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) for x in held]
        asked = [g for g, flow in zip(cotangents[: ctx.outs], flows[ctx.args :], strict=False) if flow]
        grads = iter(ctx.backward(*held, *asked))
        return None, None, None, None, *(next(grads) if i < ctx.wrt and flows[i] else None for i in range(ctx.args))
