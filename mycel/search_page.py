"""What a search found, as one page that needs nothing but itself: a table of plans, and of the best one the step on its
streams, the memory over it with the values at its peak, and how parameters are cut.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mycel.candidates import Answer, Candidate
from mycel.html_page import html_page
from mycel.ir import DEVICE, Eqn, Mesh, Program, Type, host_held, lifetimes, read_layout
from mycel.plan import Times, travels
from mycel.plan.clock import COMPUTE, ON_HOST, Event
from mycel.plan.step_memory import size
from mycel.schedule_page import schedule_section
from mycel.search import Detail
from mycel.search_text import ROW_HEAD, row
from mycel.sizes import shown, span

WIDTH, ROW, GAP = 1100, 26, 6  # of pictures, in pixels
SMALLEST = 0.35  # pixels: what is thinner is drawn with its neighbours
COLORS = {
    "forward": "#4c78a8", "backward": "#f58518", "update": "#54a24b", "message": "#b279a2", "copy": "#72b7b2",
}  # fmt: skip
CUTS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756")  # parts of a parameter, thinly
AT_PEAK = 12  # values that are named
STAYS = {"parameter": "parameters", "buffer": "buffers", "state": "optimiser state", "batch": "the batch"}


@dataclass(frozen=True)
class Box:
    """A stretch of a stream in a picture."""

    start: float
    end: float
    color: str
    text: str


def page(answer: Answer, detail: Detail | None, top: int = 20) -> str:
    """The whole page; `detail`: of the best plan."""
    best = answer.best
    parts = [f"<h1>Plans for {_text(answer.cluster)}</h1>", _table(answer, top)]
    if best is not None:
        parts.append(f"<p>No plan takes less than {span(answer.bound)}: everything computed once, no waiting.</p>")
    if best is not None and detail is not None:
        parts += [
            f"<h2>A step of {_text(best.shape)}</h2>",
            f'<p class="quiet">{_text(detail.what)}</p>' if detail.what else "",
            schedule_section(detail.schedule, "Schedule") if detail.schedule is not None else "",
            _timeline(detail.times),
            "<h2>Memory of a device over the step</h2>",
            device_memory(detail.times, detail.program),
            host_memory(detail.times, detail.program),
            between(detail.times, detail.program),
            "<h2>Parameters</h2>",
            _parameters(best, detail),
        ]
    return html_page(f"Plans for {answer.cluster}", "\n".join(parts))


def _text(x: object) -> str:
    return html.escape(str(x))


def _table(answer: Answer, top: int) -> str:
    heads = "".join(f"<th>{_text(h)}</th>" for h in (*ROW_HEAD[:-1], "why not"))
    lines = []
    for i, c in enumerate(answer.candidates[:top]):
        cells = "".join(f"<td>{_text(x)}</td>" for x in row(answer, c))
        lines.append(f'<tr class="best">{cells}</tr>' if i == 0 and c.fits else f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def _key(kinds: Iterable[str]) -> str:
    return '<p class="key">' + "".join(f'<span style="background:{COLORS[k]}"></span>{k}' for k in kinds) + "</p>"


# -- the step on its streams


def _timeline(times: Times) -> str:
    """A row for each stream that has something to do, with a key."""
    events: dict[str, list[Box]] = {name: [] for name in times.totals}
    for event in times.events():
        events[event.stream].append(Box(event.start, event.end, COLORS[_kind(event)], _what(event)))
    boxes = {name: stretches for name, stretches in events.items() if stretches}
    drawn = {b.color for stretches in boxes.values() for b in stretches}
    scale = (WIDTH - 90) / max(times.seconds, 1e-12)
    rows = []
    for k, (name, stretches) in enumerate(boxes.items()):
        y = k * (ROW + GAP)
        rows.append(f'<text x="0" y="{y + ROW * 0.65:.0f}">{_text(name)}</text>')
        rows += [_box(b, y, scale) for b in _merged(stretches, SMALLEST / scale)]
    height = len(boxes) * (ROW + GAP) + 24
    key = _key(kind for kind, color in COLORS.items() if color in drawn)
    return key + _svg(height, [*rows, *_ticks(times.seconds, scale, height)])


def _kind(event: Event) -> str:
    if event.eqn.op.transfers:
        return "copy"
    return event.eqn.phase if event.stream in (COMPUTE, ON_HOST) else "message"


def _what(event: Event) -> str:
    """In words, for who points at it."""
    eqn = event.eqn
    if eqn.op.transfers:
        v = next(eqn.vars)
        return f"{v.name}, {shown(v.type.bytes)}, {event.stream}"
    return f"{eqn.op.name} {eqn.line}".strip()


def _box(b: Box, y: float, scale: float) -> str:
    took = f"{span(b.end - b.start)} from {span(b.start)}"
    x, width = 90 + b.start * scale, max((b.end - b.start) * scale, SMALLEST)
    title = f"<title>{_text(b.text)}\n{took}</title>"
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{b.color}">{title}</rect>'


def _merged(boxes: Iterable[Box], least: float) -> Iterator[Box]:
    """Stretches that are too thin to see, with those of their colour beside them."""
    last: Box | None = None
    for box in boxes:
        joins = last is not None and box.color == last.color and box.start - last.end < least
        if last is not None and joins and min(box.end - box.start, last.end - last.start) < 20 * least:
            last = Box(last.start, box.end, last.color, last.text if last.text == box.text else f"{last.text} …")
        else:
            if last is not None:
                yield last
            last = box
    if last is not None:
        yield last


def _ticks(seconds: float, scale: float, height: int) -> list[str]:
    marks = [seconds * k / 5 for k in range(6)]
    return [
        f'<text x="{90 + t * scale:.0f}" y="{height - 6}" text-anchor="{"end" if k == 5 else "start"}">{span(t)}</text>'
        for k, t in enumerate(marks)
    ]


def _svg(height: int, inside: Sequence[str], width: int = WIDTH) -> str:
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(inside)}</svg>'


# -- memory


def device_memory(times: Times, program: Program) -> str:
    """What lies on the device, and the largest values of its peak."""
    curve = times.curve()
    where = max(curve, key=lambda point: point[1])[2] if curve else 0
    rows = "".join(
        f"<tr><td>{_text(name)}</td><td>{_text(t)}</td><td>{shown(n)}</td><td>{_text(line)}</td></tr>"
        for name, t, n, line in _alive(program, where)
    )
    head = "<tr><th>value</th><th>type</th><th>bytes</th><th>made at</th></tr>"
    roles = {program.role(v).kind for v in program.inputs if v.type.space == DEVICE and v.type.ndim}
    stays = ", ".join(word for kind, word in STAYS.items() if kind in roles)
    text = f'<p class="quiet">Dashed: {stays}, {shown(times.held)}. At the peak besides these:</p>'
    table = f'<div class="scroll"><table>{head}{rows}</table></div>'
    return _over_time([(t, held) for t, held, _ in curve], times.held, times.seconds) + text + table


def host_memory(times: Times, program: Program) -> str:
    """What lies on the host, where anything does."""
    curve, held = times.host_curve(), host_held(program)
    if not any(now for _, now in curve):
        return ""
    text = f'<p class="quiet">Dashed: optimiser state and parameters that live there, {shown(held)}.</p>'
    return "<h2>Memory of the host over the step</h2>" + _over_time(curve, held, times.seconds) + text


def between(times: Times, program: Program) -> str:
    """What leaves the device and comes back, the largest first, where anything does."""
    assert times.clock is not None
    trips = sorted(travels(program, times.clock, times.compiled), key=lambda trip: -trip.value.type.bytes)
    if not trips:
        return ""
    rows = "".join(f"<li>{_text(trip)}</li>" for trip in trips[:AT_PEAK])
    waiting = f"{len(trips)} values, the largest first; hidden: computing does not wait for its copies."
    return f'<h2>Between device and host</h2><p class="quiet">{waiting}</p><ul>{rows}</ul>'


def _over_time(curve: Sequence[tuple[float, int]], held: int, seconds: float) -> str:
    """(seconds, bytes) as an area, what is `held` all the time as a line."""
    most = max((now for _, now in curve), default=0) or 1
    scale, tall = (WIDTH - 90) / max(seconds, 1e-12), 180
    points, last = [], float(tall)
    for t, now in curve:  # steps: what is alive changes from one equation to the next
        height = tall - now / most * (tall - 20)
        points += [f"{90 + t * scale:.1f},{last:.1f}", f"{90 + t * scale:.1f},{height:.1f}"]
        last = height
    points.append(f"{WIDTH},{last:.1f}")
    corners = f"90,{tall} {' '.join(points)} {WIDTH},{tall}"
    area = f'<polygon points="{corners}" fill="#4c78a8" fill-opacity="0.45" stroke="#4c78a8"/>'
    base = tall - held / most * (tall - 20)
    line = f'<line x1="90" x2="{WIDTH}" y1="{base:.1f}" y2="{base:.1f}" class="mark" stroke-dasharray="4 3"/>'
    labels = [
        f'<text x="0" y="24">{shown(int(most))}</text>',
        f'<text x="0" y="{max(base, 40):.0f}">{shown(held)}</text>',
    ]
    return _svg(tall + 24, [area, line, *labels, *_ticks(seconds, scale, tall + 24)])


def _alive(program: Program, at: int) -> list[tuple[str, Type, int, str]]:
    """The largest values of the entry that are on the device at an equation, or on their way to it."""
    eqns: Sequence[Eqn] = program.main.eqns
    coming = {next(e.vars): e.outputs[0] for e in eqns if e.op.transfers and not e.op.effect}  # by token
    there = [
        (coming.get(v, v), first) for v, (first, last) in lifetimes(program.main).items() if 0 <= first <= at <= last
    ]
    rows = {v.name: (v.name, v.type, size(v), eqns[i].line) for v, i in there if v.type.space == DEVICE}
    return sorted(rows.values(), key=lambda x: -x[2])[:AT_PEAK]


# -- parameters


def _parameters(best: Candidate, detail: Detail) -> str:
    """Each kind of parameter as a sheet, cut as its ranks hold it."""
    figures, seen = [], set[tuple[object, ...]]()
    for name, (shape, entry) in detail.parameters.items():
        key = (name.rsplit(".", 2)[-2:][0], shape, str(entry))
        if key in seen or len(shape) > 2:
            continue
        seen.add(key)
        figures.append(_sheet(name, shape, entry, best.shape.mesh))
    return f'<div class="cuts">{"".join(figures)}</div>'


def _sheet(name: str, shape: Sequence[int], entry: object, mesh: Mesh) -> str:
    layout = read_layout(entry, mesh, name)
    rows, columns = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0] if shape else 1)
    tall, wide = _fit(rows, columns)
    counts = [mesh.count(axes) for axes in layout.dims]
    down, across = (counts[0], counts[1]) if len(shape) == 2 else (1, counts[0] if counts else 1)
    down, across = min(down, 16), min(across, 16)
    cells = [
        f'<rect x="{j * wide / across:.1f}" y="{i * tall / down:.1f}" width="{wide / across:.1f}" '
        f'height="{tall / down:.1f}" fill="{CUTS[(i * across + j) % len(CUTS)]}" fill-opacity="0.3" class="mark"/>'
        for i in range(down)
        for j in range(across)
    ]
    caption = f"{_text(name)}<br/><span class='quiet'>{' x '.join(map(str, shape))}, {_text(layout)}</span>"
    return f"<figure>{_svg(int(tall) + 2, cells, int(wide) + 2)}<figcaption>{caption}</figcaption></figure>"


def _fit(rows: int, columns: int) -> tuple[float, float]:
    """Pixels of a sheet, as far as possible in proportion."""
    ratio = max(min(rows / columns, 3.0), 1 / 3)
    return (90 * min(ratio, 1.0) + 8, 90 / max(ratio, 1.0) + 8)
