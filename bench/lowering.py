"""Seconds from a training step on one device to the program of every rank: a 32-layer Llama, for 64 and for 4096 ranks,
on one core.

python bench/lowering.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from distributing import OneDevice

from mycel.ir import Mesh
from mycel.plan import Plan


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
        start = time.perf_counter()
        one.under(Plan.read(names, mesh))
        print(f"{names:10} {mesh.world:5} ranks   {time.perf_counter() - start:.2f} s   (bar 2 s)")


if __name__ == "__main__":
    main()
