"""A lowered step and a budget for each memory space -> what it moves to the host and back, by the clock.

    ways        from the one that waits least for copies to the one that needs the least memory: values leave, as many
                as there is time for; optimiser state lives on the host, too; then parameters; and with windows: fewer
                bytes are on their way at once, and computing waits for them
    most        all that a way moves: the least memory it can do with
    fewest      as few values leave as the budget asks for, those made first before others: they have longest, and the
                wire is busy from the start.  Windows are as wide as there is memory for

`planning.py` asks what backward computes again for `most` to fit, and then for the `fewest`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from mycel import lower, plan
from mycel.ir import DEVICE, HOST, Program, Var, packed
from mycel.plan import Offload, Offloaded, Times

ENDLESS = 1 << 62  # bytes: no window
AHEAD = (2, 4, 8, 16)  # chunks of an update, or of parameters, on their way at once


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


@dataclass(frozen=True)
class Way:
    """To move: is optimiser state on the host, are parameters; are the bytes on their way bounded?"""

    state: bool
    windows: bool
    parameters: bool = False


def ways(offload: Offload) -> Iterator[list[Way]]:
    """Those a plan allows, first those that wait for copies only where there is nothing else to do.  State goes before
    parameters, which are needed more often."""
    choices = {"none": [False], "host": [True], "auto": [False, True]}
    lives = [
        (state, parameters)
        for parameters in choices[offload.parameters]
        for state in choices[offload.optimizer]
        if not (parameters and not state and offload.parameters == offload.optimizer == "auto")
    ]
    for windows in (False, True) if (offload.activations, offload.gradients) != ("none", "none") else (False,):
        yield [Way(state, windows, parameters) for state, parameters in lives]


class MoveChoice(NamedTuple):
    """Moves, and what the step takes with them."""

    moved: Offloaded
    times: Times


class PipelineMoveChoice(NamedTuple):
    """Moves of each rank of a pipeline, and what its step takes with them."""

    moved: tuple[Offloaded, ...]
    times: Times


@dataclass
class Mover:
    """A lowered step whose values may be moved in one way."""

    done: lower.Lowered
    body: str
    clock: plan.Clock
    offload: Offload
    spaces: Spaces
    way: Way
    compiled: Collection[str] = ()

    def least(self) -> tuple[int, float]:
        """The bytes that inputs take on the device, and seconds, below which this way never is: what lives on the host
        comes once a step at least."""
        sizes = [v.type.bytes for v in self.done.program.inputs if v.name in self._homes]
        held = sum(v.type.bytes for v in self.done.program.inputs) - sum(sizes)
        return held, sum(map(self.clock.hardware.move_s, sizes))

    @cached_property
    def most(self) -> MoveChoice:
        """All that can be is moved."""
        return self._choice(len(self.could), self._largest if self.way.windows else ENDLESS, AHEAD[0])

    def fewest(self) -> MoveChoice:
        """The fastest that fits with as few moves as that takes; `most`, if that does not."""
        if not self._fits(self.most):
            return self.most
        count, window = len(self.could), self._largest if self.way.windows else ENDLESS
        best = self.most
        if self.way.windows:
            window, best = self._last(self._windows(), lambda w: self._choice(count, w, AHEAD[0]), best)
        else:
            kept = sum(getattr(self.offload, a.kind) == "auto" for a in self.could)
            counts = list(range(count, count - kept - 1, -1))
            count, best = self._last(counts, lambda n: self._choice(n, window, AHEAD[0]), best)
        mover = self
        if self._norms and not any(
            a.kind == "gradients" for a in self.could[:count]
        ):  # then their norms are one kernel
            without = replace(self, offload=replace(self.offload, gradients="none"))
            same = without._choice(count, window, AHEAD[0])
            mover, best = (without, same) if self._fits(same) else (self, best)
        more = [mover._choice(count, window, ahead) for ahead in (AHEAD[1:] if self._homes else ())]
        return min([best, *filter(self._fits, more)], key=lambda c: c.times.seconds)

    @cached_property
    def could(self) -> list[plan.Absence]:
        """The values of its body that may leave, those first that a plan has on the host; of others, as many as there
        is room for beside what lives there."""
        kinds = [kind for kind in ("activations", "gradients") if getattr(self.offload, kind) != "none"]
        found = plan.absences(self._base, self.body, self._body_starts, self.clock.hardware, kinds)
        found = sorted(found, key=lambda a: getattr(self.offload, a.kind) == "auto")
        if self.spaces.host is None:
            return found
        room = self.spaces.host - sum(v.type.bytes for v in self.done.program.inputs if v.name in self._homes)
        spans = {i: (a.made, a.use, a.bytes) for i, a in enumerate(found)}
        forced = sum(getattr(self.offload, a.kind) == "host" for a in found)
        counts = range(forced, len(found) + 1)
        beyond = bisect.bisect_right(counts, room, key=lambda n: packed(dict(islice(spans.items(), n)))[1])
        return found[: forced + max(beyond - 1, 0)]

    @cached_property
    def _homes(self) -> frozenset[str]:
        """Inputs of the entry that live on the host."""
        state = plan.state_inputs(self.done.program) if self.way.state else []
        return frozenset(v.name for v in (*state, *self._parameters))

    @cached_property
    def _parameters(self) -> list[Var]:
        return plan.parameter_inputs(self.done.program) if self.way.parameters else []

    @cached_property
    def _chunk(self) -> int:
        """The bytes of one chunk of an update."""
        mine = [v for v in self.done.program.inputs if v.name in self._homes and v.name in self.done.program.updates]
        return plan.chunk_bytes(mine) if mine else 0

    @property
    def _norms(self) -> bool:
        """Is the norm of gradients taken of each, so that they may leave?"""
        return self.offload.gradients != "none" and self.body == self.done.program.entry

    @cached_property
    def _base(self) -> Program:
        """The program whose update is taken in chunks."""
        program = lower.norms_of_each(self.done.program) if self._norms else self.done.program
        return lower.split_updates(program, self._homes, self._chunk)

    @cached_property
    def _visits(self) -> list[plan.Visit]:
        base = self._base
        return plan.visits(base, base.entry, self._homes, self._entry_starts, self.clock.hardware, self._handed)

    @cached_property
    def _handed(self) -> dict[tuple[int, Var], Var]:
        """Parameters that a body which is run several times gets as they lie, and streams by itself."""
        return plan.handed_to(self._base, self.body, {v.name for v in self._parameters})

    @cached_property
    def _visits_inside(self) -> list[plan.Visit]:
        names = {v.name for v in self._handed.values()}
        return plan.visits(self._base, self.body, names, self._body_starts, self.clock.hardware)

    @cached_property
    def _entry_starts(self) -> list[float]:
        return self._starts(self._base.entry)

    @cached_property
    def _body_starts(self) -> list[float]:
        return self._starts(self.body)

    def _starts(self, block: str) -> list[float]:
        """When equations of a block begin, and when all have ended."""
        return [start for start, _ in self.clock.spans(self._base, block, self.compiled)]

    @cached_property
    def _largest(self) -> int:
        return max((a.bytes for a in self.could), default=0)

    def _windows(self) -> list[int]:
        total = sum(a.bytes for a in self.could)
        wider = [total >> k for k in range(total.bit_length(), 0, -1)]
        return [self._largest, *(w for w in wider if w > self._largest)]

    def _choice(self, count: int, window: int, ahead: int) -> MoveChoice:
        """The first `count` values leave; so many bytes of them, and chunks of what lives on the host, are on their way
        at once."""
        away, entry = self.could[:count], self._base.entry
        gradients = plan.chunk_bytes(a.var for a in away if a.kind == "gradients")
        windows = {
            **dict.fromkeys(("activations", "gradients"), window),
            "parameters": ahead * plan.chunk_bytes(self._parameters),
            plan.UPDATE: ahead * (self._chunk + gradients),
        }
        inside: tuple[plan.StreamedInput, ...] = ()
        if self.body == entry:
            copies = plan.Copies(self._base, entry, self._entry_starts, self.clock.hardware, away, self._visits)
            moved, streamed = copies.placed(windows)
        else:
            inner = plan.Copies(
                self._base, self.body, self._body_starts, self.clock.hardware, away, self._visits_inside
            )
            outer = plan.Copies(self._base, entry, self._entry_starts, self.clock.hardware, visiting=self._visits)
            (moved, inside), (_, streamed) = inner.placed(windows), outer.placed(windows)
        planned = Offloaded(self.body, moved, streamed, self._chunk, self._norms, inside)
        return MoveChoice(planned, self.clock(lower.with_copies(self._base, planned), self.compiled))

    def _fits(self, choice: MoveChoice) -> bool:
        """On the device."""
        return self.spaces.short(choice.times)[0] == 0

    def _last(
        self, values: Sequence[int], choice: Callable[[int], MoveChoice], best: MoveChoice
    ) -> tuple[int, MoveChoice]:
        """Of values that take ever more memory the last that fits, and its choice; `best` is that of the first."""
        low, high = 0, len(values) - 1
        while low < high:
            middle = (low + high + 1) // 2
            each = choice(values[middle])
            if self._fits(each):
                low, best = middle, each
            else:
                high = middle - 1
        return values[low], best


@dataclass
class PipelineMover:
    """A pipeline whose ranks move values in one way, each what its own program has in its entry: what forward steps
    leave for backward steps, microbatch by microbatch, and state.  `beside`: what all take together, of what each takes
    by itself."""

    movers: Sequence[Mover]
    beside: Callable[[Sequence[Times]], Times]

    @staticmethod
    def of(
        done: lower.Lowered,
        clock: plan.Clock,
        offload: Offload,
        spaces: Spaces,
        way: Way,
        compiled: Collection[str],
        beside: Callable[[Sequence[Times]], Times],
    ) -> PipelineMover:
        assert done.pipeline is not None
        movers = [
            Mover(replace(done, program=program), program.entry, clock, offload, spaces, way, compiled)
            for program in done.pipeline.programs
        ]
        return PipelineMover(movers, beside)

    def least(self) -> tuple[int, float]:
        """As a mover's: of the rank that needs most."""
        each = [mover.least() for mover in self.movers]
        return max(held for held, _ in each), max(seconds for _, seconds in each)

    @cached_property
    def most(self) -> PipelineMoveChoice:
        return self._together([mover.most for mover in self.movers])

    def fewest(self) -> PipelineMoveChoice:
        return self._together([mover.fewest() for mover in self.movers])

    def _together(self, choices: Sequence[MoveChoice]) -> PipelineMoveChoice:
        times = self.beside([choice.times for choice in choices])
        host = max(choice.times.peak[HOST] for choice in choices)
        moved = tuple(choice.moved for choice in choices)
        return PipelineMoveChoice(moved, replace(times, peak={**times.peak, HOST: host}))
