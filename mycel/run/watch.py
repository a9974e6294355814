"""A thread in each rank that sees the others fail: what blocks in a collective can neither be interrupted nor ask.

    a rank dies         whoever started it writes why to the store (`stop`); all others find it there within a second
    a rank is stopped   the others, who wait for it in a collective, say so at the timeout, and write it to the store
    the store is gone   whoever held it has died

Then this rank has to end: its next call of a collective raises the reason, and if it makes none within `GRACE_S`, the
thread prints the reason and ends the process, with the exit code `LOST`.

Every rank writes where it is to the store, again and again (its beat), so that others can tell: who is silent, and who
is late, and where.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import distributed as dist

from mycel.errors import RunError
from mycel.run.rendezvous import STOP, Rendezvous, named, tell

LOST = 71  # exit code of a rank that ends because of another
GRACE_S = 1.5
EVERY_S = 0.4
TOLD_WITHIN_S = 3.0  # of a death, by whoever started the rank, if that knows of the store


@dataclass
class PendingCollective:
    """A collective that this rank is in: the n-th of its run, and the user's line it was written for."""

    number: int
    what: str
    at: str
    ranks: tuple[int, ...]
    since: float = field(default_factory=time.monotonic)
    done: Callable[[], bool] | None = None  # where leaving the call does not mean that the messages have come


