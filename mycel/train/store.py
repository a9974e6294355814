"""Documents as token ids on disk, one position after the other, mapped into memory.

    positions   0 ─────────────────────── n ──────────────── m …
                cached tokens of all text   arrays, where they lie
    offsets     document i is [offsets[i], offsets[i + 1])
    hashes      of documents: equal documents have equal hashes
    quiet       runs [start, stop) of positions whose tokens carry no loss

`build` writes this for a list of sources, texts before arrays; `Tokens` reads it.  Arrays are looked through once and
not copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.errors import TrainError
from mycel.train.cache import CachedFolder, Meta
from mycel.train.documents import Segment, array, segments
from mycel.train.sources import DataFile
from mycel.train.tokenize import Ids, Tokenizer, needs_tokenizer

I64 = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]  # what is done, bytes so far, bytes in all

BATCH_CHARS = 1 << 20  # text tokenised together
CHUNK = 1 << 20  # ids of an array looked at together


@dataclass
class Contents:
    """What one source gave; `width` of its rows if it is an array of two dims."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    max_id: int = -1
    width: int = 0


def build(
    folder: Path,
    sources: Sequence[DataFile],
    fields: Mapping[str, str],
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> Meta:
    """Write the sources' documents into the folder."""
    texts = [s for s in sources if s.format != "tokens"]
    arrays = sources[len(texts) :]
    dtype = np.uint16 if tokenizer is None or tokenizer.vocab <= 2**16 else np.uint32
    total, done = sum(s.bytes for s in sources), sum(s.bytes for s in texts)
    writer = _DocumentWriter(folder, np.dtype(dtype))
    try:
        if texts:
            if tokenizer is None:
                raise needs_tokenizer(texts[0].path)
            _write_texts(writer, texts, fields, tokenizer, lambda bytes: progress("tokenising", bytes, total))
        for source in arrays:
            writer.scan(array(source.path), source.path, lambda bytes: progress("reading tokens", done + bytes, total))
            done += source.bytes
        progress("tokenising", total, total)
    finally:
        writer.close()
    return {"dtype": np.dtype(dtype).name, "sources": [asdict(c) for c in writer.contents]}


def _write_texts(
    writer: _DocumentWriter,
    sources: Sequence[DataFile],
    fields: Mapping[str, str],
    tokenizer: Tokenizer,
    progress: Callable[[int], None],
) -> None:
    """Tokenise in batches that reach over documents and files."""
    batch: list[tuple[int, Segment]] = []
    chars = 0
    starts = np.cumsum([0] + [s.bytes for s in sources])
    within = [0] * len(sources)
    for i, source in enumerate(sources):
        for segment in segments(source, fields, tokenizer):
            batch.append((i, segment))
            chars += len(segment.text)
            within[i] += len(segment.text)
            if chars >= BATCH_CHARS:
                _write_batch(writer, batch, tokenizer)
                progress(int(min(starts[i] + within[i], starts[i + 1])))
                batch, chars = [], 0
    _write_batch(writer, batch, tokenizer)
    writer.begin_source(len(sources))


def _write_batch(writer: _DocumentWriter, batch: Sequence[tuple[int, Segment]], tokenizer: Tokenizer) -> None:
    for (i, segment), ids in zip(
        batch, tokenizer.encode_batch([s.text for _, s in batch]) if batch else [], strict=True
    ):
        writer.begin_source(i + 1)
        if len(ids):
            begins = writer.at_start and tokenizer.adds_bos and not segment.marked
            writer.add(np.concatenate([[tokenizer.bos], ids]) if begins else ids, segment.loss)
        if segment.closes:
            if tokenizer.eos is not None and not segment.marked and not writer.at_start:
                writer.add(np.array([tokenizer.eos]), True)
            writer.end_document()


class _DocumentWriter:
    """Documents, token by token, into files."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self.dtype, self.position, self.contents = dtype, 0, list[Contents]()
        self._files = ExitStack()
        self._tokens, self._offsets, self._hashes, self._quiet = (
            self._files.enter_context((folder / f"{name}.bin").open("wb"))
            for name in ("tokens", "offsets", "hashes", "quiet")
        )
        self._start, self._digest = 0, hashlib.blake2b(digest_size=8)
        self._offsets.write(np.int64(0).tobytes())

    @property
    def at_start(self) -> bool:
        """Whether the document has no token yet."""
        return self.position == self._start

    def begin_source(self, number: int) -> None:
        """What follows is of the `number`-th source, counted from 1."""
        while len(self.contents) < number:
            self.contents.append(Contents())

    def add(self, ids: Ids, loss: bool) -> None:
        """Tokens that continue the document."""
        self._digest.update(ids.astype("<u4").tobytes())
        self._tokens.write(ids.astype(self.dtype).tobytes())
        if not loss:
            self._quiet.write(np.array([self.position, self.position + len(ids)], np.int64).tobytes())
        self.contents[-1].max_id = max(self.contents[-1].max_id, int(ids.max()))
        self.position += len(ids)

    def end_document(self) -> None:
        """The document is complete; without tokens it is none."""
        if self.at_start:
            self.contents[-1].empty += 1
            return
        self._offsets.write(np.int64(self.position).tobytes())
        self._hashes.write(self._digest.digest())
        self.contents[-1].documents += 1
        self.contents[-1].tokens += self.position - self._start
        self._start, self._digest = self.position, hashlib.blake2b(digest_size=8)

    def scan(self, ids: npt.NDArray[Any], path: Path, progress: Callable[[int], None]) -> None:
        """An array as a source of its own: one document, or one for each row."""
        flat, first = ids.reshape(-1), self.position
        width = ids.shape[-1] or 1
        self.contents.append(Contents(width=width if ids.ndim == 2 else 0))
        for at in range(0, len(flat), CHUNK):
            piece = flat[at : at + CHUNK]
            _check_ids(piece, at, path)
            self.contents[-1].max_id = max(self.contents[-1].max_id, int(piece.max()))
            canonical = memoryview(piece.astype("<u4").tobytes())
            borders = range(at + width - at % width, at + len(piece), width)
            for a, b in pairwise([at, *borders, at + len(piece)]):
                self._digest.update(canonical[(a - at) * 4 : (b - at) * 4])
                self.position = first + b
                if b % width == 0:
                    self.end_document()
            progress((at + len(piece)) * flat.itemsize)
        if not len(flat):
            self.end_document()

    def close(self) -> None:
        """All is handed to the system."""
        self._files.close()


def _check_ids(piece: npt.NDArray[Any], at: int, path: Path) -> None:
    for bad in (int(piece.min()), int(piece.max())):
        if not 0 <= bad < 2**31:
            where = at + int(np.argmax(piece == bad))
            raise TrainError(
                f"{bad} is no token id\n  at        {path}, token {where}\n  try       the dtype it was written with"
            )


class Tokens:
    """The documents of a list of sources, read from a cached folder and the arrays that were not copied."""

    def __init__(self, entry: CachedFolder, sources: Sequence[DataFile]) -> None:
        self.paths = [s.path for s in sources]
        self.contents = [Contents(**c) for c in entry.meta["sources"]]
        self.offsets: I64 = _mapped(entry.path / "offsets.bin", np.int64)
        self.hashes: npt.NDArray[np.uint64] = _mapped(entry.path / "hashes.bin", np.uint64)
        quiet = _mapped(entry.path / "quiet.bin", np.int64).reshape(-1, 2)
        self._quiet_starts, self._quiet_stops = (np.ascontiguousarray(quiet[:, i]) for i in (0, 1))
        self._quiet_sums = np.concatenate([[0], np.cumsum(self._quiet_stops - self._quiet_starts)])
        self._parts = [_mapped(entry.path / "tokens.bin", np.dtype(entry.meta["dtype"]))]
        self._parts += [array(s.path).reshape(-1) for s in sources if s.format == "tokens"]
        self._bases = np.cumsum([0] + [len(p) for p in self._parts])

    @property
    def has_quiet(self) -> bool:
        """Whether some tokens carry no loss."""
        return len(self._quiet_starts) > 0

    def widths(self) -> I64:
        """For each document the width of the rows it is one of, 0 if it is not a row."""
        return np.repeat([c.width for c in self.contents], [c.documents for c in self.contents]).astype(np.int64)

    def read(self, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        """The ids at [start, stop), in pieces."""
        part = int(np.searchsorted(self._bases, start, "right")) - 1
        while start < stop:
            piece = self._parts[part][start - self._bases[part] : stop - self._bases[part]]
            yield piece
            start, part = start + len(piece), part + 1

    def quiet_before(self, positions: I64) -> I64:
        """How many tokens without loss come before each position."""
        runs = np.searchsorted(self._quiet_starts, positions, "left")
        last = np.concatenate([[0], self._quiet_stops])[runs]
        return self._quiet_sums[runs] - np.maximum(0, last - positions)

    def heads(self) -> I64:
        """How many tokens without loss each document begins with: its prompt."""
        starts = self.offsets[:-1]
        runs = np.minimum(np.searchsorted(self._quiet_starts, starts), len(self._quiet_starts) - 1)
        if not self.has_quiet:
            return np.zeros(len(starts), np.int64)
        return np.where(self._quiet_starts[runs] == starts, self._quiet_stops[runs] - starts, 0)

    def quiet_runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The runs without loss in [start, stop), relative to start."""
        run = int(np.searchsorted(self._quiet_stops, start, "right"))
        while run < len(self._quiet_starts) and self._quiet_starts[run] < stop:
            yield max(0, int(self._quiet_starts[run]) - start), min(stop, int(self._quiet_stops[run])) - start
            run += 1

    def first_at_least(self, vocab: int) -> tuple[Path, int, int] | None:
        """The first id that is not below `vocab`: in which file, at which of its tokens, and the id."""
        start = 0
        for path, contents in zip(self.paths, self.contents, strict=True):
            if contents.max_id >= vocab:
                for at in range(start, start + contents.tokens, CHUNK):
                    ids = np.concatenate(list(self.read(at, min(at + CHUNK, start + contents.tokens))))
                    if len(bad := np.flatnonzero(ids >= vocab)):
                        return path, at - start + int(bad[0]), int(ids[bad[0]])
            start += contents.tokens
        return None


def _mapped(path: Path, dtype: Any) -> npt.NDArray[Any]:
    """A file of numbers as a read-only array."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.zeros(0, dtype)
