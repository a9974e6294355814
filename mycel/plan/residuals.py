"""What backward needs of forward: kept, or computed again.  A minimum cut over each block, in seconds.

For a block f and its backward b, with N the values of f that b reads.  For each value v and equation e of f

    a_v   v is at hand in backward                     r_e   e is computed again in backward
    minimise    Σ_e r_e · seconds(e)  +  Σ_v [a_v and its equation is not computed again] · keep(v)
    such that   a_v for v in N;      r_e implies a_u for every operand u of e

    keep(v) = price · bytes(v)  +  the seconds of writing v to memory, where a compiler would never have written it

which is a minimum cut: an arc source -> e of seconds(e), e -> v of keep(v), u -> e and v -> sink (v in N) without end.
Inputs of the whole step are there anyway and cost nothing, nor do results of calls that equations between the calls
read in backward.  `price` is what a byte of memory costs in seconds: 0 gives the fastest program; the larger it is, the
less is kept.  Up to the price that holds without a budget no product is computed again.  Calls in a block count as one
equation; between the calls of the outermost block they are not computed again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mycel.ir import CONTROL, Atom, Block, Eqn, Program, Var, call, chains, lifetimes
from mycel.plan.cost import Costs

# without a budget, keeping a byte for backward is worth moving four: about what compilers' own rules come to
KEEPING = 4.0
ENDLESS = 2_000_000_000
WHOLE = 1_000_000_000  # what the finite arcs of a graph sum up to, in the integers of the solver


@dataclass(frozen=True)
class Decision:
    """Of one call of a block and the call of its backward; `keep`: the values of the block handed over."""

    block: str
    keep: tuple[str, ...]
    seconds: float  # of computing again
    bytes: int  # that are kept


@dataclass(frozen=True)
class Residuals:
    """All decisions of a step: one for each pair of calls, in the order of the backward calls; and the values between
    the calls that are computed again, by name."""

    body: str
    pairs: tuple[Decision, ...]
    again: tuple[str, ...] = ()


def is_backward(eqn: Eqn) -> bool:
    """Was it written by differentiation?"""
    return eqn.phase == "backward"


def paired(block: Block) -> Iterator[tuple[int, int]]:
    """Calls whose results a later backward call alone reads, with that call."""
    uses = chains(block)
    producer = {v: i for i, eqn in enumerate(block.eqns) for v in eqn.outputs}
    for j, eqn in enumerate(block.eqns):
        if eqn.op is not call or not is_backward(eqn):
            continue
        reads: Counter[int] = Counter()
        for v in eqn.vars:
            i = producer.get(v)
            if i is not None and block.eqns[i].op is call and not is_backward(block.eqns[i]) and uses[v].uses == (j,):
                reads[i] += 1
        if reads:
            yield reads.most_common(1)[0][0], j


def backward_inputs(program: Program, block: Block, forward: int, backward: int) -> dict[Var, Var]:
    """Inputs of a backward block -> the values of its forward block that they are."""
    f, b = block.eqns[forward], block.eqns[backward]
    inner, outer = program.blocks[f.params["block"]], program.blocks[b.params["block"]]
    of: dict[Var, Var] = {x: v for x, v in zip(f.inputs, inner.inputs, strict=True) if isinstance(x, Var)}
    of.update((x, v) for x, v in zip(f.outputs, inner.outputs, strict=True) if isinstance(v, Var))
    return {v: of[x] for x, v in zip(b.inputs, outer.inputs, strict=True) if isinstance(x, Var) and x in of}


def expressions(block: Block) -> dict[Var, object]:
    """What each value between calls is made of: two that are equal here are the same tensor.  A weight that is gathered
    for forward and gathered again for backward is one of these."""
    by_value: dict[Var, object] = {}
    for eqn in block.eqns:
        if eqn.op in CONTROL or eqn.op.effect or len(eqn.outputs) != 1:
            continue
        by_value[eqn.outputs[0]] = hash((eqn.op.name, eqn.params, tuple(_made_of(x, by_value) for x in eqn.inputs)))
    return by_value


def _made_of(x: object, expressions: Mapping[Var, object]) -> object:
    return expressions.get(x, x) if isinstance(x, Var) else x


def twins(expressions: Mapping[Var, object], forward: Eqn, backward: Eqn) -> dict[Var, Atom]:
    """Operands of a call -> those of the call of its backward that are the same tensor made once more."""
    there = {expressions[y]: y for y in backward.vars if y in expressions}
    return {x: there[expressions[x]] for x in forward.vars if x in expressions and expressions[x] in there}


def residuals(program: Program, body: str, costs: Costs, prices: Sequence[float]) -> Residuals:
    """The cheapest decisions where a byte costs `prices[i]` seconds for the i-th pair (the last one for all further
    pairs)."""
    return KeepChoices(program, body, costs).at(prices)


@dataclass
class KeepChoices:
    """What of a step may be kept or computed again; whoever asks about many prices keeps it."""

    program: Program
    body: str
    costs: Costs
    _decided: dict[tuple[float, ...], Residuals] = field(default_factory=dict)
    _cuts: dict[tuple[str, tuple[Var, ...], tuple[tuple[Var, float], ...]], BlockCut] = field(default_factory=dict)

    def at(self, prices: Sequence[float]) -> Residuals:
        """The cheapest decisions at these prices."""
        key = tuple(prices)
        if key not in self._decided:
            decisions = []
            for k, (name, cut) in enumerate(self._pairs):
                keep, seconds, size = cut.at(key[min(k, len(key) - 1)])
                decisions.append(Decision(name, keep, seconds, size))
            self._decided[key] = Residuals(self.body, tuple(decisions), self._again(key[-1]))
        return self._decided[key]

    @cached_property
    def _pairs(self) -> list[tuple[str, BlockCut]]:
        """Pairs of calls: the name of the block, and what of it is chosen from."""
        program, block = self.program, self.program.blocks[self.body]
        free = {*block.inputs, *_kept_anyway(block)}
        readers = Counter(v for eqn in block.eqns if eqn.op is call and is_backward(eqn) for v in set(eqn.vars))
        values, pairs = expressions(block), []
        for i, j in paired(block):
            f, b = block.eqns[i], block.eqns[j]
            inner = program.blocks[f.params["block"]]
            needed = tuple(dict.fromkeys(backward_inputs(program, block, i, j).values()))
            share: dict[Var, float] = {}
            again = twins(values, f, b)
            for x, v in zip(f.inputs, inner.inputs, strict=True):
                share[v] = 0.0 if not isinstance(x, Var) or x in free or x in again else 1 / max(readers[x], 1)
            for x, out in zip(f.outputs, inner.outputs, strict=True):
                if isinstance(out, Var) and out not in share and (x in free or readers[x] > (x in b.inputs)):
                    share[out] = 0.0
            key = (str(f.params["block"]), needed, tuple(share.items()))
            if key not in self._cuts:
                self._cuts[key] = BlockCut(inner, needed, share, self.costs)
            pairs.append((key[0], self._cuts[key]))
        return pairs

    @cached_property
    def _loose(self) -> BlockCut | None:
        """What lies between the calls of the body."""
        block = self.program.blocks[self.body]
        late = backward_part(block)
        is_late = [e in late for e in block.eqns]
        early = tuple(e for e, x in zip(block.eqns, is_late, strict=True) if not x)
        inside = {v for e in early for v in e.outputs}
        needed = dict.fromkeys(v for e, x in zip(block.eqns, is_late, strict=True) if x for v in e.vars if v in inside)
        if not needed:
            return None
        share = {**_lifetimes(block, self.costs), **dict.fromkeys(block.inputs, 0.0)}
        return BlockCut(Block(block.inputs, early, ()), tuple(needed), share, self.costs, calls=False)

    def _again(self, price: float) -> tuple[str, ...]:
        """Values between the calls of the body that backward had better compute again."""
        if self._loose is None:
            return ()
        kept, _, _ = self._loose.at(price)
        return tuple(v.name for v in self._loose.needed if v.name not in kept)


def _kept_anyway(block: Block) -> set[Var]:
    """Results of calls that equations between the calls read in backward: no call is made again for these."""
    of_calls = {v for eqn in block.eqns if eqn.op is call and not is_backward(eqn) for v in eqn.outputs}
    return {v for eqn in backward_part(block) if eqn.op is not call for v in eqn.vars if v in of_calls}


def _lifetimes(block: Block, costs: Costs) -> dict[Var, float]:
    """For how much of the block's time each value is alive: to free one that is used again at once gains nothing."""
    clock = [0.0, *itertools.accumulate(costs.seconds(e) for e in block.eqns)]
    return {
        v: (clock[max(last, first, 0)] - clock[max(first, 0)]) / (clock[-1] or 1.0)
        for v, (first, last) in lifetimes(block).items()
    }


