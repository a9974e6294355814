"""Reverse mode: a program and its gradient as one program.

    y = f(x)         =>    y, residuals = f_forward(x)
                           dx = f_backward(residuals, dy)

Each equation `y = op(x)` on the way from the inputs of interest to the outputs (an *active* one) gives, in reverse
order,

    dx += op.vjp(dy, y, x)

and what the backward equations use of the forward ones are the residuals.  Which of them to keep or recompute is
decided elsewhere.  `call` becomes a call of the forward block and, in reverse, of the backward block, made once for all
calls; `cond`, `loop` and `scan` map to themselves (`vjp_control.py`).  The result is an ordinary program: it can be
simplified, read, and differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mycel.errors import GradientError
from mycel.ir import (
    CONTROL,
    Atom,
    Block,
    Builder,
    Eqn,
    Params,
    Program,
    Ref,
    Type,
    Var,
    call,
    free_name,
    is_float,
    lookup,
)
from mycel.ops import o
from mycel.ops.stack import zeros


@dataclass(frozen=True)
class Pair:
    """A block differentiated: forward returns outputs and `residuals`; backward takes `reused` inputs, residuals and
    cotangents.

    `reused`: which inputs of the block backward reads.  `given`: for which outputs it takes cotangents.  `gives`: for
    which inputs it returns them.
    """

    forward: str
    backward: str
    reused: tuple[int, ...]
    residuals: tuple[Var, ...]
    given: tuple[int, ...]
    gives: tuple[int, ...]


def value_and_grad(
    program: Program, wrt: Sequence[int | Type], result: int = 0, after: int | None = None, dense: bool = True
) -> Program:
    """The program that also returns the gradient of one scalar result, behind the first `after` (default: all) results.

    `wrt` names inputs by position; a Type among them stands for a value the program does not use.  The gradient of what
    the result does not depend on is zeros, or None if not `dense`.
    """
    return Vjp(program).forward_and_backward(list(wrt), result, len(program.results) if after is None else after, dense)


def forward_and_backward(program: Program, wrt: Sequence[int], after: int) -> tuple[Program, Program, list[int]]:
    """Two programs: the first returns residuals behind its first `after` results; the second takes them and cotangents
    of those results, and returns gradients.  Also: for which results it takes cotangents."""
    return Vjp(program).apart(list(wrt), after)


class Vjp:
    """The blocks of a program while it is differentiated: the old ones, and pairs made of them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks: dict[str, Block] = dict(program.blocks)
        self.pairs: dict[Any, Any] = {}
        self.actives: dict[Any, tuple[bool, ...]] = {}

    # -- whole programs ---------------------------------------------------------------------------------------------

    def forward_and_backward(self, wrt: list[int | Type], result: int, after: int, dense: bool) -> Program:
        main = self.program.main
        half = Half(self, main, [i in wrt for i in range(len(main.inputs))])
        out = main.outputs[result]
        if not isinstance(out, Var) or not is_float(out.dtype) or out.shape != ():
            raise GradientError(
                f"the gradient is taken of a scalar; this result is {out.type if isinstance(out, Var) else repr(out)}"
            )
        with half.backward:
            one = o.full(1.0, shape=(), dtype=out.dtype)
        grads = half.pull({result: one})
        with half.backward:
            wrt_grads = [None if isinstance(i, Type) else grads[i] for i in wrt]
            if dense:
                types = [i if isinstance(i, Type) else main.inputs[i].type for i in wrt]
                wrt_grads = [zeros(t) if g is None else g for g, t in zip(wrt_grads, types, strict=True)]
        eqns = (*half.forward.eqns, *half.backward.eqns)
        outs = (*half.outputs[:after], *wrt_grads, *half.outputs[after:])
        return self._program(Block(main.inputs, eqns, outs), half.names)

    def apart(self, wrt: list[int], after: int) -> tuple[Program, Program, list[int]]:
        main = self.program.main
        half = Half(self, main, [i in wrt for i in range(len(main.inputs))])
        given = [i for i in half.active_outputs if i < after]
        gs = {i: half.cotangent(i) for i in given}
        grads = half.pull(gs)
        with half.backward:
            wrt_grads = [grads[i] if grads[i] is not None else zeros(main.inputs[i].type) for i in wrt]
        residuals = half.free(wrt_grads)
        forward = Block(
            main.inputs, tuple(half.forward.eqns), (*half.outputs[:after], *residuals, *half.outputs[after:])
        )
        backward = Block((*residuals, *gs.values()), tuple(half.backward.eqns), tuple(wrt_grads))
        first = self._program(forward, half.names)
        second = replace(self._program(backward, half.names), updates=(), roles={})
        return first, second, given

    def _program(self, main: Block, names: dict[str, str]) -> Program:
        return replace(self.program, blocks={**self.blocks, self.program.entry: renamed(main, names)})

    # -- blocks ---------------------------------------------------------------------------------------------

    def add(self, name: str, block: Block) -> str:
        """Enter a block under a free name."""
        unique = free_name(name, self.blocks)
        self.blocks[unique] = block
        return unique

    def active(self, name: str, inputs: Sequence[bool]) -> tuple[bool, ...]:
        """Which outputs of a block depend on its active inputs."""
        key = (name, tuple(inputs))
        if key not in self.actives:
            block = self.blocks[name]
            known = active_vars(self, block, inputs)
            self.actives[key] = tuple(isinstance(x, Var) and x in known for x in block.outputs)
        return self.actives[key]

    def pair(self, name: str, active: Sequence[bool], given: Sequence[int]) -> Pair:
        """A block as forward and backward, for these active inputs and cotangents; made once."""
        key = (name, tuple(active), tuple(given))
        if key not in self.pairs:
            block = self.blocks[name]
            half = Half(self, block, active)
            gs = {i: half.cotangent(i) for i in given}
            grads = half.pull(gs)
            gives = tuple(i for i, g in enumerate(grads) if g is not None)
            outs = [grads[i] for i in gives]
            free = half.free(outs)
            reused = tuple(i for i, v in enumerate(block.inputs) if v in free)
            residuals = tuple(v for v in free if v not in block.inputs)
            forward = Block(block.inputs, tuple(half.forward.eqns), (*half.outputs, *residuals))
            inputs = (*(block.inputs[i] for i in reused), *residuals, *gs.values())
            backward = renamed(Block(inputs, tuple(half.backward.eqns), tuple(outs)), half.names)
            names = self.add(f"{name}_forward", forward), self.add(f"{name}_backward", backward)
            self.pairs[key] = Pair(*names, reused, residuals, tuple(given), gives)
        return self.pairs[key]


