"""Training over slow links: ours, compressed and not, against torch's DDP and what it has for them.

    python bench/slow_links.py speed     seconds and bytes of a step: 2 and 4 ranks at 25, 100, 250 and 1000 Mbit/s
    python bench/slow_links.py uneven    the same of 4 ranks at 100 Mbit/s with one asymmetric link, or one slow rank
    python bench/slow_links.py loss      losses on held-out data by steps, of several seeds; links have no limit here
    python bench/slow_links.py auto      `auto` beside all that it chooses among, on six settings
    python bench/slow_links.py bars      what is asked for, and whether what was measured so far reaches it
    python bench/slow_links.py           all of these, one after the other

    [--model gpt small conv] [--ranks 2 4] [--mbit 25 100 250 1000] [--ways ddp exact "diloco(H=10) int4+ef" …]
    [--steps 6] [--rounds 2] [--seeds 3] [--long 200] [--results build/slow_links.json]

Every rank lives in a network namespace of its own; a bridge joins them, and `tc … tbf` limits what goes in and out of
each.  Models and ways are those of `slow_link_rank.py`.  Ways go in turns, and seconds are medians over rounds.  Bytes
are those that the interfaces count, without the headers of packets.  What is measured is added to the file of results,
from which `bars` reads: each part may be run by itself, and again.

The way a loss falls does not depend on links, so it is measured once for each way, without limits; the time to a loss
at some link is the number of steps to it times the seconds of a step there.  A way keeps the loss if it comes within
one standard deviation, over seeds, of the one that DDP comes to after `--long` steps; ours may take up to 1.3 times as
many for that, which count.  The way that is there first is compared with DDP's steps to the same loss at the speed of
steps without communication.  Needs root, `ip` and `tc`; without them it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slow_link_rank import CHECKED, INSIDE, ROOT, serve

LIMIT_S = 240
MTU = "9000"  # to cut what is sent into packets is a network card's work, not that of the cores that ranks compute on
BASELINES = ("ddp", "ddp tuned", "ddp fp16", "ddp powersgd")
CODECS = ("exact", "int8+ef", "int4+ef", "sign+ef", "powersgd(4)+ef")
APART = (
    "diloco(H=2, lr=1, momentum=0, overlap=1) int4+ef",
    "diloco(H=5, lr=1, momentum=0, overlap=1) int4+ef",
    "diloco(H=10) int4+ef",
    "diloco(H=50) int4+ef",
    "streaming(H=10, fragments=2) int4+ef",
    "streaming(H=50, fragments=2) int4+ef",
    "delayed int4+ef",
)
WAYS = ("floor", *BASELINES, "ddp batch 4", *CODECS, *APART, "auto")
CHOICES = ("exact", "int8+ef", "int4+ef")  # of auto
LEARNED = ("ddp", "ddp fp16", "ddp powersgd", "ddp batch 4", *CODECS[1:], *APART)
UNLIMITED = 0.0
LONGER = 1.3  # of DDP's steps, in which ours may come to its loss


@dataclass(frozen=True)
class Setting:
    """Ranks and their links, in Mbit/s; the last rank's may differ, both ways or where it sends."""

    ranks: int
    mbit: float
    last: float = 0.0
    last_sends: float = 0.0

    def links(self) -> list[tuple[float, float]]:
        """What each rank can receive and send."""
        last = self.last or self.mbit
        return [(self.mbit, self.mbit)] * (self.ranks - 1) + [(last, self.last_sends or last)]

    def __str__(self) -> str:
        odd = f", the last {self.last:g}" * bool(self.last) + f", the last sends {self.last_sends:g}" * bool(
            self.last_sends
        )
        return f"{self.ranks} ranks, " + (f"{self.mbit:g} Mbit/s{odd}" if self.mbit else "no limit")


UNEVEN = (Setting(4, 100, last_sends=25), Setting(4, 100, last=25))
SIX = tuple(Setting(ranks, mbit) for ranks in (2, 4) for mbit in (25, 250, 1000))


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


