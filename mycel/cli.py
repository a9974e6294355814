"""The command line.  The configuration is read and checked first; only then is torch imported.

mycel train [CONFIG.yaml] [a.b=c …]      exit code 0: done, 1: it failed, 2: wrong usage or configuration,
                                         130: Ctrl-C, 143: SIGTERM
mycel train … --nproc N                  the same by N processes, or 128 + the signal that killed one,
                                         71: a rank was lost
mycel config [CONFIG.yaml] [a.b=c …]
mycel plan [CONFIG.yaml] [a.b=c …]       the fastest plan for a cluster, which need not be there
mycel evaluate RUN|FOLDER --data FILE    loss, perplexity and accuracy; or multiple choice
mycel generate RUN|FOLDER --prompt TEXT  text, as it comes
mycel export RUN [--to hf]               a checkpoint as a model of its own
mycel probe [--nproc N] [--out FILE]     what this device and its links can do, for planning
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mycel.errors import MycelError, PlanError, TrainError
from mycel.launch import launch
from mycel.train.config import Config, PlannedConfig, dump, load, named_fields, names_model
from mycel.train.run_folders import no_run

FAILED, MISUSED, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="mycel",
    help=(
        "Mycel trains PyTorch models: ordinary single-device code in, the fastest correct program for your devices out."
    ),
    epilog="Start with `mycel train`: it needs no configuration and no download, and takes about three minutes.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Settings = Annotated[list[str] | None, typer.Argument(metavar="CONFIG.yaml|a.b=c", hidden=True)]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"mycel {version('mycel')}")
        raise typer.Exit


@app.callback()
def _mycel(
    asked: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def train(
    settings: Settings = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue this run, from its last checkpoint.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", metavar="FOLDER", help="Write results here (the same as run=FOLDER).")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder of --run.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and stop.")] = False,
    uncorrected: Annotated[
        bool, typer.Option("--uncorrected", help="Plan and predict by figures alone, whatever earlier runs took.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="Start N processes here: the ranks of parallel.mesh."),
    ] = None,
    nnodes: Annotated[int, typer.Option("--nnodes", metavar="N", min=1, help="On so many hosts.")] = 1,
    node_rank: Annotated[
        int, typer.Option("--node-rank", metavar="I", min=0, help="Which of them this is, from 0.")
    ] = 0,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", metavar="HOST:PORT", help="Where they meet: an address of the first.")
    ] = None,
) -> None:
    """Train a model, as CONFIG.yaml and the settings a.b=c over it say.

    With neither, a small Llama learns from the sources of Python's own standard library. `mycel config` prints every
    setting.

    \b
    Examples:
      mycel train
      mycel train my.yaml optimizer.lr=1e-3 train.steps=2000
      mycel train model.path=llama data.train='books/*.txt'
      mycel train --resume runs/my-20260102-130405
      mycel train my.yaml --nproc 4 parallel.plan=zero3
    """
    try:
        file, overrides = _split(settings or [])
        old, folder = _folder("--resume", resume), _folder("--run", run)
        if overwrite and old:
            raise TrainError("--overwrite starts anew, --resume goes on\n  try       one of them")
        if old:
            file = _run_config(old, file, folder)
        config = load(file, overrides)
        if overwrite and not (folder or config.run):
            raise TrainError("--overwrite replaces the run of a folder, but none is named\n  try       --run FOLDER")
        _check_ranks(config, nproc, nnodes, node_rank, rendezvous, resumed=old is not None)
    except (TrainError, PlanError) as e:
        _fail(e, MISUSED)
    if uncorrected:
        os.environ["MYCEL_UNCORRECTED"] = "1"  # of all ranks
    if nproc is not None:
        again = [
            *(["--resume", resume] if resume else []),
            *(["--run", run] if run else []),
            *(["--overwrite"] if overwrite else []),
            *(["--dry-run"] if dry_run else []),
        ]
        raise typer.Exit(_launch(["train", *(settings or []), *again], nproc, nnodes, node_rank, rendezvous))
    if old or folder:
        config = config.model_copy(update={"run": old or folder})
    raise typer.Exit(_train(config, old, dry_run, file, overwrite))


@app.command(name="config")
def show_config(settings: Settings = None) -> None:
    """Print the whole configuration, and what each setting means.

    It is checked as `mycel train` would, with the defaults that it would get: those of its own model, or where none is
    named those of the small Llama. It can be used as a file to start from: mycel config > my.yaml
    """
    try:
        file, overrides = _split(settings or [])
        config = load(file, overrides)
    except TrainError as e:
        _fail(e, MISUSED)
    given = " ".join([*([str(file)] if file else []), *overrides])
    model = "" if names_model(file, overrides) else "no model is named: a small Llama and what suits it"
    head = "; ".join(filter(None, [given and f"mycel train {given}", model]))
    typer.echo(f"# {head}\n" * bool(head) + dump(config, comments=True), nl=False)


@app.command(name="plan")
def find_plan(
    settings: Settings = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME|FILE", help="h100x64, or a .yaml file; else the devices here."),
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="Show so many plans.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")] = False,
    out: Annotated[
        str | None, typer.Option("-o", "--out", metavar="FILE", help="Write the best plan, for parallel.plan=FILE.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", min=0, help="Stop after this time with the best so far.")
    ] = None,
    page: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write a page: the step, its memory, the plans.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="PATTERN", help="Choices and prices of what has such a name.")
    ] = None,
    uncorrected: Annotated[
        bool, typer.Option("--uncorrected", help="Of this machine: as its figures say, whatever earlier runs took.")
    ] = False,
) -> None:
    """Find the fastest plan for a model on a cluster, which need not be there.

    The model is that of CONFIG.yaml and the settings a.b=c over it, or of a function of yours, module:function, that
    returns (model, batch). It is made without data. Ctrl-C prints the best plan so far, and the exit code is 130.

    \b
    Examples:
      mycel plan my.yaml --cluster h100x64
      mycel plan my.yaml --cluster cluster.yaml --top 10 -o plan.yaml --html plan.html
      mycel plan my.yaml --cluster h100x64 --explain '*.q_proj.weight'
      mycel plan my_code:make --cluster a100-80x16 --json
      mycel plan diff a.yaml b.yaml
      mycel plan check plan.yaml my.yaml
    """
    raise typer.Exit(_plan(settings or [], cluster, top, as_json, out, seconds, page, explain, uncorrected))


def _plan(
    arguments: list[str],
    cluster: str | None,
    top: int,
    as_json: bool,
    out: str | None,
    seconds: float | None,
    page: str | None,
    explain: str | None,
    uncorrected: bool,
) -> int:
    """Search, compare or check, as the first argument says."""
    import json

    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from mycel import search_page, search_text
        from mycel.plan import Plan
        from mycel.search_remarks import remarked
        from mycel.train import planner

        if arguments[:1] == ["diff"]:
            if len(arguments) != 3:
                raise TrainError("two plans are compared\n  try       mycel plan diff a.yaml b.yaml")
            text = search_text.difference(Plan.read(Path(arguments[1])), Plan.read(Path(arguments[2])))
            typer.echo(text or "the same")
            return 0 if not text else FAILED
        checked = arguments[1] if arguments[:1] == ["check"] and len(arguments) > 1 else None
        if arguments[:1] == ["check"] and checked is None:
            raise TrainError("no plan to check\n  try       mycel plan check plan.yaml my.yaml")
        rest = arguments[2:] if checked else arguments
        for file in filter(None, (out, page)):
            if not Path(file).absolute().parent.is_dir():  # before the search, not after it
                raise TrainError(f"there is no folder for {file}\n  try       mkdir -p {Path(file).parent}")
            if Path(file).is_dir():
                raise TrainError(
                    f"{file} is a folder\n  try       {Path(file) / ('plan.html' if file == page else 'plan.yaml')}"
                )
        where = planner.cluster_of(cluster, corrected=not uncorrected)

        def say(text: str) -> None:
            typer.echo(f"  {text}", err=True)

        functions = [a for a in rest if ":" in a and "=" not in a and not a.endswith((".yaml", ".yml"))]
        search = (
            planner.question_of(functions[0], where, say, [each for each in rest if each not in functions])
            if functions
            else planner.question(load(*_split(rest), PlannedConfig), where, say)
        )
        if checked:
            typer.echo(search.checked(Plan.read(Path(checked))))
            return 0
        answer = remarked(search, search.run(seconds, interruptible=True))
        if explain:
            typer.echo(search_text.explained(search, answer, explain), err=as_json)
        if page:
            best = answer.best
            Path(page).write_text(search_page.page(answer, search.detail(best) if best is not None else None))
    except (TrainError, PlanError) as e:
        _fail(e, MISUSED)
    except MycelError as e:
        _fail(e, FAILED)
    typer.echo(json.dumps(search_text.data(answer, top), indent=1) if as_json else search_text.table(answer, top))
    if out:
        Path(out).write_text(search_text.file_text(answer))
        typer.echo(f"written    {out}", err=as_json)
    if page:
        typer.echo(f"written    {page}", err=as_json)
    return INTERRUPTED if answer.interrupted else 0


Where = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FOLDER", help="A run of mycel train, RUN/checkpoints/step-N, or a model in its folder."
    ),
]
Last = Annotated[
    bool, typer.Option("--last/--best", help="Of a run the last checkpoint; else the best by validation, if it ran.")
]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute.")]


@app.command()
def evaluate(
    where: Where,
    data: Annotated[list[str], typer.Option("--data", metavar="PATH", help="Text, JSONL or tokens; several are one.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="data.fields.a=b", hidden=True)] = None,
    length: Annotated[int | None, typer.Option("--length", metavar="N", min=2, help="Tokens in a sequence.")] = None,
    last: Last = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    device: Device = "auto",
) -> None:
    """Loss, perplexity and accuracy of a model on data; or how often it chooses right, where the data has choices, or
    the model tells classes or prefers one of two texts.

    \b
    Examples:
      mycel evaluate runs/my-20260102-130405 --data held-out.txt
      mycel evaluate llama --data 'books/*.txt' --data more.jsonl
      mycel evaluate llama --data questions.jsonl     {"prompt": "2 + 2 =", "choices": [" 3", " 4"], "answer": 1}
      mycel evaluate llama --data reviews.csv data.fields.text=review
    """
    try:
        fields = named_fields(settings or [])
    except TrainError as e:
        _fail(e, MISUSED)
    with _failing():
        from mycel.train import commands

        note = lambda text: typer.echo(text, err=True)
        model = Path(where).expanduser()
        score = commands.evaluate(
            model, data, note, last=last, length=length, device=device, as_json=as_json, fields=fields
        )
        typer.echo(score)


@app.command()
def generate(
    where: Where,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="What it continues.")] = None,
    file: Annotated[
        str | None, typer.Option("--file", metavar="FILE", help="A prompt on each line, or in JSONL with messages too.")
    ] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="With --file: where the JSONL goes.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's message to a chat model.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", metavar="N", help="At most so many.")] = 200,
    temperature: Annotated[float, typer.Option("--temperature", metavar="T", help="0: always the likeliest.")] = 0.8,
    top_p: Annotated[float, typer.Option("--top-p", metavar="P", help="Of the likeliest that make up P.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The same seed, the same text.")] = 0,
    last: Last = False,
    device: Device = "auto",
) -> None:
    """Text that a model writes, as it comes.

    \b
    Examples:
      mycel generate runs/my-20260102-130405 --prompt 'def '
      mycel generate llama --chat --prompt 'Why is the sky blue?' --temperature 0.7 --top-p 0.9
      mycel generate llama --file prompts.jsonl --out answers.jsonl
    """
    with _failing():
        from mycel.train import commands
        from mycel.train.finish import printable
        from mycel.train.generate import Sampling

        commands.generate(
            Path(where).expanduser(),
            prompt,
            Sampling(tokens, temperature, top_p, seed),
            lambda text: typer.echo(text, err=True),
            lambda text: typer.echo(printable(text) if sys.stdout.isatty() else text, nl=False),
            last=last,
            chat=chat,
            file=_folder("--file", file),
            out=_folder("--out", out),
            device=device,
        )


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of mycel train, or RUN/checkpoints/step-N.")],
    to: Annotated[str, typer.Option("--to", metavar="hf|safetensors|onnx|program", help="In which form.")] = "hf",
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FOLDER", help="Where to; RUN/exported[-step-N][-FORM] if it is not said."),
    ] = None,
    last: Last = False,
) -> None:
    """A checkpoint of a run as a model of its own, whichever plan it was trained under.

    hf is a folder that transformers loads, with its tokenizer; safetensors the weights alone; onnx a file from tokens
    or pixels to logits, checked by onnxruntime where it is installed; program the captured forward pass beside its
    weights.

    \b
    Examples:
      mycel export runs/my-20260102-130405
      mycel export runs/my-20260102-130405 --last --to safetensors --out weights
      mycel export runs/my-20260102-130405/checkpoints/step-00000400
    """
    with _failing():
        from mycel.train import commands

        note = lambda text: typer.echo(text, err=True)
        path = commands.export_run(Path(run).expanduser(), note, last=last, to=to, out=_folder("--out", out))
        typer.echo(f"exported: {path}")


@contextmanager
def _failing() -> Iterator[None]:
    """An error of ours is one clean message, and exit code 1."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        yield
    except MycelError as e:
        _fail(e, FAILED)


