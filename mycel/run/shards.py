"""The files of one checkpoint: safetensors shards, and a manifest that says what is in them.

    step-00000200/
      shard-00000.safetensors, …    tensors, or pieces of tensors larger than a shard
      manifest.json                 {"format", "step", "metric", "meta",
                                     "shards":  {file: {"bytes", "sha256"}},
                                     "tensors": {name: {"dtype", "shape", "pieces": [{"shard", "begin", "part": {"offset", "shape"}}]},
                                                 tied name: {"same": name}},
                                     "sha256"}

A piece lies at byte `begin` of its shard; one without "part" is the whole tensor.  Pieces may be any boxes that fill their tensor,
so ranks can each write their own.  The manifest's last line is the checksum of all lines before it.  Reading believes the manifest
only when that line is right, and tensors only when their shard's checksum is; nothing is unpickled or evaluated.
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
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from mycel.errors import CheckpointError

FORMAT = "mycel-checkpoint-1"
MANIFEST = "manifest.json"
SHARD_BYTES = 2 << 30
CHUNK = 4 << 20  # bytes hashed, written or read at a time
THREADS = 4  # one hashes a shard while another writes it; more saturate neither the disk nor a few cores that also train
NEVER = threading.Event()

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, `shape` large at `offset`, at byte `begin` of a shard."""

    shard: str
    begin: int
    offset: Dims
    shape: Dims


@dataclass(frozen=True)
class Entry:
    """A tensor and where its pieces are."""

    dtype: torch.dtype
    shape: Dims
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint; a tied tensor is the name of the one it is the same as, a shard its bytes and checksum."""

    step: int
    metric: float | None
    meta: dict[str, Any]
    shards: dict[str, tuple[int, str]]
    tensors: dict[str, Entry | str]


class Crew:
    """Threads that work off a list of tasks.  All start in the caller's thread: a process about to exit can start none."""

    def __init__(self, tasks: Iterable[Callable[[], None]]) -> None:
        self.tasks = deque(tasks)
        self.errors: list[Exception] = []
        self.threads = [threading.Thread(target=self._work, name="checkpoint") for _ in range(min(THREADS, len(self.tasks)))]
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


class Shard:
    """A safetensors file to be: its header, and pieces of host tensors in the order of their bytes."""

    def __init__(self, file: str, parts: list[tuple[str, Dims, torch.Tensor]]) -> None:
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

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """Name of the tensor and place of each piece."""
        begin = len(self.header)
        for name, offset, x in self.parts:
            yield name, Piece(self.file, begin, offset, tuple(x.shape))
            begin += x.nbytes

    def chunks(self, abandoned: threading.Event = NEVER) -> Iterator[memoryview]:
        """The bytes of the file, as long as they are wanted."""
        for whole in [memoryview(self.header), *(as_bytes(x) for _, _, x in self.parts)]:
            for at in range(0, len(whole), CHUNK):
                if abandoned.is_set():
                    raise InterruptedError("abandoned")
                yield whole[at : at + CHUNK]

    def write(self, folder: Path, abandoned: threading.Event = NEVER) -> None:
        """Onto the disk, not only into its cache."""
        with open(folder / self.file, "xb") as file:
            for chunk in self.chunks(abandoned):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    def sha256(self, abandoned: threading.Event = NEVER) -> str:
        """The checksum of the file's bytes, from memory."""
        digest = hashlib.sha256()
        for chunk in self.chunks(abandoned):
            digest.update(chunk)
        return digest.hexdigest()


