"""Where the ranks of a world meet: a store of keys and values at one address, which every rank can ask, and which
exists before any collective.

    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT       as torchrun and `mycel.launch` set them
    TORCHELASTIC_USE_AGENT_STORE=True                        whoever started the ranks holds the store;
                                                             otherwise rank 0 does

    stop               why all has to end: written once, by whoever sees it first
    run                the folder of the run, if it is one
    K/beat/RANK        of the K-th world that these processes make: where a rank is, written by its watch
    K/agree/N/…        the facts of the N-th agreement
    says/HOST/HASH     the rank that says, for all ranks of a host, an error that several come to
    speaker/RANK       that rank, once RANK has come to the error: itself, or another that it leaves it to

A world at a loopback address listens on loopback only: the store's socket is bound to the address by which it is known,
and the messages of a rank leave from the address by which it reaches the store.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import ipaddress
import json
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist

from mycel.errors import RunError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DIFFERENCE_LINES = 12
STOP = "stop"
RUN = "run"  # the folder of a run, for whoever started its ranks
GOODBYE_S = 20.0  # how long a rank that is refused waits for others to read why
SPOKEN_WITHIN_S = 5.0  # an error that another rank says; longer, and this rank says it too
SILENT_S = 10.0  # a rank that waits longer for the first contact says so
LOOKED_AT_S = 1.0  # between two looks whether ranks that are waited for have ended
LATER_S = 60.0  # timeouts of torch and of the store come after that of the watch, which says more


def timeout_s() -> float:
    """How long a rank waits for another before it gives up: MYCEL_TIMEOUT."""
    text = os.environ.get("MYCEL_TIMEOUT", "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e8:
        raise RunError(f"MYCEL_TIMEOUT is {text!r}\n  try       a number of seconds, such as 600")
    return seconds


def serve(server: socket.socket, host: str) -> dist.Store:
    """The store at a socket, for as long as the result lives in this process."""
    port = server.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    return _prefixed(store)


def connect(host: str, port: int, within_s: float) -> dist.Store:
    """One more connection to a store; its calls block, so each thread needs its own."""
    _wait_for_listener(host, port, within_s)
    return _prefixed(
        dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=within_s))
    )


def _wait_for_listener(host: str, port: int, within_s: float) -> None:
    """Try an address until something listens there; TimeoutError with the last cause if nothing does.  In Python: torch
    sleeps up to minutes between two tries, and cannot be interrupted."""
    start = time.monotonic()
    silent, pause_s = True, 0.02
    while True:
        left_s = within_s - (time.monotonic() - start)
        try:
            socket.create_connection((host, port), min(max(left_s, 0.1), 5.0)).close()
            return
        except OSError as e:
            if left_s <= 0:
                raise TimeoutError(f"{e.strerror or e}") from None
        if silent and time.monotonic() - start > SILENT_S:
            silent = False
            print(f"waiting for {_holder()} at {host}:{port}, {within_s:g} s at most", file=sys.stderr, flush=True)
        time.sleep(min(pause_s, max(left_s, 0.0)))
        pause_s = min(pause_s * 1.5, 0.5)


def _holder() -> str:
    """Who has the store, for people."""
    return "the process that starts the ranks" if _held_by_agent() else "rank 0"


def _held_by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def tell(store: dist.Store, why: str) -> str:
    """End the world; the first reason stays, and is what this returns."""
    return store.compare_set(STOP, "", why).decode()


def say_once(error: Exception, say: Callable[[], None]) -> None:
    """Say an error, unless another rank of this host comes to the same and says it.  Whoever leaves it to another ends
    later: at the first exit, torchrun ends all."""
    try:
        place = seat()
        if place.hosting and Rendezvous.held is None:
            Rendezvous.held = _held(place)
        store = connect(place.host, place.port, SPOKEN_WITHIN_S)
        text = hashlib.sha256(f"{type(error).__name__} {error}".encode()).hexdigest()
        key = f"says/{os.environ.get('GROUP_RANK', '0')}/{text}"
        speaker = int(store.compare_set(key, "", str(place.rank)))
    except (OSError, dist.DistError, RunError):  # nobody to ask
        say()
        return
    if speaker == place.rank:
        say()
    with suppress(dist.DistError):
        if speaker == place.rank:
            store.set(f"{key}/said", "")
        elif not _comes_true(lambda: store.check([f"{key}/said"])):
            say()
            speaker = place.rank
        store.set(speaker_key(place.rank), str(speaker))
        store.add(f"{key}/heard", 1)
        if place.hosting:
            _comes_true(lambda: store.add(f"{key}/heard", 0) >= place.world)


def from_first(make: Callable[[], str]) -> str:
    """What rank 0 makes, on all ranks of this world, which need not have met before; all call this equally often."""
    place = seat()
    if place.world == 1:
        return make()
    meeting = Rendezvous(place)
    if place.rank == 0:
        text = make()
        meeting.store.set("first", text)
        return text
    return meeting._get(meeting.store, "first", "rank 0").decode()


def ranks_on_a_host() -> int:
    """Of this world, as whoever started its ranks says; where hosts differ, of parts of them that are all as large, and
    none of which lies on two; 0: that is not said.  The ranks of a host are numbered one behind the other."""
    place, said = seat(), os.environ.get("LOCAL_WORLD_SIZE", "")
    if place.world == 1:
        return 0
    meeting, keys = Rendezvous(place), [f"local/{rank}" for rank in range(place.world)]
    meeting.store.set(keys[place.rank], said if said.isdigit() else "0")
    missing = lambda: [rank for rank, key in enumerate(keys) if not meeting.store.check([key])]
    meeting.until(lambda: meeting.store.check(keys), "LOCAL_WORLD_SIZE of each rank", missing)
    largest = math.gcd(*(int(text) for text in meeting.store.multi_get(keys)))
    return math.gcd(place.world, largest) if largest else 0


def speaker_key(rank: int) -> str:
    """Where the store has who has said the error of this rank, if it ended with one that is said."""
    return f"speaker/{rank}"


def _comes_true(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + SPOKEN_WITHIN_S
    while not (true := what()) and time.monotonic() < end:
        time.sleep(0.02)
    return true


def is_loopback(host: str) -> bool:
    """Is it this machine, and nothing but this machine?"""
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in addresses)


@dataclass(frozen=True)
class Seat:
    """This process in its world, as the environment says; without a word there, it is alone."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    host: str = ""
    port: int = 0
    hosting: bool = False  # is the store in this process?


