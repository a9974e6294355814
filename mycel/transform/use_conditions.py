"""When a value of a program is used: where the loss comes from it on the way that was taken.  What a branch computes
and a later one throws away is not.

The *use* of a value is a condition: ALWAYS, NEVER, all or any of others, or what an equation of its block says
(`said`): that its operand came to a result.  An operator's operands come to all its results; of the blocks of control
flow the same is asked again: what comes to this output?  A loop carries the answer, for each value of its state: does
it come from the operand, after so many turns?
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mycel.ir import Eqn, Program, Var, call, cond, custom, is_float, loop, scan
from mycel.ops import o

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Use:
    """A condition on what is computed; equal ones are one object."""

    kind: str  # "always", "never", "all" or "any" of `parts`, or "said"
    parts: tuple[Any, ...] = ()  # of "said": the place of the equation, and a question to it


ALWAYS, NEVER = Use("always"), Use("never")
Counted = tuple[Use, Shape]  # and the shape of what counts it


@dataclass(frozen=True)
class Branches:
    """To a cond, or a call, which has one: a use in the block that it takes."""

    uses: tuple[Use, ...]


@dataclass(frozen=True)
class ThroughTurns:
    """To a loop: does its result `out` come from the state that was there at first (`first`: which), or from what a
    turn uses (`turn`: for each result of the body)?"""

    first: frozenset[int]
    turn: tuple[Use, ...]
    out: int


@dataclass(frozen=True)
class Operand:
    """To an island: the one at this position."""

    position: int


@dataclass(frozen=True)
class Chosen:
    """To choices: is this expert among them?  None: each of all experts."""

    expert: int | None
    experts: int


class UseConditions:
    """Of the values of a program's blocks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._uses: dict[Hashable, Use] = {}
        self._come_to: dict[tuple[str, int], dict[Var, Use]] = {}

    # -- conditions --------------------------------------------------------------------------------------------------

    def _use(self, kind: str, *parts: Any) -> Use:
        key = (kind, frozenset(parts) if kind != "said" else parts)
        return self._uses.setdefault(key, Use(kind, parts))

    def any(self, parts: Iterable[Use]) -> Use:
        return self._joined("any", parts, NEVER, ALWAYS)

    def all(self, parts: Iterable[Use]) -> Use:
        return self._joined("all", parts, ALWAYS, NEVER)

    def _joined(self, kind: str, parts: Iterable[Use], nothing: Use, certain: Use) -> Use:
        distinct = dict.fromkeys(p for p in parts if p is not nothing)
        if certain in distinct:
            return certain
        return next(iter(distinct)) if len(distinct) == 1 else self._use(kind, *distinct) if distinct else nothing

    def of_all(self, use: Use) -> tuple[Counted, int | None]:
        """The use of one expert's parameter -> that of all experts, and which of them it is; others as they are."""
        chosen = {u.parts[1] for u in self._within(use, {}) if u.kind == "said" and isinstance(u.parts[1], Chosen)}
        if len(chosen) != 1:
            return (use, ()), None
        (choice,) = chosen
        return (self._with_each(use, {}), (choice.experts,)), choice.expert

    def _within(self, use: Use, seen: dict[Use, None]) -> Iterator[Use]:
        if use in seen:
            return
        seen[use] = None
        yield use
        for part in _parts(use):
            yield from self._within(part, seen)

    def _with_each(self, use: Use, mapped: dict[Use, Use]) -> Use:
        if use not in mapped:
            mapped[use] = use
            if use.kind in ("any", "all"):
                mapped[use] = self._use(use.kind, *(self._with_each(part, mapped) for part in use.parts))
            elif use.kind == "said":
                at, question = use.parts
                if isinstance(question, Chosen):
                    question = Chosen(None, question.experts)
                elif isinstance(question, Branches):
                    question = Branches(tuple(self._with_each(u, mapped) for u in question.uses))
                elif isinstance(question, ThroughTurns):
                    question = replace(question, turn=tuple(self._with_each(u, mapped) for u in question.turn))
                mapped[use] = self._use("said", at, question)
        return mapped[use]

    # -- where it is used --------------------------------------------------------------------------------------------

    def come_to(self, name: str, out: int) -> dict[Var, Use]:
        """When each value of a block comes to this output, last ones first."""
        if (name, out) not in self._come_to:
            block = self.program.blocks[name]
            end = block.outputs[out]
            uses = {end: ALWAYS} if isinstance(end, Var) else {}
            self._come_to[name, out] = uses
            for i in reversed(range(len(block.eqns))):
                eqn = block.eqns[i]
                after = [uses.get(v, NEVER) for v in eqn.outputs]
                if all(u is NEVER for u in after):
                    continue
                for position, x in enumerate(eqn.inputs):
                    if isinstance(x, Var) and uses.get(x) is not ALWAYS:
                        uses[x] = self.any((uses.get(x, NEVER), self._through(i, eqn, position, after)))
        return self._come_to[name, out]

    def _through(self, i: int, eqn: Eqn, position: int, after: Sequence[Use]) -> Use:
        """When the operand at a position of an equation is used, whose results are used so."""
        if eqn.op in (call, cond, loop, scan):
            each = ((k, u) for k, u in enumerate(after) if u is not NEVER)
            return self.any(self.all((u, self._inside(i, eqn, position, k))) for k, u in each)
        if eqn.op is o.island:
            known = position in eqn.params["wrt"]
            return self.all((self.any(after), self._use("said", i, Operand(position)))) if known else NEVER
        if eqn.op is o.choices:
            experts = eqn.params["experts"]
            if not position:
                return NEVER
            question = Chosen(experts[position - 1], max(experts) + 1)
            return self.all((self.any(after), self._use("said", i, question)))
        if eqn.op in (o.stop_gradient, o.expert_stack):  # of an expert's weights choices tell
            return NEVER
        if eqn.op is custom and position >= eqn.params["wrt"]:
            return NEVER
        x: Any = eqn.inputs[position]
        # no gradient comes through integers and truths; those made of choices tell where these were needed
        through = (u for v, u in zip(eqn.outputs, after, strict=True) if is_float(v.dtype) or not is_float(x.dtype))
        return self.any(through)

    def _inside(self, i: int, eqn: Eqn, position: int, out: int) -> Use:
        """When the operand comes to this result of control flow."""

        def of(name: str, at: int) -> Use:
            return self.come_to(name, out).get(self.program.blocks[name].inputs[at], NEVER)

        uses: tuple[Use, ...]
        if eqn.op is call:
            uses = (of(eqn.params["block"], position),)
        elif eqn.op is cond:
            uses = (of(eqn.params["then"], position - 1), of(eqn.params["orelse"], position - 1)) if position else ()
        else:
            return self._in_turns(i, eqn, position, out)
        if all(u is NEVER for u in uses):
            return NEVER
        return ALWAYS if all(u is ALWAYS for u in uses) else self._use("said", i, Branches(uses))

    def _in_turns(self, i: int, eqn: Eqn, position: int, out: int) -> Use:
        body, consts, carry = self.program.blocks[eqn.params["body"]], eqn.params.get("consts", 0), carried(eqn)
        if consts <= position < consts + carry:
            question = ThroughTurns(frozenset({position - consts}), (NEVER,) * len(eqn.outputs), out)
        else:
            x = body.inputs[position]
            turn = tuple(self.come_to(eqn.params["body"], k).get(x, NEVER) for k in range(len(eqn.outputs)))
            question = ThroughTurns(frozenset(), turn, out)
        if out not in self.reached(eqn, question):
            return NEVER
        return ALWAYS if self._certain(eqn, question) else self._use("said", i, question)

    def in_turn(self, eqn: Eqn, at: int, out: int) -> Use:
        """When one value of a loop's state comes to a result of the body."""
        x = self.program.blocks[eqn.params["body"]].inputs[eqn.params.get("consts", 0) + at]
        return self.come_to(eqn.params["body"], out).get(x, NEVER)

    def reached(self, eqn: Eqn, question: ThroughTurns) -> set[int]:
        """The results that may come from it, after some turn."""
        reached, carry = set(question.first), carried(eqn)
        todo = [*reached, *(k for k, u in enumerate(question.turn) if u is not NEVER and k not in reached)]
        reached |= set(todo)
        while todo:
            at = todo.pop()
            for k in range(len(eqn.outputs)) if at < carry else ():
                if k not in reached and self.in_turn(eqn, at, k) is not NEVER:
                    reached.add(k)
                    todo.append(k)
        return reached

    def _certain(self, eqn: Eqn, question: ThroughTurns) -> bool:
        """Does the result come from it in any case, after as many turns as there may be?"""
        carry, length = carried(eqn), eqn.params.get("length")
        state, before = question.first, list[frozenset[int]]()
        while state not in before and len(before) != length:
            before.append(state)
            after = {k for k, u in enumerate(question.turn) if u is ALWAYS}
            after |= {k for k in range(len(eqn.outputs)) for at in state if self.in_turn(eqn, at, k) is ALWAYS}
            if question.out >= carry and question.out in after:
                return True  # a row of it
            state = frozenset(k for k in after if k < carry)
        if question.out >= carry:
            return False
        if length is None:
            return all(question.out in state for state in before)
        if len(before) < length:  # they go round
            start = before.index(state)
            state = before[start + (length - start) % (len(before) - start)]
        return question.out in state


def _parts(use: Use) -> tuple[Use, ...]:
    """The conditions that one is made of, those inside of blocks too."""
    if use.kind != "said":
        return use.parts
    question = use.parts[1]
    return (
        question.uses if isinstance(question, Branches) else question.turn if isinstance(question, ThroughTurns) else ()
    )


def carried(eqn: Eqn) -> int:
    """How many values a loop carries from turn to turn."""
    return len(eqn.outputs) if eqn.op is loop else int(eqn.params.get("carry", 0))


def asked_of(use: Use, seen: dict[Use, None]) -> Iterator[Use]:
    """What equations of the block itself are asked."""
    if use in seen:
        return
    seen[use] = None
    if use.kind == "said":
        yield use
    else:
        for part in use.parts:
            yield from asked_of(part, seen)
