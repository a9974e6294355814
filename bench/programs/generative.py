"""Diffusion, VAEs and GANs: losses as their papers' code has them."""

from __future__ import annotations

import math

import torch
from programs.entry import program
from torch import nn
from torch.nn import functional as F


def timestep_embedding(t, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(0, half, dtype=torch.float32) / half).to(t.device)
    args = t[:, None].float() * freqs[None]
    emb = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
    if dim % 2:
        emb = torch.cat([emb, torch.zeros_like(emb[:, :1])], dim=-1)
    return emb


class ResBlock(nn.Module):
    def __init__(self, c, tdim):
        super().__init__()
        self.norm1 = nn.GroupNorm(2, c)
        self.conv1 = nn.Conv2d(c, c, 3, padding=1)
        self.emb = nn.Linear(tdim, 2 * c)
        self.norm2 = nn.GroupNorm(2, c)
        self.conv2 = nn.Conv2d(c, c, 3, padding=1)
        nn.init.normal_(self.conv2.weight, std=0.02)

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.emb(F.silu(emb))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        return x + self.conv2(F.silu(h))


class TinyUNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.c = c
        self.inc = nn.Conv2d(3, c, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        self.downs = nn.ModuleList([ResBlock(c, 4 * c), ResBlock(c, 4 * c)])
        self.mid = ResBlock(c, 4 * c)
        self.ups = nn.ModuleList(
            [nn.ModuleDict({"proj": nn.Conv2d(2 * c, c, 1), "res": ResBlock(c, 4 * c)}) for _ in range(2)]
        )
        self.out = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.c).to(x.dtype))
        h = self.inc(x)
        hs = []
        for d in self.downs:
            h = d(h, emb)
            hs.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.mid(h, emb)
        for u in self.ups:
            h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = u["res"](u["proj"](torch.cat([h, hs.pop()], 1)), emb)
        return self.out(h)


class DDPM(nn.Module):
    def __init__(self, T=50):
        super().__init__()
        self.T = T
        self.net = TinyUNet()
        betas = torch.linspace(1e-4, 0.02, T, dtype=torch.float64)
        ac = torch.cumprod(1 - betas, 0)
        self.register_buffer("sqrt_ac", ac.sqrt())
        self.register_buffer("sqrt_1mac", (1 - ac).sqrt())

    def q_sample(self, x0, t, noise):
        shape = (-1,) + (1,) * (x0.ndim - 1)
        return self.sqrt_ac[t].view(shape) * x0 + self.sqrt_1mac.gather(0, t).reshape(shape) * noise

    def forward(self, x0, t=None, noise=None):
        if t is None:
            t = torch.randint(0, self.T, (x0.shape[0],), device=x0.device)
        if noise is None:
            noise = torch.randn_like(x0)
        pred = self.net(self.q_sample(x0, t, noise), t)
        return F.mse_loss(pred, noise)


@program
def ddpm_given():
    return DDPM(), (torch.randn(2, 3, 8, 8), torch.randint(0, 50, (2,)), torch.randn(2, 3, 8, 8))


@program
def ddpm_random():
    return DDPM(), (torch.randn(2, 3, 8, 8),)


class EDM(nn.Module):
    sigma_data = 0.5

    def __init__(self):
        super().__init__()
        self.net = TinyUNet()
        self.p_mean, self.p_std = -1.2, 1.2

    def precond(self, x, sigma):
        sigma = sigma.to(x.dtype).reshape(-1, 1, 1, 1)
        c_skip = self.sigma_data**2 / (sigma**2 + self.sigma_data**2)
        c_out = sigma * self.sigma_data / (sigma**2 + self.sigma_data**2).sqrt()
        c_in = 1 / (self.sigma_data**2 + sigma**2).sqrt()
        c_noise = sigma.log() / 4
        return c_skip * x + c_out * self.net(c_in * x, c_noise.flatten())

    def forward(self, images, rnd_normal=None, n=None):
        if rnd_normal is None:
            rnd_normal = torch.randn([images.shape[0], 1, 1, 1], device=images.device)
        sigma = (rnd_normal * self.p_std + self.p_mean).exp()
        weight = (sigma**2 + self.sigma_data**2) / (sigma * self.sigma_data) ** 2
        n = (torch.randn_like(images) if n is None else n) * sigma
        D = self.precond(images + n, sigma)
        return (weight * ((D - images) ** 2)).sum().mul(1 / images.shape[0])


