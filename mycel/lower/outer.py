"""What replicas say to each other (`sync` of a plan): the local program of one message about some of their tensors,
written with ordinary collectives along the axis.  Of a tensor w, in 32 bits:

    local       y = mean(w)                                  w' = y
    diloco      d = mean(anchor - w)                         m' = momentum · m + d
                                                             w' = anchor' = anchor - lr (d + momentum · m')
    streaming   the same anchor' and m'                      w' = mixing · w + (1 - mixing) · anchor'
    gossip      y = w of a partner                           w' = (w + y) / 2
    sma         y = mean(w)                                  w' = w + alpha (y - w)

Buffers are averaged where parameters take an outer step.  Where a message overlaps with steps, what is sent (x, from
before them) is state, so that a run which goes on sends the same; what it brings is added to the w of then: `w + (y -
x)`, so that nothing of the steps between is lost (but where `mixing` says so).  The program is cut where it waits, as
often as there are steps to wait in:

    t = begin(x, op="exchange_chunks", …)       when it is sent
    ─────────────────────────────────────       a step, or some
    y = finish(t, x, …) …
    u = begin(y, op="gather_chunks", …)
    ─────────────────────────────────────       a step, or some
    z = finish(u, y, …) …                       `overlap` steps after it was sent

New inputs by their roles: `outer anchor of w`, `outer momentum of w`, `outer sent of w`; and with a codec, of what an
outer step sends, `error of w over dp` and the counter `sent_at`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mycel.ir import Block, Builder, Eqn, Layout, Params, Program, Role, Type, Var, check, leading_to
from mycel.lower.compress import compress
from mycel.lower.overlap import overlap
from mycel.ops import o
from mycel.ops.codecs import Compression
from mycel.plan import Plan, SyncPolicy

# after how many steps a message is sent: what its codec draws from, so that it is the same when it is sent again
SENT_AT = Role("counter", "sent_at")


@dataclass(frozen=True)
class OuterMessage:
    """A message about some tensors: `takes` notes what is sent, where that is waited for later.  `parts` are run in
    turn, some steps apart (`SyncPolicy.is_due`); what one returns are inputs of those behind it, by name."""

    whole: Program
    takes: Program | None
    parts: tuple[Program, ...]


def outer_messages(
    program: Program, layouts: Mapping[int, Layout], plan: Plan, holds: Callable[[str], bool] = lambda name: True
) -> list[list[OuterMessage]]:
    """What replicas that run a step's program say to each other: by fragment of the model, and of gossip by round;
    `layouts`: of the step's inputs by position, in a replica.  `holds`: which tensors a rank has, where replicas are
    pipelines; of the others it says nothing, so a fragment may be empty."""
    policy, inside = plan.synced(), plan.replica.mesh
    assert policy is not None
    held = {i: program.role(v) for i, v in enumerate(program.inputs)}
    changed = {*program.updates, *(held[i].of for i in held if held[i].kind == "gradient")}
    tensors, shapes = dict[Role, Type](), dict[str, Sequence[int]]()
    for i, v in enumerate(program.inputs):
        is_changed = v.name in changed or held[i].name in changed
        if held[i].kind in ("parameter", "buffer") and v.dtype.is_floating_point and is_changed:
            tensors[held[i]] = layouts.get(i, Layout.whole(v.type.ndim)).local(v.type, inside)
            shapes |= {held[i].name: v.shape} if held[i].kind == "parameter" else {}
    codecs, count = plan.outer_codecs(shapes), plan.mesh[policy.axis]
    partners = rounds(count) if policy.kind == "gossip" else [()]
    parts = [{role: type for role, type in part.items() if holds(role.name)} for part in fragments(tensors, policy)]
    return [[outer_message(policy, part, count, codecs, to) for to in partners] if part else [] for part in parts]


def fragments(tensors: Mapping[Role, Type], policy: SyncPolicy) -> list[dict[Role, Type]]:
    """The tensors in their order, in as many parts of about the same size as the policy says."""
    total, done = sum(type.bytes for type in tensors.values()), 0
    parts: list[dict[Role, Type]] = [{} for _ in range(policy.fragments)]
    for role, type in tensors.items():
        parts[min(done * policy.fragments // max(total, 1), policy.fragments - 1)][role] = type
        done += type.bytes
    return [part for part in parts if part]


def outer_message(
    policy: SyncPolicy,
    tensors: Mapping[Role, Type],
    count: int,
    codecs: Mapping[str, Compression],
    partners: Sequence[int] = (),
) -> OuterMessage:
    """About tensors that a rank holds, of these types, parameters among them encoded as is said; `partners`: of gossip,
    to which each replica speaks."""
    writer = _Outer(policy, tensors, count, codecs, tuple(partners))
    whole = check(overlap(check(compress(writer.exchanged()))))
    if not policy.overlap:
        return OuterMessage(whole, None, (whole,))
    return OuterMessage(whole, check(writer.sent()), tuple(map(check, cut_where_it_waits(whole, policy.overlap))))


def rounds(count: int) -> list[tuple[int, ...]]:
    """Who averages with whom, round after round until each has met each: the circle method; of an odd number one is by
    itself."""
    seats = [*range(count), *([-1] * (count % 2))]
    turns = []
    for _ in range(len(seats) - 1):
        partner = list(range(count))
        for a, b in zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True):
            if a >= 0 and b >= 0:
                partner[a], partner[b] = b, a
        turns.append(tuple(partner))
        seats[1:] = [seats[-1], *seats[1:-1]]
    return turns


class _Outer:
    def __init__(
        self,
        policy: SyncPolicy,
        tensors: Mapping[Role, Type],
        count: int,
        codecs: Mapping[str, Compression],
        partners: tuple[int, ...],
    ) -> None:
        self.policy, self.tensors, self.count, self.codecs, self.partners = policy, tensors, count, codecs, partners
        self.along = {"axes": (policy.axis,), "count": count}
        self.fresh()

    def fresh(self) -> None:
        self.b, self.roles, self.updates = Builder(phase="update"), dict[str, Role](), dict[str, Any]()

    def input(self, role: Role, type: Type, hint: str) -> Var:
        var = self.b.input(hint, type)
        self.roles[var.name] = role
        return var

    def state(self, slot: str, of: Role) -> Var:
        return self.input(outer_role(slot, of), wide(self.tensors[of]), f"{of.name}.{slot}")

    def is_stepped(self, role: Role) -> bool:
        return self.policy.has_outer_step and role.kind == "parameter"

    def sent(self) -> Program:
        """What is sent, from what is there."""
        self.fresh()
        for role, type in self.tensors.items():
            w = self.input(role, type, role.name)
            anchor = self.state("anchor", role) if self.is_stepped(role) else None
            sent = self.state("sent", role)
            with self.b:
                self.updates[sent.name] = self.outgoing(w, anchor)
        return self.program()

    def outgoing(self, w: Var, anchor: Var | None) -> Any:
        return as_wide(w) if anchor is None else o.sub(anchor, as_wide(w))

    def exchanged(self) -> Program:
        """All of the message."""
        self.fresh()
        held = {role: self.input(role, type, role.name) for role, type in self.tensors.items()}
        anchors = {role: self.state("anchor", role) for role in held if self.is_stepped(role)}
        stepped = anchors if self.policy.options.get("momentum") else ()
        momenta = {role: self.state("momentum", role) for role in stepped}
        later = self.policy.overlap
        sent: dict[Role, Any] = {role: self.state("sent", role) for role in held} if later else {}
        over = self.policy.axis
        errors = {
            role: self.input(Role("error", of=role.name, over=over), wide(self.tensors[role]), f"{role.name}.error")
            for role in anchors
            if role.name in self.codecs and self.codecs[role.name].memory
        }
        key = None
        if any(role.name in self.codecs for role in anchors):
            key = self.input(SENT_AT, Type(torch.int64, ()), "sent_at")
        with self.b:
            if not later:
                sent = {role: self.outgoing(w, anchors.get(role)) for role, w in held.items()}
            partial = {}
            for site, (role, x) in enumerate(sent.items()):
                partial[role] = x
                if role in anchors and role.name in self.codecs:
                    how = self.codecs[role.name]
                    drawn = o.fold_in(key, data=site) if how.draws else None
                    e, sent_as = errors.get(role), {"codec": how.codec, "axes": (over,), "of": role.name}
                    y, lost = o.compressed(x, e, drawn, key, **sent_as)
                    partial[role] = y
                    if role in errors:
                        self.updates[errors[role].name] = lost
            brought = {role: self.brought(x, role) for role, x in partial.items()}
            for role, w in held.items():
                if role in anchors:
                    new = self.stepped(w, brought[role], anchors[role], momenta.get(role), sent[role])
                else:
                    new = self.averaged(w, brought[role], sent[role])
                self.updates[w.name] = new if new.dtype == w.dtype else o.cast(new, dtype=w.dtype)
        return self.program()

    def brought(self, x: Any, role: Role) -> Any:
        """The mean of all, or what the partner has."""
        if self.partners:
            return o.permute_ranks(x, **self.along, to=self.partners)
        total = o.all_reduce(x, **self.along)
        if role.name in self.codecs and self.is_stepped(role):
            total = o.summed(total)
        return o.mul(total, 1.0 / self.count)

    def averaged(self, w: Var, y: Any, x: Any) -> Any:
        """As far towards y as the policy says; by what was sent, if that was before."""
        share = {"sma": self.policy.options.get("alpha", 1.0), "gossip": 0.5}.get(self.policy.kind, 1.0)
        if share == 1.0 and not self.policy.overlap:
            return y
        if self.partners and not self.policy.overlap:
            return o.mul(o.add(x, y), share)
        return o.add(as_wide(w), o.mul(o.sub(y, x), share))

    def stepped(self, w: Var, d: Any, anchor: Var, momentum: Var | None, x: Any) -> Any:
        """The outer step, with Nesterov momentum; x: how far this replica was from the anchor when it sent."""
        options, moved = self.policy.options, d
        if momentum is not None:
            velocity = o.add(o.mul(momentum, options["momentum"]), d)
            moved = o.add(d, o.mul(velocity, options["momentum"]))
            self.updates[momentum.name] = velocity
        if options["lr"] != 1:
            moved = o.mul(moved, options["lr"])
        new = o.sub(anchor, moved)
        self.updates[anchor.name] = new
        if own := options.get("mixing", 0.0):
            return o.add(o.mul(as_wide(w), own), o.mul(new, 1.0 - own))
        return o.add(as_wide(w), o.sub(x, moved)) if self.policy.overlap and "mixing" not in options else new

    def program(self) -> Program:
        block = Block(tuple(self.b.inputs), tuple(self.b.eqns), tuple(self.updates.values()))
        return Program({"main": block}, updates=tuple(self.updates), roles=self.roles)


def cut_where_it_waits(program: Program, most: int) -> list[Program]:
    """The messages that need no other before them, with what they send, begun; those that need these, begun; and so on,
    `most` times at most, and all the rest."""
    main = program.main
    names = Builder(names_of=main)
    depth: dict[Var, int] = {}  # how many messages are waited for before it is there
    eqns: list[Eqn] = []
    begun: list[list[Eqn]] = [[] for _ in range(most)]
    for eqn in main.eqns:
        before = max((depth.get(v, 0) for v in eqn.vars), default=0)
        is_message = eqn.op is o.begin or eqn.op.collective is not None
        halves = _in_two(eqn, names) if is_message and eqn.op is not o.begin and before < most else (eqn,)
        if is_message and before < most:
            begun[before].append(halves[0])
        eqns += halves
        waits = eqn.op is o.finish or eqn.op.collective is not None
        depth |= dict.fromkeys(eqn.outputs, before + waits)
    parts: list[list[Eqn]] = []
    for messages in filter(None, begun):
        later = [e for e in eqns if not any(e in part for part in parts)]
        parts.append([later[i] for i in leading_to(later, [v for e in messages for v in e.outputs])])
    parts.append([e for e in eqns if not any(e in part for part in parts)])
    return [_part(program, parts, k) for k in range(len(parts))]


def _part(program: Program, parts: Sequence[Sequence[Eqn]], k: int) -> Program:
    """One of the parts: its inputs are what those before it return, and the program's; the last one has its outputs."""
    used = [{v for e in part for v in e.vars} for part in parts]
    used[-1] |= {v for v in program.main.outputs if isinstance(v, Var)}
    is_last = k == len(parts) - 1
    held = [v for v in program.main.inputs if is_last or v in used[k]]
    passed = [v for part in parts[:k] for e in part for v in e.outputs if v in used[k]]
    returned = [v for e in parts[k] for v in e.outputs if any(v in later for later in used[k + 1 :])]
    outputs = program.main.outputs if is_last else tuple(returned)
    block = Block((*passed, *held), tuple(parts[k]), outputs)
    roles = {v.name: program.roles[v.name] for v in held if v.name in program.roles}
    return Program({"main": block}, updates=program.updates if is_last else (), roles=roles)


def _in_two(eqn: Eqn, names: Builder) -> tuple[Eqn, Eqn]:
    """A message that is waited for at once, as its two halves."""
    how = {"op": eqn.op.name, **eqn.params}
    token = Var(names.name("token"), Type(torch.int64, ()))
    begin = Eqn(o.begin, eqn.inputs, Params(how), (token,), eqn.source, eqn.phase)
    return begin, Eqn(o.finish, (token, *eqn.inputs), Params(how), eqn.outputs, eqn.source, eqn.phase)


def outer_role(slot: str, of: Role) -> Role:
    return Role("outer", slot, of=of.name)


def wide(type: Type) -> Type:
    """In which it is kept between messages."""
    return Type(torch.promote_types(type.dtype, torch.float32), type.shape)


def as_wide(x: Var) -> Any:
    dtype = wide(x.type).dtype
    return x if x.dtype == dtype else o.cast(x, dtype=dtype)