Pull = Callable[[list[Any]], list[Any]]


class Half:
    """One block: its forward equations, and backward equations as cotangents are pulled through."""

    def __init__(self, vjp: Vjp, block: Block, active: Sequence[bool], beside: Builder | None = None) -> None:
        self.vjp, self.block = vjp, block
        self.forward = Builder(beside, names_of=block)
        self.backward = Builder(beside=self.forward, phase="backward")
        self.names: dict[str, str] = {}
        self.active = {v for v, a in zip(block.inputs, active, strict=True) if a and is_float(v.dtype)}
        self.values: dict[Var, Atom] = {}
        self.tape: list[tuple[Eqn, Pull]] = []
        for eqn in block.eqns:
            self._forward(replace(eqn, inputs=tuple(lookup(x, self.values) for x in eqn.inputs), phase="forward"))
        self.outputs = tuple(lookup(x, self.values) for x in block.outputs)
        self.active_outputs = [i for i, x in enumerate(self.outputs) if isinstance(x, Var) and x in self.active]
        self.given: dict[Var, Any] = {}

    # -- forward ----------------------------------------------------------------------------------------------

    def _forward(self, eqn: Eqn) -> None:
        """An equation as it is, or as its differentiable form, and how to pull cotangents through it."""
        self.forward.at(eqn)
        if not any(v in self.active for v in eqn.vars):
            self.forward.eqns.append(eqn)
        elif eqn.op in CONTROL:
            self.tape.append((eqn, FORWARD[eqn.op.name](self, eqn)))
        elif eqn.op.vjp is None and eqn.op.expand is not None:
            self._expanded(eqn)
        else:
            self.forward.eqns.append(eqn)
            outs = [v for v in eqn.outputs if is_float(v.dtype)]
            if outs:
                self.active.update(outs)
                self.tape.append((eqn, _pull_of(eqn)))

    def _expanded(self, eqn: Eqn) -> None:
        """An operator without a gradient of its own: its meaning in smaller operators."""
        inner = Builder(beside=self.forward)
        inner.at(eqn)
        with inner:
            outs = eqn.op.expand(*eqn.inputs, **eqn.params)  # type: ignore[misc]
        for small in inner.eqns:
            self._forward(replace(small, inputs=tuple(lookup(x, self.values) for x in small.inputs)))
        results = outs if isinstance(outs, (tuple, list)) else (outs,)
        self.values.update({old: lookup(new, self.values) for old, new in zip(eqn.outputs, results, strict=True)})

    def is_active(self, xs: Sequence[Atom]) -> tuple[bool, ...]:
        return tuple(isinstance(x, Var) and x in self.active for x in xs)

    def fresh(self, like: Var, name: str | None = None) -> Var:
        return Var(self.forward.name(name or like.name), like.type)

    # -- backward ---------------------------------------------------------------------------------------------

    def cotangent(self, i: int) -> Var:
        """A new Var for the cotangent of output i."""
        out = self.outputs[i]
        assert isinstance(out, Var)
        return Var(self.backward.name(f"d_{out.name}"), out.type)

    def pull(self, cotangents: dict[int, Any]) -> list[Any]:
        """Cotangents of outputs -> cotangents of inputs, None where there is none."""
        self.sums: dict[Var, Any] = {}
        with self.backward:
            for i, g in cotangents.items():
                self._accumulate(self.outputs[i], g)
            for eqn, pull in reversed(self.tape):
                gs = [self.sums.pop(v, None) for v in eqn.outputs]
                if all(g is None for g in gs):
                    continue
                self.backward.source = eqn.source
                for x, g in zip(eqn.inputs, pull(gs), strict=True):
                    if g is not None and isinstance(x, Var) and x in self.active:
                        self._accumulate(x, g)
        return [self.sums.get(v) if v in self.active else None for v in self.block.inputs]

    def _accumulate(self, x: Atom, g: Any) -> None:
        if not isinstance(x, Var):
            return
        before = self.sums.get(x)
        total = g if before is None else o.add(before, g)
        self.sums[x] = total
        if isinstance(total, Var):
            self.names[total.name] = f"d_{x.name}"

    def free(self, outs: Sequence[Any]) -> list[Var]:
        """Values of the forward half that the backward half uses, in order of first use."""
        backward_values = {v for e in self.backward.eqns for v in e.outputs}
        known = {*self.block.inputs, *(v for e in self.forward.eqns for v in e.outputs)}
        used = [v for e in self.backward.eqns for v in e.vars] + [v for v in outs if isinstance(v, Var)]
        return list(dict.fromkeys(v for v in used if v not in backward_values and v in known))


