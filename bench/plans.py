"""The plan that a search finds against every ready plan and their products, by the clock: 24 models on clusters.

    python bench/plans.py [name ...]      of all pairs those whose name has one of these in it; --quick: no ready plans
    python bench/plans.py depth           what 64 layers cost in planning, of what 32 do

A row: seconds of planning (and of the process's CPU time, where a machine does other things beside), the chosen plan
and its step, the fastest ready plan that fits and its step, and the ratio.  Each bar is printed with whether it is met;
the exit code is 1 where one is not.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf
from bars import kept
from torch import nn

from mycel.candidates import Candidate
from mycel.errors import PlanError
from mycel.ir import Mesh
from mycel.plan import Plan
from mycel.plan.cluster import Cluster
from mycel.search import Search
from mycel.train.planner import search

Batch = dict[str, torch.Tensor]


def tokens(rows: int, length: int) -> Batch:
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def llama(width: int, inner: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    config = hf.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    return lambda: hf.LlamaForCausalLM(config)


class WideMLP(nn.Module):
    """Four products of 32,768 x 32,768."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32768, 32768, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return ((x - y).float() ** 2).mean()


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_embd=1600, n_layer=48, n_head=25, use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
        )
    )


def bert() -> nn.Module:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return hf.BertForMaskedLM(hf.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def vit() -> nn.Module:
    sizes = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16, "intermediate_size": 5120}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, patch_size=14, num_labels=1000))


def t5() -> nn.Module:
    sizes = {"d_model": 2048, "d_ff": 5120, "d_kv": 64, "num_layers": 24, "num_heads": 32, "vocab_size": 32128}
    config = hf.T5Config(
        **sizes, dropout_rate=0.0, feed_forward_proj="gated-gelu", decoder_start_token_id=0, use_cache=False
    )
    return hf.T5ForConditionalGeneration(config)


def images(rows: int, length: int) -> Batch:
    pixels = torch.empty(rows, 3, 224, 224, dtype=torch.bfloat16, device="meta")
    return {"pixel_values": pixels, "labels": torch.empty(rows, dtype=torch.int64, device="meta")}


def rows_of_floats(rows: int, length: int) -> Batch:
    x = torch.empty(rows, 32768, dtype=torch.bfloat16, device="meta")
    return {"x": x, "y": x}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch], int]] = {
    "gpt2-xl": (gpt2, tokens, 1024),
    "llama-8b": (llama(4096, 14336, 32, 32), tokens, 8192),
    "llama-8b-f32": (llama(4096, 14336, 32, 32), tokens, 8192),
    "llama-70b": (llama(8192, 28672, 80, 64), tokens, 8192),
    "llama-405b": (llama(16384, 53248, 126, 128), tokens, 8192),
    "bert-large": (bert, tokens, 512),
    "vit-h": (vit, images, 1),
    "t5-xl": (t5, tokens, 512),
    "mlp": (WideMLP, rows_of_floats, 1),
}

SLOW = {"name": "network", "bytes_s": 1.1e9, "start_s": 3e-5}  # 10 Gbit/s, of each host
LINKS = {"fast": None, "slow": [{"name": "nvlink", "bytes_s": 3.6e11, "start_s": 3e-6}, {**SLOW, "shared": True}]}

PAIRS = [
    ("gpt2-xl", 1, "fast", 8), ("gpt2-xl", 8, "fast", 64), ("gpt2-xl", 24, "fast", 192), ("gpt2-xl", 64, "slow", 512),
    ("llama-8b", 8, "fast", 16), ("llama-8b", 24, "fast", 48), ("llama-8b", 64, "fast", 64),
    ("llama-8b", 64, "slow", 128), ("llama-8b", 512, "fast", 512), ("llama-8b", 4096, "fast", 4096),
    ("llama-70b", 64, "fast", 64), ("llama-70b", 512, "fast", 512), ("llama-70b", 512, "slow", 1024),
    ("llama-405b", 512, "fast", 256), ("llama-405b", 4096, "fast", 2048),
    ("bert-large", 8, "fast", 256), ("bert-large", 64, "slow", 2048), ("vit-h", 8, "fast", 512),
    ("vit-h", 24, "slow", 768), ("t5-xl", 8, "fast", 64), ("t5-xl", 64, "fast", 512),
    ("mlp", 8, "fast", 1024), ("mlp", 64, "fast", 1024), ("mlp", 64, "slow", 8192),
    ("llama-8b-f32", 1, "fast", 8),  # besides the 24: parameters and state in 32 bits, more than a device has
]  # fmt: skip


# seconds of planning on two cores, from the model to the plan, and the process's memory
SECONDS_BARS = {"llama-8b 64 fast": 10.0, "llama-70b 512 fast": 20.0, "llama-405b 4096 fast": 60.0}
MEMORY_BAR_GIB, RATIO_BAR = 2.0, 1.0
DEPTH_BAR, TURNS = 1.2, 3  # of 64 layers against 32: the least of so many turns each


