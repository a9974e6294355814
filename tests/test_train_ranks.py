"""`mycel train` on several ranks: the losses of one process under every plan, runs that go on under any other, faults
that are told.

Worlds are forked from one warm process (`ranks_child.py`); the last tests start the command line itself.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import training
import transformers as hf
from golden import golden
from safetensors.torch import load_file
from test_cutting import FAMILIES
from training import LLAMA, config, measured, nothing_left, settings, tensors

from mycel.errors import PlanError
from mycel.run.checkpoint import best, latest, load
from mycel.train import expert_load, metrics
from mycel.train.config import Config, dump
from mycel.train.loop import train
from mycel.train.ranks import Team, team

disk = training.disk  # fixture

MODEL = {
    "config": {
        **LLAMA,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
}
QUIET = {
    "evaluate": {"every": 0},
    "checkpoint": {"every": 0},
    "log": {"every": 1, "curve": False, "tensorboard": False},
}
STEPS = 20


class Worlds:
    """Worlds of ranks, one after the other: see ranks_child."""

    def __init__(self, out: Path) -> None:
        self.out = out
        script = Path(__file__).with_name("ranks_child.py")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
        self.server = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def __call__(self, world: int, *runs: dict) -> list[str]:
        """What each rank printed; all have to end well."""
        self.server.stdin.write(json.dumps({"world": world, "out": str(self.out), "runs": runs}) + "\n")
        self.server.stdin.flush()
        ended = json.loads(self.server.stdout.readline())["ended"]
        outputs = [(self.out / f"{rank}.txt").read_text() for rank in range(world)]
        assert ended == [0] * world, "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(outputs))
        return outputs


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    runner = Worlds(tmp_path_factory.mktemp("ranks"))
    yield runner
    runner.server.stdin.close()
    runner.server.wait(60)


def tiny(disk: Path, run: Path, mesh: dict | None = None, plan: object = None, **sections: dict) -> dict:
    """Settings of a run on ranks."""
    sections = {"model": MODEL, "train": {"steps": STEPS}, **QUIET, **sections}
    return settings(disk, run, parallel={"mesh": mesh, "plan": plan}, **sections)


def losses(run: Path) -> list[float]:
    return [r["loss"] for r in measured(run)]


@pytest.fixture(scope="module")
def alone(disk, tmp_path_factory):
    """The run of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    assert train(config(disk, run, model=MODEL, train={"steps": STEPS}, export=True, **QUIET)) == 0
    return run


PLANS = {
    "dp": {"dp": 4},
    "zero1": {"dp": 4},
    "zero2": {"dp": 4},
    "zero3": {"dp": 4},
    "zero3+tp": {"dp": 2, "tp": 2},
    "dp+cp": {"dp": 2, "cp": 2},
}


def test_losses_are_those_of_one_process_under_every_plan(disk, tmp_path, worlds, alone):
    """Also: each rank has its own log, only the first writes, and what comes out is what one process makes."""
    runs = [
        {"settings": tiny(disk, tmp_path / plan, mesh, plan, export=plan == "zero3+tp")} for plan, mesh in PLANS.items()
    ]
    outputs = worlds(4, *runs)
    for plan in PLANS:
        assert losses(tmp_path / plan) == pytest.approx(losses(alone), rel=1e-5), plan
        assert load(latest(tmp_path / plan / "checkpoints")).plan is not None
        assert all(
            [r["loss"] for r in metrics.read(tmp_path / plan, rank)] == losses(tmp_path / plan) for rank in (1, 2, 3)
        )
        assert nothing_left(tmp_path / plan)
    assert (
        "4 ranks, Mesh(dp=2, tp=2); plan zero3+tp" in outputs[0]
        and "2 (batch) x 1 (accumulate) x 2 (devices)" in outputs[0]
    )
    assert all(text == "run ended with 0\n" * len(PLANS) for text in outputs[1:])
    said = json.loads((tmp_path / "zero3+tp" / "predicted.json").read_text())
    kinds = {part["kind"] for part in said["parts"]}
    assert {"block", "all_reduce over network", "all_gather over network"} <= kinds, kinds
    blocks = {p["name"]: p for p in said["parts"] if p["kind"] == "block"}
    assert {name.rpartition("_")[0] for name in blocks} >= {f"llama_decoder_layer_{x}" for x in ("forward", "backward")}
    assert all(p["calls"] == 2 and p["predicted_s"] > 0 for p in blocks.values())
    assert all(p["measured_s"] > 0 for p in said["parts"]), "each rank waits at each message"
    exported, serial = (load_file(run / "model" / "model.safetensors") for run in (tmp_path / "zero3+tp", alone))
    assert exported.keys() == serial.keys() and all(
        torch.allclose(exported[k], serial[k], rtol=1e-5, atol=1e-5) for k in exported
    )
    ours, theirs = (json.loads((run / "model" / "config.json").read_text()) for run in (tmp_path / "zero3+tp", alone))
    assert ours == theirs
    module = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "zero3+tp" / "model")
    assert torch.equal(module.state_dict()["lm_head.weight"], exported["model.embed_tokens.weight"])


