"""Lion: the sign of a blend of momentum and gradient.

torch has none.  Any optimiser class of that name is taken, such as lion-pytorch's, with lr, betas and weight_decay; its
further options must be off.
"""

from __future__ import annotations

from mycel.ops.optimisers.paragraph import StateSlot, blend, decayed, optimiser, times
from mycel.ops.rules import o


@optimiser(
    classes={"Lion": {"maximize": False}},
    foreign=True,
    slots=[StateSlot("exp_avg")],
    hyper={"lr": "lr", "beta1": "betas.0", "beta2": "betas.1", "weight_decay": "weight_decay"},
    flags={"maximize": "maximize"},
    off={"cautious_factor": 1.0, "decoupled_wd": False},
    examples=[
        "f[4,6], f[4,6], f[4,6], f64[]>0, f64[]~0.9, f64[]~0.9, f64[]~0.1, None, f32[]~0, count=1",
        (
            "f64[4], f64[3], f64[4], f64[3], f64[4], f64[3], f64[]>0, f64[]~0.9, f64[]~0.9, f64[]>0, f32[]>0, f32[]~0, "
            "count=2, maximize=True"
        ),
    ],
)
def lion(p, g, *, exp_avg, lr, beta1, beta2, weight_decay):
    """p' = p (1 - lr decay) - lr sign(b1 m + (1-b1) g);  m' = b2 m + (1-b2) g"""
    move = o.sign(blend(g, exp_avg, beta1))
    return o.sub(decayed(p, lr, weight_decay), times(move, lr)), {"exp_avg": blend(g, exp_avg, beta2)}