def limit(space: str, device: str, mbit: float) -> None:
    """What leaves a device of a namespace goes at so many Mbit/s.  What `tc` lets through at once is as little as its
    timers need: no wire carries 128 kB in no time."""
    rate = ["rate", f"{mbit}mbit", "burst", "16kb", "latency", "100ms"]
    run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *rate)


@contextmanager
def network(links: Sequence[tuple[float, float]]) -> Iterator[list[str]]:
    """A namespace for each rank, which receives and sends so many Mbit/s at most (0: as it can); gone at the end."""
    base = f"mycel-{os.getpid()}"
    hub, names = f"{base}-hub", [f"{base}-{r}" for r in range(len(links))]
    there = []
    try:
        for name in (hub, *names):
            run("ip", "netns", "add", name)
            there.append(name)
        run("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge0", "up")
        for r, (name, (receives, sends)) in enumerate(zip(names, links, strict=True)):
            veth = ["type", "veth", "peer", "name", INSIDE, "mtu", MTU, "netns", name]
            run("ip", "-n", hub, "link", "add", f"port{r}", "mtu", MTU, *veth)
            run("ip", "-n", hub, "link", "set", f"port{r}", "master", "bridge0", "up")
            run("ip", "-n", name, "addr", "add", f"10.77.0.{r + 1}/24", "dev", INSIDE)
            run("ip", "-n", name, "link", "set", INSIDE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for space, device, mbit in ((hub, f"port{r}", receives), (name, INSIDE, sends)):
                if mbit:
                    limit(space, device, mbit)
        yield names
    finally:
        for name in there:
            subprocess.run(["ip", "netns", "del", name], check=False)


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, bytes of a rank in one, as counted and by the formula (0: there is none), and losses."""

    seconds: float
    sent: float
    formula: float
    losses: list[float]


def measure(way: str, model: str, names: list[str], port: int, steps: int, look: bool, seed: int) -> Measured | None:
    """One world; None where it fails, which is told."""
    env = {**os.environ, "WORLD_SIZE": str(len(names)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    env["RES_OPTIONS"] = "timeout:1 attempts:1"  # nobody answers who asks for names here
    env |= {"GLOO_SOCKET_IFNAME": INSIDE} if way.startswith(("ddp", "floor")) else {}  # ours asks for the route
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "MYCEL_TIMEOUT": "120"}
    ranks = []
    for r, name in enumerate(names):
        command = ["ip", "netns", "exec", name, sys.executable, __file__, "serve", "--ways", way, "--model", model]
        command += ["--steps", str(steps), "--seeds", str(seed), *(["--look"] if look else [])]
        ranks.append(subprocess.Popen(command, env={**env, "RANK": str(r)}, stdout=subprocess.PIPE, text=True))
    end, said = time.monotonic() + LIMIT_S * (8 if look else 1), []
    try:
        said = [p.communicate(timeout=max(1.0, end - time.monotonic()))[0] for p in ranks]
    except subprocess.TimeoutExpired:
        pass
    finally:
        for p in ranks:
            if p.poll() is None:
                p.kill()
                p.wait()
    lines = [line.split()[1:] for text in said for line in text.splitlines() if line.startswith("done")]
    for line in (line for text in said for line in text.splitlines() if line.startswith("auto")):
        print(f"  {line}", flush=True)
    if len(lines) != len(names):
        print(f"  {way:22} failed: a rank did not end", flush=True)
        return None
    numbers = [[float(x) for x in line] for line in lines]
    sent = statistics.mean(x[1] for x in numbers)
    return Measured(max(x[0] for x in numbers), sent, numbers[0][2], numbers[0][3:])


class Results:
    """What was measured so far, in a file: by model, setting and way all rounds; by model, way and seed a curve."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"steps": {}, "losses": {}}

    def add(self, kind: str, key: str, value: Any) -> None:
        self.data[kind].setdefault(key, []).append(value)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1))

    def seconds(self, model: str, setting: Setting, way: str) -> float | None:
        rounds = self.data["steps"].get(f"{model} | {setting} | {way}")
        return statistics.median(x[0] for x in rounds) if rounds else None

    def curves(self, model: str, way: str) -> list[list[float]]:
        return self.data["losses"].get(f"{model} | {way}", [])

    def limit(self, model: str) -> tuple[float, float] | None:
        """The loss that DDP comes to, over seeds, and its standard deviation."""
        last = [curve[-1] for curve in self.curves(model, "ddp")]
        return (statistics.mean(last), statistics.stdev(last)) if len(last) > 1 else None

    def steps_to(self, model: str, way: str) -> int | None:
        """Steps until the mean over seeds is within a deviation of that; None: it does not come there."""
        curves, limit = self.curves(model, way), self.limit(model)
        if not curves or limit is None:
            return None
        means = [statistics.mean(x) for x in zip(*curves, strict=True)]
        return next((CHECKED * (i + 1) for i, x in enumerate(means) if x <= sum(limit)), None)


