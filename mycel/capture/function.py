"""Capture of one call: a function or module and its arguments -> a Program and how to call it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch._functorch import predispatch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

from mycel.capture.autograd import traced_dual, traced_tangents
from mycel.capture.caches import is_cache
from mycel.capture.counters import (
    CHANGES,
    CountedSlot,
    Slot,
    changed_values,
    is_counter,
    lift_counters,
    note_changes,
    place_of,
    refuse_counters,
    slot_of,
)
from mycel.capture.counters import MOST as MOST_CHANGES
from mycel.capture.cumulative_norm import cumulative_forward
from mycel.capture.custom import trace_function
from mycel.capture.encoder import encoder_forward
from mycel.capture.expert_loops import merged_loops
from mycel.capture.experts import as_one_operator
from mycel.capture.facts import CHANGING, Facts
from mycel.capture.fence import OPENED, is_library, refuse
from mycel.capture.hooks import ModuleHooks, hook_parameters
from mycel.capture.island import ROOT, boundary, module_keys, next_island, refusal
from mycel.capture.modes import DispatchMode, FunctionMode
from mycel.capture.names import clean
from mycel.capture.plain import suspended
from mycel.capture.record import Traced
from mycel.capture.repeats import assemble
from mycel.capture.rows import warn_of_experts
from mycel.capture.state import (
    Attributes,
    Container,
    Guarded,
    Location,
    Reachable,
    contents,
    is_static,
    is_there,
    owner,
    put_back,
)
from mycel.capture.syntax import drawn_state, enter, refuse_draws, rewritten_forward
from mycel.capture.trace import TRACING, Patch, Tracer
from mycel.capture.tree import Tree, flatten, holds_tensors
from mycel.errors import CaptureError
from mycel.ir import Program, Role, Var, check, prune, type_of
from mycel.ops import o
from mycel.ops.python_calls import PythonCall


@dataclass(frozen=True)
class Captured:
    """A program and its calling convention.

    The program's inputs are, in any order: the tensors of the arguments, `state` (where each other tensor lives;
    several places for tied ones) and the random key; their roles say which is which.  Its results are the tensors of
    `out`, then those of `effects` (slots that are rebound); its updates are written into their inputs.
    """

    program: Program
    arguments: Tree
    leaves: tuple[str, ...]  # for each tensor of the arguments, the name of its input
    state: Mapping[str, tuple[Location, ...]]  # by name of the input
    out: Tree
    effects: tuple[tuple[Location, Tree], ...]
    modules: tuple[torch.nn.Module, ...]
    links: tuple[Guarded, ...]  # objects that must still be where they were
    statics: tuple[Guarded, ...]  # plain values that must be what they were
    sizes: tuple[tuple[Any, int], ...]  # containers that must hold as much as they did
    devices: Mapping[str, torch.device | None]  # of the inputs but the key, by name; None: any
    device: torch.device
    differentiated: bool = False  # hooks on parameters are part of the program
    facts: tuple[Facts, ...] = ()  # values of the inputs that decided what the program is
    aliases: tuple[tuple[str, Location], ...] = ()  # arguments (their inputs) that are also reached by other ways
    recorded: tuple[tuple[list[torch.Tensor], bool], ...] = ()  # does torch record gradients of these?
    islands: tuple[PythonCall, ...] = ()  # what the program runs as plain Python
    environment: tuple[tuple[str, str | None], ...] = ()  # variables of the process that must be what they were


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    apart: bool = False,
    known: Mapping[int, Role] | None = None,
    differentiated: bool = False,
    data: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    strict: bool = False,
) -> Captured:
    """Run `fn` once on tensors without data; once more where libraries are to be rewritten, or a call is to stay
    Python.

    apart           an argument is not the same input as an equal tensor the code reaches otherwise
    known           roles of tensors the code reaches, by id, where the caller has better names than the way on which
                    they are reached
    differentiated  the caller takes the gradient, not torch: hooks on parameters become part of the program
    data            the arguments, where those to trace are without data: what decides (`facts.py`) is read there
    strict          what cannot be captured is refused, and does not become an island (`island.py`)
    """
    islands = dict(TRACING[-1].islands) if TRACING else {}  # an inner capture leaves it to the outer one to find more
    selects = set(TRACING[-1].plain_selects) if TRACING else set()
    changing = TRACING[-1].changing if TRACING else frozenset(CHANGING)
    changed: set[str] = set()
    counters = frozenset(slot for slot, n in CHANGES.items() if n > 1) if not TRACING else frozenset()
    lifts = not TRACING
    with paused():
        while True:
            opened = len(OPENED)
            try:
                given = data or (args, kwargs)
                once = functools.partial(
                    _capture, fn, args, kwargs, apart, known or {}, differentiated, given, islands, selects, changing,
                    counters if lifts else None,
                )  # fmt: skip
                return _settled(once) if not TRACING else once()
            except CaptureError as e:
                error: Exception = e
                if e.counters:  # once more with these as numbers of the program
                    counters |= e.counters
                    continue
                if e.changes_at and not TRACING and e.changes_at not in changed:  # once more as a value not known
                    changed.add(e.changes_at)
                    changing |= {e.changes_at}
                    continue
                if len(OPENED) != opened:  # libraries that decide on tensors are rewritten now
                    continue
            except Exception as e:
                error = e
            chosen_at = getattr(error, "chosen_at", "")
            if chosen_at and not TRACING and chosen_at not in selects:  # once more without that
                selects.add(chosen_at)
                continue
            if counters and lifts and (strict or max(CHANGES[slot] for slot in counters) < MOST_CHANGES):
                lifts = False  # Python needs their values: once more for these
                continue
            if strict or TRACING or not next_island(islands, error):
                if not changing or TRACING:
                    raise refusal(error) from error.__cause__
                changing = frozenset()  # then for each of the values
                islands.clear()


def _settled(capture: Callable[[], Captured]) -> Captured:
    """What code sets once, such as a setting that was None, is set now where its program stays the same: the next call
    would find it so, and be captured again for nothing."""
    captured = capture()
    before: list[tuple[Location, Any]] = []
    for place, tree in captured.effects:
        try:
            old = place.read()
        except LookupError:  # it was not there
            return captured
        if tree.kind != "static" or is_counter(old, tree.key):
            return captured
        before.append((place, old))
    if not before:
        return captured
    for place, tree in captured.effects:
        place.write(tree.key)
    with contextlib.suppress(Exception):  # it is said when it is called
        again = capture()
        if not again.effects and again.program == captured.program and again.out == captured.out:
            return again
    for place, old in before:
        place.write(old)
    return captured


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Captures under way do not see what torch does in here."""
    modes = []
    while TRACING and torch._C._len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    try:
        with _disable_current_modes() if TRACING else contextlib.nullcontext():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


