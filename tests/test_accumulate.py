"""Batches in parts, down to one row each: loss and gradients are those of the whole batch, for torch's losses and for
sums and means by hand."""

from __future__ import annotations

import copy
import random
import warnings
from pathlib import Path

import pytest
import torch
from distributing import OneDevice, random_plan, start_values, step_equals, tensors
from golden import golden
from torch import nn
from torch.nn import functional as F

import mycel
from mycel.ir import Mesh, scan, walk
from mycel.launch import launch
from mycel.plan import Plan
from mycel.run import interpret

LOSSES = {
    "kl_div batchmean": lambda m, p, y: F.kl_div(F.log_softmax(p, -1), torch.softmax(y, -1), reduction="batchmean"),
    "kl_div sum": lambda m, p, y: F.kl_div(F.log_softmax(p, -1), torch.softmax(y, -1), reduction="sum"),
    "kl_div of logarithms": lambda m, p, y: F.kl_div(
        F.log_softmax(p, -1), F.log_softmax(y, -1), reduction="batchmean", log_target=True
    ),
    "sum by len": lambda m, p, y: ((p - y) ** 2).sum() / len(p),
    "sum by size": lambda m, p, y: (p - y).abs().sum() / p.shape[0],
    "sum by elements": lambda m, p, y: (p - y).abs().sum() / p.numel(),
    "sum times one by len": lambda m, p, y: (p - y).abs().sum() * (1 / len(p)),
    "mean of sums": lambda m, p, y: (p - y).abs().sum(-1).mean(),
    "sum of means": lambda m, p, y: (p - y).abs().mean(0).sum(),
    "sum of means by len": lambda m, p, y: (p - y).abs().mean(-1).sum() / len(p),
    "with the weights' squares": lambda m, p, y: F.mse_loss(p, y) + 0.1 * (m.weight**2).sum(),
    "with the weights' squares by len": lambda m, p, y: ((p - y) ** 2).sum() / len(p) + 0.1 * (m.weight**2).sum(),
    "with the weights' mean": lambda m, p, y: ((p - y) ** 2).sum() / len(p) - 0.1 * m.weight.mean(),
    "with the weights' squares and a slice": lambda m, p, y: (
        F.mse_loss(p, y) + 0.1 * (m.weight**2).sum() + 0.0 * p[:1].mean()
    ),
    "mse_loss": lambda m, p, y: F.mse_loss(p, y),
    "cross_entropy": lambda m, p, y: F.cross_entropy(p, y.argmax(-1)),
    "cross_entropy of sums": lambda m, p, y: F.cross_entropy(p, y.argmax(-1), reduction="sum") / len(p),
    "cross_entropy weighted": lambda m, p, y: F.cross_entropy(
        p, y.argmax(-1), torch.arange(1.0, 6.0), label_smoothing=0.1
    ),
    "cross_entropy of probabilities": lambda m, p, y: F.cross_entropy(p, torch.softmax(y, -1)),
    "multilabel_soft_margin_loss": lambda m, p, y: F.multilabel_soft_margin_loss(p, (y > 0).float()),
    "triplet_margin_loss": lambda m, p, y: F.triplet_margin_loss(p, y, y.flip(1)),
}


@pytest.mark.parametrize("rows, parts", [(8, 2), (8, 4), (4, 4), (2, 2), (3, 4)])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:accumulate")
def test_loss_and_gradient_are_those_of_the_whole_batch(name, rows, parts):
    torch.manual_seed(rows)
    model, x, y = nn.Linear(4, 5), torch.randn(rows, 4), torch.randn(rows, 5)
    wanted = LOSSES[name](model, model(x), y)
    slope = torch.autograd.grad(wanted, model.weight)[0]
    before = model.weight.detach().clone()
    step = mycel.train_step(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        lambda p, y: LOSSES[name](model, p, y),
        accumulate=parts,
        compile=False,
    )
    torch.testing.assert_close(step(x, y), wanted.detach())
    torch.testing.assert_close(before - model.weight.detach(), slope, rtol=1e-5, atol=1e-5)


# -- rows that meet


