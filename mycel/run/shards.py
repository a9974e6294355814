"""The files of one checkpoint: safetensors shards, of which every rank writes its own, and a manifest that says what is
in them.

    step-00000200/
      shard-00003-00001.safetensors, …   the second one of rank 3
      manifest.json                      {"format", "step", "metric", "meta", "plan",
                                          "files":   {file: {"bytes", "header", "sha256"}},
                                          "tensors": {name: {"dtype", "shape", "pieces": [
                                                          {"file", "begin", "offset", "shape", "sha256"}]},
                                                      partial name: the same and {"partial": "sum"},
                                                      tied name: {"same": name}},
                                          "sha256"}

A piece is a box of a tensor: `shape` large at `offset` of it, at byte `begin` of a file.  Pieces fill their tensor and,
behind its header, their file, none over another.  Each has a checksum and some MiB at most (one row at least), so a box
of a tensor can be read, and checked, without reading much else; those that a rank has of a tensor lie one after the
other, and other programs read them as one.  The manifest's last line is the checksum of all lines before it.  Reading
believes the manifest only when that line is right, and tensors only when their pieces' checksums are; nothing is
unpickled or evaluated.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from mycel.errors import CheckpointError
from mycel.run.boxes import Dims

FORMAT = "mycel-checkpoint-2"
MANIFEST = "manifest.json"
SHARD_BYTES = 2 << 30
PIECE_BYTES = 16 << 20
CHUNK = 4 << 20  # bytes hashed, written or read at a time
# one hashes a shard while another writes it; more saturate neither the disk nor a few cores that also train
THREADS = 4
COMPARED = 256  # pieces compared with others at a time
NEVER = threading.Event()

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Part = tuple[str, Dims, torch.Tensor]  # of a tensor: its name, where in it, and what is there


@dataclass(frozen=True)
class StoredPiece:
    """A box of a tensor, `shape` large at `offset`, at byte `begin` of a file."""

    file: str
    begin: int
    offset: Dims
    shape: Dims
    sha256: str


@dataclass(frozen=True)
class File:
    """A shard: its size, and size and checksum of its header."""

    bytes: int
    header: int
    sha256: str


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and where its pieces are; of a `partial` one (sum, mean) its summands, along a first dim of their
    own."""

    dtype: torch.dtype
    shape: Dims
    pieces: tuple[StoredPiece, ...]
    partial: str = ""

    @property
    def value_shape(self) -> Dims:
        """The shape of what is saved: of the sum or mean, where it is partial."""
        return self.shape[1:] if self.partial else self.shape


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint; a tied tensor is the name of the one it is the same as."""

    step: int
    metric: float | None
    meta: dict[str, Any]
    plan: str | None
    files: dict[str, File]
    tensors: dict[str, StoredTensor | str]


class Crew:
    """Threads that work off a list of tasks.  All start in the caller's thread: a process about to exit can start
    none."""

    def __init__(self, tasks: Iterable[Callable[[], None]]) -> None:
        self.tasks = deque(tasks)
        self.errors: list[Exception] = []
        self.threads = [
            threading.Thread(target=self._work, name="checkpoint") for _ in range(min(THREADS, len(self.tasks)))
        ]
        for thread in self.threads:
            thread.start()

    def _work(self) -> None:
        while not self.errors:
            try:
                task = self.tasks.popleft()
            except IndexError:
                return
            try:
                task()
            except Exception as e:
                self.errors.append(e)

    def join(self) -> None:
        """Wait for the end of all tasks; the first error is raised, and ends the others."""
        for thread in self.threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def stop(self) -> None:
        """Wait for the tasks under way; start no more."""
        self.tasks.clear()
        for thread in self.threads:
            thread.join()


# -- shards ----------------------------------------------------------------------------------------------------------


class Shard:
    """A safetensors file to be: its header, and parts of tensors, on the host and contiguous, in the order of their
    bytes."""

    def __init__(self, file: str, parts: list[Part]) -> None:
        self.file = file
        self.parts = sorted(parts, key=lambda part: -part[2].itemsize)  # large items first keeps all of them aligned
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, _, x in self.parts:
            header[name] = {"dtype": DTYPE_NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
            at += x.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.bytes = len(self.header) + at
        self.pieces = [piece for part in self.parts for piece in cut(part, PIECE_BYTES)]

    def chunks(self, abandoned: threading.Event = NEVER) -> Iterator[memoryview]:
        """The bytes of the file, as long as they are wanted."""
        for stretch in self._stretches():
            yield from _chunks(stretch, abandoned)

    def write(self, folder: Path, abandoned: threading.Event = NEVER) -> None:
        """Onto the disk, not only into its cache."""
        with open(folder / self.file, "xb") as file:
            for chunk in self.chunks(abandoned):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def sha256(self, abandoned: threading.Event = NEVER) -> list[str]:
        """The checksums of the header and of each piece, from memory."""
        checksums = []
        for stretch in self._stretches():
            digest = hashlib.sha256()
            for chunk in _chunks(stretch, abandoned):
                digest.update(chunk)
            checksums.append(digest.hexdigest())
        return checksums

    def described(self, sha256: list[str]) -> tuple[File, list[tuple[str, StoredPiece]]]:
        """What a manifest says of it: the file, and each piece with the name of its tensor."""
        begin, stored_pieces = len(self.header), []
        for (name, offset, x), digest in zip(self.pieces, sha256[1:], strict=True):
            stored_pieces.append((name, StoredPiece(self.file, begin, offset, tuple(x.shape), digest)))
            begin += x.nbytes
        return File(self.bytes, len(self.header), sha256[0]), stored_pieces

    def _stretches(self) -> Iterator[memoryview]:
        yield memoryview(self.header)
        for _, _, x in self.pieces:
            yield as_bytes(x)


def _chunks(whole: memoryview, abandoned: threading.Event) -> Iterator[memoryview]:
    for at in range(0, len(whole), CHUNK):
        if abandoned.is_set():
            raise InterruptedError("abandoned")
        yield whole[at : at + CHUNK]


def as_bytes(x: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, shared with it."""
    # not reshape: a contiguous tensor of at most one item may have any stride
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data


