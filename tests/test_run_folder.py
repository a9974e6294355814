"""Run folders: one run at a time, a fresh one into an empty folder, what others have there left as it is."""

from __future__ import annotations

import errno
import os
import signal
import socket

import pytest
from checkpoint_child import state
from checkpoints import forked, names

from mycel.errors import CheckpointError
from mycel.run import folder
from mycel.run.checkpoint import RunFolder, Saver, latest, save


@pytest.fixture(scope="module")
def child():
    with forked() as child:
        yield child


def test_two_runs_in_one_folder(child, tmp_path):
    """Refused while the other lives, with its name; taken over when it was killed, though its worker lives on."""
    pid = child.start("hold", tmp_path / "run")
    worker = child.hear()["worker"]
    try:
        for resume in (False, True):
            (tmp_path / "run" / "config.yaml").touch()
            with pytest.raises(
                CheckpointError, match=f"in use by process {pid} on host {socket.gethostname()}\n.*\n  try"
            ):
                RunFolder(tmp_path / "run", resume=resume)
        os.kill(pid, signal.SIGKILL)
        assert child.end() == ([], -signal.SIGKILL)
        os.kill(worker, 0)
        RunFolder(tmp_path / "run", resume=True).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_two_in_one_process_and_after_release(tmp_path):
    for make in (lambda: RunFolder(tmp_path / "run"), lambda: Saver(tmp_path / "checkpoints")):
        with make(), pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"):
            make()
        with make() as again:
            pass
        again.close()
    with Saver(tmp_path / "checkpoints"), pytest.raises(CheckpointError, match="in use"):
        save(tmp_path / "checkpoints", 1, {}, {})


def test_a_fresh_run_needs_a_fresh_folder(tmp_path):
    path = tmp_path / "runs" / "one"
    with RunFolder(path) as run:
        (path / "metrics.jsonl").touch()
    with pytest.raises(
        CheckpointError,
        match=r"already holds a run \(metrics.jsonl\)\n  at .*\n  try       another folder: this has no checkpoint",
    ):
        RunFolder(path)
    save(run.checkpoints, 1, state(1), {})
    with pytest.raises(
        CheckpointError, match=rf"\(checkpoints, metrics.jsonl\)\n  at .*\n  try       --resume {path} to go on"
    ):
        RunFolder(path)
    with RunFolder(path, resume=True) as run:
        assert latest(run.checkpoints) is not None
    with pytest.raises(CheckpointError, match="no run to resume"):
        RunFolder(tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_of_other_things_is_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="already holds"):
        RunFolder(tmp_path)
    assert names(tmp_path) == ["thesis.tex"] and not (tmp_path / ".lock").exists()


def test_a_filesystem_without_locks(tmp_path, monkeypatch):
    """Runs are not refused there; what others may be writing is left alone."""
    (tmp_path / "checkpoints" / ".tmp-step-00000001-1").mkdir(parents=True)
    monkeypatch.setattr(folder.fcntl, "flock", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no flock")))
    with Saver(tmp_path / "checkpoints") as saver:
        saver.save(1, state(1), {})
    assert names(tmp_path / "checkpoints") == [".tmp-step-00000001-1", "step-00000001"]


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (int(1.2 * 2**30), "1.2 GiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_sizes_in_words(n, text):
    assert folder.size(n) == text
