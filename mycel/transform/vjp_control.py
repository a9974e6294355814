"""Reverse mode of control flow: `cond`, `loop` and `scan` map to themselves.

y = cond(p, x, then=@a, orelse=@b)  =>  y, r = cond(p, x, then=@a_forward, orelse=@b_forward)
                                        dx = cond(p, r, dy, then=@a_backward, orelse=@b_backward)

s = loop(c, s0, test=@t, body=@b)   =>  s, k = loop(c, s0, empty, test=@t, body=@b_forward)
                                        ds, dc = loop(c, k, ds, 0, test=@holds, body=@b_backward)

s, y = scan(c, s0, x, body=@b)      =>  s, y, r = scan(c, s0, x, body=@b_forward)
                                        ds, dc, dx = scan(c, ds, 0, r, x, dy, body=@b_backward, reversed)

The forward loop pushes residuals on the stacks k; the backward one pops them and adds up dc.  The residuals of a scan
are rows like y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mycel.ir import Atom, Block, Builder, Eqn, Params, Ref, Type, Var, atom_type, call, cond, is_float, loop, scan
from mycel.ops import o
from mycel.ops.stack import zeros
from mycel.transform.vjp import FORWARD, Half, Pair, Pull, Vjp, renamed, scatter, spread_flags

TURN = Type(torch.bool, (), 1)  # a stack of nothing but turns, for bodies that keep no residual


def forward_cond(half: Half, eqn: Eqn) -> Pull:
    """Both branches keep residuals in shared slots, matched by type; a slot the taken branch does not use is zeros."""
    vjp, names = half.vjp, (eqn.params["then"], eqn.params["orelse"])
    pred, operands = eqn.inputs[0], eqn.inputs[1:]
    flags = half.is_active(operands)
    both = [vjp.active(n, flags) for n in names]
    at = len(half.forward.eqns)
    half.forward.eqns.append(eqn)
    half.active.update(v for v, a, b in zip(eqn.outputs, *both, strict=True) if a or b)

    def pull(gs: list[Any]) -> list[Any]:
        pairs = [
            vjp.pair(n, flags, [i for i, g in enumerate(gs) if g is not None and act[i]])
            for n, act in zip(names, both, strict=True)
        ]
        slots, places = _slots([[r.type for r in p.residuals] for p in pairs])
        kept = tuple(Var(half.forward.name("kept"), t) for t in slots)
        forward = [_branch_forward(vjp, p, slots, at_) for p, at_ in zip(pairs, places, strict=True)]
        half.forward.eqns[at] = Eqn(
            cond, eqn.inputs, Params(then=Ref(forward[0]), orelse=Ref(forward[1])), (*eqn.outputs, *kept), eqn.source
        )
        reused = sorted({i for p in pairs for i in p.reused})
        given = [i for i, g in enumerate(gs) if g is not None]
        gives = sorted({i for p in pairs for i in p.gives})
        backward = [
            _branch_backward(vjp, p, eqn, reused, slots, at_, given, gives)
            for p, at_ in zip(pairs, places, strict=True)
        ]
        inputs = (pred, *(operands[i] for i in reused), *kept, *(gs[i] for i in given))
        types = [atom_type(operands[i]) for i in gives]
        grads = half.backward.append(cond, inputs, {"then": Ref(backward[0]), "orelse": Ref(backward[1])}, types)
        return scatter(_listed(grads, types), [i + 1 for i in gives], len(eqn.inputs))

    return pull


def _slots(branches: list[list[Type]]) -> tuple[list[Type], list[list[int]]]:
    """Slots that hold the residuals of either branch, and where each branch puts its own."""
    slots: list[Type] = []
    places = []
    for types in branches:
        free = list(range(len(slots)))
        mine = []
        for t in types:
            place = next((i for i in free if slots[i] == t), None)
            if place is None:
                place = len(slots)
                slots.append(t)
            else:
                free.remove(place)
            mine.append(place)
        places.append(mine)
    return slots, places


def _branch_forward(vjp: Vjp, pair: Pair, slots: list[Type], places: list[int]) -> str:
    block = vjp.blocks[pair.forward]
    n = len(block.outputs) - len(pair.residuals)
    b = Builder(names_of=block)
    own = dict(zip(places, block.outputs[n:], strict=True))
    with b:
        kept = [own[i] if i in own else zeros(t) for i, t in enumerate(slots)]
    return vjp.add(pair.forward, Block(block.inputs, (*block.eqns, *b.eqns), (*block.outputs[:n], *kept)))


def _branch_backward(
    vjp: Vjp,
    pair: Pair,
    eqn: Eqn,
    reused: list[int],
    slots: list[Type],
    places: list[int],
    given: list[int],
    gives: list[int],
) -> str:
    """A branch's backward block behind the inputs and outputs both branches have."""
    b = Builder(phase="backward")
    operands = {i: b.input(_name(eqn.inputs[i + 1]), atom_type(eqn.inputs[i + 1])) for i in reused}
    kept = [b.input("kept", t) for t in slots]
    gs = {i: b.input(f"d_{eqn.outputs[i].name}", eqn.outputs[i].type) for i in given}
    with b:
        inputs = (*(operands[i] for i in pair.reused), *(kept[i] for i in places), *(gs[i] for i in pair.given))
        types = [atom_type(eqn.inputs[i + 1]) for i in pair.gives]
        grads = dict(zip(pair.gives, _listed(_call(b, pair.backward, inputs, types), types), strict=True))
        outs = [grads[i] if i in grads else zeros(atom_type(eqn.inputs[i + 1])) for i in gives]
    return vjp.add(pair.backward, b.block(outs))


