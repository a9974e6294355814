"""A tree of sections: what is written is checked against it, explained where it is wrong, and printed back.

class Train(Section):          train.stesp: 5     ->    unknown key train.stesp, try train.steps
    steps: Count = 500         train.steps: 0     ->    train.steps is 0, not a whole number from 1 …, try 500
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from mycel.train.forms import Form
from mycel.train.written import Keys, Mistake, SettingOrigin, Writer, WrittenSettings, inline, read_value, refuse, shown

COMMENT_COLUMN = 25
FEW_COLUMNS = 45  # that a comment has for choices
NEAR = 0.52  # of difflib's likeness: float16 is near to fp16, lion not to muon
S = TypeVar("S", bound="Section")
Conflict = tuple[
    str, str
]  # settings that are right alone and wrong together: what (which names their keys), and what to try


class Section(BaseModel):
    """A mapping of known keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def conflicts(self) -> Iterator[Conflict]:
        """What in this section does not go together."""
        yield from ()

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if conflicts := list(self.conflicts()):
            raise PydanticCustomError(
                "conflict", "{text}", {"text": "; ".join(what for what, _ in conflicts), "found": conflicts}
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, given: Any) -> Any:
        """A section with nothing in it (`train:` with its lines commented out) has its defaults."""
        if not isinstance(given, Mapping):
            return given
        needed = {name for name, field in cls.model_fields.items() if field.annotation is section_of(field)}
        return {key: value for key, value in given.items() if value is not None or key not in needed}


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds: `Lora` for `lora: Lora | None`."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def override(root: type[Section], written: WrittenSettings, argument: str, number: int) -> None:
    """Put one `a.b=c` over what is written; text is taken as it stands, unless it is quoted, a list or null."""
    name, equals, text = argument.partition("=")
    if not equals:
        written.mistakes.append(Mistake(f"{argument} is not a setting", (), "section.key=value"))
        return
    keys, place = tuple(name.split(".")), SettingOrigin((1, number), f"argument {argument}")
    value, mistakes = read_value(text, place)
    field = find(root, keys)
    if (
        field
        and any(form.verbatim for form in _forms(field))
        and text.strip() not in ("", "~", "null")
        and (mistakes or text[0] not in "['\"")
    ):
        value, mistakes = text, []
    written.mistakes += mistakes
    _put(root, written, keys, value, place)


def _put(root: type[Section], written: WrittenSettings, keys: Keys, value: Any, place: SettingOrigin) -> None:
    """A mapping goes into a section key by key, everything else replaces what was there."""
    field = find(root, keys)
    if isinstance(value, dict) and value and field and section_of(field):
        for key, each in value.items():
            _put(root, written, (*keys, key), each, place)
    else:
        written.put(keys, value, place)


def checked(root: type[S], written: WrittenSettings) -> S:
    """What is written -> the configuration, or all that is wrong with it."""
    try:
        config = root.model_validate(written.values)
    except ValidationError as e:
        reported = {place for mistake in written.mistakes for place in mistake.places}
        mistakes = [
            m
            for error in e.errors(include_url=False)
            for m in _mistakes(root, error, written)
            if not reported.intersection(m.places)
        ]
        refuse(written.mistakes + mistakes)
    if written.mistakes:
        refuse(written.mistakes)
    return config


def find(root: type[Section], keys: Sequence[Any]) -> FieldInfo | None:
    """The field at a path of keys, if there is one."""
    field: FieldInfo | None = None
    section: type[Section] | None = root
    for key in keys:
        field = section.model_fields.get(key) if section is not None else None
        section = section_of(field) if field else None
    return field


def _mistakes(root: type[Section], error: ErrorDetails, written: WrittenSettings) -> Iterator[Mistake]:
    """One error of pydantic's -> what is wrong, where it was written, what to try."""
    loc = error["loc"]
    if error["type"] == "conflict":
        for what, hint in error["ctx"]["found"]:
            named = (tuple(name.split(".")) for name in re.findall(r"\w+(?:\.\w+)+", what))
            yield Mistake(what, tuple(sorted(written.places[keys] for keys in named if keys in written.places)), hint)
    elif error["type"] in ("extra_forbidden", "invalid_key"):
        keys = tuple(str(part) for part in loc)
        yield Mistake(f"unknown key {'.'.join(keys)}", written.place(keys), _nearest(root, keys))
    else:
        known = max(n for n in range(len(loc) + 1) if find(root, loc[:n]))
        yield _wrong(root, loc[:known], loc[known:], error["input"], written)


