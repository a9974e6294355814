"""What lives on the host while it is not needed: which values, when they leave and when they come back.

    moved      a value of forward that backward needs, or a gradient that the update needs: it leaves once it is made
               and comes back before it is read.  Where gradients leave, their global norm is the norm of their norms
    streamed   an input of the step that lies on the host: it comes before it is used, as often as it is not needed for
               a while in between, and goes back where the step changes it.  An update of many parameters is taken in
               several chunks, each with its state, and with its parameters where they are on the host
    updated    a parameter that is updated where it lives, on the host, with its state (`host_update.py`): its gradient
               leaves for good

A copy has one of two streams, which do one thing after the other, whatever it is that they move: with s its seconds,
and T the times at which the equations of the block begin,

    leaving    begins behind the equation that makes the value, ends when the copies before it and s more have passed;
               before the first equation that begins later, the device's memory is free again
    coming     ends where the value is read, or where the next copy must begin, and begins s before that

so what there is time for costs nothing.  `Windows` bound the bytes of one kind that are on their way at once: then
computing waits for copies, where there is no memory for them.
"""

from __future__ import annotations

import bisect
import contextlib
import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mycel.errors import PlanError, TrainError
from mycel.ir import CONTROL, DEVICE, Block, Eqn, Program, Var, call, chains
from mycel.ops import o
from mycel.plan.hardware import Hardware
from mycel.plan.step_memory import owners, size
from mycel.sizes import parse_bytes

KINDS = ("activations", "gradients", "parameters", "optimizer")
OTHERS = ("host", "update")  # what else a plan may say of the host: its bytes, and where is updated what lives there
WAYS = ("auto", "host", "none")
UPDATED = ("auto", "host", "device")  # where parameters and state that live on the host are updated
UPDATE = "update"  # the phase; and a kind of copies besides these: what an update reads and replaces
SMALL = 1000  # of all that could leave, what is less than this part stays: it would gain nothing
CHUNKS = 32  # an update is taken in about so many, and parameters come in such parts


@dataclass(frozen=True)
class Offload:
    """What a plan says of the host, by kind: `auto` (where the memory budget asks for it), `host` (all that can be) or
    `none`; and the bytes there are on the host, None: all that it has.  `update`: where parameters whose state lives
    there are updated; `auto` is the faster of both where the host's rate was measured, else the device.
    `unsaid`: the plan says nothing, which is `auto` where there is a budget and a host beside the device."""

    activations: str = "none"
    gradients: str = "none"
    parameters: str = "none"
    optimizer: str = "none"
    host: int | None = None
    update: str = "auto"
    unsaid: bool = False

    @staticmethod
    def read(written: Any, where: str) -> Offload:
        """`auto`, `none`, or by kind; a host budget alone is `auto` within it."""
        if written is None:
            return UNSAID
        if written == "none" or written is False:
            return Offload()
        if written == "auto":
            return AUTO
        if not isinstance(written, Mapping):
            raise PlanError(f"{where}: offload is {written!r}\n  try       auto, none, or {{optimizer: host}}")
        for key, value in written.items():
            if key not in (*KINDS, *OTHERS):
                near = close_names(str(key), (*KINDS, *OTHERS))
                raise PlanError(
                    f"{where}: offload: unknown key {key!r}{near}\n  known     {', '.join((*KINDS, *OTHERS))}"
                )
            known = WAYS if key in KINDS else UPDATED
            if key != "host" and value not in known:
                raise PlanError(f"{where}: offload: {key} is {value!r}\n  known     {', '.join(known)}")
        budget = written.get("host")
        if isinstance(budget, str):
            with contextlib.suppress(TrainError):
                budget = parse_bytes(budget)
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise PlanError(f"{where}: offload: host is {written['host']!r}\n  try       bytes, or text like '64GiB'")
        unsaid = "none" if any(key in KINDS for key in written) else "auto"
        kinds = [str(written.get(kind, unsaid)) for kind in KINDS]
        said = Offload(kinds[0], kinds[1], kinds[2], kinds[3], budget, str(written.get("update", "auto")))
        if said.update == "host" and said.optimizer == "none":
            raise PlanError(
                f"{where}: offload: update is host, but optimizer is none: state is updated where it lives\n"
                "  try       {parameters: host, optimizer: host, update: host}"
            )
        return said

    def data(self) -> Any:
        own = {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) != "none"}
        if not own:
            return "none"
        more = ({"host": self.host} if self.host is not None else {}) | (
            {"update": self.update} if self.update != "auto" else {}
        )
        if set(own.values()) == {"auto"} and len(own) == len(KINDS):
            return more or "auto"
        return own | more

    @property
    def is_none(self) -> bool:
        return all(getattr(self, kind) == "none" for kind in KINDS)


