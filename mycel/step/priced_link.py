"""The link that gradients travel over, as it was measured: a plan that compresses them (`auto`) is priced by it.

Now and then all ranks ask whether it is still as fast; if it is not for most, the next step is priced anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from mycel import plan
from mycel.ir import Mesh
from mycel.parts import ShardedModel
from mycel.plan.hardware import Curve
from mycel.plan.links import Link, fitted
from mycel.run import LinkWatch, timed_codecs, timed_messages, world

WATCHED_EVERY = 200  # steps: three small messages then


@dataclass
class PricedLink:
    """Of one step; all is empty where it is not left to us how gradients travel."""

    axis: str = ""
    link: Link | None = None
    codec_rates: dict[str, Curve] = field(default_factory=dict)  # by kind of work, as they were then
    watch: LinkWatch | None = None
    count: int = 1  # how often it was measured and the plan priced by it

    def measure(
        self, parts: ShardedModel, given: plan.Plan, device: torch.device, known: Callable[[], plan.Hardware]
    ) -> None:
        """How fast it is now, once, where `given` leaves it to us how gradients travel; `known`: of the device."""
        chosen = given.compressed()
        if chosen is None or not chosen.auto or self.link is not None:
            return
        if parts.ranks is None:
            parts.meet(world(parts.written.mesh, device))
        like = known().links(mesh_along(given, chosen.axis)).of((chosen.axis,))
        messages = timed_messages(parts.ranks, chosen.axis)
        self.axis, self.link = chosen.axis, fitted(like.name, like.ranks, like.busy, messages)
        self.codec_rates = timed_codecs(parts.ranks, chosen.codecs())
        self.watch = LinkWatch(parts.ranks, chosen.axis)

    def ask(self, steps: int) -> None:
        """Does it still hold, after so many steps?"""
        if self.watch is not None and steps % WATCHED_EVERY == 0 and self.watch.is_slow():
            self.link = self.watch = None
            self.count += 1

    def known(self, hardware: plan.Hardware, written: plan.Plan | None) -> plan.Hardware:
        """The hardware with what was measured."""
        if self.link is None or written is None:
            return hardware
        hardware = replace(hardware, rates={**hardware.rates, **self.codec_rates})
        return plan.with_link(hardware, mesh_along(written, self.axis), self.axis, self.link)


def mesh_along(written: plan.Plan, axis: str) -> Mesh:
    """The mesh that has most ranks along an axis: of all, or of a sub-model."""
    return max(written.meshes(), key=lambda mesh: mesh[axis])
