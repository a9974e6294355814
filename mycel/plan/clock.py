"""The one clock: when each equation of a local program starts and ends, and what memory is alive meanwhile.

    times = clock(program, hardware, links, compiled)
    times.seconds, times.parts, times.peak, times.events()

A rank has streams: one that computes, one for each level of its links, and where it moves values between host and
device, one for each way.  Their states are the times at which they are free, c and l.  What an equation of s seconds
does to them:

    a kernel                      c' = c + s
    a collective                  c' = l' = max(c, l) + s                       it waits for its message
    t = begin(…), begin_move(…)   t = l' = max(c, l) + s;   c' = c + busy · s   busy: what sending takes from computing
    finish(t)                     c' = max(c, t);  of a move to the host that is not waited for, c' = c
      where it packs what travels together, first c' = c + packing; where it unpacks, c' = … + packing in the end
    an update on the host         l' = max(c, l, t of what came there for it) + s
    begin_move(x, to="device")    where the host makes x:  c' = max(c, l - what it does behind x), and then as above

All of it is linear in (max, +).  So a block is one small matrix M, exact wherever it is called and whatever is still on
its way there:  state'[i] = max_j (state[j] + M[i][j]).  It is made once for each distinct block; a call multiplies by
it, a scan by its power, a branch by the larger of both, element by element (the dearer in each stream), a loop by the
power of TURNS, which is assumed and said.

Memory goes in the same walk: an equation's results are alive from where it starts (a message's from its `begin`) to
their last use; a called block needs its own peak on top, a scan the rows of all its turns, and the carry of the turn
before beside what a turn makes.  Inputs of the entry (parameters, state, the batch) are there all the time.  In a
compiled block only values that lie in memory count, and what is one kernel runs at once (`kernels.py`); a view has the
memory of what it shows, a result that is written over an operand the operand's: `ops/overwriting.py` says which are,
and code is written by it.  What lies on the host is counted apart, where `ir/arena.py` lays it out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from mycel.ir import (
    CONTROL,
    DEVICE,
    HOST,
    Axes,
    Block,
    Eqn,
    Program,
    Var,
    call,
    cond,
    custom,
    host_alive,
    host_bytes,
    loop,
    order,
    scan,
    walk,
)
from mycel.ops import o
from mycel.ops.overwriting import Overwritten, overwritten
from mycel.ops.written_inputs import NOTHING, WrittenInputs
from mycel.plan.cost import TURNS, Costs
from mycel.plan.hardware import Hardware
from mycel.plan.kernels import last_reads, moments
from mycel.plan.links import Link, Links, message, packed_bytes
from mycel.plan.step_memory import Line, owners, remember, size, while_turning
from mycel.sizes import span

WORKSPACE = 100 << 20  # what the libraries for products and attention take on a GPU, once: as seen on an H200
# streams besides those of links
COMPUTE, TO_HOST, TO_DEVICE, ON_HOST = "compute", "to host", "to device", "on the host"
FREE = Link(math.inf, 0.0)  # where no links are given
NEVER = -math.inf

LinesKey = tuple[int, bool, Hashable]  # id of a block, is it compiled, what it and what it holds write over operands
Row = list[float]  # a time as the largest of (the start of each stream + so much)
Matrix = list[Row]


@dataclass(frozen=True)
class StreamShare:
    """One stream's work: `total` seconds of it; `exposed`: what the step would be shorter by if it took no time."""

    total: float
    exposed: float


@dataclass(frozen=True)
class Event:
    """One equation on one stream, in seconds from the start of the step."""

    stream: str
    start: float
    end: float
    block: str
    eqn: Eqn


@dataclass(frozen=True)
class Passage:
    """One equation as the stream that computes comes by it: when it comes, and when it goes on; `sent`: when another
    stream works at it."""

    block: str
    line: Line
    came: float
    left: float
    sent: tuple[float, float] | None = None

    def events(self, streams: Sequence[str]) -> Iterator[Event]:
        """Packing and unpacking are computing."""
        line, eqn = self.line, self.line.eqn
        if line.kind == "work" and line.seconds:
            yield Event(COMPUTE, self.came, self.left, self.block, eqn)
        if line.packing:
            start = self.left - line.packing if line.kind == "finish" else self.came
            yield Event(COMPUTE, start, start + line.packing, self.block, eqn)
        if self.sent is not None:
            yield Event(streams[line.stream], *self.sent, self.block, eqn)


