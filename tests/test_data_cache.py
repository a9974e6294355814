"""Tokens are made once: never stale, never half, whatever dies, fills up or is damaged in between."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mycel.errors import TrainError
from mycel.train import cache as caches
from mycel.train import sources
from mycel.train.data import prepare
from mycel.train.tokenize import Bytes

FORK = multiprocessing.get_context("fork")
TEXT = "".join(f"line {i} of the data\n" for i in range(400))


@dataclass(frozen=True)
class Watched(Bytes):
    """Bytes, and a word each time they are asked for."""

    on_batch: object = lambda: None

    def encode_batch(self, texts):
        self.on_batch()
        return super().encode_batch(texts)


@pytest.fixture
def place(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT[::-1])
    return tmp_path


def run(place, on_batch=lambda: None, cache="cache", **options):
    return prepare(
        sorted(place.glob("*.txt")),
        **{"tokenizer": Watched(on_batch=on_batch), "length": 16, "cache": place / cache, **options},
    )


def content(data):
    return [s.batch(np.arange(len(s)))["input_ids"].tolist() for s in (data.train, data.validation)]


def left_behind(place, cache="cache"):
    return [p.name for p in (place / cache).glob(".*")]


def complete(place):
    return [p for p in (place / "cache").glob("[!.]*") if p.name not in ("locks", "contents")]


# Once, and never stale.


def test_the_second_time_nothing_is_tokenised(place):
    asked = []
    first = run(place, lambda: asked.append(1))
    again = run(place, lambda: asked.append(2))
    other = run(place, lambda: asked.append(3), length=24, split=0.3, seed=4, pack=True)
    assert set(asked) == {1} and content(first) == content(again) and len(other.train) > 0


@pytest.mark.parametrize("large", [False, True])
def test_changed_data_is_never_served_stale(place, monkeypatch, large):
    """Also with the size and the time of writing as they were, and hashes remembered."""
    if large:
        monkeypatch.setattr(sources, "REMEMBER_BYTES", 0)
        monkeypatch.setattr(sources, "REST_S", -1.0)
    first, path = run(place), place / "a.txt"
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        path.write_text(TEXT.replace("line 7 ", "LINE 7 "))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = run(place)
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    assert second.fingerprint != first.fingerprint and content(second) != content(first)


def test_hashes_of_large_files_are_remembered_once_the_files_rest(place, monkeypatch):
    monkeypatch.setattr(sources, "REMEMBER_BYTES", 0)
    hashed = []
    digest = hashlib.file_digest
    monkeypatch.setattr(
        sources.hashlib, "file_digest", lambda file, kind: hashed.append(file.name) or digest(file, kind)
    )

    def count():
        hashed.clear()
        run(place)
        return sum(name.endswith(".txt") for name in hashed)

    assert [count(), count()] == [2, 2]  # just written: not believed yet
    monkeypatch.setattr(sources, "REST_S", -1.0)
    assert [count(), count()] == [2, 0]
    for note in (place / "cache/contents").iterdir():
        note.write_text("damaged")
    assert [count(), count()] == [2, 0]


def test_other_tokenizers_and_fields_have_their_own_tokens(place):
    write = place / "x.jsonl"
    write.write_text('{"text": "one text of it", "other": "and another one"}\n' * 9)
    options = {"length": 8, "cache": place / "cache"}
    datasets = [
        prepare(write, tokenizer=Bytes(), **options),
        prepare(write, tokenizer=Bytes(), fields={"text": "other"}, **options),
        prepare(write, tokenizer=Bytes(fingerprint="another"), **options),
        prepare(write, tokenizer=Bytes(), format="text", **options),
    ]
    assert len({d.fingerprint for d in datasets}) == len(complete(place)) == 4


def test_a_file_that_changes_while_it_is_read_is_refused(place):
    def append():
        with (place / "b.txt").open("a") as file:
            file.write("more")

    with pytest.raises(TrainError, match=r"was changed while it was read\n  at .*b.txt"):
        run(place, append)
    assert not complete(place) and not left_behind(place)
    assert len(run(place).train) > 0


# Damage.


def damages():
    """Ways to damage a file of the entry."""
    yield "gone", lambda p: p.unlink()
    yield "empty", lambda p: p.write_bytes(b"")
    yield "cut", lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2])
    yield "longer", lambda p: p.write_bytes(p.read_bytes() + b"\0" * 8)
    yield "flipped", lambda p: p.write_bytes(flipped(p.read_bytes()))


def flipped(data):
    at = random.Random(0).randrange(len(data) or 1)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else b"\1"


@pytest.mark.parametrize("how", dict(damages()))
def test_a_damaged_cache_is_noticed_and_made_again(place, how):
    good = content(run(place))
    (entry,) = complete(place)
    for name in sorted(p.name for p in entry.iterdir()):
        before = (entry / name).read_bytes()
        dict(damages())[how](entry / name)
        if (entry / name).exists() and (entry / name).read_bytes() == before:
            continue  # an empty file made empty
        asked = []
        again = run(place, lambda: asked.append(1))
        assert asked and content(again) == good, name
        assert any("damaged" in line and name in line for line in again.report), again.report
        assert not left_behind(place) and not any("damaged" in line for line in run(place).report)


def test_large_entries_are_checked_by_size_alone(place, monkeypatch):
    monkeypatch.setattr(caches, "VERIFY_BYTES", 0)
    run(place)
    (entry,) = complete(place)
    (entry / "tokens.bin").write_bytes((entry / "tokens.bin").read_bytes()[:-2])
    assert any("tokens.bin has" in line for line in run(place).report)


# Processes that die.


def in_child(work) -> int:
    """Do `work` in a process of its own; how it ended, as waitpid says."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(7)
    return os.waitpid(pid, 0)[1]