def backward_part(block: Block) -> set[Eqn]:
    """Equations written by differentiation, those of the update, and all that depend on them."""
    late: set[Var] = set()
    eqns = set()
    for eqn in block.eqns:
        if eqn.phase != "forward" or any(v in late for v in eqn.vars):
            late.update(eqn.outputs)
            eqns.add(eqn)
    return eqns


@dataclass
class BlockCut:
    """A block, of which some values are `needed` in backward; `share`: which part of a value's bytes counts.  not
    `calls`: calls and other control flow are not computed again."""

    block: Block
    needed: tuple[Var, ...]
    share: Mapping[Var, float]
    costs: Costs
    calls: bool = True
    _found: dict[float, tuple[tuple[str, ...], float, int]] = field(default_factory=dict)

    def at(self, price: float) -> tuple[tuple[str, ...], float, int]:
        """The values to keep, the seconds of computing the others again, and the bytes kept."""
        if price not in self._found:
            self._found[price] = self._cut(price)
        return self._found[price]

    @cached_property
    def _there(self) -> set[Var]:
        return self.costs.in_memory(self.block)

    @cached_property
    def _seconds(self) -> list[float]:
        """Of computing each equation again."""
        return [self.costs.seconds(eqn, self._there) for eqn in self.block.eqns]

    def _cut(self, price: float) -> tuple[tuple[str, ...], float, int]:
        block, costs, share, there = self.block, self.costs, self.share, self._there
        graph = _FlowNetwork()

        def keep(v: Var) -> float:
            part = share.get(v, 1.0)
            return part * v.type.bytes * price + (0.0 if v in there else v.type.bytes / costs.hardware.bytes_s)

        def never(eqn: Eqn) -> bool:
            """Is it not to be computed again?"""
            is_dear = eqn.op.product and costs.compiled and price <= KEEPING / costs.hardware.bytes_s
            return eqn.op.effect or is_dear or (eqn.op in CONTROL and not self.calls)

        for v in block.inputs:
            graph.arc("source", v.name, keep(v))
        for i, eqn in enumerate(block.eqns):
            node = f"= {i}"
            graph.arc("source", node, None if never(eqn) else self._seconds[i])
            for u in eqn.vars:
                graph.arc(u.name, node, None)
            for v in eqn.outputs:
                graph.arc(node, v.name, keep(v))
        for v in self.needed:
            graph.arc(v.name, "sink", None)
        near = graph.near()
        again = {v: i for i, e in enumerate(block.eqns) if f"= {i}" not in near for v in e.outputs}
        read, kept, redone = list(self.needed), set[Var](), set[int]()
        while read:  # from what backward needs down to what it is handed
            v = read.pop()
            if v not in again:
                kept.add(v)
            elif again[v] not in redone:
                redone.add(again[v])
                read += block.eqns[again[v]].vars
        size = sum(round(share.get(v, 1.0) * v.type.bytes) for v in kept)
        names = [v.name for e in block.eqns for v in e.outputs if v in kept]
        return tuple(names), sum(self._seconds[i] for i in sorted(redone)), size


