"""Ranks that wait for each other in different places, found from what they tell of themselves.

    rank 0 waits in all_reduce over dp, the 7th      rank 1 has begun six, and waits in an agreement
    rank 1 waits in an agreement, the 2nd            rank 0 has come to one, and waits in all_reduce over dp

Messages of a kind between the same ranks are begun in one order on all of them, so each is known by its number.  A rank
that is held in a wait can begin nothing; it *owes* another one whatever that waits for and it has not begun.  Ranks
each of which is owed something by one of them will wait for ever.  So will two that are held at the same number of the
same ranks, in different collectives.  A rank that computes, or compiles for minutes, is held nowhere, and late at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Beat = dict[str, Any]


class Turn(NamedTuple):
    """Of the messages of a kind between some ranks, the n-th."""

    kind: str
    nth: int
    ranks: tuple[int, ...]


def debts(beats: Mapping[int, Beat], me: int, begun: Mapping[str, int]) -> dict[str, int]:
    """Which ranks are held by what this one has not begun: each with the number of its wait."""
    return {
        str(rank): place["number"]
        for rank, beat in beats.items()
        if rank != me
        for place in beat["held"]
        if any(me in ranks and begun.get(kind, 0) < nth for kind, nth, ranks in place["turns"])
    }


def crossed(beats: Mapping[int, Beat]) -> list[int]:
    """The ranks that wait for each other, and will for ever."""
    held = {rank: {place["number"] for place in beat["held"]} for rank, beat in beats.items()}
    stuck = {rank for rank in beats if held[rank]}
    while late := {r for r in stuck if not any(beats[s]["owes"].get(str(r)) in held[r] for s in stuck)}:
        stuck -= late
    return sorted(stuck | _at_odds(beats))


def _at_odds(beats: Mapping[int, Beat]) -> set[int]:
    """Ranks whose turn is the same, in different collectives."""
    seen: dict[tuple[str, int], dict[str, list[int]]] = {}
    for rank, beat in beats.items():
        for place in beat["held"]:
            for kind, nth, _ in place["turns"] if place["collective"] else []:
                seen.setdefault((kind, nth), {}).setdefault(place["collective"], []).append(rank)
    return {rank for by_name in seen.values() if len(by_name) > 1 for ranks in by_name.values() for rank in ranks}


def described(beats: Mapping[int, Beat], ranks: list[int]) -> str:
    """What each of them waits in, and what it was doing."""
    lines = []
    for rank in ranks:
        place = beats[rank]["held"][0]
        at, doing = (f", {place['at']}" if place["at"] else ""), beats[rank]["doing"]
        lines.append(f"  {f'rank {rank}':<9} waits in {place['what']}{at}{f' ({doing})' if doing else ''}")
    return "\n".join(lines)
