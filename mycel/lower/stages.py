"""A step of a training program with microbatches -> one program for each rank of a pipeline.

    scan(…, body=@part)       =>    rank 0                                     rank 1
                                    h = call(x.0, w0…, block=@forward_0)       t = begin_receive(source=0, tag=0)
                                    begin_send(h, to=1, tag=0)                 h = finish_receive(t)
                                    h.1 = call(x.1, w0…, block=@forward_0)     y, r = call(h, w1…, block=@forward_1)
                                    …                                          dh, dw = call(r, h, block=@backward_1)
                                    dh = finish_receive(t)                     begin_send(dh, to=0, tag=1)
                                    dw = call(r, dh, block=@backward_0)        total = add(total, dw)
                                    total = add(total, dw)                     …

Forward, backward and (where the schedule has them apart) weight steps of a stage are blocks, made once; the entry of a
rank is their calls in the order of its schedule.  What one step makes and a later one of the same stage reads
(residuals) are values of the entry; what another stage reads is sent, once, when it is made, and asked for one step
ahead.  What is sent is given back where the schedule proves that it has arrived.

Around the scan each rank keeps what its own results need.  Everything else of another rank comes by message: the loss,
sums of parameters that several stages use (`apart` sums up each stage's share by itself, and adds these once).  The
global norm is one sum over all ranks, and so is what is measured of gradients; an optimiser's group is updated by each
rank for its own parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mycel.ir import Atom, Axes, Block, Builder, Eqn, Params, Program, Ref, Role, Var, call, check, prune
from mycel.lower.stage_blocks import StagePart, StageParts
from mycel.lower.stage_entry import EntrySlice, PipelineEntry, PipelineLoop, TaggedMessage, of_group
from mycel.lower.stage_sums import apart, behind_loop, cut_at
from mycel.ops import o
from mycel.ops.gradient_norm import OVER_STAGES
from mycel.plan.schedule import FORWARD, PipelineSchedule, StageStep
from mycel.plan.stages import roles_of_inputs

TURN = "next_part"  # what is carried from microbatch to microbatch by every rank: the key


@dataclass(frozen=True)
class Pipeline:
    """The program of each rank along the axis of stages; `owners`: the ranks that hold an input of the step, by role;
    `users`: of these, those whose forward steps read it."""

    programs: tuple[Program, ...]
    schedule: PipelineSchedule
    owners: Mapping[Role, tuple[int, ...]]
    users: Mapping[Role, tuple[int, ...]]


def pipelined(program: Program, body: str, starts: Sequence[str], schedule: PipelineSchedule, axis: str) -> Pipeline:
    """The programs of all ranks, of a step with `plain_sums`; `starts`: the values whose equations begin the second and
    later stages."""
    parts = stage_parts(program, body, starts, schedule.splits)
    return pipeline_of(program, rank_programs(parts, schedule, axis), parts, schedule)


def stage_parts(program: Program, body: str, starts: Sequence[str], splits: bool) -> StageParts:
    """The steps of all stages, which any schedule may order; `splits`: those of weights are apart."""
    return StageParts(apart(cut_at(program, body, starts), lambda changed: cut_at(changed, body, starts)), splits)


def rank_programs(
    parts: StageParts, schedule: PipelineSchedule, axis: str, ranks: Sequence[int] | None = None
) -> tuple[Program, ...]:
    """Of all ranks, or of some."""
    entry = PipelineEntry(PipelineLoop(parts, schedule))
    written = range(schedule.ranks) if ranks is None else ranks
    return tuple(check(prune(RankWriter(entry, rank, axis).program())) for rank in written)


def pipeline_of(
    program: Program, programs: tuple[Program, ...], parts: StageParts, schedule: PipelineSchedule
) -> Pipeline:
    """What the ranks of a pipeline run, and who of them holds which input of the step."""
    held = {r: {p.role(v) for v in p.inputs} for r, p in enumerate(programs)}
    owners = {
        program.role(v): tuple(r for r, roles in held.items() if program.role(v) in roles) for v in program.inputs
    }
    return Pipeline(programs, schedule, owners, _users(parts, schedule))


def _users(parts: StageParts, schedule: PipelineSchedule) -> dict[Role, tuple[int, ...]]:
    """The ranks whose forward steps read an input of the step."""
    roles, users = roles_of_inputs(parts.flow), dict[Role, set[int]]()
    for v, stages in parts.stages.users.items():
        for role in roles.get(v, ()):
            users.setdefault(role, set()).update(schedule.place[s] for s in stages)
    return {role: tuple(sorted(ranks)) for role, ranks in users.items()}


class RankWriter:
    """Writes the program of one rank."""

    sending = "update"  # the phase of messages behind the loop

    def __init__(self, entry: PipelineEntry, rank: int, axis: str) -> None:
        self.entry, self.rank = entry, rank
        self.loop, self.schedule, self.parts = entry.loop, entry.schedule, entry.parts
        self.body, self.main = self.parts.body, self.entry.main
        self.axes: Axes = (axis,)
        self.carries = {v: j for j, v in enumerate(self.body.carried)}
        self.cut_pieces = set(self.body.pieces)
        self.b = Builder()
        self.values: dict[Var, Atom] = {}  # of the entry
        self.inside: dict[tuple[int, int, Var], Atom] = {}  # of the body: by stage and microbatch
        self.pieces: dict[tuple[int, Var], Atom] = {}
        self.totals: dict[int, Atom] = {}
        self.rows: dict[int, list[Atom]] = {}
        self.turned: list[dict[Var, Atom]] = []
        self.tokens: dict[int, list[Var]] = {}
        self.incoming_from: dict[int, Iterator[TaggedMessage]] = {}  # by rank: what it has not been asked for yet
        self.blocks: dict[str, Block] = {}

    def program(self) -> Program:
        whole, kept = self.entry.program, self.entry.slices[self.rank]
        for v in whole.inputs:
            if v in kept.inputs:
                self.values[v] = self.b.input(v.name, v.type)
        for i in sorted(i for i in kept.eqns if i < self.body.at):
            self.equation(i, kept)
        self.begin_loop()
        order = self.schedule.orders[self.rank]
        for i, step in enumerate(order):
            if i == 0:
                self.ask_for(step)
            if i + 1 < len(order):
                self.ask_for(order[i + 1])
            self.step(step)
        self.b.source, self.b.phase = "", "update"
        for message in self.loop.unsettled(self.rank):
            self.give_back(message)
        self.exchange(kept)
        for i in sorted(i for i in kept.eqns if i > self.body.at):
            self.equation(i, kept)
        updates = self.entry.updates(self.rank)
        outs = [self.value(x) for x in (*whole.results, *updates.values())]
        roles = {v.name: whole.roles[v.name] for v in kept.inputs if v.name in whole.roles}
        blocks = {**self.parts.splitter.blocks, **self.blocks, whole.entry: self.b.block(outs)}
        return replace(whole, blocks=blocks, updates=tuple(updates), roles=roles)

    def value(self, x: Atom) -> Atom:
        return self.values[x] if isinstance(x, Var) else x

    # -- around the loop

    def equation(self, i: int, kept: EntrySlice) -> None:
        """An equation of the entry: as it is, for this rank's parameters, or as a sum over ranks."""
        eqn = self.main.eqns[i]
        self.b.at(eqn)
        if eqn.op in OVER_STAGES and i > self.body.at:
            self.over_stages(eqn)
            return
        operands, results, params = eqn.inputs, eqn.outputs, eqn.params
        if i in kept.groups:
            some, own = of_group(eqn, kept.groups[i])
            operands, results = tuple(some), tuple(own)
            params = Params({**params, "count": len(kept.groups[i])})
        outs = tuple(Var(self.b.name(v.name), v.type) for v in results)
        eqn = behind_loop(eqn) if i > self.body.at else eqn
        self.b.eqns.append(replace(eqn, inputs=tuple(map(self.value, operands)), params=params, outputs=outs))
        self.values.update(zip(results, outs, strict=True))

    def over_stages(self, eqn: Eqn) -> None:
        """A norm or sum of what belongs to all gradients: each rank's are those that it counts."""
        own = [self.value(v) for v in eqn.vars if self.entry.norm_of.get(v, 0) == self.rank]
        dtype = eqn.outputs[0].dtype
        with self.b:
            part = eqn.op(*own) if own else o.full(0.0, shape=(), dtype=dtype)
            if eqn.op is o.total:
                self.values[eqn.outputs[0]] = self.summed(part)
                return
            squares = o.square(o.cast(part, dtype=torch.float64))  # which 32 bits might not hold
            self.values[eqn.outputs[0]] = o.cast(o.sqrt(self.summed(squares)), dtype=dtype)

    def exchange(self, kept: EntrySlice) -> None:
        """Results of the loop, to all who ask for them and do not have them."""
        outputs, tag = self.body.eqn.outputs, self.loop.tags
        for j in kept.scanned:
            if self.entry.homes[j] in (-1, self.rank):
                self.values[outputs[j]] = self.result(j)
        sent: list[tuple[list[Var], Atom, int, int]] = []
        for j, home in enumerate(self.entry.homes):
            for r, other in enumerate(self.entry.slices):
                if home in (-1, r) or j not in other.scanned:
                    continue
                if self.rank == home:
                    self.b.phase = self.sending  # what comes is read by any phase, what goes is made by any
                    x = self.result(j)
                    sent.append((self.begin_send((x,), r, tag), x, r, tag))
                elif self.rank == r:
                    v, self.b.phase = outputs[j], "forward"
                    tokens = self.begin_receive((v,), home, tag)
                    (self.values[v],) = self.finish_receive(tokens, (v,), home, tag)
                tag += 1
        self.b.phase = "update"
        for tokens, x, r, tag in sent:
            self.finish_send(tokens, (x,), r, tag)

    # -- messages, between the ranks of the same place in each stage

    def begin_send(self, values: Sequence[Atom], to: int, tag: int) -> list[Var]:
        """Values to another rank; what `finish_send` asks for."""
        return [self.emit(o.begin_send, tuple(values), {**self.between, "to": to, "tag": tag})]

    def finish_send(self, tokens: Sequence[Var], values: Sequence[Atom], to: int, tag: int) -> None:
        self.emit(o.finish_send, (*tokens, *values), {**self.between, "to": to, "tag": tag})

    def begin_receive(self, like: Sequence[Var], source: int, tag: int) -> list[Var]:
        """Be ready for values like these from another rank."""
        return [self.emit(o.begin_receive, (), self.incoming(like, source, tag))]

    def finish_receive(self, tokens: Sequence[Var], like: Sequence[Var], source: int, tag: int) -> list[Var]:
        outs = self.b.emit(o.finish_receive, tuple(tokens), self.incoming(like, source, tag))
        return list(outs) if isinstance(outs, tuple) else [outs]

    def incoming(self, like: Sequence[Var], source: int, tag: int) -> dict[str, object]:
        shapes, dtypes = tuple(v.shape for v in like), tuple(v.dtype for v in like)
        return {**self.between, "source": source, "tag": tag, "shapes": shapes, "dtypes": dtypes}

    def summed(self, x: Var) -> Var:
        """Over all ranks of the pipeline."""
        return o.all_reduce(x, axes=self.axes, count=self.schedule.ranks)

    @property
    def between(self) -> dict[str, object]:
        return {"axes": self.axes, "count": self.schedule.ranks}

    def emit(self, op: object, inputs: tuple[Atom, ...], how: Mapping[str, object]) -> Var:
        return self.b.emit(op, inputs, dict(how))  # type: ignore[arg-type, return-value]

    def result(self, j: int) -> Atom:
        """A result of the scan that this rank has made."""
        if j in self.totals:
            return self.totals[j]
        if j < self.body.carry:
            return self.turn_to(self.schedule.microbatches)[self.body.carried[j]]
        v = self.body.eqn.outputs[j]
        if (j, v) in self.pieces:
            return self.pieces[j, v]
        phase, self.b.phase = self.b.phase, "backward"  # what is made of it behind the loop is of the backward
        with self.b:
            rows = [o.reshape(x, shape=(1, *v.shape[1:])) for x in self.rows[j]]
            self.pieces[j, v] = o.cat(*rows, dim=0) if len(rows) > 1 else rows[0]
        self.b.phase = phase
        return self.pieces[j, v]

    # -- the loop

    def begin_loop(self) -> None:
        outer = self.body.outer
        for j, v in enumerate(self.body.carried):
            if self.entry.homes[j] == self.rank:
                self.totals[j] = self.value(outer[v])
        self.turned = [{v: self.value(outer[v]) for v in self.parts.turned if self.has(outer[v])}]
        self._own_zeros()

    def has(self, x: Atom) -> bool:
        return not isinstance(x, Var) or x in self.values

    def _own_zeros(self) -> None:
        """Each sum begins in memory of its own, to be added to in place."""
        makers = {v: e for e in self.b.eqns for v in e.outputs}
        seen: set[Var] = set()
        for j, x in self.totals.items():
            eqn = makers.get(x) if isinstance(x, Var) else None
            if isinstance(x, Var) and x in seen and eqn is not None and not list(eqn.vars):
                self.totals[j] = new = Var(self.b.name(x.name), x.type)
                self.b.eqns.append(replace(eqn, outputs=(new,)))
            elif isinstance(x, Var):
                seen.add(x)

    def turn_to(self, m: int) -> dict[Var, Atom]:
        """What every rank carries on, at a microbatch."""
        while len(self.turned) <= m:
            block, before = self.entry.turn, self.turned[-1]
            self.blocks[TURN] = block
            given = [before[v] if v in before else self.given(v, len(self.turned) - 1) for v in block.inputs]
            outs = tuple(Var(self.b.name(v.name), v.type) for v in self.parts.turned)
            self.b.eqns.append(Eqn(call, tuple(given), Params(block=Ref(TURN)), outs))
            self.turned.append(dict(zip(self.parts.turned, outs, strict=True)))
        return self.turned[m]

    def given(self, v: Var, m: int) -> Atom:
        """An input of the body at a microbatch."""
        outer = self.body.outer
        if v in self.parts.turned:
            return self.turn_to(m)[v]
        if v in self.carries:
            return self.totals[self.carries[v]]
        if v not in self.cut_pieces:
            return self.value(outer[v])
        if (m, v) not in self.pieces:
            with self.b:
                self.pieces[m, v] = o.select(self.value(outer[v]), dim=0, index=m)
        return self.pieces[m, v]

    def ask_for(self, step: StageStep) -> None:
        """Be ready for what a step receives, and for what the same rank sends before that: who asks in the order in
        which messages are sent needs no tags."""
        for wanted in self.loop.received.get(step, ()):
            source = self.schedule.place[wanted.source.stage]
            if source not in self.incoming_from:
                self.incoming_from[source] = iter(self.loop.in_order(source, self.rank))
            while wanted.tag not in self.tokens:
                message = next(self.incoming_from[source])
                self.at(message.target, message.values[0])
                self.tokens[message.tag] = self.begin_receive(message.values, source, message.tag)

    def at(self, step: StageStep, v: Var | None = None) -> None:
        """The next equations are of a step, and speak of a value: they are told by these if nobody answers."""
        maker = self.parts.flow.makers.get(v) if v is not None else None
        line = f", {self.parts.block.eqns[maker].source}" if maker is not None else ""
        self.b.source = f"{step.words}{line}"
        self.b.phase = "forward" if step.kind == FORWARD else "backward"

    def give_back(self, message: TaggedMessage) -> None:
        values = [self.inside[message.source.stage, message.source.microbatch, v] for v in message.values]
        to = self.schedule.place[message.target.stage]
        self.finish_send(self.tokens[message.tag], values, to, message.tag)

    def step(self, step: StageStep) -> None:
        s, m = step.stage, step.microbatch
        for message in self.loop.received.get(step, ()):
            self.at(step, message.values[0])
            source = self.schedule.place[message.source.stage]
            came = self.finish_receive(self.tokens[message.tag], message.values, source, message.tag)
            self.inside.update({(s, m, v): x for v, x in zip(message.values, came, strict=True)})
        self.at(step)
        self.b.phase = "backward"
        for message in self.loop.settled.get(step, ()):
            self.give_back(message)
        self.at(step)
        part = self.parts.parts.get((step.kind, s))
        if part is None:
            return
        self.blocks[part.name] = part.block
        operands = tuple(self.operand(s, m, v) for v in part.takes)
        outs = tuple(Var(self.b.name(f"{v.name}_{m}"), v.type) for v in part.gives)
        self.b.eqns.append(Eqn(call, operands, Params(block=Ref(part.name)), outs, self.b.source, self.b.phase))
        self.inside.update({(s, m, v): x for v, x in zip(part.gives, outs, strict=True)})
        self.carry_on(step, part)
        for message in self.loop.passed.get(step, ()):
            self.inside.update({(message.target.stage, m, v): self.inside[s, m, v] for v in message.values})
        for message in self.loop.sent.get(step, ()):
            self.at(step, message.values[0])
            values = [self.inside[s, m, v] for v in message.values]
            to = self.schedule.place[message.target.stage]
            self.tokens[message.tag] = self.begin_send(values, to, message.tag)

    def operand(self, s: int, m: int, v: Var) -> Atom:
        return self.given(v, m) if v in self.body.outer else self.inside[s, m, v]

    def carry_on(self, step: StageStep, part: StagePart) -> None:
        """Add to sums, replace state, put rows aside."""
        s, m = step.stage, step.microbatch
        for j, new in self.parts.carried_by(part):
            if self.entry.homes[j] != self.rank:
                continue
            value = self.inside[s, m, new]
            if j in self.parts.summed:
                with self.b:
                    self.totals[j] = o.add(self.totals[j], value)
            elif j < self.body.carry:
                self.totals[j] = value
            else:
                self.rows.setdefault(j, []).append(value)
