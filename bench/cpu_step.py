"""Whole training steps of the small GPT on the CPU: ours against torch eager with fused AdamW and torch.compile, in the
same run.

    python bench/cpu_step.py

Each way starts in a process of its own with empty compile caches, reports the time to its third step, then waits; steps
are timed in turns, so that all see the same machine.  The bar is the better of the two peers for speed, torch.compile
for the start.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

ROUNDS, STEPS = 25, 2
WAYS = {"eager": "torch eager, fused AdamW", "compile": "torch.compile, fused AdamW", "ours": "mycel"}


def serve(way: str) -> None:
    """One way: answers each line on stdin with the seconds of a few steps."""
    import torch
    from small_gpt import BATCH, LENGTH, VOCABULARY, SmallGPT

    torch.manual_seed(0)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    targets = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    start = time.perf_counter()
    if way == "ours":
        import mycel

        step = mycel.train_step(model, optimizer)
    else:
        run = torch.compile(model) if way == "compile" else model

        def step(ids, targets):
            loss = run(ids, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

    losses = [float(step(ids, targets)) for _ in range(3)]
    print(time.perf_counter() - start, losses[-1], flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(STEPS):
            step(ids, targets)
        print((time.perf_counter() - start) / STEPS, flush=True)


def main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    caches = tempfile.mkdtemp()
    # so that no way pays for writing .pyc files
    subprocess.run([sys.executable, "-c", "import mycel.step, torch._inductor.compile_fx"], check=True)
    running, third, loss = {}, {}, {}
    for way in WAYS:  # one after the other: a start has the machine to itself
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": os.path.join(caches, way)}
        running[way] = subprocess.Popen(
            [sys.executable, os.path.join(here, "cpu_step.py"), way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        third[way], loss[way] = map(float, running[way].stdout.readline().split())
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, process in running.items():
            process.stdin.write("\n")
            process.stdin.flush()
            times[way].append(float(process.stdout.readline()))
    for process in running.values():
        process.stdin.close()
        process.wait()
    # the lower quartile: what others do to the machine only adds
    best = {way: sorted(ts)[len(ts) // 4] for way, ts in times.items()}
    print(f"{'how':32} {'step':>9} {'3rd step':>9}   loss of the third")
    for way, name in WAYS.items():
        print(f"{name:32} {best[way] * 1e3:7.1f}ms {third[way]:8.2f}s   {loss[way]:.6f}")
    peer = min(best["eager"], best["compile"])
    print(f"speed against the better peer  {peer / best['ours']:.2f}x   (bar 1.0)")
    print(f"time to the third step against torch.compile  {third['ours'] / third['compile']:.2f}x   (bar 0.5)")


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) > 1 else main()
