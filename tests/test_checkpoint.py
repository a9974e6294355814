"""Checkpoints: what is read back is what was saved, bit for bit, or an error; whatever happens to the process, the disk or the files."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_child import METRICS, STEPS, state
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.errors import CheckpointError
from mycel.run import checkpoint, folder, shards
from mycel.run.checkpoint import RunFolder, Saver, best, latest, load, load_latest, save, verify
from mycel.run.shards import DTYPES, Entry, Manifest, Shard

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def bits(x: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return x.dtype, x.shape, bytes(shards.as_bytes(x.detach().cpu().resolve_conj().contiguous()))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(bits(a[k]) == bits(b[k]) for k in a)


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name != ".lock")


@contextmanager
def place():
    """A folder for one example of a law, in memory if possible: hundreds of saves that each wait for a disk are slow."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as path:
        yield Path(path)


# what is saved is what is read

LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1) if x.dim() else x,
    "every other": lambda x: x[::2] if x.dim() else x,
    "expanded": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "leaf": lambda x: x.requires_grad_() if x.is_floating_point() and x.itemsize > 1 else x,
    "conjugate": lambda x: x.conj() if x.is_complex() else x,
}


@st.composite
def tensor(draw):
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    n = torch.Size(shape).numel() * dtype.itemsize
    data = torch.frombuffer(bytearray(draw(st.binary(min_size=n, max_size=n)) or b"0"), dtype=torch.uint8)[:n]
    data = (data % 2) if dtype is torch.bool else data
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](data.clone().view(dtype).reshape(shape))


STATES = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), tensor(), max_size=5)


@settings(max_examples=50, deadline=None)
@given(tensors=STATES, shard_bytes=st.sampled_from([1, 30, 10_000]), asynchronous=st.booleans(), tie=st.booleans())
def test_round_trip_is_bitwise(tensors, shard_bytes, asynchronous, tie):
    if tie and tensors:
        tensors["tied to the first"] = next(iter(tensors.values()))
    meta = {"data": [1, 2.5, None], "name": "é"}
    with place() as path:
        with Saver(path, asynchronous=asynchronous, shard_bytes=shard_bytes) as saver:
            saver.save(7, tensors, meta)
        assert saver.poll() == [] and saver.last == latest(path) == path / "step-00000007"
        verify(saver.last)
        loaded = load(saver.last)
        assert (loaded.step, loaded.meta) == (7, meta) and equal(loaded.tensors, tensors)
        chosen = set(list(tensors)[1::2])
        assert equal(load(saver.last, only=lambda name: name in chosen).tensors, {k: v for k, v in tensors.items() if k in chosen})


def test_shards_are_what_others_read(tmp_path):
    path = save(tmp_path, 3, state(3), {})
    (shard,) = path.glob("*.safetensors")
    theirs = safetensors.torch.load_file(shard)
    assert equal(dict(sorted(theirs.items())), {k: v for k, v in sorted(state(3).items()) if k != "tied"})
    assert json.loads((path / "manifest.json").read_text())["tensors"]["tied"] == {"same": "w"}
    assert not any(names(path) for path in tmp_path.glob(".*") if path.is_dir())


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path):
    w = torch.randn(100)
    loaded = load(save(tmp_path, 0, {"a": w, "b": w, "c": w.clone(), "d": w[:50], "e": torch.nn.Parameter(w)}, {}))
    a, b, c, _, e = loaded.tensors.values()
    assert a is b and a is e and a is not c
    z = torch.tensor([1 + 2j])
    assert equal(
        load(save(tmp_path, 1, {"z": z, "conjugate": z.conj(), "view": z.real}, {})).tensors, {"z": z, "conjugate": z.conj(), "view": z.real}
    )
    stored = sum(p.stat().st_size for p in loaded.path.glob("*.safetensors"))
    assert 2 * w.nbytes + w.nbytes // 2 <= stored < 3 * w.nbytes + w.nbytes // 2


