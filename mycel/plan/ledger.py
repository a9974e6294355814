"""What runs took against what was predicted of them, so that the next prediction is nearer, and says how far it may be
off.

    {"device": "H200", "ranks": 1, "predicted_s": 0.41, "measured_s": 0.44, "predicted_peak": …, "peak": …, "what": …,
     "steps": 200}

One line for each run, in a file of the user's, the newest last; with `parts`, what single blocks and collectives of one
step took. Runs on one device and on several are told apart: links
are predicted less well than kernels. `computing_s` and `waiting_s` are the prediction by the figures alone, and `basis`
which figures these were: how many times that runs took corrects the next prediction by the same figures, of a step
here; those of other devices, and of other figures of this one, say nothing of it. A run names its device as the driver
does, "NVIDIA H100 80GB HBM3", a cluster as its preset, "H100": both are one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from mycel.plan.hardware import Hardware, known_name
from mycel.sizes import counted, span

BLOCK = "block"  # a kind of part
LAST = 50  # runs that count
ENOUGH = 3  # runs from which something can be said
SEEN_S = 1e-6  # of a part: what is predicted to take less is hidden, and has no ratio
STEADY = 5  # steps from which a run says what one takes
INSIDE = (10, 50, 90)  # percent
FAR = 5  # times, from which on a prediction has missed what runs take


@dataclass(frozen=True)
class PartTimes:
    """All runs of a block in one step of one rank, without their messages; or how long computing stayed at the messages
    of a kind, packing and waiting for other ranks included.  kind: BLOCK, or "all_reduce over network"."""

    kind: str
    name: str
    calls: int
    predicted_s: float  # by the figures alone, as `Measured.computing_s` is
    measured_s: float


@dataclass(frozen=True)
class Measured:
    """One run."""

    device: str
    ranks: int
    predicted_s: float
    measured_s: float
    predicted_peak: int
    peak: int
    what: str = ""
    steps: int | None = None  # that were measured; None: that was not written down
    computing_s: float = 0.0  # predicted by the figures of `basis` alone; 0: that was not written down
    waiting_s: float = 0.0
    basis: str = ""
    parts: tuple[PartTimes, ...] = ()  # where they are known

    @property
    def is_steady(self) -> bool:
        """Were enough steps measured to say what one takes?"""
        return self.steps is None or self.steps >= STEADY

    @property
    def ratio(self) -> float:
        return self.measured_s / self.predicted_s

    def __str__(self) -> str:
        """For people: 12.3 ms measured, 11.0 ms predicted (-11 %)"""
        error = self.predicted_s / self.measured_s - 1
        few = "" if self.is_steady else f"; of {self.steps} step{'s' * (self.steps != 1)}, which tell little"
        times = f"{span(self.measured_s)} measured, {span(self.predicted_s)} predicted"
        return f"{times} ({error:+.0%}){few}"


@dataclass(frozen=True)
class Correction:
    """How many times what figures say computing and waiting for messages took, in so many runs."""

    runs: int
    computing: float
    waiting: float

    def seconds(self, computing_s: float, waiting_s: float) -> float:
        return self.computing * computing_s + self.waiting * waiting_s

    def applied(self, hardware: Hardware) -> Hardware:
        """A device that computes, and whose wires are, so many times slower."""
        c, w = self.computing, self.waiting

        def slower(rows: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
            return tuple((work, speed / c) for work, speed in rows)

        levels = tuple(
            replace(
                level,
                bytes_s=level.bytes_s / w,
                start_s=level.start_s * w,
                measured=tuple((name, k, bytes_s / w, start_s * w) for name, k, bytes_s, start_s in level.measured),
            )
            for level in hardware.wires
        )
        return replace(
            hardware,
            half=hardware.half / c,
            single=hardware.single / c,
            quarter=hardware.quarter / c if hardware.quarter is not None else None,
            bytes_s=hardware.bytes_s / c,
            launch_s=hardware.launch_s * c,
            rates={name: slower(curve) for name, curve in hardware.rates.items()},
            levels=levels,
        )

    def before(self, computing_s: float, waiting_s: float) -> tuple[float, float]:
        """What the figures alone say, of what is predicted with them corrected."""
        return computing_s / self.computing, waiting_s / self.waiting

    def __str__(self) -> str:
        """For people: computing takes 1.20 times, messages 0.90 times what figures say, as in 7 runs here"""
        often = f"computing takes {self.computing:.2f} times, messages {self.waiting:.2f} times"
        if self.waiting == self.computing:
            often = f"computing and messages take {self.computing:.2f} times"
        return f"{often} what the figures say, as in {counted(self.runs, 'run')} here"


@dataclass(frozen=True)
class ErrorBars:
    """How many times what was predicted runs took: in eight of ten between `low` and `high`."""

    runs: int
    low: float
    middle: float
    high: float

    def expected(self, seconds: float) -> tuple[float, float, float]:
        return self.low * seconds, self.middle * seconds, self.high * seconds

    def __str__(self) -> str:
        """For people, behind "steps took": 1.10 times what was predicted (0.90 to 1.40) in 12 runs here"""
        if self.low > FAR or self.high < 1 / FAR:
            often = f"{self.middle:,.0f} times" if self.middle > 1 else f"{self.middle:.2g} of"
            why = "of steps so small, or on a machine so busy, a prediction says little"
            return f"{often} what was predicted in {self.runs} runs here: {why}"
        return (
            f"{self.middle:.2f} times what was predicted ({self.low:.2f} to {self.high:.2f}) in {self.runs} runs here"
        )


def ledger_path() -> Path | None:
    """Where runs are written down; None: nowhere."""
    given = os.environ.get("MYCEL_LEDGER")
    if given is not None:
        return Path(given).expanduser() if given else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mycel" / "ledger.jsonl"


def write_down(run: Measured) -> None:
    """Add a run, unless it was too short to tell; a file that cannot be written is no reason to fail."""
    path = ledger_path()
    if path is None or min(run.predicted_s, run.measured_s) <= 0 or not run.is_steady:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(asdict(run)) + "\n")


def written_down() -> list[Measured]:
    """All runs, the newest last; lines that cannot be read are left out."""
    path = ledger_path()
    if path is None or not path.is_file():
        return []
    runs = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            said = json.loads(line)
            run = Measured(**{**said, "parts": tuple(PartTimes(**part) for part in said.get("parts", ()))})
            if run.predicted_s > 0 and run.measured_s > 0:
                runs.append(run)
    return runs


def basis_of(hardware: Hardware) -> str:
    """A name for the figures of a device, without its wires."""
    return hashlib.sha256(repr(replace(hardware, levels=())).encode()).hexdigest()[:12]


def is_corrected() -> bool:
    """May predictions be corrected?  MYCEL_UNCORRECTED, of anything: no."""
    return not os.environ.get("MYCEL_UNCORRECTED")


def correction(device: str, ranks: int, basis: str) -> Correction | None:
    """What runs of as many ranks on such a device, predicted by the same figures, took; the middle of them, and no more
    than `FAR`: what is further off is no matter of rates.  Several ranks are told apart by their waiting where a rank
    alone has run."""
    runs = [run for run in _of_device(device) if run.basis == basis and run.computing_s > 0][-LAST:]
    mine = [run for run in runs if run.ranks == ranks]
    if not mine or not is_corrected():
        return None
    alone = [run for run in runs if run.ranks == 1] if ranks > 1 else []
    if not alone:
        both = _middle([run.measured_s / (run.computing_s + run.waiting_s) for run in mine])
        return Correction(len(mine), both, both)
    computing = _middle([run.measured_s / run.computing_s for run in alone])
    left = [(run.measured_s - computing * run.computing_s, run.waiting_s) for run in mine]
    seen = [seconds / waiting_s for seconds, waiting_s in left if waiting_s > 0]
    return Correction(len(mine), computing, _middle(seen) if seen else 1.0)


def _middle(ratios: Sequence[float]) -> float:
    return min(max(median(ratios), 1 / FAR), FAR)


def _of_device(device: str) -> list[Measured]:
    name = known_name(device) or device
    return [run for run in written_down() if (known_name(run.device) or run.device) == name]


def error_bars(device: str, ranks: int, by: Correction | None = None, basis: str = "") -> ErrorBars | None:
    """Of a device, alone or among several; None where too little was seen.  `by`: of predictions that are corrected so,
    where they rest on such figures."""
    runs = [run for run in _of_device(device) if (run.ranks > 1) == (ranks > 1)]
    if by is None:
        alike = [run.ratio for run in runs][-LAST:]
    else:
        mine = [run for run in runs if run.basis == basis and run.computing_s > 0]
        alike = [run.measured_s / by.seconds(run.computing_s, run.waiting_s) for run in mine][-LAST:]
    if len(alike) < ENOUGH:
        return None
    return _bars(len(alike), alike)


def part_bars(device: str, ranks: int, kind: str, by: Correction | None = None, basis: str = "") -> ErrorBars | None:
    """The same of blocks, or of a collective over a level of links; where too few runs had that level, over any."""
    runs = [run for run in _of_device(device) if (run.ranks > 1) == (ranks > 1)]
    runs = [run for run in runs if run.parts and (by is None or run.basis == basis)][-LAST:]
    times = 1.0 if by is None else by.computing if kind == BLOCK else by.waiting
    for is_such in (lambda x: x == kind, lambda x: x.partition(" over ")[0] == kind.partition(" over ")[0]):
        seen = [[p for p in run.parts if is_such(p.kind) and p.predicted_s > SEEN_S] for run in runs]
        if (count := sum(map(bool, seen))) >= ENOUGH:
            return _bars(count, [p.measured_s / (p.predicted_s * times) for parts in seen for p in parts])
    return None


def _bars(runs: int, ratios: Sequence[float]) -> ErrorBars:
    low, middle, high = np.percentile(ratios, INSIDE)
    return ErrorBars(runs, float(low), float(middle), float(high))
