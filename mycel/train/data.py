"""From files to batches: find, tokenise once, cut into sequences, keep some for validation.

    sources ──identify──▶ content hashes ──cache──▶ Tokens ──cut──▶ Split ──batch──▶ arrays
                                                    (documents, one after the other)

Packed, a split is one stream, its documents joined, cut into windows of `length`.  Not packed, each document is a row
of its own.  What is cached does not depend on length, packing, split or seed, so changing these costs nothing.
Labels are the ids themselves (the model shifts them), -100 where a token carries no loss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mycel.errors import TrainError
from mycel.sizes import counted
from mycel.train.cache import obtain
from mycel.train.documents import DOCUMENT_FIELDS, FIELDS, bin_dtype
from mycel.train.sources import RECORDS, DataFile, File, check_unchanged, find, identify, no_token
from mycel.train.split import cut, divide
from mycel.train.store import Progress, Tokens, build
from mycel.train.tokenize import Tokenizer

VERSION = 1  # of what is cached; another number makes all tokens anew

Names = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Data:
    """What a run trains on; `report` says what was left out, `fingerprint` changes when a resumed run would see other
    data."""

    train: Any  # a Split, or examples with an answer of their own (`labelled.py`)
    validation: Any
    report: tuple[str, ...]
    fingerprint: str
    stores: tuple[Tokens, ...] = field(repr=False)

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens in each split."""
        return {"train": self.train.tokens, "validation": self.validation.tokens}


def prepare(
    sources: Names,
    *,
    validation: Names | None = None,
    split: float = 0.01,
    format: str = "auto",
    fields: Mapping[str, str] | None = None,
    tokenizer: Tokenizer | None,
    length: int,
    pack: bool = True,
    cache: Path,
    seed: int = 0,
    progress: Progress | None = None,
) -> Data:
    """Sequences for training and validation from files; without `validation`, a part `split` of the training data."""
    if length < 2:
        raise TrainError(f"a sequence has at least 2 tokens, data.length is {length}")
    if validation is None and not 0 < split < 1:
        raise TrainError(f"data.split is a part of the training data between 0 and 1, not {split}")
    files = [find(named, format) for named in (sources, validation) if named is not None]
    _check_apart(*files)
    notes: list[str] = []
    opened = [
        _open(group, {**FIELDS, **(fields or {})}, tokenizer, Path(cache).expanduser(), progress, notes)
        for group in files
    ]
    stores = tuple(store for store, _ in opened)
    identity: list[object] = [VERSION, length, pack, [key for _, key in opened]]
    if validation is None:
        identity += [split, seed]
        train, held = divide(stores[0], length, pack, split, seed, notes)
    else:
        train, held = cut(stores[0], length, pack, "train", notes), cut(stores[1], length, pack, "validation", notes)
        if same := int(np.isin(stores[1].hashes, stores[0].hashes).sum()):
            notes.append(f"{same:,} of {len(stores[1].hashes):,} validation documents are in the training data too")
    sizes = []
    for name, sequences, store in (("train", train, stores[0]), ("validation", held, stores[-1])):
        if not sequences.count:
            raise TrainError(
                f"the {name} data is empty: it has no sequence with a token to predict\n  at        {store.paths[0]}"
            )
        sizes.append(
            f"{name}: {counted(sequences.tokens, 'token')}, {counted(sequences.count, 'sequence')} of {length}"
        )
    return Data(train, held, (*sizes, *notes), _hash(identity), stores)


def check_vocab(data: Data, vocab: int) -> None:
    """Refuse data with a token id that a model with `vocab` ids does not have."""
    for store in data.stores:
        if out_of_range := store.first_at_least(vocab):
            path, at, token = out_of_range
            raise TrainError(
                f"token id {token} is out of range: the model has ids 0 to {vocab - 1}\n"
                f"  at        {path}, token {at}\n"
                "  try       the tokenizer that belongs to the model, or a model with a larger vocab_size"
            )


def opened(
    sources: Names,
    format: str,
    fields: Mapping[str, str] | None,
    tokenizer: Tokenizer | None,
    cache: Path,
    progress: Progress | None,
    notes: list[str],
) -> Tokens:
    """The tokens of files, from the cache or into it."""
    named = {**FIELDS, **(fields or {})}
    return _open(find(sources, format), named, tokenizer, Path(cache).expanduser(), progress, notes)[0]


def _open(
    files: Sequence[File],
    fields: Mapping[str, str],
    tokenizer: Tokenizer | None,
    cache: Path,
    progress: Progress | None,
    notes: list[str],
) -> tuple[Tokens, str]:
    """The tokens in these files, from the cache or into it, and the key of what is in them."""
    data_files = sorted(identify(files, cache), key=lambda s: s.format == "tokens")
    key = _key(data_files, fields, tokenizer)
    tell: Progress = progress or (lambda *_: None)
    entry = obtain(
        cache,
        key,
        lambda folder: _build(folder, data_files, fields, tokenizer, tell),
        lambda: tell("another process is tokenising", 0, 0),
    )
    check_unchanged(data_files)
    if entry.remade:
        notes.append(f"cached tokens were damaged ({entry.remade}) and have been made again")
    store = Tokens(entry, data_files)
    if not len(store.hashes):
        raise no_token([(s.path, s.format) for s in data_files])
    if empty := sum(c.empty for c in store.contents):
        notes.append(f"{counted(empty, 'empty document')} left out")
    return store, key


def _build(
    folder: Path, data_files: list[DataFile], fields: Mapping[str, str], tokenizer: Tokenizer | None, progress: Progress
) -> dict[str, object]:
    """Write the tokens, and refuse to keep them if a file changed meanwhile."""
    meta = build(folder, data_files, fields, tokenizer, progress)
    check_unchanged(data_files)
    return meta


def _key(data_files: Sequence[DataFile], fields: Mapping[str, str], tokenizer: Tokenizer | None) -> str:
    """A hash of all that decides which tokens there are."""
    formats = {s.format for s in data_files}
    return _hash(
        [
            VERSION,
            [(s.digest, s.format, _dtype(s)) for s in data_files],
            tokenizer.fingerprint if tokenizer and formats != {"tokens"} else None,
            sorted((key, fields[key]) for key in DOCUMENT_FIELDS) if formats & {*RECORDS} else None,
        ]
    )


def _dtype(source: DataFile) -> str | None:
    """What is said beside a file about it, and so not in its own hash."""
    return str(bin_dtype(source.path)) if source.format == "tokens" and source.path.suffix.lower() == ".bin" else None


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def _check_apart(train: Sequence[File], validation: Sequence[File] = ()) -> None:
    """Refuse a file that is in both."""
    known = {path.resolve() for path, _ in train}
    if both := [path for path, _ in validation if path.resolve() in known]:
        raise TrainError(
            f"a validation file is training data too\n  at        {both[0]}\n"
            "  try       validation: null keeps a part of the data"
        )
