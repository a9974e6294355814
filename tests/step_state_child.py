"""What a rank does in the test of a step's state:  python step_state_child.py FOLDER.  It asks a model in parts for all
that one asks a model for, beside torch on the whole.  With `transformers` behind it: it exports and saves one of
theirs."""

from __future__ import annotations

import copy
import faulthandler
import pickle
import sys
import warnings
from pathlib import Path

import torch
from optimising import rows, small
from safetensors.torch import load_file
from stepping import plain_step

import mycel
from mycel import Mesh
from mycel.errors import TrainError
from mycel.run.rendezvous import seat

PLANS = [
    {"mesh": {"dp": 2}, "batch": ["dp"], "zero": "3 over dp"},
    {"mesh": {"tp": 2}, "parameters": {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}},
]


def stepped(model, plan):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return mycel.train_step(model, optimizer, compile=False, plan=plan, mesh=Mesh(plan["mesh"])), optimizer


def refusal(make) -> str:
    try:
        make()
    except TrainError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def alike(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def main(folder: Path) -> None:
    twin = small("")
    model = copy.deepcopy(twin)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.02)
    step, optimizer = stepped(model, PLANS[0])
    alike(step.evaluate(**rows(9)), twin(**rows(9)).detach())
    for i in range(2):
        step(**rows(i))
        plain_step(twin, plain, rows(i))
    batch = rows(5)

    texts = [refusal(lambda: model(**batch)), refusal(lambda: model.up(batch["x"])), refusal(model.state_dict)]
    texts.append(refusal(optimizer.state_dict))
    texts.append(refusal(lambda: model.load_state_dict(twin.state_dict())))
    texts.append(refusal(lambda: optimizer.load_state_dict(plain.state_dict())))
    texts.append(refusal(lambda: torch.save(model, folder / "pickled.pt")))
    texts.append(refusal(lambda: torch.optim.swa_utils.AveragedModel(model)))
    if seat().rank == 0:
        (folder / "told.txt").write_text("\n\n".join(texts))

    whole = step.state_dict()
    alike(whole["model"], twin.state_dict())
    wanted = plain.state_dict()["state"]
    for i, slots in whole["optimizer"]["state"].items():
        for slot, x in slots.items():
            alike(x.double(), wanted[i][slot].double())
    alike(step.evaluate(**batch), twin(**batch).detach())
    with step.whole() as inside:
        alike(inside(**batch), twin(**batch))
        torch.save(inside.state_dict(), folder / f"{seat().rank}.pt")
        again, copied = pickle.loads(pickle.dumps(inside)), copy.deepcopy(inside)
    for other in (again, copied):
        alike(other(**batch), twin(**batch))
        alike(dict(other.state_dict()), dict(twin.state_dict()))
        other.load_state_dict(twin.state_dict())
    with step.whole(rank=0):
        if seat().rank == 0:
            alike(model.state_dict(), twin.state_dict())

    step.export(folder / "exported")
    alike(load_file(folder / "exported" / "model.safetensors"), dict(twin.state_dict()))
    assert step.save(folder / "saved").name == "step-00000002"

    others = []
    for plan in PLANS:  # on from the checkpoint, and from the whole state, under either plan
        for load in (lambda s: s.load(folder / "saved"), lambda s: s.load_state_dict(whole)):
            torch.manual_seed(7)
            other, _ = stepped(torch.nn.Module.double(type(model)()), plan)
            if len(others) != 1:
                other.prepare(**batch)  # else it is loaded before the model is in parts
            load(other)
            others.append(other)
    states = [other.state_dict() for other in (others[0], *others[2:])]  # of models in parts
    kept = copy.deepcopy(states)
    losses = [[float(other(**rows(i))) for i in (2, 3)] for other in [step, *others]]
    alike(states, kept)  # of parameters in parts, and of those that each rank has
    wanted = [plain_step(twin, plain, rows(i)) for i in (2, 3)]
    for run_losses in losses:
        alike(torch.tensor(run_losses), torch.tensor(wanted))
    with step.whole():  # what is done to it inside stays
        for p in model.parameters():
            p.data.mul_(2)
    for p in twin.parameters():
        p.data.mul_(2)
    alike(step.evaluate(**batch), twin(**batch).detach())
    step.load(folder / "exported")
    alike(step.state_dict()["model"], whole["model"])
    for count in (8, 7):  # of 7 rows the ranks have 4 and 3
        local_outputs(count)
    for plan in PADDED:
        padded(plan, folder / "padded")
        with_an_island(plan)


