"""How well a model predicts: loss, perplexity and accuracy of text, and multiple choice by likelihood.

loss         mean of -log p(token | those before), in nats, over tokens that carry loss
perplexity   exp(loss)
accuracy     how often the likeliest token is the right one

{"prompt": …, "choices": [a, b, …], "answer": 1}      the choice with the largest log p(choice | prompt), by itself
                                                      and for each of its bytes (lm-eval's acc and acc_norm)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from mycel.errors import TrainError
from mycel.forward import evaluating
from mycel.train.data import opened
from mycel.train.sample import causal
from mycel.train.split import NO_LOSS, cut
from mycel.train.tokenize import Tokenizer
from mycel.train.weights import refusal

LOGITS = 1 << 26  # at most so many numbers of logits at once


@dataclass(frozen=True)
class TextScore:
    """Of text, over `tokens`."""

    loss: float
    perplexity: float
    accuracy: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4f} nats per token, perplexity {self.perplexity:.4g}, accuracy {self.accuracy:.2%} of "
            f"{self.tokens:,} tokens"
        )


@dataclass(frozen=True)
class ChoiceScore:
    """Of questions with choices."""

    accuracy: float
    accuracy_by_byte: float
    questions: int

    def __str__(self) -> str:
        questions = "1 question" if self.questions == 1 else f"{self.questions:,} questions"
        return f"accuracy {self.accuracy:.2%}, for each byte {self.accuracy_by_byte:.2%}, of {questions} with choices"


@dataclass(frozen=True)
class ExampleScore:
    """Of examples with a class, or of pairs; accuracy: how often the right class or the preferred text comes first."""

    loss: float
    accuracy: float
    examples: int

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, accuracy {self.accuracy:.2%} of {self.examples:,} examples"


Score = TextScore | ChoiceScore | ExampleScore


def as_json(score: Score) -> str:
    return json.dumps(asdict(score))


def has_choices(path: Path) -> bool:
    """Is it JSONL whose first record has choices?"""
    if path.suffix.lower() not in (".jsonl", ".ndjson") or not path.is_file():
        return False
    with path.open() as file:
        first = next((line for line in file if line.strip()), "")
    try:
        record = json.loads(first)
    except ValueError:
        return False
    return isinstance(record, dict) and "choices" in record


def text_score(
    module: nn.Module,
    files: Sequence[str],
    tokenizer: Tokenizer | None,
    *,
    length: int,
    cache: Path,
    fields: Mapping[str, str] | None = None,
    say: Callable[[str, int, int], None] = lambda *_: None,
) -> TextScore:
    """The score of all text in files, cut into sequences as for training."""
    _refuse_not_causal(module)
    notes: list[str] = []
    split = cut(opened(files, "auto", fields, tokenizer, cache, say, notes), length, True, "evaluation", notes)
    config: Any = module.config
    rows = max(1, LOGITS // (length * config.get_text_config().vocab_size))
    total, hits, tokens = 0.0, 0, 0
    for at in range(0, split.count, rows):
        batch = split.batch(np.arange(at, min(at + rows, split.count)))
        logits, labels = _predicted(module, batch)
        loud = labels != NO_LOSS
        total += float(F.cross_entropy(logits[loud].double(), labels[loud], reduction="sum"))
        hits += int((logits.argmax(-1) == labels)[loud].sum())
        tokens += int(loud.sum())
        say("scoring", at, split.count)
    if not tokens:
        raise TrainError(f"the data has no token to predict\n  at        {files[0]}\n  try       more text")
    loss = total / tokens
    return TextScore(loss, math.exp(min(loss, 700.0)), hits / tokens, tokens)


def _predicted(module: nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the token that each of them predicts."""
    device = next(module.parameters()).device
    given = {name: torch.from_numpy(x).to(device) for name, x in batch.items() if name != "labels"}
    with evaluating(module), torch.no_grad():
        logits = module(**given, use_cache=False).logits[:, :-1]
    return logits, torch.from_numpy(batch["labels"]).to(device)[:, 1:]


