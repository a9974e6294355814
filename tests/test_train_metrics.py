"""What the trainer records: metrics on disk, whole whatever happens, and the curve drawn from them."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.train import curve, metrics
from mycel.train.metrics import Metrics

ROOT = Path(__file__).parent.parent
few = settings(max_examples=60, deadline=None)


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=ROOT, text=True, capture_output=True, timeout=120, check=False
    )


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
    assert (
        len(said) == 3 and "could not be cut off" in said[0] and "wait in memory" in said[1] and "are lost" in said[2]
    )


# The curve.

losses = st.one_of(st.floats(), st.floats(0, 10))
runs = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 10**6)}, optional={"loss": losses, "validation": losses, "note": st.text()}
    ),
    max_size=30,
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
    return {
        name for name, code in named.items() if (pixels == [int(code[i : i + 2], 16) for i in (1, 3, 5)]).all(-1).any()
    }


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
    assert done.stdout.startswith(f"the loss curve could not be written: File too large\n  at        {path}"), (
        done.stderr
    )
    assert path.read_bytes() == b"the old one" and list(tmp_path.iterdir()) == [path]
