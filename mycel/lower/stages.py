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
global norm is one sum over all ranks; an optimiser's group is updated by each rank for its own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mycel.errors import PlanError
from mycel.ir import (
    Atom,
    Axes,
    Block,
    Builder,
    Eqn,
    Params,
    Program,
    Ref,
    Role,
    Var,
    call,
    chains,
    check,
    prune,
    substitute,
)
from mycel.lower.split_calls import CallSplitter
from mycel.ops import o
from mycel.ops.optimisers import is_group_update
from mycel.plan.schedule import BACKWARD, FORWARD, KINDS, WEIGHT, PipelineSchedule, StageStep
from mycel.plan.stages import STAGED, CarrySum, StageMap, StepFlow, cut, refuse_shared_state
from mycel.transform.dce import dce

NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHT: "weight"}
TURN = "next_part"  # what is carried from microbatch to microbatch by every rank: the key


def step_name(kind: str, stage: int) -> str:
    """The name of the block of a stage's step."""
    return f"{NAMES[kind]}_{stage}"


@dataclass(frozen=True)
class Pipeline:
    """The program of each rank along the axis of stages; `owners`: the ranks that hold an input of the step, by
    role."""

    programs: tuple[Program, ...]
    schedule: PipelineSchedule
    owners: Mapping[Role, tuple[int, ...]]
    derived: Mapping[str, str]  # blocks that were split -> the block they come from


def pipelined(program: Program, body: str, starts: Sequence[str], schedule: PipelineSchedule, axis: str) -> Pipeline:
    """The programs of all ranks, of a step with `plain_sums`; `starts`: the values whose equations begin the second and
    later stages."""
    stages = apart(cut_at(program, body, starts))
    parts = _StageParts(stages, schedule.splits)
    entry = _Entry(_Loop(parts, schedule))
    programs = tuple(check(prune(_RankWriter(entry, rank, axis).program())) for rank in range(schedule.ranks))
    held = {r: {p.role(v) for v in p.inputs} for r, p in enumerate(programs)}
    owners = {
        program.role(v): tuple(r for r, roles in held.items() if program.role(v) in roles) for v in program.inputs
    }
    return Pipeline(programs, schedule, owners, parts.splitter.derived)


def cut_at(program: Program, body: str, starts: Sequence[str]) -> StageMap:
    """The stages of a program that begin where these values are made."""
    flow = StepFlow(program, body)
    by_name = {v.name: i for v, i in flow.makers.items()}
    for name in starts:
        if by_name.get(name) not in flow.units:
            raise PlanError(
                f"the plan begins a stage at {name}, which this step does not make on its way forward\n"
                "  try       plan.given, to decide anew"
            )
    stages = cut(flow, [by_name[name] for name in starts])
    refuse_shared_state(stages)
    return stages


# -- sums over microbatches

MOVES = (
    o.all_reduce, o.all_gather, o.reduce_scatter, o.reduce_scatter_wide, o.all_to_all, o.permute_ranks, o.own_part,
    o.spread, o.only_first,
)  # fmt: skip


