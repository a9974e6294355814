"""What a person sees of a run: on a terminal one live line, elsewhere one plain line for each report.

    step 120/500  ━━━━──────  24%  loss 2.4312  val 2.5510  12.3k tok/s  MFU 41.2%  9.1 GiB  lr 3.00e-04  0:42 left

A terminal too narrow for that gets two rows, and one narrower still the fields that matter most.  Plain lines hold what
that report brought and nothing older, so that a log can be searched.  Nothing here raises: odd numbers are shown as
they are, and if nobody can read any more (a closed pipe, a log file on a full disk) training goes on without words.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

GAP = "  "
BAR_LEAST, BAR_MOST = 6, 40
# Which fields go first where the row is too narrow for all.
DROPPED_FIRST = ("memory", "mfu", "lr", "validation", "tokens", "percent", "time", "skipped")


class Field(NamedTuple):
    """One thing shown: its name, its text, and the style of the text on a terminal."""

    name: str
    text: str
    style: str = ""


class Progress:
    """The display of one run from step `start` to `total_steps`; a context manager around the training loop."""

    def __init__(
        self,
        console: Console,
        total_steps: int,
        start: int = 0,
        plain: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        counted: str = "tokens",
    ) -> None:
        self.console, self.total, self.step = console, total_steps, start
        self.plain = not _lively(console) if plain is None else plain
        self._clock = clock
        self._counted = "tok" if counted == "tokens" else counted
        self._began_s = clock()
        self._reports: deque[tuple[float, int]] = deque(maxlen=64)  # when which step was done: the pace of the run
        self._fields: dict[str, Field] = {}
        self._two_rows_up_to = 0  # the widest terminal that one row was too long for: it does not jump to and fro
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if not self.plain:
            self._live = live = Live(console=self.console, get_renderable=self.rows, refresh_per_second=4)
            self._attempt(lambda: live.start(refresh=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._attempt(self._live.stop)
            self._live = None

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        validation: float | None = None,
        tokens_per_s: float | None = None,
        mfu: float | None = None,
        memory_bytes: float | None = None,
        lr: float | None = None,
        skipped: int | None = None,
    ) -> None:
        """Report that `step` steps are done, and what is known; a step alone moves the live line and prints no plain
        one."""
        self.step = step
        self._reports.append((self._clock(), step))
        fields = [
            Field("loss", f"loss {number(loss)}", "bold" if _finite(loss) else "bold red")
            if loss is not None
            else None,
            Field("validation", f"val {number(validation)}", "cyan" if _finite(validation) else "red")
            if validation is not None
            else None,
            Field("tokens", f"{count(tokens_per_s)} {self._counted}/s") if tokens_per_s is not None else None,
            Field("mfu", f"MFU {percent(mfu, 1)}") if mfu is not None else None,
            Field("memory", size(memory_bytes)) if memory_bytes is not None else None,
            Field("lr", f"lr {number(lr, '.2e')}", "bright_black") if lr is not None else None,
            Field("skipped", f"skipped {count(skipped)}", "yellow") if skipped else None,
        ]
        new = [field for field in fields if field is not None]
        self._fields.update({field.name: field for field in new})
        if self.plain and new:
            place = f"step {step:>{len(str(self.total))}}/{self.total}"
            self.note(
                GAP.join([place, f"{percent(self._share()):>4}", *(field.text for field in [*new, *self._time()])])
            )

    def stopping(self) -> None:
        """Say that the run ends after this step.  A signal calls this, in the middle of anything: nothing is printed
        the usual way."""
        text = "stopping after this step; Ctrl-C again: at once"
        self._fields["stopping"] = Field("stopping", text, "yellow")
        if self.plain and not self.console.quiet:
            with suppress(OSError):
                os.write(2, f"{text}\n".encode())

    def note(self, text: str) -> None:
        """Print a text on lines of its own, above the live line if there is one."""
        self._print(Text(self._writable(text)), soft_wrap=True)

    def summary(self, rows: Sequence[tuple[str, str]], title: str) -> None:
        """Print what will run: a title, and rows of what and which."""
        if self.plain:
            width = max((len(what) for what, _ in rows), default=0)
            self.note("\n".join([title, *(f"  {what:<{width}}  {which}".rstrip() for what, which in rows), ""]))
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for what, which in rows:
            table.add_row(Text(self._writable(f"  {what}")), Text(self._writable(which)))
        self._print(Group(Text(self._writable(title), style="bold"), table, Text("")))

    def left_s(self) -> float | None:
        """Seconds to the last step at the pace of the last reports (so without the first step, which compiles); None:
        not known yet."""
        if len(self._reports) < 2:
            return None
        (first_s, first), (last_s, last) = self._reports[0], self._reports[-1]
        if last <= first or last_s <= first_s:
            return None
        return max(0.0, (self.total - last) * (last_s - first_s) / (last - first) - (self._clock() - last_s))

    def rows(self) -> RenderableType:
        """The live line: in one row if all of it fits, and in two if not."""
        width = max(1, self.console.width)
        place = [Field("place", f"step {self.step}/{self.total}"), Field("percent", percent(self._share()))]
        measured = [
            self._fields[name]
            for name in ("loss", "validation", "tokens", "mfu", "memory", "lr")
            if name in self._fields
        ]
        if not self._reports:
            measured = [Field("waiting", f"first step, {duration(self._clock() - self._began_s)}", "bright_black")]
        notices = [self._fields[name] for name in ("skipped", "stopping") if name in self._fields]
        all_fields = [*place, *measured, *notices, *self._time()]
        if width > self._two_rows_up_to and _length(all_fields) + len(GAP) + BAR_LEAST <= width:
            return self._row(all_fields, width)
        self._two_rows_up_to = max(self._two_rows_up_to, width)
        return Group(self._row([*place, *self._time(), *notices], width), self._row(measured, width, bar=False))

    def _row(self, fields: list[Field], width: int, bar: bool = True) -> Text:
        """Fields in one row of at most `width` columns, with a bar after the first where there is room for one."""
        for name in DROPPED_FIRST:
            if _length(fields) > width:
                fields = [field for field in fields if field.name != name]
        row = Text(no_wrap=True, overflow="crop")
        room = min(BAR_MOST, width - _length(fields) - len(GAP))
        for i, field in enumerate(fields):
            row.append(GAP if i else "").append(field.text, field.style)
            if i == 0 and bar and room >= BAR_LEAST:
                done = round(self._share() * room)
                full, rest = ("━", "─") if self.console.encoding.startswith("utf") else ("#", "-")
                row.append(GAP).append(full * done, "green").append(rest * (room - done), "bright_black")
        row.truncate(width)
        return row

    def _time(self) -> list[Field]:
        """The time left; at the end the time taken; nothing while it is not known."""
        if self._reports and self.step >= self.total:
            return [Field("time", f"took {duration(self._reports[-1][0] - self._began_s)}")]
        left = self.left_s()
        return [] if left is None else [Field("time", f"{duration(left)} left")]

    def _share(self) -> float:
        """How much of the run is done, from 0 to 1."""
        return min(1.0, max(0.0, self.step / self.total)) if self.total > 0 else 1.0

    def _writable(self, text: str) -> str:
        """The text in letters that the console's encoding has."""
        return text.encode(self.console.encoding, "replace").decode(self.console.encoding)

    def _print(self, what: RenderableType, soft_wrap: bool = False) -> None:
        self._attempt(lambda: self.console.print(what, soft_wrap=soft_wrap, markup=False, highlight=False))

    def _attempt(self, show: Callable[[], None]) -> None:
        """Show something if there is still somebody to see it."""
        try:
            show()
        except (OSError, ValueError):
            pass
        except SystemExit:
            if not self.console.quiet:  # not rich, which on a closed pipe falls silent and leaves
                raise


