"""Architectures and losses in a few lines each."""

from __future__ import annotations

import torch
from programs.entry import EDGES, IDS, IMG, LENGTHS, ROWS, SEQ, X, net
from torch import nn
from torch.nn import functional as F


def conv(i: int, o: int, stride: int = 1, groups: int = 1, k: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o), nn.ReLU())


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