def traced(run: Path) -> list[dict[str, Any]]:
    return json.loads((run / "trace.json").read_text())["traceEvents"]


def test_ranks_export_the_best_checkpoint(disk, tmp_path, worlds):
    """Of a run that climbs: its first, however its weights lie, on places of a mesh or in stages."""
    climbing = {
        "optimizer": {"options": {"maximize": True}}, "train": {"steps": 4}, "evaluate": {"every": 2, "batches": 2},
        "checkpoint": {"every": 2, "keep": 2}, "export": True,
    }  # fmt: skip
    plans = {
        "zero3": ({"dp": 2}, "zero3"), "tp": ({"tp": 2}, "tp"),
        "stages": (None, {"stages": 2, "schedule": "1f1b", "microbatches": 2}),
    }  # fmt: skip
    outputs = worlds(2, *({"settings": tiny(disk, tmp_path / name, *how, **climbing)} for name, how in plans.items()))
    for plan in plans:
        run = tmp_path / plan
        assert best(run / "checkpoints") != latest(run / "checkpoints")
        saved, model = load(best(run / "checkpoints")).tensors, load_file(run / "model" / "model.safetensors")
        assert all(torch.equal(x, saved[f"model.{name}"]) for name, x in model.items())
    assert " ".join(outputs[0].split()).count("of step-00000002, the best by validation; that of the last step") == 3


def test_a_pipeline_trains_goes_on_in_other_stages_and_exports_as_one_process_does(disk, tmp_path, worlds, capsys):
    still = {"config": {**MODEL["config"], "attention_dropout": 0.0}}
    more = {"model": still, "train": {"steps": 5}, "evaluate": {"every": 4}, "export": True}
    more |= {"schedule": {"kind": "constant", "warmup": 0}, "trace": 1, "sample": {"tokens": 4, "temperature": 0}}
    plan = {"stages": 2, "schedule": "zbh1", "microbatches": 2, "mesh": {"dp": 2}, "batch": ["dp"], "zero": "1 over dp"}
    other = {"stages": 4, "schedule": "1f1b", "microbatches": 2}  # which a rank makes and loads its stage of alone
    first = {**more, "train": {"steps": 3}}
    outputs = worlds(
        4,
        {"settings": tiny(disk, tmp_path / "stages", None, plan, **first)},
        {
            "settings": tiny(disk, tmp_path / "stages", None, other, **more),
            "resume": str(tmp_path / "stages"),
            "check": "restored",
        },
    )
    assert all("restored to the bit" in text for text in outputs)
    capsys.readouterr()
    assert train(config(disk, tmp_path / "alone", **{**QUIET, **more})) == 0
    said = capsys.readouterr().out.split("sample\n\n")[1].split("\n")[0]
    assert f"sample\n\n{said}\n" in outputs[0].split("restored to the bit")[-1], "what it writes is evaluated in stages"
    assert losses(tmp_path / "stages") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    last = [[r["validation"] for r in measured(tmp_path / run) if "validation" in r][-1] for run in ("stages", "alone")]
    assert last[0] == pytest.approx(last[1], rel=1e-5)
    rows = [e["args"]["name"] for e in traced(tmp_path / "stages") if e["name"] == "process_name"]
    assert rows == [*(f"rank {r}" for r in range(4)), *(f"predicted, pp {r}" for r in range(4))]
    assert {e["name"] for e in traced(tmp_path / "alone")} > {"process_name", "step"}
    assert "<h2>measured</h2>" in (tmp_path / "stages" / "schedule.html").read_text()
    for read in (tensors, lambda run: load_file(run / "model" / "model.safetensors")):
        ours, theirs = read(tmp_path / "stages"), read(tmp_path / "alone")
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[k], theirs[k], rtol=1e-4, atol=1e-5) for k in ours)