def plain_sums(program: Program, name: str) -> Program:
    """Sums that travel from one layout to another in each microbatch, and back: what is added travels alone.

    s = only_first(total); t = add(s, d); total' = all_reduce(t)    =>    e = all_reduce(d); total' = add(total, e)

    Such moves are all that lowering puts between a carry and what is added to it, and they end where they began."""
    flow = StepFlow(program, name)
    block, body = flow.block, flow.body
    uses = chains(block)
    replaced: dict[int, list[Eqn]] = {}
    outputs = list(block.outputs)
    names = Builder()
    names.reserve(v.name for v in (*block.inputs, *(v for e in block.eqns for v in e.outputs)))

    def only_reader(v: Var) -> int | None:
        return uses[v].uses[0] if len(uses[v].uses) == 1 and not uses[v].is_output else None

    for j, carry in enumerate(body.carried):
        new, path, at = block.outputs[j], list[int](), only_reader(carry)
        while at is not None and block.eqns[at].op in (*MOVES, o.add):
            path.append(at)
            result = block.eqns[at].outputs[0]
            if result == new:
                break
            at = only_reader(result)
        adds = [i for i in path if block.eqns[i].op is o.add]
        if j in flow.sums or len(adds) != 1 or not path or block.eqns[path[-1]].outputs[0] != new:
            continue
        behind = path[path.index(adds[0]) + 1 :]
        moved = {carry, *(v for i in path for v in block.eqns[i].outputs)}
        addend = next(x for x in block.eqns[adds[0]].inputs if x not in moved)
        builder = Builder(beside=names)
        builder.at(block.eqns[adds[0]])
        with builder:
            for i in behind:
                addend = block.eqns[i].op(addend, **block.eqns[i].params)
            outputs[j] = o.add(carry, addend)
        replaced |= {i: [] for i in path} | {adds[0]: builder.eqns}
    eqns = [e for i, old in enumerate(block.eqns) for e in replaced.get(i, [old])]
    changed = Block(block.inputs, tuple(eqns), tuple(outputs))
    return check(replace(program, blocks={**program.blocks, name: changed}))


def apart(stages: StageMap) -> StageMap:
    """The gradient of what several stages use: each sums up its own over the microbatches, and these are added once.

    d = add(a, b); total' = add(total, d)    =>    t0' = add(t0, a); t1' = add(t1, b)      with a, b of stages 0 and 1
                                                   total = add(t0, t1) behind the scan
    """
    flow = stages.flow
    program, body, block = flow.program, flow.body, flow.block
    names = Builder()
    names.reserve(v.name for v in (*block.inputs, *(v for e in block.eqns for v in e.outputs)))
    whole = Builder()
    whole.reserve(v.name for v in (*program.inputs, *(v for e in program.main.eqns for v in e.outputs)))
    replaced: dict[int, list[Eqn]] = {}
    carries: list[Var] = []
    news: list[Atom] = []
    starts: list[Atom] = []
    added: dict[Var, list[Var]] = {}  # results of the scan -> more results to add to them
    first = dict[int, Atom]()
    for summed in flow.sums.values():
        shares = _shares(stages, summed)
        if len(shares) < 2:
            continue
        carry, eqn = body.carried[summed.carry], block.eqns[summed.eqn]
        builder = Builder(beside=names)
        builder.at(eqn)
        more = []
        with builder:
            for k, share in enumerate(shares):
                total = share[0]
                for x in share[1:]:
                    total = o.add(total, x)
                if total.dtype != carry.dtype:
                    total = o.cast(total, dtype=carry.dtype)
                own = carry if k == 0 else Var(names.name(carry.name), carry.type)
                new = o.add(own, total)
                if k == 0:
                    first[summed.carry] = new
                    continue
                carries.append(own)
                news.append(new)
                starts.append(body.eqn.inputs[body.consts + summed.carry])
                more.append(Var(whole.name(body.eqn.outputs[summed.carry].name), carry.type))
        replaced[summed.eqn] = builder.eqns
        added[body.eqn.outputs[summed.carry]] = more
    if not replaced:
        return stages
    n, m = body.consts, body.carry
    outputs = [first.get(i, x) for i, x in enumerate(block.outputs)]
    eqns = [e for i, old in enumerate(block.eqns) for e in replaced.get(i, [old])]
    inputs = (*block.inputs[: n + m], *carries, *block.inputs[n + m :])
    part = Block(inputs, tuple(eqns), (*outputs[:m], *news, *outputs[m:]))
    operands = (*body.eqn.inputs[: n + m], *starts, *body.eqn.inputs[n + m :])
    params = Params({**body.eqn.params, "carry": m + len(carries)})
    totals: dict[Var, Atom] = {}
    behind = Builder(beside=whole)
    outs = list(body.eqn.outputs)
    with behind:
        for old, more in added.items():
            own = Var(whole.name(old.name), old.type)
            outs[outs.index(old)] = own
            whole_sum: Var = own
            for x in more:
                whole_sum = o.add(whole_sum, x)
            totals[old] = whole_sum
    results = tuple(v for more in added.values() for v in more)
    again = replace(body.eqn, inputs=operands, params=params, outputs=(*outs[:m], *results, *outs[m:]))
    main = program.main
    after = [substitute(e, totals) for e in main.eqns[body.at + 1 :]]
    sums = [replace(e, phase="backward") for e in behind.eqns]
    entry = Block(
        main.inputs,
        (*main.eqns[: body.at], again, *sums, *after),
        tuple(totals.get(x, x) if isinstance(x, Var) else x for x in main.outputs),
    )
    starts_at = [block.eqns[i].outputs[0].name for i in _starts(stages)]
    changed = dce(replace(program, blocks={**program.blocks, body.name: part, program.entry: entry}))
    return cut_at(check(changed), body.name, starts_at)


