"""torch.autograd.grad, .backward() and forward mode in captured code: derivatives of the trace so far.

    u = net(x);  du, = torch.autograd.grad(u.sum(), x, create_graph=True)
    x.requires_grad_();  net(x).sum().backward();  du = x.grad
    du = forward_ad.unpack_dual(net(forward_ad.make_dual(x, v))).tangent

The equations that lead from `inputs` to `outputs` are a program; its derivative is written into the trace behind them.
What it computes of the forward pass again is the same equations, which simplifying makes one.  How a program is
differentiated is told from outside (`differentiate_with`): capture knows no transform.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from mycel.capture.fence import refuse
from mycel.capture.inline import splice_program
from mycel.capture.nested import is_inside, unrecorded
from mycel.capture.record import Traced
from mycel.capture.trace import Tracer
from mycel.capture.tree import flatten
from mycel.errors import CaptureError
from mycel.ir import Block, Builder, Eqn, Program, Var, is_float, lookup
from mycel.ops import o

Derive = Callable[[Program, Sequence[int]], Program]
_DERIVE: list[Derive] = []


def differentiate_with(gradients: Derive, tangents: Derive) -> None:
    """How a program is differentiated by some inputs: of one scalar -> value, gradients; with tangents of these as
    further inputs -> results, their tangents."""
    _DERIVE[:] = [gradients, tangents]


def traced_grad(
    tracer: Tracer,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad of traced tensors."""
    if is_grads_batched:
        raise refuse("torch.autograd.grad with is_grads_batched", "one gradient after the other")
    ys = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    xs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    gs = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs or [None] * len(ys))
    tracer.here()
    with tracer:
        wrt = [tracer.cell(x).read() for x in xs]
        seeds = [None if g is None else tracer.cell(g).read() for g in gs]
        values = [tracer.cell(y).read() for y in ys]
    if any(g is None and v.type.numel != 1 for g, v in zip(seeds, values, strict=True)):
        raise refuse("torch.autograd.grad of a tensor with several elements", "grad_outputs=, or .sum() before it")
    eqns, used = _between(tracer, wrt, values)
    for x, v in zip(xs, wrt, strict=True):
        if v not in used and not allow_unused and not materialize_grads:
            raise refuse(
                f"torch.autograd.grad with respect to a tensor of {list(x.shape)} that the outputs do not depend on",
                "allow_unused=True, or taking the gradient before the tensor is changed",
            )
    with tracer:
        by_value = _gradients(tracer, eqns, [v for v in dict.fromkeys(wrt) if v in used], values, seeds)
        grads = [by_value.get(v, o.full(0.0, shape=v.shape, dtype=v.dtype) if materialize_grads else None) for v in wrt]
        return tuple(None if g is None else tracer.wrap(g if create_graph else o.stop_gradient(g)) for g in grads)


def traced_backward(
    tracer: Tracer,
    outputs: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """y.backward(): the gradients of traced leaves are added to their `.grad`, and so are those of parameters, which
    the code is to take away again (`zero_grad`): a program leaves none there."""
    ys = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    leaves = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs or (*tracer.leaves, *tracer.retained))
    with tracer:
        values = [tracer.cell(y).read() for y in ys]
        wrt = [tracer.cell(x).read() for x in leaves]
    held = [(x, cell.var) for x, cell in tracer.lifted.values() if x.requires_grad] if inputs is None else []
    used = _between(tracer, [*wrt, *(v for _, v in held)], values)[1]
    parameters = [x for x, v in held if v in used]
    if any(not isinstance(x, torch.nn.Parameter) or x.grad is not None for x in parameters):
        raise _refuse_grads()
    if any(type(x) is not Traced for x in leaves):
        raise _refuse_grads()
    chosen = [*(x for x, v in zip(leaves, wrt, strict=True) if v in used), *parameters]
    if not chosen:
        raise refuse("backward() of a tensor that depends on nothing that requires a gradient", "requires_grad_()")
    grads = traced_grad(tracer, outputs, chosen, gradient, create_graph=create_graph)
    for x, g in zip(chosen, grads, strict=True):
        before = leaf_grad(tracer, x)
        set_leaf_grad(tracer, x, g if before is None or g is None else before + g)


