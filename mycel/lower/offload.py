"""Values that a plan has on the host leave the device and come back; inputs that lie there come and go.

    h = gelu(a)                                  h = gelu(a)
    y = linear(h, w)                             t = begin_move(h, to="host")
    …                                            y = linear(h, w)
    dh = matmul(dy, w)                           …
    dw = linear_weight(dy, h)            =>      h.host = finish_move(t, h, to="host")
                                                 …
                                                 u = begin_move(h.host, to="device")
                                                 dh = matmul(dy, w)
                                                 h.back = finish_move(u, h.host, to="device")
                                                 dw = linear_weight(dy, h.back)

    p1, p2, m1, m2 = adam(p1, p2, m1, m2, …)     p1, m1 = adam(p1, m1, …)
                                         =>      p2, m2 = adam(p2, m2, …)            and each m moved, as above

    g1, g2 = backward(…)                         g1, g2 = backward(…)
    norm = global_norm(g1, g2)           =>      g1.norm = global_norm(g1);  g2.norm = global_norm(g2)
                                                 norm = global_norm(g1.norm, g2.norm)       where gradients may leave,
                                                 and zeros that a sum begins with are made where it does

    p1, m1 = adam(p1, m1, g1, …, skip)           t = begin_move(g1, to="host")                 where it is made
    …                                    =>      …
                                                 g1.host = finish_move(t, g1, to="host");  skip.host likewise
                                                 p1.new, m1.new = adam(p1, m1, g1.host, …, skip.host)
                                                 on the host, last; where p1 is a part made in the step, it goes
                                                 there with g1 and comes back behind the update, in its place

Last of all passes, so that a plan's places are those of the program that runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from mycel.errors import PlanError
from mycel.ir import DEVICE, HOST, PHASES, Atom, Block, Builder, Eqn, Op, Params, Program, Var, chains, lookup
from mycel.ops import o
from mycel.ops.space import TOKEN
from mycel.plan import MovedValue, Offloaded, StreamedInput, close_names, equation_key, handed_to


def offload(program: Program, plan: Offloaded) -> Program:
    """The program with the moves of a plan."""
    program = gradients_may_leave(program) if plan.norms else program
    return with_copies(split_updates(program, {s.input for s in plan.streamed}, plan.chunk, plan.updated), plan)


def with_copies(program: Program, plan: Offloaded) -> Program:
    """The same of a program whose updates and norms are taken in parts already."""
    passed_on = handed_to(program, plan.inside.keys(), {s.input for s in plan.streamed})
    outputs = program.main.outputs
    new = dict(zip(program.updates, outputs[len(outputs) - len(program.updates) :], strict=True))
    blocks = dict(program.blocks)
    for name in dict.fromkeys((plan.body, *plan.inside, program.entry)):
        is_entry = name == program.entry
        hosted = hosted_updates(program, plan.updated) if is_entry else ()
        moves = _HostCopies(blocks[name], passed_on.keys() if is_entry else (), hosted)
        for moved in plan.moved if name == plan.body else ():
            moves.away(moved)
        for inside in plan.inside.get(name, ()):
            moves.stream(inside, None)
        for streamed in plan.streamed if is_entry else ():
            moves.stream(streamed, new.get(streamed.input))
        for i in moves.hosted:
            moves.update_on_host(i, plan.updated)
        blocks[name] = moves.block()
    return replace(program, blocks=blocks)


@dataclass
class _HostCopies:
    """A block, and what is to be written before each of its equations: copies that have ended, copies that begin,
    copies that are waited for; and behind it."""

    old: Block
    passed_on: Collection[tuple[int, Var]] = ()  # equations that take an input as it lies
    hosted: Collection[int] = ()  # equations that run on the host
    ended: dict[int, list[Eqn]] = field(default_factory=dict)
    begun: dict[int, list[tuple[int, Eqn]]] = field(default_factory=dict)  # with who reads it first
    awaited: dict[int, list[Eqn]] = field(default_factory=dict)
    behind: dict[int, list[Eqn]] = field(default_factory=dict)
    read: dict[tuple[int, Var], Var] = field(default_factory=dict)  # what an equation reads instead
    inputs: dict[Var, Atom] = field(default_factory=dict)
    outputs: dict[Var, Atom] = field(default_factory=dict)
    scalars: dict[Var, Var] = field(default_factory=dict)  # that are on the host, too
    there: dict[int, list[Eqn]] = field(default_factory=dict)  # what runs on the host, and what comes back at once
    last: list[Eqn] = field(default_factory=list)  # what does so behind all others

    def __post_init__(self) -> None:
        self.uses = chains(self.old)
        self.at = {equation_key(i, e): i for i, e in enumerate(self.old.eqns)} | {"": len(self.old.eqns)}
        self.vars = {v.name: v for v in self.uses}
        self.names = Builder(names_of=self.old)

    def away(self, moved: MovedValue) -> None:
        """A value that leaves and comes back."""
        v = self._var(moved.value)
        freed, fetched = self._place(moved.freed), self._place(moved.fetched)
        use = next((i for i in self.uses[v].uses if i >= freed), None)
        if self.uses[v].defined < 0 or not self.uses[v].defined < freed <= fetched or use is None or use < fetched:
            raise PlanError(
                f"decided: {moved.value} cannot leave before {moved.freed or 'the end'} and come back before "
                f"{moved.fetched or 'the end'}: it is read in between\n  try       plan.given, to decide anew"
            )
        host = self._leave(v, freed)
        self._come(v, host, fetched, [i for i in self.uses[v].uses if i >= fetched])

    def stream(self, streamed: StreamedInput, new: Atom) -> None:
        """An input that lies on the host; `new` replaces it."""
        v = self._var(streamed.input)
        host = self.inputs[v] = Var(v.name, v.type.on(HOST))
        places = sorted(map(self._place, streamed.fetched))
        readers = [i for i in self.uses[v].uses if (i, v) not in self.passed_on and i not in self.hosted]
        self.read.update(((i, v), host) for i in self.uses[v].uses if (i, v) in self.passed_on)
        for place, end in zip(places, [*places[1:], len(self.old.eqns) + 1], strict=False):
            self._come(v, host, place, [i for i in readers if place <= i < end])
        if any(i < min(places, default=0) for i in readers) or (readers and not places):
            raise PlanError(f"decided: {v.name} is read before it comes\n  try       plan.given, to decide anew")
        if isinstance(new, Var) and self.uses[new].defined in self.hosted:
            return
        if isinstance(new, Var) and self.uses[new].defined >= 0:
            self.outputs[new] = self._leave(new, self._place(streamed.freed))
        elif isinstance(new, Var):
            self.outputs[new] = self.inputs.get(new, new)

    def update_on_host(self, i: int, freed: Mapping[str, str]) -> None:
        """An update of parameters whose state lives on the host; `freed`: by parameter, where its gradient has left."""
        eqn = self.old.eqns[i]
        count, replaced = eqn.params["count"], len(eqn.outputs)
        params = [v for v in eqn.inputs[:count] if isinstance(v, Var)]
        lives = params[0] in self.inputs
        read: list[Atom] = [*params] if lives else [self._leave(p, i) for p in params]
        read = [lookup(x, self.inputs) for x in (*read, *eqn.inputs[count:replaced])]
        for p, g in zip(params, eqn.inputs[replaced : replaced + count], strict=True):
            assert isinstance(g, Var)
            place = self._place(freed[p.name])
            read.append(self._leave(g, place if lives else min(place, i)))
        for x in eqn.inputs[replaced + count :]:
            read.append(self._scalar(x, i) if isinstance(x, Var) and not self._is_hyper(x) else x)
        new = tuple(Var(self.names.name(f"{v.name}.host"), v.type.on(HOST)) for v in eqn.outputs)
        self.outputs.update(zip(eqn.outputs, new, strict=True))
        update = replace(eqn, inputs=tuple(read), outputs=new)
        if lives:
            self.last.append(update)
            return
        back = [self._come_back(*pair, eqn) for pair in zip(eqn.outputs[:count], new, strict=False)]
        self.there[i] = [update, *back]

    def _come_back(self, v: Var, host: Var, eqn: Eqn) -> Eqn:
        """A new value from the host, which v would be: how it begins to come."""
        token, back = self._token(), Var(self.names.name(f"{v.name}.back"), v.type)
        first = min((*self.uses[v].uses, len(self.old.eqns)))
        self.awaited.setdefault(first, []).append(_half(o.finish_move, (token, host), back, DEVICE, eqn))
        self.read.update(((i, v), back) for i in self.uses[v].uses)
        self.outputs[v] = back
        return _half(o.begin_move, (host,), token, DEVICE, eqn)

    def _is_hyper(self, v: Var) -> bool:
        """A number that is given with each step, on the host already."""
        return self.uses[v].defined < 0 and v.dtype == torch.float64

    def _scalar(self, v: Var, at: int) -> Var:
        """A number that the device has (is the step skipped, what are gradients divided by), on the host: of a copy,
        since the step may go on to change it."""
        if v not in self.scalars:
            copy, token = Var(self.names.name(f"{v.name}.copy"), v.type), self._token()
            host = self.scalars[v] = Var(self.names.name(f"{v.name}.host"), v.type.on(HOST))
            eqn = self.old.eqns[at]
            copied = Eqn(o.mul, (v, 1.0), Params(), (copy,), eqn.source, eqn.phase)
            begun = _half(o.begin_move, (copy,), token, HOST, eqn)
            self.ended.setdefault(at, []).extend(
                (copied, begun, _half(o.finish_move, (token, copy), host, HOST, eqn, wait=False))
            )
        return self.scalars[v]

    def _leave(self, v: Var, freed: int) -> Var:
        """Begins where the value is made, has ended before `freed`."""
        defined = self.uses[v].defined
        maker = self.old.eqns[defined]
        token, host = self._token(), Var(self.names.name(f"{v.name}.host"), v.type.on(HOST))
        self.behind.setdefault(defined, []).append(_half(o.begin_move, (v,), token, HOST, maker))
        place = max(freed, defined + 1)
        later = {"wait": False} if place == len(self.old.eqns) else {}  # the step ends: the next one goes on
        self.ended.setdefault(place, []).append(_half(o.finish_move, (token, v), host, HOST, maker, **later))
        return host

    def _come(self, v: Var, host: Var, place: int, readers: list[int]) -> None:
        """Begins before `place`, is there where it is first read."""
        if not readers:
            return
        earliest = min((self.old.eqns[i].phase for i in readers), key=PHASES.index)
        reader = replace(self.old.eqns[readers[0]], phase=earliest)
        token, back = self._token(), Var(self.names.name(f"{v.name}.back"), v.type.on(DEVICE))
        self.begun.setdefault(place, []).append((readers[0], _half(o.begin_move, (host,), token, DEVICE, reader)))
        self.awaited.setdefault(readers[0], []).append(_half(o.finish_move, (token, host), back, DEVICE, reader))
        self.read.update(((i, v), back) for i in readers)

    def _token(self) -> Var:
        return Var(self.names.name("moving"), TOKEN)

    def block(self) -> Block:
        eqns: list[Eqn] = []
        for i in range(len(self.old.eqns) + 1):
            begun = sorted(self.begun.get(i, ()), key=lambda each: each[0])  # what is read first comes first
            eqns += [*self.ended.get(i, ()), *(eqn for _, eqn in begun), *self.awaited.get(i, ())]
            eqns += self.there.get(i, ())
            if i < len(self.old.eqns) and i not in self.hosted:
                eqn = self.old.eqns[i]
                values = tuple(self.read.get((i, x), x) if isinstance(x, Var) else x for x in eqn.inputs)
                eqns.append(eqn if values == eqn.inputs else replace(eqn, inputs=values))
                eqns += self.behind.get(i, ())
        eqns += self.last
        inputs = tuple(lookup(v, self.inputs) for v in self.old.inputs)
        outputs = tuple(lookup(x, self.outputs) for x in self.old.outputs)
        return Block(inputs, tuple(eqns), outputs)  # type: ignore[arg-type]

    def _var(self, name: str) -> Var:
        if name not in self.vars:
            near = close_names(name, self.vars)
            raise PlanError(
                f"decided: there is no value {name} to move, among {len(self.vars)} of its block{near}\n"
                "  try       plan.given, to decide anew"
            )
        return self.vars[name]

    def _place(self, name: str) -> int:
        if name not in self.at:
            near = close_names(name, self.at)
            raise PlanError(
                f"decided: there is no equation that makes {name}{near}\n  try       plan.given, to decide anew"
            )
        return self.at[name]


def _half(op: Op, inputs: tuple[Var, ...], out: Var, to: str, of: Eqn, **more: bool) -> Eqn:
    return Eqn(op, inputs, Params(to=to, **more), (out,), of.source, of.phase)


def gradients_may_leave(program: Program) -> Program:
    """A step in which nothing but an update, or a sum, reads a gradient once it is made."""
    return late_zeros(norms_of_each(program))


def late_zeros(program: Program) -> Program:
    """What is made of nothing and read once (the zeros that a sum begins with) is made where it is read, and takes no
    memory before."""
    block, uses = program.main, chains(program.main)
    before: dict[int, list[Eqn]] = {}
    for eqn in block.eqns:
        at = [i for v in eqn.outputs for i in uses[v].uses]
        is_output = any(uses[v].is_output for v in eqn.outputs)
        if not list(eqn.vars) and not eqn.op.effect and len(at) == 1 and not is_output:
            before.setdefault(at[0], []).append(eqn)
    late = {id(eqn) for each in before.values() for eqn in each}
    eqns: list[Eqn] = []
    for i, eqn in enumerate(block.eqns):
        eqns += before.get(i, ())
        eqns += () if id(eqn) in late else (eqn,)
    return replace(program, blocks={**program.blocks, program.entry: replace(block, eqns=tuple(eqns))})


def norms_of_each(program: Program) -> Program:
    """Norms of several gradients in the entry as norms of the norm of each, which is taken where the gradient is made:
    to the bit the same, and from there on nobody reads the gradient before its update."""
    block, uses = program.main, chains(program.main)
    names = Builder(names_of=block)
    behind: dict[int, list[Eqn]] = {}
    norms: dict[tuple[int, Var], Var] = {}
    for i, eqn in enumerate(block.eqns):
        for v in eqn.vars if eqn.op is o.global_norm and len(eqn.inputs) > 1 else ():
            defined = uses[v].defined
            if defined >= 0 and v.type.ndim and block.eqns[defined].phase == "backward":
                norm = norms[i, v] = Var(names.name(f"{v.name}.norm"), eqn.outputs[0].type)
                own = Eqn(o.global_norm, (v,), Params(), (norm,), eqn.source, "backward")
                behind.setdefault(defined, []).append(own)
    eqns: list[Eqn] = []
    for i, eqn in enumerate(block.eqns):
        values = tuple(norms.get((i, x), x) if isinstance(x, Var) else x for x in eqn.inputs)
        eqns += [eqn if values == eqn.inputs else replace(eqn, inputs=values), *behind.get(i, ())]
    return replace(program, blocks={**program.blocks, program.entry: replace(block, eqns=tuple(eqns))})


def hosted_updates(program: Program, updated: Collection[str]) -> tuple[int, ...]:
    """Updates in the entry of parameters that the host updates."""
    first = [(i, next(eqn.vars, None)) for i, eqn in enumerate(program.main.eqns) if eqn.op.hosted and eqn.op.inplace]
    return tuple(i for i, v in first if v is not None and v.name in updated)


def split_updates(program: Program, inputs: Collection[str], chunk: int, hosted: Collection[str] = ()) -> Program:
    """Updates in the entry that replace these inputs, in several: each of at most `chunk` bytes of them, and of one
    parameter at least; those of `hosted`, which run on the host, apart and first, so that what they need from the
    device is there while it updates the others."""
    eqns: list[Eqn] = []
    given = {v.name for v in program.main.inputs}
    for eqn in program.main.eqns:
        count = eqn.params.get("count", 1)
        if eqn.op.inplace is None or count == 1 or not any(v.name in inputs for v in eqn.vars):
            eqns.append(eqn)
            continue
        old = len(eqn.outputs)  # operands that are replaced: parameters, then each slot of their state
        slots = old // count
        sizes = [sum(v.type.bytes for v in _column(eqn, i, count, slots) if v.name in inputs) for i in range(count)]
        first = [x.name if isinstance(x, Var) else "" for x in eqn.inputs[:count]]
        apart: dict[tuple[bool, bool], list[int]] = {}
        for i in range(count):
            is_hosted = first[i] in hosted
            apart.setdefault((is_hosted, is_hosted and first[i] in given), []).append(i)
        ordered = [apart[key] for key in sorted(apart, reverse=True)]
        chunks = [[own[k] for k in each] for own in ordered for each in _chunks([sizes[i] for i in own], chunk)]
        for mine in chunks:
            columns = [k * count + i for k in range(slots) for i in mine]
            gradients = [old + i for i in mine]
            operands = (*(eqn.inputs[k] for k in (*columns, *gradients)), *eqn.inputs[old + count :])
            params = Params({**eqn.params, "count": len(mine)})
            eqns.append(replace(eqn, inputs=operands, params=params, outputs=tuple(eqn.outputs[k] for k in columns)))
    main = replace(program.main, eqns=tuple(eqns))
    return replace(program, blocks={**program.blocks, program.entry: main})


def _column(eqn: Eqn, i: int, count: int, slots: int) -> list[Var]:
    """One parameter of an update and its state."""
    return [x for x in eqn.inputs[i : slots * count : count] if isinstance(x, Var)]


def _chunks(sizes: list[int], most: int) -> list[list[int]]:
    chunks: list[list[int]] = [[]]
    held = 0
    for i, size in enumerate(sizes):
        if chunks[-1] and held + size > most:
            chunks.append([])
            held = 0
        chunks[-1].append(i)
        held += size
    return chunks