def _starts(stages: StageMap) -> list[int]:
    units = stages.flow.units
    return [i for k, i in enumerate(units) if k and stages.eqns[i] != stages.eqns[units[k - 1]]]


def _shares(stages: StageMap, summed: CarrySum) -> list[list[Var]]:
    """What is added to a sum, stage by stage; the last stage first, which made its own first."""
    flow, readers = stages.flow, stages.flow.readers
    by_stage: dict[int, list[Var]] = {}
    open_ = [summed.addend]
    while open_:
        x = open_.pop(0)
        at = flow.makers.get(x)
        if at is not None and readers[x] == 1 and flow.block.eqns[at].op in (o.add, o.cast):
            eqn = flow.block.eqns[at]
            inner = list(eqn.vars)
            widens = eqn.op is o.cast and _is_sum(flow, inner, readers)
            same = eqn.op is o.add and len(inner) == 2 and all(v.shape == x.shape for v in inner)
            if widens or same:
                open_ = [*inner, *open_]
                continue
        by_stage.setdefault(stages.of.get(x, stages.stages - 1), []).append(x)
    return [by_stage[s] for s in sorted(by_stage, reverse=True)]


def _is_sum(flow: StepFlow, values: Sequence[Var], readers: Mapping[Var, int]) -> bool:
    at = flow.makers.get(values[0]) if values else None
    return at is not None and flow.block.eqns[at].op is o.add and readers[values[0]] == 1


# -- steps of stages as blocks


@dataclass(frozen=True)
class StagePart:
    """A step of a stage: its block, and the values of the body that it takes and gives."""

    name: str
    block: Block
    takes: tuple[Var, ...]
    gives: tuple[Var, ...]


@dataclass(frozen=True)
class StageMessage:
    """Values that a step of one stage makes and a step of another reads, of the same microbatch."""

    source: tuple[str, int]
    target: tuple[str, int]
    values: tuple[Var, ...]


