"""The configuration: what is written loads back equal, and whatever is wrong is told at once, with its place and a way out."""

from __future__ import annotations

import json
import os
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mycel.errors import TrainError
from mycel.sizes import parse_bytes
from mycel.train import config as sections
from mycel.train.config import EMBEDDED, Config, dump, load
from mycel.train.sections import Section, find, section_of
from mycel.train.written import Reader, Writer, inline

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def keys_of(section: type[Section] = Config, above: str = "") -> list[str]:
    """Every key of the tree, dotted, sections too."""
    return [
        k for name, f in section.model_fields.items() for k in [above + name, *(keys_of(section_of(f), f"{above}{name}.") if section_of(f) else [])]
    ]


KEYS = keys_of()
LEAVES = [key for key in KEYS if not section_of(find(Config, key.split(".")))]


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """a.b, 3 => {"a": {"b": 3}}"""
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value


def at(config: Config, dotted: str) -> Any:
    value: Any = config
    for key in dotted.split("."):
        value = getattr(value, key)
    return value


def refused(path: Path | None = None, *overrides: str) -> str:
    with pytest.raises(TrainError) as e:
        load(path, overrides)
    assert e.value.__suppress_context__, "the cause is told in words, not as a second traceback"
    return str(e.value)


def told(tmp_path: Path, text: str, *overrides: str) -> str:
    """What a file with this text is refused with, its folder left out."""
    (tmp_path / "run.yaml").write_text(text)
    return refused(tmp_path / "run.yaml", *overrides).replace(f"{tmp_path}{os.sep}", "")


# --- any configuration there is

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
words = st.sampled_from(
    [
        "no",
        "1e-3",
        "0x1F",
        "1_000",
        "~",
        "null",
        "12:30",
        "2024-01-01",
        "- a",
        "a: b",
        "#",
        "*.txt",
        "",
        " x ",
        "<<",
        "=",
        ".inf",
        "é\u2028\x85",
        "x\n\ny",
        "---",
        "? a",
    ]
)
texts = text | words
names = texts.filter(lambda t: t and "\0" not in t)
count = st.integers(1, 2**31 - 1)
positive = st.floats(min_value=1e-300, max_value=1e300)
share = st.floats(0, 1, exclude_max=True)
plain = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
                     lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8)  # fmt: skip