@dataclass(frozen=True)
class Summary:
    """A block: its matrix, the seconds of work of each stream, the most memory it needs besides its inputs (results
    included), and where."""

    matrix: Matrix
    totals: Row
    peak: int
    at: str
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Times:
    """What a step takes: seconds, bytes by memory space, of which `held` are inputs; `at` is the line of the peak,
    `assumed` what is not known."""

    seconds: float
    totals: Mapping[str, float]
    peak: Mapping[str, int]
    held: int
    at: str
    assumed: tuple[str, ...] = ()
    clock: Clock | None = field(default=None, repr=False, compare=False)
    program: Program | None = field(default=None, repr=False, compare=False)
    compiled: frozenset[str] = frozenset()
    shares: Mapping[str, StreamShare] | None = None  # of a pipeline, whose ranks run different programs
    of_ranks: tuple[tuple[str, int], ...] = ()  # of it, by rank along its axis: its stages, and its peak on the device
    waits_for_host: float = 0.0  # of it, seconds of the rank that is busiest

    @cached_property
    def parts(self) -> Mapping[str, StreamShare]:
        """Each stream's share, computing first."""
        if self.shares is not None:
            return self.shares
        assert self.clock is not None and self.program is not None
        without = {
            name: self.clock.summary(self.program, self.compiled, free=frozenset({i}))
            for i, name in enumerate(self.clock.streams)
            if name != ON_HOST or self.totals[name]
        }
        return {name: StreamShare(self.totals[name], self.seconds - _seconds(s)) for name, s in without.items()}

    @cached_property
    def moving(self) -> float:
        """Seconds that the step waits for the host: for copies both ways, one of which may wait for the other, and for
        what is computed there."""
        if self.clock is None or self.program is None or not self.clock.moves:
            return self.waits_for_host
        free = frozenset(map(self.clock.streams.index, (TO_HOST, TO_DEVICE, ON_HOST)))
        return self.seconds - _seconds(self.clock.summary(self.program, self.compiled, free))

    def events(self) -> Iterator[Event]:
        """Every equation that takes time, as often as it runs, in the order of the program."""
        assert self.clock is not None and self.program is not None
        return self.clock.events(self.program, self.compiled)

    def waits(self) -> dict[tuple[str, Axes], float]:
        """By collective and axes, how long computing stays at its messages."""
        assert self.clock is not None and self.program is not None
        return self.clock.waits(self.program, self.compiled)

    def computing(self, block: str) -> float:
        """Seconds of one run of a block, without its messages."""
        assert self.clock is not None and self.program is not None
        return self.clock.computing(self.program, block, self.compiled)

    def points(self) -> dict[tuple[object, ...], int]:
        """Bytes alive besides inputs at the first, the last and the fullest of the equations that do the same."""
        assert self.clock is not None and self.program is not None
        return self.clock.points(self.program, self.compiled)

    def curve(self) -> list[tuple[float, int, int]]:
        """(seconds, bytes on the device, number of the equation) for each equation of the entry."""
        assert self.clock is not None and self.program is not None
        return self.clock.curve(self.program, self.compiled, self.held)

    def host_curve(self) -> list[tuple[float, int]]:
        """(seconds, bytes on the host) for each equation of the entry."""
        assert self.clock is not None and self.program is not None
        spans = self.clock.spans(self.program, self.program.entry, self.compiled)
        return [(start, held) for (start, _), held in zip(spans, host_alive(self.program), strict=False)]

    def __str__(self) -> str:
        return times_text(
            self.seconds, {name: (part.total, part.exposed) for name, part in self.parts.items()}, self.assumed
        )


def times_text(seconds: float, parts: Mapping[str, tuple[float, float]], assumed: Sequence[str]) -> str:
    """For people: predicted step   12.0 ms: computing 10.0 ms, network 4.0 ms (2.0 ms exposed)"""
    shares = [f"computing {span(total)}" for name, (total, _) in parts.items() if name == COMPUTE]
    shares += [
        f"{name} {span(total)} ({span(max(0.0, exposed))} exposed)"
        for name, (total, exposed) in parts.items()
        if name != COMPUTE
    ]
    line = f"predicted step   {span(seconds)}" + (f": {', '.join(shares)}" if shares else "")
    return "\n".join([line, *(f"  assumed        {each}" for each in assumed)])


