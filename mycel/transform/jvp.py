"""Forward mode: a program that carries tangents beside values.

    y = f(x)    =>    y, ty = f_tangents(x, tx)

No operator needs a rule of its own: its gradient rule `dx = J' dy` is linear in dy, and pulling tx back through *that*
gives J tx.  Control flow maps to itself with tangents as further operands; loops carry them as further state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    atom_type,
    custom,
    is_float,
    leading_to,
    lookup,
    substitute,
)
from mycel.ops.stack import zeros
from mycel.transform.vjp import Half, Vjp, renamed, spread_flags
from mycel.transform.vjp_control import custom_cotangents


def jvp(program: Program, wrt: Sequence[int]) -> Program:
    """The program with a tangent for each input of `wrt` as further inputs: (results…, tangents of the float results…,
    updates)."""
    walker = Jvp(program)
    flags = [i in wrt for i in range(len(program.inputs))]
    n = len(program.main.outputs) - len(program.updates)
    wanted = [i for i in range(n) if is_float(atom_type(program.main.outputs[i]).dtype)]
    body = walker.block(program.main, flags, wanted)
    outs = (*body.outputs[:n], *body.outputs[n + len(program.updates) :], *body.outputs[n : n + len(program.updates)])
    main = Block(body.inputs, body.eqns, outs)
    return replace(program, blocks={**walker.vjp.blocks, program.entry: main})


class Jvp:
    """The blocks of a program while tangents are woven in."""

    def __init__(self, program: Program) -> None:
        self.vjp = Vjp(program)
        self.added: dict[Any, str] = {}

    def named(self, name: str, flags: Sequence[bool], wanted: Sequence[int]) -> str:
        """A block with tangents for these inputs and outputs; made once."""
        key = (name, tuple(flags), tuple(wanted))
        if key not in self.added:
            self.added[key] = self.vjp.add(f"{name}_tangents", self.block(self.vjp.blocks[name], flags, wanted))
        return self.added[key]

    def block(self, block: Block, flags: Sequence[bool], wanted: Sequence[int]) -> Block:
        """inputs, tangents -> outputs, tangents of the wanted outputs"""
        woven = _Woven(self, block, flags)
        with woven.b:
            outs = [woven.tangent(x) for x in (block.outputs[i] for i in wanted)]
        inputs = (*block.inputs, *woven.inputs)
        return renamed(
            Block(inputs, tuple(woven.b.eqns), (*(lookup(x, woven.values) for x in block.outputs), *outs)), woven.names
        )


class _Woven:
    """One block while its equations get tangents."""

    def __init__(self, jvp: Jvp, block: Block, flags: Sequence[bool]) -> None:
        self.jvp, self.b = jvp, Builder(names_of=block)
        self.tangents: dict[Var, Var] = {}
        self.values: dict[Var, Atom] = {}
        self.names: dict[str, str] = {}
        self.inputs = []
        for v, flag in zip(block.inputs, flags, strict=True):
            if flag and is_float(v.dtype):
                self.tangents[v] = Var(self.b.name(f"t_{v.name}"), v.type)
                self.inputs.append(self.tangents[v])
        for eqn in block.eqns:
            self.eqn(replace(eqn, inputs=tuple(lookup(x, self.values) for x in eqn.inputs)))

    def tangent(self, x: Atom) -> Var:
        """The tangent of a value; zeros where it has none."""
        x = lookup(x, self.values)
        return self.tangents[x] if isinstance(x, Var) and x in self.tangents else zeros(atom_type(x))

    def give(self, var: Var, tangent: Any) -> None:
        if tangent is not None:
            self.tangents[var] = tangent
            self.names[tangent.name] = f"t_{var.name}"

    def eqn(self, eqn: Eqn) -> None:
        self.b.at(eqn)
        if not any(v in self.tangents for v in eqn.vars):
            self.b.eqns.append(eqn)
        elif eqn.op in CONTROL:
            getattr(self, eqn.op.name)(eqn)
        elif eqn.op.vjp is None and eqn.op.expand is not None:
            inner = Builder(beside=self.b)
            inner.at(eqn)
            with inner:
                outs = eqn.op.expand(*eqn.inputs, **eqn.params)
            for small in inner.eqns:
                self.eqn(replace(small, inputs=tuple(lookup(x, self.values) for x in small.inputs)))
            results = outs if isinstance(outs, (tuple, list)) else (outs,)
            self.values.update({old: lookup(new, self.values) for old, new in zip(eqn.outputs, results, strict=True)})
        else:
            self.b.eqns.append(eqn)
            if any(is_float(v.dtype) for v in eqn.outputs):
                self.linear(eqn)

    def linear(self, eqn: Eqn) -> None:
        """The tangents of an operator's outputs: its gradient rule, transposed."""
        pull = eqn.op.vjp
        if pull is None and eqn.op is not custom:
            raise GradientError(
                f"no gradient rule for {eqn.op.name}" + (f"\n  at        {eqn.source}" if eqn.source else "")
            )
        floats = [v for v in eqn.outputs if is_float(v.dtype)]
        rule = Builder(beside=self.b)
        gs = {v: Var(rule.name("g"), v.type) for v in floats}
        single = len(eqn.outputs) == 1
        with rule:
            g = tuple(gs.get(v) for v in eqn.outputs)
            if eqn.op is custom:
                cotangents = custom_cotangents(rule, eqn, g)
            elif pull is not None:
                cotangents = pull(
                    g[0] if single else g, eqn.outputs[0] if single else eqn.outputs, *eqn.inputs, **eqn.params
                )
        pulled = [
            (x, c)
            for x, c in zip(eqn.inputs, cotangents, strict=True)
            if isinstance(c, Var) and isinstance(x, Var) and x in self.tangents
        ]
        known = tuple(dict.fromkeys((*eqn.vars, *eqn.outputs)))
        scratch = Block((*known, *gs.values()), tuple(rule.eqns), tuple(c for _, c in pulled))
        half = Half(self.jvp.vjp, scratch, [False] * len(known) + [True] * len(gs), beside=self.b)
        back = half.pull({i: self.tangents[x] for i, (x, _) in enumerate(pulled)})[len(known) :]
        both = [*half.forward.eqns, *half.backward.eqns]
        needed = [both[i] for i in leading_to(both, back)]
        used = {v for e in needed for v in e.vars}
        with self.b:  # the rule is linear: whatever still reads a cotangent may as well read zeros
            known_zeros: dict[Var, Atom] = {g: zeros(g.type) for g in gs.values() if g in used}
        self.b.eqns += [replace(substitute(e, known_zeros), phase=eqn.phase) for e in needed]
        for v, t in zip(floats, back, strict=True):
            self.give(v, t)

    # -- control flow -----------------------------------------------------------------------------------------

    def flags(self, xs: Sequence[Atom]) -> list[bool]:
        return [isinstance(x, Var) and x in self.tangents for x in xs]

    def active_tangents(self, xs: Sequence[Atom]) -> list[Var]:
        """The tangents of those that have one."""
        return [self.tangents[x] for x in xs if isinstance(x, Var) and x in self.tangents]

    def finish(self, eqn: Eqn, inputs: tuple[Atom, ...], params: dict[str, Any], order: Sequence[Any]) -> None:
        """The control equation with more outputs; `order` lists its outputs as Vars, or the Var whose tangent stands
        there in a list."""
        outs = []
        for item in order:
            if isinstance(item, Var):
                outs.append(item)
            else:
                (of,) = item
                tangent = Var(self.b.name(f"t_{of.name}"), of.type)
                outs.append(tangent)
                self.tangents[of] = tangent
        self.b.eqns.append(Eqn(eqn.op, inputs, Params(params), tuple(outs), eqn.source, eqn.phase))

    def custom(self, eqn: Eqn) -> None:
        self.b.eqns.append(eqn)
        self.linear(eqn)

    def call(self, eqn: Eqn) -> None:
        flags = self.flags(eqn.inputs)
        wanted = _true(self.jvp.vjp.active(eqn.params["block"], flags))
        name = self.jvp.named(eqn.params["block"], flags, wanted)
        inputs = (*eqn.inputs, *self.active_tangents(eqn.inputs))
        self.finish(eqn, inputs, {"block": Ref(name)}, [*eqn.outputs, *([eqn.outputs[i]] for i in wanted)])

    def cond(self, eqn: Eqn) -> None:
        flags = self.flags(eqn.inputs[1:])
        sides = [eqn.params["then"], eqn.params["orelse"]]
        both = [self.jvp.vjp.active(n, flags) for n in sides]
        wanted = [i for i, (a, b) in enumerate(zip(*both, strict=True)) if a or b]
        then, orelse = (self.jvp.named(n, flags, wanted) for n in sides)
        inputs = (*eqn.inputs, *self.active_tangents(eqn.inputs[1:]))
        self.finish(
            eqn, inputs, {"then": Ref(then), "orelse": Ref(orelse)}, [*eqn.outputs, *([eqn.outputs[i]] for i in wanted)]
        )

    def loop(self, eqn: Eqn) -> None:
        """c…, s… => c…, tc…, s…, ts…"""
        p, vjp = eqn.params, self.jvp.vjp
        n = p.get("consts", 0)
        flags = spread_flags(vjp, p["body"], self.flags(eqn.inputs), n, len(eqn.inputs))
        states = [i for i in range(n, len(eqn.inputs)) if flags[i]]
        name = self.jvp.named(p["body"], flags, [i - n for i in states])
        k = len(eqn.inputs)
        consts = [i for i in range(n) if flags[i]]
        order = [
            *range(n),
            *range(k, k + len(consts)),
            *range(n, k),
            *range(k + len(consts), k + len(consts) + len(states)),
        ]
        body = _reordered(vjp, name, order)
        types = [eqn.inputs[i].type for i in (*consts, *states)]  # type: ignore[union-attr]
        test = _reordered(vjp, p["test"], order, types)
        with self.b:
            start = tuple(self.tangent(eqn.inputs[i]) for i in states)
        inputs = (*eqn.inputs[:n], *(self.tangent(eqn.inputs[i]) for i in consts), *eqn.inputs[n:], *start)
        params = {**p, "body": Ref(body), "test": Ref(test), "consts": n + len(consts)}
        self.finish(eqn, inputs, params, [*eqn.outputs, *([eqn.outputs[i - n]] for i in states)])

    def scan(self, eqn: Eqn) -> None:
        """c…, s…, x… => c…, tc…, s…, ts…, x…, tx…"""
        p, vjp = eqn.params, self.jvp.vjp
        n = p.get("consts", 0)
        m = n + p.get("carry", 0)
        k = len(eqn.inputs)
        flags = spread_flags(vjp, p["body"], self.flags(eqn.inputs), n, m)
        acts = vjp.active(p["body"], flags)
        parts = [[i for i in range(*r) if flags[i]] for r in ((0, n), (n, m), (m, k))]
        rows = [i for i in range(m - n, len(eqn.outputs)) if acts[i]]
        name = self.jvp.named(p["body"], flags, [*(i - n for i in parts[1]), *rows])
        at = k
        order: list[int] = []
        for (low, high), part in zip(((0, n), (n, m), (m, k)), parts, strict=True):
            order += [*range(low, high), *range(at, at + len(part))]
            at += len(part)
        total = len(eqn.outputs)
        n_states = len(parts[1])
        outs = [
            *range(m - n),
            *range(total, total + n_states),
            *range(m - n, total),
            *range(total + n_states, total + n_states + len(rows)),
        ]
        body = _reordered(vjp, name, order, outputs=outs)
        with self.b:
            inputs: list[Atom] = []
            for (low, high), part in zip(((0, n), (n, m), (m, k)), parts, strict=True):
                inputs += [*eqn.inputs[low:high], *(self.tangent(eqn.inputs[i]) for i in part)]
        params = {**p, "body": Ref(body), "consts": n + len(parts[0]), "carry": m - n + n_states}
        order_out = [
            *eqn.outputs[: m - n],
            *([eqn.outputs[i - n]] for i in parts[1]),
            *eqn.outputs[m - n :],
            *([eqn.outputs[i]] for i in rows),
        ]
        self.finish(eqn, tuple(inputs), params, order_out)


def _true(flags: Sequence[bool]) -> list[int]:
    return [i for i, f in enumerate(flags) if f]


def _reordered(
    vjp: Vjp, name: str, order: Sequence[int], extra: Sequence[Type] = (), outputs: Sequence[int] | None = None
) -> str:
    """A block with its inputs (and `extra` unused ones) and outputs in another order."""
    block = vjp.blocks[name]
    b = Builder(names_of=block)
    inputs = [*block.inputs, *(Var(b.name("t"), t) for t in extra)]
    outs = block.outputs if outputs is None else tuple(block.outputs[i] for i in outputs)
    return vjp.add(name, Block(tuple(inputs[i] for i in order), block.eqns, outs))
