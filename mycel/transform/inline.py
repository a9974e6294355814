"""Calls of blocks that are called once, or are small, become the block's equations; a cond that is decided, its taken
branch.  So do calls, but in the entry, of blocks all of whose equations a compiler merges, such as norms: it merges
them with what is before and behind the call, and whoever prices or keeps values sees them.

    def f(x: f32[2]):                           def main(x: f32[2]):
      a: f32[2] = exp(x)                          a: f32[2] = exp(x)
      b: f32[2] = neg(a)                 =>       y: f32[2] = neg(a)
      return b                                    return y
    def main(x: f32[2]):
      y: f32[2] = call(x, block=@f)
      return y

The results keep the names they have at the call; other names stay unless they are taken, and then get a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from mycel.ir import (
    CONTROL,
    OPS,
    PHASES,
    Atom,
    Block,
    Eqn,
    Params,
    Program,
    Var,
    atom_type,
    call,
    cond,
    lookup,
    order,
    prune,
    substitute,
    walk,
)
from mycel.ops import o

MERGED = 32  # equations of a block all of which a compiler merges


def inline(program: Program, small: int = 8, keep: Collection[str] = ()) -> Program:
    """call(x…, block=@b) => the equations of b, where b is called once or has at most `small` equations, and is none to
    `keep`."""
    changed = True
    while changed:  # a branch that is dropped may leave another block with a single call
        program, changed = _once(program, small, keep)
    return program


def _once(program: Program, small: int, keep: Collection[str]) -> tuple[Program, bool]:
    """One round, inner blocks first; was there anything to inline?"""
    counts = Counter(str(ref) for _, eqn in walk(program) for ref in eqn.refs)
    blocks: dict[str, Block] = {}
    changed = False
    for name in order(program):
        fits = partial(_fits, counts=counts, small=small, merged=MERGED if name != program.entry else 0)
        blocks[name] = _inlined(program.blocks[name], blocks, fits, keep)
        changed |= blocks[name] is not program.blocks[name]
    return prune(replace(program, blocks=blocks)), changed


def _fits(name: str, block: Block, counts: Mapping[str, int], small: int, merged: int) -> bool:
    if counts[name] == 1 or len(block.eqns) <= small:
        return True
    return len(block.eqns) <= merged and all(_is_merged(eqn) for eqn in block.eqns)


def _is_merged(eqn: Eqn) -> bool:
    """Does a compiler merge it with what is before and behind it?"""
    return eqn.op.compiles and not eqn.op.apart and eqn.op not in CONTROL and not eqn.op.effect


def _inlined(
    block: Block, blocks: Mapping[str, Block], fits: Callable[[str, Block], bool], keep: Collection[str]
) -> Block:
    """One block with its calls inlined; itself if there is nothing to inline."""
    names = {v.name for v in block.inputs} | {v.name for e in block.eqns for v in e.outputs}
    decided: dict[Var, bool] = {}
    values: dict[Var, Atom] = {}
    eqns: list[Eqn] = []
    changed = False
    for eqn in block.eqns:
        if eqn.op is o.full and eqn.outputs[0].shape == () and isinstance(eqn.inputs[0], bool):
            decided[eqn.outputs[0]] = eqn.inputs[0]
        eqn = substitute(eqn, values)
        called = eqn.params["block"] if eqn.op is call and eqn.params["block"] not in keep else None
        if called is not None and fits(called, blocks[called]):
            eqns += _spliced(eqn, eqn.inputs, blocks[called], names, values)
            changed = True
        elif eqn.op is cond and eqn.inputs[0] in decided:
            branch = eqn.params["then" if decided[eqn.inputs[0]] else "orelse"]
            eqns += _spliced(eqn, eqn.inputs[1:], blocks[branch], names, values)
            changed = True
        else:
            eqns.append(eqn)
    if not changed:
        return block
    return Block(block.inputs, tuple(eqns), tuple(lookup(x, values) for x in block.outputs))


def _spliced(at: Eqn, operands: tuple[Atom, ...], block: Block, names: set[str], values: dict[Var, Atom]) -> list[Eqn]:
    """The equations of a block in place of the equation `at`; what its results are instead goes into `values`."""
    inner: dict[Var, Atom] = dict(zip(block.inputs, operands, strict=True))
    mine = {v for eqn in block.eqns for v in eqn.outputs}
    named: dict[Var, Var] = {}
    for out, x in zip(at.outputs, block.outputs, strict=True):
        if isinstance(x, Var) and x in mine:
            named.setdefault(x, out)
    eqns: list[Eqn] = []
    for eqn in block.eqns:
        outputs = tuple(named.get(v) or Var(_fresh(v.name, names), v.type) for v in eqn.outputs)
        eqns.append(
            replace(substitute(eqn, inner), outputs=outputs, source=eqn.source or at.source, phase=latest(at, eqn))
        )
        inner.update(zip(eqn.outputs, outputs, strict=True))
    for out, x in zip(at.outputs, block.outputs, strict=True):
        if not isinstance(x, Var):  # a literal result is a 0-dim tensor
            eqns.append(Eqn(OPS["full"], (x,), Params(shape=(), dtype=atom_type(x).dtype), (out,), at.source, at.phase))
        elif inner[x] != out:
            values[out] = inner[x]
    return eqns


def latest(*eqns: Eqn) -> str:
    """The last phase among those of some equations."""
    return max((e.phase for e in eqns), key=PHASES.index)


def _fresh(name: str, names: set[str]) -> str:
    """The name, with a number if it is taken."""
    fresh, count = name, 1
    while fresh in names:
        fresh, count = f"{name}_{count}", count + 1
    names.add(fresh)
    return fresh
