"""The configuration: what is written loads back equal; defaults, layers of settings, words of YAML and sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from configs import KEYS, LEAVES, at, configs, plain, quick
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mycel.errors import TrainError
from mycel.sizes import parse_bytes
from mycel.train import config as sections
from mycel.train.config import EMBEDDED, Config, dump, load
from mycel.train.written import Reader, Writer, inline


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
        load(
            None,
            [
                f"{key}={inline(value)}"
                for key in LEAVES + ["sample", "model.lora"]
                if (value := written(config, key)) is not SKIP
            ],
        )
        == config
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
    loaded = load(
        None, ["data.tokenizer=bytes", "model.config.model_type=x", f"model.config.v={json.dumps(value)}"]
    ).model.config
    assert loaded["v"] == value
    assert yaml.safe_load(inline(value)) == value


def test_words_of_yaml():
    read = lambda text: at(
        load(None, ["data.tokenizer=bytes", "model.config.model_type=x", f"model.config.v={text}"]), "model.config"
    )["v"]
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
    assert (
        config.model.config == EMBEDDED["model"]["config"]
        and config.data.tokenizer == "bytes"
        and config.train.steps == 600
    )
    assert (
        Config.from_dict({"model": {"path": "m"}}).train.steps == 500
        and Config.from_dict({"model": {"path": "m"}}).data.tokenizer is None
    )
    assert Config(train=sections.Train(batch=3)).train == sections.Train(steps=600, batch=3), (
        "sections given as objects are layered alike"
    )


@quick
@given(
    st.sampled_from(
        [
            "model.dtype=bfloat16",
            "data.length=64",
            "optimizer.lr=0.5",
            "schedule.warmup=7",
            "train.steps=11",
            "train.batch=2",
        ]
    )
)
def test_what_is_given_wins_over_the_embedded_default(argument):
    key, _, value = argument.partition("=")
    config = load(None, [argument])
    assert inline(at(config, key)) == value
    assert load(None, [argument, f"{key}={inline(at(load(None), key))}"]) == load(None), (
        "the last argument wins, and nothing else was changed"
    )


def test_an_empty_section_has_its_defaults_and_null_switches_off(tmp_path):
    (tmp_path / "run.yaml").write_text("train:\n  # steps: 3\nmodel:\ndata: {fields: }\nsample: null\n")
    config = load(tmp_path / "run.yaml")
    assert config.sample is None and config == load(None, ["sample=null"])
    assert load(tmp_path / "run.yaml", ["sample.tokens=5"]).sample == sections.Sample(tokens=5)


def test_a_mapping_goes_into_a_section_and_replaces_a_free_mapping(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "optimizer: {lr: 1, eps: 1}\nmodel: {config: {model_type: a, b: 1}}\ndata: {tokenizer: t}\n"
    )
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
    assert (config.run, config.data.train, config.data.tokenizer) == (
        Path("/home/me/r"),
        ("/home/me/a", "b~"),
        "/home/me/t",
    )
    assert config.data.cache_folder == Path("/home/me/.cache/mycel/tokens")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert config.data.cache_folder == Path("/cache/mycel/tokens") and load(
        None, ["data.cache=c"]
    ).data.cache_folder == Path("c")


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


UNITS = {
    "B": 1,
    "kB": 10**3,
    "KiB": 2**10,
    "MB": 10**6,
    "MiB": 2**20,
    "GB": 10**9,
    "gib": 2**30,
    "TB": 10**12,
    "TiB": 2**40,
}


@quick
@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_sizes(number, unit, space):
    assert parse_bytes(f"{number}{space}{unit}") == number * UNITS[unit]
    assert parse_bytes(f"{number}.5{unit}") == number * UNITS[unit] + UNITS[unit] // 2


@pytest.mark.parametrize("text", ["", "20", "GiB", "-1GiB", "1e3MB", "20G", "0GiB", "0.1B", "1,5GB", "٣GB", "nan GB"])
def test_what_is_no_size(text):
    with pytest.raises(TrainError, match="try       20GiB"):
        parse_bytes(text)