def example_score(module: nn.Module, given: Any, rows: int = 32) -> ExampleScore:
    """The score of a classifier on examples with a class, or of a reward model on pairs."""
    device, model = next(module.parameters()).device, cast(Any, module)
    total, hits = 0.0, 0
    for at in range(0, given.count, rows):
        chosen = given.batch(np.arange(at, min(at + rows, given.count)))
        batch = {name: torch.from_numpy(x).to(device) for name, x in chosen.items()}
        labels = batch.pop("labels")
        with evaluating(module), torch.no_grad():
            if batch.get("input_ids", labels).ndim == 3:  # pairs
                width, count = labels.shape[-1], len(labels)
                flat = {name: x.reshape(-1, width) for name, x in batch.items()}
                scores = model(**flat).logits.reshape(count, 2, -1)[..., 0].double()
                labels = torch.zeros(count, dtype=torch.int64, device=device)
            else:
                scores = model(**batch).logits.double()
        total += float(F.cross_entropy(scores, labels, reduction="sum"))
        hits += int((scores.argmax(-1) == labels).sum())
    return ExampleScore(total / given.count, hits / given.count, given.count)


def choice_score(
    module: nn.Module,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    say: Callable[[str, int, int], None] = lambda *_: None,
) -> ChoiceScore:
    """How often the likeliest choice is the answer."""
    _refuse_not_causal(module)
    hits = by_byte = questions = 0
    for prompt, choices, answer in (record for file in files for record in _questions(file)):
        sums = log_likelihoods(module, tokenizer, prompt, choices)
        sizes = [max(1, len(choice.encode())) for choice in choices]
        hits += max(range(len(choices)), key=lambda i: sums[i]) == answer
        by_byte += max(range(len(choices)), key=lambda i: sums[i] / sizes[i]) == answer
        questions += 1
        say("questions", questions, 0)
    if not questions:
        raise TrainError(f"there is no question\n  at        {files[0]}\n  try       one JSON object on each line")
    return ChoiceScore(hits / questions, by_byte / questions, questions)


def log_likelihoods(module: nn.Module, tokenizer: Tokenizer, prompt: str, choices: Sequence[str]) -> list[float]:
    """log p(choice | prompt) for each; a choice's tokens are those that prompt and choice have more than the prompt."""
    begin = [tokenizer.bos] if tokenizer.bos is not None and (tokenizer.adds_bos or not prompt) else []
    before = [*begin, *map(int, tokenizer.encode(prompt))]
    whole = [[*begin, *map(int, tokenizer.encode(prompt + choice))] for choice in choices]
    if not before:
        raise refusal("the prompt has no tokens", "prompt", "at least one character, or a tokenizer with a bos")
    width = max(len(ids) for ids in whole)
    labels = np.full((len(whole), width), NO_LOSS, np.int64)
    ids = np.zeros((len(whole), width), np.int64)
    for row, tokens in enumerate(whole):
        ids[row, : len(tokens)] = tokens
        labels[row, len(before) : len(tokens)] = tokens[len(before) :]
    logits, following = _predicted(module, {"input_ids": ids, "labels": labels})
    loud = following != NO_LOSS
    chosen = torch.log_softmax(logits.double(), -1).gather(-1, following.clamp(min=0)[..., None])[..., 0]
    return [float(x) for x in (chosen * loud).sum(-1)]


def _questions(file: Path) -> Iterator[tuple[str, list[str], int]]:
    with file.open() as lines:
        for at, line in enumerate(lines, 1):
            if line.strip():
                yield _question(line, f"{file}:{at}")


def _question(line: str, where: str) -> tuple[str, list[str], int]:
    try:
        record = json.loads(line)
        prompt, choices, answer = record["prompt"], record["choices"], record["answer"]
    except (ValueError, KeyError, TypeError) as error:
        hint = '{"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}'
        what = f"no {error}" if isinstance(error, KeyError) else "not a JSON object"
        raise TrainError(f"not a question with choices: {what}\n  at        {where}\n  try       {hint}") from None
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise TrainError(
            f"the answer is {answer!r}, and there are {len(choices)} choices\n  at        {where}\n"
            "  try       the number of a choice, from 0, or its text"
        )
    return str(prompt), [str(choice) for choice in choices], answer


def _refuse_not_causal(module: nn.Module) -> None:
    if not causal(module):
        raise TrainError(
            f"{type(module).__name__} is not a causal language model: it predicts no next token\n"
            "  at        the model\n  try       a model such as LlamaForCausalLM"
        )