def _refuse_grads(source: str = "") -> CaptureError:
    error = refuse(
        "backward() in captured code leaves gradients in .grad of parameters or arguments",
        "torch.autograd.grad with respect to what is asked for, or zero_grad() before the function ends",
        source,
    )
    error.final = True
    return error


def leaf_grad(tracer: Tracer, x: torch.Tensor) -> torch.Tensor | None:
    """x.grad of a traced tensor, or of a parameter that has one since this trace began."""
    known = tracer.leaf_grads.get(id(x))
    return None if known is None else known[1]


def set_leaf_grad(tracer: Tracer, x: torch.Tensor, grad: torch.Tensor | None) -> None:
    tracer.leaf_grads[id(x)] = x, grad


def without_grads(tracer: Tracer) -> list[torch.Tensor]:
    """Parameters that were given gradients which are gone again; CaptureError where one has one still."""
    held = [(x, grad) for x, grad in tracer.leaf_grads.values() if type(x) is not Traced]
    for _, grad in held:
        if grad is not None:
            with tracer:
                eqn = tracer.producers.get(tracer.cell(grad).read())
            raise _refuse_grads("" if eqn is None else eqn.source)
    return [x for x, _ in held]


def as_leaf(tracer: Tracer, x: Traced) -> None:
    """x.requires_grad_(): from here on it is a value of its own, whatever it was copied from."""
    tracer.leaves.append(x)
    cell = tracer.cell(x)
    tracer.here()
    with tracer:
        cell.note()
        cell.var = o.reshape(cell.read(), shape=cell.var.shape)


def set_recorded(tracer: Tracer, x: torch.Tensor, asks: bool) -> None:
    """p.requires_grad_(asks) of a tensor the code reaches: what is made of it from here on gives it a gradient, or
    none.  How it was before the call is guarded."""
    if id(x) not in tracer.toggled:
        tracer.toggled[id(x)] = x, x.requires_grad
        tracer.recorded.append(([x], tracer.grad_mode and x.requires_grad))
    tracer.frozen_tensors.pop(id(x), None)
    if not asks:
        tracer.frozen_tensors[id(x)] = x


def requires_grad(tracer: Tracer, x: torch.Tensor, of_arguments: bool = False) -> bool:
    """x.requires_grad: would torch record a gradient of it?  That follows from the tensors it is made of, those the
    code reaches and arguments, which is guarded; where the caller takes the gradient, an argument asks for none, unless
    told so."""
    with tracer:  # a view of what was written meanwhile is read by an equation
        start = tracer.cell(x).read()
        stack = [start]
        leaves, frozen = {tracer.cell(leaf).read() for leaf in tracer.leaves}, unrecorded(tracer)
    inputs = dict(zip(tracer.inputs, (t for t, _ in tracer.lifted.values()), strict=False))
    reached = {v for v, _ in tracer.state}
    held: dict[int, torch.Tensor] = {}
    seen = set(frozen)
    if start in leaves:
        return True
    while stack:
        v = stack.pop()
        if v in seen or not (is_float(v.dtype) or v.dtype.is_complex):
            continue
        seen.add(v)
        tensor, eqn = inputs.get(v), tracer.producers.get(v)
        if v in leaves or (type(tensor) is Traced and requires_grad(_tracer_of(tensor), tensor)):
            return tracer.grad_mode
        if eqn is not None:
            stack += () if eqn.op is o.stop_gradient else eqn.vars
        elif tensor is None or (v not in reached and of_arguments):  # None: what a loop hands on from turn to turn
            return tracer.grad_mode
        elif v in reached and type(tensor) is not Traced:
            held[id(tensor)] = tensor
        elif v not in reached and _is_recorded_argument(tracer, v):
            return tracer.grad_mode or v == start
    recorded = tracer.grad_mode and any(t.requires_grad for t in held.values())
    if held and [*held] not in [[*map(id, tensors)] for tensors, _ in tracer.recorded]:
        tracer.recorded.append(([*held.values()], recorded))
    return recorded


def _is_recorded_argument(tracer: Tracer, v: Var) -> bool:
    """Would torch record gradients of this argument, by what the caller gave?"""
    source = tracer.sources.get(v)
    if tracer.differentiated or source is None or type(source) is Traced:
        return False
    return tracer.recorded_arguments.setdefault(v, source.requires_grad)


def _tracer_of(x: Traced) -> Tracer:
    assert isinstance(x.tracer, Tracer)
    return x.tracer


