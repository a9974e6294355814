"""Where tokens go, as a result of a program: how many choices of a batch each expert of each layer gets, and how many
of the weights that its router gives are not finite.

    y = experts(x, ids, w, up, down)        =>      y = experts(x, ids, w, up, down)
                                                    n: i64[9] = cat(sum(eq(ids, iota)), sum(not(lt(abs(w), inf))))

Blocks with such layers return what theirs get, call by call.  What an expert has no room for counts as its choice.
Layers inside branches and loops are not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.ir import Block, Builder, Eqn, Program, Var, call, check, is_float, order
from mycel.ops import o


@dataclass(frozen=True)
class RoutedLayer:
    """A layer of experts: the tensors of the model that its experts are made of, by name, and the choices of a
    batch."""

    tensors: tuple[str, ...]
    experts: int
    choices: int


@dataclass(frozen=True)
class _Site:
    """A layer as a block sees it: what its tokens chose, and the inputs of the block that its experts are made of."""

    routed: Var
    inputs: frozenset[Var]
    choices: int


def with_routing(program: Program, at: int) -> tuple[Program, list[RoutedLayer]]:
    """The program with what its layers get as one more result, at this place, and the layers in the order in which that
    has them; as it was, where it has none."""
    sites: dict[str, list[_Site]] = {}
    blocks = dict(program.blocks)
    for name in order(program):
        blocks[name], sites[name] = _counted(program.blocks[name], program.blocks, sites)
    layers = [_layer(program, site) for site in sites[program.entry]]
    if not layers:
        return program, []
    main = blocks[program.entry]
    b = Builder(names_of=main)
    with b:
        routed = o.cat(*(site.routed for site in sites[program.entry]), dim=0)
    outputs = main.outputs[: len(program.main.outputs)]
    main = replace(main, eqns=(*main.eqns, *b.eqns), outputs=(*outputs[:at], routed, *outputs[at:]))
    return check(replace(program, blocks={**blocks, program.entry: main})), layers


def _layer(program: Program, site: _Site) -> RoutedLayer:
    names = {program.role(v).name for v in site.inputs if program.role(v).kind == "parameter"}
    return RoutedLayer(tuple(sorted(names)), site.routed.shape[0] - 1, site.choices)


def _counted(
    block: Block, blocks: Mapping[str, Block], sites: Mapping[str, Sequence[_Site]]
) -> tuple[Block, list[_Site]]:
    """A block that also returns what its layers get, those of blocks that it calls among them."""
    b, here = Builder(names_of=block), list[_Site]()
    producers = {v: eqn for eqn in block.eqns for v in eqn.outputs}
    for eqn in block.eqns:
        inner = sites[eqn.params["block"]] if eqn.op is call else ()
        if inner:
            routed = [Var(b.name("routed"), site.routed.type) for site in inner]
            operands = dict(zip(blocks[eqn.params["block"]].inputs, eqn.inputs, strict=True))
            for var, site in zip(routed, inner, strict=True):
                reached = _inputs((operands[v] for v in site.inputs), producers)
                here.append(_Site(var, reached, site.choices))
            b.eqns.append(replace(eqn, outputs=(*eqn.outputs, *routed)))
            continue
        b.eqns.append(eqn)
        if eqn.op.for_ranks:
            _, ids, weights, up, down, *_ = eqn.inputs
            _, choices, _, stacked, *_ = eqn.input_types
            with b:
                b.at(eqn)
                routed_here = _routed(_wanted(ids, eqn, producers), weights, stacked.shape[0])
            here.append(_Site(routed_here, _inputs((up, down), producers), choices.numel))
    outputs = (*block.outputs, *(site.routed for site in here))
    return replace(block, eqns=tuple(b.eqns), outputs=outputs), here


def _wanted(ids: Any, eqn: Eqn, producers: Mapping[Var, Eqn]) -> Any:
    """What tokens chose, also where an expert has no room for them."""
    last = producers.get(ids)
    drops = eqn.params.get("elsewhere") and last is not None and last.op is o.where
    return last.inputs[1] if drops and last is not None else ids


def _routed(ids: Any, weights: Any, experts: int) -> Any:
    """Choices of each expert, and of the weights how many are no numbers."""
    chosen = o.eq(o.reshape(ids, shape=(ids.type.numel, 1)), o.iota(shape=(1, experts), dim=1, dtype=ids.dtype))
    broken = o.logical_not(o.lt(o.abs(o.reshape(weights, shape=(weights.type.numel, 1))), math.inf))
    return o.cat(*(o.sum(o.cast(x, dtype=torch.int64), dims=(0,)) for x in (chosen, broken)), dim=0)


def _inputs(values: Iterable[Any], producers: Mapping[Var, Eqn]) -> frozenset[Var]:
    """The inputs of a block that values are made of; whole numbers tell what of them, and are none."""
    waiting, seen = [v for v in values if isinstance(v, Var)], set[Var]()
    while waiting:
        v = waiting.pop()
        if v not in seen:
            seen.add(v)
            waiting += [x for x in producers[v].vars if is_float(x.dtype)] if v in producers else []
    return frozenset(v for v in seen if v not in producers)
