"""Rows that a mask chooses are all rows of which some count: the same values and gradients as torch's, for any mask."""

from __future__ import annotations

import warnings

import pytest
import torch
from distributing import OneDevice, step_equals
from torch import nn
from torch.nn import functional as F

import mycel
from mycel.capture.facts import MOST
from mycel.errors import CaptureError
from mycel.ir import Mesh
from mycel.plan import Plan

HEAD = nn.Linear(4, 3).double()
WEIGHT = nn.Parameter(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
CLASSES = torch.arange(6) % 3
THRESHOLDS = {"some": 0.0, "all": -9.0, "none": 9.0}


def elements(h, t):
    y = h.clone()
    y[h > t] = torch.log(h[h > t] - t)
    return y.square().sum()


def elements_added(h, t):
    y = h.clone()
    y[h > t] += torch.sqrt(h[h > t] - t)
    return y.square().sum()


def reductions(h, t):
    chosen = h[h > t]
    return chosen.sum() + 2 * (chosen**2).sum() + chosen.norm() + chosen.abs().sum()


def averages(h, t):
    chosen = h[h > t]
    return chosen.mean() + chosen.var() + chosen.std() + chosen.max() + chosen.min() + torch.exp(chosen).prod()


def rows_of_a_layer(h, t):
    return HEAD(h[h[:, 0] > t]).square().sum()


def row_reductions(h, t):
    chosen = h[h.sum(1) > t]
    return (chosen.softmax(1).amax(1) * chosen[:, 1]).sum() + chosen.mean(0).square().sum() + chosen.std(0).sum()


def losses(h, t):
    keep = h[:, 0] > t
    return F.cross_entropy(HEAD(h[keep]), CLASSES[keep]) + F.mse_loss(h[keep], 2 * h[keep])


def loss_sums(h, t):
    keep = h[:, 0] > t
    return F.nll_loss(HEAD(h[keep]).log_softmax(1), CLASSES[keep], reduction="sum") + F.l1_loss(
        h[keep], h[keep] * 2, reduction="sum"
    )


def flattened(h, t):
    return h[h[:, 1] > t].reshape(-1).square().sum() + torch.masked_select(h, h > t).view(-1).abs().sum()


def chosen_twice(h, t):
    once = h[h[:, 0] > t]
    return once[once[:, 1] > 0].square().sum()


def places(h, t):
    rows, columns = torch.where(h > t)
    y = torch.zeros_like(h).index_add(0, rows, h[rows] * h[rows, columns, None])
    return y.square().sum()


def written_at_places(h, t):
    y, rows = h.clone(), (h[:, 0] > t).nonzero().squeeze(1)
    y[rows] = torch.sin(h[rows])
    return y.square().sum()


def added_at_places(h, t):
    rows = (h[:, 0] > t).nonzero().squeeze(1)
    return torch.zeros_like(h).index_put((rows,), h[rows] ** 2, accumulate=True).sum()


def experts(h, t):
    score, at = h.softmax(-1).topk(2)
    y = torch.zeros(len(h), 3, dtype=h.dtype)
    for e in range(4):
        rows, place = torch.where(at == e)
        y = y.index_add(0, rows, HEAD(h[rows]) * score[rows, place, None])
    return y.square().sum()


def in_a_branch(h, t):
    keep = h[:, 0] > t
    return h[keep].mean() if keep.any() else h.sum() * 0


PROGRAMS = [
    elements, elements_added, reductions, rows_of_a_layer, loss_sums, flattened, chosen_twice, places,
    written_at_places, added_at_places, experts, in_a_branch,
]  # fmt: skip
OF_SOME = [averages, row_reductions, losses]  # torch has no number of nothing, or nan


def with_gradients(f, x):
    """The value, and gradients of x and all weights, zeros where there are none."""
    x = x.clone().requires_grad_()
    wrt = [x, WEIGHT, *HEAD.parameters()]
    value = f(x @ WEIGHT)
    grads = torch.autograd.grad(value, wrt, allow_unused=True)
    return value, *(torch.zeros_like(p) if g is None else g for p, g in zip(wrt, grads, strict=True))


@pytest.mark.parametrize("which", THRESHOLDS)
@pytest.mark.parametrize("program", [*PROGRAMS, *OF_SOME], ids=lambda f: f.__name__)
def test_rows_are_those_of_torch(program, which):
    if which == "none" and program in OF_SOME:
        pytest.skip("torch has nothing to compare with")
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    t = THRESHOLDS[which]
    fast = mycel.jit(lambda h: program(h, t), strict=True)
    for a, b in zip(with_gradients(fast, x), with_gradients(lambda h: program(h, t), x), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


class Masked(nn.Module):
    """Rows are chosen by what the weights say: averaged, written back, added where they came from."""

    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.before(x)
        h[h > 0] = torch.log1p(h[h > 0])
        keep = h[:, 0] < 0.3
        at = keep.nonzero().squeeze(1)
        y = torch.zeros_like(h).index_add(0, at, self.behind(h[at]))
        return y.square().mean() + self.behind(h[keep]).abs().mean()


@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_ranks_agree_on_rows(plan):
    torch.manual_seed(0)
    model, x = Masked().double(), torch.randn(6, 4, dtype=torch.float64)
    split = {"before.weight": ["a", "-"], "behind.weight": ["-", "a"]}
    written = Plan(Mesh(a=2), {} if plan == "dp" else split, ["a"] if plan == "dp" else [])
    step_equals(OneDevice.of(model, {"x": x}), written)


@pytest.mark.parametrize(
    "program",
    [
        lambda h: h[h > 0],
        lambda h: h[h[:, 0] > 0].cumsum(0).sum(),
        lambda h: h[h > 0].sort().values.mean(),
        lambda h: torch.cov(h[h[:, 0] > 0].T).sum(),
        lambda h: F.cross_entropy(HEAD(h[h[:, 0] > 0]), HEAD(h[h[:, 0] > 0]).softmax(1)),
        lambda h: F.batch_norm(h[h[:, 0] > 0], None, None, training=True).square().sum(),
        lambda h: (h[h > 0][:3] * 2).sum(),
        lambda h: h[h[:, 0] > 0].mean() + h[h[:, 1] > 0].sum() + (h[h[:, 0] > 0] * h[h[:, 1] > 0]).sum(),
    ],
)  # fmt: skip
def test_what_mixes_rows_or_counts_them_is_refused(program):
    """Never wrong: strict=True refuses, and else it is an island."""
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with pytest.raises(CaptureError, match="shape that depends on the values"):
        mycel.jit(lambda x: program(x @ WEIGHT), strict=True)(x)


@pytest.mark.parametrize(
    "program",
    [
        lambda h: F.kl_div(h[h[:, 0] > 0], h[h[:, 0] > 0].sin().exp(), reduction="batchmean"),
        lambda h: h[h > 0].sum() / h[h > 0].numel() + h[h[:, 1] > 0].square().sum() / h[h[:, 1] > 0].shape[0],
        lambda h: h[h > 0].sum() / len(h[h > 0]),
        lambda h: skipped(h, 5.0),
        lambda h: skipped(h, 0.0),
    ],
)  # fmt: skip
def test_their_number_is_one_of_the_program(program):
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = WEIGHT.clone().requires_grad_()
    want = program(x @ weight)
    value, grad = mycel.value_and_grad(lambda w: program(x @ w))(WEIGHT)
    torch.testing.assert_close(value, want.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(want, weight)[0])
    mycel.jit(lambda x: program(x @ WEIGHT), strict=True)(x)


def places_in_turn(h):
    total = h.sum()
    for i in (h[:, 0] > 0).nonzero():
        total = total * 2 + h[i].sum()
    return total


def numbers_in_turn(h):
    total = h.sum()
    for i in torch.where(h[:, 0] > 0)[0].tolist():
        total = total * 2 + h[i].sum() * i
    return total


def values_in_turn(h):
    best, total = h.argmax(-1), h.sum()
    for i in best.unique():
        total = total * 2 + h[best == i].sum() * i
    return total * len(torch.unique(best))


@pytest.mark.parametrize("program", [places_in_turn, numbers_in_turn, values_in_turn])
@pytest.mark.parametrize("shift", [0.0, -9.0, 9.0])
def test_places_in_turn(program, shift):
    """All places, each of which may be there."""
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    want = program(x @ WEIGHT + shift)
    value, grad = mycel.value_and_grad(lambda x: program(x @ WEIGHT + shift), strict=True)(x.detach())
    torch.testing.assert_close(value, want.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(want, x)[0])


def test_two_shapes_of_a_mask_are_one():
    def f(h):
        h, mask, y = h.unflatten(0, (2, 3)), (h[:, 0] > 0).view(2, 3), torch.zeros(2, 3, 4, dtype=h.dtype)
        y[mask] += h.flatten(0, 1)[mask.flatten()].sin()
        return y.square().sum()

    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(mycel.jit(lambda x: f(x @ WEIGHT), strict=True)(x), f(x @ WEIGHT))


def skipped(h, least):
    """As loops over experts do it."""
    rows, out = torch.where(h[:, 0] > least)[0], h * 2
    if rows.numel() == 0:
        return out.sum()
    return out.index_add(0, rows, h[rows].sin()).sum()


def test_masks_that_keep_changing_need_no_further_program():
    """Masks of the batch are facts until they change too often; then their rows are all rows."""

    def mean(x, mask):
        return (x @ WEIGHT)[mask].square().mean()

    fast, x = mycel.jit(mean), torch.randn(32, 4, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(1, MOST + 6):
            mask = torch.arange(32) < n
            torch.testing.assert_close(fast(x, mask), mean(x, mask))
    assert len(fast.entries) == MOST + 1
    assert [str(w.message) for w in caught if "keep changing" in str(w.message)][1:] == []


def test_numbers_that_keep_changing_become_an_island():
    """Their types do not depend on the number; where they do, every number is a program of its own, as before."""

    def mean(x, mask):
        return (x @ WEIGHT)[: int(mask.sum())].square().mean()

    def rows(x, mask):
        return (x @ WEIGHT)[: int(mask.sum())]

    x = torch.randn(32, 4, dtype=torch.float64)
    for program, most in ((mean, MOST + 1), (rows, MOST)):
        fast = mycel.jit(program)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for n in range(1, MOST + 4):
                mask = torch.arange(32) < n
                torch.testing.assert_close(fast(x, mask), program(x, mask))
        assert len(fast.entries) == most