def _lively(console: Console) -> bool:
    """Is this a terminal that can redraw a line, and does the user want that?"""
    return (
        console.is_terminal
        and not console.is_dumb_terminal
        and not console.is_jupyter
        and not os.environ.get("NO_COLOR")
    )


def _length(fields: Sequence[Field]) -> int:
    """Columns that the fields take in one row."""
    return sum(len(field.text) for field in fields) + len(GAP) * max(0, len(fields) - 1)


def _finite(value: Any) -> bool:
    return math.isfinite(_float(value))


def _float(value: Any) -> float:
    """Whatever is given, as a number; nan if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def number(value: Any, form: str = ".4f") -> str:
    """2.43118 => 2.4312, and what would be zeros or too long in that form => 3.1e-07."""
    value = _float(value)
    fits = not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e6
    return format(value, form if fits or form != ".4f" else ".3e")


def percent(share: Any, digits: int = 0) -> str:
    """0.24 => 24%."""
    return f"{100 * _float(share):.{digits}f}%"


def count(value: Any) -> str:
    """12345 => 12.3k."""
    value = _float(value)
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if math.isfinite(value) and abs(value) >= unit * 0.99995:
            return f"{value / unit:.1f}{letter}" if abs(value) < 1e16 else f"{value:.1e}"
    return f"{value:.0f}"


def size(value: Any) -> str:
    """Bytes => 9.1 GiB, 512 MiB, 12 KiB."""
    value = _float(value)
    if 0 < value < 2**20:
        return f"{value / 2**10:.0f} KiB"
    return f"{value / 2**30:.1f} GiB" if not abs(value) < 2**30 else f"{value / 2**20:.0f} MiB"


def duration(seconds: Any) -> str:
    """42 => 0:42, 3723 => 1:02:03, 100000 => 1d 03h; what is no time => ?."""
    seconds = _float(seconds)
    if not math.isfinite(seconds) or seconds < 0 or seconds > 1e9:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02d}h"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
