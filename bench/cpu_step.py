"""Whole training steps on the CPU: ours against torch eager with fused AdamW and torch.compile, in the same run.

    python bench/cpu_step.py                      all models
    python bench/cpu_step.py small-gpt lstm

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
MODELS = ("small-gpt", "resnet-18", "bert-small", "lstm", "vit-tiny", "packed-llama")
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model_and_batch(name: str):
    """(a model that returns its loss, or an object with it; the arguments of a call)"""
    import torch

    if name == "small-gpt":
        from small_gpt import BATCH, LENGTH, VOCABULARY, SmallGPT

        return SmallGPT(), {"ids": words(VOCABULARY, BATCH, LENGTH), "targets": words(VOCABULARY, BATCH, LENGTH)}
    if name == "lstm":
        return language_model(), {"ids": words(2000, 16, 64), "targets": words(2000, 16, 64)}
    import transformers as hf

    if name == "bert-small":
        sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
        ids = words(8000, 8, 128)
        return hf.BertForMaskedLM(hf.BertConfig(**sizes, **QUIET, vocab_size=8000)), {"input_ids": ids, "labels": ids}
    if name == "packed-llama":
        return packed_llama(hf)
    labels = torch.randint(0, 100, (8,))
    if name == "vit-tiny":
        sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
        config = hf.ViTConfig(**sizes, **QUIET, image_size=112, patch_size=16, num_labels=100)
        return hf.ViTForImageClassification(config), {"pixel_values": torch.randn(8, 3, 112, 112), "labels": labels}
    config = hf.ResNetConfig(
        depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic", num_labels=100, embedding_size=64
    )
    return hf.ResNetForImageClassification(config), {"pixel_values": torch.randn(8, 3, 112, 112), "labels": labels}


def packed_llama(hf):
    """Documents of 16 to 400 tokens packed into sequences, as position_ids tell: torch makes a mask of all pairs."""
    import torch

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 704}
    config = hf.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=4000, use_cache=False)
    positions = torch.cat([torch.arange(n) for n in (16, 300, 120, 31, 180, 25, 352, 90, 400, 210, 44, 280)])
    ids = words(4000, 2, 1024)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions.reshape(2, 1024)}
    return hf.LlamaForCausalLM(config), batch


def words(vocabulary: int, rows: int, length: int):
    import torch

    return torch.randint(0, vocabulary, (rows, length))


def language_model():
    """Two layers of an LSTM between an embedding and a head."""
    import torch

    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = torch.nn.Embedding(2000, 256), torch.nn.Linear(256, 2000)
            self.lstm = torch.nn.LSTM(256, 256, num_layers=2, batch_first=True)

        def forward(self, ids, targets):
            logits = self.head(self.lstm(self.embedding(ids))[0])
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Recurrent()


def serve(name: str, way: str) -> None:
    """One way: answers each line on stdin with the seconds of a few steps."""
    import torch

    torch.manual_seed(0)
    model, batch = model_and_batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    start = time.perf_counter()
    if way == "ours":
        import mycel

        step = mycel.train_step(model, optimizer)
    else:
        run = torch.compile(model) if way == "compile" else model

        def step(**batch):
            loss = run(**batch)
            loss = loss if isinstance(loss, torch.Tensor) else loss.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

    losses = [float(step(**batch)) for _ in range(3)]
    print(time.perf_counter() - start, losses[-1], flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(STEPS):
            step(**batch)
        print((time.perf_counter() - start) / STEPS, flush=True)


def compare(name: str) -> None:
    """All ways of one model."""
    here = os.path.dirname(os.path.abspath(__file__))
    caches = tempfile.mkdtemp()
    running, third, loss = {}, {}, {}
    for way in WAYS:  # one after the other: a start has the machine to itself
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": os.path.join(caches, way)}
        command = [sys.executable, os.path.join(here, "cpu_step.py"), "--serve", name, way]
        running[way] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
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
    print(f"{name:32} {'step':>9} {'3rd step':>9}   loss of the third")
    for way, title in WAYS.items():
        print(f"{title:32} {best[way] * 1e3:7.1f}ms {third[way]:8.2f}s   {loss[way]:.6f}")
    peer = min(best["eager"], best["compile"])
    print(f"speed against the better peer  {peer / best['ours']:.2f}x   (bar 1.0)")
    print(f"time to the third step against torch.compile  {third['ours'] / third['compile']:.2f}x   (bar 0.5)")


def main() -> None:
    # so that no way pays for writing .pyc files
    subprocess.run([sys.executable, "-c", "import mycel.step, torch._inductor.compile_fx"], check=True)
    for name in sys.argv[1:] or MODELS:
        compare(name)


if __name__ == "__main__":
    serve(*sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else main()
