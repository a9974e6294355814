"""The five records of the IR: Program, Block, Eqn, Var and (in `types.py`) Type.  Immutable, typed, pure.

    Program   named blocks, one of them the entry; constants; which inputs the entry's last outputs replace; what its
              inputs are (`role.py`)
    Block     inputs, equations, outputs
    Eqn       outputs = op(inputs, **params), its phase of a training step, and the user's file:line
    Var       a name and a type; defined once in its block
    Type      dtype and shape

An equation's input is a Var, a Python scalar, or None (an optional operand left out).  Control flow is structured:
`call`, `cond`, `loop` and `scan` hold blocks by reference (`Ref`) to the program's table, so a layer called 32 times is
in memory, in text and in every pass once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.ir.op import Op
from mycel.ir.role import Role
from mycel.ir.types import HOST, Type


@dataclass(frozen=True, slots=True)
class Var:
    """A value: named, typed, defined once."""

    name: str
    type: Type

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{self.name}: {self.type}"

    # What gradient rules may ask of a value, whether it is a tensor or a Var.
    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dims."""
        return self.type.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """Its number of dims."""
        return len(self.type.shape)


NAN = float("nan")  # the one nan of atoms and params, so that equations that hold it equal themselves
RESERVED = frozenset({"def", "return", "True", "False", "None", "inf", "nan", "complex"})  # words of the text: no names

Atom = Var | bool | int | float | complex | None

# of a training step, in the order in which they may read each other's values
PHASES = ("forward", "backward", "update")


class Ref(str):
    """The name of a block, as a param of a control-flow equation."""

    __slots__ = ()


class Params(dict[str, Any]):
    """Static params of an equation: a dict that is not changed after it is made."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:  # type: ignore[override]
        try:
            return self._hash
        except AttributeError:
            self._hash = hash(tuple(sorted((k, repr(v)) for k, v in self.items())))
            return self._hash

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("params of an equation do not change")

    def __delitem__(self, key: str) -> None:
        raise TypeError("params of an equation do not change")


@dataclass(frozen=True, slots=True)
class Eqn:
    """outputs = op(inputs, **params)"""

    op: Op
    inputs: tuple[Atom, ...]
    params: Params
    outputs: tuple[Var, ...]
    source: str = ""
    phase: str = "forward"

    @property
    def line(self) -> str:
        """The user's line, and what of it this is: model.py:31 backward"""
        return f"{self.source} {self.phase}" if self.source and self.phase != "forward" else self.source

    @property
    def vars(self) -> Iterator[Var]:
        """The Vars among the inputs."""
        return (x for x in self.inputs if isinstance(x, Var))

    @property
    def refs(self) -> Iterator[Ref]:
        """The blocks this equation holds."""
        return (v for v in self.params.values() if isinstance(v, Ref))

    @property
    def input_types(self) -> tuple[Any, ...]:
        """Inputs as type rules see them: Types for Vars, literals as they are."""
        return tuple(x.type if isinstance(x, Var) else x for x in self.inputs)

    @property
    def on_host(self) -> bool:
        """Does it run on the host, where its operands lie?"""
        return self.op.hosted and any(v.type.space == HOST for v in self.vars)


@dataclass(frozen=True, slots=True)
class Block:
    """A list of equations with inputs and outputs."""

    inputs: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[Atom, ...]


@dataclass(frozen=True, eq=False)
class Program:
    """Named blocks and an entry.  The entry's last `len(updates)` outputs are the new values of the inputs named in
    `updates`; `roles` says by name what the entry's inputs are: one that is not there is an argument of its own
    name."""

    blocks: Mapping[str, Block]
    entry: str = "main"
    updates: tuple[str, ...] = ()
    consts: Mapping[str, torch.Tensor] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=dict)

    @property
    def main(self) -> Block:
        """The block that a call runs."""
        return self.blocks[self.entry]

    @property
    def inputs(self) -> tuple[Var, ...]:
        """What a call takes: arguments, parameters and other state, in their order."""
        return self.main.inputs

    @property
    def results(self) -> tuple[Atom, ...]:
        """The entry's outputs without the updates."""
        return self.main.outputs[: len(self.main.outputs) - len(self.updates)]

    def role(self, var: Var) -> Role:
        """What an input of the entry is."""
        return self.roles.get(var.name) or Role("batch", var.name)

    def inputs_of(self, *kinds: str) -> tuple[Var, ...]:
        """The inputs whose role is of these kinds, in their order."""
        return tuple(v for v in self.inputs if self.role(v).kind in kinds)

    def positions(self, names: Iterable[str]) -> list[int]:
        """Where among the inputs these are, by name."""
        at = {v.name: i for i, v in enumerate(self.inputs)}
        return [at[name] for name in names]

    def by_role(self) -> dict[Role, Var]:
        """The inputs by what they are."""
        return {self.role(v): v for v in self.inputs}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        return (
            (self.entry, self.updates) == (other.entry, other.updates)
            and self._texts() == other._texts()
            and self.consts.keys() == other.consts.keys()
            and all(same_bits(c, other.consts[k]) for k, c in self.consts.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def _texts(self) -> dict[str, str]:
        """Blocks as text: equal where 1, 1.0 and True, or 0.0 and -0.0, are told apart and nan is itself."""
        from mycel.ir.text import block_text

        return {
            name: block_text(name, block, roles=self.roles if name == self.entry else {})
            for name, block in self.blocks.items()
        }

    def __str__(self) -> str:
        from mycel.ir.text import to_text

        return to_text(self)

    __repr__ = __str__

    @staticmethod
    def parse(text: str, consts: Mapping[str, torch.Tensor] | None = None) -> Program:
        """The program whose text this is; TextError with line and column if it is none."""
        from mycel.ir.parse import parse

        return parse(text, consts or {})

    def save(self, path: Any) -> None:
        """Write text and constants to one file."""
        from mycel.ir.program_file import save

        save(self, path)

    @staticmethod
    def load(path: Any) -> Program:
        """Read what `save` wrote; LoadError if it is damaged."""
        from mycel.ir.program_file import load

        return load(path)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit: nan is itself, 0.0 is not -0.0."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
