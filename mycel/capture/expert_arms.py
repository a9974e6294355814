"""What each expert of a loop gives, however it is added to the others': an arm.

    y.index_add_(0, token, rows)            to rows of y, of all that are picked where a mask holds
    y[token] += rows;  y[b, t] += rows      the same, through one dim or several
    y[mask] += rows;   y[mask] = rows       where a mask holds
    mine[mask] = rows; y += mine * w        a sum of its own, of nothing but its rows, which is added
    sum(mines);  stack(mines).sum(0)
    y += expert(x) * w                      all rows; those count whose weight is not 0

What is traced computes all rows for every expert, of which those count that chose it (`rows.py`).  With the places that
count replaced by all places, which are constants, all arms of a layer have the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mycel.capture.expert_mlps import Mlp, weighed_mlp
from mycel.ir import Atom, Eqn, Var
from mycel.ops import o

if TYPE_CHECKING:
    from mycel.capture.expert_loops import Loops, OpenBranch


@dataclass(frozen=True)
class Arm:
    """One expert's share: `out` is `before`, with rows added of which `keep` says which count."""

    out: Var
    before: Atom
    keep: Var
    tokens: torch.Tensor  # of all rows: a number through all dims of `before` but the last
    at: tuple[Var, ...]  # the same, a value for each dim; none: each token has a row, in order
    mlp: Mlp
    weight: Var | None  # of each row; None: 1
    adds: bool  # to what is there; else it stands in its place
    is_put: bool  # of two rows of a token one counts
    reads: int  # how often it reads `before`
    source: str  # where its rows are picked
    branch: OpenBranch | None  # that it stands in

    @property
    def expert(self) -> tuple[Any, ...]:
        """What arms of one layer have in common."""
        return *self.mlp.kind, self.adds, self.branch is None, self.keep == self.weight

    @property
    def of_all_tokens(self) -> bool:
        return not self.at


