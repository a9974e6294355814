"""Memory that messages take besides the tensors that they bring, as `run/collectives.py` packs and unpacks them.

    begin      several tensors are joined, 16 bits widened where they are added up, and what comes lies in one piece, a
               row for each rank; of this a result, which counts from here on, is a part or will be made
    finish     rows become results: columns of them, side by side, or their sum

On GPUs the network adds up what it scatters; elsewhere a rank gets the parts of all and adds them by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mycel.ir import Eqn, Type, Var
from mycel.ops import o
from mycel.ops.collective import together
from mycel.ops.narrow_products import HALVES


class MessageMemory(NamedTuple):
    """Bytes besides results: from the beginning to the end; beside these while it begins, and while it ends."""

    on_the_way: int = 0
    beginning: int = 0
    ending: int = 0


@dataclass(frozen=True)
class _Packed:
    """Tensors that travel together; `placed`: bytes of results that are written over inputs of the program; `turned`:
    bytes of those of which the part of a rank, or what comes of one, is no piece of memory."""

    sent: Sequence[Type]
    results: Sequence[Type]
    placed: int
    turned: int
    count: int
    kind: str
    is_gpu: bool

    @property
    def in_one_piece(self) -> int:
        """What is sent, where it is copied to lie in one piece."""
        return self.bytes if len(self.sent) > 1 or self.turned else 0

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.sent)

    @property
    def brought(self) -> int:
        return sum(t.bytes for t in self.results)

    @property
    def is_half(self) -> bool:
        return self.sent[0].dtype in HALVES


def message_memory(
    eqn: Eqn, results: Sequence[Var], is_gpu: bool, in_inputs: Collection[Var] = frozenset()
) -> MessageMemory:
    """Of a collective that is begun, or that is waited for where it begins."""
    params = eqn.params
    name = params["op"] if eqn.op is o.begin else eqn.op.name
    if name not in _TAKES or params["count"] == 1:
        return MessageMemory()
    tensors = list(eqn.vars)[: len(results)]
    dims = params.get("dims") or [params.get("dim", params.get("split", 0))] * len(tensors)
    way = begins = ends = passed = 0
    for own in together(name, [(v.dtype, v.type.bytes) for v in tensors], params["count"]):
        sent, brought = [tensors[i].type for i in own], [results[i] for i in own]
        placed = sum(v.type.bytes for v in brought if v in in_inputs)
        turned = sum(tensors[i].type.bytes for i in own if math.prod(tensors[i].shape[: dims[i]]) > 1)
        types, kind = [v.type for v in brought], params.get("kind", "+")
        each = _Packed(sent, types, placed, turned, params["count"], kind, is_gpu)
        carried, first, last = _TAKES[name](each)
        begins, way = max(begins, way + carried + first), way + carried
        ends, passed = max(ends, last - carried - passed), passed + carried  # one message ends after the other
    return MessageMemory(way, max(begins - way, 0), ends)


Takes = tuple[int, int, int]  # besides results: on the way; more while it begins; in all while it ends


def _sum(m: _Packed) -> Takes:
    if m.kind != "+":  # rows of all ranks are brought together and compared
        rows = (m.bytes if len(m.sent) > 1 else 0) + m.count * m.bytes
        return rows - m.brought, 0, rows + m.brought
    if m.is_half and m.count > 2 and not m.is_gpu:
        return m.bytes, m.bytes if len(m.sent) > 1 else 0, 2 * m.bytes
    return 0, 0, 0


def _gather(m: _Packed) -> Takes:
    copy = m.bytes if len(m.sent) > 1 else 0
    return copy, 0, copy + (m.brought - m.placed if len(m.sent) > 1 or m.turned else 0)


def _scatter(m: _Packed) -> Takes:
    rows = m.turned if len(m.sent) > 1 else 0
    if m.is_gpu and m.kind == "+":
        return m.in_one_piece, rows, m.in_one_piece
    adding = 3 * m.brought if m.is_half else 0 if m.kind == "+" else m.brought
    return m.in_one_piece + m.bytes - m.brought, max(rows - m.bytes, 0), m.in_one_piece + m.bytes + adding


def _exchange(m: _Packed) -> Takes:
    """Rows to ranks, as many from them."""
    return m.in_one_piece, 0, m.in_one_piece + (m.brought if m.in_one_piece else 0)


def _rows(m: _Packed) -> Takes:
    copy = m.bytes if len(m.sent) > 1 else 0
    way = copy + (0 if m.is_gpu else m.brought)
    return way, 0, way + (m.brought if copy else 0)


_TAKES: dict[str, Callable[[_Packed], Takes]] = {
    "all_reduce": _sum,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "exchange_chunks": _exchange,
    "gather_chunks": _rows,
}
