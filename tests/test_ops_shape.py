"""torch's shape, index and creation functions, captured, compute what torch computes, without opaque equations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mycel

I = torch.tensor([2, 0, 1])
J = torch.tensor([[1], [-1]])


def wrote(x, place, value):
    """x after `x[place] = value`"""
    y = x.clone()
    y[place] = value
    return y


def after(x, change):
    """x after an in-place change."""
    y = x.clone()
    change(y)
    return y


SHAPES = {
    "view": lambda x: x.view(4, -1).t().reshape(-1, 2),
    "squeeze": lambda x: x[:, :1].squeeze(1).unsqueeze(-1).squeeze(),
    "transpose": lambda x: x.mT.movedim(0, -1).contiguous().flatten(1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 2, 3, 4).sum(1) + x[0].broadcast_to(2, 3, 4),
    "slices": lambda x: x[..., 1:-1:2, None, -10:100] + x[1, 1:2, -1],
    "split": lambda x: sum(p.sum() * (i + 1) for i, p in enumerate((*x.split(2, 2), *x.chunk(3, 1), *x.unbind(-1)))),
    "tensor_split": lambda x: x.tensor_split((1,), 1)[1] * x.narrow(1, 0, 1),
    "cat": lambda x: torch.cat([torch.tensor([]).double(), torch.stack([x, x], -1)[..., 0].double(), x], -1),
    "hstack": lambda x: torch.hstack([x, x]) * torch.vstack([x, x]).sum(),
    "pad": lambda x: F.pad(x, (1, -1, 2, 0), value=3.0),
    "reflect": lambda x: F.pad(x, (1, 2), mode="reflect") + F.pad(x, (2, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 1), mode="circular"),
    "reflect2": lambda x: F.pad(x, (1, 2, 1, 2), mode="reflect") + F.pad(x, (1, 2, 2, 1), mode="replicate"),
    "roll": lambda x: x.roll(2) + x.roll((1, -1), (0, 2)) + x.flip(0, -1),
    "rot90": lambda x: torch.rot90(x, 1, (1, 2)).sum(0) + torch.rot90(x, 3, (2, 1)).sum(0) + torch.rot90(x, 2)[0, 0, 0],
    "repeat": lambda x: x.repeat(2, 1, 1, 2) + x.tile(2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1).sum(1) + x.repeat_interleave(3).sum(),
    "triangles": lambda x: x.tril(-1) + torch.triu(x, 1) + x.sum((0, 1)).diag().trace(),
    "diagonals": lambda x: x.diagonal(1, -1, 0).sum() + torch.diag_embed(x, -1, 0, 2).diagonal(-1, 0, 2),
    "block_diag": lambda x: torch.block_diag(x[0], x[1], x[0, 0]),
    "unfold": lambda x: x.unfold(2, 2, 1).unfold(1, 2, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 3), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x.reshape(1, 6, 4), 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x.reshape(1, 4, 2, 3), 2),
    "meshgrid": lambda x: sum(m.sum() for m in torch.meshgrid(x[0, 0], x[0, :, 0], indexing="ij")),
    "write": lambda x: wrote(wrote(x, (0, slice(1, 3)), 1.0), (Ellipsis, -1), x[..., 0]),
    "write views": lambda x: after(x, lambda y: (y.view(6, 4)[1:3].t().mul_(2), y.split(2, 2)[1].add_(1))),
    "write unbind": lambda x: after(x, lambda y: (y.unbind(1)[2].zero_(), y.squeeze().unsqueeze(0)[0, 0, 1].neg_())),
    "write diagonal": lambda x: after(x, lambda y: (y[0].diagonal().fill_(5), y[0, :, 0].copy_(y[1, :, 1]))),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :1] * 2, 1, 1, 2) + torch.select_scatter(x, x[:, 0], 1, -1),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[:, 0, :3], 0, 1, 2),
}

INDEXING = {
    "index": lambda x: x[:, I] + x[:, I, :1] + x[0, [2, 1, 0]],
    "index apart": lambda x: x[J % 2, :, I] + x[J[0] % 2, 1, I].sum(),
    "index negative": lambda x: x[..., J, None],
    "index list": lambda x: x[[0, 1], [1, 2]],
    "index_put": lambda x: wrote(wrote(x, (slice(None), I[:2]), 2.0), (1, I), x[0, I] * 3),
    "index_put apart": lambda x: wrote(x, (J % 2, slice(None), I), x[0, :, 0]),
    "accumulate": lambda x: x.index_put((J % 2, I), x[0, 0], accumulate=True),
    "mask": lambda x: wrote(wrote(x, x > 0.5, -1.0), (0, x[0] < 0), 0.0),
    "mask rows": lambda x: wrote(x, x[..., 0] > 0, x[0, 0]) + wrote(x, (slice(None), x[0, :, 0] > 0), x[:, :1]),
    "masked_fill": lambda x: x.masked_fill(x > 0, float("-inf")).exp() + x.masked_fill(x[0] > 0, x[0, 0, 0]),
    "masked_fill int": lambda x: (x * 4).long().masked_fill(x > 0, 7),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, x + 1) + x.masked_scatter(x[0] > 0, x),
    "gather": lambda x: x.gather(1, I.expand(2, 3).unsqueeze(-1)) + torch.take_along_dim(x, I[None, :, None], 1),
    "scatter": lambda x: x.scatter(1, I[None, :1, None].expand(2, 1, 4), 9.0),
    "scatter src": lambda x: x.scatter(2, I[None, None].expand(2, 3, 3), x),
    "scatter_add": lambda x: x.scatter_add(1, J[:, :, None].abs(), x),
    "scatter multiply": lambda x: x.scatter(1, J[:, :, None].abs(), 3.0, reduce="multiply"),
    "scatter_reduce": lambda x: x.scatter_reduce(1, J[:, :, None].abs(), x, "amax"),
    "scatter_reduce mean": lambda x: x.scatter_reduce(0, J[None].abs(), x, "mean", include_self=False),
    "index_select": lambda x: x.index_select(1, I) + x.index_select(1, I[0]),
    "index_add": lambda x: x.index_add(-2, I, x, alpha=2).index_copy(1, I[:2], x[:, :2]).index_fill(2, I, 3.0),
    "take": lambda x: x.take(J) + x.put(I, x[0, 0, :3]).sum(),
    "embedding": lambda x: F.embedding(I, x[0]) + F.embedding(J.abs(), x[0], padding_idx=0).sum(),
    "one_hot": lambda x: F.one_hot(I, 4) * x,
    "topk": lambda x: x.topk(2)[0].sum() + x.topk(2, 1, largest=False)[0] + x.topk(2, 1)[1] + x[0, 0, 0].topk(1)[0],
    "sort": lambda x: x.sort(1, descending=True)[0] + x.argsort(1) + torch.sort(x, stable=True)[0] + x.msort(),
    "searchsorted": lambda x: torch.searchsorted(x[0, 0].sort()[0], x, side="right"),
    "bucketize": lambda x: torch.bucketize(x, x[0, 0].sort()[0], out_int32=True),
    "repeats": lambda x: x.repeat_interleave(I, 1, output_size=3),
}

CREATION = {
    "full": lambda x: torch.full((2, 3), 2) + torch.full((3,), True) + torch.full((1,), 0.5),
    "zeros": lambda x: torch.zeros(2, 3) + torch.ones(3) + x.new_ones(3),
    "zeros_like": lambda x: torch.zeros_like(x, dtype=torch.int32),
    "like": lambda x: torch.full_like(x, 2) + torch.ones_like(x),
    "new": lambda x: x.new_full((2,), 3) + x.new_zeros(2),
    "empty": lambda x: after(torch.empty(3), lambda y: y.fill_(2)),
    "empty copy": lambda x: after(x.new_empty(3), lambda y: y.copy_(x[0, :, 0])),
    "arange": lambda x: torch.arange(5),
    "arange float": lambda x: torch.arange(0.5, 2.0, 0.25),
    "arange back": lambda x: torch.arange(7, -2, -3),
    "arange dtype": lambda x: torch.arange(1, 5, dtype=torch.float64),
    "arange int": lambda x: torch.arange(3.0, dtype=torch.int32),
    "linspace": lambda x: torch.linspace(-1, 2, 7, dtype=torch.float64),
    "linspace one": lambda x: torch.linspace(3, 4, 1),
    "logspace": lambda x: torch.logspace(0, 2, 5, base=2.0),
    "eye": lambda x: torch.eye(3) + torch.eye(2, 3)[0],
    "eye bool": lambda x: torch.eye(3, dtype=torch.bool),
    "tril_indices": lambda x: torch.tril_indices(4, 3, 1),
    "tril_indices low": lambda x: torch.tril_indices(4, 3, -2),
    "triu_indices": lambda x: torch.triu_indices(3, 5, -1),
    "triu_indices far": lambda x: torch.triu_indices(4, 3, 2),
    "causal": lambda x: torch.full((3, 3), float("-inf")).triu(1),
    "fill": lambda x: x.clone().fill_(x[0, 0, 0]),
}

ALL = {**SHAPES, **INDEXING, **CREATION}


@pytest.mark.parametrize("name", ALL)
def test_capture_computes_what_torch_computes(name):
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want, fast = ALL[name](x), mycel.jit(ALL[name])
    got = fast(x)
    assert "opaque" not in str(fast.program(x))
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-6 if want.dtype == torch.float32 else 1e-12, atol=0)


@pytest.mark.parametrize("change", [lambda y: y[:, :1].expand(2, 3, 4).add_(1), lambda y: y.unfold(1, 2, 1).add_(1)])
def test_writing_into_overlapping_views_is_refused(change):
    with pytest.raises(mycel.CaptureError, match=r"clone\(\)"):
        mycel.capture(lambda x: after(x, change), torch.zeros(2, 3, 4))
