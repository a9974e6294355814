"""Loops in rewritten code: `while`, `for` and comprehensions, turn by turn as Python does them, or as one `loop` or
`scan` where a traced tensor decides how many turns there are, or where there are many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.capture.branches import check as traced_check
from mycel.capture.chosen_places import possible_places
from mycel.capture.fence import refuse
from mycel.capture.loops import over
from mycel.capture.loops import repeat as traced_repeat
from mycel.capture.maybe_items import parts, varies
from mycel.capture.merge import Want, fit, wrapped
from mycel.capture.syntax.decisions import both, branch_on, decide, known_number, negate
from mycel.capture.syntax.draws import refuse_iterator
from mycel.capture.syntax.lists import each_apart, vary
from mycel.capture.trace import TRACING, Tracer
from mycel.capture.turns import most_turns
from mycel.errors import CaptureError
from mycel.ir import Type

UNROLL = 16  # turns up to which a loop with a known number of turns is written out
MOST_UNROLLED = 512  # … and up to which it is when its state does not fit a loop


def repeat(test: Callable[[], Any], body: Callable[[], Any], names: Sequence[str]) -> None:
    """while test(): body()"""
    while True:
        answer = decide(test())
        if not isinstance(answer, bool):
            return _while(TRACING[-1], test, body, names)
        if not answer:
            return None
        body()


def _while(tracer: Tracer, test: Callable[[], Any], body: Callable[[], Any], names: Sequence[str]) -> None:
    """A loop on tensors; where lists grow in it, one of so many turns at most as its counters allow."""
    try:
        return traced_repeat(tracer, lambda: decide(test()), body, (test, body), names)
    except CaptureError as e:
        error = e
    most = most_turns(tracer, lambda: decide(test()), body, (test, body)) if error.grows else None
    if most is None:
        raise error
    _counted(tracer, 0, 1, most, lambda turn: body(), test, names, (body,))
    over = decide(negate(test()))
    if over is not True:
        traced_check(tracer, over, f"RuntimeError: a while loop took more than {most} turns, which its counters forbid")


def comprehend(items: Any, plain: Callable[[Any], Any], loop: Callable[[Any], list[Any]], chooses: bool) -> Any:
    """[f(x) for x in items], `chooses`: if c(x); `loop` is the same as a for loop that appends."""
    refuse_iterator(items)
    if TRACING and isinstance(items, _SEQUENCES) and (chooses or vary() and varies(items)):
        return loop(items)
    return plain(items)


def generate(items: Any, plain: Callable[[Any], Any], loop: Callable[[Any], list[Any]], chooses: bool) -> Any:
    """(f(x) for x in items)"""
    results = comprehend(items, plain, loop, chooses)
    return iter(results) if isinstance(results, list) and not varies(results) else results


_SEQUENCES = (list, tuple, range, torch.Tensor)


# -- for


class Range:
    """range() of which a bound is a traced tensor."""

    def __init__(self, *bounds: Any) -> None:
        for b in bounds:
            if isinstance(b, torch.Tensor) and (b.numel() != 1 or b.is_floating_point()):
                raise refuse(
                    f"range() of a tensor of {b.dtype} with {b.numel()} elements", "an integer tensor with one element"
                )
        bounds = tuple(b.reshape(()) if isinstance(b, torch.Tensor) else b for b in bounds)
        self.start, self.stop = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
        self.step = bounds[2] if len(bounds) == 3 else 1

    def __len__(self) -> int:
        return len(self.known("the length of a range() whose bounds are traced tensors was asked"))

    def __iter__(self) -> Any:
        return iter(self.known("a range() whose bounds are traced tensors was iterated outside of a for loop"))

    def known(self, asked: str) -> range:
        """The range for this batch; refused where its bounds depend on parameters."""
        tracer = TRACING[-1]
        bounds = [tracer.fact(b) if isinstance(b, torch.Tensor) else b for b in (self.start, self.stop, self.step)]
        if any(b is None for b in bounds):
            raise refuse(asked, "a for loop over the range itself")
        return range(*map(int, bounds))  # type: ignore[arg-type]

    @property
    def turns(self) -> Any:
        """How many numbers there are (negative: none)."""
        if isinstance(self.step, int):
            ahead = self.stop - self.start if self.step > 0 else self.start - self.stop
            return ahead if abs(self.step) == 1 else (ahead + abs(self.step) - 1) // abs(self.step)
        return (self.stop - self.start + self.step - torch.sign(self.step)) // self.step


def traced_range(*bounds: Any) -> Any:
    known = [known_number(b) for b in bounds]
    return Range(*bounds) if any(b is None for b in known) else range(*known)


def each(items: Any, body: Callable[[Any], None], more: Callable[[], Any] | None, names: Sequence[str]) -> None:
    """for item in items: body(item), as long as more()"""
    refuse_iterator(items)
    if TRACING:
        tracer = TRACING[-1]
        if isinstance(items, Range):
            try:
                return _counted(tracer, items.start, items.step, items.turns, body, more, names)
            except CaptureError as e:  # a turn is no loop's body: where the batch decides, all turns are written out
                error = e
            try:
                items = items.known(str(error))
            except CaptureError:
                raise error from None
        places = possible_places(tracer, items)
        items = items if places is None else places
        if isinstance(items, range) and more is None and len(items) > UNROLL:
            return _long(items, lambda: torch.arange(items.start, items.stop, items.step), body, names, weak=True)
        if isinstance(items, torch.Tensor) and items.ndim and more is None and len(items) > UNROLL:
            return _long(items, lambda: items, body, names, weak=False)
    return _each(items, body, more, names)


def _each(items: Any, body: Callable[[Any], None], more: Callable[[], Any] | None, names: Sequence[str]) -> None:
    """Turn by turn; once it depends on a tensor whether the loop goes on, each turn is a branch, or the rest one
    loop."""
    answer: Any = True
    for turn, item in enumerate(each_apart(items)):
        item, there = parts(item)
        test = answer if there is True else there if answer is True else answer & there
        if test is True:
            body(item)
        elif isinstance(items, range) and len(items) - turn > UNROLL:
            return _counted(TRACING[-1], item, items.step, len(items) - turn, body, more, names)
        else:
            branch_on(test, functools.partial(body, item), _nothing, names, True, (body,))
        if more is not None:
            answer = decide(more())
            if answer is False:
                return None
    return None


def _nothing() -> None:
    """The other branch."""


def _long(
    items: Any, rows: Callable[[], torch.Tensor], body: Callable[[Any], None], names: Sequence[str], weak: bool
) -> None:
    """A long loop is a scan; where a first turn settles the state's types, it is written out before; else all turns
    are."""
    tracer = TRACING[-1]
    try:
        if not over(tracer, rows(), body, (body,), names, weak):
            _each(items, body, None, names)
        return
    except CaptureError as e:
        error = e
    body(items[0])
    try:
        if over(tracer, rows()[1:], body, (body,), names, weak):
            return
    except CaptureError:
        if len(items) > MOST_UNROLLED:
            raise error from None
    _each(items[1:], body, None, names)


def _counted(
    tracer: Tracer,
    start: Any,
    step: Any,
    turns: Any,
    body: Callable[[Any], None],
    more: Callable[[], Any] | None,
    names: Sequence[str],
    inner: Sequence[Callable[..., Any]] = (),
) -> None:
    """for i in range(turns): body(start + i * step), as long as more(); `inner`: what the body calls"""
    want = Want(Type(torch.int64, ()), True)
    tracer.here()
    with tracer:
        at: Any = wrapped(tracer, fit(0, want.type), want)

    where = _Where()

    def test() -> Any:
        where.is_in_turn = False
        return decide(at < turns if more is None else both(at < turns, more))

    def turn() -> None:
        nonlocal at
        where.is_in_turn = True
        item = at if step == 1 and isinstance(start, int) and start == 0 else start + at * step
        at = at + 1
        body(item)

    closures = (test, turn, body, *inner, *(() if more is None else (more,)))
    most = turns if isinstance(turns, int) else None
    finished = lambda: at - 1 if where.is_in_turn else at
    traced_repeat(tracer, test, turn, closures, [*names, "at"], most, finished)


class _Where:
    """Is it a turn of a loop that is traced, or its test?"""

    is_in_turn = False
