"""`mycel plan` by the command line: what it prints, beside what is computed here by hand from the model and the wires;
files it writes, which `mycel train` takes; Ctrl-C; the same again in another process."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import test_train_ranks
import torch
import training
import yaml
from test_train_ranks import losses, tiny
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from mycel import train_step
from mycel.cli import app
from mycel.plan import Plan
from mycel.train.planner import cluster_of, question_of

disk, worlds = training.disk, test_train_ranks.worlds  # fixtures

WIDTH, VOCAB, LAYERS, ROWS, LENGTH = 64, 128, 4, 16, 32
CODE = f"""
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding({VOCAB}, {WIDTH})
        self.layers = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))
        self.out = nn.Linear({WIDTH}, {VOCAB}, bias=False)

    def forward(self, input_ids, labels):
        x = self.table(input_ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), labels.flatten())


def make():
    ids = torch.zeros({ROWS}, {LENGTH}, dtype=torch.int64)
    return Net(), {{"input_ids": ids, "labels": ids}}
"""
HALF, WIRE, HOST = 1e12, 1e9, 1e8  # operations and bytes a second
DEVICE = {"half": HALF, "single": HALF / 2, "bytes_s": 2e11, "memory": "1GiB", "launch_s": 1e-7, "host_bytes_s": HOST}
PARAMETERS = 2 * VOCAB * WIDTH + LAYERS * WIDTH * WIDTH
MULTIPLIED = PARAMETERS - VOCAB * WIDTH  # a row of the table is looked up
KEYS = {
    "fits", "step_seconds", "bound_seconds", "tokens_per_second", "mfu", "peak_bytes", "mesh", "seconds", "bytes_sent",
    "plan",
}  # fmt: skip
KINDS = {"compute", "exposed_communication", "recomputation", "bubble", "exposed_offload"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with code of a user's, and clusters."""
    (tmp_path / "net_to_plan.py").write_text(CODE)
    levels = [{"name": "wire", "bytes_s": WIRE, "start_s": 1e-7}]
    for name, more in (("one", {"devices": 1}), ("two", {"devices": 2, "levels": levels})):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"device": DEVICE, **more}))
    four = {"device": DEVICE, "devices": 2, "hosts": 2, "levels": [*levels, {**levels[0], "name": "network"}]}
    (tmp_path / "four.yaml").write_text(yaml.safe_dump(four))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return tmp_path


def mycel(*arguments: str, code: int = 0):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done


def plans(cluster: str, *arguments: str) -> list[dict]:
    """All that `--json` says; standard output is nothing else."""
    said = json.loads(mycel("plan", "net_to_plan:make", "--cluster", cluster, "--json", *arguments).stdout)
    assert said["planning_seconds"] > 0
    seconds = [each["step_seconds"] for each in said["plans"] if each["fits"]]
    assert seconds and seconds == sorted(seconds) and said["plans"][0]["fits"], "the best first"
    for each in said["plans"]:
        assert each.keys() >= KEYS
        if each["fits"]:
            assert each["seconds"].keys() == KINDS
            assert sum(each["seconds"].values()) == pytest.approx(each["step_seconds"], rel=1e-6)
            assert each["bound_seconds"] <= each["step_seconds"]
            assert sum(each["peak_parts"].values()) == each["peak_bytes"]
    return said["plans"]


def counted() -> int:
    """Operations of a step's products, as torch counts them."""
    made: dict = {}
    exec(CODE, made)
    model, batch = made["make"]()
    with FlopCounterMode(display=False) as counter:
        model(**batch).backward()
    return counter.get_total_flops()


def test_figures_are_those_of_the_formulas():
    """Tokens a second, the share of what the devices are sold with, and what a ring of two sends of the gradients."""
    world, tokens = 2, ROWS * LENGTH
    flops = 6 * MULTIPLIED * tokens
    assert flops == counted()
    best = plans("two.yaml", "parallel.plan=dp")[0]
    assert best["mesh"] == {"dp": world} and Plan.read(best["plan"]).zero == 0
    assert best["tokens_per_second"] == pytest.approx(tokens / best["step_seconds"])
    assert best["mfu"] == pytest.approx(flops / (world * HALF * best["step_seconds"]))
    sent = 2 * (world - 1) / world * 4 * PARAMETERS
    assert best["bytes_sent"].keys() == {"wire"} and best["bytes_sent"]["wire"] == pytest.approx(sent, rel=1e-3)
    assert 0 < best["seconds"]["exposed_communication"] <= sent / WIRE * 1.1
    held = best["peak_parts"]
    assert held["parameters"] == 4 * PARAMETERS and held["optimizer_state"] == pytest.approx(8 * PARAMETERS, rel=1e-3)


