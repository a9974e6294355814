"""Loops over experts that write where a mask holds, as one operator.

    for e, expert in enumerate(experts):                      up, down = stack(…), stack(…)
        mask = ids[:, j] == e                          =>     y = experts(x, ids, w, up, down, gate=…)
        y[mask] += expert(x[mask]) * w[mask, j, None]

What is traced is `y = where(mask, y + expert(x) * w, y)` for each of them (`rows.py`): an arm.  Rows are tokens, or
tokens and choices.  A mask is computed for some ids; which choices these are that it holds for is one of

    ids[:, j] == e           a choice each; arms of several j are several choices of a layer
    ids.flatten() == e       each token and choice is a row: a layer of one choice
    (ids == e).any(-1)       whichever choice; weights are column e of all weights

An arm may stand in a branch that asks whether its mask holds anywhere (`if mask.any()`).  Where arms overwrite rows
(`y[mask] = …`) a row must have one choice, so that one arm writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mycel.capture.expert_mlps import Mlp, mlp_of
from mycel.ir import Eqn, Var
from mycel.ops import o

if TYPE_CHECKING:
    from mycel.capture.expert_loops import Loops, OpenBranch

PROBES, FEW, MANY = 8, 2, 4096  # random choices for which masks are computed: fewer, where each is of many tokens
CHOICES = ((o.topk, 1), (o.argmax, 0), (o.max_dim, 1))  # which result of which operator says who is chosen
ANY, FLAT = "any", "flat"  # of choices; or the number of the choice that is compared


@dataclass(frozen=True)
class MaskedArm:
    """One expert's share: `out` is `before`, where `mask` holds with the expert's rows added, or instead."""

    out: Var
    before: Var
    mask: Var
    adds: bool
    mlp: Mlp
    weight: Var | None
    branch: OpenBranch | None  # that it stands in
    source: str

    @property
    def expert(self) -> tuple[Any, ...]:
        """What arms of one layer have in common."""
        return *self.mlp.kind, self.adds


@dataclass(frozen=True)
class Choices:
    """Ids of a topk or argmax, `k` for each token, and values of them for which masks are computed: by chance, and one
    expert for all."""

    ids: Var
    experts: int
    k: int
    probes: tuple[dict[Var, Any], ...]
    all_to: tuple[dict[Var, Any], ...]

    @property
    def shape(self) -> tuple[int, int]:
        return self.ids.type.numel // self.k, self.k

    def held(self, ids: torch.Tensor, which: Any, e: int) -> torch.Tensor:
        """Where a mask of this kind holds."""
        hit = ids.reshape(self.shape) == e
        return hit.any(1) if which == ANY else hit.reshape(-1) if which == FLAT else hit[:, which]


class MaskedLoops:
    """The arms of a block, and what they come to."""

    def __init__(self, loops: Loops) -> None:
        self.loops = loops
        self.chosen: dict[Var, dict[Var, Any]] = {}  # by mask: chosen rows -> all rows
        for eqn in loops.eqns:
            other = loops.of(eqn.inputs[2], o.where) if eqn.op is o.where else None
            if other is not None and loops.of(other.inputs[0], o.any) is not None:
                self.chosen.setdefault(loops.plain(eqn.inputs[0]), {})[eqn.outputs[0]] = eqn.inputs[1]

    def merge(self, lines: set[str]) -> bool:
        """Writes an operator for each loop; were there any?"""
        arms = {arm.out: arm for eqn in list(self.loops.eqns) if (arm := self._arm(eqn)) is not None}
        inner, done = {arm.before for arm in arms.values()}, False
        for arm in [a for a in arms.values() if a.out not in inner]:
            chain = [arm]
            while chain[0].before in arms:
                chain.insert(0, arms[chain[0].before])
            y = self._merged(chain)
            if y is not None:
                done, self.loops.same[arm.out] = True, y
                lines.update(a.source for a in chain)
        return done

    def _arm(self, eqn: Eqn) -> MaskedArm | None:
        mask = self.loops.plain(eqn.inputs[0]) if eqn.op is o.where else None
        if mask not in self.chosen or eqn.outputs[0] in self.chosen[mask] or not isinstance(eqn.inputs[2], Var):
            return None
        out, before = eqn.outputs[0], eqn.inputs[2]
        branch = self.loops.branches.get(out)
        if branch is not None and self.loops.plain(branch.other) != self.loops.plain(before):
            return None
        rows = self.loops.plain(eqn.inputs[1])
        total, adds = self.loops.of(rows, o.add), False
        for old, new in (total.inputs, total.inputs[::-1]) if total is not None else ():
            if self.loops.plain(self.chosen[mask].get(self.loops.plain(old))) == self.loops.plain(before):
                rows, adds = self.loops.plain(new), True
        rows = self.loops.plain(self.loops.again(rows, dict(self.chosen[mask])))
        product = self.loops.of(rows, o.mul)
        pairs = [*((product.inputs, product.inputs[::-1]) if product is not None else ()), (rows, None)]
        for y, weight in pairs:
            mlp = mlp_of(self.loops, y)
            weight = self.loops.plain(weight)
            if mlp is not None and (
                weight is None or (isinstance(weight, Var) and weight.type.numel == mask.type.numel)
            ):
                return MaskedArm(out, before, mask, adds, mlp, weight, branch, eqn.source)
        return None

    # -- what masks hold for

    def _merged(self, chain: list[MaskedArm]) -> Any:
        """The layer that a chain of arms is; None where it is none."""
        first = chain[0]
        if len(chain) < 2 or any(arm.expert != first.expert for arm in chain):
            return None
        for choices in self._choices(first.mask):
            arms = {kind: arm for arm in chain if (kind := self._kind(arm, choices)) is not None}
            columns = list(dict.fromkeys(which for which, _ in arms))
            whole = {(which, e) for which in columns for e in range(choices.experts)}
            if len(arms) < len(chain) or set(arms) != whole or (len(columns) > 1 and {ANY, FLAT} & set(columns)):
                continue
            if not first.adds and (len(columns) > 1 or columns[0] == ANY):  # a row would have several that write it
                continue
            mlps = [[arms[which, e].mlp for e in range(choices.experts)] for which in columns]
            if any(row != mlps[0] for row in mlps):
                continue
            y = self._written(chain, arms, columns, choices)
            if y is not None:
                return y
        return None

    def _choices(self, mask: Var) -> Iterator[Choices]:
        """The choices that a mask is made of."""
        waiting, seen = [mask], set[Var]()
        while waiting:
            x = waiting.pop(0)
            if x in seen:
                continue
            seen.add(x)
            eqn, i = self.loops.producers.get(x, (None, 0))
            if eqn is not None and (eqn.op, i) in CHOICES:
                scores: Any = eqn.inputs[0]
                if eqn.params.get("dim") == scores.ndim - 1:
                    yield self._probed(x, scores.shape[-1], x.shape[-1] if eqn.op is o.topk else 1)
            waiting += eqn.vars if eqn is not None else ()

    def _probed(self, ids: Var, experts: int, k: int) -> Choices:
        g, shape = torch.Generator().manual_seed(0), tuple(ids.shape)
        count = PROBES if ids.type.numel < MANY else FEW
        probes = tuple({ids: torch.randint(experts, shape, generator=g)} for _ in range(count))
        return Choices(ids, experts, k, probes, tuple({ids: torch.full(shape, e)} for e in range(experts)))

    def _kind(self, arm: MaskedArm, choices: Choices) -> tuple[Any, int] | None:
        """Which choices of which expert an arm's mask holds for."""
        masks = [mask for values in choices.probes if (mask := self._held(arm, values)) is not None]
        given = [values[choices.ids] for values in choices.probes]
        if len(masks) < len(given):
            return None
        rows, k = choices.shape
        kinds: list[Any] = [FLAT] if arm.mask.type.numel == rows * k and k > 1 else []
        kinds += [*range(k), *([ANY] if k > 1 else [])] if arm.mask.type.numel == rows else []
        for which in kinds:
            e = self._expert(masks, given, which, choices)
            if e is None or not all(
                torch.equal(mask, choices.held(ids, which, e)) for mask, ids in zip(masks, given, strict=True)
            ):
                continue
            all_and_none = (choices.all_to[e], choices.all_to[e - 1])
            held = [self._held(arm, values) for values in all_and_none]
            if all(x is not None and bool(x.all() if i == 0 else not x.any()) for i, x in enumerate(held)):
                return (which, e) if self._holds_for_one(arm, which, e, choices) else None
        return None

    def _holds_for_one(self, arm: MaskedArm, which: Any, e: int, choices: Choices) -> bool:
        """Is it the same where a single token chooses the expert?  A branch may ask for more."""
        alone = torch.full(choices.shape, (e - 1) % choices.experts)
        alone[0, which if isinstance(which, int) else 0] = e
        held = self._held(arm, {choices.ids: alone.reshape(tuple(choices.ids.shape))})
        return held is not None and torch.equal(held, choices.held(alone, which, e))

    def _held(self, arm: MaskedArm, values: dict[Var, Any]) -> torch.Tensor | None:
        """An arm's mask for some ids; None where it depends on others, or the branch around it asks something else."""
        mask = self.loops.evaluated(arm.mask, values)
        if mask is None or not self.loops.is_taken(arm.branch, mask, values):
            return None
        flat: torch.Tensor = mask.reshape(-1)
        return flat

    def _expert(self, masks: list[Any], given: list[Any], which: Any, choices: Choices) -> int | None:
        """The expert that is common to all rows for which a mask of this kind holds."""
        common: set[int] | None = None
        for mask, ids in zip(masks, given, strict=True):
            table = ids.reshape(-1, 1) if which == FLAT else ids.reshape(choices.shape)
            held = table[mask] if which in (ANY, FLAT) else table[mask][:, [which]]
            for row in held[:2].tolist():
                common = set(row) if common is None else common & set(row)
        return common.pop() if common is not None and len(common) == 1 else None

    # -- the operator

    def _written(self, chain: list[MaskedArm], arms: dict[Any, MaskedArm], columns: list[Any], choices: Choices) -> Any:
        """The layer in the place of the last arm; None where its weights do not fit."""
        first, last, n = chain[0], chain[-1], chain[0].mask.type.numel
        weights = [self._weights([arms[which, e] for e in range(choices.experts)], which, choices) for which in columns]
        if any(w is None for w in weights) or first.mlp.x.type.numel != n * first.mlp.x.shape[-1]:
            return None
        loops, mlps = self.loops, [arms[columns[0], e].mlp for e in range(choices.experts)]
        with loops.writing(last.out):
            table = o.reshape(choices.ids, shape=choices.shape)
            if columns[0] == ANY:
                ids = table
                by_choice = [o.gather(o.reshape(weights[0], shape=(n, choices.experts)), table, dim=1)]
            else:
                flat = lambda x: o.reshape(x, shape=(n, 1))
                ids = flat(table) if columns[0] == FLAT else self._columns(table, columns)
                ones = lambda: o.full(1.0, shape=(n, 1), dtype=first.mlp.x.dtype)
                by_choice = [ones() if w == 1 else flat(w) for w in weights]
            weight = by_choice[0] if len(by_choice) == 1 else o.cat(*by_choice, dim=1)
            y = loops.layer(mlps, first.mlp.x, ids, weight)
            y = y if tuple(y.shape) == tuple(last.out.shape) else o.reshape(y, shape=tuple(last.out.shape))
            start = loops.of(first.before, o.full)
            is_new = not first.adds or (start is not None and start.inputs[0] == 0)
            return y if is_new else o.add(first.before, y)

    def _columns(self, table: Any, columns: list[int]) -> Any:
        """Some choices of each token, in their order in the loop."""
        if columns == list(range(table.shape[1])):
            return table
        parts = [o.slice(table, dim=1, start=j, stop=j + 1) for j in columns]
        return parts[0] if len(parts) == 1 else o.cat(*parts, dim=1)

    def _weights(self, arms: list[MaskedArm], which: Any, choices: Choices) -> Any:
        """The weight of each row, the same for all experts: a Var, 1 where there is none; of ANY choice all weights, of
        which an arm has its expert's column.  None: it is neither."""
        weights = [arm.weight for arm in arms]
        if which != ANY:
            return (1 if weights[0] is None else weights[0]) if len(set(weights)) == 1 else None
        picked = [self.loops.of(w, o.select) for w in weights]
        if any(p is None for p in picked):
            return None
        sources = {p.inputs[0] for p in picked if p is not None}
        places = [(p.params["dim"], p.params["index"]) for p in picked if p is not None]
        source: Any = sources.pop()
        fits = not sources and source.shape[-1] == choices.experts
        return source if fits and places == [(source.ndim - 1, e) for e in range(choices.experts)] else None
