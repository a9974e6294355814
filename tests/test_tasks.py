"""Tasks of `mycel train` besides the next token: classes of texts and images, rewards and preferences from pairs."""

from __future__ import annotations

import json
import math
import random

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
from mycel.plan.cluster import Cluster
from mycel.train import assemble, labelled, metrics
from mycel.train.documents import FIELDS
from mycel.train.export import byte_tokenizer
from mycel.train.labelled import dpo_loss
from mycel.train.loop import train
from mycel.train.models import Head, build
from mycel.train.planner import question
from mycel.train.progress import Progress
from mycel.train.tasks import batch_outline
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


@pytest.mark.parametrize("name", ["classify texts", "classify images"])
def test_a_task_that_the_data_is_plainly_for_need_not_be_said(files, disk, name, capsys):
    """As if it had been said, and the run folder says it."""
    task, data, model = CASES[name]
    of_none = of_task(files, disk, "auto", data, model, steps=2)
    assert train(of_none) == 0 and train(of_task(files, disk, task, data, model, steps=2)) == 0
    output = capsys.readouterr().out
    assert "task: classify" in (of_none.run / "config.yaml").read_text()
    assert output.count("note: train.task is classify: the ") == 1 and str(files / data) in output
    runs = [files / f"run-{task}-{data}" for task in ("auto", "classify")]
    assert training.measured(runs[0]) == training.measured(runs[1]) != []
    asked = [question(of_task(files, disk, said, data, model), Cluster.read("h100x1")) for said in ("auto", task)]
    batches = [each.batch for each in asked]
    assert batches[0] == batches[1] != []


def test_chats_are_learnt_by_their_answers(tmp_path, disk):
    """What people say is drawn and stays unknown; the answers are learnt, and given when one asks."""
    template = (
        "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content + ';' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
    )
    words, draw = tmp_path / "words", random.Random(0)
    byte_tokenizer(words, 64)
    told = json.loads((words / "tokenizer_config.json").read_text())
    (words / "tokenizer_config.json").write_text(json.dumps({**told, "chat_template": template}))
    (words / "chat_template.jinja").unlink(missing_ok=True)

    def chat() -> list[dict[str, str]]:
        asked = ["".join(draw.choices("abcdefgh", k=6)) for _ in range(2)]
        turns = [("user", asked[0]), ("assistant", "aye"), ("user", asked[1]), ("assistant", "aye aye")]
        return [{"role": role, "content": text} for role, text in turns]

    chats = {name: [chat() for _ in range(count)] for name, count in (("train", 40), ("held", 8))}
    for name, rows in chats.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    data = {"train": str(tmp_path / "train.jsonl"), "validation": str(tmp_path / "held.jsonl")}
    chosen = config(
        disk, tmp_path / "run", model={"config": {**LLAMA, "attention_dropout": 0.0}}, export=True,
        data={**data, "tokenizer": str(words), "length": 48, "pack": False, "cache": str(tmp_path / "cache")},
        train={"task": "sft", "steps": 60, "batch": 8}, evaluate={"every": 60, "batches": 9}, optimizer={"lr": 3e-2},
    )  # fmt: skip
    assert train(chosen) == 0
    model = hf.AutoModelForCausalLM.from_pretrained(chosen.run / "model").eval()
    nats: dict[bool, list[float]] = {True: [], False: []}
    for row in chats["held"]:
        pieces = [(f"<{m['role'][0]}>", m["content"] + ";", m["role"] == "assistant") for m in row]
        text = "".join(mark + said for mark, said, _ in pieces)
        answers = [mine for mark, said, mine in pieces for mine in [False] * len(mark) + [mine] * len(said)]
        ids = torch.tensor([list(text.encode())])
        with torch.no_grad():
            each = F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        for loss, mine in zip(each.tolist(), answers[1:], strict=True):
            nats[mine].append(loss)
    learnt, unknown = (sum(nats[mine]) / len(nats[mine]) for mine in (True, False))
    validation = [r["validation"] for r in metrics.read(chosen.run) if r.get("validation") is not None][-1]
    assert validation == pytest.approx(learnt, rel=1e-4) and learnt < 0.3 and unknown > 2, (learnt, unknown)
    asked = ["--chat", "--prompt", "hgfedc", "--tokens", "4", "--temperature", "0"]
    assert CliRunner().invoke(app, ["generate", str(chosen.run), *asked]).stdout == "aye;\n"


