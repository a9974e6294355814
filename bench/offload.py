"""Training steps of unmodified Hugging Face Llamas on one GPU in less memory than they would take: ours against
torch.compile with full recomputation, torch's save_on_cpu and FSDP2 with CPU offload.

    python bench/offload.py share              1.1B, 16 x 2048 tokens, in 60, 40 and 25 % of the free run's memory
    python bench/offload.py state              8B, bf16 with parameters and AdamW's state in f32, trained in 40 GiB;
                                               also with parameters and state updated on the host
    python bench/offload.py long               1.1B: the longest sequence that trains in 80 GiB
    python bench/offload.py share --model tiny --ways free ours-60
    python bench/offload.py                    all rows

Each way runs in a process of its own.  Those of one wave get ready beside each other (planned, compiled, two steps
taken), then each is timed while the others wait.  Ways that do not fit fail with what they say.  Peak is what torch
allocated at most; predicted are the plan's peak and seconds, by what `mycel probe` measured where it ran before, else
by presets, which take attention over very long sequences for slower than it is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from mycel.plan import KINDS
from mycel.run import available, settle_hosts

MODELS = {  # width, layers, heads, key-value heads, inner width, batch, length, vocabulary
    "1b": (2048, 22, 32, 4, 5632, 16, 2048, 32000),
    "8b": (4096, 32, 32, 8, 14336, 8, 4096, 128256),
    "tiny": (256, 4, 8, 2, 704, 8, 256, 32000),
}
GIB = 2**30
WAYS = {
    "free": "mycel, all on the device",
    "ours-60": "mycel, 60 % of that",
    "ours-40": "mycel, 40 % of that",
    "ours-25": "mycel, 25 % of that",
    "recompute": "torch.compile + full recomputation",
    "save_on_cpu": "torch save_on_cpu (eager, pinned, 4 parts)",
    "fsdp2": "FSDP2, CPU offload + full recomputation",
    "ours-40GiB": "mycel, 40 GiB",
    "ours-host-40GiB": "mycel, 40 GiB, updated on the host",
    "long-recompute": "torch.compile + full recomputation, 80 GiB",
    "long-ours": "mycel, 80 GiB, twice as long",
}
SETS = {  # model, waves of ways
    "share": ("1b", [["free", "ours-60", "ours-40", "ours-25", "recompute"], ["save_on_cpu", "fsdp2"]]),
    "state": ("8b", [["ours-40GiB"], ["ours-host-40GiB"]]),
    "long": ("1b", [["long-recompute"], ["long-ours"]]),
}
LARGE_HOST = 113 * GIB  # with less, the 8B model gets a smaller batch: 90 GiB are parameters and state
PARTS = 4  # of a batch, for save_on_cpu: what it keeps of all of it is more than hosts have
SLACK = 3 * GIB  # of 80 that a sequence may take, for what lies between allocations
GRAIN = 8192  # tokens: lengths of sequences are multiples
SHORT = 4, 10  # grains


# -- in a process of its own ------------------------------------------------------------------------------------------


def model_of(size: str, length: int, device: str):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, kv, inner, _, _, vocabulary = MODELS[size]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.float32 if is_mixed(size) else torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def is_mixed(size: str) -> bool:
    """Are parameters in 32 bits, and products in 16?"""
    return size == "8b"


def step_of(size: str, way: str, model, optimizer, budget: int):
    """A step on ids, and ours."""
    import torch

    if way == "free" or "ours" in way:
        import mycel

        precision = "bf16" if is_mixed(size) else "fp32"
        plan = "auto"
        if "host" in way:
            plan = {"offload": {**dict.fromkeys(KINDS, "auto"), **dict.fromkeys(KINDS[2:], "host"), "update": "host"}}
        memory = budget if way != "free" else None
        ours = mycel.train_step(model, optimizer, precision=precision, memory=memory, plan=plan)
        return (lambda ids: ours(input_ids=ids, labels=ids)), ours
    if "recompute" in way or way == "fsdp2":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    if way == "fsdp2":
        model, optimizer = sharded(model)
    run = torch.compile(model, dynamic=False) if "recompute" in way else model

    def step(ids):
        parts = ids.chunk(PARTS) if way == "save_on_cpu" else [ids]
        total = 0.0
        for part in parts:
            if way == "save_on_cpu":
                with torch.autograd.graph.save_on_cpu(pin_memory=True):
                    loss = run(input_ids=part, labels=part).loss / len(parts)
            else:
                loss = run(input_ids=part, labels=part).loss
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step, None


def sharded(model):
    """FSDP2 over one rank, parameters and state on the host."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    for layer in model.model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def unconstrained(size: str, model, optimizer, ids) -> float:
    """The clock's seconds of a step with all on a device that holds it."""
    import mycel

    precision = "bf16" if is_mixed(size) else "fp32"
    step = mycel.train_step(model, optimizer, precision=precision, plan={"offload": "none"})
    return float(step.prepare(input_ids=ids, labels=ids).plan.predicted.seconds)