def _capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    apart: bool,
    known: Mapping[int, Role],
    differentiated: bool,
    data: tuple[tuple[Any, ...], dict[str, Any]],
    islands: dict[Any, BaseException],
    selects: set[str],
    changing: frozenset[str],
    counters: frozenset[Slot] | None,
) -> Captured:
    leaves: list[torch.Tensor] = []
    tree = flatten((args, kwargs), leaves)
    _check_arguments(tree)
    places = Reachable(fn, tree.statics())
    device = _device(leaves, places)
    tracer = Tracer(device, places)
    tracer.islands, tracer.plain_selects, tracer.changing = islands, selects, changing
    paths = _argument_paths(fn, tree)
    traced, given = _trace_arguments(tracer, tree, paths, leaves, apart)
    held: list[torch.Tensor] = []
    flatten(data, held)
    tracer.sources.update(zip(given, held, strict=True))
    draws = drawn_state()
    counted = lift_counters(tracer, places, counters or frozenset())
    try:
        with _tracing(tracer):
            tracer.differentiated, tracer.is_step = differentiated, differentiated and not apart
            tracer.grad_mode = tracer.grad_mode or differentiated
            if differentiated:
                hook_parameters(tracer, places.parameters())
            result = boundary(tracer, (ROOT,), fn, functools.partial(enter, fn))(*traced[0], **traced[1])
            refuse_draws(draws)
        outs: list[torch.Tensor] = []
        out_tree = flatten(result, outs, objects=True)
        with tracer:
            results = [tracer.cell(x).read() for x in outs]
        with tracer:
            for number in counted.values():
                number.end(tracer)
        if counters is not None:
            refuse_counters(places, counted)
        effects, more = _effects(tracer, _changes(tracer, places, counted))
        results += more
        effects += _toggles(tracer)
        tracer.refuse_rows(results, "they are what the program returns or keeps")
    except BaseException as e:
        _undo(places)
        if tracer.counted_rows and not getattr(e, "chosen_at", ""):  # it may be their number that does not fit
            e.chosen_at = min(tracer.counted_rows)  # type: ignore[attr-defined]
        raise
    finally:
        for x, asked in tracer.toggled.values():
            x.requires_grad_(asked)
    if TRACING:  # what was captured becomes part of an outer program
        TRACING[-1].python_calls += tracer.python_calls
    note_changes(places, counted)
    _restore(places)
    updates, new = _updates(tracer)
    tracer.refuse_rows(new, "they are what the program keeps")
    blocks = assemble(tracer, results + new)
    names = {v: w.name for v, w in zip(tracer.inputs, blocks["main"].inputs, strict=False)}
    arguments = {
        names[v]: path for v, path in reversed([*zip(given, paths, strict=True)])
    }  # of a tensor passed twice, the first
    roles = _roles(tracer, names, arguments, known)
    if len(blocks["main"].inputs) > len(names):
        roles[blocks["main"].inputs[-1].name] = Role("key")
    program = check(prune(Program(blocks, "main", tuple(names[v] for v in updates), tracer.consts, roles)))
    if tracer.picks_rows:
        program, merged = merged_loops(program)
        program = check(program)
        for line in sorted(tracer.expert_loops - merged):
            warn_of_experts(line)
    return Captured(
        program,
        tree,
        tuple(names[v] for v in given),
        {names[v]: tuple(p) for v, p in tracer.state},
        out_tree,
        tuple(effects),
        tuple(m for _, m in places.modules.values()),
        tuple(filter(is_there, places.links)),
        places.unchanged(),
        places.unresized(p for p, _ in effects),
        {names[v]: x.device for v, (x, _) in zip(tracer.inputs, tracer.lifted.values(), strict=True)},
        device,
        differentiated,
        _facts(tracer, names, updates),
        tuple((names[v], p) for v in given for p in tracer.aliases.get(v.name, ()) if p.kind != "held"),
        tuple(tracer.recorded),
        tuple(tracer.python_calls),
        tuple(tracer.environment.items()),
    )


