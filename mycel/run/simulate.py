"""N ranks of a local program in one process, in step: every value is a list, one tensor a rank.

The reference for all that lowers: deterministic, no process group.  Ranks must agree on where control flow goes.

`simulate_stages` runs programs that differ, one for the ranks of each stage, each as far as it can: a receive waits for
its message, the end of a send until it has been received, a collective over the stages for all of them.  Where nobody
can go on, RunError says who waits for whom; and also where a stage asks for messages of another in an order that is not
theirs, which a network without tags would mix up.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.errors import RunError
from mycel.ir import (
    OPS,
    Axes,
    Block,
    Eqn,
    Layout,
    Mesh,
    Op,
    Program,
    Type,
    Var,
    call,
    cond,
    custom,
    extent,
    loop,
    part,
    scan,
)
from mycel.ops import o
from mycel.ops.collective import COMMUNICATORS, each, reduced
from mycel.run.collectives import box_of

Values = list[Any]  # one for each rank; a literal stands for itself on all
Waiting = Generator[str, None, list[Values]]  # what is waited for, and in the end what has come


def simulate(program: Program, mesh: Mesh, inputs: Sequence[Values]) -> list[Values]:
    """Run a local program on all ranks; `inputs` and results hold for each value a list over ranks."""
    if len(inputs) != len(program.inputs):
        raise RunError(f"the program takes {len(program.inputs)} inputs, was given {len(inputs)}")
    device = next((x.device for values in inputs for x in values if isinstance(x, torch.Tensor)), torch.device("cpu"))
    return _Ranks(program, mesh, device).block(program.main, list(inputs))


def simulate_stages(
    programs: Sequence[Program], mesh: Mesh, axis: str, inputs: Sequence[Sequence[Values]]
) -> list[list[Values]]:
    """Run the programs of all stages, each on the ranks of a mesh of its own; `axis` is the name of the axis of stages
    in their messages, `inputs` and results are those of `simulate` for each stage."""
    return simulate_places(programs, [mesh] * len(programs), [()] * len(programs), inputs, axis)


def simulate_places(
    programs: Sequence[Program],
    meshes: Sequence[Mesh],
    ranks: Sequence[Sequence[int]],
    inputs: Sequence[Sequence[Values]],
    axis: str = "place",
) -> list[list[Values]]:
    """The same for programs on meshes that differ, whose ranks have these numbers in the world."""
    queues = _Queues(len(programs), axis, ranks)
    stages = []
    for i, (program, mesh, given) in enumerate(zip(programs, meshes, inputs, strict=True)):
        if len(given) != len(program.inputs):
            raise RunError(f"stage {i} takes {len(program.inputs)} inputs, was given {len(given)}")
        device = next(
            (x.device for values in given for x in values if isinstance(x, torch.Tensor)), torch.device("cpu")
        )
        stages.append(_StageRanks(program, mesh, device, i, queues))
    waiting = dict(enumerate(stage.run(list(given)) for stage, given in zip(stages, inputs, strict=True)))
    reasons: dict[int, str] = {}
    while waiting:
        before = queues.moves
        for i, steps in list(waiting.items()):
            try:
                reasons[i] = next(steps)
            except StopIteration:
                del waiting[i]
                queues.moves += 1
        if waiting and queues.moves == before:
            lines = "\n".join(f"  stage {i}   {reasons[i]}" for i in waiting)
            raise RunError(f"the stages wait for each other and nobody can go on\n{lines}")
    if queues.messages:
        source, target, tag = next(iter(queues.messages))
        raise RunError(f"stage {source} has sent message {tag} to stage {target}, which never received it")
    queues.refuse_order()
    return [stage.results for stage in stages]


@dataclass
class _Queues:
    """Messages under way between stages, and what they have put into collectives so far; `moves` counts what has
    happened."""

    stages: int
    axis: str
    ranks: Sequence[Sequence[int]] = ()  # of each stage, by their number in the world
    messages: dict[tuple[int, int, int], list[Values]] = field(default_factory=dict)
    boards: dict[int, dict[int, tuple[Eqn, list[Values]]]] = field(default_factory=dict)
    moves: int = 0
    sent: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # tags of messages from stage to stage
    asked: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def ask(self, source: int, target: int, tag: int) -> None:
        self.asked.setdefault((source, target), []).append(tag)

    def refuse_order(self) -> None:
        """Networks without tags give what is sent first to who asks first."""
        for (source, target), tags in self.sent.items():
            if tags != self.asked.get((source, target)):
                asked = self.asked.get((source, target))
                raise RunError(f"stage {source} sends messages {tags} to stage {target}, which asks for {asked}")

    def put(self, source: int, target: int, tag: int, values: list[Values]) -> None:
        if (source, target, tag) in self.messages:
            raise RunError(f"stage {source} has sent message {tag} to stage {target} twice")
        self.messages[source, target, tag] = values
        self.sent.setdefault((source, target), []).append(tag)
        self.moves += 1

    def take(self, source: int, target: int, tag: int) -> list[Values]:
        self.moves += 1
        return self.messages.pop((source, target, tag))


class _SimulatedRank:
    """What a kernel that knows its rank may ask; what needs the others is done by `_Ranks`."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank

    def index(self, axes: Axes) -> int:
        return self.mesh.index(self.rank, axes)