@dataclass
class Clock:
    """Times programs on one device with its links.  Blocks that several programs share (the same object) are priced
    once."""

    hardware: Hardware
    links: Links | None = None
    moves: bool = False  # between host and device
    _lines: dict[LinesKey, tuple[Block, list[Line]]] = field(default_factory=dict)  # with the block
    _held: dict[int, tuple[tuple[Var, ...], int]] = field(default_factory=dict)  # by id, with the inputs
    _over: tuple[Program, Overwritten, WrittenInputs, dict[str, Hashable]] | None = None  # of the last program

    @cached_property
    def streams(self) -> tuple[str, ...]:
        levels = self.links.levels if self.links is not None else ()
        return (COMPUTE, *levels, *((TO_HOST, TO_DEVICE, ON_HOST) if self.moves else ()))

    def __call__(self, program: Program, compiled: Collection[str] = ()) -> Times:
        """Of one run; `compiled`: the blocks a compiler takes whole."""
        names = frozenset(compiled)
        whole = self.summary(program, names)
        held = self._held_bytes(program.inputs)
        totals = dict(zip(self.streams, whole.totals, strict=True))
        peak = {DEVICE: held + whole.peak} | ({HOST: host_bytes(program)} if self.moves else {})
        if self.moves:
            peak[DEVICE] = max(peak[DEVICE], held + _BlockWalk(self, program, names).peak_behind_another())
        return Times(_seconds(whole), totals, peak, held, whole.at, whole.assumed, self, program, names)

    def summary(
        self, program: Program, compiled: frozenset[str] = frozenset(), free: Set[int] = frozenset()
    ) -> Summary:
        """Of the entry; `free`: streams whose work takes no time."""
        return _BlockWalk(self, program, compiled, free).block(program.entry, False)

    def events(self, program: Program, compiled: frozenset[str]) -> Iterator[Event]:
        for passage in self._passages(program, compiled):
            yield from passage.events(self.streams)

    def waits(self, program: Program, compiled: frozenset[str]) -> dict[tuple[str, Axes], float]:
        """By collective and axes, how long the stream that computes stays at its messages, packing and unpacking
        included."""
        seconds: dict[tuple[str, Axes], float] = {}
        for passage in self._passages(program, compiled):
            eqn = passage.line.eqn
            name, axes, _ = message(eqn) if eqn.op is not o.finish else (eqn.params["op"], eqn.params["axes"], 0)
            if name:
                seconds[name, axes] = seconds.get((name, axes), 0.0) + passage.left - passage.came
        return seconds

    def computing(self, program: Program, name: str, compiled: frozenset[str]) -> float:
        """Seconds of one run of a block, without its messages."""
        return _BlockWalk(self, program, compiled).block(name, False).totals[0]

    def _passages(self, program: Program, compiled: frozenset[str]) -> Iterator[Passage]:
        return _BlockWalk(self, program, compiled).passages(program.entry, False, [0.0] * len(self.streams))

    def spans(self, program: Program, name: str, compiled: Collection[str] = ()) -> list[tuple[float, float]]:
        """For each equation of a block, when the stream that computes comes to it and when it is done (what it begins,
        where that is), from a start at which all streams are free; and last, when all have been."""
        return _BlockWalk(self, program, frozenset(compiled)).spans(name, [0.0] * len(self.streams))

    def points(self, program: Program, compiled: frozenset[str]) -> dict[tuple[object, ...], int]:
        seen: dict[tuple[object, ...], list[int]] = {}
        for key, alive in _BlockWalk(self, program, compiled).alive(program.entry):
            seen.setdefault(key, []).append(alive)
        return {
            (*key, which): x
            for key, v in seen.items()
            for which, x in (("first", v[0]), ("last", v[-1]), ("most", max(v)))
        }

    def curve(self, program: Program, compiled: frozenset[str], held: int) -> list[tuple[float, int, int]]:
        spans = self.spans(program, program.entry, compiled)
        walk = _BlockWalk(self, program, compiled).alive(program.entry)
        alive = [bytes for key, bytes in walk if key[0] == program.entry]
        return [(start, held + now, i) for i, ((start, _), now) in enumerate(zip(spans, alive, strict=False))]

    def _held_bytes(self, inputs: tuple[Var, ...]) -> int:
        """What is there between steps."""
        key = id(inputs)
        if key not in self._held:
            here = sum(size(v) for v in inputs if v.type.space == DEVICE)
            self._held[key] = (inputs, here + (WORKSPACE if self.hardware.memory else 0))
        return self._held[key][1]

    # -- a block as lines: what does not depend on the blocks it holds

    def lines(self, program: Program, name: str, compiled: bool) -> list[Line]:
        block = program.blocks[name]
        key = (id(block), compiled, None if compiled else self._written_over(program)[2][name])
        if key not in self._lines:
            self._lines[key] = (block, self._made(program, name, compiled))
        return self._lines[key][1]

    def _written_over(self, program: Program) -> tuple[Overwritten, WrittenInputs, dict[str, Hashable]]:
        """By block, which results are written over an operand; which of the entry, into inputs; and by block that of it
        and of all blocks that it holds."""
        if self._over is None or self._over[0] is not program:
            over, written, keys = overwritten(program), WrittenInputs.of(program), dict[str, Hashable]()
            for name in order(program):
                held = {keys[ref] for eqn in program.blocks[name].eqns for ref in eqn.refs}
                keys[name] = (tuple(over[name].items()), frozenset(held))
            into = tuple((i, *sorted(ks)) for i, ks in written.copied.items())
            keys[program.entry] = (keys[program.entry], written.results, into)
            self._over = (program, over, written, keys)
        return self._over[1:]

    def _made(self, program: Program, name: str, compiled: bool) -> list[Line]:
        block = program.blocks[name]
        costs = Costs(program, self.hardware, compiled, self.links)
        there = costs.in_memory(block, compiled) if compiled else set[Var]()
        groups = costs.groups(block, there) if compiled else {}
        computing = costs.merged(block, there, groups) if compiled else costs.computing(block)
        begin, finish, begin_move, finish_move = o.begin, o.finish, o.begin_move, o.finish_move
        begun: dict[Var, int] = {}
        replacing = set(block.outputs[len(block.outputs) - len(program.updates) :]) if block is program.main else set()
        brought: dict[Var, int] = {}  # values on the host -> the lines that begin to bring them
        lines: list[Line] = []
        for i, (eqn, seconds) in enumerate(zip(block.eqns, computing, strict=True)):
            sent, axes, _ = message(eqn)
            if eqn.op is begin or eqn.op is begin_move:
                begun[eqn.outputs[0]] = i
            if eqn.op in CONTROL:
                lines.append(Line(eqn, "hold"))
            elif eqn.op is finish or eqn.op is finish_move:
                kind = "finish" if eqn.params.get("wait", True) else "leave"
                lines.append(Line(eqn, kind, token=begun[next(eqn.vars)]))
                if eqn.op is finish:  # what replaces inputs is copied there, packed or not
                    size_ = max(packed_bytes(eqn), sum(y.type.bytes for y in eqn.outputs if y in replacing))
                    lines[-1].packing = costs.copies(size_)
                brought[eqn.outputs[0]] = lines[-1].token
            elif eqn.op is begin_move:
                way = self.streams.index(TO_HOST if eqn.params["to"] == HOST else TO_DEVICE)
                lines.append(Line(eqn, "begin", self.hardware.move_s(next(eqn.vars).type.bytes), way))
            elif eqn.on_host:
                size_ = sum(v.type.bytes for v in (*eqn.vars, *eqn.outputs))
                after = tuple(brought[v] for v in eqn.vars if v in brought)
                on_host = self.streams.index(ON_HOST)
                seconds = self.hardware.update_s(size_, next(eqn.vars).type.dtype)
                lines.append(Line(eqn, "begin", seconds, on_host, after=after))
            elif sent:
                link = self.links.of(axes) if self.links is not None else FREE
                stream = self.streams.index(link.name) if self.links is not None else 0
                line = Line(eqn, "begin" if eqn.op is begin else "wait", costs.message(eqn), stream, link.busy)
                line.packing = costs.copies(packed_bytes(eqn)) if eqn.op is begin else 0.0
                lines.append(line)
            else:
                lines.append(Line(eqn, "work", seconds))
        if self.moves and block is program.main:
            _wait_for_host(lines, program)
            _slow_beside_updates(lines, self.hardware)
        slow, is_gpu = self.hardware.widens, bool(self.hardware.memory)
        if compiled:  # what a compiler writes over an operand is not known
            when = moments(block, groups, there)
            reads = last_reads(block, there, when)
            remember(lines, block, owners(program, name), there, when, reads, slow, is_gpu)
        else:
            over, written, _ = self._written_over(program)
            mine = written if block is program.main else NOTHING
            lying = owners(program, name, over, written=mine)
            at = range(len(lines))
            remember(lines, block, lying, None, at, at, slow, is_gpu, mine)
        return lines


