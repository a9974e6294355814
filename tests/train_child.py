"""`mycel` in processes of its own that can be interrupted: for each job, one line of JSON on standard input, it forks a
child that runs the command.

Everything heavy is imported and used once before, so that a run takes half a second.
Lines out: {"pid"} of the child, then {"ended": exit status, negative for a signal}.

    args, cwd            the command, and where
    out                  file for what it prints
    kill                 [step, signal]: the process sends itself the signal when that many steps are done
    fill, free           step at which a file takes all room that is left in the folder `cwd`, and step at which it is
                         deleted
    stuck                step from which on saves do not get on, until they are abandoned
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from mycel.cli import main as mycel_main
from mycel.run.shards import Shard
from mycel.train.config import Config
from mycel.train.loop import train
from mycel.train.steps import Steps


def after(step: int, act: Callable[[Steps], object]) -> None:
    """Call `act` when that many steps are done."""
    take = Steps._step

    def step_and_act(self: Steps, batch: object) -> object:
        loss = take(self, batch)
        if self.done == step:
            act(self)
        return loss

    Steps._step = step_and_act


def fill(steps: Steps) -> None:
    steps.saver.wait()
    with open("filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as e:
            assert e.errno == errno.ENOSPC


def get_stuck(_: Steps) -> None:
    whole = Shard.chunks

    def chunks(self: Shard, abandoned: threading.Event) -> Iterator[memoryview]:
        yield from whole(self, abandoned)
        abandoned.wait(60)
        yield from whole(self, abandoned)

    Shard.chunks = chunks


def run(job: dict) -> None:
    os.chdir(job["cwd"])
    out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if kill := job.get("kill"):
        after(kill[0], lambda _: os.kill(os.getpid(), kill[1]))
    if "fill" in job:
        after(job["fill"], fill)
    if "free" in job:
        after(job["free"], lambda _: Path("filler").unlink())
    if "stuck" in job:
        after(job["stuck"], get_stuck)
    sys.argv = ["mycel", *job["args"]]
    try:
        mycel_main()
    except SystemExit as e:
        for thread in set(threading.enumerate()) - {threading.current_thread()}:
            print(f"left behind: {thread}")
        sys.stdout.flush()
        os._exit(e.code)  # taking torch down takes longer than the run


def warm_up() -> None:
    """One run, silent, of which nothing stays but what Python has loaded."""
    model = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 258,
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        Path(folder, "text").write_text("warm " * 100)
        data = {"train": f"{folder}/text", "tokenizer": "bytes", "length": 8, "cache": f"{folder}/cache"}
        some = {"train": {"steps": 1, "batch": 2, "device": "cpu"}, "sample": {"tokens": 1}, "run": f"{folder}/run"}
        assert train(Config.from_dict({"model": {"config": model}, "data": data, **some})) == 0


def main() -> None:
    torch.set_num_threads(1)
    warm_up()
    gc.freeze()
    say = os.dup(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run(json.loads(line))
            return
        os.write(say, (json.dumps({"pid": pid}) + "\n").encode())
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(say, (json.dumps({"ended": ended}) + "\n").encode())


if __name__ == "__main__":
    main()
