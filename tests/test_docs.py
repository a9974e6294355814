"""What the documents claim: examples run and print what pages show, links lead somewhere, the site is built."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import typer
import yaml

import mycel
from mycel.cli import app
from mycel.plan import Plan
from mycel.plan.cluster import Cluster
from mycel.train.config import Config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "modes").glob("*.md")])


def fenced(page: Path, kind: str) -> list[str]:
    """The blocks of a page in some language."""
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_readme_is_one_screen_and_its_example_trains(tmp_path, monkeypatch, capsys):
    """What it is, two commands, a picture, one example; then the measured table."""
    readme = (ROOT / "README.md").read_text()
    before, table = readme.split("## Measured")
    assert len(before.splitlines()) <= 50 and readme.count("\n## ") == 1 and "\n| command" in table
    commands = [line for line in fenced(ROOT / "README.md", "")[0].splitlines() if line[0] != " "]
    assert len(commands) == 2 and len(fenced(ROOT / "README.md", "python")) == 1
    (tmp_path / "example.py").write_text(fenced(ROOT / "README.md", "python")[0])
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    ran = runpy.run_path("example.py", run_name="__main__")
    first = torch.nn.functional.mse_loss(torch.zeros(64, 1), ran["x"].sum(1, keepdim=True))  # of who knows nothing
    assert ran["step"].steps == 50 and float(ran["loss"]) < 0.2 * float(first)
    assert capsys.readouterr().out.rstrip() == ran["step"].explain().rstrip()


def test_the_example_prints_what_the_page_says(tmp_path):
    page = (DOCS / "tour.md").read_text()
    code, shown = re.search(r"```python\n((?:(?!```).)*)```\n\nprints\n\n```text\n(.*?)```", page, re.DOTALL).groups()
    (tmp_path / "example.py").write_text(code)
    ran = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.rstrip() == shown.rstrip()


def test_the_tour(capsys):
    runpy.run_path(str(ROOT / "docs" / "tour.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "== refused" in output and "causal=True" in output


def test_the_commands_of_the_project_exist():
    makefile = (ROOT / "Makefile").read_text()
    shown = {page: re.findall(r"^make (\w+)", page.read_text(), re.MULTILINE) for page in (*PAGES, ROOT / "README.md")}
    assert shown[ROOT / "README.md"] and shown[DOCS / "start.md"]
    for command in (command for commands in shown.values() for command in commands):
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


@pytest.mark.parametrize("page", [p for p in sorted(DOCS.glob("*.md")) if fenced(p, "python")], ids=lambda p: p.stem)
def test_the_snippets_of_a_page_run(page, tmp_path, monkeypatch):
    """One after the other, as one script; what they assert is true."""
    script = tmp_path / f"{page.stem}.py"
    script.write_text("\n\n".join(fenced(page, "python")))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")


def test_no_page_has_a_snippet_that_no_test_runs():
    """Python on the pages above and on those of modes, settings on two, and no block that names another language."""
    others = [p for p in DOCS.rglob("*.md") if p not in PAGES]
    assert not [p.name for p in others if fenced(p, r"\w+")]
    assert all(len(fenced(p, "python")) == 1 for p in PAGES if p.parent.name == "modes")
    assert {p.name for p in PAGES if fenced(p, "yaml")} == {"train.md", "plans.md"}
    kinds = {kind for p in PAGES for kind in re.findall(r"^```(\w+)$", p.read_text(), re.M)}
    assert kinds == {"python", "sh", "text", "yaml"}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda p: p.stem)
def test_the_commands_of_a_page_have_these_options(page):
    known = typer.main.get_command(app).commands
    lines = [line for block in fenced(page, "(?:sh)?") for line in block.splitlines()]
    for line in (x[x.index("mycel ") :] for x in lines if re.match(r"(mycel |torchrun .* -m mycel )", x)):
        words = shlex.split(line, comments=True)
        assert words[1] in known, line
        options = {o for p in known[words[1]].params for o in (*p.opts, *p.secondary_opts)}
        assert {w for w in words if w.startswith("--")} <= options, line


def test_the_yaml_of_the_pages_is_understood():
    for block in fenced(DOCS / "train.md", "yaml"):
        Config.from_dict(yaml.safe_load(block))
    read = [yaml.safe_load(block) for block in fenced(DOCS / "plans.md", "yaml")]
    worlds = [Cluster.read(x).world if "device" in x else Plan.read(x).mesh.world for x in read]
    assert worlds and all(world > 1 for world in worlds)


def test_every_page_is_in_the_sites_index():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(site["nav"])))
    assert listed == {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as the site's generator and GitHub write them alike."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in re.findall(r"^#+ (.*)", text, re.MULTILINE))
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def broken_links(page: Path) -> list[str]:
    """Links to files that are not there, and to headings that the page they lead to does not have."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)]
    parts = [(link, *link.partition("#")[::2]) for link in links]
    at = [(link, page.parent / name if name else page, anchor) for link, name, anchor in parts]
    return [link for link, file, anchor in at if not file.is_file() or (anchor and anchor not in anchors(file))]


