"""Text from a model, token by token as it comes: with a cache of keys and values, so that each token costs one place.

prompt ──▶ ids ──▶ one pass ──▶ next ~ softmax(logits / temperature), of the likeliest that make up `top_p` ──▶ …
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mycel.errors import TrainError
from mycel.forward import evaluating
from mycel.train import sample
from mycel.train.decode import Decoder
from mycel.train.documents import records, text_pieces
from mycel.train.sources import RECORDS, find
from mycel.train.tokenize import Tokenizer

BROKEN = "\ufffd"


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; temperature 0: always the likeliest."""

    tokens: int = 200
    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1:
            raise TrainError(
                f"cannot draw {self.tokens} tokens at temperature {self.temperature} with top-p {self.top_p}\n"
                "  try       --tokens from 1, --temperature from 0, --top-p above 0 up to 1"
            )


def prompt_ids(tokenizer: Tokenizer, prompt: str, chat: bool = False, at: str = "--prompt") -> list[int]:
    """A prompt's tokens; with `chat` as a user's message, up to where the assistant takes over."""
    if not chat:
        return _ids(tokenizer, prompt, at)
    return message_ids(tokenizer, [{"role": "user", "content": prompt}], at, "a prompt without --chat")


def message_ids(
    tokenizer: Tokenizer, messages: Sequence[Any], at: str, hint: str = '{"prompt": "…"} instead of messages'
) -> list[int]:
    """The tokens of a chat, up to where the assistant takes over; an error says where it is, and the hint."""
    try:
        return [int(i) for i in tokenizer.encode(tokenizer.ask(messages))]
    except ValueError as error:
        raise TrainError(f"messages cannot be used: {error}\n  at        {at}\n  try       {hint}") from None


def _ids(tokenizer: Tokenizer, prompt: str, at: str) -> list[int]:
    ids = [int(i) for i in tokenizer.encode(prompt)]
    if tokenizer.bos is not None and (tokenizer.adds_bos or not ids):
        ids.insert(0, tokenizer.bos)
    if not ids:
        raise TrainError(f"the prompt has no tokens\n  at        {at}\n  try       at least one character")
    return ids


def decoder_of(module: nn.Module) -> Decoder:
    """What continues text with a model, prompt after prompt; an error for a model that does not."""
    config = sample.causal_config(module, "the model", "mycel evaluate, or a model that writes text")
    return Decoder(module, getattr(config, "max_position_embeddings", None))


def stream(
    module: nn.Module, ids: Sequence[int], how: Sampling, ends: Sequence[int], decoder: Decoder | None = None
) -> Iterator[int]:
    """The ids that follow, up to an end or the last place that the model has; the same for the same seed.  A `decoder`
    that has served another prompt needs no new code."""
    decoder = decoder or decoder_of(module)
    refuse_long(ids, decoder)
    room = decoder.places
    generator = torch.Generator().manual_seed(how.seed)
    draw = lambda logits, by: sample.draw(logits, how.temperature, by, how.top_p)

    def drawing() -> Callable[[torch.Tensor], int]:
        twin = generator.clone_state()
        return lambda logits: draw(logits, twin)

    with evaluating(module), torch.no_grad():
        tokens = how.tokens if room is None else min(how.tokens, room - len(ids))
        logits = decoder.start(ids, tokens)
        for last in reversed(range(tokens)):
            following = draw(logits, generator)
            if following in ends:
                return
            yield following
            if last:
                logits = decoder.after(following, drawing)


def refuse_long(ids: Sequence[int], decoder: Decoder, at: str = "--prompt") -> None:
    """A prompt that leaves no place to write in is refused, with where it is."""
    if decoder.places is not None and len(ids) >= decoder.places:
        raise TrainError(
            f"the prompt has {len(ids)} tokens, the model {decoder.places} places\n  at        {at}\n"
            "  try       a shorter prompt"
        )


def pieces(tokenizer: Tokenizer, ids: Iterator[int]) -> Iterator[str]:
    """Text as it comes: never half a character."""
    seen: list[int] = []
    shown = ""
    for i in ids:
        seen.append(i)
        text = tokenizer.decode(seen)
        if not text.endswith(BROKEN) and text.startswith(shown):
            yield text[len(shown) :]
            shown = text
    rest = tokenizer.decode(seen) if seen else ""
    if rest != shown:
        yield rest[len(shown) :] if rest.startswith(shown) else rest


def ends_of(module: nn.Module, tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text, by the model and by its tokenizer."""
    return [*sample.ends(module), *([tokenizer.eos] if tokenizer.eos is not None else [])]


def prompts(file: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The records of a file, {"prompt": …} or {"messages": …}, each with where it is; of text each line is a prompt."""
    some = False
    for record, where in chain.from_iterable(_records(path, form) for path, form in find(file, "auto")):
        some = True
        if not {"prompt", "messages"} & record.keys():
            raise TrainError(
                f'no prompt\n  at        {where}\n  try       {{"prompt": "…"}} or {{"messages": […]}} in each record'
            )
        _refuse_form(record, where)
        yield dict(record), where
    if not some:
        raise TrainError(f"no prompt in the file\n  at        {file}\n  try       a prompt on each line")


def _records(path: Path, form: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The records of a file; of text, each line that is not blank."""
    if form == "tokens":
        raise TrainError(f"prompts are text, this file holds tokens\n  at        {path}\n  try       another file")
    if form in RECORDS:
        return records(path, form)
    text = "".join(piece.text for piece in text_pieces(path))
    lines = enumerate(io.StringIO(text, newline=None), 1)
    return (({"prompt": line.rstrip("\n")}, f"{path}:{number}") for number, line in lines if line.strip())


def _refuse_form(record: Mapping[str, Any], where: str) -> None:
    """A prompt that is no text, messages that are no list of them; which roles there are, the chat template says."""
    if "messages" not in record:
        if isinstance(record["prompt"], str):
            return
        what, hint = f"the prompt is {json.dumps(record['prompt'])}, not text", '{"prompt": "…"}'
    else:
        chat = record["messages"]
        if isinstance(chat, list) and chat and all(isinstance(x, dict) and "role" in x for x in chat):
            return
        what = "messages is no list of messages, each with a role"
        hint = '{"messages": [{"role": "user", "content": "…"}]}'
    raise TrainError(f"{what}\n  at        {where}\n  try       {hint}")