def seat() -> Seat:
    """Read the environment."""
    given = {name: os.environ.get(name, "") for name in VARIABLES}
    if not given["RANK"] and not given["WORLD_SIZE"]:
        return Seat()
    where = "at        the environment\n  try       mycel train --nproc N, or torchrun"
    if missing := [name for name, value in given.items() if not value]:
        raise RunError(f"RANK or WORLD_SIZE is set, but not {', '.join(missing)}\n  {where}")
    try:
        rank, world, port, local_rank = (
            int(given.get(name) or os.environ.get(name, "0"))
            for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK")
        )
    except ValueError as e:
        raise RunError(f"RANK, WORLD_SIZE, MASTER_PORT or LOCAL_RANK is no number: {e}\n  {where}") from e
    if not 0 < port < 2**16:
        raise RunError(f"MASTER_PORT is {port}\n  at        the environment\n  try       a port from 1024 to 65535")
    if not 0 <= rank < world:
        raise RunError(f"RANK is {rank}, but WORLD_SIZE is {world}\n  {where}")
    held = _held_by_agent() or dist.is_initialized()
    return Seat(rank, world, local_rank, given["MASTER_ADDR"], port, hosting=rank == 0 and not held)


def _held(seat: Seat) -> dist.Store:
    """The store of a world that nobody else holds it for."""
    family = socket.AF_INET6 if ":" in seat.host else socket.AF_INET
    return serve(socket.create_server((seat.host, seat.port), family=family, backlog=4096), seat.host)


def _cannot_listen(seat: Seat, error: Exception) -> RunError:
    """For the rank that should hold the store, at an address where it cannot."""
    used = getattr(error, "errno", None) == errno.EADDRINUSE
    cause = (getattr(error, "strerror", None) or str(error).splitlines()[0]).partition(" (while")[0]
    hint = "another MASTER_PORT, the same for all ranks" if used else "MASTER_ADDR: an address of this host"
    return RunError(
        f"rank {seat.rank} cannot listen at {seat.host}:{seat.port}: {cause}\n"
        f"  at        MASTER_ADDR, MASTER_PORT\n  try       {hint}"
    )


