"""What a start compiles: units, kernels and seconds, ours (compile=True) against torch.compile, on the CPU, each way in
a process of its own: first with empty caches, then again with what that left.

    python bench/units.py                      all models
    python bench/units.py resnet-50 bert-small ours

Seconds to the third step are of processors, children among them and without those of three steps, for others may use
the machine; the wall's stand beside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

MODELS = ("resnet-50", "swin-tiny", "bert-small", "unet")
WAYS = ("ours", "compile")
# what of ours is timed: (module, function or method, under which name)
SPANS = (
    ("mycel.step.gradients", "Recipe.loss_and_gradients", "trace"),
    ("mycel.step.compiler", "planned", "plan"),
    ("mycel.step.compiler", "load", "source"),
    ("mycel.run.compiled_blocks", "block_inputs", "strides"),
    ("mycel.run.compiled_blocks", "_loaded", "load"),
)


def model_and_batch(name: str):
    import torch
    import transformers as hf

    labels = torch.randint(0, 100, (2,))
    if name == "resnet-50":
        images = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": labels}
        return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=100)), images
    if name == "swin-tiny":
        images = {"pixel_values": torch.randn(2, 3, 224, 224), "labels": labels}
        return hf.SwinForImageClassification(hf.SwinConfig(drop_path_rate=0.0, num_labels=100)), images
    if name == "unet":
        from small_unet import SmallUNet

        batch = {"images": torch.randn(2, 3, 32, 32), "time": torch.rand(2), "noise": torch.randn(2, 3, 32, 32)}
        return SmallUNet(), batch
    import cpu_step

    return cpu_step.model_and_batch(name)


def timed(spans: Counter[str], module: str, path: str, name: str) -> None:
    """A function of a module, whose seconds and calls are counted from now on."""
    import importlib

    *owners, attribute = path.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    fn = getattr(owner, attribute)

    def run(*args, **kwargs):
        start = time.thread_time()
        try:
            return fn(*args, **kwargs)
        finally:
            spans[name] += time.thread_time() - start
            spans[f"{name} n"] += 1

    setattr(owner, attribute, run)


def measure(name: str, way: str) -> None:
    """One start: what it took to the third step, as JSON."""
    import torch

    torch.manual_seed(0)
    model, batch = model_and_batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    spans: Counter[str] = Counter()
    began, wall = processor_s(), time.perf_counter()
    if way == "ours":
        import mycel

        mycel.train_step  # noqa: B018  (what it imports is no span)
        for span in SPANS:
            timed(spans, *span)
        step = mycel.train_step(model, optimizer, compile=True)
    else:
        run = torch.compile(model)

        def step(**batch):
            loss = run(**batch)
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

    losses = [float(step(**batch)) for _ in range(3)]
    third = {"processor": processor_s() - began, "wall": time.perf_counter() - wall}
    times, work = [], []
    for _ in range(5):
        start, work_began = time.perf_counter(), processor_s()
        step(**batch)
        times.append(time.perf_counter() - start)
        work.append(processor_s() - work_began)
    third["processor"] -= 3 * sorted(work)[2]  # what is left is the start alone
    if way == "ours":
        from torch._dynamo.utils import counters

        blocks = step.entries[0].code.blocks
        spans["units"] = len(blocks)
        spans["calls"] = sum(len(block.loaded) for block in blocks.values())
        spans["code"] = len({id(run) for block in blocks.values() for run in block.loaded.values()})
        spans["in turn"] = counters["stats"]["unique_graphs"]
    print(json.dumps({"spans": spans, "third": third, "losses": losses, "step": min(times)}), flush=True)


def processor_s() -> float:
    """Of this process and the ended ones it waited for."""
    return sum(os.times()[:4])


def compare(name: str, ways: list[str]) -> None:
    print(f"{name:12} {'start':7} {'third step':>20} {'step':>8} {'kernels':>8}   of it, and what was compiled")
    for way in ways:
        with tempfile.TemporaryDirectory() as caches:
            before: set[Path] = set()
            for start in ("first", "again"):
                env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches}
                command = [sys.executable, os.path.abspath(__file__), "--measure", name, way]
                out = subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE, text=True).stdout
                row = json.loads(out.splitlines()[-1])
                kernels = {path for path in Path(caches).rglob("*.so") if path.name.startswith("c")}
                print_row(way, start, row, len(kernels - before))
                before = kernels


def print_row(way: str, start: str, row: dict, kernels: int) -> None:
    third, spans = row["third"], row["spans"]
    seconds = ", ".join(f"{name} {spans.get(name, 0):.2f}" for _, _, name in SPANS) if way == "ours" else ""
    counts = ", ".join(f"{spans[k]} {k}" for k in ("units", "calls", "code", "in turn") if spans.get(k))
    took = f"{third['processor']:6.1f}s ({third['wall']:5.1f} wall)"
    print(f"{way:12} {start:7} {took:>20} {row['step'] * 1e3:6.0f}ms {kernels:8}   {seconds}  {counts}", flush=True)


def main() -> None:
    ways = [x for x in sys.argv[1:] if x in WAYS] or list(WAYS)
    for name in [x for x in sys.argv[1:] if x not in WAYS] or MODELS:
        compare(name, ways)


if __name__ == "__main__":
    measure(*sys.argv[2:]) if sys.argv[1:2] == ["--measure"] else main()
