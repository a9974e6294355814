"""Gates between products in 8 bits, which a kernel converts as it computes them; a choice of kernels, as `fuse` is.

v = mul(silu(a), b)                       =>   v8, scale = gated_fp8(a, b, form=f8e4m3)
v8, scale = fp8_rows(v, form=f8e4m3)

s = silu(a)
v, db = mul(s, b), mul(g, s)              =>   … = gated_fp8_grad(g, a, b, form=f8e5m2, kept=f8e4m3)
da = silu_grad(mul(g, b), a)
… = fp8_rows and fp8_columns of da and db, fp8_columns of v
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from mycel.ir import Atom, Block, Eqn, Params, Program, Var, chains, rewrite, walk
from mycel.ops import o
from mycel.transform.dce import dce


def fp8_gates(program: Program) -> Program:
    """fp8_rows(silu(a) b) => gated_fp8(a, b), and its gradients alike; itself where nothing is in 8 bits."""
    if not any(eqn.op is o.fp8_product for _, eqn in walk(program)):
        return program
    return dce(rewrite(program, lambda block: _Gates(block).fused()))


class _Gates:
    """What the values of a block are made of, as far as gates go, and which of them are converted."""

    def __init__(self, block: Block) -> None:
        self.block, self.uses = block, chains(block)
        self.producers: dict[Atom, Eqn] = {v: eqn for eqn in block.eqns for v in eqn.outputs}
        self.silu = {eqn.inputs[0]: eqn.outputs[0] for eqn in block.eqns if eqn.op is o.silu}
        self.products = {frozenset(eqn.inputs): eqn.outputs[0] for eqn in block.eqns if eqn.op is o.mul}
        self.converted = {(eqn.op, eqn.inputs[0]): eqn for eqn in block.eqns if eqn.op in (o.fp8_rows, o.fp8_columns)}

    def fused(self) -> Block:
        before: dict[int, list[Eqn]] = defaultdict(list)  # new equations, by the one they stand before
        replaced: set[int] = set()
        for eqn in self.block.eqns:
            for conversions, whole in self.gradients(eqn) if eqn.op is o.silu_grad else ():
                at = 1 + max(self.uses[v].defined for v in whole.vars)
                if all(i >= at for v in whole.outputs for i in self.uses[v].uses):
                    before[at].append(whole)
                    replaced.update(map(id, conversions))
                    break
        eqns: list[Eqn] = []
        for i, eqn in enumerate(self.block.eqns):
            eqns += before[i]
            if id(eqn) not in replaced:
                eqns.append(self.value(eqn) if eqn.op is o.fp8_rows else eqn)
        return Block(self.block.inputs, tuple(eqns), self.block.outputs)

    def value(self, eqn: Eqn) -> Eqn:
        """fp8_rows of a gate that nobody else reads, as one equation; else itself."""
        (v,) = eqn.vars
        if not self.uses[v].is_output and len(self.uses[v].uses) == 1:
            for s, b in self.factors(v):
                silu = self.producers.get(s)
                if silu is not None and silu.op is o.silu and _are_alike(v, silu.inputs[0], b):
                    return replace(eqn, op=o.gated_fp8, inputs=(silu.inputs[0], b))
        return eqn

    def gradients(self, eqn: Eqn) -> Iterator[tuple[list[Eqn], Eqn]]:
        """Conversions of the cotangents of a gate, and one equation for all; `eqn` is silu_grad(mul(g, b), a)."""
        d, a = eqn.inputs
        s, da = self.silu.get(a), eqn.outputs[0]
        for g, b in self.factors(d) if s is not None else ():
            db, v = self.products.get(frozenset({g, s})), self.products.get(frozenset({s, b}))
            if db is None or v is None or not _are_alike(g, a, b, da, db, v):
                continue
            both = [(convert, x) for x in (da, db) for convert in (o.fp8_rows, o.fp8_columns)]
            conversions = [self.converted[key] for key in (*both, (o.fp8_columns, v)) if key in self.converted]
            forms = [each.params["form"] for each in conversions]
            if len(forms) == 5 and len(set(forms[:4])) == 1:
                params = Params({"form": forms[0], "kept": forms[4]})
                outputs = tuple(y for each in conversions for y in each.outputs)
                yield conversions, replace(eqn, op=o.gated_fp8_grad, inputs=(g, a, b), params=params, outputs=outputs)

    def factors(self, x: Atom) -> list[tuple[Atom, Atom]]:
        """(a, b) and (b, a) of x = mul(a, b)."""
        eqn = self.producers.get(x)
        if eqn is None or eqn.op is not o.mul:
            return []
        a, b = eqn.inputs
        return [(a, b), (b, a)]


def _are_alike(*values: Atom) -> bool:
    """Tensors of one type: nothing is broadcast."""
    return len({v.type if isinstance(v, Var) else None for v in values}) == 1 and isinstance(values[0], Var)
