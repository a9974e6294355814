"""A program as Python: one function for each block, one line for each equation, each value deleted after its last use.

    def main(x, w):
        h = torch.nn.functional.linear(x, w)  # model.py:31
        del x
        y = torch.nn.functional.gelu(h)  # model.py:31
        return (y,)
"""

from __future__ import annotations

import builtins
import keyword
import linecache
import re
from collections.abc import Callable, Container
from typing import Any

import torch

from mycel.ir import Atom, Block, Eqn, Program, Var, call, cond, lifetimes, loop, order, scan, walk
from mycel.run.alias import shared_outputs
from mycel.run.kernels import literal, sources_of, write

_WRITTEN_HERE = {"call", "cond", "loop", "scan", "const", "opaque"}
_TAKEN = {*keyword.kwlist, *dir(builtins), "torch", "math", "device", "CONSTS"}


def emit(program: Program) -> str:
    """The source of a module with one function for each block; `main` (the entry) takes the inputs and returns a tuple."""
    needed = {k: text for op in {e.op for _, e in walk(program)} if op.name not in _WRITTEN_HERE for k, text in sources_of(op).items()}
    needed = dict(sorted(needed.items()))
    names = _block_names(program, needed)
    shared = shared_outputs(program)
    functions = []
    for block in order(program):
        copies = shared if block == program.entry else set()
        functions.append(_Function(program, block, names, set(needed), copies).source())
    head = ["import math", "", "import torch"]
    if program.consts:
        head += ["", *(f"{_const(k)} = CONSTS[{k!r}]" for k in program.consts)]
    return "\n".join(head) + "\n\n\n" + "\n\n\n".join([*needed.values(), *functions]) + "\n"


def load(program: Program, device: torch.device) -> tuple[Callable[..., tuple[Any, ...]], str]:
    """The entry as a Python function on `device`, and its source."""
    source = emit(program)
    file = f"<mycel program {load.count}>"  # type: ignore[attr-defined]
    load.count += 1  # type: ignore[attr-defined]
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    env: dict[str, Any] = {"CONSTS": {k: c.to(device) for k, c in program.consts.items()}, "device": device}
    exec(compile(source, file, "exec"), env)
    return env["main"], source


load.count = 0  # type: ignore[attr-defined]


