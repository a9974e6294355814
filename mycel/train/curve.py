"""The loss over the steps of a run, as a picture and as a drawing in the terminal.

Both show the training loss and the validation loss of records as `metrics.read` gives them:

    {"step": 10, "loss": 4.2, …}, {"step": 100, "validation": 3.1, …}

A loss that is not finite (or beyond all reason) has no place on the axis: the picture marks its step, the drawing
leaves it out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mycel.errors import TrainError

Points = list[tuple[float, float]]

BLUE, ORANGE, RED, INK = "#2463a8", "#e07b27", "#c0392b", "#333333"


def points(records: Iterable[Mapping[str, Any]], name: str) -> Points:
    """The steps and values of one measurement, in the order of steps, those not finite too."""
    return sorted(
        ((float(r["step"]), float(r[name])) for r in records if isinstance(r.get(name), int | float)),
        key=lambda point: point[0],
    )


def finite(line: Points) -> Points:
    """The points that have a place on the axis."""
    return [point for point in line if abs(point[1]) < 1e30]


def calm(line: Points) -> Points:
    """Each value => the median of it and the two on each side, so that a lone spike is gone and a step or a slope is
    not."""
    values = [value for _, value in line]
    reach = [min(2, i, len(line) - 1 - i) for i in range(len(line))]
    return [
        (step, sorted(values[i - r : i + r + 1])[r]) for i, ((step, _), r) in enumerate(zip(line, reach, strict=True))
    ]


def smooth(line: Points) -> Points:
    """Each value => the mean of those around it, spikes left out; at the start, where the loss falls fast, of as many
    before as after."""
    half = len(line) // 30
    if half == 0:
        return line
    sums = [0]  # in whole numbers of 2^-60: exact, so that one huge value does not eat the digits of all that follow
    for _, value in calm(line):
        sums.append(sums[-1] + int(value * 2**60))
    out = []
    for i, (step, _) in enumerate(line):
        low, high = max(0, i - half), min(len(line), i + min(i, half) + 1)
        out.append((step, (sums[high] - sums[low]) / ((high - low) * 2**60)))
    return out


# The picture.


def figure_of(missing: str, width: float, height: float) -> Any:
    """An empty picture; TrainError, which says what is `missing` then, where there is no matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TrainError(
            f"{missing}: {error}\n  at        log.curve\n  try       pip install matplotlib, or log.curve: false"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path, what: str) -> None:
    """Write a picture as a PNG, whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(part, format="png", facecolor="white")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise TrainError(
            f"{what} could not be written: {error.strerror}\n  at        {path}\n  try       make room there"
        ) from error


def draw(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the curve as a PNG, whole or not at all."""
    figure = figure_of("no loss curve", 8, 4.5)
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    records = list(records)
    training, validation = points(records, "loss"), points(records, "validation")
    axes = figure.add_subplot()
    axes.margins(x=0.02)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#999999")
    axes.tick_params(colors=INK, length=3)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    _draw_lines(axes, training, validation)
    save_figure(figure, path, "the loss curve")


def _draw_lines(axes: Any, training: Points, validation: Points) -> None:
    """The measured losses light, their course strong, validation as points, and what is not finite as marks at the
    foot."""
    good, held_out = finite(training), finite(validation)
    lost = sorted({step for step, value in [*training, *validation] if not abs(value) < 1e30})
    course = smooth(good)
    if good:
        axes.plot(*zip(*good, strict=True), color=BLUE, alpha=0.25, linewidth=0.9)
        marker = "o" if len(good) == 1 else ""
        axes.plot(
            *zip(*course, strict=True),
            color=BLUE,
            linewidth=1.8,
            marker=marker,
            label=f"training, {course[-1][1]:#.4g} at the end",
        )
    if held_out:
        best = min(value for _, value in held_out)
        label = f"validation, {held_out[-1][1]:#.4g} at the end" + (
            f", {best:#.4g} at best" if best < held_out[-1][1] else ""
        )
        axes.plot(*zip(*held_out, strict=True), color=ORANGE, linewidth=1.2, marker="o", markersize=4, label=label)
    if lost:
        foot = axes.get_xaxis_transform()
        axes.plot(
            lost,
            [0.02] * len(lost),
            "x",
            color=RED,
            markersize=5,
            transform=foot,
            clip_on=False,
            label=f"not finite, steps: {len(lost)}",
        )
    if good or held_out:
        axes.set_ylim(*_limits([*(calm(good) if len(good) >= 30 else good), *held_out]))
    if good or held_out or lost:
        left, right = axes.get_xlim()
        axes.set_xlim(min(left, (left + right) / 2 - 1), max(right, (left + right) / 2 + 1))
        axes.legend(frameon=False, labelcolor=INK, loc="upper right")
    else:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no loss was recorded", transform=axes.transAxes, ha="center", va="center", color=INK)


