"""The schedule of a pipeline as a picture: rows are ranks, boxes are steps, what is left empty is bubbles.

schedule_svg(times)           one drawing, to be put into a page
schedule_page({name: times})  a page of its own, predicted above measured in one scale
"""

from __future__ import annotations

import html
from collections.abc import Mapping

from mycel.html_page import html_page
from mycel.plan.schedule import BACKWARD, FORWARD, NAMES, WEIGHT, PipelineTimes
from mycel.sizes import span

WIDTH, LEFT, ROW, GAP = 1100, 70, 24, 4  # pixels
COLORS = {FORWARD: "#4c78a8", BACKWARD: "#f58518", WEIGHT: "#54a24b"}
NARROW = 7  # pixels for each letter: boxes with less have no words


def schedule_svg(times: PipelineTimes, seconds: float = 0.0) -> str:
    """A row for each rank; `seconds`: what the width stands for, where several drawings have one scale."""
    scale = (WIDTH - LEFT) / max(seconds, times.seconds, 1e-12)
    inside, several = [], times.schedule.stages > times.schedule.ranks
    for rank, order in enumerate(times.schedule.orders):
        y = rank * (ROW + GAP)
        inside.append(f'<text x="0" y="{y + ROW * 0.65:.0f}">rank {rank}</text>')
        for step in order:
            start, end = times.start[step], times.end[step]
            x, width = LEFT + start * scale, max((end - start) * scale, 0.3)
            light = ' fill-opacity="0.65"' if several and step.stage >= times.schedule.ranks else ""
            title = f"{step.words}\n{span(end - start)} from {span(start)}"
            inside.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{COLORS[step.kind]}"{light} '
                f'class="step"><title>{html.escape(title)}</title></rect>'
            )
            if width > NARROW * len(str(step)):
                inside.append(f'<text x="{x + 3:.1f}" y="{y + ROW * 0.65:.0f}" class="name">{step}</text>')
    height = times.schedule.ranks * (ROW + GAP) + 4
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return f"<svg {size}>{''.join(inside)}</svg>"


def schedule_section(times: PipelineTimes, name: str = "", seconds: float = 0.0) -> str:
    """The drawing with what it comes to."""
    s, idle = times.schedule, times.idle
    share = sum(idle) / (s.ranks * max(times.seconds, 1e-12))
    keys = "".join(f'<span style="background:{COLORS[k]}"></span>{NAMES[k]}' for k in COLORS)
    what = (
        f"{s.stages} stages on {s.ranks} ranks, {s.microbatches} microbatches, schedule {s.name}: "
        f"{span(times.seconds)}, bubbles {share:.1%} "
        f"({', '.join(map(span, idle))} on each rank)"
    )
    head = f"<h2>{html.escape(name)}</h2>" if name else ""
    return f'{head}<p>{html.escape(what)}</p><p class="key">{keys}</p>{schedule_svg(times, seconds)}'


def schedule_page(drawings: Mapping[str, PipelineTimes | None]) -> str:
    """Drawings in one scale, each under its name."""
    known = {name: times for name, times in drawings.items() if times is not None}
    longest = max((times.seconds for times in known.values()), default=0.0)
    sections = "\n".join(schedule_section(times, name, longest) for name, times in known.items())
    return html_page("Schedule of a pipeline", sections)
