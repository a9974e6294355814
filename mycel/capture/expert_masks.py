"""A layer of experts whose arms have a row for each token.

    for e, expert in enumerate(experts):                      up, down = stack(…), stack(…)
        mask = ids[:, j] == e                          =>     y = experts(x, ids, w, up, down, gate=…)
        y[mask] += expert(x[mask]) * w[mask, j, None]

A mask is computed for some ids; which choices these are that it holds for, all of them or some, is one of

    ids[:, j] == e           a choice each; arms of several j are several choices of a layer
    (ids == e).any(-1)       whichever choice; weights are column e of all weights, or those of the choices, whatever
                             they are picked by: computed for some ids and weights

Ids are positions of the largest of some scores, so that a token has no expert twice; a token's one id may come from
anywhere (the batch, a hash), also beyond the experts.  Where arms overwrite rows (`y[mask] = …`) a row must have one
choice, so that one arm writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mycel.capture.expert_arms import Arm
from mycel.ir import Var
from mycel.ops import o

if TYPE_CHECKING:
    from mycel.capture.expert_loops import Loops

FEW, ROWS = 2, 64  # random choices for which masks are computed, and tokens of these at least
CHOICES = ((o.topk, 1), (o.sort, 1), (o.argmax, 0), (o.max_dim, 1))  # which result of which operator says who is chosen
ANY = "any"  # of choices; or the number of the choice that is compared


def chosen_among(loops: Loops, ids: Any) -> int | None:
    """Among how many scores these are positions of some of the largest, none of which a token has twice."""
    ids = loops.plain(ids)
    few = loops.of(ids, o.slice)
    if few is not None and few.params["dim"] == ids.ndim - 1:
        ids = few.inputs[0]
    eqn, i = loops.producers.get(ids, (None, 0))
    if eqn is None or (eqn.op, i) not in CHOICES:
        return None
    scores: Any = eqn.inputs[0]
    return scores.shape[-1] if eqn.params.get("dim") == scores.ndim - 1 else None


@dataclass(frozen=True)
class Choices:
    """Ids, `k` for each token, and values of them for which masks are computed: every expert for a token, and by expert
    those that tell which of its choices a mask holds for.  `are_there`: none of them is beyond the experts."""

    ids: Var
    experts: int
    k: int
    are_there: bool
    every: tuple[dict[Var, Any], ...]
    of: dict[int, list[dict[Var, Any]]]

    @staticmethod
    def probed(ids: Var, experts: int, k: int, are_there: bool = True) -> Choices:
        firsts = every_expert(ids.type.numel // k, experts)
        every = tuple({ids: first[:, None].expand(-1, k).reshape(ids.shape)} for first in firsts)
        return Choices(ids, experts, k, are_there, every, {})

    @property
    def shape(self) -> tuple[int, int]:
        return self.ids.type.numel // self.k, self.k

    def held(self, ids: torch.Tensor, which: Any, e: int) -> torch.Tensor:
        """Where a mask of this kind holds."""
        hit = ids.reshape(self.shape) == e
        return hit.any(1) if which == ANY else hit[:, which]

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
        if not self.are_there:
            yield beyond(self.shape, e, self.experts)


class MaskedLayer:
    def __init__(self, loops: Loops) -> None:
        self.loops = loops

    def written(self, chain: list[Arm]) -> Any:
        """The layer that a chain of arms is, in the place of the last one; None where it is none."""
        if not all(arm.of_all_tokens for arm in chain):
            return None
        for choices in self._choices(chain[0].keep, len(chain)):
            kinds = [self._kind(arm, choices) for arm in chain]
            arms = {(kind[0], kind[1]): arm for kind, arm in zip(kinds, chain, strict=True) if kind is not None}
            columns = list(dict.fromkeys(which for which, _ in arms))
            whole = {(which, e) for which in columns for e in range(choices.experts)}
            if len(arms) < len(chain) or set(arms) != whole or (len(columns) > 1 and ANY in columns):
                continue
            if not chain[0].adds and (len(columns) > 1 or choices.k > 1 and columns[0] == ANY):
                continue  # a row would have several that write it
            mlps = [[arms[which, e].mlp for e in range(choices.experts)] for which in columns]
            if any(row != mlps[0] for row in mlps):
                continue
            all_count = choices.are_there and all(
                kind[2] or arm.keep == arm.weight for kind, arm in zip(kinds, chain, strict=True) if kind
            )
            y = self._write(chain, arms, columns, choices, all_count)
            if y is not None:
                return y
        return None

    # -- what masks hold for

    def _choices(self, mask: Var, arms: int) -> Iterator[Choices]:
        """The choices that a mask is made of, of one of so many arms."""
        for x in self.loops.made_of(mask):
            experts = chosen_among(self.loops, x) if x.dtype == torch.int64 else None
            k = x.type.numel // mask.type.numel
            if experts is not None and k * mask.type.numel == x.type.numel:
                yield Choices.probed(x, experts, k)
            elif experts is None and x.dtype == torch.int64 and x.type.numel == mask.type.numel:
                yield Choices.probed(x, arms, 1, are_there(self.loops, x, arms))

    def _kind(self, arm: Arm, choices: Choices) -> tuple[Any, int, bool] | None:
        """Which choices of which expert an arm's mask holds for, and whether for all of them."""
        e = self._expert(arm, choices) if arm.keep.type.numel == choices.shape[0] else None
        if e is None:
            return None
        values = choices.of_expert(e)
        masks = [self.loops.held(arm, v) for v in values]
        is_held = [(held, v[choices.ids]) for held, v in zip(masks, values, strict=True) if held is not None]
        if len(is_held) < len(masks):
            return None
        kinds: list[Any] = [ANY] if choices.k == 1 else [*range(choices.k), ANY]
        for which in kinds:
            if all(torch.equal(held[0], choices.held(ids, which, e)) for held, ids in is_held):
                return which, e, all(held[1] for held, _ in is_held)
        for which in kinds:
            if not any((held[0] & ~choices.held(ids, which, e)).any() for held, ids in is_held):
                return which, e, False
        return None

    def _expert(self, arm: Arm, choices: Choices) -> int | None:
        """The expert for whose tokens a mask holds, where each token has one."""
        experts: set[int] = set()
        for values in choices.every:
            held = self.loops.held(arm, values)
            if held is None:
                return None
            experts.update(values[choices.ids].reshape(choices.shape)[:, 0][held[0]].tolist())
        return experts.pop() if len(experts) == 1 else None

    # -- the operator

    def _write(
        self, chain: list[Arm], arms: dict[Any, Arm], columns: list[Any], choices: Choices, all_count: bool
    ) -> Any:
        """The layer in the place of the last arm; None where its weights do not fit."""
        first, last, n = chain[0], chain[-1], chain[0].keep.type.numel
        of = {which: [arms[which, e] for e in range(choices.experts)] for which in columns}
        weights = [self._weights(of[which], which, choices) for which in columns]
        if any(w is None for w in weights) or first.mlp.x.type.numel != n * first.mlp.x.shape[-1]:
            return None
        loops, mlps = self.loops, [arm.mlp for arm in of[columns[0]]]
        with loops.writing(last.out):
            table = o.reshape(choices.ids, shape=choices.shape)
            ids = table if columns[0] == ANY else self._columns(table, columns)
            counts = None if all_count else self._counting(of, ids)
            more = {} if all_count else {"elsewhere": 1}
            ids = ids if counts is None else o.where(counts, ids, choices.experts)
            by_choice = [w() for w in weights if w is not None]
            weight = by_choice[0] if len(by_choice) == 1 else o.cat(*by_choice, dim=1)
            y = loops.layer(mlps, first.mlp.x, ids, weight, first.branch is not None, **more)
            return loops.added(chain, y, counts)

    def _counting(self, of: dict[Any, list[Arm]], ids: Any) -> Any:
        """Which choices count, of those that masks may hold for."""
        if ANY in of:
            of = {e: [arm] for e, arm in enumerate(of[ANY])}
            return o.gather(self._counting(of, ids), ids, dim=1)
        return o.stack(*(shaped(any_of([arm.keep for arm in arms]), ids.shape[:1]) for arms in of.values()), dim=1)

    def _columns(self, table: Any, columns: list[int]) -> Any:
        """Some choices of each token, in their order in the loop."""
        if columns == list(range(table.shape[1])):
            return table
        parts = [o.slice(table, dim=1, start=j, stop=j + 1) for j in columns]
        return parts[0] if len(parts) == 1 else o.cat(*parts, dim=1)

    def _weights(self, arms: list[Arm], which: Any, choices: Choices) -> Callable[[], Any] | None:
        """What writes the weights of rows, by choice; None: they are none that all experts have in common."""
        weights, shape = [arm.weight for arm in arms], (choices.shape[0], choices.k if which == ANY else 1)
        if len(set(weights)) == 1:
            each = weights[0]
            if each is None:
                return lambda: o.full(1.0, shape=shape, dtype=arms[0].mlp.x.dtype)
            return lambda: o.expand(o.reshape(each, shape=(shape[0], 1)), shape=shape)
        every = self._every_column(weights, choices) if which == ANY else None
        if every is not None:
            scores = (shape[0], choices.experts)
            return lambda: o.gather(o.reshape(every, shape=scores), o.reshape(choices.ids, shape=shape), dim=1)
        picked = self._picked_weights(weights, which, choices)
        return None if picked is None else lambda: o.reshape(picked, shape=shape)

    def _every_column(self, weights: list[Var | None], choices: Choices) -> Any:
        """The weights of all experts, of which each arm has its expert's column."""
        picked = [self.loops.of(w, o.select, o.slice) for w in weights]
        if any(p is None for p in picked):
            return None
        sources = {p.inputs[0] for p in picked if p is not None}
        places = [(p.params["dim"], p.params.get("index", p.params.get("start"))) for p in picked if p is not None]
        source: Any = sources.pop()
        fits = not sources and source.shape[-1] == choices.experts
        return source if fits and places == [(source.ndim - 1, e) for e in range(choices.experts)] else None

    def _picked_weights(self, weights: list[Var | None], which: Any, choices: Choices) -> Var | None:
        """The weights of choices, or of one choice, of which each arm picks those of its expert's, in whatever way."""
        numel = choices.ids.type.numel if which == ANY else choices.shape[0]
        for v in self.loops.made_of(weights[0]):
            is_table = (
                v.type.numel == numel and v.dtype.is_floating_point and (which != ANY or v.shape[-1] == choices.k)
            )
            if is_table and all(self._picks(w, v, e, which, choices) for e, w in enumerate(weights)):
                return v
        return None

    def _picks(self, weight: Var | None, table: Var, e: int, which: Any, choices: Choices) -> bool:
        """Is an arm's weight that of the choice of its expert, for some ids and weights?"""
        g = torch.Generator().manual_seed(e)
        for _ in range(FEW):
            ids = torch.rand(*choices.shape[:1], choices.experts, generator=g).topk(choices.k)[1]
            hit = ids == e if which == ANY else ids[:, which, None] == e
            numbers = torch.rand(hit.shape, generator=g, dtype=torch.float64).to(table.dtype)
            values = {choices.ids: ids.reshape(choices.ids.shape), table: numbers.reshape(table.shape)}
            got = self.loops.evaluated(weight, values)
            if got is None or not torch.equal(got.reshape(-1)[hit.any(1)], numbers[hit]):
                return False
        return True


