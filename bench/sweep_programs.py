"""Programs for `sweep.py`: layers of torch.nn, what one writes by hand, architectures in a few lines each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Regression(nn.Module):
    """Any module, its first result against zeros."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> torch.Tensor:
        out = self.inner(*args)
        out = out[0] if isinstance(out, tuple) else out
        return (out * torch.linspace(0.5, 1.5, out.shape[-1], dtype=out.dtype)).square().mean()


def layer(module: Callable[[], nn.Module], *args: torch.Tensor) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    return lambda: (Regression(module()), args)


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
SEQ = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
IMG = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(2))
MODULES: dict[str, Callable[[], Any]] = {
    "lstm": layer(lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True), SEQ),
    "gru": layer(lambda: nn.GRU(8, 6, batch_first=True), SEQ),
    "rnn": layer(lambda: nn.RNN(8, 6), SEQ),
    "lstm_cell": layer(lambda: nn.LSTMCell(6, 5), X),
    "encoder": layer(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2), SEQ
    ),
    "transformer": layer(lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True), SEQ, SEQ[:, :4]),
    "attention": layer(lambda: nn.MultiheadAttention(8, 2, batch_first=True), SEQ, SEQ, SEQ),
    "batch_norm_cumulative": layer(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)), X),
    "spectral_norm": layer(lambda: nn.utils.spectral_norm(nn.Linear(6, 4)), X),
    "spectral_norm_parametrization": layer(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), X),
    "weight_norm": layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), X),
    "orthogonal": layer(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 4)), X),
    "instance_norm": layer(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.InstanceNorm2d(4, affine=True)), IMG),
    "group_norm": layer(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), IMG),
    "conv_transpose": layer(lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), IMG),
    "adaptive_pool": layer(lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(3)), IMG),
    "max_unpool": layer(lambda: Unpool(), IMG),
    "embedding_bag": layer(lambda: nn.EmbeddingBag(10, 6, mode="sum"), torch.tensor([[1, 2], [3, 4]])),
    "bilinear": layer(lambda: nn.Bilinear(6, 6, 3), X, X),
    "prelu": layer(lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU(6)), X),
    "fake_quant": layer(lambda: nn.Sequential(nn.Linear(6, 6), torch.ao.quantization.FakeQuantize()), X),
    "scripted": layer(lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), X),
    "compiled": layer(lambda: torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh())), X),
    "lazy": layer(lambda: warmed(nn.LazyLinear(3), X), X),
}


class Unpool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, at = F.max_pool2d(self.conv(x), 2, return_indices=True)
        return F.max_unpool2d(y, at, 2)


def warmed(module: nn.Module, x: torch.Tensor) -> nn.Module:
    module(x)
    return module


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


# -- architectures


class Net(nn.Module):
    """Parts with names, and what is done with them."""

    def __init__(self, how: Callable[..., torch.Tensor], **parts: Any) -> None:
        super().__init__()
        self.how = how
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.how(self, *args)


ARCHITECTURES: dict[str, Callable[[], Any]] = {}


def net(parts: Callable[[], dict[str, Any]], *args: torch.Tensor) -> Callable[[Any], Any]:
    """Enter a function of a Net and these arguments as a program of its name."""

    def enter(how: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        ARCHITECTURES[how.__name__] = lambda: (Net(how, **parts()), args)
        return how

    return enter


def conv(i: int, o: int, stride: int = 1, groups: int = 1, k: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o), nn.ReLU())


ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
IDS = torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(4))
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 2], [1, 2, 3, 4, 5, 6, 7, 0, 4, 6]])
LENGTHS = torch.tensor([5, 3, 2])


@net(lambda: {"stem": conv(4, 8), "a": conv(8, 8), "b": conv(8, 8), "head": nn.Linear(8, 3)}, IMG)
def resnet(m, x):
    h = m.stem(x)
    h = F.relu(h + m.b(m.a(h)), inplace=True)
    return m.head(h.mean((2, 3))).square().mean()


