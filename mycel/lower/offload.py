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
                                                 norm = global_norm(g1.norm, g2.norm)       where gradients may leave

Last of all passes, so that a plan's places are those of the program that runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from mycel.errors import PlanError
from mycel.ir import DEVICE, HOST, Atom, Block, Builder, Eqn, Op, Params, Program, Var, chains, lookup
from mycel.ops import o
from mycel.ops.space import TOKEN
from mycel.plan import MovedValue, Offloaded, StreamedInput, close_names, equation_key, handed_to


def offload(program: Program, plan: Offloaded) -> Program:
    """The program with the moves of a plan."""
    program = norms_of_each(program) if plan.norms else program
    return with_copies(split_updates(program, {s.input for s in plan.streamed}, plan.chunk), plan)


def with_copies(program: Program, plan: Offloaded) -> Program:
    """The same of a program whose updates and norms are taken in parts already."""
    handed = handed_to(program, plan.body, {s.input for s in plan.streamed}) if plan.inside else {}
    if plan.moved or plan.inside:
        body = _Moves(program.blocks[plan.body])
        for moved in plan.moved:
            body.away(moved)
        for inside in plan.inside:
            body.stream(inside, None)
        program = replace(program, blocks={**program.blocks, plan.body: body.block()})
    if plan.streamed:
        entry = _Moves(program.main, handed=handed.keys())
        outputs = program.main.outputs
        new = dict(zip(program.updates, outputs[len(outputs) - len(program.updates) :], strict=True))
        for streamed in plan.streamed:
            entry.stream(streamed, new.get(streamed.input))
        program = replace(program, blocks={**program.blocks, program.entry: entry.block()})
    return program


@dataclass
class _Moves:
    """A block, and what is to be written before each of its equations: copies that have ended, copies that begin,
    copies that are waited for; and behind it."""

    old: Block
    handed: Collection[tuple[int, Var]] = ()  # equations that take an input as it lies
    ended: dict[int, list[Eqn]] = field(default_factory=dict)
    begun: dict[int, list[tuple[int, Eqn]]] = field(default_factory=dict)  # with who reads it first
    awaited: dict[int, list[Eqn]] = field(default_factory=dict)
    behind: dict[int, list[Eqn]] = field(default_factory=dict)
    read: dict[tuple[int, Var], Var] = field(default_factory=dict)  # what an equation reads instead
    inputs: dict[Var, Atom] = field(default_factory=dict)
    outputs: dict[Var, Atom] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.uses = chains(self.old)
        self.at = {equation_key(i, e): i for i, e in enumerate(self.old.eqns)} | {"": len(self.old.eqns)}
        self.vars = {v.name: v for v in self.uses}
        self.names = Builder()
        self.names.reserve(self.vars)

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
        readers = [i for i in self.uses[v].uses if (i, v) not in self.handed]
        self.read.update(((i, v), host) for i in self.uses[v].uses if (i, v) in self.handed)
        for place, end in zip(places, [*places[1:], len(self.old.eqns) + 1], strict=True):
            self._come(v, host, place, [i for i in readers if place <= i < end])
        if any(i < min(places, default=0) for i in readers) or (readers and not places):
            raise PlanError(f"decided: {v.name} is read before it comes\n  try       plan.given, to decide anew")
        if isinstance(new, Var) and self.uses[new].defined >= 0:
            self.outputs[new] = self._leave(new, self._place(streamed.freed))
        elif isinstance(new, Var):
            self.outputs[new] = self.inputs.get(new, new)

    def _leave(self, v: Var, freed: int) -> Var:
        """Begins where the value is made, has ended before `freed`."""
        made = self.uses[v].defined
        maker = self.old.eqns[made]
        token, host = self._token(), Var(self.names.name(f"{v.name}.host"), v.type.on(HOST))
        self.behind.setdefault(made, []).append(_half(o.begin_move, (v,), token, HOST, maker))
        place = max(freed, made + 1)
        later = {"wait": False} if place == len(self.old.eqns) else {}  # the step ends: the next one goes on
        self.ended.setdefault(place, []).append(_half(o.finish_move, (token, v), host, HOST, maker, **later))
        return host

    def _come(self, v: Var, host: Var, place: int, readers: list[int]) -> None:
        """Begins before `place`, is there where it is first read."""
        if not readers:
            return
        reader = self.old.eqns[readers[0]]
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
            if i < len(self.old.eqns):
                eqn = self.old.eqns[i]
                values = tuple(self.read.get((i, x), x) if isinstance(x, Var) else x for x in eqn.inputs)
                eqns.append(eqn if values == eqn.inputs else replace(eqn, inputs=values))
                eqns += self.behind.get(i, ())
        inputs = tuple(lookup(v, self.inputs) for v in self.old.inputs)
        return Block(inputs, tuple(eqns), tuple(lookup(x, self.outputs) for x in self.old.outputs))  # type: ignore[arg-type]

    def _var(self, name: str) -> Var:
        if name not in self.vars:
            near = close_names(name, self.vars)
            raise PlanError(f"decided: there is no value {name} to move{near}\n  try       plan.given, to decide anew")
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


def norms_of_each(program: Program) -> Program:
    """Norms of several gradients in the entry as norms of the norm of each, which is taken where the gradient is made:
    to the bit the same, and from there on nobody reads the gradient before its update."""
    block, uses = program.main, chains(program.main)
    names = Builder()
    names.reserve(v.name for v in uses)
    behind: dict[int, list[Eqn]] = {}
    norms: dict[tuple[int, Var], Var] = {}
    for i, eqn in enumerate(block.eqns):
        for v in eqn.vars if eqn.op is o.global_norm and len(eqn.inputs) > 1 else ():
            made = uses[v].defined
            if made >= 0 and v.type.ndim and block.eqns[made].phase == "backward":
                norm = norms[i, v] = Var(names.name(f"{v.name}.norm"), eqn.outputs[0].type)
                own = Eqn(o.global_norm, (v,), Params(), (norm,), eqn.source, "backward")
                behind.setdefault(made, []).append(own)
    eqns: list[Eqn] = []
    for i, eqn in enumerate(block.eqns):
        values = tuple(norms.get((i, x), x) if isinstance(x, Var) else x for x in eqn.inputs)
        eqns += [eqn if values == eqn.inputs else replace(eqn, inputs=values), *behind.get(i, ())]
    return replace(program, blocks={**program.blocks, program.entry: replace(block, eqns=tuple(eqns))})


def split_updates(program: Program, inputs: Collection[str], chunk: int) -> Program:
    """Updates in the entry that replace these inputs, in several: each of at most `chunk` bytes of them, and of one
    parameter at least."""
    eqns: list[Eqn] = []
    for eqn in program.main.eqns:
        count = eqn.params.get("count", 1)
        if eqn.op.inplace is None or count == 1 or not any(v.name in inputs for v in eqn.vars):
            eqns.append(eqn)
            continue
        old = len(eqn.outputs)  # operands that are replaced: parameters, then each slot of their state
        slots = old // count
        sizes = [sum(v.type.bytes for v in _column(eqn, i, count, slots) if v.name in inputs) for i in range(count)]
        for mine in _chunks(sizes, chunk):
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
