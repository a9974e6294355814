"""Which equation of a training step belongs to which stage of a pipeline, read off the program itself.

A step with microbatches is a scan whose body is forward and backward of one of them (`transform/microbatch.py`).  What
of the body depends on parameters *and* on the batch is *staged*; all else (masks, positions, weights cast to another
type) is *free*: cheap, and computed by every stage that asks for it.  Staged forward equations, in their order, are the
*units* of a pipeline.  A cut names the units at which stages begin; the rest follows:

    forward     stages one after the other in the order of the program: values cross upwards
    backward    the last stage that has what the equation reads of forward (made there, received there, or its
                parameters), and to which its cotangents come down: so the backward of a layer is where the layer is.
                What reads cotangents alone (the gradient of a bias) goes further down, to who needs it and has these
    sums        a carry of the scan that only adds up (loss, gradients) belongs to whoever makes what is added
    state       a carry that is read (a running mean) belongs to the one stage that reads it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from mycel.errors import PlanError
from mycel.ir import CONTROL, Atom, Block, Eqn, Program, Role, Var, chains, cond, loop, scan
from mycel.ops import o
from mycel.ops.gradient_norm import OVER_STAGES
from mycel.ops.optimisers import is_group_update
from mycel.plan.residuals import backward_part

PARAMETERS, DATA = 1, 2  # what a value depends on; both: it is staged
STAGED = PARAMETERS | DATA


@dataclass(frozen=True)
class StepBody:
    """The scan over microbatches: where it stands in the entry, its block, how many operands are the same for all and
    how many are carried on."""

    at: int
    eqn: Eqn
    name: str
    block: Block
    consts: int
    carry: int

    @staticmethod
    def of(program: Program, name: str) -> StepBody:
        for i, eqn in enumerate(program.main.eqns):
            if eqn.op is scan and eqn.params["body"] == name:
                p = eqn.params
                return StepBody(i, eqn, name, program.blocks[name], p.get("consts", 0), p.get("carry", 0))
        raise PlanError(
            "a pipeline of 1 microbatch has nothing to do at the same time: each stage waits for the others\n"
            "  try       microbatches: 2, or more: as many as there are stages, and again as many, keep them busy"
        )

    @property
    def length(self) -> int:
        return int(self.eqn.params["length"])

    @property
    def held(self) -> tuple[Var, ...]:
        return self.block.inputs[: self.consts]

    @property
    def carried(self) -> tuple[Var, ...]:
        return self.block.inputs[self.consts : self.consts + self.carry]

    @property
    def pieces(self) -> tuple[Var, ...]:
        return self.block.inputs[self.consts + self.carry :]

    @cached_property
    def outer(self) -> Mapping[Var, Atom]:
        """What the entry gives for each input; of pieces, all of them."""
        return dict(zip(self.block.inputs, self.eqn.inputs, strict=True))


@dataclass(frozen=True)
class CarrySum:
    """A carry that an equation of the body (by index) adds `addend` to, and nobody else reads."""

    carry: int
    eqn: int
    addend: Var


class StepFlow:
    """What depends on what in a step, before it is cut; `held`: inputs that, as parameters, not all ranks hold."""

    def __init__(self, program: Program, name: str, held: Collection[Role] = ()) -> None:
        self.program, self.body, self.held = program, StepBody.of(program, name), held
        self.block = self.body.block
        self.backward, self.ends = self._backward()
        self.makers = {v: i for i, e in enumerate(self.block.eqns) for v in e.outputs}
        self.sums = self._sums()
        self.flags = self._flags()

    def _backward(self) -> tuple[frozenset[int], tuple[int, ...]]:
        """Equations of the backward pass, by index, and those behind them that end a carry of forward (the sum of a
        loss over ranks, statistics of a norm that are put together): these are none, wherever they were written."""
        eqns, uses = self.block.eqns, chains(self.block)
        written = backward_part(self.block)
        late = {i for i, e in enumerate(eqns) if e in written}
        makers = {v: i for i, e in enumerate(eqns) for v in e.outputs}
        for i in range(len(eqns) - 1, -1, -1):
            ends = all(uses[v].is_output or uses[v].uses for v in eqns[i].outputs)
            read = {u for v in eqns[i].outputs for u in uses[v].uses}
            before = {makers[v] for v in eqns[i].vars if v in makers}
            if i in late and ends and not read & late and not before & late and before:
                late.discard(i)
        return frozenset(late), tuple(i for i, e in enumerate(eqns) if e in written and i not in late)

    def _sums(self) -> dict[int, CarrySum]:
        """By carry."""
        uses, sums = chains(self.block), {}
        for j, (carry, new) in enumerate(zip(self.body.carried, self.block.outputs, strict=False)):
            at = uses[carry].uses
            if len(at) != 1 or uses[carry].is_output or not isinstance(new, Var) or self.makers.get(new) != at[0]:
                continue
            eqn = self.block.eqns[at[0]]
            if eqn.op is o.add and eqn.inputs[0] == carry and not uses[new].uses and isinstance(eqn.inputs[1], Var):
                sums[j] = CarrySum(j, at[0], eqn.inputs[1])
        return sums

    def _flags(self) -> dict[Var, int]:
        """What each value of the body depends on."""
        outer, program = dict[Var, int](), self.program
        for v in program.inputs:
            role = program.role(v)
            kind = "parameter" if role in self.held else role.kind
            changes = kind in ("buffer", "variable") and v.name in program.updates
            outer[v] = PARAMETERS if kind == "parameter" else DATA if kind in ("batch", "key", "count") else 0
            outer[v] = STAGED if changes else outer[v]
        for eqn in program.main.eqns[: self.body.at]:
            outer.update(dict.fromkeys(eqn.outputs, _all(outer, eqn.vars)))
        flags = {v: _all(outer, [x] if isinstance(x, Var) else []) for v, x in self.body.outer.items()}
        for v in self.body.pieces:
            flags[v] |= DATA
        while True:
            for eqn in self.block.eqns:
                flags.update(dict.fromkeys(eqn.outputs, _all(flags, eqn.vars)))
            news = zip(self.body.carried, self.block.outputs, strict=False)
            late = [
                v
                for j, (v, new) in enumerate(news)
                if j not in self.sums and isinstance(new, Var) and flags[new] | flags[v] != flags[v]
            ]
            if not late:
                return flags
            for v in late:  # a carry depends on all that its last turn did
                flags[v] = STAGED

    @cached_property
    def summing(self) -> frozenset[int]:
        """Equations that add to a carry."""
        return frozenset(s.eqn for s in self.sums.values())

    @cached_property
    def staged(self) -> frozenset[int]:
        """Staged equations but those that add to a carry, by index."""
        eqns = enumerate(self.block.eqns)
        return frozenset(i for i, e in eqns if i not in self.summing and _all(self.flags, e.vars) == STAGED)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Staged forward equations, in their order."""
        return tuple(i for i in range(len(self.block.eqns)) if i in self.staged and i not in self.backward)

    @cached_property
    def readers(self) -> Mapping[Var, int]:
        """How often equations read a value."""
        return Counter(v for e in self.block.eqns for v in e.vars)

    @cached_property
    def state(self) -> dict[Var, set[int]]:
        """Carries that are read and changed: the equations that do."""
        readers: dict[Var, set[int]] = {}
        for j, (v, new) in enumerate(zip(self.body.carried, self.block.outputs, strict=False)):
            if j not in self.sums and isinstance(new, Var) and self.flags[v] == STAGED:
                ends = {self.makers[new]} if new in self.makers else set[int]()
                readers[v] = ends | {i for i in self.staged if v in self.behind(self.block.eqns[i])}
        return {v: used for v, used in readers.items() if used}

    @cached_property
    def trained(self) -> dict[int, Var]:
        """Carries that sum up a gradient -> the input of the body that is its parameter."""
        main, results = self.program.main, {v: j for j, v in enumerate(self.body.eqn.outputs[: self.body.carry])}
        makers = {v: e for e in main.eqns for v in e.outputs if e is not self.body.eqn}
        inside = {x: v for v, x in self.body.outer.items() if isinstance(x, Var)}
        parameter_of: dict[int, Var] = {}
        for eqn in main.eqns[self.body.at + 1 :]:
            if not is_group_update(eqn.op):
                continue
            count = eqn.params["count"]
            for k in range(count):
                at = [v for v in _sources(eqn.inputs[k], makers) if v in inside]
                gradients = _sources(eqn.inputs[len(eqn.outputs) + k], makers)
                parameter_of.update({results[v]: at[0] for v in gradients if v in results and at})
        return {j: inside[v] for j, v in parameter_of.items()}

    def behind(self, eqn: Eqn) -> set[Var]:
        """What an equation reads, free values opened: inputs of the body and staged values."""
        opened, open_ = set[Var](), list(eqn.vars)
        while open_:
            v = open_.pop()
            if v in opened:
                continue
            opened.add(v)
            maker = self.makers.get(v)
            if maker is not None and maker not in self.staged:
                open_ += self.block.eqns[maker].vars
        return {v for v in opened if v not in self.makers or self.makers[v] in self.staged}


