"""Pipelined training steps on CPU processes: ours against torch.distributed.pipelining, with the same processes, cut,
schedule, microbatches and optimiser, in turns.

    python bench/pipeline.py [--ranks 2] [--schedules gpipe 1f1b zbv] [--microbatches 8]
    python bench/pipeline.py --bubbles [--ranks 4] [--waiting]
    python bench/pipeline.py --cuts [--ranks 4] [--microbatches 4] [--waiting]

Also said: the peak memory of the largest rank, as the system counts it.  Losses of the third step must agree.

--bubbles measures how long ranks wait in a pipeline of equal layers, from traces of steps, against the formula of each
schedule with the seconds of steps in the same trace.  It needs a core for each rank: with fewer, ranks take turns on
them, steps take longer while others compute, and what is waited for is less than the formula says.  With `--waiting` a
product takes a fixed time and no core, as on a device of its own: then any number of ranks can be measured.

--cuts: a Llama with a vocabulary of 128k, whose head takes as long as several layers, cut where the clock says against
layers in equal numbers, in turns.  With fewer cores than ranks a long stage costs less than the clock says, as others
have its core while they wait for it; with `--waiting` each product also waits for as long as a device of WAITING_FLOPS
operations a second would take, without a core.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext

ROUNDS, STEPS, ROWS = 9, 2, 32
PRODUCT_S = 10e-3  # of --bubbles --waiting
WAITING_FLOPS = 4e9  # of --cuts --waiting: far slower than a core, so that it hardly matters who has one
PEERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
         "zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}  # fmt: skip


def names_of(stages: int, layers: int) -> list[str]:
    """The module each stage begins with, layers in equal numbers."""
    return ["tokens", *(f"layers.{i * layers // stages}" for i in range(1, stages))]


def ours(schedule: str, microbatches: int, ranks: int):
    import torch
    from small_gpt import LAYERS, LENGTH, VOCABULARY, SmallGPT

    import mycel
    from mycel.plan.schedule import stages_a_rank

    torch.manual_seed(0)
    model = SmallGPT()
    ids, targets = (torch.randint(0, VOCABULARY, (ROWS, LENGTH)) for _ in range(2))
    stages = names_of(ranks * stages_a_rank(schedule), LAYERS)
    plan = {"stages": stages, "schedule": schedule, "microbatches": microbatches}
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan=plan, compile=False)
    return lambda: float(step(ids, targets))


def torchs(schedule: str, microbatches: int, rank: int, ranks: int):
    import torch
    import torch.distributed as dist
    from small_gpt import LAYERS, LENGTH, VOCABULARY, SmallGPT
    from torch import nn
    from torch.distributed import pipelining

    from mycel.plan.schedule import named

    class Part(nn.Module):
        """Some layers of the model, with what comes before and behind them."""

        def __init__(self, model: SmallGPT, first: int, last: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(model.layers[first:last])
            self.tokens, self.positions = (model.tokens, model.positions) if first == 0 else (None, None)
            self.norm, self.head = (model.norm, model.head) if last == LAYERS else (None, None)

        def forward(self, x):
            if self.tokens is not None:
                x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            for layer in self.layers:
                x = layer(x)
            return x if self.head is None else self.head(self.norm(x))

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = SmallGPT()
    ids, targets = (torch.randint(0, VOCABULARY, (ROWS, LENGTH)) for _ in range(2))
    place = named(schedule, ranks, microbatches).place
    edges = [i * LAYERS // len(place) for i in range(len(place) + 1)]
    parts = {s: Part(model, edges[s], edges[s + 1]) for s, r in enumerate(place) if r == rank}
    stages = [pipelining.PipelineStage(p, s, len(place), torch.device("cpu")) for s, p in parts.items()]
    kind = getattr(pipelining, PEERS[schedule], None) or getattr(pipelining.schedules, PEERS[schedule])
    loss = lambda y, t: nn.functional.cross_entropy(y.reshape(-1, VOCABULARY), t.reshape(-1))
    single = len(place) == ranks
    run = kind(stages[0] if single else stages, n_microbatches=microbatches, loss_fn=loss)
    optimizer = torch.optim.AdamW([p for part in parts.values() for p in part.parameters()], lr=1e-3, fused=True)
    last = place[-1]

    def step():
        losses: list = []
        inputs = (ids,) if 0 in parts else ()
        run.step(*inputs, **({"target": targets, "losses": losses} if rank == last else {}))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = torch.stack([x.detach() for x in losses]).mean() if rank == last else torch.zeros(())
        dist.broadcast(mean, last)
        return float(mean)

    return step


def cut_llama(way: str, microbatches: int, ranks: int):
    """A step of the Llama, and what was predicted of it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import mycel

    torch.manual_seed(0)
    layers, vocabulary = 2 * ranks, 128 * 1024
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=8192, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, vocabulary, (2 * microbatches, 32))
    equal = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(2, layers, 2))]
    plan = {"stages": ranks if way == "searched" else equal, "microbatches": microbatches}
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=1e-3), plan=plan, compile=False)
    step.prepare(input_ids=ids, labels=ids)
    assert step.plan.predicted is not None
    return (lambda: float(step(input_ids=ids, labels=ids))), step.plan.predicted.seconds


