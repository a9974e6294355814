"""Caches of keys and values as transformers has them: which of them a program can take.

static     its tensors have their size from the first call on and change in place: they are inputs of the program,
           and the cache may be another object at every call
growing    one that is longer at every call (DynamicCache), that keeps count in Python (sliding windows), or whose
           tensors are not made yet: code that is given it runs as it is
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any


def is_cache(value: Any) -> bool:
    """Is it transformers' cache?  Without transformers nothing is."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, module.Cache)


def is_static_cache(value: Any) -> bool:
    """Is it a cache whose tensors are there, and are only written in place?"""
    if not is_cache(value):
        return False
    layers = getattr(value, "layers", None) or ()
    plain = sys.modules["transformers.cache_utils"].StaticLayer
    return bool(layers) and all(type(layer) is plain and layer.is_initialized for layer in layers)


def growing(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The caches among arguments that no program takes."""
    return (value for value in (*args, *kwargs.values()) if is_cache(value) and not is_static_cache(value))
