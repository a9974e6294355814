"""Code that runs as if nothing were captured, and what it did: operators it called, random numbers it drew."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mycel.capture.trace import PLAIN_KEYS, TRACING, Patch


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """In here torch, modules and rewritten code do what they do when nothing is captured."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    captures, TRACING[:] = TRACING[:], []
    patches = [p for capture in captures for p in capture.patches]
    for patch in reversed(patches):
        patch.unset()
    compiling, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
    try:
        with _disable_current_modes(), torch._C._ForceDispatchKeyGuard(*PLAIN_KEYS):
            yield
    finally:
        torch.compiler._is_compiling_flag = compiling
        for patch in patches:
            patch.set()
        TRACING[:] = captures
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """What code prints, logs and warns of in here is said when it runs in earnest."""
    thread, log = threading.get_ident(), logging.Logger.handle

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != thread:
            log(logger, record)

    patches = [
        Patch(logging.Logger, "handle", handle),
        # not by simplefilter, which makes Python forget what was warned of already
        Patch(warnings, "filters", [("ignore", None, Warning, None, 0)]),
    ]
    for patch in patches:
        patch.set()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for patch in patches:
            patch.unset()


class CountedOperators(TorchDispatchMode):
    """Counts operators, stops after `most` of them (values that were not meant may never converge), and notes those
    whose shapes are data."""

    def __init__(self, most: int = sys.maxsize) -> None:
        super().__init__()
        self.most, self.count, self.dynamic = most, 0, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, seconds, to wrap this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.dynamic = self.dynamic or torch.Tag.dynamic_output_shape in func.tags
        if self.count > self.most:
            raise RuntimeError("does not end")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def states_kept() -> Iterator[Callable[[], bool]]:
    """All generators are in here what they are afterwards; were they asked?"""
    numpy: Any = sys.modules.get("numpy")

    def now() -> tuple[Any, ...]:
        cuda = [x.clone() for x in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
        arrays = numpy.random.get_state() if numpy else None
        return torch.get_rng_state(), cuda, random.getstate(), arrays

    before = now()
    asked: list[bool] = []

    def drawn() -> bool:
        return asked[0]

    try:
        yield drawn
    finally:
        after = now()
        asked.append(
            not torch.equal(before[0], after[0])
            or any(not torch.equal(a, b) for a, b in zip(before[1], after[1], strict=False))
            or before[2] != after[2]
            or repr(before[3]) != repr(after[3])
        )
        torch.set_rng_state(before[0])
        if before[1]:
            torch.cuda.set_rng_state_all(before[1])
        random.setstate(before[2])
        if numpy:
            numpy.random.set_state(before[3])
