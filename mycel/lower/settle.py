"""Blocks so that each has one layout: a copy of a block for each way its parameters lie, and for each branch and loop
that holds it.

    y = call(x, w0, block=@layer)     w0[n@tp,k]             y = call(x, w0, block=@layer)
    z = call(y, w1, block=@layer)     w1[n,k]         =>     z = call(y, w1, block=@layer_2)

Functions with a gradient of their own become plain calls: gradients are taken by now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mycel.ir import Block, Eqn, Layout, Params, Program, Ref, Var, call, custom, free_name


def settle(program: Program, given: Mapping[int, Layout]) -> Program:
    """The program whose blocks are each run in one layout; `given` are the layouts of inputs of the entry."""
    blocks: dict[str, Block] = {}
    named: dict[Any, str] = {}

    def copy(name: str, lies: Mapping[int, Layout], key: Any = None) -> Ref:
        """The name of the copy of a block for inputs that lie so."""
        if key is not None and key in named:
            return Ref(named[key])
        new = free_name(name, blocks)
        blocks[new] = program.blocks[name]  # the name is taken
        if key is not None:
            named[key] = new
        block = program.blocks[name]
        known = {v: lies[i] for i, v in enumerate(block.inputs) if i in lies}
        blocks[new] = replace(block, eqns=tuple(settled(eqn, known) for eqn in block.eqns))
        return Ref(new)

    def settled(eqn: Eqn, known: Mapping[Var, Layout]) -> Eqn:
        if not any(True for _ in eqn.refs):
            return eqn
        lies = {i: known[x] for i, x in enumerate(eqn.inputs) if isinstance(x, Var) and x in known}
        if eqn.op is call or eqn.op is custom:
            name = str(eqn.params["block" if eqn.op is call else "forward"])
            key = (name, tuple(sorted((i, str(layout)) for i, layout in lies.items())))
            return replace(eqn, op=call, params=Params(block=copy(name, lies, key)))
        return replace(
            eqn, params=Params({k: copy(str(v), {}) if isinstance(v, Ref) else v for k, v in eqn.params.items()})
        )

    entry = copy(program.entry, given)
    return replace(program, blocks=blocks, entry=str(entry))
