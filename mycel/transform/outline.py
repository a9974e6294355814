"""Equations between calls become blocks of their own, so that every stretch of straight-line computation can be
compiled as one.

    def main(x, w):                              def main_1(x):
      a = mul(x, 2.0)                              a = mul(x, 2.0)
      b = exp(a)                          =>       b = exp(a)
      y = call(b, w, block=@layer)                 return b
      return y                                   def main(x, w):
                                                   b = call(x, block=@main_1)
                                                   y = call(b, w, block=@layer)
                                                   return y

A *unit* is what a compiler gets at once: a block without branches, loops and effects, of at most `SIZE` equations with
those of the blocks it calls.  Blocks that are too large, or hold what cannot be compiled, are cut up; their calls of
units stay.  A stretch may go on into a later phase, but for what an equation of an earlier one still reads behind it
(another microbatch's forward, where two are woven): then each phase has its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from mycel.ir import PHASES, Block, Builder, Eqn, Program, Ref, Var, call, cond, custom, loop, order, prune, scan
from mycel.transform.again import ComputedAgain
from mycel.transform.inline import latest

SIZE = 800  # equations of a unit
PART = 48  # equations of a part of a stretch whose equations stand beside each other


def units(program: Program) -> set[str]:
    """Blocks a compiler can take whole."""
    size: dict[str, float] = {}
    for name in order(program):
        size[name] = sum(_size(eqn, size) for eqn in program.blocks[name].eqns)
    return {name for name, n in size.items() if n <= SIZE and name != program.entry}


def _size(eqn: Eqn, sizes: dict[str, float]) -> float:
    """How much an equation counts; infinite if it cannot be compiled."""
    if eqn.op is call:
        return sizes[eqn.params["block"]]
    if eqn.op is custom:
        return sizes[eqn.params["forward"]]
    if (
        eqn.op in (cond, loop, scan)
        or eqn.op.effect
        or eqn.op.inplace is not None
        or not eqn.op.compiles
        or eqn.op.stacks
    ):
        return float("inf")
    return 1


def outline(
    program: Program, is_worth: Callable[[str, Sequence[Eqn]], bool], divided: Collection[str] = ()
) -> tuple[Program, set[str]]:
    """The program with those stretches of plain equations that are worth a compiler's seconds as blocks; and the names
    of the blocks to compile.  `is_worth` is asked with the name of the block that a stretch stands in.  `divided`:
    blocks that are not taken whole, however small."""
    whole = units(program).difference(divided)
    blocks = dict(program.blocks)
    outlined: set[str] = set()
    for name in order(program):
        if name not in whole:
            blocks[name] = _cut(blocks, name, is_worth, outlined)
    program = prune(replace(program, blocks=blocks))
    outer = [n for n in order(program) if n not in whole and n not in outlined]
    called = {str(ref) for n in outer for e in program.blocks[n].eqns if e.op is call for ref in e.refs}
    return program, outlined | (called & whole)


def _cut(
    blocks: dict[str, Block], name: str, is_worth: Callable[[str, Sequence[Eqn]], bool], outlined: set[str]
) -> Block:
    """A block with its stretches replaced by calls; the new blocks are entered."""
    block = blocks[name]
    # what is used later, and in which phase first
    later = dict.fromkeys((v for v in block.outputs if isinstance(v, Var)), len(PHASES))
    eqns: list[Eqn] = []
    stretches = _stretches(block)
    again = ComputedAgain(block, stretches)
    for stretch in reversed(stretches):  # from the end, so that what is used later is known
        for run in reversed(_by_phase(stretch, later)):
            worth = len(run) > 1 and is_worth(name, run)
            for part in reversed(_parts(run) if worth else [[eqn] for eqn in run]):
                eqn = _outlined(blocks, name, part, again.before(part), later, outlined) if worth else part[0]
                phase = PHASES.index(eqn.phase)
                later.update((v, min(phase, later.get(v, phase))) for v in eqn.vars)
                eqns.append(eqn)
    return Block(block.inputs, tuple(reversed(eqns)), block.outputs)


def _stretches(block: Block) -> list[list[Eqn]]:
    """Runs of plain equations whose phases go on, and between them all others one by one."""
    runs: list[list[Eqn]] = []
    open_ = -1  # the phase of the last equation of a run that may go on
    for eqn in block.eqns:
        phase = PHASES.index(eqn.phase)
        plain = eqn.op not in (call, custom) and _size(eqn, {}) == 1
        if plain and 0 <= open_ <= phase:
            runs[-1].append(eqn)
        else:
            runs.append([eqn])
        open_ = phase if plain else -1
    return runs


def _by_phase(run: Sequence[Eqn], later: Mapping[Var, int]) -> list[list[Eqn]]:
    """A stretch in one; in one for each of its phases, where an earlier phase than its last reads what it makes."""
    last = PHASES.index(run[-1].phase)
    if all(later.get(v, last) >= last for eqn in run for v in eqn.outputs):
        return [list(run)]
    return [list(own) for _, own in itertools.groupby(run, key=lambda eqn: eqn.phase)]


def _parts(run: Sequence[Eqn]) -> list[list[Eqn]]:
    """A long stretch in parts that share no tensor they make, since a compiler's seconds grow with the square of what
    it is given: many small equations beside each other, as those that choose what becomes of the state of norms."""
    if len(run) < 2 * PART:
        return [list(run)]
    groups: list[list[int]] = []  # equations by position, those that share a tensor together
    home: dict[Var, list[int]] = {}
    for i, eqn in enumerate(run):
        mine = [i]
        for old in {id(home[v]): home[v] for v in eqn.vars if v in home and v.ndim}.values():
            mine += old
            groups.remove(old)
        groups.append(mine)
        home.update((v, mine) for k in mine for v in run[k].outputs)
    parts: list[list[int]] = [[]]
    for mine in sorted(groups, key=min):
        if len(parts[-1]) >= PART:
            parts.append([])
        parts[-1] += mine
    if len(parts[-1]) < PART and len(parts) > 1:
        parts[-2:] = [parts[-2] + parts[-1]]
    at = {v: n for n, part in enumerate(parts) for k in part for v in run[k].outputs}
    in_order = all(at[v] <= n for n, part in enumerate(parts) for k in part for v in run[k].vars if v in at)
    return [[run[k] for k in sorted(part)] for part in parts] if in_order else [list(run)]


def _outlined(
    blocks: dict[str, Block],
    name: str,
    run: Sequence[Eqn],
    again: Sequence[Eqn],
    later: Collection[Var],
    outlined: set[str],
) -> Eqn:
    """A call of a new block that holds the run, and before it what is computed again."""
    whole = [*again, *run]
    inner = {v for e in whole for v in e.outputs}
    inputs = tuple(dict.fromkeys(v for e in whole for v in e.vars if v not in inner))
    outputs = tuple(v for e in run for v in e.outputs if v in later)
    i = 1
    while (new := f"{name}_{i}") in blocks:
        i += 1
    blocks[new] = Block(inputs, tuple(whole), outputs)
    outlined.add(new)
    b = Builder()
    b.append(call, inputs, {"block": Ref(new)}, [v.type for v in outputs])
    return replace(b.eqns[0], outputs=outputs, source=run[0].source, phase=latest(*run))