class Meets(nn.Module):
    """Losses whose rows are alone, and such whose rows meet."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.a, self.b = kind, nn.Linear(6, 5), nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
        self.norm, self.scale = nn.BatchNorm1d(5), nn.Parameter(torch.tensor(0.3))
        self.rank = nn.Parameter(torch.rand(9, 5))
        self.token, self.tower = nn.Parameter(torch.randn(1, 1, 6)), nn.TransformerEncoderLayer(6, 2, 8, 0.0)

    def forward(self, x, y=None):
        h, k = self.a(x), self.b(x)
        match self.kind:
            case "contrastive":
                return nn.functional.cross_entropy(h @ k.T, torch.arange(len(x)))
            case "batch norm":
                return nn.functional.cross_entropy(self.norm(h), y)
            case "centred":
                return ((h - h.mean(0)) * k).square().mean()
            case "softmax of rows":
                return (h.softmax(0) * k).sum()
            case "attention":
                s = torch.einsum("bi,bj->bij", h, k).softmax(-1)
                return nn.functional.cross_entropy((s @ k[..., None])[..., 0], y)
            case "towers":  # one encoder twice, rows along the second dim, a token of its own in each row
                token = self.token.expand(len(x), -1, -1)
                left, right = (torch.cat([token, z[:, None]], 1).transpose(0, 1) for z in (x, x.flip(1)))
                a, b = (F.normalize(self.tower(z)[0], dim=-1) for z in (left, right))
                scores, at = self.scale.exp() * a @ b.T, torch.arange(len(x))
                return (F.cross_entropy(scores, at) + F.cross_entropy(scores.T, at)) / 2
            case "dropped":
                return F.cross_entropy(F.dropout(h, 0.5) @ F.dropout(k, 0.3).T, torch.arange(len(x)))
            case "weighted":
                w = x[:, 0].exp()
                return (nn.functional.cross_entropy(h, y, reduction="none") * w).sum() / w.sum()
            case "mixed":  # rows meet early, but no parameter has a share in it
                order = y.argsort(stable=True)
                out = self.a(torch.lerp(x, x[order], 0.3))
                return F.cross_entropy(out, y) + F.cross_entropy(out, y[order])
            case "standardised":
                return F.cross_entropy(self.b((x - x.mean(0)) / x.std(0)), y)
            case "shuffled early and late":
                out = self.b(x.flip(0))
                return F.cross_entropy(out, y) + ((out - out.roll(1, 0)) * self.scale).square().mean()
            case "halves":
                left, right = h.chunk(2)
                return (left * right).mean() + (left - right).square().sum()
            case "neighbours":
                return (h[1:] - k[:-1]).square().mean()
            case "looked up backwards":
                return (h * k[torch.arange(len(x)) * -1 + len(x) - 1]).mean()
            case "stacked and cut":
                left, right = self.a(torch.cat([x, 2 * x])).chunk(2)
                return (left * right).square().mean()
            case "counted by place":
                return (F.cross_entropy(h, y, reduction="none") * torch.linspace(1, 2, len(x))).mean()
            case "a table by place":
                return (h * (self.rank[: len(x)] + k.detach())).square().mean()
            case "the last row":
                return F.cross_entropy(h[-1:] + k[-1:], y[-1:])
            case "mean prediction":
                p = (h + k).softmax(-1).mean(0)
                return (p * p.log()).mean()
            case "of totals":
                return torch.minimum((h - k).square().mean().sqrt(), k.square().mean())
            case "over one more":
                w = (y > 1).double()
                return (nn.functional.cross_entropy(h + k, y, reduction="none") * w).sum() / (w.sum() + 1)
            case "over a root":
                w = (y > 1).double()
                return (nn.functional.cross_entropy(h + k, y, reduction="none") * w).sum() / w.sum().sqrt()
            case "over a variance":
                return F.mse_loss(h[:, 0], k[:, 0]) / x[:, 0].var()
            case "rows in a sum of torch's":
                return h.logcumsumexp(0).mean() + k.square().mean()
            case "at its place":  # rows stay apart
                places = torch.arange(len(x))
                return -(h.log_softmax(-1)[places, y] + k.log_softmax(-1).reshape(-1)[places * 5 + y]).mean()
        return nn.functional.cross_entropy(h + k, y)


KINDS = [
    "contrastive", "batch norm", "centred", "softmax of rows", "attention", "weighted", "towers", "mixed",
    "standardised", "shuffled early and late", "halves", "neighbours", "looked up backwards", "stacked and cut",
    "at its place", "plain", "counted by place", "a table by place", "the last row", "mean prediction", "of totals",
    "over one more", "over a root", "over a variance", "rows in a sum of torch's",
]  # fmt: skip


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_meet_give_the_loss_of_the_whole_batch(kind, parts):
    """What each row is alone goes part by part, and again for its gradient; what the batch alone decides is there
    before the first part.  Parameters, buffers and loss are those of torch with the whole batch."""
    torch.manual_seed(0)
    model = Meets(kind).double()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 0.1), accumulate=parts, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 5, (8,))
            loss = twin(x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(step(x, y), loss.detach())
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))


def sequence_first(model, x, y):
    """x: time batch features; the batch is not what is split."""
    return F.cross_entropy(model(x).mean(0), y)


def rows_of_several_lengths(model, x, ends, y):
    """x: the rows of all sequences, one behind the other."""
    own = torch.bucketize(torch.arange(len(x)), ends, right=True)
    sums = torch.zeros(len(y), 5, dtype=x.dtype).index_add(0, own, model(x))
    return F.cross_entropy(sums / own.bincount(minlength=len(y))[:, None], y)


@pytest.mark.parametrize(
    "loss, sizes", [(sequence_first, [(6, 8, 6), (8,)]), (rows_of_several_lengths, [(12, 6), (3,), (3,)])]
)
def test_what_is_cut_is_no_row_of_the_batch(loss, sizes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    batch = [torch.randn(sizes[0], dtype=torch.float64), *(torch.tensor([4, 9, 12]) for _ in sizes[2:])]
    batch.append(torch.randint(0, 5, sizes[-1]))
    wanted = loss(model, *batch).detach()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 0.0), loss, accumulate=2, compile=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(step(*batch), wanted)


def loop_that_sums(model, x, y):
    return sum(F.cross_entropy(model(a), b) for a, b in zip(x, y, strict=True))


def loop_with_a_state(model, x, y):
    state, total = torch.zeros(5, dtype=x.dtype), 0.0
    for a, b in zip(x, y, strict=True):
        state = torch.tanh(state + model(a))
        total = total + F.cross_entropy(state, b)
    return total / len(x)


def loop_with_numbers(model, x, y, weights):
    return sum(F.cross_entropy(model(a), b) * w for a, b, w in zip(x, y, weights, strict=False)) / len(x)


def loop_of_a_mean(model, x, y):
    return sum(F.cross_entropy(model(a), b) for a, b in zip(x, y, strict=True)) / len(x)


@pytest.mark.parametrize(
    "loss, at_once", [(loop_that_sums, 1), (loop_with_a_state, 1), (loop_with_numbers, 1), (loop_of_a_mean, 0)]
)
def test_a_loop_over_rows_is_the_loss_of_the_whole_batch(loss, at_once):
    """A part has other equations than the batch: whether they give a share of its loss is tried; if not, the batch is
    computed at once, and it is said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    twin = copy.deepcopy(model)
    batch = [torch.randn(6, 6, dtype=torch.float64), torch.randint(0, 5, (6,))]
    batch += [[1.0, 2.0, 3.0, 0.5, 1.5, 2.5]] * (loss is loop_with_numbers)
    wanted = loss(twin, *batch)
    wanted.backward()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 1.0), loss, accumulate=2, compile=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.testing.assert_close(step(*batch), wanted.detach())
    assert sum("the batch is computed at once" in str(w.message) for w in said) == at_once == len(said)
    moved = {name: p - model.get_parameter(name) for name, p in twin.named_parameters()}
    torch.testing.assert_close(moved, {name: p.grad for name, p in twin.named_parameters()})


