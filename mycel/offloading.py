"""A lowered step and a budget for each memory space -> what it moves to the host and back, by the clock.

ways        from the one that waits least for copies to the one that needs the least memory: values leave, as many
            as there is time for; optimiser state lives on the host, too; then parameters, updated on the device or
            where they live; and with windows: fewer bytes are on their way at once, and computing waits for them
most        all that a way moves: the least memory it can do with
fewest      as few values leave as the budget asks for, those made first before others: they have longest, and the
            wire is busy from the start.  Windows are as wide as there is memory for

with_moves  what backward computes again for `most` to fit, and then the `fewest`: of all ways the fastest
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from mycel import lower, plan
from mycel.errors import PlanError
from mycel.ir import DEVICE, HOST, Program, Var, packed
from mycel.plan import Offload, Offloaded, Times
from mycel.plan.offload import ENDLESS
from mycel.sizes import shown

SLACK = 0.25  # where a way to move needs more than a budget by this share, not all prices are tried
NEAR = 0.01  # no other way to move is tried where a step is as near to its bound; parameters, which are needed more
FAR = 0.25  # often than all else, stay on the device where it is as near as this
AHEAD = (2, 4, 8, 16)  # chunks of an update, or of parameters, on their way at once
SHARES = (1.0, 0.75, 0.5, 0.25)  # of what the host can update, that it does: the device updates the others meanwhile


@dataclass(frozen=True)
class Spaces:
    """The most bytes that may be used of each; None: no bound."""

    device: int | None
    host: int | None

    @staticmethod
    def of(offload: Offload, budget: int | None, hardware: plan.Hardware) -> Spaces:
        return Spaces(budget, offload.host if offload.host is not None else hardware.host_memory)

    def fit(self, times: Times) -> bool:
        return self.short(times) == (0, 0)

    def short(self, times: Times) -> tuple[int, int]:
        """The bytes that are missing on device and host."""
        device = 0 if self.device is None else max(times.peak[DEVICE] - self.device, 0)
        return device, 0 if self.host is None else max(times.peak[HOST] - self.host, 0)


@dataclass(frozen=True)
class Way:
    """To move: is optimiser state on the host, are parameters; are the bytes on their way bounded; are parameters
    updated on the host, where their state is there, too?"""

    state: bool
    windows: bool
    parameters: bool = False
    update: bool = False


def ways(offload: Offload, is_measured: bool) -> Iterator[list[Way]]:
    """Those a plan allows, first those that wait for copies only where there is nothing else to do.  State goes before
    parameters, which are needed more often.  `is_measured`: how fast the host updates is known."""
    choices = {"none": [False], "host": [True], "auto": [False, True]}
    lives = [
        (state, parameters)
        for parameters in choices[offload.parameters]
        for state in choices[offload.optimizer]
        if not (parameters and not state and offload.parameters == offload.optimizer == "auto")
    ]
    updates = {"device": [False], "host": [True], "auto": [False, True] if is_measured else [False]}[offload.update]
    for windows in (False, True) if (offload.activations, offload.gradients) != ("none", "none") else (False,):
        yield [
            Way(state, windows, parameters, update)
            for state, parameters in lives
            for update in (updates if state else [False])
        ]


@dataclass(frozen=True)
class StepOutcome:
    """A step lowered under a decision of what backward computes again, what that takes, and what is on the host
    meanwhile; `steps`: of a pipeline, what its steps take."""

    residuals: plan.Residuals
    lowered: lower.Lowered
    times: Times
    moved: Offloaded | None = None
    moved_by_rank: tuple[Offloaded, ...] = ()  # of a pipeline
    steps: plan.StageCosts | None = None


class LeastOfMoves(NamedTuple):
    """Bytes on device and host, and seconds, below which a way to move never is."""

    device: int
    host: int
    seconds: float


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
    steps: frozenset[str] = frozenset()  # of a pipeline: the blocks that its entry calls, microbatch by microbatch
    share: float = 1.0  # of what the host can update, that it does

    def least(self) -> LeastOfMoves:
        """The bytes that inputs take on device and host, and seconds, below which this way never is: what lives on the
        host comes once a step at least."""
        every = [mover._least() for mover in self._by_share]
        return every[0]._replace(seconds=min(each.seconds for each in every))

    def _least(self) -> LeastOfMoves:
        lives = [v for v in self.done.program.inputs if v.name in self._homes]
        away = sum(v.type.bytes for v in lives)
        held = sum(v.type.bytes for v in self.done.program.inputs) - away
        hosted = {v for update in self._updates for v in update.state}
        moved_s = sum(self.clock.hardware.move_s(v.type.bytes) for v in lives if v not in hosted)
        host_s = sum(update.seconds(self.clock.hardware) for update in self._updates)
        return LeastOfMoves(held, away, max(moved_s, host_s))

    @cached_property
    def _by_share(self) -> list[Mover]:
        """Of host and device together updating what the host can, several ways to share that; the host all of it,
        where the plan says so."""
        shares = SHARES[1:] if self.way.update and self.offload.update == "auto" else ()
        return [self, *(replace(self, share=share) for share in shares)]

    @property
    def updates(self) -> bool:
        """Is there anything that the host can update?"""
        return bool(self._updates)

    @cached_property
    def most(self) -> MoveChoice:
        """All that can be is moved."""
        return self._choice(len(self.could), self._largest if self.way.windows else ENDLESS, AHEAD[0])

    def fewest(self) -> MoveChoice:
        """The fastest that fits with as few moves as that takes; `most`, if that does not."""
        if not self._fits(self.most):
            return self.most
        shared = [mover._fewest() for mover in self._by_share if self._fits(mover.most)]
        return min(shared, key=lambda c: c.times.seconds)

    def _fewest(self) -> MoveChoice:
        (count, window), best = self._narrowed()
        mover = self
        leaves = self._updates or any(a.kind == "gradients" for a in self.could[:count])
        if self._norms and not leaves:  # then the norms of gradients are one kernel
            without = replace(self, offload=replace(self.offload, gradients="none"))
            same = without._choice(count, window, AHEAD[0])
            mover, best = (without, same) if self._fits(same) else (self, best)
        for ahead in AHEAD[1:] if self._homes else ():
            more = mover._choice(count, window, ahead)
            if not self._fits(more):
                break
            best = min(best, more, key=lambda c: c.times.seconds)
        return best

    def _narrowed(self) -> tuple[tuple[int, int], MoveChoice]:
        """How many values leave, and the bytes of them on their way at once: as few as fit, or with windows all in the
        widest, if that is faster."""
        every, narrowest = len(self.could), self._largest if self.way.windows else ENDLESS
        kept = sum(getattr(self.offload, a.kind) == "auto" for a in self.could)
        counts = list(range(every, every - kept - 1, -1))
        count, best = self._last(counts, lambda n: self._choice(n, narrowest, AHEAD[0]), self.most)
        if not self.way.windows:
            return (count, narrowest), best
        window, wide = self._last(self._windows(), lambda w: self._choice(every, w, AHEAD[0]), self.most)
        if wide.times.seconds < best.times.seconds:
            return (every, window), wide
        return (count, narrowest), best

    @cached_property
    def could(self) -> list[plan.Absence]:
        """The values of its body that may leave, those first that a plan has on the host; of others, as many as there
        is room for beside what lives there."""
        kinds = [kind for kind in ("activations", "gradients") if getattr(self.offload, kind) != "none"]
        sums = bool(self.steps)
        absences = plan.absences(self._base, self.body, self._starts(self.body), self.clock.hardware, kinds, sums)
        gone = {a.var for a in self._leaving} if self.body == self._base.entry else set()
        absences = [a for a in absences if a.var not in gone]
        absences.sort(key=lambda a: getattr(self.offload, a.kind) == "auto")
        if self.spaces.host is None:
            return absences
        room = self.spaces.host - sum(v.type.bytes for v in self.done.program.inputs if v.name in self._homes)
        spans = {i: (a.defined, a.use, a.bytes) for i, a in enumerate(absences)}
        gradients = {-i: (a.defined, a.use, a.bytes) for i, a in enumerate(self._leaving, 1)}
        forced = sum(getattr(self.offload, a.kind) == "host" for a in absences)
        counts = range(forced, len(absences) + 1)
        beyond = bisect.bisect_right(counts, room, key=lambda n: packed(gradients | dict(islice(spans.items(), n)))[1])
        return absences[: forced + max(beyond - 1, 0)]

    @cached_property
    def _homes(self) -> frozenset[str]:
        """Inputs of the entry that live on the host."""
        state = plan.state_inputs(self.done.program) if self.way.state else []
        hosted = [v for update in self._updates for v in update.state]
        return frozenset(v.name for v in (*state, *self._parameters, *hosted))

    @cached_property
    def _updates(self) -> list[plan.HostUpdate]:
        """Parameters, or parts of them, that the host updates."""
        if not self.way.update:
            return []
        could = plan.host_updates(self.done.program, {v.name for v in self._parameters})
        return plan.needed_last(self.done.program, could, self.share)

    @cached_property
    def _hosted(self) -> dict[Var, None]:
        """Inputs that it replaces: these, where they live there, and their state."""
        names = {v.name for v in self._parameters}
        return dict.fromkeys(
            v
            for update in self._updates
            for v in (update.parameter, *update.state)
            if v is not update.parameter or v.name in names
        )

    @cached_property
    def _leaving(self) -> list[plan.Absence]:
        """Their gradients."""
        return plan.leaving_gradients(self._base, self._updates)

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
        leave = self.offload.gradients != "none" or bool(self._updates)
        return leave and self.body == self.done.program.entry

    @cached_property
    def _base(self) -> Program:
        """The program whose update is taken in chunks."""
        program = lower.gradients_may_leave(self.done.program) if self._norms else self.done.program
        updated = {update.parameter.name for update in self._updates}
        return lower.split_updates(program, self._homes, self._chunk, updated)

    @cached_property
    def _visits(self) -> list[plan.Visit]:
        base = self._base
        hosted = lower.hosted_updates(base, {update.parameter.name for update in self._updates})
        as_they_lie = {*self._handed, *((i, v) for i in hosted for v in base.main.eqns[i].vars)}
        return plan.visits(base, base.entry, self._homes, self._starts(base.entry), self.clock.hardware, as_they_lie)

    @cached_property
    def _handed(self) -> dict[tuple[int, Var], tuple[str, Var]]:
        """Parameters that blocks which are run several times get as they lie, and stream by themselves."""
        blocks = self.steps or {self.body} - {self._base.entry}
        return plan.handed_to(self._base, blocks, {v.name for v in self._parameters})

    @cached_property
    def _visits_inside(self) -> dict[str, list[plan.Visit]]:
        """By block."""
        names: dict[str, set[str]] = {}
        for block, v in self._handed.values():
            names.setdefault(block, set()).add(v.name)
        return {
            block: plan.visits(self._base, block, mine, self._starts(block), self.clock.hardware)
            for block, mine in names.items()
        }

    @cached_property
    def _starts(self) -> Callable[[str], list[float]]:
        """When equations of a block begin, and when all have ended."""
        return cache(lambda block: [start for start, _ in self.clock.spans(self._base, block, self.compiled)])

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
        visiting = {**self._visits_inside, entry: self._visits}
        placed = {
            block: self._copies(block, away if block == self.body else (), visiting.get(block, ())).placed(windows)
            for block in dict.fromkeys((self.body, *visiting))
        }
        inside = {block: each.streamed for block, each in placed.items() if block != entry and each.streamed}
        # of those that blocks or the host take as they lie, some are read nowhere else
        as_they_lie = dict.fromkeys((*(v.name for _, v in self._handed), *(v.name for v in self._hosted)))
        visited = {s.input: s for s in placed[entry].streamed}
        streamed = {**{name: plan.StreamedInput(name, ()) for name in as_they_lie}, **visited}
        updated = {update.parameter.name: placed[entry].left[update.gradient.name] for update in self._updates}
        moved, lives = placed[self.body].moved, tuple(streamed.values())
        planned = Offloaded(self.body, moved, lives, self._chunk, self._norms, inside, updated)
        return MoveChoice(planned, self.clock(lower.with_copies(self._base, planned), self.compiled))

    def _copies(self, block: str, away: Sequence[plan.Absence], visiting: Sequence[plan.Visit]) -> plan.Copies:
        leaving = self._leaving if block == self._base.entry else ()
        hardware, starts = self.clock.hardware, self._starts(block)
        return plan.Copies(self._base, block, starts, hardware, away, visiting, leaving, self._hosted)

    def _fits(self, choice: MoveChoice) -> bool:
        """On the device."""
        return self.spaces.short(choice.times)[0] == 0

    def _last(
        self, values: Sequence[int], choice: Callable[[int], MoveChoice], best: MoveChoice
    ) -> tuple[int, MoveChoice]:
        """Of values that take ever more memory the last that fits, and its choice; `best` is that of the first."""
        room = math.inf if self.spaces.device is None else self.spaces.device
        k, best = plan.last_that_fits(len(values) - 1, lambda i: choice(values[i]), room, best)
        return values[k], best


@dataclass
class PipelineMover:
    """A pipeline whose ranks move values in one way, each what its own program has in its entry: what forward steps
    leave for backward steps, microbatch by microbatch, sums of gradients, and state; and parameters, which come inside
    the steps.  `beside`: what all take together, of what each takes by itself."""

    movers: Sequence[Mover]
    beside: Callable[[Sequence[Times]], Times]

    @staticmethod
    def of(
        outcome: StepOutcome,
        clocks: Sequence[plan.Clock],
        compiled: Sequence[Collection[str]],
        offload: Offload,
        spaces: Spaces,
        way: Way,
    ) -> PipelineMover:
        """`clocks`, `compiled`: of the ranks of each place along its stages."""
        done = outcome.lowered
        assert done.pipeline is not None and outcome.steps is not None
        steps = plan.step_names(done.pipeline.schedule.stages)
        movers = [
            Mover(replace(done, program=p), p.entry, clock, offload, spaces, way, names, steps.difference(names))
            for p, clock, names in zip(done.pipeline.programs, clocks, compiled, strict=True)
        ]
        return PipelineMover(movers, partial(plan.beside_each_other, done.pipeline.schedule, outcome.steps))

    @property
    def updates(self) -> bool:
        return any(mover.updates for mover in self.movers)

    def least(self) -> LeastOfMoves:
        """As a mover's: of the rank that needs most."""
        device, host, seconds = zip(*(mover.least() for mover in self.movers), strict=True)
        return LeastOfMoves(max(device), max(host), max(seconds))

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


