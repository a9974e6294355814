"""Worlds of `mycel train` to try things on: for each job, one line of JSON on standard input, it forks as many ranks
and tells how they ended.

Everything heavy is imported once, so that a world costs a second or two.  The store of a world is here, as it would be
in the launcher.
Lines out: {"ended": exit status of each rank}; what rank I printed is in OUT/I.txt.

    world, out           how many ranks, and the folder for what they print
    runs                 one after the other, each with
      settings, resume     what is run;  others: {rank: settings} of ranks that differ
      check                what is looked at on the way: see CHECKS
      signal               [rank, step, signal]: which rank sends itself a signal, when that many steps are done
      ends                 the exit code that the run should have
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import socket
import sys
import threading
import traceback
from pathlib import Path

import torch
import train_child
from alive import Alive

from mycel.errors import MycelError
from mycel.ir import Role
from mycel.run import rendezvous
from mycel.run.checkpoint import load
from mycel.train import assemble, loop, state
from mycel.train.config import Config
from mycel.train.split import Split
from mycel.train.steps import Steps


def check_restored() -> None:
    """What each rank has after a checkpoint is loaded is, put together, what was saved, bit for bit; also of the
    optimiser."""
    plain = state.restore

    def restore(loaded, parts):
        notes = plain(loaded, parts)
        whole, held = load(loaded.path).tensors, parts.step.parts
        if held is None:
            return notes
        for name, p in parts.module.named_parameters():
            assert torch.equal(parts.whole(name, p), whole[f"model.{name}"]), name
            for slot, x in parts.optimizer.state[p].items():
                gathered = (
                    held.gather(x, held.slots[Role("state", slot, of=name)][0], held.shapes[name]) if x.dim() else x
                )
                assert torch.equal(gathered, whole[f"optimizer.{name}.{slot}"]), (name, slot)
        print("restored to the bit")
        return notes

    loop.state.restore = restore


def check_memory() -> None:
    """Bytes of parameters and optimiser state after the run, and the most that were alive at once while the model was
    made."""
    plain, plain_build = Steps.run, assemble.models.build
    measured = {}

    def build(*args, **kwargs):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            model = plain_build(*args, **kwargs)
        measured["making"] = most_bytes(seen)
        return model

    def run(self):
        plain(self)
        tensors = [
            *self.parts.module.parameters(),
            *(x for s in self.parts.optimizer.state.values() for x in s.values()),
        ]
        measured["held"] = sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())
        measured["plan"] = [self.parts.step.plan.held, self.parts.step.plan.peak]
        print(json.dumps(measured))

    Steps.run = run
    assemble.models.build = build


def most_bytes(seen: torch.profiler.profile) -> int:
    """The highest sum of what torch's allocator gave and took back: it reports each to the profiler."""
    events = sorted((e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate((n for _, n in events), initial=0))


def check_rows() -> None:
    """Sequences that this rank read, by what for, and the bytes it gave to steps."""
    read, step, run = Split.batch, Steps._step, Steps.run
    counts = {"train": 0, "validation": 0, "bytes": 0}

    def batch(self, indices):
        counts["train" if self is counts.get("split") else "validation"] += len(indices)
        return read(self, indices)

    def one_step(self, given):
        counts["bytes"] += sum(x.numel() * x.element_size() for x in given.values())
        return step(self, given)

    def steps(self):
        counts.update(split=self.parts.data.train, train=0, validation=0, bytes=0)
        run(self)
        print(json.dumps({name: n for name, n in counts.items() if name != "split"}))

    Split.batch, Steps._step, Steps.run = batch, one_step, steps


def check_peaks() -> None:
    """The most bytes that a step takes beside what is there between steps, and what is predicted of it."""
    step, run = Steps._step, Steps.run
    most = []

    def measured(self, given):
        with Alive() as alive:
            loss = step(self, given)
        most.append(alive.most)
        return loss

    def steps(self):
        run(self)
        plan = self.parts.step.plan
        print(json.dumps({"most": max(most), "held": plan.held, "peak": plan.peak, "host": plan.predicted.host}))

    Steps._step, Steps.run = measured, steps


CHECKS = {"peaks": check_peaks, "restored": check_restored, "memory": check_memory, "rows": check_rows}


def be_rank(rank: int, port: int, job: dict) -> int:
    faulthandler.dump_traceback_later(150, exit=True)  # no test waits for ever
    out = os.open(Path(job["out"]) / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if job["world"] > 1:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(job["world"]),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    for each in job["runs"]:
        if each.get("check"):
            CHECKS[each["check"]]()
        if (asked := each.get("signal")) and asked[0] == rank:
            train_child.after(asked[1], lambda _, number=asked[2]: os.kill(os.getpid(), number))
        resume = Path(each["resume"]) if each.get("resume") else None
        try:
            code = loop.train(
                Config.from_dict(each.get("others", {}).get(str(rank)) or each["settings"]), resume=resume
            )
        except MycelError as e:
            print(f"error: {e}")
            code = 1
        print(f"run ended with {code}", flush=True)
        if code != each.get("ends", 0):
            return 1
    return 0


def main() -> None:
    torch.set_num_threads(1)
    train_child.warm_up()
    for line in sys.stdin:
        job, server = json.loads(line), socket.create_server(("127.0.0.1", 0))
        port, pids = server.getsockname()[1], []
        for rank in range(job["world"]):
            if (pid := os.fork()) == 0:
                code = 1
                server.close()
                try:
                    code = be_rank(rank, port, job)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            pids.append(pid)
        store = rendezvous.serve(server, "127.0.0.1")  # after the forks: it has a thread
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        del store
        print(json.dumps({"ended": ended}), flush=True)


if __name__ == "__main__":
    assert threading.active_count() == 1
    main()