T5 = {
    "model_type": "t5",
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 258,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 257,
}


def test_sub_models_train_in_places_of_their_own_and_go_on_in_others(disk, tmp_path, worlds):
    """Encoder and decoder of a T5, whose embedding both hold: as one process, also what is evaluated and exported."""
    run, more = tmp_path / "places", {"model": {"config": T5}, "schedule": {"kind": "constant", "warmup": 0}}
    all_of_it = more | {"train": {"steps": 3}, "evaluate": {"every": 3}, "export": True}
    place = {"decoder": [0], "*": [1]}
    outputs = worlds(2, {"settings": tiny(disk, run, None, {"place": place}, **more, train={"steps": 1})})
    assert "2 ranks, decoder on rank 0; * on rank 1" in outputs[0]
    plan = {"place": {"encoder": [0, 2], "*": [1]}, "batch": ["dp"], "zero": "3 over dp"}
    go_on = {"resume": str(run), "check": "restored"}
    outputs = worlds(3, {"settings": tiny(disk, run, None, plan, **all_of_it), **go_on})
    assert all("restored to the bit" in text for text in outputs)
    assert train(config(disk, tmp_path / "alone", **{**QUIET, **all_of_it})) == 0
    ours, theirs = measured(run), measured(tmp_path / "alone")
    for key in ("loss", "grad_norm", "validation"):
        assert [r[key] for r in ours if key in r] == pytest.approx([r[key] for r in theirs if key in r], rel=1e-5), key
    for read in (tensors, lambda run: load_file(run / "model" / "model.safetensors")):
        ours, theirs = read(run), read(tmp_path / "alone")
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[k], theirs[k], rtol=1e-4, atol=1e-5) for k in ours)


def test_places_and_a_mesh_of_all_are_told(disk, tmp_path):
    plan = {"place": {"encoder": [0], "*": [1]}}
    with pytest.raises(
        PlanError, match=r"(?s)each place has a mesh of its own.*at +parallel.mesh\n +try +leave it out"
    ):
        team(Config.from_dict(tiny(disk, tmp_path, {"dp": 2}, plan)))
    with pytest.raises(PlanError, match="the mesh has 2 ranks, but one process runs"):
        team(Config.from_dict(tiny(disk, tmp_path, None, plan)))


def test_a_run_goes_on_under_any_plan_on_any_number_of_ranks(disk, tmp_path, worlds, alone):
    """4, 3, 2 and 1 ranks take turns, each stopped by a signal to one of them; what is loaded is to the bit what was
    saved."""
    run = tmp_path / "run"
    turns = [
        (4, {"dp": 2, "tp": 2}, "zero3+tp", [3, 4]),
        (3, {"dp": 3}, "zero3", [1, 8]),
        (2, {"tp": 2}, "tp", [0, 13]),
    ]
    for i, (world, mesh, plan, (rank, step)) in enumerate(turns):
        outputs = worlds(
            world,
            {
                "settings": tiny(disk, run, mesh, plan), "resume": str(run) if i else None, "check": "restored",
                "signal": [rank, step, signal.SIGTERM], "ends": 143,
            },
        )  # fmt: skip
        assert "interrupted; step-" in outputs[0] and step <= latest_step(run) <= step + 2
        assert not i or all("restored to the bit" in text for text in outputs)
    assert train(config(disk, run, model=MODEL, train={"steps": STEPS}, export=True, **QUIET), resume=run) == 0
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    ours, theirs = tensors(run), tensors(alone)
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[k], theirs[k], rtol=1e-4, atol=1e-5) for k in ours)


