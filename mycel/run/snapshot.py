"""The state of a run as it is at one moment, on the host: what this rank saves of it, and what all of it is.

    tensors on a mesh ──which parts are mine──▶ views without padding ──copy──▶ host tensors, the rank's own and nobody
    else's

A copy of CUDA tensors is on its way when this returns: work given to the device later waits for it, and so must whoever
reads it (`ready`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from mycel.errors import CheckpointError
from mycel.ir import Layout, Mesh
from mycel.run import boxes
from mycel.run.boxes import Dims
from mycel.run.shards import DTYPE_NAMES, Part, StoredTensor

Tensors = dict[str, torch.Tensor]
Layouts = Mapping[str, tuple[Layout, Dims]]  # by name: how a tensor lies on the mesh, and its global shape
# to the host; the copies are there once the function returned
Copy = Callable[[Tensors], tuple[Tensors, Callable[[], None]]]


@dataclass(frozen=True)
class State:
    """What is to be saved: all tensors by name, without pieces yet, a tied one as another's name; this rank's parts,
    there once `ready` returns."""

    meta: dict[str, Any]
    metric: float | None
    tensors: dict[str, StoredTensor | str]
    parts: list[Part]
    ready: Callable[[], None]
    digest: str  # of what all ranks must agree on


def take(
    tensors: Mapping[str, torch.Tensor],
    meta: dict[str, Any],
    metric: float | None,
    copy: Copy,
    layouts: Layouts,
    mesh: Mesh,
    rank: int,
    there: Mapping[str, frozenset[int]] | None = None,
) -> State:
    """What the caller gave, with names of the same tensor joined and everything copied that could change.  `there`: of
    tensors that some ranks alone hold, these; others give anything of the same shape."""
    try:
        meta = json.loads(json.dumps(meta))
    except (TypeError, ValueError) as e:
        raise CheckpointError(
            f"meta cannot be written as JSON: {e}\n  try       numbers, strings, lists, objects"
        ) from e
    lies = {name: _lies(name, x, layouts, mesh) for name, x in tensors.items()}
    partial = {name: boxes.SAVED[layout.partial[0][1]] for name, (layout, _) in lies.items() if layout.partial}
    lies |= {name: boxes.summands(*lies[name], mesh) for name in partial}
    tensors = {name: x.unsqueeze(0) if name in partial else x for name, x in tensors.items()}
    owner = _owners(tensors, lies)
    own = [name for name, other in owner.items() if name == other]
    items = tuple((*lies[name], tensors[name].itemsize) for name in own)
    saves = boxes.chosen(mesh, rank, items, tuple(there.get(name) for name in own) if there else ())
    held = {name: boxes.held(lies[name][1], lies[name][0], mesh, rank) for i, name in enumerate(own) if i in saves}
    valid = {name: tensors[name].detach()[tuple(slice(n) for n in boxes.extents(box))] for name, box in held.items()}
    host, ready = copy(valid)
    parts = [(name, tuple(start for start, _ in held[name]), x) for name, x in host.items()]
    table: dict[str, StoredTensor | str] = {
        name: StoredTensor(tensors[name].dtype, lies[name][1], (), partial.get(name, "")) if o == name else o
        for name, o in owner.items()
    }
    signature = [
        mesh.sizes(),
        sorted(partial.items()),
        [(name, str(tensors[name].dtype), lies[name][1], str(lies[name][0]), owner[name]) for name in tensors],
    ]
    digest = hashlib.sha256(json.dumps(signature).encode()).hexdigest()
    return State(meta, metric if metric is not None and math.isfinite(metric) else None, table, parts, ready, digest)


def _lies(name: str, x: torch.Tensor, layouts: Layouts, mesh: Mesh) -> tuple[Layout, Dims]:
    """How a tensor lies on the mesh: as is said, else whole on every rank."""
    if x.dtype not in DTYPE_NAMES or x.layout is not torch.strided or x.is_meta or name == "__metadata__":
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES)
        raise CheckpointError(
            f"cannot save {name!r}, a {x.layout} {x.dtype} tensor on {x.device}\n  try       a dense tensor of {known}"
        )
    layout, shape = layouts.get(name) or (Layout.whole(x.dim()), tuple(x.shape))
    shape = boxes.checked(name, layout, shape, mesh)
    if tuple(x.shape) != (expected := boxes.stored(shape, layout, mesh)):
        what = (
            f"cannot save {name!r}: this rank has {list(x.shape)} of it, but a part of {list(shape)} that lies as "
            f"{layout} has {list(expected)}"
        )
        raise CheckpointError(f"{what}\n  at        {mesh}\n  try       the layout that the tensor was made with")
    return layout, shape


def _owners(tensors: Mapping[str, torch.Tensor], lies: Mapping[str, tuple[Layout, Dims]]) -> dict[str, str]:
    """Under which name each is stored: the first of those that are the same memory."""
    owner: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, x in tensors.items():
        same = (
            (x.device, x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg(), lies[name])
            if x.numel()
            else name
        )
        owner[name] = first.setdefault(same, name)
    return owner


def on_host(tensors: Tensors) -> tuple[Tensors, Callable[[], None]]:
    """The tensors themselves where they are contiguous host ones already: the caller waits."""
    return {name: x.resolve_conj().resolve_neg().cpu().contiguous() for name, x in tensors.items()}, lambda: None


class Buffers:
    """Host memory for copies, used again by the next save: allocating it is most of a copy's time."""

    def __init__(self) -> None:
        self.host: Tensors = {}

    def copy(self, tensors: Tensors) -> tuple[Tensors, Callable[[], None]]:
        """Copies of the tensors as they are now: host tensors at once, CUDA ones on a stream of their own that later
        work waits for."""
        self.host = host = {name: _buffer(x, self.host.get(name)) for name, x in tensors.items()}
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


def _buffer(x: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Host memory for a copy of `x`, page-locked if it comes from a GPU and there is any."""
    if old is not None and old.shape == x.shape and old.dtype == x.dtype:
        return old
    if x.is_cuda:
        with suppress(RuntimeError):
            return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return torch.empty(x.shape, dtype=x.dtype)
