"""The host's memory beside the device's: pinned, made once before the first step, and two streams of copies.

    inputs that lie on the host     each has a home there for as long as the step is, by its role
    values that are there a while   one piece of memory for all, laid out by `ir/arena.py`

On a GPU a copy waits for what the device has computed when it begins, and whoever finishes it waits for the copy, on
the device's own streams: the host waits for nothing.  Memory is not given back while a copy reads or writes it, because
a program holds what it moves until the move is finished.  On a CPU the host is simulated: the same places, real copies.

Updates that run on the host do so in a thread of their own, one after the other, each once the copies that bring what
it reads have ended.  Whoever then moves a value that one of them writes, or writes where one of them reads, waits for
it: the first use of a parameter in the next step does.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mycel.errors import RunError
from mycel.ir import DEVICE, HOST, Program, Role, Type, arenas, rounded
from mycel.ops.space import HOST_SPACES, LIVING, like
from mycel.sizes import shown

UNKNOWN = 1 << 62  # bytes
OTHER_CORES = 2  # that updates on the host leave to others


# bytes that a rank is about to take of its host -> what all ranks there have taken, and what was free when they began
Promise = Callable[[int], tuple[int, int]]


class HostSpace:
    """What the programs of one step have on the host of a device; `promise`: where other ranks may be there."""

    def __init__(self, device: torch.device, promise: Promise | None = None) -> None:
        self.device, self.promise = device, promise
        self.homes: dict[Role, torch.Tensor] = {}
        self.arena = torch.empty(0, dtype=torch.uint8)
        self._views: dict[Any, torch.Tensor] = {}
        self._pinned: list[int] = []
        self._on_the_way: dict[int, Any] = {}  # the last copy to an address of the host
        self._updates: list[PendingUpdate] = []  # that have been given to the thread
        self._thread = update_thread() if device.type == "cuda" else None
        LIVING.add(self)
        if device.type == "cuda":
            self.leaving, self.coming = torch.cuda.Stream(device), torch.cuda.Stream(device)
            weakref.finalize(self, _unpin, self._pinned)

    def prepare(self, program: Program) -> HostSpace:
        """Make room for what a program has here; RunError if there is none."""
        new = {
            program.role(v): v.type
            for v in program.inputs
            if v.type.space != DEVICE and not _is_home(self.homes.get(program.role(v)), v.type)
        }
        arena = sum(a.size for a in arenas(program).values())
        arena = arena if arena > self.arena.numel() else 0
        need = arena + sum(rounded(t.bytes) for t in new.values())
        if need > available():
            raise RunError(
                f"a step needs {shown(need)} on the host, which has {shown(available())} free\n"
                "  try       a larger memory=, or a host budget in the plan: offload: {activations: auto, host: …}"
            )
        if self.promise is not None:
            together, had = self.promise(need)
            if together > had:
                raise RunError(
                    f"the ranks of this host need {shown(together)} of its memory together, which had {shown(had)} "
                    f"free when they began; this one needs {shown(need)}\n"
                    "  try       a larger memory=, a host budget in the plan (offload: {activations: auto, host: …}), "
                    "or fewer ranks on a host"
                )
        memory = self._memory(need)
        if arena:
            self.arena, self._views = memory[:arena], {}
        at = arena
        for role, type in new.items():
            self.homes[role] = memory[at : at + type.bytes].view(type.dtype).view(type.shape)
            at += rounded(type.bytes)
        return self

    def settled(self, role: Role, x: torch.Tensor) -> torch.Tensor:
        """The home of an input, with the value of x, its elements in x's order; from now on it is there."""
        self.settle()
        home = self.homes[role]
        if x.data_ptr() != home.data_ptr():
            home = self.homes[role] = home.view(-1).as_strided(x.shape, like(x, "meta").stride())
            home.copy_(x)
        return home

    def _memory(self, size: int) -> torch.Tensor:
        """Bytes of the host that the device reads and writes by itself.  Not by way of torch's pinned allocator, which
        rounds up to a power of two."""
        try:
            memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as e:  # less than what is free: a limit of this process
            limit = _limit(resource.RLIMIT_AS)
            raise RunError(
                f"the host gave no {shown(size)} of its memory, of which {shown(available())} are free and what a "
                f"process may take is {limit}\n"
                "  try       a larger limit (ulimit -v), or a host budget in the plan: offload: {activations: auto, "
                "host: …}"
            ) from e
        if self.device.type == "cuda" and size:
            memory.zero_()  # by all cores: pinning would touch page after page by one
            error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0))
            if error:
                raise RunError(
                    f"the host refused to pin {shown(size)} of its memory, of which {shown(available())} are free and "
                    f"what is locked is {_limit(resource.RLIMIT_MEMLOCK)} (CUDA error {error})\n"
                    "  try       offload: none, or a larger limit of locked memory (ulimit -l)"
                )
            self._pinned.append(memory.data_ptr())
        return memory

    # -- moves, as `ops/space.py` asks for them

    def begin(self, x: torch.Tensor, to: str, at: int | None, over: torch.Tensor | None) -> Any:
        if to == DEVICE:
            return self._copy(like(x, self.device), x, to)
        return self._copy(over if over is not None else self._place(x, at), x, to)

    def finish(self, token: Any, x: torch.Tensor, wait: bool = True) -> torch.Tensor:
        y, copied = token
        if copied is not None and wait:
            torch.cuda.current_stream(self.device).wait_event(copied)
        elif copied is not None:
            x.record_stream(self.leaving)  # its memory is used again once it has left
        return y

    def compute(self, update: Callable[[], Any], operands: Sequence[Any]) -> None:
        """Updates parameters that live here.  In the thread, which waits for the copies of its operands and not for
        what the device does else; the device waits for nothing."""
        tensors = [x for x in operands if isinstance(x, torch.Tensor)]
        if self._thread is None:
            update()
            return
        copies = [self._on_the_way[x.data_ptr()] for x in tensors if x.data_ptr() in self._on_the_way]

        def run() -> None:
            for copied in copies:
                copied.synchronize()
            with torch.no_grad():
                update()

        self._updates = [pending for pending in self._updates if not pending.is_over()]
        self._updates.append(PendingUpdate(self._thread.submit(run), [_span(x) for x in tensors]))

    def settle(self, *touched: torch.Tensor) -> None:
        """Wait for updates of what lies in the memory of these; without any, for all.  What one of them raised is
        raised here."""
        spans = [_span(x) for x in touched]
        for pending in self._updates:
            if not touched or pending.overlaps(spans):
                pending.done.result()

    def _copy(self, y: torch.Tensor, x: torch.Tensor, to: str) -> tuple[torch.Tensor, Any]:
        if self._updates:
            self.settle(y if to == HOST else x)
        if self.device.type != "cuda":
            return y.copy_(x), None
        stream = self.leaving if to == HOST else self.coming
        stream.wait_stream(torch.cuda.current_stream(self.device))
        left = self._on_the_way.get(x.data_ptr()) if to == DEVICE else None
        if left is not None:
            stream.wait_event(left)
        with torch.cuda.stream(stream):
            y.copy_(x, non_blocking=True)
        copied = stream.record_event()
        if to == HOST:
            self._on_the_way[y.data_ptr()] = copied
        return y, copied

    def _place(self, x: torch.Tensor, at: int | None) -> torch.Tensor:
        """Memory for a copy of x at a byte of the arena, its elements in x's order."""
        if at is None:
            return like(x, "cpu")
        key = at, x.dtype, x.shape, x.stride()
        if key not in self._views:
            flat = self.arena[at : at + x.numel() * x.itemsize].view(x.dtype)
            self._views[key] = flat.as_strided(x.shape, like(x, "meta").stride())
        return self._views[key]

    def connected(self, code: Callable[..., Any]) -> Callable[..., Any]:
        """The code with this host to move to."""

        def run(*inputs: Any) -> Any:
            HOST_SPACES.append(self)
            try:
                return code(*inputs)
            finally:
                HOST_SPACES.pop()

        return run


