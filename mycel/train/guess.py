"""What may follow in a text, as it followed before: so that one reading of the weights serves several tokens.

    … the cat sat on the mat because the cat ─▶ sat on the mat      the last two tokens stood there before

A guess costs little and changes nothing: what the model says of each guessed place is kept as long as the text goes the
same way.  In a text that does not repeat itself guesses are rarely right; then only one in RARELY is made.
"""

from __future__ import annotations

from collections.abc import Iterable

LENGTH = 4  # tokens guessed at once: with the one that is known 5 rows, which cost little more than one
WORTH = 0.25  # tokens a guess must bring on average
RARELY = 8
MEMORY = 0.8  # weight of what was, in that average


class Guesses:
    """A text so far and the tokens that may follow it; the same for the same text."""

    def __init__(self, ids: Iterable[int]) -> None:
        self.text: list[int] = []
        self._behind: dict[tuple[int, int], int] = {}  # two tokens -> the place behind them
        self.brought = 1.0  # tokens that guesses brought, on average
        self._skipped = 0
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        """The text goes on."""
        if len(self.text) >= 2:  # what stands behind the last two is known from now on
            self._behind[self.text[-2], self.text[-1]] = len(self.text)
        self.text.append(token)

    def next(self) -> list[int]:
        """The tokens that may follow, LENGTH or none."""
        at = self._behind.get((self.text[-2], self.text[-1])) if len(self.text) >= 2 else None
        if at is None:
            return []
        if self.brought < WORTH:
            self._skipped = (self._skipped + 1) % RARELY
            if self._skipped:
                return []
        period = len(self.text) - at  # a guess that reaches the end goes on as if the text went round
        return [self.text[at + i % period] for i in range(LENGTH)]

    def judge(self, right: int) -> None:
        """How many tokens of a guess were right."""
        self.brought = MEMORY * self.brought + (1 - MEMORY) * right