class Tokens(nn.Module):
    """A token that all rows get, in front of others."""

    def __init__(self, rows):
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.token, self.places = rows, nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(4, 6))
        self.mixed, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x, y):
        h = torch.cat([self.rows(self.token, x), x], 1) + self.places
        h = h + torch.softmax(self.mixed(h) @ h.mT, -1) @ h
        return F.cross_entropy(self.head(self.norm(h)[:, 0]), y)


ROWS = {
    "expand": lambda token, x: token.expand(len(x), -1, -1),
    "expand_as": lambda token, x: token.expand_as(x[:, :1]),
    "repeat": lambda token, x: token.repeat(len(x), 1, 1),
    "repeat_interleave": lambda token, x: token.repeat_interleave(len(x), 0),
    "broadcast_to": lambda token, x: torch.broadcast_to(token, (x.shape[0], 1, 6)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rows", ROWS)
def test_parts_of_one_row_are_the_same_program(rows, monkeypatch):
    """Where a batch gets a value for each row, a part of one row has it: nothing has to be tried, with data or
    without."""
    monkeypatch.setattr("mycel.step.gradients.shares_add_up", lambda *_: pytest.fail("the shares were tried"))
    model = Tokens(ROWS[rows]).double()
    twin = copy.deepcopy(model)
    batch = {"x": torch.randn(4, 3, 6, dtype=torch.float64), "y": torch.randint(0, 3, (4,))}
    program = OneDevice.of(copy.deepcopy(model), {k: v.to("meta") for k, v in batch.items()}, accumulate=4).unsharded
    assert any(eqn.op is scan for _, eqn in walk(program.program))
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 1.0), accumulate=4, compile=False)
    wanted = twin(**batch)
    wanted.backward()
    torch.testing.assert_close(step(**batch), wanted.detach())
    moved = {name: p - model.get_parameter(name) for name, p in twin.named_parameters()}
    torch.testing.assert_close(moved, {name: p.grad for name, p in twin.named_parameters()})


