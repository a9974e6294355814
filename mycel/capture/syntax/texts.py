"""Rewritten code that makes text, and code that is given some: where values of traced tensors are in it, it is
`TracedText`, which Python alone would make plain text of."""

from __future__ import annotations

import builtins
import decimal
import fractions
import functools
import logging
import operator
import pathlib
import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from mycel.capture.fence import is_library
from mycel.capture.trace import TRACING
from mycel.capture.traced_text import TracedText, holds_text, marked, refuse_text


def as_text(value: str) -> str:
    """An f-string."""
    return marked(TRACING[-1], value) if TRACING else value


def remainder(left: Any, right: Any) -> Any:
    """left % right"""
    value = operator.mod(left, right)
    return as_text(value) if type(value) is str else value


def is_text_method(fn: Any) -> bool:
    """A method of plain text that puts text together."""
    return isinstance(fn, types.BuiltinMethodType) and type(fn.__self__) is str and fn.__name__ in _PUT_TOGETHER


def with_text(plain: Callable[..., str]) -> Callable[..., str]:
    """A function that puts text together."""
    return lambda *args, **kwargs: as_text(plain(*args, **kwargs))


def is_inside(part: Any, whole: Any) -> bool:
    """part in whole"""
    if type(part) is TracedText and isinstance(whole, str) and part.record.running:
        raise refuse_text("in")
    return part in whole


def without_text(fn: Any) -> Any:
    """A function that is not rewritten, and would look into text that it is given: it is given none of tensors."""
    if not _looks(fn):
        return fn

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if TRACING and TRACING[-1].texts and (holds_text(args) or holds_text(kwargs)):
            raise refuse_text(getattr(fn, "__name__", type(fn).__name__))
        return fn(*args, **kwargs)

    return call


def _looks(fn: Any) -> bool:
    if isinstance(fn, type):
        return issubclass(fn, _PARSERS)
    owner = getattr(fn, "__self__", None)
    if isinstance(fn, types.BuiltinFunctionType):
        if isinstance(owner, types.ModuleType):
            return owner.__name__.partition(".")[0] != "torch" and (owner is not builtins or fn.__name__ in _READERS)
        return isinstance(owner, re.Pattern)
    function = getattr(fn, "__func__", fn)
    if not isinstance(function, types.FunctionType) or isinstance(owner, (torch.Tensor, torch.nn.Module)):
        return False
    is_known = (function.__module__ or "").partition(".")[0] in _KNOWN or isinstance(owner, _LOGS)
    return not is_known and is_library(function.__code__.co_filename)


_PUT_TOGETHER = ("join", "format", "format_map")
_READERS = ("ord", "eval", "exec", "compile", "open")
_PARSERS = (complex, bytes, bytearray, decimal.Decimal, fractions.Fraction, pathlib.PurePath)
_KNOWN = ("torch", "mycel", "logging", "warnings", "copy", "dataclasses", "contextlib")
_LOGS = (logging.Logger, logging.LoggerAdapter, warnings.catch_warnings)
MAKERS: dict[Any, Callable[..., str]] = {plain: with_text(plain) for plain in (str, repr, format, ascii)}
