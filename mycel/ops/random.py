"""Random numbers without state: hash(key, site, global index), so parts of a tensor draw what the whole would.

    i = (key + site * M) * K + offset + sum of coordinate * stride          keys and sites start far apart
    x = i * G,  x = (x ^ x >> 32) * C1,  x = (x ^ x >> 32) * C2             two murmur3 rounds: the high bits are random

`strides` (default: contiguous) and `offset` place a part within the whole: a split of the tensor keeps the strides of
the whole and starts at the offset of its first element.  A gradient redraws with the same key and site and keeps no
mask.
"""

from __future__ import annotations

import math

import torch

from mycel.ir import OPS, SplitRule, Type, is_float, op
from mycel.ops.capture_rules import captures, draw
from mycel.ops.convert import PARTS, part_dtype
from mycel.ops.rules import letters, o


def _wrap(n):
    """An integer as two's complement of 64 bits."""
    return (n + 2**63) % 2**64 - 2**63


def _mix(x):
    """Spread counts, then two murmur3 rounds, in place; every bit of x reaches the high bits of the result evenly."""
    x.mul_(-0x61C8864680B583EB)
    x.bitwise_xor_(x >> 32).mul_(-0xAE502812AA7333)
    return x.bitwise_xor_(x >> 32).mul_(-0x3B314601E57A13AD)


def _counts(key, offset, shape, strides, site):
    """The count of each element, from which its bits are drawn."""
    x = (key + _wrap(site * 0xD1B54A32D192ED03)) * 0x2545F4914F6CDD1D + offset
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))] if strides is None else strides
    for n, stride in zip(shape, strides, strict=True):
        x = x.unsqueeze(-1)
        if n != 1:
            x = torch.add(x, torch.arange(n, device=key.device), alpha=stride)
    return x


def _hash(key, offset, shape, strides, site):
    """An i64 of random high bits for each element."""
    return _mix(_counts(key, offset, shape, strides, site))


def _bits(key, offset, shape, strides, site):
    """An i64 of 64 random bits for each element."""
    x = _hash(key, offset, shape, strides, site)
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def _unit(key, offset, shape, strides, site, dtype):
    """[0, 1) in steps of the dtype's mantissa."""
    digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    return (_hash(key, offset, shape, strides, site) >> (64 - digits)).to(dtype) * 2.0**-digits + 0.5


def _open_unit(key, offset, shape, strides, site, dtype):
    """(0, 1), both ends left out, in f32 or f64."""
    digits, wide = (53, torch.float64) if dtype == torch.float64 else (24, torch.float32)
    x = _hash(key, offset, shape, strides, site) >> (65 - digits)
    return (x.to(wide) + (2.0 ** (digits - 2) + 0.5)) * 2.0 ** (1 - digits)


def drawn_dims(key, offset, *inputs, shape, **_):
    """Every dim may be split; further inputs have the shape of the result or are scalars."""
    names = letters(len(shape))
    rest = "".join(", " + " ".join(names if getattr(x, "shape", ()) else ()) for x in inputs)
    return f",{rest} -> {' '.join(names)}", dict(zip(names, shape, strict=True))


def placed(at, offset, strides):
    """Where a part of a draw starts, and the strides of the whole."""
    strides = strides or tuple(math.prod(at.shape[d + 1 :]) for d in range(len(at.shape)))
    for d, stride in enumerate(strides):
        start = at.start_of(d)
        if not isinstance(start, int):
            offset = o.add(o.mul(start, stride), offset)
    return offset, strides


def draw_part(name):
    """A part of a random tensor: the same numbers as in the whole."""

    def write(at, key, offset, *inputs, strides=None, **params):
        offset, strides = placed(at, offset, strides)
        return OPS[name](key, offset, *inputs, strides=strides, **params)

    return {"*": SplitRule(write, uneven=True)}


def drawn(dtype=torch.float32, examples=()):
    """A random operator: its type is in its params, and nothing is to be differentiated."""
    return lambda kernel: op(
        drawn_dims,
        types=lambda *_, shape, dtype=dtype, **__: Type(dtype, tuple(shape)),
        vjp=lambda g, y, *inputs, **_: (None,) * len(inputs),
        parts=draw_part(kernel.__name__),
        examples=[f"i64[], {text}" for text in examples],
    )(kernel)


@op("... -> ...", examples=["i64[], data=3"])
def fold_in(key, *, data):
    """The key of the data-th child of a key."""
    x = _mix(key + _wrap((data + 1) * 0x2545F4914F6CDD1D))
    return x ^ ((x >> 32) & 0xFFFFFFFF)


