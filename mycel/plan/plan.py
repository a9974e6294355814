"""A plan: plain, immutable data, in YAML or Python.  What is given people write:

    mesh: {dp: 2, tp: 4}
    parameters:                        # layouts by name, the first pattern that matches; one entry a dim
      "*.q_proj.weight": [tp, -]
      "*.o_proj.weight": [-, tp]
    batch: [dp]                        # leading dims of rows of the batch; or by name: {input_ids: [dp, cp]}
    activations:                       # values of the program by the name the code gives them
      hidden_states: [dp, tp, -]
    zero: 3 over dp                    # optimiser state (1), gradients (2), parameters (3) split over axes
    microbatches: 4                    # the batch in so many parts, one after the other (`accumulate`)
    at_once: 2                         # of these, at once on a device: while one waits for ranks, the other computes
    stages: 4                          # of a pipeline, cut where the clock says; or the module each begins with:
                                       # [embed, layers.4, layers.8, layers.12].  The mesh is that inside a stage
    schedule: zbv                      # gpipe, 1f1b (default), interleaved, interleaved 3 (stages a rank), zbh1, zbv,
                                       # dualpipev, searched
    place: {vision_model: [0, 1], "*": [2..7]}     # sub-models on ranks of their own, which run at once; with a mesh
                                       # each: {ranks: 2..7, mesh: {dp: 3, tp: 2}}.  Layouts are of these (places.py)
                                       # in stages: {ranks: 2..7, stages: [embed, layers.8]}, the mesh of one stage
    sums: fp32                         # partial sums travel in 32 bits; as computed (default): in the precision of the
                                       # product that leaves them; added in fp32: travel so, and are added in 32 bits
    compress: {dp: int8+ef}            # gradients travel along dp in fewer bytes; by pattern; auto (compression.py)
    gather: {dp: int8}                 # parameters of ZeRO-3 travel so when they are gathered for use; by pattern.
                                       # Of ZeRO-1 and 2, int4+ef: by how much they have changed
    send: {stages: int8, experts: int8} # activations and their gradients between stages of a pipeline, and tokens on
                                       # their way to experts and back, each token by itself
    monitor: [noise, variance, error]  # measured of gradients at each step, and logged; may say when to compress
    sync: {dp: diloco(H=50)}           # ranks along dp take steps of their own, and are made one model now and then;
                                       # every step (default), local, streaming, gossip, sma (synchronising.py)
    recompute: full                    # in backward: all that can be; none; auto (default): what the memory budget asks
                                       # for, at least cost
    offload: auto                      # what is not needed now may live on the host, where the memory budget asks for
                                       # it (default on GPUs); none; or {activations: auto, parameters: host,
                                       # optimizer: host, gradients: none, host: 64GiB,
                                       # update: host}, the last: where parameters whose state is there are updated

Everything else is decided for a program (`decided`: layouts, residuals, by name; see decided.py) and what that comes to
is `predicted`.  A plan with its decisions, written and read back, lowers the same program to the same text without a
search.  Ready plans (`mycel/plans/*.yaml`) are such files without a mesh; "zero3+tp" is two of them laid over each
other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from mycel.errors import PlanError
from mycel.ir import Axes, Layout, Mesh, part, read_layout
from mycel.ops.codecs import Compression
from mycel.plan.compression import (
    CompressedAxis,
    Condition,
    choice_text,
    read_compress,
    read_gather,
    read_monitor,
    read_phases,
    read_send,
    refuse_split_momentum,
)
from mycel.plan.decided import Decided, Predicted
from mycel.plan.names import near, unmatched
from mycel.plan.offload import UNSAID, Offload
from mycel.plan.places import Place, place_of, places_data, places_mesh, read_places, refuse_beside_places
from mycel.plan.plan_file import plan_data, plan_yaml
from mycel.plan.residuals import Residuals
from mycel.plan.schedule import PLACE_SCHEDULES, PipelineSchedule, named, read_orders, stages_a_rank
from mycel.plan.synchronising import SyncPolicy, read_sync, refuse_codec, refuse_layouts, sync_text
from mycel.plan.zero import read_zero, zero_data
from mycel.sizes import shown, span

KEYS = (
    "mesh", "parameters", "batch", "activations", "zero", "microbatches", "at_once", "stages", "schedule", "place",
    "sums", "compress", "gather", "send", "monitor", "sync", "recompute", "offload", "loose", "decided", "predicted",
)  # fmt: skip
ALONE = frozenset({"microbatches", "recompute", "offload"})  # what may be said of one device, without a mesh
STAGE_AXIS = "pp"  # of the mesh of a pipeline: the slowest, ranks of one stage lie together
RECOMPUTE = ("auto", "full", "none")
ADDED_WIDE = "added in fp32"
SUMS = ("as computed", "fp32", ADDED_WIDE)


def refuse_number_at_once(said: object) -> None:
    """PlanError for another number of microbatches at once than those there are programs for."""
    if said not in (1, 2):
        raise PlanError(f"at_once: {said!r}\n  try       1, or 2 microbatches")


@dataclass(frozen=True)
class Plan:
    """What is given, and for a program what was decided and predicted; `loose`: patterns may match nothing, or names of
    other dims, which they pass over (ready plans know several families of models)."""

    mesh: Mesh
    parameters: Mapping[str, Any] = field(default_factory=dict)
    batch: Any = ()
    activations: Mapping[str, Any] = field(default_factory=dict)
    zero: int = 0
    over: Axes = ()
    recompute: str = "auto"
    loose: bool = False
    decided: Decided | None = None
    predicted: Predicted | None = None
    sums: str = "as computed"
    microbatches: int = 1
    offload: Offload = UNSAID
    stages: int | tuple[str, ...] = 1
    schedule: str = "1f1b"
    compress: Mapping[str, Any] = field(default_factory=dict)
    sync: Mapping[str, Any] = field(default_factory=dict)
    gather: Mapping[str, Any] = field(default_factory=dict)
    monitor: Any = ()
    place: Mapping[str, Any] = field(default_factory=dict)
    at_once: int = 1
    send: Mapping[str, Any] = field(default_factory=dict)
    levels: Mapping[str, int] = field(default_factory=dict)  # of ZeRO, of patterns that have another than `zero`

    def __post_init__(self) -> None:
        self._lay_stages()
        self._lay_places()
        for name, entry in self.parameters.items():
            read_layout(entry, self.mesh, f"parameters: {name}")
        for name, entry in self.activations.items():
            read_layout(entry, self.mesh, f"activations: {name}")
        for name, entry in self.batch.items() if isinstance(self.batch, Mapping) else [("", self.batch)]:
            read_layout(entry, self.mesh, f"batch: {name}".rstrip(": "))
        if self.zero and not self.over:
            raise PlanError(
                f"zero: {self.zero} says not over which axes\n"
                f"  try       zero: {self.zero} over {self.mesh.axes[0] if self.mesh.axes else 'dp'}"
            )
        read_layout([list(self.over)], self.mesh, "zero")
        if self.recompute not in RECOMPUTE:
            raise PlanError(f"recompute: {self.recompute!r}\n  try       {near(self.recompute, RECOMPUTE)}")
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            raise PlanError(f"microbatches: {self.microbatches!r}\n  try       a whole number, at least 1")
        if self.sums not in SUMS:
            raise PlanError(f"sums: {self.sums!r}\n  try       {near(self.sums, SUMS)}")
        self._refuse_at_once()
        read_monitor(self.monitor)
        phases, _ = read_phases(self.compress)
        for _, how in phases:
            refuse_split_momentum(read_compress(how, self.mesh, self.batch_axes()), self.zero, self.over)
        read_gather(self.gather, self.mesh, self.zero, self.over)
        self.sent_codecs()
        self._refuse_replicas()

    # -- stages of a pipeline ----------------------------------------------------------------------------------------

    def _lay_stages(self) -> None:
        """Stages have an axis of their own in the mesh of all ranks, on which no tensor lies in parts."""
        named, chunks = not isinstance(self.stages, int), stages_a_rank(self.schedule)
        if isinstance(self.stages, bool) or self.stage_count < 1 or (named and self.stage_count < 2):
            raise PlanError(
                f"stages: {self.stages!r}\n  try       a whole number, or for each stage the module it begins with"
            )
        if not self.is_pipeline:
            return
        if self.stage_count % chunks:
            raise PlanError(
                f"stages: {self.stage_count}, but schedule {self.schedule} gives each rank {chunks}\n"
                f"  try       stages: {-(-self.stage_count // chunks) * chunks}"
            )
        ranks = self.stage_count // chunks
        sizes = self.mesh.sizes()
        if sizes.setdefault(STAGE_AXIS, ranks) != ranks:
            raise PlanError(
                f"stages: {self.stage_count} under schedule {self.schedule} are {ranks} ranks, the mesh has "
                f"{STAGE_AXIS}={sizes[STAGE_AXIS]}\n  the mesh  {self.mesh}\n"
                f"  try       the mesh inside a stage alone: {self.inside.mesh}"
            )
        object.__setattr__(self, "mesh", Mesh({STAGE_AXIS: ranks, **sizes}))

    @property
    def stage_count(self) -> int:
        """How many stages the model is cut into; 1: it is whole."""
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    @property
    def is_pipeline(self) -> bool:
        """Is there more than one stage?"""
        return self.stage_count > 1

    def schedule_of(self, microbatches: int) -> PipelineSchedule:
        """The order of steps for so many microbatches; of a searched schedule, as it was decided."""
        chunks = stages_a_rank(self.schedule)
        ranks = self.stage_count // chunks
        if self.schedule != "searched":
            return named(self.schedule, ranks, microbatches)
        assert self.decided is not None
        return read_orders(self.decided.orders, tuple(range(ranks)), microbatches)

    @property
    def inside(self) -> Plan:
        """The plan of the ranks of one stage, by themselves."""
        if not self.is_pipeline:
            return self
        mesh = Mesh({axis: n for axis, n in self.mesh.sizes().items() if axis != STAGE_AXIS})
        send = {name: codec for name, codec in self.send.items() if name != "stages"}
        return replace(self, mesh=mesh, stages=1, schedule="1f1b", send=send)

    def _refuse_at_once(self) -> None:
        """PlanError for microbatches that cannot go through a device at once."""
        refuse_number_at_once(self.at_once)
        if self.at_once == 1:
            return
        others = {"place": self.place, "offload": not self.offload.is_none}
        refused = next((name for name, given in others.items() if given), None)
        if refused is not None:
            raise PlanError(
                f"at_once: {self.at_once}: not beside {refused} yet\n"
                f"  try       a plan without {refused}, or at_once: 1"
            )
        if self.microbatches % self.at_once:
            raise PlanError(
                f"at_once: {self.at_once}, but microbatches: {self.microbatches}\n"
                f"  try       microbatches: {self.microbatches + 1}"
            )

    # -- sub-models on meshes of their own ---------------------------------------------------------------------------

    def _lay_places(self) -> None:
        """The mesh is that of the ranks of all places."""
        if not self.place:
            return
        refuse_beside_places({"stages": self.is_pipeline, "gather": self.gather, "send": self.send})
        if self.schedule not in PLACE_SCHEDULES:
            raise PlanError(f"place: schedule {self.schedule}\n  known     {', '.join(PLACE_SCHEDULES)}")
        mesh = places_mesh(self.places)
        if self.mesh not in (mesh, Mesh()):
            raise PlanError(
                f"place: each place has a mesh, the plan says {self.mesh}\n"
                '  try       the mesh of a place: "*": {ranks: 2..7, mesh: {dp: 3, tp: 2}}'
            )
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "place", places_data(self.places))  # however it was written
        refuse_beside_places({"sync": self.synced() is not None})

    @property
    def places(self) -> tuple[Place, ...]:
        """Where sub-models are; nothing where all ranks run one program."""
        return read_places(self.place) if self.place else ()

    def place_at(self, rank: int) -> int:
        """In which place a rank is; a process that is none of them (it plans for others) takes the first."""
        return next((i for i, place in enumerate(self.places) if rank in place.ranks), 0)

    def at_place(self, i: int) -> Plan:
        """The plan of the ranks of one place, by themselves."""
        return replace(self, mesh=self.places[i].mesh, place={}, schedule="1f1b", decided=None, predicted=None)

    # -- ranks that take steps of their own --------------------------------------------------------------------------

    def synced(self) -> SyncPolicy | None:
        """How replicas become one model; None where all ranks step together."""
        policy = self._policy()
        return policy if policy is not None and policy.has_replicas else None

    def delayed(self) -> SyncPolicy | None:
        """Over which axis gradients are one step late; None where they are not."""
        policy = self._policy()
        return policy if policy is not None and not policy.has_replicas else None

    def _policy(self) -> SyncPolicy | None:
        policy = read_sync(self.sync, self.mesh, self.batch_axes())
        return policy if policy is not None and any(mesh[policy.axis] > 1 for mesh in self.meshes()) else None

    @property
    def replica(self) -> Plan:
        """The plan of the ranks that step together, by themselves."""
        policy = self.synced()
        if policy is None:
            return self
        axis = policy.axis
        mesh = Mesh({name: n for name, n in self.mesh.sizes().items() if name != axis})
        compress = {a: how for a, how in self.compress.items() if a != axis}
        entries = self.batch.items() if isinstance(self.batch, Mapping) else [("", self.batch)]
        batch = {name: _without(axis, entry) for name, entry in entries}
        return replace(
            self, mesh=mesh, sync={}, compress=compress, batch=batch if isinstance(self.batch, Mapping) else batch[""]
        )

    @property
    def together(self) -> Plan:
        """The plan of what ranks compute with one model without a step: how gradients travel does not matter."""
        return replace(self.given, sync={}, compress={}, monitor=())

    def _refuse_replicas(self) -> None:
        """PlanError for what ranks that take steps of their own cannot do."""
        policy = read_sync(self.sync, self.mesh, self.batch_axes())
        if policy is None or not policy.has_replicas:
            return
        if len(read_phases(self.compress)[0]) > 1 and self._outer_compress():
            raise PlanError(
                f"compress: {policy.axis}: what outer steps send is encoded in one way\n"
                f"  try       compress: {{{policy.axis}: int8+ef}}"
            )
        entries = self.batch.items() if isinstance(self.batch, Mapping) else [("", self.batch)]
        refuse_layouts(
            policy,
            {name: read_layout(e, self.mesh, f"parameters: {name}") for name, e in self.parameters.items()},
            [read_layout(entry, self.mesh, f"batch: {name}") for name, entry in entries],
            f"zero {self.zero}" if policy.axis in self.over else "",
        )
        refuse_codec(policy, read_compress(self._outer_compress(), self.mesh, self.batch_axes()))

    def _outer_compress(self) -> dict[str, Any]:
        """What `compress` says of the axis between replicas."""
        return {axis: how for axis, how in self.compress.items() if axis in self.sync}

    def outer_codecs(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Compression]:
        """How what replicas send is encoded, by parameter."""
        encoded = read_compress(self._outer_compress(), self.mesh, self.batch_axes())
        if encoded is None:
            return {}
        encoded.refuse_unused(shapes)
        return encoded.of(shapes)

    def sync_text(self) -> str:
        """How models of ranks become one, and at what price, for people; "" where there is one."""
        policy = self._policy()
        if policy is None or not policy.has_replicas:
            return "" if policy is None else f"along {policy.axis} {policy}: gradients are one step late"
        return sync_text(policy, *(self.predicted.sync if self.predicted is not None else (0.0, 0.0)))

    # -- reading and writing -----------------------------------------------------------------------------------------

    @staticmethod
    def read(source: Any, mesh: Mesh | None = None) -> Plan:
        """From a file, the names of ready plans, a mapping or a Plan; `mesh` takes the place of the one written."""
        if isinstance(source, Plan):
            return source._on(mesh, "the plan")
        data, where = plan_data(source)
        return Plan._of(data, mesh, where)

    @staticmethod
    def _of(data: dict[str, Any], mesh: Mesh | None, where: str) -> Plan:
        for key in data:
            if key not in KEYS:
                close = get_close_matches(str(key), KEYS, 1)
                raise PlanError(f"{where}: unknown key {key!r}\n  try       {close[0] if close else ', '.join(KEYS)}")
        for key in ("parameters", "activations"):
            if not isinstance(data.get(key) or {}, Mapping):
                raise PlanError(
                    f"{where}: {key} is {data[key]!r}\n"
                    "  try       names with layouts, such as  '*.q_proj.weight': [tp, -]"
                )
        written = data.get("mesh")
        if mesh is None and written is None and data and ALONE.issuperset(data):
            written = {}
        stages = data.get("stages") or 1
        if isinstance(stages, (list, tuple)):
            stages = tuple(map(str, stages))
        elif not isinstance(stages, int):
            raise PlanError(f"{where}: stages is {stages!r}\n  try       a number, or a list of names of modules")
        if written is None and (stages != 1 or data.get("place")):  # one rank for each stage; a mesh for each place
            written = {}
        if mesh is None and not isinstance(written, Mapping):
            raise PlanError(f"{where}: no mesh is given\n  try       mesh: {{dp: 2}} in the plan, or mesh=Mesh(dp=2)")
        zero, over, levels = read_zero(data.get("zero"), where)
        decided = Decided.read(data["decided"], where) if data.get("decided") else None
        predicted = Predicted.read(data["predicted"], where) if data.get("predicted") else None
        own = Mesh(written) if isinstance(written, Mapping) and (mesh is None or decided is not None) else mesh
        assert own is not None
        plan = Plan(
            own, dict(data.get("parameters") or {}), data.get("batch") or (), dict(data.get("activations") or {}),
            zero, over, str(data.get("recompute") or "auto"), bool(data.get("loose")), decided, predicted,
            str(data.get("sums") or "as computed"), data.get("microbatches") or 1,
            Offload.read(data.get("offload"), where), stages, str(data.get("schedule") or "1f1b"),
            data.get("compress") or {}, data.get("sync") or {}, data.get("gather") or {}, data.get("monitor") or (),
            data.get("place") or {}, data.get("at_once") or 1, data.get("send") or {}, levels,
        )  # fmt: skip
        return plan._on(mesh, where)

    def _on(self, mesh: Mesh | None, where: str) -> Plan:
        """The plan for a mesh: what was decided for another one is refused."""
        if mesh is None or mesh in (self.mesh, self.inside.mesh):
            return self
        if self.decided is not None:
            raise PlanError(
                f"{where} was decided for {self.mesh}\n  asked     {mesh}\n"
                "  try       that mesh, or plan.given (the plan without `decided`) to decide anew"
            )
        return replace(self, mesh=mesh)

    def data(self) -> dict[str, Any]:
        """Plain data that `read` takes back."""
        data: dict[str, Any] = {"mesh": self.inside.mesh.sizes()} if not self.place else {}
        data |= {"parameters": {k: _plain(v) for k, v in self.parameters.items()}} if self.parameters else {}
        if self.batch:
            data["batch"] = (
                {k: _plain(v) for k, v in self.batch.items()} if isinstance(self.batch, Mapping) else _plain(self.batch)
            )
        data |= {"activations": {k: _plain(v) for k, v in self.activations.items()}} if self.activations else {}
        data |= {"zero": zero_data(self.zero, self.over, self.levels)} if self.zero else {}
        data |= {"microbatches": self.microbatches} if self.microbatches > 1 else {}
        data |= {"at_once": self.at_once} if self.at_once > 1 else {}
        if self.is_pipeline:
            data["stages"] = self.stages if isinstance(self.stages, int) else list(self.stages)
            data["schedule"] = self.schedule
        if self.place:
            data["place"] = places_data(self.places)
            data |= {"schedule": self.schedule} if self.schedule != "1f1b" else {}
        data |= {"sums": self.sums} if self.sums != "as computed" else {}
        data |= {"compress": _plain_mapping(self.compress)} if self.compress else {}
        data |= {"gather": _plain_mapping(self.gather)} if self.gather else {}
        data |= {"send": _plain_mapping(self.send)} if self.send else {}
        data |= {"monitor": sorted(read_monitor(self.monitor))} if self.monitor else {}
        data |= {"sync": dict(self.sync)} if self.sync else {}
        data |= {"recompute": self.recompute} if self.recompute != "auto" else {}
        data |= {"offload": self.offload.data()} if not self.offload.unsaid else {}
        data |= {"loose": True} if self.loose else {}
        data |= {"decided": self.decided.data()} if self.decided is not None else {}
        data |= {"predicted": self.predicted.data()} if self.predicted is not None else {}
        return data

    def __str__(self) -> str:
        return plan_yaml(self.data())

    # -- what was decided --------------------------------------------------------------------------------------------

    @property
    def given(self) -> Plan:
        """The plan before anything was decided."""
        return replace(self, decided=None, predicted=None)

    @property
    def residuals(self) -> Residuals:
        """What of forward is kept for backward, and what is computed again."""
        return self._found(self.decided).residuals

    @property
    def peak(self) -> int:
        """Bytes that a step is predicted to need."""
        return self._found(self.predicted).peak

    @property
    def held(self) -> int:
        """Bytes of it that are there between steps."""
        return self._found(self.predicted).held

    @property
    def budget(self) -> int | None:
        """Bytes that a step was to stay below; None: no limit."""
        return self._found(self.predicted).budget

    def _found(self, part: Any) -> Any:
        if part is None:
            raise PlanError("nothing is decided in this plan\n  try       step.plan, after step.prepare(**batch)")
        return part

    def summary(self) -> str:
        """Time, memory and what backward computes again, for people."""
        p = self._found(self.predicted)
        lines = [str(p)]
        lines += [
            f"predicted peak   {shown(p.peak)}, of which {shown(p.held)} between steps"
            + (f"; budget {shown(p.budget)}" if p.budget else "")
        ]
        lines += [f"  at             {p.at}"] if p.at else []
        lines += [f"on the host      {shown(p.host)}"] if p.host else []
        count = Counter((d.block, d.keep) for d in self.residuals.pairs)
        first = {(d.block, d.keep): d for d in reversed(self.residuals.pairs)}
        for (block, keep), calls in count.items():
            d = first[block, keep]
            again = f"{span(d.seconds)} computed again" if d.seconds else "nothing computed again"
            lines.append(f"residuals        {block} x{calls}: {shown(d.bytes)} kept each, {again}")
            lines.append(f"  keeps          {', '.join(keep) or 'its inputs alone'}")
        return "\n".join(lines)

    # -- what it says of a program's inputs --------------------------------------------------------------------------

    def parameter_layouts(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Layout]:
        """Where each parameter is used in a step lies, by name: as given, else whole.  Stored parts of ZeRO-3 are split
        once more (`stored`)."""
        layouts: dict[str, Layout] = {}
        used: set[str] = set()
        for name, shape in shapes.items():
            layouts[name] = Layout.whole(len(shape))
            for pattern in (p for p in self.parameters if fnmatchcase(name, p)):
                layout = read_layout(self.parameters[pattern], self.mesh, f"parameters: {pattern}")
                if len(layout.dims) != len(shape):
                    if self.loose:
                        continue
                    raise PlanError(
                        f"parameters: {pattern}: {layout} has {len(layout.dims)} dims, {name} has {len(shape)}: "
                        f"{list(shape)}\n  try       {pattern}: [{', '.join(_resized(layout, len(shape)))}]"
                    )
                used.add(pattern)
                layouts[name] = layout
                break
        for key, patterns in (("parameters", self.parameters), ("zero", self.levels)):
            unused = [p for p in patterns if p not in used and not any(fnmatchcase(n, p) for n in shapes)]
            if unused and not self.loose:
                raise PlanError(f"{key}: {unmatched(unused[0], shapes)}")
        return layouts

    @property
    def parameter_axes(self) -> frozenset[str]:
        """The axes that split parameters of any name, but for ZeRO."""
        layouts = (read_layout(entry, self.mesh, f"parameters: {p}") for p, entry in self.parameters.items())
        return frozenset(axis for layout in layouts for axis in layout.axes)

    def level(self, name: str) -> int:
        """Of ZeRO, for a parameter."""
        return next((level for pattern, level in self.levels.items() if fnmatchcase(name, pattern)), self.zero)

    def stored(self, layout: Layout, shape: Sequence[int]) -> Layout:
        """A layout split further over ZeRO's axes, along a dim that divides: rather one that is not split yet, on
        which no order of axes has to be kept."""
        axes = tuple(a for a in self.over if a not in layout.axes)
        k = self.mesh.count(axes)
        left = [part(n, a, self.mesh) for n, a in zip(shape, layout.dims, strict=True)]
        if k == 1 or not left or max(left) < k:
            return layout
        divided = [d for d, n in enumerate(left) if n % k == 0]
        dim = min(divided, key=lambda d: bool(layout.dims[d]), default=left.index(max(left)))
        for axis in axes:
            layout = layout.split(dim, axis)
        return layout

    def activation_layout(self, name: str) -> Layout:
        """The layout that the plan gives an activation."""
        return read_layout(self.activations[name], self.mesh, f"activations: {name}")

    def compressed(self) -> CompressedAxis | None:
        """How gradients are compressed; None where they are not, or along one rank alone."""
        axis = read_compress(self.compress, self.mesh, self.batch_axes())
        if axis is not None and axis.auto and self.decided is not None and self.decided.compress:
            axis = read_compress({axis.axis: self.decided.compress}, self.mesh, self.batch_axes())
        if axis is None or max(mesh[axis.axis] for mesh in self.meshes()) == 1:
            return None
        return axis if axis.auto or any(how is not None for _, how in axis.patterns) else None

    def meshes(self) -> list[Mesh]:
        """On which gradients are summed: of all ranks, or of each place."""
        return [place.mesh for place in self.places] if self.place else [self.mesh]

    def ranks_along(self, axis: str, parameter: str) -> int:
        """Of how many ranks along an axis the gradient of a parameter is a sum: of those of its place."""
        return self.meshes()[place_of(self.places, parameter) if self.place else 0][axis]

    def phases(self) -> tuple[list[tuple[int | None, Plan]], Condition | None]:
        """The plans of a run one after the other, each with the step before which it holds; or two, exact and encoded,
        and what decides between them."""
        phases, condition = read_phases(self.compress)
        if len(phases) == 1:
            return [(None, self)], None
        watched = sorted(self.monitored())
        return [(until, replace(self, compress=how, monitor=watched)) for until, how in phases], condition

    def monitored(self) -> frozenset[str]:
        """What of gradients is measured: what is asked for, and what decides."""
        _, condition = read_phases(self.compress)
        return read_monitor(self.monitor) | ({condition.name} if condition is not None else frozenset())

    def gathered_codecs(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """How parts of parameters of these shapes are encoded when they are gathered, by name."""
        codecs = self._gather_codecs(shapes) if self.zero == 3 else {}
        return {name: codec for name, codec in codecs.items() if self.level(name) == 3}

    def told_codecs(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        """How changes of parameters of these shapes are encoded, of which each rank updates a part, by name."""
        codecs = self._gather_codecs(shapes) if self.zero in (1, 2) else {}
        return {name: codec for name, codec in codecs.items() if self.level(name) in (1, 2)}

    def _gather_codecs(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
        chosen = read_gather(self.gather, self.mesh, self.zero, self.over)
        if chosen is None or self.mesh[chosen.axis] == 1:
            return {}
        chosen.refuse_unused(shapes)
        return {name: how.codec for name, how in chosen.of(shapes).items()}

    def sent_codecs(self) -> dict[str, str]:
        """How what stages send each other and rows on their way to experts are encoded, where they are."""
        return read_send(self.send, self.is_pipeline)

    def compressions(self) -> list[Plan]:
        """The plans to choose from: itself, or where `compress` is auto, one for each choice."""
        axis = self.compressed()
        if axis is None or not axis.auto:
            return [self]
        return [replace(self, compress={axis.axis: text}) for text in axis.candidates()]

    def with_compression(self, tried: Plan, seconds: Mapping[str, float]) -> Plan:
        """This plan, where `compress` is auto, decided as one of its choices was."""
        assert tried.decided is not None and tried.predicted is not None
        (text,) = tried.compress.values()
        decided, predicted = replace(tried.decided, compress=text), replace(tried.predicted, compress=seconds)
        return replace(self, decided=decided, predicted=predicted)

    def compress_text(self) -> str:
        """How gradients travel, and why, for people; "" where nothing is compressed."""
        if self.decided is not None and self.decided.compress and self.predicted is not None:
            return f"along {next(iter(self.compress))} {choice_text(self.predicted.compress, self.decided.compress)}"
        how = self.compressed()
        if how is None:
            return ""
        said = ", ".join(f"{pattern} {entry or 'exact'}" for pattern, entry in how.patterns)
        return f"along {how.axis} {said}"

    def batch_axes(self) -> list[str]:
        """The axes that split the batch."""
        entries = self.batch.values() if isinstance(self.batch, Mapping) else [self.batch]
        return list(dict.fromkeys(a for e in entries for axes in read_layout(e, self.mesh, "batch").dims for a in axes))

    def batch_layout(self, name: str, shape: Sequence[int]) -> Layout:
        """Of a tensor of the batch: leading dims as given, the rest whole; a dim of one element stays whole."""
        entry = self.batch.get(name, ()) if isinstance(self.batch, Mapping) else self.batch
        dims = read_layout(entry, self.mesh, f"batch: {name}").dims[: len(shape)]
        return Layout(
            tuple(
                () if n == 1 else axes
                for n, axes in zip(shape, (*dims, *((),) * (len(shape) - len(dims))), strict=True)
            )
        )


def _resized(layout: Layout, ndim: int) -> list[str]:
    """The entries of a layout for a tensor of other dims: those behind are left out, or whole."""
    return [".".join(axes) or "-" for axes in (*layout.dims, *((),) * ndim)][:ndim]


def _without(axis: str, entry: Any) -> Any:
    """Entries of a layout without an axis."""
    if isinstance(entry, (list, tuple)):
        return [_without(axis, e) for e in entry]
    left = [w for w in str(entry).split(".") if w != axis] if entry is not None else []
    return ".".join(left) or "-"


def _plain(entry: Any) -> Any:
    return list(map(_plain, entry)) if isinstance(entry, (list, tuple)) else entry


def _plain_mapping(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _plain_mapping(v) if isinstance(v, Mapping) else v for k, v in entry.items()}
