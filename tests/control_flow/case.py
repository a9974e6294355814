"""What a case of the zoo is: a function of f64 tensors, the argument lists to try it on, and what its program must
hold."""

from __future__ import annotations

import dataclasses
import functools

import torch

T = functools.partial(torch.tensor, dtype=torch.float64)
X = T([0.5, -1.5, 2.0])
Y = T([1.0, 0.25, -0.75])
N = torch.tensor
ANY = frozenset({"cond", "loop", "scan"})


@dataclasses.dataclass(frozen=True)
class Case:
    fn: object
    arguments: tuple[tuple, ...]
    has: frozenset[str]


CASES: dict[str, Case] = {}


def case(*arguments, has=ANY, name=None):
    def enter(fn):
        key = name or fn.__name__
        assert key not in CASES, key
        CASES[key] = Case(fn, arguments, frozenset(has))
        return fn

    return enter
