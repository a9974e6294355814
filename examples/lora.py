"""Fine-tuning with LoRA: a small model learns one kind of text, then small additions to its attention learn another.

    python examples/lora.py [--steps 120]

The second run trains about 2 % of the parameters; at the end they are merged, and the folder is a plain model again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from mycel.train.commands import evaluate
from mycel.train.config import Config
from mycel.train.loop import train

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 258, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
    "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip


def run(folder: Path, name: str, steps: int, model: dict, data: Path) -> Path:
    """A run of the trainer: the model it exported."""
    settings = {
        "model": model,
        "data": {"train": str(data), "tokenizer": "bytes", "length": 32, "cache": str(folder / "cache")},
        "optimizer": {"lr": 5e-3},
        "train": {"steps": steps, "batch": 8, "device": "cpu"},
        "evaluate": {"every": 0},
        "log": {"every": 40, "tensorboard": False, "curve": False},
        "sample": None,
        "run": str(folder / name),
    }
    if train(Config.from_dict(settings)) != 0:
        raise SystemExit(f"{name} failed")
    return folder / name / "model"


def loss_on(model: Path, data: Path) -> float:
    report = evaluate(model, [str(data)], print, last=False, length=32, device="cpu", as_json=False)
    return float(report.split()[1])


def main(steps: int = 120) -> tuple[float, float]:
    """The loss on the new text, before and after."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = folder / "first.txt", folder / "second.txt"
        first.write_text("".join(f"the sum of {i} and {i + 1} is {2 * i + 1}\n" for i in range(500)))
        second.write_text("".join(f"{i} squared makes {i * i}\n" for i in range(500)))
        base = run(folder, "base", steps, {"config": LLAMA}, first)
        before = loss_on(base, second)
        adapted = run(folder, "lora", steps, {"path": str(base), "lora": {"rank": 4}}, second)
        after = loss_on(adapted, second)
    print(f"loss on the second text: {before:.3f} before, {after:.3f} after")
    return before, after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    main(parser.parse_args().steps)
