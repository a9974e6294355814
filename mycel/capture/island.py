"""What cannot be captured becomes an island: a call that stays Python, as one equation (`ops/island.py`).

    forward(x)                       an exception passes through the calls around the line that raised it:
      h = self.encoder(x)                solve, Solver, Model
      y = self.solver(h)             solve(h) returns two tensors whose types do not depend on values: it is the island,
        z = solve(h, self.w)         and the code is captured again
          while err.item() > tol: …

A call is tried on values at hand, and on others: results of the same types, whatever the values, make it an island;
else the call around it is tried (`trial.py`).  What fails in plain Python, too, is the user's error, and stays what it
was.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mycel.capture.code_names import attribute_names
from mycel.capture.counters import is_counter
from mycel.capture.fence import here, is_library, raised_at, refuse
from mycel.capture.locations import Container
from mycel.capture.record import Traced
from mycel.capture.trace import TRACING, Tracer
from mycel.capture.trial import NoIslandError, Trial, call_name
from mycel.errors import CaptureError
from mycel.ir import Var
from mycel.ops import o
from mycel.ops.python_calls import CALLS, PythonCall

ROOT = "root"  # the key of the captured function itself
MOST = 64  # islands of a program
MARK = "mycel_island"  # an attribute of modules that are marked as islands
_WARNED: set[tuple[str, str]] = set()


# -- which calls are islands


def boundary(tracer: Tracer, keys: Sequence[Any], plain: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """A call that may be an island, known by these keys: `run` traces it, `plain` is the call as Python has it.  An
    exception that passes remembers the call."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        marked = MARK in getattr(plain, "__dict__", ())
        reason = next((tracer.islands[k] for k in keys if k in tracer.islands), None)
        try:
            if marked:
                return _island_of(plain, *args, **kwargs)
            if reason is not None:
                return make_island(tracer, plain, args, kwargs, reason, whole=keys[0] == ROOT)
            return run(*args, **kwargs)
        except Exception as e:
            passed: list[Sequence[Any]] = e.__dict__.setdefault("passed_calls", [])
            passed.append(keys)
            raise

    return call


