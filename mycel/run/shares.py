"""What ranks tell each other besides the messages of a step: texts, through the store at which they met."""

from __future__ import annotations

from torch import distributed as dist

from mycel.run.rendezvous import LATER_S, Rendezvous
from mycel.run.watch import Watch


class Shares:
    """Gives each rank the texts of all, round by round, through a connection of its own to the store.  `watch`: of the
    thread that takes the steps, where that is the one that calls."""

    def __init__(self, meeting: Rendezvous, name: str, watch: Watch | None = None) -> None:
        self.meeting, self.all, self.name, self.watch = meeting, meeting.connect(), name, watch
        self.store = dist.PrefixStore(f"{meeting.name}/share/{name}", self.all)
        self.round = 0

    def __call__(self, text: str) -> list[str]:
        self.round += 1
        self.store.set(f"{self.round}/{self.meeting.rank}", text)
        if self.round > 2:  # who is in this round has read all of that
            self.store.delete_key(f"{self.round - 2}/{self.meeting.rank}")
        keys = [f"{self.round}/{rank}" for rank in range(self.meeting.world)]
        self._wait(keys)
        return [value.decode() for value in self.store.multi_get(keys)]

    def _wait(self, keys: list[str]) -> None:
        """Until all have come; a watch has the first word when they do not."""
        what, watch = f"a word of each rank ({self.name})", self.watch
        within_s = None
        if watch is not None:
            ranks, within_s = range(self.meeting.world), self.meeting.timeout_s + LATER_S
            place = watch.enter(what, "", ranks, [watch.begin(f"share {self.name}", ranks)])
            place.hold()
        missing = lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        self.meeting.until(lambda: self.store.check(keys), what, missing, within_s, self.all, missing)
        if watch is not None:
            watch.leave(place)
