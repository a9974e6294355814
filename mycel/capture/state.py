"""What the user's code reaches without being handed it: where it lives, so that every call reads it anew or notices
that it changed.

A `Location` is a container (a module's parameter dict, a globals dict, a closure cell …) and a key.  `Reachable` walks
what a function can reach: the modules among its arguments, closure, globals and attributes, and the functions and
classes it names.

    tensors    read anew at every call; tied parameters have several places and are one tensor
    modules    guarded: train mode, submodules, hooks
    links      objects on the way to tensors and modules: must be the same objects at every call
    statics    plain Python values: must be equal at every call, else the code is captured again
    sizes      lists, dicts and objects: must hold as much at every call
    boxes      dicts, lists, cells, globals and classes whose slots the code may rebind
    unfollowed deques, iterators, generators of random numbers, files: code that uses them stays Python
"""

from __future__ import annotations

import copy
import enum
import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from mycel.capture.code_names import all_names, attribute_names, global_names
from mycel.capture.fence import is_library
from mycel.capture.locations import Container, Guarded, Location, holds, tuple_item, with_items
from mycel.capture.slot_holders import (
    CELL,
    Attributes,
    ByItems,
    ClassAttributes,
    GlobalName,
    as_mapped,
    contents,
    owner,
    slots_of,
)
from mycel.capture.unfollowed import is_plain_iterator, is_unfollowed, rewindable

DEEPEST = 6  # containers in containers
LONGEST = 4096  # entries of a container that are looked at
DEEPEST_VISIT = 60  # functions and objects that lead to one another, on the stack at once
MANY = 64  # entries of a container whose plain values are looked at


