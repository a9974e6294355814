"""What ranks tell each other besides the messages of a step: texts, through the store at which they met."""

from __future__ import annotations

import time

from torch import distributed as dist

from mycel.errors import RunError
from mycel.run.rendezvous import LATER_S, STOP, Rendezvous


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
        end, pause_s = time.monotonic() + self.meeting.timeout_s + LATER_S, 0.001
        while not self.store.check(keys):
            if self.all.check([STOP]):
                raise RunError(self.all.get(STOP).decode())
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise RunError(
                    f"no word from ranks {missing} for {self.meeting.timeout_s:g} s\n  try       a look at their logs"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.05)
        return [value.decode() for value in self.store.multi_get(keys)]
