"""Text from a causal model, one token at a time, by plain sampling.

    next ~ softmax(logits(last `window` tokens)[-1] / temperature)          temperature 0: the likeliest

Each token is one forward pass over the window (the model's maximum positions), without a cache: nothing to set up or
put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mycel.forward import evaluating
from mycel.train.weights import refusal

SOME = 64  # of the likeliest tokens, which mostly are enough of them


def generate(
    module: nn.Module,
    prompt_ids: Sequence[int],
    tokens: int,
    temperature: float,
    seed: int,
    eos: int | None,
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> list[int]:
    """Up to `tokens` ids that follow the prompt, ending before `eos`; the same for the same seed, torch's own random
    state untouched.

    `forward(ids, place)`: the logits at a place in ids, as ranks that hold the model in parts compute them together;
    always of as many ids."""
    config: Any = causal_config(module)
    _check(prompt_ids, tokens, temperature, getattr(config, "vocab_size", None))
    window = getattr(config, "max_position_embeddings", None) or len(prompt_ids) + tokens
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    with evaluating(module), torch.no_grad():
        for _ in range(tokens):
            seen = ids[-window:]
            if forward is not None:  # a causal model does not see what stands behind
                room = min(window, len(prompt_ids) + tokens) - len(seen)
                logits = forward(
                    torch.tensor([seen + [0] * room], device=device), torch.tensor([len(seen) - 1], device=device)
                )
            else:
                logits = module(input_ids=torch.tensor([seen], device=device), use_cache=False).logits[0, -1]
            following = draw(logits, temperature, generator)
            if following == eos:
                break
            ids.append(following)
    return ids[len(prompt_ids) :]


def draw(logits: torch.Tensor, temperature: float, generator: torch.Generator, top_p: float = 1.0) -> int:
    """One id from the logits of the last position; of the likeliest ones that together have the chance `top_p`."""
    largest, at = logits.max(-1)  # not a number where one is not
    if not math.isfinite(largest):
        hint = "a lower learning rate, or an earlier checkpoint: training has diverged"
        raise refusal("the model's logits are not finite: nothing to sample from", "sample", hint)
    if temperature == 0:
        return int(at)
    logits = logits.double().cpu()
    # the largest logit is taken off first: a tiny temperature must not overflow
    chances = torch.softmax((logits - logits.max()) / temperature, -1)
    if top_p < 1:
        chances = _likeliest(chances, top_p)
    return int(torch.multinomial(chances, 1, generator=generator))


def _likeliest(chances: torch.Tensor, top_p: float) -> torch.Tensor:
    """The chances of the likeliest that together have `top_p`, 0 of the others; the first always stays."""
    count = min(SOME, len(chances))
    ordered, at = chances.topk(count)
    while count < len(chances) and ordered.sum() < top_p:
        count = min(8 * count, len(chances))
        ordered, at = chances.topk(count)
    stays = at[ordered.cumsum(0) - ordered < top_p]
    return torch.zeros_like(chances).index_copy_(0, stays, chances[stays])


def causal(module: nn.Module) -> bool:
    """Whether the model predicts each token from those before it: it can continue text."""
    config: Any = getattr(module, "config", None)
    can: Any = getattr(module, "can_generate", bool)
    return config is not None and can() and not config.is_encoder_decoder


def ends(module: nn.Module) -> list[int]:
    """The ids with which the model ends a text, by its configuration and by the one for generating."""
    config: Any = module.config
    given = [
        getattr(held, "eos_token_id", None)
        for held in (config.get_text_config(), getattr(module, "generation_config", None))
    ]
    return sorted({i for ids in given if ids is not None for i in (ids if isinstance(ids, list) else [ids])})


def causal_config(module: nn.Module, at: str = "sample", hint: str = "sample: null") -> Any:
    """The text configuration of a model that can continue text; an error for all others."""
    if not causal(module):
        raise refusal(f"{type(module).__name__} is not a causal language model: it continues no text", at, hint)
    config: Any = module.config
    return config.get_text_config()


def _check(prompt_ids: Sequence[int], tokens: int, temperature: float, vocab: int | None) -> None:
    """Refuses what cannot be sampled."""
    if not prompt_ids:
        raise refusal("the prompt has no tokens", "sample.prompt", "at least one character")
    if tokens < 0 or not 0 <= temperature < float("inf"):
        raise refusal(f"cannot sample {tokens} tokens at temperature {temperature}: both must be 0 or more", "sample")
    beyond = [i for i in prompt_ids if i < 0 or (vocab is not None and i >= vocab)]
    if beyond:
        what = f"the prompt has token {beyond[0]}, the model knows 0 to {(vocab or 0) - 1}"
        raise refusal(what, "sample.prompt", "the tokenizer the model was made with")
