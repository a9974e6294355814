"""Moving a value between memory spaces, in two halves: begun, and finished when it has arrived.

    t = begin_move(x, to="host")          x: bf16[64,4096]; the copy goes on beside computing
    h = finish_move(t, x, to="host")      h: host(bf16[64,4096]); x is not needed any more, the copy is
    u = begin_move(h, to="device")
    y = finish_move(u, h, to="device")    y: bf16[64,4096], to the bit what x was
    s = finish_move(v, z, to="host", wait=False)    computing goes on; whoever reads s next waits for the copy

No other operator takes a value that lies on the host, but for updates of parameters whose state lives there.  Kernels
ask the host space that the run has put up (`HOST_SPACES`: pinned memory and streams of its own on a GPU); where there
is none, a copy is made at once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from mycel.errors import IRError
from mycel.ir import DEVICE, HOST, Type, op

TOKEN = Type(torch.int64, ())  # of a move that has begun
HOST_SPACES: list[Any] = []  # the innermost is asked; owned by the runs
LIVING: weakref.WeakSet[Any] = weakref.WeakSet()  # all that there are


def moved_type(x, to):
    if to not in (DEVICE, HOST) or x.space == to or x.depth:
        raise IRError(f"{x} is moved to the {to}")
    return x.on(to)


def begun_type(x, *, to):
    moved_type(x, to)
    return TOKEN


def like(x, device=None):
    """New memory for a copy of x, its elements in the same order there: kernels see the same strides."""
    return torch.empty_like(x, device=device, memory_format=torch.preserve_format)


@op(types=begun_type, compiles=False, effect=True, fresh=True, transfers=True)
def begin_move(x, *, to, at=None, over=None, device=None):
    """Begin to copy x to another memory space; `finish_move` waits for it.  On the host it lies at byte `at` of what
    the program keeps there, or in the memory of `over`, which is given away."""
    if HOST_SPACES:
        return HOST_SPACES[-1].begin(x, to, at, over)
    y = over if over is not None else like(x, "cpu" if to == HOST else device)
    return y.copy_(x)


def finished_type(token, x, *, to, wait=True):
    if not wait and to != HOST:
        raise IRError(f"{x} is moved to the {to}, and not waited for")
    return moved_type(x, to)


@op(types=finished_type, free=True, compiles=False, fresh=True, transfers=True)
def finish_move(token, x, *, to, wait=True):
    """What was moved, where it is now.  Not `wait`: it is on its way to the host, where the next one to read it waits;
    the memory of x is free once it has left."""
    return HOST_SPACES[-1].finish(token, x, wait) if HOST_SPACES else token


def compute(update, operands):
    """Run an update on the host once all its operands, which it writes some of, have come there."""
    if HOST_SPACES:
        HOST_SPACES[-1].compute(update, operands)
    else:
        update()


def settle_hosts():
    """Wait until what lives on hosts is as the last step leaves it: devices and updates write it whenever they get to
    it."""
    for space in LIVING:
        space.settle()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
