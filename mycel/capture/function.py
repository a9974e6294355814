"""Capture of one call: a function or module and its arguments -> a Program and how to call it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mycel.capture.fence import refuse
from mycel.capture.names import clean
from mycel.capture.repeats import assemble
from mycel.capture.state import Place, Places
from mycel.capture.trace import KEY, FunctionMode, Traced, Tracer
from mycel.capture.tree import Tree, flatten, holds_tensors
from mycel.errors import CaptureError
from mycel.ir import Program, Var, atom_type, check


@dataclass(frozen=True)
class Captured:
    """A program and its calling convention.

    The program's inputs are: the tensors of the arguments, then `state` (where each other tensor lives; several places for tied ones), then the random key
    if `draws`.  Its results are the tensors of `out`, then a new value for each of `effects`; its updates are written into their inputs.
    """

    program: Program
    arguments: Tree
    leaves: tuple[int, ...]  # for each tensor of the arguments, which input it is
    state: tuple[tuple[Place, ...], ...]
    draws: bool
    out: Tree
    effects: tuple[Place, ...]
    modules: tuple[torch.nn.Module, ...]
    device: torch.device


def capture(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Run `fn` once on tensors without data."""
    leaves: list[torch.Tensor] = []
    tree = flatten((args, kwargs), leaves)
    _check_arguments(tree)
    places = Places(fn, tree.statics())
    device = _device(leaves, places)
    tracer = Tracer(device, places)
    traced = _trace_arguments(tracer, fn, tree, leaves)
    before = _snapshot(places)
    try:
        with _tracing(tracer):
            result = fn(*traced[0], **traced[1])
        effects, effect_vars = _effects(tracer, before)
        outs: list[torch.Tensor] = []
        out_tree = flatten(result, outs, objects=True)
        with tracer:
            results = [tracer.cell(x).read() for x in outs] + effect_vars
    finally:
        _restore(before)
    updates, new = _updates(tracer)
    blocks = assemble(tracer, results + new)
    names = {v.name: w.name for v, w in zip([*tracer.inputs, KEY], blocks["main"].inputs, strict=False)}
    program = check(Program(blocks, "main", tuple(names[n] for n in updates), tracer.consts))
    return Captured(
        program, tree, _positions(leaves), tuple(tuple(p) for _, p in tracer.state), bool(tracer.draws), out_tree, tuple(effects),
        tuple(m for _, m in places.modules.values()), device,
    )  # fmt: skip


@contextlib.contextmanager
def _tracing(tracer: Tracer) -> Iterator[None]:
    """Everything torch does in here goes to the tracer; module calls are seen; code that asks is told it is being compiled."""
    plain = torch.nn.Module.__call__

    def traced_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tracer.module_call(plain, module, args, kwargs)

    was = torch.compiler._is_compiling_flag
    torch.nn.Module.__call__ = traced_call  # type: ignore[method-assign]
    torch.compiler._is_compiling_flag = True
    try:
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd(), tracer.mode, FunctionMode(tracer):
            yield
    finally:
        torch.nn.Module.__call__ = plain  # type: ignore[method-assign]
        torch.compiler._is_compiling_flag = was


def _check_arguments(tree: Tree) -> None:
    for value in tree.statics():
        if isinstance(value, torch.nn.Module):
            continue
        if type(value).__module__ == "numpy" or holds_tensors(value):
            raise refuse(
                f"an argument of type {type(value).__qualname__} holds arrays or tensors that cannot be seen",
                "pass tensors, alone or in tuples, lists, dicts and dataclasses (torch.from_numpy for arrays)",
            )


def _device(leaves: list[torch.Tensor], places: Places) -> torch.device:
    """The one device of the program: the arguments', else the model's."""
    for x in leaves:
        if x.device.type not in ("cpu", "meta"):
            return x.device
    for _, module in places.modules.values():
        for p in module._parameters.values():
            if p is not None:
                return p.device
    return leaves[0].device if leaves else torch.device("cpu")


def _trace_arguments(tracer: Tracer, fn: Callable[..., Any], tree: Tree, leaves: list[torch.Tensor]) -> Any:
    """The arguments with traced tensors; the same tensor passed twice is one input."""
    args, kwargs = tree.children
    names = [n for a, name in zip(args.children, _parameter_names(fn, len(args.children)), strict=True) for n in a.paths(name)]
    names += list(kwargs.paths(""))
    made: dict[int, Traced] = {}
    taken: set[str] = set()
    for name, tensor in zip(names, leaves, strict=True):
        if id(tensor) not in made:
            name = clean(name)
            while name in taken:
                name += "_"
            taken.add(name)
            made[id(tensor)] = tracer.argument(name, tensor)
    return tree.unflatten(iter([made[id(x)] for x in leaves]))


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


def _positions(leaves: list[torch.Tensor]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(x), len(first)) for x in leaves)


# -- state changes ------------------------------------------------------------------------------------------------


def _snapshot(places: Places) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """(path, kind, slots, copy of slots) of every reachable module."""
    kept = []
    for path, module in places.modules.values():
        for kind, slots in (("parameter", module._parameters), ("buffer", module._buffers), ("attribute", vars(module))):
            kept.append((path, kind, slots, dict(slots)))
    return kept


def _restore(before: list[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> None:
    """Put back what held traced tensors."""
    for _, _, slots, old in before:
        for key, value in list(slots.items()):
            if isinstance(value, Traced):
                if key in old:
                    slots[key] = old[key]
                else:
                    del slots[key]


def _effects(tracer: Tracer, before: list[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> tuple[list[Place], list[Var]]:
    """Slots of modules that hold a new tensor after the call: state that was rebound, not updated in place."""
    places, values = [], []
    for path, kind, slots, old in before:
        for key, value in slots.items():
            if isinstance(value, Traced) and old.get(key) is not value:
                with tracer:
                    new = tracer.cell(value).read()
                    known = old.get(key)
                    if isinstance(known, torch.Tensor) and atom_type(new) == atom_type(tracer.cell(known).read()):
                        tracer.cell(known).write(new)
                        continue
                places.append(Place(f"{path}.{key}" if path else key, kind, slots, key))
                values.append(new)
    return places, values


def _updates(tracer: Tracer) -> tuple[list[str], list[Var]]:
    """Inputs whose cells were written, with their new values."""
    names, values = [], []
    for (_, cell), start in zip(tracer.lifted.values(), tracer.inputs, strict=True):
        if cell.version:
            names.append(start.name)
            values.append(cell.var)
    return names, values


__all__ = ["CaptureError", "Captured", "capture"]