def ready(peak: float) -> None:
    """Tell the parent, and wait until this process may be timed."""
    print(json.dumps({"ready": peak}), flush=True)
    sys.stdin.readline()


def measure(size: str, way: str, budget: int, batch: int, length: int, steps: int) -> dict[str, float]:
    """One way in this process."""
    import torch

    if way == "long-recompute":
        return longest(size, way, budget, length)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if way == "long-ours":
        cap(budget)
    model = model_of(size, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, MODELS[size][7], (batch, length), device=device)
    sync = settle_hosts  # and the device
    bound = unconstrained(size, model, optimizer, ids) if way.endswith("GiB") else 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step, ours = step_of(size, way, model, optimizer, budget - (SLACK if way == "long-ours" else 0))
    losses = [step(ids) for _ in range(2 if steps > 1 else 1)]
    sync()
    start = time.perf_counter() - began
    if device == "cuda":
        torch.cuda.empty_cache()
    ready(start)
    began = time.perf_counter()
    losses += [step(ids) for _ in range(steps)]
    sync()
    seconds = (time.perf_counter() - began) / steps
    plan = ours.plan if ours is not None else None
    return {
        "tokens_s": batch * length / seconds,
        "seconds": seconds,
        "peak": torch.cuda.max_memory_allocated() if device == "cuda" else plan.peak if plan else 0,
        "predicted_peak": plan.peak if plan else 0,
        "predicted_s": plan.predicted.seconds if plan else 0.0,
        "unconstrained_s": bound,
        "host": plan.predicted.host if plan else 0,
        "start": start,
        "length": length,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
    }


def cap(budget: int) -> None:
    """Torch's allocator gives no more than so many bytes."""
    import torch

    torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)


def longest(size: str, way: str, budget: int, most: int) -> dict[str, float]:
    """The longest sequence that trains, of `most` tokens or of those that may fit."""
    cap(budget)
    short: dict[str, float] = {}
    if not most:
        most, short = may_fit(size, way, budget)
    for length in range(most, int(short.get("length", 0)), -GRAIN):
        if result := attempt(size, way, length):
            return result
    return short


def may_fit(size: str, way: str, budget: int) -> tuple[int, dict[str, float]]:
    """Tokens that may just not fit, and the longest that were seen to: two short sequences say what a token takes
    beside parameters and state, by a line and a square (a mask, where one is made)."""
    short, other = (attempt(size, way, n * GRAIN) for n in SHORT)
    if not (short and other):
        return 0, short
    near, far = ((r["peak"] - r["held"]) / r["length"] for r in (short, other))  # bytes a token
    square = max(1e-9, (far - near) / (other["length"] - short["length"]))
    line, room = near - square * short["length"], budget - short["held"]
    estimate = (math.sqrt(line**2 + 4 * square * room) - line) / (2 * square)
    return (int(estimate) // GRAIN + 1) * GRAIN, other


def attempt(size: str, way: str, length: int) -> dict[str, float]:
    """One step on a sequence; nothing, where it does not fit."""
    import gc

    import torch

    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        model = model_of(size, length, "cuda")
        step, _ = step_of(size, way, model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), 0)
        ids = torch.randint(0, MODELS[size][7], (1, length), device="cuda")
        began = time.perf_counter()
        loss = float(step(ids))
        seconds = time.perf_counter() - began
    except torch.OutOfMemoryError as e:
        print(f"      {length} tokens: {str(e).splitlines()[0]}", flush=True)
        return {}
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    print(f"      {length} tokens: peak {peak / GIB:.1f} GiB, {seconds:.0f} s", flush=True)
    return {
        "held": held,
        "tokens_s": length / seconds, "seconds": seconds, "peak": peak, "predicted_s": 0.0, "host": 0, "start": seconds,
        "length": length, "first_loss": loss, "last_loss": loss,
    }  # fmt: skip


# -- the parent ------------------------------------------------------------------------------------------------------


def budget_of(way: str, free_peak: float) -> int:
    share = {"ours-60": 0.6, "ours-40": 0.4, "ours-25": 0.25}.get(way)
    return int(free_peak * share) if share else (80 if "long" in way else 40) * GIB


