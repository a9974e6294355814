"""A process to be killed: for each job, one line of JSON on standard input, it forks a child that does the job and tells what it did.

Torch is imported once, so that a job costs milliseconds.  Lines out: {"pid"} of the child, what the child says, {"ended": exit status}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch

from mycel.run.checkpoint import RunFolder, Saver

METRICS = [3.0, 1.0, 2.0]
STEPS = [1, 2, 3, 3]  # the last one again: it replaces a complete checkpoint
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


def hold(folder: str) -> None:
    """A run that holds its folder, with a data worker that outlives it."""
    run = RunFolder(folder)
    if os.fork() == 0:
        say(held=str(run.path), worker=os.getpid())  # not before it lives: what it let go at its birth it then has let go
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
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            say(pid=os.getpid())
            {"save": save, "hold": hold, "leave": leave}[job.pop("do")](**job)
            return
        say(ended=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
