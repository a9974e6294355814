"""What cannot be captured becomes an island: a call that stays Python, as one equation (`ops/island.py`).

    forward(x)                       an exception passes through the calls around the line that raised it:
      h = self.encoder(x)                solve, Solver, Model
      y = self.solver(h)             solve(h) returns two tensors whose types do not depend on values: it is the island,
        z = solve(h, self.w)         and the code is captured again
          while err.item() > tol: …

A call is tried on values at hand, and on others: results of the same types, whatever the values, make it an island;
else the call around it is tried.  What fails in plain Python, too, is the user's error, and stays what it was.
Operands are the tensors of the arguments and all that the code reaches; while it runs, they lie where it finds them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mycel.capture.fence import here, is_library, refuse
from mycel.capture.record import Traced
from mycel.capture.state import Container, Location, Reachable, contents, is_static, owner, put_back
from mycel.capture.trace import KEY, TRACING, Tracer
from mycel.capture.tree import Tree, flatten, holds_tensors
from mycel.errors import CaptureError, RunError
from mycel.ir import CONTROL, Type, Var, is_float, type_of
from mycel.ops import o
from mycel.ops.python_calls import CALLS, PythonCall

ROOT = "root"  # the key of the captured function itself
MOST = 64  # islands of a program
MARK = "mycel_island"  # an attribute of modules that are marked as islands
_WARNED: set[tuple[str, str]] = set()


class NoIslandError(Exception):
    """A call that cannot be an island: `why`.  `final`: nor can one around it."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.why, self.final = why, final


# -- which calls are islands


def boundary(tracer: Tracer, keys: Sequence[Any], plain: Callable[..., Any], run: Callable[..., Any]) -> Any:
    """A call that may be an island, known by these keys: `run` traces it, `plain` is the call as Python has it.  An
    exception that passes remembers the call."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        marked = MARK in getattr(plain, "__dict__", ())
        reason = next((tracer.islands[k] for k in keys if k in tracer.islands), None)
        try:
            if marked:
                return _island_of(plain, *args, **kwargs)
            if reason is not None:
                return make_island(tracer, plain, args, kwargs, reason)
            return run(*args, **kwargs)
        except Exception as e:
            passed: list[Sequence[Any]] = e.__dict__.setdefault("passed_calls", [])
            passed.append(keys)
            raise

    return call


def function_boundary(tracer: Tracer, fn: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function or method that rewritten code calls."""
    function = getattr(fn, "__func__", fn)
    if not isinstance(function, types.FunctionType) or isinstance(getattr(fn, "__self__", None), torch.Tensor):
        return run
    if is_library(function.__code__.co_filename) and function.__module__.partition(".")[0] in ("torch", "mycel"):
        return run
    return boundary(tracer, (function.__code__,), fn, run)


def next_island(islands: dict[Any, BaseException], error: BaseException) -> bool:
    """Enter the innermost call that the exception passed and that is no island yet; is there one?"""
    if getattr(error, "final", False):
        return False
    reason = first_reason(error)
    for keys in [*error.__dict__.get("passed_calls", ()), (ROOT,)]:
        if len(islands) < MOST and not any(k in islands for k in keys):
            # of several modules of one class, the second stands for all
            known = len(keys) == 2 and keys[1] in (kind for kind in map(_class_of, islands))
            islands[keys[1] if known else keys[0]] = reason
            return True
    return False


def _class_of(key: Any) -> Any:
    return type(key) if isinstance(key, torch.nn.Module) else None


def module_keys(module: torch.nn.Module) -> Sequence[Any]:
    """The module, and its class, unless it is one of torch's: a Sequential says nothing of another."""
    kind = type(module)
    return (module,) if kind.__module__.startswith("torch.") else (module, kind)


