"""Loops over experts as people write them: one operator where they are a layer of experts, else as they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from distributing import OneDevice, step_equals
from experts import SPLIT, Loop, StackedLoop, operators
from torch import nn

import mycel
from mycel import Mesh, Plan
from mycel.errors import CaptureError
from mycel.ir import walk


def same_as_torch(model: nn.Module, x: torch.Tensor) -> None:
    """Loss and gradients; an expert that no token chooses has zeros where a loop leaves it out."""
    wanted = model(x)
    wanted.backward()
    loss, grads = mycel.value_and_grad(model.forward, wrt=model, strict=True)(x)
    torch.testing.assert_close(loss, wanted.detach())
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], torch.zeros_like(p) if p.grad is None else p.grad)


ADDED = ["added", "in_place", "in_place_behind", "put", "scattered", "scattered_repeated", "mixtral"]


@pytest.mark.parametrize("how", ADDED)
def test_a_loop_over_experts_is_one_operator(how, recwarn):
    """Whose weights are put together where it runs; with losses and gradients of torch, and on ranks."""
    model, x = Loop(how, gated=how != "added"), torch.randn(6, 4, dtype=torch.float64)
    names = operators(mycel.capture(model, x))
    assert "experts" in names and not names & {"index_add", "index_put", "index", "scatter_add"}
    same_as_torch(model, x)
    assert not [w for w in recwarn if "computes every one" in str(w.message)]
    if how == "mixtral":
        step_equals(OneDevice.of(model, {"x": x}), Plan(Mesh(dp=2), {}, ["dp"]))


@pytest.mark.parametrize("how", ["first", "columns", "whichever", "repeated"])
def test_a_loop_that_writes_where_a_mask_holds_is_one_operator(how):
    """Rows of one choice or several, overwritten or added to, in a branch or not."""
    model, x = Loop(how, gated=how != "columns"), torch.randn(6, 4, dtype=torch.float64)
    program = mycel.capture(model, x)
    names = operators(program)
    assert "experts" in names and not names & {"cond", "any"}
    assert sum(e.op.name == "linear" for _, e in walk(program)) == 1  # the router
    same_as_torch(model, x)


WAYS = ["continued", "length_asked", "counted", "hit", "hit_numbers", "unique", "tutorial", "unweighted",
        "overwritten", "half", "half_masked", "both_masks", "weights_added", "listed", "dims_put", "dims_added",
        "dims_columns", "both_masks_places", "flat_ids", "own_sums", "own_stacked", "own_weighed", "gates_asked",
        "gates_asked_first", "little", "all_tokens", "all_tokens_masked", "two_choices", "full_kept"]  # fmt: skip


@pytest.mark.parametrize("how", WAYS)
def test_ways_to_write_a_loop(how, recwarn):
    """Also where one expert gets no token: the last has a bias."""
    model, x = Loop(how, gated=how != "unique"), torch.randn(6, 4, dtype=torch.float64)
    model.router.bias.data[2] = -9.0
    program = mycel.capture(model, x)
    names = operators(program)
    assert "experts" in names and not names & {"cond", "index_add", "index_put"}
    assert sum(e.op.name == "linear" for _, e in walk(program)) == 1  # the router
    assert not [w for w in recwarn if "computes every one" in str(w.message)]
    same_as_torch(model, x)


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_a_loop_over_few_tokens(tokens):
    model, x = Loop("whichever"), torch.randn(tokens, 4, dtype=torch.float64)
    assert "experts" in operators(mycel.capture(model, x))
    same_as_torch(model, x)


@pytest.mark.parametrize("how, tokens", [("stretched", 2), ("stretched_masked", 4)])
@pytest.mark.filterwarnings("ignore:the rows that are picked here")
def test_weights_that_are_none_of_rows_stay_as_they_are(how, tokens):
    """Also where there are as many columns as rows."""
    model, x = Loop(how), torch.randn(tokens, 4, dtype=torch.float64)
    assert "experts" not in operators(mycel.capture(model, x))
    same_as_torch(model, x)


def test_a_loop_whose_experts_get_weighed_tokens():
    model, x = Loop("weighed_before"), torch.randn(6, 4, dtype=torch.float64)
    names = operators(mycel.capture(model, x))
    assert "experts" in names and "index_add" not in names
    same_as_torch(model, x)
    step_equals(OneDevice.of(model, {"x": x}), Plan(Mesh(dp=2), {}, ["dp"]))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_loop_over_rows_of_tensors_splits_over_ranks(transposed):
    """Their rows are not put together again: the tensors are what ranks have parts of."""
    model, x = StackedLoop(transposed), torch.randn(6, 4, dtype=torch.float64)
    names = operators(mycel.capture(model, x))
    assert "experts" in names and not names & {"index_add", "stack", "select"}
    same_as_torch(model, x)
    distributed = step_equals(OneDevice.of(model, {"x": x}), Plan(Mesh(ep=2), SPLIT, ["ep"]))
    assert {"experts", "experts_grad"} <= operators(distributed.local)


@pytest.mark.parametrize("tokens", [6, 96])
@pytest.mark.parametrize("how", ["last_wins", "if_many", "if_many_places", "if_many_inside", "both_overwritten"])
def test_a_mask_that_says_more_stays_as_it_is(how, tokens):
    model, x = Loop(how), torch.randn(tokens, 4, dtype=torch.float64)
    assert "experts" not in operators(mycel.capture(model, x))
    same_as_torch(model, x)


@pytest.mark.parametrize("how", ["twice", "scattered_backwards"])
def test_a_loop_that_does_more_stays_as_it_is(how):
    model, x = Loop(how), torch.randn(6, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"computes every one(.|\n)*mycel\.experts"):
        assert "experts" not in operators(mycel.capture(model, x))
    same_as_torch(model, x)


@pytest.mark.parametrize("how", ["sorted_rows", "counted_rows", "full_experts", "copied"])
def test_a_loop_that_is_refused_is_told_how_to_write_it(how):
    with pytest.raises(CaptureError, match=r"experts\.py:\d+\n(.|\n)*try       for a loop over experts .*mycel\.exp"):
        mycel.capture(Loop(how), torch.randn(6, 4, dtype=torch.float64))


class Dropping(Loop):
    """Half of what experts give is dropped, as in tutorials."""

    def __init__(self, how):
        super().__init__(how)
        self.experts = nn.ModuleList(nn.Sequential(expert, nn.Dropout(0.5)) for expert in self.experts)

    def forward(self, x):
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        return getattr(self, self.how)(x, weights, ids)


@pytest.mark.parametrize("how", ["added", "whichever"])
def test_experts_that_drop_draw_for_each_choice(how, recwarn):
    model, x = Dropping(how), torch.randn(24, 4, dtype=torch.float64)
    assert "experts" in operators(mycel.capture(model, x))
    assert not [w for w in recwarn if "computes every one" in str(w.message)]
    weights, ids = torch.topk(model.router(x).softmax(-1), 2)
    each = torch.stack([expert[0](x) for expert in model.experts], 1)  # by token and expert
    one, other = (weights.unsqueeze(-1) * each.gather(1, ids.unsqueeze(-1).expand(-1, -1, 4))).mul(2).unbind(1)
    sums = torch.stack([torch.zeros_like(one), one, other, one + other])
    fits = (mycel.jit(model)(x) - sums).abs() < 1e-12
    assert fits.any(0).all() and fits.any(2).any(1).all()  # all ways to drop are there, and no others


class Given(StackedLoop):
    """Experts that come with the batch: as they are, some of them nowhere, or by a hash of tokens."""

    def __init__(self, how):
        super().__init__(transposed=True)
        self.how = how

    def forward(self, x, ids):
        y, first = torch.zeros_like(x), ids[:, 0] if self.how == "overwritten" else ids[:, 0] * 7919 % 3
        for i in first.unique() if self.how == "hashed" else range(3):
            token = torch.where(ids == i)[0] if self.how == "added" else (first == i).nonzero().squeeze(1)
            if self.how == "added":
                y.index_add_(0, token, self.expert(x[token], i))
            else:
                y[token] = self.expert(x[token], i)
        return (x + y).square().mean()


@pytest.mark.parametrize("how", ["added", "overwritten", "hashed"])
def test_a_loop_over_experts_that_the_batch_says_is_one_operator(how):
    """And one program, whatever it says."""
    model, fast = Given(how), mycel.jit(Given(how))
    batches = [(torch.randn(6, 4, dtype=torch.float64), torch.randint(-2, 7, (6, 2))) for _ in range(3)]
    batches.append((batches[0][0], torch.full((6, 2), 4)))
    for x, ids in batches:
        wanted = model(x, ids)
        wanted.backward()
        torch.testing.assert_close(fast(x, ids), wanted)
        grads = mycel.value_and_grad(model.forward, wrt=model)(x, ids)[1]
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name], torch.zeros_like(p) if p.grad is None else p.grad)
        model.zero_grad()
    assert len(fast.entries) == 1
    x, ids = batches[0]
    assert "experts" in operators(mycel.capture(model, x, ids))
    distributed = step_equals(OneDevice.of(model, {"x": x, "ids": ids}), Plan(Mesh(ep=2), SPLIT, ["ep"]))
    assert "experts" in operators(distributed.local)


class Copied(StackedLoop):
    """An expert's weights for each token and choice."""

    def forward(self, x):
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        hidden = F.gelu(torch.einsum("ti,taih->tah", x, self.up[ids]))
        return torch.einsum("tah,taho,ta->to", hidden, self.down[ids], weights).square().mean()


