"""The best plan for a step on a cluster: `plan: auto`, and what `mycel plan` prints.

    meshes          every way to write the number of devices as dp x cp x tp, tp the fastest: inside a host first
    parameters      over tp as the layouts of the whole program that cost least have them (`plan/solve.py`)
    zero            optimiser state, gradients, parameters split over dp
    microbatches    parts of the batch, one after the other
    recomputation   what the memory budget asks for, at least cost (`plan/decide.py`)
    neighbours      of the best: other axes inside a host, ZeRO inside a host alone, parameters split in two dims,
                    experts over ranks of their own, stages of a pipeline (`stage_price.py`), state and activations on
                    the host (`search_space.py`); sub-models that wait for none of the others on meshes of their own
                    (`plan/towers.py`)

Each of these plans is lowered and priced by the one clock, under the memory of the device.  Plans that cannot fit are
told apart by what they hold alone.  A plan that computes everything once, divided among all devices, and waits for no
message is a bound for all of them; a plan within `NEAR` of it ends the search.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from mycel import lower, plan
from mycel.candidates import (
    Answer,
    Candidate,
    Estimate,
    are_alike,
    bytes_sent,
    bytes_sent_in_places,
    computed_again,
)
from mycel.errors import PlanError
from mycel.ir import DEVICE, Layout, Mesh, Program, Role, Var, read_dims, runs, unchecked, walk
from mycel.offloading import Spaces, Way
from mycel.parts import ShardedModel, UnshardedStep
from mycel.plan import STAGE_AXIS, Costs, Plan, Times
from mycel.plan.clock import WORKSPACE
from mycel.plan.cluster import Cluster
from mycel.plan.names import near
from mycel.plan.schedule import PipelineTimes, timeline
from mycel.plan.towers import Tower, towers
from mycel.planning import LaidOut, Task, placed_step, replicas_share
from mycel.run import without_collector
from mycel.search_given import Given
from mycel.search_order import GAIN, SearchOrder
from mycel.search_remarks import explained, nothing_fits, too_short
from mycel.search_space import AXES, SearchSpace, Shape
from mycel.shallow import Make, Shallow
from mycel.sizes import parse_bytes, shown, span
from mycel.stage_price import StagePricing, layer_runs

NEAR = 0.01  # a plan this close to the bound ends the search
RUNGS = 4  # of the ladder of prices, every so many are tried for a pipeline
MULTIPLYING = ("product", "attention", "conv")  # kinds of operations that MFU counts
CLOSE = 0.02  # of the memory: what figures from fewer layers may be off by


@dataclass(frozen=True)
class Detail:
    """The program of a plan, and when what of it runs; `what`: how much of the model it is."""

    program: Program
    times: Times
    parameters: Mapping[str, tuple[tuple[int, ...], Any]]  # shape and layout, by name
    what: str = ""
    schedule: PipelineTimes | None = None  # of a pipeline


ONE = Shape()


class Search:
    """Over the plans of one step.  `make(n, said)`: the step in n microbatches, on one device, where a plan says this
    of messages; with `placed=True` in the form in which sub-models are put on ranks of their own."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        make: Make,
        cluster: Cluster,
        memory: int | None = None,
        given: Mapping[str, Any] | None = None,
        compiled: bool = True,
        say: Callable[[str], None] = lambda text: None,
        smaller: Callable[[int], Search] | None = None,
        full_masks: Sequence[str] = (),
    ) -> None:
        self._smaller = smaller  # for a batch of fewer rows
        self._full_masks = full_masks  # that are taken to be so
        self.model, self.optimizer, self.cluster = model, optimizer, cluster
        self.memory, self.compiled, self.say = memory or cluster.memory, compiled, say
        self._written, self.given = given or {}, Given.read(given or {})
        self._make, self._steps = make, dict[tuple[int, bool, str], UnshardedStep]()
        self._parameters: dict[tuple[bool, bool, int, int, int], dict[str, Any]] = {}
        self._stages_laid_out: dict[tuple[Hashable, ...], LaidOut] = {}
        self._stage_pricings: dict[tuple[Hashable, ...], StagePricing] = {}
        self.candidates: dict[Shape, Candidate] = {}  # that were priced

    # -- the step and what it holds

    def step(self, shape: Shape = ONE) -> UnshardedStep:
        """On one device, as a plan needs it."""
        said = self._said(shape)
        key = (shape.microbatches, bool(shape.place), repr(said))
        if key not in self._steps:
            form = {"placed": True} if shape.place else {}
            self._steps[key] = self._make(shape.microbatches, said, **form)
        return self._steps[key]

    def _said(self, shape: Shape) -> dict[str, Any]:
        """What the step on one device depends on of the plan of a shape."""
        return self.given.said_of_program(shape)

    @property
    def program(self) -> Program:
        return self.step().program

    def bytes_of(self, kind: str) -> int:
        """Of all inputs of the step with a role."""
        return self._bytes_by_kind[kind]

    @functools.cached_property
    def _bytes_by_kind(self) -> Counter[str]:
        program, bytes_ = self.program, Counter[str]()
        for v in program.inputs:
            bytes_[program.role(v).kind] += v.type.bytes
        return bytes_

    def held(self, shape: Shape) -> float:
        """Bytes that are there all the time, at the least."""
        return sum(self.held_parts(shape))

    def held_parts(self, shape: Shape) -> tuple[float, float]:
        """Of parameters, and of optimiser state."""
        split = shape.world if shape.place else shape.tp * shape.ty * shape.ep * shape.pp
        parameters, state = self.bytes_of("parameter") / split, self.bytes_of("state") / split
        over = shape.shards
        state = 0.0 if shape.offload else state / (over if shape.zero else 1)
        whole = sum(self.kinds.get(pattern, 0) for pattern, _ in shape.levels) / split if shape.zero == 3 else 0.0
        return (parameters - whole) / (over if shape.zero == 3 else 1) + whole, state

    def _peak_parts(self, candidate: Candidate) -> dict[str, int]:
        """What the memory of a rank is full of at the peak."""
        parameters, state = map(int, self.held_parts(candidate.shape))
        lowered = candidate.outcome.lowered if candidate.outcome is not None else None
        if candidate.shape.offload and lowered is not None and lowered.pipeline is None:  # what is not on the host
            here = Counter[str]()
            for v in lowered.program.inputs:
                here[lowered.program.role(v).kind] += v.type.bytes if v.type.space == DEVICE else 0
            parameters, state = here["parameter"], here["state"]
        libraries = min(WORKSPACE, candidate.peak) if self.cluster.memory else 0
        rest = max(0, candidate.peak - parameters - state - libraries)
        kinds = {"parameters": parameters, "optimizer_state": state, "activations_and_gradients": rest}
        return {**kinds, "buffers_of_libraries": libraries} if libraries else kinds

    @functools.cached_property
    def kinds(self) -> dict[str, int]:
        """Bytes of parameters by pattern: those of all layers together."""
        bytes_: Counter[str] = Counter()
        for role, v in _parameters(self.program):
            bytes_[re.sub(r"\d+", "*", role.name)] += v.type.bytes
        return dict(bytes_)

    @property
    def batch(self) -> list[tuple[str, tuple[int, ...]]]:
        """The tensors of the batch, by name."""
        program = self.program
        return [(program.role(v).name, v.type.shape) for v in program.inputs if program.role(v).kind == "batch"]

    @property
    def rows(self) -> int:
        return max((shape[0] for _, shape in self.batch if shape), default=1)

    @property
    def length(self) -> int:
        """The second dim that all tensors of the batch share: a sequence; 1: they share none."""
        seconds = {shape[1] for _, shape in self.batch if len(shape) > 1}
        return seconds.pop() if len(seconds) == 1 and all(len(shape) == 2 for _, shape in self.batch) else 1

    @property
    def is_text(self) -> bool:
        """Are the tensors of the batch numbers of tokens, in sequences?"""
        program = self.program
        types = [v.type for v in program.inputs if program.role(v).kind == "batch"]
        return self.length > 1 and not any(t.dtype.is_floating_point for t in types)

    # -- the plans there are

    @functools.cached_property
    def space(self) -> SearchSpace:
        cluster = self.cluster
        lists = (m for m in self.model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential)))
        layers = max(map(len, lists), default=1)
        return SearchSpace(cluster.world, cluster.groups, self.rows, self.length, self._experts(), layers)

    def _experts(self) -> int:
        """The most experts that a layer has, of those whose parameters the ready plan splits."""
        ready = Plan.read("ep", Mesh(ep=1)).parameters
        is_split = lambda v: any(fnmatchcase(self.program.role(v).name, p) for p in ready)
        layers = plan.expert_weights(self.program)
        return max((each.experts for each in layers if any(map(is_split, each.sources))), default=1)

    @functools.cached_property
    def towers(self) -> tuple[Tower, ...]:
        """Sub-models that wait for none of the others."""
        return towers(self.program)

    def written(self, shape: Shape) -> Plan:
        """The plan of a shape before anything is decided: what is given, and over tp the parameters that cost least."""
        parameters = self.parameters(shape) if shape.tp * shape.ty * shape.ep > 1 else {}
        offload = {"offload": self.given.offload} if self.given.offload is not None else {}
        return Plan.read({**self._data(shape), **offload, "parameters": {**self._given_parameters, **parameters}})

    def _data(self, shape: Shape) -> dict[str, Any]:
        """What of a plan its shape says, and what is given: its mesh has all axes that are named."""
        data = shape.data()
        if not shape.place:
            sizes: dict[str, int] = data["mesh"]
            names = self.given.mesh or [*(axis for axis in AXES if axis in self._axes - {*sizes}), *sizes]
            data["mesh"] = {axis: sizes.get(axis, 1) for axis in names}
        data |= {"loose": True} if shape.ready else {}
        return {**data, **self.given.passed_on, **self.given.said(shape)}

    @functools.cached_property
    def _axes(self) -> frozenset[str]:
        """That hints in code and what is given name."""
        hinted = dict(lower.hinted_axes(self.program))
        if self.given.mesh is not None:
            lower.with_known_axes(self.program, Mesh(self.given.mesh))
        for axis, source in hinted.items():
            if axis not in AXES:
                raise PlanError(
                    f"mycel.shard: the search knows no axis {axis!r}\n  known     {', '.join(AXES)}\n"
                    f"  at        {source}\n  try       {near(axis, AXES)}"
                )
        return frozenset(hinted) | self.given.axes

    @property
    def _given_parameters(self) -> Mapping[str, Any]:
        return self.given.passed_on.get("parameters", {})

    def parameters(self, shape: Shape) -> dict[str, Any]:
        """Layouts over tp, ty and ep, by pattern; those that stay whole are left out."""
        key = (shape.ready, shape.cp > 1, shape.tp, shape.ty, shape.ep)
        if shape.ready:
            self._parameters[key] = self.ready_parameters(shape)
        if key not in self._parameters:
            alone = replace(
                shape, zero=0, levels=(), microbatches=1, pp=1, offload=False, compress="", order=(), sync="", at_once=1
            )
            entries = None
            if self.shallow is not None:
                entries = patterns(self._parameter_layouts(alone, self.shallow.base(1)))
                if any(re.search(r"\d", name) for name in entries):  # layers that differ: each has its say
                    entries = None
            self._parameters[key] = (
                patterns(self._parameter_layouts(alone, self.step())) if entries is None else entries
            )
        return self._parameters[key]

    def ready_parameters(self, shape: Shape) -> dict[str, Any]:
        """As ready plans lay them over tp and ep, by pattern, experts over ep."""
        names = [role.name for role, _ in _parameters(self.program)]
        there = [axis for axis in ("ep", "tp") if axis in shape.sizes]
        entries = {k: v for axis in reversed(there) for k, v in Plan.read(axis, shape.mesh).parameters.items()}
        return {pattern: entry for pattern, entry in entries.items() if any(fnmatchcase(n, pattern) for n in names)}

    def _parameter_layouts(self, shape: Shape, unsharded: UnshardedStep) -> dict[str, Layout]:
        """The layouts over tp and ty that cost least, by name; experts lie over ep."""
        given = self._given_parameters
        ready = self.ready_parameters(Shape(ep=shape.ep))
        written = Plan.read({**self._data(shape), "loose": True, "parameters": {**given, **ready}})
        names = {role.name: v.shape for role, v in _parameters(unsharded.program)}
        left = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in given)]
        axes = tuple(a for a in ("tp", "ty") if a in shape.sizes)
        if not axes:
            layouts_there = written.parameter_layouts(names)
            return {name: layouts_there[name] for name in left}
        program = unsharded.program
        inputs, _ = ShardedModel(self.model, self.optimizer, written).given(unsharded)
        whole = lower.settled(program, written, inputs)
        links = self.cluster.hardware.links(written.mesh)
        costs = Costs(whole, self.cluster.hardware, self.compiled)
        roles = [program.role(v) for v in program.inputs]
        at = {role.name: i for i, role in enumerate(roles) if role.kind == "parameter"}
        free = {at[name]: at[name] for name in left}
        for i, (role, v) in enumerate(zip(roles, program.inputs, strict=True)):
            if role.kind == "state" and role.of in left and v.shape == program.inputs[at[role.of]].shape:
                free[i] = at[role.of]
        layouts = plan.parameter_layouts(whole, written, inputs, free, axes, costs, links, lower.Prices(links))
        return {name: layouts[at[name]] for name in left}

    # -- pricing

    def price(self, shape: Shape) -> Candidate:
        """The plan of a shape, decided and timed; or by how much it does not fit."""
        if shape not in self.candidates:
            self.say(str(shape))
            with unchecked():
                self.candidates[shape] = self._price(shape)
        return self.candidates[shape]

    def _price(self, shape: Shape) -> Candidate:
        if self.memory is not None and self.held(shape) > self.memory:
            return _too_large(shape, self.held(shape) - self.memory)
        try:
            return self._timed(shape, self.written(shape))
        except PlanError as e:
            if shape.pp == 1 or self.given.stages is not None:
                raise
            return Candidate(shape, why=str(e).splitlines()[0])  # what cannot be cut so

    @functools.cached_property
    def shallow(self) -> Shallow | None:
        """The model with fewer layers, where that stands for all of it."""
        return Shallow.of(self.model, self._make, self.step())

    @property
    def is_shallow(self) -> bool:
        """Are plans priced from fewer layers?"""
        return self.shallow is not None

    def _timed(self, shape: Shape, written: Plan) -> Candidate:
        try:
            if written.synced() is not None:
                return self._timed_replicas(shape, written)
            if written.place:
                return self._timed_places(shape, written)
            if self.shallow is None:
                return self._timed_whole(shape, written)
            if not written.offload.is_none:
                return self._timed_at_rest(shape, written) or self._timed_whole(shape, written)
            if written.is_pipeline:
                return self._timed_stages(shape, written)
            return self._timed_shallow(shape, written) or self._timed_whole(shape, written)
        except PlanError as e:
            if "too much" not in str(e):
                raise
            return _too_large(shape, *_shortages(str(e)))

    def priced(self, written: Plan) -> Candidate:
        """What a plan that people wrote comes to, on as many devices."""
        _refuse_unpriced(written)
        if len(choices := written.compressions()) > 1:
            return min(map(self.priced, choices), key=lambda c: c.seconds)
        data = written.data()
        said = {key: data[key] for key in ("gather", "monitor", "sync") if data.get(key)}
        if "gather" in said:
            said["zero"] = data["zero"]
        if "sync" in said:
            said["mesh"] = written.inside.mesh.sizes()
        if any(self._written.get(key) != value for key, value in said.items()):
            return self.otherwise(given=said).priced(written)
        if written.place:
            shape = Shape(
                place=written.places, zero=written.zero, microbatches=written.microbatches, schedule=written.schedule
            )
            with unchecked():
                return self._timed(shape, written.given)
        sizes: dict[str, Any] = {a: n for a, n in written.inside.mesh.sizes().items() if a in AXES and n > 1}
        stages = written.mesh.world // written.inside.mesh.world
        shape = Shape(
            **sizes,
            zero=written.zero,
            microbatches=written.microbatches,
            pp=stages,
            schedule=written.schedule,
            levels=tuple(written.levels.items()),
            at_once=written.at_once,
            sync=str(written.synced() or ""),
        )
        codec = written.compressed()
        if codec is not None:
            shape = replace(shape, compress=str(written.compress[codec.axis]), along=codec.axis)
        shape = shape if shape.default_order == tuple(sizes) else replace(shape, order=tuple(sizes))
        with unchecked():
            return self._timed(shape, written.given)

    def _timed_whole(self, shape: Shape, written: Plan) -> Candidate:
        if written.is_pipeline:
            laid_out = self._laid_out_stages(shape, written)
        else:
            laid_out = self._laid_out(self.step(shape), written, bounds=True)
        outcome = laid_out.decided(self._may_fit(shape, written))
        again, sent = computed_again(outcome, shape), bytes_sent(outcome, laid_out)
        pipeline, line = outcome.lowered.pipeline, None
        if pipeline is not None and outcome.steps is not None:
            line = timeline(pipeline.schedule, outcome.steps)
        return Candidate(shape, laid_out.plan_of(outcome), outcome.times, sent, again, outcome=outcome, line=line)

    def _laid_out_stages(self, shape: Shape, written: Plan) -> LaidOut:
        """A step inside a stage, which plans share whose schedules differ."""
        key = (shape.microbatches, repr(self._said(shape)), repr(replace(written, stages=shape.pp, schedule="1f1b")))
        if key not in self._stages_laid_out:
            self._stages_laid_out[key] = self._laid_out(self.step(shape), written)
        laid_out = self._stages_laid_out[key]
        scheduled = replace(laid_out.plan, stages=written.stages, schedule=written.schedule)
        return replace(laid_out, plan=scheduled, _outcomes={})

    def _may_fit(self, shape: Shape, written: Plan) -> Callable[[Way], bool]:
        """Of a deep model: may a step that moves all it can in a way fit the device?  By steps with fewer layers, at
        some prices of keeping a byte."""
        if self.shallow is None or self.memory is None or written.is_pipeline or written.offload.is_none:
            return lambda way: True
        shallow, most = self.shallow, self.memory * (1 + CLOSE)
        known = plan.KnownLayouts()
        laid_out = [
            self._laid_out(step, written, known) for step in shallow.steps(shape.microbatches, self._said(shape))
        ]
        prices = plan.ladder(laid_out[0].costs, written.recompute)[::RUNGS]
        peaks: dict[tuple[Hashable, ...], int] = {}  # several prices may mean the same

        def fits(way: Way) -> bool:
            for price in reversed(prices):
                outcomes = [x.under([price]) for x in laid_out]
                key = way, *map(id, outcomes)
                if key not in peaks:
                    movers = [x.mover(y, way, Spaces(None, None)) for x, y in zip(laid_out, outcomes, strict=True)]
                    peaks[key] = shallow.times([mover.most.times for mover in movers]).peak[DEVICE]
                if peaks[key] <= most:
                    return True
            return False

        return fits

    def _timed_replicas(self, shape: Shape, written: Plan) -> Candidate:
        """Ranks that step together, and of what these say to others the share of a step."""
        timed = self._timed(shape, written.replica)
        if timed.plan is None or timed.times is None:
            return timed
        steps = [self.step(shape)] if self.shallow is None else self.shallow.steps(1, self._said(shape))
        shares = []
        for step in steps:
            inputs, _ = ShardedModel(self.model, self.optimizer, written.replica).given(step)
            task = Task(step.program, step.body, self.cluster.hardware, inputs=inputs)
            shares.append(replicas_share(task, written, timed.seconds))
        whole = self.shallow.sum if self.shallow is not None else sum
        seconds, size = (whole([share[i] for share in shares]) for i in range(2))
        times, sent = replace(timed.times, seconds=timed.seconds + seconds), dict(timed.sent)
        link = self.cluster.hardware.links(written.mesh).named["dp"].name
        sent[link] = sent.get(link, 0.0) + size
        decided = replace(written, decided=timed.plan.decided, predicted=timed.plan.predicted)
        return replace(timed, plan=decided, times=times, sent=sent)

    def _timed_places(self, shape: Shape, written: Plan) -> Candidate:
        """Sub-models on meshes of their own, beside each other."""
        unsharded, hardware = self.step(shape), self.cluster.hardware

        def at_place(i: int, program: Program) -> tuple[dict[int, Layout], frozenset[int]]:
            of_place = replace(unsharded, program=program)
            return ShardedModel(self.model, self.optimizer, written.at_place(i)).given(of_place)

        program, body = unsharded.program, unsharded.body
        task = Task(program, body, hardware, self.compiled, budget=self.memory, outlines=False, at_place=at_place)
        step = placed_step(task, written)
        outcome = step.decided(self.memory)
        again, sent = computed_again(outcome, shape), bytes_sent_in_places(outcome, shape, hardware)
        assert outcome.lowered.pipeline is not None and outcome.steps is not None
        line = timeline(outcome.lowered.pipeline.schedule, outcome.steps)
        decided = step.plan_of(outcome, self.memory)
        return Candidate(shape, decided, outcome.times, sent, again, outcome=outcome, line=line)

    def _timed_shallow(self, shape: Shape, written: Plan) -> Candidate | None:
        """From steps with fewer layers; nothing where their layouts differ."""
        assert self.shallow is not None
        shallow = self.shallow
        known = plan.KnownLayouts()  # of layers: these are the same in all steps
        laid_out = [
            self._laid_out(step, written, known) for step in shallow.steps(shape.microbatches, self._said(shape))
        ]
        if not are_alike([x.plan for x in laid_out]):
            return None
        pairs = round(shallow.sum([x.pairs for x in laid_out]))
        estimates: dict[float, Estimate] = {}

        def under(prices: Sequence[float]) -> Estimate:
            """Some pairs at the first price, the others at the last."""
            for price in {prices[0], prices[-1]} - {*estimates}:
                outcomes = [x.under([price]) for x in laid_out]
                estimates[price] = Estimate(
                    shallow.times([x.times for x in outcomes]),
                    shallow.sum([computed_again(x, shape) for x in outcomes]),
                    shallow.by_name([bytes_sent(x, y) for x, y in zip(outcomes, laid_out, strict=True)]),
                    price,
                )
            share = (len(prices) - 1) / max(pairs, 1)
            return estimates[prices[-1]].mixed(estimates[prices[0]], share)

        best = plan.decide(under, pairs, laid_out[0].costs, self.memory, written.recompute, upwards=True)
        return Candidate(shape, written, best.times, best.sent, best.again, best.price)

    def _timed_at_rest(self, shape: Shape, written: Plan) -> Candidate | None:
        """A plan that may move values to the host and need not, from steps with fewer layers; nothing where it must, or
        where moving could save more than `GAIN` of the step, which is computed again for want of memory."""
        if any(getattr(written.offload, kind) == "host" for kind in plan.KINDS):
            return None
        timed = self._timed(shape, replace(written, offload=plan.Offload()))
        if timed.plan is None or timed.again > GAIN * timed.seconds:
            return None
        return replace(timed, plan=replace(timed.plan, offload=written.offload))

    def _timed_stages(self, shape: Shape, written: Plan) -> Candidate:
        """A pipeline from the pieces of a step with few layers: with as much computed again as the memory asks for."""
        assert self.shallow is not None
        pricing = self._stage_pricing(shape, written)
        links = self.cluster.hardware.links(written.mesh)
        first, nearest = None, float("inf")
        for price in plan.ladder(pricing.laid_out.costs, written.recompute)[::RUNGS]:
            pieces = pricing.pieces(price, plan.splits(shape.schedule))
            priced = pieces.priced(written.stage_count, shape.schedule, self.memory)
            times = priced.times
            first, nearest = first or times, min(nearest, times.peak["device"])
            if self.memory is None or times.peak["device"] <= self.memory:
                again = max(0.0, times.totals["compute"] - first.totals["compute"])
                bytes_s = {link.name: link.bytes_s for link in links.named.values()}
                sent = {name: bytes_s[name] * seconds for name, seconds in times.totals.items() if name in bytes_s}
                between = links.of((STAGE_AXIS,)).name
                messages = 2.0 * shape.microbatches * pieces.message_bytes  # of a rank in the middle
                sent[between] = sent.get(between, 0.0) + messages
                cut = replace(written, stages=priced.begin)
                return Candidate(shape, cut, times, sent, again, price, line=priced.line)
        return _too_large(shape, nearest - (self.memory or 0))

    def _stage_pricing(self, shape: Shape, written: Plan) -> StagePricing:
        """Of the step inside a stage, which plans share whose schedules differ."""
        assert self.shallow is not None
        key = (shape.microbatches, repr(self._said(shape)), repr(written.inside))
        if key not in self._stage_pricings:
            base = self.shallow.base(shape.microbatches, self._said(shape))
            laid_out = self._laid_out(base, written.inside)
            self._stage_pricings[key] = StagePricing(laid_out, layer_runs(self.model, self.shallow))
        return self._stage_pricings[key]

    def choices(self, candidate: Candidate, pattern: str, ndim: int) -> Iterator[tuple[list[str], Candidate]]:
        """The layouts that parameters of a pattern could have over tp, with the plan each makes."""
        shape = candidate.shape
        written = self.written(shape)
        entries = [["-"] * ndim, *(["tp" if d == k else "-" for d in range(ndim)] for k in range(ndim))]
        if fixed := self.given_layout(pattern):
            yield fixed, candidate
            return
        for entry in entries if shape.tp > 1 else entries[:1]:
            parameters = {k: v for k, v in written.parameters.items() if k != pattern}
            if any(e != "-" for e in entry):
                parameters[pattern] = entry
            with unchecked():
                yield entry, self._timed(shape, replace(written, parameters=parameters))

    def value_choices(self, candidate: Candidate, value: Var) -> Iterator[tuple[list[str], Candidate | str]]:
        """The layouts that a value of the step could have, one axis elsewhere than in the plan, with the plan each
        makes, or why there is none; that of the plan first."""
        shape = candidate.shape
        written, layout = self.written(shape), self._layout_of(candidate, value.name)
        mesh = written.mesh.sizes()
        chosen = (
            tuple(frozenset(axes) for axes in layout.dims) if layout is not None else (frozenset[str](),) * value.ndim
        )
        ways = {chosen: None}
        for axis, d in itertools.product(mesh, range(-1, value.ndim)):
            if mesh[axis] > 1:
                ways[tuple((x - {axis}) | ({axis} if k == d else set()) for k, x in enumerate(chosen))] = None
        for way in ways:
            entry = [".".join(axis for axis in mesh if axis in axes) or "-" for axes in way]
            if way == chosen:
                yield entry, candidate
                continue
            try:
                with unchecked():
                    yield (
                        entry,
                        self._timed(shape, replace(written, activations={**written.activations, value.name: entry})),
                    )
            except PlanError as e:
                yield entry, str(e).splitlines()[0]

    def _layout_of(self, candidate: Candidate, name: str) -> Layout | None:
        """Of a value of the step, as a plan lays it."""
        decided = candidate.plan.decided if candidate.plan is not None else None
        if decided is None and self.shallow is not None and candidate.shape.pp == 1:
            step = self.shallow.base(candidate.shape.microbatches, self._said(candidate.shape))
            with unchecked():
                decided = self._laid_out(step, self.written(candidate.shape)).plan.decided
        for block in decided.layouts.values() if decided is not None else ():
            if name in block.values and block.values[name].results:
                return block.values[name].results[0][1]
        return None

    def given_layout(self, name: str) -> list[str]:
        """Of parameters of a name or pattern, where it is given: the entry of each dim."""
        entries = (entry for pattern, entry in self._given_parameters.items() if fnmatchcase(name, pattern))
        return [".".join(axes) or "-" for entry in itertools.islice(entries, 1) for axes in read_dims(entry, name)]

    def detail(self, candidate: Candidate) -> Detail:
        """The program of a plan that was priced; of a deep model that with fewer layers."""
        shape, outcome, what = candidate.shape, candidate.outcome, ""
        written = self.written(shape)
        if outcome is None:
            assert self.shallow is not None
            step, written = self.shallow.base(shape.microbatches, self._said(shape)), written.inside
            with unchecked():
                outcome = self._laid_out(step, written.replica).under([candidate.price])
            kept = ", ".join(f"{x.kept} of {len(x.module)}" for x in self.shallow.lists)
            what = f"Drawn with {kept} layers: the others are like these."
            what += " Of a pipeline, as if its ranks had one stage." if shape.pp > 1 else ""
        else:
            step = self.step(shape)
        shapes = {r.name: v.shape for r, v in _parameters(step.program)}
        layouts = written.parameter_layouts(shapes)
        for name, layout in layouts.items():
            layouts[name] = written.stored(layout, shapes[name]) if written.level(name) == 3 else layout
        entries = {name: [".".join(axes) or "-" for axes in layout.dims] for name, layout in layouts.items()}
        held = {name: (shape, entries[name]) for name, shape in shapes.items()}
        times = outcome.times
        if outcome.lowered.pipeline is not None:
            what, mesh = "Drawn is the rank with the first stage; all of them are below.", written.mesh
            if shape.place:
                what, mesh = f"Drawn is the place of {shape.place[0]}; all of them are below.", shape.place[0].mesh
            hardware = self.cluster.hardware
            program = outcome.lowered.program
            compiled = program.blocks if self.compiled else ()
            times = plan.Clock(hardware, hardware.links(mesh))(program, compiled)
        return Detail(outcome.lowered.program, times, held, what, candidate.line)

    def _laid_out(
        self, unsharded: UnshardedStep, written: Plan, known: plan.KnownLayouts | None = None, bounds: bool = False
    ) -> LaidOut:
        inputs, gathered = (
            ShardedModel(self.model, self.optimizer, written).given(unsharded)
            if written.mesh.world > 1
            else ({}, frozenset[int]())
        )
        program, body, hardware = unsharded.program, unsharded.body, self.cluster.hardware
        task = Task(
            program, body, hardware, self.compiled, inputs, gathered, self.memory,
            outlines=False, known=known, bounds=bounds,
        )  # fmt: skip
        return LaidOut.of(task, written)

    def checked(self, written: Plan) -> str:
        """Does a plan still fit this model and cluster?  What it comes to; PlanError where it does not."""
        if written.mesh.world != self.cluster.world:
            raise PlanError(
                f"the plan is for {written.mesh.world} devices, the cluster has {self.cluster.world}\n"
                f"  the mesh  {written.mesh}\n  try       --cluster with as many devices"
            )
        if not isinstance(written.stages, int):
            plan.refuse_unknown_stages(written.stages, [name for name, _ in self.model.named_parameters()])
        price = self.priced(written)
        if not price.fits:
            raise PlanError(
                f"the plan does not fit {shown(self.memory or 0)} a device: {price.why}\n"
                f"  the plan  {price.shape}\n"
                "  try       mycel plan  without it: it finds one that fits, or says what would"
            )
        what = f"a step takes {span(price.seconds)}, {shown(price.peak)} at its peak"
        return f"it fits: {what}, at least {span(self.bound)} in any plan"

    # -- the search

    @functools.cached_property
    def bound(self) -> float:
        """Seconds that no plan goes below: everything computed once, divided among all devices, without messages.  A
        part of an equation takes at least its share of what the whole one does (`tests/test_search.py`)."""
        with unchecked():
            alone = Shape()
            steps = self.shallow.steps(1) if self.shallow is not None else [self.step()]
            laid_out = [self._laid_out(step, self.written(alone)) for step in steps]
            prices = [0.0, *plan.ladder(laid_out[0].costs)[:1]]
            computing = [[x.under([price]).times.totals["compute"] for x in laid_out] for price in prices]
        whole = [self.shallow.sum(each) if self.shallow is not None else each[0] for each in computing]
        return min(whole) / self.cluster.world

    def on_one_host(self) -> Search:
        """The same search, as if there were no other hosts."""
        return self.otherwise(cluster=self.cluster.one_host)

    def otherwise(
        self,
        cluster: Cluster | None = None,
        memory: int | None = None,
        without: Collection[str] = (),
        given: Mapping[str, Any] | None = None,
    ) -> Search:
        """The same search on other devices, with more memory, with less given or something else."""
        given = self._written if given is None else given
        given = {name: said for name, said in given.items() if name not in without}
        memory = memory or self.memory
        other = Search(self.model, self.optimizer, self._make, cluster or self.cluster, memory, given, self.compiled)
        other._smaller, other._full_masks = self._smaller, self._full_masks
        other._steps, other.shallow = self._steps, self.shallow
        return other

    def with_rows(self, rows: int) -> Search | None:
        """The same search for a batch with fewer rows; None where nobody has said how it is made smaller."""
        return self._smaller(rows) if self._smaller is not None else None

    def is_given(self, name: str) -> bool:
        return name in self._written

    def first_fit(self) -> Candidate | None:
        """The first plan that fits, if any does."""
        try:
            for shape in SearchOrder(self):
                if shape not in self.candidates and self.price(shape).fits:
                    return self.candidates[shape]
        except PlanError:  # nothing divides so
            pass
        return None

    def flops(self) -> float:
        """Of the products of a step, attention and convolutions among them; without what is computed again."""
        program, count, whole = self.program, runs(self.program), 0.0
        for name, eqn in walk(program):
            if eqn.op.rate_of(eqn.input_types, eqn.params).startswith(MULTIPLYING):
                whole += count[name] * eqn.op.cost(eqn.input_types, eqn.params).flops * (1 - eqn.op.again)
        return whole

    def run(self, seconds: float | None = None, interruptible: bool = False) -> Answer:
        """Price plans, most promising first, until nothing better is left or the time is over; `interruptible`: Ctrl-C
        ends the search alone, with the best so far."""
        with without_collector():
            return self._run(seconds, interruptible)

    def _run(self, seconds: float | None, interruptible: bool) -> Answer:
        started = time.perf_counter()
        bound, complete, interrupted = self.bound, True, False

        def late() -> bool:
            return seconds is not None and time.perf_counter() - started > seconds and bool(self.candidates)

        try:
            for shape in SearchOrder(self):
                if shape in self.candidates:
                    continue
                if late():
                    complete = False
                    break
                self.price(shape)
                best = min((c.seconds for c in self.candidates.values()), default=float("inf"))
                if best <= bound * (1 + NEAR):
                    break
        except KeyboardInterrupt:
            if not interruptible or not any(c.fits for c in self.candidates.values()):
                raise
            complete, interrupted = False, True
        ranked = sorted(self.candidates.values(), key=lambda c: (not c.fits, c.seconds, str(c.shape)))
        if not any(c.fits for c in ranked):
            raise nothing_fits(self, ranked) if complete else too_short(self, ranked, time.perf_counter() - started)
        ranked = [explained(c, ranked[0]) for c in ranked]
        ranked = [replace(c, peak_parts=self._peak_parts(c)) if c.fits else c for c in ranked]
        tokens = self.rows * self.length if self.is_text else self.rows
        took = time.perf_counter() - started
        cluster = self.cluster
        bars = plan.error_bars(cluster.hardware.name, cluster.world, cluster.correction, cluster.basis)
        return Answer(
            ranked, bound, self.flops(), tokens, self.is_text, cluster, took, complete, interrupted, bars,
            tuple(self._taken_for_granted()),
        )  # fmt: skip

    def _taken_for_granted(self) -> Iterator[str]:
        """Of a batch without data: masks by which the program is another where some of it is padding."""
        decides = {name for facts in self.step().captured.facts for name in facts.inputs}
        for name in self._full_masks:
            if name in decides:
                yield f"{name} is taken to be all ones: batches with padding take a program of their own, and longer"


