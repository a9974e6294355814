"""The ranks of a run: which of them this process is, by which plan they work, and what they tell each other besides the
messages of a step.

    parallel, environment ──▶ mesh, plan ──▶ the same on all? ──▶ Team

    team.tell(x)         what each rank says, through the store
    team.first(x)        what rank 0 says
    team.asked(s)        a question that is under way while the next batch is read: has any rank been asked to stop?

A run of one process is a team of one, which says nothing to nobody.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Any, Self

import torch

from mycel.corrections import Corrections
from mycel.errors import PlanError
from mycel.ir import Mesh
from mycel.plan import STAGE_AXIS, Plan, probe_text
from mycel.plan.plan_file import plan_data, ready_plans
from mycel.run.checkpoint import ALONE, MeshProcess
from mycel.run.folder import resume_command
from mycel.run.processes import Processes, code_version, world
from mycel.run.rendezvous import seat
from mycel.run.shares import Shares
from mycel.sizes import span
from mycel.train.config import Config, Parallel, anchored, dump, is_file

TWO_AXES = {"tx", "ty"}  # of the plan tp2d
AUTO = "auto"  # the plan is searched for


@dataclass
class Team:
    """This process among those of the run; `processes` is None where it is the only one."""

    mesh: Mesh
    plan: Plan | None = None
    processes: Processes | None = None
    share: Callable[[str], Sequence[str]] = lambda text: [text]
    savers: MeshProcess = ALONE  # for checkpoints: they are written by another thread, through a connection of its own
    name: str = ""  # of the plan, for people
    corrections: Corrections = field(default_factory=Corrections)  # of what it is priced by

    def __str__(self) -> str:
        if self.plan is None:
            return "one process"
        where = "; ".join(map(str, self.plan.places)) if self.plan.place else str(self.mesh)
        return f"{self.mesh.world} ranks, {where}; plan {self.name}"

    @property
    def rank(self) -> int:
        return self.processes.rank if self.processes else 0

    def tell(self, what: Any) -> list[Any]:
        """What each rank tells; all call this equally often."""
        return [json.loads(text) for text in self.share(json.dumps(what))]

    def first(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, on all."""
        return self.tell(make() if self.rank == 0 else None)[0]

    def again(self, run: Path) -> str:
        """The line that goes on with a run, on as many ranks where all are on this host."""
        here = self.processes is not None and os.environ.get("LOCAL_WORLD_SIZE") == str(self.mesh.world)
        return resume_command(run, self.mesh.world if here else None)

    def asked(self, signal: Callable[[], Signals | None]) -> Callable[[], Signals | None]:
        """Ask all ranks whether they were asked to stop; the answer, the same on all, is waited for by a call of the
        result."""
        if self.processes is None:
            return signal
        processes = self.processes
        pending = processes.start(
            "all_reduce", [torch.tensor([int(signal() or 0)])], axes=self.mesh.axes, kind=">", at="between steps"
        )

        def answer() -> Signals | None:
            number = int(processes.wait(pending)[0])
            return Signals(number) if number else None

        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.processes is not None:
            self.processes.close(error)


def team(config: Config, corrections: Corrections | None = None) -> Team:
    """The ranks that the environment and the configuration speak of, once all are there and agree on what they are
    about to do; `corrections`: those of rank 0 where a run goes on."""
    corrections = corrections or Corrections()
    parallel, count = config.parallel, seat().world
    if _is_searched(parallel, count):
        plan, name = _searched(config, count, corrections) if count > 1 else (None, "")
        mesh = plan.mesh if plan is not None else Mesh()
    elif (several := _of_several_programs(parallel)) is not None:
        plan, name, mesh = several, _name(parallel, several.mesh), several.mesh
    else:
        mesh = Mesh(_axes(parallel, count))
        _refuse_unknown_names(parallel, mesh)
        plan, name = (_plan(parallel, mesh), _name(parallel, mesh)) if mesh.axes and mesh.world == count else (None, "")
    if mesh.world == count == 1:
        return Team(mesh, plan, name=name, corrections=corrections)
    processes = world(mesh, config.train.device if config.train.device in ("auto", "cpu") else "cuda")
    try:
        facts = {
            "plan": str(plan),
            "config": dump(anchored(config)),
            "code version": code_version(),
            "what was probed": probe_text(),
        }
        processes.agree(
            {
                **facts,
                "torch": torch.__version__,
                "transformers": version("transformers"),
                "Python": platform.python_version(),
            }
        )
        assert processes.meeting is not None
        savers = MeshProcess(mesh, processes.rank, Shares(processes.meeting, "saves"))
        return Team(
            mesh, plan, processes, Shares(processes.meeting, "loop", processes.watch), savers, name, corrections
        )
    except BaseException as error:
        processes.close(error)
        raise