@net(lambda: {"layers": nn.ModuleList([conv(4, 4), conv(8, 4), conv(12, 4)])}, IMG)
def densenet(m, x):
    for layer in m.layers:
        x = torch.cat([x, layer(x)], 1)
    return F.adaptive_avg_pool2d(x, 1).flatten(1).square().mean()


@net(lambda: {"wide": conv(4, 8, k=1), "deep": conv(8, 8, groups=8), "squeeze": nn.Conv2d(8, 2, 1),
              "excite": nn.Conv2d(2, 8, 1), "out": nn.Conv2d(8, 4, 1)}, IMG)  # fmt: skip
def mobilenet_block(m, x):
    h = m.deep(m.wide(x))
    gate = F.hardsigmoid(m.excite(F.relu(m.squeeze(h.mean((2, 3), keepdim=True)))))
    return (x + m.out(h * gate)).square().mean()


@net(lambda: {"down": conv(4, 8), "mid": conv(8, 8), "up": nn.ConvTranspose2d(8, 8, 2, 2), "out": conv(16, 4)}, IMG)
def unet(m, x):
    h = m.down(x)
    return m.out(torch.cat([h, m.up(m.mid(F.max_pool2d(h, 2)))], 1)).square().mean()


@net(lambda: {"patch": nn.Conv2d(4, 8, 4, 4), "tokens": nn.Linear(4, 4), "channels": nn.Linear(8, 8),
              "norm": nn.LayerNorm(8)}, IMG)  # fmt: skip
def mlp_mixer(m, x):
    h = m.patch(x).flatten(2).transpose(1, 2)
    h = h + m.tokens(m.norm(h).transpose(1, 2)).transpose(1, 2)
    return (h + F.gelu(m.channels(m.norm(h)))).square().mean()


@net(lambda: {"branches": nn.ModuleList([conv(4, 4, k=k) for k in (1, 3, 5)]), "pool": conv(4, 4)}, IMG)
def inception(m, x):
    pooled = m.pool(F.max_pool2d(x, 3, 1, 1))
    return torch.cat([*(b(x) for b in m.branches), pooled], 1).square().mean()


@net(lambda: {"conv": nn.Conv2d(4, 8, 1)}, IMG)
def channel_shuffle(m, x):
    h = F.channel_shuffle(m.conv(x), 2)
    a, b = h.chunk(2, 1)
    return F.pixel_shuffle(torch.cat([a * b.sigmoid(), b], 1), 2).square().mean()


@net(lambda: {"where": nn.Linear(4, 6), "conv": nn.Conv2d(4, 4, 3, padding=1)}, IMG)
def spatial_transformer(m, x):
    theta = m.where(x.mean((2, 3))).view(-1, 2, 3)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return m.conv(F.grid_sample(x, grid, align_corners=False)).square().mean()


@net(lambda: {"q": nn.Linear(8, 8), "kv": nn.Linear(8, 16), "latent": nn.Parameter(torch.ones(3, 8) / 3)}, SEQ)
def perceiver(m, x):
    k, v = m.kv(x).chunk(2, -1)
    score = torch.einsum("ld,bnd->bln", m.q(m.latent), k) / 8**0.5
    return torch.einsum("bln,bnd->bld", score.softmax(-1), v).square().mean()


@net(lambda: {"qkv": nn.Linear(8, 24)}, SEQ)
def rotary_complex(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    angle = torch.outer(torch.arange(5.0, dtype=x.dtype), 1 / 10 ** torch.arange(0, 1, 0.25, dtype=x.dtype))
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.view_as_complex(t.reshape(3, 5, 4, 2)) * turn).flatten(2) for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


@net(lambda: {"q": nn.Linear(8, 8), "slope": torch.tensor([0.5, 0.25])}, SEQ)
def alibi(m, x):
    h = m.q(x).view(3, 5, 2, 4).transpose(1, 2)
    far = (torch.arange(5)[None] - torch.arange(5)[:, None]).to(x.dtype)
    score = h @ h.transpose(-1, -2) + m.slope[:, None, None] * far
    score = score.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    return (score.softmax(-1) @ h).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, ROWS, EDGES)