def compare_cuts(microbatches: int, ranks: int, waiting: bool) -> None:
    worlds = {way: World(way, "1f1b", microbatches, ranks, waiting) for way in ("searched", "equal")}
    try:
        for _ in range(ROUNDS // 2):
            for world in worlds.values():
                world.time()
    finally:
        for world in worlds.values():
            world.close()
    mine, other = worlds["searched"], worlds["equal"]
    assert abs(mine.loss - other.loss) < 1e-3 * abs(other.loss), (mine.loss, other.loss)
    seconds = [statistics.median(w.seconds) for w in (mine, other)]
    where = "products wait" if waiting else f"{os.cpu_count()} cores"
    print(
        f"128k Llama   {ranks} ranks {microbatches} microbatches   searched cut {seconds[0] * 1e3:8.1f}ms   "
        f"equal {seconds[1] * 1e3:8.1f}ms   {seconds[1] / seconds[0]:.2f}x (bar 1.0)   by the clock "
        f"{other.predicted_s / mine.predicted_s:.2f}x   ({where})   loss {mine.loss:.6f} "
        f"{other.loss:.6f}",
        flush=True,
    )


class EqualLayers:
    """So many equal layers and nothing else that takes time."""

    def __new__(cls, layers: int, width: int = 1024):
        import torch
        from torch import nn

        class Layers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])
                self.shift = nn.Parameter(torch.zeros(width))  # so that the first layer has a gradient to give, too

            def forward(self, x):
                x = x + self.shift
                for layer in self.layers:
                    x = layer(x).tanh()
                return x.mean()

        return Layers()


