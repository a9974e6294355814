"""The whole training step as one program: forward, backward, clip, update.

    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=3e-4), clip_norm=1.0)
    loss = step(**batch)

`Step.compile` shows the way in one function: capture, a plain list of passes, a plan, lowering, code.  The model's own
tensors and the optimiser's own state change in place.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mycel import lower, optimizers, plan, torch_update, transform
from mycel.accumulation import Accumulation, CallWeights
from mycel.buckets import Buckets
from mycel.capture import (
    MISS,
    TRACING,
    Captured,
    all_ones,
    bind,
    differentiate_with,
    flatten,
    input_tensors,
    make_room,
    meshed,
)
from mycel.capture import capture as capture_call
from mycel.capture.bind import Call
from mycel.errors import GradientError, PlanError, TrainError
from mycel.expert_placement import Placement, SharedExperts, by_rank
from mycel.feed import (
    Arguments,
    Fed,
    Feed,
    Local,
    feed_of,
    refuse_without_data,
    refusing_parts,
    without_host_data,
)
from mycel.forward import Forward, called, device_of, evaluating
from mycel.host_parameters import HostParameters
from mycel.ir import DEVICE, Mesh, Program, Role, Type, Var, check
from mycel.islands import TimedCode
from mycel.message_state import KINDS, MessageState, lossy_of
from mycel.monitors import monitored
from mycel.objective import Batch, objective, refuse_outputs
from mycel.ops.codecs import Compression
from mycel.ops.optimisers import is_group_update
from mycel.outer_steps import TAKEN, OuterSteps
from mycel.parts import ShardedModel, UnshardedStep, roles_of
from mycel.placed_model import PlacedModel
from mycel.placing import Given
from mycel.plan.compression import least_lossy, refuse_update
from mycel.plan.hardware import Curve
from mycel.plan.links import Link, fitted
from mycel.planning import Task, planned
from mycel.run import (
    CudaGraph,
    HostSpace,
    LinkWatch,
    Replayed,
    Span,
    available,
    keep_freed_memory,
    load,
    moves,
    recording,
    start_workers,
    timed_codecs,
    timed_messages,
    warm_up,
    without_collector,
    world,
)
from mycel.search_space import any_plan
from mycel.several_optimizers import SeveralOptimizers, each_of
from mycel.sizes import parse_bytes
from mycel.step_loads import ExpertLoads
from mycel.step_records import CompiledStep, Settings
from mycel.step_search import Undecided
from mycel.step_state import StepState
from mycel.step_text import explained
from mycel.step_trace import StepTrace

differentiate_with(transform.value_and_grad)
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
BY_REPLICA = 0x5851F42D4C957F2D  # between the keys of two replicas
LINK_WATCHED_EVERY = 200  # steps: three small messages then
ROOM = 0.95  # the share of the host's free memory that a plan may use
SCALE = 65536.0  # the first loss scale of fp16, torch.amp.GradScaler's


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Callable[..., Any] | None = None,
    mesh: Any = None,
    plan: Any = "auto",
    precision: str = "fp32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    memory: str | int | None = None,
    compile: str | bool = "auto",
    clip_value: float | None = None,
    grads: bool = False,
    outputs: bool | str = False,
    strict: bool = False,
    expert_load: bool = False,
    pad: Mapping[int | str, Mapping[Any, Any]] | None = None,
) -> Step:
    """A callable that takes one step on a batch and returns its loss, or with `outputs` (loss, what came beside it).

    mesh        the devices, e.g. mycel.Mesh(dp=2, tp=4); None: as the plan says.  Every rank holds its parts of the
                model, and calls the step with the whole batch, of which it moves its part to its device, or
                `step.local(...)` with that part alone
    plan        "auto": on a mesh, or the ranks that torchrun or `mycel train` started, the fastest plan that a search
                finds when the first batch is there; or how to spread the step: a mycel.Plan, a .yaml file, or names of
                ready plans such as "zero3+tp".  None: this device alone, or with a mesh the batch split over it
    loss        None: the model returns the loss, or an object or dict with `loss`.  Otherwise loss(output, *rest): the
                loss gets the last of the positional arguments, as many as it asks for (all, if it takes *args), the
                model the first ones, as many as it takes; what the loss needs is no optional argument of the model.
                A loss whose first argument is called `model` is given the model and all of the batch: loss(model,
                **batch), which calls it as often as it likes
    precision   "fp32": as the model is written;  "bf16", "fp16": weights and their updates stay as they are, the
                computation is in 16 bits, sums in 32; fp16 scales the loss;  "fp8": as bf16, with products of linear
                layers in 8 bits where that pays (step.explain() says which), on GPUs from H100 and Ada on; CPUs
                emulate it
    accumulate  the batch is split into so many parts along its first dim (a smaller one into the next number that
                divides it); loss and gradient are those of the whole batch
    clip_norm   gradients are scaled down to this global norm
    memory      the peak to stay below, in bytes or as "20GiB": what does not fit is computed again in backward, or
                on a GPU waits on the host (plan={"offload": …})
    compile     True, False, or "auto": where there is a GPU
    clip_value  no element of a gradient is larger than this
    outputs     step(batch) is (loss, outputs): what the model returned, or what the loss returned more, as in
                (loss, {"accuracy": …}); whole on every rank, or with "local" rows of the batch just as this rank has
                them (step.rows).  With accumulate, rows of the batch are put together, and
                of other values the sum or mean is taken, as the loss is
    grads       after a step, p.grad is the gradient it was taken with, clipped; of a parameter in parts, this rank's
    strict      what cannot be captured is refused; without it the smallest call around it stays Python, with a
                warning
    expert_load each step counts how many choices each expert of a layer gets: step.expert_load(), step.rebalance()
    pad         sizes that vary, padded to a few: {"input_ids": {1: [512, 1024]}} by name or position of a batch tensor
                and its dim; tensors as long as it go with it.  One program for each size; that loss and gradients stay
                those of the unpadded batch is tried before the first step, and refused where they do not

    optimizer is any of torch's: those with a rule here (`torch.optim`, Lion) are part of the program.  Any other one,
    and one with hooks on its step or on accumulated gradients, runs as it is on the gradients of the program: slower,
    which is said once.  Of several, in a list, each has parameters of its own.
    """
    written = _written(mesh, plan)
    if not isinstance(model, torch.nn.Module):
        raise TrainError(f"train_step takes a torch.nn.Module, not {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TrainError(
            f"loss={loss!r} is not a function\n"
            "  try       torch.nn.functional.cross_entropy, or None where the model returns its loss"
        )
    one: Any = SeveralOptimizers(optimizer) if isinstance(optimizer, (list, tuple)) else optimizer
    optimizers.refuse_unusable(one)
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise TrainError(f"precision={precision!r}\n  known     {', '.join(PRECISIONS)}")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise TrainError(f"accumulate={accumulate!r}\n  try       a whole number, at least 1")
    for name, most in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if most is not None and not (isinstance(most, (int, float)) and most > 0):
            raise TrainError(f"{name}={most!r}\n  try       a positive number, or None")
    if clip_norm is not None and clip_value is not None:
        raise TrainError("clip_norm and clip_value are both given\n  try       one of them")
    if compile not in (True, False, "auto"):
        raise TrainError(f"compile={compile!r}\n  known     True, False, 'auto'")
    budget = parse_bytes(memory) if isinstance(memory, str) else memory
    if budget is not None and not (isinstance(budget, int) and not isinstance(budget, bool) and budget > 0):
        raise TrainError(f"memory={memory!r}\n  try       bytes as a whole number, or text like '20GiB'")
    if accumulate == 1 and written is not None:
        accumulate = written.microbatches
    if outputs not in (True, False, "local"):
        raise TrainError(f"outputs={outputs!r}\n  known     True, False, 'local'")
    if outputs == "local" and written is not None and (written.is_pipeline or written.place):
        raise PlanError("outputs='local': a pipeline gives its outputs whole\n  try       outputs=True")
    if expert_load and outputs == "local":
        raise TrainError("expert_load with outputs='local'\n  try       outputs=True, or step.expert_load(**batch)")
    buckets = Buckets.of(pad)
    if buckets is not None and outputs:
        raise TrainError("pad: outputs would be those of the padded batch\n  try       outputs=False, or no pad")
    settings = Settings(
        precision,
        accumulate,
        clip_norm,
        budget,
        compile,
        clip_value,
        bool(grads),
        outputs,
        strict,
        bool(expert_load),
        buckets,
    )
    undecided = Undecided.of(mesh) if _is_auto(plan) else None
    return Step(model, one, loss, settings, None if undecided else written, undecided)


def _written(mesh: Any, given: Any) -> plan.Plan | None:
    """The plan for several ranks; None for one device.  With a mesh alone the batch is split over `dp`, or the first
    axis."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh={mesh!r} is no mesh\n  try       mycel.Mesh(dp=2, tp=4)")
    if given is not None and not _is_auto(given):
        return plan.Plan.read(given, mesh)
    if mesh is None or not mesh.axes:
        return None
    return plan.Plan(mesh, batch=["dp" if "dp" in mesh else mesh.axes[0]])


