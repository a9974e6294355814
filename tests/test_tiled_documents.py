"""The kernels for GPUs with documents, by Triton's interpreter on a CPU: they equal plain products in their arithmetic.
Without Triton there is nothing to run; with a GPU the kernels run on it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from mycel.ops.document_tiles import meeting

SEEDS = 24 if torch.cuda.is_available() else 6


@pytest.mark.parametrize("seed", range(20))
def test_tiles_that_meet_are_inside_the_bounds(seed):
    """What rows and columns of two tiles share lies between the first place and the end; of packed documents no tile at
    either end is left that shares nothing; and where all is said to be of one document, it is, and nothing beside."""
    gen = torch.Generator().manual_seed(seed)
    rows, columns, size, step = 40 + 7 * seed, 150 - 5 * seed, 16, 32
    ids = [torch.randint(0, 6, (3, n, 1 + seed % 2), generator=gen) for n in (rows, columns)]
    ids = [x.sort(1)[0] for x in ids] if seed % 4 else ids
    bounds, tiles = meeting(*ids, size, step), -(-columns // step)
    for b in range(3):
        for t in range(bounds.shape[1]):
            mine = ids[0][b, t * size : (t + 1) * size]
            shared = (mine.unsqueeze(1) == ids[1][b].unsqueeze(0)).all(2).any(0).nonzero().flatten()
            first, end, inner, outer = bounds[b, t].tolist()
            assert not len(shared) or (first <= shared[0] and shared[-1] < end)
            if seed % 4 and ids[0].shape[2] == 1:
                near = range(first // step, -(-end // step)) if first < end else ()
                parts = [columns_of(ids[1][b], i, step) for i in near]
                overlap = [bool((p.min() <= mine.max()) & (mine.min() <= p.max())) for p in parts]
                assert not overlap or (overlap[0] and overlap[-1])
            alone = [len(torch.cat([mine, columns_of(ids[1][b], i, step)]).unique(dim=0)) == 1 for i in range(tiles)]
            assert alone[inner // step : outer // step] == [True] * (outer // step - inner // step)
            assert (inner // step, outer // step) == stretch(alone)


def stretch(flags):
    """Where the first marked ones begin and end."""
    first = flags.index(True) if True in flags else len(flags)
    return first, flags.index(False, first) if False in flags[first:] else len(flags)


def columns_of(ids, tile, step):
    return ids[tile * step : (tile + 1) * step]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_tiled_documents_equal_plain_products():
    env = {**os.environ, "TRITON_INTERPRET": "" if torch.cuda.is_available() else "1"}
    subprocess.run([sys.executable, __file__], check=True, env=env, timeout=900)


def compare(seed):
    """Forward and backward of random layouts, against a dense mask in 32 bits."""
    import random

    from mycel.ops.attention_kernels import _document_mask, _plain_attention, _plain_grad
    from mycel.ops.triton_attention import tiled_attention, tiled_attention_grad

    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n, m = rng.choice([(70, 70), (130, 130), (200, 90)] if device == "cpu" else [(130, 130), (700, 700), (900, 400)])
    width = rng.choice([16, 40] if device == "cpu" else [40, 64, 128, 192])
    shapes = (2, 4, n, width), (2, 2, m, width), (2, 2, m, width)
    q, k, v = (torch.randn(s, generator=gen).to(torch.float16).to(device) for s in shapes)
    ids = [torch.randint(0, rng.choice([2, 5, 40]), (2, x, 1), generator=gen) for x in (n, m)]
    ids = [ids[0], ids[0] if n == m else ids[1]]
    ids = [x.sort(1)[0] for x in ids] if seed % 3 else ids
    if seed % 2:
        ids = [
            torch.cat([ids[0], ids[0] * 0 + 1], 2),
            torch.cat([ids[1], torch.arange(m).reshape(1, m, 1) % 3 // 2 + ids[1] * 0], 2),
        ]
    rows, columns = (x.to(device) for x in ids)
    causal, window, cap = [(True, None, None), (False, None, None), (False, (30, 4), 3.0)][seed % 3]
    beyond = n + m
    before, behind = window or (beyond, 0 if causal else beyond)
    numbers = width**-0.5, cap or 0.0, 0.0, before, behind
    y, lse = tiled_attention(q, k, v, None, None, rows, columns, *numbers)
    mask = _document_mask(q, k, None, rows, columns, causal, window)
    want, level = _plain_attention(q.float(), k.float(), v.float(), mask, False, None, cap, None, 0.0)
    assert torch.equal(lse == -torch.inf, level == -torch.inf)
    assert torch.allclose(lse, level, atol=2e-3, rtol=2e-3) and torch.allclose(y.float(), want, atol=3e-3, rtol=3e-3)
    g = torch.randn(y.shape, generator=gen).to(torch.float16).to(device)
    share = (g.float() * y.float()).sum(3)
    grads = tiled_attention_grad(g, q, k, v, None, None, rows, columns, share, lse, *numbers)
    p, _, ds = _plain_grad(g.float(), q.float(), k.float(), v.float(), mask, want, level, False, None, cap, None, 0.0)
    dq = ds @ k.float().repeat_interleave(2, 1) * width**-0.5
    dk = (ds.transpose(2, 3) @ q.float() * width**-0.5).unflatten(1, (2, 2)).sum(2)
    dv = (p.transpose(2, 3) @ g.float()).unflatten(1, (2, 2)).sum(2)
    for mine, theirs in zip(grads, (dq, dk, dv), strict=True):
        assert torch.allclose(mine.float(), theirs, atol=1e-2, rtol=1e-2), float((mine.float() - theirs).abs().max())


if __name__ == "__main__":
    for seed in range(SEEDS):
        compare(seed)
