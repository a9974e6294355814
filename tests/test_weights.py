"""Weights of Hugging Face folders by slices: a rank's part is the whole's, nothing else is read; gathered into a folder, they are what they were."""

from __future__ import annotations

import errno
import json
import os
import resource
import weakref
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoints import bits, equal, part_of, place
from folders import load_again, make, saved, told
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import layouts, meshes, trees

from mycel.errors import CheckpointError, TrainError
from mycel.ir import Layout, Mesh
from mycel.run.shards import Shard
from mycel.train.weights import INDEX, ONE, Stored, find, read_part, write_gathered

ROWS, COLUMNS = Layout((("a",), ())), Layout(((), ("a",)))


def write(folder: Path, tree: dict[str, torch.Tensor], max_shard_bytes: int = 1 << 30) -> None:
    write_gathered(folder, tree, tree.__getitem__, max_shard_bytes)


# reading


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tree=trees(), data=st.data(), max_shard_bytes=st.sampled_from([1, 100, 1 << 20]))
def test_parts_are_slices_of_the_whole(tree, data, max_shard_bytes):
    mesh = data.draw(meshes(most=72))
    lies = {name: data.draw(layouts(mesh, x.dim())) for name, x in tree.items()}
    with place() as folder:
        write(folder, tree, max_shard_bytes)
        with Stored(folder) as stored:
            for name, x in tree.items():
                assert stored.type(name) == (x.dtype, tuple(x.shape))
                for rank in range(mesh.world):
                    assert bits(stored.part(name, lies[name], mesh, rank)) == bits(part_of(x, lies[name], mesh, rank))


@pytest.mark.parametrize("max_shard_size", ["20KB", "4GB"])
def test_parts_of_what_transformers_saved(tmp_path, max_shard_size):
    state = saved(tmp_path, "qwen3", max_shard_size=max_shard_size).state_dict()
    assert (len(find(tmp_path)) > 1) == (max_shard_size == "20KB")
    mesh = Mesh(a=3, b=2)
    with Stored(tmp_path) as stored:
        assert stored.slices.keys() <= state.keys()
        for name in stored.slices:
            layout = Layout((("b", "a"), *[()] * (state[name].dim() - 1)))
            assert all(torch.equal(stored.part(name, layout, mesh, rank), part_of(state[name], layout, mesh, rank)) for rank in range(6))


