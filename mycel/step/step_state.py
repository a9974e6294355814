"""All that a step holds, whole or in parts: the model, the optimiser's state, the step's counters.

whole state ─▶ state_dict(), load_state_dict()      as torch's; gathered on every rank, cut to this rank's part
in parts    ─▶ save(folder), load(folder)           checkpoints (`run/checkpoint.py`), by all ranks, under any plan
the model   ─▶ whole(), export(folder)

model.NAME, optimizer.NAME.SLOT, step.NAME          tensors of a checkpoint
error.AXIS.NAME, outer.SLOT.NAME                    and what messages keep (`message_state.py`)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mycel.errors import CheckpointError, MycelError, TrainError
from mycel.ir import Layout, Mesh, Role, Type, parse_typed, typed
from mycel.message_state import MessageState, role_of
from mycel.parts import ShardedModel
from mycel.run import boxes, part_of, settle_hosts
from mycel.run.checkpoint import ALONE, Loaded, MeshProcess, Saver, load, load_latest, load_latest_parts
from mycel.run.reading import Wanted, load_parts
from mycel.run.shards import MANIFEST, Manifest, read_manifest
from mycel.run.shares import Shares
from mycel.run.snapshot import Layouts
from mycel.run.torch_checkpoint import has_torch_weights, optimizer_slots, weights_of
from mycel.step import nested_state

Tensors = dict[str, torch.Tensor]
NAME = "model.safetensors"  # of weights alone
ADDED = ("params", "initial_lr")  # what groups have besides options; the second of a scheduler


def model_tensors(model: nn.Module, frozen: bool = True) -> Tensors:
    """A model's state as it is held, by name; without `frozen`, what training changes of it."""
    settle_hosts()
    state = model.state_dict(keep_vars=True)
    return {
        name: x
        for name, x in state.items()
        if isinstance(x, torch.Tensor) and (frozen or x.requires_grad or not isinstance(x, nn.Parameter))
    }


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimiser's state as it is held, by parameter and slot."""
    settle_hosts()
    tensors: Tensors = {}
    for name, p in model.named_parameters():
        for slot, x in optimizer.state.get(p, {}).items():
            if not nested_state.is_plain(x):
                tensors |= {f"{name}.{label}": leaf for label, leaf in _flatten(name, slot, x)[0].items()}
            elif isinstance(x, torch.Tensor):
                tensors[f"{name}.{slot}"] = x
    return tensors


def _flatten(name: str, slot: str, value: Any) -> tuple[Tensors, Any]:
    """A slot of more than a tensor or number as both; refused where it holds what a checkpoint cannot."""
    try:
        return nested_state.flatten(value, slot)
    except TypeError as error:
        raise CheckpointError(
            f"the optimiser's state holds a {error}, which no checkpoint can\n"
            f"  at        {slot} of {name}\n"
            "  try       torch.save(step.state_dict(), FILE), or lists, tuples and dicts of tensors and numbers"
        ) from None


def layouts(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: ShardedModel | None, numbers: Tensors
) -> Layouts:
    """How the tensors of a checkpoint lie on the mesh, and their global shapes; others are whole on every rank.
    `numbers`: what replicas have each of their own besides model and optimiser."""
    if parts is None:
        return {}
    held = model_tensors(model)
    placements = {f"model.{name}": (parts.lies(name, x), tuple(parts.shapes[name])) for name, x in held.items()}
    for name, x in optimizer_tensors(model, optimizer).items():
        owner, _, slot = name.rpartition(".")
        known = parts.slots.get(Role("state", slot, of=owner)) if x.dim() else None
        layout, shape = (known[0], known[1].shape) if known is not None else (Layout.whole(x.dim()), tuple(x.shape))
        placements[f"optimizer.{name}"] = parts.apart(layout), shape
    return placements | {name: (parts.apart(Layout.whole(x.dim())), tuple(x.shape)) for name, x in numbers.items()}