def cluster(world: int, links: str) -> Cluster:
    devices = min(world, 8)
    data = {"name": f"h100x{world}", "device": "H100", "devices": devices, "hosts": world // devices}
    return Cluster.read({**data, **({"levels": LINKS[links]} if LINKS[links] and world > devices else {})})


def asked(name: str, world: int, links: str, rows: int) -> Search:
    make, batch, length = MODELS[name]
    is_wide = name.endswith("f32")  # products are in 16 bits in any case
    with torch.device("meta"):
        model = make().to(torch.float32 if is_wide else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    settings: dict[str, Any] = {"precision": "bf16"} if is_wide else {}
    return search(model, optimizer, batch(rows, length), cluster(world, links), **settings)


def ready(world: int, rows: int) -> Iterator[tuple[str, Mesh]]:
    """Ready plans and their products, on meshes of so many devices."""
    for tp in (1, 2, 4, 8, 16):
        dp = world // tp
        if world % tp or dp > rows:
            continue
        for data in ("dp", "zero1", "zero2", "zero3") if dp > 1 else ("",):
            if tp == 1:
                yield data, Mesh(dp=dp)
            else:
                yield "+".join(filter(None, (data, "tp"))), Mesh({"dp": dp, "tp": tp} if dp > 1 else {"tp": tp})
        if tp >= 8 and dp > 1:
            yield "zero3+tp2d", Mesh(dp=dp, tx=tp // 2, ty=2)


def best_ready(search_of: Search, world: int, rows: int) -> tuple[str, Candidate] | None:
    best: tuple[str, Candidate] | None = None
    for name, mesh in ready(world, rows) if world > 1 else ():
        tried = Plan.read(name, mesh)
        for count in (1, 4):
            if rows // mesh.sizes().get("dp", 1) % count:
                continue
            microbatches = {**tried.data(), "microbatches": count}
            try:
                candidate = search_of.priced(Plan.read(microbatches))
            except PlanError as e:
                print(f"      {name} on {mesh}: {str(e).splitlines()[0]}")
                break
            if candidate.fits and (best is None or candidate.seconds < best[1].seconds):
                best = f"{name} {mesh}" + (f" x{count}" if count > 1 else ""), candidate
            if candidate.fits:
                break
    return best


def depth() -> bool:
    """Planning for 64 H100, of models that differ in the number of layers alone."""
    seconds: dict[int, list[float]] = {32: [], 64: []}
    for _ in range(TURNS):
        for layers, took in seconds.items():
            with torch.device("meta"):
                model = llama(4096, 14336, layers, 32)().to(torch.bfloat16)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            started = time.perf_counter()
            answer = search(model, optimizer, tokens(64, 8192), cluster(64, "fast")).run()
            took.append(time.perf_counter() - started)
            assert answer.best is not None
    few, many = (min(took) for took in seconds.values())
    said = f"depth: 32 layers {few:.1f} s, 64 layers {many:.1f} s of planning, {many / few:.2f} times"
    return kept(said, f"{DEPTH_BAR}", many <= DEPTH_BAR * few)


def planned(name: str, world: int, links: str, rows: int, quick: bool) -> tuple[bool, float]:
    """(are the bars of one pair met?, the chosen plan's step of the best ready plan's)"""
    title, ratio = f"{name} {world} {links}", 0.0
    started, computing = time.perf_counter(), time.process_time()
    search_of = asked(name, world, links, rows)
    answer = search_of.run()
    took, best = time.perf_counter() - started, answer.best
    cpu = time.process_time() - computing
    assert best is not None
    print(
        f"{title:24} {took:6.1f} s  {cpu:6.1f} s cpu  {best.seconds * 1e3:10,.1f} ms  "
        f"{100 * answer.mfu(best):5.1f} %  bound {answer.bound / best.seconds:5.2f}  "
        f"{best.peak / 2**30:5.1f} GiB  {best.shape}",
        flush=True,
    )
    is_met = True
    if bar := SECONDS_BARS.get(title):
        is_met &= kept(f"{'':24} planned in {took:.1f} s", f"{bar:.0f} s", took <= bar)
    there = search_of.memory or float("inf")
    if best.peak > there or answer.bound > best.seconds:
        is_met &= kept(f"{'':24} {best.peak / 2**30:.1f} GiB", f"{there / 2**30:.0f} GiB, and above its bound", False)
    other = None if quick else best_ready(search_of, world, rows)
    if other is not None:
        ratio = best.seconds / other[1].seconds
        print(f"{'':24} {ratio:6.3f} of {other[1].seconds * 1e3:10,.1f} ms  {other[0]}", flush=True)
    return is_met, ratio


def main() -> None:
    quick, names = "--quick" in sys.argv, [a for a in sys.argv[1:] if not a.startswith("-")]
    chosen = [pair for pair in PAIRS if not names or any(n in f"{pair[0]} {pair[1]} {pair[2]}" for n in names)]
    rows = [planned(*pair, quick) for pair in chosen]
    are_met = [is_met for is_met, _ in rows]
    if not names or "depth" in names:
        are_met.append(depth())
    if chosen and not quick:
        worst = max(ratio for _, ratio in rows)
        are_met.append(kept(f"largest ratio {worst:.3f}", f"{RATIO_BAR:.3f}", worst <= RATIO_BAR))
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    are_met.append(kept(f"{gib:.2f} GiB of memory", f"{MEMORY_BAR_GIB:g} GiB", gib <= MEMORY_BAR_GIB))
    sys.exit(not all(are_met))


if __name__ == "__main__":
    main()
