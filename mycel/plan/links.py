"""What messages cost: the seconds of a collective over axes of a mesh, and the bytes each rank sends.

What a collective sends, and in how many steps, its paragraph says (`ops/collective.py`).

    seconds = bytes sent / bytes a second + steps · start      by level, and where it was measured (`fitted`)
                                                               by collective and number of ranks too

A *level* is one kind of wire (inside a host, between hosts).  Each axis of a mesh lies in one level; axes of the same
level share its wire.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mycel.ir import OPS, Axes, Eqn, Mesh
from mycel.ops import o
from mycel.ops.collective import ALONE_BYTES


@dataclass(frozen=True)
class Link:
    """One level: bytes a second that a rank sends, and seconds to start one message.

    ranks     the largest group of consecutive ranks that it joins
    busy      the share of a message's seconds in which the device cannot compute beside it
    measured  (collective, ranks, bytes a second, seconds to start), where these differ: groups of two from each of two
              hosts share the wire between them, where a ring of four crosses it once each way"""

    bytes_s: float
    start_s: float
    name: str = "network"
    ranks: int = 1 << 30
    busy: float = 0.0
    measured: tuple[tuple[str, int, float, float], ...] = ()

    def seconds(self, name: str, k: int, local_bytes: float) -> float:
        """One collective between k ranks, each of which puts `local_bytes` in."""
        bytes_s, start_s = self._rate(name, k)
        return sent(name, k, local_bytes) / bytes_s + _steps(name, k) * start_s

    def _rate(self, name: str, k: int) -> tuple[float, float]:
        """(bytes a second, seconds to start), measured between that many ranks or nearly so many."""
        of_name = [x for x in self.measured if x[0] == name]
        if not of_name:
            return self.bytes_s, self.start_s
        _, _, bytes_s, start_s = min(of_name, key=lambda x: (abs(math.log(x[1] / k)), x[1]))  # of two as far, the fewer
        return bytes_s, start_s

    def data(self) -> list[float] | dict[str, Any]:
        """As a plan writes it: [bytes a second, seconds to start], or all of it, where more is known."""
        if self == Link(self.bytes_s, self.start_s):
            return [self.bytes_s, self.start_s]
        measured: dict[str, list[list[float]]] = {}
        for name, *numbers in sorted(self.measured):
            measured.setdefault(name, []).append(list(numbers))
        return {**vars(self), "measured": measured}

    @staticmethod
    def read(data: Any) -> Link:
        if not isinstance(data, Mapping):
            bytes_s, start_s = data
            return Link(float(bytes_s), float(start_s))
        measured = tuple(
            (name, int(k), float(bytes_s), float(start_s))
            for name, rows in data["measured"].items()
            for k, bytes_s, start_s in rows
        )
        return Link(**{**data, "measured": measured})


CPU_LINK = Link(1e9, 100e-6)
GPU_LINK = Link(150e9, 10e-6)
FREE_BYTES_S = 1e15  # messages that take no time to see


@dataclass(frozen=True)
class Links:
    """The links of a mesh; axes not named have the one of `other`."""

    mesh: Mesh
    other: Link = GPU_LINK
    named: Mapping[str, Link] = field(default_factory=dict)
    _of: dict[Axes, Link] = field(default_factory=dict, repr=False, compare=False)

    def of(self, axes: Axes) -> Link:
        """The slowest link among some axes; each message starts as late as on the latest."""
        if axes not in self._of:
            links = [self.named.get(a, self.other) for a in axes]
            self._of[axes] = replace(min(links, key=lambda x: x.bytes_s), start_s=max(x.start_s for x in links))
        return self._of[axes]

    def seconds(self, name: str, axes: Axes, local_bytes: float) -> float:
        """One collective; `local_bytes` is what a rank puts in."""
        return self.of(axes).seconds(name, self.mesh.count(axes), local_bytes) if axes else 0.0

    @property
    def levels(self) -> tuple[str, ...]:
        """The wires, each once."""
        return tuple(dict.fromkeys(self.of((axis,)).name for axis in self.mesh.axes))


def fitted(name: str, ranks: int, busy: float, messages: Mapping[str, Sequence[Sequence[float]]]) -> Link:
    """The level of what was measured: by collective (ranks, bytes each puts in, seconds)."""
    measured = tuple(
        (op, k, *_fit(op, [p for p in points if int(p[0]) == k]))
        for op, points in sorted(messages.items())
        for k in sorted({int(p[0]) for p in points})
    )
    *_, bytes_s, start_s = max((x for x in measured if x[0] == "all_reduce"), default=measured[-1])
    return Link(bytes_s, start_s, name, ranks, busy, measured)


def _fit(name: str, points: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(bytes a second, seconds to start): of the lines through two of the points, or with one of the two numbers alone
    through one, that to which the points lie nearest by ratio.

    A point that is wrong bends nothing: none counts for more than a factor of two, of lines as near that through the
    larger message is taken, and messages that took no time to see (0) say nothing."""
    seen = sorted((p for p in points if p[2] > 0), key=lambda p: -p[1])
    if not seen:
        return FREE_BYTES_S, 0.0
    rows = np.array([[sent(name, int(k), size), _steps(name, int(k))] for k, size, _ in seen], dtype=float)
    seconds = np.array([s for *_, s in seen], dtype=float)
    lines = [np.array([s / row[0], 0.0]) for row, s in zip(rows, seconds, strict=True)]
    lines += [np.array([0.0, s / row[1]]) for row, s in zip(rows, seconds, strict=True)]
    for pair in itertools.combinations(range(len(seen)), 2):
        if np.linalg.matrix_rank(rows[list(pair)]) == 2:
            lines.append(np.linalg.solve(rows[list(pair)], seconds[list(pair)]))
    lines = [line for line in lines if line.min() >= 0]
    away = [np.minimum(np.abs(np.log(rows @ line / seconds)), math.log(2)).sum() for line in lines]
    by_byte, start_s = lines[int(np.argmin(np.round(away, 9)))]
    return min(1 / max(float(by_byte), 1e-30), FREE_BYTES_S), float(start_s)