def wanted(parts: ShardedModel, own: Tensors, manifest: Manifest) -> Wanted:
    """This rank's parts of what a checkpoint holds, however they were saved; `own`: what the model has."""
    specs = {f"model.{name}": (parts.lies(name, x), tuple(parts.shapes[name]), x.dtype) for name, x in own.items()}
    for name, entry in manifest.tensors.items():
        saved = manifest.tensors[entry] if isinstance(entry, str) else entry
        if isinstance(saved, str) or name in specs:
            continue
        kind, _, rest = name.partition(".")
        owner, _, slot = rest.rpartition(".")
        role = Role("state", slot, of=owner) if kind == "optimizer" else role_of(name)
        if not parts.is_own(rest if kind == "model" else role.of if role is not None else ""):
            continue  # another stage's
        shape = saved.value_shape
        known = parts.slot(role, Type(saved.dtype, shape)) if role is not None else None
        fits = known is not None and known[1].shape == shape
        layout = known[0] if known and fits else Layout.whole(len(shape))
        specs[name] = layout if role is not None and kind != "optimizer" else parts.apart(layout), shape, saved.dtype
    return specs


@dataclass(frozen=True)
class SharedOut:
    """The tensors of a checkpoint where ranks hold different ones, in the same order on all: what this rank has, and
    for others something of their shape that takes no memory; how they lie; and who has them."""

    tensors: Tensors
    layouts: Layouts
    there: dict[str, frozenset[int]]

    @staticmethod
    def of(own: Tensors, lying: Layouts, mesh: Mesh, tell: Callable[[Any], list[Any]]) -> SharedOut:
        """All ranks tell what they hold."""
        whole = {name: lying.get(name) or (Layout.whole(x.dim()), tuple(x.shape)) for name, x in own.items()}
        tied = {id(x): name for name, x in reversed(own.items())}
        texts = [[n, typed(Type(x.dtype, whole[n][1]), whole[n][0]), tied[id(x)]] for n, x in own.items()]
        tensors, layouts = dict[str, torch.Tensor](), dict[str, tuple[Layout, tuple[int, ...]]]()
        there: dict[str, set[int]] = {}
        for rank, held in enumerate(tell(texts)):
            for name, text, first in held:
                there.setdefault(name, set()).add(rank)
                if name in layouts:
                    continue
                type, layout = parse_typed(text)
                layouts[name] = layout, type.shape
                stored = boxes.stored(type.shape, layout, mesh)
                nothing = lambda dtype=type.dtype, shape=stored: torch.zeros((), dtype=dtype).expand(shape)
                tensors[name] = own[name] if name in own else tensors[first] if first in tensors else nothing()
        return SharedOut(tensors, layouts, {name: frozenset(ranks) for name, ranks in there.items()})


def shared_out(
    parts: ShardedModel | None, tensors: Tensors, lying: Layouts, mesh: Mesh, tell: Callable[[Any], list[Any]]
) -> SharedOut:
    """The tensors of a checkpoint as ranks write them; all ranks call this.  Of sub-models on meshes of their own each
    tensor is whole: a manifest has one mesh."""
    if parts is None or not parts.owners:
        return SharedOut(tensors, lying, {})
    if parts.ranks.world is not parts.ranks:
        wholes = {id(x): parts.gather(x, *lying[name]) for name, x in tensors.items() if name in lying}
        tensors, lying = {name: wholes.get(id(x), x) for name, x in tensors.items()}, {}
    return SharedOut.of(tensors, lying, mesh, tell)


def of_all_stages(method: Callable[..., Any]) -> Callable[..., Any]:
    """In a pipeline: while every rank has what all stages hold."""

    @functools.wraps(method)
    def run(self: StepState, *args: Any, **kwargs: Any) -> Any:
        with self.split.complete() if self.split is not None else contextlib.nullcontext():
            return method(self, *args, **kwargs)

    return run


