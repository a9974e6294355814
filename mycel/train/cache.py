"""Folders that are made once: complete under their key, or not there.

    CACHE/<key>/…, manifest.json      complete: names, sizes and checksums of all its files
    CACHE/.tmp-<key>-…                being made, under the lock CACHE/locks/<key>; renamed to <key> when all is on disk
    CACHE/.trash-…                    on its way out

Who makes a folder holds its key's lock, which the system takes back when the process dies, however it dies.  So a
`.tmp-` folder whose lock is free is a dead process's and is removed.  Where a file system has no locks, two processes
may do the same work; the first rename wins, and what was left behind is removed after a day.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mycel.errors import TrainError

VERIFY_BYTES = 512 << 20  # what is larger is checked by its size alone: reading it all would delay every start
ABANDONED_S = 24 * 3600.0

Meta = dict[str, Any]


class Damaged(Exception):
    """A cached folder is not what its manifest says."""


@dataclass(frozen=True)
class CachedFolder:
    """A complete folder: what its maker wrote about it, and why it had to be made again, if it had."""

    path: Path
    meta: Meta
    remade: str | None = None


def obtain(
    cache: Path, key: str, make: Callable[[Path], Meta], waiting: Callable[[], None] = lambda: None
) -> CachedFolder:
    """The folder under `key`; `make(folder)` fills it if it is not there or damaged. `waiting` is called if another
    process is at it."""
    try:
        (cache / "locks").mkdir(parents=True, exist_ok=True)
        if entry := _complete(cache / key):
            return entry
    except Damaged:
        pass  # looked at again, and thrown away, under the lock
    except OSError as e:
        raise _in_words(e, cache) from e
    try:
        with _locked(cache / "locks" / key, waiting) as locked:
            _sweep(cache, key if locked else None)
            return _make(cache, key, make)
    except OSError as e:
        raise _in_words(e, cache) from e


def _make(cache: Path, key: str, make: Callable[[Path], Meta]) -> CachedFolder:
    """Fill a temporary folder and give it its name."""
    final, remade = cache / key, None
    try:
        if entry := _complete(final):
            return entry
    except Damaged as e:
        remade = str(e)
        _discard(final)
    partial = Path(tempfile.mkdtemp(prefix=f".tmp-{key}-", dir=cache))
    try:
        meta = make(partial)
        _seal(partial, key, meta)
        try:
            partial.rename(final)
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST) or _complete(final) is None:
                raise
        sync(cache)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return CachedFolder(final, meta, remade)


def _seal(folder: Path, key: str, meta: Meta) -> None:
    """Write the manifest over what is in the folder, and see all of it to the disk."""
    files = {p.name: {"bytes": p.stat().st_size, "blake2b": _checksum(p)} for p in sorted(folder.iterdir())}
    body = json.dumps({"key": key, "files": files, "meta": meta}, sort_keys=True)
    (folder / "manifest.json").write_text(f"{body}\n{_text_checksum(body)}\n")
    for path in folder.iterdir():
        sync(path)
    folder.chmod(0o755)  # a temporary folder is its owner's alone
    sync(folder)


def _complete(folder: Path) -> CachedFolder | None:
    """The folder if it is there and as its manifest says."""
    if not folder.exists():
        return None
    try:
        body, checksum = (folder / "manifest.json").read_text().splitlines()
    except (OSError, ValueError) as e:
        raise Damaged(f"manifest.json: {e}") from e
    if _text_checksum(body) != checksum:
        raise Damaged("manifest.json does not match its checksum")
    manifest = json.loads(body)
    if manifest["key"] != folder.name:
        raise Damaged(f"it is of another key, {manifest['key']}")
    whole = sum(entry["bytes"] for entry in manifest["files"].values()) <= VERIFY_BYTES
    for name, entry in manifest["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            matches = not whole or size != entry["bytes"] or _checksum(path) == entry["blake2b"]
        except OSError as e:
            raise Damaged(f"{name}: {e.strerror}") from e
        if size != entry["bytes"]:
            raise Damaged(f"{name} has {size} bytes, {entry['bytes']} were written")
        if not matches:
            raise Damaged(f"{name} does not match its checksum")
    return CachedFolder(folder, manifest["meta"])


@contextmanager
def _locked(path: Path, waiting: Callable[[], None] = lambda: None, block: bool = True) -> Iterator[bool]:
    """Hold the lock; gives False where it is held by another (unless `block`), or the file system has none."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = block
            if block:
                waiting()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)


def _sweep(cache: Path, mine: str | None) -> None:
    """Remove what dead processes left: under the lock `mine`, and under every lock that is free."""
    for path in cache.glob(".trash-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in cache.glob(".tmp-*"):
        key = path.name.split("-")[1]
        if key == mine:
            shutil.rmtree(path, ignore_errors=True)
            continue
        with _locked(cache / "locks" / key, block=False) as free:
            if free or _age_s(path) > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Take a folder out of the way at once, then remove it."""
    trash = Path(tempfile.mkdtemp(prefix=".trash-", dir=folder.parent))
    folder.rename(trash / folder.name)
    shutil.rmtree(trash, ignore_errors=True)


def _age_s(path: Path) -> float:
    """Seconds since anything in the folder was written; 0 if it went away."""
    try:
        return time.time() - max(p.stat().st_mtime for p in (path, *path.iterdir()))
    except OSError:
        return 0.0


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _text_checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sync(path: Path) -> None:
    """What was written is on the disk, not only on its way."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _in_words(error: OSError, cache: Path) -> TrainError:
    """Why the cache cannot be written, and what to do."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    what = "the disk is full" if full else error.strerror or str(error)
    free = ""
    if full:
        where = next(p for p in (cache, *cache.parents) if p.exists())
        free = f" ({shutil.disk_usage(where).free / 2**20:.1f} MiB free)"
    return TrainError(
        f"tokens cannot be cached: {what}{free}\n  at        {cache}\n"
        "  try       data.cache: a writable folder on a disk with room"
    )