def _wait_for_host(lines: Sequence[Line], program: Program) -> None:
    """Enters which lines of the entry take inputs that the host replaced in the step before, and how long before its
    last update each was."""
    updates = program.updates
    new = dict(zip(program.main.outputs[len(program.main.outputs) - len(updates) :], updates, strict=True))
    rest, behind = 0.0, dict[str, float]()
    for line in reversed(lines):
        if line.eqn.on_host:
            behind.update((new[v], rest) for v in line.eqn.outputs if v in new)
            rest += line.seconds
    hosted = {v for line in lines if line.eqn.on_host for v in line.eqn.outputs}
    for line in lines if hosted else ():
        if not line.eqn.on_host:
            waits = [behind[v.name] for v in line.eqn.vars if v.name in behind and v.type.space == HOST]
            now = [0.0] if any(v in hosted for v in line.eqn.vars) and line.kind == "begin" else []
            line.behind = min([*waits, *now], default=None)


def _slow_beside_updates(lines: Sequence[Line], hardware: Hardware) -> None:
    """Enters that copies take longer which begin once the host has what its first update reads: it is updating then,
    until the next step waits for it."""
    first = min((max(line.after) for line in lines if line.eqn.on_host and line.after), default=len(lines))
    for line in lines[first + 1 :]:
        if line.eqn.op is o.begin_move:
            line.seconds = hardware.move_s(next(line.eqn.vars).type.bytes, updating=True)


