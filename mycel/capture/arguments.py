"""The tensors of a call's arguments, and what each input of a program is: names, roles, the device."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mycel.capture.caches import is_cache
from mycel.capture.fence import refuse
from mycel.capture.locations import Location
from mycel.capture.names import clean
from mycel.capture.record import Traced
from mycel.capture.state import Reachable
from mycel.capture.trace import Tracer
from mycel.capture.tree import Tree, attributes, holds_tensors
from mycel.ir import Role, Var


def check_arguments(fn: Callable[..., Any], tree: Tree) -> None:
    """CaptureError for what of an argument hides tensors, or is an iterator."""
    for path, node in _argument_nodes(fn, tree):
        value = node.key
        if node.kind != "static" or isinstance(value, torch.nn.Module):
            continue
        kind = f"the argument {path}, of type {type(value).__qualname__},"
        if isinstance(value, np.ndarray):
            raise refuse(f"{kind} is an array of {value.dtype}, of which torch has no tensors", "numbers, or a list")
        if isinstance(value, Iterator):
            raise refuse(
                f"{kind} is an iterator: how far it is, Python alone knows",
                "next(…) before the call, and its item as the argument; or the iterator as an attribute of the model",
            )
        if holds_tensors(value, arrays=True):
            raise refuse(
                f"{kind} holds arrays or tensors that cannot be seen",
                "a StaticCache that a first call has filled: it has one size"
                if is_cache(value)
                else "arrays and tensors alone, or in tuples, lists, dicts and attributes of objects",
            )


class ArgumentObjects:
    """The objects of the user's own classes among arguments, as they are given to the code: what it sets there would
    be lost, for each call has others."""

    def __init__(self, fn: Callable[..., Any], tree: Tree, arguments: Any) -> None:
        names = _parameter_names(fn, len(arguments[0]))
        by_position = zip(names, tree.children[0].children, arguments[0], strict=True)
        by_name = zip(arguments[1], tree.children[1].children, arguments[1].values(), strict=True)
        self.held = [held for each in (*by_position, *by_name) for held in _objects(*each)]

    def refuse_changes(self) -> None:
        """CaptureError where one of them holds another thing than before."""
        for path, value, before in self.held:
            now = attributes(value)
            for name in {**before, **now}:
                if now.get(name, before) is not before.get(name, before):
                    error = refuse(
                        f"the code sets {path}.{name}: an argument, which is another object at every call",
                        "returning it, or setting it on a copy (copy.copy)",
                    )
                    error.final = True
                    raise error


def _objects(path: str, tree: Tree, value: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The objects in a value, with their attributes; dataclasses and caches apart."""
    if tree.kind == "sparse":
        return
    inside = attributes(value) if tree.kind == "object" else value
    if tree.kind == "object" and not dataclasses.is_dataclass(value) and not is_cache(value):
        yield path, value, inside
    names = tree.key[1] if tree.kind in ("object", "dict", "output") else range(len(tree.children))
    for name, child in zip(names, tree.children, strict=True):
        yield from _objects(f"{path}.{name}", child, inside[name])


def device_of(leaves: list[torch.Tensor], places: Reachable) -> torch.device:
    """The one device of the program: the arguments', else the model's; of a module without data (the skeleton that
    torch.func.functional_call fills) only where there is no other."""
    for x in leaves:
        if x.device.type not in ("cpu", "meta"):
            return x.device
    held = (p.device for _, m in places.modules.values() for p in m._parameters.values() if p is not None)
    return device_with_data(itertools.chain(held, (x.device for x in leaves)))


def device_with_data(devices: Iterable[torch.device]) -> torch.device:
    """The first that is no meta device; else the meta device, where there is one, or the host."""
    last = torch.device("cpu")
    for last in devices:
        if last.type != "meta":
            break
    return last


def argument_paths(fn: Callable[..., Any], tree: Tree) -> list[str]:
    """What the tensors of the arguments are called: x, pair.0, batch.input_ids"""
    return [path for path, node in _argument_nodes(fn, tree) if node.kind == "leaf"]


def _argument_nodes(fn: Callable[..., Any], tree: Tree) -> Iterator[tuple[str, Tree]]:
    """Everything in the arguments, and what it is called."""
    args, kwargs = tree.children
    for child, name in zip(args.children, _parameter_names(fn, len(args.children)), strict=True):
        yield from child.nodes(name)
    yield from itertools.islice(kwargs.nodes(""), 1, None)


def trace_arguments(
    tracer: Tracer, tree: Tree, paths: list[str], leaves: list[torch.Tensor], apart: bool
) -> tuple[Any, list[Var]]:
    """The arguments with traced tensors, and the input of each; the same tensor passed twice is one input."""
    traced: dict[int, Traced] = {}
    used: set[str] = set()
    for name, tensor in zip(paths, leaves, strict=True):
        if id(tensor) not in traced:
            name = clean(name)
            while name in used:
                name += "_"
            used.add(name)
            traced[id(tensor)] = tracer.argument(name, tensor, apart)
    return tree.unflatten(iter([traced[id(x)] for x in leaves])), [traced[id(x)].cell.var for x in leaves]


def _parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """What the function calls its positional arguments."""
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return [f"arg{i}" for i in range(count)]
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "arg")
    return [plain[i] if i < len(plain) else f"{rest}.{i - len(plain)}" for i in range(count)]


def input_roles(
    tracer: Tracer, names: Mapping[Var, str], arguments: Mapping[str, str], known: Mapping[int, Role]
) -> dict[str, Role]:
    """What each input is, by its name; things of the same kind and name, or with a name the caller knows others by, get
    a number."""
    places = dict(tracer.state)
    roles: dict[str, Role] = {}
    used = set(known.values())
    for var, (tensor, _) in zip(tracer.inputs, tracer.lifted.values(), strict=True):
        if names[var] not in arguments and id(tensor) in known:
            roles[names[var]] = known[id(tensor)]
            continue
        role = Role("batch", arguments[names[var]]) if names[var] in arguments else _held_role(tensor, places[var])
        numbered = itertools.chain([role], (replace(role, name=f"{role.name}_{i}") for i in itertools.count(1)))
        roles[names[var]] = role = next(r for r in numbered if r not in used)
        used.add(role)
    return roles


def _held_role(tensor: torch.Tensor, places: Sequence[Location]) -> Role:
    """What a tensor is that the code reached: a parameter wherever it lies, what a module keeps besides, or a
    variable's."""
    kind = (
        "parameter"
        if isinstance(tensor, torch.nn.Parameter)
        else "buffer"
        if places[0].kind in ("buffer", "attribute")
        else "variable"
    )
    return Role(kind, places[0].name or "held")
