"""Blocks compiled at once give what blocks compiled in turn give; whatever becomes of the workers, the program runs,
and nothing of them is left."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.triton_bundler import TritonBundler

import mycel
from mycel.ir import Program
from mycel.run import block_inputs as inputs_of_blocks
from mycel.run import compiled_blocks, load
from mycel.run.block_texts import CanonicalBlock
from mycel.run.block_worker import BlockJob, Strided, TorchSettings
from mycel.run.compiled_blocks import BlockServer, CompiledBlock

CPU = torch.device("cpu")
TEXT = """
def layer(x: f32[4,8], w: f32[8,8]):
  c: f32[8] = const(dtype=f32, name="shift", shape=(8,))
  h: f32[4,8] = linear(x, w)
  s: f32[4,8] = add(h, c)
  a: f32[4,8] = tanh(s)
  t: f32[8,4] = permute(a, dims=(1, 0))
  return a, t

def head(t: f32[8,4], u: f32[8,4], w: f32[8,8]):
  i: f32[4,8] = permute(u, dims=(1, 0))
  a: f32[4,8], l: f32[8,4] = call(i, w, block=@layer)
  m: f32[8,4] = mul(t, l)
  e: f32[8,4] = exp(m)
  y: f32[8] = sum(e, dims=(1,))
  return y, e

def main(x: f32[4,8], w: f32[8,8], v: f32[8,8]):
  a: f32[4,8], t: f32[8,4] = call(x, w, block=@layer)
  b: f32[4,8], u: f32[8,4] = call(a, v, block=@layer)
  y: f32[8], e: f32[8,4] = call(t, u, w, block=@head)
  return y, e, b
"""
NAMES = ("layer", "head")


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    """Nothing that another test left; and no server waits for blocks that never come."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    BlockServer.stop()


def program() -> Program:
    return Program.parse(TEXT, {"shift": torch.arange(8.0)})


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((4, 8), (8, 8), (8, 8))]


def run():
    """(results, the blocks) of the program as it is loaded and called"""
    code, _ = load(program(), CPU, reuse=True, compiled=NAMES)
    with torch.no_grad():
        return code(*tensors()), code.blocks


def is_gone(server: BlockServer) -> bool:
    return group_is_gone(server.process.pid)


def group_is_gone(pid: int) -> bool:
    """Has every process of a group ended?  A server may still be importing."""
    for _ in range(600):
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def started() -> BlockServer:
    """The server that the next program takes."""
    with config.patch(compile_threads=4):
        BlockServer.start()
    assert BlockServer.waiting is not None
    return BlockServer.waiting


@pytest.mark.slow
def test_at_once_is_as_in_turn_and_found_again(capfd, monkeypatch):
    with monkeypatch.context() as by_torch:
        by_torch.setattr(compiled_blocks.CompiledProgram, "_compile", lambda self, inputs: None)
        wanted, in_turn = run()
    assert not any(block.loaded for block in in_turn.values())
    server = started()
    results, at_once = run()
    assert [len(block.loaded) for block in at_once.values()] == [1, 1] and is_gone(server)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(results, wanted, strict=True))
    monkeypatch.setattr(sys, "executable", "/bin/false")  # a second start finds them on disk
    server = started()
    again, kept = run()
    assert [len(block.loaded) for block in kept.values()] == [1, 1] and is_gone(server)
    assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_few_cores_compile_here_and_find_it_again(capfd, monkeypatch):
    """Blocks are kept whoever compiled them; so is what they are called with."""
    with config.patch(compile_threads=1):
        first, compiled = run()
        monkeypatch.setattr(compiled_blocks, "compile_block", lambda job: 1 / 0)
        monkeypatch.setattr(compiled_blocks, "block_inputs", lambda *_: 1 / 0)
        second, kept = run()
    assert all(len(block.loaded) == 1 for blocks in (compiled, kept) for block in blocks.values())
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(second, first, strict=True))
    assert all(torch.allclose(a, b) for a, b in zip(first, plain(*tensors()), strict=True))
    assert capfd.readouterr().err == ""


def test_settings_that_are_the_defaults_again_are_no_other_settings():
    before = TorchSettings.now()
    with config.patch({"inplace_buffers": not config.inplace_buffers, "triton.store_cubin": True}):
        within = TorchSettings.now()
    assert TorchSettings.now() == before != within
    assert "inplace_buffers" in within.configs[0] and "store_cubin" in within.configs[0]


