"""Starts the ranks of one host as processes, and ends them together.

    launch(["train", "my.yaml"], nproc=4)                                     python -m mycel train my.yaml, four times
    launch([…], nproc=8, nnodes=2, node_rank=1, rendezvous="10.0.0.1:29500")  the second of two hosts
    launch(["x", "y"], nproc=2, program=["script.py"])                        any script, or -m module

The environment of each rank is the one torchrun makes.  The launcher of the first host holds the store in which the
ranks meet: at the address of the rendezvous, or at a free port of loopback.

    a rank fails           the others are told through the store who and how, and have FOLLOW_S to end before they are
                           killed
    SIGINT, SIGTERM …      passed on to all ranks, which have `grace_s` to end by themselves; asked twice, FOLLOW_S
    the launcher dies      the kernel kills the ranks with it (prctl PR_SET_PDEATHSIG; where there is none, they see the
                           store vanish)

Each rank is a process group of its own, and whatever it started is killed when it has ended.  Rank 0 writes to the
console; the others to RANK.log in a folder.  If one fails, its last words are shown (where several come to the same
error, those of the one that says it), the logs go into the folder of the run (RUN/logs), and it is said how to go on
from its last checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from mycel.errors import RunError

FOLLOW_S = 5.0
POLL_S = 0.05
SHOWN_LINES = 20
PR_SET_PDEATHSIG = 1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOGS = "logs"  # in the folder of a run


def launch(
    argv: Sequence[str],
    nproc: int,
    nnodes: int = 1,
    node_rank: int = 0,
    rendezvous: str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    program: Sequence[str] = ("-m", "mycel"),
    logs: str | os.PathLike[str] | None = None,
    grace_s: float = 60.0,
) -> int:
    """Run `python PROGRAM ARGV` as `nproc` ranks on this host, to the end: the exit code of the first that failed, 128
    + N for signal N.

    `env`: more variables for the ranks.  `logs`: the folder of their logs; otherwise a temporary one, which goes into
    the run's folder if a rank fails."""
    host, port = _address(nproc, nnodes, node_rank, rendezvous)
    server = _listen(host, port) if node_rank == 0 else None
    folder = Path(logs) if logs is not None else Path(tempfile.mkdtemp(prefix="mycel-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    ranks = LocalRanks(host, server.getsockname()[1] if server else port, nnodes, node_rank, grace_s)
    ranks.temporary = logs is None
    try:
        with ranks.together():
            ranks.start([sys.executable, *program, *argv], nproc, {**os.environ, **(env or {})}, folder)
            ranks.hold(server)
            ranks.follow()
        code = ranks.report()
        if ranks.temporary and code and not ranks.asked and ranks.run is not None:
            shutil.copytree(folder, ranks.run / LOGS, dirs_exist_ok=True)
        return code
    finally:
        if ranks.temporary:
            shutil.rmtree(folder, ignore_errors=True)


class Rank:
    """A process, and where what it says goes."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log: Path | None) -> None:
        self.rank, self.process, self.log = rank, process, log

    @property
    def ended(self) -> bool:
        """Has it ended?  What it started, and left behind, then ends too: its group has the process's id, which is ours
        until it is asked for."""
        if self.process.returncode is not None:
            return True
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.signal(signal.SIGKILL, group=True)
        self.process.wait()
        return True

    @property
    def code(self) -> int:
        """As a shell has it."""
        code = self.process.returncode or 0
        return 128 - code if code < 0 else code

    @property
    def fate(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code >= 0:
            return f"rank {self.rank} ended with exit code {code}"
        hint = " (no memory left, or someone's kill -9)" if code == -signal.SIGKILL else ""
        return f"rank {self.rank} was killed by {_signal_name(-code)}{hint}"

    def signal(self, number: int, group: bool = False) -> None:
        """To the process, or to it and all it started."""
        with suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self.process.pid, number)
            elif self.process.returncode is None:
                os.kill(self.process.pid, number)


class LocalRanks:
    """The ranks of this host, from their start to their end."""

    def __init__(self, host: str, port: int, nnodes: int, node_rank: int, grace_s: float) -> None:
        self.host, self.port, self.nnodes, self.node_rank, self.grace_s = host, port, nnodes, node_rank, grace_s
        self.all: list[Rank] = []
        self.failed: Rank | None = None  # the first
        self.asked: list[int] = []  # the signals that came
        self.deadline = float("inf")
        self.store: Any = None
        self.run: Path | None = None  # the folder of their run, once they have told and one has failed
        self.temporary = False  # their logs, which go there then

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, signals are passed on; at the end, however it comes, none is left."""
        before = {}
        # no other thread may; what is ignored (by nohup, say) stays so
        if threading.current_thread() is threading.main_thread():
            before = {n: old for n in SIGNALS if (old := signal.getsignal(n)) not in (signal.SIG_IGN, None)}
        for number in before:
            signal.signal(number, lambda number, _: self._pass_on(number))
        try:
            yield
        finally:
            self.kill()
            self._sign_off()
            for number, old in before.items():
                signal.signal(number, old)

    def start(self, command: Sequence[str], nproc: int, base: Mapping[str, str], folder: Path) -> None:
        """All of them; where threads are not counted, they share the cores."""
        common = {
            "OMP_NUM_THREADS": str(max(1, _cores() // nproc)),
            # torch reports every lost connection with a stack trace; the watch says it in a line
            "TORCH_CPP_LOG_LEVEL": "FATAL",
            **base,
            "WORLD_SIZE": str(self.nnodes * nproc), "LOCAL_WORLD_SIZE": str(nproc), "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.host, "MASTER_PORT": str(self.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        for local in range(0 if self.asked else nproc):
            rank = self.node_rank * nproc + local
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(local)}
            log = folder / f"{rank}.log" if rank else None
            with open(log, "wb") if log else nullcontext() as out:
                process = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    preexec_fn=_die_with(os.getpid()),  # noqa: PLW1509  torch and its threads come later
                )
            self.all.append(Rank(rank, process, log))

    def hold(self, server: socket.socket | None) -> None:
        """Put up the store, if its socket is here.  After the start: torch is imported for it, while the ranks import
        it too."""
        from mycel.run import rendezvous

        if server is not None:
            self.store = rendezvous.serve(server, self.host)

    def follow(self) -> None:
        """Until all have ended; when one fails, the others are told, and have a moment."""
        left = self.all
        while left:
            time.sleep(POLL_S)
            left = [r for r in self.all if not r.ended]
            if self.failed is None and any(r.process.returncode for r in self.all):
                self._fail()
            if time.monotonic() > self.deadline:
                self.kill()

    def kill(self) -> None:
        """Whatever is left, and what it started."""
        for r in self.all:
            if not r.ended:
                r.signal(signal.SIGKILL, group=True)
                r.process.wait()

    def report(self) -> int:
        """The exit code of all; if one failed, its name and its last words on stderr."""
        if self.failed is None:
            return 128 + self.asked[0] if self.asked and not self.all else 0
        if self.asked:
            return 128 + self.asked[0] if self.failed.process.returncode == -signal.SIGKILL else self.failed.code
        speaker, is_said = self._speaker(self.failed)
        lines = self._said(speaker) if is_said else self._last_words(speaker)
        if lines:
            print("\n".join(lines), file=sys.stderr, flush=True)
        return self.failed.code

    def _said(self, speaker: Rank) -> list[str]:
        """An error in words of ours, where it is not on the console yet."""
        words = speaker.log.read_text(errors="replace").splitlines() if speaker.log is not None else []
        begins = max((i for i, line in enumerate(words) if line.startswith("error:")), default=len(words))
        place = self._log(speaker)
        who = [f"  said by   rank {speaker.rank}{f', log {place}' if place else ''}"] if words else []
        return [*words[begins:], *who, *self._way_on("stopped")]

    def _last_words(self, speaker: Rank) -> list[str]:
        """How a rank ended, and what it wrote last."""
        lines = [f"error: {speaker.fate}"]
        if speaker.log is not None:
            words = speaker.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
            place = self._log(speaker)
            lines += [*([f"  log       {place}"] if place else []), *(f"  | {line}" for line in words)]
        return lines + self._way_on()

    def _fail(self) -> None:
        """Note who failed first, and tell the others; when all were asked to end, they do without being told."""
        from mycel.run.watch import LOST

        # of those that died since the last look, one that ends because of another is not the first; a signal comes from
        # outside
        first = min(
            (r for r in self.all if r.process.returncode), key=lambda r: (r.code == LOST, r.process.returncode > 0)
        )
        self.failed = first

        def tell(store: Any, run: Any) -> None:
            if store.check([run.RUN]):
                self.run = Path(store.get(run.RUN).decode())
            where = self._log(first) or "the console"
            reason = run.tell(store, f"{first.fate}\n  try       a look at its log: {where}")
            # it said so, and may still be ending
            self.failed = next((r for r in self.all if reason.startswith(f"rank {r.rank} failed: ")), first)

        if not self.asked:
            self.deadline = min(self.deadline, time.monotonic() + FOLLOW_S)
            self._with_store(tell)

    def _speaker(self, rank: Rank) -> tuple[Rank, bool]:
        """Who says why a rank failed: itself, or another of these that failed for the same reason; and was it said, in
        words of ours?"""
        speakers: list[Rank] = []

        def ask(store: Any, run: Any) -> None:
            if store.check([key := run.speaker_key(rank.rank)]):
                speakers.extend(each for each in self.all if each.rank == int(store.get(key)))

        self._with_store(ask)
        return (speakers[0], True) if speakers else (rank, False)

    def _log(self, rank: Rank) -> Path | None:
        """Where the log of a rank is in the end; None: nowhere, and on the console."""
        if rank.log is None or not self.temporary:
            return rank.log
        return self.run / LOGS / rank.log.name if self.run is not None else None

    def _way_on(self, head: str = "") -> list[str]:
        """The last checkpoint of a run, and the line that goes on from it; under a head of their own, where nothing is
        said before."""
        from mycel.run.checkpoint import latest
        from mycel.run.folder import resume_command

        last = latest(self.run / "checkpoints") if self.run is not None else None
        if self.run is None or last is None:
            return []
        ranks = len(self.all) if self.nnodes == 1 else None
        first = f"{head}; {last.name} is safe\n  at        {last.parent}" if head else f"  safe      {last}"
        return [first, f"  try       {resume_command(self.run, ranks)}"]

    def _pass_on(self, number: int) -> None:
        self.asked.append(number)
        self.deadline = min(self.deadline, time.monotonic() + (self.grace_s if len(self.asked) == 1 else FOLLOW_S))
        for r in self.all:
            r.signal(number)

    def _sign_off(self) -> None:
        """Of several launchers, the one with the store stays until the others have gone."""
        if self.nnodes == 1:
            return
        if self.node_rank:
            self._with_store(lambda store, run: store.add("launchers", 1))
            return

        def wait(store: Any, run: Any) -> None:
            end = time.monotonic() + (FOLLOW_S if self.failed or self.asked else run.timeout_s())
            while store.add("launchers", 0) < self.nnodes - 1 and time.monotonic() < end:
                time.sleep(POLL_S)

        self._with_store(wait)

    def _with_store(self, act: Callable[[Any, Any], object]) -> None:
        """Do something with the store of the world, unless it is gone."""
        from torch.distributed import DistError

        from mycel.run import rendezvous

        with suppress(DistError):
            self.store = self.store or rendezvous.connect(self.host, self.port, FOLLOW_S / 2)
            act(self.store, rendezvous)


def _address(nproc: int, nnodes: int, node_rank: int, rendezvous: str | None) -> tuple[str, int]:
    """Where the ranks meet; port 0: any."""
    if nproc < 1 or nnodes < 1 or not 0 <= node_rank < nnodes:
        raise RunError(
            f"nproc={nproc}, nnodes={nnodes}, node_rank={node_rank}\n"
            "  try       at least one of each, and node_rank from 0 to nnodes - 1"
        )
    if rendezvous is None:
        if nnodes > 1:
            raise RunError(
                f"{nnodes} hosts, and no place where they meet\n"
                "  try       --rendezvous HOST:PORT with an address of the first host, on each of them"
            )
        return "127.0.0.1", 0
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or (nnodes > 1 and int(port) == 0):
        raise RunError(f"{rendezvous!r} is no place to meet\n  try       HOST:PORT, such as 10.0.0.1:29500")
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine; port 0: any that is free."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096
        )
    except OSError as e:
        raise RunError(
            f"cannot listen at {host}:{port}: {e.strerror or e}\n"
            "  try       an address of this host, and a port that is free"
        ) from e


def _die_with(parent: int) -> Callable[[], None]:
    """What a process does before its program starts, so that it does not outlive its parent."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None

    def before_exec() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before
                os._exit(128 + signal.SIGKILL)

    return before_exec


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