class Rendezvous:
    """A process at its seat, connected to the store; each has keys of its own, the same on all ranks that make as
    many."""

    count = 0
    held: dist.Store | None = None  # the store itself, where it is in this process: until the process ends

    def __init__(self, seat: Seat) -> None:
        Rendezvous.count += 1
        self.rank, self.world, self.host, self.port = seat.rank, seat.world, seat.host, seat.port
        self.name, self.hosting = str(Rendezvous.count), seat.hosting
        self.timeout_s = timeout_s()
        self.agreements = 0
        if seat.hosting and Rendezvous.held is None:
            try:
                Rendezvous.held = _held(seat)
            except (OSError, dist.DistError) as e:
                raise _cannot_listen(seat, e) from e
        try:
            self.all = self.connect()
        except TimeoutError as e:
            raise self._not_there(e) from e
        except (OSError, dist.DistError) as e:
            what = f"rank {self.rank} does not reach the store at {self.host}:{self.port}: {str(e).splitlines()[0]}"
            raise RunError(
                f"{what}\n  at        MASTER_ADDR, MASTER_PORT\n"
                "  try       the address of the host of rank 0, as all hosts see it"
            ) from e
        self.store = dist.PrefixStore(self.name, self.all)

    def _not_there(self, error: TimeoutError) -> RunError:
        """For a rank that has waited for the store."""
        what = f"{_holder()} was not at {self.host}:{self.port} after {self.timeout_s:g} s: {error}"
        start = "" if _held_by_agent() else "start rank 0 as well, with the same MASTER_ADDR and MASTER_PORT; "
        return RunError(
            f"{what}\n  at        rank {self.rank}, MASTER_ADDR and MASTER_PORT\n"
            f"  try       {start}an address that all hosts reach; a longer MYCEL_TIMEOUT"
        )

    def connect(self) -> dist.Store:
        """A connection of its own, for another thread."""
        return connect(self.host, self.port, self.timeout_s)

    def under(self, key: str) -> dist.Store:
        """The store, where all keys begin with this one."""
        return dist.PrefixStore(key, self.store)

    @property
    def address(self) -> str:
        """The address by which this host reaches the store: others reach it by that too."""
        addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)
        # all ranks have to speak the same
        family, kind, _, _, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # nothing is sent: it only asks for the route
            return str(probe.getsockname()[0])

    def promised(self, what: str, amount: int) -> int:
        """How much of something on this host its ranks have said they take, with what this one adds now."""
        return int(self.store.add(f"promised/{what}/{socket.gethostname()}", amount))

    def agree(self, facts: Mapping[str, str]) -> None:
        """Refuse, on all ranks, a world whose ranks have different facts: name -> text."""
        self.agreements += 1
        store = self.under(f"agree/{self.agreements}")
        try:
            verdict = self._agreed(store, facts)
        except dist.DistError as e:
            raise RunError(self.store_gone(e)) from e
        if verdict:
            self._told(store)
            raise RunError(verdict)

    def _agreed(self, store: dist.Store, facts: Mapping[str, str]) -> str:
        """What rank 0 says of the facts of all, once all have come."""
        if self.rank:
            store.set(f"difference/{self.rank}", difference(json.loads(self._get(store, "facts", "rank 0")), facts))
            return self._get(store, "verdict", "rank 0, or one it waits for").decode()
        store.set("facts", json.dumps(dict(facts)))
        verdict = self._verdict(store)
        store.set("verdict", verdict)
        return verdict

    def store_gone(self, error: Exception) -> str:
        """For a rank that no longer reaches the store."""
        store = f"the store at {self.host}:{self.port} does not answer: {str(error).splitlines()[0]}"
        return f"{store}\n  try       a look at what started rank 0: it has ended"

    def meet(self, place: str, count: int, what: str = "", ranks: Sequence[int] = ()) -> None:
        """Wait until so many ranks have come to a place, once; `ranks`: which they are, `what`: the place in words."""
        self.store.add(place, 1)
        come = lambda: self.store.add(place, 0) >= count
        self.until(come, what or place, within_s=self.timeout_s + LATER_S, awaited=lambda: [*ranks])

    def name_run(self, folder: Path) -> None:
        """Tell whoever started the ranks where their results are."""
        with suppress(dist.DistError):
            self.all.set(RUN, str(folder.absolute()))

    def has_said(self) -> None:
        """What this rank is about to end with is said by rank 0, on the console."""
        with suppress(dist.DistError):
            self.all.set(speaker_key(self.rank), "0")

    def fail(self, error: Exception) -> None:
        """End the world because of an error of this rank."""
        lines = str(error).splitlines()
        with suppress(dist.DistError):
            tell(
                self.all,
                (
                    f"rank {self.rank} failed: {type(error).__name__}{': ' + lines[0] if lines else ''}\n"
                    "  try       a look at its log"
                ),
            )

    def leave(self) -> None:
        """Go; whoever holds the store waits for all to have gone."""
        keys = {rank: f"left/{rank}" for rank in range(self.world)}
        with suppress(dist.DistError):
            self.store.set(keys[self.rank], "")
            if self.hosting:
                ended = lambda: self.store.check([*keys.values()]) or self.all.check([STOP])
                missing = lambda: [rank for rank, key in keys.items() if not self.store.check([key])]
                self.until(ended, "the end", missing)

    def _told(self, store: dist.Store) -> None:
        """Nobody ends by a refusal until all have read it, or are taking too long: whoever ends tells the others to end
        as well, by an error that says less, and with the holder of the store goes the store."""
        end = time.monotonic() + GOODBYE_S
        with suppress(dist.DistError):
            store.add("told", 1)
            all_are = lambda: store.add("told", 0) >= self.world or self.all.check([STOP])
            self._until(lambda: all_are() or time.monotonic() > end, "the end")

    def _verdict(self, store: dist.Store) -> str:
        """What all ranks are to be told; nothing when they agree."""
        ranks: dict[str, list[int]] = {}
        for rank in range(1, self.world):
            text = self._get(store, f"difference/{rank}", f"rank {rank}").decode()
            ranks.setdefault(text, []).append(rank)
        ranks.pop("", None)
        differences = [text.replace("RANKS", named(group)) for text, group in ranks.items()]
        hint = [
            "  at        before the first collective",
            "  try       the same files, settings and packages for all ranks",
        ]
        return "\n".join([*differences, *hint]) if differences else ""

    def _get(self, store: dist.Store, key: str, whose: str) -> bytes:
        self._until(lambda: store.check([key]), whose)
        return store.get(key)

    def _until(self, true: Callable[[], bool], what: str) -> None:
        """Wait for what the watch sees too, and says more about: it has the first word."""
        self.until(true, what, within_s=self.timeout_s + LATER_S)

    def until(
        self,
        true: Callable[[], bool],
        what: str,
        missing: Callable[[], list[int]] = list,
        within_s: float | None = None,
        world: dist.Store | None = None,
        awaited: Callable[[], list[int]] = list,
    ) -> None:
        """Ask again and again, in Python: a call that blocks in the store could not be interrupted.  RunError when the
        world ends, once one of the ranks that are `awaited` has ended, or at the timeout, with the ranks that are
        `missing`.  `world`: the connection of this thread."""
        world, limit_s = world or self.all, within_s or self.timeout_s
        end, pause_s, looks_at = time.monotonic() + limit_s, 0.001, time.monotonic() + LOOKED_AT_S
        while not true():
            now = time.monotonic()
            if world.check([STOP]):
                raise RunError(world.get(STOP).decode())
            if now > looks_at:
                looks_at = now + LOOKED_AT_S
                if (gone := self._left(awaited(), world)) and not true():
                    raise RunError(tell(world, _alone(self.rank, what, gone)))
            if now > end:
                absent = self._absent(missing(), world)
                raise RunError(
                    f"rank {self.rank} waited {limit_s:g} s for {what} in vain{': ' * bool(absent)}{absent}\n"
                    "  try       a look at the logs of the others, or a longer MYCEL_TIMEOUT"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)

    def _left(self, ranks: Sequence[int], world: dist.Store) -> list[int]:
        """Which of them have ended, with no error."""
        own = dist.PrefixStore(self.name, world)
        return [rank for rank in ranks if own.check([f"left/{rank}"])]

    def _absent(self, ranks: list[int], world: dist.Store) -> str:
        """Of ranks that are waited for: which have never been there, and which have not come this far."""
        beats = dist.PrefixStore(self.name, world)
        started = [rank for rank in ranks if beats.check([f"beat/{rank}"])]
        never = [rank for rank in ranks if rank not in started]
        groups = ((never, "not started"), (started, "not come to it"))
        return "; ".join(f"{named(group)} {_has(group)} {what}" for group, what in groups if group)