def _pull_of(eqn: Eqn) -> Pull:
    """The gradient rule of an operator on this equation."""

    def pull(gs: list[Any]) -> list[Any]:
        if eqn.op.vjp is None:
            where = f"\n  at        {eqn.source}" if eqn.source else ""
            raise GradientError(
                f"no gradient rule for {eqn.op.name}{where}\n"
                "  try       mycel.stop_gradient on its inputs, or a custom gradient"
            )
        single = len(eqn.outputs) == 1
        try:
            grads = eqn.op.vjp(
                gs[0] if single else tuple(gs), eqn.outputs[0] if single else eqn.outputs, *eqn.inputs, **eqn.params
            )
        except GradientError as e:
            raise GradientError(f"{e}\n  at        {eqn.source}" if eqn.source else str(e)) from e
        return list(grads) if isinstance(grads, (tuple, list)) else [grads]

    return pull


def active_vars(vjp: Vjp, block: Block, inputs: Sequence[bool]) -> set[Var]:
    """Values of a block that depend on its active inputs and can carry a gradient."""
    known = {v for v, a in zip(block.inputs, inputs, strict=True) if a and is_float(v.dtype)}
    for eqn in block.eqns:
        if any(v in known for v in eqn.vars) and eqn.op is not o.stop_gradient:
            if eqn.op is call:
                flags = vjp.active(eqn.params["block"], [isinstance(x, Var) and x in known for x in eqn.inputs])
            else:
                flags = tuple(True for _ in eqn.outputs)
            known.update(v for v, a in zip(eqn.outputs, flags, strict=True) if a and is_float(v.dtype))
    return known