AUTO = Offload("auto", "auto", "auto", "auto")
UNSAID = Offload(unsaid=True)


def close_names(name: str, known: Iterable[str]) -> str:
    """For a refusal: what was meant, perhaps."""
    near = difflib.get_close_matches(name, list(known), 3)
    return f"\n  near      {', '.join(near)}" if near else ""


@dataclass(frozen=True)
class MovedValue:
    """A value that is away between two of its uses.  By their first results, the equations before which it has left
    (`freed`) and begins to come back (`fetched`)."""

    value: str
    freed: str
    fetched: str


@dataclass(frozen=True)
class StreamedInput:
    """An input of the step that lies on the host.  The equations before which it begins to come, each for its uses up
    to the next; and the one before which its new value has left, "" for the end."""

    input: str
    fetched: tuple[str, ...]
    freed: str = ""


@dataclass(frozen=True)
class Offloaded:
    """All that a step moves: values of its body (forward and backward), inputs of its entry, the bytes of them in one
    chunk of an update; whether the norm of gradients is made of the norm of each, so that they may leave; and inputs of
    blocks that the entry runs several times (the body of a loop, steps of a pipeline), by block: they are on the host
    while others of it are needed.  `updated`: parameters that the host updates, each with the equation before which its
    gradient has left."""

    body: str
    moved: tuple[MovedValue, ...] = ()
    streamed: tuple[StreamedInput, ...] = ()
    chunk: int = 0
    norms: bool = False
    inside: Mapping[str, tuple[StreamedInput, ...]] = field(default_factory=dict)
    updated: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.moved or self.streamed or self.norms)

    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"body": self.body}
        data |= {"values": {m.value: [m.freed, m.fetched] for m in self.moved}} if self.moved else {}
        data |= {"inputs": {s.input: [list(s.fetched), s.freed] for s in self.streamed}} if self.streamed else {}
        inside = {block: {s.input: list(s.fetched) for s in each} for block, each in self.inside.items()}
        data |= {"inside": inside} if inside else {}
        data |= {"chunk": self.chunk} if self.chunk else {}
        data |= {"updated": dict(self.updated)} if self.updated else {}
        return data | ({"norms": True} if self.norms else {})

    @staticmethod
    def read(data: Mapping[str, Any]) -> Offloaded:
        values = [MovedValue(name, str(freed), str(back)) for name, (freed, back) in data.get("values", {}).items()]
        inputs = [
            StreamedInput(name, tuple(map(str, fetched)), str(freed))
            for name, (fetched, freed) in data.get("inputs", {}).items()
        ]
        inside = {
            str(block): tuple(StreamedInput(name, tuple(map(str, fetched))) for name, fetched in each.items())
            for block, each in data.get("inside", {}).items()
        }
        chunk, norms = int(data.get("chunk", 0)), bool(data.get("norms", False))
        updated = {str(name): str(freed) for name, freed in data.get("updated", {}).items()}
        return Offloaded(str(data["body"]), tuple(values), tuple(inputs), chunk, norms, inside, updated)


def equation_key(i: int, eqn: Eqn) -> str:
    """The name an equation goes by in a plan."""
    return eqn.outputs[0].name if eqn.outputs else f"#{i}"


# -- what could be away ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Absence:
    """A value that nobody reads for a while: made at `made`, last read before that at `before`, next read at `use`."""

    var: Var
    defined: int
    before: int
    use: int
    kind: str = "activations"

    @property
    def bytes(self) -> int:
        return size(self.var)