def _is_auto(given: Any) -> bool:
    return isinstance(given, str) and given == "auto"


def _is_ones(x: torch.Tensor) -> bool:
    return x.device.type != "meta" and not x.is_floating_point() and not x.is_complex() and bool((x == 1).all())


def _arranged(given: Sequence[Role], wanted: Sequence[Role]) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
    """Values of the roles `given` -> those of `wanted`, in their order; None where nothing is to be done."""
    at = {role: i for i, role in enumerate(given)}
    order = [at[role] for role in wanted]
    if order == list(range(len(given))):
        return None
    return lambda values: [values[i] for i in order]


class Step:
    """One training step, compiled once for each signature of the batch."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any] | None,
        settings: Settings,
        written: plan.Plan | None = None,
        undecided: Undecided | None = None,
    ) -> None:
        self.model, self.optimizer, self.settings, self.undecided = model, optimizer, settings, undecided
        self._spread(written)
        self.fn, self._loss = objective(model, loss), loss
        self.taken = objective(model, loss, True) if settings.outputs else self.fn
        self.entries: list[CompiledStep] = []
        self.by_rule = not optimizers.without_rule(optimizer)  # is the update part of the program?
        self._told = False  # that it is not
        self._was_searched = False  # its plan: all ranks must have found the same
        self.planned_for: plan.Hardware | None = None  # the devices it is planned for, where these are not its own
        self.grad_norm: torch.Tensor | None = None
        self._gradients: dict[str, torch.Tensor] = {}
        self.steps = 0  # taken, skipped ones among them
        self._link: tuple[str, Link] | None = None  # as it was measured, by its axis
        self._link_watch: LinkWatch | None = None  # of that
        self._codec_rates: dict[str, Curve] = {}  # then, by kind of work
        self.priced = 1  # how often a link was measured and the plan priced by it
        self._taken = 0  # the same, of all that led to this state
        self._evaluation: Forward | None = None
        self._captured_program: Program | None = None
        self._adding: _Adding | None = None
        self._counters: dict[str, torch.Tensor] = {}
        self.loads = ExpertLoads(model, self._counters)
        self.host = HostParameters()
        self._graphs: Any = None  # the memory of recorded steps
        self.traced: StepTrace | None = None  # the last step that was

    def _spread(self, written: plan.Plan | None) -> None:
        """Over the ranks of a plan."""
        model, optimizer = self.model, self.optimizer
        self.written = written
        self.parts = self._sharded(written) if written is not None and written.mesh.world > 1 else None
        self.for_ranks = self.parts is not None  # is what they share kept in the program?
        self.messages = MessageState(self.parts)
        self._fed: dict[tuple[int, int], frozenset[str]] = {}  # by phase and price, whose errors are fed back
        policy = written.synced() if written is not None else None
        self._phases, self._condition = written.phases() if written is not None else ([], None)
        self.outer = OuterSteps(policy, self.parts, self.messages) if policy and self.parts is not None else None
        self.state = StepState(model, optimizer, self.parts, self.counters, self.set_counters, self.messages)

    def _sharded(self, written: plan.Plan) -> ShardedModel:
        """What this rank holds."""
        if written.place:
            return PlacedModel.of(self.model, self.optimizer, written)
        return ShardedModel(self.model, self.optimizer, written)

    def _find_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """For such batches, where it is left to the search."""
        if self.undecided is None:
            return
        world, s, device = self.undecided.world, self.settings, self.device

        def make(count: int, compress: Mapping[str, str], placed: bool = False) -> UnshardedStep:
            settings, ranks = replace(s, accumulate=count), any_plan(world, compress, placed)
            return Step(self.model, self.optimizer, self._loss, settings, ranks).unsharded(*args, **kwargs)

        found = self.undecided.search(
            self.model, self.optimizer, make, device, s.budget, s.accumulate, s.compiles(device), self.by_rule,
            s.outputs != "local",
        )  # fmt: skip
        self.undecided, self._was_searched = None, True
        self._spread(found)
        counts = s.expert_load and not (found.is_pipeline or found.place)
        self.settings = replace(s, accumulate=found.microbatches, expert_load=bool(counts))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step on a batch; returns its loss (with `outputs`, and these), which stays on the device.  Only this
        rank's part of the batch is moved there."""
        args, kwargs = self._padded(args, kwargs)
        signature = self._signature()
        for i, entry in enumerate(self.entries):
            if entry.signature == signature:
                out = entry.call(args, kwargs)
                if out is not MISS:
                    if i:  # the last one used is tried first
                        self.entries.insert(0, self.entries.pop(i))
                    return out
        refuse_without_data(args, kwargs, self.model)
        with without_collector():
            out = self.prepare(*args, **kwargs).entries[0].call(args, kwargs)
        assert out is not MISS, "a step does not fit the arguments it was made for"
        return out

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch, whose gradients are added to those of such calls before, until `apply` takes a step, as
        of one batch: each call weighs what its loss is a mean over."""
        if self.host.held:
            raise TrainError(
                "step.accumulate adds up gradients for parameters that live on the host\n"
                "  try       train_step(…, accumulate=k): parts of one large batch, under any plan"
            )
        if self._adding is None:
            self._adding = _Adding(self)
        args, kwargs = self._padded(args, kwargs)
        return self._adding(*args, **kwargs)

    def apply(self) -> None:
        """A step with the weighted mean of the gradients since the last; skipped if it is not finite."""
        gradients, norm = (self._adding.sums if self._adding is not None else Accumulation()).mean()
        self.grad_norm = norm
        self.steps += 1
        with torch.no_grad():
            if torch.isfinite(norm):
                torch_update.update(self.optimizer, gradients, self.settings.clip_norm, self.settings.clip_value)
            else:
                self.counter("skipped", norm.device).add_(1)
        for p, g in gradients:
            p.grad = g if self.settings.grads else None
        if self.outer is not None:
            self.outer.after_step()

    def __deepcopy__(self, memo: Any) -> Step:
        raise TrainError(
            "a step was copied: it belongs to its model and optimizer, whose tensors it changes in place\n"
            "  try       copy.deepcopy(model), an optimizer for the copy, and a train_step of both"
        )

    def local(self, *args: Any, **kwargs: Any) -> Local:
        """The step that is called with this rank's part alone, of batches like this one, which needs no data
        (device="meta"): of each tensor what `slices` says, or its `rows` where the plan splits nothing else."""
        if self.undecided is not None:
            self._choose_update()
            self._find_plan(args, kwargs)
        return Local(self, args, kwargs)

    def usable(self, entry: CompiledStep) -> bool:
        """Are the optimiser's settings those it was compiled for?"""
        return entry.signature == self._signature()

    def _signature(self) -> tuple[Any, ...]:
        """What a compiled step is for besides the form of its batch: the optimiser's settings, and the plan of now."""
        return (self._phase(), self.priced, self._owed(), *optimizers.signature(self.optimizer, self.by_rule))

    def _owed(self) -> frozenset[str]:
        """Parameters of which errors are kept that the plan of now does not feed back, as far as that is known: one
        step sends these as they are.  The same on all ranks, whoever holds the errors."""
        lossy = self.messages.lossy
        fed = self._fed.get((self._phase(), self.priced)) if lossy else None
        if fed is None or self.written is None or self.outer is not None:
            return frozenset()
        return frozenset(lossy) - fed

    def _phase(self) -> int:
        """Which of the plans of a run holds: by the number of steps, or by what was measured, which all ranks know."""
        if len(self._phases) <= 1:
            return 0
        if self._condition is not None:
            return int(self._condition.holds(self.monitored()))
        taken = self.outer.taken if self.outer is not None else self._taken
        return next(i for i, (until, _) in enumerate(self._phases) if until is None or taken < until)

    def monitored(self) -> dict[str, float]:
        """What the plan has measured of gradients: noise scale, variance, errors of compression; see `monitors.py`."""
        axis = self._watched()
        if not axis or self.written is None:
            return {}
        return monitored(self._counters, {mesh[axis] for mesh in self.written.replica.meshes()})

    def _watched(self) -> str:
        """Along which axis gradients of ranks are compared; "" where they are not."""
        if self.parts is None or self.written is None or not self.written.monitored():
            return ""
        together = self.written.replica
        axes, meshes = [*self.written.compress, *together.batch_axes()], together.meshes()
        return next((a for a in axes if any(a in mesh and mesh[a] > 1 for mesh in meshes)), "")

    def rows(self, size: int, name: str | None = None) -> range:
        """Which rows of a batch of so many are this rank's; `name`: of which tensor, where the plan splits them
        differently."""
        if self.undecided is not None:
            self.undecided.refuse("rows(…)")
        return range(size) if self.parts is None else self.parts.rows(size, name)

    def slices(self, name: str, shape: Sequence[int]) -> tuple[slice, ...]:
        """Which part of a batch tensor of this name and shape is this rank's."""
        if self.undecided is not None:
            self.undecided.refuse("slices(…)")
        return tuple(slice(0, n) for n in shape) if self.parts is None else self.parts.slices(name, shape)

    def prepare(self, *args: Any, **kwargs: Any) -> Step:
        """Compile for such a batch, without taking a step; tensors of its shapes need no data (device="meta")."""
        if TRACING:
            raise TrainError(
                "a train_step was called inside code that is being captured\n  try       call it from plain Python"
            )
        if self.settings.buckets is not None:
            args, kwargs = self.settings.buckets(args, kwargs)
        entry = self.compile(args, kwargs)
        make_room(self.entries, lambda e: e.facts, entry.facts)
        self.entries.insert(0, entry)
        return self

    def _padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The batch in its bucket, once it is shown that padding changes nothing."""
        buckets = self.settings.buckets
        if buckets is None:
            return args, kwargs
        if not buckets.shown:
            refuse_without_data(args, kwargs, self.model)
            whole = self.parts.whole() if self.parts is not None else contextlib.nullcontext()
            with self.host.shown(), whole:
                buckets.show(self.model, lambda model: objective(model, self._loss), args, kwargs)
        return buckets(args, kwargs)

    # -- the way from code to code ------------------------------------------------------------------------------

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledStep:
        """capture -> 16 bits -> head -> shares -> gradient -> parts -> update -> plan -> lower -> code."""
        self._choose_update()
        self._find_plan(args, kwargs)
        s, device = self.settings, self.device
        if s.compiles(device):
            start_workers()
        if device.type == "cpu":
            keep_freed_memory()
        whole, data = (args, kwargs), (args, kwargs)
        if self.parts is not None:
            args, kwargs = data = self.parts.own_batch(args, kwargs)
        args, kwargs = without_host_data(args, kwargs, device)
        self._measure_link(device)
        with self.host.shown(), self.parts.whole() if self.parts is not None else contextlib.nullcontext():
            made, decided, done = self._planned(args, kwargs, data)
        if self.parts is not None:
            self.parts.split(made.captured.device)
            if done.pipeline is not None:
                self.parts.hold(done.pipeline)
                done, made = done.at(self.parts.place), self.parts.own(made)
        program = done.program
        if done.regions:
            warm_up(program, made.captured.device)
        code, source = load(program, made.captured.device, reuse=True, donate=True, compiled=set(done.regions))
        generated = code
        if moves(program):
            self.host.space = space = (self.host.space or HostSpace(made.captured.device)).prepare(program)
            self.host.adopt(program, self._parameters(made))
            code = space.connected(code)
        replayed = self._replayed(code, program, made.captured.device, decided)
        run: Callable[..., Any] = replayed or code
        feed = feed_of(made.captured, made.program)
        if self.parts is not None:
            if self._was_searched:
                self.parts.ranks.agree({"the plan that was found": str(self.written)})
            if decided.compress:
                self.parts.ranks.agree({"how gradients are compressed": str(decided.compressed())})
            if self.outer is not None:
                self._prepare_replicas(self.outer, made)
            self.parts.ranks.connect(program)
            run, feed = self.parts.connected(run), self.parts.feed(made, done.spread, whole)
            if self.settings.outputs == "local":
                run = self.parts.without_padding(run, made, self.parts.rows_of(made))
        islands = made.captured.islands
        timed = TimedCode(run, islands) if islands else None
        call, local = self._bound(made, program, timed or run, feed)
        signature, facts = self._signature(), made.captured.facts
        self._captured_program = made.captured.program
        return CompiledStep(
            done, source, decided, call, local, feed, signature, facts, replayed, islands, timed, generated, made.fp8
        )

    @property
    def device(self) -> torch.device:
        """Where it computes: where the model is, but for what of it lives on the host."""
        return self.host.space.device if self.host.space is not None else device_of(self.model)

    def _parameters(self, made: UnshardedStep) -> dict[Role, torch.Tensor]:
        """The model's own tensors, by their roles in the program."""
        roles = {v.name: made.program.role(v) for v in made.captured.program.inputs}
        return {roles[name]: places[0].read() for name, places in made.captured.state.items() if name in roles}

    def _measure_link(self, device: torch.device) -> None:
        """Where it is left to us how gradients travel: how fast that is now, once."""
        chosen = self._given().compressed() if self.parts is not None else None
        if self.parts is None or chosen is None or not chosen.auto or self._link is not None:
            return
        if self.parts.ranks is None:
            self.parts.meet(world(self.parts.written.mesh, device))
        like = plan.hardware_of(device).links(self._mesh_along(chosen.axis)).of((chosen.axis,))
        messages = timed_messages(self.parts.ranks, chosen.axis)
        self._link = chosen.axis, fitted(like.name, like.ranks, like.busy, messages)
        self._codec_rates = timed_codecs(self.parts.ranks, chosen.codecs())
        self._link_watch = LinkWatch(self.parts.ranks, chosen.axis)

    def _mesh_along(self, axis: str) -> Mesh:
        """The mesh that has most ranks along an axis: of all, or of a sub-model."""
        assert self.written is not None
        return max(self.written.meshes(), key=lambda mesh: mesh[axis])

    def _watch_link(self) -> None:
        """Where the plan was priced by the link as it was: now and then all ranks ask whether that still holds.  If it
        does not for most, the next step is priced anew."""
        if self._link_watch is not None and self._taken % LINK_WATCHED_EVERY == 0 and self._link_watch.is_slow():
            self._link = self._link_watch = None
            self.priced += 1

    def _hardware(self, device: torch.device) -> plan.Hardware:
        """What there is, as far as it is known or was measured."""
        known = plan.hardware_of(device)
        if device.type == "cuda" and self.parts is None:  # ranks that share a host must come to the same plan
            lives = sum(home.nbytes for home in self.host.space.homes.values()) if self.host.space is not None else 0
            known = replace(known, host_memory=int(ROOM * (available() + lives)))
        if self._link is None or self.written is None:
            return known
        known = replace(known, rates={**known.rates, **self._codec_rates})
        return plan.with_link(known, self._mesh_along(self._link[0]), *self._link)

    def _prepare_replicas(self, outer: OuterSteps, made: UnshardedStep) -> None:
        """Replicas agree on what they will say to each other."""
        assert self.parts is not None
        if made.captured.facts:
            raise PlanError(
                "values of the batch decide what the program is, and replicas have parts of it\n"
                f"  at        {'; '.join(str(f) for facts in made.captured.facts for f in facts.facts)}\n"
                f"  try       sync: {{{outer.policy.axis}: every step}}, or keep it a tensor"
            )
        self.parts.ranks.agree({"how replicas become one model": str(outer.policy)})
        outer.prepare(made, self.parts.given(made)[0])

    def _replayed(
        self, code: Callable[..., Any], program: Program, device: torch.device, decided: plan.Plan
    ) -> Replayed | None:
        """The code as a CUDA graph, where there is a GPU whose memory holds what the step makes twice: a graph keeps
        its own, and others, such as an evaluation between steps, need as much again.  Copies to the host have streams
        of their own, which are not recorded."""
        if device.type != "cuda" or not self.settings.compiles(device) or self.parts is not None or moves(program):
            return None
        memory = torch.cuda.get_device_properties(device).total_memory
        if 2 * decided.peak - decided.held > memory:
            return None
        self._graphs = self._graphs or torch.cuda.graph_pool_handle()  # one for all batches: they take turns
        return Replayed(code, program, device, partial(CudaGraph, pool=self._graphs))

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Arguments
    ) -> tuple[UnshardedStep, plan.Plan, lower.Lowered]:
        """The step, its plan and what that makes of it; where `compress` is auto, of the quickest choices the least
        lossy."""
        given = self._given()
        with meshed(given.inside.replica.mesh if self.written is not None else None):
            body = self._captured(args, kwargs, data)
        choices = given.compressions()
        tried = []
        for choice in choices:
            made = self._updated(body, choice.replica)
            tried.append((made, *planned(self._task(made), choice)))
        auto = given.compressed()
        names = auto.candidates() if auto is not None and auto.auto else [""]
        seconds = [decided.predicted.seconds if decided.predicted is not None else 0.0 for _, decided, _ in tried]
        by_name = dict(zip(names, seconds, strict=True))
        best = list(by_name).index(least_lossy(by_name))
        made, decided, done = tried[best]
        self._fed[self._phase(), self.priced] = frozenset(
            role.of for v in made.program.inputs if (role := made.program.role(v)).kind == "error"
        )
        owed = self._owed()
        if owed:
            choice = choices[best].given
            made = self._updated(body, choice.replica, owed)
            decided, done = planned(self._task(made), choice)
        if auto is not None and auto.auto:
            decided = given.with_compression(decided, by_name)
        return made, decided, done

    def _choose_update(self) -> None:
        """Is the update part of the program, or torch's?  The latter is said once."""
        why = optimizers.without_rule(self.optimizer) or optimizers.left_to_torch(self.model, self.optimizer)
        self.by_rule = not why
        if why and not self._told:
            self._told = True
            torch_update.told(self.optimizer, why)

    def _task(self, made: UnshardedStep, device: torch.device | None = None) -> Task:
        """What there is to plan; `device`: where it will run, if the model is not there yet."""
        device = device or made.captured.device
        if device.type not in ("cuda", "cpu") and not self._given().offload.is_none:
            raise PlanError(
                f"offload: a device of type {device.type} has no pinned memory that Mycel knows of\n"
                "  try       offload: none"
            )
        inputs, gathered = self.parts.given(made) if self.parts is not None else ({}, frozenset[int]())
        if self.parts is not None and not self.by_rule:
            split = (name for name in self.parts.stored if not self.parts.layouts[name].is_whole)
            self._refuse_split(split)
        return Task(
            made.program,
            made.body,
            self._hardware(device),
            self.settings.compiles(device),
            inputs,
            gathered,
            self.settings.budget,
            self.parts.rows_of(made) if self.parts is not None and self.settings.outputs == "local" else None,
            at_place=self._given_at(made),
        )

    def _given_at(self, made: UnshardedStep) -> Callable[[int, Program], Given] | None:
        """How inputs lie in the program of each place, where sub-models are on meshes of their own."""
        parts = self.parts
        return partial(parts.given_at, made) if isinstance(parts, PlacedModel) else None

    def _refuse_split(self, split: Iterable[str]) -> None:
        """PlanError where torch would take the update of parts."""
        assert self.parts is not None
        torch_update.refuse_split(self.optimizer, self.parts.plan, split)

    def _given(self) -> plan.Plan:
        """The plan for the next signature of the batch: decisions hold for the first one."""
        if self.written is None:
            return self._with_offload(plan.Plan(Mesh()))
        now = self._phases[self._phase()][1]
        return self._with_offload(now.given if self.entries else now)

    def _with_offload(self, given: plan.Plan) -> plan.Plan:
        """What may live on the host where the plan does not say it: anything, under a budget, on a device whose memory
        is apart from the host's; but for parameters of ranks.  Parameters do in all programs of a step, or in none."""
        said, s = given.offload, self.settings
        if given.decided is not None or given.at_once > 1:
            return given
        by_itself = not (given.is_pipeline or given.place or self._was_searched)
        if said.unsaid and s.budget is not None and self.device.type == "cuda" and by_itself:
            said = plan.AUTO if self.parts is None else replace(plan.AUTO, parameters="none")
        if self.host.held:
            said = replace(said, parameters="host")
        elif said.parameters != "none" and (s.grads or not self.by_rule):
            if said.parameters == "host":
                raise PlanError(
                    "offload: parameters live on the host, where "
                    f"{'gradients are asked for (grads=True)' if s.grads else 'torch cannot update them'}\n"
                    "  try       offload: {optimizer: host, activations: auto}"
                )
            said = replace(said, parameters="none")
        return replace(given, offload=said)

    def stage_owners(self, device: torch.device, *args: Any, **kwargs: Any) -> dict[str, tuple[int, ...]]:
        """Of a pipeline whose model has no data yet: which places along its stages will hold each tensor, by name, for
        such a batch on such a device."""
        assert self.parts is not None
        made = self.unsharded(*args, **kwargs)
        _, done = planned(self._task(made, device), self._given())
        assert done.pipeline is not None
        return self.parts.owners_under(done.pipeline)

    def unsharded(self, *args: Any, **kwargs: Any) -> UnshardedStep:
        """The step as one program on one device, for such a batch: what there is to plan."""
        was, self.for_ranks = self.for_ranks, True
        try:
            return self._unsharded(args, kwargs)
        finally:
            self.for_ranks = was

    def _unsharded(self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Arguments | None = None) -> UnshardedStep:
        """The whole step as one program, on one device; manual regions are those of the mesh.  `data`: the batch, where
        the arguments hold none."""
        with meshed(self.written.inside.replica.mesh if self.written is not None else None):
            return self._updated(self._captured(args, kwargs, data or (args, kwargs)), self._given())

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Arguments) -> UnshardedStep:
        """Loss and gradients."""
        s = self.settings
        batch = Batch(args, kwargs, s.accumulate)
        known = roles_of(self.model, self.optimizer)
        first = Batch(*data, s.accumulate).part()
        watched = self.loads.seen.watched(self.taken) if s.expert_load else self.taken
        captured = capture_call(watched, *batch.part(), known=known, differentiated=True, data=first, strict=s.strict)
        whole = captured
        if batch.parts > 1:
            whole = capture_call(watched, args, kwargs, known=known, differentiated=True, data=data, strict=s.strict)
            captured = self._for_all_parts(captured, whole, batch, data)
        captured, whole = self._unmasked(captured, whole, data)
        program = self._prepared(replace(captured, program=transform.with_numbers_of(captured.program, whole.program)))
        plain = program
        if s.precision == "fp16":
            program = transform.with_scale(program)
        trained = self._trained(captured)
        counting = None
        if batch.parts > 1:
            if captured.effects:
                raise TrainError(
                    "with accumulate the model keeps tensors in attributes\n"
                    "  try       accumulate=1, or buffers that it updates"
                )
            split, large = batch.split(captured.leaves), self._prepared(whole)
            refuse_outputs(program, large, batch.parts)
            meeting = transform.coupled(captured.program, whole.program, trained.values(), split)
            if meeting:
                met = None if self._staged() else transform.by_parts(plain, large, trained.values(), split, batch.parts)
                if met is not None:
                    met = check(transform.with_scale(met) if s.precision == "fp16" else met)
                    results = len(met.results)
                    met, fp8 = self._in_eight_bits(met)
                    program, groups = self._differentiated(met, trained)
                    return UnshardedStep(captured, program, tuple(groups), results, program.entry, fp8)
                warnings.warn(
                    "accumulate: rows of the batch meet before the loss sums them up, so the loss is of its parts,\n"
                    f"not of the whole: {'; '.join(meeting[:5])}\n"
                    "  try       accumulate=1, or memory=… for a batch that does not fit",
                    stacklevel=4,
                )
            rows = transform.joined(program, large)
            program, counting, unseen = transform.shares(program, large, trained.values(), split, batch.parts)
            if unseen:
                warnings.warn(
                    f"accumulate: no sum or mean over the batch, so its parts weigh the same: {'; '.join(unseen)}",
                    stacklevel=4,
                )
        results = len(program.results)
        program, fp8 = self._in_eight_bits(program)
        program, groups = self._differentiated(program, trained)
        if s.compiles(self.device):
            program = check(transform.in_pieces(program))
        body = program.entry
        if counting is not None:
            program = check(transform.microbatch(program, counting, batch.parts, split, rows))
            body = transform.BODY
        elif self.written is not None and self.written.place:  # stages are cut from what is done with a part
            tensors = [v.name for v in program.inputs if program.role(v).kind == "batch" and v.ndim]
            program = check(transform.microbatch(program, transform.no_counts(program), 1, tensors))
            body = transform.BODY
        return UnshardedStep(captured, program, tuple(groups), results, body, fp8)

    def _updated(self, body: UnshardedStep, given: plan.Plan, owed: Collection[str] = ()) -> UnshardedStep:
        """Loss and gradients -> the whole step, with gradients compressed as a plan says; `owed`: those that are sent
        with what was lost of them before."""
        s, groups = self.settings, [g.group for g in body.groups]
        clipping = (s.clip_norm, s.clip_value) if self.by_rule else (None, None)
        names, late = [name for g in groups for name in g.params], given.delayed() if self.parts is not None else None
        program = body.program
        if late is not None:
            program = check(transform.delay_gradients(program, names, body.results, late.axis))
        watched, by_group = self._watched(), [g.params for g in groups]
        if watched:
            ranks = [given.ranks_along(watched, name) for name in names]
            program = check(transform.monitor_ranks(program, ranks, body.results, watched))
        chosen = {**self._chosen(groups, given), **dict.fromkeys(owed, Compression.parse("fp32+ef"))}
        if chosen:
            axis = next(iter(given.compress), None) or self.messages.lossy[next(iter(owed))]
            program = check(transform.compress_gradients(program, groups, body.results, chosen, axis))
        if watched:
            assert self.written is not None
            errors = "error" in self.written.monitored()
            program = check(transform.monitor_sums(program, ranks, by_group, body.results, watched, errors))
        if late is not None and late.options["correction"]:
            program = check(transform.correct_delay(program, names, body.results, late.options["correction"]))
        program, groups = transform.frozen_groups(program, groups, body.results, chosen)
        program = check(transform.optimise(program, groups, body.results, *clipping, s.grads))
        shapes = {n: self.parts.shapes[n] for n in names if n in self.parts.shapes} if self.parts is not None else {}
        told = given.told_codecs(shapes) if self.by_rule else {}
        if told:
            program = check(transform.tell_differences(program, told, given.over[0]))
        return replace(body, program=program)

    def _chosen(self, groups: Sequence[transform.ParameterGroup], given: plan.Plan) -> dict[str, Compression]:
        """How gradients are compressed that a plan says so of, by parameter."""
        how = given.compressed()
        if how is None or self.parts is None:
            return {}
        names = [name for group in groups for name in group.params]
        trained = {name: self.parts.shapes[name] for name in names if name in self.parts.shapes}
        others = {name: x.dtype for name, x in self.parts.tensors() if name not in trained}
        how.refuse_unused(trained, others)
        s = self.settings
        chosen = {name: codec for name, codec in how.of(trained).items() if given.ranks_along(how.axis, name) > 1}
        asking = {
            "clip_norm": s.clip_norm, "clip_value": s.clip_value, "grads=True": s.grads,
            "monitor": given.monitored(), "sync": given.delayed(),
        }  # fmt: skip
        others_asking = [name for name, said in asking.items() if said]
        for group in groups:
            for name in group.params:
                if name in chosen:
                    flags = dict(group.flags)
                    refuse_update(how.axis, name, chosen[name], group.kind, flags, self._phase() > 0, others_asking)
        return chosen

    def _for_all_parts(self, captured: Captured, whole: Captured, batch: Batch, data: Arguments) -> Captured:
        """What was captured for the first part, where what the batch decided is decided so by every part."""
        split = batch.split(captured.leaves)
        of_parts = tuple(f.in_parts(batch.parts, split) for f in captured.facts)
        leaves: list[torch.Tensor] = []
        flatten(data, leaves)
        inputs = input_tensors(captured, leaves)
        for facts in of_parts:
            if not facts.hold(*(inputs[name] for name in facts.inputs)):
                raise TrainError(
                    "with accumulate the parts of a batch decide differently what the program is\n"
                    f"  at        {'; '.join(map(str, facts.facts))}\n"
                    "  try       accumulate=1, or keep it a tensor: torch.where, masks, padding to a fixed size"
                )
        return replace(captured, facts=(*of_parts, *whole.facts))

    def _unmasked(self, captured: Captured, whole: Captured, data: Arguments) -> tuple[Captured, Captured]:
        """Inputs of nothing but ones are taken for constants where masks of attention go for it: a guard asks at every
        call, and other batches get a program that reads them.  A rank that has a part of the batch cannot ask."""
        leaves: list[torch.Tensor] = []
        flatten(data, leaves)
        given = dict(zip(whole.leaves, leaves, strict=True))
        ones = [v for v in whole.program.inputs if v.name in given and v.ndim > 1 and _is_ones(given[v.name])]
        if not ones or self.parts is not None or self.settings.buckets is not None:  # one program for each bucket
            return captured, whole

        def left(inputs: Sequence[Var]) -> int:
            return transform.masks(transform.simplify(transform.with_ones(whole.program, {v.name for v in inputs})))

        least = left(ones)
        if least == left(()):
            return captured, whole
        for v in ones[1:]:  # those that matter
            others = [w for w in ones if w is not v]
            ones = others if left(others) == least else ones
        fact, names = all_ones(ones, f"{', '.join(v.name for v in ones)}: all ones"), {v.name for v in ones}
        facts = (*captured.facts, fact)
        whole = replace(whole, program=transform.with_ones(whole.program, names))
        return replace(captured, program=transform.with_ones(captured.program, names), facts=facts), whole

    def _prepared(self, captured: Captured) -> Program:
        """The loss, simplified, in its precision, with its head."""
        half = PRECISIONS[self.settings.precision]
        program = transform.simplify(captured.program, ranks=self.for_ranks)
        if half is not None:
            program = check(transform.precision(program, half))
        return check(transform.head(program, mean=half is not torch.float16 and self.settings.accumulate == 1))

    def _in_eight_bits(self, program: Program) -> tuple[Program, plan.Fp8Products | None]:
        """With precision="fp8" the program with products of linear layers in 8 bits, and which these are."""
        if self.settings.precision != "fp8":
            return program, None
        hardware = self.planned_for
        if hardware is None:
            plan.refuse_without_fp8(self.device)
            hardware = plan.hardware_of(self.device)
        chosen = plan.fp8_products(program, hardware, self.settings.compiles(self.device))
        if not chosen.narrow:
            reasons = "; ".join(f"{reason}: {', '.join(names[:3])}" for reason, names in chosen.wide.items())
            warnings.warn(
                'precision="fp8": no product is in 8 bits, all are as with precision="bf16"\n'
                f"  because   {reasons or 'the model has no linear layers'}",
                stacklevel=4,
            )
        return check(transform.fp8(program, chosen.narrow)), chosen

    def _trained(self, captured: Captured) -> dict[int, str]:
        """Parameters the optimiser may change and the loss uses, by id: the names of their inputs."""
        at = {id(places[0].read()): name for name, places in captured.state.items()}
        found = {id(p): at[id(p)] for p in optimizers.trainable(self.optimizer) if id(p) in at}
        if self.settings.precision == "fp16" and any(p.dtype == torch.bfloat16 for p in self.model.parameters()):
            raise TrainError('precision="fp16" with parameters in bf16\n  try       precision="bf16", or model.float()')
        if not found:
            raise GradientError("the loss depends on no parameter of the optimizer that requires a gradient")
        return found

    def _staged(self) -> bool:
        """Are stages cut from what is done with a part, or sub-models placed?"""
        return self.written is not None and bool(self.written.is_pipeline or self.written.place)

    def _differentiated(self, program: Program, trained: dict[int, str]) -> tuple[Program, list[optimizers.Bound]]:
        """The program that also returns gradients, group by group, of the parameters the loss depends on."""
        names = {id_: program.roles[v].name for id_, v in trained.items()}
        wrt, results = program.positions(trained.values()), len(program.results)
        scaled = transform.scaled(program)
        made = transform.value_and_grad(
            scaled, wrt, len(scaled.results) - 1 if scaled is not program else 0, dense=False
        )
        outs = list(made.main.outputs)
        if scaled is not program:
            del outs[results]  # the scaled loss
        reached = {
            name: g for name, g in zip(names.values(), outs[results : results + len(wrt)], strict=True) if g is not None
        }
        if not reached:
            raise GradientError("the loss depends on no parameter of the optimizer that requires a gradient")
        bound = {id_: name for id_, name in names.items() if name in reached}
        groups = optimizers.bind_groups(self.optimizer, bound, self.by_rule)
        ordered = [reached[name] for g in groups for name in g.group.params]
        block = replace(made.main, outputs=(*outs[:results], *ordered, *outs[results + len(wrt) :]))
        return transform.simplify(
            replace(made, blocks={**made.blocks, made.entry: block}), ranks=self.for_ranks
        ), groups

    def _bound(self, made: UnshardedStep, program: Program, code: Callable[..., Any], feed: Feed) -> tuple[Call, Call]:
        """The guarded calls, of a whole batch and of a part: they read what the program's inputs are, each by its role,
        and run the code."""
        captured, groups, results = made.captured, made.groups, made.results
        step, optimizer = self, self.optimizer
        readers = self._readers(made, program)
        gradients = bool(program.inputs_of("gradient"))
        given = [made.program.role(v) for v in captured.program.inputs]
        arranged = _arranged(
            [*given, *(role for roles, _ in readers for role in roles)], [program.role(v) for v in program.inputs]
        )

        keys = [i for i, v in enumerate(captured.program.inputs) if made.program.role(v).kind == "key"]
        owed, lossy = self._owed(), lossy_of({made.program.role(v) for v in made.program.inputs})

        def run(inputs: Sequence[Any], fed: Fed) -> Any:
            if step.outer is not None:
                step.outer.before_step()
            with torch.inference_mode(False), torch.no_grad():
                first = [g for g in groups if g.is_first(optimizer)]
                before = step.skipped if first or owed else 0
                values = fed(inputs)
                if step.outer is not None:  # each replica draws its own
                    for i in keys:
                        values[i] = values[i] + step.outer.parts.replica * BY_REPLICA
                for _, read in readers:
                    values += read()
                outs = code(*(values if arranged is None else arranged(values)))
                if first and step.skipped > before:  # the next one is the first
                    for g in first:
                        g.forget(optimizer)
                if lossy:
                    step.messages.note(lossy)
                if owed and step.skipped == before:
                    step.messages.drop(owed)
                if gradients:
                    step._update(made, outs)
            step.grad_norm = outs[results]
            step.steps += 1
            step._taken += 1
            for each in each_of(optimizer):  # schedulers ask whether a step came before theirs
                each._opt_called = True  # type: ignore[attr-defined]
            if step.outer is not None:
                step.outer.after_step()
            step._watch_link()
            return outs[:results]

        def bound(batch: Sequence[Var], fed: Fed) -> Call:
            call = bind(called(captured, batch, program), lambda *inputs: run(inputs, fed))[0]
            return step.loads.noted(call)

        whole = bound(feed.inputs, feed.cut)
        if captured.facts and self.parts is not None:
            return whole, refusing_parts(captured.facts)
        return whole, bound(feed.parts(), feed.pad)

    def _readers(self, made: UnshardedStep, program: Program) -> list[tuple[list[Role], Callable[[], list[Any]]]]:
        """What gives the program's inputs besides those of the call their values, and the roles of these."""
        device = made.captured.device

        def counter(role: Role) -> list[torch.Tensor]:
            return [self.counter(role.name, device)]

        def gradients(params: Sequence[torch.nn.Parameter], names: Sequence[str]) -> list[torch.Tensor]:
            return [self._gradient(p, name) for p, name in zip(params, names, strict=True)]

        read = {v for e in program.main.eqns if not is_group_update(e.op) for v in e.vars}
        read_roles = {program.role(v) for v in program.inputs_of("hyper") if v in read}  # by ordinary equations

        def of_group(group: optimizers.Bound) -> list[Any]:
            hyper = group.hyper(self.optimizer)  # before its state is made: a first step is one without
            if read_roles:
                named = zip(group.group.hyper_roles(), hyper, strict=True)
                hyper = [torch.as_tensor(x, dtype=torch.float64) if r in read_roles else x for r, x in named]
            state = (
                group.state(self.optimizer, homes, device)
                if self.parts is None
                else self.parts.state(group, homes, device)
            )
            return [*state, *hyper]

        def of_all(messages: Sequence[tuple[Role, Type]]) -> list[torch.Tensor]:
            return [self.messages.value(role, type, device) for role, type in messages]

        # in the order in which the passes add inputs: then values need no rearranging at each call
        on_host = [program.role(v) for v in program.inputs if v.type.space != DEVICE]
        homes = {role: self.host.space.homes[role] for role in on_host} if self.host.space is not None else {}
        of_messages = [(program.role(v), v.type) for v in program.inputs if program.role(v).kind in KINDS]
        messages = [([role for role, _ in of_messages], partial(of_all, of_messages))] if of_messages else []
        counters = [program.role(v) for v in program.inputs_of("counter")]
        grouped = [([*g.group.state_roles(), *g.group.hyper_roles()], partial(of_group, g)) for g in made.groups]
        trained = {name: p for g in made.groups for p, name in zip(g.params, g.group.params, strict=True)}
        kept = [program.role(v) for v in program.inputs_of("gradient")]
        params = [trained[role.of] for role in kept]
        left = [(kept, partial(gradients, params, [role.of for role in kept]))] if kept else []
        scale, others = (
            [r for r in counters if r == transform.LOSS_SCALE],
            [r for r in counters if r != transform.LOSS_SCALE],
        )
        counted = [([r], partial(counter, r)) for r in others]
        return [*(([r], partial(counter, r)) for r in scale), *messages, *grouped, *left, *counted]

    def _gradient(self, p: torch.nn.Parameter, name: str) -> torch.Tensor:
        """Where the program puts the gradient of a parameter."""
        held = self._gradients.get(name)
        if held is None or held.shape != p.shape or held.dtype != p.dtype or held.device != p.device:
            held = self._gradients[name] = torch.zeros_like(p, memory_format=torch.preserve_format).detach()
        return held

    def _gradients_of(self, made: UnshardedStep) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        named = [(p, name) for g in made.groups for p, name in zip(g.params, g.group.params, strict=True)]
        return [(p, self._gradients[name]) for p, name in named]

    def _update(self, made: UnshardedStep, outs: Sequence[Any]) -> None:
        """What is left to do with gradients after the program: parameters get them, and the optimiser, where its update
        is no part of the program."""
        pairs = self._gradients_of(made)
        finite = self.by_rule or bool(torch.isfinite(outs[made.results]) & torch.isfinite(outs[0]))
        if not self.by_rule and finite:
            torch_update.update(self.optimizer, pairs, self.settings.clip_norm, self.settings.clip_value)
        if self.by_rule or not finite or not self.settings.grads:
            for p, g in pairs:
                p.grad = g if self.settings.grads else None

    def forward(self, fn: Callable[..., Any] | None = None) -> Forward:
        """The loss of a batch (or what `fn` makes of it with the model), under the plan, without a step."""
        return Forward(
            fn or self.fn, self.model, self._prepared, self.parts, strict=self.settings.strict, host=self.host
        )

    def _evaluating(self) -> Forward:
        """The loss of a batch, and with `outputs` these, as a step gives them."""
        local = self.settings.outputs == "local"
        return Forward(self.taken, self.model, self._prepared, self.parts, local, self.settings.strict, self.host)

    def expert_load(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """How many choices of a batch each expert gets, by layer; without a batch (`train_step(expert_load=True)`) the
        moving average over about ten steps.  RunError where a router gives what is no number, or no expert."""
        if args or kwargs:
            return self.loads.of_batch(self.forward, args, kwargs)
        if not self.settings.expert_load:
            raise TrainError(
                "the step does not count what its experts get\n"
                "  try       train_step(…, expert_load=True), or step.expert_load(**batch)"
            )
        return self.loads.average(bool(self.entries))

    def broken_router(self) -> str:
        """Whose router gave weights that are no numbers in the last step (`expert_load=True`); empty: none."""
        return self.loads.broken()

    def rank_load(self, load: Mapping[str, torch.Tensor] | None = None) -> dict[str, list[float]]:
        """What the experts of each rank get, by layer, for layers whose experts are split: of the loads that steps have
        measured (`expert_load=True`), or of `load`, as `step.expert_load(**batch)` gives it."""
        return {g.names[0]: by_rank(g.load.tolist(), sizes) for g, sizes in self._split_experts(load)}

    def rebalance(self, load: Mapping[str, torch.Tensor] | None = None) -> list[Placement]:
        """Experts change ranks so that the busiest rank of a layer has less to do, by loads as in `rank_load`.  Rows of
        routers, experts and optimiser state change places together: what the model computes stays, the numbers of its
        experts do not.  All ranks call this."""
        chosen = [(group.layer, group.placed(sizes)) for group, sizes in self._split_experts(load)]
        if not chosen:
            return []
        self._refuse_rebalancing()
        with self._gathering(), torch.no_grad():
            for layer, placement in chosen:
                if placement.moves:
                    self.state.reorder({name: (dim, placement.order) for name, dim in layer.tensors.items()})
        self.loads.reorder({name: placement.order for _, placement in chosen for name in placement.layers})
        return [placement for _, placement in chosen]

    def _split_experts(self, load: Mapping[str, torch.Tensor] | None) -> list[tuple[SharedExperts, list[int]]]:
        """Layers whose experts several ranks share, with their loads, and how many experts each rank has."""
        loads = self.expert_load() if load is None else dict(load)
        if self.parts is None or not self.parts.is_split or not loads or self._captured_program is None:
            return []
        groups = self.loads.shared(loads, self.parts, self._captured_program)
        return [(group, sizes) for group, sizes in groups if len(sizes) > 1]

    def _refuse_rebalancing(self) -> None:
        assert self.written is not None
        apart = {"stages": self.written.is_pipeline, "place": bool(self.written.place), "sync": bool(self.written.sync)}
        apart["compress"] = bool(self.messages.held)
        if kind := next((name for name, is_there in apart.items() if is_there), ""):
            raise PlanError(
                f"experts cannot change ranks under a plan with {kind}\n  try       a plan without, or no rebalance"
            )

    # -- what one may ask ----------------------------------------------------------------------------------------

    def counter(self, name: str, device: torch.device) -> torch.Tensor:
        """A number the step keeps on its device."""
        if name not in self._counters:
            first = {"loss_scale": torch.tensor(SCALE), "good_steps": torch.tensor(0, dtype=torch.int32)}
            is_average = name.startswith((transform.SMALL, transform.LARGE, transform.ERROR))
            self._counters[name] = first.get(name, torch.tensor(0.0 if is_average else 0)).to(device)
        return self._counters[name]

    @property
    def skipped(self) -> int:
        """How many steps were skipped because their gradients were not finite."""
        return int(self._counters["skipped"]) if "skipped" in self._counters else 0

    def counters(self) -> dict[str, torch.Tensor]:
        """What the step keeps besides the model and the optimiser: counters, and the loss scale of fp16."""
        number = self.outer.taken if self.outer is not None else self._taken
        taken = {TAKEN: torch.tensor(number)} if self.outer is not None or len(self._phases) > 1 else {}
        return {k: v.clone() for k, v in self._counters.items()} | taken

    def set_counters(self, counters: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `counters` gave."""
        device = self.device
        self._counters.clear()
        self._counters |= {k: v.to(device).clone() for k, v in counters.items() if k != TAKEN}
        self._taken = int(counters.get(TAKEN, 0))
        if self.outer is not None:
            self.outer.go_on(self._taken)

    # -- a model in parts is still a model (`step_state.py`); where there are ranks, all of them call these ---------

    def state_dict(self) -> dict[str, Any]:
        """{"model", "optimizer", "step"}: as torch's own, whole on every rank."""
        with self._gathering():
            return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave, under any plan."""
        with self._gathering():
            self.state.load_state_dict(state)

    def save(self, folder: str | Path, keep: int = 2) -> Path:
        """A checkpoint of model, optimiser and step in a folder, of which the last `keep` stay; each rank writes its
        part."""
        return self.state.save(folder, self.steps, keep)

    def load(self, folder: str | Path) -> None:
        """Continue from the last checkpoint in a folder, which may have been saved under another plan (`mycel train`'s
        too), or take the weights of a folder that `export`, transformers, torch.save (pytorch_model.bin) or
        torch.distributed.checkpoint wrote."""
        self.steps = self.state.load(folder)

    def export(self, folder: str | Path) -> Path:
        """The model, whole: in Hugging Face form if it is one of theirs, else as model.safetensors."""
        with self._gathering():
            return self.state.export(folder)

    @contextlib.contextmanager
    def whole(self, rank: int | None = None) -> Iterator[torch.nn.Module]:
        """A context in which the model is whole, on all ranks or on one, and on its device: to call it, look at it or
        save it."""
        with self.host.on_device(), self.state.whole(rank) as model:
            yield model

    def _gathering(self) -> contextlib.AbstractContextManager[None]:
        """Ranks send each other what is on their devices."""
        return self.host.on_device() if self.parts is not None else contextlib.nullcontext()

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch (with `outputs`, and these) in evaluation mode, without a step; under the plan."""
        args, kwargs = self._padded(args, kwargs)
        if self.undecided is not None or (self.parts is not None and not self.parts.is_split):
            self.prepare(*args, **kwargs)  # a step says how parameters lie
        self._evaluation = self._evaluation or self._evaluating()
        with evaluating(self.model):
            return self._evaluation(*args, **kwargs)

    @contextlib.contextmanager
    def trace(self) -> Iterator[StepTrace]:
        """A context in which one step is taken, of the last batch's signature: when each rank was in which part of it.
        All ranks enter it, and each knows of all when it ends; `explain` draws it from then on."""
        entry = self._entry()
        if entry.replayed is not None:
            raise TrainError(
                "a step that is replayed as a CUDA graph has no parts to be timed\n  try       compile=False"
            )
        assert entry.code is not None
        pipeline = entry.lowered.pipeline
        trace = StepTrace(entry.plan, pipeline.schedule if pipeline is not None else None)
        with recording(entry.code, entry.program, self.device) as spans:
            yield trace
        told = self.state.process.tell([span.data() for span in spans])
        trace.spans = [[Span(**data) for data in each] for each in told]
        self.traced = trace

    @property
    def plan(self) -> plan.Plan:
        """What was given and what was decided for the last batch: str(step.plan) is YAML that train_step(plan=…)
        takes."""
        return self._entry().plan

    @property
    def program(self) -> Program:
        """The program of the last batch."""
        return self._entry().program

    @property
    def source(self) -> str:
        """The Python that runs for the last batch."""
        return self._entry().source

    def _entry(self) -> CompiledStep:
        if not self.entries:
            raise TrainError("the step has not seen a batch yet\n  try       step.prepare(**batch)")
        return self.entries[0]

    def explain(self) -> str:
        """What runs, and why."""
        return explained(self._entry(), self.settings, self.device, self.parts, self.traced, self.priced)


class _Adding(Step):
    """A step that leaves the update to another one: its gradients are added up for it."""

    def __init__(self, of: Step) -> None:
        settings = replace(of.settings, clip_norm=None, clip_value=None, buckets=None, expert_load=False)
        written = of.written  # the mean of gradients is what counts
        sync = written.sync if written is not None and written.synced() else {}
        exact = replace(written, compress={}, sync=sync) if written is not None else None
        super().__init__(of.model, of.optimizer, None, settings, exact)
        self.fn, self.taken, self.parts, self.by_rule = of.fn, of.taken, of.parts, False
        self.sums = Accumulation()
        self._weights: list[float] = []  # of the call that is under way
        self._weigh = CallWeights(self._whole, lambda captured: self._trained(captured).values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.parts.own_batch(args, kwargs) if self.parts is not None else (args, kwargs)
        self._weights = self._weigh(*own)
        return super().__call__(*args, **kwargs)

    def _whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """The loss of a batch as it is captured."""
        known, data = roles_of(self.model, self.optimizer), (args, kwargs)
        args, kwargs = without_host_data(args, kwargs, device_of(self.model))
        with self.parts.whole() if self.parts is not None else contextlib.nullcontext():
            return capture_call(
                self.taken, args, kwargs, known=known, differentiated=True, data=data, strict=self.settings.strict
            )

    def _choose_update(self) -> None:
        """Not here."""

    def _refuse_split(self, split: Iterable[str]) -> None:
        name = next(iter(split), None)
        if self.parts is not None and (name is not None or self.parts.plan.zero):
            what = f"the plan splits {name}" if name is not None else f"zero {self.parts.plan.zero} splits its state"
            raise PlanError(
                f"step.apply() takes the update of whole parameters, but {what}\n"
                "  try       train_step(…, accumulate=k): parts of one large batch, under any plan"
            )

    def _update(self, made: UnshardedStep, outs: Sequence[Any]) -> None:
        self.sums.add(self._gradients_of(made), self._weights)