def _sources(x: Atom, makers: Mapping[Var, Eqn]) -> set[Var]:
    """The values of the entry that one comes from, not by way of a sum over stages: inputs, and results of the scan."""
    open_, seen = [x] if isinstance(x, Var) else [], set[Var]()
    while open_:
        v = open_.pop()
        if v not in seen:
            seen.add(v)
            eqn = makers.get(v)
            open_ += eqn.vars if eqn is not None and eqn.op not in OVER_STAGES else ()
    return {v for v in seen if v not in makers}


def _all(flags: Mapping[Var, int], values: Iterable[Var]) -> int:
    union = 0
    for v in values:
        union |= flags.get(v, 0)
    return union


@dataclass(frozen=True)
class StageMap:
    """A step cut into stages: of staged equations (by index) and values the stage.  `have`: stages that have a staged
    forward value once forward is done; `users`: stages whose forward equations read an input of the body."""

    flow: StepFlow
    stages: int
    eqns: Mapping[int, int]
    of: Mapping[Var, int]
    have: Mapping[Var, frozenset[int]]
    users: Mapping[Var, frozenset[int]]

    def home(self, summed: CarrySum) -> int:
        """The stage a sum belongs to."""
        return self.of.get(summed.addend, self.stages - 1)

    @cached_property
    def begin(self) -> frozenset[int]:
        """The units (by index) that are the first of their stages."""
        first: dict[int, int] = {}
        for i in self.flow.units:
            first.setdefault(self.eqns[i], i)
        return frozenset(first.values())


