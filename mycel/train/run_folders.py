"""Which folder is a run, and where one is not, which runs there are instead."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

SHOWN = 3
PRINTED = "the folder that the run printed when it started"


def is_run(where: Path) -> bool:
    return (where / "config.yaml").is_file()


def run_around(where: Path) -> Path | None:
    """The run that a folder of checkpoints, or one of these, belongs to."""
    return next((parent for parent in where.parents[:2] if is_run(parent)), None)


def run_of_checkpoint(where: Path) -> Path | None:
    """The run of which RUN/checkpoints/step-N is to be a checkpoint; whether it has that one is not asked."""
    named = re.fullmatch(r"step-[0-9]+", where.name) and where.parent.name == "checkpoints"
    return run_around(where) if named else None


def near_runs(where: Path) -> str:
    """Runs that may have been asked for; nothing if there are none: those in it; of those beside it, or in `runs`, such
    as have a name like it, else the newest."""
    if inside := _runs_in(where):
        return _shown(inside)
    there = _runs_in(where.parent) or ([] if where.is_absolute() else _runs_in(Path("runs")))
    alike = get_close_matches(where.name, [run.name for run in there], n=SHOWN, cutoff=0.6)
    return _shown([run for name in alike for run in there if run.name == name] or there)


def no_run(where: Path) -> str:
    """What is wrong with a folder that is not a run, and what to try."""
    if where.is_dir():
        what = f"{where} is not a run: it has no config.yaml"
    else:
        what = f"{where} is a file, not a run" if where.exists() else f"no run {where}: there is no such folder"
    around = run_around(where)
    return f"{what}\n  try       {around or near_runs(where) or PRINTED}"


def _runs_in(folder: Path) -> list[Path]:
    """Runs right in a folder, the newest first."""
    files = [file for file in folder.glob("*/config.yaml") if file.is_file()]
    return [file.parent for file in sorted(files, key=lambda file: (-file.stat().st_mtime, str(file)))]


def _shown(runs: list[Path]) -> str:
    return " or ".join(map(str, runs[:SHOWN]))
