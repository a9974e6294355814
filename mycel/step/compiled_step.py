"""What a step became for one signature of the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mycel import lower, plan
from mycel.capture import Facts, PythonCall
from mycel.capture.bind import Call
from mycel.feed import Feed
from mycel.ir import Program
from mycel.islands import TimedCode
from mycel.plan import Fp8Products
from mycel.run import Replayed


@dataclass(frozen=True)
class CompiledStep:
    """One compiled signature of the batch: `call` takes the whole of it, `local` this rank's part."""

    lowered: lower.Lowered
    source: str
    plan: plan.Plan
    call: Call
    local: Call
    feed: Feed
    signature: tuple[Any, ...]
    facts: tuple[Facts, ...] = ()
    replayed: Replayed | None = None  # on a GPU
    islands: tuple[PythonCall, ...] = ()
    timed: TimedCode | None = None  # where there are islands
    code: Callable[..., Any] | None = None  # what was generated, as it is
    fp8: Fp8Products | None = None  # which products are in 8 bits

    @property
    def program(self) -> Program:
        return self.lowered.program
