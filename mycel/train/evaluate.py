"""The loss on validation data: always the same sequences, each at most once, the mean over all their tokens.

    loss = Σ parts (mean loss of the part · its tokens with loss) / Σ tokens with loss

In evaluation mode, without gradients, in the precision of training, a few rows at a time; no random state moves.  Where
ranks hold the model in parts, the loss is that of the `step`'s forward pass, which they compute together, each from its
own part of the sequences.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mycel.forward import evaluating
from mycel.step import Step
from mycel.train.order import Order
from mycel.train.rank_batch import outline, rank_batch
from mycel.train.sample import causal
from mycel.train.store import I64

LOGITS = (
    1 << 27
)  # at most so many numbers of logits at once: unlike the training step, a plain forward pass holds them all
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Validation:
    """Up to `batches` times `batch` sequences of a split; a call gives their loss under the module as it is then."""

    def __init__(
        self,
        module: nn.Module,
        split: Any,
        *,
        batches: int,
        batch: int,
        seed: int,
        precision: str,
        vocab: int,
        step: Step | None = None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self.module, self.split, self.precision, self.step, self.loss = module, split, precision, step, loss
        self.forward = step.forward() if step is not None else None
        self.device = next(module.parameters()).device
        chosen = Order(split.count, seed).indices(0, min(split.count, batches * batch))
        rows = max(1, min(batch, LOGITS // (split.length * max(vocab, 1))))
        self.parts = [chosen[at : at + rows] for at in range(0, len(chosen), rows)]
        self._shift = int(causal(module))  # the first token is predicted by nothing

    def __call__(self, stop: Callable[[], bool] = lambda: False) -> float | None:
        """The loss; None if it was asked to stop before the end."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        tokens = 0
        gpus = [self.device] if self.device.type == "cuda" else []
        with evaluating(self.module), torch.no_grad(), torch.random.fork_rng(devices=gpus), self._cast():
            for part in self.parts:
                if stop():
                    return None
                loud = sum(self.split.loud(int(index), self._shift) for index in part)
                if loud:
                    total += self._loss(part).double() * loud
                    tokens += loud
        return float(total) / tokens if tokens else math.nan

    def _loss(self, part: I64) -> torch.Tensor:
        """The mean loss of some sequences."""
        if self.step is None or self.forward is None:
            whole = {name: torch.from_numpy(x).to(self.device) for name, x in self.split.batch(part).items()}
            loss: torch.Tensor = self.module(**whole).loss if self.loss is None else self.loss(self.module, **whole)
            return loss
        local = self.forward.local(**outline(self.split, len(part)))
        mean: torch.Tensor = local(
            **rank_batch(self.step, self.split, len(part), lambda rows: part[rows.start : rows.stop])
        )
        return mean

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = COMPUTE.get(self.precision) if self.forward is None else None
        return torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext()
