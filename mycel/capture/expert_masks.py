"""Loops over experts that write where a mask holds, as one operator.

    for e, expert in enumerate(experts):                      up, down = stack(…), stack(…)
        mask = ids[:, j] == e                          =>     y = experts(x, ids, w, up, down, gate=…)
        y[mask] += expert(x[mask]) * w[mask, j, None]

What is traced is `y = where(mask, y + expert(x) * w, y)` for each of them (`rows.py`): an arm.  Rows are tokens, or
tokens and choices.  A mask is computed for some ids; which choices these are that it holds for is one of

    ids[:, j] == e           a choice each; arms of several j are several choices of a layer
    ids.flatten() == e       each token and choice is a row: a layer of one choice
    (ids == e).any(-1)       whichever choice; weights are column e of all weights, or those of the choices, whatever
                             they are picked by: computed for some ids and weights

An arm may stand in a branch that asks whether its mask holds anywhere (`if mask.any()`).  Where arms overwrite rows
(`y[mask] = …`) a row must have one choice, so that one arm writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mycel.capture.expert_mlps import Mlp, weighed_mlp
from mycel.ir import Eqn, Var
from mycel.ops import o

if TYPE_CHECKING:
    from mycel.capture.expert_loops import Loops, OpenBranch

FEW, ROWS = 2, 64  # random choices for which masks are computed, and tokens of these at least
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
        return *self.mlp.kind, self.adds, self.branch is None


@dataclass(frozen=True)
class Choices:
    """Ids of a topk or argmax, `k` for each token, and values of them for which masks are computed: every expert for a
    token, and by expert those that tell which of its choices a mask holds for."""

    ids: Var
    experts: int
    k: int
    every: tuple[dict[Var, Any], ...]
    of: dict[int, list[dict[Var, Any]]]

    @staticmethod
    def probed(ids: Var, experts: int, k: int) -> Choices:
        rows = ids.type.numel // k
        firsts = (torch.arange(i, i + rows) % experts for i in range(0, experts, rows))
        every = tuple({ids: first[:, None].expand(-1, k).reshape(ids.shape)} for first in firsts)
        return Choices(ids, experts, k, every, {})

    @property
    def shape(self) -> tuple[int, int]:
        return self.ids.type.numel // self.k, self.k

    def held(self, ids: torch.Tensor, which: Any, e: int) -> torch.Tensor:
        """Where a mask of this kind holds."""
        hit = ids.reshape(self.shape) == e
        return hit.any(1) if which == ANY else hit.reshape(-1) if which == FLAT else hit[:, which]

    def of_expert(self, e: int) -> list[dict[Var, Any]]:
        """Ids by which kinds of masks of an expert differ: all its own, none, one, and half of them by chance."""
        if e not in self.of:
            self.of[e] = [{self.ids: ids.reshape(self.ids.shape)} for ids in self._of_expert(e)]
        return self.of[e]

    def _of_expert(self, e: int) -> Iterator[torch.Tensor]:
        other, (rows, k) = (e - 1) % self.experts, self.shape
        yield torch.full(self.shape, e)
        yield torch.full(self.shape, other)
        for j in range(k):
            alone = torch.full(self.shape, other)
            alone[0, j] = e
            yield alone
        g = torch.Generator().manual_seed(e)
        for _ in range(FEW + ROWS // rows):
            ids = torch.randint(self.experts, self.shape, generator=g)
            yield ids.where(torch.rand(self.shape, generator=g) < 0.5, e)


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
        weighed = weighed_mlp(self.loops, rows, mask.type.numel)
        if weighed is None:
            return None
        mlp, weight = weighed
        return MaskedArm(out, before, mask, adds, mlp, self.loops.plain(weight), branch, eqn.source)

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
        for x in self._made_of(mask):
            eqn, i = self.loops.producers.get(x, (None, 0))
            if eqn is not None and (eqn.op, i) in CHOICES:
                scores: Any = eqn.inputs[0]
                if eqn.params.get("dim") == scores.ndim - 1:
                    yield Choices.probed(x, scores.shape[-1], x.shape[-1] if eqn.op is o.topk else 1)

    def _kind(self, arm: MaskedArm, choices: Choices) -> tuple[Any, int] | None:
        """Which choices of which expert an arm's mask holds for."""
        (rows, k), size = choices.shape, arm.mask.type.numel
        kinds: list[Any] = [FLAT] if size == rows * k and k > 1 else []
        kinds += [*range(k), *([ANY] if k > 1 else [])] if size == rows else []
        e = self._expert(arm, choices) if kinds else None
        if e is None:
            return None
        for which in kinds:
            if all(self._is_held(arm, which, e, values, choices) for values in choices.of_expert(e)):
                return which, e
        return None

    def _expert(self, arm: MaskedArm, choices: Choices) -> int | None:
        """The expert for whose tokens a mask holds, where each token has one."""
        experts: set[int] = set()
        for values in choices.every:
            mask = self._held(arm, values)
            if mask is None:
                return None
            ids = values[choices.ids].reshape(choices.shape)
            experts.update((ids.reshape(-1) if len(mask) == ids.numel() else ids[:, 0])[mask].tolist())
        return experts.pop() if len(experts) == 1 else None

    def _is_held(self, arm: MaskedArm, which: Any, e: int, values: dict[Var, Any], choices: Choices) -> bool:
        mask = self._held(arm, values)
        return mask is not None and torch.equal(mask, choices.held(values[choices.ids], which, e))

    def _held(self, arm: MaskedArm, values: dict[Var, Any]) -> torch.Tensor | None:
        """An arm's mask for some ids; None where it depends on others, or the branch around it asks something else."""
        mask = self.loops.evaluated(arm.mask, values)
        if mask is None or not self.loops.is_taken(arm.branch, mask, values):
            return None
        flat: torch.Tensor = mask.reshape(-1)
        return flat

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
            if columns[0] != ANY:
                ids = o.reshape(table, shape=(n, 1)) if columns[0] == FLAT else self._columns(table, columns)
            else:
                ids = table
            by_choice = [w() for w in weights if w is not None]
            weight = by_choice[0] if len(by_choice) == 1 else o.cat(*by_choice, dim=1)
            y = loops.layer(mlps, first.mlp.x, ids, weight, first.branch is not None)
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

    def _weights(self, arms: list[MaskedArm], which: Any, choices: Choices) -> Callable[[], Any] | None:
        """What writes the weights of rows, by choice; None: they are none that all experts have in common."""
        weights, rows = [arm.weight for arm in arms], arms[0].mask.type.numel
        if which != ANY:
            if len(set(weights)) > 1:
                return None
            if weights[0] is None:
                return lambda: o.full(1.0, shape=(rows, 1), dtype=arms[0].mlp.x.dtype)
            return lambda: o.reshape(weights[0], shape=(rows, 1))
        table, every = choices.shape, self._every_column(weights, choices)
        if every is not None:
            ids = choices.ids
            return lambda: o.gather(o.reshape(every, shape=(rows, choices.experts)), o.reshape(ids, shape=table), dim=1)
        picked = self._picked_weights(weights, choices)
        return None if picked is None else lambda: o.reshape(picked, shape=table)

    def _every_column(self, weights: list[Var | None], choices: Choices) -> Any:
        """The weights of all experts, of which each arm has its expert's column."""
        picked = [self.loops.of(w, o.select) for w in weights]
        if any(p is None for p in picked):
            return None
        sources = {p.inputs[0] for p in picked if p is not None}
        places = [(p.params["dim"], p.params["index"]) for p in picked if p is not None]
        source: Any = sources.pop()
        fits = not sources and source.shape[-1] == choices.experts
        return source if fits and places == [(source.ndim - 1, e) for e in range(choices.experts)] else None

    def _picked_weights(self, weights: list[Var | None], choices: Choices) -> Var | None:
        """The weights of choices, of which each arm picks those of its expert's, in whatever way."""
        numel = choices.ids.type.numel
        for v in self._made_of(weights[0]):
            is_table = v.type.numel == numel and v.dtype.is_floating_point and v.shape[-1] == choices.k
            if is_table and all(self._picks(w, v, e, choices) for e, w in enumerate(weights)):
                return v
        return None

    def _picks(self, weight: Var | None, table: Var, e: int, choices: Choices) -> bool:
        """Is an arm's weight that of the choice of its expert, for some ids and weights?"""
        g = torch.Generator().manual_seed(e)
        for _ in range(FEW):
            ids = torch.rand(*choices.shape[:1], choices.experts, generator=g).topk(choices.k)[1]
            numbers = torch.rand(choices.shape, generator=g, dtype=torch.float64).to(table.dtype)
            values = {choices.ids: ids.reshape(choices.ids.shape), table: numbers.reshape(table.shape)}
            got, hit = self.loops.evaluated(weight, values), ids == e
            if got is None or not torch.equal(got.reshape(-1)[hit.any(1)], numbers[hit]):
                return False
        return True

    def _made_of(self, x: Var | None) -> Iterator[Var]:
        """A value and what it is computed of, nearest first."""
        waiting, seen = [x], set[Var | None]()
        while waiting:
            v = waiting.pop(0)
            if v is None or v in seen:
                continue
            seen.add(v)
            yield v
            waiting += self.loops.producers[v][0].vars if v in self.loops.producers else ()
