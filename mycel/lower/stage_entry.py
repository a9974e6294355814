"""What the ranks of a pipeline share out: messages of the loop over microbatches, and the entry around it.

PipelineLoop    who sends what to whom, and when it is known to have come
PipelineEntry   who owns which inputs, who makes which results, and what of the entry each rank keeps for its own
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mycel.ir import Atom, Block, Eqn, Role, Var, leading_to
from mycel.lower.stage_blocks import StageParts
from mycel.ops.gradient_norm import OVER_STAGES
from mycel.ops.optimisers import is_group_update
from mycel.plan.schedule import PipelineSchedule, StageStep


@dataclass(frozen=True)
class TaggedMessage:
    """A message of one microbatch, between two ranks; `tag` is one for each of its tensors, from this number on."""

    source: StageStep
    target: StageStep
    values: tuple[Var, ...]
    tag: int


@dataclass
class PipelineLoop:
    """Who sends what to whom, and when it is known to have come."""

    parts: StageParts
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

    def in_order(self, source: int, target: int) -> list[TaggedMessage]:
        """Messages from one rank to another, as they are sent."""
        place = self.schedule.place
        sent = (x for step in self.schedule.orders[source] for x in self.sent.get(step, ()))
        return [x for x in sent if place[x.target.stage] == target]

    def unsettled(self, rank: int) -> list[TaggedMessage]:
        """Messages of a rank that are waited for at the end."""
        settled = {x.tag for step in self.schedule.orders[rank] for x in self.settled.get(step, ())}
        return [x for step in self.schedule.orders[rank] for x in self.sent.get(step, ()) if x.tag not in settled]


@dataclass
class EntrySlice:
    """What a rank keeps of the entry: equations by index, of an optimiser's those parameters; inputs; results of the
    scan that it asks for."""

    eqns: set[int] = field(default_factory=set)
    groups: dict[int, list[int]] = field(default_factory=dict)
    inputs: set[Var] = field(default_factory=set)
    scanned: set[int] = field(default_factory=set)


class PipelineEntry:
    """The entry of the step as all ranks see it: who owns what, who makes what."""

    def __init__(self, loop: PipelineLoop) -> None:
        self.loop, self.parts, self.schedule = loop, loop.parts, loop.schedule
        self.program, self.body = self.parts.flow.program, self.parts.body
        self.main, self.by_role = self.program.main, self.program.by_role()
        self.used = {v for e in self.main.eqns for v in e.vars}
        self.homes = self._homes()
        self.read = [self._read(r) for r in range(self.schedule.ranks)]
        self.reads = [self._slice(r, list(indices), norm=False).inputs for r, indices in enumerate(self.read)]
        self.norm_of = self._made_by()
        self.slices = [self._slice(r, [*self.read[r], *self.wanted(r)]) for r in range(self.schedule.ranks)]

    def _homes(self) -> list[int]:
        """The rank that has each result of the scan; -1: every rank that asks for it."""
        stages, place = self.parts.stages, self.schedule.place
        homes = []
        for j, x in enumerate(self.parts.block.outputs):
            if j in self.parts.summed:
                homes.append(place[stages.home(self.parts.summed[j])])
            elif self.parts.is_turned(j):
                homes.append(-1)
            else:
                homes.append(place[self.parts.of.get(x, stages.stages - 1)] if isinstance(x, Var) else -1)
        return homes

    def _read(self, rank: int) -> set[Var]:
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
        eqns = [replace(block.eqns[i], phase="forward") for i in leading_to(block.eqns, outs)]
        defined = {v for e in eqns for v in e.outputs}
        inputs = dict.fromkeys([*turned, *(v for e in eqns for v in e.vars if v not in defined)])
        return Block(tuple(inputs), tuple(eqns), tuple(outs))

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
        """Of what comes of the loop, or of the step before: the rank that has it, the first of several.  Of gradients,
        it counts them in the global norm."""
        reached: dict[Var, set[int]] = {
            v: {self.homes[j]} for j, v in enumerate(self.body.eqn.outputs) if self.homes[j] >= 0
        }
        reached |= {v: set(self.owners(v)) for v in self.program.inputs_of("delayed")}  # gradients of the step before
        for eqn in self.main.eqns[self.body.at + 1 :]:
            ranks = set().union(*(reached.get(v, set()) for v in eqn.vars))
            if is_group_update(eqn.op) or eqn.op in OVER_STAGES:
                ranks = set()
            reached.update(dict.fromkeys(eqn.outputs, ranks))
        return {v: min(ranks) for v, ranks in reached.items() if ranks}

    def _acts_on(self, eqn: Eqn) -> int:
        """The rank on which an equation is run for what it does: that of what it reads."""
        return min((self.norm_of[v] for v in eqn.vars if v in self.norm_of), default=0)

    def _slice(self, rank: int, wanted: Iterable[Var], norm: bool = True) -> EntrySlice:
        """What of the entry makes these values."""
        kept, need = EntrySlice(), set(wanted)
        for i in range(len(self.main.eqns) - 1, -1, -1):
            eqn = self.main.eqns[i]
            if i == self.body.at:
                kept.scanned = {j for j, v in enumerate(eqn.outputs) if v in need}
                if norm and any(self.homes[j] < 0 for j in kept.scanned):
                    need |= {x for v in self.turn_takes if isinstance(x := self.body.outer.get(v), Var)}
                continue
            acts = norm and eqn.op.effect and self._acts_on(eqn) == rank and not self.used.intersection(eqn.outputs)
            if not any(v in need for v in eqn.outputs) and not acts:
                continue
            kept.eqns.add(i)
            if norm and eqn.op in OVER_STAGES:
                need |= {v for v in eqn.vars if self.norm_of.get(v, 0) == rank}
            elif is_group_update(eqn.op):
                kept.groups[i] = [k for k in range(eqn.params["count"]) if _column(eqn, k) & need]
                need |= {x for x in of_group(eqn, kept.groups[i])[0] if isinstance(x, Var)}
            else:
                need |= set(eqn.vars)
        changed = self.updates(rank) if norm else {}
        kept.inputs = {v for v in self.main.inputs if v in need or v.name in changed}
        return kept


def _column(eqn: Eqn, k: int) -> set[Var]:
    """What an optimiser makes of its k-th parameter."""
    return set(eqn.outputs[k :: eqn.params["count"]])


def of_group(eqn: Eqn, chosen: Sequence[int]) -> tuple[list[Atom], list[Var]]:
    """The operands and results of an optimiser's equation that belong to some of its parameters."""
    count = eqn.params["count"]
    columns = len(eqn.outputs) // count + 1  # parameter and state; and the gradient
    operands = [eqn.inputs[c * count + k] for c in range(columns) for k in chosen]
    results = [eqn.outputs[c * count + k] for c in range(columns - 1) for k in chosen]
    return [*operands, *eqn.inputs[columns * count :]], results
