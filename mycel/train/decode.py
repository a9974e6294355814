"""The next token's logits, one token after another: by generated code over a static cache of keys and values.

    prompt ──▶ the model as it is, fills the cache ──▶ token ──▶ code for one token, writes one place ──▶ logits ──▶ …
    cache      places 64, 128, 256 …: when it is full, one of twice the size takes over what it holds; each is kept for
               the next prompt, so that on a GPU the code is a CUDA graph that finds it where it was (`run/replay.py`)
    ahead      tokens that may follow go along with a token, each at its place; as long as the text turns out that way,
               its logits are there already, and what was written behind it is written over

A token costs one reading of all weights, however many go along.  Those are guessed from the text (`guess.py`), which
costs nothing; or, on a CPU, drafted by the same weights in 8 bits (`draft.py`), which cost a quarter of the reading
each, and a quarter of the memory (of weights in 32 bits).  They begin where what is left of a text is long enough to
pay for making their code, or the texts before were.  Code is made once for each size of the cache: for one token, for
several, and for a draft.  A model whose cache is none of plain keys and values (sliding windows, states of a
recurrence) goes on with its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from mycel.api import is_static_cache, jit
from mycel.ops import few_rows
from mycel.rounded_call import RoundedCall
from mycel.run import wide_calls
from mycel.train.draft import BYTES, MAKING, Pace
from mycel.train.guess import LENGTH, Guesses

LEAST = 64  # places of the first cache
LEAST_IN_C = 256  # … where attention reads no places but those that are taken
Draw = Callable[[torch.Tensor], int]


class Decoder:
    """Logits of what follows; `start` with a prompt, then `after` each token."""

    def __init__(self, module: nn.Module, places: int | None, guess: bool = True, draft: bool = True) -> None:
        self.module, self.places, self.guess = module, places, guess
        self.device = next(module.parameters()).device
        self.cache: Any = None
        self.caches: dict[int, Any] = {}  # by their places
        self.guesses = Guesses(())
        self.ahead: list[int] = []  # tokens that may follow …
        self.rows: torch.Tensor | None = None  # … and the logits behind the last token and each of these
        self.right = 0  # of them
        self.drafted = 0  # of them
        self.calls = 0  # of the model
        self.fast = jit(lambda ids, cache: _logits(module, ids, cache)[0])
        self._in_c = _is_read_in_c(module)
        large = sum(p.nbytes for p in module.parameters() if p.ndim == 2) >= BYTES
        self.draft = RoundedCall(self.fast) if draft and large and self._in_c else None
        self.pace = Pace(LENGTH)
        self._drafts_at: set[int] = set()  # places of caches for which there is code of a draft
        self._making_s = 0.0  # what it took to make code
        self._before_s = 0.0  # what readings for one token took, of the texts before …
        self._alone_s = 0.0  # … and of this one
        self._until: int | None = None  # place at which the text ends at the latest
        self._only_last = {"logits_to_keep": 1} if "logits_to_keep" in signature(module.forward).parameters else {}

    def start(self, ids: Sequence[int], tokens: int | None = None) -> torch.Tensor:
        """The logits after a prompt that so many tokens follow at most."""
        self._before_s, self._alone_s = self._before_s + self._alone_s, 0.0
        self._until = None if tokens is None else len(ids) + tokens
        self.guesses, self.rows, self.ahead, self.drafted, self.calls = Guesses(ids), None, [], 0, 1
        given = torch.tensor([list(ids)], device=self.device)
        self.cache = self._static(len(ids) + 1) if getattr(self.module, "_can_compile_fullgraph", False) else None
        logits, cache = self._as_it_is(given, self.cache, **self._only_last)
        if self.cache is not None and not is_static_cache(self.cache):
            logits, cache = self._as_it_is(given, None, **self._only_last)  # with the model's own
        self.cache = cache
        return logits[-1]

    def after(self, token: int, drawing: Callable[[], Draw] | None = None) -> torch.Tensor:
        """The logits after one more token.  `drawing` returns what will draw those that follow, without drawing them:
        by default the likeliest."""
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
            if self.drafted:
                self.pace.judge(self.drafted, min(self.right, self.drafted))
            else:
                self.guesses.judge(self.right)
            self._forget(seen)  # what was wrong is written over
        return self._computed(token, seen, drawing)

    def _as_it_is(self, ids: torch.Tensor, cache: Any, **more: Any) -> tuple[torch.Tensor, Any]:
        with wide_calls(self.module, ids.shape[1]):
            return _logits(self.module, ids, cache, **more)

    def _computed(self, token: int, seen: int, drawing: Callable[[], Draw] | None) -> torch.Tensor:
        """The logits after a token at place `seen`, and after what may follow it."""
        has_room = self.places is None or seen + 1 + LENGTH <= self.places
        ahead = self.guesses.next() if self.guess and has_room else []
        drafted = self._to_draft(seen, ahead) if has_room else 0
        most = LENGTH if ahead or drafted else 0
        if seen + 1 + most > self.cache.layers[0].max_cache_len:
            self.cache = self._grown(seen)
        if drafted:
            ahead = self._drafted(token, seen, drafted, drawing or (lambda: _likeliest))
        self.ahead, self.right, self.drafted = ahead, 0, len(ahead) if drafted else 0
        given = [token, *ahead, *[token] * (LENGTH - len(ahead) if ahead else 0)]  # of one length: one code
        self.rows = self._timed(self.fast, given, "several" if ahead else "one")
        self.calls += 1
        return self.rows[0]

    def _to_draft(self, seen: int, guess: list[int]) -> int:
        """How many tokens to draft; 0 where a guess is as good, drafts do not pay, or not yet."""
        if self.draft is None or self.pace.one_s is None:
            return 0
        if self.cache.layers[0].max_cache_len not in self._drafts_at:
            left = 0 if self._until is None else self._until - seen
            if max(self._before_s, left * self.pace.saved_s()) < MAKING * self._making_s:
                return 0
        return self.pace.ahead(self.guesses.brought if guess else None) or 0

    def _drafted(self, token: int, seen: int, count: int, drawing: Callable[[], Draw]) -> list[int]:
        """What weights in 8 bits say of the places behind a token."""
        draw, ahead = drawing(), list[int]()
        self._drafts_at.add(self.cache.layers[0].max_cache_len)
        for _ in range(count):
            logits = self._timed(self.draft, [ahead[-1] if ahead else token], "draft")[0]
            if not math.isfinite(logits.max()):
                break
            ahead.append(draw(logits))
        self._forget(seen)
        return ahead

    def _timed(self, code: Any, ids: list[int], what: str) -> torch.Tensor:
        """The logits behind each; what it took is remembered, apart where the code was made."""
        entries, start = len(code.entries), time.perf_counter()
        logits = code(torch.tensor([ids], device=self.device), self.cache)
        took = time.perf_counter() - start
        if len(code.entries) > entries:
            self._making_s = max(self._making_s, took)
            return logits
        self.pace.took(what, took)
        if what == "one":
            self._alone_s += took
        return logits

    def _forget(self, seen: int) -> None:
        """The places from `seen` on are empty."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(seen)

    def _static(self, least: int) -> Any:
        """An empty cache with room for so many tokens."""
        from transformers import StaticCache

        places = LEAST_IN_C if self._in_c else LEAST
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


def _likeliest(logits: torch.Tensor) -> int:
    return int(logits.argmax())


def _is_read_in_c(module: nn.Module) -> bool:
    """Are its weights and caches read by kernels of ours (`ops/few_rows.py`)?"""
    first = next(module.parameters())
    return first.device.type == "cpu" and first.dtype == torch.float32 and few_rows.library() is not None