def test_code_for_the_whole_batch_alone_is_refused():
    model = nn.Linear(6, 4)
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda out: out.view(2, 4, 4).std(1).mean(), accumulate=2
    )
    with pytest.raises(mycel.errors.TrainError, match=r"accumulate=2: .* batch of 8 rows, and not for a part of 4"):
        step(torch.randn(8, 6))


@pytest.mark.parametrize("kind", ["contrastive", "towers", "batch norm", "mixed", "standardised"])
def test_rows_that_meet_on_ranks(kind):
    torch.manual_seed(0)
    model = Meets(kind).double()
    batch = {"x": torch.randn(8, 6, dtype=torch.float64), "y": torch.randint(0, 5, (8,))}
    one = OneDevice.of(model, batch, accumulate=2)
    step_equals(one, Plan(Mesh(dp=2), batch=["dp"]))
    step_equals(one, random_plan(tensors(model), 1, random.Random(kind), most=6))


def test_the_gradient_is_of_the_numbers_that_were_drawn():
    """Rows are computed twice, with the same dropout: the slope along the gradient is its square."""
    torch.manual_seed(0)
    model = Meets("dropped").double()
    one = OneDevice.of(model, {"x": torch.randn(8, 6, dtype=torch.float64)}, torch.optim.SGD(model.parameters(), 1.0),
                       accumulate=4)  # fmt: skip
    program, values = one.unsharded.program, start_values(one)
    at = {v.name: i for i, v in enumerate(program.inputs)}
    for v in program.inputs_of("hyper"):
        values[at[v.name]] = torch.tensor(float(program.role(v).name.startswith("lr")), dtype=v.dtype)
    moved = [i for name, i in at.items() if name in program.updates and values[i].is_floating_point()]
    outs = interpret(program, values)
    new = dict(zip(program.updates, outs[len(program.results) :], strict=True))
    gradient = {i: values[i] - new[program.inputs[i].name] for i in moved if values[i].ndim}
    square = sum(float(g.square().sum()) for g in gradient.values())
    losses = []
    for sign in (1, -1):
        near = [x + sign * 1e-5 * gradient[i] if i in gradient else x for i, x in enumerate(values)]
        losses.append(float(interpret(program, near)[0]))
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(square, rel=1e-5) and square > 1e-3


