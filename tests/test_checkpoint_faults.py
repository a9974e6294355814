"""Checkpoints: what is read back is what was saved, or an error; whatever happens to the process, the disk or the
files."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_child import METRICS, STEPS, state
from checkpoints import equal, forked, names, place
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.errors import CheckpointError
from mycel.run import checkpoint, shards
from mycel.run.checkpoint import RunFolder, Saver, best, latest, load, load_latest, save
from mycel.run.shards import Shard

# killed processes


@pytest.fixture(scope="module")
def child():
    with forked() as child:
        yield child


def check_survivor(path: Path, said: list[int]) -> None:
    """After a kill: the latest is complete, right, and no older than what was said to be saved; the next run tidies up
    and goes on."""
    step = said[-1] if said else 0
    if latest(path) is None:
        assert not said
    else:
        loaded, warnings = load_latest(path)
        assert warnings == [] and loaded.path == latest(path) and step <= loaded.step <= step + 1
        assert equal(loaded.tensors, state(loaded.step)) and loaded.meta == {"step": loaded.step}
        lowest = min((METRICS[(s - 1) % len(METRICS)], s) for s in range(1, loaded.step + 1))
        assert load(best(path)).step == lowest[1] or (loaded.step > step and lowest[1] <= step)
        step = loaded.step
    with Saver(path, keep=1) as saver:
        assert all(name.startswith("step-") for name in names(path))
        saver.save(step + 1, state(step + 1), {"step": step + 1}, -1.0)
    assert saver.poll() == [] and names(path) == [f"step-{step + 1:08d}"]


@pytest.mark.parametrize(("asynchronous", "stride"), [(True, 4), (False, 3)])
def test_kill_before_a_touch_of_the_disk(child, asynchronous, stride):
    """kill -9 at every few of all opens, fsyncs, mkdirs, renames, removes of a run, until one gets through."""
    moment, ended = 1, -signal.SIGKILL
    while ended:
        with place() as path:
            child.start("save", path, moment=moment, asynchronous=asynchronous)
            said, ended = child.end()
            assert ended in (0, -signal.SIGKILL) and said == STEPS[: len(said)]
            check_survivor(path, said)
        moment += stride
    assert said == STEPS and moment > 60


def test_kill_at_random_moments(child):
    for moment in range(20):
        with place() as path:
            pid = child.start("save", path, forever=True)
            time.sleep(random.Random(moment).uniform(0, 0.06))
            os.kill(pid, signal.SIGKILL)
            said, ended = child.end()
            assert ended == -signal.SIGKILL
            check_survivor(path, said)


def test_a_process_that_ends_completes_its_last_save(child, tmp_path):
    child.start("leave", tmp_path)
    assert child.end() == ([], 0)
    assert equal(load_latest(tmp_path)[0].tensors, state(1)) and names(tmp_path) == ["step-00000001"]


# full and broken disks


@pytest.fixture
def small_disk(tmp_path):
    """A real disk of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "tmpfs", path], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a disk is not allowed here")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("known", ["before", "while writing"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_training_goes_on_when_the_disk_is_full(small_disk, monkeypatch, known, asynchronous):
    if known == "while writing":
        monkeypatch.setattr(checkpoint, "free_bytes", lambda _: 1 << 40)
    w = torch.randn(1000, 50)  # 195.3 KiB
    with Saver(small_disk / "run", keep=2, asynchronous=asynchronous) as saver:
        saver.save(1, {"w": w}, {})
        saver.wait()
        good = w.clone()
        (small_disk / "other").write_bytes(bytes(700 << 10))
        write, wrote = Shard.write, []
        monkeypatch.setattr(Shard, "write", lambda *args: (wrote.append(1), write(*args)))
        for step in (2, 3):
            saver.save(step, {"w": w.add_(1)}, {})
            saver.wait()
            (report,) = saver.poll()
            first, at, hint = report.split("\n")
            assert first.startswith(f"step {step} is not saved: disk full: needs 195.4 KiB, 1") and first.endswith(
                f"KiB free on {small_disk}"
            )
            assert at == f"  at        {small_disk / 'run'}" and hint.startswith("  try       free some space")
            assert names(small_disk / "run") == ["step-00000001"] and torch.equal(
                load_latest(small_disk / "run")[0].tensors["w"], good
            )
        assert bool(wrote) == (known == "while writing")
        (small_disk / "other").unlink()
        saver.save(4, {"w": w}, {})
    assert saver.poll() == [] and torch.equal(load_latest(small_disk / "run")[0].tensors["w"], w)


def test_a_disk_without_inodes(small_disk):
    with Saver(small_disk / "run") as saver:
        while True:
            try:
                (small_disk / str(time.monotonic_ns())).touch()
            except OSError:
                break
        saver.save(1, state(1), {})
    assert "disk full" in (report := saver.poll()[0]) and "no inodes free" in report