def absences(
    program: Program,
    name: str,
    times: Sequence[float],
    hardware: Hardware,
    kinds: Collection[str] = ("activations",),
    sums: bool = False,
) -> list[Absence]:
    """Values of a block that may leave the device, activations between forward and backward, gradients between backward
    and update, in the order in which they are made: those alone in their memory, which nobody reads for longer than two
    copies take.  `sums`: gradients also between two backward steps, of which the second adds to them.  What is made of
    nothing (the zeros that a sum begins with) would not be worth a copy.  What a message carries stays until it has
    come."""
    block = program.blocks[name]
    uses, owner = chains(block), owners(program, name).of
    alone = _alone(program, block)
    lying: dict[Var, list[Var]] = {}
    for v, of in owner.items():
        lying.setdefault(of, []).append(v)
    candidates = []
    for of, family in lying.items():
        at = uses[of].defined
        eqn = block.eqns[at]
        kind = {"forward": "activations", "backward": "gradients"}.get(eqn.phase, "")
        if of not in alone or kind not in kinds or of.type.space != DEVICE or of.type.depth or not of.type.ndim:
            continue
        if not any(True for _ in eqn.vars):
            continue
        reads = sorted({i for v in family for i in uses[v].uses})
        sent = [(uses[token].defined, i) for i in reads if (token := _token_of(block.eqns[i])) is not None]
        apart = [
            (times[b] - times[a], a, b)
            for a, b in zip([at, *reads], reads, strict=False)
            if not any(begun <= a and b <= finished for begun, finished in sent)
        ]
        gap = max(apart, default=(0.0, 0, 0))
        before, use = gap[1], gap[2]
        if kind == "gradients" and block.eqns[use].phase != UPDATE and not sums:
            continue
        late = [v for v in family if any(i >= use for i in uses[v].uses) and uses[v].defined <= before]
        if len(late) != 1 or any(uses[v].is_output for v in family):
            continue
        defined = uses[late[0]].defined  # of a rank's own part of a value, that is moved, and all of it is freed
        is_moved = late[0] is of or block.eqns[defined].op is o.own_part
        if is_moved and gap[0] > 2 * hardware.move_s(size(late[0])):
            candidates.append(Absence(late[0], defined, before, use, kind))
    least = sum(a.bytes for a in candidates) // SMALL
    return sorted((a for a in candidates if a.bytes >= least), key=lambda a: (a.defined, a.var.name))


def _token_of(eqn: Eqn) -> Var | None:
    """Of the end of a message: what its beginning made."""
    first = eqn.inputs[0] if eqn.op in (o.finish, o.finish_send) else None
    return first if isinstance(first, Var) else None


def _alone(program: Program, block: Block) -> set[Var]:
    """Values that share their memory with none that comes from elsewhere: what a call returns of its inputs, or twice,
    does."""
    alone: set[Var] = set()
    for eqn in block.eqns:
        if eqn.op is call:
            called = eqn.params["block"]
            owner = owners(program, called).of
            of = [owner.get(x) if isinstance(x, Var) else None for x in program.blocks[called].outputs]
            alone.update(v for v, o in zip(eqn.outputs, of, strict=True) if o is not None and of.count(o) == 1)
        elif eqn.op not in CONTROL and eqn.op.inplace is None and not eqn.op.effect:
            alone.update(eqn.outputs)
    return alone


# -- when copies go --------------------------------------------------------------------------------------------------

ENDLESS = 1 << 62  # of bytes or equations: no bound


@dataclass(frozen=True)
class Departure:
    """A copy to the host: it may begin before equation `ready`, and may end from `earliest` on.  One that would end
    after equation `use`, which reads the value, is not begun, where copies are not waited for to bound their bytes."""

    ready: int
    earliest: int
    bytes: int
    kind: str = ""
    use: int = ENDLESS


@dataclass(frozen=True)
class Arrival:
    """A copy to the device that is read at `use`; it may begin before equation `first`, at the earliest."""

    use: int
    bytes: int
    kind: str = ""
    first: int = 0


Windows = Mapping[str, int]  # by kind, the most bytes on their way at once; what is not there is not bounded


def departures(
    wanted: Sequence[Departure], times: Sequence[float], hardware: Hardware, windows: Windows, free: float = 0.0
) -> tuple[list[int], float]:
    """Before which equation each copy to the host has ended, one after the other in this order, and when the last has;
    `free`: when the first can begin."""
    ends = list[int]()
    flying: dict[str, list[int]] = {}
    for k, each in enumerate(wanted):
        mine, window = flying.setdefault(each.kind, []), windows.get(each.kind, ENDLESS)
        if window < ENDLESS:
            on_the_way = sum(wanted[i].bytes for i in mine)
            while mine and on_the_way + each.bytes > window:
                oldest = mine.pop(0)  # it is waited for
                on_the_way -= wanted[oldest].bytes
                ends[oldest] = max(wanted[oldest].earliest, min(ends[oldest], each.ready))
        end = max(free, times[each.ready]) + hardware.move_s(each.bytes)
        at = bisect.bisect_left(times, end, each.ready)
        ends.append(max(min(at, len(times) - 1), each.earliest))
        if window < ENDLESS:
            flying[each.kind] = [i for i in (*mine, k) if ends[i] > each.ready]
        elif ends[k] >= each.use:
            continue
        free = end
    return ends, free


