"""Whole training steps of unmodified Hugging Face Llamas on one GPU: ours against torch.compile, with and without
recomputation.

    python bench/gpu_step.py                 all rows
    python bench/gpu_step.py 1b ours compile

Each way runs in a process of its own with empty compile caches, so that the time to the third step is that of a fresh
start.  Model FLOPs a token: 6 (N - input embedding) + 6 layers * width * length (causal attention); MFU is of 989
TFLOP/s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time

MODELS = {  # width, layers, heads, key-value heads, inner width, batch, length
    "1b": (2048, 22, 32, 4, 5632, 16, 2048),
    "3b": (3072, 28, 24, 8, 8192, 4, 4096),
    "tiny": (256, 4, 8, 2, 704, 4, 256),
}
VOCABULARY, PEAK = 32000, 989e12
WAYS = {
    "eager": "HF, eager",
    "compile": "HF, torch.compile",
    "recompute": "HF, torch.compile + full recomputation",
    "ours": "mycel",
    "ours-20": 'mycel, memory="20GiB"',
    "again": "mycel, second start",
    "mesh": "mycel, on a mesh of one",
}
ROWS = [
    ("1b", "compile"),
    ("1b", "ours"),
    ("1b", "again"),
    ("1b", "mesh"),
    ("1b", "recompute"),
    ("1b", "ours-20"),
    ("3b", "compile"),
    ("3b", "ours"),
]


def measure(size: str, way: str, steps: int = 10) -> dict[str, float]:
    """One way in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, heads, kv, inner, batch, length = MODELS[size]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=length,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, VOCABULARY, (batch, length), device=device)
    per_token = 6 * (sum(p.numel() for p in model.parameters()) - VOCABULARY * width) + 6 * layers * width * length
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    step, predicted = make_step(model, optimizer, way)
    losses = []
    for _ in range(3):
        losses.append(step(ids))
    sync()
    third = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(step(ids))
        sync()
        times.append(time.perf_counter() - began)
    second = sorted(times)[len(times) // 2]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    rate = batch * length / second
    return {
        "tokens_s": rate,
        "mfu": rate * per_token / PEAK,
        "peak": peak / 2**30,
        "third": third,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "predicted": predicted() / 2**30,
    }


def make_step(model, optimizer, way):
    if way in ("ours", "ours-20", "again", "mesh"):
        import mycel

        mesh = mycel.Mesh(dp=1, tp=1) if way == "mesh" else None
        ours = mycel.train_step(model, optimizer, mesh=mesh, memory="20GiB" if way == "ours-20" else None)
        return (lambda ids: ours(input_ids=ids, labels=ids)), (lambda: ours.plan.peak)
    import torch

    if way == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run = model if way == "eager" else torch.compile(model)

    def step(ids):
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, lambda: 0


def main(args: list[str]) -> None:
    sizes = [a for a in args if a in MODELS] or list(dict.fromkeys(s for s, _ in ROWS))
    ways = [a for a in args if a in WAYS]
    rows = (
        [(s, w) for s in sizes for w in ways]
        if ways
        else [r for r in ROWS if r[0] in sizes] or [(s, w) for s in sizes for w in ("compile", "ours")]
    )
    results: dict[tuple[str, str], dict[str, float]] = {}
    caches = tempfile.mkdtemp()
    # so that no way pays for writing .pyc files
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import mycel.step, torch._inductor.compile_fx, transformers.models.llama.modeling_llama",
        ],
        check=False,
    )
    print(
        f"{'model':6} {'how':42} {'tokens/s':>9} {'MFU':>6} {'peak GiB':>9} {'predicted':>9} {'3rd step':>9}  loss",
        flush=True,
    )
    for size, way in rows:
        cache = os.path.join(caches, f"{size}-{'ours' if way in ('again', 'mesh') else way}")
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": os.path.join(cache, "triton")}
        done = subprocess.run(
            [sys.executable, __file__, "--one", size, way], env=env, check=False, capture_output=True, text=True
        )
        if done.returncode:
            print(f"{size:6} {WAYS[way]:42} failed: {done.stderr.strip()[-1500:]}", flush=True)
            continue
        r = results[size, way] = json.loads(done.stdout.strip().splitlines()[-1])
        shown = f"{r['predicted']:9.1f}" if r["predicted"] else " " * 9
        print(
            f"{size:6} {WAYS[way]:42} {r['tokens_s']:9.0f} {r['mfu']:6.1%} {r['peak']:9.1f} {shown} "
            f"{r['third']:8.1f}s  "
            f"{r['first_loss']:.3f} -> {r['last_loss']:.3f}",
            flush=True,
        )
    for size in sizes:
        compare(
            results.get((size, "ours")),
            results.get((size, "compile")),
            f"{size}: mycel against torch.compile",
            "1.2, 1.0, 0.25",
        )
        compare(
            results.get((size, "ours-20")),
            results.get((size, "recompute")),
            f"{size}: mycel in 20 GiB against torch.compile + recomputation",
            "1.15",
        )
        compare(
            results.get((size, "mesh")),
            results.get((size, "again")),
            f"{size}: mycel on a mesh of one against no mesh",
            "1.0",
        )


def compare(ours: dict[str, float] | None, theirs: dict[str, float] | None, title: str, bars: str) -> None:
    if ours and theirs:
        ratios = [f"{k} {ours[k] / theirs[k]:.2f}x" for k in ("tokens_s", "peak", "third") if theirs[k]]
        print(f"{title}: {', '.join(ratios)}   (bars {bars})")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], sys.argv[3])))
    else:
        main(sys.argv[1:])