class StepState:
    """The state of one step; `counters` gives and takes the numbers that it keeps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: ShardedModel | None,
        counters: Callable[[], Tensors],
        set_counters: Callable[[Mapping[str, torch.Tensor]], None],
        messages: MessageState,
    ) -> None:
        self.model, self.optimizer, self.parts = model, optimizer, parts
        self.counters, self.set_counters, self.messages = counters, set_counters, messages
        self._ranks: MeshProcess | None = None

    @property
    def split(self) -> ShardedModel | None:
        """How ranks hold the model, once they do in parts."""
        return self.parts if self.parts is not None and self.parts.is_split else None

    @property
    def rank(self) -> int:
        """In the mesh of the plan; of sub-models on meshes of their own, in that of this rank's place."""
        return self.split.ranks.rank if self.split is not None else 0

    @property
    def number(self) -> int:
        """Among all ranks."""
        return self.split.ranks.world.rank if self.split is not None else 0

    # -- whole -------------------------------------------------------------------------------------------------------

    @of_all_stages
    def state_dict(self) -> dict[str, Any]:
        """{"model", "optimizer", "step"}: the first two as torch's own, whole on every rank; all of them call this.  Of
        ranks with parts all of it is a copy, since what is gathered has to be: later steps change none of it."""
        settle_hosts()
        self._fetch_state_of_torch()
        with self._open():
            model = {name: self._whole(name, x) for name, x in self.model.state_dict(keep_vars=True).items()}
            optimizer = self.optimizer.state_dict()
        names = self._names()
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {}
        for i, held in optimizer["state"].items():
            name = names.get(id(ordered[i]), "")
            state[i] = {slot: self._whole_slot(name, slot, x) for slot, x in held.items()}
        whole = {"model": model, "optimizer": {**optimizer, "state": state}, "step": self.counters()}
        return whole | ({"messages": self.messages.gathered()} if self.messages.held else {})

    def _fetch_state_of_torch(self) -> None:
        """What an optimiser that runs as it is keeps of parameters of other stages, for as long as all that they hold
        is here."""
        parts = self.split
        if parts is None or not parts.owners:
            return
        own: dict[tuple[str, str], torch.Tensor] = {}
        slots_here: dict[str, dict[str, Any]] = {}  # by parameter: tensors with their types, and what holds them
        params = dict(self.model.named_parameters())
        for name, p in params.items():
            for slot, x in self.optimizer.state.get(p, {}).items() if parts.is_own(name) else ():
                if Role("state", slot, of=name) not in parts.slots:
                    tensors, described = _flatten(name, slot, x)
                    own |= {(name, label): tensor for label, tensor in tensors.items()}
                    types = {label: str(Type(tensor.dtype, tuple(tensor.shape))) for label, tensor in tensors.items()}
                    slots_here.setdefault(name, {})[slot] = [types, described]
        everywhere = {name: slots for each in self.process.tell(slots_here) for name, slots in each.items()}
        for name, slots in sorted(everywhere.items()):
            for slot, (types, described) in slots.items():
                tensors = {
                    label: parts.whole_from_first(name, own.get((name, label)), parse_typed(text)[0])
                    for label, text in types.items()
                }
                if not parts.is_own(name):
                    self.optimizer.state[params[name]][slot] = nested_state.unflatten(described, tensors)

    @of_all_stages
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave, under any plan; every rank is given all of it, and takes its part."""
        if missing := [name for name in ("model", "optimizer", "step") if name not in state]:
            raise TrainError(
                f"the state of a step has no {missing[0]!r}: {', '.join(map(str, state)) or 'nothing'}\n"
                "  try       what step.state_dict() gave; a model's own goes to model.load_state_dict, in step.whole()"
            )
        self._refuse_other_optimizer(state["optimizer"].get("param_groups", ()), TrainError, "load_state_dict")
        with self.whole(loading=True):
            self.model.load_state_dict(state["model"])
        self._load_optimizer(state["optimizer"])
        self.set_counters(state["step"])
        self.messages.take({name: x.clone() for name, x in state.get("messages", {}).items()}, whole=True)

    def _refuse_other_optimizer(self, groups: Iterable[Mapping[str, Any]], error: type[MycelError], at: object) -> None:
        """Options that this optimiser has not, where some that it has are missing: another one's.  A newer version of
        torch adds some, a scheduler too, but takes none away."""
        for group in groups:
            own = {name for name, value in self.optimizer.defaults.items() if _is_json(value)}
            missing, strange = sorted(own - group.keys()), sorted(group.keys() - {*self.optimizer.defaults, *ADDED})
            if missing and strange:
                raise error(
                    f"the state is of another optimiser: it has {', '.join(strange[:3])}, and no "
                    f"{', '.join(missing[:3])}\n  this is   {type(self.optimizer).__module__}."
                    f"{type(self.optimizer).__qualname__}\n  at        {at}\n"
                    "  try       the optimiser it was saved with; for weights alone what step.export wrote"
                )

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """The optimiser's state, whole, of which this rank keeps its part."""
        with self._open():
            self.optimizer.load_state_dict(state)
        for held in self.optimizer.state.values():  # of its own: torch takes the tensors that it is given
            held.update({slot: nested_state.copied(x) for slot, x in held.items()})
        if self.split is not None:
            self.split.cut_state()

    @contextlib.contextmanager
    def whole(self, rank: int | None = None, loading: bool = False) -> Iterator[nn.Module]:
        """The model, whole inside: on every rank, which then keep their parts of what it is at the end; or on one, to
        be looked at.  All ranks enter it.  Of replicas it is the mean, and each keeps its own model if nothing was
        changed, unless it was `loading`."""
        parts = self.split
        if parts is None:
            yield self.model
            return
        configured = contextlib.nullcontext() if rank is None else _configured(self.model)
        with parts.complete(), parts.opened(), configured:
            yield from self._gathered(parts, rank, loading)

    def _gathered(self, parts: ShardedModel, rank: int | None, loading: bool) -> Iterator[nn.Module]:
        """The model put together from the parts of all ranks; then in parts again."""
        lying = {name: parts.lies(name, x) for name, x in parts.tensors()}
        held = {name: x for name, x in parts.tensors() if not lying[name].is_whole}
        before = {name: x.data for name, x in held.items()}
        done: set[int] = set()
        versions: dict[int, int] = {}
        for name, x in held.items():
            if id(x) not in done:
                done.add(id(x))
                gathered = parts.gather(before[name], lying[name], parts.shapes[name])
                if rank is None or rank == self.number:
                    x.data = gathered.clone() if gathered is before[name] else gathered
                versions[id(x)] = x._version
        try:
            yield self.model
        finally:
            done.clear()
            for name, x in held.items():
                if id(x) in done:
                    continue
                done.add(id(x))
                is_same = bool(lying[name].partial) and not loading and x._version == versions[id(x)]
                if rank is None and not is_same:
                    before[name].copy_(part_of(x.data, parts.layouts[name], parts.plan.mesh, self.rank))
                x.data = before[name]

    def _whole(self, name: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        parts = self.split
        if parts is None:
            return x.detach()
        if name not in parts.layouts:
            return x.detach().clone()
        return _apart(parts.gather(x.detach(), parts.lies(name, x), parts.shapes[name]), x)

    def _whole_slot(self, name: str, slot: str, x: Any) -> Any:
        parts, role = self.split, Role("state", slot, of=name)
        if parts is None or not isinstance(x, torch.Tensor):
            return x
        if role not in parts.slots:
            return x.clone()
        layout, type = parts.slots[role]
        is_cut = tuple(x.shape) != type.shape or layout.is_whole
        return _apart(parts.gather(x, parts.apart(layout if is_cut else Layout.whole(x.ndim)), type.shape), x)

    def reorder(self, orders: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Rows of tensors of the model along a dim in another order, and those of the optimiser's state of them: row i
        becomes what row order[i] was.  All ranks call this, and hold one tensor at a time whole."""
        with self._open():
            tensors = dict([*self.model.named_parameters(), *self.model.named_buffers()])
            for name, (dim, order) in orders.items():
                x = tensors[name]
                rows = torch.tensor(order, device=x.device)
                layout = self.split.layouts[name] if self.split is not None else Layout.whole(x.dim())
                self._put(x.data, self._whole(name, x).index_select(dim, rows), layout)
                for slot, held in self.optimizer.state.get(x, {}).items() if isinstance(x, nn.Parameter) else ():
                    whole = self._whole_slot(name, slot, held)
                    if not isinstance(held, torch.Tensor) or whole.ndim != x.ndim or whole.shape[dim] != len(order):
                        continue  # a number, or what is one for all rows
                    known = self.split.slots.get(Role("state", slot, of=name)) if self.split is not None else None
                    is_cut = known is not None and tuple(held.shape) != tuple(whole.shape)
                    layout = known[0] if known is not None and is_cut else Layout.whole(held.dim())
                    self._put(held, whole.index_select(dim, rows.to(whole.device)), layout)

    def _put(self, held: torch.Tensor, whole: torch.Tensor, layout: Layout) -> None:
        """This rank's part of a tensor, where it lies."""
        parts = self.split
        held.copy_(whole if parts is None else part_of(whole, layout, parts.plan.mesh, self.rank))

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.model.named_parameters()}

    def _open(self) -> contextlib.AbstractContextManager[None]:
        return self.split.opened() if self.split is not None else contextlib.nullcontext()

    # -- folders -----------------------------------------------------------------------------------------------------

    def export(self, folder: str | Path) -> Path:
        """The model in a folder of its own: in Hugging Face form where it is one of theirs, else model.safetensors.
        All ranks call this, the first one writes."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise TrainError(f"there is something already\n  at        {folder}\n  try       another folder")
        partial = folder.with_name(f".{folder.name}.partial")
        with self.whole(rank=0):
            if self.number == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                _write_model(self.model, partial)
                if folder.exists():
                    folder.rmdir()
                partial.rename(folder)
        self.process.tell(None)  # it is there for all
        return folder

    def save(self, folder: str | Path, number: int, keep: int) -> Path:
        """A checkpoint FOLDER/step-NUMBER, written by all ranks, each of what it holds; when this returns it is on
        disk."""
        with self._open():
            tensors = {f"model.{name}": x for name, x in self._own().items()}
            numbers = {f"step.{name}": x for name, x in self.counters().items()}
            lying = {**layouts(self.model, self.optimizer, self.split, numbers), **self.messages.layouts()}
        tensors |= {f"optimizer.{name}": x for name, x in optimizer_tensors(self.model, self.optimizer).items()}
        tensors |= numbers | self.messages.tensors()
        plan = str(self.split.written.given) if self.split is not None else None
        out = shared_out(self.split, tensors, lying, self.process.mesh, self.process.tell)
        meta = {"optimizer": self._plain_of_all(), "steps": number}
        with Saver(folder, keep, asynchronous=False, ranks=self.process, plan=plan) as saver:
            saver.save(number, out.tensors, meta, layouts=out.layouts, there=out.there)
        if saver.last is None:
            raise CheckpointError(next(iter(saver.poll()), "nothing was saved"))
        return saver.last

    def _own(self) -> Tensors:
        """What this rank holds of the model's state."""
        held, parts = model_tensors(self.model), self.split
        return held if parts is None else {name: x for name, x in held.items() if parts.is_own(name)}

    def load(self, folder: str | Path) -> int:
        """Continue from the newest undamaged checkpoint in a folder (or from the checkpoint that it is), saved under
        any plan: the number of steps it was saved after.  A folder of weights alone gives the model those."""
        folder = Path(folder)
        if (folder / NAME).is_file() or any(folder.glob("*.safetensors.index.json")) or has_torch_weights(folder):
            return self._load_weights(folder)
        with self._open():
            own = self._own()
        parts, device = self.split, next((x.device for x in own.values()), torch.device("cpu"))
        of_ranks = lambda saved: wanted(parts, own, saved) if parts is not None else {}
        if (folder / MANIFEST).is_file():
            manifest = read_manifest(folder)
            tensors = (
                load(folder, device).tensors
                if parts is None
                else load_parts(folder, of_ranks(manifest), parts.ranks.mesh, self.rank, device, manifest)
            )
            loaded = Loaded(manifest.step, tensors, manifest.meta, folder)
        elif parts is None:
            loaded, _ = load_latest(folder, device)
        else:
            mine = replace(self.process, mesh=parts.ranks.mesh, rank=self.rank)
            loaded, _ = load_latest_parts(folder, of_ranks, mine, device)
        self._take(loaded, own)
        return loaded.step

    def _take(self, loaded: Loaded, own: Tensors) -> None:
        """A checkpoint's tensors, this rank's parts of them, into what is there."""
        named = lambda kind: {n.removeprefix(kind): x for n, x in loaded.tensors.items() if n.startswith(kind)}
        saved = named("model.")
        missing = [name for name, x in own.items() if name not in saved and x.requires_grad]
        strange = [name for name, x in saved.items() if name not in own or x.shape != own[name].shape]
        if wrong := [*missing, *strange]:
            raise CheckpointError(
                f"the checkpoint is of another model: {len(wrong)} tensors differ, {wrong[0]} the first\n"
                f"  at        {loaded.path}\n  try       the model it was saved from"
            )
        parameters, plain = dict(self.model.named_parameters()), loaded.meta.get("optimizer", {})
        self._refuse_other_optimizer(plain.get("groups", ()), CheckpointError, loaded.path)
        with torch.no_grad():
            for name, x in saved.items():
                own[name].copy_(x)
        self.optimizer.state.clear()
        for name, x in named("optimizer.").items():
            owner, _, slot = name.rpartition(".")
            self.optimizer.state[parameters[owner]][slot] = x
        for name, values in plain.get("state", {}).items():
            if self.split is None or self.split.is_own(name):
                self.optimizer.state[parameters[name]].update(values)
        for name, slots in plain.get("nested", {}).items():
            if self.split is None or self.split.is_own(name):
                self._put_together(self.optimizer.state[parameters[name]], slots, loaded.path)
        for group, options in zip(self.optimizer.param_groups, plain.get("groups", ()), strict=False):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
        self.set_counters(named("step."))
        is_shared = self.split is not None and bool(self.split.owners)
        self.messages.take(loaded.tensors, self.split is None, *([self.process.tell] if is_shared else []))

    def _put_together(self, held: dict[str, Any], slots: Mapping[str, Any], at: Path) -> None:
        """Slots of more than a tensor or number, in the place of their tensors."""
        labels = [label for label in held if any(label.startswith(f"{slot}/") for slot in slots)]
        tensors = {label: held.pop(label) for label in labels}
        for slot, described in slots.items():
            try:
                held[slot] = nested_state.unflatten(described, tensors)
            except LookupError as error:
                raise CheckpointError(
                    f"the optimiser's state is made of {error.args[0]}, which is not loaded\n  at        {at}\n"
                    "  try       the optimiser it was saved with"
                ) from None

    def _plain_of_all(self) -> dict[str, Any]:
        """The same of all stages, which one rank writes; all call this."""
        plain = self._plain()
        if self.split is None or not self.split.owners:
            return plain
        by_rank = self.process.tell([plain["state"], plain.get("nested", {})])
        state, nested = ({name: x for each in by_rank for name, x in each[i].items()} for i in (0, 1))
        return {**plain, "state": state, **({"nested": nested} if nested else {})}

    def _plain(self) -> dict[str, Any]:
        """What of the optimiser is no tensor, and JSON can hold: options of its groups, numbers among its state, and
        how what is neither is made of tensors and numbers."""
        names = self._names()
        slots = {names[id(p)]: held for p, held in self.optimizer.state.items() if id(p) in names}
        numbers = lambda held: {k: v for k, v in held.items() if isinstance(v, nested_state.SCALARS)}
        nested = lambda name, held: {
            k: _flatten(name, k, v)[1] for k, v in held.items() if not nested_state.is_plain(v)
        }
        state = {name: plain for name, held in slots.items() if (plain := numbers(held))}
        described = {name: more for name, held in slots.items() if (more := nested(name, held))}
        groups = [{k: v for k, v in g.items() if k != "params" and _is_json(v)} for g in self.optimizer.param_groups]
        return {"state": state, "groups": groups, **({"nested": described} if described else {})}

    def _load_weights(self, folder: Path) -> int:
        """The weights in safetensors files, or in those of torch, tied ones by any of their names."""
        from safetensors.torch import load_file

        saved: Tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            saved |= load_file(file)
        with self.whole(loading=True):
            state = model_tensors(self.model)
            saved = saved or weights_of(folder, state)
            there = {id(x) for name, x in state.items() if name in saved}
            missing = [f"no {name}" for name, x in state.items() if id(x) not in there]
            strange = [f"{name}, which the model has not" for name in saved if name not in state]
            others = [
                f"{name} is {list(x.shape)}, the model's is {list(state[name].shape)}"
                for name, x in saved.items()
                if name in state and x.shape != state[name].shape
            ]
            if wrong := [*others, *missing, *strange]:
                raise CheckpointError(
                    f"the weights are of another model: {wrong[0]}\n  at        {folder}\n"
                    "  try       the folder of this model"
                )
            self.model.load_state_dict(saved, strict=False)
        if slots := optimizer_slots(folder, state):
            self._load_slots(folder, slots)
        return 0

    def _load_slots(self, folder: Path, slots: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """What an optimiser of torch's kept of parameters, by their names or numbers."""
        names = self._names()
        ordered = [names.get(id(p), "") for group in self.optimizer.param_groups for p in group["params"]]
        numbers = {**{str(i): i for i in range(len(ordered))}, **{name: i for i, name in enumerate(ordered) if name}}
        if strange := [owner for owner in slots if owner not in numbers]:
            raise CheckpointError(
                f"the optimiser's state is of another model: {strange[0]}\n  at        {folder}\n"
                "  try       the folder of this model and optimiser"
            )
        with self._open():
            groups = self.optimizer.state_dict()["param_groups"]
        self._load_optimizer({"state": {numbers[k]: held for k, held in slots.items()}, "param_groups": groups})

    @property
    def process(self) -> MeshProcess:
        """This rank among those that save and load together."""
        if self.split is None:
            return ALONE
        if self._ranks is None:
            ranks = self.split.ranks.world
            share = (
                Shares(ranks.meeting, "checkpoint", ranks.watch) if ranks.meeting is not None else lambda text: [text]
            )
            self._ranks = MeshProcess(ranks.mesh, ranks.rank, share)
        return self._ranks


def _apart(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """With memory of its own, other than that of what is held."""
    return x.clone() if x.untyped_storage().data_ptr() == held.untyped_storage().data_ptr() else x


def _is_json(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


@contextlib.contextmanager
def _configured(model: Any) -> Iterator[None]:
    """What `save_pretrained` writes into a model's configuration is gone at the end: with it this rank alone would
    capture the step again, and wait for the others."""
    own = {name: x for name, x in vars(model).items() if name in ("config", "generation_config")}
    vars(model).update(copy.deepcopy(own))
    try:
        yield
    finally:
        vars(model).update(own)


def _write_model(model: Any, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        with _configured(model):
            model.save_pretrained(folder)
        return
    from safetensors.torch import save_model

    save_model(model, str(folder / NAME))
