"""`train_step(plan="auto")`: the plan that the search finds for the ranks of this run, once the first batch is there.

Every rank searches for itself and finds the same; that they did is agreed on before the first step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mycel.corrections import Corrections
from mycel.errors import TrainError
from mycel.ir import Mesh
from mycel.plan import Plan
from mycel.plan.cluster import Cluster
from mycel.plan.hardware import ranks_of_a_host
from mycel.run.rendezvous import seat
from mycel.search import Search
from mycel.search_space import AXES
from mycel.shallow import Make


def ranks_of(device: str, count: int, corrections: Corrections) -> Cluster:
    """So many processes, each with a device, on one host or on several; corrected by what earlier runs of them took."""
    kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    hardware = corrections.figures(torch.device(kind), count)
    local = corrections.ranks_on_a_host or ranks_of_a_host(count, hardware)
    cluster = Cluster("the ranks of this run", hardware, local, count // local, hardware.half)
    return cluster.corrected_by(corrections.of(hardware, count))


@dataclass(frozen=True)
class Undecided:
    """A step for several ranks whose plan is not found yet; `mesh`: as it is given, None: any of so many ranks."""

    world: int
    mesh: Mesh | None = None

    @staticmethod
    def of(mesh: Mesh | None) -> Undecided | None:
        """What there is to search: nothing on one device, or on a mesh whose axes the search does not know."""
        world = mesh.world if mesh is not None else seat().world
        if world == 1 or (mesh is not None and not {*AXES}.issuperset(mesh.axes)):
            return None
        return Undecided(world, mesh)

    def search(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        make: Make,
        device: torch.device,
        memory: int | None,
        accumulate: int,
        compiled: bool,
        splits: bool,
        cuts: bool,
        corrections: Corrections,
    ) -> Plan:
        """The fastest plan that fits; `splits`: may parameters and their state lie in parts?  `cuts`: may it be a
        pipeline?"""
        given: dict[str, Any] = {"mesh": self.mesh.sizes()} if self.mesh is not None else {}
        given |= {"microbatches": accumulate} if accumulate > 1 else {}
        given |= {} if cuts else {"stages": 1}
        if not splits:
            given |= {"mesh": given.get("mesh", {"dp": self.world}), "zero": 0}
        answer = Search(
            model, optimizer, make, ranks_of(device.type, self.world, corrections), memory, given, compiled
        ).run()
        assert answer.best is not None and answer.best.plan is not None
        return answer.best.plan.given

    def refuse(self, what: str) -> None:
        raise TrainError(
            f"step.{what} was called before the plan was found, which needs a batch\n"
            '  try       step.prepare(batch) or step.local(batch) first, or a plan: plan="zero3"'
        )
