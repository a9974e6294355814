"""Who shares memory with whom.

`shared_outputs`: outputs that may share memory with an input the program updates in place; those are copied before the update.
`reusable`: equations whose result may be written over an operand, because that owns its memory and nobody reads it afterwards.
"""

from __future__ import annotations

from mycel.ir import CONTROL, Block, Program, Var, lifetimes, order


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


def reusable(block: Block) -> dict[int, int]:
    """For equations (by index): which operand their result may be written over."""
    last = {v: end for v, (_, end) in lifetimes(block).items()}
    owner: dict[Var, Var] = {}  # a value -> the value whose fresh memory it lies in
    sharing: dict[Var, list[Var]] = {}
    found: dict[int, int] = {}
    for i, eqn in enumerate(block.eqns):
        if eqn.op.write is not None and eqn.inputs and eqn.inputs[0] in owner:
            mine = owner[eqn.inputs[0]]  # type: ignore[index]
            owner.update((v, mine) for v in eqn.outputs)
            sharing[mine] += eqn.outputs
        elif eqn.op in CONTROL or eqn.op.name.startswith("stack_"):  # may keep or return what it is given
            for v in eqn.vars:
                for other in sharing.pop(owner.get(v, v), ()):
                    owner.pop(other, None)
        elif eqn.op.fresh or eqn.op.into:
            for k in range(len(eqn.op.into)):
                x = eqn.inputs[k]
                if not isinstance(x, Var) or owner.get(x) is not x or x.type != eqn.outputs[0].type or eqn.inputs.count(x) > 1:
                    continue
                if all(last[v] <= i for v in sharing[x]) and not any(v is not x and v in eqn.inputs for v in sharing[x]):
                    found[i] = k
                    break
            for v in eqn.outputs:
                owner[v], sharing[v] = v, [v]
    return found
