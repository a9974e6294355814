"""The checkpoints of a folder: which there are, which is the best, which stay.

    FOLDER/.tmp-step-00000200-PID-3  written here and synced to disk, then in one rename
    FOLDER/step-00000200             complete, always
    FOLDER/.old-step-00000200        the earlier one of the same step, until the new one is in its place
    FOLDER/.trash-…                  on its way to be deleted
    FOLDER/abandoned-step-00000400   later than a step saved after it: the run went back before it, and on from there

Whoever writes holds the folder's lock (of many ranks, the first), so what it finds in hidden places at its start was
left by the dead.  The best checkpoint is the one whose manifest has the lowest metric: no second file can disagree.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from mycel.errors import CheckpointError
from mycel.run.folder import Lock
from mycel.run.shards import Manifest, read_manifest


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint: manifest right, shards there and of the right size."""
    return next((path for path in reversed(steps(Path(folder)).values()) if complete(path)), None)


def best(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the lowest metric, the earliest of equals."""
    return _best({path: m for path in steps(Path(folder)).values() if (m := complete(path))})


def _best(manifests: dict[Path, Manifest]) -> Path | None:
    return min(
        ((m.metric, m.step, path) for path, m in manifests.items() if m.metric is not None), default=(0, 0, None)
    )[2]


def steps(folder: Path) -> dict[int, Path]:
    """Checkpoints by step, in order, complete or damaged; `.old-` ones only where there is no other of that step."""
    try:
        matches = [
            (m, path) for path in folder.iterdir() if (m := re.fullmatch(r"(\.old-)?step-([0-9]{8,})", path.name))
        ]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    by_step = {int(m[2]): path for m, path in sorted(matches, key=lambda x: x[0][1] is None)}
    return dict(sorted(by_step.items()))


def complete(path: Path) -> Manifest | None:
    """Its manifest, if that is right and the shards are there."""
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def claim(folder: Path) -> Lock:
    """The folder: made, locked, and freed of what dead processes left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise CheckpointError(
            f"cannot make the folder of checkpoints: {e.strerror}\n  at        {folder}\n  try       another folder"
        ) from e
    lock = Lock(folder)
    with suppress(OSError):  # a parent that may not be listed
        sync(folder.parent)
    for path in list(folder.iterdir()) if lock.held else []:
        name = path.name.removeprefix(".old-")
        if path.name.startswith((".tmp-", ".trash-")) or (name != path.name and (folder / name).exists()):
            shutil.rmtree(path, ignore_errors=True)
        elif name != path.name:
            with suppress(OSError):
                os.rename(path, folder / name)
    return lock


def put(temp: Path, final: Path) -> None:
    """A complete checkpoint takes its name, by one rename; the earlier one of the same step goes."""
    sync(temp)
    old = final.with_name(f".old-{final.name}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)  # `steps` finds it there until the new one is in its place
    os.rename(temp, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def prune(folder: Path, step: int, keep: int) -> list[str]:
    """After `step` is complete: delete all but the last `keep` and the best, set aside what is later; what could not be
    done, in words."""
    reports = []
    try:
        checkpoints = steps(folder)
        for path in [path for s, path in checkpoints.items() if s > step]:
            aside = folder / f"abandoned-{path.name.removeprefix('.old-')}"
            _discard(aside)
            os.rename(path, aside)
            reports.append(
                f"{path.name} is later than step {step}, from which the run went on: set aside as {aside.name}\n"
                f"  at        {folder}"
            )
        manifests = {path: m for s, path in checkpoints.items() if s <= step and (m := complete(path))}
        for path in {*list(manifests)[:-keep]} - {_best(manifests)}:
            _discard(path)
    except OSError as e:
        reports.append(f"an old checkpoint could not be deleted: {e.strerror}\n  at        {e.filename or folder}")
    return reports


def _discard(path: Path) -> None:
    """Delete a checkpoint; if killed meanwhile, none is there in part."""
    if path.exists():
        trash = path.with_name(f".trash-{path.name}-{os.getpid()}")
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(path, trash)
        shutil.rmtree(trash)


def sync(folder: Path) -> None:
    """The names in a folder onto the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network filesystems know no such thing
            raise
    finally:
        os.close(fd)
