"""Loops over experts as people write them, as one operator.

    for e, expert in enumerate(experts):                                    up = stack(up_0, up_1, …)
        token, place = torch.where(ids == e)                         =>     down = stack(down_0, down_1, …)
        y.index_add_(0, token, expert(x[token]) * w[token, place, None])    y = experts(x, ids, w, up, down, gate=…)

What is traced computes all rows for every expert, of which those count that chose it (`rows.py`): for each expert an
arm that adds to y.  An arm is a layer's share if

    its rows         are tokens at places of a mask; with the places that count replaced by all places, which are
                     constants, all arms have the same rows and the same weights: those that differ do not count
    its mask         is `ids == e`, or says less than that (an expert has a capacity), whatever it is made of: computed
                     for ids that are all e, and for random ones
    its expert       is a product, something on elements, a product; in all arms alike
    ids              are from a topk, argmax or max over as many scores as there are arms: no token has an expert twice
    its branch       is taken where its mask holds for a row, and else not (`if len(token)`), where it stands in one:
                     all arms do, or none; experts that are passed over are said to be (`ops/expert_uses.py`)

All else stays as it was traced.  Loops that write where a mask holds are in `expert_masks.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.capture.expert_masks import CHOICES, MaskedLoops
from mycel.capture.expert_mlps import Mlp, weighed_mlp
from mycel.ir import Atom, Block, Builder, Eqn, Op, Program, Var, call, cond, prune, substitute
from mycel.ops import o

SMALL = 40  # equations: an expert has no more
PROBES = 3  # random choices for which a mask is computed


@dataclass(frozen=True)
class OpenBranch:
    """A branch that is open: taken where `test` is what `holds` says, else its result is `other`."""

    test: Atom
    holds: bool
    other: Atom


@dataclass(frozen=True)
class Arm:
    """One expert's share: `out` is `before`, with rows added of which `keep` says which count."""

    out: Var
    before: Var
    keep: Var
    tokens: torch.Tensor  # of all rows
    mlp: Mlp
    weight: Var | None  # None: 1
    adds: bool  # to what is there; else it stands in its place
    source: str  # where its rows are picked
    branch: OpenBranch | None  # that it stands in

    @property
    def expert(self) -> tuple[Any, ...]:
        """What arms of one layer have in common."""
        return *self.mlp.kind, self.weight, self.adds, self.branch is None


@dataclass(frozen=True)
class Routed:
    """What tokens choose, and how rows for all choices lie: a token's behind one another, or `by_choice` all first
    choices first."""

    ids: Var
    tokens: int
    by_choice: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens, self.ids.type.numel // self.tokens

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """A number for each token and choice, in the order of the rows."""
        return (x.T if self.by_choice else x).reshape(-1)

    def in_order(self, x: Var) -> Any:
        """One for each row -> by token and choice."""
        if not self.by_choice:
            return shaped(x, self.shape)
        return o.permute(shaped(x, self.shape[::-1]), dims=(1, 0))

    def rows_in_order(self, x: Var) -> Any:
        """Rows -> a token's choices behind one another."""
        if not self.by_choice:
            return x
        by_choice = o.reshape(x, shape=(*self.shape[::-1], x.shape[-1]))
        return o.permute(by_choice, dims=(1, 0, 2))


def merged_loops(program: Program, differentiated: bool, recorded: bool) -> tuple[Program, set[str]]:
    """The program with its loops over experts as operators, and the lines of these; which experts a loop passes over is
    said in one way where we differentiate, in another where torch records."""
    skips = o.choices if differentiated else o.recorded_if_chosen if recorded else None
    lines: set[str] = set()
    blocks = {}
    for name, block in program.blocks.items():
        adds = any(eqn.op in (o.index_add, o.index_put, o.where, cond) for eqn in block.eqns)
        blocks[name] = Loops.merged_in(block, program.blocks, lines, skips) if adds else block
    return (prune(replace(program, blocks=blocks)), lines) if lines else (program, lines)


