"""int8, int4, fp8 and sign in one pass on a GPU: encode x + e with what is left over, decode and add up; and the moving
average of errors in 8 bits.  The same bytes as the kernels of the CPU make: no product is fused with a sum, quotients
are rounded, and sums have one order.

    a program takes GROUP blocks: f32[GROUP, BLOCK] -> a scale each, and codes u8[GROUP, WIDTH]
    element p * WIDTH + w of a block is bits p * 8 / PARTS … of byte w: PARTS is 1 for int8 and fp8, 2 for int4, 8 for
    sign

Beside `codec_kernels.py`, which imports it where tensors are on a GPU: Triton comes with torch there.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

PARTS = {"int8": 1, "fp8": 1, "int4": 2, "sign": 8}
INT8, INT4, FP8, SIGN = (tl.constexpr(i) for i in range(4))
KINDS = {"int8": 0, "int4": 1, "fp8": 2, "sign": 3}
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": 448.0, "sign": 0.0}
ELEMENTS = 2048  # that a program takes, in whole blocks
LEAST = tl.constexpr(1e-35)  # blocks whose largest element is below it are zero: `TINY`
NOT_A_NUMBER = tl.constexpr(0x7FC00000)
INFINITE = tl.constexpr(0x7F800000)
NEAREST = tl.constexpr(12582912.0)  # 1.5 * 2^23: added to it a small float has no bits behind the point
EXACTLY = {"enable_fp_fusion": False, "num_warps": 4}


def takes(codec, device: torch.device) -> bool:
    """Blocks of a power of two; floats of 8 bits where the GPU converts them."""
    has_fp8 = codec.name != "fp8" or torch.cuda.get_device_capability(device) >= (8, 9)
    return codec.name in PARTS and codec.block & (codec.block - 1) == 0 and has_fp8


def shape_of(codec) -> dict[str, int]:
    """What a kernel must know of a codec."""
    group = max(1, ELEMENTS // codec.block)
    return {"KIND": KINDS[codec.name], "BLOCK": codec.block, "PARTS": PARTS[codec.name], "GROUP": group}


def encode(x, e, key, codec, rows: int, row: int, left: bool, over: bool):
    """f32 rows of x + e (e may be None) -> u8[rows, size], and with `left` what is left over; `over`: in x's memory."""
    x = x.contiguous()
    e = None if e is None else e.float().contiguous()
    code = torch.empty(rows, codec.size(row), dtype=torch.uint8, device=x.device)
    rest = None if not left else x if over else torch.empty_like(x)
    key = torch.as_tensor(key if codec.stochastic else 0, device=x.device)
    blocks, shape = -(-row // codec.block), shape_of(codec)
    encode_kernel[(triton.cdiv(max(rows * blocks, 1), shape["GROUP"]),)](
        x, x if e is None else e, code, x if rest is None else rest, key, x.numel(), row, blocks, rows * blocks,
        LARGEST[codec.name], **shape, FED=e is not None, LEFT=left, CHANCE=codec.stochastic,
        HALVINGS=codec.block.bit_length() - 1, **EXACTLY,
    )  # fmt: skip
    return code, rest


def decode(code, codec, shape, row: int, added: bool):
    """u8[rows, size] -> f32[shape]: the rows one behind the other, or added up."""
    rows, n = code.shape[0], math.prod(shape)
    y = torch.empty(shape, device=code.device)
    blocks, how = -(-row // codec.block), shape_of(codec)
    count = blocks if added else rows * blocks
    decode_kernel[(triton.cdiv(max(count, 1), how["GROUP"]),)](
        code.contiguous(), y, n, row, blocks, count, **how, ROWS=rows if added else 1, **EXACTLY
    )
    return y


def averaged(e, lost, key, share: float, scale: float, most: float, dtype: torch.dtype):
    """e (1 - share) + lost share, times the scale, in floats of 8 bits that are the upper half of 16: up or down by
    chance."""
    e, lost = e.contiguous(), lost.contiguous()
    y = torch.empty(e.shape, dtype=torch.uint8, device=e.device)
    grid = (triton.cdiv(max(e.numel(), 1), ELEMENTS),)
    key = torch.as_tensor(key, device=e.device)
    averaged_kernel[grid](e, lost, y, key, e.numel(), 1 - share, share, scale, most, SIZE=ELEMENTS, **EXACTLY)
    return y.view(dtype)


@triton.jit
def unit(key, at):
    """[0, 1) for the elements `at`: `noise_of`."""
    seed = tl.load(key).to(tl.int64)
    h = (at.to(tl.uint32) * 0x9E3779B1) ^ (seed ^ (seed >> 32)).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return (h >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def sum_in_order(x, GROUP: tl.constexpr, BLOCK: tl.constexpr, HALVINGS: tl.constexpr):
    """Of each row, the halves first."""
    for i in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, (GROUP, 2, BLOCK >> (i + 1))), 1)
    return tl.reshape(x, (GROUP,))


@triton.jit
def of_fp8(q):
    """What 8 bits (e4m3) stand for: behind the sign they are those of a float of 16 bits, times 2^8."""
    size = ((q & 127) << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((q & 128) != 0, -size, size)


@triton.jit
def codes_of(y, KIND: tl.constexpr):
    """Numbers in units of the largest code -> codes as integers, and what these stand for."""
    if KIND == FP8:
        q = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        return q, of_fp8(q)
    else:
        number = (y + NEAREST) - NEAREST
        return number.to(tl.int32), number


@triton.jit
def encode_kernel(
    x, e, code, left, key, n, row, blocks, count, largest,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    FED: tl.constexpr, LEFT: tl.constexpr, CHANCE: tl.constexpr, HALVINGS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    inside = tl.arange(0, BLOCK)
    start = (block % blocks) * BLOCK
    place = start[:, None] + inside[None, :]
    at = (block // blocks)[:, None] * row + place
    there = (block < count)[:, None] & (place < row) & (at < n)
    v = tl.load(x + at, mask=there, other=0.0)
    if FED:
        v = v + tl.load(e + at, mask=there, other=0.0)
    bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if KIND == SIGN:
        scale = sum_in_order(tl.abs(v) * (1.0 / BLOCK), GROUP, BLOCK, HALVINGS)
        finite = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < INFINITE
        q = (v >= 0).to(tl.int32)
        number = (q * 2 - 1).to(tl.float32)
    else:
        highest = tl.max(bits, 1)  # as integers NaN is above infinity, and infinity above all numbers
        top = highest.to(tl.float32, bitcast=True)
        finite, large = highest < INFINITE, top >= LEAST
        most = tl.zeros((GROUP,), tl.float32) + largest
        safe = tl.where(finite & large, top, 1.0)
        scale = tl.where(large, tl.div_rn(safe, most), 0.0)
        y = v * tl.where(large, tl.div_rn(most, safe), 0.0)[:, None]
        y = tl.where(finite[:, None], y, 0.0)
        if CHANCE:
            drawn = unit(key, block[:, None] * BLOCK + inside[None, :])
            y = tl.floor(y + drawn)
            y = tl.minimum(tl.maximum(y, -largest), largest)
        q, number = codes_of(y, KIND)
    held = tl.where(finite, scale.to(tl.int32, bitcast=True), NOT_A_NUMBER)
    scale = held.to(tl.float32, bitcast=True)
    if LEFT:
        tl.store(left + at, v - number * scale[:, None], mask=there)
    WIDTH: tl.constexpr = BLOCK // PARTS
    if KIND == INT4:
        q = q + 8
    if PARTS > 1:
        shifts = (tl.arange(0, PARTS) * (8 // PARTS))[None, :, None]
        q = tl.sum(tl.reshape(q, (GROUP, PARTS, WIDTH)) << shifts, 1)
    to = code + block * (4 + WIDTH)
    mine = (block < count)[:, None]
    tl.store(to[:, None] + 4 + tl.arange(0, WIDTH)[None, :], (q & 255).to(tl.uint8), mask=mine)
    byte = tl.arange(0, 4)[None, :]
    tl.store(to[:, None] + byte, ((held[:, None] >> (8 * byte)) & 255).to(tl.uint8), mask=mine)


@triton.jit
def block_numbers(
    code, block, mine,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """What the codes of some blocks stand for."""
    WIDTH: tl.constexpr = BLOCK // PARTS
    start = code + block * (4 + WIDTH)
    held = tl.zeros((GROUP,), tl.int32)
    for i in tl.static_range(4):
        held |= tl.load(start + i, mask=mine, other=0).to(tl.int32) << (8 * i)
    scale = held.to(tl.float32, bitcast=True)
    q = tl.load(start[:, None] + 4 + tl.arange(0, WIDTH)[None, :], mask=mine[:, None], other=0)
    if KIND == INT8:
        number = q.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == FP8:
        number = of_fp8(q.to(tl.int32))
    else:
        bits: tl.constexpr = 8 // PARTS
        shifts = (tl.arange(0, PARTS) * bits)[None, :, None]
        whole = tl.reshape((q.to(tl.int32)[:, None, :] >> shifts) & ((1 << bits) - 1), (GROUP, BLOCK))
        number = ((whole - 8) if KIND == INT4 else (whole * 2 - 1)).to(tl.float32)
    return number * scale[:, None]


@triton.jit
def decode_kernel(
    code, y, n, row, blocks, count,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """So many rows are added up, in their order."""
    block = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    mine = block < count
    place = ((block % blocks) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    at = (block // blocks)[:, None] * row + place
    total = block_numbers(code, block, mine, KIND, BLOCK, PARTS, GROUP)
    for r in range(1, ROWS):
        total = total + block_numbers(code, block + tl.cast(r, tl.int64) * blocks, mine, KIND, BLOCK, PARTS, GROUP)
    tl.store(y + at, total, mask=mine[:, None] & (place < row) & (at < n))


@triton.jit
def averaged_kernel(e, lost, y, key, n, kept, share, scale, most, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < n
    mean = tl.load(e + at, mask=there, other=0.0) * kept + tl.load(lost + at, mask=there, other=0.0) * share
    x = mean * scale
    x = tl.where(x > most, most, tl.where(x < -most, -most, x))
    bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    more = (unit(key, at) * 256).to(tl.int32)
    tl.store(y + at, (((bits + more) >> 8) & 255).to(tl.uint8), mask=there)
