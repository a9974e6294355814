"""Where tokens go: what each expert gets, routers and choices that are wrong, and experts that change ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from distributing import OneDevice, start_values
from expert_families import family, quiet, text, written_out
from experts import SPLIT, Layer, Loop, Residual, Routed, operators, routed
from torch import nn
from torch.nn import functional as F

import mycel
from mycel import Mesh, Plan
from mycel.errors import RunError
from mycel.expert_placement import balanced, by_rank
from mycel.expert_rows import expert_layers
from mycel.ops.experts import sizes_of_groups
from mycel.run import simulate
from mycel.run.simulate import spread_out

# -- where tokens go, and what is refused


def test_the_load_of_experts_by_layer():
    model = family("qwen3_moe").double()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    load = step.expert_load(**text())
    assert list(load) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert all(counts.shape == (5,) and counts.sum() == 2 * 24 for counts in load.values())
    model.model.layers[1].mlp.gate.weight.data.fill_(torch.nan)
    with pytest.raises(RunError, match=r"router of model\.layers\.1\.mlp\.experts gives weights that are not finite"):
        step.expert_load(**text())


@pytest.mark.parametrize("how", ["added", "in_place", "mixtral", "first", "columns", "repeated"])
def test_the_load_of_loops_over_experts(how):
    """A layer that is one operator only once it is captured has a load as well."""
    model, x = Loop(how), torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    chosen = torch.topk(model.router(x), 2).indices[:, : 1 if how == "first" else 2]
    expected = chosen.reshape(-1).bincount(minlength=3)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, expert_load=True)
    assert torch.equal(step.expert_load(x=x)["experts"], expected)
    step(x=x)
    assert torch.equal(step.expert_load()["experts"], expected.float())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_measure_the_load_of_experts(accumulate):
    """A moving average of what single batches give, as far as parts of them give the same."""
    model, x = Routed(6), torch.randn(8, 4, dtype=torch.float64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    step = mycel.train_step(model, sgd, compile=False, expert_load=True, accumulate=accumulate)
    average = None
    for i in range(3):
        step(x=x + i)
        load = step.expert_load(x=x + i)["the model"].double()
        average = load if average is None else average + 0.1 * (load - average)
        torch.testing.assert_close(step.expert_load()["the model"].double(), average, atol=1e-5, rtol=0)
    step.load_state_dict(step.state_dict())  # it is part of a step's state
    torch.testing.assert_close(step.expert_load()["the model"].double(), average, atol=1e-5, rtol=0)


def test_a_step_names_the_layer_whose_router_breaks():
    model = family("qwen3_moe").double()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, expert_load=True)
    model.model.layers[1].mlp.gate.weight.data.fill_(torch.nan)
    step(**text())
    with pytest.raises(RunError, match=r"router of model\.layers\.1\.mlp\.experts gives weights that are not finite"):
        step.expert_load()


class TwoMixtures(nn.Module):
    """Two layers of experts, the second of which breaks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Residual(3), Routed(3)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("how", ["step", "loss", "outputs", "accumulate"])
def test_a_router_that_breaks_stops_the_step(how):
    """Nobody has asked for loads; parameters are as they were."""
    model, x = TwoMixtures(), torch.randn(8, 4, dtype=torch.float64)
    loss = (lambda model, tokens: model(x=tokens) + 1) if how == "loss" else None
    batch = {"tokens" if how == "loss" else "x": x}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mycel.train_step(model, sgd, loss=loss, compile=False, outputs=how == "outputs")
    run = step.accumulate if how == "accumulate" else step
    run(**batch)
    model.second.router.weight.data.fill_(torch.nan)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RunError, match=r"router of second gives weights that are not finite: 16 of 16\n  try"):
        run(**batch)
    assert all(torch.equal(x, before[name]) or x.isnan().all() for name, x in model.state_dict().items())


class Divided(Routed):
    """Divides what a layer of experts gives, after dropout."""

    def forward(self, x, by):
        return super().forward(F.dropout(x, 0.5)) / by


