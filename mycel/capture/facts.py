"""Values of the batch that decide what the program is: facts, with a guard.

Code may ask a tensor for its value: `.item()`, `if mask.any():` in a library, `x[: n]`, `x[mask]`, `nonzero`.  Where
the value depends on what the program is given alone (its arguments and the tensors the code reaches, parameters and
random numbers apart), it is computed from what is at hand, and the program is made for it:

    asked       how many elements of a mask hold  ─▶  7
    program     nonzero(mask)  ─▶  i64[7]              facts    n = sum(mask)          n = 7

The small program of all that was asked runs first at every call; other values mean another capture.  Its equations are
those of the trace, in order: what was asked first is compared first, since later equations may hold for it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mycel.capture.bounds import decide
from mycel.errors import warn
from mycel.ir import Builder, Eqn, Var
from mycel.ops import o

CONSTANT, GIVEN, UNKNOWN = 0, 1, 2  # what a value depends on: nothing, what the program is given, anything else
MOST = 16  # programs that differ in facts alone, before the oldest is given up
CHANGING: set[str] = set()  # lines that asked for values which keep changing: nothing is read there any more
Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Fact:
    """A value that was asked for, what it was, and the user's line that asked."""

    var: Var
    value: torch.Tensor
    source: str
    eqns: tuple[Eqn, ...]  # that compute it, and no earlier fact needs

    def __str__(self) -> str:
        shown = str(self.value.tolist()) if self.value.numel() <= 4 else f"{self.value.numel()} values"
        return f"{self.source}: {shown}"


@dataclass(frozen=True)
class Facts:
    """What a program holds for; `inputs` are the names of the program's inputs that decide."""

    inputs: tuple[str, ...]
    given: tuple[Var, ...]
    facts: tuple[Fact, ...]
    consts: Mapping[str, torch.Tensor] = field(repr=False)
    parts: int = 1  # the batch comes in so many parts, and it holds for each
    split: frozenset[str] = frozenset()  # the inputs that are split then

    @property
    def sources(self) -> tuple[str, ...]:
        """The lines that asked."""
        return tuple(f.source for f in self.facts)

    def in_parts(self, parts: int, split: Iterable[str]) -> Facts:
        return replace(self, parts=parts, split=frozenset(split))

    def hold(self, *inputs: torch.Tensor) -> bool:
        """Are the values of these inputs those the program was made for?"""
        with torch.no_grad(), _disable_current_modes(), torch.autocast("cpu", enabled=False):
            values = [x.detach().cpu() for x in inputs]
            return all(self._hold(part) for part in self._parts(values))

    def _parts(self, values: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        for i in range(self.parts):
            yield [
                x.chunk(self.parts)[i] if name in self.split else x for name, x in zip(self.inputs, values, strict=True)
            ]

    def _hold(self, values: Sequence[torch.Tensor]) -> bool:
        known: dict[Var, Any] = dict(zip(self.given, values, strict=True))
        for fact in self.facts:
            try:
                evaluate(fact.eqns, known, self.consts)
            except (RuntimeError, ValueError, IndexError):  # no value there: not what it was
                return False
            if not same_values(known[fact.var], fact.value):
                return False
        return True


def all_ones(inputs: Sequence[Var], source: str) -> Facts:
    """The fact that these inputs hold nothing but ones."""
    facts = []
    for x in inputs:
        b = Builder()
        with b:
            holds = o.all(o.eq(x, 1), dims=tuple(range(x.ndim)))
        facts.append(Fact(holds, torch.tensor(True), source, tuple(b.eqns)))
    return Facts(tuple(x.name for x in inputs), tuple(inputs), tuple(facts), {})


def same_values(x: torch.Tensor, y: torch.Tensor) -> bool:
    """The same values, NaN being itself."""
    return x.shape == y.shape and (torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all()))


def dependence(eqn: Eqn, kinds: Mapping[Var, int], makers: Mapping[Var, Eqn], computable: bool) -> int:
    """What the results of an equation depend on."""
    if not computable:
        return UNKNOWN
    if decide(eqn, makers) is not None:
        return CONSTANT
    return max((kinds.get(v, UNKNOWN) for v in eqn.vars), default=CONSTANT)


def needed(var: Var, makers: Mapping[Var, Eqn], known: Container[Var]) -> list[Eqn]:
    """The equations that lead from known values to this one, in order."""
    eqns: list[Eqn] = []
    done: set[int] = set()
    stack: list[tuple[Var, bool]] = [(var, False)]
    while stack:
        v, ready = stack.pop()
        if v in known:
            continue
        eqn = makers[v]
        if id(eqn) in done:
            continue
        if ready or decide(eqn, makers) is not None:
            done.add(id(eqn))
            eqns.append(_decided(eqn, makers))
        else:
            stack.append((v, True))
            stack += [(x, False) for x in eqn.vars]
    return eqns


def _decided(eqn: Eqn, makers: Mapping[Var, Eqn]) -> Eqn:
    """An equation whose answer is known whatever its operands are, as that answer."""
    answer = decide(eqn, makers)
    if answer is None:
        return eqn
    (out,) = eqn.outputs
    params = type(eqn.params)({"shape": out.shape, "dtype": out.dtype})
    return replace(eqn, op=o.full, inputs=(answer,), params=params)


def evaluate(eqns: Iterable[Eqn], known: dict[Var, Any], consts: Mapping[str, torch.Tensor]) -> None:
    """The values of equations, on the host, whatever device the code is under (`with torch.device(...):`)."""
    with torch._C.DisableTorchFunction():
        for eqn in eqns:
            if eqn.op is o.const:
                known[eqn.outputs[0]] = consts[eqn.params["name"]]
                continue
            args = [known[a] if isinstance(a, Var) else a for a in eqn.inputs]
            outs = eqn.op.kernel(*args, **eqn.params)
            known.update(zip(eqn.outputs, outs if isinstance(outs, (tuple, list)) else [outs], strict=True))


def make_room(
    entries: list[Entry], facts_of: Callable[[Entry], Sequence[Facts]], new: Sequence[Facts], oldest: int = -1
) -> None:
    """Of too many programs that differ in facts alone the oldest (last or first) is given up, with a warning; what they
    differ in is no fact from here on, but what a mask, a branch or an island can make of it."""
    sources = [f.sources for f in new]
    rivals = [e for e in entries if facts_of(e) and [f.sources for f in facts_of(e)] == sources]
    if len(rivals) < MOST:
        return
    entries.remove(rivals[oldest])
    changing = _changing([f for e in rivals for f in facts_of(e)], new)
    CHANGING.update(f.source for f in changing)
    warn(
        f"captured {len(rivals) + 1} times, since values of the batch that decide what the program is keep changing\n  "
        + "\n  ".join(dict.fromkeys(map(str, changing)))
        + "\n  try       keep it a tensor: torch.where, masks, padding to a fixed size",
    )


def _changing(before: Sequence[Facts], new: Sequence[Facts]) -> list[Fact]:
    """The facts that are not what they were."""
    old = {(f.source, f.value.numpy().tobytes()) for facts in before for f in facts.facts}
    unseen = [f for facts in new for f in facts.facts if (f.source, f.value.numpy().tobytes()) not in old]
    return unseen or [f for facts in new for f in facts.facts]
