"""Training steps over slow links: ours, compressed and not, against torch DDP in fp32 and with its fp16 hook.

    python bench/slow_links.py [--ranks 2 4] [--mbit 25 100 250 1000] [--slow 25] [--steps 10] [--until 3.0]
                               [--ways ddp "ddp fp16" exact int8+ef "diloco(H=10)" "diloco(H=10) int4+ef" delayed]

Every rank lives in a network namespace of its own; a bridge joins them, and `tc … tbf` limits what goes in and out of
each (`--slow`: of the last rank alone).  Bytes are those that the interfaces count.  The model is the small GPT of the
other benchmarks, on the bytes of this repository's own texts.  Ways run one after another, twice in turns; seconds are
medians.  `floor` is DDP that never speaks.  Needs root, `ip` and `tc`; without them it says so and ends.

The loss is that of held-out text after the last step: every way has seen the same batches; of replicas (diloco, local,
streaming, gossip, sma) it is that of their mean.  Where messages are not alike at each step, seconds are the mean over
all.  With `--until`, steps are taken until the loss is that low, and how long these took is told as well.
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
POLICIES = ("local", "diloco", "streaming", "gossip", "sma", "delayed")
MOST, CHECKED = 400, 10  # steps with --until: in all, and between two looks at the loss
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
        step = mycel.train_step(model, optimizer, mesh=mycel.Mesh(dp=world), plan={"batch": ["dp"], **plan_of(way)})
        return (lambda ids, targets: step(ids, targets)), step.evaluate
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


def plan_of(way: str) -> dict[str, dict[str, str]]:
    """What a plan says for a way: a policy, a codec, both, or neither."""
    policy, _, codec = way.rpartition(" ") if way.startswith(POLICIES) and ") " in way else ("", "", way)
    if codec.startswith(POLICIES):
        policy, codec = codec, "exact"
    return ({"sync": {"dp": policy}} if policy else {}) | ({} if codec == "exact" else {"compress": {"dp": codec}})


def serve(way: str, steps: int, until: float) -> None:
    """One rank: prints the seconds of a step, the bytes it sent in one, the loss on held-out text, and the seconds
    until that was low enough (0: it was not asked for)."""
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    next_batch, last = text_batches()
    step, loss_of = step_of(way, rank, world)
    counter = Path(f"/sys/class/net/{INSIDE}/statistics/tx_bytes")
    seconds, before = [], 0
    for i in range(WARM + steps):
        if i == WARM:
            before = int(counter.read_text())
        start = time.perf_counter()
        float(step(*next_batch()))
        seconds.append(time.perf_counter() - start)
    sent = int(counter.read_text()) - before

    def held_out() -> float:
        with torch.no_grad():
            return float(loss_of(*last))

    loss, took = held_out(), sum(seconds)
    while until and loss > until and len(seconds) < MOST:
        start = time.perf_counter()
        for _ in range(CHECKED):
            float(step(*next_batch()))
            seconds.append(0.0)
        took += time.perf_counter() - start
        loss = held_out()
    of_all = statistics.mean if way.startswith(POLICIES) else statistics.median
    reached = took if until and loss <= until else 0.0
    print("done", of_all(seconds[WARM : WARM + steps]), sent / steps, loss, reached, flush=True)


def measured(way: str, names: list[str], port: int, asked: argparse.Namespace) -> tuple[float, float, float, float]:
    """(seconds, bytes of a rank, loss, seconds until it was low enough) of one world."""
    env = {**os.environ, "WORLD_SIZE": str(len(names)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env["RES_OPTIONS"] = "timeout:1 attempts:1"  # nobody answers who asks for names here
    env |= {"GLOO_SOCKET_IFNAME": INSIDE} if way.startswith(("ddp", "floor")) else {}  # ours asks for the route
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "MYCEL_TIMEOUT": "120"}
    ranks = []
    for r, name in enumerate(names):
        command = ["ip", "netns", "exec", name, sys.executable, __file__, "--serve", way]
        command += ["--steps", str(asked.steps), "--until", str(asked.until)]
        ranks.append(subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True))
    try:
        end = time.monotonic() + LIMIT_S * (4 if asked.until else 1)
        said = [p.communicate(timeout=max(1.0, end - time.monotonic()))[0] for p in ranks]
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
                p.wait()
    lines = [line.split() for text in said for line in text.splitlines() if line.startswith("done")]
    if len(lines) != len(names):
        raise SystemExit(f"{way}: a rank did not end: {said}")
    sent = statistics.mean(float(x[2]) for x in lines)
    return max(float(x[1]) for x in lines), sent, float(lines[0][3]), max(float(x[4]) for x in lines)


def compare(ranks: int, mbit: float, asked: argparse.Namespace) -> None:
    slow, ways = asked.slow, asked.ways
    mbits = [mbit] * (ranks - 1) + [slow or mbit]
    results: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in ways}
    with network(mbits) as names:
        for turn in range(asked.rounds):
            for i, way in enumerate(ways):
                results[way].append(measured(way, names, 29500 + turn * len(ways) + i, asked))
    print(f"{ranks} ranks, {mbit:g} Mbit/s" + (f", the last {slow:g}" if slow else ""), flush=True)
    seconds = {way: statistics.median(x[0] for x in found) for way, found in results.items()}
    for way, found in results.items():
        against = "".join(
            f"   {seconds[peer] / seconds[way]:5.2f}x {peer}" for peer in ("ddp", "ddp fp16") if peer in seconds
        )
        sent, reached = (statistics.median(x[i] for x in found) for i in (1, 3))
        more = against + (f"   {reached:.0f} s to a loss of {asked.until:g}" if reached else "")
        ms, loss = seconds[way] * 1e3, found[-1][2]
        print(f"  {way:22} {ms:8.0f} ms  {sent / 1e6:7.2f} MB sent  loss {loss:.4f}{more}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--until", type=float, default=0.0, help="a loss")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000])
    parser.add_argument("--slow", type=float, help="Mbit/s of the last rank")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.steps, args.until)
        return
    why = refused()
    if why:
        print(f"skipped: {why}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and ranks go with it
    for ranks in args.ranks:
        for mbit in args.mbit:
            compare(ranks, mbit, args)


if __name__ == "__main__":
    main()