@program
def edm():
    return EDM(), (torch.randn(2, 3, 8, 8), torch.randn(2, 1, 1, 1), torch.randn(2, 3, 8, 8))


@program
def edm_random():
    return EDM(), (torch.randn(2, 3, 8, 8),)


class FlowMatching(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))
        self.drop_label = 0.2
        self.lab = nn.Embedding(4, 4)
        self.null = nn.Parameter(torch.zeros(4))

    def forward(self, x1, y):
        t = torch.rand(x1.shape[0], 1, dtype=x1.dtype)
        x0 = torch.randn_like(x1)
        xt = (1 - t) * x0 + t * x1
        c = self.lab(y)
        if self.training:
            keep = torch.rand(len(y)) > self.drop_label
            c = torch.where(keep[:, None], c, self.null)
        pred = self.v(torch.cat([xt + c, t], -1))
        return {"loss": ((pred - (x1 - x0)) ** 2).mean(), "t_mean": t.mean().detach()}


@program
def flow_matching():
    return FlowMatching(), (torch.randn(6, 4), torch.randint(0, 4, (6,)))


class FlowSampler(nn.Module):
    """reflow: simulates an Euler ODE in no_grad inside the loss"""

    def __init__(self):
        super().__init__()
        self.v = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))

    @torch.no_grad()
    def sample(self, x, steps=4):
        for i in range(steps):
            t = torch.full((x.shape[0], 1), i / steps, dtype=x.dtype)
            x = x + self.v(torch.cat([x, t], 1)) / steps
        return x

    def forward(self, z0, t):
        z1 = self.sample(z0)
        zt = torch.lerp(z0, z1, t)
        return F.huber_loss(self.v(torch.cat([zt, t], 1)), z1 - z0, delta=0.5)


@program
def reflow():
    return FlowSampler(), (torch.randn(6, 4), torch.rand(6, 1))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.mu = nn.Linear(16, 3)
        self.lv = nn.Linear(16, 3)
        self.dec = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))
        self.register_buffer("step", torch.tensor(0))

    def reparameterize(self, mu, logvar):
        if not self.training:
            return mu
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return eps.mul(std).add_(mu)

    def forward(self, x):
        h = self.enc(x)
        mu, lv = self.mu(h), self.lv(h)
        z = self.reparameterize(mu, lv)
        out = self.dec(z)
        bce = F.binary_cross_entropy_with_logits(out, torch.sigmoid(x), reduction="sum")
        kld = -0.5 * torch.sum(1 + lv - mu.pow(2) - lv.exp())
        if self.training:
            self.step += 1
        beta = min(1.0, self.step.item() / 10)
        return bce + beta * kld


@program
def vae_beta_warmup():
    return VAE(), (torch.randn(4, 8),)


class VQEMA(nn.Module):
    def __init__(self, n=6, d=4, decay=0.9):
        super().__init__()
        self.n, self.d, self.decay, self.eps = n, d, decay, 1e-5
        self.enc, self.dec = nn.Linear(8, d), nn.Linear(d, 8)
        embed = torch.randn(n, d)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n))
        self.register_buffer("embed_avg", embed.clone())
        self.register_buffer("initted", torch.tensor(False))

    def quantize(self, x):
        flat = x.reshape(-1, self.d)
        if self.training and not self.initted:
            self.embed.data.copy_(flat[: self.n].detach())
            self.embed_avg.data.copy_(self.embed)
            self.cluster_size.data.fill_(1.0)
            self.initted.fill_(True)
        dist = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed.t() + self.embed.pow(2).sum(1)
        ind = (-dist).max(1)[1]
        onehot = F.one_hot(ind, self.n).type(flat.dtype)
        q = F.embedding(ind.view(*x.shape[:-1]), self.embed)
        if self.training:
            onehot_sum, embed_sum = onehot.sum(0), flat.t() @ onehot
            self.cluster_size.data.mul_(self.decay).add_(onehot_sum, alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(embed_sum.t().detach(), alpha=1 - self.decay)
            n = self.cluster_size.sum()
            cs = (self.cluster_size + self.eps) / (n + self.n * self.eps) * n
            self.embed.data.copy_(self.embed_avg / cs.unsqueeze(1))
        diff = (q.detach() - x).pow(2).mean()
        return x + (q - x).detach(), diff, ind

    def forward(self, x):
        z, diff, ind = self.quantize(self.enc(x))
        probs = torch.bincount(ind, minlength=self.n).to(x.dtype) / ind.numel()
        perplexity = torch.exp(-(probs * (probs + 1e-10).log()).sum())
        return {"loss": F.mse_loss(self.dec(z), x) + 0.25 * diff, "perplexity": perplexity, "ind": ind}


@program
def vqvae_ema_init():
    return VQEMA(), (torch.randn(8, 8),)


class DeadCodes(nn.Module):
    """restart of dead codes by rows of the batch"""

    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(6, 3)
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("usage", torch.ones(5))

    def forward(self, x):
        z = self.enc(x)
        idx = torch.cdist(z, self.codes).argmin(-1)
        with torch.no_grad():
            self.usage.mul_(0.5).index_add_(0, idx, torch.full_like(idx, 1, dtype=self.usage.dtype), alpha=0.5)
            dead = self.usage < 0.4
            if dead.any():
                self.codes[dead] = z.detach()[: dead.sum()] if dead.sum() <= len(z) else self.codes[dead]
        return (z - self.codes[idx]).square().mean()


@program
def dead_code_restart():
    return DeadCodes(), (torch.randn(8, 6),)


class GAN(nn.Module):
    """both losses in one forward with gradient isolation"""

    def __init__(self):
        super().__init__()
        self.G = nn.Sequential(
            nn.Linear(3, 12), nn.BatchNorm1d(12), nn.LeakyReLU(0.2, inplace=True), nn.Linear(12, 6), nn.Tanh()
        )
        self.D = nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(6, 12)), nn.LeakyReLU(0.2), nn.utils.spectral_norm(nn.Linear(12, 1))
        )

    def forward(self, real, z):
        fake = self.G(z)
        d_loss = F.relu(1 - self.D(real)).mean() + F.relu(1 + self.D(fake.detach())).mean()
        for p in self.D.parameters():
            p.requires_grad_(False)
        g_loss = -self.D(fake).mean()
        for p in self.D.parameters():
            p.requires_grad_(True)
        return d_loss + g_loss