def spread_flags(vjp: Vjp, body: str, flags: Sequence[bool], n: int, m: int) -> tuple[bool, ...]:
    """Active operands of a loop whose state is operands n to m: state that becomes active in a turn is active in the
    next."""
    now = list(flags)
    while True:
        outs = vjp.active(body, now)
        after = [f or (n <= i < m and outs[i - n]) for i, f in enumerate(now)]
        if after == now:
            return tuple(now)
        now = after


def renamed(block: Block, names: dict[str, str]) -> Block:
    """The block with values renamed (old name -> wished name), still unique."""
    used = {v.name for v in block.inputs} | {v.name for e in block.eqns for v in e.outputs if v.name not in names}
    new: dict[Var, Atom] = {}
    eqns = []
    for eqn in block.eqns:
        for v in eqn.outputs:
            if v.name in names:
                wish, i = names[v.name], 0
                while wish in used:
                    i += 1
                    wish = f"{names[v.name]}_{i}"
                used.add(wish)
                new[v] = Var(wish, v.type)
        inputs = tuple(lookup(x, new) for x in eqn.inputs)
        outputs = tuple(new.get(v, v) for v in eqn.outputs)
        eqns.append(replace(eqn, inputs=inputs, outputs=outputs))  # type: ignore[arg-type]
    return Block(block.inputs, tuple(eqns), tuple(lookup(x, new) for x in block.outputs))


def forward_call(half: Half, eqn: Eqn) -> Pull:
    """y… = call(x…, block=@f)  =>  y…, r… = call(x…, block=@f_forward);  dx… = call(x…, r…, dy…, block=@f_backward)"""
    name = eqn.params["block"]
    flags = half.is_active(eqn.inputs)
    outs = half.vjp.active(name, flags)
    at = len(half.forward.eqns)
    half.forward.eqns.append(eqn)
    half.active.update(v for v, a in zip(eqn.outputs, outs, strict=True) if a)

    def pull(gs: list[Any]) -> list[Any]:
        pair = half.vjp.pair(name, flags, [i for i, g in enumerate(gs) if g is not None])
        kept = tuple(half.fresh(r) for r in pair.residuals)
        half.forward.eqns[at] = Eqn(
            call, eqn.inputs, Params(block=Ref(pair.forward)), (*eqn.outputs, *kept), eqn.source
        )
        operands = [*(eqn.inputs[i] for i in pair.reused), *kept, *(gs[i] for i in pair.given)]
        types = [eqn.inputs[i].type for i in pair.gives]  # type: ignore[union-attr]
        grads = half.backward.append(call, tuple(operands), {"block": Ref(pair.backward)}, types)
        return scatter(grads if len(types) != 1 else (grads,), pair.gives, len(eqn.inputs))

    return pull


def scatter(values: Sequence[Any], at: Sequence[int], length: int) -> list[Any]:
    """A list of `length` with the values at their places, None elsewhere."""
    result: list[Any] = [None] * length
    for i, value in zip(at, values, strict=True):
        result[i] = value
    return result


FORWARD: dict[str, Callable[[Half, Eqn], Pull]] = {"call": forward_call}  # control flow enters itself here: vjp_control