def forward_loop(half: Half, eqn: Eqn) -> Pull:
    """Residuals of a turn are pushed; the backward loop pops until the first stack is empty."""
    vjp, p = half.vjp, eqn.params
    n = p.get("consts", 0)
    flags = spread_flags(vjp, p["body"], half.is_active(eqn.inputs), n, len(eqn.inputs))
    states = [i for i in range(n, len(eqn.inputs)) if flags[i]]
    at = len(half.forward.eqns)
    half.forward.eqns.append(eqn)
    half.active.update(eqn.outputs[i - n] for i in states)

    def pull(gs: list[Any]) -> list[Any]:
        pair = vjp.pair(p["body"], flags, [i - n for i in states])
        body = vjp.blocks[p["body"]]
        pushed = [*(body.inputs[i] for i in pair.reused if i >= n), *pair.residuals]
        stacks = [Type(v.type.dtype, v.type.shape, v.type.depth + 1) for v in pushed] or [TURN]
        kept = tuple(
            Var(half.forward.name(f"{v.name}_stack"), t)
            for v, t in zip(pushed or [Var("turn", TURN)], stacks, strict=True)
        )
        test = _with_extra(vjp, p["test"], stacks)
        forward = _loop_forward(vjp, pair, pushed, stacks)
        builder = Builder(beside=half.forward)
        builder.at(eqn)
        with builder:
            empty = [zeros(t) for t in stacks]
        half.forward.eqns[at : at + 1] = [
            *builder.eqns,
            Eqn(
                loop,
                (*eqn.inputs, *empty),
                Params({**p, "test": Ref(test), "body": Ref(forward)}),
                (*eqn.outputs, *kept),
                eqn.source,
            ),
        ]
        held = [i for i in pair.reused if i < n]
        totals = [i for i in pair.gives if i < n]
        start = [gs[i - n] if gs[i - n] is not None else zeros(eqn.outputs[i - n].type) for i in states]
        start += [zeros(atom_type(eqn.inputs[i])) for i in totals]
        backward, more = _loop_backward(vjp, eqn, pair, held, pushed, stacks, states, totals, n)
        inputs = (*(eqn.inputs[i] for i in held), *kept, *start)
        types = [*stacks, *(v.type for v in start)]
        outs = _listed(
            half.backward.append(loop, inputs, {"test": Ref(more), "body": Ref(backward), "consts": len(held)}, types),
            types,
        )
        half.names.update({v.name: k.name for v, k in zip(outs, kept, strict=False)})
        half.names.update(
            {v.name: f"d_{_name(eqn.inputs[i])}" for v, i in zip(outs[len(stacks) :], [*states, *totals], strict=True)}
        )
        return scatter(outs[len(stacks) :], [*states, *totals], len(eqn.inputs))

    return pull


