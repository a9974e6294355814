"""The clock against real runs: predicted and measured step times, after a probe.

    python bench/clock.py                   24 cases on 4 CPU processes: three models, four plans, two batch sizes; and
                                            what asking costs
    python bench/clock.py --unseen          24 others, which nothing was fitted on
    python bench/clock.py --device cuda     models on one GPU in bf16: step time and peak memory
    python bench/clock.py --asking          what asking the clock about a 32-layer model costs, alone

On the CPU all steps live in the same four processes (one thread each) and are timed in turns, so that they see the same
machine; a case's time is the least of its rounds.  On a GPU each model has a process of its own, and one that fails
does not stop the others.  Each bar is printed with whether it is met; the exit code is 1 where one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bars import kept
from gpu_models import model_and_batch

RANKS, ROUNDS, STEPS = 4, 7, 2
MESHES = {"dp": {"dp": 4}, "zero2": {"dp": 4}, "zero3": {"dp": 4}, "tp": {"tp": 4}, "dp+tp": {"dp": 2, "tp": 2},
          "zero3+tp": {"dp": 2, "tp": 2}}  # fmt: skip
CASES = [(m, p, b) for m in ("llama", "bert", "mlp") for p in ("dp", "zero3", "tp", "dp+tp") for b in (4, 32)]
UNSEEN = [(m, p, b) for m in ("gpt2", "qwen3", "vit") for p in ("dp", "zero2", "tp", "zero3+tp") for b in (8, 24)]
WIDTH, LAYERS, LENGTH, VOCABULARY = 192, 4, 64, 512
RANK_BAR, ASKING_BAR_S = 0.9, 0.010

GPU_MODELS = (
    "llama-1.1b",
    "gpt2-medium",
    "bert-large",
    "vit-large",
    "qwen3-0.6b",
    "resnet-50",
    "t5-base",
    "phi-0.5b",
    "opt-350m",
    "mistral",
    "gemma2",
)
GPU_STEPS, GPU_LIMIT_S, GPU_ALL_S = 10, 120, 520  # seconds: one model, all of them
TIME_BAR, PEAK_BAR = 0.15, 0.05


def model_of(name: str, batch: int):
    """(module that returns its loss, batch) of a CPU case."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    if name == "mlp":
        return Perceptron(torch), (torch.randn(8 * batch, 256), torch.randn(8 * batch, 256))
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
    }
    if name == "vit":
        sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
        config = hf.ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10, **quiet)
        model = hf.ViTForImageClassification(config)
        return Loss(torch, model, "pixel_values"), (torch.randn(batch, 3, 64, 64), torch.randint(0, 10, (batch,)))
    if name == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = hf.GPT2Config(n_embd=256, n_layer=3, n_head=8, n_positions=48, vocab_size=1000, **dropouts)
        ids = torch.randint(0, 1000, (batch, 48))
        return Loss(torch, hf.GPT2LMHeadModel(config)), (ids, ids.clone())
    if name == "qwen3":
        config = hf.Qwen3Config(
            **{**sizes, "hidden_size": 160, "num_hidden_layers": 2},
            head_dim=40,
            num_key_value_heads=4,
            intermediate_size=640,
            tie_word_embeddings=True,
            use_cache=False,
        )
        model = hf.Qwen3ForCausalLM(config)
    elif name == "llama":
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(**sizes, intermediate_size=3 * WIDTH, num_key_value_heads=4, use_cache=False)
        )
    else:
        model = hf.BertForMaskedLM(
            hf.BertConfig(**{**sizes, "num_hidden_layers": 2}, **quiet, intermediate_size=2 * WIDTH)
        )
    ids = torch.randint(0, VOCABULARY, (batch, LENGTH))
    return Loss(torch, model), (ids, ids.clone())


