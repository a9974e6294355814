"""The fence around capture: where the user's code is, and how what cannot be captured is refused."""

from __future__ import annotations

import functools
import linecache
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch

import mycel
from mycel.errors import CaptureError

_OURS = tuple(os.path.dirname(os.path.abspath(m.__file__)) + os.sep for m in (torch, mycel) if m.__file__)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
# torch's own code that is rewritten where it decides on tensors
_TORCH_DECIDES = (os.path.join(_TORCH, "distributions", ""), os.path.join(_TORCH, "optim", "swa_utils.py"))
_STDLIB = sysconfig.get_paths()["stdlib"]
_PACKAGES = sorted({sysconfig.get_paths()["purelib"], *site.getsitepackages()}, key=len, reverse=True)


@functools.cache
def _is_user(code: CodeType) -> bool:
    """Not torch's, not ours, not the standard library's, not generated for a frozen import."""
    path = code.co_filename
    if path.startswith(_OURS) or path.startswith("<frozen"):
        return False
    return not path.startswith(_STDLIB + os.sep) or path.startswith(tuple(_PACKAGES))


@functools.cache
def is_library(path: str) -> bool:
    """Installed code, the standard library's, ours: called as it is."""
    return path.startswith((*_OURS, *(p + os.sep for p in (_STDLIB, *_PACKAGES)), "<frozen"))


WHY_NOT: dict[CodeType, str] = {}  # functions of the user that could not be rewritten
OPENED: set[CodeType] = set()  # functions of libraries that are rewritten as the user's are: they decide on tensors


OPENED_METHODS: WeakKeyDictionary[type, set[str]] = WeakKeyDictionary()  # … and what Python itself calls on the way
REWRITTEN: dict[int, CodeType] = {}  # code that is rewritten, by id


def _open_code() -> None:
    """The functions of libraries that lead here (of torch's own, a few alone) are rewritten from now on,
    and so are the properties, operators and other methods that Python called as they are."""
    for frame in _captured_frames():
        path = frame.f_code.co_filename
        is_user = _is_user(frame.f_code)
        if path.startswith(_TORCH_DECIDES) or (is_user and is_library(path)):
            OPENED.add(frame.f_code)
        if is_user and id(frame.f_code) not in REWRITTEN and frame.f_code not in WHY_NOT:
            for kind, name in _methods(frame):
                OPENED_METHODS.setdefault(kind, set()).add(name)


def _captured_frames() -> list[FrameType]:
    """The frames from here to the call that is captured."""
    frames, end = [], 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        end = len(frames) if frame.f_code.co_filename == _CAPTURE else end
        frame = frame.f_back
    return frames[:end]


_CAPTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "function.py")


def _methods(frame: FrameType) -> Iterator[tuple[type, str]]:
    """Where the code of a frame is a method or a property: the classes, and its name in each."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    for kind in type(first).__mro__ if first is not None else ():
        for name, value in [*vars(kind).items()]:
            if getattr(function_of(value), "__code__", None) is code:
                yield kind, name


def function_of(method: Any) -> Any:
    """The function behind a method or a property of a class."""
    if isinstance(method, property):
        return method.fget
    return method.func if isinstance(method, functools.cached_property) else method


def opened() -> int:
    """How much there is that is rewritten because of what it decides on."""
    return len(OPENED) + sum(map(len, OPENED_METHODS.values()))


def user_frame() -> FrameType | None:
    """The innermost frame of user code (a model library counts as user code)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user(frame.f_code):
        frame = frame.f_back
    return frame


def here() -> tuple[str, int]:
    """The user's file and line, as equations show it, and how deep its frame is: not which, since addresses differ from
    run to run."""
    frame = user_frame()
    if frame is None:
        return "", 0
    return _text((frame.f_code.co_filename, frame.f_lineno)), _depth(frame)


def raised_at(error: BaseException) -> str:
    """The innermost line of the user's code that an exception passed."""
    lines = [(f.f_code, n) for f, n in traceback.walk_tb(error.__traceback__) if _is_user(f.f_code)]
    return _text((lines[-1][0].co_filename, lines[-1][1])) if lines else ""


