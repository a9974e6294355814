"""What is made of a run when its steps are done: the loss curve, the model as a Hugging Face folder, a sample of what
it writes.

None of it can lose the run: its last checkpoint is on disk before, and what fails is told and leaves the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

from mycel.errors import TrainError
from mycel.train import curve, expert_load, gathering, metrics, sample
from mycel.train.assemble import Assembly, tokenizer_source
from mycel.train.export import export
from mycel.train.progress import Progress
from mycel.train.weights import refusal

CURVE, MODEL = "curve.png", "model"
SKETCH_WIDTH, SKETCH_HEIGHT = 100, 16


def finish(parts: Assembly, folder: Path, progress: Progress) -> bool:
    """Make all that the configuration asks for; whether all of it could be made."""
    done = True
    if parts.config.log.curve and parts.team.rank == 0:
        done &= _told(progress, lambda: _draw(folder, progress))
    if parts.config.export:
        done &= _told(progress, lambda: _export(parts, folder))
    if parts.config.sample is not None and parts.tokenizer is not None and sample.causal(parts.module):
        _told(progress, lambda: progress.note(_sample(parts)))
    return done


def _told(progress: Progress, make: Callable[[], None]) -> bool:
    """Whether it could be made; if not, why is shown."""
    try:
        make()
    except TrainError as error:
        progress.note(str(error))
        return False
    return True


def _draw(folder: Path, progress: Progress) -> None:
    records = metrics.read(folder)
    progress.note(f"\n{curve.sketch(records, min(progress.console.width, SKETCH_WIDTH), SKETCH_HEIGHT)}\n")
    curve.draw(records, folder / CURVE)
    if loads := expert_load.read(folder):
        expert_load.draw(loads, folder / expert_load.PICTURE)


def _export(parts: Assembly, folder: Path) -> None:
    lora = parts.config.model.lora
    base = parts.config.model.path
    write = functools.partial(
        export,
        parts.module,
        folder / MODEL,
        config=parts.model.config,
        tokenizer_folder=tokenizer_source(parts.config, parts.model),
        merge=lora is None or lora.merge,
        source=str(base.resolve()) if base else None,
    )
    if parts.team.processes is None:
        write()
    else:
        gathering.export(parts, write, merge=lora is None or lora.merge)


def _sample(parts: Assembly) -> str:
    """The prompt and what the model writes after it."""
    asked, tokenizer = parts.config.sample, parts.tokenizer
    assert asked is not None and tokenizer is not None
    ids = [int(i) for i in tokenizer.encode(asked.prompt)]
    if tokenizer.bos is not None and (tokenizer.adds_bos or not ids):
        ids.insert(0, tokenizer.bos)
    if not ids:
        raise refusal("the prompt has no tokens", "sample.prompt", "at least one character")
    new = sample.generate(
        parts.module, ids, asked.tokens, asked.temperature, parts.config.train.seed, tokenizer.eos, _together(parts)
    )
    return f"sample\n\n{printable(tokenizer.decode([*ids, *new]))}\n"


def _together(parts: Assembly) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The logits at a place in ids, by all ranks together and the same to the bit on all; None: there is one rank."""
    ranks, module = parts.team.processes, parts.module
    if ranks is None:
        return None
    forward = parts.step.forward(
        lambda ids, place: module(input_ids=ids, use_cache=False).logits[0].index_select(0, place)[0]
    )
    return lambda ids, place: ranks.all_reduce(forward(ids, place), parts.team.mesh.axes, ">", at="sample")


def printable(text: str) -> str:
    """What a model writes may hold signs that steer a terminal: these are shown as U+FFFD."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