def function_boundary(tracer: Tracer, fn: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function or method that rewritten code calls, or a module whose class has a __call__ of its own."""
    if isinstance(fn, torch.nn.Module) and run is not fn:
        return boundary(tracer, module_keys(fn), fn, run)
    function = getattr(fn, "__func__", fn)
    if not isinstance(function, types.FunctionType) or isinstance(getattr(fn, "__self__", None), torch.Tensor):
        return run
    if is_library(function.__code__.co_filename) and function.__module__.partition(".")[0] in ("torch", "mycel"):
        return run
    own = inspect.unwrap(function)  # what one decorator wraps shares the decorator's code
    return boundary(tracer, (getattr(own, "__code__", function.__code__),), fn, run)


def next_island(islands: dict[Any, BaseException], error: BaseException) -> bool:
    """Enter the innermost call that the exception passed and that is no island yet; is there one?"""
    if getattr(error, "final", False):
        return False
    reason = first_reason(error)
    for keys in [*error.__dict__.get("passed_calls", ()), (ROOT,)]:
        if len(islands) < MOST and not any(k in islands for k in keys):
            # of several modules of one class, the second stands for all
            known = len(keys) == 2 and keys[1] in (kind for kind in map(_class_of, islands))
            islands[keys[1] if known else keys[0]] = reason
            return True
    return False


def _class_of(key: Any) -> Any:
    return type(key) if isinstance(key, torch.nn.Module) else None


def module_keys(module: torch.nn.Module) -> Sequence[Any]:
    """The module, and its class, unless it is one of torch's: a Sequential says nothing of another."""
    kind = type(module)
    return (module,) if kind.__module__.startswith("torch.") else (module, kind)


def first_reason(error: BaseException) -> BaseException:
    """Why there are islands at all: what was raised in the code itself."""
    while isinstance(error, NoIslandError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def refusal(error: BaseException) -> BaseException:
    """What the user is told where no call can be an island."""
    reason = first_reason(error)
    if isinstance(reason, AttributeError) and type(reason.obj) is Traced and reason.name in dir(np.ndarray):
        return refuse(
            f".{reason.name} of an array was asked of a tensor: arrays that are arguments are tensors in captured code",
            f"torch.as_tensor(x) and what tensors have, or .{reason.name} before the call",
            raised_at(reason),
        )
    if not isinstance(reason, CaptureError) or not isinstance(error, NoIslandError) or error.final:
        return reason
    return type(reason)(
        f"{reason.what}; and no call around it can stay Python: {error.why}",
        file=reason.file,
        line=reason.line,
        text=reason.text,
        hint=reason.hint,
    )


def mark_island(fn: Any) -> Any:
    """A function that is an island wherever captured code calls it; a module, which remembers it itself."""
    if isinstance(fn, torch.nn.Module):
        fn.__dict__[MARK] = True
        return fn
    return functools.partial(_island_of, fn)


def _island_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return make_island(TRACING[-1], fn, args, kwargs)
    except NoIslandError as e:
        raise refuse(f"{call_name(fn, '')} is no island: {e.why}", "tensors of fixed shapes as results") from e


# -- making one


def make_island(
    tracer: Tracer,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    reason: BaseException | None = None,
    whole: bool = False,
) -> Any:
    """The results of fn(*args, **kwargs) as those of one equation; `reason` is None where the user asked for it.
    `whole`: it is all there is, and no other code looks at the lists in which it keeps tensors."""
    source = here()[0]
    tracer.here()
    name = call_name(fn, source)
    if tracer.manual:
        raise NoIslandError(f"{name} is in a manual region") from reason
    call = _tried(tracer, fn, args, kwargs, reason, whole)
    if not whole:
        _refuse_shared_state(tracer, call, name, reason)
    tracer.source = source
    shift = int(call.draws)
    written = frozenset(i + shift for i in call.written)
    asking = frozenset(i + shift for i in call.asking)
    known = _registered(PythonCall(name, source, _text(reason), call, written, asking, call.draws, call.grad))
    tracer.python_calls.append(known)
    with tracer:
        inputs = [tracer.cell(x).read() for x in call.operands]
        inputs = [_draw(tracer), *inputs] if call.draws else inputs
        params = {"name": known.name, "shapes": [t.shape for t in call.types], "dtypes": [t.dtype for t in call.types]}
        wrt = [i + shift for i in call.differentiable]
        outs = o.island(*inputs, **params, wrt=wrt)
    if reason is not None:
        _warn(known, reason)
    return call.results(outs if isinstance(outs, tuple) else (outs,))


def _tried(
    tracer: Tracer, fn: Callable[..., Any], args: Any, kwargs: Any, reason: BaseException | None, whole: bool
) -> Trial:
    """The call, once it is known what it gives."""
    lists: list[Container] = []
    while True:
        try:
            call = Trial(tracer, fn, args, kwargs, lists)
            call.probe()
            return call
        except NoIslandError as e:
            if not whole or e.kept_in is None or any(e.kept_in.slots is box.slots for box in lists):
                raise e from reason
            lists.append(e.kept_in)


def _refuse_shared_state(tracer: Tracer, call: Trial, name: str, reason: BaseException | None) -> None:
    """Plain values that the call changes and other code may look at: numbers are numbers of the program, unless
    backward changes them; with others the call is no island."""
    if live := call.changed_later & tracer.counted_slots:
        error = refuse(f"{name} changes in backward what is a number of the program", "a buffer")
        error.live = frozenset(live)
        raise error from reason
    others = [fn.__code__ for fn in tracer.places.functions if fn.__code__ not in call.ran]
    looked_at = {text for code in others for text in attribute_names(code)}
    numbers = set()
    for slot, (box, key, old, new) in call.changed.items():
        if not looked_at & {key if isinstance(key, str) else "", box.rpartition(".")[2]}:
            continue
        if slot in call.changed_later or slot in tracer.live_slots or not is_counter(old, new):
            raise NoIslandError(f"{name} changes {box}.{key}, which the code around it may ask for") from reason
        numbers.add(slot)
    if numbers:
        lifted = refuse(f"{name} changes a number that the code around it may ask for", "a buffer")
        lifted.counters = frozenset(numbers)
        raise lifted from reason


def _registered(new: PythonCall) -> PythonCall:
    """The call under a name of its own; one that is known already, where it runs the same code in the same way."""
    for i in itertools.count(1):
        name = new.name if i == 1 else f"{new.name} ({i})"
        known = CALLS.setdefault(name, new)
        if known is new:
            new.name = name
        if known is new or (known.same_signature(new) and known.call.is_like(new.call)):
            return known
    raise AssertionError


def _draw(tracer: Tracer) -> Var:
    key, site = tracer.draw()
    folded: Var = o.fold_in(key, data=site)
    return folded


def _text(reason: BaseException | None) -> str:
    if reason is None:
        return "marked as one"
    return reason.what if isinstance(reason, CaptureError) else f"{type(reason).__name__}: {reason}"


def _warn(known: PythonCall, reason: BaseException) -> None:
    """Once for a line and a reason."""
    at = f"{reason.file}:{reason.line}" if isinstance(reason, CaptureError) and reason.file else known.source
    if (at, known.reason) in _WARNED:
        return
    text = f"\n            {reason.text}" if isinstance(reason, CaptureError) and reason.text else ""
    hint = f"\n  try       {reason.hint}" if isinstance(reason, CaptureError) and reason.hint else ""
    warnings.warn(
        f"{known.name} runs as plain Python, apart from the rest of the program: {known.reason}\n"
        f"  at        {at}{text}{hint}; strict=True refuses it",
        stacklevel=2,
    )
    _WARNED.add((at, known.reason))