@pytest.mark.parametrize("sync", [{}, {"dp": "streaming(H=4, fragments=2, overlap=2)"}], ids=["together", "replicas"])
def test_a_compressed_run_goes_on_to_the_bit(disk, tmp_path, worlds, sync):
    """Errors that are fed back and what is drawn by chance are part of a checkpoint; so is all of each replica."""
    plan = {"batch": ["dp"], "compress": {"dp": {"*.weight": "int4+stochastic+ef"}}, "sync": sync}
    straight, stopped = (tiny(disk, tmp_path / name, {"dp": 2}, plan) for name in ("straight", "stopped"))
    worlds(2, {"settings": straight})
    worlds(2, {"settings": stopped, "signal": [1, 7, signal.SIGTERM], "ends": 143})
    worlds(2, {"settings": stopped, "resume": str(tmp_path / "stopped")})
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")
    ours, theirs = tensors(tmp_path / "stopped"), tensors(tmp_path / "straight")
    counted = "step.taken" if sync else "step.draws"
    assert sum(name.startswith("error.dp.") for name in ours) > 4 and ours[counted] == STEPS
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours if k[:4] != "loop")


def test_a_run_within_a_budget_moves_values_and_goes_on_to_the_bit(disk, tmp_path, worlds):
    """Losses are those without a budget; no rank takes more than that, and the end says what each measured."""
    plan = {"batch": ["dp"], "zero": "3 over dp"}
    report_of = lambda text: json.loads(next(line for line in text.splitlines() if line.startswith("{")))

    def run(name: str, budget: int | None = None, **more: object) -> list[str]:
        offload = {"offload": "auto"} if budget else {}
        steps = {"steps": 4, "memory": budget and f"{budget / 1024}KiB"}
        job = {"settings": tiny(disk, tmp_path / name, {"dp": 2}, {**plan, **offload}, train=steps)}
        return worlds(2, {**job, "check": "peaks", **more})

    free = report_of(run("free")[0])
    budget = int(0.75 * free["peak"])
    run("stopped", budget, signal=[1, 2, signal.SIGTERM], ends=143)
    outputs = run("stopped", budget, resume=str(tmp_path / "stopped"))
    for report in map(report_of, outputs):
        assert report["host"] and report["peak"] <= budget < free["peak"]
        assert 0.9 * report["peak"] < report["held"] + report["most"] <= budget
    size_ = r"[\d.]+ \wi?B"
    told = rf"memory +{size_}, {size_} by rank at the peak \(whole process\), {size_} predicted; limit [\d.]+KiB"
    assert re.search(told, re.sub(r"\s+", " ", outputs[0]))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "free")
    ours, theirs = tensors(tmp_path / "stopped"), tensors(tmp_path / "free")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours if k[:4] != "loop")


EXPERTS = {
    "config": {
        **LLAMA, "model_type": "olmoe", "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 1,
        "attention_dropout": 0.0, "pad_token_id": 0,
    }
}  # fmt: skip