def Perceptron(torch):
    """Four layers of two products with a residual, and a mean squared error."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

        def forward(self, x):
            return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x, target):
            for layer in self.layers:
                x = layer(x)
            return torch.nn.functional.mse_loss(x, target)

    return Stack()


def Loss(torch, model, takes="input_ids"):
    """An HF model as a function of its input and labels that returns the loss."""

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x, labels):
            return self.model(**{takes: x}, labels=labels).loss

    return Wrapped()


# -- four CPU processes


def rank_main(out: str, cases: list[tuple[str, str, int]]) -> None:
    """One of the ranks: all cases, in turns; the first writes what it saw."""
    import torch

    import mycel

    torch.set_num_threads(1)
    steps = {}
    for model_name, plan, batch_size in cases:
        model, batch = model_of(model_name, batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        step = mycel.train_step(model, optimizer, mesh=mycel.Mesh(MESHES[plan]), plan=plan)
        for _ in range(2):
            float(step(*batch))
        steps[model_name, plan, batch_size] = step, batch
    seconds: dict[tuple[str, str, int], list[float]] = {case: [] for case in cases}
    for _ in range(ROUNDS):
        for case, (step, batch) in steps.items():
            float(step(*batch))  # all ranks are here
            started = time.perf_counter()
            for _ in range(STEPS):
                float(step(*batch))
            seconds[case].append((time.perf_counter() - started) / STEPS)
    if os.environ["RANK"] == "0":
        rows = []
        for case, (step, _) in steps.items():
            predicted = step.plan.predicted
            rows.append(
                [
                    *case,
                    predicted.seconds,
                    min(seconds[case]),
                    {name: total for name, (total, _) in predicted.parts.items()},
                ]
            )
        Path(out).write_text(json.dumps(rows))


def on_cpu(probe_file: str | None, unseen: bool) -> bool:
    from scipy.stats import spearmanr

    from mycel.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        measured, out = probe_file or f"{folder}/probe.yaml", f"{folder}/rows.json"
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        if probe_file is None and launch(["probe", "--device", "cpu", "--out", measured], RANKS, env=threads):
            raise SystemExit("the probe failed")
        if launch(
            ["--rank", out, *(["--unseen"] if unseen else [])],
            RANKS,
            env={**threads, "MYCEL_PROBE": measured},
            program=[__file__],
        ):
            raise SystemExit("a rank failed")
        rows = json.loads(Path(out).read_text())
    print(f"{'model':6} {'plan':8} {'batch':>5} {'predicted':>10} {'measured':>10} {'ratio':>6}   of which")
    for model, plan, batch, predicted, seconds, parts in rows:
        shares = ", ".join(f"{name} {total * 1e3:.1f}" for name, total in parts.items())
        print(
            f"{model:6} {plan:8} {batch:5} {predicted * 1e3:8.1f}ms {seconds * 1e3:8.1f}ms "
            f"{predicted / seconds:6.2f}   {shares}"
        )
    correlation = spearmanr([row[3] for row in rows], [row[4] for row in rows]).statistic
    return kept(f"Spearman {correlation:.3f} of {len(rows)} cases", f"{RANK_BAR}", correlation >= RANK_BAR)


# -- what asking costs


def asking() -> bool:
    """A 32-layer Llama for 64 ranks, lowered once and asked about often."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from distributing import OneDevice, ready_to_run

    from mycel.ir import Mesh
    from mycel.plan import CPU, Clock, Plan

    torch.set_num_threads(1)
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=4096,
                intermediate_size=11008,
                num_hidden_layers=32,
                num_attention_heads=32,
                vocab_size=32000,
            )
        )
    ids = torch.randint(0, 32000, (512, 64))
    one, mesh = OneDevice.of(model, {"input_ids": ids, "labels": ids}, clip_norm=1.0), Mesh(dp=8, tp=8)
    program = ready_to_run(one.under(Plan.read("zero3+tp", mesh)))
    clock = Clock(CPU, CPU.links(mesh))
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        clock(program)
        seconds.append(time.perf_counter() - started)
    after = sorted(seconds)[10]
    said = f"asking about a 32-layer Llama: {seconds[0] * 1e3:.1f} ms first, {after * 1e3:.2f} ms after"
    return kept(said, f"{ASKING_BAR_S * 1e3:.0f} ms", after <= ASKING_BAR_S)


# -- one GPU ---------------------------------------------------------------------------------------------------------


KERNELS = {  # words in the names of kernels
    "attention": ("flash", "fmha", "attention", "cudnn_generated", "bias_grad"),
    "conv": ("conv", "wgrad", "dgrad", "implicit"),
    "product": ("gemm", "cutlass", "nvjet", "cublas", "linear_ce"),
    "update": ("adam", "multi_tensor", "foreach"),
}


def show_parts(step, batch) -> None:
    """Seconds by kind of kernel: predicted, and as a profiler sees them; and how long the device is idle."""
    import torch

    from mycel import plan

    program, regions = step.entries[0].program, step.entries[0].lowered.regions
    predicted: dict[str, float] = {}
    for event in plan.clock(program, plan.hardware_of(torch.device("cuda")), None, regions).events():
        rate = event.eqn.op.rate_of(event.eqn.input_types, event.eqn.params)
        kind = "update" if event.eqn.phase == "update" else rate.partition("_")[0] or "memory"
        predicted[kind] = predicted.get(kind, 0.0) + event.end - event.start
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        started = time.perf_counter()
        step(**batch)
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    measured: dict[str, float] = {}
    count = 0
    for kernel in profile.key_averages():
        kind = next((k for k, words in KERNELS.items() if any(w in kernel.key.lower() for w in words)), "memory")
        measured[kind] = measured.get(kind, 0.0) + kernel.self_device_time_total * 1e-6
        count += kernel.count
    for kind in dict.fromkeys((*predicted, *measured)):
        print(
            f"    {kind:10} predicted {predicted.get(kind, 0.0) * 1e3:7.1f} ms   measured "
            f"{measured.get(kind, 0.0) * 1e3:7.1f} ms"
        )
    print(
        f"    idle {(wall - sum(measured.values())) * 1e3:.1f} ms of {wall * 1e3:.1f} under the profiler; {count} "
        "kernels"
    )
    top = sorted(profile.key_averages(), key=lambda k: -k.self_device_time_total)[:8]
    for kernel in top:
        print(f"      {kernel.self_device_time_total / 1e3:7.2f} ms  x{kernel.count:<4} {kernel.key[:90]}")


