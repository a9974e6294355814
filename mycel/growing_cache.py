"""A cache of keys and values that grows at every call, given to code for a cache that does not.

    DynamicCache, n tokens ──▶ StaticCache of 64, 128, 256 … places ──▶ code for one token, writes place n
           ▲                                                                     │
           └─────────────── keys and values: the first n + 1 places ◀────────────┘

The static cache belongs to the growing one: what that shows are views of its places, so that nothing is copied from
token to token, and each place is written once.  Where the growing cache holds anything else than what the last call
has left there (it was filled by a prompt, cut, its rows were chosen by a beam), that is copied into a fresh one first.
A text of n tokens needs log2(n / 64) captures.

Only of transformers' models that say of themselves that they take a static cache (`_can_compile_fullgraph`), where
autograd does not record, and for a few tokens at a time: a prompt runs as it is, as its length is another every time.
"""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch

LEAST = 64  # places of the first static cache
KEPT = 4  # static caches that wait for another growing one
FEW = 8  # tokens at once: of each number of them the code is another
CACHE, MASK = "past_key_values", "attention_mask"
_LOCK = threading.Lock()  # of who looks for a static cache that nobody has


@dataclass(eq=False)
class StaticTwin:
    """The static cache of a growing one, which is `owner`, and how many of its places are filled."""

    owner: weakref.ref[Any]
    cache: Any
    length: int = 0

    @property
    def places(self) -> int:
        return int(self.cache.layers[0].max_cache_len)

    def shown(self, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The first places, of each layer."""
        return [(x.keys.narrow(2, 0, length), x.values.narrow(2, 0, length)) for x in self.cache.layers]

    @property
    def is_writable(self) -> bool:
        """What is made in inference mode cannot be written to outside of it."""
        return torch.is_inference_mode_enabled() or not self.cache.layers[0].keys.is_inference()

    def holds(self, growing: Any) -> bool:
        """Does the growing cache show what the last call has left here?"""
        is_owner = self.owner() is growing
        return is_owner and all(
            _is_start(layer.keys, own.keys, self.length) and _is_start(layer.values, own.values, self.length)
            for layer, own in zip(growing.layers, self.cache.layers, strict=True)
        )

    @property
    def is_free(self) -> bool:
        """Is nobody left who could see what it holds?"""
        tensors = [x for layer in self.cache.layers for x in (layer.keys, layer.values)]
        return self.owner() is None and all(map(_is_alone, tensors))


@dataclass
class StaticTwins:
    """Of the growing caches that one function is given; those of caches that are gone serve the next ones, so that code
    on a GPU finds them where they were."""

    twins: list[StaticTwin] = field(default_factory=list)

    def of(self, growing: Any, tokens: int) -> StaticTwin:
        """What holds the same as a growing cache, with room for some tokens more."""
        length = growing.layers[0].keys.shape[2]
        for twin in self.twins:
            if twin.places >= length + tokens and twin.is_writable and twin.holds(growing):
                return twin
        with _LOCK:
            twin = self._fresh(growing, _places(length + tokens))
        for own, layer in zip(twin.cache.layers, growing.layers, strict=True):
            own.keys[:, :, :length] = layer.keys
            own.values[:, :, :length] = layer.values
            own.cumulative_length.fill_(length)
        twin.length = length
        return twin

    def _fresh(self, growing: Any, places: int) -> StaticTwin:
        """One that nobody sees, of this size and with tensors like those of the growing cache."""
        kind = _kind(growing)
        self.twins = [twin for twin in self.twins if twin.owner() is not None or twin.is_free]
        free = [twin for twin in self.twins if twin.is_free]
        for twin in free:
            if twin.places == places and twin.is_writable and _kind(twin.cache) == kind:
                twin.owner = weakref.ref(growing)
                return twin
        utils = sys.modules["transformers.cache_utils"]
        layers = [utils.StaticLayer(max_cache_len=places) for _ in growing.layers]
        for own, layer in zip(layers, growing.layers, strict=True):
            own.lazy_initialization(layer.keys, layer.values)
        twin = StaticTwin(weakref.ref(growing), utils.Cache(layers=layers))
        self.twins = [*(old for old in self.twins if old not in free[:-KEPT]), twin]
        return twin


def can_have_twin(fn: Any, cache: Any) -> bool:
    """Is it a cache of plain keys and values, given to a model that takes a static one too?"""
    utils = sys.modules["transformers.cache_utils"]
    return (
        bool(getattr(getattr(fn, "__self__", fn), "_can_compile_fullgraph", False))
        and type(cache) is utils.DynamicCache
        and not getattr(cache, "offloading", False)
        and all(type(layer) is utils.DynamicLayer for layer in cache.layers)
    )


def takes_twin(fn: Any, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """May a call with this growing cache be one with a static cache?"""
    if torch.is_grad_enabled() or not can_have_twin(fn, cache) or not cache.layers:
        return False
    named = _named(fn, args, kwargs)
    tokens, mask = _tokens(named), named.get(MASK)
    length, *others = {layer.get_seq_length() for layer in cache.layers}
    fits = mask is None or (isinstance(mask, torch.Tensor) and mask.shape[1:] == (length + tokens,))
    return named.get(CACHE) is cache and not others and length > 0 and 0 < tokens <= FEW and fits


def with_twin(call: Any, fn: Any, twins: StaticTwins, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `call` returns for a static cache in place of the growing one, which then holds the new tokens too."""
    named = _named(fn, args, kwargs)
    growing, tokens = named[CACHE], _tokens(named)
    twin = twins.of(growing, tokens)
    named[CACHE] = twin.cache
    if (mask := named.get(MASK)) is not None:
        named[MASK] = torch.nn.functional.pad(mask, (0, twin.places - mask.shape[1]))
    try:
        out = call(**named)
    except BaseException:  # it may be written to by half
        twins.twins.remove(twin)
        raise
    twin.length += tokens
    for layer, (keys, values) in zip(growing.layers, twin.shown(twin.length), strict=True):
        layer.keys, layer.values = keys, values
    return _with_growing(out, growing)


def _named(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by their names."""
    names = signature(getattr(fn, "forward", fn)).parameters if args else ()
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _tokens(named: dict[str, Any]) -> int:
    """How many tokens come in a call; 0: that is not known."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(x := named.get(name), torch.Tensor) and x.ndim > 1:
            return x.shape[1]
    return 0


def _with_growing(out: Any, growing: Any) -> Any:
    """The result, with the growing cache in place of the static one."""
    if isinstance(out, dict):
        if CACHE in out:
            out[CACHE] = growing
        return out
    cache = sys.modules["transformers.cache_utils"].Cache
    return tuple(growing if isinstance(x, cache) else x for x in out) if type(out) is tuple else out


def _places(least: int) -> int:
    """64, 128, 256 …"""
    return max(LEAST, 1 << (least - 1).bit_length())


def _is_start(x: torch.Tensor, whole: torch.Tensor, length: int) -> bool:
    """Is it the first places of a tensor, and exactly so many?"""
    return (
        x.data_ptr() == whole.data_ptr() and x.shape[2] == length and x.stride() == whole.stride()
        and x.shape[:2] == whole.shape[:2] and x.shape[3] == whole.shape[3] and x.dtype == whole.dtype
    )  # fmt: skip


def _is_alone(x: torch.Tensor) -> bool:
    """Does no other tensor see its memory?  (A storage that Python holds counts as one more.)"""
    return int(torch._C._storage_Use_Count(x.untyped_storage()._cdata)) <= 2  # type: ignore[attr-defined]


def _kind(cache: Any) -> list[Any]:
    """What two caches have in common that hold as much for each place."""
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    return [(x.dtype, x.device, x.shape[:2], x.shape[3]) for x in tensors]
