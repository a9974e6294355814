"""A small sum of tables over pairs of variables, where there are too many of these for `least.py` alone.

*Shrinking.*  A value that costs no less than another of its variable, whatever the neighbours do, goes; so does a
variable with one neighbour or two, which becomes a table of these: e[x, z] = min over y of (a[x, y] + b[y] + c[y, z]).
Both are exact, and each makes room for the other.

*Diffusion.*  Costs are moved between a variable and its tables in such a way that every choice costs what it did:

    u[x] -> 0,  t[x, y] += u[x] / tables of x;       then      t[x, y] -= m[x],  u[x] += m[x],  m[x] = min over y of t

The sum of the least of each variable and of each table is a bound for any such costs, and it rises; where the answer is
unique and no cycle of tables disagrees, up to the least sum itself.

*Leaving out.*  A value that costs more, by the moved costs, than an answer is above the bound is in no better answer.
What is left shrinks further, until an elimination with small tables is exact, or the answer is at the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mycel.plan.least import CLOSE, NEVER, Elimination, Least, Name, Sum, Table, by_variable, merged

LARGEST = 1 << 14  # elements of a table of an elimination
WHOLE_TABLE = 1 << 22  # of the last one
TURNS, DIFFUSIONS = 4, 80  # how often values are left out, and costs are moved before that


def least(s: Sum) -> Least:
    """A value for each variable with a small sum, mostly the least; all tables are of one variable or two."""
    pairs = Pairs.of(s)
    pairs.shrink()
    best, exact = pairs.answer(s)
    if exact:
        return Least(best.chosen, best.value, best.value)
    for _ in range(TURNS):
        pairs.diffuse(best)
        pairs.leave_out(best)
        pairs.shrink()
        answer, exact = pairs.answer(s)
        best = min(best, answer, key=lambda x: x.value)
        if exact or best.value <= pairs.bound + CLOSE * abs(best.value):
            return Least(best.chosen, best.value, best.value)
    answer, exact = pairs.answer(s, WHOLE_TABLE)
    chosen = min(best, answer, key=lambda x: x.value).chosen
    s.improve(chosen, by_variable(s.sizes, s.tables))
    value = s.value(chosen)
    return Least(chosen, value, value if exact else min(value, pairs.bound))


@dataclass(frozen=True)
class Gone:
    """A variable that follows from its neighbours: costs of its values, by themselves and with each of those that a
    neighbour had then."""

    name: Name
    kept: Any
    own: Table
    near: Mapping[Name, tuple[Any, Table]]  # [own value, neighbour's value]


@dataclass
class Pairs:
    """What is left of a sum: costs of the values of each variable, by themselves and with each of a neighbour's."""

    own: dict[Name, Table]
    near: dict[Name, dict[Name, Table]]
    kept: dict[Name, Any]  # of the variable's values, those that are left
    gone: list[Gone] = field(default_factory=list)
    settled: float = 0.0  # what costs the same in every choice
    bound: float = -np.inf

    @staticmethod
    def of(s: Sum) -> Pairs:
        pairs = Pairs(
            {n: np.zeros(size) for n, size in s.sizes.items()},
            {n: {} for n in s.sizes},
            {n: np.arange(size) for n, size in s.sizes.items()},
        )
        for names, table in merged(s.tables):
            t = np.minimum(table, NEVER)
            if not names:
                pairs.settled += float(t)
            elif len(names) == 1:
                pairs.own[names[0]] = pairs.own[names[0]] + t
            else:
                a, b = names
                pairs._put(a, b, t)
        return pairs

    def _put(self, a: Name, b: Name, t: Table) -> None:
        t = np.minimum(self.near[a][b] + t, NEVER) if b in self.near[a] else t
        self.near[a][b], self.near[b][a] = t, t.T

    # -- shrinking

    def shrink(self) -> None:
        todo = dict.fromkeys(self.near)
        while todo:
            name = next(iter(todo))
            del todo[name]
            if name not in self.near:
                continue
            near = self.near[name]
            if len(self.own[name]) > 1 and not (keeps := self._keeps(name)).all():
                self._keep(name, keeps)
                todo.update(dict.fromkeys(near))
            if len(near) <= 2 or len(self.own[name]) == 1:
                self._remove(name)
                todo.update(dict.fromkeys(near))

    def _keeps(self, name: Name) -> Any:
        """Which values are no worse than another: of two that cost the same the first."""
        own = self.own[name]
        more = own[:, None] - own  # how much more value a costs than b, at the least
        for t in self.near[name].values():
            more = more + (t[:, None, :] - t).min(-1)
        is_worse = more >= 0
        is_worse &= ~(is_worse.T & (np.arange(len(own))[:, None] <= np.arange(len(own))))
        return ~is_worse.any(1)

    def _keep(self, name: Name, keeps: Any) -> None:
        self.kept[name], self.own[name] = self.kept[name][keeps], self.own[name][keeps]
        for other, t in self.near[name].items():
            self.near[name][other] = t[keeps]
            self.near[other][name] = self.near[other][name][:, keeps]

    def _remove(self, name: Name) -> None:
        """A variable with few neighbours, or without a choice."""
        own, near = self.own.pop(name), self.near.pop(name)
        self.gone.append(Gone(name, self.kept[name], own, {n: (self.kept[n], t) for n, t in near.items()}))
        for other in near:
            del self.near[other][name]
        if len(own) == 1:
            self.settled += float(own[0])
            for other, t in near.items():
                self.own[other] = self.own[other] + t[0]
        elif len(near) == 2:
            (a, s), (b, t) = near.items()
            self._put(a, b, np.minimum((s.T[:, None, :] + t.T[None, :, :] + own).min(-1), NEVER))
        elif near:
            other, t = next(iter(near.items()))
            self.own[other] = self.own[other] + (t + own[:, None]).min(0)
        else:
            self.settled += float(own.min())

    # -- answers

    def answer(self, s: Sum, largest: int | None = None) -> tuple[Least, bool]:
        """Of what is left by elimination, and all that follows; is it the least?"""
        number = {name: i for i, name in enumerate(self.near)}
        tables: list[tuple[tuple[Name, ...], Table]] = [((name,), self.own[name]) for name in self.near]
        tables += [((a, b), t) for a, near in self.near.items() for b, t in near.items() if number[a] < number[b]]
        elimination = Elimination({name: len(self.own[name]) for name in self.near}, tables, largest=largest or LARGEST)
        elimination.run(fixing=True)
        left: dict[Name, int] = {}
        elimination.follow(left)
        chosen = {name: int(self.kept[name][k]) for name, k in left.items()}
        for each in reversed(self.gone):
            costs = each.own
            for other, (kept, t) in each.near.items():
                costs = costs + t[:, np.searchsorted(kept, chosen[other])]
            chosen[each.name] = int(each.kept[np.argmin(costs)])
        chosen = {name: chosen[name] for name in s.sizes}
        return Least(chosen, s.value(chosen), self.bound), not elimination.fixed

    # -- the bound

    def diffuse(self, best: Least) -> None:
        """Move costs, so that the bound rises."""
        names = list(self.near)
        number = {name: i for i, name in enumerate(names)}
        edges = [(a, b) for a in names for b in self.near[a] if number[a] < number[b]]
        most = max(len(self.own[name]) for name in names)
        own, tables = np.full((len(names), most), np.inf), np.full((len(edges), most, most), np.inf)
        for name, i in number.items():
            own[i, : len(self.own[name])] = self.own[name]
        for i, (a, b) in enumerate(edges):
            t = self.near[a][b]
            tables[i, : len(t), : t.shape[1]] = t
        floor = own.min(1, keepdims=True), tables.min((1, 2), keepdims=True)
        settled = float(floor[0].sum() + floor[1].sum())
        # what costs more by itself than the best is above the bound is in no better answer, however much more it is
        cap = min(2 * max(best.value - self.settled - settled, CLOSE * abs(best.value)), NEVER)
        own, tables = np.minimum(own - floor[0], cap), np.minimum(tables - floor[1], cap)
        ends = np.array([[number[a], number[b]] for a, b in edges])
        first, second = ends[:, 0], ends[:, 1]
        order = np.argsort(ends.T.ravel(), kind="stable")
        starts = np.searchsorted(ends.T.ravel()[order], np.arange(len(names)))  # all have three neighbours or more
        count = np.bincount(ends.ravel(), minlength=len(names))[:, None]
        for _ in range(DIFFUSIONS):
            share = own / count
            tables += share[first][:, :, None]
            tables += share[second][:, None, :]
            half = tables.min(2) / 2
            tables -= half[:, :, None]
            to_second = tables.min(1)
            tables -= to_second[:, None, :]
            rest = tables.min(2)
            tables -= rest[:, :, None]
            own = np.add.reduceat(np.concatenate([half + rest, to_second])[order], starts)
            if (bound := float(own.min(1).sum())) + settled + self.settled >= best.value - CLOSE * abs(best.value):
                break
        self.bound = max(self.bound, self.settled + settled + bound)
        self.settled += settled
        for name, i in number.items():
            self.own[name] = own[i, : len(self.own[name])]
        for i, (a, b) in enumerate(edges):
            t = tables[i, : len(self.own[a]), : len(self.own[b])]
            self.near[a][b], self.near[b][a] = t, t.T

    def leave_out(self, best: Least) -> None:
        """Values that are in no better answer."""
        above = max(best.value - self.bound, 0.0) + CLOSE * abs(best.value)
        for name, own in self.own.items():
            keeps = own <= own.min() + above
            if not keeps.all():
                self._keep(name, keeps)