def _refuse_unpriced(written: Plan) -> None:
    """PlanError for steps that are not all alike: no one figure says what they take."""
    said = next((how for how in written.compress.values() if not isinstance(how, str)), None)
    said = "when" if "when" in written.compress else said
    if said is not None:
        raise PlanError(
            f"compress: {dict(written.compress)}: a step is priced where all travels in one way in each step\n"
            "  try       the plan without compress, or with one codec: compress: {dp: int8+ef}"
        )


def _too_large(shape: Shape, device: float, host: float = 0.0) -> Candidate:
    """A plan for which so much is missing."""
    missing = [shown(n) + where for n, where in ((device, ""), (host, " on the host")) if n]
    return Candidate(shape, why=f"out of memory by {' and '.join(missing)}", short=float("inf") if host else device)


def _shortages(refusal: str) -> tuple[float, float]:
    """What a refusal says is too much, on the device and on the host."""
    device = host = 0.0
    for line, size in re.findall(r"^(.*): ([\d.]+ \w+) too much", refusal, re.MULTILINE):
        missing = parse_bytes(size.replace("bytes", "B"))
        device, host = (device, host + missing) if "on the host" in line else (device + missing, host)
    return device, host


def _parameters(program: Program) -> Iterator[tuple[Role, Var]]:
    for v in program.inputs:
        role = program.role(v)
        if role.kind == "parameter":
            yield role, v


def patterns(layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """Layouts by name -> by pattern, with * for numbers, where all names of a pattern lie alike."""
    by_pattern: dict[str, dict[Layout, list[str]]] = {}
    for name, layout in layouts.items():
        by_pattern.setdefault(re.sub(r"\d+", "*", name), {}).setdefault(layout, []).append(name)
    entries: dict[str, Any] = {}
    for pattern, alike in by_pattern.items():
        for layout, names in alike.items():
            if layout.is_whole:
                continue
            entry = [".".join(axes) or "-" for axes in layout.dims]
            entries.update({pattern: entry} if len(alike) == 1 else dict.fromkeys(names, entry))
    return entries
