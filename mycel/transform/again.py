"""What a stretch of equations reads and an earlier one computes element by element is computed again where it is read,
if that reads no more: then it never lies in memory.

    z: bf16[8,100] = linear(x, w)          main_1                 z: bf16[8,100] = linear(x, w)          main_1
    f: f32[8,100]  = cast(z)                                      f: f32[8,100]  = cast(z)
    m: f32[8,1]    = amax(f)                                      m: f32[8,1]    = amax(f)
    M: f32[8,1]    = all_reduce(m)                           =>   M: f32[8,1]    = all_reduce(m)
    s: f32[8,100]  = sub(f, M)             main_2, reads f        f: f32[8,100]  = cast(z)               main_2, reads z
    t: f32[8,1]    = sum(exp(s))                                  s: f32[8,100]  = sub(f, M)
                                                                  t: f32[8,1]    = sum(exp(s))

Inside a stretch a compiler makes one kernel of such equations and what they read or write.  What is in memory anyway,
as a result of the block or an operand of a call or a message, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mycel.ir import Block, Eqn, Var
from mycel.transform.fold import is_pointwise

MOST = 8  # equations that a value is computed by again
LARGER = 1.1  # times the bytes of a value that may be read instead of it


@dataclass(frozen=True)
class Origin:
    """The equations that a value is computed by, in order, and what these read."""

    eqns: tuple[Eqn, ...]
    reads: frozenset[Var]

    @property
    def bytes(self) -> int:
        return sum(v.type.bytes for v in self.reads)


class ComputedAgain:
    """Of one block; `stretches` are its equations by stretch."""

    def __init__(self, block: Block, stretches: Sequence[Sequence[Eqn]]) -> None:
        self._makers: Mapping[Var, Eqn] = {v: e for run in stretches if len(run) > 1 for e in run for v in e.outputs}
        alone = [v for run in stretches if len(run) == 1 for v in run[0].vars]
        self._in_memory = frozenset(alone) | {v for v in block.outputs if isinstance(v, Var)}
        self._origins: dict[Var, Origin | None] = {}

    def before(self, run: Sequence[Eqn]) -> list[Eqn]:
        """What a stretch begins with, so that it need not read these values."""
        own = {v for eqn in run for v in eqn.outputs}
        eqns: dict[Var, Eqn] = {}
        for v in dict.fromkeys(v for eqn in run for v in eqn.vars if v not in own):
            origin = self.origin(v)
            for eqn in origin.eqns if origin is not None else ():
                eqns[eqn.outputs[0]] = replace(eqn, phase=run[0].phase)
        return list(eqns.values())

    def origin(self, v: Var) -> Origin | None:
        """How a value is computed again; None: it is read."""
        if v not in self._origins:
            self._origins[v] = self._origin(v)
        return self._origins[v]

    def _origin(self, v: Var) -> Origin | None:
        eqn = self._makers.get(v)
        if eqn is None or v in self._in_memory or not v.ndim or not is_pointwise(eqn.op) or len(eqn.outputs) > 1:
            return None
        eqns: dict[Var, Eqn] = {}
        reads = set[Var]()
        for operand in eqn.vars:
            origin = self.origin(operand)
            if origin is None:
                reads.add(operand)
            else:
                eqns |= {e.outputs[0]: e for e in origin.eqns}
                reads |= origin.reads
        computed = Origin((*eqns.values(), eqn), frozenset(reads))
        return computed if len(computed.eqns) <= MOST and computed.bytes <= LARGER * v.type.bytes else None
