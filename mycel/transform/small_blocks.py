"""Small equations as blocks of their own, to be one call each; equal ones are one block.

    def main(x, w, u):                           def main_1(x, w):
      s = square(x)                                s = square(x)
      h = linear_few_rows(x, u)           =>       y = mul(s, w)
      y = mul(s, w)                                return y
      z = linear_few_rows(y, u)                  def main(x, w, u):
      return h, z                                  h = linear_few_rows(x, u)
                                                   y = call(x, w, block=@main_1)
                                                   z = linear_few_rows(y, u)
                                                   return h, z

An equation waits until one that is not small needs it, or what waits with it, or enough does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mycel.ir import Block, Builder, Eqn, Program, Ref, Var, call
from mycel.transform.inline import latest

LEAST = 2  # equations that compute: fewer are no slower by themselves
MOST_BYTES = 1 << 20  # of what a block computes: it lies on the stack


def small_blocks(program: Program, is_small: Callable[[Eqn], bool]) -> tuple[Program, list[str]]:
    """The program, whose entry calls blocks of small equations, and their names."""
    main = program.main
    readers: dict[Var, int] = {}
    for v in (*(v for eqn in main.eqns for v in eqn.vars), *(v for v in main.outputs if isinstance(v, Var))):
        readers[v] = readers.get(v, 0) + 1
    blocks = dict(program.blocks)
    names: dict[str, str] = {}  # of new blocks, by what they are
    eqns: list[Eqn] = []
    waiting: list[Eqn] = []

    def done() -> None:
        if sum(not e.op.moves for e in waiting) < LEAST:
            eqns.extend(waiting)
        else:
            eqns.append(_called(waiting, readers, blocks, names, program.entry))
        waiting.clear()

    for eqn in main.eqns:
        if is_small(eqn):
            if sum(v.type.bytes for e in (*waiting, eqn) for v in e.outputs) > MOST_BYTES:
                done()
            waiting.append(eqn)
            continue
        if any(v in e.outputs for v in eqn.vars for e in waiting):
            done()
        eqns.append(eqn)
    done()
    blocks[program.entry] = Block(main.inputs, tuple(eqns), main.outputs)
    return replace(program, blocks=blocks), [*names.values()]


def _called(
    run: Sequence[Eqn], readers: dict[Var, int], blocks: dict[str, Block], names: dict[str, str], entry: str
) -> Eqn:
    """A call of the block that these equations are."""
    inner = {v for e in run for v in e.outputs}
    inputs = tuple(dict.fromkeys(v for e in run for v in e.vars if v not in inner))
    read_here: dict[Var, int] = {}
    for v in (v for e in run for v in e.vars):
        read_here[v] = read_here.get(v, 0) + 1
    outputs = tuple(v for e in run for v in e.outputs if readers.get(v, 0) > read_here.get(v, 0))
    new = {v: Var(f"v{i}", v.type) for i, v in enumerate([*inputs, *(v for e in run for v in e.outputs)])}
    renamed = tuple(
        replace(
            e,
            inputs=tuple(new[x] if isinstance(x, Var) else x for x in e.inputs),
            outputs=tuple(new[v] for v in e.outputs),
        )
        for e in run
    )
    block = Block(tuple(new[v] for v in inputs), renamed, tuple(new[v] for v in outputs))
    same = repr((block.inputs, [(e.op.name, e.inputs, e.params, e.outputs) for e in renamed], block.outputs))
    if same not in names:
        i = 1
        while (name := f"{entry}_{i}") in blocks:
            i += 1
        blocks[name], names[same] = block, name
    b = Builder()
    b.append(call, inputs, {"block": Ref(names[same])}, [v.type for v in outputs])
    return replace(b.eqns[0], outputs=outputs, source=run[0].source, phase=latest(*run))
