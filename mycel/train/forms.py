"""What a setting may be: each type carries its rule and the words for it.

    Share = number, >= 0, < 1, "a number from 0 to below 1"
    ->  optimizer.momentum is 1.5, not a number from 0 to below 1

Numbers are strict: `true` is no 1, and "3" is no 3.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BeforeValidator, JsonValue, Strict, StringConstraints

from mycel.errors import TrainError
from mycel.sizes import parse_bytes

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Form:
    """What a value has to be, in words; `verbatim`: the text of an argument is taken as it stands."""

    words: str
    example: str = ""
    verbatim: bool = False


def _size(text: str) -> str:
    try:
        parse_bytes(text)
    except TrainError as e:
        raise ValueError(str(e)) from None
    return text


def _home(given: Any) -> Any:
    """~/x => /home/me/x; refuses what could not be the name of a file."""
    if not isinstance(given, str | Path) or str(given) == "" or "\0" in str(given):
        raise ValueError("not a path")
    return type(given)(os.path.expanduser(given))


def _homes(given: Any) -> Any:
    return tuple(_home(each) for each in given) if isinstance(given, list | tuple) and given else _home(given)


def _axes(given: dict[str, Any]) -> dict[str, int]:
    """Names of axes with how many ranks lie along each."""
    if not given or not all(name.isidentifier() and type(n) is int and 1 <= n <= LARGEST for name, n in given.items()):
        raise ValueError("not a mesh")
    return given


def _some(given: Any) -> Any:
    """What is not empty."""
    if not given:
        raise ValueError("empty")
    return given


def _steps(warmup: float) -> float:
    """100.0 => 100, 0.05 => 0.05; refuses 1.5."""
    if warmup >= 1 and warmup != int(warmup):
        raise ValueError("neither whole nor below 1")
    return warmup if 0 < warmup < 1 else int(warmup)


Whole = Annotated[int, Strict(), Ge(0), Le(LARGEST), Form(f"a whole number from 0 to {LARGEST}")]
Count = Annotated[int, Strict(), Ge(1), Le(LARGEST), Form(f"a whole number from 1 to {LARGEST}")]
Length = Annotated[int, Strict(), Ge(2), Le(LARGEST), Form(f"a whole number from 2 to {LARGEST}")]
Positive = Annotated[float, Strict(), Gt(0), Form("a number above 0")]
Amount = Annotated[float, Strict(), Ge(0), Form("a number of at least 0")]
Share = Annotated[float, Strict(), Ge(0), Lt(1), Form("a number from 0 to below 1")]
Part = Annotated[float, Strict(), Gt(0), Lt(1), Form("a number between 0 and 1")]
Portion = Annotated[float, Strict(), Ge(0), Le(1), Form("a number from 0 to 1")]
Betas = Annotated[tuple[Share, Share], Form("a list of 2 numbers from 0 to below 1")]
Warmup = Annotated[
    float,
    Strict(),
    Ge(0),
    Le(LARGEST),
    AfterValidator(_steps),
    Form("a whole number of steps, or a fraction of them below 1"),
]
Switch = Annotated[bool, Strict(), Form("true or false")]
Compile = Annotated[Literal["auto"] | Annotated[bool, Strict()], Form("auto, true or false")]
Text = Annotated[str, Form("text", verbatim=True)]
Names = Annotated[tuple[Annotated[str, MinLen(1)], ...], MinLen(1), Form("a list of names")]
Weights = Annotated[tuple[Positive, ...], MinLen(1), Form("a list of numbers above 0", "[0.7, 0.3]")]
Lengths = Annotated[tuple[Length, ...], MinLen(1), Form("a list of whole numbers from 2", "[512, 1024]")]
Size = Annotated[str, AfterValidator(_size), Form("a size with its unit", "20GiB")]
Device = Annotated[
    str, StringConstraints(pattern=r"^(auto|cpu|cuda|cuda:[0-9]{1,3})$"), Form("auto, cpu, cuda or cuda:N")
]
Folder = Annotated[Path, BeforeValidator(_home), Form("a path", verbatim=True)]
Source = Annotated[str, BeforeValidator(_home), Form("a path", verbatim=True)]
Sources = Annotated[str | tuple[str, ...], BeforeValidator(_homes), Form("a path or a list of paths", verbatim=True)]
Free = Annotated[dict[str, JsonValue], Form("a mapping of plain values", "{model_type: llama}")]
Options = Annotated[dict[str, JsonValue], Form("a mapping of options", "{amsgrad: true}")]
Axes = Annotated[
    dict[str, Any], AfterValidator(_axes), Form("axes with their sizes, whole numbers from 1", "{dp: 2, tp: 2}")
]
Plan = Annotated[
    str | dict[str, JsonValue],
    AfterValidator(_some),
    Form("names of ready plans, a .yaml file or a mapping", "zero3+tp"),
]
