"""From a configuration to everything a run needs; nothing is written but cached tokens.

Config ──▶ device ──▶ tokenizer, data ──▶ model ──▶ adapters ──▶ optimiser ──▶ step
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mycel.errors import TrainError
from mycel.ir import Mesh
from mycel.plan import STAGE_AXIS
from mycel.several_optimizers import SeveralOptimizers
from mycel.sizes import counted
from mycel.step import Step, train_step
from mycel.train import config as settings
from mycel.train import device as devices
from mycel.train import lora, models, sample
from mycel.train.blend import Blend, BlendOrder, blended
from mycel.train.cutting import Cuts
from mycel.train.data import Data, Names, check_vocab, prepare
from mycel.train.documents import FIELDS
from mycel.train.models import LoadedModel
from mycel.train.order import Order
from mycel.train.rank_batch import outline, rank_batch
from mycel.train.ranks import Team
from mycel.train.stream import Stream, StreamOrder, streamed
from mycel.train.tasks import LABELLED_TASKS, head_of, task_data, task_loss, with_reference
from mycel.train.tokenize import VOCABULARIES, Tokenizer, load_tokenizer
from mycel.train.waiting import Waiting
from mycel.train.weights import one_line
from mycel.train.widths import Widths


@dataclass(frozen=True)
class Assembly:
    """What a run is made of; `notes` are what its makers have to say, besides those of the model."""

    config: settings.Config
    device: torch.device
    tokenizer: Tokenizer | None
    data: Data
    model: LoadedModel
    optimizer: torch.optim.Optimizer
    step: Step
    vocab: int
    notes: tuple[str, ...]
    team: Team
    outline: nn.Module  # the model with its whole shapes: itself, or one without data
    loss: Callable[..., Any] | None = None  # of a batch, where it is not what the model returns

    @property
    def module(self) -> nn.Module:
        return self.model.module

    @property
    def rows(self) -> int:
        """Sequences in a step, on all ranks together: micro-batch x accumulate."""
        return self.config.train.batch * self.config.train.accumulate

    @property
    def tokens(self) -> int:
        """Tokens in a step, padding counted; of images, these."""
        return self.rows * int(self.data.train.each[1])

    def whole(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """All of a parameter or buffer; where ranks hold it in parts, all of them call this."""
        held = self.step.parts
        return x.detach() if held is None else held.whole_of(name, x)

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may be asked for its state, of which this rank holds parts."""
        held = self.step.parts
        return held.opened() if held is not None else contextlib.nullcontext()

    @functools.cached_property
    def widths(self) -> Widths:
        """How wide batches are."""
        return Widths.of(self.data.train, self.config.data.buckets)

    def local_step(self) -> Callable[..., torch.Tensor]:
        """The step, called with this rank's part of a batch; compiled, once this is called."""
        return self.widths.local_step(self.step, self.rows)

    def width_share(self, step: int) -> float:
        """Of the longest rows there are, how wide those of a step are."""
        return getattr(self._rows_of(step), "width", 1) / (self.data.train.length if self.widths.sizes else 1)

    def _rows_of(self, step: int) -> Any:
        """The training data, as wide as a step's batch needs it."""
        if not self.widths.sizes:
            return self.data.train
        return self.widths.at(order_of(self.data.train, self.config).indices(step, self.rows))

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """This rank's part of what step `step`, counted from 0, learns from, on its way to the device; nothing else is
        read."""
        order = order_of(self.data.train, self.config)
        split = self._rows_of(step)
        host = rank_batch(self.step, split, self.rows, lambda rows: order.indices(step, self.rows, rows))
        if self.device.type != "cuda":
            return host
        return {name: x.pin_memory().to(self.device, non_blocking=True) for name, x in host.items()}


