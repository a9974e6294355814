"""What of a plan is given before the search: it decides the rest.

mesh, zero, microbatches      as in a plan; the mesh with any of the axes of `search_space.py`
stages, schedule              a pipeline of so many
place                         sub-models on ranks of their own, as in a plan; or `auto`: they are tried, even where the
                              best plan hardly waits for anything
offload                       what may lie on the host, in every plan that is looked at; none: nothing does in any
compress                      a codec by axis, or `auto`: the search picks one, or none.  Gradients that travel
                              encoded are not quite the same, so it is never picked unasked
gather                        with ZeRO of a level under which parameters travel so
send                          where there are stages, or experts on several ranks
at_once                       two microbatches at once in every plan, or in none
sync                          along dp, the slowest axis: as many replicas as the mesh says, or one for each host
batch, parameters, activations, sums, recompute, monitor

An axis that layouts, the batch, ZeRO, `gather` or `sync` name has several ranks in every plan that is looked at; one
that hints in the model's code name is there, be it with one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mycel.errors import PlanError
from mycel.ir import Axes, Mesh, read_dims
from mycel.plan.cluster import Cluster
from mycel.plan.compression import (
    AUTO,
    CANDIDATES,
    EXACT,
    auto_budget,
    read_codec,
    read_gather,
    read_monitor,
    read_send,
    usual_loss,
)
from mycel.plan.names import near
from mycel.plan.places import Place, read_places
from mycel.plan.plan import STAGE_AXIS, refuse_number_at_once
from mycel.plan.schedule import stages_a_rank
from mycel.plan.synchronising import EVERY_STEP, SyncPolicy, read_sync, refuse_layouts
from mycel.plan.zero import read_zero
from mycel.search_space import AXES, BATCH, LEVELS, Shape

PASSED_ON = ("batch", "parameters", "activations", "sums", "recompute", "monitor")
KNOWN = (
    "mesh", "zero", "microbatches", "at_once", "stages", "schedule", "place", "offload", "compress", "gather", "send",
    "sync", *PASSED_ON,
)  # fmt: skip
ALSO = {"tx": "tp"}  # axes of ready plans, and what the search calls them
FOLLOWS = ("loose", "decided", "predicted")  # from the rest, or anew
SCHEDULES = ("1f1b", "interleaved", "zbv")


@dataclass(frozen=True)
class Given:
    """None: the search decides."""

    mesh: Mapping[str, int] | None = None
    zeros: tuple[int, ...] = LEVELS  # that there may be
    microbatches: int | None = None
    stages: int | None = None  # of all ranks together
    schedule: str | None = None
    offload: Any = None
    codecs: tuple[str, ...] = ()  # that may be picked; one: it is
    is_compressed: bool = False  # there is no choice
    passed_on: Mapping[str, Any] = field(default_factory=dict)
    place: tuple[Place, ...] = ()
    tries_places: bool = False  # whatever the best plan waits for
    levels: tuple[tuple[str, int], ...] = ()  # of ZeRO, by pattern
    over: Axes = ()  # of ZeRO
    along: str = ""  # gradients are encoded
    batch: tuple[Axes, ...] | None = None  # the axes of each dim, of all its tensors together
    axes: frozenset[str] = frozenset()  # that have several ranks
    at_once: int | None = None
    gather: Mapping[str, Any] = field(default_factory=dict)
    send: Mapping[str, str] = field(default_factory=dict)
    sync: SyncPolicy | None = None
    on_device: bool = False  # nothing may lie on the host

    @staticmethod
    def read(data: Mapping[str, Any]) -> Given:
        for name in data:
            if name not in (*KNOWN, *FOLLOWS):
                raise PlanError(
                    f"the search decides nothing beside {name!r}\n  known     {', '.join(KNOWN)}\n"
                    f"  try       {near(name, KNOWN, 'a whole plan, with its mesh, for  mycel train')}"
                )
        data = _with_known_axes(data)
        mesh, zero, parts = _mesh(data.get("mesh")), data.get("zero"), data.get("microbatches")
        if parts is not None and (not isinstance(parts, int) or isinstance(parts, bool) or parts < 1):
            raise PlanError(f"microbatches: {parts!r}\n  try       a whole number, at least 1")
        at_once = data.get("at_once")
        refuse_number_at_once(at_once or 1)
        if parts is not None and parts % (at_once or 1):
            raise PlanError(f"at_once: {at_once}, but microbatches: {parts}\n  try       microbatches: {parts + 1}")
        level, over, levels = read_zero(zero, "the plan")
        zeros: tuple[int, ...] = (level,) if zero is not None else LEVELS
        over = over if level else ()
        gather = dict(data.get("gather") or {})
        if gather:
            zeros, over = _gathering(gather, zeros, over, mesh)
        sync = _synced(data.get("sync"), mesh)
        if sync is not None and sync.has_replicas:
            refuse_layouts(sync, {}, [], f"zero: {zero}" if sync.axis in over else "")
            if data.get("stages") not in (None, 1):
                raise PlanError(
                    f"sync: {sync.axis}: {sync}, and stages: {data['stages']}: replicas that are pipelines are not "
                    "searched\n  try       the plan without one of them, or a whole plan, with its mesh, for  mycel "
                    "train"
                )
        read_monitor(data.get("monitor"))
        for axis in over:
            _refuse_axis(f"zero: {zero}", axis, mesh, BATCH)
        batch = _batch(data.get("batch"), mesh)
        named = {*over, *(axis for dim in batch or () for axis in dim), *_axes_of_layouts(data, mesh)}
        named |= {sync.axis} if sync is not None else set()
        offload = data.get("offload")
        codecs, is_compressed, along = _codecs(data.get("compress"), mesh)
        return Given(
            mesh or None,
            zeros,
            parts,
            *_stages(data),
            None if offload in (None, "none") else offload,
            codecs,
            is_compressed,
            {k: data[k] for k in (*PASSED_ON, "loose") if data.get(k) is not None},
            *_places(data),
            levels=tuple(levels.items()),
            over=over,
            along=along,
            batch=batch,
            axes=frozenset(axis for axis in named if mesh.get(axis, 2) > 1),
            at_once=at_once,
            gather=gather,
            send=read_send(data.get("send"), has_stages=True),
            sync=sync,
            on_device=offload == "none",
        )

    @property
    def may_place(self) -> bool:
        """Does nothing that is given keep sub-models from ranks of their own?"""
        fixed = self.mesh is not None or self.stages is not None or self.offload is not None or self.is_compressed
        fixed = fixed or bool(self.gather or self.send or self.sync) or self.at_once == 2
        return not (fixed or self.axes - {"dp"} or {"parameters", "activations"} & self.passed_on.keys())

    @property
    def pp(self) -> int:
        """Ranks of a pipeline, with the schedule that is given or the first."""
        return (self.stages or 1) // stages_a_rank(self.schedules[0])

    @property
    def schedules(self) -> tuple[str, ...]:
        if self.schedule is not None:
            return (self.schedule,)
        return SCHEDULES if self.stages is None else tuple(s for s in SCHEDULES if stages_a_rank(s) == 1)

    def applied(self, shape: Shape) -> Shape:
        """A plan as it is with what is given of it."""
        if self.at_once is not None:
            shape = replace(shape, at_once=self.at_once)
        if self.is_compressed and self.may_encode(shape):
            shape = self.encoded(shape, self.codecs[0])
        if self.levels and shape.over:
            shape = replace(shape, levels=self.levels)
        return replace(shape, offload=True) if self.offload is not None else shape

    def holds(self, shape: Shape) -> bool:
        """Has a plan the axes that are named, and batch and ZeRO along those that are given for them?"""
        if shape.offload and self.on_device:
            return False
        if shape.place or shape.world == 1:
            return True
        if shape.pp > 1 and self.at_once == 2 or self.stages is not None and shape.pp != self.pp:
            return False
        same_batch = self.batch is None or _split(self.batch) == _split(read_dims(shape.batch, "batch"))
        same_over = not self.over or {*replace(shape, zero=shape.zero or 1).over} == {*self.over}
        is_woven_on_device = self.at_once == 2 and shape.offload
        return same_batch and same_over and self.axes <= {*shape.sizes} and not is_woven_on_device

    def replicas(self, cluster: Cluster) -> int:
        """How many models there are: 1 where all ranks step together."""
        if self.sync is None or not self.sync.has_replicas:
            return 1
        return self.mesh[self.sync.axis] if self.mesh else cluster.hosts if cluster.hosts > 1 else cluster.world

    def said(self, shape: Shape) -> dict[str, Any]:
        """What the plan of a shape says of messages, where it has them."""
        said: dict[str, Any] = {"gather": self.gather} if shape.over == tuple(self.gather) else {}
        there = [name for name, n in (("stages", shape.pp), ("experts", shape.ep)) if name in self.send and n > 1]
        said |= {"send": {name: self.send[name] for name in there}} if there else {}
        is_late = self.sync is not None and not self.sync.has_replicas and shape.dp > 1
        return said | ({"sync": {"dp": str(self.sync)}} if is_late else {})

    def said_of_program(self, shape: Shape) -> dict[str, Any]:
        """What of a plan the step on one device depends on."""
        if shape.world == 1:
            return {}
        data = {**shape.data(), **self.passed_on, **self.said(shape)}
        keys = ("compress", "gather", "monitor", "sync", *(("zero",) if "gather" in data else ()))
        said = {key: data[key] for key in keys if data.get(key)}
        if shape.sync:
            said["mesh"] = {"dp": shape.dp, "fsdp": shape.world // shape.dp}
        return said

    def may_encode(self, shape: Shape) -> bool:
        """Are there several ranks along the axis on which gradients are encoded?"""
        return shape.replicas > 1 and (not self.along or self.along in shape.sizes)

    def encoded(self, shape: Shape, codec: str) -> Shape:
        return replace(shape, compress=codec, along=self.along)


def _batch(entry: Any, mesh: Mapping[str, int]) -> tuple[Axes, ...] | None:
    """The axes that split each dim, of tensors of the batch together."""
    if entry is None:
        return None
    axes: list[list[str]] = []
    for name, each in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
        where = f"batch: {name}".rstrip(": ")
        for d, dim in enumerate(read_dims(each, where)):
            axes += [[]] * (d + 1 - len(axes))
            axes[d] = [*dict.fromkeys((*axes[d], *dim))]
            for axis in dim:
                _refuse_axis(where, axis, mesh, (*BATCH, "cp"))
    return tuple(map(tuple, axes))


def _split(dims: Sequence[Axes]) -> list[set[str]]:
    """The axes of dims, in any order; dims at the end that are whole do not count."""
    sets = [set(dim) for dim in dims]
    while sets and not sets[-1]:
        sets.pop()
    return sets


def _axes_of_layouts(data: Mapping[str, Any], mesh: Mapping[str, int]) -> Iterator[str]:
    """What layouts of parameters and activations name."""
    for kind in ("parameters", "activations"):
        entries = data.get(kind) or {}
        for name, entry in entries.items() if isinstance(entries, Mapping) else ():  # else a plan refuses it
            for axis in (axis for dim in read_dims(entry, f"{kind}: {name}") for axis in dim):
                _refuse_axis(f"{kind}: {name}", axis, mesh, AXES)
                yield axis


def _places(data: Mapping[str, Any]) -> tuple[tuple[Place, ...], bool]:
    """(where sub-models are, are places tried in any case?)"""
    place = data.get("place")
    if not place:
        return (), False
    other = next((name for name in ("mesh", "stages", "offload", "compress") if data.get(name)), None)
    if other is not None:
        raise PlanError(
            f"place: sub-models on meshes of their own, and {other} is {data[other]!r}\n"
            f"  try       a plan without {other}, or without place"
        )
    return ((), True) if place == AUTO else (read_places(place), False)


def _stages(data: Mapping[str, Any]) -> tuple[int | None, str | None]:
    stages, schedule = data.get("stages"), data.get("schedule")
    if schedule is not None:
        stages_a_rank(schedule)
    if stages is None:
        return None, schedule
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        names = isinstance(stages, (list, tuple))
        what = f"stages: {stages!r}" + ": the search decides where stages begin" * names
        raise PlanError(f"{what}\n  try       {f'stages: {len(stages)}' if names else 'a whole number, at least 1'}")
    count = stages
    a_rank = stages_a_rank(schedule or "1f1b")
    if count % a_rank:
        raise PlanError(
            f"{count} stages with schedule {schedule}, which has {a_rank} on each rank\n"
            f"  try       stages: {count - count % a_rank or a_rank}"
        )
    return count, schedule


def _mesh(entry: Any) -> dict[str, int]:
    """Sizes by axis; nothing where the search decides."""
    if not isinstance(entry or {}, Mapping):
        raise PlanError(f"mesh: {entry!r}\n  try       sizes by axis, such as  mesh: {{dp: 4}}")
    for axis in entry or ():
        if axis not in AXES:
            hint = f"stages: {entry[axis]}" if axis == STAGE_AXIS else near(axis, AXES)
            raise PlanError(
                f"mesh: the search knows no axis {axis!r}\n  known     {', '.join(AXES)}\n  try       {hint}"
            )
    return dict(entry or {})


def _refuse_axis(where: str, axis: Any, mesh: Mapping[str, int], known: tuple[str, ...]) -> None:
    """PlanError for an axis that no plan has, or that the mesh has not."""
    there = [a for a in known if a in mesh] if mesh else list(known)
    if axis not in there:
        shown = (
            f"  the mesh  {', '.join(f'{a}={n}' for a, n in mesh.items())}\n"
            if mesh
            else f"  known     {', '.join(known)}\n"
        )
        hint = near(axis, there) if there else f"a mesh with {near(axis, known)}"
        what = f"{axis} does not split the batch" if axis in (mesh or AXES) else f"there is no axis {axis!r}"
        raise PlanError(f"{where}: {what}\n{shown}  try       {hint}")


def _with_known_axes(data: Mapping[str, Any]) -> dict[str, Any]:
    """With the names that the search has for axes."""
    there = dict(data)
    mesh = there.get("mesh")
    if isinstance(mesh, Mapping) and any(axis in mesh for axis in ALSO):
        there["mesh"] = {ALSO.get(axis, axis): n for axis, n in mesh.items()}
    for kind in ("parameters", "activations"):
        entries = there.get(kind)
        if isinstance(entries, Mapping):
            there[kind] = {name: _renamed(entry, f"{kind}: {name}") for name, entry in entries.items()}
    return there


def _renamed(entry: Any, where: str) -> Any:
    dims = read_dims(entry, where)
    if not any(axis in ALSO for dim in dims for axis in dim):
        return entry
    return [".".join(ALSO.get(axis, axis) for axis in dim) or "-" for dim in dims]


def _gathering(
    gather: Mapping[str, Any], zeros: tuple[int, ...], over: Axes, mesh: Mapping[str, int]
) -> tuple[tuple[int, ...], Axes]:
    """The levels of ZeRO under which parameters travel as `gather` says, and over which axis."""
    axis, *others = gather
    if others:
        raise PlanError(f"gather: names {', '.join(gather)}\n  try       one axis, such as  gather: {{{axis}: int8}}")
    _refuse_axis("gather", axis, mesh, BATCH)
    over = over or (axis,)
    sizes = Mesh(dict.fromkeys((axis, *over), 2))
    levels, why = [], PlanError("")
    for level in zeros:
        try:
            read_gather(gather, sizes, level, over)
            levels.append(level)
        except PlanError as e:
            why = e
    if not levels:
        raise why
    return tuple(levels), over


def _synced(entry: Any, mesh: Mapping[str, int]) -> SyncPolicy | None:
    """How ranks along dp become one model, where they do not step together."""
    if isinstance(entry, Mapping):
        entry = {axis: policy for axis, policy in entry.items() if policy != EVERY_STEP}
        for axis in entry:
            _refuse_axis("sync", axis, mesh, ("dp",))
    return read_sync(entry, Mesh(dict.fromkeys(entry, 2)) if isinstance(entry, Mapping) else Mesh(), list(entry or ()))


def _codecs(entry: Any, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], bool, str]:
    """(what may be picked, is there no choice?, along which axis)"""
    if not entry:
        return (), False, ""
    where, said, axis = "compress", entry, ""
    if isinstance(entry, Mapping) and len(entry) == 1:
        axis, said = next(iter(entry.items()))
        _refuse_axis(where, axis, mesh, BATCH)
        where = f"compress: {axis}"
    budget = auto_budget(said, where)
    if budget is not None:
        return tuple(c for c in CANDIDATES if c != EXACT and usual_loss(c) <= budget), False, axis
    if not isinstance(said, str):
        raise PlanError(
            f"compress: {entry!r}\n  try       one codec for the search, such as  compress: {{dp: int8+ef}}"
        )
    return ((said,), True, axis) if read_codec(said, where) is not None else ((), False, "")
