"""Equations of a backward pass in two: what others wait for, and the rest.

    dx, dw = call(w, x, dy, block=@f_backward)    =>    dx, r = call(w, dy, block=@f_backward_inputs)
                                                        dw = call(x, dy, r, block=@f_backward_weights)

Blocks are opened as deep as they go: an equation belongs to the first part if what is waited for needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from mycel.ir import Atom, Block, Builder, Eqn, Params, Ref, Var, call, free_name

Indexed = tuple[int, Eqn]


@dataclass(frozen=True)
class HalfCalls:
    """A block in two: `first` gives the outputs at `early` and the values `passed`; `second` takes inputs at `reads`
    and these, and gives the outputs at `late`."""

    first: str
    second: str
    takes: tuple[int, ...]
    early: tuple[int, ...]
    passed: tuple[Var, ...]
    reads: tuple[int, ...]
    late: tuple[int, ...]


@dataclass
class CallSplitter:
    """Splits equations of one block; `blocks` grows by the halves of those they call."""

    blocks: dict[str, Block]
    around: Block
    _halves: dict[tuple[str, frozenset[int]], HalfCalls | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = Builder(names_of=self.around)

    def split(self, eqns: Sequence[Indexed], wanted: Collection[Var]) -> tuple[list[Indexed], list[Indexed]]:
        """(what the wanted values need, the rest), both in their order."""
        return self._split(eqns, wanted, self.names)

    def _split(
        self, eqns: Sequence[Indexed], wanted: Collection[Var], names: Builder
    ) -> tuple[list[Indexed], list[Indexed]]:
        need, first, second = set(wanted), list[Indexed](), list[Indexed]()
        for i, eqn in reversed(eqns):
            early = frozenset(k for k, v in enumerate(eqn.outputs) if v in need)
            if not early and not eqn.op.effect:
                second.append((i, eqn))
                continue
            halves = self._halves_of(eqn.params["block"], early) if eqn.op is call else None
            if halves is None:
                first.append((i, eqn))
                need.update(eqn.vars)
                continue
            a, b = _calls(eqn, halves, names)
            first.append((i, a))
            second.append((i, b))
            need.update(a.vars)
        return first[::-1], second[::-1]

    def _halves_of(self, name: str, early: frozenset[int]) -> HalfCalls | None:
        """None where all of a block is needed for these outputs."""
        key = (str(name), early)
        if key not in self._halves:
            self._halves[key] = self._made(str(name), early)
        return self._halves[key]

    def _made(self, name: str, early: frozenset[int]) -> HalfCalls | None:
        block = self.blocks[name]
        names = Builder(names_of=block)
        wanted = {x for i in early if isinstance(x := block.outputs[i], Var)}
        first, second = self._split(list(enumerate(block.eqns)), wanted, names)
        if not second:
            return None
        late_values = {v for _, e in second for v in e.outputs}
        at_once = tuple(i for i, x in enumerate(block.outputs) if x not in late_values)
        late = tuple(i for i, x in enumerate(block.outputs) if x in late_values)
        if not late:
            return None
        in_first = {v for _, e in first for v in e.outputs}
        passed = tuple(dict.fromkeys(v for _, e in second for v in e.vars if v in in_first))
        reads = {v for _, e in second for v in e.vars}
        ends = {block.outputs[i] for i in at_once}
        takes = tuple(i for i, v in enumerate(block.inputs) if v in ends or any(v in e.inputs for _, e in first))
        second_inputs = tuple(i for i, v in enumerate(block.inputs) if v in reads)
        outs: list[Atom] = [*(block.outputs[i] for i in at_once), *passed]
        before = Block(tuple(block.inputs[i] for i in takes), tuple(e for _, e in first), tuple(outs))
        inputs = (*(block.inputs[i] for i in second_inputs), *passed)
        after = Block(inputs, tuple(e for _, e in second), tuple(block.outputs[i] for i in late))
        names_of = self._entered(f"{name}_inputs", before), self._entered(f"{name}_weights", after)
        return HalfCalls(*names_of, takes, at_once, passed, second_inputs, late)

    def _entered(self, name: str, block: Block) -> str:
        """The free name under which a block is in the table now."""
        unique = free_name(name, self.blocks)
        self.blocks[unique] = block
        return unique


def _calls(eqn: Eqn, halves: HalfCalls, names: Builder) -> tuple[Eqn, Eqn]:
    """A call as two."""
    kept = tuple(Var(names.name(v.name), v.type) for v in halves.passed)
    first = Eqn(
        call,
        tuple(eqn.inputs[i] for i in halves.takes),
        Params(block=Ref(halves.first)),
        (*(eqn.outputs[i] for i in halves.early), *kept),
        eqn.source,
        eqn.phase,
    )
    second = Eqn(
        call,
        (*(eqn.inputs[i] for i in halves.reads), *kept),
        Params(block=Ref(halves.second)),
        tuple(eqn.outputs[i] for i in halves.late),
        eqn.source,
        eqn.phase,
    )
    return first, second
