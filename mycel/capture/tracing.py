"""What is different while code is traced: torch's calls go to the tracer, module calls are seen, and the places where
torch or Python would ask for values are patched."""

from __future__ import annotations

import builtins
import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
from torch._functorch import predispatch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.utils.checkpoint import CheckpointFunction

from mycel.capture.autograd import traced_dual, traced_tangents
from mycel.capture.cumulative_norm import cumulative_forward
from mycel.capture.custom import trace_function
from mycel.capture.encoder import encoder_forward
from mycel.capture.experts import as_one_operator
from mycel.capture.fence import OPENED_METHODS, is_library, refuse
from mycel.capture.hooks import ModuleHooks
from mycel.capture.island import boundary, module_keys
from mycel.capture.modes import DispatchMode, FunctionMode
from mycel.capture.plain import suspended
from mycel.capture.skipped_masks import skipped_masks
from mycel.capture.syntax import rewritten_forward, rewritten_method
from mycel.capture.syntax.printing import traced_handle, traced_print, traced_warn
from mycel.capture.trace import TRACING, Patch, Tracer, is_traced_here


@contextlib.contextmanager
def traced_by(tracer: Tracer) -> Iterator[None]:
    """Everything torch does in here goes to the tracer; module calls are seen; code that asks is told it is being
    compiled."""
    plain = torch.nn.Module.__call__
    encoder = torch.nn.TransformerEncoder

    def traced_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module._backward_hooks and not module._is_full_backward_hook and torch.is_grad_enabled():
            raise refuse(f"{type(module).__name__} has a hook of register_backward_hook", "register_full_backward_hook")
        return boundary(tracer, module_keys(module), module, functools.partial(forward, module))(*args, **kwargs)

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with rewritten_forward(module):
            return tracer.module_call(plain, module, args, kwargs)

    was_compiling, was_caching = torch.compiler._is_compiling_flag, torch.is_autocast_cache_enabled()
    was_optimising = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)  # else torch.jit takes traced tensors for its profile
    torch.compiler._is_compiling_flag = True
    torch.set_autocast_cache_enabled(False)  # a cached cast would outlive the capture, or come from before it
    tracer.patches = [
        Patch(torch.nn.Module, "__call__", traced_call),
        Patch(torch.nn.modules.transformer, "_detect_is_causal_mask", _is_said_causal),
        Patch(encoder, "forward", encoder_forward(encoder.forward)),
        # one program for all ranks: statistics are the whole batch's, and SyncBatchNorm is a batch norm
        *(Patch(kind, "forward", cumulative_forward(_BatchNorm.forward)) for kind in (_BatchNorm, SyncBatchNorm)),
        Patch(torch.nn.modules.module, "BackwardHook", ModuleHooks),
        Patch(_Applied, "apply", classmethod(_traced_apply)),
        Patch(predispatch, "_make_dual", _make_dual),
        Patch(predispatch, "_unpack_dual", _unpack_dual),
        Patch(predispatch, "_exit_dual_level", _exit_dual_level),
        Patch(os._Environ, "__getitem__", _noted_read(os._Environ.__getitem__)),
        Patch(torch, "from_numpy", _of_tensors(torch.from_numpy)),
        Patch(_IMPORTS, "_find_and_load", _plain_import(_IMPORTS._find_and_load)),
        Patch(logging.Logger, "handle", traced_handle(logging.Logger.handle)),
        Patch(logging.Logger, "isEnabledFor", _noted_level(logging.Logger.isEnabledFor)),
        Patch(logging.Logger, "getEffectiveLevel", _noted_level(logging.Logger.getEffectiveLevel)),
        Patch(warnings, "warn", traced_warn),
        Patch(builtins, "print", traced_print),
        *skipped_masks(),
        *(Patch(kind, name, rewritten_method(kind, name)) for kind, names in OPENED_METHODS.items() for name in names),
        *(Patch(kind, "__call__", _unprofiled(kind.__call__)) for kind in _SCRIPTED),
        *(Patch(torch, name, _no_seed(name)) for name in (() if tracer.is_strict else SEEDS)),
    ]
    for patch in tracer.patches:
        patch.set()
    tracer.mode = DispatchMode(tracer)
    TRACING.append(tracer)
    try:
        with (
            torch.enable_grad(),
            _uncompiled(),
            as_one_operator(),
            torch._C._AutoDispatchBelowAutograd(),
            tracer.mode,
            FunctionMode(tracer),
        ):
            yield
    finally:
        for patch in reversed(tracer.patches):
            patch.unset()
        torch.compiler._is_compiling_flag = was_compiling
        torch.set_autocast_cache_enabled(was_caching)
        torch._C._set_graph_executor_optimize(was_optimising)
        TRACING.pop()
        tracer.running = False


