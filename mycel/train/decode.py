"""The next token's logits, one token after another: by generated code over a static cache of keys and values.

    prompt ──▶ the model as it is, fills the cache ──▶ token ──▶ code for one token, writes one place ──▶ logits ──▶ …
    cache      places 64, 128, 256 …: when it is full, one of twice the size takes over what it holds

The code is made once for each size of the cache, so a text of n tokens needs log2(n / 64) captures at most.  A model
whose cache is none of plain keys and values (sliding windows, states of a recurrence) goes on with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mycel.api import is_static_cache, jit

LEAST = 64  # places of the first cache


class Decoder:
    """Logits of what follows; `start` with a prompt, then `after` each token."""

    def __init__(self, module: nn.Module, places: int | None) -> None:
        self.module, self.places = module, places
        self.device = next(module.parameters()).device
        self.cache: Any = None
        self.seen = 0
        self.fast = jit(lambda ids, cache: _logits(module, ids, cache)[0])

    def start(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits after a prompt."""
        self.seen = len(ids)
        given = torch.tensor([list(ids)], device=self.device)
        self.cache = self._static(self.seen + 1) if getattr(self.module, "_can_compile_fullgraph", False) else None
        logits, cache = _logits(self.module, given, self.cache)
        if self.cache is not None and not is_static_cache(self.cache):
            logits, cache = _logits(self.module, given, None)  # with the model's own
        self.cache = cache
        return logits

    def after(self, token: int) -> torch.Tensor:
        """The logits after one more token."""
        given = torch.tensor([[token]], device=self.device)
        if not is_static_cache(self.cache):
            logits, self.cache = _logits(self.module, given, self.cache)
            return logits
        if self.seen >= self.cache.layers[0].max_cache_len:
            self.cache = self._grown()
        self.seen += 1
        logits = self.fast(given, self.cache)
        return logits

    def _static(self, least: int) -> Any:
        """An empty cache with room for so many tokens."""
        from transformers import StaticCache

        places = LEAST
        while places < least:
            places *= 2
        module: Any = self.module
        return StaticCache(module.config, max_cache_len=places if self.places is None else min(places, self.places))

    def _grown(self) -> Any:
        """A larger cache that holds what the last one does."""
        larger = self._static(2 * self.seen)
        for new, old in zip(larger.layers, self.cache.layers, strict=True):
            new.lazy_initialization(old.keys, old.values)
            new.keys[:, :, : self.seen] = old.keys
            new.values[:, :, : self.seen] = old.values
            new.cumulative_length.copy_(old.cumulative_length)
        return larger


def _logits(module: nn.Module, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """Of the last token, and the cache."""
    out = module(input_ids=ids, past_key_values=cache, use_cache=True)
    return out.logits[0, -1], getattr(out, "past_key_values", None)
