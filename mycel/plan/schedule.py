"""Schedules of a pipeline as data: which step of which stage a rank runs next, for each microbatch once.

    schedule = named("1f1b", ranks=4, microbatches=8)
    schedule.orders[0]           (F0.0, F0.1, F0.2, F0.3, B0.0, F0.4, B0.1, …)      what rank 0 does, in its order
    timeline(schedule, costs)    when each step starts and ends, how long ranks idle; PlanError where ranks wait in a
                                 circle

A step is F (forward), B (backward; of what the stage was given, where weights have a step of their own) or W (the
gradients of weights) of a stage and a microbatch, and waits for

    F(s, m)   F(s - 1, m)                 B(s, m)   F(s, m) and B(s + 1, m)                 W(s, m)   B(s, m)

With p ranks and F, B, W the seconds of a rank's steps of one microbatch, ranks idle for

    gpipe        all forward, then all backward                                             (p - 1) (F + B + W)
    1f1b         one forward, one backward in turn; rank i holds p - i microbatches         (p - 1) (F + B + W)
    interleaved  as 1f1b, each rank with v stages that lie p apart                          (p - 1) (F + B + W) / v
    zbh1         as 1f1b, weights where there was nothing to do; holds as many              (p - 1) (F + B - W)
    zbv          two stages a rank, down the ranks and up again, weights apart              0 where F = B = W
    dualpipev    the stages of zbv, forward and backward of both in turn                    (p - 1) (F + B - W) / 2
                                                                                            where F = B
    searched     by the costs: the best of list schedules and of all the above; `bound` says how much less is possible

(Narayanan et al. 2021, Qi et al. 2023 and 2024.)  A schedule for a number of microbatches that does not fill its
pattern is that of the next one that does, without the steps of those that are not there.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mycel.errors import PlanError
from mycel.plan.names import near

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"
KINDS = (FORWARD, BACKWARD, WEIGHT)
NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight"}
WIDTH = 110  # columns of a drawing


def step_name(kind: str, stage: int) -> str:
    """The name of the block of a stage's step."""
    return f"{NAMES[kind]}_{stage}"


def step_names(stages: int) -> frozenset[str]:
    """Of all that stages may have."""
    return frozenset(step_name(kind, s) for kind in KINDS for s in range(stages))


