"""What the trainer shows and records: the rate of every step, the metrics on disk, the line on the screen, the curve, the device."""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import pty
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from fcntl import ioctl
from itertools import pairwise
from pathlib import Path
from termios import TIOCSWINSZ

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from mycel.errors import TrainError
from mycel.train import curve, device, metrics
from mycel.train.metrics import Metrics
from mycel.train.progress import Progress, count, duration, number, size
from mycel.train.schedule import KINDS, learning_rate, warmup_steps

ROOT = Path(__file__).parent.parent
few = settings(max_examples=60, deadline=None)


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)


def test_nothing_heavy_is_imported_before_it_is_used():
    ours = ", ".join(f"mycel.train.{name}" for name in ("schedule", "metrics", "progress", "curve", "device"))
    done = python(f"import sys, {ours}; print(*sys.modules)")
    assert not {"torch", "tensorboard", "matplotlib", "transformers"} & set(done.stdout.split()), done.stderr


# The learning rate.

schedules = st.integers(1, 300).flatmap(
    lambda steps: st.fixed_dictionaries({
        "lr": st.floats(1e-6, 1.0),
        "kind": st.sampled_from(KINDS),
        "steps": st.just(steps),
        "warmup": st.one_of(st.integers(0, steps - 1), st.floats(0, 0.9)),
        "min_lr": st.floats(0, 1),
    })
)  # fmt: skip


@given(schedules)
@few
def test_the_rate_rises_to_lr_then_falls_to_the_floor(s):
    rates = [learning_rate(step, **s) for step in range(s["steps"] + 3)]
    lr, floor, w = s["lr"], s["min_lr"] * s["lr"], warmup_steps(s["warmup"], s["steps"])
    assert rates[0] > 0
    assert all(a < b for a, b in pairwise(rates[: w + 1]))
    if w == s["steps"]:
        return
    assert rates[w] == pytest.approx(lr)
    assert w == 0 or rates[w] - rates[w - 1] == pytest.approx(lr / (w + 1))  # the last rise is as the others: no jump
    if s["kind"] == "constant":
        assert set(rates[w:]) == {lr}
        return
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[w:]))
    assert all(floor - 1e-12 <= rate for rate in rates[w:])
    assert rates[s["steps"] - 1] - floor <= (lr - floor) / (s["steps"] - w) + 1e-12
    assert rates[s["steps"]] == rates[s["steps"] + 2] == pytest.approx(floor, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name, kind, min_lr", [("cosine", "cosine", 0.0), ("linear", "linear", 0.0), ("cosine_with_min_lr", "cosine", 0.1)])
def test_the_rate_is_that_of_transformers(name, kind, min_lr, warmup):
    from transformers import get_scheduler

    def theirs(warmup: int, steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
        extra = {"scheduler_specific_kwargs": {"min_lr_rate": min_lr}} if min_lr else {}
        scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps, **extra)
        rates = []
        for _ in range(steps):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        return rates

    ours = [learning_rate(step, lr=0.3, kind=kind, steps=40, warmup=warmup, min_lr=min_lr) for step in range(40)]
    assert ours[warmup:] == pytest.approx(theirs(warmup, 40)[warmup:], rel=1e-12)
    assert ours[:warmup] == pytest.approx(theirs(warmup + 1, 41)[1 : warmup + 1], rel=1e-12)


def test_a_fraction_of_warm_up_and_an_unknown_schedule():
    assert [warmup_steps(w, 300) for w in (0, 0.05, 0.0501, 1, 100, 100.0)] == [0, 15, 16, 1, 100, 100]
    with pytest.raises(TrainError, match=r"(?s)'cosin'.*schedule\.kind.*cosine, linear, constant"):
        learning_rate(0, lr=1, kind="cosin", steps=1, warmup=0, min_lr=0)


# Metrics.

names = st.text("abcxyz_/", min_size=1, max_size=6).filter(lambda name: name != "step")
values = st.one_of(st.floats(), st.integers(-(2**53), 2**53), st.booleans(), st.text(max_size=8))


def same(a: object, b: object) -> bool:
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b))


