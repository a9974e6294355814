"""Text of tensors in captured code: what is printed, logged or warned of is said when the program runs.

    print(f"loss {loss}", [x.sum()])        show(loss, x_sum, parts=("loss ", 0, " ", "[", 1, "]"), …)
    logger.info("loss %s", loss)            write_log(loss, parts=("loss ", 0), logger="…", level=20, …)

While code is captured the text of a tensor is one that stands for it (`Record.text_of`), and is found in what is said,
and in what is returned.
"""

from __future__ import annotations

import builtins
import logging
import os
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from mycel.capture.fence import is_library, refuse, refuse_read, user_frame
from mycel.capture.nested import is_inside
from mycel.capture.record import Traced
from mycel.capture.trace import TRACING, Tracer, is_traced_here
from mycel.capture.traced_text import PATTERN, TextOf
from mycel.capture.tree import LEAF, Tree
from mycel.errors import CaptureError
from mycel.ops import o

_plain_print: Any = builtins.print


def traced_print(
    *args: Any, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
) -> None:
    """print: when the program runs; into a file now, where no traced tensors are in what is printed."""
    if not is_traced_here():
        return _plain_print(*args, sep=sep, end=end, file=file, flush=flush)
    tracer, between = TRACING[-1], " " if sep is None else sep
    tracer.here()
    values: list[TextOf] = []
    pieces = [pieces_of(tracer, arg, values) for arg in args]
    stream = "stdout" if file is None else _name_of(file)
    if not values and (stream is None or tracer.says_now):
        return _plain_print(*args, sep=sep, end=end, file=file, flush=flush)
    if stream is None:
        raise refuse_read("__format__")
    parts = [p for i, some in enumerate(pieces) for p in ([between] * bool(i) + some)]
    if all(len(some) == 1 for some in pieces):
        parts = [p for some in pieces for p in some]
    else:
        between = ""
    with tracer:
        o.show(
            *(value.var for value in values),
            parts=tuple(parts),
            sep=between,
            end="\n" if end is None else end,
            **_forms(values),
            **({"stream": stream} if stream != "stdout" else {}),
            **({"flush": True} if flush else {}),
        )


def _name_of(file: Any) -> str | None:
    """One of Python's own streams, whichever file that is at the time."""
    return next((name for name in ("stdout", "stderr") if getattr(sys, name) is file), None)


def _forms(values: Sequence[TextOf]) -> dict[str, Any]:
    """How values are written, where not all as tensors are."""
    forms = tuple(value.form for value in values)
    return {"forms": forms} if {*forms} != {"text"} else {}


def pieces_of(tracer: Tracer, arg: Any, values: list[TextOf]) -> list[Any]:
    """What is said of an argument: text, and numbers of values, which are added to `values`."""
    if type(arg) is Traced:
        values.append(TextOf(tracer.cell(arg).read(), "number" if arg.weak else "text", tracer.source))
        return [len(values) - 1]
    pieces: list[Any] = []
    for i, text in enumerate(PATTERN.split(str(arg))):
        value = tracer.texts.get(text)
        if i % 2 and (value is None or value.var in tracer.closed):
            raise refuse(
                "text of a tensor that was made in a branch, a loop or another function's derivative is used outside",
                "keep the tensor, and make text of it where it is used",
                value.source if value is not None else "",
            )
        if value is not None:
            values.append(value)
            pieces.append(len(values) - 1)
        elif text or not pieces:
            pieces.append(text)
    return pieces


def with_texts(tracer: Tracer, tree: Tree, values: Iterator[Any], everything: list[tuple[Any, bool]]) -> Tree:
    """What is returned, with text of traced tensors as such; `values` (and are they copies?) are those of its leaves,
    and are added to `everything` with those that text is of."""
    if tree.kind in ("leaf", "number"):
        everything.append(next(values))
        return tree
    texts: list[TextOf] = []
    parts = pieces_of(tracer, tree.key, texts) if tree.kind == "static" and isinstance(tree.key, str) else []
    if texts:
        everything += [(value.var, False) for value in texts]
        return Tree("text", (tuple(parts), tuple(value.form for value in texts)), (LEAF,) * len(texts))
    return Tree(tree.kind, tree.key, tuple(with_texts(tracer, c, values, everything) for c in tree.children))