def pack(parts: Iterable[Part], shard_bytes: int, rank: int = 0) -> list[Shard]:
    """Parts of tensors -> shards of at most `shard_bytes`; a larger part is cut along its first dim, one row at
    least."""
    groups: list[list[Part]] = []
    room = -1
    for part in parts:
        for piece in cut(part, shard_bytes):
            if piece[2].nbytes > room:  # always so after another part of the same tensor: names in a shard are unique
                groups.append([])
                room = shard_bytes
            groups[-1].append(piece)
            room -= piece[2].nbytes
    return [Shard(f"shard-{rank:05d}-{i:05d}.safetensors", group) for i, group in enumerate(groups)]


def cut(part: Part, limit_bytes: int) -> Iterator[Part]:
    """A part in parts of at most so many bytes along its first dim, one row at least."""
    name, offset, x = part
    if x.nbytes <= limit_bytes or x.dim() == 0:
        yield part
        return
    rows = max(1, limit_bytes // (x.nbytes // x.shape[0]))
    for at in range(0, x.shape[0], rows):
        yield name, (offset[0] + at, *offset[1:]), x[at : at + rows]


# -- the manifest ----------------------------------------------------------------------------------------------------


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as JSON, one line for each tensor and file, and its checksum in the last line."""
    files = {name: vars(file) for name, file in manifest.files.items()}
    tensors = {name: {"same": x} if isinstance(x, str) else _entry_json(x) for name, x in manifest.tensors.items()}
    head = {
        "format": FORMAT,
        "step": manifest.step,
        "metric": manifest.metric,
        "meta": manifest.meta,
        "plan": manifest.plan,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
    for key, table in (("files", files), ("tensors", tensors)):
        rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items())
        lines.append(f'"{key}": {{\n{rows}\n}},\n')
    body = ("{" + "".join(lines)).encode()
    return body + _last_line(body)


def _entry_json(entry: StoredTensor) -> dict[str, Any]:
    record = {
        "dtype": DTYPE_NAMES[entry.dtype],
        "shape": entry.shape,
        "pieces": [vars(piece) for piece in entry.pieces],
    }
    return {**record, "partial": entry.partial} if entry.partial else record


def _last_line(body: bytes) -> bytes:
    return f'"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def damaged(path: Path, why: str) -> NoReturn:
    """Refuse the checkpoint at `path`."""
    raise CheckpointError(f"{path.name} is damaged ({why})\n  at        {path}\n  try       an earlier checkpoint")


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, its checksum and the sizes of its files checked."""
    if not path.is_dir():
        raise CheckpointError(
            f"there is no checkpoint {path.name}\n  at        {path}\n  try       a folder like step-00000200 of a run"
        )
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        damaged(path, f"{MANIFEST} is missing")
    except OSError as e:
        damaged(path, f"{MANIFEST} cannot be read: {e.strerror}")
    size = len(_last_line(b""))
    body, last_line = text[:-size], text[-size:]
    if last_line != _last_line(body):
        damaged(
            path, f"{MANIFEST}, {len(text)} bytes, ends in {_start(last_line)}, expected {_start(_last_line(body))}"
        )
    try:
        manifest = _manifest(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        damaged(path, f"{MANIFEST} is not one this version reads: {e}")
    for name, file in manifest.files.items():
        _check_size(path, name, file.bytes)
    return manifest


def _start(line: bytes) -> str:
    """`"sha256": "0123456789abcdef…` of a last line."""
    return repr(line[:27].decode(errors="replace")) + "…"


def _check_size(path: Path, file: str, size: int) -> None:
    try:
        actual = (path / file).stat().st_size
    except OSError as e:
        damaged(path, f"{file} is missing: {e.strerror}")
    if actual != size:
        damaged(path, f"{file} has {actual} bytes, expected {size}")


def _manifest(x: dict[str, Any]) -> Manifest:
    if x["format"] != FORMAT:
        raise ValueError(f"format {x['format']!r}, expected {FORMAT!r}")
    files = {name: File(int(f["bytes"]), int(f["header"]), str(f["sha256"])) for name, f in x["files"].items()}
    for name in files:
        _require(re.fullmatch(r"shard-[0-9]+-[0-9]+\.safetensors", name), f"a file called {name!r}")
    tensors: dict[str, StoredTensor | str] = {
        name: t["same"] if "same" in t else _entry(name, t) for name, t in x["tensors"].items()
    }
    for name, t in tensors.items():
        _require(
            not isinstance(t, str) or isinstance(tensors.get(t), StoredTensor),
            f"{name} is the same as {t}, which is not there",
        )
    _check_files_are_filled(files, [t for t in tensors.values() if isinstance(t, StoredTensor)])
    _require(isinstance(x["meta"], dict), "meta is no object")
    metric = None if x["metric"] is None else float(x["metric"])
    return Manifest(int(x["step"]), metric, x["meta"], None if x["plan"] is None else str(x["plan"]), files, tensors)


def _entry(name: str, x: dict[str, Any]) -> StoredTensor:
    dtype, shape = DTYPES[x["dtype"]], _dims(x["shape"])
    pieces = tuple(
        StoredPiece(p["file"], int(p["begin"]), _dims(p["offset"]), _dims(p["shape"]), str(p["sha256"]))
        for p in x["pieces"]
    )
    for p in pieces:
        _require(
            all(o + n <= whole and n for o, n, whole in zip(p.offset, p.shape, shape, strict=True)),
            f"{name} has a piece outside itself",
        )
    _require(sum(math.prod(p.shape) for p in pieces) == math.prod(shape) and _apart(pieces), f"{name} has a hole")
    partial = x.get("partial")
    _require(partial is None or (partial in ("sum", "mean") and len(shape) > 0), f"{name} is partial: {partial!r}")
    return StoredTensor(dtype, shape, pieces, partial or "")


def _apart(pieces: tuple[StoredPiece, ...]) -> bool:
    """Does no piece of a tensor lie over another?"""
    if len(pieces) <= 1:
        return True
    start = np.array([p.offset for p in pieces])
    stop = start + np.array([p.shape for p in pieces])
    order = start[:, 0].argsort()
    start, stop = start[order], stop[order]
    last = np.searchsorted(start[:, 0], stop[:, 0])  # in this order, those from here on start behind a piece's last row
    for i in range(0, len(pieces), COMPARED):
        some, others = slice(i, i + COMPARED), slice(i, last[i : i + COMPARED].max())
        over = (start[some, None] < stop[None, others]) & (start[None, others] < stop[some, None])
        if over.all(2).sum() > len(start[some]):  # each lies over itself
            return False
    return True


def _check_files_are_filled(files: Mapping[str, File], entries: Iterable[StoredTensor]) -> None:
    """Header and pieces follow one another, and leave nothing of a file unchecked."""
    spans: dict[str, list[tuple[int, int]]] = {name: [(0, file.header)] for name, file in files.items()}
    for entry in entries:
        for p in entry.pieces:
            spans[p.file].append((p.begin, p.begin + math.prod(p.shape) * entry.dtype.itemsize))
    for name, file_spans in spans.items():
        file_spans.sort()
        ends = [0, *(end for _, end in file_spans)]
        _require(
            [begin for begin, _ in file_spans] == ends[:-1] and ends[-1] == files[name].bytes,
            f"pieces do not fill {name}",
        )


def _dims(x: Iterable[Any]) -> Dims:
    dims = tuple(int(n) for n in x)
    _require(all(0 <= n < 1 << 62 for n in dims), f"dims {dims}")
    return dims


def _require(true: object, why: str) -> None:
    if not true:
        raise ValueError(why)
