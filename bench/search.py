"""The plan that the search chooses, run: against eight ready plans in the same processes, predicted and measured.

    python bench/search.py                      4 processes of this machine
    python bench/search.py --mbit 100 1000      two pairs of ranks instead, each rank in a network namespace: what goes
                                                between the pairs shares a wire of so many Mbit/s, inside a pair nothing
                                                is limited.  Needs root, `ip` and `tc`

The links are measured first (`mycel probe`), and both search and predictions use that.  All steps of a model live in
the same processes and are timed in turns; a step's time is the median.  Each bar is printed with whether it is met; the
exit code is 1 where one is not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from bars import kept
from clock import model_of
from slow_links import INSIDE, LIMIT_S, ROOT, limit, refused, run

ROUNDS, SLOW_ROUNDS, RANKS = 15, 4, 4  # fewer on slow links: steps take seconds there, and vary less
BATCH = {"gpt2": 16, "mlp": 64, "llama": 8}
PLANS = [  # no two of them are the same program
    ("dp", {"dp": 4}, 1), ("zero1", {"dp": 4}, 1), ("zero3", {"dp": 4}, 1), ("tp", {"tp": 4}, 1),
    ("dp+tp", {"dp": 2, "tp": 2}, 1), ("zero3+tp", {"dp": 2, "tp": 2}, 1), ("zero2", {"dp": 4}, 2),
    ("tp", {"tp": 4}, 2),
]  # fmt: skip
CHOSEN_BAR, RANK_BAR = 1.1, 0.9


@contextmanager
def pairs(mbit: float) -> Iterator[list[str]]:
    """Two bridges with two ranks each, joined by one wire; all gone at the end."""
    base = f"mycel-{os.getpid()}"
    hubs, names, there = [f"{base}-hub{i}" for i in (0, 1)], [f"{base}-{r}" for r in range(RANKS)], []
    try:
        for name in (*hubs, *names):
            run("ip", "netns", "add", name)
            there.append(name)
        run("ip", "-n", hubs[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", hubs[1])
        for hub in hubs:
            run("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
            run("ip", "-n", hub, "link", "set", "bridge0", "up")
            run("ip", "-n", hub, "link", "set", "wire", "master", "bridge0", "up")
            limit(hub, "wire", mbit)
        for r, name in enumerate(names):
            hub = hubs[r // 2]
            run("ip", "-n", hub, "link", "add", f"port{r}", "type", "veth", "peer", "name", INSIDE, "netns", name)
            run("ip", "-n", hub, "link", "set", f"port{r}", "master", "bridge0", "up")
            run("ip", "-n", name, "addr", "add", f"10.78.0.{r + 1}/24", "dev", INSIDE)
            run("ip", "-n", name, "link", "set", INSIDE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in there:
            subprocess.run(["ip", "netns", "del", name], check=False)


def together(names: list[str], words: list[str], port: int, **more: str) -> None:
    """A process for each rank, in its namespace where there are any."""
    local = "2" if names else str(RANKS)
    env = {**os.environ, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": local, "OMP_NUM_THREADS": "1", **more}
    env |= {"MASTER_ADDR": "10.78.0.1" if names else "127.0.0.1", "MASTER_PORT": str(port), "MYCEL_TIMEOUT": "300"}
    env |= {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_WAIT_POLICY": "passive"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with ExitStack() as files:
        ranks = []
        for r in range(RANKS):
            inside = ["ip", "netns", "exec", names[r]] if names else []
            of_rank = {**env, "RANK": str(r), "LOCAL_RANK": str(r % int(local))}
            errors = files.enter_context(tempfile.TemporaryFile("w+"))
            ranks.append((subprocess.Popen([*inside, sys.executable, *words], env=of_rank, stderr=errors), errors))
        try:
            end = time.monotonic() + 2 * LIMIT_S
            codes = [p.wait(timeout=max(1.0, end - time.monotonic())) for p, _ in ranks]
        finally:
            for p, _ in ranks:
                if p.poll() is None:
                    p.kill()
                    p.wait()
        for code, (_, errors) in zip(codes, ranks, strict=True):
            errors.seek(0)
            if code:
                raise SystemExit(f"{' '.join(words)}: ranks ended with {codes}\n{errors.read()[-2000:]}")


def rank_main(out: str, model_name: str, hosts: int, rounds: int) -> None:
    """One of the ranks: the chosen plan and the ready ones, in turns; the first writes what it saw."""
    import torch

    import mycel
    from mycel.plan import Plan, hardware_of
    from mycel.plan.cluster import Cluster
    from mycel.search import Search
    from mycel.search_space import any_plan

    torch.set_num_threads(1)
    hardware = hardware_of(torch.device("cpu"))
    cluster = Cluster("ranks", hardware, RANKS // hosts, hosts, hardware.half)
    model, batch = model_of(model_name, BATCH[model_name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def make(count: int, compress, placed: bool = False):
        ranks = any_plan(RANKS, compress, placed)
        return mycel.train_step(model, optimizer, plan=ranks, accumulate=count, compile=False).unsharded(*batch)

    started = time.perf_counter()
    best = Search(model, optimizer, make, cluster, compiled=False).run().best
    assert best is not None and best.plan is not None
    planning = time.perf_counter() - started
    plans = [(f"chosen: {best.shape}", best.plan.given)]
    for name, sizes, parts in PLANS:
        said = f"{name} {' '.join(f'{a}={n}' for a, n in sizes.items())}" + (
            f", {parts} microbatches" if parts > 1 else ""
        )
        plans.append((said, replace(Plan.read(name, mycel.Mesh(sizes)), microbatches=parts)))
    steps = []
    for name, plan in plans:
        model, batch = model_of(model_name, BATCH[model_name])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = mycel.train_step(model, optimizer, plan=plan, compile=False)
        for _ in range(2):
            float(step(*batch))
        steps.append((name, step, []))
    for i in range(rounds):
        for _, step, seconds in steps[i % len(steps) :] + steps[: i % len(steps)]:  # none is always behind the same
            float(step(*batch))  # all ranks are here
            started = time.perf_counter()
            float(step(*batch))
            seconds.append(time.perf_counter() - started)
    if os.environ["RANK"] == "0":
        rows = [[name, step.plan.predicted.seconds, statistics.median(seconds)] for name, step, seconds in steps]
        Path(out).write_text(json.dumps({"planning": planning, "rows": rows}))


def compare(names: list[str], models: list[str], folder: str, title: str) -> bool:
    """Are both bars met, for each model?"""
    from scipy.stats import spearmanr

    probe = f"{folder}/probe-{len(os.listdir(folder))}.yaml"
    together(names, ["-m", "mycel", "probe", "--device", "cpu", "--out", probe], 29700)
    print(title, flush=True)
    are_met = True
    for i, model in enumerate(models):
        out = f"{probe}-{model}.json"
        words = [__file__, "--rank", out, model, *(("2", str(SLOW_ROUNDS)) if names else ("1", str(ROUNDS)))]
        together(names, words, 29701 + i, MYCEL_PROBE=probe)
        measured = json.loads(Path(out).read_text())
        rows = measured["rows"]
        for name, predicted, seconds in rows:
            print(f"  {model:6} {name:44} predicted {predicted * 1e3:8.1f} ms   measured {seconds * 1e3:8.1f} ms")
        ratio = rows[0][2] / min(row[2] for row in rows)
        like = spearmanr([row[1] for row in rows], [row[2] for row in rows]).statistic
        said = f"  {model}: planned in {measured['planning']:.1f} s, chosen {ratio:.2f}x of the best"
        are_met &= kept(said, f"{CHOSEN_BAR}", ratio <= CHOSEN_BAR)
        are_met &= kept(f"  {model}: Spearman {like:.2f}", f"{RANK_BAR}", like >= RANK_BAR)
    return are_met


def main() -> None:
    if "--rank" in sys.argv:
        out, model, hosts, rounds = sys.argv[sys.argv.index("--rank") + 1 :]
        rank_main(out, model, int(hosts), int(rounds))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", type=float, nargs="*", default=[])
    parser.add_argument("--models", nargs="+", default=list(BATCH))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and ranks go with it
    are_met = True
    with tempfile.TemporaryDirectory() as folder:
        if not args.mbit:
            are_met &= compare([], args.models, folder, "4 processes")
        why = refused() if args.mbit else ""
        if why:
            print(f"skipped: {why}")
            return
        for mbit in args.mbit:
            with pairs(mbit) as names:
                are_met &= compare(names, args.models, folder, f"two pairs, {mbit:g} Mbit/s")
    sys.exit(not are_met)


if __name__ == "__main__":
    main()