class Watch:
    """Looks after the other ranks of a world until `close`."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.meeting, self.all = meeting, meeting.connect()
        self.store = dist.PrefixStore(meeting.name, self.all)
        self.every_s = max(EVERY_S, meeting.world / 2000)  # one store serves all
        self.reason = ""
        self.reported, self.closing = threading.Event(), threading.Event()
        self.places: dict[int, PendingCollective] = {}
        self.entered = 0
        self.beats = 0
        self.last = ("", "")  # the collective last entered, and where
        self.me = {"pid": os.getpid(), "host": _host()}
        self._beat("works")
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.thread.start()

    def enter(self, what: str, at: str, ranks: Iterable[int]) -> PendingCollective:
        """This rank is in a collective now; refused when the world has to end."""
        if self.reason:
            raise RunError(self.reason)
        self.entered += 1
        self.last = (what, at)
        place = self.places[self.entered] = PendingCollective(self.entered, what, at, tuple(ranks))
        return place

    def leave(self, place: PendingCollective, done: Callable[[], bool] | None = None) -> None:
        """It goes on; `done` says when the messages have come, if that is later."""
        if done is None:
            self.places.pop(place.number, None)
        else:
            place.done = done

    def explain(self, place: PendingCollective, error: Exception) -> RunError:
        """Why a collective failed: what is known about the others, a moment later."""
        if not self.reported.wait(TOLD_WITHIN_S):
            reason = f"{place.what} failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
            with suppress(RuntimeError):  # the store may be gone as well
                reason = tell(self.all, self._accuse(place, reason))
            self.reason = self.reason or reason
        return RunError(_placed(self.reason, place))

    def close(self) -> None:
        """Others need not wait for this rank any more."""
        self.closing.set()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(2 * self.every_s + 1)

    def _run(self) -> None:
        try:
            while not self.closing.wait(self.every_s):
                self._beat("works")
                if self.all.check([STOP]):
                    self._end(self.all.get(STOP).decode())
                elif late := self._late():
                    self._end(
                        tell(self.all, self._accuse(late, f"no answer in {late.what} for {self.meeting.timeout_s:g} s"))
                    )
            self._beat("ended")
        except RuntimeError as e:
            if not self.closing.is_set():
                self._end(self.meeting.store_gone(e))

    def _beat(self, state: str) -> None:
        self.beats += 1
        waits = bool(self.places)
        beat = {
            **self.me,
            "beats": self.beats,
            "state": state,
            "entered": self.entered,
            "what": self.last[0],
            "at": self.last[1],
            "waits": waits,
        }
        self.store.set(f"beat/{self.meeting.rank}", json.dumps(beat))

    def _late(self) -> PendingCollective | None:
        """The collective that has been under way for too long."""
        for place in list(self.places.values()):
            if place.done is not None and place.done():
                self.leave(place)
        oldest = next(iter(list(self.places.values())), None)
        return oldest if oldest and time.monotonic() - oldest.since > self.meeting.timeout_s else None

    def _end(self, reason: str) -> None:
        """Let the rank say it; if it does not, say it and end the process."""
        here = next(iter(list(self.places.values())), None)
        self.reason = reason
        self.reported.set()
        if self.closing.wait(GRACE_S):
            return
        sys.stderr.write(f"error: rank {self.meeting.rank} ends: {_placed(reason, here)}\n")
        sys.stderr.flush()
        os._exit(LOST)

    def _accuse(self, place: PendingCollective, what: str) -> str:
        """The whole message: what happened, to whom, who waits where, and what to try."""
        suspects = self._suspects(place)
        hint = "  try       a look at the log of that rank, or a longer MYCEL_TIMEOUT"
        return _placed(
            f"{what}: {'; '.join(suspects) or 'all ranks give signs of life'}\n{hint}",
            place,
            f"rank {self.meeting.rank} waits in ",
        )

    def _suspects(self, place: PendingCollective) -> list[str]:
        """What is wrong with each rank that the others may wait for."""
        others = [rank for rank in place.ranks if rank != self.meeting.rank]
        before = self._beats(others)
        time.sleep(3 * self.every_s)
        after = self._beats(others)
        states: dict[str, list[int]] = {}
        for rank in others:
            if state := self._state(before[rank], after[rank], place):
                states.setdefault(state, []).append(rank)
        return [f"{named(ranks)} {state}" for state, ranks in states.items()]

    def _beats(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        keys = {rank: f"beat/{rank}" for rank in ranks}
        there = [rank for rank, key in keys.items() if self.store.check([key])]
        return {rank: json.loads(self.store.get(keys[rank])) if rank in there else {} for rank in ranks}

    def _state(self, before: dict[str, Any], after: dict[str, Any], place: PendingCollective) -> str:
        """What a rank does instead of answering, in words; nothing if it waits as well."""
        if not after:
            return "has not started"
        where = f"{after['what']}" + (f", {after['at']}" if after["at"] else "") if after["what"] else ""
        last = f", last in {where}" if where else ""
        if after["state"] == "ended":
            return f"has ended{last}"
        process = _process(after["pid"]) if after["host"] == self.me["host"] else "?"
        if process == "":
            return f"is dead (process {after['pid']}){last}"
        if process in "Tt":
            return f"is stopped (process {after['pid']}, by SIGSTOP or a debugger){last}"
        if before.get("beats") == after["beats"]:
            return f"gives no sign of life (process {after['pid']} on {after['host'].split('/')[0]}){last}"
        if after["entered"] < place.number:
            return (
                f"has not come to it: it {'waits in' if after['waits'] else 'works after'} {where}"
                if where
                else "has not come to any collective"
            )
        return ""


def _placed(reason: str, place: PendingCollective | None, who: str = "in ") -> str:
    """The reason, with the line and the collective where this rank was when it was told."""
    if place is None or "\n  at " in reason:
        return reason
    what, end, rest = reason.partition("\n")
    return f"{what}\n  at        {place.at + ', ' if place.at else ''}{who}{place.what}{end}{rest}"


def _host() -> str:
    """This host, and this start of it: processes of the same name have the same process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = space = ""
    return f"{socket.gethostname()}/{boot}/{space}"


def _process(pid: int) -> str:
    """The state letter of a process of this host, "" if it is dead, ? if that cannot be known."""
    if not os.path.isdir("/proc/self"):
        return "?"
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return "?"
    return "" if letter in "ZX" else letter
