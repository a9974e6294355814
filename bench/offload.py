"""Training steps of unmodified Hugging Face Llamas on one GPU in less memory than they would take: ours against
torch.compile with full recomputation, torch's save_on_cpu and FSDP2 with CPU offload.

    python bench/offload.py                    all rows, in about 8 minutes on an H200
    python bench/offload.py share              1.1B, 16 x 2048 tokens, in 60, 40 and 25 % of the free run's memory
    python bench/offload.py state              8B in bf16 with AdamW in 40 GiB: optimiser state on the host
    python bench/offload.py long               1.1B: the longest sequence that trains in 80 GiB
    python bench/offload.py share --model tiny --ways free ours-60

Each way runs in a process of its own.  Ways that do not fit their budget fail with what they say.  Peak is what torch
allocated at most; predicted are the plan's peak and seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

MODELS = {  # width, layers, heads, key-value heads, inner width, batch, length
    "1b": (2048, 22, 32, 4, 5632, 16, 2048),
    "8b": (4096, 32, 32, 8, 14336, 4, 4096),
    "tiny": (256, 4, 8, 2, 704, 8, 256),
}
VOCABULARY, GIB = 32000, 2**30
WAYS = {
    "free": "mycel, all on the device",
    "ours-60": "mycel, 60 % of that",
    "ours-40": "mycel, 40 % of that",
    "ours-25": "mycel, 25 % of that",
    "recompute": "torch.compile + full recomputation",
    "save_on_cpu": "torch save_on_cpu (eager, pinned)",
    "fsdp2": "FSDP2, CPU offload (eager)",
    "ours-40GiB": "mycel, 40 GiB, offload: auto",
    "long-ours": "mycel, 80 GiB, offload: auto",
    "long-recompute": "torch.compile + full recomputation, 80 GiB",
}
SETS = {
    "share": ("1b", ["free", "ours-60", "ours-40", "ours-25", "recompute", "save_on_cpu", "fsdp2"]),
    "state": ("8b", ["free", "ours-40GiB"]),
    "long": ("1b", ["long-ours", "long-recompute"]),
}
LENGTHS = [1 << k for k in range(13, 21)]  # tokens of the one sequence, before the last halving


def model_of(size: str, length: int, device: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, kv, inner, _, _ = MODELS[size]
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def step_of(way: str, model, optimizer, budget: int):
    """A step on ids, and what is predicted of it."""
    import torch

    if way == "free" or "ours" in way:
        import mycel

        plan = {"offload": "auto"} if way != "free" else "auto"
        ours = mycel.train_step(model, optimizer, plan=plan, memory=budget if way != "free" else None)
        return (lambda ids: ours(input_ids=ids, labels=ids)), lambda: ours
    if "recompute" in way:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if way == "fsdp2":
        model, optimizer = sharded(model)
    run = torch.compile(model) if "recompute" in way else model

    def step(ids):
        if way == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                loss = run(input_ids=ids, labels=ids).loss
        else:
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, None


def sharded(model):
    """FSDP2 over one rank, parameters and state on the host."""
    import os

    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    for layer in model.model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def measure(size: str, way: str, budget: int, steps: int = 4) -> dict[str, float]:
    """One way in this process."""

    batch, length = MODELS[size][5:]
    if way.startswith("long"):
        return longest(size, way, budget)
    return timed(size, way, budget, batch, length, steps)


def timed(size: str, way: str, budget: int, batch: int, length: int, steps: int) -> dict[str, float]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = model_of(size, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, VOCABULARY, (batch, length), device=device)
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    began = time.perf_counter()
    step, ours = step_of(way, model, optimizer, budget)
    losses = [step(ids) for _ in range(2)]
    sync()
    start = time.perf_counter() - began
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    losses += [step(ids) for _ in range(steps)]
    sync()
    seconds = (time.perf_counter() - began) / steps
    plan = ours().plan if ours is not None else None
    return {
        "tokens_s": batch * length / seconds,
        "seconds": seconds,
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else plan.peak if plan else 0,
        "predicted_peak": plan.peak if plan else 0,
        "predicted_s": plan.predicted.seconds if plan else 0.0,
        "host": plan.predicted.host if plan else 0,
        "start": start,
        "length": length,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
    }


def longest(size: str, way: str, budget: int) -> dict[str, float]:
    """The longest sequence that trains: powers of two and the one half way to the next."""
    import torch

    torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
    best: dict[str, float] = {}
    low, high = 0, 0
    for length in LENGTHS:
        if not (found := attempt(size, way, budget, length)):
            high = length
            break
        best, low = found, length
    if low and high and (found := attempt(size, way, budget, (low + high) // 2)):
        best = found
    return best


def attempt(size: str, way: str, budget: int, length: int) -> dict[str, float]:
    import gc

    import torch

    from mycel.errors import PlanError

    gc.collect()
    torch.cuda.empty_cache()
    torch.compiler.reset()
    try:
        return timed(size, way, budget - GIB, 1, length, 1)  # a GiB for what lies between allocations
    except (torch.OutOfMemoryError, PlanError) as e:
        print(f"{length} tokens: {str(e).splitlines()[0]}", file=sys.stderr)
        return {}


def budget_of(way: str, free_peak: float) -> int:
    share = {"ours-60": 0.6, "ours-40": 0.4, "ours-25": 0.25}.get(way)
    return int(free_peak * share) if share else (80 if "long" in way else 40) * GIB


def row(size: str, way: str, free_peak: float, timeout: int) -> dict[str, float]:
    """One way in a process of its own."""
    budget = budget_of(way, free_peak)
    command = [sys.executable, __file__, "--one", size, way, str(budget)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        print(f"{size:5} {WAYS[way]:44} took longer than {timeout} s", flush=True)
        return {}
    if done.returncode or not done.stdout.strip():
        print(f"{size:5} {WAYS[way]:44} failed: {done.stderr.strip()[-400:]}", flush=True)
        return {}
    r = json.loads(done.stdout.strip().splitlines()[-1])
    told = ""
    if r.get("predicted_s"):
        told = f"{r['predicted_peak'] / r['peak'] - 1:+7.1%} {r['predicted_s'] / r['seconds'] - 1:+7.1%}"
    print(
        f"{size:5} {WAYS[way]:44} {r['length']:8.0f} {r['tokens_s']:9.0f} {r['peak'] / GIB:8.1f} "
        f"{r['host'] / GIB:8.1f} {told:15} {r['start']:7.0f}s  {r['first_loss']:.3f} -> {r['last_loss']:.3f}",
        flush=True,
    )
    return r


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="set", help=f"which rows: {', '.join(SETS)}")
    parser.add_argument("--model", choices=list(MODELS), help="another model than a set's own")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), help="these ways alone")
    parser.add_argument("--peak", type=float, default=35.0, help="GiB of the free run, where that is not measured here")
    parser.add_argument("--timeout", type=int, default=150, help="seconds that one way may take")
    args = parser.parse_args()
    if unknown := [name for name in args.sets if name not in SETS]:
        parser.error(f"no set {unknown[0]}: {', '.join(SETS)}")
    print(
        f"{'model':5} {'how':44} {'length':>8} {'tokens/s':>9} {'peak GiB':>8} {'host GiB':>8} {'predicted - 1':15} "
        f"{'start':>8}  loss",
        flush=True,
    )
    for name in args.sets or SETS:
        size, ways = SETS[name]
        size = args.model or size
        rows: dict[str, dict[str, float]] = {}
        for way in args.ways or ways:
            rows[way] = row(size, way, rows.get("free", {}).get("peak", args.peak * GIB), args.timeout)
        compare({way: r for way, r in rows.items() if r})


def compare(rows: dict[str, dict[str, float]]) -> None:
    """What the rows of a set come to."""
    free = rows.get("free")
    if free is None:
        ours, theirs = rows.get("long-ours"), rows.get("long-recompute")
        if ours and theirs:
            print(f"  longest sequence: {ours['length'] / theirs['length']:.2f}x   (bar 2.0)")
        return
    for way, r in rows.items():
        if way.startswith("ours"):
            budget = budget_of(way, free["peak"])
            rivals = [x["tokens_s"] for k, x in rows.items() if "ours" not in k and k != "free" and x["peak"] <= budget]
            rival = f", {r['tokens_s'] / max(rivals):.2f}x of the best other that fits" if rivals else ""
            print(f"  {WAYS[way]}: {r['tokens_s'] / free['tokens_s']:.2f} of the free run{rival}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3], int(sys.argv[4]))))
    else:
        main()
