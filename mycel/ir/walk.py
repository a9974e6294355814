"""The one walker over nested blocks, and what passes ask of a block: use-def chains, lifetimes, what leads to a
value."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mycel.errors import IRError
from mycel.ir.program import Atom, Block, Eqn, Program, Ref, Var

REMEMBERED = 8  # blocks whose chains are kept: who decides asks for those of one again and again
_CHAINS: dict[int, tuple[Block, dict[Var, Chain]]] = {}  # by id, with the block


def order(program: Program) -> list[str]:
    """Names of the blocks the entry reaches, each after all blocks it holds; refuses recursion."""
    done: dict[str, None] = {}
    open_: list[str] = []

    def visit(name: str) -> None:
        if name in done:
            return
        if name in open_:
            raise IRError(f"block {name} calls itself: {' -> '.join([*open_, name])}")
        if name not in program.blocks:
            raise IRError(f"no block named {name}")
        open_.append(name)
        for eqn in program.blocks[name].eqns:
            for value in eqn.params.values():
                if isinstance(value, Ref):
                    visit(value)
        open_.pop()
        done[name] = None

    visit(program.entry)
    return list(done)


def walk(program: Program) -> Iterator[tuple[str, Eqn]]:
    """Every equation of every distinct block once, inner blocks first: (block name, equation)."""
    for name in order(program):
        for eqn in program.blocks[name].eqns:
            yield name, eqn


def rewrite(program: Program, change: Callable[[Block], Block]) -> Program:
    """The program with each distinct block changed, inner blocks first; blocks no longer reached are left out."""
    return prune(replace(program, blocks={name: change(program.blocks[name]) for name in order(program)}))


def runs(program: Program) -> dict[str, int]:
    """How often each block runs in one run of the entry; a loop counts as one turn, a branch as taken."""
    counts = dict.fromkeys(order(program), 0) | {program.entry: 1}
    for name in reversed(list(counts)):
        for eqn in program.blocks[name].eqns:
            for ref in eqn.refs:
                counts[str(ref)] += counts[name] * (eqn.params["length"] if eqn.op.name == "scan" else 1)
    return counts


def prune(program: Program) -> Program:
    """The program without blocks and constants that nothing reaches."""
    reached = order(program)
    used = {e.params["name"] for n in reached for e in program.blocks[n].eqns if e.op.name == "const"}
    return replace(
        program,
        blocks={n: program.blocks[n] for n in reached},
        consts={k: c for k, c in program.consts.items() if k in used},
    )


def structure(block: Block) -> Any:
    """A block without its names and source lines."""
    number: dict[Var, int] = {}

    def define(variables: Sequence[Var]) -> tuple[Any, ...]:
        for v in variables:
            number[v] = len(number)
        return tuple(v.type for v in variables)

    def use(atoms: Sequence[Atom]) -> tuple[Any, ...]:
        return tuple(number[x] if isinstance(x, Var) else repr(x) for x in atoms)

    head = define(block.inputs)
    body = tuple(
        (e.op.name, use(e.inputs), tuple(sorted((k, repr(v)) for k, v in e.params.items())), define(e.outputs))
        for e in block.eqns
    )
    return head, body, use(block.outputs)


def free_name(name: str, others: Container[str]) -> str:
    """Of a block: this name, or with the first number that makes it another than those."""
    unique, i = name, 1
    while unique in others:
        i += 1
        unique = f"{name}_{i}"
    return unique


class Chain(NamedTuple):
    """Where a value comes from and where it goes: equation indices; `defined` is -1 for a block input."""

    defined: int
    uses: tuple[int, ...]
    is_output: bool

    @property
    def last(self) -> int:
        """The index after which the value may be freed (one past the last equation for an output)."""
        return self.uses[-1] if self.uses else self.defined


def chains(block: Block) -> dict[Var, Chain]:
    """The use-def chain of every value of a block."""
    known = _CHAINS.get(id(block))
    if known is None or known[0] is not block:
        if len(_CHAINS) >= REMEMBERED:
            _CHAINS.pop(next(iter(_CHAINS)))
        known = _CHAINS[id(block)] = block, _chains(block)
    return known[1]


def _chains(block: Block) -> dict[Var, Chain]:
    defined = dict.fromkeys(block.inputs, -1)
    uses: dict[Var, list[int]] = {v: [] for v in block.inputs}
    for i, eqn in enumerate(block.eqns):
        for v in eqn.vars:
            if not uses[v] or uses[v][-1] != i:
                uses[v].append(i)
        for v in eqn.outputs:
            defined[v], uses[v] = i, []
    outputs = {v for v in block.outputs if isinstance(v, Var)}
    return {v: Chain(defined[v], tuple(uses[v]), v in outputs) for v in defined}


def lifetimes(block: Block) -> dict[Var, tuple[int, int]]:
    """(first, last) equation index at which each value is alive; outputs live to the end."""
    end = len(block.eqns)
    return {v: (c.defined, end if c.is_output else c.last) for v, c in chains(block).items()}


def deaths(block: Block) -> list[list[Var]]:
    """For each equation, the values nobody needs after it."""
    dead: list[list[Var]] = [[] for _ in block.eqns]
    for var, (_, last) in lifetimes(block).items():
        if 0 <= last < len(block.eqns):
            dead[last].append(var)
    return dead


def leading_to(eqns: Sequence[Eqn], values: Iterable[Atom], there: Container[Var] = ()) -> list[int]:
    """The equations (by index) that values are computed by, where some are there already."""
    wanted = {v for v in values if isinstance(v, Var) and v not in there}
    leads = []
    for i in reversed(range(len(eqns))):
        if not wanted.isdisjoint(eqns[i].outputs):
            leads.append(i)
            wanted.update(v for v in eqns[i].vars if v not in there)
    return leads[::-1]


def substitute(eqn: Eqn, values: dict[Var, Atom]) -> Eqn:
    """The equation with its inputs replaced."""
    if not any(v in values for v in eqn.vars):
        return eqn
    return replace(eqn, inputs=tuple(lookup(x, values) for x in eqn.inputs))


def lookup(x: Atom, values: dict[Var, Atom]) -> Atom:
    """What stands for x."""
    return values.get(x, x) if isinstance(x, Var) else x
