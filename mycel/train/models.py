"""Models in: Hugging Face folders or configurations become modules; how large they are, and which groups an optimiser
takes them in.

    folder (config.json, safetensors) | configuration  ──build──▶  Model  ──train──▶  ──export──▶  folder  (`export.py`)

Nothing is downloaded, unpickled, or run from a folder.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mycel.errors import TrainError
from mycel.train.config_hints import config_hint, indivisible
from mycel.train.cutting import Cuts, Outline, outline
from mycel.train.sources import near
from mycel.train.tokenize import VOCABULARIES
from mycel.train.weights import INDEX, ONE, find, load, one_line, quietly, refusal

ADAPTER = "adapter_config.json"
TASKS = (
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForAudioClassification",
    "AutoModelForCTC",
    "AutoModelForImageTextToText",
    "AutoModelForTokenClassification",
)


@dataclass(frozen=True)
class LoadedModel:
    """A module ready to train, its configuration as it was given, and where both are from."""

    module: nn.Module
    config: Any
    tokenizer_folder: Path | None
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """How many numbers a module holds, tied ones counted once."""

    total: int
    trainable: int
    embedding: int
    total_bytes: int


@dataclass(frozen=True)
class Head:
    """What the last layers are for: the `train.task`, and of a classifier how many classes it tells; None: as the
    model's configuration says."""

    task: str = "auto"
    labels: int | None = None


# -- in --------------------------------------------------------------------------------------------------------------


def build(
    path: Path | None,
    config: Mapping[str, Any] | None,
    *,
    weights: Literal["auto", "load", "scratch"] = "auto",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    cuts: Cuts | None = None,
    head: Head = Head(),
) -> LoadedModel:
    """A folder or a configuration → a module in training mode on the device, with loaded or fresh weights; with `cuts`,
    in parts.  Of a task that the folder's model has no layers for, these are fresh."""
    if (path is None) == (config is None):
        raise refusal(
            "a model is made from a folder or from a configuration, one of them", "model", "model.path or model.config"
        )
    device = torch.device(device)
    with quietly():
        if path is None:
            assert config is not None
            if weights == "load":
                raise refusal(
                    "a configuration has no weights to load",
                    "model.weights",
                    "model.path: a folder with weights, or weights: scratch",
                )
            settings, notes = _from_mapping(config)
            _set_head(settings, head)
            module = _fresh(settings, dtype, device, seed, cuts)
            return _ready(module, settings, None, f"fresh {type(module).__name__}, seed {seed}", notes)
        settings = _from_folder(path)
        before = _set_head(settings, head)
        files = [] if weights == "scratch" else find(path)
        if weights == "load" and not files:
            raise refusal(f"no weights in the folder: {ONE} or {INDEX}", path, "another folder, or weights: scratch")
        tokenizer = path if any((path / name).is_file() for name in VOCABULARIES) else None
        if files:
            module, notes = load(path, files, _model_class(settings), settings, dtype, device, cuts, before, seed)
            return _ready(module, settings, tokenizer, f"weights of {path}", notes)
        module = _fresh(settings, dtype, device, seed, cuts)
        return _ready(module, settings, tokenizer, f"fresh {type(module).__name__} after {path}, seed {seed}", [])


def _ready(module: nn.Module, settings: Any, tokenizer: Path | None, source: str, notes: Iterable[str]) -> LoadedModel:
    """In training mode and without a cache of keys and values; `settings` keep what they said about one."""
    for part in module.modules():
        held: Any = getattr(part, "config", None)
        if getattr(held, "use_cache", False):
            held.use_cache = False
    model: Any = module
    if getattr(model, "loss_type", "") is None:  # what transformers then takes, with a warning at the first step
        model.loss_type = "ForCausalLM"
    return LoadedModel(module.train(), settings, tokenizer, source, tuple(notes))


