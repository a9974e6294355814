"""A layer of experts whose arms have a row for each token and choice.

    for e, expert in enumerate(experts):
        token, place = torch.where(ids == e)
        y.index_add_(0, token, expert(x[token]) * w[token, place, None])

The arms are a layer if

    their rows       are all tokens at all places, in one order
    their masks      are `ids == e`, or say less than that (an expert has a capacity), whatever they are made of:
                     computed for ids that are all e, and for random ones, which tells e, too: arms come in any order
    their experts    are a product, something on elements, a product; in all arms alike, and so are weights of rows
    ids              where rows are put, not added: from a topk, argmax or max, so that no token has an expert twice
    their branches   are taken where their masks hold for a row, and else not (`if len(token)`), where they stand in
                     one: all arms do, or none; experts that are passed over are said to be (`ops/expert_uses.py`)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mycel.capture.expert_arms import Arm, all_rows
from mycel.capture.expert_masks import any_of, are_there, beyond, chosen_among, every_expert, shaped
from mycel.ir import Var
from mycel.ops import o

if TYPE_CHECKING:
    from mycel.capture.expert_loops import Loops

PROBES = 3  # random choices for which a mask is computed


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


class PlacedLayer:
    def __init__(self, loops: Loops) -> None:
        self.loops = loops
        self.choices: dict[Var, list[dict[Var, Any]]] = {}
        self.every: dict[Var, list[dict[Var, Any]]] = {}

    def written(self, chain: list[Arm]) -> Any:
        """The layer that a chain of arms is, in the place of the last one; None where it is none."""
        first, last = chain[0], chain[-1]
        if any(arm.weight != first.weight or not torch.equal(arm.tokens, first.tokens) for arm in chain):
            return None
        for routed in self._routed(first, last.out.type.numel // last.out.shape[-1]):
            arms = self._by_expert(chain, routed)
            if arms is not None and first.mlp.x.type.numel == routed.ids.type.numel * first.mlp.x.shape[-1]:
                return self._write(chain, *arms, routed)
        return None

    def _routed(self, arm: Arm, tokens: int) -> Iterator[Routed]:
        """What an arm's mask may compare."""
        for x in self.loops.made_of(arm.keep):
            if x.dtype == torch.int64 and x.type.numel == len(arm.tokens):
                for by_choice in (False, True):
                    routed = Routed(x, tokens, by_choice)
                    numbers = routed.rows(torch.arange(tokens)[:, None].expand(*routed.shape))
                    if torch.equal(arm.tokens, numbers):
                        yield routed

    def _by_expert(self, chain: list[Arm], routed: Routed) -> tuple[dict[int, Arm], bool] | None:
        """Arms by their experts, and whether all choices count; None where they are no layer."""
        known = chosen_among(self.loops, routed.ids)
        experts = len(chain) if known is None else known
        numbers = [self._expert(arm, routed, experts) for arm in chain]
        of = {e: arm for e, arm in zip(numbers, chain, strict=True) if e is not None}
        if len(of) < len(chain):
            return None
        of = dict(sorted(of.items()))
        masks = [self._mask_of(arm, e, routed, experts) for e, arm in of.items()]
        all_count = "some" not in masks and len(of) == experts and are_there(self.loops, routed.ids, experts)
        if "" in masks or (chain[0].is_put and routed.shape[1] > 1 and known is None):
            return None
        return (of, all_count) if chain[0].adds or routed.shape[1] == 1 else None  # each row is written once

    def _expert(self, arm: Arm, routed: Routed, experts: int) -> int | None:
        """The expert for whose choices an arm's mask may hold."""
        numbers: set[int] = set()
        for values in self._every_choice(routed.ids, experts):
            held = self.loops.held(arm, values)
            if held is None:
                return None
            numbers.update(routed.rows(values[routed.ids].reshape(routed.shape))[held[0]].tolist())
        return numbers.pop() if len(numbers) == 1 else None

    def _mask_of(self, arm: Arm, e: int, routed: Routed, experts: int) -> str:
        """Does an arm's mask say which choices are e ("all"), or which of these count ("some")?  Empty: neither."""
        which = "all"
        ids = [*extreme_choices(tuple(routed.ids.shape), e, experts)]
        ids += [] if are_there(self.loops, routed.ids, experts) else [beyond(routed.ids.shape, e, experts)]
        for values in [*({routed.ids: x} for x in ids), *self._random_choices(routed.ids, experts)]:
            held, hit = self.loops.held(arm, values), routed.rows(values[routed.ids].reshape(routed.shape)) == e
            if held is None or (held[0] & ~hit).any() or (held[1] and hit.any() and not held[0].any()):
                return ""
            which = which if held[1] and torch.equal(held[0], hit) else "some"
        return which

    def _every_choice(self, ids: Var, experts: int) -> list[dict[Var, Any]]:
        """Values of ids, the same for all arms, with every expert among them."""
        if ids not in self.every:
            self.every[ids] = [{ids: x.reshape(ids.shape)} for x in every_expert(ids.type.numel, experts)]
        return self.every[ids]

    def _random_choices(self, ids: Var, experts: int) -> list[dict[Var, Any]]:
        """Values of ids, the same for all arms, which share what is computed of them."""
        if ids not in self.choices:
            g = torch.Generator().manual_seed(0)
            self.choices[ids] = [{ids: torch.randint(experts, tuple(ids.shape), generator=g)} for _ in range(PROBES)]
        return self.choices[ids]

    def _all_weights(self, arm: Arm, routed: Routed) -> Var | None:
        """The weights of which an arm picks each choice's, where it picks all of them in order."""
        order = torch.arange(routed.ids.type.numel).reshape(routed.shape)
        every = all_rows(self.loops, self.loops.plain(arm.weight), routed.rows(order))
        return self.loops.plain(every) if every is not None else None

    def _write(self, chain: list[Arm], arms: dict[int, Arm], all_count: bool, routed: Routed) -> Any:
        """The operator in the place of the last arm; where experts get more than their tokens, each choice is a row of
        its own."""
        loops, first, last = self.loops, chain[0], chain[-1]
        x = all_rows(loops, first.mlp.x, first.tokens, first.mlp.x.shape[-1]) if not first.of_all_tokens else None
        x = first.mlp.x if routed.shape[1] == 1 and first.of_all_tokens else x
        with loops.writing(last.out):
            weights = self._weights_of(first, routed)
            counts = None if all_count else routed.in_order(any_of([arm.keep for arm in chain]))
            ids = shaped(routed.ids, routed.shape) if counts is None else self._counting(arms, counts, routed)
            more = {} if all_count else {"elsewhere": 1}
            mlps, skips = [arm.mlp for arm in arms.values()], first.branch is not None
            if x is not None:
                y = loops.layer(mlps, x, ids, weights, skips, **more)
            else:
                n = routed.ids.type.numel
                rows = routed.rows_in_order(first.mlp.x)
                each = loops.layer(mlps, rows, shaped(ids, (n, 1)), shaped(weights, (n, 1)), skips, **more)
                y = o.sum(o.reshape(each, shape=(*routed.shape, each.shape[1])), dims=(1,))
            return loops.added(chain, y, counts)

    def _counting(self, arms: dict[int, Arm], counts: Any, routed: Routed) -> Any:
        """Choices that count, numbered through these experts; others are of one that is nowhere."""
        if [*arms] == [*range(len(arms))]:
            return o.where(counts, shaped(routed.ids, routed.shape), len(arms))
        ids: Any = o.full(len(arms), shape=routed.shape, dtype=torch.int64)
        for i, arm in enumerate(arms.values()):
            ids = o.where(routed.in_order(any_of([arm.keep])), i, ids)
        return ids

    def _weights_of(self, arm: Arm, routed: Routed) -> Any:
        """By token and choice."""
        if arm.weight is None:
            return o.full(1.0, shape=routed.shape, dtype=arm.mlp.x.dtype)
        weights = self._all_weights(arm, routed)
        return routed.in_order(arm.weight) if weights is None else shaped(weights, routed.shape)


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