adapters = {"rank": count, "alpha": positive, "dropout": share, "targets": st.lists(texts.filter(bool), min_size=1, max_size=3)}
BY_KEY: dict[str, st.SearchStrategy[Any]] = {
    "model.path": names,
    "model.config": st.dictionaries(texts, plain, max_size=4).map(lambda d: {**d, "model_type": "llama"}),
    "model.lora": st.none() | st.fixed_dictionaries({}, optional=adapters),
    "data.train": names | st.lists(names, min_size=1, max_size=3),
    "data.validation": st.none() | names,
    "data.split": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "data.fields.text": texts,
    "data.tokenizer": names,
    "data.length": st.integers(2, 2**31 - 1),
    "data.cache": names,
    "optimizer.name": st.sampled_from(["adam", "adamw", "sgd"]),
    "optimizer.lr": positive,
    "optimizer.betas": st.lists(share, min_size=2, max_size=2),
    "schedule.warmup": share | st.integers(0, 400),
    "train.steps": st.integers(401, 2**31 - 1),
    "train.clip_norm": st.none() | positive,
    "train.memory": st.sampled_from(["20GiB", "1.5 TB", "17b"]),
    "train.compile": st.sampled_from(["auto", True, False]),
    "train.device": st.sampled_from(["cpu", "cuda:3"]),
    "evaluate.every": st.integers(0, 9),
    "sample": st.none() | st.fixed_dictionaries({"prompt": texts}),
    "run": names,
    "export": st.booleans(),
}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any subset of settings, each right, and right together."""
    keys = draw(st.sets(st.sampled_from(sorted(BY_KEY))))
    if "model.path" in keys and "model.config" in keys:
        keys -= {draw(st.sampled_from(["model.path", "model.config"]))}
    if "model.config" in keys:
        keys |= {"data.tokenizer"}
    if "schedule.warmup" in keys:
        keys |= {"train.steps"}
    tree: dict[str, Any] = {}
    for key in sorted(keys):
        *above, last = key.split(".")
        into = tree
        for part in above:
            into = into.setdefault(part, {})
        into[last] = draw(BY_KEY[key])
    return Config.from_dict(tree)


@quick
@given(configs(), st.booleans())
def test_what_is_dumped_loads_back_equal(tmp_path, config, comments):
    file = tmp_path / "run.yaml"
    file.write_text(dump(config, comments), encoding="utf-8")
    assert load(file) == config
    assert dump(load(file), comments) == dump(config, comments)


@quick
@given(configs())
def test_each_setting_can_be_an_argument(config):
    """The arguments alone make the same configuration as the file."""
    assert (
        load(None, [f"{key}={inline(value)}" for key in LEAVES + ["sample", "model.lora"] if (value := written(config, key)) is not SKIP]) == config
    )


SKIP = object()


def written(config: Config, key: str) -> Any:
    """A leaf as plain values; inner settings of a section that is null do not exist."""
    if key in ("sample", "model.lora"):
        return None if at(config, key) is None else SKIP
    if at(config, key.rpartition(".")[0]) is None if "." in key else False:
        return SKIP
    value = at(config, key)
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


@quick
@given(plain)
def test_yaml_is_read_as_json_is(value):
    """JSON is YAML: both readers agree; and what we write, YAML 1.1 readers understand."""
    loaded = load(None, ["data.tokenizer=bytes", "model.config.model_type=x", f"model.config.v={json.dumps(value)}"]).model.config
    assert loaded["v"] == value
    assert yaml.safe_load(inline(value)) == value


def test_words_of_yaml():
    read = lambda text: at(load(None, ["data.tokenizer=bytes", "model.config.model_type=x", f"model.config.v={text}"]), "model.config")["v"]
    assert [read(t) for t in ("1e-3", "1E3", "-.5", "1_000", "0x10", "0o17", "010", "true", "null", "~", "")] == [
        1e-3,
        1e3,
        -0.5,
        1000,
        16,
        15,
        10,
        True,
        None,
        None,
        None,
    ]
    assert [read(t) for t in ("yes", "no", "on", "12:30", "2024-01-01", "<<", "1__0", "'3'")] == [
        "yes",
        "no",
        "on",
        "12:30",
        "2024-01-01",
        "<<",
        "1__0",
        "3",
    ]
    assert set(Reader.yaml_implicit_resolvers) < set(Writer.yaml_implicit_resolvers)


# --- defaults, layers


def test_no_model_named_is_the_embedded_one():
    config = load(None)
    assert config == Config() == Config.from_dict({}) == Config.from_dict({"model": None, "data": {"tokenizer": None}})
    assert config.model.config == EMBEDDED["model"]["config"] and config.data.tokenizer == "bytes" and config.train.steps == 600
    assert Config.from_dict({"model": {"path": "m"}}).train.steps == 500 and Config.from_dict({"model": {"path": "m"}}).data.tokenizer is None
    assert Config(train=sections.Train(batch=3)).train == sections.Train(steps=600, batch=3), "sections given as objects are layered alike"


@quick
@given(st.sampled_from(["model.dtype=bfloat16", "data.length=64", "optimizer.lr=0.5", "schedule.warmup=7", "train.steps=11", "train.batch=2"]))
def test_what_is_given_wins_over_the_embedded_default(argument):
    key, _, value = argument.partition("=")
    config = load(None, [argument])
    assert inline(at(config, key)) == value
    assert load(None, [argument, f"{key}={inline(at(load(None), key))}"]) == load(None), "the last argument wins, and nothing else was changed"


def test_an_empty_section_has_its_defaults_and_null_switches_off(tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  # steps: 3\nmodel:\ndata: {fields: }\nsample: null\n")
    config = load(tmp_path / "run.yaml")
    assert config.sample is None and config == load(None, ["sample=null"])
    assert load(tmp_path / "run.yaml", ["sample.tokens=5"]).sample == sections.Sample(tokens=5)


def test_a_mapping_goes_into_a_section_and_replaces_a_free_mapping(tmp_path):
    (tmp_path / "run.yaml").write_text("optimizer: {lr: 1, eps: 1}\nmodel: {config: {model_type: a, b: 1}}\ndata: {tokenizer: t}\n")
    config = load(tmp_path / "run.yaml", ["optimizer={eps: 2}", "model.config={model_type: c}"])
    assert (config.optimizer.lr, config.optimizer.eps, config.model.config) == (1, 2, {"model_type": "c"})


@pytest.mark.parametrize("text", ["*.txt", "[ab]*.txt", "def f(x):  # hi", "def ", "2024", "true", "@x", "'", "a: b"])
def test_text_of_an_argument_is_taken_as_it_stands(text):
    assert load(None, [f"sample.prompt={text}", f"data.train={text}"]).sample.prompt == text
    assert load(None, [f"data.train={text}"]).data.train == text


def test_quotes_lists_and_null_in_arguments():
    config = load(None, ["sample.prompt='a b'", "data.train=[a, 'b c']", "run=null", "data.cache=~"])
    assert (config.sample.prompt, config.data.train, config.run, config.data.cache) == ("a b", ("a", "b c"), None, None)


def test_home_folders(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    config = load(None, ["run=~/r", "data.train=[~/a, b~]", "data.tokenizer=~/t"])
    assert (config.run, config.data.train, config.data.tokenizer) == (Path("/home/me/r"), ("/home/me/a", "b~"), "/home/me/t")
    assert config.data.cache_folder == Path("/home/me/.cache/mycel/tokens")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert config.data.cache_folder == Path("/cache/mycel/tokens") and load(None, ["data.cache=c"]).data.cache_folder == Path("c")


def test_nothing_changes_a_configuration():
    with pytest.raises(ValidationError):
        load(None).train.steps = 3


def test_every_setting_is_explained_in_80_columns():
    text = dump(load(None, ["model.lora.rank=4"]), comments=True)
    free = len(EMBEDDED["model"]["config"]) + 1  # its list takes two lines
    explained = [line for line in text.splitlines() if "# " in line]
    assert len(explained) == len(text.splitlines()) - free == len(KEYS)
    assert max(len(line) for line in text.splitlines()) <= 80


# --- sizes


UNITS = {"B": 1, "kB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "gib": 2**30, "TB": 10**12, "TiB": 2**40}


@quick
@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_sizes(number, unit, space):
    assert parse_bytes(f"{number}{space}{unit}") == number * UNITS[unit]
    assert parse_bytes(f"{number}.5{unit}") == number * UNITS[unit] + UNITS[unit] // 2


@pytest.mark.parametrize("text", ["", "20", "GiB", "-1GiB", "1e3MB", "20G", "0GiB", "0.1B", "1,5GB", "٣GB", "nan GB"])
def test_what_is_no_size(text):
    with pytest.raises(TrainError, match="try       20GiB"):
        parse_bytes(text)


# --- what is wrong


@quick
@given(
    st.binary(max_size=60)
    | st.text(st.sampled_from(string.printable + "é\u2028"), max_size=60).map(str.encode)
    | st.sampled_from([b"\xff", b"a: &a [*a]", b"? {a: b}\n: c", b"!!int x: 3", b"train: {steps: !!int x}"])
)
def test_any_file_is_a_configuration_or_refused(tmp_path, content):
    (tmp_path / "run.yaml").write_bytes(content)
    try:
        load(tmp_path / "run.yaml")
    except TrainError as e:
        assert "run.yaml" in str(e)


@quick
@given(st.lists((st.sampled_from(KEYS) | text).flatmap(lambda k: (texts | plain.map(inline)).map(lambda v: f"{k}={v}")) | text, max_size=3))
@example(["=", "a..b=1", ".=", "model.config=&a [*a]", "train.steps.x=3", "optimizer=3", "optimizer.lr=2", "data.train=\ud800", "run=\0"])
def test_any_arguments_are_a_configuration_or_refused(arguments):
    try:
        load(None, arguments)
    except TrainError as e:
        assert "  try       " in str(e)


@quick
@given(plain, st.sampled_from(KEYS))
@example(object(), "train.steps")
@example({1: 2}, "model.config")
@example({"model_type": "x", "dtype": object()}, "model.config")
@example(float("nan"), "optimizer.lr")
@example(True, "train.steps")
@example(b"x", "run")
def test_any_python_value_is_a_setting_or_refused_by_name(value, key):
    try:
        Config.from_dict(nested(key, value))
    except TrainError as e:
        assert key in str(e) and "Input should" not in str(e)


@quick
@given(st.sampled_from(KEYS), st.data())
def test_a_misspelt_key_is_found_and_named(tmp_path, key, data):
    """One letter is missing, doubled or swapped: the place is exact and the right key is suggested."""
    *above, name = key.split(".")
    assume(len(name) > 3)
    i = data.draw(st.integers(0, len(name) - 2))
    wrong = data.draw(
        st.sampled_from([name[:i] + name[i + 1 :], name[:i] + name[i] + name[i:], name[:i] + name[i + 1] + name[i] + name[i + 2 :], name.upper()])
    )
    assume(".".join([*above, wrong]) not in KEYS)
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(above)] + [f"{'  ' * len(above)}{wrong}: 1"]
    message = told(tmp_path, "# first\n" + "\n".join(lines) + "\n")
    assert message.startswith(
        f"unknown key {'.'.join([*above, wrong])}\n  at        run.yaml:{len(lines) + 1}:{2 * len(above) + 1}\n            {wrong}: 1\n"
    )
    assert key in message.split("  try       ")[1].split(" or ")
    by_argument = refused(None, f"{'.'.join([*above, wrong])}=1")
    assert f"  at        argument {'.'.join([*above, wrong])}=1\n" in by_argument and key in by_argument.split("  try       ")[1].split(" or ")


WRONG = [[[]], {"a": {}}, -1, 1.5, "", "certainly not", [1, 2, 3]]


@pytest.mark.parametrize("key", [key for key in LEAVES if key != "model.config"])
def test_a_wrong_value_is_told_with_place_and_form(tmp_path, key):
    """Every setting refuses something, and says then its place, what it found, what it takes; the way out that it names is a right one."""
    *above, name = key.split(".")
    refusals = 0
    for value in WRONG:
        lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(above)] + [f"{'  ' * len(above)}{name}: {inline(value)}"]
        (tmp_path / "run.yaml").write_text("\n".join(lines))
        try:
            load(tmp_path / "run.yaml")
        except TrainError as e:
            shown = json.dumps(value) if isinstance(value, str) else inline(value)
            assert str(e).startswith(f"{key} is {shown}, not ") and f"run.yaml:{len(lines)}:{2 * len(above) + 1}\n" in str(e)
            hint = str(e).split("  try       ")[1].removesuffix(", the default").removeprefix("quotes around it: ")
            Config.from_dict(nested(key, yaml.load(hint, Reader)))
            refusals += 1
    assert refusals


MISTAKES = {
    "lr: 1": "unknown key lr",
    "model: {dtype: half}": "model.dtype is",
    "optimizer: {nesterov: true, momentum: 0}": "optimizer.nesterov is true",
    "train: {steps: 0}": "train.steps is 0",
    "log: {every: !!set {a}}": "log.every has the tag",
    "data: {pack: true, pack: false}": "data.pack is given twice",
    "3: 4": "a key is 3",
}


@quick
@given(st.lists(st.sampled_from(sorted(MISTAKES)), min_size=2, unique=True))
def test_all_mistakes_are_told_in_the_order_of_the_lines(tmp_path, lines):
    message = told(tmp_path, "\n".join(lines), "run={}", "oh=1")
    found = [message.find(f"\n{MISTAKES[line]}") for line in lines] + [message.find("\nunknown key oh")]
    assert message.splitlines()[0].endswith("mistakes in the configuration") and -1 not in found and found == sorted(found)


GOLDEN = {
    "optimizer:\n  learning_rate: 1e-3\n": """\
