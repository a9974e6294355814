"""Python's and NumPy's random numbers in captured code: draws of the program's own key.

A captured program runs the user's Python once: what `random.random()` gave then would be frozen for ever.  In code that
is rewritten a plain draw of one number is a 0-dim tensor that behaves like a number; `if random.random() < 0.5:` then
is a branch taken anew at every call.  Any other draw moves the generators' state, which capture notices and refuses.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mycel.capture.fence import refuse
from mycel.capture.trace import TRACING

Draw = Callable[..., torch.Tensor]


def _uniform(low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return torch.rand((), dtype=torch.float64) * (high - low) + low


def _normal(mean: float = 0.0, deviation: float = 1.0) -> torch.Tensor:
    return torch.randn((), dtype=torch.float64) * deviation + mean


def _below(low: int, high: int | None = None) -> torch.Tensor:
    low, high = (0, low) if high is None else (low, high)
    return torch.randint(low, high, ())


def _number(plain: Callable[..., Any], draw: Draw, most: int = 2) -> Callable[..., Any]:
    """A function that draws one number, given at most so many, on the program's key while code is traced."""

    def drawn(*args: Any, **kwargs: Any) -> Any:
        if not TRACING or kwargs or len(args) > most or not all(type(a) in (int, float) for a in args):
            return plain(*args, **kwargs)
        x = draw(*args)
        x.weak = TRACING[-1].numbers = True  # type: ignore[attr-defined]
        return x

    return drawn


DRAWS: dict[Any, Callable[..., Any]] = {
    random.random: _number(random.random, _uniform, 0),
    random.uniform: _number(random.uniform, _uniform),
    random.gauss: _number(random.gauss, _normal),
    random.normalvariate: _number(random.normalvariate, _normal),
    random.randint: _number(random.randint, lambda low, high: _below(low, high + 1)),
    random.randrange: _number(random.randrange, _below),
    np.random.rand: _number(np.random.rand, _uniform, 0),
    np.random.random: _number(np.random.random, _uniform, 0),
    np.random.uniform: _number(np.random.uniform, _uniform),
    np.random.randn: _number(np.random.randn, _normal, 0),
    np.random.normal: _number(np.random.normal, _normal),
    np.random.randint: _number(np.random.randint, _below),
}


def drawn_state() -> tuple[Any, ...]:
    """Where Python's and NumPy's generators are."""
    return random.getstate(), np.random.get_state()


def refuse_draws(before: tuple[Any, ...]) -> None:
    """CaptureError where numbers were drawn since that are no part of the program; the generators are where they
    were."""
    python, arrays = before
    moved = {
        "Python's": random.getstate() != python,
        "NumPy's": repr(np.random.get_state()) != repr(arrays),
    }
    if any(moved.values()):
        random.setstate(python)
        np.random.set_state(arrays)
        whose = next(name for name, is_moved in moved.items() if is_moved)
        raise refuse(
            f"{whose} random numbers were drawn while the code was captured: every call would use the same ones",
            "torch.rand or torch.randint, or drawing them outside and passing them as an argument",
        )


# -- clocks and iterators


def _clock(plain: Callable[[], Any]) -> Callable[[], Any]:
    def read() -> Any:
        if TRACING:
            warnings.warn(f"{plain.__name__}() is called when the code is captured, not at every call", stacklevel=2)
        return plain()

    return read


def _next(iterator: Any, *default: Any) -> Any:
    """next(): of an iterator that lives outside, each call would have the same item."""
    refuse_iterator(iterator)
    return next(iterator, *default)


def refuse_iterator(items: Any) -> None:
    """CaptureError where an iterator that lives outside goes on, and nothing stands for it."""
    if TRACING and id(items) in TRACING[-1].places.iterators:
        raise refuse(
            "next() of an iterator that lives outside of the function: every call would use the same item",
            "taking the item outside and passing it as an argument",
        )


CLOCKS: dict[Any, Callable[..., Any]] = {
    **{f: _clock(f) for f in (time.time, time.perf_counter, time.monotonic, time.process_time)},
    next: _next,
}
