"""Golden texts: what a test saw before, kept under tests/golden and read as a diff.

golden("dce", text)           compares with tests/golden/dce.txt; with MYCEL_ACCEPT=1 (`make accept`) writes it instead
change("dce", before, after)  the same for a pass: its program before and after
"""

from __future__ import annotations

import os
from pathlib import Path

from mycel.ir import Program, check

FOLDER = Path(__file__).parent / "golden"


def golden(name: str, text: str) -> None:
    """The text is the accepted one."""
    path = FOLDER / f"{name}.txt"
    text = "\n".join(line.rstrip() for line in text.strip().split("\n")) + "\n"
    if os.environ.get("MYCEL_ACCEPT") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return
    assert path.is_file(), f"no golden text {path}: look at the output below, then `make accept`\n{text}"
    assert text == path.read_text(), f"differs from {path}; if that is meant, `make accept`"


def change(name: str, before: Program, after: Program) -> None:
    """What a pass does to a program is as accepted."""
    golden(name, f"# before\n\n{check(before)}\n# after\n\n{check(after)}")
