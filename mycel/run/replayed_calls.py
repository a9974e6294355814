"""Calls of jitted functions as CUDA graphs (`replay.py`), where that is safe and a call is little work for the device,
so that launching its kernels one by one would bound it.

    y = fast(x)     first call of a signature: the code as it is; second: recorded; from then on x is copied into the
                    graph's memory, the graph is replayed, y is copied out

A graph belongs to a stream and to torch's settings for kernels: a call under others has a graph of its own, up to
MOST.  One thread at a time gives arguments and takes results.  While somebody else records, or torch.func or a mode
stands around the call, the code runs as it is; so does code in which
    a value decides what runs next, ranks speak to each other, or the host takes part (`replay.obstacle`)
    torch's own operators are called of which nothing is known: some wait for the device
    a result lies in the memory of an argument, which it would leave
    an argument lies on another device
    more than SMALL bytes are made, or copied in: a graph keeps its memory between calls
and that of calls beyond AT_ONCE others.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.ir import Program, Var, call, custom, runs, walk
from mycel.ops.memory_sharing import roots
from mycel.run.replay import COPIED, MOST, GraphPool, Recording, Replayed, obstacle

AT_ONCE = 64  # recordings on a stream: each holds its results, and a few megabytes of the device for its kernels
SMALL = 1 << 28  # bytes made in a call: at 4 TB/s a hundred microseconds, which twenty launches take as well

_precision: Any = torch._C._get_fp32_precision_getter  # asks nobody to have used the older settings alone
_reduced_fp16: Any = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
_reduced_bf16: Any = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
SETTINGS: Sequence[Callable[[], Any]] = (
    *(functools.partial(_precision, "cuda", what) for what in ("matmul", "conv", "rnn")),
    _reduced_fp16,
    _reduced_bf16,
    torch.are_deterministic_algorithms_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
)


def replayed_call(
    code: Callable[..., Sequence[Any]], program: Program, device: torch.device
) -> Callable[..., Sequence[Any]]:
    """The code, replayed from its second call on where it may be."""
    if device.type != "cuda" or refusal(program):
        return code
    return ReplayedCall(
        code, program, device, functools.partial(_recorded, device), functools.partial(_context, device)
    )


def refusal(program: Program) -> str:
    """Why a call is not recorded, as far as its program tells."""
    what = obstacle(program)
    if what:
        return what
    for _, eqn in walk(program):
        if eqn.op.foreign:
            return f"{eqn.op.name} may wait for the device at {eqn.line}"
    known = roots(program)[program.entry]
    written = {i for i, v in enumerate(program.inputs) if v.name in program.updates}  # what lies in these is copied
    if any(isinstance(x, Var) and known.get(x, set()) - written for x in program.results):
        return "a result lies in the memory of an argument"
    if made_bytes(program) > SMALL:
        return f"a call makes {made_bytes(program)} bytes"
    return ""


def made_bytes(program: Program) -> int:
    """All that one call makes, copies of its arguments and results among it, but for views and what is written in
    place."""
    counts, updates = runs(program), set(program.updates)
    copied = [v for v in program.inputs if program.role(v).kind in COPIED and v.name not in updates]
    copied += [x for x in program.results if isinstance(x, Var)]
    return sum(v.type.bytes for v in copied) + sum(
        counts[name] * v.type.bytes
        for name, eqn in walk(program)
        if eqn.op not in (call, custom) and eqn.op.write is None and not (updates and eqn.op.inplace is not None)
        for v in eqn.outputs
    )


class ReplayedCall:
    """A call's code with a recording for each context; what it is given, and returns, is the caller's."""

    def __init__(
        self,
        code: Callable[..., Sequence[Any]],
        program: Program,
        device: torch.device,
        record: Callable[..., Recording],
        context: Callable[[], Any],
    ) -> None:
        """`context`: under what a call runs, or None where it must not be recorded; `record` makes a recording of the
        code under one, its values and the device."""
        self.code, self.program, self.device, self.record, self.context = code, program, device, record, context
        self.by_context: dict[Any, Replayed] = {}
        self.lock = threading.Lock()

    def __call__(self, *values: Any) -> Sequence[Any]:
        context = self.context()
        if context is None:
            return self.code(*values)
        with self.lock:
            replayed = self.by_context.get(context) or self._of(context, values)
            return self.code(*values) if replayed is None else replayed(*values)

    def _of(self, context: Any, values: Sequence[Any]) -> Replayed | None:
        """For a context that is new."""
        if len(self.by_context) == MOST or any(getattr(x, "device", None) != self.device for x in values):
            return None
        record = functools.partial(self.record, context)
        replayed = self.by_context[context] = Replayed(self.code, self.program, self.device, record)
        return replayed


def _context(device: torch.device) -> tuple[Any, ...] | None:
    """The stream and the settings of now; None while a graph is recorded, or what is called is changed."""
    if torch.cuda.is_current_stream_capturing() or is_transformed():
        return None
    return torch.cuda.current_stream(device).cuda_stream, *(setting() for setting in SETTINGS)


def is_transformed() -> bool:
    """Does torch.func (vmap, grad) or a mode (fake tensors, a count of operations) stand around the call?  Then tensors
    are not what they seem, or somebody wants to see each operator."""
    bindings: Any = torch._C
    return bindings._functorch.peek_interpreter_stack() is not None or bindings._len_torch_dispatch_stack() > 0


def _recorded(
    device: torch.device, context: tuple[Any, ...], code: Callable[..., Sequence[Any]], values: Sequence[Any], _: Any
) -> Recording:
    pool = _pool(device, context[0])
    if len(pool.recordings) >= AT_ONCE:
        raise RuntimeError(f"{AT_ONCE} others are recorded")
    return pool.record(code, values, device)


@functools.cache
def _pool(device: torch.device, stream: int) -> GraphPool:
    """One for all calls on a stream: they take turns."""
    return GraphPool(device)