def measure_gpu(name: str, parts: bool = False) -> dict[str, float]:
    """One model in this process."""
    import torch

    import mycel

    torch.manual_seed(0)
    model, batch = model_and_batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step = mycel.train_step(model, optimizer)
    step(**batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()  # before the step is recorded: replayed, it takes no memory anew
    for _ in range(2):
        step(**batch)
    seconds = []
    for _ in range(GPU_STEPS):
        started = time.perf_counter()
        step(**batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated()
    if parts:
        show_parts(step, batch)
        print(f"    {step.entries[0].replayed}")
    predicted = step.plan.predicted
    return {
        "predicted": predicted.seconds, "measured": sorted(seconds)[len(seconds) // 2],
        "predicted_peak": predicted.peak, "peak": peak,
    }  # fmt: skip


def on_gpu(probe_file: str | None, names: list[str], parts: bool = False) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        measured = probe_file or f"{folder}/probe.yaml"
        if probe_file is None:
            done = subprocess.run([sys.executable, __file__, "--probe-to", measured], check=False)
            print(
                Path(measured).read_text() if done.returncode == 0 else "the probe failed: presets are used", flush=True
            )
            measured = measured if done.returncode == 0 else ""
        print(
            f"{'model':12} {'predicted':>10} {'measured':>10} {'error':>7} {'predicted':>12} {'peak':>10} {'error':>7}",
            flush=True,
        )
        within = 0
        end = time.monotonic() + GPU_ALL_S
        for name in names:
            row = gpu_row(name, measured, min(GPU_LIMIT_S, end - time.monotonic()), parts)
            if row is None:
                continue
            time_error, peak_error = row["predicted"] / row["measured"] - 1, row["predicted_peak"] / row["peak"] - 1
            within += abs(time_error) <= TIME_BAR and abs(peak_error) <= PEAK_BAR
            print(
                f"{name:12} {row['predicted'] * 1e3:8.1f}ms {row['measured'] * 1e3:8.1f}ms {time_error:+7.1%} "
                f"{row['predicted_peak'] / 2**30:9.2f}GiB {row['peak'] / 2**30:7.2f}GiB {peak_error:+7.1%}",
                flush=True,
            )
    said = f"{within} of {len(names)} within {TIME_BAR:.0%} of the time and {PEAK_BAR:.0%} of the peak"
    return kept(said, f"{len(names)}", within == len(names))


def gpu_row(name: str, probe_file: str, limit_s: float, parts: bool) -> dict[str, float] | None:
    """A model in a process of its own; None, with a word about it, if it fails or takes too long."""
    command, env = (
        [sys.executable, __file__, "--one", name, *["--parts"] * parts],
        {**os.environ, "MYCEL_PROBE": probe_file},
    )
    try:
        done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=max(limit_s, 1.0))
    except subprocess.TimeoutExpired:
        print(f"{name:12} took more than {limit_s:.0f} s", flush=True)
        return None
    with contextlib.suppress(IndexError, ValueError):
        print("\n".join(done.stdout.strip().splitlines()[:-1]), end="\n" * parts)
        return json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{name:12} failed: {done.stderr.strip()[-800:]}", flush=True)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--probe", help="a file of `mycel probe`; otherwise one is made first")
    parser.add_argument("--models", nargs="+", default=list(GPU_MODELS), help="on a GPU; model@rows: another batch")
    parser.add_argument("--asking", action="store_true", help="what asking costs, alone")
    parser.add_argument("--unseen", action="store_true", help="on CPUs: other models, plans and batches")
    parser.add_argument("--rank", metavar="OUT", help=argparse.SUPPRESS)
    parser.add_argument(
        "--parts", action="store_true", help="on a GPU: where the time goes, predicted and as a profiler sees it"
    )
    parser.add_argument("--probe-to", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--one", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rank, UNSEEN if args.unseen else CASES)
    elif args.probe_to:
        import yaml

        from mycel.run.probe import probe

        Path(args.probe_to).write_text(yaml.safe_dump(probe("cuda"), sort_keys=False, default_flow_style=None))
    elif args.one:
        print(json.dumps(measure_gpu(args.one, args.parts)))
    elif args.asking:
        sys.exit(not asking())
    elif args.device == "cuda":
        sys.exit(not on_gpu(args.probe, args.models, args.parts))
    else:
        sys.exit(not all([asking(), on_cpu(args.probe, args.unseen)]))


if __name__ == "__main__":
    main()
