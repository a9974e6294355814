"""Which rank computes what of a program without a step, where ranks hold the stages of one.

Who holds what is given: it follows from the stages of the step.  An equation is where the parameters and buffers are
that it reads, on a rank whose forward steps read them if there is one; where several ranks have all of these (tied
weights), or it reads none, where its latest operand was made.  Ranks' equations are stages by how often values have
crossed on their way, as those of places are (`plan/places.py`), so one rank has as many as its step has, and a function
of the model that calls its modules in another order than the step has others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mycel.ir import Program, Role, call
from mycel.plan.places import PlacedStages, by_depth
from mycel.plan.stages import StepFlow, roles_of_inputs

HELD = ("parameter", "buffer")


@dataclass(frozen=True)
class HeldInputs:
    """The ranks that hold a tensor of the model, by name (all do, of those that are not there); `users`: those whose
    forward steps read it."""

    owners: Mapping[str, Sequence[int]]
    users: Mapping[str, Sequence[int]]
    ranks: int

    def roles(self, program: Program) -> set[Role]:
        """Inputs that not every rank holds."""
        roles = {program.role(v) for v in program.inputs if program.role(v).kind in HELD}
        return {role for role in roles if len(self.of(role)) < self.ranks}

    def of(self, role: Role) -> frozenset[int]:
        """The ranks that hold an input."""
        return frozenset(self.owners.get(role.name, range(self.ranks)) if role.kind in HELD else range(self.ranks))

    def readers(self, flow: StepFlow) -> dict[int, frozenset[int]]:
        """Of each unit, the ranks that hold all that it reads; if there are such, those that read it in a step."""
        roles, everyone = roles_of_inputs(flow), frozenset(range(self.ranks))

        def at(unit: int) -> frozenset[int]:
            read = {role for v in flow.behind(flow.block.eqns[unit]) for role in roles.get(v, ())}
            holders = everyone.intersection(*map(self.of, read))
            return holders.intersection(*(self.users[r.name] for r in read if r.name in self.users)) or holders

        return {unit: at(unit) for unit in flow.units}

    def read_apart(self, flow: StepFlow) -> set[str]:
        """Blocks that a call reads tensors for which no rank holds together."""
        eqns = [flow.block.eqns[unit] for unit, ranks in self.readers(flow).items() if not ranks]
        return {str(eqn.params["block"]) for eqn in eqns if eqn.op is call}

    def stages(self, flow: StepFlow) -> PlacedStages | None:
        """None where an equation reads what no rank holds, or nothing depends on parameters and batch."""
        readers = self.readers(flow)
        if not readers or not all(readers.values()):
            return None

        def place_at(unit: int, latest: int | None) -> int:
            ranks = readers[unit]
            return latest if latest in ranks else min(ranks)

        return by_depth(flow, place_at)

    def allow(self, rank: int, program: Program) -> bool:
        """Does a rank hold all that its program takes?"""
        return all(rank in self.of(program.role(v)) for v in program.inputs)
