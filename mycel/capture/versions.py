"""Has any of these objects been changed since it was looked at last?

Nearly all that a guard looks at lies in dicts: attributes, parameters, submodules and hooks of modules, class
attributes.  CPython gives a dict another version with every change (PEP 509), a number beside its length.  And of a
tensor, whoever holds it may change shape, dtype and device (`p.data = other`); these lie in a few words of it:

    PyDictObject   refcount  type  used  VERSION  …
    Tensor         refcount  type  IMPL  …              impl   …  DIMS  SIZES…  strides…  …  DTYPE, DEVICE  …

So one gather of some words of memory, compared with those of the last time, stands for the values of all of them.
An object may be given another dict (`thing.__dict__ = other`): the word that points to it is one more.  Where the words
are is found out by looking at objects that are known (`_version_word`, `_tensor_words`), and that every kind of change
shows in them is tried, when this file is imported.  Where it does not hold (other interpreters, other versions of
torch), `DICTS_TELL` or `TENSORS_TELL` is false, and guards ask for the values at every call.
"""

from __future__ import annotations

import ctypes
import gc
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

WORD = 8  # bytes
OBJECT = 6  # words of a dict or a tensor that are looked through
IMPL = 24  # words of torch's own record of a tensor that are looked through: it has 25 or 26
MANAGED = -3  # the word before an object that points to its dict, where CPython keeps that itself …
MANAGED_FLAG = 1 << 4  # … which a flag of its type tells
INLINE = 5  # dims of a tensor whose sizes lie in its record
TRIALS = 9


class Words:
    """Called, it gives the words at these addresses as bytes; `holders` keep the memory theirs."""

    def __init__(self, addresses: Sequence[int], holders: Any) -> None:
        self.holders = holders
        at = np.array(addresses, dtype=np.int64)
        first = int(at.min())
        words = (int(at.max()) - first) // WORD + 1
        self._memory = np.ctypeslib.as_array((ctypes.c_int64 * words).from_address(first))
        self._at = (at - first) // WORD

    def __call__(self) -> bytes:
        return self._memory[self._at].tobytes()


def dict_versions(dicts: Iterable[dict[Any, Any]], things: Iterable[Any] = ()) -> Words:
    """Equal bytes: none of the dicts changed, and no thing was given another one."""
    held, owners = ([*{id(x): x for x in some}.values()] for some in (dicts, things))
    words = [id(d) + DICT_VERSION * WORD for d in held]
    words += [word for thing in owners if (word := dict_word(thing)) is not None]
    return Words(words, (held, owners))


def dict_word(thing: Any) -> int | None:
    """The address of the word that points to an object's dict; None where it is not known."""
    offset = type(thing).__dictoffset__
    word = id(thing) + (offset if offset > 0 else MANAGED * WORD)
    managed = offset < 0 and type(thing).__flags__ & MANAGED_FLAG
    return word if (offset > 0 or managed) and _word(word) == id(thing.__dict__) else None


class TensorTypes:
    """Have all these tensors the shapes, dtypes and devices they had?"""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        assert LAYOUT is not None
        self._objects = Words([id(x) + LAYOUT.impl * WORD for x in tensors], tensors)
        self._pointers = self._objects()
        self._records = Words([address for x in tensors for address in LAYOUT.addresses(x)], tensors)
        self._types = self._records()

    def changed(self) -> bool:
        """Records are looked at where they still are the tensors' own."""
        return self._objects() != self._pointers or self._records() != self._types


def dict_of(container: Any) -> dict[Any, Any] | None:
    """The dict whose version tells of the container's items, if there is one."""
    if isinstance(container, types.MappingProxyType):  # of a class
        (container,) = gc.get_referents(container)
    if not isinstance(container, dict) or "__builtins__" in container:  # a script binds its globals all the time
        return None
    return container


