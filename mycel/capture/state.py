"""Tensors the user's code reaches without being handed them: where they live, so that every call reads them anew.

A `Place` is a container (a module's parameter dict, a globals dict, a closure cell …) and a key.  `Places` walks what a function can reach: the
modules among its arguments, closure, globals and attributes, and the functions it names.  Tied parameters have several places and are one tensor.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

CELL = "cell_contents"


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor is found at every call; `kind` is parameter | buffer | attribute | variable | argument | held."""

    name: str
    kind: str
    container: Any
    key: Any

    def read(self) -> Any:
        return self.container.cell_contents if isinstance(self.container, types.CellType) else self.container[self.key]

    @property
    def mutable(self) -> bool:
        """May the program update it?  State of modules and arguments: yes; captured variables: no."""
        return self.kind in ("parameter", "buffer", "attribute", "argument")


class Places:
    """All tensors and modules reachable from a function and its static arguments."""

    def __init__(self, fn: Callable[..., Any], statics: Iterator[Any] = iter(())) -> None:
        self.tensors: dict[int, list[Place]] = {}
        self.modules: dict[int, tuple[str, torch.nn.Module]] = {}
        self._seen: set[int] = set()
        self._visit("", fn)
        for value in statics:
            if isinstance(value, torch.nn.Module):
                self._module("", value)
            elif callable(value):
                self._visit("", value)

    def find(self, tensor: torch.Tensor) -> list[Place]:
        """Its places; a tensor found nowhere is held by reference."""
        found = self.tensors.get(id(tensor))
        return found or [Place("held", "held", [tensor], 0)]

    # -- walking --------------------------------------------------------------------------------------------

    def _visit(self, name: str, value: Any) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, torch.nn.Module):
            return self._module(name, value)
        self._seen.add(id(value))
        if isinstance(value, types.MethodType):
            self._visit(name, value.__self__)
            self._visit(name, value.__func__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif hasattr(value, "__wrapped__"):
            self._visit(name, value.__wrapped__)
        elif hasattr(value, "func") and hasattr(value, "args"):  # functools.partial
            for part in (value.func, *value.args, *value.keywords.values()):
                self._entry("", [part], 0, "variable")
        elif _is_plain_object(value):
            for key in vars(value):
                self._entry(_join(name, key), vars(value), key, "attribute")

    def _function(self, fn: types.FunctionType) -> None:
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                cell.cell_contents  # noqa: B018  an empty cell raises
            except ValueError:
                continue
            self._entry(name, cell, CELL, "variable")
        names = list(_global_names(fn.__code__))
        for name in names:
            found = fn.__globals__.get(name)
            if isinstance(found, types.ModuleType) and _is_open_module(found.__name__):
                for inner in names:
                    if inner in vars(found):
                        self._entry(f"{name}.{inner}", vars(found), inner, "variable")
            elif found is not None:
                self._entry(name, fn.__globals__, name, "variable")
        for i in range(len(fn.__defaults__ or ())):
            self._entry(f"default.{i}", fn.__defaults__, i, "variable")
        for key in fn.__kwdefaults__ or {}:
            self._entry(f"default.{key}", fn.__kwdefaults__, key, "variable")
        if "__wrapped__" in vars(fn):
            self._visit("", fn.__wrapped__)  # type: ignore[attr-defined]

    def _entry(self, name: str, container: Any, key: Any, kind: str, depth: int = 3) -> None:
        """One slot of a container: a tensor, a module, a function, or a container of those."""
        value = container.cell_contents if isinstance(container, types.CellType) else container[key]
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(id(value), []).append(Place(name, kind, container, key))
        elif isinstance(value, torch.nn.Module):
            self._module(name, value)
        elif isinstance(value, (list, tuple)) and depth:
            for i in range(min(len(value), 4096)):
                self._entry(_join(name, i), value, i, kind, depth - 1)
        elif isinstance(value, dict) and depth:
            for k in list(value):
                if isinstance(k, (str, int)):
                    self._entry(_join(name, k), value, k, kind, depth - 1)
        elif isinstance(value, (types.FunctionType, types.MethodType)) and _is_open(value):
            self._visit(name, value)
        elif _is_plain_object(value) and not isinstance(value, (list, tuple, dict)):
            self._visit(name, value)

    def _module(self, name: str, root: torch.nn.Module) -> None:
        for path, module in root.named_modules(prefix=name, remove_duplicate=True):
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            self.modules[id(module)] = (path, module)
            for kind, slots in (("parameter", module._parameters), ("buffer", module._buffers)):
                for key, value in slots.items():
                    if value is not None:
                        self.tensors.setdefault(id(value), []).append(Place(_join(path, key), kind, slots, key))
            for key, value in vars(module).items():
                if key not in _MODULE_FIELDS and not isinstance(value, (bool, int, float, str, type(None))):
                    self._entry(_join(path, key), vars(module), key, "attribute")


_MODULE_FIELDS = frozenset(vars(torch.nn.Module()))


def _join(prefix: str, key: Any) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Names a function and the functions written inside it may look up."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _global_names(const)


def _is_open(fn: Any) -> bool:
    """A function worth walking: the user's, not torch's."""
    return _is_open_module(getattr(fn, "__module__", "") or "")


def _is_open_module(name: str) -> bool:
    root = name.partition(".")[0]
    return root not in sys.stdlib_module_names and root not in ("torch", "mycel", "transformers", "numpy")


def _is_plain_object(value: Any) -> bool:
    """An instance of a user's class: its attributes may hold tensors."""
    if isinstance(value, (type, types.ModuleType, torch.Tensor)) or not hasattr(value, "__dict__"):
        return False
    return _is_open(type(value))
