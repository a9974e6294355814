"""Beside torch's compiler: its processes and the device's libraries get ready while the program is still being made."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Iterator

import torch

from mycel.errors import RunError
from mycel.ir import Program, Type, Var, walk
from mycel.run.compiled_blocks import BlockServer


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """No search for cyclic garbage meanwhile: a compiler makes objects by the million, few of them garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def start_workers() -> None:
    """Load the compiler and start its worker processes."""
    BlockServer.start()
    _start_pool()


def stop_workers() -> None:
    """Nothing of the program is compiled; torch's own processes stay for the next one."""
    BlockServer.stop()


@functools.cache
def _start_pool() -> None:
    """torch's own processes, for kernels."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()
    AsyncCompile.use_process_pool()


def warm_up(program: Program, device: torch.device) -> None:
    """Run each distinct kernel of products once, on memory as it is, beside the compiler: libraries load and choose
    while it works."""
    if device.type != "cuda":
        return
    seen = {
        (e.op.name, e.input_types, e.params): e for _, e in walk(program) if e.op.product or e.op.precision == "low"
    }

    def run() -> None:
        # what fails here fails where it belongs, or not at all
        with torch.no_grad(), torch.cuda.device(device), contextlib.suppress(RuntimeError, RunError):
            torch.cuda.synchronize(device)  # this thread meets the device
            for eqn in seen.values():
                eqn.op.kernel(*(_memory(x.type, device) if isinstance(x, Var) else x for x in eqn.inputs), **eqn.params)

    threading.Thread(target=run, name="mycel-warm-up", daemon=True).start()


def _memory(t: Type, device: torch.device) -> torch.Tensor:
    """Memory as it is; numbers that count or choose something are zero."""
    make = torch.empty if t.dtype.is_floating_point else torch.zeros
    return make(t.shape, dtype=t.dtype, device=device)