@given(limit=st.integers(1, 200), shapes=st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=6))
def test_shards_keep_to_their_size_and_items_are_aligned(limit, shapes):
    dtypes = [torch.int8, torch.float64, torch.int16]
    packed = shards.pack({str(i): torch.empty(shape, dtype=dtypes[i % 3]) for i, shape in enumerate(shapes)}, limit)
    for shard in packed:
        data = shard.bytes - len(shard.header)
        assert data <= limit or len(shard.parts) == 1 and (shard.parts[0][2].dim() == 0 or shard.parts[0][2].shape[0] == 1)
        assert len({name for name, _, _ in shard.parts}) == len(shard.parts)
        assert all(piece.begin % part[2].itemsize == 0 for (_, piece), part in zip(shard.pieces(), shard.parts, strict=True))
    for one, other in pairwise(packed):
        assert one.bytes - len(one.header) + other.bytes - len(other.header) > limit  # none is needlessly small


def test_pieces_of_several_ranks_become_one_tensor(tmp_path):
    """Each rank's shard holds a box of the tensor; the boxes fill it."""
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    boxes = {(0, 0): whole[:, :2], (0, 2): whole[:1, 2:], (1, 2): whole[1:, 2:]}
    files = [Shard(f"shard-{i:05d}.safetensors", [("w", offset, box.contiguous())]) for i, (offset, box) in enumerate(boxes.items())]
    for file in files:
        file.write(tmp_path)
    entry = Entry(whole.dtype, (4, 6), tuple(piece for file in files for _, piece in file.pieces()))
    manifest = Manifest(5, None, {}, {file.file: (file.bytes, file.sha256()) for file in files}, {"w": entry})
    (tmp_path / "manifest.json").write_bytes(shards.to_bytes(manifest))
    assert torch.equal(load(tmp_path).tensors["w"], whole)
    (tmp_path / "manifest.json").write_bytes(shards.to_bytes(replace(manifest, tensors={"w": replace(entry, pieces=entry.pieces[1:])})))
    with pytest.raises(CheckpointError, match="w has a hole"):
        load(tmp_path)


@pytest.mark.parametrize("bad", [torch.zeros(2, dtype=torch.complex128), torch.zeros(2).to_sparse(), torch.empty(2, device="meta")])
def test_tensors_that_cannot_be_saved_are_named(tmp_path, bad):
    with pytest.raises(CheckpointError, match=r"cannot save 'bad'.*\n  try"):
        Saver(tmp_path).save(0, {"bad": bad}, {})


def test_meta_that_is_no_json_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written as JSON"):
        save(tmp_path, 0, {}, {"a": torch.ones(2)})


# asynchronous saves


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_an_asynchronous_save_is_the_state_at_the_call(tmp_path, monkeypatch, device):
    """The disk waits until everything has changed; what it gets is the state before."""
    changed = threading.Event()
    write = Shard.write
    monkeypatch.setattr(Shard, "write", lambda *args: (changed.wait(), write(*args))[1])
    w = torch.randn(300, 300, device=device)
    tensors, meta = {"w": w, "t": w.t(), "step": torch.tensor(0), "tied": w}, {"position": [0]}
    with Saver(tmp_path, keep=4) as saver:
        for step in range(4):
            changed.clear()
            before = {k: v.clone() for k, v in tensors.items()}
            saver.save(step, tensors, meta)
            for _ in range(5):
                w.mul_(1.5).add_(1)
            tensors["step"] += 1
            meta["position"][0] += 1
            assert not (tmp_path / f"step-{step:08d}").exists()
            changed.set()
            saver.wait()
            loaded = load(tmp_path / f"step-{step:08d}", device=device)
            assert equal(loaded.tensors, before) and loaded.meta == {"position": [step]}
            assert loaded.tensors["w"].device.type == device
    assert saver.poll() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_copy_waits_for_work_under_way_and_later_work_for_the_copy(tmp_path):
    x, y = torch.ones(1 << 26, device="cuda"), torch.randn(4096, 4096, device="cuda")
    with Saver(tmp_path) as saver:
        for step in range(3):
            for _ in range(20):
                y = (y @ y).clamp(-1, 1)
            x.fill_(step)
            before = y.clone()
            saver.save(step, {"x": x, "y": y, "few": x[:3]}, {})
            x.fill_(-1)
            y = torch.rand_like(y.zero_())
            saver.wait()
            loaded = load(saver.last)
            assert (loaded.tensors["x"] == step).all() and torch.equal(loaded.tensors["y"], before.cpu())