def arrivals(wanted: Sequence[Arrival], times: Sequence[float], hardware: Hardware, windows: Windows) -> list[int]:
    """Before which equation each copy to the device begins, in the order of their uses."""
    begins = [0] * len(wanted)
    free = times[-1] + sum(hardware.move_s(each.bytes) for each in wanted)
    for k in reversed(range(len(wanted))):
        each = wanted[k]
        free = min(free, times[each.use]) - hardware.move_s(each.bytes)
        begins[k] = min(max(bisect.bisect_right(times, free, 0, each.use + 1) - 1, each.first), each.use)
    for kind, window in windows.items():
        mine = [k for k, each in enumerate(wanted) if each.kind == kind]
        start, flying = 0, 0
        for n, k in enumerate(mine):
            flying += wanted[k].bytes
            while start < n and flying > window:
                flying -= wanted[mine[start]].bytes
                start += 1
            if start:  # not before what is outside of the window has been used
                begins[k] = min(max(begins[k], wanted[mine[start - 1]].use + 1), wanted[k].use)
    return begins


@dataclass(frozen=True)
class Visit:
    """Uses of an input that lies on the host, for which it comes once: from equation `first` to `last`."""

    input: Var
    first: int
    last: int
    after: int  # the last use before

    def arrival(self, kind: str) -> Arrival:
        return Arrival(self.first, size(self.input), kind, self.after + 1)


def visits(
    program: Program,
    name: str,
    inputs: Collection[str],
    times: Sequence[float],
    hardware: Hardware,
    passed_on: Collection[tuple[int, Var]] = (),
) -> list[Visit]:
    """When inputs of a block are needed on the device, in the order of that: between two visits there is time to come
    anew.  `passed_on`: equations that take an input as it lies."""
    block = program.blocks[name]
    uses = chains(block)
    stays = []
    for v in block.inputs:
        at = [i for i in uses[v].uses if (i, v) not in passed_on]
        if v.name not in inputs or not at:
            continue
        first, after = at[0], -1
        for a, b in zip(at, [*at[1:], None], strict=True):
            if b is None or times[b] - times[a + 1] > 2 * hardware.move_s(size(v)):
                stays.append(Visit(v, first, a, after))
                first, after = b or 0, a
    return sorted(stays, key=lambda visit: visit.first)


class PlacedCopies(NamedTuple):
    """When the copies of a block go; `left`: of values that do not come back, the equation before which each has
    left."""

    moved: tuple[MovedValue, ...]
    streamed: tuple[StreamedInput, ...]
    left: Mapping[str, str]