def die_at(moment: int, folder: Path):
    """Kill -9 this process at its n-th touch of something in the folder."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event.split(".")[0] in ("open", "os", "shutil", "tempfile", "fcntl") and any(
            str(folder) in str(a) for a in args
        ):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_killed_at_any_moment_the_next_run_is_whole(place):
    good, moment, killed, tokenised = content(run(place, cache="other")), 0, 0, 0
    while True:
        moment += 1
        status = in_child(lambda: (die_at(moment, place / "cache"), run(place)))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        killed += 1
        whole = complete(place)
        asked = []
        assert content(run(place, lambda: asked.append(1))) == good
        assert bool(asked) != bool(whole), "complete is what has its name, and nothing else"
        tokenised += bool(asked)
        assert not left_behind(place)
        shutil.rmtree(place / "cache")
    assert killed >= 15 and tokenised >= 10


def test_killed_in_the_middle_of_tokenising(place):
    """A process of its own, from outside."""
    code = """
import sys, time
from pathlib import Path
from mycel.train.data import prepare
from mycel.train.tokenize import Bytes
class Slow(Bytes):
    def encode_batch(self, texts):
        print("middle", flush=True)
        time.sleep(600)
prepare([sys.argv[1] + "/a.txt", sys.argv[1] + "/b.txt"], tokenizer=Slow(), length=16, cache=Path(sys.argv[1], "cache"))
"""
    child = subprocess.Popen([sys.executable, "-c", code, place], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "middle\n"
    assert len(left_behind(place)) == 1 and not complete(place)
    other = prepare(place / "a.txt", tokenizer=Bytes(), length=16, cache=place / "cache")
    assert len(left_behind(place)) == 1 and len(other.train) > 0, "what a living process makes is left alone"
    child.kill()
    child.communicate()
    run(place)
    assert not left_behind(place) and len(complete(place)) == 2


def test_leftovers_of_other_data_are_removed_too(place):
    def killed():
        run(place, lambda: os.kill(os.getpid(), signal.SIGKILL))

    assert os.WTERMSIG(in_child(killed)) == signal.SIGKILL and len(left_behind(place)) == 1
    prepare(place / "a.txt", tokenizer=Bytes(), length=16, cache=place / "cache")
    assert not left_behind(place)


# Several at once.


def together(work, count=4) -> list[int]:
    """How `count` processes that do `work()` end."""
    children = [FORK.Process(target=work) for _ in range(count)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    return [child.exitcode for child in children]


def test_one_process_works_while_the_others_wait(place):
    good = content(run(place, cache="other"))
    waiting, worked = FORK.Semaphore(0), FORK.Semaphore(0)

    def tokenise():
        worked.release()
        assert all(waiting.acquire(timeout=60) for _ in range(3)), "all others have come to the lock"

    def work():
        dataset = run(
            place, tokenise, progress=lambda what, *_: waiting.release() if what.startswith("another process") else None
        )
        assert content(dataset) == good

    assert together(work) == [0, 0, 0, 0]
    assert worked.acquire(block=False) and not worked.acquire(block=False)
    assert not left_behind(place) and len(complete(place)) == 1


def test_without_locks_all_work_and_one_rename_wins(place, monkeypatch):
    good = content(run(place, cache="other"))
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "no locks available")))
    meet = FORK.Barrier(4)

    def work():
        assert content(run(place, lambda: meet.wait(60))) == good

    assert together(work) == [0, 0, 0, 0]
    assert not left_behind(place) and len(complete(place)) == 1
    old = place / "cache" / ".tmp-0123-old"
    old.mkdir()
    young = place / "cache" / ".tmp-4567-young"
    young.mkdir()
    os.utime(old, (0, 0))
    prepare(place / "a.txt", tokenizer=Bytes(), length=16, cache=place / "cache")
    assert left_behind(place) == [young.name]


# A cache that cannot be written.


def test_a_full_disk_is_told_and_leaves_nothing(place):
    """A real one where this process may mount it."""
    small = place / "small"
    small.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], capture_output=True, check=False
        ).returncode
        == 0
    )
    if not mounted:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        with pytest.raises(
            TrainError,
            match=r"tokens cannot be cached: the disk is full \(0.0 MiB free\)\n  at .*small\n  try       data.cache",
        ):
            run(place, cache="small")
        assert not left_behind(place, "small")
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_write_that_fails_is_told_and_leaves_nothing(place):
    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(TrainError, match="tokens cannot be cached: the disk is full"):
            run(place)

    assert together(work, 1) == [0] and not left_behind(place) and not complete(place)
    assert len(run(place).train) > 0


def test_a_cache_that_is_no_folder_is_told(place):
    with pytest.raises(
        TrainError, match=r"tokens cannot be cached: Not a directory\n  at .*a.txt/cache\n  try       data.cache"
    ):
        run(place, cache="a.txt/cache")


def test_an_interrupt_leaves_nothing(place):
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(place, interrupt)
    assert not left_behind(place) and not complete(place)
