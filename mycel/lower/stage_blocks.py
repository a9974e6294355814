"""Steps of the stages of a pipeline as blocks: forward, backward and, where a schedule has them apart, weights.

What a step reads that it does not make, it takes; what a later step of its stage, another stage, or the sums over the
microbatches read of it, it gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mycel.ir import Block, Eqn, Var
from mycel.lower.split_calls import CallSplitter
from mycel.plan.schedule import BACKWARD, FORWARD, KINDS, WEIGHT, step_name
from mycel.plan.stages import STAGED, StageMap


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


class StageParts:
    """The steps of all stages."""

    def __init__(self, stages: StageMap, splits: bool) -> None:
        self.stages, self.flow = stages, stages.flow
        self.block, self.body = self.flow.block, self.flow.body
        self.splitter = CallSplitter(dict(self.flow.program.blocks), self.block)
        self.of = dict(stages.of)
        self.eqns: dict[tuple[str, int], list[tuple[int, Eqn]]] = {}
        self.summed = {s.carry: s for s in self.flow.sums.values()}
        self._carried: dict[str, list[tuple[int, Var]]] = {}
        for s in range(stages.stages):
            self._stage(s, splits)
        self._free()
        self.kinds = {(s, v): kind for (kind, s), eqns in self.eqns.items() for _, e in eqns for v in e.outputs}
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
        ends = [x for j, x in enumerate(self.block.outputs) if j not in self.summed and not self.is_turned(j)]
        ends += [c.addend for c in self.summed.values()]
        staged = [x for x in ends if isinstance(x, Var) and x in self.of]
        free = [x for x in ends if isinstance(x, Var) and x not in self.of and x in self.flow.makers]
        mine = [x for x in staged if self.of[x] == s and any(x in e.outputs for _, e in self.eqns[kind, s])]
        return [*mine, *(free if (kind, s) == (FORWARD, self.stages.stages - 1) else [])]

    def is_turned(self, j: int) -> bool:
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
                        source = (self.kinds[home, v], home)
                        between.setdefault((source, (kind, s)), []).append(v)
        return [StageMessage(source, target, tuple(values)) for (source, target), values in between.items()]

    def carried_by(self, part: StagePart) -> list[tuple[int, Var]]:
        """What a step gives to sums, to carries and to rows of results: the output of the body, and its value or what
        is added to it."""
        if part.name not in self._carried:
            news = [(j, self.summed[j].addend if j in self.summed else x) for j, x in enumerate(self.block.outputs)]
            gives = set(part.gives)
            self._carried[part.name] = [(j, x) for j, x in news if isinstance(x, Var) and x in gives]
        return self._carried[part.name]

    def _part(self, kind: str, s: int) -> StagePart:
        eqns = tuple(e for _, e in self.eqns[kind, s])
        own_values = dict.fromkeys(v for e in eqns for v in e.outputs)
        later = KINDS[KINDS.index(kind) + 1 :]
        read = {v for k in later for _, e in self.eqns[k, s] for v in e.vars}
        read |= {v for m in self.messages if m.source == (kind, s) for v in m.values}
        read |= set(self.wanted(kind, s))
        takes = tuple(dict.fromkeys(v for e in eqns for v in e.vars if v not in own_values))
        gives = tuple(v for v in own_values if v in read)
        return StagePart(step_name(kind, s), Block(takes, eqns, gives), takes, gives)