class Loops:
    """A block whose equations are numbered by value: what is computed twice is one variable."""

    def __init__(self, block: Block, blocks: Mapping[str, Block], open_branches: bool, skips: Op | None = None) -> None:
        self.block, self.b, self.open_branches, self.skips = block, Builder(), open_branches, skips
        self.branches: dict[Var, OpenBranch] = {}  # by their results
        self.b.reserve(v.name for v in (*block.inputs, *(v for e in block.eqns for v in e.outputs)))
        self.eqns: list[Eqn] = []
        self.same: dict[Atom, Atom] = {}
        self.by_value: dict[Any, Eqn] = {}
        self.producers: dict[Var, tuple[Eqn, int]] = {}
        self.constants: dict[Var, torch.Tensor | None] = {}
        self.choices: dict[Var, list[dict[Var, Any]]] = {}
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
        if not isinstance(x, Var):
            return None
        if x not in self.constants:
            eqn, i = self.producers.get(x, (None, 0))
            self.constants[x] = None
            if eqn is not None and eqn.op is not o.const and _is_known(eqn):
                args = [self.constant(v) if isinstance(v, Var) else v for v in eqn.inputs]
                if all(a is not None or v is None for a, v in zip(args, eqn.inputs, strict=True)):
                    out = eqn.op.kernel(*args, **eqn.params)
                    self.constants[x] = out[i] if isinstance(out, tuple) else out
        return self.constants[x]

    def evaluated(self, x: Any, values: dict[Var, Any]) -> Any:
        """x for values of some variables, to which what is computed on the way is added; None if it depends on
        others."""
        if not isinstance(x, Var):
            return x
        if x not in values:
            eqn, i = self.producers.get(x, (None, 0))
            values[x] = self.constant(x)
            if values[x] is None and eqn is not None and eqn.inputs and _is_known(eqn):
                args = [self.evaluated(v, values) for v in eqn.inputs]
                if all(a is not None or v is None for a, v in zip(args, eqn.inputs, strict=True)):
                    out = eqn.op.kernel(*args, **eqn.params)
                    values[x] = out[i] if isinstance(out, tuple) else out
        return values[x]

    def again(self, x: Any, values: dict[Var, Any]) -> Any:
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
        arms = {arm.out: arm for eqn in list(self.eqns) if (arm := self.arm(eqn)) is not None}
        uses = Counter(v for e in self.eqns for v in set(e.vars)) + Counter(
            v for v in self.outputs if isinstance(v, Var)
        )
        last = {arm.before for arm in arms.values()}
        done = False
        for arm in [a for a in arms.values() if a.out not in last]:
            chain = [arm]
            while chain[0].before in arms:
                chain.insert(0, arms[chain[0].before])
            done |= self._merge(chain, uses, lines)
        done |= MaskedLoops(self).merge(lines)
        if not done:
            return self.block
        return Block(self.block.inputs, tuple(self._used()), self.outputs)

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

    def arm(self, eqn: Eqn) -> Arm | None:
        """An equation that adds an expert's rows."""
        if eqn.op is o.index_add and eqn.params.get("dim") == 0:
            before, index, added = eqn.inputs[:3]
            covered = self.of(added, o.where)
            if covered is None or covered.inputs[2] != 0:
                return None
            return self._arm(eqn.outputs[0], before, index, covered.inputs[0], covered.inputs[1], True)
        put = self.of(eqn.inputs[0], o.index_put) if eqn.op is o.slice and eqn.inputs else None
        padded = self.of(put.inputs[0], o.pad) if put is not None and put.params.get("at") == (0,) else None
        if put is None or padded is None:
            return None
        rows: Any = put.inputs[1]
        where, total = self.of(put.inputs[2], o.where), self.of(self.plain(rows), o.add)
        if where is None:
            return None
        adds = False
        for before, new in (total.inputs, total.inputs[::-1]) if total is not None else ():
            old = self.of(before, o.index)
            if old is None or old.inputs[0] != padded.inputs[0]:
                continue
            if self.plain(old.inputs[1]) != self.plain(where.inputs[1]):
                return None
            rows, adds = new, True
            break
        return self._arm(eqn.outputs[0], padded.inputs[0], where.inputs[1], where.inputs[0], rows, adds)

    def _arm(self, out: Var, before: Any, index: Any, lane: Any, rows: Any, adds: bool) -> Arm | None:
        index, keep = self.plain(index), self.plain(lane)
        columns = self.of(index, o.unbind, o.select)
        chosen = self.of(self.plain(columns.inputs[0] if columns is not None else index), o.where)
        if chosen is None or not isinstance(before, Var) or self.flat(chosen.inputs[0]) != self.flat(keep):
            return None
        places, branch = chosen.inputs[1], self.branches.get(out)
        if self.constant(places) is None or (branch is not None and self.plain(branch.other) != self.plain(before)):
            return None
        values = {chosen.outputs[0]: places}
        tokens = self.constant(self.again(index, values))
        rows = self.plain(self.again(rows, values))
        if tokens is None or out.ndim != 2:
            return None
        weighed = weighed_mlp(self, rows, tokens.numel())
        if weighed is None:
            return None
        flat = self.flat(keep)
        return Arm(out, before, flat, tokens.reshape(-1), *weighed, adds, chosen.source, branch)

    def flat(self, mask: Any) -> Any:
        """A mask without what only tells whether numbers are not zero."""
        mask = self.plain(mask)
        ne = self.of(mask, o.ne)
        return self.plain(ne.inputs[0]) if ne is not None and ne.inputs[1] == 0 else mask

    # -- all of them

    def _merge(self, chain: list[Arm], uses: Counter[Var], lines: set[str]) -> bool:
        """Arms that add to each other -> one operator, where they are a layer of experts."""
        first, last = chain[0], chain[-1]
        is_put = self.producers[last.out][0].op is not o.index_add
        reads = 2 if is_put and last.adds else 1  # y[token] += … reads y as well
        if len(chain) < 2 or any(uses[arm.out] != reads for arm in chain[:-1]):
            return False
        if any(arm.expert != first.expert for arm in chain):
            return False
        tokens = last.out.shape[0]
        routed = self.routed(first, tokens, len(chain))
        if routed is None or first.mlp.x.type.numel != routed.ids.type.numel * first.mlp.x.shape[-1]:
            return False
        masks = [self.mask_of(arm, e, routed, len(chain)) for e, arm in enumerate(chain)]
        all_count = "some" not in masks
        if "" in masks or not (first.adds or (all_count and routed.shape[1] == 1)):  # each row is written once
            return False
        self._write(chain, self.tokens_of(first, tokens), routed, all_count)
        lines.update(arm.source for arm in chain)
        return True

    def routed(self, arm: Arm, tokens: int, experts: int) -> Routed | None:
        """What the first arm's mask compares."""
        waiting, seen = [arm.keep], set[Var]()
        while waiting:
            x = waiting.pop(0)
            if x in seen:
                continue
            seen.add(x)
            if x.dtype == torch.int64 and x.type.numel == len(arm.tokens) and self._is_chosen(x, experts):
                both = (Routed(x, tokens, by_choice) for by_choice in (False, True))
                return next((r for r in both if self.mask_of(arm, 0, r, experts)), None)
            eqn = self.producers.get(x, (None, 0))[0]
            waiting += eqn.vars if eqn is not None else ()
        return None

    def _is_chosen(self, x: Var, experts: int) -> bool:
        """Are these positions of the largest of so many scores?"""
        eqn, i = self.producers.get(self.plain(x), (None, 0))
        if eqn is None or (eqn.op, i) not in CHOICES:
            return False
        scores: Any = eqn.inputs[0]
        return bool(scores.shape[-1] == experts and eqn.params.get("dim") == scores.ndim - 1)

    def mask_of(self, arm: Arm, e: int, routed: Routed, experts: int) -> str:
        """Does an arm's mask say which choices are e ("all"), or which of these count ("some")?  Empty: neither."""
        if not torch.equal(arm.tokens, routed.rows(torch.arange(routed.tokens)[:, None].expand(*routed.shape))):
            return ""
        which = "all"
        ids = [*extreme_choices(tuple(routed.ids.shape), e, experts)]
        for values in [*({routed.ids: x} for x in ids), *self.random_choices(routed.ids, experts)]:
            mask, hit = self.evaluated(arm.keep, values), routed.rows(values[routed.ids].reshape(routed.shape)) == e
            if mask is None or ((counts := mask.reshape(-1) != 0) & ~hit).any() or (hit.any() and not counts.any()):
                return ""
            if not self.is_taken(arm.branch, counts, values):
                return ""
            which = which if torch.equal(counts, hit) else "some"
        return which

    def is_taken(self, branch: OpenBranch | None, rows: torch.Tensor, values: dict[Var, Any]) -> bool:
        """Is a branch taken where there are rows, and there alone, for these choices?"""
        if branch is None:
            return True
        test = self.evaluated(branch.test, values)
        return test is not None and (bool(test) == branch.holds) == bool(rows.any())

    def random_choices(self, ids: Var, experts: int) -> list[dict[Var, Any]]:
        """Values of ids, the same for all arms, which share what is computed of them."""
        if ids not in self.choices:
            g = torch.Generator().manual_seed(0)
            self.choices[ids] = [{ids: torch.randint(experts, tuple(ids.shape), generator=g)} for _ in range(PROBES)]
        return self.choices[ids]

    def tokens_of(self, arm: Arm, tokens: int) -> Var | None:
        """The tokens of which an arm's rows are: all of them, in order."""
        picked = self.of(arm.mlp.x, o.index)
        if picked is None or len(picked.params["at"]) != 1:
            return None
        source: Any = picked.inputs[0]
        at, (dim,) = self.constant(picked.inputs[1]), picked.params["at"]
        if at is None or not torch.equal(at.reshape(-1), arm.tokens) or source.ndim < 2:
            return None
        others = [n for d, n in enumerate(source.shape[:-1]) if d != dim]
        is_all = source.shape[dim] == tokens and all(n == 1 for n in others)
        return source if is_all else None

    def all_weights(self, arm: Arm, routed: Routed) -> Var | None:
        """The weights of which an arm picks each choice's, where it picks all of them in order."""
        picked = self.of(self.plain(arm.weight), o.index)
        weights: Any = self.plain(picked.inputs[0]) if picked is not None else None
        if picked is None or picked.params["at"] != (0, 1) or weights.type.numel != len(arm.tokens):
            return None
        at = [self.constant(x) for x in picked.inputs[1:]]
        wanted = [arm.tokens, routed.rows(torch.arange(routed.shape[1]).expand(*routed.shape))]
        is_all = all(x is not None and torch.equal(x.reshape(-1), y) for x, y in zip(at, wanted, strict=True))
        return weights if is_all else None

    def _write(self, chain: list[Arm], x: Var | None, routed: Routed, all_count: bool) -> None:
        """The operator in the place of the last arm; where experts get more than their tokens (x: None), each choice is
        a row of its own."""
        first, last = chain[0], chain[-1]
        with self.writing(last.out):
            weights = self.weights_of(first, routed)
            ids, more = shaped(routed.ids, routed.shape), {}
            if not all_count:
                ids = o.where(routed.in_order(_any([arm.keep for arm in chain])), ids, len(chain))
                more = {"elsewhere": 1}
            mlps, skips = [arm.mlp for arm in chain], first.branch is not None
            if x is not None:
                y = self.layer(mlps, x, ids, weights, skips, **more)
            else:
                n = routed.ids.type.numel
                rows = routed.rows_in_order(first.mlp.x)
                each = self.layer(mlps, rows, shaped(ids, (n, 1)), shaped(weights, (n, 1)), skips, **more)
                y = o.sum(o.reshape(each, shape=(*routed.shape, each.shape[1])), dims=(1,))
            start = self.of(first.before, o.full)
            is_new = not first.adds or (start is not None and start.inputs[0] == 0)
            y = y if is_new else o.add(first.before, y)
        self.same[last.out] = y

    def weights_of(self, arm: Arm, routed: Routed) -> Any:
        """By token and choice."""
        if arm.weight is None:
            return o.full(1.0, shape=routed.shape, dtype=arm.mlp.x.dtype)
        weights = self.all_weights(arm, routed)
        return routed.in_order(arm.weight) if weights is None else shaped(weights, routed.shape)

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


def extreme_choices(shape: tuple[int, ...], e: int, experts: int) -> Iterator[torch.Tensor]:
    """Choices that are all of expert e, none of them, one alone, and half of them: what asks how many there are differs
    here."""
    yield torch.full(shape, e)
    yield torch.full(shape, (e - 1) % experts)
    alone = torch.full(shape, (e - 1) % experts)
    alone.view(-1)[0] = e
    yield alone
    g = torch.Generator().manual_seed(e)
    yield torch.randint(experts, shape, generator=g).where(torch.rand(shape, generator=g) < 0.5, e)


def shaped(x: Var, shape: tuple[int, ...]) -> Any:
    return x if tuple(x.shape) == shape else o.reshape(x, shape=shape)


def _any(masks: list[Var]) -> Any:
    """Where one of the masks holds, of booleans or numbers."""
    total = None
    for mask in masks:
        holds = mask if mask.dtype == torch.bool else o.ne(mask, 0)
        total = holds if total is None else o.logical_or(total, holds)
    return total


def _is_known(eqn: Eqn) -> bool:
    """Can it be computed here and now, from its operands?"""
    return not (any(eqn.refs) or eqn.op.effect or eqn.op.python or eqn.op.by_rank)