def _text(place: tuple[str, int]) -> str:
    """A file and a line, as equations show them."""
    text = _TEXTS.get(place)
    if text is None:
        text = _TEXTS[place] = f"{short_path(place[0])}:{place[1]}"
        SOURCES[text] = place
    return text


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


SOURCES: dict[str, tuple[str, int]] = {}  # "model.py:31" -> the file's path and the line
_TEXTS: dict[tuple[str, int], str] = {}


@functools.cache
def short_path(path: str) -> str:
    """Relative to the package folder or the working directory, so that text does not depend on the machine."""
    for root in (*_PACKAGES, os.getcwd()):
        if path.startswith(root + os.sep):
            return path[len(root) + 1 :]
    return os.path.basename(path)


def refuse(what: str, hint: str = "", source: str = "") -> CaptureError:
    """A CaptureError for the user's current line, or for the line of an equation."""
    frame = user_frame()
    if frame is None:
        return CaptureError(what, hint=hint)
    file, line = SOURCES.get(source) or (frame.f_code.co_filename, frame.f_lineno)
    return CaptureError(what, file=file, line=line, text=linecache.getline(file, line).strip(), hint=hint)


READS = {
    "item": "a Python number was asked of",
    "tolist": "a Python list was asked of",
    "numpy": "a NumPy array was asked of",
    "__array__": "a NumPy array was asked of",
    "__bool__": "a Python decision (if, while, and, or, not, assert) was asked of",
    "__int__": "a Python int was asked of",
    "__float__": "a Python float was asked of",
    "__complex__": "a Python complex was asked of",
    "__index__": "a Python index was asked of",
    "__round__": "a rounded Python number was asked of",
    "__contains__": "membership was asked of",
    "__format__": "text was asked of",
    "__repr__": "text was asked of",
    "data_ptr": "the address was asked of",
    "__hash__": "a set or a dict looks for the value of",
}


EXPERTS = "for a loop over experts and the tokens of each: mycel.experts(x, ids, weights, up, down, gate=…); "


def refuse_read(name: str, source: str = "", routed: bool = False) -> CaptureError:
    """Reading the value of a traced tensor, on the user's current line or that of an equation.  Where a library decides
    by it, it is captured once more, rewritten.  `routed`: in code that chooses experts, as it seems."""
    if name == "__bool__":
        _open_code()
        hint = _decision_hint()
    else:
        hint = (
            "keep it a tensor (0-dim tensors index, compare and multiply), or compute it outside and pass it as an "
            "argument"
        )
        hint = EXPERTS + hint if routed and name not in ("__format__", "__repr__") else hint
    what = f"{READS[name]} a traced tensor, whose value is not known while the program is captured"
    return refuse(what, hint, source)


def _decision_hint() -> str:
    """Why this decision on a tensor was not captured as one."""
    frame = user_frame()
    code = frame.f_code if frame is not None else None
    if code is not None and code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"):
        return "a for loop: conditions inside comprehensions are not captured; or torch.where"
    if code is not None and code in WHY_NOT:
        return f"torch.where: the control flow of {code.co_name} is not captured, because {WHY_NOT[code]}"
    if code is not None and is_library(code.co_filename):
        return "torch.where, or a copy of this function in your own code: this one cannot be rewritten"
    return (
        "torch.where, or a function or method for the decision: what Python or torch calls by itself (properties, "
        "operators, hooks) stays as it is"
    )


def refuse_dynamic(name: str, routed: bool = False) -> CaptureError:
    """An operator whose output shape depends on values; `routed`: in code that chooses experts, as it seems."""
    hint = "torch.where(mask, x, 0) or masked_fill instead of x[mask]; topk instead of nonzero"
    what = f"{name} has a shape that depends on the values of its input; a program has static shapes"
    return refuse(what, EXPERTS + hint if routed else hint)
