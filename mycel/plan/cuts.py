"""Where to cut a step into stages: by the clock, so that no stage is much longer than another, where little is sent.

Units (staged forward equations, with what of backward belongs to them) are put together to *blocks*, each around one
that takes time, and divided where least goes from one to the next.  With t_s the seconds of a stage for one microbatch
and x_i those of the messages at a cut, a step of m microbatches takes about

    (m - 1) · max_s t_s  +  Σ_s t_s  +  Σ_i x_i

as under 1f1b; the cut that makes this least is found by going through the blocks once for each number of stages,
keeping of all cuts before a block those that no other beats in both, the longest stage and the messages (`best_cut`).
Stages that do not fit the memory of their rank, with the microbatches it has in flight, are none.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from mycel.errors import PlanError
from mycel.ir import Var
from mycel.plan.clock import Clock
from mycel.plan.links import Link
from mycel.plan.stages import StageMap, StepFlow, cut

LESS_MEMORY = "recompute: full, smaller microbatches, more stages, or ZeRO inside a stage"
WORTH = 0.002  # the share of a microbatch that a unit takes to be a block of its own


@dataclass(frozen=True)
class CutBlock:
    """Units that stay together: the first of them, their seconds forward and backward, and those of the messages where
    a stage begins with them."""

    unit: int
    seconds: float
    message: float = 0.0


def cut_blocks(flow: StepFlow, clock: Clock, link: Link, compiled: Collection[str] = ()) -> list[CutBlock]:
    """The blocks of a step."""
    units = list(flow.units)
    fine = cut(flow, units[1:])
    seconds = [0.0] * len(units)
    spans = clock.spans(flow.program, flow.body.name, compiled)
    for i, place in fine.eqns.items():
        start, end = spans[i]
        seconds[place] += end - start
    crossing = [0.0] * (len(units) + 1)  # how much more goes over a cut before this unit than before the last
    for v, (low, high) in _spans(fine).items():
        crossing[low + 1] += v.type.bytes
        crossing[high + 1] -= v.type.bytes
    sizes = list(itertools.accumulate(crossing))
    messages = [2 * link.start_s + size / link.bytes_s if i else 0.0 for i, size in enumerate(sizes[:-1])]
    for used in flow.state.values():  # what a microbatch leaves to the next stays in one stage
        places = [fine.eqns[i] for i in used if i in fine.eqns]
        for i in range(min(places, default=0) + 1, max(places, default=0) + 1):
            messages[i] = math.inf
    return _joined(units, seconds, messages)


def _spans(fine: StageMap) -> dict[Var, tuple[int, int]]:
    """Of values that others read: the first and the last unit between which they go, up or down."""
    spans: dict[Var, tuple[int, int]] = {}
    for i, place in fine.eqns.items():
        for v in fine.flow.block.eqns[i].vars:
            home = fine.of.get(v)
            if home is not None and home != place:
                low, high = spans.get(v, (home, home))
                spans[v] = min(low, place), max(high, place)
    return spans


def _joined(units: Sequence[int], seconds: Sequence[float], messages: Sequence[float]) -> list[CutBlock]:
    """Between two units that take time, the cut is where least is sent."""
    least = WORTH * sum(seconds)
    heavy = [i for i, s in enumerate(seconds) if s > least] or [0]
    starts = [0]
    for before, after in itertools.pairwise(heavy):
        starts.append(min(range(before + 1, after + 1), key=lambda i: (messages[i], -i)))
    ends = [*starts[1:], len(units)]
    return [CutBlock(units[a], sum(seconds[a:b]), messages[a]) for a, b in zip(starts, ends, strict=True)]


Fits = Callable[[int, int, int], bool]  # does a stage, by its number, of the blocks from one to before another?


def best_cut(blocks: Sequence[CutBlock], stages: int, microbatches: int, fits: Fits | None = None) -> list[int]:
    """The blocks at which the second and later stages begin; no other cut, of those whose stages fit, is worth less."""
    if stages > len(blocks):
        raise PlanError(
            f"stages: {stages}, but the step has {len(blocks)} parts that take time\n"
            f"  try       stages: {len(blocks)}, or less"
        )
    before = [0.0, *itertools.accumulate(b.seconds for b in blocks)]
    # by the number of blocks: cuts as (the longest stage, messages, where stages begin), none beaten in both
    fronts: list[list[tuple[float, float, tuple[int, ...]]]] = [
        [(before[i], 0.0, ())] if i and (fits is None or fits(0, 0, i)) else [] for i in range(len(blocks) + 1)
    ]
    for stage in range(2, stages + 1):
        following: list[list[tuple[float, float, tuple[int, ...]]]] = [[] for _ in fronts]
        for end in range(stage, len(blocks) - (stages - stage) + 1):
            options = [
                (max(longest, before[end] - before[i]), sent + blocks[i].message, (*starts, i))
                for i in range(stage - 1, end)
                if fronts[i] and (fits is None or fits(stage - 1, i, end))
                for longest, sent, starts in fronts[i]
            ]
            following[end] = _unbeaten(options)
        fronts = following
    if not fronts[-1]:
        raise PlanError(f"no cut into {stages} stages fits the memory of its ranks\n  try       {LESS_MEMORY}")
    best = min(fronts[-1], key=lambda option: ((microbatches - 1) * option[0] + option[1], option[2]))
    return list(best[2])


@dataclass(frozen=True)
class BlockMemory:
    """What a block of units takes: by parameter, bytes of it, of its state and of its gradient; and bytes of what one
    microbatch leaves for backward."""

    held: Mapping[str, int]
    kept: int


def block_memory(flow: StepFlow, blocks: Sequence[CutBlock]) -> list[BlockMemory]:
    """Of each block of a step."""
    program, starts = flow.program, [b.unit for b in blocks]
    stages = cut(flow, starts[1:])
    parameters = {x: v for v, x in flow.body.outer.items() if isinstance(x, Var)}
    sizes: dict[Var, int] = {}
    for v in program.inputs_of("parameter"):
        name = program.role(v).name
        state = sum(x.type.bytes for x in program.inputs_of("state") if program.role(x).of == name)
        sizes[v] = v.type.bytes + state
    for carry, v in flow.trained.items():
        outer = flow.body.outer[v]
        if isinstance(outer, Var) and outer in sizes:
            sizes[outer] += flow.body.carried[carry].type.bytes
    held: list[dict[str, int]] = [{} for _ in blocks]
    for x, size in sizes.items():
        for s in stages.users.get(parameters[x], ()) if x in parameters else ():
            held[s][x.name] = size
    kept = [0] * len(blocks)
    late = {v for i in flow.backward for v in flow.behind(flow.block.eqns[i])}
    for v, s in stages.of.items():
        if v in late and flow.makers[v] not in flow.backward:
            kept[s] += v.type.bytes
    return [BlockMemory(h, k) for h, k in zip(held, kept, strict=True)]


@dataclass(frozen=True)
class StageCutter:
    """Cuts a step into so many stages; `in_flight`: microbatches that each holds at once."""

    blocks: Sequence[CutBlock]
    memory: Sequence[BlockMemory]
    in_flight: Sequence[int]
    microbatches: int

    def best(self, room: float | None = None) -> list[int]:
        """The blocks at which the second and later stages begin; with `room`, of cuts no stage of which takes more
        bytes, if there are any."""
        stages = len(self.in_flight)
        if room is not None:
            with contextlib.suppress(PlanError):
                fits = lambda stage, first, end: self._takes(stage, first, end) <= room
                return best_cut(self.blocks, stages, self.microbatches, fits)
        return best_cut(self.blocks, stages, self.microbatches)

    def needs(self, starts: Sequence[int]) -> float:
        """About the bytes of the stage that takes most, besides what it computes with."""
        edges = itertools.pairwise([0, *starts, len(self.blocks)])
        return max(self._takes(stage, *ends) for stage, ends in enumerate(edges))

    def _takes(self, stage: int, first: int, end: int) -> float:
        held: dict[str, int] = {}
        for block in self.memory[first:end]:
            held.update(block.held)
        return sum(held.values()) + self.in_flight[stage] * sum(b.kept for b in self.memory[first:end])


def _unbeaten(options: list[tuple[float, float, tuple[int, ...]]]) -> list[tuple[float, float, tuple[int, ...]]]:
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for option in sorted(options):
        if not kept or option[1] < kept[-1][1]:
            kept.append(option)
    return kept
