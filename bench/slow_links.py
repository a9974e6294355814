"""Training steps over slow links: ours, compressed and not, against torch DDP in fp32 and with its fp16 hook.

    python bench/slow_links.py [--ranks 2 4] [--mbit 100 1000] [--ways ddp "ddp fp16" exact int8+ef int4+ef] [--slow 25]

Every rank lives in a network namespace of its own; a bridge joins them, and `tc … tbf` limits what goes in and out of
each (`--slow`: of the last rank alone).  Bytes are those that the interfaces count.  The model is the small GPT of the
other benchmarks, on the bytes of this repository's own texts.  Ways run one after another, twice in turns; seconds are
medians.  `floor` is DDP that never speaks.  Needs root, `ip` and `tc`; without them it says so and ends.

The loss is that of held-out text after the last step: every way has seen the same batches.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
WARM, STEPS, ROUNDS, LIMIT_S = 2, 5, 2, 240
WAYS = ("floor", "ddp", "ddp fp16", "exact", "int8+ef", "int4+ef")
INSIDE = "link0"  # the interface in a rank's namespace


def refused() -> str:
    """Why namespaces cannot be had here; "" where they can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"there is no {missing[0]}: install iproute2"
    name = f"mycel-{os.getpid()}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"network namespaces are not allowed here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n  {done.stderr.strip()}")


@contextmanager
def network(mbits: list[float]) -> Iterator[list[str]]:
    """A namespace for each rank, its link limited to so many Mbit/s both ways; all gone at the end."""
    base = f"mycel-{os.getpid()}"
    hub, names = f"{base}-hub", [f"{base}-{r}" for r in range(len(mbits))]
    made = []
    try:
        for name in (hub, *names):
            run("ip", "netns", "add", name)
            made.append(name)
        run("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge0", "up")
        for r, (name, mbit) in enumerate(zip(names, mbits, strict=True)):
            run("ip", "-n", hub, "link", "add", f"port{r}", "type", "veth", "peer", "name", INSIDE, "netns", name)
            run("ip", "-n", hub, "link", "set", f"port{r}", "master", "bridge0", "up")
            run("ip", "-n", name, "addr", "add", f"10.77.0.{r + 1}/24", "dev", INSIDE)
            run("ip", "-n", name, "link", "set", INSIDE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for space, device in ((hub, f"port{r}"), (name, INSIDE)):
                rate = ["rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms"]
                run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *rate)
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)


def text_batches():
    """(ids, targets) for ever, and one batch of held-out text."""
    import torch
    from small_gpt import BATCH, LENGTH

    files = sorted([*ROOT.glob("*.md"), *ROOT.glob("mycel/**/*.py")])
    data = torch.tensor(list(b"".join(f.read_bytes() for f in files)))
    train, held = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
    gen = torch.Generator().manual_seed(0)

    def batch(of):
        at = torch.randint(0, len(of) - LENGTH - 1, (BATCH,), generator=gen).tolist()
        return tuple(torch.stack([of[i + shift : i + shift + LENGTH] for i in at]) for shift in (0, 1))

    last = batch(held)
    return (lambda: batch(train)), last


def step_of(way: str, rank: int, world: int):
    """A step on the whole batch, of which each rank computes its part; and the model's loss on any batch."""
    import torch
    from small_gpt import SmallGPT

    torch.manual_seed(0)
    model = SmallGPT()
    if not way.startswith(("ddp", "floor")):
        import mycel

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = {"batch": ["dp"], **({} if way == "exact" else {"compress": {"dp": way}})}
        step = mycel.train_step(model, optimizer, mesh=mycel.Mesh(dp=world), plan=plan)
        return (lambda ids, targets: step(ids, targets)), model
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    dist.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    if way == "ddp fp16":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(ids, targets):
        mine = [x.chunk(world)[rank] for x in (ids, targets)]
        if way == "floor":
            with wrapped.no_sync():
                loss = wrapped(*mine)
                loss.backward()
        else:
            loss = wrapped(*mine)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, model


def serve(way: str) -> None:
    """One rank: prints the seconds of each step, the bytes it sent in them, and the loss on held-out text."""
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    next_batch, last = text_batches()
    step, model = step_of(way, rank, world)
    counter = Path(f"/sys/class/net/{INSIDE}/statistics/tx_bytes")
    seconds, before = [], 0
    for i in range(WARM + STEPS):
        if i == WARM:
            before = int(counter.read_text())
        start = time.perf_counter()
        float(step(*next_batch()))
        seconds.append(time.perf_counter() - start)
    sent = int(counter.read_text()) - before
    with torch.no_grad():
        loss = float(model(*last))
    print("done", statistics.median(seconds[WARM:]), sent / STEPS, loss, flush=True)


def measured(way: str, names: list[str], port: int) -> tuple[float, float, float]:
    """(seconds, bytes of a rank, loss) of one world."""
    env = {**os.environ, "WORLD_SIZE": str(len(names)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env["RES_OPTIONS"] = "timeout:1 attempts:1"  # nobody answers who asks for names here
    env |= {"GLOO_SOCKET_IFNAME": INSIDE} if way.startswith(("ddp", "floor")) else {}  # ours asks for the route
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "MYCEL_TIMEOUT": "120"}
    ranks = []
    for r, name in enumerate(names):
        command = ["ip", "netns", "exec", name, sys.executable, __file__, "--serve", way]
        ranks.append(subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True))
    try:
        end = time.monotonic() + LIMIT_S
        said = [p.communicate(timeout=max(1.0, end - time.monotonic()))[0] for p in ranks]
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
                p.wait()
    lines = [line.split() for text in said for line in text.splitlines() if line.startswith("done")]
    if len(lines) != len(names):
        raise SystemExit(f"{way}: a rank did not end: {said}")
    return max(float(x[1]) for x in lines), statistics.mean(float(x[2]) for x in lines), float(lines[0][3])


def compare(ranks: int, mbit: float, slow: float | None, ways: list[str], rounds: int) -> None:
    mbits = [mbit] * (ranks - 1) + [slow or mbit]
    results: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
    with network(mbits) as names:
        for turn in range(rounds):
            for i, way in enumerate(ways):
                results[way].append(measured(way, names, 29500 + turn * len(ways) + i))
    print(f"{ranks} ranks, {mbit:g} Mbit/s" + (f", the last {slow:g}" if slow else ""), flush=True)
    seconds = {way: statistics.median(x[0] for x in found) for way, found in results.items()}
    for way, found in results.items():
        against = "".join(
            f"   {seconds[peer] / seconds[way]:5.2f}x {peer}" for peer in ("ddp", "ddp fp16") if peer in seconds
        )
        sent = statistics.median(x[1] for x in found)
        print(
            f"  {way:18} {seconds[way] * 1e3:8.0f} ms  {sent / 1e6:7.2f} MB sent  loss {found[-1][2]:.4f}{against}",
            flush=True,
        )


def main() -> None:
    if "--serve" in sys.argv:
        serve(sys.argv[sys.argv.index("--serve") + 1])
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000])
    parser.add_argument("--slow", type=float, help="Mbit/s of the last rank")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    args = parser.parse_args()
    why = refused()
    if why:
        print(f"skipped: {why}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and ranks go with it
    for ranks in args.ranks:
        for mbit in args.mbit:
            compare(ranks, mbit, args.slow, args.ways, args.rounds)


if __name__ == "__main__":
    main()
