"""print in captured code: tensors, and text made of them, are printed when the program runs.

    print(f"loss {loss}", [x.sum()])        show(loss, x_sum, parts=("loss ", 0, " ", "[", 1, "]"), …)

While code is captured the text of a tensor is one that stands for it (`Traced.as_text`), and is found in what is
printed.
"""

from __future__ import annotations

import builtins
import re
from typing import Any

import torch

from mycel.capture.fence import refuse_read
from mycel.capture.record import Traced
from mycel.capture.trace import TRACING, Tracer
from mycel.ops import o


def traced_print(*args: Any, sep: str | None = None, end: str | None = None, **rest: Any) -> None:
    """print: of traced tensors, and of text made of them, when the program runs; of all else now."""
    if not TRACING:
        return builtins.print(*args, sep=sep, end=end, **rest)
    tracer, between = TRACING[-1], " " if sep is None else sep
    tracer.here()
    values: list[tuple[Any, str]] = []  # and how they are written
    pieces = [_pieces(tracer, arg, values) for arg in args]
    if not values:
        return builtins.print(*args, sep=sep, end=end, **rest)
    if rest:
        raise refuse_read("__format__")
    parts = [p for i, some in enumerate(pieces) for p in ([between] * bool(i) + some)]
    if all(len(some) == 1 for some in pieces):
        parts = [p for some in pieces for p in some]
    else:
        between = ""
    forms = tuple(form for _, form in values)
    shown = {"forms": forms} if {*forms} != {"text"} else {}
    with tracer:
        o.show(*(v for v, _ in values), parts=tuple(parts), sep=between, end="\n" if end is None else end, **shown)


def _pieces(tracer: Tracer, arg: Any, values: list[tuple[Any, str]]) -> list[Any]:
    """What is printed of an argument: text, and numbers of values, which are added to `values`."""
    if isinstance(arg, torch.Tensor):
        values.append((tracer.cell(arg).read(), "number" if type(arg) is Traced and arg.weak else "text"))
        return [len(values) - 1]
    pieces: list[Any] = []
    for text in re.split(r"(Traced\(\d+: \S+\))", str(arg)):  # as `Traced.as_text` writes it
        if text in tracer.texts and tracer.texts[text][0] not in tracer.closed:
            values.append(tracer.texts[text])
            pieces.append(len(values) - 1)
        elif text or not pieces:
            pieces.append(text)
    return pieces