@dataclass(frozen=True)
class PendingUpdate:
    """An update that the thread has or had to do, and the memory that it reads and writes."""

    done: Future[None]
    spans: list[tuple[int, int]]

    def is_over(self) -> bool:
        """Has it ended well?  What it raised is kept for whoever waits."""
        return self.done.done() and self.done.exception() is None

    def overlaps(self, others: Sequence[tuple[int, int]]) -> bool:
        return any(a < d and c < b for a, b in self.spans for c, d in others)


def update_thread() -> ThreadPoolExecutor:
    """A thread for updates on the host.  It leaves cores to whoever asks the device for kernels and to what drives its
    copies: an update is as fast as the last of its cores, and one that is shared holds up all."""
    return ThreadPoolExecutor(
        1, "mycel host update", torch.set_num_threads, (max(1, torch.get_num_threads() - OTHER_CORES),)
    )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses that a tensor of the host lies between."""
    return x.data_ptr(), x.data_ptr() + max(x.nbytes, 1)


def moves(program: Program) -> bool:
    """Has a program anything on the host?"""
    return bool(arenas(program)) or any(v.type.space != DEVICE for v in program.inputs)


def _limit(of: int) -> str:
    """What this process may have, for people."""
    most = resource.getrlimit(of)[0]
    return "not limited" if most == resource.RLIM_INFINITY else f"limited to {shown(most)}"


def available() -> int:
    """Bytes of the host that are free, or can be: of all of it, and of what this process may have."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    known: Mapping[str, int] = {name: int(rest.split()[0]) << 10 for name, rest in (x.split(":", 1) for x in lines)}
    return min(known.get("MemAvailable", UNKNOWN), _left_to_us(Path("/sys/fs/cgroup")))


def _left_to_us(group: Path) -> int:
    """Bytes up to the limit of this process's control group; files in memory give way."""
    names = ("memory.max", "memory.current", "memory.stat")
    limit, used, parts = ((group / name).read_text() if (group / name).is_file() else "" for name in names)
    if not limit.strip().isdigit() or not used.strip().isdigit():
        return UNKNOWN
    held = dict(line.split() for line in parts.splitlines())
    return int(limit) - int(used) + int(held.get("inactive_file", 0)) + int(held.get("active_file", 0))


def _is_home(held: torch.Tensor | None, type: Type) -> bool:
    return held is not None and held.dtype == type.dtype and tuple(held.shape) == type.shape


def _unpin(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
