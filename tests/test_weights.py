"""Weights of Hugging Face folders by slices: a rank's part is the whole's, nothing else is read; gathered into a
folder, they are what they were."""

from __future__ import annotations

import errno
import json
import math
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers as hf
from checkpoints import equal, part_of, place
from folders import bits as bits_of
from folders import check_message, load_again, make, saved
from folders import equal as same
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import trees

from mycel.errors import TrainError
from mycel.ir import Mesh
from mycel.plan import Plan
from mycel.run.shards import Shard
from mycel.train.cutting import Cuts, outline
from mycel.train.weights import INDEX, ONE, find, load, write_gathered


def write(folder: Path, tree: dict[str, torch.Tensor], max_shard_bytes: int = 1 << 30) -> None:
    write_gathered(folder, tree, tree.__getitem__, max_shard_bytes)


# reading


def loaded(folder: Path, settings: Any, plan: str, mesh: Mesh, rank: int) -> tuple[torch.nn.Module, Cuts]:
    """What the trainer makes of a folder on one rank."""
    kind = getattr(hf, settings.architectures[0])
    cuts = Cuts(outline(lambda: kind(settings)), Plan.read(plan, mesh), mesh, rank)
    return load(folder, find(folder), kind, settings, torch.float32, torch.device("cpu"), cuts)[0], cuts


@pytest.mark.parametrize("max_shard_size", ["20KB", "4GB"])
@pytest.mark.parametrize(
    ("name", "plan", "mesh"),
    [("qwen3", "zero3+tp", Mesh(dp=3, tp=2)), ("gpt2", "tp", Mesh(tp=4)), ("t5", "zero3", Mesh(dp=3))],
)
def test_parts_are_slices_of_the_whole(tmp_path, name, plan, mesh, max_shard_size):
    whole = saved(tmp_path, name, max_shard_size=max_shard_size)
    assert (len(find(tmp_path)) > 1) == (max_shard_size == "20KB")
    for rank in range(mesh.world):
        module, cuts = loaded(tmp_path, whole.config, plan, mesh, rank)
        split = 0
        for key, x in module.state_dict().items():
            split += not cuts.layouts[key].is_whole
            assert torch.equal(x, part_of(whole.state_dict()[key], cuts.layouts[key], mesh, rank)), key
        assert split > 3


def resident(what: str) -> int:
    return next(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(what)
    )


def test_of_large_files_only_the_parts_are_read(tmp_path):
    """A gibibyte that is a hole in the disk but for one row: what is read of it counts as memory."""
    settings = hf.LlamaConfig(
        vocab_size=40_000,
        hidden_size=2048,
        intermediate_size=4096,
        num_hidden_layers=3,
        num_attention_heads=16,
        architectures=["LlamaForCausalLM"],
    )
    settings.save_pretrained(tmp_path)
    with torch.device("meta"):
        shapes = {name: list(x.shape) for name, x in hf.LlamaForCausalLM(settings).named_parameters()}
    header, total = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [total, total + 4 * math.prod(shape)]}
        total += 4 * math.prod(shape)
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    row = 5000  # the first of rank 1
    with open(tmp_path / ONE, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + total)
        file.seek(8 + len(text) + header["model.embed_tokens.weight"]["data_offsets"][0] + row * 2048 * 4)
        file.write(bytes(torch.arange(2048.0).numpy().data))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
    before = resident("VmHWM")
    module, _ = loaded(tmp_path, settings, "zero3", Mesh(dp=8), 1)
    held = resident("VmHWM") - before
    assert total > 1 << 30
    assert module.model.embed_tokens.weight.shape == (5000, 2048)
    assert torch.equal(module.model.embed_tokens.weight[0], torch.arange(2048.0))
    assert sum(x.nbytes for x in module.parameters()) <= 0.13 * total
    assert 0.1 * total < held < 0.4 * total  # the files' pages and the copies of them


def test_a_part_does_not_change_with_the_file(tmp_path):
    whole = saved(tmp_path, "llama")
    module, _ = loaded(tmp_path, whole.config, "tp", Mesh(tp=2), 0)
    before = bits_of(module)
    (tmp_path / ONE).write_bytes(bytes((tmp_path / ONE).stat().st_size))
    assert same(before, bits_of(module))


# writing


@settings(max_examples=40, deadline=None, derandomize=True)
@given(tree=trees(), max_shard_bytes=st.sampled_from([1, 60, 300, 1 << 20]))
def test_what_is_gathered_is_what_others_read(tree, max_shard_bytes):
    with place() as folder:
        write(folder, tree, max_shard_bytes)
        files = find(folder)
        shards = {file.name: safetensors.torch.load_file(file) for file in files}
        assert sorted(p.name for p in folder.iterdir()) == sorted([*shards, *([INDEX] if len(files) > 1 else [])])
        assert equal({name: x for name in tree for file in shards.values() for n, x in file.items() if n == name}, tree)
        for file in shards.values():
            assert len(file) == 1 or sum(x.nbytes for x in file.values()) <= max_shard_bytes
        if len(files) > 1:
            index = json.loads((folder / INDEX).read_text())
            assert index["weight_map"] == {name: file for file, held in shards.items() for name in held}
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
        write_gathered(
            tmp_path, list("abcdef"), lambda name: (asked.append(name), torch.ones(10))[1], max_shard_bytes=40
        )
    check_message(error, "the weights cannot be written: disk full: needs", "free some space", tmp_path)
    assert asked == list("abcdef") and not any(tmp_path.iterdir())