def cut(flow: StepFlow, starts: Sequence[int]) -> StageMap:
    """The stages of a step; `starts`: the units (equations of the body, by index) at which the second and later stages
    begin."""
    units = {i: sum(i >= s for s in starts) for i in flow.units}
    for i in flow.ends:  # where what they end is made
        sources = [flow.makers[v] for v in flow.behind(flow.block.eqns[i]) if v in flow.makers]
        if i in units:
            units[i] = max((units[j] for j in sources if j in units), default=units[i])
    return assigned(flow, units, len(starts) + 1)


def assigned(flow: StepFlow, units: Mapping[int, int], stages: int) -> StageMap:
    """The stages of a step whose units (by index) belong to these; values cross from lower stages to higher ones."""
    block = flow.block
    eqns: dict[int, int] = {}
    of: dict[Var, int] = {}
    have: dict[Var, set[int]] = {}
    users: dict[Var, set[int]] = {}
    for i in flow.units:
        stage = eqns[i] = units[i]
        for v in flow.behind(block.eqns[i]):
            (have if v in of else users).setdefault(v, set()).add(stage)
        for v in block.eqns[i].outputs:
            of[v] = stage
            have[v] = {stage}
    for i, eqn in enumerate(block.eqns):
        if i not in flow.staged or i in eqns:
            continue
        eqns[i] = _backward_stage(flow, eqn, stages, of, have, users)
        of.update(dict.fromkeys(eqn.outputs, eqns[i]))
    _sink(flow, eqns, of, have, users)
    frozen = {v: frozenset(s) for v, s in have.items()}
    return StageMap(flow, stages, eqns, of, frozen, {v: frozenset(s) for v, s in users.items()})


