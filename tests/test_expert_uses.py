"""Experts that a loop passes over where no token chose them have no gradient in torch: its optimisers leave them alone,
weight decay, momentum and count of steps included; so does a step, though the loop is one operator."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from distributing import OneDevice, step_equals
from experts import Loop, operators
from pipelining import pipeline_equals
from test_uses import OPTIMISERS
from torch import nn
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

import mycel
from mycel import Mesh, Plan
from mycel.plan.schedule import named

PASSED_OVER = ["continued", "length_asked", "counted", "hit", "hit_numbers", "unique", "columns", "tutorial"]
EXPERTS = 6


class Layer(Loop):
    """Adds to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        return x + getattr(self, self.how)(x, weights, ids)


def adamw(params):
    """A router's scores that no token has as weights get gradients of rounding alone: eps keeps them small."""
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, eps=1e-3)


def batches(count=6, tokens=2):
    torch.manual_seed(3)
    return [torch.randn(tokens, 4, dtype=torch.float64) * 3 for _ in range(count)]


def same_steps(model, step_of, optimizer, parts=1, tokens=2, smallest=1e-12):
    like = copy.deepcopy(model)
    torchs = optimizer(like.parameters())
    take, unused = step_of(model, optimizer(model.parameters())), 0
    for x in batches(tokens=tokens):
        torchs.zero_grad()
        wanted = sum(like(part) for part in x.chunk(parts)) / parts
        wanted.backward()
        unused += sum(p.grad is None for p in like.parameters())
        torchs.step()
        torch.testing.assert_close(take(x), wanted.detach(), rtol=1e-9, atol=smallest)
        for (name, mine), theirs in zip(model.named_parameters(), like.named_parameters(), strict=True):
            torch.testing.assert_close(mine, theirs[1], rtol=1e-9, atol=smallest, msg=lambda m: f"{name}: {m}")
    return unused


@pytest.mark.parametrize("how", [*PASSED_OVER, "added", "first", "mixtral"])
def test_experts_without_tokens_stay_as_they_are(how):
    """Where the loop passes over them; where it calls them with no rows, they decay."""
    model = Loop(how, EXPERTS, gated=how != "columns")
    assert "experts" in operators(mycel.capture(model, batches(1)[0]))
    unused = same_steps(model, mycel.train_step, adamw)
    assert (unused > 0) == (how in PASSED_OVER)


@pytest.mark.parametrize("name", ["sgd", "torch's", "dampened"])
@pytest.mark.filterwarnings("ignore:test_uses.Own runs as it is")
def test_whichever_optimiser(name):
    assert same_steps(Loop("continued", EXPERTS), mycel.train_step, OPTIMISERS[name], smallest=1e-6)


@pytest.mark.parametrize("how", ["continued", "whichever"])
def test_parts_of_a_batch_use_an_expert_if_one_does(how):
    def step(model, optimizer):
        return mycel.train_step(model, optimizer, accumulate=2)

    assert same_steps(Loop(how, 2 * EXPERTS), step, adamw, parts=2, tokens=4)


def test_an_expert_without_tokens_has_no_gradient():
    model, x = Loop("hit", EXPERTS), batches(1)[0]
    like = copy.deepcopy(model)
    like(x).backward()
    mycel.train_step(model, adamw(model.parameters()), grads=True)(x)
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert missing == [name for name, p in like.named_parameters() if p.grad is None] and missing


@pytest.mark.parametrize("names, sizes", [("dp", {"dp": 2}), ("zero1", {"dp": 2}), ("zero3", {"dp": 2})])
def test_ranks_leave_the_same_experts_alone(names, sizes):
    """An expert is used if a token of any rank chose it."""
    one = OneDevice.of(Loop("continued", EXPERTS), {"x": batches(1)[0]})
    assert counted(one)
    step_equals(one, Plan.read(names, Mesh(sizes)))


def test_stages_leave_the_same_experts_alone():
    plan = Plan(Mesh(), stages=2, schedule="1f1b", microbatches=2)
    layers = nn.Sequential(*(Layer("continued", EXPERTS) for _ in range(2)), Loop("hit", EXPERTS))
    one = OneDevice.of(layers, {"input": batches(1)[0]}, plan=plan, accumulate=2)
    assert len(counted(one)) == 3
    pipeline_equals(one, named("1f1b", 2, 2), random.Random(0), seed=0)


def counted(one):
    """What counts the uses of experts: a number for each."""
    program = one.unsharded.program
    of_experts = [v for v in program.inputs_of("counter") if program.role(v).name.startswith("uses.")]
    assert all(v.shape == (EXPERTS,) for v in of_experts)
    return of_experts


class Switch(nn.Module):
    """A layer of Switch Transformers, whose experts drop all but one token of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 4, "d_ff": 8, "num_experts": EXPERTS, "expert_capacity": 1}
        config = SwitchTransformersConfig(**sizes, dropout_rate=0.0, router_jitter_noise=0.0)
        torch.manual_seed(0)
        self.layer = SwitchTransformersSparseMLP(config).double()
        self.layer.router.dtype = torch.float64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.layer(x[None])[0]).square().mean()


def test_experts_of_switch_transformers_that_were_not_hit_stay_as_they_are():
    """Dropped tokens use no expert."""
    model = Switch()
    assert "experts" in operators(mycel.capture(model, batches(1, 3)[0]))
    assert same_steps(model, mycel.train_step, adamw, tokens=3)


def test_what_torch_records_of_a_jitted_loop_leaves_out_experts_without_tokens():
    model, x = Loop("continued", EXPERTS), batches(1)[0]
    like = copy.deepcopy(model)
    like(x).backward()
    mycel.jit(model, strict=True)(x).backward()
    for (name, mine), theirs in zip(model.named_parameters(), like.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert any(p.grad is None for p in model.parameters())


class Rows(nn.Module):
    """Experts that are rows of two tensors, which always have a gradient; their transposed products are made before
    the branch that uses them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(4, EXPERTS, dtype=torch.float64)
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, 4, dtype=torch.float64))
        self.down = nn.ParameterList(torch.randn(6, 4, dtype=torch.float64) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        y, downs = torch.zeros_like(x), [w.T for w in self.down]
        for i in range(EXPERTS):
            token, place = torch.where(ids == i)
            if len(token):
                hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x[token], self.up[i]))
                y.index_add_(0, token, torch.nn.functional.linear(hidden, downs[i]) * weights[token, place, None])
        return (x + y).square().mean()


@pytest.mark.parametrize("take", ["step", "torch's"])
def test_a_weight_of_two_experts_is_used_where_one_of_them_is(take):
    def recorded(model, optimizer):
        fast = mycel.jit(model, strict=True)

        def step(x):
            optimizer.zero_grad()
            loss = fast(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    model = Loop("continued", EXPERTS)
    model.experts[1].down, model.experts[3].up = model.experts[4].down, model.experts[0].up
    assert same_steps(model, mycel.train_step if take == "step" else recorded, adamw)


def test_rows_of_a_tensor_are_used_where_one_of_them_is():
    assert "experts" in operators(mycel.capture(Rows(), batches(1)[0]))
    assert same_steps(Rows(), mycel.train_step, adamw)
