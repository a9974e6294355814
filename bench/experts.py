"""Whole training steps of a mixture of experts in the shape of OLMoE on one GPU, in bf16: ours against transformers
with torch.compile and its best way to compute experts, and a model written by hand with torch's grouped products.

    python bench/experts.py [--layers 4] [--ways ours hf hand]

OLMoE has 16 layers (6.9B parameters, 1.3B of them for a token).  Each way runs in a process of its own.  All start from
the same weights, so the first losses agree.  Experts split over CPU processes: bench/ddp.py --models olmoe --ways ep.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

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


def measure(way: str, layers: int, steps: int = 8) -> dict[str, float]:
    """One way in this process."""
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
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        loss = step(ids)
        sync()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
    rate = BATCH * LENGTH / sorted(times)[steps // 2]
    return {"tokens_s": rate, "peak": peak, "third": third, "first": first, "last": float(loss)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--one", action="store_true")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.ways[0], args.layers)))
        return
    results = {}
    for way in args.ways:
        command = [sys.executable, __file__, "--one", "--layers", str(args.layers), "--ways", way]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{WAYS[way]:32} failed: {done.stderr[-1500:]}", flush=True)
            continue
        r = results[way] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{WAYS[way]:32} {r['tokens_s']:9.0f} tokens/s  peak {r['peak']:6.1f} GiB  3rd step {r['third']:5.0f} s"
            f"  loss {r['first']:.4f} {r['last']:.4f}",
            flush=True,
        )
    ours = results.get("ours")
    for way, r in results.items():
        if ours is not None and way != "ours":
            memory = f", {ours['peak'] / r['peak']:.2f}x memory" if r["peak"] else ""
            print(f"mycel to {WAYS[way]}: {ours['tokens_s'] / r['tokens_s']:.2f}x tokens/s{memory}", flush=True)


if __name__ == "__main__":
    main()