def every_expert(tokens: int, experts: int) -> Iterator[torch.Tensor]:
    """Choices of so many tokens, one each, until every expert was chosen."""
    for i in range(0, experts, tokens):
        yield torch.arange(i, i + tokens) % experts


def are_there(loops: Loops, ids: Var, experts: int) -> bool:
    """Is none of these beyond the experts?"""
    known = loops.bounds(ids)
    return known is not None and 0 <= known[0] <= known[1] < experts


def beyond(shape: Sequence[int], e: int, experts: int) -> torch.Tensor:
    """Choices of expert e, and of none that there is: a mask that is made of a remainder holds for more than e."""
    g = torch.Generator().manual_seed(e)
    far = torch.tensor([e, e + experts, e - experts, -1, experts, e * experts])
    return far[torch.randint(len(far), tuple(shape), generator=g)]


def any_of(masks: Sequence[Var]) -> Any:
    """Where one of the masks holds, of booleans or numbers."""
    total = None
    for mask in masks:
        holds = mask if mask.dtype == torch.bool else o.ne(mask, 0)
        total = holds if total is None else o.logical_or(total, holds)
    return total


def shaped(x: Var, shape: Sequence[int]) -> Any:
    return x if tuple(x.shape) == tuple(shape) else o.reshape(x, shape=tuple(shape))
