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


@captures(torch.linalg.lstsq)
def _lstsq(a, b, rcond=None, *, driver=None):
    """By the pseudo-inverse, as torch's own gradient of it is.  Ranks and singular values are those of the default
    solver of CPUs; "gels" knows neither, but has residuals of what is overdetermined."""
    if driver not in (None, "gelsy", "gels") or rcond is not None or b.ndim != a.ndim:
        return NotImplemented
    x = o.matmul(kept_whole("linalg_pinv.atol_rtol_float", a), b)
    nothing = o.full(0.0, shape=(0,), dtype=a.dtype.to_real())
    if driver == "gels":
        overdetermined = a.shape[-2] > a.shape[-1]
        left = o.sum(o.square(o.abs(o.sub(o.matmul(a, x), b))), dims=(a.ndim - 2,)) if overdetermined else nothing
        none = o.full(0, shape=(0,), dtype=torch.int64)
        return torch.return_types.linalg_lstsq((x, left, none, nothing))
    rank = kept_whole("linalg_matrix_rank.atol_rtol_float", a)
    return torch.return_types.linalg_lstsq((x, nothing, rank, nothing))
