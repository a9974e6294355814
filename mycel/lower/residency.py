"""What is not kept for backward is computed again there.

    y, a, h = call(x, w, block=@f_forward)                 y, h = call(x, w, block=@f_forward)
    dx = call(w, a, h, dy, block=@f_backward)      =>      dx = call(w, x, h, dy, block=@f_backward)

    def f_backward(w, a, h, dy):                           def f_backward(w, x, h, dy):
      …                                                      a = exp(x)
                                                             …

The equations that are computed again stand right before their first use.  An operand of theirs that backward has made
anew (a gathered weight) is taken from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mycel.ir import (
    Atom,
    Block,
    Builder,
    Eqn,
    Params,
    Program,
    Ref,
    Var,
    chains,
    free_name,
    leading_to,
    lookup,
    prune,
    substitute,
)
from mycel.plan import Residuals, backward_inputs, backward_part, expressions, paired, twins


@dataclass(frozen=True)
class Halves:
    """A pair of blocks made for one decision: what the forward one returns, what the backward one takes, by places in
    the old ones."""

    forward: str
    backward: str
    outs: tuple[int, ...]  # outputs of the old forward block that others read
    extra: tuple[Var, ...]  # values that are returned behind them
    reused: tuple[int, ...]  # inputs of the forward block that backward takes
    kept: tuple[Var, ...]  # values of the forward block that backward takes
    rest: tuple[int, ...]  # inputs of the old backward block that stay


def reside(program: Program, plan: Residuals) -> Program:
    """The program in which each pair of calls hands over what its decision keeps."""
    program = replace(program, blocks={**program.blocks, plan.body: _loose(program.blocks[plan.body], set(plan.again))})
    body = program.blocks[plan.body]
    uses, hashes = chains(body), expressions(body)
    blocks, eqns = dict(program.blocks), list(body.eqns)
    names = Builder(names_of=body)
    halves: dict[object, Halves] = {}
    forwards: dict[object, str] = {}
    for d, (i, j) in zip(plan.pairs, paired(body), strict=True):
        f, b = body.eqns[i], body.eqns[j]
        of = backward_inputs(program, body, i, j)
        outs = tuple(k for k, v in enumerate(f.outputs) if uses[v].is_output or any(u != j for u in uses[v].uses))
        key = (f.params["block"], b.params["block"], d.keep, outs, tuple(of.items()))
        if key not in halves:
            halves[key] = _halves(blocks, f.params["block"], b.params["block"], set(d.keep), outs, of, forwards)
        h = halves[key]
        old = program.blocks[f.params["block"]]
        known = {v: x for x, v in zip(f.outputs, old.outputs, strict=True) if isinstance(v, Var)}
        # of a value that is returned twice, the place that stays
        stay = [(old.outputs[k], f.outputs[k]) for k in h.outs]
        known.update((v, x) for v, x in stay if isinstance(v, Var))
        for v in h.extra:
            known.setdefault(v, Var(names.name(v.name), v.type))
        eqns[i] = replace(
            f,
            params=Params(block=Ref(h.forward)),
            outputs=(*(f.outputs[k] for k in h.outs), *(known[v] for v in h.extra)),
        )
        again = twins(hashes, f, b)
        inputs = (
            *(lookup(f.inputs[k], again) for k in h.reused),
            *(known[v] for v in h.kept),
            *(b.inputs[k] for k in h.rest),
        )
        eqns[j] = replace(b, params=Params(block=Ref(h.backward)), inputs=inputs)
    blocks[plan.body] = Block(body.inputs, tuple(eqns), body.outputs)
    return prune(replace(program, blocks=blocks))


def _halves(
    blocks: dict[str, Block],
    forward: str,
    backward: str,
    keep: set[str],
    outs: tuple[int, ...],
    of: dict[Var, Var],
    forwards: dict[object, str],
) -> Halves:
    """New blocks: forward returns `keep` too, backward computes what else it needs of the forward's values.
    `forwards`: those made so far."""
    f, b = blocks[forward], blocks[backward]
    kept = tuple(v for e in f.eqns for v in e.outputs if v.name in keep)
    again = [f.eqns[i] for i in leading_to(f.eqns, of.values(), {*f.inputs, *kept})]
    read = {u for e in again for u in e.vars} | set(of.values())
    kept = tuple(v for v in kept if v in read)
    reused = tuple(i for i, v in enumerate(f.inputs) if v in read)
    first = [f.outputs[i] for i in outs]
    extra = tuple(v for v in kept if v not in first)
    rest = tuple(i for i, v in enumerate(b.inputs) if v not in of)
    w = Builder()
    w.reserve(v.name for v in (*(b.inputs[i] for i in rest), *(v for e in b.eqns for v in e.outputs)))
    new: dict[Var, Atom] = {}
    for v in (*(f.inputs[i] for i in reused), *kept):
        new[v] = w.input(v.name, v.type)
    w.inputs += [b.inputs[i] for i in rest]
    redo = _Again(w, again, new)
    old: dict[Var, Atom] = {}
    for eqn in b.eqns:
        for v in eqn.vars:
            if v in of and v not in old:
                old[v] = redo.value(of[v])
        w.eqns.append(substitute(eqn, old))
    for x in b.outputs:
        if isinstance(x, Var) and x in of and x not in old:
            old[x] = redo.value(of[x])
    ahead = forwards.setdefault((forward, outs, extra), free_name(forward, blocks))
    blocks[ahead] = Block(f.inputs, f.eqns, (*first, *extra))
    back = free_name(backward, blocks)
    blocks[back] = Block(tuple(w.inputs), tuple(w.eqns), tuple(lookup(x, old) for x in b.outputs))
    return Halves(ahead, back, outs, extra, reused, kept, rest)


class _Again:
    """Writes equations a second time, under new names, when their values are asked for: those of forward now belong to
    backward."""

    def __init__(self, builder: Builder, eqns: Iterable[Eqn], new: dict[Var, Atom]) -> None:
        self.builder, self.new = builder, new
        self.makers = {v: e for e in eqns for v in e.outputs}

    def value(self, old: Var) -> Atom:
        """What stands for a value here."""
        if old not in self.new:
            eqn = self.makers[old]
            for u in eqn.vars:
                self.value(u)
            outputs = tuple(Var(self.builder.name(v.name), v.type) for v in eqn.outputs)
            self.new.update(zip(eqn.outputs, outputs, strict=True))
            phase = "backward" if eqn.phase == "forward" else eqn.phase
            self.builder.eqns.append(replace(substitute(eqn, self.new), outputs=outputs, phase=phase))
        return self.new[old]


def _loose(block: Block, names: set[str]) -> Block:
    """The body, with values of these names made once more for those who read them in backward."""
    if not names:
        return block
    late = backward_part(block)
    early = [e for e in block.eqns if e not in late]
    early_values = {v for e in early for v in e.outputs}
    kept = {*block.inputs, *(v for v in early_values if v.name not in names)}
    wanted = [v for e in late for v in e.vars if v in early_values and v.name in names]
    again = [early[i] for i in leading_to(early, wanted, kept)]
    b = Builder(names_of=block)
    redo = _Again(b, again, {v: v for v in kept})
    for eqn in block.eqns:
        if eqn in late:
            values = {v: redo.value(v) for v in eqn.vars if v in early_values and v.name in names}
            eqn = substitute(eqn, values)
        b.eqns.append(eqn)
    return Block(block.inputs, tuple(b.eqns), block.outputs)