def test_weights_that_are_copied_for_each_token_are_told_of():
    """Of one token there are fewer than all."""
    model, x = Copied(transposed=True), torch.randn(6, 4, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"12 copies of 3 matrices(.|\n)*loops\.py:\d+\n(.|\n)*mycel\.experts"):
        same_as_torch(model, x)


class Masked(StackedLoop):
    """All experts at once, of whose results a mask or places pick; `soft`: all count."""

    def __init__(self, how):
        super().__init__(transposed=True)
        self.how = how

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        weights, ids = torch.topk(scores, 2)
        gates = torch.zeros_like(scores).scatter(1, ids, weights)
        if self.how == "switch":  # with a capacity
            hot = F.one_hot(ids[:, 0], 3)
            place = (hot.cumsum(0) - 1) * hot
            taken = F.one_hot(place, 4).to(x) * (hot * (place < 4)).unsqueeze(-1).to(x)
            each = F.gelu(torch.einsum("tec,td->ecd", taken, x) @ self.up) @ self.down
            return torch.einsum("tec,ecd->td", taken * weights[:, :1, None], each).square().mean()
        if self.how == "gshard":  # the best two, whose places come from a product of masks
            hot = F.one_hot(ids, 3)
            place = (hot.flatten(0, 1).cumsum(0).view_as(hot) - 1) * hot
            slots = F.one_hot(place.sum(-1).clamp(max=3), 4).to(x)
            taken = torch.einsum("tke,tkc,tk->tec", (hot * (place < 4)).to(x), slots, weights)
            each = F.gelu(torch.einsum("tec,td->ecd", taken.bool().to(x), x) @ self.up) @ self.down
            return torch.einsum("tec,ecd->td", taken, each).square().mean()
        if self.how == "all":
            each = torch.einsum("teh,ehd->ted", F.gelu(torch.einsum("td,edh->teh", x, self.up)), self.down)
            return torch.einsum("ted,te->td", each, gates).square().mean()
        each = torch.stack([self.expert(x, i) for i in range(3)], 1)
        if self.how == "soft":
            return (each * scores.unsqueeze(-1)).sum(1).square().mean()
        if self.how == "indexed":
            return (each[torch.arange(len(x))[:, None], ids] * weights[..., None]).sum(1).square().mean()
        return (each.gather(1, ids[..., None].expand(-1, -1, 4)) * weights[..., None]).sum(1).square().mean()


@pytest.mark.parametrize("how", ["switch", "gshard", "all", "stacked", "indexed", "soft"])
def test_experts_whose_results_a_mask_picks_are_told_of(how, recwarn):
    """Not where all count, and not where a loop over experts is a layer."""
    same_as_torch(Masked(how), torch.randn(6, 4, dtype=torch.float64))
    mycel.capture(Loop("all_tokens"), torch.randn(6, 4, dtype=torch.float64))
    told = [str(w.message) for w in recwarn if "a mask picks here" in str(w.message)]
    assert len(told) == (how != "soft")
    assert all("test_expert_loops.py:" in text and "mycel.experts(" in text for text in told)


class Linears(nn.Module):
    """Experts that are one product each."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        weights, ids = torch.topk(self.router(x).softmax(-1), 2)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y


def test_a_loop_over_experts_is_captured_with_the_better_way_to_write_it():
    model, x = Linears(), torch.randn(6, 4)
    with pytest.warns(UserWarning, match=r"computes every one(.|\n)*mycel\.experts"):
        fast = mycel.jit(model, strict=True)
        torch.testing.assert_close(fast(x), model(x))