def test_of_a_large_file_only_the_part_is_read(tmp_path):
    """4 GiB that are a hole in the disk but for two rows: they would fill the memory that a process may have here."""
    shape, row = [1 << 20, 1 << 10], 4 << 10
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, row << 20]}}).encode().ljust(120)
    with open(tmp_path / ONE, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(128 + (row << 20))
        for at in (16, 17):
            file.seek(128 + row * at)
            file.write(bytes(torch.full((1 << 10,), float(at)).numpy().data))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = read_part(tmp_path, "w", ROWS, Mesh(a=1 << 19), 8)
    assert rows.shape == (2, 1 << 10) and rows[0].eq(16).all() and rows[1].eq(17).all()
    columns = read_part(tmp_path, "w", Layout((("b",), ("a",))), Mesh(a=8, b=1 << 12), (2 << 12) + 0)
    assert columns.shape == (1 << 8, 1 << 7) and columns[16].eq(16).all() and columns.sum() == (16 + 17) * (1 << 7)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


def test_a_part_does_not_change_with_the_file(tmp_path):
    write(tmp_path, {"w": torch.ones(4, 4)})
    part = read_part(tmp_path, "w", Layout.whole(2), Mesh(), 0)
    (tmp_path / ONE).write_bytes(bytes((tmp_path / ONE).stat().st_size))
    assert part.eq(1).all()


def test_weights_that_are_not_there(tmp_path):
    write(tmp_path, {"w": torch.ones(4, 4), "v": torch.ones(1)}, 1)
    with pytest.raises(TrainError) as error:
        read_part(tmp_path, "u", ROWS, Mesh(a=2), 0)
    told(error, "there are no weights called u, but v, w", tmp_path)
    with pytest.raises(CheckpointError, match=r"'w' of shape \[4, 4\] cannot lie as \[b,-\]"):
        read_part(tmp_path, "w", Layout((("b",), ())), Mesh(a=2), 0)
    file = find(tmp_path)[0]
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(TrainError) as error:
        read_part(tmp_path, "w", ROWS, Mesh(a=2), 0)
    told(error, "the weights are damaged or cut short", file)
    file.unlink()
    with pytest.raises(TrainError) as error:
        read_part(tmp_path, "w", ROWS, Mesh(a=2), 0)
    told(error, f"the index names {file.name!r}, which is no file of the folder")


# writing


@settings(max_examples=40, deadline=None, derandomize=True)
@given(tree=trees(), max_shard_bytes=st.sampled_from([1, 60, 300, 1 << 20]))
def test_what_is_gathered_is_what_others_read(tree, max_shard_bytes):
    with place() as folder:
        write(folder, tree, max_shard_bytes)
        files = find(folder)
        found = {file.name: safetensors.torch.load_file(file) for file in files}
        assert sorted(p.name for p in folder.iterdir()) == sorted([*found, *([INDEX] if len(files) > 1 else [])])
        assert equal({name: x for name in tree for file in found.values() for n, x in file.items() if n == name}, tree)
        for file in found.values():
            assert len(file) == 1 or sum(x.nbytes for x in file.values()) <= max_shard_bytes
        if len(files) > 1:
            index = json.loads((folder / INDEX).read_text())
            assert index["weight_map"] == {name: file for file, held in found.items() for name in held}
            assert index["metadata"]["total_size"] == sum(x.nbytes for x in tree.values())


@pytest.mark.parametrize("max_shard_bytes", [20_000, 1 << 30])
def test_transformers_loads_what_was_gathered(tmp_path, max_shard_bytes):
    module = make("llama")
    module.config.architectures = [type(module).__name__]
    module.config.save_pretrained(tmp_path)
    state = module.state_dict()
    write(tmp_path, state, max_shard_bytes)
    assert (tmp_path / INDEX).exists() == (max_shard_bytes == 20_000)
    assert equal(load_again(tmp_path).state_dict(), state)


def test_one_tensor_and_one_file_are_in_memory_at_most(tmp_path):
    gathered: list[weakref.ref] = []
    most = 0

    def whole(name: str) -> torch.Tensor:
        nonlocal most
        memory = np.full(1000, float(name), dtype=np.float32)  # lives as long as any tensor that uses it
        gathered.append(weakref.ref(memory))
        most = max(most, sum(1 for ref in gathered if ref() is not None))
        return torch.from_numpy(memory)

    write_gathered(tmp_path, map(str, range(40)), whole, max_shard_bytes=12_000)
    assert most == 4 and len(find(tmp_path)) == 14


def test_ranks_that_do_not_write_only_gather(tmp_path):
    asked = []
    write_gathered(tmp_path, ["a", "b"], lambda name: asked.append(name))
    assert asked == ["a", "b"] and not any(tmp_path.iterdir())


def test_a_full_disk_leaves_no_rank_waiting(tmp_path, monkeypatch):
    """The rank that writes goes on gathering with the others, then tells; nothing is left of what it had written."""
    real, asked = Shard.write, []

    def write_(self, folder, *rest):
        if self.file != ".00000.part":
            (folder / self.file).write_bytes(b"some")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, folder, *rest)

    monkeypatch.setattr(Shard, "write", write_)
    with pytest.raises(TrainError) as error:
        write_gathered(tmp_path, list("abcdef"), lambda name: (asked.append(name), torch.ones(10))[1], max_shard_bytes=40)
    told(error, "the weights cannot be written: disk full: needs", "free some space", tmp_path)
    assert asked == list("abcdef") and not any(tmp_path.iterdir())
