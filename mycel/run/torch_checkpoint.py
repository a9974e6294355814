"""Checkpoints of torch's own kinds, and ours for torch's own loader.

    weights_of(folder, names)      a model's weights from pytorch_model*.bin (shards too), or from a folder that
                                   torch.distributed.checkpoint wrote
    optimizer_slots(folder, names) what an optimiser kept there of each parameter, by name or number, if anything
    CheckpointReader(folder)       torch.distributed.checkpoint.load(state, storage_reader=CheckpointReader(folder)):
                                   our checkpoint, its tensors under the names model.NAME and optimizer.NAME.SLOT

Both of torch's kinds are pickles.  Of a .bin file torch's restricted loader makes tensors and nothing else; the index
of a distributed checkpoint is read with the few classes that it needs, and any other name in it is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mycel.errors import CheckpointError
from mycel.run.checkpoint import latest, load
from mycel.run.shards import MANIFEST, read_manifest

INDEX = ".metadata"  # of a distributed checkpoint
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}  # fmt: skip


def has_torch_weights(folder: Path) -> bool:
    """Is it a folder of torch's own kinds?"""
    return (folder / INDEX).is_file() or any(folder.glob("pytorch_model*.bin"))


def weights_of(folder: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The weights in a folder, by the names that a model gives them; of a distributed checkpoint those of `names`."""
    if (folder / INDEX).is_file():
        return _distributed(folder, [*names])
    saved: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as e:
            raise CheckpointError(
                f"the file holds more than tensors, or is damaged: {str(e).splitlines()[0]}\n  at        {file}\n"
                "  try       saving it as safetensors, where you trust it"
            ) from None
        saved |= {name: x for name, x in held.items() if isinstance(x, torch.Tensor)}
    return saved


class _Restricted(pickle.Unpickler):
    """Reads the index of a distributed checkpoint, and no code of anybody else's."""

    def find_class(self, module: str, name: str) -> Any:
        plain = module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), (torch.dtype, torch.layout))
        )
        if not plain and name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def optimizer_slots(folder: Path, names: Iterable[str]) -> dict[str, dict[str, torch.Tensor]]:
    """What an optimiser kept of each parameter in a distributed checkpoint, {owner: {slot: tensor}}: the owner by its
    name, as torch.distributed.checkpoint.state_dict writes it, or by its number, as an optimiser's state_dict does."""
    if not (folder / INDEX).is_file():
        return {}
    known = _tensors(folder)
    before = _before(known, [*names])
    weights = {f"{before}{name}" for name in names}
    wanted = {key: parts for key in known if key not in weights and (parts := _slot(key)) is not None}
    slots: dict[str, dict[str, torch.Tensor]] = {}
    for key, x in _read(folder, {key: known[key] for key in wanted}).items():
        owner, slot = wanted[key]
        slots.setdefault(owner, {})[slot] = x
    return slots


def _slot(key: str) -> tuple[str, str] | None:
    """optim.state.layers.0.weight.exp_avg => (layers.0.weight, exp_avg)"""
    _, separator, rest = f".{key}".partition(".state.")
    owner, _, slot = rest.rpartition(".")
    return (owner, slot) if separator and owner else None


def _distributed(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """The tensors of these names in a distributed checkpoint, whatever stands before them there (model., say)."""
    known = _tensors(folder)
    before = _before(known, names)
    if before is None:
        raise CheckpointError(
            f"the checkpoint has no {names[0] if names else 'weights'}; it has "
            f"{', '.join([*known][:3]) or 'no tensor'} …\n  at        {folder}\n  try       the model it was saved from"
        )
    wanted = {f"{before}{name}": name for name in names if f"{before}{name}" in known}
    return {wanted[key]: x for key, x in _read(folder, {key: known[key] for key in wanted}).items()}


def _tensors(folder: Path) -> dict[str, Any]:
    """What is known of the tensors in a distributed checkpoint."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {k: v for k, v in _index(folder).state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}


def _read(folder: Path, described: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a distributed checkpoint, whole."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint import load as load_distributed

    class RestrictedReader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return _index(folder)

    state = {key: torch.empty(x.size, dtype=x.properties.dtype) for key, x in described.items()}
    if state:
        load_distributed(state, storage_reader=RestrictedReader(folder), no_dist=True)
    return state


def _before(known: Iterable[str], names: list[str]) -> str | None:
    """What stands before the names of a model in a checkpoint: the shortest that fits the first; None: nothing does."""
    first = names[0] if names else ""
    fits = [key.removesuffix(first) for key in known if key == first or key.endswith(f".{first}")]
    return min(fits, key=len, default=None)


def _index(folder: Path) -> Any:
    from torch.distributed.checkpoint.metadata import StorageMeta

    try:
        with (folder / INDEX).open("rb") as file:
            index: Any = _Restricted(file).load()
        index.storage_meta = getattr(index, "storage_meta", None) or StorageMeta()
        return index
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as e:
        raise CheckpointError(
            f"the index of the distributed checkpoint cannot be read: {e}\n  at        {folder / INDEX}\n"
            "  try       a folder that torch.distributed.checkpoint.save wrote"
        ) from None


def CheckpointReader(folder: str | Path) -> Any:
    """What torch.distributed.checkpoint reads one of our checkpoints with: the one at `folder`, or the last in it."""
    from torch.distributed.checkpoint import StorageReader
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner import LoadItemType
    from torch.futures import Future

    given = Path(folder)
    newest = given if (given / MANIFEST).is_file() else latest(given)
    if newest is None:
        raise CheckpointError(f"there is no checkpoint\n  at        {given}\n  try       the folder of step.save")
    path: Path = newest
    manifest = read_manifest(path)
    stored = {name: manifest.tensors[x] if isinstance(x, str) else x for name, x in manifest.tensors.items()}

    class StoredReader(StorageReader):
        def reset(self, checkpoint_id: Any = None) -> None:
            pass

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            def described(saved: Any) -> TensorStorageMetadata:
                size = torch.Size(saved.value_shape)
                whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
                return TensorStorageMetadata(TensorProperties(dtype=saved.dtype), size, [whole])

            return Metadata({name: described(saved) for name, saved in stored.items()})

        def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            pass

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

        def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
            return plans

        def read_data(self, plan: Any, planner: Any) -> Future[None]:
            names = {item.storage_index.fqn for item in plan.items if item.type != LoadItemType.BYTE_IO}
            tensors = load(path, only=lambda name: name in names).tensors
            for item in plan.items:
                x = tensors[item.storage_index.fqn]
                for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    x = x.narrow(dim, start, size)
                target = planner.resolve_tensor(item).detach()
                target.copy_(x)
                planner.commit_tensor(item, target)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    return StoredReader()
