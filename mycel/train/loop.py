"""A training run from its configuration to its results.

    Config ─▶ parts ─▶ (checkpoint) ─▶ step prepared ─▶ run folder ─▶ what will run ─▶ steps ─▶ curve, model, sample

    RUN/config.yaml                 what it was started with; `--resume RUN` reads it
    RUN/corrections.json            what earlier runs took, as its plan was priced; so does it
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
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mycel.corrections import Corrections
from mycel.errors import CheckpointError, PlanError, TrainError
from mycel.ir import Mesh
from mycel.plan import Measured, hardware_of, is_corrected, write_down
from mycel.plan.decide import LESS
from mycel.run.checkpoint import Loaded, Saver, best, latest, load_latest, load_latest_parts
from mycel.run.folder import RunFolder, explain, refuse_in_use, refuse_strange, refuse_unwritable, refuse_used
from mycel.run.rendezvous import seat
from mycel.run.shards import read_manifest
from mycel.sizes import counted, span
from mycel.train import device as devices
from mycel.train import metrics, models, state, summary
from mycel.train.assemble import Assembly, assemble
from mycel.train.config import Config, anchored, dump, load
from mycel.train.expert_load import PICTURE
from mycel.train.finish import CURVE, MODEL, finish
from mycel.train.metrics import FILE, Metrics
from mycel.train.outlook import Outlook, outlook
from mycel.train.progress import Progress, number, size
from mycel.train.ranks import Team, team
from mycel.train.schedule import learning_rate
from mycel.train.sections import Section
from mycel.train.signals import Interrupted, Signals
from mycel.train.steps import Steps
from mycel.train.tasks import mean_over, with_task
from mycel.train.waiting import Waiting
from mycel.train.written import inline

FAILED = 1
BROKEN = 3  # steps skipped at the end of a run, in a row: one or two are what loss scaling skips now and then
MANY_RANKS = 8  # of more, peaks are told as the least and the most
LEDGER = "predicted.json"  # of a step: predicted and measured
CHECKPOINTS = "checkpoints"
CORRECTIONS = "corrections.json"

Load = Callable[[Assembly], tuple[Loaded, list[str]]]  # a checkpoint, for the parts of a run, and what was passed over


def train(
    config: Config,
    resume: Path | None = None,
    dry_run: bool = False,
    started_from: Path | None = None,
    overwrite: bool = False,
) -> int:
    """Run it: 0 when all is done, 1 when something could not be saved or the last steps were skipped, 128 + the
    signal's number when it was stopped by one.

    resume        the folder of an earlier run, which goes on from its last checkpoint
    dry_run       say what would run, and stop
    started_from  the file the configuration is from: the run is called after it
    overwrite     a run that is in the folder goes, once all that can be wrong with this one has been looked at
    """
    progress = Progress(Console(quiet=seat().rank > 0), config.train.steps)
    with Signals() as signals, ExitStack() as held:
        run = Run(config, resume, dry_run, started_from, progress, signals, overwrite)
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
        overwrite: bool = False,
    ) -> None:
        self.config, self.resume, self.dry_run, self.started_from = config, resume, dry_run, started_from
        self.overwrite = overwrite
        self.progress, self.signals = progress, signals
        self.team = Team(Mesh())
        self.folder: Path | None = None  # locked by rank 0, once this is set
        self.outlook: Outlook | None = None  # what is said of a step before the first

    def run(self, held: ExitStack) -> int:
        """All of it; what is entered into `held` is left at the end, however that comes."""
        self.config, task_note = with_task(self.config)
        self.team = held.enter_context(team(self.config, self._begun_with()))
        if (resume := self.resume) and not self.dry_run:
            self.folder = self._claimed(held, lambda: RunFolder(resume, resume=True))
        if resume and (done := self.team.first(lambda: self._finished(resume))):
            self.progress.note(self._nothing_left(resume, done))
            return 0
        earlier = self._earlier(resume) if resume else None
        if not self.resume and self.team.rank == 0:
            self._look_at(_folder_name(self.config, self.started_from))
        parts, loaded = self._parts(earlier)
        earlier = None  # it may hold a copy of all weights
        if not self.dry_run and self.folder is None:
            self.folder = self._claimed(held, lambda: _new_folder(self.config, self.started_from, self.overwrite))
        where = self.folder or self.resume or _folder_name(self.config, self.started_from)
        self.progress.summary(summary.rows(parts, self.outlook, loaded.step if loaded else 0, where), "what will run")
        for note in [*filter(None, [task_note]), *summary.notes(parts, begins=loaded is None)]:
            self._note(note)
        if self.folder is None:
            return 0
        settings = dump(anchored(self.config))
        if self.team.rank == 0:
            if self.team.processes is not None and self.team.processes.meeting is not None:
                self.team.processes.meeting.name_run(self.folder)
            _write(self.folder / "config.yaml", settings)
            _write(self.folder / CORRECTIONS, json.dumps(self.team.corrections.data(), indent=1) + "\n")
        steps = self._steps(parts, loaded, settings)
        if steps.stop is not None:
            self.progress.note(self.where_it_stands())
            return 128 + steps.stop
        code = int(self.team.tell(self._end(parts, steps))[0])
        if code and self.team.processes is not None and self.team.processes.meeting is not None:
            self.team.processes.meeting.has_said()
        return code

    def _begun_with(self) -> Corrections | None:
        """Of a run that goes on, by what its plan was priced."""
        file = self.resume / CORRECTIONS if self.resume else None
        if file is None or not file.is_file() or not is_corrected():
            return None
        try:
            return Corrections.read(json.loads(file.read_text()))
        except (OSError, ValueError, TypeError, AttributeError):
            self._note(f"what the run was priced by cannot be read, it is priced anew\n  at        {file}")
            return None

    def _claimed(self, held: ExitStack, claim: Callable[[], RunFolder]) -> Path:
        """The folder that rank 0 has locked for all."""
        return Path(self.team.first(lambda: str(held.enter_context(claim()).path)))

    def _look_at(self, folder: Path) -> None:
        """Refuse a folder that cannot be written to, or holds something, before anything else is done; what would only
        be said of it is said."""
        refuse_unwritable(folder)
        if self.overwrite:
            refuse_strange(folder)
            refuse_in_use(folder)
        elif self.dry_run:
            with suppress_to(self._note):
                refuse_used(folder)
        elif self.config.run:
            refuse_used(folder)

    def _finished(self, folder: Path) -> int:
        """How many steps are done if nothing is left to do, otherwise 0."""
        last = latest(folder / "checkpoints")
        done = _step_of(last) if last and not read_manifest(last).meta.get("pending") else 0
        exported = not self.config.export or any((folder / MODEL).glob("*config.json"))
        return done if done > self.config.train.steps or (done == self.config.train.steps and exported) else 0

    def _nothing_left(self, folder: Path, done: int) -> str:
        """That a run is finished, and which settings were given in vain."""
        changed = self._changed(folder)
        vain = [f"{name}={_as_written(new)} (it was {_as_written(old)})" for name, old, new in changed]
        ignored = f"\n  ignored   {', '.join(vain)}: no step is left to take" if vain else ""
        others = any(name != "train.steps" for name, _, _ in changed)
        hint = f"train.steps=N, N larger than {done}, to go on{' with that' if others else ''}"
        return f"the run is finished: {done} steps are done\n  at        {folder}{ignored}\n  try       {hint}"

    def _changed(self, folder: Path) -> list[tuple[str, Any, Any]]:
        """Settings that are not those of the run as it was: name, before, now."""
        return [change for change in _changes(self._before(folder), self.config) if change[0] != "run"]

    def _before(self, folder: Path) -> Config:
        file = folder / "config.yaml"
        return load(file) if file.is_file() else self.config

    def _earlier(self, folder: Path) -> Load | None:
        """The checkpoint to go on from, of which each rank loads its parts once it knows them; None if the run was
        interrupted before its first."""
        before = self._before(folder)
        for name, old, new in self._changed(folder):
            self._note(f"{name} was {_as_written(old)}, is now {_as_written(new)}")
        if not self.team.first(lambda: any((folder / CHECKPOINTS).glob("step-*"))):
            refused = self.team.first(lambda: _checkpoints_gone(folder, before))
            if refused:
                raise CheckpointError(refused)
            self._note("the run has no checkpoint yet: it starts anew")
            return None
        if self.config.train.steps != before.train.steps and self.config.schedule.kind != "constant":
            self._note(_stretched(before, self.config, self.team.first(lambda: _last_step(folder))))
        if self.team.processes is not None:
            return lambda parts: load_latest_parts(
                folder / CHECKPOINTS, lambda saved: state.wanted(parts, saved), state.reader(parts), parts.device
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
            _prepare(parts)
            self.outlook = outlook(parts)
            if earlier is not None:
                with parts.opened():
                    loaded, notes = earlier(parts)
                    notes = [*notes, *state.restore(loaded, parts)]
            _refuse_not_finite(parts, loaded.path if loaded else self.config.model.path)
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
            Progress(self.progress.console, self.config.train.steps, start, counted=parts.data.train.each[0]),
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
        exported = self._take_best(parts, folder)
        if steps.skipped_in_a_row:
            hint = f"a lower optimizer.lr (it is {self.config.optimizer.lr:g})"
            _refuse_not_finite(parts, folder / CHECKPOINTS, hint)
        with parts.opened():
            complete = finish(parts, folder, self.progress)
        measured = _measured(parts, self.outlook, steps)
        if measured is not None and self.team.rank == 0:
            _write(folder / LEDGER, json.dumps(asdict(measured), indent=1) + "\n")
            write_down(measured)
        last = latest(folder / CHECKPOINTS)
        saved = last is not None and _step_of(last) >= steps.done
        rows = [
            *(
                [("validation", _validation(steps, mean_over(self.config.train.task), folder))]
                if steps.validation is not None
                else []
            ),
            ("time", f"{counted(steps.done, 'step')} in {span(steps.seconds)}"),
            *([("a step", str(measured))] if measured is not None else []),
            (
                "memory",
                (
                    f"{_peaks(parts)} at the peak{_of_process(parts)}, "
                    f"{size(parts.step.plan.peak)} predicted{summary.limit(parts)}"
                ),
            ),
            *([("skipped", _skipped(steps))] if parts.step.skipped else []),
            *_results(folder, exported),
        ]
        broken = steps.skipped_in_a_row >= BROKEN
        title = "done, but it no longer learned" if broken else "done"
        self.progress.summary(rows, title if complete and saved else "done, but not all of it could be saved")
        return 0 if complete and saved and not broken else FAILED

    def _take_best(self, parts: Assembly, folder: Path) -> str:
        """The weights of the best checkpoint are what is exported, and what the sample is of; which that is, in words,
        where validation ran."""
        lowest, newest = self.team.first(
            lambda: tuple(path and path.name for path in (best(folder / CHECKPOINTS), latest(folder / CHECKPOINTS)))
        )
        if lowest is None:
            return ""
        if lowest == newest:
            return f", of {lowest}, the best by validation, and the last"
        try:
            state.take_weights(parts, folder / CHECKPOINTS / lowest)
        except CheckpointError as error:
            self.progress.note(str(error))
            return f", of the last step; {lowest}, the best by validation, cannot be read"
        return f", of {lowest}, the best by validation; that of the last step: mycel export {folder} --last"

    def where_it_stands(self) -> str:
        """After an interruption: what is safe, and how to go on."""
        if self.folder is None:
            return "interrupted: nothing was begun"
        last, again = latest(self.folder / CHECKPOINTS), self.team.again(self.folder)
        if last is None:
            return f"interrupted before the first checkpoint\n  at        {self.folder}\n  try       {again}"
        return f"interrupted; {last.name} is safe\n  at        {last.parent}\n  try       {again}"


def _measured(parts: Assembly, said: Outlook | None, steps: Steps) -> Measured | None:
    """What a step took, and what the clock said of it; None where too few were taken to tell."""
    plan, pace_s = parts.step.plan, steps.clock.pace_s
    if said is None or not pace_s or not said.predicted.seconds:
        return None
    hardware, what = hardware_of(parts.device), f"{type(parts.module).__name__}, {parts.team}"
    peak = devices.memory_peak(parts.device)
    count = sum(count for _, count in steps.clock.paces)
    timed = steps.timed.parts(said.hardware) if steps.timed is not None and said.hardware is not None else ()
    return Measured(
        hardware.name, parts.team.mesh.world, said.predicted.seconds, pace_s, plan.peak, peak, what, count,
        *said.before, said.figures, timed,
    )  # fmt: skip


def _prepare(parts: Assembly) -> None:
    """Compile the step; a budget that nothing fits is told in the words of the configuration."""
    try:
        parts.local_step()
    except PlanError as error:
        here = "a smaller train.batch, which is one micro-batch, or a larger train.memory"
        raise PlanError(str(error).replace(LESS, here)) from None


def _refuse_not_finite(parts: Assembly, where: Path | None, hint: str = "weights from before they broke") -> None:
    """Weights that are no numbers make every step one that is skipped: they are named before the first, and exported
    never."""
    if what := models.not_finite(parts.module):
        raise TrainError(
            f"{what}\n  at        {where or 'the fresh model'}\n  try       {hint}: no step can be taken with these"
        )


def _last_step(folder: Path) -> int:
    """Of the last checkpoint; 0: there is none."""
    last = latest(folder / CHECKPOINTS)
    return _step_of(last) if last is not None else 0


def _stretched(before: Config, now: Config, done: int) -> str:
    """What another number of steps does to the learning rate from here on."""

    def rate(config: Config) -> float:
        steps, schedule = config.train.steps, config.schedule
        return learning_rate(
            min(done, steps - 1), lr=config.optimizer.lr, kind=schedule.kind, steps=steps, warmup=schedule.warmup,
            min_lr=schedule.min_lr,
        )  # fmt: skip

    what = f"the {now.schedule.kind} schedule is stretched to {now.train.steps} steps"
    return (
        f"{what}: at step {done + 1} the learning rate is {rate(now):.3g}, it would have been {rate(before):.3g}\n"
        "  try       schedule.kind=constant to keep it level"
    )


def _checkpoints_gone(folder: Path, config: Config) -> str:
    """Why a run without checkpoints does not start anew: it has had some; empty: it has not.  A second save waits for
    the first one, so the records of a run that has none end before its third would be due."""
    records = metrics.read(folder)
    last = max((int(record["step"]) for record in records), default=0)
    every = config.checkpoint.every
    early = (folder / CHECKPOINTS).is_dir() and (not every or last <= 2 * every) and not (folder / MODEL).exists()
    if not last or early:
        return ""
    return (
        f"the checkpoints are gone: {last} steps are recorded, and none of them can be gone on from\n"
        f"  at        {folder / CHECKPOINTS}\n  try       put them back, or start a new run: --run ANOTHER"
    )


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


@contextmanager
def suppress_to(say: Callable[[str], None]) -> Iterator[None]:
    """What is refused inside is said."""
    try:
        yield
    except CheckpointError as error:
        say(str(error))


def _new_folder(config: Config, started_from: Path | None, overwrite: bool = False) -> RunFolder:
    """The folder that is asked for, emptied if it may be, or one with a new name."""
    named = _folder_name(config, started_from)
    if config.run:
        return RunFolder(named, overwrite=overwrite)
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


def _as_written(value: Any) -> str:
    """A setting as a file has it: {dp: 2}, null."""
    plain = value.model_dump(mode="json") if isinstance(value, Section) else value
    return inline(str(plain) if isinstance(plain, Path) else plain)


def _results(folder: Path, exported: str) -> list[tuple[str, str]]:
    """What the folder holds for people, and where; `exported`: of which step the model is."""
    there = [("model", MODEL), ("checkpoints", CHECKPOINTS), ("metrics", FILE), ("loss curve", CURVE)]
    there += [("experts", PICTURE)]
    return [(name, f"{folder / file}{exported * (file == MODEL)}") for name, file in there if (folder / file).exists()]


def _validation(steps: Steps, unit: str, folder: Path) -> str:
    assert steps.validation is not None
    lowest = ""
    if steps.best and steps.best[0] < steps.validation:
        there = (folder / CHECKPOINTS / f"step-{steps.best[1]:08}").is_dir()
        lowest = f", {number(steps.best[0])} at best (step {steps.best[1]}{'' if there else ', not saved'})"
    return f"loss {number(steps.validation)} nats per {unit}{lowest}"


def _skipped(steps: Steps) -> str:
    """How many steps were, and what the last ones came to."""
    text = f"{steps.parts.step.skipped} of {steps.done} steps: their gradients were not finite"
    last = steps.skipped_in_a_row
    return f"{text}; the last {last} of them in a row: weights are those of step {steps.done - last}" if last else text


def _peaks(parts: Assembly) -> str:
    """What was measured, of each rank; of many the least and the most."""
    peaks = parts.team.tell(devices.memory_peak(parts.device))
    if len(peaks) > MANY_RANKS:
        return f"{size(min(peaks))} to {size(max(peaks))} on {len(peaks)} ranks"
    return ", ".join(map(size, peaks)) + (" by rank" if len(peaks) > 1 else "")


def _of_process(parts: Assembly) -> str:
    return " (whole process)" if parts.device.type == "cpu" else ""
