"""The whole way from a step's program to the one that every rank runs, as its plan has decided: no solver, no clock.

distribute   local types, explicit collectives (on one device nothing to do)
compress     sums of gradients on encoded bytes, rows of experts likewise
once         what several equations do to the same operand
reside       what forward does not keep, backward computes again
fp8_gates    gates that are computed in 8 bits at once
hoist        what blocks gather, their callers gather
fuse         updates of many parameters in one
stages       of a pipeline: one program for the ranks of each, what they send encoded where the plan says so
interleave   two microbatches at once, where the plan says so
outline      stretches between calls that are compiled as one
overlap      collectives begin early and end late
gathers      of parameters, on encoded bytes
offload      values leave for the host and come back
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from mycel.lower.last_call import divided_last_call
from mycel.lower.offload import offload
from mycel.lower.overlap import overlap
from mycel.lower.residency import reside
from mycel.lower.stage_sums import plain_sums
from mycel.lower.stages import Pipeline, pipelined
from mycel.plan import STAGE_AXIS, Offloaded, Plan, Residuals, StepBody, step_names


@dataclass(frozen=True)
class Lowered:
    """The program of every rank, the blocks of it to compile; and on several ranks how it was spread.  Of a pipeline
    `program` is that of the ranks of one place, the first, and `pipeline` has all of them; `regions_of` says what of
    each is compiled, and `spreads` how it was spread, where each place has a mesh of its own."""

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
    if plan.is_pipeline:
        body = plan.decided.residuals.body
        done = staged(summed_for_stages(resident, plan, body), spread, plan, body)
        return with_moves_by_rank(with_regions_by_rank(done, plan), plan.decided.moved_by_rank)
    woven, names = in_pairs(resident, spread, plan, plan.decided.residuals.body), frozenset[str]()
    if plan.decided.compiled:
        woven, names = with_regions(woven, is_chosen(plan.decided.regions))
    ordered = finished(woven, spread, plan, plan.decided.compiled)
    return with_moves(Lowered(ordered, names, spread), plan.decided.moved)


def in_pairs(resident: Program, spread: Distributed | None, plan: Plan, body: str) -> Program:
    """Two microbatches in one, where the plan says so."""
    return interleave(resident, body) if spread is not None and plan.at_once > 1 else resident


def summed_for_stages(resident: Program, plan: Plan, body: str) -> Program:
    """A step with the sums that stages are cut around; two microbatches in one, where the plan says so."""
    return plain_sums(interleave(resident, body, staged=True) if plan.at_once > 1 else resident, body)


def staged(summed: Program, spread: Distributed | None, plan: Plan, body: str) -> Lowered:
    """The stages of a step with plain sums, as its plan has decided; what of them is compiled, and the order of their
    messages, comes with regions."""
    assert plan.decided is not None
    parts = StepBody.of(summed, body).length
    schedule = plan.schedule_of(parts)
    pipeline = pipelined(summed, body, plan.decided.stages, schedule, STAGE_AXIS)
    codec = plan.sent_codecs().get("stages")
    programs = encode_sends(pipeline.programs, codec) if codec else pipeline.programs
    return Lowered(programs[0], frozenset(), spread, replace(pipeline, programs=tuple(map(check, programs))))


def with_regions_by_rank(done: Lowered, plan: Plan) -> Lowered:
    """The same, where the steps of stages are made of regions as decided, and wait for messages as late as they can."""
    assert done.pipeline is not None and plan.decided is not None
    programs, names = list(done.pipeline.programs), [frozenset[str]()] * len(done.pipeline.programs)
    if plan.decided.compiled:
        steps, chosen = step_names(done.pipeline.schedule.stages), is_chosen(plan.decided.regions)
        outlined = [with_regions(program, chosen, steps) for program in programs]
        programs, names = [program for program, _ in outlined], [regions for _, regions in outlined]
    pipeline = replace(done.pipeline, programs=tuple(with_messages(p, done.spread, plan) for p in programs))
    every = frozenset().union(*names)
    return replace(done, program=pipeline.programs[0], regions=every, pipeline=pipeline, regions_of=tuple(names))


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


def is_chosen(regions: Mapping[str, Collection[str]]) -> Callable[[str, Sequence[Eqn]], bool]:
    """Does a stretch of a block begin with one of the values that were decided for it?"""
    return lambda block, run: run[0].outputs[0].name in regions.get(block, ())


def with_regions(
    resident: Program, is_worth: Callable[[str, Sequence[Eqn]], bool], divided: Collection[str] = ()
) -> tuple[Program, frozenset[str]]:
    """Stretches of equations that are worth it as blocks, and what is compiled; `divided`: blocks that are not taken
    whole."""
    outlined, names = transform.outline(resident, is_worth, divided)
    return check(outlined), frozenset(names)


def finished(program: Program, spread: Distributed | None, plan: Plan, is_compiled: bool) -> Program:
    """With its messages begun early; blocks that are compiled stay whole for that."""
    if spread is None:
        return program
    return with_messages(program if is_compiled else check(divided_last_call(program)), spread, plan)


def with_messages(program: Program, spread: Distributed | None, plan: Plan) -> Program:
    """Messages begun early, and those that gather parameters on encoded bytes, where the plan says so."""
    ordered = check(overlap(program))
    if spread is None:
        return ordered
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