@dataclass
class Worker:
    """One way in a process of its own."""

    size: str
    way: str
    process: subprocess.Popen[str]
    errors: Any

    @staticmethod
    def of(size: str, way: str, budget: int, batch: int, length: int, steps: int, beside: int) -> Worker:
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the process has failed)
        numbers = [str(x) for x in (budget, batch, length, steps)]
        command = [sys.executable, __file__, "--one", size, way, *numbers]
        threads = str(max(2, min(8, (os.cpu_count() or 2) // beside)))  # of the compiler
        env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": threads}
        env |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if "long" in way else {}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, **pipes, text=True, env=env)
        return Worker(size, way, process, errors)

    def answer(self) -> dict[str, float]:
        """The next thing it says; nothing, if it failed."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            print(line, end="", flush=True)
        self.process.wait()
        self.errors.seek(0)
        print(f"{self.size:5} {WAYS[self.way]:44} failed: {self.errors.read().strip()[-600:]}", flush=True)
        return {}

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


def wave(workers: list[Worker]) -> dict[str, dict[str, float]]:
    """All get ready beside each other; then one after the other is timed."""
    rows: dict[str, dict[str, float]] = {}
    first = {worker.way: worker.answer() for worker in workers}
    for worker in workers:
        said = first[worker.way]
        if "ready" in said:
            worker.go()
            said = worker.answer()
        if said:
            rows[worker.way] = said
            print_row(worker.size, worker.way, said)
        worker.process.wait()
    return rows


def print_row(size: str, way: str, r: dict[str, float]) -> None:
    predicted = ""
    if r.get("predicted_s"):
        predicted = f"{r['predicted_peak'] / r['peak'] - 1:+7.1%} {r['predicted_s'] / r['seconds'] - 1:+7.1%}"
    print(
        f"{size:5} {WAYS[way]:44} {r['length']:8.0f} {r['tokens_s']:9.0f} {r['peak'] / GIB:8.1f} "
        f"{r['host'] / GIB:8.1f} {predicted:15} {r['start']:7.0f}s  {r['first_loss']:.3f} -> {r['last_loss']:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", metavar="set", help=f"which rows: {', '.join(SETS)}")
    parser.add_argument("--model", choices=list(MODELS), help="another model than a set's own")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), help="these ways alone")
    parser.add_argument("--peak", type=float, default=34.7, help="GiB of the free run, of which budgets are shares")
    parser.add_argument("--batch", type=int, help="sequences, if not the model's own")
    parser.add_argument("--length", type=int, help="tokens of a sequence, if not the model's own; `long`: the most")
    args = parser.parse_args()
    if unknown := [name for name in args.sets if name not in SETS]:
        parser.error(f"no set {unknown[0]}: {', '.join(SETS)}")
    print(
        f"{'model':5} {'how':44} {'length':>8} {'tokens/s':>9} {'peak GiB':>8} {'host GiB':>8} {'predicted - 1':15} "
        f"{'start':>8}  loss",
        flush=True,
    )
    for name in args.sets or SETS:
        size, waves = SETS[name]
        size = args.model or size
        batch, length = args.batch or MODELS[size][5], args.length or MODELS[size][6]
        if name == "state" and not args.batch and available() < LARGE_HOST:
            batch = 3 * batch // 4
        rows: dict[str, dict[str, float]] = {}
        for each in waves:
            workers = []
            chosen = [way for way in each if not args.ways or way in args.ways]
            for way in chosen:
                numbers = batch, length, 4
                if way == "long-recompute":
                    numbers = 1, args.length or 0, 1
                if way == "long-ours":  # as long as it must be, for one step
                    numbers = 1, args.length or 2 * int(rows.get("long-recompute", {}).get("length", 16 * GRAIN)), 1
                workers.append(Worker.of(size, way, budget_of(way, args.peak * GIB), *numbers, beside=len(chosen)))
            rows |= wave(workers)
        compare(rows, args.peak * GIB)


def compare(rows: dict[str, dict[str, float]], peak: float) -> None:
    """What the rows of a set come to."""
    free = rows.get("free")
    theirs, ours = rows.get("long-recompute"), rows.get("long-ours")
    if theirs and ours:
        print(f"  longest sequence: at least {ours['length'] / theirs['length']:.2f}x   (bar 2.0)")
    for way, r in rows.items():
        if r.get("unconstrained_s"):
            print(f"  {WAYS[way]}: {r['unconstrained_s'] / r['seconds']:.2f} of the clock's free run   (bar 0.5)")
        elif way.startswith("ours") and free:
            budget = budget_of(way, peak)
            rivals = [x["tokens_s"] for k, x in rows.items() if "ours" not in k and k != "free" and x["peak"] <= budget]
            rival = (
                f", {r['tokens_s'] / max(rivals):.2f}x of the best other that fits" if rivals else ", none other fits"
            )
            print(f"  {WAYS[way]}: {r['tokens_s'] / free['tokens_s']:.2f} of the free run{rival}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        size, way, *numbers = sys.argv[2:]
        print(json.dumps(measure(size, way, *map(int, numbers))))
    else:
        main()
