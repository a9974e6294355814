"""torch functions kept whole, as opaque equations of torch's own composite: taken apart they would check or read
values.

`linalg.inv` checks the result of its solver and raises on a singular matrix; `ctc_loss` makes tables as long as the
longest target.
"""

from __future__ import annotations

import functools

import torch

from mycel.ops.capture_rules import captures
from mycel.ops.opaque import encode
from mycel.ops.rules import o

WHOLE = {
    "linalg_inv.default": (torch.linalg.inv, torch.inverse, torch.Tensor.inverse),
    "linalg_solve.default": (torch.linalg.solve,),
    "linalg_cholesky.default": (torch.linalg.cholesky,),
    "linalg_matrix_power.default": (torch.linalg.matrix_power, torch.matrix_power, torch.Tensor.matrix_power),
    "linalg_tensorinv.default": (torch.linalg.tensorinv,),
    "linalg_tensorsolve.default": (torch.linalg.tensorsolve,),
}


def kept_whole(target, *args, out=None, **kwargs):
    """torch's own function as one equation."""
    if out is not None:
        return NotImplemented
    inputs = []
    coded = tuple(encode(a, inputs) for a in args)
    named = tuple((k, encode(v, inputs)) for k, v in kwargs.items())
    return o.opaque(*inputs, target=f"aten.{target}", args=coded, kwargs=named)


for _target, _functions in WHOLE.items():
    captures(*_functions)(functools.partial(kept_whole, _target))


@captures(torch.ctc_loss)
def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, reduction=0, zero_infinity=False):
    """Lengths as lists, or all as tensors."""
    known = not hasattr(input_lengths, "dtype") and not hasattr(target_lengths, "dtype")
    overload = "ctc_loss.IntList" if known else "ctc_loss.Tensor"
    return kept_whole(overload, log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