def _between(
    tracer: Tracer, wrt: Sequence[Var], values: Sequence[Var], ahead: Collection[Var] | None = None
) -> tuple[list[Eqn], set[Var]]:
    """The equations on the way from some values to others, and all they use.  What was made under no_grad is no way,
    but for tangents: there those end that are made `ahead`."""
    leads = [
        eqn
        for i, eqn in enumerate(tracer.eqns)
        if not (i in tracer.frozen if ahead is None else any(v in ahead for v in eqn.outputs))
    ]
    kept, used = _ways(leads, wrt, values)
    if is_inside():
        own = {v for e in tracer.eqns for v in e.outputs} | set(wrt)
        if any(_depends(tracer, v, wrt) for v in used - own):
            raise refuse(
                "torch.autograd.grad in a branch or loop, of what was computed before it",
                "computing outputs from inputs inside of it, or taking the gradient outside",
            )
    return kept, used


def _ways(eqns: Iterable[Eqn], wrt: Sequence[Var], values: Sequence[Var]) -> tuple[list[Eqn], set[Var]]:
    """The equations of these on the way from some values to others, and all they use."""
    reached = set(wrt)
    ways = []
    for eqn in eqns:
        if eqn.op is not o.stop_gradient and any(v in reached for v in eqn.vars):
            ways.append(eqn)
            reached.update(eqn.outputs)
    used = set(values)
    kept = []
    for eqn in reversed(ways):
        if any(v in used for v in eqn.outputs):
            kept.append(eqn)
            used.update(eqn.vars)
    return kept[::-1], used


def _depends(tracer: Tracer, var: Var, wrt: Sequence[Var]) -> bool:
    """Is a value made of one of these?"""
    stack, seen = [var], set()
    while stack:
        v = stack.pop()
        if v in wrt:
            return True
        if v not in seen and v in tracer.producers:
            seen.add(v)
            stack += tracer.producers[v].vars
    return False


def _gradients(
    tracer: Tracer, eqns: Sequence[Eqn], wrt: Sequence[Var], values: Sequence[Var], seeds: Sequence[Var | None]
) -> dict[Var, Var]:
    """The gradients of sum(values * seeds), written into the trace.

    x -> h -> y     dy/dh of the way from h on;  dy/dx of the ways past h, and that of h times dh/dx
    """
    grads = _partials(tracer, eqns, wrt, values, seeds)
    for v in [v for e in reversed(eqns) for v in e.outputs if v in wrt]:
        others = [u for u in wrt if u is not v]
        ways, used = _ways(eqns, others, [v])
        before = [u for u in others if u in used]
        for u, g in _partials(tracer, ways, before, [v], [grads[v]]).items() if before else ():
            grads[u] = o.add(grads[u], g)
    return grads


def _partials(
    tracer: Tracer, eqns: Sequence[Eqn], wrt: Sequence[Var], values: Sequence[Var], seeds: Sequence[Var | None]
) -> dict[Var, Var]:
    """The same, where none of `wrt` is made of another."""
    own = {v for e in eqns for v in e.outputs}
    # a seed that depends on the inputs is a number of its own here
    apart = [Var(f"g{i}", s.type) if s in own else None for i, s in enumerate(seeds)]  # type: ignore[union-attr]

    def total(known: Mapping[Var, Any]) -> list[Var]:
        sums: Any = None
        for v, s, g in zip(values, seeds, apart, strict=True):
            term = o.reshape(known[v], shape=()) if s is None else None
            if term is None:
                seed = g if g is not None else known[s]  # type: ignore[index]
                term = o.sum(o.mul(known[v], seed), dims=tuple(range(v.ndim)))
            sums = term if sums is None else o.add(sums, term)
        return [sums]

    outer = [*values, *(s for s in seeds if s is not None)]
    program, given = _program_of(tracer, eqns, wrt, outer, [g for g in apart if g is not None], total)
    inputs = [*given, *(s for s, g in zip(seeds, apart, strict=True) if g is not None)]
    outs = splice_program(tracer, _DERIVE[0](program, range(len(wrt))), inputs, eqns)
    return dict(zip(wrt, outs[1 : 1 + len(wrt)], strict=True))


