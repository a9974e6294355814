"""Training steps on several CPU processes: ours against torch DDP and FSDP2 for each plan that is equivalent, in the
same run.

    python bench/ddp.py [--ranks 2 4] [--models gpt llama]
    python bench/ddp.py --ranks 4 --models olmoe --ways ep

Each way is a world of processes of its own, started once; then all are timed in turns, so that they see the same
machine.  `dp` is compared with DDP, `zero2` with FSDP2 that keeps parameters after forward, `zero3` with FSDP2 that
reshards, and so is `ep`, experts split over the ranks.  Fused AdamW on all sides.  Losses of the third step must agree.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

ROUNDS, STEPS = 9, 2
WAYS = {"dp": "ddp", "zero2": "fsdp keep", "zero3": "fsdp", "ep": "fsdp"}
BARS = {"ep": 1.2}  # of others 1.0


def model_of(name: str):
    """(module, batch) of the benchmark."""
    import torch

    torch.manual_seed(0)
    if name == "gpt":
        from small_gpt import BATCH, LENGTH, VOCABULARY, SmallGPT

        ids, targets = (torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for _ in range(2))
        return SmallGPT(), (ids, targets)
    from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

    if name == "olmoe":
        config = OlmoeConfig(
            hidden_size=256,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_experts=32,
            num_experts_per_tok=4,
            vocab_size=4096,
            use_cache=False,
            pad_token_id=0,
            eos_token_id=1,
        )
        ids = torch.randint(0, 4096, (8, 128))
        return Loss(OlmoeForCausalLM(config)), (ids, ids.clone())
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=4096,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 4096, (8, 128))
    return Loss(model), (ids, ids.clone())


class Loss:
    """An HF model as a function of ids and targets that returns the loss; a Module without importing torch at the
    top."""

    def __new__(cls, model):
        import torch

        class Wrapped(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, ids, targets):
                return self.model(input_ids=ids, labels=targets).loss

        return Wrapped()


def step_of(way: str, name: str, rank: int, world: int):
    """A step on the whole batch; every rank gets the whole batch and computes its part."""
    import torch

    model, batch = model_of(name)
    if way in WAYS:
        import mycel

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = mycel.train_step(model, optimizer, mesh=mycel.Mesh({"ep" if way == "ep" else "dp": world}), plan=way)
        return lambda: step(*batch)
    import torch.distributed as dist

    dist.init_process_group("gloo")
    mine = [x.chunk(world)[rank] for x in batch]
    if way == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        layers = model.layers if hasattr(model, "layers") else model.model.model.layers
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=way == "fsdp")
        fully_shard(model, mesh=mesh, reshard_after_forward=way == "fsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step():
        loss = model(*mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss := loss.detach().clone())
        return loss / world

    return step


def serve(way: str, name: str) -> None:
    """One rank: answers each line on stdin with the seconds of a few steps."""
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    step = step_of(way, name, rank, world)
    for _ in range(3):
        loss = float(step())
    print("ready", loss, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
        float(loss)
        print((time.perf_counter() - start) / STEPS, flush=True)


class World:
    """The processes of one way."""

    def __init__(self, way: str, name: str, ranks: int) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        base = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        base |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--serve", way, name]
        self.ranks = [
            subprocess.Popen(
                command,
                env={**base, "RANK": str(r), "LOCAL_RANK": str(r)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in range(ranks)
        ]
        lines = [p.stdout.readline() for p in self.ranks]
        if not all(line.startswith("ready") for line in lines):
            raise SystemExit(f"{way} on {name} did not start: {lines}")
        self.loss = float(lines[0].split()[1])
        self.seconds: list[float] = []

    def time(self) -> None:
        for p in self.ranks:
            p.stdin.write("go\n")
            p.stdin.flush()
        self.seconds.append(max(float(p.stdout.readline()) for p in self.ranks))

    def close(self) -> None:
        for p in self.ranks:
            p.stdin.close()
        for p in self.ranks:
            p.wait(30)


def compare(name: str, ranks: int, ways: list[str]) -> None:
    worlds = {}
    try:
        for way in [w for pair in ((w, WAYS[w]) for w in ways) for w in pair]:
            worlds[way] = World(way, name, ranks)
        for _ in range(ROUNDS):
            for world in worlds.values():
                world.time()
        median = {way: statistics.median(w.seconds) for way, w in worlds.items()}
        for way in ways:
            peer = WAYS[way]
            assert abs(worlds[way].loss - worlds[peer].loss) < 1e-3 * abs(worlds[peer].loss), (
                worlds[way].loss,
                worlds[peer].loss,
            )
            print(
                f"{name:6} {ranks} ranks  {way:6} {median[way] * 1e3:8.1f}ms   {peer:10} {median[peer] * 1e3:8.1f}ms   "
                f"{median[peer] / median[way]:.2f}x   (bar {BARS.get(way, 1.0)})   "
                f"loss {worlds[way].loss:.6f} {worlds[peer].loss:.6f}",
                flush=True,
            )
    finally:
        for world in worlds.values():
            world.close()


def main() -> None:
    if "--serve" in sys.argv:
        at = sys.argv.index("--serve")
        serve(sys.argv[at + 1], sys.argv[at + 2])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", default=["gpt", "llama"])
    parser.add_argument("--ways", nargs="+", default=["dp", "zero2", "zero3"])
    args = parser.parse_args()
    for name in args.models:
        for ranks in args.ranks:
            for way in args.ways:
                compare(name, ranks, [way])


if __name__ == "__main__":
    main()
