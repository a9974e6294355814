"""What a pipeline takes, from a few of a model's equal layers: no stage of the whole model is lowered.

    pieces   the step with few layers of each list (`shallow.py`), cut around the middle of each:
                 [embedding, first layers | middle layers | last layers, head]
    layer    figures of [middle layers, last layers, head] less those of [last layers, head]
    stage    figures of [middle layers] less those of its layers: what each stage has besides these
    end      figures of another piece less those of its layers and of a stage: what is before, between and behind lists

Figures are what the one clock says of the program of a piece, lowered for one microbatch and for two: seconds of its
steps (with adding to sums) and of what is around them, bytes that are there for good, and those of a microbatch between
its forward and its last step.  Any stage of the whole is a sum of them.  The cut is the best by these (`plan/cuts.py`),
the schedule as named or searched, bubbles are those of its `timeline`, microbatches in flight those that it holds.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import nn

from mycel import lower, plan
from mycel.errors import PlanError
from mycel.ir import DEVICE, Block, Mesh, Program
from mycel.lower.stage_blocks import StageParts
from mycel.plan import STAGE_AXIS, Clock, PipelineSchedule, Residuals, StageCosts, StepFlow, StreamShare, Times
from mycel.plan.cuts import CutBlock, Fits, best_cut
from mycel.plan.schedule import BACKWARD, FORWARD, KINDS, WEIGHT, PipelineTimes, StageStep, named, stages_a_rank
from mycel.planning import LaidOut
from mycel.shallow import Shallow
from mycel.sizes import shown, span

# of a piece, in the order of FIGURES; then of each stream, in all and exposed, of one microbatch and of each more
Figures = np.ndarray
PIECES = 2  # ranks of the pipelines whose figures are taken: all wait for each other in the norm of gradients alone
FIGURES = (FORWARD, BACKWARD, WEIGHT, "around", "held", "flight", "pending", "loop", "update")


@dataclass(frozen=True)
class LayerRun:
    """A list of equal layers: the name of the list, how many entries the base has, in periods of how many, and how many
    the model has."""

    name: str
    kept: int
    period: int
    count: int

    @property
    def middle(self) -> tuple[str, str]:
        """The modules with which all but the first period, and the last, begin."""
        return f"{self.name}.{self.period}", f"{self.name}.{self.kept - self.period}"


def layer_runs(model: nn.Module, shallow: Shallow) -> tuple[LayerRun, ...]:
    """The lists that a model with fewer layers has less of."""
    names = {module: name for name, module in model.named_modules()}
    return tuple(LayerRun(names[x.module], x.kept, x.period, len(x.module)) for x in shallow.lists)


@dataclass(frozen=True)
class PricedStages:
    """A pipeline with its prices; `begin`: the modules at which stages begin, as a plan names
    them, `layers`: how many each has."""

    times: Times
    line: PipelineTimes
    costs: StageCosts
    begin: tuple[str, ...]
    layers: tuple[int, ...]
    peaks: tuple[int, ...]  # bytes of each rank

    @property
    def schedule(self) -> PipelineSchedule:
        return self.line.schedule

    def __str__(self) -> str:
        """For people."""
        ranks, idle = self.schedule.ranks, self.line.idle
        share = sum(idle) / (ranks * self.line.seconds)
        lines = [
            f"pipeline         {self.schedule.stages} stages on {ranks} ranks, {self.schedule.microbatches} "
            f"microbatches, schedule {self.schedule.name}",
            f"  begin at       {', '.join(self.begin)}",
            f"  layers         {', '.join(map(str, self.layers))}",
            f"  in all         {span(self.line.seconds)} of {span(self.times.seconds)}, of which ranks "
            f"wait {span(min(idle))} to {span(max(idle))} ({share:.1%})",
            f"  memory         {shown(min(self.peaks))} to {shown(max(self.peaks))} a device",
        ]
        return "\n".join(lines)


@dataclass
class StagePricing:
    """Pieces of one step, laid out inside a stage, under any price of keeping a byte and with any schedule; `runs`: the
    lists of the model."""

    laid_out: LaidOut
    runs: Sequence[LayerRun]
    _pieces: dict[tuple[Residuals, bool], StagePieces] = field(default_factory=dict)

    def pieces(self, price: float, splits: bool) -> StagePieces:
        """Several prices may mean the same."""
        key = self.laid_out.residuals([price]), splits
        if key not in self._pieces:
            self._pieces[key] = StagePieces.of(self.laid_out, self.runs, price, splits)
        return self._pieces[key]


@dataclass(frozen=True)
class StagePieces:
    """The figures of which those of stages are made; `ends`: of what is before, between and behind the lists, `layer`:
    of one layer of each, `stage`: of what a stage has besides."""

    laid_out: LaidOut
    runs: tuple[LayerRun, ...]
    splits: bool
    microbatches: int
    ends: tuple[Figures, ...]
    layer: tuple[Figures, ...]
    stage: Figures
    message_bytes: int
    around: tuple[str, ...]  # the modules with which what is before and behind lists begins
    streams: tuple[str, ...]

    @staticmethod
    def of(laid_out: LaidOut, runs: Sequence[LayerRun], price: float, splits: bool) -> StagePieces:
        pieces = _Pieces(laid_out, price, splits)
        runs = pieces.in_order(runs)
        names = [name for run in runs for name in run.middle]
        figures, message_bytes = pieces.cut(names)
        layer, middles = [], []
        for k, run in enumerate(runs):
            (merged,), _ = pieces.cut([name for name in names if name != run.middle[1]], [2 * k + 1])
            count = run.kept - 2 * run.period  # in the middle
            layer.append((merged - figures[2 * k + 2]) / count)
            middles.append(figures[2 * k + 1] - count * layer[-1])
        stage = np.mean(middles, axis=0)
        ends = []
        for k in range(len(runs) + 1):
            beside = [runs[j].period * layer[j] for j in (k - 1, k) if 0 <= j < len(runs)]
            ends.append(figures[2 * k] - stage - sum(beside))
        around = plan.modules_around(pieces.flow, [run.name for run in runs])
        length, streams = pieces.flow.body.length, pieces.clock.streams
        return StagePieces(
            laid_out, tuple(runs), splits, length, tuple(ends), tuple(layer), stage, message_bytes, around, streams
        )

    @cached_property
    def blocks(self) -> list[tuple[Figures, str, int]]:
        """Ends and layers in their order: figures, the module they begin with, how many layers that is."""
        blocks = [(self.ends[0], self.around[0], 0)]
        for run, layer, end, behind in zip(self.runs, self.layer, self.ends[1:], self.around[1:], strict=True):
            blocks += [(layer, f"{run.name}.{i}", 1) for i in range(run.count)]
            blocks.append((end, behind, 0))
        return blocks

    def priced(self, stages: int, schedule: str, memory: int | None = None) -> PricedStages:
        """So many stages under a schedule; PlanError where there are fewer layers.  Where a rank has one stage, the cut
        is such that each fits the `memory`, if there is one."""
        if plan.splits(schedule) != self.splits:
            raise ValueError(f"the pieces were lowered {'with' if self.splits else 'without'} steps of weights")
        ranks = stages // stages_a_rank(schedule)
        hardware, norm_s = self.laid_out.task.hardware, []
        for count in (PIECES, ranks):
            link = hardware.links(_with_stages(self.laid_out, count)).of((STAGE_AXIS,))
            norm_s.append(link.seconds("all_reduce", count, 4.0))
        message = link.start_s + self.message_bytes / link.bytes_s
        starts = self._cut(stages, message, schedule, memory)
        edges = [0, *starts, len(self.blocks)]
        figures = np.array([sum(x for x, _, _ in self.blocks[a:b]) + self.stage for a, b in itertools.pairwise(edges)])
        costs = self._costs(figures, message)
        if schedule == "searched":
            order = plan.searched(range(ranks), self.microbatches, costs)
        else:
            order = named(schedule, ranks, self.microbatches)
        line = plan.timeline(order, costs)
        begin = tuple(self.blocks[i][1] for i in edges[:-1])
        layers = tuple(sum(n for _, _, n in self.blocks[a:b]) for a, b in itertools.pairwise(edges))
        by_rank = self._by_rank(figures, order)
        pending = np.maximum(figures[:, FIGURES.index("pending")], 0.0).tolist()
        if self.splits:
            pending[0] = 0.0  # it has no step of weights
        peaks = tuple(int(x) for x in self._peaks(by_rank, order.held(costs.held, pending)))
        return PricedStages(self._times(line, by_rank, peaks, norm_s[1] - norm_s[0]), line, costs, begin, layers, peaks)

    def _cut(self, stages: int, message: float, schedule: str, memory: int | None) -> list[int]:
        seconds = [max(0.0, float(x[:3].sum())) for x, _, _ in self.blocks]
        blocks = [CutBlock(i, s, 2 * message if i else 0.0) for i, s in enumerate(seconds)]
        layers = sum(run.count for run in self.runs)
        if stages > layers:
            raise PlanError(
                f"stages: {stages}, but the model has {layers} layers\n  try       stages: {layers}, or less"
            )
        if memory is not None and stages_a_rank(schedule) == 1 and schedule != "searched":
            with contextlib.suppress(PlanError):  # then the cut is by time, and its peaks say what is missing
                return best_cut(blocks, stages, self.microbatches, self._fits(stages, schedule, memory))
        return best_cut(blocks, stages, self.microbatches)

    def _fits(self, stages: int, schedule: str, memory: int) -> Fits:
        """Does a stage of some blocks, with the microbatches that its rank has in flight?"""
        columns = [FIGURES.index(x) for x in ("held", "flight", "loop", "update")]
        figures = [np.zeros_like(self.stage), *(x for x, _, _ in self.blocks)]
        sums = np.cumsum(figures, axis=0)[:, columns].tolist()
        besides = self.stage[columns].tolist()
        in_flight = named(schedule, stages, self.microbatches).held()

        def fits(stage: int, first: int, last: int) -> bool:
            own = zip(sums[last], sums[first], besides, strict=True)
            held, flight, loop, update = (b - a + c for b, a, c in own)
            return held + max(loop + in_flight[stage] * flight, update) <= memory

        return fits

    def _costs(self, figures: Figures, message: float) -> StageCosts:
        forward, backward, weight = figures[:, : len(KINDS)].T.copy()
        if self.splits:  # nobody waits for what the first stage makes: it has no step of weights
            backward[0], weight[0] = backward[0] + weight[0], 0.0
        flight = figures[:, FIGURES.index("flight")]
        f, b, w, held = (tuple(np.maximum(x, 0.0).tolist()) for x in (forward, backward, weight, flight))
        return StageCosts(f, b, w, message, held)

    def _by_rank(self, figures: Figures, order: PipelineSchedule) -> Figures:
        """The figures of each rank: those of its stages, what a stage has besides its layers once."""
        of_rank = [order.stages_of(rank) for rank in range(order.ranks)]
        return np.array([figures[list(own)].sum(0) - (len(own) - 1) * self.stage for own in of_rank])

    def _peaks(self, by_rank: Figures, flight: Sequence[float]) -> Figures:
        """Bytes of each rank: while microbatches are in flight, or in the update."""
        at = {name: by_rank[:, i] for i, name in enumerate(FIGURES)}
        return at["held"] + np.maximum(at["loop"] + np.array(flight), at["update"])

    def _times(self, line: PipelineTimes, by_rank: Figures, peaks: Sequence[int], more_s: float) -> Times:
        around = float(by_rank[:, FIGURES.index("around")].max()) + more_s
        busiest = by_rank[int(np.argmax(line.work))]
        by_stream = busiest[len(FIGURES) :].reshape(-1, 2, 2)
        seconds = by_stream[:, 0] + (self.microbatches - 1) * by_stream[:, 1]
        shares = {name: StreamShare(*seconds[i].tolist()) for i, name in enumerate(self.streams)}
        bubble = line.seconds - max(line.work)
        shares["bubble"] = StreamShare(bubble, bubble)
        fullest = int(np.argmax(peaks))
        return Times(
            line.seconds + around,
            {name: share.total for name, share in shares.items() if name != "bubble"},
            {DEVICE: peaks[fullest]},
            int(by_rank[fullest][FIGURES.index("held")]),
            f"rank {fullest} of the pipeline",
            shares=shares,
        )


def _with_stages(laid_out: LaidOut, ranks: int) -> Mesh:
    """The mesh of all ranks of a pipeline."""
    return Mesh({STAGE_AXIS: ranks, **laid_out.plan.inside.mesh.sizes()})


@dataclass(frozen=True)
class _Pieces:
    """A step of few layers, to be cut into pieces."""

    laid_out: LaidOut
    price: float
    splits: bool
    overlapped: dict[int, tuple[Block, Block]] = field(default_factory=dict)  # of blocks that pieces share

    @cached_property
    def clock(self) -> Clock:
        hardware = self.laid_out.task.hardware
        return Clock(hardware, hardware.links(_with_stages(self.laid_out, PIECES)))

    @cached_property
    def flow(self) -> StepFlow:
        laid_out, body = self.laid_out, self.laid_out.task.body
        residuals = laid_out.residuals([self.price])
        resident = lower.with_residuals(laid_out.local, residuals, laid_out.spread, is_woven=True)
        return StepFlow(lower.plain_sums(resident, body), body)

    def in_order(self, runs: Sequence[LayerRun]) -> list[LayerRun]:
        """As the step calls them, which need not be the order of the model's modules."""
        return sorted(runs, key=lambda run: plan.starts_of(self.flow, ["", run.middle[0]])[0])

    def cut(self, names: Sequence[str], wanted: Sequence[int] | None = None) -> tuple[Figures, int]:
        """The figures of the pieces that begin at these modules and of the first, or of those that are wanted; and the
        bytes of the longest message between them."""
        starts = [self.flow.block.eqns[i].outputs[0].name for i in plan.starts_of(self.flow, ["", *names])]
        parts = lower.stage_parts(self.flow.program, self.flow.body.name, starts, self.splits)
        stages = range(len(starts) + 1) if wanted is None else wanted
        compiled, figures = self.laid_out.task.compiled, []
        orders = [self._programs(parts, order, stages) for order in (ONCE, TWICE, PENDING)[: 2 + self.splits]]
        for stage, *programs in zip(stages, *orders, strict=True):
            figures.append(_figures(*(_RankFigures(self.clock, p, stage, compiled) for p in programs)))
        return np.array(figures), plan.message_bytes(orders[0])

    def _programs(self, parts: StageParts, order: str, stages: Sequence[int]) -> list[Program]:
        """Of the ranks with these stages."""
        schedule = _in_turn(parts.stages.stages, order, self.splits)
        written = lower.rank_programs(parts, schedule, STAGE_AXIS, stages)
        return [lower.overlap(program, self.overlapped) for program in written]


