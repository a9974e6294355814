"""What a checkpoint of a run holds, and the way back.

    model.NAME               parameters that train, and buffers
    optimizer.NAME.SLOT      torch's own optimiser state, by the name of its parameter
    step.NAME                counters of the step, loss scale
    error.AXIS.NAME …        what messages keep (`message_state.py`)
    loop.losses, loop.norms  of the steps since the last report, so that the next one is the same as without
                             interruption

The rest is in `meta`: settings, what identifies data and frozen weights, random states.  A run goes on only from a
checkpoint all of which fits.
"""

from __future__ import annotations

import base64
import hashlib
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mycel.errors import CheckpointError
from mycel.run.checkpoint import Loaded, MeshProcess, load, load_named_parts
from mycel.run.reading import Wanted
from mycel.run.shards import Manifest
from mycel.run.snapshot import Layouts
from mycel.step import step_state
from mycel.step.step_state import SharedOut
from mycel.train.assemble import Assembly
from mycel.train.device import describe

SHOWN = 4  # differences in an error message
Tensors = dict[str, torch.Tensor]


def tensors(parts: Assembly, losses: list[torch.Tensor], norms: list[torch.Tensor]) -> Tensors:
    """What this rank holds of the state as it is now: the tensors themselves, not copies."""
    state = {f"model.{name}": x for name, x in _own(parts).items()}
    state |= {f"optimizer.{n}": x for n, x in step_state.optimizer_tensors(parts.module, parts.optimizer).items()}
    state |= {f"step.{name}": x for name, x in parts.step.counters().items()} | parts.step.messages.tensors()
    for name, values in (("losses", losses), ("norms", norms)):
        state[f"loop.{name}"] = torch.stack([x.detach().float() for x in values]) if values else torch.zeros(0)
    return state


def layouts(parts: Assembly, state: Tensors) -> Layouts:
    """How these tensors lie on the mesh, and their global shapes; others are whole on every rank."""
    numbers = {name: x for name, x in state.items() if name.startswith(("step.", "loop."))}
    lying = step_state.layouts(parts.module, parts.optimizer, parts.step.parts, numbers)
    return {**lying, **parts.step.messages.layouts()}


def shared_out(parts: Assembly, state: Tensors) -> SharedOut:
    """The tensors of all ranks, where these hold different ones: stages of a pipeline, sub-models in places."""
    return step_state.shared_out(parts.step.parts, state, layouts(parts, state), parts.team.mesh, parts.team.tell)


def identity(parts: Assembly) -> dict[str, Any]:
    """What must be the same when the run goes on, each by the name it has for people."""
    config = parts.config
    return {
        "the data": parts.data.fingerprint,
        "train.seed": config.train.seed,
        "train.batch x train.accumulate": parts.rows,
        "optimizer.name": config.optimizer.name,
        "the frozen weights": frozen_digest(parts.module, parts.whole),
    }


def machine(parts: Assembly) -> dict[str, str]:
    """Where bits may depend on."""
    return {
        "mycel": version("mycel"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "device": describe(parts.device),
        "parallel": str(parts.team) if parts.team.processes else "one process",
        "train.precision": parts.config.train.precision,
        "train.accumulate": str(parts.config.train.accumulate),
        "train.memory": str(parts.config.train.memory),
        "train.compile": str(parts.config.train.compile),
    }


def frozen_digest(
    module: nn.Module, whole: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, p: p.detach()
) -> str:
    """A hash over the parameters that do not train: exact sums of their bits, made where they lie; empty if all of them
    train."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
    if not frozen:
        return ""
    bit_sums = []
    for name, p in frozen:
        x = whole(name, p)
        bit_sums.append(
            ((name, tuple(x.shape), str(x.dtype)), x.contiguous().view(bits[x.element_size()]).sum(dtype=torch.int64))
        )
    sums = torch.stack([total for _, total in bit_sums]).tolist()
    checksums = [(*kind, total) for (kind, _), total in zip(bit_sums, sums, strict=True)]
    return hashlib.blake2b(repr(checksums).encode(), digest_size=16).hexdigest()


def random_state(device: torch.device) -> dict[str, str]:
    """torch's generators, on the host and on the device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(x.numpy().tobytes()).decode() for name, x in states.items()}


def set_random_state(saved: Mapping[str, str], device: torch.device) -> None:
    """As `random_state` found them; a generator that was not saved keeps its seed."""
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in saved.items()
    }
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


# -- the way back ----------------------------------------------------------------------------------------------------


