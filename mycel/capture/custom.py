"""Gradients the user gives: `custom` equations, from `mycel.custom_vjp` and from torch.autograd.Function.

Forward and backward are traced into blocks of their own, side by side; what backward needs beyond arguments and results
(a Function's saved intermediates) becomes further results of forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mycel.capture.autograd import requires_grad
from mycel.capture.counters import place_of
from mycel.capture.fence import refuse
from mycel.capture.function_context import Context
from mycel.capture.nested import KEY, OpenBlock, branch_key, finish, free, journal, opened, written
from mycel.capture.record import Traced
from mycel.capture.slot_holders import contents, put_back
from mycel.capture.state import Reachable, is_static
from mycel.capture.syntax import rewritten
from mycel.capture.trace import Tracer
from mycel.capture.tree import Tree, flatten
from mycel.ir import Ref, Var, custom, is_float
from mycel.ops import o
from mycel.ops.rules import unbroadcast
from mycel.ops.stack import zeros

# forward(args) -> (result, saved tensors); backward(args, result, saved, cotangents) -> cotangents
Forward = Callable[[tuple[Any, ...]], tuple[Any, list[torch.Tensor]]]
Backward = Callable[[tuple[Any, ...], Any, list[torch.Tensor], list[Any]], Any]


def trace_custom(tracer: Tracer, forward: Forward, backward: Backward, args: tuple[Any, ...]) -> Any:
    """The result of forward(args), as one equation whose gradient is backward."""
    tracer.here()
    leaves: list[torch.Tensor] = []
    tree = flatten(args, leaves)
    with tracer:
        cells = [tracer.cell(x) for x in leaves]
        xs = _distinct([cell.read() for cell in cells])
    ahead, behind = OpenBlock(), OpenBlock()
    with opened(tracer, ahead), journal() as notes:
        given = _given(tracer, tree, xs)
        result, saved = forward(given)
        inside: list[torch.Tensor] = []
        flatten(given, inside)
        outs: list[torch.Tensor] = []
        out_tree = flatten(result, outs)
        with tracer:
            ys = [tracer.cell(y).read() for y in outs]
            kept = [tracer.cell(s).read() for s in saved]
            now = [tracer.cell(x).read() for x in inside]
        updates = {cell: v for cell, x, v in zip(cells, xs, now, strict=True) if v != x}
        updates |= written(ahead, notes)
    new = [v for v in dict.fromkeys(updates.values()) if v not in ys]
    outputs = [Var(tracer.name("y"), v.type) for v in (*ys, *kept, *new)]
    at = {**{v: len(ys) + len(kept) + i for i, v in enumerate(new)}, **{v: i for i, v in enumerate(ys)}}
    gs = [Var(tracer.name("g"), v.type) for v in ys if is_float(v.dtype)]
    behind.regions[-1].sites = ahead.regions[-1].sites  # what backward draws are other numbers
    with opened(tracer, behind), journal() as notes:
        results = outputs[: len(ys)]
        rest = iter(gs)
        cotangents = [tracer.wrap(next(rest)) if is_float(v.dtype) else None for v in ys]
        with tracer:
            for cell, v in updates.items():
                cell.write(outputs[at[v]])
            # what the code reaches (a parameter) is given back itself, as by torch: it may be in a module, too
            held = {c.read(): x for c, x in zip(cells, leaves, strict=True) if type(x) is not Traced}
        saved_now = [
            held[v]
            if v in xs and v in held
            else tracer.wrap(v if v in xs else outputs[ys.index(v) if v in ys else len(ys) + i])
            for i, v in enumerate(kept)
        ]
        with refusing_changes(tracer.places):
            gradients = backward(_given(tracer, tree, xs), _given(tracer, out_tree, results), saved_now, cotangents)
        with tracer:
            dxs = [
                _cotangent(tracer, x, g)
                for x, g in zip(xs, _listed(gradients, len(xs)), strict=True)
                if is_float(x.dtype)
            ]
        if any(v in behind.defined for v in written(behind, notes).values()):
            raise refuse("a gradient function updates a tensor in place", "updating it in the function itself")
    inner = {*outputs, *gs}
    operands = [*xs]
    operands += [
        v
        for v in dict.fromkeys([*free(ahead, outputs=[*ys, *kept, *new]), *free(behind, outputs=dxs)])
        if v not in inner and v not in operands
    ]
    first = finish(tracer, "custom_forward", ahead, operands, [*ys, *kept, *new])
    second = finish(tracer, "custom_backward", behind, [*operands, *outputs, *gs], dxs)
    with tracer:
        params = {"forward": Ref(first), "backward": Ref(second), "wrt": len(xs), "outs": len(ys)}
        passed = tuple(branch_key(tracer) if v is KEY else v for v in operands)
        values = tracer.append(custom, passed, params, [v.type for v in outputs])
        values = [values] if len(outputs) == 1 else list(values)
        for cell, v in updates.items():
            cell.write(values[at[v]] if v in ys else o.stop_gradient(values[at[v]]))
    changed = {id(y): x for x, y, cell in zip(leaves, inside, cells, strict=True) if cell in updates}
    own = zip(outs, values[: len(ys)], strict=True)
    return out_tree.unflatten(iter([changed[id(y)] if id(y) in changed else tracer.wrap(v) for y, v in own]))


@contextlib.contextmanager
def refusing_changes(places: Reachable) -> Iterator[None]:
    """CaptureError for what Python keeps, and code in here changes: backward runs later, if at all.  A list that it
    adds to is no such value."""
    held = [contents(box.slots) for box in places.boxes]
    yield
    for box, old in zip(places.boxes, held, strict=True):
        now = contents(box.slots)
        there = [key for key in now if key in old or not isinstance(key, int)]
        changed = [key for key in there if now[key] is not old.get(key) and _is_number_or_flag(now[key])]
        changed = [key for key in changed if type(now[key]) is Traced or now[key] != old.get(key)]
        if changed:
            put_back(box.slots, old)
            raise refuse(
                f"a gradient function changes {place_of(box, changed[0]).name}, which Python keeps: it runs after the "
                "code, if at all",
                "changing it in the function itself",
            )


def _is_number_or_flag(value: Any) -> bool:
    return value.weak if type(value) is Traced else is_static(value)


def _distinct(xs: list[Var]) -> list[Var]:
    """Operands of a block have a name each: a tensor given twice is a second value."""
    seen: list[Var] = []
    for x in xs:
        seen.append(o.reshape(x, shape=x.shape) if x in seen else x)
    return seen


def _given(tracer: Tracer, tree: Tree, values: Sequence[Var]) -> Any:
    """The structure with fresh traced tensors for these values."""
    return tree.unflatten(iter([tracer.wrap(v) for v in values]))


def _listed(gradients: Any, count: int) -> list[Any]:
    listed = list(gradients) if isinstance(gradients, (tuple, list)) else [gradients]
    if len(listed) != count:
        raise refuse(
            f"a gradient function returned {len(listed)} values for {count} tensors",
            "one cotangent for each tensor argument, None for none",
        )
    return listed


def _cotangent(tracer: Tracer, x: Var, g: Any) -> Var:
    if g is None:
        return zeros(x.type)
    var = tracer.cell(g).read()
    if _expands_to(x.shape, var.shape) and is_float(var.dtype):  # as torch's autograd: summed over what was expanded
        var = unbroadcast(var, x)
    if var.type != x.type:
        raise refuse(
            f"a gradient function returned {var.type} for an argument of {x.type}",
            "a cotangent has the type of its argument",
        )
    return var


def _expands_to(shape: Sequence[int], larger: Sequence[int]) -> bool:
    lead = len(larger) - len(shape)
    return lead >= 0 and all(n in (1, m) for n, m in zip(shape, larger[lead:], strict=True))


# -- torch.autograd.Function


def _needs_gradient(tracer: Tracer, x: Any) -> bool:
    """ctx.needs_input_grad of an argument: what may be what the caller differentiates by asks for one, too."""
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return True
    return requires_grad(tracer, x, of_arguments=tracer.by_arguments)


def _backward_of(cls: type[torch.autograd.Function]) -> Any:
    """Its backward, without torch's @once_differentiable, which makes an error of a second derivative."""
    backward: Any = cls.backward
    return backward.__wrapped__ if getattr(backward, "__code__", None) is _ONCE else backward


