"""One YAML file says everything about a training run; this file says what it may say.

    file.yaml  +  a.b=c arguments  ->  Config (frozen, checked)  ->  dump: YAML that loads back equal

Each section is one class; its fields' defaults and descriptions are what `mycel config` prints.  With no model named,
the embedded small one is used, with the settings that suit it beneath whatever else is given.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from mycel.train import forms
from mycel.train.sections import Conflict, Section, checked, lines, override
from mycel.train.written import WrittenSettings, inline, read_file


class Lora(Section):
    """small additions are trained; null: all parameters"""

    rank: forms.Count = Field(default=8, description="inner size of the additions")
    alpha: forms.Positive = Field(default=16.0, description="they are scaled by alpha / rank")
    dropout: forms.Share = Field(default=0.0, description="on their input")
    targets: forms.Names = Field(default=("q_proj", "v_proj"), description="linear layers: end of the name, or a regex")
    merge: forms.Switch = Field(default=True, description="into the weights on export; false: adapter files")


class ModelConfig(Section):
    """what is trained"""

    path: forms.Folder | None = Field(default=None, description="folder in Hugging Face form")
    config: forms.Free | None = Field(default=None, description="or its config.json; both null: a small Llama")
    weights: Literal["auto", "load", "scratch"] = Field(default="auto", description="auto: if the folder has them")
    labels: forms.Count | None = Field(default=None, description="of a classifier; null: as its configuration says")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="of parameters")
    lora: Lora | None = Field(default=None, description="{rank: 8, …}: train small additions, not all")

    def conflicts(self) -> Iterator[Conflict]:
        if self.path and self.config is not None:
            yield "model.path and model.config are both given: the model has two sources", "null for one of them"
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            yield "model.config has no model_type: it does not say which model it is", "model_type: llama"
        if self.weights == "load" and not self.path:
            yield "model.weights is load, but model.path is null: there is nothing to load", "model.path=FOLDER"


class Fields(Section):
    """names of the fields of records"""

    text: forms.Text = Field(default="text", description="a whole document")
    prompt: forms.Text = Field(default="prompt", description="without loss")
    response: forms.Text = Field(default="response", description="with loss")
    messages: forms.Text = Field(default="messages", description="a chat")
    label: forms.Text = Field(default="label", description="the class of a text")
    chosen: forms.Text = Field(default="chosen", description="of a pair, the preferred text")
    rejected: forms.Text = Field(default="rejected", description="of a pair, the other")


class DataConfig(Section):
    """what it learns from"""

    train: forms.Sources = Field(default="stdlib", description="stdlib: Python's own sources; path, glob, or list")
    validation: forms.Sources | None = Field(
        default=None, description="the same; null: a part of the training data", json_schema_extra={"share": "split"}
    )
    split: forms.Part = Field(default=0.01, description="how large a part")
    weights: forms.Weights | None = Field(default=None, description="shares of data.train's; null: all as one")
    format: Literal["auto", "text", "jsonl", "json", "csv", "parquet", "arrow", "tokens"] = Field(
        default="auto", description="by suffix"
    )
    fields: Fields = Fields()
    tokenizer: forms.Source | None = Field(default=None, description="folder, or bytes; null: the model folder's")
    length: forms.Length = Field(default=256, description="tokens in a sequence")
    pack: forms.Switch = Field(default=True, description="documents in a row; false: one each, padded")
    buckets: forms.Lengths | None = Field(default=None, description="of padded rows; null: all of data.length")
    cache: forms.Folder | None = Field(default=None, description="of tokens; null: in the user's cache folder")
    stream: forms.Switch = Field(default=False, description="documents become tokens as they come")
    shuffle_buffer: forms.Whole = Field(default=1024, description="sequences a stream is mixed among; 0: none")

    def conflicts(self) -> Iterator[Conflict]:
        if self.format not in ("auto", "text") and self.uses_stdlib:
            yield f"data.format is {self.format}, but data.train is stdlib, which is text", "data.format=auto"
        if self.stream and self.validation is None:
            what = "data.stream is true, but data.validation is null: nothing can be kept of what is not read yet"
            yield what, "data.validation=FILE"
        if self.stream and (not self.pack or self.weights is not None):
            what = "data.stream is true, and its documents come in a row, one source after the other"
            yield what, "data.pack=true and data.weights=null"

    @property
    def uses_stdlib(self) -> bool:
        """Whether Python's own sources are among the training or validation data."""
        return any(
            each == "stdlib" or "stdlib" in (each if isinstance(each, tuple) else ())
            for each in (self.train, self.validation)
        )

    @property
    def cache_folder(self) -> Path:
        """Where tokens are cached: as said, or `mycel/tokens` in the user's cache folder."""
        xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return self.cache or (xdg if xdg.is_absolute() else Path.home() / ".cache") / "mycel" / "tokens"


