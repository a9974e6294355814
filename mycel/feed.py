"""A batch on its way to a rank: which part of each tensor is this rank's, cut on the host before it is moved to the
device.

    a batch of 6 rows under [dp] on Mesh(dp=4)      dp=0  rows 0:2   dp=1  rows 2:4   dp=2  rows 4:6   dp=3  no rows

    step(**batch)                        the whole batch     cut ─▶ move ─▶ run
    take = step.local(**like)            such a batch, which needs no data
    take(**part)                         this rank's part    pad ─▶ move ─▶ run
                                         (no padding in it: step.rows, step.slices)

How large the whole is cannot be told from a part (3 of 5 rows, or of 6), and ranks that guess could guess differently:
so it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from mycel.capture import MISS, Captured, Facts, flatten_arguments
from mycel.capture.bind import Call
from mycel.errors import TrainError
from mycel.ir import Layout, Mesh, Program, Type, Var, type_of
from mycel.run import boxes, part_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

Fed = Callable[[Sequence[Any]], list[Any]]  # inputs of a call -> inputs of the program

ALONE = Mesh()
NO_LAYOUTS: Mapping[str, Layout] = {}


@dataclass(frozen=True)
class Feed:
    """The whole batch tensors of a program and how they lie; `at`: which of a call's inputs they are; `leaves`: which
    of them each tensor of the arguments is."""

    inputs: tuple[Var, ...]
    layouts: tuple[Layout, ...]
    at: tuple[int, ...]
    leaves: tuple[str, ...]
    device: torch.device
    mesh: Mesh = ALONE
    rank: int = 0

    def parts(self, rank: int | None = None) -> tuple[Var, ...]:
        """The tensors that a rank (this one) is fed, padding apart."""
        return tuple(Var(v.name, Type(v.dtype, shape)) for v, shape in zip(self.inputs, self.shapes(rank), strict=True))

    def shapes(self, rank: int | None = None) -> list[tuple[int, ...]]:
        """Of a rank's (this one's) part of each tensor."""
        rank = self.rank if rank is None else rank
        layouts = zip(self.inputs, self.layouts, strict=True)
        return [boxes.extents(boxes.held(v.shape, layout, self.mesh, rank)) for v, layout in layouts]

    def cut(self, values: Sequence[Any]) -> list[Any]:
        """Inputs of a call with the whole batch => those with this rank's part, padded, on the device."""
        fed = list(values)
        for i, layout in zip(self.at, self.layouts, strict=True):
            fed[i] = self._moved(fed[i] if layout.is_whole else part_of(fed[i], layout, self.mesh, self.rank))
        return fed

    def pad(self, values: Sequence[Any]) -> list[Any]:
        """Inputs of a call with this rank's part of the batch => the same, padded, on the device."""
        fed = list(values)
        for i, v, layout in zip(self.at, self.inputs, self.layouts, strict=True):
            fed[i] = self._moved(padded(fed[i], boxes.stored(v.shape, layout, self.mesh)))
        return fed

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        return moved(x, self.device) if x.ndim else x

    def types(self, parts: bool) -> list[Type]:
        """Of the tensors of the arguments, in their order: of the whole batch, or of this rank's part."""
        by_name = {v.name: v.type for v in (self.parts() if parts else self.inputs)}
        return [by_name[name] for name in self.leaves]

    def without_data(self) -> list[torch.Tensor]:
        """The whole batch's tensors without data, in the order of the arguments."""
        tensors = {v.name: torch.empty(v.shape, dtype=v.dtype, device="meta") for v in self.inputs}
        return [tensors[name] for name in self.leaves]


def feed_of(
    captured: Captured, program: Program, layouts: Mapping[str, Layout] = NO_LAYOUTS, mesh: Mesh = ALONE, rank: int = 0
) -> Feed:
    """How a program, made of what was captured, is fed; what has no layout is whole."""
    whole = {v.name: v for v in program.inputs}
    at = [i for i, v in enumerate(captured.program.inputs) if v.name in captured.leaves]
    inputs = tuple(whole[captured.program.inputs[i].name] for i in at)
    lie = tuple(layouts.get(v.name, Layout.whole(v.ndim)) for v in inputs)
    return Feed(inputs, lie, tuple(at), tuple(captured.leaves), captured.device, mesh, rank)


# -- calls with this rank's part -------------------------------------------------------------------------------------


class Compiled(Protocol):
    """What was compiled for one form of the batch: the call of this rank's part, and how it is fed."""

    @property
    def local(self) -> Call: ...

    @property
    def feed(self) -> Feed: ...


class Caller(Protocol):
    """A step, or a forward pass: what it has compiled, the last used first, and how it compiles more."""

    @property
    def entries(self) -> list[Any]: ...

    def usable(self, entry: Any) -> bool:
        """Is it still as it was when this was compiled?"""

    def refuse_call(self) -> None:
        """TrainError where now is not the time for one."""

    def prepare(self, *args: Any, **kwargs: Any) -> Any: ...


