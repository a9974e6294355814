"""A step whose sub-models are on meshes of their own -> one program for the ranks of each place.

The step is cut before layouts: each place's program is global, with `begin_send_across` … `finish_receive_across` for
what crosses, whole tensors as yet.  Then each is laid out over its own mesh, by itself, whatever that does to the dims
of what it sends or receives; and once all are, `connect` fills in who sends which piece to whom:

    place 0, dp=2, ranks 0 1                                place 1, dp=3, ranks 2 3 4
    h: f32[12@dp,8] = …                                     t = begin_receive_across(source=0, tag=0, pieces=…)
    t = begin_send_across(h, to=1, tag=0, pieces=…)         h: f32[12@dp,8] = finish_receive_across(t, …)
                                                            rank 2 <- rows 0..4 of rank 0, rank 3 <- rows 4..6 of
                                                            rank 0 and 6..8 of rank 1, rank 4 <- rows 8..12 of rank 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mycel.ir import Atom, Eqn, Layout, Params, Program, Type, Var, check, prune, substitute
from mycel.lower.distribute import Distributed
from mycel.lower.stage_blocks import StageParts
from mycel.lower.stage_entry import PipelineEntry, PipelineLoop
from mycel.lower.stage_sums import apart
from mycel.lower.stages import Pipeline, RankWriter, pipeline_of
from mycel.ops import o
from mycel.plan.across import Placed, transfers
from mycel.plan.list_schedules import of_places
from mycel.plan.places import PLACE_AXIS, Place, PlacedStages, placed_stages
from mycel.plan.schedule import BACKWARD, FORWARD, StageCosts, StepGraph, read_orders
from mycel.plan.stages import StageMap, StepFlow, refuse_shared_state
from mycel.transform.dce import dce

ACROSS = (o.begin_send_across, o.finish_send_across, o.begin_receive_across, o.finish_receive_across)
FIRST_SUM = 1 << 20  # tags of what places add up, behind those of all other messages


def in_places(
    program: Program,
    body: str,
    places: Sequence[Place],
    schedule: str,
    costs: StageCosts | None = None,
    orders: Sequence[str] = (),
) -> Pipeline:
    """The global program of each place, of a step with `plain_sums`; `costs` are those of its stages, where they are
    known, `orders` those of a schedule that was searched before."""
    program = _sent_once(_placed(program, body, places).stages)
    placed = _placed(program, body, places)
    stages = apart(placed.stages, lambda changed: _placed(changed, body, places).stages)
    parts = StageParts(stages, splits=False)
    microbatches, after = stages.flow.body.length, graph_of(parts)
    order = (
        read_orders(orders, placed.place, microbatches, after)
        if orders
        else of_places(schedule, placed.place, microbatches, after, costs)
    )
    entry = PipelineEntry(PipelineLoop(parts, order))
    programs = tuple(check(prune(PlaceWriter(entry, i, PLACE_AXIS).program())) for i in range(len(places)))
    return pipeline_of(program, programs, parts, order)


def _placed(program: Program, body: str, places: Sequence[Place]) -> PlacedStages:
    placed = placed_stages(StepFlow(program, body), places)
    refuse_shared_state(placed.stages)
    return placed


def _sent_once(stages: StageMap) -> Program:
    """What forward sends to another stage is not computed again from what that does not have.

    forward    q = permute(r)                 in stage 0, which sends it to stage 2
    backward   q1 = permute(r)          =>    its readers read q, where forward read it
    """
    flow = stages.flow
    sent = {v for v, where in stages.have.items() if len(where) > 1}
    forward: dict[object, tuple[Var, ...]] = {}
    same: dict[Var, Atom] = {}
    again: dict[Var, Atom] = {}
    for i, eqn in enumerate(flow.block.eqns):
        twin = substitute(eqn, same)
        key = twin.op, twin.inputs, twin.params
        if i not in flow.backward:
            forward.setdefault(key, eqn.outputs)
        elif key in forward and not eqn.op.effect:
            same.update(zip(eqn.outputs, forward[key], strict=True))
            again.update((v, own) for v, own in zip(eqn.outputs, forward[key], strict=True) if own in sent)
    if not again:
        return flow.program
    body = replace(flow.block, eqns=tuple(substitute(eqn, again) for eqn in flow.block.eqns))
    return check(dce(replace(flow.program, blocks={**flow.program.blocks, flow.body.name: body})))


def graph_of(parts: StageParts) -> StepGraph:
    """Which steps wait for which: for messages, and each stage's backward for its forward."""
    after: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}
    for s in range(parts.stages.stages):
        after[FORWARD, s], after[BACKWARD, s] = (), ((FORWARD, s),)
    for message in parts.messages:
        after[message.target] = (*after[message.target], message.source)
    return after