@dataclass(frozen=True, order=True, slots=True)
class StageStep:
    """One step of one stage for one microbatch."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"

    @property
    def words(self) -> str:
        """For people: stage 2, backward of microbatch 5"""
        what = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight gradients"}[self.kind]
        return f"stage {self.stage}, {what} of microbatch {self.microbatch}"


@dataclass(frozen=True)
class StageCosts:
    """Seconds of each stage's steps for one microbatch, of a message between ranks, and bytes that a stage holds of a
    microbatch from its forward to its last step."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    message: float = 0.0
    held: tuple[float, ...] = ()

    @staticmethod
    def equal(stages: int, forward: float = 1.0, backward: float = 1.0, weight: float = 1.0) -> StageCosts:
        """All stages alike."""
        return StageCosts((forward,) * stages, (backward,) * stages, (weight,) * stages)

    def data(self) -> dict[str, Any]:
        """Plain data that `read` takes back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @staticmethod
    def read(data: Mapping[str, Any]) -> StageCosts:
        forward, backward, weight, held = (
            tuple(map(float, data[name])) for name in ("forward", "backward", "weight", "held")
        )
        return StageCosts(forward, backward, weight, float(data["message"]), held)

    def of(self, step: StageStep, splits: bool) -> float:
        """Of one step; backward has the weights with it where the schedule does not split them."""
        if step.kind == FORWARD:
            return self.forward[step.stage]
        if step.kind == WEIGHT:
            return self.weight[step.stage]
        return self.backward[step.stage] + (0.0 if splits else self.weight[step.stage])

    def all(self, stage: int) -> float:
        return self.forward[stage] + self.backward[stage] + self.weight[stage]


StepGraph = Mapping[tuple[str, int], tuple[tuple[str, int], ...]]  # (kind, stage) -> those it waits for


@dataclass(frozen=True)
class PipelineSchedule:
    """The order of steps of each rank; `place`: the rank of each stage; `splits`: do weights have steps of their own?
    `after`: the steps (kind, stage) of the same microbatch that each waits for, where stages are no chain."""

    name: str
    microbatches: int
    place: tuple[int, ...]
    splits: bool
    orders: tuple[tuple[StageStep, ...], ...]
    after: StepGraph | None = None

    @property
    def stages(self) -> int:
        return len(self.place)

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def last_kind(self) -> str:
        """After which step nothing of a microbatch is held any more."""
        return WEIGHT if self.splits else BACKWARD

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s, r in enumerate(self.place) if r == rank)

    def awaited(self, step: StageStep) -> list[StageStep]:
        """The steps it waits for."""
        if self.after is not None:
            return [StageStep(kind, s, step.microbatch) for kind, s in self.after.get((step.kind, step.stage), ())]
        if step.kind == FORWARD:
            return [replace(step, stage=step.stage - 1)] if step.stage else []
        if step.kind == WEIGHT:
            return [replace(step, kind=BACKWARD)]
        above = [replace(step, stage=step.stage + 1)] if step.stage + 1 < self.stages else []
        return [replace(step, kind=FORWARD), *above]

    @cached_property
    def position(self) -> Mapping[StageStep, tuple[int, int]]:
        """Of each step: its rank, and the how manieth it is there."""
        return {step: (r, i) for r, order in enumerate(self.orders) for i, step in enumerate(order)}

    def in_time(self) -> Iterator[tuple[int, StageStep]]:
        """All steps with their ranks, each behind all that it waits for; PlanError where ranks wait in a circle."""
        at, done = [0] * self.ranks, set[StageStep]()
        while any(at[r] < len(order) for r, order in enumerate(self.orders)):
            moved = False
            for r, order in enumerate(self.orders):
                while at[r] < len(order) and all(a in done for a in self.awaited(order[at[r]])):
                    done.add(order[at[r]])
                    yield r, order[at[r]]
                    at[r] += 1
                    moved = True
            if not moved:
                raise PlanError(self._stuck(at, done))

    def _stuck(self, at: Sequence[int], done: set[StageStep]) -> str:
        lines = []
        for r, order in enumerate(self.orders):
            if at[r] < len(order):
                missing = next(a for a in self.awaited(order[at[r]]) if a not in done)
                lines.append(f"  rank {r}    at {order[at[r]]} waits for {missing} of rank {self.place[missing.stage]}")
        return "\n".join([f"schedule {self.name}: ranks wait for each other in a circle", *lines])

    @property
    def in_flight(self) -> list[int]:
        """The most microbatches that each stage holds at once, from their forward to their last step."""
        most = [0] * self.stages
        for order in self.orders:
            now = [0] * self.stages
            for step in order:
                now[step.stage] += (step.kind == FORWARD) - (step.kind == self.last_kind)
                most[step.stage] = max(most[step.stage], now[step.stage])
        return most

    def held(self, of_stage: Sequence[float] = (), pending: Sequence[float] = ()) -> list[float]:
        """The most that each rank holds at once: microbatches between their forward and their last step, or what
        `of_stage` says these take; where weights have a step of their own, `pending` from backward to that."""
        sizes = of_stage or (1.0,) * self.stages
        left = pending or (sizes if self.splits else (0.0,) * self.stages)
        most = []
        for order in self.orders:
            now, peak = 0.0, 0.0
            for step in order:
                change = {FORWARD: sizes, BACKWARD: left, WEIGHT: (0.0,) * self.stages}
                before = {FORWARD: (0.0,) * self.stages, BACKWARD: sizes, WEIGHT: left}
                now += change[step.kind][step.stage] - before[step.kind][step.stage]
                peak = max(peak, now)
            most.append(peak)
        return most


@dataclass(frozen=True)
class PipelineTimes:
    """When each step starts and ends."""

    schedule: PipelineSchedule
    start: Mapping[StageStep, float]
    end: Mapping[StageStep, float]

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        return max(self.end.values(), default=0.0)

    @property
    def work(self) -> list[float]:
        """What each rank computes."""
        return [sum(self.end[s] - self.start[s] for s in order) for order in self.schedule.orders]

    @property
    def idle(self) -> list[float]:
        """How long each rank has nothing to do while the pipeline runs."""
        return [self.seconds - work for work in self.work]

    @property
    def bubble(self) -> float:
        """The most that a rank waits between its own first step and its last: what a step costs where the next one may
        start on some ranks while others still end this one."""
        spans = [self.end[order[-1]] - self.start[order[0]] if order else 0.0 for order in self.schedule.orders]
        return max(span - work for span, work in zip(spans, self.work, strict=True))

    def __str__(self) -> str:
        """A row for each rank, a box for each step, dots where it waits; as wide as the labels need, up to WIDTH."""
        shortest = min((self.end[s] - self.start[s] for s in self.end if self.end[s] > self.start[s]), default=1.0)
        several = self.schedule.stages > self.schedule.ranks
        widest = max((len(_label(s, several)) for s in self.end), default=1) + 1
        unit, rows = max(shortest / widest, self.seconds / WIDTH), []
        for rank, order in enumerate(self.schedule.orders):
            row = ""
            for step in order:
                row += "." * (round(self.start[step] / unit) - len(row))
                columns = max(round(self.end[step] / unit) - len(row), 0)
                row += _label(step, several).ljust(columns, "-")[:columns]
            rows.append(f"rank {rank}  {row}")
        return "\n".join(rows)


def _label(step: StageStep, several: bool) -> str:
    return str(step) if several else f"{step.kind}{step.microbatch}"


def timeline(schedule: PipelineSchedule, costs: StageCosts) -> PipelineTimes:
    """Every rank runs its steps in their order, each as soon as what it waits for is there."""
    start: dict[StageStep, float] = {}
    end: dict[StageStep, float] = {}
    free = [0.0] * schedule.ranks
    for rank, step in schedule.in_time():
        came = [end[a] + (costs.message if schedule.place[a.stage] != rank else 0.0) for a in schedule.awaited(step)]
        start[step] = max([free[rank], *came])
        free[rank] = end[step] = start[step] + costs.of(step, schedule.splits)
    return PipelineTimes(schedule, start, end)


def bound(place: Sequence[int], microbatches: int, costs: StageCosts) -> float:
    """No schedule of these stages on these ranks is shorter: each rank waits for the first microbatch to come down to
    it, does all of its work, and its last backward step has to come up to the first stage again."""
    stages = len(place)
    down = list(itertools.accumulate(costs.forward, initial=0.0))  # before the forward step of a stage
    up = [*itertools.accumulate(costs.backward, initial=0.0)]  # behind the backward step of a stage
    least = down[-1] + up[-1] + costs.weight[0]
    for rank in set(place):
        own = [s for s in range(stages) if place[s] == rank]
        both = sum(costs.forward[s] + costs.backward[s] for s in own)
        after = up[min(own)] + (costs.weight[0] if min(own) else min(costs.weight[s] for s in own))
        least = max(
            least,
            down[min(own)] + microbatches * sum(costs.all(s) for s in own),
            down[min(own)] + microbatches * both + after,
        )
    return least


# -- the named ones: (ranks, microbatches) -> orders


def _whole(steps: Iterable[StageStep], microbatches: int) -> tuple[StageStep, ...]:
    """Without the microbatches that are not there: steps wait for those of their own microbatch alone."""
    return tuple(s for s in steps if s.microbatch < microbatches)


def gpipe(ranks: int, microbatches: int) -> PipelineSchedule:
    """All forward, then all backward."""
    orders = [
        tuple(StageStep(kind, r, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches)) for r in range(ranks)
    ]
    return PipelineSchedule("gpipe", microbatches, tuple(range(ranks)), False, tuple(orders))


def one_f_one_b(ranks: int, microbatches: int) -> PipelineSchedule:
    """Rank i runs p - 1 - i microbatches forward, then forward and backward in turn."""
    return replace(interleaved(ranks, microbatches, 1), name="1f1b")


def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """Each rank has `chunks` stages that lie `ranks` apart, and takes them in turn for `ranks` microbatches at a
    time."""
    full = -(-microbatches // ranks) * ranks if chunks > 1 else microbatches
    orders = []
    for rank in range(ranks):
        turns = [
            (chunk, m)
            for group in range(0, full, ranks)
            for chunk in range(chunks)
            for m in range(group, min(group + ranks, full))
        ]
        ahead = [StageStep(FORWARD, chunk * ranks + rank, m) for chunk, m in turns]
        back = [StageStep(BACKWARD, (chunks - 1 - chunk) * ranks + rank, m) for chunk, m in turns]
        warm = ranks - 1 - rank if chunks == 1 else (ranks - 1 - rank) * 2 + (chunks - 1) * ranks
        warm = min(warm, len(ahead))
        steady = [step for pair in zip(ahead[warm:], back, strict=False) for step in pair]
        orders.append(_whole([*ahead[:warm], *steady, *back[len(ahead) - warm :]], microbatches))
    place = tuple(s % ranks for s in range(ranks * chunks))
    return PipelineSchedule("interleaved", microbatches, place, False, tuple(orders))


def zbh1(ranks: int, microbatches: int) -> PipelineSchedule:
    """1f1b where rank i puts off the weights of i microbatches, to do them while the last ones come back."""
    orders = []
    for rank, order in enumerate(one_f_one_b(ranks, microbatches).orders):
        steps: list[StageStep] = []
        backward = weight = 0
        last_forward = max(i for i, s in enumerate(order) if s.kind == FORWARD)
        for i, step in enumerate(order):
            steps.append(step)
            if step.kind == BACKWARD:
                backward += 1
                if backward - weight > rank or i > last_forward:
                    steps.append(StageStep(WEIGHT, rank, weight))
                    weight += 1
        steps += [StageStep(WEIGHT, rank, m) for m in range(weight, backward)]
        orders.append(tuple(steps))
    return PipelineSchedule("zbh1", microbatches, tuple(range(ranks)), True, tuple(orders))


class _TwoStageSteps:
    """The steps of a rank with two stages, each kind of each of them in the order of microbatches."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.stages, self.steps = stages, list[StageStep]()
        self.count = {(kind, chunk): 0 for kind in KINDS for chunk in (0, 1)}

    def add(self, kinds: str, chunk: int) -> None:
        for kind in kinds:
            self.steps.append(StageStep(kind, self.stages[chunk], self.count[kind, chunk]))
            self.count[kind, chunk] += 1


