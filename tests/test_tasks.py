"""Tasks of `mycel train` besides the next token: classes of texts and images, rewards and preferences from pairs."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import training
import transformers as hf
from golden import golden
from rich.console import Console
from torch.nn import functional as F
from training import LLAMA, config
from typer.testing import CliRunner

import mycel
from mycel.cli import app
from mycel.errors import TrainError
from mycel.train import assemble, labelled, metrics
from mycel.train.documents import FIELDS
from mycel.train.labelled import dpo_loss
from mycel.train.loop import train
from mycel.train.progress import Progress
from mycel.train.tokenize import Bytes
from mycel.train.waiting import Waiting

disk = training.disk  # a fixture
PAIRS = [{"prompt": f"{i}: ", "chosen": "aaaa", "rejected": "zzzz" + "z" * (i % 3)} for i in range(24)]
TEXTS = [{"text": ("spam " if i % 3 else "ham ") * (1 + i % 4), "label": "no" if i % 3 else "yes"} for i in range(30)]
CLASSIFIER = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "pad_token_id": 0, "attention_dropout": 0.0}
VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 8, "patch_size": 4,
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 2,
}  # fmt: skip


@pytest.fixture
def files(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    from PIL import Image

    for i in range(24):
        folder = tmp_path / "images" / ("dark" if i % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        shade = np.full((9, 11, 3), 40 + i if i % 2 else 210 - i, np.uint8)
        Image.fromarray(shade).save(folder / f"{i}.png")
    return tmp_path


def of_task(files, disk, task, data, model, **more):
    given = {"train": str(files / data), "split": 0.25}
    sections = {"model": {"config": model}, "data": given, "train": {"task": task, "steps": 12, **more}}
    return config(disk, files / f"run-{task}-{data}", **sections)


CASES = {
    "classify texts": ("classify", "texts.jsonl", {**CLASSIFIER, "num_labels": 2}),
    "classify images": ("classify", "images", VIT),
    "reward": ("reward", "pairs.jsonl", {**CLASSIFIER, "num_labels": 1}),
    "dpo": ("dpo", "pairs.jsonl", {**LLAMA, "attention_dropout": 0.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_task_is_learnt(files, disk, name, capsys):
    """From the loss of who knows nothing, log 2, to less, on examples that were kept back."""
    chosen = of_task(files, disk, *CASES[name]).model_copy(update={"export": name == "classify images"})
    assert train(chosen) == 0
    output = capsys.readouterr().out
    assert f" nats per {'example' if 'classify' in name else 'pair'}" in output and "nats per token" not in output
    assert ("images/s" if "images" in name else "tok/s") in output
    losses = [r["validation"] for r in metrics.read(chosen.run) if r.get("validation") is not None]
    assert losses[-1] < 0.95 * math.log(2), losses
    result = CliRunner().invoke(app, ["evaluate", str(chosen.run), "--data", str(files / CASES[name][1]), "--json"])
    assert result.exit_code == 0, result.output
    score = json.loads(result.stdout)
    count = score["examples"] if "classify" in name else score["pairs"]
    assert score["accuracy"] > 0.6 and count == (30 if "texts" in name else 24)
    if name == "classify images":
        model = hf.AutoModelForImageClassification.from_pretrained(chosen.run / "model")
        assert model.config.id2label == {0: "dark", 1: "light"}


@pytest.mark.parametrize("name", ["reward", "dpo"])
def test_pairs_are_evaluated_as_they_are_learnt(files, disk, name):
    """On the pairs of its validation a run scores what it recorded as the loss of its last step, or its best."""
    (files / "held.jsonl").write_text("\n".join(map(json.dumps, PAIRS[:8])))
    chosen = of_task(files, disk, *CASES[name], beta=0.5)
    data = chosen.data.model_copy(update={"validation": str(files / "held.jsonl")})
    chosen = chosen.model_copy(update={"data": data})
    assert train(chosen) == 0
    losses = [r["validation"] for r in metrics.read(chosen.run) if r.get("validation") is not None]
    said = lambda *more: CliRunner().invoke(app, ["evaluate", *map(str, more)])
    score = json.loads(said(chosen.run, "--data", files / "held.jsonl", "--json").stdout)
    assert score["loss"] == pytest.approx(min(losses), rel=1e-4) and score["pairs"] == 8
    assert score["accuracy"] == 1.0 and score["margin"] > 0, score
    words = said(chosen.run, "--data", files / "held.jsonl").stdout
    assert words.startswith("loss ") and "nats per pair, accuracy 100.00% of 8 pairs, margin " in words
    of_text = {"reward": "no field 'prompt'", "dpo": "perplexity"}[name]  # a language model is one still
    assert of_text in said(chosen.run, "--data", files / "texts.jsonl").output


def test_a_language_model_is_held_against_pairs_by_likelihood(files, disk):
    """No run of dpo: there is no start to compare with, so no loss."""
    chosen = of_task(files, disk, "auto", "texts.jsonl", LLAMA)
    assert train(chosen.model_copy(update={"export": True})) == 0
    pairs = labelled.examples("dpo", files / "pairs.jsonl", "auto", FIELDS, Bytes(), 16, 0, None)
    model = hf.AutoModelForCausalLM.from_pretrained(chosen.run / "model").eval()
    batch = {name: torch.from_numpy(x) for name, x in pairs.batch(range(24)).items()}
    with torch.no_grad():
        preferred, other = labelled.log_likelihoods(model, **batch).unbind(-1)
    command = ["evaluate", str(chosen.run / "model"), "--data", str(files / "pairs.jsonl"), "--length", "16", "--json"]
    score = json.loads(CliRunner().invoke(app, command).stdout)
    assert score["loss"] is None and score["margin"] == pytest.approx(float((preferred - other).mean()), rel=1e-4)
    assert score["accuracy"] == float((preferred > other).double().mean())


def test_evaluating_names_what_was_typed(files, disk):
    chosen = of_task(files, disk, *CASES["classify images"]).model_copy(update={"export": True})
    assert train(chosen) == 0
    for name, what in (("imagess", "not there"), ("texts.jsonl", "a file")):
        result = CliRunner().invoke(app, ["evaluate", str(chosen.run), "--data", str(files / name)])
        assert result.exit_code == 1 and "data.train" not in result.output, result.output
        assert f"{files / name} is {what}\n  at        {files}\n" in result.stderr, result.stderr
    assert "try       images, with FOLDER/cat/1.png" in CliRunner().invoke(
        app, ["evaluate", str(chosen.run), "--data", str(files / "imagess")]
    ).stderr  # fmt: skip


def test_the_loss_of_dpo_is_the_papers(files, disk):
    """-log sigmoid(beta ((log p(w) - log p0(w)) - (log p(l) - log p0(l)))), with each likelihood by a plain loop."""
    parts = assemble.assemble(of_task(files, disk, *CASES["dpo"], beta=0.5), Waiting(Progress(Console(quiet=True), 1)))
    module, pairs = parts.module.eval(), parts.data.train
    batch = {name: torch.from_numpy(x) for name, x in pairs.batch(range(3)).items()}

    def likelihood(ids, labels):
        logits = module(ids[None]).logits[0]
        return sum(F.log_softmax(logits[i - 1], -1)[t] for i, t in enumerate(labels.tolist()) if t != -100)

    plain = torch.stack(
        [torch.stack([likelihood(i, l) for i, l in zip(*row, strict=True)])
         for row in zip(batch["input_ids"], batch["labels"], strict=True)]
    )  # fmt: skip
    torch.testing.assert_close(batch["reference"], plain, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.05 * torch.randn_like(p))
        now = torch.stack(
            [torch.stack([likelihood(i, l) for i, l in zip(*row, strict=True)])
             for row in zip(batch["input_ids"], batch["labels"], strict=True)]
        )  # fmt: skip
    gain = now - plain
    wanted = -F.logsigmoid(0.5 * (gain[:, 0] - gain[:, 1])).mean()
    torch.testing.assert_close(dpo_loss(0.5)(module, **batch), wanted, rtol=1e-3, atol=1e-4)


def test_pairs_may_be_chats(tmp_path):
    """The template's text up to the last answer carries no loss, and has its own marks."""

    class Turns(Bytes):
        def chat(self, messages):
            parts, before = [], ""
            for m in messages:
                text = f"<{m['role'][0]}>{m['content']};"
                if m["role"] == "assistant":
                    parts, before = [*parts, (before, False), (text, True)], ""
                else:
                    before += text
            return parts

    asked = [{"role": "user", "content": "why"}]
    answers = {name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "so"), ("rejected", "no"))}
    rows = []
    for i, record in enumerate(({"prompt": asked, **answers}, {k: [*asked, *v] for k, v in answers.items()})):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(record))
        examples = labelled.examples("dpo", tmp_path / f"{i}.jsonl", "auto", FIELDS, Turns(), 16, 0, None)
        rows.append(examples.batch([0]))
    for batch in rows:
        assert bytes(batch["input_ids"][0, 0].tolist()) == b"<u>why;<a>so;\0\0\0"
        assert batch["labels"][0, 1].tolist() == [-100] * 7 + [*b"<a>no;"] + [-100] * 3


