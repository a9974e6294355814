"""Rprop: a step size for each element, larger while its gradient keeps its sign."""

from __future__ import annotations

from mycel.ops.optimisers.paragraph import StateSlot, optimiser, times
from mycel.ops.rules import o


@optimiser(
    classes={"Rprop": {"maximize": False}},
    slots=[StateSlot("prev"), StateSlot("step_size", initial="lr"), StateSlot("step", scalar=True)],
    hyper={"etaminus": "etas.0", "etaplus": "etas.1", "least": "step_sizes.0", "most": "step_sizes.1"},
    flags={"maximize": "maximize"},
    examples=[
        "f[4,6], f[4,6], f[4,6]>0, f32[]>0, f[4,6], f64[]~0.5, f64[]~1.2, f64[]~0.01, f64[]~2, None, f32[]~0, count=1",
        "f64[4], f64[3], f64[4], f64[3], f64[4]>0, f64[3]>0, f32[]>0, f32[]>0, f64[4], f64[3], f64[]~0.5, f64[]~1.2, "
        "f64[]~0.01, f64[]~2, f32[]>0, f32[]~0, count=2, maximize=True",
    ],
)
def rprop(p, g, *, prev, step_size, step, etaminus, etaplus, least, most):
    """s' = s eta+ where g has the sign of the one before, s eta- where it has turned, between bounds; p' = p - sign(g)
    s', and what has turned stays"""
    kept = o.mul(g, prev)
    turned = o.lt(kept, 0.0)
    low, high = (o.cast(x, dtype=p.dtype) for x in (least, most))
    grown = o.where(turned, times(step_size, etaminus), o.where(o.gt(kept, 0.0), times(step_size, etaplus), step_size))
    size = o.minimum(o.maximum(grown, low), high)
    g = o.where(turned, 0.0, g)
    return o.sub(p, o.mul(o.sign(g), size)), {"prev": g, "step_size": size, "step": o.add(step, 1)}