TURNED = """
def first(w: f32[8,8], g: f32[4,8], x: f32[4,8]):
  h: f32[4,8] = mul(g, x)
  y: f32[4,8] = linear(h, w)
  return y, h

def second(x: f32[4,8], g: f32[4,8], weight: f32[8,8]):
  part: f32[4,8] = mul(x, g)
  out: f32[4,8] = linear(part, weight)
  return out, part

def main(x: f32[4,8], w: f32[8,8], v: f32[8,8]):
  a: f32[4,8], h: f32[4,8] = call(w, x, x, block=@first)
  y: f32[4,8], p: f32[4,8] = call(h, a, v, block=@second)
  return y, p
"""


@pytest.mark.slow
def test_blocks_that_differ_in_names_and_the_order_of_inputs_are_compiled_once(monkeypatch):
    jobs: list[BlockJob] = []
    compile_block = compiled_blocks.compile_block
    monkeypatch.setattr(compiled_blocks, "compile_block", lambda job: jobs.append(job) or compile_block(job))
    code, _ = load(Program.parse(TURNED), CPU, reuse=True, compiled=("first", "second"))
    x, w, v = tensors()
    with config.patch(compile_threads=1), torch.no_grad():
        y, p = code(x, w, v)
    assert len(jobs) == 1 and all(len(block.loaded) == 1 for block in code.blocks.values())
    h = x * x
    assert torch.allclose(p, h * (h @ w.T)) and torch.allclose(y, (h * (h @ w.T)) @ v.T)


