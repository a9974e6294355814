"""A model in parts is still a model: its state, checkpoints, weights and loss are those of the whole; on one device the
same calls do the same."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from golden import golden
from optimising import EightBit, Shampoo, Whitened, rows, small, trained
from stepping import bitwise, both, plain_step

import mycel
from mycel.errors import CheckpointError, TrainError
from mycel.launch import launch
from mycel.run.torch_checkpoint import CheckpointReader


def test_in_two_processes(tmp_path):
    child = str(Path(__file__).parent / "step_state_child.py")
    env = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    assert launch([str(tmp_path)], 2, program=[child], env=env, logs=tmp_path / "logs") == 0
    golden("refusal_in_parts", (tmp_path / "told.txt").read_text())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
def test_what_ranks_have_in_parts_is_read_by_others(tmp_path):
    """transformers reads the folder that two ranks export, torch.distributed.checkpoint the one they save: of the loss
    that the ranks had, and that torch has after the same steps."""
    import torch.distributed.checkpoint as dcp
    from step_state_child import IDS, LLAMA
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    child, env = str(Path(__file__).parent / "step_state_child.py"), {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    assert launch([str(tmp_path), "transformers"], 2, program=[child], env=env, logs=tmp_path / "logs") == 0
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**LLAMA))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02)
    for _ in range(2):
        plain_step(plain, optimizer, {"input_ids": IDS, "labels": IDS})
    loss_of = lambda model: float(model.eval()(input_ids=IDS, labels=IDS).loss)
    for plan in ("zero3", "tp"):
        loss = float((tmp_path / f"{plan}.txt").read_text())
        exported, read = AutoModelForCausalLM.from_pretrained(tmp_path / plan), LlamaForCausalLM(LlamaConfig(**LLAMA))
        assert loss == pytest.approx(loss_of(exported), rel=1e-6) and loss == pytest.approx(loss_of(plain), rel=1e-4)
        name = "model.layers.1.mlp.down_proj.weight"
        state = {"model": read.state_dict(), f"optimizer.{name}.exp_avg": torch.empty(16, 24)}
        dcp.load(state, storage_reader=CheckpointReader(tmp_path / f"{plan}-saved"), no_dist=True)
        read.load_state_dict(state["model"])
        assert bitwise(dict(read.state_dict()), dict(exported.state_dict()))
        moment = optimizer.state[plain.get_parameter(name)]["exp_avg"]
        torch.testing.assert_close(state[f"optimizer.{name}.exp_avg"], moment, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*runs as it is")
@pytest.mark.parametrize("make", [lambda ps: torch.optim.AdamW(ps, lr=0.02), Whitened], ids=["rule", "as it is"])
@pytest.mark.parametrize("way", ["state dict", "folder"])
def test_on_one_device(way, make, tmp_path):
    pair = both(lambda: small(""), lambda m: make(trained(m)))
    for i in range(2):
        pair.step(**rows(i))
    pair.optimizer.param_groups[0]["lr"] = 0.05
    state = copy.deepcopy(pair.step.state_dict())
    pair.step.save(tmp_path / "saved")
    losses = [pair.step(**rows(i)) for i in (2, 3)]
    other = both(lambda: small(""), lambda m: make(trained(m)))
    other.step.load(tmp_path / "saved") if way == "folder" else other.step.load_state_dict(state)
    assert bitwise(other.step.state_dict(), state) and other.step.steps == (2 if way == "folder" else 0)
    assert [other.step(**rows(i)) for i in (2, 3)] == losses
    other.step.load(tmp_path / "saved" / "step-00000002")
    assert bitwise(other.step.state_dict()["model"], state["model"])


@pytest.mark.filterwarnings("ignore:.*runs as it is")
@pytest.mark.parametrize("make", [Shampoo, EightBit])
@pytest.mark.parametrize("way", ["state dict", "folder"])
def test_state_of_lists_and_of_tensors_of_a_class_of_their_own(way, make, tmp_path):
    """The other step's state is a copy: what goes on here does not reach it."""
    pair, other = (both(lambda: small(""), lambda m: make(trained(m))) for _ in range(2))
    for i in range(3):
        pair.step(**rows(i))
    other.step.load(pair.step.save(tmp_path)) if way == "folder" else other.step.load_state_dict(pair.step.state_dict())
    losses = [pair.step(**rows(i)) for i in range(3, 6)]
    assert [other.step(**rows(i)) for i in range(3, 6)] == losses
    mine, theirs = (x.optimizer.state[x.model.up.weight] for x in (pair, other))
    assert mine.keys() == theirs.keys() and {k: type(v) for k, v in mine.items()} == {
        k: type(v) for k, v in theirs.items()
    }


