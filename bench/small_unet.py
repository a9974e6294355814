"""A UNet as diffusion models have it: residual blocks of four widths with the time added, attention below, skips."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTHS = (64, 128, 256, 256)
TIME = 256


class Residual(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.GroupNorm(8, width), nn.GroupNorm(8, out)
        self.conv, self.second_conv = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(TIME, out)
        self.skip = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x, time):
        h = self.conv(F.silu(self.norm(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.second_conv(F.silu(self.second_norm(h)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(8, width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        n, c, h, w = x.shape
        rows = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(rows).view(n, h * w, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, h * w, c)
        return x + self.out(y).transpose(1, 2).view(n, c, h, w)


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.enter = nn.Conv2d(3, WIDTHS[0], 3, padding=1)
        self.down, self.shrink, self.up, self.grow = (nn.ModuleList() for _ in range(4))
        width, skips = WIDTHS[0], [WIDTHS[0]]
        for level, out in enumerate(WIDTHS):
            for _ in range(2):
                self.down.append(self._layer(level, width, out))
                width = out
                skips.append(width)
            if level + 1 < len(WIDTHS):
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList([Residual(width, width), Attention(width), Residual(width, width)])
        for level, out in reversed(list(enumerate(WIDTHS))):
            for _ in range(3):
                self.up.append(self._layer(level, width + skips.pop(), out))
                width = out
            if level:
                self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.leave = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    @staticmethod
    def _layer(level: int, width: int, out: int) -> nn.ModuleList:
        return nn.ModuleList([Residual(width, out), *([Attention(out)] if level >= 2 else [])])

    def forward(self, images, time, noise):
        angles = time[:, None] * torch.exp(-torch.arange(32) / 32 * 9.2)
        at = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        h = self.enter(images)
        skips = [h]
        for i, layer in enumerate(self.down):
            h = self._through(layer, h, at)
            skips.append(h)
            if i % 2 and i // 2 < len(self.shrink):
                h = self.shrink[i // 2](h)
                skips.append(h)
        h = self.middle[2](self.middle[1](self.middle[0](h, at)), at)
        for i, layer in enumerate(self.up):
            h = self._through(layer, torch.cat([h, skips.pop()], 1), at)
            if i % 3 == 2 and i // 3 < len(self.grow):
                h = self.grow[i // 3](F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.leave(F.silu(self.norm(h))), noise)

    @staticmethod
    def _through(layer, h, at):
        h = layer[0](h, at)
        return layer[1](h) if len(layer) > 1 else h
