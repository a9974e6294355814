"""What ranks tell each other besides the messages of a step: texts, through the store at which they met."""

from __future__ import annotations

from torch import distributed as dist

from mycel.run.rendezvous import Rendezvous


class Shares:
    """Gives each rank the texts of all, round by round, through a connection of its own to the store."""

    def __init__(self, meeting: Rendezvous, name: str) -> None:
        self.meeting, self.all = meeting, meeting.connect()
        self.store = dist.PrefixStore(f"{meeting.name}/share/{name}", self.all)
        self.round = 0

    def __call__(self, text: str) -> list[str]:
        self.round += 1
        self.store.set(f"{self.round}/{self.meeting.rank}", text)
        if self.round > 2:  # who is in this round has read all of that
            self.store.delete_key(f"{self.round - 2}/{self.meeting.rank}")
        keys = [f"{self.round}/{rank}" for rank in range(self.meeting.world)]
        self.meeting.until(
            lambda: self.store.check(keys),
            "a word of each rank",
            lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])],
            world=self.all,
        )
        return [value.decode() for value in self.store.multi_get(keys)]