def zbv(ranks: int, microbatches: int) -> PipelineSchedule:
    """Stage i and stage 2p - 1 - i on rank i: the last rank turns a microbatch round, the first sees its loss."""
    full = max(2 * ranks - 1, microbatches)
    orders = []
    for rank in range(ranks):
        steps = _TwoStageSteps((rank, 2 * ranks - 1 - rank))
        add, count = steps.add, steps.count
        for _ in range(2 * (ranks - rank) - 1):
            add("F", 0)
        for _ in range(rank):
            add("F", 1)
            add("F", 0)
        for _ in range(ranks - rank):
            add("FBW", 1)
        while count["F", 1] < count["F", 0] or count["F", 0] < full:
            if count["F", 0] < full:
                add("F", 0)
            add("BW", 0)
            add("FBW", 1)
        for _ in range(rank):
            add("B", 0)
            add("B", 1)
        for _ in range(ranks - rank):
            add("BW", 0)
        for chunk in (1, 0):
            while count["W", chunk] < count["B", chunk]:
                add("W", chunk)
        orders.append(_whole(steps.steps, microbatches))
    place = tuple(s if s < ranks else 2 * ranks - 1 - s for s in range(2 * ranks))
    return PipelineSchedule("zbv", microbatches, place, True, tuple(orders))


