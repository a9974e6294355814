"""What is known of values that are not known: their bounds.

Enough to answer `torch.rand([]) < 0.0` (a layer that is never dropped) and to size `bincount` of the indices of topk.

    uniform           0 < x < 1: that it is 0 at times (one in 2^24) is left out, for a rate of 0 is to mean never
    topk, argmax …    0 <= index < n
    reshape, cast …   as their operand
    cat, stack        as all of their operands
    x % n             0 <= x % n < n, of whole numbers
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mycel.ir import Eqn, Var
from mycel.ops import o

Bounds = tuple[float, float]

_SAME = {"reshape", "permute", "expand", "slice", "select", "flip", "stop_gradient", "cast", "split", "unbind"}
_INDICES = {
    "topk": 1,
    "sort": 1,
    "max_dim": 1,
    "min_dim": 1,
    "argmax": 0,
    "argmin": 0,
}  # operator -> which output holds indices


def bounds(x: Any, producers: Mapping[Var, Eqn]) -> Bounds | None:
    """The smallest and largest that x can be; None if nothing is known."""
    if not isinstance(x, Var):
        return None if x is None or isinstance(x, complex) or math.isnan(x) else (x, x)
    eqn = producers.get(x)
    if eqn is None:
        return None
    name = eqn.op.name
    if name in _SAME:
        return bounds(eqn.inputs[0], producers)
    if eqn.op is o.remainder and isinstance(eqn.inputs[1], int) and eqn.inputs[1] > 0 and not x.dtype.is_floating_point:
        return 0, eqn.inputs[1] - 1
    if eqn.op in (o.cat, o.stack):
        known = [b for part in eqn.inputs if (b := bounds(part, producers)) is not None]
        is_all = len(known) == len(eqn.inputs)
        return (min(low for low, _ in known), max(high for _, high in known)) if is_all else None
    if name == "uniform" and x.dtype.itemsize >= 4:
        return math.ulp(0.0), math.nextafter(1.0, 0.0)
    if name in _INDICES and x is eqn.outputs[_INDICES[name]]:
        source, dim = eqn.inputs[0], eqn.params["dim"]
        return (0, source.shape[dim] - 1) if isinstance(source, Var) and source.ndim and dim is not None else None
    return None


def decide(eqn: Eqn, producers: Mapping[Var, Eqn]) -> bool | None:
    """The one answer of a comparison whose operands' bounds do not overlap; None if it depends."""
    if eqn.op not in (o.lt, o.le, o.gt, o.ge):
        return None
    a, b = (bounds(x, producers) for x in eqn.inputs)
    if a is None or b is None:
        return None
    if eqn.op in (o.gt, o.le):
        a, b = b, a  # a > b is b < a; a <= b is not (b < a)
    less = True if a[1] < b[0] else False if a[0] >= b[1] else None
    return less if less is None or eqn.op in (o.lt, o.gt) else not less
