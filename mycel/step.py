"""The whole training step as one program: forward, backward, clip, update.

    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=3e-4), clip_norm=1.0)
    loss = step(**batch)

`Step.compile` shows the way in one function: capture, a plain list of passes, a plan, lowering, code.  The model's own tensors and the
optimiser's own state change in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel import lower, optimizers, plan, transform
from mycel.capture import MISS, TRACING, Captured, bind, meshed
from mycel.capture import capture as capture_call
from mycel.errors import GradientError, PlanError, TrainError
from mycel.forward import Forward
from mycel.ir import Block, Mesh, Program, check
from mycel.objective import Batch, objective
from mycel.parts import Joined, Parts
from mycel.plan import Decided
from mycel.run import keep_freed_memory, load, start_workers, warm_up, without_collector
from mycel.sizes import parse_bytes, shown

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 65536.0  # the first loss scale of fp16, torch.amp.GradScaler's
WORTH = 0.005  # the share of a step that compiling a stretch between calls must save


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any] | None = None,
    mesh: Any = None,
    plan: Any = "auto",
    precision: str = "fp32",
    accumulate: int = 1,
    clip_norm: float | None = None,
    memory: str | int | None = None,
    compile: str | bool = "auto",
) -> Step:
    """A callable that takes one step on a batch and returns its loss.

    mesh        the devices, e.g. mycel.Mesh(dp=2, tp=4); None: one.  Every rank calls the step with the whole batch, and holds its parts of the model
    plan        "auto", or how to spread the step: a mycel.Plan, a .yaml file, or names of ready plans such as "zero3+tp"
    loss        None: the model returns the loss, or an object or dict with `loss`.  Otherwise loss(output, *rest): the model gets as many of the
                positional arguments as it takes, the loss the last ones, as many as it asks for (all, if it takes *args)
    precision   "fp32": as the model is written;  "bf16", "fp16": weights and their updates stay as they are, the computation is in 16 bits, sums
                in 32; fp16 scales the loss
    accumulate  the batch is split into so many parts along its first dim; loss and gradient are those of the whole batch
    clip_norm   gradients are scaled down to this global norm
    memory      the peak to stay below, in bytes or as "20GiB": what does not fit is computed again in backward
    compile     True, False, or "auto": where there is a GPU
    """
    written = _written(mesh, plan)
    if not isinstance(model, torch.nn.Module):
        raise TrainError(f"train_step takes a torch.nn.Module, not {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise TrainError(f"loss={loss!r} is not a function\n  try       torch.nn.functional.cross_entropy, or None where the model returns its loss")
    optimizers.refuse_unsupported(optimizer)
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise TrainError(f"precision={precision!r}\n  known     {', '.join(PRECISIONS)}")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise TrainError(f"accumulate={accumulate!r}\n  try       a whole number, at least 1")
    if clip_norm is not None and not (isinstance(clip_norm, (int, float)) and clip_norm > 0):
        raise TrainError(f"clip_norm={clip_norm!r}\n  try       a positive number, or None")
    if compile not in (True, False, "auto"):
        raise TrainError(f"compile={compile!r}\n  known     True, False, 'auto'")
    budget = parse_bytes(memory) if isinstance(memory, str) else memory
    if budget is not None and not (isinstance(budget, int) and not isinstance(budget, bool) and budget > 0):
        raise TrainError(f"memory={memory!r}\n  try       bytes as a whole number, or text like '20GiB'")
    return Step(model, optimizer, loss, Settings(precision, accumulate, clip_norm, budget, compile), written)


def _written(mesh: Any, given: Any) -> plan.Plan | None:
    """The plan for several ranks; None for one device.  With a mesh alone the batch is split over `dp`, or the first axis."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh={mesh!r} is no mesh\n  try       mycel.Mesh(dp=2, tp=4)")
    if given is not None and not (isinstance(given, str) and given == "auto"):
        return plan.Plan.read(given, mesh)
    if mesh is None or not mesh.axes:
        return None
    return plan.Plan(mesh, batch=["dp" if "dp" in mesh else mesh.axes[0]])


