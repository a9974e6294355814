"""A program in fp32 -> the same in 16 bits, where that is safe: products and attention in 16 bits, sums, exponentials
and losses in 32.

    y: f32[8,16] = linear(x, w)                =>      x16: bf16[8,4]  = cast(x)
                                                       w16: bf16[16,4] = cast(w)
                                                       y:   bf16[8,16] = linear(x16, w16)
    s: f32[8]    = sum(y, dims=(1,))           =>      s: f32[8] = sum(cast(y, dtype=f32), dims=(1,))

    low     products and attention: operands in 16 bits, and so the result; a bias added to it follows
    high    reductions, norms, exponentials, logarithms, powers, losses: operands in 32 bits
    others  as wide as their widest operand

Weights stay what they are and are cast where they are used; so their gradients come out in 32 bits.  What several
products of a block read is cast once for up to four of them: their parts of its gradient add up in 16 bits, as those of
a model in 16 bits do, and ranks that hold a part each send it so.  Blocks are made anew for the types they are called
with; what branches and loops hand over keeps its type.  The first result, the loss, keeps its type too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mycel.ir import (
    CONTROL,
    HELD,
    Atom,
    Block,
    Builder,
    Eqn,
    Params,
    Program,
    Ref,
    Type,
    Var,
    call,
    free_name,
    lookup,
    prune,
)
from mycel.ops import o

READERS = 4  # products that share a cast: a sum of more parts is made in 32 bits


def precision(program: Program, dtype: torch.dtype) -> Program:
    """The program with its computation in `dtype`; its weights are the parameters, buffers and variables among its
    inputs."""
    change = _Change(program, dtype)
    main = program.main
    blocks = change.blocks
    blocks[program.entry] = change.block(
        main, [v.type for v in main.inputs], [program.role(v).kind in HELD for v in main.inputs], None
    )
    for k, x in enumerate(program.main.outputs):
        blocks[program.entry] = _typed_output(blocks[program.entry], k, x)
    return prune(replace(program, blocks=blocks))


def _typed_output(block: Block, at: int, old: Atom) -> Block:
    """The block with an output cast to the type it had."""
    new = block.outputs[at]
    if not isinstance(old, Var) or not isinstance(new, Var) or new.dtype == old.dtype:
        return block
    b = Builder.after(block)
    with b:
        out = o.cast(new, dtype=old.dtype)
    return Block(block.inputs, tuple(b.eqns), (*block.outputs[:at], out, *block.outputs[at + 1 :]))


def _is_bias(x: Var, args: Sequence[Atom], products: set[Var]) -> bool:
    """A weight of one dim that is added to a product."""
    return x.type.numel == max(x.shape) and any(a in products for a in args)


@dataclass
class _Change:
    program: Program
    dtype: torch.dtype
    blocks: dict[str, Block] = field(default_factory=dict)
    renamed: dict[object, str] = field(default_factory=dict)

    def named(self, name: str, types: list[Type], state: list[bool], outs: tuple[Type, ...] | None) -> str:
        """A block for these types of inputs, and of outputs if they are fixed."""
        key = (name, tuple(types), tuple(state), outs)
        if key not in self.renamed:
            block = self.block(self.program.blocks[name], types, state, outs)
            new = free_name(name, {*self.blocks, self.program.entry})
            self.blocks[new] = block
            self.renamed[key] = new
        return self.renamed[key]

    def block(self, old: Block, types: list[Type], state: list[bool], outs: tuple[Type, ...] | None) -> Block:
        b = Builder(names_of=old)
        inputs = [Var(v.name, t) for v, t in zip(old.inputs, types, strict=True)]
        values: dict[Var, Atom] = dict(zip(old.inputs, inputs, strict=True))
        weights = {v for v, s in zip(inputs, state, strict=True) if s and v.dtype == torch.float32}
        products: set[Var] = set()
        casts: dict[Var, list[Var]] = {}
        with b:
            for eqn in old.eqns:
                b.at(eqn)
                args = [lookup(x, values) for x in eqn.inputs]
                new = (
                    self.control(b, eqn, args, weights)
                    if eqn.op in CONTROL
                    else self.equation(b, eqn, args, weights, products, casts)
                )
                renamed = tuple(replace(v, name=w.name) for v, w in zip(new, eqn.outputs, strict=True))
                b.eqns[-1] = replace(b.eqns[-1], outputs=renamed)
                values.update(zip(eqn.outputs, renamed, strict=True))
                if eqn.op.precision == "low":
                    products.update(renamed)
                if eqn.op.write is not None and eqn.inputs and args[0] in weights:
                    weights.update(renamed)  # a view of a weight is a weight
            results = [lookup(x, values) for x in old.outputs]
            if outs is not None:
                results = [
                    o.cast(x, dtype=t.dtype) if isinstance(x, Var) and x.dtype != t.dtype else x
                    for x, t in zip(results, outs, strict=True)
                ]
        return Block(tuple(inputs), tuple(b.eqns), tuple(results))

    def equation(
        self,
        b: Builder,
        eqn: Eqn,
        args: list[Atom],
        weights: set[Var],
        products: set[Var],
        casts: dict[Var, list[Var]],
    ) -> tuple[Var, ...]:
        """One equation, its operands cast as its kind wants them; `casts`: those for products so far, once for each."""

        def cast(x: Var, to: torch.dtype) -> Var:
            if kind != "low" or x in weights:
                return o.cast(x, dtype=to)
            before = casts.setdefault(x, [])
            before.append(before[-1] if len(before) % READERS else o.cast(x, dtype=to))
            return before[-1]

        kind = eqn.op.precision
        floats = [x for x in args if isinstance(x, Var) and x.dtype in (torch.float32, self.dtype)]
        if kind == "kept" or not floats:
            target = None
        elif kind == "low":
            target = self.dtype
        elif kind == "high":
            target = torch.float32
        else:
            moving = [
                x for x in floats if x.ndim and not (eqn.op is o.add and x in weights and _is_bias(x, args, products))
            ]
            target = torch.float32 if any(x.dtype == torch.float32 for x in moving) or not moving else self.dtype
        if target is not None:
            args = [
                cast(x, target)
                if isinstance(x, Var) and x in floats and x.dtype != target and i not in eqn.op.kept
                else x
                for i, x in enumerate(args)
            ]
        results = (
            eqn.op(*args, **eqn.params)
            if args or eqn.op is not o.const
            else b.append(eqn.op, (), dict(eqn.params), [v.type for v in eqn.outputs])
        )
        return results if isinstance(results, tuple) else (results,)

    def control(self, b: Builder, eqn: Eqn, args: list[Atom], weights: set[Var]) -> tuple[Var, ...]:
        """A call takes what it is given; branches, loops and custom gradients get and give the types they had."""
        if eqn.op is call:
            old = self.program.blocks[eqn.params["block"]]
            types = [x.type if isinstance(x, Var) else v.type for x, v in zip(args, old.inputs, strict=True)]
            name = self.named(eqn.params["block"], types, [x in weights for x in args], None)
            outs = [
                x.type if isinstance(x, Var) else v.type
                for x, v in zip(self.blocks[name].outputs, eqn.outputs, strict=True)
            ]
            results = b.append(call, tuple(args), {"block": Ref(name)}, outs)
            return results if isinstance(results, tuple) else (results,)
        typed = [
            o.cast(x, dtype=w.dtype) if isinstance(x, Var) and isinstance(w, Var) and x.dtype != w.dtype else x
            for x, w in zip(args, eqn.inputs, strict=True)
        ]
        params = dict(eqn.params)
        for key, ref in eqn.params.items():
            if isinstance(ref, Ref):
                block = self.program.blocks[ref]
                types = [v.type for v in block.inputs]
                fixed = tuple(x.type if isinstance(x, Var) else Type(torch.float32, ()) for x in block.outputs)
                params[key] = Ref(self.named(ref, types, [False] * len(types), fixed))
        b.eqns.append(Eqn(eqn.op, tuple(typed), Params(params), eqn.outputs, eqn.source, eqn.phase))
        return eqn.outputs
