"""Settings as they were written: YAML text and `a.b=c` arguments become plain values that still know their place.

    optimizer:                    values   {"optimizer": {"lr": 0.001}}
      lr: 1e-3            ->      places   {("optimizer", "lr"): run.yaml:2:3, …}

The words are YAML 1.2's: `1e-3` is a number, `yes`, `12:30` and `2024-01-01` are text.  Anything that could be meant in
two ways (a key given twice, a tag, a key that is no text) is a mistake; mistakes are collected, so that all of them are
told at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml

from mycel.errors import TrainError

Keys = tuple[str, ...]
FILE_BYTES = 1 << 20  # a configuration is small: what is larger is another file given by mistake
VALUES = 100_000  # aliases of aliases grow without end


@dataclass(frozen=True, order=True)
class SettingOrigin:
    """Where a setting was written: a line of a file, or an argument."""

    order: tuple[int, ...]
    where: str
    text: str = ""


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong: what, with its value; where; what to try."""

    what: str
    places: tuple[SettingOrigin, ...] = ()
    hint: str = ""

    def __str__(self) -> str:
        lines = [self.what]
        for place in self.places:
            lines.append(f"  at        {place.where}")
            if place.text:
                lines.append(f"            {place.text}")
        if self.hint:
            lines.append(f"  try       {self.hint}")
        return "\n".join(lines)


def refuse(mistakes: Iterable[Mistake]) -> NoReturn:
    """Raise all mistakes as one error, in the order in which they were written."""
    texts = list(dict.fromkeys(str(m) for m in sorted(mistakes, key=lambda m: m.places)))
    head = [f"{len(texts)} mistakes in the configuration"] if len(texts) > 1 else []
    raise TrainError("\n".join(head + texts)) from None


@dataclass
class WrittenSettings:
    """What was written: the values, the place of each key, and what is wrong so far."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Keys, SettingOrigin] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def place(self, keys: Keys) -> tuple[SettingOrigin, ...]:
        """Where a key was written, or the nearest key around it."""
        origins = (self.places[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in self.places)
        return tuple(origins)[:1]

    def at(self, keys: Sequence[Any], otherwise: Any) -> Any:
        """The value at a path of keys."""
        value: Any = self.values
        for key in keys:
            if not isinstance(value, Mapping) or key not in value:
                return otherwise
            value = value[key]
        return value

    def put(self, keys: Keys, value: Any, place: SettingOrigin) -> None:
        """Set one value from an argument, over whatever was there."""
        into = self.values
        for depth, key in enumerate(keys[:-1], 1):
            if into.get(key) is None:
                into[key] = {}
                self.places[keys[:depth]] = place
            into = into[key]
            if not isinstance(into, dict):
                what = f"{'.'.join(keys)} cannot be set: {'.'.join(keys[:depth])} is {shown(into)}, not a mapping"
                self.mistakes.append(Mistake(what, (place,), f"leave out the value of {'.'.join(keys[:depth])}"))
                return
        into[keys[-1]] = value
        self.places = {k: p for k, p in self.places.items() if k[: len(keys)] != keys} | {keys: place}


class Reader(yaml.SafeLoader):
    """YAML with the words of version 1.2 (its core schema), and `_` between digits."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class Writer(yaml.SafeDumper):
    """Quotes whatever a reader of YAML 1.1 or 1.2 would not take for text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


WORDS: list[tuple[str, str, list[str], Callable[[str], Any]]] = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda s: None),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF"), lambda s: s.lower() == "true"),
    (
        "int",
        r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+",
        list("-+0123456789"),
        lambda s: int(s, 0 if s[:2] in ("0x", "0o") else 10),
    ),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
        lambda s: float(re.sub(r"\.(?=[a-zA-Z])", "", s)),
    ),
]
TAG = "tag:yaml.org,2002:"


def _joined(text: str) -> str:
    """Two escapes that JSON writes for one character (\\ud83c \\udf44) => that character."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")


SCALARS: dict[str, Callable[[str], Any]] = {"!!str": _joined, **{"!!" + name: make for name, _, _, make in WORDS}}
for _name, _form, _first, _ in WORDS:
    for _yaml in (Reader, Writer):
        _yaml.add_implicit_resolver(TAG + _name, re.compile(f"^(?:{_form})$"), _first)


def _text(writer: Writer, value: str) -> yaml.ScalarNode:
    return writer.represent_scalar(TAG + "str", value, style=None if value.isprintable() else '"')


Writer.add_representer(str, _text)


def inline(value: Any) -> str:
    """A value as YAML on one line."""
    text: str = yaml.dump(
        value, Dumper=Writer, default_flow_style=True, width=1 << 30, allow_unicode=True, sort_keys=False
    )
    return text.removesuffix("...\n").strip()


def shown(value: Any, width: int = 60) -> str:
    """A value for a message: as it would be written, shortened."""
    try:
        text = json.dumps(value) if isinstance(value, str) else inline(value)
    except (yaml.YAMLError, RecursionError):
        text = repr(value)
    return cut(text, width)


def cut(text: str, width: int) -> str:
    """Text of at most this width."""
    return text if len(text) <= width else text[: width - 1] + "…"