class _Ranks:
    def __init__(self, program: Program, mesh: Mesh, device: torch.device) -> None:
        self.program, self.mesh, self.n, self.device = program, mesh, mesh.world, device
        self.ranks = [_SimulatedRank(mesh, r) for r in range(self.n)]

    def named(self, name: str, inputs: list[Values]) -> list[Values]:
        return self.block(self.program.blocks[name], inputs)

    def block(self, block: Block, inputs: list[Values]) -> list[Values]:
        values: dict[Var, Values] = dict(zip(block.inputs, inputs, strict=True))
        for eqn in block.eqns:
            args = [values[x] if isinstance(x, Var) else [x] * self.n for x in eqn.inputs]
            values.update(zip(eqn.outputs, self.eqn(eqn, args), strict=True))
        return [values[x] if isinstance(x, Var) else [x] * self.n for x in block.outputs]

    def eqn(self, eqn: Eqn, args: list[Values]) -> list[Values]:
        p: Mapping[str, Any] = eqn.params
        if eqn.op is call:
            return self.named(p["block"], args)
        if eqn.op is custom:
            return self.named(p["forward"], args)
        if eqn.op is cond:
            return self.named(p["then" if self.agreed(args[0], eqn) else "orelse"], args[1:])
        n = p.get("consts", 0)
        if eqn.op is loop:
            held, state = args[:n], args[n:]
            while self.agreed(self.named(p["test"], held + state)[0], eqn):
                state = self.named(p["body"], held + state)
            return state
        if eqn.op is scan:
            return self.scan(p, args, n, n + p.get("carry", 0))
        if eqn.op is o.const:
            return [[self.program.consts[p["name"]].to(self.device)] * self.n]
        if eqn.op is o.begin:
            return [[torch.tensor(0)] * self.n]  # a token
        if eqn.op is o.finish:
            return self.finished(p, args[1:])
        if eqn.op.collective is not None:
            return [self.together(eqn.op, args[0] if len(args) == 1 else list(zip(*args, strict=True)), p)]
        return self.each(eqn, args)

    def each(self, eqn: Eqn, args: list[Values]) -> list[Values]:
        """A kernel on every rank by itself."""
        outs = []
        extra = {"device": self.device} if "device" in eqn.op.defaults else {}
        for r, rank in enumerate(self.ranks):
            COMMUNICATORS.append(rank)
            try:
                results = eqn.op.kernel(*(a[r] for a in args), **eqn.params, **extra)
            finally:
                COMMUNICATORS.pop()
            is_stack = len(eqn.outputs) == 1 and eqn.outputs[0].type.depth > 0
            outs.append(list(results) if isinstance(results, (tuple, list)) and not is_stack else [results])
        return [list(column) for column in zip(*outs, strict=True)]

    def scan(self, p: Mapping[str, Any], args: list[Values], n: int, m: int) -> list[Values]:
        held, state, xs = args[:n], args[n:m], args[m:]
        turns = range(p["length"])
        rows: list[list[Values]] = []
        for i in reversed(turns) if p.get("reverse") else turns:
            outs = self.named(p["body"], held + state + [[x[i] for x in column] for column in xs])
            state = outs[: m - n]
            rows.append(outs[m - n :])
        if p.get("reverse"):
            rows.reverse()
        if rows:
            return state + [
                [torch.stack(list(mine)) for mine in zip(*column, strict=True)] for column in zip(*rows, strict=True)
            ]
        body = self.program.blocks[p["body"]].outputs[m - n :]
        return state + [
            [torch.empty((0, *v.shape), dtype=v.dtype, device=self.device) for _ in range(self.n)]
            for v in body
            if isinstance(v, Var)
        ]

    def agreed(self, test: Values, eqn: Eqn) -> bool:
        answers = {bool(t) for t in test}
        if len(answers) != 1:
            raise RunError(
                f"ranks disagree about {eqn.op.name}: {[bool(t) for t in test]}\n  at        {eqn.line or 'unknown'}"
            )
        return answers.pop()

    # -- what ranks say to each other

    def group(self, xs: Values, axes: Axes, rank: int) -> list[torch.Tensor]:
        return [xs[r] for r in self.mesh.group(rank, axes)]

    def together(self, op: Op, xs: Values, params: Mapping[str, Any]) -> Values:
        """What each rank gets of a collective, by its meaning."""
        assert op.collective is not None
        axes = params["axes"]
        return [
            op.collective.meaning(self.group(xs, axes, r), self.mesh.index(r, axes), **params) for r in range(self.n)
        ]

    def finished(self, p: Mapping[str, Any], args: list[Values]) -> list[Values]:
        """What was begun, tensor by tensor."""
        how, op = {k: v for k, v in p.items() if k != "op"}, OPS[p["op"]]
        if op.collective is not None and op.collective.counted:
            return [self.together(op, list(zip(*args, strict=True)), each(0, **how))]
        return [self.together(op, xs, each(i, **how)) for i, xs in enumerate(args)]


