"""Whole models, captured unchanged: the same results and the same new buffers as eager torch, in train and eval
mode."""

from __future__ import annotations

import copy

import pytest
import torch
from models import MODELS, same, state
from torch import nn

import mycel
from mycel.ir import walk


def opaque(program):
    """torch operators that have no paragraph."""
    return [dict(e.params)["target"] for _, e in walk(program) if e.op.name.startswith("opaque")]


def calls(program, block):
    return sum(e.params.get("block") == block for _, e in walk(program))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_results_and_buffers_are_those_of_eager_torch(name, training):
    model, batch = MODELS[name]().train(training), MODELS[name].inputs()
    modules = {"graph": copy.deepcopy(model), "eager": copy.deepcopy(model)}
    fast = {mode: mycel.jit(m, mode=mode) for mode, m in modules.items()}
    for _ in range(2):  # the second call sees what the first did to the buffers
        with torch.no_grad():
            wanted = model(**batch)
        for mode, fn in fast.items():
            same(fn(**batch), wanted)
            same(state(modules[mode]), state(model))
    assert all(len(fn.entries) == 1 for fn in fast.values())


@pytest.mark.parametrize("name", MODELS)
def test_no_operator_is_opaque(name):
    for training in (True, False):
        assert opaque(mycel.capture(MODELS[name]().train(training), **MODELS[name].inputs())) == []


class Wrapper(nn.Module):
    """A module around another, as trainers and data parallelism have them."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        out = self.module(*args, **kwargs)
        return (out if isinstance(out, torch.Tensor) else out.logits).float().square().mean()


def wrapped_in_a_loss(model):
    def loss(**batch):
        out = model(**batch)
        return (out if isinstance(out, torch.Tensor) else out.logits).square().mean()

    return loss


def bound(model):
    return lambda **batch: model.forward(**batch)


REPEATING = [n for n, m in MODELS.items() if m.layers]


@pytest.mark.parametrize("wrap", [lambda m: m, wrapped_in_a_loss, Wrapper, lambda m: Wrapper(Wrapper(m)), bound])
@pytest.mark.parametrize("name", REPEATING)
def test_a_repeated_layer_is_one_block(name, wrap):
    model = MODELS[name]
    program = mycel.capture(wrap(model()), **model.inputs())
    assert calls(program, model.block) == model.layers, list(program.blocks)
    assert len([b for b in program.blocks if b.startswith(model.block)]) == 1
