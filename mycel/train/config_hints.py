"""Why transformers refuses a configuration, in the keys it was given: what is wrong, with which key, what to try.

The hidden size (16) is not a multiple of … heads (3)     ->  num_attention_heads     2 or 4
Field 'hidden_size' expected int, got str                 ->  hidden_size             4096, the default
KeyError 'gleu'                                           ->  hidden_act              gelu
Trying to create tensor with negative dimension -3        ->  vocab_size              a number above 0
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from mycel.train.weights import one_line

PREFIX = re.compile(r"^(Class v|V)alidation error for [^:]*: (\w+Error: )?")


@dataclass(frozen=True)
class ConfigHint:
    """What is wrong, the key at fault (empty: not known), and what to try."""

    what: str
    key: str
    hint: str


def config_hint(kind: type, values: Mapping[str, Any], error: Exception) -> ConfigHint:
    """Read an error that a configuration of this class, or a model by it, has raised."""
    text = PREFIX.sub("", one_line(error))
    for rule in (_field, _heads, _name, _size):
        for answer in rule(kind, values, error, text):
            return answer
    return ConfigHint(text, "", f"leave out what need not be said: transformers.{kind.__name__} has defaults")


def indivisible(settings: Any) -> ConfigHint | None:
    """Heads of keys and values that do not divide those of queries: a model is made, and fails at its first step."""
    heads, groups = (vars(settings).get(name) for name in ("num_attention_heads", "num_key_value_heads"))
    if not (type(heads) is type(groups) is int) or groups < 1 or heads % groups == 0:
        return None
    what = f"num_attention_heads is {heads}, not a multiple of num_key_value_heads, {groups}"
    return ConfigHint(what, "num_key_value_heads", f"num_key_value_heads: {_near_divisors(heads, groups)}")


def _field(kind: type, values: Mapping[str, Any], error: Exception, text: str) -> Iterator[ConfigHint]:
    """A value of another type than its field has."""
    match = re.search(r"[Ff]ield '(\w+)' expected", text)
    if match and (key := match[1]) in values:
        default = _defaults(kind).get(key)
        yield ConfigHint(text, key, f"{key}: {default}, the default" if default is not None else "its type")


def _heads(kind: type, values: Mapping[str, Any], error: Exception, text: str) -> Iterator[ConfigHint]:
    """A width that the number of heads does not divide."""
    numbers = [int(n) for n in re.findall(r"(?<![\w.])\d+", text)]
    heads = {name: v for name, v in {**_defaults(kind), **values}.items() if "head" in name and type(v) is int}
    if none := next((name for name in heads if name in values and heads[name] == 0), None):
        yield ConfigHint(f"{none} is 0", none, f"{none}: a number above 0")
    if len(numbers) < 2 or not re.search("multiple|divisible", text):
        return
    width, count = numbers[:2]
    keys = [name for name, value in heads.items() if value == count]
    for key in sorted(keys, key=lambda name: name not in values):
        yield ConfigHint(text, key, f"{key}: {_near_divisors(width, count)}")


def _name(kind: type, values: Mapping[str, Any], error: Exception, text: str) -> Iterator[ConfigHint]:
    """A name that stands for nothing: an activation, a kind of position."""
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not isinstance(error, KeyError) or not error.args:
        return
    for key, value in _leaves(values):
        if value == error.args[0]:
            known = ["default", *ROPE_INIT_FUNCTIONS] if "type" in key else [*ACT2FN]
            near = get_close_matches(str(value), known, 3) or sorted(known)[:6]
            yield ConfigHint(f"there is no {key.rpartition('.')[2]} {value!r}", key, ", ".join(near))


def _size(kind: type, values: Mapping[str, Any], error: Exception, text: str) -> Iterator[ConfigHint]:
    """A number below what its default can mean."""
    defaults = _defaults(kind)
    for key, value in values.items():
        if type(value) is type(defaults.get(key)) is int and value < 1 <= defaults[key]:
            yield ConfigHint(f"{key} is {value}", key, f"{key}: a number above 0")


def _defaults(kind: type) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(kind).parameters.items() if p.default is not p.empty}


def _leaves(values: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """{a: {b: 1}} -> a.b, 1"""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _near_divisors(whole: int, wanted: int) -> str:
    """16, 3 -> 2 or 4"""
    below = next(n for n in range(min(wanted, whole), 0, -1) if whole % n == 0)
    above = next((n for n in range(wanted + 1, whole + 1) if whole % n == 0), None)
    return f"{below} or {above}" if above else str(below)
