"""Checkpoints of a run: saved whole or not at all, bit for bit, in the background; read back only if every checksum is right.

    FOLDER/.tmp-step-00000200-PID    written here and synced to disk, then in one rename
    FOLDER/step-00000200             complete, always
    FOLDER/.old-step-00000200        the earlier one of the same step, until the new one is in its place
    FOLDER/.trash-…                  on its way to be deleted
    FOLDER/abandoned-step-00000400   later than a step saved after it: the run went back before it, and on from there

Whoever writes holds the folder's lock, so what it finds in hidden places at its start was left by the dead.
The best checkpoint is the one whose manifest has the lowest metric: no second file can disagree.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from mycel.errors import CheckpointError
from mycel.run.folder import Lock, RunFolder, explain, free_bytes
from mycel.run.shards import DTYPE_NAMES, MANIFEST, SHARD_BYTES, Crew, Entry, Manifest, Piece, Shard, pack, read_manifest, read_tensors, to_bytes

__all__ = ["Loaded", "RunFolder", "Saver", "best", "latest", "load", "load_latest", "save", "verify"]

Folder = str | os.PathLike[str]
Tensors = dict[str, torch.Tensor]
Copy = Callable[[Tensors], tuple[Tensors, Callable[[], None]]]  # to the host; the copies are there once the function returned


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory; tied names share one tensor."""

    step: int
    tensors: Tensors
    meta: dict[str, Any]
    path: Path


@dataclass(frozen=True)
class State:
    """What is to be saved: contiguous host tensors, filled once `ready` returns; `owner` says under which name each is stored."""

    step: int
    tensors: Tensors
    owner: dict[str, str]
    meta: dict[str, Any]
    metric: float | None
    ready: Callable[[], None]