class _FlowNetwork:
    """Named nodes and arcs with capacities; None is without end."""

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {"source": 0, "sink": 1}
        self.arcs: dict[tuple[int, int], float | None] = {}

    def arc(self, a: str, b: str, capacity: float | None) -> None:
        at = self.nodes.setdefault(a, len(self.nodes)), self.nodes.setdefault(b, len(self.nodes))
        before = self.arcs.get(at, 0.0)
        self.arcs[at] = None if capacity is None or before is None else before + capacity

    def near(self) -> set[str]:
        """Nodes on the source's side of a minimum cut."""
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        finite = sum(c for c in self.arcs.values() if c is not None)
        unit = WHOLE / finite if finite > 0 else 1.0
        sizes = np.array([ENDLESS if c is None else round(c * unit) for c in self.arcs.values()], dtype=np.int32)
        at = np.array(list(self.arcs))
        graph = csr_array((sizes, (at[:, 0], at[:, 1])), shape=(len(self.nodes),) * 2)
        rest = graph - maximum_flow(graph, 0, 1).flow
        rest.data = np.maximum(rest.data, 0)
        rest.eliminate_zeros()
        reached = set(breadth_first_order(rest, 0, return_predecessors=False).tolist())
        return {name for name, i in self.nodes.items() if i in reached}