def gcn(m, x, edges):
    degree = torch.zeros(len(x), dtype=x.dtype).index_add(0, edges[1], torch.ones(edges.shape[1], dtype=x.dtype))
    norm = degree.clamp(min=1).rsqrt()
    message = m.linear(x)[edges[0]] * (norm[edges[0]] * norm[edges[1]])[:, None]
    return torch.zeros_like(x).index_add(0, edges[1], message).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6), "a": nn.Linear(12, 1)}, ROWS, EDGES)
def gat(m, x, edges):
    h = m.linear(x)
    score = F.leaky_relu(m.a(torch.cat([h[edges[0]], h[edges[1]]], 1))).squeeze(1)
    top = torch.full((len(x),), -1e9, dtype=x.dtype).scatter_reduce(0, edges[1], score, "amax")
    weight = (score - top[edges[1]]).exp()
    total = torch.zeros(len(x), dtype=x.dtype).index_add(0, edges[1], weight)
    return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]] * (weight / total[edges[1]])[:, None]).square().mean()


@net(lambda: {"score": nn.Linear(6, 1), "linear": nn.Linear(6, 6)}, ROWS)
def top_k_pooling(m, x):
    score = m.score(x).squeeze(1).tanh()
    kept = score.topk(4).indices
    return m.linear(x[kept] * score[kept, None]).square().mean()


@net(lambda: {"phi": nn.Linear(8, 8), "rho": nn.Linear(8, 3)}, SEQ, LENGTHS)
def deep_sets(m, x, lengths):
    mask = torch.arange(5)[None] < lengths[:, None]
    h = m.phi(x).relu() * mask[..., None]
    return m.rho(h.sum(1) / lengths[:, None]).square().mean()


@net(lambda: {"rnn": nn.LSTM(8, 6, batch_first=True)}, SEQ, LENGTHS)
def packed_lstm(m, x, lengths):
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    out, _ = nn.utils.rnn.pad_packed_sequence(m.rnn(rows)[0], batch_first=True)
    return out.square().mean()


@net(lambda: {"rnn": nn.GRU(8, 6, batch_first=True)}, SEQ, LENGTHS)
def last_state(m, x, lengths):
    out, _ = m.rnn(x)
    return out[torch.arange(3), lengths - 1].square().mean()


@net(lambda: {"embed": nn.Embedding(20, 8), "cell": nn.GRUCell(8, 8), "out": nn.Linear(8, 20)}, IDS)
def teacher_forcing(m, ids):
    h = torch.zeros(3, 8, dtype=m.out.weight.dtype)
    losses = []
    for t in range(ids.shape[1] - 1):
        h = m.cell(m.embed(ids[:, t]), h)
        losses.append(F.cross_entropy(m.out(h), ids[:, t + 1]))
    return torch.stack(losses).mean()


@net(lambda: {"embed": nn.Embedding(20, 8), "cell": nn.GRUCell(8, 8), "out": nn.Linear(8, 20)}, IDS)
def greedy_decoding(m, ids):
    h, token, score = torch.zeros(3, 8, dtype=m.out.weight.dtype), ids[:, 0], 0.0
    for _ in range(4):
        h = m.cell(m.embed(token), h)
        logits = m.out(h).log_softmax(-1)
        token = logits.argmax(-1)
        score = score + logits.gather(1, token[:, None]).mean()
    return score


@net(lambda: {"emit": nn.Linear(8, 4), "jump": nn.Parameter(torch.eye(4) / 2)}, SEQ)
def crf(m, x):
    emit = m.emit(x)
    alpha = emit[:, 0]
    for t in range(1, x.shape[1]):
        alpha = torch.logsumexp(alpha[:, :, None] + m.jump[None], 1) + emit[:, t]
    return torch.logsumexp(alpha, 1).mean()


