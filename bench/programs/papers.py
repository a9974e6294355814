"""Programs as papers publish them: losses, estimators and solvers written into the training code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from programs.entry import IMG, ROWS, SEQ, X, net
from torch import distributions as D
from torch import nn
from torch.autograd import forward_ad


def _mlp(inp: int, out: int, width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inp, width), nn.Tanh(), nn.Linear(width, out))


class _Spike(torch.autograd.Function):
    """A step whose gradient is that of a steep sigmoid."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x > 0).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if not ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            raise RuntimeError("only the membrane asks for a gradient")
        s = torch.sigmoid(ctx.slope * x)
        return g * ctx.slope * s * (1 - s), None


@net(lambda: {"inp": nn.Linear(8, 6), "beta": nn.Parameter(torch.tensor(0.9))}, SEQ)
def leaky_integrate_and_fire(m, x):
    membrane, rate = torch.zeros(len(x), 6, dtype=x.dtype), 0.0
    for t in range(x.size(1)):
        membrane = m.beta.clamp(0, 1) * membrane + m.inp(x[:, t])
        spike = _Spike.apply(membrane - 1.0, 5.0)
        membrane, rate = membrane - spike.detach(), rate + spike.mean()
    return rate + membrane.square().mean()


@net(lambda: {"net": _mlp(6, 6)}, X)
def hutchinson_flow(m, x):
    """A continuous flow: the divergence by one probe, forward mode, Euler steps."""
    probe, logp = torch.sign(torch.sin(37 * x)), 0.0
    for _ in range(4):
        v, along = torch.func.jvp(m.net, (x,), (probe,))
        x, logp = x + 0.25 * v, logp - 0.25 * (along * probe).sum(-1)
    return (0.5 * x.square().sum(-1) - logp).mean()


@net(lambda: {"net": _mlp(2, 1)}, X[:, :2])
def forward_mode_residual(m, x):
    """u_t + u u_x = 0 by dual numbers."""
    with forward_ad.dual_level():
        t = forward_ad.make_dual(x, torch.tensor([1.0, 0.0], dtype=x.dtype).expand_as(x))
        u, ut = forward_ad.unpack_dual(m.net(t))
        ux = forward_ad.unpack_dual(m.net(forward_ad.make_dual(x, torch.eye(2, dtype=x.dtype)[1].expand_as(x)))).tangent
    return (ut + u * ux).square().mean()


@net(lambda: {"mean": nn.Linear(6, 3), "factor": nn.Linear(6, 9)}, X)
def full_covariance_posterior(m, x):
    """A VAE's posterior with a full covariance against a standard normal."""
    factor = m.factor(x).view(-1, 3, 3)
    cov = factor @ factor.mT + 0.1 * torch.eye(3, dtype=x.dtype)
    q = D.MultivariateNormal(m.mean(x), covariance_matrix=cov)
    p = D.MultivariateNormal(torch.zeros(3, dtype=x.dtype), torch.eye(3, dtype=x.dtype))
    return D.kl_divergence(q, p).mean() - q.log_prob(x[:, :3]).mean()


@net(lambda: {"net": nn.Linear(6, 4)}, ROWS)
def evidential_regression(m, x):
    mu, v, a, b = m.net(x).unbind(-1)
    v, a, b = F.softplus(v) + 1e-3, F.softplus(a) + 1 + 1e-3, F.softplus(b) + 1e-3
    student = D.StudentT(2 * a, mu, torch.sqrt(b * (1 + v) / (v * a)))
    y = x[:, 0]
    return -student.log_prob(y).mean() + 0.01 * ((y - mu).abs() * (2 * v + a)).mean()


@net(lambda: {"mix": nn.Linear(17, 17, bias=False)}, ROWS.flatten().repeat(8).view(2, -1)[:, :128])
def multi_resolution_stft(m, x):
    loss = 0.0
    for n, hop in ((16, 4), (32, 8)):
        spec = torch.stft(x, n, hop, window=torch.hann_window(n, dtype=x.dtype), return_complex=True).abs()
        est = m.mix(spec.mT[..., :17].contiguous() if n == 32 else F.pad(spec.mT, (0, 8))).mT[:, : spec.size(1)]
        loss = loss + torch.linalg.norm(spec - est) / torch.linalg.norm(spec)
        loss = loss + (spec.clamp_min(1e-7).log() - est.abs().clamp_min(1e-7).log()).abs().mean()
    return loss


