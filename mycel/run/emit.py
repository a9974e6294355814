"""A program as Python: one function for each block, one line for each equation, each value deleted after its last use.

    def main(x, w):
        h = torch.nn.functional.linear(x, w)  # model.py:31
        del x
        y = torch.nn.functional.gelu(h)  # model.py:31
        return (y,)

Branches are `if`, loops are `while` and `for`: a block that only one of them holds is written in its place.
"""

from __future__ import annotations

import base64
import builtins
import keyword
import linecache
import re
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch

from mycel.ir import (
    CONTROL,
    DEVICE,
    Arena,
    Atom,
    Eqn,
    Op,
    Program,
    Var,
    arenas,
    call,
    cond,
    custom,
    deaths,
    loop,
    order,
    scan,
    walk,
)
from mycel.ops import o
from mycel.ops.memory_sharing import shared_outputs
from mycel.ops.overwriting import Overwritten, overwritten, starts
from mycel.ops.python_calls import CALLS, PythonCall
from mycel.ops.written_inputs import gathered_into, given_away, replaced_if
from mycel.run.compiled_blocks import CompiledProgram
from mycel.run.kernels import class_source, literal, sources_of, write, write_inplace, write_into
from mycel.run.native_blocks import native_functions
from mycel.run.own_gradient import OwnGradient

_ROOMS = {"mycel.ops.across": "across"}  # where operators are that ask the run's communicator, if not in collective
_TAKEN = {
    *keyword.kwlist,
    *dir(builtins),
    "torch",
    "math",
    "base64",
    "device",
    "ranks",
    "across",
    "spaces",
    "OwnGradient",
}


def emit(program: Program, device: torch.device | str = "cpu", reuse: bool = False, donate: bool = False) -> str:
    """The source of a module that needs torch alone: a function for each block; `main` (the entry) takes the inputs and
    returns a tuple.

    `reuse`: results are written over operands nobody needs any more; for runs that torch's autograd does not record.
    `donate`: `main` writes its updates into its inputs and returns the results alone.
    """
    needed = _helpers(program, donate)
    names = _block_names(program, needed)
    inlined = _inlined(program)
    if not reuse and any(e.op is custom for _, e in walk(program)):
        needed["OwnGradient"] = class_source(OwnGradient)
    shared, placed, over = shared_outputs(program), arenas(program), overwritten(program) if reuse else {}
    functions = []
    for block in order(program):
        if block not in inlined:
            main = block == program.entry
            function = _Function(
                program, block, names, inlined, set(needed), shared if main else set(), reuse, placed, over
            )
            on_host = torch.device(device).type == "cpu"
            functions.append(function.donating_source(on_host) if main and donate else function.source())
    body = "\n\n\n".join([*needed.values(), *functions]) + "\n"
    head = ["import base64"] if any(_is_bytes(c) for c in program.consts.values()) else []
    head += ["import math", "", "import torch"]
    head += ["", "from mycel.ops import collective as ranks"] if re.search(r"\branks\.", body) else []
    head += ["from mycel.ops import across"] if re.search(r"\bacross\.", body) else []
    head += ["", "from mycel.ops import space as spaces"] if re.search(r"\bspaces\.", body) else []
    if program.consts or re.search(r"\bdevice\b", body):
        head += ["", f"device = torch.device({str(device)!r})"]
    head += [f"{_const(k)} = {_constant_text(c)}" for k, c in program.consts.items()]
    return "\n".join(head) + "\n\n\n" + body


SHOWN = 64  # elements of a constant that are written as numbers


def _is_bytes(c: torch.Tensor) -> bool:
    return c.numel() > SHOWN or c.is_complex()


