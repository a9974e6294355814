"""Packed documents: attention over them equals torch's with a dense mask, whatever the layout of the batch; masks of
documents become operands of attention, whatever code wrote them; and no mask of all pairs is left in the program."""

from __future__ import annotations

import random

import pytest
import torch

from mycel.ops.attention import attention, attention_grad

EXACT = 1e-10


def lengths(rng, total, kind):
    """Lengths of documents that fill a sequence."""
    if kind in ("one", "single tokens"):
        return [total] if kind == "one" else [1] * total
    parts, most = [], {"ragged": total, "small": 9, "even": 64}[kind]
    while sum(parts) < total:
        parts.append(min(most if kind == "even" else rng.randint(1, most), total - sum(parts)))
    return parts


def layout(rng, batch, n, kind):
    """Documents of a batch, [batch, n]: packed one behind the other, or mixed; some padding at the end, or none."""
    if kind == "mixed":
        return torch.tensor([[rng.randint(-2, 3) for _ in range(n)] for _ in range(batch)])
    samples = []
    for _ in range(batch):
        ids = [i for i, length in enumerate(lengths(rng, n, kind)) for _ in range(length)]
        samples.append(torch.tensor(ids))
    return torch.stack(samples) * rng.choice([1, 7, -3])


KINDS = ["one", "single tokens", "ragged", "small", "even", "mixed"]
STRUCTURES = [{}, {"causal": True}, {"window": (20, 0)}, {"window": (3, 5)}]


def dense(rows, columns, structure, n, m):
    """The mask of all pairs."""
    seen = (rows.unsqueeze(2) == columns.unsqueeze(1)).all(3).unsqueeze(1)
    ahead = torch.arange(m)[None, :] - torch.arange(n)[:, None]
    before, behind = structure.get("window", (n, 0) if structure else (n, m))
    return seen & (ahead >= -before) & (ahead <= behind)


def drawn(seed, batch, n, m, heads=4, groups=2):
    gen = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, n, 8), (batch, groups, m, 8), (batch, groups, m, 8)
    return [torch.randn(s, generator=gen, dtype=torch.float64) for s in shapes]


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_documents_are_torchs_dense_mask(seed, kind, structure):
    """Forward and gradients in double precision, against torch's own attention; rows that see nothing are zero."""
    rng = random.Random(f"{seed} {kind} {structure}")
    batch, n = rng.choice([1, 3]), rng.choice([1, 70, 200, 300])
    ids = layout(rng, batch, n, kind).unsqueeze(2)
    rows, columns, m = ids, ids, n
    if seed % 2:  # padding, as a second number; every second time also other columns than rows
        m = n if seed == 1 else rng.randint(1, 2 * n)
        columns = ids if m == n else layout(rng, batch, m, kind).unsqueeze(2)
        kept = torch.arange(m).expand(batch, m) < torch.tensor([[rng.randint(0, m)] for _ in range(batch)])
        rows, columns = torch.cat([rows, rows * 0 + 1], 2), torch.cat([columns, kept.long().unsqueeze(2)], 2)
    q, k, v = (x.requires_grad_() for x in drawn(seed, batch, n, m))
    seen = dense(rows, columns, structure, n, m)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    want = torch.where(seen.any(3, keepdim=True), want, 0.0)
    g = torch.randn(want.shape, dtype=torch.float64)
    wants = torch.autograd.grad(want, (q, k, v), g)
    with torch.no_grad():
        y, lse = attention.kernel(q, k, v, None, None, rows, columns, **structure)
        grads = attention_grad.kernel(g, q, k, v, None, y, lse, None, rows, columns, **structure)
    assert torch.allclose(y, want, rtol=EXACT, atol=EXACT)
    assert torch.equal(lse == -torch.inf, (~seen.any(3)).expand(lse.shape))
    for mine, theirs in zip(grads, wants, strict=True):
        assert torch.allclose(mine, theirs, rtol=EXACT, atol=EXACT)