def test_the_whole_batch_is_looked_up_in_by_places_that_are_given():
    """Mixup: a permutation of the batch is an argument of the step."""

    def loss(model, x, y, order):
        out = model(torch.lerp(x, x[order], 0.3))
        return F.cross_entropy(out, y) + F.cross_entropy(out, y[order])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    batches = [(torch.randn(8, 6), torch.randint(0, 5, (8,)), torch.randperm(8)) for _ in range(2)]
    wanted = [loss(model, *batch).detach() for batch in batches]
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 0.0), loss, accumulate=4, compile=False)
    torch.testing.assert_close([step(*batch) for batch in batches], wanted)


def test_an_order_that_is_drawn_is_the_whole_batchs():
    """As many parts as one likes draw the same permutation, and so the same loss."""

    def loss(model, x, y):
        out = model(torch.lerp(x, x[torch.randperm(len(x))], 0.3))
        return F.cross_entropy(out, y)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    x, y, losses = torch.randn(8, 6), torch.randint(0, 5, (8,)), []
    for parts in (1, 2, 8):
        step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 0.0), loss, accumulate=parts, compile=False)
        torch.manual_seed(7)
        losses.append(step(x, y))
    torch.testing.assert_close(losses, losses[:1] * 3)
    assert not torch.isclose(losses[0], F.cross_entropy(model(x), y))


