"""Calls that ranks begin together: who comes from one kind of call to another (a step, an evaluation, a state dict)
meets the others through the store, before its first message.

A rank that makes a call alone would send what fits nothing that others wait for, and gloo ends a process that is sent
a message of another size: so it has to be known before it sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mycel.run.rendezvous import Rendezvous
from mycel.run.watch import Watch


class SharedCalls:
    """What the user has called on this rank, whose messages come next, and what ranks have last begun together."""

    def __init__(self, meeting: Rendezvous | None) -> None:
        self.meeting = meeting
        self.call = ""
        self.last: dict[tuple[int, ...], str] = {}

    @contextmanager
    def calling(self, what: str, often: bool = False) -> Iterator[None]:
        """What the user calls, as others are told; the outermost counts.  What is called `often` is begun together only
        where something else was called before."""
        before = self.call
        if not before and not often:
            self.last.clear()
        self.call = before or what
        try:
            yield
        finally:
            self.call = before

    def begin(self, watch: Watch, ranks: Sequence[int], at: str) -> None:
        """Where these ranks were in another call, they come to this one together."""
        group = tuple(ranks)
        if not self.call or self.last.get(group) == self.call:
            return
        assert self.meeting is not None
        turn = watch.begin(f"calls of {group[0]}-{group[-1]}", group)
        place = watch.enter(self.call, at, group, [turn], self.call)
        place.hold()
        self.meeting.meet(f"calls/{group}/{turn.nth}/{self.call}", len(group), self.call, group)
        watch.leave(place)
        self.last[group] = self.call