def test_experts_change_ranks_in_a_run_that_goes_on(disk, tmp_path, worlds):
    """By their loads, every 3 steps: interrupted or not, it is the same run; what experts and ranks get is recorded and
    drawn."""
    log = {"every": 1, "curve": True, "tensorboard": False}
    sections = {"model": EXPERTS, "train": {"steps": 7}, "log": log}
    straight, stopped = (tmp_path / name for name in ("straight", "stopped"))
    runs = [tiny(disk, run, {"ep": 2}, "ep", **sections) for run in (straight, stopped)]
    for run in runs:
        run["parallel"]["rebalance"] = 3
    outputs = worlds(2, {"settings": runs[0]}, {"settings": runs[1], "signal": [1, 4, signal.SIGTERM], "ends": 143})
    worlds(2, {"settings": runs[1], "resume": str(stopped)})
    assert "layers change ranks; of model.layers.0.mlp.experts: the busiest of 2 ranks gets" in outputs[0]
    assert losses(stopped) == losses(straight) and expert_load.read(stopped) == expert_load.read(straight)
    assert (straight / "experts.png").stat().st_size > 10_000
    for metric, record in zip(measured(straight), expert_load.read(straight), strict=True):
        for name, kind in (("busiest_expert", "load"), ("busiest_rank", "ranks")):
            (load,) = record[kind].values()
            assert sum(load) == pytest.approx(64, rel=1e-4)  # tokens, a choice each
            assert metric[name] == pytest.approx(max(load) / 64, rel=1e-3)
    shares = [max(r["ranks"]["model.layers.0.mlp.experts"]) for r in expert_load.read(straight)]
    assert shares[3] < shares[2]  # after step 3


def test_a_rank_reads_only_its_rows_and_moves_only_its_part(disk, tmp_path, worlds):
    """Training and validation, rows that do not divide evenly or are none; with the losses of one process that reads
    all."""
    sections = {"evaluate": {"every": 2, "batches": 2}, "train": {"steps": 4, "accumulate": 2, "batch": 3}}
    assert train(config(disk, tmp_path / "alone", model=MODEL, **{**QUIET, **sections})) == 0
    curves = lambda run: [r[name] for name in ("loss", "validation") for r in measured(run) if name in r]
    forms = {
        "dp": ({"dp": 4}, [2, 2, 2, 0], [1, 1, 1, 0], 16),
        "zero3+tp": ({"dp": 2, "tp": 2}, [3, 3, 3, 3], [2, 2, 1, 1], 16),
        "dp+cp": ({"dp": 2, "cp": 2}, [3, 3, 3, 3], [2, 2, 1, 1], 8),
    }
    for plan, (mesh, rows, validated, positions) in forms.items():
        outputs = worlds(4, {"settings": tiny(disk, tmp_path / plan, mesh, plan, **sections), "check": "rows"})
        assert curves(tmp_path / plan) == pytest.approx(curves(tmp_path / "alone"), rel=1e-5), plan
        seen = [json.loads(re.search(r"^\{.*\}$", text, re.MULTILINE)[0]) for text in outputs]
        assert [each["train"] for each in seen] == [5 * n for n in rows], "of four steps, and one batch ahead"
        assert [each["bytes"] for each in seen] == [4 * 2 * n * positions * 8 for n in rows]
        assert [each["validation"] for each in seen] == [2 * 2 * n for n in validated], "twice two batches"


def latest_step(run: Path) -> int:
    return int(latest(run / "checkpoints").name.rpartition("-")[2])


def test_memory_of_a_rank_under_zero3_on_4_ranks(disk, tmp_path, worlds):
    """Parameters and optimiser state are a quarter; while the model is made, a rank never holds half of it."""
    big = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    sections = {"model": {"config": {**LLAMA, **big, "tie_word_embeddings": False}}, "train": {"steps": 1}}
    report_of = lambda text: json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    serial = report_of(worlds(1, {"settings": tiny(disk, tmp_path / "one", **sections), "check": "memory"})[0])
    whole = sum(x.nbytes for name, x in tensors(tmp_path / "one").items() if name.startswith("model."))
    outputs = worlds(4, {"settings": tiny(disk, tmp_path / "four", {"dp": 4}, "zero3", **sections), "check": "memory"})
    for rank in map(report_of, outputs):
        assert rank["held"] <= 0.27 * serial["held"]
        assert rank["plan"][0] <= 0.27 * serial["plan"][0]
        assert rank["making"] < whole / 2, (rank, whole)
    assert serial["making"] > 0.9 * whole, "the count does not see what it should"