def _limits(shown: Points) -> tuple[float, float]:
    """Bottom and top of the loss axis, with a little air."""
    low, high = min(value for _, value in shown), max(value for _, value in shown)
    air = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return low - air, high + air


# The drawing.


def sketch(records: Iterable[Mapping[str, Any]], width: int, height: int) -> str:
    """The curve in at most `width` columns and `height` rows: training as a line of braille dots, validation as
    circles."""
    records = list(records)
    training, validation = smooth(finite(points(records, "loss"))), finite(points(records, "validation"))
    both = training + validation
    if not both:
        return "no loss was recorded"[: max(0, width)]
    low, high = min(value for _, value in both), max(value for _, value in both)
    first, last = min(step for step, _ in both), max(step for step, _ in both)
    if high - low <= 1e-9 * abs(high):  # one height: in the middle
        low, high = low - max(0.5, 0.05 * abs(low)), high + max(0.5, 0.05 * abs(high))
    rows = max(2, height - 3)  # two rows for the axis of steps, one for the legend
    labels = _labels(low, high, rows)
    margin = max(len(label) for label in labels)
    columns = max(2, width - margin - 2)
    x = lambda step, cells: round((step - first) / (last - first) * (cells - 1)) if last > first else (cells - 1) // 2
    y = lambda value, cells: round((high - value) / (high - low) * (cells - 1))
    cells = _braille([(x(step, 2 * columns), y(value, 4 * rows)) for step, value in training], columns, rows)
    for step, value in validation:
        cells[y(value, rows)][x(step, columns)] = "●"
    drawn = [
        f"{label:>{margin}} {'┤' if label else '│'}{''.join(row)}" for label, row in zip(labels, cells, strict=True)
    ]
    legend = "   ".join(["⠒⠒ training"] * bool(training) + ["● validation"] * bool(validation))
    foot = [
        " " * (margin + 1) + "└" + "─" * columns,
        " " * (margin + 2) + _steps(first, last, columns),
        " " * (margin + 2) + legend,
    ]
    return "\n".join(line.rstrip()[: max(0, width)] for line in [*drawn, *foot])


def _labels(low: float, high: float, rows: int) -> list[str]:
    """The loss at the rows that show it: the first, the last, and every fourth or so between."""
    digits = max(0, min(6, 2 - math.floor(math.log10(high - low) + 1e-9)))
    parts = max(1, round((rows - 1) / 4))
    labels = [""] * rows
    for part in range(parts + 1):
        row = round(part * (rows - 1) / parts)
        value = high - row / (rows - 1) * (high - low)
        labels[row] = f"{value:.{digits}f}" if abs(value) < 1e7 else f"{value:.2e}"
    return labels


def _steps(first: float, last: float, columns: int) -> str:
    """The first and the last step under the two ends of their axis."""
    left, right = f"{first:.0f}", f"{last:.0f}"
    if left == right:
        return f"step {left}".center(columns)
    middle = "step" if len(left) + len(right) + 6 <= columns else ""
    gap = columns - len(left) - len(right)
    return left + middle.center(gap) + right if gap > 0 else right.rjust(columns)


def _braille(dots: Sequence[tuple[int, int]], columns: int, rows: int) -> list[list[str]]:
    """A line through dots on a grid of 2 by 4 dots a cell: the mean of each column of dots, joined to the next."""
    heights: dict[int, list[int]] = {}
    for across, down in dots:
        heights.setdefault(across, []).append(down)
    means = {across: round(sum(downs) / len(downs)) for across, downs in sorted(heights.items())}
    grid = [[0] * columns for _ in range(rows)]
    before: tuple[int, int] | None = None
    for dot in means.items():
        for across, down in _segment(before or dot, dot):
            # Unicode counts the dots of a cell 1 2 3 7 down on the left, 4 5 6 8 on the right.
            grid[down // 4][across // 2] |= ((1, 2, 4, 64), (8, 16, 32, 128))[across % 2][down % 4]
        before = dot
    return [[chr(0x2800 + cell) if cell else " " for cell in row] for row in grid]


def _segment(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line, without holes."""
    (x0, y0), (x1, y1) = start, end
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)) for i in range(count + 1)]