def _program_of(
    tracer: Tracer,
    eqns: Sequence[Eqn],
    wrt: Sequence[Var],
    used: Sequence[Var],
    more: Sequence[Var],
    finish: Callable[[Mapping[Var, Any]], list[Var]],
) -> tuple[Program, list[Var]]:
    """Equations of the trace as a program of `wrt`, of what else they use and of `more`, and the values it is of.  Each
    of `wrt` is a value of its own, whatever it is made of."""
    inside = {v for e in eqns for v in e.outputs}
    outer = [v for e in eqns for v in e.vars] + [*used]
    given = list(dict.fromkeys([*wrt, *(v for v in outer if v not in inside)]))
    own = [Var(f"a{i}", v.type) for i, v in enumerate(given)]
    known: dict[Var, Any] = dict(zip(given, own, strict=True))
    cut = {v: known[v] for v in wrt}
    b = Builder()
    b.inputs = [*own, *more]
    b.reserve(v.name for v in b.inputs)
    with b:
        for eqn in eqns:
            outs = b.append(eqn.op, tuple(lookup(x, known) for x in eqn.inputs), dict(eqn.params), [
                v.type for v in eqn.outputs
            ])  # fmt: skip
            known.update(zip(eqn.outputs, outs if len(eqn.outputs) != 1 else (outs,), strict=True))
            known.update(cut)
        results = finish(known)
    if not _DERIVE:
        raise refuse("torch's own autograd was asked for a gradient of traced tensors", "mycel.grad of a function")
    blocks = {**tracer.blocks, "main": Block(tuple(b.inputs), tuple(b.eqns), tuple(results))}
    return Program(blocks, "main", (), tracer.consts, {}), given


# -- forward mode


def traced_dual(tracer: Tracer, x: torch.Tensor, tangent: torch.Tensor | None = None) -> Any:
    """The value with this tangent, whatever tangents it is made of; with none."""
    tracer.here()
    with tracer:
        dual = o.reshape(tracer.cell(x).read(), shape=tuple(x.shape))
        tracer.duals[dual] = None if tangent is None else tracer.cell(tangent).read()
        return tracer.wrap(dual)


def traced_tangents(
    tracer: Tracer, outputs: Sequence[torch.Tensor], duals: Mapping[Var, Var | None], fixed: bool = False
) -> list[torch.Tensor | None]:
    """The tangents of these tensors, None where they depend on nothing that has one; `fixed`: the point at which they
    are taken has no gradient."""
    tracer.here()
    with tracer:
        values = [tracer.cell(y).read() for y in outputs]
        eqns, used = _between(tracer, [v for v, t in duals.items() if t is not None], values, ahead=duals.keys())
        wrt = [v for v, t in duals.items() if t is not None and v in used]
        reached = {*wrt, *(v for e in eqns for v in e.outputs)}
        wanted = [v for v in dict.fromkeys(values) if v in reached and is_float(v.dtype)]
        if not wanted:
            return [None] * len(values)
        program, given = _program_of(tracer, eqns, wrt, wanted, [], lambda known: [known[v] for v in wanted])
        pushed = _DERIVE[1](program, range(len(wrt)))
        point = [o.stop_gradient(v) if fixed and is_float(v.dtype) else v for v in given]
        outs = splice_program(tracer, pushed, [*point, *(duals[v] for v in wrt)])  # type: ignore[list-item]
        tangents = dict(zip(wanted, outs[len(wanted) :], strict=True))
        return [tracer.wrap(tangents[v]) if v in tangents else None for v in values]


def traced_linearize(tracer: Tracer, fn: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """torch.func.linearize: the value of fn, and its derivative as a function of tangents, by which alone torch
    differentiates it."""
    points: list[torch.Tensor] = []
    tree = flatten(primals, points)
    duals = [traced_dual(tracer, x) for x in points]
    outs: list[torch.Tensor] = []
    value = fn(*tree.unflatten(iter(duals)))
    out_tree = flatten(value, outs)
    at = [tracer.cell(x).read() for x in duals]

    def push(*tangents: Any) -> Any:
        along: list[torch.Tensor] = []
        flatten(tangents, along)
        with tracer:
            known = dict(zip(at, (tracer.cell(t).read() for t in along), strict=True))
        along_outs = traced_tangents(tracer, outs, known, fixed=True)
        return out_tree.unflatten(
            iter([torch.zeros_like(y) if t is None else t for y, t in zip(outs, along_outs, strict=True)])
        )

    return value, push
