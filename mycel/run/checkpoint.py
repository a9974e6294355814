"""Checkpoints of a run: saved whole or not at all, bit for bit, in the background, by all ranks at once; read back only
if every checksum is right.

    rank 0   copy │ write, hash ──┐              ┌─ manifest, rename, prune ─┐
    rank 1   copy │ write, hash ──┼─ did all? ───┤                           ├─ it is there
    rank 2   copy │ write, hash ──┘  no: nobody  └───────────────────────────┘
                  └ training goes on

A run of one process is one rank.  What is on the disk is in `kept.py`, what is in a checkpoint in `shards.py`, how it
is read in `reading.py`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from mycel.errors import CheckpointError
from mycel.ir import Mesh
from mycel.run.folder import Lock, RunFolder, explain, free_bytes
from mycel.run.kept import best, claim, latest, prune, put, steps
from mycel.run.reading import Folder, Tensors, Wanted, load_parts, load_whole, read
from mycel.run.shards import (
    MANIFEST,
    SHARD_BYTES,
    Crew,
    File,
    Manifest,
    Shard,
    StoredPiece,
    pack,
    read_manifest,
    to_bytes,
)
from mycel.run.snapshot import Buffers, Layouts, State, on_host, take
from mycel.sizes import counted

__all__ = [
    "ALONE", "Loaded", "MeshProcess", "RunFolder", "Saver",
    "best", "latest", "load", "load_latest", "load_latest_parts", "load_parts", "read", "save",
]  # fmt: skip

Failure = tuple[str, str]  # why, and what to try


@dataclass(frozen=True)
class MeshProcess:
    """This process among those of a mesh.

    `share` gives each rank the texts of all, in their order.  All call it equally often; it is called by one thread at
    a time, not always the main one, so it needs a channel of its own.  It raises when a rank is gone.
    """

    mesh: Mesh
    rank: int
    share: Callable[[str], Sequence[str]]

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.mesh.world:
            raise CheckpointError(
                f"there is no rank {self.rank} in {self.mesh}, which has {self.mesh.world}\n"
                "  try       a mesh of all ranks"
            )

    def tell(self, what: Any) -> list[Any]:
        """What each rank has told."""
        return [json.loads(text) for text in self.share(json.dumps(what))]


ALONE = MeshProcess(Mesh(), 0, lambda text: [text])


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory; tied names share one tensor."""

    step: int
    tensors: Tensors
    meta: dict[str, Any]
    path: Path
    plan: str | None = None


