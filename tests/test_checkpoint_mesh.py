"""Checkpoints of tensors that lie on a mesh: saved under one, loaded under another, every part is the original's, and
little else is read."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoints import bits, equal, part_of, place, together
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import layouts, meshes, trees

from mycel.errors import CheckpointError
from mycel.ir import Layout, Mesh
from mycel.run import boxes, reading, shards
from mycel.run.checkpoint import Saver, load, load_parts, read, save
from mycel.run.shards import read_manifest


def save_parts(path: Path, tree: dict[str, torch.Tensor], mesh: Mesh, lying: dict[str, Layout], **options) -> Path:
    """Every rank saves its parts; what is behind their ends is rubbish."""
    saved_layouts = {name: (lying[name], tuple(x.shape)) for name, x in tree.items()}

    def act(ranks):
        with Saver(path, asynchronous=False, ranks=ranks, **options) as saver:
            saver.save(
                3,
                {name: part_of(x, lying[name], mesh, ranks.rank, padding=171) for name, x in tree.items()},
                {"rank": ranks.rank},
                layouts=saved_layouts,
            )
        assert saver.poll() == []
        return saver.last

    (last,) = set(together(mesh, act))
    return last


class Count:
    """Bytes that are read from files of checkpoints."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes, real = 0, os.preadv

        def preadv(fd, buffers, offset):
            n = real(fd, buffers, offset)
            self.bytes += n
            return n

        patch.setattr(reading.os, "preadv", preadv)


def needed(path: Path, tree: dict[str, torch.Tensor], lying: dict[str, Layout], mesh: Mesh, rank: int) -> int:
    """Bytes of the pieces that a rank's parts have something of, and of the headers of their files, by the manifest as
    others would read it."""
    manifest, total, files = json.loads((path / "manifest.json").read_text()), 0, set()
    for name, x in tree.items():
        mine = part_of(torch.arange(x.numel()).reshape(x.shape) + 1, lying[name], mesh, rank).flatten()
        places = torch.zeros(x.numel() + 1, dtype=torch.bool).index_fill(0, mine, True)[1:].reshape(x.shape)
        for piece in manifest["tensors"][name]["pieces"]:
            box = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["shape"], strict=True))
            if places[box].any():
                total += places[box].numel() * x.itemsize
                files.add(piece["file"])
    return total + sum(manifest["files"][file]["header"] for file in files)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tree=trees(),
    data=st.data(),
    shard_bytes=st.sampled_from([1, 100, 10_000]),
    piece_bytes=st.sampled_from([1, 40, 1 << 20]),
)
def test_saved_under_one_mesh_loaded_under_another(tree, data, shard_bytes, piece_bytes):
    before, after = data.draw(meshes(most=12)), data.draw(meshes(most=72))
    lay = lambda mesh: {name: data.draw(layouts(mesh, x.dim())) for name, x in tree.items()}
    lain, lies = lay(before), lay(after)
    with place() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "PIECE_BYTES", piece_bytes)
        path = save_parts(folder, tree, before, lain, shard_bytes=shard_bytes)
        assert equal(load(path).tensors, tree) and load(path).meta == {"rank": 0}
        wanted = {name: (lies[name], tuple(x.shape), x.dtype) for name, x in tree.items()}
        count = Count(patch)
        for rank in range(after.world):
            count.bytes = 0
            parts = load_parts(path, wanted, after, rank)
            assert equal(parts, {name: part_of(x, lies[name], after, rank) for name, x in tree.items()})
            assert count.bytes <= needed(path, tree, lies, after, rank)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tree=trees(), data=st.data())
def test_every_element_is_saved_once_and_as_others_read_it(tree, data):
    mesh = data.draw(meshes(most=12))
    lies = {name: data.draw(layouts(mesh, x.dim())) for name, x in tree.items()}
    with place() as folder:
        path = save_parts(folder, tree, mesh, lies)
        files = [safetensors.torch.load_file(file) for file in sorted(path.glob("*.safetensors"))]
        for name, x in tree.items():
            held = {bits(part) for file in files for n, part in file.items() if n == name}
            assert sum(file[name].numel() for file in files if name in file) == x.numel()
            whole = {
                bits(read(path, name, box))
                for r in range(mesh.world)
                if 0 not in boxes.extents(box := boxes.held(x.shape, lies[name], mesh, r))
            }
            assert held == (whole if x.numel() else set())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_box_of_a_tensor(data):
    x = torch.arange(7 * 5 * 3, dtype=torch.float32).reshape(7, 5, 3)
    box = tuple(tuple(sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in x.shape)
    with place() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "PIECE_BYTES", 120)
        path = save_parts(folder, {"x": x}, Mesh(a=2, b=3), {"x": Layout((("b",), ("a",), ()))})
        assert torch.equal(read(path, "x", box), x[tuple(slice(*ends) for ends in box)])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(mesh=meshes(most=24), data=st.data())