def _loop_forward(vjp: Vjp, pair: Pair, pushed: list[Var], stacks: list[Type]) -> str:
    block = vjp.blocks[pair.forward]
    b = Builder(names_of=block)
    extra = [b.input("stack", t) for t in stacks]
    with b:
        values: list[Any] = [*pushed] or [True]
        full = [o.stack_push(s, v) for s, v in zip(extra, values, strict=True)]
    n = len(block.outputs) - len(pair.residuals)
    return vjp.add(pair.forward, Block((*block.inputs, *extra), (*block.eqns, *b.eqns), (*block.outputs[:n], *full)))


def _loop_backward(
    vjp: Vjp,
    eqn: Eqn,
    pair: Pair,
    held: list[int],
    pushed: list[Var],
    stacks: list[Type],
    states: list[int],
    totals: list[int],
    n: int,
) -> tuple[str, str]:
    """(body, test) of the backward loop: state is the stacks, the cotangents of the state, the sums for the
    constants."""
    b, t = Builder(phase="backward"), Builder(phase="backward")
    consts = {i: b.input(_name(eqn.inputs[i]), atom_type(eqn.inputs[i])) for i in held}
    tops = [b.input(f"{v.name}_stack", s) for v, s in zip(pushed or [Var("turn", TURN)], stacks, strict=True)]
    ds = {i: b.input(f"d_{eqn.outputs[i - n].name}", eqn.outputs[i - n].type) for i in states}
    sums = {i: b.input(f"d_{_name(eqn.inputs[i])}", atom_type(eqn.inputs[i])) for i in totals}
    with b:
        popped = [o.stack_pop(s, shape=s.shape, dtype=s.dtype, sure=True) for s in tops]
        values = dict(zip(pushed, [v for _, v in popped], strict=False))
        body = vjp.blocks[pair.forward]
        reused = [consts[i] if i < n else values[body.inputs[i]] for i in pair.reused]
        inputs = (*reused, *(values[r] for r in pair.residuals), *(ds[i + n] for i in pair.given))
        types = [atom_type(eqn.inputs[i]) for i in pair.gives]
        grads = dict(zip(pair.gives, _listed(_call(b, pair.backward, inputs, types), types), strict=True))
        outs = [rest for rest, _ in popped]
        outs += [grads[i] if i in grads else zeros(ds[i].type) for i in states]
        outs += [o.add(sums[i], grads[i]) for i in totals]
    for v in b.inputs:
        t.input(v.name, v.type)
    with t:
        more = o.stack_holds(t.inputs[len(held)])
    names = _popped_names(pushed, popped) | {
        grads[i].name: ds[i].name if i in ds else f"{sums[i].name}_turn" for i in grads
    }
    return vjp.add(f"{pair.backward}_turn", renamed(b.block(outs), names)), vjp.add(
        f"{pair.backward}_more", t.block([more])
    )