def save(folder: Folder, step: int, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any], *, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a checkpoint; when this returns it is on disk, when it raises nothing has changed."""
    state = _state(step, tensors, meta, None, _on_host)
    with _claim(Path(folder)):
        writing = Writing(Path(folder), state, shard_bytes)
        writing.begin()
        return writing.finish()


def load(path: Folder, device: str | torch.device = "cpu", only: Callable[[str], bool] | None = None) -> Loaded:
    """The checkpoint at `path`, or those of its tensors whose names `only` takes; all of it is checked."""
    path = Path(path)
    manifest = read_manifest(path)
    names = [name for name in manifest.tensors if only is None or only(name)]
    owner = {name: x if isinstance(x := manifest.tensors[name], str) else name for name in names}
    tensors = read_tensors(path, manifest, dict.fromkeys(owner.values()), torch.device(device))
    return Loaded(manifest.step, {name: tensors[owner[name]] for name in names}, manifest.meta, path)


def verify(path: Folder) -> None:
    """Check every byte of the checkpoint at `path`."""
    load(path, only=lambda _: False)


def load_latest(folder: Folder, device: str | torch.device = "cpu", only: Callable[[str], bool] | None = None) -> tuple[Loaded, list[str]]:
    """The newest undamaged checkpoint, and a warning for each newer one that was passed over."""
    refused: dict[Path, str] = {}
    # listed anew each time: while one is read, a run may replace it by newer ones
    while left := [path for path in _steps(Path(folder)).values() if path not in refused]:
        try:
            loaded = load(left[-1], device, only)
            return loaded, [f"{why}; using {loaded.path.name}" for why in refused.values()]
        except CheckpointError as e:
            refused[left[-1]] = str(e).split("\n")[0]
    seen = "".join(f"\n  tried     {why}" for why in refused.values())
    what = "no checkpoint is undamaged" if refused else "there is no checkpoint"
    raise CheckpointError(f"{what}{seen}\n  at        {folder}\n  try       a new run, in another folder")


def latest(folder: Folder) -> Path | None:
    """The newest complete checkpoint: manifest right, shards there and of the right size."""
    return next((path for path in reversed(_steps(Path(folder)).values()) if _complete(path)), None)


def best(folder: Folder) -> Path | None:
    """The complete checkpoint with the lowest metric, the earliest of equals."""
    return _best({path: m for path in _steps(Path(folder)).values() if (m := _complete(path))})


class Saver:
    """Saves a run's state every now and then, and keeps the last `keep` and the best; one save is under way at most."""

    def __init__(self, folder: Folder, keep: int = 2, asynchronous: bool = True, *, shard_bytes: int = SHARD_BYTES) -> None:
        if keep < 1:
            raise CheckpointError(f"keep={keep}: at least one checkpoint must be kept\n  at        {folder}\n  try       keep=1")
        self.folder, self.keep, self.asynchronous, self.shard_bytes = Path(folder), keep, asynchronous, shard_bytes
        self.last: Path | None = None  # the newest one completed by this saver
        self.lock = _claim(self.folder)
        self.reports: deque[str] = deque()
        self.thread: threading.Thread | None = None
        self.writing: Writing | None = None  # the save last begun
        self.buffers: Tensors = {}  # host copies, used again by the next save: allocating them is most of a copy's time

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any], metric: float | None = None) -> None:
        """Take the state as it is now; a save that fails is reported by `poll`, and leaves the earlier checkpoints as they are."""
        self.wait()
        try:
            state = _state(step, tensors, meta, metric, self._snapshot if self.asynchronous else _on_host)
            self.writing = writing = Writing(self.folder, state, self.shard_bytes)
            writing.begin()
        except (RuntimeError, MemoryError) as e:  # torch says RuntimeError where it cannot allocate
            why = f"step {step} is not saved: no copy of the state could be made: {e}"
            self.reports.append(f"{why}\n  at        {self.folder}\n  try       saving without asynchronous copies, or more host memory")
            return
        except SaveFailed as e:
            self.reports.append(str(e))
            return
        if self.asynchronous:
            self.thread = threading.Thread(target=self._finish, args=(writing,), name="checkpoint")
            self.thread.start()
        else:
            self._finish(writing)

    def poll(self) -> list[str]:
        """What went wrong since the last call, to be shown to the user."""
        return [self.reports.popleft() for _ in range(len(self.reports))]

    def wait(self) -> None:
        """Until no save is under way."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def close(self) -> None:
        """Wait, and let others write to the folder; a second call does nothing."""
        self.wait()
        self.writing = None
        self.buffers.clear()
        self.lock.release()

    def _finish(self, writing: Writing) -> None:
        try:
            self.last = writing.finish()
            self.reports.extend(_prune(self.folder, writing.state.step, self.keep))
        except CheckpointError as e:
            self.reports.append(str(e))

    def _snapshot(self, tensors: Tensors) -> tuple[Tensors, Callable[[], None]]:
        """Copies of the tensors as they are now: host tensors at once, CUDA ones on a stream of their own that later work waits for."""
        host = {name: _buffer(x, self.buffers.get(name)) for name, x in tensors.items()}
        self.buffers = host
        events = []
        for device in {x.device for x in tensors.values() if x.is_cuda}:
            side, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for name, x in tensors.items():
                    if x.device == device:
                        host[name].copy_(x, non_blocking=True)
                        x.record_stream(side)
            events.append(side.record_event())
            current.wait_event(events[-1])
        for name, x in tensors.items():
            if not x.is_cuda:
                host[name].copy_(x)

        def ready() -> None:
            for event in events:
                event.synchronize()

        return host, ready

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) and self.writing is not None:  # who interrupts does not want to wait for it
            self.writing.abandoned.set()
            self.wait()
            self.writing.abandon()  # if it had begun, and nobody was there yet to finish it
        self.close()


class SaveFailed(CheckpointError):
    """The disk did not take a checkpoint."""


class Writing:
    """A checkpoint under way: threads hash and write its shards from `begin` on; `finish` completes it, or leaves nothing of it."""

    def __init__(self, folder: Path, state: State, shard_bytes: int) -> None:
        self.folder, self.state = folder, state
        self.final = folder / f"step-{state.step:08d}"
        self.temp = folder / f".tmp-{self.final.name}-{os.getpid()}"
        self.shards = pack(state.tensors, shard_bytes)
        self.bytes = sum(shard.bytes for shard in self.shards)
        self.sha256: dict[str, str] = {}
        self.crew = Crew([])
        self.abandoned = threading.Event()

    def begin(self) -> None:
        """Start the threads, if there is room for what they write."""
        with self._whole_or_nothing():
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self.temp, ignore_errors=True)
            if free_bytes(self.folder) < self.bytes:  # said now, not after filling the disk to its brim
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.temp.mkdir()
            self.crew = Crew(partial(task, shard) for shard in self.shards for task in (self._write, self._hash))

    def finish(self) -> Path:
        """Wait for the shards, write the manifest, and put the whole in its place by one rename."""
        with self._whole_or_nothing():
            self.crew.join()
            with open(self.temp / MANIFEST, "xb") as file:
                file.write(to_bytes(self._manifest()))
                file.flush()
                os.fsync(file.fileno())
            _sync(self.temp)
            old = self.folder / f".old-{self.final.name}"
            if self.final.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.rename(self.final, old)  # `_steps` finds it there until the new one is in its place
            os.rename(self.temp, self.final)
            _sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return self.final

    def abandon(self) -> None:
        """Leave nothing of it, unless it is complete."""
        self.abandoned.set()
        self.crew.stop()
        shutil.rmtree(self.temp, ignore_errors=True)

    def _write(self, shard: Shard) -> None:
        self.state.ready()
        shard.write(self.temp, self.abandoned)

    def _hash(self, shard: Shard) -> None:
        self.state.ready()
        self.sha256[shard.file] = shard.sha256(self.abandoned)

    def _manifest(self) -> Manifest:
        state = self.state
        pieces: dict[str, list[Piece]] = {name: [] for name in state.tensors}
        for shard in self.shards:
            for name, piece in shard.pieces():
                pieces[name].append(piece)
        entries = {name: Entry(x.dtype, tuple(x.shape), tuple(pieces[name])) for name, x in state.tensors.items()}
        tensors = {name: entries[name] if owner == name else owner for name, owner in state.owner.items()}
        shards = {shard.file: (shard.bytes, self.sha256[shard.file]) for shard in self.shards}
        return Manifest(state.step, state.metric, state.meta, shards, tensors)

    @contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as e:
            self.abandon()
            if not isinstance(e, Exception):
                raise
            why, hint = explain(e, self.folder, self.bytes) if isinstance(e, OSError) else (f"{type(e).__name__}: {e}", "to save again")
            raise SaveFailed(f"step {self.state.step} is not saved: {why}\n  at        {self.folder}\n  try       {hint}") from e


def _state(step: int, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any], metric: float | None, copy: Copy) -> State:
    """What the caller gave, with names of the same tensor joined and everything copied that could change."""
    try:
        meta = json.loads(json.dumps(meta))
    except (TypeError, ValueError) as e:
        raise CheckpointError(f"meta of step {step} cannot be written as JSON: {e}\n  try       numbers, strings, lists, objects") from e
    owner: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, x in tensors.items():
        if x.dtype not in DTYPE_NAMES or x.layout is not torch.strided or x.is_meta or name == "__metadata__":
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
            raise CheckpointError(f"cannot save {name!r}, a {x.layout} {x.dtype} tensor on {x.device}\n  try       a dense tensor of {known}")
        same = (x.device, x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()) if x.numel() else name
        owner[name] = first.setdefault(same, name)
    host, ready = copy({name: tensors[name].detach() for name, other in owner.items() if name == other})
    return State(step, host, owner, meta, metric if metric is not None and math.isfinite(metric) else None, ready)


def _on_host(tensors: Tensors) -> tuple[Tensors, Callable[[], None]]:
    """The tensors themselves where they are contiguous host ones already: the caller waits."""
    return {name: x.resolve_conj().resolve_neg().cpu().contiguous() for name, x in tensors.items()}, lambda: None


def _buffer(x: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Host memory for a copy of `x`, page-locked if it comes from a GPU and there is any."""
    if old is not None and old.shape == x.shape and old.dtype == x.dtype:
        return old
    if x.is_cuda:
        with suppress(RuntimeError):
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return torch.empty(x.shape, dtype=x.dtype)


