"""Asked to stop: Ctrl-C (SIGINT), SIGTERM and SIGHUP, each with the exit code a shell gives it, 128 + its number.

    outside the loop           Interrupted is raised at once
    in the loop (`patiently`)  the first one is noted, and the loop stops after its step;  a second Ctrl-C raises
                               Interrupted at once

What is ignored when the run starts (by nohup, by a shell for its background jobs) stays ignored.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal ended the run where it was."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


class Signals:
    """Notices signals while it is entered; `asked` is the first one that came in the loop."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._on_first: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other thread may, and none is interrupted
            found = {each: signal.getsignal(each) for each in SIGNALS}
            self._before = {each: before for each, before in found.items() if before not in (signal.SIG_IGN, None)}
        for each in self._before:
            signal.signal(each, self._notice)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    @contextmanager
    def patiently(self, on_first: Callable[[], None]) -> Iterator[None]:
        """Inside, the first signal only calls `on_first`: whoever runs there looks at `asked`."""
        self._on_first = on_first
        try:
            yield
        finally:
            self._on_first = None

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if self._on_first is None:
            raise Interrupted(number)
        if self.asked is None:
            self.asked = signal.Signals(number)
            self._on_first()
        elif number == signal.SIGINT:  # the others come from programs, which may repeat themselves
            raise Interrupted(number)
