"""Trying a call as an island: what it gives on values at hand, and whether others give the same types.

Operands are the tensors of the arguments and all that the code reaches; while it runs, they lie where it finds them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mycel.capture.counters import Slot, slot_of
from mycel.capture.facts import same_values
from mycel.capture.function_context import Context
from mycel.capture.locations import Container, Location, TupleItem, with_items
from mycel.capture.operand_views import OperandViews
from mycel.capture.plain import CountedOperators, states_kept, suspended, unheard
from mycel.capture.record import Traced
from mycel.capture.sampling import counts, extremes, others, sample
from mycel.capture.slot_holders import contents, owner, put_back
from mycel.capture.state import Reachable, is_static
from mycel.capture.trace import Tracer
from mycel.capture.traced_text import TracedText
from mycel.capture.tree import Tree, flatten, holds_tensors
from mycel.capture.unfollowed import (
    Untouched,
    is_rehearsal,
    is_unfollowed,
    island_run,
    keep_apart,
    real_at,
    sink,
    state_of,
    untouched,
)
from mycel.errors import RunError
from mycel.ir import Type, Var, is_float, type_of


class NoIslandError(Exception):
    """A call that cannot be an island: `why`.  `final`: nor can one around it."""

    def __init__(self, why: str, final: bool = False) -> None:
        super().__init__(why)
        self.why, self.final = why, final
        self.kept_in: Container | None = None  # a list that it changes, where it keeps tensors


def call_name(fn: Any, source: str) -> str:
    target = fn if isinstance(fn, torch.nn.Module) else getattr(fn, "__self__", None)
    kind = type(target).__name__ if isinstance(target, torch.nn.Module) else ""
    called = "" if isinstance(fn, torch.nn.Module) else getattr(fn, "__name__", type(fn).__name__)
    return f"{'.'.join(filter(None, (kind, called)))} at {source}".removesuffix(" at ")


class Trial:
    """A call on tensors that are put where its code finds them; then what runs at every call of the program."""

    def __init__(
        self, tracer: Tracer, fn: Callable[..., Any], args: Any, kwargs: Any, lists: Sequence[Container] = ()
    ) -> None:
        self.tracer, self.fn = tracer, fn
        self.grad = torch.is_grad_enabled()
        leaves: list[torch.Tensor] = []
        self.arguments = flatten((args, kwargs), leaves, objects=True)
        reached = Reachable(fn, self.arguments.statics())
        for box in lists:
            reached.leave_to_python(box.slots)
        if lists:
            self._forget([(box.slots, None) for box in lists])
        if reached.iterators:
            raise NoIslandError(
                f"{call_name(fn, '')} reaches an iterator, which would go on once more for the gradient"
            )
        if any(type(value) is Untouched for value in self.arguments.statics()):
            raise NoIslandError(f"{call_name(fn, '')} is given what Python alone knows the state of")
        if any(isinstance(value, types.CoroutineType) for value in self.arguments.statics()):
            raise NoIslandError(f"{call_name(fn, '')} is given a coroutine, which runs once")
        if any(type(value) is Context for value in self.arguments.statics()):
            raise NoIslandError(f"{call_name(fn, '')} shares what it keeps with the gradient of its function")
        if any(type(value) is TracedText for value in self.arguments.statics()):
            raise NoIslandError(f"{call_name(fn, '')} is given text of a tensor")
        self.boxes: list[Container] = reached.boxes
        self.unfollowed = reached.unfollowed
        self.states: list[Callable[[], None]] = []  # of these, before the last run
        self.operands: list[torch.Tensor] = []
        at: dict[int, int] = {}
        for x, places in [(places[0].read(), places) for places in reached.tensors.values()]:
            if any(map(_is_of_class, places)):  # stays there; what is traced or trained cannot
                if _is_differentiable(x) or type(x) is Traced:
                    raise NoIslandError(f"{call_name(fn, '')} reaches a tensor of a class, {places[0].name}")
                del reached.tensors[id(x)]
        tensors = [places[0].read() for places in reached.tensors.values()]
        for x in (*leaves, *(x for x in tensors if _fits(tracer, x))):
            if id(x) not in at:
                at[id(x)] = len(self.operands)
                self.operands.append(x)
        self.views = OperandViews(tracer, self.operands)
        self.leaves = [at[id(x)] for x in leaves]
        everywhere = [
            (at[id(x)], place)
            for x, places in zip(tensors, reached.tensors.values(), strict=True)
            if id(x) in at
            for place in places
        ]
        self.places = [(i, p) for i, p in everywhere if not isinstance(p.container, tuple)]
        self.tuples: dict[int, tuple[Location, Any, dict[int, int]]] = {}  # where a tuple is, and what of it
        self.tuples_laid: set[int] = set()  # the tuples that stand there during a call
        for i, p in everywhere:
            if isinstance(p.container, tuple):
                if p.inside is None or isinstance(p.inside.place.container, tuple):
                    raise NoIslandError(f"{call_name(fn, '')} reaches tensors in tuples of tuples")
                self.tuples.setdefault(id(p.container), (p.inside.place, p.container, {}))[2][p.key] = i
        self.numbers = {i for i, x in enumerate(self.operands) if type(x) is Traced and x.weak}  # for Python: numbers
        self.reached: set[int] = set()  # operands that torch gives a gradient
        self.before: list[dict[Any, Any]] = []  # plain values before the last run, which that one changed
        self.differentiable = [i for i, x in enumerate(self.operands) if _is_differentiable(x)]
        self.asking = list(self.differentiable) if self.grad else []  # those that say requires_grad
        self.written: frozenset[int] = frozenset()
        self.kept: list[tuple[Location, Tree]] = []  # slots that hold new tensors after the call
        self.kept_before: list[Any] = []  # what was in these
        self.changes_python = self.draws = False
        self.ran: set[types.CodeType] = set()  # what the call runs
        self.changed: dict[Slot, tuple[str, Any, Any, Any]] = {}  # plain values: the box's name, key, before, after
        self.changed_later: set[Slot] = set()  # … that backward changes
        self.out = Tree("static")
        self.types: list[Type] = []

    # -- while capturing

    def probe(self) -> None:
        """Find out what the call gives, and that other values give the same types."""
        values = [sample(self.tracer, x) for x in self.operands]
        watched = CountedOperators()
        first = self._try(values, watched) or self._try(values)
        if first is None and not self.grad:  # it may take gradients itself, and what torch has not recorded has none
            self.asking = list(self.differentiable)
            first = self._try(values)
        if first is None:
            # with values that were made up it may, and yet be right; or the code around catches that
            final = not self.tracer.made_up and not self.tracer.caught
            raise NoIslandError("its code fails in plain Python, too", final=final)
        self.written, self.kept, self.out, self.types, self.draws, self.changes_python = first
        if not self.types:
            raise NoIslandError(f"{call_name(self.fn, '')} returns no tensor")
        _check_tree(self.out, self.fn)
        for _, tree in self.kept:
            _check_tree(tree, self.fn)
        sizes = counts(values) if self.tracer.changing else ()  # what keeps changing may be what they say
        for changed in (*others(values), *(extremes(values) if watched.dynamic else ()), *sizes):
            other = self._try(changed, CountedOperators(4 * watched.count + 1000))
            if other is not None:
                self._compare(*other)
        self.differentiable = [i for i in self.differentiable if i in self.reached or self._may_be_used(i)]
        del self.operands[self.views.needed :]
        self.differentiable, self.asking = (
            [i for i in some if i < len(self.operands)] for some in (self.differentiable, self.asking)
        )

    def _may_be_used(self, i: int) -> bool:
        """Is an operand a parameter that other values, items of iterators or random numbers may choose?  Where they do
        not, it is left alone (`transform/uses.py`)."""
        return bool(self.reached) and isinstance(self.operands[i], torch.nn.Parameter)

    def _compare(
        self, written: frozenset[int], kept: Any, out: Tree, types_: list[Type], draws: bool, changes: bool
    ) -> None:
        """NoIslandError where other values gave other types; what is written for some of them counts as written."""
        count, mine = len(types_) - len(written), len(self.types) - len(self.written)
        if out != self.out or types_[:count] != self.types[:mine] or len(kept) != len(self.kept):
            raise NoIslandError(f"what {call_name(self.fn, '')} returns depends on values")
        news = {
            **dict(zip(sorted(self.written), self.types[mine:], strict=True)),
            **dict(zip(sorted(written), types_[count:], strict=True)),
        }
        self.written, self.types = frozenset(news), types_[:count] + [news[i] for i in sorted(news)]
        self.draws, self.changes_python = self.draws or draws, self.changes_python or changes

    def _try(self, values: Sequence[torch.Tensor], watched: Any = None) -> Any:
        """What one run of the call did, under a mode that watches it; None where it failed."""
        while (did := self._run(values, watched)) is _AGAIN:
            pass
        return did

    def _run(self, values: Sequence[torch.Tensor], watched: Any) -> Any:
        """The same; `_AGAIN` where it wrote an operand that shares memory with others: these are its views now."""
        olds = [contents(box.slots) for box in self.boxes]
        states = self._states()
        with suspended(), torch.set_grad_enabled(self.grad), states_kept() as drawn:
            leaves = [x.detach().clone().requires_grad_(i in self.asking) for i, x in enumerate(values)]
            given = [
                x if isinstance(p, torch.nn.Parameter) or not self.grad else x.clone()
                for x, p in zip(leaves, self.operands, strict=True)
            ]
            before = [x.detach().clone() for x in given]
            try:
                given = self.views.laid(given)
                with self.placed(given, silent=True):
                    try:
                        with watched or contextlib.nullcontext(), _noting(self.ran):
                            result = self._called(given)
                    except Exception:
                        return None
                    out_leaves: list[torch.Tensor] = []
                    out = flatten(result, out_leaves, objects=True)
                    written, kept, changes = self._changes(given, before)
                    known, written = self.views.written, self.views.note(written)
                    if self.views.written != known:
                        return _AGAIN
                    kept_trees = []
                    for place in kept:
                        kept_trees.append((place, flatten(place.read(), out_leaves, objects=True)))
                    if any(x.is_leaf and x.grad is not None for x in given):
                        raise NoIslandError("it leaves gradients in .grad of parameters", final=True)
                    if any(not _is_dense(x) for x in out_leaves):
                        raise NoIslandError(f"{call_name(self.fn, '')} returns a tensor that is not dense")
                    news = [self._new_value(i, given) for i in sorted(written)]
                    behind = [contents(box.slots) for box in self.boxes]
                    self._reach([*out_leaves, *news], leaves)
                    later = self._changed_since(behind)
                    self._note_changes(olds, later)
                    if any(type_of(x) != type_of(before[i]) for i, x in zip(sorted(written), news, strict=True)):
                        raise NoIslandError("it changes the shape of an argument", final=True)
                    types_ = [type_of(x) for x in (*out_leaves, *news)]
            except NoIslandError:
                raise
            except Exception as e:
                raise NoIslandError(f"{call_name(self.fn, '')}: {type(e).__name__}: {e}") from e
            finally:
                for box, old in zip(self.boxes, olds, strict=True):
                    put_back(box.slots, old)
                for state in states:
                    state()
        self._forget(
            [*changes, *((box.slots, key) for box, key in later), *((place.container, place.key) for place in kept)]
        )
        return frozenset(written), kept_trees, out, types_, drawn(), bool(changes)

    def _reach(self, outs: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        """Note which operands the results have a gradient for: those without one are not trained."""
        asked = [i for i in self.asking if i not in self.reached and self.grad]
        ys = [y for y in outs if y.requires_grad and is_float(y.dtype)]
        if asked and ys:
            gs = [torch.zeros_like(y) for y in ys]
            grads = torch.autograd.grad(ys, [operands[i] for i in asked], gs, allow_unused=True)
            self.reached |= {i for i, g in zip(asked, grads, strict=True) if g is not None}

    def _note_changes(self, held: Sequence[dict[Any, Any]], later: Sequence[tuple[Container, Any]]) -> None:
        """Remember which plain values are others now, and which of them backward changes."""
        self.changed_later |= {slot_of(box, key) for box, key in later}
        for box, old in zip(self.boxes, held, strict=True):
            now = contents(box.slots)
            for key, value in now.items():
                if value is not old.get(key) and is_static(value) and type(old.get(key)) is not Traced:
                    self.changed[slot_of(box, key)] = box.name, key, old.get(key), value

    def _changed_since(self, held: Sequence[dict[Any, Any]]) -> list[tuple[Container, Any]]:
        """Slots with other plain values: what backward changes."""
        return [
            (box, key)
            for box, old in zip(self.boxes, held, strict=True)
            for key, value in contents(box.slots).items()
            if value is not old.get(key) and is_static(value)
        ]

    def _changes(
        self, given: Sequence[torch.Tensor], before: Sequence[torch.Tensor]
    ) -> tuple[set[int], list[Location], list[tuple[Any, Any]]]:
        """Operands with new values, slots with tensors that were not there, and slots with other plain values."""
        written = {
            i
            for i, (x, old) in enumerate(zip(given, before, strict=True))
            if x._version or not same_values(x.detach(), old)
        }
        slot_of = {(id(owner(p.container)), p.key): i for i, p in self.places}
        rebound: list[Location] = []
        plain: list[tuple[Any, Any]] = []
        for box in self.boxes:
            now = contents(box.slots)
            for key in {**box.old, **now}:
                new, old = now.get(key), untouched(box.old.get(key))
                i = slot_of.get((id(owner(box.slots)), key))
                if i is not None:
                    if new is given[i]:
                        continue
                    if i in self.views:
                        raise NoIslandError(f"{call_name(self.fn, '')} gives {box.name}.{key} other memory")
                    if i in self.numbers and is_static(new):
                        written |= {i} if new != given[i].item() else set()
                        continue
                    if isinstance(new, torch.Tensor) and type_of(new) == type_of(given[i]):
                        written.add(i)
                        continue
                    old = given[i]
                if new is old or id(new) in self.tuples_laid or (is_static(new) and is_static(old) and new == old):
                    continue
                place = Location(f"{box.name}.{key}", box.kind, box.slots, key, box.inside)
                if is_unfollowed(new):  # made by the code itself
                    plain.append((box.slots, key))
                    if not any(p.container is box.slots and p.key == key for p in self.unfollowed):
                        self.unfollowed.append(place)
                elif isinstance(new, torch.Tensor) or holds_tensors(new):
                    if isinstance(box.slots, list) or box.kind == "variable":
                        error = NoIslandError(f"{call_name(self.fn, '')} keeps tensors in {box.name}")
                        error.kept_in = box if isinstance(box.slots, list) and not _records(new) else None
                        raise error
                    rebound.append(place)
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
        self.kept_before = [_read(place) for place, _ in self.kept]
        for place, tree in self.kept:
            place.write(tree.unflatten(tensors))
        with tracer:
            for i, new in zip(sorted(self.written), outs[count:], strict=True):
                tracer.cell(self.operands[i]).write(new)
        self.operands = []  # of a capture that is over soon
        del self.tracer
        return value

    # -- at every call of the program

    def is_like(self, other: Trial) -> bool:
        """Does it run the same code in the same way?"""

        def ways(trial: Trial) -> Any:
            at = [(i, id(p.container), p.key) for i, p in trial.places]
            kept = [(id(p.container), p.key, tree) for p, tree in trial.kept]
            given = trial.fn, trial.arguments, trial.leaves, at, trial.views.ways_shown
            return given, kept, trial.out, trial.changes_python

        has_state = bool(self.unfollowed) or self.changes_python  # before each run: that of one would be the other's
        return not has_state and bool(ways(self) == ways(other))

    def laid(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that share memory with one that is written, as views of it."""
        return self.views.laid(operands)

    def __call__(self, operands: Sequence[torch.Tensor], again: bool) -> list[torch.Tensor]:
        if is_rehearsal():
            return self._rehearsed(operands)
        if not self.unfollowed:
            return self._once(operands, again)
        things = self._things()
        states = self._states()
        if not again:
            self.states = states
            results = self._once(operands, again)
            keep_apart(things, operands)
            return results
        for state in self.states:  # it finds what it found the first time
            state()
        try:
            return self._once(operands, again)
        finally:
            for state in states:
                state()

    def _rehearsed(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What it would give; everything is as it was then."""
        olds, states = [contents(box.slots) for box in self.boxes], self._states()
        try:
            return self._once(operands, again=False, silent=True)
        finally:
            for box, old in zip(self.boxes, olds, strict=True):
                put_back(box.slots, old)
            for state in states:
                state()

    def _states(self) -> list[Callable[[], None]]:
        """What makes these objects again what they are now, each in its place."""
        things = self._things()
        held = [(place, at) for place in self.unfollowed if (at := _read(place)) is not _GONE]
        return [*map(state_of, things), *(functools.partial(place.write, at) for place, at in held)]

    def _things(self) -> list[Any]:
        """The objects that Python alone knows the state of, as far as they are there."""
        return [real_at(place) for place in self.unfollowed if _read(place) is not _GONE]

    def _once(self, operands: Sequence[torch.Tensor], again: bool, silent: bool = False) -> list[torch.Tensor]:
        olds = None
        if self.changes_python:
            olds = [contents(box.slots) for box in self.boxes]
            if again:  # it finds what it found the first time
                for box, old in zip(self.boxes, self.before, strict=True):
                    put_back(box.slots, old)
            else:
                self.before, olds = olds, None
        try:
            with self.placed(operands, silent=again or silent):
                leaves: list[torch.Tensor] = []
                before = [_read(place) for place, _ in self.kept]
                for (place, _), now, then in zip(self.kept, before, self.kept_before, strict=True):
                    if _holds_traced(now):  # in an object that the captured code made: the call had not filled it
                        _write(place, then)
                try:
                    out = flatten(self._called(operands), leaves, objects=True)
                    if out != self.out:
                        raise RunError(
                            f"an island, {call_name(self.fn, '')}, returned something else than when it was captured\n"
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
        args, kwargs = self.arguments.unflatten(iter([self._as_python(i, operands[i]) for i in self.leaves]))
        with island_run():
            return self.fn(*args, **kwargs)

    def _as_python(self, i: int, operand: torch.Tensor) -> Any:
        """An operand as the code finds it."""
        return operand.item() if i in self.numbers else operand

    def _new_value(self, i: int, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """What an operand is after the call: itself, or what is in its place."""
        for at, place in self.places:
            if at == i and (now := _read(place)) is not operands[i]:
                if i in self.numbers and type(now) in (bool, int, float):
                    return torch.tensor(now, dtype=operands[i].dtype, device=operands[i].device)
                if isinstance(now, torch.Tensor):
                    return now
        return operands[i]

    @contextlib.contextmanager
    def placed(self, operands: Sequence[torch.Tensor], silent: bool = False) -> Iterator[None]:
        """The operands lie where the code finds them; afterwards what was there does.  `silent`: nothing is said,
        and files are not written to."""
        held = [place for _, place in self.places] + [place for place, _, _ in self.tuples.values()]
        stands_in = [place for place in self.unfollowed if type(_read(place)) is Untouched]
        files = [(place, real) for place in self.unfollowed if isinstance(real := untouched(_read(place)), io.IOBase)]
        held += [*stands_in, *(place for place, _ in files)]
        before = [_read(place) for place in held]
        sinks = {id(real): sink(real) for _, real in files} if silent else {}
        said = contextlib.ExitStack()
        try:
            if silent:
                said.enter_context(unheard())
            for place in stands_in:
                place.write(untouched(place.read()))
            self.tuples_laid |= {id(place.whole()) for place in stands_in if isinstance(place, TupleItem)}
            for place, real in files if silent else ():
                self.tuples_laid.add(id(sinks[id(real)]))
                place.write(sinks[id(real)])
            for i, place in self.places:
                _write(place, self._as_python(i, operands[i]))
            for place, old, items in self.tuples.values():
                laid = with_items(old, [operands[items[k]] if k in items else x for k, x in enumerate(place.read())])
                self.tuples_laid.add(id(laid))
                _write(place, laid)
            yield
        finally:
            said.close()
            self.tuples_laid.clear()
            for place, old in zip(held, before, strict=True):
                _write(place, old)


@contextlib.contextmanager
def _noting(ran: set[types.CodeType]) -> Iterator[None]:
    """Which Python runs in here."""
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: ran.add(frame.f_code) if event == "call" else None)
    try:
        yield
    finally:
        sys.setprofile(before)


def _is_of_class(place: Location) -> bool:
    """Is it an attribute of a class, or in a tuple that is one?"""
    if isinstance(place.container, tuple) and place.inside is not None:
        return _is_of_class(place.inside.place)
    return isinstance(place.container, types.MappingProxyType)


_GONE = object()
_AGAIN = object()


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


def _records(value: Any) -> bool:
    """Does it hold tensors through which gradients flow?"""
    leaves: list[torch.Tensor] = []
    flatten(value, leaves, objects=True)
    return any(x.requires_grad for x in leaves)


def _holds_traced(value: Any) -> bool:
    leaves: list[torch.Tensor] = []
    if isinstance(value, torch.Tensor) or holds_tensors(value):
        flatten(value, leaves, objects=True)
    return any(type(x) is Traced for x in leaves)


def _is_differentiable(x: torch.Tensor) -> bool:
    return is_float(x.dtype) and (type(x) is Traced or x.requires_grad)


def _check_tree(tree: Tree, fn: Any) -> None:
    """NoIslandError where a call returns what is no tensor and no plain value."""
    if tree.kind == "named" and tree.key is torch.nn.utils.rnn.PackedSequence:
        raise NoIslandError(f"{call_name(fn, '')} returns a packed sequence, whose sizes are data")
    for value in tree.statics():
        if not is_static(value):
            raise NoIslandError(f"{call_name(fn, '')} returns a {type(value).__name__}")
