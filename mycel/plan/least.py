"""The least sum of tables: choose a value for each variable so that a sum of tables, each over a few of them, is least.

    min over x, y, z of  a[x] + b[y] + c[x, y] + d[y, z]

*Elimination.*  Variables go one after another, those with the smallest resulting table first:  e[y] = min over x of (a[x] + c[x, y]).  This is exact.
Where a table would become too large, the tables of a variable are divided into groups, each small enough, and its value is chosen for each group by
itself (mini-buckets): what comes out in the end is then no more than the least sum, a *bound*.

*Search.*  Variables are given values in the opposite order.  What is left of the bound once some have values is known from the same tables, so
branches that cannot beat the best answer are left out; variables that were eliminated in one group need no branching at all.  If the search comes to
its end the answer is the least; if not it is improved (neighbourhoods solved anew, all else as it is), and the bound says how far it may be off.

*Limit.*  With a weight for each value and a limit for their sum, a weight has a price p:  cost + p (weight - limit), for any p >= 0, is a bound as
well.  The price rises until the limit is kept; the search then uses the best price found, and ends at the best answer within the limit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LARGEST = 1 << 16  # elements of a table
SMALL = 1 << 12  # of one that is made before values are compared with each other
BALL, BALLS = 40, 12  # variables that are improved together; how many such sets are tried
VISITS = 20_000  # values tried in the search
PRICES = 24  # of a weight, tried one after another
CLOSE = 1e-9  # what two sums may differ by and count as equal

Name = Hashable
Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Least:
    """A value for each variable, the sum they make, and what no choice goes below."""

    chosen: dict[Name, int]
    value: float
    bound: float

    @property
    def exact(self) -> bool:
        return self.value <= self.bound + CLOSE * abs(self.bound)


@dataclass
class Sum:
    """Variables with their numbers of values, and tables over them."""

    sizes: dict[Name, int] = field(default_factory=dict)
    tables: list[tuple[tuple[Name, ...], Table]] = field(default_factory=list)

    def add(self, names: Sequence[Name], table: Any) -> None:
        self.tables.append((tuple(names), np.asarray(table, np.float64)))

    def value(self, chosen: Mapping[Name, int]) -> float:
        return float(sum(t[tuple(chosen[n] for n in names)] for names, t in self.tables))

    def least(self) -> Least:
        layers = []
        sizes, tables, bound = self.sizes, merged(self.tables), 0.0
        while True:
            e = Elimination(sizes, tables)
            e.run(SMALL)
            kept = undominated(e.left, list(e.tables.values()))
            if sum(map(len, kept.values())) == sum(e.left.values()):
                break
            layers.append((e, kept))
            sizes = {n: len(values) for n, values in kept.items()}
            tables = [(names, t[np.ix_(*(kept[n] for n in names))]) for names, t in e.tables.values()]
            bound += e.bound
        e.run()
        answer = e.search()
        chosen = answer.chosen
        for e, kept in reversed(layers):
            chosen = {n: int(kept[n][k]) for n, k in chosen.items()}
            e.follow(chosen)
        if not answer.exact:
            chosen = self._improved(chosen)
        value = self.value(chosen)
        return Least(chosen, value, value if answer.exact else bound + answer.bound)

    def _improved(self, chosen: dict[Name, int]) -> dict[Name, int]:
        by: dict[Name, list[tuple[tuple[Name, ...], Table]]] = {n: [] for n in self.sizes}
        for names, t in self.tables:
            for n in names:
                by[n].append((names, t))
        while self._improve_balls(chosen, by):
            pass
        self._improve(chosen, by)
        return chosen

    def _improve_balls(self, chosen: dict[Name, int], by: Mapping[Name, list[tuple[tuple[Name, ...], Table]]]) -> bool:
        """Neighbourhoods of variables, each solved anew; whether that helped."""
        free = [n for n, size in self.sizes.items() if size > 1]
        helped = False
        for start in free[:: max(1, len(free) // BALLS)]:
            ball, todo = {start: None}, [start]
            while todo and len(ball) < BALL:
                near = [m for names, _ in by[todo.pop(0)] for m in names if self.sizes[m] > 1 and m not in ball]
                ball.update(dict.fromkeys(near[: BALL - len(ball)]))
                todo += [m for m in near if m in ball]
            part = Sum({n: self.sizes[n] for n in ball})
            seen: set[int] = set()
            for names, t in (x for n in ball for x in by[n]):
                if id(t) not in seen:
                    seen.add(id(t))
                    part.add([n for n in names if n in ball], t[tuple(slice(None) if n in ball else chosen[n] for n in names)])
            e = Elimination(part.sizes, part.tables)
            e.run()
            new = e.search(2 * len(ball)).chosen
            if part.value(new) < part.value({n: chosen[n] for n in ball}) * (1 - 1e-9) - 1e-15:
                chosen.update(new)
                helped = True
        return helped

    def _improve(self, chosen: dict[Name, int], by: Mapping[Name, list[tuple[tuple[Name, ...], Table]]]) -> None:
        """One variable at a time, while it helps."""
        todo = list(self.sizes)
        while todo:
            n = todo.pop(0)
            costs = np.zeros(self.sizes[n])
            for names, t in by[n]:
                costs = costs + t[tuple(slice(None) if m == n else chosen[m] for m in names)]
            best = int(np.argmin(costs))
            if costs[best] < costs[chosen[n]] - 1e-12:
                chosen[n] = best
                todo += [m for names, _ in by[n] for m in names if m != n and m not in todo]


@dataclass(frozen=True)
class Group:
    """Tables of one variable that were added up: the sum over (`others`, the variable), and its least over the variable."""

    others: tuple[Name, ...]
    total: Table
    least: Table


class Elimination:
    """All variables of a sum, one after another."""

    def __init__(self, sizes: Mapping[Name, int], tables: Sequence[tuple[tuple[Name, ...], Table]], late: Collection[Name] = ()) -> None:
        """`late`: variables that go after all others."""
        self.sizes = sizes
        self.tables: dict[int, tuple[tuple[Name, ...], Table]] = {}
        self.of: dict[Name, set[int]] = {n: set() for n in sizes}
        self.buckets: list[tuple[Name, list[Group]]] = []
        self.bound = 0.0
        self.next = 0
        for names, t in tables:
            self._put(names, t)
        self.late = frozenset(late)
        self.left = dict(sizes)

    def _put(self, names: tuple[Name, ...], table: Table) -> None:
        free = [i for i, n in enumerate(names) if self.sizes[n] > 1]  # where there is no choice there is nothing to decide
        if len(free) < len(names):
            names, table = tuple(names[i] for i in free), table.reshape([table.shape[i] for i in free])
        if not names:
            self.bound += float(table)
            return
        self.tables[self.next] = (names, table)
        for n in names:
            self.of[n].add(self.next)
        self.next += 1

    def _take(self, name: Name) -> list[tuple[tuple[Name, ...], Table]]:
        """The tables over a variable, removed."""
        taken = []
        for key in sorted(self.of[name]):
            names, t = self.tables.pop(key)
            for n in names:
                self.of[n].discard(key)
            taken.append((names, t))
        return taken

    def _neighbours(self, name: Name) -> list[Name]:
        return list(dict.fromkeys(n for key in sorted(self.of[name]) for n in self.tables[key][0] if n != name))

    def _size(self, name: Name) -> int:
        """Elements of the table over a variable and its neighbours."""
        size = self.sizes[name]
        for n in self._neighbours(name):
            size *= self.sizes[n]
        return size

    def run(self, largest: int | None = None) -> None:
        """Eliminate all variables; or those whose tables stay that small."""
        sizes = {n: (n in self.late, self._size(n)) for n in self.left}
        count = itertools.count()
        heap = [(key, next(count), n) for n, key in sizes.items()]
        heapq.heapify(heap)
        while heap:
            key, _, name = heapq.heappop(heap)
            if sizes.get(name) != key:  # it has changed since
                continue
            if largest is not None and key[1] > largest:
                return
            touched = self._neighbours(name)
            self._eliminate(name)
            del sizes[name], self.left[name]
            for n in touched:
                if sizes[n] != (key := (n in self.late, self._size(n))):
                    sizes[n] = key
                    heapq.heappush(heap, (key, next(count), n))

    def _eliminate(self, name: Name) -> None:
        groups: list[tuple[dict[Name, None], list[tuple[tuple[Name, ...], Table]]]] = []
        for names, t in sorted(self._take(name), key=lambda x: -x[1].size):
            others = dict.fromkeys(n for n in names if n != name)
            for scope, tables in groups:
                if self.sizes[name] * math.prod(self.sizes[n] for n in {**scope, **others}) <= max(LARGEST, t.size):
                    scope.update(others)
                    tables.append((names, t))
                    break
            else:
                groups.append((others, [(names, t)]))
        done = []
        for scope, tables in groups:
            axes = (*scope, name)
            total = np.zeros([self.sizes[n] for n in axes])
            for names, t in tables:
                total = total + _aligned(names, t, axes)
            done.append(Group(tuple(scope), total, total.min(-1)))
            self._put(tuple(scope), done[-1].least)
        self.buckets.append((name, done))

    def search(self, visits: int = VISITS) -> Least:
        """The best choice found by that many tries, or the best there is."""
        order = self.buckets[::-1]
        last = max((i for i, (_, groups) in enumerate(order) if len(groups) > 1), default=-1)
        chosen: dict[Name, int] = {}
        best, cutoff, kept = math.inf, math.inf, dict[Name, int]()
        stack: list[list[tuple[float, int]]] = []  # for each variable so far: what is left to try, (bound, value), the best last
        bound = self.bound
        while True:
            if len(stack) > last:  # whatever is left follows
                if bound < best:
                    best, cutoff, kept = bound, bound - CLOSE * abs(bound), {name: chosen[name] for name, _ in order[: last + 1]}
            else:
                more = _more(order[len(stack)][1], chosen)
                stack.append(sorted(((bound + float(x), k) for k, x in enumerate(more) if bound + x < cutoff), reverse=True))
            while stack and not (stack[-1] and stack[-1][-1][0] < cutoff and visits > 0):
                stack.pop()
            if not stack:
                break
            bound, k = stack[-1].pop()
            chosen[order[len(stack) - 1][0]] = k
            visits -= 1
        finished = visits > 0
        self.follow(kept)
        return Least(kept, best, best if finished else self.bound)

    def follow(self, chosen: dict[Name, int]) -> None:
        """The best values of variables that were eliminated, given those of the ones left."""
        for name, groups in reversed(self.buckets):
            if name not in chosen:
                chosen[name] = int(np.argmin(_more(groups, chosen)))


def _more(groups: Sequence[Group], chosen: Mapping[Name, int]) -> Table:
    """What each value of a variable adds to the bound, given those chosen before."""
    more: Any = np.zeros(1)
    for g in groups:
        at = tuple(chosen[n] for n in g.others)
        more = more + (g.total[at] - g.least[at] if np.isfinite(g.least[at]) else np.inf)
    return np.asarray(more)


def undominated(sizes: Mapping[Name, int], tables: Sequence[tuple[tuple[Name, ...], Table]]) -> dict[Name, Table]:
    """The values of each variable without those that another one of its values beats, whatever the neighbours' values are."""
    alone: dict[Name, Table] = {n: np.zeros(k) for n, k in sizes.items()}
    near: dict[Name, list[tuple[Name, Table]]] = {n: [] for n in sizes}
    fixed: set[Name] = set()
    for names, t in tables:
        if len(names) == 1:
            alone[names[0]] = alone[names[0]] + t
        elif len(names) == 2:
            near[names[0]].append((names[1], t))
            near[names[1]].append((names[0], t.T))
        else:
            fixed.update(names)
    kept = {n: np.arange(k) for n, k in sizes.items()}
    todo = {n: None for n, k in sizes.items() if k > 1 and n not in fixed}
    while todo:
        n = next(iter(todo))
        del todo[n]
        mine = kept[n]
        worse = alone[n][mine, None] - alone[n][mine]  # by how much at least value i costs more than value j
        for other, t in near[n]:
            t = t[mine[:, None], kept[other]]
            worse = worse + (t[:, None, :] - t).min(-1)
        i = np.arange(len(mine))
        beaten = ((worse > 0) | ((worse == 0) & (i[:, None] > i))).any(1)
        if beaten.any():
            kept[n] = mine[~beaten]
            todo.update((other, None) for other, _ in near[n] if len(kept[other]) > 1 and other not in fixed)
            if len(kept[n]) > 1:
                todo[n] = None
    return kept


def merged(tables: Sequence[tuple[tuple[Name, ...], Table]]) -> list[tuple[tuple[Name, ...], Table]]:
    """Tables over the same variables added up."""
    by: dict[frozenset[Name], tuple[tuple[Name, ...], Table]] = {}
    for names, t in tables:
        key = frozenset(names)
        if key in by:
            first, other = by[key]
            t = other + t.transpose([names.index(n) for n in first])
            names = first
        by[key] = names, t
    return list(by.values())


def _aligned(names: tuple[Name, ...], table: Table, axes: tuple[Name, ...]) -> Table:
    """A table over some variables as one over `axes`, to be broadcast."""
    order = sorted(range(len(names)), key=lambda i: axes.index(names[i]))
    present = {names[i] for i in order}
    shape = iter(table.transpose(order).shape)
    return table.transpose(order).reshape([next(shape) if n in present else 1 for n in axes])