def compare(model: str, setting: Setting, ways: Sequence[str], asked: argparse.Namespace, results: Results) -> None:
    """Seconds and bytes of all ways at one setting, in turns."""
    print(f"{model}, {setting}", flush=True)
    with network(setting.links()) as names:
        for turn in range(asked.rounds):
            for i, way in enumerate(ways):
                got = measure(way, model, names, 29500 + turn * len(ways) + i, asked.steps, False, 0)
                if got is not None:
                    results.add("steps", f"{model} | {setting} | {way}", [got.seconds, got.sent, got.formula])
    for way in ways:
        rounds = results.data["steps"].get(f"{model} | {setting} | {way}", [])
        if not rounds:
            continue
        seconds, sent, formula = (statistics.median(x[i] for x in rounds) for i in range(3))
        peers = [(peer, results.seconds(model, setting, peer)) for peer in ("floor", "ddp", "ddp fp16")]
        against = "".join(f"   {s / seconds:5.2f}x {peer}" for peer, s in peers if s)
        said = f"{sent / formula:6.3f} of the formula" if formula else " " * 21
        print(f"  {way:22} {seconds * 1e3:8.0f} ms  {sent / 1e6:7.2f} MB sent  {said}{against}", flush=True)


def learn(model: str, asked: argparse.Namespace, results: Results) -> None:
    """Curves of the loss on held-out data, for each way and seed, by four ranks."""
    with network(Setting(4, UNLIMITED).links()) as names:
        for seed in range(asked.seeds):
            for i, way in enumerate(asked.ways or LEARNED):
                if len(results.curves(model, way)) > seed:
                    continue  # a run that goes on
                steps = asked.long if way.startswith("ddp") else round(asked.long * LONGER)
                got = measure(way, model, names, 29600 + i, steps, True, seed)
                if got is not None:
                    results.add("losses", f"{model} | {way}", got.losses)
                    print(f"  {model} {way:22} seed {seed}: {got.losses[-1]:.4f} after {steps} steps", flush=True)


def verdict(text: str, value: float | None, bar: float, above: bool) -> None:
    if value is None:
        print(f"  {text:78} not measured")
        return
    holds = value >= bar if above else value <= bar
    print(f"  {text:78} {value:6.3f}   {'at least' if above else 'at most'} {bar}: {'holds' if holds else 'MISSED'}")