@contextmanager
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(st.lists(st.dictionaries(names, values, max_size=4), max_size=8))
@few
def test_what_is_written_is_read_back_and_is_strict_json(records):
    with folder() as run:
        with Metrics(run, tensorboard=False, resume_at=None) as out:
            for step, record in enumerate(records):
                out.write(step, **record)
                assert len(metrics.read(run)) == step + 1  # on disk at once
        back = metrics.read(run)
        for step, (record, again) in enumerate(zip(records, back, strict=True)):
            words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
            expected = {"step": step} | {k: words.get(v, v) if isinstance(v, str) else v for k, v in record.items()}
            assert expected.keys() == again.keys()
            assert all(same(expected[k], again[k]) for k in expected)

        def refuse(word: str) -> None:
            raise AssertionError(f"not JSON: {word}")

        for line in (run / "metrics.jsonl").read_text().splitlines() if records else []:
            json.loads(line, parse_constant=refuse)


def test_tensors_count_as_numbers_and_what_is_not_known_is_left_out(tmp_path):
    with Metrics(tmp_path, tensorboard=False, resume_at=None) as out:
        out.write(1, loss=torch.tensor(2.5), lr=np.float32(0.5), mfu=None)
    assert metrics.read(tmp_path) == [{"step": 1, "loss": 2.5, "lr": 0.5}]
    assert metrics.read(tmp_path / "nowhere") == []


def write_steps(out: Metrics, first: int, last: int) -> None:
    """What a training loop writes: a loss each step, a validation loss each fourth."""
    for step in range(first, last + 1):
        out.write(step, loss=5 / step)
        if step % 4 == 0:
            out.write(step, validation=6 / step)


@given(st.integers(0, 20), st.integers(0, 20), st.sampled_from([b"", b'{"step": 3, "lo', b"\0" * 9, b'{"step": 3}']))
@few
def test_a_resumed_file_equals_that_of_an_uninterrupted_run(saved, died, torn):
    with folder() as whole, folder() as run:
        with Metrics(whole, False, None) as out:
            write_steps(out, 1, 20)
        with Metrics(run, False, None) as out:
            write_steps(out, 1, max(saved, died))
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(torn)
        with Metrics(run, False, saved) as out:
            write_steps(out, saved + 1, 20)
        assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_killed_process_leaves_whole_lines(tmp_path):
    code = """
import sys; from pathlib import Path; from mycel.train.metrics import Metrics
out, step = Metrics(Path(sys.argv[1]), False, None), 0
while True:
    step += 1
    out.write(step, loss=5 / step)
"""
    for trial in range(4):
        run = tmp_path / str(trial)
        child = subprocess.Popen([sys.executable, "-c", code, str(run)], cwd=ROOT)
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").stat().st_size < 2000 * (trial + 1):
            assert child.poll() is None
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        child.wait()
        with Metrics(run, False, 25) as out:
            out.write(26, loss=5 / 26)
        assert metrics.read(run) == [{"step": step, "loss": 5 / step} for step in range(1, 27)]


def scalars(run: Path, tag: str) -> dict[int, float]:
    """What TensorBoard itself shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(run / "tensorboard"))
    shown.Reload()
    return {event.step: event.value for event in shown.Scalars(tag)}


def test_tensorboard_shows_a_resumed_run_as_one(tmp_path):
    with Metrics(tmp_path, True, None) as out:
        for step in range(1, 8):
            out.write(step, loss=float(step), note="words are for the file alone")
    with Metrics(tmp_path, True, 4) as out:
        for step in range(5, 7):
            out.write(step, loss=step + 0.5)
    assert scalars(tmp_path, "loss") == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5.5, 6: 6.5}


def test_without_tensorboard_there_is_one_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
    said: list[str] = []
    with Metrics(tmp_path, True, None, said.append) as out:
        write_steps(out, 1, 3)
    assert len(said) == 1 and "pip install tensorboard" in said[0]
    assert len(metrics.read(tmp_path)) == 3 and not (tmp_path / "tensorboard").exists()


def test_a_full_disk_is_said_once_and_nothing_is_lost(tmp_path):
    code = """