@app.command(name="probe")
def measure(
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", metavar="N", min=1, help="Start N processes here, and measure between them."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="Write here; else to MYCEL_PROBE, or ~/.cache/mycel/probe.yaml."),
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="What to measure.")] = "auto",
) -> None:
    """Measure products, attention, copies and messages by size, and write them to a file that planning reads.

    Where the file is at MYCEL_PROBE or at ~/.cache/mycel/probe.yaml, every plan for a device of this name uses it.
    Several processes compute at once, as they will in training; under torchrun, links between hosts are measured too.

    \b
    Examples:
      mycel probe
      mycel probe --nproc 8
      torchrun --nnodes 2 --nproc-per-node 8 … -m mycel probe --out probe.yaml
    """
    if nproc is not None:
        more = ["--out", out] if out else []
        raise typer.Exit(_launch(["probe", "--device", device, *more], nproc, 1, 0, None))
    raise typer.Exit(_probe(device, out))


def _probe(device: str, out: str | None) -> int:
    """Measure, as one of the ranks there are; the first one writes."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import yaml

    from mycel.plan import probe_path
    from mycel.run.probe import probe
    from mycel.train.device import choose

    first = os.environ.get("RANK", "0") == "0"
    try:
        path = Path(out).expanduser() if out else probe_path()
        if path is None:
            raise PlanError("MYCEL_PROBE is set to no file\n  at        the environment\n  try       --out FILE")
        choose(device, "--device")
        _refuse_unwritable(path) if first else None
        measured = probe(device, lambda what: typer.echo(f"  {what}", err=True) if first else None)
    except MycelError as e:
        _fail(e, FAILED)
    if first:
        path.write_text(yaml.safe_dump(measured, sort_keys=False, default_flow_style=None, width=110))
        ranks = f" in {measured['processes']} processes" if measured["processes"] > 1 else ""
        typer.echo(f"measured {measured['device']}{ranks}: {path}")
    return 0


def _refuse_unwritable(path: Path) -> None:
    """A file that cannot be written, before anything is measured; its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as e:
        raise PlanError(
            f"cannot write what is measured: {e.strerror}\n  at        {path}\n  try       --out ANOTHER"
        ) from None