class _Function:
    """Writes one block."""

    def __init__(self, program: Program, name: str, blocks: dict[str, str], helpers: set[str], copies: set[int]) -> None:
        self.program, self.block, self.blocks, self.copies = program, program.blocks[name], blocks, copies
        self.name = blocks[name]
        self.names: dict[Var, str] = {}
        self.taken = {*_TAKEN, *blocks.values(), *helpers}
        self.lines: list[str] = []

    def source(self) -> str:
        args = [self.named(v) for v in self.block.inputs]
        dead = _deaths(self.block)
        for i, eqn in enumerate(self.block.eqns):
            self.equation(eqn)
            if dead[i]:
                self.lines.append("del " + ", ".join(self.names[v] for v in dead[i]))
        outs = [self.output(i, x) for i, x in enumerate(self.block.outputs)]
        self.lines.append(f"return ({''.join(o + ', ' for o in outs)})" if len(outs) != 1 else f"return ({outs[0]},)")
        body = "\n".join("    " + line for line in self.lines)
        return f"def {self.name}({', '.join(args)}):\n{body}"

    def named(self, var: Var) -> str:
        base = re.sub(r"\W", "_", var.name, flags=re.ASCII)
        base = f"_{base}" if base[0].isdigit() else base
        name, i = base, 0
        while name in self.taken:
            i += 1
            name = f"{base}_{i}"
        self.taken.add(name)
        self.names[var] = name
        return name

    def atom(self, x: Atom) -> str:
        return self.names[x] if isinstance(x, Var) else literal(x)

    def output(self, i: int, x: Atom) -> str:
        text = self.atom(x) if isinstance(x, Var) else f"torch.tensor({literal(x)}, device=device)"
        return f"{text}.clone()" if i in self.copies else text

    def equation(self, eqn: Eqn) -> None:
        args = [self.atom(x) for x in eqn.inputs]
        outs = [self.named(v) for v in eqn.outputs]
        left = ", ".join(outs) if len(outs) > 1 else "".join(outs)
        comment = f"  # {eqn.source}" if eqn.source else ""
        p = eqn.params
        if eqn.op is call:
            self.lines.append(f"{_unpack(outs)}{self.blocks[p['block']]}({', '.join(args)}){comment}")
        elif eqn.op is cond:
            rest = ", ".join(args[1:])
            self.lines.append(f"if {args[0]}:{comment}")
            self.lines.append(f"    {_unpack(outs)}{self.blocks[p['then']]}({rest})")
            self.lines.append("else:")
            self.lines.append(f"    {_unpack(outs)}{self.blocks[p['orelse']]}({rest})")
        elif eqn.op is loop:
            self.loop(eqn, args, outs, comment)
        elif eqn.op is scan:
            self.scan(eqn, args, outs, comment)
        elif eqn.op.name == "const":
            self.lines.append(f"{left} = {_const(p['name'])}{comment}")
        else:
            self.lines.append(f"{left} = {write(eqn.op, args, p)}{comment}")

    def loop(self, eqn: Eqn, args: list[str], outs: list[str], comment: str) -> None:
        n = eqn.params.get("consts", 0)
        state = ", ".join(args[:n] + outs)
        if outs:
            self.lines.append(f"{_unpack(outs)}({', '.join(args[n:])},)")
        self.lines.append(f"while {self.blocks[eqn.params['test']]}({state})[0]:{comment}")
        self.lines.append(f"    {_unpack(outs)}{self.blocks[eqn.params['body']]}({state})")

    def scan(self, eqn: Eqn, args: list[str], outs: list[str], comment: str) -> None:
        p = eqn.params
        n = p.get("consts", 0)
        m = n + p.get("carry", 0)
        held, start, xs = args[:n], args[n:m], args[m:]
        state, ys = outs[: m - n], outs[m - n :]
        if state:
            self.lines.append(f"{_unpack(state)}({', '.join(start)},)")
        self.lines += [f"{y} = []" for y in ys]
        turns = f"reversed(range({p['length']}))" if p.get("reverse") else f"range({p['length']})"
        self.lines.append(f"for turn in {turns}:{comment}")
        row = [f"{y}_row" for y in ys]
        operands = ", ".join([*held, *state, *(f"{x}[turn]" for x in xs)])
        self.lines.append(f"    {_unpack([*state, *row])}{self.blocks[p['body']]}({operands})")
        self.lines += [f"    {y}.append({r})" for y, r in zip(ys, row, strict=True)]
        for y, var in zip(ys, eqn.outputs[m - n :], strict=True):
            if p["length"] == 0:
                self.lines.append(f"{y} = torch.empty({var.shape}, dtype={var.dtype}, device=device)")
            else:
                self.lines.append(f"{y} = torch.stack({y}[::-1])" if p.get("reverse") else f"{y} = torch.stack({y})")


def _unpack(outs: list[str]) -> str:
    return "".join(o + ", " for o in outs) + "= " if outs else ""


def _const(name: str) -> str:
    return "CONST_" + re.sub(r"\W", "_", name)


def _block_names(program: Program, helpers: Container[str]) -> dict[str, str]:
    """Block names that are free in Python; the entry is `main`."""
    made: dict[str, str] = {program.entry: "main"}
    for name in order(program):
        if name != program.entry:
            made[name] = name if name not in _TAKEN and name != "main" and name not in helpers else f"{name}_block"
    return made


def _deaths(block: Block) -> list[list[Var]]:
    dead: list[list[Var]] = [[] for _ in block.eqns]
    for var, (_, last) in lifetimes(block).items():
        if 0 <= last < len(block.eqns):
            dead[last].append(var)
    return dead