def test_a_loss_that_breaks_without_its_routers_is_left_to_the_user(monkeypatch):
    """The routers are looked at once for losses in a row, and draw no numbers that steps would have drawn."""
    x, one, zero = torch.randn(8, 4, dtype=torch.float64), torch.ones(()).double(), torch.zeros(()).double()
    losses = []
    for by in ((one, one, one, one), (one, zero, zero, one)):
        model = Divided(3)
        step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0), compile=False)
        looks, check = [], step.watch.check
        monkeypatch.setattr(step.watch, "check", lambda batch, looks=looks, check=check: looks.append(check(batch)))
        torch.manual_seed(0)
        losses.append([float(step(x=x, by=b)) for b in by])
        assert len(looks) == any(b == 0 for b in by)
    assert losses[0][::3] == losses[1][::3] and not any(map(math.isfinite, losses[1][1:3]))
    assert step.skipped == 2


def test_a_model_without_experts_is_not_watched():
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0))
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters()), loss=lambda model, x: model(x).sum(), compile=False
    )
    step(torch.full((2, 4), math.nan))
    assert not step.watch.is_on


def test_choices_of_experts_that_are_not_there():
    layer, batch = Layer(5), routed("few", 5)
    step = mycel.train_step(layer, torch.optim.SGD(layer.parameters(), lr=0.1), compile=False)
    assert step.expert_load(**batch)["the model"].tolist() == [0, 0, 0, *torch.bincount(batch["ids"].view(-1))[3:]]
    with pytest.raises(RunError, match="choices of experts that are not there: ids must be 0 to 4"):
        step.expert_load(**{**batch, "ids": batch["ids"] + 5})


