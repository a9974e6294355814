"""What rewritten code calls in place of a function: of the user's its rewritten twin; of those of Python and torch that
ask a tensor for its value, or call what they are given, one that captures."""

from __future__ import annotations

import builtins
import functools
import io
import math
import operator
import sys
import warnings
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import torch

from mycel.capture.autograd import traced_linearize
from mycel.capture.island import function_boundary
from mycel.capture.maybe_items import varies
from mycel.capture.nested import is_inside as is_in_block
from mycel.capture.record import Traced
from mycel.capture.slots import UNDEFINED
from mycel.capture.syntax.decisions import both, choose, decide, either, known_number
from mycel.capture.syntax.draws import CLOCKS, DRAWS
from mycel.capture.syntax.flex import flex_rule
from mycel.capture.syntax.list_places import checked, first_by, is_list_method, list_method, ordered
from mycel.capture.syntax.lists import LISTS, extreme, vary
from mycel.capture.syntax.load import twin
from mycel.capture.syntax.loop_statements import traced_range
from mycel.capture.syntax.printing import traced_print, traced_warn, traced_write
from mycel.capture.syntax.texts import MAKERS, is_text_method, with_text, without_text
from mycel.capture.trace import TRACING
from mycel.capture.traced_text import TracedText, refuse_text
from mycel.capture.weak import as_number, python_type
from mycel.ops import o

GIVEN: dict[str, Any] = {"undefined@": UNDEFINED}  # what rewritten code reaches, with `runtime.py`
_MATH = ("isnan", "isinf", "isfinite", "sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tanh", "floor", "ceil")


def call(fn: Any) -> Any:
    """What to call for fn: its rewritten twin if it is the user's."""
    try:
        special = _SPECIAL.get(fn)
    except TypeError:  # not hashable
        special = None
    if special is not None:
        return special
    if TRACING and isinstance(getattr(fn, "__func__", fn), _CACHED):
        return functools.partial(_remembered, fn)
    if TRACING and is_list_method(fn):
        return list_method(fn)
    if TRACING and isinstance(getattr(fn, "__self__", None), io.TextIOBase) and fn.__name__ in ("write", "writelines"):
        return functools.partial(traced_write, fn)
    if TRACING and (flex := flex_rule(fn)) is not None:
        return flex
    if TRACING and is_text_method(fn):
        return with_text(fn)
    run = twin(fn, GIVEN)
    if run is fn and vary():
        run = checked(fn)
    elif run is fn and TRACING:
        run = without_text(fn)
    return function_boundary(TRACING[-1], fn, run) if TRACING else run


_CACHED = type(functools.cache(len))