def test_rows_that_meet_early_are_told_of():
    """Where most parameters come after rows have met, nothing is gained: the loss is that of the parts, and it is
    said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, accumulate=2, compile=False
    )
    with pytest.warns(UserWarning, match="rows of the batch meet"):
        step(torch.randn(8, 6), torch.randint(0, 5, (8,)))


@pytest.mark.parametrize("sizes, parts", [((8, 6, 1), 4), ((12, 10, 7), 3), ((2, 3), 2), ((37,), 2)])
@pytest.mark.filterwarnings("ignore:accumulate=2 of a batch of 37 rows")
def test_a_smaller_last_batch(sizes, parts):
    """Rows that do not divide are split into the next number of parts that does; targets to be ignored weigh right."""
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 5), nn.Linear(4, 5)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, accumulate=parts, compile=False
    )
    for n in sizes:
        x, y = torch.randn(n, 4), torch.randint(0, 5, (n,))
        y[1::3] = -100
        loss = F.cross_entropy(twin(x), y)
        plain.zero_grad()
        loss.backward()
        plain.step()
        torch.testing.assert_close(step(x, y), loss.detach())
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))


def test_many_small_parts_are_told_of():
    model = nn.Linear(4, 5)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 0.1), F.mse_loss, accumulate=2, compile=False)
    with pytest.warns(UserWarning, match=r"2 of a batch of 19 rows.* 19 of 1\n  try       a batch of 18 rows"):
        step(torch.randn(19, 4), torch.randn(19, 5))


def test_accumulating_over_several_calls():
    """As one batch of all the rows; of calls of one size, as the loop everybody writes (loss / calls, backward)."""
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 5), nn.Linear(4, 5)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    step = mycel.train_step(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), F.cross_entropy, clip_norm=0.3, compile=False
    )
    for calls in (3, 1, 2):
        plain.zero_grad()
        rows = [4 + i for i in range(calls)]
        for n in rows:
            x, y = torch.randn(n, 4), torch.randint(0, 5, (n,))
            loss = F.cross_entropy(twin(x), y)
            (loss * n / sum(rows)).backward()
            torch.testing.assert_close(step.accumulate(x, y), loss.detach())
        nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        plain.step()
        step.apply()
        x, y = torch.randn(4, 4), torch.randint(0, 5, (4,))
        plain.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        plain.step()
        step(x, y)  # both ways go together
        torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-4, atol=1e-5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    step.accumulate(x * torch.inf, y)
    step.accumulate(x, y)
    step.apply()
    assert step.skipped == 1
    torch.testing.assert_close(dict(model.state_dict()), before)
    with pytest.raises(mycel.errors.TrainError, match=r"nothing to apply.*\n  try       step.accumulate"):
        step.apply()


@pytest.mark.parametrize("local", [False, True])
def test_a_step_before_gradients_are_applied_is_refused(local):
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 5), torch.randn(6, 4), torch.randint(0, 5, (6,))
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, compile=False)
    take = step.local(x, y) if local else step
    take(x, y)
    step.accumulate(x, y)
    step.accumulate(x, y)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(mycel.errors.TrainError) as error:
        take(x, y)
    golden("told_step_before_apply", str(error.value))
    step.evaluate(x, y)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    step.apply()
    assert step.steps == 2
    take(x, y)
    assert not torch.equal(before["weight"], model.weight)


WEIGHED = {
    "mean over labels that count": F.cross_entropy,
    "labels smoothed": lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1),
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "mean of squares": lambda out, y: (out - y[:, None]).pow(2).mean(),
    "sum over rows": lambda out, y: (out - y[:, None]).pow(2).sum() / len(y),
    "half of it": lambda out, y: 0.5 * F.cross_entropy(out, y),
    "masked mean": lambda out, y: (out.pow(2).sum(1) * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
    "two means over rows": lambda out, y: out.pow(2).mean() + (out - 1).abs().sum(1).mean(),
}


@pytest.mark.parametrize("kind", WEIGHED)
@pytest.mark.filterwarnings("error:accumulate")
def test_calls_of_unequal_size_are_one_batch(kind):
    """Whatever the loss is a mean over; twice, with other sizes the second time."""
    loss = WEIGHED[kind]
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 5), nn.Linear(4, 5)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, compile=False)
    for sizes in ((6, 2), (2, 6, 6, 3)):
        x, y = torch.randn(sum(sizes), 4), torch.randint(0, 5, (sum(sizes),))
        if kind.startswith(("mean over labels", "half")):
            y[1::3] = -100
        plain.zero_grad()
        loss(twin(x), y).backward()
        plain.step()
        for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
            torch.testing.assert_close(step.accumulate(a, b), loss(model(a), b).detach())
        step.apply()
        torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))


def test_calls_with_outputs():
    """What a loss returns besides weighs nothing."""

    def loss(out, y):
        return F.cross_entropy(out, y), {"accuracy": (out.argmax(-1) == y).float().mean()}

    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mycel.train_step(model, optimizer, loss, compile=False, outputs=True)
    twin, (x, y) = copy.deepcopy(model), (torch.randn(6, 4), torch.randint(0, 5, (6,)))
    for part in (slice(0, 4), slice(4, 6)):
        value, outputs = step.accumulate(x[part], y[part])
        torch.testing.assert_close(value, F.cross_entropy(twin(x[part]), y[part]).detach())
        assert outputs["accuracy"].shape == ()
    step.apply()
    F.cross_entropy(twin(x), y).backward()
    torch.testing.assert_close(model.weight, twin.weight - 0.1 * twin.weight.grad)


def test_a_call_without_labels_counts_for_nothing():
    model = nn.Linear(4, 5)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, compile=False)
    x, y = torch.randn(4, 4), torch.randint(0, 5, (4,))
    step.accumulate(x, y)
    step.accumulate(x, torch.full_like(y, -100))
    before = copy.deepcopy(model)
    step.apply()
    F.cross_entropy(before(x), y).backward()
    torch.testing.assert_close(model.weight, before.weight - 0.1 * before.weight.grad)


def test_means_over_different_things_are_told_of():
    def loss(out, y):
        return F.cross_entropy(out, y) + out.pow(2).mean()

    model = nn.Linear(4, 5)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, compile=False)
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, -100])
    step.accumulate(x, y)
    step.accumulate(x, torch.tensor([0, -100, -100, -100]))
    with pytest.warns(UserWarning, match="mean over several things"):
        step.apply()


@pytest.mark.slow
def test_calls_are_one_batch_on_ranks(tmp_path):
    """In two processes, under dp, ZeRO and tp, also of parameters in parts; hooks; what is refused is said alike."""
    child, env = str(Path(__file__).parent / "accumulate_child.py"), {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    assert launch([str(tmp_path)], 2, program=[child], env=env, logs=tmp_path / "logs") == 0
    texts = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert texts[0] == texts[1]
    golden("refusal_of_parts", texts[0])
