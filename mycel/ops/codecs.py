"""Messages in fewer bytes, as operators: pure, typed, of fixed size.  What a codec does is in `codec_kernels.py`.

    y, r = compressed(g, e, key, at, axes=("dp",), codec="int8", of="w")
    z = summed(y)                                                  a gradient on its way to a sum over dp: y is g + e
                                                                   up to what its codec loses, and that is r.  In a
                                                                   global program nothing is lost: r is zero
    y, r = shared_update(new, old, e, at, axes=("dp",), codec="int4", of="w")
                                                                   a parameter on its way from the rank that has updated
                                                                   a part of it to all: what travels is its difference
    c = encode(x, key, codec="int8", rows=4, row=250)              rows of x, one behind the other, as bytes
    c, r = encode_residual(x, e, key, codec="int8", …)             of x + e, and what is left over
    y = decode(c, key, codec="int8", row=250, shape=(10, 100))     the rows one behind the other
    y = decode_sum(c, key, codec="int8", row=250, shape=(250,))    the rows added up, in 32 bits

    q = orthonormal(p)                                             columns that span what those of p do

`lower/compress` makes of the first two the others and ordinary collectives.  `dim`: rows are parts of that dim, not of
all elements as they lie.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from mycel.ir import Type, op
from mycel.ops.codec_kernels import EIGHT_BITS, codec_of

# what becomes of what a codec loses, with the number that may be said of it and what it is otherwise
MEMORIES: dict[str, float | None] = {"ef": None, "ef21": None, "loco": 0.5, "dgc": 0.9, "adam": None}


@dataclass(frozen=True)
class Compression:
    """How a gradient travels: its codec, and what becomes of what that loses.

    ef          it is added to the next gradient (EF14)
    ef21        what travels is the difference to what has been received so far
    loco(0.5)   as ef, but what is added is a moving average of it, of which the newest is this share, in 8 bits
    dgc(0.9)    as ef, but what travels is momentum, kept by each rank and dropped where it was sent: for SGD without
    adam        as ef, but what travels is the momentum of Adam, whose variance is frozen: 1-bit Adam
    """

    codec: str
    memory: str = ""
    rate: float | None = None  # the number of loco and dgc

    def __str__(self) -> str:
        said = "" if self.rate is None or self.rate == MEMORIES[self.memory] else f"({self.rate:g})"
        return self.codec + (f"+{self.memory}{said}" if self.memory else "")

    @property
    def draws(self) -> bool:
        """Does it need a key?"""
        return bool(rank_of(self.codec)) or codec_of(self.codec).draws

    @staticmethod
    def parse(text: str) -> Compression:
        """`int8+ef`, `powersgd(4)+ef`, `topk(0.01)+ef21`, `int8(block=64)`; ValueError says what is wrong."""
        words = [w.strip() for w in text.split("+")]
        memory, rate = _memory_of(words[-1]) if len(words) > 1 else ("", None)
        words = words[:-1] if memory else words
        if words[0].startswith("powersgd"):
            rank = rank_of("+".join(words))
            if not rank or not memory or memory == "dgc":
                raise ValueError("powersgd has a rank, and loses what is not of it: powersgd(4)+ef")
            return Compression(f"powersgd({rank})", memory, rate)
        codec = codec_of("+".join(words))
        if memory and codec.drawn_alike and codec.stochastic:
            raise ValueError(f"{codec} makes up for what it loses by itself: without +stochastic, or without +{memory}")
        if not memory and codec.share < 1 and not codec.stochastic:
            raise ValueError(f"{codec} alone would never send most of a gradient: {codec}+ef")
        if not memory and codec.name == "sign":
            raise ValueError(f"{codec} alone does not converge: {codec}+ef")
        if memory == "dgc" and codec.share == 1:
            raise ValueError(f"{codec} sends some of every element, dgc is for those that are not sent: topk(0.01)+dgc")
        return Compression(str(codec), memory, rate)


def _memory_of(word: str) -> tuple[str, float | None]:
    """`loco(0.2)` -> its name and number; ("", None): it is none."""
    match = re.fullmatch(r"(\w+)\s*(?:\(([^()]*)\))?", word)
    if match is None or match[1] not in MEMORIES:
        return "", None
    name, said, usual = match[1], match[2], MEMORIES[match[1]]
    if said is None:
        return name, usual
    try:
        rate = float(said)
    except ValueError:
        rate = -1.0
    if usual is None or not 0 < rate <= 1 or (name == "dgc" and rate == 1):
        few = "takes no number" if usual is None else f"has a number between 0 and 1, such as {name}({usual:g})"
        raise ValueError(f"{word}: {name} {few}")
    return name, rate


def rank_of(text: str) -> int:
    """The rank of powersgd(4); 0 for a codec of rows."""
    match = re.fullmatch(r"powersgd\(\s*([1-9]\d*)\s*\)", text)
    return int(match[1]) if match else 0


def wide(dtype):
    """Residuals are kept in 32 bits at least."""
    return torch.promote_types(dtype, torch.float32)


@op(
    lambda g, e, key, at, m=None, **_: f"..., {'' if e is None else '...'}, , {', ...' if m else ''} -> ..., ...",
    types=lambda g, e, key, at, m=None, **_: (g, g),
    linear=((0, 1),),
    sent_as_sum=True,
    padding="zeros",
    examples=[
        'f[4,6], None, None, i64[], codec="int8", axes=("dp",), of="w"',
        'f[3], f[3], i64[], i64[], codec="int8", axes=("dp",), of="w"',
    ],
)
def compressed(g, e, key, at, m=None, *, codec, axes, of):
    """g + e, which belongs to the parameter `of`, on its way to a sum over the axes, and what its codec will have lost
    of it; `at`: how many were sent before.  `m` is the same on all ranks, and each adds its share of it
    (`lower/compress` divides it by their number: no rank runs this operator)."""
    y = g + 0 if e is None else g + e
    return y if m is None else y + m, torch.zeros_like(g)


def at_once(*types, **params):
    """Bytes that a kernel takes besides operands and results: ours make the one of the other."""
    return 0


@op(
    "..., ..., -> ...",
    types=lambda e, lost, key, **_: Type(EIGHT_BITS, lost.shape),
    linear=((0, 1),),
    sent_as_sum=True,
    compiles=False,
    scratch=at_once,
    fresh=True,
    examples=['f32[4,6], f32[4,6], i64[], axes=("dp",), share=0.5', 'f64[3], f64[3], i64[], axes=("dp",), share=1.0'],
)
def averaged_error(e, lost, key, *, axes, share):
    """(1 - share) e + share lost, in 8 bits: what a rank remembers of what was lost, a moving average.  As a sum over
    the axes, of which each rank has its own part."""
    from mycel.ops.codec_kernels import averaged_in_eight_bits

    return averaged_in_eight_bits(e, lost, key, share)


@op(
    "..., ..., ... -> ...",
    linear=((0, 1, 2),),
    sent_as_sum=True,
    examples=['f[4,6], f[4,6], f[4,6], axes=("dp",)'],
)
def unsent(u, given, lost, *, axes):
    """u where all that was given is lost, and zero where some of it was sent; on each rank its own part of a sum over
    the axes."""
    return torch.where(given == lost, u, torch.zeros_like(u))


@op(
    "..., ..., ..., -> ..., ...",
    types=lambda new, old, e, at, **_: (new, e),
    padding="zeros",
    examples=['f[4,6], f[4,6], f[4,6], i64[], codec="int4", axes=("dp",), of="w"'],
)
def shared_update(new, old, e, at, *, codec, axes, of):
    """A parameter `of` that all ranks have, as each is told of its new value by the one that has updated a part of it:
    old and new - old + e, up to what its codec loses, which is what is left; `at`: how often it was before.  In a
    global program nothing is lost."""
    return (old.to(e.dtype) + ((new.to(e.dtype) - old.to(e.dtype)) + e)).to(new.dtype), torch.zeros_like(e)


@op("... -> ...", dtype="first", examples=["f[2,3]"], free=True)
def summed(x):
    """A sum that was compressed, or that is one step late, has come: from here on it is whole, or in parts."""
    return x


def moved(x, dim):
    """A dim first, the others as they were."""
    return x.movedim(dim, 0) if dim else x


def encoded_type(codec, rows, row):
    return Type(torch.uint8, (rows, codec_of(codec).size(row)))


@op(
    types=lambda x, key, *, codec, rows, row, dim=0: encoded_type(codec, rows, row),
    rate=lambda *_, codec, **__: f"encode_{codec_of(codec).name}",
    compiles=False,
    scratch=at_once,
    fresh=True,
    examples=[
        'f32[4,50], None, codec="int8", rows=2, row=100', 'f[3,7], i64[], codec="randomk(0.1)", rows=2, row=12, dim=1',
        'bf16[30], i64[], codec="int4+stochastic", rows=4, row=8',
    ],
)  # fmt: skip
def encode(x, key, *, codec, rows, row, dim=0):
    """Rows of x, each as the same number of bytes."""
    from mycel.ops.codec_kernels import codec_of, encode_rows

    x = x.movedim(dim, 0) if dim else x
    return encode_rows(x, None, key, codec_of(codec), rows, row, False)[0]


@op(
    types=lambda x, e, key, *, codec, rows, row, dim=0, over=False: (
        encoded_type(codec, rows, row),
        Type(wide(x.dtype), x.shape),
    ),
    rate=lambda *_, codec, **__: f"residual_{codec_of(codec).name}",
    compiles=False,
    scratch=at_once,
    into=("encode_residual({0}, {1}, {2}, codec={codec}, rows={rows}, row={row}, dim={dim}, over=True)",),
    examples=[
        'f32[4,50], f32[4,50], None, codec="int8", rows=2, row=100', 'f[30], None, i64[], codec="int4", rows=4, row=8',
        'f[3,7], f[3,7], None, codec="sign", rows=2, row=12, dim=1',
    ],
)  # fmt: skip
def encode_residual(x, e, key, *, codec, rows, row, dim=0, over=False):
    """Rows of x + e as bytes, and x + e without what these say, which may be written over x: half of what is moved."""
    from mycel.ops.codec_kernels import codec_of, encode_rows

    if not dim:
        return encode_rows(x, e, key, codec_of(codec), rows, row, True, over)
    x, e = x.movedim(dim, 0), None if e is None else e.movedim(dim, 0)
    code, left = encode_rows(x, e, key, codec_of(codec), rows, row, True)
    return code, left.movedim(0, dim).contiguous()


@op(
    types=lambda code, key, *, codec, row, shape: Type(torch.float32, tuple(shape)),
    rate=lambda *_, codec, **__: f"decode_{codec_of(codec).name}",
    compiles=False,
    scratch=at_once,
    fresh=True,
    examples=['u8[2,264], None, codec="int8(block=128)", row=200, shape=(4,99)'],
)
def decode(code, key, *, codec, row, shape):
    """The rows, one behind the other."""
    from mycel.ops.codec_kernels import codec_of, decode_rows

    return decode_rows(code, key, codec_of(codec), shape, row, False)


@op(
    types=lambda code, key, *, codec, row, shape, dim=0: Type(torch.float32, tuple(shape)),
    rate=lambda *_, codec, **__: f"added_{codec_of(codec).name}",
    compiles=False,
    scratch=at_once,
    fresh=True,
    examples=['u8[2,264], None, codec="int8(block=128)", row=200, shape=(8,25), dim=1'],
)
def decode_sum(code, key, *, codec, row, shape, dim=0):
    """The sum of the rows; `dim` is the one that rows are parts of."""
    from mycel.ops.codec_kernels import codec_of, decode_rows

    if not dim:
        return decode_rows(code, key, codec_of(codec), shape, row, True)
    lying = [shape[dim], *(n for d, n in enumerate(shape) if d != dim)]
    return decode_rows(code, key, codec_of(codec), lying, row, True).movedim(0, dim).contiguous()


@op("n^ r^ -> n r", dtype="first", compiles=False, fresh=True, flops=lambda d: 2 * d.n * d.r * d.r, examples=["f[6,3]"])
def orthonormal(p):
    """Orthonormal columns that span what the columns of p do."""
    return torch.linalg.qr(p).Q
