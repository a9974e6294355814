"""Which files the data is in, and what identifies them: their content, not where they lie.

A source is a file, a folder (all its files), a glob, or `stdlib`: the source text of Python's own standard library.  A
folder that holds .jsonl, .json, .csv, .parquet, .arrow or token files gives only these: what lies beside them (a
README) is not data.  A dataset that Hugging Face's `save_to_disk` wrote is the files it names.
Text of any form may be compressed (.gz, .zst).  A file's identity is the hash of its content.  Hashing large files is
remembered under their stat (size, both times, inode), and believed only if the file had rested a while when it was
hashed: so a changed file never passes for the old one.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mycel.errors import TrainError
from mycel.sizes import counted

File = tuple[Path, str]  # and its format

SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv", ".npy": "tokens",
    ".bin": "tokens", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip  # all others are text
RECORDS = ("jsonl", "json", "csv", "parquet", "arrow")  # hold objects with named fields
FORMATS = ("auto", "text", *RECORDS, "tokens")
COMPRESSED = (".gz", ".zst")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
# forms that are not read as text or records, and what to do instead
ARCHIVES = {
    ".xz": "unxz, or gzip: .gz is read as it is",
    ".zip": "unzip, or gzip: .gz is read as it is",
}
NOT_READ = {
    **ARCHIVES,
    **dict.fromkeys(IMAGES, "train.task=classify, which learns from a folder of images for each class; or text alone"),
}

STDLIB_BYTES = 12_000_000
STDLIB_LEAST_BYTES = 1_000_000  # below this an installation ships compiled files only
STDLIB_WITHOUT = {  # not Python's own, not code, or not the same on every machine
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__"),
    *("test", "tests", "idlelib", "lib2to3", "turtledemo", "distutils", "ensurepip", "pydoc_data", "encodings"),
}

REMEMBER_BYTES = 64 << 20  # hashing less takes no time worth saving
REST_S = 2.0  # file systems step their clocks by less


@dataclass(frozen=True)
class DataFile:
    """A data file: `format` is one of FORMATS but auto; `digest` the hash of its content when it had the stat
    `seen`."""

    path: Path
    format: str
    digest: str
    seen: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The file's size."""
        return self.seen[0]


def find(sources: str | Path | Sequence[str | Path], format: str) -> list[File]:
    """Files and their formats, in the order given, those of a folder or glob sorted; no file twice."""
    if format not in FORMATS:
        raise TrainError(f"no such data format: {format!r}\n  try       one of {', '.join(FORMATS)}")
    named = [sources] if isinstance(sources, str | Path) else list(sources)
    if not named:
        raise TrainError("the list of data files is empty\n  try       data.train: stdlib, or a path")
    files: dict[Path, File] = {}
    for name in named:
        for path, kind in _expand(str(name), format):
            files.setdefault(path.resolve(), (path, kind))
    return list(files.values())


def identify(files: Iterable[File], cache: Path) -> list[DataFile]:
    """Each file with the hash of its content."""
    return [DataFile(path, kind, *_digest(path, cache)) for path, kind in files]


def check_unchanged(sources: Iterable[DataFile]) -> None:
    """Refuse files that were written to since they were identified."""
    for source in sources:
        with reading(source.path):
            changed = _stat(source.path) != source.seen
        if changed:
            raise TrainError(
                f"the file was changed while it was read\n  at        {source.path}\n"
                "  try       again when nothing writes to it"
            )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """A system's error while reading `path`, in words."""
    try:
        yield
    except OSError as e:
        raise TrainError(f"cannot read the data: {e.strerror or e}\n  at        {path}") from e


