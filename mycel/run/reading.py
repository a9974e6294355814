"""Boxes of tensors out of a checkpoint: only the pieces that overlap what is wanted are read, and each is checked
before it counts.

    pieces, as some ranks saved them      wanted by one of other ranks
      ┌───────┬───────┐                     ┌───────────────┐
      │   0   │   1   │                     │   ┌───────┐   │
      ├───────┼───────┤                     │   │ ▒▒▒▒▒ │   │  pieces 0 and 1 are read, and their files' headers
      │   2   │   3   │                     │   └───────┘   │
      └───────┴───────┘                     └───────────────┘

So a checkpoint can be loaded under any mesh and layouts.  What is not read is not checked, but where a whole checkpoint
is asked for.  A partial tensor, saved as its summands, is their sum: a rank among as many reads its own summand, else
the first one along the axes of the sum has all of it, and the others zeros.  One that is saved as copies that differ is
their mean: a rank among as many reads its own, else each reads the mean.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mycel.errors import CheckpointError
from mycel.ir import MEAN, Layout, Mesh
from mycel.run import boxes
from mycel.run.boxes import Box, Dims
from mycel.run.shards import (
    CHUNK,
    DTYPE_NAMES,
    Crew,
    File,
    Manifest,
    StoredPiece,
    StoredTensor,
    as_bytes,
    damaged,
    read_manifest,
)

Folder = str | os.PathLike[str]
Tensors = dict[str, torch.Tensor]
Wanted = Mapping[str, tuple[Layout, Dims, torch.dtype]]  # by name: how it lies on the mesh, its global shape, its dtype


@dataclass(frozen=True)
class Target:
    """A tensor to be filled with a box of a saved one, which is not a tied name; `total`: what is to be the sum of its
    rows then, or with `mean` their mean."""

    name: str
    box: Box
    tensor: torch.Tensor
    total: torch.Tensor | None = None
    mean: bool = False

    @staticmethod
    def of(name: str, entry: StoredTensor, box: Box, x: torch.Tensor) -> Target:
        """A tensor to be filled with a box of what is saved: of the sum or mean, where that is partial."""
        if not entry.partial:
            return Target(name, box, x)
        rows = torch.empty((entry.shape[0], *x.shape), dtype=x.dtype, device=x.device)
        return Target(name, ((0, entry.shape[0]), *box), rows, x, entry.partial == "mean")

    def add_up(self) -> None:
        """The sum or mean of what was read; of 16-bit values in 32.  Of counts the first."""
        if self.total is not None and self.mean and not self.tensor.is_floating_point():
            self.total.copy_(self.tensor[0])
        elif self.total is not None:
            wide = torch.float32 if self.tensor.is_floating_point() and self.tensor.itemsize < 4 else self.tensor.dtype
            total = self.tensor.sum(0, dtype=wide)
            self.total.copy_(total / len(self.tensor) if self.mean else total)


@dataclass
class Job:
    """A piece to be read, checked, and copied: from where in the piece, to where."""

    piece: StoredPiece
    dtype: torch.dtype
    copies: list[tuple[tuple[slice, ...], torch.Tensor]]


def read(
    path: Folder, name: str, want: Box, manifest: Manifest | None = None, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """A box, (start, stop) for each dim, of a tensor in the checkpoint at `path`."""
    path = Path(path)
    manifest = manifest or read_manifest(path)
    owner, entry = _find(path, manifest, name)
    shape = entry.value_shape
    if len(want) != len(shape) or not all(
        0 <= start <= stop <= n for (start, stop), n in zip(want, shape, strict=True)
    ):
        raise CheckpointError(
            f"{name} has shape {list(shape)}: there is no box {want} in it\n  at        {path}\n"
            "  try       a box within it"
        )
    x = torch.empty(boxes.extents(want), dtype=entry.dtype, device=device)
    fill(path, manifest, [Target.of(owner, entry, want, x)])
    return x


def load_parts(
    path: Folder,
    wanted: Wanted,
    mesh: Mesh,
    rank: int,
    device: str | torch.device = "cpu",
    manifest: Manifest | None = None,
) -> Tensors:
    """A rank's parts of tensors in the checkpoint at `path`, padded with zeros; tied names that lie alike share one
    tensor."""
    path = Path(path)
    manifest = manifest or read_manifest(path)
    parts: dict[tuple[str, Layout], torch.Tensor] = {}
    targets, tensors = [], {}
    for name, (layout, shape, dtype) in wanted.items():
        owner, entry = _find(path, manifest, name)
        if (entry.dtype, entry.value_shape) != (dtype, boxes.checked(name, layout, shape, mesh)):
            mismatch = (
                f"{DTYPE_NAMES[entry.dtype]}{list(entry.value_shape)} in the checkpoint, "
                f"{DTYPE_NAMES.get(dtype, dtype)}{list(shape)} is wanted"
            )
            raise CheckpointError(
                f"{name}: {mismatch}\n  at        {path}\n  try       the model settings that it was saved with"
            )
        if (owner, layout) not in parts:
            box, room = boxes.held(entry.value_shape, layout, mesh, rank), boxes.stored(entry.value_shape, layout, mesh)
            axes = tuple(axis for axis, _ in layout.partial)
            place, ranks = mesh.index(rank, axes), mesh.count(axes)
            own = entry.partial and ranks == entry.shape[0]  # its own summand
            all_have_it = any(kind == MEAN for _, kind in layout.partial)
            full = boxes.extents(box) == room and (own or place == 0 or all_have_it)
            parts[owner, layout] = x = (torch.empty if full else torch.zeros)(room, dtype=dtype, device=device)
            valid = x[tuple(slice(n) for n in boxes.extents(box))]
            if own:
                targets.append(Target(owner, ((place, place + 1), *box), valid.unsqueeze(0)))
            elif place == 0 or all_have_it:
                targets.append(Target.of(owner, entry, box, valid))
        tensors[name] = parts[owner, layout]
    fill(path, manifest, targets)
    return tensors


def load_whole(path: Path, manifest: Manifest, names: Iterable[str], device: torch.device) -> Tensors:
    """Tensors as they were saved, tied names as one; every byte of the checkpoint is checked, wanted or not."""
    owners = {name: _find(path, manifest, name) for name in names}
    entries = dict(owners.values())
    tensors = {
        owner: torch.empty(entry.value_shape, dtype=entry.dtype, device=device) for owner, entry in entries.items()
    }
    fill(
        path,
        manifest,
        [Target.of(owner, entries[owner], boxes.whole(tuple(x.shape)), x) for owner, x in tensors.items()],
        everything=True,
    )
    return {name: tensors[owner] for name, (owner, _) in owners.items()}


def _find(path: Path, manifest: Manifest, name: str) -> tuple[str, StoredTensor]:
    """The name under which a tensor is stored, and where its pieces are."""
    owner = x if isinstance(x := manifest.tensors.get(name), str) else name
    entry = manifest.tensors.get(owner)
    if not isinstance(entry, StoredTensor):
        raise CheckpointError(
            f"there is no {name} in the checkpoint\n  at        {path}\n  try       one of the same model and optimiser"
        )
    return owner, entry


def fill(path: Path, manifest: Manifest, targets: Iterable[Target], everything: bool = False) -> None:
    """Read what the targets want; with `everything`, the rest is read and checked too."""
    jobs: dict[str, list[Job]] = {file: [] for file in manifest.files} if everything else {}
    wanted: dict[str, list[Target]] = {}
    for target in targets:
        wanted.setdefault(target.name, []).append(target)
    for name in manifest.tensors if everything else wanted:
        entry = manifest.tensors[name]
        if isinstance(entry, str):
            continue
        for piece in entry.pieces:
            copies = _copies(boxes.at(piece.offset, piece.shape), wanted.get(name, ()))
            if copies or everything:
                jobs.setdefault(piece.file, []).append(Job(piece, entry.dtype, copies))
    Crew(partial(_read_file, path, file, manifest.files[file], jobs[file]) for file in jobs).join()
    for device in {target.tensor.device for group in wanted.values() for target in group if target.tensor.is_cuda}:
        torch.cuda.synchronize(device)
    for target in (target for group in wanted.values() for target in group):
        target.add_up()


def _copies(piece: Box, targets: Iterable[Target]) -> list[tuple[tuple[slice, ...], torch.Tensor]]:
    """What of a piece goes where."""
    shared = ((target, boxes.common(piece, target.box)) for target in targets)
    return [
        (boxes.inside(box, piece), target.tensor[boxes.inside(box, target.box)])
        for target, box in shared
        if box is not None
    ]


def _read_file(path: Path, name: str, file: File, jobs: list[Job]) -> None:
    try:
        fd = os.open(path / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(path, f"{name}, its header,", _fill(fd, memoryview(bytearray(file.header)), 0), file.sha256)
            for job in sorted(jobs, key=lambda job: job.piece.begin):
                _read_piece(path, fd, job)
        finally:
            os.close(fd)
    except EOFError as e:
        damaged(path, f"{name} ends at byte {e}")
    except OSError as e:
        damaged(path, f"{name} cannot be read: {e.strerror}")


def _read_piece(path: Path, fd: int, job: Job) -> None:
    """Straight to where it is wanted, if that is one place on the host that takes all of it."""
    alone = job.copies[0][1] if len(job.copies) == 1 else None
    direct = (
        alone is not None
        and tuple(alone.shape) == job.piece.shape
        and alone.device.type == "cpu"
        and alone.is_contiguous()
    )
    host = alone if direct and alone is not None else torch.empty(job.piece.shape, dtype=job.dtype)
    _check(
        path, f"{job.piece.file}, byte {job.piece.begin},", _fill(fd, as_bytes(host), job.piece.begin), job.piece.sha256
    )
    for where, target in job.copies if host is not alone else ():
        target.copy_(host[where])


def _fill(fd: int, into: memoryview, begin: int) -> str:
    """Read as many bytes as there is room for, from `begin` on: their checksum."""
    digest, at = hashlib.sha256(), 0
    while at < len(into):
        n = os.preadv(fd, [into[at : at + CHUNK]], begin + at)
        if not n:
            raise EOFError(begin + at)
        digest.update(into[at : at + n])
        at += n
    return digest.hexdigest()


def _check(path: Path, what: str, actual: str, expected: str) -> None:
    if actual != expected:
        damaged(path, f"{what} has sha256 {actual[:16]}…, expected {expected[:16]}…")