def first_reason(error: BaseException) -> BaseException:
    """Why there are islands at all: what was raised in the code itself."""
    while isinstance(error, NoIslandError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def refusal(error: BaseException) -> BaseException:
    """What the user is told where no call can be an island."""
    reason = first_reason(error)
    if not isinstance(reason, CaptureError) or not isinstance(error, NoIslandError) or error.final:
        return reason
    return type(reason)(
        f"{reason.what}; and no call around it can stay Python: {error.why}",
        file=reason.file,
        line=reason.line,
        text=reason.text,
        hint=reason.hint,
    )


def mark_island(fn: Any) -> Any:
    """A function that is an island wherever captured code calls it; a module, which remembers it itself."""
    if isinstance(fn, torch.nn.Module):
        fn.__dict__[MARK] = True
        return fn
    return functools.partial(_island_of, fn)


def _island_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return make_island(TRACING[-1], fn, args, kwargs)
    except NoIslandError as e:
        raise refuse(f"{_name(fn, '')} is no island: {e.why}", "tensors of fixed shapes as results") from e


# -- making one


def make_island(
    tracer: Tracer, fn: Callable[..., Any], args: Any, kwargs: Any, reason: BaseException | None = None
) -> Any:
    """The results of fn(*args, **kwargs) as those of one equation; `reason` is None where the user asked for it."""
    source = here()[0]
    tracer.here()
    name = _name(fn, source)
    if tracer.manual:
        raise NoIslandError(f"{name} is in a manual region") from reason
    call = Trial(tracer, fn, args, kwargs)
    try:
        call.probe()
    except NoIslandError as e:
        raise e from reason
    tracer.source = source
    shift = int(call.draws)
    written = frozenset(i + shift for i in call.written)
    known = _registered(PythonCall(name, source, _text(reason), call, written, call.draws, call.grad))
    tracer.python_calls.append(known)
    with tracer:
        inputs = [tracer.cell(x).read() for x in call.operands]
        inputs = [_draw(tracer), *inputs] if call.draws else inputs
        params = {"name": known.name, "shapes": [t.shape for t in call.types], "dtypes": [t.dtype for t in call.types]}
        wrt = [i + shift for i in call.differentiable]
        outs = o.island(*inputs, **params, wrt=wrt)
    if reason is not None:
        _warn(known, reason)
    return call.results(outs if isinstance(outs, tuple) else (outs,))


def _name(fn: Any, source: str) -> str:
    target = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    kind = type(target).__name__ if isinstance(target, torch.nn.Module) else ""
    called = "" if isinstance(fn, torch.nn.Module) else getattr(fn, "__name__", type(fn).__name__)
    return f"{'.'.join(filter(None, (kind, called)))} at {source}".removesuffix(" at ")


def _registered(new: PythonCall) -> PythonCall:
    """The call under a name of its own; one that is known already, where it runs the same code in the same way."""
    for i in itertools.count(1):
        name = new.name if i == 1 else f"{new.name} ({i})"
        known = CALLS.setdefault(name, new)
        if known is new:
            new.name = name
        if known is new or (known.same_signature(new) and known.call.is_like(new.call)):  # type: ignore[attr-defined]
            return known
    raise AssertionError


def _draw(tracer: Tracer) -> Var:
    key, site = tracer.draw()
    folded: Var = o.fold_in(key, data=site)
    return folded


def _text(reason: BaseException | None) -> str:
    if reason is None:
        return "marked as one"
    return reason.what if isinstance(reason, CaptureError) else f"{type(reason).__name__}: {reason}"


def _warn(known: PythonCall, reason: BaseException) -> None:
    """Once for a line and a reason."""
    at = f"{reason.file}:{reason.line}" if isinstance(reason, CaptureError) and reason.file else known.source
    if (at, known.reason) in _WARNED:
        return
    text = f"\n            {reason.text}" if isinstance(reason, CaptureError) and reason.text else ""
    hint = f"\n  try       {reason.hint}" if isinstance(reason, CaptureError) and reason.hint else ""
    warnings.warn(
        f"{known.name} runs as plain Python, apart from the rest of the program: {known.reason}\n"
        f"  at        {at}{text}{hint}; strict=True refuses it",
        stacklevel=2,
    )
    _WARNED.add((at, known.reason))


# -- trying a call


class Trial:
    """A call on tensors that are put where its code finds them; then what runs at every call of the program."""

    def __init__(self, tracer: Tracer, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.tracer, self.fn = tracer, fn
        self.grad = torch.is_grad_enabled()
        leaves: list[torch.Tensor] = []
        self.arguments = flatten((args, kwargs), leaves, objects=True)
        reached = Reachable(fn, self.arguments.statics())
        if reached.iterators:
            raise NoIslandError(f"{_name(fn, '')} reaches an iterator, which would go on once more for the gradient")
        self.boxes: list[Container] = reached.boxes
        self.operands: list[torch.Tensor] = []
        at: dict[int, int] = {}
        for x, places in [(places[0].read(), places) for places in reached.tensors.values()]:
            if any(map(_is_of_class, places)):  # stays there; what is traced or trained cannot
                if _is_differentiable(x) or type(x) is Traced:
                    raise NoIslandError(f"{_name(fn, '')} reaches a tensor of a class, {places[0].name}")
                del reached.tensors[id(x)]
        found = [places[0].read() for places in reached.tensors.values()]
        for x in (*leaves, *(x for x in found if _fits(tracer, x))):
            if id(x) not in at:
                at[id(x)] = len(self.operands)
                self.operands.append(x)
        self.leaves = [at[id(x)] for x in leaves]
        everywhere = [
            (at[id(x)], place)
            for x, places in zip(found, reached.tensors.values(), strict=True)
            if id(x) in at
            for place in places
        ]
        self.places = [(i, p) for i, p in everywhere if not isinstance(p.container, tuple)]
        self.tuples: dict[int, tuple[Location, Any, dict[int, int]]] = {}  # where a tuple is, and what of it
        self.laid: set[int] = set()  # the tuples that stand there during a call
        for i, p in everywhere:
            if isinstance(p.container, tuple):
                if p.inside is None or isinstance(p.inside.place.container, tuple):
                    raise NoIslandError(f"{_name(fn, '')} reaches tensors in tuples of tuples")
                self.tuples.setdefault(id(p.container), (p.inside.place, p.container, {}))[2][p.key] = i
        self.differentiable = [i for i, x in enumerate(self.operands) if _is_differentiable(x)]
        self.written: frozenset[int] = frozenset()
        self.kept: list[tuple[Location, Tree]] = []  # slots that hold new tensors after the call
        self.changes_python = self.draws = False
        self.out = Tree("static")
        self.types: list[Type] = []

    # -- while capturing

    def probe(self) -> None:
        """Find out what the call gives, and that other values give the same types."""
        values = [sample(self.tracer, x) for x in self.operands]
        watched = _Watched()
        first = self._try(values, watched) or self._try(values)
        if first is None:
            # with values that were made up it may, and yet be right
            raise NoIslandError("its code fails in plain Python, too", final=not self.tracer.made_up)
        self.written, self.kept, self.out, self.types, self.draws, self.changes_python = first
        if not self.types:
            raise NoIslandError(f"{_name(self.fn, '')} returns no tensor")
        _check_tree(self.out, self.fn)
        for _, tree in self.kept:
            _check_tree(tree, self.fn)
        counts = _counts(values) if self.tracer.changing else ()  # what keeps changing may be what they say
        for others in (*_others(values), *(_extremes(values) if watched.dynamic else ()), *counts):
            other = self._try(others, _Watched(4 * watched.count + 1000))
            if other is not None:
                self._compare(*other)

    def _compare(
        self, written: frozenset[int], kept: Any, out: Tree, types_: list[Type], draws: bool, changes: bool
    ) -> None:
        """NoIslandError where other values gave other types."""
        if out != self.out or types_ != self.types or len(kept) != len(self.kept) or written != self.written:
            raise NoIslandError(f"what {_name(self.fn, '')} returns depends on values")
        self.draws, self.changes_python = self.draws or draws, self.changes_python or changes

    def _try(self, values: Sequence[torch.Tensor], watched: Any = None) -> Any:
        """What one run of the call did, under a mode that watches it; None where it failed."""
        olds = [contents(box.slots) for box in self.boxes]
        with suspended(), torch.set_grad_enabled(self.grad), _states() as drawn:
            leaves = [
                x.detach().clone().requires_grad_(i in self.differentiable and self.grad) for i, x in enumerate(values)
            ]
            given = [
                x if isinstance(p, torch.nn.Parameter) else x.clone()
                for x, p in zip(leaves, self.operands, strict=True)
            ]
            before = [x.detach().clone() for x in given]
            try:
                with self._placed(given):
                    try:
                        with watched or contextlib.nullcontext():
                            result = self._called(given)
                    except Exception:
                        return None
                    out_leaves: list[torch.Tensor] = []
                    out = flatten(result, out_leaves, objects=True)
                    written, kept, changes = self._changes(given, before)
                    kept_trees = []
                    for place in kept:
                        kept_trees.append((place, flatten(place.read(), out_leaves, objects=True)))
                    if any(x.is_leaf and x.grad is not None for x in given):
                        raise NoIslandError("it leaves gradients in .grad of parameters", final=True)
                    if any(not _is_dense(x) for x in out_leaves):
                        raise NoIslandError(f"{_name(self.fn, '')} returns a tensor that is not dense")
                    news = [self._new_value(i, given) for i in sorted(written)]
                    if any(type_of(x) != type_of(before[i]) for i, x in zip(sorted(written), news, strict=True)):
                        raise NoIslandError("it changes the shape of an argument", final=True)
                    types_ = [type_of(x) for x in (*out_leaves, *news)]
            except NoIslandError:
                raise
            except Exception as e:
                raise NoIslandError(f"{_name(self.fn, '')}: {type(e).__name__}: {e}") from e
            finally:
                for box, old in zip(self.boxes, olds, strict=True):
                    put_back(box.slots, old)
        self._forget([*changes, *((place.container, place.key) for place in kept)])
        return frozenset(written), kept_trees, out, types_, drawn(), bool(changes)

    def _changes(
        self, given: Sequence[torch.Tensor], before: Sequence[torch.Tensor]
    ) -> tuple[set[int], list[Location], list[tuple[Any, Any]]]:
        """Operands with new values, slots with tensors that were not there, and slots with other plain values."""
        written = {
            i for i, (x, old) in enumerate(zip(given, before, strict=True)) if x._version or not _same(x.detach(), old)
        }
        slot_of = {(id(owner(p.container)), p.key): i for i, p in self.places}
        rebound: list[Location] = []
        plain: list[tuple[Any, Any]] = []
        for box in self.boxes:
            now = contents(box.slots)
            for key in {**box.old, **now}:
                new, old = now.get(key), box.old.get(key)
                i = slot_of.get((id(owner(box.slots)), key))
                if i is not None:
                    if new is given[i]:
                        continue
                    if isinstance(new, torch.Tensor) and type_of(new) == type_of(given[i]):
                        written.add(i)
                        continue
                    old = given[i]
                if new is old or id(new) in self.laid or (is_static(new) and is_static(old) and new == old):
                    continue
                if isinstance(new, torch.Tensor) or holds_tensors(new):
                    if isinstance(box.slots, list) or box.kind == "variable":
                        raise NoIslandError(f"{_name(self.fn, '')} keeps tensors in {box.name}")
                    rebound.append(Location(f"{box.name}.{key}", box.kind, box.slots, key, box.inside))
                else:
                    plain.append((box.slots, key))
        return written, rebound, plain

    def _forget(self, changes: Sequence[tuple[Any, Any]]) -> None:
        """What the code itself changes is no part of the signature."""
        if not changes:
            return
        changed = {(id(owner(slots)), key) for slots, key in changes}
        boxes = {id(owner(slots)) for slots, _ in changes}
        places = self.tracer.places
        places.statics[:] = [s for s in places.statics if (id(owner(s.place.container)), s.place.key) not in changed]
        places.sizes[:] = [(held, n) for held, n in places.sizes if id(held) not in boxes]

    def results(self, outs: Sequence[Var]) -> Any:
        """What the traced code gets for the call: its results, and its changes made on traced tensors."""
        tracer = self.tracer
        count = len(outs) - len(self.written)
        tensors = iter([tracer.wrap(v) for v in outs[:count]])
        value = self.out.unflatten(tensors)
        for place, tree in self.kept:
            place.write(tree.unflatten(tensors))
        with tracer:
            for i, new in zip(sorted(self.written), outs[count:], strict=True):
                tracer.cell(self.operands[i]).write(new)
        self.operands = []  # of a capture that is over soon
        self.tracer = None  # type: ignore[assignment]
        return value

    # -- at every call of the program

    def is_like(self, other: Trial) -> bool:
        """Does it run the same code in the same way?"""

        def ways(trial: Trial) -> Any:
            at = [(i, id(p.container), p.key) for i, p in trial.places]
            kept = [(id(p.container), p.key, tree) for p, tree in trial.kept]
            return trial.fn, trial.arguments, trial.leaves, at, kept, trial.out, trial.changes_python

        return bool(ways(self) == ways(other))

    def __call__(self, operands: Sequence[torch.Tensor], again: bool) -> list[torch.Tensor]:
        olds = [contents(box.slots) for box in self.boxes] if again and self.changes_python else None
        try:
            with self._placed(operands):
                leaves: list[torch.Tensor] = []
                before = [_read(place) for place, _ in self.kept]
                try:
                    out = flatten(self._called(operands), leaves, objects=True)
                    if out != self.out:
                        raise RunError(
                            f"an island, {_name(self.fn, '')}, returned something else than when it was captured\n"
                            "  try       mycel.island around a larger part, whose results have one structure"
                        )
                    for place, _ in self.kept:
                        flatten(place.read(), leaves, objects=True)
                finally:
                    for (place, _), old in zip(self.kept, before, strict=True):
                        _write(place, old)
                return leaves + [self._new_value(i, operands) for i in sorted(self.written)]
        finally:
            if olds is not None:
                for box, old in zip(self.boxes, olds, strict=True):
                    put_back(box.slots, old)

    def _called(self, operands: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self.arguments.unflatten(iter([operands[i] for i in self.leaves]))
        return self.fn(*args, **kwargs)

    def _new_value(self, i: int, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """What an operand is after the call: itself, or what is in its place."""
        for at, place in self.places:
            if at == i and (now := _read(place)) is not operands[i] and isinstance(now, torch.Tensor):
                return now
        return operands[i]

    @contextlib.contextmanager
    def _placed(self, operands: Sequence[torch.Tensor]) -> Iterator[None]:
        """The operands lie where the code finds them; afterwards what was there does."""
        held = [place for _, place in self.places] + [place for place, _, _ in self.tuples.values()]
        before = [_read(place) for place in held]
        try:
            for i, place in self.places:
                _write(place, operands[i])
            for place, old, items in self.tuples.values():
                new = [operands[items[k]] if k in items else x for k, x in enumerate(old)]
                laid = type(old)(*new) if hasattr(old, "_fields") else tuple(new)
                self.laid.add(id(laid))
                _write(place, laid)
            yield
        finally:
            self.laid.clear()
            for place, old in zip(held, before, strict=True):
                _write(place, old)


def _is_of_class(place: Location) -> bool:
    """Is it an attribute of a class, or in a tuple that is one?"""
    if isinstance(place.container, tuple) and place.inside is not None:
        return _is_of_class(place.inside.place)
    return isinstance(place.container, types.MappingProxyType)


_GONE = object()


def _read(place: Location) -> Any:
    try:
        return place.read()
    except (KeyError, IndexError, AttributeError, ValueError):
        return _GONE


def _write(place: Location, value: Any) -> None:
    if value is not _GONE:
        place.write(value)
    elif isinstance(place.container, dict):
        place.container.pop(place.key, None)


def _fits(tracer: Tracer, x: torch.Tensor) -> bool:
    """Can it be a value of the program?  What cannot stays where it is."""
    return _is_dense(x) and (x.ndim == 0 or len({x.device.type, tracer.device.type} - {"meta"}) < 2)


def _is_dense(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and not x.is_quantized and not x.is_nested


def _is_differentiable(x: torch.Tensor) -> bool:
    return is_float(x.dtype) and (type(x) is Traced or x.requires_grad)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and (torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all()))


def _check_tree(tree: Tree, fn: Any) -> None:
    """NoIslandError where a call returns what is no tensor and no plain value."""
    if tree.kind == "named" and tree.key is torch.nn.utils.rnn.PackedSequence:
        raise NoIslandError(f"{_name(fn, '')} returns a packed sequence, whose sizes are data")
    for value in tree.statics():
        if not is_static(value):
            raise NoIslandError(f"{_name(fn, '')} returns a {type(value).__name__}")


class _Watched(TorchDispatchMode):
    """Counts operators, stops after `most` of them (values that were not meant may never converge), and notes those
    whose shapes are data."""

    def __init__(self, most: int = sys.maxsize) -> None:
        super().__init__()
        self.most, self.count, self.dynamic = most, 0, False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, seconds, to wrap this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.dynamic = self.dynamic or torch.Tag.dynamic_output_shape in func.tags
        if self.count > self.most:
            raise RuntimeError("does not end")
        return func(*args, **(kwargs or {}))


def _others(values: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Values a little off, and further off."""
    for scale in (0.05, 0.5):
        with suspended():
            generator = torch.Generator().manual_seed(0)
            others = [x + (x.abs() + 0.1) * scale * _noise(x, generator) if is_float(x.dtype) else x for x in values]
        yield others


def _extremes(values: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Values of which all are above, or all below, what a mask would compare them with."""
    for sign in (1.0, -1.0):
        with suspended():
            others = [sign * (x.abs() + 0.1) if is_float(x.dtype) else x for x in values]
        yield others


def _counts(values: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Integers and masks that are all the smallest, or all the largest, of what is there."""
    for extreme in (torch.min, torch.max):
        with suspended():
            others = [x if is_float(x.dtype) or not x.numel() else extreme(x).expand_as(x).clone() for x in values]
        yield others


def _noise(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(x.shape, generator=generator, dtype=torch.float32).to(x.device, x.dtype)


@contextlib.contextmanager
def _states() -> Iterator[Callable[[], bool]]:
    """All generators are in here what they are afterwards; were they asked?"""
    numpy: Any = sys.modules.get("numpy")

    def now() -> tuple[Any, ...]:
        cuda = [x.clone() for x in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
        arrays = numpy.random.get_state() if numpy else None
        return torch.get_rng_state(), cuda, random.getstate(), arrays

    before = now()
    asked: list[bool] = []

    def drawn() -> bool:
        return asked[0]

    try:
        yield drawn
    finally:
        after = now()
        asked.append(
            not torch.equal(before[0], after[0])
            or any(not torch.equal(a, b) for a, b in zip(before[1], after[1], strict=False))
            or before[2] != after[2]
            or repr(before[3]) != repr(after[3])
        )
        torch.set_rng_state(before[0])
        if before[1]:
            torch.cuda.set_rng_state_all(before[1])
        random.setstate(before[2])
        if numpy:
            numpy.random.set_state(before[3])


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """In here torch, modules and rewritten code do what they do when nothing is captured."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(torch._C._pop_torch_function_stack())
    captures, TRACING[:] = TRACING[:], []
    patches = [p for capture in captures for p in capture.patches]
    for patch in reversed(patches):
        patch.unset()
    compiling, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
    try:
        with _disable_current_modes(), torch._C._ForceDispatchKeyGuard(*_PLAIN_KEYS):
            yield
    finally:
        torch.compiler._is_compiling_flag = compiling
        for patch in patches:
            patch.set()
        TRACING[:] = captures
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


_PLAIN_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


# -- values to try it on


def sample(tracer: Tracer, x: torch.Tensor) -> torch.Tensor:
    """A value of a tensor: computed from the arguments and parameters at hand, made up where these have no data."""
    with tracer:
        var = tracer.cell(x).read()
    values = tracer.samples
    inputs = dict(zip(tracer.inputs, (t for t, _ in tracer.lifted.values()), strict=False))
    with torch.no_grad(), suspended():
        stack = [var]
        while stack:
            v = stack[-1]
            eqn = tracer.made.get(v)
            if v in values:
                stack.pop()
            elif v in inputs or eqn is None or eqn.op in CONTROL or eqn.op.effect or eqn.op.by_rank:
                values[v] = _given(tracer, v, inputs.get(v))
                stack.pop()
            elif missing := [w for w in eqn.vars if w not in values]:
                stack += missing
            else:
                values.update(zip(eqn.outputs, _computed(tracer, eqn, values), strict=True))
                stack.pop()
    return values[var]


def _given(tracer: Tracer, var: Var, tensor: torch.Tensor | None) -> torch.Tensor:
    held = tracer.sources.get(var, tensor)
    if type(held) is Traced:
        outer: Any = held.tracer
        held = sample(outer, held) if outer is not tracer else None
    if held is None or held.device.type == "meta" or var == KEY:
        return _made_up(tracer, var.type)
    return held.detach().to(tracer.device)


def _made_up(tracer: Tracer, t: Type) -> torch.Tensor:
    tracer.made_up = True
    generator = torch.Generator().manual_seed(t.numel)
    device = "cpu" if tracer.device.type == "meta" else tracer.device
    if is_float(t.dtype):
        return torch.randn(t.shape, generator=generator).to(device, t.dtype)
    return torch.ones(t.shape, dtype=t.dtype, device=device)


def _computed(tracer: Tracer, eqn: Any, values: dict[Var, Any]) -> Sequence[Any]:
    try:
        if eqn.op is o.const:
            return [tracer.consts[eqn.params["name"]].to(tracer.device)]
        extra = {"device": tracer.device} if "device" in eqn.op.defaults else {}
        outs = eqn.op.kernel(*(values[a] if isinstance(a, Var) else a for a in eqn.inputs), **eqn.params, **extra)
        return outs if isinstance(outs, (tuple, list)) and len(eqn.outputs) != 1 else [outs]
    except Exception:
        return [_made_up(tracer, v.type) for v in eqn.outputs]
