"""What a step is expected to take on this machine, said before the first: by what `mycel probe` measured; where nobody
ran it, by a short look at the processor.  That look decides nothing: plans are made of presets, the same at each start.
Nor does what earlier runs took against predictions that rested on the same, by which this one is corrected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mycel.plan import (
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

    def corrected(self, hardware: Hardware, ranks: int, figures: str) -> Outlook:
        """By what earlier runs took that were predicted by the same figures."""
        seconds, parts = self.predicted.seconds, self.predicted.parts
        computing_s = parts[COMPUTE][0] if COMPUTE in parts else seconds
        before = (computing_s, max(0.0, seconds - computing_s))
        known = correction(hardware.name, ranks, figures)
        if known is None:
            return replace(self, figures=figures, before=before, hardware=hardware)
        times = {name: known.computing if name == COMPUTE else known.waiting for name in parts}
        slower = {name: (times[name] * total, times[name] * exposed) for name, (total, exposed) in parts.items()}
        predicted = replace(self.predicted, seconds=known.seconds(*before), parts=slower)
        said = replace(self, predicted=predicted, figures=figures, before=before, correction=known)
        return replace(said, hardware=hardware)


def outlook(parts: Assembly) -> Outlook | None:
    """Of the step as it is compiled; ranks ask at the same time, and see what is left to each of them."""
    step, ranks = parts.step, parts.team.mesh.world
    plan = step.plan
    if plan.predicted is None:
        return None
    known = hardware_of(parts.device)
    if plan.is_pipeline or plan.place or plan.synced():
        return Outlook(plan.predicted)
    if (seen := hardware_now(parts.device)) is None:
        return Outlook(plan.predicted).corrected(known, ranks, basis_of(known))
    now = Predicted.of(Clock(seen, seen.links(plan.mesh))(step.program), plan.budget, plan.predicted.gap)
    links = f" (its links are guessed: mycel probe --nproc {ranks})" if ranks > 1 else ""
    predicted = replace(plan.predicted, seconds=now.seconds, parts=now.parts)
    basis = f"by a short look at this processor{links or ': mycel probe takes a longer one'}"
    return Outlook(predicted, basis).corrected(seen, ranks, LOOK)


def hardware_now(device: torch.device) -> Hardware | None:
    """A processor as a short look sees it; None where a probe has measured it, presets are asked for (MYCEL_PROBE is
    empty), or it is another device."""
    if device.type != "cpu" or probe_path() is None or probe_text():
        return None
    return with_rates(hardware_of(device), brief_probe())