class _StageRanks(_Ranks):
    """The ranks of one stage, which wait for those of others."""

    def __init__(self, program: Program, mesh: Mesh, device: torch.device, stage: int, queues: _Queues) -> None:
        super().__init__(program, mesh, device)
        self.stage, self.queues, self.results = stage, queues, list[Values]()
        self.collectives = 0

    def run(self, inputs: list[Values]) -> Iterator[str]:
        """Goes on until it has to wait, and says what for."""
        block = self.program.main
        values: dict[Var, Values] = dict(zip(block.inputs, inputs, strict=True))
        for eqn in block.eqns:
            args = [values[x] if isinstance(x, Var) else [x] * self.n for x in eqn.inputs]
            values.update(zip(eqn.outputs, (yield from self.waited(eqn, args)), strict=True))
        self.results = [values[x] if isinstance(x, Var) else [x] * self.n for x in block.outputs]

    def waited(self, eqn: Eqn, args: list[Values]) -> Waiting:
        """An equation of the entry."""
        p, queues, token = eqn.params, self.queues, [[torch.tensor(0)] * self.n]
        at = f"at {eqn.line or 'the end of the step'}"
        if eqn.op is o.begin_send:
            queues.put(self.stage, p["to"], p["tag"], args)
            return token
        if eqn.op is o.finish_send:
            while (self.stage, p["to"], p["tag"]) in queues.messages:
                yield f"{at}: waits until stage {p['to']} has received message {p['tag']}"
            return token
        if eqn.op is o.begin_receive:
            queues.ask(p["source"], self.stage, p["tag"])
            return token
        if eqn.op is o.finish_receive:
            while (p["source"], self.stage, p["tag"]) not in queues.messages:
                yield f"{at}: waits for message {p['tag']} of stage {p['source']}"
            sent = queues.take(p["source"], self.stage, p["tag"])
            for v, xs in zip(eqn.outputs, sent, strict=True):
                if any((tuple(x.shape), x.dtype) != (v.shape, v.dtype) for x in xs):
                    raise RunError(f"stage {self.stage} receives {v}, was sent {tuple(xs[0].shape)} {xs[0].dtype}")
            return sent
        if eqn.op is o.begin_send_across:
            queues.put(self.stage, p["to"], p["tag"], args)
            return token
        if eqn.op is o.finish_send_across:
            while (self.stage, p["to"], p["tag"]) in queues.messages:
                yield f"{at}: waits until stage {p['to']} has received message {p['tag']}"
            return token
        if eqn.op is o.begin_receive_across:
            queues.ask(p["source"], self.stage, p["tag"])
            return token
        if eqn.op is o.finish_receive_across:
            while (p["source"], self.stage, p["tag"]) not in queues.messages:
                yield f"{at}: waits for message {p['tag']} of stage {p['source']}"
            return [self.pieced(eqn, queues.take(p["source"], self.stage, p["tag"])[0])]
        if p.get("axes") == (queues.axis,) and eqn.op is not o.begin:
            return (yield from self.between_stages(eqn, args, at))
        return self.eqn(eqn, args)

    def pieced(self, eqn: Eqn, sent: Values) -> Values:
        """What each rank gets of a message from another mesh, piece by piece."""
        source, own = (self.queues.ranks[i] for i in (eqn.params["source"], self.stage))
        parts = [torch.zeros(eqn.outputs[0].shape, dtype=eqn.outputs[0].dtype, device=self.device) for _ in own]
        for a, b, start, put, shape in eqn.params["pieces"]:
            piece = box_of(sent[source.index(a)], start, shape)
            box_of(parts[own.index(b)], put, shape).copy_(piece)
        return parts

    def between_stages(self, eqn: Eqn, args: list[Values], at: str) -> Waiting:
        """A collective over the stages: ranks of the same place in each."""
        board = self.queues.boards.setdefault(self.collectives, {})
        self.collectives += 1
        board[self.stage] = eqn, args[1:] if eqn.op is o.finish else args
        self.queues.moves += 1
        while len(board) < self.queues.stages:
            missing = [str(i) for i in range(self.queues.stages) if i not in board]
            yield f"{at}: waits in {eqn.op.name} for stage {', '.join(missing)}"
        if len({(e.op.name, str(e.params)) for e, _ in board.values()}) > 1:
            raise RunError(f"stages meet in different collectives: {[e.op.name for e, _ in board.values()]}")
        p: Mapping[str, Any] = eqn.params
        op = OPS[p["op"]] if eqn.op is o.finish else eqn.op
        how = {k: v for k, v in p.items() if k != "op"}
        assert op.collective is not None
        return [
            [
                op.collective.meaning(
                    [board[s][1][i][r] for s in range(self.queues.stages)],
                    self.stage,
                    **(each(i, **how) if eqn.op is o.finish else how),
                )
                for r in range(self.n)
            ]
            for i in range(len(board[self.stage][1]))
        ]