def assemble(config: settings.Config, waiting: Waiting, team: Team | None = None) -> Assembly:
    """All parts of a run, each checked against the others; of the model, this rank's part."""
    team = team or Team(Mesh())
    device = team.processes.device if team.processes else devices.choose(config.train.device)
    devices.seed_all(config.train.seed)
    tokenizer = tokenizer_of(config)
    labelled = config.train.task in LABELLED_TASKS
    data = None if labelled else _data(config, tokenizer, waiting.say)
    waiting.say("making the model") if config.model.path is None else waiting.say("loading the model")
    owners, cuts = _cuts(config, team, data, device)
    model = models.build(
        config.model.path,
        config.model.config,
        weights=config.model.weights,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        seed=config.train.seed,
        cuts=cuts,
        head=head_of(config),
    )
    notes: list[str] = []
    if data is None:
        data = task_data(config, tokenizer, model.module, model.config)
    task_notes, vocab = [], _check_tokens(config, data, tokenizer, model.module, notes)
    if vocab and (note := models.too_long(config.data.length, model.module, "data.length")):
        notes.append(note)
    if not labelled:
        task_notes = [*_odd(config, tokenizer, model.module), *_other_task(config, data)]
    notes += task_notes
    loss = task_loss(config.train)
    adapt(config, model.module)
    if cuts is not None:
        cuts.cut(model.module)  # what was added
    optimizer = make_optimizer(config.optimizer, model.module)
    step = _step(config, team, model.module, optimizer, loss)
    if cuts is not None and step.parts is not None:
        step.parts.meet(team.processes)
        step.parts.adopt(cuts.shapes, cuts.layouts, owners)
        notes += cuts.notes
    whole = cuts.outline if cuts else model.module
    if config.train.task == "dpo":
        waiting.say("likelihoods under the model as it is")
        data = with_reference(data, step, config.train.batch)
    return Assembly(config, device, tokenizer, data, model, optimizer, step, vocab, tuple(notes), team, whole, loss)


def _step(
    config: settings.Config,
    team: Team,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any] | None = None,
) -> Step:
    step = train_step(
        module,
        optimizer,
        loss,
        mesh=team.mesh if team.mesh.axes else None,
        plan=team.plan or "auto",
        precision=config.train.precision,
        accumulate=config.train.accumulate,
        clip_norm=config.train.clip_norm,
        memory=config.train.memory,
        compile=config.train.compile,
        expert_load=True,
    )
    step.corrections = team.corrections
    return step


def _cuts(
    config: settings.Config, team: Team, data: Data | None, device: torch.device
) -> tuple[dict[str, tuple[int, ...]], Cuts | None]:
    """How the model is cut for this rank, None: it is the only one; and where ranks run several programs (stages of a
    pipeline, sub-models on meshes of their own), the places that hold a tensor.  Both follow from the model without
    data; of tasks whose batches are made with the model, a rank makes all of it and lets go of what others hold."""
    if team.processes is None or team.plan is None:
        return {}, None
    dtype = getattr(torch, config.model.dtype)
    without_data = models.outline_of(config.model.path, config.model.config, dtype, head_of(config))
    adapt(config, without_data.module)
    owners: dict[str, tuple[int, ...]] = {}
    several = team.plan.is_pipeline or bool(team.plan.place)
    if several and data is not None and task_loss(config.train) is None:
        step = _step(config, team, without_data.module, make_optimizer(config.optimizer, without_data.module))
        owners = step.stage_owners(device, **outline(data.train, config.train.batch * config.train.accumulate))
    plan, rank, place = team.plan, team.rank, 0
    if plan.place:
        place = plan.place_at(rank)
        plan, rank = plan.at_place(place), plan.places[place].ranks.index(rank)
    elif owners:
        place = plan.mesh.index(rank, (STAGE_AXIS,))
    parameters = dict(without_data.module.named_parameters(remove_duplicate=False))
    foreign = [name for name, places in owners.items() if place not in places and name in parameters]
    return owners, Cuts(without_data, plan, plan.mesh, rank, foreign)


def adapt(config: settings.Config, module: nn.Module) -> None:
    if adding := config.model.lora:
        lora.add(module, adding.rank, adding.alpha, adding.dropout, adding.targets, seed=config.train.seed)