class Reachable:
    """All that is reachable from a function and its static arguments."""

    def __init__(self, fn: Callable[..., Any], statics: Iterable[Any] = ()) -> None:
        self.tensors: dict[int, list[Location]] = {}
        self.modules: dict[int, tuple[str, torch.nn.Module]] = {}
        self.links: list[Guarded] = []
        self.statics: list[Guarded] = []
        self.boxes: list[Container] = []
        self.sizes: list[tuple[Any, int]] = []
        self.sizes_before: list[tuple[Any, int]] = []  # of what the code itself adds to, where it may ask for that
        self.functions: list[types.FunctionType] = []
        self.iterators: dict[int, Any] = {}  # that live outside of the function
        self.unfollowed: list[Location] = []
        self._submodules: list[tuple[str, torch.nn.Module, dict[str, Any]]] = []  # what each module holds
        self._known_rewindables: dict[int, Any] = {}  # by id of the iterators they stand for
        self._seen: set[int] = set()
        self._depth = 0  # of visits inside of one another
        self._later: deque[tuple[str, Any, Guarded | None]] = deque()  # what is too deep for Python's stack
        for value in (fn, *statics):
            self._visit("", value, None)
        while self._later:
            self._visit(*self._later.popleft())
        self._note_levels()

    def _note_levels(self) -> None:
        """The levels of loggers are plain values, where the code may read them."""
        for link in [link for link in self.links if isinstance(link.value, logging.Logger)]:
            for name in ("level", "disabled"):
                if name in self.read_names:
                    place = Location(_join(link.place.name, name), "attribute", vars(link.value), name, link)
                    self.statics.append(Guarded(place, place.read()))

    def find(self, tensor: torch.Tensor) -> list[Location]:
        """Its places; a tensor found nowhere is held by reference."""
        locations = self.tensors.get(id(tensor))
        return locations or [Location("held", "held", [tensor], 0)]

    def parameters(self) -> list[torch.Tensor]:
        """Each that is reached, once."""
        reached = (places[0].read() for places in self.tensors.values())
        return [x for x in reached if isinstance(x, torch.nn.Parameter)]

    def unchanged(self) -> tuple[Guarded, ...]:
        """Plain values that tracing did not change itself: counters of calls are no part of the signature."""
        return tuple(s for s in self.statics if holds(s))

    def unresized(self, written: Iterable[Location]) -> tuple[tuple[Any, int], ...]:
        """Containers and objects that the code does not resize itself, or of which it may ask whether it did, with how
        much they held."""
        own = {id(place.container) for place in written}
        unresized = [
            (container, n)
            for container, n in self.sizes
            if len(container) == n and not isinstance(container, tuple) and id(container) not in own
        ]
        return (*unresized, *self.sizes_before)

    @functools.cached_property
    def read_names(self) -> frozenset[str]:
        """Attributes that the user's functions may ask for, by name or by text."""
        return frozenset(name for fn in self.functions for name in attribute_names(fn.__code__))

    def forget_inside(self, container: Any, key: Any, held: Any) -> None:
        """What lies in the structure that a slot held is looked at no more."""

        def is_outside(place: Location) -> bool:
            while place.inside is not None:
                place = place.inside.place
                if owner(place.container) is container and place.key == key:
                    return False
            return True

        self.statics[:] = [s for s in self.statics if is_outside(s.place)]
        self.links[:] = [s for s in self.links if is_outside(s.place)]
        self.sizes[:] = [(c, n) for c, n in self.sizes if c is not held]

    def leave_to_python(self, xs: list[Any]) -> None:
        """A list whose state, and what is in it, is Python's alone from here on."""

        def is_inside(place: Location) -> bool:
            return place.container is xs or (place.inside is not None and is_inside(place.inside.place))

        at = next(box.inside.place for box in self.boxes if box.slots is xs and box.inside is not None)
        outside = {i: [p for p in places if not is_inside(p)] for i, places in self.tensors.items()}
        self.tensors = {i: places for i, places in outside.items() if places}
        self.boxes = [box for box in self.boxes if box.inside is None or not is_inside(box.inside.place)]
        self.boxes = [box for box in self.boxes if box.slots is not xs]
        self.unfollowed.append(at)

    def replaced_modules(self) -> list[str]:
        """Names of modules in whose place is another one now; those that were there are put back."""
        names = []
        for path, module, old in self._submodules:
            held = module._modules
            replaced = [name for name, child in old.items() if held.get(name) is not child and name in held]
            names += [_join(path, name) for name in replaced]
            for name in replaced:
                held[name] = old[name]
        return names

    # -- walking --------------------------------------------------------------------------------------------

    def _visit(self, name: str, value: Any, inside: Guarded | None) -> None:
        """An object that may lead to tensors: module, function, class, wrapper of those, or an instance of a user's
        class."""
        if self._depth == DEEPEST_VISIT:
            return self._later.append((name, value, inside))
        self._depth += 1
        self._open(name, value, inside)
        self._depth -= 1

    def _open(self, name: str, value: Any, inside: Guarded | None) -> None:
        """All that is in it."""
        if isinstance(value, torch.nn.Module):
            return self._module(name, value, inside)
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, types.MethodType):
            self._visit(name, value.__self__, inside)
            self._visit(name, value.__func__, inside)
        elif isinstance(value, types.FunctionType):
            self._function(value, inside)
        elif isinstance(value, functools.partial):
            self._visit(name, value.func, inside)
            self._entries("", value.args, range(len(value.args)), "variable", inside)
            self._entries("", value.keywords, value.keywords, "variable", inside)
        elif isinstance(value, type):
            self._class(value)
        elif "__wrapped__" in getattr(value, "__dict__", ()):
            self._visit(name, value.__wrapped__, inside)
        elif _is_plain_object(value):
            self._class(type(value))
            if slots := slots_of(value):
                self._box(name, "attribute", slots, inside)
                self._entries(name, slots, slots.names, "attribute", inside)
            if hasattr(value, "__dict__"):
                self._box(name, "attribute", vars(value), inside)
                self.sizes.append((vars(value), len(vars(value))))
                self._entries(name, vars(value), vars(value), "attribute", inside)

    def _function(self, fn: types.FunctionType, inside: Guarded | None) -> None:
        self.functions.append(fn)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            try:
                cell.cell_contents  # noqa: B018  an empty cell raises
            except ValueError:
                continue
            self._box(name, "variable", cell, inside)
            self._entry(name, cell, CELL, "variable", inside)
        for name in global_names(fn.__code__):
            value = fn.__globals__.get(name)
            if isinstance(value, types.ModuleType):
                if _is_open_module(value.__name__):
                    named = [n for n in dict.fromkeys(all_names(fn.__code__)) if n in vars(value)]
                    self._entries(name, vars(value), named, "variable", inside)
            elif name in fn.__globals__:
                self._box(name, "variable", GlobalName(fn.__globals__, name), inside)
                self._entry(name, fn.__globals__, name, "variable", inside)
        key = "__defaults__"
        at = Location(f"{fn.__name__}.{key}", "variable", Attributes(fn, [key]), key, inside)
        defaults = self._rewindable(at, fn.__defaults__ or ())
        within = Guarded(at, defaults) if any(isinstance(x, list) or is_unfollowed(x) for x in defaults) else inside
        self._entries("default", defaults, range(len(defaults)), "variable", within)
        self._entries("default", fn.__kwdefaults__ or {}, fn.__kwdefaults__ or {}, "variable", inside)
        if not is_library(fn.__code__.co_filename):  # code that is reloaded comes into the same function
            parts = Attributes(fn, ["__code__", "__defaults__", "__kwdefaults__"])
            places = [Location(f"{fn.__name__}.{part}", "variable", parts, part, inside) for part in parts.names]
            self.links += [Guarded(place, place.read()) for place in places]
        if "__wrapped__" in vars(fn):
            self._visit("", fn.__wrapped__, inside)  # type: ignore[attr-defined]

    def _class(self, cls: type) -> None:
        """Class attributes, and what the methods of a user's class name."""
        for base in cls.__mro__:
            if (id(base) in self._seen and base is not cls) or not _is_open_module(base.__module__):
                continue
            self._seen.add(id(base))
            attributes = ClassAttributes(base)
            self._box(base.__name__, "attribute", attributes, None)
            for key, value in list(vars(base).items()):
                method = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(method, types.FunctionType):
                    if not is_library(method.__code__.co_filename):
                        place = Location(f"{base.__name__}.{key}", "variable", vars(base), key)
                        self.links.append(Guarded(place, value))
                    self._visit(key, method, None)
                elif not key.startswith("__"):
                    self._entry(f"{base.__name__}.{key}", attributes, key, "variable", None)

    def _entries(
        self, name: str, container: Any, keys: Iterable[Any], kind: str, inside: Guarded | None, *, depth: int = DEEPEST
    ) -> None:
        for key in list(keys):
            self._entry(_join(name, key), container, key, kind, inside, depth=depth)

    def _entry(
        self, name: str, container: Any, key: Any, kind: str, inside: Guarded | None, *, depth: int = DEEPEST
    ) -> None:
        """One slot of a container: a tensor, a plain value, a container of those, or an object that may lead to
        them."""
        value = container.cell_contents if isinstance(container, types.CellType) else container[key]
        place = Location(name, kind, container, key, inside)
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(id(value), []).append(place)
        elif is_static(value):
            self.statics.append(Guarded(place, value))
        elif isinstance(value, (set, frozenset)):
            if len(value) <= LONGEST and all(map(is_static, value)):
                self.statics.append(Guarded(place, copy.copy(value)))
        elif isinstance(value, (list, tuple, dict)):
            if depth:
                value = self._rewindable(place, value) if isinstance(value, tuple) else value
                link = Guarded(place, value)
                if not isinstance(value, tuple):  # that stays as long as it is
                    self.sizes.append((value, len(value)))
                    self._box(name, kind, value, link)
                self._entries(name, as_mapped(value), _keys(value), kind, link, depth=depth - 1)
        elif is_unfollowed(value) and (held := tuple_item(place) if isinstance(container, tuple) else place):
            self.unfollowed.append(held)
        elif isinstance(value, Iterator):
            self.iterators[id(value)] = value
        elif isinstance(value, logging.Logger):
            self.links.append(Guarded(place, value))
        elif _leads_on(value):
            self.links.append(Guarded(place, value))
            self._visit(name, value, self.links[-1])
        elif isinstance(container, ByItems) or isinstance(value, FUNCTIONS):  # what a mapping makes its items of
            self.links.append(Guarded(place, value))

    def _rewindable(self, place: Location, items: tuple[Any, ...]) -> tuple[Any, ...]:
        """A tuple with iterators in it that can go back, from now on in the place of this one."""
        if isinstance(place.container, tuple) or not (type(items) is tuple or hasattr(items, "_fields")):
            return items

        def replaced(item: Any) -> Any:
            if isinstance(item, tuple):
                return with_items(item, [*map(replaced, item)]) if _holds_iterator(item) else item
            return self._known_rewindables.setdefault(id(item), rewindable(item)) if is_plain_iterator(item) else item

        if not _holds_iterator(items):
            return items
        items = replaced(items)
        place.write(items)
        for box in self.boxes:
            if owner(box.slots) is owner(place.container) and place.key in box.old:
                box.old[place.key] = items
        return items

    def _box(self, name: str, kind: str, slots: Any, inside: Guarded | None) -> None:
        self.boxes.append(Container(name, kind, slots, contents(slots), inside))

    def _module(self, name: str, root: torch.nn.Module, inside: Guarded | None) -> None:
        for path, module in root.named_modules(prefix=name, remove_duplicate=True):
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            self.modules[id(module)] = (path, module)
            self._class(type(module))
            if isinstance(module._modules, dict):  # those of a script cannot be replaced
                self._submodules.append((path, module, dict(module._modules)))
            for kind, slots in (("parameter", module._parameters), ("buffer", module._buffers)):
                self._box(path, kind, slots, inside)
                for key, value in slots.items():
                    if value is not None:
                        self.tensors.setdefault(id(value), []).append(
                            Location(_join(path, key), kind, slots, key, inside)
                        )
            self._box(path, "attribute", vars(module), inside)
            for kind in HOOK_KINDS:
                self._box(_join(path, kind), HOOKS, vars(module)[kind], inside)
            keys = [k for k in vars(module) if k not in _MODULE_FIELDS]
            self._entries(path, vars(module), keys, "attribute", inside)
            for hook in _hooks_of(module):
                if _leads_on(hook):
                    self._visit(path, hook, inside)


