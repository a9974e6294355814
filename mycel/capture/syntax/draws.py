"""Python's and NumPy's random numbers in captured code: draws of the program's own key.

A captured program runs the user's Python once: what `random.random()` gave then would be frozen for ever.  In code that
is rewritten a plain draw of one number is a 0-dim tensor that behaves like a number; `if random.random() < 0.5:` then
is a branch taken anew at every call.  Any other draw moves the generators' state, which capture notices and refuses; so
it does with a generator that is made without a seed.
"""

from __future__ import annotations

import inspect
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mycel.capture.fence import refuse
from mycel.capture.syntax.list_places import subscripted
from mycel.capture.trace import TRACING

Draw = Callable[..., torch.Tensor]


def _uniform(low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    return torch.rand((), dtype=torch.float64) * (high - low) + low


def _normal(loc: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn((), dtype=torch.float64) * scale + loc


def _below(low: int, high: int | None = None) -> torch.Tensor:
    low, high = (0, low) if high is None else (low, high)
    return torch.randint(low, high, ())


def _beta(a: float, b: float) -> torch.Tensor:
    return torch._sample_dirichlet(torch.tensor([a, b], dtype=torch.float64))[0]


def _gamma(shape: float, scale: float = 1.0) -> torch.Tensor:
    return torch._standard_gamma(torch.full((), shape, dtype=torch.float64)) * scale


def _exponential(scale: float = 1.0) -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64).exponential_() * scale


def _poisson(lam: float = 1.0) -> torch.Tensor:
    return torch.poisson(torch.full((), lam, dtype=torch.float64)).long()


def _binomial(n: int, p: float) -> torch.Tensor:
    return torch.binomial(*torch.tensor([n, p], dtype=torch.float64)).long()


def _number(plain: Callable[..., Any], draw: Draw) -> Callable[..., Any]:
    """A function that draws one number on the program's key while code is traced: given numbers alone, by the names
    that `draw` has for them."""
    signature = inspect.signature(draw)

    def drawn(*args: Any, **kwargs: Any) -> Any:
        given = {k: v for k, v in kwargs.items() if k != "size" or v is not None}
        if not TRACING or not all(isinstance(a, (int, float)) for a in (*args, *given.values())):
            return plain(*args, **kwargs)
        try:
            signature.bind(*args, **given)
        except TypeError:  # of several numbers, or wrong
            return plain(*args, **kwargs)
        return _as_number(draw(*args, **given))

    return drawn


def _as_number(x: torch.Tensor) -> torch.Tensor:
    x.weak = TRACING[-1].numbers = True  # type: ignore[attr-defined]
    return x


def _choice(plain: Callable[..., Any]) -> Callable[..., Any]:
    """One of a list, or of the numbers below one, all alike."""

    def choice(items: Any, *args: Any, **kwargs: Any) -> Any:
        if TRACING and not args and not kwargs:
            if type(items) is int and items > 0 and plain is not random.choice:
                return _as_number(_below(items))
            if type(items) in (list, tuple) and items:
                return subscripted(items)[_as_number(_below(len(items)))]
        return plain(items, *args, **kwargs)

    return choice


def _seeded(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a generator: without a seed, of another state at every call."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if TRACING and all(x is None for x in (*args, *kwargs.values())):
            raise refuse(
                f"{plain.__name__} without a seed: every call would use the same numbers",
                "torch.rand, a seed, or numbers that are drawn outside and passed as an argument",
            )
        return plain(*args, **kwargs)

    return make


# each function's draw, whose parameters have the names that the function gives them
_NUMBERS: list[tuple[Callable[..., Any], Draw]] = [
    (random.random, lambda: _uniform()),
    (random.uniform, lambda a, b: _uniform(a, b)),
    (random.gauss, lambda mu=0.0, sigma=1.0: _normal(mu, sigma)),
    (random.normalvariate, lambda mu=0.0, sigma=1.0: _normal(mu, sigma)),
    (random.randint, lambda a, b: _below(a, b + 1)),
    (random.randrange, lambda start, stop=None: _below(start, stop)),
    (random.betavariate, lambda alpha, beta: _beta(alpha, beta)),
    (random.gammavariate, lambda alpha, beta: _gamma(alpha, beta)),
    (random.expovariate, lambda lambd=1.0: _exponential(1.0 / lambd)),
    (np.random.rand, lambda: _uniform()),
    (np.random.random, lambda: _uniform()),
    (np.random.random_sample, lambda: _uniform()),
    (np.random.uniform, _uniform),
    (np.random.randn, lambda: _normal()),
    (np.random.standard_normal, lambda: _normal()),
    (np.random.normal, _normal),
    (np.random.randint, _below),
    (np.random.beta, _beta),
    (np.random.gamma, _gamma),
    (np.random.standard_gamma, lambda shape: _gamma(shape)),
    (np.random.exponential, _exponential),
    (np.random.standard_exponential, lambda: _exponential()),
    (np.random.poisson, _poisson),
    (np.random.binomial, _binomial),
]
DRAWS: dict[Any, Callable[..., Any]] = {
    **{plain: _number(plain, draw) for plain, draw in _NUMBERS},
    **{plain: _choice(plain) for plain in (random.choice, np.random.choice)},
    **{make: _seeded(make) for make in (random.Random, np.random.default_rng, np.random.RandomState)},
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
