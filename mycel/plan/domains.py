"""What one equation can do with all axes of a mesh together: a label for each, and how its operands and results then
lie.

    y = linear(x, w)  on Mesh(dp=2, tp=4):      (rows, n)   (rows, k)   (rows, rows) as dp.tp and as tp.dp   (same, n) …

Values are the products of the labels of single axes (`choices.py`) that are possible together; where several axes split
one letter, each order is a value of its own.  Layouts are numbers in the space of all layouts (`distances.py`), so that
tables of costs are looked up for all values at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mycel.ir import Axes, Eqn, Mesh, part
from mycel.plan.choices import WHOLE, Label, Options
from mycel.plan.distances import Indices, Space, Table

# what messages inside take: (seconds to start them, seconds on the wire)
Price = Callable[[Eqn, Label, Axes], tuple[float, float]]


class Domain:
    """The values of one equation: `labels[i]` are those of value i, by axis, and `orders[i]` the number of the order of
    axes."""

    def __init__(
        self, options: Options, mesh: Mesh, single: Mapping[str, Sequence[Label]], fixed: Mapping[str, Axes]
    ) -> None:
        """`single`: the labels of each axis by itself; `fixed`: letters whose axes the user gives."""
        self.options, self.mesh = options, mesh
        self.axes = tuple(single)
        self.single: tuple[Sequence[Label], ...] = tuple(single.values())
        self.picks: list[tuple[int, ...]] = []  # for each value, by axis: the number of the label in `single`
        self.orders: list[int] = []
        self.letters: list[dict[str, Axes]] = []  # what is split
        self._layouts: dict[tuple[int, int], Indices] = {}
        for pick in itertools.product(*(range(len(labels)) for labels in self.single)):
            for letters, order in self._together(
                [labels[i] for labels, i in zip(self.single, pick, strict=True)], fixed
            ):
                self.picks.append(pick)
                self.orders.append(order)
                self.letters.append(letters)

    @classmethod
    def of_one(cls, options: Options, mesh: Mesh, labels: Mapping[str, Label], letters: dict[str, Axes]) -> Domain:
        """A single value, taken as it is: what a solver found, or a region fixes, in whatever order of axes."""
        domain = cls(options, mesh, dict.fromkeys(labels, ()), {})
        domain.single = tuple([label] for label in labels.values())
        domain.picks, domain.orders, domain.letters = [(0,) * len(labels)], [0], [letters]
        return domain

    def __len__(self) -> int:
        return len(self.picks)

    def label(self, value: int, axis: int) -> Label:
        return self.single[axis][self.picks[value][axis]]

    def _together(self, labels: Sequence[Label], fixed: Mapping[str, Axes]) -> list[tuple[dict[str, Axes], int]]:
        """What labels for all axes split, once for each order of axes that matters, with its number; nothing where they
        are not possible together."""
        axes = self.axes
        words = [label.letter.split() for label in labels]
        used = [k for word in words for k in word]
        if len(used) == len(set(used)):
            return [({k: (axis,) for axis, word in zip(axes, words, strict=True) for k in word}, 0)]
        if not self._possible(labels, fixed):
            return []
        by_split: dict[tuple[Any, ...], tuple[dict[str, Axes], int]] = {}
        for number, order in enumerate(itertools.permutations(range(len(axes)))):
            letters: dict[str, Axes] = {}
            for i in order:
                letters.update((k, (*letters.get(k, ()), axes[i])) for k in words[i])
            if all(letters.get(k, over) == over for k, over in fixed.items()):
                by_split.setdefault(
                    tuple(letters.items() if len(letters) == 1 else sorted(letters.items())), (letters, number)
                )
        return list(by_split.values())

    def _possible(self, labels: Sequence[Label], fixed: Mapping[str, Axes]) -> bool:
        before: dict[str, Axes] = {}
        for axis, label in zip(self.axes, labels, strict=True):
            word = label.letter.split()
            if any(axis not in fixed.get(k, (axis,)) for k in word):
                return False
            if (
                not any(k in fixed for k in word)
                and label.letter
                and label not in self.options.labels(self.mesh, axis, before, word)
            ):
                return False
            before.update((k, (*before.get(k, ()), axis)) for k in word)
        return True

    def layouts(self, side: int, i: int, space: Space) -> Indices:
        """The layout of operand (side 0) or result (side 1) i under each value, as a number in its space."""
        if (side, i) not in self._layouts:
            picks = np.array(self.picks, np.int64).reshape(len(self), len(self.single))
            places = []
            for a, labels in enumerate(self.single):
                where = np.array([self.options.places(label)[side].get(i, WHOLE) for label in labels], np.int64)
                places.append(where[picks[:, a]])
            self._layouts[side, i] = space.number[(*places, np.array(self.orders, np.int64))]
        return self._layouts[side, i]

    def shares(self) -> Table:
        """The part of the work that is left to a rank under each value."""
        sizes = self.options.fit.sizes if self.options.fit is not None else {}
        fractions = np.ones(len(self))
        for i, letters in enumerate(self.letters):
            seen: set[str] = set()
            for a in range(len(self.single)):
                word = self.label(i, a).letter.split()
                # letters split together by a rule: every rank goes through all of the others
                if word and word[0] not in seen:
                    seen.add(word[0])
                    n = sizes[word[0]]
                    fractions[i] *= part(n, letters[word[0]], self.mesh) / n
        return fractions

    def messages(self, eqn: Eqn, price: Price) -> Table:
        """Seconds that messages inside the equation take under each value: what one label sends is less by what the
        others split."""
        seconds = np.zeros(len(self))
        shares = self.shares()
        for i in range(len(self)):
            over: dict[Label, Axes] = {}
            for a, axis in enumerate(self.axes):
                label = self.label(i, a)
                if label.letter and not self._is_plain(label, axis):
                    over[label] = (*over.get(label, ()), axis)
            for label, axes in over.items():
                start_s, wire_s = price(eqn, label, axes)
                first = label.letter.split()[0]
                n = self.options.fit.sizes[first]  # type: ignore[union-attr]
                seconds[i] += start_s + wire_s * shares[i] * n / part(n, axes, self.mesh)
        return seconds

    def _is_plain(self, label: Label, axis: str) -> bool:
        letters = dict.fromkeys(label.letter.split(), (axis,))
        return all(k in self.options.plain and self.options.rule(letters, k) is None for k in letters)
