"""What goes on before the first step: a spinner with words on a terminal; elsewhere a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.status import Status

from mycel.train.progress import Progress, percent

EVERY_S = 10.0  # a plain line about the same work


class Waiting:
    """Says what is being done, until it is left."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._status: Status | None = None
        self._said = ("", 0.0)  # what, and when

    def say(self, what: str, done: int = 0, total: int = 0) -> None:
        """`tokenising`, 3, 10 => tokenising 30%."""
        if self._status is not None:
            self._status.update(f"{what} {percent(done / total)}" if total else what)
        elif what != self._said[0] or time.monotonic() > self._said[1] + EVERY_S:
            self._said = (what, time.monotonic())
            self._progress.note(f"{what} {percent(done / total)}" if done < total else what)

    @contextmanager
    def shown(self, what: str) -> Iterator[None]:
        """Inside, a terminal shows that it is being done."""
        if self._progress.plain:
            yield
            return
        with Status(what, console=self._progress.console) as self._status:
            try:
                yield
            finally:
                self._status = None
