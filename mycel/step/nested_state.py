"""Optimiser state that is more than tensors and numbers by name: lists of matrices (Shampoo's), tensors of a class of
their own (codes in 8 bits with their scales).

    {"roots": [a, None, b]}  ─▶  roots/0: a, roots/1: b;  {"roots": {"list": [{"tensor": "roots/0"}, null, …]}}

Tensors go where those of checkpoints go, what holds them together is JSON: nothing is pickled.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Tensors = dict[str, torch.Tensor]
SCALARS = (bool, int, float, str, type(None))


def is_plain(value: Any) -> bool:
    """Is it one tensor or number, which needs no description?"""
    return isinstance(value, SCALARS) or (isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value))


def flatten(value: Any, name: str) -> tuple[Tensors, Any]:
    """The tensors of a value, as NAME/0, NAME/1 …, and what it is besides them, for JSON; TypeError: it holds something
    that is neither."""
    tensors: Tensors = {}
    return tensors, _describe(value, name, tensors)


def _describe(value: Any, name: str, tensors: Tensors) -> Any:
    inner = lambda x: _describe(x, name, tensors)
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            return {
                "class": _class_name(type(value)), "tensors": {each: inner(getattr(value, each)) for each in names},
                "context": inner(context), "size": [*value.shape], "stride": [*value.stride()],
            }  # fmt: skip
        label = f"{name}/{len(tensors)}"
        tensors[label] = value
        return {"tensor": label}
    if type(value) in (list, tuple):
        return {type(value).__name__: [inner(x) for x in value]}
    if isinstance(value, Mapping):
        return {"dict": [[inner(k), inner(x)] for k, x in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(_class_name(type(value)))


def unflatten(described: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that `flatten` took apart; LookupError: its class of tensors is not loaded."""
    if not isinstance(described, dict):
        return described
    inner = lambda x: unflatten(x, tensors)
    if "class" in described:
        kind = next((k for k in _tensor_classes() if _class_name(k) == described["class"]), None)
        if kind is None:
            raise LookupError(described["class"])
        parts = {name: inner(x) for name, x in described["tensors"].items()}
        size, stride = torch.Size(described["size"]), tuple(described["stride"])
        return kind.__tensor_unflatten__(parts, inner(described["context"]), size, stride)
    ((form, content),) = described.items()
    match form:
        case "tensor":
            return tensors[content]
        case "dict":
            return {inner(k): inner(x) for k, x in content}
        case "dtype":
            return getattr(torch, content)
    return (tuple if form == "tuple" else list)(map(inner, content))


def copied(value: Any) -> Any:
    """A value with tensors of its own; classes of tensors need not know how to copy themselves."""
    try:
        tensors, described = flatten(value, "")
    except TypeError:
        return copy.deepcopy(value)
    return unflatten(described, {name: x.clone() for name, x in tensors.items()})


def _tensor_classes(kind: Any = torch.Tensor) -> Iterator[Any]:
    """Those that are loaded: what a file says is never imported."""
    for each in kind.__subclasses__():
        yield each
        yield from _tensor_classes(each)


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
