"""A call with its parameters in 8 bits: nearly what the function computes, at a quarter of the bytes.

    fast  = jit(fn)               y  = linear_few_rows(x, w)
    draft = RoundedCall(fast)     y' = linear_rounded(x, *rounded(w))

The code is another for each signature, made from what `fast` has captured for it; rounded parameters are shared by all.
Outside of torch's autograd alone.
"""

from __future__ import annotations

from typing import Any

import torch

from mycel import transform
from mycel.api import CompiledCall, Jit, one_block, unrecorded_run
from mycel.capture import bind
from mycel.ir import check
from mycel.ops.few_rows import rounded


class RoundedCall(Jit):
    """What a jitted function is, of rounded parameters; they are rounded again where they changed."""

    def __init__(self, fast: Jit) -> None:
        super().__init__(fast.fn, fast.mode)
        self.fast = fast
        self._rounded: dict[str, tuple[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]] = {}  # by input, of which

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledCall:
        """captured -> fuse -> round -> generate -> bind."""
        captured = self.fast.entry_for(args, kwargs).captured
        fused = one_block(check(transform.fuse(captured.program)))
        program, turned = transform.rounded_weights(check(transform.few_rows(fused)))
        code = unrecorded_run(check(program), captured.device)
        weights = [(at, name, turned[name]) for at, name in zip(program.positions(turned), turned, strict=True)]

        def run(*inputs: Any) -> Any:
            more = [x for at, name, by_columns in weights for x in self._of(name, inputs[at], by_columns)]
            return code(*inputs, *more)

        return CompiledCall(captured, program, "", *bind(captured, run))

    def _of(self, name: str, w: torch.Tensor, by_columns: bool) -> tuple[torch.Tensor, torch.Tensor]:
        now = w.data_ptr(), 0 if w.is_inference() else w._version
        before = self._rounded.get(name)
        if before is None or before[0] != now:
            self._rounded[name] = before = now, rounded(w.T if by_columns else w)
        return before[1]
