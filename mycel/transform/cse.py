"""Common subexpressions: an equation that computes what an earlier one computed is the earlier one.

    a: f32[2] = exp(x)                          a: f32[2] = exp(x)
    b: f32[2] = exp(x)                   =>     c: f32[2] = add(a, a)
    c: f32[2] = add(a, b)

Two blocks that differ in names and source lines only become one, and two constants of the same bits become one, so that
calls and uses of them meet here too.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import Atom, Block, Eqn, Params, Program, Ref, Var, lookup, order, prune, structure, substitute
from mycel.ir.program import same_bits
from mycel.ops import o


def cse(program: Program) -> Program:
    """Equal equations, equal blocks, equal constants => one of each."""
    consts = _equal_consts(program.consts)
    blocks: dict[str, Block] = {}
    seen: dict[Any, str] = {}
    refs: dict[str, str] = {}
    saying: set[str] = set()  # blocks that say something
    for name in order(program):
        if any(eqn.op.says or any(ref in saying for ref in eqn.refs) for eqn in program.blocks[name].eqns):
            saying.add(name)
        block = _merge(program.blocks[name], refs, consts, saying)
        refs[name] = name if name == program.entry else seen.setdefault(structure(block), name)
        blocks[name] = block
    return prune(replace(program, blocks=blocks))


def _merge(block: Block, refs: Mapping[str, str], consts: Mapping[str, str], saying: Set[str]) -> Block:
    """One block, its equal equations merged; `refs` and `consts` say which name stands for which."""
    values: dict[Var, Atom] = {}
    first: dict[Any, tuple[Var, ...]] = {}
    eqns = []
    for eqn in block.eqns:
        is_heard = eqn.op.says or any(ref in saying for ref in eqn.refs)
        eqn = _renamed(substitute(eqn, values), refs, consts)
        if is_heard or eqn.op.grows:  # what is gathered twice is large: it is gathered again on purpose
            eqns.append(eqn)
            continue
        outputs = first.setdefault((_key(eqn), tuple(v.type for v in eqn.outputs)), eqn.outputs)
        if outputs is eqn.outputs:
            eqns.append(eqn)
        else:
            values.update(zip(eqn.outputs, outputs, strict=True))
    return Block(block.inputs, tuple(eqns), tuple(lookup(x, values) for x in block.outputs))


def _renamed(eqn: Eqn, refs: Mapping[str, str], consts: Mapping[str, str]) -> Eqn:
    changed: dict[str, Any] = {k: Ref(refs[v]) for k, v in eqn.params.items() if isinstance(v, Ref) and refs[v] != v}
    if eqn.op is o.const and consts.get(eqn.params["name"], eqn.params["name"]) != eqn.params["name"]:
        changed["name"] = consts[eqn.params["name"]]
    return replace(eqn, params=Params(eqn.params | changed)) if changed else eqn


def _key(eqn: Eqn) -> Any:
    """What an equation computes."""
    inputs = tuple(map(_atom_key, eqn.inputs))
    if len(inputs) == 2 and _commutes(eqn):
        inputs = tuple(sorted(inputs, key=repr))
    return eqn.op.name, inputs, _params_key(eqn)


def _commutes(eqn: Eqn) -> bool:
    a, b = eqn.inputs
    if not (isinstance(a, Var) and isinstance(b, Var) and a.type == b.type):
        return False
    return eqn.op.commutes == "always" or (eqn.op.commutes == "exactly" and not a.dtype.is_floating_point)


def _atom_key(x: Atom) -> Any:
    """Literals by how they print: 1, 1.0 and True are different operands."""
    return x if isinstance(x, Var) else repr(x)


def _params_key(eqn: Eqn) -> Any:
    return tuple(sorted((k, repr(v)) for k, v in eqn.params.items()))


def _equal_consts(consts: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Constant -> the first constant with its type and bits."""
    first: dict[Any, list[str]] = {}
    stands: dict[str, str] = {}
    for name, c in consts.items():
        alike = first.setdefault((c.dtype, tuple(c.shape)), [])
        stands[name] = next((other for other in alike if same_bits(c, consts[other])), name)
        if stands[name] == name:
            alike.append(name)
    return stands