REFUSED = {
    "a language model for classes": ("classify", "texts.jsonl", LLAMA),
    "a language model for images": ("classify", "images", LLAMA),
    "a classifier of texts for images": ("classify", "images", {**CLASSIFIER, "num_labels": 2}),
    "a classifier for dpo": ("dpo", "pairs.jsonl", {**CLASSIFIER, "num_labels": 1}),
    "other labels": ("classify", "texts.jsonl", {**CLASSIFIER, "num_labels": 3}),
    "no pairs": ("reward", "texts.jsonl", {**CLASSIFIER, "num_labels": 1}),
    "no padding": ("reward", "pairs.jsonl", {**CLASSIFIER, "num_labels": 1, "pad_token_id": None}),
    "no folders of classes": ("classify", "pairs.jsonl", VIT),
    "a classifier without a task": ("auto", "texts.jsonl", {**CLASSIFIER, "num_labels": 2}),
}


def test_what_does_not_fit_a_task_is_refused(files, disk):
    messages = []
    for name, case in REFUSED.items():
        with pytest.raises(TrainError) as error:
            assemble.assemble(of_task(files, disk, *case), Waiting(Progress(Console(quiet=True), 1)))
        messages.append(f"{name}\n{str(error.value).replace(str(files), 'FOLDER')}")
    golden("refused_tasks", "\n\n".join(messages))


def test_a_loss_that_is_given_the_model():
    """As if it were written out: two calls of the model in one loss."""
    torch.manual_seed(0)
    model, twin = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())

    def contrast(model, a, b):
        return (model(a) - model(b)).square().mean(), {"size": model(a).abs().mean()}

    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 0.1), contrast, outputs=True, accumulate=2)
    plain = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(2):
        a, b = torch.randn(6, 4), torch.randn(6, 4)
        wanted, more = contrast(twin, a, b)
        plain.zero_grad()
        wanted.backward()
        plain.step()
        loss, outputs = step(a, b)
        torch.testing.assert_close((loss, outputs["size"]), (wanted.detach(), more["size"].detach()))
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))
