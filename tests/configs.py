"""Configurations by chance: every key there is, values that fit, and any subset of settings that is right together."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mycel.train.config import Config
from mycel.train.sections import Section, find, section_of

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def keys_of(section: type[Section] = Config, above: str = "") -> list[str]:
    """Every key of the tree, dotted, sections too."""
    return [
        k
        for name, f in section.model_fields.items()
        for k in [above + name, *(keys_of(section_of(f), f"{above}{name}.") if section_of(f) else [])]
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
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
adapters = {
    "rank": count,
    "alpha": positive,
    "dropout": share,
    "targets": st.lists(texts.filter(bool), min_size=1, max_size=3),
}
BY_KEY: dict[str, st.SearchStrategy[Any]] = {
    "model.path": names,
    "model.config": st.dictionaries(texts, plain, max_size=4).map(lambda d: {**d, "model_type": "llama"}),
    "model.lora": st.none() | st.fixed_dictionaries({}, optional=adapters),
    "data.train": names | st.lists(names, min_size=1, max_size=3),
    "data.validation": st.none() | names,
    "data.split": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "data.weights": st.none(),  # as many as data.train has
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
