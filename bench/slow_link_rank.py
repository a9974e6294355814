"""What a rank does in `slow_links.py`: trains a model its way, and prints what that took.

gpt      4.9 M weights, 32 x 128 bytes a step: the small GPT of the other benchmarks with six layers, on the bytes of
         this repository's own texts.  With half a core for each rank, a step without communication takes 0.6 to 0.9 s
small    the same with four layers (3.2 M weights) and 8 x 128 bytes a step: four times the bytes for what is computed
conv     a small residual network of convolutions, that tells of 32 x 32 bytes of them from which folder they are

floor              DDP that never speaks
ddp                torch's, in fp32; "ddp tuned": in buckets of 1 MB, views of gradients; "ddp fp16": with its hook
ddp powersgd       torch's PowerSGD hook of rank 4, all in one bucket (with several it hangs on gloo)
ddp batch 4        the bytes of one step for four times the batch: gradients are summed over four parts first
exact, int8+ef …   ours, by the codec; auto; "diloco(H=10) int4+ef", "delayed int4+ef": a policy and a codec
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).parent.parent
INSIDE = "link0"  # the interface in a rank's namespace
HEADERS = 66  # bytes of a packet that are not what was sent: Ethernet, IP, TCP with its time stamps
POLICIES = ("local", "diloco", "streaming", "gossip", "sma", "delayed")
WARM, HELD, CHECKED = 2, 4, 10  # steps that do not count; batches of held-out text; steps between two looks at the loss
GPTS = {"gpt": (6, 32), "small": (4, 8)}  # layers, rows of a batch
SIDE, PATCHES, CLASSES = 32, 32, ("mycel", "tests", "bench", "docs")
Batch = tuple[torch.Tensor, torch.Tensor]


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, out, 3, stride, 1), nn.Conv2d(out, out, 3, 1, 1)
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, out)
        self.past = nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(F.relu(self.norm1(x)))
        return self.past(x) + self.second(F.relu(self.norm2(y)))


class SmallConv(nn.Module):
    """1.2 M weights; norms are over groups of channels: of a part of the batch they are what they are of all."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, 32, 3, 1, 1)
        self.blocks = nn.Sequential(Residual(32, 64, 2), Residual(64, 128, 2), Residual(128, 256, 2))
        self.head = nn.Linear(256, len(CLASSES))

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(x)).mean((2, 3))), kind)


def text_of(folder: Path, *patterns: str) -> torch.Tensor:
    files = sorted(f for pattern in patterns for f in folder.glob(pattern))
    return torch.tensor(list(b"".join(f.read_bytes() for f in files)))