def forward_scan(half: Half, eqn: Eqn) -> Pull:
    """Residuals of a turn are rows, like y; what is itself a stack is carried on a stack."""
    vjp, p = half.vjp, eqn.params
    n = p.get("consts", 0)
    m = n + p.get("carry", 0)
    flags = spread_flags(vjp, p["body"], half.is_active(eqn.inputs), n, m)
    states = [i for i in range(n, m) if flags[i]]
    acts = vjp.active(p["body"], flags)
    at = len(half.forward.eqns)
    half.forward.eqns.append(eqn)
    half.active.update(eqn.outputs[i - n] for i in states)
    half.active.update(v for v, a in zip(eqn.outputs[m - n :], acts[m - n :], strict=True) if a)

    def pull(gs: list[Any]) -> list[Any]:
        rows = [i for i in range(m - n, len(gs)) if gs[i] is not None and acts[i]]
        pair = vjp.pair(p["body"], flags, [*(i - n for i in states), *rows])
        body = vjp.blocks[p["body"]]
        saved = [*(body.inputs[i] for i in pair.reused if n <= i < m), *pair.residuals]
        plain = [v for v in saved if v.type.depth == 0]
        deep = [v for v in saved if v.type.depth]
        length, reverse = p["length"], p.get("reverse", False)
        stacks = [Type(v.type.dtype, v.type.shape, v.type.depth + 1) for v in deep]
        kept_rows = tuple(
            Var(half.forward.name(f"{v.name}_rows"), Type(v.type.dtype, (length, *v.type.shape))) for v in plain
        )
        kept_stacks = tuple(Var(half.forward.name(f"{v.name}_stack"), t) for v, t in zip(deep, stacks, strict=True))
        forward = _scan_forward(vjp, pair, plain, deep, stacks, m, n)
        builder = Builder(beside=half.forward)
        builder.at(eqn)
        with builder:
            empty = [zeros(t) for t in stacks]
        half.forward.eqns[at : at + 1] = [
            *builder.eqns,
            Eqn(
                scan, (*eqn.inputs[:m], *empty, *eqn.inputs[m:]),
                Params({**p, "body": Ref(forward), "carry": m - n + len(stacks)}),
                (*eqn.outputs[: m - n], *kept_stacks, *eqn.outputs[m - n :], *kept_rows), eqn.source,
            ),
        ]  # fmt: skip
        held = [i for i in pair.reused if i < n]
        read = [i for i in pair.reused if i >= m]
        totals = [i for i in pair.gives if i < n]
        gives_rows = [i for i in pair.gives if i >= m]
        start = [gs[i - n] if gs[i - n] is not None else zeros(eqn.outputs[i - n].type) for i in states]
        start += [zeros(atom_type(eqn.inputs[i])) for i in totals]
        backward = _scan_backward(vjp, eqn, pair, held, plain, deep, stacks, states, totals, read, rows, gives_rows, n)
        xs = [*kept_rows, *(eqn.inputs[i] for i in read), *(gs[i] for i in rows)]
        inputs = (*(eqn.inputs[i] for i in held), *kept_stacks, *start, *xs)
        types = [*stacks, *(v.type for v in start), *(atom_type(eqn.inputs[i]) for i in gives_rows)]
        params = {
            "body": Ref(backward),
            "length": length,
            "consts": len(held),
            "carry": len(stacks) + len(start),
            "reverse": not reverse,
        }
        outs = _listed(half.backward.append(scan, inputs, params, types), types)
        names = [f"d_{_name(eqn.inputs[i])}" for i in (*states, *totals, *gives_rows)]
        half.names.update({v.name: name for v, name in zip(outs[len(stacks) :], names, strict=True)})
        return scatter(outs[len(stacks) :], [*states, *totals, *gives_rows], len(eqn.inputs))

    return pull


def _scan_forward(vjp: Vjp, pair: Pair, plain: list[Var], deep: list[Var], stacks: list[Type], m: int, n: int) -> str:
    block = vjp.blocks[pair.forward]
    b = Builder(names_of=block)
    extra = [b.input("stack", t) for t in stacks]
    with b:
        full = [o.stack_push(s, v) for s, v in zip(extra, deep, strict=True)]
    inputs = (*block.inputs[:m], *extra, *block.inputs[m:])
    k = len(block.outputs) - len(pair.residuals)
    outs = (*block.outputs[: m - n], *full, *block.outputs[m - n : k], *plain)
    return vjp.add(pair.forward, Block(inputs, (*block.eqns, *b.eqns), outs))


