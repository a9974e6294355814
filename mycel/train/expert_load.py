"""What the experts of a run's layers get, and the ranks that hold them: records, metrics and a picture.

    experts.jsonl   {"step": 10, "load": {"model.layers.0.mlp.experts": [410.2, 96.1, …], …}, "ranks": {…: [812.0, …]}}
    experts.png     the share of each expert of each layer, and that of the busiest over the steps

Numbers are choices a step, a moving average (`Step.expert_load`).  Of all layers the largest share that an expert, and
a rank, has of its layer's choices are metrics: `busiest_expert`, `busiest_rank`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mycel.step import Step
from mycel.train.curve import BLUE, INK, ORANGE, figure_of, save_figure
from mycel.train.metrics import RecordFile, cut, from_line

FILE, PICTURE = "experts.jsonl", "experts.png"
Loads = Mapping[str, Sequence[float]]
LABELS = 24  # layers that have room for their names


class ExpertRecords:
    """Writes what experts get, on the first rank of a run that starts, or goes on, at step `done`."""

    def __init__(self, folder: Path, done: int, first: bool, report: Callable[[str], None]) -> None:
        self.path, self.report, self.warned = folder / FILE, report, False
        self.file = RecordFile(self.path, self._refused) if first else None
        if first:
            try:
                cut(self.path, done)
            except OSError as error:
                report(
                    f"loads of experts after step {done} stay in the file: {error.strerror}\n  at        {self.path}"
                )

    def write(self, step: int, load: Loads, ranks: Loads) -> None:
        if self.file is not None:
            rounded = ({name: [round(x, 3) for x in xs] for name, xs in each.items()} for each in (load, ranks))
            record = {"step": step, **dict(zip(("load", "ranks"), rounded, strict=True))}
            self.file.append(json.dumps(record).encode() + b"\n")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _refused(self, log: RecordFile, error: OSError) -> None:
        if not self.warned:
            self.warned = True
            self.report(f"loads of experts wait in memory, as they cannot be written: {error.strerror}\n"
                        f"  at        {log.path}")  # fmt: skip


def measured(step: Step) -> tuple[Loads, Loads]:
    """What experts and ranks get, by layer; nothing where there are no experts, or a router is broken."""
    if not step.loads.seen.layers or step.broken_router():
        return {}, {}
    load = step.expert_load()
    return {name: x.tolist() for name, x in load.items()}, step.rank_load(load)


def busiest(loads: Loads) -> float | None:
    """The largest share in a layer."""
    return max((max(xs) / sum(xs) for xs in loads.values() if sum(xs)), default=None)


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of a run; none where it has no experts."""
    path = folder / FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [record for line in lines if (record := from_line(line)) is not None]


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The last record as a map of layers and experts, 1 where all get the same; below it the busiest over the steps."""
    figure = figure_of("no picture of experts", 8, 6)
    last = records[-1]["load"]
    shares = [[x * len(xs) / (sum(xs) or 1.0) for x in xs] for xs in last.values()]
    widest = max(map(len, shares))
    above, below = figure.subplots(2, 1, height_ratios=(2, 1))
    image = above.imshow(
        [[*row, *[float("nan")] * (widest - len(row))] for row in shares], aspect="auto", cmap="viridis", vmin=0
    )
    figure.colorbar(image, ax=above, label="load, 1: as all others")
    above.set_xlabel("expert", color=INK)
    above.set_yticks(range(len(last)), list(last) if len(last) <= LABELS else range(len(last)), fontsize=6)
    above.set_title(f"step {records[-1]['step']:,}", color=INK, fontsize=9)
    for kind, name, color in (("load", "expert", BLUE), ("ranks", "rank", ORANGE)):
        line = [(r["step"], share) for r in records if (share := busiest(r[kind])) is not None]
        if line:
            below.plot(*zip(*line, strict=True), color=color, marker="." if len(line) < LABELS else "",
                       label=f"the busiest {name}, {line[-1][1]:.1%} at the end")  # fmt: skip
    below.set_xlabel("step", color=INK)
    below.set_ylabel("share of choices", color=INK)
    below.set_ylim(0)
    below.spines[["top", "right"]].set_visible(False)
    below.legend(frameon=False, labelcolor=INK)
    save_figure(figure, path, "the picture of experts")
