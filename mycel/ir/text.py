"""Programs as text.  Deterministic, one equation a line with the user's file and line, each block once; `parse` reads
it back.

program    = block*                                  the entry is the last block
block      = "def" name "(" [input ("," input)*] "):" equation* return
input      = var ["=" role]                          role: see `role.py`; of the entry's inputs alone, and where it is
                                                     not `batch` and the name
equation   = var ("," var)* "=" op "(" [arg ("," arg)*] ")" ["[" phase "]"] ["#" source]
return     = "return" [out ("," out)*]               out: atom, or input "=" atom for the new value of that input
var        = name ":" type                           arg: atom, or param "=" value
type       = dtype "[" [int ("," int)*] "]" | "stack(" type ")" | "host(" type ")"
atom       = name | scalar | "None"                  value: scalar | string | dtype | "@" block | "(" value* ")"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mycel.ir.program import Atom, Block, Eqn, Program, Ref, Var
from mycel.ir.role import Role, quoted
from mycel.ir.types import NAMES
from mycel.ir.walk import order


def to_text(program: Program) -> str:
    """Inner blocks first, the entry last."""
    parts = []
    for name in order(program):
        of_entry = (program.updates, program.roles) if name == program.entry else ()
        parts.append(block_text(name, program.blocks[name], *of_entry))
    return "\n".join(parts)


def block_text(name: str, block: Block, updates: tuple[str, ...] = (), roles: Mapping[str, Role] | None = None) -> str:
    """One block; the entry with its updates and roles."""
    lines = [f"def {name}({_wrap([input_text(v, roles or {}) for v in block.inputs], len(name) + 5)}):"]
    bodies = [eqn_text(eqn) for eqn in block.eqns]
    width = min(max((len(b) for b in bodies), default=0), 100)
    for eqn, body in zip(block.eqns, bodies, strict=True):
        source = " ".join(eqn.source.split())
        lines.append(f"  {body:<{width}}  # {source}" if source else f"  {body}")
    results = len(block.outputs) - len(updates)
    outs = [value_text(x) for x in block.outputs[:results]]
    outs += [f"{k}={value_text(x)}" for k, x in zip(updates, block.outputs[results:], strict=True)]
    lines.append("  return " + _wrap(outs, 9) if outs else "  return")
    return "\n".join(lines) + "\n"


def input_text(var: Var, roles: Mapping[str, Role]) -> str:
    """w: f32[16,8] = parameter up.0.weight"""
    role = roles.get(var.name)
    return repr(var) if role is None or role == Role("batch", var.name) else f"{var!r} = {role}"


def eqn_text(eqn: Eqn) -> str:
    """An equation without its source."""
    args = [value_text(x) for x in eqn.inputs] + [f"{k}={value_text(v)}" for k, v in sorted(eqn.params.items())]
    left = ", ".join(map(repr, eqn.outputs))
    right = f"{eqn.op.name}({', '.join(args)})" + (f" [{eqn.phase}]" if eqn.phase != "forward" else "")
    return f"{left} = {right}" if left else right


def value_text(value: Atom | Any) -> str:
    """An atom or a static value."""
    match value:
        case Var():
            return value.name
        case Ref():
            return "@" + value
        case torch.dtype():
            return NAMES[value]
        case tuple():
            inner = ", ".join(map(value_text, value))
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        case str():
            return quoted(value)
        case complex():
            return f"complex({value.real!r}, {value.imag!r})"
    return repr(value)


def _wrap(parts: list[str], indent: int, width: int = 120) -> str:
    """Comma-joined, broken at `width` with a hanging indent."""
    lines, line = [], ""
    for i, part in enumerate(parts):
        piece = part + ("," if i + 1 < len(parts) else "")
        if line and indent + len(line) + 1 + len(piece) > width:
            lines.append(line)
            line = piece
        else:
            line = f"{line} {piece}" if line else piece
    return ("\n" + " " * indent).join([*lines, line])