# -- between a whole tensor and the parts of all ranks


def spread_out(x: torch.Tensor, layout: Layout, mesh: Mesh) -> Values:
    """A tensor as the ranks hold it; padding is zero, and of a partial sum the first rank holds all."""
    return [part_of(x, layout, mesh, r) for r in range(mesh.world)]


def part_of(x: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """What one rank holds."""
    at = mesh.coordinates(rank)
    for d, axes in enumerate(layout.dims):
        if axes:
            start, count = extent(x.shape[d], axes, mesh, at)
            stored = part(x.shape[d], axes, mesh)
            mine = x.narrow(d, min(start, x.shape[d]), count)
            x = (
                torch.cat([mine, x.new_zeros([stored - count if e == d else n for e, n in enumerate(mine.shape)])], d)
                if count < stored
                else mine
            )
    if any(kind == "+" and at[axis] for axis, kind in layout.partial):
        x = torch.zeros_like(x)
    return x


def put_together(xs: Values, layout: Layout, type: Type, mesh: Mesh) -> torch.Tensor:
    """The whole of what the ranks hold; RunError where replicas differ."""
    xs = list(xs)
    for kind in dict.fromkeys(k for _, k in layout.partial):
        axes = tuple(a for a, k in layout.partial if k == kind)
        xs = [reduced([xs[r] for r in mesh.group(rank, axes)], kind) for rank in range(mesh.world)]
    whole = torch.zeros(type.shape, dtype=type.dtype, device=xs[0].device)
    seen = torch.zeros(type.shape, dtype=torch.bool, device=xs[0].device)
    for rank, x in enumerate(xs):
        at = mesh.coordinates(rank)
        extents = [extent(n, axes, mesh, at) for n, axes in zip(type.shape, layout.dims, strict=True)]
        here = tuple(slice(start, start + count) for start, count in extents)
        mine = x[tuple(slice(0, count) for _, count in extents)]
        if bool(seen[here].any()) and not _same(whole[here], mine):
            raise RunError(
                f"ranks that should hold the same part of {type} in {layout} hold different ones (rank {rank})"
            )
        whole[here], seen[here] = mine, True
    return whole


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_floating_point() and a.itemsize == 1:  # torch compares none in 8 bits
        a, b = a.float(), b.float()
    return (
        torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
        if a.is_floating_point() or a.is_complex()
        else bool((a == b).all())
    )
