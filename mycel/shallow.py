"""A model with fewer of its equal layers stands for the whole one: planning 126 layers costs what planning four does.

    lists       every nn.ModuleList and nn.Sequential with many entries that look alike
    base        the step with `FEW` entries left of each list; and for each list the step with one period more of it
    whole       figure(base) + Σ periods left out · (figure(one more) - figure(base))

Seconds, bytes sent and the bytes alive at a point of the step grow so.  That the steps do is checked, not assumed: the
whole program calls each of its blocks, and has inputs of each type, as often as that says.  A period is one layer, or
several where these take turns (full and windowed attention, say).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import nn

from mycel.ir import Program, order, runs, scan
from mycel.parts import UnshardedStep
from mycel.plan import Times
from mycel.plan.clock import DEVICE

FEW = 4  # entries that are left of a list: what one sends is under way while the next two are at work
MANY = 8  # entries of a list that is worth it
PERIODS = (1, 2, 3, 4, 6)
LISTS = 3  # at most


class Make(Protocol):
    """The step in so many microbatches, where a plan says this of messages; `placed`: in the form in which sub-models
    are put on ranks of their own."""

    def __call__(self, microbatches: int, said: Mapping[str, Any], /, placed: bool = ...) -> UnshardedStep: ...


NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class LayerList:
    """A list of layers: how many entries are left of it, how many one more period adds, how many periods it has."""

    module: nn.ModuleList | nn.Sequential
    kept: int
    period: int

    @property
    def left_out(self) -> int:
        """Periods."""
        return (len(self.module) - self.kept) // self.period


@dataclass
class Shallow:
    """The steps whose figures give those of the whole one."""

    lists: tuple[LayerList, ...]
    make: Make
    _steps: dict[tuple[Hashable, ...], UnshardedStep] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module, make: Make, whole: UnshardedStep) -> Shallow | None:
        """Nothing where the model has no such lists, or its steps do not grow with them."""
        modules = list(layer_lists(model))
        if not modules or len(modules) > LISTS:
            return None
        for period in PERIODS:
            kept = {m: FEW * period + (len(m) - FEW * period) % period for m in modules}
            if any(len(m) <= kept[m] + period for m in modules):
                break
            shallow = Shallow(tuple(LayerList(m, kept[m], period) for m in modules), make)
            try:
                steps = shallow.steps(1)
            except Exception:  # code of the model's that counts on all of its layers: it is planned as it is
                return None
            if shallow.stands_for([step.program for step in steps], whole.program):
                return shallow
        return None

    @property
    def weights(self) -> list[int]:
        """How often the figures of each step count: of the base, and of the one with more of each list."""
        more = [x.left_out for x in self.lists]
        return [1 - sum(more), *more]

    def steps(self, microbatches: int, said: Mapping[str, Any] = NOTHING) -> list[UnshardedStep]:
        """The base, and for each list the step with one period more of it."""
        return [self.base(microbatches, said), *(self._step(microbatches, said, x) for x in self.lists)]

    def base(self, microbatches: int, said: Mapping[str, Any] = NOTHING) -> UnshardedStep:
        """The step with `FEW` entries left of each list."""
        return self._step(microbatches, said)

    def _step(self, microbatches: int, said: Mapping[str, Any], longer: LayerList | None = None) -> UnshardedStep:
        """With one period more of a list, or of none."""
        key = (longer and id(longer.module), microbatches, repr(said))
        if key not in self._steps:
            with shortened({x.module: x.kept + x.period * (x is longer) for x in self.lists}):
                self._steps[key] = self.make(microbatches, said)
        return self._steps[key]

    def stands_for(self, programs: Sequence[Program], whole: Program) -> bool:
        """Are blocks and inputs of the whole program there as often as those of the others say?"""
        counts = [_counts(p) for p in programs]
        expected: Counter[Hashable] = Counter()
        for count, weight in zip(counts, self.weights, strict=True):
            for key, n in count.items():
                expected[key] += weight * n
        return {k: n for k, n in expected.items() if n} == dict(_counts(whole))

    # -- figures

    def sum(self, figures: Sequence[float]) -> float:
        """A figure of the whole step from those of the steps."""
        return sum(w * x for w, x in zip(self.weights, figures, strict=True))

    def by_name(self, figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for each in figures for name in each)
        return {name: self.sum([each.get(name, 0.0) for each in figures]) for name in names}

    def times(self, steps: Sequence[Times]) -> Times:
        """What the whole step takes."""
        base = steps[0]
        held = int(self.sum([t.held for t in steps]))
        points = [t.points() for t in steps]
        peak = max(
            (int(self.sum([p[key] for p in points])) for key in points[0] if all(key in p for p in points)), default=0
        )
        return replace(
            base,
            seconds=self.sum([t.seconds for t in steps]),
            totals=self.by_name([t.totals for t in steps]),
            peak={**base.peak, DEVICE: held + max(peak, 0)},
            held=held,
            clock=None,
            program=None,
        )


def layer_lists(model: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    """Lists with many layers of one class, the outermost of those inside one another."""
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if len(module) >= MANY and len({type(x) for x in list(module)[FEW - 1 :]}) == 1:
            yield module
            inside.update(id(x) for x in module.modules())


@contextlib.contextmanager
def shortened(lengths: Mapping[nn.ModuleList | nn.Sequential, int]) -> Iterator[None]:
    """Inside, these lists have fewer entries."""
    entries = {module: module._modules for module in lengths}
    try:
        for module, length in lengths.items():
            module._modules = dict(list(module._modules.items())[:length])
        yield
    finally:
        for module, before in entries.items():
            module._modules = before


def _counts(program: Program) -> Counter[Hashable]:
    """How often the entry runs each block, by what it does, and how many inputs it has of each type; what the entry
    does besides by operator alone: it takes all parameters at once."""
    keys: dict[str, Hashable] = {}
    count: Counter[Hashable] = Counter()
    often = runs(program)
    grows = {program.entry, *(str(ref) for e in program.main.eqns if e.op is scan for ref in e.refs)}
    for name in order(program):
        if name in grows:
            count.update((often[name] * (name != program.entry), e.op.name) for e in program.blocks[name].eqns)
            continue
        eqns = program.blocks[name].eqns
        keys[name] = hash(
            tuple((e.op.name, e.input_types, _plain(e.params), tuple(keys.get(r, 0) for r in e.refs)) for e in eqns)
        )
        count[keys[name]] += often[name]
    for v in program.inputs:
        count[program.role(v).kind, v.type] += 1
    return count


def _plain(params: Mapping[str, Any]) -> Hashable:
    """Without names of blocks."""
    return tuple((k, str(x)) for k, x in sorted(params.items()) if k not in ("block", "body", "test", "then", "orelse"))
