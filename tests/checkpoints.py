"""What tests of checkpoints share: equality of bits, a place to save to, a process to kill, ranks in threads, and what
a rank holds of a tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mycel.ir import Layout, Mesh
from mycel.run import shards
from mycel.run.checkpoint import MeshProcess


def bits(x: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return x.dtype, x.shape, bytes(shards.as_bytes(x.detach().cpu().resolve_conj().contiguous()))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(bits(a[k]) == bits(b[k]) for k in a)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name != ".lock")


@contextmanager
def place():
    """A folder for one example of a law, in memory if possible: hundreds of saves that each wait for a disk are
    slow."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


class Child:
    """The process of checkpoint_child.py."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        env = {**os.environ, "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, here / "checkpoint_child.py"], stdin=-1, stdout=-1, env=env)

    def start(self, do: str, path: Path, **job: object) -> int:
        self.process.stdin.write((json.dumps({"do": do, "folder": str(path), **job}) + "\n").encode())
        self.process.stdin.flush()
        return self.hear()["pid"]

    def hear(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def hear_all(self) -> tuple[list[dict], int]:
        """All that is said until the child ends, and how it ended."""
        said = []
        while "ended" not in (last := self.hear()):
            said.append(last)
        return said, last["ended"]

    def end(self) -> tuple[list[int], int]:
        """Steps the child said were saved, and how it ended."""
        said, ended = self.hear_all()
        return [last["saved"] for last in said], ended


@contextmanager
def forked():
    child = Child()
    yield child
    child.process.stdin.close()
    assert child.process.wait(60) == 0


# ranks


def together(mesh: Mesh, act: Callable[[MeshProcess], Any]) -> list[Any]:
    """What `act` gives on each rank of a mesh, in threads that tell each other what they share; the first error of one,
    which ends all."""
    barrier, texts = threading.Barrier(mesh.world, timeout=60), [""] * mesh.world
    results: list[Any] = [None] * mesh.world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        def share(text: str) -> list[str]:
            texts[rank] = text
            barrier.wait()
            all_texts = list(texts)
            barrier.wait()
            return all_texts

        try:
            results[rank] = act(MeshProcess(mesh, rank, share))
        except BaseException as e:
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(mesh.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def part_of(x: torch.Tensor, layout: Layout, mesh: Mesh, rank: int, padding: int = 0) -> torch.Tensor:
    """A rank's part by the definition: each axis, the slowest first, cuts what it finds of a dim into equal rows, with
    `padding` behind."""
    coordinates = (
        dict(zip(mesh.axes, torch.unravel_index(torch.tensor(rank), tuple(mesh.sizes().values())), strict=True))
        if mesh.axes
        else {}
    )
    places = []
    for n, axes in zip(x.shape, layout.dims, strict=True):
        place = torch.arange(n)
        for axis in axes:
            rows = -(-len(place) // mesh[axis])
            place = torch.nn.functional.pad(place, (0, rows * mesh[axis] - len(place)), value=-1).view(
                mesh[axis], rows
            )[coordinates[axis]]
        places.append(place)
    valid = [place[place >= 0] for place in places]
    local = (
        torch.full((*(len(place) for place in places), x.itemsize), padding, dtype=torch.uint8)
        .view(x.dtype)
        .squeeze(-1)
    )
    local[tuple(slice(len(v)) for v in valid)] = x[torch.meshgrid(*valid, indexing="ij")] if valid else x
    return local
