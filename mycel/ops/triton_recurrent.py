"""What a step of an LSTM or a GRU does between its products, forward and back, in one kernel on a GPU: as `recurrent.c`
has it, in 32 bits, whatever tensors have.

Beside `recurrent.py`, which imports it where tensors are on a GPU: Triton comes with torch there.  Tensors are
contiguous; gates stand side by side in a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256  # elements of a state's row at a time


def lstm_step(z: torch.Tensor, c_before: torch.Tensor, c: torch.Tensor, y: torch.Tensor) -> None:
    """z: what comes to the gates, then the gates."""
    lstm_kernel[_grid(y)](z, c_before, c, y, y.shape[1], BLOCK=BLOCK, num_warps=4)


def lstm_step_back(gates, c_before, c, gy, gc, dh, dc, dz) -> None:
    """dh: the cotangent of the hidden state from the steps behind; dc: that of the cell, which is passed on; dz: of
    what came to the gates."""
    lstm_back_kernel[_grid(c)](gates, c_before, c, gy, gc, dh, dc, dz, c.shape[1], BLOCK=BLOCK, num_warps=4)


def gru_step(x, inside, h, gates, candidate, y) -> None:
    """x: what comes to the gates from outside; inside: from the hidden state."""
    gru_kernel[_grid(y)](x, inside, h, gates, candidate, y, y.shape[1], BLOCK=BLOCK, num_warps=4)


def gru_step_back(gates, candidate, h, gy, dh, outside, inside) -> None:
    """dh: the cotangent of the state, then what goes past the product; outside, inside: of what came to the gates."""
    gru_back_kernel[_grid(h)](gates, candidate, h, gy, dh, outside, inside, h.shape[1], BLOCK=BLOCK, num_warps=4)


def _grid(state):
    return state.shape[0], triton.cdiv(state.shape[1], BLOCK)


@triton.jit
def part(x, row, which, at, n, PARTS: tl.constexpr):
    """Elements `at` of one of the parts of a row, each of n."""
    return tl.load(x + row * (PARTS * n) + which * n + at, mask=at < n, other=0.0).to(tl.float32)


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def lstm_kernel(z, c_before, c, y, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    i = tl.sigmoid(part(z, row, 0, at, n, 4))
    f = tl.sigmoid(part(z, row, 1, at, n, 4))
    a = tanh(part(z, row, 2, at, n, 4))
    out = tl.sigmoid(part(z, row, 3, at, n, 4))
    new = f * part(c_before, row, 0, at, n, 1) + i * a
    to = z + row * 4 * n + at
    tl.store(to, i, mask=here)
    tl.store(to + n, f, mask=here)
    tl.store(to + 2 * n, a, mask=here)
    tl.store(to + 3 * n, out, mask=here)
    tl.store(c + row * n + at, new, mask=here)
    tl.store(y + row * n + at, out * tanh(new), mask=here)


@triton.jit
def lstm_back_kernel(gates, c_before, c, gy, gc, dh, dc, dz, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    i, f = part(gates, row, 0, at, n, 4), part(gates, row, 1, at, n, 4)
    a, out = part(gates, row, 2, at, n, 4), part(gates, row, 3, at, n, 4)
    turned = tanh(part(c, row, 0, at, n, 1))
    by_h = part(dh, row, 0, at, n, 1) + part(gy, row, 0, at, n, 1)
    by_c = part(dc, row, 0, at, n, 1) + part(gc, row, 0, at, n, 1) + by_h * out * (1.0 - turned * turned)
    to = dz + row * 4 * n + at
    tl.store(to, by_c * a * i * (1.0 - i), mask=here)
    tl.store(to + n, by_c * part(c_before, row, 0, at, n, 1) * f * (1.0 - f), mask=here)
    tl.store(to + 2 * n, by_c * i * (1.0 - a * a), mask=here)
    tl.store(to + 3 * n, by_h * turned * out * (1.0 - out), mask=here)
    tl.store(dc + row * n + at, by_c * f, mask=here)


@triton.jit
def gru_kernel(x, inside, h, gates, candidate, y, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    of_new = part(inside, row, 2, at, n, 3)
    reset = tl.sigmoid(part(x, row, 0, at, n, 3) + part(inside, row, 0, at, n, 3))
    update = tl.sigmoid(part(x, row, 1, at, n, 3) + part(inside, row, 1, at, n, 3))
    new = tanh(part(x, row, 2, at, n, 3) + reset * of_new)
    to = gates + row * 3 * n + at
    tl.store(to, reset, mask=here)
    tl.store(to + n, update, mask=here)
    tl.store(to + 2 * n, new, mask=here)
    tl.store(candidate + row * n + at, of_new, mask=here)
    tl.store(y + row * n + at, new + update * (part(h, row, 0, at, n, 1) - new), mask=here)


@triton.jit
def gru_back_kernel(gates, candidate, h, gy, dh, outside, inside, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    reset, update, new = part(gates, row, 0, at, n, 3), part(gates, row, 1, at, n, 3), part(gates, row, 2, at, n, 3)
    by_h = part(dh, row, 0, at, n, 1) + part(gy, row, 0, at, n, 1)
    by_new = by_h * (1.0 - update) * (1.0 - new * new)
    by_reset = by_new * part(candidate, row, 0, at, n, 1) * reset * (1.0 - reset)
    by_update = by_h * (part(h, row, 0, at, n, 1) - new) * update * (1.0 - update)
    to = row * 3 * n + at
    tl.store(outside + to, by_reset, mask=here)
    tl.store(outside + to + n, by_update, mask=here)
    tl.store(outside + to + 2 * n, by_new, mask=here)
    tl.store(inside + to, by_reset, mask=here)
    tl.store(inside + to + n, by_update, mask=here)
    tl.store(inside + to + 2 * n, by_new * reset, mask=here)
    tl.store(dh + row * n + at, by_h * update, mask=here)
