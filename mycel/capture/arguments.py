"""The tensors of a call's arguments, and what each input of a program is: names, roles, the device."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.capture.caches import is_cache
from mycel.capture.fence import refuse
from mycel.capture.names import clean
from mycel.capture.record import Traced
from mycel.capture.state import Location, Reachable
from mycel.capture.trace import Tracer
from mycel.capture.tree import Tree, holds_tensors
from mycel.ir import Role, Var


def check_arguments(tree: Tree) -> None:
    for value in tree.statics():
        if isinstance(value, torch.nn.Module):
            continue
        if type(value).__module__ == "numpy" or isinstance(value, Iterator) or holds_tensors(value):
            raise refuse(
                f"an argument of type {type(value).__qualname__} holds arrays or tensors that cannot be seen",
                "a StaticCache that a first call has filled: it has one size"
                if is_cache(value)
                else "pass tensors, alone or in tuples, lists, dicts and dataclasses (torch.from_numpy for arrays)",
            )


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
    args, kwargs = tree.children
    names = [
        n
        for a, name in zip(args.children, _parameter_names(fn, len(args.children)), strict=True)
        for n in a.paths(name)
    ]
    return names + list(kwargs.paths(""))


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
