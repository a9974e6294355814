"""Which results are written over an operand: the rule by which code is written, and by which the clock counts memory.

overwritten      for each block, equations (by index) and the operand that their result is written over
reusable         those whose operand owns its memory, and nobody reads it afterwards
summing          those of a scan's body that add to its carry in place
summed           the carry that a scan sums so, from its start to its result in one memory
starts           what a scan or loop carries into its first turn, and reads nowhere else
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mycel.ir import CONTROL, Block, Eqn, Program, Var, call, chains, lifetimes, loop, order, scan, walk
from mycel.ops.memory_sharing import may_share, owned_results
from mycel.ops.rules import o

Overwritten = Mapping[str, Mapping[int, int]]


def overwritten(program: Program) -> dict[str, dict[int, int]]:
    """By block, for equations (by index) the operand that their result is written over.  What a turn adds to is known
    where one scan alone holds the body."""
    owned = owned_results(program)
    over = {name: reusable(program.blocks[name], owned) for name in order(program)}
    uses = Counter(str(ref) for _, eqn in walk(program) for ref in eqn.refs)
    for name, eqn in walk(program):
        if eqn.op is scan and uses[body := eqn.params["body"]] == 1:
            over[body] |= summing(program.blocks[name], eqn, program.blocks[body])
    return over


def summed(eqn: Eqn, body: Block, over: Mapping[int, int]) -> set[int]:
    """Results of a scan (by position) that turns made by adding to the carry, in the memory that it started in."""
    n, m = eqn.params.get("consts", 0), eqn.params.get("carry", 0)
    operands = {body.eqns[i].inputs[k] for i, k in over.items()}
    return {j for j in range(m) if body.inputs[n + j] in operands}


def starts(eqn: Eqn) -> list[Var]:
    """What a scan or loop carries into its first turn, and reads nowhere else: it is gone once a turn replaced it, if
    nobody reads it behind."""
    n = eqn.params.get("consts", 0)
    m = n + (eqn.params.get("carry", 0) if eqn.op is scan else len(eqn.outputs) if eqn.op is loop else 0)
    rest = {*eqn.inputs[:n], *eqn.inputs[m:]}
    return [x for x in dict.fromkeys(eqn.inputs[n:m]) if isinstance(x, Var) and x not in rest]


def summing(outer: Block, eqn: Eqn, body: Block) -> dict[int, int]:
    """Equations of a scan's body (by index) whose result may be written over an operand: a carry that they alone read
    and replace, and that started in memory nobody else knows."""
    filled = {e.outputs[0] for e in outer.eqns if e.op is o.full and not isinstance(e.inputs[0], Var)}
    n, m = eqn.params.get("consts", 0), eqn.params.get("carry", 0)
    uses, ours, mine = chains(body), chains(outer), {}
    for j in range(m):
        start, carry, new = eqn.inputs[n + j], body.inputs[n + j], body.outputs[j]
        if not isinstance(start, Var) or not isinstance(new, Var):
            continue
        fresh = start in filled and len(ours[start].uses) == 1 and not ours[start].is_output
        alone = not uses[new].uses and body.outputs.count(new) == 1  # nobody keeps the sum of one turn
        if fresh and alone and len(uses[carry].uses) == 1 and eqn.inputs.count(start) == 1:
            mine[carry] = new
    overwritten = {}
    for i, e in enumerate(body.eqns):
        for k in range(len(e.op.into)):
            x = e.inputs[k]
            if (
                isinstance(x, Var)
                and x in mine
                and mine[x] == e.outputs[-1]
                and x.type == e.outputs[-1].type
                and e.inputs.count(x) == 1
            ):
                overwritten[i] = k
                break
    return overwritten


def reusable(block: Block, owned: Mapping[str, set[int]]) -> dict[int, int]:
    """For equations (by index): which operand their result may be written over; `owned`: what calls return."""
    last = {v: end for v, (_, end) in lifetimes(block).items()}
    owner: dict[Var, Var] = {}  # a value -> the value whose fresh memory it lies in
    sharing: dict[Var, list[Var]] = {}
    overwritten: dict[int, int] = {}
    for i, eqn in enumerate(block.eqns):
        first = eqn.inputs[0] if eqn.inputs else None
        if may_share(eqn) and isinstance(first, Var) and first in owner:
            mine = owner[first]
            owner.update((v, mine) for v in eqn.outputs)
            sharing[mine] += eqn.outputs
        elif eqn.op in CONTROL or eqn.op.stacks:  # may keep or return what it is given
            for v in eqn.vars:
                for other in sharing.pop(owner.get(v, v), ()):
                    owner.pop(other, None)
            for place in owned[eqn.params["block"]] if eqn.op is call else ():
                v = eqn.outputs[place]
                owner[v], sharing[v] = v, [v]
        elif eqn.op.fresh or eqn.op.into:
            for k in range(len(eqn.op.into)):
                x = eqn.inputs[k]
                if (
                    not isinstance(x, Var)
                    or owner.get(x) is not x
                    or x.type != eqn.outputs[-1].type
                    or eqn.inputs.count(x) > 1
                ):
                    continue
                if all(last[v] <= i for v in sharing[x]) and not any(
                    v is not x and v in eqn.inputs for v in sharing[x]
                ):
                    overwritten[i] = k
                    break
            for v in eqn.outputs:
                owner[v], sharing[v] = v, [v]
    return overwritten
