"""Random numbers are good numbers: their moments, spread and independence; and torch's random functions draw what they
say."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import mycel
from mycel.ops import o

N = 1 << 18
KEYS = [torch.tensor(k) for k in (0, 1, -1, 1 << 40, 0x1234567890ABCDEF)]


def chi_square(counts, expected):
    """Standard deviations by which the spread of counts over bins is off."""
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    free = counts.numel() - 1
    return (statistic - free) / math.sqrt(2 * free)


def correlation(a, b):
    """In standard deviations."""
    a, b = (x.double().flatten() - x.double().mean() for x in (a, b))
    return ((a * b).mean() / (a.std() * b.std())).item() * math.sqrt(a.numel())


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_uniform_is_even(key):
    for dtype in (torch.float32, torch.float64):
        u = o.uniform(key, 0, shape=(N,), dtype=dtype)
        assert u.min() >= 0 and u.max() < 1
        assert abs(u.mean() - 0.5) < 4 / math.sqrt(12 * N) and abs(u.var() - 1 / 12) < 1e-3
        assert abs(chi_square(torch.histc(u, 1024, 0, 1).double(), N / 1024)) < 4
        pairs = (u[::2] * 32).long() * 32 + (u[1::2] * 32).long()
        assert abs(chi_square(torch.bincount(pairs, minlength=1024).double(), N / 2048)) < 4


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_every_bit_is_fair(key):
    bits = o.bits(key, 0, shape=(N,))
    share = torch.stack([(bits >> i) & 1 for i in range(64)]).double().mean(1)
    assert (share - 0.5).abs().max() < 4.5 * 0.5 / math.sqrt(N)
    assert bits.unique().numel() == N
    assert abs(chi_square(torch.bincount(bits & 1023, minlength=1024).double(), N / 1024)) < 4


def test_neighbours_are_independent():
    u = o.uniform(KEYS[0], 0, shape=(N + 4096,))
    others = [u[lag : lag + N] for lag in (1, 2, 3, 64, 1024, 4096)]
    others += [o.uniform(KEYS[0], 0, shape=(N,), site=s) for s in (1, 2, 3, 1000)]
    others += [o.uniform(torch.tensor(k), 0, shape=(N,)) for k in (1, 2, 3, 1 << 32, 1 << 63 - 1)]
    others += [o.uniform(o.fold_in(KEYS[0], data=d), 0, shape=(N,)) for d in range(4)]
    assert max(abs(correlation(u[:N], x)) for x in others) < 4
    assert max(abs(correlation((u[:N] - 0.5) ** 2, (x - 0.5) ** 2)) for x in others) < 4


def test_many_small_draws_are_even():
    """The first element of many keys, sites and folds: streams as a training run opens them."""
    first = {
        "keys": [o.uniform(torch.tensor(k), 0, shape=()) for k in range(8192)],
        "sites": [o.uniform(KEYS[0], 0, shape=(), site=s) for s in range(8192)],
        "folds": [o.uniform(o.fold_in(KEYS[0], data=d), 0, shape=()) for d in range(8192)],
    }
    for name, draws in first.items():
        u = torch.stack(draws)
        assert abs(chi_square(torch.histc(u, 64, 0, 1).double(), 8192 / 64)) < 4, name
        assert abs(correlation(u[1:], u[:-1])) < 4, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distributions_have_their_moments(dtype):
    def moments(x):
        return [
            x.mean().item(),
            x.var().item(),
            ((x - x.mean()) ** 3).mean().item(),
            ((x - x.mean()) ** 4).mean().item(),
        ]

    draw = {"shape": (4 * N,), "dtype": dtype}
    z = o.normal(KEYS[1], 0, **draw).double()
    assert (
        torch.allclose(torch.tensor(moments(z)), torch.tensor([0.0, 1.0, 0.0, 3.0]), atol=0.03)
        and 4.5 < z.abs().max() < 9
    )
    edges = torch.special.ndtr(z)
    assert abs(chi_square(torch.histc(edges, 1024, 0, 1), 4 * N / 1024)) < 4
    e = o.exponential(KEYS[1], 0, **draw).double()
    assert e.min() > 0 and torch.allclose(torch.tensor(moments(e)[:2]), torch.ones(2), atol=0.01)
    u = o.gumbel(KEYS[1], 0, **draw).double()
    assert torch.isfinite(u).all() and abs(u.mean() - 0.57722) < 0.01 and abs(u.var() - math.pi**2 / 6) < 0.02


def test_low_precision_stays_below_one():
    for dtype, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        u = o.uniform(KEYS[2], 0, shape=(N,), dtype=dtype).double()
        assert u.max() < 1 and (u * 2**digits).frac().abs().max() == 0 and abs(u.mean() - 0.5) < 0.01


def test_integers_and_permutations():
    x = o.randint(KEYS[3], 0, low=-3, high=8, shape=(N,))
    assert abs(chi_square(torch.bincount(x + 3, minlength=11).double(), N / 11)) < 4
    perms = torch.stack([o.permutation(torch.tensor(k), shape=(4,)) for k in range(4800)])
    assert (perms.sort(1)[0] == torch.arange(4)).all()
    orders = (perms * torch.tensor([64, 16, 4, 1])).sum(1).unique(return_counts=True)[1]
    assert orders.numel() == 24 and abs(chi_square(orders.double(), 200)) < 4


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_its_gradient_the_mask(p):
    y = o.dropout(torch.ones(N), KEYS[4], 0, p=p)
    kept = (y != 0).double().mean().item()
    assert abs(kept - (1 - p)) < 4 * math.sqrt(p * (1 - p) / N) and torch.allclose(y[y != 0], torch.tensor(1 / (1 - p)))
    (dx, _, _) = o.dropout.vjp(torch.ones(N), y, torch.ones(N), KEYS[4], 0, p=p)
    assert torch.equal(dx, y)


def test_parts_of_parts_draw_what_the_whole_draws():
    whole = o.bits(KEYS[1], 0, shape=(4, 6, 8), site=7)
    part = o.bits(KEYS[1], torch.tensor(2 * 48 + 3 * 8 + 4), shape=(2, 3, 4), strides=(48, 8, 1), site=7)
    assert torch.equal(part, whole[2:, 3:, 4:])


X = torch.ones(400, 30, 5)
TORCH = {
    "dropout": (lambda x: F.dropout(x, 0.3), 1.0, 0.3 / 0.7),
    "module": (torch.nn.Dropout(0.3).train(), 1.0, 0.3 / 0.7),
    "eval": (lambda x: F.dropout(x, 0.3, training=False), 1.0, 0.0),
    "inplace": (lambda x: F.dropout(x * 1, 0.3, inplace=True), 1.0, 0.3 / 0.7),
    "dropout1d": (lambda x: F.dropout1d(x, 0.3), 1.0, 0.3 / 0.7),
    "dropout2d": (lambda x: F.dropout2d(x[..., None], 0.3), 1.0, 0.3 / 0.7),
    "dropout3d": (lambda x: F.dropout3d(x[..., None, None], 0.3), 1.0, 0.3 / 0.7),
    "alpha_dropout": (lambda x: F.alpha_dropout(F.dropout(x) - x, 0.3, training=True), 0.0, 1.0),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(F.dropout1d(x) - x, 0.3, training=True), 0.0, 1.0),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.3, True)[1].float(), 0.7, 0.21),
    "rand": (lambda x: torch.rand(400, 30, 5) + torch.rand_like(x), 1.0, 1 / 6),
    "randn": (lambda x: torch.randn(400, 30, 5) + torch.randn_like(x), 0.0, 2.0),
    "randn complex": (lambda x: torch.randn(60000, dtype=torch.complex64).abs() ** 2, 1.0, 1.0),
    "randint": (
        lambda x: torch.randint(3, (400, 30)) + torch.randint(1, 4, (400, 30)) + torch.randint_like(x[..., 0], 2),
        3.5,
        19 / 12,
    ),
    "randperm": (lambda x: torch.randperm(1000).float() / 1000, 0.5, 1 / 12),
    "uniform_": (lambda x: torch.empty(60000).uniform_(-1, 3), 1.0, 16 / 12),
    "normal_": (lambda x: torch.empty(60000).normal_(2, 3), 2.0, 9.0),
    "normal": (
        lambda x: torch.normal(x * 2, 3) + torch.normal(1.0, x) + torch.normal(x, x) + torch.normal(0.0, 1.0, x.shape),
        4.0,
        12.0,
    ),
    "exponential_": (lambda x: torch.empty(60000).exponential_(2), 0.5, 0.25),
    "geometric_": (lambda x: torch.empty(60000).geometric_(0.5), 2.0, 2.0),
    "log_normal_": (lambda x: torch.empty(60000).log_normal_(0, 0.5).log(), 0.0, 0.25),
    "cauchy_": (lambda x: torch.empty(60000).cauchy_(1, 1).atan(), 0.4636, None),
    "random_": (lambda x: torch.empty(60000).random_(0, 4) + torch.empty(60000).random_(2), 2.0, 1.5),
    "bernoulli": (
        lambda x: torch.bernoulli(x * 0.3) + torch.empty(400, 30, 5).bernoulli_(0.3) + torch.bernoulli(x, 0.4),
        1.0,
        0.66,
    ),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([[1.0, 0.0, 3.0]]).expand(20000, 3), 1).float(),
        1.5,
        0.75,
    ),
    "multinomial again": (
        lambda x: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]), 20000, replacement=True).float(),
        1.5,
        0.75,
    ),
    "multinomial apart": (lambda x: torch.multinomial(x[..., 0], 3).sort(1)[0].diff().clamp(max=1).float(), 1.0, 0.0),
    "rrelu": (lambda x: F.rrelu(-x, 0.1, 0.3, training=True) + F.rrelu(-x, 0.1, 0.3), -0.4, 0.04 / 12),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x.log(), hard=True).argmax(-1).float(), 2.0, 2.0),
}


@pytest.mark.parametrize("name", TORCH)
def test_torchs_random_functions(name):
    """Captured, each draws from its distribution, and runs without opaque equations."""
    f, mean, var = TORCH[name]
    fast = mycel.jit(f)
    y = fast(X).double()
    assert y.dtype == torch.float64 and fast(X).dtype == f(X).dtype and y.shape == f(X).shape
    assert abs(y.mean() - mean) < 0.05 and (var is None or abs(y.var() - var) < 0.03 + 0.05 * var)
    assert "opaque" not in str(mycel.capture(f, X))
