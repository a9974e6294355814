"""A training run from its configuration to its results.

    Config ─▶ parts ─▶ (checkpoint) ─▶ step prepared ─▶ run folder ─▶ what will run ─▶ steps ─▶ curve, model, sample

    RUN/config.yaml                 what it was started with; `--resume RUN` reads it
    RUN/metrics.jsonl, tensorboard  what was measured
    RUN/checkpoints                 states to go on from
    RUN/curve.png, model            made at the end

All that can be wrong with what it is given is found before the folder is made.  From Python:

    from mycel.train.config import Config
    from mycel.train.loop import train

    train(Config.from_dict({"data": {"train": "books/*.txt"}}))
"""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from mycel.errors import CheckpointError
from mycel.ir import Mesh
from mycel.run.checkpoint import Loaded, Saver, latest, load_latest, load_latest_parts
from mycel.run.folder import RunFolder, explain, refuse_used
from mycel.run.rendezvous import seat
from mycel.run.shards import read_manifest
from mycel.train import device as devices
from mycel.train import state, summary
from mycel.train.assemble import Assembly, assemble
from mycel.train.config import Config, anchored, dump, load
from mycel.train.finish import CURVE, MODEL, finish
from mycel.train.metrics import FILE, Metrics
from mycel.train.progress import Progress, duration, number, size
from mycel.train.ranks import Team, team
from mycel.train.sections import Section
from mycel.train.signals import Interrupted, Signals
from mycel.train.steps import Steps
from mycel.train.waiting import Waiting

FAILED = 1
CHECKPOINTS = "checkpoints"

Load = Callable[[Assembly], tuple[Loaded, list[str]]]  # a checkpoint, for the parts of a run, and what was passed over


def train(config: Config, resume: Path | None = None, dry_run: bool = False, started_from: Path | None = None) -> int:
    """Run it: 0 when all is done, 1 when something could not be saved, 128 + the signal's number when it was stopped by
    one.

    resume        the folder of an earlier run, which goes on from its last checkpoint
    dry_run       say what would run, and stop
    started_from  the file the configuration is from: the run is called after it
    """
    progress = Progress(Console(quiet=seat().rank > 0), config.train.steps)
    with Signals() as signals, ExitStack() as held:
        run = Run(config, resume, dry_run, started_from, progress, signals)
        try:
            return run.run(held)
        except Interrupted as interrupted:
            held.close()
            progress.note(run.where_it_stands())
            return interrupted.code