def dualpipev(ranks: int, microbatches: int) -> PipelineSchedule:
    """The stages of zbv, where in the middle each forward step is followed by a backward step of another microbatch, in
    the rank's other stage: neither waits for the other, so messages inside a stage of one can go on beside the other
    (DeepSeek-AI 2025, cut in half)."""
    full = max(2 * ranks, microbatches)
    orders = []
    for rank in range(ranks):
        steps, later = _TwoStageSteps((rank, 2 * ranks - 1 - rank)), deque[int]()  # chunks whose weights are put off
        behind = ranks - rank - 1

        def backward(
            chunk: int, puts_off: bool = False, steps: _TwoStageSteps = steps, later: deque[int] = later
        ) -> None:
            steps.add("B" if puts_off else "BW", chunk)
            if puts_off:
                later.append(chunk)

        for _ in range(2 * behind):
            steps.add("F", 0)
        for _ in range(rank + 1):
            steps.add("F", 0)
            steps.add("F", 1)
        for _ in range(behind):
            backward(1)
            steps.add("F", 1)
        for _ in range(full - 2 * ranks + rank + 1):
            for forward in (0, 1):
                steps.add("F", forward)
                backward(1 - forward)
        for _ in range(behind):
            backward(1)
            steps.add("F", 1)
            backward(0)
        for i in range(rank + 1):
            backward(1, i > (rank + 1) // 2 or (i == (rank + 1) // 2 and rank % 2 == 1))
            backward(0, i >= (rank + 1) // 2)
        for _ in range(behind):
            steps.add("W", later.popleft())
            backward(0, True)
        while later:
            steps.add("W", later.popleft())
        orders.append(_whole(steps.steps, microbatches))
    place = tuple(s if s < ranks else 2 * ranks - 1 - s for s in range(2 * ranks))
    return PipelineSchedule("dualpipev", microbatches, place, True, tuple(orders))


NAMED: dict[str, Callable[[int, int], PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zbh1": zbh1,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
SCHEDULES = (*NAMED, "searched")
PLACE_SCHEDULES = ("gpipe", "1f1b", "searched")  # of stages that are no chain


def named(name: str, ranks: int, microbatches: int) -> PipelineSchedule:
    """A schedule by its name; "interleaved 3" has three stages a rank."""
    chunks, word = stages_a_rank(name), name.split(maxsplit=1)[0]
    return interleaved(ranks, microbatches, chunks) if word == "interleaved" else NAMED[word](ranks, microbatches)


def stages_a_rank(name: str) -> int:
    """How many stages each rank has under a schedule; PlanError for one that is not known."""
    word, *more = str(name).split()
    numbers = [int(n) for n in more if n.isdigit()]
    if word not in SCHEDULES or len(more) > (word == "interleaved") or len(numbers) < len(more) or 0 in numbers:
        raise PlanError(
            f"schedule: {name!r}\n  known     {', '.join(SCHEDULES)}; interleaved 3: three stages a rank\n"
            f"  try       {near(word, SCHEDULES, '1f1b')}"
        )
    return numbers[0] if numbers else {"zbv": 2, "dualpipev": 2, "interleaved": 2}.get(word, 1)


def splits(name: str) -> bool:
    """Have weights steps of their own under a schedule, or could they?"""
    return name.split(maxsplit=1)[0] in ("zbh1", "zbv", "dualpipev", "searched")


def orders_text(schedule: PipelineSchedule) -> tuple[str, ...]:
    """The order of each rank in words that `read_orders` takes."""
    return tuple(" ".join(map(str, order)) for order in schedule.orders)


def read_orders(
    texts: Sequence[str], place: Sequence[int], microbatches: int, after: StepGraph | None = None
) -> PipelineSchedule:
    """What `orders_text` wrote; PlanError for a schedule that is none."""
    orders = []
    for text in texts:
        steps = [re.fullmatch(r"([FBW])(\d+)\.(\d+)", word) for word in text.split()]
        orders.append(tuple(StageStep(m[1], int(m[2]), int(m[3])) for m in steps if m is not None))
    splits = any(s.kind == WEIGHT for order in orders for s in order)
    schedule = PipelineSchedule("searched", microbatches, tuple(place), splits, tuple(orders), after)
    wanted = set(itertools.product(KINDS if splits else KINDS[:2], range(len(place)), range(microbatches)))
    listed = [(s.kind, s.stage, s.microbatch) for order in orders for s in order]
    if set(listed) != wanted or len(listed) != len(wanted):
        raise PlanError("the order of a searched schedule is not that of this step\n  try       plan.given")
    list(schedule.in_time())
    return schedule
