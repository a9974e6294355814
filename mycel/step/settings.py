"""What the caller of `train_step` chose, checked: how a step computes, and the plan as it is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.buckets import Buckets
from mycel.errors import PlanError, TrainError
from mycel.ir import Mesh
from mycel.plan import Plan
from mycel.sizes import parse_bytes

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """How a step computes, whatever its plan is."""

    precision: str
    accumulate: int
    clip_norm: float | None
    budget: int | None
    compile: str | bool
    clip_value: float | None = None
    grads: bool = False
    outputs: bool | str = False  # "local": of rows of the batch, this rank's
    strict: bool = False
    expert_load: bool = False
    buckets: Buckets | None = None  # sizes that batches are padded to

    def __post_init__(self) -> None:
        given: Any = self.precision
        if not isinstance(given, str) or given not in PRECISIONS:
            near = next((name for name, dtype in PRECISIONS.items() if dtype is not None and dtype is given), "bf16")
            known = ", ".join(PRECISIONS)
            raise TrainError(f"precision={given!r}\n  known     {known}\n  try       precision={near!r}")
        if not isinstance(self.accumulate, int) or isinstance(self.accumulate, bool) or self.accumulate < 1:
            raise TrainError(f"accumulate={self.accumulate!r}\n  try       a whole number, at least 1")
        for name, most in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if most is not None and not (isinstance(most, (int, float)) and most > 0):
                raise TrainError(f"{name}={most!r}\n  try       a positive number, or None")
        if self.clip_norm is not None and self.clip_value is not None:
            raise TrainError("clip_norm and clip_value are both given\n  try       one of them")
        if self.compile not in (True, False, "auto"):
            raise TrainError(f"compile={self.compile!r}\n  known     True, False, 'auto'\n  try       compile='auto'")
        if self.outputs not in (True, False, "local"):
            raise TrainError(f"outputs={self.outputs!r}\n  known     True, False, 'local'\n  try       outputs=True")
        if self.expert_load and self.outputs == "local":
            raise TrainError("expert_load with outputs='local'\n  try       outputs=True, or step.expert_load(**batch)")
        if self.buckets is not None and self.outputs:
            raise TrainError("pad: outputs would be those of the padded batch\n  try       outputs=False, or no pad")

    def under(self, written: Plan | None) -> Settings:
        """The same with the microbatches of a plan; PlanError where it cannot give the outputs that are asked for."""
        if written is None:
            return self
        if self.outputs == "local" and (written.is_pipeline or written.place):
            raise PlanError("outputs='local': a pipeline gives its outputs whole\n  try       outputs=True")
        return replace(self, accumulate=written.microbatches) if self.accumulate == 1 else self

    @property
    def half(self) -> torch.dtype | None:
        """The 16 bits of the computation; None: as the model is written."""
        return PRECISIONS[self.precision]

    def compiles(self, device: torch.device) -> bool:
        return self.compile is True or (self.compile == "auto" and device.type == "cuda")


def budget_of(memory: str | int | None) -> int | None:
    """The peak to stay below, in bytes."""
    try:
        budget = parse_bytes(memory) if isinstance(memory, str) else memory
    except TrainError as e:
        raise TrainError(f"memory: {e}") from None
    if budget is not None and not (isinstance(budget, int) and not isinstance(budget, bool) and budget > 0):
        raise TrainError(f"memory={memory!r}\n  try       bytes as a whole number, or text like '20GiB'")
    return budget


def written_plan(mesh: Any, given: Any) -> Plan | None:
    """The plan for several ranks; None for one device.  With a mesh alone the batch is split over `dp`, or the first
    axis."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh={mesh!r} is no mesh\n  try       mycel.Mesh(dp=2, tp=4)")
    if given is not None and not is_auto(given):
        return Plan.read(given, mesh)
    if mesh is None or not mesh.axes:
        return None
    return Plan(mesh, batch=["dp" if "dp" in mesh else mesh.axes[0]])


def is_auto(given: Any) -> bool:
    return isinstance(given, str) and given == "auto"