def sent(name: str, k: int, local_bytes: float) -> float:
    """Bytes that each of k ranks puts on the wire when it puts `local_bytes` in."""
    collective = OPS[name].collective if name else None
    return collective.sent(k) * local_bytes if collective is not None and k > 1 else 0.0


def _steps(name: str, k: int) -> int:
    """Messages that wait for each other."""
    collective = OPS[name].collective if name else None
    return collective.steps(k) if collective is not None and k > 1 else 0


def message(eqn: Eqn) -> tuple[str, Axes, float]:
    """The collective that an equation sends, its axes, and the bytes each rank puts in; "" for none."""
    op = OPS[eqn.params["op"]] if eqn.op is o.begin else eqn.op
    if op.collective is None:
        return "", (), 0.0
    size = sum(v.type.bytes for v in eqn.vars)
    if op.collective.counted:
        x = next(iter(eqn.vars))
        size = min(size, x.type.bytes // max(x.shape[0], 1) * eqn.params["rows"])
    return op.name, eqn.params["axes"], float(size)


def packed_bytes(eqn: Eqn) -> float:
    """What the beginning or the end of a collective copies, since several tensors travel in one message: a scatter what
    it sends, a gather what has come; the copy that a sum is made in was measured with it."""
    op, tensors = eqn.params["op"], eqn.outputs if eqn.op is o.finish else eqn.vars
    if op != ("all_gather" if eqn.op is o.finish else "reduce_scatter") or len(eqn.params["dims"]) == 1:
        return 0.0
    return float(sum(v.type.bytes for v in tensors if v.type.bytes < ALONE_BYTES))


def sent_by(eqn: Eqn) -> tuple[Axes, float]:
    """The axes and bytes on the wire of one execution of an equation, each rank's."""
    name, axes, size = message(eqn)
    return axes, sent(name, eqn.params["count"], size) if name else 0.0
