"""A step as one CUDA graph: its code runs once as it is, is then recorded, and from there on replayed in one call.

    call 1       code(*values)                      compilers and libraries get ready
    call 2       record code(*values), replay       nothing runs while it is recorded
    call 3 …     copy what is new, replay

A graph reads what lies where it lay when it was recorded:

    held         parameters, buffers, state, counters,    the same memory at every call, else it is recorded anew
                 and whatever the code writes
    copied       the batch, the random key, and what      into memory of the graph's own
                 lay elsewhere once and is only read
    numbers      hyper-parameters                         those that move (the learning rate, and any that was seen to
                                                          change) are scalars on the device; the others stand in the
                                                          graph, which is recorded anew if one changes

Results are copied out of the graph's memory, which the next replay writes over.  That memory is a pool of its own,
shared by all recordings that never run beside each other: what the largest needs besides its inputs stays taken
between calls.  Code that is recorded again and again, and hardly replayed in between, is left as it is.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mycel.ir import Eqn, Program, cond, loop, walk

COPIED = ("batch", "key", "count")
MOVING = ("lr",)
MOST = 4  # recordings in a row that were not worth it, before it is given up
WORTH = 16  # replays that pay for a recording: its code runs once, the device is waited for, free memory is let go
RECORDING = threading.Lock()  # one at a time in a process


class Recording(Protocol):
    """Code that was recorded on its values."""

    def replay(self) -> Sequence[Any]:
        """Run it on what these hold now; its results, which the next replay writes over."""


class CudaGraph:
    """Code recorded as a CUDA graph, with memory of a pool."""

    def __init__(
        self, code: Callable[..., Sequence[Any]], values: Sequence[Any], device: torch.device, pool: Any = None
    ) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # other threads may go on with what they do; where it fails, the stream is what it was
        recording = torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local")
        with RECORDING, torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)), recording:
            self.results = code(*values)

    def replay(self) -> Sequence[Any]:
        self.graph.replay()
        return self.results


class GraphPool:
    """Memory of recordings that never run beside each other.  One recording stays for as long as the pool: torch takes
    no new ones for a pool that has lost its last while some memory of it is still in use (workspaces of products)."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.recordings: weakref.WeakSet[CudaGraph] = weakref.WeakSet()
        self.first = CudaGraph(lambda: (torch.zeros((), device=device),), (), device, self.handle)

    def record(self, code: Callable[..., Sequence[Any]], values: Sequence[Any], device: torch.device) -> CudaGraph:
        """The code as a graph with memory of the pool."""
        recording = CudaGraph(code, values, device, self.handle)
        self.recordings.add(recording)
        return recording


class Strides:
    """How tensors lie in their memory, asked of all at once: torch's compiler has a check which also says no where just
    requires_grad differs, and then they are looked at one by one."""

    def __init__(self) -> None:
        self.at_once: Callable[..., bool] | None = None
        self.last: list[tuple[int, ...]] = []

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
        if self.at_once is None or len(tensors) != len(self.last) or not self.at_once(*tensors):
            self.last = [x.stride() for x in tensors]
            guards: Any = torch._C._dynamo.guards
            sizes, strides = [list(x.shape) for x in tensors], [list(x) for x in self.last]
            self.at_once = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return self.last