def waiting_products(flops_s: float = 0.0):
    """In here a product waits without a core: as long as so many operations a second take, or PRODUCT_S whatever its
    size."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Waiting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if (flops := flop_registry.get(func.overloadpacket)) is not None:
                time.sleep(flops(*args, **(kwargs or {}), out_val=result) / flops_s if flops_s else PRODUCT_S)
            return result

    return Waiting()


def bubbles(schedule: str, microbatches: int, waiting: bool) -> None:
    """One rank; the first says what was waited for, and what the formula says."""
    import torch

    import mycel
    from mycel.plan.schedule import stages_a_rank

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    chunks = stages_a_rank(schedule)
    layers = 4 * ranks * chunks
    width = 32 if waiting else 1024
    model = EqualLayers(layers, width)
    plan = {"stages": [f"layers.{i}" for i in range(0, layers, 4)], "schedule": schedule, "microbatches": microbatches}
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan, compile=False)
    x = torch.randn((4 if waiting else 256) * microbatches, width)
    for _ in range(3):
        step(x)
    waited = []
    for _ in range(ROUNDS):
        with waiting_products() if waiting else nullcontext(), step.trace() as trace:
            step(x)
        times = trace.measured
        seconds = {
            kind: statistics.median([times.end[s] - times.start[s] for s in times.end if s.kind == kind] or [0.0])
            for kind in "FBW"
        }
        f, b, w = (chunks * seconds[kind] for kind in "FBW")
        known = {"zbh1": f + b - w, "zbv": 0.0, "dualpipev": (f + b - w) / 2}
        formula = (ranks - 1) * known.get(schedule, (f + b + w) / chunks)
        waited.append((times.bubble, formula, times.seconds))
    if rank == 0:
        bubble, formula, whole = (statistics.median(column) for column in zip(*waited, strict=True))
        cores = "" if waiting else f"; {os.cpu_count()} cores"
        print(
            f"{schedule:12} {ranks} ranks {microbatches} microbatches   waits {bubble * 1e3:7.1f}ms "
            f"({bubble / whole:.1%} of {whole * 1e3:.1f}ms)   formula {formula * 1e3:7.1f}ms   "
            f"off by {(bubble - formula) / whole:+.1%} of the loop   (bar 10 %{cores})",
            flush=True,
        )


def launch_bubbles(schedule: str, microbatches: int, ranks: int, waiting: bool) -> None:
    from mycel.launch import launch

    env = {"OMP_NUM_THREADS": "1"}
    given = ["--serve-bubbles", schedule, str(microbatches), str(int(waiting))]
    if code := launch(given, ranks, program=[__file__], env=env):
        raise SystemExit(code)


def serve(way: str, schedule: str, microbatches: int) -> None:
    """One rank: answers each line on stdin with the seconds of a few steps."""
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    predicted_s = 0.0
    waiting = nullcontext()
    if way in ("searched", "equal"):
        step, predicted_s = cut_llama(way, microbatches, ranks)
        waiting = waiting_products(WAITING_FLOPS) if "--waiting" in sys.argv else waiting
    else:
        step = ours(schedule, microbatches, ranks) if way == "ours" else torchs(schedule, microbatches, rank, ranks)
    for _ in range(3):
        loss = step()
    print("ready", loss, predicted_s, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        with waiting:
            for _ in range(STEPS):
                step()
        print((time.perf_counter() - start) / STEPS, flush=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)


class World:
    """The processes of one way."""

    def __init__(self, way: str, schedule: str, microbatches: int, ranks: int, waiting: bool = False) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        base = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__, "--serve", way, schedule, str(microbatches), *["--waiting"] * waiting]
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
            raise SystemExit(f"{way} under {schedule} did not start: {lines}")
        self.loss, self.predicted_s = map(float, lines[0].split()[1:])
        self.seconds: list[float] = []
        self.peak = 0.0

    def time(self) -> None:
        for p in self.ranks:
            p.stdin.write("go\n")
            p.stdin.flush()
        self.seconds.append(max(float(p.stdout.readline()) for p in self.ranks))

    def close(self) -> None:
        for p in self.ranks:
            p.stdin.close()
        self.peak = max(float(p.stdout.readline() or 0) for p in self.ranks) / 1024
        for p in self.ranks:
            p.wait(30)


def compare(schedule: str, microbatches: int, ranks: int) -> None:
    worlds = {way: World(way, schedule, microbatches, ranks) for way in ("ours", "torch")}
    try:
        for _ in range(ROUNDS):
            for world in worlds.values():
                world.time()
    finally:
        for world in worlds.values():
            world.close()
    mine, peer = worlds["ours"], worlds["torch"]
    assert abs(mine.loss - peer.loss) < 1e-3 * abs(peer.loss), (mine.loss, peer.loss)
    seconds = [statistics.median(w.seconds) for w in (mine, peer)]
    print(
        f"{schedule:12} {ranks} ranks {microbatches} microbatches   "
        f"ours {seconds[0] * 1e3:8.1f}ms {mine.peak:6.0f}MiB   torch {seconds[1] * 1e3:8.1f}ms {peer.peak:6.0f}MiB   "
        f"{seconds[1] / seconds[0]:.2f}x time {mine.peak / peer.peak:.2f}x memory   (bars 1.0)   "
        f"loss {mine.loss:.6f} {peer.loss:.6f}",
        flush=True,
    )


def main() -> None:
    if "--serve" in sys.argv:
        at = sys.argv.index("--serve")
        serve(sys.argv[at + 1], sys.argv[at + 2], int(sys.argv[at + 3]))
        return
    if "--serve-bubbles" in sys.argv:
        at = sys.argv.index("--serve-bubbles")
        bubbles(sys.argv[at + 1], int(sys.argv[at + 2]), bool(int(sys.argv[at + 3])))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--bubbles", action="store_true")
    parser.add_argument("--waiting", action="store_true")
    parser.add_argument("--cuts", action="store_true")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--schedules", nargs="+", default=list(PEERS))
    args = parser.parse_args()
    args.ranks, args.microbatches = args.ranks or (4 if args.cuts else 2), args.microbatches or (4 if args.cuts else 8)
    if args.cuts:
        compare_cuts(args.microbatches, args.ranks, args.waiting)
        return
    for schedule in (*args.schedules, "zbh1") if args.bubbles else ():
        launch_bubbles(schedule, args.microbatches, args.ranks, args.waiting)
    for schedule in args.schedules if not args.bubbles else ():
        compare(schedule, args.microbatches, args.ranks)


if __name__ == "__main__":
    main()
