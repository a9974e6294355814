"""Many ranks save one checkpoint: in the background, or not at all; whatever happens to one of them, all are told, and
the earlier ones stay."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from itertools import count

import pytest
import torch
from checkpoint_child import MESH, STEPS, state
from checkpoints import equal, forked, names, part_of, place, together

from mycel.errors import CheckpointError
from mycel.ir import Layout, Mesh
from mycel.run import checkpoint
from mycel.run.checkpoint import (
    MeshProcess,
    Saver,
    Writing,
    latest,
    load,
    load_latest,
    load_latest_parts,
    load_parts,
    read,
)
from mycel.run.shards import Shard, read_manifest

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
PAIR = Mesh(a=3, b=2)
ROWS = Layout((("a",), ()))
SHAPE = (7, 5)
WANTED = {"x": (ROWS, SHAPE, torch.float32), "step": (Layout(), (), torch.int64)}


def whole(step: int) -> torch.Tensor:
    return torch.arange(35, dtype=torch.float32).reshape(SHAPE) + 100 * step


def give(saver: Saver, step: int) -> None:
    """Save what a rank holds of a step."""
    x = part_of(whole(step), ROWS, saver.ranks.mesh, saver.ranks.rank, padding=171)
    saver.save(step, {"x": x, "step": torch.tensor(step)}, {"step": step}, layouts={"x": (ROWS, SHAPE)})


def saved(path, step):
    return torch.equal(load(path / f"step-{step:08d}").tensors["x"], whole(step))


# in the background


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_an_asynchronous_save_of_all_ranks_is_the_state_at_the_call(tmp_path, monkeypatch, device):
    """The disks wait until every rank has changed everything; nobody waits for another in the meantime."""
    changed = threading.Event()
    write = Shard.write
    monkeypatch.setattr(Shard, "write", lambda *args: (changed.wait(60), write(*args))[1])
    left = threading.Barrier(PAIR.world, action=changed.set)

    def act(ranks):
        with Saver(tmp_path, ranks=ranks) as saver:
            x = part_of(whole(1), ROWS, PAIR, ranks.rank).to(device)
            saver.save(1, {"x": x, "step": torch.tensor(1)}, {}, layouts={"x": (ROWS, SHAPE)})
            x.fill_(-1)
            left.wait(60)
        return saver.poll(), saver.last

    assert together(PAIR, act) == [([], tmp_path / "step-00000001")] * PAIR.world and saved(tmp_path, 1)
    mesh = Mesh(a=4)
    for rank in range(mesh.world):
        part = load_parts(latest(tmp_path), WANTED, mesh, rank, device)["x"]
        assert part.device.type == device and torch.equal(part.cpu(), part_of(whole(1), ROWS, mesh, rank))


def test_one_rank_holds_the_folder_for_all(tmp_path):
    def act(ranks):
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"):
            Saver(tmp_path, ranks=ranks)
        return True

    with Saver(tmp_path):
        assert all(together(PAIR, act))
    with pytest.raises(CheckpointError, match=r"there is no rank 6 in Mesh\(a=3, b=2\), which has 6"):
        MeshProcess(PAIR, 6, lambda text: [text])


def test_later_saves_go_over_earlier_ones(tmp_path):
    def act(ranks):
        with Saver(tmp_path, keep=1, ranks=ranks) as saver:
            for step in (1, 2, 2, 1):
                give(saver, step)
        return saver.poll()

    first, *others = together(PAIR, act)
    assert names(tmp_path) == ["abandoned-step-00000002", "step-00000001"] and saved(tmp_path, 1)
    assert len(first) == 1 and first[0].startswith("step-00000002 is later than step 1") and others == [[]] * 5


# one rank that cannot


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_memory(*_):
    raise RuntimeError("can't allocate memory")


TROUBLES = {
    "before": (checkpoint, "free_bytes", lambda _: 0, "disk full: needs "),
    "while writing": (Writing, "_write", full, "disk full: needs "),
    "no memory": (checkpoint, "take", no_memory, "no copy of the state could be made: can't allocate memory"),
}


@pytest.mark.parametrize("moment", TROUBLES)
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("victim", [0, 2])
def test_when_one_rank_cannot_no_rank_saves_and_training_goes_on(tmp_path, monkeypatch, victim, asynchronous, moment):
    """The same message on all; the earlier checkpoint as it was; the next save complete."""
    where, name, fail, why = TROUBLES[moment]
    real, bad = getattr(where, name), threading.local()
    monkeypatch.setattr(where, name, lambda *args: (fail if getattr(bad, "now", False) else real)(*args))
    if moment == "while writing":  # which is done by other threads than those that ask for it
        monkeypatch.setattr(
            Writing,
            "_write",
            lambda self, *args: (full if (self.ranks.rank, self.step) == (victim, 2) else real)(self, *args),
        )

    def act(ranks):
        reports = []
        with Saver(tmp_path, asynchronous=asynchronous, ranks=ranks) as saver:
            for step in (1, 2, 3):
                bad.now = (ranks.rank, step) == (victim, 2)
                give(saver, step)
                saver.wait()
                reports.append(saver.poll())
        return reports

    results = together(PAIR, act)
    assert all(result == results[0] for result in results)
    one, (two,), three = results[0]
    assert (
        one == three == []
        and two.startswith(f"step 2 is not saved: rank {victim}: {why}")
        and "\n  at  " in two
        and "\n  try " in two
    )
    assert names(tmp_path) == ["step-00000001", "step-00000003"] and saved(tmp_path, 1) and saved(tmp_path, 3)


def save_all(path, act):
    """What ranks have to report when each saves as `act` does it."""

    def run(ranks):
        with Saver(path, ranks=ranks) as saver:
            act(saver)
        return saver.poll()

    return together(PAIR, run)


def test_ranks_that_hold_different_things_are_told(tmp_path):
    odd = lambda saver: int(saver.ranks.rank == 4)
    for act in [
        lambda saver: saver.save(1, {"xy"[odd(saver)]: torch.ones(2)}, {}),
        lambda saver: saver.save(1, {"x": torch.ones(2, dtype=[torch.float32, torch.float64][odd(saver)])}, {}),
        lambda saver: saver.save(
            1,
            {"x": torch.ones(6, 6)},
            {},
            layouts={"x": [(ROWS, (18, 6)), (Layout(((), ("a",))), (6, 18))][odd(saver)]},
        ),
    ]:
        reports = save_all(tmp_path, act)
        assert reports == [reports[0]] * 6 and reports[0][0].startswith(
            "step 1 is not saved: step, names, shapes or layouts on rank 4 are not those on"
        )
        assert names(tmp_path) == []


def test_ranks_that_do_not_share_a_disk_are_told(tmp_path, monkeypatch):
    write = Shard.write
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(
        Shard,
        "write",
        lambda self, *args: write(self, *((tmp_path / "elsewhere", args[1]) if "-00002-" in self.file else args)),
    )
    reports = save_all(tmp_path / "here", lambda saver: give(saver, 1))
    assert reports == [reports[0]] * 6 and names(tmp_path / "here") == []
    assert reports[0][0].startswith(
        "step 1 is not saved: rank 0 does not see shard-00002-00000.safetensors as it was written\n"
    )
    assert reports[0][0].endswith("\n  try       a folder on a disk that all ranks share")


@pytest.mark.parametrize("tells", [1, 2])
def test_a_rank_that_is_gone_is_told(tmp_path, tells):
    """It told the others nothing of its shards; or the first did not tell that all are there."""
    save_all(tmp_path, lambda saver: give(saver, 1))
    left = count()

    def share(text):
        if next(left) == tells:
            raise ConnectionError("rank 3 is gone")
        return [text]

    with Saver(tmp_path, ranks=MeshProcess(Mesh(), 0, share)) as saver:
        saver.save(2, {"x": whole(2)}, {})
    (report,) = saver.poll()
    assert report.startswith(
        f"step 2 {'is not' if tells == 1 else 'may not be'} saved: the ranks did not all answer: ConnectionError: "
        "rank 3 is gone"
    )
    assert names(tmp_path) == ["step-00000001", *(["step-00000002"] if tells == 2 else [])] and saved(tmp_path, 1)


# damaged files


@pytest.fixture
def two(tmp_path):
    save_all(tmp_path, lambda saver: [give(saver, step) for step in (1, 2)])
    return tmp_path


def damage(path, file: str, byte: int) -> None:
    content = bytearray((path / file).read_bytes())
    content[byte] ^= 16
    (path / file).write_bytes(content)


def test_what_is_damaged_is_noticed_by_those_who_read_it(two):
    """Ranks 0, 2 and 4 have saved rows 0 to 2, 3 to 5 and 6."""
    path = two / "step-00000002"
    damage(path, "shard-00002-00000.safetensors", -1)
    assert torch.equal(read(path, "x", ((0, 3), (1, 4))), whole(2)[:3, 1:4]) and torch.equal(
        read(path, "x", ((6, 7), (0, 5))), whole(2)[6:]
    )
    for start, stop in [(3, 4), (2, 4), (5, 7), (0, 7)]:
        with pytest.raises(
            CheckpointError,
            match=r"step-00000002 is damaged \(shard-00002-00000.safetensors, byte .* has sha256 .*\)\n  at .*\n  try",
        ):
            read(path, "x", ((start, stop), (0, 1)))
    damage(path, "shard-00004-00000.safetensors", 20)
    with pytest.raises(CheckpointError, match=r"is damaged \(shard-00004-00000.safetensors, its header, has sha256"):
        read(path, "x", ((6, 7), (0, 5)))
    manifest = read_manifest(path)
    for lose, reason in [
        (lambda file: os.truncate(file, 150), "ends at byte 150"),
        (os.unlink, "cannot be read: No such file"),
    ]:
        lose(path / "shard-00000-00000.safetensors")
        with pytest.raises(CheckpointError, match=rf"is damaged \(shard-00000-00000.safetensors {reason}"):
            read(path, "x", ((0, 1), (0, 5)), manifest)
        with pytest.raises(CheckpointError, match=r"is damaged \(shard-00000-00000.safetensors (has|is missing)"):
            read(path, "x", ((6, 7), (0, 5)))


def test_all_ranks_go_on_from_the_same_checkpoint(two):
    """Also when only one of them sees that the newest is damaged."""
    damage(two / "step-00000002", "shard-00004-00000.safetensors", -1)
    mesh = Mesh(a=7)
    results = together(mesh, lambda ranks: load_latest_parts(two, lambda manifest: WANTED, ranks))
    for rank, (loaded, (warning,)) in enumerate(results):
        assert (
            loaded.step == 1
            and loaded.meta == {"step": 1}
            and torch.equal(loaded.tensors["x"], whole(1)[rank : rank + 1])
        )
        assert warning.startswith("step-00000002 is damaged (shard-00004-00000.safetensors") and warning.endswith(
            "; using step-00000001"
        )
    shutil.rmtree(two / "step-00000001")
    with pytest.raises(CheckpointError, match=r"no checkpoint is undamaged\n  tried     step-00000002"):
        together(mesh, lambda ranks: load_latest_parts(two, lambda manifest: WANTED, ranks))


# processes


@pytest.fixture(scope="module")
def child():
    with forked() as child:
        yield child


def survivors(child, path, **job):
    """What ranks in processes of their own said of their saves; what they saved is there, complete, and loads under
    another mesh."""
    with place() as board:
        child.start("ranks", path, board=str(board), **job)
        said, ended = child.hear_all()
    assert ended == 0
    known = {x["saved"] for x in said} - {None}
    assert max(known, default=None) is None or latest(path).name >= max(known)
    if latest(path) is not None:
        loaded, warnings = load_latest(path)
        assert (
            warnings == []
            and equal(loaded.tensors, state(loaded.step))
            and (loaded.meta, loaded.plan) == ({"step": loaded.step}, "a plan")
        )
        w = state(loaded.step)["w"]
        for rank in range(6):
            part = load_parts(loaded.path, {"w": (Layout(((), ("b", "a"))), w.shape, w.dtype)}, Mesh(a=3, b=2), rank)[
                "w"
            ]
            assert torch.equal(part, part_of(w, Layout(((), ("b", "a"))), Mesh(a=3, b=2), rank))
    return said


@pytest.mark.parametrize("victim", range(MESH.world))
def test_kill_of_a_rank_before_a_touch_of_the_disk(child, victim):
    """kill -9 at every few of what one rank does with the disk, until it gets through; then the next run tidies up and
    goes on."""
    for moment in count(1, 9):
        with place() as path:
            said = survivors(child, path, victim=victim, moment=moment)
            killed = {x["rank"] for x in said if x["reports"]}
            with Saver(path) as saver:
                assert all(name.startswith("step-") for name in names(path))
                saver.save(9, {"x": whole(9)}, {})
            assert saver.poll() == [] and saved(path, 9)
        if not killed and len(said) == len(STEPS) * MESH.world:
            break
        assert all("the ranks did not all answer" in report for x in said for report in x["reports"])
    assert moment > 20


def test_a_rank_whose_files_may_not_grow(child, tmp_path):
    """A real disk that refuses: step 2 is saved by no rank, the others by all."""
    said = survivors(child, tmp_path, small=2)
    for rank in range(MESH.world):
        saves = [(x["saved"], x["reports"]) for x in said if x["rank"] == rank]
        one, (kept, (report,)), three, again = saves
        assert one == ("step-00000001", []) and kept == "step-00000001" and three == again == ("step-00000003", [])
        assert report.startswith("step 2 is not saved: rank 2: the disk refused it: File too large\n")
    assert names(tmp_path) == ["step-00000003"]