def clock(program: Program, hardware: Hardware, links: Links | None = None, compiled: Collection[str] = ()) -> Times:
    """The times of one run of a local program; whoever asks about many that share blocks keeps a `Clock`."""
    return Clock(hardware, links, any(e.op.transfers for _, e in walk(program)))(program, compiled)


@dataclass
class _BlockWalk:
    """One program: each distinct block once."""

    clock: Clock
    program: Program
    compiled: frozenset[str]
    free: Set[int] = frozenset()
    _done: dict[tuple[str, bool], Summary] = field(default_factory=dict)

    def block(self, name: str, inside: bool) -> Summary:
        """`inside`: it is called from a compiled block, and compiled with it."""
        key = (name, inside or name in self.compiled)
        if key not in self._done:
            self._done[key] = self._summary(*key)
        return self._done[key]

    def _lines(self, name: str, compiled: bool) -> list[Line]:
        return self.clock.lines(self.program, name, compiled)

    def _summary(self, name: str, compiled: bool) -> Summary:
        count = len(self.clock.streams)
        state, totals = _unit(count), [0.0] * count
        tokens: dict[int, Row] = {}
        assumed: dict[str, None] = {}
        ahead = 0.0  # computing since the state was last brought up to date
        alive, most, where = 0, 0, ""
        for i, line in enumerate(self._lines(name, compiled)):
            inner, at = line.inner, ""
            seconds = line.seconds if line.stream not in self.free else 0.0
            packing = line.packing if 0 not in self.free else 0.0
            if line.behind is not None:
                behind = line.behind if len(state) - 1 not in self.free else 0.0
                state[0], ahead = _later(_plus(state[0], ahead), _plus(state[-1], -behind)), 0.0
            if line.kind == "work":
                ahead += seconds
                totals[0] += line.seconds
            elif line.kind != "leave":
                state[0], ahead = _plus(state[0], ahead), 0.0
                if line.kind == "hold":
                    held = self.held(line.eqn, compiled)
                    state = _times(held.matrix, state)
                    totals = [a + b for a, b in zip(totals, held.totals, strict=True)]
                    assumed.update(dict.fromkeys(held.assumed))
                    inner, at = while_turning(line, held.peak), held.at
                elif line.kind == "finish":
                    state[0] = _plus(_later(state[0], tokens[line.token]), packing)
                    totals[0] += line.packing
                else:
                    state[0] = _plus(state[0], packing)
                    totals[0] += line.packing
                    totals[line.stream] += line.seconds
                    start = state[line.stream] if line.after else _later(state[0], state[line.stream])
                    for begun in line.after:
                        start = _later(start, tokens[begun])
                    state[line.stream] = _plus(start, seconds)
                    if line.kind == "wait":
                        state[0] = state[line.stream]
                    else:
                        tokens[i] = state[line.stream]
                        ahead = line.busy * seconds
            alive += line.new
            now = alive + max(inner - line.new, 0)
            if now > most:
                most, where = now, at or line.eqn.line
            alive -= line.freed
        state[0] = _plus(state[0], ahead)
        return Summary(state, totals, most, where, tuple(assumed))

    def held(self, eqn: Eqn, inside: bool) -> Summary:
        """The blocks of one equation, as often as they run."""
        p = eqn.params
        if eqn.op in (call, custom):
            return self.block(p["block" if eqn.op is call else "forward"], inside)
        if eqn.op is scan:
            return _repeated(self.block(p["body"], inside), p["length"])
        if eqn.op is cond:
            return _dearer(self.block(p["then"], inside), self.block(p["orelse"], inside))
        test, body = self.block(p["test"], inside), self.block(p["body"], inside)
        turns = _repeated(_after(test, body), TURNS)
        return Summary(
            turns.matrix,
            turns.totals,
            turns.peak,
            turns.at,
            (*turns.assumed, f"{TURNS} turns of the loop at {eqn.line or 'an unknown line'}"),
        )

    def passages(self, name: str, inside: bool, state: Row) -> Iterator[Passage]:
        """Goes through the block from a state, which it changes; what holds blocks is what they hold."""
        compiled = inside or name in self.compiled
        tokens: dict[int, float] = {}
        for i, line in enumerate(self._lines(name, compiled)):
            if line.behind is not None:
                state[0] = max(state[0], state[-1] - line.behind)
            came, sent = state[0], None
            if line.kind == "work":
                state[0] += line.seconds
            elif line.kind == "hold":
                for ref in self._turns(line.eqn, compiled):
                    yield from self.passages(ref, compiled, state)
                continue
            elif line.kind == "finish":
                state[0] = max(state[0], tokens[line.token]) + line.packing
            elif line.kind != "leave":
                state[0] += line.packing
                start = max(state[line.stream], *([tokens[begun] for begun in line.after] or [state[0]]))
                state[line.stream] = start + line.seconds
                sent = start, state[line.stream]
                if line.kind == "wait":
                    state[0] = state[line.stream]
                else:
                    tokens[i] = state[line.stream]
                    state[0] += line.busy * line.seconds
            yield Passage(name, line, came, state[0], sent)

    def alive(self, name: str, before: int = 0) -> Iterator[tuple[tuple[object, ...], int]]:
        """What each equation does and the bytes alive while it runs, of a block and of the bodies of its scans."""
        compiled = name in self.compiled
        alive = before
        for line in self._lines(name, compiled):
            eqn, inner = line.eqn, line.inner
            if line.kind == "hold":
                inner = while_turning(line, self.held(eqn, compiled).peak)
                if eqn.op is scan:
                    yield from self.alive(eqn.params["body"], alive + line.turning + line.rows)
            alive += line.new
            yield (name, eqn.op.name, tuple(map(str, eqn.refs)), eqn.phase), alive + max(inner - line.new, 0)
            alive -= line.freed

    def peak_behind_another(self) -> int:
        """The most memory besides the inputs while values still leave that the run before did not wait for."""
        name = self.program.entry
        compiled = name in self.compiled
        lines, spans = self._lines(name, compiled), self.spans(name, [0.0] * len(self.clock.streams))
        end = spans[-1][0]
        late = [(spans[x.token][1] - end, size(list(x.eqn.vars)[1])) for x in lines if x.kind == "leave"]
        late.sort(reverse=True)  # the first to have left is the last
        behind, alive, most = sum(bytes_ for _, bytes_ in late), 0, 0
        for line, (start, _) in zip(lines, spans, strict=False):
            while late and late[-1][0] <= start:
                behind -= late.pop()[1]
            if not behind:
                break
            held = self.held(line.eqn, compiled).peak if line.kind == "hold" else 0
            inner = while_turning(line, held) if line.kind == "hold" else line.inner
            alive += line.new
            most = max(most, behind + alive + max(inner - line.new, 0))
            alive -= line.freed
        return most

    def spans(self, name: str, state: Row) -> list[tuple[float, float]]:
        """As `events`, of this block's own equations alone."""
        tokens: dict[int, float] = {}
        spans = []
        compiled = name in self.compiled
        for i, line in enumerate(self._lines(name, compiled)):
            if line.behind is not None:
                state[0] = max(state[0], state[-1] - line.behind)
            start = state[0]
            if line.kind == "work":
                state[0] += line.seconds
            elif line.kind == "hold":
                matrix = self.held(line.eqn, compiled).matrix
                state = [max(w + t for w, t in zip(row, state, strict=True)) for row in matrix]
            elif line.kind == "finish":
                state[0] = max(state[0], tokens[line.token]) + line.packing
            elif line.kind != "leave":
                state[0] += line.packing
                ready = max(state[line.stream], *([tokens[begun] for begun in line.after] or [state[0]]))
                state[line.stream] = tokens[i] = ready + line.seconds
                state[0] = state[line.stream] if line.kind == "wait" else state[0] + line.busy * line.seconds
            spans.append((start, tokens.get(i, state[0])))
        return [*spans, (state[0], state[0])]

    def _turns(self, eqn: Eqn, inside: bool) -> Iterator[str]:
        """The blocks that an equation runs, one after the other; of two branches the longer."""
        p = eqn.params
        if eqn.op is scan:
            yield from [p["body"]] * p["length"]
        elif eqn.op is loop:
            yield from [p["test"], p["body"]] * TURNS
        elif eqn.op is cond:
            yield max(p["then"], p["orelse"], key=lambda name: _seconds(self.block(name, inside)))
        else:
            yield p["block" if eqn.op is call else "forward"]