unknown key optimizer.learning_rate
  at        run.yaml:2:3
            learning_rate: 1e-3
  try       optimizer.lr""",
    "trian: {steps: 3}\n": """\
unknown key trian
  at        run.yaml:1:1
            trian: {steps: 3}
  try       train""",
    "data: {seq_len: 128}\n": """\
unknown key data.seq_len
  at        run.yaml:1:8
            data: {seq_len: 128}
  try       one of train, validation, split, format, fields, tokenizer, length, pack, cache""",
    "train:\n  steps: many\n": """\
train.steps is "many", not a whole number from 1 to 2147483647
  at        run.yaml:2:3
            steps: many
  try       500, the default""",
    "train: {memory: 20}": """\
train.memory is 20, not a size with its unit or null
  at        run.yaml:1:9
            train: {memory: 20}
  try       20GiB""",
    "log: {tensorboard: yes}": """\
log.tensorboard is "yes", not true or false
  at        run.yaml:1:7
            log: {tensorboard: yes}
  try       true, the default""",
    "optimizer: {name: adamW, betas: [0.9]}": """\
2 mistakes in the configuration
optimizer.name is "adamW", not adamw, adam or sgd
  at        run.yaml:1:13
            optimizer: {name: adamW, betas: [0.9]}
  try       adamw