def test_calls_that_were_foreseen_wrongly_are_not_kept(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    other = inputs_of_blocks.signature([torch.zeros(8, 4).T, torch.zeros(8, 8)])
    monkeypatch.setattr(compiled_blocks, "block_inputs", lambda *_: {"layer": [other]})
    monkeypatch.setattr(compiled_blocks, "compiled_here", lambda jobs: ((path, None) for path in jobs))
    kept: list[Any] = []
    write = compiled_blocks.write_atomically
    monkeypatch.setattr(compiled_blocks, "write_atomically", lambda path, data: kept.append(path) or write(path, data))
    with config.patch(compile_threads=1):
        results, _ = run()
    assert len(kept) == 1 and not kept[0].exists()
    assert all(torch.allclose(a, b) for a, b in zip(results, plain(*tensors()), strict=True))


@pytest.mark.slow
def test_without_workers_it_compiles_in_turn_and_says_why(capfd, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    server = started()
    results, blocks = run()
    assert not any(block.loaded for block in blocks.values()) and is_gone(server)
    assert capfd.readouterr().err == "mycel: 2 of 2 blocks are compiled in turn: their worker ended\n"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with config.patch(compile_threads=4):
        BlockServer.start()
    assert BlockServer.waiting is None
    assert "no process for them could be started" in capfd.readouterr().err
    expected = plain(*tensors())
    assert all(torch.allclose(a, b) for a, b in zip(results, expected, strict=True))


def plain(x, w, v):
    shift = torch.arange(8.0)
    a = torch.tanh(x @ w.T + shift)
    b = torch.tanh(a @ v.T + shift)
    e = torch.exp(a.T * torch.tanh(b @ w.T + shift).T)
    return e.sum(1), e, b


def served(sources: list[str], tmp_path, workers: int = 2) -> subprocess.CompletedProcess[bytes]:
    """What a server says of functions `f` of one vector."""
    x, settings = Strided((4,), (1,), torch.float32, CPU), TorchSettings.now()
    jobs = [(BlockJob(source, "f", (x,), (), settings), str(tmp_path / str(i))) for i, source in enumerate(sources)]
    process = subprocess.Popen(
        [sys.executable, "-c", f"from mycel.run.block_worker import serve; serve({workers})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **compiled_blocks.WORKER_ENV, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(jobs, process.stdin)
    process.stdin.flush()
    out = process.stdout.read()
    return subprocess.CompletedProcess(process.args, process.wait(), out)


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_own_block(tmp_path):
    good = "import torch\ndef f(x):\n    return (torch.relu(x),)\n"
    dies = "import os, signal\ndef f(x):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    fails = "def f(x):\n    raise ValueError('not this one')\n"
    said = served([dies, fails, good], tmp_path).stdout.decode()
    assert sorted(said.splitlines()) == sorted([
        f'["{tmp_path / "1"}", "ValueError: not this one"]',
        f'["{tmp_path / "2"}", ""]',
    ])  # fmt: skip
    assert (tmp_path / "2").exists() and not (tmp_path / "0").exists()


@pytest.mark.slow
def test_nothing_is_left_after_an_interrupt(monkeypatch):
    """Ctrl-C while blocks are waited for."""
    server = started()

    def interrupted(self, jobs):
        threading = compiled_blocks.threading
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        compiled_blocks.queue.SimpleQueue().get()

    monkeypatch.setattr(BlockServer, "compiled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert is_gone(server)


@pytest.mark.parametrize(("threads", "ranks"), [(3, 1), (8, 4)])
def test_few_workers_are_none(threads, ranks, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    with config.patch(compile_threads=threads):
        BlockServer.start()
    assert BlockServer.waiting is None


@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last], ids=str)
def test_strides_are_foreseen(last, monkeypatch):
    """A law: blocks are called with what was foreseen, and nothing else."""
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    monkeypatch.setattr(BlockServer, "start", classmethod(lambda cls: None))
    called: dict[str, set] = {}

    def call(self, *args):
        called.setdefault(self.name, set()).add(inputs_of_blocks.signature(args))
        return self.in_turn(*args)

    monkeypatch.setattr(CompiledBlock, "__call__", call)
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
        for _ in range(3)
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(4 * 6 * 6, 5)).to(memory_format=last)
    x, y = torch.randn(2, 4, 6, 6).to(memory_format=last), torch.randint(0, 5, (2,))
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.functional.cross_entropy, compile=True
    )
    seen: dict[str, list] = {}
    compile_all = compiled_blocks.CompiledProgram._compile

    def foreseen(self, values):
        calls = inputs_of_blocks.block_inputs(self.program, self.blocks, values, self.device)
        seen.update((self.blocks[name].name, set(signatures)) for name, signatures in calls.items())

    monkeypatch.setattr(compiled_blocks.CompiledProgram, "_compile", foreseen)
    step(x, y)
    assert compile_all is not foreseen and called and seen == called


def test_kernels_are_kept_for_the_next_start(tmp_path, monkeypatch):
    """What torch notes of a block's kernels while it is loaded, it is told when the block is loaded again."""
    autotuners: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(TritonBundler, "collect_static_autotuners", lambda: (["noted"], ["its name"]))
    monkeypatch.setattr(TritonBundler, "load_autotuners", autotuners.append)
    path = tmp_path / "block"
    for _ in range(2):
        with compiled_blocks.kept_kernels(path):
            assert (TritonBundler._entries is None) == bool(autotuners)
    assert autotuners == [["noted"]] and TritonBundler._entries is None
    with pytest.raises(ValueError), compiled_blocks.kept_kernels(tmp_path / "other"):
        raise ValueError("it cannot be loaded")
    assert TritonBundler._entries is None and not compiled_blocks.kernels_of(tmp_path / "other").exists()


def test_what_cannot_be_foreseen_is_compiled_in_turn(capfd, monkeypatch):
    """Whatever goes wrong before blocks are sent, the program runs."""
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    monkeypatch.setattr(compiled_blocks, "block_inputs", lambda *_: 1 / 0)
    server = started()
    results, blocks = run()
    assert not any(block.loaded for block in blocks.values()) and is_gone(server)
    assert all(torch.allclose(a, b) for a, b in zip(results, plain(*tensors()), strict=True))
    wanted = "mycel: blocks are compiled one after another: ZeroDivisionError: division by zero\n"
    assert capfd.readouterr().err == wanted


@pytest.mark.slow
def test_a_server_that_nobody_needs_ends():
    """Where a step has nothing to compile; and at the end of the process that started it, whatever becomes of that."""
    server = started()
    BlockServer.stop()
    assert BlockServer.waiting is None and is_gone(server)
    script = (
        "from mycel.run.compiled_blocks import BlockServer as S; S.start(); print(S.waiting.process.pid, flush=True); "
    )
    script += "import os; os.kill(os.getpid(), 9)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    child = subprocess.run([sys.executable, "-c", script], check=False, env=env, stdout=subprocess.PIPE, text=True)
    assert child.returncode == -signal.SIGKILL and group_is_gone(int(child.stdout))


def test_inputs_that_lie_otherwise_are_compiled_for(capfd, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    block = CompiledBlock("layer", lambda x: ("in turn", x), CanonicalBlock("", "layer", (0,), ()), [])
    x = torch.zeros(2, 3)
    block.loaded[inputs_of_blocks.signature([x])] = lambda x: ("at once", x)
    assert [block(x)[0], block(copy.deepcopy(x))[0]] == ["at once", "at once"] and len(block.checked) == 1
    assert [block(torch.zeros(3, 2).T)[0], block(torch.zeros(3, 2).T)[0], block(x)[0]] == ["in turn"] * 2 + ["at once"]
    assert capfd.readouterr().err == "mycel: layer is compiled in turn: its inputs lie otherwise than was foreseen\n"