# orders of steps: one microbatch; two of which both are forward before one is backward; two, the weights of both last
ONCE, TWICE, PENDING = "F0 B0 W0", "F0 F1 B0 W0 B1 W1", "F0 B0 F1 B1 W0 W1"


def _in_turn(stages: int, order: str, splits: bool) -> PipelineSchedule:
    """The same order of steps in each stage."""
    steps = [(word[0], int(word[1])) for word in order.split() if splits or word[0] != WEIGHT]
    orders = [tuple(StageStep(kind, s, m) for kind, m in steps) for s in range(stages)]
    return PipelineSchedule("in turn", 1 + max(m for _, m in steps), tuple(range(stages)), splits, tuple(orders))


def _figures(once: _RankFigures, twice: _RankFigures, pending: _RankFigures | None = None) -> Figures:
    """Of a rank; `pending`: where weights have a step of their own."""
    flight = twice.loop - once.loop
    figures = {
        **twice.steps,
        "around": twice.times.seconds - 2 * sum(twice.steps.values()),
        "held": once.times.held,
        "flight": flight,
        "pending": pending.loop - once.loop if pending is not None else 0,
        "loop": once.loop - flight,
        "update": once.update,
    }
    streams = [(once.streams[name], twice.streams[name] - once.streams[name]) for name in once.streams]
    return np.array([*(figures[name] for name in FIGURES), *np.array(streams).flatten()], float)