def _facts(tracer: Tracer, names: Mapping[Var, str], updates: Sequence[Var]) -> tuple[Facts, ...]:
    """What was asked of the program's inputs, as a program of its own; refused where the program itself changes these
    at every call."""
    if not tracer.facts:
        return ()
    facts = tuple(tracer.facts.values())
    changed = {v for v, _ in tracer.state} & set(updates)
    for fact in facts:
        for v in (fact.var, *(v for e in fact.eqns for v in e.vars)):
            if v in changed:
                error = refuse(
                    f"a Python value was asked of {names[v]}, which the code itself changes at every call",
                    "keeping it a tensor (0-dim tensors index, compare and multiply)",
                    fact.source,
                )
                error.changes_at = fact.source
                raise error
    used = dict.fromkeys(v for f in facts for v in (f.var, *(v for e in f.eqns for v in e.vars)) if v in tracer.sources)
    consts = {e.params["name"] for f in facts for e in f.eqns if e.op is o.const}
    return (Facts(tuple(names[v] for v in used), tuple(used), facts, {k: tracer.consts[k] for k in consts}),)


def _roles(
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


@contextlib.contextmanager
def _tracing(tracer: Tracer) -> Iterator[None]:
    """Everything torch does in here goes to the tracer; module calls are seen; code that asks is told it is being
    compiled."""
    plain = torch.nn.Module.__call__
    encoder = torch.nn.TransformerEncoder

    def traced_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module._backward_hooks and not module._is_full_backward_hook and torch.is_grad_enabled():
            raise refuse(f"{type(module).__name__} has a hook of register_backward_hook", "register_full_backward_hook")
        return boundary(tracer, module_keys(module), module, functools.partial(forward, module))(*args, **kwargs)

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with rewritten_forward(module):
            return tracer.module_call(plain, module, args, kwargs)

    was_compiling, was_caching = torch.compiler._is_compiling_flag, torch.is_autocast_cache_enabled()
    was_optimising = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)  # else torch.jit takes traced tensors for its profile
    torch.compiler._is_compiling_flag = True
    torch.set_autocast_cache_enabled(False)  # a cached cast would outlive the capture, or come from before it
    tracer.patches = [
        Patch(torch.nn.Module, "__call__", traced_call),
        Patch(torch.nn.modules.transformer, "_detect_is_causal_mask", _is_said_causal),
        Patch(encoder, "forward", encoder_forward(encoder.forward)),
        Patch(_BatchNorm, "forward", cumulative_forward(_BatchNorm.forward)),
        Patch(torch.nn.modules.module, "BackwardHook", ModuleHooks),
        Patch(_Applied, "apply", classmethod(_traced_apply)),
        Patch(predispatch, "_make_dual", _make_dual),
        Patch(predispatch, "_unpack_dual", _unpack_dual),
        Patch(predispatch, "_exit_dual_level", _exit_dual_level),
        Patch(os._Environ, "__getitem__", _noted_read(os._Environ.__getitem__)),
        Patch(_IMPORTS, "_find_and_load", _plain_import(_IMPORTS._find_and_load)),
        *(Patch(kind, "__call__", _unprofiled(kind.__call__)) for kind in _SCRIPTED),
    ]
    for patch in tracer.patches:
        patch.set()
    tracer.mode = DispatchMode(tracer)
    TRACING.append(tracer)
    try:
        with (
            torch.enable_grad(),
            _uncompiled(),
            as_one_operator(),
            torch._C._AutoDispatchBelowAutograd(),
            tracer.mode,
            FunctionMode(tracer),
        ):
            yield
    finally:
        for patch in reversed(tracer.patches):
            patch.unset()
        torch.compiler._is_compiling_flag = was_compiling
        torch.set_autocast_cache_enabled(was_caching)
        torch._C._set_graph_executor_optimize(was_optimising)
        TRACING.pop()
        tracer.running = False


