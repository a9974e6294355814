"""Values to try a call on: those at hand, and others, by which it is seen what depends on values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mycel.capture.plain import suspended
from mycel.capture.record import Traced
from mycel.capture.trace import KEY, Tracer
from mycel.capture.unfollowed import rehearsal
from mycel.ir import CONTROL, Type, Var, is_float
from mycel.ops import o


def sample(tracer: Tracer, x: torch.Tensor) -> torch.Tensor:
    """A value of a tensor: computed from the arguments and parameters at hand, made up where these have no data."""
    with tracer:
        var = tracer.cell(x).read()
    values = tracer.samples
    inputs = dict(zip(tracer.inputs, (t for t, _ in tracer.lifted.values()), strict=False))
    with torch.no_grad(), suspended():
        stack = [var]
        while stack:
            v = stack[-1]
            eqn = tracer.producers.get(v)
            if v in values:
                stack.pop()
            elif v in inputs or eqn is None or eqn.op in CONTROL or eqn.op.effect or eqn.op.by_rank:
                values[v] = _given(tracer, v, inputs.get(v))
                stack.pop()
            elif missing := [w for w in eqn.vars if w not in values]:
                stack += missing
            else:
                values.update(zip(eqn.outputs, _computed(tracer, eqn, values), strict=True))
                stack.pop()
    return values[var]


def _given(tracer: Tracer, var: Var, tensor: torch.Tensor | None) -> torch.Tensor:
    held = tracer.sources.get(var, tensor)
    if type(held) is Traced:
        outer: Any = held.tracer
        held = sample(outer, held) if outer is not tracer else None
    if held is None or not _has_data(held) or var == KEY:
        return _made_up(tracer, var.type)
    return held.detach().to(tracer.device)


def _has_data(x: torch.Tensor) -> bool:
    """On ranks a parameter that each has a part of is shown whole, but for its data."""
    is_plain = x.layout is torch.strided and not is_traceable_wrapper_subclass(x)
    return x.device.type != "meta" and not (is_plain and x.numel() and not x.untyped_storage().nbytes())


def _made_up(tracer: Tracer, t: Type) -> torch.Tensor:
    tracer.made_up = True
    generator = torch.Generator().manual_seed(t.numel)
    device = "cpu" if tracer.device.type == "meta" else tracer.device
    if is_float(t.dtype):
        return torch.randn(t.shape, generator=generator).to(device, t.dtype)
    return torch.ones(t.shape, dtype=t.dtype, device=device)


def _computed(tracer: Tracer, eqn: Any, values: dict[Var, Any]) -> Sequence[Any]:
    try:
        if eqn.op is o.const:
            return [tracer.consts[eqn.params["name"]].to(tracer.device)]
        extra = {"device": tracer.device} if "device" in eqn.op.defaults else {}
        with rehearsal():
            outs = eqn.op.kernel(*(values[a] if isinstance(a, Var) else a for a in eqn.inputs), **eqn.params, **extra)
        return outs if isinstance(outs, (tuple, list)) and len(eqn.outputs) != 1 else [outs]
    except Exception:
        return [_made_up(tracer, v.type) for v in eqn.outputs]


def others(values: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Values a little off, and further off."""
    for scale in (0.05, 0.5):
        with suspended():
            generator = torch.Generator().manual_seed(0)
            shifted = [x + (x.abs() + 0.1) * scale * _noise(x, generator) if is_float(x.dtype) else x for x in values]
        yield shifted


def extremes(values: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Values of which all are above, or all below, what a mask would compare them with."""
    for sign in (1.0, -1.0):
        with suspended():
            shifted = [sign * (x.abs() + 0.1) if is_float(x.dtype) else x for x in values]
        yield shifted


def counts(values: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Integers and masks that are all the smallest, or all the largest, of what is there."""
    for extreme in (torch.min, torch.max):
        with suspended():
            shifted = [x if is_float(x.dtype) or not x.numel() else extreme(x).expand_as(x).clone() for x in values]
        yield shifted


def _noise(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x.device, x.dtype)