def test_bytes_are_told_by_the_level_of_links():
    """Four ranks, two to a host: of ZeRO 3 along one axis everything goes over the slowest wire; of dp over hosts and
    tp inside, gradients of what a rank holds do, and sums of activations do not."""
    best = plans("four.yaml", "parallel.plan=zero3", "parallel.mesh={dp: 4}")[0]
    # gathered and scattered once each; layers twice: backward reads neither the table nor, beside the loss, the head
    sent = 3 / 4 * 4 * (2 * PARAMETERS + LAYERS * WIDTH * WIDTH)
    assert best["bytes_sent"].keys() == {"network"}
    assert best["bytes_sent"]["network"] == pytest.approx(sent, rel=1e-3)
    split = "{table.weight: [-, tp], layers.*.weight: [tp, -], out.weight: [tp, -]}"
    said = f"parallel.plan={{mesh: {{dp: 2, tp: 2}}, zero: 0, microbatches: 1, parameters: {split}}}"
    best = plans("four.yaml", said)[0]
    held = 4 * PARAMETERS / 2
    assert best["peak_parts"]["parameters"] == held
    assert best["bytes_sent"]["network"] == pytest.approx(2 * 1 / 2 * held, rel=0.05)
    assert best["bytes_sent"]["wire"] > 0


def test_a_pipeline_idles_and_sends_activations():
    bubbles = []
    for count in (4, 8):
        said = f"parallel.plan={{stages: 2, microbatches: {count}, schedule: 1f1b}}"
        best = plans("two.yaml", said)[0]
        parts, activations = best["seconds"], ROWS * LENGTH * WIDTH * 4
        assert best["bytes_sent"]["wire"] == pytest.approx(activations, rel=1e-3), "one way from each of two ranks"
        # of p stages that take as long, p - 1 of m + p - 1 turns are idle; these do not take as long
        assert parts["bubble"] >= 0.9 * (parts["compute"] + parts["bubble"]) / (count + 1)
        bubbles.append(parts["bubble"])
        assert best["plan"]["stages"] == 2 and best["plan"]["microbatches"] == count
    assert bubbles[1] < bubbles[0]


def test_what_a_step_waits_for_the_host_is_no_message():
    """The state of the optimiser goes both ways, each as fast as the wire: the longer way, but for what is computed
    meanwhile."""
    best = plans("one.yaml", "parallel.plan={offload: {optimizer: host}}")[0]
    parts, state = best["seconds"], 8 * PARAMETERS
    assert best["peak_parts"]["optimizer_state"] <= 64, "counts of steps alone"
    assert best["bytes_sent"] == {}
    assert parts["exposed_communication"] == pytest.approx(0.0, abs=1e-9)
    assert state / HOST - parts["compute"] <= parts["exposed_offload"] <= 2 * state / HOST
    stays = plans("one.yaml", "parallel.plan={offload: {activations: host}}")[0]
    assert stays["peak_parts"]["optimizer_state"] == pytest.approx(state, rel=1e-3)


def test_a_table_for_people_and_as_many_rows_as_are_asked_for(here):
    said = mycel("plan", "net_to_plan:make", "--cluster", "two.yaml", "--top", "2", "-o", "plan.yaml").stdout
    lines = said.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("plan "))
    for word in ("step", "tokens/s", "MFU", "peak", "compute", "waiting", "again", "bubble", "sent by a rank"):
        assert word in lines[head]
    assert lines[head + 3] == "" and " wire" in lines[head + 1], "two of them"
    every = mycel("plan", "net_to_plan:make", "--cluster", "two.yaml", "--top", "99").stdout
    assert len(re.findall(r"\+[\d.]+ (?:µs|ms) (?:of|waiting)", every)) >= 3, "why others lost"
    assert re.search(r"memory .*of parameters|memory .* parameters, .* optimizer state", said) and "bound" in said
    assert "written    plan.yaml" in said
    best = plans("two.yaml", "--top", "1")
    assert len(best) == 1 and Plan.read(here / "plan.yaml").data() == best[0]["plan"]


def test_seconds_end_the_search_with_the_best_so_far_and_its_bound():
    said = mycel("plan", "net_to_plan:make", "--cluster", "two.yaml", "--seconds", "0").stdout
    assert "one plan priced; stopped early, there may be better ones" in said
    assert re.search(r"the first plan is at most .* the fastest there could be", said)
    every = mycel("plan", "net_to_plan:make", "--cluster", "two.yaml", "--seconds", "1000").stdout
    assert "stopped early" not in every
    bounds = [re.search(r"bound +([\d.,]+ \S+):", text)[1] for text in (said, every)]
    assert bounds[0] == bounds[1]


