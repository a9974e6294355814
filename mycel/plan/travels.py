"""What a step moves between host and device, for people: how large it is, when it leaves and comes back, and whether
computing waits for it.

moved            h: 64.00 MiB, away for 12.10 ms; leaves 1.20 - 2.40 ms, back 14.50 - 15.70 ms, hidden
                 w.exp_avg: 16.00 MiB, lives there; comes 20.00 - 20.30 ms (waited for 0.10 ms), leaves 20.40 - 20.70
                 ms; away for up to 21.50 ms
                 w: 16.00 MiB, lives there; comes 0.00 - 0.30 ms, updated there 21.00 - 22.10 ms with 32.00 MiB of
                 state; away for up to 20.20 ms, hidden
                 d_w: 16.00 MiB, leaves for good 18.00 - 18.30 ms, hidden
                 w.part: 8.00 MiB, away for 1.40 ms; leaves 18.00 - 18.20 ms, updated there 18.30 - 19.40 ms with 16.00
                 MiB of state, back 19.60 - 19.80 ms, hidden
                 gradients: none, as each part of the batch adds to their sums; …
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from mycel.ir import HOST, Eqn, Program, Var, chains, order
from mycel.plan.clock import Clock
from mycel.plan.host_update import column
from mycel.plan.offload import Offload
from mycel.sizes import shown, span


@dataclass
class Copy:
    """One way: seconds from the start of the block; `waited`: how long computing stood still for it."""

    start: float
    end: float
    waited: float

    def __str__(self) -> str:
        waited = f" (waited for {span(self.waited)})" if self.waited > 1e-9 else ""
        return f"{span(self.start)} - {span(self.end)}{waited}"


@dataclass
class RoundTrip:
    """A value and its copies; `home`: it lives on the host, and is not on the device for so many seconds in a row
    (`away`).  It may be `updated` there."""

    value: Var
    home: bool
    away: float = 0.0
    leaves: list[Copy] = field(default_factory=list)
    comes: list[Copy] = field(default_factory=list)
    updated: str = ""

    @property
    def waited(self) -> float:
        return sum(copy.waited for copy in (*self.leaves, *self.comes))

    def __str__(self) -> str:
        hidden = "" if self.waited > 1e-9 else ", hidden"
        if self.home:
            there = [self.updated] if self.updated else []
            ways = ", ".join([*(f"comes {c}" for c in self.comes), *(f"leaves {c}" for c in self.leaves), *there])
            apart = f"; away for up to {span(self.away)}" if self.comes else ""
            return f"{self.value.name}: {shown(self.value.type.bytes)}, lives there; {ways}{apart}{hidden}"
        if not self.comes:
            return f"{self.value.name}: {shown(self.value.type.bytes)}, leaves for good {self.leaves[0]}{hidden}"
        away = self.comes[0].start - self.leaves[0].end
        updated = f", {self.updated}" if self.updated else ""
        back = "".join(f", back {c}" for c in self.comes)
        return (
            f"{self.value.name}: {shown(self.value.type.bytes)}, away for {span(away)}; "
            f"leaves {self.leaves[0]}{updated}{back}{hidden}"
        )


def travels(program: Program, clock: Clock, compiled: Collection[str] = ()) -> Iterator[RoundTrip]:
    """Every value that a program moves, block by block."""
    for name in order(program):
        if any(e.op.transfers for e in program.blocks[name].eqns):
            yield from _of_block(program, name, clock, compiled)


def staying(program: Program, offload: Offload, in_parts: bool) -> Iterator[str]:
    """Kinds of values that a plan has on the host and of which a program moves none, and why; `in_parts`: it adds up
    what parts of the batch bring."""
    of_phase = {"forward": "activations", "backward": "gradients"}
    moved = set[str]()
    for block in program.blocks.values():
        phases = {v: e.phase for e in block.eqns for v in e.outputs}
        leaving = [v for e in block.eqns if e.op.transfers and e.op.effect and e.params["to"] == HOST for v in e.vars]
        moved.update(of_phase.get(phases.get(v, ""), "") for v in leaving)
    for kind in of_phase.values():
        if getattr(offload, kind) == "host" and kind not in moved:
            sooner = "none, as each is read again sooner than its copies there and back would take"
            added = "none, as each part of the batch adds to their sums; with one part (microbatches: 1) they can leave"
            yield f"{kind}: {added if in_parts and kind == 'gradients' else sooner}"


def _of_block(program: Program, name: str, clock: Clock, compiled: Collection[str]) -> Iterator[RoundTrip]:
    block, spans = program.blocks[name], clock.spans(program, name, compiled)
    arrived: dict[Var, tuple[float, float]] = {}  # tokens -> when the copy begins and ends
    inputs, updates = set(block.inputs), dict[Var, Var]()
    if name == program.entry and program.updates:
        by_name = {v.name: v for v in block.inputs}
        new = zip(program.updates, block.outputs[len(block.outputs) - len(program.updates) :], strict=True)
        updates = {x: by_name[k] for k, x in new if isinstance(x, Var) and by_name[k].type.space == HOST}
    trips: dict[Var, RoundTrip] = {}
    stays: dict[Var, list[tuple[float, float]]] = {}  # inputs -> when they are on the device
    uses = chains(block)
    lines = clock.lines(program, name, name in compiled)
    for eqn, line, (start, end) in zip(block.eqns, lines, spans, strict=False):
        for p, replaced, text in _updated(eqn, end - line.seconds, end) if eqn.on_host else ():
            travel = trips[replaced] = trips.setdefault(p, RoundTrip(p, True))
            travel.updated = text
        if not eqn.op.transfers:
            continue
        if eqn.op.effect:
            arrived[eqn.outputs[0]] = end - line.seconds, end
            continue
        token, x, result = *eqn.vars, eqn.outputs[0]
        copy = Copy(*arrived[token], end - start)
        if eqn.params["to"] == HOST:
            home = updates.get(result)
            travel = trips.setdefault(home or x, RoundTrip(home or x, home is not None))
            travel.leaves.append(copy)
            trips[result] = travel
        else:
            trips.setdefault(x, RoundTrip(x, x in inputs)).comes.append(copy)
            stays.setdefault(x, []).append(
                (copy.start, max((spans[i][1] for i in uses[result].uses), default=copy.end))
            )
    for x, there in stays.items():
        left = [copy.end for copy in trips[x].leaves]
        ends = [*(end for _, end in there[:-1]), max([there[-1][1], *left])]
        starts = [*(start for start, _ in there[1:]), there[0][0] + spans[-1][1]]  # the next step begins
        trips[x].away = max(max(start - end, 0.0) for start, end in zip(starts, ends, strict=True))
    return iter({id(t): t for t in trips.values()}.values())


def _updated(eqn: Eqn, start: float, end: float) -> Iterator[tuple[Var, Var, str]]:
    """Parameters of an update on the host, what replaces them, and when it runs."""
    for i in range(eqn.params["count"]):
        (p, *state), (new, *_), _ = column(eqn, i)
        held = shown(sum(v.type.bytes for v in state))
        yield p, new, f"updated there {span(start)} - {span(end)} with {held} of state"
