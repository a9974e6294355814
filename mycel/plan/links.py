"""What messages cost: the seconds of a collective over axes of a mesh, and the bytes each rank sends.

What a collective sends, and in how many steps, its paragraph says (`ops/collective.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mycel.ir import OPS, Axes, Eqn, Mesh
from mycel.ops import o
from mycel.plan.hardware import Hardware


@dataclass(frozen=True)
class Link:
    """The wire along an axis: bytes a second that a rank sends, and seconds to start one message."""

    bytes_s: float
    start_s: float


CPU_LINK = Link(1e9, 100e-6)
GPU_LINK = Link(150e9, 10e-6)


@dataclass(frozen=True)
class Links:
    """The links of a mesh; axes not named have the one of `other`."""

    mesh: Mesh
    other: Link = GPU_LINK
    named: Mapping[str, Link] = field(default_factory=dict)

    def of(self, axes: Axes) -> Link:
        """The slowest link among some axes."""
        found = [self.named.get(a, self.other) for a in axes]
        return Link(min(x.bytes_s for x in found), max(x.start_s for x in found))

    def seconds(self, name: str, axes: Axes, local_bytes: float) -> float:
        """One collective; `local_bytes` is what a rank puts in."""
        if not axes:
            return 0.0
        k, link = self.mesh.count(axes), self.of(axes)
        return sent(name, k, local_bytes) / link.bytes_s + _steps(name, k) * link.start_s


def links_between(mesh: Mesh, hardware: Hardware) -> Links:
    """The links of a mesh of such devices."""
    link = GPU_LINK if hardware.memory else CPU_LINK
    return Links(mesh, link, dict.fromkeys(mesh.axes, link))


def sent(name: str, k: int, local_bytes: float) -> float:
    """Bytes that each of k ranks puts on the wire when it puts `local_bytes` in."""
    said = OPS[name].collective if name else None
    return said.sent(k) * local_bytes if said is not None and k > 1 else 0.0


def _steps(name: str, k: int) -> int:
    """Messages that wait for each other."""
    said = OPS[name].collective if name else None
    return said.steps(k) if said is not None and k > 1 else 0


def sent_by(eqn: Eqn) -> tuple[Axes, float]:
    """The axes and bytes on the wire of one execution of an equation, each rank's."""
    op = OPS[eqn.params["op"]] if eqn.op is o.begin else eqn.op
    if op.collective is None:
        return (), 0.0
    return eqn.params["axes"], sent(op.name, eqn.params["count"], sum(v.type.bytes for v in eqn.vars))