@drawn(
    torch.int64,
    examples=["0, shape=(2,3,4)", "i64[], shape=(4,6), site=2", "7, shape=()", "3, shape=(2,3), strides=(8,2)"],
)
def bits(key, offset, *, shape, strides=None, site=0):
    """64 random bits as an i64."""
    return _bits(key, offset, shape, strides, site)


@drawn(
    examples=[
        "0, shape=(2,3,4)",
        "5, shape=(4,6), dtype=f64, site=1",
        "0, shape=(4,), dtype=bf16",
        "0, shape=(4,), dtype=f16",
    ]
)
def uniform(key, offset, *, shape, dtype=torch.float32, strides=None, site=0):
    """Evenly from [0, 1)."""
    return _unit(key, offset, shape, strides, site, dtype)


@drawn(examples=["0, shape=(2,3,4)", "i64[], shape=(4,6), dtype=f64, site=1", "0, shape=(4,), dtype=bf16"])
def normal(key, offset, *, shape, dtype=torch.float32, strides=None, site=0):
    """From the normal distribution with mean 0 and deviation 1."""
    digits, wide = (53, torch.float64) if dtype == torch.float64 else (24, torch.float32)
    x = (_hash(key, offset, shape, strides, site) >> (64 - digits)).to(wide)
    return torch.erfinv((x + 0.5) * 2.0 ** (1 - digits)).mul_(math.sqrt(2.0)).to(dtype)


@drawn(examples=["0, shape=(2,3)", "0, shape=(4,), dtype=f64", "0, shape=(4,), dtype=f16"])
def exponential(key, offset, *, shape, dtype=torch.float32, strides=None, site=0):
    """From the exponential distribution with rate 1; never 0."""
    return _open_unit(key, offset, shape, strides, site, dtype).log_().neg_().to(dtype)


@drawn(examples=["0, shape=(2,3)", "0, shape=(4,), dtype=f64"])
def gumbel(key, offset, *, shape, dtype=torch.float32, strides=None, site=0):
    """From the standard Gumbel distribution: argmax(logits + gumbel) is a draw of softmax(logits)."""
    return _open_unit(key, offset, shape, strides, site, dtype).log_().neg_().log_().neg_().to(dtype)


@drawn(examples=["0, 0.25, shape=(2,3,4)", "0, f[4,3]~0.9, shape=(4,3), dtype=bool", "2, f64[], shape=(4,), dtype=f64"])
def bernoulli(key, offset, p, *, shape, dtype=torch.float32, strides=None, site=0):
    """1 with probability p, else 0."""
    return (_unit(key, offset, shape, strides, site, torch.float32) < p).to(dtype)


@drawn(
    torch.int64,
    examples=[
        "0, low=0, high=5, shape=(2,3)", "0, low=-3, high=4, shape=(6,), dtype=f32",
        "0, low=0, high=2, shape=(4,), dtype=u8",
    ],
)  # fmt: skip
def randint(key, offset, *, low, high, shape, dtype=torch.int64, strides=None, site=0):
    """Evenly from the integers low, …, high - 1."""
    return (torch.remainder(_bits(key, offset, shape, strides, site), high - low) + low).to(dtype)


@op(
    lambda key, *, shape, site=0: ("... -> n^", {"n": shape[0]}),
    types=lambda key, *, shape, site=0: Type(torch.int64, tuple(shape)),
    examples=["i64[], shape=(6,)", "i64[], shape=(4,), site=3", "i64[], shape=(0,)"],
    apart=True,
)
def permutation(key, *, shape, site=0):
    """0, …, n - 1 in random order; shape is (n,)."""
    return torch.argsort(_bits(key, 0, shape, None, site))


def _dropout_vjp(g, y, x, key, offset, **params):
    return dropout(g, key, offset, **params), None, None


def _dropout_part(at, x, key, offset, *, strides=None, **params):
    offset, strides = placed(at, offset, strides)
    return dropout(x, key, offset, strides=strides, **params)


@op(
    "..., , -> ...",
    dtype="first",
    vjp=_dropout_vjp,
    parts={"*": SplitRule(_dropout_part, uneven=True)},
    linear=((0,),),
    examples=[
        "f[2,3,4], i64[], 0, p=0.25", "f[4,6], i64[], i64[], p=0.5, site=2", "f[6], i64[], 0, p=0.0",
        "f[2,3], i64[], 0, p=1.0", "c128[2,3], i64[], 0, p=0.5", "f[], i64[], 0, p=0.5",
    ],
)  # fmt: skip
def dropout(x, key, offset, *, p, strides=None, site=0):
    """x with elements set to 0 with probability p, the rest scaled by 1 / (1 - p)."""
    keep = _hash(key, offset, x.shape, strides, site) >= dropout_bound(p)
    return x * keep * (1.0 / (1.0 - p) if p < 1 else 0.0)


