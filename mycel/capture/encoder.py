"""nn.TransformerEncoder outside of training: torch leaves out padding there, and gives zeros for it.

Its fast path packs the sequences that a padding mask describes, and unpacks them with zeros behind.  Captured code goes
the plain way and sets what is padding to zero where torch would: values are the same.  Whether torch takes that path
depends on whether gradients are recorded, so the call is guarded by it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from mycel.capture.trace import TRACING, Tracer

Forward = Callable[..., torch.Tensor]


def encoder_forward(plain: Forward) -> Forward:
    """What stands for torch.nn.TransformerEncoder.forward, `plain`, while code is traced."""

    def forward(
        self: torch.nn.TransformerEncoder,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        if mask is not None or src_key_padding_mask is None or not _packs(TRACING[-1], self, src):
            return plain(self, src, mask, src_key_padding_mask, is_causal)
        layers = copy.copy(self)
        vars(layers)["_modules"] = {**self._modules, "norm": None}
        vars(layers)["norm"] = None
        out = plain(layers, src, mask, src_key_padding_mask, is_causal)
        padding = src_key_padding_mask != 0
        if getattr(self, "mask_check", True):  # only where all padding is at the end
            padding = padding & (padding[:, 1:] >= padding[:, :-1]).all()
        out = out.masked_fill(padding[..., None], 0.0)
        return out if self.norm is None else self.norm(out)

    return forward


def _packs(tracer: Tracer, encoder: torch.nn.TransformerEncoder, src: torch.Tensor) -> bool:
    """Would torch take its fast path for sequences with a padding mask?"""
    first: Any = encoder.layers[0]
    if (
        not torch.backends.mha.get_fastpath_enabled()
        or not getattr(encoder, "use_nested_tensor", False)
        or first.training
        or src.dim() != 3
        or torch.is_autocast_enabled()
    ):
        return False
    params = [*first.parameters()]
    recorded = any(p.requires_grad for p in params)
    tracer.recorded.append((params, recorded and tracer.grad_mode))
    return not (recorded and tracer.grad_mode and torch.is_grad_enabled())