def _remembered(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """A function under functools.cache: what it gives while code is traced is kept with the trace, not in its cache."""
    cached = getattr(fn, "__func__", fn)
    args = (fn.__self__, *args) if cached is not fn else args
    known, key = TRACING[-1].remembered, (cached, args, tuple(kwargs.items()))
    if key in known:
        return known[key]
    tracer, was_now = TRACING[-1], TRACING[-1].says_now
    tracer.says_now = True
    try:
        value = call(cached.__wrapped__)(*args, **kwargs)
    finally:
        tracer.says_now = was_now
    if not is_in_block():  # what a branch or a loop made is its own
        known[key] = value
    return value


def _type(*args: Any) -> Any:
    """type(x): a traced tensor is a tensor, a number that is not known one of Python's."""
    x = args[0] if len(args) == 1 else None
    if type(x) is not Traced:
        return type(*args)
    return python_type(x) if x.weak else torch.Tensor


def _is_instance(x: Any, classes: Any) -> bool:
    """isinstance(x, classes)"""
    return isinstance(python_type(x)() if type(x) is Traced and x.weak else x, classes)


def _bool(x: Any = False) -> Any:
    """bool, which asks a tensor for its truth: one that is not known is a number, as those of float and int are."""
    answer = decide(x)
    return as_number(TRACING[-1], answer) if isinstance(answer, torch.Tensor) else answer


def _number(kind: type[float] | type[int]) -> Callable[..., Any]:
    """float and int, which ask a tensor for its value: one that is not known stays a tensor."""

    def number(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if type(x) is TracedText:
            raise refuse_text(kind.__name__)
        if not TRACING or not isinstance(x, torch.Tensor) or x.numel() != 1 or x.is_complex():
            return kind(*args, **kwargs)
        if TRACING[-1].fact(x) is not None:
            return kind(x)
        return as_number(TRACING[-1], x.to(torch.float64 if kind is float else torch.int64))

    return number


def _alike(plain: Callable[..., bool], elements: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """torch.equal and torch.allclose, on tensors of which one is traced: a truth value that may not be known."""

    def alike(*args: Any, **kwargs: Any) -> Any:
        if not TRACING or len(args) < 2 or not any(type(x) is Traced for x in args[:2]):
            return plain(*args, **kwargs)
        if plain is torch.equal and args[0].shape != args[1].shape:
            return False
        return _bool(elements(*args, **kwargs).all())

    return alike


def _of_numbers(plain: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math`, on a number that is not known."""

    def function(*args: Any) -> Any:
        if not TRACING or len(args) != 1 or not isinstance(args[0], torch.Tensor) or known_number(args[0]) is not None:
            return plain(*args)
        return as_number(TRACING[-1], traced(as_number(TRACING[-1], args[0]).to(torch.float64)))

    return function


def _extreme(plain: Callable[..., Any], sign: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """max and min, which compare: on traced numbers a choice."""

    def function(*args: Any, **kwargs: Any) -> Any:
        values = args if len(args) > 1 else args[0]
        if TRACING and isinstance(values, (Iterator, KeysView, ValuesView, ItemsView)):
            values = list(values)
        if vary() and varies(values):
            if not kwargs:
                return extreme(values, sign)
        elif isinstance(values, (tuple, list)) and values:
            kwargs.pop("default", None)
        if TRACING and kwargs.keys() == {"key"} and isinstance(values, (tuple, list)):
            chosen = first_by(values, call(kwargs["key"]), plain is builtins.max)
            if chosen is not None:
                return chosen[0]
        if (
            kwargs
            or not isinstance(values, (tuple, list))
            or not any(isinstance(v, torch.Tensor) and known_number(v) is None for v in values)
        ):
            return plain(values, **{k: call(v) if k == "key" else v for k, v in kwargs.items()})
        best = values[0]
        for v in values[1:]:
            best = choose(sign(v, best), lambda v=v: v, lambda best=best: best)  # type: ignore[misc]
        return best

    return function


def _over_items(stop: bool, join: Callable[..., Any]) -> Callable[[Any], Any]:
    """any (stops at True) and all (stops at False)."""

    def fold(items: Any) -> Any:
        value: Any = not stop
        for item in items:
            answer = decide(item)
            if answer is stop:
                return stop
            value = join(value, lambda answer=answer: answer)
        return value

    return fold


def _with_twins(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls functions it is given."""
    return lambda *args, **kwargs: plain(*map(call, args), **{k: call(v) for k, v in kwargs.items()})


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """breakpoint(): stops when the program runs, with the tensors of the user's variables."""
    if not TRACING:
        return builtins.breakpoint(*args, **kwargs)
    tracer = TRACING[-1]
    tracer.here()
    tensors = {k: v for k, v in sys._getframe(1).f_locals.items() if isinstance(v, torch.Tensor) and k.isidentifier()}
    with tracer:
        values = [tracer.cell(v).read() for v in tensors.values()]
        o.pause(*values, names=tuple(tensors), source=tracer.source)
    return None


def _tracing_state() -> Any:
    """Is torch's own tracer at work?  For it torch.distributions has forms without decisions, which are captured."""
    asks = sys._getframe(1).f_globals.get("__name__", "")
    return torch._C._get_tracing_state() or (bool(TRACING) and asks.startswith("torch.distributions."))


def _linearize(fn: Callable[..., Any], *primals: Any) -> Any:
    """torch.func.linearize."""
    return traced_linearize(TRACING[-1], call(fn), *primals) if TRACING else torch.func.linearize(fn, *primals)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    breakpoint: _breakpoint,
    type: _type,
    isinstance: _is_instance,
    print: traced_print,
    warnings.warn: traced_warn,
    range: traced_range,
    bool: _bool,
    float: _number(float),
    int: _number(int),
    max: _extreme(builtins.max, operator.gt),
    min: _extreme(builtins.min, operator.lt),
    any: _over_items(True, either),
    all: _over_items(False, both),
    map: _with_twins(builtins.map),
    filter: _with_twins(builtins.filter),
    sorted: _with_twins(ordered),
    functools.reduce: _with_twins(functools.reduce),
    torch.utils.checkpoint.checkpoint: _with_twins(torch.utils.checkpoint.checkpoint),
    torch.equal: _alike(torch.equal, torch.eq),
    torch.allclose: _alike(torch.allclose, torch.isclose),
    torch.func.linearize: _linearize,
    torch._C._get_tracing_state: _tracing_state,
    **{getattr(math, name): _of_numbers(getattr(math, name), getattr(torch, name)) for name in _MATH},
    **DRAWS,
    **CLOCKS,
    **LISTS,
    **MAKERS,
}
