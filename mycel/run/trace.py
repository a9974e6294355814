"""When a rank was in which block of its program, and at which message: the trace of one step, as people read it in
Perfetto.

    with recording(code, program, device) as spans:     the functions of the blocks that the entry calls, and all
        code(*inputs)                                   messages, are timed while this lasts; behind it nothing is
    chrome_trace({"rank 0": spans, …})                  text for ui.perfetto.dev or chrome://tracing

Times are those of the device: on a GPU events are recorded on its stream, and read once the step has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mycel.ir import OPS, Program, call, scan
from mycel.run.emit import function_names

STEP = "step"  # the span of all of it


@dataclass(frozen=True)
class Span:
    """One run of a block: the how manieth it is in its step, and when, in seconds since 1970; or how long a rank was at
    a message, its beginning or its end, `over` such axes: the block is then the collective."""

    block: str
    call: int
    start_s: float
    end_s: float
    over: str = ""

    @property
    def name(self) -> str:
        return f"{self.block} over {self.over}" if self.over else self.block

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def data(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def recording(code: Callable[..., Any], program: Program, device: torch.device) -> Iterator[list[Span]]:
    """Inside, each run of a block that the entry calls and each message is entered into the result, and at the end the
    whole."""
    recorder, spans = _Recorder(device), list[Span]()
    functions = getattr(code, "main", code).__globals__
    names = function_names(program)
    own = {names[block]: (block, functions[names[block]]) for block in _called(program) if names[block] in functions}
    timed = {name: recorder.timed(block, "", function) for name, (block, function) in own.items()}
    before = {name: functions[name] for name in (*own, *(["ranks"] if "ranks" in functions else []))}
    functions.update(timed | ({"ranks": _TimedMessages(functions["ranks"], recorder)} if "ranks" in functions else {}))
    try:
        recorder.begin(STEP)
        yield spans
        recorder.end()
    finally:
        functions.update(before)
    spans += recorder.spans()


def _called(program: Program) -> list[str]:
    """Blocks that the entry calls, and those that the bodies of its scans call."""
    bodies = [program.main, *(program.blocks[str(r)] for e in program.main.eqns if e.op is scan for r in e.refs)]
    return list(dict.fromkeys(str(e.params["block"]) for block in bodies for e in block.eqns if e.op is call))


Timed = tuple[str, str]  # a block, or a collective and the axes that it is over


class _TimedMessages:
    """The functions by which code speaks to other ranks, those that send or wait timed."""

    def __init__(self, functions: Any, recorder: _Recorder) -> None:
        self._functions, self._recorder = functions, recorder
        self._begun: dict[int, Timed] = {}  # by the id of what `begin` gave, which is held until its end

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        if name == "begin":
            return self._begin
        if name in ("finish", "finish_into"):
            return lambda *args, **how: self._run(self._begun[id(args[name == "finish_into"])], function, args, how)
        if name in OPS and OPS[name].collective is not None:
            return lambda *args, **how: self._run((name, ".".join(how["axes"])), function, args, how)
        return function

    def _begin(self, *args: Any, **how: Any) -> Any:
        what = how["op"], ".".join(how["axes"])
        token = self._run(what, self._functions.begin, args, how)
        self._begun[id(token)] = what
        return token

    def _run(self, what: Timed, function: Callable[..., Any], args: Sequence[Any], how: Mapping[str, Any]) -> Any:
        return self._recorder.timed(*what, function)(*args, **how)


@dataclass
class _Recorder:
    """Marks on the clock of a device."""

    device: torch.device
    marks: list[tuple[Timed, int, Any, Any]] = field(default_factory=list)  # which call of what, start, end
    counts: dict[Timed, int] = field(default_factory=dict)
    _open: list[tuple[Timed, int, Any]] = field(default_factory=list)
    _zero: tuple[float, Any] = (0.0, None)

    def begin(self, block: str, over: str = "") -> None:
        if not self._open:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._zero = time.time(), self._mark()
        what = block, over
        self.counts[what] = self.counts.get(what, -1) + 1
        self._open.append((what, self.counts[what], self._mark()))

    def end(self) -> None:
        self.marks.append((*self._open.pop(), self._mark()))

    def timed(self, block: str, over: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **how: Any) -> Any:
            self.begin(block, over)
            try:
                return function(*args, **how)
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
        times = [(*what, n, self._seconds(start), self._seconds(end)) for what, n, start, end in self.marks]
        spans = [Span(block, n, start, end, over) for block, over, n, start, end in times]
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
            name = s.name if s.block == STEP else f"{s.name}.{s.call}"
            where = {"ts": (s.start_s - first) * 1e6, "dur": (s.end_s - s.start_s) * 1e6, "pid": pid, "tid": 0}
            kind = s.block.split("_")[0]
            events.append({"name": name, "cat": kind, "ph": "X", **where, "args": {"call": s.call}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
