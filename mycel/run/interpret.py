"""Eager mode: a program run equation by equation, each value freed after its last use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mycel.errors import RunError
from mycel.ir import CONTROL, Atom, Block, Eqn, Program, Var, call, cond, custom, deaths, loop, scan
from mycel.ops import o
from mycel.ops.memory_sharing import shared_outputs
from mycel.run.own_gradient import OwnGradient

Hook = Callable[[Eqn, list[Any], list[Any]], None]


def interpret(program: Program, inputs: Sequence[torch.Tensor], hook: Hook | None = None) -> list[Any]:
    """Outputs of the entry (results, then updates) for these inputs; `hook(eqn, inputs, outputs)` is called after each
    equation."""
    if len(inputs) != len(program.inputs):
        raise RunError(f"the program takes {len(program.inputs)} inputs, was given {len(inputs)}")
    device = next((x.device for x in inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))
    outs = _Interpreter(program, device, hook).block(program.main, list(inputs))
    for i in shared_outputs(program):
        outs[i] = outs[i].clone()
    return outs


class _Interpreter:
    def __init__(self, program: Program, device: torch.device, hook: Hook | None) -> None:
        self.program, self.device, self.hook = program, device, hook
        self.consts = {name: c.to(device) for name, c in program.consts.items()}
        self.deaths: dict[int, list[list[Var]]] = {}

    def named(self, name: str, inputs: list[Any]) -> list[Any]:
        return self.block(self.program.blocks[name], inputs)

    def block(self, block: Block, inputs: list[Any]) -> list[Any]:
        values: dict[Var, Any] = dict(zip(block.inputs, inputs, strict=True))
        dead_after = self.deaths.setdefault(id(block), deaths(block))
        for eqn, dead in zip(block.eqns, dead_after, strict=True):
            outs = self.eqn(eqn, [_value(x, values) for x in eqn.inputs])
            if self.hook is not None:
                self.hook(eqn, [_value(x, values) for x in eqn.inputs], outs)
            values.update(zip(eqn.outputs, outs, strict=True))
            for var in dead:
                del values[var]
        return [_value(x, values) for x in block.outputs]

    def eqn(self, eqn: Eqn, args: list[Any]) -> list[Any]:
        p: Mapping[str, Any] = eqn.params
        if eqn.op is call:
            return self.named(p["block"], args)
        if eqn.op is custom:
            forward, backward = (functools.partial(self._called, p[k]) for k in ("forward", "backward"))
            return list(OwnGradient.of(forward, backward, p["wrt"], p["outs"], *args))
        if eqn.op is cond:
            return self.named(p["then" if args[0] else "orelse"], args[1:])
        n = p.get("consts", 0)
        if eqn.op is loop:
            held, state = args[:n], args[n:]
            while self.named(p["test"], held + state)[0]:
                state = self.named(p["body"], held + state)
            return state
        if eqn.op is scan:
            return self.scan(p, args, n, n + p.get("carry", 0))
        if eqn.op is o.const:
            return [self.consts[p["name"]]]
        extra = {"device": self.device} if "device" in eqn.op.defaults else {}
        outs = eqn.op.kernel(*args, **p, **extra)
        is_stack = len(eqn.outputs) == 1 and eqn.outputs[0].type.depth > 0  # a stack is a pair, and one value
        return list(outs) if isinstance(outs, (tuple, list)) and not is_stack else [outs]

    def _called(self, block: str, *args: Any) -> list[Any]:
        return self.named(block, list(args))

    def scan(self, p: Mapping[str, Any], args: list[Any], n: int, m: int) -> list[Any]:
        held, state, xs = args[:n], args[n:m], args[m:]
        turns = range(p["length"])
        rows: list[list[Any]] = []
        for i in reversed(turns) if p.get("reverse") else turns:
            outs = self.named(p["body"], held + state + [x[i] for x in xs])
            state = outs[: m - n]
            rows.append(outs[m - n :])
        if p.get("reverse"):
            rows.reverse()
        if rows:
            return state + [torch.stack(column) for column in zip(*rows, strict=True)]
        body = self.program.blocks[p["body"]].outputs[m - n :]
        return state + [
            torch.empty((0, *v.shape), dtype=v.dtype, device=self.device) for v in body if isinstance(v, Var)
        ]


def _value(x: Atom, values: dict[Var, Any]) -> Any:
    return values[x] if isinstance(x, Var) else x


def not_finite(eqn: Eqn, inputs: list[Any], outs: list[Any]) -> None:
    """A hook that stops at the first equation that makes a NaN or an infinity: one it was not given, and that is not
    written in the code."""
    if eqn.op in CONTROL or eqn.op in (o.const, o.full):
        return
    had_nan, had_inf = _has(inputs, torch.isnan), _has(inputs, torch.isinf)
    for var, y in zip(eqn.outputs, outs, strict=True):
        nan, inf = _has([y], torch.isnan) and not had_nan, _has([y], torch.isinf) and not (had_inf or had_nan)
        if nan or inf:
            kinds = " and ".join(k for k, present in (("NaN", nan), ("infinity", inf)) if present)
            bad = int((~torch.isfinite(y)).sum())
            raise RunError(
                f"{eqn.op.name} made {kinds} in {bad} of {y.numel()} elements of {var}\n"
                f"  at        {eqn.line or 'unknown'}\n"
                f"  try       look at the inputs of this line"
            )


def _has(values: list[Any], kind: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Is there a NaN (an infinity) among tensors and numbers?"""
    for x in values:
        if isinstance(x, float):
            x = torch.tensor(x)
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex()) and bool(kind(x).any()):
            return True
    return False
