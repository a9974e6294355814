"""Names for refusals: parameters near a pattern that matches none of them, and what is near a misspelt word."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

SHOWN = 3


def near(word: object, known: Iterable[str], otherwise: str = "") -> str:
    """What to try instead of a word that is not known."""
    known = list(known)
    others = known[0] if len(known) == 1 else f"one of {', '.join(known)}"
    return next(iter(get_close_matches(str(word), known, 1)), otherwise or others)


def unmatched(pattern: str, names: Iterable[str]) -> str:
    """A refusal's lines: names like the pattern, whole ones or for *.proj.weight the ends of names; where none is near,
    some of those there are."""
    names = list(names)
    end = pattern.removeprefix("*.")
    ends = dict.fromkeys("*." + ".".join(name.split(".")[-end.count(".") - 1 :]) for name in names)
    known = names if end == pattern else list(ends)
    what = f"{pattern} matches no parameter"
    if near := get_close_matches(pattern, known, SHOWN, 0.3):
        return f"{what}\n  try       {', '.join(near)}"
    more = f", … ({len(known)} in all)" if len(known) > SHOWN else ""
    return f"{what}, and none is near it\n  known     {', '.join(known[:SHOWN])}{more}"