def test_explained_are_parameters_equations_and_modules():
    asked = ["plan", "net_to_plan:make", "--cluster", "two.yaml", "parallel.mesh={tp: 2}", "--explain"]
    by_pattern = mycel(*asked, "layers.*.weight").stdout
    assert re.search(r"parameter  layers\.\*\.weight +\[64, 64\], held as", by_pattern)
    assert "net_to_plan.py:16" in by_pattern.split("first used at ")[1] and by_pattern.count("chosen") >= 1
    rows = re.findall(r"^  \[\S+, \S+\] +[\d.,]+ (?:µs|ms) a step, [+-]", by_pattern, re.MULTILINE)
    assert len(rows) >= 3, "each layout with its price"
    by_operator = mycel(*asked, "relu").stdout
    assert re.search(r"\d+ x  relu .*f32\[.*net_to_plan.py:16", by_operator)
    by_module = mycel(*asked, "layers.1").stdout
    assert "parameter  layers.*.weight" in by_module and "parameter  out" not in by_module
    assert "linear" in by_module.split("equations")[1]
    refused = mycel(*asked, "layer.weight", code=2).output
    assert "nothing is called 'layer.weight'" in refused and "layers.*.weight" in refused


def test_a_page_that_loads_nothing(here):
    said = mycel("plan", "net_to_plan:make", "--cluster", "two.yaml", "--html", "plan.html").stdout
    page = (here / "plan.html").read_text()
    assert "written    plan.html" in said and page.startswith("<!doctype html>")
    assert not re.search(r"https?:|<script|<link|\bsrc=|@import|url\(", page)
    said = plans("two.yaml", "--top", "3")
    headings = ["A step of " + said[0]["shape"], "Memory of a device over the step", "Parameters"]
    at = [page.index(f"<h2>{heading}</h2>") for heading in headings]
    assert at == sorted(at) and "<svg" in page[at[0] : at[1]] and "<svg" in page[at[1] : at[2]]
    for name in ("layers.0.weight", "layers.3.weight", "table.weight", "out.weight"):
        assert f"<figcaption>{name}" in page[at[2] :], "a picture of the layout of each"
    assert all(f"<td>{each['shape']}</td>" in page[: at[0]] for each in said), "a table to compare plans"


