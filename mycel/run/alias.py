"""Which outputs may share memory with an input the program updates in place: those are copied before the update."""

from __future__ import annotations

from mycel.ir import CONTROL, Program, Var, order


def shared_outputs(program: Program) -> set[int]:
    """Indices of the entry's outputs that may alias an updated input."""
    if not program.updates:
        return set()
    aliases: dict[str, list[set[int]]] = {}
    for name in order(program):
        block = program.blocks[name]
        roots: dict[Var, set[int]] = {v: {i} for i, v in enumerate(block.inputs)}
        for eqn in block.eqns:
            held = [roots.get(x, set()) if isinstance(x, Var) else set() for x in eqn.inputs]
            if eqn.op.name == "call":
                inner = aliases[eqn.params["block"]]
                roots.update({v: set().union(*(held[i] for i in at)) for v, at in zip(eqn.outputs, inner, strict=True)})
            elif eqn.op in CONTROL or eqn.op.write is not None:
                roots.update({v: set().union(*held) for v in eqn.outputs})
        aliases[name] = [roots.get(x, set()) if isinstance(x, Var) else set() for x in block.outputs]
    updated = {i for i, v in enumerate(program.inputs) if v.name in program.updates}
    return {i for i, at in enumerate(aliases[program.entry]) if at & updated}