def _from_folder(path: Path) -> Any:
    """The configuration in a folder."""
    import transformers

    if not path.is_dir():
        raise no_folder(path)
    if (path / ADAPTER).is_file():
        raise no_model(path)
    file = path / "config.json"
    try:
        kind = json.loads(file.read_text())["model_type"]
    except FileNotFoundError:
        raise refusal("no config.json in the model folder", path, folder_hint(path)) from None
    except (OSError, ValueError) as error:
        raise refusal(f"config.json cannot be read: {one_line(error)}", file) from None
    except (KeyError, TypeError):
        raise refusal(
            "config.json does not say its model_type", file, "model_type: llama, or what the model is"
        ) from None
    _check_kind(kind, str(file))
    try:
        settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers' own checks raise many kinds
        hint = config_hint(transformers.CONFIG_MAPPING[kind], json.loads(file.read_text()), error)
        raise refusal(f"config.json is not a valid {kind} configuration: {hint.what}", file, hint.hint) from error
    if getattr(settings, "quantization_config", None) is not None:
        raise refusal("the model is quantised: its weights cannot be trained", file, "the model before quantisation")
    return settings


def not_finite(module: nn.Module) -> str:
    """The first parameter that holds an infinity or a NaN, in words; nothing if none does."""
    for name, p in module.named_parameters():
        bad = int((~torch.isfinite(p.detach())).sum()) if p.is_floating_point() else 0
        if bad:
            return f"{name} is not finite: {bad:,} of its {p.numel():,} numbers are infinite or NaN"
    return ""


def learned_places(module: Any) -> int | None:
    """How many positions the model has parameters for; None: it computes them."""
    most = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    learned = any(isinstance(x, nn.Embedding) and x.num_embeddings in (most, (most or 0) + 2) for x in module.modules())
    return most if learned else None


def too_long(length: int, module: Any, setting: str) -> str | None:
    """What to say of sequences longer than the model was made for; an error where it has no places for them."""
    most = getattr(module.config.get_text_config(), "max_position_embeddings", None)
    if most is None or length <= most:
        return None
    what = f"{setting} is {length}, but the model knows {most} positions"
    if learned_places(module):
        joint = " " if setting.startswith("-") else "="
        raise refusal(what, setting, f"{setting}{joint}{most}")
    return f"{what}: it was made for shorter sequences"


def folder_hint(path: Path) -> str:
    """What to give instead of a folder that holds no model: of a run, what it exported."""
    return str(path / "model") if (path / "config.yaml").is_file() else "a folder in Hugging Face form"


def no_folder(path: Path) -> TrainError:
    """For a model's folder that is not there; a name may be that of a model on the Hub."""
    return refusal(f"no such model folder: {path}", "model.path", of_the_hub(path) or near(path))


def of_the_hub(path: Path) -> str:
    """What to do where a name that is no folder looks like that of a model on the Hub; else nothing."""
    if len(path.parts) != 2 or path.is_absolute() or path.parent.exists():
        return ""
    return f"the folder of `hf download {path} --local-dir FOLDER`: nothing is downloaded here"


def no_model(adapters: Path) -> TrainError:
    """For a folder of LoRA adapters."""
    return refusal(
        "the folder holds LoRA adapters, not a model", adapters / ADAPTER, "the folder of the model they belong to"
    )


