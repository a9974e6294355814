"""For code that torch's autograd records: an operator through whose kernel torch takes no gradient of all that is used
becomes its meaning in smaller ones, through which it does, to any order.

dx: f32[4,8] = silu_grad(g, x)              =>  s: f32[4,8] = sigmoid(x)
                                                …
                                                dx: f32[4,8] = mul(g, slope)

Of `batch_norm(x, w, b)` torch follows the first result: it stays, where mean and variance lead to new values of
buffers alone, of which nobody takes a gradient.
"""

from __future__ import annotations

from dataclasses import replace

from mycel.ir import CONTROL, Block, Eqn, Program, Ref, Var, call, cond, custom, is_float, order, walk
from mycel.ops import o
from mycel.transform.opening import opened_block


def recordable(program: Program) -> Program:
    """The program in operators that torch differentiates; itself if all are."""
    while any(eqn.op.followed is not None for _, eqn in walk(program)):
        asked = Asked(program).values
        blocks = {name: _opened(block, asked.get(name, set())) for name, block in program.blocks.items()}
        if blocks == program.blocks:
            break
        program = replace(program, blocks=blocks)  # a meaning may hold such operators, too
    return program


def _opened(block: Block, asked: set[Var]) -> Block:
    def is_followed(eqn: Eqn) -> bool:
        return eqn.op.followed is None or not any(v in asked for v in eqn.outputs[eqn.op.followed :])

    return opened_block(block, lambda eqn: None if is_followed(eqn) else eqn.op.expand)


class Asked:
    """Values of each block that a result of the program depends on, in a way that gradients go."""

    def __init__(self, program: Program) -> None:
        self.outputs: dict[str, set[int]] = {name: set() for name in program.blocks}
        self.values: dict[str, set[Var]] = {}
        self.outputs[program.entry].update(range(len(program.results)))
        for name in reversed(order(program)):  # who holds a block comes before it
            self.values[name] = self._of(program.blocks[name], self.outputs[name], program)

    def _of(self, block: Block, outputs: set[int], program: Program) -> set[Var]:
        asked = {x for i, x in enumerate(block.outputs) if i in outputs and isinstance(x, Var) and is_float(x.dtype)}
        for eqn in reversed(block.eqns):
            if eqn.op is o.stop_gradient or not any(v in asked for v in eqn.outputs):
                continue
            asked.update(v for v in eqn.vars if is_float(v.dtype))
            if eqn.op in CONTROL:
                self._hold(eqn, {i for i, v in enumerate(eqn.outputs) if v in asked}, program)
        return asked

    def _hold(self, eqn: Eqn, outputs: set[int], program: Program) -> None:
        """What is asked of the blocks of an equation: of branches and calls what is asked of it, of others all."""
        exact = {call: "block", cond: "then orelse", custom: "forward"}.get(eqn.op, "").split()
        for param, ref in eqn.params.items():
            if isinstance(ref, Ref):
                self.outputs[ref].update(outputs if param in exact else range(len(program.blocks[ref].outputs)))