def test_a_file_that_may_not_grow(tmp_path):
    """The same for any user: the system refuses a write in the middle of a shard."""
    save(tmp_path, 1, {"w": torch.ones(100)}, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with Saver(tmp_path) as saver:
            saver.save(2, {"w": torch.ones(100_000)}, {})
        with pytest.raises(CheckpointError, match="step 3 is not saved: the disk refused it: File too large"):
            save(tmp_path, 3, {"w": torch.ones(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "step 2 is not saved: the disk refused it: File too large" in saver.poll()[0]
    assert names(tmp_path) == ["step-00000001"]


@settings(max_examples=30, deadline=None)
@given(touch=st.integers(1, 12), code=st.sampled_from([errno.EIO, errno.EDQUOT, errno.EROFS, errno.ENOSPC]))
def test_a_save_that_fails_anywhere_changes_nothing(touch, code):
    """The n-th fsync or rename fails: the save is complete, or it is reported and the earlier ones are as they were."""
    with place() as path, Saver(path, keep=1, shard_bytes=4000) as saver, pytest.MonkeyPatch.context() as patch:
        saver.save(1, state(1), {"step": 1})
        saver.wait()
        left = [touch]
        guard = threading.Lock()

        def failing(real):
            def call(*args):
                with guard:
                    left[0] -= 1
                if left[0] == 0:
                    raise OSError(code, os.strerror(code))
                return real(*args)

            return call

        for function in ("fsync", "rename"):
            patch.setattr(os, function, failing(getattr(os, function)))
        saver.save(2, state(2), {"step": 2})
        saver.wait()
        reports = saver.poll()
        assert bool(reports) == (left[0] <= 0)
        loaded, warnings = load_latest(path)
        assert warnings == [] and equal(loaded.tensors, state(loaded.step))
        assert loaded.step == 2 or "step 2 is not saved" in reports[0]
        assert all(name.startswith("step-") for name in names(path))
        left[0] = 1 << 30
        saver.save(3, state(3), {"step": 3})
        saver.wait()
        assert load_latest(path)[0].step == 3


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    for make in (Saver, lambda path: save(path, 0, {}, {}), RunFolder):
        with pytest.raises(CheckpointError, match=r"cannot make the .*folder.*\n  at .*\n  try"):
            make(tmp_path / "file" / "run")


# damaged files


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two checkpoints, and the bytes of the files of the newer."""
    path = tmp_path_factory.mktemp("two")
    save(path, 200, state(200), {}, shard_bytes=4000)
    newer = save(path, 400, state(400), {"position": 3}, shard_bytes=4000)
    return path, {file: file.read_bytes() for file in sorted(newer.iterdir())}


def check_refused(path: Path, file: Path) -> None:
    """The damaged file is named, the checkpoint before it is used."""
    for read in (load, partial(load, only=lambda name: False)):
        with pytest.raises(CheckpointError, match=rf"step-00000400 is damaged \({file.name}.*\)\n  at .*\n  try "):
            read(path / "step-00000400")
    loaded, (warning,) = load_latest(path)
    assert loaded.step == 200 and equal(loaded.tensors, state(200))
    assert warning.startswith(f"step-00000400 is damaged ({file.name}") and warning.endswith("; using step-00000200")


@settings(max_examples=80, deadline=None)
@given(data=st.data(), bit=st.integers(0, 7))
def test_every_flipped_bit_is_noticed(two, data, bit):
    path, files = two
    file = data.draw(st.sampled_from(sorted(files)))
    whole = bytearray(files[file])
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << bit
    file.write_bytes(whole)
    try:
        check_refused(path, file)
    finally:
        file.write_bytes(files[file])
    assert load_latest(path)[0].step == 400


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_truncated_longer_or_missing_file_is_noticed(two, data):
    path, files = two
    file = data.draw(st.sampled_from(sorted(files)))
    size = data.draw(st.one_of(st.none(), st.integers(0, len(files[file]) - 1), st.just(len(files[file]) + 1)))
    if size is None:
        file.unlink()
    else:
        file.write_bytes(files[file][:size].ljust(size, b"\n"))
    try:
        check_refused(path, file)
        assert latest(path) == path / "step-00000200"
    finally:
        file.write_bytes(files[file])


def test_nothing_left_is_an_error(two, tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint\n"):
        load_latest(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="there is no checkpoint step-00000300"):
        load(two[0] / "step-00000300")
    shutil.copytree(two[0], tmp_path / "copy")
    for file in (tmp_path / "copy").glob("step-*/shard-00000-00001*"):
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint is undamaged\n  tried     step-00000400.*\n  tried     step-00000200"
    ):
        load_latest(tmp_path / "copy")
    assert latest(tmp_path / "copy") is None


def change_format(x):
    x["format"] = "mycel-checkpoint-1"


def reach_out(x):
    x["files"] = {f"../step-00000400/{name}": file for name, file in x["files"].items()}
    for entry in x["tensors"].values():
        for piece in entry.get("pieces", []):
            piece["file"] = f"../step-00000400/{piece['file']}"


def go_past_the_end(x):
    x["tensors"]["count"]["pieces"][0]["begin"] = 1 << 40


def go_before_the_start(x):
    x["tensors"]["count"]["pieces"][0]["begin"] = -8


def grow(x):
    x["tensors"]["w"]["shape"] = [1 << 40, 40]


def untie(x):
    x["tensors"]["tied"] = {"same": "tied"}


def overlap(x):
    x["tensors"]["half"]["pieces"] = [
        {**x["tensors"]["count"]["pieces"][0], "offset": [0, 0], "shape": [1, 3]},
        *x["tensors"]["half"]["pieces"],
    ]


def share_bytes(x):
    x["tensors"]["count"]["pieces"][0]["begin"] = x["tensors"]["half"]["pieces"][0]["begin"]


def leave_out(x):
    del x["tensors"]["count"]


LIES = [change_format, reach_out, go_past_the_end, go_before_the_start, grow, untie, overlap, share_bytes, leave_out]


@pytest.mark.parametrize("change", LIES)
def test_a_manifest_that_lies_is_refused(two, tmp_path, change):
    """Written on purpose, with a right checksum: it reads no other file, and allocates no more than there is."""
    path = tmp_path / "step-00000400"
    shutil.copytree(two[0] / "step-00000400", path)
    x = json.loads((path / "manifest.json").read_text())
    del x["sha256"]
    change(x)
    body = (json.dumps(x)[:-1] + ",\n").encode()
    (path / "manifest.json").write_bytes(body + shards._last_line(body))
    with pytest.raises(CheckpointError, match="step-00000400 is damaged"):
        load(path)