class Idle(nn.Module):
    """LongCat's layer: of its experts the last have no weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.router = written_out("longcat_flash").double(), nn.Linear(12, 8, dtype=torch.float64)
        for p in self.layer.parameters():
            torch.nn.init.normal_(p, std=0.4)

    def forward(self, x):
        weights, ids = torch.topk(self.router(x).sigmoid(), 3)
        return self.layer(x, ids, weights).square().mean()


def test_the_load_of_experts_some_of_which_have_no_weights():
    model, x = Idle(), torch.randn(10, 12, dtype=torch.float64)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, expert_load=True)
    expected = torch.topk(model.router(x), 3).indices.view(-1).bincount(minlength=8)[:5]
    assert torch.equal(step.expert_load(x=x)["layer"], expected) and expected.sum() < 30
    step(x=x)
    assert torch.equal(step.expert_load()["layer"], expected.float())


class Inner(nn.Module):
    """A layer of experts inside of a model."""

    def __init__(self, **more: int) -> None:
        super().__init__()
        self.mixture = Layer(5, **more)

    def forward(self, x, ids, weights):
        return self.mixture(x, ids, weights)


@pytest.mark.parametrize("bad", [5, 261, -1])
@pytest.mark.parametrize("more", [{}, {"capacity": 2}], ids=str)
def test_a_step_names_the_layer_whose_choices_are_of_no_expert(bad, more):
    model, batch = Inner(**more), routed("random", 5)
    wrong = {**batch, "ids": batch["ids"].index_fill(0, torch.tensor(3), bad)}
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    step(**batch)
    says = r"mixture: choices of experts that are not there: ids must be 0 to 4\n  at        .*experts\.py:\d+\n  try"
    with pytest.raises(RunError, match=says):
        step(**wrong)
    with pytest.raises(RunError, match=r"mycel\.experts: choices of experts that are not there"):
        model(**wrong)


def test_ranks_name_the_layer_whose_choices_are_of_no_expert():
    batch, mesh = routed("random", 5, chosen=1), Mesh(ep=2)
    one = OneDevice.of(Inner(), batch)
    distributed = one.under(Plan(mesh, {f"mixture.{name}": layout for name, layout in SPLIT.items()}, ["ep"]))
    assert "exchange_rows" in operators(distributed.local)
    values = start_values(one)
    next(x for x in values if x.dtype == torch.int64 and x.ndim == 2)[3] = 5
    parts = [spread_out(x, layout, mesh) for x, layout in zip(values, distributed.inputs, strict=True)]
    with pytest.raises(RunError, match="mixture: choices of experts that are not there"):
        simulate(distributed.local, mesh, parts)


@pytest.mark.parametrize("name", ["mixtral", "phimoe", "llama4"])
def test_choices_of_a_topk_need_no_check(name):
    model = family(name)
    program = mycel.capture(lambda ids: model(input_ids=ids, use_cache=False).logits, text()["input_ids"])
    assert "experts" in operators(program) and "assert_true" not in operators(program)


@pytest.mark.parametrize("ends", [[3, 3, 6], [3, 2, 8], [3, 5, 9]])
def test_counts_that_do_not_add_up(ends):
    """Of rows times matrices forward, and of products of rows; the layer is named."""
    model, x, wrong = OuterGroups(), torch.randn(8, 16), torch.tensor(ends, dtype=torch.int32)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    step(x, torch.tensor([3, 3, 8], dtype=torch.int32))
    says = r"inner: counts of groups that do not add up to 8 rows\n  at        .*test_expert_load\.py:\d+\n  try"
    with pytest.raises(RunError, match=says):
        step(x, wrong)
    with pytest.raises(RunError, match=r"grouped_mm: counts of groups that do not add up to 8 rows"):
        mycel.jit(lambda x, ends: nn.functional.grouped_mm(x.T, x, offs=ends))(x, wrong)


class GroupedResidual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 16, 16))

    def forward(self, x, ends):
        return torch.tanh(nn.functional.grouped_mm(torch.sin(x), self.w, offs=ends)) + x


def test_layers_whose_counts_are_checked_stay_one_block():
    layers = nn.ModuleList(GroupedResidual() for _ in range(3))

    def forward(x, ends):
        for layer in layers:
            x = layer(x, ends)
        return x

    x = torch.randn(8, 16)
    program = mycel.capture(forward, x, torch.tensor([3, 3, 8], dtype=torch.int32))
    assert [eqn.op.name for eqn in program.main.eqns].count("call") == 3 and len(program.blocks) == 2
    with pytest.raises(RunError, match=r"\*: counts of groups that do not add up"):
        mycel.jit(forward)(x, torch.tensor([3, 3, 6], dtype=torch.int32))


class Groups(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, x, ends):
        return nn.functional.grouped_mm(x, self.weight, offs=ends)


class OuterGroups(nn.Module):
    """Products of groups of rows, inside of a model."""

    def __init__(self):
        super().__init__()
        self.inner = Groups()

    def forward(self, x, ends):
        return self.inner(x, ends).square().mean()


@pytest.mark.parametrize("counts", [[3, 0, 3], [9, 0, -1]])
def test_kernels_of_groups_check_their_counts(counts):
    with pytest.raises(RunError, match=r"counts of groups that do not add up: \[.*\] are \d of 8 rows"):
        sizes_of_groups(torch.tensor(counts), 8)


# -- experts change places


def test_experts_are_balanced_over_ranks():
    """Any loads and numbers of experts: nobody is lost, each rank keeps its number, the busiest never gets more, and
    equal pairs end up apart."""
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes = torch.randint(1, 5, (int(torch.randint(2, 5, (), generator=g)),), generator=g).tolist()
        load = (torch.rand(sum(sizes), generator=g) ** 4 * 100).tolist()
        order = balanced(load, sizes)
        assert sorted(order) == list(range(len(load)))
        assert max(by_rank([load[i] for i in order], sizes)) <= max(by_rank(load, sizes))
    assert balanced([90, 80, 5, 6], [2, 2]) == [0, 2, 1, 3]
    assert balanced([1, 1, 1, 1], [2, 2]) == [0, 1, 2, 3]


def test_groups_of_experts_stay_together():
    """Whole groups go to ranks that have several, experts of one to ranks that share it."""
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        group, groups, ranks = (2 ** int(torch.randint(1, 4, (), generator=g)) for _ in range(3))
        load = (torch.rand(group * groups, generator=g) ** 4 * 100).tolist()
        sizes = [len(load) // ranks] * ranks if len(load) >= ranks else [1] * len(load)
        order = balanced(load, sizes, group)
        assert sorted(order) == list(range(len(load)))
        assert all(len({k // group for k in order[i : i + group]}) == 1 for i in range(0, len(order), group))
        assert max(by_rank([load[i] for i in order], sizes)) <= max(by_rank(load, sizes))
    assert balanced([9, 0, 8, 0, 1, 0, 1, 0], [4, 4], 2) == [0, 1, 6, 7, 2, 3, 4, 5]
    assert balanced([9, 8, 1, 0, 7, 6, 0, 1], [2, 2, 2, 2], 4) == [0, 3, 1, 2, 4, 6, 5, 7]
    assert balanced([9, 8, 1, 0, 7, 6], [4, 2], 3) == [0, 1, 2, 3, 4, 5]  # a rank has parts of two


PLACED: dict[str, tuple[dict[str, Any], int]] = {
    "olmoe": ({}, 1),
    "gpt_oss": ({}, 1),
    "llama4": ({}, 1),
    "deepseek_v2": ({"topk_method": "group_limited_greedy", "first_k_dense_replace": 0}, 2),
    "deepseek_v3": ({"first_k_dense_replace": 0}, 2),
}


def after_moving(name, order):
    """Losses of three steps, and of three between which experts changed places."""
    more, group = PLACED[name]
    models = [quiet(family(name, **more).double()) for _ in range(2)]
    steps = [mycel.train_step(m, torch.optim.AdamW(m.parameters(), lr=1e-2), compile=False) for m in models]
    losses = [[float(step(**text()))] for step in steps]
    for layer in expert_layers(steps[0]._captured.program):
        assert not layer.fixed and layer.group == group
        steps[0].state.reorder({name: (dim, order) for name, dim in layer.tensors.items()})
    moved, stayed = (next(p for n, p in m.named_parameters() if n.endswith("experts.down_proj")) for m in models)
    assert torch.equal(moved[1], stayed[order[1]]) and not torch.equal(moved[1], stayed[1])
    for _ in range(2):
        for step, own in zip(steps, losses, strict=True):
            own.append(float(step(**text())))
    return losses


@pytest.mark.parametrize("name", PLACED)
def test_experts_change_places_and_nothing_else_changes(name):
    """With the rows of their routers, biases and optimiser state: losses go on as if they had not."""
    moved, stayed = after_moving(name, (2, 0, 3, 1) if PLACED[name][1] == 1 else (3, 2, 0, 1))
    assert moved == pytest.approx(stayed, rel=1e-6)


@pytest.mark.parametrize("name", [name for name, (_, group) in PLACED.items() if group > 1])
def test_experts_in_other_groups_would_be_others(name):
    moved, stayed = after_moving(name, (2, 0, 3, 1))
    assert moved != pytest.approx(stayed, rel=1e-6)


class Grouped(nn.Module):
    """Experts chosen in 2 groups of 3, by what `best` makes of the scores of a group."""

    def __init__(self, best):
        super().__init__()
        self.best, self.router, self.weigh = best, nn.Linear(4, 6), nn.Parameter(torch.rand(3))
        self.layer, self.of_group = Layer(6), nn.Parameter(torch.rand(2))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        best = self.best(self, scores.view(-1, 2, 3))
        mask = torch.zeros_like(best).scatter(1, best.topk(1)[1], 1.0)
        allowed = scores.masked_fill(mask.unsqueeze(-1).expand(-1, 2, 3).reshape(scores.shape) == 0, 0.0)
        weights, ids = allowed.topk(2)
        return self.layer(x, ids, weights)


BEST = {
    "sums": (lambda self, x: x.sum(-1), ""),
    "a function of each": (lambda self, x: x.exp().mul(2).amax(2), ""),
    "weighed by place": (lambda self, x: (x * self.weigh).sum(-1), "in groups"),
    "products": (lambda self, x: x @ self.weigh, "in groups"),
    "the first of each": (lambda self, x: x[:, :, 0], "in groups"),
    "a weight of each group": (lambda self, x: x.sum(-1) + self.of_group, "a row for each of 2"),
    "the best one's place": (lambda self, x: x.sum(-1) + x.argmax(-1), "in groups"),
}


@pytest.mark.parametrize("how", BEST)
def test_groups_are_those_whose_order_does_not_matter(how):
    best, why = BEST[how]
    (layer,) = expert_layers(mycel.capture(Grouped(best).double(), torch.randn(5, 4).double()))
    assert (why in layer.fixed and layer.group == 1) if why else (not layer.fixed and layer.group == 3)


def test_experts_that_are_not_treated_alike_stay():
    model = family("phimoe")
    program = mycel.capture(lambda ids: model(input_ids=ids, use_cache=False).logits, text()["input_ids"])
    assert all("exponential makes a row for each" in layer.fixed for layer in expert_layers(program))


def test_experts_that_the_batch_chooses_stay():
    layer, batch = Layer(5), routed("random", 5)
    (experts,) = expert_layers(mycel.capture(layer, *batch.values()))
    assert "who is chosen is given" in experts.fixed