def test_every_link_leads_somewhere(tmp_path):
    pages = [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]
    assert {page.name: broken for page in pages if (broken := broken_links(page))} == {}
    (tmp_path / "b.md").write_text("# The `first` one, told\n```\n# no heading\n```\n")
    links = "[1](b.md#the-first-one-told) [2](b.md#no-heading) [3](#here) [4](#there) [5](c.md) [6](https://a.b/c)"
    (tmp_path / "a.md").write_text(f"# Here\n{links}\n")
    assert broken_links(tmp_path / "a.md") == ["b.md#no-heading", "#there", "c.md"]


def test_the_site_is_built_strictly(tmp_path):
    """By `make docs`, into another folder: every page, every link of it, and nothing that is fetched when it is
    read."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason="no generator of the site is installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr[-3000:]
    pages = {str(page.relative_to(tmp_path)): page.read_text() for page in tmp_path.rglob("*.html")}
    assert {str(p.relative_to(DOCS).with_suffix(".html")) for p in DOCS.rglob("*.md")} <= pages.keys()
    fetched = re.compile(r"""<(?:script|link|img)[^>]*(?:src|href)=["']?https?://""")
    assert not [name for name, page in pages.items() if fetched.search(page)]
    assert "train_step" in pages["reference.html"] and "without taking a step" in pages["reference.html"]


def test_files_that_pages_show_are_there():
    """Written as the site's generator reads it: a formatter takes it for Python, and puts spaces in."""
    shown = [line for page in DOCS.rglob("*.md") for line in page.read_text().splitlines() if re.match("-+8 ?<", line)]
    assert shown and all((ROOT / re.fullmatch(r'--8<-- "(.+)"', line)[1]).is_file() for line in shown), shown


def is_said(name: str, x: object) -> bool:
    """Is an attribute of a class one of its methods or properties, for anyone to use?"""
    return name[0] != "_" and isinstance(x, (types.FunctionType, property, classmethod, staticmethod))


def test_every_public_name_is_in_the_reference():
    """And says what it is, with all that it has: what says nothing is left out of the page."""
    listed = set(re.findall(r"^::: (\S+)", (ROOT / "docs" / "reference.md").read_text(), re.M))
    public = {f"{home}.{name}" for name, home in mycel.HOME.items()}
    assert listed == public | {"mycel.comm", "mycel.errors"}
    things = [getattr(mycel, name) for name in mycel.__all__]
    own = (x for x in vars(mycel.comm).values() if getattr(x, "__module__", "") == "mycel.comm")
    things += [x for x in own if x.__name__[0] != "_"]
    owned = [(x.__name__, x, "") for x in things if callable(x)]
    for kind in [x for x in things if isinstance(x, type)]:
        for base in (base for base in kind.__mro__ if base.__module__.startswith("mycel")):
            said = ((name, x) for name, x in vars(base).items() if is_said(name, x))
            owned += [(kind.__name__, getattr(x, "__func__", x), f".{name}") for name, x in said]
    assert not [f"{name}{part}" for name, x, part in owned if not inspect.getdoc(x)]


def test_the_search_of_the_site_fetches_nothing():
    """The theme's offline plugin takes a script from the network unless one of this name is given."""
    scripts = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["extra"]["polyfills"]
    assert [Path(script).name for script in scripts] == ["iframe-worker.js"]
    assert all((DOCS / script).is_file() for script in scripts)
