"""What stages of a pipeline send each other, and rows on their way to experts and back, in fewer bytes: each row by
itself, so a token is encoded by its own largest element.  Nothing is kept of what is lost: the next message is of other
tokens.

    t = begin_send(h, to=1, tag=0)                         c = encode(h, codec="int8", …)
    finish_send(t, h, …)                                   t = begin_send(c, to=1, tag=0)
                                                   =>      finish_send(t, c, …)
    h = finish_receive(t, shapes=…, dtypes=…)              d = finish_receive(t, shapes=…, dtypes=(u8,))
                                                           h = decode(d, codec="int8", …)

    y = exchange_rows(x, sent, got, …)             =>      y = decode(exchange_rows(encode(x), sent, got, …))

Rows of a few elements and what are no numbers (routing weights, masks, ids) travel as they are; so does what stages
send each other behind the loop over microbatches, sums of gradients among it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.errors import PlanError
from mycel.ir import Atom, Block, Builder, Eqn, Params, Program, Type, Var, substitute
from mycel.ops import o
from mycel.ops.codec_kernels import codec_of

FEWEST = 16  # elements of a row that is encoded


def encode_sends(programs: Sequence[Program], codec: str) -> tuple[Program, ...]:
    """The programs of the ranks of a pipeline with what they send in the loop over microbatches encoded."""
    begun = (e for p in programs for e in p.main.eqns if e.op is o.begin_send and e.phase != "update")
    tags = frozenset(e.params["tag"] for e in begun)
    return tuple(replace(p, blocks={**p.blocks, p.entry: _Encoded(p.main, codec, tags).block()}) for p in programs)


def encode_rows_of_experts(program: Program, codec: str) -> Program:
    """A local program with rows that travel between the ranks of experts encoded."""
    if not any(e.op is o.exchange_rows for block in program.blocks.values() for e in block.eqns):
        raise PlanError(
            f"send: experts: {codec}, but under this plan no tokens travel to the ranks of their experts\n"
            "  try       experts and batch over one axis (the ready plan ep), or a plan without send: experts"
        )
    blocks = {
        name: _Encoded(block, codec).block() if any(e.op is o.exchange_rows for e in block.eqns) else block
        for name, block in program.blocks.items()
    }
    return replace(program, blocks=blocks)


def is_encoded(type: Type) -> bool:
    """Is a tensor encoded where messages like it are?"""
    return type.dtype.is_floating_point and type.ndim > 1 and type.shape[-1] >= FEWEST and type.numel > 0


def codec_of_rows(codec: str, width: int) -> str:
    """A codec whose blocks divide a row of this width, and its halves (an activation beside its cotangent), if any
    do."""
    given = codec_of(codec)
    sizes = range(min(given.block, -(-width // 16) * 16), 0, -16)
    whole = next(
        (n for half in (width // 2, width) if width % 2 == 0 or half == width for n in sizes if half % n == 0), 0
    )
    return str(replace(given, block=whole or sizes[0]))


class _Encoded:
    def __init__(self, block: Block, codec: str, tags: frozenset[int] = frozenset()) -> None:
        self.given, self.codec, self.tags = block, codec, tags
        self.b = Builder(names_of=block)
        self.values: dict[Var, Atom] = {}
        self.codes: dict[int, tuple[Atom, ...]] = {}  # by tag: what is on its way

    def block(self) -> Block:
        with self.b:
            for eqn in self.given.eqns:
                self.b.at(eqn)
                self.equation(substitute(eqn, self.values))
        outputs = tuple(self.values.get(x, x) if isinstance(x, Var) else x for x in self.given.outputs)
        return replace(self.given, eqns=tuple(self.b.eqns), outputs=outputs)

    def equation(self, eqn: Eqn) -> None:
        tag, vars_ = eqn.params.get("tag"), list(eqn.vars)
        if eqn.op is o.exchange_rows and is_encoded(vars_[0].type):
            width = vars_[0].shape[-1]
            rows = o.exchange_rows(self.encoded(vars_[0]), *eqn.inputs[1:], **eqn.params)
            shape = (eqn.params["rows"], *vars_[0].shape[1:])
            self.values[eqn.outputs[0]] = self.decoded(rows, Type(vars_[0].dtype, shape), width)
        elif tag not in self.tags:
            self.b.eqns.append(eqn)
        elif eqn.op is o.begin_send:
            self.codes[tag] = tuple(self.encoded(v) if is_encoded(v.type) else v for v in vars_)
            self.b.eqns.append(replace(eqn, inputs=self.codes[tag]))
        elif eqn.op is o.finish_send:
            self.b.eqns.append(replace(eqn, inputs=(eqn.inputs[0], *self.codes.pop(tag))))
        elif eqn.op is o.begin_receive:
            self.b.eqns.append(replace(eqn, params=self.incoming(eqn)))
        else:
            self.come(eqn)

    def come(self, eqn: Eqn) -> None:
        """What has been received, decoded."""
        params = self.incoming(eqn)
        received = tuple(
            v if not is_encoded(v.type) else Var(self.b.name(v.name), Type(dtype, shape))
            for v, shape, dtype in zip(eqn.outputs, params["shapes"], params["dtypes"], strict=True)
        )
        self.b.eqns.append(replace(eqn, params=params, outputs=received))
        for v, code in zip(eqn.outputs, received, strict=True):
            if code is not v:
                self.values[v] = self.decoded(code, v.type, v.shape[-1])

    def incoming(self, eqn: Eqn) -> Params:
        types = [Type(dtype, tuple(s)) for s, dtype in zip(eqn.params["shapes"], eqn.params["dtypes"], strict=True)]
        sent = [self.encoded_type(t) if is_encoded(t) else t for t in types]
        return Params({**eqn.params, "shapes": tuple(t.shape for t in sent), "dtypes": tuple(t.dtype for t in sent)})

    def encoded_type(self, type: Type) -> Type:
        width = type.shape[-1]
        size = codec_of(codec_of_rows(self.codec, width)).size(width)
        return Type(torch.uint8, (math.prod(type.shape[:-1]), size))

    def encoded(self, x: Var) -> Any:
        width = x.shape[-1]
        how = {"codec": codec_of_rows(self.codec, width), "rows": math.prod(x.shape[:-1]), "row": width}
        return o.encode(x, None, **how)

    def decoded(self, code: Any, type: Type, width: int) -> Any:
        y = o.decode(code, None, codec=codec_of_rows(self.codec, width), row=width, shape=type.shape)
        return y if type.dtype == torch.float32 else o.cast(y, dtype=type.dtype)
