"""The ranks along some axes of a mesh, and the messages between them: over TCP (gloo) on the CPU, over NCCL on GPUs.

    sum(x)                        x of all added up, in place
    gather(out, x)                out[i] = x of rank i of the group
    exchange(out, x)              out[i] = x[me] of rank i;  with counts: so many elements from and to each,
                                  one behind the other
    scatter(out, x)               out = the sum of x[me] over all
                                  (where the network can: else an exchange, and a sum here)
    send(x, to, tag)              x of this rank, into the tensor that another one receives under the same tag; NCCL
    receive(out, source, tag)     knows no tags, and takes messages in their order (`channels.py`)

All tensors are contiguous.  A message is under way until its works have been waited for, and nothing may touch its
tensors until then.  Groups are made of torch's backends themselves, not by `new_group`: that sorts the ranks, where the
order of the axes has to be theirs.

Measured with gloo on loopback (2 and 4 ranks, 4 kB to 64 MB): `_allgather_base` and `_reduce_scatter_base` copy
everything once more, so broadcasts straight into the result take a third of the time at 64 MB and no more at 4 kB, an
exchange and a sum here take half; point-to-point messages are as fast as broadcasts, but every other time wait for the
next tick of the scheduler (4 ms).  Between hosts wires count, not copies: two pairs of ranks with 100 or 1000 Mbit/s
between them gather 8 MB with `_allgather_base`, a ring, in less than half of the time of broadcasts, of which each
crosses the wire up to three times; below 256 kB an exchange is there first.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

Works = list[dist.Work]
Tensor = torch.Tensor

NATIVE = {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
SHORT = {torch.float16, torch.bfloat16}
SMALL_BYTES = 1 << 18  # of all that is gathered


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are added up, so that they are rounded once."""
    if dtype in NATIVE or dtype in (torch.complex64, torch.complex128):
        return dtype
    if dtype.is_complex:
        return torch.complex64
    if dtype.is_floating_point:
        return torch.float32
    return torch.int32 if dtype.itemsize < 4 else torch.int64


class RankGroup:
    """Ranks by their index, with one of torch's backends between them."""

    scatters: bool  # is there a `scatter` worth its name?
    backend: Any  # of torch: its type does not list what it can do

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def adds(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which `sum` and `scatter` add values of a type."""
        raise NotImplementedError

    def gather(self, out: Tensor, x: Tensor) -> Works:
        raise NotImplementedError

    def gather_small(self, out: Tensor, x: Tensor) -> Works:
        """As `gather`, of what is worth a copy for each rank where that saves time on the wire."""
        return self.gather(out, x)

    def sum(self, x: Tensor) -> Works:
        # the default is the sum
        return [self.backend.allreduce([_real(x)], dist.AllreduceOptions())] if x.numel() else []

    def scatter(self, out: Tensor, x: Tensor) -> Works:
        return (
            [self.backend._reduce_scatter_base(_real(out), _real(x), dist.ReduceScatterOptions())] if x.numel() else []
        )

    def exchange(self, out: Tensor, x: Tensor, received: Sequence[int] = (), sent: Sequence[int] = ()) -> Works:
        """Counts are of elements; without them x and out have one part for each rank."""
        if not (received or x.numel()):
            return []
        size = x.element_size()
        return [
            self.backend.alltoall_base(_bytes(out), _bytes(x), [n * size for n in received], [n * size for n in sent])
        ]

    def send(self, x: Tensor, to: int, tag: int) -> Works:
        return [self.backend.send([_bytes(x)], to, tag)] if x.numel() else []

    def receive(self, out: Tensor, source: int, tag: int) -> Works:
        return [self.backend.recv([_bytes(out)], source, tag)] if out.numel() else []


class Gloo(RankGroup):
    """Processes that speak over TCP, each from its own address; without one, from the one that gloo chooses.  `apart`:
    are they on several hosts?"""

    scatters = False

    def __init__(
        self, store: dist.Store, index: int, count: int, address: str, timeout: timedelta, apart: bool = False
    ) -> None:
        super().__init__(index, count)
        self.apart = apart and count > 2  # one message to each other is all that two can do
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address) if address else gloo.create_default_device()]
        options._timeout = timeout
        self.backend = gloo(store, index, count, options)

    def adds(self, dtype: torch.dtype) -> torch.dtype:
        # gloo rounds after every addition: between two ranks there is only one
        return dtype if dtype in SHORT and self.count == 2 else wide(dtype)

    def gather(self, out: Tensor, x: Tensor) -> Works:
        if not x.numel():
            return []
        if self.apart and out.nbytes < SMALL_BYTES:
            return self.gather_small(out, x)
        if self.apart:
            return [self.backend._allgather_base(_bytes(out), _bytes(x))]
        out[self.index].copy_(x)
        return [self._broadcast(_bytes(row), i) for i, row in enumerate(out)]

    def gather_small(self, out: Tensor, x: Tensor) -> Works:
        # to each directly: a broadcast's root sends all of it twice before the last has it
        return self.exchange(out, x.expand(self.count, -1).contiguous())

    def _broadcast(self, x: Tensor, root: int) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self.backend.broadcast([x], options)


class Nccl(RankGroup):
    """GPUs."""

    scatters = True

    def __init__(self, store: dist.Store, index: int, count: int, timeout: timedelta) -> None:
        super().__init__(index, count)
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        self.backend = nccl(store, index, count, options)

    def adds(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in SHORT else wide(dtype)

    def gather(self, out: Tensor, x: Tensor) -> Works:
        return [self.backend._allgather_base(_bytes(out), _bytes(x))] if x.numel() else []


def _bytes(x: Tensor) -> Tensor:
    """The same memory as bytes: what only moves needs no type that the network knows."""
    return x.view(-1).view(torch.uint8)


def _real(x: Tensor) -> Tensor:
    """The same memory, complex numbers as pairs, in one dim."""
    return (torch.view_as_real(x) if x.is_complex() else x).view(-1)