def _is_searched(parallel: Parallel, count: int) -> bool:
    """Is the plan left to the search, all of it or where sub-models are?"""
    given = parallel.plan
    return (
        given == AUTO
        or (isinstance(given, dict) and given.get("place") == AUTO)
        or (given is None and parallel.mesh is None and count > 1)
    )


def _searched(config: Config, count: int, corrections: Corrections) -> tuple[Plan, str]:
    """The fastest plan for so many ranks, which each of them finds; its name for people."""
    from mycel.step.auto_plan import ranks_of
    from mycel.train import planner

    answer = planner.question(config, ranks_of(config.train.device, count, corrections)).run()
    best = answer.best
    assert best is not None and best.plan is not None
    return best.plan.given, f"{AUTO} ({best.shape}; {span(best.seconds)} a step predicted)"


def _of_several_programs(parallel: Parallel) -> Plan | None:
    """A plan by which ranks run several programs: of a pipeline, whose mesh is that inside a stage, or that of all
    ranks with the axis of stages; or of sub-models in places, each of which has a mesh."""
    plan, written = parallel.plan, _written(parallel)
    if not (written.get("stages") or written.get("place")):
        return None
    if written.get("place") and parallel.mesh is not None:
        raise PlanError(
            f"place: each place has a mesh of its own, and parallel.mesh is {Mesh(parallel.mesh)}\n"
            "  at        parallel.mesh\n"
            '  try       leave it out, and in the plan "*": {ranks: 2..7, mesh: {dp: 3, tp: 2}}'
        )
    return Plan.read(plan, Mesh(parallel.mesh) if parallel.mesh is not None else None)


def _axes(parallel: Parallel, count: int) -> dict[str, int]:
    """The mesh: as it is said, else the plan's own, else all ranks along the one axis of ready plans, or as data
    parallel ranks."""
    plan, own = parallel.plan, _written(parallel).get("mesh")
    if parallel.mesh is None and isinstance(own, dict):
        return own
    named = plan.split("+") if isinstance(plan, str) and not is_file(plan) else []
    ready = [name for name in named if name in {*ready_plans()} - {"tp2d"}]
    axes = [*dict.fromkeys("dp" if name.startswith("zero") else name for name in ready)]
    if parallel.mesh is not None or not axes or count == 1:
        return parallel.axes(count)
    if len(axes) == 1:
        return {axes[0]: count}
    inside = next(n for n in range(2, count + 1) if count % n == 0)
    sizes = {**dict.fromkeys(axes, 1), axes[0]: count // inside, axes[-1]: inside}
    raise PlanError(
        f"the plan {plan} splits over {' and '.join(axes)}, and no mesh says how many of {count} ranks lie along each\n"
        f"  at        parallel.mesh\n  try       'parallel.mesh={{{', '.join(f'{a}: {n}' for a, n in sizes.items())}}}'"
    )


def _refuse_unknown_names(parallel: Parallel, mesh: Mesh) -> None:
    """Also where one rank needs no plan: PlanError for a name that no ready plan has."""
    plan = parallel.plan
    if isinstance(plan, str) and not is_file(plan) and not {*plan.split("+")} <= {*ready_plans()}:
        Plan.read(plan, mesh)


def _written(parallel: Parallel) -> dict[str, Any]:
    """The plan as a file or the configuration has it, also where one rank needs none: PlanError for a file that is
    none.  Ready plans are known by their names: nothing."""
    plan = parallel.plan
    return plan_data(plan)[0] if isinstance(plan, dict) or (plan is not None and is_file(plan)) else {}


def _plan(parallel: Parallel, mesh: Mesh) -> Plan:
    """As it is given; else the ready plans that have the names of the mesh's axes."""
    return Plan.read(parallel.plan if parallel.plan is not None else _name(parallel, mesh), mesh)


def _name(parallel: Parallel, mesh: Mesh) -> str:
    """Of the plan: as it is given, or those that are ready for the axes."""
    if parallel.plan is not None:
        return parallel.plan if isinstance(parallel.plan, str) else "of its own"
    names = [axis for axis in mesh.axes if axis in ready_plans()] + ["tp2d"] * (set(mesh.axes) >= TWO_AXES)
    if strange := [axis for axis in mesh.axes if axis not in names and axis not in TWO_AXES]:
        hint = f"parallel.plan, or axes called {', '.join(name for name in ready_plans() if name.isalpha())}"
        if strange[0] == STAGE_AXIS:
            hint = f"'parallel.plan={{stages: {mesh.sizes()[STAGE_AXIS]}}}', a pipeline"
        raise PlanError(
            f"no plan is given, and none is ready for axis {strange[0]!r} of {mesh}\n  at        parallel.mesh\n"
            f"  try       {hint}"
        )
    return "+".join(names)