def _holds_iterator(items: Any) -> bool:
    """Is there an iterator in a tuple, or in tuples in it?"""
    return any(_holds_iterator(x) if isinstance(x, tuple) else is_plain_iterator(x) for x in items)


FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType)


HOOKS = "hook"  # the kind of a box with hooks of a module
HOOK_KINDS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    """What calls of a module, and gradients of its own parameters, run besides."""
    for hooks in (*(vars(module)[kind] for kind in HOOK_KINDS), *(p._backward_hooks for p in _own(module))):
        yield from (hooks or {}).values()


def _own(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


_MODULE_FIELDS = frozenset(vars(torch.nn.Module()))
_STATIC = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
    range,
)


def is_static(value: Any) -> bool:
    """A plain Python value, or a tuple of them."""
    return isinstance(value, _STATIC) or (type(value) is tuple and len(value) <= MANY and all(map(is_static, value)))


def shadowed_by(module: torch.nn.Module) -> frozenset[str]:
    """What a user's classes define: the module's own attributes of these names would hide it."""
    bases = [vars(cls) for cls in type(module).__mro__ if _is_open_module(cls.__module__)]
    return frozenset(name for names in bases for name in names if not name.startswith("__")) - vars(module).keys()


def _keys(container: Any) -> list[Any]:
    """Which entries to look at: of long containers only those that are not plain values."""
    keys = (
        [k for k in container if isinstance(k, (str, int))]
        if isinstance(container, dict)
        else list(range(tuple.__len__(container) if isinstance(container, tuple) else len(container)))
    )  # a tuple with names of its own may forbid len()
    held = as_mapped(container)
    return keys if len(keys) <= MANY else [k for k in keys[:LONGEST] if not is_static(held[k])]


