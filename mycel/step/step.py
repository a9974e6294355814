"""A training step as its user has it: called with batches, asked, saved, traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mycel import optimizers, plan, torch_update
from mycel.accumulation import Accumulation, CallWeights
from mycel.buckets import CompiledSizes
from mycel.capture import MISS, TRACING, Captured, changed, make_room
from mycel.capture import capture as capture_call
from mycel.changing_values import CompiledValues
from mycel.errors import PlanError, TrainError
from mycel.expert_placement import Placement, SharedExperts, by_rank
from mycel.feed import Arguments, Local, refuse_without_data, without_host_data
from mycel.forward import Forward, device_of, evaluating
from mycel.ir import Program, walk
from mycel.objective import objective
from mycel.outer_steps import TAKEN
from mycel.parts import UnshardedStep, roles_of
from mycel.run import Span, recording, without_collector
from mycel.step.applying import OnSums, given_gradients
from mycel.step.auto_plan import Undecided
from mycel.step.compiled_step import CompiledStep
from mycel.step.compiler import StepCompiler
from mycel.step.gradients import trained
from mycel.step.part_times import TimedStep
from mycel.step.router_watch import RouterWatch
from mycel.step.settings import Settings
from mycel.step.step_state import StepState
from mycel.step.step_text import explained
from mycel.step.step_trace import StepTrace
from mycel.step.updating import AddingUp, norm_of


class Step(StepCompiler):
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
        super().__init__(model, optimizer, loss, settings, written, undecided)
        self._evaluation: Forward | None = None
        self._adding: _Adding | None = None
        self._applying: dict[tuple[int, ...], _Applying] = {}  # by the parameters that have gradients
        self._compiled_sizes = CompiledSizes()
        self._compiled_values = CompiledValues()
        self.traced: StepTrace | None = None  # the last step that was
        self.watch = RouterWatch(lambda batch: self.loads.check(self._routers, *batch))

    def _spread(self, written: plan.Plan | None) -> None:
        super()._spread(written)
        model, optimizer = self.model, self.optimizer
        self.state = StepState(model, optimizer, self.parts, self.counters, self.set_counters, self.messages)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step on a batch; returns its loss (with `outputs`, and these), which stays on the device.  Only this
        rank's part of the batch is moved there."""
        if self._adding is not None:
            self.refuse_call()
        args, kwargs = self._padded(args, kwargs)
        out = self._called(args, kwargs)
        if self.watch.is_on:
            self.watch.see(out[0] if self.settings.outputs else out, (args, kwargs))
        return out

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The code that fits the arguments, which is compiled where there is none."""
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
        if self.settings.buckets is None:
            self._compiled_sizes.add(args, kwargs)
        self._compiled_values.add(args, kwargs)
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
        updating = self._adding.updating if self._adding is not None else None
        gradients = (updating.sums if updating is not None else Accumulation()).mean()
        self.steps += 1
        with self._calling("step.apply", often=True), torch.no_grad():
            self.grad_norm = norm = norm_of(self.parts, gradients)
            if not torch.isfinite(norm):
                self._counters.on(norm.device, "skipped").add_(1)
            elif self.parts is not None and updating is not None and updating.by_program(self.parts):
                torch_update.clip(gradients.values(), norm, self.settings.clip_norm, self.settings.clip_value)
                self._apply_in_parts(gradients)
            else:
                clipping = self.settings.clip_norm, self.settings.clip_value
                torch_update.update(self.optimizer, gradients.items(), *clipping, partial(norm_of, self.parts))
        for p, g in gradients.items():
            p.grad = g if self.settings.grads else None

    def _apply_in_parts(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        key = tuple(map(id, gradients))
        if key not in self._applying:
            self._applying[key] = _Applying(self, [*gradients])
        self._applying[key].apply_to(gradients)

    def __deepcopy__(self, memo: Any) -> Step:
        raise TrainError(
            "a step was copied: it belongs to its model and optimizer, whose tensors it changes in place\n"
            "  try       copy.deepcopy(model), an optimizer for the copy, and a train_step of both"
        )

    # -- batches -------------------------------------------------------------------------------------------------

    def local(self, *args: Any, **kwargs: Any) -> Local:
        """The step that is called with this rank's part alone, of batches like this one, which needs no data
        (device="meta"): of each tensor what `slices` says, or its `rows` where the plan splits nothing else."""
        if self.undecided is not None:
            self.updating.choose()
            self._find_plan(args, kwargs)
        return Local(self, args, kwargs)

    def usable(self, entry: CompiledStep) -> bool:
        """Are the optimiser's settings those it was compiled for?"""
        return entry.signature == self._signature()

    def refuse_call(self) -> None:
        """A step between `accumulate` and `apply` would move the weights that the gradients so far are of."""
        calls = len(self._adding.updating.sums.weights) if self._adding is not None else 0
        if calls:
            raise TrainError(
                f"gradients of {calls} call{'s' * (calls > 1)} of step.accumulate wait for step.apply(): a step now "
                "would move the weights that they are of\n"
                "  try       step.apply() before, or step.accumulate(…) for this batch too"
            )

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
        self._why_again = self._why(args, kwargs)
        try:
            entry = self.compile(args, kwargs)
        finally:
            self._why_again = ""
        self.watch.is_on = not self.settings.expert_load and self._has_experts()
        make_room(self.entries, lambda e: e.facts, entry.facts)
        self.entries.insert(0, entry)
        return self

    def _why(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why it is captured again, if it is; other ranks are told."""
        if self._captured is None or self.parts is None:
            return ""
        settings = "" if self.entries and self.usable(self.entries[0]) else "settings of the optimiser, or its plan"
        return changed(self._captured, args, kwargs) or settings or "there is no program for such a call"

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

    # -- without a step ------------------------------------------------------------------------------------------

    def forward(
        self, fn: Callable[..., Any] | None = None, changed: Callable[[Captured], Captured] | None = None
    ) -> Forward:
        """The loss of a batch (or what `fn` makes of it with the model), under the plan, without a step;
        `changed`: what becomes of it once it is captured."""
        strict, host = self.settings.strict, self.host
        return Forward(
            fn or self.fn, self.model, self._prepared, self.parts, strict=strict, host=host, changed=changed,
            hardware_of=self.corrected_hardware,
        )  # fmt: skip

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch (with `outputs`, and these) in evaluation mode, without a step; under the plan."""
        args, kwargs = self._padded(args, kwargs)
        if self.undecided is not None or (self.parts is not None and not self.parts.is_split):
            self.prepare(*args, **kwargs)  # a step says how parameters lie
        self._evaluation = self._evaluation or self._evaluating()
        with evaluating(self.model), self._calling("step.evaluate", often=True):
            return self._evaluation(*args, **kwargs)

    def _evaluating(self) -> Forward:
        """The loss of a batch, and with `outputs` these, as a step gives them."""
        local = self.settings.outputs == "local"
        return Forward(
            self.whole_fn, self.model, self._prepared, self.parts, local, self.settings.strict, self.host,
            hardware_of=self.corrected_hardware,
        )  # fmt: skip

    # -- experts -------------------------------------------------------------------------------------------------

    def expert_load(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """How many choices of a batch each expert gets, by layer; without a batch (`train_step(expert_load=True)`) the
        moving average over about ten steps.  RunError where a router gives what is no number, or no expert."""
        if args or kwargs:
            return self.loads.of_batch(self._routers, args, kwargs)
        if not self.settings.expert_load:
            raise TrainError(
                "the step does not count what its experts get\n"
                "  try       train_step(…, expert_load=True), or step.expert_load(**batch)"
            )
        return self.loads.average(bool(self.entries))

    def _routers(self, changed: Callable[[Captured], Captured]) -> Forward:
        """What a step computes of a batch, changed as said; without a loss of its own, the model alone."""
        return self.forward(self.model if self._loss is None else self.fn, changed)

    def _has_experts(self) -> bool:
        captured = self._captured
        return captured is not None and any(eqn.op.for_ranks for _, eqn in walk(captured.program))

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
        with self._gathering("step.rebalance"), torch.no_grad():
            for layer, placement in chosen:
                if placement.moves:
                    self.state.reorder({name: (dim, placement.order) for name, dim in layer.tensors.items()})
        self.loads.reorder({name: placement.order for _, placement in chosen for name in placement.layers})
        return [placement for _, placement in chosen]

    def _split_experts(self, load: Mapping[str, torch.Tensor] | None) -> list[tuple[SharedExperts, list[int]]]:
        """Layers whose experts several ranks share, with their loads, and how many experts each rank has."""
        loads = self.expert_load() if load is None else dict(load)
        if self.parts is None or not self.parts.is_split or not loads or self._captured is None:
            return []
        groups = self.loads.shared(loads, self.parts, self._captured.program)
        return [(group, sizes) for group, sizes in groups if len(sizes) > 1]

    def _refuse_rebalancing(self) -> None:
        assert self.written is not None
        apart = {"stages": self.written.is_pipeline, "place": bool(self.written.place), "sync": bool(self.written.sync)}
        apart["compress"] = bool(self.messages.held)
        if kind := next((name for name, is_there in apart.items() if is_there), ""):
            raise PlanError(
                f"experts cannot change ranks under a plan with {kind}\n  try       a plan without, or no rebalance"
            )

    # -- numbers that it keeps -----------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """How many steps were skipped because their gradients were not finite."""
        return self._counters.skipped

    def counters(self) -> dict[str, torch.Tensor]:
        """What the step keeps besides the model and the optimiser: counters, and the loss scale of fp16."""
        number = self.outer.steps if self.outer is not None else self._all_steps
        steps = {TAKEN: torch.tensor(number)} if self.outer is not None or len(self._phases) > 1 else {}
        return {k: v.clone() for k, v in self._counters.items()} | steps

    def set_counters(self, counters: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `counters` gave."""
        device = self.device
        self._counters.clear()
        self._counters |= {k: v.to(device).clone() for k, v in counters.items() if k != TAKEN}
        self._all_steps = int(counters.get(TAKEN, 0))
        if self.outer is not None:
            self.outer.go_on(self._all_steps)

    # -- a model in parts is still a model (`step_state.py`); where there are ranks, all of them call these ---------

    def state_dict(self) -> dict[str, Any]:
        """{"model", "optimizer", "step"}: as torch's own, whole on every rank."""
        with self._gathering("step.state_dict"):
            return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave, under any plan."""
        with self._gathering("step.load_state_dict"):
            self.state.load_state_dict(state)

    def save(self, folder: str | Path, keep: int = 2) -> Path:
        """A checkpoint of model, optimiser and step in a folder, of which the last `keep` stay; each rank writes its
        part."""
        with self._calling("step.save"):
            return self.state.save(folder, self.steps, keep)

    def load(self, folder: str | Path) -> None:
        """Continue from the last checkpoint in a folder, which may have been saved under another plan (`mycel train`'s
        too), or take the weights of a folder that `export`, transformers, torch.save (pytorch_model.bin) or
        torch.distributed.checkpoint wrote."""
        with self._calling("step.load"):
            self.steps = self.state.load(folder)

    def export(self, folder: str | Path) -> Path:
        """The model, whole: in Hugging Face form if it is one of theirs, else as model.safetensors."""
        with self._gathering("step.export"):
            return self.state.export(folder)

    @contextlib.contextmanager
    def whole(self, rank: int | None = None) -> Iterator[torch.nn.Module]:
        """A context in which the model is whole, on all ranks or on one, and on its device: to call it, look at it or
        save it."""
        with self.host.on_device(), contextlib.ExitStack() as held:
            with self._calling("step.whole"):
                model = held.enter_context(self.state.whole(rank))
            yield model

    @contextlib.contextmanager
    def _gathering(self, what: str) -> Iterator[None]:
        """Ranks send each other what is on their devices; `what` is called, as others are told."""
        with self.host.on_device() if self.parts is not None else contextlib.nullcontext(), self._calling(what):
            yield

    def _calling(self, what: str, often: bool = False) -> contextlib.AbstractContextManager[None]:
        """What is called, as other ranks are told."""
        return self.parts.calling(what, often) if self.parts is not None else contextlib.nullcontext()

    # -- what one may ask ----------------------------------------------------------------------------------------

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
        spans_by_rank = self.state.process.tell([span.data() for span in spans])
        trace.spans = [[Span(**data) for data in each] for each in spans_by_rank]
        self.traced = trace

    @contextlib.contextmanager
    def timing(self) -> Iterator[TimedStep]:
        """A context in which one step is taken, of the last batch's signature: what its blocks and messages take on
        this rank, where they can be timed."""
        entry = self._entry()
        timed = TimedStep(entry)
        if entry.replayed is not None or entry.code is None or entry.plan.place:
            yield timed
            return
        with recording(entry.code, entry.program, self.device) as spans:
            yield timed
        if self._entry() is entry:
            timed.spans = spans

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
        hardware = self.corrected_hardware(self.device)
        return explained(self._entry(), self.settings, hardware, self.device, self.parts, self.traced, self.link.count)


class _Adding(Step):
    """A step that leaves the update to another one: its gradients are added up for it."""

    updating: AddingUp

    def __init__(self, of: Step) -> None:
        settings = replace(of.settings, clip_norm=None, clip_value=None, buckets=None, expert_load=False)
        super().__init__(of.model, of.optimizer, None, settings, _exact(of.written))
        self.fn, self.whole_fn, self.parts, self._loss = of.fn, of.whole_fn, of.parts, of._loss
        self.updating = AddingUp(of.model, of.optimizer, settings)
        self._weigh = CallWeights(self._whole_loss, lambda captured: trained(captured, of.optimizer).values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.parts.own_batch(args, kwargs) if self.parts is not None else (args, kwargs)
        self.updating.weights = self._weigh(*own)
        return super().__call__(*args, **kwargs)

    def _whole_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
        """The loss of a batch as it is captured."""
        known, data = roles_of(self.model, self.optimizer), (args, kwargs)
        args, kwargs = without_host_data(args, kwargs, device_of(self.model))
        with self.parts.whole() if self.parts is not None else contextlib.nullcontext():
            return capture_call(
                self.whole_fn,
                args,
                kwargs,
                known=known,
                differentiated=True,
                data=data,
                strict=self.settings.strict,
            )


class _Applying(Step):
    """The update of a step that left it to us: of the gradients of these parameters."""

    updating: OnSums

    def __init__(self, of: Step, params: Sequence[torch.nn.Parameter]) -> None:
        settings = replace(
            of.settings, accumulate=1, clip_norm=None, clip_value=None, outputs=False, buckets=None, expert_load=False
        )
        super().__init__(of.model, of.optimizer, None, settings, _of_own_ranks(of))
        self.parts, self._counters, self.params = of.parts, of._counters, params
        self.updating = OnSums(of.model, of.optimizer, settings)

    def _gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Arguments) -> UnshardedStep:
        if self.parts is not None and self.parts.owners:  # what others hold has state too, which all ranks ask for
            everything = given_gradients(self.model, self.optimizer, optimizers.trainable(self.optimizer))
            self.parts.given(self._whole(everything, self._given().replica))
        return given_gradients(self.model, self.optimizer, self.params)

    def apply_to(self, gradients: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """The update, which leaves gradients in parameters where they are asked for."""
        self.updating.sums = gradients
        self()


def _exact(written: plan.Plan | None) -> plan.Plan | None:
    """A plan whose gradients are sent as they are: the mean of them is what counts."""
    if written is None:
        return None
    return replace(written.given, compress={}, sync=written.sync if written.synced() else {})


def _of_own_ranks(step: Step) -> plan.Plan | None:
    """The plan of the ranks that hold the same tensors as this one, in parts or not: those of its stage, or place."""
    exact = _exact(step.parts.plan if step.parts is not None else step.written)
    return exact.inside if exact is not None else None
