"""Tensors outside of the code that share memory: a buffer that is a part of another, a parameter and what was detached
from it.

    self.register_buffer("queue", torch.zeros(64, 8))           queue: f32[64,8] = state queue
    self.newest = self.queue[0]                                 newest = strided(reshape(queue), shape=(8,), …)

As long as none of them is written, each is an input of its own.  Where one is, the code is captured again with what
lies inside of another tensor as a view of that one (`Cell`): what is written into either shows in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from mycel.capture.alias import Cell
from mycel.capture.locations import Location
from mycel.ir import Builder, Var
from mycel.ops import o

LARGEST = 1 << 26  # elements that are looked at one by one


@dataclass(frozen=True)
class Inside:
    """A tensor that lies in the memory of another one: where both are found, and how it lies there."""

    part: Location
    whole: Location
    lies: tuple[object, ...]

    def holds(self) -> bool:
        """Does it still lie there as it did?"""
        return self.lies == lies_in(self.part.read(), self.whole.read())


class SharedMemory:
    """Which tensors share memory, among those that the code reaches."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._held: dict[int, list[torch.Tensor]] = {}
        for x in filter(_has_memory, tensors):
            self._held.setdefault(x.untyped_storage()._cdata, []).append(x)

    def others(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All tensors that hold elements of x, or of those that do, but x."""
        held = self._held.get(x.untyped_storage()._cdata, []) if self._held and _has_memory(x) else []
        seen, ends = {id(x)}, [x]
        while ends:
            end = ends.pop()
            near = [y for y in held if id(y) not in seen and overlap(end, y)]
            seen.update(map(id, near))
            ends += near
        return [y for y in held if id(y) in seen and y is not x]

    def whole(self, x: torch.Tensor) -> torch.Tensor | None:
        """The tensor in whose memory x and all that share memory with it lie, a parameter if there is one; None: no
        such tensor is reached, or another of them is a parameter, whose gradient would be that of a part."""
        together = {id(y): y for y in (x, *self.others(x))}
        known = [y for y in self._held[x.untyped_storage()._cdata] if id(y) in together]  # in the same order for all
        parameters = [y for y in together.values() if isinstance(y, torch.nn.Parameter) or y.requires_grad]
        for whole in parameters or sorted(known, key=torch.Tensor.numel, reverse=True):
            if len(parameters) < 2 and is_dense(whole) and all(is_inside(y, whole) for y in together.values()):
                return whole
        return None


def part_of(cell: Cell, whole: torch.Tensor, part: torch.Tensor) -> Cell:
    """The cell of what lies inside of another tensor, as a view of its cell: how it is read, first wherever that is."""
    source = Var("whole", cell.var.type)
    with Builder() as builder:
        order = sorted(range(whole.ndim), key=lambda d: (-int(whole.stride()[d]), d))
        value: Var = o.stop_gradient(source)
        value = o.permute(value, dims=tuple(order)) if order != [*range(whole.ndim)] else value
        value = o.reshape(value, shape=(whole.numel(),)) if whole.ndim != 1 else value
        offset = part.storage_offset() - whole.storage_offset()
        value = o.strided(value, shape=tuple(part.shape), stride=tuple(part.stride()), offset=offset)
    for eqn in builder.eqns:
        cell = Cell(eqn.outputs[0], cell, eqn)
        cell.seen, cell.home = -1, None
    return cell


def lies_in(part: torch.Tensor, whole: torch.Tensor) -> tuple[object, ...]:
    """How a tensor lies in the memory of another one."""
    shares = part.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return shares, part.storage_offset() - whole.storage_offset(), part.stride(), whole.stride()


def is_inside(x: torch.Tensor, whole: torch.Tensor) -> bool:
    """Are all elements of x elements of a dense tensor?"""
    (first, last), (low, high) = _reach(x), _reach(whole)
    return x.dtype == whole.dtype and low <= first and last <= high


def is_dense(x: torch.Tensor) -> bool:
    """Does it hold each element between its first and its last once?"""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(x)) if x.numel() > 1 else True


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Is an element of one an element of the other?  Both lie in one storage."""
    (first, last), (low, high) = (_bytes(z) for z in (x, y))
    if last < low or high < first:
        return False
    start, size = min(first, low), x.element_size()
    length = (max(last, high) + 1 - start) // size
    if (is_dense(x) and is_dense(y)) or x.element_size() != y.element_size() or length > LARGEST:
        return True
    is_held = torch.zeros(length, dtype=torch.bool)
    is_held.as_strided(x.shape, x.stride(), (first - start) // size).fill_(True)
    return bool(is_held.as_strided(y.shape, y.stride(), (low - start) // size).any())


def _reach(x: torch.Tensor) -> tuple[int, int]:
    """The places of its first and its last element in the storage."""
    first = int(x.storage_offset())
    return first, first + sum((int(n) - 1) * int(s) for n, s in zip(x.shape, x.stride(), strict=True))


def _bytes(x: torch.Tensor) -> tuple[int, int]:
    first, last = _reach(x)
    return first * x.element_size(), (last + 1) * x.element_size() - 1


def _has_memory(x: torch.Tensor) -> bool:
    plain = type(x) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and x.layout is torch.strided and not x.is_quantized and not is_lazy(x) and x.numel() > 0
