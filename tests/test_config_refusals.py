"""The configuration: whatever is wrong is told at once, with its place and a way out."""

from __future__ import annotations

import json
import os
import string
from pathlib import Path

import pytest
import yaml
from configs import KEYS, LEAVES, nested, plain, quick, text, texts
from hypothesis import assume, example, given
from hypothesis import strategies as st

from mycel.errors import TrainError
from mycel.train.config import Config, load
from mycel.train.written import Reader, inline


def refused(path: Path | None = None, *overrides: str) -> str:
    with pytest.raises(TrainError) as e:
        load(path, overrides)
    assert e.value.__suppress_context__, "the cause is told in words, not as a second traceback"
    return str(e.value)


def file_refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    """What a file with this text is refused with, its folder left out."""
    (tmp_path / "run.yaml").write_text(text)
    return refused(tmp_path / "run.yaml", *overrides).replace(f"{tmp_path}{os.sep}", "")


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
@given(
    st.lists(
        (st.sampled_from(KEYS) | text).flatmap(lambda k: (texts | plain.map(inline)).map(lambda v: f"{k}={v}")) | text,
        max_size=3,
    )
)
@example(
    [
        "=",
        "a..b=1",
        ".=",
        "model.config=&a [*a]",
        "train.steps.x=3",
        "optimizer=3",
        "optimizer.lr=2",
        "data.train=\ud800",
        "run=\0",
    ]
)
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
        st.sampled_from(
            [
                name[:i] + name[i + 1 :],
                name[:i] + name[i] + name[i:],
                name[:i] + name[i + 1] + name[i] + name[i + 2 :],
                name.upper(),
            ]
        )
    )
    assume(".".join([*above, wrong]) not in KEYS)
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(above)] + [f"{'  ' * len(above)}{wrong}: 1"]
    message = file_refusal(tmp_path, "# first\n" + "\n".join(lines) + "\n")
    assert message.startswith(
        f"unknown key {'.'.join([*above, wrong])}\n  at        run.yaml:{len(lines) + 1}:{2 * len(above) + 1}\n"
        f"            {wrong}: 1\n"
    )
    assert key in message.split("  try       ")[1].split(" or ")
    by_argument = refused(None, f"{'.'.join([*above, wrong])}=1")
    assert f"  at        argument {'.'.join([*above, wrong])}=1\n" in by_argument and key in by_argument.split(
        "  try       "
    )[1].split(" or ")


WRONG = [[[]], {"a": {}}, -1, 1.5, "", "certainly not", [1, 2, 3]]


@pytest.mark.parametrize("key", [key for key in LEAVES if key != "model.config"])
def test_a_wrong_value_is_told_with_place_and_form(tmp_path, key):
    """Every setting refuses something, and says then its place, what it found, what it takes; the way out that it names
    is a right one."""
    *above, name = key.split(".")
    refusals = 0
    for value in WRONG:
        lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(above)] + [
            f"{'  ' * len(above)}{name}: {inline(value)}"
        ]
        (tmp_path / "run.yaml").write_text("\n".join(lines))
        try:
            load(tmp_path / "run.yaml")
        except TrainError as e:
            shown = json.dumps(value) if isinstance(value, str) else inline(value)
            assert str(e).startswith(
                f"{key} is {shown}, not "
            ) and f"run.yaml:{len(lines)}:{2 * len(above) + 1}\n" in str(e)
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
    message = file_refusal(tmp_path, "\n".join(lines), "run={}", "oh=1")
    positions = [message.find(f"\n{MISTAKES[line]}") for line in lines] + [message.find("\nunknown key oh")]
    assert (
        message.splitlines()[0].endswith("mistakes in the configuration")
        and -1 not in positions
        and positions == sorted(positions)
    )


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
  try       train or trace""",
    "data: {validation: 0.1}\n": """\
data.validation is 0.1, not a path or a list of paths or null
  at        run.yaml:1:8
            data: {validation: 0.1}
  try       split: 0.1""",
    "data: {seq_len: 128}\n": """\