def as_bytes(x: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, shared with it."""
    # not reshape: a contiguous tensor of at most one item may have any stride
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().data


def pack(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> list[Shard]:
    """Contiguous host tensors -> shards of at most `shard_bytes`; a larger tensor is cut along its first dim, one row at least."""
    groups: list[list[tuple[str, Dims, torch.Tensor]]] = []
    room = -1
    for name, x in tensors.items():
        for offset, part in _cut(x, shard_bytes):
            if part.nbytes > room:  # always so after another part of the same tensor: names in a shard are unique
                groups.append([])
                room = shard_bytes
            groups[-1].append((name, offset, part))
            room -= part.nbytes
    return [Shard(f"shard-{i:05d}.safetensors", parts) for i, parts in enumerate(groups)]


def _cut(x: torch.Tensor, shard_bytes: int) -> Iterator[tuple[Dims, torch.Tensor]]:
    if x.nbytes <= shard_bytes or x.dim() == 0:
        yield (0,) * x.dim(), x
        return
    rows = max(1, shard_bytes // (x.nbytes // x.shape[0]))
    for at in range(0, x.shape[0], rows):
        yield (at,) + (0,) * (x.dim() - 1), x[at : at + rows]


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as JSON, one line for each tensor and shard, and its checksum in the last line."""
    tensors = {name: {"same": x} if isinstance(x, str) else _entry_json(x) for name, x in manifest.tensors.items()}
    shards = {file: {"bytes": size, "sha256": sha256} for file, (size, sha256) in manifest.shards.items()}
    head = {"format": FORMAT, "step": manifest.step, "metric": manifest.metric, "meta": manifest.meta}
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
    for key, table in (("shards", shards), ("tensors", tensors)):
        rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in table.items())
        lines.append(f'"{key}": {{\n{rows}\n}},\n')
    body = ("{" + "".join(lines)).encode()
    return body + _last_line(body)


def _entry_json(entry: Entry) -> dict[str, Any]:
    pieces = []
    for p in entry.pieces:
        part = {} if p.shape == entry.shape else {"part": {"offset": p.offset, "shape": p.shape}}
        pieces.append({"shard": p.shard, "begin": p.begin, **part})
    return {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "pieces": pieces}


def _last_line(body: bytes) -> bytes:
    return f'"sha256": "{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def damaged(path: Path, why: str) -> NoReturn:
    """Refuse the checkpoint at `path`."""
    raise CheckpointError(f"{path.name} is damaged ({why})\n  at        {path}\n  try       an earlier checkpoint")


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, its checksum and the sizes of its shards checked."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path.name}\n  at        {path}\n  try       a folder like step-00000200 of a run")
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        damaged(path, f"{MANIFEST} is missing")
    except OSError as e:
        damaged(path, f"{MANIFEST} cannot be read: {e.strerror}")
    size = len(_last_line(b""))
    body, found = text[:-size], text[-size:]
    if found != _last_line(body):
        damaged(path, f"{MANIFEST}, {len(text)} bytes, ends in {_start(found)}, expected {_start(_last_line(body))}")
    try:
        manifest = _manifest(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        damaged(path, f"{MANIFEST} is not one this version reads: {e}")
    for file, (size, _) in manifest.shards.items():
        _check_size(path, file, size)
    return manifest


def _start(line: bytes) -> str:
    """`"sha256": "0123456789abcdef…` of a last line."""
    return repr(line[:27].decode(errors="replace")) + "…"


def _check_size(path: Path, file: str, size: int) -> None:
    try:
        found = (path / file).stat().st_size
    except OSError as e:
        damaged(path, f"{file} is missing: {e.strerror}")
    if found != size:
        damaged(path, f"{file} has {found} bytes, expected {size}")


def _manifest(x: dict[str, Any]) -> Manifest:
    if x["format"] != FORMAT:
        raise ValueError(f"format {x['format']!r}, expected {FORMAT!r}")
    shards = {file: (int(s["bytes"]), str(s["sha256"])) for file, s in x["shards"].items()}
    for file in shards:
        _require(re.fullmatch(r"shard-[0-9]+\.safetensors", file), f"a shard called {file!r}")
    tensors: dict[str, Entry | str] = {name: t["same"] if "same" in t else _entry(name, t, shards) for name, t in x["tensors"].items()}
    for name, t in tensors.items():
        _require(not isinstance(t, str) or isinstance(tensors.get(t), Entry), f"{name} is the same as {t}, which is not there")
    _require(isinstance(x["meta"], dict), "meta is no object")
    metric = None if x["metric"] is None else float(x["metric"])
    return Manifest(int(x["step"]), metric, x["meta"], shards, tensors)


def _entry(name: str, x: dict[str, Any], shards: Mapping[str, tuple[int, str]]) -> Entry:
    dtype, shape = DTYPES[x["dtype"]], _dims(x["shape"])
    pieces = []
    for p in x["pieces"]:
        part = p.get("part") or {"offset": [0] * len(shape), "shape": shape}
        piece = Piece(p["shard"], int(p["begin"]), _dims(part["offset"]), _dims(part["shape"]))
        _require(all(o + n <= whole for o, n, whole in zip(piece.offset, piece.shape, shape, strict=True)), f"{name} has a piece outside itself")
        end = piece.begin + math.prod(piece.shape) * dtype.itemsize
        _require(piece.begin >= 0 and end <= shards[piece.shard][0], f"{name} reaches outside {piece.shard}")
        pieces.append(piece)
    _require(sum(math.prod(p.shape) for p in pieces) == math.prod(shape), f"{name} has a hole")
    return Entry(dtype, shape, tuple(pieces))


def _dims(x: Iterable[Any]) -> Dims:
    dims = tuple(int(n) for n in x)
    _require(all(n >= 0 for n in dims), f"dims {dims}")
    return dims


def _require(true: object, why: str) -> None:
    if not true:
        raise ValueError(why)


def read_tensors(path: Path, manifest: Manifest, names: Iterable[str], device: torch.device) -> dict[str, torch.Tensor]:
    """These tensors, not tied ones, on the device; every byte of every shard is checked, wanted or not."""
    entries = {name: entry for name in names if isinstance(entry := manifest.tensors[name], Entry)}
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype, device=device) for name, entry in entries.items()}
    targets: dict[str, list[tuple[int, torch.Tensor]]] = {file: [] for file in manifest.shards}
    for name, entry in entries.items():
        for p in entry.pieces:
            box = tuple(slice(o, o + n) for o, n in zip(p.offset, p.shape, strict=True))
            targets[p.shard].append((p.begin, tensors[name][box]))
    Crew(partial(_read_shard, path, file, *manifest.shards[file], targets[file]) for file in targets).join()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return tensors


