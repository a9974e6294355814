"""What ZeRO splits, as a plan says it.

    zero: 3 over dp                                   1: optimiser state, 2: gradients too, 3: parameters too
    zero: {"*norm*": 1, "*.bias": 0, "*": 3 over dp}  by pattern: the first that matches counts, the axes are those of *

A parameter at level 1 or 2 is held whole and needs no gathering; one at 0 is updated by every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mycel.errors import PlanError

_LEVEL = re.compile(r"\s*([0-3])\s*(?:over\s+([\w. ,]+))?\s*")
ALL = "*"


def read_zero(entry: Any, where: str) -> tuple[int, tuple[str, ...], dict[str, int]]:
    """(level, axes, levels of patterns that have another)"""
    if not isinstance(entry, Mapping):
        return *_level(entry or 0, where), {}
    if ALL not in entry:
        raise PlanError(f'{where}: zero by pattern has no "*"\n  try       zero: {{…, "*": 3 over dp}}')
    most, over = _level(entry[ALL], where)
    levels = {}
    for pattern, said in entry.items():
        if pattern == ALL:
            continue
        level, axes = _level(said, where)
        if level > most or (axes and axes != over):
            raise PlanError(
                f'{where}: zero: {pattern}: {said}, but "*": {entry[ALL]}\n'
                f'  try       for "*" the highest level and the axes, for others a lower level alone'
            )
        levels[str(pattern)] = level
    return most, over, levels


def zero_data(level: int, over: tuple[str, ...], levels: Mapping[str, int]) -> Any:
    """As `read_zero` takes it."""
    all_ = f"{level} over {'.'.join(over)}"
    return {**levels, ALL: all_} if levels else all_


def _level(said: Any, where: str) -> tuple[int, tuple[str, ...]]:
    match = _LEVEL.fullmatch(str(said))
    if match is None:
        raise PlanError(f"{where}: zero is {str(said)!r}\n  try       1, 2 or 3 over an axis: zero: 3 over dp")
    return int(match[1]), tuple(re.split(r"[\s,.]+", match[2].strip())) if match[2] else ()
