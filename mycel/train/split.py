"""Documents cut into sequences, and divided between training and validation.

    packed       documents joined ── d0 ──┬─ d1 ─┬──── d2 ────    windows of `length`;
                 windows        |   0   |   1   |   2   |··       what is left over at the end is dropped
    not packed   every document a row, padded; of a longer one the start of the prompt goes first, then the end

Validation takes whole documents, drawn by the hash of their content, so equal documents fall on one side and adding
data moves few of them.  Where there are too few documents for that (one long text), it takes the windows at the end.
Labels are the ids themselves (the model shifts them), -100 where a token carries no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mycel.errors import TrainError
from mycel.sizes import counted
from mycel.train.order import mix
from mycel.train.store import I64, Tokens

NO_LOSS = -100


class Split:
    """Sequences of `length` tokens: windows of a packed stream, or padded rows; `spans` are the documents' positions,
    in order."""

    def __init__(self, tokens: Tokens, spans: I64, length: int, packed: bool) -> None:
        self.length, self.packed, self.silent, self.left_over = length, packed, 0, 0
        self._tokens, self._spans = tokens, spans
        self._sums: I64 = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])
        total = int(self._sums[-1])
        self.count = (total // length or int(total > 1)) if packed else len(spans)
        if packed and total >= length:
            self.left_over = total % length
        self._kept: I64 | None = None
        if packed and tokens.has_quiet:
            self._kept = self._with_loss()
            self.silent, self.count = self.count - len(self._kept), len(self._kept)

    def __len__(self) -> int:
        return self.count

    @property
    def each(self) -> tuple[str, int, str]:
        """What a sequence is counted in, how many of it, and why."""
        return "tokens", self.length, f"{self.length} (length)"

    @property
    def tokens(self) -> int:
        """Tokens in all sequences, padding not counted."""
        return min(self.count * self.length, int(self._sums[-1])) if self.packed else int(self._sums[-1])

    def batch(self, indices: npt.NDArray[np.integer] | Sequence[int]) -> dict[str, npt.NDArray[np.int64]]:
        """The sequences at `indices` as int64 `input_ids` and `labels`, and `attention_mask` if they are padded
        rows."""
        shape = (len(indices), self.length)
        ids, labels, mask = np.zeros(shape, np.int64), np.full(shape, NO_LOSS, np.int64), np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            at = 0
            for start, stop in self._pieces(int(index)):
                for piece in self._tokens.read(start, stop):
                    ids[row, at : at + len(piece)] = piece
                    at += len(piece)
                labels[row, at - (stop - start) : at] = ids[row, at - (stop - start) : at]
                for a, b in self._tokens.quiet_runs(start, stop):
                    labels[row, at - (stop - start) + a : at - (stop - start) + b] = NO_LOSS
            mask[row, :at] = 1
        return (
            {"input_ids": ids, "labels": labels}
            if self.packed
            else {"input_ids": ids, "labels": labels, "attention_mask": mask}
        )

    def lengths(self, indices: npt.NDArray[np.integer] | Sequence[int]) -> I64:
        """How many tokens each row has, padding not counted."""
        spans = self._spans[np.asarray(indices, np.int64)]
        lengths: I64 = spans[:, 1] - spans[:, 0]
        return lengths

    def loud(self, index: int, first: int) -> int:
        """How many tokens of a sequence carry loss, from its token `first` on; found without reading it."""
        count = 0
        for start, stop in self._pieces(index):
            begin = np.array([min(start + first, stop), stop], np.int64)
            before = self._tokens.quiet_before(begin)
            count += int(begin[1] - begin[0] - (before[1] - before[0]))
            first = max(first - (stop - start), 0)
        return count

    def _pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """The positions [start, stop) that make up a sequence."""
        if not 0 <= index < self.count:
            raise IndexError(f"sequence {index} of {self.count}")
        if not self.packed:
            yield int(self._spans[index, 0]), int(self._spans[index, 1])
            return
        at = (index if self._kept is None else int(self._kept[index])) * self.length
        end = min(at + self.length, int(self._sums[-1]))
        span = int(np.searchsorted(self._sums, at, "right")) - 1
        while at < end:
            start = int(self._spans[span, 0]) + at - int(self._sums[span])
            stop = min(int(self._spans[span, 1]), start + end - at)
            yield start, stop
            at, span = at + stop - start, span + 1

    def _with_loss(self) -> I64:
        """The windows in which some token after the first carries loss: the first is never predicted."""
        begins = np.arange(self.count, dtype=np.int64) * self.length
        ends = np.minimum(begins + self.length, self._sums[-1])
        loud = ends - begins - 1 - (self._quiet_before(ends) - self._quiet_before(begins + 1))
        return np.flatnonzero(loud > 0).astype(np.int64)

    def _quiet_before(self, at: I64) -> I64:
        """How many tokens without loss come before each place in the stream."""
        starts, stops = self._spans[:, 0], self._spans[:, 1]
        sums = np.concatenate([[0], np.cumsum(self._tokens.quiet_before(stops) - self._tokens.quiet_before(starts))])
        span = np.minimum(np.searchsorted(self._sums, at, "right") - 1, len(starts) - 1)
        return (
            sums[span]
            + self._tokens.quiet_before(starts[span] + at - self._sums[span])
            - self._tokens.quiet_before(starts[span])
        )


def cut(tokens: Tokens, length: int, pack: bool, name: str, notes: list[str]) -> Split:
    """All documents as one split."""
    return _split(tokens, _spans(tokens, length, pack, notes)[1], length, pack, name, notes)


def divide(tokens: Tokens, length: int, pack: bool, share: float, seed: int, notes: list[str]) -> tuple[Split, Split]:
    """Training and validation, the latter about `share` of the whole and never empty."""
    documents, spans = _spans(tokens, length, pack, notes)
    weights = spans[:, 1] - spans[:, 0] if pack else np.ones(len(spans), np.int64)
    total, least = int(weights.sum()), length if pack else 1
    if total < 2 * least:
        have = f"{total} tokens of {2 * length}" if pack else f"{total} usable examples of 2"
        raise TrainError(
            f"too little data for a training and a validation sequence of {length} tokens: {have}\n"
            f"  at        {tokens.paths[0]}\n"
            "  try       a smaller data.length, or data.validation with a file of its own"
        )
    target = np.clip(round(share * total), least, total - least)
    held = drawn(tokens.hashes[documents], weights, int(target), least, seed)
    if held is not None:
        parts = [spans[~held], spans[held]]
    elif pack:
        parts = _cut_tail(_joined(spans), total // length, length, share)
        notes.append("validation is the end of the data: it has too few documents to draw from")
    else:
        raise undivided(tokens.hashes[documents], int(target), tokens.paths[0])
    return _split(tokens, parts[0], length, pack, "train", notes), _split(
        tokens, parts[1], length, pack, "validation", notes
    )


def _split(tokens: Tokens, spans: I64, length: int, pack: bool, name: str, notes: list[str]) -> Split:
    """The sequences in these spans, with a word on what does not fit."""
    split = Split(tokens, _joined(spans) if pack else spans, length, pack)
    if split.left_over:
        notes.append(f"{counted(split.left_over, 'token')} at the end of {name} left out: no whole sequence")
    if split.silent:
        notes.append(f"{counted(split.silent, 'sequence')} of {name} left out: none of their tokens carries loss")
    return split


def _spans(tokens: Tokens, length: int, pack: bool, notes: list[str]) -> tuple[npt.NDArray[np.intp], I64]:
    """The documents that are used, and which of their positions: rows of arrays first."""
    spans = np.stack([tokens.offsets[:-1], tokens.offsets[1:]], 1)
    documents = np.arange(len(spans))
    if pack:
        widths = tokens.widths()
        _check_widths(tokens, length)
        documents = np.argsort(widths == 0, kind="stable")
        spans[:, 1] -= np.where(widths > 0, widths % length, 0)
        if lost := int((widths % length).sum()):
            notes.append(
                f"{counted(lost, 'token')} at the ends of array rows left out: rows are no multiple of {length} wide"
            )
        return documents, spans[documents]
    sizes = spans[:, 1] - spans[:, 0]
    if longer := int((sizes > length).sum()):
        notes.append(f"{longer:,} of {len(spans):,} examples are longer than {length} tokens and were truncated")
    spans[:, 0] += np.clip(np.minimum(sizes - length, tokens.heads() - 1), 0, None)
    spans[:, 1] = np.minimum(spans[:, 1], spans[:, 0] + length)
    loud = spans[:, 1] - spans[:, 0] - 1 - (tokens.quiet_before(spans[:, 1]) - tokens.quiet_before(spans[:, 0] + 1))
    documents = np.flatnonzero(loud > 0)
    if silent := len(spans) - len(documents):
        notes.append(f"{counted(silent, 'example')} left out: none of their tokens carries loss")
    return documents, spans[documents]


def _check_widths(tokens: Tokens, length: int) -> None:
    for path, contents in zip(tokens.paths, tokens.contents, strict=True):
        if 0 < contents.width < length:
            what = f"the array's rows have {contents.width} tokens, fewer than data.length {length}"
            raise TrainError(f"{what}\n  at        {path}\n  try       length: {contents.width}")


def drawn(
    hashes: npt.NDArray[np.uint64], weights: npt.NDArray[np.int64], target: int, least: int, seed: int
) -> npt.NDArray[np.bool_] | None:
    """Which documents to hold back: in the order of their keyed hashes until `target` is reached; None if that cannot
    be."""
    kinds, kind = np.unique(hashes, return_inverse=True)
    sizes = np.bincount(kind, weights, len(kinds))
    order = np.argsort(mix(kinds ^ mix(np.array([seed % 2**64], np.uint64))))
    order = order[sizes[order] <= target]  # a larger one would make validation much larger than asked
    sums = np.cumsum(sizes[order])
    if not len(sums) or sums[-1] < target:
        return None
    number = int(np.searchsorted(sums, target)) + 1
    if weights.sum() - sums[number - 1] < least:
        return None
    return np.isin(kind, order[:number])


def undivided(hashes: npt.NDArray[np.uint64], target: int, path: Path | str) -> TrainError:
    """Why no examples can be held back: equal ones stay together, and of each there are more than are asked for."""
    sizes, hint = np.unique(hashes, return_counts=True)[1], "data.validation with a file of its own"
    least, most, total = int(sizes.min()), int(sizes.max()), len(hashes)
    what = f"all {total} examples are equal: none can be kept for validation"
    if len(sizes) > 1:
        what = (
            f"{target} of {total} examples cannot be kept for validation alone: {len(sizes)} are different, each "
            f"there {least} to {most} times"
        )
        share = next(near for digits in range(2, 17) if round((near := round(least / total, digits)) * total) == least)
        hint = f"data.split={share}, or {hint}"
    return TrainError(f"{what}\n  at        {path}\n  try       {hint}")


def _cut_tail(spans: I64, windows: int, length: int, share: float) -> list[I64]:
    """The stream before and after the first window of validation."""
    at = (windows - min(max(1, round(share * windows)), windows - 1)) * length
    ends = np.cumsum(spans[:, 1] - spans[:, 0])
    span = int(np.searchsorted(ends, at, "right"))
    middle = int(spans[span, 1] - (ends[span] - at))
    before, after = spans[: span + 1].copy(), spans[span:].copy()
    before[-1, 1] = after[0, 0] = middle
    return [before, after]


def _joined(spans: I64) -> I64:
    """Spans that follow each other as one."""
    firsts = np.flatnonzero(np.concatenate([[True], spans[1:, 0] != spans[:-1, 1]]))
    lasts = np.concatenate([firsts[1:], [len(spans)]]) - 1
    return np.stack([spans[firsts, 0], spans[lasts, 1]], 1)