def refuse_shared_state(stages: StageMap) -> None:
    """PlanError where what one microbatch leaves to the next is no matter of one stage's forward steps."""
    flow = stages.flow
    for v, used in flow.state.items():
        places = {stages.eqns.get(i) for i in used}
        if len(places) > 1 or used & flow.backward:
            first = {place: min(i for i in used if stages.eqns.get(i) == place) for place in places}
            lines = [f"stage {place}: {flow.block.eqns[i].source}" for place, i in first.items() if place is not None]
            which = " and ".join(str(place) for place in sorted(p for p in places if p is not None))
            where = f"stages {which} use it" if len(places) > 1 else f"the backward of stage {which} uses it"
            raise PlanError(
                f"{v.name} is changed by each microbatch, and {where}: what a microbatch leaves to the next is in the "
                f"forward of one stage\n  at        {', '.join(lines)}\n"
                "  try       a cut that leaves all modules that use it in one stage, or in one place"
            )


def _backward_stage(
    flow: StepFlow,
    eqn: Eqn,
    stages: int,
    of: Mapping[Var, int],
    have: Mapping[Var, set[int]],
    users: Mapping[Var, set[int]],
) -> int:
    """The last stage to which its cotangents come down, and that has what it reads of forward."""
    last, wanted = stages - 1, list[set[int]]()
    for v in flow.behind(eqn):
        if v not in of:  # an input of the body: a parameter is where forward used it
            if v in users and flow.flags[v] & PARAMETERS:
                wanted.append(users[v])
        elif v in have:
            wanted.append(have[v] | set(range(of[v] + 1)))  # made there, received there, or it comes down as others do
        else:
            last = min(last, of[v])
    both = (t for t in range(last, -1, -1) if all(t in stages_of for stages_of in wanted))
    return next(both, last)


def _sink(
    flow: StepFlow,
    eqns: dict[int, int],
    of: dict[Var, int],
    have: Mapping[Var, set[int]],
    users: Mapping[Var, set[int]],
) -> None:
    """Backward equations that only lower stages need, of values that these have anyway, go there."""
    block, uses = flow.block, chains(flow.block)
    readers: dict[Var, set[int]] = {}  # staged values -> stages whose equations read them
    for i, stage in eqns.items():
        for v in block.eqns[i].vars:
            if v in of:
                readers.setdefault(v, set()).add(stage)
    ends: dict[int, int] = {}
    for j, s in flow.sums.items():
        own = {of.get(s.addend, 0)}
        ends[s.eqn] = max(users.get(flow.trained[j], own) if j in flow.trained else own)
    for i in sorted(eqns, reverse=True):
        if i not in flow.backward:
            continue
        eqn, stage = block.eqns[i], eqns[i]
        asked = [eqns.get(u, ends.get(u)) for v in eqn.outputs for u in uses[v].uses]
        if not asked or None in asked or any(uses[v].is_output for v in eqn.outputs):
            continue
        lower = max(a for a in asked if a is not None)
        read = [v for v in eqn.vars if v in of]
        there = all(v not in have and (of[v] == lower or lower in readers[v]) for v in read)
        if lower < stage and there:
            eqns[i] = lower
            of.update(dict.fromkeys(eqn.outputs, lower))
            for v in read:
                readers[v].add(lower)


def refuse_unknown_stages(names: Sequence[str], parameters: Collection[str]) -> None:
    """PlanError for a stage that is to begin with a module of which there are no parameters."""
    for name in names:
        if not any(_is_in(p, name) for p in parameters):
            modules = list(dict.fromkeys(p.rpartition(".")[0] for p in parameters))
            near = get_close_matches(name, modules, 3) or modules[:4]
            raise PlanError(
                f"stages: {name}: the model has no parameter of it\n  try       names of modules, such as "
                f"{', '.join(near)}"
            )


