"""What rewritten code calls: each statement on Python values is what Python does; on traced tensors it is captured.

A tensor whose value is known while tracing (it depends on no input) counts as a Python value.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mycel.capture.branches import check as traced_check
from mycel.capture.branches import refuse_caught
from mycel.capture.syntax.decisions import both, branch, choose, compare, decide, either, negate
from mycel.capture.syntax.list_places import subscripted
from mycel.capture.syntax.load import method_twin, twin
from mycel.capture.syntax.loop_statements import comprehend, each, generate, repeat
from mycel.capture.syntax.replaced_calls import GIVEN, call
from mycel.capture.syntax.rewrite import RUNTIME
from mycel.capture.syntax.texts import as_text, is_inside, remainder
from mycel.capture.trace import TRACING
from mycel.capture.trial import NoIslandError
from mycel.errors import CaptureError, MisfitError

__all__ = [
    "as_text", "attempt", "both", "branch", "call", "check", "choose", "compare", "comprehend", "each", "either",
    "enter", "generate", "is_inside", "negate", "raised", "refusals", "remainder", "repeat", "rewritten_forward",
    "rewritten_method", "subscripted",
]  # fmt: skip

GIVEN[RUNTIME] = sys.modules[__name__]


# -- assert, try, raise


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
    return method_twin(vars(kind)[name], GIVEN)


@contextlib.contextmanager
def rewritten_forward(module: torch.nn.Module) -> Iterator[None]:
    """A user's module calls the rewritten twin of its forward."""
    forward = module.forward
    new_forward = twin(forward, GIVEN)
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
