"""Who shares memory with whom.

may_share        may the result of an equation lie in the memory of its operand
is_view          is it what its operand has in memory, or a part of that
families         for each value of a block those that may lie in the same memory
owned_results    of each block, the outputs that lie in memory of their own
roots            which inputs of a block each of its values may share memory with
shared_outputs   outputs that may share memory with an input the program updates in place; those are copied before
                 the update
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mycel.ir import CONTROL, Block, Eqn, Program, Var, call, order, scan
from mycel.ops.rules import o

Roots = dict[Var, set[int]]


def may_share(eqn: Eqn) -> bool:
    """May its result lie in the memory of its operand?  A view does; and what a rank has already is not copied for it:
    its own part, the first rank's value, a sum over one rank.  Messages that are begun and finished apart are real
    ones, and bring new memory."""
    return eqn.op.write is not None or (eqn.op.by_rank and len(set(eqn.vars)) == 1)


def is_view(eqn: Eqn) -> bool:
    """Does its result show its first operand, whoever runs it?  Of a rank's own part also what is not shown is kept;
    where the dim has no equal parts, it is padded first, and so copied."""
    return eqn.op.write is not None or (
        eqn.op is o.own_part
        and isinstance(x := eqn.inputs[0], Var)
        and x.shape[eqn.params["dim"]] % eqn.params["count"] == 0
    )


def families(program: Program) -> dict[str, dict[Var, list[Var]]]:
    """For each block: for each value those that lie in the same memory, or may, as an equation or a called block made
    them of it; itself among them."""
    by_block: dict[str, dict[Var, list[Var]]] = {}
    for name in order(program):
        block = program.blocks[name]
        sharing = by_block[name] = {v: [v] for v in block.inputs}
        for eqn in block.eqns:
            sharing.update((v, [v]) for v in eqn.outputs)
            together: Iterable[list[Var]] = [[*eqn.vars, *eqn.outputs]] if may_share(eqn) else ()
            if eqn.op is call:
                together = _together(eqn, program.blocks[eqn.params["block"]], by_block[eqn.params["block"]])
            for members in together:
                family = list(dict.fromkeys(w for v in members for w in sharing[v]))
                sharing.update(dict.fromkeys(family, family))
    return by_block


def _together(eqn: Eqn, called: Block, sharing: Mapping[Var, list[Var]]) -> Iterable[list[Var]]:
    """Operands and results of a call that may lie in the same memory: a block may return one value twice, a view of
    another result, or what it was given."""
    members: dict[int, list[Var]] = {}
    pairs = zip((*called.inputs, *called.outputs), (*eqn.inputs, *eqn.outputs), strict=True)
    for inner, outer in pairs:
        if isinstance(inner, Var) and isinstance(outer, Var):
            members.setdefault(id(sharing[inner]), []).append(outer)
    return members.values()


def owned_results(program: Program) -> dict[str, set[int]]:
    """Of each block its outputs (by position) whose memory nobody else knows who has not been given them."""
    owned: dict[str, set[int]] = {}
    by_block = families(program)
    for name in order(program):
        block = program.blocks[name]
        family, fresh = by_block[name], set[Var]()
        for eqn in block.eqns:
            if eqn.op is call:
                fresh.update(eqn.outputs[i] for i in owned[eqn.params["block"]])
            elif eqn.op not in CONTROL and (eqn.op.fresh or eqn.op.into):
                fresh.update(eqn.outputs)
        # what is given to control flow or a stack may be kept or returned by it
        known = {v for e in block.eqns if e.op in CONTROL or e.op.stacks for v in e.vars}
        alone = {v for v in fresh - known if len(family[v]) == 1}
        owned[name] = {i for i, x in enumerate(block.outputs) if x in alone and block.outputs.count(x) == 1}
    return owned


def roots(program: Program) -> dict[str, Roots]:
    """For each block: the inputs (by position) that a value may share memory with."""
    block_roots: dict[str, Roots] = {}
    for name in order(program):
        block = program.blocks[name]
        known: Roots = {v: {i} for i, v in enumerate(block.inputs)}
        for eqn in block.eqns:
            held = [known.get(x, set()) if isinstance(x, Var) else set() for x in eqn.inputs]
            if eqn.op is call:
                inner = block_roots[eqn.params["block"]]
                outs = program.blocks[eqn.params["block"]].outputs
                at = [inner.get(x, set()) if isinstance(x, Var) else set() for x in outs]
                known.update({v: set().union(*(held[i] for i in one)) for v, one in zip(eqn.outputs, at, strict=True)})
            elif eqn.op is scan:
                known.update(
                    zip(
                        eqn.outputs,
                        _scanned(eqn, program.blocks[eqn.params["body"]], block_roots[eqn.params["body"]], held),
                        strict=True,
                    )
                )
            elif eqn.op in CONTROL or may_share(eqn):
                known.update({v: set().union(*held) for v in eqn.outputs})
        block_roots[name] = known
    return block_roots


def _scanned(eqn: Eqn, body: Block, inner: Roots, held: list[set[int]]) -> list[set[int]]:
    """What the results of a scan may share memory with: rows are stacked anew, state is what the last turn made of what
    it was given."""
    n, m = eqn.params.get("consts", 0), eqn.params.get("carry", 0)
    given = [set(h) for h in held]
    while True:
        carried = [
            set().union(*(given[i] for i in inner.get(x, set()))) if isinstance(x, Var) else set()
            for x in body.outputs[:m]
        ]
        after = [*given[:n], *(a | b for a, b in zip(given[n : n + m], carried, strict=True)), *given[n + m :]]
        if after == given:
            break
        given = after
    state = carried if eqn.params["length"] else [set(h) for h in held[n : n + m]]
    return [*state, *(set() for _ in eqn.outputs[m:])]


def shared_outputs(program: Program) -> set[int]:
    """Indices of the entry's outputs that may share memory with an updated input."""
    if not program.updates:
        return set()
    known = roots(program)[program.entry]
    updated = {i for i, v in enumerate(program.inputs) if v.name in program.updates}
    return {i for i, x in enumerate(program.main.outputs) if isinstance(x, Var) and known.get(x, set()) & updated}