def test_one_save_is_under_way_at_most(tmp_path, monkeypatch):
    at_once, most = [], []
    write = Shard.write

    def counted(*args):
        at_once.append(1)
        most.append(len(at_once))
        write(*args)
        at_once.pop()

    monkeypatch.setattr(Shard, "write", counted)
    with Saver(tmp_path, keep=9) as saver:
        for step in range(6):
            saver.save(step, {"w": torch.full((1000,), step)}, {})
    assert max(most) == 1 and [int(load(p).tensors["w"][0]) for p in sorted(tmp_path.glob("step-*"))] == list(range(6))


def test_no_memory_for_the_copy_is_reported(tmp_path, monkeypatch):
    with Saver(tmp_path) as saver:
        monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("can't allocate memory")))
        saver.save(1, state(1), {})
    assert "step 1 is not saved" in saver.poll()[0] and names(tmp_path) == []


# which are kept

METRIC = st.one_of(st.none(), st.floats(-2, 2), st.sampled_from([float("nan"), float("inf"), 0.0]))


def lowest(saved: dict[int, float | None]) -> int | None:
    """The step with the lowest finite metric, the earliest of equals."""
    return min(((m, s) for s, m in saved.items() if m is not None and m - m == 0), default=(0, None))[1]


def kept(saved: dict[int, float | None], keep: int) -> list[int]:
    return sorted({*sorted(saved)[-keep:], lowest(saved)} - {None})


@settings(max_examples=25, deadline=None)
@given(metrics=st.lists(METRIC, min_size=1, max_size=8), keep=st.integers(1, 3), crash=st.sets(st.integers(0, 7)), data=st.data())
def test_the_last_n_and_the_best_are_kept(metrics, keep, crash, data):
    """Also when the process ends between completing a save and deleting older ones: nothing needed is gone, and the next save tidies up."""

    class Crash(BaseException):
        pass

    saved: dict[int, float | None] = {}
    with place() as path:
        saver = Saver(path, keep, asynchronous=False)
        for step, metric in enumerate(metrics):
            moment = data.draw(st.integers(1, 4)) if step in crash else None
            with pytest.MonkeyPatch.context() as patch:
                calls = []

                def rename(a, b, real=os.rename, moment=moment, calls=calls):
                    calls.append(a)
                    if len(calls) == moment:
                        raise Crash
                    real(a, b)

                patch.setattr(os, "rename", rename)
                try:
                    saver.save(step, {"w": torch.tensor(step)}, {}, metric)
                    crashed = False
                except Crash:
                    crashed = True
            if moment != 1 or not crashed:
                saved[step] = metric
            found = sorted(int(p.name[5:]) for p in path.glob("step-*"))
            assert set(found) >= set(kept(saved, keep)) if crashed else found == kept(saved, keep)
            if crashed:
                saver.lock.release()
                saver = Saver(path, keep, asynchronous=False)
                saved = {s: saved[s] for s in found}
            assert all(name.startswith("step-") for name in names(path))
            assert best(path) == (None if lowest(saved) is None else path / f"step-{lowest(saved):08d}")
            for s in found:
                assert load(path / f"step-{s:08d}").tensors["w"] == s
        saver.close()


def test_a_step_saved_again_replaces_the_first(tmp_path):
    with Saver(tmp_path, keep=1) as saver:
        for value in (1, 2):
            saver.save(5, {"w": torch.tensor(value)}, {"value": value})
    assert names(tmp_path) == ["step-00000005"] and load_latest(tmp_path)[0].tensors["w"] == 2


def test_a_step_that_was_being_replaced_is_found_and_gets_its_name_back(tmp_path):
    """The process ended after the old one was moved away, before the new one took its name; or just after."""
    for later in (False, True):
        save(tmp_path, 5, state(5), {}).rename(tmp_path / ".old-step-00000005")
        if later:
            os.rename(save(tmp_path / "other", 5, state(6), {}), tmp_path / "step-00000005")
            shutil.rmtree(tmp_path / "other")
        assert equal(load_latest(tmp_path)[0].tensors, state(5 + later))
        Saver(tmp_path).close()
        assert names(tmp_path) == ["step-00000005"] and equal(load_latest(tmp_path)[0].tensors, state(5 + later))


