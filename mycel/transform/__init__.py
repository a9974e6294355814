"""Program -> Program, its meaning kept.  Each pass is one pure function in the file of its name."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from mycel.ir import Program, check
from mycel.transform import vjp_control  # noqa: F401  enters control flow into vjp
from mycel.transform.algebra import algebra
from mycel.transform.attend import attend
from mycel.transform.by_parts import by_parts
from mycel.transform.causal import causal, masks
from mycel.transform.compressing import DRAWS, compress_gradients, frozen_groups
from mycel.transform.coupling import coupled
from mycel.transform.cse import cse
from mycel.transform.dce import dce
from mycel.transform.delaying import correct_delay, delay_gradients
from mycel.transform.few_rows import few_rows
from mycel.transform.fold import fold
from mycel.transform.fp8 import fp8
from mycel.transform.fuse import fuse
from mycel.transform.head import head
from mycel.transform.in_pieces import in_pieces
from mycel.transform.inline import inline
from mycel.transform.jvp import jvp
from mycel.transform.microbatch import (
    BODY,
    Weighing,
    joined,
    microbatch,
    no_counts,
    shares,
    weighing,
    with_numbers_of,
)
from mycel.transform.monitoring import ERROR, LARGE, SHARE, SMALL, monitor_ranks, monitor_sums
from mycel.transform.narrow import narrow
from mycel.transform.ones import with_ones
from mycel.transform.optimise import ParameterGroup, optimise
from mycel.transform.outline import outline
from mycel.transform.precision import precision
from mycel.transform.scaling import LOSS_SCALE, scaled, with_scale
from mycel.transform.telling import tell_differences
from mycel.transform.unhinted import unhinted
from mycel.transform.unshared import unshared
from mycel.transform.vjp import forward_and_backward, value_and_grad

Pass = Callable[[Program], Program]

# Equal blocks meet before single calls are inlined; attention is found before its masks are looked at, and causal masks
# are found before folding makes small ones constants.
SIMPLIFY: list[Pass] = [dce, cse, inline, algebra, attend, causal, narrow, fold, algebra, cse, dce]


def simplify(program: Program, ranks: bool = False, keep: Collection[str] = ()) -> Program:
    """The passes of SIMPLIFY in order, each checked; layouts the user asks for and operators made to be shared are kept
    only where it is for ranks.  `keep`: blocks that are called as they are.  What is computed here is on the host,
    whatever device the user's code is under (`with torch.device("meta"):`)."""
    with torch._C.DisableTorchFunction():
        for change in SIMPLIFY if ranks else (unhinted, unshared, *SIMPLIFY):
            program = check(inline(program, keep=keep) if change is inline else change(program))
    return program


__all__ = [
    "BODY",
    "DRAWS",
    "ERROR",
    "LARGE",
    "LOSS_SCALE",
    "SHARE",
    "SIMPLIFY",
    "SMALL",
    "ParameterGroup",
    "Pass",
    "Weighing",
    "algebra",
    "attend",
    "by_parts",
    "causal",
    "compress_gradients",
    "correct_delay",
    "coupled",
    "cse",
    "dce",
    "delay_gradients",
    "few_rows",
    "fold",
    "forward_and_backward",
    "fp8",
    "frozen_groups",
    "fuse",
    "head",
    "in_pieces",
    "inline",
    "joined",
    "jvp",
    "masks",
    "microbatch",
    "monitor_ranks",
    "monitor_sums",
    "narrow",
    "no_counts",
    "optimise",
    "outline",
    "precision",
    "scaled",
    "shares",
    "simplify",
    "tell_differences",
    "unhinted",
    "unshared",
    "value_and_grad",
    "weighing",
    "with_numbers_of",
    "with_ones",
    "with_scale",
]
