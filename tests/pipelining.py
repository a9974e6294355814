"""A training step as a pipeline of simulated ranks beside the serial one.

pipeline_equals   results on every stage, and new parameters, buffers and optimiser state on those that hold them, equal
                  those of one device; stages_equal: the same of programs that are there already
Tied              a small model whose head is its embedding
random_starts     units at which stages begin, by chance
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from distributing import OneDevice, start_values
from torch import nn

from mycel import lower, transform
from mycel.ir import Layout, Mesh, Program, check, type_of
from mycel.lower.stage_sums import plain_sums
from mycel.lower.stages import Pipeline, pipelined
from mycel.plan import Plan
from mycel.plan.schedule import PipelineSchedule
from mycel.plan.stages import StepFlow
from mycel.run import interpret, simulate_stages
from mycel.run.simulate import put_together, spread_out


class Layer(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Tied(nn.Module):
    """Embedding, layers, and a head that is the embedding."""

    def __init__(self, layers: int = 4, dropout: float = 0.0, width: int = 4, vocabulary: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width, dropout) for _ in range(layers)])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def local_program(one: OneDevice, inner: Plan | None) -> tuple[Program, lower.Distributed | None]:
    """What a rank of a stage would run if there was one stage."""
    spread = one.under(inner) if inner is not None and inner.mesh.world > 1 else None
    local = transform.simplify(spread.local if spread is not None else one.unsharded.program)
    fused = transform.fuse(local if spread is None else lower.hoist(local))
    return plain_sums(check(fused), one.unsharded.body), spread


def random_starts(local: Program, body: str, stages: int, rng: random.Random) -> list[str]:
    flow = StepFlow(local, body)
    return [flow.block.eqns[i].outputs[0].name for i in sorted(rng.sample(flow.units[1:], stages - 1))]


def pipeline_equals(
    one: OneDevice,
    schedule: PipelineSchedule,
    starts: Sequence[str] | random.Random,
    inner: Plan | None = None,
    seed: int = 0,
    poison: bool = False,
    known: tuple[Program, lower.Distributed | None] | None = None,
) -> Pipeline:
    """`known`: what a rank of a stage would run if there was one stage, where it was made before; programs are then not
    written and read back."""
    local, spread = known or local_program(one, inner)
    if isinstance(starts, random.Random):
        starts = random_starts(local, one.unsharded.body, schedule.stages, starts)
    pipeline = pipelined(local, one.unsharded.body, starts, schedule, "pp")
    programs = [check(lower.overlap(p)) for p in pipeline.programs]
    assert known is not None or all(Program.parse(str(p), p.consts) == p for p in programs)
    mesh = inner.mesh if spread is not None and inner is not None else Mesh()
    stages_equal(one, programs, spread, mesh, seed, poison)
    return pipeline


def stages_equal(
    one: OneDevice,
    programs: Sequence[Program],
    spread: lower.Distributed | None,
    mesh: Mesh,
    seed: int = 0,
    poison: bool = False,
) -> None:
    """The programs of the ranks of a pipeline, run together, give what the serial step does."""
    serial, values = one.unsharded.program, start_values(one, seed, poison)
    layouts = spread.inputs if spread is not None else [Layout.whole(v.type.ndim) for v in serial.inputs]
    given = {
        serial.role(v): spread_out(x, layout, mesh) for v, x, layout in zip(serial.inputs, values, layouts, strict=True)
    }
    by_rank = simulate_stages(programs, mesh, "pp", [[given[p.role(v)] for v in p.inputs] for p in programs])
    outs = spread.outputs if spread is not None else [None] * len(serial.main.outputs)
    wanted = list(zip(interpret(serial, values), outs, strict=True))
    n = len(serial.results)
    news = dict(zip(serial.updates, wanted[n:], strict=True))
    seen: set[str] = set()
    for program, results in zip(programs, by_rank, strict=True):
        seen |= set(program.updates)
        for name, parts, (want, layout) in zip(
            [*map(str, range(n)), *program.updates],
            results,
            [*wanted[:n], *(news[name] for name in program.updates)],
            strict=True,
        ):
            whole = put_together(parts, layout or Layout.whole(want.ndim), type_of(want), mesh)
            tolerance = 1e-10 if want.dtype == torch.float64 else 2e-5
            assert torch.allclose(whole, want, rtol=tolerance, atol=tolerance, equal_nan=True), (
                name,
                (whole - want).abs().max(),
            )
    assert seen == set(serial.updates)
