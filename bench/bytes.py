"""Bytes on the wire, counted in lowered programs, beside the formulas of the textbooks.  No process is started: it is a
query on programs.

    python bench/bytes.py

A Llama is counted whole, with its ends; of the others, what a layer sends is the difference between a model of three
layers and one of two.  b, s, h, e are batch, length, width and inner width; P is what a layer's parameters take, N, x,
y are ranks.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from distributing import OneDevice, spread

import mycel
from mycel import lower
from mycel.ir import Layout, Mesh
from mycel.plan import Plan
from mycel.plan.hardware import KNOWN
from mycel.plan.links import CPU_LINK

B, S, H = 8, 16, 96
LAYERS = 8


class Layers(nn.Module):
    """Residual MLPs."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


def total(spread_out: lower.Distributed) -> float:
    return sum(lower.sent(spread_out.local).values())


def step_bytes(plan: str, ranks: int) -> float:
    """What a layer sends in a training step under a plan over dp."""
    sent = []
    for count in (2, 3):
        model = Layers(count, H, 4 * H)
        one = OneDevice.of(model, {"x": torch.randn(64 * ranks, 64, H)})
        sent.append(total(one.under(Plan.read(plan, Mesh(dp=ranks)))))
    return sent[1] - sent[0]


def forward_bytes(mesh: Mesh, inner: int, up: list[str], down: list[str], feature: str) -> float:
    """What a layer sends in a forward pass, its weights given."""
    sent = []
    for count in (2, 3):
        model = Layers(count, H, inner)
        x = torch.randn(B, S, H)
        program = mycel.capture(
            lambda x, *ws, n=count: _layers(x, ws, n),
            x,
            *(p.detach() for p in [*model.up.parameters(), *model.down.parameters()]),
        )
        given = {0: Layout(((), (), (feature,) if feature else ()))}
        for i, v in enumerate(program.inputs[1:], 1):
            given[i] = Layout(
                tuple(tuple(a for a in (d,) if a) for d in (up if v.shape == (inner, H) and i <= count else down))
            )
        spread_out = spread(program, Plan(mesh), given)
        sent.append(total(spread_out))
    return sent[1] - sent[0]


def llama_bytes(ranks: int, length: int, width: int, precision: str = "fp32", sums: str = "as computed") -> float:
    """What a Llama of LAYERS layers sends in a training step under Megatron's plan."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        vocab_size=256,
    )
    ids = torch.randint(0, 256, (B, length))
    one = OneDevice.of(LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, precision=precision)
    plan = replace(Plan.read("tp", Mesh(tp=ranks)), sums=sums)
    return total(one.under(plan, replace(KNOWN["H100"], levels=(CPU_LINK,)), compiled=True))  # slow: bytes decide


def megatron(ranks: int, length: int, width: int, itemsize: int) -> tuple[float, float]:
    """Megatron's bytes for it: four all-reduces of bsh a layer; and those of one, of which the ends of the model send a
    few (the embedding's result, what the head's input and weight have of a gradient)."""
    one = 2 * (ranks - 1) / ranks * B * length * width * itemsize
    return 4 * LAYERS * one, one


def _layers(x: torch.Tensor, ws: tuple[torch.Tensor, ...], n: int) -> torch.Tensor:
    for up, down in zip(ws[:n], ws[n:], strict=True):
        x = x + nn.functional.linear(torch.relu(nn.functional.linear(x, up)), down)
    return x.square().mean()


def row(name: str, counted: float, formula: float) -> None:
    print(f"{name:44} {counted:14.0f} {formula:14.0f}   {counted / formula:.4f}x")


def main() -> None:
    print(f"{'what a layer sends, bytes a rank':44} {'counted':>14} {'formula':>14}")
    params = 2 * H * 4 * H * 4
    for n in (2, 4, 8):
        ring = (n - 1) / n * params
        row(f"dp {n}: all-reduce 2(N-1)/N P", step_bytes("dp", n), 2 * ring)
        row(f"zero1 {n}: 2(N-1)/N P", step_bytes("zero1", n), 2 * ring)
        row(f"zero3 {n}: 3(N-1)/N P, 1.5x of dp", step_bytes("zero3", n), 3 * ring)
    print(f"\n{f'what a Llama of {LAYERS} layers sends':44} {'counted':>14} {'formula':>14}")
    for n, width in ((2, 128), (4, 128), (4, 512)):
        length = 128
        row(
            f"Llama, tp {n}, h {width}: 4 all-reduces of bsh",
            llama_bytes(n, length, width),
            megatron(n, length, width, 4)[0],
        )
        for sums in ("as computed", "fp32"):
            sent = llama_bytes(n, length, width, "bf16", sums)
            row(f"Llama in bf16, tp {n}, h {width}, sums: {sums}", sent, megatron(n, length, width, 2)[0])
    print()
    for ratio in (1, 8 / 3, 4):
        e = round(ratio * H)
        for p in (4, 8, 16, 32):
            x, y = min(
                ((p // y, y) for y in (2, 4, 8, 16) if p % y == 0 and p > y),
                key=lambda xy: e * (xy[1] - 1) + H * (xy[0] - 1),
            )
            flat = forward_bytes(Mesh(tp=p), e, ["tp", ""], ["", "tp"], "")
            row(f"1-D tp {p}, e = {ratio:.3g}h: 2(P-1)bsh/P", flat, 2 * (p - 1) / p * B * S * H * 4)
            square = forward_bytes(Mesh(tx=x, ty=y), e, ["tx", "ty"], ["ty", "tx"], "ty")
            row(f"2-D tp {x}x{y}: 2bs[e(y-1)+h(x-1)]/xy", square, 2 * B * S * 4 * (e * (y - 1) + H * (x - 1)) / (x * y))
            print(f"{'    2-D against 1-D':44} {square / flat - 1:+14.0%}")


if __name__ == "__main__":
    main()