@pytest.mark.filterwarnings("ignore:.*runs as it is")
def test_state_that_no_file_can_hold_is_refused_and_copied(tmp_path):
    class Marked(Whitened):
        def step(self, closure=None):
            super().step()
            for held in self.state.values():
                held["mark"] = held.get("mark", {1, 2})

    pair, other = (both(lambda: small(""), lambda m: Marked(trained(m))) for _ in range(2))
    pair.step(**rows(0))
    with pytest.raises(CheckpointError) as refused:
        pair.step.save(tmp_path)
    golden("refusal_state_in_files", str(refused.value))
    other.step.load_state_dict(pair.step.state_dict())
    mine, theirs = (x.optimizer.state[x.model.up.weight]["mark"] for x in (pair, other))
    assert mine == theirs and mine is not theirs


def test_the_last_checkpoints_stay(tmp_path):
    step = both(lambda: small(""), lambda m: torch.optim.SGD(trained(m), lr=0.1)).step
    for i in range(3):
        step(**rows(i))
        step.save(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]


def test_exported_to_hugging_face_and_back(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=32, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    ids = torch.arange(12).reshape(2, 6)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    step(input_ids=ids, labels=ids)
    before = model.config.to_dict()
    step.export(tmp_path / "model")
    assert model.config.to_dict() == before  # of one rank; another configuration is another capture
    again = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert bitwise(dict(again.state_dict()), dict(model.state_dict()))
    fresh = LlamaForCausalLM(config)
    other = mycel.train_step(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), compile=False)
    other.load(tmp_path / "model")
    assert bitwise(dict(fresh.state_dict()), dict(model.state_dict()))
    assert other.evaluate(input_ids=ids, labels=ids) == step.evaluate(input_ids=ids, labels=ids)


def test_messages(tmp_path):
    step = both(lambda: small(""), lambda m: torch.optim.SGD(trained(m), lr=0.1)).step
    step.save(tmp_path / "saved")
    step.export(tmp_path / "exported")
    model = torch.nn.Linear(2, 2)
    other = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    texts = []
    for make in (
        lambda: other.load(tmp_path / "saved"),
        lambda: other.load(tmp_path / "exported"),
        lambda: other.load(tmp_path / "nothing"),
        lambda: other.load_state_dict(model.state_dict()),
        lambda: step.export(tmp_path / "exported"),
    ):
        with pytest.raises((TrainError, CheckpointError)) as refused:
            make()
        texts.append(str(refused.value).replace(str(tmp_path), "FOLDER"))
    golden("refusal_step_state", "\n\n".join(texts))


@pytest.mark.parametrize("way", ["state dict", "folder"])
@pytest.mark.parametrize("kinds", [("SGD", "AdamW"), ("AdamW", "SGD"), ("AdamW", "Adafactor")], ids="-".join)
def test_state_of_another_optimiser_is_refused_where_it_is_loaded(kinds, way, tmp_path):
    """And nothing has changed; a scheduler's options, and an optimiser whose options are the same, are none."""
    saved, other = (both(lambda: small(""), lambda m, k=k: getattr(torch.optim, k)(trained(m), lr=0.1)) for k in kinds)
    saved.step(**rows(0))
    saved.step.save(tmp_path)
    before = copy.deepcopy(other.step.state_dict())
    load = other.step.load if way == "folder" else other.step.load_state_dict
    with pytest.raises((CheckpointError, TrainError), match=f"another optimiser.*\n(.*\n)*.*{kinds[1]}"):
        load(tmp_path if way == "folder" else saved.step.state_dict())
    assert bitwise(other.step.state_dict(), before)
    again = both(lambda: small(""), lambda m: getattr(torch.optim, kinds[0])(trained(m), lr=0.1))
    torch.optim.lr_scheduler.ConstantLR(again.optimizer)
    again.step.load(tmp_path)
