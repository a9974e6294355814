"""When the equations of a compiled block run: those that a compiler makes one kernel of run together, once all that
they read is there, and what uses a result of theirs runs after that.

    0  silu     = silu(gate)             0, 1 and 3 are one kernel: silu is never in memory
    1  hidden   = mul(silu, up)          it runs at 3, where its last operand is there
    2  d_weight = mm(d_out.t(), hidden)  and this behind it, with 4; until then `gate`, `up` and `d_out` are alive,
    3  d_up     = mul(d_hidden, silu)    and `hidden` and `d_up` lie in memory at once

Equations hang together by values that are never in memory and as large as what they are made of (what is reduced is
small, and written), and where they read the same and make as much of it.  They are not one kernel where one of them
waits for another by way of a kernel in between, or where other blocks run between them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mycel.ir import CONTROL, Block, Eqn, Var

ROUNDS = 3  # in which moments settle; kernels that wait for each other in turn would go on


def moments(block: Block, merged: Collection[int], there: Collection[Var]) -> list[int]:
    """For each equation of a block the number of the one at which it runs; `merged`: those that are no kernels of their
    own; `there`: values that lie in memory."""
    maker = {v: i for i, eqn in enumerate(block.eqns) for v in eqn.outputs}
    makers = [sorted({maker[v] for v in eqn.vars if v in maker}) for eqn in block.eqns]
    kernels = []
    for group in _kernels(block, makers, _together(block, merged, there)):
        writing = [i for i in group if any(v in there for v in block.eqns[i].outputs)]
        if len(writing) > 1:
            kernels.append(writing)
    when = list(range(len(block.eqns)))
    for _ in range(ROUNDS):
        before = list(when)
        for i, sources in enumerate(makers):
            behind = i not in merged  # a kernel of its own runs after what it reads
            when[i] = min(max([when[i], *(when[j] + behind for j in sources)]), len(when) - 1)
        for members in kernels:
            last = max(when[i] for i in members)
            for i in members:
                when[i] = last
        if when == before:
            break
    return when


def last_reads(block: Block, there: Collection[Var], when: Sequence[int]) -> list[int]:
    """For each equation the number of the last one that reads its operands: a value that is never in memory is made
    once more in every kernel that uses it, of what it was made of."""
    last = list(when)
    results = ((v, i) for i, eqn in enumerate(block.eqns) for v in eqn.outputs if not _is_reduced(eqn, v))
    maker = {v: i for v, i in results if v not in there}
    for i in reversed(range(len(last))):
        for v in block.eqns[i].vars:
            if v in maker:
                last[maker[v]] = max(last[maker[v]], last[i])
    return last


def _together(block: Block, merged: Collection[int], there: Collection[Var]) -> dict[int, int]:
    """Merged equations -> the first of those that hang together."""
    first: dict[int, int] = {}
    maker: dict[Var, int] = {}
    readers: dict[tuple[Var, int], int] = {}  # of values in memory, by the size of what is made of them

    def root(i: int) -> int:
        while first[i] != i:
            i = first[i]
        return i

    for i, eqn in enumerate(block.eqns):
        if i not in merged:
            continue
        roots = sorted({root(maker[v]) for v in eqn.vars if v in maker} | {root(j) for j in _beside(eqn, readers)})
        first[i] = roots[0] if roots else i
        for j in roots[1:]:
            first[j] = roots[0]
        maker.update((v, i) for v in eqn.outputs if v not in there and not _is_reduced(eqn, v))
        readers.update(((v, eqn.outputs[0].type.numel), i) for v in eqn.vars if v in there and eqn.op.write is None)
    return {i: root(i) for i in first}


def _beside(eqn: Eqn, readers: Mapping[tuple[Var, int], int]) -> list[int]:
    """Equations that read the same memory and make as much of it."""
    size = eqn.outputs[0].type.numel
    return [readers[v, size] for v in eqn.vars if v.type.numel == size and (v, size) in readers]


def _is_reduced(eqn: Eqn, result: Var) -> bool:
    return any(result.type.numel < v.type.numel for v in eqn.vars)


def _kernels(block: Block, makers: list[list[int]], groups: dict[int, int]) -> list[list[int]]:
    """The equations of each kernel: of a group, those between which nothing else has to run."""
    above: list[int] = []  # of each equation: those it depends on, as bits
    beyond: list[int] = []  # and those of them on the far side of a kernel of its own
    kernels: list[list[int]] = []
    open_: dict[int, list[tuple[int, list[int]]]] = {}  # by group: the bits and the numbers of kernels that may grow
    for i, sources in enumerate(makers):
        if block.eqns[i].op in CONTROL:
            open_ = {}
        all_, far = 0, 0
        for j in sources:
            all_ |= above[j] | 1 << j
            far |= beyond[j] if j in groups else above[j]
        above.append(all_)
        beyond.append(far)
        if i in groups:
            mine = open_.setdefault(groups[i], [])
            k = next((k for k in reversed(range(len(mine))) if not mine[k][0] & far), len(mine))
            if k == len(mine):
                kernels.append([])
                mine.append((0, kernels[-1]))
            bits, numbers = mine[k]
            numbers.append(i)
            mine[k] = bits | 1 << i, numbers
    return kernels
