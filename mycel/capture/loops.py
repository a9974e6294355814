"""Loops on tensors: `while` becomes `loop`, `for` over a range or over rows becomes `loop` or `scan`.

The state of a loop is what a turn changes: variables that are needed afterwards or at the next turn, attributes and
items of objects, tensors updated in place, and the random key where the body draws.  A first trace of the body finds
the state; numbers that change become 0-dim tensors, what is undefined before the first turn gets a filler; then the
body is traced again, until every part ends a turn with the type it began with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mycel.capture.alias import Cell
from mycel.capture.branches import TracedClosure, plain, run
from mycel.capture.fence import refuse
from mycel.capture.grown_lists import GrownList, ListOfLoop, ListOfScan, refuse_growth
from mycel.capture.merge import Want, describe, fit, is_number, is_weak, meet, own, wrapped
from mycel.capture.merge import opened as opened_value
from mycel.capture.nested import KEY, OpenBlock, branch_key, finish, free, opened
from mycel.capture.record import Traced
from mycel.capture.slots import UNDEFINED, Objects, Slot, Watched, assigned, variables
from mycel.capture.trace import Tracer
from mycel.errors import CaptureError
from mycel.ir import Atom, Ref, Type, Var, loop, scan

ROUNDS = 12  # traces until the state must have settled


class Turns:
    """A loop under way: `body` is one turn, `closures` are the user's functions in it, `names` the variables that are
    needed, `grown` makes what follows a list that turns add to, where that can be followed."""

    def __init__(
        self,
        tracer: Tracer,
        body: Callable[..., Any],
        closures: Sequence[Callable[..., Any]],
        names: Sequence[str],
        grown: Callable[[Watched, list[Any]], GrownList] | None,
    ) -> None:
        self.tracer, self.body, self.grown = tracer, body, grown
        self.lists: dict[int, GrownList] = {}
        self.slots = variables(closures, assigned(closures))
        self.names = [n for n in names if n in self.slots]
        self.objects = Objects.reached(closures, self.slots.values())
        self.state: dict[tuple[int, Any], Slot] = {}
        self.cells: list[Cell] = []
        self.fresh: list[Cell] = []
        self.before = {slot.id: (slot, slot.get()) for slot in self.slots.values()}

    def settle(self, items: Sequence[Var]) -> tuple[TracedClosure, list[Var], list[Var]]:
        """Trace the body until the state is known: the last trace, the state's Vars at the start of a turn and at its
        end."""
        for _ in range(ROUNDS):
            start: list[Var] = []
            blocks = dict(self.tracer.blocks)
            done = self.trace(self._turn, start, items)
            if not self._grow(done):
                ends = self._ends(done)
                if ends is not None:
                    return done, start, ends
            self.tracer.blocks = blocks
        raise refuse(
            "the state of this loop does not settle",
            "the same types and shapes at the start and at the end of each turn",
        )

    def _turn(self, *items: Any) -> None:
        self.body(*items)
        for grown in self.lists.values():
            grown.end_turn()

    def trace(self, fn: Callable[..., Any], start: list[Var], items: Sequence[Var] = ()) -> TracedClosure:
        """One run of a closure on fresh values for the state; their Vars are appended to `start` (or taken from it)."""
        given = iter(start[:])
        self.fresh.clear()

        def turn() -> Any:
            for slot in self.state.values():
                slot.set(self._fresh(slot.name, slot.get(), start, given))
            for cell in self.cells:
                cell.note()
                cell.var, cell.version = self._var(cell.var.type, start, given), cell.version + 1
            return fn(*(self._own(self.tracer.wrap(v)) for v in items))

        done = run(self.tracer, turn, self.slots, self.objects, self.names)
        if done.leaves_views:
            raise refuse(
                "a tensor gets other memory in a loop (x.data = …), while a view of the memory that it has is there",
                "x.copy_(…), which views see, or a clone() of what the view shows before the loop",
            )
        if any(cell in done.writes for cell in self.fresh[len(self.fresh) - len(items) :] if items):
            raise refuse("a row is updated in place in a loop over a tensor", "indexing the tensor: x[i] += …")
        done.writes = {c: v for c, v in done.writes.items() if c not in self.fresh}
        return done

    def _own(self, x: Traced) -> Traced:
        """A tensor that is the turn's own: writing into it reaches nobody outside, but is noted."""
        x.cell.home = None
        self.fresh.append(x.cell)
        return x

    def _var(self, type: Type, start: list[Var], given: Any) -> Var:
        var = next(given, None)
        if var is None:
            var = Var(self.tracer.name(""), type)
            start.append(var)
        return var

    def _fresh(self, name: str, value: Any, start: list[Var], given: Any) -> Any:
        """A value with new Vars for its tensors."""
        if isinstance(value, torch.Tensor):
            want = own(value)
            var = self._var(want.type, start, given)
            self.tracer.hints[var.name] = plain(name)
            return self._own(wrapped(self.tracer, var, want))
        parts = opened_value(value, value)
        if parts is None:
            return value
        return parts[0].close(
            [self._fresh(f"{name}{path}", v, start, given) for path, v in zip(parts[0].paths(), parts[1], strict=True)]
        )

    # -- what the state is ------------------------------------------------------------------------------------------

    def _grow(self, done: TracedClosure) -> bool:
        """Take in what the body was seen to change; was there anything new?"""
        before = len(self.state), len(self.cells), len(self.lists)
        for name in self.names:
            old = self.slots[name].get()
            if done.variables[name] is not old:
                self._check_alias(name, old, done)
                self.state.setdefault(self.slots[name].id, self.slots[name])
        for i, now in done.contents.items():
            box = self.objects.boxes[i]
            if isinstance(now, list) and len(now) > len(box.old) and self.grown is not None and i not in self.lists:
                self._follow(i, box, now)
                continue
            for slot in _changed(box, now):
                self.state.setdefault(slot.id, slot)
        self.cells += [c for c in done.writes if c not in self.cells]
        return before != (len(self.state), len(self.cells), len(self.lists))

    def _follow(self, i: int, box: Watched, now: list[Any]) -> None:
        """A list that this turn has added to."""
        grown = self.lists[i] = self.grown(box, now)  # type: ignore[misc]
        if grown.slot is not None:
            self.state[grown.slot.id] = grown.slot
        self.objects.remember()

    def _check_alias(self, name: str, old: Any, done: TracedClosure) -> None:
        """A turn that updates a tensor of outside in place and then lets its name go would do so at the first turn
        only."""
        if isinstance(old, Traced) and old.cell in done.writes and old.cell.place is not None:
            raise refuse(
                f"{name} is updated in place and then assigned anew in a loop, while it is {old.cell.place.name}",
                f"{name} = {name}.clone() before the loop",
            )

    def _end_value(self, slot: Slot, done: TracedClosure) -> Any:
        """What a slot holds at the end of a turn."""
        for name in self.names:
            if self.slots[name] is slot:
                return done.variables[name]
        now = done.contents.get(id(slot.box))
        return slot.get() if now is None else now[slot.key]

    def _ends(self, done: TracedClosure) -> list[Var] | None:
        """The state at the end of a turn; None if its start had to change and the body must be traced again."""
        again = False
        for slot in self.state.values():
            start = slot.get()
            new = self._meet(slot.name, start, self._end_value(slot, done))
            if new is not start:
                self.before.setdefault(slot.id, (slot, start))
                slot.set(new)
                again = True
        if again:
            self.objects.remember()
            return None
        ends: list[Var] = []
        with opened(self.tracer, done.section), self.tracer:
            for slot in self.state.values():
                self._collect(slot.get(), self._end_value(slot, done), done, ends)
        return ends + [done.writes.get(c) or c.var for c in self.cells]

    def _collect(self, start: Any, end: Any, done: TracedClosure, ends: list[Var]) -> None:
        if isinstance(start, torch.Tensor):
            ends.append(fit(done.var(self.tracer, end), own(start).type))
            return
        parts = opened_value(start, start)
        if parts is not None:
            other = opened_value(end, end)
            for a, b in zip(parts[1], other[1] if other else parts[1], strict=True):
                self._collect(a, b, done, ends)

    def _meet(self, name: str, start: Any, end: Any) -> Any:
        """What the state must start as, given what a turn makes of it: `start` itself if they agree."""
        if start is end:
            return start
        if start is UNDEFINED:
            return self._filler(end)
        if end is UNDEFINED:
            raise self.unstable(name, start, end)
        if isinstance(start, torch.Tensor) and (isinstance(end, torch.Tensor) or is_number(end)):
            want = meet(start, end)
            if want is None or (not is_weak(start) and want != own(start)):
                raise self.unstable(name, start, end)
            return start if want == own(start) else self._promoted(start, want)
        if is_number(start) and is_number(end):
            is_same = type(start) is type(end) and start == end
            return start if is_same else self._promoted(start, meet(start, end))  # type: ignore[arg-type]
        if is_number(start) and isinstance(end, torch.Tensor):
            want = meet(start, end)
            if want is None or want != own(end) and not is_weak(end) or end.ndim:
                raise self.unstable(name, start, end)
            return self._promoted(start, want)
        parts = opened_value(start, end)
        if parts is not None:
            tree, left, right = parts
            new = [self._meet(f"{name}{path}", a, b) for path, a, b in zip(tree.paths(), left, right, strict=True)]
            return start if all(a is b for a, b in zip(new, left, strict=True)) else tree.close(new)
        if type(start) is type(end) and not isinstance(start, (list, dict, tuple)) and start == end:
            return start
        raise self.unstable(name, start, end)

    def _promoted(self, start: Any, want: Want) -> Traced:
        self.tracer.here()
        with self.tracer:
            var = self.tracer.cell(start).read() if isinstance(start, torch.Tensor) else start
            return wrapped(self.tracer, fit(var, want.type), want)

    def _filler(self, end: Any) -> Any:
        """Something of the type of what a turn defines."""
        if isinstance(end, torch.Tensor):
            return self._promoted(UNDEFINED, own(end))
        parts = opened_value(end, end)
        return end if parts is None else parts[0].close([self._filler(v) for v in parts[1]])

    def unstable(self, name: str, start: Any, end: Any) -> CaptureError:
        return refuse(
            f"{name} is {describe(start)} when the loop starts and {describe(end)} after a turn: "
            "loop state may change its value, not its type or shape",
            "the type and shape it ends with from the start, or another variable for the result",
        )

    # -- writing the equation ---------------------------------------------------------------------------------------

    def operands(self) -> list[Var]:
        """The state before the first turn."""
        operands: list[Var] = []

        def collect(value: Any) -> None:
            if isinstance(value, torch.Tensor):
                operands.append(self.tracer.cell(value).read())
            elif (parts := opened_value(value, value)) is not None:
                for part in parts[1]:
                    collect(part)

        for slot in self.state.values():
            collect(slot.get())
        return operands + [c.read() for c in self.cells]

    def give_back(self, outs: Sequence[Var]) -> None:
        """The state after the last turn."""
        values = iter(outs)

        def build(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return wrapped(self.tracer, next(values), own(value))
            parts = opened_value(value, value)
            return value if parts is None else parts[0].close([build(v) for v in parts[1]])

        for slot in self.state.values():
            new = build(slot.get())
            if isinstance(new, Traced):
                self.tracer.hints[new.cell.var.name] = plain(slot.name)
            slot.set(new)
        for cell in self.cells:
            cell.note()
            cell.var, cell.version = next(values), cell.version + 1
        for name, slot in self.slots.items():
            if name not in self.names:
                slot.set(UNDEFINED)
                self.tracer.maybe.add(name)

    def touched(self, asked: TracedClosure) -> bool:
        """Did a trace change objects beyond the state it was given?"""
        return any(
            slot.id not in self.state
            for i, now in asked.contents.items()
            for slot in _changed(self.objects.boxes[i], now)
        )

    def undo(self) -> None:
        """Forget what `settle` changed."""
        for slot, value in self.before.values():
            slot.set(value)
        for grown in self.lists.values():
            grown.undo()

    def keyed(self, sections: Sequence[OpenBlock], start: list[Var], ends: list[Var], body: OpenBlock) -> bool:
        """Does the loop draw?  Then its key is state too: each turn folds it."""
        if not any(KEY in e.inputs for s in sections for e in s.eqns):
            return False
        with opened(self.tracer, body), self.tracer:
            start.append(KEY)
            ends.append(branch_key(self.tracer))
        return True

    def key(self) -> list[Var]:
        return [branch_key(self.tracer)]


def _changed(box: Watched, now: Any) -> list[Slot]:
    """The slots of a box that a turn changed; new items would make the box grow at each turn."""
    old = box.old
    if (
        isinstance(now, set)
        or isinstance(now, list)
        and len(now) != len(old)
        or isinstance(now, dict)
        and not old.keys() <= now.keys()
    ):
        raise refuse_growth(box)
    if isinstance(now, list):
        return [box.slot(i) for i, (a, b) in enumerate(zip(old, now, strict=True)) if a is not b]
    return [box.slot(k) for k, v in now.items() if v is not old.get(k, UNDEFINED)]


def repeat(
    tracer: Tracer,
    test: Callable[[], Any],
    body: Callable[..., Any],
    closures: Sequence[Callable[..., Any]],
    names: Sequence[str],
    most: int | None = None,
    finished: Callable[[], Any] | None = None,
) -> None:
    """while test(): body() — where test gives a traced bool.  There are at most so many turns, if that is known, and
    so many are `finished`."""
    grown = None
    if most is not None and finished is not None:
        grown = lambda box, now: ListOfLoop(tracer, box, now, most, finished)
    turns = Turns(tracer, body, closures, names, grown)
    try:
        done, start, ends = turns.settle(())
        asked = turns.trace(test, start)
        if any(v not in start for v in asked.writes.values()) or turns.touched(asked):
            raise refuse("the test of a while loop changes tensors or objects", "a test that only reads")
    except Exception:
        turns.undo()
        raise
    with opened(tracer, asked.section), tracer:
        pred = fit(asked.var(tracer, asked.value), Type(torch.bool, ()))
    sections = [asked.section, done.section]
    keyed = turns.keyed(sections, start, ends, done.section)
    consts = [v for v in free(*sections, outputs=[pred, *ends]) if v not in start]
    tracer.here()
    with tracer:
        operands = turns.operands() + (turns.key() if keyed else [])
        inputs = [*consts, *start]
        params = {
            "test": Ref(finish(tracer, "while_test", asked.section, inputs, [pred])),
            "body": Ref(finish(tracer, "while_body", done.section, inputs, ends)),
        }
        outs = _append(
            tracer,
            loop,
            (*consts, *operands),
            params | ({"consts": len(consts)} if consts else {}),
            [v.type for v in start],
        )
    turns.give_back(outs[: len(outs) - keyed])
    for grown_list in turns.lists.values():
        grown_list.finish([])


def over(
    tracer: Tracer,
    rows: torch.Tensor,
    body: Callable[..., Any],
    closures: Sequence[Callable[..., Any]],
    names: Sequence[str],
    weak: bool,
) -> bool:
    """for row in rows: body(row) as a scan; False if a turn does nothing to tensors (rows count in Python then)."""
    grown = lambda box, now: ListOfScan(tracer, box, now, rows.shape[0])
    turns = Turns(tracer, body, closures, names, grown)
    row = Var(tracer.name(""), Type(rows.dtype, tuple(rows.shape[1:])))

    def turn(item: Any) -> Any:
        if weak:
            item.weak = tracer.numbers = True
        return body(item)

    turns.body = turn
    try:
        done, start, ends = turns.settle((row,))
    except Exception:
        turns.undo()
        raise
    if not done.section.eqns and not turns.state:
        turns.undo()
        return False
    keyed = turns.keyed([done.section], start, ends, done.section)
    with opened(tracer, done.section), tracer:
        given = [v for grown_list in turns.lists.values() for v in grown_list.ends(done)]
    consts = [v for v in free(done.section, outputs=[*ends, *given]) if v not in start and v is not row]
    tracer.here()
    with tracer:
        operands = turns.operands() + (turns.key() if keyed else [])
        params: dict[str, Any] = {
            "body": Ref(finish(tracer, "for_body", done.section, [*consts, *start, row], [*ends, *given])),
            "length": rows.shape[0],
        }
        params |= {k: n for k, n in (("consts", len(consts)), ("carry", len(start))) if n}
        types = [v.type for v in start] + [Type(v.dtype, (rows.shape[0], *v.shape)) for v in given]
        outs = _append(tracer, scan, (*consts, *operands, tracer.cell(rows).read()), params, types)
    turns.give_back(outs[: len(start) - keyed])
    of_turns = list(outs[len(start) :])
    for grown_list in turns.lists.values():
        grown_list.finish(of_turns)
    return True


def _append(
    tracer: Tracer, op: Any, inputs: tuple[Atom, ...], params: dict[str, Any], types: list[Type]
) -> Sequence[Var]:
    outs = tracer.append(op, inputs, params, types)
    return (outs,) if len(types) == 1 else outs


__all__ = ["over", "repeat"]