class _StageParts:
    """The steps of all stages."""

    def __init__(self, stages: StageMap, splits: bool) -> None:
        self.stages, self.flow = stages, stages.flow
        self.block, self.body = self.flow.block, self.flow.body
        self.splitter = CallSplitter(dict(self.flow.program.blocks), self.block)
        self.of = dict(stages.of)
        self.eqns: dict[tuple[str, int], list[tuple[int, Eqn]]] = {}
        self.summed = {s.carry: s for s in self.flow.sums.values()}
        for s in range(stages.stages):
            self._stage(s, splits)
        self._free()
        self.made = {(s, v): kind for (kind, s), eqns in self.eqns.items() for _, e in eqns for v in e.outputs}
        self.messages = self._messages()
        self.parts = {key: self._part(*key) for key in self.eqns if self.eqns[key]}

    def _stage(self, s: int, splits: bool) -> None:
        """Staged equations, by the step they belong to."""
        own = [(i, self.block.eqns[i]) for i, stage in sorted(self.stages.eqns.items()) if stage == s]
        late = [(i, e) for i, e in own if i in self.flow.backward]
        self.eqns[FORWARD, s] = [(i, e) for i, e in own if i not in self.flow.backward]
        made_late = {v for _, e in late for v in e.outputs}
        sent = {v for i, t in self.stages.eqns.items() if t != s for v in self.block.eqns[i].vars if v in made_late}
        if not splits or not sent:  # nobody waits for a part of it
            self.eqns[BACKWARD, s], self.eqns[WEIGHT, s] = late, []
            return
        self.eqns[BACKWARD, s], self.eqns[WEIGHT, s] = self.splitter.split(late, sent)
        for _, e in (*self.eqns[BACKWARD, s], *self.eqns[WEIGHT, s]):
            self.of.update(dict.fromkeys(e.outputs, s))

    def wanted(self, kind: str, s: int) -> list[Var]:
        """Values that a step has to give to what is carried on, or to rows of results; of what is free, the forward of
        the last stage."""
        ends = [x for j, x in enumerate(self.block.outputs) if j not in self.summed and not self._is_turned(j)]
        ends += [c.addend for c in self.summed.values()]
        staged = [x for x in ends if isinstance(x, Var) and x in self.of]
        free = [x for x in ends if isinstance(x, Var) and x not in self.of and x in self.flow.makers]
        mine = [x for x in staged if self.of[x] == s and any(x in e.outputs for _, e in self.eqns[kind, s])]
        return [*mine, *(free if (kind, s) == (FORWARD, self.stages.stages - 1) else [])]

    def _is_turned(self, j: int) -> bool:
        """Is it a carry that every rank makes for itself?"""
        return j < self.body.carry and self.body.carried[j] in self.turned

    @cached_property
    def turned(self) -> tuple[Var, ...]:
        """Carries that depend on nothing staged: the key."""
        return tuple(
            v
            for j, v in enumerate(self.body.carried)
            if j not in self.summed
            and isinstance(self.block.outputs[j], Var)
            and self.block.outputs[j] not in self.of
            and self.flow.flags[v] != STAGED
        )

    def _free(self) -> None:
        """Free equations, to each step that is the first of its stage to ask for them."""
        effects = [i for i, e in enumerate(self.block.eqns) if e.op.effect and i not in self.stages.eqns]
        for s in range(self.stages.stages):
            there: set[int] = set()
            for kind in KINDS:
                eqns = self.eqns[kind, s]
                open_ = [v for _, e in eqns for v in e.vars] + self.wanted(kind, s)
                open_ += [v for i in effects for v in self.block.eqns[i].outputs] if (kind, s) == (FORWARD, 0) else []
                free: set[int] = set()
                while open_:
                    at = self.flow.makers.get(open_.pop())
                    if at is None or at in there or at in self.stages.eqns or at in self.flow.summing:
                        continue
                    there.add(at)
                    free.add(at)
                    open_ += self.block.eqns[at].vars
                self.eqns[kind, s] = sorted([*eqns, *((i, self.block.eqns[i]) for i in free)], key=lambda pair: pair[0])

    def _messages(self) -> list[StageMessage]:
        between: dict[tuple[tuple[str, int], tuple[str, int]], list[Var]] = {}
        for s in range(self.stages.stages):
            seen: set[Var] = set()
            for kind in KINDS:
                for _, eqn in self.eqns[kind, s]:
                    for v in eqn.vars:
                        home = self.of.get(v)
                        if home is None or home == s or v in seen:
                            continue
                        seen.add(v)
                        source = (self.made[home, v], home)
                        between.setdefault((source, (kind, s)), []).append(v)
        return [StageMessage(source, target, tuple(values)) for (source, target), values in between.items()]

    def _part(self, kind: str, s: int) -> StagePart:
        eqns = tuple(e for _, e in self.eqns[kind, s])
        made = dict.fromkeys(v for e in eqns for v in e.outputs)
        later = KINDS[KINDS.index(kind) + 1 :]
        read = {v for k in later for _, e in self.eqns[k, s] for v in e.vars}
        read |= {v for m in self.messages if m.source == (kind, s) for v in m.values}
        read |= set(self.wanted(kind, s))
        takes = tuple(dict.fromkeys(v for e in eqns for v in e.vars if v not in made))
        gives = tuple(v for v in made if v in read)
        return StagePart(step_name(kind, s), Block(takes, eqns, gives), takes, gives)