@net(lambda: {"linear": nn.Linear(8, 10)}, SEQ.transpose(0, 1))
def ctc(m, x):
    targets, lengths = torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.full((3,), 2)
    return F.ctc_loss(m.linear(x).log_softmax(-1), targets, torch.full((3,), 5), lengths)


@net(lambda: {"into": nn.Linear(8, 16), "a": nn.Parameter(-torch.ones(8, 4)), "bc": nn.Linear(8, 8),
              "step": nn.Linear(8, 8)}, SEQ)  # fmt: skip
def selective_scan(m, x):
    u, gate = m.into(x).chunk(2, -1)
    b, c = m.bc(u).chunk(2, -1)
    dt = F.softplus(m.step(u))
    h, ys = torch.zeros(3, 8, 4, dtype=x.dtype), []
    for t in range(x.shape[1]):
        h = torch.exp(dt[:, t, :, None] * m.a) * h + dt[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
        ys.append((h * c[:, t, None]).sum(-1))
    return (torch.stack(ys, 1) * F.silu(gate)).square().mean()


@net(lambda: {"decay": nn.Parameter(torch.zeros(8)), "kv": nn.Linear(8, 16), "r": nn.Linear(8, 8)}, SEQ)
def linear_attention(m, x):
    k, v = m.kv(x).chunk(2, -1)
    state, ys = torch.zeros(3, 8, 8, dtype=x.dtype), []
    for t in range(x.shape[1]):
        state = state * m.decay.sigmoid()[:, None] + k[:, t, :, None] * v[:, t, None]
        ys.append(torch.einsum("bd,bde->be", m.r(x[:, t]), state))
    return torch.stack(ys, 1).square().mean()


@net(lambda: {"re": nn.Parameter(torch.randn(8, 3)), "im": nn.Parameter(torch.randn(8, 3))}, SEQ)
def state_space_fft(m, x):
    spectrum = torch.fft.rfft(x, dim=1)
    kernel = torch.complex(m.re, m.im).T[None]
    return torch.fft.irfft(spectrum * kernel, n=5, dim=1).square().mean()


@net(lambda: {"weight": nn.Parameter(torch.randn(4, 4, 4, 3, dtype=torch.cfloat).to(torch.cdouble) / 4)}, IMG)
def fourier_operator(m, x):
    spectrum = torch.fft.rfft2(x)
    out = torch.zeros_like(spectrum)
    out[:, :, :4, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :4, :3], m.weight)
    return torch.fft.irfft2(out, s=x.shape[-2:]).square().mean()


