"""What a step is and why, as text: `step.explain()`."""

from __future__ import annotations

import torch

from mycel import lower, plan
from mycel.islands import islands_text
from mycel.parts import ShardedModel
from mycel.run import moves
from mycel.sizes import shown
from mycel.step.compiled_step import CompiledStep
from mycel.step.settings import Settings
from mycel.step.step_trace import StepTrace


def explained(
    entry: CompiledStep,
    asked: Settings,
    hardware: plan.Hardware,
    device: torch.device,
    parts: ShardedModel | None,
    traced: StepTrace | None,
    priced: int,
) -> str:
    """`traced`: the last step that was traced; `priced`: how often the plan was, by links as they were then."""
    lines = [
        f"precision        {asked.precision}, {asked.accumulate} part(s) a step, clip_norm {asked.clip_norm}",
        *([str(entry.fp8)] if entry.fp8 is not None else []),
        entry.plan.summary(),
    ]
    if device.type == "cuda":
        lines.append(f"measured peak    {shown(torch.cuda.max_memory_allocated(device))}")
        lines.append(f"runs as          {entry.replayed or 'calls from Python'}")
    lines += _travels(entry, hardware, in_parts=asked.accumulate > 1 and entry.lowered.pipeline is None)
    foreign = sorted({e.params["target"] for b in entry.program.blocks.values() for e in b.eqns if e.op.foreign})
    lines += [f"as torch has it  {', '.join(foreign)}"] if foreign else []
    lines += islands_text(entry.islands, entry.timed.seconds if entry.timed is not None else 0.0)
    spread, pipeline = entry.lowered.spread, entry.lowered.pipeline
    lines += [lower.schedule_text(pipeline.schedule, entry.plan)] if pipeline is not None else []
    apart = entry.plan.sync_text()
    lines += [f"synchronised     {apart}"] if apart else []
    lines += [str(traced)] if traced is not None and traced.plan is entry.plan else []
    if spread is None:
        return "\n".join([*lines, "", str(entry.program)])
    assert entry.plan.predicted is not None
    lines.append(
        f"mesh             {entry.plan.mesh}; layouts {lower.proved(entry.plan.predicted.gap)}; sums {entry.plan.sums}"
    )
    compressed = entry.plan.compress_text()
    slowed = f", priced anew {priced - 1} time(s), since the link had slowed" if priced > 1 else ""
    lines += [f"compressed       {compressed}{slowed}"] if compressed else []
    share, whole = parts.left_whole() if parts is not None else (0.0, [])
    lines += [f"left whole       {share:.0%} of the matrices: {', '.join(whole[:3])}"] if share > 0.3 else []
    all_, once = lower.sent(entry.program), lower.sent(spread.local)
    lines.append(f"sent by a rank   {lower.sent_text(all_)}")
    again = {axes: n - once.get(axes, 0.0) for axes, n in all_.items() if n > once.get(axes, 0.0)}
    lines += [f"of that          {lower.sent_text(again)} because backward computes values again"] if again else []
    return "\n".join([*lines, "", lower.explain(spread)])


def _travels(entry: CompiledStep, hardware: plan.Hardware, in_parts: bool) -> list[str]:
    """What it moves between host and device, one line for each value; and why nothing of a kind that its plan has
    there."""
    texts = list(plan.staying(entry.program, entry.plan.offload, in_parts))
    if moves(entry.program):
        clock = plan.Clock(hardware, hardware.links(entry.plan.mesh), moves=True)
        texts = [*map(str, plan.travels(entry.program, clock, entry.lowered.regions)), *texts]
    return [f"{'moved' if i == 0 else '':<16} {text}" for i, text in enumerate(texts)]
