"""The least sum of tables: choose a value for each variable so that a sum of tables, each over a few of them, is least.

    min over x, y, z of  a[x] + b[y] + c[x, y] + d[y, z]

*Elimination.*  Variables go one after another, those with the smallest resulting table first:
e[y] = min over x of (a[x] + c[x, y]).  This is exact.

*Search* (`Sum.least`).  A variable whose table would be too large goes from groups of its tables, each by itself
(mini-buckets): the result is a bound on the sum.  Values are then tried in the opposite order.  What is left of the
bound once some variables have values is known from the same tables, so branches that cannot beat the best answer are
left out.  If the search ends, nothing better is left.

*Fixing.*  Where the search would take too long (`pairs.py`): the variable with the most neighbours is given the value
that looks best with each neighbour at its best.  Then the answer is only good.

*Limit.*  With a weight for each value and a limit for their sum, a weight has a price p: the least of
cost + p (weight - limit) is a bound for any p >= 0.  The price rises until the limit is kept; the search then uses the
best price found, and ends at the best answer within the limit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

LARGEST = 1 << 16  # elements of a table where a search goes on from there
VISITS = 5_000  # values tried in a search
LIMITED = 100_000  # values tried in a search within a limit
PRICES = 24  # of a weight, tried one after another
NEVER = 1e30  # stands for a cost without end where costs are subtracted
CLOSE = 1e-12  # what two sums may differ by and count as equal

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
    weights: dict[Name, Table] = field(default_factory=dict)  # of the values of some variables, for a limit

    def add(self, names: Sequence[Name], table: Any) -> None:
        self.tables.append((tuple(names), np.asarray(table, np.float64)))

    def value(self, chosen: Mapping[Name, int]) -> float:
        return total(self.tables, chosen)

    def least(self, limit: float | None = None) -> Least:
        """The least sum; with a limit: of choices whose weights come to no more."""
        if limit is None or not self.weights:
            return self._least(self.tables)
        return self._limited(limit)

    def _least(self, tables: Sequence[tuple[tuple[Name, ...], Table]]) -> Least:
        elimination = Elimination(self.sizes, merged(tables))
        elimination.run()
        answer = elimination.search()
        if not answer.chosen:
            return answer
        if not answer.exact:
            self.improve(answer.chosen, by_variable(self.sizes, tables))
        value = total(tables, answer.chosen)
        return Least(answer.chosen, value, value if answer.exact else min(answer.bound, value))

    def _limited(self, limit: float) -> Least:
        def priced(price: float) -> tuple[Least, float, float]:
            tables = [*self.tables, *(((n,), price * w) for n, w in self.weights.items())]
            answer = self._least(tables)
            weight = float(sum(w[answer.chosen[n]] for n, w in self.weights.items()))
            return answer, weight, answer.bound - price * limit

        answer, weight, bound = priced(0.0)
        if weight <= limit:
            return answer
        lightest = sum(float(w.min()) for w in self.weights.values())
        if lightest > limit:
            return Least({}, math.inf, math.inf)
        low, high, price = 0.0, math.inf, max(answer.value, 1e-12) / (weight - lightest)
        best, value, dearest = dict[Name, int](), math.inf, 0.0
        for _ in range(PRICES):
            answer, weight, at_price = priced(price)
            if at_price > bound:
                bound, dearest = at_price, price
            if weight <= limit:
                high = price
                if self.value(answer.chosen) < value:
                    best, value = answer.chosen, self.value(answer.chosen)
            else:
                low = price
            if best and value - bound <= CLOSE * abs(value):
                return Least(best, value, value)
            price = 4 * price if high == math.inf else (low + high) / 2
        if not best:
            best = {n: int(np.argmin(self.weights[n])) if n in self.weights else 0 for n in self.sizes}
            value = self.value(best)
        tables = [*self.tables, *(((n,), dearest * w) for n, w in self.weights.items())]
        search = Elimination(self.sizes, merged(tables), self.weights)
        search.run()
        answer = search.search(LIMITED, value, (self.weights, limit, dearest))
        if answer.value < value:
            best, value = answer.chosen, self.value(answer.chosen)
        return Least(best, value, value if answer.exact else max(bound, search.bound - dearest * limit))

    def improve(self, chosen: dict[Name, int], by: Mapping[Name, list[tuple[tuple[Name, ...], Table]]]) -> None:
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
    """Tables of one variable that were added up: the sum over (`others`, the variable), and its least over the
    variable."""

    others: tuple[Name, ...]
    total: Table
    least: Table

    @cached_property
    def more(self) -> Table:
        """What each value adds to the least."""
        least = self.least[..., None]
        with np.errstate(invalid="ignore"):
            return np.where(np.isfinite(least), self.total - least, np.inf)


class Elimination:
    """All variables of a sum, one after another."""

    def __init__(
        self,
        sizes: Mapping[Name, int],
        tables: Sequence[tuple[tuple[Name, ...], Table]],
        late: Collection[Name] = (),
        largest: int | None = None,
    ) -> None:
        """`late`: variables that go after all others; `largest`: elements of a table that are not too many."""
        self.sizes, self.largest = sizes, largest or LARGEST
        self.tables: dict[int, tuple[tuple[Name, ...], Table]] = {}
        self.of: dict[Name, set[int]] = {n: set() for n in sizes}
        self.buckets: list[tuple[Name, list[Group]]] = []
        self.bound = 0.0
        self.next = 0
        for names, t in tables:
            self._put(names, t)
        self.late = frozenset(late)
        self.fixed = False  # has a variable got a value that may not be the best?

    def _put(self, names: tuple[Name, ...], table: Table) -> None:
        # where there is no choice there is nothing to decide
        free = [i for i, n in enumerate(names) if self.sizes[n] > 1]
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
        tables = []
        for key in sorted(self.of[name]):
            names, t = self.tables.pop(key)
            for n in names:
                self.of[n].discard(key)
            tables.append((names, t))
        return tables

    def _neighbours(self, name: Name) -> list[Name]:
        return list(dict.fromkeys(n for key in sorted(self.of[name]) for n in self.tables[key][0] if n != name))

    def _size(self, name: Name) -> int:
        """Elements of the table over a variable and its neighbours."""
        size = self.sizes[name]
        for n in self._neighbours(name):
            size *= self.sizes[n]
        return size

    def run(self, fixing: bool = False) -> None:
        """Eliminate all variables; with `fixing`, where all tables would be too large, the one with the most neighbours
        gets a value instead."""
        sizes = {n: (n in self.late, self._size(n)) for n, size in self.sizes.items() if size > 1}
        count = itertools.count()
        heap = [(key, next(count), n) for n, key in sizes.items()]
        heapq.heapify(heap)
        while heap:
            key, _, name = heapq.heappop(heap)
            if sizes.get(name) != key:  # it has changed since
                continue
            if fixing and key[1] > self.largest:
                heapq.heappush(heap, (key, next(count), name))
                name = max(sizes, key=lambda n: len(self._neighbours(n)))
                touched = self._neighbours(name)
                self._fix(name)
            else:
                touched = self._neighbours(name)
                self._eliminate(name)
            del sizes[name]
            for n in touched:
                key = n in self.late, self._size(n)
                if sizes[n] != key:
                    sizes[n] = key
                    heapq.heappush(heap, (key, next(count), n))

    def _eliminate(self, name: Name) -> None:
        groups: list[tuple[dict[Name, None], list[tuple[tuple[Name, ...], Table]]]] = []
        for names, t in sorted(self._take(name), key=lambda x: -x[1].size):
            others = dict.fromkeys(n for n in names if n != name)
            for scope, tables in groups:
                if self.sizes[name] * math.prod(self.sizes[n] for n in {**scope, **others}) <= max(
                    self.largest, t.size
                ):
                    scope.update(others)
                    tables.append((names, t))
                    break
            else:
                groups.append((others, [(names, t)]))
        done = []
        for scope, tables in groups:
            axes = (*scope, name)
            total = _aligned(*tables[0], axes)
            for names, t in tables[1:]:
                total = total + _aligned(names, t, axes)
            if total.shape != (shape := tuple(self.sizes[n] for n in axes)):
                total = np.broadcast_to(total, shape)
            done.append(Group(tuple(scope), total, total.min(-1)))
            self._put(tuple(scope), done[-1].least)
        self.buckets.append((name, done))

    def _fix(self, name: Name) -> None:
        """To the value that is best if each neighbour does its best for it."""
        self.fixed = True
        costs, rest = np.zeros(self.sizes[name]), self._take(name)
        for names, t in rest:
            own = t
            for i, n in enumerate(names):
                if n != name:
                    for key in self.of[n]:
                        if self.tables[key][0] == (n,):
                            own = own + self.tables[key][1].reshape([-1 if j == i else 1 for j in range(len(names))])
            costs = costs + own.min(tuple(i for i, n in enumerate(names) if n != name))
        best = int(np.argmin(costs))
        only = np.where(np.arange(self.sizes[name]) == best, 0.0, np.inf)
        self.buckets.append((name, [Group((), only, np.zeros(()))]))
        for names, t in rest:
            at = tuple(best if n == name else slice(None) for n in names)
            self._put(tuple(n for n in names if n != name), t[at])

    def search(
        self,
        visits: int = VISITS,
        best: float = math.inf,
        limit: tuple[Mapping[Name, Table], float, float] | None = None,
    ) -> Least:
        """The best choice that so many tries find below `best`; no choice if there is none.  `limit`: weights, what
        they may come to, and their price in the tables."""
        order = self.buckets[::-1]
        weights, most, price = limit or ({}, 0.0, 0.0)
        last = max((i for i, (n, groups) in enumerate(order) if len(groups) > 1 or n in weights), default=-1)
        rest = [0.0]  # the least that variables from each place on weigh
        for name, _ in reversed(order):
            rest.append(rest[-1] + (float(weights[name].min()) if name in weights else 0.0))
        rest.reverse()
        chosen: dict[Name, int] = {}
        kept: dict[Name, int] = {}
        cutoff = best - CLOSE * abs(best) if best < math.inf else best
        # for each variable so far: what is left to try (bound, value, weight), the best last
        stack: list[list[tuple[float, int, float]]] = []
        bound = self.bound - price * most
        weight = sum(float(w[0]) for n, w in weights.items() if self.sizes[n] == 1)  # these have no choice
        while True:
            if len(stack) > last:  # whatever is left follows
                value = bound - price * (weight - most)
                if value < best:
                    best, cutoff, kept = (
                        value,
                        value - CLOSE * abs(value),
                        {name: chosen[name] for name, _ in order[: last + 1]},
                    )
            else:
                name, groups = order[len(stack)]
                more, heavy = _more(groups, chosen), weights.get(name)
                bounds = bound + more
                below = np.flatnonzero(bounds < cutoff)
                weighing = weight + heavy[below] if heavy is not None else np.full(len(below), weight)
                ways = zip(bounds[below].tolist(), below.tolist(), weighing.tolist(), strict=True)
                after = rest[len(stack) + 1]
                stack.append(sorted((w for w in ways if not weights or w[2] + after <= most), reverse=True))
            while stack and not (stack[-1] and stack[-1][-1][0] < cutoff and visits > 0):
                stack.pop()
            if not stack:
                break
            bound, k, weight = stack[-1].pop()
            chosen[order[len(stack) - 1][0]] = k
            visits -= 1
        if kept or last < 0:
            self.follow(kept)
        return Least(kept, best, best if visits > 0 else self.bound - price * most)

    def follow(self, chosen: dict[Name, int]) -> None:
        """The best values of variables that were eliminated, given those of the ones left."""
        for name, groups in reversed(self.buckets):
            if name not in chosen:
                chosen[name] = int(np.argmin(_more(groups, chosen)))
        for name, size in self.sizes.items():
            if size == 1:
                chosen[name] = 0


def total(tables: Iterable[tuple[tuple[Name, ...], Table]], chosen: Mapping[Name, int]) -> float:
    return float(sum(t[tuple([chosen[n] for n in names])] for names, t in tables))


def by_variable(
    names: Iterable[Name], tables: Sequence[tuple[tuple[Name, ...], Table]]
) -> dict[Name, list[tuple[tuple[Name, ...], Table]]]:
    by: dict[Name, list[tuple[tuple[Name, ...], Table]]] = {n: [] for n in names}
    for scope, t in tables:
        for n in scope:
            by[n].append((scope, t))
    return by


def _more(groups: Sequence[Group], chosen: Mapping[Name, int]) -> Table:
    """What each value of a variable adds to the bound, given those chosen before."""
    more: Table = np.zeros(1)
    for g in groups:
        more = more + g.more[tuple([chosen[n] for n in g.others])]
    return more


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
    if names == axes:
        return table
    order = sorted(range(len(names)), key=lambda i: axes.index(names[i]))
    present = {names[i] for i in order}
    shape = iter(table.transpose(order).shape)
    return table.transpose(order).reshape([next(shape) if n in present else 1 for n in axes])
