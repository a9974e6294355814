"""What the trainer shows: the line on the screen, plain lines where there is no terminal, the table before step 1."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import struct
import subprocess
import sys
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mycel.train.progress import Progress, count, duration, number, size

ROOT = Path(__file__).parent.parent
few = settings(max_examples=60, deadline=None)


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, text=True, capture_output=True, timeout=120, check=False
    )


def test_nothing_heavy_is_imported_before_it_is_used():
    ours = ", ".join(f"mycel.train.{name}" for name in ("schedule", "metrics", "progress", "curve", "device"))
    done = python(f"import sys, {ours}; print(*sys.modules)")
    assert not {"torch", "tensorboard", "matplotlib", "transformers"} & set(done.stdout.split()), done.stderr


# The line on the screen.

odd = st.one_of(st.none(), st.floats(), st.integers(), st.just(10**400), st.just("?"))
fields = ("loss", "validation", "tokens_per_s", "mfu", "memory_bytes", "lr", "skipped")
reports = st.lists(st.tuples(st.integers(-5, 10**6), st.fixed_dictionaries(dict.fromkeys(fields, odd))), max_size=4)


def terminal(width: int = 80, encoding: str = "utf-8") -> Console:
    """A console that takes itself for a terminal, writing to memory."""
    return Console(
        file=io.TextIOWrapper(io.BytesIO(), encoding=encoding),
        force_terminal=True,
        width=width,
        height=20,
        legacy_windows=False,
    )


def shown(progress: Progress) -> list[str]:
    """The rows of the live line as text."""
    with progress.console.capture() as capture:
        progress.console.print(progress.rows())
    return re.sub(r"\x1b\[[\d;]*m", "", capture.get()).splitlines()


@given(st.integers(1, 200), st.integers(0, 10**6), reports, st.sampled_from(["utf-8", "ascii"]))
@few
def test_the_live_line_never_raises_and_fits_the_terminal(width, total, updates, encoding):
    progress = Progress(terminal(width, encoding), total, plain=False)
    for step, known in [(0, None), *updates]:
        if known is not None:
            progress.update(step, **known)
        rows = shown(progress)
        assert 1 <= len(rows) <= 2 and all(len(row) <= width for row in rows), rows


@given(st.integers(0, 10**6), reports)
@few
def test_plain_lines_never_raise_and_are_one_for_each_report(total, updates):
    out = io.StringIO()
    progress = Progress(Console(file=out, width=20), total)
    with progress:
        for step, known in updates:
            progress.update(step)  # no news, no line
            progress.update(step, **known)
    lines = out.getvalue().splitlines()
    reported = [
        known for _, known in updates if any(known[name] is not None for name in fields[:-1]) or known["skipped"]
    ]
    assert len(lines) == len(reported) and all(line.startswith("step") for line in lines)
    assert "\x1b" not in out.getvalue()
    words = {
        "loss": "loss ",
        "validation": "val ",
        "tokens_per_s": "tok/s",
        "mfu": "MFU",
        "lr": "lr ",
        "skipped": "skipped",
    }
    for line, known in zip(lines, reported, strict=True):
        for name, word in words.items():
            assert (word in line) == (bool(known[name]) if name == "skipped" else known[name] is not None)


def test_the_live_line_at_80_and_120_columns():
    now = iter(range(1000))
    progress = Progress(terminal(120), 500, plain=False, clock=lambda: next(now))
    assert shown(progress) == ["step 0/500  ────────────────────────────────────────  0%  first step, 0:01"]
    now = iter([100, *[102] * 50])
    progress.update(100, loss=2.5)
    progress.update(
        120, loss=2.43118, validation=2.551, tokens_per_s=12345, mfu=0.412, memory_bytes=9.13 * 2**30, lr=3e-4
    )
    words = "loss 2.4312  val 2.5510  12.3k tok/s  MFU 41.2%  9.1 GiB  lr 3.00e-04"
    assert shown(progress) == [f"step 120/500  {'━' * 5}{'─' * 14}  24%  {words}  0:38 left"]
    progress.console.width = 80
    assert shown(progress) == [f"step 120/500  {'━' * 10}{'─' * 30}  24%  0:38 left", words]
    progress.console.width = 40
    assert shown(progress) == [
        f"step 120/500  {'━' * 2}{'─' * 8}  24%  0:38 left",
        "loss 2.4312  val 2.5510  12.3k tok/s",
    ]
    progress.update(500, loss=math.nan, skipped=3)
    progress.console.width = 80
    assert shown(progress)[0].endswith("100%  took 1:42  skipped 3") and shown(progress)[1].startswith("loss nan")


@given(st.floats(0.01, 100), st.integers(2, 100), st.integers(0, 1000))
@few
def test_the_time_left_is_that_of_a_steady_pace(pace, done, rest):
    now = [0.0]
    progress = Progress(terminal(), 7 + done + rest, start=7, plain=False, clock=lambda: now[0])
    now[0] = 600.0  # the first step compiles: it is not the pace
    for i in range(1, done + 1):
        progress.update(7 + i)
        now[0] += pace if i < done else 0
    assert progress.left_s() == pytest.approx(rest * pace)
    now[0] += 1e9
    assert progress.left_s() == 0


def test_where_lines_are_plain(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert not Progress(terminal(), 10).plain
    assert Progress(Console(file=io.StringIO()), 10).plain
    assert Progress(terminal(), 10, plain=True).plain
    monkeypatch.setenv("TERM", "dumb")
    assert Progress(terminal(), 10).plain
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert Progress(terminal(), 10).plain


def test_the_table_before_step_1():
    rows = [("model", "Llama [bold] 1.6 M"), ("tokens a step", "4,096")]
    out = io.StringIO()
    Progress(Console(file=out), 10, plain=True).summary(rows, "what will run")
    assert out.getvalue() == "what will run\n  model          Llama [bold] 1.6 M\n  tokens a step  4,096\n\n"
    console = terminal(30)
    with console.capture() as capture:
        Progress(console, 10, plain=False).summary(
            [*rows, ("results", "/a/very/long/path/to/the/results")], "what will run"
        )
    text = re.sub(r"\x1b\[[\d;]*m", "", capture.get())
    assert all(len(line) <= 30 for line in text.splitlines())
    assert "/a/very/long/path/to/the/results" in "".join(line[17:].strip() for line in text.splitlines()[3:])


TRAINING = """
import sys; from rich.console import Console; from mycel.train.progress import Progress
with Progress(Console(), 2000) as progress:
    for step in range(1, 2001):
        progress.update(step, loss=1 / step)
        if step % 1000 == 0: progress.note(f"saved step {step}")
