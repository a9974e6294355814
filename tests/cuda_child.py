"""What a rank does in the test of NCCL between processes:  python cuda_child.py FOLDER.

Two ranks share one GPU.  Under each plan a step takes the steps of one device beside it.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import torch
from pipelining import Tied

import mycel

RANK = int(os.environ["RANK"])
TENSOR = {"*.up.weight": ["tp", "-"], "*.up.bias": ["tp"], "*.down.weight": ["-", "tp"]}
DATA = {"mesh": {"dp": 2}, "batch": ["dp"]}
PLANS = {
    "dp": DATA,
    "zero3": {**DATA, "zero": "3 over dp"},
    "int8": {**DATA, "compress": {"dp": "int8+ef"}},
    "tp": {"mesh": {"tp": 2}, "parameters": TENSOR},
    "two at once": {"mesh": {"tp": 2}, "parameters": TENSOR, "at_once": 2},
    "1f1b": {"stages": ["embed", "layers.1"], "schedule": "1f1b"},
    "zbv": {"stages": 4, "schedule": "zbv"},
}
WIDTH = 64


def batch(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(0, 12, (2, 8, 3), generator=g)
    labels = torch.where(torch.rand(8, 3, generator=g) < 0.3, -100, ids[1])
    return {"ids": ids[0].cuda(), "labels": labels.cuda()}


def step_of(model: torch.nn.Module, plan: dict | None, *, compile: bool = False) -> mycel.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    more = {"accumulate": 4, "plan": None} if plan is None else {"plan": {**plan, "microbatches": 4}}
    return mycel.train_step(model, optimizer, compile=compile, clip_norm=0.05, **more)


def compared(name: str) -> None:
    """Three steps; of what loses something on its way the losses are close, and that is all."""
    torch.manual_seed(0)
    first = Tied(2, 0.1, WIDTH).double().cuda()
    serial, step = step_of(copy.deepcopy(first), None), step_of(first, PLANS[name])
    is_lossy = "compress" in PLANS[name]
    close = {"rtol": 0.02, "atol": 0.02} if is_lossy else {"rtol": 1e-9, "atol": 1e-9}
    for i in range(3):
        losses = []
        for each in (serial, step):
            torch.manual_seed(10 + i)
            losses.append(each(**batch(i)))
        torch.testing.assert_close(losses[1], losses[0], **close)
    if not is_lossy:
        torch.testing.assert_close(step.state_dict()["model"], serial.state_dict()["model"], **close)
    if RANK == 0:
        print(f"{name}: as on one device", flush=True)


def llama_compiled(plan: dict) -> None:
    """A Llama in bf16, large enough that stretches between its layers are compiled: as one device, up to rounding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "vocab_size": 8192}
    torch.manual_seed(0)
    first = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False)).to("cuda", torch.bfloat16)
    steps = [step_of(copy.deepcopy(first), None, compile=True), step_of(first, plan, compile=True)]
    ids = torch.randint(0, 8192, (8, 512), generator=torch.Generator().manual_seed(1)).cuda()
    for _ in range(3):
        wanted, loss = (step(input_ids=ids, labels=ids) for step in steps)
        torch.testing.assert_close(loss, wanted, rtol=0.01, atol=0.01)
    if RANK == 0:
        print(f"llama {plan}: as on one device", flush=True)


LLAMA = {"*.[qkv]_proj.weight": ["tp", "-"], "*.o_proj.weight": ["-", "tp"], "*.mlp.[gu]*.weight": ["tp", "-"],
         "*.down_proj.weight": ["-", "tp"]}  # fmt: skip


def main(folder: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in PLANS:
        compared(name)
    for plan in (
        {"mesh": {"tp": 2}, "parameters": LLAMA, "at_once": 2},
        {"stages": 2},
        {"stages": 4, "schedule": "zbv"},
    ):
        llama_compiled(plan)
    (folder / f"done-{RANK}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
