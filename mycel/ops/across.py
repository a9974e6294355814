"""Messages between programs on meshes of their own: each rank sends the pieces of its part that ranks of the other mesh
need of theirs.

    t = begin_send_across(x, to=1, tag=7, pieces=…)     pieces of x to the ranks of program 1, without waiting
    finish_send_across(t, x, to=1, tag=7, pieces=…)     they have been taken, and x may change
    t = begin_receive_across(source=0, tag=7, dtype=f32, pieces=…)
    x = finish_receive_across(t, source=0, tag=7, dtype=f32, shape=(4, 8), pieces=…)    this rank's part of it

Every dim may be split, on either side as it likes; layouts decide the pieces (`plan/across.py`), so these are filled in
once both are known: (rank that sends, rank that receives, where it begins in the part of each, its shape), ranks by
their number in the world.
"""

from __future__ import annotations

import torch

from mycel.ir import Type, op
from mycel.ops.collective import communicator
from mycel.ops.rules import letters

TOKEN = Type(torch.int64, ())


def received_dims(token, *, shape, **_):
    """Every dim may be split: each rank gets what is its own."""
    names = letters(len(shape))
    return f"... -> {' '.join(names)}", dict(zip(names, shape, strict=True))


@op("... -> ", types=lambda x, **_: TOKEN, free=True, compiles=False, by_rank=True, effect=True)
def begin_send_across(x, *, to, tag, pieces=()):
    """Begin to send pieces of x to the ranks of another program, which receive them under the same tag."""
    return communicator().start_send_across(x, tag, pieces)


@op(", ... -> ", types=lambda token, x, **_: TOKEN, free=True, compiles=False, by_rank=True, effect=True)
def finish_send_across(token, x, *, to, tag, pieces=()):
    """Wait until pieces have been taken; until then nobody may write over them."""
    communicator().wait_sent(token)
    return token


@op(types=lambda **_: TOKEN, free=True, compiles=False, by_rank=True, effect=True)
def begin_receive_across(*, source, tag, dtype, pieces=()):
    """Be ready for pieces from the ranks of another program."""
    return communicator().start_receive_across(dtype, tag, pieces)


@op(
    received_dims,
    types=lambda token, *, shape, dtype, **_: Type(dtype, shape),
    free=True, compiles=False, by_rank=True, effect=True, fresh=True,
)  # fmt: skip
def finish_receive_across(token, *, source, tag, shape, dtype, pieces=()):
    """This rank's part of what another program has sent; zeros behind its last element."""
    return communicator().wait_received_across(token, shape, dtype)