def _check_ranks(
    config: Config, nproc: int | None, nnodes: int, node_rank: int, rendezvous: str | None, resumed: bool
) -> None:
    """What is said of ranks, before any is started."""
    if nproc is None:
        if nnodes > 1 or node_rank or rendezvous is not None:
            raise TrainError(
                "--nnodes, --node-rank and --rendezvous are for processes that are started here\n"
                "  try       --nproc N, as many on each host"
            )
        return
    running, ranks = nproc * nnodes, config.parallel.ranks
    if "RANK" in os.environ:
        raise TrainError(
            "--nproc is for who starts the ranks, but this process is one: RANK is set\n  at        the environment\n"
            "  try       leave it out"
        )
    if ranks is not None and ranks != running:
        shown = ", ".join(f"{axis}: {n}" for axis, n in (config.parallel.mesh or {}).items())
        hint = f"--nproc {ranks // nnodes}" if ranks % nnodes == 0 else "another mesh"
        if resumed:
            hint += f", or parallel.mesh=null parallel.plan=auto: a plan for {running} from here on"
        raise PlanError(
            f"the mesh has {ranks} ranks, but {running} processes would run\n  at        parallel.mesh: {{{shown}}}\n"
            f"  try       {hint}"
        )


def _launch(arguments: list[str], nproc: int, nnodes: int, node_rank: int, rendezvous: str | None) -> int:
    """Start the ranks, each with these arguments: the exit code of the first that failed."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        return launch(arguments, nproc, nnodes, node_rank, rendezvous)
    except MycelError as e:
        _fail(e, FAILED)


def _train(config: Config, resume: Path | None, dry_run: bool, file: Path | None, overwrite: bool) -> int:
    """Run the loop: its exit code, or that of its error."""
    # on a machine that does other work too, threads that wait by spinning make a step of small operators several times
    # slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from mycel.train.loop import train as run_loop

    try:
        return int(run_loop(config, resume=resume, dry_run=dry_run, started_from=file, overwrite=overwrite))
    except MycelError as e:
        _fail(e, FAILED)


def _split(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file among the arguments, and the settings: those with `=` and no `/` before it."""
    overrides = [each for each in arguments if "=" in each and "/" not in each.partition("=")[0]]
    files = [each for each in arguments if each not in overrides]
    opened = [each for each in overrides if each.count("{") > each.count("}") or each.count("[") > each.count("]")]
    if opened and any(each.endswith(("}", "]")) for each in files):
        name = opened[0].partition("=")[0]
        raise TrainError(
            f"the shell has split {name} at a space: its bracket is not closed\n  at        argument {opened[0]}\n"
            f"  try       quotes around it: '{name}={{…}}'"
        )
    if len(files) > 1:
        raise TrainError(
            f"more than one configuration: {' and '.join(files)}\n"
            "  try       one file, and settings such as train.steps=500 over it"
        )
    return (Path(files[0]) if files else None), overrides


def _folder(option: str, given: str | None) -> Path | None:
    """The folder that an option names; the empty name (of an unset variable, say) is refused."""
    if given == "":
        raise TrainError(f"{option} is given an empty name\n  try       {option} runs/NAME")
    return Path(given).expanduser() if given else None


def _run_config(run: Path, file: Path | None, folder: Path | None) -> Path:
    """The configuration a run was started with; another one beside it is refused."""
    if file or folder:
        other = f"--run {folder}" if folder else str(file)
        raise TrainError(
            f"--resume {run} uses the run's own folder and configuration, not {other}\n  try       leave it out"
        )
    config = run / "config.yaml"
    if config.is_file():
        return config
    raise TrainError(no_run(run))


def _fail(error: MycelError, code: int) -> NoReturn:
    """One clean message on stderr; of several ranks that come to it, from one."""
    say = lambda: typer.echo(f"{typer.style('error:', fg='red', bold=True)} {error}", err=True)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        say()
    else:
        from mycel.run.rendezvous import say_once

        say_once(error, say)
    raise typer.Exit(code) from None


def main() -> None:
    """The entry point `mycel`."""
    app(prog_name="mycel")