def dropout_bound(p):
    """Bits below it, as an i64, are as many as the share p of all."""
    return min(int(p * 2.0**64), 2**64 - 1) - 2**63


@drawn(torch.int64, examples=["0, shape=(2,3), strides=(12,4)", "i64[], shape=(4,2), strides=(8,6), site=2"])
def row_counts(key, offset, *, shape, strides, site=0):
    """The count at which each row of a tensor starts to draw, where rows have all but its last dim: `strides` are the
    tensor's own."""
    return _counts(key, offset, shape, strides, site)


def keeps(counts, columns, p):
    """Which elements of rows that start to draw at `counts` are not dropped."""
    return _mix(counts.unsqueeze(-1) + torch.arange(columns, device=counts.device)) >= dropout_bound(p)


@op(
    "... k^, ... -> ... k",
    dtype="first",
    vjp=lambda g, y, x, counts, *, p: (o.drop_rows(g, counts, p=p), None),
    parts={"k": SplitRule(lambda at, x, counts, *, p: o.drop_rows(x, o.add(counts, at.start("k")), p=p), uneven=True)},
    linear=((0,),),
    examples=["f[2,3,4], i64[2,3], p=0.25", "f[4,6], i64[4], p=0.0", "f[6], i64[], p=1.0"],
)
def drop_rows(x, counts, *, p):
    """`dropout` of rows that start to draw at `counts`: with those of `row_counts` the same elements are dropped."""
    return x * keeps(counts, x.shape[-1], p) * (1.0 / (1.0 - p) if p < 1 else 0.0)


# What torch's random functions mean.  A rule draws its key and site with `draw`; explicit generators are declined.


def fresh(draw_op, shape, dtype=None, **params):
    """One fresh draw of a whole tensor."""
    key, site = draw()
    return draw_op(key, 0, shape=tuple(shape), dtype=dtype or torch.get_default_dtype(), site=site, **params)


