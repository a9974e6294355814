"""What the documents claim: the README's example prints what the README shows, and the tour runs."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "modes").glob("*.md")), ids=lambda p: p.stem)
def test_the_example_of_a_mode_runs(page, tmp_path):
    """On as many processes as its page says; all that train come to a small loss, the same on all ranks."""
    text = page.read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    (tmp_path / "example.py").write_text(code)
    ranks = re.search(r"torchrun --nproc-per-node (\d)", text)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks[1]] if ranks else []
    ran = subprocess.run(
        [sys.executable, *start, "example.py"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = {float(x) for x in re.findall(r"loss ([\d.]+)", ran.stdout)}
    assert (len(losses) == 1 and losses.pop() < 1.0) if ranks else "dp=" in ran.stdout
