"""Whole training steps of a mixture of experts in the shape of OLMoE on one GPU, in bf16: ours against transformers
with torch.compile and its best way to compute experts, and a model written by hand with torch's grouped products.

    python bench/experts.py [--layers 4] [--ways ours hf hand] [--together] [--profile]

OLMoE has 16 layers (6.9B parameters, 1.3B of them for a token).  Each way runs in a process of its own; with
`--together` all get ready at once and are then measured one after the other.  All start from the same weights, so the
first losses agree.  `--profile` adds which kernels a step spends its time in.  Beside the figures stands what the step
would take at best (`bound`).  Experts split over CPU processes: bench/ddp.py --models olmoe --ways ep.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304,
}  # fmt: skip
SMALL = {**SHAPE, "hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
         "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 128}  # fmt: skip
ON_GPU = torch.cuda.is_available()
BATCH, LENGTH = (8, 2048) if ON_GPU else (2, 32)
PRODUCTS, MEMORY = 700e12, 4.2e12  # FLOP/s of products in bf16 and bytes/s of an H200, as they were measured
WAYS = {"hf": "HF, grouped_mm, torch.compile", "hand": "by hand, torch.compile", "ours": "mycel"}


def olmoe(layers: int, experts: str = "grouped_mm") -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(**(SHAPE if ON_GPU else SMALL), num_hidden_layers=layers, use_cache=False, pad_token_id=1)
    config._experts_implementation = experts
    torch.manual_seed(0)
    with torch.device("cuda" if ON_GPU else "cpu"):
        return OlmoeForCausalLM(config).to(torch.bfloat16)


# -- by hand


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Layer(nn.Module):
    """Attention with norms of q and k, and experts whose tokens are sorted for grouped products."""

    def __init__(self, of: nn.Module, config) -> None:
        super().__init__()
        attention, mlp = of.self_attn, of.mlp
        self.q, self.k, self.v, self.o = (getattr(attention, f"{n}_proj") for n in "qkvo")
        self.norms = nn.ModuleList(Norm(config.hidden_size) for _ in range(4))
        self.router, self.up, self.down = mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj
        self.heads, self.chosen = config.num_attention_heads, config.num_experts_per_tok

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attended(self.norms[0](x), cos, sin)
        return x + self.routed(self.norms[1](x))

    def attended(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        def turned(y: torch.Tensor) -> torch.Tensor:
            a, b = y.chunk(2, dim=-1)
            return y * cos + torch.cat([-b, a], -1) * sin

        q, k, v = split(self.norms[2](self.q(x))), split(self.norms[3](self.k(x))), split(self.v(x))
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        scores = F.linear(rows, self.router).float().softmax(-1)
        weights, ids = scores.topk(self.chosen, -1)
        order = ids.flatten().argsort(stable=True)
        ends = torch.cumsum(F.one_hot(ids.flatten(), self.up.shape[0]).sum(0), 0, dtype=torch.int32)
        h = F.grouped_mm(rows[order // self.chosen], self.up.transpose(1, 2), offs=ends)
        a, b = h.chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(a) * b, self.down.transpose(1, 2), offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        y = y[back].view(*weights.shape, -1) * weights.unsqueeze(-1)
        return y.sum(1).to(x.dtype).view_as(x)


class ByHand(nn.Module):
    """With the weights of an OLMoE."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = of.model.embed_tokens, of.lm_head
        self.layers = nn.ModuleList(Layer(layer, of.config) for layer in of.model.layers)
        self.norm = Norm(of.config.hidden_size)
        width = of.config.hidden_size // of.config.num_attention_heads
        rates = 1e4 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(LENGTH)[:, None] * torch.cat([rates, rates])
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        logits = self.head(self.norm(x))[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def make_step(way: str, layers: int):
    model = olmoe(layers)
    if way == "hand":
        model = ByHand(model).to(next(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if way == "ours":
        import mycel

        ours = mycel.train_step(model, optimizer)
        return lambda ids: ours(input_ids=ids, labels=ids)
    run = torch.compile(model) if ON_GPU else model

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = run(ids) if way == "hand" else run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def bound(layers: int) -> tuple[float, float]:
    """Seconds of a step at best: products of the experts that are chosen, and one reading and writing of what the
    update changes."""
    d, f, e, k, v = (SHAPE[n] for n in ("hidden_size", "intermediate_size", "num_experts", "num_experts_per_tok",
                                        "vocab_size"))  # fmt: skip
    tokens, attention = BATCH * LENGTH, 4 * d * d
    products = 6 * tokens * (layers * (attention + k * 3 * d * f) + v * d)
    scores = 3.5 * layers * tokens * 2 * LENGTH * d  # forward, and backward two and a half times; half of them masked
    parameters = layers * (attention + e * 3 * d * f) + 2 * v * d
    return (products + scores) / PRODUCTS, 14 * parameters / MEMORY


def kernels(step, ids: torch.Tensor, steps: int = 3) -> dict[str, list[float]]:
    """Milliseconds and launches of a step by kernel, and how long none ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step(ids)
        torch.cuda.synchronize()
    ran = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    end, idle = None, 0.0
    for event in sorted(ran, key=lambda e: e.time_range.start):
        ms, n = by_name[event.name]
        by_name[event.name] = [ms + event.time_range.elapsed_us() / 1e3 / steps, n + 1 / steps]
        idle += max(event.time_range.start - end, 0.0) / 1e3 / steps if end is not None else 0.0
        end = max(event.time_range.end, end or 0.0)
    by_name["no kernel"] = [idle, 0.0]
    return dict(sorted(by_name.items(), key=lambda item: -item[1][0]))


def measure(way: str, layers: int, profile: bool, in_turn: bool, steps: int = 8) -> dict[str, object]:
    """One way in this process; `in_turn`: what is timed waits for a word from the parent."""
    sync = torch.cuda.synchronize if ON_GPU else lambda: None
    start = time.perf_counter()
    step = make_step(way, layers)
    torch.manual_seed(1)
    ids = torch.randint(0, SHAPE["vocab_size"] if ON_GPU else 128, (BATCH, LENGTH))
    ids = ids.cuda() if ON_GPU else ids
    first = float(step(ids))
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()  # before a step is recorded: replayed, it takes no memory anew
    for _ in range(2):
        step(ids)
    sync()
    third = time.perf_counter() - start
    if in_turn:
        print("ready", flush=True)
        sys.stdin.readline()
    step(ids)
    sync()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        loss = step(ids)
        sync()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
    rate = BATCH * LENGTH / sorted(times)[steps // 2]
    result = {"tokens_s": rate, "peak": peak, "third": third, "first": first, "last": float(loss)}
    return {**result, "kernels": kernels(step, ids)} if profile else result


def results_of(ways: list[str], layers: int, profile: bool, together: bool):
    """(way, its figures or None, what it said): one process after the other, or all made ready first."""
    flags = ["--one", "--layers", str(layers), *["--profile"] * profile, *["--together"] * together]
    running = {}
    for way in ways:
        command = [sys.executable, __file__, *flags, "--ways", way]
        running[way] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        if not together:
            yield way, *finished(running[way])
    if together:
        for process in running.values():
            while (line := process.stdout.readline()) and line.strip() != "ready":
                pass
        for way, process in running.items():
            yield way, *finished(process, "go\n")


def finished(process: subprocess.Popen, word: str | None = None) -> tuple[dict | None, str]:
    out, err = process.communicate(word)
    return (None, err[-1500:]) if process.returncode else (json.loads(out.splitlines()[-1]), "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--one", action="store_true")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.ways[0], args.layers, args.profile, args.together)))
        return
    results = {}
    for way, r, error in results_of(args.ways, args.layers, args.profile, args.together):
        if r is None:
            print(f"{WAYS[way]:32} failed: {error}", flush=True)
            continue
        results[way] = r
        print(
            f"{WAYS[way]:32} {r['tokens_s']:9.0f} tokens/s  peak {r['peak']:6.1f} GiB  3rd step {r['third']:5.0f} s"
            f"  loss {r['first']:.4f} {r['last']:.4f}",
            flush=True,
        )
        for name, (ms, launches) in list(r.get("kernels", {}).items())[:40]:
            print(f"    {ms:8.3f} ms {launches:6.1f} x  {name[:100]}", flush=True)
    if ON_GPU:
        products, update = bound(args.layers)
        at_best = BATCH * LENGTH / (products + update)
        print(f"at best {at_best:.0f} tokens/s: products {products * 1e3:.1f} ms, update {update * 1e3:.1f} ms")
    ours = results.get("ours")
    for way, r in results.items():
        if ours is not None and way != "ours":
            memory = f", {ours['peak'] / r['peak']:.2f}x memory" if r["peak"] else ""
            print(f"mycel to {WAYS[way]}: {ours['tokens_s'] / r['tokens_s']:.2f}x tokens/s{memory}", flush=True)


if __name__ == "__main__":
    main()