class PlaceWriter(RankWriter):
    """Writes the program of one place: what it sends and receives, each tensor by itself, may lie in any way."""

    sending = "backward"  # laying it out may move what goes, and equations of the backward may read it so
    sums: int = 0  # taken over all places so far

    def begin_send(self, values: Sequence[Atom], to: int, tag: int) -> list[Var]:
        return [self.emit(o.begin_send_across, (x,), {"to": to, "tag": tag + i}) for i, x in enumerate(values)]

    def finish_send(self, tokens: Sequence[Var], values: Sequence[Atom], to: int, tag: int) -> None:
        for i, (token, x) in enumerate(zip(tokens, values, strict=True)):
            self.emit(o.finish_send_across, (token, x), {"to": to, "tag": tag + i})

    def begin_receive(self, like: Sequence[Var], source: int, tag: int) -> list[Var]:
        return [
            self.emit(o.begin_receive_across, (), {"source": source, "tag": tag + i, "dtype": v.dtype})
            for i, v in enumerate(like)
        ]

    def finish_receive(self, tokens: Sequence[Var], like: Sequence[Var], source: int, tag: int) -> list[Var]:
        how = [{"source": source, "tag": tag + i, "dtype": v.dtype, "shape": v.shape} for i, v in enumerate(like)]
        return [self.emit(o.finish_receive_across, (token,), params) for token, params in zip(tokens, how, strict=True)]

    def summed(self, x: Var) -> Var:
        """Each place tells the others its own, and adds them up in the same order."""
        places = self.schedule.ranks
        first, self.sums = FIRST_SUM + self.sums * places * places, self.sums + 1
        others = [p for p in range(places) if p != self.rank]
        sent = [(self.begin_send((x,), p, first + self.rank * places + p), p) for p in others]
        asked = {p: self.begin_receive((x,), p, first + p * places + self.rank) for p in others}
        given = {p: self.finish_receive(t, (x,), p, first + p * places + self.rank)[0] for p, t in asked.items()}
        given[self.rank] = x
        for tokens, p in sent:
            self.finish_send(tokens, (x,), p, first + self.rank * places + p)
        total = given[0]
        for p in range(1, places):
            total = o.add(total, given[p])
        return total


@dataclass(frozen=True)
class Crossing:
    """One end of a message: the whole tensor's type, and how it lies."""

    type: Type
    layout: Layout


def crossings(whole: Program, spread: Distributed | None) -> dict[tuple[int, bool], Crossing]:
    """By tag: what a place sends (True), and what it receives, as it lies there."""
    by_tag: dict[tuple[int, bool], Crossing] = {}
    main = whole.main if spread is None else spread.whole.main
    choices = [None] * len(main.eqns) if spread is None else spread.layouts[spread.whole.entry].choices
    for eqn, choice in zip(main.eqns, choices, strict=True):
        if eqn.op not in (o.begin_send_across, o.finish_receive_across):
            continue
        sends = eqn.op is o.begin_send_across
        type_ = next(iter(eqn.vars)).type if sends else eqn.outputs[0].type
        laid = None if choice is None else choice.ins[0] if sends else choice.outs[0]
        by_tag[eqn.params["tag"], sends] = Crossing(type_, laid or Layout.whole(type_.ndim))
    return by_tag


def connect(
    programs: Sequence[Program], ends: Sequence[Mapping[tuple[int, bool], Crossing]], places: Sequence[Place]
) -> tuple[Program, ...]:
    """The local programs of all places, each message with the pieces that go from rank to rank."""
    pieces: dict[int, tuple[object, ...]] = {}
    for i, (program, of_place) in enumerate(zip(programs, ends, strict=True)):
        for eqn in program.main.eqns:
            if eqn.op is o.begin_send_across:
                tag, to = eqn.params["tag"], eqn.params["to"]
                pieces[tag] = _pieces(of_place[tag, True], places[i], ends[to][tag, False], places[to])
    return tuple(_connected(program, pieces) for program in programs)


def _pieces(sent: Crossing, source: Place, received: Crossing, target: Place) -> tuple[object, ...]:
    ends = Placed(sent.layout, source.mesh, source.ranks), Placed(received.layout, target.mesh, target.ranks)
    return tuple((t.source, t.target, t.source_start, t.target_start, t.shape) for t in transfers(sent.type, *ends))


def _connected(program: Program, pieces: Mapping[int, tuple[object, ...]]) -> Program:
    sent: dict[Atom, Atom] = {}  # tokens -> what goes, in the layout in which it does

    def filled(eqn: Eqn) -> Eqn:
        if eqn.op not in ACROSS:
            return eqn
        if eqn.op is o.begin_send_across:
            sent[eqn.outputs[0]] = eqn.inputs[0]
        inputs = (eqn.inputs[0], sent[eqn.inputs[0]]) if eqn.op is o.finish_send_across else eqn.inputs
        return replace(eqn, inputs=inputs, params=Params({**eqn.params, "pieces": pieces[eqn.params["tag"]]}))

    main = replace(program.main, eqns=tuple(map(filled, program.main.eqns)))
    return check(dce(replace(program, blocks={**program.blocks, program.entry: main})))