def test_accumulation_validation_and_adapters(disk, tmp_path, worlds):
    """Parts of a batch, dropout, validation on the way, LoRA merged on export: all as in one process; the sample is
    written by all together."""
    gpt2 = {
        "model": {"config": training.GPT2, "lora": {"rank": 4, "dropout": 0.1, "targets": ["c_attn"]}},
        "export": True,
    }
    some = {
        "whole": {
            "train": {"steps": 6, "accumulate": 2, "precision": "bf16"},
            "evaluate": {"every": 3, "batches": 2},
            "sample": {"tokens": 4},
        },
        "lora": {**gpt2, "train": {"steps": 4}, "evaluate": {"every": 4, "batches": 2}},
    }
    for name, sections in some.items():
        assert train(config(disk, tmp_path / f"{name}-1", **{"model": MODEL, **QUIET, **sections})) == 0
    outputs = worlds(
        2,
        *(
            {"settings": tiny(disk, tmp_path / f"{name}-2", {"dp": 2}, "zero3", **sections)}
            for name, sections in some.items()
        ),
    )
    assert "sample\n\ndef" in outputs[0]
    for name, close in (("whole", 2e-3), ("lora", 1e-5)):  # sums of bf16 products in another order
        ours, theirs = measured(tmp_path / f"{name}-2"), measured(tmp_path / f"{name}-1")
        for key in ("loss", "validation"):
            assert [r[key] for r in ours if key in r] == pytest.approx(
                [r[key] for r in theirs if key in r], rel=close
            ), (name, key)
    merged = [load_file(tmp_path / f"lora-{n}" / "model" / "model.safetensors") for n in (1, 2)]
    assert merged[0].keys() == merged[1].keys() and all(
        torch.allclose(merged[1][k], x, rtol=1e-5, atol=1e-5) for k, x in merged[0].items()
    )


def test_weights_of_a_folder_are_read_in_parts(disk, tmp_path, worlds, alone):
    """A run from the folder that another one exported is the same on one rank and on several."""
    sections = {"model": {"path": str(alone / "model"), "config": None}, "train": {"steps": 3}}
    assert train(config(disk, tmp_path / "one", **QUIET, **sections)) == 0
    worlds(2, {"settings": tiny(disk, tmp_path / "two", {"tp": 2}, None, **sections)})
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan", "mesh"),
    [("qwen2_moe", "zero3+ep", {"dp": 2, "ep": 2}), ("gpt2", "tp", {"tp": 2}), ("llama", "tp2d", {"tx": 2, "ty": 2})],
)
def test_other_families_come_out_as_from_one_process(disk, tmp_path, worlds, kind, plan, mesh):
    model = {"config": {"model_type": kind, **FAMILIES[kind], "bos_token_id": 1, "eos_token_id": 1}}
    sections = {**QUIET, "model": model, "export": True, "train": {"steps": 3}, "evaluate": {"every": 3, "batches": 2}}
    assert train(config(disk, tmp_path / "one", **sections)) == 0
    worlds(2 ** len(mesh), {"settings": tiny(disk, tmp_path / "ranks", mesh, plan, **sections)})
    for key in ("loss", "validation"):
        ours, theirs = ([r[key] for r in measured(tmp_path / run) if key in r] for run in ("ranks", "one"))
        assert ours == pytest.approx(theirs, rel=1e-5)
    ours, theirs = (
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / run / "model").state_dict() for run in ("ranks", "one")
    )
    assert all(torch.allclose(ours[k], theirs[k], rtol=1e-5, atol=1e-5) for k in theirs)


# what is wrong is told, and nothing is left


