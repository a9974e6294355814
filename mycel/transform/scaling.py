"""The loss times a scale that the caller gives: gradients in 16 bits stay above what they can hold."""

from __future__ import annotations

from dataclasses import replace

import torch

from mycel.ir import Block, Builder, Program, Role, Type
from mycel.ops import o

LOSS_SCALE = Role("counter", "loss_scale")


def with_scale(program: Program) -> Program:
    """The program with an input for the loss scale."""
    main = program.main
    b = Builder(names_of=main)
    b.inputs = list(main.inputs)
    scale = b.input("loss_scale", Type(torch.float32, ()))
    block = replace(main, inputs=tuple(b.inputs))
    return replace(
        program, blocks={**program.blocks, program.entry: block}, roles={**program.roles, scale.name: LOSS_SCALE}
    )


def scaled(program: Program) -> Program:
    """The program with its loss times the scale behind its results; itself, where there is no scale."""
    scale = program.by_role().get(LOSS_SCALE)
    if scale is None:
        return program
    main, n = program.main, len(program.results)
    b = Builder(names_of=main)
    with b:
        loss = o.mul(main.outputs[0], scale)
    block = Block(main.inputs, (*main.eqns, *b.eqns), (*main.outputs[:n], loss, *main.outputs[n:]))
    return replace(program, blocks={**program.blocks, program.entry: block})
