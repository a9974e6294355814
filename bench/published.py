"""What others have published of large clusters, held against what the planner predicts for the same models there.

    python bench/published.py

Rows in bf16 of torchtitan (its repository: benchmarks/llama3_h100_202412_torchtitan.md): Llama 3.1 8B, 8,192 tokens,
two sequences a GPU, FSDP with torch.compile, parameters and AdamW's state in f32, on H100 limited to 500 W with 96 GB
of HBM2e at 2.4 TB/s, 400 Gbit/s of network each. They write that the device's peak lies between those of the SXM and
the NVL card; here it is the NVL card's. Predicted twice: as they ran it (ZeRO-3 over all devices; they compute
products of a layer again, we what the memory asks for), and as the search would.
"""

from __future__ import annotations

import torch
import transformers as hf

from mycel.plan.cluster import Cluster
from mycel.search import Search
from mycel.train.planner import search

REACHED = 0.76  # of the nominal rate, as the presets have it
DEVICE = {
    "half": REACHED * 835e12, "single": REACHED * 417e12, "bytes_s": 0.85 * 2.4e12, "memory": "96GB", "launch_s": 8e-6,
}  # fmt: skip
LEVELS = [
    {"name": "nvlink", "bytes_s": 3.6e11, "start_s": 3e-6},
    {"name": "network", "bytes_s": 4.5e10, "start_s": 1e-5},
]
ROWS = [(8, 6667), (128, 6514)]  # GPUs, tokens a second of each
LENGTH, EACH = 8192, 2


def asked(world: int, given: dict | None) -> Search:
    with torch.device("meta"):
        config = hf.LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=LENGTH, use_cache=False,
        )  # fmt: skip
        model = hf.LlamaForCausalLM(config)
    ids = torch.empty(EACH * world, LENGTH, dtype=torch.int64, device="meta")
    hosts = max(1, world // 8)
    levels = LEVELS if hosts > 1 else LEVELS[:1]
    cluster = Cluster.read({"name": f"{world} GPUs", "device": DEVICE, "devices": 8, "hosts": hosts, "levels": levels})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return search(model, optimizer, {"input_ids": ids, "labels": ids}, cluster, given, precision="bf16")


def main() -> None:
    print(f"{'GPUs':>5}  {'published':>9}  {'predicted':>9}  {'ratio':>5}  {'peak':>9}  plan")
    for world, published in ROWS:
        for given in ({"mesh": {"dp": world}, "zero": 3, "microbatches": 1}, None):
            best = asked(world, given).run().best
            assert best is not None
            rate = EACH * LENGTH / best.seconds
            print(
                f"{world:5}  {published:9,}  {rate:9,.0f}  {rate / published:5.2f}  {best.peak / 2**30:5.1f} GiB  "
                f"{best.shape}{'' if given else '   (searched)'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