class Replayed:
    """A program's code, replayed where that can be; `why` says why not."""

    def __init__(
        self,
        code: Callable[..., Sequence[Any]],
        program: Program,
        device: torch.device,
        record: Callable[..., Recording] = CudaGraph,
    ) -> None:
        """`record` makes a recording of the code, its values and the device."""
        self.code, self.device, self.record = code, device, record
        self.why = obstacle(program)
        self.roles = [program.role(v) for v in program.inputs]
        self.moving = {i for i, role in enumerate(self.roles) if role.kind == "hyper" and role.name in MOVING}
        self.written = {i for i, v in enumerate(program.inputs) if v.name in program.updates}
        self.copied = {i for i, role in enumerate(self.roles) if role.kind in COPIED} - self.written
        self.scalars: dict[int, tuple[Any, torch.Tensor]] = {}  # numbers that move: the last value, and where it lies
        self.copies: dict[int, torch.Tensor] = {}
        self.recording: Recording | None = None
        self.recorded_for: list[Any] = []
        self.own: list[int] = []
        self.held: list[int] = []
        self.fixed: list[int] = []
        self.strides = Strides()
        self.recorded_strides: list[tuple[int, ...]] = []
        self.calls = self.replays = 0  # these of the last recording
        self.poor = 0  # recordings in a row that were replayed fewer than WORTH times

    def __call__(self, *values: Any) -> Sequence[Any]:
        if self.why and not self.calls:
            return self.code(*values)
        self.calls += 1
        if self.calls == 1:
            self._sort(values, {i for i in self.moving if self._is_number(values[i])})
        inputs = self._inputs(values)
        if self.why or self.calls == 1:
            return self.code(*inputs)
        fixed, strides = self._fixed(inputs), self.strides([inputs[i] for i in self.held])
        if self.recording is None or fixed != self.recorded_for or strides != self.recorded_strides:
            inputs = self._record(values, inputs, fixed)
        if self.recording is None:
            return self.code(*inputs)
        self.replays += 1
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in self.recording.replay()]

    def __str__(self) -> str:
        return f"no CUDA graph: {self.why}" if self.why else "one CUDA graph from the second step on"

    def _inputs(self, values: Sequence[Any]) -> list[Any]:
        """Values as the code gets them."""
        inputs = list(values)
        for i in self.own:
            inputs[i] = self._input(i, values[i])
        return inputs

    def _is_number(self, x: Any) -> bool:
        """A number of the host's: a recording holds it as it is."""
        return isinstance(x, (int, float)) or (isinstance(x, torch.Tensor) and x.device != self.device)

    def _input(self, i: int, x: Any) -> Any:
        """A value in memory of the recording's own."""
        if i in self.copied:
            if i not in self.copies:
                with torch.inference_mode(False):  # which could only be written in that mode
                    self.copies[i] = torch.empty(x.shape, dtype=x.dtype, device=self.device)
            return self.copies[i].copy_(x, non_blocking=True)
        last, held = self.scalars.get(i, (None, None))
        if held is None:
            held = torch.tensor(float(x), dtype=torch.float64, device=self.device)
        elif last != float(x):
            held.fill_(float(x))
        self.scalars[i] = float(x), held
        return held

    def _fixed(self, inputs: Sequence[Any]) -> list[Any]:
        """What a recording holds for: where memory lies, and numbers that stand in it."""
        return [
            *map(torch.Tensor.data_ptr, (inputs[i] for i in self.held)),
            *(float(inputs[i]) if self._is_number(inputs[i]) else inputs[i] for i in self.fixed),
        ]

    def _record(self, values: Sequence[Any], inputs: list[Any], fixed: list[Any]) -> list[Any]:
        """Records the code, again where something changed: a number that did is a scalar on the device from now on."""
        if self.recording is not None:
            numbers = [i for i in self.fixed if self._is_number(inputs[i])]
            before, now = (dict(zip((*self.held, *self.fixed), x, strict=True)) for x in (self.recorded_for, fixed))
            self.copied |= {i for i in self.held if before[i] != now[i] and self._may_be_copied(i)}
            self._sort(inputs, self.moving | {i for i in numbers if before[i] != now[i]})
            inputs = self._inputs(values)
            fixed = self._fixed(inputs)
        self.recording = None  # its memory goes first
        self.poor = self.poor + 1 if self.replays < WORTH else 1
        self.replays = 0
        if self.poor > MOST:
            self.why = f"it was recorded {MOST} times, for parameters or state that lay elsewhere each time"
            return inputs
        try:
            self.recording, self.recorded_for = self.record(self.code, inputs, self.device), fixed
            self.recorded_strides = self.strides([inputs[i] for i in self.held])
        except RuntimeError as e:
            self.why = str(e).strip().partition("\n")[0]
            moved = [i for i in sorted(self.moving) if self.roles[i].name not in MOVING]
            if moved:
                self.why = f"{', '.join(str(self.roles[i]) for i in moved)} changes from step to step"
                self._sort(values, self.moving - set(moved))
                inputs = self._inputs(values)
        return inputs

    def _may_be_copied(self, i: int) -> bool:
        """Is it only read, and no weight?  Those are many, and move together when others are loaded."""
        return i not in self.written and self.roles[i].kind != "parameter"

    def _sort(self, values: Sequence[Any], moving: set[int]) -> None:
        """Which values are copied or moved in at every call, which lie where they lie, and which stand fixed."""
        self.moving = moving
        self.copied = {i for i in self.copied if isinstance(values[i], torch.Tensor)}
        self.own = sorted(self.copied | moving)
        rest = [i for i in range(len(values)) if i not in self.copied and i not in moving]
        self.held = [i for i in rest if isinstance(values[i], torch.Tensor) and not self._is_number(values[i])]
        self.fixed = sorted(set(rest) - set(self.held))


def obstacle(program: Program) -> str:
    """Why a program cannot be recorded as one graph; empty: nothing is known that speaks against it."""
    wide = any(v.dtype == torch.float64 and v.ndim for v in program.inputs_of("parameter"))
    if wide and program.inputs_of("hyper"):
        return "parameters in 64 bits, for which the device's learning rate is too coarse"
    for _, eqn in walk(program):
        what = _obstacle(eqn)
        if what:
            return f"{what} at {eqn.line}" if eqn.line else what
    return ""


def _obstacle(eqn: Eqn) -> str:
    if eqn.op is cond or eqn.op is loop:
        return "a value on the device decides what runs next"
    if eqn.op.by_rank or eqn.op.collective is not None:
        return "ranks speak to each other"
    if eqn.op.effect or eqn.op.waits:
        return f"{eqn.op.name} runs on the host"
    return ""