@net(lambda: {"encode": nn.Linear(6, 4), "decode": nn.Linear(4, 6), "book": nn.Parameter(torch.randn(5, 4))}, X)
def vector_quantiser(m, x):
    z = m.encode(x)
    nearest = torch.cdist(z, m.book).argmin(1)
    code = m.book[nearest]
    passed = z + (code - z).detach()
    return F.mse_loss(m.decode(passed), x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


@net(lambda: {"encode": nn.Linear(6, 4), "book": torch.randn(5, 4), "count": torch.ones(5)}, X)
def codebook_averages(m, x):
    z = m.encode(x)
    hot = F.one_hot(torch.cdist(z, m.book).argmin(1), 5).to(z.dtype)
    if m.training:
        with torch.no_grad():
            m.count.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            m.book.mul_(0.9).add_((hot.T @ z) / m.count[:, None], alpha=0.1)
    return (z - (hot @ m.book).detach()).square().mean()


@net(lambda: {"student": nn.Linear(6, 4), "teacher": nn.Linear(6, 4), "center": torch.zeros(4)}, X)
def distillation(m, x):
    with torch.no_grad():
        target = (m.teacher(x) - m.center).softmax(-1)
        m.center.copy_(0.9 * m.center + 0.1 * target.mean(0))
    return -(target * m.student(x).log_softmax(-1)).sum(-1).mean()


@net(lambda: {"encode": nn.Linear(6, 4), "scale": nn.Parameter(torch.tensor(2.0))}, X)
def contrastive(m, x):
    z = F.normalize(torch.cat([m.encode(x), m.encode(x.flip(1))]), dim=1)
    score = (z @ z.T * m.scale.exp()).masked_fill(torch.eye(8, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(score, (torch.arange(8) + 4) % 8)


@net(lambda: {"encode": nn.Linear(6, 4)}, ROWS)
def hard_triplets(m, x):
    labels = torch.arange(8) % 2
    far = torch.cdist(m.encode(x), m.encode(x))
    same = labels[:, None] == labels[None]
    positive = (far * same).max(1).values
    negative = far.masked_fill(same, float("inf")).min(1).values
    return F.relu(positive - negative + 0.3).mean()


@net(lambda: {"linear": nn.Linear(6, 3)}, ROWS)
def focal_loss(m, x):
    logits, labels = m.linear(x), torch.arange(8) % 3
    ce = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


@net(lambda: {"conv": nn.Conv2d(4, 1, 1)}, IMG)
def dice_loss(m, x):
    p, target = m.conv(x).sigmoid().flatten(1), (x[:, :1] > 0).flatten(1)
    hit = (p * target).sum(1)
    return (1 - (2 * hit + 1) / (p.sum(1) + target.sum(1) + 1)).mean()


@net(lambda: {"head": nn.Linear(6, 5)}, ROWS)
def detection_loss(m, x):
    out = m.head(x)
    there = x[:, 0] > 0
    box = F.smooth_l1_loss(out[there, :4], x[there, :4])
    return box + F.binary_cross_entropy_with_logits(out[:, 4], there.to(x.dtype))


@net(lambda: {"head": nn.Linear(6, 5)}, ROWS)
def hard_negatives(m, x):
    loss = m.head(x).square().mean(1)
    return loss[loss > loss.mean()].mean()


@net(lambda: {"head": nn.Linear(6, 3)}, ROWS)
def confident_labels(m, x):
    p = m.head(x).softmax(-1)
    top, label = p.max(-1)
    sure = top > 0.4
    return F.cross_entropy(m.head(x)[sure], label[sure]) if sure.any() else p.sum() * 0


@net(lambda: {"linear": nn.Linear(6, 6), "head": nn.Linear(6, 4)}, ROWS)
def early_exit(m, x):
    h = m.linear(x)
    done = h.abs().amax(1) < 1.0
    h = torch.where(done[:, None], h, torch.tanh(m.linear(h)))
    return m.head(h).square().mean()


@net(lambda: {"first": nn.Linear(1, 8), "second": nn.Linear(8, 1)}, X[:, :1])
def siren(m, x):
    return m.second(torch.sin(30 * m.first(x))).square().mean()


@net(lambda: {"coefficients": nn.Parameter(torch.randn(6, 4, 5) / 5)}, X)
def spline_network(m, x):
    grid = torch.linspace(-1, 1, 8, dtype=x.dtype)
    x = x.tanh()[..., None]
    basis = ((x >= grid[:-1]) & (x < grid[1:])).to(x.dtype)
    for k in range(1, 3):
        left = (x - grid[: -(k + 1)]) / (grid[k:-1] - grid[: -(k + 1)]) * basis[..., :-1]
        basis = left + (grid[k + 1 :] - x) / (grid[k + 1 :] - grid[1:-k]) * basis[..., 1:]
    return torch.einsum("bik,iok->bo", basis, m.coefficients).square().mean()


@net(lambda: {"hyper": nn.Linear(6, 12)}, X)
def hypernetwork(m, x):
    weight = m.hyper(x).view(-1, 2, 6)
    return torch.bmm(weight, x[:, :, None]).square().mean()


@net(lambda: {"embed": nn.Embedding(20, 8), "norm": nn.LayerNorm(8)}, IDS)
def tied_weights(m, ids):
    h = m.norm(m.embed(ids))
    return F.cross_entropy(F.linear(h, m.embed.weight)[:, :-1].reshape(-1, 20), ids[:, 1:].reshape(-1))


@net(lambda: {"mix": nn.Linear(6, 9)}, X)
def mixture_density(m, x):
    weight, mean, spread = m.mix(x).chunk(3, -1)
    parts = torch.distributions.Normal(mean, F.softplus(spread) + 0.1)
    mixed = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=weight), parts)
    return -mixed.log_prob(x[:, 0]).mean()


@net(lambda: {"prior": nn.Linear(6, 4), "mean": nn.Linear(6, 4)}, X)
def divergences(m, x):
    p = torch.distributions.Normal(m.mean(x), 1.0)
    q = torch.distributions.Normal(m.prior(x), F.softplus(m.mean(x)) + 0.1)
    return (
        torch.distributions.kl_divergence(p, q).mean()
        + torch.distributions.Dirichlet(F.softplus(m.prior(x)) + 1).entropy().mean()
    )


@net(lambda: {"routes": nn.Parameter(torch.randn(5, 3, 8, 4) / 4)}, SEQ)
def capsules(m, x):
    votes = torch.einsum("bnd,nkde->bnke", x, m.routes)
    logits = torch.zeros(3, 5, 3, dtype=x.dtype)
    for _ in range(3):
        s = (logits.softmax(-1)[..., None] * votes).sum(1)
        v = s * s.norm(dim=-1, keepdim=True) / (1 + s.square().sum(-1, keepdim=True))
        logits = logits + (votes * v[:, None]).sum(-1)
    return v.square().mean()


@net(lambda: {"f": nn.Linear(6, 6), "g": nn.Linear(6, 6)}, X)
def coupling_flow(m, x):
    a, b = x[:, ::2], x[:, 1::2]
    h = m.f(F.pad(a, (0, 3)))
    scale, shift = h.chunk(2, 1)
    y = torch.cat([a, b * scale.tanh().exp() + shift], 1)
    return 0.5 * y.square().sum(1).mean() - scale.tanh().sum(1).mean() + torch.slogdet(m.g.weight)[1]


@net(lambda: {"w": nn.Parameter(torch.randn(6, 6) / 6)}, X)
def deep_equilibrium(m, x):
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(30):
            z = torch.tanh(z @ m.w + x)
    return torch.tanh(z @ m.w + x).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def inner_optimisation(m, x):
    z = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        (g,) = torch.autograd.grad((m.linear(z) - x).square().sum(), z, create_graph=True)
        z = z - 0.1 * g
    return z.square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def jacobian_penalty(m, x):
    jac = torch.func.vmap(torch.func.jacrev(lambda v: torch.tanh(m.linear(v))))(x)
    return jac.square().sum((1, 2)).mean()


@net(lambda: {"kernel": nn.Parameter(torch.tensor(0.5)), "noise": nn.Parameter(torch.tensor(0.1))}, X)
def gaussian_process(m, x):
    k = torch.exp(-torch.cdist(x, x).square() / m.kernel.exp()) + m.noise.exp() * torch.eye(4, dtype=x.dtype)
    chol = torch.linalg.cholesky(k)
    alpha = torch.cholesky_solve(x[:, :1], chol)
    return (x[:, :1] * alpha).sum() + 2 * chol.diagonal().log().sum()


@net(lambda: {"w": nn.Parameter(torch.randn(6, 4))}, X)
def whitening(m, x):
    h = x @ m.w
    h = h - h.mean(0)
    values, vectors = torch.linalg.eigh(h.T @ h + torch.diag(torch.arange(1.0, 5.0, dtype=x.dtype)))
    return (values.log().sum() + (vectors.square() * torch.arange(4, dtype=x.dtype)).sum()).square()


@net(lambda: {"embed": nn.Embedding(20, 8, padding_idx=0, max_norm=None), "bag": nn.EmbeddingBag(20, 8)}, IDS)
def word_bags(m, ids):
    return (m.embed(ids).sum(1) + m.bag(ids)).square().mean()


@net(lambda: {"cells": nn.ModuleList([nn.LSTMCell(6, 6) for _ in range(2)])}, SEQ[..., :6])
def stacked_cells(m, x):
    states = [(torch.zeros(3, 6, dtype=x.dtype), torch.zeros(3, 6, dtype=x.dtype)) for _ in m.cells]
    total = 0.0
    for t in range(x.shape[1]):
        h = x[:, t]
        for i, cell in enumerate(m.cells):
            states[i] = cell(h, states[i])
            h = states[i][0]
        total = total + h.square().mean()
    return total


@net(lambda: {"left": nn.Linear(6, 6), "leaf": nn.Linear(6, 6)}, ROWS)
def tree_recursion(m, x):
    def fold(rows):
        if len(rows) == 1:
            return torch.tanh(m.leaf(rows[0]))
        half = len(rows) // 2
        return torch.tanh(m.left(fold(rows[:half]) * fold(rows[half:])))

    return fold(x).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6), "steps": nn.Linear(6, 1)}, ROWS)