# -- the loop over microbatches, in the order of a schedule


@dataclass(frozen=True)
class TaggedMessage:
    """A message of one microbatch, between two ranks; `tag` is one for each of its tensors, from this number on."""

    source: StageStep
    target: StageStep
    values: tuple[Var, ...]
    tag: int


@dataclass
class _Loop:
    """Who sends what to whom, and when it is known to have come."""

    parts: _StageParts
    schedule: PipelineSchedule
    sent: dict[StageStep, list[TaggedMessage]] = field(default_factory=dict)
    received: dict[StageStep, list[TaggedMessage]] = field(default_factory=dict)
    passed: dict[StageStep, list[TaggedMessage]] = field(default_factory=dict)  # between stages of one rank
    settled: dict[StageStep, list[TaggedMessage]] = field(default_factory=dict)  # known to have come before a step
    tags: int = 0

    def __post_init__(self) -> None:
        place = self.schedule.place
        for m in range(self.schedule.microbatches):
            for message in self.parts.messages:
                ends = [StageStep(kind, s, m) for kind, s in (message.source, message.target)]
                one = TaggedMessage(ends[0], ends[1], message.values, self.tags)
                if place[ends[0].stage] == place[ends[1].stage]:
                    self.passed.setdefault(ends[0], []).append(one)
                    continue
                self.tags += len(message.values)
                self.sent.setdefault(ends[0], []).append(one)
                self.received.setdefault(ends[1], []).append(one)
        self._settle()

    def _settle(self) -> None:
        """The first step of a sender that waits, in the end, for the step that a message was for."""
        known: dict[StageStep, list[int]] = {}  # before a step: of each rank, the last step that is behind it
        last: dict[int, StageStep] = {}
        open_: dict[int, list[TaggedMessage]] = {}
        position = self.schedule.position
        for rank, step in self.schedule.in_time():
            now = [-1] * self.schedule.ranks
            for before in (*self.schedule.awaited(step), *([last[rank]] if rank in last else [])):
                r, i = position[before]
                now = [max(a, b) for a, b in zip(now, known[before], strict=True)]
                now[r] = max(now[r], i)
            known[step], last[rank] = now, step
            waiting = open_.setdefault(rank, [])
            done = [x for x in waiting if now[position[x.target][0]] >= position[x.target][1]]
            self.settled[step] = done
            open_[rank] = [x for x in waiting if x not in done] + self.sent.get(step, [])

    def unsettled(self, rank: int) -> list[TaggedMessage]:
        """Messages of a rank that are waited for at the end."""
        settled = {x.tag for step in self.schedule.orders[rank] for x in self.settled.get(step, ())}
        return [x for step in self.schedule.orders[rank] for x in self.sent.get(step, ()) if x.tag not in settled]


@dataclass
class _Slice:
    """What a rank keeps of the entry: equations by index, of an optimiser's those parameters; inputs; results of the
    scan that it asks for."""

    eqns: set[int] = field(default_factory=set)
    groups: dict[int, list[int]] = field(default_factory=dict)
    inputs: set[Var] = field(default_factory=set)
    scanned: set[int] = field(default_factory=set)


