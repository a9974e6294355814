"""Text with values of traced tensors in it, which stands for what it will be when the program runs.

    f"loss {loss}"                      text: "loss Traced(3: f32[])"
    text + "!", "%s" % text, print      more of such text, and what is said of it
    len(text), text[:4], text == "a"    refused: the call around becomes an island, which has the text itself

It may be put together, said, returned and raised; whatever looks into it is refused.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

from mycel.capture.fence import refuse
from mycel.errors import CaptureError
from mycel.ir import Var

PATTERN = re.compile(r"(Traced\(\d+: [^\s()]+\))")  # what stands for a value


class TextOf(NamedTuple):
    """Text of a value: how it is written (`ops/effects.py`), and the line that asked for it."""

    var: Var
    form: str
    source: str

    @property
    def is_word(self) -> bool:
        """Is it one line without quotes and backslashes, as numbers are?"""
        return self.form == "number" or (self.form.startswith("format") and self.var.type.shape == ())


class TextRecord(Protocol):
    """A capture under way, and its texts by what stands for them."""

    running: bool
    texts: dict[str, TextOf]


class TracedText(str):
    """Such text."""

    record: TextRecord

    def __new__(cls, text: str, record: TextRecord) -> TracedText:
        new = super().__new__(cls, text)
        new.record = record
        return new

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        words = (self.record.texts.get(text) for text in PATTERN.findall(self))
        if self.record.running and not all(word is not None and word.is_word for word in words):
            raise refuse_text("repr")
        return self._like(super().__repr__())

    def __format__(self, form: str) -> str:
        return self._like(super().__format__(form)) if not form or not self.record.running else _refuse("format")

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: Any) -> Any:
        return self._like(super().__add__(other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return self._like(str.__add__(other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: Any) -> Any:
        return self._like(super().__mul__(times))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> Any:
        return self._like(super().__mod__(values))

    def __rmod__(self, form: Any) -> Any:
        return self._like(str.__mod__(form, self)) if isinstance(form, str) else NotImplemented

    def join(self, items: Any) -> Any:
        return self._like(super().join(items))

    def format(self, *args: Any, **kwargs: Any) -> Any:
        return self._like(super().format(*args, **kwargs))

    def format_map(self, values: Any) -> Any:
        return self._like(super().format_map(values))

    def __reduce__(self) -> Any:
        return str, (str.__str__(self),)

    def _like(self, text: str) -> Any:
        return TracedText(text, self.record) if self.record.running else text


def _looking(name: str) -> Any:
    """A method of text that looks into it."""
    plain = getattr(str, name)

    def method(self: TracedText, *args: Any, **kwargs: Any) -> Any:
        return _refuse(name) if self.record.running else plain(self, *args, **kwargs)

    return method


def _refuse(name: str) -> Any:
    raise refuse_text(name.strip("_"))


_OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "len", "iter", "getitem", "contains")
for _name in (
    *(f"__{name}__" for name in _OPERATORS),
    *(name for name in dir(str) if not name.startswith("_") and name not in vars(TracedText)),
):
    if _name != "maketrans":
        setattr(TracedText, _name, _looking(_name))


def refuse_text(use: str) -> CaptureError:
    """Python looks into text of a traced tensor."""
    return refuse(
        f"text with the value of a traced tensor in it was looked into ({use}), and that value is not known while the "
        "program is captured",
        "printing, logging or returning the text as a whole, or deciding by the tensor itself",
    )


def marked(record: TextRecord, text: str) -> str:
    """Text as such where values of traced tensors are in it."""
    if record.texts and type(text) is str and "Traced(" in text and PATTERN.search(text):
        return TracedText(text, record)
    return text


def holds_text(value: Any, depth: int = 4) -> bool:
    """Is there such text in it?"""
    if type(value) is TracedText:
        return True
    if depth and isinstance(value, (list, tuple)):
        return any(holds_text(item, depth - 1) for item in value)
    return bool(depth) and isinstance(value, dict) and any(holds_text(item, depth - 1) for item in value.values())


def shown_types(text: str) -> str:
    """Text for people, of a program that does not know the values: Traced(3: f32[2]) => f32[2]"""
    return PATTERN.sub(lambda match: match[1].partition(": ")[2][:-1], str.__str__(text))