def traced_write(plain: Callable[[Any], Any], text: Any) -> Any:
    """write and writelines of a file: text of traced tensors is refused."""
    values: list[TextOf] = []
    pieces_of(TRACING[-1], text, values)
    if values:
        raise refuse_read("__format__")
    return plain(text)


def traced_handle(plain: Callable[..., None]) -> Callable[..., None]:
    """Logger.handle: of a record of the user's code, or with text of traced tensors, when the program runs; of all else
    now."""

    def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
        if not is_traced_here():
            return plain(logger, record)
        tracer = TRACING[-1]
        _name_line(record)
        try:
            text = record.getMessage()
        except CaptureError:
            raise
        except Exception:  # the user's own: logging says so
            return plain(logger, record)
        values: list[TextOf] = []
        parts = pieces_of(tracer, text, values)
        is_now = tracer.says_now or is_library(record.pathname)
        extra = vars(record).keys() - vars(logging.makeLogRecord({})).keys() - {"message"}
        if extra or record.exc_info or record.stack_info or logging.getLogger(logger.name) is not logger:
            if values:
                raise refuse_read("__format__")
            is_now = True
        if is_now and not values:
            return plain(logger, record)
        tracer.here()
        with tracer:
            o.write_log(
                *(value.var for value in values), parts=tuple(parts), logger=logger.name, level=record.levelno,
                file=record.pathname, line=record.lineno, function=record.funcName, **_forms(values),
            )  # fmt: skip
        return None

    return handle


def _name_line(record: logging.LogRecord) -> None:
    """A record of rewritten code is one of the user's line and function: not of what calls these, nor of a branch."""
    frame = user_frame()
    if frame is not None and _is_ours(record.pathname):
        where = (record.name, record.levelno, frame.f_code.co_filename, frame.f_lineno)
        known = logging.LogRecord(*where, "", (), None, frame.f_code.co_name)
        names = ("pathname", "filename", "module", "lineno", "funcName")
        vars(record).update({name: getattr(known, name) for name in names})
    while frame is not None and "@" in record.funcName:
        if "@" not in frame.f_code.co_name and not _is_ours(frame.f_code.co_filename):
            record.funcName = frame.f_code.co_name
        frame = frame.f_back


def _is_ours(path: str) -> bool:
    """Is it a file of this package?"""
    return path.startswith(_PACKAGE)


_PACKAGE = str(Path(__file__).parents[2]) + os.sep


_plain_warn: Any = warnings.warn


def traced_warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None) -> None:
    """warnings.warn: of text of traced tensors, or in a branch or a loop, when the program runs; of all else now."""
    values: list[TextOf] = []
    parts = pieces_of(TRACING[-1], message, values) if is_traced_here() else []
    if not values and (not is_traced_here() or not is_inside() or TRACING[-1].says_now):
        return _plain_warn(message, category, stacklevel + 1, source)
    tracer, frame = TRACING[-1], _caller(stacklevel)
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    name = f"{kind.__module__}:{kind.__qualname__}"
    if frame is None or source is not None or _resolved(name) is not kind:
        if not values:
            return _plain_warn(message, category, stacklevel + 1, source)
        raise refuse_read("__format__")
    tracer.here()
    with tracer:
        o.write_warning(
            *(value.var for value in values), parts=tuple(parts), category=name, file=frame.f_code.co_filename,
            line=frame.f_lineno, module=frame.f_globals.get("__name__", "<string>"), **_forms(values),
        )  # fmt: skip
    return None


def _caller(level: int) -> FrameType | None:
    """The frame so many calls above, this package's own apart."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame.f_code.co_filename):
            level -= 1
            if level <= 0:
                return frame
        frame = frame.f_back
    return None


def _resolved(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None
