"""The next token's logits, one token after another: by generated code over a static cache of keys and values.

    prompt ──▶ the model as it is, fills the cache ──▶ token ──▶ code for one token, writes one place ──▶ logits ──▶ …
    cache      places 64, 128, 256 …: when it is full, one of twice the size takes over what it holds; each is kept for
               the next prompt, so that on a GPU the code is a CUDA graph that finds it where it was (`run/replay.py`)
    guesses    tokens that may follow (`guess.py`) go along with a token, each at its place; as long as the text turns
               out that way, its logits are there already, and what was written behind it is written over

A token costs one reading of all weights, however many go along.  The code is made once for each size of the cache, with
and without guesses, so a text of n tokens needs 2 log2(n / 64) captures at most.  A model whose cache is none of plain
keys and values (sliding windows, states of a recurrence) goes on with its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from mycel.api import is_static_cache, jit
from mycel.run import wide_calls
from mycel.train.guess import Guesses

LEAST = 64  # places of the first cache


class Decoder:
    """Logits of what follows; `start` with a prompt, then `after` each token."""

    def __init__(self, module: nn.Module, places: int | None, guess: bool = True) -> None:
        self.module, self.places, self.guess = module, places, guess
        self.device = next(module.parameters()).device
        self.cache: Any = None
        self.caches: dict[int, Any] = {}  # by their places
        self.guesses = Guesses(())
        self.ahead: list[int] = []  # tokens guessed for the places that follow …
        self.rows: torch.Tensor | None = None  # … and the logits behind the last token and each of these
        self.right = 0  # of the tokens guessed
        self.calls = 0  # of the model
        self.fast = jit(lambda ids, cache: _logits(module, ids, cache)[0])
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in signature(module.forward).parameters else {}

    def start(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits after a prompt."""
        self.guesses, self.rows, self.ahead, self.calls = Guesses(ids), None, [], 1
        given = torch.tensor([list(ids)], device=self.device)
        self.cache = self._static(len(ids) + 1) if getattr(self.module, "_can_compile_fullgraph", False) else None
        logits, cache = self._as_it_is(given, self.cache, **self._only_last)
        if self.cache is not None and not is_static_cache(self.cache):
            logits, cache = self._as_it_is(given, None, **self._only_last)  # with the model's own
        self.cache = cache
        return logits[-1]

    def after(self, token: int) -> torch.Tensor:
        """The logits after one more token."""
        seen = len(self.guesses.text)
        self.guesses.add(token)
        if not is_static_cache(self.cache):
            self.calls += 1
            logits, self.cache = self._as_it_is(torch.tensor([[token]], device=self.device), self.cache)
            return logits[-1]
        if self.rows is not None and self.right < len(self.ahead) and self.ahead[self.right] == token:
            self.right += 1
            return self.rows[self.right]
        if self.ahead:
            self.guesses.judge(self.right)
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(seen)  # what was guessed wrong is written over
        return self._computed(token, seen)

    def _as_it_is(self, ids: torch.Tensor, cache: Any, **more: Any) -> tuple[torch.Tensor, Any]:
        with wide_calls(self.module, ids.shape[1]):
            return _logits(self.module, ids, cache, **more)

    def _computed(self, token: int, seen: int) -> torch.Tensor:
        """The logits after a token at place `seen`, and after what may follow it."""
        ahead = self.guesses.next() if self.guess else []
        if ahead and self.places is not None and seen + 1 + len(ahead) > self.places:
            ahead = []
        if seen + 1 + len(ahead) > self.cache.layers[0].max_cache_len:
            self.cache = self._grown(seen)
        self.ahead, self.right = ahead, 0
        self.calls += 1
        self.rows = self.fast(torch.tensor([[token, *ahead]], device=self.device), self.cache)
        return self.rows[0]

    def _static(self, least: int) -> Any:
        """An empty cache with room for so many tokens."""
        from transformers import StaticCache

        places = LEAST
        while places < least:
            places *= 2
        places = places if self.places is None else min(places, self.places)
        cache = self.caches.get(places)
        if cache is None or not is_static_cache(cache):
            module: Any = self.module
            cache = self.caches[places] = StaticCache(module.config, max_cache_len=places)
        else:
            cache.reset()
        return cache

    def _grown(self, seen: int) -> Any:
        """A larger cache that holds what the last one does, of `seen` tokens."""
        larger = self._static(2 * self.cache.layers[0].max_cache_len)
        for new, old in zip(larger.layers, self.cache.layers, strict=True):
            if not new.is_initialized:
                new.lazy_initialization(old.keys, old.values)
            new.keys[:, :, :seen] = old.keys[:, :, :seen]
            new.values[:, :, :seen] = old.values[:, :, :seen]
            new.cumulative_length.fill_(seen)
        return larger


def _logits(module: nn.Module, ids: torch.Tensor, cache: Any, **more: Any) -> tuple[torch.Tensor, Any]:
    """After each of the tokens, and the cache."""
    out = module(input_ids=ids, past_key_values=cache, use_cache=True, **more)
    return out.logits[0], getattr(out, "past_key_values", None)
