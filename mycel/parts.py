"""The parts of a model that this rank holds, and what a plan says of the inputs of its step.

    batch          as the plan says; a rank takes its part of the whole batch, or is given just that (`feed.py`)
    parameters     as the plan says; under ZeRO-3 split once more, and gathered for use
    their state    as the parameters; under ZeRO split once more

A parameter's own tensor becomes the rank's part when a step is first compiled, or was made as one (`adopt`); the shape
of the whole is remembered, and shown again whenever the model is captured.  In a pipeline a rank holds what its stages
use (`hold`), and what others hold just while it is asked for (`complete`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mycel import replica_batch
from mycel.capture import Captured
from mycel.errors import PlanError, TrainError
from mycel.feed import Arguments, Feed, feed_of
from mycel.ir import MEAN, Layout, Program, Role, Type, Var, part
from mycel.lower import Distributed, Pipeline
from mycel.ops.collective import COMMUNICATORS
from mycel.ops.optimisers import StateSlot
from mycel.optimizers import Bound
from mycel.plan import STAGE_AXIS, Fp8Products, Plan
from mycel.run import boxes, part_of, world
from mycel.run.rendezvous import seat

GUARDED: weakref.WeakKeyDictionary[torch.nn.Module, ShardedModel] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class UnshardedStep:
    """A step as one program on one device; `results`: of the loss, before the gradient norm; `body`: the block that
    holds forward and backward; `fp8`: which products of it are in 8 bits, where that was asked for."""

    captured: Captured
    program: Program
    groups: tuple[Bound, ...]
    results: int
    body: str
    fp8: Fp8Products | None = None


@dataclass
class ShardedModel:
    """The parameters and optimiser state of one rank."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    ranks: Any = None  # the communicator
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # of whole parameters and buffers
    layouts: dict[str, Layout] = field(default_factory=dict)  # in which they are held
    # of a trained parameter's state that is as large as itself, by its name
    stored: dict[str, Layout] = field(default_factory=dict)
    # of each piece of state: how it lies, and its type as a whole
    slots: dict[Role, tuple[Layout, Type]] = field(default_factory=dict)
    is_split: bool = False
    # in a pipeline: the places along its axis that hold a tensor, by name; what is not there, all do
    owners: dict[str, tuple[int, ...]] = field(default_factory=dict)
    messages: Any = None  # what messages keep (`message_state.py`), by role in `held`
    _open: int = 0
    _completed: bool = False
    _average: dict[int, torch.Tensor] = field(default_factory=dict)  # of replicas' models, by id

    def __post_init__(self) -> None:
        self.shapes = {name: x.shape for name, x in self.tensors()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers as they are held, by all their names."""
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, the model may be called and asked for its state: whoever does it knows that it is in parts."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Parameters show the shapes of the whole, without data: for capture."""
        if not self.is_split:
            yield
            return
        with self.opened():
            yield from self._shown()

    def _shown(self) -> Iterator[None]:
        held = {name: x.data for name, x in self.tensors() if not self.layouts.get(name, Layout()).is_whole}
        by_name = dict(self.tensors())
        try:
            for name, x in held.items():
                by_name[name].data = without_data(x, self.shapes[name])
            yield
        finally:
            for name, x in held.items():
                by_name[name].data = x

    def adopt(
        self,
        shapes: Mapping[str, torch.Size],
        layouts: Mapping[str, Layout],
        owners: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """The model was made in parts: these are the shapes of the whole, how its tensors lie, and of a pipeline who
        holds them."""
        self.shapes, self.layouts, self.is_split = dict(shapes), dict(layouts), True
        if owners:
            self.owners = dict(owners)
            self._guard(True)

    # -- layouts of a step's inputs

    def given(self, unsharded: UnshardedStep, plan: Plan | None = None) -> tuple[dict[int, Layout], frozenset[int]]:
        """Layouts of the step's inputs by position, those that are not whole; and the parameters that are gathered for
        use.  `plan`: of the ranks that compute it together, by themselves; those that step together."""
        plan = plan or self.plan.replica
        program = unsharded.program
        ids = {id(x): name for name, x in self.tensors()}
        one = {name: ids[id(x)] for name, x in self.tensors()}  # of tied names, the one that counts
        used = self.plan.parameter_layouts(self.shapes)
        trained = {name for g in unsharded.groups for name in g.group.params}
        if not self.is_split:
            self.layouts = parameter_layouts(
                self.plan, self.shapes, {one[name] for name in trained if name in one}, one
            )
        for name in trained & one.keys():  # what others hold, a loss say, is whole
            layout = used[one[name]]
            self.stored[name] = self.plan.stored(layout, self.shapes[name]) if self.plan.level(one[name]) else layout
        given, gathered = {}, set()
        for i, v in enumerate(program.inputs):
            role = program.role(v)
            layout = plan.batch_layout(role.name, v.shape) if role.kind == "batch" else self._layout(role, v.type)
            if role.kind in ("state", "error", "velocity", "delayed", "outer"):
                self.slots[role] = layout, v.type
            if not layout.is_whole:
                given[i] = layout
            if (
                role.kind in ("parameter", "buffer")
                and role.name in one
                and (role.name in trained or layout != used[one[role.name]])
                and self.plan.level(one[role.name]) == 3
            ):
                gathered.add(i)
        return given, frozenset(gathered)

    def rows_of(self, unsharded: UnshardedStep, plan: Plan | None = None) -> dict[int, Layout]:
        """Layouts of results, by position, that are rows of the batch: split as the batch is; `plan` as in `given`."""
        program, plan = unsharded.program, plan or self.plan.replica
        batch = next((v for v in program.inputs_of("batch") if v.ndim), None)
        split = plan.batch_layout(program.role(batch).name, batch.shape).dims[:1] if batch is not None else ()
        if batch is None or not any(split):
            return {}
        return {
            i: Layout((*split, *((),) * (x.ndim - 1)))
            for i, x in enumerate(program.results[1 : unsharded.results], 1)
            if isinstance(x, Var) and x.ndim and x.shape[0] == batch.shape[0]
        }

    def without_padding(
        self, run: Callable[..., Any], unsharded: UnshardedStep, rows: Mapping[int, Layout]
    ) -> Callable[..., Any]:
        """The code, with results in `rows` as long as this rank's part of the batch is."""
        results = unsharded.program.results
        sizes = {}
        for i, layout in rows.items():
            x = results[i]
            assert isinstance(x, Var)
            start, stop = boxes.held(x.shape, layout, self.plan.mesh, self.ranks.rank)[0]
            sizes[i] = stop - start

        def trimmed(*inputs: Any) -> Any:
            outs = list(run(*inputs))
            for i, size in sizes.items():
                outs[i] = outs[i].narrow(0, 0, size)
            return outs

        return trimmed

    def _layout(self, role: Role, type: Type) -> Layout:
        """In which an input of a step is held: parameters as the plan says; state as what it is the state of."""
        match role.kind:
            case "parameter" | "buffer":
                return self.layouts.get(role.name, Layout())
            case "gradient":
                return self.layouts.get(role.of, Layout())
            case "state" | "outer" if role.of in self.stored:
                return state_layout(self.stored[role.of], self.shapes[role.of], type.shape)
            case "error" | "velocity" | "delayed":  # each rank along the axis has its own: the whole is their sum
                layout = state_layout(
                    self.stored.get(role.of, Layout()), self.shapes.get(role.of, type.shape), type.shape
                )
                return layout.without(role.over).with_partial(role.over, "+")
        return Layout.whole(type.ndim)

    def slot(self, role: Role, type: Type) -> tuple[Layout, Type] | None:
        """How state of this role lies; None: it is not known.  What messages keep is, also where the program of now
        sends none, since those of other phases of a run do."""
        is_kept = role.kind in ("error", "velocity", "delayed") and role.of in self.stored
        if role not in self.slots and is_kept and role.over in self.plan.mesh:
            self.slots[role] = self._layout(role, type), type
        return self.slots.get(role)

    # -- what this rank holds

    @property
    def written(self) -> Plan:
        """The plan of all ranks."""
        return self.plan

    @property
    def rank(self) -> int:
        """Of this process in the mesh of the plan, also before it speaks to the others."""
        return int(self.ranks.rank) if self.ranks is not None else seat().rank

    def meet(self, everyone: Any) -> None:
        """From now on this rank speaks to these: all ranks of the plan."""
        self.ranks = everyone

    def split(self, device: torch.device) -> None:
        """Parameters become this rank's parts, once; `device` is where its ranks speak from."""
        if self.ranks is None:
            self.meet(world(self.written.mesh, device))
        if self.is_split:
            return
        self.is_split = True
        done: set[int] = set()
        for name, x in self.tensors():
            layout = self.layouts[name]
            if not layout.is_whole and id(x) not in done:
                done.add(id(x))
                x.data = part_of(x.data, layout, self.plan.mesh, self.ranks.rank).clone()
        if done or self.plan.zero:
            self._guard(bool(done))

    # -- stages of a pipeline

    @property
    def place(self) -> int:
        """Of this rank along the axis of stages."""
        return self.plan.mesh.index(self.ranks.rank, (STAGE_AXIS,))

    def is_own(self, name: str) -> bool:
        """Does this rank hold a tensor of the model?"""
        return not self.owners or self.place in self.owners.get(name, (self.place,))

    def hold(self, pipeline: Pipeline) -> None:
        """From now on this rank holds what its stages use."""
        owners = self.owners_under(pipeline)
        if self.owners and owners != self.owners:
            other = next(name for name in owners if owners[name] != self.owners.get(name))
            raise PlanError(
                f"the stages of this batch would hold other parameters than those of the first one: {other}\n"
                "  try       stages: by the names of modules, or batches of one shape"
            )
        if not self.owners:
            self._guard(True)
        self.owners = owners
        self._let_go()

    def owners_under(self, pipeline: Pipeline) -> dict[str, tuple[int, ...]]:
        """The places that hold each tensor, by all its names."""
        owners = {role.name: ranks for role, ranks in pipeline.owners.items() if role.kind in ("parameter", "buffer")}
        by_id = {id(x): name for name, x in reversed(list(self.tensors())) if name in owners}
        return {name: owners[by_id[id(x)]] for name, x in self.tensors() if id(x) in by_id}

    def _let_go(self) -> None:
        """What other stages hold is not here."""
        for name, x in self.tensors():
            if not self.is_own(name):
                x.data = torch.zeros((), dtype=x.dtype, device=x.device).expand(self.shapes[name])  # one number
                self.optimizer.state.pop(x, None)
        kept = self.messages.held if self.messages is not None else {}
        for role in [role for role in kept if not self.is_own(role.of)]:
            del kept[role]

    def own(self, unsharded: UnshardedStep) -> UnshardedStep:
        """A step whose groups have the parameters of this rank."""
        groups = []
        for bound in unsharded.groups:
            mine = [i for i, name in enumerate(bound.group.params) if self.is_own(name)]
            group = replace(bound.group, params=tuple(bound.group.params[i] for i in mine))
            if mine:
                groups.append(replace(bound, group=group, params=tuple(bound.params[i] for i in mine)))
        return replace(unsharded, groups=tuple(groups))

    @contextlib.contextmanager
    def complete(self) -> Iterator[None]:
        """Inside, every rank has its part of what all stages hold; all ranks enter it.  What it is at the end, those
        who hold it keep."""
        if not self.owners or self._completed:
            yield
            return
        self._completed = True
        try:
            self._fetch()
            yield
        finally:
            self._completed = False
            self._let_go()

    def completed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that is made with what all stages hold, and of replicas with the mean of their models."""

        def run(*args: Any) -> Any:
            with self.complete(), self.averaged():
                return call(*args)

        return run

    def _fetch(self) -> None:
        """What others hold, from the first of them."""
        done: set[int] = set()
        for name, x in self.tensors():
            if name not in self.owners or id(x) in done:
                continue
            done.add(id(x))
            held = self._from_first(name, x.data, x.dtype)
            if not self.is_own(name):
                x.data = held
        params = dict(self.model.named_parameters())
        roles = [role for role in self.slots if role.kind == "state" and role.of in params]
        there = torch.tensor([role.name in self.optimizer.state.get(params[role.of], {}) for role in roles])
        there = self._most(there.int()).bool()
        for role, is_there in zip(roles, there.tolist(), strict=True):
            if is_there and role.of in self.owners:
                state = self.optimizer.state[params[role.of]]
                held = self._from_first(role.of, state.get(role.name), self.slots[role][1].dtype, role)
                if not self.is_own(role.of):
                    state[role.name] = held
        self._fetch_messages()

    def _fetch_messages(self) -> None:
        """What messages of parameters of other stages keep, by the same ranks of those."""
        kept = self.messages.held if self.messages is not None else {}
        kinds = ("error", "velocity", "delayed", "outer")
        roles = [role for role in self.slots if role.kind in kinds and role.of in self.owners]
        if not roles:
            return
        there = self._most(torch.tensor([int(role in kept) for role in roles])).bool()
        for role in itertools.compress(roles, there.tolist()):
            held = self._from_first(role.of, kept.get(role), self.slots[role][1].dtype, role)
            kept.setdefault(role, held)

    def _most(self, counts: torch.Tensor) -> torch.Tensor:
        """The largest over all stages."""
        return self.ranks.all_reduce(counts, (STAGE_AXIS,), ">")

    def whole_of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """All of a parameter or buffer, whoever holds it; all ranks call this."""
        layout, x = self.lies(name, x), x.detach()
        if name in self.owners and not self._completed:
            x = self._from_first(name, x, x.dtype)
        return self.gather(x, layout, self.shapes[name])

    def _lying(self, name: str, role: Role | None) -> tuple[Layout, tuple[int, ...]]:
        """How a tensor of the model lies, or of what is kept of it that with a role; and the shape of its whole."""
        if role is None:
            return self.layouts[name], tuple(self.shapes[name])
        layout, type = self.slots[role]
        return layout, type.shape

    def _from_first(self, name: str, held: Any, dtype: torch.dtype, role: Role | None = None) -> torch.Tensor:
        """This rank's part of a tensor of the model (or of what is kept of it), as the first of those who hold it
        have it."""
        first, (layout, whole) = self.owners[name][0], self._lying(name, role)
        shape = boxes.stored(whole, layout, self.plan.mesh)
        own = held if self.place == first else torch.zeros(tuple(shape), dtype=dtype, device=self.ranks.device)
        return self.ranks.all_gather(own.unsqueeze(0).to(self.ranks.device), (STAGE_AXIS,), 0)[first].clone()

    def _guard(self, model: bool) -> None:
        """Whoever calls the `model`, if that is in parts, or asks it or the optimiser for their state, is told what to
        do instead."""

        def refuse_state(what: Any, *_: Any) -> None:
            if not self._open:
                hint = "step.state_dict(), step.save(folder), or `with step.whole():`"
                raise _in_parts(f"{type(what).__name__} was asked for its state", hint)

        _guard_calls()
        for module in self.model.modules() if model else ():
            GUARDED[module] = self
            module.register_state_dict_pre_hook(refuse_state)
        self.optimizer.register_state_dict_pre_hook(refuse_state)

    def state(self, group: Bound, homes: Mapping[Role, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """A group's optimiser state in parts, made where there is none yet (on the host, in `homes`); what torch made
        of a parameter before it was split is cut as well."""
        names = {id(p): name for p, name in zip(group.params, group.group.params, strict=True)}

        def fill(p: torch.nn.Parameter, slot: StateSlot, value: float) -> torch.Tensor:
            layout, type = self.slots[Role("state", slot.name, of=names[id(p)])]
            return torch.full(boxes.stored(type.shape, layout, self.plan.mesh), value, dtype=type.dtype, device=device)

        for p in group.params:
            for slot in map(group.group.slot, group.group.slots):
                held = self.optimizer.state[p].get(slot.name)
                if held is not None and not slot.scalar:
                    self.optimizer.state[p][slot.name] = self._cut(held, Role("state", slot.name, of=names[id(p)]), p)
        return group.state(self.optimizer, homes, device, fill)

    def _cut(self, held: torch.Tensor, role: Role, p: torch.nn.Parameter) -> torch.Tensor:
        """This rank's part of state: as it is, of the whole, or of state that no step has changed yet, which is one
        number everywhere."""
        layout, type = self.slots[role]
        shape = tuple(boxes.stored(type.shape, layout, self.plan.mesh))
        if tuple(held.shape) == shape:
            return held
        if tuple(held.shape) == type.shape:
            return part_of(held, layout, self.plan.mesh, self.ranks.rank).clone()
        if not float(self.optimizer.state[p].get("step", 1)):
            return held.new_full(shape, held.flatten()[0].item())
        raise TrainError(
            f"optimizer state {role.name} of {role.of} is {list(held.shape)}, its whole is {list(type.shape)}\n"
            "  try       a new optimizer, or its state loaded from a checkpoint"
        )

    def cut_state(self) -> None:
        """Optimiser state that is whole becomes this rank's part of it."""
        params = dict(self.model.named_parameters())
        for role in self.slots:
            p = params.get(role.of)
            held = self.optimizer.state.get(p, {}).get(role.name) if p is not None else None
            if p is not None and isinstance(held, torch.Tensor) and held.dim():
                self.optimizer.state[p][role.name] = self._cut(held, role, p)

    def gather(self, x: torch.Tensor, layout: Layout, shape: Sequence[int]) -> torch.Tensor:
        """The whole of a tensor of which this rank has a part, or a summand; all ranks call it."""
        for axis, kind in layout.partial:
            if kind != MEAN:
                is_small = x.is_floating_point() and x.itemsize == 1  # which nobody adds up
                x = self.ranks.all_reduce(x.float() if is_small else x, (axis,), kind).to(x.dtype)
            elif x.is_floating_point():
                wide = torch.promote_types(x.dtype, torch.float32)
                x = (self.ranks.all_reduce(x.to(wide), (axis,)) / self.plan.mesh[axis]).to(x.dtype)
            else:  # counts: those of the first replica
                x = self.ranks.all_gather(x.unsqueeze(0), (axis,), 0)[0]
        for dim, axes in enumerate(layout.dims):
            for k in range(len(axes) - 1, -1, -1):  # the fastest first: each axis has padding of its own
                x = self.ranks.all_gather(x, axes[k : k + 1], dim).narrow(
                    dim, 0, part(shape[dim], axes[:k], self.plan.mesh)
                )
        return x

    def connected(self, code: Callable[..., Any]) -> Callable[..., Any]:
        """The code with its ranks to speak to."""

        def run(*inputs: Any) -> Any:
            COMMUNICATORS.append(self.ranks)
            try:
                return code(*inputs)
            finally:
                COMMUNICATORS.pop()

        return run

    def left_whole(self) -> tuple[float, list[str]]:
        """Of the matrices of a plan that splits parameters, those that it leaves whole on every rank, the largest
        first; and their share."""
        if not self.plan.parameters:
            return 0.0, []
        used = self.plan.parameter_layouts(self.shapes)
        named = dict(self.model.named_parameters())
        sizes = {name: math.prod(self.shapes[name]) for name in named if len(self.shapes[name]) > 1}
        whole = sorted((name for name in sizes if used[name].is_whole), key=lambda name: -sizes[name])
        return sum(sizes[name] for name in whole) / max(1, sum(sizes.values())), whole

    # -- replicas: ranks that take steps of their own

    def apart(self, layout: Layout) -> Layout:
        """How something lies that each replica has one of: over their axis, its mean stands for all."""
        policy = self.plan.synced()
        return layout if policy is None else layout.with_partial(policy.axis, MEAN)

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        policy = self.plan.synced()
        return self.plan.mesh.index(self.ranks.rank, (policy.axis,)) if policy is not None else 0

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, all ranks hold the mean of the replicas' models; all ranks enter it.  It is computed once between two
        steps."""
        if self.plan.synced() is None:
            yield
            return
        own = {id(x): x for name, x in self.tensors() if x.is_floating_point() and self.is_trained(x)}
        if not self._average:
            self._average = {i: self.gather_mean(x.data) for i, x in own.items()}
        held = {i: x.data for i, x in own.items()}
        try:
            for i, x in own.items():
                x.data = self._average[i]
            yield
        finally:
            for i, x in own.items():
                x.data = held[i]

    def lies(self, name: str, x: torch.Tensor) -> Layout:
        """How ranks hold a tensor of the model: of what trains, replicas have one each."""
        return self.apart(self.layouts[name]) if self.is_trained(x) else self.layouts[name]

    def is_trained(self, x: torch.Tensor) -> bool:
        """May replicas have it differently?"""
        return x.requires_grad or not isinstance(x, torch.nn.Parameter)

    def gather_mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean over the replicas of what lies alike in them."""
        return self.gather(x, self.apart(Layout.whole(x.ndim)), x.shape)

    def moved(self) -> None:
        """A step was taken: averages are of before."""
        self._average.clear()

    # -- what this rank takes of a batch

    def own_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The part of a batch that is this rank's replica's; all of it where all ranks step together."""
        return replica_batch.own_batch(self.plan, self.rank, args, kwargs)

    def feed(self, unsharded: UnshardedStep, sharded: Distributed | None, whole: Arguments | None = None) -> Feed:
        """How a step that lies as was found is fed on this rank; `whole`: the batch that replicas have parts of."""
        lying = zip(sharded.whole.inputs, sharded.inputs, strict=True) if sharded is not None else ()
        layouts = {v.name: layout for v, layout in lying}
        feed = feed_of(unsharded.captured, unsharded.program, layouts, self.plan.mesh, self.ranks.rank)
        return feed if whole is None else replica_batch.fed_whole(self.plan, feed, whole)

    def slices(self, name: str, shape: Sequence[int]) -> tuple[slice, ...]:
        """This rank's part of a batch tensor of this shape."""
        layout = self.plan.batch_layout(name, shape)
        return tuple(slice(start, stop) for start, stop in boxes.held(tuple(shape), layout, self.plan.mesh, self.rank))

    def rows(self, size: int, name: str | None = None) -> range:
        """The part of the first dim."""
        names = [name or ""] if name or not isinstance(self.plan.batch, Mapping) else list(self.plan.batch)
        slices = {name: self.slices(name, (size,))[0] for name in names}
        if len({(s.start, s.stop) for s in slices.values()}) > 1:
            known = ", ".join(f"{name} {s.start}:{s.stop}" for name, s in slices.items())
            raise PlanError(
                f"tensors of the batch have different rows on this rank: {known}\n  try       rows(size, name)"
            )
        return range(size) if not slices else next(range(s.start, s.stop) for s in slices.values())


def roles_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[int, Role]:
    """What a model's tensors are, by id, under the names that its state dict has; tensors that an optimiser changes are
    parameters, whoever holds them."""
    roles = {id(x): Role("buffer", name) for name, x in model.named_buffers()}
    roles |= {id(p): Role("parameter", name) for name, p in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        for k, p in enumerate(group["params"]):
            if not isinstance(p, torch.nn.Parameter):
                roles.setdefault(id(p), Role("parameter", f"group{i}.{k}"))
    return roles


def parameter_layouts(
    plan: Plan, shapes: Mapping[str, torch.Size], trained: Collection[str], one: Mapping[str, str]
) -> dict[str, Layout]:
    """How tensors are held, by name: as the plan says, trained ones under ZeRO-3 split further; `one` says which of
    tied names counts."""
    used = plan.parameter_layouts(shapes)
    split = {name: plan.stored(used[name], shapes[name]) for name in trained if plan.level(name) == 3}
    return {name: split.get(one[name], used[one[name]]) for name in shapes}


def state_layout(of: Layout, whole: Sequence[int], shape: Sequence[int]) -> Layout:
    """How state of this shape lies, of a parameter whose state as large as itself lies in layout `of`: dims that are
    the parameter's lie as these do, others (those of a row's or a column's statistics, of a count) are whole."""
    if len(shape) != len(whole):
        return Layout.whole(len(shape))
    padded = (*of.dims, *((),) * (len(whole) - len(of.dims)))
    return Layout(tuple(axes if n == m else () for axes, n, m in zip(padded, shape, whole, strict=True)))


@functools.cache
def _guard_calls() -> None:
    """One hook for all models, once: hooks of a module itself are part of what was captured."""

    def refuse_call(module: torch.nn.Module, *_: Any) -> None:
        if module in GUARDED and not GUARDED[module]._open:
            raise _in_parts(f"{type(module).__name__} was called", "step.evaluate(batch), or `with step.whole():`")

    torch.nn.modules.module.register_module_forward_pre_hook(refuse_call)


def _in_parts(what: str, hint: str) -> TrainError:
    return TrainError(f"{what}, but this rank holds parts of its tensors\n  try       {hint}")


def without_data(like: torch.Tensor, shape: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """A tensor of this shape, on this device or where another is, that holds nothing."""
    x = torch.empty(tuple(shape), dtype=like.dtype, device=device or like.device)
    x.untyped_storage().resize_(0)
    return x