MOMENTS = ("adamw", "adam", "adamax", "nadam", "radam")  # take betas and eps


class Optimizer(Section):
    """how parameters move"""

    name: Literal[
        "adamw", "adam", "sgd", "adadelta", "adafactor", "adagrad", "adamax", "asgd", "nadam", "radam", "rmsprop",
        "rprop", "muon",
    ] = Field(default="adamw", description="any of torch.optim's")  # fmt: skip
    lr: forms.Positive = Field(default=3e-4, description="learning rate at its highest")
    betas: forms.Betas = Field(default=(0.9, 0.95), description="of adamw, adam, adamax, nadam, radam")
    eps: forms.Amount = Field(default=1e-8, description="of the same")
    momentum: forms.Share = Field(default=0.9, description="of sgd")
    nesterov: forms.Switch = Field(default=False, description="of sgd")
    weight_decay: forms.Amount = Field(default=0.1, description="on matrices, not on biases and norms")
    options: forms.Options | None = Field(default=None, description="{amsgrad: true}: others of torch's class")

    def conflicts(self) -> Iterator[Conflict]:
        if self.nesterov and self.name != "sgd":
            yield f"optimizer.nesterov is true, but optimizer.name is {self.name}", "optimizer.name=sgd"
        if self.nesterov and not self.momentum:
            yield "optimizer.nesterov is true, but optimizer.momentum is 0", "optimizer.momentum=0.9"
        for twice in {*(self.options or ())} & {*self.passed, "lr", "weight_decay"}:
            what = f"optimizer.options says {twice}, which is a setting of its own"
            yield what, f"optimizer.{twice}={inline((self.options or {})[twice])}"

    @property
    def passed(self) -> dict[str, Any]:
        """What its class is given besides lr, weight_decay and options."""
        if self.name == "sgd":
            return {"momentum": self.momentum, "nesterov": self.nesterov}
        moments = self.name in MOMENTS
        return {"betas": self.betas, "eps": self.eps} if moments else {}


class Schedule(Section):
    """how the learning rate changes"""

    kind: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: forms.Warmup = Field(default=0.1, description="steps, or a fraction of them below 1")
    min_lr: forms.Portion = Field(default=0.1, description="at the end, as a fraction of lr")


class Train(Section):
    """the steps"""

    steps: forms.Count = Field(default=500, description="in all")
    batch: forms.Count = Field(default=16, description="sequences in a micro-batch, on all ranks together")
    accumulate: forms.Count = Field(default=1, description="micro-batches in a step")
    clip_norm: forms.Positive | None = Field(default=1.0, description="of the whole gradient; null: no clipping")
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = Field(default="fp32", description="of the computation")
    memory: forms.Size | None = Field(default=None, description="limit such as 20GiB; null: what there is")
    compile: forms.Compile = Field(default="auto", description="auto, true or false")
    seed: forms.Whole = Field(default=0, description="of weights, order of data, dropout")
    device: forms.Device = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    task: Literal["auto", "pretrain", "sft", "dpo", "reward", "classify"] = Field(
        default="auto", description="auto: the next token"
    )
    beta: forms.Positive = Field(default=0.1, description="of dpo: how much it stays what it was")


