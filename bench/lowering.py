"""Seconds from a training step on one device to the program of every rank: a 32-layer Llama, for 64 and for 4096 ranks,
on one core, the best of some runs.

python bench/lowering.py
"""

from __future__ import annotations

import functools
import sys
import timeit
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from distributing import OneDevice

from mycel.ir import Mesh
from mycel.plan import Plan

RUNS = 5


def main() -> None:
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=4096,
                intermediate_size=11008,
                num_hidden_layers=32,
                num_attention_heads=32,
                vocab_size=32000,
            )
        )
    ids = torch.randint(0, 32000, (512, 64))
    one = OneDevice.of(model, {"input_ids": ids, "labels": ids}, clip_norm=1.0)
    for names, mesh in [("zero3+tp", Mesh(dp=8, tp=8)), ("zero3+tp", Mesh(dp=512, tp=8)), ("dp+tp", Mesh(dp=8, tp=8))]:
        plan = Plan.read(names, mesh)
        seconds = min(timeit.repeat(functools.partial(one.under, plan), number=1, repeat=RUNS))
        print(f"{names:10} {mesh.world:5} ranks   {seconds:.2f} s   (bar {1.4 if mesh.world == 64 else 1.1} s)")


if __name__ == "__main__":
    main()
