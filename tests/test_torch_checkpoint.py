"""Checkpoints of torch's own kinds are read, and ours by torch's own loader; what is more than tensors is refused."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import mycel
from mycel.errors import CheckpointError
from mycel.run.torch_checkpoint import CheckpointReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4, dtype=torch.float32))
    model[1].running_mean.normal_()
    return model


def step_of(model: nn.Module) -> mycel.Step:
    return mycel.train_step(model, torch.optim.AdamW(model.parameters()), nn.functional.mse_loss)


def same(a: nn.Module, b: nn.Module) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", ["bin", "shards", "dcp", "dcp nested"])
def test_a_step_takes_weights_of_torchs_kinds(tmp_path, kind):
    saved, model = net(0), net(1)
    state = saved.state_dict()
    if kind.startswith("dcp"):
        dcp.save({"app": {"model": state}, "step": 3} if "nested" in kind else state, checkpoint_id=tmp_path)
    elif kind == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        for i, names in enumerate(([*state][:3], [*state][3:])):
            torch.save({n: state[n] for n in names}, tmp_path / f"pytorch_model-{i}-of-2.bin")
    step_of(model).load(tmp_path)
    same(model, saved)


def test_torch_loads_what_a_step_saved(tmp_path):
    model, other = net(0), net(1)
    step = step_of(model)
    step(torch.randn(8, 4), torch.randn(8, 4))
    step.save(tmp_path)
    state = {"model": other.state_dict()}
    dcp.load(state, storage_reader=CheckpointReader(tmp_path), no_dist=True)
    other.load_state_dict(state["model"])
    same(other, model)
    moments = {"optimizer.0.weight.exp_avg": torch.empty(6, 4)}
    dcp.load(moments, storage_reader=CheckpointReader(tmp_path), no_dist=True)
    assert torch.equal(moments["optimizer.0.weight.exp_avg"], step.optimizer.state[model[0].weight]["exp_avg"])


@pytest.mark.parametrize("by", ["name", "number"])
def test_a_step_goes_on_from_torchs_optimiser(tmp_path, by):
    """A run of plain torch, saved by torch.distributed.checkpoint: a step from there goes on as torch would."""
    saved, model = net(0), net(1)
    plain = torch.optim.AdamW(saved.parameters(), lr=0.1)

    def further():
        plain.zero_grad()
        nn.functional.mse_loss(saved(x), y).backward()
        plain.step()

    x, y = torch.randn(8, 4), torch.randn(8, 4)
    further()
    state = get_optimizer_state_dict(saved, plain) if by == "name" else plain.state_dict()
    dcp.save({"model": saved.state_dict(), "optim": state}, checkpoint_id=tmp_path)
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=0.1), nn.functional.mse_loss)
    step.load(tmp_path)
    further()
    step(x, y)
    torch.testing.assert_close(dict(model.state_dict()), dict(saved.state_dict()))


def test_state_of_another_optimiser_is_named(tmp_path):
    state = {"model": net(0).state_dict(), "optim": {"state": {"9.weight": {"exp_avg": torch.ones(3)}}}}
    dcp.save(state, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"the optimiser's state is of another model: 9.weight"):
        step_of(net(0)).load(tmp_path)


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


def test_code_in_a_checkpoint_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("pytorch_model.bin", ".metadata"):
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).write_bytes(pickle.dumps(Evil())) if name == ".metadata" else torch.save(Evil(), folder / name)
        with pytest.raises(CheckpointError, match=r"(more than tensors|cannot be read: it names posix.system)"):
            step_of(net(0)).load(folder)
    assert not (tmp_path / "evil").exists()


def test_another_model_is_named(tmp_path):
    dcp.save({"other.weight": torch.ones(3)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointError, match=r"has no 0.weight; it has other.weight"):
        step_of(net(0)).load(tmp_path)