class _Entry:
    """The entry of the step as all ranks see it: who owns what, who makes what."""

    def __init__(self, loop: _Loop) -> None:
        self.loop, self.parts, self.schedule = loop, loop.parts, loop.schedule
        self.program, self.body = self.parts.flow.program, self.parts.body
        self.main, self.by_role = self.program.main, self.program.by_role()
        self.homes = self._homes()
        self.taken = [self._taken(r) for r in range(self.schedule.ranks)]
        self.reads = [self._slice(r, list(taken), norm=False).inputs for r, taken in enumerate(self.taken)]
        self.norm_of = self._made_by()
        self.slices = [self._slice(r, [*self.taken[r], *self.wanted(r)]) for r in range(self.schedule.ranks)]

    def _homes(self) -> list[int]:
        """The rank that has each result of the scan; -1: every rank that asks for it."""
        stages, place = self.parts.stages, self.schedule.place
        homes = []
        for j, x in enumerate(self.parts.block.outputs):
            if j in self.parts.summed:
                homes.append(place[stages.home(self.parts.summed[j])])
            elif self.parts._is_turned(j):
                homes.append(-1)
            else:
                homes.append(place[self.parts.of.get(x, stages.stages - 1)] if isinstance(x, Var) else -1)
        return homes

    def _taken(self, rank: int) -> set[Var]:
        """Values of the entry that the steps of a rank read."""
        outer = self.body.outer
        inside = {
            v
            for (_, s), part in self.parts.parts.items()
            if self.schedule.place[s] == rank
            for v in part.takes
            if v in outer
        }
        inside |= {self.body.carried[j] for j, home in enumerate(self.homes[: self.body.carry]) if home == rank}
        if inside & set(self.parts.turned):
            inside |= {v for v in self.turn_takes if v in outer}
        return {x for v in inside if isinstance(x := outer[v], Var)}

    @cached_property
    def turn(self) -> Block:
        """From one microbatch to the next: what every rank carries on by itself."""
        turned, block = self.parts.turned, self.parts.block
        outs = [block.outputs[self.body.carried.index(v)] for v in turned]
        need, eqns = {x for x in outs if isinstance(x, Var)}, []
        for eqn in reversed(block.eqns):
            if any(v in need for v in eqn.outputs):
                eqns.append(replace(eqn, phase="forward"))
                need.update(eqn.vars)
        made = {v for e in eqns for v in e.outputs}
        inputs = dict.fromkeys([*turned, *(v for e in reversed(eqns) for v in e.vars if v not in made)])
        return Block(tuple(inputs), tuple(reversed(eqns)), tuple(outs))

    @property
    def turn_takes(self) -> tuple[Var, ...]:
        return self.turn.inputs

    def owners(self, v: Var) -> tuple[int, ...]:
        """The ranks that hold an input which a step changes: those that read it, all of a counter."""
        role = self.program.role(v)
        everyone = tuple(range(self.schedule.ranks))
        if role.kind == "counter":
            return everyone
        if role.of and role.kind != "hyper":
            v = self.by_role.get(Role("parameter", role.of), v)
        return tuple(r for r in everyone if v in self.reads[r]) or (0,)

    def wanted(self, rank: int) -> list[Var]:
        """What the program of a rank returns."""
        return [x for x in (*self.program.results, *self.updates(rank).values()) if isinstance(x, Var)]

    def updates(self, rank: int) -> dict[str, Atom]:
        """New values of the inputs that a rank owns."""
        return {name: new for name, (new, owners) in self._updates.items() if rank in owners}

    @cached_property
    def _updates(self) -> dict[str, tuple[Atom, tuple[int, ...]]]:
        """Of inputs that a step changes: their new values, and who owns them."""
        by_name = {v.name: v for v in self.program.inputs}
        n = len(self.program.updates)
        news = zip(self.program.updates, self.main.outputs[len(self.main.outputs) - n :], strict=True) if n else ()
        return {name: (new, self.owners(by_name[name])) for name, new in news}

    def _made_by(self) -> dict[Var, int]:
        """Of what a global norm is taken of: the rank that counts it."""
        reached: dict[Var, set[int]] = {
            v: {self.homes[j]} for j, v in enumerate(self.body.eqn.outputs) if self.homes[j] >= 0
        }
        for eqn in self.main.eqns[self.body.at + 1 :]:
            ranks = set().union(*(reached.get(v, set()) for v in eqn.vars))
            if is_group_update(eqn.op) or eqn.op is o.global_norm:
                ranks = set()
            reached.update(dict.fromkeys(eqn.outputs, ranks))
        return {v: min(ranks, default=0) for v, ranks in reached.items()}

    def _slice(self, rank: int, wanted: Iterable[Var], norm: bool = True) -> _Slice:
        """What of the entry makes these values."""
        kept, need = _Slice(), set(wanted)
        for i in range(len(self.main.eqns) - 1, -1, -1):
            eqn = self.main.eqns[i]
            if i == self.body.at:
                kept.scanned = {j for j, v in enumerate(eqn.outputs) if v in need}
                if norm and any(self.homes[j] < 0 for j in kept.scanned):
                    need |= {x for v in self.turn_takes if isinstance(x := self.body.outer.get(v), Var)}
                continue
            if not any(v in need for v in eqn.outputs) and not (eqn.op.effect and rank == 0 and norm):
                continue
            kept.eqns.add(i)
            if norm and eqn.op is o.global_norm:
                need |= {v for v in eqn.vars if self.norm_of.get(v, 0) == rank}
            elif is_group_update(eqn.op):
                kept.groups[i] = [k for k in range(eqn.params["count"]) if _column(eqn, k) & need]
                need |= {x for x in _of_group(eqn, kept.groups[i])[0] if isinstance(x, Var)}
            else:
                need |= set(eqn.vars)
        changed = self.updates(rank) if norm else {}
        kept.inputs = {v for v in self.main.inputs if v in need or v.name in changed}
        return kept


