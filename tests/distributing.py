"""A program or a training step on simulated ranks beside the serial one.

equals_serial     a program with inputs in given layouts: all outputs equal, within 1e-10 in f64 and 1e-5 in f32
step_equals       a training step under a plan: results, new parameters, buffers and optimiser state equal those of one
                  device, from a random state
random_plan       a mesh, layouts of parameters, batch and ZeRO by chance
ControlFlow       a model whose way depends on its values
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import mycel
from mycel import lower, transform
from mycel.ir import Layout, Mesh, Program, check, type_of
from mycel.ops.codec_kernels import EIGHT_BITS, EIGHT_BITS_SCALE
from mycel.parts import ShardedModel
from mycel.plan import CPU, Hardware, Plan
from mycel.planning import Task, with_layouts
from mycel.run import interpret, simulate
from mycel.run.simulate import put_together, spread_out

SIZES = [2, 3, 4, 6, 8]


class ControlFlow(nn.Module):
    """A branch, a loop and a scan of the user's."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.w, self.v = nn.Linear(width, width), nn.Linear(width, width)
        self.rows = nn.Parameter(torch.randn(20, width))

    def forward(self, x, y):
        h = self.w(x)
        if h.sum() > 0:
            h = self.v(h)
        else:
            h = torch.tanh(h)
        while h.abs().max() > 0.5:
            h = 0.4 * torch.tanh(self.w(h))
        for row in self.rows:
            h = torch.tanh(self.v(h) + row)
        return ((h - y) ** 2).mean()


def spread(
    program: Program,
    written: Plan,
    given: Mapping[int, Layout],
    gathered: frozenset[int] = frozenset(),
    hardware: Hardware = CPU,
    compiled: bool = False,
) -> lower.Distributed:
    """A program over the ranks of a plan, its inputs given so."""
    distributed = with_layouts(Task(program, program.entry, hardware, compiled, given, gathered), written)[1]
    assert distributed is not None
    return distributed


def ready_to_run(distributed: lower.Distributed) -> Program:
    return check(lower.overlap(check(lower.hoist(transform.simplify(distributed.local, ranks=True)))))


def compared(
    program: Program,
    distributed: lower.Distributed,
    mesh: Mesh,
    values: Sequence[torch.Tensor],
    local: Program | None = None,
) -> None:
    """Serial and simulated, on the same inputs; `local` is what the ranks run, if not what was found."""
    local = local or ready_to_run(distributed)
    wanted = interpret(program, list(values))
    single = any(
        v.dtype == torch.float32 and v.type.ndim for b in program.blocks.values() for e in b.eqns for v in e.outputs
    )
    got = simulate(
        local, mesh, [spread_out(x, layout, mesh) for x, layout in zip(values, distributed.inputs, strict=True)]
    )
    assert len(got) == len(wanted)
    for want, parts, layout, x in zip(wanted, got, distributed.outputs, program.main.outputs, strict=True):
        want = want if isinstance(want, torch.Tensor) else torch.tensor(want)
        if not isinstance(parts[0], torch.Tensor):
            assert all(p == parts[0] for p in parts) and parts[0] == want, x
            continue
        whole = put_together(parts, layout, type_of(want), mesh)
        # HF's norms compute in f32
        tolerance = 1e-10 if want.dtype in (torch.float64, torch.complex128) and not single else 1e-5
        if not want.is_floating_point() and not want.is_complex():
            assert torch.equal(whole, want), x
        else:
            assert torch.allclose(whole, want, rtol=tolerance, atol=tolerance, equal_nan=True), (
                x,
                (whole - want).abs().max(),
            )


def equals_serial(
    program: Program, written: Plan, given: Mapping[int, Layout], values: Sequence[torch.Tensor]
) -> lower.Distributed:
    distributed = spread(program, written, given)
    compared(program, distributed, written.mesh, values)
    return distributed