@program
def gan_requires_grad_toggle():
    return GAN(), (torch.randn(4, 6), torch.randn(4, 3))


class WGANGP(nn.Module):
    def __init__(self):
        super().__init__()
        self.D = nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 1))

    def forward(self, real, fake, alpha):
        inter = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        d = self.D(inter)
        grads = torch.autograd.grad(
            outputs=d,
            inputs=inter,
            grad_outputs=torch.ones_like(d),
            create_graph=True,
            retain_graph=True,
            only_inputs=True,
        )[0]
        gp = ((grads.view(grads.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
        return self.D(fake).mean() - self.D(real).mean() + 10 * gp


@program
def wgan_gp():
    return WGANGP(), (torch.randn(4, 6), torch.randn(4, 6), torch.rand(4, 1))


class R1(nn.Module):
    def __init__(self):
        super().__init__()
        self.D = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(4 * 36, 1))
        self.i = 0

    def forward(self, real):
        real = real.detach().requires_grad_(True)
        out = self.D(real)
        loss = F.softplus(-out).mean()
        self.i += 1
        if self.i % 2 == 0:
            (g,) = torch.autograd.grad(out.sum(), real, create_graph=True)
            loss = loss + 5.0 * g.square().sum([1, 2, 3]).mean()
        return loss


@program
def lazy_r1():
    return R1(), (torch.randn(2, 3, 8, 8),)


class StyleMod(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.style = nn.Linear(5, 3)
        self.register_buffer("w_avg", torch.zeros(5))
        self.noise_strength = nn.Parameter(torch.zeros([]))
        self.register_buffer("noise_const", torch.randn(8, 8))

    def forward(self, x, ws):
        if self.training:
            self.w_avg.copy_(ws.detach().mean(0).lerp(self.w_avg, 0.995))
        ws = self.w_avg.lerp(ws, 0.7)
        b, c, h, wd = x.shape
        s = self.style(ws) + 1
        w = self.w.unsqueeze(0) * s.reshape(b, 1, -1, 1, 1)
        d = (w.square().sum(dim=[2, 3, 4]) + 1e-8).rsqrt()
        w = w * d.reshape(b, -1, 1, 1, 1)
        y = F.conv2d(x.reshape(1, b * c, h, wd), w.reshape(-1, 3, 3, 3), padding=1, groups=b).reshape(b, -1, h, wd)
        y = y.add_(self.noise_const * self.noise_strength)
        return F.leaky_relu(y, 0.2).mul(math.sqrt(2)).clamp(-256, 256).square().mean()


@program
def stylegan_modulated():
    return StyleMod(), (torch.randn(2, 3, 8, 8), torch.randn(2, 5))