@dataclass(frozen=True)
class Settings:
    """What the caller chose."""

    precision: str
    accumulate: int
    clip_norm: float | None
    budget: int | None
    compile: str | bool

    def compiles(self, device: torch.device) -> bool:
        return self.compile is True or (self.compile == "auto" and device.type == "cuda")


@dataclass(frozen=True)
class Entry:
    """One compiled signature of the batch."""

    program: Program
    source: str
    plan: Decided
    call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    signature: tuple[Any, ...]
    spread: lower.Distributed | None = None


class Step:
    """One training step, compiled once for each signature of the batch."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., Any] | None,
        settings: Settings,
        written: plan.Plan | None = None,
    ) -> None:
        self.model, self.optimizer, self.settings, self.written = model, optimizer, settings, written
        self.parts = Parts(model, optimizer, written) if written is not None and written.mesh.world > 1 else None
        self.fn = objective(model, loss)
        self.entries: list[Entry] = []
        self.grad_norm: torch.Tensor | None = None
        self._counters: dict[str, torch.Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One step on a batch; returns its loss, which stays on the device."""
        signature = optimizers.signature(self.optimizer)
        for i, entry in enumerate(self.entries):
            if entry.signature == signature:
                out = entry.call(args, kwargs)
                if out is not MISS:
                    if i:  # the last one used is tried first
                        self.entries.insert(0, self.entries.pop(i))
                    return out
        with without_collector():
            out = self.prepare(*args, **kwargs).entries[0].call(args, kwargs)
        assert out is not MISS, "a step does not fit the arguments it was made for"
        return out

    def prepare(self, *args: Any, **kwargs: Any) -> Step:
        """Compile for such a batch, without taking a step."""
        if TRACING:
            raise TrainError("a train_step was called inside code that is being captured\n  try       call it from plain Python")
        self.entries.insert(0, self.compile(args, kwargs))
        return self

    # -- the way from code to code ------------------------------------------------------------------------------

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """capture -> 16 bits -> head -> shares -> gradient -> parts -> update -> plan -> lower -> code."""
        s = self.settings
        optimizers.refuse_hooks(self.model, self.optimizer)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        if s.compiles(device):
            start_workers()
        if device.type == "cpu":
            keep_freed_memory()
        with self.parts.whole() if self.parts is not None else nullcontext():
            made = self._joined(args, kwargs)
        program, spread = made.program, None
        if self.parts is not None:
            spread = self.parts.distribute(made, plan.hardware_of(made.captured.device), s.compiles(device))
            program = check(transform.simplify(spread.local))
        decided, program, names = self._planned(program, made.body, made.captured.device)
        if names:
            warm_up(program, {*plan.PRODUCTS, "linear_cross_entropy"}, made.captured.device)
        code, source = load(program, made.captured.device, reuse=True, donate=True, compiled=names)
        if self.parts is not None and spread is not None:
            code = self.parts.taken(code, spread, len(set(made.captured.leaves)))
        call = self._bound(made, program, code)
        return Entry(program, source, decided, call, optimizers.signature(self.optimizer), spread)

    def _joined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Joined:
        """The whole step as one program, on one device; manual regions are those of the mesh."""
        with meshed(self.written.mesh if self.written is not None else None):
            return self._captured(args, kwargs)

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Joined:
        s = self.settings
        batch = Batch(args, kwargs, s.accumulate)
        captured = capture_call(self.fn, *batch.part())
        program, scale = self._prepared(captured), None
        if s.precision == "fp16":
            program, scale = transform.with_scale(program)
        trained = self._trained(captured)
        counting = None
        if s.accumulate > 1:
            if captured.effects:
                raise TrainError("with accumulate the model keeps tensors in attributes\n  try       accumulate=1, or buffers that it updates")
            split = batch.split(captured.leaves)
            whole = self._prepared(capture_call(self.fn, args, kwargs))
            program, counting, unseen = transform.shares(program, whole, list(trained.values()), split, s.accumulate)
            if unseen:
                warnings.warn(f"accumulate: no sum or mean over the batch, so its parts weigh the same: {'; '.join(unseen)}", stacklevel=4)
        results = len(program.results)
        program, groups = self._differentiated(program, trained, scale)
        body = program.entry
        if counting is not None:
            key = len(captured.program.inputs) - 1 if captured.draws else None
            program, body = check(transform.microbatch(program, counting, s.accumulate, split, key)), transform.BODY
        base = len(program.inputs)
        program = check(transform.optimise(program, [g.group for g in groups], results, s.clip_norm, scale))
        return Joined(captured, program, tuple(groups), results, base, body)

    def _prepared(self, captured: Captured) -> Program:
        """The loss, simplified, in its precision, with its head."""
        half = PRECISIONS[self.settings.precision]
        program = transform.simplify(captured.program, hints=self.parts is not None)
        if half is not None:
            program = check(transform.precision(program, half, self._state(captured)))
        return check(transform.head(program, mean=half is not torch.float16 and self.settings.accumulate == 1))

    def _state(self, captured: Captured) -> range:
        """Which inputs are parameters and buffers."""
        first = len(set(captured.leaves))
        return range(first, first + len(captured.state))

    def _trained(self, captured: Captured) -> dict[int, int]:
        """Parameters the optimiser may change and the loss uses, by id: which inputs they are."""
        at = {id(places[0].read()): i for i, places in zip(self._state(captured), captured.state, strict=True)}
        found = {id(p): at[id(p)] for p in optimizers.trainable(self.optimizer) if id(p) in at}
        if self.settings.precision == "fp16" and any(p.dtype == torch.bfloat16 for p in self.model.parameters()):
            raise TrainError('precision="fp16" with parameters in bf16\n  try       precision="bf16", or model.float()')
        optimizers.refuse_dtypes([p for p in optimizers.trainable(self.optimizer) if id(p) in found])
        if not found:
            raise GradientError("the loss depends on no parameter of the optimizer that requires a gradient")
        return found

    def _differentiated(self, program: Program, trained: dict[int, int], scale: int | None) -> tuple[Program, list[optimizers.Bound]]:
        """The program that also returns gradients, group by group, of the parameters the loss depends on."""
        wrt, results = list(trained.values()), len(program.results)
        made = transform.value_and_grad(transform.scaled(program, scale), wrt, 0 if scale is None else results, dense=False)
        outs = list(made.main.outputs)
        if scale is not None:
            del outs[results]  # the scaled loss
        reached = {i: g for i, g in zip(wrt, outs[results : results + len(wrt)], strict=True) if g is not None}
        if not reached:
            raise GradientError("the loss depends on no parameter of the optimizer that requires a gradient")
        groups = optimizers.bind_groups(self.optimizer, {k: i for k, i in trained.items() if i in reached})
        ordered = [reached[i] for g in groups for i in g.group.params]
        block = replace(made.main, outputs=(*outs[:results], *ordered, *outs[results + len(wrt) :]))
        return transform.simplify(replace(made, blocks={**made.blocks, made.entry: block}), hints=self.parts is not None), groups

    def _planned(self, program: Program, body: str, device: torch.device) -> tuple[Decided, Program, set[str]]:
        """What to keep for backward, and the program that does so, with the blocks to compile."""
        compiled = self.settings.compiles(device)
        hardware = plan.hardware_of(device)
        ready: dict[int, tuple[Program, set[str]]] = {}

        def lowered(found: plan.Residuals) -> tuple[Program, set[str]]:
            made = lower.reside(program, found)
            made = check(transform.fuse(made if self.parts is None else lower.hoist(made)))
            if not compiled:
                return self._overlapped(made), set()
            costs = plan.Costs(made, hardware, compiled)
            least = WORTH * costs.whole()
            made, names = transform.outline(made, lambda run: costs.gain(run) > least)
            return self._overlapped(check(made)), names

        def measure(found: plan.Residuals) -> plan.Footprint:
            ready.clear()
            ready[id(found)] = made = lowered(found)
            return plan.footprint(made[0], plan.Costs(made[0], hardware, compiled), made[1])

        again = self.written.recompute if self.written is not None else "auto"
        decided = plan.decide(program, body, plan.Costs(program, hardware, compiled), measure, self.settings.budget, again)
        return decided, *(ready.get(id(decided.residuals)) or lowered(decided.residuals))

    def _overlapped(self, program: Program) -> Program:
        return program if self.parts is None else check(lower.overlap(program))

    def _bound(self, made: Joined, program: Program, code: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        """The guarded call: it reads the model's and the optimiser's state and runs the code."""
        captured, groups, results = made.captured, made.groups, made.results
        step, optimizer, device, half = self, self.optimizer, captured.device, self.settings.precision == "fp16"

        def run(*inputs: Any) -> Any:
            with torch.inference_mode(False), torch.no_grad():
                more: list[Any] = [step.counter("loss_scale", device)] if half else []
                first = [g for g in groups if g.is_first(optimizer)]
                before = step.skipped if first else 0
                for g in groups:
                    hyper = g.hyper(optimizer)  # before its state is made: a first step is one without
                    more += [*(g.state(optimizer) if step.parts is None else step.parts.state(g)), *hyper]
                more.append(step.counter("skipped", device))
                more += [step.counter("good_steps", device)] if half else []
                outs = code(*inputs, *more)
                if first and step.skipped > before:  # the next one is the first
                    for p in (p for g in first for p in g.params):
                        del optimizer.state[p]["momentum_buffer"]
            step.grad_norm = outs[results]
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether a step came before theirs
            return outs[:results]

        arguments = len(set(captured.leaves))  # as the caller gives them: whole, where the program takes parts
        inputs = (*made.program.inputs[:arguments], *program.inputs[arguments : len(captured.program.inputs)])
        shell = Block(inputs, (), captured.program.results)
        return bind(replace(captured, program=Program({"main": shell})), run)[0]

    def forward(self, fn: Callable[..., Any] | None = None) -> Forward:
        """The loss of a batch (or what `fn` makes of it with the model), under the plan, without a step."""
        return Forward(fn or self.fn, self._prepared, self.parts)

    # -- what one may ask ----------------------------------------------------------------------------------------

    def counter(self, name: str, device: torch.device) -> torch.Tensor:
        """A number the step keeps on its device."""
        if name not in self._counters:
            first = {"loss_scale": torch.tensor(SCALE), "good_steps": torch.tensor(0, dtype=torch.int32)}
            self._counters[name] = first.get(name, torch.tensor(0)).to(device)
        return self._counters[name]

    @property
    def skipped(self) -> int:
        """How many steps were skipped because their gradients were not finite."""
        return int(self._counters["skipped"]) if "skipped" in self._counters else 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the step keeps besides the model and the optimiser: counters, and the loss scale of fp16."""
        return {k: v.clone() for k, v in self._counters.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` gave."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self._counters = {k: v.to(device).clone() for k, v in state.items()}

    @property
    def plan(self) -> Decided:
        """What was decided for the last batch."""
        return self._entry().plan

    @property
    def program(self) -> Program:
        """The program of the last batch."""
        return self._entry().program

    @property
    def source(self) -> str:
        """The Python that runs for the last batch."""
        return self._entry().source

    def _entry(self) -> Entry:
        if not self.entries:
            raise TrainError("the step has not seen a batch yet\n  try       step.prepare(**batch)")
        return self.entries[0]

    def explain(self) -> str:
        """What runs, and why."""
        entry = self._entry()
        s, device = self.settings, next((p.device for p in self.model.parameters()), torch.device("cpu"))
        lines = [f"precision        {s.precision}, {s.accumulate} part(s) a step, clip_norm {s.clip_norm}", str(entry.plan)]
        if device.type == "cuda":
            lines.append(f"measured peak    {shown(torch.cuda.max_memory_allocated(device))}")
        foreign = sorted({e.params["target"] for b in entry.program.blocks.values() for e in b.eqns if e.op.name.startswith("opaque")})
        lines += [f"as torch has it  {', '.join(foreign)}"] if foreign else []
        if entry.spread is None:
            return "\n".join([*lines, "", str(entry.program)])
        lines.append(f"mesh             {entry.spread.moves.mesh}; layouts {lower.proved(entry.spread.gap)}")
        all_, once = lower.sent(entry.program), lower.sent(entry.spread.local)
        lines.append(f"sent by a rank   {lower.sent_text(all_)}")
        again = {axes: n - once.get(axes, 0.0) for axes, n in all_.items() if n > once.get(axes, 0.0)}
        lines += [f"of that          {lower.sent_text(again)} because backward computes values again"] if again else []
        return "\n".join([*lines, "", lower.explain(entry.spread)])
