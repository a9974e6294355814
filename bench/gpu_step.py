"""Whole training steps of unmodified Hugging Face models on one GPU: ours against torch.compile.

    python bench/gpu_step.py                          all rows
    python bench/gpu_step.py 1b ours compile          one model, two ways
    python bench/gpu_step.py 3b ours fp8 --losses 200 bf16 against fp8, and the losses of 200 more steps of each
    python bench/gpu_step.py --together 4 …           four at a time: they compile beside each other, and are timed one
                                                      after another; the time to the third step means little then

Each way runs in a process of its own with empty compile caches, so that the time to the third step is that of a fresh
start.  The peak is taken from the second step on, in which ours is recorded.  Model FLOPs a token (of Llamas):
6 (N - input embedding) + 6 layers * width * length; MFU is of 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_models import model_and_batch

PEAK = 989e12
WAYS = {
    "eager": "eager",
    "compile": "torch.compile",
    "overhead": 'torch.compile(mode="reduce-overhead")',
    "tuned": 'torch.compile(mode="max-autotune-no-cudagraphs")',
    "recompute": "torch.compile + full recomputation",
    "flex": "torch.compile, flex_attention",
    "ours": "mycel",
    "ours-20": 'mycel, memory="20GiB"',
    "again": "mycel, second start",
    "mesh": "mycel, on a mesh of one",
    "fp8": 'mycel, precision="fp8"',
}
OURS = ("ours", "ours-20", "again", "mesh", "fp8")
MODES = {"overhead": "reduce-overhead", "tuned": "max-autotune-no-cudagraphs"}
TRANSFORMERS = (
    "1b",
    "3b",
    "packed-1b",
    "gpt2-medium",
    "gpt2-dropout",
    "bert-large",
    "bert-mask",
    "bert-dropout",
    "mistral",
    "gemma2",
    "gemma3",
    "qwen3-0.6b",
    "t5-base",
    "whisper-small",
    "vit-large",
    "swin",
)
OTHERS = ("resnet-50", "convnext", "deit-tiny", "lstm")
MORE = {
    "1b": ["again", "mesh", "recompute", "ours-20", "fp8"],
    "3b": ["fp8"],
    "deit-tiny": ["overhead"],
    "packed-1b": ["flex"],
    "resnet-50": ["overhead"],
}
STEPS = 10
KERNELS = 14  # that are shown


def measure(name: str, way: str) -> dict[str, Any]:
    """One way in this process."""
    import torch

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, batch = model_and_batch(name, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    step, about = make_step(model, optimizer, way)
    losses = [step(batch)]
    sync()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses += [step(batch) for _ in range(2)]
    sync()
    third = time.perf_counter() - start
    wait_for_turn()
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        losses.append(step(batch))
        sync()
        times.append(time.perf_counter() - began)
    kernels = kernel_lines(lambda: step(batch)) if os.environ.get("BENCH_PROFILE") else []
    curve = [float(step(batch)) for _ in range(int(os.environ.get("BENCH_LOSSES", "0")))]
    second = sorted(times)[len(times) // 2]
    predicted, replayed = about()
    rows = batch["labels"].numel()
    return {
        "step_ms": second * 1e3,
        "rows_s": rows / second,
        "mfu": rows / second * flops_a_token(model, batch) / PEAK,
        "peak": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0,
        "third": third,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "predicted": predicted / 2**30,
        "replayed": replayed,
        "kernels": kernels,
        "curve": curve,
    }


def kernel_lines(step) -> list[str]:
    """What most of a step's time on the device goes to."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events) / 1e3
    shown = [f"{e.self_device_time_total / 1e3:10.2f} ms {e.count:6} {e.key[:90]}" for e in events[:KERNELS]]
    return [f"{total:10.2f} ms {sum(e.count for e in events):6} kernels in all", *shown]


def flops_a_token(model, batch) -> float:
    """Of a Llama; 0 for others."""
    config = getattr(model, "config", None)
    if config is None or config.model_type != "llama":
        return 0.0
    embedding = config.vocab_size * config.hidden_size
    attention = 6 * config.num_hidden_layers * config.hidden_size * batch["labels"].shape[1]
    return 6 * (sum(p.numel() for p in model.parameters()) - embedding) + attention


def wait_for_turn() -> None:
    """Where several compile beside each other: says that this one is ready, and waits until nobody else runs."""
    mine = os.environ.get("BENCH_TURN")
    if mine:
        Path(f"{mine}.ready").touch()
        while not Path(f"{mine}.go").exists():
            time.sleep(0.05)


def make_step(model, optimizer, way):
    """(a function of a batch that takes a step, a function that says the predicted peak and whether it is replayed)"""
    import torch

    if way in OURS:
        import mycel

        mesh = mycel.Mesh(dp=1, tp=1) if way == "mesh" else None
        memory, precision = "20GiB" if way == "ours-20" else None, "fp8" if way == "fp8" else "fp32"
        ours = mycel.train_step(model, optimizer, mesh=mesh, memory=memory, precision=precision)
        return (lambda batch: ours(**batch)), (lambda: (ours.plan.peak, str(ours.entries[0].replayed or "")))
    if way == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if way == "flex":
        model.set_attn_implementation("flex_attention")
    run = model if way == "eager" else torch.compile(model, mode=MODES.get(way))

    def step(batch):
        loss = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()

    return step, lambda: (0, "")


