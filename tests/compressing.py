"""A step whose messages are compressed: its serial program beside that of simulated ranks, on the same values."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from distributing import start_values
from torch import nn

import mycel
from mycel.ir import Mesh, Program, type_of
from mycel.ops.codec_kernels import EIGHT_BITS, EIGHT_BITS_SCALE
from mycel.plan import CPU, Plan
from mycel.planning import Task, planned
from mycel.run import interpret, simulate, simulate_stages
from mycel.run.simulate import put_together, spread_out


class Small(nn.Module):
    """Matrices that divide and such that do not, and what is not compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 67), nn.Linear(67, 40, bias=False)
        self.head = nn.Linear(40, 5)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.down(torch.relu(self.up(x)))), y)


COMPRESSED = {"up.weight", "down.weight"}


class Compressed:
    """A step under a plan: its serial program beside the ranks', on the same values."""

    def __init__(self, written: dict[str, Any], optimizer: Any = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = Small()
        self.batch = {"x": torch.randn(24, 40), "y": torch.randint(0, 5, (24,))}
        optimizer = (optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=1.0)))(self.model)
        patterns = dict.fromkeys(COMPRESSED, written.pop("codec"))
        self.plan = Plan.read({"batch": ["dp"], **written, "compress": {"dp": patterns}})
        step = mycel.train_step(self.model, optimizer, plan=self.plan, compile=False, **settings)
        self.unsharded = step.unsharded(**self.batch)
        task = step._task(self.unsharded)
        task = Task(task.program, task.body, CPU, False, task.inputs, task.gathered)
        self.lowered = planned(task, self.plan)[1]
        self.program = self.unsharded.program
        self.names = [*(str(self.program.role(v)) for v in self.program.inputs)]

    def values(self, poison: bool = False) -> dict[str, torch.Tensor]:
        values = dict(zip(self.names, start_values(self, poison=poison), strict=True))
        return values | {n: values[n] * 0 for n in values if n.startswith("hyper") and not n.startswith("hyper lr")}

    def serial(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.named(interpret(self.program, list(values.values())))

    def named(self, outs: list[Any], program: Program | None = None) -> dict[str, Any]:
        """Results and updates by what they are."""
        program = program or self.program
        n = len(outs) - len(program.updates)
        roles = {v.name: str(program.role(v)) for v in program.inputs}
        return {"loss": outs[0], "norm": outs[1]} | {
            roles[u]: x for u, x in zip(program.updates, outs[n:], strict=True)
        }

    @property
    def programs(self) -> tuple[Program, ...]:
        """What ranks run, stage by stage."""
        return (self.lowered.program,) if self.lowered.pipeline is None else self.lowered.pipeline.programs

    @property
    def mesh(self) -> Mesh:
        """Of the ranks of a stage, where there are several."""
        return self.plan.inside.mesh

    def ranks(self, values: dict[str, torch.Tensor] | dict[str, list[torch.Tensor]]) -> dict[str, list[torch.Tensor]]:
        """On all ranks; values are whole, or lists of the ranks' own."""
        spread = self.lowered.spread
        given = [
            x if isinstance(x, list) else spread_out(x, layout, self.mesh)
            for x, layout in zip(values.values(), spread.inputs, strict=True)
        ]
        if self.lowered.pipeline is None:
            return self.named(simulate(self.lowered.program, self.mesh, given))
        by_name, results = dict(zip(self.names, given, strict=True)), {}
        programs = self.programs
        inputs = [[by_name[str(p.role(v))] for v in p.inputs] for p in programs]
        for program, outs in zip(programs, simulate_stages(programs, self.mesh, "pp", inputs), strict=True):
            results |= self.named(outs, program)
        return results

    def whole(self, name: str, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        layouts = dict(zip(self.names, self.lowered.spread.inputs, strict=True))
        layout = layouts.get(name)
        if like.dtype == EIGHT_BITS:  # torch does not add these up
            parts, like = [numbers(x) for x in parts], numbers(like)
        return parts[0] if layout is None else put_together(parts, layout, type_of(like), self.mesh)

    @property
    def captured(self):  # what `start_values` asks for
        return self.unsharded.captured


def numbers(x: torch.Tensor) -> torch.Tensor:
    """What an error in 8 bits stands for."""
    return x.float() / EIGHT_BITS_SCALE if x.dtype == EIGHT_BITS else x


MESHES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 3}},
    "dp and tp": {"mesh": {"dp": 2, "tp": 2}, "parameters": {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}},
    "zero 1": {"mesh": {"dp": 2}, "zero": "1 over dp"},
    "zero 3": {"mesh": {"dp": 4}, "zero": "3 over dp"},
    "two levels": {"mesh": {"dp": 2, "near": 2}, "batch": ["dp.near"]},
    "microbatches": {"mesh": {"dp": 2}, "zero": "2 over dp", "microbatches": 2},
    "stages": {"mesh": {"dp": 2}, "zero": "1 over dp", "microbatches": 2, "stages": ["up", "down"]},
}


class Wire:
    """Of two ranks, the first: what the second sent is what was written down, changed or not."""

    def __init__(self, theirs: torch.Tensor, place: int = 0) -> None:
        self.theirs, self.place = theirs, place

    def index(self, axes) -> int:
        return self.place

    def exchange_chunks(self, sums, axes):
        return torch.tensor([[zlib.crc32(row.numpy())] for row in self.theirs])

    gather_chunks = exchange_chunks
