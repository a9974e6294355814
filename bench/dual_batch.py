"""Two microbatches at once on a GPU: what of the messages of one is hidden behind the compute of the other.

    python bench/dual_batch.py [--layers 4] [--width 2048] [--rows 8] [--length 1024]

A Llama in bf16 under tensor parallelism, two ranks with NCCL between them, four microbatches, one after the other
(`at_once: 1`) and in pairs (`at_once: 2`): losses, step times in turns, and from a profile of a step the seconds in
which a kernel of NCCL runs, and those of them in which the same rank computes too.  With one GPU both ranks are on it:
NCCL takes them where it believes them on two hosts, and sends over a socket.  They take turns there, so times are no
times of two GPUs; what overlaps inside a rank is what would there.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

WORLD, ROUNDS, MICROBATCHES, LIMIT_S = 2, 5, 4, 300
TENSOR = {
    "*.self_attn.[qkv]_proj.weight": ["tp", "-"],
    "*.self_attn.o_proj.weight": ["-", "tp"],
    "*.mlp.gate_proj.weight": ["tp", "-"],
    "*.mlp.up_proj.weight": ["tp", "-"],
    "*.mlp.down_proj.weight": ["-", "tp"],
}


def step_of(args: argparse.Namespace, at_once: int):
    import torch
    from gpu_models import decoder
    from transformers import LlamaConfig, LlamaForCausalLM

    import mycel

    torch.manual_seed(0)
    sizes = decoder(args.width, 3 * args.width, args.layers, args.width // 128, args.width // 128, 8192, args.length)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to("cuda", torch.bfloat16)
    ids = torch.randint(0, 8192, (args.rows, args.length), device="cuda")
    plan = {"mesh": {"tp": WORLD}, "parameters": TENSOR, "microbatches": MICROBATCHES, "at_once": at_once}
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-4), plan=plan, compile=args.compile)
    return lambda: float(step(input_ids=ids, labels=ids))


def overlapped(run) -> tuple[float, float, float]:
    """Of one step: seconds in which NCCL runs, those of them in which something else runs too, and of computing."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
    messages, compute = [], []
    for e in profiled.profiler.kineto_results.events():
        if "CUDA" in str(e.device_type()) and e.duration_ns() and "Memcpy DtoH" not in e.name():
            (messages if "nccl" in e.name().lower() else compute).append((e.start_ns(), e.start_ns() + e.duration_ns()))
    messages, compute = union(messages), union(compute)
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in messages for b in compute)
    return seconds(messages), both * 1e-9, seconds(compute)


def union(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same times, none twice."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def seconds(spans: list[tuple[int, int]]) -> float:
    return sum(b - a for a, b in spans) * 1e-9


def rank(args: argparse.Namespace) -> None:
    runs = {k: step_of(args, k) for k in (1, 2)}
    losses = {k: [run() for _ in range(3)] for k, run in runs.items()}
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(ROUNDS):
        for k, run in runs.items():
            started = time.perf_counter()
            run()
            times[k].append(time.perf_counter() - started)
    shares = {k: overlapped(run) for k, run in runs.items()}
    if os.environ["RANK"] == "0":
        print("losses of three steps: " + ", ".join(f"{a:.5f} {b:.5f}" for a, b in zip(*losses.values(), strict=True)))
        for k, (sent, hidden, computed) in shares.items():
            step = statistics.median(times[k])
            print(f"at_once {k}: step {step * 1e3:7.1f} ms; messages {sent * 1e3:7.1f} ms, beside compute "
                  f"{hidden * 1e3:6.1f} ms ({hidden / max(sent, 1e-9):.0%}); compute {computed * 1e3:6.1f} ms, "
                  f"{hidden / max(computed, 1e-9):.0%} of it while messages are under way")  # fmt: skip
        gain = statistics.median(times[1]) / statistics.median(times[2])
        print(f"two at once against one after the other: {gain:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"layers": 4, "width": 2048, "rows": 8, "length": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    if "RANK" in os.environ:
        return rank(args)
    import torch

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(WORLD), "MYCEL_TIMEOUT": "120"}
    several = torch.cuda.device_count() >= WORLD
    ranks = []
    for r in range(WORLD):
        own = {"RANK": str(r), "LOCAL_RANK": str(r) if several else "0"} | ({} if several else {"NCCL_HOSTID": f"h{r}"})
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **shared, **own}))
    try:
        codes = [each.wait(LIMIT_S) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