@dataclass(frozen=True)
class Copies:
    """All copies of one block: values that are away for a while, inputs that live on the host, and values that leave
    for good; `hosted`: inputs that the host updates."""

    program: Program
    block: str
    times: Sequence[float]
    hardware: Hardware
    away: Sequence[Absence] = ()
    visiting: Sequence[Visit] = ()
    leaving: Sequence[Absence] = ()
    hosted: Collection[Var] = ()

    def placed(self, windows: Windows) -> PlacedCopies:
        """When all of them go, one after the other on the wire of each way.  A value that would come back before it has
        left stays."""
        names = [*(equation_key(i, e) for i, e in enumerate(self.program.blocks[self.block].eqns)), ""]
        freed = self._freed(windows)
        leave = [a for a in self.away if freed[a.var] < a.use]
        fetched = self._fetched(leave, windows)
        moved = tuple(MovedValue(a.var.name, names[freed[a.var]], names[max(fetched[a], freed[a.var])]) for a in leave)
        new, coming = self._new(), dict[Var, list[str]]()
        for visit in self.visiting:
            coming.setdefault(visit.input, []).append(names[fetched[visit]])
        streamed = tuple(
            StreamedInput(v.name, tuple(places), names[freed[new[v]]] if v in new else "")
            for v, places in coming.items()
        )
        return PlacedCopies(moved, streamed, {a.var.name: names[freed[a.var]] for a in self.leaving})

    def _freed(self, windows: Windows) -> dict[Var, int]:
        """Before which equation each value has left: those that are away, and those that replace an input.  The wire
        may still be busy with what the step before left."""
        uses = chains(self.program.blocks[self.block])
        wanted = [(a.var, Departure(a.defined + 1, a.before + 1, a.bytes, a.kind, a.use)) for a in self.away]
        wanted += [(a.var, Departure(a.defined + 1, a.before + 1, a.bytes, a.kind)) for a in self.leaving]
        defined = {x: uses[x].defined for x in self._new().values()}
        wanted += [(x, Departure(i + 1, i + 1, size(x), UPDATE)) for x, i in defined.items()]
        wanted.sort(key=lambda each: each[1].ready)
        order = [each for _, each in wanted]
        _, free = departures(order, self.times, self.hardware, windows)
        ends, _ = departures(order, self.times, self.hardware, windows, max(0.0, free - self.times[-1]))
        return {v: end for (v, _), end in zip(wanted, ends, strict=True)}

    def _fetched(self, away: Sequence[Absence], windows: Windows) -> dict[Absence | Visit, int]:
        """Before which equation each begins to come."""
        wanted: list[tuple[Absence | Visit, Arrival]] = [
            *((a, Arrival(a.use, a.bytes, self._kind(a.use, a.kind))) for a in away),
            *((visit, visit.arrival(self._kind(visit.first, "parameters"))) for visit in self.visiting),
        ]
        wanted.sort(key=lambda each: each[1].use)
        begins = arrivals([each for _, each in wanted], self.times, self.hardware, windows)
        return {of: at for (of, _), at in zip(wanted, begins, strict=True)}

    def _kind(self, use: int, kind: str) -> str:
        """Of what comes for this equation."""
        return UPDATE if self.program.blocks[self.block].eqns[use].phase == UPDATE else kind

    def _new(self) -> dict[Var, Var]:
        """Inputs that visit -> the values that replace them."""
        program, block = self.program, self.program.blocks[self.block]
        if self.block != program.entry or not program.updates:
            return {}
        new = dict(zip(program.updates, block.outputs[-len(program.updates) :], strict=True))
        defined = {v for e in block.eqns for v in e.outputs}
        mine = dict.fromkeys(visit.input for visit in self.visiting if visit.input not in self.hosted)
        return {v: x for v in mine if isinstance(x := new.get(v.name), Var) and x in defined}


def handed_to(
    program: Program, blocks: Collection[str], inputs: Collection[str]
) -> dict[tuple[int, Var], tuple[str, Var]]:
    """Of blocks that the entry runs several times, each time with the same of these inputs: (equation, input of the
    entry) -> the block and the input of it that it is.  What a loop hands on to each turn is the same by itself, and
    steps of a pipeline are called with the parameters of their stage."""
    operands: dict[tuple[int, Var], tuple[str, Var]] = {}
    for i, eqn in enumerate(program.main.eqns):
        block = next((str(ref) for ref in eqn.refs if ref in blocks), None)
        if block is None or not (eqn.op is call or "consts" in eqn.params):
            continue
        same = len(eqn.inputs) if eqn.op is call else eqn.params["consts"]
        pairs = zip(eqn.inputs[:same], program.blocks[block].inputs, strict=False)
        operands |= {(i, x): (block, v) for x, v in pairs if isinstance(x, Var) and x.name in inputs}
    return operands


def state_inputs(program: Program) -> list[Var]:
    """Optimiser state that an update reads and replaces, of more than one number."""
    uses = chains(program.main)
    return [
        v for v in program.inputs_of("state") if v.type.ndim and len(uses[v].uses) == 1 and v.name in program.updates
    ]


def parameter_inputs(program: Program) -> list[Var]:
    """Parameters that may live on the host: matrices and what has more dims.  Whether one does depends on it alone, so
    that all programs of a model agree."""
    return [v for v in program.inputs_of("parameter") if v.type.ndim > 1]


def chunk_bytes(inputs: Iterable[Var]) -> int:
    """Of one part of those that come one after the other."""
    sizes = [size(v) for v in inputs]
    return max(sum(sizes) // CHUNKS, max(sizes, default=0), 1)
