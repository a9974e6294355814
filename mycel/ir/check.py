"""The checker: re-derives every type of a program.  Runs after every pass; names the equation and the user's line."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from mycel.errors import IRError
from mycel.ir.control import CONTROL, call, outputs_of, scan
from mycel.ir.program import PHASES, Atom, Block, Eqn, Program, Var
from mycel.ir.role import Role
from mycel.ir.types import DEVICE
from mycel.ir.walk import order

_TRUSTED: ContextVar[bool] = ContextVar("trusted", default=False)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Inside, programs are taken as they are: a search lowers many to price them, and the one that is run is lowered
    again."""
    token = _TRUSTED.set(True)
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def check(program: Program) -> Program:
    """The program itself, or IRError."""
    if _TRUSTED.get():
        return program
    if program.entry not in program.blocks:
        raise IRError(f"no block named {program.entry}, the entry")
    order(program)  # refuses recursion and missing blocks
    for name, block in program.blocks.items():
        _check_block(program, name, block)
    _check_updates(program)
    _check_roles(program)
    return program


def _check_block(program: Program, name: str, block: Block) -> None:
    known: dict[str, Var] = {}
    for var in block.inputs:
        if var.name in known:
            raise IRError(f"block {name}: input {var.name} is there twice")
        known[var.name] = var
    for eqn in block.eqns:
        try:
            _check_eqn(program, eqn, known)
        except Exception as e:  # type rules see operands they were not written for
            where = f"\n  at {eqn.source}" if eqn.source else ""
            raise IRError(f"block {name}: {_headline(eqn)}\n  {type(e).__name__}: {e}{where}") from e
    _check_phases(name, block)
    for x in block.outputs:
        _check_defined(x, known, f"output of block {name}")


def _check_eqn(program: Program, eqn: Eqn, known: dict[str, Var]) -> None:
    for x in eqn.inputs:
        _check_defined(x, known, "input")
    _check_arguments(eqn)
    _check_spaces(eqn)
    types = outputs_of(eqn, program.blocks) if eqn.op in CONTROL else eqn.op.infer(eqn.input_types, eqn.params)
    stated = tuple(v.type for v in eqn.outputs)
    if types != stated:
        raise IRError(f"gives ({', '.join(map(str, types))}), stated as ({', '.join(map(str, stated))})")
    if eqn.op.name == "const" and eqn.params["name"] not in program.consts:
        raise IRError(f"the program has no constant named {eqn.params['name']}")
    for var in eqn.outputs:
        if var.name in known:
            raise IRError(f"{var.name} is defined twice")
        known[var.name] = var


def _check_spaces(eqn: Eqn) -> None:
    """Operators compute on the device; what lies on the host is moved, handed on to a block, or computed with there."""
    if eqn.on_host:
        here = next((v for v in eqn.vars if v.type.ndim and v.type.space == DEVICE), None)
        if here is not None:
            raise IRError(f"computes on the host, but {here.name} lies on the device")
        return
    away = next((v for v in eqn.vars if v.type.space != DEVICE), None)
    if away is not None and not eqn.op.transfers and eqn.op not in (call, scan):
        raise IRError(f"computes on the device, but {away.name} lies on the {away.type.space}")


def _check_phases(name: str, block: Block) -> None:
    """Forward reads nothing that backward or the update makes, backward nothing that the update makes."""
    since = dict.fromkeys(block.inputs, 0)
    for eqn in block.eqns:
        if eqn.phase not in PHASES:
            raise IRError(f"block {name}: {_headline(eqn)}\n  phase {eqn.phase!r} is none of {', '.join(PHASES)}")
        rank = PHASES.index(eqn.phase)
        early = next((v for v in eqn.vars if since[v] > rank), None)
        if early is not None:
            raise IRError(
                (
                    f"block {name}: {_headline(eqn)}\n"
                    f"  an equation of the {eqn.phase} reads {early.name}, made in the {PHASES[since[early]]}"
                )
                + (f"\n  at {eqn.source}" if eqn.source else "")
            )
        since.update(dict.fromkeys(eqn.outputs, rank))


def _check_arguments(eqn: Eqn) -> None:
    """The inputs and params are ones the kernel takes (a C function without a signature takes no params)."""
    signature = _signature(eqn.op.kernel)
    if signature is not None:
        signature.bind(*eqn.inputs, **eqn.params)
    elif eqn.params:
        raise IRError(f"takes no params, was given {', '.join(eqn.params)}")


@functools.cache
def _signature(kernel: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(kernel)
    except ValueError:
        return None


def _check_defined(x: Atom, known: dict[str, Var], role: str) -> None:
    if isinstance(x, Var) and known.get(x.name) != x:
        seen = known.get(x.name)
        raise IRError(
            f"{role} {x.name} is {seen.type if seen else 'not defined'}" + (f", used as {x.type}" if seen else "")
        )


def _check_updates(program: Program) -> None:
    inputs = {v.name: v for v in program.inputs}
    n = len(program.updates)
    if n > len(program.main.outputs) or len(set(program.updates)) != n:
        raise IRError(f"updates {program.updates} do not match the outputs")
    for name, new in zip(program.updates, program.main.outputs[len(program.main.outputs) - n :], strict=True):
        if name not in inputs:
            raise IRError(f"update of {name}, which is no input")
        if not isinstance(new, Var) or new.type != inputs[name].type:
            raise IRError(f"update of {inputs[name]} with {new}")


def _check_roles(program: Program) -> None:
    """Roles are of inputs, and no two inputs are the same thing."""
    names = {v.name for v in program.inputs}
    for name in program.roles:
        if name not in names:
            raise IRError(f"{name} is {program.roles[name]}, but no input")
    seen: dict[Role, str] = {}
    for var in program.inputs:
        first = seen.setdefault(program.role(var), var.name)
        if first != var.name:
            raise IRError(f"the inputs {first} and {var.name} are both {program.role(var)}")


def _headline(eqn: Eqn) -> str:
    return f"{', '.join(v.name for v in eqn.outputs)} = {eqn.op.name}({', '.join(str(t) for t in eqn.input_types)})"
