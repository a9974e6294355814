"""What a run measured, kept on disk: one JSON object a line in `metrics.jsonl`, and event files for TensorBoard.

    {"step": 10, "loss": 4.1873, "lr": 0.0003}
    {"step": 20, "loss": "nan", "lr": 0.0003}

Strict JSON: a number that JSON does not have is a string that `float` reads ("nan", "inf", "-inf"); `read` gives it
back as a number.  A resumed run first cuts off what it is going to write again, so that the file is that of a run
without interruption.  A file grows by whole records only, and a record never stops training: what a full disk refused
waits in memory and goes out with the next record.  Every other rank has a file of its own, `metrics-rank3.jsonl`.
"""

from __future__ import annotations

import io
import json
import math
import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FILE = "metrics.jsonl"
EVENTS = "tensorboard"
NOT_IN_JSON = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Value = float | int | str | bool | None


class Metrics:
    """The records of one run: `write(step, loss=…, …)` adds one; trouble is said once to `report` and training goes
    on."""

    def __init__(
        self,
        folder: Path,
        tensorboard: bool,
        resume_at: int | None,
        report: Callable[[str], None] = warnings.warn,
        rank: int = 0,
    ) -> None:
        self._report, self._reported = report, False
        file = folder / file_of(rank)
        self._records = RecordFile(file, self._refused)
        try:
            cut(file, resume_at)
        except OSError as error:
            report(
                f"metrics after step {resume_at} could not be cut off and stay in the file: {error.strerror}\n"
                f"  at        {file}"
            )
        self._events = self._open_events(folder / EVENTS, resume_at) if tensorboard else None

    def write(self, step: int, **values: Any) -> None:
        """Add one record, on disk on return; what is None is not known and left out; 0-d tensors and numpy numbers
        count as numbers."""
        known = {name: _number(value) for name, value in values.items() if value is not None}
        self._records.append(to_line({"step": step, **known}))
        if self._events is not None:
            self._events.write(step, known)

    def close(self) -> None:
        """Try once more to write what waits, and close the files."""
        for log in [self._records] if self._events is None else [self._records, self._events.log]:
            lost_bytes = log.close()
            if lost_bytes:
                self._report(
                    f"the last {lost_bytes} bytes of metrics could not be written and are lost\n  at        {log.path}"
                )

    def _refused(self, log: RecordFile, error: OSError) -> None:
        """Say the first time that a record could not be written."""
        if not self._reported:
            self._reported = True
            why = f"metrics wait in memory, as they cannot be written: {error.strerror}"
            self._report(
                f"{why}\n  at        {log.path}\n"
                "  try       make room there; training goes on, and they are written as soon as they can be"
            )

    def _open_events(self, folder: Path, resume_at: int | None) -> Events | None:
        """The event file; None, and a word about it, where TensorBoard is not installed or does not load."""
        try:
            return Events(folder, resume_at, self._refused)
        except Exception as error:  # a protobuf of another version raises what it likes
            hint = "pip install tensorboard, or log.tensorboard: false"
            self._report(
                f"no TensorBoard files will be written: {error}\n  at        log.tensorboard\n  try       {hint}"
            )
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def file_of(rank: int) -> str:
    """Every rank has a file of its own; the first has the run's."""
    return f"metrics-rank{rank}.jsonl" if rank else FILE


def read(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The records of a run in the order of writing; a torn or foreign line is passed over, no file is no records."""
    try:
        lines = (folder / file_of(rank)).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [record for line in lines if (record := from_line(line)) is not None]


def to_line(record: Mapping[str, Value]) -> bytes:
    """{"step": 3, "loss": nan} => b'{"step": 3, "loss": "nan"}\\n'."""
    finite = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(finite, allow_nan=False, default=str).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is not a whole record with a step."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return {name: NOT_IN_JSON.get(value, value) if isinstance(value, str) else value for name, value in record.items()}


def cut(path: Path, last: int | None) -> None:
    """Drop everything from the first record after step `last` on, and a torn end; one truncation, so atomic and
    possible on a full disk."""
    if not path.exists():
        return
    keep = at = 0
    with path.open("r+b") as file:
        for line in file:
            at += len(line)
            record = from_line(line)
            if record is None:
                continue
            if last is not None and record["step"] > last:
                break
            keep = at
        file.truncate(keep)


class RecordFile:
    """A file that grows by whole records: those it could not write wait, and go out in order with the next one."""

    def __init__(self, path: Path, refused: Callable[[RecordFile, OSError], None]) -> None:
        self.path, self._refused = path, refused
        self._file: int | None = None
        self._waiting = b""

    def append(self, record: bytes) -> None:
        """Write the records that wait and this one; if the disk refuses, keep them and tell `refused`."""
        self._waiting += record
        try:
            self._write()
        except OSError as error:
            self._refused(self, error)

    def _write(self) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        whole_bytes = os.fstat(self._file).st_size
        rest = memoryview(self._waiting)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BaseException:  # an interrupt too: half a record must not stay
            os.ftruncate(self._file, whole_bytes)
            raise
        self._waiting = b""

    def close(self) -> int:
        """Close the file, and say how many bytes could not be written to the end."""
        if self._waiting:
            self.append(b"")
        if self._file is not None:
            os.close(self._file)
            self._file = None
        return len(self._waiting)


class Events:
    """A TensorBoard event file, made of the format's own records.

    Not by torch's SummaryWriter: it writes in a thread of its own, which dies with a traceback when the disk is full.
    """

    def __init__(self, folder: Path, resume_at: int | None, refused: Callable[[RecordFile, OSError], None]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._writer = event_pb2.Event, summary_pb2.Summary, RecordWriter
        # The usual name; the count keeps the files of one second apart and in order.
        count = len(list(folder.glob("events.out.tfevents.*")))
        self.log = RecordFile(
            folder / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{count}",
            refused,
        )
        self._append(0, file_version="brain.Event:2")
        if resume_at is not None:  # tells TensorBoard to forget what earlier files say about the steps from here on
            self._append(resume_at + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Add the values that are numbers as scalars of one step."""
        scalars = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if isinstance(value, int | float)
        ]
        self._append(step, summary=self._summary(value=scalars))

    def _append(self, step: int, **content: Any) -> None:
        record = io.BytesIO()
        self._writer(record).write(self._event(wall_time=time.time(), step=step, **content).SerializeToString())
        self.log.append(record.getvalue())


def _number(value: Any) -> Value:
    """A 0-d tensor or numpy number => a Python number."""
    plain: Value = value.item() if hasattr(value, "item") else value
    return plain
