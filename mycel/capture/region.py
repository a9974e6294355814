"""Manual regions while code is traced: what the code between `open` and `close` does is one rank's, along the region's
axes.

    outside               inside                                    outside
    x ───── enter(x) ───▶ x₁ ─▶ equations on parts, `comm` ─▶ y₁ ───── leave(y₁) ───▶ y

A floating point value from outside enters as a whole when it is first used.  When the region is closed, every value
made in it that is the same on all its ranks leaves; one that may differ from rank to rank is refused where it is used
outside.  What differs is known by following it: parts, a rank's index and what is made of them do; sums over all ranks
and gathered parts do not.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mycel.capture.fence import here, refuse
from mycel.capture.trace import TRACING, Tracer
from mycel.errors import PlanError
from mycel.ir import CONTROL, Atom, Axes, Eqn, Mesh, Params, Var, is_float
from mycel.ops import o

MESHES: list[Mesh] = []  # of the step that is being captured


@contextlib.contextmanager
def meshed(mesh: Mesh | None) -> Iterator[None]:
    """Code captured in here is for the ranks of this mesh."""
    if mesh is not None:
        MESHES.append(mesh)
    try:
        yield
    finally:
        if mesh is not None:
            MESHES.pop()


def checked(axes: Sequence[str], what: str) -> dict[str, int]:
    """The sizes of axes, those of one rank left out; none without a mesh."""
    mesh = MESHES[-1] if MESHES and TRACING else None
    if mesh is None:
        return {}
    for axis in axes:
        if axis not in mesh:
            raise PlanError(
                f"{what}: there is no axis {axis!r}\n  the mesh  {mesh}\n  at        {here()[0]}\n"
                f"  try       one of {', '.join(mesh.axes)}, or a mesh that has {axis}: mesh={{{axis}: {mesh.world}}}"
            )
    return {a: mesh[a] for a in axes if mesh[a] > 1}


@dataclass
class Open:
    """A region that is being traced."""

    tracer: Tracer
    sizes: Mapping[str, int]
    eqns: list[Eqn] = field(default_factory=list)
    start: int = 0
    first: int = 0  # the number of the first value made inside
    entered: dict[Var, tuple[int, Var]] = field(default_factory=dict)
    differs: dict[Var, frozenset[str]] = field(default_factory=dict)  # along which axes values differ, where they do

    def __post_init__(self) -> None:
        self.eqns, self.start = self.tracer.eqns, len(self.tracer.eqns)
        self.first = int(self.tracer.name("")[1:])

    @property
    def axes(self) -> Axes:
        return tuple(self.sizes)

    def params(self, layout: Sequence[Axes]) -> Params:
        return Params(axes=self.axes, counts=tuple(self.sizes.values()), layout=tuple(layout))

    def is_inside(self, v: Var) -> bool:
        return (
            v not in self.tracer.inputs and v.name[:1] == "v" and v.name[1:].isdigit() and int(v.name[1:]) > self.first
        )

    # -- what the tracer asks ----------------------------------------------------------------------------------------

    def given(self, inputs: Sequence[Atom]) -> tuple[Atom, ...]:
        """Operands of an equation, those from outside entered; in branches and loops that is done where they begin."""
        if self.tracer.eqns is not self.eqns:
            return tuple(inputs)
        return tuple(
            self._entered(x) if isinstance(x, Var) and is_float(x.dtype) and not self.is_inside(x) else x
            for x in inputs
        )

    def _entered(self, x: Var) -> Var:
        at, inner = self.entered.get(x, (len(self.eqns), x))
        if at >= len(self.eqns) or self.eqns[at].outputs[0] is not inner:  # not yet, or in a try that was undone
            at, inner = len(self.eqns), self.enter(x, ((),) * x.ndim)
            self.entered[x] = at, inner
        return inner

    def enter(self, x: Var, layout: Sequence[Axes]) -> Var:
        """x, a value from outside, as this region's ranks have it in a layout."""
        params = self.params(layout)
        types = o.enter.infer((x.type,), params)
        var: Var = self.tracer.write(o.enter, (x,), params, types)
        return var

    def note(self, eqn: Eqn) -> None:
        """Follow what differs."""
        axes = frozenset().union(*(self.differs.get(v, frozenset()) for v in eqn.vars))
        if eqn.op is o.enter:
            axes |= {a for dim in eqn.params["layout"] for a in dim if a in self.sizes}
        elif eqn.op.collective is not None and eqn.op.collective.same:
            axes -= set(eqn.params["axes"])
        elif eqn.op.by_rank and eqn.op is not o.leave:
            axes |= set(eqn.params["axes"]) & set(self.sizes)
        elif eqn.op in CONTROL and any(self._speaks(ref) for ref in eqn.refs):
            axes = frozenset(self.sizes)
        if axes:
            self.differs.update((v, axes) for v in eqn.outputs)

    def _speaks(self, block: str) -> bool:
        """Does anything in a block depend on the rank?"""
        return any(e.op.by_rank or any(self._speaks(ref) for ref in e.refs) for e in self.tracer.blocks[block].eqns)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> dict[Var, Var]:
        """Values that are the same on all ranks leave; they are now outside, and what they were inside is returned."""
        tracer, region_eqns = self.tracer, self.eqns[self.start :]
        inner = {
            v: Var(tracer.name(""), v.type)
            for e in region_eqns
            for v in e.outputs
            if v not in self.differs and not v.type.depth
        }
        for i, eqn in enumerate(region_eqns, self.start):
            inputs = tuple(inner.get(x, x) if isinstance(x, Var) else x for x in eqn.inputs)
            self.eqns[i] = replace(eqn, inputs=inputs, outputs=tuple(inner.get(v, v) for v in eqn.outputs))
            tracer.producers.update((v, self.eqns[i]) for v in self.eqns[i].outputs)
        for v, own in inner.items():
            tracer.write(o.leave, (own,), self.params(((),) * v.ndim), [v.type], (v,))
        tracer.local.update({v: axes for v, axes in self.differs.items() if v not in inner})
        return inner

    def agreed(self, x: Var, layout: Sequence[Axes]) -> Var:
        """x, or what the first rank has of it where others may have something else along an axis that a layout does not
        name."""
        axes = tuple(a for a in self.axes if a in self.differs.get(x, ()) and not any(a in dim for dim in layout))
        if not axes:
            return x
        along = {"axes": axes, "count": math.prod(self.sizes[a] for a in axes)}
        value = o.cast(x, dtype=torch.int64) if x.dtype == torch.bool else x
        value = o.all_reduce(o.only_first(value, **along), **along)
        return o.cast(value, dtype=x.dtype) if x.dtype == torch.bool else value

    def leave(self, x: Var, layout: Sequence[Axes]) -> Var:
        """What a value of the closed region is outside, in a layout."""
        params = self.params(layout)
        var: Var = self.tracer.write(o.leave, (x,), params, o.leave.infer((x.type,), params))
        return var


def opened(tracer: Tracer, sizes: Mapping[str, int]) -> Open:
    """Begin a region on these axes."""
    around = {a for r in tracer.manual for a in r.sizes}
    twice = sorted(around & set(sizes))
    if twice:
        raise refuse(f"a manual region over {twice[0]} inside of another one over it", "one region for each axis")
    tracer.here()
    region = Open(tracer, dict(sizes))
    tracer.manual.append(region)
    return region


def closed(region: Open) -> dict[Var, Var]:
    """End a region."""
    assert region.tracer.manual[-1] is region, "manual regions end in the order they began"
    region.tracer.manual.pop()
    return region.close()


def divided(n: int, axes: Sequence[str], sizes: Mapping[str, int], what: str) -> int:
    """A dim's part; refuses one that does not divide."""
    k = math.prod(sizes.get(a, 1) for a in axes)
    if n % k:
        raise refuse(
            f"{what}: a dim of {n} does not divide into {k} equal parts",
            "pad it, or another axis: in a manual region parts are equal",
        )
    return n // k
