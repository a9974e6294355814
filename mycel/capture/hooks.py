"""Hooks on gradients, as equations: an identity whose gradient is what the hook makes of it.

    h.register_hook(f)                      h  = custom(h)             backward   g -> f(g)
    p.register_hook(f), p a parameter       the same, before the function begins: p's gradient is that of all its uses
    module.register_full_backward_hook(f)   x' = custom(x, z)          backward   gx, gz -> f(module, gx, gz), 0
        y' = module(x')                     y  = custom(y', z')        backward   gy -> gy, gy

z are zeros like the results: their cotangent brings the gradient of the results to the hook on the arguments.  A hook
that returns nothing is there for what it does besides, which is no part of a program: it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.capture.custom import trace_custom
from mycel.capture.fence import refuse
from mycel.capture.nested import OpenBlock, opened
from mycel.capture.record import ModuleCall, Traced
from mycel.capture.syntax import rewritten
from mycel.capture.trace import TRACING, Tracer
from mycel.ir import Var, is_float
from mycel.ops import o
from mycel.ops.stack import zeros

Hook = Callable[..., Any]


class Handle:
    """What registering a hook in captured code gives."""

    def remove(self) -> None:
        raise refuse("a hook on a traced tensor was removed", "not to register it")


def hook_value(tracer: Tracer, x: torch.Tensor, hook: Hook) -> Handle:
    """x.register_hook(hook) in captured code."""
    cell = tracer.cell(x)
    if type(x) is not Traced or cell.place is not None:
        raise refuse("a hook was registered on an argument or a parameter in captured code", "registering it outside")
    uses = [i for i, eqn in enumerate(tracer.eqns) if cell.read() in eqn.vars and eqn.op is not o.stop_gradient]
    if any(i not in tracer.frozen for i in uses):
        raise refuse(
            "a hook was registered on a tensor that is in use already", "registering it right after the tensor is made"
        )
    _hook_cell(tracer, x, [hook])
    return Handle()


def hook_parameters(tracer: Tracer, tensors: Iterable[torch.Tensor]) -> None:
    """Hooks on parameters see the gradient of all their uses: they stand before everything else."""
    for x in tensors:
        hooks = x._backward_hooks
        if hooks and is_float(x.dtype):
            _hook_cell(tracer, x, [*hooks.values()])


def _hook_cell(tracer: Tracer, x: torch.Tensor, hooks: Sequence[Hook]) -> None:
    cell = tracer.cell(x)

    def backward(given: Any, result: Any, saved: Any, cotangents: list[Any]) -> Any:
        (g,) = cotangents
        for hook in hooks:
            g = _called(tracer, hook, g, g)
        return [g]

    hooked = trace_custom(tracer, _same, backward, (x,))
    cell.var = tracer.cell(hooked[0]).read()


def _called(tracer: Tracer, hook: Hook, g: Any, *args: Any) -> Any:
    """What a hook makes of a gradient."""
    new = rewritten(hook)(*args)
    if new is None and tracer.differentiated:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise refuse(
            f"the hook {name} on a gradient returns nothing: what it does besides would not be done at every step",
            "removing it, or returning the gradient (or a new one) where it changes nothing else",
        )
    return g if new is None else new


def _same(given: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor]]:
    return given, []


class ModuleHooks:
    """Stands for torch's BackwardHook while code is traced: the hooks of one call of a module."""

    def __init__(self, module: torch.nn.Module, hooks: Sequence[Hook], pre_hooks: Sequence[Hook]) -> None:
        self.module, self.hooks, self.pre_hooks = module, hooks, pre_hooks
        self.tracer = TRACING[-1]
        self.tracer.here()
        self.start = 0
        self.args: tuple[Any, ...] = ()
        self.at: list[int] = []  # which of the arguments have a gradient
        self.outer: list[Traced] = []
        self.inner: list[Var] = []

    def setup_input_hook(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as the module sees them; what they are is written when the results are known."""
        tracer = self.tracer
        self.args = args
        if not self.hooks or not torch.is_grad_enabled():
            return args
        self.at = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and is_float(x.dtype)]
        with tracer:
            self.outer = [tracer.wrap(tracer.cell(args[i]).read()) for i in self.at]
        self.start = len(tracer.eqns)
        self.inner = [Var(tracer.name(""), x.cell.var.type) for x in self.outer]
        inside = {i: tracer.wrap(v) for i, v in zip(self.at, self.inner, strict=True)}
        return tuple(inside.get(i, x) for i, x in enumerate(args))

    def setup_output_hook(self, result: Any) -> Any:
        results = result if isinstance(result, tuple) else (result,)
        at = [i for i, y in enumerate(results) if isinstance(y, torch.Tensor) and is_float(y.dtype)]
        if not at or not torch.is_grad_enabled():
            return result
        tokens = self._begin([self.tracer.cell(results[i]).read() for i in at], at, len(results)) if self.at else []
        ys = tuple(results[i] for i in at)

        def backward(given: Any, out: Any, saved: Any, cotangents: list[Any]) -> Any:
            gs: Any = _packed(at, cotangents[: len(at)], len(results))
            for hook in self.pre_hooks:
                gs = _called(self.tracer, hook, gs, self.module, gs)
                gs = gs if isinstance(gs, tuple) else (gs,)
            listed = [gs[i] for i in at]
            return [*listed, *(listed if tokens else ())]

        hooked = trace_custom(self.tracer, lambda given: (given[: len(at)], []), backward, (*ys, *tokens))
        new = dict(zip(at, hooked, strict=True))
        whole = tuple(new.get(i, y) for i, y in enumerate(results))
        return whole if isinstance(result, tuple) else whole[0]

    def _begin(self, ys: Sequence[Var], at: Sequence[int], count: int) -> list[torch.Tensor]:
        """Write what the arguments are, in front of all the module did; the zeros that bring the results' gradient."""
        tracer, n = self.tracer, len(self.at)

        def backward(given: Any, out: Any, saved: Any, cotangents: list[Any]) -> Any:
            gs: Any = _packed(self.at, cotangents[:n], len(self.args))
            of_results = _packed(at, cotangents[n:], count)
            for hook in self.hooks:
                gs = _called(tracer, hook, gs, self.module, gs, of_results)
                gs = gs if isinstance(gs, tuple) else (gs,)
            return [*(gs[i] for i in self.at), *(None for _ in ys)]

        front = OpenBlock()
        with opened(tracer, front):
            with tracer:
                tokens = [tracer.wrap(zeros(y.type)) for y in ys]
            outs = trace_custom(tracer, _same, backward, (*self.outer, *tokens))
            outputs = [tracer.cell(x).read() for x in outs]
        tracer.closed -= front.defined
        front.eqns[-1] = replace(front.eqns[-1], outputs=(*self.inner, *outputs[n:]))
        tracer.producers.update((v, front.eqns[-1]) for v in front.eqns[-1].outputs)
        _insert(tracer, self.start, front)
        return [tracer.wrap(v) for v in outputs[n:]]


def _packed(at: Sequence[int], values: Sequence[Any], count: int) -> tuple[Any, ...]:
    """As many as there are, None where there is no gradient."""
    packed = [None] * count
    for i, value in zip(at, values, strict=True):
        packed[i] = value
    return tuple(packed)


def _insert(tracer: Tracer, start: int, front: OpenBlock) -> None:
    """Equations in front of those from `start` on, which are the open region's."""
    n = len(front.eqns)
    tracer.eqns[start:start] = front.eqns
    tracer.lines[start:start] = front.lines
    later = {i for i in tracer.frozen if i >= start}
    tracer.frozen -= later
    tracer.frozen |= {i + n for i in later}

    def shift(region: ModuleCall) -> None:
        for child in region.children:
            if child.start >= start:
                child.start, child.end = child.start + n, child.end + n
            shift(child)

    shift(tracer.regions[-1])
