"""The whole way from a step's program to the one that every rank runs, as its plan has decided: no solver, no clock.

distribute   local types, explicit collectives (on one device nothing to do)
compress     sums of gradients on encoded bytes, rows of experts likewise
once         what several equations do to the same operand
reside       what forward does not keep, backward computes again
fp8_gates    gates that are computed in 8 bits at once
hoist        what blocks gather, their callers gather
fuse         updates of many parameters in one
outline      stretches between calls that are compiled as one
stages       of a pipeline: one program for the ranks of each, what they send encoded where the plan says so
interleave   two microbatches at once, where the plan says so
overlap      collectives begin early and end late
gathers      of parameters, on encoded bytes
offload      values leave for the host and come back
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from mycel import transform
from mycel.ir import Eqn, Program, call, check
from mycel.lower.beside import beside
from mycel.lower.compress import compress
from mycel.lower.distribute import Distributed, distribute
from mycel.lower.encode_gathers import EncodedGathers, encode_gathers
from mycel.lower.encode_sends import encode_rows_of_experts, encode_sends
from mycel.lower.hoist import hoist
from mycel.lower.interleave import interleave
from mycel.lower.offload import offload
from mycel.lower.overlap import overlap
from mycel.lower.residency import reside
from mycel.lower.stage_sums import plain_sums
from mycel.lower.stages import Pipeline, pipelined
from mycel.plan import STAGE_AXIS, Offloaded, Plan, Residuals, StepBody


@dataclass(frozen=True)
class Lowered:
    """The program of every rank, the blocks of it to compile; and on several ranks how it was spread.  Of a pipeline
    `program` is that of the ranks of one place, the first, and `pipeline` has all of them; where each place has a mesh
    of its own, `spreads` says how the program of each was, and `regions_of` what of it is compiled."""

    program: Program
    regions: frozenset[str] = frozenset()
    spread: Distributed | None = None
    pipeline: Pipeline | None = None
    spreads: tuple[Distributed | None, ...] = ()
    regions_of: tuple[frozenset[str], ...] = ()

    def at(self, place: int) -> Lowered:
        """As the ranks of one place of the pipeline run it."""
        assert self.pipeline is not None
        spread = self.spreads[place] if self.spreads else self.spread
        regions = self.regions_of[place] if self.regions_of else self.regions
        return replace(self, program=self.pipeline.programs[place], spread=spread, regions=regions)


def lowered(program: Program, plan: Plan) -> Lowered:
    """A global program under a plan that is decided."""
    assert plan.decided is not None
    inside = plan.inside
    spread = distribute(program, inside) if inside.mesh.world > 1 else None
    local = local_of(program, spread, plan.is_pipeline, rows=plan.sent_codecs().get("experts", ""))
    resident = with_residuals(local, plan.decided.residuals, spread, plan.at_once > 1 or plan.is_pipeline)
    names = frozenset[str]()
    if plan.decided.compiled:
        chosen = plan.decided.regions
        resident, names = with_regions(resident, lambda block, run: run[0].outputs[0].name in chosen.get(block, ()))
    if plan.is_pipeline:
        body = plan.decided.residuals.body
        done = staged(summed_for_stages(resident, plan, body), names, spread, plan, body)
        return with_moves_by_rank(done, plan.decided.moved_by_rank)
    return with_moves(Lowered(finished(resident, spread, plan), names, spread), plan.decided.moved)


def summed_for_stages(resident: Program, plan: Plan, body: str) -> Program:
    """A step with the sums that stages are cut around; two microbatches in one, where the plan says so."""
    return plain_sums(interleave(resident, body, staged=True) if plan.at_once > 1 else resident, body)


def staged(summed: Program, regions: frozenset[str], spread: Distributed | None, plan: Plan, body: str) -> Lowered:
    """The stages of a step with plain sums, as its plan has decided."""
    assert plan.decided is not None
    parts = StepBody.of(summed, body).length
    schedule = plan.schedule_of(parts)
    pipeline = pipelined(summed, body, plan.decided.stages, schedule, STAGE_AXIS)
    codec = plan.sent_codecs().get("stages")
    programs = encode_sends(pipeline.programs, codec) if codec else pipeline.programs
    done = replace(pipeline, programs=tuple(check(overlap(check(p))) for p in programs))
    names = regions | {name for name, of in pipeline.derived.items() if of in regions}
    return Lowered(done.programs[0], names, spread, done)


def local_of(
    program: Program,
    spread: Distributed | None,
    simplified: bool = False,
    keep: Collection[str] = (),
    rows: str = "",
) -> Program:
    """What is left to a rank of a program; `simplified`, where nothing is.  `keep`: blocks that are called as they
    are.  `rows`: the codec of rows that travel to experts."""
    if spread is None:
        return check(transform.once(transform.simplify(program) if simplified else program))
    local = check(transform.once(transform.simplify(check(compress(spread.local)), ranks=True, keep=keep)))
    return check(encode_rows_of_experts(local, rows)) if rows else local


def local_of_place(program: Program, spread: Distributed | None) -> Program:
    """What is left to a rank of the program of a place, but for the pieces of its messages: the steps of its stages
    stay blocks."""
    if spread is None:
        return check(transform.once(program))
    steps = [eqn.params["block"] for eqn in program.main.eqns if eqn.op is call]
    return check(transform.fuse(hoist(local_of(program, spread, keep=steps))))


def with_residuals(local: Program, residuals: Residuals, spread: Distributed | None, is_woven: bool = False) -> Program:
    """What is kept for backward, and the order that follows from it; `is_woven`: microbatches are, or stages are cut,
    and messages to experts begin there or not at all."""
    resident = check(transform.fp8_gates(reside(local, residuals)))
    if spread is None:
        return check(transform.fuse(resident))
    ordered = check(transform.fuse(hoist(resident)))
    return ordered if is_woven else check(beside(ordered))


def with_regions(resident: Program, is_worth: Callable[[str, Sequence[Eqn]], bool]) -> tuple[Program, frozenset[str]]:
    outlined, names = transform.outline(resident, is_worth)
    return check(outlined), frozenset(names)


def finished(program: Program, spread: Distributed | None, plan: Plan) -> Program:
    if spread is None:
        return program
    if plan.at_once > 1:
        assert plan.decided is not None
        program = interleave(program, plan.decided.residuals.body)
    ordered = check(overlap(program))
    shapes = {role.name: v.shape for v in spread.whole.inputs if (role := spread.whole.role(v)).kind == "parameter"}
    codecs = plan.gathered_codecs(shapes)
    return check(encode_gathers(ordered, EncodedGathers(plan.over[0], codecs))) if codecs else ordered


def with_moves(done: Lowered, moved: Offloaded | None) -> Lowered:
    return replace(done, program=check(offload(done.program, moved))) if moved else done


def with_moves_by_rank(done: Lowered, moved: Sequence[Offloaded]) -> Lowered:
    """The same of a pipeline, each rank with what its own program moves."""
    if not any(moved):
        return done
    assert done.pipeline is not None
    pairs = zip(done.pipeline.programs, moved, strict=True)
    programs = tuple(check(offload(program, each)) if each else program for program, each in pairs)
    return replace(done, program=programs[0], pipeline=replace(done.pipeline, programs=programs))