class Local:
    """A step (or a forward pass) that is called with this rank's part of batches of one form."""

    def __init__(self, caller: Caller, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`args`, `kwargs`: such a whole batch, which may be without data."""
        tensors: list[torch.Tensor] = []
        flatten_arguments((args, kwargs), tensors)
        given = [type_of(x) for x in tensors]
        known = (
            entry.feed for entry in caller.entries if caller.usable(entry) and entry.feed.types(parts=False) == given
        )
        self.caller = caller
        self.feed: Feed = next(known, None) or caller.prepare(*args, **kwargs).entries[0].feed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.caller.refuse_call()
        entries = self.caller.entries
        for i, entry in enumerate(entries):
            if entry.feed == self.feed and self.caller.usable(entry):
                out = entry.local(args, kwargs)
                if out is not MISS:
                    entries.insert(0, entries.pop(i))
                    return out
        whole = self._whole(args, kwargs)
        out = self.caller.prepare(*whole[0], **whole[1]).entries[0].local(args, kwargs)
        assert out is not MISS, "a call does not fit the part it was made for"
        return out

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """A part => the whole batch without data; TrainError where it is no part of one."""
        tensors: list[torch.Tensor] = []
        tree = flatten_arguments((args, kwargs), tensors)
        feed, parts = self.feed, self.feed.parts()
        if [type_of(x) for x in tensors] != feed.types(parts=True):
            names = [path.partition(".")[2] for path in tree.paths("")]
            given = ", ".join(f"{name} {type_of(x)}" for name, x in zip(names, tensors, strict=True))
            what = f"this is not rank {feed.rank}'s part of the batch: {given or 'no tensor'}"
            expected = f"{', '.join(map(str, parts))}\n  of        {', '.join(map(str, feed.inputs))}"
            hint = "step.rows and step.slices say what is this rank's; step(...) takes the whole batch"
            raise TrainError(f"{what}\n  expected  {expected}\n  try       {hint}")
        whole: Arguments = tree.unflatten(iter(feed.without_data()))
        return whole


def refusing_parts(facts: Sequence[Facts]) -> Call:
    """The call with a rank's part, of a program that values of the whole batch decide."""
    asked = "; ".join(str(f) for known in facts for f in known.facts)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise TrainError(
            "values of the whole batch decide what the program is, and this rank has a part of it\n"
            f"  at        {asked}\n"
            "  try       step(...) with the whole batch on every rank, or keep it a tensor"
        )

    return call


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device: itself, if it is there; from pinned memory without waiting."""
    return x if x.device == device else x.to(device, non_blocking=x.is_pinned())


def padded(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A part with zeros behind what it holds."""
    if tuple(x.shape) == tuple(shape):
        return x
    y = x.new_zeros(tuple(shape))
    y[tuple(slice(0, n) for n in x.shape)] = x
    return y


# -- a batch on the host, captured for a program on a device


def without_host_data(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Arguments:
    """Arguments for a capture on this device: for tensors on the host stand ones without data, as only parts are
    moved."""
    if device.type == "cpu":
        return args, kwargs
    tensors: list[torch.Tensor] = []
    tree = flatten_arguments((args, kwargs), tensors)
    stand_ins = {id(x): torch.empty_like(x, device="meta") if x.ndim and x.device.type == "cpu" else x for x in tensors}
    arguments: Arguments = tree.unflatten(iter([stand_ins[id(x)] for x in tensors]))
    return arguments


def refuse_without_data(args: tuple[Any, ...], kwargs: dict[str, Any], model: torch.nn.Module) -> None:
    """TrainError for a call on tensors of the meta device where the model has data, or the other way round."""
    tensors: list[torch.Tensor] = []
    flatten_arguments((args, kwargs), tensors)
    has_data = all(p.device.type != "meta" for p in model.parameters())
    if has_data and any(x.device.type == "meta" for x in tensors):
        raise TrainError(
            "the batch holds no data: it is on the meta device\n"
            "  try       a batch with data; step.prepare(**batch) compiles for one without"
        )
    bare = all(p.device.type == "meta" for p in model.parameters()) and any(True for _ in model.parameters())
    if bare and any(x.device.type != "meta" for x in tensors):
        raise TrainError(
            "the model holds no data: parameters are on the meta device\n"
            "  try       model.to_empty(device=...) and loading its weights; step.prepare(**batch) needs no data"
        )


def from_anywhere(captured: Captured) -> Captured:
    """A captured call whose batch may lie on the host, or where it is computed with."""
    if captured.device.type == "meta":
        return captured
    at = captured.device if captured.device.type == "cpu" else None
    ndims = {v.name: v.ndim for v in captured.program.inputs}
    asked = {k: d for k, d in captured.devices.items() if k in captured.leaves}
    fixed = {k for k, d in asked.items() if not ndims[k] and d is not None and d.type != "meta"}
    return replace(captured, devices={**captured.devices, **{k: at for k in asked if k not in fixed}})
