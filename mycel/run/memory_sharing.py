"""Who shares memory with whom.

roots            which inputs of a block each of its values may share memory with
families         for each value of a block those that may lie in the same memory
shared_outputs   outputs that may share memory with an input the program updates in place; those are copied before
                 the update
given_away       equations of the entry that may write their results over inputs the program updates
gathered_into    gathers whose results may be written into such inputs
replaced_if      choices between the old and the new value of such an input that may be made in its memory
summing          equations of a scan's body that may add to its carry in place
owned_results    of each block, the outputs that lie in memory of their own
reusable         equations whose result may be written over an operand, because that owns its memory and nobody
                 reads it afterwards
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mycel.ir import CONTROL, Block, Eqn, Program, Var, call, chains, lifetimes, order, scan
from mycel.ops import o

Roots = dict[Var, set[int]]


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


def may_share(eqn: Eqn) -> bool:
    """May its result lie in the memory of its operand?  A view does; and what a rank has already is not copied for it:
    its own part, the first rank's value, a sum over one rank.  Messages that are begun and finished apart are real
    ones, and bring new memory."""
    return eqn.op.write is not None or (eqn.op.by_rank and len(set(eqn.vars)) == 1)


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


def given_away(program: Program) -> dict[int, set[int]]:
    """Equations of the entry (by index) that may run over the memory of some of their first operands, because these are
    inputs which their results replace, or lie in memory of their own (optimiser state that came from the host), and
    nobody reads them afterwards; with the operands (by position) that must be copied first: others that the kernel
    writes its results over, and those that it may overwrite."""
    block, known = program.main, roots(program)[program.entry]
    family = families(program)[program.entry]
    new = (
        dict(zip(program.updates, block.outputs[len(block.outputs) - len(program.updates) :], strict=True))
        if program.updates
        else {}
    )
    last = lifetimes(block)
    position = {v: i for i, v in enumerate(block.inputs)}
    owned = {v for e in block.eqns if e.op.fresh for v in e.outputs if len(family[v]) == 1}
    ends: dict[int, int] = {}  # when what lies in an input is read last
    for v, at in known.items():
        ends |= {root: max(last[v][1], ends.get(root, -1)) for root in at}
    copied_operands = {}
    for i, eqn in enumerate(block.eqns):
        if eqn.op.inplace is None:
            continue
        over = eqn.inputs[: len(eqn.outputs)]
        copied = set()
        for k, (x, y) in enumerate(zip(over, eqn.outputs, strict=True)):
            is_free = isinstance(x, Var) and x in owned and last[x][1] == i
            is_replaced = isinstance(x, Var) and x in position and new.get(x.name) == y and ends[position[x]] <= i
            if not (is_free or is_replaced) or x in over[:k]:
                copied.add(k)
        if len(copied) == len(over) or (copied and eqn.on_host):
            continue
        rest = range(len(over), len(eqn.inputs))
        held = [eqn.inputs[k] for k in rest]
        tensors = [(k, x) for k, x in zip(rest, held, strict=True) if isinstance(x, Var) and x.ndim]
        copied |= {k for k, x in tensors if known.get(x) or any(last[v][1] > i for v in family[x])}
        copied_operands[i] = copied
    return copied_operands


def gathered_into(program: Program) -> dict[int, list[Var | None]]:
    """Equations of the entry (by index) that finish a gather of whole parts, with the input that each result replaces
    and may be written into: it is nothing else, and nobody reads what lies in that input any more."""
    block, known, last = program.main, roots(program)[program.entry], lifetimes(program.main)
    new = block.outputs[len(block.outputs) - len(program.updates) :] if program.updates else []
    by_name = {v.name: (i, v) for i, v in enumerate(block.inputs)}
    replaces = {y: by_name[name] for name, y in zip(program.updates, new, strict=True) if isinstance(y, Var)}
    uses = chains(block)
    places: dict[int, list[Var | None]] = {}
    for i, eqn in enumerate(block.eqns):
        if eqn.op is not o.finish or eqn.params["op"] != "all_gather":
            continue
        how, parts = eqn.params, eqn.inputs[1:]
        for k, (x, y) in enumerate(zip(parts, eqn.outputs, strict=True)):
            dim, size = how["dims"][k], how["sizes"][k]
            if y not in replaces or uses[y].uses or block.outputs.count(y) > 1:
                continue
            position, old = replaces[y]
            is_read_later = any(position in at and last[v][1] > i for v, at in known.items())
            is_whole = isinstance(x, Var) and x.shape[dim] * how["count"] == size
            if old.type == y.type and is_whole and not is_read_later:
                places.setdefault(i, [None] * len(parts))[k] = old
    return places


def replaced_if(program: Program) -> set[int]:
    """Equations of the entry (by index) that choose by one condition between a new value of an input and the input
    itself, which their result replaces, and nobody reads that afterwards: where(c, new, old)."""
    if not program.updates:
        return set()
    block, known, last = program.main, roots(program)[program.entry], lifetimes(program.main)
    new = dict(zip(program.updates, block.outputs[len(block.outputs) - len(program.updates) :], strict=True))
    position = {v: i for i, v in enumerate(block.inputs)}
    ends: dict[int, list[tuple[int, Var]]] = {}  # when what lies in an input is read last
    for v, at in known.items():
        for root in at:
            ends.setdefault(root, []).append((last[v][1], v))
    chosen = set()
    for i, eqn in enumerate(block.eqns):
        if eqn.op is not o.where:
            continue
        (condition, value, old), (result,) = eqn.inputs, eqn.outputs
        if not (isinstance(condition, Var) and isinstance(value, Var) and isinstance(old, Var)):
            continue
        if old not in position or condition.ndim:
            continue
        later = any(end > i and v != result for end, v in ends.get(position[old], ()))
        later = later or position[old] in known.get(value, ())  # what lies in it is not copied over it
        if new.get(old.name) == result and old.type == value.type == result.type and not later:
            chosen.add(i)
    return chosen


def summing(outer: Block, eqn: Eqn, body: Block) -> dict[int, int]:
    """Equations of a scan's body (by index) whose result may be written over an operand: a carry that they alone read
    and replace, and that started in memory nobody else knows."""
    producers = {v: e for e in outer.eqns for v in e.outputs}
    n, m = eqn.params.get("consts", 0), eqn.params.get("carry", 0)
    uses = chains(body)
    ours = chains(outer)
    mine = {}
    for j in range(m):
        start, carry = eqn.inputs[n + j], body.inputs[n + j]
        fresh = (
            isinstance(start, Var)
            and start in producers
            and producers[start].op is o.full
            and not isinstance(producers[start].inputs[0], Var)
        )
        fresh = fresh and len(ours[start].uses) == 1 and not ours[start].is_output  # type: ignore[index]
        new = body.outputs[j]
        # nobody keeps the sum of one turn
        alone = isinstance(new, Var) and not uses[new].uses and body.outputs.count(new) == 1
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


def reusable(block: Block, owned: Mapping[str, set[int]]) -> dict[int, int]:
    """For equations (by index): which operand their result may be written over; `owned`: what calls return."""
    last = {v: end for v, (_, end) in lifetimes(block).items()}
    owner: dict[Var, Var] = {}  # a value -> the value whose fresh memory it lies in
    sharing: dict[Var, list[Var]] = {}
    overwritten: dict[int, int] = {}
    for i, eqn in enumerate(block.eqns):
        if may_share(eqn) and eqn.inputs and eqn.inputs[0] in owner:
            mine = owner[eqn.inputs[0]]  # type: ignore[index]
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
