"""What the documents claim: the README's example prints what the README shows, and the tour runs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_readme_example_prints_what_it_says(tmp_path):
    readme = (ROOT / "README.md").read_text()
    code, shown = re.search(r"```python\n(.*?)```\n\nprints\n\n```text\n(.*?)```", readme, re.DOTALL).groups()
    (tmp_path / "example.py").write_text(code)
    ran = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.rstrip() == shown.rstrip()


def test_the_tour(capsys):
    runpy.run_path(str(ROOT / "docs" / "tour.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert "== refused" in told and "causal=True" in told


def test_the_readmes_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command
