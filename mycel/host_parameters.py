"""Parameters of a model that live on the host while a step trains it on a device.

held       the model's own tensors, whose memory is that of the host from the first step on
shown      inside, they are as if on the device, without data: for capture
on_device  inside, they are on the device: for whoever calls the model; what they are at the end goes back
streamed   a program without a step, to which they come layer by layer, as they do in a step
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from mycel import lower, plan
from mycel.held_model import without_data
from mycel.ir import HOST, Program, Role, check
from mycel.run import HostSpace, settle_hosts

AHEAD = 2  # chunks of parameters on their way at once, where there is no plan


@dataclass
class HostParameters:
    """Those of one model; `space` is where they live, once there is something on the host."""

    space: HostSpace | None = None
    held: dict[Role, torch.Tensor] = field(default_factory=dict)

    def adopt(self, program: Program, parameters: Mapping[Role, torch.Tensor]) -> None:
        """Parameters that a program has on the host move there."""
        assert self.space is not None
        for v in program.inputs:
            role = program.role(v)
            if v.type.space == HOST and role.kind == "parameter":
                p = self.held[role] = parameters[role]
                p.data = self.space.settled(role, p.data)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        settle_hosts()  # updates on their way write into the very tensors that are shown
        homes = {role: p.data for role, p in self.held.items()}
        try:
            for p in self.held.values():
                assert self.space is not None
                p.data = without_data(p.data, p.shape, self.space.device)
            yield
        finally:
            for role, home in homes.items():
                self.held[role].data = home

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        homes = {role: p.data for role, p in self.held.items()}
        settle_hosts()
        try:
            for p in self.held.values():
                assert self.space is not None
                p.data = p.data.to(self.space.device, copy=True)
            yield
        finally:
            for role, home in homes.items():
                self.held[role].data = home.copy_(self.held[role].data)

    def streamed(self, program: Program, device: torch.device) -> Program:
        mine = [v for v in program.inputs if program.role(v) in self.held]
        if not mine:
            return program
        hardware, names = plan.hardware_of(device), {v.name for v in mine}
        starts = [start for start, _ in plan.Clock(hardware, moves=True).spans(program, program.entry)]
        visiting = plan.visits(program, program.entry, names, starts, hardware)
        copies = plan.Copies(program, program.entry, starts, hardware, visiting=visiting)
        streamed = copies.placed({"parameters": AHEAD * plan.chunk_bytes(mine)}).streamed
        return check(lower.offload(program, plan.Offloaded(program.entry, streamed=streamed)))
