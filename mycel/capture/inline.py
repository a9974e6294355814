"""A program made from an inner capture, written into the trace under way: how derivatives nest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mycel.capture.trace import Tracer
from mycel.capture.tree import flatten_arguments
from mycel.ir import Atom, Eqn, Params, Program, Ref, Var, lookup, order
from mycel.ops import o

if TYPE_CHECKING:
    from mycel.capture.function import Captured


def splice(tracer: Tracer, captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an inner captured call, its equations now part of the outer trace."""
    leaves: list[torch.Tensor] = []
    flatten_arguments((args, kwargs), leaves)
    inputs = input_tensors(captured, leaves)
    outs = splice_program(tracer, captured.program, input_values(tracer, captured, inputs))
    return results(tracer, captured, inputs, outs)


def input_tensors(captured: Captured, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors behind the program's inputs (but the key), by name."""
    given = dict(reversed([*zip(captured.leaves, leaves, strict=True)]))  # of a tensor passed twice, the first
    return given | {name: places[0].read() for name, places in captured.state.items()}


def input_values(tracer: Tracer, captured: Captured, inputs: Mapping[str, torch.Tensor]) -> list[Var]:
    """The program's inputs as values of the outer trace."""
    tracer.here()
    values = {name: tracer.cell(x).read() for name, x in inputs.items()}
    for var in captured.program.inputs_of("key"):
        with tracer:
            key, site = tracer.draw()
            values[var.name] = o.fold_in(key, data=site)
    return [values[v.name] for v in captured.program.inputs]


def splice_program(tracer: Tracer, program: Program, inputs: Sequence[Atom], there: Iterable[Eqn] = ()) -> list[Any]:
    """A program's equations on these values, but for those that are there; its other blocks join the tracer's."""
    known = {_meaning(e, e.inputs): e.outputs for e in there if not any(True for _ in e.refs)}
    names: dict[str, str] = {}
    for name in order(program):
        if name != program.entry:
            block = program.blocks[name]
            names[name] = tracer.add_block(
                name, replace(block, eqns=tuple(replace(_refer(e, names), phase="forward") for e in block.eqns))
            )
    tracer.consts.update(program.consts)
    values: dict[Var, Atom] = dict(zip(program.inputs, inputs, strict=True))
    for eqn in program.main.eqns:
        eqn = _refer(eqn, names)
        tracer.source = eqn.source or tracer.source
        operands = tuple(lookup(x, values) for x in eqn.inputs)
        if known and (same := known.get(_meaning(eqn, operands))) is not None:
            values.update(zip(eqn.outputs, same, strict=True))
            continue
        outs = tracer.append(eqn.op, operands, dict(eqn.params), [v.type for v in eqn.outputs])
        values.update(zip(eqn.outputs, outs if len(eqn.outputs) != 1 else (outs,), strict=True))
    return [lookup(x, values) for x in program.main.outputs]


def _meaning(eqn: Eqn, operands: Sequence[Atom]) -> Any:
    """What an equation computes of these."""
    atoms = tuple(x if isinstance(x, Var) else repr(x) for x in operands)
    return eqn.op, atoms, eqn.params, tuple(v.type for v in eqn.outputs)


def results(tracer: Tracer, captured: Captured, inputs: Mapping[str, torch.Tensor], outs: Sequence[Any]) -> Any:
    """What the call returns, its updates and effects carried out on traced tensors."""
    program = captured.program
    n = len(outs) - len(program.updates)
    with tracer:
        for name, new in zip(program.updates, outs[n:], strict=True):
            tracer.cell(inputs[name]).write(new)
    tensors = iter([tracer.wrap(v) for v in outs[:n]])
    value = captured.out.unflatten(tensors)
    for place, tree in captured.effects:
        place.write(tree.unflatten(tensors))
    return value


def _refer(eqn: Any, names: dict[str, str]) -> Any:
    """The equation with its blocks under their new names."""
    if not any(True for _ in eqn.refs):
        return eqn
    return replace(eqn, params=Params({k: Ref(names[v]) if isinstance(v, Ref) else v for k, v in eqn.params.items()}))
