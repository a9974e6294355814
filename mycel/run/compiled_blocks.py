"""Blocks of a program, compiled at once: at the first call of its entry all of them go to workers, or come from disk.

    load(program)         each block that is compiled is a CompiledBlock, `main` a CompiledProgram
    first call of main    inputs ─▶ what each block will be called with ─▶ jobs ─▶ workers, as many as cores ─▶ loaded
    a call of a block     what was loaded, if its inputs lie as was foreseen; else torch.compile, as ever

What a block was compiled to is kept beside torch's own caches, under a key of its text, its inputs and all that
decides how it is compiled; so is what the blocks of a program will be called with.  Blocks that differ in names and in
the order of their inputs alone are one job (`block_texts.py`).  There are as many workers as cores
(TORCHINDUCTOR_COMPILE_THREADS says otherwise), shared by the ranks of a host; with fewer than four, jobs are done one
after another in this process.
"""

from __future__ import annotations

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mycel import ops
from mycel.ir import Program
from mycel.run.block_inputs import Signature, block_inputs, signature
from mycel.run.block_texts import BlockTexts, CanonicalBlock
from mycel.run.block_worker import BlockJob, KernelSource, TorchSettings, compile_block, write_atomically

FEWEST = 4  # workers that are worth their start, which is seconds of a core for importing the compiler once more
# no processes of torch's in a worker; whether there is a GPU is asked of its driver's library without initialising it,
# since that must happen after a fork
WORKER_ENV = {"TORCH_WARM_POOL": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
Result = tuple[Path, bytes | None, str]  # the code of a block, or why there is none


class CompiledBlock:
    """A block's function: what it was compiled to for the inputs it is called with, torch.compile for all others."""

    def __init__(self, name: str, fn: Callable[..., Any], form: CanonicalBlock, consts: Sequence[torch.Tensor]) -> None:
        """`consts`: the constants it refers to, in the order of its form."""
        self.name, self.in_turn, self.form = name, torch.compile(fn, fullgraph=True, dynamic=False), form
        self.consts = consts
        self.loaded: dict[Signature, Callable[..., Any]] = {}
        self.checked: list[tuple[Callable[..., bool], Callable[..., Any]]] = []
        self.is_told = False

    def __call__(self, *args: Any) -> Any:
        for fits, run in self.checked:
            if fits(*args):
                return run(*[args[k] for k in self.form.order], *self.consts)
        return self._find(args)

    def job(self, given: Signature, settings: TorchSettings) -> BlockJob | None:
        """None: it is given what is no tensor."""
        values = [*(given[k] for k in self.form.order), *signature(self.consts)]
        inputs = tuple(x for x in values if x is not None)
        if len(inputs) < len(values):
            return None
        return BlockJob(self.form.source, self.form.name, inputs, self.form.own_consts, settings)

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
        return run(*[args[k] for k in self.form.order], *self.consts)


class CompiledProgram:
    """The entry of a program, whose blocks are compiled at its first call."""

    def __init__(
        self, main: Callable[..., Any], program: Program, blocks: Mapping[str, CompiledBlock], source: str,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.main, self.program, self.blocks, self.source, self.device = main, program, blocks, source, device
        self.is_ready = False

    @classmethod
    def of(
        cls, run: Callable[[dict[str, Any]], None], program: Program, names: Mapping[str, str],
        compiled: Collection[str], source: str, device: torch.device,
    ) -> CompiledProgram:  # fmt: skip
        """Of `source`, which `run` runs in an environment, and where blocks are functions of these names."""
        plain, env = dict[str, Any](), dict[str, Any]()
        run(plain)  # in which a block that is compiled calls others as they are
        run(env)
        texts = BlockTexts(source, set(names.values()))
        forms = {block: texts.canonical(name) for block, name in names.items() if block in compiled}
        blocks = {
            block: CompiledBlock(names[block], plain[names[block]], form, [plain[x] for x in form.consts])
            for block, form in forms.items()
        }
        env.update({block.name: block for block in blocks.values()} | {x: plain[x] for x in texts.consts})
        return cls(env["main"], program, blocks, source, device)

    def __call__(self, *inputs: Any) -> Any:
        if self.is_ready:
            return self.main(*inputs)
        self.is_ready = True
        kept_calls = None
        try:
            kept_calls = self._compile(inputs)
        except Exception as e:
            say(f"blocks are compiled one after another: {type(e).__name__}: {e}")
        results = self.main(*inputs)
        if kept_calls is not None and any(block.is_told for block in self.blocks.values()):
            kept_calls.unlink(missing_ok=True)  # it was wrong, and shall not be so again
        return results

    def _compile(self, inputs: Sequence[Any]) -> Path:
        """All blocks, for what they will be called with, and where that is kept; what cannot be compiled so is left to
        torch.compile."""
        with BlockServer.take() or contextlib.nullcontext() as server:
            settings = TorchSettings.now()
            path = place_of((self.source, signature(inputs), settings)).with_suffix(".calls")
            places: dict[Path, list[tuple[CompiledBlock, Signature]]] = {}
            jobs: dict[Path, BlockJob] = {}
            for block, given in self._calls(path, inputs):
                job = block.job(given, settings)
                if job is not None:
                    place = place_of(job)
                    jobs[place] = job
                    places.setdefault(place, []).append((block, given))
            for place, run in server.compiled(jobs) if server is not None else compiled_here(jobs):
                for block, given in places[place]:
                    block.loaded[given] = run
            return path

    def _calls(self, path: Path, inputs: Sequence[Any]) -> list[tuple[CompiledBlock, Signature]]:
        """Blocks and what they will be called with, the longest first: as an earlier start left it, or foreseen."""
        try:
            calls: dict[str, list[Signature]] = pickle.loads(path.read_bytes())
        except Exception:
            calls = block_inputs(self.program, self.blocks, inputs, self.device)
            write_atomically(path, pickle.dumps(calls))
        longest_first = sorted(calls, key=lambda name: -len(self.program.blocks[name].eqns))
        return [(self.blocks[name], given) for name in longest_first for given in calls[name]]


def place_of(what: Any) -> Path:
    """Where a block is kept, or what is known of a program: beside torch's own caches, by all that decides it."""
    from torch._inductor.codecache import CacheBase, torch_key
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    parts = (repr(what), CacheBase.get_system(), torch_key().hex(), _operators())
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
        ready: queue.SimpleQueue[Result] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(jobs, ready), name="mycel-blocks", daemon=True).start()
        import torch._inductor.compile_fx  # noqa: F401  (what is loaded needs it, and workers need their time)

        return _loaded_in_turn((ready.get() for _ in jobs), len(jobs))

    def _read(self, jobs: Mapping[Path, BlockJob], ready: queue.SimpleQueue[Result]) -> None:
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


def compiled_here(jobs: Mapping[Path, BlockJob]) -> Iterator[tuple[Path, Callable[..., Any]]]:
    """Places of blocks, each with what it was compiled to, one after another in this process."""
    return _loaded_in_turn(map(_code_of, jobs.items()), len(jobs))


def _code_of(item: tuple[Path, BlockJob]) -> Result:
    """Of a block, from disk or compiled now."""
    path, job = item
    with contextlib.suppress(Exception):
        return path, pickle.loads(path.read_bytes())[0], ""
    try:
        code, kernels = compile_block(job)
        write_atomically(path, pickle.dumps((code, kernels)))
        return path, code, ""
    except Exception as e:
        return path, None, f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"


def _loaded_in_turn(results: Iterable[Result], count: int) -> Iterator[tuple[Path, Callable[..., Any]]]:
    """What can be loaded of what comes; of all else it is said why not."""
    failed: dict[str, int] = {}
    for path, code, why_not in results:
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
        say(f"{n} of {count} blocks are compiled in turn: {why_not}")


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
