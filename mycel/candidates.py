"""Plans that were priced, what a search answers with, and figures of deep models from those of shallow ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mycel.ir import Program, runs, walk
from mycel.ops import o
from mycel.placing import PlacedOutcome
from mycel.plan import PLACE_AXIS, ErrorBars, Hardware, Plan, Times
from mycel.plan.cluster import Cluster
from mycel.plan.links import Links, sent_by
from mycel.plan.schedule import PipelineTimes
from mycel.planning import LaidOut, Outcome
from mycel.search_space import Shape

SMALL = 1e-3  # a value, against the largest of its block, whose layout matters little


@dataclass(frozen=True)
class Candidate:
    """A plan that was priced, or one that was not and why."""

    shape: Shape
    plan: Plan | None = None
    times: Times | None = None
    sent: Mapping[str, float] = field(default_factory=dict)  # bytes a rank, by link level
    again: float = 0.0  # seconds of computing again
    price: float = 0.0  # what keeping a byte for backward has cost
    why: str = ""  # it does not fit, or is not the best
    short: float = float("inf")  # bytes that are missing on the device, at the least, where it does not fit for them
    peak_parts: Mapping[str, int] = field(default_factory=dict)  # bytes at the peak, by what they are
    # where all of the step was lowered
    outcome: Outcome | PlacedOutcome | None = field(default=None, repr=False, compare=False)
    line: PipelineTimes | None = field(default=None, repr=False, compare=False)  # of a pipeline

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def seconds(self) -> float:
        return self.times.seconds if self.times is not None else float("inf")

    @property
    def peak(self) -> int:
        return self.times.peak["device"] if self.times is not None else 0

    @property
    def bubble(self) -> float:
        """Seconds in which a rank of a pipeline has nothing to do."""
        shares = self.times.shares if self.times is not None else None
        return shares["bubble"].total if shares and "bubble" in shares else 0.0

    @property
    def moving(self) -> float:
        """Seconds in which a rank waits for the host."""
        return self.times.moving if self.times is not None else 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which a rank waits for messages."""
        if self.times is None:
            return 0.0
        return max(0.0, self.times.seconds - self.times.totals["compute"] - self.bubble - self.moving)


@dataclass(frozen=True)
class Answer:
    """Plans, the best first; `bound`: seconds that none goes below; of one device, what the step's products take."""

    candidates: list[Candidate]
    bound: float
    flops: float
    tokens: int  # of a step; rows, where the batch is no text
    is_text: bool
    cluster: Cluster
    seconds: float  # what planning took
    complete: bool  # nothing was left out for want of time
    interrupted: bool = False  # by Ctrl-C
    bars: ErrorBars | None = None  # what earlier runs on such devices have made of predictions
    remarks: tuple[str, ...] = ()  # what is taken for granted; what would be faster, and is not done unasked

    @property
    def best(self) -> Candidate | None:
        return next((c for c in self.candidates if c.fits), None)

    def mfu(self, candidate: Candidate) -> float:
        return self.flops / candidate.seconds / self.cluster.world / self.cluster.nominal


@dataclass(frozen=True)
class Estimate:
    """Figures of a step, from those of steps with fewer layers."""

    times: Times
    again: float
    sent: Mapping[str, float]
    price: float

    def mixed(self, other: Estimate, share: float) -> Estimate:
        """Where so much of the step is as in the other."""
        if not share:
            return self

        def between(a: float, b: float) -> float:
            return a + share * (b - a)

        def by_name(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
            return {name: between(a.get(name, 0.0), b.get(name, 0.0)) for name in dict.fromkeys([*a, *b])}

        a, b = self.times, other.times
        times = replace(
            a,
            seconds=between(a.seconds, b.seconds),
            totals=by_name(a.totals, b.totals),
            peak={name: int(n) for name, n in by_name(a.peak, b.peak).items()},
        )
        sent = by_name(self.sent, other.sent)
        return Estimate(times, between(self.again, other.again), sent, self.price)


def computed_again(outcome: Outcome | PlacedOutcome, shape: Shape) -> float:
    """Seconds of computing again."""
    return sum(pair.seconds for pair in outcome.residuals.pairs) * shape.microbatches


def bytes_sent(outcome: Outcome, laid_out: LaidOut) -> dict[str, float]:
    """Bytes that a rank sends, by link level; of a pipeline the one that sends most."""
    pipeline, links = outcome.lowered.pipeline, laid_out.clock.links
    programs = pipeline.programs if pipeline is not None else (outcome.lowered.program,)
    return max((_sent(program, links) for program in programs), key=lambda by_level: sum(by_level.values()))


def bytes_sent_in_places(outcome: PlacedOutcome, shape: Shape, hardware: Hardware) -> dict[str, float]:
    """The same, of a rank of the place that sends most; to other places, what goes from all ranks of its own."""
    assert outcome.lowered.pipeline is not None
    between = hardware.links(shape.mesh).of((PLACE_AXIS,)).name
    by_place = []
    for place, program in zip(shape.place, outcome.lowered.pipeline.programs, strict=True):
        by_level = _sent(program, hardware.links(place.mesh))
        across = sum(next(e.vars).type.bytes for e in program.main.eqns if e.op is o.begin_send_across)
        by_level[between] = by_level.get(between, 0.0) + across
        by_place.append(by_level)
    return max(by_place, key=lambda by_level: sum(by_level.values()))


def _sent(program: Program, links: Links | None) -> dict[str, float]:
    by_level: dict[str, float] = {}
    count = runs(program)
    for name, eqn in walk(program):
        axes, size = sent_by(eqn)
        if eqn.op is o.begin_send:  # to another stage
            axes, size = eqn.params["axes"], sum(v.type.bytes for v in eqn.vars)
        if size and links is not None:
            level = links.of(axes).name
            by_level[level] = by_level.get(level, 0.0) + count[name] * size
    return by_level


def are_alike(plans: Sequence[Plan]) -> bool:
    """Do the blocks that several programs share lie alike in them?  Those that take all parameters differ anyway, and
    of what is small (gains of norms, biases) two layouts may cost the same."""
    first, *others = [p.decided.layouts for p in plans if p.decided is not None]
    for layouts in others:
        for name in layouts.keys() & first.keys():
            a, b = first[name], layouts[name]
            if a.inputs.keys() != b.inputs.keys():
                continue
            large = SMALL * max((t.bytes for x in a.values.values() for t, _ in x.results), default=0)
            for key, value in a.values.items():
                if value != b.values.get(key) and any(t.bytes > large for t, _ in value.results):
                    return False
    return True
