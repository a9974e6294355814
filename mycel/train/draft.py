"""How far to draft: the number of tokens that makes a text come fastest, from seconds and shares measured on the way.

    token ──▶ weights in 8 bits ──▶ d1 ──▶ weights in 8 bits ──▶ d2 ──▶ …       each a quarter of the bytes
    token, d1, d2, … ──▶ the weights as they are, read once ──▶ what really follows each of them

A draft changes no text: each token is drawn from what the weights as they are say of its place, and drafted tokens are
drawn with the same random numbers.  With a chance c that a drafted token is right, one of n tokens brings
1 + c + … + c^n tokens in n draft_s + several_s, where a reading for one token takes one_s.  Where no n makes that
faster there is none, and less and less often a try.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.8  # weight of what was, in averages of seconds
LONG_MEMORY = 0.95  # … of how often drafts were right
EXPECTED = 4.5, 5.0  # of so many, before there were any
PAYS = 1.1  # times as many tokens a second: less is within what is measured
RARELY = 16, 256  # tokens to the next try where drafts do not pay: at first, at most
BYTES = 1 << 26  # of weights: fewer lie in caches, and are read as fast as they are used
MAKING = 2  # times the code for one token is made: that of a draft, and that of several tokens


@dataclass
class Pace:
    """What a text's tokens take, and how often drafts are right; `most` tokens of a draft."""

    most: int
    one_s: float | None = None  # a reading of the weights for one token
    several_s: float | None = None  # … for 1 + `most`
    draft_s: float | None = None  # a drafted token
    drafted: int = 0  # tokens
    right: int = 0  # of them
    _tried: float = EXPECTED[1]  # of late: tokens of which it is known whether they were right …
    _right: float = EXPECTED[0]  # … and that were
    _wait: int = RARELY[0]
    _waited: int = 0

    @property
    def chance(self) -> float:
        """That a drafted token is right."""
        return self._right / self._tried

    def took(self, what: str, s: float) -> None:
        """Seconds of one, several or draft."""
        before = getattr(self, f"{what}_s")
        setattr(self, f"{what}_s", s if before is None else MEMORY * before + (1 - MEMORY) * s)

    def ahead(self, guessed: float | None) -> int | None:
        """How many tokens to draft; None: a guess is better, which brings so many tokens on average."""
        best = max(range(self.most + 1), key=self._tokens_a_second)
        rate = self._tokens_a_second(best)
        if guessed is not None and (1 + guessed) / self._several_s() >= rate:
            return None
        self._waited += 1
        if rate > PAYS * self._tokens_a_second(0):
            if self._waited < RARELY[1]:
                self._wait = RARELY[0]
                return best
            self._waited = 0  # what a reading for one token takes is measured again
            return 0
        if self._waited < self._wait:
            return 0
        self._waited, self._wait = 0, min(2 * self._wait, RARELY[1])
        return 1

    def saved_s(self) -> float:
        """Of each token, by the best draft."""
        return 1 / self._tokens_a_second(0) - 1 / max(map(self._tokens_a_second, range(self.most + 1)))

    def judge(self, drafted: int, right: int) -> None:
        """How many tokens of a draft were right; of those behind a wrong one nothing is known."""
        self.drafted += drafted
        self.right += right
        for i in range(min(right + 1, drafted)):
            self._right = LONG_MEMORY * self._right + (i < right)
            self._tried = LONG_MEMORY * self._tried + 1

    def _tokens_a_second(self, n: int) -> float:
        one_s = self.one_s or 1.0
        if n == 0:
            return 1 / one_s
        draft_s = one_s / 4 if self.draft_s is None else self.draft_s
        return sum(self.chance**i for i in range(n + 1)) / (n * draft_s + self._several_s())

    def _several_s(self) -> float:
        return self.several_s or self.one_s or 1.0
