"""Objects outside of the code whose state capture does not follow: deques, iterators, generators of random numbers,
files.

    self.recent.append(loss.item())        a deque
    next(self.widths)                      an itertools.cycle
    self.rng.permutation(n)                a numpy.random.RandomState

While the code is traced, an `Untouched` stands for such an object and refuses whatever is asked of it: the call that
touches it becomes an island (`trial.py`), which finds the object itself, and finds it as it was when it runs once more
for a gradient; what it writes to files then goes nowhere.  In the place of an iterator is one that can go back.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from mycel.capture.fence import refuse
from mycel.capture.tree import flatten

_NUMPY = ("RandomState", "Generator")


def is_unfollowed(value: Any) -> bool:
    """A deque of other things than modules and parameters, an iterator, a generator of random numbers, or a file that
    is written."""
    if isinstance(value, deque):
        return not any(isinstance(x, (torch.nn.Module, torch.nn.Parameter)) for x in value)
    if isinstance(value, io.IOBase):
        return not value.closed and value.writable()
    return (
        type(value) is Untouched
        or isinstance(value, (random.Random, torch.Generator, Iterator))
        or (type(value).__module__.startswith("numpy.random") and type(value).__name__ in _NUMPY)
    )


class Untouched:
    """What stands for such an object while code is traced."""

    __slots__ = ("real", "shown")

    def __init__(self, real: Any, shown: str) -> None:
        self.real, self.shown = real, shown

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        _touch(self)


def _touch(thing: Untouched, *args: Any) -> NoReturn:
    real, shown = (object.__getattribute__(thing, name) for name in ("real", "shown"))
    kind = type(real.plain if type(real) is Rewindable else real).__name__
    raise refuse(
        f"{shown}, a {kind} that lives outside of the function, is used: its state is Python's",
        "a buffer of a fixed size, torch's default generator, or using it outside of the function",
    )


_USES = (
    "__iter__ __next__ __len__ __bool__ __getitem__ __setitem__ __delitem__ __contains__ __reversed__ __add__ __iadd__ "
    "__mul__ __imul__ __copy__ __deepcopy__ __repr__ __str__"
)
for _name in _USES.split():
    setattr(Untouched, _name, _touch)


def untouched(value: Any) -> Any:
    """The object that an `Untouched` stands for; any other is itself."""
    return object.__getattribute__(value, "real") if type(value) is Untouched else value


class Rewindable:
    """An iterator in the place of another, which gives its items and can go back."""

    __slots__ = ("items", "plain")

    def __init__(self, plain: Iterator[Any]) -> None:
        self.plain = plain
        (self.items,) = itertools.tee(plain, 1)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self.items)
        leaves: list[torch.Tensor] = []
        if _runs:
            flatten(item, leaves, objects=True)
        if any(x.requires_grad for x in leaves):  # it is not the operand that stands for it
            raise refuse(
                "an iterator that lives outside of the function gives parameters, which would get no gradient",
                "an iterator over numbers, and self.parameters_of[number]",
            )
        return item

    def __getattr__(self, name: str) -> Any:
        if name in Rewindable.__slots__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.plain, name)


_runs: list[bool] = []


@contextlib.contextmanager
def island_run() -> Iterator[None]:
    """In here an island runs, on operands that stand for the tensors it reaches."""
    _runs.append(True)
    try:
        yield
    finally:
        _runs.pop()


def real_at(place: Any) -> Any:
    """The object at a place, where it is one that Python alone knows the state of; in the place of an iterator there
    is one that can go back from now on."""
    real = untouched(place.read())
    if is_plain_iterator(real):
        real = Rewindable(real)
        place.write(real)
    return real


def is_plain_iterator(value: Any) -> bool:
    """An iterator that cannot go back."""
    return isinstance(value, Iterator) and not isinstance(value, (Rewindable, Untouched, io.IOBase))


def rewindable(iterator: Iterator[Any]) -> Rewindable:
    """One that can, in its place."""
    return Rewindable(iterator)


class UntouchedObjects:
    """All such objects that some code reaches, while it is traced."""

    def __init__(self, locations: Iterable[Any]) -> None:
        known = [(place, real_at(place)) for place in locations if type(place.read()) is not Untouched]
        self.held = [(place, real) for place, real in known if not isinstance(real, torch.Generator)]
        self.states = [state_of(real) for _, real in known if isinstance(real, torch.Generator)]  # refused where used
        stands_in = {id(real): Untouched(real, place.name) for place, real in self.held}
        for place, real in self.held:
            place.write(stands_in[id(real)])

    def put_back(self) -> None:
        """They are where they were, and what they were."""
        for state in self.states:
            state()
        for place, real in self.held:
            if untouched(place.read()) is real:
                place.write(real)


def state_of(thing: Any) -> Callable[[], None]:
    """What makes the object again what it is now."""
    if isinstance(thing, (deque, list)):
        items = [*thing]

        def refill() -> None:
            thing.clear()
            thing.extend(items)

        return refill
    if isinstance(thing, Rewindable):
        rest = copy.copy(thing.items)
        return lambda: setattr(thing, "items", copy.copy(rest))
    if isinstance(thing, random.Random):
        state = thing.getstate()
        return lambda: thing.setstate(state)
    if isinstance(thing, io.IOBase):  # others may write to it, too: nothing is taken back (`sink`)
        return lambda: None
    if hasattr(thing, "bit_generator"):
        drawn = thing.bit_generator.state
        return lambda: setattr(thing.bit_generator, "state", drawn)
    known = thing.get_state()
    return lambda: thing.set_state(known) and None


_rehearsals: list[bool] = []


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """In here islands leave everything as it is: their values alone are asked for."""
    _rehearsals.append(True)
    try:
        yield
    finally:
        _rehearsals.pop()


def is_rehearsal() -> bool:
    return bool(_rehearsals)


def sink(file: io.IOBase) -> io.IOBase:
    """A file that stands for one which is not to be written to, as code runs that has run before or will."""
    return io.StringIO() if isinstance(file, io.TextIOBase) else io.BytesIO()


def keep_apart(things: Sequence[Any], operands: Sequence[torch.Tensor]) -> None:
    """Tensors in deques and lists share no memory with operands, which the program may use for something else."""
    memory = {x.untyped_storage().data_ptr() for x in operands if x.numel()}
    for thing in things:
        for i, item in enumerate(thing) if isinstance(thing, (deque, list)) else ():
            leaves: list[torch.Tensor] = []
            tree = flatten(item, leaves, objects=True)
            if any(x.untyped_storage().data_ptr() in memory for x in leaves):
                thing[i] = tree.unflatten(iter([x.clone() for x in leaves]))