def parted(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is trained on, and what is held out."""
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def text_batches(gen: torch.Generator, rows: int) -> tuple[Callable[[], Batch], Callable[[], Batch]]:
    """Batches of ids and the ids behind them: to train on, and held out."""
    from small_gpt import LENGTH

    def batch(of: torch.Tensor) -> Batch:
        at = torch.randint(0, len(of) - LENGTH - 1, (rows,), generator=gen).tolist()
        first, second = (torch.stack([of[i + shift : i + shift + LENGTH] for i in at]) for shift in (0, 1))
        return first, second

    train, held = parted(text_of(ROOT, "*.md", "mycel/**/*.py"))
    return (lambda: batch(train)), (lambda: batch(held))


def patch_batches(gen: torch.Generator) -> tuple[Callable[[], Batch], Callable[[], Batch]]:
    """Batches of bit planes of bytes, and the folder these are from."""
    kinds = [parted(text_of(ROOT / name, "**/*.py", "**/*.md", "**/*.txt")) for name in CLASSES]

    def batch(held: bool) -> Batch:
        kind = torch.randint(0, len(kinds), (PATCHES,), generator=gen)
        texts = [kinds[k][held] for k in kind.tolist()]
        starts = [int(torch.randint(0, len(t) - SIDE * SIDE, (), generator=gen)) for t in texts]
        rows = torch.stack([t[i : i + SIDE * SIDE] for t, i in zip(texts, starts, strict=True)])
        planes = (rows[:, None] >> torch.arange(8)[None, :, None]) & 1
        return planes.view(PATCHES, 8, SIDE, SIDE).float(), kind

    return (lambda: batch(False)), (lambda: batch(True))


def model_of(name: str, seed: int) -> tuple[nn.Module, Callable[[], Batch], list[Batch]]:
    """The model, its batches for ever, and those that are held out: the same on all ranks and for every way; a seed
    is another start and other batches."""
    torch.manual_seed(seed)
    if name == "conv":
        model, batches = SmallConv(), patch_batches
    else:
        from small_gpt import SmallGPT

        layers, rows = GPTS[name]
        model, batches = SmallGPT(vocabulary=256, layers=layers), partial(text_batches, rows=rows)
    _, held = batches(torch.Generator().manual_seed(0))
    train, _ = batches(torch.Generator().manual_seed(1 + seed))
    return model, train, [held() for _ in range(HELD)]


def plan_of(way: str) -> dict[str, dict[str, str]]:
    """What a plan says for a way: a policy, a codec, both, or neither."""
    policy, codec = re.fullmatch(rf"((?:{'|'.join(POLICIES)})(?:\(.*?\))?)? ?(.*)", way).groups()
    codec = codec or "exact"
    return ({"sync": {"dp": policy}} if policy else {}) | ({} if codec == "exact" else {"compress": {"dp": codec}})


def our_step(way: str, model: nn.Module, world: int) -> tuple[Callable[..., Any], Any, Callable[[], float]]:
    """A step on the whole batch, the model's loss, and the bytes that the formula says a rank sends in one."""
    import mycel

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = mycel.train_step(model, optimizer, mesh=mycel.Mesh(dp=world), plan={"batch": ["dp"], **plan_of(way)})

    def formula() -> float:
        entry = step._entry()
        return entry.plan.predicted.sync[1] + sum(mycel.lower.sent(entry.program).values())

    return step, step.evaluate, formula


def torch_step(
    way: str, model: nn.Module, rank: int, world: int
) -> tuple[Callable[..., Any], Any, Callable[[], float]]:
    """The same of DDP; its formula is that of a ring."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    dist.init_process_group("gloo")
    elements = sum(p.numel() for p in model.parameters())
    settings: dict[str, Any] = {"bucket_cap_mb": 1, "gradient_as_bucket_view": True} if way == "ddp tuned" else {}
    settings |= {"bucket_cap_mb": 1 + 4 * elements // 2**20} if way == "ddp powersgd" else {}
    wrapped = nn.parallel.DistributedDataParallel(model, **settings)
    if way == "ddp fp16":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif way == "ddp powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    parts, steps_done = parts_of(way), [0]

    def step(*batch: torch.Tensor) -> torch.Tensor:
        steps_done[0] += 1
        is_last = steps_done[0] % parts == 0
        with wrapped.no_sync() if way == "floor" or not is_last else nullcontext():
            loss = wrapped(*(x.chunk(world)[rank] for x in batch))
            (loss / parts).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    exact = 2 * (world - 1) / world * elements * (2 if way == "ddp fp16" else 4) / parts
    return step, model, lambda: 0.0 if way in ("floor", "ddp powersgd") else exact


def parts_of(way: str) -> int:
    """Batches that a step of DDP takes."""
    return int(way.removeprefix("ddp batch")) if way.startswith("ddp batch") else 1


def whole_periods(way: str, steps: int) -> int:
    """So many steps, or more: those that speak every H steps are measured over whole times of H, of which the first,
    in which they connect, does not count."""
    every = re.search(r"H=(\d+)", way)
    period = int(every[1]) if every else 1
    return -(-steps // period) * period


def counted() -> tuple[int, int]:
    """Bytes that left this rank, and packets."""
    folder = Path(f"/sys/class/net/{INSIDE}/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "tx_packets").read_text())


def serve(way: str, model_name: str, steps: int, look: bool, seed: int) -> None:
    """Prints a line `done`: seconds of a step (of one batch, where it takes several), bytes it sent in one without
    headers, by the formula, and the losses on what is held out: with `look` one every so many steps, else that of the
    end."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    model, next_batch, held = model_of(model_name, seed)
    ddp, steps = way.startswith(("ddp", "floor")), whole_periods(way, steps)
    step, loss_of, formula = torch_step(way, model, rank, world) if ddp else our_step(way, model, world)

    def held_out() -> float:
        with torch.no_grad():
            return statistics.mean(float(loss_of(*batch)) for batch in held)

    warm = whole_periods(way, WARM) if not look else WARM
    seconds, losses, sent, before, parts = [], [], 0.0, (0, 0), parts_of(way)
    for i in range(warm + steps):
        if i == warm:
            before = counted()
        start = time.perf_counter()
        for _ in range(parts):
            float(step(*next_batch()))
        seconds.append((time.perf_counter() - start) / parts)
        if i == warm + steps - 1:
            after = counted()
            sent = (after[0] - before[0] - HEADERS * (after[1] - before[1])) / steps / parts
        if look and (i + 1) % CHECKED == 0:
            losses.append(held_out())
    losses = losses or [held_out()]
    typical = (statistics.mean if way.startswith(POLICIES) else statistics.median)(seconds[warm:])
    if rank == 0 and not ddp and way == "auto":
        print("auto", step.plan.compress_text(), flush=True)
    print("done", typical, sent, formula(), *(f"{x:.5f}" for x in losses), flush=True)
