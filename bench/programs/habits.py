"""Habits of Python and PyTorch: logs, closures, updates in place, branches, masks."""

from __future__ import annotations

import torch
from programs.entry import IDS, IMG, ROWS, X, net
from torch import nn
from torch.nn import functional as F


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def keeps_a_log(m, x):
    h = m.linear(x)
    m.log = {"mean": h.mean().item(), "largest": h.max().item()}
    return h.square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def appends_to_a_list(m, x):
    if not hasattr(m, "losses"):
        m.losses = []
    loss = m.linear(x).square().mean()
    m.losses.append(loss.detach().item())
    return loss


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def running_average(m, x):
    loss = m.linear(x).square().mean()
    m.average = 0.9 * getattr(m, "average", 0.0) + 0.1 * loss.item()
    return loss


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def stops_at_nan(m, x):
    loss = m.linear(x).square().mean()
    if torch.isnan(loss).any() or not torch.isfinite(loss):
        raise RuntimeError("not a number")
    return loss


@net(lambda: {"layers": nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])}, X)
def skips_by_size(m, x):
    for layer in m.layers:
        y = layer(x)
        if y.abs().mean() > 0.2:
            x = x + y
    return x.square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def dict_of_outputs(m, x):
    out = {"h": m.linear(x), "parts": [x * 2, (x, None)]}
    out["loss"] = sum(t.square().mean() for t in (out["h"], out["parts"][0], out["parts"][1][0]))
    return out["loss"]


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def named_results(m, x):
    from collections import namedtuple

    pair = namedtuple("Pair", "mean spread")(m.linear(x).mean(1), m.linear(x).std(1))
    return (pair.mean * pair.spread).square().mean() + pair._replace(mean=pair.spread).mean.mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def closures_and_lambdas(m, x):
    steps = [lambda t, k=k: torch.tanh(m.linear(t)) * k for k in (0.5, 1.0)]
    for step in steps:
        x = step(x)
    return x.square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def generator_expression(m, x):
    return torch.stack(tuple(m.linear(row).tanh() for row in x)).square().mean()


@net(lambda: {"w": nn.Parameter(torch.eye(6))}, X)
def in_place_everywhere(m, x):
    h = x @ m.w
    h += 1
    h[:, 0] *= 2
    h[1:3].clamp_(min=0)
    h.t()[2].add_(0.5)
    h.sub_(h.mean())
    return h.square_().mean()


@net(lambda: {"conv": nn.Conv2d(4, 4, 3, padding=1)}, IMG)
def channels_last(m, x):
    return m.conv(x.to(memory_format=torch.channels_last)).contiguous().view(2, -1).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def no_grad_inside(m, x):
    with torch.no_grad():
        scale = m.linear(x).norm()
    with torch.set_grad_enabled(True):
        h = m.linear(x)
    return (h / (scale + 1)).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def mixed_precision_inside(m, x):
    with torch.autocast("cpu", enabled=False):
        return m.linear(x).to(torch.float64).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, ROWS)
def rows_of_each_class(m, x):
    labels, loss = torch.arange(8) % 3, 0.0
    for c in labels.unique():
        loss = loss + m.linear(x[labels == c]).mean(0).square().sum()
    return loss


@net(lambda: {"linear": nn.Linear(6, 3)}, ROWS)
def rows_of_each_guess(m, x):
    guess, loss = m.linear(x).argmax(1), 0.0
    for c in range(3):
        if (guess == c).any():
            loss = loss + m.linear(x[guess == c]).square().sum()
    return loss / len(x)