class Run:
    """One call of `train`."""

    def __init__(
        self,
        config: Config,
        resume: Path | None,
        dry_run: bool,
        started_from: Path | None,
        progress: Progress,
        signals: Signals,
    ) -> None:
        self.config, self.resume, self.dry_run, self.started_from = config, resume, dry_run, started_from
        self.progress, self.signals = progress, signals
        self.team = Team(Mesh())
        self.folder: Path | None = None  # locked by rank 0, once this is set

    def run(self, held: ExitStack) -> int:
        """All of it; what is entered into `held` is left at the end, however that comes."""
        self.team = held.enter_context(team(self.config))
        if (resume := self.resume) and not self.dry_run:
            self.folder = self._claimed(held, lambda: RunFolder(resume, resume=True))
        if resume and (done := self.team.first(lambda: self._finished(resume))):
            self.progress.note(
                f"the run is finished: {done} steps are done\n  at        {resume}\n  try       train.steps=… for more"
            )
            return 0
        earlier = self._earlier(resume) if resume else None
        if not self.resume and self.config.run and self.team.rank == 0:
            refuse_used(self.config.run)
        parts, loaded = self._parts(earlier)
        earlier = None  # it may hold a copy of all weights
        if not self.dry_run and self.folder is None:
            self.folder = self._claimed(held, lambda: _new_folder(self.config, self.started_from))
        where = self.folder or self.resume or _folder_name(self.config, self.started_from)
        self.progress.summary(summary.rows(parts, loaded.step if loaded else 0, where), "what will run")
        for note in summary.notes(parts):
            self._note(note)
        if self.folder is None:
            return 0
        settings = dump(anchored(self.config))
        if self.team.rank == 0:
            _write(self.folder / "config.yaml", settings)
        steps = self._steps(parts, loaded, settings)
        if steps.stop is not None:
            self.progress.note(self.where_it_stands())
            return 128 + steps.stop
        return int(self.team.tell(self._end(parts, steps))[0])

    def _claimed(self, held: ExitStack, claim: Callable[[], RunFolder]) -> Path:
        """The folder that rank 0 has locked for all."""
        return Path(self.team.first(lambda: str(held.enter_context(claim()).path)))

    def _finished(self, folder: Path) -> int:
        """How many steps are done if nothing is left to do, otherwise 0."""
        last = latest(folder / "checkpoints")
        done = _step_of(last) if last and not read_manifest(last).meta.get("pending") else 0
        exported = not self.config.export or any((folder / MODEL).glob("*config.json"))
        return done if done > self.config.train.steps or (done == self.config.train.steps and exported) else 0

    def _earlier(self, folder: Path) -> Load | None:
        """The checkpoint to go on from, of which each rank loads its parts once it knows them; None if the run was
        interrupted before its first."""
        before = load(folder / "config.yaml") if (folder / "config.yaml").is_file() else self.config
        for name, old, new in _changes(before, self.config):
            if name != "run":
                self._note(f"{name} was {old}, is now {new}")
        if not self.team.first(lambda: any((folder / "checkpoints").glob("step-*"))):
            self._note("the run has no checkpoint yet: it starts anew")
            return None
        if self.team.processes is not None:
            ranks = self.team.savers
            return lambda parts: load_latest_parts(
                folder / CHECKPOINTS, lambda saved: state.wanted(parts, saved), ranks, parts.device
            )
        loaded = load_latest(folder / CHECKPOINTS)  # before anything is made
        return lambda parts: loaded

    def _note(self, text: str) -> None:
        self.progress.note(f"note: {text}")

    def _parts(self, earlier: Load | None) -> tuple[Assembly, Loaded | None]:
        """Everything that runs, checked, in the state it goes on from, and compiled; and what is left of its
        checkpoint."""
        waiting, loaded, notes = Waiting(self.progress), None, list[str]()
        with waiting.shown("reading the data"):
            parts = assemble(self.config, waiting, self.team)
            if self.team.processes is not None:
                self.team.processes.agree({"the data": parts.data.fingerprint, "the model": str(parts.outline)})
            waiting.say("preparing the step")
            parts.local_step()
            if earlier is not None:
                loaded, notes = earlier(parts)
                notes = [*notes, *state.restore(loaded, parts)]
        for note in notes:
            self._note(note)
        devices.seed_all(self.config.train.seed)  # what was drawn until here does not count
        if loaded:
            state.set_random_state(loaded.meta["random"], parts.device)
        return parts, state.lightened(loaded) if loaded else None

    def _steps(self, parts: Assembly, loaded: Loaded | None, settings: str) -> Steps:
        """Take the steps, patiently: the first signal ends them, with their state saved."""
        assert self.folder is not None
        start = loaded.step if loaded else 0
        progress, checkpoint, rank = (
            Progress(self.progress.console, self.config.train.steps, start),
            self.config.checkpoint,
            self.team.rank,
        )
        with (
            self.signals.patiently(progress.stopping),
            Metrics(
                self.folder,
                self.config.log.tensorboard and not rank,
                start if self.resume else None,
                progress.note,
                rank,
            ) as metrics,
            Saver(
                self.folder / CHECKPOINTS,
                checkpoint.keep,
                checkpoint.asynchronous,
                ranks=self.team.savers,
                plan=self._plan(),
            ) as saver,
            progress,
        ):
            steps = Steps(parts, saver, metrics, progress, self.signals, loaded, settings)
            steps.run()
        return steps

    def _plan(self) -> str | None:
        return str(self.team.plan) if self.team.plan is not None else None

    def _end(self, parts: Assembly, steps: Steps) -> int:
        """The results, and where they are."""
        assert self.folder is not None
        folder = self.folder
        complete = finish(parts, folder, self.progress)
        last = latest(folder / CHECKPOINTS)
        saved = last is not None and _step_of(last) >= steps.done
        rows = [
            *([("validation", _validation(steps))] if steps.validation is not None else []),
            ("time", f"{steps.done} steps in {duration(steps.seconds)}"),
            (
                "memory",
                (
                    f"{size(devices.memory_peak(parts.device))} at the peak{_of_process(parts)}, "
                    f"{size(parts.step.plan.peak)} predicted"
                ),
            ),
            *((name, str(folder / file)) for name, file in _results(folder)),
        ]
        self.progress.summary(rows, "done" if complete and saved else "done, but not all of it could be saved")
        return 0 if complete and saved else FAILED

    def where_it_stands(self) -> str:
        """After an interruption: what is safe, and how to go on."""
        if self.folder is None:
            return "interrupted: nothing was begun"
        last = latest(self.folder / CHECKPOINTS)
        if last is None:
            return f"interrupted before the first checkpoint\n  at        {self.folder}"
        again = f"mycel train --resume {shlex.quote(str(self.folder))}"
        return f"interrupted; {last.name} is safe\n  at        {last.parent}\n  try       {again}"