def test_a_run_that_went_back_sets_aside_what_is_later(tmp_path):
    """Else the next resume would jump to a state that is not this run's past."""
    for step in (2, 4):
        save(tmp_path, step, state(step), {})
    with Saver(tmp_path, keep=1) as saver:
        saver.save(3, state(3), {})
    assert names(tmp_path) == ["abandoned-step-00000004", "step-00000003"]
    (report,) = saver.poll()
    assert report.startswith("step-00000004 is later than step 3")
    assert equal(load(tmp_path / "abandoned-step-00000004").tensors, state(4)) and load_latest(tmp_path)[0].step == 3


# killed processes


class Child:
    """The process of checkpoint_child.py."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        env = {**os.environ, "PYTHONPATH": str(here.parent)}
        self.process = subprocess.Popen([sys.executable, here / "checkpoint_child.py"], stdin=-1, stdout=-1, env=env)

    def start(self, do: str, path: Path, **job: object) -> int:
        self.process.stdin.write((json.dumps({"do": do, "folder": str(path), **job}) + "\n").encode())
        self.process.stdin.flush()
        return self.hear()["pid"]

    def hear(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def end(self) -> tuple[list[int], int]:
        """Steps the child said were saved, and how it ended."""
        saved = []
        while "ended" not in (said := self.hear()):
            saved.append(said["saved"])
        return saved, said["ended"]


@pytest.fixture(scope="module")
def child():
    child = Child()
    yield child
    child.process.stdin.close()
    assert child.process.wait(60) == 0


def check_survivor(path: Path, said: list[int]) -> None:
    """After a kill: the latest is complete, right, and no older than what was said to be saved; the next run tidies up and goes on."""
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
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "tmpfs", path], capture_output=True, check=False).returncode:
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
            assert first.startswith(f"step {step} is not saved: disk full: needs 195.4 KiB, 1") and first.endswith(f"KiB free on {small_disk}")
            assert at == f"  at        {small_disk / 'run'}" and hint.startswith("  try       free some space")
            assert names(small_disk / "run") == ["step-00000001"] and torch.equal(load_latest(small_disk / "run")[0].tensors["w"], good)
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
    for read in (load, verify):
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
    for file in (tmp_path / "copy").glob("step-*/shard-00001*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint is undamaged\n  tried     step-00000400.*\n  tried     step-00000200"):
        load_latest(tmp_path / "copy")
    assert latest(tmp_path / "copy") is None


def change_format(x):
    x["format"] = "mycel-checkpoint-2"


def reach_out(x):
    x["shards"] = {f"../step-00000400/{file}": shard for file, shard in x["shards"].items()}
    for entry in x["tensors"].values():
        for piece in entry.get("pieces", []):
            piece["shard"] = f"../step-00000400/{piece['shard']}"


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
        {**x["tensors"]["count"]["pieces"][0], "part": {"offset": [0, 0], "shape": [1, 3]}},
        *x["tensors"]["half"]["pieces"],
    ]


@pytest.mark.parametrize("change", [change_format, reach_out, go_past_the_end, go_before_the_start, grow, untie, overlap])
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


# run folders


def test_two_runs_in_one_folder(child, tmp_path):
    """Refused while the other lives, with its name; taken over when it was killed, though its worker lives on."""
    pid = child.start("hold", tmp_path / "run")
    worker = child.hear()["worker"]
    try:
        for resume in (False, True):
            (tmp_path / "run" / "config.yaml").touch()
            with pytest.raises(CheckpointError, match=f"in use by process {pid} on host {socket.gethostname()}\n.*\n  try"):
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
    with pytest.raises(CheckpointError, match=r"already holds a run \(metrics.jsonl\)\n  at .*\n  try       another folder: this has no checkpoint"):
        RunFolder(path)
    save(run.checkpoints, 1, state(1), {})
    with pytest.raises(CheckpointError, match=rf"\(checkpoints, metrics.jsonl\)\n  at .*\n  try       --resume {path} to go on"):
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
    ("n", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (int(1.2 * 2**30), "1.2 GiB"), (1 << 60, "1048576.0 TiB")]
)
def test_sizes_in_words(n, text):
    assert folder.size(n) == text