def _wrong(
    root: type[Section], loc: Sequence[Any], inside: Sequence[Any], given: Any, written: WrittenSettings
) -> Mistake:
    """A field whose value is not of its form, or has something `inside` it that is not."""
    field = find(root, loc)
    assert field is not None
    keys, value = tuple(loc), written.at(loc, given)
    words, hint = _words(field), _hint(field, value)
    for part in inside:
        if not isinstance(value, Mapping) or part not in value:
            break
        keys, value = (*keys, str(part)), value[part]
        words, hint = "a plain value", "text, a finite number, true, false, null, a list or a mapping"
    return Mistake(f"{'.'.join(keys)} is {shown(value)}, not {words}", written.place(keys), hint)


def _forms(field: FieldInfo) -> list[Form]:
    """The form that a field's type carries, or those of its choices."""
    inner = [each for choice in get_args(field.annotation) for each in getattr(choice, "__metadata__", ())]
    return [each for each in field.metadata if isinstance(each, Form)] or [
        each for each in inner if isinstance(each, Form)
    ]


def _words(field: FieldInfo) -> str:
    """What a field may be: `a path or null`."""
    section = section_of(field)
    if get_origin(field.annotation) is Literal:
        *most, last = get_args(field.annotation)
        return f"{', '.join(most)} or {last}"
    words = [f"a mapping ({', '.join(section.model_fields)})"] if section else [form.words for form in _forms(field)]
    return " or ".join(words + ["null"] * (type(None) in get_args(field.annotation)))


def _hint(field: FieldInfo, value: Any) -> str:
    """The nearest choice, the setting that a share is for, quotes around what should be
    text, an example, or the default."""
    forms, section = _forms(field), section_of(field)
    if isinstance(value, Mapping) and (lacking := [key for key in value if _spaced(key)]):
        return _spaced(lacking[0])
    if get_origin(field.annotation) is Literal and (
        near := get_close_matches(str(value).lower(), get_args(field.annotation), n=1, cutoff=NEAR)
    ):
        return str(near[0])
    if isinstance(value, float) and 0 < value < 1 and isinstance(field.json_schema_extra, dict):
        return f"{field.json_schema_extra['share']}: {inline(value)}"
    if isinstance(value, int | float) and any(form.verbatim for form in forms):
        return f'quotes around it: "{inline(value)}"'
    if section:
        first = next(iter(section.model_fields))
        return inline({first: section.model_fields[first].default})
    return next((form.example for form in forms if form.example), f"{inline(_plain(field.default))}, the default")


def _spaced(key: Any) -> str:
    """{tp:2} is to YAML one key without a value => what to write instead; nothing for other keys."""
    return f"a space after the colon: {{{key.replace(':', ': ', 1)}}}" if re.fullmatch(r"\w+:.+", str(key)) else ""


def _nearest(root: type[Section], keys: Keys) -> str:
    """Known keys that could have been meant: alike in this section, or of this name in another."""
    *above, name = keys
    if spaced := _spaced(name):
        return spaced
    word = name.lower().replace("-", "_")
    initials = "".join(part[:1] for part in word.split("_"))  # learning_rate is lr
    field = find(root, above)
    section = (section_of(field) if field else None) if above else root
    if section is None:
        return f"{'.'.join(above)}={name}" if field else "`mycel config` lists all keys"
    here = [".".join([*above, near]) for near in get_close_matches(word, section.model_fields, n=3)]
    others = [key for key in _all_keys(root) if key.split(".")[-1] in (word, initials) and key not in here]
    return " or ".join(here + others) or f"one of {', '.join(section.model_fields)}"


def _all_keys(section: type[Section], above: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield above + name
        inner = section_of(field)
        yield from _all_keys(inner, f"{above}{name}.") if inner else ()


def _plain(value: Any) -> Any:
    """A value as YAML has it; a folder named ~ is not the home folder."""
    if isinstance(value, Path):
        return f"./{value}" if str(value).startswith("~") else str(value)
    return list(value) if isinstance(value, tuple) else value


def _choices(names: Sequence[str]) -> str:
    """a | b | c, or the first of many."""
    return " | ".join(names if len(" | ".join(names)) <= FEW_COLUMNS else [*names[:3], "…"])


def lines(section: Section, indent: str, comments: bool) -> Iterator[str]:
    """A section as lines of YAML, each with what its key means if asked for."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        inner = isinstance(value, Section)
        block = inner or isinstance(value, dict) and value
        line = f"{indent}{name}:" if block else f"{indent}{name}: {inline(_plain(value))}"
        choices = _choices(get_args(field.annotation)) if get_origin(field.annotation) is Literal else ""
        description = type(value).__doc__ if inner else "; ".join(filter(None, [choices, field.description]))
        yield f"{line:{COMMENT_COLUMN}} # {description}" if comments and description else line
        if inner:
            yield from lines(value, indent + "  ", comments)
        elif block:
            text = yaml.dump(
                value, Dumper=Writer, default_flow_style=False, width=1 << 30, allow_unicode=True, sort_keys=False
            )
            yield from (f"{indent}  {each}" for each in text.splitlines())
