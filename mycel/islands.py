"""Islands, as users meet them: `mycel.island` marks a call that stays Python, and `explain` says what islands take.

    @mycel.island
    def nearest(x, table): return torch.from_numpy(scipy_query(x.detach().numpy(), table))

How a call becomes one equation of a program, by hand or because it cannot be captured: `capture/island.py`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.capture import PythonCall, is_traced_here, mark_island


def island(fn: Any = None) -> Any:
    """A function or module that stays plain Python inside captured code: one equation, whose gradient is torch's.  Its
    results are tensors (alone or in tuples, lists, dicts) whose shapes do not depend on values; outside of captured
    code it is the function itself."""
    if not callable(fn):
        raise TypeError(f"mycel.island takes a function or a module, not {type(fn).__name__}")
    if isinstance(fn, torch.nn.Module):
        return mark_island(fn)
    return _marked(fn)


def _marked(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return mark_island(fn)(*args, **kwargs) if is_traced_here() else fn(*args, **kwargs)

    return call


class TimedCode:
    """A step's code, and how long it and its islands took in all, the first call apart: that compiles."""

    def __init__(self, run: Callable[..., Any], islands: Sequence[PythonCall]) -> None:
        self.run, self.islands, self.seconds, self.calls = run, islands, 0.0, 0

    def __call__(self, *inputs: Any) -> Any:
        if self.calls == 1:
            self.seconds = 0.0
            for call in self.islands:
                call.seconds = 0.0
        self.calls += 1
        start = time.perf_counter()
        outs = self.run(*inputs)
        self.seconds += time.perf_counter() - start
        return outs


def islands_text(calls: Sequence[PythonCall], seconds: float) -> list[str]:
    """One line for each island: its share of the step, where steps were taken, and why it is one."""
    lines: list[str] = []
    for call in calls:
        share = f"{call.seconds / seconds:.0%} of the step" if seconds and call.calls else "not run yet"
        lines.append(f"{'island' if not lines else '':<16} {call.name}, {share}: {call.reason}")
    return lines
