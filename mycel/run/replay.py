"""A step as one CUDA graph: its code runs once as it is, is then recorded, and from there on replayed in one call.

    call 1       code(*values)                      compilers and libraries get ready
    call 2       record code(*values), replay       nothing runs while it is recorded
    call 3 …     copy what is new, replay

A graph reads what lies where it lay when it was recorded:

    held         parameters, buffers, state, counters     the same memory at every call, else it is recorded anew
    copied       the batch, the random key, and what      into memory of the graph's own
                 lay elsewhere once and is only read
    numbers      hyper-parameters                         those that move (the learning rate, and any that was seen to
                                                          change) are scalars on the device; the others stand in the
                                                          graph, which is recorded anew if one changes

Results are copied out of the graph's memory, which the next replay writes over.  That memory is a pool of its own,
shared by all recordings that never run beside each other: what the largest needs besides its inputs stays taken
between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mycel.ir import Eqn, Program, cond, loop, walk

COPIED = ("batch", "key", "count")
MOVING = ("lr",)
MOST = 4  # recordings, before it is given up


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
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)), recording:
            self.results = code(*values)

    def replay(self) -> Sequence[Any]:
        self.graph.replay()
        return self.results


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
        self.copied = {i for i, role in enumerate(self.roles) if role.kind in COPIED}
        self.written = {i for i, v in enumerate(program.inputs) if v.name in program.updates}
        self.scalars: dict[int, tuple[Any, torch.Tensor]] = {}  # numbers that move: the last value, and where it lies
        self.copies: dict[int, torch.Tensor] = {}
        self.recording: Recording | None = None
        self.recorded_for: list[Any] = []
        self.own: list[int] = []
        self.held: list[int] = []
        self.fixed: list[int] = []
        self.calls = self.recordings = 0

    def __call__(self, *values: Any) -> Sequence[Any]:
        if self.why and not self.calls:
            return self.code(*values)
        self.calls += 1
        if self.calls == 1:
            self._sort(values, {i for i in self.moving if self._is_number(values[i])})
        inputs = self._inputs(values)
        if self.why or self.calls == 1:
            return self.code(*inputs)
        fixed = self._fixed(inputs)
        if self.recording is None or fixed != self.recorded_for:
            inputs = self._record(values, inputs, fixed)
        if self.recording is None:
            return self.code(*inputs)
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
            self.copied |= {i for i in self.held if before[i] != now[i] and i not in self.written}
            self._sort(inputs, self.moving | {i for i in numbers if before[i] != now[i]})
            inputs = self._inputs(values)
            fixed = self._fixed(inputs)
        self.recording = None  # its memory goes first
        self.recordings += 1
        if self.recordings > MOST:
            self.why = f"it was recorded {MOST} times, for parameters or state that lay elsewhere each time"
            return inputs
        try:
            self.recording, self.recorded_for = self.record(self.code, inputs, self.device), fixed
        except RuntimeError as e:
            self.why = str(e).strip().partition("\n")[0]
            moved = [i for i in sorted(self.moving) if self.roles[i].name not in MOVING]
            if moved:
                self.why = f"{', '.join(str(self.roles[i]) for i in moved)} changes from step to step"
                self._sort(values, self.moving - set(moved))
                inputs = self._inputs(values)
        return inputs

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
    if any(v.dtype == torch.float64 and v.ndim for v in program.inputs_of("parameter")):
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
