"""Gradients that several calls have added up -> one update as a program, where ranks hold parts of parameters or of
their state, or other parameters than others (stages, places): what torch cannot take.

    sums, as parameters lie ─▶ clipped by the norm over all ranks ─▶ updated, by each of what it holds with those that
    hold it too ─▶ parameters and state in parts, as by any step
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mycel import optimizers
from mycel.capture import capture as capture_call
from mycel.ir import Block, Builder, Program, Role, Var, check
from mycel.ops import o
from mycel.parts import UnshardedStep, roles_of
from mycel.step.updating import Updating


class OnSums(Updating):
    """The gradients of the program are those that were added up."""

    sums: Mapping[torch.nn.Parameter, torch.Tensor]

    def gradient(self, p: torch.nn.Parameter, name: str) -> torch.Tensor:
        self._gradients[name] = self.sums[p]
        return self.sums[p]


def given_gradients(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter]
) -> UnshardedStep:
    """The program that has no loss, and is given the gradients of these parameters."""
    captured = capture_call(lambda: sum(p.sum() for p in params), (), {}, known=roles_of(model, optimizer))
    read, roles = captured.program.inputs, captured.program.roles
    names = {id(places[0].read()): name for name, places in captured.state.items()}
    by_name = {v.name: v for v in read}
    groups = tuple(optimizers.bind_groups(optimizer, {id(p): roles[names[id(p)]].name for p in params}))
    ordered = [by_name[names[id(p)]] for group in groups for p in group.params]
    program = _returned(read, ordered, roles)
    return UnshardedStep(captured, program, groups, 1, program.entry)


def _returned(read: Sequence[Var], ordered: Sequence[Var], roles: Mapping[str, Role]) -> Program:
    """A program of parameters that returns no loss (zero), and the gradients that it is given."""
    b = Builder()
    b.reserve(v.name for v in read)
    b.inputs = [*read]
    gradients = [b.input(f"{v.name}.sum", v.type) for v in ordered]
    with b:
        loss = o.full(0.0, shape=(), dtype=torch.float32)
    of = {g.name: Role("gradient", of=roles[v.name].name) for g, v in zip(gradients, ordered, strict=True)}
    block = Block(tuple(b.inputs), tuple(b.eqns), (loss, *gradients))
    return check(Program({"main": block}, roles={**roles, **of}))