def test_ranks_that_differ_and_plans_and_meshes_that_do_not_fit_are_refused(disk, tmp_path, worlds):
    given, other = (
        tiny(disk, tmp_path / "run", {"dp": 2}, plan, optimizer={"lr": lr})
        for plan, lr in (("dp", 0.01), ("zero1", 0.02))
    )
    for text in worlds(2, {"settings": given, "others": {"1": other}, "ends": 1}):
        assert "config is not the same on all ranks: - on rank 0, + on rank 1" in text
        assert all(
            line in text for line in ("-  lr: 0.01", "+  lr: 0.02", "-  plan: dp", "+  plan: zero1", "+zero: 1 over dp")
        ), text
        assert "plan is not the same on all ranks" in text and "at        before the first collective" in text
    meshes = [
        ({"dp": 3}, "the mesh has 3 ranks, but 2 processes run"),
        ({"xy": 2}, "none is ready for axis 'xy' of Mesh(xy=2)"),
        ({"pp": 2}, "try       'parallel.plan={stages: 2}', a pipeline"),
    ]
    outputs = worlds(2, *({"settings": tiny(disk, tmp_path / "run", mesh), "ends": 1} for mesh, _ in meshes))
    assert all(what in text for _, what in meshes for text in outputs), outputs
    plans = {
        "*.q_prj.weight matches no parameter\n  try       *.q_proj.weight": {"*.q_prj.weight": ["dp", "-"]},
        "no axis 'tp'\n  the mesh  Mesh(dp=2)": {"*.q_proj.weight": ["tp", "-"]},
        "axis 'dp' is used twice": {"*.q_proj.weight": ["dp", "dp"]},
    }
    outputs = worlds(
        2,
        *({"settings": tiny(disk, tmp_path / "run", {"dp": 2}, {"parameters": p}), "ends": 1} for p in plans.values()),
    )
    assert all(what in text for what in plans for text in outputs), outputs
    assert not (tmp_path / "run").exists()


def test_a_plan_may_bring_its_own_mesh_and_one_rank_needs_none(tmp_path):
    (tmp_path / "plan.yaml").write_text("mesh: {dp: 1}\nzero: 1 over dp\n")
    of = lambda **parallel: team(training.Config.from_dict({"parallel": parallel}))
    assert of() == Team(of().mesh) and str(of()) == "one process"
    assert of(plan=str(tmp_path / "plan.yaml")).mesh.axes == of(plan={"mesh": {"dp": 1}}).mesh.axes == ("dp",)
    assert str(of(mesh={"dp": 1, "tp": 1})) == "1 ranks, Mesh(dp=1, tp=1); plan dp+tp"
    assert of(mesh={"tx": 1, "ty": 1}).name == "tp2d"
    with pytest.raises(PlanError, match="the mesh has 4 ranks, but one process runs"):
        of(mesh={"dp": 4})


class Launched:
    """`mycel train` with two ranks, as a user starts it, on a run that goes on until it is ended."""

    def __init__(self, disk: Path, folder: Path, *more: str, **env: str) -> None:
        self.run, self.folder = folder / "run", folder
        (folder / "my.yaml").write_text(dump(config(disk, self.run, model=MODEL, **QUIET)))
        command = [
            sys.executable,
            "-m",
            "mycel",
            "train",
            "my.yaml",
            "--nproc",
            "2",
            "train.steps=1000000",
            "parallel.plan=zero3",
            *more,
        ]
        quick = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "MYCEL_TIMEOUT": "60", **env}
        self.out = open(folder / "out.txt", "w")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **quick}, stdout=self.out, stderr=subprocess.STDOUT
        )
        self.ranks = self._ranks()

    def _ranks(self) -> dict[int, int]:
        """Once all ranks have taken a few steps: their processes."""
        end = time.monotonic() + 90
        while not all(len(metrics.read(self.run, rank)) > 2 for rank in (0, 1)):
            assert time.monotonic() < end and self.process.poll() is None, self.output()
            time.sleep(0.1)
        processes = {}
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            env = dict(
                each.split("=", 1) for each in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in each
            )
            processes[int(env["RANK"])] = int(pid)
        return processes

    def end(self) -> int:
        """The exit code; nothing is left."""
        code = self.process.wait(60)
        self.out.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in self.ranks.values())
        return code

    def output(self) -> str:
        return (self.folder / "out.txt").read_text()