class Parallel(Section):
    """the ranks, and how a step is spread over them"""

    mesh: forms.Axes | None = Field(default=None, description="{dp: 2, tp: 2}; null: as the plan has it")
    plan: forms.Plan | None = Field(default=None, description="zero3+tp, a .yaml file, a plan, auto; null: auto")
    rebalance: forms.Whole = Field(default=0, description="steps: experts change ranks by their load; 0: never")

    @property
    def ranks(self) -> int | None:
        """How many the mesh has; None: as many as run."""
        return math.prod(self.mesh.values()) if self.mesh is not None else None

    def axes(self, world: int) -> dict[str, int]:
        """The mesh for so many processes."""
        return dict(self.mesh) if self.mesh is not None else {"dp": world} if world > 1 else {}


class Evaluate(Section):
    """loss on the validation data"""

    every: forms.Whole = Field(default=100, description="steps; 0: never")
    batches: forms.Count = Field(default=20, description="of validation data")


class Checkpoint(Section):
    """states to resume from"""

    every: forms.Whole = Field(default=200, description="steps; 0: only at the end")
    keep: forms.Count = Field(default=2, description="the last ones; older ones are deleted")
    best: forms.Switch = Field(default=True, description="and the one with the lowest validation loss")
    asynchronous: forms.Switch = Field(default=True, description="written while training goes on")


class LogConfig(Section):
    """what is recorded"""

    every: forms.Count = Field(default=10, description="steps")
    tensorboard: forms.Switch = Field(default=True, description="write event files")
    curve: forms.Switch = Field(default=True, description="draw the loss curve at the end")


class Sample(Section):
    """text it writes at the end; null: none"""

    prompt: forms.Text = Field(default="def ", description="what it continues")
    tokens: forms.Count = Field(default=200, description="how many it writes")
    temperature: forms.Amount = Field(default=0.8, description="0: always the likeliest token")


