"""A thread in each rank that sees the others fail: what blocks in a collective can neither be interrupted nor ask.

    a rank dies         whoever started it writes why to the store (`stop`); all others find it there within a second
    a rank is stopped   the others, who wait for it in a collective, say so at the timeout, and write it to the store
    the store is gone   whoever held it has died
    ranks wait for      they are at different places of their programs: each says so within seconds
    each other          (`crossed_waits.py`)

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
from mycel.run.crossed_waits import Beat, Turn, crossed, debts, described
from mycel.run.rendezvous import STOP, Rendezvous, named, tell

LOST = 71  # exit code of a rank that ends because of another
GRACE_S = 1.5
EVERY_S = 0.4
TOLD_WITHIN_S = 3.0  # of a death, by whoever started the rank, if that knows of the store
HELD_S = 1.0  # a wait that is longer makes a rank look where others are
LOOKED_AT = 3e-5  # seconds between two looks for each pair of ranks: one store tells all of them of all


@dataclass
class PendingCollective:
    """A collective that this rank is in: the n-th of its run, and the user's line it was written for.  `turns`: what
    of others it waits for; `collective`: its name, where all are in the same one; `held_since`: when this rank began
    to do nothing else."""

    number: int
    what: str
    at: str
    ranks: tuple[int, ...]
    turns: tuple[Turn, ...] = ()
    collective: str = ""
    held_since: float | None = None
    since: float = field(default_factory=time.monotonic)
    done: Callable[[], bool] | None = None  # where leaving the call does not mean that the messages have come

    def hold(self) -> None:
        """This rank waits for it now."""
        self.held_since = time.monotonic()


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
        self.begun: dict[str, int] = {}  # of each kind of messages, how many
        self.doing: Callable[[], str] = str  # what this rank does, in words
        self.others: dict[int, Beat] = {}  # where all were at the last look, if this rank is held
        self.crossed: dict[int, tuple[Beat, list[int]]] = {}  # who waited for each other then
        self.looks_at = 0.0
        self.me = {"pid": os.getpid(), "host": _host()}
        self._beat("works")
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.thread.start()

    def begin(self, kind: str, ranks: Iterable[int], count: int = 1) -> Turn:
        """So many more messages of a kind between these ranks, which all of them begin in the same order."""
        self.begun[kind] = self.begun.get(kind, 0) + count
        return Turn(kind, self.begun[kind], tuple(ranks))

    def enter(
        self, what: str, at: str, ranks: Iterable[int], turns: Iterable[Turn], collective: str = ""
    ) -> PendingCollective:
        """This rank is in a collective now; refused when the world has to end."""
        if self.reason:
            raise RunError(self.reason)
        self.entered += 1
        self.last = (what, at)
        place = PendingCollective(self.entered, what, at, tuple(ranks), tuple(turns), collective)
        self.places[self.entered] = place
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
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"{place.what} failed: {cause}"
            with suppress(RuntimeError):  # the store may be gone as well
                reason = tell(self.all, self._accuse(place, f"{place.what} failed", cause))
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
                elif reason := self._crossed():
                    self._end(tell(self.all, reason))
            self._beat("ended")
        except RuntimeError as e:
            if not self.closing.is_set():
                self._end(self.meeting.store_gone(e))

    def _beat(self, state: str) -> None:
        self.beats += 1
        waits, held = bool(self.places), self._held()
        beat = {
            **self.me,
            "beats": self.beats,
            "state": state,
            "entered": self.entered,
            "what": self.last[0],
            "at": self.last[1],
            "waits": waits,
            "held": [
                {"number": p.number, "what": p.what, "at": p.at, "collective": p.collective, "turns": p.turns}
                for p in held
            ],
            "owes": debts(self.others, self.meeting.rank, self.begun) if held else {},
            "doing": self.doing(),
        }
        self.store.set(f"beat/{self.meeting.rank}", json.dumps(beat))

    def _late(self) -> PendingCollective | None:
        """The collective that has been under way for too long."""
        for place in list(self.places.values()):
            if place.done is not None and place.done():
                self.leave(place)
        oldest = next(iter(list(self.places.values())), None)
        return oldest if oldest and time.monotonic() - oldest.since > self.meeting.timeout_s else None

    def _held(self) -> list[PendingCollective]:
        """What this rank waits for: on a GPU, which comes to one after the other, the first and the last."""
        held = [place for place in list(self.places.values()) if place.held_since is not None]
        return held[:1] + held[1:][-1:]

    def _crossed(self) -> str:
        """Why all has to end, if ranks wait for each other in different places: nothing has moved between two looks."""
        now, held = time.monotonic(), self._held()
        if not held or now - (held[0].held_since or now) < HELD_S or self.meeting.world == 1:
            self.others, self.crossed = {}, {}
            return ""
        keys = [f"beat/{rank}" for rank in range(self.meeting.world)]
        if now < self.looks_at or not self.store.check(keys):
            return ""
        self.looks_at = now + LOOKED_AT * self.meeting.world**2
        self.others = dict(enumerate(map(json.loads, self.store.multi_get(keys))))
        ranks = crossed(self.others)
        numbers = {rank: [place["number"] for place in self.others[rank]["held"]] for rank in ranks}
        before, self.crossed = self.crossed, {rank: (self.others[rank], numbers[rank]) for rank in ranks}
        is_same = {rank: held for rank, (_, held) in before.items()} == numbers
        if not ranks or not is_same:
            return ""
        if any(before[rank][0]["beats"] == self.others[rank]["beats"] for rank in ranks):
            self.crossed = before
            return ""
        return (
            f"{named(ranks)} wait for each other in different places\n{described(self.others, ranks)}\n"
            "  try       all ranks call the same, in the same order; what their code reads changes on all of them"
        )

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

    def _accuse(self, place: PendingCollective, what: str, cause: str = "all ranks give signs of life") -> str:
        """The whole message: what happened, to whom (else the `cause`), who waits where, and what to try."""
        suspects = self._suspects(place)
        hint = "  try       a look at the log of that rank, or a longer MYCEL_TIMEOUT"
        return _placed(
            f"{what}: {'; '.join(suspects) or cause}\n{hint}",
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
