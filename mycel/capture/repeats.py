"""Flat traced equations and the tree of module calls -> blocks: a module that repeats becomes one block called many
times.

Two module calls are the same block when their equations are the same up to names: same operators, params, types and
wiring.  Only the first is kept; each call passes its own parameters.  Modules that do not repeat stay in line.  A
module that draws random numbers gets its own key, folded from its parent's by its place among the parent's calls: so a
block draws different numbers at each call, and the same whether it is in line or not.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mycel.capture.names import hints, rename
from mycel.capture.record import ModuleCall
from mycel.capture.trace import KEY, Tracer
from mycel.ir import OPS, Block, Eqn, Params, Ref, Var, call, is_float

SMALLEST = 3  # equations a module must have to be worth a block


@dataclass
class _RegionShape:
    """A region up to names: the values it takes in and defines, in order of appearance."""

    region: ModuleCall
    externals: list[Var]
    defined: list[Var]


def assemble(tracer: Tracer, outputs: list[Any]) -> dict[str, Block]:
    """The blocks of a finished trace; the entry is `main`."""
    return {
        **tracer.blocks,
        **_RegionBlocks(tracer, outputs, tracer.hints, {"main", *tracer.blocks}).blocks("main", ""),
    }


def assemble_inner(
    section: Any, outputs: list[Any], names: dict[str, str], path: str, used: set[str]
) -> tuple[dict[str, Block], Block]:
    """(blocks of modules that repeat inside, the block itself) of a finished part of a trace; names of outer values are
    known."""
    blocks = _RegionBlocks(section, outputs, names, {"", *used}).blocks("", path)
    block = blocks.pop("")
    return blocks, block


class _RegionBlocks:
    def __init__(self, tracer: Any, outputs: list[Any], names: dict[str, str], used: set[str]) -> None:
        self.tracer, self.root = tracer, tracer.regions[0]
        self.root.end = len(tracer.eqns)
        self.known, self.used = {**hints(tracer.eqns, tracer.lines), **names}, used
        self.eqns, self.outputs = stop_gradients(tracer, outputs, self.known)
        self.last: dict[Var, float] = {v: i for i, e in enumerate(self.eqns) for v in e.vars}
        self.last.update({v: math.inf for v in outputs if isinstance(v, Var)})
        self.drawing = [i for i, e in enumerate(self.eqns) if KEY in e.inputs]
        self.sizes = Counter((r.name, r.end - r.start) for r in _all_regions(self.root))
        self.groups: dict[Any, list[_RegionShape]] = {}
        self.key_of: dict[int, Any] = {}
        self.kept: dict[Any, list[int]] = {}  # group -> which of the defined values the block returns
        self.names: dict[Any, str] = {}
        self.fresh = 0

    def blocks(self, entry: str, path: str) -> dict[str, Block]:
        self._group(self.root)
        self.groups = {k: shapes for k, shapes in self.groups.items() if len(shapes) > 1}
        self._choose_outputs()
        blocks: dict[str, Block] = {}
        for key, shapes in self.groups.items():
            self.names[key] = _unique(_snake(shapes[0].region.name), self.used)
        for key, shapes in self.groups.items():
            first = shapes[0]
            body = self._body(first.region, KEY)
            outs = [first.defined[i] for i in self.kept[key]]
            blocks[self.names[key]] = rename(
                Block(tuple(first.externals), tuple(body), tuple(outs)), self.known, first.region.path
            )
        inputs = [*self.tracer.inputs, *([KEY] if self.drawing and KEY not in self.tracer.inputs else [])]
        main = Block(tuple(inputs), tuple(self._body(self.root, KEY)), tuple(self.outputs))
        blocks[entry] = rename(main, self.known, path)
        return blocks

    # -- which regions repeat -------------------------------------------------------------------------------

    def _group(self, region: ModuleCall, around: frozenset[Any] = frozenset()) -> None:
        """The regions by what they are; one that is the same as a region `around` it (a Sequential of nothing but a
        Sequential) is no call of that."""
        for child in region.children:
            size = child.end - child.start
            inside = around
            if size >= SMALLEST and self.sizes[child.name, size] > 1:
                key, shape = self._shape(child)
                if key in around:
                    self._group(child, around)
                    continue
                inside = around | {key}
                known = self.groups.setdefault(key, [])
                known.append(shape)
                self.key_of[id(child)] = key
                if len(known) > 1:
                    continue
            self._group(child, inside)

    def _shape(self, region: ModuleCall) -> tuple[Any, _RegionShape]:
        number: dict[Var, int] = {}
        externals: list[Var] = []
        defined: list[Var] = []
        key: list[Any] = [region.name]
        for eqn in self.eqns[region.start : region.end]:
            for x in eqn.inputs:
                if isinstance(x, Var):
                    if x not in number:
                        number[x] = len(number)
                        externals.append(x)
                        key.append(x.type)
                    key.append(number[x])
                else:
                    key.append((type(x), x))
            key.append(eqn.op.name)
            key.append(tuple(eqn.params.items()))
            for v in eqn.outputs:
                number[v] = len(number)
                defined.append(v)
                key.append(v.type)
        return tuple(key), _RegionShape(region, externals, defined)

    def _choose_outputs(self) -> None:
        """A block returns what any of its calls needs; outer blocks first, since they ask values of inner ones."""
        wanted: set[Var] = set()
        for key, shapes in sorted(self.groups.items(), key=lambda g: -len(g[1][0].defined)):
            keep = {
                i
                for shape in shapes
                for i, v in enumerate(shape.defined)
                if v in wanted or self.last.get(v, -1) >= shape.region.end
            }
            self.kept[key] = sorted(keep)
            wanted.update(shapes[0].defined[i] for i in keep)

    # -- writing bodies -------------------------------------------------------------------------------------

    def _body(self, region: ModuleCall, key: Var) -> list[Eqn]:
        """The equations of a region, repeated modules in it as calls."""
        out: list[Eqn] = []
        at = region.start
        for child in region.children:
            out += [_with_key(e, key) for e in self.eqns[at : child.start]]
            at = child.end
            inner = key
            if self._draws(child):
                self.fresh += 1
                inner = Var(f"key_{self.fresh}", KEY.type)
                self.known[inner.name] = "key"
                out.append(Eqn(OPS["fold_in"], (key,), Params({"data": child.site}), (inner,), child.source))
            group = self.key_of.get(id(child))
            out += self._call(child, group, inner) if group in self.groups else self._body(child, inner)
        return out + [_with_key(e, key) for e in self.eqns[at : region.end]]

    def _call(self, region: ModuleCall, group: Any, key: Var) -> list[Eqn]:
        shape = next(s for s in self.groups[group] if s.region is region)
        inputs = tuple(key if v is KEY else v for v in shape.externals)
        outs = tuple(shape.defined[i] for i in self.kept[group])
        return [Eqn(call, inputs, Params({"block": Ref(self.names[group])}), outs, region.source)]

    def _draws(self, region: ModuleCall) -> bool:
        i = bisect.bisect_left(self.drawing, region.start)
        return i < len(self.drawing) and self.drawing[i] < region.end


def stop_gradients(tracer: Tracer, outputs: list[Any], names: dict[str, str]) -> tuple[list[Eqn], list[Any]]:
    """Values made under torch.no_grad() carry no gradient out of it: where other code uses them, a stop_gradient stands
    right behind them."""
    if not tracer.frozen:
        return tracer.eqns, outputs
    eqns = tracer.eqns
    frozen_vars = {v for i in tracer.frozen for v in eqns[i].outputs if is_float(v.dtype)}
    leaving = {v for i, e in enumerate(eqns) if i not in tracer.frozen for v in e.vars if v in frozen_vars}
    leaving |= {v for v in outputs if isinstance(v, Var) and v in frozen_vars}
    stopped = {v: Var(f"{v.name}_stopped", v.type) for v in leaving}
    names.update({s.name: names[v.name] for v, s in stopped.items()})
    out: list[Eqn] = []
    shift = []  # where equation i went
    for i, eqn in enumerate(eqns):
        shift.append(len(out))
        if i not in tracer.frozen and any(v in stopped for v in eqn.vars):
            eqn = Eqn(
                eqn.op,
                tuple(stopped.get(x, x) if isinstance(x, Var) else x for x in eqn.inputs),
                eqn.params,
                eqn.outputs,
                eqn.source,
            )
        out.append(eqn)
        out += [
            Eqn(OPS["stop_gradient"], (v,), Params(), (stopped[v],), eqn.source) for v in eqn.outputs if v in stopped
        ]
    shift.append(len(out))
    for region in (tracer.regions[0], *_all_regions(tracer.regions[0])):
        region.start, region.end = shift[region.start], shift[region.end]
    return out, [stopped.get(x, x) if isinstance(x, Var) else x for x in outputs]


def _all_regions(region: ModuleCall) -> Any:
    for child in region.children:
        yield child
        yield from _all_regions(child)


def _with_key(eqn: Eqn, key: Var) -> Eqn:
    if key is KEY or KEY not in eqn.inputs:
        return eqn
    return Eqn(eqn.op, tuple(key if x is KEY else x for x in eqn.inputs), eqn.params, eqn.outputs, eqn.source)


def _snake(name: str) -> str:
    """LlamaDecoderLayer -> llama_decoder_layer"""
    return re.sub(r"(?<=[a-z0-9]{2})(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", name).lower()


def _unique(name: str, used: set[str]) -> str:
    unique = next(n for n in itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2))) if n not in used)
    used.add(unique)
    return unique