def _read_shard(path: Path, file: str, size: int, sha256: str, targets: list[tuple[int, torch.Tensor]]) -> None:
    """Fill the targets, each (byte in the shard, tensor), if the whole shard is right."""
    digest = hashlib.sha256()
    scratch = memoryview(bytearray(min(size, CHUNK)))
    staged = []
    try:
        with open(path / file, "rb", buffering=0) as shard:
            for begin, x in sorted(targets, key=lambda target: target[0]):
                host = x if x.device.type == "cpu" and x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)
                _require(shard.tell() <= begin or not x.numel(), "pieces overlap")
                _skim(shard, begin, digest.update, scratch)
                _fill(shard, as_bytes(host), digest.update)
                if host is not x:
                    staged.append((x, host))
            _skim(shard, size, digest.update, scratch)
            _require(not shard.read(1), f"more than {size} bytes")
    except ValueError as e:
        damaged(path, f"{file}: {e}")
    except OSError as e:
        damaged(path, f"{file} cannot be read: {e.strerror}")
    if digest.hexdigest() != sha256:
        damaged(path, f"{file} has sha256 {digest.hexdigest()[:16]}…, expected {sha256[:16]}…")
    for x, host in staged:
        x.copy_(host)


def _skim(file: Any, end: int, update: Callable[[memoryview], None], scratch: memoryview) -> None:
    """Read and hash up to byte `end`."""
    while (left := end - file.tell()) > 0:
        _fill(file, scratch[:left], update)


def _fill(file: Any, into: memoryview, update: Callable[[memoryview], None]) -> None:
    """Read and hash as many bytes as there is room for."""
    at = 0
    while at < len(into):
        n = file.readinto(into[at : at + CHUNK])
        _require(n, f"ends at byte {file.tell()}")
        update(into[at : at + n])
        at += n