def _column(eqn: Eqn, k: int) -> set[Var]:
    """What an optimiser makes of its k-th parameter."""
    return set(eqn.outputs[k :: eqn.params["count"]])


def _of_group(eqn: Eqn, chosen: Sequence[int]) -> tuple[list[Atom], list[Var]]:
    """The operands and results of an optimiser's equation that belong to some of its parameters."""
    count = eqn.params["count"]
    columns = len(eqn.outputs) // count + 1  # parameter and state; and the gradient
    operands = [eqn.inputs[c * count + k] for c in range(columns) for k in chosen]
    results = [eqn.outputs[c * count + k] for c in range(columns - 1) for k in chosen]
    return [*operands, *eqn.inputs[columns * count :]], results


class _RankWriter:
    """Writes the program of one rank."""

    def __init__(self, entry: _Entry, rank: int, axis: str) -> None:
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
        self.tokens: dict[int, Var] = {}
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

    def equation(self, i: int, kept: _Slice) -> None:
        """An equation of the entry: as it is, for this rank's parameters, or as a sum over ranks."""
        eqn = self.main.eqns[i]
        self.b.at(eqn)
        if eqn.op is o.global_norm and i > self.body.at:
            self.norm(eqn)
            return
        operands, results, params = eqn.inputs, eqn.outputs, eqn.params
        if i in kept.groups:
            some, own = _of_group(eqn, kept.groups[i])
            operands, results = tuple(some), tuple(own)
            params = Params({**params, "count": len(kept.groups[i])})
        outs = tuple(Var(self.b.name(v.name), v.type) for v in results)
        self.b.eqns.append(replace(eqn, inputs=tuple(map(self.value, operands)), params=params, outputs=outs))
        self.values.update(zip(results, outs, strict=True))

    def norm(self, eqn: Eqn) -> None:
        """Of all gradients: each rank the squares of those that it counts."""
        own = [self.value(v) for v in eqn.vars if self.entry.norm_of.get(v, 0) == self.rank]
        dtype = eqn.outputs[0].dtype
        with self.b:
            squares = o.square(o.global_norm(*own)) if own else o.full(0.0, shape=(), dtype=dtype)
            squares = squares if squares.dtype == dtype else o.cast(squares, dtype=dtype)
            total = o.all_reduce(squares, axes=self.axes, count=self.schedule.ranks)
            self.values[eqn.outputs[0]] = o.sqrt(total)

    def exchange(self, kept: _Slice) -> None:
        """Results of the loop, to all who ask for them and do not have them."""
        outputs, tag = self.body.eqn.outputs, self.loop.tags
        for j in kept.scanned:
            if self.entry.homes[j] in (-1, self.rank):
                self.values[outputs[j]] = self.result(j)
        sent: list[tuple[Var, Atom, dict[str, object]]] = []
        for j, home in enumerate(self.entry.homes):
            for r, other in enumerate(self.entry.slices):
                if home in (-1, r) or j not in other.scanned:
                    continue
                how: dict[str, object] = {"axes": self.axes, "count": self.schedule.ranks}
                if self.rank == home:
                    how |= {"to": r, "tag": tag}
                    self.b.phase = "update"  # what comes is read by any phase, what goes is made by any
                    x = self.result(j)
                    sent.append((self.emit(o.begin_send, (x,), how), x, how))
                elif self.rank == r:
                    v, self.b.phase = outputs[j], "forward"
                    how |= {"source": home, "tag": tag, "shapes": (v.shape,), "dtypes": (v.dtype,)}
                    token = self.emit(o.begin_receive, (), how)
                    self.values[v] = self.emit(o.finish_receive, (token,), how)
                tag += 1
        self.b.phase = "update"
        for token, x, how in sent:
            self.emit(o.finish_send, (token, x), how)

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
        with self.b:
            rows = [o.reshape(x, shape=(1, *v.shape[1:])) for x in self.rows[j]]
            self.pieces[j, v] = o.cat(*rows, dim=0)
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
        """Be ready for what a step receives."""
        for message in self.loop.received.get(step, ()):
            self.at(step, message.values[0])
            self.tokens[message.tag] = self.emit(o.begin_receive, (), self.incoming(message))

    def incoming(self, message: TaggedMessage) -> dict[str, object]:
        shapes, dtypes = tuple(v.shape for v in message.values), tuple(v.dtype for v in message.values)
        source = self.schedule.place[message.source.stage]
        how: dict[str, object] = {"axes": self.axes, "count": self.schedule.ranks, "source": source}
        return how | {"tag": message.tag, "shapes": shapes, "dtypes": dtypes}

    def outgoing(self, message: TaggedMessage) -> dict[str, object]:
        to = self.schedule.place[message.target.stage]
        return {"axes": self.axes, "count": self.schedule.ranks, "to": to, "tag": message.tag}

    def at(self, step: StageStep, v: Var | None = None) -> None:
        """The next equations are of a step, and speak of a value: they are told by these if nobody answers."""
        maker = self.parts.flow.makers.get(v) if v is not None else None
        line = f", {self.parts.block.eqns[maker].source}" if maker is not None else ""
        self.b.source = f"{step.words}{line}"
        self.b.phase = "forward" if step.kind == FORWARD else "backward"

    def give_back(self, message: TaggedMessage) -> None:
        values = [self.inside[message.source.stage, message.source.microbatch, v] for v in message.values]
        self.emit(o.finish_send, (self.tokens[message.tag], *values), self.outgoing(message))

    def step(self, step: StageStep) -> None:
        s, m = step.stage, step.microbatch
        for message in self.loop.received.get(step, ()):
            self.at(step, message.values[0])
            token = self.tokens[message.tag]
            outs = self.b.emit(o.finish_receive, (token,), self.incoming(message))
            outs = outs if isinstance(outs, tuple) else (outs,)
            self.inside.update({(s, m, v): x for v, x in zip(message.values, outs, strict=True)})
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
            values = tuple(self.inside[s, m, v] for v in message.values)
            self.tokens[message.tag] = self.emit(o.begin_send, values, self.outgoing(message))

    def operand(self, s: int, m: int, v: Var) -> Atom:
        return self.given(v, m) if v in self.body.outer else self.inside[s, m, v]

    def carry_on(self, step: StageStep, part: StagePart) -> None:
        """Add to sums, replace state, put rows aside."""
        s, m = step.stage, step.microbatch
        for j, x in enumerate(self.parts.block.outputs):
            new = self.parts.summed[j].addend if j in self.parts.summed else x
            if not isinstance(new, Var) or new not in part.gives or self.entry.homes[j] != self.rank:
                continue
            value = self.inside[s, m, new]
            if j in self.parts.summed:
                with self.b:
                    self.totals[j] = o.add(self.totals[j], value)
            elif j < self.body.carry:
                self.totals[j] = value
            else:
                self.rows.setdefault(j, []).append(value)