@net(lambda: {"linear": nn.Linear(6, 3)}, ROWS)
def balanced_sum(m, x):
    p = m.linear(x).softmax(1)
    sure = p.max(1).values > 0.5
    n = sure.sum().item()
    return p[sure].log().sum() / max(n, 1)


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def chunks_in_a_loop(m, x):
    return torch.cat([m.linear(part) for part in x.split(2)]).square().mean() + sum(
        part.mean() for part in torch.tensor_split(x, 3, dim=1)
    )


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def while_with_a_counter(m, x):
    n = 0
    while True:
        x = m.linear(x).tanh()
        n += 1
        if n >= 3 or x.norm() < 1e-3:
            break
    return x.square().mean() * n


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def properties_and_statics(m, x):
    class Helper:
        def __init__(self, linear):
            self.linear = linear

        @property
        def weight(self):
            return self.linear.weight

        @staticmethod
        def square(t):
            return t * t

        def __call__(self, t):
            return self.square(t @ self.weight)

    return Helper(m.linear)(x).mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def einsum_and_tensordot(m, x):
    a = torch.einsum("bi,ij,bj->b", x, m.linear.weight, x)
    b = torch.tensordot(x, m.linear.weight, dims=([1], [0]))
    return a.square().mean() + torch.einsum("...i,...i", b, b).mean()


@net(lambda: {"table": nn.Parameter(torch.randn(20, 8))}, IDS)
def lookups(m, ids):
    first = m.table[ids]
    second = torch.gather(m.table, 0, ids.view(-1, 1).expand(-1, 8)).view_as(first)
    third = F.one_hot(ids, 20).to(first.dtype) @ m.table
    return (first + second * third).square().mean()


@net(lambda: {"table": nn.Embedding(20, 8)}, IDS)
def masks_of_padding(m, ids):
    mask = ids.ne(0)
    h = m.table(ids) * mask.unsqueeze(-1)
    return (h.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)).square().mean()


@net(lambda: {"table": nn.Embedding(20, 8), "head": nn.Linear(8, 20)}, IDS)
def masked_language_model(m, ids):
    chosen = ids % 3 == 0
    logits = m.head(m.table(ids.masked_fill(chosen, 1)))
    return F.cross_entropy(logits[chosen], ids[chosen])


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def second_derivatives(m, x):
    x = x.detach().requires_grad_(True)
    energy = torch.tanh(m.linear(x)).sum()
    force = -torch.autograd.grad(energy, x, create_graph=True)[0]
    return (force - x).square().mean() + 0.1 * energy.square()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def hessian_trace(m, x):
    def f(v):
        return torch.tanh(m.linear(v)).sum()

    return torch.func.vmap(lambda v: torch.func.hessian(f)(v).diagonal().sum())(x).square().mean()


@net(lambda: {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}, X)
def two_losses(m, x):
    h = m.a(x)
    return m.b(h.detach()).square().mean() + (m.b(h) - x).abs().mean() if h.shape[0] > 2 else h.sum()


@net(lambda: {"linear": nn.Linear(6, 6), "ema": torch.zeros(6)}, X)
def moving_statistics(m, x):
    h = m.linear(x)
    if m.training:
        m.ema = 0.9 * m.ema + 0.1 * h.detach().mean(0)
    return (h - m.ema).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def sorted_rows(m, x):
    h = m.linear(x)
    order = h.norm(dim=1).argsort(descending=True)
    return (h[order] * torch.arange(4, dtype=h.dtype)[:, None]).square().mean() + h.sort(0).values[0].sum()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def quantiles(m, x):
    h = m.linear(x)
    return h.quantile(0.3, dim=0).square().sum() + h.median() + h.kthvalue(2, 0).values.sum() + h.logcumsumexp(0).mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def meshgrids(m, x):
    i, j = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
    bias = ((i - j).abs() < 2).to(x.dtype)
    return (m.linear(x) * bias).square().mean() + torch.trapezoid(m.linear(x), dx=0.1).mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def bisection(m, x):
    h = m.linear(x)
    low, high = h.min(1).values - 1, h.max(1).values
    for _ in range(25):
        middle = (low + high) / 2
        above = (h - middle[:, None]).clamp(min=0).sum(1) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (h - low.detach()[:, None]).clamp(min=0).square().mean()
