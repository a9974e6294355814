"""Sums of gradients that a plan compresses, on encoded bytes: each rank encodes a part for every rank, decodes and adds
up those of its own part, and sends the sum to all, encoded once more.  Everyone decodes the same bytes, so replicas
stay the same to the bit.

    y, r = compressed(g, e, key, at, axes=("dp",), codec="int8")   c, l = encode_residual(g, e, key, codec="int8", …)
    …                                                              d = exchange_chunks(c, axes=("dp",), count=4)
    z = all_reduce(y, axes=("dp",), count=4)               =>      …
    w = summed(z)                                                  s = decode_sum(d, key, codec="int8", …)
                                                                   f, k = encode_residual(s, None, key, codec="int8", …)
                                                                   a = gather_chunks(f, axes=("dp",), count=4)
                                                                   z = decode(a, key, codec="int8", …)
                                                                   r = add_own_row(l, k, axes=("dp",), count=4)

    powersgd(r)     p = (g + e) q for a random q, summed; its columns made orthonormal; (g + e)' p, summed; z is their
                    product, and r is g + e without what of it is in the span of p: two small all-reduces

A part of a parameter that its rank has updated (`shared_update`) is gathered likewise:

    y, r = shared_update(n, p, e, axes=("dp",), …)         c, r = encode_residual(n - p, e, codec="int4", …)
    z = all_gather(y, axes=("dp",), …)             =>      z = w + decode(gather_chunks(c, axes=("dp",), …))
                                                           where p is this rank's own part of the parameter w

What the second encoding loses, the rank whose part it is keeps with its own: the sum of all that ranks keep and what
they received is the sum of what they had.  Two ranks gather what both have encoded, and add that up: as many bytes,
half of the messages, and nothing is encoded twice.  A `reduce_scatter` is the first half alone.  Where nobody asks for
r, nothing is kept.  A sum that is no such collective stays as it is, exact.  Rows that have come are `verified` before
they are decoded, in one of so many messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mycel.ir import Atom, Block, Builder, Eqn, Program, Var, substitute
from mycel.lower.encode_gathers import CHECKED_EVERY, joined_parts
from mycel.ops import o
from mycel.ops.codec_kernels import codec_of
from mycel.ops.codecs import rank_of

BY_RANK = 0x5851F42D4C957F2D  # between the keys of two ranks
FEW = 2  # ranks that tell each other all they have: as many bytes then, in one message instead of two
SECOND = 0x14057B7EF767814F  # between those of the two encodings


def compress(program: Program) -> Program:
    """The local program with its compressed sums written out."""
    if not any(e.op in (o.compressed, o.shared_update) for e in program.main.eqns):
        return program
    return replace(program, blocks={**program.blocks, program.entry: _Compressed(program).block()})


@dataclass
class Message:
    """One sum on its way: the equation that asked for it, the dim it is scattered along (None: all get all of it), what
    is left over so far, and what has been exchanged and gathered."""

    eqn: Eqn
    dim: int | None
    keeps: bool
    left: Var | None = None
    sent: Var | None = None
    rows: Var | None = None
    gathered: tuple[Var, Atom, int] | None = None  # with the key and the length of a row
    code: Var | None = None  # that this rank has put into it
    basis: Var | None = None  # of powersgd
    total: Var | None = None

    @property
    def codec(self) -> str:
        return self.eqn.params["codec"]

    @property
    def given(self) -> Var:
        assert isinstance(self.eqn.inputs[0], Var)
        return self.eqn.inputs[0]

    def row(self, count: int) -> int:
        """Elements that each rank is sent."""
        shape = self.given.shape
        if self.dim is None:
            return -(-math.prod(shape) // count)
        return -(-shape[self.dim] // count) * (math.prod(shape) // max(shape[self.dim], 1))


class _Compressed:
    def __init__(self, program: Program) -> None:
        self.main = main = program.main
        self.parameters = {program.role(v).name: v for v in program.inputs_of("parameter")}
        self.b = Builder(names_of=main)
        self.values: dict[Var, Atom] = {}
        self.users: dict[Var, list[Eqn]] = {}
        for eqn in main.eqns:
            for v in dict.fromkeys(eqn.vars):
                self.users.setdefault(v, []).append(eqn)
        self.messages: dict[Var, Message] = {}  # by the partial sum
        self.again: dict[Eqn, Message] = {}  # gathers of parts of a sum that all ranks are sent whole
        # gathers of parameters that were written on encoded bytes, and what they bring; those whose turn has come
        self.shared: dict[Eqn, Callable[[], Atom]] = {}
        self.coming: dict[Var, Callable[[], Atom]] = {}
        # what is on its way to all ranks: the values to come, and of a part of one the collective that asked for it
        self.expected: dict[Var, tuple[Message, Eqn | None]] = {}

    def block(self) -> Block:
        with self.b:
            for eqn in self.main.eqns:
                self.b.at(eqn)
                self.equation(eqn)
            self.arrive()
        outputs = tuple(self.values.get(x, x) if isinstance(x, Var) else x for x in self.main.outputs)
        return Block(self.main.inputs, tuple(self.b.eqns), outputs)

    def equation(self, eqn: Eqn) -> None:
        first = eqn.inputs[0] if eqn.inputs else None
        if eqn.op is o.compressed:
            self.begun(eqn)
        elif eqn.op is o.shared_update:
            self.tell(eqn)
        elif eqn in self.shared:
            self.coming[eqn.outputs[0]] = self.shared.pop(eqn)
        elif isinstance(first, Var) and first in self.messages:
            self.ended(eqn)
        elif eqn.op is o.summed and first in self.expected:
            self.expected[eqn.outputs[0]] = self.expected[first]
        elif eqn in self.again:
            self.expected[eqn.outputs[0]] = self.again[eqn], None
        else:
            if any(v in self.expected or v in self.coming for v in eqn.vars):
                self.arrive()
            self.b.eqns.append(substitute(eqn, self.values))

    def arrive(self) -> None:
        """What has been gathered is decoded, once someone asks for some of it: until then all can be sent together."""
        for v, (message, scatter) in self.expected.items():
            if message.total is None:
                message.total = self.decoded(message)
            self.values[v] = message.total if scatter is None else o.own_part(message.total, **scatter.params)
        self.expected.clear()
        for v, come in self.coming.items():
            self.values[v] = come()
        self.coming.clear()

    def begun(self, eqn: Eqn) -> None:
        y, r = eqn.outputs
        eqn = self.with_share(substitute(eqn, self.values))
        g, e, key, _ = eqn.inputs
        asked = self.users.get(y, [])
        if not asked or y in self.main.outputs or not all(is_sum(x, eqn.params["axes"]) for x in asked):
            self.exactly(eqn)
            return
        dims = {x.params["dim"] if x.op is o.reduce_scatter and not self.gathered(x) else None for x in asked}
        keeps = r in self.users or r in self.main.outputs
        scattered = len(dims) == 1 and not rank_of(eqn.params["codec"])
        message = Message(eqn, dims.pop() if scattered else None, keeps)
        self.messages[y] = message
        if message.dim is None:
            self.again.update((gather, message) for x in asked for gather in self.gathered(x))
        p = asked[0].params
        if rank_of(message.codec):
            self.sketch(message, p["axes"], p["count"])
            return
        if message.dim is None and p["count"] <= FEW:
            self.tell_all(message, p["axes"], p["count"])
            return
        self.encode(message, g, e, self.key(key, p, message.codec), p["count"])
        assert message.rows is not None
        message.sent = message.rows
        message.rows = o.exchange_chunks(message.rows, axes=p["axes"], count=p["count"])
        if message.dim is not None and message.left is not None:
            self.values[r] = message.left

    def tell(self, eqn: Eqn) -> None:
        """A part of a parameter that this rank has updated, to all: its difference to what all have."""
        y, r = eqn.outputs
        gathers, w = self.users.get(y, []), self.parameters[eqn.params["of"]]
        is_told = len(gathers) == 1 and gathers[0].op is o.all_gather and y not in self.main.outputs
        new, old, e, at = substitute(eqn, self.values).inputs
        assert isinstance(new, Var) and isinstance(old, Var) and isinstance(e, Var)
        wide = lambda x: x if x.dtype == e.dtype else o.cast(x, dtype=e.dtype)
        changed = o.sub(wide(new), wide(old))
        p = gathers[0].params if is_told else {}
        if not is_told or p["axes"] != eqn.params["axes"] or gathers[0].outputs[0].shape != w.shape:
            total = o.add(wide(old), o.add(changed, e))
            self.values[y] = total if total.dtype == new.dtype else o.cast(total, dtype=new.dtype)
            self.values[r] = o.mul(e, 0.0)
            return
        codec, along = eqn.params["codec"], {"axes": p["axes"], "count": p["count"]}
        code, self.values[r] = o.encode_residual(changed, e, None, codec=codec, rows=1, row=math.prod(new.shape))
        rows = o.gather_chunks(code, **along)

        def come() -> Var:
            checked = o.verified(rows, code, at, axes=p["axes"], every=CHECKED_EVERY, of=eqn.params["of"])
            difference = joined_parts(checked, codec, new.shape, p["count"], p["dim"], p["size"])
            total = o.add(wide(w), wide(difference))
            return total if total.dtype == new.dtype else o.cast(total, dtype=new.dtype)

        self.shared[gathers[0]] = come

    def with_share(self, eqn: Eqn) -> Eqn:
        """What is the same on all ranks (m), shared out among them: g + m / count."""
        g, *others, m = eqn.inputs if len(eqn.inputs) == 5 else (*eqn.inputs, None)
        if m is None:
            return eqn
        count = math.prod(x.params["count"] for x in self.users.get(eqn.outputs[0], ())[:1])
        return replace(eqn, inputs=(o.add(g, o.mul(m, 1.0 / count)), *others))

    def tell_all(self, message: Message, axes: tuple[str, ...], count: int) -> None:
        """All that this rank has, to all: what it brings is added up by each, and encoded but once."""
        g, e, key, _ = message.eqn.inputs
        how = {"codec": message.codec, "rows": 1, "row": message.row(1)}
        own = self.key(key, {"axes": axes, "count": count}, message.codec)
        if message.keeps:
            message.code, self.values[message.eqn.outputs[1]] = o.encode_residual(g, e, own, **how)
        else:
            message.code = o.encode(g if e is None else o.add(g, e), own, **how)
        message.gathered = o.gather_chunks(message.code, axes=axes, count=count), key, message.row(1)

    def gathered(self, scatter: Eqn) -> list[Eqn]:
        """Where the parts of a sum are brought together again."""
        if scatter.op is not o.reduce_scatter:
            return []
        arrived = [x for s in self.users.get(scatter.outputs[0], ()) for x in self.users.get(s.outputs[0], ())]
        same = [(x, x.params["axes"], x.params["dim"]) for x in arrived if x.op is o.all_gather]
        return [x for x, axes, dim in same if (axes, dim) == (scatter.params["axes"], scatter.params["dim"])]

    def encode(self, message: Message, x: Atom, e: Atom, key: Atom, count: int) -> None:
        how = {"codec": message.codec, "rows": count, "row": message.row(count), "dim": message.dim or 0}
        if message.keeps:
            message.rows, message.left = o.encode_residual(x, e, key, **how)
        else:
            message.rows = o.encode(x if e is None else o.add(x, e), key, **how)

    def ended(self, eqn: Eqn) -> None:
        """A collective on the partial sum: what it brings, from what has been exchanged."""
        assert isinstance(eqn.inputs[0], Var)
        message, p = self.messages[eqn.inputs[0]], eqn.params
        if message.dim is not None:
            self.values[eqn.outputs[0]] = self.received(message, p["count"], eqn.outputs[0].shape, message.dim)
            return
        for other in self.messages.values():  # first those that were sent first
            if other.dim is None and other.gathered is None and not rank_of(other.codec):
                self.gather(other, p["axes"], p["count"])
            elif other.basis is not None and other.gathered is None:
                self.project(other, p["axes"], p["count"])
        self.expected[eqn.outputs[0]] = message, None if eqn.op is o.all_reduce else eqn

    def received(self, message: Message, count: int, shape: Sequence[int], dim: int = 0) -> Var:
        key = message.eqn.inputs[2]
        how = {"codec": message.codec, "row": message.row(count), "shape": tuple(shape), "dim": dim}
        total = o.decode_sum(self.verified(message, message.rows, message.sent), key, **how)
        return total if total.dtype == message.given.dtype else o.cast(total, dtype=message.given.dtype)

    def gather(self, message: Message, axes: tuple[str, ...], count: int) -> None:
        """The sum of this rank's part, to all."""
        row, y, r = message.row(count), message.given, message.eqn.outputs[1]
        how = {"codec": message.codec, "row": row}
        total = o.decode_sum(
            self.verified(message, message.rows, message.sent), message.eqn.inputs[2], shape=(row,), **how
        )
        base = None if message.eqn.inputs[2] is None else o.add(message.eqn.inputs[2], SECOND)
        key = self.key(base, {"axes": axes, "count": count}, message.codec)
        if message.keeps:
            code, left = o.encode_residual(total, None, key, rows=1, **how)
            left = left if left.dtype == y.dtype else o.cast(left, dtype=y.dtype)
            self.values[r] = o.add_own_row(message.left, left, axes=axes, count=count)
        else:
            code = o.encode(total, key, rows=1, **how)
        message.code, message.gathered = code, (o.gather_chunks(code, axes=axes, count=count), base, row)

    def verified(self, message: Message, come: Atom, sent: Atom) -> Var:
        p = message.eqn.params
        at = substitute(message.eqn, self.values).inputs[3]
        return o.verified(come, sent, at, axes=p["axes"], every=CHECKED_EVERY, of=p["of"])

    def decoded(self, message: Message) -> Var:
        assert message.gathered is not None
        rows, key, row = message.gathered
        if message.basis is not None:
            return o.reshape(o.linear(message.basis, rows), shape=message.given.shape)
        rows = self.verified(message, rows, message.code)
        read = o.decode if message.rows is not None else o.decode_sum
        whole = read(rows, key, codec=message.codec, row=row, shape=message.given.shape)
        return whole if whole.dtype == message.given.dtype else o.cast(whole, dtype=message.given.dtype)

    def sketch(self, message: Message, axes: tuple[str, ...], count: int) -> None:
        """The sum of all ranks' matrices, times a few random columns."""
        g, e, key, _ = message.eqn.inputs
        assert isinstance(g, Var)
        sides = g.shape[0], math.prod(g.shape[1:])
        matrix = o.reshape(g if e is None else o.add(g, e), shape=sides)
        columns = min(rank_of(message.codec), *sides)
        drawn = o.normal(key, 0, shape=(sides[1], columns), dtype=g.dtype)
        message.left = matrix
        message.basis = o.all_reduce(o.matmul(matrix, drawn), axes=axes, count=count)

    def project(self, message: Message, axes: tuple[str, ...], count: int) -> None:
        """What of each rank's matrix is in their span, and what is not."""
        message.basis = o.orthonormal(message.basis)
        own = o.linear_weight(message.left, message.basis)
        rest = o.sub(message.left, o.linear(message.basis, own))
        self.values[message.eqn.outputs[1]] = o.reshape(rest, shape=message.given.shape)
        message.gathered = o.all_reduce(own, axes=axes, count=count), None, 0

    def key(self, key: Atom, p: object, codec: str) -> Atom:
        """Ranks draw apart, unless all must know what each drew."""
        if key is None or codec_of(codec).drawn_alike:
            return key
        assert isinstance(p, dict) or hasattr(p, "__getitem__")
        return o.add(key, o.mul(o.place(axes=p["axes"], count=p["count"]), BY_RANK))

    def exactly(self, eqn: Eqn) -> None:
        g, e, *_ = eqn.inputs
        y, r = eqn.outputs
        self.values[y] = g if e is None else o.add(g, e)
        self.values[r] = o.mul(g, 0.0)


def is_sum(eqn: Eqn, axes: tuple[str, ...]) -> bool:
    """Is it a collective that adds up over just these axes?"""
    kinds = (o.all_reduce, o.reduce_scatter)
    return eqn.op in kinds and eqn.params["axes"] == axes and eqn.params.get("kind", "+") == "+"