def adaptive_computation(m, x):
    h, halted, total = x, torch.zeros(8, dtype=x.dtype), torch.zeros_like(x)
    for _ in range(4):
        p = m.steps(h).sigmoid().squeeze(1)
        running = (halted < 0.9).to(x.dtype)
        p = torch.where(halted + p * running > 0.9, 1 - halted, p) * running
        halted = halted + p
        h = torch.tanh(m.linear(h))
        total = total + p[:, None] * h
    return total.square().mean()


@net(lambda: {"heads": nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(6, 3)}), "w": nn.ParameterList(
    [torch.zeros(()), torch.zeros(())])}, X)  # fmt: skip
def uncertainty_weights(m, x):
    losses = [head(x).square().mean() for head in m.heads.values()]
    return sum(loss * torch.exp(-w) + w for loss, w in zip(losses, m.w, strict=True))


@net(lambda: {"conv": nn.Conv1d(8, 8, 3, padding=2, dilation=2), "gate": nn.Conv1d(8, 8, 1)}, SEQ)
def dilated_causal(m, x):
    h = F.pad(x.transpose(1, 2), (2, 0))
    h = m.conv(h)[..., :5]
    return (h.tanh() * m.gate(h).sigmoid()).unfold(2, 3, 1).amax(-1).square().mean()