def _expand(name: str, format: str) -> Iterator[File]:
    if name == "stdlib":
        yield from ((path, "text") for path in _stdlib())
        return
    path = Path(name).expanduser()
    if path.is_dir():
        yield from _folder(path, format)
    elif path.exists():
        yield path, _format(path, format)
    elif glob.has_magic(name):
        matches = [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
        files = [p for p in matches if p.is_file() and not _describes_tokens(p)]
        if not files:
            raise TrainError(
                f"no file matches the pattern {name!r}\n  at        {Path.cwd()}\n"
                "  try       ** for folders at any depth"
            )
        yield from ((p, _format(p, format)) for p in files)
    else:
        raise TrainError(f"no such data file: {name}\n  at        {path.absolute().parent}\n  try       {near(path)}")


def _folder(folder: Path, format: str) -> Iterator[File]:
    """The folder's files that are data, hidden ones left out."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_bytes()).get("splits", [])
        raise TrainError(
            f"the folder holds several datasets: {', '.join(splits)}\n  at        {folder}\n"
            f"  try       {folder / (splits or ['train'])[0]}"
        )
    if (folder / "state.json").is_file() and (named := _saved_dataset(folder)):
        yield from ((path, _format(path, format)) for path in named)
        return
    with reading(folder):
        files = sorted(
            p
            for p in folder.rglob("*")
            if p.is_file() and not any(part.startswith(".") for part in p.relative_to(folder).parts)
        )
    strange = [p for p in files if suffix_of(p) in ARCHIVES]
    if strange and format == "auto":
        _refuse_form(strange[0])
    kinds = {p: SUFFIXES.get(suffix_of(p), "text") for p in files if not _describes_tokens(p)}
    wanted = format
    if format == "auto":
        special = sorted(set(kinds.values()) - {"text"})
        if len(special) > 1:
            raise TrainError(
                f"the folder has several formats: {' and '.join(special)}\n  at        {folder}\n"
                f"  try       format: {special[0]}"
            )
        wanted = special[0] if special else "text"
    chosen = [p for p in kinds if kinds[p] == wanted]
    if not chosen:
        raise TrainError(
            f"the folder has no {wanted} file among its {len(files)} files\n  at        {folder}\n"
            "  try       another folder or format"
        )
    yield from ((p, _format(p, format)) for p in chosen)


def _saved_dataset(folder: Path) -> list[Path]:
    """The files of a dataset that `save_to_disk` wrote: others may lie beside them, what its maps have cached."""
    try:
        return [folder / part["filename"] for part in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError):
        return []


def _format(path: Path, format: str) -> str:
    """The format of one file: as asked, or by its suffix, that of compression apart."""
    suffix = suffix_of(path)
    if not path.is_file():
        raise TrainError(f"not a regular file\n  at        {path}")
    if format == "auto" and suffix in NOT_READ:
        _refuse_form(path)
    kind = SUFFIXES.get(suffix, "text") if format == "auto" else format
    if kind in ("parquet", "arrow") and is_compressed(path):
        raise TrainError(
            f"a {kind} file holds its own compression, not another around it\n  at        {path}\n"
            f"  try       {'gunzip' if path.suffix == '.gz' else 'zstd -d'} {path.name}"
        )
    if kind == "tokens" and path.suffix.lower() not in (".npy", ".bin"):
        raise TrainError(
            f"tokens are read from .npy and .bin files, not from {suffix or 'a file without suffix'}\n"
            f"  at        {path}"
        )
    return kind


def suffix_of(path: Path) -> str:
    """What a file's name says of its form: a.jsonl.gz => .jsonl"""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


def _refuse_form(path: Path) -> NoReturn:
    raise TrainError(
        f"{suffix_of(path)} files are not read\n  at        {path}\n  try       {NOT_READ[suffix_of(path)]}"
    )


def _describes_tokens(path: Path) -> bool:
    """Whether this is the JSON beside a .bin file."""
    return path.suffix == ".json" and (path.with_suffix(".bin").exists() or path.with_suffix("").suffix == ".bin")


def no_token(files: Sequence[File]) -> TrainError:
    """For files none of whose documents has a token."""
    path, kind = files[0]
    hint = (
        "text in its records, and in chats a turn of the assistant's: that is what is learnt" if kind in RECORDS else ""
    )
    return TrainError(
        f"the data is empty: no token in {counted(len(files), 'file')}\n  at        {path}\n"
        f"  try       {hint or 'a file with text'}"
    )


def near(path: Path) -> str:
    """Names like the one that is missing."""
    try:
        there = os.listdir(path.absolute().parent)
    except OSError:
        return f"a folder that is there: {path.absolute().parent} is not"
    near = difflib.get_close_matches(path.name, there, n=3)
    return " or ".join(near) if near else "an absolute path"


def _stdlib() -> list[Path]:
    """Source files of the standard library, sorted, up to STDLIB_BYTES."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in STDLIB_WITHOUT and not name.startswith("config-")]
        files += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    chosen, total = [], 0
    for path in sorted(p for p in files if p.is_file()):
        size = path.stat().st_size
        if total + size <= STDLIB_BYTES:
            chosen.append(path)
            total += size
    if total < STDLIB_LEAST_BYTES:
        raise TrainError(
            f"this Python ships no source text of its standard library ({total} bytes in {len(chosen)} .py files)\n"
            f"  at        {root} (Python {sys.version.split()[0]})\n  try       data.train: a text file or folder"
        )
    return chosen


def _stat(path: Path) -> tuple[int, ...]:
    s = path.stat()
    return s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev


def _digest(path: Path, cache: Path) -> tuple[str, tuple[int, ...]]:
    """The hash of a file's content and the stat it had, remembered if the file is large."""
    note = cache / "contents" / f"{hashlib.blake2b(os.fsencode(path.resolve()), digest_size=16).hexdigest()}.json"
    with reading(path):
        seen = _stat(path)
        large = seen[0] >= REMEMBER_BYTES
        if large and (known := _recall(note, seen)):
            return known, seen
        now = time.time()
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    if large and now - max(seen[1], seen[2]) / 1e9 > REST_S:
        _remember(note, digest, seen)
    return digest, seen


def _recall(note: Path, seen: tuple[int, ...]) -> str | None:
    try:
        known = json.loads(note.read_text())
        return str(known["digest"]) if known["seen"] == list(seen) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(note: Path, digest: str, seen: tuple[int, ...]) -> None:
    """Keep the hash for next time; that it cannot be kept is no fault."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        partial = note.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"digest": digest, "seen": seen}))
        partial.replace(note)
    except OSError:
        return
