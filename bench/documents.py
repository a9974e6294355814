"""Attention over packed documents on a GPU, bf16, forward and backward: ours (tiles; of short ones that see both ways a
mask), ours with a mask of all pairs, and torch's FlexAttention, compiled, with a mask of blocks.

    python bench/documents.py

Lengths of documents are drawn once; "one" is a single document, the most there can be; "padded": the last fifth of
every row is padding.  Milliseconds are those of kernels, without what launches take: a step is a CUDA graph.  Making
the mask (ours: numbers of tiles, theirs: the mask of blocks) is timed with them, once for each call: a model of many
layers makes it once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mycel.ops.attention_kernels import (
    _document_mask,
    document_attention,
    document_attention_grad,
    masked_attention,
    masked_attention_grad,
)


@dataclass(frozen=True)
class Case:
    """Rows of a batch, their length, heads, those of keys and values, width of a head, and documents of a row."""

    batch: int
    length: int
    heads: int
    shared: int
    width: int
    documents: str
    causal: bool = True

    def ids(self) -> torch.Tensor:
        gen = torch.Generator().manual_seed(0)
        if self.documents == "one":
            return torch.zeros(self.batch, self.length, dtype=torch.int64)
        if self.documents == "padded":
            return (torch.arange(self.length) >= self.length * 4 // 5).long().expand(self.batch, -1).contiguous()
        ends = torch.rand(self.batch, self.length, generator=gen) < 1 / int(self.documents)
        return ends.long().cumsum(1)

    def __str__(self) -> str:
        kind = "causal" if self.causal else "both ways"
        said = f"documents of {self.documents}" if self.documents.isdigit() else self.documents
        return f"{self.batch} x {self.length}, {self.heads}/{self.shared} heads of {self.width}, {said}, {kind}"


CASES = (
    Case(4, 4096, 32, 8, 64, "512"),
    Case(4, 4096, 32, 8, 128, "512"),
    Case(4, 4096, 32, 8, 128, "one"),
    Case(16, 1024, 16, 16, 64, "256"),
    Case(32, 512, 16, 16, 64, "padded", causal=False),
    Case(8, 2048, 16, 16, 64, "256", causal=False),
    Case(8, 2048, 16, 16, 64, "padded", causal=False),
)
CALLS = 10


def tensors(case: Case) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(case.batch, h, case.length, case.width) for h in (case.heads, case.shared, case.shared, case.heads)]
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def tiles(case: Case):
    q, k, v, g = tensors(case)
    ids = case.ids().cuda().unsqueeze(2)
    structure = (case.causal, None, None, None, 0.0)

    def step():
        y, lse = document_attention(q, k, v, None, None, ids, ids, *structure)
        return y, document_attention_grad(g, q, k, v, None, y, lse, None, ids, ids, *structure)

    return step


def mask(case: Case):
    q, k, v, g = tensors(case)
    ids = case.ids().cuda().unsqueeze(2)

    def step():
        seen = _document_mask(q, k, None, ids, ids, case.causal, None)
        y, lse = masked_attention(q, k, v, seen, False, None)
        return y, masked_attention_grad(g, q, k, v, seen, y, lse, False, None)

    return step


def theirs(case: Case):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, g = (x.requires_grad_() for x in tensors(case))
    ids, causal = case.ids().cuda(), case.causal
    flex, blocks = torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)

    def sees(b, h, i, j):
        same = ids[b, i] == ids[b, j]
        return same & (i >= j) if causal else same

    def step():
        seen = blocks(sees, case.batch, None, case.length, case.length, device="cuda")
        y = flex(q, k, v, block_mask=seen, enable_gqa=case.heads != case.shared)
        return y, torch.autograd.grad(y, (q, k, v), g)

    return step


def milliseconds(step) -> float:
    """Of the kernels of a call, on the mean."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            step()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in profile.key_averages()) / 1e3 / CALLS


def apart(mine, other) -> float:
    """How far results lie apart, as a part of their norm."""
    pairs = zip([mine[0], *mine[1]], [other[0].detach(), *other[1]], strict=True)
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def main() -> None:
    if not torch.cuda.is_available():
        print("skipped: there is no GPU")
        return
    print(f"{'':74} {'ours':>8} {'mask':>8} {'flex':>8}   ms; flex / ours, mask / ours; apart")
    for case in CASES:
        ways = [tiles(case), mask(case), theirs(case)]
        results = [way() for way in ways]
        far = max(apart(results[0], other) for other in results[1:])
        took, of_mask, of_flex = (milliseconds(way) for way in ways)
        said = f"{of_flex / took:5.2f} {of_mask / took:5.2f}   {far:.4f}"
        print(f"{case!s:74} {took:8.2f} {of_mask:8.2f} {of_flex:8.2f}   {said}", flush=True)


if __name__ == "__main__":
    main()