def test_ranks_have_about_the_same_to_save(mesh, data):
    """Whole tensors: no rank has more than another by more than the largest of them.  Split ones: each rank that holds
    a part is asked."""
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 8)), min_size=1, max_size=12))
    items = tuple((Layout(((), ())), shape, 4) for shape in shapes)
    load_bytes = [sum(4 * math.prod(shapes[i]) for i in boxes.chosen(mesh, rank, items)) for rank in range(mesh.world)]
    assert sum(load_bytes) == sum(4 * math.prod(shape) for shape in shapes)
    assert max(load_bytes) - min(load_bytes) <= max(4 * math.prod(shape) for shape in shapes)


def test_a_model_on_a_mesh_is_saved_evenly():
    """Tensor parallel over four, data parallel over eight: nobody saves twice the mean."""
    mesh = Mesh(dp=8, tp=4)
    rows, columns, whole = Layout((("tp",), ())), Layout(((), ("tp",))), Layout(((),))
    layer = [
        (rows, (3072, 1024), 4),
        (columns, (1024, 1024), 4),
        (rows, (4096, 1024), 4),
        (columns, (1024, 4096), 4),
        (whole, (1024,), 4),
    ]
    items = tuple(layer * 12)
    part_bytes = [math.prod(boxes.extents(boxes.held(shape, layout, mesh, 0))) * n for layout, shape, n in items]
    load_bytes = [sum(part_bytes[i] for i in boxes.chosen(mesh, rank, items)) for rank in range(mesh.world)]
    assert sum(load_bytes) == sum(math.prod(shape) * n for _, shape, n in items)
    assert max(load_bytes) < 1.1 * sum(load_bytes) / mesh.world


def test_only_what_is_wanted_is_read_from_the_disk(tmp_path, monkeypatch):
    """As the system counts it, too: an eighth of the rows costs an eighth of the bytes."""
    if not Path("/proc/self/io").exists():
        pytest.skip("the system does not count what a process reads")
    x = torch.randn(4096, 1024)
    monkeypatch.setattr(shards, "PIECE_BYTES", 1 << 18)
    path = save(tmp_path, 0, {"x": x, "other": torch.randn(1 << 20)}, {})
    manifest = read_manifest(path)
    counted = lambda: int(Path("/proc/self/io").read_text().split()[1])
    before = counted()
    part = load_parts(path, {"x": (Layout((("a",), ())), x.shape, x.dtype)}, Mesh(a=8), 3, manifest=manifest)["x"]
    assert torch.equal(part, x[1536:2048]) and part.nbytes <= counted() - before < 1.1 * part.nbytes


def test_tied_tensors_stay_tied_where_they_lie_alike(tmp_path):
    w, mesh = torch.randn(5, 4), Mesh(a=2, b=2)
    lies = {"a": (Layout((("a",), ())), (5, 4)), "b": (Layout((("a",), ())), (5, 4))}

    def act(ranks):
        part = part_of(w, lies["a"][0], mesh, ranks.rank)
        with Saver(tmp_path, ranks=ranks, plan="dp: 2") as saver:
            saver.save(1, {"a": part, "b": part}, {}, layouts=lies)
        return saver.poll()

    assert together(mesh, act) == [[]] * 4
    loaded = load(tmp_path / "step-00000001")
    assert loaded.tensors["a"] is loaded.tensors["b"] and torch.equal(loaded.tensors["a"], w) and loaded.plan == "dp: 2"
    rows, columns = Layout((("a",), ())), Layout(((), ("a",)))
    parts = load_parts(loaded.path, {"b": (rows, (5, 4), w.dtype), "a": (rows, (5, 4), w.dtype)}, Mesh(a=3), 1)
    assert parts["a"] is parts["b"] and torch.equal(parts["a"], w[2:4])
    parts = load_parts(loaded.path, {"b": (rows, (5, 4), w.dtype), "a": (columns, (5, 4), w.dtype)}, Mesh(a=2), 1)
    assert torch.equal(parts["a"], w[:, 2:]) and torch.equal(parts["b"], torch.cat([w[3:], torch.zeros(1, 4)]))