_ONCE = once_differentiable(lambda ctx: None).__code__
# Functions whose backward is being traced, each in that of the one before.  A gradient in the k-th is of order k + 1:
# one that calls itself there (the backward of a solve is a solve) is followed to second derivatives.
BACKWARDS: list[type[torch.autograd.Function]] = []


def trace_function(tracer: Tracer, cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    """cls.apply(*args): its own forward and backward."""
    ctx = Context(tuple(_needs_gradient(tracer, a) for a in args))
    tensors = [i for i, a in enumerate(args) if isinstance(a, Traced | torch.Tensor)]

    kept: list[torch.Tensor] = []  # in attributes of the context
    kept_tree = flatten({}, kept)
    plain: list[int] = []

    def forward(given: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor]]:
        nonlocal kept_tree
        if cls.setup_context is not torch.autograd.Function.setup_context:
            result = rewritten(cls.forward)(*given)
            cls.setup_context(ctx, given, result)  # type: ignore[arg-type]
        else:
            result = rewritten(cls.forward)(ctx, *given)
        outs: list[torch.Tensor] = []
        flatten(result, outs)
        plain.extend(i for i, y in enumerate(outs) if any(y is x for x in ctx.plain))
        kept_tree = flatten(ctx.attributes(), kept)
        return result, [*(t for t in ctx.saved_tensors if t is not None), *kept]

    def backward(given: tuple[Any, ...], result: Any, saved: list[torch.Tensor], cotangents: list[Any]) -> Any:
        rest = iter(saved)
        ctx.saved_tensors = tuple(None if t is None else next(rest) for t in ctx.saved_tensors)  # type: ignore[misc]
        vars(ctx).update(kept_tree.unflatten(rest))
        if not ctx.materialize_grads:
            cotangents = [None if i in plain else g for i, g in enumerate(cotangents)]
        BACKWARDS.append(cls)
        try:
            gradients = rewritten(_backward_of(cls))(ctx, *cotangents)
        finally:
            BACKWARDS.pop()
        listed = gradients if isinstance(gradients, tuple) else (gradients,)
        return [listed[i] for i in tensors]

    if not any(is_float(args[i].dtype) for i in tensors):  # nothing a gradient could be of
        return forward(args)[0]
    if cls in BACKWARDS and len(BACKWARDS) > 1:
        return _without_gradient(tracer, forward(args)[0])
    result = trace_custom(tracer, forward, backward, args)
    results: list[torch.Tensor] = []
    tree = flatten(result, results)
    return tree.unflatten(iter([y.detach() if i in plain else y for i, y in enumerate(results)])) if plain else result


def _without_gradient(tracer: Tracer, result: Any) -> Any:
    """The result of a Function whose backward nobody is to follow."""
    leaves: list[torch.Tensor] = []
    tree = flatten(result, leaves)
    with tracer:
        values = [tracer.cell(y).read() for y in leaves]
        values = [o.third_derivative(v) if is_float(v.dtype) else v for v in values]
    return tree.unflatten(iter([tracer.wrap(v) for v in values]))
