"""A process to be killed: for each job, one line of JSON on standard input, it forks a child that does the job and
tells what it did.

Torch is imported once, so that a job costs milliseconds.  Lines out: {"pid"} of the child, what the child says,
{"ended": exit status}.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from checkpoints import part_of

from mycel.ir import Layout, Mesh
from mycel.run.checkpoint import MeshProcess, RunFolder, Saver

METRICS = [3.0, 1.0, 2.0]
STEPS = [1, 2, 3, 3]  # the last one again: it replaces a complete checkpoint
MESH = Mesh(a=2, b=2)
LAYOUTS = {"w": Layout((("a",), ())), "tied": Layout((("a",), ())), "half": Layout((("b",), ("a",))), "count": Layout()}
COUNTED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def state(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a step: different in each, several shards of 5000 bytes."""
    random = torch.Generator().manual_seed(step)
    w = torch.randn(50, 40, generator=random)
    return {"w": w, "tied": w, "half": torch.randn(7, 3, generator=random).bfloat16(), "count": torch.tensor(step)}


def say(**what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def die_at(moment: int) -> None:
    """kill -9 just before this process touches the filesystem for the `moment`th time from now."""
    left = [moment]

    def count(event: str, args: object) -> None:
        if event in COUNTED:
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    fsync = os.fsync
    os.fsync = lambda fd: (count("open", None), fsync(fd))[1]
    sys.addaudithook(count)


def save(folder: str, moment: int | None = None, asynchronous: bool = True, forever: bool = False) -> None:
    """A run that saves, and says so after each completed save."""
    if moment is not None:
        die_at(moment)
    saver = Saver(folder, keep=1, asynchronous=asynchronous, shard_bytes=5000)
    steps = range(1, 1 << 30) if forever else STEPS
    for step in steps:
        saver.save(step, state(step), {"step": step}, METRICS[(step - 1) % len(METRICS)])
        saver.wait()
        say(saved=step)
    saver.close()


def ranks(folder: str, board: str, victim: int = -1, moment: int = 0, small: int = -1) -> None:
    """The same run by all ranks of a mesh, a process each; the victim is killed, the small one may write but little."""
    pids = {}
    for rank in range(MESH.world):
        if (pid := os.fork()) == 0:
            try:
                signal.alarm(60)
                be_rank(rank, folder, Path(board), moment if rank == victim else None, rank == small)
                os._exit(0)
            finally:
                os._exit(1)
        pids[pid] = rank
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        if status:
            (Path(board) / f"gone-{rank}").touch()
    os._exit(0)  # taking torch down takes longer than the run


def be_rank(rank: int, folder: str, board: Path, moment: int | None, small: bool) -> None:
    """One of them: it says what became of each save."""
    rounds = 0

    def share(text: str) -> list[str]:
        nonlocal rounds
        rounds += 1
        mine, *_ = texts = [board / f"{rounds:04d}-{(rank + i) % MESH.world}" for i in range(MESH.world)]
        (part := board / f"part-{rank}").write_text(text)
        part.rename(mine)
        while not all(path.exists() for path in texts):
            if gone := sorted(board.glob("gone-*")):
                raise ConnectionError(f"rank {gone[0].name[5:]} is gone")
            time.sleep(0.001)
        return [path.read_text() for path in sorted(texts)]

    if moment is not None:
        die_at(moment)
    saver = Saver(folder, keep=1, shard_bytes=5000, ranks=MeshProcess(MESH, rank, share), plan="a plan")
    for step in STEPS:
        limit = 4000 if small and step == 2 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        whole = state(step)
        tensors = {name: part_of(x, LAYOUTS[name], MESH, rank, padding=90) for name, x in whole.items()}
        tensors["tied"] = tensors["w"]
        layouts = {name: (LAYOUTS[name], tuple(x.shape)) for name, x in whole.items()}
        saver.save(step, tensors, {"step": step}, METRICS[(step - 1) % len(METRICS)], layouts)
        saver.wait()
        say(rank=rank, saved=saver.last and saver.last.name, reports=saver.poll())
    saver.close()


def hold(folder: str) -> None:
    """A run that holds its folder, with a data worker that outlives it."""
    run = RunFolder(folder)
    if os.fork() == 0:
        # not before it lives: what it let go at its birth it then has let go
        say(held=str(run.path), worker=os.getpid())
        time.sleep(60)
        os._exit(0)
    time.sleep(60)


def leave(folder: str) -> None:
    """A run that ends without waiting for its last save, which is slow."""
    fsync = os.fsync
    os.fsync = lambda fd: (time.sleep(0.05), fsync(fd))[1]
    Saver(folder, shard_bytes=5000).save(1, state(1), {"step": 1})


def main() -> None:
    torch.set_num_threads(1)
    part_of(torch.ones(2, 2), LAYOUTS["w"], MESH, 0)  # torch loads some of its own only now
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            say(pid=os.getpid())
            {"save": save, "ranks": ranks, "hold": hold, "leave": leave}[job.pop("do")](**job)
            return
        say(ended=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