S = TypeVar("S", bound=StepOutcome)


class MovableStep(Protocol[S]):
    """A step whose values may be moved: lowered at prices of a kept byte, and what of that can be moved in a way."""

    @property
    def pairs(self) -> int: ...

    @property
    def costs(self) -> plan.Costs: ...

    def under(self, prices: Sequence[float]) -> S: ...

    def mover(self, outcome: S, way: Way, spaces: Spaces) -> Mover | PipelineMover: ...


def with_moves(
    step: MovableStep[S],
    offload: Offload,
    spaces: Spaces,
    recompute: str,
    is_likely: Callable[[Way], bool] = lambda way: True,
) -> S:
    """What backward computes again and what is moved: the fastest that fits both memory spaces.  For each way to move,
    the least is computed again with which that fits when all that can be is moved; then no more is moved than it
    takes.  Bounded from below: no way is faster than the step without any budget, nor than what it must move.
    `is_likely`: may a way fit the device, by what is known of the step?  The others are tried where none of these
    does."""
    lowered = cache(step.under)
    free = lowered(tuple(plan.ladder(step.costs, recompute)[:1]))
    fitting: list[S] = []
    nearest: list[Times] = []
    movers: dict[tuple[int, Way], tuple[S, Mover | PipelineMover]] = {}

    def mover_of(outcome: S, way: Way) -> Mover | PipelineMover:
        """Several prices may have the same outcome."""
        key = id(outcome.lowered), way
        if key not in movers:
            movers[key] = outcome, step.mover(outcome, way, spaces)
        return movers[key][1]

    def with_choice(outcome: S, choice: MoveChoice | PipelineMoveChoice) -> S:
        if isinstance(choice, PipelineMoveChoice):
            return replace(outcome, times=choice.times, moved_by_rank=choice.moved)
        return replace(outcome, times=choice.times, moved=choice.moved)

    def attempt(way: Way | None) -> None:
        """The best in a way; None: nothing is moved."""

        def under(prices: Sequence[float]) -> S:
            outcome: S = lowered(tuple(prices))
            if way is not None:
                outcome = with_choice(outcome, mover_of(outcome, way).most)
            nearest.append(outcome.times)
            return outcome

        with contextlib.suppress(PlanError):
            moves = way is not None
            outcome = plan.decide(under, step.pairs, step.costs, spaces.device, recompute, SLACK, upwards=moves)
            if way is not None:
                outcome = with_choice(outcome, mover_of(outcome, way).fewest())
            if spaces.fit(outcome.times):
                fitting.append(outcome)

    def missing(way: Way) -> int:
        """Bytes that a way is short of, whatever is computed again."""
        least = mover_of(free, way).least()
        spaces_ = (spaces.device, least.device), (spaces.host, least.host)
        return sum(max(needs - has, 0) for has, needs in spaces_ if has is not None)

    def could_win(way: Way) -> bool:
        mover = mover_of(free, way)
        if way.update and offload.update == "auto" and not mover.updates:
            return False
        best_s = min((outcome.times.seconds for outcome in fitting), default=math.inf)
        bound = max(mover.least().seconds, free.times.seconds)
        far = FAR if way.parameters and not way.update else NEAR
        return bound * (1 + far) < best_s and not missing(way)

    could_stay = spaces.device is None or free.times.held <= spaces.device
    if could_stay and not any(getattr(offload, kind) == "host" for kind in plan.KINDS):
        attempt(None)
    every = list(ways(offload, step.costs.hardware.update_bytes_s is not None))
    unlikely: list[Way] = []
    for each in every:
        if not fitting or not each[0].windows:
            for way in each:
                if could_win(way):
                    attempt(way) if is_likely(way) else unlikely.append(way)
    for way in unlikely if not fitting else ():
        if could_win(way):
            attempt(way)
    if not fitting:
        if not nearest:  # no way could have fit
            dearest = lowered(tuple(plan.ladder(step.costs, recompute)[-1:]))
            nearest += [mover_of(dearest, way).most.times for way in every[-1]]
        raise PlanError(_too_little(min(nearest, key=lambda times: sum(spaces.short(times))), spaces))
    best = min(fitting, key=lambda outcome: outcome.times.seconds)
    moved = best.moved_by_rank or (best.moved,)
    if (offload.update, offload.optimizer) == ("host", "host") and not any(m and m.updated for m in moved):
        raise PlanError(
            "offload: update is host, but nothing can be updated there: parameters would live there, as matrices do "
            "with parameters: host, or ranks would update parts of them (zero: 1)\n"
            f"  said      parameters: {offload.parameters}, optimizer: {offload.optimizer}\n"
            "  try       {parameters: host, optimizer: host, update: host}, or update: device"
        )
    if best.lowered.pipeline is not None:
        return replace(best, lowered=lower.with_moves_by_rank(best.lowered, best.moved_by_rank))
    return replace(best, lowered=lower.with_moves(best.lowered, best.moved), moved=best.moved or None)


def _too_little(times: Times, spaces: Spaces) -> str:
    """What is missing, and where."""
    device, host = spaces.short(times)
    lines = []
    if device:
        lines += [
            f"a step needs at least {shown(times.peak[DEVICE])} on the device, the budget is "
            f"{shown(spaces.device or 0)}: {shown(device)} too much",
            f"  of which  {shown(times.held)} are parameters, optimiser state and the batch",
            f"  peak      {times.at or 'in the update'}",
        ]
        lines += [f"  stages    {needs}"] if (needs := plan.of_stages(times)) else []
    if host:
        lines.append(
            f"a step needs {shown(times.peak[HOST])} on the host, which has {shown(spaces.host or 0)}: "
            f"{shown(host)} too much"
        )
    lines.append("  tried     computing again what can be, and moving to the host what the plan lets")
    more = [plan.less(times)] if device or not host else []
    more += [f"a larger host: in offload, {shown(times.peak[HOST])} or more, or fewer kinds there"] if host else []
    return "\n".join([*lines, f"  try       {'; '.join(more)}"])
