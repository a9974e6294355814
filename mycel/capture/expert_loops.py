"""Loops over experts as people write them, as one operator.

    for e, expert in enumerate(experts):                                    up = stack(up_0, up_1, …)
        token, place = torch.where(ids == e)                         =>     down = stack(down_0, down_1, …)
        y.index_add_(0, token, expert(x[token]) * w[token, place, None])    y = experts(x, ids, w, up, down, gate=…)

What is traced computes all rows for every expert, of which those count that chose it (`rows.py`): for each expert an
arm that adds to y (`expert_arms.py`).  Arms that follow each other are a layer where each has a row for each token and
choice (`expert_places.py`), or one for each token (`expert_masks.py`).  All else stays as it was traced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.capture.bounds import bounds
from mycel.capture.expert_arms import Arm, Arms
from mycel.capture.expert_masks import CHOICES, MaskedLayer, shaped
from mycel.capture.expert_mlps import Mlp
from mycel.capture.expert_places import PlacedLayer
from mycel.ir import Atom, Block, Builder, Eqn, Op, Program, Var, call, cond, prune, substitute, walk
from mycel.ops import o

SMALL = 40  # equations: an expert has no more

Values = dict[Var, Any]


@dataclass(frozen=True)
class OpenBranch:
    """A branch that is open: taken where `test` is what `holds` says, else its result is `other`."""

    test: Atom
    holds: bool
    other: Atom


def may_have_loops(program: Program) -> bool:
    """Does something choose among others in it?"""
    return any((eqn.op, i) in CHOICES for _, eqn in walk(program) for i in range(len(eqn.outputs)))


def merged_loops(program: Program, differentiated: bool, recorded: bool) -> tuple[Program, set[str]]:
    """The program with its loops over experts as operators, and the lines of these; which experts a loop passes over is
    said in one way where we differentiate, in another where torch records."""
    skips = o.choices if differentiated else o.recorded_if_chosen if recorded else None
    lines: set[str] = set()
    blocks = {}
    for name, block in program.blocks.items():
        adds = any(eqn.op in (o.index_add, o.index_put, o.where, o.mul, cond) for eqn in block.eqns)
        blocks[name] = Loops.merged_in(block, program.blocks, lines, skips) if adds else block
    return (prune(replace(program, blocks=blocks)), lines) if lines else (program, lines)


class Loops:
    """A block whose equations are numbered by value: what is computed twice is one variable."""

    def __init__(self, block: Block, blocks: Mapping[str, Block], open_branches: bool, skips: Op | None = None) -> None:
        self.block, self.open_branches, self.skips = block, open_branches, skips
        self.b = Builder(names_of=block)
        self.branches: dict[Var, OpenBranch] = {}  # by their results
        self.eqns: list[Eqn] = []
        self.same: dict[Atom, Atom] = {}
        self.by_value: dict[Any, Eqn] = {}
        self.producers: dict[Var, tuple[Eqn, int]] = {}
        self.constants: Values = {}
        for eqn in block.eqns:
            for one in self._inlined(eqn, blocks):
                self._add(one)

    @classmethod
    def merged_in(cls, block: Block, blocks: Mapping[str, Block], lines: set[str], skips: Op | None) -> Block:
        """The block with its loops as operators; `if mask.any():` around what an expert adds is a branch that says
        nothing, where all such branches become parts of operators."""
        if any(eqn.op is cond for eqn in block.eqns):
            loops, merged_lines = cls(block, blocks, True, skips), set[str]()
            merged = loops.merged(merged_lines)
            alive = {loops._final(v) for eqn in merged.eqns for v in eqn.vars} | set(merged.outputs)
            if merged_lines and not alive & set(loops.branches):
                lines |= merged_lines
                return merged
        return cls(block, blocks, False).merged(lines)

    def _opened(self, eqn: Eqn, blocks: Mapping[str, Block]) -> tuple[Block | None, OpenBranch | None]:
        """What is behind a call or, where they are to be open, a branch that else changes nothing."""
        if eqn.op is call:
            return blocks[eqn.params["block"]], None
        if eqn.op is not cond or not self.open_branches or len(eqn.outputs) != 1:
            return None, None
        then, orelse = (blocks[eqn.params[k]] for k in ("then", "orelse"))
        for body, other in ((then, orelse), (orelse, then)):
            is_plain = not other.eqns and not any(e.op.effect or e.op.python or any(e.refs) for e in body.eqns)
            kept = other.outputs[0]
            if is_plain and body.eqns and isinstance(kept, Var) and kept in other.inputs:
                old = eqn.inputs[1:][other.inputs.index(kept)]
                return body, OpenBranch(self._value(eqn.inputs[0]), body is then, self._value(old))
        return None, None

    def _inlined(self, eqn: Eqn, blocks: Mapping[str, Block]) -> Iterator[Eqn]:
        """Small blocks as their equations."""
        body, branch = self._opened(eqn, blocks)
        if body is None or len(body.eqns) > (SMALL if eqn.op is call else 2 * SMALL):
            yield eqn
            return
        given = eqn.inputs if eqn.op is call else eqn.inputs[1:]
        values: dict[Var, Atom] = dict(zip(body.inputs, given, strict=True))
        for inner in body.eqns:
            outs = tuple(Var(self.b.name(v.name), v.type) for v in inner.outputs)
            moved = replace(substitute(inner, values), outputs=outs)
            values.update(zip(inner.outputs, outs, strict=True))
            yield from self._inlined(moved, blocks)
        for v, x in zip(eqn.outputs, body.outputs, strict=True):
            self.same[v] = self._value(values.get(x, x) if isinstance(x, Var) else x)
        result = self.same[eqn.outputs[0]]
        if branch is not None and isinstance(result, Var):
            self.branches[result] = branch

    def _value(self, x: Atom) -> Atom:
        return self.same.get(x, x) if isinstance(x, Var) else x

    def _add(self, eqn: Eqn) -> tuple[Var, ...]:
        eqn = replace(eqn, inputs=tuple(map(self._value, eqn.inputs)))
        key = (eqn.op, tuple((type(x), x) for x in eqn.inputs), eqn.params)
        plain = not (eqn.op.effect or eqn.op.python or any(eqn.refs))
        known = self.by_value.get(key) if plain else None
        if known is not None:
            self.same.update(zip(eqn.outputs, known.outputs, strict=True))
            return known.outputs
        if plain:
            self.by_value[key] = eqn
        self.eqns.append(eqn)
        self.producers.update((v, (eqn, i)) for i, v in enumerate(eqn.outputs))
        return eqn.outputs

    def of(self, x: Any, *ops: Any) -> Eqn | None:
        """The equation that makes x, if it is of these operators."""
        eqn = self.producers.get(x, (None, 0))[0] if isinstance(x, Var) else None
        return eqn if eqn is not None and eqn.op in ops else None

    def plain(self, x: Any) -> Any:
        """x without changes of its shape alone."""
        while (eqn := self.of(x, o.reshape)) is not None:
            x = eqn.inputs[0]
        return x

    # -- constants and values

    def constant(self, x: Any) -> torch.Tensor | None:
        """The value of what depends on nothing."""
        return self.evaluated(x, self.constants) if isinstance(x, Var) else None

    def evaluated(self, x: Any, values: Values) -> Any:
        """x for values of some variables, to which what is computed on the way is added; None if it depends on
        others."""
        if not isinstance(x, Var):
            return x
        for eqn in self._needed(x, values) or ():
            outs = eqn.op.kernel(*(values[v] if isinstance(v, Var) else v for v in eqn.inputs), **eqn.params)
            for v, out in zip(eqn.outputs, outs if isinstance(outs, tuple) else (outs,), strict=True):
                values.setdefault(v, out)
        return values.get(x)

    def _needed(self, x: Var, values: Values) -> list[Eqn] | None:
        """The equations that give x for these values, in order; None if there are none."""
        makers: dict[Var, Eqn] = {}
        waiting = [x]
        while waiting:
            v = waiting[-1]
            if v in values or v in makers:
                waiting.pop()
                continue
            eqn = self.producers.get(v, (None, 0))[0]
            if eqn is None or eqn.op is o.const or not _is_known(eqn):
                return None
            missing = [u for u in eqn.vars if u not in values and u not in makers]
            waiting += missing
            if not missing:
                makers.update(dict.fromkeys(eqn.outputs, eqn))
        return [eqn for v, eqn in makers.items() if v is eqn.outputs[0]]

    def again(self, x: Any, values: Values) -> Any:
        """x with some variables replaced by others."""
        if not isinstance(x, Var):
            return x
        waiting = [x]
        while waiting:
            v = waiting[-1]
            eqn, i = self.producers.get(v, (None, 0))
            missing = [u for u in eqn.vars if u not in values] if eqn is not None and v not in values else []
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if v in values:
                continue
            inputs = tuple(values[u] if isinstance(u, Var) else u for u in eqn.inputs) if eqn is not None else ()
            if eqn is None or inputs == eqn.inputs:
                values[v] = v
            else:
                outs = tuple(Var(self.b.name(u.name), u.type) for u in eqn.outputs)
                values[v] = self._add(replace(eqn, inputs=inputs, outputs=outs))[i]
        return values[x]

    def computed(self, place: Var, compute: Callable[[], Any]) -> Any:
        """What a function of operators gives, written where this value is made."""
        with Builder(beside=self.b) as b:
            b.at(self.producers[place][0])
            x = compute()
        for eqn in b.eqns:
            self._add(eqn)
        return self._value(x)

    # -- arms

    def merged(self, lines: set[str]) -> Block:
        """The block with its loops as operators; as it was, where there is none."""
        done = False
        for chain in Arms(self).chains():
            y = self._written(chain)
            if y is not None:
                done, self.same[chain[-1].out] = True, y
                lines.update(arm.source for arm in chain)
        if not done:
            return self.block
        return Block(self.block.inputs, tuple(self._used()), self.outputs)

    def _written(self, chain: list[Arm]) -> Any:
        """The layer that a chain of arms is, or the layers: one for each of their weights (the first choices, the
        second); None where it is none."""
        y = PlacedLayer(self).written(chain) or MaskedLayer(self).written(chain) if len(chain) > 1 else None
        if y is not None or not chain[0].adds:
            return y
        layers: dict[Any, list[Arm]] = {}
        for arm in chain:
            layers.setdefault(arm.weight, []).append(arm)
        before: Any = chain[0].before
        for arms in layers.values() if 1 < len(layers) < len(chain) else ():
            y = before = self._written([replace(arms[0], before=before), *arms[1:]])
            if y is None:
                return None
        return y

    @property
    def outputs(self) -> tuple[Atom, ...]:
        return tuple(self._final(x) for x in self.block.outputs)

    def _final(self, x: Atom) -> Atom:
        while isinstance(x, Var) and x in self.same:
            x = self.same[x]
        return x

    def _used(self) -> Iterator[Eqn]:
        """The equations that outputs and effects need, each behind what it reads, else in the order they had."""
        eqns = [replace(e, inputs=tuple(map(self._final, e.inputs))) for e in self.eqns]
        makers = {v: eqn for eqn in eqns for v in eqn.outputs}
        needed = [v for v in self.outputs if isinstance(v, Var)] + [v for e in eqns if e.op.effect for v in e.outputs]
        alive: set[Var] = set()
        while needed:
            v = needed.pop()
            if v in alive or v not in makers:
                continue
            alive.update(makers[v].outputs)
            needed += makers[v].vars
        done: set[Var] = set()
        for eqn in eqns:
            waiting = [eqn] if eqn.op.effect or any(v in alive for v in eqn.outputs) else []
            while waiting:
                missing = [makers[v] for v in waiting[-1].vars if v in makers and v not in done]
                if missing:
                    waiting.append(missing[0])
                    continue
                ready = waiting.pop()
                if not done.issuperset(ready.outputs) or not ready.outputs:
                    done.update(ready.outputs)
                    yield ready

    def held(self, arm: Arm, values: Values) -> tuple[torch.Tensor, bool] | None:
        """Where an arm's mask may hold for some choices, and whether it does; None where it depends on others, or the
        branch around it asks something else than whether it holds."""
        mask = self.evaluated(arm.keep, values)
        if mask is not None:
            return (mask.reshape(-1) != 0, True) if self._is_taken(arm, mask, values) else None
        known, is_taken = self._known_parts(arm.keep, values), arm.branch is None
        for more in self._with_weights(arm.keep, values):
            mask = self.evaluated(arm.keep, more)
            if mask is not None:
                known, is_taken = mask.reshape(-1) != 0 if known is None else known, self._is_taken(arm, mask, more)
                break
        return (known, False) if known is not None and is_taken else None

    def _known_parts(self, keep: Var, values: Values) -> torch.Tensor | None:
        """Where those masks hold that are known, of the masks that a mask is made of."""
        waiting: list[Any] = [keep]
        known = []
        while waiting:
            part = self.plain(waiting.pop())
            mask, both = self.evaluated(part, values), self.of(part, o.logical_and, o.bitwise_and)
            if mask is not None:
                known.append(mask.reshape(-1))
            elif both is not None and part.dtype == torch.bool:
                waiting += [x for x in both.inputs if isinstance(x, Var) and x.type.numel == part.type.numel]
        return torch.stack(known).all(0) if known else None

    def _with_weights(self, keep: Var, values: Values) -> Iterator[Values]:
        """Choices, and random weights of them."""
        numel = next(iter(values)).type.numel
        for table in self.made_of(keep):
            if table.type.numel == numel and table.dtype.is_floating_point:
                numbers = torch.randn(table.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
                yield {**values, table: numbers.to(table.dtype)}

    def _is_taken(self, arm: Arm, rows: torch.Tensor, values: Values) -> bool:
        """Is its branch taken where an arm has rows, and there alone, for these choices?"""
        if arm.branch is None:
            return True
        test = self.evaluated(arm.branch.test, values)
        return test is not None and (bool(test) == arm.branch.holds) == bool(rows.any())

    def made_of(self, x: Any) -> Iterator[Var]:
        """A value and what it is computed of, nearest first."""
        waiting, seen = [x], set[Any]()
        while waiting:
            v = waiting.pop(0)
            if v in seen or not isinstance(v, Var):
                continue
            seen.add(v)
            yield v
            waiting += self.producers[v][0].vars if v in self.producers else ()

    def bounds(self, x: Var) -> tuple[Any, Any] | None:
        return bounds(x, {v: eqn for v, (eqn, _) in self.producers.items()})

    def is_zero(self, x: Any) -> bool:
        """Zero, or zeros?"""
        full = self.of(self.plain(x), o.full)
        return x == 0 if not isinstance(x, Var) else full is not None and full.inputs[0] == 0

    def added(self, chain: list[Arm], y: Any, counts: Any) -> Any:
        """What a chain of arms gives: what it began with and a layer's result, or that in its place, of tokens that
        count; None: all."""
        shape = tuple(chain[-1].out.shape)
        before, y = chain[0].before, shaped(y, shape)
        before = shaped(before, shape) if isinstance(before, Var) else before
        if not chain[0].adds:
            return y if counts is None else o.where(shaped(counts, (*shape[:-1], 1)), y, before)
        return y if self.is_zero(before) else o.add(before, y)

    @contextlib.contextmanager
    def writing(self, place: Var) -> Iterator[None]:
        """Operators write equations here, where this value is made."""
        with Builder(beside=self.b) as b:
            b.at(self.producers[place][0])
            yield
        self.eqns += b.eqns
        self.producers.update((v, (eqn, i)) for eqn in b.eqns for i, v in enumerate(eqn.outputs))

    def layer(self, mlps: Sequence[Mlp], x: Var, ids: Any, weights: Any, skips: bool, **more: int) -> Any:
        """A layer of these experts, whose weights are put together; `skips`: those without tokens are passed over."""
        if (dropout := mlps[0].dropout) is not None:
            return self._dropped(dropout, [replace(mlp, dropout=None) for mlp in mlps], x, ids, weights, skips, **more)
        one, last = mlps[0], 1 if mlps[0].transposed else 0  # the dim of what a product gives
        op = o.stack
        if skips and self.skips is not None:
            ids, mlps = self.said_to_skip(mlps, ids, self.skips)
            op = o.expert_stack if self.skips is o.choices else o.stack
        stacked = functools.partial(self.stacked, op=op)
        both = lambda parts, dim: parts[0] if len(parts) == 1 else o.cat(*parts, dim=dim)
        bias = lambda pairs: None if pairs[0][0] is None else stacked([both(p, 0) for p in pairs])
        up = stacked([both([w for w, _ in mlp.ups], last) for mlp in mlps])
        up_bias = bias([[c for _, c in mlp.ups] for mlp in mlps])
        down, down_bias = stacked([mlp.down[0] for mlp in mlps]), bias([[mlp.down[1]] for mlp in mlps])
        how: dict[str, Any] = {"gate": one.gate, "form": one.form, **({"transposed": True} if one.transposed else {})}
        rows = shaped(x, (ids.shape[0], x.shape[-1]))
        return o.experts(rows, ids, weights, up, down, up_bias, down_bias, **how, **more)

    def _dropped(
        self, dropout: Eqn, mlps: Sequence[Mlp], x: Var, ids: Any, weights: Any, skips: bool, **more: int
    ) -> Any:
        """A layer that drops elements of what experts give: each choice is a row of its own, with draws of its own."""
        (n, k), width = ids.shape, x.shape[-1]
        rows = o.expand(o.reshape(x, shape=(n, 1, width)), shape=(n, k, width))
        rows = o.reshape(rows, shape=(n * k, width))
        ids, weights = (o.reshape(v, shape=(n * k, 1)) for v in (ids, weights))
        each = o.dropout(self.layer(mlps, rows, ids, weights, skips, **more), *dropout.inputs[1:], **dropout.params)
        return o.sum(o.reshape(each, shape=(n, k, each.shape[-1])), dims=(1,))

    def said_to_skip(self, mlps: Sequence[Mlp], ids: Any, op: Op) -> tuple[Any, Sequence[Mlp]]:
        """Choices and experts, of which those that are not chosen are not read; rows of a tensor are, with others."""
        own = [(e, w) for e, mlp in enumerate(mlps) for w in mlp.weights if self.of(w, o.select) is None]
        if not own:
            return ids, mlps
        new = op(ids, *(w for _, w in own), experts=tuple(e for e, _ in own))
        if op is o.choices:
            return new, mlps
        recorded: list[dict[Var, Var]] = [{} for _ in mlps]
        for (e, w), x in zip(own, new if isinstance(new, tuple) else (new,), strict=True):
            recorded[e][w] = x
        return ids, [mlp.with_weights(values) for mlp, values in zip(mlps, recorded, strict=True)]

    def stacked(self, parts: Sequence[Any], op: Op) -> Any:
        """One tensor of all experts: that of which they are the rows, where there is one."""
        eqns = [self.of(part, o.select) for part in parts]
        places = [(e.inputs[0], e.params["dim"], e.params["index"]) for e in eqns if e is not None]
        whole: Any = places[0][0] if places else None
        if places and whole.shape[0] == len(parts) and places == [(whole, 0, i) for i in range(len(parts))]:
            return whole
        return op(*parts, dim=0)


def _is_known(eqn: Eqn) -> bool:
    """Can it be computed here and now, from its operands?"""
    return not (any(eqn.refs) or eqn.op.effect or eqn.op.python or eqn.op.by_rank)