optimizer.betas is [0.9], not a list of 2 numbers from 0 to below 1
  at        run.yaml:1:26
            optimizer: {name: adamW, betas: [0.9]}
  try       [0.9, 0.95], the default""",
    "train: 3": """\
train is 3, not a mapping (steps, batch, accumulate, clip_norm, precision, memory, compile, seed, device)
  at        run.yaml:1:1
            train: 3
  try       {steps: 500}""",
    "model:\n  path: llama\n  config: {model_type: llama}\n": """\
model.path and model.config are both given: the model has two sources
  at        run.yaml:2:3
            path: llama
  at        run.yaml:3:3
            config: {model_type: llama}
  try       null for one of them""",
    "model: {config: {hidden_size: 8}}": """\
model.config has no model_type: it does not say which model it is
  at        run.yaml:1:9
            model: {config: {hidden_size: 8}}
  try       model_type: llama""",
    "model: {config: {model_type: llama, rope_theta: .nan}}": """\
model.config.rope_theta is .nan, not a plain value
  at        run.yaml:1:37
            model: {config: {model_type: llama, rope_theta: .nan}}
  try       text, a finite number, true, false, null, a list or a mapping""",
    "model: {config: {model_type: llama}}": """\
data.tokenizer is null, and model.config brings none: text cannot become tokens
  at        run.yaml:1:9
            model: {config: {model_type: llama}}
  try       data.tokenizer=FOLDER, or bytes""",
    "model: {weights: load}": """\
