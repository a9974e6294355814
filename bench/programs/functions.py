"""Functions as one writes them by hand, of two layers and a vector: control flow, solvers, other libraries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Written(nn.Module):
    """A program as one writes it by hand: f(x, layers of its own)."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.w = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.linspace(-1, 1, 6))
        self.how, self.seen, self.history = forward, 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


def adaptive_steps(m: Written, x: torch.Tensor) -> torch.Tensor:
    h, step = m.a(x), 0
    while h.abs().max() > 0.2 and step < 20:
        h, step = h - 0.1 * torch.tanh(m.b(h)), step + 1
    return h.square().mean()


def numpy_inside(m: Written, x: torch.Tensor) -> torch.Tensor:
    order = torch.from_numpy(m.a(x).detach().numpy().argsort(axis=1).copy())
    return m.b(m.a(x).gather(1, order)).square().mean()


def scipy_inside(m: Written, x: torch.Tensor) -> torch.Tensor:
    from scipy.optimize import linear_sum_assignment

    cost = torch.cdist(m.a(x), m.b(x))
    rows, cols = linear_sum_assignment(cost.detach().numpy())
    return cost[torch.from_numpy(rows), torch.from_numpy(cols)].mean()


def by_item(m: Written, x: torch.Tensor) -> torch.Tensor:
    return m.b(x).square().mean() * (2.0 if m.w.sum().item() > -1 else 3.0)


def masked_assignment(m: Written, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x).clone()
    y[y > 0] = torch.sin(y[y > 0])
    return m.b(y).square().mean()


def masked_mean(m: Written, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    return h[h > 0].mean() + m.b(h).square().mean()


def mask_of_batch(m: Written, x: torch.Tensor) -> torch.Tensor:
    return m.b(m.a(x)[x > 0]).square().mean() if False else m.a(x)[x[:, 0] > -9].square().mean()


def gradient_penalty(m: Written, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = m.b(torch.tanh(m.a(x))).sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    return (g.norm(dim=1) - 1).square().mean()


def pinn(m: Written, x: torch.Tensor) -> torch.Tensor:
    t = x[:, :1].clone().requires_grad_()
    u = torch.tanh(m.a(t.expand(-1, 6))).sum(1, keepdim=True)
    (du,) = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)
    (ddu,) = torch.autograd.grad(du, t, torch.ones_like(du), create_graph=True)
    return (ddu + u).square().mean()


def per_sample_gradients(m: Written, x: torch.Tensor) -> torch.Tensor:
    from torch.func import functional_call, grad, vmap

    params = dict(m.a.named_parameters())
    g = vmap(grad(lambda p, r: functional_call(m.a, p, (r,)).square().sum()), (None, 0))(params, x)
    return sum(v.square().mean() for v in g.values())


def loop_of_lists(m: Written, x: torch.Tensor) -> torch.Tensor:
    outs, h = [], x
    for i in range(5):
        h = torch.tanh(m.a(h)) if i % 2 else m.b(h)
        outs.append(h)
    return torch.stack(outs).square().mean()


def topk_routing(m: Written, x: torch.Tensor) -> torch.Tensor:
    score, at = m.a(x).softmax(-1).topk(2)
    y = torch.zeros_like(x)
    for e in range(6):
        rows, place = torch.where(at == e)
        y = y.index_add(0, rows, m.b(x[rows]) * score[rows, place, None])
    return y.square().mean()


def unique_values(m: Written, x: torch.Tensor) -> torch.Tensor:
    labels = (x[:, 0] > 0).long()
    values, inverse = torch.unique(labels, return_inverse=True)
    sums = torch.zeros(len(values), 6, dtype=x.dtype).index_add(0, inverse, m.a(x))
    return sums.square().mean()


def sparse_product(m: Written, x: torch.Tensor) -> torch.Tensor:
    adjacency = torch.eye(4, dtype=x.dtype).to_sparse()
    return torch.sparse.mm(adjacency, m.a(x)).square().mean()


def packed(m: Written, x: torch.Tensor) -> torch.Tensor:
    rows = nn.utils.rnn.pack_padded_sequence(m.a(x)[:, :, None], torch.tensor([6, 3, 2, 1]), batch_first=True)
    return rows.data.square().mean()


def nested(m: Written, x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.as_nested_tensor([m.a(x)[0, :3], m.a(x)[1, :5]])
    return torch.nested.to_padded_tensor(rows, 0.0).square().mean()


def fft(m: Written, x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(m.a(x)) * torch.fft.rfft(m.w), n=6).square().mean()


def solver(m: Written, x: torch.Tensor) -> torch.Tensor:
    a = m.a.weight @ m.a.weight.T + 6 * torch.eye(6, dtype=x.dtype)
    y = torch.zeros_like(x)
    for _ in range(100):
        r = x - y @ a
        if r.norm() < 1e-6:
            break
        y = y + 0.1 * r
    return m.b(y).square().mean()


def try_views(m: Written, x: torch.Tensor) -> torch.Tensor:
    try:
        y = m.a(x).view(5, 5)
    except RuntimeError:
        y = m.a(x).view(8, 3)
    return y.square().mean()


def counts(m: Written, x: torch.Tensor) -> torch.Tensor:
    m.seen += 1
    m.history = m.a(x).detach()
    return m.b(m.a(x)).square().mean()


def dopri5(m: Written, x: torch.Tensor) -> torch.Tensor:
    from torchdiffeq import odeint

    times = torch.tensor([0.0, 0.5, 1.0], dtype=x.dtype)
    return odeint(lambda t, y: torch.tanh(m.a(y)), x, times, method="dopri5", rtol=1e-5).square().mean()


def rk4(m: Written, x: torch.Tensor) -> torch.Tensor:
    from torchdiffeq import odeint

    times = torch.tensor([0.0, 0.5, 1.0], dtype=x.dtype)
    return odeint(lambda t, y: torch.tanh(m.a(y)), x, times, method="rk4").square().mean()


def string_formatting(m: Written, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    m.history = f"{h.mean():.3f}"
    return h.square().mean()


def clamp_by_item(m: Written, x: torch.Tensor) -> torch.Tensor:
    h = m.a(x)
    return (h / max(float(h.norm()), 1.0)).square().mean()


def checkpointed(m: Written, x: torch.Tensor) -> torch.Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda y: torch.tanh(m.a(y)), x, use_reentrant=False).square().mean()


def sinkhorn(m: Written, x: torch.Tensor) -> torch.Tensor:
    k = torch.exp(-torch.cdist(m.a(x), m.b(x)))
    u = torch.ones(4, dtype=x.dtype)
    for _ in range(50):
        before, u = u, 1 / (k @ (1 / (k.T @ u)))
        if (u - before).abs().sum().item() < 1e-3:
            break
    return (u[:, None] * k).sum()


def sorted_by_python(m: Written, x: torch.Tensor) -> torch.Tensor:
    rows = sorted(m.a(x), key=lambda r: float(r.sum()))
    return sum((i + 1) * r.square().mean() for i, r in enumerate(rows))


HAND = [
    adaptive_steps, numpy_inside, scipy_inside, by_item, masked_assignment, masked_mean, mask_of_batch,
    gradient_penalty, pinn, per_sample_gradients, loop_of_lists, topk_routing, unique_values, sparse_product, packed,
    nested, fft, solver, try_views, counts, dopri5, rk4, string_formatting, clamp_by_item, checkpointed, sinkhorn,
    sorted_by_python,
]  # fmt: skip
