"""What a step is expected to take on this machine, said before the first: by what `mycel probe` measured; where nobody
ran it, by a short look at the processor.  That look decides nothing: plans are made of presets.  What earlier runs took
against predictions that rested on the same figures corrects these (`corrections.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mycel.plan import (
    BUBBLE,
    COMPUTE,
    Clock,
    Correction,
    Hardware,
    Predicted,
    basis_of,
    correction,
    hardware_of,
    probe_path,
    probe_text,
    with_rates,
)
from mycel.run.brief_probe import brief_probe
from mycel.train.assemble import Assembly

LOOK = "a short look"  # which figures it gives differs a little each time


@dataclass(frozen=True)
class Outlook:
    """What is predicted of a step, and what that rests on, if it is not a probe; `figures`: a name for the figures
    behind it, by which it was (computing_s, waiting_s) before it was corrected."""

    predicted: Predicted
    basis: str = ""
    figures: str = ""
    before: tuple[float, float] = (0.0, 0.0)
    correction: Correction | None = None
    hardware: Hardware | None = None  # as the figures have it

    def __str__(self) -> str:
        """For people: 640.1 ms a step: computing 600.0 ms, host 80.0 ms (40.1 ms exposed); by a short look at …"""
        whole, _, shares = str(self.predicted).splitlines()[0].removeprefix("predicted step").strip().partition(": ")
        shared = f": {shares}" if self.predicted.parts.keys() != {COMPUTE} else ""
        known = [f"corrected: {self.correction}"] if self.correction is not None else []
        return "; ".join([f"{whole} a step{shared}", *([self.basis] if self.basis else []), *known])

    @staticmethod
    def of(
        predicted: Predicted, known: Correction | None, hardware: Hardware, figures: str, basis: str = ""
    ) -> Outlook:
        """Of what is predicted by figures that were corrected so.  A bubble is computing of others."""
        seconds, parts = predicted.seconds, predicted.parts
        computing_s = sum(parts[name][0] for name in (COMPUTE, BUBBLE) if name in parts) or seconds
        before = (computing_s, max(0.0, seconds - computing_s))
        before = before if known is None else known.before(*before)
        return Outlook(predicted, basis, figures, before, known, hardware)


def outlook(parts: Assembly) -> Outlook | None:
    """Of the step as it is compiled; ranks ask at the same time, and see what is left to each of them."""
    step, ranks = parts.step, parts.team.mesh.world
    plan = step.plan
    if plan.predicted is None:
        return None
    hardware = hardware_of(parts.device)
    seen = None if plan.is_pipeline or plan.place or plan.synced() else hardware_now(parts.device)
    if seen is None:
        known = step.corrections.of(hardware, ranks)
        return Outlook.of(plan.predicted, known, hardware, basis_of(hardware))
    known = correction(seen.name, ranks, LOOK)
    slower = seen if known is None else known.applied(seen)
    now = Predicted.of(Clock(slower, slower.links(plan.mesh))(step.program), plan.budget, plan.predicted.gap)
    links = f" (its links are guessed: mycel probe --nproc {ranks})" if ranks > 1 else ""
    predicted = replace(plan.predicted, seconds=now.seconds, parts=now.parts)
    basis = f"by a short look at this processor{links or ': mycel probe takes a longer one'}"
    return Outlook.of(predicted, known, seen, LOOK, basis)


def hardware_now(device: torch.device) -> Hardware | None:
    """A processor as a short look sees it; None where a probe has measured it, presets are asked for (MYCEL_PROBE is
    empty), or it is another device."""
    if device.type != "cpu" or probe_path() is None or probe_text():
        return None
    return with_rates(hardware_of(device), brief_probe())