model.weights is load, but model.path is null: there is nothing to load
  at        run.yaml:1:9
            model: {weights: load}
  try       model.path=FOLDER""",
    "optimizer: {nesterov: true}": """\
optimizer.nesterov is true, but optimizer.name is adamw
  at        run.yaml:1:13
            optimizer: {nesterov: true}
  try       optimizer.name=sgd""",
    "optimizer:\n  name: sgd\n  momentum: 0\n  nesterov: true\n": """\
optimizer.nesterov is true, but optimizer.momentum is 0
  at        run.yaml:3:3
            momentum: 0
  at        run.yaml:4:3
            nesterov: true
  try       optimizer.momentum=0.9""",
    "schedule: {warmup: 1000}": """\
schedule.warmup is 1000 steps, but train.steps is 600
  at        run.yaml:1:12
            schedule: {warmup: 1000}
  try       schedule.warmup=0.1, a tenth of the steps""",
    "model: {dtype: float16}\ntrain: {precision: bf16}\n": """\
model.dtype is float16, but train.precision is bf16
  at        run.yaml:1:9
            model: {dtype: float16}
  at        run.yaml:2:9
            train: {precision: bf16}
  try       model.dtype=float32""",
    "data: {format: jsonl}": """\
data.format is jsonl, but data.train is stdlib, which is text
  at        run.yaml:1:8
            data: {format: jsonl}
  try       data.format=auto""",
    "train: {steps: 3}\nlog:\ntrain: {batch: 3}\n": """\
train is given twice, first in line 1
  at        run.yaml:3:1
            train: {batch: 3}
  try       keep one of the two""",
    "train:\n\tsteps: 3\n": """\
run.yaml is not YAML: found character '\\t' that cannot start any token
  at        run.yaml:2:1
            steps: 3
  try       spaces instead of the tab""",
    "train: {steps: 3\nlog: {every: 3}\n": """\
