"""What a step writes into its own inputs, where nobody reads what lies there any more.

given_away       equations of the entry that may write their results over inputs the program updates
gathered_into    gathers whose results may be written into such inputs
replaced_if      choices between the old and the new value of such an input that may be made in its memory
WrittenInputs    all three: the clock counts by it, as by `overwriting.py`, which says what is written over operands
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mycel.ir import Program, Var, chains, lifetimes
from mycel.ops.memory_sharing import families, roots
from mycel.ops.rules import o


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


@dataclass(frozen=True)
class WrittenInputs:
    """What the entry of a step writes into its inputs, by which the clock counts.  `results`: those of gathers, which
    have memory of their own while they are on their way, and of choices; `copied`: of updates (by equation) the
    operands, by position, that are copied first."""

    results: frozenset[Var] = frozenset()
    copied: Mapping[int, Collection[int]] = field(default_factory=dict)

    @staticmethod
    def of(program: Program) -> WrittenInputs:
        if not program.updates:
            return NOTHING
        eqns, given = program.main.eqns, given_away(program)
        places = [zip(eqns[i].outputs, at, strict=True) for i, at in gathered_into(program).items()]
        gathered = {y for pairs in places for y, old in pairs if old is not None}
        results = frozenset(gathered.union(*(eqns[i].outputs for i in replaced_if(program))))
        updates = {i: range(len(e.outputs)) for i, e in enumerate(eqns) if e.op.inplace is not None}
        return WrittenInputs(results, {i: given.get(i, every) for i, every in updates.items()})


NOTHING = WrittenInputs()
