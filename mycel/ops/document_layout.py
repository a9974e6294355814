"""Packed documents as pieces of attention: blocks of rows, each with the columns that it sees.

    columns  0 0 0 1 1 2            rows 0..2 on columns 0..2: one document, whole: as attention without documents
    rows 0   ■                           3..5 on columns 3..5: two small ones, with a mask of that piece
         0   ■ ■
         0   ■ ■ ■
         1         ■
         1         ■ ■
         2             ■

A piece has the columns from the first to the last that any of its rows sees: pairs of documents that do not meet are
not looked at.  One of a single document whose columns lie together, where its rows lie, needs no mask.  Documents need
not lie together, nor rows and columns have the same; then pieces are of few rows, and their columns reach further.

Samples of a batch have pieces of their own, or all together the same rows and the columns that any of them needs,
whichever takes less: pairs that are looked at, and a call for each piece.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

LEAST_ROWS, MOST_ROWS = 64, 256  # of a piece with a mask
LAYOUTS = 64  # remembered: layers, and forward and backward, have the same


class Piece(NamedTuple):
    """Rows start … stop - 1, which see columns first … last - 1 and no other; `whole`: every row sees all of these, but
    for structure, which begins where the piece begins."""

    start: int
    stop: int
    first: int
    last: int
    whole: bool


class Sight(NamedTuple):
    """How far rows see before them and behind, -1: without bounds; and how many pairs a call of a kernel is worth."""

    before: int
    behind: int
    call: int


class DocumentRun(NamedTuple):
    """Neighbours of one document; of columns, all that are of it, `close` if they are neighbours."""

    start: int
    stop: int
    document: bytes
    close: bool = True


Pieces = tuple[Piece, ...]


@functools.lru_cache(LAYOUTS)
def layout(rows: bytes, columns: bytes, samples: int, keys: int, sight: Sight) -> tuple[tuple[slice, Pieces], ...]:
    """(samples, their pieces); documents come as the bytes of i64[samples, places, keys]."""
    row_ids, column_ids = (np.frombuffer(x, np.int64).reshape(samples, -1, keys) for x in (rows, columns))
    alike = bool((row_ids == row_ids[:1]).all() and (column_ids == column_ids[:1]).all())
    distinct = 1 if alike else samples
    runs = [(_runs(r), _spans(_runs(c))) for r, c in zip(row_ids[:distinct], column_ids[:distinct], strict=True)]
    places, count = row_ids.shape[1], column_ids.shape[1]
    each = tuple(
        (slice(None) if alike else slice(b, b + 1), _pieces(own, spans, count, sight))
        for b, (own, spans) in enumerate(runs)
    )
    seen = _seen(runs, places, count, sight)
    together = [((slice(None), _blocks(*seen, size)),) for size in (LEAST_ROWS, 2 * LEAST_ROWS, MOST_ROWS, places)]
    return min((each, *together), key=lambda plan: _cost(plan, samples, sight.call))


def _cost(plan: tuple[tuple[slice, Pieces], ...], samples: int, call: int) -> int:
    """Pairs that are looked at, and calls."""
    return sum(
        (samples if at == slice(None) else 1) * (p.stop - p.start) * (p.last - p.first) + call
        for at, own in plan
        for p in own
    )


# -- one sample


def _runs(documents: np.ndarray) -> list[DocumentRun]:
    """Neighbours of one document each, in order."""
    changes = (documents[1:] != documents[:-1]).any(1).nonzero()[0] + 1
    edges = [0, *changes.tolist(), len(documents)]
    return [DocumentRun(a, b, documents[a].tobytes()) for a, b in itertools.pairwise(edges)]


def _spans(runs: list[DocumentRun]) -> dict[bytes, DocumentRun]:
    """From the first to the last place of each document."""
    spans: dict[bytes, DocumentRun] = {}
    for run in runs:
        before = spans.get(run.document)
        spans[run.document] = run if before is None else DocumentRun(before.start, run.stop, run.document, False)
    return spans


def _pieces(runs: list[DocumentRun], spans: dict[bytes, DocumentRun], columns: int, sight: Sight) -> Pieces:
    """Documents that are whole, and others and small ones in blocks; rows that see nothing are in none."""
    pieces: list[Piece] = []
    small: list[tuple[int, int, DocumentRun]] = []

    def put(start: int, stop: int, first: int, last: int, whole: bool) -> None:
        first = first if sight.before < 0 else max(first, start - sight.before)
        last = min(last, columns if sight.behind < 0 else stop + sight.behind)
        if first < last:
            pieces.append(Piece(start, stop, first, last, whole))

    def put_small() -> None:
        if small:
            first, last = min(s.start for *_, s in small), max(s.stop for *_, s in small)
            put(small[0][0], small[-1][1], first, last, False)
            small.clear()

    is_placed = sight.before >= 0 or sight.behind >= 0
    for run in runs:
        span = spans.get(run.document)
        is_large = run.stop - run.start >= LEAST_ROWS
        if span is None or (is_large and span.close and (not is_placed or span.start == run.start)):
            put_small()
            if span is not None:
                put(run.start, run.stop, span.start, span.stop, True)
            continue
        for start in range(run.start, run.stop, MOST_ROWS):
            stop = min(start + MOST_ROWS, run.stop)
            if small and stop - small[0][0] > MOST_ROWS:
                put_small()
            small.append((start, stop, span))
            if stop - small[0][0] >= LEAST_ROWS:
                put_small()
    put_small()
    return tuple(pieces)


# -- all samples


def _seen(
    runs: list[tuple[list[DocumentRun], dict[bytes, DocumentRun]]], rows: int, columns: int, sight: Sight
) -> tuple[np.ndarray, np.ndarray]:
    """The first column that a row of any sample sees, and the end of these; the end is 0 where it sees none."""
    first, last = np.full((len(runs), rows), columns), np.zeros((len(runs), rows), np.int64)
    for b, (own, spans) in enumerate(runs):
        for run in own:
            if (span := spans.get(run.document)) is not None:
                first[b, run.start : run.stop], last[b, run.start : run.stop] = span.start, span.stop
    place = np.arange(rows)
    first = first if sight.before < 0 else np.maximum(first, place - sight.before)
    last = last if sight.behind < 0 else np.minimum(last, place + sight.behind + 1)
    nothing = first >= last
    return np.where(nothing, columns, first).min(0), np.where(nothing, 0, last).max(0)


def _blocks(first: np.ndarray, last: np.ndarray, size: int) -> Pieces:
    """Blocks of so many rows, with all columns that one of these sees."""
    starts = np.arange(0, len(first), size)
    firsts, lasts = np.minimum.reduceat(first, starts), np.maximum.reduceat(last, starts)
    stops = np.minimum(starts + size, len(first))
    return tuple(
        Piece(int(start), int(stop), int(a), int(b), False)
        for start, stop, a, b in zip(starts, stops, firsts, lasts, strict=True)
        if a < b
    )
