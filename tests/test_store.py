"""Saved programs: they run without the model's source, damage is noticed, and loading executes nothing."""

from __future__ import annotations

import random

import pytest
import safetensors.torch
import torch
from torch import nn

import mycel
from mycel import LoadError, Program


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.count += 1
        return torch.relu(self.fc(x)) * torch.tensor([1.0, 2.0, float("inf")])


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 4)
    program = mycel.capture(model, x)
    path = tmp_path / "model.mycel"
    program.save(path)
    return model, x, program, path


def test_round_trip_and_run_without_the_model(saved):
    model, x, program, path = saved
    loaded = Program.load(path)
    assert loaded == program and str(loaded) == str(program)
    for mode in ("graph", "eager"):
        state = {k: v.clone() for k, v in model.state_dict().items()}
        (y,) = mycel.jit(loaded, mode=mode)(x=x, **state)
        assert state["count"] == 1
        torch.testing.assert_close(y, Model.forward(model, x), equal_nan=True)
        model.count -= 1


def test_every_truncation_is_noticed(saved):
    *_, path = saved
    whole = path.read_bytes()
    for n in [0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:n])
        with pytest.raises(LoadError, match=r"damaged|not a saved program"):
            Program.load(path)


def test_every_flipped_byte_is_noticed(saved):
    *_, path = saved
    whole = path.read_bytes()
    for at in random.Random(0).sample(range(len(whole)), 200):
        damaged = bytearray(whole)
        damaged[at] ^= 0x15
        path.write_bytes(bytes(damaged))
        with pytest.raises(LoadError):
            Program.load(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(LoadError, match="no saved program"):
        Program.load(tmp_path / "nothing")
    torch.save({"a": 1}, tmp_path / "pickle")
    with pytest.raises(LoadError, match="damaged or truncated"):
        Program.load(tmp_path / "pickle")
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "weights")
    with pytest.raises(LoadError, match="not a saved program"):
        Program.load(tmp_path / "weights")


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    *_, program, path = saved
    before = path.read_bytes()
    monkeypatch.setattr(safetensors.torch, "save", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        program.save(path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_names_in_a_file_cannot_reach_python(tmp_path):
    """Operators and targets are looked up, never evaluated."""
    text = (
        "def main(x: f32[2]):\n"
        '  y: f32[2] = opaque(x, args=(("x", 0),), target="aten.__import__(\'os\').default")\n  return y\n'
    )
    with pytest.raises(mycel.MycelError, match="no attribute '__import__"):
        Program.parse(text)


def test_a_text_cannot_smuggle_python_in_or_act_before_it_is_run(tmp_path):
    smuggled = "def main(x: f32[4]):\n  y: f32[4] = relu(x)  # a.py:1\r    raise SystemExit\n  return y\n"
    with pytest.raises(mycel.TextError, match=r"cannot read '\\r'"):
        Program.parse(smuggled)
    created = tmp_path / "made"
    acting = (
        f'def main():\n  y: f32[4] = opaque(args=("{created}", True, 4), target="aten.from_file.default")\n  return y\n'
    )
    with pytest.raises(mycel.IRError, match="no function of tensors"):
        Program.parse(acting)
    assert not created.exists()


def test_constants_and_results_of_every_kind():
    fast = mycel.jit(lambda x: x * torch.tensor([1j, 0, 1, 3]))
    assert torch.equal(fast(torch.ones(4)), torch.tensor([1j, 0, 1, 3]))
    (y, nothing) = mycel.jit(Program.parse("def main(x: f32[4]):\n  return x, None\n"))(torch.ones(4))
    assert y.tolist() == [1, 1, 1, 1] and nothing is None