def tokenizer_of(config: settings.Config) -> Tokenizer | None:
    """The one that is named, or the model folder's; arrays of tokens need none."""
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    folder = config.model.path
    if folder and (folder / models.ADAPTER).is_file():
        raise models.no_model(folder)
    if folder and not folder.is_dir():
        raise models.no_folder(folder)
    if folder and not (folder / "config.json").is_file():
        raise TrainError(
            f"no model in {folder}: it has no config.json\n  at        model.path\n"
            f"  try       {models.folder_hint(folder)}, or leave model.path out"
        )
    return load_tokenizer(folder) if folder and any((folder / name).is_file() for name in VOCABULARIES) else None


def _data(config: settings.Config, tokenizer: Tokenizer | None, progress: Callable[[str, int, int], None]) -> Data:
    data = config.data
    if data.stream:
        assert data.validation is not None
        return streamed(
            data.train,
            data.validation,
            format=data.format,
            fields={**FIELDS, **data.fields.model_dump()},
            tokenizer=tokenizer,
            length=data.length,
            buffer=data.shuffle_buffer,
            seed=config.train.seed,
            cache=data.cache_folder,
            progress=progress,
        )
    if data.weights is None:
        return _tokens(config, tokenizer, progress, data.train)
    named = data.train if isinstance(data.train, tuple) else (data.train,)
    if len(named) != len(data.weights):
        raise TrainError(
            f"data.weights has {counted(len(data.weights), 'number')}, data.train {counted(len(named), 'source')}\n"
            "  at        data.weights\n  try       one number for each entry of data.train"
        )
    parts = [_tokens(config, tokenizer, progress, name) for name in named]
    return blended(parts, named, data.weights, data.validation is not None)


def order_of(split: Any, config: settings.Config) -> Order | BlendOrder | StreamOrder:
    """In which order a run sees its sequences."""
    if isinstance(split, Stream):
        return StreamOrder()
    if isinstance(split, Blend) and config.data.weights is not None:
        return BlendOrder(split.counts, config.data.weights, config.train.seed)
    return Order(split.count, config.train.seed)


def _tokens(
    config: settings.Config, tokenizer: Tokenizer | None, progress: Callable[[str, int, int], None], sources: Names
) -> Data:
    data = config.data
    return prepare(
        sources,
        validation=data.validation,
        split=data.split,
        format=data.format,
        fields=data.fields.model_dump(),
        tokenizer=tokenizer,
        length=data.length,
        pack=data.pack,
        cache=data.cache_folder,
        seed=config.train.seed,
        progress=progress,
    )


def _other_task(config: settings.Config, data: Data) -> list[str]:
    """Data that is not of the task that was said."""
    task, prompts = config.train.task, any(store.has_quiet for store in data.stores)
    if task == "sft" and not prompts:
        return [
            "train.task is sft, but the data has no prompts: every token carries loss\n  try       train.task=pretrain"
        ]
    if task == "pretrain" and prompts:
        return ["train.task is pretrain, but the data has prompts, which carry no loss\n  try       train.task=sft"]
    return []


def _check_tokens(
    config: settings.Config, data: Data, tokenizer: Tokenizer | None, module: Any, notes: list[str]
) -> int:
    """How many ids the model has (0: it takes images); refuses a model without, ids that it does not have, and a
    tokenizer that could give such."""
    classifies = config.train.task in ("classify", "reward")
    if classifies and "pixel_values" in inspect.signature(module.forward).parameters:
        return 0
    if "input_ids" not in inspect.signature(module.forward).parameters:
        raise TrainError(f"{type(module).__name__} takes no tokens\n  at        model\n  try       a language model")
    if type(module).__name__.endswith("Classification") and not classifies:
        raise TrainError(
            f"{type(module).__name__} predicts classes, not tokens\n  at        model\n"
            "  try       model.config.architectures=[a language model], or train.task=classify"
        )
    vocab = int(module.get_input_embeddings().num_embeddings)
    beyond = tokenizer.vocab - vocab if tokenizer else 0
    if tokenizer and beyond > 0 and config.data.tokenizer is not None:
        raise TrainError(
            f"the tokenizer does not belong to the model: it has {tokenizer.vocab} ids, the model {vocab}\n"
            f"  at        {config.data.tokenizer}\n"
            "  try       the tokenizer that belongs to the model, or a model with a larger vocab_size"
        )
    check_vocab(data, vocab)
    if beyond > 0:  # some models are published so: the ids beyond are of tokens that text does not have
        notes.append(f"the model's own tokenizer has {beyond} ids more than the model; none of them is in the data")
    return vocab