def test_texts_with_labels_are_not_silently_read_as_texts(files, disk):
    """A language model could learn either; what is said is done, and labels that have no text beside them are none."""
    with pytest.raises(TrainError) as error:
        train(of_task(files, disk, "auto", "texts.jsonl", LLAMA))
    golden("labelled_texts", str(error.value).replace(str(files), ""))
    assert train(of_task(files, disk, "pretrain", "texts.jsonl", LLAMA, steps=2)) == 0
    renamed = [{"text": row["text"], "kind": row["label"]} for row in TEXTS]
    (files / "renamed.jsonl").write_text("\n".join(map(json.dumps, renamed)))
    chosen = of_task(files, disk, "auto", "renamed.jsonl", LLAMA, steps=2)
    assert train(chosen) == 0
    fields = chosen.data.fields.model_copy(update={"label": "kind"})
    data = chosen.data.model_copy(update={"fields": fields})
    with pytest.raises(TrainError, match="each text has a label"):
        train(chosen.model_copy(update={"data": data, "run": files / "other"}))


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
    chosen = of_task(files, disk, "pretrain", "texts.jsonl", LLAMA)
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
    "a family without classifiers": (
        "classify", "texts.jsonl", {"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 258}
    ),
    "a language model for images": ("classify", "images", LLAMA),
    "a classifier of texts for images": ("classify", "images", {**CLASSIFIER, "num_labels": 2}),
    "a classifier for dpo": ("dpo", "pairs.jsonl", {**CLASSIFIER, "num_labels": 1}),
    "other labels": ("classify", "texts.jsonl", {**CLASSIFIER, "num_labels": 3}),
    "no pairs": ("reward", "texts.jsonl", {**CLASSIFIER, "num_labels": 1}),
    "no padding": (
        "reward", "pairs.jsonl", {**CLASSIFIER, "num_labels": 1, "pad_token_id": None, "eos_token_id": None}
    ),
    "no folders of classes": ("classify", "pairs.jsonl", VIT),
    "a classifier without a task": ("auto", "texts.jsonl", {**CLASSIFIER, "num_labels": 2}),
}  # fmt: skip


def test_what_does_not_fit_a_task_is_refused(files, disk):
    messages = []
    for name, case in REFUSED.items():
        with pytest.raises(TrainError) as error:
            assemble.assemble(of_task(files, disk, *case), Waiting(Progress(Console(quiet=True), 1)))
        messages.append(f"{name}\n{str(error.value).replace(str(files), 'FOLDER')}")
    golden("refused_tasks", "\n\n".join(messages))


@pytest.mark.parametrize("name", [*CASES, "text"])
def test_plans_are_for_the_batch_that_a_run_has(files, disk, name):
    """`mycel plan` reads no data, and knows what a batch of a task will be."""
    case = CASES.get(name, ("auto", "texts.jsonl", LLAMA))
    given = of_task(files, disk, *case)
    parts = assemble.assemble(given, Waiting(Progress(Console(quiet=True), 1)))
    batch = parts.data.train.batch(range(3))
    outline = batch_outline(given, parts.module, 3)
    assert {k: (x.shape, str(x.dtype)) for k, x in batch.items()} == {
        k: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for k, x in outline.items()
    }
    assert question(given, Cluster.read("h100x1")).run().best is not None


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


# -- what classes are called


def saved_table(path, rows, names):
    """A table as `datasets` writes it: numbers, and what they are called."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    features = {"text": {"dtype": "string", "_type": "Value"}, "label": {"names": names, "_type": "ClassLabel"}}
    said = json.dumps({"info": {"features": features}}).encode()
    table = pa.Table.from_pylist(rows).replace_schema_metadata({b"huggingface": said})
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return path
    path.mkdir()
    with ipc.new_stream(str(path / "data-00000-of-00001.arrow"), table.schema) as file:
        file.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return path


NUMBERED = [{"text": f"{x['text']}{i}", "label": int(x["label"] == "yes")} for i, x in enumerate(TEXTS)]


def classes_of(data, known=None, only=True, fields=FIELDS):
    given = labelled.examples("classify", data, "auto", {**FIELDS, **fields}, Bytes(), 8, 0, None, known, only)
    return given.classes, given.arrays["labels"].tolist()


@pytest.mark.parametrize("name", ["saved", "table.parquet"])
def test_classes_are_called_as_a_saved_dataset_calls_them(tmp_path, name):
    """In the dataset's order, and with all its classes, though none of the examples is in some."""
    names, numbers = ["z: not", "a: is", "unused"], [row["label"] for row in NUMBERED]
    data = saved_table(tmp_path / name, NUMBERED, names)
    assert classes_of(data) == (tuple(names), numbers)
    assert classes_of(data, names[1::-1]) == (tuple(names[1::-1]), [1 - x for x in numbers])


