"""When a rank was in which block of its program: the trace of one step, as people read it in Perfetto.

    with recording(code, program, device) as spans:     the functions of the blocks that the entry calls are timed
        code(*inputs)                                   while this lasts, and are as they were behind it
    chrome_trace({"rank 0": spans, …})                  text for ui.perfetto.dev or chrome://tracing

Times are those of the device: on a GPU events are recorded on its stream, and read once the step has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mycel.ir import Program, call, scan
from mycel.run.emit import function_names

STEP = "step"  # the span of all of it


@dataclass(frozen=True)
class Span:
    """One run of a block: the how manieth it is in its step, and when, in seconds since 1970."""

    block: str
    call: int
    start_s: float
    end_s: float

    def data(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def recording(code: Callable[..., Any], program: Program, device: torch.device) -> Iterator[list[Span]]:
    """Inside, each run of a block that the entry calls is entered into the result, and at the end the whole."""
    recorder, spans, functions = _Recorder(device), list[Span](), code.__globals__  # type: ignore[attr-defined]
    names = function_names(program)
    own = {names[block]: (block, functions[names[block]]) for block in _called(program) if names[block] in functions}
    functions.update({name: recorder.timed(block, function) for name, (block, function) in own.items()})
    try:
        recorder.begin(STEP)
        yield spans
        recorder.end()
    finally:
        functions.update({name: function for name, (_, function) in own.items()})
    spans += recorder.spans()


def _called(program: Program) -> list[str]:
    """Blocks that the entry calls, and those that the bodies of its scans call."""
    bodies = [program.main, *(program.blocks[str(r)] for e in program.main.eqns if e.op is scan for r in e.refs)]
    return list(dict.fromkeys(str(e.params["block"]) for block in bodies for e in block.eqns if e.op is call))


@dataclass
class _Recorder:
    """Marks on the clock of a device."""

    device: torch.device
    marks: list[tuple[str, int, Any, Any]] = field(default_factory=list)  # block, which call, start, end
    counts: dict[str, int] = field(default_factory=dict)
    _open: list[tuple[str, int, Any]] = field(default_factory=list)
    _zero: tuple[float, Any] = (0.0, None)

    def begin(self, block: str) -> None:
        if not self._open:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._zero = time.time(), self._mark()
        self.counts[block] = self.counts.get(block, -1) + 1
        self._open.append((block, self.counts[block], self._mark()))

    def end(self) -> None:
        self.marks.append((*self._open.pop(), self._mark()))

    def timed(self, block: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.begin(block)
            try:
                return function(*args)
            finally:
                self.end()

        return run

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _seconds(self, mark: Any) -> float:
        began, zero = self._zero
        if self.device.type != "cuda":
            return float(began + mark - zero)
        return float(began + zero.elapsed_time(mark) * 1e-3)

    def spans(self) -> list[Span]:
        """In the order in which they began."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spans = [Span(block, n, self._seconds(start), self._seconds(end)) for block, n, start, end in self.marks]
        return sorted(spans, key=lambda s: (s.start_s, -s.end_s))


def chrome_trace(rows: Mapping[str, Iterable[Span]]) -> str:
    """Spans by the name of their row, as Chrome and Perfetto read them; times from the first of all."""
    spans = {row: list(each) for row, each in rows.items()}
    first = min((s.start_s for each in spans.values() for s in each), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (row, each) in enumerate(spans.items()):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": row}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        for s in each:
            name = s.block if s.block == STEP else f"{s.block}.{s.call}"
            where = {"ts": (s.start_s - first) * 1e6, "dur": (s.end_s - s.start_s) * 1e6, "pid": pid, "tid": 0}
            kind = s.block.split("_")[0]
            events.append({"name": name, "cat": kind, "ph": "X", **where, "args": {"call": s.call}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