EMBEDDED: dict[str, dict[str, Any]] = {
    "model": {
        "config": {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 258,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
    },
    "data": {"tokenizer": "bytes", "length": 256},
    "optimizer": {"lr": 2e-3},
    "schedule": {"warmup": 0.1},
    "train": {"steps": 600, "batch": 8},
}


class Config(Section):
    """Everything about a training run."""

    reads_data: ClassVar[bool] = True

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    train: Train = Train()
    parallel: Parallel = Parallel()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    log: LogConfig = LogConfig()
    sample: Sample | None = Field(default=Sample(), description="{prompt: …}: text it writes at the end")
    trace: forms.Whole = Field(default=0, description="n: trace.json of the n-th step after the first")
    run: forms.Folder | None = Field(default=None, description="results; null: runs/<name>-<date>-<time>")
    export: forms.Switch = Field(default=True, description="write a Hugging Face folder at the end")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Config:
        """Nested mappings, as the YAML file would have them -> the checked configuration."""
        return checked(cls, WrittenSettings(dict(given)))

    @model_validator(mode="before")
    @classmethod
    def _embedded(cls, given: Any) -> Any:
        """No model is named => the embedded one, and what suits it wherever nothing else is said."""
        if not isinstance(given, Mapping):
            return given
        given = {
            key: value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
            for key, value in given.items()
        }
        own = {name: {} if given.get(name) is None else given[name] for name in EMBEDDED}
        if (
            not isinstance(own["model"], Mapping)
            or own["model"].get("path") is not None
            or own["model"].get("config") is not None
        ):
            return given
        for name, values in own.items():
            if isinstance(values, Mapping):
                explicit = {
                    key: value
                    for key, value in values.items()
                    if value is not None or key not in ("config", "tokenizer")
                }
                given[name] = {**EMBEDDED[name], **explicit}
        return given

    def conflicts(self) -> Iterator[Conflict]:
        if self.schedule.warmup >= self.train.steps:
            what = f"schedule.warmup is {self.schedule.warmup} steps, but train.steps is {self.train.steps}"
            yield what, "schedule.warmup=0.1, a tenth of the steps"
        if (self.model.dtype, self.train.precision) in (
            ("float16", "bf16"),
            ("float16", "fp8"),
            ("bfloat16", "fp16"),
        ):
            what = f"model.dtype is {self.model.dtype}, but train.precision is {self.train.precision}"
            yield what, "model.dtype=float32"
        if self.parallel.rebalance and self.model.lora is not None:
            what = "parallel.rebalance moves experts, but with model.lora frozen weights are not saved"
            yield what, "parallel.rebalance=0"
        if (
            self.reads_data
            and self.model.config
            and not self.data.tokenizer
            and (self.data.format not in ("auto", "tokens") or self.data.uses_stdlib)
        ):
            what = "data.tokenizer is null, and model.config brings none: text cannot become tokens"
            yield what, "data.tokenizer=FOLDER, or bytes"


class PlannedConfig(Config):
    """The same for planning, which reads no data: no text has to become tokens."""

    reads_data = False


def load(path: Path | None, overrides: Sequence[str] = (), kind: type[Config] = Config) -> Config:
    """A YAML file (None: nothing but defaults) and `a.b=c` arguments over it -> the checked configuration."""
    written = read_file(path) if path else WrittenSettings()
    for number, argument in enumerate(overrides):
        override(kind, written, argument, number)
    return checked(kind, written)


class EvaluatedData(Section):
    """what a model is evaluated on"""

    fields: Fields = Fields()


class EvaluateSettings(Section):
    """What `mycel evaluate` can be told of its data."""

    data: EvaluatedData = EvaluatedData()


def named_fields(arguments: Sequence[str]) -> dict[str, str]:
    """`data.fields.text=review` -> {"text": "review"}; fields that are not named are the run's own."""
    written = WrittenSettings()
    for number, argument in enumerate(arguments):
        override(EvaluateSettings, written, argument, number)
    fields = checked(EvaluateSettings, written).data.fields
    return {name: getattr(fields, name) for name in fields.model_fields_set}


def names_model(path: Path | None, overrides: Sequence[str] = ()) -> bool:
    """Whether the model is one's own, not the embedded one."""
    written = read_file(path) if path else WrittenSettings()
    for number, argument in enumerate(overrides):
        override(Config, written, argument, number)
    model = written.values.get("model") or {}
    return isinstance(model, Mapping) and (model.get("path") is not None or model.get("config") is not None)


def is_file(plan: str) -> bool:
    """Whether a plan is the name of a file; else it is one of ready plans."""
    return Path(plan).suffix in (".yaml", ".yml")


def anchored(config: Config) -> Config:
    """The same whichever folder it is used in: paths are absolute, and the run's own folder is left out."""
    here = lambda name: glob.escape(os.getcwd()) if glob.has_magic(name) else os.getcwd()
    whole = lambda name: name if name in ("stdlib", "bytes") else os.path.join(here(name), name)
    sources = lambda named: (
        named if named is None else whole(named) if isinstance(named, str) else tuple(map(whole, named))
    )
    path = lambda given: given and given.absolute()
    data = {
        "train": sources(config.data.train),
        "validation": sources(config.data.validation),
        "tokenizer": sources(config.data.tokenizer),
    }
    plan = config.parallel.plan
    changed = {
        "parallel": config.parallel.model_copy(
            update={"plan": whole(plan) if isinstance(plan, str) and is_file(plan) else plan}
        ),
        "model": config.model.model_copy(update={"path": path(config.model.path)}),
        "data": config.data.model_copy(update={**data, "cache": path(config.data.cache)}),
    }
    return config.model_copy(update={**changed, "run": None})


def dump(config: Config, comments: bool = False) -> str:
    """The whole configuration as YAML that loads back equal; with what each field means, if asked for."""
    return "\n".join(lines(config, "", comments)) + "\n"
