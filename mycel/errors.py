"""What can go wrong, and whose side it is on.

The user's side: `CaptureError` (code that cannot become a program), `TextError` (program text that does not parse),
`LoadError` (a saved program that is damaged), `PlanError`, `RunError`, `TrainError` and `CheckpointError` (the
trainer's).  Our side: `IRError`, an inconsistent program.

Every message says what, where in the user's code, and what to try.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parent) + os.sep


class MycelError(Exception):
    """The root of all errors Mycel raises on purpose."""


class IRError(MycelError):
    """A program that breaks the rules of the IR: a bug of Mycel's, unless the program was written by hand."""


class PlanError(MycelError):
    """No plan fits the program and the cluster."""


class GradientError(MycelError):
    """A gradient that does not exist: an operator without a rule, an integer input, an output that is not a scalar."""


class RunError(MycelError):
    """A program was run with inputs it was not made for."""


class TrainError(MycelError):
    """What a training run was given cannot be used: its configuration, data, model files."""


class CheckpointError(MycelError):
    """A checkpoint or run folder that is damaged, incomplete, in use, or cannot be written."""


class LoadError(MycelError):
    """A saved program is damaged, truncated or not one of ours."""


class TextError(MycelError):
    """Program text that does not parse: `line` and `column` are 1-based."""

    def __init__(self, what: str, line: int, column: int, source: str = "") -> None:
        self.line, self.column = line, column
        shown = f"\n  {source}\n  {' ' * (column - 1)}^" if source else ""
        super().__init__(f"line {line}, column {column}: {what}{shown}")


class CaptureError(MycelError):
    """User code that cannot be captured: what, the user's file, line and source text, and what to try.  `final`: nor
    can a call around it stay Python.  `chosen_at`: the line that chose rows by a mask, where that was tried without a
    shape that depends on values (`capture/rows.py`).  `shared`: the code writes a tensor of outside that shares memory
    with another (`capture/shared_memory.py`).  `changes_at`: the line that asked for the value of what the code itself
    changes, which no program can be made for.  `counters`: slots of numbers that the code changes at every call
    (`capture/counters.py`); `live`: of those what backward changes.  `grows`: a list has more items after each turn of
    a loop.  `added_to`: lists outside of the code that it adds to at every call, by id (`capture/kept_lists.py`);
    `looked_at`: one of these is read."""

    final = grows = looked_at = shared = False
    chosen_at = changes_at = ""
    counters: frozenset[tuple[int, object]] = frozenset()
    live: frozenset[tuple[int, object]] = frozenset()
    added_to: frozenset[int] = frozenset()

    def __init__(self, what: str, *, file: str = "", line: int = 0, text: str = "", hint: str = "") -> None:
        self.what, self.file, self.line, self.text, self.hint = what, file, line, text, hint
        parts = [what]
        if file:
            parts.append(f"  at        {file}:{line}")
        if text:
            parts.append(f"            {text}")
        if hint:
            parts.append(f"  try       {hint}")
        super().__init__("\n".join(parts))


class MisfitError(CaptureError, RuntimeError):
    """Operands that do not fit, for which torch raises a RuntimeError, too: code that catches that goes on."""


def warn(message: str) -> None:
    """A warning at the line of the user's code that called Mycel, however deep."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
