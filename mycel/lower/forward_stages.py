"""A program without a step -> one for each rank of a pipeline, or for each place: what it holds the tensors for.

    y = f(x, w0, w1)     =>     rank 0                                       rank 1
                                h = call(x, w0, block=@forward_0)            t = begin_receive(source=0, tag=0)
                                begin_send(h, to=1, tag=0)                   h = finish_receive(t)
                                t = begin_receive(source=1, tag=1)           y = call(h, w1, block=@forward_1)
                                y = finish_receive(t)                        begin_send(y, to=0, tag=1)

The whole batch is one microbatch of a step that has no backward pass: stages, messages and entries are those of a
training step (`stages.py`), in the order of a schedule that has forward steps alone.  Every rank has all results.
"""

from __future__ import annotations

from dataclasses import replace

from mycel.ir import Block, Builder, Program, Ref, Type, Var, check, prune, scan
from mycel.lower.places import graph_of
from mycel.lower.stage_blocks import StageParts
from mycel.lower.stage_entry import PipelineEntry, PipelineLoop
from mycel.lower.stages import Pipeline, RankWriter, pipeline_of
from mycel.ops import o
from mycel.plan.held_stages import HeldInputs
from mycel.plan.list_schedules import forward_only
from mycel.plan.stages import StepFlow
from mycel.transform.dce import dce
from mycel.transform.inline import inline

BODY = "whole_batch"
ANY_SIZE = 1 << 30  # of blocks that are inlined


def forward_stages(program: Program, held: HeldInputs, writer: type[RankWriter], axis: str) -> Pipeline | None:
    """The program of each rank, or place; None where one would read what it does not hold.  Updates are left out."""
    whole = one_part(dce(replace(program, blocks=_without_updates(program), updates=())))
    flow = StepFlow(whole, BODY, held.roles(whole))
    while apart := held.read_apart(flow):
        whole = check(inline(whole, ANY_SIZE, keep=whole.blocks.keys() - apart))
        flow = StepFlow(whole, BODY, held.roles(whole))
    placed = held.stages(flow)
    if placed is None:
        return None
    parts = StageParts(placed.stages, splits=False)
    schedule = forward_only(placed.place, held.ranks, flow.body.length, graph_of(parts))
    entry = PipelineEntry(PipelineLoop(parts, schedule))
    programs = tuple(check(prune(writer(entry, rank, axis).program())) for rank in range(held.ranks))
    if not all(held.allow(rank, each) for rank, each in enumerate(programs)):
        return None
    return pipeline_of(whole, programs, parts, schedule)


def _without_updates(program: Program) -> dict[str, Block]:
    return {**program.blocks, program.entry: replace(program.main, outputs=tuple(program.results))}


def one_part(program: Program) -> Program:
    """y = f(x)    =>    rows = scan(x, body=@f, length=1); y = reshape(rows)"""
    main, whole = program.main, Builder()
    own_values = {v for e in main.eqns for v in e.outputs}
    results = [x for x in dict.fromkeys(main.outputs) if isinstance(x, Var) and x in own_values]
    inputs = tuple(whole.input(v.name, v.type) for v in main.inputs)
    values = dict(zip(main.inputs, inputs, strict=True))
    how = {"body": Ref(BODY), "length": 1, "consts": len(inputs), "carry": 0}
    rows = whole.append(scan, inputs, how, [Type(x.dtype, (1, *x.shape)) for x in results])
    with whole:
        for x, y in zip(results, rows if isinstance(rows, tuple) else (rows,), strict=True):
            values[x] = o.reshape(y, shape=x.shape)
    outputs = [values[x] if isinstance(x, Var) else x for x in main.outputs]
    blocks = {**program.blocks, BODY: replace(main, outputs=tuple(results)), program.entry: whole.block(outputs)}
    return check(replace(program, blocks=blocks))