def test_presets_counts_and_a_folder_of_a_model(here):
    """A folder with a configuration and no weights, for sixteen devices that are not there."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (here / "llama").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, **sizes}
    (here / "llama" / "config.json").write_text(json.dumps(config))
    asked = ["plan", "model.path=llama", "train.batch=32", "data.length=64", "--cluster", "h100x16", "--json"]
    said = json.loads(mycel(*asked, "--top", "1", "parallel.plan={zero: 3, mesh: {dp: 16}}").stdout)
    assert said["cluster"].startswith("h100x16: 16 devices, 2 hosts of 8")
    best = said["plans"][0]
    products = 6 * 32 * 64 * (256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128))
    attention = 6 * 2 * 32 * 64 * 64 * 64  # scores and what they weigh, by half for what is causal, three times
    flops = best["mfu"] * best["step_seconds"] * 16 * 989e12
    assert products < flops <= products + 2 * attention, flops / products


def test_two_plans_beside_each_other(here):
    Path("a.yaml").write_text("mesh: {dp: 2}\nbatch: [dp]\nparameters: {'*.weight': [dp, -]}\n")
    Path("b.yaml").write_text("mesh: {dp: 2}\nbatch: [dp]\nzero: 3 over dp\nparameters: {'*.weight': [-, dp]}\n")
    said = mycel("plan", "diff", "a.yaml", "b.yaml", code=1).stdout.splitlines()
    assert [re.split(r"\s{2,}", line) for line in said] == [
        ["parameters: *.weight", "[dp, -] -> [-, dp]"], ["zero", "(nothing) -> 3 over dp"],
    ]  # fmt: skip
    assert mycel("plan", "diff", "a.yaml", "a.yaml").stdout == "the same\n"
    assert "two plans are compared" in mycel("plan", "diff", "a.yaml", code=2).output
    assert "there is no plan c.yaml" in mycel("plan", "diff", "a.yaml", "c.yaml", code=2).output


def process(*arguments: str, **more: str) -> subprocess.Popen:
    """The command as a user starts it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]), **more}
    return subprocess.Popen(
        [sys.executable, "-m", "mycel", "plan", "net_to_plan:make", *arguments],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_same_in_two_processes_whatever_their_hashes(here):
    fixed = ("--cluster", "two.yaml", "parallel.plan={microbatches: 1}")
    ran = [process(*fixed, "-o", f"{seed}.yaml", PYTHONHASHSEED=str(seed)) for seed in (1, 2)]
    out = [each.communicate(timeout=120) for each in ran]
    assert [each.returncode for each in ran] == [0, 0], out
    tables = [said.split("planning")[0] for said, _ in out]
    assert tables[0] == tables[1] and out[0][1] == out[1][1], "the same plans in the same order"
    assert (here / "1.yaml").read_bytes() == (here / "2.yaml").read_bytes()


def test_ctrl_c_prints_the_best_so_far(here):
    """What was found is there, and a script that waits for the command sees that it was interrupted."""
    running = process("--cluster", "four.yaml", "-o", "plan.yaml")
    seen = [running.stderr.readline() for _ in range(4)]  # three are priced
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT, out + err
    assert "Traceback" not in err and all(line.startswith("  ") for line in seen)
    assert re.search(r"planning .*, \d plans priced; stopped early, there may be better ones", out), out + err
    assert "tokens/s" in out and Plan.read(here / "plan.yaml").mesh.world == 4


def test_a_plan_is_a_file_that_training_takes_and_people_edit(here, disk, worlds):
    """With it, without any (the default finds one) and with one that was edited: the same losses; before the first step
    the plan in five lines, at the end what was predicted beside what was measured."""
    sections = {"train": {"steps": 6}}
    settings = tiny(disk, here / "asked", **sections)
    settings["parallel"] = {"plan": {"mesh": {"dp": 2}, "zero": 0}}
    (here / "config.yaml").write_text(yaml.safe_dump(settings))
    said = mycel("plan", "config.yaml", "--cluster", "two.yaml", "-o", "plan.yaml", "--top", "1").stdout
    predicted = re.search(r"^dp=2 +([\d.]+ (?:µs|ms))", said, re.MULTILINE)
    assert predicted and (here / "plan.yaml").read_text().startswith("# two.yaml: 2 devices")
    edited = yaml.safe_load((here / "plan.yaml").read_text())
    assert edited["mesh"] == {"dp": 2} and "zero" not in edited
    (here / "edited.yaml").write_text(yaml.safe_dump({**edited, "zero": "2 over dp"}))
    plans_of = {"plan": str(here / "plan.yaml"), "edited": str(here / "edited.yaml"), "auto": None}
    runs = []
    for name, plan in plans_of.items():
        of_run = tiny(disk, here / name, **sections)
        of_run["parallel"] = {"plan": plan} if plan else {}  # nothing is said: auto
        runs.append({"settings": of_run})
    out = worlds(2, *runs)[0]
    for name in plans_of:
        assert losses(here / name) == pytest.approx(losses(here / "plan"), rel=1e-4)
    texts = out.split("what will run")[1:]
    assert len(texts) == 3
    for text in texts:
        lines = dict(re.findall(r"^ *(parallel|split|memory|backward|predicted|a step) +(\S.*)$", text, re.MULTILINE))
        assert lines.keys() >= {"parallel", "split", "memory", "backward", "predicted"}
    assert "zero 2" in texts[1] and "zero 2" not in texts[0] and re.search(r"plan auto \(", texts[2])
    for text in texts:
        before, after = text.split("done", 1) if "done" in text else (text, "")
        assert re.search(r"memory +[\d.]+ \w+ predicted at the peak", before)
        assert re.search(r"predicted +[\d.]+ (µs|ms|s) a step", before)
        assert re.search(r"a step +[\d.]+ (µs|ms|s) measured, [\d.]+ (µs|ms|s) predicted \([+-][\d,]+%\)", after)
        assert re.search(r"memory [\d.]+ \w+.* at the peak.*, [\d.]+ \w+ predicted", " ".join(after.split()))


MASKED = """
import torch
import transformers as hf


def make():
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 100}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    ids = torch.zeros(4, 32, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    return hf.BertForMaskedLM(hf.BertConfig(**sizes, **quiet)), batch
"""


def test_a_mask_without_data_is_that_of_texts_without_padding(here):
    """The program is the one that full batches take, and the table says what it takes for granted."""
    (here / "masked_to_plan.py").write_text(MASKED)
    asked = question_of("masked_to_plan:make", cluster_of("one.yaml"))
    model, batch = importlib.import_module("masked_to_plan").make()

    def program(**batch: torch.Tensor) -> str:
        step = train_step(model, torch.optim.AdamW(model.parameters()), compile=True)
        step.planned_for = asked.cluster.hardware
        return str(step.unsharded(**batch).program)

    assert str(asked.program) == program(**batch)
    assert str(asked.program) != program(**{**batch, "attention_mask": torch.tril(torch.ones(4, 32)).long()})
    said = mycel("plan", "masked_to_plan:make", "--cluster", "one.yaml").stdout
    assert "attention_mask is taken to be all ones" in " ".join(said.split())
    assert "taken to be" not in mycel("plan", "net_to_plan:make", "--cluster", "one.yaml").stdout