# what does not fit


def partial_layout(data, mesh: Mesh, ndim: int) -> Layout:
    """Any layout; axes it does not use may be those of a sum."""
    layout = data.draw(layouts(mesh, ndim))
    for axis in sorted(set(mesh.axes) - layout.axes):
        layout = layout.with_partial(axis, "+") if data.draw(st.booleans()) else layout
    return layout


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 5), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    data=st.data(),
)
def test_partial_state_is_its_sum_under_any_mesh(shape, dtype, data):
    """Each rank saves a summand of its own; a rank among as many gets it back, others together hold the sum."""
    before, after = data.draw(meshes(most=12)), data.draw(meshes(most=12))
    lain, lies = partial_layout(data, before, len(shape)), partial_layout(data, after, len(shape))
    axes, wanted_axes = tuple(a for a, _ in lain.partial), tuple(a for a, _ in lies.partial)
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    summands = torch.randint(-8, 8, (before.count(axes), *shape), generator=random).to(dtype)
    whole = summands.sum(0).to(dtype)

    def act(ranks):
        mine = part_of(summands[before.index(ranks.rank, axes)], lain, before, ranks.rank)
        with Saver(folder, asynchronous=False, ranks=ranks) as saver:
            saver.save(3, {"e": mine, "n": torch.ones(2)}, {}, layouts={"e": (lain, tuple(shape))})
        assert saver.poll() == []
        return saver.last

    with place() as folder:
        (path,) = set(together(before, act))
        assert torch.equal(load(path).tensors["e"], whole)
        assert torch.equal(read(path, "e", tuple((0, n) for n in shape)), whole)
        asked = {"e": (lies, tuple(shape), dtype)}
        held = [load_parts(path, asked, after, rank)["e"] for rank in range(after.world)]
    for rank in range(after.world):
        together_ = sum(held[r].double() for r in after.group(rank, wanted_axes))
        assert torch.equal(together_, part_of(whole.double(), lies, after, rank))
        if lain.partial and after.count(wanted_axes) == before.count(axes):
            assert torch.equal(held[rank], part_of(summands[after.index(rank, wanted_axes)], lies, after, rank))
        elif after.index(rank, wanted_axes):
            assert not held[rank].any()


def test_what_is_wanted_must_be_there(tmp_path):
    path, mesh = save(tmp_path, 1, {"w": torch.ones(4, 3)}, {}), Mesh(a=2)
    whole = Layout.whole(2)
    for wanted, message in {
        ("v", whole, (4, 3), torch.float32): "there is no v in the checkpoint",
        ("w", whole, (4, 4), torch.float32): r"w: F32\[4, 3\] in the checkpoint, F32\[4, 4\] is wanted",
        ("w", whole, (4, 3), torch.float16): r"w: F32\[4, 3\] in the checkpoint, F16\[4, 3\] is wanted",
        (
            "w",
            Layout((("b",), ())),
            (4, 3),
            torch.float32,
        ): r"'w' of shape \[4, 3\] cannot lie as \[b,-\]: the mesh is Mesh\(a=2\)",
        ("w", Layout((("a",),)), (4, 3), torch.float32): r"'w' of shape \[4, 3\] cannot lie as \[a\]",
    }.items():
        with pytest.raises(CheckpointError, match=message + r"(.|\n)*\n  try "):
            load_parts(path, {wanted[0]: wanted[1:]}, mesh, 0)
    for box in [((0, 4),), ((0, 5), (0, 3)), ((3, 2), (0, 3)), ((-1, 2), (0, 3))]:
        with pytest.raises(CheckpointError, match=r"w has shape \[4, 3\]: there is no box"):
            read(path, "w", box)


def test_what_is_saved_must_lie_as_is_said(tmp_path):
    with Saver(tmp_path) as saver:
        for layout, shape, message in [
            (
                Layout(((),)),
                (5,),
                r"cannot save 'w': this rank has \[4\] of it, but a part of \[5\] that lies as \[-\] has \[5\]",
            ),
            (Layout(((),), (("a", ">"),)), (4,), "of partial values, only sums and means can be state"),
            (Layout((("a",),)), (4,), r"cannot lie as \[a\]: the mesh is Mesh\(\)"),
        ]:
            with pytest.raises(CheckpointError, match=message):
                saver.save(1, {"w": torch.ones(4)}, {}, layouts={"w": (layout, shape)})
