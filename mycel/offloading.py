"""A lowered step and a budget for each memory space -> what it moves to the host and back, by the clock.

    fewest moves first      values that are made first leave first: they have longest, and the wire is busy from the
                            start.  As many leave as the budget asks for
    windows                 where all of them leave and memory is still short, because they wait for the wire, fewer
                            are on their way at once and computing waits
    optimiser state         comes and goes in chunks, as many at once as there is memory for

`planning.py` asks for each decision of what backward computes again, and takes the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mycel import lower, plan
from mycel.ir import DEVICE, HOST, Program
from mycel.plan import Offload, Offloaded, Times

ENDLESS = 1 << 62  # bytes: no window


@dataclass(frozen=True)
class Spaces:
    """The most bytes that may be used of each; None: no bound."""

    device: int | None
    host: int | None

    def fit(self, times: Times) -> bool:
        return self.short(times) == (0, 0)

    def short(self, times: Times) -> tuple[int, int]:
        """The bytes that are missing on device and host."""
        device = 0 if self.device is None else max(times.peak[DEVICE] - self.device, 0)
        return device, 0 if self.host is None else max(times.peak[HOST] - self.host, 0)


class Choice(NamedTuple):
    """Moves, and what the step takes with them."""

    moved: Offloaded
    times: Times


@dataclass
class Mover:
    """A lowered step whose values may be moved."""

    done: lower.Lowered
    body: str
    clock: plan.Clock
    offload: Offload
    spaces: Spaces
    compiled: Collection[str] = ()

    def choices(self) -> list[Choice]:
        """Ways to run it, those that fit the spaces if any does: the one with the fewest moves for each way to keep
        optimiser state."""
        held = {"none": [False], "host": [True], "auto": [False, True]}[self.offload.optimizer]
        found = [self._fewest(on_host) for on_host in held if not on_host or self.state]
        return [c for c in found if self.spaces.fit(c.times)] or found

    @cached_property
    def state(self) -> tuple[str, ...]:
        return tuple(v.name for v in plan.state_inputs(self.done.program))

    @cached_property
    def chunk(self) -> int:
        return plan.chunk_bytes(plan.state_inputs(self.done.program))

    @cached_property
    def split(self) -> Program:
        """The program whose update is taken in chunks."""
        return lower.split_updates(self.done.program, self.state, self.chunk)

    def could(self, program: Program) -> list[plan.Absence]:
        """The values of its body that may leave."""
        if self.offload.activations == "none":
            return []
        return plan.absences(program, self.body, self._starts(program, self.body), self.clock.hardware)

    def _starts(self, program: Program, block: str) -> list[float]:
        """When its equations begin, and when all have ended."""
        return [start for start, _ in self.clock.spans(program, block, self.compiled)]

    def _fewest(self, on_host: bool) -> Choice:
        base = self.split if on_host else self.done.program
        block = base.blocks[self.body]
        times = self._starts(base, self.body)
        entry_times = times if self.body == base.entry else self._starts(base, base.entry)
        hardware = self.clock.hardware
        could = self.could(base)

        def choice(count: int, window: int, ahead: int) -> Choice:
            moved = plan.moves_of(block, could[:count], times, hardware, window)
            streamed = plan.streams_of(base, self.state, entry_times, hardware, ahead) if on_host else ()
            planned = Offloaded(self.body, moved, streamed, self.chunk if on_host else 0)
            return Choice(planned, self.clock(lower.offload(self.done.program, planned), self.compiled))

        count, window, ahead = len(could), ENDLESS, 2 * self.chunk
        best = choice(count, window, ahead)
        if not self._fits(best):  # all of them at once are too many
            total, largest = sum(a.bytes for a in could), max((a.bytes for a in could), default=0)
            windows = [largest, *(w for k in range(total.bit_length(), 0, -1) if (w := total >> k) > largest)]
            window, best = self._last(windows, lambda w: choice(count, w, ahead))
        elif self.offload.activations == "auto":
            least, best = self._last([-n for n in reversed(range(count + 1))], lambda n: choice(-n, window, ahead))
            count = -least
        if on_host and self._fits(best):
            wider = [c for k in (2, 4) if self._fits(c := choice(count, window, self.chunk << k))]
            best = min([best, *wider], key=lambda c: c.times.seconds)
        return best

    def _fits(self, choice: Choice) -> bool:
        """On the device."""
        return self.spaces.short(choice.times)[0] == 0

    def _last(self, values: Sequence[int], choice: Callable[[int], Choice]) -> tuple[int, Choice]:
        """Of values that take ever more memory the last that fits, and its choice; the first, if none does."""
        low, high = 0, len(values) - 1
        best = choice(values[0])
        if not self._fits(best):
            return values[0], best
        while low < high:
            middle = (low + high + 1) // 2
            each = choice(values[middle])
            if self._fits(each):
                low, best = middle, each
            else:
                high = middle - 1
        return values[low], best
