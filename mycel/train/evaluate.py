"""The loss on validation data: always the same sequences, each at most once, the mean over all their tokens.

    loss = Σ parts (mean loss of the part · its tokens with loss) / Σ tokens with loss

In evaluation mode, without gradients, in the precision of training, a few rows at a time; no random state moves.  Where ranks hold the model in
parts, `forward` is the loss as they compute it together.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from mycel.train.order import Order
from mycel.train.sample import causal, evaluating
from mycel.train.split import NO_LOSS, Split

LOGITS = 1 << 27  # at most so many numbers of logits at once: unlike the training step, a plain forward pass holds them all
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Validation:
    """Up to `batches` times `batch` sequences of a split; a call gives their loss under the module as it is then."""

    def __init__(
        self,
        module: nn.Module,
        split: Split,
        *,
        batches: int,
        batch: int,
        seed: int,
        precision: str,
        vocab: int,
        forward: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.module, self.split, self.precision, self.forward = module, split, precision, forward
        self.device = next(module.parameters()).device
        chosen = Order(split.count, seed).indices(0, min(split.count, batches * batch))
        rows = max(1, min(batch, LOGITS // (split.length * vocab)))
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
                batch = self.split.batch(part)
                loud = int(np.count_nonzero(batch["labels"][:, self._shift :] != NO_LOSS))
                if loud:
                    given = {name: torch.from_numpy(x).to(self.device) for name, x in batch.items()}
                    loss = self.forward(**given) if self.forward else self.module(**given).loss
                    total += loss.double() * loud
                    tokens += loud
        return float(total) / tokens if tokens else math.nan

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = COMPUTE.get(self.precision) if self.forward is None else None
        return torch.autocast(self.device.type, dtype) if dtype else contextlib.nullcontext()
