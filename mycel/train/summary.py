"""What will run, in words: the table before the first step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from mycel.plan import EXPERT_AXIS, error_bars, hardware_of
from mycel.sizes import span
from mycel.train import models
from mycel.train.assemble import Assembly
from mycel.train.device import describe, memory_total
from mycel.train.outlook import Outlook
from mycel.train.progress import count, size
from mycel.train.ranks import AUTO
from mycel.train.schedule import warmup_steps
from mycel.train.stream import ENDLESS

Rows = list[tuple[str, str]]
WHOLE_SHARE = 0.3  # of the parameters: more than embeddings, which some plans leave whole on purpose


def rows(parts: Assembly, outlook: Outlook | None, start: int, folder: Path) -> Rows:
    """Each thing that matters and what it is; the step must have been prepared."""
    train = parts.config.train
    sizes, kind = models.count(parts.outline), type(parts.module).__name__
    unit, _, each = parts.data.train.each
    seen = train.steps * parts.tokens
    epochs = train.steps * parts.rows / parts.data.train.count
    whole = f", {epochs:.2f} epochs" if parts.data.train.count < ENDLESS else ""
    from_step = f", from step {start}" if start else ""
    return [
        ("model", parts.model.source if kind in parts.model.source else f"{kind}, {parts.model.source}"),
        (
            "parameters",
            f"{sizes.total:,}, {'all' if sizes.trainable == sizes.total else f'{sizes.trainable:,}'} of them trained",
        ),
        *(("data", line) for line in parts.data.report[:2]),
        ("a step", f"{parts.tokens:,} {unit} = {_batch(parts)} x {each}"),
        *([("parallel", str(parts.team)), ("split", _split(parts))] if parts.team.plan is not None else []),
        ("steps", f"{train.steps:,}{from_step}: {count(seen)} {unit}{whole}"),
        ("optimizer", _optimizer(parts)),
        ("precision", f"{train.precision}, parameters in {parts.config.model.dtype}"),
        (
            "memory",
            (
                f"{size(parts.step.plan.peak)} predicted at the peak, {size(parts.step.plan.held)} of it between "
                f"steps{limit(parts)}"
            ),
        ),
        *([("backward", _again(parts))] if parts.team.plan is not None else []),
        *([("predicted", _predicted(parts, outlook))] if outlook is not None else []),
        ("device", describe(parts.device)),
        ("results", str(folder)),
    ]


def _split(parts: Assembly) -> str:
    """What of the model lies in parts over which axes."""
    plan, held = parts.step.plan, parts.step.parts
    if plan.place or held is None:
        return "each place by itself"
    counts = Counter(axis for layout in held.layouts.values() for axis in layout.axes)
    said = [f"{n} of {len(held.layouts)} tensors of the model over {axis}" for axis, n in counts.items()]
    said += [f"{plan.stage_count} stages, {plan.schedule}"] if plan.is_pipeline else []
    said += [f"optimiser state over {'.'.join(plan.over)} (zero {plan.zero})"] if plan.zero else []
    said += [f"the batch over {'.'.join(axes)}"] if (axes := plan.batch_axes()) else []
    return ", ".join(said) or "nothing: every rank does the same"


def _again(parts: Assembly) -> str:
    """What backward computes again or fetches from the host."""
    plan = parts.step.plan
    pairs = plan.residuals.pairs
    again = [d for d in pairs if d.seconds]
    said = [f"{len(again)} of {len(pairs)} layers computed again, {span(sum(d.seconds for d in again))}"]
    said = said if again else ["finds all it needs in memory"]
    said += [f"{size(plan.predicted.host)} on the host"] if plan.predicted is not None and plan.predicted.host else []
    return ", ".join(said)


def _predicted(parts: Assembly, outlook: Outlook) -> str:
    """Of a step, and what earlier runs here have made of such predictions."""
    name, ranks = hardware_of(parts.device).name, parts.team.mesh.world
    bars = error_bars(name, ranks, outlook.correction, outlook.figures)
    return str(outlook) if bars is None else f"{outlook}; steps took {bars}"


def notes(parts: Assembly, begins: bool = True) -> list[str]:
    """What the data and the model have to say, and what looks wrong about memory; what is to be said of the weights
    that a run `begins` with, once."""
    lines = [
        *parts.data.report[2:],
        *(parts.model.notes if begins else ()),
        *parts.notes,
        *_more_than_there_is(parts),
        *_left_whole(parts),
        *_unused_plan(parts),
    ]
    there = memory_total(parts.device)
    if there is not None and parts.step.plan.peak > there:
        what = f"the step is predicted to need {size(parts.step.plan.peak)}, the device has {size(there)}"
        lines.append(
            f"{what}\n  try       train.memory={int(0.9 * there / 2**30)}GiB, or more train.accumulate and less "
            "train.batch"
        )
    return lines


def _more_than_there_is(parts: Assembly) -> list[str]:
    """A step that takes more sequences than the data has: some of them several times."""
    train, there = parts.config.train, parts.data.train.count
    if parts.rows <= there:
        return []
    noun = parts.data.train.each[0] if parts.data.train.each[1] == 1 else "sequences"
    count = f"{train.batch:,} (train.batch) x {train.accumulate} (train.accumulate)"
    what = f"a step takes {parts.rows:,} {noun} = {count}, but the training data has {there:,}"
    fits = f"train.batch={max(there // train.accumulate, 1)}"
    fits += " train.accumulate=1" if train.accumulate > there else ""
    return [f"{what}: it sees each {parts.rows / there:.1f} times\n  try       {fits}, or more data"]


def _unused_plan(parts: Assembly) -> list[str]:
    """A ready plan for several ranks, where there is one."""
    given = parts.config.parallel.plan
    if parts.team.plan is not None or not isinstance(given, str) or given == AUTO:
        return []
    return [f"parallel.plan is {given}, but one process runs: nothing is split\n  try       --nproc N"]


def _left_whole(parts: Assembly) -> list[str]:
    """A plan that splits parameters, and leaves most of them whole: it does not know their names."""
    plan, held = parts.team.plan, parts.step.parts
    if plan is None or held is None:
        return []
    share, whole = held.left_whole()
    if share < WHOLE_SHARE:
        return []
    largest = whole[0]
    others = f" and {len(whole) - 1} others" if len(whole) > 1 else ""
    what = f"plan {parts.team.name} leaves {share:.0%} of the parameters whole on every rank"
    axis = next(a for a in reversed(plan.mesh.axes) if a in plan.parameter_axes - {EXPERT_AXIS})
    layout = ", ".join([axis, *["-"] * (len(held.shapes[largest]) - 1)])
    return [
        f"{what}: it has no layout for {largest}{others}\n"
        f"  try       a plan of your own, with parameters: {{{_pattern(largest)!r}: [{layout}]}}"
    ]


def _pattern(name: str) -> str:
    """model.layers.0.mlp.w => *.mlp.w"""
    return "*." + ".".join(name.split(".")[-2:])


def _batch(parts: Assembly) -> str:
    """Sequences in a step, and how many ranks share them: the configuration's batch is that of all together."""
    train, plan = parts.config.train, parts.team.plan
    first = plan.batch_layout("input_ids", (train.batch, parts.config.data.length)).dims[0] if plan is not None else ()
    if plan is not None and plan.place:
        return f"{train.batch} (batch, in each place) x {train.accumulate} (accumulate)"
    ranks = parts.team.mesh.count(first)
    if train.batch % ranks:
        return f"{train.batch} (batch, over {ranks} devices) x {train.accumulate} (accumulate)"
    return (
        f"{train.batch // ranks} (batch) x {train.accumulate} (accumulate) x {ranks} (device{'s' if ranks > 1 else ''})"
    )


def _optimizer(parts: Assembly) -> str:
    config = parts.config
    chosen, schedule = config.optimizer, config.schedule
    rising = warmup_steps(schedule.warmup, config.train.steps)
    shape = f"{schedule.kind} (warm-up {rising})" if rising else schedule.kind
    clip = f", norm clipped to {config.train.clip_norm:g}" if config.train.clip_norm else ""
    return f"{chosen.name}, lr {chosen.lr:g} {shape}, weight decay {chosen.weight_decay:g}{clip}"


def limit(parts: Assembly) -> str:
    """The memory that the run was given."""
    return f"; limit {parts.config.train.memory}" if parts.config.train.memory else ""