def _claim(folder: Path) -> Lock:
    """The folder: made, locked, and freed of what dead processes left."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise CheckpointError(f"cannot make the folder of checkpoints: {e.strerror}\n  at        {folder}\n  try       another folder") from e
    lock = Lock(folder)
    with suppress(OSError):  # a parent that may not be listed
        _sync(folder.parent)
    for path in list(folder.iterdir()) if lock.held else []:
        name = path.name.removeprefix(".old-")
        if path.name.startswith((".tmp-", ".trash-")) or (name != path.name and (folder / name).exists()):
            shutil.rmtree(path, ignore_errors=True)
        elif name != path.name:
            with suppress(OSError):
                os.rename(path, folder / name)
    return lock


def _steps(folder: Path) -> dict[int, Path]:
    """Checkpoints by step, in order, complete or damaged; `.old-` ones only where there is no other of that step."""
    try:
        found = [(m, path) for path in folder.iterdir() if (m := re.fullmatch(r"(\.old-)?step-([0-9]{8,})", path.name))]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    by_step = {int(m[2]): path for m, path in sorted(found, key=lambda x: x[0][1] is None)}
    return dict(sorted(by_step.items()))


def _complete(path: Path) -> Manifest | None:
    """Its manifest, if that is right and the shards are there."""
    try:
        return read_manifest(path)
    except CheckpointError:
        return None


def _best(manifests: dict[Path, Manifest]) -> Path | None:
    return min(((m.metric, m.step, path) for path, m in manifests.items() if m.metric is not None), default=(0, 0, None))[2]


def _prune(folder: Path, step: int, keep: int) -> list[str]:
    """After `step` is complete: delete all but the last `keep` and the best, set aside what is later; what could not be done, in words."""
    reports = []
    try:
        steps = _steps(folder)
        for path in [path for s, path in steps.items() if s > step]:
            aside = folder / f"abandoned-{path.name.removeprefix('.old-')}"
            _discard(aside)
            os.rename(path, aside)
            reports.append(f"{path.name} is later than step {step}, from which the run went on: set aside as {aside.name}\n  at        {folder}")
        complete = {path: m for s, path in steps.items() if s <= step and (m := _complete(path))}
        for path in {*list(complete)[:-keep]} - {_best(complete)}:
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


def _sync(folder: Path) -> None:
    """The names in a folder onto the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network filesystems know no such thing
            raise
    finally:
        os.close(fd)