# -- times as the largest of sums


def _unit(count: int) -> Matrix:
    return [[0.0 if i == j else NEVER for j in range(count)] for i in range(count)]


def _plus(row: Row, seconds: float) -> Row:
    return [x + seconds for x in row] if seconds else row


def _later(a: Row, b: Row) -> Row:
    return [x if x > y else y for x, y in zip(a, b, strict=True)]


def _times(after: Matrix, state: Matrix) -> Matrix:
    """What a block makes of a state."""
    return [
        [max(w + row[j] for w, row in zip(weights, state, strict=True)) for j in range(len(state[0]))]
        for weights in after
    ]


def _seconds(s: Summary) -> float:
    """Of one run behind another: a stream may still be busy with what nobody waited for.  Where none is, this is the
    time from a start at which all are free to the last end."""
    return _longest(_times(s.matrix, s.matrix)) - _longest(s.matrix)


def _longest(matrix: Matrix) -> float:
    return max(max(row) for row in matrix)


def _after(first: Summary, then: Summary) -> Summary:
    totals = [a + b for a, b in zip(first.totals, then.totals, strict=True)]
    peak, at = max((first.peak, first.at), (then.peak, then.at))
    return Summary(_times(then.matrix, first.matrix), totals, peak, at, (*first.assumed, *then.assumed))


def _dearer(a: Summary, b: Summary) -> Summary:
    matrix = [_later(x, y) for x, y in zip(a.matrix, b.matrix, strict=True)]
    totals = _later(a.totals, b.totals)
    peak, at = max((a.peak, a.at), (b.peak, b.at))
    return Summary(matrix, totals, peak, at, (*a.assumed, *b.assumed))


def _repeated(s: Summary, count: int) -> Summary:
    """As often, one after the other, by squaring."""
    power, square, n = _unit(len(s.matrix)), s.matrix, count
    while n:
        power = _times(square, power) if n % 2 else power
        square, n = _times(square, square), n // 2
    return Summary(power, [x * count for x in s.totals], s.peak, s.at, s.assumed)
