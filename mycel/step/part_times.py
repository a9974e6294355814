"""What the blocks and messages of one step took on this rank, beside what the clock says of them.

    with step.timing() as timed:
        step(**batch)
    timed.parts(hardware)        a PartTimes for each distinct block, and for each collective over each level of links

A block's seconds are those of computing: messages in it are counted by themselves, as long as computing stays at them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mycel import plan
from mycel.plan import BLOCK, PartTimes
from mycel.run.trace import STEP, Span
from mycel.step.compiled_step import CompiledStep


@dataclass
class TimedStep:
    """The spans of one step of what was compiled, known once the step has ended; none, where it has no parts to be
    timed (a CUDA graph; places, whose ranks run different programs)."""

    entry: CompiledStep
    spans: list[Span] = field(default_factory=list)

    def parts(self, hardware: plan.Hardware) -> tuple[PartTimes, ...]:
        """Predicted by such a device."""
        program, links = self.entry.program, hardware.links(self.entry.plan.mesh)
        times = plan.clock(program, hardware, links, self.entry.lowered.regions)
        messages = [s for s in self.spans if s.over]
        blocks = [*self._blocks(times, messages)]
        predicted = {(op, ".".join(axes)): seconds for (op, axes), seconds in times.waits().items()}
        kinds: dict[tuple[str, str], list[Span]] = {}
        for span in messages:
            kinds.setdefault((span.block, span.over), []).append(span)
        return (
            *blocks,
            *(
                PartTimes(
                    f"{op} over {links.of(tuple(over.split('.'))).name}", f"{op} over {over}", len(spans),
                    predicted.get((op, over), 0.0), sum(s.seconds for s in spans),
                )
                for (op, over), spans in kinds.items()
            ),
        )  # fmt: skip

    def _blocks(self, times: plan.Times, messages: list[Span]) -> Iterator[PartTimes]:
        """Those that the entry calls; where it calls none, the whole step is one."""
        names = {s.block: None for s in self.spans if not s.over and s.block != STEP}
        for name in names or ([STEP] if self.spans else []):
            runs = [s for s in self.spans if s.block == name and not s.over]
            inside = [m for run in runs for m in messages if run.start_s <= m.start_s and m.end_s <= run.end_s]
            seconds = sum(s.seconds for s in runs) - sum(m.seconds for m in inside)
            once_s = times.computing(name if name != STEP else self.entry.program.entry)
            yield PartTimes(BLOCK, name, len(runs), len(runs) * once_s, seconds)