class Arms:
    """Those of a block, by what they make."""

    def __init__(self, loops: Loops) -> None:
        self.loops = loops
        read = [v for e in loops.eqns if e.op is not o.reshape for v in set(e.vars)]
        self.uses = Counter(map(loops.plain, [*read, *loops.outputs]))
        self.chosen: dict[Var, dict[Var, Any]] = {}  # by mask: chosen rows -> all rows
        for eqn in loops.eqns:
            other = loops.of(eqn.inputs[2], o.where) if eqn.op is o.where else None
            if other is not None and loops.of(other.inputs[0], o.any) is not None:
                self.chosen.setdefault(loops.plain(eqn.inputs[0]), {})[eqn.outputs[0]] = eqn.inputs[1]
        self.by_out: dict[Any, Arm] = {}
        for eqn in list(loops.eqns):
            self.by_out.update((arm.out, arm) for arm in self._made_by(eqn))

    def chains(self) -> Iterator[list[Arm]]:
        """Arms of like experts that add to each other, in their order; what one gives is used by the next alone."""
        inner = {self.loops.plain(arm.before) for arm in self.by_out.values()}
        for last in [arm for arm in self.by_out.values() if arm.out not in inner]:
            arms = [last]
            while (before := self.by_out.get(self.loops.plain(arms[0].before))) is not None:
                arms.insert(0, before)
            if last.adds and self.loops.is_zero(arms[0].before):
                arms[0] = replace(arms[0], adds=True)
            chain: list[Arm] = []
            for arm in arms:
                if chain and (arm.expert != chain[-1].expert or self.uses[chain[-1].out] != arm.reads):
                    yield chain
                    chain = []
                chain.append(arm)
            yield chain

    def _made_by(self, eqn: Eqn) -> Sequence[Arm]:
        if len(eqn.outputs) != 1 or not eqn.outputs[0].ndim:
            return ()
        if eqn.op is o.sum:
            return self._summed_stack(eqn)
        if eqn.op is o.mul:
            arm = self._weighed(eqn) or self._scaled(eqn)
        else:
            kind = {o.where: self._masked, o.div: self._scaled, o.add: self._summed}
            arm = kind.get(eqn.op, self._placed)(eqn)
        return () if arm is None else (arm,)

    def _branch(self, out: Var, before: Any) -> tuple[bool, OpenBranch | None]:
        """The branch that an arm stands in, and whether it else changes nothing."""
        branch = self.loops.branches.get(out)
        return branch is None or self.loops.plain(branch.other) == self.loops.plain(before), branch

    # -- rows at places

    def _placed(self, eqn: Eqn) -> Arm | None:
        """index_add, index_put that accumulates, and index_put to rows of which one more is there for what does not
        count."""
        loops = self.loops
        if eqn.op is o.index_add or (eqn.op is o.index_put and eqn.params.get("accumulate")):
            before, first, second, *rest = eqn.inputs
            is_add = eqn.op is o.index_add
            columns, rows = ([first], second) if is_add else ([second, *rest], first)
            covered = loops.of(rows, o.where)
            into = (eqn.params.get("dim"),) if is_add else eqn.params["at"]
            if covered is None or covered.inputs[2] != 0 or into != tuple(range(len(columns))):
                return None
            lane, rows = covered.inputs[:2]
            return self._at_places(eqn.outputs[0], before, columns, lane, rows, adds=True, is_put=False)
        put = loops.of(eqn.inputs[0], o.index_put) if eqn.op is o.slice and eqn.inputs else None
        padded = loops.of(put.inputs[0], o.pad) if put is not None else None
        where = loops.of(put.inputs[2], o.where) if put is not None else None
        if put is None or padded is None or where is None or put.params["at"] != tuple(range(len(put.inputs) - 2)):
            return None
        columns, before, rows = [where.inputs[1], *put.inputs[3:]], padded.inputs[0], put.inputs[1]
        total, adds = loops.of(loops.plain(rows), o.add), False
        for old, new in (total.inputs, total.inputs[::-1]) if total is not None else ():
            picked = loops.of(old, o.index)
            if picked is None or picked.inputs[0] != before:
                continue
            if [*map(loops.plain, picked.inputs[1:])] != [*map(loops.plain, columns)]:
                return None
            rows, adds = new, True
            break
        return self._at_places(eqn.outputs[0], before, columns, where.inputs[0], rows, adds=adds, is_put=True)

    def _at_places(
        self, out: Var, before: Any, columns: Sequence[Any], lane: Any, rows: Any, *, adds: bool, is_put: bool
    ) -> Arm | None:
        loops = self.loops
        keep, (is_plain, branch) = loops.plain(lane), self._branch(out, before)
        chosen = self._chosen_places(columns[0], keep)
        if chosen is None or not isinstance(before, Var) or not is_plain or out.ndim != len(columns) + 1:
            return None
        values: dict[Var, Any] = {chosen.outputs[0]: chosen.inputs[1]}
        at = tuple(loops.again(loops.plain(c), values) for c in columns)
        tokens = numbered(loops, out.shape[:-1], range(len(at)), at)
        if tokens is None:
            return None
        weighed = weighed_mlp(loops, loops.plain(loops.again(rows, values)), tokens.numel())
        if weighed is None:
            return None
        mlp, weight = weighed
        flat = self._flat(keep)
        arm = Arm(
            out, before, flat, tokens, at, mlp, weight, adds, is_put, 1 + (is_put and adds), chosen.source, branch
        )
        every = all_rows(loops, mlp.x, tokens, mlp.x.shape[-1])
        if every is None or not torch.equal(tokens, torch.arange(out.type.numel // out.shape[-1])):
            return arm
        if weight is not None:
            rows_weight = all_rows(loops, loops.plain(weight), tokens)
            weight = weight if rows_weight is None else loops.plain(rows_weight)
        return replace(arm, at=(), mlp=replace(mlp, x=every), weight=weight)

    def _chosen_places(self, index: Any, keep: Any) -> Eqn | None:
        """The equation that gives places where a mask holds, those of others where it does not, of which an index is
        made."""
        for x in self.loops.made_of(index):
            eqn = self.loops.of(x, o.where)
            if eqn is not None and self._flat(eqn.inputs[0]) == self._flat(keep):
                return eqn if self.loops.constant(eqn.inputs[1]) is not None else None
        return None

    def _flat(self, mask: Any) -> Any:
        """A mask without what only tells whether numbers are not zero."""
        mask = self.loops.plain(mask)
        ne = self.loops.of(mask, o.ne)
        numbers: Any = ne.inputs[0] if ne is not None and ne.inputs[1] == 0 else None
        return mask if numbers is None or numbers.dtype.is_floating_point else self.loops.plain(numbers)

    # -- rows where a mask holds

    def _masked(self, eqn: Eqn) -> Arm | None:
        loops = self.loops
        mask, out, before = loops.plain(eqn.inputs[0]), eqn.outputs[0], eqn.inputs[2]
        chosen = self.chosen.get(mask, {})
        if out in chosen or not isinstance(mask, Var):
            return None
        is_plain, branch = self._branch(out, before)
        if not is_plain:
            return None
        rows = loops.plain(eqn.inputs[1])
        total, adds = loops.of(rows, o.add), False
        for old, new in (total.inputs, total.inputs[::-1]) if total is not None else ():
            if loops.plain(chosen.get(loops.plain(old), old)) == loops.plain(before):
                rows, adds = loops.plain(new), True
        count = mask.type.numel
        rows = loops.plain(loops.again(rows, dict(chosen)))
        weighed = weighed_mlp(loops, rows, count) if out.type.numel == count * out.shape[-1] else None
        if weighed is None:
            return None
        mlp, weight = weighed
        reads = self.uses[loops.plain(before)] if isinstance(before, Var) else 0
        return Arm(
            out, before, mask, torch.arange(count), (), mlp, loops.plain(weight), adds, True, reads, eqn.source, branch
        )

    # -- sums of an expert's own

    def _weighed(self, eqn: Eqn) -> Arm | None:
        """All rows, and a weight for each."""
        (out,) = eqn.outputs
        if out.ndim < 2:
            return None
        count = out.type.numel // out.shape[-1]
        mlp, weight = weighed_mlp(self.loops, out, count) or (None, None)
        if mlp is None or weight is None or weight.type.numel != count:
            return None
        weight = self.loops.plain(weight)
        every = torch.arange(count)
        return Arm(out, 0, weight, every, (), mlp, weight, False, False, 1, eqn.source, None)

    def _own(self, x: Any) -> Arm | None:
        """The arm that makes x, if x is nothing but its rows, and used once."""
        arm = self.by_out.get(self.loops.plain(x))
        return arm if arm is not None and self.loops.is_zero(arm.before) and self.uses[arm.out] == 1 else None

    def _summed(self, eqn: Eqn) -> Arm | None:
        (out,) = eqn.outputs
        for own, before in (eqn.inputs, eqn.inputs[::-1]):
            arm, (is_plain, branch) = self._own(own), self._branch(out, before)
            fits = before.shape == out.shape if isinstance(before, Var) else before == 0
            if arm is not None and fits and is_plain and own.type == out.type:  # type: ignore[union-attr]
                return replace(arm, out=out, before=before, adds=True, reads=1, branch=branch or arm.branch)
        return None

    def _summed_stack(self, eqn: Eqn) -> Sequence[Arm]:
        stacked = self.loops.of(eqn.inputs[0], o.stack)
        arms = [self._own(x) for x in stacked.inputs] if stacked is not None else []
        if stacked is None or None in arms or tuple(eqn.params["dims"]) != (stacked.params["dim"],):
            return ()
        chain: list[Arm] = []
        for arm in arms:
            before = chain[-1].out if chain else 0
            chain += [] if arm is None else [replace(arm, before=before, adds=True, reads=1)]
        return (
            [*chain[:-1], replace(chain[-1], out=eqn.outputs[0])] if len({a.out for a in chain}) == len(chain) else ()
        )

    def _scaled(self, eqn: Eqn) -> Arm | None:
        """Rows that get their weights where they are tokens again."""
        (out,) = eqn.outputs
        for own, factor in (eqn.inputs, eqn.inputs[::-1])[: 2 if eqn.op is o.mul else 1]:
            arm = self._own(own)
            if arm is None or own.type != out.type:  # type: ignore[union-attr]
                continue
            is_number = not isinstance(factor, Var) or factor.type.numel == 1
            if is_number or factor.shape == (*out.shape[:-1], 1):  # type: ignore[union-attr]
                return replace(arm, out=out, weight=self._rescaled(eqn, arm, factor, is_number))
        return None

    def _rescaled(self, eqn: Eqn, arm: Arm, factor: Any, is_number: bool) -> Any:
        rows, loops = len(arm.tokens), self.loops
        if arm.weight is None and not arm.at and eqn.op is o.mul and not is_number:
            return loops.plain(factor)

        def weight() -> Any:
            old = o.full(1.0, shape=(), dtype=arm.mlp.x.dtype) if arm.weight is None else arm.weight
            new = o.reshape(factor, shape=()) if is_number and isinstance(factor, Var) else factor
            if not is_number and arm.at:
                new = o.index(factor, *arm.at, at=tuple(range(len(arm.at))))
            new = new if is_number else o.reshape(new, shape=(rows, 1))
            each = eqn.op(old if arm.weight is None else o.reshape(old, shape=(rows, 1)), new)
            return o.expand(each, shape=(rows, 1)) if each.ndim == 0 else each

        return loops.computed(eqn.outputs[0], weight)


def numbered(loops: Loops, shape: Sequence[int], dims: Sequence[int], at: Sequence[Any]) -> torch.Tensor | None:
    """Positions along some dims, which are constants -> numbers through all dims, of which others have one element."""
    places = [place for x in at if (place := loops.constant(x)) is not None]
    if len(places) < len(at) or any(n != 1 for d, n in enumerate(shape) if d not in dims):
        return None
    number = torch.zeros((), dtype=torch.int64)
    for d, place in zip(dims, places, strict=True):
        number = number * shape[d] + place
    return number.reshape(-1) if [*dims] == sorted(dims) else None


def all_rows(loops: Loops, x: Any, tokens: torch.Tensor, width: int = 1) -> Any:
    """That of which rows of these numbers were picked, where there are no others in it; None where they were not, or
    there are."""
    picked = loops.of(x, o.index)
    if picked is None:
        return None
    source: Any = picked.inputs[0]
    rows, at = source.shape if width == 1 else source.shape[:-1], picked.params["at"]
    if max(at) >= len(rows) or source.type.numel != (int(tokens.max()) + 1) * width:
        return None
    numbers = numbered(loops, rows, at, picked.inputs[1:])
    return source if numbers is not None and torch.equal(numbers, tokens) else None