def _working(dtype):
    """The dtype to draw real numbers in for a result of `dtype`."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _cast(x, dtype):
    return x if x.dtype == dtype else o.cast(x, dtype=dtype)


def affine(x, scale, shift):
    """x * scale + shift, without the parts that do nothing"""
    x = x if isinstance(scale, (int, float)) and scale == 1 else o.mul(x, scale)
    return x if isinstance(shift, (int, float)) and shift == 0 else o.add(x, shift)


def unless_generated(rule):
    """The rule, for calls that name no generator (`generator=None` is an overload of its own)."""

    def checked(*args, generator=None, **kwargs):
        return NotImplemented if generator is not None else rule(*args, **kwargs)

    return checked


@captures("aten.rand.default")
def _rand(size, *, dtype=None, **_):
    if dtype is None or not dtype.is_complex:
        return fresh(uniform, size, dtype)
    return o.complex(*(fresh(uniform, size, PARTS[dtype]) for _ in range(2)))


@captures("aten.rand_like.default")
def _rand_like(x, *, dtype=None, **_):
    return _rand(x.shape, dtype=dtype or x.dtype)


@captures("aten.randn.default")
def _randn(size, *, dtype=None, **_):
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_complex:
        return fresh(normal, size, dtype)
    part = PARTS[dtype]
    return o.mul(o.complex(fresh(normal, size, part), fresh(normal, size, part)), math.sqrt(0.5))


@captures("aten.randn_like.default")
def _randn_like(x, *, dtype=None, **_):
    return _randn(x.shape, dtype=dtype or x.dtype)


@captures("aten.randint.default")
def _randint(high, size, *, dtype=torch.int64, **_):
    return _randint_low(0, high, size, dtype=dtype)


@captures("aten.randint.low")
def _randint_low(low, high, size, *, dtype=torch.int64, **_):
    if high <= low:
        raise ValueError(f"randint: high ({high}) must be above low ({low})")
    return fresh(randint, size, dtype or torch.int64, low=low, high=high)


@captures("aten.randint_like.default")
def _randint_like(x, high, *, dtype=None, **_):
    return _randint_low(0, high, x.shape, dtype=dtype or x.dtype)


@captures("aten.randint_like.low_dtype")
def _randint_like_low(x, low, high, *, dtype=None, **_):
    return _randint_low(low, high, x.shape, dtype=dtype or x.dtype)


@captures("aten.randperm.default")
def _randperm(n, *, dtype=torch.int64, **_):
    key, site = draw()
    return _cast(permutation(key, shape=(n,), site=site), dtype or torch.int64)


captures("aten.rand.generator")(unless_generated(_rand))
captures("aten.randn.generator")(unless_generated(_randn))
captures("aten.randint.generator")(unless_generated(_randint))
captures("aten.randint.low_generator")(unless_generated(_randint_low))
captures("aten.randperm.generator")(unless_generated(_randperm))


@captures("aten.uniform.default")
def _uniform(x, low=0.0, high=1.0, *, generator=None, **named):
    low, high = named.get("from", low), named.get("to", high)
    if generator is not None or not is_float(x.dtype):
        return NotImplemented
    if not x.dtype.is_complex:
        return affine(fresh(uniform, x.shape, x.dtype), high - low, low)
    part = part_dtype(x)
    return o.complex(*(affine(fresh(uniform, x.shape, part), high - low, low) for _ in range(2)))


@captures("aten.normal_functional.default")
def _normal(x, mean=0.0, std=1.0, *, generator=None):
    return NotImplemented if generator is not None else affine(_randn(x.shape, dtype=x.dtype), std, mean)


@captures("aten.normal.float_float")
def _normal_sized(mean, std, size, *, generator=None, dtype=None, **_):
    return NotImplemented if generator is not None else affine(_randn(size, dtype=dtype), std, mean)


@captures("aten.normal.Tensor_float", "aten.normal.float_Tensor", "aten.normal.Tensor_Tensor")
def _normal_tensors(mean, std=1.0, *, generator=None):
    if generator is not None:
        return NotImplemented
    tensors = [x for x in (mean, std) if not isinstance(x, (int, float))]
    return affine(_randn(torch.broadcast_shapes(*(x.shape for x in tensors)), dtype=tensors[0].dtype), std, mean)


@captures("aten.log_normal.default")
def _log_normal(x, mean=1.0, std=2.0, *, generator=None):
    return NotImplemented if generator is not None else o.exp(_normal(x, mean, std))


@captures("aten.cauchy.default")
def _cauchy(x, median=0.0, sigma=1.0, *, generator=None):
    if generator is not None:
        return NotImplemented
    return affine(o.tan(affine(fresh(uniform, x.shape, x.dtype), math.pi, -math.pi / 2)), sigma, median)


@captures("aten.exponential.default")
def _exponential(x, lambd=1.0, *, generator=None):
    return NotImplemented if generator is not None else affine(fresh(exponential, x.shape, x.dtype), 1.0 / lambd, 0)


@captures("aten.geometric.default")
def _geometric(x, p, *, generator=None):
    """The first success of coins with probability p: an exponential waiting time, rounded up."""
    if generator is not None:
        return NotImplemented
    wait = fresh(exponential, x.shape, _working(x.dtype))
    return _cast(o.ceil(o.div(wait, -math.log1p(-p))), x.dtype)


@captures("aten.random.default")
def _random(x, *, generator=None):
    if generator is not None:
        return NotImplemented
    high = 2 if x.dtype == torch.bool else _largest(x.dtype)
    return fresh(randint, x.shape, x.dtype, low=0, high=high)


def _largest(dtype):
    """The end of the integers a dtype holds without gaps."""
    return round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max


@captures("aten.random.from", "aten.random.to")
def _random_range(x, low, high=None, *, generator=None, **named):
    low, high = named.get("from", low), named.get("to", high)
    if generator is not None:
        return NotImplemented
    return _randint_low(low if high is not None else 0, low if high is None else high, x.shape, dtype=x.dtype)


@captures("aten.bernoulli.default")
def _bernoulli(p, *, generator=None):
    return _bernoulli_p(p, p, generator=generator)


@captures("aten.bernoulli.p", "aten.bernoulli.Tensor")
def _bernoulli_p(x, p=0.5, *, generator=None):
    if generator is not None:
        return NotImplemented
    if getattr(p, "shape", ()) != () and p.shape != x.shape:
        p = o.expand(p, shape=tuple(x.shape))
    key, site = draw()
    return bernoulli(key, 0, p, shape=tuple(x.shape), dtype=x.dtype, site=site)


@captures("aten.multinomial.default")
def _multinomial(weights, num_samples, replacement=False, *, generator=None):
    """An exponential race: the k smallest of E / w, one race for each sample with replacement."""
    if generator is not None:
        return NotImplemented
    *lead, n = weights.shape
    if not replacement and num_samples > n:
        raise ValueError(f"multinomial: {num_samples} samples without replacement of {n}")
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32
    weights = _cast(weights, dtype)
    if not replacement and num_samples > 1:
        race = o.div(weights, fresh(exponential, weights.shape, dtype))
        return o.topk(race, k=num_samples, dim=len(lead))[1]
    weights = o.reshape(weights, shape=(*lead, 1, n))
    race = o.div(weights, fresh(exponential, (*lead, num_samples, n), dtype))
    return o.argmax(race, dim=len(lead) + 1, keepdim=False)
