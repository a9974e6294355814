"""Small YAML files that people write, plans and clusters: read, or refused with the place and what to try."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from mycel.errors import PlanError

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast


def read_mapping(path: Path, kind: str, example: str) -> dict[str, Any]:
    """What a file says, as plain data; `kind`: what it should be, as a word, and an `example` of its lines."""
    try:
        data = yaml.load(path.read_bytes(), Loader=_Loader)
    except FileNotFoundError:
        there = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        near = [str(path.parent / name) for name in get_close_matches(path.name, there, 2)]
        raise PlanError(f"there is no {kind} {path}\n  try       {' or '.join(near) or 'an absolute path'}") from None
    except OSError as e:
        raise PlanError(f"cannot read the {kind}: {e.strerror}\n  at        {path}\n  try       a YAML file") from None
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise PlanError(
            f"the {kind} is not YAML: {e.problem or e.context}\n  at        {place}\n"
            "  try       look at the brackets and the indentation before it"
        ) from None
    except yaml.YAMLError:
        raise PlanError(f"the {kind} is not text\n  at        {path}\n  try       a YAML file saved as UTF-8") from None
    if not isinstance(data, dict):
        raise PlanError(f"a {kind} is a mapping\n  at        {path}\n  try       {example}")
    return data