def restore(loaded: Loaded, parts: Assembly) -> list[str]:
    """A checkpoint into the parts of a run, random state apart; notes on what may make other bits.  Refused whole if it
    does not fit."""
    own, saved = _own(parts), _part(loaded, "model.")
    check_shapes(loaded.path, own, saved)
    _check_identity(loaded, parts)
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(saved[name])
    parameters = dict(parts.module.named_parameters())
    for name, x in _part(loaded, "optimizer.").items():
        owner, _, slot = name.rpartition(".")
        parts.optimizer.state[parameters[owner]][slot] = x.to(parts.device)
    parts.step.set_counters(_part(loaded, "step."))
    parts.step.messages.take(loaded.tensors, whole=parts.step.parts is None)
    before, now = loaded.meta["machine"], machine(parts)
    changed = [f"{name} was {before[name]}, is {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    return (
        [f"{'; '.join(changed)}: losses may differ in their last digits from those of an uninterrupted run"]
        if changed
        else []
    )


def take_weights(parts: Assembly, checkpoint: Path) -> None:
    """The model's tensors as they are in another checkpoint of the run, whose other state stays as it is."""
    with parts.opened():
        if parts.team.processes is None:
            loaded = load(checkpoint, parts.device, only=lambda name: name.startswith("model."))
        else:
            loaded = load_named_parts(checkpoint, lambda m: _of_model(wanted(parts, m)), reader(parts), parts.device)
        own, saved = _own(parts), _part(loaded, "model.")
        check_shapes(loaded.path, own, saved)
        with torch.no_grad():
            for name, x in own.items():
                x.copy_(saved[name])


def _of_model(tensors: Wanted) -> Wanted:
    return {name: x for name, x in tensors.items() if name.startswith("model.")}


def wanted(parts: Assembly, manifest: Manifest) -> Wanted:
    """This rank's parts of what a checkpoint holds, however they were saved."""
    assert parts.step.parts is not None
    wanted_here = step_state.wanted(parts.step.parts, _own(parts), manifest)
    held = {f"model.{name}" for name in _own(parts)}
    return {n: x for n, x in wanted_here.items() if n in held or not _is_foreign(parts, n)}


def reader(parts: Assembly) -> MeshProcess:
    """This rank among those that load together, where its parts are: in the mesh of its place, if it has one."""
    held = parts.step.parts
    savers = parts.team.savers
    return savers if held is None else replace(savers, mesh=held.ranks.mesh, rank=held.ranks.rank)


def _own(parts: Assembly) -> Tensors:
    """Trained parameters and buffers that this rank holds."""
    own = step_state.model_tensors(parts.module, frozen=False)
    return {name: x for name, x in own.items() if not _is_foreign(parts, f"model.{name}")}


def _is_foreign(parts: Assembly, name: str) -> bool:
    """Does another stage of the pipeline hold it?"""
    kind, _, rest = name.partition(".")
    held, owner = parts.step.parts, rest if kind == "model" else rest.rpartition(".")[0]
    return held is not None and bool(held.owners) and kind in ("model", "optimizer") and not held.is_own(owner)


def pending(loaded: Loaded, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and gradient norms of the steps since the last report."""
    losses, norms = (list(loaded.tensors[f"loop.{name}"].to(device).unbind()) for name in ("losses", "norms"))
    return losses, norms


def lightened(loaded: Loaded) -> Loaded:
    """A checkpoint without what has been restored: a copy of all weights need not stay in memory."""
    return replace(loaded, tensors={name: x for name, x in loaded.tensors.items() if name.startswith("loop.")})


def _part(loaded: Loaded, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): x for name, x in loaded.tensors.items() if name.startswith(prefix)}


def _check_identity(loaded: Loaded, parts: Assembly) -> None:
    before, now = loaded.meta["identity"], identity(parts)
    differences = [_difference(name, before[name], now[name]) for name in now if before[name] != now[name]]
    if differences:
        raise CheckpointError(
            f"{'; '.join(differences)}\n  at        {loaded.path}\n"
            "  try       the data, model and settings that the run was started with"
        )


def _difference(name: str, before: Any, now: Any) -> str:
    """Hashes say nothing to people; numbers and names do."""
    if name == "the data":
        return "the data is not what the run was started with: files, tokenizer, length or split are others"
    if name == "the frozen weights":
        return "the model's frozen weights are not those that the run was started with"
    return f"{name} is {now}, in the checkpoint it is {before}"


def kind(x: torch.Tensor) -> str:
    """float32 of a tensor."""
    return str(x.dtype).removeprefix("torch.")


def check_shapes(path: Path, own: Tensors, saved: Tensors) -> None:
    """CheckpointError where tensors of a model are not those of a checkpoint, by name, dtype and shape."""
    type_text: Callable[[str, Tensors], str] = lambda name, of: (
        f"{kind(of[name])}{list(of[name].shape)}" if name in of else "not there"
    )
    wrong = [name for name in dict.fromkeys([*own, *saved]) if type_text(name, own) != type_text(name, saved)]
    if wrong:
        rows = "".join(
            f"\n  {name}: {type_text(name, saved)} in the checkpoint, {type_text(name, own)} in the model"
            for name in wrong[:SHOWN]
        )
        more = f"\n  and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        what = f"the checkpoint is of another model: {len(wrong)} tensors differ{rows}{more}"
        raise CheckpointError(
            f"{what}\n  at        {path}\n  try       the model settings that the run was started with"
        )
