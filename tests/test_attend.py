"""Attention that is written out is found, as one operator with what was found of its mask, and computes the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import softmax

import mycel
from mycel.ir import check, walk
from mycel.run.interpret import interpret
from mycel.transform import attend

LENGTH = 64


def places():
    at = torch.arange(LENGTH)
    return at[:, None], at[None, :]


def causal(q, k, v, bias):
    row, column = places()
    s = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
    return softmax(s.masked_fill(column > row, float("-inf")), dim=-1) @ v


def lowest(q, k, v, bias):
    row, column = places()
    s = q @ k.transpose(-2, -1) / 3.0
    return softmax(torch.where(column <= row, s, torch.finfo(s.dtype).min), dim=-1) @ v


def window(q, k, v, bias):
    row, column = places()
    s = torch.einsum("bhqd,bhkd->bhqk", q, k)
    seen = (column <= row) & (column > row - 9)
    return torch.einsum("bhqk,bhkd->bhqd", softmax(s + torch.where(seen, 0.0, float("-inf")), dim=-1), v)


def heads_inside(q, k, v, bias):
    """Heads beside features, as they come out of a linear layer."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    p = softmax(torch.einsum("bkhd,bqhd->bhqk", k, q) * 0.3, dim=-1)
    return torch.einsum("bkhd,bhqk->bqhd", v, p)


def relative(q, k, v, bias):
    return softmax(bias + (q * 0.25) @ k.mT, dim=-1) @ v


def relative_and_causal(q, k, v, bias):
    row, column = places()
    s = (q @ k.mT + bias).masked_fill(column > row, float("-inf"))
    return softmax(s, dim=-1) @ v


def one_head(q, k, v, bias):
    return torch.bmm(softmax(torch.bmm(q[:, 0], k[:, 0].mT), dim=-1), v[:, 0])


def capped(q, k, v, bias):
    return softmax(torch.tanh(q @ k.mT / 5.0) * 5.0, dim=-1) @ v


def capped_and_causal(q, k, v, bias):
    """As Gemma 2 has it."""
    row, column = places()
    s = torch.tanh((q @ k.mT) * 0.2 / 3.0) * 3.0 + torch.where(column <= row, 0.0, float("-inf"))
    return softmax(s, dim=-1) @ v


FOUND = {
    capped: "free, cap 5.0",
    capped_and_causal: "causal, cap 3.0",
    causal: "causal",
    lowest: "causal",
    window: "(8, 0)",
    heads_inside: "free",
    relative: "mask",
    relative_and_causal: "mask",
    one_head: "free",
}


def scaled_behind(q, k, v, bias):
    return softmax((q @ k.mT + bias) * 2.0, dim=-1) @ v


def seen_by_others(q, k, v, bias):
    p = softmax(q @ k.mT, dim=-1)
    return p @ v + p.sum()


def rows_first(q, k, v, bias):
    return softmax(q @ k.mT, dim=-2) @ v


def capped_sums(q, k, v, bias):
    return softmax(torch.tanh(q @ k.mT / 5.0 + bias) * 5.0, dim=-1) @ v


def somewhat_low(q, k, v, bias):
    row, column = places()
    return softmax((q @ k.mT).masked_fill(column > row, -100.0), dim=-1) @ v


def narrowed(q, k, v, bias):
    return softmax((q @ k.mT).float(), dim=-1).to(v.dtype) @ v


OTHERS = [narrowed, scaled_behind, seen_by_others, rows_first, capped_sums, somewhat_low]


def operands(dtype=torch.float64):
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 2, LENGTH, 8, dtype=dtype) for _ in range(3))
    return q, k, v, torch.randn(2, LENGTH, LENGTH, dtype=dtype)


def structure(program):
    """What is known of the one attention equation of a program; "" where there is none."""
    equations = [e for _, e in walk(program) if e.op.name in ("attention", "sdpa")]
    if not equations:
        return ""
    (eqn,) = equations
    if eqn.inputs[3] is not None:
        return "mask"
    seen = "causal" if eqn.params.get("causal") else str(eqn.params.get("window", "free"))
    return f"{seen}, cap {eqn.params['cap']}" if "cap" in eqn.params else seen


@pytest.mark.parametrize("fn", [*FOUND, *OTHERS], ids=lambda f: f.__name__)
def test_attention_is_found_and_computes_the_same(fn):
    args = operands()
    fast = mycel.jit(fn)
    assert structure(fast.program(*args)) == FOUND.get(fn, "")
    assert torch.allclose(fast(*args), fn(*args), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fn", [*FOUND, *OTHERS], ids=lambda f: f.__name__)
def test_its_gradients(fn):
    args = [x.requires_grad_() for x in operands()]
    weights = torch.randn(fn(*args).shape, dtype=torch.float64)
    loss = lambda *xs: (fn(*xs) * weights).sum()
    theirs = torch.autograd.grad(loss(*args), args, allow_unused=True)
    ours = mycel.grad(loss, argnums=(0, 1, 2, 3))(*args)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, torch.zeros_like(a) if b is None else b, rtol=1e-8, atol=1e-8)


DROPPED = """
def main(q: f64[2,2,64,8], k: f64[2,2,8,64], v: f64[2,2,64,8], key: i64[]):
  s: f64[2,2,64,64] = matmul(q, k)
  p: f64[2,2,64,64] = softmax(s, dim=3)
  d: f64[2,2,64,64] = dropout(p, key, 0, p=0.3, site=2)
  y: f64[2,2,64,8] = matmul(d, v)
  return y
"""


def test_weights_are_dropped_by_the_same_numbers():
    program = mycel.Program.parse(DROPPED)
    fused = check(attend(program))
    assert [e.params["dropout"] for _, e in walk(fused) if e.op.name == "attention"] == [0.3]
    q, k, v, _ = operands()
    args = q[:2], k[:2].mT, v[:2], torch.tensor(5)
    (want,), (got,) = (interpret(p, args) for p in (program, fused))
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


def test_small_scores_stay():
    args = [x[..., :4, :] for x in operands()[:3]]
    plain = lambda q, k, v: softmax(q @ k.mT, dim=-1) @ v
    assert structure(mycel.jit(plain).program(*args)) == ""


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("low", [-1e4, -1e9, -math.inf, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_that_see_nothing_but_low_numbers(dtype, low, compiled):
    """Padding on the left: such rows look at everything, and their lse has no digits left for weights."""
    n = 256
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 8, dtype=dtype) for _ in range(3))
    keep = torch.ones(2, n, dtype=torch.bool)
    keep[1, :5] = low == -math.inf  # nothing at all would be NaN in torch
    lowest = torch.finfo(dtype).min if low is None else low

    def loss(q, k, v):
        seen = torch.ones(n, n, dtype=torch.bool).tril() & keep[:, None, None, :]
        mask = torch.full((2, 1, n, n), lowest, dtype=dtype).masked_fill(seen, 0.0)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(8) + mask).softmax(-1)
        return ((weights @ v) * torch.arange(8, dtype=dtype)).sin().sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    want = loss(*leaves)
    grads = torch.autograd.grad(want, leaves)
    both = mycel.value_and_grad(loss, argnums=(0, 1, 2))
    value, ours = (mycel.jit(both) if compiled else both)(q, k, v)
    close = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-9}
    assert torch.allclose(value, want, **close)
    for mine, theirs in zip(ours, grads, strict=True):
        assert torch.allclose(mine, theirs, **close)