def local_outputs(count: int) -> None:
    """Rows of outputs are those of this rank, numbers those of the batch; in a step and in an evaluation."""

    def loss(out, y):
        return (out - y).square().mean(), {"rows": out, "mean": out.mean(), "signs": (out > 0).sum(0)}

    torch.manual_seed(3)
    model = torch.nn.Linear(6, 4).double()
    x, y = rows(count)["x"][:count], rows(count)["y"][:count]
    wanted_loss, wanted = loss(model(x).detach(), y)
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss, mesh=Mesh(dp=2), plan="zero2", outputs="local",
        compile=False,
    )  # fmt: skip
    mine = step.rows(count)
    for run in (step.evaluate, step):
        loss_value, outputs = run(x, y)
        alike(loss_value, wanted_loss)
        alike(outputs["rows"], wanted["rows"][mine.start : mine.stop])
        alike((outputs["mean"], outputs["signs"]), (wanted["mean"], wanted["signs"]))


LLAMA = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip
IDS = torch.arange(24).reshape(4, 6) * 7 % 32


def of_transformers(folder: Path) -> None:
    """Two steps, the loss of the model then, its folder and a checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for plan, axis in (("zero3", "dp"), ("tp", "tp")):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        step = mycel.train_step(model, optimizer, compile=False, plan=plan, mesh=Mesh({axis: 2}))
        for _ in range(2):
            step(input_ids=IDS, labels=IDS)
        assert sum(not layout.is_whole for layout in step.parts.layouts.values()) > 10
        loss = float(step.evaluate(input_ids=IDS, labels=IDS))
        step.export(folder / plan)
        step.save(folder / f"{plan}-saved")
        if seat().rank == 0:
            (folder / f"{plan}.txt").write_text(repr(loss))


PADDED = [
    {"mesh": {"dp": 2}, "batch": ["dp"], "zero": "3 over dp"},
    {"mesh": {"tp": 2}, "parameters": {"0.weight": ["tp", "-"], "1.weight": ["tp", "-"], "1.bias": ["tp"]}},
]


def padded(plan, folder: Path) -> None:
    """Lengths and numbers of rows that vary, in buckets: loss by loss what torch makes of what was not padded.  Ranks
    do not divide the 9 rows of parameters, and files have just these."""

    def loss(out, labels):
        return torch.nn.functional.cross_entropy(out.transpose(1, 2), labels)

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 6), torch.nn.Linear(6, 9)).double()
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.02)
    sizes = {0: [4], 1: [8, 16]}
    step = mycel.train_step(
        model, torch.optim.AdamW(model.parameters(), lr=0.02), loss, plan=plan, mesh=Mesh(plan["mesh"]), compile=False,
        pad={0: sizes, 1: {**sizes, "value": -100}},
    )  # fmt: skip
    for count, length in ((4, 5), (3, 8), (4, 11), (1, 16)):
        ids = torch.randint(0, 9, (count, length))
        labels = ids.roll(1, 1)
        labels[0, 2] = -100
        wanted = loss(twin(ids), labels)
        plain.zero_grad()
        alike(step.evaluate(ids, labels), wanted.detach())
        wanted.backward()
        plain.step()
        alike(step(ids, labels), wanted.detach())
    assert len(step.entries) == 2
    state = step.state_dict()["model"]
    alike(state, twin.state_dict())
    assert {name: x.untyped_storage().nbytes() for name, x in state.items()} == {n: x.nbytes for n, x in state.items()}
    step.export(folder / next(iter(plan["mesh"])))
    alike(load_file(folder / next(iter(plan["mesh"])) / "model.safetensors"), twin.state_dict())


class Measured(torch.nn.Sequential):
    """Looks into text of a tensor before it calls a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.looked_at(torch.tanh(self[0](x))).square().mean()

    def looked_at(self, h: torch.Tensor) -> torch.Tensor:
        return self[1](h) if len(str(float(h.sum()))) > 2 else self[1](-h)


def with_an_island(plan) -> None:
    """Python that stays Python calls modules whose parameters are in parts, also where it is captured again, and of
    what has no data then."""
    torch.manual_seed(6)
    model = Measured(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)).double()
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = mycel.train_step(model, optimizer, plan=plan, mesh=Mesh(plan["mesh"]), compile=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*runs as plain Python")
        for i, count in enumerate((4, 6, 4)):
            batch = rows(i)["x"][:count]
            alike(step.evaluate(batch), twin(batch).detach())
            assert abs(float(step(batch)) - plain_step(twin, plain, {"x": batch})) < 1e-9, (plan, count)
    assert "looked_at" in step.explain() and len(step.entries) == 2
    alike(step.state_dict()["model"], twin.state_dict())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(100, exit=True)  # no test waits for ever
    (of_transformers if sys.argv[2:] == ["transformers"] else main)(Path(sys.argv[1]))
