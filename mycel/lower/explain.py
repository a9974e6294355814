"""A distributed program as people read it: the global program, each value in its layout, each collective where it is
sent, with its bytes.

    def main(x: f32[64@dp,8], w: f32[16@dp,8]):
      all_gather w over dp -> f32[16,8]                           # 256 bytes
      h: f32[64@dp,16] = linear(x, w)                             # model.py:31
      return h

Bytes are what one rank puts on the wire each time the line runs.  A line without a value's name is sent inside the
operator below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mycel.ir import Atom, Axes, Block, Eqn, Layout, Program, Var, order, runs, typed, walk
from mycel.ir.text import value_text
from mycel.lower.distribute import Distributed
from mycel.lower.spmd import LoweredBlock, interface, lowered_block
from mycel.plan import PipelineSchedule, Plan, timeline
from mycel.plan.links import sent_by
from mycel.sizes import span

WIDTH = 100  # at most, before the comment of a line
SHOWN = 64  # stages times microbatches that a schedule is drawn for


def sent(program: Program) -> dict[Axes, float]:
    """Bytes that a rank puts on the wire in one run of a local program, by axes; a loop counts as one turn, a branch as
    taken."""
    often, by_axes = runs(program), dict[Axes, float]()
    for name, eqn in walk(program):
        axes, count = sent_by(eqn)
        if count:
            by_axes[axes] = by_axes.get(axes, 0.0) + often[name] * count
    return dict(sorted(by_axes.items()))


def sent_text(by_axes: Mapping[Axes, float]) -> str:
    """dp 1,024 bytes, tp 96 bytes"""
    return ", ".join(f"{'.'.join(axes)} {_bytes(n)}" for axes, n in by_axes.items()) or "nothing"


def proved(gap: float) -> str:
    """What is known of layouts that may be so far above the cheapest ones: of those that divide the products over the
    mesh and use parameters as they are given (`plan/preferences.py`)."""
    if gap == 0:
        return "the cheapest that divide the work so"
    if gap < 1:
        return f"at most {100 * gap:.3g} % above the cheapest that divide the work so"
    return "not proved to be the cheapest that divide the work so"


def explain(distributed: Distributed) -> str:
    """All blocks, inner ones first."""
    often = runs(distributed.whole)
    return "\n".join(_block(distributed, name, often[name]) for name in order(distributed.whole))


def _block(distributed: Distributed, name: str, often: int) -> str:
    block, laid = distributed.whole.blocks[name], distributed.layouts[name]
    lowered = lowered_block(distributed.whole, name, distributed.layouts, distributed.moves, distributed.gathered)
    inputs = [f"{v.name}: {typed(v.type, layout)}" for v, layout in zip(block.inputs, laid.inputs, strict=True)]
    lines: list[tuple[str, str]] = []
    for eqn, choice, sends in zip(block.eqns, laid.choices, lowered.by_equation[:-1], strict=True):
        lines += _messages(lowered, sends)
        outs = choice.outs if choice is not None else interface(eqn, distributed.layouts)[1]
        lines.append((_equation(eqn, outs), " ".join(eqn.line.split())))
    lines += _messages(lowered, lowered.by_equation[-1])
    width = min(max((len(text) for text, _ in lines), default=0), WIDTH)
    times = f"  # {often} times" if often != 1 else ""
    body = [f"  {text:<{width}}  # {note}" if note else f"  {text}" for text, note in lines]
    returns = f"  return {', '.join(_outputs(distributed, name, block))}".rstrip()
    return "\n".join([*_head(name, inputs, times), *body, returns]) + "\n"


def _head(name: str, inputs: Sequence[str], times: str) -> list[str]:
    """One input a line where they do not fit one."""
    line = f"def {name}({', '.join(inputs)}):{times}"
    if len(line) <= WIDTH + 20:
        return [line]
    return [f"def {name}({times}", *(f"    {x}," for x in inputs), "):"]


def _messages(lowered: LoweredBlock, eqns: Sequence[Eqn]) -> Iterator[tuple[str, str]]:
    """The collectives among the equations that one equation became."""
    for eqn in eqns:
        axes, count = sent_by(eqn)
        if not count:
            continue
        out = eqn.outputs[0]
        value, after = lowered.moved.get(out, (None, None))
        what = value.name if value is not None else str(next(eqn.vars).type)
        shown = typed(value.type, after) if value is not None and after is not None else str(out.type)
        yield f"{eqn.op.name} {what} over {'.'.join(axes)} -> {shown}", _bytes(count)


def _equation(eqn: Eqn, outs: Sequence[Layout]) -> str:
    """y: f32[8@dp,6]+tp = linear(x, w)"""
    args = [value_text(x) for x in eqn.inputs] + [f"{k}={value_text(v)}" for k, v in sorted(eqn.params.items())]
    left = ", ".join(f"{v.name}: {typed(v.type, layout)}" for v, layout in zip(eqn.outputs, outs, strict=True))
    return f"{left} = {eqn.op.name}({', '.join(args)})" if left else f"{eqn.op.name}({', '.join(args)})"


def _outputs(distributed: Distributed, name: str, block: Block) -> Iterator[str]:
    updates = distributed.whole.updates if name == distributed.whole.entry else ()
    first = len(block.outputs) - len(updates)
    for i, (x, layout) in enumerate(zip(block.outputs, distributed.layouts[name].outputs, strict=True)):
        yield (f"{updates[i - first]}=" if i >= first else "") + _output(x, layout)


def _output(x: Atom, layout: Layout) -> str:
    return value_text(x) if not isinstance(x, Var) else f"{x.name}: {typed(x.type, layout)}"


def _bytes(count: float) -> str:
    return f"{count:,.0f} bytes"


def schedule_text(schedule: PipelineSchedule, plan: Plan) -> str:
    """A pipeline: where it is cut, how long ranks wait, and a row of steps for each of them."""
    assert plan.decided is not None and plan.predicted is not None
    where = f"in {schedule.ranks} places" if plan.place else f"on {schedule.ranks} ranks"
    lines = [
        f"pipeline         {schedule.stages} stages {where}, {schedule.microbatches} microbatches, "
        f"schedule {plan.schedule}"
    ]
    for i, place in enumerate(plan.places):
        lines.append(f"  place {i}        {place}, stages {', '.join(map(str, schedule.stages_of(i)))}")
    lines += [f"  begin at       {', '.join(plan.decided.stages)}"] if not plan.place else []
    if plan.predicted.steps is not None:
        times = timeline(schedule, plan.predicted.steps)
        lines += [f"  in all         {span(times.seconds)}, of which ranks wait {', '.join(map(span, times.idle))}"]
        lines += (
            [f"  {row}" for row in str(times).splitlines()] if schedule.microbatches * schedule.stages <= SHOWN else []
        )
    return "\n".join(lines)
