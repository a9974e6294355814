"""A training step whose sub-models are on simulated ranks of their own beside the serial one.

placed_equals   results on every place, and new parameters, buffers and optimiser state on those that hold them, equal
                those of one device; places_equal: the same of programs that are there already
Towers          two encoders whose outputs meet in a loss
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from distributing import OneDevice, start_values
from torch import nn

import mycel
from mycel.ir import Layout, Program
from mycel.lower import Lowered
from mycel.parts import ShardedModel
from mycel.plan import CPU, Hardware, Plan
from mycel.planning import Task, planned
from mycel.run import interpret, simulate_places
from mycel.run.simulate import put_together, spread_out


class Tower(nn.Module):
    def __init__(self, width: int, out: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return self.out(x)


class Towers(nn.Module):
    """Pictures and words, and how well they fit; `tied`: words share a weight with the head of the pictures."""

    def __init__(self, layers: int = 2, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        self.vision = Tower(6, 4, layers, dropout)
        self.embed = nn.Embedding(11, 8)
        self.text = Tower(8, 4, layers, dropout)
        self.scale = nn.Parameter(torch.tensor(0.5))
        if tied:
            self.text.out.bias = self.vision.out.bias

    def forward(self, pixels: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen = nn.functional.normalize(self.vision(pixels), dim=-1)
        read = nn.functional.normalize(self.text(self.embed(ids).mean(1)), dim=-1)
        return ((seen - read) ** 2).sum() * self.scale.exp() / 7


def one_of(model: nn.Module, batch: Mapping[str, Any], written: Plan, **settings: Any) -> OneDevice:
    """The step of one device, in the form in which a plan with places takes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = mycel.train_step(model, optimizer, compile=False, plan=written, **settings)
    return OneDevice(model, batch, optimizer, step.unsharded(**batch))


def task_of(
    one: OneDevice, written: Plan, budget: int | None = None, compiled: bool = False, hardware: Hardware = CPU
) -> Task:
    def at_place(i: int, program: Program) -> Any:
        unsharded = type(one.unsharded)(
            one.unsharded.captured, program, one.unsharded.groups, one.unsharded.results, one.unsharded.body
        )
        return ShardedModel(one.model, one.optimizer, written.at_place(i)).given(unsharded)

    return Task(one.unsharded.program, one.unsharded.body, hardware, compiled, budget=budget, at_place=at_place)


def placed_equals(
    one: OneDevice, written: Plan, seed: int = 0, poison: bool = False, compiled: bool = False
) -> Lowered:
    done = planned(task_of(one, written, compiled=compiled), written)[1]
    places_equal(one, written, done, seed, poison)
    return done


def places_equal(one: OneDevice, written: Plan, done: Lowered, seed: int = 0, poison: bool = False) -> None:
    """The programs of all places, run together, give what the serial step does."""
    assert done.pipeline is not None
    n, serial = len(one.unsharded.program.results), one.unsharded.program
    wanted = interpret(serial, start_values(one, seed, poison))
    news = dict(zip(serial.updates, wanted[n:], strict=True))
    seen: set[str] = set()
    for program, results in zip(done.pipeline.programs, placed_results(one, written, done, seed, poison), strict=True):
        seen |= set(program.updates)
        wants = [*wanted[:n], *(news[name] for name in program.updates)]
        names = [*map(str, range(n)), *program.updates]
        for name, whole, want in zip(names, results, wants, strict=True):
            tolerance = 1e-10 if want.dtype == torch.float64 else 2e-5
            close = torch.allclose(whole, want, rtol=tolerance, atol=tolerance, equal_nan=True)
            assert close, (name, (whole - want).abs().max())
    assert seen == set(serial.updates)


def placed_results(
    one: OneDevice, written: Plan, done: Lowered, seed: int = 0, poison: bool = False
) -> list[list[torch.Tensor]]:
    """What each place returns, put together."""
    assert done.pipeline is not None
    programs, places = done.pipeline.programs, written.places
    assert all(Program.parse(str(p), p.consts) == p for p in programs)
    serial, values = one.unsharded.program, start_values(one, seed, poison)
    by_role = {serial.role(v): x for v, x in zip(serial.inputs, values, strict=True)}
    meshes = [p.mesh for p in places]

    def layouts_of(i: int, program: Program) -> tuple[list[Layout], list[Layout]]:
        spread = done.spreads[i]
        if spread is None:
            outs = [Layout.whole(getattr(x, "ndim", 0)) for x in program.main.outputs]
            return [Layout.whole(v.ndim) for v in program.inputs], outs
        by_name = {v.name: layout for v, layout in zip(spread.whole.inputs, spread.inputs, strict=True)}
        return [by_name[v.name] for v in program.inputs], list(spread.outputs)

    laid = [layouts_of(i, p) for i, p in enumerate(programs)]
    given = [
        [spread_out(by_role[p.role(v)], layout, mesh) for v, layout in zip(p.inputs, ins, strict=True)]
        for p, (ins, _), mesh in zip(programs, laid, meshes, strict=True)
    ]
    results = simulate_places(programs, meshes, [p.ranks for p in places], given)
    shapes = dict(zip(serial.updates, serial.main.outputs[len(serial.results) :], strict=True))
    types = [[x.type for x in (*serial.results, *(shapes[name] for name in p.updates))] for p in programs]
    return [
        [put_together(*each, mesh) for each in zip(parts, outs, of, strict=True)]
        for parts, (_, outs), of, mesh in zip(results, laid, types, meshes, strict=True)
    ]