def _odd(config: settings.Config, tokenizer: Tokenizer | None, module: Any) -> list[str]:
    """What can be trained, but hardly as it was meant."""
    kind, warnings = type(module).__name__, []
    if not sample.causal(module):
        warnings.append(
            f"{kind} is no causal language model: it sees the tokens that it has to predict, and learns to copy them"
        )
    if tokenizer and tokenizer.eos is None:
        warnings.append(
            "the tokenizer names no end of text: no document is ended, and the model does not learn to stop\n"
            "  try       an eos_token for it"
        )
    elif tokenizer and sample.causal(module) and tokenizer.eos not in (ends := sample.ends(module)):
        what = (
            f"the tokenizer ends a text with id {tokenizer.eos}, the model's eos_token_id is "
            f"{', '.join(map(str, ends)) or None}"
        )
        where = (
            f"eos_token_id in {config.model.path / 'config.json'}"
            if config.model.path
            else f"model.config.eos_token_id={tokenizer.eos}"
        )
        warnings.append(f"{what}: what it writes will not end where it should\n  try       {where}")
    ids = getattr(module.config.get_text_config(), "vocab_size", 0)
    if tokenizer and config.model.path is None and sample.causal(module) and ids >= 2 * tokenizer.vocab:
        warnings.append(
            f"the model has {ids:,} ids, the tokenizer {tokenizer.vocab:,}: what it writes of the others has no text\n"
            f"  try       model.config.vocab_size={tokenizer.vocab}"
        )
    if (adding := config.model.lora) and not adding.merge and config.model.path is None and config.export:
        warnings.append(
            "the adapters are exported without the weights they belong to, which are fresh\n"
            "  try       model.lora.merge=true"
        )
    return warnings


def make_optimizer(chosen: settings.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """torch's own, with weight decay where it belongs."""
    groups = models.parameter_groups(module, chosen.weight_decay)
    if chosen.name != "muon":
        return _made(chosen, groups, {**chosen.passed, **(chosen.options or {})})
    inner = models.hidden_matrices(module)
    rest = [{**g, "params": [p for p in g["params"] if id(p) not in inner]} for g in groups]
    others = torch.optim.AdamW([g for g in rest if g["params"]], lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)
    if not inner:
        return others
    # at rates of AdamW's size, so that one schedule serves both
    options = {"adjust_lr_fn": "match_rms_adamw", **(chosen.options or {})}
    muon = _made(chosen, [{"params": [*inner.values()], "weight_decay": chosen.weight_decay}], options)
    return SeveralOptimizers([muon, others])


def _made(chosen: settings.Optimizer, groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    """One of torch.optim, with options that it knows."""
    kinds = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    kind = kinds[chosen.name]
    known = [name for name in inspect.signature(kind).parameters if name not in ("params", "lr", "weight_decay")]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TrainError(
            f"torch.optim.{kind.__name__} has no option {unknown[0]!r}\n  at        optimizer.options.{unknown[0]}\n"
            f"  try       one of {', '.join(name for name in known if name not in chosen.passed)}"
        )
    try:
        return kind(groups, lr=chosen.lr, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        what = f"torch.optim.{kind.__name__} cannot be made so: {one_line(error)}"
        raise TrainError(f"{what}\n  at        optimizer.options\n  try       its documentation") from error


def tokenizer_source(config: settings.Config, model: LoadedModel) -> Any:
    """What an exported model takes its tokenizer from: a folder, `bytes`, or nothing."""
    named = config.data.tokenizer
    return Path(named) if named not in (None, "bytes") else named or model.tokenizer_folder