@net(lambda: {"conv": nn.Conv3d(2, 4, 3, padding=1), "norm": nn.BatchNorm3d(4)}, torch.randn(2, 2, 4, 6, 6))
def video(m, x):
    return F.avg_pool3d(m.norm(m.conv(x)), 2).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def straight_through(m, x):
    h = m.linear(x)
    hard = (h > 0).to(h.dtype)
    return (hard + h.sigmoid() - h.sigmoid().detach()).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def sparsemax(m, x):
    z = m.linear(x)
    ordered, _ = z.sort(descending=True, dim=1)
    sums = ordered.cumsum(1)
    k = torch.arange(1, 7, dtype=x.dtype)
    support = (1 + k * ordered > sums).sum(1, keepdim=True)
    tau = (sums.gather(1, support - 1) - 1) / support
    return (z - tau).clamp(min=0).square().mean()


@net(lambda: {"score": nn.Linear(6, 1)}, ROWS)
def ranking_loss(m, x):
    s, y = m.score(x).squeeze(1), x[:, 0]
    pairs = torch.combinations(torch.arange(8))
    a, b = pairs[:, 0], pairs[:, 1]
    return F.margin_ranking_loss(s[a], s[b], torch.sign(y[a] - y[b]), margin=0.1)


@net(lambda: {"linear": nn.Linear(8, 8)}, SEQ)
def windows(m, x):
    h = m.linear(F.pad(x, (0, 0, 1, 2))).view(3, 4, 2, 8)
    return torch.roll(h, (1, -1), (1, 2)).permute(0, 2, 1, 3).reshape(3, -1).square().mean()


@net(lambda: {"linear": nn.Linear(6, 6)}, X)
def clipped_by_norm(m, x):
    h = m.linear(x)
    size = h.norm(dim=1, keepdim=True)
    return torch.where(size > 1, h / size, h).square().mean() + (h.abs().max() if h.mean() > 0 else h.abs().min())


# -- habits


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
