"""Manual regions and hints in the search for layouts: what is fixed, and which values are a rank's own.

a = enter(x, axes=("tp",), layout=((), ("tp",)))   x[d0,p1@tp] -> a[d0,q1]   fixed along tp, free along other axes
b = gelu(a)                                        along tp every rank has its own: no label but SAME
y = leave(b, axes=("tp",), layout=((), ("tp",)))   b[d0,p1] -> y[d0,q1@tp]   fixed along tp
z = shard(y, layout=(("dp",), ()))                 fixed along all axes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mycel.ir import Axes, Eqn
from mycel.plan.choices import SAME, Label, Options

Node = tuple[Any, ...]


def is_fixed(eqn: Eqn, axis: str) -> bool:
    """Does the user say what this equation does with an axis?"""
    return eqn.op.name == "shard" or (eqn.op.name in ("enter", "leave") and axis in eqn.params["axes"])


def fixed_letters(eqn: Eqn, options: Options, own: frozenset[str] = frozenset()) -> dict[str, Axes]:
    """What the user's layout of a `shard`, `enter` or `leave` splits; a dim of one element has no letter and stays
    whole, and a `shard` of what is a rank's own along some axes says nothing of those."""
    if eqn.op.name not in ("shard", "enter", "leave"):
        return {}
    assert options.fit is not None
    item = options.fit.outs[0] if eqn.op.name == "leave" else options.fit.ins[0] or ()
    layout = [tuple(a for a in axes if eqn.op.name != "shard" or a not in own) for axes in eqn.params["layout"]]
    return {dim[0]: axes for dim, axes in zip(item, layout, strict=True) if dim and axes}


def fixed_label(eqn: Eqn, options: Options, axis: str, own: frozenset[str] = frozenset()) -> Label:
    """What it does with an axis."""
    return next((Label(letter) for letter, axes in fixed_letters(eqn, options, own).items() if axis in axes), SAME)


def own_axes(eqns: Mapping[Node, Eqn], edges: Any) -> dict[Node, frozenset[str]]:
    """By node: the axes along which its operands are each rank's own, so that nothing may be moved along them."""
    seeds = {node: frozenset(e.params["axes"]) for node, e in eqns.items() if e.op.by_rank and "axes" in e.params}
    if not seeds:
        return {}
    axes_of = {_whole(node): axes for node, axes in seeds.items() if eqns[node].op.name not in ("enter", "leave")}
    arcs = {(source.node, node) for source, node, _, _ in edges}
    changed = True
    while changed:
        changed = False
        for start, end in arcs:
            given = axes_of.get(_whole(start), frozenset())
            name = eqns[start].op.name if start in eqns else ""
            given = given | seeds[start] if name == "enter" else given - seeds[start] if name == "leave" else given
            had = axes_of.get(_whole(end), frozenset())
            if not given <= had:
                axes_of[_whole(end)], changed = had | given, True
    return {node: axes_of[_whole(node)] for node in {*eqns, *(end for _, end in arcs)} if _whole(node) in axes_of}


def _whole(node: Node) -> Node:
    """All independent parts of an equation together."""
    return node[:3] if node[0] == "eqn" else node
