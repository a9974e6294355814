"""`mycel evaluate`, `mycel generate` and `mycel export` on a run and on what it exports: the numbers are those of a
plain loop, the text that of transformers, the model the checkpoint's."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import training
import transformers as hf
from golden import golden
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional as F
from training import GPT2, TEXT, config
from typer.testing import CliRunner

import mycel as mycel_library
from mycel import Program
from mycel.cli import app
from mycel.errors import TrainError
from mycel.run.checkpoint import best, latest, load
from mycel.train import labelled
from mycel.train.generate import Sampling, pieces, prompts, stream
from mycel.train.loop import train
from mycel.train.onnx_file import InputsToLogits, example_inputs, write_onnx
from mycel.train.sample import draw
from mycel.train.score import log_likelihoods
from mycel.train.tasks import image_settings
from mycel.train.tokenize import Bytes
from mycel.train.trained import trained

disk = training.disk  # a fixture


@pytest.fixture(scope="module")
def run(disk, tmp_path_factory):
    """A run whose best checkpoint is not its last: it climbs."""
    path = tmp_path_factory.mktemp("commands") / "run"
    climbing = {"options": {"maximize": True}}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert train(config(disk, path, optimizer=climbing, export=True, checkpoint={"every": 4, "keep": 3})) == 0
    (path.parent / "said.txt").write_text(said.getvalue())
    assert best(path / "checkpoints") != latest(path / "checkpoints")
    return path


@pytest.fixture(scope="module")
def folder(run):
    """The best of it, as a model of its own."""
    result = mycel("export", run)
    assert result.exit_code == 0, result.output
    return run / "exported"


def mycel(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], prog_name="mycel")


def words(text: str, *folders: Path) -> str:
    for i, folder in enumerate(folders):
        text = text.replace(str(folder), f"FOLDER{i or ''}")
    return text


def of(checkpoint: Path) -> dict[str, torch.Tensor]:
    saved = load(checkpoint).tensors
    return {name.removeprefix("model."): x for name, x in saved.items() if name.startswith("model.")}


def test_a_path_is_said_as_it_was_given(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for form, file in (("hf", ""), ("safetensors", "/model.safetensors")):
        assert mycel("export", run, "--to", form, "--out", form).stdout == f"exported: {form}{file}\n"


def test_what_is_exported_is_the_checkpoint(run, folder, tmp_path):
    held = dict(hf.AutoModelForCausalLM.from_pretrained(folder).state_dict())
    wanted = of(best(run / "checkpoints"))
    assert all(torch.equal(held[name], x) for name, x in wanted.items() if name in held)
    assert hf.AutoTokenizer.from_pretrained(folder)("ab")["input_ids"] == [97, 98]
    result = mycel("export", run, "--last", "--to", "safetensors", "--out", tmp_path / "weights")
    assert "the last" in result.stderr and result.stdout == f"exported: {tmp_path / 'weights' / 'model.safetensors'}\n"
    said = [
        mycel("export", run, *option, "--out", tmp_path / f"m{i}").stderr for i, option in enumerate(([], ["--best"]))
    ]
    assert said[0] == said[1] and "the best by validation" in said[0]
    last = of(latest(run / "checkpoints"))
    assert all(torch.equal(x, last[name]) for name, x in load_file(tmp_path / "weights" / "model.safetensors").items())


def test_the_end_of_a_run_says_that_its_model_is_the_best(run):
    """`RUN/model` is what `mycel export` writes: of the best step, not of the last."""
    held = dict(hf.AutoModelForCausalLM.from_pretrained(run / "model").state_dict())
    assert all(torch.equal(held[name], x) for name, x in of(best(run / "checkpoints")).items() if name in held)
    results = (run.parent / "said.txt").read_text().split("\ndone\n")[1]
    text = results[results.index("  model ") : results.index("  checkpoints ")]
    golden("told_model_of_the_best_step", " ".join(words(text, run).split()))


def test_an_exported_onnx_file_gives_the_logits_of_any_batch(run, folder, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    result = mycel("export", run, "--to", "onnx", "--out", tmp_path / "onnx")
    assert result.exit_code == 0 and "checked with onnxruntime: the model's logits" in result.stderr, result.output
    session = runtime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    model = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    for shape in ((1, 1), (4, 16)):
        ids = torch.randint(0, 258, shape)
        got = torch.from_numpy(session.run(["logits"], {"input_ids": ids.numpy()})[0])
        torch.testing.assert_close(got, model(ids).logits.detach(), rtol=1e-4, atol=1e-4)


def test_without_the_writer_of_onnx_it_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    result = mycel("export", run, "--to", "onnx", "--out", tmp_path / "onnx")
    assert result.exit_code == 1 and "try       pip install 'mycel[onnx]'" in result.stderr
    assert not (tmp_path / "onnx").exists()


def test_an_exported_program_is_the_forward_pass(run, folder, tmp_path):
    assert mycel("export", run, "--to", "program", "--out", tmp_path / "program").exit_code == 0
    program = Program.load(tmp_path / "program" / "program.safetensors")
    assert program.inputs_of("batch")[0].shape == (1, 16)
    assert program.results[0].shape == (1, 16, 258)
    check_program(program, tmp_path / "program", torch.randint(0, 258, (1, 16)), model_of(folder))


def model_of(folder: Path) -> torch.nn.Module:
    return hf.AutoModelForCausalLM.from_pretrained(folder).eval()


def check_program(program: Program, folder: Path, batch: torch.Tensor, model: torch.nn.Module) -> None:
    """A program gives the logits of a model, from the weights that lie beside it."""
    weights = load_file(folder / "model.safetensors")
    (batch_input,) = program.inputs_of("batch")
    for mode in ("graph", "eager"):
        (logits,) = mycel_library.jit(program, mode=mode)(**{batch_input.name: batch}, **weights)
        torch.testing.assert_close(logits, model(batch).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def image_run(disk, tmp_path_factory):
    """A run of a model that tells images apart."""
    path = tmp_path_factory.mktemp("images")
    for name, colour in (("cat", (255, 0, 0)), ("dog", (0, 0, 255))):
        (path / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8), colour).save(path / "images" / name / f"{i}.png")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {"config": {"model_type": "vit", "image_size": 8, "patch_size": 4, **sizes}}
    data = {"train": str(path / "images"), "tokenizer": None}
    given = config(disk, path / "run", model=model, data=data, train={"task": "classify", "steps": 2})
    assert train(given) == 0
    return path / "run"


def test_a_model_of_images_is_exported_with_what_its_pixels_are(image_run, tmp_path):
    """transformers' own processor makes of an image what the model has learnt from."""
    assert mycel("export", image_run, "--out", tmp_path / "model").exit_code == 0
    held = labelled.examples(
        "classify", image_run.parent / "images", "auto", {}, None, 1, 0, image_settings(None, of_config(image_run))
    )
    processor = hf.AutoImageProcessor.from_pretrained(tmp_path / "model")
    pixels = processor(images=[Image.open(file) for file in held.files], return_tensors="np")["pixel_values"]
    assert abs(pixels - held.batch(range(8))["pixel_values"]).max() < 1e-6


