"""mycel.vmap, and torch.func inside captured code: what they give and its gradients are torch's, in strict captures."""

from __future__ import annotations

import copy

import pytest
import torch
from models import same
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vjp, vmap

import mycel

torch.manual_seed(0)
X = torch.randn(5, 3, dtype=torch.float64)
W = nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
P = dict(NET.named_parameters())
ALL = nn.ModuleDict({"net": NET})
ALL.register_parameter("w", W)


def decides(row, w):
    """Branches and loops on a row's own values."""
    if row.sum() > 0:
        row = row * w
    n = 0
    while row.abs().sum() > 1:
        row, n = row / 2, n + 1
    return row, row.sum() * n


FUNC = {
    "vmap": lambda x: vmap(lambda r, w: (w @ r).sin().sum(), in_dims=(0, None))(x, W),
    "vmap of a module": lambda x: vmap(NET)(x),
    "grad": lambda x: grad(lambda y: (y @ W).sin().sum())(x),
    "jacobian of each row": lambda x: vmap(jacrev(NET))(x),
    "jacfwd": lambda x: jacfwd(lambda r: (r @ W).sin())(x[0]),
    "hessian": lambda x: hessian(lambda r: NET(r).sum())(x[0]),
    "vjp": lambda x: vjp(NET, x)[1](torch.ones_like(x))[0],
    "functional_call": lambda x: functional_call(NET, {k: v * 2 for k, v in P.items()}, (x,)),
    "gradients of each row": lambda x: vmap(
        grad(lambda p, r: functional_call(NET, p, (r,)).square().sum()), in_dims=(None, 0)
    )(P, x)["0.weight"],
    "ensemble": lambda x: vmap(lambda p: functional_call(NET, p, (x,)))(
        {k: torch.stack([v, v * 2]) for k, v in P.items()}
    ),
}


def check(fn, mine=None):
    """The function and the gradient of its sum of squares."""
    mine = mine or fn
    same(mycel.jit(mine, strict=True)(X), fn(X))
    value, grads = mycel.value_and_grad(lambda x: mine(x).square().sum(), wrt=ALL, strict=True)(X)
    ALL.zero_grad()
    loss = fn(X).square().sum()
    loss.backward()
    same(value, loss.detach())
    same(grads, {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in ALL.named_parameters()})


@pytest.mark.parametrize("name", FUNC)
def test_torch_func_inside(name):
    check(FUNC[name])


@pytest.mark.parametrize("rows", [5, 20])
def test_rows_decide_for_themselves(rows):
    x = torch.randn(rows, 3, dtype=torch.float64)
    got = mycel.vmap(decides, (0, None))(x, W[0].detach())
    want = [decides(r, W[0].detach()) for r in x]
    same(got, tuple(torch.stack(column) for column in zip(*want, strict=True)))


def test_gradients_of_rows_that_decide():
    def plain(x):
        return torch.stack([decides(r, W[0])[1] for r in x])

    check(plain, lambda x: mycel.vmap(lambda r: decides(r, W[0])[1])(x))


def test_dims_of_arguments_and_results():
    def fn(a, b):
        return a @ b, a.sum()

    a, b = torch.randn(3, 5, 4), torch.randn(4, 2)
    same(mycel.vmap(fn, (1, None))(a, b), torch.func.vmap(fn, (1, None))(a, b))
    same(mycel.vmap(lambda r: r * 2, 1, 1)(a), a * 2)
    nested = mycel.vmap(mycel.grad(lambda r: (r**3).sum()))
    same(nested(X), 3 * X**2)
    with pytest.raises(ValueError, match="in_dims has 1"):
        mycel.vmap(fn, (0,))(a, b)


def test_a_skeleton_without_data_says_nothing_of_the_device():
    """torch.func's tutorial: one module on the meta device, filled with the parameters of each model."""
    bare, stacked = copy.deepcopy(NET).to("meta"), {k: torch.stack([v, v * 2]).detach() for k, v in P.items()}

    def loss(params, x):
        y = vmap(lambda p: functional_call(bare, p, (x,)))(params)
        return y.var(0).mean() + (y.mean(0) - 1).square().mean()

    leaves = {k: v.clone().requires_grad_() for k, v in stacked.items()}
    loss(leaves, X).backward()
    same(mycel.grad(loss)(stacked, X), {k: v.grad for k, v in leaves.items()})


def test_rows_that_index():
    """x[i] where each row has an i of its own."""
    x, w = torch.arange(12.0).reshape(4, 3), torch.tensor([1.0, -2.0, 3.0])
    for fn in (
        lambda x: torch.vmap(lambda i: x[i] @ w)(torch.tensor([0, 3])),
        lambda x: torch.vmap(lambda row, i: row[i] * w[i])(x[:3], torch.arange(3)),
    ):
        assert torch.equal(mycel.jit(fn, strict=True)(x), fn(x))