run.yaml is not YAML: expected ',' or '}', but got ':'
  at        run.yaml:2:4
            log: {every: 3}
  try       look at the indentation; put text with : # * & % @ in quotes""",
    "train: 3\n---\nlog: 3\n": """\
run.yaml is not YAML: but found another document
  at        run.yaml:2:1
            ---
  try       look at the indentation; put text with : # * & % @ in quotes""",
    "- train\n": """\
run.yaml holds [train], not settings
  at        run.yaml:1:1
            - train
  try       lines such as `train: {steps: 500}`""",
    "# nothing yet\n": """\
run.yaml is empty
  try       `mycel config` prints a whole configuration to start from""",
    "run: !!python/object/apply:os.system [ls]": """\
run has the tag !!python/object/apply:os.system
  at        run.yaml:1:1
            run: !!python/object/apply:os.system [ls]
  try       a plain value: text, a number, a list or a mapping""",
    "model: &m {config: *m}": """\
model.config repeats itself without end
  at        run.yaml:1:12
            model: &m {config: *m}
  try       the values themselves instead of & and *""",
    "model: \x00": """\
run.yaml is not text: character 0x0000 in line 1
  try       a YAML file, which is text""",
    "model: " + "[" * 1000: """\
run.yaml is nested too deeply to be read
  try       fewer brackets within brackets""",
}  # fmt: skip


@pytest.mark.parametrize("text", GOLDEN, ids=lambda text: text[:24])
def test_golden(tmp_path, text):
    assert told(tmp_path, text) == GOLDEN[text]


def test_golden_arguments(tmp_path):
    arguments = ["train.stesp=3", "optimizer=3", "optimizer.lr=2", "train.steps=[1", "model.lora=true", "train.batch={a: 3}", "oops"]
    assert told(tmp_path, "optimizer: {lr: 1}\n", *arguments) == """\
7 mistakes in the configuration
oops is not a setting
  try       section.key=value
unknown key train.stesp
  at        argument train.stesp=3
  try       train.steps
optimizer is 3, not a mapping (name, lr, betas, eps, momentum, nesterov, weight_decay)
  at        argument optimizer=3
  try       {name: adamw}
optimizer.lr cannot be set: optimizer is 3, not a mapping
  at        argument optimizer.lr=2
  try       leave out the value of optimizer
the value is not YAML: expected ',' or ']', but got '<stream end>'
  at        argument train.steps=[1
  try       look at the indentation; put text with : # * & % @ in quotes
model.lora is true, not a mapping (rank, alpha, dropout, targets, merge) or null
  at        argument model.lora=true
  try       {rank: 8}
train.batch is {a: 3}, not a whole number from 1 to 2147483647
  at        argument train.batch={a: 3}
  try       16, the default"""  # fmt: skip


def test_a_bomb_of_aliases_is_refused_quickly(tmp_path):
    levels = [f"    b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9 if i else ['1'] * 9)}]" for i in range(12)]
    message = told(tmp_path, "data: {tokenizer: t}\nmodel:\n  config:\n    model_type: x\n" + "\n".join(levels))
    assert "repeats itself without end" in message and "mistakes" not in message


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "train.yaml").write_text("run: x")
    (tmp_path / "large.yaml").write_bytes(b"#" * (2 << 20))
    (tmp_path / "old.yaml").write_bytes("a: 1\nb: é".encode("latin-1"))
    assert refused(tmp_path / "trian.yaml") == f"no configuration file {tmp_path}/trian.yaml\n  try       {tmp_path}/train.yaml"
    assert refused(tmp_path / "none" / "x.yaml").endswith("try       the path of a YAML file")
    assert refused(tmp_path) == f"cannot read the configuration {tmp_path}: is a directory\n  try       the path of a YAML file"
    assert "larger than 1 MiB" in refused(tmp_path / "large.yaml")
    assert "byte 0xe9 in line 2 is not UTF-8" in refused(tmp_path / "old.yaml")
    assert "cannot read the configuration" in refused(tmp_path / "train.yaml" / "x.yaml")
    assert "cannot read the configuration" in refused(Path("a\0b"))


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbftrain: {steps: 7}\r\n")
    assert load(tmp_path / "run.yaml").train.steps == 7