def is_plain(x: torch.Tensor) -> bool:
    """A tensor whose type lies in the words of its record."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided and x.ndim <= INLINE


@dataclass(frozen=True)
class TensorLayout:
    """Which words: of the Python object the one that points to the record, of the record the number of dims (sizes
    follow it), and those that differ between dtypes or devices."""

    impl: int
    dims: int
    types: tuple[int, ...]

    def addresses(self, x: torch.Tensor) -> list[int]:
        """In the record."""
        words = [*range(self.dims, self.dims + 1 + x.ndim), *self.types]
        return [x._cdata + word * WORD for word in words]


def _read(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def _version_word() -> int:
    """The word of a dict that changes when an item is replaced by another: 0 if it is not one alone."""
    thing = {"a": 0}
    before = _read(id(thing), OBJECT)
    thing["a"] = 1
    after = _read(id(thing), OBJECT)
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 else 0


def _tensor_words() -> TensorLayout | None:
    """Where a tensor has its type: found by sizes that nothing else is likely to be."""
    sizes = (1237, 1327, 1429, 1523, 1613)
    known = torch.empty(sizes, device="meta")
    own, record = _read(id(known), OBJECT), _read(known._cdata, IMPL)
    impl = [i for i in range(2, OBJECT) if own[i] == known._cdata]
    dims = [i for i in range(IMPL - INLINE) if tuple(record[i : i + 1 + INLINE]) == (INLINE, *sizes)]
    if len(impl) != 1 or len(dims) != 1:
        return None
    behind = range(dims[0] + 1 + 2 * INLINE, IMPL)  # sizes and strides
    types = sorted({i for i in behind if i in _words_of_dtype() or i in _words_of_device()})
    return TensorLayout(impl[0], dims[0], tuple(types))


def _words_of_dtype() -> set[int]:
    """Those of a record that change with its dtype alone.  Of one record: bits that nobody has set stay as they are."""
    x = torch.empty(2)
    before = _read(x._cdata, IMPL)
    x.data = torch.empty(2, dtype=torch.int32)
    return {i for i, (a, b) in enumerate(zip(before, _read(x._cdata, IMPL), strict=True)) if a != b}


def _words_of_device() -> set[int]:
    """Those that all tensors of a device have in common, and none of another."""
    here, there = ([torch.empty(2, device=d) for _ in range(TRIALS)] for d in ("cpu", "meta"))
    one, other = (
        [set(words) for words in zip(*(_read(x._cdata, IMPL) for x in some), strict=True)] for some in (here, there)
    )
    return {i for i, (a, b) in enumerate(zip(one, other, strict=True)) if len(a) == len(b) == 1 and a != b}


def _dicts_tell() -> bool:
    class Thing:
        kept = 0

    thing = Thing()
    setattr(thing, "a", 0)  # noqa: B010 (no attribute that its class declares)
    held, of_class = vars(thing), dict_of(vars(Thing))
    if not DICT_VERSION or of_class is None:
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
        lambda: setattr(thing, "__dict__", {"a": 6}),
    ]
    versions = dict_versions([held, of_class], [thing])
    for change in changes:
        before = versions()
        if before != versions():
            return False
        change()
        if before == versions():
            return False
    return True


def _tensors_tell() -> bool:
    if LAYOUT is None:
        return False
    x = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    others = [torch.zeros(3, 2), torch.zeros(6), torch.zeros(2), torch.zeros(2).int(), torch.zeros(2).half()]
    for other in others:  # other sizes, then dtypes alone
        held = TensorTypes([x])
        if held.changed():
            return False
        x.data = other
        if not held.changed():
            return False
    types = [[*map(_word, LAYOUT.addresses(y))] for y in (torch.zeros(2), torch.zeros(2, device="meta"))]
    return types[0] != types[1]


def _word(address: int) -> int:
    return _read(address, 1)[0]


DICT_VERSION = _version_word()
LAYOUT = _tensor_words()
DICTS_TELL = _dicts_tell()
TENSORS_TELL = _tensors_tell()
