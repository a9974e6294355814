"""What rewritten code calls: each statement on Python values is what Python does; on traced tensors it is captured.

A tensor whose value is known while tracing (it depends on no input) counts as a Python value.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import math
import operator
import re
import sys
import traceback
import warnings
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence, ValuesView
from typing import Any

import torch

from mycel.capture.autograd import traced_linearize
from mycel.capture.branches import branch as traced_branch
from mycel.capture.branches import check as traced_check
from mycel.capture.branches import refuse_caught, run
from mycel.capture.chosen_places import possible_places
from mycel.capture.fence import refuse
from mycel.capture.island import function_boundary
from mycel.capture.loops import over
from mycel.capture.loops import repeat as traced_repeat
from mycel.capture.maybe_items import parts, varies
from mycel.capture.merge import Want, fit, wrapped
from mycel.capture.nested import is_inside as is_in_block
from mycel.capture.record import Traced
from mycel.capture.slots import UNDEFINED, Objects, assigned, variables
from mycel.capture.syntax.draws import CLOCKS, DRAWS, refuse_iterator
from mycel.capture.syntax.flex import flex_rule
from mycel.capture.syntax.list_places import (
    checked,
    first_by,
    is_list_method,
    list_method,
    ordered,
    subscripted,  # noqa: F401  rewritten code calls it
)
from mycel.capture.syntax.lists import LISTS, each_apart, extreme, some, vary
from mycel.capture.syntax.load import method_twin, twin
from mycel.capture.syntax.printing import traced_print, traced_warn, traced_write
from mycel.capture.syntax.rewrite import RUNTIME
from mycel.capture.syntax.texts import (
    MAKERS,
    as_text,  # noqa: F401  rewritten code calls this
    is_inside,  # noqa: F401  … and this
    is_text_method,
    remainder,  # noqa: F401  … and this
    with_text,
    without_text,
)
from mycel.capture.trace import TRACING, Tracer
from mycel.capture.traced_text import TracedText, refuse_text
from mycel.capture.trial import NoIslandError
from mycel.capture.turns import most_turns
from mycel.capture.weak import as_number, python_type
from mycel.errors import CaptureError, MisfitError
from mycel.ir import Type
from mycel.ops import o

UNROLL = 16  # turns up to which a loop with a known number of turns is written out
MOST_UNROLLED = 512  # … and up to which it is when its state does not fit a loop
_CHEAP = {
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_not",
    "isnan",
    "isfinite",
    "isinf",
    "add",
    "sub",
    "mul",
    "neg",
    "abs",
    "cast",
    "full",
    "iota",
    "const",
    "reshape",
    "sum",
    "mean",
    "amax",
    "amin",
    "all",
    "any",
    "select",
    "slice",
}

_MATH = ("isnan", "isinf", "isfinite", "sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tanh", "floor", "ceil")
_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "is": operator.is_, "is not": operator.is_not, "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}  # fmt: skip


def decide(x: Any) -> Any:
    """The truth of a Python value; a traced 0-dim bool for a tensor that is not known."""
    if vary() and varies(x):
        x = some(x)
    if not isinstance(x, torch.Tensor) or not TRACING or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return bool(x)
    if x.numel() != 1:
        raise refuse(
            f"a decision was asked of a tensor with {x.numel()} elements",
            "x.any() or x.all() to decide, torch.where to choose for each element",
        )
    known = _known(x)
    if known is not None:
        return bool(known)
    x = x.reshape(()) if x.ndim else x
    return x if x.dtype == torch.bool else x != 0


def branch(
    test: Any, then: Callable[[], Any], orelse: Callable[[], Any], names: Sequence[str], guard: bool = False
) -> Any:
    """if test: then() else: orelse()"""
    answer = decide(test)
    if isinstance(answer, bool):
        return then() if answer else orelse()
    return _branched(answer, then, orelse, names, guard)


def _branched(
    answer: torch.Tensor,
    then: Callable[[], Any],
    orelse: Callable[[], Any],
    names: Sequence[str],
    guard: bool,
    closures: Sequence[Callable[..., Any]] | None = None,
) -> Any:
    """then() if answer else orelse(), for a traced one."""
    try:
        return traced_branch(TRACING[-1], answer, then, orelse, names, guard, closures)
    except CaptureError:  # what the branches make does not fit together: where the batch decides, one of them is taken
        known = TRACING[-1].fact(answer)
        if known is None:
            raise
    return then() if bool(known) else orelse()


def choose(test: Any, then: Callable[[], Any], orelse: Callable[[], Any]) -> Any:
    """then() if test else orelse()"""
    return branch(test, then, orelse, assigned((then, orelse)), True)


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


# -- for -------------------------------------------------------------------------------------------------------------


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


def _range(*bounds: Any) -> Any:
    known = [_known(b) for b in bounds]
    return Range(*bounds) if any(b is None for b in known) else range(*known)


def _known(x: Any) -> Any:
    """The number a tensor is known to be, None if it is not; other values as they are."""
    if not isinstance(x, torch.Tensor) or not TRACING:
        return x
    value = TRACING[-1].concrete(x)
    return None if value is None else x.item()


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
            _branched(test, functools.partial(body, item), _nothing, names, True, (body,))
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


# -- expressions -----------------------------------------------------------------------------------------------------


def both(value: Any, *rest: Callable[[], Any]) -> Any:
    """value and rest[0]() and …"""
    for fn in rest:
        answer = decide(value) if isinstance(value, torch.Tensor) else bool(value)
        if answer is False:
            return value
        value = fn() if answer is True else _join(answer, fn, value, torch.logical_and)
    return value


def either(value: Any, *rest: Callable[[], Any]) -> Any:
    """value or rest[0]() or …"""
    for fn in rest:
        answer = decide(value) if isinstance(value, torch.Tensor) else bool(value)
        if answer is True:
            return value
        value = fn() if answer is False else _join(answer, fn, value, torch.logical_or)
    return value


def _join(answer: torch.Tensor, fn: Callable[[], Any], value: Any, logic: Callable[..., Any]) -> Any:
    """The right operand is computed only where the left one asks for it, unless it is cheap and cannot fail."""
    cheap = _cheap(TRACING[-1], fn)
    if value.dtype == torch.bool and cheap is (logic is torch.logical_or):
        return cheap  # x and False, x or True: whatever x is
    if isinstance(cheap, torch.Tensor) and value.dtype == torch.bool:
        return logic(answer, cheap)
    then, orelse = (fn, lambda: value) if logic is torch.logical_and else (lambda: value, fn)
    return traced_branch(TRACING[-1], answer, then, orelse, assigned((fn,)), True, (fn,))


def _cheap(tracer: Tracer, fn: Callable[[], Any]) -> torch.Tensor | bool | None:
    """The value of a closure computed here and now, if that is a truth value and a few harmless equations."""
    slots = variables((fn,), assigned((fn,)))
    blocks = dict(tracer.blocks)
    done = run(tracer, fn, slots, Objects.reached((fn,), slots.values()), ())
    tracer.blocks = blocks
    x, section = done.value, done.section
    if isinstance(x, bool) and not (slots or done.contents or done.writes or section.eqns):
        return x
    if (
        slots
        or done.contents
        or done.writes
        or not isinstance(x, torch.Tensor)
        or x.dtype != torch.bool
        or x.numel() != 1
    ):
        return None
    if section.regions[0].children or any(e.op.name not in _CHEAP for e in section.eqns):
        return None
    x = fn()
    return x.reshape(()) if x.ndim else x


def negate(x: Any) -> Any:
    """not x"""
    answer = decide(x)
    return not answer if isinstance(answer, bool) else torch.logical_not(answer)


def compare(left: Any, sign: str, right: Callable[[], Any], *rest: Any) -> Any:
    """left < right() < …"""
    middle = right()
    first = _SIGNS[sign](left, middle)
    return both(first, lambda: compare(middle, *rest)) if rest else first


# -- assert, raise, call


def check(test: Any, message: Callable[[], Any] | None, text: str) -> None:
    """assert test, message()"""
    answer = decide(test)
    if isinstance(answer, bool):
        if not answer:
            raise raised(AssertionError(message()) if message else AssertionError())
        return
    refuse_caught(TRACING[-1], AssertionError())
    traced_check(TRACING[-1], answer, f"AssertionError: {_text(message, text)}")


def _text(message: Callable[[], Any] | None, text: str) -> str:
    try:
        return str(message()) if message else text
    except CaptureError:  # the message shows a value that is not known now
        return text


def refusals() -> tuple[type[BaseException], ...]:
    """What a try statement is not to catch of the exception at hand: what torch would not have raised."""
    return () if isinstance(sys.exc_info()[1], MisfitError) else (CaptureError, NoIslandError)


@contextlib.contextmanager
def attempt(types: Callable[[], Any]) -> Iterator[None]:
    """The body of a try statement that catches exceptions of these types."""
    caught = TRACING[-1].caught if TRACING else []
    caught.append(types)
    try:
        yield
    finally:
        caught.pop()


def raised(error: Any) -> Any:
    """raise error"""
    error = error() if isinstance(error, type) else error
    if TRACING:
        TRACING[-1].raised = error
    return error


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
    run = twin(fn, _GIVEN)
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
        if not TRACING or len(args) != 1 or not isinstance(args[0], torch.Tensor) or _known(args[0]) is not None:
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
            or not any(isinstance(v, torch.Tensor) and _known(v) is None for v in values)
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
    range: _range,
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
_GIVEN = {RUNTIME: sys.modules[__name__], "undefined@": UNDEFINED}


# -- where capture comes in


def enter(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that is captured; a variable that only one branch defines is refused where it is used."""
    try:
        return call(fn)(*args, **kwargs)
    except NameError as e:
        name = (re.search(r"'([^']+)'", str(e)) or [""])[1] if not e.name else e.name
        if not TRACING or name not in TRACING[-1].maybe:
            raise
        at = traceback.extract_tb(e.__traceback__)[-1]
        raise CaptureError(
            f"{name} is used here, but it is not defined on every way that leads here",
            file=at.filename,
            line=at.lineno or 0,
            text=(at.line or "").strip(),
            hint=(f"a value for {name} before the if or the loop that defines it"),
        ) from e


def rewritten_method(kind: type, name: str) -> Any:
    """A method or property of a class, rewritten: for those that Python itself calls."""
    return method_twin(vars(kind)[name], _GIVEN)


@contextlib.contextmanager
def rewritten_forward(module: torch.nn.Module) -> Iterator[None]:
    """A user's module calls the rewritten twin of its forward."""
    forward = module.forward
    new_forward = twin(forward, _GIVEN)
    if new_forward is forward:
        yield
        return
    slots = module.__dict__
    before = slots.get("forward")
    slots["forward"] = new_forward
    try:
        yield
    finally:
        if before is None:
            slots.pop("forward", None)
        else:
            slots["forward"] = before
