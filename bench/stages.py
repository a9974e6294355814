"""Seconds to plan a pipeline: Llama-3-405B in 16 stages x tp 8 x dp 32, with the price of each schedule by the clock.

    python bench/stages.py [--layers 126] [--stages 16] [--microbatches 64] [--memory 80GiB] [--threads 2]

The model has no data.  Its step is captured whole; a step with three of its layers is laid out, cut into pieces, and
these are lowered and priced (`mycel/stage_price.py`); the plan of the first schedule is written out as a file would
have it, and drawn.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mycel.ir import unchecked
from mycel.parts import ShardedModel
from mycel.plan import Plan, ladder, splits
from mycel.plan.cluster import Cluster
from mycel.plan.schedule import stages_a_rank
from mycel.planning import LaidOut, Task
from mycel.shallow import Shallow
from mycel.sizes import parse_bytes
from mycel.stage_price import PricedStages, StagePieces, layer_runs
from mycel.step import train_step

BAR_S, LENGTH = 60.0, 8192
DP, TP = 32, 8
SCHEDULES = ("1f1b", "interleaved", "zbh1", "zbv")
DOWN, ACROSS = ["tp", "-"], ["-", "tp"]
PARAMETERS = {
    "*.[qkv]_proj.weight": DOWN,
    "*.o_proj.weight": ACROSS,
    "*.gate_proj.weight": DOWN,
    "*.up_proj.weight": DOWN,
    "*.down_proj.weight": ACROSS,
    "lm_head.weight": DOWN,
    "*.embed_tokens.weight": DOWN,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--stages", type=int, default=16, help="ranks along the axis of stages")
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--memory", default="80GiB")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s  {what}", flush=True)

    with torch.device("meta"):
        config = LlamaConfig(
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=args.layers,
            num_attention_heads=128,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=LENGTH,
        )
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"mesh": {"dp": DP, "tp": TP}, "batch": ["dp"], "zero": "1 over dp", "microbatches": args.microbatches}
    plan = Plan.read({**given, "parameters": PARAMETERS})
    shape = (DP * args.microbatches, LENGTH)
    batch = {name: torch.empty(shape, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    cluster = Cluster.read(f"h100x{DP * TP * args.stages}")
    say(f"{sum(p.numel() for p in model.parameters()) / 1e9:.0f} G parameters for {cluster}")

    def make(microbatches: int, compress=None):
        return train_step(model, optimizer, plan=plan, accumulate=microbatches, compile=True).unsharded(**batch)

    with unchecked():
        whole = make(1)
        say("captured")
        shallow = Shallow.of(model, make, whole)
        assert shallow is not None
        step = shallow.steps(args.microbatches)[0]
        inputs, gathered = ShardedModel(model, optimizer, plan).given(step)
        task = Task(step.program, step.body, cluster.hardware, True, inputs, gathered, outlines=False)
        laid_out = LaidOut.of(task, plan)
        say("laid out, of few layers")
        runs, budget = layer_runs(model, shallow), parse_bytes(args.memory)

        def fitting(schedule: str) -> PricedStages:
            """Backward computes as much again as the memory asks for."""
            for price in ladder(laid_out.costs)[::4]:
                pieces = StagePieces.of(laid_out, runs, price, splits(schedule))
                priced = pieces.priced(args.stages * stages_a_rank(schedule), schedule, budget)
                if priced.times.peak["device"] <= budget:
                    break
            return priced

        for i, schedule in enumerate(SCHEDULES):
            priced = fitting(schedule)
            say(f"priced {schedule}\n{priced}\n{priced.times}")
            if i == 0:
                written_out = Plan.read({**plan.data(), "stages": list(priced.begin), "schedule": schedule})
                print(written_out)
                took = time.perf_counter() - started
                say(f"the first plan is made, priced and explained   (bar {BAR_S:.0f} s)")
    assert took <= BAR_S, took


if __name__ == "__main__":
    main()
