"""Which names a function's code reads and binds, those of the functions written inside it too."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Globals that a function and the functions written inside it look up or bind, each once; attributes may have the
    names of others."""
    names = [step.argval for step in dis.get_instructions(code) if step.opname in _OF_GLOBALS]
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in global_names(const)]
    return tuple(dict.fromkeys(names + inner))


_OF_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"})


def all_names(code: types.CodeType) -> Iterator[str]:
    """Names of globals and of attributes in a function and the functions written inside it."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from all_names(const)


def attribute_names(code: types.CodeType) -> Iterator[str]:
    """Attributes a function and the functions written inside it load, and texts that may be names."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield step.argval
    for const in code.co_consts:
        if isinstance(const, str):
            yield const
        elif isinstance(const, types.CodeType):
            yield from attribute_names(const)