# What `apply` of every Function calls: here, so that an alias of it (`f = MyFn.apply`) made before the capture is seen.
_Applied: Any = torch.autograd.function._SingleLevelFunction


_IMPORTS: Any = sys.modules["_frozen_importlib"]


def _plain_import(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A module that captured code is the first to import is no part of the program: its tensors are real ones."""

    def load(*args: Any) -> Any:
        with suspended():
            return plain(*args)

    return load


def _of_tensors(plain: Callable[..., torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    """torch.from_numpy; an array that is an argument is a tensor already."""
    return lambda array: array if isinstance(array, torch.Tensor) else plain(array)


_SCRIPTED: Any = (torch.jit.ScriptFunction, torch._C.ScriptMethod)


def _unprofiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A call of torch.jit: as it was written, not as torch would run it by what it saw before (it detaches there)."""

    def call(fn: Any, *args: Any, **kwargs: Any) -> Any:
        fn._debug_flush_compilation_cache()
        return plain(fn, *args, **kwargs)

    return call


SEEDS = ("manual_seed", "seed", "set_rng_state")


def _no_seed(name: str) -> Callable[..., NoReturn]:
    """What sets the state of torch's generator: numbers drawn after it are no draws of the program's key, where code
    may stay Python."""

    def seed(*args: Any) -> NoReturn:
        raise refuse(
            f"torch.{name} sets the state of a generator of random numbers, and a program has none",
            "drawing these numbers outside and passing them as an argument",
        )

    return seed


def _is_asked_by_user(*on_the_way: str) -> bool:
    """Does the user's code ask, by way of these modules?"""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in on_the_way and not module.startswith("mycel."):
            break
        frame = frame.f_back
    return frame is not None and not is_library(frame.f_code.co_filename)


def _noted_level(plain: Callable[..., int]) -> Callable[..., int]:
    """isEnabledFor and getEffectiveLevel of a logger: asked by the user's code, they are part of the signature."""

    def ask(logger: logging.Logger, *level: int) -> int:
        answer = plain(logger, *level)
        if is_traced_here() and _is_asked_by_user(*(["logging"] if level else [])):  # it asks itself for the other
            for tracer in TRACING:
                tracer.log_levels[logger, level[0] if level else None] = answer
        return answer

    return ask


def _noted_read(plain: Callable[..., str]) -> Callable[..., str]:
    """os.environ[name], and what goes by way of it: read by the user's code, it is part of the signature."""

    def read(self: Any, name: str) -> str:
        if _is_asked_by_user("os", "collections.abc"):
            for tracer in TRACING:
                tracer.environment[name] = self._data.get(self.encodekey(name)) and plain(self, name)
        return plain(self, name)

    return read


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """What torch.compile wraps runs as written."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _is_said_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """torch looks into a mask to see whether it is causal, a hint it can do without; our own pass finds causal
    masks."""
    return is_causal is True


def _traced_apply(cls: type[torch.autograd.Function], *args: Any) -> Any:
    """A torch.autograd.Function is a function with its own gradient; but checkpointing decides when to compute, not
    what."""
    if cls is CheckpointFunction:
        fn, _, *rest = args
        return fn(*rest)
    if cls.__module__ == CheckpointFunction.__module__:
        return cls.forward(*args)
    return trace_function(TRACING[-1], cls, args)


def _make_dual(x: torch.Tensor, tangent: torch.Tensor, level: int) -> Any:
    """torch.autograd.forward_ad.make_dual; inside transforms of torch.func it is their business."""
    plain = torch._C._functorch.maybe_current_level() is not None
    return torch._VF._make_dual(x, tangent, level=level) if plain else traced_dual(TRACING[-1], x, tangent)


def _unpack_dual(x: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    if torch._C._functorch.maybe_current_level() is not None:
        primal, tangent = torch._VF._unpack_dual(x, level=level)
        return primal, tangent
    tracer = TRACING[-1]
    (along,) = traced_tangents(tracer, [x], tracer.duals)
    return traced_dual(tracer, x), along


def _exit_dual_level(level: int) -> None:
    TRACING[-1].duals.clear()
    torch._C._exit_dual_level(level=level)