def _scan_backward(
    vjp: Vjp,
    eqn: Eqn,
    pair: Pair,
    held: list[int],
    plain: list[Var],
    deep: list[Var],
    stacks: list[Type],
    states: list[int],
    totals: list[int],
    read: list[int],
    rows: list[int],
    gives_rows: list[int],
    n: int,
) -> str:
    """The body of the backward scan."""
    body = vjp.blocks[pair.forward]
    # forward's inputs hold the stacks between carry and rows only in the block `_scan_forward` makes
    shift = len(stacks)
    assert shift == len(deep)
    b = Builder(phase="backward")
    known: dict[int, Var] = {i: b.input(_name(eqn.inputs[i]), atom_type(eqn.inputs[i])) for i in held}
    tops = [b.input("stack", s) for s in stacks]
    ds = {i: b.input(f"d_{eqn.outputs[i - n].name}", eqn.outputs[i - n].type) for i in states}
    sums = {i: b.input(f"d_{_name(eqn.inputs[i])}", atom_type(eqn.inputs[i])) for i in totals}
    values: dict[Var, Var] = {v: b.input(v.name, v.type) for v in plain}
    known.update({i: b.input(_name(eqn.inputs[i]), body.inputs[i].type) for i in read})
    out_types = [atom_type(x) for x in body.outputs]
    dy = {i: b.input(f"d_{eqn.outputs[i].name}", out_types[i]) for i in rows}
    with b:
        popped = [o.stack_pop(s, shape=s.shape, dtype=s.dtype, sure=True) for s in tops]
        values.update(zip(deep, [v for _, v in popped], strict=True))
        reused = [known[i] if i in known else values[body.inputs[i]] for i in pair.reused]
        given = {**{i - n: d for i, d in ds.items()}, **dy}
        inputs = (*reused, *(values[r] for r in pair.residuals), *(given[i] for i in pair.given))
        types = [body.inputs[i].type for i in pair.gives]
        grads = dict(zip(pair.gives, _listed(_call(b, pair.backward, inputs, types), types), strict=True))
        outs = [rest for rest, _ in popped]
        outs += [grads[i] if i in grads else zeros(ds[i].type) for i in states]
        outs += [o.add(sums[i], grads[i]) for i in totals]
        outs += [grads[i] for i in gives_rows]
    return vjp.add(f"{pair.backward}_turn", b.block(outs))


def _popped_names(pushed: Sequence[Var], popped: Sequence[tuple[Var, Var]]) -> dict[str, str]:
    """What was pushed comes back under its name."""
    names = {top.name: v.name for v, (_, top) in zip(pushed, popped, strict=False)}
    return names | {rest.name: f"{v.name}_stack" for v, (rest, _) in zip(pushed, popped, strict=False)}


def forward_custom(half: Half, eqn: Eqn) -> Pull:
    """The user's own gradient: a call of the backward block."""
    half.forward.eqns.append(eqn)
    half.active.update(v for v in eqn.outputs[: eqn.params["outs"]] if is_float(v.dtype))
    return lambda gs: custom_cotangents(half.backward, eqn, gs)


def custom_cotangents(b: Builder, eqn: Eqn, gs: Sequence[Any]) -> list[Any]:
    """dx… of a custom equation, written into a builder."""
    p = eqn.params
    floats = [i for i, v in enumerate(eqn.outputs[: p["outs"]]) if is_float(v.dtype)]
    given = [zeros(eqn.outputs[i].type) if gs[i] is None else gs[i] for i in floats]
    wrt = [i for i, x in enumerate(eqn.inputs[: p["wrt"]]) if is_float(atom_type(x).dtype)]
    types = [atom_type(eqn.inputs[i]) for i in wrt]
    grads = _call(b, p["backward"], (*eqn.inputs, *eqn.outputs, *given), types)
    return scatter(_listed(grads, types), wrt, len(eqn.inputs))


# -- parts -----------------------------------------------------------------------------------------------------------


def _with_extra(vjp: Vjp, name: str, extra: list[Type]) -> str:
    """A loop's test behind a longer state."""
    block = vjp.blocks[name]
    b = Builder(names_of=block)
    more = [b.input("stack", t) for t in extra]
    return vjp.add(f"{name}_longer", Block((*block.inputs, *more), block.eqns, block.outputs))


def _call(b: Builder, name: str, inputs: tuple[Atom, ...], types: list[Type]) -> Any:
    return b.append(call, inputs, {"block": Ref(name)}, types)


def _listed(outs: Any, types: Sequence[Any]) -> list[Any]:
    return [outs] if len(types) == 1 else list(outs)


def _name(x: Atom) -> str:
    return x.name if isinstance(x, Var) else "x"


FORWARD.update({"custom": forward_custom, "cond": forward_cond, "loop": forward_loop, "scan": forward_scan})

__all__ = ["forward_cond", "forward_loop", "forward_scan"]