class Row:
    """One way of one model, in a process of its own."""

    def __init__(self, name: str, way: str, caches: str, together: bool) -> None:
        self.name, self.way = name, way
        cache = os.path.join(caches, f"{name}-{'ours' if way in OURS and way != 'fp8' else way}")
        self.turn = os.path.join(caches, f"{name}-{way}.turn")
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": os.path.join(cache, "triton")}
        env |= {"BENCH_TURN": self.turn} if together else {}
        command = [sys.executable, __file__, "--one", name, way]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def is_waiting(self) -> bool:
        return Path(f"{self.turn}.ready").exists() or self.process.poll() is not None

    def finish(self) -> dict[str, Any] | None:
        Path(f"{self.turn}.go").touch()
        out, err = self.process.communicate()
        if self.process.returncode:
            print(f"{self.name:12} {WAYS[self.way]:42} failed: {err.strip()[-1500:]}", flush=True)
            return None
        r = json.loads(out.strip().splitlines()[-1])
        shown = f"{r['predicted']:9.1f}" if r["predicted"] else " " * 9
        mfu = f"{r['mfu']:6.1%}" if r["mfu"] else " " * 6
        print(
            f"{self.name:12} {WAYS[self.way]:42} {r['step_ms']:8.1f} {r['rows_s']:9.0f} {mfu} {r['peak']:9.1f} {shown} "
            f"{r['third']:8.1f}s  {r['first_loss']:.3f} -> {r['last_loss']:.3f}  {r['replayed']}",
            flush=True,
        )
        print("\n".join(r["kernels"]), end="\n" if r["kernels"] else "", flush=True)
        return r


def rows_of(models: list[str], ways: list[str]) -> list[tuple[str, str]]:
    names = models or [*TRANSFORMERS, *OTHERS]
    return [(name, way) for name in names for way in (ways or ["compile", "ours", *MORE.get(name, [])])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="models and ways; none: all")
    parser.add_argument("--together", type=int, default=1, metavar="N")
    parser.add_argument("--losses", type=int, default=0, metavar="N", help="of N more steps, on the same batch")
    parser.add_argument("--profile", action="store_true", help="also what a step's time on the device goes to")
    args = parser.parse_args()
    os.environ.update({"BENCH_PROFILE": "1"} if args.profile else {})
    os.environ["BENCH_LOSSES"] = str(args.losses)
    ways = [a for a in args.what if a in WAYS]
    rows = rows_of([a for a in args.what if a not in WAYS], ways)
    results: dict[tuple[str, str], dict[str, Any]] = {}
    caches = tempfile.mkdtemp()
    # so that no way pays for writing .pyc files
    modules = "mycel.step, torch._inductor.compile_fx, transformers.models.llama.modeling_llama"
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=False)
    print(
        f"{'model':12} {'how':42} {'step ms':>8} {'rows/s':>9} {'MFU':>6} {'peak GiB':>9} {'predicted':>9} "
        f"{'3rd step':>9}  loss",
        flush=True,
    )
    for i in range(0, len(rows), args.together):
        group = [Row(name, way, caches, args.together > 1) for name, way in rows[i : i + args.together]]
        while args.together > 1 and not all(row.is_waiting() for row in group):
            time.sleep(0.05)
        for row in group:
            r = row.finish()
            if r is not None:
                results[row.name, row.way] = r
    for name in dict.fromkeys(name for name, _ in rows):
        theirs = [r for way in ("compile", "flex", *MODES) if (r := results.get((name, way)))]
        best = max(theirs, key=lambda r: r["rows_s"]) if theirs else None
        bars = "1.1, 0.8, 0.35" if name in OTHERS else "1.2, 0.8, 0.35"
        compare(results.get((name, "ours")), best, f"{name}: mycel against the faster torch.compile", bars)
        recompute = results.get((name, "recompute"))
        compare(results.get((name, "ours-20")), recompute, f"{name}: in 20 GiB against recomputation", "1.15")
        compare(results.get((name, "mesh")), results.get((name, "again")), f"{name}: a mesh of one against none", "1.0")
        compare(results.get((name, "fp8")), results.get((name, "ours")), f"{name}: fp8 against bf16", "1.25")
        compare_curves(results.get((name, "fp8")), results.get((name, "ours")), f"{name}: losses of fp8 and bf16")


def compare(ours: dict[str, Any] | None, theirs: dict[str, Any] | None, title: str, bars: str) -> None:
    if ours and theirs:
        ratios = [f"{k} {ours[k] / theirs[k]:.2f}x" for k in ("rows_s", "peak", "third") if theirs[k]]
        print(f"{title}: {', '.join(ratios)}   (bars {bars})")


def compare_curves(ours: dict[str, Any] | None, theirs: dict[str, Any] | None, title: str) -> None:
    """How far apart losses are at most and on the mean, beside how far they fell."""
    if ours and theirs and ours["curve"]:
        apart = [abs(a - b) for a, b in zip(ours["curve"], theirs["curve"], strict=True)]
        fell = theirs["first_loss"] - theirs["curve"][-1]
        print(
            f"{title}: {ours['curve'][-1]:.4f} and {theirs['curve'][-1]:.4f} after {len(apart)} more steps, apart by "
            f"{sum(apart) / len(apart):.4f} on the mean, {max(apart):.4f} at most, of {fell:.3f} that it fell"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3])))
    else:
        main()