def _from_mapping(given: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """A configuration from its settings, and notes on settings it does not know; those that look like a slip are
    errors."""
    import transformers

    values = copy.deepcopy(dict(given))
    kind = values.pop("model_type", None)
    _check_kind(kind, "model.config")
    try:
        settings = transformers.AutoConfig.for_model(kind, **values)
    except Exception as error:  # transformers' own checks raise many kinds
        hint = config_hint(transformers.CONFIG_MAPPING[kind], values, error)
        raise refusal(f"not a valid {kind} configuration: {hint.what}", _config_key(hint.key), hint.hint) from error
    if (uneven := indivisible(settings)) is not None:
        raise refusal(f"not a valid {kind} configuration: {uneven.what}", _config_key(uneven.key), uneven.hint)
    fields = [inspect.signature(kind).parameters for kind in (type(settings), transformers.PreTrainedConfig)]
    known = {*fields[0], *fields[1], *type(settings).attribute_map, *vars(transformers.GenerationConfig())}
    stray = [key for key in values if key not in known and key in settings.to_dict()]
    for key in stray:
        if near := get_close_matches(key, known, 1, cutoff=0.85):
            name = f"{near[0]}, which is given too: leave {key} out" if near[0] in values else near[0]
            raise refusal(f"{type(settings).__name__} knows no {key!r}", _config_key(key), name)
    return settings, [f"{type(settings).__name__} knows no {key!r}: it changes nothing" for key in stray]


def _config_key(key: str) -> str:
    return f"model.config.{key}".rstrip(".")


def _check_kind(kind: Any, where: str) -> None:
    """Refuses a model_type that transformers does not know: its code would have to come from elsewhere."""
    import transformers

    known = list(transformers.CONFIG_MAPPING)
    if kind not in known:
        near = ", ".join(get_close_matches(str(kind), known, 3)) or "llama, gpt2, qwen3, …"
        what = (
            "no model_type" if kind is None else f"transformers {transformers.__version__} knows no model_type {kind!r}"
        )
        raise refusal(what, where, near)


def _set_head(settings: Any, head: Head) -> tuple[Any, int]:
    """Make the configuration one of a task; the class of the model that it was of before, and how many labels that
    had."""
    import transformers

    before = settings.num_labels
    named = next((kind for n in settings.architectures or () if (kind := getattr(transformers, n, None))), None)
    tells_classes = named is not None and named.__name__.endswith("Classification")
    if head.task in ("classify", "reward") and not tells_classes:
        maps: tuple[Any, ...] = (
            transformers.AutoModelForSequenceClassification,
            transformers.AutoModelForImageClassification,
        )
        kinds = [kind for each in maps if (kind := each._model_mapping.get(type(settings), None)) is not None]
        if kinds:
            settings.architectures = [kinds[0].__name__]
            settings.num_labels = 1 if head.task == "reward" else before
    if head.labels is not None:
        settings.num_labels = head.labels
    if head.task in ("classify", "reward") and getattr(settings, "pad_token_id", None) is None:
        ends = getattr(settings, "eos_token_id", None)  # what language models are published with
        settings.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return named, before


def _model_class(settings: Any) -> Any:
    """The class the configuration names, else the one for its task: always one that returns a loss for labels."""
    import transformers

    named = [getattr(transformers, name, None) for name in settings.architectures or ()]
    tasks = list(TASKS)
    # families of encoders also have a causal class, which is not what their configuration alone means
    if not getattr(settings, "is_decoder", False):
        tasks.insert(0, "AutoModelForMaskedLM")
    if settings.is_encoder_decoder:
        tasks.insert(0, "AutoModelForSeq2SeqLM")
    for task in tasks:
        mapped = getattr(transformers, task)._model_mapping.get(type(settings), None)
        named.extend(mapped if isinstance(mapped, tuple) else [mapped])
    for kind in named:
        if (
            inspect.isclass(kind)
            and issubclass(kind, transformers.PreTrainedModel)
            and "labels" in inspect.signature(kind.forward).parameters
        ):
            return kind
    raise refusal(
        f"no model of type {settings.model_type!r} returns a loss",
        "model",
        "architectures: a class of transformers that takes labels",
    )


def _made(settings: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A module by its configuration, initialised as transformers does (on the meta device: not at all)."""
    kind = _model_class(settings)
    try:
        with device:
            return kind._from_config(copy.deepcopy(settings), dtype=dtype)
    except Exception as error:  # a model's constructor raises what it likes
        if "padding_idx" in str(error).lower():  # often a default, made for the vocabulary of the published model
            what = (
                f"pad_token_id is {settings.pad_token_id}, but the model has "
                f"{getattr(settings.get_text_config(), 'vocab_size', 'fewer')} ids"
            )
            raise refusal(what, "model.config.pad_token_id", "pad_token_id: null, or one of the ids") from error
        hint = config_hint(type(settings), settings.to_diff_dict(), error)
        folder = settings.name_or_path
        where = Path(folder) / "config.json" if folder else _config_key(hint.key)
        raise refusal(f"{kind.__name__} cannot be made by this configuration: {hint.what}", where, hint.hint) from error


def outline_of(
    path: Path | None,
    config: Mapping[str, Any] | None,
    dtype: torch.dtype,
    head: Head = Head(),
) -> Outline:
    """The same module without data."""
    with quietly():
        settings = _from_folder(path) if path is not None else _from_mapping(config or {})[0]
        _set_head(settings, head)
        return outline(lambda: _made(settings, dtype, torch.device("meta")))


def _fresh(settings: Any, dtype: torch.dtype, device: torch.device, seed: int, cuts: Cuts | None = None) -> Any:
    """A module with fresh weights, made on the device, the same for the same seed; torch's own random state is left
    alone."""
    if cuts is not None:
        return cuts.built(lambda: _fresh(settings, dtype, device, seed))
    gpus = [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        return _made(settings, dtype, device)


# -- sizes -----------------------------------------------------------------------------------------------------------


def count(module: nn.Module) -> Sizes:
    """How many parameters, how many of them train, how many are lookup tables only, and their bytes."""
    parameters = list(module.parameters())
    total = sum(p.numel() for p in parameters)
    return Sizes(
        total=total,
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
        embedding=total - sum(p.numel() for _, p in _multiplied(module)),
        total_bytes=sum(p.numel() * p.element_size() for p in parameters),
    )


def flops_per_token(module_or_config: Any, length: int) -> float:
    """Floating-point operations of one training step for one token of a sequence: what MFU counts.

        Σ weights (2 forward + 2 backward + 2 if trained)  +  Σ layers 12 · heads · head size · keys

    Weights: all but lookup tables (a tied table is multiplied as the output layer, so it counts); of experts, the share
    a token visits.  Keys: half the sequence under a causal mask, all of it otherwise, at most the window of a layer
    that has one.  Recomputation is not counted.
    """
    module = (
        module_or_config
        if isinstance(module_or_config, nn.Module)
        else _made(module_or_config, torch.float32, torch.device("meta"))
    )
    whole: Any = module.config
    config = whole.get_text_config()
    experts = next(
        (n for key in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(config, key, None))), 1
    )
    share = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    products = sum(
        (6 if p.requires_grad else 4) * p.numel() * (share if ".experts." in name else 1)
        for name, p in _multiplied(module)
    )
    heads = getattr(config, "num_attention_heads", 0)
    width = (
        heads * (getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads)
        if heads
        else 0
    )
    can: Any = getattr(module, "can_generate", bool)
    keys = length / 2 if can() else length
    layers = getattr(config, "num_hidden_layers", 0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    seen = sum(
        min(keys, config.sliding_window or keys) if kind == "sliding_attention" else keys
        for kind in kinds
        if "linear" not in kind
    )
    if whole.is_encoder_decoder:
        # an encoder sees all, a decoder half of itself and all of the encoder
        decoders = getattr(config, "num_decoder_layers", None) or getattr(config, "decoder_layers", None) or layers
        seen = length * layers + 1.5 * length * decoders
    return products + 12 * width * seen


def _multiplied(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that more than lookup tables use, each once."""
    seen = set()
    for prefix, part in module.named_modules():
        for name, parameter in part.named_parameters(prefix, recurse=False):
            if not isinstance(part, nn.Embedding) and id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimiser: trainable parameters, each once; decay on matrices (embeddings too), none on biases,
    norms and other vectors."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    decayed = [p for name, p in named if p.ndim >= 2 and not name.endswith("bias")]
    plain = [p for name, p in named if p.ndim < 2 or name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def hidden_matrices(module: nn.Module) -> dict[int, nn.Parameter]:
    """By id, the trained matrices between embeddings and output layer: those that Muon is meant for."""
    outer = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    ask: Any = getattr(module, "get_output_embeddings", lambda: None)
    head = ask()
    apart = {id(p) for part in [*outer, *([head] if head is not None else [])] for p in part.parameters()}
    return {id(p): p for p in module.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in apart}
