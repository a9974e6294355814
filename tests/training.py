"""A tiny run of `mycel train` to try things on: its data, its settings, the command line in processes of its own, what
it leaves behind."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mycel.run.checkpoint import latest, load
from mycel.run.folder import RunFolder
from mycel.train import metrics
from mycel.train.config import Config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 258,
    "max_position_embeddings": 64,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 64,
    "vocab_size": 258,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
RANDOM = random.Random(7)
WORDS = ["def", "self", "return", "(x)", "if", "else:", "while", "in", "None", "1", "+", "import"]
TEXT = "\n".join(" ".join(RANDOM.choices(WORDS, k=8)) for _ in range(200))


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A folder with data, and with tokens cached once for all."""
    path = tmp_path_factory.mktemp("train")
    (path / "text.txt").write_text(TEXT)
    return path


def settings(disk: Path, run: Path, **sections: dict) -> dict:
    """A tiny run of 12 steps, as nested settings; `sections` go over it, key by key."""
    whole = {
        "model": {"config": LLAMA},
        "data": {
            "train": str(disk / "text.txt"),
            "tokenizer": "bytes",
            "length": 16,
            "split": 0.2,
            "cache": str(disk / "cache"),
        },
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 12, "batch": 4, "device": "cpu"},
        "evaluate": {"every": 4, "batches": 3},
        "checkpoint": {"every": 5},
        "log": {"every": 3, "curve": False, "tensorboard": False},
        "sample": None,
        "export": False,
        "run": str(run),
    }
    for name, values in sections.items():
        whole[name] = {**(whole.get(name) or {}), **values} if isinstance(values, dict) else values
    return whole


def config(disk: Path, run: Path, **sections: dict) -> Config:
    return Config.from_dict(settings(disk, run, **sections))


def measured(run: Path) -> list[dict]:
    """The records without what depends on the machine's speed."""
    return [{k: v for k, v in r.items() if k not in ("tokens_per_s", "memory_bytes", "mfu")} for r in metrics.read(run)]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return load(latest(run / "checkpoints")).tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


class Mycel:
    """The command line in processes of its own: see train_child."""

    def __init__(self, out: Path) -> None:
        self.out = out
        script = Path(__file__).with_name("train_child.py")
        self.server = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, *args: object, cwd: Path, **job: object) -> int:
        """Begin a run: its process."""
        self.server.stdin.write(
            json.dumps({"args": [str(a) for a in args], "cwd": str(cwd), "out": str(self.out), **job}) + "\n"
        )
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())["pid"]

    def end(self) -> tuple[int, str]:
        """Its exit code and what it printed."""
        return json.loads(self.server.stdout.readline())["ended"], self.out.read_text()

    def __call__(self, *args: object, cwd: Path, **job: object) -> tuple[int, str]:
        self.start(*args, cwd=cwd, **job)
        return self.end()


@pytest.fixture(scope="module")
def mycel(tmp_path_factory):
    command = Mycel(tmp_path_factory.mktemp("out") / "out.txt")
    yield command
    command.server.stdin.close()
    command.server.wait(60)


def nothing_left(run: Path) -> bool:
    """No lock is held, and no file is there that belongs to something half done."""
    RunFolder(run, resume=True).close()
    return not [p for p in run.rglob("*") if re.search(r"\.tmp|\.part|\.old|\.trash", p.name)]