def test_labels_are_names_or_numbers_of_the_models_classes(tmp_path):
    (tmp_path / "names.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    (tmp_path / "numbers.jsonl").write_text("\n".join(map(json.dumps, NUMBERED)))
    names = [int(x["label"] == "no") for x in TEXTS]
    assert classes_of(tmp_path / "names.jsonl", ["yes", "no"]) == (("yes", "no"), names)
    assert classes_of(tmp_path / "numbers.jsonl", ["no", "yes"]) == (("no", "yes"), [1 - x for x in names])
    assert classes_of(tmp_path / "names.jsonl", ["cat", "dog"], only=False)[0] == ("no", "yes"), "it is trained anew"
    with pytest.raises(
        TrainError, match=r"the label 'yes' is none of the classes: cat, dog\n  at        /.*names.jsonl"
    ):
        classes_of(tmp_path / "names.jsonl", ["cat", "dog"])


def test_a_run_exports_what_its_classes_are_called(files, disk):
    """Names of a saved dataset, at the end of the run and from a checkpoint; validation need not have every class."""
    data = saved_table(files / "saved", NUMBERED, ["spam", "ham"])
    (files / "held.jsonl").write_text('{"text": "spam", "label": "spam"}\n{"text": "spam spam", "label": "spam"}')
    chosen = of_task(files, disk, "classify", "saved", {**CLASSIFIER, "num_labels": 2})
    kept = chosen.data.model_copy(update={"validation": str(files / "held.jsonl")})
    assert train(chosen.model_copy(update={"data": kept, "export": True})) == 0
    assert CliRunner().invoke(app, ["export", str(chosen.run)]).exit_code == 0
    for folder in ("model", "exported"):
        assert hf.AutoConfig.from_pretrained(chosen.run / folder).id2label == {0: "spam", 1: "ham"}, folder
    for where in (chosen.run, chosen.run / "model"):
        result = CliRunner().invoke(app, ["evaluate", str(where), "--data", str(data), "--json"])
        assert result.exit_code == 0 and json.loads(result.stdout)["examples"] == 30, result.output


def test_fields_of_examples_may_be_called_otherwise(tmp_path):
    rows = [{"review": x["text"], "sentiment": x["label"]} for x in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    named = {"text": "review", "label": "sentiment"}
    assert classes_of(tmp_path / "a.jsonl", fields=named)[0] == ("no", "yes")
    with pytest.raises(TrainError, match=r"no field 'label'; .*\n.*\n  try       data.fields.label=sentiment, or"):
        classes_of(tmp_path / "a.jsonl", fields={"text": "review"})


def test_evaluating_takes_names_of_fields(files, disk):
    """Of a run that had others; what else is a setting of training is refused."""
    rows = [{"review": x["text"], "sentiment": x["label"]} for x in TEXTS]
    (files / "named.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chosen = of_task(files, disk, *CASES["classify texts"])
    assert train(chosen) == 0
    said = lambda *more: CliRunner().invoke(app, ["evaluate", *map(str, (chosen.run, "--data", *more))])
    result = said(files / "named.jsonl")
    assert result.exit_code == 1 and "try       data.fields.text=review, or" in result.stderr, result.stderr
    renamed = said(files / "named.jsonl", "data.fields.text=review", "data.fields.label=sentiment")
    assert renamed.exit_code == 0 and renamed.stdout == said(files / "texts.jsonl").stdout, renamed.output
    wrong = said(files / "named.jsonl", "train.steps=3")
    assert wrong.exit_code == 2 and "unknown key train\n  at        argument train.steps=3" in wrong.stderr


def test_examples_that_repeat_say_why_none_is_kept_for_validation(files, disk):
    rows = [{"text": "spam" if i % 2 else "ham", "label": i % 2} for i in range(30)]
    (files / "twice.jsonl").write_text("\n".join(map(json.dumps, rows)))
    case = of_task(files, disk, "classify", "twice.jsonl", {**CLASSIFIER, "num_labels": 2})
    with pytest.raises(TrainError, match=r"8 of 30 examples cannot be kept .*: 2 are different, each there 15 to 15"):
        assemble.assemble(case, Waiting(Progress(Console(quiet=True), 1)))


# -- layers that a task needs and a folder does not have

BERT = {
    "model_type": "bert", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 258, "pad_token_id": 0,
}  # fmt: skip


def folder_of(path, config, **more):
    """A model of its own, as others publish them."""
    module = build(None, {**config, **more}, seed=5).module
    module.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("config", "head", "fresh"),
    [
        ({**LLAMA, "pad_token_id": 0}, Head("reward"), {"score.weight"}),
        (BERT, Head("classify", 3), {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "classifier.weight",
                                     "classifier.bias"}),
        ({**CLASSIFIER, "num_labels": 2}, Head("classify", 3), {"score.weight"}),
    ],
)  # fmt: skip
def test_layers_for_a_task_are_fresh_and_all_others_are_the_folders(tmp_path, config, head, fresh):
    folder = folder_of(tmp_path / "in", config)
    one, same, other = (build(folder, None, head=head, seed=seed) for seed in (1, 1, 2))
    assert one.module.config.num_labels == (head.labels or 1) and type(one.module).__name__.endswith("Classification")
    stored = dict(build(folder, None).module.named_parameters())
    for name, x in one.module.named_parameters():
        assert torch.equal(x, same.module.get_parameter(name)), "the seed decides"
        if name in fresh:
            assert torch.equal(x, other.module.get_parameter(name)) == name.endswith("bias")
        else:
            assert torch.equal(x, stored[name]), name
    assert f"fresh layers for {type(one.module).__name__}, by the seed: " in one.notes[0]
    assert all(name in one.notes[0] for name in fresh)
    half = build(folder, None, head=head, seed=1, dtype=torch.bfloat16).module
    assert all(torch.equal(half.get_parameter(name), one.module.get_parameter(name).bfloat16()) for name in fresh)


def test_fresh_layers_are_said_once_and_one_example_is_not_several(files, disk, capsys):
    folder = folder_of(files / "language", {**LLAMA, "pad_token_id": 0})
    chosen = of_task(files, disk, "classify", "texts.jsonl", CLASSIFIER, steps=2)
    path = chosen.model.model_copy(update={"path": folder, "config": None, "labels": 2})
    data = chosen.data.model_copy(update={"validation": str(files / "one.jsonl")})
    (files / "one.jsonl").write_text('{"text": "one", "label": "yes"}')
    chosen = chosen.model_copy(update={"model": path, "data": data, "run": files / "run-fresh"})
    assert train(chosen) == 0
    output = capsys.readouterr().out
    assert "fresh layers for" in output and "1 example of 2 classes" in " ".join(output.split())
    longer = chosen.train.model_copy(update={"steps": 4})
    assert train(chosen.model_copy(update={"train": longer}), resume=chosen.run) == 0
    assert "fresh layers for" not in capsys.readouterr().out
    result = CliRunner().invoke(app, ["evaluate", str(chosen.run), "--data", str(files / "one.jsonl")])
    assert result.stdout.rstrip().endswith(" of 1 example"), result.output


def test_layers_that_the_folder_should_have_are_not_made_up(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = folder_of(tmp_path / "in", {**LLAMA, "pad_token_id": 0})
    weights = load_file(folder / "model.safetensors")
    save_file({n: x for n, x in weights.items() if "q_proj" not in n}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrainError, match=r"1 weights of LlamaForSequenceClassification are not in the files: .*q_proj"):
        build(folder, None, head=Head("reward"))


def test_a_published_language_model_becomes_a_classifier(files, disk):
    """Without a word about its layers or its padding; from its checkpoint it is exported as what it has become."""
    folder_of(files / "llama", {**LLAMA, "attention_dropout": 0.0})
    given = of_task(files, disk, "classify", "texts.jsonl", LLAMA)
    published = given.model.model_copy(update={"path": files / "llama", "config": None})
    chosen = given.model_copy(update={"model": published})
    assert train(chosen) == 0
    assert CliRunner().invoke(app, ["export", str(chosen.run)]).exit_code == 0
    model = hf.AutoModelForSequenceClassification.from_pretrained(chosen.run / "exported")
    assert model.config.id2label == {0: "no", 1: "yes"} and model.config.architectures == [type(model).__name__]
    assert model.config.pad_token_id == LLAMA["eos_token_id"]
    command = ["--data", str(files / "texts.jsonl"), "--length", "16", "--json"]
    scores = [CliRunner().invoke(app, ["evaluate", str(chosen.run / name), *command]) for name in ("", "exported")]
    assert scores[0].exit_code == 0 and scores[0].stdout == scores[1].stdout, scores[0].output
