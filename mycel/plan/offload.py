"""What lives on the host while it is not needed: which values, when they leave and when they come back.

    moved      a value of forward that backward needs: it leaves once it is made and comes back before backward reads it
    streamed   an input of the step that lies on the host: it comes before it is used, and goes back where the step
               changes it.  Optimiser state comes and goes in chunks: an update of many parameters is taken in several

A copy has one of two streams, which do one thing after the other: with s its seconds, and T the times at which the
equations of the block begin,

    leaving    begins behind the equation that makes the value, ends when the copies before it and s more have passed;
               before the first equation that begins later, the device's memory is free again
    coming     ends where the value is read, or where the next copy must begin, and begins s before that

so what there is time for costs nothing.  A `window` bounds the bytes that are on their way at once: then computing
waits for copies, where there is no memory for them.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mycel.errors import PlanError
from mycel.ir import CONTROL, DEVICE, Block, Eqn, Program, Var, call, chains
from mycel.plan.clock import owners, size
from mycel.plan.hardware import Hardware
from mycel.sizes import parse_bytes

KINDS = ("activations", "optimizer")
WAYS = ("auto", "host", "none")
SMALL = 1000  # of all that could leave, what is less than this part stays: it would gain nothing
CHUNKS = 16  # optimiser state is updated in about so many


@dataclass(frozen=True)
class Offload:
    """What a plan says of the host: for activations and optimiser state `auto` (where the memory budget asks for it),
    `host` (all that can be) or `none`; and the bytes there are on the host, None: all that it has."""

    activations: str = "none"
    optimizer: str = "none"
    host: int | None = None

    @staticmethod
    def read(written: Any, where: str) -> Offload:
        """`auto`, `none`, or by kind."""
        if written is None or written == "none" or written is False:
            return Offload()
        if written == "auto":
            return Offload("auto", "auto")
        if not isinstance(written, Mapping):
            raise PlanError(f"{where}: offload is {written!r}\n  try       auto, none, or {{optimizer: host}}")
        for key, value in written.items():
            if key not in (*KINDS, "host"):
                raise PlanError(f"{where}: offload: unknown key {key!r}\n  known     {', '.join(KINDS)}, host")
            if key in KINDS and value not in WAYS:
                raise PlanError(f"{where}: offload: {key} is {value!r}\n  known     {', '.join(WAYS)}")
        budget = written.get("host")
        if isinstance(budget, str):
            budget = parse_bytes(budget)
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < 0):
            raise PlanError(f"{where}: offload: host is {written['host']!r}\n  try       bytes, or text like '64GiB'")
        return Offload(str(written.get("activations", "none")), str(written.get("optimizer", "none")), budget)

    def data(self) -> Any:
        if self == Offload("auto", "auto"):
            return "auto"
        own = {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) != "none"}
        return own | ({"host": self.host} if self.host is not None else {})

    @property
    def is_none(self) -> bool:
        return self.activations == "none" and self.optimizer == "none"


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
    """All that a step moves: values of its body (forward and backward), inputs of its entry, and the bytes of state in
    one chunk of an update."""

    body: str
    moved: tuple[MovedValue, ...] = ()
    streamed: tuple[StreamedInput, ...] = ()
    chunk: int = 0

    def __bool__(self) -> bool:
        return bool(self.moved or self.streamed)

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = {"body": self.body}
        found |= {"values": {m.value: [m.freed, m.fetched] for m in self.moved}} if self.moved else {}
        found |= {"inputs": {s.input: [list(s.fetched), s.freed] for s in self.streamed}} if self.streamed else {}
        return found | ({"chunk": self.chunk} if self.chunk else {})

    @staticmethod
    def read(data: Mapping[str, Any]) -> Offloaded:
        values = [MovedValue(name, str(freed), str(back)) for name, (freed, back) in data.get("values", {}).items()]
        inputs = [
            StreamedInput(name, tuple(map(str, fetched)), str(freed))
            for name, (fetched, freed) in data.get("inputs", {}).items()
        ]
        return Offloaded(str(data["body"]), tuple(values), tuple(inputs), int(data.get("chunk", 0)))


def equation_key(i: int, eqn: Eqn) -> str:
    """The name an equation goes by in a plan."""
    return eqn.outputs[0].name if eqn.outputs else f"#{i}"


# -- what could be away ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Absence:
    """A value that nobody reads for a while: made at `made`, last read before that at `before`, next read at `use`."""

    var: Var
    made: int
    before: int
    use: int

    @property
    def bytes(self) -> int:
        return size(self.var)


def absences(program: Program, name: str, times: Sequence[float], hardware: Hardware) -> list[Absence]:
    """Values of a block that may leave the device between forward and backward, in the order in which they are made:
    those alone in their memory, which nobody reads for longer than two copies take."""
    block = program.blocks[name]
    uses, owner = chains(block), owners(block)
    alone = _alone(program, block)
    lying: dict[Var, list[Var]] = {}
    for v, of in owner.items():
        lying.setdefault(of, []).append(v)
    found = []
    for of, family in lying.items():
        at = uses[of].defined
        eqn = block.eqns[at]
        if of not in alone or eqn.phase != "forward" or of.type.space != DEVICE or of.type.depth:
            continue
        reads = sorted({i for v in family for i in uses[v].uses})
        gap = max(((times[b] - times[a], a, b) for a, b in zip([at, *reads], reads, strict=False)), default=(0.0, 0, 0))
        before, use = gap[1], gap[2]
        late = [v for v in family if any(i >= use for i in uses[v].uses) and uses[v].defined <= before]
        if gap[0] > 2 * hardware.move_s(size(of)) and late == [of] and not any(uses[v].is_output for v in family):
            found.append(Absence(of, at, before, use))
    least = sum(a.bytes for a in found) // SMALL
    return sorted((a for a in found if a.bytes >= least), key=lambda a: (a.made, a.var.name))


def _alone(program: Program, block: Block) -> set[Var]:
    """Values that share their memory with none that comes from elsewhere: what a call returns of its inputs, or twice,
    does."""
    alone: set[Var] = set()
    for eqn in block.eqns:
        if eqn.op is call:
            inner = program.blocks[eqn.params["block"]]
            owner = owners(inner)
            of = [owner.get(x) if isinstance(x, Var) else None for x in inner.outputs]
            alone.update(v for v, o in zip(eqn.outputs, of, strict=True) if o is not None and of.count(o) == 1)
        elif eqn.op not in CONTROL and eqn.op.inplace is None and not eqn.op.effect:
            alone.update(eqn.outputs)
    return alone


# -- when copies go --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Departure:
    """A copy to the host: it may begin before equation `ready`, and may end from `earliest` on."""

    ready: int
    earliest: int
    bytes: int


def departures(
    wanted: Sequence[Departure], times: Sequence[float], hardware: Hardware, window: int, free: float = 0.0
) -> list[int]:
    """Before which equation each copy to the host has ended, one after the other in this order; `free`: when the first
    can begin."""
    ends, flying = list[int](), list[int]()
    for k, each in enumerate(wanted):
        while flying and sum(wanted[i].bytes for i in flying) + each.bytes > window:  # wait for the oldest
            oldest = flying.pop(0)
            ends[oldest] = max(wanted[oldest].earliest, min(ends[oldest], each.ready))
        free = max(free, times[each.ready]) + hardware.move_s(each.bytes)
        at = bisect.bisect_left(times, free, each.ready)
        ends.append(max(min(at, len(times) - 1), each.earliest))
        flying = [i for i in (*flying, k) if ends[i] > each.ready]
    return ends


def arrivals(
    wanted: Sequence[tuple[int, int]], times: Sequence[float], hardware: Hardware, window: int, first: int = 0
) -> list[int]:
    """(use, bytes) of copies to the device, in the order of their uses -> before which equation each begins, at the
    earliest before `first`."""
    begins = [0] * len(wanted)
    free = times[-1] + sum(hardware.move_s(size) for _, size in wanted)
    for k in reversed(range(len(wanted))):
        use, size = wanted[k]
        free = min(free, times[use]) - hardware.move_s(size)
        begins[k] = min(max(bisect.bisect_right(times, free, 0, use + 1) - 1, first), use)
    sizes = [size for _, size in wanted]
    start = 0
    for k, (use, _) in enumerate(wanted):
        while start < k and sum(sizes[start : k + 1]) > window:
            start += 1
        if start:  # not before what is outside of the window has been used
            begins[k] = min(max(begins[k], wanted[start - 1][0] + 1), use)
    return begins


def moves_of(
    block: Block,
    leaving: Sequence[Absence],
    times: Sequence[float],
    hardware: Hardware,
    window: int,
    busy: float = 0.0,
) -> tuple[MovedValue, ...]:
    """When these values leave and come back; one that would come back before it has left stays.  `busy`: how long the
    step before still moves to the host."""
    names = [*(equation_key(i, e) for i, e in enumerate(block.eqns)), ""]
    out = [Departure(a.made + 1, a.before + 1, a.bytes) for a in leaving]
    freed = dict(zip(leaving, departures(out, times, hardware, window, busy), strict=True))
    back = sorted(leaving, key=lambda a: (a.use, a.made))
    fetched = dict(zip(back, arrivals([(a.use, a.bytes) for a in back], times, hardware, window), strict=True))
    return tuple(
        MovedValue(a.var.name, names[freed[a]], names[max(fetched[a], freed[a])]) for a in leaving if freed[a] < a.use
    )


def streams_of(
    program: Program, inputs: Collection[str], times: Sequence[float], hardware: Hardware, window: int
) -> tuple[StreamedInput, ...]:
    """When inputs of the entry that lie on the host come, and their new values leave."""
    block = program.main
    names = [*(equation_key(i, e) for i, e in enumerate(block.eqns)), ""]
    uses = chains(block)
    mine = sorted((v for v in block.inputs if v.name in inputs), key=lambda v: uses[v].uses[0])
    begins = arrivals([(uses[v].uses[0], size(v)) for v in mine], times, hardware, window)
    new = dict(zip(program.updates, block.outputs[len(block.outputs) - len(program.updates) :], strict=True))
    leaving = sorted(
        ((uses[x].defined, v) for v in mine if isinstance(x := new.get(v.name), Var) and uses[x].defined >= 0),
        key=lambda each: each[0],
    )
    ends = departures([Departure(i + 1, i + 1, size(v)) for i, v in leaving], times, hardware, window)
    freed = {v: names[end] for (_, v), end in zip(leaving, ends, strict=True)}
    return tuple(StreamedInput(v.name, (names[at],), freed.get(v, "")) for v, at in zip(mine, begins, strict=True))


def state_inputs(program: Program) -> list[Var]:
    """Optimiser state that an update reads and replaces, of more than one number."""
    uses = chains(program.main)
    return [
        v for v in program.inputs_of("state") if v.type.ndim and len(uses[v].uses) == 1 and v.name in program.updates
    ]


def chunk_bytes(state: Iterable[Var]) -> int:
    """Of one chunk of an update."""
    sizes = [size(v) for v in state]
    return max(sum(sizes) // CHUNKS, max(sizes, default=0), 1)