def _constant_text(c: torch.Tensor) -> str:
    """A constant as an expression: numbers if few, bytes if many."""
    if not _is_bytes(c):
        values = repr(c.tolist()).replace("inf", "math.inf").replace("nan", "math.nan")
        return f"torch.tensor({values}, dtype={c.dtype}, device=device)"
    data = base64.b64encode(c.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
    bytes_ = f"torch.frombuffer(bytearray(base64.b64decode({data!r})), dtype={c.dtype})"
    return f"{bytes_}.reshape({tuple(c.shape)}).to(device)"


def load(
    program: Program, device: torch.device, reuse: bool = False, donate: bool = False, compiled: Collection[str] = (),
    native: Collection[str] = (),
) -> tuple[Callable[..., tuple[Any, ...]], str]:  # fmt: skip
    """The entry as a Python function on `device`, and its source; the functions of the blocks named in `compiled` go
    through torch's compiler, at its first call; those in `native` are in C."""
    source = emit(program, device, reuse, donate)
    file = f"<mycel program {load.count}>"  # type: ignore[attr-defined]
    load.count += 1  # type: ignore[attr-defined]
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    # the Python of islands stays as long as a function of the code does, which torch's autograd may be the last to hold
    islands = [CALLS.get(e.params["name"]) for _, e in walk(program) if e.op.python]
    run = partial(_executed, compile(source, file, "exec"), islands)
    if compiled:
        names = function_names(program, donate)
        return CompiledProgram.of(run, program, names, compiled, source, device), source
    env: dict[str, Any] = {}
    run(env)
    names = function_names(program, donate) if native else {}
    env.update({names[block]: function for block, function in native_functions(program, native).items()})
    return env["main"], source


load.count = 0  # type: ignore[attr-defined]


def _executed(code: CodeType, islands: Sequence[PythonCall | None], env: dict[str, Any]) -> None:
    env["__islands__"] = islands
    exec(code, env)


class _Function:
    """Writes one block, and the blocks only its branches and loops hold."""

    def __init__(
        self,
        program: Program,
        name: str,
        blocks: dict[str, str],
        inlined: Container[str],
        helpers: set[str],
        copies: set[int],
        reuse: bool,
        placed: Mapping[str, Arena],
        overwritten: Overwritten,
    ) -> None:
        self.program, self.block, self.blocks, self.inlined, self.copies = (
            program,
            program.blocks[name],
            blocks,
            inlined,
            copies,
        )
        self.name = blocks[name]
        self.used = {*_TAKEN, *blocks.values(), *helpers}
        self.lines: list[str] = []
        self.indent = 1
        self.reuse = reuse
        self.donates = False
        self.given: dict[int, set[int]] = {}
        self.gathered: dict[int, list[Var | None]] = {}
        self.replaced: set[int] = set()
        self.on_host = False
        self.over: dict[Atom, str] = {}  # moves to the host that are written over an input, by their tokens
        self.block_name = self.around = name  # the block that is written, and the one whose equation is
        self.last: Sequence[Var] = ()  # what the equation being written reads last, as the first carry of its turns
        self.arenas = placed
        self.overwritten = overwritten

    def source(self) -> str:
        names: dict[Var, str] = {}
        args = [self.named(v, names) for v in self.block.inputs]
        self.body(self.block_name, names, set(self.block.inputs))
        outs = [self.output(i, x, names) for i, x in enumerate(self.block.outputs)]
        self.line(f"return ({''.join(o + ', ' for o in outs)})" if len(outs) != 1 else f"return ({outs[0]},)")
        return f"def {self.name}({', '.join(args)}):\n" + "\n".join(self.lines)

    def donating_source(self, on_host: bool) -> str:
        """The entry, its updates written into its inputs; `on_host`: its conditions can be asked."""
        self.donates, self.given = True, given_away(self.program)
        self.gathered, self.replaced, self.on_host = gathered_into(self.program), replaced_if(self.program), on_host
        names: dict[Var, str] = {}
        args = [self.named(v, names) for v in self.block.inputs]
        by_name = {v.name: names[v] for v in self.block.inputs}
        self.body(self.block_name, names, set())  # the caller holds the inputs, and they hold the new values
        outs = [self.output(i, x, names) for i, x in enumerate(self.block.outputs)]
        n = len(outs) - len(self.program.updates)
        moves = [(by_name[k], new) for k, new in zip(self.program.updates, outs[n:], strict=True)]
        moves = [(old, new) for old, new in moves if new != old]
        for i, out in enumerate(outs[:n]):  # what lies in an input is copied before that changes
            if out.endswith(".clone()"):
                self.line(f"out_{i} = {out}")
                outs[i] = f"out_{i}"
        for i, (_, new) in enumerate(moves):
            if new.endswith(".clone()"):
                self.line(f"new_{i} = {new}")
        for i, (old, new) in enumerate(moves):
            self.line(f"{old}.copy_({f'new_{i}' if new.endswith('.clone()') else new})")
        self.line(f"return ({''.join(o + ', ' for o in outs[:n])})")
        return f"def {self.name}({', '.join(args)}):\n" + "\n".join(self.lines)

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def body(self, name: str, names: dict[Var, str], own: set[Var]) -> None:
        """The equations of a block; values of `own` and those defined here are deleted after their last use."""
        block = self.program.blocks[name]
        dead = deaths(block)
        over = self.overwritten.get(name, {})
        for i, eqn in enumerate(block.eqns):
            self.around = name
            passed_on: Sequence[Atom] = ()  # operands whose memory, and name, are a result's from here on
            if name == self.block_name and i in self.given:
                self.update(eqn, names, self.given[i])
                passed_on = [x for k, x in enumerate(eqn.inputs[: len(eqn.outputs)]) if k not in self.given[i]]
            elif name == self.block_name and i in self.gathered:
                self.gather(eqn, names, self.gathered[i])
            elif name == self.block_name and i in self.replaced:
                self.replace(eqn, names)
                passed_on = eqn.inputs[2:]
            elif eqn.op.transfers:
                self.move(i, eqn, names)
            else:
                self.last = [v for v in starts(eqn) if v in own and v in dead[i]]
                passed_on = self.last
                self.equation(eqn, names, over.get(i))
            own.update(eqn.outputs)
            gone = [names[v] for v in dead[i] if v in own and v not in passed_on]
            if gone:
                self.line("del " + ", ".join(gone))

    def named(self, var: Var, names: dict[Var, str]) -> str:
        """A free Python name for a value."""
        if var not in names:
            base = re.sub(r"\W", "_", var.name, flags=re.ASCII)
            base = f"_{base}" if base[0].isdigit() else base
            name, i = base, 0
            while name in self.used:
                i += 1
                name = f"{base}_{i}"
            self.used.add(name)
            names[var] = name
        return names[var]

    def atom(self, x: Atom, names: dict[Var, str]) -> str:
        return names[x] if isinstance(x, Var) else literal(x)

    def output(self, i: int, x: Atom, names: dict[Var, str]) -> str:
        if x is None:
            return "None"
        text = names[x] if isinstance(x, Var) else f"torch.tensor({literal(x)}, device=device)"
        return f"{text}.clone()" if i in self.copies else text

    # -- equations --------------------------------------------------------------------------------------------

    def equation(self, eqn: Eqn, names: dict[Var, str], over: int | None = None) -> None:
        args = [self.atom(x, names) for x in eqn.inputs]
        comment = f"  # {' '.join(eqn.line.split())}" if eqn.line else ""  # one line, whatever the source says
        outs = [self.named(v, names) for v in eqn.outputs]
        if eqn.op is cond:
            self.cond(eqn, args, outs, comment)
        elif eqn.op is loop:
            self.loop(eqn, args, outs, names, comment)
        elif eqn.op is scan:
            self.scan(eqn, args, outs, names, comment)
        elif eqn.op is custom and not self.reuse:
            forward, backward = (self.blocks[eqn.params[k]] for k in ("forward", "backward"))
            args = [forward, backward, str(eqn.params["wrt"]), str(eqn.params["outs"]), *args]
            self.line(f"{_unpack(outs)}OwnGradient.of({', '.join(args)}){comment}")
        elif eqn.op is call or eqn.op is custom:
            name = eqn.params["block" if eqn.op is call else "forward"]
            self.line(f"{_unpack(outs)}{self.blocks[name]}({', '.join(args)}){comment}")
        else:
            # told if the others do not answer
            if eqn.op.by_rank and (eqn.op.collective is not None or eqn.op.effect) and eqn.source:
                self.line(f"ranks.COMMUNICATORS[-1].at = {' '.join(eqn.line.split())!r}")
            text = self.expression(eqn, args) if over is None else write_into(eqn.op, over, args, eqn.params)
            self.line(f"{', '.join(outs)} = {text}{comment}")

    def update(self, eqn: Eqn, names: dict[Var, str], copies: set[int]) -> None:
        """An equation over the memory of its first operands, or of copies of them, which are its results from here on;
        on the host, one that is given what it needs and runs whenever that has come."""
        operands = dict.fromkeys(names[v] for v in eqn.vars)
        args = [self.atom(x, names) for x in eqn.inputs]
        for k, y in enumerate(eqn.outputs):
            if k in copies:
                self.line(f"{self.named(y, names)} = {args[k]}.clone()")
                args[k] = names[y]
            names[y] = args[k]
        args = [x + (".clone()" if k in copies and k >= len(eqn.outputs) else "") for k, x in enumerate(args)]
        text = write_inplace(eqn.op, args, eqn.params)
        if eqn.on_host:
            bound = ", ".join(f"{name}={name}" for name in operands)
            text = f"spaces.compute(lambda {bound}: {text}, [{', '.join(operands)}])"
        self.line(text)

    def gather(self, eqn: Eqn, names: dict[Var, str], places: Sequence[Var | None]) -> None:
        """The end of a gather, its results in the memory of the inputs that they replace."""
        names |= {y: names[old] for y, old in zip(eqn.outputs, places, strict=True) if old is not None}
        wanted = "".join(f"{names[old] if old is not None else None}, " for old in places)
        args = [f"({wanted})", *(self.atom(x, names) for x in eqn.inputs)]
        args += [f"{k}={literal(eqn.params[k])}" for k in ("dims", "sizes")]
        self.line(f"{', '.join(self.named(y, names) for y in eqn.outputs)} = ranks.finish_into({', '.join(args)})")

    def replace(self, eqn: Eqn, names: dict[Var, str]) -> None:
        """where(c, new, old) in the memory of an input: on the host nothing is computed, and nothing written if not."""
        condition, new, old = (self.atom(x, names) for x in eqn.inputs)
        names[eqn.outputs[0]] = old
        if self.on_host:
            self.line(f"if {condition}:")
            self.line(f"    {old}.copy_({new})")
        else:
            self.line(f"torch.where({condition}, {new}, {old}, out={old})")

    def move(self, i: int, eqn: Eqn, names: dict[Var, str]) -> None:
        """Half of a move; what it brings to the host has its place there, or an input's."""
        arena = self.arenas.get(self.around)
        args = [self.atom(x, names) for x in eqn.inputs] + [f"to={eqn.params['to']!r}"]
        if eqn.op.effect and arena is not None and i in arena.at:
            args.append(f"at={arena.at[i]}")
        elif eqn.op.effect and arena is not None and i in arena.over and self.donates:
            args.append(f"over={names[arena.over[i]]}")
            self.over[eqn.outputs[0]] = names[arena.over[i]]
        if eqn.op.effect and eqn.params["to"] == DEVICE:
            args.append("device=device")
        args += [f"{k}={v}" for k, v in eqn.params.items() if k == "wait"]
        if not eqn.op.effect and eqn.inputs[0] in self.over:  # the input is its new value from here on
            names[eqn.outputs[0]] = self.over[eqn.inputs[0]]
        comment = f"  # {' '.join(eqn.line.split())}" if eqn.line else ""
        self.line(f"{self.named(eqn.outputs[0], names)} = spaces.{eqn.op.name}({', '.join(args)}){comment}")

    def expression(self, eqn: Eqn, args: list[str]) -> str:
        if eqn.op.by_rank:
            more = [f"{k}={literal(v)}" for k, v in eqn.params.items()] + ["device=device"] * (
                "device" in eqn.op.defaults
            )
            room = _ROOMS.get(eqn.op.kernel.__module__, "ranks")
            return f"{room}.{eqn.op.name}({', '.join([*args, *more])})"
        return _const(eqn.params["name"]) if eqn.op is o.const else write(eqn.op, args, eqn.params, eqn.input_types)

    def held(self, name: str, args: Sequence[str], outs: Sequence[str]) -> None:
        """A block on these arguments, its results in variables `outs`: in line, or as a call."""
        if name not in self.inlined:
            self.line(f"{_unpack(outs)}{self.blocks[name]}({', '.join(args)})")
            return
        block = self.program.blocks[name]
        before = len(self.lines)
        names = dict(zip(block.inputs, args, strict=True))
        for x, out in zip(block.outputs, outs, strict=True):  # a value made here for one result gets that result's name
            if isinstance(x, Var) and x not in names and out not in args:
                names[x] = out
        own = set[Var]()
        self.body(name, names, own)
        moves = [(out, self.output(-1, x, names)) for out, x in zip(outs, block.outputs, strict=True)]
        moves = [(out, value) for out, value in moves if out != value]
        if moves:
            self.line(f"{', '.join(m[0] for m in moves)} = {', '.join(m[1] for m in moves)}")
        # `outs` hold them from here on
        results = dict.fromkeys(names[x] for x in block.outputs if isinstance(x, Var) and x in own)
        if twice := [name for name in results if name not in outs and name not in args]:
            self.line("del " + ", ".join(twice))
        if len(self.lines) == before:
            self.line("pass")

    def cond(self, eqn: Eqn, args: list[str], outs: list[str], comment: str) -> None:
        self.line(f"if {args[0]}:{comment}")
        for branch in ("then", "orelse"):
            self.indent += 1
            self.held(eqn.params[branch], args[1:], outs)
            self.indent -= 1
            if branch == "then":
                self.line("else:")

    def begin_turns(self, starts: Sequence[str], carry: Sequence[str], names: dict[Var, str]) -> None:
        """What turns replace is not held by the name that it began with, if nobody reads that any more."""
        if carry:
            self.line(f"{', '.join(carry)} = {', '.join(starts)}")
        if self.last:
            self.line("del " + ", ".join(names[v] for v in self.last))

    def loop(self, eqn: Eqn, args: list[str], outs: list[str], names: dict[Var, str], comment: str) -> None:
        n = eqn.params.get("consts", 0)
        state = [*args[:n], *outs]
        self.begin_turns(args[n:], outs, names)
        test = self.program.blocks[eqn.params["test"]]
        if eqn.params["test"] in self.inlined and len(test.eqns) == 1 and not _is_written_here(test.eqns[0].op):
            names = dict(zip(test.inputs, state, strict=True))
            self.line(
                f"while {self.expression(test.eqns[0], [self.atom(x, names) for x in test.eqns[0].inputs])}:{comment}"
            )
            self.indent += 1
        else:
            more = self.named(Var("more", eqn.outputs[0].type), {})
            self.line(f"while True:{comment}")
            self.indent += 1
            self.held(eqn.params["test"], state, [more])
            self.line(f"if not {more}:")
            self.line("    break")
        self.held(eqn.params["body"], state, outs)
        self.indent -= 1

    def scan(self, eqn: Eqn, args: list[str], outs: list[str], names: dict[Var, str], comment: str) -> None:
        p = eqn.params
        n = p.get("consts", 0)
        m = n + p.get("carry", 0)
        state, ys = outs[: m - n], outs[m - n :]
        body = self.program.blocks[p["body"]]
        self.begin_turns(args[n:m], state, names)
        for y in ys:
            self.line(f"{y} = []")
        turn = self.named(Var("turn", eqn.outputs[0].type), {}) if eqn.outputs else "_"
        turns = f"reversed(range({p['length']}))" if p.get("reverse") else f"range({p['length']})"
        self.line(f"for {turn} in {turns}:{comment}")
        self.indent += 1
        row = [self.named(Var(f"{y}_row", v.type), {}) for y, v in zip(ys, eqn.outputs[m - n :], strict=True)]
        given = [self.named(Var(v.name, v.type), {}) for v in body.inputs[m:]]
        for name, x in zip(given, args[m:], strict=True):
            self.line(f"{name} = {x}[{turn}]")
        self.held(p["body"], [*args[:n], *state, *given], [*state, *row])
        for y, r in zip(ys, row, strict=True):
            self.line(f"{y}.append({r})")
        if row or given:  # the last row would keep the memory of all
            self.line("del " + ", ".join([*row, *given]))
        self.indent -= 1
        for y, var in zip(ys, eqn.outputs[m - n :], strict=True):
            if p["length"] == 0:
                self.line(f"{y} = torch.empty({var.shape}, dtype={var.dtype}, device=device)")
            else:
                self.line(f"{y} = torch.stack({y}[::-1])" if p.get("reverse") else f"{y} = torch.stack({y})")


def _is_written_here(op: Op) -> bool:
    """Has it no kernel to be copied: control flow, constants, torch's own calls?"""
    return op in CONTROL or op in (o.const, o.opaque)


def _unpack(outs: Sequence[str]) -> str:
    return "".join(o + ", " for o in outs) + "= " if outs else ""


def _const(name: str) -> str:
    return "CONST_" + re.sub(r"\W", "_", name)


def _inlined(program: Program) -> set[str]:
    """Blocks that exactly one branch or loop holds."""
    uses = Counter(str(ref) for _, eqn in walk(program) for ref in eqn.refs)
    return {str(ref) for _, eqn in walk(program) if eqn.op in (cond, loop, scan) for ref in eqn.refs if uses[ref] == 1}


def _helpers(program: Program, donate: bool) -> dict[str, str]:
    """Functions and constants that the kernels need beside them, by name."""
    ops = {e.op for _, e in walk(program)}
    return dict(
        sorted(
            (k, text)
            for op in ops
            if not _is_written_here(op) and not op.by_rank and not op.transfers
            for k, text in sources_of(op, donate).items()
        )
    )


def function_names(program: Program, donate: bool = True) -> dict[str, str]:
    """Blocks -> the Python functions that they are in loaded code."""
    return _block_names(program, _helpers(program, donate))


def _block_names(program: Program, helpers: Container[str]) -> dict[str, str]:
    """Block names that are free in Python; the entry is `main`."""
    names: dict[str, str] = {program.entry: "main"}
    for name in order(program):
        if name != program.entry:
            names[name] = name if name not in _TAKEN and name != "main" and name not in helpers else f"{name}_block"
    return names
