"""The communicator of real ranks: one process each, over torch.distributed (gloo on the CPU, NCCL on GPUs).

    ranks = world(mesh)                                           from the environment of torchrun or `mycel.launch`
    ranks.agree({"plan": text, "code": code_version()})           refused on all ranks if it is not the same on all
    y = ranks.all_reduce(x, ("dp",), "+")                         as in `ops/collective.py`: split and joined by the
                                                                  index along the axes
    p = ranks.start("all_gather", [a, b], axes=("dp",), dim=0)    the same without waiting,
    a, b = ranks.wait(p)                                          several tensors in one message
    ranks.start_send([x], ("pp",), 1, tag=3)                      from one rank to another, told apart by tags
    part = ranks.within(Mesh(dp=2), [2, 3])                       some of the ranks, as a mesh of their own

Tensors that are given are never changed; where nothing is to be done, they are what comes back.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch import distributed as dist

from mycel.errors import PlanError, RunError
from mycel.ir import Axes, Mesh, Program
from mycel.run.channels import Channel, Pair, pairs_of
from mycel.run.collectives import Messages, TransferPiece, begin, box_of, buckets, finish
from mycel.run.crossed_waits import Turn
from mycel.run.groups import Gloo, Nccl, RankGroup, Works
from mycel.run.host_space import available
from mycel.run.rendezvous import LATER_S, Rendezvous, Seat, code_version, is_loopback, seat
from mycel.run.shared_calls import SharedCalls
from mycel.run.watch import PendingCollective, Watch

__all__ = ["Pending", "Processes", "code_version", "world"]

Tensor = torch.Tensor
CHANNELS = {"cuda"}  # devices whose messages have no tags: each pair of ranks has a channel for each direction
# who sends it, who receives it, where it begins in the part of each, its shape (ops/across.py)
Piece = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass
class Pending:
    """A collective under way: its results so far, and for each bucket the tensors' positions, the messages, and what is
    left to do."""

    results: list[Tensor]
    flights: list[tuple[list[int], Works, Messages]]
    place: PendingCollective | None = None


@dataclass
class PendingTransfer:
    """Tensors on their way to other ranks, or from them; `pieces`: of tensors between meshes, those of this rank."""

    tensors: list[Tensor]
    works: Works
    what: str
    at: str
    peers: tuple[int, ...]
    turns: tuple[Turn, ...]
    pieces: Sequence[Piece] = ()


class Processes:
    """Speaks to the other ranks of a mesh.  `at`: the user's source line that the next collectives stand for, told when
    one does not end.  `world`: of some of the ranks (`within`), all of them; `numbers`: theirs in the world."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int = 0,
        device: torch.device | None = None,
        meeting: Rendezvous | None = None,
        world: Processes | None = None,
        numbers: Sequence[int] = (),
    ) -> None:
        self.mesh, self.rank, self.device, self.at = mesh, rank, device or torch.device("cpu"), ""
        self.groups: dict[tuple[Axes, str], RankGroup] = {}
        self.calls: SharedCalls = world.calls if world is not None else SharedCalls(meeting)
        self.channels: dict[Pair, Channel] = {}  # of the world, where pairs have one each
        self.meeting, self.world, self.numbers = meeting, world or self, tuple(numbers) or tuple(range(mesh.world))
        self.owner, self.host_bytes = os.getpid(), available()
        own = Watch(meeting) if meeting is not None and world is None else None
        self.watch: Watch | None = world.watch if world is not None else own
        if world is None:
            atexit.register(self._exit)

    def within(self, mesh: Mesh, numbers: Sequence[int]) -> Processes:
        """This rank among some of all, which are a mesh of their own; all ranks call it, each for those it is one of:
        from now on they can send each other single messages too."""
        if self.meeting is not None and self.device.type not in CHANNELS:
            self._peers(self.mesh.axes, self.rank, sends=True)
        return Processes(mesh, numbers.index(self.rank), self.device, self.meeting, self, numbers)

    def index(self, axes: Axes) -> int:
        """This rank's place along the axes, the first the slowest."""
        return self.mesh.index(self.rank, axes)

    def all_reduce(self, x: Tensor, axes: Axes, kind: str = "+", at: str = "") -> Tensor:
        """The sum (+), maximum (>) or minimum (<) over the ranks along the axes."""
        return self.wait(self.start("all_reduce", [x], axes=axes, at=at, kind=kind))[0]

    def all_gather(self, x: Tensor, axes: Axes, dim: int, at: str = "") -> Tensor:
        """What all have, joined along a dim."""
        return self.wait(self.start("all_gather", [x], axes=axes, at=at, dim=dim))[0]

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int, kind: str = "+", at: str = "") -> Tensor:
        """This rank's part along a dim of the sum, maximum or minimum."""
        return self.wait(self.start("reduce_scatter", [x], axes=axes, at=at, dim=dim, kind=kind))[0]

    def all_to_all(self, x: Tensor, axes: Axes, split: int, join: int, at: str = "") -> Tensor:
        """Part i of dim `split` to index i; what comes in joined along `join`."""
        return self.wait(self.start("all_to_all", [x], axes=axes, at=at, split=split, join=join))[0]

    def exchange_chunks(self, x: Tensor, axes: Axes, at: str = "") -> Tensor:
        """Row i to index i, and from it."""
        return self.wait(self.start("exchange_chunks", [x], axes=axes, at=at))[0]

    def gather_chunks(self, x: Tensor, axes: Axes, at: str = "") -> Tensor:
        """The rows of all."""
        return self.wait(self.start("gather_chunks", [x], axes=axes, at=at))[0]

    def permute(self, x: Tensor, axes: Axes, to: Sequence[int], at: str = "") -> Tensor:
        """From index i to index to[i], -1: to nobody; zeros where nothing comes."""
        return self.wait(self.start("permute", [x], axes=axes, at=at, to=tuple(to)))[0]

    def exchange_rows(self, x: Tensor, sent: Tensor, got: Tensor, axes: Axes, rows: int, at: str = "") -> Tensor:
        """To each rank its rows of x; `sent` and `got` say how many, for each rank."""
        counts = {"sent": sent.tolist(), "got": got.tolist()}
        return self.wait(self.start("exchange_rows", [x], axes=axes, at=at, rows=rows, **counts))[0]

    def exchange(self, x: Tensor, pieces: Sequence[TransferPiece], shape: Sequence[int], at: str = "") -> Tensor:
        """From the part of a tensor on one mesh to the part on another, of this shape: pieces go from rank to rank of
        the world (plan/across.py).

        All ranks call it; who has no part of the first gives an empty tensor, who has none of the second gets zeros."""
        return self.wait(self.start("exchange", [x], axes=self.mesh.axes, at=at, pieces=pieces, shape=tuple(shape)))[0]

    def start(self, name: str, xs: Sequence[Tensor], *, axes: Axes, at: str = "", **how: Any) -> Pending:
        """Begin a collective on several tensors; all ranks along the axes begin the same ones in the same order.

        A `dim` is one for all of them, or a list with one for each."""
        axes = tuple(a for a in axes if self.mesh[a] > 1)
        if not axes:
            return Pending([torch.zeros_like(x) for x in xs] if name == "permute" and how["to"][0] else list(xs), [])
        watch, ranks, over = self._watch(), self._members(axes), ".".join(axes)
        self.calls.begin(watch, ranks, at or self.at)
        turn = watch.begin(f"over {over} of {ranks[0]}-{ranks[-1]}", ranks)
        place = watch.enter(f"{name} over {over}", at or self.at, ranks, [turn], name)
        flights = []
        for bucket, args in buckets(name, xs, self.mesh.count(axes), how):
            group = self._group(axes, xs[bucket[0]].device.type, place)
            messages = begin(group, name, [xs[i] for i in bucket], args)
            try:
                flights.append((bucket, next(messages), messages))
            except dist.DistError as e:
                raise watch.explain(place, e) from e
        return Pending(list(xs), flights, place)

    def calling(self, what: str, often: bool = False) -> AbstractContextManager[None]:
        """What the user calls, which all ranks begin together."""
        return self.calls.calling(what, often)

    def wait(self, pending: Pending, places: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """What the collective brought; a second call brings the same.  `places`: where results of a gather are wanted,
        instead of in memory of their own."""
        if pending.place is None:
            return pending.results
        watch = self._watch()
        pending.place.hold()
        for bucket, works, messages in pending.flights:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as e:
                raise watch.explain(pending.place, e) from e
            for i, y in zip(bucket, finish(messages, [places[i] for i in bucket] if places else None), strict=True):
                pending.results[i] = y
        watch.leave(pending.place, _reached() if pending.results and pending.results[0].is_cuda else None)
        pending.flights, pending.place = [], None
        return pending.results

    # -- from one rank to another

    def connect(self, program: Program) -> None:
        """Before a program's first message: where pairs of ranks have a channel each, they are made, by all ranks."""
        if self.meeting is None or self.device.type not in CHANNELS:
            return
        for pair in pairs_of(program, self.world.rank, self._members):
            if pair not in self.world.channels:
                self.world.channels[pair] = self._channel(pair)

    def _channel(self, pair: Pair) -> Channel:
        """From one rank to another; with its first message, which makes a communicator."""
        source, target = pair
        turn = self._watch().begin(f"first from {source} to {target}", pair)
        place = self._watch().enter(f"the first message from rank {source} to rank {target}", self.at, pair, [turn])
        place.hold()
        try:
            key = f"{self.device.type}/from {source} to {target}"
            channel = Channel(self._joined(key, self.device.type, pair.index(self.world.rank), 2))
            first = torch.zeros(1, dtype=torch.uint8, device=self.device)
            for work in channel.send(first) if self.world.rank == source else channel.receive(first):
                work.wait()
        except RuntimeError as e:
            raise self._watch().explain(place, e) from e
        self._watch().leave(place)
        return channel

    def start_send(self, xs: Sequence[Tensor], axes: Axes, to: int, tag: int) -> PendingTransfer:
        """Begin to send tensors to the rank with an index along the axes, under tags from this one on."""
        link, peer = self._peers(axes, to, sends=True)
        tensors = [x.contiguous() for x in xs]
        works = [work for i, x in enumerate(tensors) for work in link.send(x, to, tag + i)]
        turn = self._begun(self.world.rank, peer, len(tensors))
        return PendingTransfer(tensors, works, f"a message to rank {peer}", self.at, (peer,), (turn,))

    def start_receive(
        self, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], axes: Axes, source: int, tag: int
    ) -> PendingTransfer:
        """Be ready for tensors from the rank with an index along the axes."""
        link, peer = self._peers(axes, source, sends=False)
        tensors = [
            torch.empty(tuple(shape), dtype=dtype, device=self.device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        works = [work for i, x in enumerate(tensors) for work in link.receive(x, source, tag + i)]
        turn = self._begun(peer, self.world.rank, len(tensors))
        return PendingTransfer(tensors, works, f"a message from rank {peer}", self.at, (peer,), (turn,))

    def wait_sent(self, pending: PendingTransfer) -> None:
        """The tensors have been taken: their memory may change."""
        self._arrived(pending)

    def wait_received(self, pending: PendingTransfer) -> list[Tensor]:
        """What has come."""
        self._arrived(pending)
        return pending.tensors

    def _arrived(self, pending: PendingTransfer) -> None:
        watch = self._watch()
        place = watch.enter(pending.what, pending.at, pending.peers, pending.turns)
        place.hold()
        try:
            for work in pending.works:
                work.wait()
        except RuntimeError as e:
            raise watch.explain(place, e) from e
        is_queued = bool(pending.works) and self.device.type == "cuda"  # waiting for it only queues it there
        watch.leave(place, _reached() if is_queued else None)

    def _peers(self, axes: Axes, index: int, sends: bool) -> tuple[RankGroup | Channel, int]:
        """What messages to or from the rank with an index along the axes go through, and its number in the world."""
        ranks = self._members(axes)
        if self.device.type in CHANNELS:
            pair = (self.world.rank, ranks[index]) if sends else (ranks[index], self.world.rank)
            return self.world.channels[pair], ranks[index]
        group = self.groups.get((axes, self.device.type))
        if group is None:
            turn = self._watch().begin(f"first over {'.'.join(axes)} of {ranks[0]}-{ranks[-1]}", ranks)
            place = self._watch().enter(f"the first message over {'.'.join(axes)}", self.at, ranks, [turn])
            group = self._group(axes, self.device.type, place)
            self._watch().leave(place)
        return group, ranks[index]

    def _begun(self, source: int, target: int, count: int) -> Turn:
        """Messages from rank to rank, which one begins to send and the other to receive in the same order."""
        return self._watch().begin(f"from {source} to {target}", (source, target), count)

    def _members(self, axes: Axes) -> list[int]:
        """The ranks along the axes, by their numbers in the world."""
        return [self.numbers[r] for r in self.mesh.group(self.rank, axes)]

    # -- between meshes: pieces from rank to rank of the world

    def start_send_across(self, x: Tensor, tag: int, pieces: Sequence[Piece]) -> PendingTransfer:
        """Begin to send this rank's pieces of a tensor."""
        own = [piece for piece in pieces if piece[0] == self.world.rank]
        tensors = [box_of(x, start, shape).contiguous() for _, _, start, _, shape in own]
        links = [self.world._peers(self.world.mesh.axes, piece[1], sends=True)[0] for piece in own]
        works = [w for link, piece, t in zip(links, own, tensors, strict=True) for w in link.send(t, piece[1], tag)]
        peers = tuple(piece[1] for piece in own)
        turns = tuple(self._begun(self.world.rank, peer, 1) for peer in peers)
        return PendingTransfer(tensors, works, f"a message to {_ranks_text(peers)}", self.at, peers, turns, own)

    def start_receive_across(self, dtype: torch.dtype, tag: int, pieces: Sequence[Piece]) -> PendingTransfer:
        """Be ready for this rank's pieces of a tensor."""
        own = [piece for piece in pieces if piece[1] == self.world.rank]
        tensors = [torch.empty(piece[4], dtype=dtype, device=self.device) for piece in own]
        links = [self.world._peers(self.world.mesh.axes, piece[0], sends=False)[0] for piece in own]
        works = [w for link, piece, t in zip(links, own, tensors, strict=True) for w in link.receive(t, piece[0], tag)]
        peers = tuple(piece[0] for piece in own)
        turns = tuple(self._begun(peer, self.world.rank, 1) for peer in peers)
        return PendingTransfer(tensors, works, f"a message from {_ranks_text(peers)}", self.at, peers, turns, own)

    def wait_received_across(self, pending: PendingTransfer, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This rank's part, of this shape, put together."""
        self._arrived(pending)
        if len(pending.pieces) == 1 and tuple(pending.tensors[0].shape) == tuple(shape):
            return pending.tensors[0]
        part = torch.zeros(tuple(shape), dtype=dtype, device=self.device)
        for (_, _, _, start, size), x in zip(pending.pieces, pending.tensors, strict=True):
            box_of(part, start, size).copy_(x)
        return part

    def agree(self, facts: Mapping[str, str]) -> None:
        """Refuse, on all ranks, a world whose ranks do not have the same facts: the text of the plan, of the
        configuration, the versions."""
        if self.meeting is not None:
            watch, ranks = self._watch(), range(self.world.mesh.world)
            what = f"an agreement on {next(iter(facts))}{', …' if len(facts) > 1 else ''}"
            place = watch.enter(what, "", ranks, [watch.begin("agreement", ranks)])
            place.hold()
            self.meeting.agree(facts)
            watch.leave(place)

    def tell(self, doing: Callable[[], str]) -> None:
        """What others are told of this rank, where ranks wait for each other."""
        if self.world.watch is not None:
            self.world.watch.doing = doing

    def promise_memory(self, count: int) -> tuple[int, int]:
        """Bytes of its host that this rank is about to take -> what ranks there have taken with it, and what was free
        when this one began."""
        return (count if self.meeting is None else self.meeting.promised("memory", count)), self.world.host_bytes

    def close(self, error: BaseException | None = None) -> None:
        """This rank is done with the others, or an error is done with it: then they are told.  A second call does
        nothing."""
        if self.world is not self:
            self.groups.clear()
            self.world.close(error)
            return
        atexit.unregister(self._exit)
        if self.watch is None or self.meeting is None or os.getpid() != self.owner:  # a forked child has its parent's
            return
        if isinstance(error, Exception):  # an interrupt comes to all ranks, and a wish to exit is no failure
            self.meeting.fail(error)
        watch, self.watch = self.watch, None
        self.groups.clear()
        self.channels.clear()
        watch.close()
        if not watch.reason and error is None:
            self.meeting.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _exit(self) -> None:
        """At the end of a process that did not close; what Python printed the traceback of, if it did, is still to be
        seen."""
        self.close(getattr(sys, "last_value", None))

    def _watch(self) -> Watch:
        if self.world.watch is None or self.watch is None:
            raise RunError(f"rank {self.rank} has left its world\n  try       collectives before `close`")
        return self.watch

    def _group(self, axes: Axes, device: str, place: PendingCollective) -> RankGroup:
        """The ranks along the axes: made when first needed, which is the same collective for all of them."""
        if (axes, device) not in self.groups:
            place.hold()
            try:
                self.groups[axes, device] = self._connected(axes, device, place.ranks)
            except (RuntimeError, RunError) as e:
                raise self._watch().explain(place, e) from e
            place.held_since = None
        return self.groups[axes, device]

    def _connected(self, axes: Axes, device: str, ranks: Sequence[int]) -> RankGroup:
        return self._joined(f"{device}/{'.'.join(axes)}/{ranks[0]}", device, self.index(axes), len(ranks))

    def _joined(self, key: str, device: str, index: int, count: int) -> RankGroup:
        """So many ranks, which come under a key, of which this is one."""
        assert self.meeting is not None
        self.meeting.meet(f"{key}/meet", count)  # so that the connecting, which cannot be interrupted, is short
        store, timeout = self.meeting.under(key), timedelta(seconds=self.meeting.timeout_s + LATER_S)
        if device == "cuda":
            return Nccl(store, index, count, timeout)
        store.set(f"address/{index}", self.meeting.address)
        apart = len({store.get(f"address/{i}") for i in range(count)}) > 1
        mine = "" if "GLOO_SOCKET_IFNAME" in os.environ else self.meeting.address
        return Gloo(store, index, count, mine, timeout, apart)


def world(mesh: Mesh, device: str | torch.device = "auto") -> Processes:
    """The ranks of this run, which has to have as many as the mesh; `device`: cpu, cuda (the one with this process's
    number), or auto."""
    mine = seat()
    if mine.world != mesh.world:
        hint = f"a mesh of {mine.world}, or mycel train --nproc {mesh.world} (torchrun --nproc-per-node {mesh.world})"
        running = f"{mine.world} processes run" if mine.world > 1 else "one process runs"
        raise PlanError(f"the mesh has {mesh.world} ranks, but {running}\n  the mesh  {mesh}\n  try       {hint}")
    if mesh.world == 1:
        return Processes(mesh, 0, _device(device, mine))
    if is_loopback(mine.host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return Processes(mesh, mine.rank, _device(device, mine), Rendezvous(mine))


def _device(wanted: str | torch.device, mine: Seat) -> torch.device:
    """The device of this process: as wanted, or of the GPUs of its host the one with its number there."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)
    if device.type != "cuda":
        return device
    if device.index is not None:
        torch.cuda.set_device(device)
        return device
    there = torch.cuda.device_count()
    if mine.local_rank >= there:
        what = f"rank {mine.rank} has no GPU of its own: it is number {mine.local_rank} on its host, which has {there}"
        raise PlanError(
            f"{what}\n  at        LOCAL_RANK={mine.local_rank}\n"
            f"  try       {there} processes on this host, or device: cpu"
        )
    torch.cuda.set_device(mine.local_rank)
    return torch.device("cuda", mine.local_rank)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _reached() -> Callable[[], bool]:
    """Says whether the GPU has come to where it was told to go by now: waiting for a message only queues it there."""
    event = torch.cuda.Event()
    event.record()
    return event.query
