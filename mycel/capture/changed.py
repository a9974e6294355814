"""Why code that was captured is captured again, in words: `scale is 2.0 and was 1.0`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from mycel.capture.function import Captured
from mycel.capture.locations import Guarded, holds
from mycel.capture.tree import flatten_arguments
from mycel.ir import type_of

MOST = 3  # reasons that are told
SHOWN = 40  # letters of a value


def changed(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What no longer is as it was; nothing where that is not known."""
    return ", ".join(islice(_reasons(captured, args, kwargs), MOST))


def _reasons(captured: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    yield from (_moved(s) for s in captured.statics if not holds(s))
    types = {v.name: v.type for v in captured.program.inputs}
    leaves: list[torch.Tensor] = []
    if flatten_arguments((args, kwargs), leaves) != captured.arguments:
        yield "arguments are others"
    else:
        for name, x in zip(captured.leaves, leaves, strict=True):
            if type_of(x) != types[name]:
                yield f"{name} is {type_of(x)} and was {types[name]}"
    if any(len(container) != size for container, size in captured.sizes):
        yield "an object, list or dict that it reads has more or less in it"
    yield from (f"{link.place.name} is another object" for link in captured.links if not holds(link))
    for inside in captured.inside:
        if not inside.holds():
            yield f"{inside.part.name} no longer lies in the memory of {inside.whole.name} as it did"


def _moved(static: Guarded) -> str:
    try:
        now = repr(static.place.read())
    except (KeyError, IndexError, ValueError, AttributeError):
        return f"{static.place.name} is gone"
    return f"{static.place.name} is {_short(now)} and was {_short(repr(static.value))}"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
