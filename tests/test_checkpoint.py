"""Checkpoints: what is read back is what was saved, bit for bit; which of them are kept."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from itertools import pairwise

import pytest
import safetensors.torch
import torch
from checkpoint_child import state
from checkpoints import equal, names, place
from hypothesis import given, settings
from hypothesis import strategies as st

from mycel.errors import CheckpointError
from mycel.run import shards
from mycel.run.checkpoint import Saver, best, latest, load, load_latest, save
from mycel.run.shards import DTYPES, Manifest, Shard, StoredTensor

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


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
        loaded = load(saver.last)
        assert (loaded.step, loaded.meta) == (7, meta) and equal(loaded.tensors, tensors)
        chosen = set(list(tensors)[1::2])
        assert equal(
            load(saver.last, only=lambda name: name in chosen).tensors,
            {k: v for k, v in tensors.items() if k in chosen},
        )


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
        load(save(tmp_path, 1, {"z": z, "conjugate": z.conj(), "view": z.real}, {})).tensors,
        {"z": z, "conjugate": z.conj(), "view": z.real},
    )
    stored = sum(p.stat().st_size for p in loaded.path.glob("*.safetensors"))
    assert 2 * w.nbytes + w.nbytes // 2 <= stored < 3 * w.nbytes + w.nbytes // 2


@given(limit=st.integers(1, 200), shapes=st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=6))
def test_shards_keep_to_their_size_and_items_are_aligned(limit, shapes):
    dtypes = [torch.int8, torch.float64, torch.int16]
    packed = shards.pack(
        [(str(i), (0,) * len(shape), torch.empty(shape, dtype=dtypes[i % 3])) for i, shape in enumerate(shapes)], limit
    )
    for shard in packed:
        data = shard.bytes - len(shard.header)
        assert (
            data <= limit or len(shard.parts) == 1 and (shard.parts[0][2].dim() == 0 or shard.parts[0][2].shape[0] == 1)
        )
        assert len({name for name, _, _ in shard.parts}) == len(shard.parts)
        _, pieces = shard.described(shard.sha256())
        assert all(piece.begin % x.itemsize == 0 for (_, piece), (_, _, x) in zip(pieces, shard.pieces, strict=True))
    for one, other in pairwise(packed):
        assert one.bytes - len(one.header) + other.bytes - len(other.header) > limit  # none is needlessly small


def test_pieces_of_several_ranks_become_one_tensor(tmp_path):
    """Each rank's shard holds a box of the tensor; the boxes fill it."""
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    boxes = {(0, 0): whole[:, :2], (0, 2): whole[:1, 2:], (1, 2): whole[1:, 2:]}
    files = [
        Shard(f"shard-{i:05d}-00000.safetensors", [("w", offset, box.contiguous())])
        for i, (offset, box) in enumerate(boxes.items())
    ]
    for file in files:
        file.write(tmp_path)
    described = {file.file: file.described(file.sha256()) for file in files}
    entry = StoredTensor(whole.dtype, (4, 6), tuple(piece for _, pieces in described.values() for _, piece in pieces))
    manifest = Manifest(5, None, {}, None, {name: file for name, (file, _) in described.items()}, {"w": entry})
    (tmp_path / "manifest.json").write_bytes(shards.to_bytes(manifest))
    assert torch.equal(load(tmp_path).tensors["w"], whole)
    one, two, three = entry.pieces
    beside = replace(three, offset=(0, 2))  # as many elements as there should be, but over another piece
    for pieces in [(two, three), (one, two, beside), (one, two, three, two), (one, replace(two, offset=(0, 3)), three)]:
        (tmp_path / "manifest.json").write_bytes(
            shards.to_bytes(replace(manifest, tensors={"w": replace(entry, pieces=pieces)}))
        )
        with pytest.raises(CheckpointError, match=r"w has a (hole|piece outside itself)"):
            load(tmp_path)


@pytest.mark.parametrize(
    "bad", [torch.zeros(2, dtype=torch.complex128), torch.zeros(2).to_sparse(), torch.empty(2, device="meta")]
)
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
        monkeypatch.setattr(
            torch, "empty", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("can't allocate memory"))
        )
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
@given(
    metrics=st.lists(METRIC, min_size=1, max_size=8),
    keep=st.integers(1, 3),
    crash=st.sets(st.integers(0, 7)),
    data=st.data(),
)
def test_the_last_n_and_the_best_are_kept(metrics, keep, crash, data):
    """Also when the process ends between completing a save and deleting older ones: nothing needed is gone, and the
    next save tidies up."""

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
            steps = sorted(int(p.name[5:]) for p in path.glob("step-*"))
            assert set(steps) >= set(kept(saved, keep)) if crashed else steps == kept(saved, keep)
            if crashed:
                saver.lock.release()
                saver = Saver(path, keep, asynchronous=False)
                saved = {s: saved[s] for s in steps}
            assert all(name.startswith("step-") for name in names(path))
            assert best(path) == (None if lowest(saved) is None else path / f"step-{lowest(saved):08d}")
            for s in steps:
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
