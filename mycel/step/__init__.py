"""The whole training step as one program: forward, backward, clip, update.

    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=3e-4), clip_norm=1.0)
    loss = step(**batch)

train_step        here: what is asked for, checked
Step              step.py: what one may do with it
  .compile        compiler.py: capture, passes, a plan, lowering, code, in one function
    loss, gradients   gradients.py        what is captured, and the passes up to its gradients
    the update        whole_step.py       gradients -> compressed, watched, delayed, clipped, taken
    the calls         calls.py            code -> guarded calls that give each input its value
  .save, .load …  step_state.py: all that it holds, whole and in parts
  .explain        step_text.py; .trace: step_trace.py

The model's own tensors and the optimiser's own state change in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mycel import optimizers
from mycel.buckets import Buckets
from mycel.errors import TrainError
from mycel.several_optimizers import SeveralOptimizers
from mycel.step.auto_plan import Undecided
from mycel.step.settings import Settings, budget_of, is_auto, written_plan
from mycel.step.step import Step
from mycel.wrapped_optimizer import as_optimizer

__all__ = ["Step", "train_step"]


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Any,
    loss: Callable[..., Any] | None = None,
    mesh: Any = None,
    plan: Any = "auto",
    precision: str = "fp32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    memory: str | int | None = None,
    compile: str | bool = "auto",
    clip_value: float | None = None,
    grads: bool = False,
    outputs: bool | str = False,
    strict: bool = False,
    expert_load: bool = False,
    pad: Mapping[int | str, Mapping[Any, Any]] | None = None,
) -> Step:
    """A callable that takes one step on a batch and returns its loss, or with `outputs` (loss, what came beside it).

    - `mesh`: the devices, e.g. mycel.Mesh(dp=2, tp=4); None: as the plan says.  Every rank holds its parts of the
      model, and calls the step with the whole batch, of which it moves its part to its device, or `step.local(...)`
      with that part alone
    - `plan`: "auto": on a mesh, or the ranks that torchrun or `mycel train` started, the fastest plan that a search
      finds when the first batch is there; or how to spread the step: a mycel.Plan, a .yaml file, or names of ready
      plans such as "zero3+tp".  None: this device alone, or with a mesh the batch split over it
    - `loss`: None: the model returns the loss, or an object or dict with `loss`.  Otherwise `loss(output, *rest)`:
      the loss gets the last of the positional arguments, as many as it asks for (all, if it takes *args), the model
      the first ones, as many as it takes; what the loss needs is no optional argument of the model. A loss whose
      first argument is called `model` is given the model and all of the batch: `loss(model, **batch)`, which calls it
      as often as it likes
    - `precision`: "fp32": as the model is written;  "bf16", "fp16": weights and their updates stay as they are, the
      computation is in 16 bits, sums in 32; fp16 scales the loss;  "fp8": as bf16, with products of linear layers
      in 8 bits where that pays (step.explain() says which), on GPUs from H100 and Ada on; CPUs emulate it
    - `accumulate`: the batch is split into so many parts along its first dim (a smaller one into the next number
      that divides it); loss and gradient are those of the whole batch
    - `clip_norm`: gradients are scaled down to this global norm
    - `memory`: the peak to stay below, in bytes or as "20GiB": what does not fit is computed again in backward, or
      on a GPU waits on the host (plan={"offload": …})
    - `compile`: True, False, or "auto": where there is a GPU; by as many processes as there are cores, or as
      TORCHINDUCTOR_COMPILE_THREADS says (1: in this one)
    - `clip_value`: no element of a gradient is larger than this
    - `outputs`: step(batch) is (loss, outputs): what the model returned, or what the loss returned more, as in
      (loss, {"accuracy": …}); whole on every rank, or with "local" rows of the batch just as this rank has them
      (step.rows).  With accumulate, rows of the batch are put together, and of other values the sum or mean is
      taken, as the loss is
    - `grads`: after a step, p.grad is the gradient it was taken with, clipped; of a parameter in parts, this rank's
    - `strict`: what cannot be captured is refused; without it the smallest call around it stays Python, with a
      warning
    - `expert_load`: each step counts how many choices each expert of a layer gets: step.expert_load(),
      step.rebalance()
    - `pad`: sizes that vary, padded to a few: {"input_ids": {1: [512, 1024]}} by name or position of a batch tensor
      and its dim; tensors as long as it go with it.  One program for each size; that loss and gradients stay those
      of the unpadded batch is tried before the first step, and refused where they do not

    `optimizer` is any of torch's: those with a rule here (`torch.optim`, Lion) are part of the program.  Any other one,
    and one with hooks on its step or on accumulated gradients, runs as it is on the gradients of the program: slower,
    which is said once; so does an object with a step() that holds one of torch's.  Of several, in a list, each has
    parameters of its own.
    """
    written = written_plan(mesh, plan)
    if not isinstance(model, torch.nn.Module):
        raise TrainError(f"train_step takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(loss, type):
        raise TrainError(f"loss={loss.__name__} is a class, not a function\n  try       loss={loss.__name__}()")
    if loss is not None and not callable(loss):
        raise TrainError(
            f"loss={loss!r} is not a function\n"
            "  try       torch.nn.functional.cross_entropy, or None where the model returns its loss"
        )
    one: Any = as_optimizer(optimizer)
    if isinstance(optimizer, (list, tuple)):
        one = SeveralOptimizers([*map(as_optimizer, optimizer)])
    optimizers.refuse_unusable(one)
    settings = Settings(
        precision,
        accumulate,
        clip_norm,
        budget_of(memory),
        compile,
        clip_value,
        bool(grads),
        outputs,
        strict,
        bool(expert_load),
        Buckets.of(pad),
    ).under(written)
    undecided = Undecided.of(mesh) if is_auto(plan) else None
    return Step(model, one, loss, settings, None if undecided else written, undecided)
