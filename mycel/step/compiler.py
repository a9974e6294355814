"""A model, its optimiser and a plan -> the code of a step for one signature of the batch.

`StepCompiler.compile` shows the way in one function: capture, a plain list of passes, a plan, lowering, code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mycel import lower, optimizers, plan, transform
from mycel.capture import Captured, meshed
from mycel.corrections import Corrections
from mycel.errors import PlanError
from mycel.feed import Arguments, Feed, feed_of, without_host_data
from mycel.forward import device_of
from mycel.host_parameters import HostParameters
from mycel.ir import Mesh, Program, check
from mycel.islands import TimedCode
from mycel.message_state import MessageState
from mycel.monitors import monitored
from mycel.objective import objective
from mycel.ops.product_speed import slow_products
from mycel.outer_steps import OuterSteps
from mycel.parts import ShardedModel, UnshardedStep
from mycel.placed_model import PlacedModel
from mycel.plan.compression import least_lossy
from mycel.planning import Task, planned
from mycel.run import (
    GraphPool,
    HostSpace,
    Replayed,
    available,
    keep_freed_memory,
    load,
    moves,
    start_workers,
    stop_workers,
    warm_up,
)
from mycel.search_space import any_plan
from mycel.several_optimizers import each_of
from mycel.step.auto_plan import Undecided
from mycel.step.calls import StepCalls
from mycel.step.compiled_step import CompiledStep
from mycel.step.counters import Counters
from mycel.step.expert_loads import ExpertLoads
from mycel.step.gradients import Recipe, prepared
from mycel.step.priced_link import PricedLink
from mycel.step.settings import Settings
from mycel.step.updating import Updating
from mycel.step.whole_step import watched_axis, whole_step

ROOM = 0.95  # the share of the host's free memory that a plan may use


class StepCompiler:
    """What a step is of, and how it becomes code."""

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
        self.whole_fn = objective(model, loss, True) if settings.outputs else self.fn
        self.entries: list[CompiledStep] = []  # the last one used is the first
        self.updating = Updating(model, optimizer, settings)
        self._was_searched = False  # its plan: all ranks must have found the same
        self.planned_for: plan.Hardware | None = None  # the devices it is planned for, where these are not its own
        self.grad_norm: torch.Tensor | None = None
        self.steps = 0  # taken, skipped ones among them
        self._all_steps = 0  # the same, of all that led to this state
        self.corrections = Corrections()
        self.link = PricedLink()
        self._counters = Counters()
        self.loads = ExpertLoads(self._counters)
        self.host = HostParameters()
        self._captured: Captured | None = None  # the last time
        self._why_again = ""  # while it is captured again: the reason
        self._graphs: GraphPool | None = None  # the memory of recorded steps

    def _spread(self, written: plan.Plan | None) -> None:
        """Over the ranks of a plan."""
        self.written = written
        self.parts: ShardedModel | None = None  # what this rank holds
        if written is not None and written.mesh.world > 1:
            of = PlacedModel.of if written.place else ShardedModel
            self.parts = of(self.model, self.optimizer, written)
        self.for_ranks = self.parts is not None  # is what they share kept in the program?
        self.messages = MessageState(self.parts)
        self._fed: dict[tuple[int, int], frozenset[str]] = {}  # by phase and price, whose errors are fed back
        policy = written.synced() if written is not None else None
        self._phases, self._condition = written.phases() if written is not None else ([], None)
        self.outer = OuterSteps(policy, self.parts, self.messages) if policy and self.parts is not None else None

    def _find_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """For such batches, where it is left to the search."""
        if self.undecided is None:
            return
        world, mesh, s, device = self.undecided.world, self.undecided.mesh, self.settings, self.device

        def make(count: int, said: Mapping[str, Any], placed: bool = False) -> UnshardedStep:
            sizes = mesh.sizes() if mesh is not None else None
            settings, ranks = replace(s, accumulate=count), any_plan(world, said, placed, sizes)
            return StepCompiler(self.model, self.optimizer, self._loss, settings, ranks).unsharded(*args, **kwargs)

        chosen = self.undecided.search(
            self.model, self.optimizer, make, device, s.budget, s.accumulate, s.compiles(device),
            self.updating.by_rule, s.outputs != "local", self.corrections,
        )  # fmt: skip
        self.undecided, self._was_searched = None, True
        self._spread(chosen)
        self.settings = replace(s, accumulate=chosen.microbatches)

    @property
    def device(self) -> torch.device:
        """Where it computes: where the model is, but for what of it lives on the host."""
        return self.host.space.device if self.host.space is not None else device_of(self.model)

    # -- the way from code to code ------------------------------------------------------------------------------

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledStep:
        """capture -> 16 bits -> head -> shares -> gradient -> parts -> update -> plan -> lower -> code."""
        self.updating.choose()
        self._find_plan(args, kwargs)
        s, device, parts = self.settings, self.device, self.parts
        if s.compiles(device):
            start_workers()
        if device.type == "cpu":
            keep_freed_memory()
        whole, data = (args, kwargs), (args, kwargs)
        if parts is not None:
            args, kwargs = data = parts.own_batch(args, kwargs)
            self.link.measure(parts, self._given(), device, lambda: self.corrected_hardware(device))
        args, kwargs = without_host_data(args, kwargs, device)
        with self.host.shown(), parts.whole() if parts is not None else contextlib.nullcontext():
            unsharded, decided, done = self._planned(args, kwargs, data)
        if parts is not None:
            parts.split(unsharded.captured.device)
            if done.pipeline is not None:
                parts.hold(done.pipeline)
                parts.starts = decided.decided.stages if decided.decided is not None else ()
                done, unsharded = done.at(parts.place), parts.own(unsharded)
        device = unsharded.captured.device
        program = check(transform.wide_products(done.program, slow_products(device, transform.halves(done.program))))
        if done.regions:
            warm_up(program, device)
        else:
            stop_workers()
        code, source = load(program, device, reuse=True, donate=True, compiled=set(done.regions))
        run = self._at_home(code, program, unsharded)
        replayed = self._replayed(run, program, device, decided)
        run, feed = self._connected(replayed or run, unsharded, decided, done, whole)
        islands = unsharded.captured.islands
        timed = TimedCode(run, islands) if islands else None
        call, local = self._calls().bound(unsharded, program, timed or run, feed)
        signature, facts = self._signature(), unsharded.captured.facts
        self._captured = unsharded.captured
        return CompiledStep(
            done, source, decided, call, local, feed, signature, facts, replayed, islands, timed, code, unsharded.fp8
        )

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Arguments
    ) -> tuple[UnshardedStep, plan.Plan, lower.Lowered]:
        """The step, its plan and what that makes of it; where `compress` is auto, of the quickest choices the least
        lossy."""
        given = self._given()
        with meshed(given.inside.replica.mesh if self.written is not None else None):
            body = self._gradients(args, kwargs, data)
        choices = given.compressions()
        tried = []
        for choice in choices:
            unsharded = self._whole(body, choice.replica)
            tried.append((unsharded, *planned(self._task(unsharded), choice)))
        auto = given.compressed()
        names = auto.candidates() if auto is not None and auto.auto else [""]
        seconds = [decided.predicted.seconds if decided.predicted is not None else 0.0 for _, decided, _ in tried]
        by_name = dict(zip(names, seconds, strict=True))
        best = list(by_name).index(least_lossy(by_name))
        unsharded, decided, done = tried[best]
        self._fed[self._phase(), self.link.count] = frozenset(
            role.of for v in unsharded.program.inputs if (role := unsharded.program.role(v)).kind == "error"
        )
        pending_errors = {name: self.messages.lossy[name] for name in self._pending_errors()}
        if pending_errors:
            choice = choices[best].given
            unsharded = self._whole(body, choice.replica, pending_errors)
            decided, done = planned(self._task(unsharded), choice)
        if auto is not None and auto.auto:
            decided = given.with_compression(decided, by_name)
        return unsharded, decided, done

    # -- the step on one device ----------------------------------------------------------------------------------

    def unsharded(self, *args: Any, **kwargs: Any) -> UnshardedStep:
        """The step as one program on one device, for such a batch: what there is to plan.  Manual regions are those of
        the mesh.  Of a model without data a batch may have some: what it decides is decided by it."""
        was, self.for_ranks = self.for_ranks, True
        data = args, kwargs
        if self.device.type == "meta":
            args, kwargs = without_host_data(args, kwargs, self.device)
        try:
            with meshed(self.written.inside.replica.mesh if self.written is not None else None):
                body = self._gradients(args, kwargs, data)
                return self._whole(body, self._given().replica)
        finally:
            self.for_ranks = was

    def _gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any], data: Arguments) -> UnshardedStep:
        """The program of loss and gradients, for such a batch."""
        s = self.settings
        changed: Callable[[Captured], Captured] = self.loads.seen.added if s.expert_load else lambda captured: captured
        recipe = Recipe(
            self.model, self.optimizer, self.whole_fn, s, self.device, self.written, self.updating.by_rule,
            self.for_ranks, self.parts is None, self.planned_for, changed,
        )  # fmt: skip
        return recipe.loss_and_gradients(args, kwargs, data)

    def _whole(
        self, body: UnshardedStep, given: plan.Plan, pending_errors: Mapping[str, str] | None = None
    ) -> UnshardedStep:
        """With the update, as a plan says."""
        by_rule, later = self.updating.by_rule, self._phase() > 0
        return whole_step(body, given, self.written, self.settings, self.parts, by_rule, later, pending_errors or {})

    def _prepared(self, captured: Captured) -> Program:
        """What was captured, simplified, in its precision, with its head."""
        return prepared(captured, self.settings, self.for_ranks)

    # -- what there is to plan -----------------------------------------------------------------------------------

    def _task(self, unsharded: UnshardedStep, device: torch.device | None = None) -> Task:
        """`device`: where it will run, if the model is not there yet."""
        device, parts = device or unsharded.captured.device, self.parts
        if device.type not in ("cuda", "cpu") and not self._given().offload.is_none:
            raise PlanError(
                f"offload: a device of type {device.type} has no pinned memory that Mycel knows of\n"
                "  try       offload: none"
            )
        inputs, gathered = parts.given(unsharded) if parts is not None else ({}, frozenset[int]())
        if parts is not None:
            self.updating.refuse_split(parts)
        return Task(
            unsharded.program,
            unsharded.body,
            self._hardware(device),
            self.settings.compiles(device),
            inputs,
            gathered,
            self.settings.budget,
            parts.rows_of(unsharded) if parts is not None and self.settings.outputs == "local" else None,
            at_place=partial(parts.given_at, unsharded) if isinstance(parts, PlacedModel) else None,
            starts=parts.starts if parts is not None else (),
        )

    def _hardware(self, device: torch.device) -> plan.Hardware:
        """What there is, as far as it is known or was measured."""
        known = self.corrected_hardware(device)
        if device.type == "cuda" and self.parts is None:  # ranks that share a host must come to the same plan
            lives = sum(home.nbytes for home in self.host.space.homes.values()) if self.host.space is not None else 0
            known = replace(known, host_memory=int(ROOM * (available() + lives)))
        return self.link.known(known, self.written)

    def corrected_hardware(self, device: torch.device) -> plan.Hardware:
        """What is known of it, corrected by what earlier runs took."""
        return self.corrections.hardware(device, self.written.mesh.world if self.written is not None else 1)

    def _given(self) -> plan.Plan:
        """The plan for the next signature of the batch: decisions hold for the first one."""
        if self.written is None:
            return self._with_offload(plan.Plan(Mesh()))
        now = self._phases[self._phase()][1]
        return self._with_offload(now.given if self.entries else now)

    def _with_offload(self, given: plan.Plan) -> plan.Plan:
        """What may live on the host where the plan does not say it: anything, under a budget, on a device whose memory
        is apart from the host's; but for parameters of ranks.  Parameters do in all programs of a step, or in none."""
        said, s, by_rule = given.offload, self.settings, self.updating.by_rule
        if given.decided is not None or given.at_once > 1:
            return given
        by_itself = not (given.is_pipeline or given.place or self._was_searched)
        if said.unsaid and s.budget is not None and self.device.type == "cuda" and by_itself:
            said = plan.AUTO if self.parts is None else replace(plan.AUTO, parameters="none")
        if self.host.held:
            said = replace(said, parameters="host")
        elif said.parameters != "none" and (s.grads or not by_rule):
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
        _, done = planned(self._task(self.unsharded(*args, **kwargs), device), self._given())
        assert done.pipeline is not None
        return self.parts.owners_under(done.pipeline)

    # -- which plan holds now ------------------------------------------------------------------------------------

    def _phase(self) -> int:
        """Which of the plans of a run holds: by the number of steps, or by what was measured, which all ranks know."""
        if len(self._phases) <= 1:
            return 0
        if self._condition is not None:
            return int(self._condition.holds(self.monitored()))
        steps = self.outer.steps if self.outer is not None else self._all_steps
        return next(i for i, (until, _) in enumerate(self._phases) if until is None or steps < until)

    def monitored(self) -> dict[str, float]:
        """What the plan has measured of gradients: noise scale, variance, errors of compression; see `monitors.py`."""
        axis = watched_axis(self.written)
        if not axis or self.written is None:
            return {}
        return monitored(self._counters, {mesh[axis] for mesh in self.written.replica.meshes()})

    def _signature(self) -> tuple[Any, ...]:
        """What a compiled step is for besides the form of its batch: the optimiser's settings, and the plan of now."""
        settings = optimizers.signature(self.optimizer, self.updating.by_rule)
        return (self._phase(), self.link.count, self._pending_errors(), *settings)

    def _pending_errors(self) -> frozenset[str]:
        """Parameters of which errors are kept that the plan of now does not feed back, as far as that is known: one
        step sends these as they are.  The same on all ranks, whoever holds the errors."""
        lossy = self.messages.lossy
        fed = self._fed.get((self._phase(), self.link.count)) if lossy else None
        if fed is None or self.written is None or self.outer is not None:
            return frozenset()
        return frozenset(lossy) - fed

    # -- what runs -----------------------------------------------------------------------------------------------

    def _at_home(self, code: Callable[..., Any], program: Program, unsharded: UnshardedStep) -> Callable[..., Any]:
        """The code, which finds what lives on the host there."""
        if not moves(program):
            return code
        roles = {v.name: unsharded.program.role(v) for v in unsharded.captured.program.inputs}
        parameters = {
            roles[name]: places[0].read() for name, places in unsharded.captured.state.items() if name in roles
        }
        ranks = self.parts.ranks if self.parts is not None else None
        new = lambda: HostSpace(unsharded.captured.device, None if ranks is None else ranks.promise_memory)
        self.host.space = space = (self.host.space or new()).prepare(program)
        self.host.adopt(program, parameters)
        return space.connected(code)

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
        self._graphs = self._graphs or GraphPool(device)  # one for all batches: they take turns
        return Replayed(code, program, device, self._graphs.record)

    def _connected(
        self,
        run: Callable[..., Any],
        unsharded: UnshardedStep,
        decided: plan.Plan,
        done: lower.Lowered,
        whole: Arguments,
    ) -> tuple[Callable[..., Any], Feed]:
        """The code among the others' of its ranks, which agree on what they will say to each other; and how it is
        fed."""
        parts = self.parts
        if parts is None:
            return run, feed_of(unsharded.captured, unsharded.program)
        parts.ranks.tell(self._doing)
        if self._was_searched:
            parts.ranks.agree({"the plan that was found": str(self.written)})
        if decided.compress:
            parts.ranks.agree({"how gradients are compressed": str(decided.compressed())})
        if self.outer is not None:
            self._prepare_replicas(self.outer, parts, unsharded)
        parts.ranks.connect(done.program)
        run, feed = parts.connected(run), parts.feed(unsharded, done.spread, whole)
        if self.settings.outputs == "local":
            run = parts.without_padding(run, unsharded, parts.rows_of(unsharded))
        return run, feed

    def _prepare_replicas(self, outer: OuterSteps, parts: ShardedModel, unsharded: UnshardedStep) -> None:
        """Replicas agree on how they become one model."""
        if unsharded.captured.facts:
            raise PlanError(
                "values of the batch decide what the program is, and replicas have parts of it\n"
                f"  at        {'; '.join(str(f) for facts in unsharded.captured.facts for f in facts.facts)}\n"
                f"  try       sync: {{{outer.policy.axis}: every step}}, or keep it a tensor"
            )
        parts.ranks.agree({"how replicas become one model": str(outer.policy)})
        outer.prepare(unsharded, parts.given(unsharded)[0])

    def _doing(self) -> str:
        """Where this rank is, for others."""
        return f"step {self.steps + 1}{self._why_again and f', captured again: {self._why_again}'}"

    def _calls(self) -> StepCalls:
        return StepCalls(
            self.optimizer, self.updating, self.parts, self.outer, self.messages, self._counters, self.loads, self.host,
            self._pending_errors(), self._finished,
        )  # fmt: skip

    def _finished(self, grad_norm: torch.Tensor) -> None:
        """A step was taken."""
        self.grad_norm = grad_norm
        self.steps += 1
        self._all_steps += 1
        for each in each_of(self.optimizer):  # schedulers ask whether a step came before theirs
            each._opt_called = True  # type: ignore[attr-defined]
        if self.outer is not None:
            self.outer.after_step()
        self.link.ask(self._all_steps)
