"""The learning rate of every step: a straight line up, then one of three ways down.

    w = warm-up steps,  p = (step - w) / (steps - w),  floor = min_lr · lr

    step < w     lr · (step + 1) / (w + 1)
    cosine       floor + (lr - floor) · (1 + cos πp) / 2
    linear       floor + (lr - floor) · (1 - p)
    constant     lr

From step w on this is transformers' `get_cosine_schedule_with_warmup(num_warmup_steps=w, num_training_steps=steps)`
(and its linear and min-lr forms) at the same step, without an offset.  In the warm-up theirs is `step / w`, which
spends step 0 at rate 0; ours is theirs one step later with `w + 1`, so no step is wasted.  The last step is
`steps - 1`, one short of the floor, for the same reason.
"""

from __future__ import annotations

import math

from mycel.errors import TrainError

KINDS = ("cosine", "linear", "constant")


def learning_rate(step: int, *, lr: float, kind: str, steps: int, warmup: float, min_lr: float) -> float:
    """The rate of one step, counted from 0; `warmup` in steps or as a fraction < 1 of them, `min_lr` as a fraction of
    `lr`."""
    if kind not in KINDS:
        raise TrainError(f"schedule {kind!r} is not known\n  at        schedule.kind\n  try       {', '.join(KINDS)}")
    rising = warmup_steps(warmup, steps)
    if step < rising:
        return lr * (step + 1) / (rising + 1)
    progress = min(1.0, (step - rising) / max(1, steps - rising))
    floor = min_lr * lr
    if kind == "cosine":
        return floor + (lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if kind == "linear":
        return floor + (lr - floor) * (1.0 - progress)
    return lr


def warmup_steps(warmup: float, steps: int) -> int:
    """100 => 100, and 0.05 of 300 => 15 (rounded up, as transformers does)."""
    return int(warmup) if warmup >= 1 else math.ceil(warmup * steps)
