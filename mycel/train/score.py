"""How well a model predicts: loss, perplexity and accuracy of text, and multiple choice by likelihood.

loss         mean of -log p(token | those before), in nats, over tokens that carry loss
perplexity   exp(loss)
accuracy     how often the likeliest token is the right one

{"prompt": …, "choices": [a, b, …], "answer": 1}      the choice with the largest log p(choice | prompt), by itself
                                                      and for each of its bytes (lm-eval's acc and acc_norm)
{"prompt": …, "chosen": …, "rejected": …}             margin: how much more the preferred text scores than the other
        a reward model    its reward                  loss: -log sigmoid(margin); accuracy: margin > 0
        a run of dpo      beta log p / p at its start
        a language model  log p(text | prompt)        no loss: there is nothing that it is compared with
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
from mycel.sizes import counted
from mycel.train import labelled
from mycel.train.data import opened
from mycel.train.documents import records
from mycel.train.models import learned_places
from mycel.train.sample import causal
from mycel.train.sources import RECORDS, find
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
            f"{counted(self.tokens, 'token')}"
        )


@dataclass(frozen=True)
class ChoiceScore:
    """Of questions with choices."""

    accuracy: float
    accuracy_by_byte: float
    questions: int

    def __str__(self) -> str:
        questions = counted(self.questions, "question")
        return f"accuracy {self.accuracy:.2%}, for each byte {self.accuracy_by_byte:.2%}, of {questions} with choices"


@dataclass(frozen=True)
class ExampleScore:
    """Of examples with a class; accuracy: how often the right one is the likeliest."""

    loss: float
    accuracy: float
    examples: int

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}, accuracy {self.accuracy:.2%} of {counted(self.examples, 'example')}"


@dataclass(frozen=True)
class PairScore:
    """Of pairs of texts; accuracy: how often the preferred one scores higher; margin: by how much, on average."""

    loss: float | None
    accuracy: float
    margin: float
    pairs: int
    scored_by: str  # what the margin is a difference of

    def __str__(self) -> str:
        loss = f"loss {self.loss:.4f} nats per pair, " if self.loss is not None else ""
        pairs = counted(self.pairs, "pair")
        return f"{loss}accuracy {self.accuracy:.2%} of {pairs}, margin {self.margin:.4f} ({self.scored_by})"


Score = TextScore | ChoiceScore | ExampleScore | PairScore


def as_json(score: Score) -> str:
    return json.dumps(asdict(score))


def form_of(data: Sequence[str], format: str = "auto") -> str:
    """What a language model is asked about data: `choices`, `pairs`, or `text`; by the first record of each file."""
    forms: dict[str, Path] = {}
    for path, kind in find(data, format):
        first = next((record for record, _ in records(path, kind)), {}) if kind in RECORDS else {}
        form = "choices" if "choices" in first else "pairs" if {"chosen", "rejected"} <= first.keys() else "text"
        forms.setdefault(form, path)
    if len(forms) > 1:
        files = ", ".join(f"{form} in {path}" for form, path in forms.items())
        raise TrainError(f"the data is of several kinds: {files}\n  at        --data\n  try       one kind at a time")
    return next(iter(forms))


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
    """The score of a classifier on examples with a class."""
    model, total, hits = cast(Any, module), 0.0, 0
    for batch in _batches(module, given, rows):
        labels = batch.pop("labels")
        scores = model(**batch).logits.double()
        total += float(F.cross_entropy(scores, labels, reduction="sum"))
        hits += int((scores.argmax(-1) == labels).sum())
    return ExampleScore(total / given.count, hits / given.count, given.count)


def reward_score(module: nn.Module, pairs: Any) -> PairScore:
    """The score of a reward model on pairs."""
    margins = [labelled.reward_margins(module, **batch) for batch in _batches(module, pairs, 16)]
    return _pair_score(torch.cat(margins), "reward of the preferred text less that of the other")


def preference_score(module: nn.Module, pairs: Any, start: nn.Module | None = None, beta: float = 1.0) -> PairScore:
    """The score of a language model on pairs: by likelihood, or by `beta` times what it gained since `start`."""
    vocab = cast(Any, module.config).get_text_config().vocab_size
    rows = max(1, LOGITS // (2 * pairs.length * vocab))

    def margins(of: nn.Module) -> torch.Tensor:
        likelihoods = [labelled.log_likelihoods(of, **batch) for batch in _batches(of, pairs, rows)]
        preferred, other = torch.cat(likelihoods).double().unbind(-1)
        return preferred - other

    if start is None:
        return _pair_score(margins(module), "log-likelihood of the preferred text less that of the other", loss=False)
    gained = beta * (margins(module) - margins(start))
    return _pair_score(gained, f"{beta:g} x what the preferred text gained in log-likelihood more than the other")


def _pair_score(margins: torch.Tensor, scored_by: str, loss: bool = True) -> PairScore:
    margins = margins.double()
    mean = float(-F.logsigmoid(margins).mean()) if loss else None
    accuracy = float((margins > 0).double().mean())
    return PairScore(mean, accuracy, float(margins.mean()), len(margins), scored_by)


def _batches(module: nn.Module, given: Any, rows: int) -> Iterator[dict[str, torch.Tensor]]:
    """All examples, some rows at a time, for a model that is evaluated until the next are asked for."""
    device = next(module.parameters()).device
    for at in range(0, given.count, rows):
        batch = given.batch(np.arange(at, min(at + rows, given.count)))
        with evaluating(module), torch.no_grad():
            yield {name: torch.from_numpy(x).to(device) for name, x in batch.items()}


def choice_score(
    module: nn.Module,
    files: Sequence[str],
    tokenizer: Tokenizer,
    say: Callable[[str, int, int], None] = lambda *_: None,
) -> ChoiceScore:
    """How often the likeliest choice is the answer."""
    _refuse_not_causal(module)
    hits = by_byte = questions = 0
    for prompt, choices, answer in _questions(files):
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
    width, places = max(len(ids) for ids in whole), learned_places(module)
    if places is not None and width > places:
        what = f"a prompt and its choice have {width} tokens, the model {places} places"
        raise refusal(what, "prompt", "a shorter prompt")
    labels = np.full((len(whole), width), NO_LOSS, np.int64)
    ids = np.zeros((len(whole), width), np.int64)
    for row, tokens in enumerate(whole):
        ids[row, : len(tokens)] = tokens
        labels[row, len(before) : len(tokens)] = tokens[len(before) :]
    logits, following = _predicted(module, {"input_ids": ids, "labels": labels})
    loud = following != NO_LOSS
    chosen = torch.log_softmax(logits.double(), -1).gather(-1, following.clamp(min=0)[..., None])[..., 0]
    return [float(x) for x in (chosen * loud).sum(-1)]


def _questions(files: Sequence[str]) -> Iterator[tuple[str, list[str], int]]:
    for path, kind in find(files, "auto"):
        yield from (_question(record, where) for record, where in records(path, kind))


def _question(record: Mapping[str, Any], where: str) -> tuple[str, list[str], int]:
    hint = '{"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}'
    if missing := [name for name in ("prompt", "choices", "answer") if name not in record]:
        raise TrainError(f"not a question with choices: no {missing[0]!r}\n  at        {where}\n  try       {hint}")
    prompt, choices, answer = record["prompt"], record["choices"], record["answer"]
    if not isinstance(choices, list):
        raise TrainError(f"the choices are no list: {choices!r}\n  at        {where}\n  try       {hint}")
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
