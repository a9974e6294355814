"""Parts of parameters that ranks gather for use (ZeRO-3), on encoded bytes: whoever has a part encodes it, and all,
itself among them, compute with what these bytes say.  The parts themselves, which the optimiser changes, stay exact.

    t = begin(a, op="all_gather", axes=("dp",), …)         c = encode(a, codec="int8", …)
    …                                                      t = begin(c, op="gather_chunks", axes=("dp",), …)
    w = finish(t, a, op="all_gather", …)           =>      …
                                                           d = finish(t, c, op="gather_chunks", …)
                                                           w = decode(d, codec="int8", shape=(4, …)), its parts joined

Those of a bucket that are not encoded go in a message of their own.  What has come is `verified` in one of so many
steps, where the program counts these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.ir import Atom, Block, Builder, Eqn, Program, Var, substitute
from mycel.ops import o
from mycel.transform import DRAWS

CHECKED_EVERY = 100  # messages


@dataclass(frozen=True)
class EncodedGathers:
    """Along which axis parameters are gathered in how many bytes: by name their codecs."""

    axis: str
    codecs: Mapping[str, str]


def encode_gathers(program: Program, how: EncodedGathers) -> Program:
    """The entry with its gathers of parameters encoded."""
    named = {v: program.role(v).name for v in program.inputs_of("parameter")}
    parts = {v: (name, how.codecs[name]) for v, name in named.items() if name in how.codecs}
    encoding = _Encoding(program.main, parts, how.axis, program.by_role().get(DRAWS))
    return replace(program, blocks={**program.blocks, program.entry: encoding.block()})


@dataclass(frozen=True)
class OtherGathers:
    """What of a bucket is gathered as it is."""

    token: Var
    sent: tuple[Atom, ...]
    how: dict[str, tuple[int, ...]]


class _Encoding:
    def __init__(self, main: Block, parts: Mapping[Var, tuple[str, str]], axis: str, at: Var | None) -> None:
        self.main, self.axis, self.at = main, axis, at  # the number of the step
        self.codecs = dict(parts)  # of what parameters' parts are, cast or not, and of which
        # by the token of a bucket: that of its encoded part, their codes by place, and the other part
        self.tokens: dict[Var, tuple[Var, dict[int, Var], OtherGathers | None]] = {}
        self.b = Builder(names_of=main)
        self.values: dict[Var, Atom] = {}

    def block(self) -> Block:
        with self.b:
            for eqn in self.main.eqns:
                self.b.at(eqn)
                self.equation(eqn)
        outputs = tuple(self.values.get(x, x) if isinstance(x, Var) else x for x in self.main.outputs)
        return Block(self.main.inputs, tuple(self.b.eqns), outputs)

    def equation(self, eqn: Eqn) -> None:
        first = next(iter(eqn.vars), None)
        if eqn.op is o.cast and first in self.codecs:
            self.codecs[eqn.outputs[0]] = self.codecs[first]
        if self.is_gather(eqn, o.begin):
            self.begun(eqn)
        elif eqn.op is o.finish and first in self.tokens:
            self.ended(eqn, self.tokens[first])
        elif self.is_gather(eqn, o.all_gather):
            assert first is not None
            p = eqn.params
            code = self.encoded(first)
            rows = o.gather_chunks(code, axes=p["axes"], count=p["count"])
            self.values[eqn.outputs[0]] = self.concatenated(rows, code, first, p["count"], p["dim"], p["size"])
        else:
            self.b.eqns.append(substitute(eqn, self.values))

    def is_gather(self, eqn: Eqn, op: object) -> bool:
        """Of parameters among others, along the axis, by this operator."""
        gathers = eqn.op is o.all_gather or eqn.params.get("op") == "all_gather"
        return (
            eqn.op is op and gathers and eqn.params["axes"] == (self.axis,) and any(v in self.codecs for v in eqn.vars)
        )

    def begun(self, eqn: Eqn) -> None:
        """A bucket: what is encoded in one message, the rest in another."""
        p, xs = eqn.params, list(eqn.vars)
        along = {"axes": p["axes"], "count": p["count"]}
        codes = {i: self.encoded(x) for i, x in enumerate(xs) if x in self.codecs}
        others = [i for i in range(len(xs)) if i not in codes]
        token = o.begin(*codes.values(), op="gather_chunks", **along)
        rest = None
        if others:
            how = {name: tuple(p[name][i] for i in others) for name in ("dims", "sizes")}
            sent = [x for i in others if isinstance(x := self.values.get(xs[i], xs[i]), Var)]
            rest = OtherGathers(o.begin(*sent, op="all_gather", **along, **how), tuple(sent), how)
        self.tokens[eqn.outputs[0]] = token, codes, rest

    def ended(self, eqn: Eqn, sent: tuple[Var, dict[int, Var], OtherGathers | None]) -> None:
        p, (token, codes, rest) = eqn.params, sent
        along = {"axes": p["axes"], "count": p["count"]}
        come = o.finish(token, *codes.values(), op="gather_chunks", **along)
        rows = dict(zip(codes, come if len(codes) > 1 else (come,), strict=True))
        if rest is not None:
            plain = o.finish(rest.token, *rest.sent, op="all_gather", **along, **rest.how)
            others = iter(plain if len(rest.sent) > 1 else (plain,))
        for i, (y, x) in enumerate(zip(eqn.outputs, eqn.inputs[1:], strict=True)):
            assert isinstance(x, Var)
            is_encoded = i in codes
            self.values[y] = (
                self.concatenated(rows[i], codes[i], x, p["count"], p["dims"][i], p["sizes"][i])
                if is_encoded
                else next(others)
            )

    def encoded(self, x: Var) -> Any:
        return o.encode(self.values.get(x, x), None, codec=self.codecs[x][1], rows=1, row=math.prod(x.shape))

    def concatenated(self, rows: Any, code: Any, x: Var, count: int, dim: int, size: int) -> Any:
        name, codec = self.codecs[x]
        if self.at is not None:
            rows = o.verified(rows, code, self.at, axes=(self.axis,), every=CHECKED_EVERY, of=name)
        whole = joined_parts(rows, codec, x.shape, count, dim, size)
        return whole if x.dtype == torch.float32 else o.cast(whole, dtype=x.dtype)


def joined_parts(rows: Any, codec: str, shape: Sequence[int], count: int, dim: int, size: int) -> Any:
    """The encoded parts of all, each of this shape, along the dim that they are parts of; f32."""
    parts = o.decode(rows, None, codec=codec, row=math.prod(shape), shape=(count, *shape))
    if dim:
        parts = o.permute(parts, dims=(*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)))
    whole = o.reshape(parts, shape=tuple(count * n if d == dim else n for d, n in enumerate(shape)))
    return whole if count * shape[dim] == size else o.slice(whole, dim=dim, start=0, stop=size)
