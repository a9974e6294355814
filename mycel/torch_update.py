"""A step whose update torch takes: the program leaves gradients, the optimiser runs as it is.

    program ─▶ p.grad ─▶ hooks on accumulated gradients ─▶ clipping ─▶ optimizer.step(), with its hooks

For optimisers without a rule of ours (one's own, of a library, 8-bit, wrapped), and where hooks see gradients after
backward.  All of it is torch's own code, parameter by parameter, and the host waits for the program to know whether it
may go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from mycel.errors import PlanError, TrainError, warn
from mycel.optimizers import known_names, paragraph
from mycel.plan import Plan
from mycel.wrapped_optimizer import name_of


def warn_of_torch(optimizer: torch.optim.Optimizer, why: str) -> None:
    """Say once that this is slower, and why."""
    known = f"\n  known     {', '.join(known_names())}" if paragraph(optimizer) is None else ""
    warn(
        f"{name_of(optimizer)} runs as it is, on gradients that the step returns: {why}; "
        f"an update inside of the program is faster{known}",
    )


def refuse_split(optimizer: torch.optim.Optimizer, why: str, plan: Plan, split: Iterable[str]) -> None:
    """An update that is not part of the program may look at a whole parameter: PlanError where ranks hold parts."""
    name = next(iter(split), None)
    if name is None and not plan.zero:
        return
    what = f"the plan splits {name}" if name is not None else f"zero {plan.zero} splits its state"
    other = f"one of {', '.join(known_names())}" if paragraph(optimizer) is None else "an optimizer without that"
    raise PlanError(
        f"{name_of(optimizer)} runs as it is, on whole parameters, but {what}\n"
        f"  because   {why}\n"
        f"  try       a plan that splits the batch alone, such as dp, or {other}"
    )


def update(
    optimizer: torch.optim.Optimizer,
    gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor]],
    clip_norm: float | None,
    clip_value: float | None,
    norm_of: Callable[[Mapping[torch.nn.Parameter, torch.Tensor]], torch.Tensor],
) -> None:
    """One step of the optimiser on these gradients, whose norm, where others hold some, `norm_of` knows; afterwards
    parameters hold them."""
    reached = dict(gradients)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = None
    for p, g in reached.items():
        p.grad = g
        for hook in (p._post_accumulate_grad_hooks or {}).values():
            hook(p)
    held = {p: p.grad for p in reached if p.grad is not None}  # a hook may have taken it, or given another
    clip(held.values(), norm_of(held) if clip_norm is not None else None, clip_norm, clip_value)
    try:
        optimizer.step()
    except Exception as error:
        refuse_wish(optimizer, error)
        raise


def clip(
    gradients: Iterable[torch.Tensor], norm: torch.Tensor | None, clip_norm: float | None, clip_value: float | None
) -> None:
    """Gradients are scaled down from this norm to another, or cut off at a value, as torch does it."""
    for g in gradients:
        if clip_norm is not None and norm is not None:
            g.mul_((clip_norm / (norm + 1e-6)).clamp(max=1.0).to(g.device))
        if clip_value is not None:
            g.clamp_(-clip_value, clip_value)


def refuse_wish(optimizer: torch.optim.Optimizer, error: Exception) -> None:
    """TrainError where an optimiser failed for want of what a step has not: the loss again (SAM), or gradients that can
    be differentiated (AdaHessian)."""
    text = str(error)
    if "closure" in text:
        raise TrainError(
            f"{name_of(optimizer)} computes the loss several times a step: it needs a closure\n"
            "  try       mycel.value_and_grad(loss, wrt=model) in a closure of your own, or torch.optim.AdamW"
        ) from error
    if "does not require grad" in text:
        raise TrainError(
            f"{name_of(optimizer)} differentiates gradients, those of a step have no graph\n"
            "  try       mycel.jit(model) in a loop of your own, with loss.backward(create_graph=True)"
        ) from error
