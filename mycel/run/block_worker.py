"""One block -> what torch's compiler makes of it, as bytes, in a process that runs nothing on any device.

A process beside the step imports the compiler while the program is still being made, is given all blocks at once, and
forks workers, as many as there are cores; each compiles one block after another.

    step      import, capture, differentiate, plan │ jobs ─▶ …wait…                     load, load, …  │ first step
    server    import the compiler                  │ fork ─┬─ trace, lower, write code ─▶ file
                                                           ├─ trace, lower, write code ─▶ file

Blocks are traced on fake tensors, so a worker has no context on a GPU.  Triton kernels are left to whoever loads the
block: torch has a pool of processes for them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._config_module import _UNSET_SENTINEL

POLL_S = 0.02
NUMBER = 4  # bytes of a job's number


class Strided(NamedTuple):
    """A tensor as a compiler sees it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Any) -> Strided | None:
        """None: no tensor."""
        return cls(tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else None

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class TorchSettings:
    """What of torch's settings decides what it compiles to."""

    default_dtype: torch.dtype
    threads: int
    product_precision: str
    is_deterministic: bool
    attention: tuple[bool, ...]
    configs: tuple[str, str]  # statements that set what differs from the defaults

    @classmethod
    def now(cls) -> TorchSettings:
        from torch._functorch import config as of_autograd
        from torch._inductor import config as of_inductor

        return cls(
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            tuple(is_enabled() for is_enabled, _ in _ATTENTION),
            (_changes(of_inductor), _changes(of_autograd)),
        )

    def restore(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.product_precision)
        torch.use_deterministic_algorithms(self.is_deterministic)
        for (_, enable), is_enabled in zip(_ATTENTION, self.attention, strict=True):
            enable(is_enabled)
        for statements in self.configs:
            exec(statements, {"torch": torch})


def _changes(config: Any) -> str:
    """Statements that set what differs from the defaults.  torch also lists what was set for a while and is the default
    again, as after each compilation: the second program of a process would not find what the first one of another
    left."""

    def is_default(statement: str) -> bool:
        name, _, value = statement.removeprefix(f"{config.__name__}.").partition(" = ")
        entry = config._config.get(name)
        by_env = entry is not None and not (entry.env_value_default is entry.env_value_force is _UNSET_SENTINEL)
        return entry is not None and not by_env and value == repr(entry.default)

    return "\n".join(line for line in config.codegen_config().splitlines() if not is_default(line))


_ATTENTION = [
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
]


@dataclass(frozen=True)
class BlockJob:
    """The function `name` of `source`, for such inputs; constants it refers to, by name, are inputs behind these."""

    source: str
    name: str
    inputs: tuple[Strided, ...]
    consts: tuple[str, ...]
    settings: TorchSettings


class KernelSource(NamedTuple):
    """What torch's pool of processes makes a Triton kernel of."""

    name: str
    source: str
    device: str


def compile_block(job: BlockJob) -> tuple[bytes, list[KernelSource]]:
    """Code and kernels of a block, under the settings of now."""
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serialized
    from torch._functorch import config as of_autograd
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.compiler._cache import CacheArtifactManager
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake = FakeTensorMode(shape_env=ShapeEnv())
    with torch.no_grad(), _kernels_left_alone() as kernels:
        with fake:
            inputs = [x.empty() for x in job.inputs]
            graph = make_fx(_function(job))(*inputs)
        options = of_autograd.patch(bundled_autograd_cache=True, strict_autograd_cache=True)
        with tracing(TracingContext(fake)), CacheArtifactManager.with_fresh_cache(), options:
            compiled = Serialized(compile_fx(graph, inputs, ignore_shape_env=True))
            return Serialized.serialize_compile_artifacts(compiled), kernels


def _function(job: BlockJob) -> Callable[..., Any]:
    env: dict[str, Any] = {}
    exec(compile(job.source, f"<mycel block {job.name}>", "exec"), env)
    n = len(job.inputs) - len(job.consts)

    def run(*values: torch.Tensor) -> Any:
        env.update(zip(job.consts, values[n:], strict=True))
        return env[job.name](*values[:n])

    return run


@contextlib.contextmanager
def _kernels_left_alone() -> Iterator[list[KernelSource]]:
    """Meanwhile Triton kernels are noted here instead of compiled, and fake tensors of a GPU touch none."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._subclasses import fake_tensor

    noted: list[KernelSource] = []

    def triton(self: Any, name: str, source: str, device_str: str = "cuda") -> None:
        noted.append(KernelSource(name, source, device_str))

    with (
        mock.patch.object(AsyncCompile, "triton", triton),
        mock.patch.object(AsyncCompile, "use_process_pool", classmethod(lambda cls: False)),
        mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None),
    ):
        yield noted


def serve(workers: int) -> None:
    """Jobs and where each is written to, from stdin; one line of JSON on stdout for each that is done.  When stdin is
    closed before, nobody waits any more."""
    results = os.dup(1)
    os.dup2(2, 1)  # what a compiler prints is no result
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    import torch._inductor.compile_fx  # noqa: F401  (once for all workers)
    from torch._inductor.codecache import torch_key

    torch_key()  # of all of torch's sources: likewise
    gc.freeze()
    try:
        jobs: list[tuple[BlockJob, str]] = pickle.load(sys.stdin.buffer)
    except EOFError:
        return
    turns, first = os.pipe()  # numbers of jobs: each worker takes one at a time
    os.write(first, b"".join(i.to_bytes(NUMBER, "big") for i in range(len(jobs))))
    os.close(first)
    running = {_forked(jobs, turns, results) for _ in range(min(workers, len(jobs)))}
    while running:
        if select.select([0], [], [], POLL_S)[0]:  # nothing comes any more but its end
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
        while running and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            running.discard(ended)


def _forked(jobs: Sequence[tuple[BlockJob, str]], turns: int, results: int) -> int:
    """A process that compiles one block after another, as long as there are any."""
    pid = os.fork()
    if pid:
        return pid
    gc.disable()  # few of the objects that a compiler makes are garbage
    try:
        while number := os.read(turns, NUMBER):
            job, path = jobs[int.from_bytes(number, "big")]
            try:
                job.settings.restore()
                write_atomically(Path(path), pickle.dumps(compile_block(job)))
                _tell(results, path)
            except Exception as e:
                _tell(results, path, f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}")
    finally:
        os._exit(0)


def _tell(results: int, path: str, why_not: str = "") -> None:
    """In one write, so that lines of several workers stay lines."""
    os.write(results, (json.dumps([path, why_not[:400]]) + "\n").encode())


def write_atomically(path: Path, data: bytes) -> None:
    """Others find all of it, or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}-{os.getpid()}")
    temp.write_bytes(data)
    os.replace(temp, path)
