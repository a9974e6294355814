"""The least sum of tables: choose a value for each variable so that a sum of tables, each over a few of them, is least.

    min over x, y, z of  a[x] + b[y] + c[x, y] + d[y, z]

Variables are eliminated one after another, those with the smallest resulting table first:  e[y] = min over x of (a[x] + c[x, y]).  This is exact.
Where the table would become too large, the variable with the most neighbours is fixed first, to the value that looks best with each neighbour at its
best: then the answer is only good, and is improved: neighbourhoods are solved anew, all else as it is, until nothing helps.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LARGEST = 1 << 16  # elements of a table
BALL, BALLS = 40, 12  # variables that are improved together; how many such sets are tried

Name = Hashable
Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Sum:
    """Variables with their numbers of values, and tables over them."""

    sizes: dict[Name, int] = field(default_factory=dict)
    tables: list[tuple[tuple[Name, ...], Table]] = field(default_factory=list)

    def add(self, names: Sequence[Name], table: Any) -> None:
        self.tables.append((tuple(names), np.asarray(table, np.float64)))

    def value(self, chosen: dict[Name, int]) -> float:
        return float(sum(t[tuple(chosen[n] for n in names)] for names, t in self.tables))

    def least(self) -> tuple[dict[Name, int], bool]:
        """(a value for each variable, whether it is sure to be the best)"""
        state = _Elimination(self)
        exact = state.run()
        chosen = state.back()
        if not exact:
            by: dict[Name, list[tuple[tuple[Name, ...], Table]]] = {n: [] for n in self.sizes}
            for names, t in self.tables:
                for n in names:
                    by[n].append((names, t))
            while self._improve_balls(chosen, by):
                pass
            self._improve(chosen, by)
        return chosen, exact

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
            state = _Elimination(part)
            state.run()
            new = state.back()
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


class _Elimination:
    def __init__(self, problem: Sum) -> None:
        self.sizes = problem.sizes
        self.tables: dict[int, tuple[tuple[Name, ...], Table]] = {}
        self.of: dict[Name, set[int]] = {n: set() for n in problem.sizes}
        self.done: list[tuple[Name, tuple[Name, ...], Table]] = []  # a variable, what it depends on, its costs (last dim the variable)
        self.next = 0
        for names, t in problem.tables:
            self.put(names, t)

    def put(self, names: tuple[Name, ...], table: Table) -> None:
        free = [i for i, n in enumerate(names) if self.sizes[n] > 1]  # where there is no choice there is nothing to decide
        if len(free) < len(names):
            names, table = tuple(names[i] for i in free), table.reshape([table.shape[i] for i in free])
        if names:
            self.tables[self.next] = (names, table)
            for n in names:
                self.of[n].add(self.next)
            self.next += 1

    def take(self, name: Name) -> list[tuple[tuple[Name, ...], Table]]:
        """The tables over a variable, removed."""
        found = []
        for key in sorted(self.of[name]):
            names, t = self.tables.pop(key)
            for n in names:
                self.of[n].discard(key)
            found.append((names, t))
        return found

    def neighbours(self, name: Name) -> list[Name]:
        return list(dict.fromkeys(n for key in sorted(self.of[name]) for n in self.tables[key][0] if n != name))

    def size_without(self, name: Name) -> int:
        size = self.sizes[name]
        for n in self.neighbours(name):
            size *= self.sizes[n]
        return size

    def run(self) -> bool:
        exact = True
        left = {n: self.size_without(n) for n in self.sizes}
        count = itertools.count()
        heap = [(size, next(count), n) for n, size in left.items()]
        heapq.heapify(heap)
        while left:
            size, _, name = heap[0]
            if left.get(name) != size:  # it has changed since
                heapq.heappop(heap)
                continue
            touched = self.neighbours(name)
            if left[name] <= LARGEST:
                self.eliminate(name, touched)
            else:
                exact = False
                name = max(left, key=lambda n: len(self.neighbours(n)))
                touched = self.neighbours(name)
                self.fix(name)
            del left[name]
            for n in touched:
                if left[n] != (size := self.size_without(n)):
                    left[n] = size
                    heapq.heappush(heap, (size, next(count), n))
        return exact

    def eliminate(self, name: Name, others: list[Name]) -> None:
        axes = (*others, name)
        total = np.zeros([self.sizes[n] for n in axes])
        for names, t in self.take(name):
            total = total + _aligned(names, t, axes)
        self.done.append((name, tuple(others), total))
        self.put(tuple(others), total.min(-1))

    def fix(self, name: Name) -> None:
        """To the value that is best if each neighbour does its best for it."""
        costs, rest = np.zeros(self.sizes[name]), self.take(name)
        for names, t in rest:
            own = t
            for i, n in enumerate(names):
                if n != name:
                    for key in self.of[n]:
                        if self.tables[key][0] == (n,):
                            own = own + self.tables[key][1].reshape([-1 if j == i else 1 for j in range(len(names))])
            costs = costs + own.min(tuple(i for i, n in enumerate(names) if n != name))
        best = int(np.argmin(costs))
        self.done.append((name, (), np.where(np.arange(self.sizes[name]) == best, 0.0, np.inf)))
        for names, t in rest:
            self.put(tuple(n for n in names if n != name), t[tuple(best if n == name else slice(None) for n in names)])

    def back(self) -> dict[Name, int]:
        chosen: dict[Name, int] = {}
        for name, others, total in reversed(self.done):
            chosen[name] = int(np.argmin(total[tuple(chosen[n] for n in others)]))
        return chosen


def _aligned(names: tuple[Name, ...], table: Table, axes: tuple[Name, ...]) -> Table:
    """A table over some variables as one over `axes`, to be broadcast."""
    order = sorted(range(len(names)), key=lambda i: axes.index(names[i]))
    present = {names[i] for i in order}
    shape = iter(table.transpose(order).shape)
    return table.transpose(order).reshape([next(shape) if n in present else 1 for n in axes])
