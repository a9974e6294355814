"""`if` on a tensor: both branches are traced, what they change is given back by a `cond`.

A branch that raises (`if bad: raise ValueError`) becomes a check at run time: the other branch is the way the code
goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mycel.capture.alias import Cell
from mycel.capture.fence import refuse
from mycel.capture.merge import Merge, fit
from mycel.capture.nested import KEY, OpenBlock, branch_key, finish, free, journal, left_behind, moved, opened, written
from mycel.capture.slots import UNDEFINED, Objects, Slot, assigned, variables
from mycel.capture.trace import Tracer
from mycel.capture.traced_text import shown_types
from mycel.capture.tree import flatten
from mycel.ir import Ref, Var, atom_type, cond
from mycel.ops import o


@dataclass
class TracedClosure:
    """What one traced closure did: its equations, its value, and what it changed."""

    section: OpenBlock = field(default_factory=OpenBlock)
    value: Any = None
    variables: dict[str, Any] = field(default_factory=dict)
    contents: dict[int, Any] = field(default_factory=dict)
    writes: dict[Cell, Var] = field(default_factory=dict)
    moved: set[Cell] = field(default_factory=set)  # tensors of these that have other memory
    leaves_views: bool = False  # to the memory that one of them had
    vars: dict[int, Var] = field(default_factory=dict)  # of tensors, by id
    raised: BaseException | None = None
    _kept: list[Any] = field(default_factory=list)

    def var(self, tracer: Tracer, x: Any) -> Any:
        """The value of a tensor at the end of the closure; numbers as they are."""
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self.vars:  # an outer tensor the closure left where it was
            cell = tracer.cell(x)
            self._kept.append(x)
            self.vars[id(x)] = self.writes.get(cell) or cell.read()
        return self.vars[id(x)]

    def note(self, tracer: Tracer, values: Iterable[Any]) -> None:
        for value in values:
            leaves: list[torch.Tensor] = []
            flatten(value, leaves)
            self._kept += leaves
            for x in leaves:
                self.vars[id(x)] = tracer.cell(x).read()


def run(
    tracer: Tracer,
    fn: Callable[[], Any],
    slots: dict[str, Slot],
    objects: Objects,
    keep: Iterable[str],
    catch: bool = False,
) -> TracedClosure:
    """Trace a closure; the variables and objects it changed, and tensors of outside, are put back."""
    traced = TracedClosure()
    before = {name: slot.get() for name, slot in slots.items()}
    with journal() as notes, opened(tracer, traced.section):
        try:
            traced.value = fn()
            traced.variables = {name: slots[name].get() for name in keep if name in slots}
            traced.contents = objects.changes()
            with tracer:
                new = (v for i, c in traced.contents.items() for v in _new(objects.boxes[i].old, c))
                traced.note(tracer, (traced.value, *traced.variables.values(), *new))
                traced.writes = written(traced.section, notes)
                traced.moved = moved(notes)
                traced.leaves_views = left_behind(notes)
        except Exception as e:
            if not catch or e is not tracer.raised:
                raise
            traced.raised = e
        finally:
            objects.restore()
            for name, slot in slots.items():
                slot.set(before[name])
    return traced


def _new(old: Any, now: Any) -> list[Any]:
    """What is in a box now and was not there before."""
    if isinstance(now, list):
        return [v for i, v in enumerate(now) if i >= len(old) or old[i] is not v]
    return [v for k, v in now.items() if old.get(k, UNDEFINED) is not v] if isinstance(now, dict) else []


def branch(
    tracer: Tracer,
    test: torch.Tensor,
    then: Callable[[], Any],
    orelse: Callable[[], Any],
    names: Sequence[str],
    filler: bool = False,
    closures: Sequence[Callable[..., Any]] | None = None,
) -> Any:
    """then() if test else orelse(), for a traced 0-dim bool; `names` are the variables that are needed afterwards."""
    closures = (then, orelse) if closures is None else closures
    slots = variables(closures, assigned(closures))
    objects = Objects.reached((*closures, then, orelse), slots.values())
    runs = [run(tracer, fn, slots, objects, names, catch=True) for fn in (then, orelse)]
    if runs[0].raised is not None or runs[1].raised is not None:
        return _raising(tracer, test, then, orelse, runs)
    return _Branch(tracer, test, slots, objects, runs[0], runs[1], filler).emit(names)


def _raising(
    tracer: Tracer, test: torch.Tensor, then: Callable[[], Any], orelse: Callable[[], Any], runs: list[TracedClosure]
) -> Any:
    """One branch raises: that the test does not lead there is checked at run time."""
    error = runs[0].raised or runs[1].raised
    if runs[0].raised and runs[1].raised:
        raise runs[0].raised
    refuse_caught(tracer, error)
    check(tracer, ~test if runs[0].raised else test, f"{type(error).__name__}: {error}")
    return orelse() if runs[0].raised else then()


def refuse_caught(tracer: Tracer, error: BaseException | None) -> None:
    """CaptureError where a try statement around catches what a value decides to raise."""
    if any(isinstance(error, types()) for types in tracer.caught):
        raise refuse(
            f"a value decides whether {type(error).__name__} is raised, which is caught",
            "a branch (if, torch.where) in place of the exception",
        )


def check(tracer: Tracer, test: torch.Tensor, message: str) -> None:
    """An equation that stops the program where the test does not hold."""
    tracer.here()
    with tracer:
        o.assert_true(tracer.cell(test).read(), message=shown_types(message), source=tracer.source)


class _Branch:
    """Two traced branches, made one."""

    def __init__(
        self,
        tracer: Tracer,
        test: torch.Tensor,
        slots: dict[str, Slot],
        objects: Objects,
        then: TracedClosure,
        orelse: TracedClosure,
        filler: bool,
    ) -> None:
        self.tracer, self.test, self.slots, self.objects, self.then, self.orelse = (
            tracer,
            test,
            slots,
            objects,
            then,
            orelse,
        )
        self.merge = Merge(tracer, test, filler)

    def emit(self, names: Sequence[str]) -> Any:
        tracer, then, orelse = self.tracer, self.then, self.orelse
        tracer.here()
        value = self.merge("the value", then.value, orelse.value)
        wanted = {n: self._variable(n) for n in names if n in self.slots}
        boxes = {
            i: self._box(i) for i in sorted({*then.contents, *orelse.contents}, key=list(self.objects.boxes).index)
        }
        cells = list(dict.fromkeys([*then.writes, *orelse.writes]))
        outs = self._equation(cells)
        result = value(outs)
        new = {name: build(outs) for name, build in wanted.items()}
        for i, build in boxes.items():
            self.objects.boxes[i].replace(build(outs))
        for name, slot in self.slots.items():
            slot.set(new.get(name, UNDEFINED))
        tracer.maybe |= {name for name in self.slots if new.get(name, UNDEFINED) is UNDEFINED}
        for cell in cells:
            if cell in then.moved | orelse.moved:
                cell.move()
            cell.note()
            cell.var, cell.version = next(outs), cell.version + 1
        return result

    def _variable(self, name: str) -> Callable[[Any], Any]:
        """How to build a variable; flags and results of jumps, our own variables, are only read where they are
        defined."""
        merge = replace(self.merge, filler=self.merge.filler or "@" in name)
        return merge(self.slots[name].name, self.then.variables[name], self.orelse.variables[name])

    def _box(self, i: int) -> Callable[[Any], Any]:
        """How to build the contents of a list, dict or object after the branches."""
        box = self.objects.boxes[i]
        a, b = self.then.contents.get(i, box.old), self.orelse.contents.get(i, box.old)
        if isinstance(a, list) and len(a) != len(b):
            return self.merge(box.name, a, b)
        if isinstance(a, set) or (isinstance(a, dict) and a.keys() != b.keys()):
            raise refuse(
                f"{box.name or 'an object'} has other items after one branch than after the other",
                "the same items in both branches, with other values",
            )
        keys = range(len(a)) if isinstance(a, list) else a
        builds = {k: self.merge(box.slot(k).name, a[k], b[k]) for k in keys}
        if isinstance(a, list):
            return lambda outs: [build(outs) for build in builds.values()]
        return lambda outs: {k: build(outs) for k, build in builds.items()}

    def _equation(self, cells: list[Cell]) -> Any:
        """The cond, unless there is nothing to give back and nothing happens."""
        tracer = self.tracer
        outs = []
        for at, r in enumerate((self.then, self.orelse)):
            with opened(tracer, r.section), tracer:
                vars_ = [fit(r.var(tracer, pair[1 + at]), pair[3].type) for pair in self.merge.pairs]
                outs.append(vars_ + [r.writes.get(c, c.var) for c in cells])
        sections = self.then.section, self.orelse.section
        if not outs[0] and not any(e.op.effect or list(e.refs) for s in sections for e in s.eqns):
            return iter(())
        inputs = free(*sections, outputs=outs[0] + outs[1])
        with tracer:
            pred = tracer.cell(self.test).read()
            operands = [branch_key(tracer) if v is KEY else v for v in inputs]
            refs = {
                key: Ref(finish(tracer, f"if_{key}", r.section, inputs, out))
                for key, r, out in zip(("then", "orelse"), (self.then, self.orelse), outs, strict=True)
            }
            types = [atom_type(x) for x in outs[0]]
            given = tracer.append(cond, (pred, *operands), refs, types)
        given = (given,) if len(types) == 1 else given
        tracer.hints.update({v.name: plain(pair[0]) for v, pair in zip(given, self.merge.pairs, strict=False)})
        return iter(given)


def plain(name: str) -> str:
    """A variable's name for its value in the program."""
    return {"the value": "y", "the return value": "y"}.get(name, name.replace("@", ""))


__all__ = ["TracedClosure", "branch", "check", "plain", "run"]
