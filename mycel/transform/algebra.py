"""Identities, wherever they apply: a table of rewrites (`identities.py`), tried on each equation until none fits.

    a: f32[6]   = reshape(x, shape=(6,))
    b: f32[3,2] = reshape(a, shape=(3, 2))       =>     b: f32[3,2] = reshape(x, shape=(3, 2))
    y: f32[3,2] = mul(b, 1)                             (y is b)

Only what is exact in floating point (the sign of zero apart) and keeps the type: a rewrite whose result has another
type is not made.  Rules look at operands only, which are already rewritten, so one pass over a block leaves nothing to
rewrite.
"""

from __future__ import annotations

from dataclasses import replace

from mycel.ir import OPS, Atom, Block, Eqn, Params, Program, Var, lookup, rewrite, substitute
from mycel.transform.identities import TABLE, Made


def algebra(program: Program) -> Program:
    """Every rewrite of the table, wherever it applies."""
    return rewrite(program, _rewritten)


def _rewritten(block: Block) -> Block:
    definitions = Made()
    values: dict[Var, Atom] = {}
    eqns = []
    for eqn in block.eqns:
        new: Eqn | None = substitute(eqn, values)
        while new is not None:
            step = _step(new, definitions)
            if step is None:
                eqns.append(new)
                definitions.eqns.update((v, new) for v in new.outputs)
                break
            if isinstance(step, Eqn):
                new = step
            else:
                values.update(zip(eqn.outputs, step, strict=True))
                new = None
    return Block(block.inputs, tuple(eqns), tuple(lookup(x, values) for x in block.outputs))


def _step(eqn: Eqn, definitions: Made) -> Eqn | tuple[Var, ...] | None:
    """One rewrite of an equation: another equation, or values for its outputs."""
    for rule in TABLE.get(eqn.op.name, ()):
        result = rule(eqn, definitions)
        if isinstance(result, Var):
            result = (result,)
        if not isinstance(result, tuple):  # nothing, or a literal where a value must stand
            continue
        if isinstance(result[0], str):
            op, inputs, params = OPS[result[0]], result[1], result[2]
            types = op.infer([x.type if isinstance(x, Var) else x for x in inputs], params)
            if types == tuple(v.type for v in eqn.outputs):
                return replace(eqn, op=op, inputs=tuple(inputs), params=Params(params))
        elif tuple(x.type for x in result if isinstance(x, Var)) == tuple(v.type for v in eqn.outputs):
            return tuple(result)
    return None
