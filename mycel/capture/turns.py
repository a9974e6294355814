"""How many turns a `while` loop can take: what its own counters allow.

    while err > tol and i < 50: …; i += 1              50
    while len(path) < 20 and …: path.append(…)         20
    while True: …; i += 1; if done or i >= 25: break   25

Numbers of Python that a turn changes by the same step are counters, and so are the lengths of lists that it adds to.
They are set ahead by k turns, and the loop's test, or a turn and then the test, is tried: where the answer is no,
whatever tensors are, the loop has ended.  The program checks that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.capture.branches import TracedClosure, run
from mycel.capture.merge import is_number, own, wrapped
from mycel.capture.slots import Objects, assigned, variables
from mycel.capture.trace import Tracer
from mycel.errors import CaptureError
from mycel.ir import Var

MOST = 1024  # turns: so many rows a list that grows gets


def most_turns(
    tracer: Tracer, test: Callable[[], Any], body: Callable[[], Any], closures: Sequence[Callable[..., Any]]
) -> int | None:
    """After how many turns `while test(): body()` has ended for sure, None if that is not known."""
    counters = TurnCounters(tracer, test, body, closures)
    if not counters.steps and not counters.added:
        return None
    if not counters.is_over(MOST):
        return None
    low, high = 0, MOST  # it may go on after `low` turns
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if counters.is_over(middle) else (middle, high)
    return high


class TurnCounters:
    """What counts the turns of a loop: `steps` of variables, `added` to lists.  All else that a turn changes is not
    known after some turns."""

    def __init__(
        self, tracer: Tracer, test: Callable[[], Any], body: Callable[[], Any], closures: Sequence[Callable[..., Any]]
    ) -> None:
        self.tracer, self.test, self.body = tracer, test, body
        self.slots = variables(closures, assigned(closures))
        self.objects = Objects.reached(closures, self.slots.values())
        self.steps: dict[str, int] = {}
        self.others: dict[str, Any] = {}
        self.added: list[tuple[list[Any], list[Any]]] = []
        first = self._tried(body)
        if first is None:
            return
        for name, slot in self.slots.items():
            start, end = slot.get(), first.variables[name]
            if type(start) is int and type(end) is int and start != end:
                self.steps[name] = end - start
            elif start is not end:
                self.others[name] = end
        for i, now in first.contents.items():
            box = self.objects.boxes[i]
            if isinstance(now, list) and len(now) > len(box.old):
                self.added.append((box.object, now[len(box.old) :]))
        self._drop_uneven()

    def _drop_uneven(self) -> None:
        """Numbers that the next turn changes by something else are no counters."""
        before = {name: self.slots[name].get() for name in self.steps}
        second = self._tried(lambda: self._ahead(1, self.body))
        for name, step in list(self.steps.items()):
            if second is None or second.variables[name] != before[name] + 2 * step:
                self.others[name] = before[name]
                del self.steps[name]

    def _tried(self, fn: Callable[[], Any]) -> TracedClosure | None:
        """What a closure does; nothing of it is kept."""
        blocks = dict(self.tracer.blocks)
        try:
            return run(self.tracer, fn, self.slots, self.objects, self.slots)
        except (CaptureError, LookupError, TypeError, ValueError):
            return None
        finally:
            self.tracer.blocks = blocks

    def _ahead(self, turns: int, fn: Callable[[], Any]) -> Any:
        """fn() as it is after so many turns."""
        for name, step in self.steps.items():
            self.slots[name].set(self.slots[name].get() + turns * step)
        for name, value in self.others.items():
            self.slots[name].set(self._unknown(value))
        for xs, added in self.added:
            xs.extend([self._unknown(item) for item in added] * turns)
        return fn()

    def _unknown(self, value: Any) -> Any:
        """A value like this one that nobody knows."""
        if not isinstance(value, torch.Tensor) and not is_number(value):
            return value
        want = own(value)
        return wrapped(self.tracer, Var(self.tracer.name(""), want.type), want)

    def is_over(self, turns: int) -> bool:
        """Does the loop end with this turn at the latest, whatever tensors are?"""
        asked = self._tried(lambda: self._ahead(turns - 1, self._turn))
        return asked is not None and asked.value is False

    def _turn(self) -> Any:
        if self.test() is False:
            return False
        self.body()
        return self.test()
