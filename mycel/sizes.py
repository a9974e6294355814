"""Sizes in bytes, read and shown: "20GiB" <-> 21474836480; and counts and spans of time, shown."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from mycel.errors import TrainError

SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(text: str) -> int:
    """20GiB => 21474836480, 500MB => 500000000."""
    match = SIZE.fullmatch(text)
    if not match:
        raise TrainError(f"{text!r} is not a size in bytes\n  try       20GiB, 500MB")
    prefix = (match[2] or "").lower()
    unit = (1024 if prefix.endswith("i") else 1000) ** " kmgt".index(prefix[:1] or " ")
    size = int(Fraction(match[1]) * unit)
    if not size:
        raise TrainError(f"{text!r} is less than one byte\n  try       20GiB, 500MB")
    return size


def shown(size: float) -> str:
    """21474836480 => 20.00 GiB"""
    for unit, of in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= of:
            return f"{size / of:.2f} {unit}"
    return f"{size:.0f} bytes"


def rounded_up(size: float) -> int:
    """The least size of no fewer bytes that `shown` says to the byte."""
    unit = next((of for of in (1 << 30, 1 << 20, 1 << 10) if size >= of), 1)
    return math.ceil(math.ceil(size / unit * 100) / 100 * unit) if unit > 1 else math.ceil(size)


def counted(count: int, noun: str) -> str:
    """1200, token => 1,200 tokens; 1, token => 1 token"""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def span(seconds: float) -> str:
    """0.00004 => 40 µs, 0.0123 => 12.3 ms, 1.234 => 1.23 s, 21.488 => 21.5 s, 3723 => 1 h 02 min"""
    size = abs(seconds)
    if 0 < size < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if size < 0.99995:
        return f"{seconds * 1e3:.1f} ms"
    if size < 119.95:
        return f"{seconds:.2f} s" if size < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(size), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{'-' * (seconds < 0)}{f'{hours:,} h {minutes:02} min' if hours else f'{minutes} min {rest:02} s'}"