def _step_of(checkpoint: Path) -> int:
    """step-00000200 => 200."""
    return int(checkpoint.name.rpartition("-")[2])


# -- the run folder --------------------------------------------------------------------------------------------------


def _folder_name(config: Config, started_from: Path | None) -> Path:
    """runs/<name>-<date>-<time>, after the configuration's file, the model's folder or its kind."""
    if config.run:
        return config.run
    kind = str((config.model.config or {}).get("model_type", "model"))
    name = started_from.stem if started_from else config.model.path.resolve().name if config.model.path else kind
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _new_folder(config: Config, started_from: Path | None) -> RunFolder:
    """The folder that is asked for, or one with a new name."""
    named = _folder_name(config, started_from)
    if config.run:
        return RunFolder(named)
    others = (named.with_name(f"{named.name}-{i}") for i in itertools.count(2))
    for path in itertools.chain([named], others):
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # of a run that was started in the same second
            continue
        except OSError as error:
            raise CheckpointError(
                f"cannot make the run folder: {error.strerror}\n  at        {path}\n  try       --run FOLDER"
            ) from error
        return RunFolder(path)
    raise AssertionError("names do not end")


def _write(path: Path, text: str) -> None:
    """A small file, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        why, hint = explain(error, path.parent, len(text))
        raise CheckpointError(f"the run cannot begin: {why}\n  at        {path}\n  try       {hint}") from error


def _changes(before: Any, now: Any, above: str = "") -> list[tuple[str, Any, Any]]:
    """Settings that differ, by their names."""
    old, new = (dict(x) if isinstance(x, Section | Mapping) else None for x in (before, now))
    if old is None or new is None:
        return [(above, before, now)] if before != now else []
    names = dict.fromkeys([*old, *new])
    return [
        change
        for name in names
        for change in _changes(old.get(name), new.get(name), f"{above}.{name}" if above else name)
    ]


def _results(folder: Path) -> list[tuple[str, str]]:
    """What the folder holds for people."""
    there = [("model", MODEL), ("checkpoints", "checkpoints"), ("metrics", FILE), ("loss curve", CURVE)]
    return [(name, file) for name, file in there if (folder / file).exists()]


def _validation(steps: Steps) -> str:
    assert steps.validation is not None
    best = (
        f", {number(steps.best[0])} at best (step {steps.best[1]})"
        if steps.best and steps.best[0] < steps.validation
        else ""
    )
    return f"loss {number(steps.validation)} nats per token{best}"


def _of_process(parts: Assembly) -> str:
    return " (whole process)" if parts.device.type == "cpu" else ""
