"""The steps of a run, and what happens between them.

    step ─▶ step ─▶ … ─▶ report ─▶ validation ─▶ record ─▶ checkpoint ─▶ step ─▶ …
                   log.every  evaluate.every            checkpoint.every

Nothing waits for the device between reports: losses and gradient norms stay there until a report reads all of them at
once.  A report's loss is the mean over its steps.  Records are on disk before the checkpoint of their step, so a
resumed run has them all.
"""

from __future__ import annotations

import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from mycel.errors import TrainError
from mycel.run.checkpoint import Loaded, Saver
from mycel.step.part_times import TimedStep
from mycel.train import device as devices
from mycel.train import expert_load, models, state
from mycel.train.assemble import Assembly
from mycel.train.evaluate import Validation
from mycel.train.metrics import Metrics
from mycel.train.progress import Progress
from mycel.train.schedule import learning_rate
from mycel.train.signals import Signals

HOPELESS = 10  # steps skipped in a row
TIMED = 3  # the steady step in which blocks and messages are timed, too
SHOWN = (
    "loss",
    "validation",
    "tokens_per_s",
    "mfu",
    "memory_bytes",
    "lr",
    "skipped",
)  # what the progress line has room for


class Steps:
    """A run from its checkpoint (None: its start) to its last step, or until it is asked to stop; `done` steps are
    taken."""

    def __init__(
        self,
        parts: Assembly,
        saver: Saver,
        metrics: Metrics,
        progress: Progress,
        signals: Signals,
        loaded: Loaded | None,
        settings: str,
    ) -> None:
        self.parts, self.saver, self.metrics, self.progress, self.signals = parts, saver, metrics, progress, signals
        config, self.step = parts.config, parts.local_step()
        self.total = config.train.steps
        self.validate = Validation(
            parts.module,
            parts.data.validation,
            batches=config.evaluate.batches,
            batch=config.train.batch,
            seed=config.train.seed,
            precision=config.train.precision,
            vocab=parts.vocab,
            step=parts.step if parts.team.processes else None,
            loss=parts.loss,
        )
        self.same = {
            "config": settings,
            "identity": state.identity(parts),
            "machine": state.machine(parts),
            "classes": [*getattr(parts.data.train, "classes", ())],
        }  # in every checkpoint of this process
        before: dict[str, Any] = loaded.meta if loaded else {}
        self.done: int = loaded.step if loaded else 0
        self.losses, self.norms = state.pending(loaded, parts.device) if loaded else ([], [])
        self.skipped_in_a_row: int = before.get("skipped_in_a_row", 0)
        self.validation: float | None = before.get("validation")
        self.best: tuple[float, int] | None = tuple(before["best"]) if before.get("best") else None
        self.seconds_before: float = before.get("seconds", 0.0)
        self.pending: bool = before.get("pending", False)  # what is due after the last step is not done yet
        self.given = self.done  # the step last given to the saver
        self.first, self.traces = self.done, config.trace  # the first compiles
        self.saved: Path | None = None  # the checkpoint last told of
        self.stop: signal.Signals | None = None  # what all ranks know of their signals
        self.experts = expert_load.ExpertRecords(saver.folder.parent, self.done, parts.team.rank == 0, progress.note)
        self.clock = Stopwatch(parts.device)
        self.steady = 0  # steps that were
        self.timed: TimedStep | None = None
        self.shares: list[float] = []  # how wide batches were since the last report, of the widest
        self.seen_shapes: frozenset[tuple[torch.Size, ...]] = frozenset()  # the first step of each compiles, and tunes
        peak = devices.peak_flops(parts.device, config.train.precision)
        self.share_of_peak = (
            models.flops_per_token(parts.outline, config.data.length) / (peak * parts.team.mesh.world) if peak else None
        )

    @property
    def seconds(self) -> float:
        """Time that all steps took, those before an interruption too."""
        return self.seconds_before + self.clock.total_s

    def run(self) -> None:
        """Take the steps that are left."""
        settled = not self.pending or self._settle()
        batch = self.parts.batch(self.done)
        first = True
        self._ask()()
        while self.done < self.total and settled and self.stop is None:
            loss = self._step(batch)
            stopping = self._ask()
            self.losses.append(loss)
            assert self.parts.step.grad_norm is not None
            self.norms.append(self.parts.step.grad_norm)
            batch = self.parts.batch(self.done)  # of the next step, read while the device is at work
            if first:
                first, value = False, float(loss)
                if not self._reports():
                    self.progress.update(self.done, loss=value)
            settled = not stopping() and self._settle()
        if not settled or self.given != self.done:
            self.pending = not settled
            self._save()
        self.saver.wait()
        self._tell_saves()
        self.experts.close()
        self._ask()()

    def _ask(self) -> Callable[[], bool]:
        """Ask all ranks whether to stop, and go on; the result says it, when it is called, and notes why."""
        answer = self.parts.team.asked(lambda: self.signals.asked)

        def heard() -> bool:
            self.stop = self.stop or answer()
            return self.stop is not None

        return heard

    def _step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """One step at its learning rate."""
        for group in self.parts.optimizer.param_groups:
            group["lr"] = self._rate(self.done)
        traced = self.traces and self.done == self.first + self.traces
        shapes = tuple(x.shape for x in batch.values())
        steady, self.seen_shapes = shapes in self.seen_shapes and not traced, self.seen_shapes | {shapes}
        self.steady += steady
        timed = steady and self.steady == TIMED and self.parts.team.rank == 0
        try:
            with (
                self.clock.step() if steady and self.steady != TIMED else self.clock.paused(),
                self._trace() if traced else nullcontext(),
                self.parts.step.timing() if timed else nullcontext() as now,
            ):
                loss: torch.Tensor = self.step(**batch)
        except RuntimeError as error:  # torch.OutOfMemoryError is one, and of the CPU's allocator there is no other
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            predicted = self.parts.step.plan.peak / 2**30
            what = (
                f"out of memory in step {self.done + 1}, which was predicted to need {predicted:.1f} GiB: "
                f"{str(error).splitlines()[0]}"
            )
            hint = "train.memory=…GiB to stay below it, or less train.batch and more train.accumulate"
            raise TrainError(
                f"{what}\n  at        {devices.describe(self.parts.device)}\n  try       {hint}"
            ) from error
        self.timed = now or self.timed
        if steady:
            self.shares.append(self.parts.width_share(self.done))
        self.done += 1
        return loss

    @contextmanager
    def _trace(self) -> Iterator[None]:
        """A step whose trace is written."""
        with self.parts.step.trace() as trace:
            yield
        if self.parts.team.rank:
            return
        folder, took = self.saver.folder.parent, str(trace).splitlines()[0].strip()
        try:
            for name, text in trace.files().items():
                (folder / name).write_text(text)
            self.progress.note(f"traced step {self.done + 1}: {took}\n  at        {folder / 'trace.json'}")
        except OSError as error:
            self.progress.note(f"no trace is written: {error.strerror}\n  at        {folder}")

    def _rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        lr, schedule = self.parts.config.optimizer.lr, self.parts.config.schedule
        return learning_rate(
            step, lr=lr, kind=schedule.kind, steps=self.total, warmup=schedule.warmup, min_lr=schedule.min_lr
        )

    def _reports(self) -> bool:
        return self.done in (1, self.total) or self.done % self.parts.config.log.every == 0

    def _settle(self) -> bool:
        """Do what is due after this step; whether it could be done before somebody asked to stop.  If not, it is
        pending, as if not begun."""
        config = self.parts.config
        due = lambda every: every > 0 and (self.done == self.total or self.done % every == 0)
        saves = due(config.checkpoint.every) or self.done == self.total
        validates = due(config.evaluate.every) or (saves and config.checkpoint.best and config.evaluate.every > 0)
        read = self._read() if self._reports() else None
        validation = None
        if validates:
            with self.clock.paused():
                validation = self._agreed(self.validate(lambda: self._ask()()))
            if validation is None:
                return False
            self.validation = validation
            if math.isfinite(validation) and (self.best is None or validation < self.best[0]):
                self.best = (validation, self.done)
        self.pending = False
        metrics = {**(self._report(*read) if read else {}), **({"validation": validation} if validates else {})}
        if metrics:
            self.metrics.write(self.done, **metrics)
        self.progress.update(self.done, **{name: metrics[name] for name in SHOWN if name in metrics})
        if self.done < self.total and due(config.parallel.rebalance):
            self._rebalance()
        if saves:
            self._save(validation if config.checkpoint.best else None)
        self._tell_saves()
        if read and (self.skipped_in_a_row >= HOPELESS or self.skipped_in_a_row == self.done == self.total):
            self._give_up(metrics["loss"])
        return True

    def _agreed(self, value: float | None) -> float | None:
        """A number on which all ranks must agree to the bit; each place computes it by itself, over its own mesh."""
        plan = self.parts.team.plan
        agreed: float | None = self.parts.team.first(lambda: value) if plan is not None and plan.place else value
        return agreed

    def _read(self) -> tuple[list[float], list[float], float | None]:
        """Losses and gradient norms of the steps since the last report, and tokens a second; here the device is waited
        for."""
        count = len(self.losses)
        read = torch.stack([x.detach().float() for x in (*self.losses, *self.norms)]).tolist()
        return (
            read[:count],
            read[count:],
            self._tokens_per_s(),
        )

    def _tokens_per_s(self) -> float | None:
        """Of the steps since the last lap, padding counted."""
        shares, self.shares = self.shares, []
        steps = self.clock.steps
        return steps * self.parts.tokens * statistics.fmean(shares) / self.clock.lap() if steps else None

    def _report(self, losses: list[float], norms: list[float], tokens_per_s: float | None) -> dict[str, Any]:
        """What is recorded of the steps since the last report."""
        self.losses, self.norms = [], []
        skipped = self.parts.step.skipped
        if skipped:
            self._tell_skipped(losses, norms)
        finite = [x for x in losses if math.isfinite(x)]
        return {
            "loss": math.fsum(finite) / len(finite) if finite else losses[-1],
            "lr": self._rate(self.done - 1),
            "grad_norm": norms[-1],
            "tokens": self.done * self.parts.tokens,
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self.share_of_peak if tokens_per_s and self.share_of_peak else None,
            "memory_bytes": devices.memory_peak(self.parts.device),
            "skipped": skipped or None,
            **self.parts.step.monitored(),
            **self._report_experts(),
        }

    def _report_experts(self) -> dict[str, float | None]:
        """What the experts of a layer get, recorded; the largest shares are metrics."""
        load, ranks = expert_load.measured(self.parts.step)
        if load:
            self.experts.write(self.done, load, ranks)
        return {"busiest_expert": expert_load.busiest(load), "busiest_rank": expert_load.busiest(ranks)}

    def _rebalance(self) -> None:
        """Experts change ranks, by what they got."""
        with self.clock.paused():
            placements = self.parts.step.rebalance()
        moved = [p for p in placements if p.moves]
        stays = next((str(p) for p in placements if p.fixed), "")
        if not placements:
            self.progress.note(
                "no experts lie on several ranks: none can change them\n  try       parallel.rebalance=0"
            )
        elif moved:
            worst = max(moved, key=lambda p: p.before)
            self.progress.note(f"experts of {len(moved)} layers change ranks; of {worst}")
        elif stays:
            self.progress.note(stays)

    def _tell_skipped(self, losses: Sequence[float], norms: Sequence[float]) -> None:
        """Which of the last steps were skipped, and how many in a row by now."""
        bad = []
        for step, norm in enumerate(norms, self.done - len(norms) + 1):
            if math.isfinite(norm):
                self.skipped_in_a_row = 0
            else:
                self.skipped_in_a_row += 1
                bad.append(step)
        if bad:
            loss = losses[bad[-1] - self.done - 1]
            which = f"step {bad[0]} was" if len(bad) == 1 else f"{len(bad)} steps between {bad[0]} and {bad[-1]} were"
            text = f"{which} skipped, weights unchanged: the gradients are not finite; the loss was {loss:.4g}"
            hint = (
                f"\n  try       a lower optimizer.lr (it is {self.parts.config.optimizer.lr:g}), or train.clip_norm=1"
            )
            router = self.parts.step.broken_router()
            text = f"{text}; {router}" if router else text
            self.progress.note(text if math.isfinite(loss) else text + hint)

    def _give_up(self, loss: float) -> None:
        """Stop a run that no longer learns, its state saved."""
        if self.given != self.done:
            self._save()
        self.saver.wait()
        self._tell_saves()
        where = (
            f"step {self.done - self.skipped_in_a_row + 1} to {self.done}, loss {loss:.4g}; saved in {self.saver.last}"
        )
        hint = (
            f"a lower optimizer.lr (it is {self.parts.config.optimizer.lr:g}), or an earlier checkpoint: delete "
            "the later ones, then --resume"
        )
        router = self.parts.step.broken_router()
        what = f"{self.skipped_in_a_row} steps in a row were skipped: their gradients are not finite"
        what = f"{what}; {router}" if router else what
        raise TrainError(f"{what}\n  at        {where}\n  try       {hint}")

    def _save(self, metric: float | None = None) -> None:
        """The state after this step, to be written while the next ones run."""
        self.given = self.done
        known = self.validation if self.validation is not None and math.isfinite(self.validation) else None
        more = {
            "pending": self.pending,
            "skipped_in_a_row": self.skipped_in_a_row,
            "validation": known,
            "best": self.best,
            "seconds": self.seconds,
        }
        meta = {**self.same, **more, "random": state.random_state(self.parts.device)}
        with self.parts.opened():
            out = state.shared_out(self.parts, state.tensors(self.parts, self.losses, self.norms))
            self.saver.save(self.done, out.tensors, meta, metric, out.layouts, out.there)

    def _tell_saves(self) -> None:
        """What became of saves since the last look."""
        for trouble in self.saver.poll():
            self.progress.note(trouble)
        if self.saver.last != self.saved and self.saver.last is not None:
            self.saved = self.saver.last
            self.progress.note(f"saved {self.saved.name}")