unknown key data.seq_len
  at        run.yaml:1:8
            data: {seq_len: 128}
  try       one of train, validation, split, weights, format, fields, tokenizer, length, pack, buckets, cache, \
stream, shuffle_buffer""",
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
optimizer.name is "adamW", not adamw, adam, sgd, adadelta, adafactor, adagrad, adamax, asgd, \
nadam, radam, rmsprop, rprop or muon
  at        run.yaml:1:13
            optimizer: {name: adamW, betas: [0.9]}
  try       adamw
optimizer.betas is [0.9], not a list of 2 numbers from 0 to below 1
  at        run.yaml:1:26
            optimizer: {name: adamW, betas: [0.9]}
  try       [0.9, 0.95], the default""",
    "train: 3": """\
train is 3, not a mapping (steps, batch, accumulate, clip_norm, precision, memory, compile, seed, device, task, beta)
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
    "parallel: {mesh: {tp:2}}": """\
parallel.mesh is {'tp:2': null}, not axes with their sizes, whole numbers from 1 or null
  at        run.yaml:1:12
            parallel: {mesh: {tp:2}}
  try       a space after the colon: {tp: 2}""",
    "model: {lora: {rank:4}}": """\
unknown key model.lora.rank:4
  at        run.yaml:1:16
            model: {lora: {rank:4}}
  try       a space after the colon: {rank: 4}""",
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
    "optimizer: {options: {eps: 1.0}}": """\
optimizer.options says eps, which is a setting of its own
  at        run.yaml:1:13
            optimizer: {options: {eps: 1.0}}
  try       optimizer.eps=1.0""",
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
    "train: {precision: float16}": """\
train.precision is "float16", not fp32, bf16, fp16 or fp8
  at        run.yaml:1:9
            train: {precision: float16}
  try       fp16""",
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
    assert file_refusal(tmp_path, text) == GOLDEN[text]


def test_golden_arguments(tmp_path):
    arguments = [
        "train.stesp=3",
        "optimizer=3",
        "optimizer.lr=2",
        "train.steps=[1",
        "model.lora=true",
        "train.batch={a: 3}",
        "oops",
    ]
    assert file_refusal(tmp_path, "optimizer: {lr: 1}\n", *arguments) == """\
7 mistakes in the configuration
oops is not a setting
  try       section.key=value
unknown key train.stesp
  at        argument train.stesp=3
  try       train.steps
optimizer is 3, not a mapping (name, lr, betas, eps, momentum, nesterov, weight_decay, options)
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
    message = file_refusal(tmp_path, "data: {tokenizer: t}\nmodel:\n  config:\n    model_type: x\n" + "\n".join(levels))
    assert "repeats itself without end" in message and "mistakes" not in message


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "train.yaml").write_text("run: x")
    (tmp_path / "large.yaml").write_bytes(b"#" * (2 << 20))
    (tmp_path / "old.yaml").write_bytes("a: 1\nb: é".encode("latin-1"))
    assert (
        refused(tmp_path / "trian.yaml")
        == f"no configuration file {tmp_path}/trian.yaml\n  try       {tmp_path}/train.yaml"
    )
    assert refused(tmp_path / "none" / "x.yaml").endswith("try       the path of a YAML file")
    assert (
        refused(tmp_path)
        == f"cannot read the configuration {tmp_path}: is a directory\n  try       the path of a YAML file"
    )
    assert "larger than 1 MiB" in refused(tmp_path / "large.yaml")
    assert "byte 0xe9 in line 2 is not UTF-8" in refused(tmp_path / "old.yaml")
    assert "cannot read the configuration" in refused(tmp_path / "train.yaml" / "x.yaml")
    assert "cannot read the configuration" in refused(Path("a\0b"))


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbftrain: {steps: 7}\r\n")
    assert load(tmp_path / "run.yaml").train.steps == 7