@net(lambda: {"conv": nn.Conv2d(4, 6, 3, padding=1), "out": nn.Linear(6, 3)}, IMG, torch.tensor([0, 2]))
def projected_attack(m, x, y):
    """Adversarial training: three steps of sign ascent on the input, by torch.func."""
    run = lambda x: F.cross_entropy(m.out(F.relu(m.conv(x)).mean((2, 3))), y)
    delta = torch.zeros_like(x)
    for _ in range(3):
        g = torch.func.grad(lambda d: run(x + d))(delta)
        delta = (delta + 0.02 * g.detach().sign()).clamp(-0.03, 0.03)
    return run(x) + run(x + delta)


@net(lambda: {"conv": nn.Conv2d(4, 6, 3, padding=1), "out": nn.Conv2d(6, 4, 1)}, IMG)
def hessian_penalty(m, x):
    """The curvature of a convolutional energy along a direction: forward over reverse."""
    energy = lambda z: m.out(F.softplus(m.conv(z))).square().sum()
    v = torch.sign(torch.sin(31 * x))
    _, hv = torch.func.jvp(torch.func.grad(energy), (x,), (v,))
    return energy(x) / x.numel() + 0.01 * (hv * v).mean()


@net(
    lambda: {"box": nn.Linear(6, 16), "cls": nn.Linear(6, 12)},
    X[:2],
    torch.tensor([[0.2, 0.3, 0.4, 0.5], [0.5, 0.5, 0.9, 0.8]]),
)
def matched_boxes(m, x, truth):
    """Greedy matching of predictions to boxes by generalised IoU."""
    p = m.box(x).view(2, 4, 4).sigmoid()
    p = torch.cat([p[..., :2], p[..., :2] + p[..., 2:]], -1)
    loss = 0.0
    for b in range(2):
        lo, hi = torch.max(p[b][:, None, :2], truth[None, :, :2]), torch.min(p[b][:, None, 2:], truth[None, :, 2:])
        inter = (hi - lo).clamp(min=0).prod(-1)
        area = lambda t: (t[..., 2:] - t[..., :2]).prod(-1)
        union = area(p[b])[:, None] + area(truth)[None] - inter
        hull = (
            torch.max(p[b][:, None, 2:], truth[None, :, 2:]) - torch.min(p[b][:, None, :2], truth[None, :, :2])
        ).prod(-1)
        giou = inter / union - (hull - union) / hull
        free = torch.ones(4, dtype=torch.bool)
        for t in range(2):
            i = giou[:, t].detach().masked_fill(~free, -9).argmax()
            free[i] = False
            loss = loss + 1 - giou[i, t] - m.cls(x[b]).view(4, 3)[i].log_softmax(-1)[t]
    return loss


@net(lambda: {"prior": _mlp(1, 6), "obs": nn.Linear(3, 6)}, SEQ[:, :, :1])
def kalman_filter(m, y):
    """A linear state space of learnt noise; the likelihood by D.MultivariateNormal."""
    a = torch.matrix_exp(m.obs.weight[:3, :3] - m.obs.weight[:3, :3].T)
    c, q = m.obs.weight[3:4], torch.diag(F.softplus(m.obs.bias[:3]))
    mean, cov, loss = y.new_zeros(len(y), 3), torch.eye(3, dtype=y.dtype), 0.0
    for t in range(y.size(1)):
        mean, cov = mean @ a.T, a @ cov @ a.T + q
        s = c @ cov @ c.T + 0.1
        loss = loss - D.MultivariateNormal(mean @ c.T, s).log_prob(y[:, t]).mean()
        gain = torch.linalg.solve(s, c @ cov).T
        mean, cov = mean + (y[:, t] - mean @ c.T) @ gain.T, cov - gain @ c @ cov
    return loss + m.prior(y).mean() ** 2
