"""Blocks of a program, compiled at once: at the first call of its entry all of them go to workers, or come from disk.

    load(program)         each block that is compiled is a CompiledBlock, `main` a CompiledProgram
    first call of main    inputs ─▶ what each block will be called with ─▶ jobs ─▶ workers, as many as cores ─▶ loaded
    a call of a block     what was loaded, if its inputs lie as was foreseen; else torch.compile, as ever

What a block was compiled to is kept beside torch's own caches, under a key of its text, its inputs and all that
decides how it is compiled.  There are as many workers as cores (TORCHINDUCTOR_COMPILE_THREADS says otherwise), shared
by the ranks of a host; with fewer than four, blocks are compiled one after another in this process.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mycel import ops
from mycel.ir import Program
from mycel.run.block_inputs import Signature, block_inputs, signature
from mycel.run.block_worker import BlockJob, KernelSource, TorchSettings, write_atomically

CONST = "CONST_"
FEWEST = 4  # workers that are worth their start, which is seconds of a core for importing the compiler once more
# no processes of torch's in a worker; whether there is a GPU is asked of its driver's library without initialising it,
# since that must happen after a fork
WORKER_ENV = {"TORCH_WARM_POOL": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class CompiledBlock:
    """A block's function: what workers made of it for the inputs it is called with, torch.compile for all others."""

    def __init__(self, name: str, fn: Callable[..., Any], consts: Sequence[torch.Tensor]) -> None:
        self.name, self.in_turn, self.consts = name, torch.compile(fn, fullgraph=True, dynamic=False), consts
        self.loaded: dict[Signature, Callable[..., Any]] = {}
        self.checked: list[tuple[Callable[..., bool], Callable[..., Any]]] = []
        self.is_told = False

    def __call__(self, *args: Any) -> Any:
        for fits, run in self.checked:
            if fits(*args):
                return run(*args, *self.consts)
        return self._find(args)

    def _find(self, args: Sequence[Any]) -> Any:
        run = self.loaded.get(signature(args))
        if run is None:
            if self.loaded and not self.is_told:
                say(f"{self.name} is compiled in turn: its inputs lie otherwise than was foreseen")
                self.is_told = True
            return self.in_turn(*args)
        sizes, strides = [list(x.shape) for x in args], [list(x.stride()) for x in args]
        guards: Any = torch._C._dynamo.guards
        check = guards.TensorGuards(*args, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        self.checked.append((check, run))
        return run(*args, *self.consts)


class CompiledProgram:
    """The entry of a program, whose blocks are compiled at its first call."""

    def __init__(
        self, main: Callable[..., Any], program: Program, blocks: Mapping[str, CompiledBlock], texts: BlockTexts,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.main, self.program, self.blocks, self.texts, self.device = main, program, blocks, texts, device
        self.is_ready = False

    @classmethod
    def of(
        cls, run: Callable[[dict[str, Any]], None], program: Program, names: Mapping[str, str], source: str,
        device: torch.device,
    ) -> CompiledProgram:  # fmt: skip
        """Of `source`, which `run` runs in an environment, and where blocks are functions of these names."""
        plain, env = dict[str, Any](), dict[str, Any]()
        run(plain)  # in which a block that is compiled calls others as they are
        run(env)
        texts = BlockTexts(source)
        blocks = {
            block: CompiledBlock(name, plain[name], [plain[x] for x in texts.consts(name)])
            for block, name in names.items()
        }
        env.update({block.name: block for block in blocks.values()} | {x: plain[x] for x in texts.all_consts()})
        return cls(env["main"], program, blocks, texts, device)

    def __call__(self, *inputs: Any) -> Any:
        if not self.is_ready:
            self.is_ready = True
            try:
                self._compile(inputs)
            except Exception as e:
                say(f"blocks are compiled one after another: {type(e).__name__}: {e}")
        return self.main(*inputs)

    def _compile(self, inputs: Sequence[Any]) -> None:
        """All blocks, for what they will be called with; what cannot be compiled so is left to torch.compile."""
        server = BlockServer.take()
        if server is None:
            return
        with server:
            places: dict[Path, list[tuple[CompiledBlock, Signature]]] = {}
            jobs: dict[Path, BlockJob] = {}
            sizes = {name: len(block.eqns) for name, block in self.program.blocks.items()}
            calls = block_inputs(self.program, self.blocks, inputs, self.device)
            settings = TorchSettings.now()
            for name in sorted(calls, key=lambda name: -sizes[name]):  # the longest first
                block = self.blocks[name]
                for given in calls[name]:
                    job = self.texts.job(block, given, settings)
                    if job is not None:
                        path = place_of(job)
                        jobs[path] = job
                        places.setdefault(path, []).append((block, given))
            for path, run in server.compiled(jobs):
                for block, given in places[path]:
                    block.loaded[given] = run


class BlockTexts:
    """Generated source, taken apart: each function with what it refers to."""

    def __init__(self, source: str) -> None:
        self.head: list[str] = []
        self.texts: dict[str, str] = {}
        self.refers: dict[str, list[str]] = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.head.append(ast.unparse(node))
                continue
            name = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.targets[0])  # type: ignore
            self.texts[name] = "" if name.startswith(CONST) else ast.unparse(node)
            self.refers[name] = [x.id for x in ast.walk(node) if isinstance(x, ast.Name)]

    def needed(self, name: str) -> list[str]:
        """The names that must stand beside a function, itself among them, in the order of the source."""
        reached, left = {name}, [name]
        while left:
            more = {x for x in self.refers[left.pop()] if x in self.texts} - reached
            reached |= more
            left += more
        return [x for x in self.texts if x in reached]

    def consts(self, name: str) -> list[str]:
        return [x for x in self.needed(name) if x.startswith(CONST)]

    def all_consts(self) -> list[str]:
        return [x for x in self.texts if x.startswith(CONST)]

    def job(self, block: CompiledBlock, given: Signature, settings: TorchSettings) -> BlockJob | None:
        """None: it is given what is no tensor."""
        inputs = [x for x in (*given, *signature(block.consts)) if x is not None]
        if len(inputs) < len(given) + len(block.consts):
            return None
        source = "\n".join([*self.head, *(self.texts[x] for x in self.needed(block.name) if self.texts[x])])
        return BlockJob(source, block.name, tuple(inputs), tuple(self.consts(block.name)), settings)


def place_of(job: BlockJob) -> Path:
    """Where a block is kept: beside torch's own caches, by all that decides what it is compiled to."""
    from torch._inductor.codecache import CacheBase, torch_key
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    parts = (repr(job), CacheBase.get_system(), torch_key().hex(), _operators())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    return Path(cache_dir(), "mycel", key[:2], key)


@functools.cache
def _operators() -> str:
    """Of the sources of the operators that blocks may call."""
    digest = hashlib.sha256()
    for path in sorted(Path(str(ops.__file__)).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class BlockServer:
    """The process that compiles blocks, in processes of its own."""

    waiting: BlockServer | None = None  # started, and not given any blocks yet

    def __init__(self, workers: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from mycel.run.block_worker import serve; serve({workers})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **WORKER_ENV, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,  # its own processes end with it
        )

    @classmethod
    def start(cls) -> None:
        """It gets ready while the program is still being made."""
        from torch._inductor import config  # and no more of it: this process starts first

        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = (config.compile_threads or config.decide_compile_threads()) // ranks
        if workers >= FEWEST and cls.waiting is None:
            try:
                cls.waiting = cls(workers)
            except Exception as e:
                say(f"blocks are compiled one after another: no process for them could be started ({e})")

    @classmethod
    def take(cls) -> BlockServer | None:
        """The one that waits, or a new one; None where there is none."""
        cls.start()
        server, cls.waiting = cls.waiting, None
        return server

    @classmethod
    def stop(cls) -> None:
        """There is nothing to compile."""
        if cls.waiting is not None:
            cls.waiting.__exit__()
            cls.waiting = None

    def __enter__(self) -> BlockServer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def compiled(self, jobs: Mapping[Path, BlockJob]) -> Iterator[tuple[Path, Callable[..., Any]]]:
        """Places of blocks, each with what it was compiled to, as they come."""
        ready: queue.SimpleQueue[tuple[Path, bytes | None, str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(jobs, ready), name="mycel-blocks", daemon=True).start()
        import torch._inductor.compile_fx  # noqa: F401  (what is loaded needs it, and workers need their time)

        failed: dict[str, int] = {}
        for _ in jobs:
            path, code, why_not = ready.get()
            if code is not None:
                try:
                    with kept_kernels(path):
                        run = _loaded(code)
                    yield path, run
                    continue
                except Exception as e:
                    why_not = f"{type(e).__name__}: {e}"
                    for file in (path, kernels_of(path)):
                        file.unlink(missing_ok=True)
            failed[why_not] = failed.get(why_not, 0) + 1
        for why_not, n in failed.items():
            say(f"{n} of {len(jobs)} blocks are compiled in turn: {why_not}")

    def _read(self, jobs: Mapping[Path, BlockJob], ready: queue.SimpleQueue[tuple[Path, bytes | None, str]]) -> None:
        """Blocks from disk, then from workers; their kernels begin to be compiled as soon as they are known."""
        left = dict(jobs)
        why_not = "their worker ended"

        def is_read(path: Path) -> bool:
            try:
                code, kernels = pickle.loads(path.read_bytes())
                if not kernels_of(path).exists():
                    for kernel in kernels:
                        _begin(kernel)
            except Exception:
                return False
            ready.put((path, code, ""))
            return True

        for path in jobs:
            if is_read(path):
                del left[path]
        try:
            if left:
                stdin, stdout = self.process.stdin, self.process.stdout
                assert stdin is not None and stdout is not None
                pickle.dump([(job, str(path)) for path, job in left.items()], stdin)
                stdin.flush()
                for line in stdout:
                    text, error = json.loads(line)
                    path = Path(text)
                    if path in left:
                        del left[path]
                        if error or not is_read(path):
                            ready.put((path, None, error or "what was written cannot be read"))
                    if not left:
                        return
        except BrokenPipeError:
            pass  # it has ended as well
        except Exception as e:
            why_not = f"{type(e).__name__}: {e}"
        for path in left:
            ready.put((path, None, why_not))


def kernels_of(path: Path) -> Path:
    """Where the Triton kernels of a block are kept."""
    return path.with_suffix(".kernels")


@contextlib.contextmanager
def kept_kernels(path: Path) -> Iterator[None]:
    """Triton kernels of a block that is loaded meanwhile: as an earlier start left them, without torch's processes;
    else noted for the next one."""
    from torch._inductor.triton_bundler import TritonBundler

    kept = kernels_of(path)
    if not torch.cuda.is_available():
        yield
    elif kept.exists():
        TritonBundler.load_autotuners(pickle.loads(kept.read_bytes()))
        yield
    else:
        TritonBundler.begin_compile()
        try:
            yield
            kernels = pickle.dumps(TritonBundler.collect_static_autotuners()[0])
        finally:
            TritonBundler.end_compile()
        write_atomically(kept, kernels)


def _begin(kernel: KernelSource) -> None:
    """Torch's processes begin to compile a kernel; what is loaded then waits for it."""
    from torch._inductor.async_compile import AsyncCompile

    if AsyncCompile.use_process_pool():
        AsyncCompile().triton(kernel.name, kernel.source, kernel.device)


def _loaded(code: bytes) -> Callable[..., Any]:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Serialized

    return Serialized.deserialize_compile_artifacts(code).compiled_fn


def say(what: str) -> None:
    print(f"mycel: {what}", file=sys.stderr, flush=True)
