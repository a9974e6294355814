"""What a step is expected to take on this machine, said before the first: by what `mycel probe` measured; where nobody
ran it, by a short look at the processor.  That look decides nothing: plans are made of presets, the same at each start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from mycel.plan import COMPUTE, Clock, Hardware, Predicted, hardware_of, probe_path, probe_text, with_rates
from mycel.run.brief_probe import brief_probe
from mycel.train.assemble import Assembly


@dataclass(frozen=True)
class Outlook:
    """What is predicted of a step, and what that rests on, if it is not a probe."""

    predicted: Predicted
    basis: str = ""

    def __str__(self) -> str:
        """For people: 640.1 ms a step: computing 600.0 ms, host 80.0 ms (40.1 ms exposed); by a short look at …"""
        whole, _, shares = str(self.predicted).splitlines()[0].removeprefix("predicted step").strip().partition(": ")
        shared = f": {shares}" if self.predicted.parts.keys() != {COMPUTE} else ""
        return "; ".join([f"{whole} a step{shared}", *([self.basis] if self.basis else [])])


def outlook(parts: Assembly) -> Outlook | None:
    """Of the step as it is compiled; ranks ask at the same time, and see what is left to each of them."""
    step, ranks = parts.step, parts.team.mesh.world
    plan = step.plan
    if plan.predicted is None:
        return None
    if plan.is_pipeline or plan.place or plan.synced() or (seen := hardware_now(parts.device)) is None:
        return Outlook(plan.predicted)
    now = Predicted.of(Clock(seen, seen.links(plan.mesh))(step.program), plan.budget, plan.predicted.gap)
    links = f" (its links are guessed: mycel probe --nproc {ranks})" if ranks > 1 else ""
    predicted = replace(plan.predicted, seconds=now.seconds, parts=now.parts)
    return Outlook(predicted, f"by a short look at this processor{links or ': mycel probe takes a longer one'}")


def hardware_now(device: torch.device) -> Hardware | None:
    """A processor as a short look sees it; None where a probe has measured it, presets are asked for (MYCEL_PROBE is
    empty), or it is another device."""
    if device.type != "cpu" or probe_path() is None or probe_text():
        return None
    return with_rates(hardware_of(device), brief_probe())