class Stopwatch:
    """Seconds that steps take: since the last lap, in which `steps` were taken, and in all; pauses are not counted in
    laps.  `paces`: seconds a step, and of how many: each step by itself, or of a device that works on by itself each
    lap."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self._paused_s = device, 0, 0.0
        self.paces: list[tuple[float, int]] = []
        self._start_s = self._began_s = time.perf_counter()

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def pace_s(self) -> float:
        """Seconds that a step takes, of the one in the middle; 0: none was measured."""
        return statistics.median(pace_s for pace_s, _ in self.paces) if self.paces else 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step that is a measure of speed."""
        began_s = time.perf_counter()
        yield
        self.steps += 1
        if self.device.type != "cuda":
            self.paces.append((time.perf_counter() - began_s, 1))

    def lap(self) -> float:
        """End this lap and begin the next: the seconds it took."""
        now_s = time.perf_counter()
        took_s = now_s - self._began_s - self._paused_s
        if self.steps and self.device.type == "cuda":
            self.paces.append((took_s / self.steps, self.steps))
        self.steps, self._began_s, self._paused_s = 0, now_s, 0.0
        return max(took_s, 1e-9)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside is no step."""
        self._settle()
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._settle()
            self._paused_s += time.perf_counter() - began_s

    def _settle(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