# What `apply` of every Function calls: here, so that an alias of it (`f = MyFn.apply`) made before the capture is seen.
_Applied: Any = torch.autograd.function._SingleLevelFunction


_IMPORTS: Any = sys.modules["_frozen_importlib"]


def _plain_import(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A module that captured code is the first to import is no part of the program: its tensors are real ones."""

    def load(*args: Any) -> Any:
        with suspended():
            return plain(*args)

    return load


_SCRIPTED: Any = (torch.jit.ScriptFunction, torch._C.ScriptMethod)


def _unprofiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A call of torch.jit: as it was written, not as torch would run it by what it saw before (it detaches there)."""

    def call(fn: Any, *args: Any, **kwargs: Any) -> Any:
        fn._debug_flush_compilation_cache()
        return plain(fn, *args, **kwargs)

    return call


def _is_on_the_way(module: str) -> bool:
    """Is it a module between os.environ and the code that asks?"""
    return module in ("os", "collections.abc") or module.startswith("mycel.")


def _noted_read(plain: Callable[..., str]) -> Callable[..., str]:
    """os.environ[name], and what goes by way of it: read by the user's code, it is part of the signature."""

    def read(self: Any, name: str) -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _is_on_the_way(frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        if frame is not None and not is_library(frame.f_code.co_filename):
            for tracer in TRACING:
                tracer.environment[name] = self._data.get(self.encodekey(name)) and plain(self, name)
        return plain(self, name)

    return read


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """What torch.compile wraps runs as written."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _is_said_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """torch looks into a mask to see whether it is causal, a hint it can do without; our own pass finds causal
    masks."""
    return is_causal is True


def _traced_apply(cls: type[torch.autograd.Function], *args: Any) -> Any:
    """A torch.autograd.Function is a function with its own gradient; but checkpointing decides when to compute, not
    what."""
    if cls is CheckpointFunction:
        fn, _, *rest = args
        return fn(*rest)
    if cls.__module__ == CheckpointFunction.__module__:
        return cls.forward(*args)
    return trace_function(TRACING[-1], cls, args)


def _make_dual(x: torch.Tensor, tangent: torch.Tensor, level: int) -> Any:
    """torch.autograd.forward_ad.make_dual; inside transforms of torch.func it is their business."""
    plain = torch._C._functorch.maybe_current_level() is not None
    return torch._VF._make_dual(x, tangent, level=level) if plain else traced_dual(TRACING[-1], x, tangent)


def _unpack_dual(x: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    if torch._C._functorch.maybe_current_level() is not None:
        primal, tangent = torch._VF._unpack_dual(x, level=level)
        return primal, tangent
    tracer = TRACING[-1]
    (along,) = traced_tangents(tracer, [x], tracer.duals)
    return traced_dual(tracer, x), along


def _exit_dual_level(level: int) -> None:
    TRACING[-1].duals.clear()
    torch._C._exit_dual_level(level=level)


def _check_arguments(tree: Tree) -> None:
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


def _device(leaves: list[torch.Tensor], places: Reachable) -> torch.device:
    """The one device of the program: the arguments', else the model's."""
    for x in leaves:
        if x.device.type not in ("cpu", "meta"):
            return x.device
    for _, module in places.modules.values():
        for p in module._parameters.values():
            if p is not None:
                return p.device
    return leaves[0].device if leaves else torch.device("cpu")


def _argument_paths(fn: Callable[..., Any], tree: Tree) -> list[str]:
    """What the tensors of the arguments are called: x, pair.0, batch.input_ids"""
    args, kwargs = tree.children
    names = [
        n
        for a, name in zip(args.children, _parameter_names(fn, len(args.children)), strict=True)
        for n in a.paths(name)
    ]
    return names + list(kwargs.paths(""))


def _trace_arguments(
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


# -- state changes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rebound:
    """A slot that holds new tensors after the call: rebound, not updated in place."""

    box: Container
    key: Any
    tree: Tree
    values: list[Var]


def _changes(tracer: Tracer, places: Reachable, counted: Mapping[Slot, CountedSlot]) -> list[_Rebound]:
    """All slots that were rebound to tensors, to structures that hold traced ones, or to other plain values."""
    rebound = [
        _Rebound(box, key, Tree("static", value), [])
        for box, key, value in changed_values(places)
        if slot_of(box, key) not in counted
    ]
    for box in places.boxes:
        if isinstance(box.slots, list) and len(box.slots) > len(box.old) and box.kind == "attribute":
            raise refuse(f"{box.name}, a list that the code adds to at every call", "a buffer, or returning it")
        for key, value in contents(box.slots).items():
            if (
                slot_of(box, key) in counted
                or value is box.old.get(key)
                or not (isinstance(value, torch.Tensor) or _holds_traced(value))
            ):
                continue
            leaves: list[torch.Tensor] = []
            tree = flatten(value, leaves, objects=True)
            with tracer:
                values = [tracer.cell(x).read() for x in leaves]
            tree = tree.with_numbers(iter([isinstance(x, Traced) and x.weak for x in leaves]))
            if (box.kind == "variable" and not isinstance(box.slots, dict) and tree.kind != "number") or (
                isinstance(box.slots, list) and len(box.slots) != len(box.old)
            ):
                raise refuse(
                    f"a traced tensor was kept in {box.name}, which lives outside of the function",
                    "return it, or keep it in a buffer or an attribute of a module",
                    next((tracer.made[v].source for v in values if v in tracer.made), ""),
                )
            rebound.append(_Rebound(box, key, tree, values))
    return rebound


def _effects(tracer: Tracer, changes: list[_Rebound]) -> tuple[list[tuple[Location, Tree]], list[Var]]:
    """A rebound parameter or buffer of the same type is an update of it; any other rebound slot is assigned after each
    call."""
    effects, values = [], []
    for change in changes:
        box, key, old = change.box, change.key, change.box.old.get(change.key)
        if (
            box.kind in ("parameter", "buffer")
            and isinstance(old, torch.Tensor)
            and type_of(old) == change.values[0].type
        ):
            with tracer:
                tracer.cell(old).write(change.values[0])
            continue
        effects.append((place_of(box, key), change.tree))
        _guard_rebound(tracer.places, change)
        values += change.values
    return effects, values


def _toggles(tracer: Tracer) -> list[tuple[Location, Tree]]:
    """Tensors that ask for a gradient after the call and did not before, or the other way round."""
    return [
        (Location("requires_grad", "attribute", Attributes(x, ["requires_grad"]), "requires_grad"), Tree("static", now))
        for x, asked in tracer.toggled.values()
        if (now := x.requires_grad) != asked
    ]


def _guard_rebound(places: Reachable, change: _Rebound) -> None:
    """A slot that is new is one that was not there before, where code may ask for it; a structure in a slot that
    nobody reads is of no interest."""
    box, key = change.box, change.key
    if not isinstance(key, str):
        return
    if key not in box.old and key in places.read_names:
        places.sizes_before.append((owner(box.slots), len(box.old)))
    elif key in box.old and key not in places.read_names and not is_static(box.old[key]):
        places.forget_inside(owner(box.slots), key, box.old[key])


def _restore(places: Reachable) -> None:
    """Put back what slots held before: what they hold now is assigned after each call.  Objects without tensors, and
    what was added to lists, stay."""
    for box in places.boxes:
        now = contents(box.slots)
        grew = isinstance(box.slots, list) and len(now) != len(box.old)

        def stays(v: Any, grew: bool = grew) -> bool:
            return not isinstance(v, torch.Tensor) and (grew or not is_static(v)) and not _holds_traced(v)

        want = {
            k: v if v is box.old.get(k) or stays(v) else box.old.get(k)
            for k, v in now.items()
            if k in box.old or stays(v)
        }
        if want.keys() != now.keys() or any(v is not now[k] for k, v in want.items()):
            put_back(box.slots, want)


def _undo(places: Reachable) -> None:
    """Everything is as it was before the call."""
    for box in places.boxes:
        put_back(box.slots, box.old)


def _holds_traced(value: Any) -> bool:
    leaves: list[torch.Tensor] = []
    if isinstance(value, Traced):
        return True
    if is_static(value) or isinstance(value, (torch.nn.Module, type)) or not holds_tensors(value):
        return False
    flatten(value, leaves, objects=True)
    return any(isinstance(x, Traced) for x in leaves)


def _updates(tracer: Tracer) -> tuple[list[Var], list[Var]]:
    """Inputs whose cells were written, with their new values."""
    inputs, values = [], []
    for (_, cell), start in zip(tracer.lifted.values(), tracer.inputs, strict=True):
        if cell.version:
            inputs.append(start)
            values.append(cell.var)
    return inputs, values


__all__ = ["CaptureError", "Captured", "capture"]