print("done", file=open(sys.argv[1], "w"))
"""


def test_a_real_terminal_gets_a_live_line_and_its_cursor_back(tmp_path):
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")} | {
        "TERM": "xterm-256color"
    }
    child = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path / "end")], cwd=ROOT, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = b""
    while chunk := read_terminal(ours):
        seen += chunk
    os.close(ours)
    assert child.wait() == 0
    text = seen.decode()
    assert "saved step 1000" in text and "2000/2000" in text
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.count("loss") < 1000  # redrawn some times a second, not at each step


def read_terminal(end: int) -> bytes:
    """What the other side wrote; nothing once it is gone."""
    try:
        return os.read(end, 65536)
    except OSError:
        return b""


def test_training_goes_on_when_nobody_reads(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path / "end")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.readline()
    child.stdout.close()
    errors = child.stderr.read().decode()
    child.wait()
    assert (tmp_path / "end").read_text() == "done\n", errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_training_goes_on_when_its_log_is_on_a_full_disk():
    log = open("/dev/full", "w")  # noqa: SIM115
    with Progress(Console(file=log), 10) as progress:
        for step in range(10):
            progress.update(step, loss=1.0)
    with pytest.raises(OSError, match="No space"):
        log.close()


def test_an_exit_asked_for_while_printing_is_not_swallowed(monkeypatch):
    progress = Progress(Console(file=io.StringIO()), 10)
    monkeypatch.setattr(progress.console, "print", lambda *args, **options: sys.exit(3))
    with pytest.raises(SystemExit):
        progress.note("interrupted by a signal here")


def test_a_console_of_few_letters_gets_what_it_can_write():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    progress = Progress(Console(file=out), 10)
    progress.note("größer ━")
    progress.summary([("a", "2 π 3")], "Ω")
    out.flush()
    assert out.buffer.getvalue() == b"gr??er ?\n?\n  a  2 ? 3\n\n"


def test_how_numbers_read():
    assert [number(x) for x in (2.43118, 0.0, 1e-5, -3.0, math.nan, -math.inf, 1e9)] == [
        "2.4312", "0.0000", "1.000e-05", "-3.0000", "nan", "-inf", "1.000e+09",
    ]  # fmt: skip
    assert [count(x) for x in (0, 999, 12345, 2.5e6, 999999, math.nan)] == ["0", "999", "12.3k", "2.5M", "1.0M", "nan"]
    assert [size(x) for x in (512 * 2**20, 9.13 * 2**30)] == ["512 MiB", "9.1 GiB"]
    assert [duration(x) for x in (42, 3723, 100000, -1, math.inf, 59.7)] == [
        "0:42",
        "1:02:03",
        "1d 03h",
        "?",
        "?",
        "1:00",
    ]
