"""Has any of these dicts been changed since it was looked at last?

Nearly all that a guard looks at lies in dicts: attributes, parameters, submodules and hooks of modules, class
attributes.  CPython gives a dict another version with every change (PEP 509), a number beside its length:

    PyDictObject   refcount   type   used   version   …
                                            └ word 3

so one gather of one word of each dict, compared with the words of the last time, stands for the values of all of them.
An interpreter whose dicts have no such word (`TELLS` is false) is asked for the values at every call.
"""

from __future__ import annotations

import ctypes
import gc
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

WORD = 8  # bytes
VERSION = 3  # words before it


class DictVersions:
    """Called, it gives the versions of all the dicts as bytes: equal bytes, nothing changed."""

    def __init__(self, dicts: Iterable[dict[Any, Any]]) -> None:
        self.dicts = [*{id(d): d for d in dicts}.values()]  # alive, so that their memory is theirs
        addresses = np.array([id(d) for d in self.dicts], dtype=np.int64)
        first = int(addresses.min())
        words = (int(addresses.max()) - first) // WORD + VERSION + 1
        self._memory = np.ctypeslib.as_array((ctypes.c_int64 * words).from_address(first))
        self._at = (addresses - first) // WORD + VERSION

    def __call__(self) -> bytes:
        return self._memory[self._at].tobytes()


def dict_of(container: Any) -> dict[Any, Any] | None:
    """The dict whose version tells of the container's items, if there is one."""
    if isinstance(container, types.MappingProxyType):  # of a class
        (container,) = gc.get_referents(container)
    if not isinstance(container, dict) or "__builtins__" in container:  # a script binds its globals all the time
        return None
    return container


def _tells() -> bool:
    """Does every way to change a dict change the word?"""

    class Thing:
        kept = 0

    thing = Thing()
    thing.a = 0  # type: ignore[attr-defined]
    held, of_class = vars(thing), dict_of(vars(Thing))
    if of_class is None:
        return False
    changes: list[Callable[[], Any]] = [
        lambda: setattr(thing, "a", 1),
        lambda: setattr(Thing, "kept", 1),
        lambda: held.__setitem__("a", 2),
        lambda: held.update(a=3),
        lambda: held.setdefault("b", 4),
        lambda: held.pop("b"),
        lambda: delattr(thing, "a"),
        lambda: held.__ior__({"c": 5}),
        lambda: held.clear(),
    ]
    versions = DictVersions([held, of_class])
    for change in changes:
        before = versions()
        if before != versions():
            return False
        change()
        if before == versions():
            return False
    return True


TELLS = _tells()
