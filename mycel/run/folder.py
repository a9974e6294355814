"""One process at a time in a folder: the lock, the run folder that holds it, and why a disk did not take what it was
given.

The lock is flock(2) on FOLDER/.lock.  The kernel drops it when its process ends, however it ends, so the dead never
block; the file stays, and holds pid and host of the owner only so that the other one can be told.

Shared filesystems: between hosts the lock is as good as the filesystem's flock.  NFS (v4, or v3 with lockd), GPFS,
CephFS and Lustre mounted with `-o flock` see each other's locks; Lustre with `-o localflock`, and most FUSE mounts, see
only those of their own host.  Where there is no flock at all, `Lock.held` is False and nothing is guarded.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import tempfile
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from mycel.errors import CheckpointError

NAME = ".lock"
SHOWN = 4  # names of files in an error message
OWN = (  # of a run, besides its metrics
    NAME, "config.yaml", "checkpoints", "tensorboard", "curve.png", "model", "logs", "corrections.json",
    "predicted.json", "trace.json", "schedule.html", "experts.jsonl", "experts.png",
    "exported", "exported-safetensors", "exported-onnx", "exported-program",  # by `mycel export`
)  # fmt: skip


def resume_command(run: Path, ranks: int | None = None) -> str:
    """The line that goes on with a run, on so many processes of this host."""
    count = [] if ranks is None else ["--nproc", str(ranks)]
    return shlex.join(["mycel", "train", "--resume", str(run), *count])


class Lock:
    """A folder that this process alone may write to, until `release`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held = False
        self.fd = -1
        try:
            self.fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._take()
        except OSError as e:
            self._close()
            raise CheckpointError(
                f"cannot use the folder: {os.strerror(e.errno or 0)}\n  at        {folder}\n  try       another folder"
            ) from e
        except CheckpointError:
            self._close()
            raise
        HELD.add(self)

    def _take(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                return
            if e.errno != errno.EWOULDBLOCK:
                raise
            raise CheckpointError(
                f"the folder is in use by {self._owner()}\n  at        {self.folder}\n"
                "  try       another folder, or wait until that run has ended"
            ) from None
        self.held = True
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _owner(self) -> str:
        try:
            owner = json.loads(os.pread(self.fd, 4096, 0))
            return f"process {owner['pid']} on host {owner['host']}"
        except (ValueError, TypeError, KeyError):
            return "another process"  # it has the lock, and has not yet written its name

    def release(self) -> None:
        """Let others in; a second call does nothing."""
        if self.held:
            os.ftruncate(self.fd, 0)
        self._close()

    def _close(self) -> None:
        HELD.discard(self)
        self.held = False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked child (a data worker) shares its parent's lock, and would hold it for as long as it outlives a killed
    parent."""
    for lock in list(HELD):
        lock._close()


os.register_at_fork(after_in_child=_forget_in_child)


class RunFolder:
    """The folder of one run, locked: new and empty, or with `resume` one that holds a run; with `overwrite` a run that
    is there goes."""

    def __init__(self, path: str | os.PathLike[str], resume: bool = False, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        if resume and not self.path.is_dir():
            raise CheckpointError(
                f"there is no run to resume\n  at        {self.path}\n  try       the folder of an earlier run"
            )
        if overwrite:
            refuse_strange(self.path)
        elif not (self.path / NAME).exists():
            _refuse_wrong(self.path, resume)  # before anything is written into a folder that is not ours
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise CheckpointError(
                f"cannot make the run folder: {e.strerror}\n  at        {self.path}\n  try       another folder"
            ) from e
        self.lock = Lock(self.path)
        try:
            if overwrite:
                _empty(self.path)
            _refuse_wrong(self.path, resume)
        except BaseException:
            self.lock.release()
            raise

    def close(self) -> None:
        """Let others in; a second call does nothing."""
        self.lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def refuse_used(path: Path) -> None:
    """What a fresh run into this folder would be told, before any work is done for it; nothing is made there."""
    if (path / NAME).exists():
        RunFolder(path).close()
    else:
        _refuse_wrong(path, resume=False)


def refuse_unwritable(path: Path) -> None:
    """What making this folder would be told, before any work is done for it; nothing is left there."""
    there = next(p for p in [path, *path.absolute().parents] if p.exists())
    if not there.is_dir():
        raise CheckpointError(
            f"the run cannot be in this folder: {there} is a file\n  at        {path}\n  try       another folder"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"the run cannot be in this folder: {there} may not be written to\n  at        {path}\n"
            "  try       another folder: --run FOLDER"
        )
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".mycel-", dir=there))  # a disk may refuse what permissions allow: /proc
    except OSError as e:
        raise CheckpointError(
            f"the run cannot be in this folder: {there} takes no new folder ({e.strerror})\n  at        {path}\n"
            "  try       another folder: --run FOLDER"
        ) from None


def refuse_strange(path: Path) -> None:
    """What of a folder is not a run's, and would be lost if it were overwritten."""
    if not path.is_dir():
        return
    strange = sorted(p.name for p in path.iterdir() if p.name not in OWN and not p.name.startswith("metrics"))
    if strange:
        names = ", ".join(strange[:SHOWN]) + (f" and {len(strange) - SHOWN} more" if len(strange) > SHOWN else "")
        raise CheckpointError(
            f"the folder holds more than a run ({names}): it is not overwritten\n  at        {path}\n"
            "  try       another folder"
        )


def refuse_in_use(path: Path) -> None:
    """A folder that another process writes to."""
    if (path / NAME).is_file():
        Lock(path).release()


def _empty(path: Path) -> None:
    """Remove the run in a folder, whose lock this process holds."""
    for entry in path.iterdir():
        if entry.name == NAME:
            continue
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _refuse_wrong(path: Path, resume: bool) -> None:
    """A fresh run needs an empty folder, a resumed one needs a run."""
    try:
        entries = sorted(p.name for p in path.iterdir() if p.name != NAME) if path.is_dir() else []
    except OSError as e:
        raise CheckpointError(
            f"cannot read the run folder: {e.strerror}\n  at        {path}\n  try       another folder"
        ) from e
    if resume and not entries:
        raise CheckpointError(
            f"the folder is empty: no run to resume\n  at        {path}\n  try       the folder of an earlier run"
        )
    if resume or not entries:
        return
    names = ", ".join(entries[:SHOWN]) + (f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else "")
    resumable = "config.yaml" in entries or any((path / "checkpoints").glob("step-*/manifest.json"))
    hint = (
        f"--resume {path} to go on with it, --overwrite, or another folder"
        if resumable
        else "another folder: this has no checkpoint to resume"
    )
    raise CheckpointError(f"the folder already holds a run ({names})\n  at        {path}\n  try       {hint}")


def free_bytes(folder: Path) -> int:
    """What a user may still write to the disk of a folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def explain(e: OSError, folder: Path, needs_bytes: int) -> tuple[str, str]:
    """Why `needs_bytes` could not be written to a folder, in plain words, and what to try."""
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        full = "disk full" if e.errno == errno.ENOSPC else "disk quota used up"
        above = [p for p in [folder.resolve(), *folder.resolve().parents] if p.exists()]
        disk, mount = os.statvfs(above[0]), next(p for p in above if os.path.ismount(p))
        free = "no inodes" if disk.f_files and not disk.f_favail else size(free_bytes(above[0]))
        return (
            f"{full}: needs {size(needs_bytes)}, {free} free on {mount}",
            "free some space, or keep fewer checkpoints",
        )
    if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"writing is not allowed: {e.strerror}", "a folder that you may write to"
    hint = "a larger limit for files (ulimit -f)" if e.errno == errno.EFBIG else "a look at the disk"
    return f"the disk refused it: {e.strerror or e}", f"{hint}; earlier checkpoints are as they were"


def size(n_bytes: int) -> str:
    """Bytes -> `1.2 GiB`."""
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    power = min(len(units) - 1, max(0, (n_bytes.bit_length() - 1) // 10))
    return f"{n_bytes} bytes" if not power else f"{n_bytes / 1024**power:.1f} {units[power]}"