def save(
    folder: Folder,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    meta: dict[str, Any],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a checkpoint; when this returns it is on disk, when it raises nothing has changed."""
    with claim(Path(folder)):
        writing = Writing(Path(folder), step, f"{os.getpid()}", ALONE, None, shard_bytes)
        writing.begin(lambda: take(tensors, meta, None, on_host, {}, ALONE.mesh, ALONE.rank))
        return writing.finish()


def load(path: Folder, device: str | torch.device = "cpu", only: Callable[[str], bool] | None = None) -> Loaded:
    """The checkpoint at `path`, or those of its tensors whose names `only` takes; all of it is checked."""
    path = Path(path)
    manifest = read_manifest(path)
    names = [name for name in manifest.tensors if only is None or only(name)]
    return Loaded(
        manifest.step, load_whole(path, manifest, names, torch.device(device)), manifest.meta, path, manifest.plan
    )


def load_latest(
    folder: Folder, device: str | torch.device = "cpu", only: Callable[[str], bool] | None = None
) -> tuple[Loaded, list[str]]:
    """The newest undamaged checkpoint, and a warning for each newer one that was passed over."""
    return _newest(Path(folder), lambda path: load(path, device, only), ALONE)


def load_latest_parts(
    folder: Folder, wanted: Callable[[Manifest], Wanted], ranks: MeshProcess, device: str | torch.device = "cpu"
) -> tuple[Loaded, list[str]]:
    """The same under a mesh: each rank its own parts, of one checkpoint none of whose parts is damaged on any."""

    return _newest(Path(folder), lambda path: _own_parts(path, wanted, ranks, device), ranks)


def load_named_parts(
    path: Path, wanted: Callable[[Manifest], Wanted], ranks: MeshProcess, device: str | torch.device = "cpu"
) -> Loaded:
    """The same of just that checkpoint; refused on all ranks where one cannot read its parts."""
    loaded, why = None, None
    try:
        loaded = _own_parts(path, wanted, ranks, device)
    except CheckpointError as e:
        why = str(e)
    troubles = [trouble for trouble in ranks.tell(why) if trouble is not None]
    if loaded is None or troubles:
        raise CheckpointError(troubles[0])
    return loaded


def _own_parts(
    path: Path, wanted: Callable[[Manifest], Wanted], ranks: MeshProcess, device: str | torch.device
) -> Loaded:
    manifest = read_manifest(path)
    tensors = load_parts(path, wanted(manifest), ranks.mesh, ranks.rank, device, manifest)
    return Loaded(manifest.step, tensors, manifest.meta, path, manifest.plan)


def _newest(folder: Path, read_one: Callable[[Path], Loaded], ranks: MeshProcess) -> tuple[Loaded, list[str]]:
    refused: dict[str, str] = {}
    # listed anew each time: while one is read, a run may replace it by newer ones
    while left := ranks.tell([path.name for path in steps(folder).values() if path.name not in refused])[0]:
        loaded, why = None, None
        try:
            loaded = read_one(folder / left[-1])
        except CheckpointError as e:
            why = str(e).split("\n")[0]
        troubles = [trouble for trouble in ranks.tell(why) if trouble is not None]
        if loaded is not None and not troubles:
            return loaded, [f"{trouble}; using {loaded.path.name}" for trouble in refused.values()]
        refused[left[-1]] = troubles[0]
    seen = "".join(f"\n  tried     {why}" for why in refused.values())
    what = "no checkpoint is undamaged" if refused else "there is no checkpoint"
    raise CheckpointError(f"{what}{seen}\n  at        {folder}\n  try       a folder that holds one, or a new start")


class Saver:
    """Saves a run's state every now and then, and keeps the last `keep` and the best; one save is under way at most.
    Each rank has one."""

    def __init__(
        self,
        folder: Folder,
        keep: int = 2,
        asynchronous: bool = True,
        *,
        ranks: MeshProcess = ALONE,
        plan: str | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if keep < 1:
            raise CheckpointError(
                f"keep={keep}: at least one checkpoint must be kept\n  at        {folder}\n  try       keep=1"
            )
        self.folder, self.keep, self.asynchronous = Path(folder), keep, asynchronous
        self.ranks, self.plan, self.shard_bytes = ranks, plan, shard_bytes
        self.last: Path | None = None  # the newest one completed by this saver
        self.reports: deque[str] = deque()
        self.worker = ThreadPoolExecutor(1, "checkpoint")
        self.worker.submit(int).result()  # its thread is there from now on: an interrupt cannot fall into its start
        self.under_way: Future[None] | None = None
        self.writing: Writing | None = None  # the save last begun
        self.buffers = Buffers()
        self.saves = 0
        self.lock, self.owner = _claim_for_all(self.folder, ranks)

    def save(
        self,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        meta: dict[str, Any],
        metric: float | None = None,
        layouts: Layouts | None = None,
        there: Mapping[str, frozenset[int]] | None = None,
    ) -> None:
        """Take the state as it is now; a save that fails is reported by `poll`, and leaves the earlier checkpoints as
        they are.

        `layouts` says how tensors lie on the mesh, and their global shapes; others are whole on every rank.  All ranks
        call this with the same step and names; `meta` and `metric` are rank 0's.  `there`: of tensors that some ranks
        alone hold, these; others give anything of the same shape.
        """
        self.wait()
        self.saves += 1
        self.writing = writing = Writing(
            self.folder, step, f"{self.owner}-{self.saves}", self.ranks, self.plan, self.shard_bytes
        )
        copy = self.buffers.copy if self.asynchronous else on_host
        mesh, rank = self.ranks.mesh, self.ranks.rank
        writing.begin(lambda: take(tensors, meta, metric, copy, layouts or {}, mesh, rank, there))
        if self.asynchronous:
            self.under_way = self.worker.submit(self._finish, writing)
        else:
            self._finish(writing)

    def poll(self) -> list[str]:
        """What went wrong since the last call, to be shown to the user."""
        return [self.reports.popleft() for _ in range(len(self.reports))]

    def wait(self) -> None:
        """Until no save is under way."""
        if self.under_way is not None:
            self.under_way.result()
            self.under_way = None

    def close(self) -> None:
        """Wait, and let others write to the folder; a second call does nothing."""
        self.wait()
        self.worker.shutdown()
        self.writing = None
        self.buffers = Buffers()
        if self.lock is not None:
            self.lock.release()

    def _finish(self, writing: Writing) -> None:
        try:
            self.last = writing.finish()
            self.reports.extend(prune(self.folder, writing.step, self.keep) if self.ranks.rank == 0 else ())
        except CheckpointError as e:
            self.reports.append(str(e))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # who interrupts does not want to wait for it
        if isinstance(error, KeyboardInterrupt) and self.writing is not None:
            self.writing.abandoned.set()
            self.worker.shutdown()
            self.writing.abandon()  # if it had begun, and nobody was there yet to finish it
        self.close()


def _claim_for_all(folder: Path, ranks: MeshProcess) -> tuple[Lock | None, int]:
    """Rank 0 takes the folder for all; its lock, on rank 0 alone, and its process id."""
    lock, error = None, None
    try:
        lock = claim(folder) if ranks.rank == 0 else None
    except CheckpointError as e:
        error = e
    try:
        refused, owner = ranks.tell([str(error) if error else None, os.getpid()])[0]
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    if refused:
        raise error or CheckpointError(refused)
    return lock, owner


class SaveFailed(CheckpointError):
    """The disk did not take a checkpoint, or a rank could not give its part of it."""


class Writing:
    """A checkpoint under way: threads hash and write this rank's shards from `begin` on; `finish` completes it for all,
    or leaves nothing of it."""

    def __init__(
        self, folder: Path, step: int, mark: str, ranks: MeshProcess, plan: str | None, shard_bytes: int
    ) -> None:
        self.folder, self.step, self.ranks, self.plan, self.shard_bytes = folder, step, ranks, plan, shard_bytes
        self.final = folder / f"step-{step:08d}"
        self.temp = folder / f".tmp-{self.final.name}-{mark}"
        self.state: State | None = None
        self.shards: list[Shard] = []
        self.sha256: dict[str, list[str]] = {}
        self.failure: Failure | None = None
        self.crew = Crew([])
        self.abandoned = threading.Event()

    def begin(self, snapshot: Callable[[], State]) -> None:
        """Take the state and start the threads, if there is room for what they write; what fails is told by `finish`,
        to all ranks."""
        try:
            self.state = snapshot()
            self.shards = pack(self.state.parts, self.shard_bytes, self.ranks.rank)
        except (RuntimeError, MemoryError) as e:  # torch says RuntimeError where it cannot allocate
            self.failure = (
                f"no copy of the state could be made: {e}",
                "saving without asynchronous copies, or more host memory",
            )
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if free_bytes(self.folder) < self._bytes():  # said now, not after filling the disk to its brim
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.temp.mkdir(exist_ok=True)
            self.crew = Crew(
                partial(task, shard, self.state.ready) for shard in self.shards for task in (self._write, self._hash)
            )
        except Exception as e:
            self.failure = self._why(e)
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> Path:
        """Wait for the shards of all ranks; then rank 0 writes the manifest, and puts the whole in its place by one
        rename."""
        try:
            reports = self._tell(self._written(), f"step {self.step} is not saved")
            failure = _first_failure(reports)
            if failure is None:
                done = self._publish(reports) if self.ranks.rank == 0 else None
                failure = self._tell(done, f"step {self.step} may not be saved")[0]
        except BaseException:
            self.abandon()
            raise
        if failure is not None:
            self.abandon()
            raise SaveFailed(
                f"step {self.step} is not saved: {failure[0]}\n  at        {self.folder}\n  try       {failure[1]}"
            )
        return self.final

    def abandon(self) -> None:
        """Leave nothing of it, unless it is complete."""
        self.abandoned.set()
        self.crew.stop()
        if self.ranks.rank == 0:
            shutil.rmtree(self.temp, ignore_errors=True)

    def _write(self, shard: Shard, ready: Callable[[], None]) -> None:
        ready()
        shard.write(self.temp, self.abandoned)

    def _hash(self, shard: Shard, ready: Callable[[], None]) -> None:
        ready()
        self.sha256[shard.file] = shard.sha256(self.abandoned)

    def _written(self) -> dict[str, Any]:
        """What this rank has to tell of its shards, once they are on the disk or have failed."""
        try:
            self.crew.join()
        except Exception as e:
            for shard in self.shards:  # its own: others are still writing theirs
                with suppress(OSError):
                    (self.temp / shard.file).unlink(missing_ok=True)
            self.failure = self._why(e)
        if self.failure is not None or self.state is None:
            return {"failure": self.failure}
        described = [shard.described(self.sha256[shard.file]) for shard in self.shards]
        files = {shard.file: vars(file) for shard, (file, _) in zip(self.shards, described, strict=True)}
        return {
            "digest": f"{self.step} {self.state.digest}",
            "files": files,
            "pieces": [(name, vars(piece)) for _, pieces in described for name, piece in pieces],
        }

    def _publish(self, reports: list[dict[str, Any]]) -> Failure | None:
        try:
            manifest = self._manifest(reports)
            there = {path.name: path.stat().st_size for path in self.temp.iterdir()}
            if lost := [name for name, file in manifest.files.items() if there.get(name) != file.bytes]:
                return f"rank 0 does not see {lost[0]} as it was written", "a folder on a disk that all ranks share"
            with open(self.temp / MANIFEST, "xb") as file:
                file.write(to_bytes(manifest))
                file.flush()
                os.fsync(file.fileno())
            put(self.temp, self.final)
        except Exception as e:
            shutil.rmtree(self.temp, ignore_errors=True)  # before it is said how much is free
            return self._why(e)
        return None

    def _manifest(self, reports: list[dict[str, Any]]) -> Manifest:
        """All ranks' pieces as one."""
        assert self.state is not None
        files = {name: File(**file) for rank in reports for name, file in rank["files"].items()}
        pieces: dict[str, list[StoredPiece]] = {name: [] for name in self.state.tensors}
        for rank in reports:
            for name, piece in rank["pieces"]:
                pieces[name].append(
                    StoredPiece(**{**piece, "offset": tuple(piece["offset"]), "shape": tuple(piece["shape"])})
                )
        tensors = {
            name: x if isinstance(x, str) else replace(x, pieces=tuple(pieces[name]))
            for name, x in self.state.tensors.items()
        }
        return Manifest(self.step, self.state.metric, self.state.meta, self.plan, files, tensors)

    def _tell(self, what: Any, otherwise: str) -> list[Any]:
        try:
            return self.ranks.tell(what)
        except Exception as e:
            why = f"{otherwise}: the ranks did not all answer: {type(e).__name__}: {e}"
            raise SaveFailed(
                f"{why}\n  at        {self.folder}\n  try       to resume: earlier checkpoints are as they were"
            ) from e

    def _bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def _why(self, e: Exception) -> Failure:
        if self.abandoned.is_set():
            return "it was interrupted", "to resume: earlier checkpoints are as they were"
        return (
            explain(e, self.folder, self._bytes())
            if isinstance(e, OSError)
            else (f"{type(e).__name__}: {e}", "to save again")
        )


def _first_failure(reports: list[dict[str, Any]]) -> Failure | None:
    """Why no rank saves: one of them could not, or they do not speak of the same state."""
    failed = {rank: report["failure"] for rank, report in enumerate(reports) if report.get("failure")}
    others = [
        rank
        for rank, report in enumerate(reports)
        if rank not in failed and report["digest"] != reports[0].get("digest")
    ]
    if failed:
        (rank, (why, hint)), *more = failed.items()
        who = f"rank {rank}: " if len(reports) > 1 else ""
        more_text = f" (and {counted(len(more), 'rank')} more)" if more else ""
        return f"{who}{why}{more_text}", hint
    if others:
        return (
            f"step, names, shapes or layouts on rank {others[0]} are not those on rank 0",
            "the same model, optimiser and plan on all ranks",
        )
    return None