import resource, sys; from pathlib import Path; from mycel.train import metrics
run, said = Path(sys.argv[1]), []
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (450, hard))     # writes stop in the middle of a record
out = metrics.Metrics(run, True, None, said.append)
for step in range(1, 41): out.write(step, loss=5 / step)
print(len(said), said[0].splitlines()[0])
kept = metrics.read(run)
assert kept == [{"step": s, "loss": 5 / s} for s in range(1, len(kept) + 1)] and 0 < len(kept) < 40, kept
assert (run / "metrics.jsonl").read_bytes().endswith(b"\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))    # room again
out.write(41, loss=5 / 41)
out.close()
assert len(said) == 1, said
"""
    done = python(code, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout == "1 metrics wait in memory, as they cannot be written: File too large\n"
    assert metrics.read(tmp_path) == [{"step": step, "loss": 5 / step} for step in range(1, 42)]
    assert scalars(tmp_path, "loss") == {step: pytest.approx(5 / step) for step in range(1, 42)}


def test_records_lost_at_the_end_are_said(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    said: list[str] = []
    with Metrics(tmp_path, False, 3, said.append) as out:
        out.write(4, loss=1.0)
    assert len(said) == 3 and "could not be cut off" in said[0] and "wait in memory" in said[1] and "are lost" in said[2]


# The line on the screen.

odd = st.one_of(st.none(), st.floats(), st.integers(), st.just(10**400), st.just("?"))
fields = ("loss", "validation", "tokens_per_s", "mfu", "memory_bytes", "lr", "skipped")
reports = st.lists(st.tuples(st.integers(-5, 10**6), st.fixed_dictionaries(dict.fromkeys(fields, odd))), max_size=4)


def terminal(width: int = 80, encoding: str = "utf-8") -> Console:
    """A console that takes itself for a terminal, writing to memory."""
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), force_terminal=True, width=width, height=20, legacy_windows=False)


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
    told = [known for _, known in updates if any(known[name] is not None for name in fields[:-1]) or known["skipped"]]
    assert len(lines) == len(told) and all(line.startswith("step") for line in lines)
    assert "\x1b" not in out.getvalue()
    words = {"loss": "loss ", "validation": "val ", "tokens_per_s": "tok/s", "mfu": "MFU", "lr": "lr ", "skipped": "skipped"}
    for line, known in zip(lines, told, strict=True):
        for name, word in words.items():
            assert (word in line) == (bool(known[name]) if name == "skipped" else known[name] is not None)


def test_the_live_line_at_80_and_120_columns():
    now = iter(range(1000))
    progress = Progress(terminal(120), 500, plain=False, clock=lambda: next(now))
    assert shown(progress) == ["step 0/500  ────────────────────────────────────────  0%  first step, 0:01"]
    now = iter([100, *[102] * 50])
    progress.update(100, loss=2.5)
    progress.update(120, loss=2.43118, validation=2.551, tokens_per_s=12345, mfu=0.412, memory_bytes=9.13 * 2**30, lr=3e-4)
    words = "loss 2.4312  val 2.5510  12.3k tok/s  MFU 41.2%  9.1 GiB  lr 3.00e-04"
    assert shown(progress) == [f"step 120/500  {'━' * 5}{'─' * 14}  24%  {words}  0:38 left"]
    progress.console.width = 80
    assert shown(progress) == [f"step 120/500  {'━' * 10}{'─' * 30}  24%  0:38 left", words]
    progress.console.width = 40
    assert shown(progress) == [f"step 120/500  {'━' * 2}{'─' * 8}  24%  0:38 left", "loss 2.4312  val 2.5510  12.3k tok/s"]
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
        Progress(console, 10, plain=False).summary([*rows, ("results", "/a/very/long/path/to/the/results")], "what will run")
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
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")} | {"TERM": "xterm-256color"}
    child = subprocess.Popen([sys.executable, "-c", TRAINING, str(tmp_path / "end")], cwd=ROOT, stdout=theirs, stderr=theirs, env=environment)
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
    child = subprocess.Popen([sys.executable, "-c", TRAINING, str(tmp_path / "end")], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
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
    assert [duration(x) for x in (42, 3723, 100000, -1, math.inf, 59.7)] == ["0:42", "1:02:03", "1d 03h", "?", "?", "1:00"]


# The curve.

losses = st.one_of(st.floats(), st.floats(0, 10))
runs = st.lists(
    st.fixed_dictionaries({"step": st.integers(0, 10**6)}, optional={"loss": losses, "validation": losses, "note": st.text()}), max_size=30
)


@given(runs, st.integers(0, 130), st.integers(0, 30))
@few
def test_the_sketch_never_raises_and_fits(records, width, height):
    lines = curve.sketch(records, width, height).splitlines()
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= max(5, height)


def test_the_sketch_of_a_falling_loss():
    falling = [{"step": step, "loss": 4 - step / 25} for step in range(1, 51)] + [{"step": 50, "validation": 2.5}]
    assert curve.sketch(falling, 32, 8).splitlines() == [
        "3.96 ┤⠉⠒⠤⢄⡀",
        "     │    ⠈⠉⠒⠒⠤⣀⡀",
        "     │          ⠈⠑⠒⠤⣀⡀",
        "     │               ⠈⠑⠒⠤⠤⣀    ●",
        "2.02 ┤                     ⠉⠑⠢⠤⣀",
        "     └──────────────────────────",
        "      1          step         50",
        "      ⠒⠒ training   ● validation",
    ]
    assert curve.sketch([], 30, 8) == curve.sketch([{"step": 1, "loss": math.nan}], 30, 8) == "no loss was recorded"
    one = curve.sketch([{"step": 7, "loss": 3.0}], 30, 12)
    assert "3.00" in one and "step 7" in one


@given(st.lists(st.floats(-100, 100), max_size=200))
@few
def test_smoothing_stays_within_the_values_and_keeps_a_constant(line):
    smoothed = curve.smooth(list(enumerate(line)))
    assert [step for step, _ in smoothed] == list(range(len(line)))
    assert all(min(line) - 1e-9 <= value <= max(line) + 1e-9 for _, value in smoothed)
    assert curve.smooth([(step, 0.1) for step in range(len(line))]) == [(step, 0.1) for step in range(len(line))]


@given(st.lists(st.floats(0, 10), min_size=90, max_size=120), st.integers(2, 80), st.sampled_from([1e29, -1e29, 50.0]))
@few
def test_a_spike_leaves_no_trace_and_huge_values_do_not_eat_the_digits_of_others(line, at, huge):
    spiked = [*line[:at], huge, *line[at + 1 :]]
    assert all(-1e-9 <= value <= 10 + 1e-9 for _, value in curve.smooth(list(enumerate(spiked))))
    burst = [huge] * 5 + line  # no lone spike: it stays, and what follows is exact
    assert curve.smooth(list(enumerate(burst))) == direct(burst)


def direct(line: list[float]) -> list[tuple[int, float]]:
    """Smoothing by its definition: exact means over windows of medians."""
    values, half = [value for _, value in curve.calm(list(enumerate(line)))], len(line) // 30
    windows = [values[max(0, i - half) : i + min(i, half) + 1] for i in range(len(line))]
    return [(i, float(sum(int(v * 2**60) for v in window) / (len(window) * 2**60))) for i, window in enumerate(windows)]


def colours(path: Path) -> set[str]:
    """Which of our colours a picture has."""
    from matplotlib.image import imread

    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    named = {"training": curve.BLUE, "validation": curve.ORANGE, "not finite": curve.RED}
    return {name for name, code in named.items() if (pixels == [int(code[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).any()}


def test_the_picture_has_what_was_recorded(tmp_path):
    drawn = random.Random(0)
    training = [{"step": step, "loss": 1 + 3 / step + drawn.gauss(0, 0.1)} for step in range(1, 200)]
    held_out = [{"step": step, "validation": 1.2 + 3 / step} for step in range(20, 200, 20)]
    cases = {
        "nothing": ([], set()),
        "one": (training[:1], {"training"}),
        "all": (training + held_out + [{"step": 5, "loss": math.nan}], {"training", "validation", "not finite"}),
        "lost": ([{"step": 3, "loss": math.inf}], {"not finite"}),
        "validation": (held_out, {"validation"}),
    }
    for name, (records, expected) in cases.items():
        curve.draw(records, tmp_path / "new folder" / f"{name}.png")
        assert colours(tmp_path / "new folder" / f"{name}.png") == expected, name
    assert sorted(p.stem for p in (tmp_path / "new folder").iterdir()) == sorted(cases)


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path):
    code = """
import resource, sys; from pathlib import Path; from mycel.train import curve; from mycel.errors import TrainError
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))
try: curve.draw([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], Path(sys.argv[1]))
except TrainError as error: print(error)
"""
    path = tmp_path / "loss.png"
    path.write_bytes(b"the old one")
    done = python(code, str(path))
    assert done.stdout.startswith(f"the loss curve could not be written: File too large\n  at        {path}"), done.stderr
    assert path.read_bytes() == b"the old one" and list(tmp_path.iterdir()) == [path]


# The device.


def test_choosing_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.choose("auto") == device.choose("cpu") == torch.device("cpu")
    with pytest.raises(TrainError, match=r"(?s)'cuda' was asked for, but .*\n  at        train\.device\n  try       device: auto, or cpu"):
        device.choose("cuda")
    for name in ("gpu", "cuda:", "cuda:-1", "CUDA", "auto:1", ""):
        with pytest.raises(TrainError, match=re.escape(f"device {name!r} is not known")):
            device.choose(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.choose("auto") == device.choose("cuda") == torch.device("cuda", 0)
    assert device.choose("cuda:1") == torch.device("cuda", 1)
    assert device.choose("cpu") == torch.device("cpu")
    with pytest.raises(TrainError, match="'cuda:2' was asked for, but there is only cuda:0 to cuda:1"):
        device.choose("cuda:2")


@pytest.mark.parametrize(
    "name, precision, peak",
    [
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A100-PCIE-40GB", "bf16", 312e12),
        ("NVIDIA L40S", "fp16", 362e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla T4", "tf32", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4080 SUPER", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA RTX A1000", "bf16", None),
        ("NVIDIA H200", "int8", None),
        ("", "bf16", None),
    ],
)
def test_the_peak_of_a_device_by_its_name(name, precision, peak):
    assert device.peak_of(name, precision) == peak


def test_every_entry_finds_itself_and_faster_formats_are_faster():
    for name, (half, tf32, full) in device.PEAKS.items():
        assert device.peak_of(f"NVIDIA {name}-80GB", "fp16") == half * 1e12
        assert half > full and (tf32 == 0 or half >= tf32 >= full)
    assert device.peak_flops(torch.device("cpu"), "fp32") is None


def test_memory_of_the_cpu_is_that_of_the_process():
    cpu = torch.device("cpu")
    before = device.memory_used(cpu)
    held = mmap.mmap(-1, 64 * 2**20)  # not malloc's: it may hold freed memory, and give that out again
    held.write(bytes(64 * 2**20))
    during = device.memory_used(cpu)
    assert during - before > 48 * 2**20
    assert device.memory_peak(cpu) >= during - 2**20
    held.close()
    assert device.memory_peak(cpu) - device.memory_used(cpu) > 32 * 2**20
    assert re.fullmatch(r"cpu, .+, 1 thread", device.describe(cpu)) or torch.get_num_threads() > 1


@given(st.integers(0, 2**63 - 1))
@few
def test_a_seed_fixes_every_generator(seed):
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    device.seed_all(seed)
    first = draw()
    assert draw() != first
    device.seed_all(seed)
    assert draw() == first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu():
    gpu = device.choose("cuda")
    before = device.memory_used(gpu)
    held = torch.ones(2**20, device=gpu)
    assert device.memory_used(gpu) - before >= held.nbytes <= device.memory_peak(gpu)
    assert torch.cuda.get_device_name(gpu) in device.describe(gpu)
