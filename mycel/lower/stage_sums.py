"""Sums over the microbatches of a step, as the stages of a pipeline take them.

plain_sums   what is added to a sum travels, not the sum
joined_sums  what two microbatches that go through the stages together add to a sum is one
apart        the gradient of what several stages use is summed up in each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mycel.errors import PlanError
from mycel.ir import Atom, Block, Builder, Eqn, Params, Program, Var, chains, check, substitute
from mycel.ops import o
from mycel.plan.stages import CarrySum, StageMap, StepBody, StepFlow, cut, refuse_shared_state
from mycel.transform.dce import dce


def cut_at(program: Program, body: str, starts: Sequence[str]) -> StageMap:
    """The stages of a program that begin where these values are made."""
    flow = StepFlow(program, body)
    by_name = {v.name: i for v, i in flow.makers.items()}
    for name in starts:
        if by_name.get(name) not in flow.units:
            raise PlanError(
                f"the plan begins a stage at {name}, which this step does not make on its way forward\n"
                "  try       plan.given, to decide anew"
            )
    stages = cut(flow, [by_name[name] for name in starts])
    refuse_shared_state(stages)
    return stages


MOVES = (
    o.all_reduce, o.all_gather, o.reduce_scatter, o.reduce_scatter_wide, o.all_to_all, o.permute_ranks, o.own_part,
    o.spread, o.only_first,
)  # fmt: skip


def plain_sums(program: Program, name: str) -> Program:
    """Sums that travel from one layout to another in each microbatch, and back: what is added travels alone.

    s = only_first(total); t = add(s, d); total' = all_reduce(t)    =>    e = all_reduce(d); total' = add(total, e)

    Such moves are all that lowering puts between a carry and what is added to it, and they end where they began.  What
    backward adds again, forward need not."""
    program = dce(program)
    flow = StepFlow(program, name)
    block, body = flow.block, flow.body
    uses = chains(block)
    replaced: dict[int, list[Eqn]] = {}
    outputs = list(block.outputs)
    names = Builder(names_of=block)

    def only_reader(v: Var) -> int | None:
        return uses[v].uses[0] if len(uses[v].uses) == 1 and not uses[v].is_output else None

    for j, carry in enumerate(body.carried):
        new, path, at = block.outputs[j], list[int](), only_reader(carry)
        while at is not None and block.eqns[at].op in (*MOVES, o.add):
            path.append(at)
            result = block.eqns[at].outputs[0]
            if result == new:
                break
            at = only_reader(result)
        adds = [i for i in path if block.eqns[i].op is o.add]
        if j in flow.sums or len(adds) != 1 or not path or block.eqns[path[-1]].outputs[0] != new:
            continue
        behind = path[path.index(adds[0]) + 1 :]
        moved = {carry, *(v for i in path for v in block.eqns[i].outputs)}
        addend = next(x for x in block.eqns[adds[0]].inputs if x not in moved)
        builder = Builder(beside=names)
        builder.at(block.eqns[adds[0]])
        with builder:
            for i in behind:
                addend = block.eqns[i].op(addend, **block.eqns[i].params)
            outputs[j] = o.add(carry, addend)
        replaced |= {i: [] for i in path} | {adds[0]: builder.eqns}
    eqns = [e for i, old in enumerate(block.eqns) for e in replaced.get(i, [old])]
    changed = Block(block.inputs, tuple(eqns), tuple(outputs))
    return check(replace(program, blocks={**program.blocks, name: changed}))


def joined_sums(program: Program, name: str) -> Program:
    """t = add(total, a); total' = add(t, b)    =>    d = add(a, b); total' = add(total, d)"""
    block, body = program.blocks[name], StepBody.of(program, name)
    uses = chains(block)
    makers = {v: i for i, e in enumerate(block.eqns) for v in e.outputs}
    names = Builder(names_of=block)
    replaced: dict[int, list[Eqn]] = {}
    for carry, new in zip(body.carried, block.outputs, strict=False):
        second = makers.get(new) if isinstance(new, Var) else None
        last = block.eqns[second] if second is not None else None
        if second is None or last is None or last.op is not o.add or not isinstance(last.inputs[0], Var):
            continue
        first = makers.get(last.inputs[0])
        inner = block.eqns[first] if first is not None else None
        if first is None or inner is None or inner.op is not o.add or inner.inputs[0] != carry:
            continue
        if len(uses[carry].uses) != 1 or len(uses[inner.outputs[0]].uses) != 1:
            continue
        both = Var(names.name(last.outputs[0].name), last.outputs[0].type)
        added = replace(last, inputs=(inner.inputs[1], last.inputs[1]), outputs=(both,))
        replaced |= {first: [], second: [added, replace(last, inputs=(carry, both))]}
    eqns = [e for i, old in enumerate(block.eqns) for e in replaced.get(i, [old])]
    return check(replace(program, blocks={**program.blocks, name: replace(block, eqns=tuple(eqns))}))


def apart(stages: StageMap, recut: Callable[[Program], StageMap]) -> StageMap:
    """The gradient of what several stages use: each sums up its own over the microbatches, and these are added once.

    d = add(a, b); total' = add(total, d)    =>    t0' = add(t0, a); t1' = add(t1, b)      with a, b of stages 0 and 1
                                                   total = add(t0, t1) behind the scan

    `recut` cuts the program that this makes where the stages begin.
    """
    flow = stages.flow
    program, body, block = flow.program, flow.body, flow.block
    names = Builder(names_of=block)
    whole = Builder(names_of=program.main)
    replaced: dict[int, list[Eqn]] = {}
    carries: list[Var] = []
    news: list[Atom] = []
    starts: list[Atom] = []
    added: dict[Var, list[Var]] = {}  # results of the scan -> more results to add to them
    first = dict[int, Atom]()
    for summed in flow.sums.values():
        shares = _shares(stages, summed)
        if len(shares) < 2:
            continue
        carry, eqn = body.carried[summed.carry], block.eqns[summed.eqn]
        builder = Builder(beside=names)
        builder.at(eqn)
        more = []
        with builder:
            for k, share in enumerate(shares):
                total = share[0]
                for x in share[1:]:
                    total = o.add(total, x)
                if total.dtype != carry.dtype:
                    total = o.cast(total, dtype=carry.dtype)
                own = carry if k == 0 else Var(names.name(carry.name), carry.type)
                new = o.add(own, total)
                if k == 0:
                    first[summed.carry] = new
                    continue
                carries.append(own)
                news.append(new)
                starts.append(body.eqn.inputs[body.consts + summed.carry])
                more.append(Var(whole.name(body.eqn.outputs[summed.carry].name), carry.type))
        replaced[summed.eqn] = builder.eqns
        added[body.eqn.outputs[summed.carry]] = more
    if not replaced:
        return stages
    n, m = body.consts, body.carry
    outputs = [first.get(i, x) for i, x in enumerate(block.outputs)]
    eqns = [e for i, old in enumerate(block.eqns) for e in replaced.get(i, [old])]
    inputs = (*block.inputs[: n + m], *carries, *block.inputs[n + m :])
    part = Block(inputs, tuple(eqns), (*outputs[:m], *news, *outputs[m:]))
    operands = (*body.eqn.inputs[: n + m], *starts, *body.eqn.inputs[n + m :])
    params = Params({**body.eqn.params, "carry": m + len(carries)})
    totals: dict[Var, Atom] = {}
    behind = Builder(beside=whole)
    outs = list(body.eqn.outputs)
    with behind:
        for old, more in added.items():
            own = Var(whole.name(old.name), old.type)
            outs[outs.index(old)] = own
            whole_sum: Var = own
            for x in more:
                whole_sum = o.add(whole_sum, x)
            totals[old] = whole_sum
    results = tuple(v for more in added.values() for v in more)
    again = replace(body.eqn, inputs=operands, params=params, outputs=(*outs[:m], *results, *outs[m:]))
    main = program.main
    after = [behind_loop(substitute(e, totals)) for e in main.eqns[body.at + 1 :]]
    sums = [replace(e, phase="backward") for e in behind.eqns]
    entry = Block(
        main.inputs,
        (*main.eqns[: body.at], again, *sums, *after),
        tuple(totals.get(x, x) if isinstance(x, Var) else x for x in main.outputs),
    )
    return recut(check(dce(replace(program, blocks={**program.blocks, body.name: part, program.entry: entry}))))


def behind_loop(eqn: Eqn) -> Eqn:
    """An equation of the entry behind the loop over microbatches, which ends with backward steps."""
    return replace(eqn, phase="backward") if eqn.phase == "forward" else eqn


def _shares(stages: StageMap, summed: CarrySum) -> list[list[Var]]:
    """What is added to a sum, stage by stage; the last stage first, which made its own first.  A sum with which a stage
    begins stays whole: the stage may have nothing else."""
    flow, readers = stages.flow, stages.flow.readers
    by_stage: dict[int, list[Var]] = {}
    open_ = [summed.addend]
    while open_:
        x = open_.pop(0)
        at = flow.makers.get(x)
        if at is not None and at not in stages.begin and readers[x] == 1 and flow.block.eqns[at].op in (o.add, o.cast):
            eqn = flow.block.eqns[at]
            inner = list(eqn.vars)
            widens = eqn.op is o.cast and _is_sum(flow, inner, readers)
            same = eqn.op is o.add and len(inner) == 2 and all(v.shape == x.shape for v in inner)
            if widens or same:
                open_ = [*inner, *open_]
                continue
        by_stage.setdefault(stages.of.get(x, stages.stages - 1), []).append(x)
    return [by_stage[s] for s in sorted(by_stage, reverse=True)]


def _is_sum(flow: StepFlow, values: Sequence[Var], readers: Mapping[Var, int]) -> bool:
    at = flow.makers.get(values[0]) if values else None
    return at is not None and flow.block.eqns[at].op is o.add and readers[values[0]] == 1
