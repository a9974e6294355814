"""Loss and gradients -> the whole step, as a plan has gradients travel and the optimiser takes them.

delayed -> watched -> compressed -> what was lost, measured -> clipped, updated -> held ahead
-> told
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mycel import transform
from mycel.ir import check
from mycel.ops.codecs import Compression
from mycel.parts import ShardedModel, UnshardedStep
from mycel.plan import Plan
from mycel.plan.compression import refuse_update
from mycel.step.settings import Settings


def watched_axis(written: Plan | None) -> str:
    """Along which axis gradients of ranks are compared; "" where they are not."""
    if written is None or written.mesh.world == 1 or not written.monitored():
        return ""
    axes, meshes = [*written.compress, *written.replica.batch_axes()], written.replica.meshes()
    return next((a for a in axes if any(a in mesh and mesh[a] > 1 for mesh in meshes)), "")


def whole_step(
    body: UnshardedStep,
    given: Plan,
    written: Plan | None,
    settings: Settings,
    parts: ShardedModel | None,
    by_rule: bool,
    later: bool,
    pending_errors: Mapping[str, str],
) -> UnshardedStep:
    """`given`: the plan of now, of all that is `written`, `later` than its first.  `by_rule`: is the update part of the
    program?  `pending_errors`: gradients that are sent with what was lost of them before, and along which axis."""
    groups, watched = [g.group for g in body.groups], watched_axis(written)
    clipping = (settings.clip_norm, settings.clip_value) if by_rule else (None, None)
    names, late = [name for g in groups for name in g.params], given.delayed() if parts is not None else None
    program = body.program
    if late is not None:
        program = check(transform.delay_gradients(program, names, body.results, late.axis))
    if watched:
        ranks = [given.ranks_along(watched, name) for name in names]
        program = check(transform.monitor_ranks(program, ranks, body.results, watched))
    chosen = _codecs(groups, given, settings, parts, later) | dict.fromkeys(
        pending_errors, Compression.parse("fp32+ef")
    )
    if chosen:
        axis = next(iter(given.compress), None) or next(iter(pending_errors.values()))
        program = check(transform.compress_gradients(program, groups, body.results, chosen, axis))
    if watched:
        assert written is not None
        errors, by_group = "error" in written.monitored(), [g.params for g in groups]
        program = check(transform.monitor_sums(program, ranks, by_group, body.results, watched, errors))
    if late is not None:
        program = check(transform.sum_late(program, names, body.results))
    program, groups = transform.frozen_groups(program, groups, body.results, chosen)
    program = check(transform.optimise(program, groups, body.results, *clipping, settings.grads))
    if late is not None and late.options["ahead"]:
        program = check(transform.hold_ahead(program, late.options["ahead"]))
    shapes = {n: parts.shapes[n] for n in names if n in parts.shapes} if parts is not None else {}
    if given.gathered_codecs(shapes):
        program = check(transform.count_messages(program))
    codecs = given.told_codecs(shapes) if by_rule else {}
    if codecs:
        program = check(transform.share_updates(program, codecs, given.over[0]))
    return replace(body, program=program)


def _codecs(
    groups: Sequence[transform.ParameterGroup],
    given: Plan,
    settings: Settings,
    parts: ShardedModel | None,
    later: bool,
) -> dict[str, Compression]:
    """How gradients are compressed that a plan says so of, by parameter."""
    how = given.compressed()
    if how is None or parts is None:
        return {}
    names = [name for group in groups for name in group.params]
    trained = {name: parts.shapes[name] for name in names if name in parts.shapes}
    how.refuse_unused(trained, {name: x.dtype for name, x in parts.tensors() if name not in trained})
    chosen = {name: codec for name, codec in how.of(trained).items() if given.ranks_along(how.axis, name) > 1}
    asking = {
        "clip_norm": settings.clip_norm, "clip_value": settings.clip_value, "grads=True": settings.grads,
        "monitor": given.monitored(), "sync": given.delayed(),
    }  # fmt: skip
    others_asking = [name for name, said in asking.items() if said]
    for group in groups:
        for name in group.params:
            if name in chosen:
                refuse_update(how.axis, name, chosen[name], group.kind, dict(group.flags), later, others_asking)
    return chosen
