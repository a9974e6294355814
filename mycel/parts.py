"""The parts of a model that this rank holds, and what a plan says of the inputs of its step.

    batch          as the plan says; a rank takes its part of the whole batch, or is given just that (`feed.py`)
    parameters     as the plan says; under ZeRO-3 split once more, and gathered for use
    their state    as the parameters; under ZeRO split once more

A parameter's own tensor becomes the rank's part when a step is first compiled, or was made as one (`adopt`).  In a
pipeline a rank holds what its stages use (`held_by_stage.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from mycel import replica_batch
from mycel.capture import Captured
from mycel.errors import PlanError, TrainError
from mycel.feed import Arguments, Feed, feed_of
from mycel.held_by_stage import HeldByStage
from mycel.ir import Layout, Program, Role, Type, Var
from mycel.lower import Distributed
from mycel.model_guards import guard
from mycel.ops.optimisers import StateSlot
from mycel.optimizers import Bound
from mycel.plan import EXPERT_AXIS, Fp8Products, Plan
from mycel.run import boxes, part_of, world
from mycel.transform import without_rows


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

    @cached_property
    def without_rows(self) -> frozenset[str]:
        """Names of arguments that are no rows of the batch."""
        program, leaves = self.captured.program, self.captured.leaves
        apart = without_rows(program, leaves)
        return frozenset(program.role(v).name for v in program.inputs if v.name in apart)

    def batch_layout(self, plan: Plan, v: Var) -> Layout:
        """Of an argument: as the plan splits rows of the batch, if it has any or the plan names it."""
        name = self.program.role(v).name
        named = isinstance(plan.batch, Mapping)
        return Layout.whole(v.ndim) if name in self.without_rows and not named else plan.batch_layout(name, v.shape)


@dataclass
class ShardedModel(HeldByStage):
    """The parameters and optimiser state of one rank."""

    # of a trained parameter's state that is as large as itself, by its name
    stored: dict[str, Layout] = field(default_factory=dict)
    # arguments that are no rows of the batch, as far as what was compiled shows it
    without_rows: frozenset[str] = frozenset()

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
            guard(self, True)

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
        if not isinstance(plan.batch, Mapping):
            self.without_rows |= unsharded.without_rows
        given, gathered = {}, set()
        for i, v in enumerate(program.inputs):
            role = program.role(v)
            layout = unsharded.batch_layout(plan, v) if role.kind == "batch" else self._layout(role, v.type)
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
        apart = unsharded.without_rows
        batch = next((v for v in program.inputs_of("batch") if v.ndim and program.role(v).name not in apart), None)
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
            guard(self, bool(done))

    def own(self, unsharded: UnshardedStep) -> UnshardedStep:
        """A step whose groups have the parameters of this rank."""
        groups = []
        for bound in unsharded.groups:
            mine = [i for i, name in enumerate(bound.group.params) if self.is_own(name)]
            group = replace(bound.group, params=tuple(bound.group.params[i] for i in mine))
            if mine:
                groups.append(replace(bound, group=group, params=tuple(bound.params[i] for i in mine)))
        return replace(unsharded, groups=tuple(groups))

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

    def left_whole(self) -> tuple[float, list[str]]:
        """Of the matrices of a plan that splits other parameters than experts', those that are whole on every rank, the
        largest first; and their share."""
        if not self.plan.parameter_axes - {EXPERT_AXIS}:
            return 0.0, []
        lying = self.layouts or self.plan.parameter_layouts(self.shapes)
        named = dict(self.model.named_parameters())
        sizes = {name: math.prod(self.shapes[name]) for name in named if len(self.shapes[name]) > 1}
        whole = sorted((name for name in sizes if lying[name].is_whole), key=lambda name: -sizes[name])
        return sum(sizes[name] for name in whole) / max(1, sum(sizes.values())), whole

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
        layout = Layout.whole(len(shape)) if name in self.without_rows else self.plan.batch_layout(name, shape)
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
