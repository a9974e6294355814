"""Program -> Program, its meaning kept.  Each pass is one pure function in the file of its name."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from mycel.ir import Program, check
from mycel.transform import vjp_control  # noqa: F401  enters control flow into vjp
from mycel.transform.algebra import algebra
from mycel.transform.attend import attend
from mycel.transform.batch_dims import without_rows
from mycel.transform.by_parts import by_parts
from mycel.transform.causal import causal, masks
from mycel.transform.compressing import DRAWS, compress_gradients, count_messages, frozen_groups
from mycel.transform.coupling import coupled
from mycel.transform.cse import cse
from mycel.transform.dce import dce
from mycel.transform.delaying import delay_gradients, hold_ahead, sum_late
from mycel.transform.documents import documents
from mycel.transform.few_rows import few_rows
from mycel.transform.fold import fold
from mycel.transform.fp8 import fp8
from mycel.transform.fp8_gates import fp8_gates
from mycel.transform.fuse import fuse
from mycel.transform.head import head
from mycel.transform.in_pieces import in_pieces
from mycel.transform.inline import inline
from mycel.transform.jvp import jvp
from mycel.transform.microbatch import (
    BODY,
    Weighing,
    microbatch,
    no_counts,
    results_in_rows,
    shares,
    weighing,
    with_numbers_of,
)
from mycel.transform.monitoring import ERROR, LARGE, SHARE, SMALL, monitor_ranks, monitor_sums
from mycel.transform.narrow import narrow
from mycel.transform.once import once
from mycel.transform.ones import with_ones
from mycel.transform.optimise import ParameterGroup, optimise
from mycel.transform.outline import outline
from mycel.transform.precision import precision
from mycel.transform.recordable import recordable
from mycel.transform.rounded_weights import rounded_weights
from mycel.transform.routing import RoutedLayer, with_routing
from mycel.transform.scaling import LOSS_SCALE, scaled, with_scale
from mycel.transform.shared_updates import share_updates
from mycel.transform.small_blocks import small_blocks
from mycel.transform.unhinted import unhinted
from mycel.transform.unshared import unshared
from mycel.transform.uses import count_uses
from mycel.transform.vjp import forward_and_backward, value_and_grad
from mycel.transform.wide_products import halves, wide_products

Pass = Callable[[Program], Program]

# Equal blocks meet before single calls are inlined; attention is found before its masks are looked at, causal masks are
# found before folding makes small ones constants, and what is left is asked for documents.
SIMPLIFY: list[Pass] = [dce, cse, inline, algebra, attend, causal, documents, narrow, fold, algebra, cse, dce]


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
    "RoutedLayer",
    "Weighing",
    "algebra",
    "attend",
    "by_parts",
    "causal",
    "compress_gradients",
    "count_messages",
    "count_uses",
    "coupled",
    "cse",
    "dce",
    "delay_gradients",
    "documents",
    "few_rows",
    "fold",
    "forward_and_backward",
    "fp8",
    "fp8_gates",
    "frozen_groups",
    "fuse",
    "halves",
    "head",
    "hold_ahead",
    "in_pieces",
    "inline",
    "jvp",
    "masks",
    "microbatch",
    "monitor_ranks",
    "monitor_sums",
    "narrow",
    "no_counts",
    "once",
    "optimise",
    "outline",
    "precision",
    "recordable",
    "results_in_rows",
    "rounded_weights",
    "scaled",
    "share_updates",
    "shares",
    "simplify",
    "small_blocks",
    "sum_late",
    "unhinted",
    "unshared",
    "value_and_grad",
    "weighing",
    "wide_products",
    "with_numbers_of",
    "with_ones",
    "with_routing",
    "with_scale",
    "without_rows",
]