def _alone(rank: int, what: str, gone: list[int]) -> str:
    """Why all has to end, where one waits for ranks that are done."""
    hint = "  try       all ranks call the same, in the same order"
    return f"rank {rank} waits in {what}, which {named(gone)} {_has(gone)} ended without\n{hint}"


def _has(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """What facts of rank 0 other ranks see differently, as a short diff for each; nothing when they are the same."""
    report = []
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name, ""), theirs.get(name, "")
        if a != b:
            lines = list(difflib.unified_diff(a.splitlines(), b.splitlines(), lineterm="", n=0))[2:]
            lines = [line for line in lines if not line.startswith("@@")] or [f"-{a!r}", f"+{b!r}"]
            more = [f"  … and {len(lines) - DIFFERENCE_LINES} lines more"] if len(lines) > DIFFERENCE_LINES else []
            shown = [f"  {line[:150]}" for line in lines[:DIFFERENCE_LINES]]
            report += [f"{name} is not the same on all ranks: - on rank 0, + on RANKS", *shown, *more]
    return "\n".join(report)


def named(ranks: list[int]) -> str:
    """[1, 2, 3, 7] -> ranks 1-3, 7"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def code_version(root: Path = Path(__file__).parents[1]) -> str:
    """A hash of Mycel's own source files."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(source)}\0".encode() + source)
    return digest.hexdigest()[:16]


def _prefixed(store: dist.Store) -> dist.Store:
    """Keys of this start of the world: torchrun starts it again with the same store."""
    return dist.PrefixStore(f"mycel/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