def train_by_two(disk: Path, folder: Path, *more: str, model: dict = MODEL) -> subprocess.CompletedProcess[str]:
    """`mycel train` with two ranks, to its end."""
    (folder / "my.yaml").write_text(dump(config(disk, folder / "run", model=model, **QUIET)))
    command = [sys.executable, "-m", "mycel", "train", "my.yaml", "--nproc", "2", *more]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "MYCEL_TIMEOUT": "60"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_the_axis_of_a_plan_is_all_ranks(disk, tmp_path, alone):
    """Without a mesh: of tp two ranks are two along tp, and the losses are those of one process."""
    ran = train_by_two(disk, tmp_path, "parallel.plan=tp", f"train.steps={STEPS}")
    assert ran.returncode == 0 and "2 ranks, Mesh(tp=2); plan tp" in ran.stdout, ran.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-5)
    saved = load(latest(tmp_path / "run" / "checkpoints")).plan
    assert saved is not None and "tp: 2" in str(saved) and "o_proj" in str(saved), saved


def test_experts_of_mixtral_are_split_by_tp(disk, tmp_path):
    """What is left whole is said where it is much: here it is not."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config_ = {**sizes, "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 258}
    model = {"config": {**config_, "bos_token_id": 256, "eos_token_id": 257}}
    assert train(config(disk, tmp_path / "one", model=model, **{**QUIET, "train": {"steps": 3}})) == 0
    ran = train_by_two(disk, tmp_path, "parallel.plan=tp", "train.steps=3", model=model)
    assert ran.returncode == 0 and "whole on every rank" not in ran.stdout, (ran.stdout, ran.stderr)
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_a_mistake_is_said_once(disk, tmp_path):
    """By the rank that comes to it first; how that rank ended says no more."""
    ran = train_by_two(disk, tmp_path, "data.train=nowhere.txt")
    said = f"error: no such data file: nowhere.txt\n  at        {tmp_path}\n"
    assert ran.returncode == 1 and ran.stderr.count("error") == 1 and said in ran.stderr, ran.stderr
    assert "exit code" not in ran.stderr


def test_a_killed_rank_ends_the_others_which_say_who_it_was(disk, tmp_path):
    launched = Launched(disk, tmp_path, "checkpoint.every=2")
    while not latest(launched.run / "checkpoints"):
        time.sleep(0.1)
    os.kill(launched.ranks[1], signal.SIGKILL)
    assert launched.end() == 137
    output, run = launched.output(), launched.run
    assert output.count("rank 1 was killed by SIGKILL") == 2, output  # rank 0 by itself, and who started it
    said = output[output.index("error: rank 1 was killed") :].replace(latest(run / "checkpoints").name, "LAST")
    golden("told_killed_rank", re.sub(r"at        .*", "at        WHERE", said.replace(str(tmp_path), "FOLDER")))
    assert (run / "logs" / "1.log").is_file()
    assert not list(tmp_path.glob("mycel-logs-*"))


def test_a_stopped_rank_is_named_at_the_timeout_with_collective_and_line(disk, tmp_path):
    launched = Launched(disk, tmp_path, MYCEL_TIMEOUT="3")
    os.kill(launched.ranks[1], signal.SIGSTOP)
    assert launched.end() == 71
    output = launched.output()
    assert re.search(
        (
            rf"no answer in \w+ over dp for 3 s: rank 1 is stopped \(process {launched.ranks[1]}, by SIGSTOP or a "
            r"debugger\)"
        ),
        output,
    ), output
    assert re.search(r"at        (\S+\.py:\d+( backward)?|between steps), rank 0 waits in \w+ over dp", output), output


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_ends_all_ranks(disk, tmp_path):
    launched = Launched(disk, tmp_path)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == 143
    assert "interrupted; step-" in launched.output() and nothing_left(launched.run), launched.output()
    assert f"try       mycel train --resume {launched.run} --nproc 2\n" in launched.output()
    assert latest_step(launched.run) - measured(launched.run)[-1]["step"] in (0, 1), (
        "the last step may not be reported yet"
    )
