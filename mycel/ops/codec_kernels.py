"""Codecs: numbers in fewer bytes, in blocks of fixed size.  A paragraph each: how a block is encoded and decoded.

    fp32              4 bytes an element, nothing lost
    bf16, fp16        2 bytes; fp16 with a power of two beside each block, so that nothing overflows
    int8, int4        whole multiples of largest / 127, largest / 7; the scale beside each block
    fp8               floats of 8 bits (e4m3), times largest / 448; the scale beside each block
    sign              one bit, and the mean of |x| beside each block
    topk(0.01)        the largest of each block, in bf16, and where they are
    randomk(0.1)      elements at places that all ranks draw alike, which need not be sent

`int8(block=128)` has blocks of another size; with `+stochastic` the mean over keys is what was encoded: int8, int4 and
bf16 round up or down by chance, randomk makes up for what it leaves out.  Of a block with a number that is not finite
something decodes to one that is not: whoever checks the sum finds out.

Rows are encoded apart, each to the same number of bytes: row i is what goes to rank i.  On the CPU all but fp32 and
randomk run in C where there is a compiler (`native_codecs.py`), on a GPU int8, int4, fp8 and sign in Triton
(`triton_codecs.py`), to the same bytes as in torch.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mycel.ops.native_codecs import native

TINY = 1e-35  # blocks whose largest element is below it are zero
LEVELS = {"int8": 127, "int4": 7}
LARGEST = torch.finfo(torch.bfloat16).max
MOST = 4096  # elements in a block
EIGHT_BITS = torch.float8_e5m2  # of errors that are remembered: 32 powers of two in quarters
EIGHT_BITS_SCALE = 2.0**15  # what these are multiplied by: from 5e-10 to 1.75, what is larger is cut off


@dataclass(frozen=True)
class Codec:
    """One codec with its settings: `share` of the elements are kept; `stochastic`: rounded by chance."""

    name: str
    block: int
    share: float = 1.0
    stochastic: bool = False

    @property
    def kept(self) -> int:
        """Elements that are kept of each block."""
        return max(1, math.ceil(self.share * self.block))

    @property
    def block_bytes(self) -> int:
        return FORMS[self.name].bytes(self)

    def size(self, n: int) -> int:
        """Bytes of a row of n elements."""
        return -(-n // self.block) * self.block_bytes

    @property
    def draws(self) -> bool:
        """Does it need a key?"""
        return self.stochastic or FORMS[self.name].draws

    @property
    def drawn_alike(self) -> bool:
        """Must all ranks have the same key?"""
        return FORMS[self.name].draws

    @property
    def is_exact(self) -> bool:
        return FORMS[self.name].exact

    def bound(self, x):
        """The largest error of each element of blocks [n, block]."""
        return FORMS[self.name].bound(self, x)

    def __str__(self) -> str:
        form = FORMS[self.name]
        said = [f"{self.share:g}"] * (self.share < 1) + [f"block={self.block}"] * (self.block != form.block)
        return self.name + (f"({', '.join(said)})" if said else "") + "+stochastic" * self.stochastic


@dataclass(frozen=True)
class CodecForm:
    """What a codec does with blocks f32[n, block] -> u8[n, bytes] and back; `noise(block)`: numbers in [0, 1) for each
    element.

    `shared`: it takes the share of elements that are kept.  `rounds`: it can be unbiased, by chance.  `draws`: it needs
    a key in any case, for decoding too, and draws the same for every row: all ranks know what others drew."""

    encode: Callable[..., torch.Tensor]
    decode: Callable[..., torch.Tensor]
    bytes: Callable[[Codec], int]
    block: int
    bound: Callable[..., torch.Tensor]
    shared: bool = False
    rounds: bool = False
    draws: bool = False
    exact: bool = False


FORMS: dict[str, CodecForm] = {}
_SPEC = re.compile(r"\s*([a-z]\w*)\s*(?:\(([^()]*)\))?\s*(\+\s*stochastic)?\s*")


@functools.cache
def codec_of(text: str) -> Codec:
    """The codec of a text such as int8, int8(block=128)+stochastic, topk(0.01); ValueError says what is wrong."""
    match = _SPEC.fullmatch(text)
    form = FORMS.get(match[1]) if match else None
    if match is None or form is None:
        raise ValueError(f"there is no codec {text!r}: {', '.join(FORMS)}")
    share, block = None, form.block
    for item in filter(None, (match[2] or "").split(",")):
        name, _, value = item.rpartition("=")
        try:
            if name.strip() == "block":
                block = int(value)
            elif not name.strip() and form.shared:
                share = float(value)
            else:
                raise ValueError
        except ValueError:
            raise ValueError(f"{match[1]} takes no {item.strip()!r}") from None
    if form.shared and (share is None or not 0 < share <= 1):
        raise ValueError(f"{match[1]} keeps a share of the elements, more than 0 and at most 1: {match[1]}(0.01)")
    if block not in range(16, MOST + 1, 16):
        raise ValueError(f"a block of {block} elements: a multiple of 16, at most {MOST}")
    if match[3] and not form.rounds:
        raise ValueError(f"{match[1]} does not round by chance")
    return Codec(match[1], block, 1.0 if share is None else share, bool(match[3]))


# -- rows of blocks --------------------------------------------------------------------------------------------------


def encode_rows(x, e, key, codec: Codec, rows: int, row: int, left: bool, over: bool = False):
    """Rows of x + e (e may be None), one behind the other -> u8[rows, size], and with `left` what is left over, as x is
    shaped; `over`: nobody reads x any more, and that may be written over it."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    v = wide if e is None else None
    run = native(codec.name) if x.is_cpu and wide.dtype == torch.float32 else None
    if run is not None:
        return run.encode(wide, e, seed_of(key) if codec.stochastic else 0, codec, rows, row, left, over)
    kernels = on_gpu(codec, x.device) if wide.dtype == torch.float32 else None
    if kernels is not None:
        return kernels.encode(wide, e, key, codec, rows, row, left, over)
    v = wide + e if v is None else v
    blocks = blocks_of(v.float(), codec, rows, row)
    noise = functools.partial(noise_of, key, blocks, blocks.shape[0] // rows if codec.drawn_alike else 0)
    code = FORMS[codec.name].encode(codec, blocks, noise).view(rows, codec.size(row))
    return code, (v - decode_rows(code, key, codec, v.shape, row, False).to(v.dtype) if left else None)


def decode_rows(code, key, codec: Codec, shape, row: int, added: bool):
    """u8[rows, size] -> f32[shape]: the rows one behind the other, or added up."""
    rows, n = code.shape[0], math.prod(shape)
    run = native(codec.name) if code.is_cpu else None
    if run is not None:
        return run.decode(code, codec, n, row, added).view(shape)
    kernels = on_gpu(codec, code.device)
    if kernels is not None:
        return kernels.decode(code, codec, shape, row, added)
    blocks = code.reshape(-1, codec.block_bytes)
    noise = functools.partial(noise_of, key, blocks, blocks.shape[0] // rows)
    y = FORMS[codec.name].decode(codec, blocks, noise).view(rows, -1)[:, :row]
    if added:
        total = y[0]
        for other in y[1:]:
            total = total + other
        return total[:n].reshape(shape)
    return y.reshape(-1)[:n].view(shape)


@functools.cache
def on_gpu(codec: Codec, device: torch.device):
    """The kernels of a GPU for this codec; None: those of torch."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from mycel.ops import triton_codecs

    return triton_codecs if triton_codecs.takes(codec, device) else None


def blocks_of(v, codec: Codec, rows: int, row: int):
    """f32 rows one behind the other -> [blocks, block], filled up with zeros."""
    flat, n = v.reshape(-1), v.numel()
    if n < rows * row:
        flat = torch.nn.functional.pad(flat, (0, rows * row - n))
    y = flat.view(rows, row)
    more = -(-row // codec.block) * codec.block - row
    return (torch.nn.functional.pad(y, (0, more)) if more else y).reshape(-1, codec.block)


def seed_of(key) -> int:
    """32 bits of a key."""
    key = int(key)
    return (key ^ (key >> 32)) & 0xFFFFFFFF


def noise_of(key, blocks, period: int, width: int):
    """[0, 1) for each of `width` elements of each block: a hash of the key and the element's place (murmur3's end, in
    32 bits); with a `period`, the same again after so many blocks."""
    mask = 0xFFFFFFFF
    h = torch.arange((period or blocks.shape[0]) * width, device=blocks.device)
    h = (h * 0x9E3779B1 & mask) ^ ((key ^ (key >> 32)) & mask)
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & mask
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & mask
    h = h ^ (h >> 16)
    unit = ((h >> 8).float() * 2.0**-24).view(-1, width)
    return unit.repeat(blocks.shape[0] // period, 1) if period else unit


def averaged_in_eight_bits(e, lost, key, share: float):
    """e (1 - share) + lost share, `in_eight_bits`; in C and on a GPU in one pass."""
    is_wide, most = e.dtype == lost.dtype == torch.float32, torch.finfo(EIGHT_BITS).max
    run = native("fp8") if is_wide and e.is_cpu and e.shape == lost.shape else None
    if run is not None:
        return run.averaged(e, lost, seed_of(key), share, EIGHT_BITS_SCALE, most, EIGHT_BITS)
    kernels = on_gpu(codec_of("int8"), e.device) if is_wide else None
    if kernels is None:
        return in_eight_bits(e * (1 - share) + lost * share, key)
    return kernels.averaged(e, lost, key, share, EIGHT_BITS_SCALE, most, EIGHT_BITS)


def in_eight_bits(x, key):
    """x times EIGHT_BITS_SCALE, up or down by chance: small changes of a number that is kept in few bits add up.  These
    are the upper half of 16 bits, and what is drawn is added to the lower."""
    most = torch.finfo(EIGHT_BITS).max
    bits = (x * EIGHT_BITS_SCALE).clamp(-most, most).half().view(torch.int16).reshape(1, -1)
    more = (noise_of(key, bits, 0, max(bits.shape[1], 1)) * 256).to(torch.int16) if bits.numel() else 0
    rounded = (bits + more) & -256
    return rounded.view(torch.float16).view(x.shape).to(EIGHT_BITS)


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


# -- the codecs ------------------------------------------------------------------------------------------------------


def fp32_encode(codec, x, noise):
    return as_bytes(x)


def fp32_decode(codec, code, noise):
    return code.contiguous().view(torch.float32)


FORMS["fp32"] = CodecForm(
    fp32_encode, fp32_decode, lambda c: 4 * c.block, 256, lambda c, x: torch.zeros_like(x), exact=True
)


NAN_IN_BF16 = 0x7FC0  # devices have others


def in_bf16(x, more=None):
    """The nearest, or `more` (below the last bit that is kept) added and cut off; finite numbers stay finite."""
    cut = torch.where(torch.isfinite(x), x.clamp(-LARGEST, LARGEST), x)
    if more is None:
        bits = cut.to(torch.bfloat16).view(torch.int16)
    else:
        bits = torch.where(torch.isfinite(x), cut.view(torch.int32) + more, cut.view(torch.int32))
        bits = (bits >> 16).to(torch.int16)
    return as_bytes(torch.where(torch.isnan(x), NAN_IN_BF16, bits).to(torch.int16))


def bf16_encode(codec, x, noise):
    return in_bf16(x, (noise(codec.block) * 2.0**16).to(torch.int32) if codec.stochastic else None)


def bf16_decode(codec, code, noise):
    return code.contiguous().view(torch.bfloat16).float()


FORMS["bf16"] = CodecForm(
    bf16_encode,
    bf16_decode,
    lambda c: 2 * c.block,
    256,
    lambda c, x: x.abs() * (2.0**-7 if c.stochastic else 2.0**-8) + 1e-40,
    rounds=True,
)


def fp16_encode(codec, x, noise):
    """The power of two that brings the largest below 2^15."""
    top = x.abs().amax(1, keepdim=True)
    _, exponent = torch.frexp(torch.where(torch.isfinite(top), top, 0))
    scale = torch.ldexp(torch.ones_like(top), exponent - 15)
    scale = torch.where(top >= TINY, scale, torch.ones_like(top))
    scale = torch.where(torch.isfinite(top), scale, torch.nan)
    return torch.cat([as_bytes(scale), as_bytes((x / scale).half())], 1)


def fp16_decode(codec, code, noise):
    return code[:, 4:].contiguous().view(torch.float16).float() * code[:, :4].contiguous().view(torch.float32)


FORMS["fp16"] = CodecForm(
    fp16_encode,
    fp16_decode,
    lambda c: 4 + 2 * c.block,
    256,
    lambda c, x: x.abs() * 2.0**-11 + x.abs().amax(1, keepdim=True) * 2.0**-38 + TINY,
)


def integer_encode(codec, x, noise):
    levels = LEVELS[codec.name]
    top = x.abs().amax(1, keepdim=True)
    most = torch.full_like(top, levels)  # a tensor: by a number, torch divides to the last bit on CPUs alone
    finite, large = torch.isfinite(top), top >= TINY
    scale = torch.where(large, top / most, 0)
    scale = torch.where(finite, scale, torch.nan)
    y = torch.where(finite, x * torch.where(large, most / top, 0), 0)
    y = torch.floor(y + noise(codec.block)).clamp(-levels, levels) if codec.stochastic else torch.round(y)
    if codec.name == "int8":
        return torch.cat([as_bytes(scale), as_bytes(y.to(torch.int8))], 1)
    low, high = (y.to(torch.int16) + 8).to(torch.uint8).chunk(2, 1)
    return torch.cat([as_bytes(scale), low | (high << 4)], 1)


def integer_decode(codec, code, noise):
    scale, code = code[:, :4].contiguous().view(torch.float32), code[:, 4:]
    if codec.name == "int8":
        return code.contiguous().view(torch.int8).float() * scale
    return (torch.cat([code & 15, code >> 4], 1).to(torch.int16) - 8).float() * scale


def integer_bound(codec, x):
    """Half a step, or a whole one by chance; and the rounding of the arithmetic."""
    step = x.abs().amax(1, keepdim=True) / LEVELS[codec.name]
    return (step * ((1.0 if codec.stochastic else 0.5) + 1e-4) + TINY).expand_as(x)


FORMS["int8"] = CodecForm(integer_encode, integer_decode, lambda c: 4 + c.block, 256, integer_bound, rounds=True)
FORMS["int4"] = CodecForm(integer_encode, integer_decode, lambda c: 4 + c.block // 2, 128, integer_bound, rounds=True)


MOST_FP8 = 448.0


def fp8_encode(codec, x, noise):
    top = x.abs().amax(1, keepdim=True)
    most = torch.full_like(top, MOST_FP8)
    finite, large = torch.isfinite(top), top >= TINY
    scale = torch.where(finite, torch.where(large, top / most, 0), torch.nan)
    y = torch.where(finite, x * torch.where(large, most / top, 0), 0)
    return torch.cat([as_bytes(scale), as_bytes(y.to(torch.float8_e4m3fn))], 1)


def fp8_decode(codec, code, noise):
    scale = code[:, :4].contiguous().view(torch.float32)
    return code[:, 4:].contiguous().view(torch.float8_e4m3fn).float() * scale


FORMS["fp8"] = CodecForm(
    fp8_encode,
    fp8_decode,
    lambda c: 4 + c.block,
    256,
    lambda c, x: x.abs() * (2.0**-4 + 1e-4) + x.abs().amax(1, keepdim=True) * (2.0**-10 / MOST_FP8 * 1.01) + TINY,
)


def _sum_in_order(x):
    """Of each row, keeping its dim; the halves first: the same bits on every device."""
    while (n := x.shape[1]) > 1:
        x = torch.cat([x[:, : n // 2] + x[:, n // 2 : n // 2 * 2], x[:, n // 2 * 2 :]], 1)
    return x


def sign_encode(codec, x, noise):
    """Bit j of byte i is element j * block / 8 + i."""
    scale = _sum_in_order(x.abs() * (1 / codec.block))
    scale = torch.where(torch.isfinite(scale), scale, torch.nan)
    bits = (x >= 0).to(torch.uint8).view(-1, 8, codec.block // 8)
    code = functools.reduce(torch.bitwise_or, (bits[:, j] << j for j in range(8)))
    return torch.cat([as_bytes(scale), code], 1)


def sign_decode(codec, code, noise):
    scale, code = code[:, :4].contiguous().view(torch.float32), code[:, 4:]
    bits = torch.cat([(code >> j) & 1 for j in range(8)], 1)
    return (bits.float() * 2 - 1) * scale


FORMS["sign"] = CodecForm(
    sign_encode,
    sign_decode,
    lambda c: 4 + c.block // 8,
    512,
    lambda c, x: torch.maximum(x.abs(), x.abs().mean(1, keepdim=True)) * (1 + 1e-5) + TINY,
)


def topk_encode(codec, x, noise):
    """Places in 16 bits, values in bf16; of equal ones the first."""
    at = x.abs().sort(dim=1, descending=True, stable=True).indices[:, : codec.kept]
    return torch.cat([as_bytes(at.to(torch.int16)), in_bf16(x.gather(1, at))], 1)


def topk_decode(codec, code, noise):
    at, values = code.split(2 * codec.kept, 1)
    y = torch.zeros(code.shape[0], codec.block, device=code.device)
    at = at.contiguous().view(torch.int16).long().clamp(0, codec.block - 1)
    return y.scatter(1, at, values.contiguous().view(torch.bfloat16).float())


def topk_bound(codec, x):
    """What is left out is no larger than what is kept."""
    least = x.abs().topk(codec.kept, 1).values[:, -1:]
    return torch.where(x.abs() > least, x.abs() * 2.0**-8, least) + 1e-40


FORMS["topk"] = CodecForm(topk_encode, topk_decode, lambda c: 4 * c.kept, 1024, topk_bound, shared=True)


def drawn_places(codec, noise, device):
    """Evenly spaced from a random start: each element of a block is as likely as any other."""
    steps = torch.arange(codec.kept, device=device) * codec.block // codec.kept
    return (steps + (noise(1) * codec.block).long()) % codec.block


def randomk_encode(codec, x, noise):
    """A number that is not finite is sent, wherever it is."""
    values = x.gather(1, drawn_places(codec, noise, x.device))
    values = values * (codec.block / codec.kept) if codec.stochastic else values
    strange = ~torch.isfinite(x).all(1, keepdim=True)
    return as_bytes(torch.where(strange, torch.nan, values))


def randomk_decode(codec, code, noise):
    y = torch.zeros(code.shape[0], codec.block, device=code.device)
    return y.scatter(1, drawn_places(codec, noise, code.device), code.contiguous().view(torch.float32))


FORMS["randomk"] = CodecForm(
    randomk_encode,
    randomk_decode,
    lambda c: 4 * c.kept,
    1024,
    lambda c, x: x.abs() * (max(1.0, c.block / c.kept - 1) if c.stochastic else 1.0) * (1 + 1e-5),
    shared=True,
    rounds=True,
    draws=True,
)