def of_config(run: Path):
    return trained(run).model.config


TINY = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
WRITTEN = {  # the inputs of a file, and how many numbers a text or image has in the end
    "causal": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TINY)), ["input_ids"]),
    "experts": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**TINY, num_key_value_heads=1, num_local_experts=4)),
        ["input_ids"],
    ),
    "classes": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**TINY, num_labels=3)), ["input_ids", "attention_mask"]
    ),
    "reward": (
        lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**TINY, num_labels=1, pad_token_id=0)),
        ["input_ids", "attention_mask"],
    ),
    "images": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**TINY, image_size=8, patch_size=4)), ["pixel_values"]
    ),
    "two texts": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), ["input_ids", "attention_mask", "decoder_input_ids"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_inputs_of_an_onnx_file(name):
    """What the model takes; where it has a mask, the logits of a text are those without its padding."""
    module, names = WRITTEN[name][0]().eval(), WRITTEN[name][1]
    inputs = example_inputs(module, 3, 11, 8)
    assert [*inputs] == names
    wrapped = InputsToLogits(module, inputs)
    logits = wrapped(*inputs.values())
    assert len(logits) == 3
    if name in ("classes", "reward"):
        short = wrapped(*(x[:1, :5] for x in inputs.values()))
        torch.testing.assert_close(short, logits[:1])


def test_an_onnx_file_of_sound_is_refused():
    sizes = {key: TINY[key] for key in TINY if key != "vocab_size"}
    model = hf.ASTForAudioClassification(hf.ASTConfig(**sizes, max_length=32, num_mel_bins=32))
    with pytest.raises(TrainError, match="of models of text and of images: ASTForAudioClassification takes input_valu"):
        example_inputs(model, 2, 7, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["experts", "classes", "reward", "images"])
def test_an_onnx_file_of_a_model_gives_its_logits(name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, said = WRITTEN[name][0]().eval(), []
    write_onnx(model, tmp_path / "model.onnx", said.append, image_size=8)
    assert len(said) == 1 and said[0].startswith("checked with onnxruntime"), said
    session, inputs = runtime.InferenceSession(str(tmp_path / "model.onnx")), example_inputs(model, 5, 9, 8)
    got = session.run(["logits"], {key: x.numpy() for key, x in inputs.items()})[0]
    torch.testing.assert_close(torch.from_numpy(got), model(**inputs).logits.detach(), rtol=1e-4, atol=1e-5)


def test_a_model_of_images_is_exported_as_a_program_too(image_run, tmp_path):
    result = mycel("export", image_run, "--to", "program", "--out", tmp_path / "program")
    assert result.exit_code == 0, result.output
    program = Program.load(tmp_path / "program" / "program.safetensors")
    assert program.inputs_of("batch")[0].shape == (1, 3, 8, 8) and program.results[0].shape == (1, 2)
    assert mycel("export", image_run, "--out", tmp_path / "model").exit_code == 0
    model = hf.AutoModelForImageClassification.from_pretrained(tmp_path / "model").eval()
    check_program(program, tmp_path / "program", torch.randn(1, 3, 8, 8), model)


def test_a_model_that_writes_no_text_says_so_and_not_that_it_lacks_a_tokenizer(image_run):
    what = "error: ViTForImageClassification is not a causal language model: it continues no text\n"
    generated = mycel("generate", image_run, "--prompt", "a")
    assert generated.stderr == (
        f"{what}  at        the model\n  try       mycel evaluate, or a model that writes text\n"
    )


def test_a_language_model_is_not_evaluated_on_images(run, image_run):
    result = mycel("evaluate", run, "--data", image_run.parent / "images")
    image = image_run.parent / "images" / "cat" / "0.png"
    assert result.stderr.endswith(
        f"error: the data is images, and LlamaForCausalLM takes no image\n  at        {image}\n"
        "  try       text, or a model of images\n"
    )


def test_a_run_is_overwritten_with_what_was_exported_of_it(disk, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    for form in ("hf", "safetensors", "program"):
        assert mycel("export", tmp_path / "run", "--to", form).exit_code == 0
    assert train(config(disk, tmp_path / "run", train={"steps": 2}), overwrite=True) == 0
    assert not any((tmp_path / "run").glob("exported*"))


def test_scores_are_those_of_a_plain_loop(run, folder, tmp_path):
    (tmp_path / "held.txt").write_text(TEXT[:700])
    scores = json.loads(mycel("evaluate", folder, "--data", tmp_path / "held.txt", "--length", 16, "--json").stdout)
    model = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([*TEXT[:700].encode(), Bytes.eos])
    ids = ids[: len(ids) // 16 * 16].view(-1, 16)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1]
    loss = F.cross_entropy(logits.reshape(-1, 258).double(), ids[:, 1:].reshape(-1)).item()
    assert scores["tokens"] == ids[:, 1:].numel() and scores["loss"] == pytest.approx(loss, rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert scores["accuracy"] == pytest.approx((logits.argmax(-1) == ids[:, 1:]).double().mean().item())
    of_run = json.loads(mycel("evaluate", run, "--data", tmp_path / "held.txt", "--json").stdout)
    assert of_run == pytest.approx(scores, rel=1e-6), "of the run's best checkpoint, in sequences of its length"


def test_what_is_longer_than_the_model_is_said(folder, tmp_path):
    """Positions that are computed go on; of those that are learnt there are no more."""
    hf.GPT2LMHeadModel(hf.AutoConfig.for_model(**GPT2)).save_pretrained(tmp_path / "gpt2")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, tmp_path / "gpt2")
    (tmp_path / "text.txt").write_text(TEXT[:400])
    (tmp_path / "q.jsonl").write_text(json.dumps({"prompt": "a" * 80, "choices": ["b", "c"], "answer": 0}))
    on_text = ("--data", tmp_path / "text.txt", "--length", 80)
    beyond = "--length is 80, but the model knows 64 positions"
    told = mycel("evaluate", folder, *on_text)
    assert told.exit_code == 0 and f"note: {beyond}: it was made for shorter sequences\n" in told.stderr
    told = mycel("evaluate", tmp_path / "gpt2", *on_text)
    assert told.exit_code == 1 and f"error: {beyond}\n  at        --length\n  try       --length 64\n" in told.stderr
    told = mycel("evaluate", tmp_path / "gpt2", "--data", tmp_path / "q.jsonl")
    assert "error: a prompt and its choice have 81 tokens, the model 64 places\n  at        prompt\n" in told.stderr


def test_multiple_choice_by_likelihood(folder, tmp_path):
    model, tokenizer = hf.AutoModelForCausalLM.from_pretrained(folder).eval(), Bytes()
    records = [
        {"prompt": "def ", "choices": ["self", " zq", "return x"], "answer": 0},
        {"prompt": "while ", "choices": ["None", "1", "import"], "answer": "1"},
        {"prompt": "(x)", "choices": [" if", "+"], "answer": 1},
    ]
    hits = by_byte = 0
    for record in records:
        sums = []
        for choice in record["choices"]:
            ids = torch.tensor([list((record["prompt"] + choice).encode())])
            with torch.no_grad():
                logp = torch.log_softmax(model(input_ids=ids).logits.double(), -1)
            begin = len(record["prompt"].encode())
            sums.append(sum(float(logp[0, i - 1, ids[0, i]]) for i in range(begin, ids.shape[1])))
        assert log_likelihoods(model, tokenizer, record["prompt"], record["choices"]) == pytest.approx(sums)
        answer = record["choices"].index(record["answer"]) if isinstance(record["answer"], str) else record["answer"]
        hits += max(range(len(sums)), key=sums.__getitem__) == answer
        by_byte += max(range(len(sums)), key=lambda i: sums[i] / len(record["choices"][i])) == answer
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    scores = json.loads(mycel("evaluate", folder, "--data", tmp_path / "questions.jsonl", "--json").stdout)
    assert scores == {
        "accuracy": pytest.approx(hits / 3), "accuracy_by_byte": pytest.approx(by_byte / 3), "questions": 3
    }  # fmt: skip


def test_the_likeliest_text_is_that_of_transformers(folder):
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([list(b"def ")])
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 4:].tolist()
    wanted = wanted[: wanted.index(257)] if 257 in wanted else wanted
    assert [*stream(model, [*b"def "], Sampling(12, 0.0), [257])] == wanted
    result = mycel("generate", folder, "--prompt", "def ", "--tokens", 12, "--temperature", 0)
    assert result.stdout.rstrip("\n") == Bytes().decode(wanted).rstrip("\n") and result.exit_code == 0


def test_a_text_that_has_to_end_with_the_places_of_the_model_says_so(folder):
    result = mycel("generate", folder, "--prompt", "ab", "--tokens", 100, "--temperature", 0)
    assert result.stderr.splitlines()[1:] == ["62 tokens at most: the model has 64 places, the prompt takes 2"]
    assert mycel("generate", folder, "--prompt", "ab", "--tokens", 62).stderr == f"{folder}\n"


def test_a_file_of_prompts(folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "def ", "id": 1}\n\n{"prompt": "if"}\n')
    assert mycel("generate", folder, "--file", prompts, "--out", tmp_path / "out.jsonl", "--tokens", 5).exit_code == 0
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert (first["prompt"], first["id"], second["prompt"]) == ("def ", 1, "if") and isinstance(first["response"], str)
    again = mycel("generate", folder, "--file", prompts, "--tokens", 5).stdout.splitlines()
    assert [json.loads(line) for line in again] == [first, second], "the same seed, the same text"
    forms = {
        "list.json": '[{"prompt": "def "}, {"prompt": "if"}]',
        "table.csv": "prompt\r\ndef \r\nif\r\n",
        "lines.txt": "\ufeffdef \r\n\r\nif\r\n",
    }
    for name, text in forms.items():
        (tmp_path / name).write_bytes(text.encode())
        told = mycel("generate", folder, "--file", tmp_path / name, "--tokens", 5).stdout.splitlines()
        assert [json.loads(x)["response"] for x in told] == [first["response"], second["response"]], name


def test_prompts_are_lines_as_json_has_them(tmp_path):
    text = "a\u2028b\x85c"
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert [[record["prompt"] for record, _ in prompts(tmp_path / name)] for name in ("a.jsonl", "a.txt")] == [
        [text]
    ] * 2


def test_a_chat_is_written_by_its_template(folder, tmp_path):
    chatty = tmp_path / "chatty"
    shutil.copytree(folder, chatty)
    settings = json.loads((chatty / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (chatty / "tokenizer_config.json").write_text(json.dumps(settings))
    (chatty / "chat_template.jinja").unlink(missing_ok=True)
    how = ("--tokens", 6, "--temperature", 0)
    asked = mycel("generate", chatty, "--chat", "--prompt", "if", *how)
    assert (
        asked.exit_code == 0
        and asked.stdout == mycel("generate", chatty, "--prompt", "<user>if<assistant>", *how).stdout
    )
    chats = [["if"], ["def", "x", "in"]]
    rows = [[{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(chat)] for chat in chats]
    rows[1].insert(0, {"role": "system", "content": "be"})
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": row, "id": i}) for i, row in enumerate(rows)))
    result = mycel("generate", chatty, "--file", file, *how)
    for i, (line, prompt) in enumerate(
        zip(result.stdout.splitlines(), ("<user>if", "<system>be<user>def<assistant>x<user>in"), strict=True)
    ):
        alone = mycel("generate", chatty, "--prompt", f"{prompt}<assistant>", *how).stdout[:-1]
        assert json.loads(line) == {"messages": rows[i], "id": i, "response": alone}


WAITING = """
import sys
from mycel.__main__ import main
from mycel.train import generate

stream = generate.stream

def waiting(*arguments):
    for i, token in enumerate(stream(*arguments)):
        if i == 20:
            sys.stdin.readline()
        yield token

generate.stream = waiting
sys.argv[0] = "mycel"
main()
"""


def test_text_comes_before_its_end(folder):
    """In a process of its own: what has been written is there to be read while the rest waits for us."""
    how = ["generate", str(folder), "--prompt", "def ", "--tokens", "40", "--temperature", "1.5"]
    command = [sys.executable, "-c", WAITING, *how]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    try:
        first = os.read(process.stdout.fileno(), 100)
        assert first and process.poll() is None
        rest, _ = process.communicate(b"on\n")
    finally:
        watchdog.cancel()
        process.kill()
    whole = mycel(*how).stdout
    assert (first + rest).decode() == whole and len(rest) > 1, (first, rest)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature):
    logits, generator, draws = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.Generator().manual_seed(0), 4000
    drawn = torch.bincount(torch.tensor([draw(logits, temperature, generator) for _ in range(draws)]), minlength=4)
    chances = torch.softmax(logits / temperature, -1)
    error = (chances * (1 - chances) / draws).sqrt()
    assert ((drawn / draws - chances).abs() < 4 * error).all(), (drawn, chances)


def test_top_p_keeps_the_likeliest():
    logits, generator = torch.tensor([0.5, 0.3, 0.15, 0.05]).log(), torch.Generator().manual_seed(0)
    drawn = lambda p: {draw(logits, 1.0, generator, p) for _ in range(200)}
    assert (drawn(0.4), drawn(0.5), drawn(0.6), drawn(0.9), drawn(1.0)) == (
        {0}, {0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}
    )  # fmt: skip


def test_text_comes_in_whole_characters():
    ids = [*"aé€x".encode()]
    assert [*pieces(Bytes(), iter(ids))] == ["a", "é", "€", "x"]
    assert "".join(pieces(Bytes(), iter(ids[:3]))) == "aé" and "".join(pieces(Bytes(), iter(ids[:4]))) == "aé\ufffd"


def test_messages(run, folder, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "choices": ["b"], "answer": 3}\n')
    (tmp_path / "no.jsonl").write_text('{"question": "a"}\n')
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "number.jsonl").write_text('{"prompt": null}\n')
    (tmp_path / "word.jsonl").write_text('{"messages": "a"}\n')
    (tmp_path / "nothing.jsonl").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\x9d\xff")
    commands = [
        ("evaluate", tmp_path / "nothing", "--data", tmp_path / "text.txt"),
        ("evaluate", folder, "--data", tmp_path / "bad.jsonl"),
        ("evaluate", folder, "--data", tmp_path / "bad.jsonl", "--data", tmp_path / "text.txt"),
        ("generate", folder),
        ("generate", folder, "--prompt", "a", "--chat"),
        ("generate", folder, "--prompt", "a", "--top-p", 0),
        ("generate", folder, "--prompt", "a", "--temperature", "nan"),
        ("generate", folder, "--prompt", "a" * 99),
        ("generate", folder, "--file", tmp_path / "no.jsonl"),
        ("generate", folder, "--file", tmp_path / "chat.jsonl"),
        ("generate", folder, "--file", tmp_path / "binary.txt"),
        ("generate", folder, "--prompt", "a", "--out", tmp_path / "a.jsonl"),
        ("generate", folder, "--file", tmp_path / "text.txt", "--out", tmp_path / "no" / "a.jsonl"),
        ("generate", folder, "--file", tmp_path / "text.txt", "--out", tmp_path),
        ("generate", folder, "--file", tmp_path / "text.txt", "--out", "/proc/a.jsonl"),
        ("generate", folder, "--file", tmp_path / "text.txt", "--out", tmp_path / "text.txt"),
        ("generate", folder, "--file", tmp_path / "number.jsonl"),
        ("generate", folder, "--file", tmp_path / "word.jsonl"),
        ("generate", folder, "--file", tmp_path / "nothing.jsonl"),
        ("export", folder),
        ("export", run, "--to", "gguf"),
        ("export", run, "--to", "onx"),
    ]
    texts = []
    for command in commands:
        result = mycel(*command)
        assert result.exit_code == 1, (command, result.output)
        assert (tmp_path / "text.txt").read_text() == "some text"
        texts.append("\n".join(line for line in result.stderr.splitlines() if line != str(folder)))
    golden("refusal_commands", words("\n\n".join(texts), run, tmp_path))
    golden("told_exported", words(mycel("export", run, "--out", tmp_path / "model").stderr, run))


def test_a_run_that_is_not_there_names_those_that_are(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing = mycel("export", "nothere").stderr
    assert nothing == (
        "error: no run nothere: there is no such folder\n  try       the folder that the run printed when it started\n"
    )
    for name in ("words-1", "words-2", "else"):
        shutil.copytree(run, tmp_path / "runs" / name)
    assert "no such folder\n  try       runs/words-2 or runs/words-1\n" in mycel("export", "runs/words-22").stderr
    assert "no such folder\n  try       runs/else\n" in mycel("export", "else").stderr
    assert "it has no config.yaml\n  try       runs/" in mycel("export", "runs").stderr
    for command in (("evaluate", "runs/elsee", "--data", "x.txt"), ("generate", "runs/elsee", "--prompt", "a")):
        assert mycel(*command).stderr == (
            "error: no such run or model folder: runs/elsee\n  try       runs/else, or a model's own\n"
        )


def test_what_lies_inside_a_run_names_the_run(run, tmp_path):
    inside = run / "checkpoints"
    for command in (("evaluate", inside, "--data", "x.txt"), ("generate", inside, "--prompt", "a"), ("export", inside)):
        assert f"try       {run}\n" in mycel(*command).stderr + "\n", command
    for where in (latest(inside), inside):
        assert f"try       {run}\n" in mycel("train", "--resume", where).stderr
    refused = mycel("train", f"model.path={run}", "--run", tmp_path / "run", "--dry-run")
    assert f"try       {run / 'model'}, or leave" in refused.stderr, refused.output


def test_any_checkpoint_is_evaluated_writes_and_is_exported(run, folder, tmp_path):
    """Of three, the one in the middle too, which is neither the best nor the last; `step-8` is `step-00000008`."""
    (tmp_path / "held.txt").write_text(TEXT[:700])
    there = [run / "checkpoints" / f"step-{step:08d}" for step in (4, 8, 12)]
    assert there[1] not in (best(run / "checkpoints"), latest(run / "checkpoints"))
    losses = []
    for checkpoint in (*there, run / "checkpoints" / "step-8"):
        exported = mycel("export", checkpoint)
        made = run / f"exported-{checkpoint.name}"
        assert exported.exit_code == 0 and exported.stdout == f"exported: {made}\n", exported.output
        assert f"{run}: step-0" in exported.stderr and "best" not in exported.stderr
        held = hf.AutoModelForCausalLM.from_pretrained(made).state_dict()
        saved = of(checkpoint if checkpoint in there else there[1])
        assert all(torch.equal(held[name], x) for name, x in saved.items() if name in held)
        evaluate = ("evaluate", "--data", tmp_path / "held.txt", "--json", "--length", 16)
        scores = [mycel(*evaluate, each) for each in (checkpoint, made)]
        assert json.loads(scores[0].stdout) == pytest.approx(json.loads(scores[1].stdout), rel=1e-6)
        losses.append(json.loads(scores[0].stdout)["loss"])
        asked = ("--prompt", "def ", "--tokens", 8, "--temperature", 0)
        assert mycel("generate", checkpoint, *asked).stdout == mycel("generate", made, *asked).stdout
    assert losses[0] < losses[1] < losses[2] and losses[3] == losses[1]
    refused = mycel("export", run / "checkpoints" / "step-99")
    assert "no checkpoint step-99\n  known     step-00000004, step-00000008, step-00000012\n" in refused.stderr
    refused = mycel("export", there[1], "--last")
    assert f"step-00000008 is one checkpoint\n  try       {run} --last" in refused.stderr


def test_checkpoints_that_are_damaged_or_gone_are_not_called_none(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints"
    for file in damaged.glob("*/shard*"):
        file.write_bytes(file.read_bytes()[:100])
    refused = mycel("generate", tmp_path / "run", "--prompt", "a")
    assert "no checkpoint is undamaged" in refused.stderr and "has 100 bytes" in refused.stderr, refused.output
    shutil.rmtree(damaged)
    refused = mycel("generate", tmp_path / "run", "--prompt", "a")
    gone = f"try       {tmp_path / 'run' / 'model'}, which the run has exported"
    assert "the run has no checkpoint" in refused.stderr and gone in refused.stderr, refused.output
    shutil.rmtree(tmp_path / "run" / "model")
    assert "--resume" in mycel("generate", tmp_path / "run", "--prompt", "a").stderr


def test_checkpoints_of_another_model_say_so(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    written = tmp_path / "run" / "config.yaml"
    assert "intermediate_size: 24" in written.read_text()
    written.write_text(written.read_text().replace("intermediate_size: 24", "intermediate_size: 32"))
    refused = mycel("generate", tmp_path / "run", "--prompt", "a")
    assert "is of another model: 3 tensors differ" in refused.stderr, refused.output
    assert "up_proj.weight: float32[24, 16] in the checkpoint, float32[32, 16] in the model" in refused.stderr


def test_one_form_of_export_after_the_other(run, folder):
    """Each has a folder of its own."""
    forms = {"safetensors": "model.safetensors", "program": "program.safetensors"}
    for form, name in forms.items():
        result = mycel("export", run, "--to", form)
        assert result.exit_code == 0 and (run / f"exported-{form}" / name).is_file(), result.output


def test_responses_are_written_as_they_come(folder, tmp_path, monkeypatch):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "def "}\n{"prompt": "' + "a" * 99 + '"}\n')
    refused = mycel("generate", folder, "--file", prompts, "--out", out, "--tokens", 5)
    assert refused.exit_code == 1 and "the prompt has 99 tokens" in refused.stderr and not out.exists()
    assert f"at        {prompts}:2" in refused.stderr
    prompts.write_text("\n\n")
    refused = mycel("generate", folder, "--file", prompts)
    assert refused.exit_code == 1 and "no prompt" in refused.stderr, refused.output
    prompts.write_text('{"prompt": "def "}\n{"prompt": "if"}\n')

    def interrupted(module, ids, *more):
        if ids == [*b"if"]:
            raise KeyboardInterrupt
        return stream(module, ids, *more)

    monkeypatch.setattr("mycel.train.generate.stream", interrupted)
    mycel("generate", folder, "--file", prompts, "--out", out, "--tokens", 5)
    assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == ["def "]


def test_a_model_that_is_broken_says_where(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("some text")
    for command in (
        ("evaluate", tmp_path / "model", "--data", tmp_path / "text.txt"),
        ("generate", tmp_path / "model", "--prompt", "a"),
    ):
        refused = mycel(*command)
        assert refused.exit_code == 1 and "down_proj.weight is not finite: 1 of its 384 numbers" in refused.stderr, (
            refused.output
        )


def test_a_device_that_is_not_there_is_called_as_it_was_asked_for(folder):
    refused = mycel("generate", folder, "--prompt", "a", "--device", "mars")
    assert refused.exit_code == 1 and "at        --device" in refused.stderr, refused.output
    refused = mycel("evaluate", folder, "--data", "x.txt", "--device", "mars")
    assert refused.exit_code == 1 and "at        --device" in refused.stderr, refused.output


def test_a_function_that_fails_is_named_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text("def f():\n    raise ValueError('no such size')\n")
    monkeypatch.chdir(tmp_path)
    refused = mycel("plan", "failing:f")
    assert refused.exit_code == 2 and not isinstance(refused.exception, ValueError), refused.output
    assert "failing:f raised ValueError: no such size\n  at        failing.py:2" in refused.stderr