def _join(prefix: str, key: Any) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def _leads_on(value: Any) -> bool:
    """An object worth walking: a module, the user's functions and classes, wrappers of functions, instances of users'
    classes."""
    if isinstance(value, (torch.nn.Module, functools.partial)):
        return True
    if isinstance(value, (types.FunctionType, types.MethodType, type)):
        return _is_open_module(getattr(value, "__module__", "") or "")
    return "__wrapped__" in getattr(value, "__dict__", ()) or _is_plain_object(value)


def _is_open_module(name: str) -> bool:
    root = name.partition(".")[0]
    return root not in sys.stdlib_module_names and root not in _LIBRARIES


_LIBRARIES = {
    "torch", "mycel", "transformers", "numpy", "scipy",
    # tools, which hold no tensors of a model, and of which there is a lot to walk through
    "pytest", "_pytest", "pluggy", "hypothesis", "expecttest", "rich", "tqdm", "wandb", "tensorboard", "matplotlib",
    "pandas", "sympy", "pydantic", "typer", "click", "tokenizers", "datasets", "yaml", "packaging", "loguru", "einx",
    "jaxtyping", "beartype",
}  # fmt: skip


def _is_plain_object(value: Any) -> bool:
    """An instance of a user's class (or a model library's): its attributes may hold tensors."""
    if isinstance(value, (type, types.ModuleType, torch.Tensor)):
        return False
    if not hasattr(value, "__dict__") and not slots_of(value):
        return False
    module = type(value).__module__
    return (
        _is_open_module(module)
        or module.partition(".")[0] == "transformers"
        or isinstance(value, types.SimpleNamespace)
    )