@dataclass(frozen=True)
class _RankFigures:
    """The program of a rank: what the clock says of it; `compiled`: as if stretches between calls were, too."""

    clock: Clock
    program: Program
    stage: int
    compiled: bool

    @property
    def blocks(self) -> Collection[str]:
        return self.program.blocks if self.compiled else ()

    @cached_property
    def times(self) -> Times:
        return self.clock(self.program, self.blocks)

    @cached_property
    def alive(self) -> dict[bool, int]:
        """Bytes besides those that are held between steps, in the update (True) and in the loop over microbatches."""
        most: dict[bool, int] = {True: 0, False: 0}
        for (*_, phase, _which), size in self.times.points().items():
            most[phase == "update"] = max(most[phase == "update"], size)
        return most

    @property
    def loop(self) -> int:
        return self.alive[False]

    @property
    def update(self) -> int:
        return self.alive[True]

    @cached_property
    def steps(self) -> dict[str, float]:
        """Seconds of those for a microbatch."""
        return {kind: plan.step_seconds(self.clock, self.program, kind, self.stage, self.blocks) for kind in KINDS}

    @cached_property
    def streams(self) -> dict[str, Figures]:
        """In all and exposed."""
        return {name: np.array([part.total, part.exposed]) for name, part in self.times.parts.items()}
