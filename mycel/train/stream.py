"""Sequences as they come: a document becomes tokens when its turn comes, and none is kept.

    files ──▶ segments ──▶ tokens ──▶ windows of `length` ──▶ mixed ──▶ 0 1 2 3 …        after the last file, the first

For data that is larger than what one wants to tokenise before the first step.  Documents come in the order of the
files, joined into one stream; nothing is cached or counted.  Windows are mixed among `buffer` of them: each time one of
those that are held is drawn, and the next one takes its place.  What is drawn follows from the seed and the place in
the stream alone.  A window is found by reading on to it, so a run that is resumed reads again what it has seen, to the
bit, and each rank reads all of it and keeps its rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.errors import TrainError
from mycel.sizes import counted
from mycel.train.data import Data, Names, opened
from mycel.train.documents import Segment, segments
from mycel.train.sources import DataFile, File, find, no_token
from mycel.train.split import NO_LOSS, cut
from mycel.train.store import Progress
from mycel.train.tokenize import Tokenizer, needs_tokenizer

TOGETHER = 1 << 18  # characters that are tokenised together
ENDLESS = 1 << 62  # sequences: there is always another

I64 = npt.NDArray[np.int64]


class StreamOrder:
    """One sequence after the other."""

    def indices(self, step: int, batch: int, rows: range | None = None) -> I64:
        rows = range(batch) if rows is None else rows
        return step * batch + np.arange(rows.start, rows.stop, dtype=np.int64)


class Stream:
    """Windows of tokens and labels, read on to when they are asked for."""

    count = ENDLESS

    def __init__(
        self,
        files: Sequence[File],
        fields: Mapping[str, str],
        tokenizer: Tokenizer,
        length: int,
        buffer: int = 0,
        seed: int = 0,
    ) -> None:
        self.files, self.fields, self.tokenizer, self.length = tuple(files), fields, tokenizer, length
        self.buffer, self.seed = buffer, seed
        self._windows, self._next = self._mixed(), 0
        self._held: dict[int, tuple[I64, I64]] = {}

    @property
    def each(self) -> tuple[str, int, str]:
        return "tokens", self.length, f"{self.length} (length)"

    def batch(self, indices: Sequence[int] | I64) -> dict[str, I64]:
        """The windows at `indices`; those before them are forgotten."""
        wanted = [int(i) for i in indices]
        if wanted and min(wanted) < min(self._held, default=self._next):  # from the start again
            self._windows, self._next, self._held = self._mixed(), 0, {}
        while wanted and self._next <= max(wanted):
            window = next(self._windows)
            if self._next >= min(wanted):
                self._held[self._next] = window
            self._next += 1
        chosen = [self._held[i] for i in wanted]
        if wanted:
            self._held = {i: window for i, window in self._held.items() if i >= min(wanted)}
        shape = (len(wanted), self.length)
        return {
            "input_ids": np.array([ids for ids, _ in chosen], np.int64).reshape(shape),
            "labels": np.array([labels for _, labels in chosen], np.int64).reshape(shape),
        }

    def _mixed(self) -> Iterator[tuple[I64, I64]]:
        """Windows, each drawn among as many as the buffer holds."""
        windows, draw = self._cut(), np.random.default_rng(self.seed)
        held = [*islice(windows, self.buffer)]
        for window in windows:
            if held:
                drawn = int(draw.integers(len(held)))
                held[drawn], window = window, held[drawn]
            yield window

    def _cut(self) -> Iterator[tuple[I64, I64]]:
        """Windows that hold a token to predict, without end."""
        ids, labels = np.zeros(0, np.int64), np.zeros(0, np.int64)
        while True:
            some = False
            for new, loss in self._tokens():
                some = some or len(new) > 1
                ids = np.concatenate([ids, new])
                labels = np.concatenate([labels, new if loss else np.full(len(new), NO_LOSS)])
                while len(ids) >= self.length:
                    if (labels[1 : self.length] != NO_LOSS).any():
                        yield ids[: self.length], labels[: self.length]
                    ids, labels = ids[self.length :], labels[self.length :]
            if not some:
                raise no_token(self.files)

    def _tokens(self) -> Iterator[tuple[I64, bool]]:
        """The tokens of all documents once, with whether they carry loss."""
        at_start = True
        for together in _batches(chain.from_iterable(self._segments(path, kind) for path, kind in self.files)):
            for segment, encoded in zip(together, self.tokenizer.encode_batch([s.text for s in together]), strict=True):
                ids = encoded.astype(np.int64)
                if len(ids):
                    if at_start and self.tokenizer.adds_bos and not segment.marked:
                        ids = np.concatenate([[self.tokenizer.bos], ids])
                    at_start = False
                    yield ids, segment.loss
                if segment.closes:
                    if self.tokenizer.eos is not None and not segment.marked and not at_start:
                        yield np.array([self.tokenizer.eos], np.int64), True
                    at_start = True

    def _segments(self, path: Any, kind: str) -> Iterator[Segment]:
        return segments(DataFile(path, kind, "", (0,)), self.fields, self.tokenizer)


def _batches(all_of_them: Iterator[Segment]) -> Iterator[list[Segment]]:
    """Segments that are tokenised together."""
    together: list[Segment] = []
    size = 0
    for segment in all_of_them:
        together.append(segment)
        size += len(segment.text)
        if size >= TOGETHER:
            yield together
            together, size = [], 0
    if together:
        yield together


def streamed(
    sources: Names,
    validation: Names,
    *,
    format: str,
    fields: Mapping[str, str],
    tokenizer: Tokenizer | None,
    length: int,
    buffer: int,
    seed: int,
    cache: Any,
    progress: Progress | None,
) -> Data:
    """Training data as a stream; validation data is tokenised before, as always."""
    files, notes = find(sources, format), list[str]()
    arrays = [path for path, kind in files if kind == "tokens"]
    if arrays:
        raise TrainError(
            f"a stream is of text, and {arrays[0]} holds tokens\n  at        data.stream\n"
            "  try       data.stream=false: arrays of tokens are read where they lie"
        )
    if tokenizer is None:
        raise needs_tokenizer(files[0][0])
    store = opened(validation, format, fields, tokenizer, cache, progress, notes)
    held = cut(store, length, True, "validation", notes)
    bytes_ = sum(path.stat().st_size for path, _ in files)
    report = (
        f"train: {counted(len(files), 'file')} of {counted(bytes_, 'byte')}, as they come"
        + (f", mixed among {counted(buffer, 'sequence')}" if buffer else ""),
        f"validation: {counted(held.tokens, 'token')}, {counted(held.count, 'sequence')} of {length}",
    )
    identity = [
        length,
        buffer,
        seed if buffer else 0,
        [(str(path), path.stat().st_size) for path, _ in files],
        sorted(fields.items()),
    ]
    fingerprint = hashlib.blake2b(json.dumps([*identity, tokenizer.fingerprint]).encode(), digest_size=16).hexdigest()
    return Data(Stream(files, fields, tokenizer, length, buffer, seed), held, (*report, *notes), fingerprint, (store,))