def starts_of(flow: StepFlow, names: Sequence[str]) -> list[int]:
    """The units at which the modules (or parameters) with these names begin; the first of them begins the first
    stage."""
    program, reads = flow.program, dict[int, set[str]]()
    names_of = names_of_inputs(flow)
    refuse_unknown_stages([name for name in names[:1] if name], sorted(set().union(*names_of.values())))
    for i in flow.units:
        reads[i] = {name for v in flow.behind(flow.block.eqns[i]) for name in names_of.get(v, ())}
    starts: list[int] = []
    for name in names[1:]:
        unit = next((i for i in flow.units if any(_is_in(n, name) for n in reads[i])), None)
        if unit is None:
            known = sorted({program.role(v).name.rsplit(".", 1)[0] for v in program.inputs_of("parameter")})
            raise PlanError(
                f"stages: {name}: no part of the step reads a parameter of it\n"
                f"  try       names of modules, such as {', '.join(known[:4])}"
            )
        _refuse_inside(flow, unit, name, reads, [flow.units[0], *starts])
        starts.append(unit)
    if sorted(set(starts)) != starts or (starts and starts[0] == flow.units[0]):
        raise PlanError(
            f"stages: {', '.join(names)}: they do not begin one after the other in the step\n"
            "  try       one name for each stage, the module it begins with, in the order in which the model calls them"
        )
    return starts


def _refuse_inside(flow: StepFlow, unit: int, name: str, reads: Mapping[int, set[str]], begun: Sequence[int]) -> None:
    """PlanError where a module begins in the middle of an equation with which a stage has begun: a loop, a branch, or a
    block that is called as a whole."""
    eqn, others = flow.block.eqns[unit], sorted(n for n in reads[unit] if not _is_in(n, name))
    if unit not in begun or eqn.op not in CONTROL or not others:
        return
    what = {scan: "a loop", loop: "a loop", cond: "a branch"}.get(eqn.op, "a block that is called as a whole")
    raise PlanError(
        f"stages: {name} is inside {what}, which stays in one stage: {len(others)} parameters of other modules are "
        f"read there, {others[0]} among them\n  at        {eqn.line or 'a line that is not known'}\n"
        f"  try       a module that begins before or behind it, or layers that Python calls one by one"
    )


def modules_around(flow: StepFlow, lists: Sequence[str]) -> tuple[str, ...]:
    """The module whose parameters a step reads first, and for each list of layers that with which it goes on behind
    the last of them."""
    names_of = names_of_inputs(flow)
    reads = [sorted(n for v in flow.behind(flow.block.eqns[i]) for n in names_of.get(v, ())) for i in flow.units]
    last = [max(k for k, names in enumerate(reads) if any(_is_in(n, each) for n in names)) for each in lists]
    following = [next((n for names in reads[k + 1 :] for n in names), "") for k in (-1, *last)]
    return tuple(name.rsplit(".", 1)[0] for name in following)


def names_of_inputs(flow: StepFlow) -> dict[Var, set[str]]:
    """Inputs of the body -> the parameters they come from."""
    roles = roles_of_inputs(flow)
    names = {v: {role.name for role in of if role.kind == "parameter"} for v, of in roles.items()}
    return {v: of for v, of in names.items() if of}


def roles_of_inputs(flow: StepFlow) -> dict[Var, set[Role]]:
    """Inputs of the body -> the inputs of the program they come from."""
    program = flow.program
    roles = {v: {program.role(v)} for v in program.inputs}
    for eqn in program.main.eqns[: flow.body.at]:
        roles.update(dict.fromkeys(eqn.outputs, set().union(*(roles.get(v, set()) for v in eqn.vars))))
    return {v: roles[x] for v, x in flow.body.outer.items() if isinstance(x, Var)}


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