def bars(model: str, asked: argparse.Namespace, results: Results) -> None:
    """What is asked for, from what was measured."""
    print(f"{model}: bars")
    slow, limit = Setting(4, 100), results.limit(model)
    if limit is not None:
        print(f"  loss of DDP in fp32 {limit[0]:.4f}, standard deviation over seeds {limit[1]:.4f}")
        for way in LEARNED[1:]:
            if results.curves(model, way):
                last = statistics.mean(curve[-1] for curve in results.curves(model, way))
                steps = results.steps_to(model, way)
                print(f"    {way:22} {last:.4f}, " + (f"there after {steps} steps" if steps else "does not come there"))

    def time_to_loss(way: str) -> float | None:
        steps, seconds = results.steps_to(model, way), results.seconds(model, slow, way)
        return steps * seconds if steps and seconds else None

    ours = {way: t for way in (*CODECS[1:], *APART) if (t := time_to_loss(way)) is not None}
    best = min(ours, key=ours.__getitem__, default="")
    floor, steps = results.seconds(model, slow, "floor"), results.steps_to(model, "ddp")
    for way, total in sorted(ours.items(), key=lambda x: x[1]):
        seconds = results.seconds(model, slow, way) or 0.0
        against = f", {seconds / floor:.2f} of one without communication" if floor else ""
        print(f"  {slow}: {way} is there after {total:.1f} s, {seconds * 1e3:.0f} ms a step{against}")
    for peer, bar in (("ddp", 3.0), ("ddp fp16", 2.0)):
        theirs = time_to_loss(peer)
        ratio = theirs / ours[best] if theirs and best else None
        verdict(f"{slow}: time to DDP's loss, {peer} / {best or 'ours'}", ratio, bar, above=True)
    ratio = ours[best] / (steps * floor) if best and steps and floor else None
    verdict(f"{slow}: time to DDP's loss, {best or 'ours'} / its steps without communication", ratio, 1.25, False)
    for setting in (Setting(2, 1000), Setting(4, 1000)):
        peers = [s for peer in BASELINES if (s := results.seconds(model, setting, peer))]
        auto = results.seconds(model, setting, "auto")
        verdict(f"{setting}: auto / the best of DDP's", auto / min(peers) if auto and peers else None, 1.0, above=False)
    for setting in SIX:
        choices = [s for way in CHOICES if (s := results.seconds(model, setting, way))]
        auto = results.seconds(model, setting, "auto")
        verdict(
            f"{setting}: auto / the best choice", auto / min(choices) if auto and choices else None, 1.1, above=False
        )
    shares = [
        abs(statistics.median(x[1] for x in rounds) / rounds[0][2] - 1)
        for key, rounds in results.data["steps"].items()
        if key.startswith(f"{model} | ") and rounds[0][2] and not key.split(" | ")[2].startswith("ddp")
    ]
    verdict("bytes on the wire, the furthest from the formula", max(shares, default=None), 0.03, above=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", default="all", choices=[*PARTS, "all", "serve"])
    parser.add_argument("--model", nargs="+", default=["gpt", "conv"], choices=["gpt", "small", "conv"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[25, 100, 250, 1000])
    parser.add_argument("--ways", nargs="+")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--long", type=int, default=200, help="steps of a curve")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "slow_links.json")
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "serve":
        serve(args.ways[0], args.model[0], args.steps, args.look, args.seeds)
        return
    why = refused() if args.what != "bars" else ""
    if why:
        print(f"skipped: {why}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and ranks go with it
    results = Results(args.results)
    for model in args.model:
        for part in PARTS if args.what == "all" else [args.what]:
            PARTS[part](model, args, results)


def speed(model: str, asked: argparse.Namespace, results: Results) -> None:
    for ranks in asked.ranks:
        for mbit in asked.mbit:
            compare(model, Setting(ranks, mbit), asked.ways or WAYS, asked, results)


def uneven(model: str, asked: argparse.Namespace, results: Results) -> None:
    for setting in UNEVEN:
        compare(model, setting, asked.ways or WAYS, asked, results)


def auto(model: str, asked: argparse.Namespace, results: Results) -> None:
    for setting in SIX:
        compare(model, setting, asked.ways or (*CHOICES, "auto"), asked, results)


PARTS = {"speed": speed, "uneven": uneven, "auto": auto, "loss": learn, "bars": bars}


if __name__ == "__main__":
    main()