class _Values:
    """A tree of YAML nodes -> plain values, noting places and mistakes."""

    def __init__(self, written: WrittenSettings, place: Callable[[yaml.Mark], SettingOrigin]) -> None:
        self.written, self.place = written, place
        self.count, self.inside = 0, set[int]()

    def mistake(self, what: str, place: SettingOrigin, hint: str) -> None:
        self.written.mistakes.append(Mistake(what, (place,), hint))

    def value(self, node: yaml.Node, keys: Keys) -> Any:
        self.count += 1
        name, place, tag = (
            ".".join(keys) or "the value",
            self.written.places.get(keys) or self.place(node.start_mark),
            node.tag.replace(TAG, "!!"),
        )
        if id(node) in self.inside or self.count > VALUES:
            refuse(
                [
                    *self.written.mistakes,
                    Mistake(f"{name} repeats itself without end", (place,), "the values themselves instead of & and *"),
                ]
            )
        self.inside.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and tag == "!!map":
                return dict(self.items(node, keys))
            if isinstance(node, yaml.SequenceNode) and tag == "!!seq":
                return [self.value(item, keys) for item in node.value]
            if isinstance(node, yaml.ScalarNode) and tag in SCALARS:
                return SCALARS[tag](node.value)
            self.mistake(f"{name} has the tag {tag}", place, "a plain value: text, a number, a list or a mapping")
        except ValueError:
            self.mistake(f"{name} is {shown(node.value)}, which cannot be read as {tag}", place, "a plain value")
        finally:
            self.inside.discard(id(node))
        return None

    def items(self, node: yaml.MappingNode, keys: Keys) -> Iterator[tuple[str, Any]]:
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node.start_mark)
            key, line = self.value(key_node, keys), key_node.start_mark.line + 1
            if not isinstance(key, str):
                self.mistake(f"a key is {shown(key)}, not text", place, "a name")
                continue
            if key in lines:
                self.mistake(
                    f"{'.'.join((*keys, key))} is given twice, first in line {lines[key]}", place, "keep one of the two"
                )
                continue
            lines[key] = line
            self.written.places[(*keys, key)] = place
            yield key, self.value(value_node, (*keys, key))


def _compose(text: str, name: str, place: Callable[[yaml.Mark], SettingOrigin]) -> yaml.Node | Mistake | None:
    """The YAML tree of a text (None: there is nothing in it), or what keeps it from being one."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=Reader)
    except yaml.MarkedYAMLError as e:
        mark, problem = e.problem_mark or e.context_mark, e.problem or e.context or "cannot be parsed"
        hint = (
            "spaces instead of the tab"
            if "'\\t'" in problem
            else "look at the indentation; put text with : # * & % @ in quotes"
        )
        return Mistake(f"{name} is not YAML: {problem}", (place(mark),) if mark else (), hint)
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        return Mistake(
            f"{name} is not text: character {e.character:#06x} in line {line}", (), "a YAML file, which is text"
        )
    except RecursionError:
        return Mistake(f"{name} is nested too deeply to be read", (), "fewer brackets within brackets")
    return node


def read_text(path: Path) -> str:
    """The text of a configuration file; what cannot be one is refused."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES + 1)
    except FileNotFoundError:
        near = get_close_matches(path.name, (p.name for p in path.absolute().parent.glob("*.y*ml")), n=3, cutoff=0.7)
        refuse(
            [
                Mistake(
                    f"no configuration file {path}",
                    (),
                    " or ".join(str(path.with_name(n)) for n in near) or "the path of a YAML file",
                )
            ]
        )
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        refuse([Mistake(f"cannot read the configuration {path}: {why.lower()}", (), "the path of a YAML file")])
    if len(content) > FILE_BYTES:
        refuse(
            [
                Mistake(
                    f"{path} is larger than {FILE_BYTES >> 20} MiB: not a configuration", (), "the path of a YAML file"
                )
            ]
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        refuse(
            [
                Mistake(
                    f"{path} is not text: byte {content[e.start]:#04x} in line {line} is not UTF-8",
                    (),
                    "a YAML file saved as UTF-8",
                )
            ]
        )


def read_file(path: Path) -> WrittenSettings:
    """A configuration file -> what it says, with places."""
    text = read_text(path)
    lines = text.splitlines()

    def place(mark: yaml.Mark) -> SettingOrigin:
        source = "".join(lines[mark.line : mark.line + 1]).strip()
        return SettingOrigin((0, mark.line, mark.column), f"{path}:{mark.line + 1}:{mark.column + 1}", cut(source, 100))

    written = WrittenSettings()
    node = _compose(text, str(path), place)
    if isinstance(node, Mistake):
        refuse([node])
    if node is None:
        refuse([Mistake(f"{path} is empty", (), "`mycel config` prints a whole configuration to start from")])
    values = _Values(written, place).value(node, ())
    if not isinstance(values, dict):
        first = (place(node.start_mark),)
        refuse(
            written.mistakes
            or [Mistake(f"{path} holds {shown(values)}, not settings", first, "lines such as `train: {steps: 500}`")]
        )
    written.values = values
    return written


def read_value(text: str, place: SettingOrigin) -> tuple[Any, list[Mistake]]:
    """The value after the `=` of an argument, read as YAML."""
    node = _compose(text, "the value", lambda mark: place)
    if node is None or isinstance(node, Mistake):
        return None, [node] if node else []
    written = WrittenSettings()
    return _Values(written, lambda mark: place).value(node, ()), written.mistakes