@dataclass
class OneDevice:
    """A training step joined on one device, to be laid out by plans."""

    model: nn.Module
    batch: Mapping[str, Any]
    optimizer: torch.optim.Optimizer
    unsharded: Any

    @staticmethod
    def of(
        model: nn.Module, batch: Mapping[str, Any], optimizer: torch.optim.Optimizer | None = None, **settings: Any
    ) -> OneDevice:
        optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = mycel.train_step(model, optimizer, compile=False, **settings)
        return OneDevice(model, batch, optimizer, step.unsharded(**batch))

    def under(self, written: Plan, hardware: Hardware = CPU, compiled: bool = False) -> lower.Distributed:
        given, gathered = ShardedModel(self.model, self.optimizer, written).given(self.unsharded)
        return spread(self.unsharded.program, written, given, gathered, hardware, compiled)


def start_values(one: OneDevice, seed: int = 0, poison: bool = False) -> list[torch.Tensor]:
    """Inputs of the step's program: the batch, the model's state, optimiser state by chance; `poison`: a weight is
    infinite."""
    c, gen = one.unsharded.captured, torch.Generator().manual_seed(seed)
    values: list[torch.Tensor] = []
    last = list(c.state)[-1]
    for v in one.unsharded.program.inputs:
        role = one.unsharded.program.role(v)
        if role.kind == "batch":
            values.append(one.batch[role.name])
        elif v.name in c.state:
            values.append(c.state[v.name][0].read().detach())
            if poison and v.name == last:
                values[-1] = values[-1].clone()
                values[-1].view(-1)[-1] = torch.inf
        elif role.kind == "key":
            values.append(torch.tensor(7))
        elif role.name == "loss_scale":
            values.append(torch.tensor(16.0))
        elif v.type.ndim and v.dtype == EIGHT_BITS:
            values.append((torch.rand(v.shape, generator=gen) * 0.1 * EIGHT_BITS_SCALE).to(v.dtype))
        elif v.type.ndim and v.dtype.is_floating_point:
            values.append(torch.rand(v.shape, generator=gen, dtype=v.dtype) * 0.1)
        elif v.dtype.is_floating_point:  # a hyper-parameter or a count of steps
            values.append(torch.tensor(3.0 if role.name == "step" else 0.01, dtype=v.dtype))
        else:
            values.append(torch.zeros((), dtype=v.dtype))
    return [x.to(c.device) for x in values]


def step_equals(one: OneDevice, written: Plan, seed: int = 0, poison: bool = False) -> lower.Distributed:
    """Results, new parameters, buffers and optimiser state under a plan are those of one device."""
    distributed = one.under(written)
    compared(one.unsharded.program, distributed, written.mesh, start_values(one, seed, poison))
    return distributed


def random_plan(shapes: Mapping[str, Sequence[int]], batch_dims: int, rng: random.Random, most: int = 12) -> Plan:
    """Any mesh of one to three axes; each parameter as it falls; the batch over some axes; ZeRO or not."""
    while True:
        sizes = [rng.choice(SIZES) for _ in range(rng.randint(1, 3))]
        if torch.tensor(sizes).prod() <= most:
            break
    mesh = Mesh(dict(zip("abc", sizes, strict=False)))
    parameters = {}
    for name, shape in shapes.items():
        if shape and rng.random() < 0.6:
            dims: list[list[str]] = [[] for _ in shape]
            for axis in rng.sample(mesh.axes, rng.randint(0, len(mesh.axes))):
                dims[rng.randrange(len(shape))].append(axis)
            parameters[name] = [".".join(d) or "-" for d in dims]
    batch: list[list[str]] = [[] for _ in range(batch_dims)]
    for axis in mesh.axes:
        if rng.random() < 0.7:
            batch[rng.randrange(batch_dims) if rng.random() < 0.4 else 0].append(axis)
    zero = rng.choice([0, 0, 1, 2, 3])
    over = tuple(rng.sample(mesh.axes, rng.randint(1, len(mesh.axes)))) if zero else ()
    return Plan(mesh, parameters, [".".join(d) or "-" for d in batch], {}, zero, over)


def tensors(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in (*model.named_parameters(), *model.named_buffers())}
