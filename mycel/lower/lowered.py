"""The whole way from a step's program to the one that every rank runs, as its plan has decided: no solver, no prices.

distribute   local types, explicit collectives (on one device nothing to do)
reside       what forward does not keep, backward computes again
hoist        what blocks gather, their callers gather
fuse         updates of many parameters in one
outline      stretches between calls that are compiled as one
overlap      collectives begin early and end late
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mycel import transform
from mycel.ir import Eqn, Program, check
from mycel.lower.distribute import Distributed, distribute
from mycel.lower.hoist import hoist
from mycel.lower.overlap import overlap
from mycel.lower.residency import reside
from mycel.plan import Plan, Residuals


@dataclass(frozen=True)
class Lowered:
    """The program of every rank, the blocks of it to compile; and on several ranks how it was spread."""

    program: Program
    regions: frozenset[str] = frozenset()
    spread: Distributed | None = None


def lowered(program: Program, plan: Plan) -> Lowered:
    """A global program under a plan that is decided."""
    assert plan.decided is not None
    spread = distribute(program, plan) if plan.mesh.world > 1 else None
    resident = with_residuals(local_of(program, spread), plan.decided.residuals, spread)
    if not plan.decided.compiled:
        return Lowered(finished(resident, spread), spread=spread)
    chosen = plan.decided.regions
    outlined, names = with_regions(resident, lambda block, run: run[0].outputs[0].name in chosen.get(block, ()))
    return Lowered(finished(outlined, spread), names, spread)


def local_of(program: Program, spread: Distributed | None) -> Program:
    """What is left to a rank of a program."""
    return program if spread is None else check(transform.simplify(spread.local, ranks=True))


def with_residuals(local: Program, residuals: Residuals, spread: Distributed | None) -> Program:
    resident = reside(local, residuals)
    return check(transform.fuse(resident if spread is None else hoist(resident)))


def with_regions(resident: Program, is_worth: Callable[[str, Sequence[Eqn]], bool]) -> tuple[Program, frozenset[str]]:
    outlined, names = transform.outline(resident, is_worth)
    return check(outlined), frozenset(names)


def finished(program: Program, spread: Distributed | None) -> Program:
    return program if spread is None else check(overlap(program))
