"""What a rank does in the test of pipelines in processes:  python pipeline_child.py FOLDER.

A pipeline takes the steps of one device beside it, one of them skipped; then it is asked for its state, saves it, and
another one goes on from there.  At the end a stage dies.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import sys
from pathlib import Path

import torch
import yaml
from alive import Alive
from pipelining import Tied
from placed_processes import alone, compressed, dies_in_backward, in_places, late
from torch import nn

import mycel
from mycel.errors import PlanError
from mycel.plan import KINDS

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TENSOR = {"*.up.weight": ["tp", "-"], "*.up.bias": ["tp"], "*.down.weight": ["-", "tp"]}
PLANS = {  # the first takes steps, the second goes on from what it saved
    2: [
        {"stages": 4, "schedule": "interleaved"},
        {"stages": ["embed", "layers.1"], "schedule": "searched"},
    ],
    4: [
        {"stages": 4, "mesh": {"dp": 2}, "batch": ["dp"], "zero": "3 over dp", "schedule": "zbv"},
        {
            "stages": 2,
            "mesh": {"tp": 2},
            "parameters": TENSOR,
            "schedule": "zbh1",
            "offload": {**dict.fromkeys(KINDS, "host"), "update": "host"},
        },
    ],
}[WORLD]


def batch(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(0, 12, (2, 8, 3), generator=g)
    return {"ids": ids[0], "labels": torch.where(torch.rand(8, 3, generator=g) < 0.3, -100, ids[1])}


def step_of(model: torch.nn.Module, plan: dict | None) -> mycel.Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    more = {"accumulate": 4, "plan": None} if plan is None else {"plan": {**plan, "microbatches": 4}}
    return mycel.train_step(model, optimizer, compile=False, clip_norm=0.05, **more)


def alike(a: object, b: object) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def poisoned(step: mycel.Step) -> None:
    with step.whole() as model:
        model.layers[0].down.bias.data[0] = torch.inf


def healed(step: mycel.Step) -> None:
    with step.whole() as model:
        model.layers[0].down.bias.data[0] = 0.25


def held(step: mycel.Step) -> int:
    tensors = [*step.model.parameters(), *(x for s in step.optimizer.state.values() for x in s.values())]
    return sum(x.untyped_storage().nbytes() for x in tensors)


def added_up(plan: dict) -> None:
    """Gradients of calls of unequal size, on stages that hold parts of parameters: the update of the whole batch."""
    torch.manual_seed(0)
    first = Tied(2).double()
    serial, step = step_of(copy.deepcopy(first), None), step_of(first, plan)
    for i in range(2):
        serial(**batch(i))
        for rows in (slice(0, 4), slice(4, 8)):
            step.accumulate(**{name: x[rows] for name, x in batch(i).items()})
        step.apply()
        torch.testing.assert_close(step.grad_norm.double(), serial.grad_norm.double(), rtol=1e-6, atol=1e-9)
    state, wanted = step.state_dict(), serial.state_dict()
    torch.testing.assert_close(state["model"], wanted["model"], rtol=1e-6, atol=1e-6)
    for i, slots in wanted["optimizer"]["state"].items():
        for slot, x in slots.items():
            held = state["optimizer"]["state"][i][slot].double()
            torch.testing.assert_close(held, x.double(), rtol=1e-5, atol=1e-9)


def small_batches() -> None:
    """Of fewer rows than the plan has microbatches, down to one; stages that are a number stay where they were cut."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(6, 6) for _ in range(2 * WORLD)])
    model = copy.deepcopy(plain)
    steps = [
        mycel.train_step(m, torch.optim.SGD(m.parameters(), lr=0.1), nn.functional.mse_loss, compile=False, plan=plan)
        for m, plan in ((plain, None), (model, {"stages": WORLD, "microbatches": 4}))
    ]
    for rows in (8, 1, 3, 8):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows))
        wanted, loss = (step(x, x) for step in steps)
        torch.testing.assert_close(loss, wanted, msg=lambda text, rows=rows: f"{rows} rows: {text}")


def main(folder: Path) -> None:
    torch.manual_seed(0)
    first = Tied(2, 0.1).double()
    serial, step = step_of(copy.deepcopy(first), None), step_of(first, PLANS[0])
    for i in range(3):
        if i == 1:
            poisoned(serial)
            poisoned(step)
        wanted, loss = losses(i, serial, step)
        assert torch.allclose(loss, wanted, rtol=1e-10, equal_nan=True), (i, loss, wanted)
        assert torch.allclose(step.grad_norm, serial.grad_norm, rtol=1e-6, equal_nan=True), i
        assert step.skipped == serial.skipped == (i > 0), (i, step.skipped)
        if i == 1:
            healed(serial)
            healed(step)
    compared(step, serial)
    evaluated_in_little_memory()
    with alone(step):
        assert step.save(folder / "saved").name == "step-00000003"
    other = step_of(Tied(2, 0.1).double(), PLANS[1])
    other.prepare(**batch(0))
    with alone(other):
        other.load(folder / "saved")
    for i in (3, 4):
        wanted, *sharded = losses(i, serial, step, other)
        alike(sharded, [wanted] * 2)
    alike(other.state_dict()["model"], serial.state_dict()["model"])
    with alone(other):
        alike(other.evaluate(**batch(9)), serial.evaluate(**batch(9)))
    assert "lives there" in other.explain() or WORLD == 2
    traced(step)
    if WORLD == 4:
        woven()
        added_up(PLANS[0])
        outputs()
        replicas(folder / "replicas")
        turned_exact(folder / "compressed")
        compressed(folder / "compressed places")
        late(folder / "late places")
    small_batches()
    refused()
    placed = in_places(folder / "places")
    (folder / f"done-{RANK}").touch()
    dies_in_backward(placed)


def losses(i: int, *steps: mycel.Step) -> list[torch.Tensor]:
    """Of one step of each, with the same random numbers."""
    values = []
    for step in steps:
        torch.manual_seed(10 + i)
        values.append(step(**batch(i)))
    return values


def compared(step: mycel.Step, serial: mycel.Step) -> None:
    state, whole = step.state_dict(), serial.state_dict()
    alike(state["model"], whole["model"])
    for i, slots in whole["optimizer"]["state"].items():
        for slot, x in slots.items():
            alike(state["optimizer"]["state"][i][slot].double(), x.double())
    evaluated(step, serial)
    assert held(step) < 0.85 * held(serial), (held(step), held(serial))  # a rank holds its stages alone
    assert mycel.Plan.read(yaml.safe_load(str(step.plan))) == step.plan
    assert "bubble" in step.explain()


def evaluated(step: mycel.Step, serial: mycel.Step) -> None:
    """Without what other ranks hold: the loss, of the whole batch and of this rank's part; and what a function makes of
    it that calls a module of the last stage first."""
    whole, forward, wanted = batch(9), step.forward(), serial.evaluate(**batch(9))

    def last_first(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = model.layers[0](model.layers[1](model.embed(ids)))
        return x, labels + 1, x.argmax(-1)

    with alone(step), mycel.forward.evaluating(step.model), mycel.forward.evaluating(serial.model):
        alike(step.evaluate(**whole), wanted)
        alike(forward.local(**whole)(**{k: x[step.slices(k, x.shape)] for k, x in whole.items()}), wanted)
        result = step.forward(lambda **batch: last_first(step.model, **batch))(**whole)
        alike(result, last_first(serial.model, **whole))
    both = step.forward(lambda ids, labels: ids.sum() * sum(layer.up.weight for layer in step.model.layers).sum())
    wanted = whole["ids"].sum() * sum(layer.up.weight for layer in serial.model.layers).detach().sum()
    alike(both(**whole), wanted)  # one equation reads tensors of two stages: all ranks are brought both


def evaluated_in_little_memory() -> None:
    """Of four equal layers a rank holds one, and evaluation makes less than that beside it."""
    model = Tied(4, width=64)
    step = step_of(model, {"stages": ["embed", *(f"layers.{i}" for i in range(1, WORLD))]})
    whole, layer = batch(0), sum(p.nbytes for p in model.layers[0].parameters())
    step.evaluate(**whole)
    with Alive() as alive:
        step.evaluate(**whole)
    held_here = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert layer < held_here < 1.5 * layer and 0 < alive.most < layer, (held_here, alive.most, layer)


class Answering(Tied):
    """Gives what it answers beside the loss."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        answer = self.layers[1](self.layers[0](self.embed(ids)))
        return super().forward(ids, labels), answer


def outputs() -> None:
    """Of steps and of evaluation, whole on every rank."""
    torch.manual_seed(0)
    first = Answering(2).double()
    plan = {"stages": ["embed", "layers.1"], "mesh": {"dp": 2}, "batch": ["dp"], "microbatches": 4}
    given = [{"plan": None, "accumulate": 4}, {"plan": plan}]
    models = [copy.deepcopy(first), first]
    serial, step = (
        mycel.train_step(m, torch.optim.SGD(m.parameters(), lr=0.1), compile=False, outputs=True, **more)
        for m, more in zip(models, given, strict=True)
    )
    alike(step(**batch(0)), serial(**batch(0)))
    with alone(step):
        alike(step.evaluate(**batch(9)), serial.evaluate(**batch(9)))


def woven() -> None:
    """Two microbatches go through the stages together, with steps for weights: as one after the other."""
    torch.manual_seed(0)
    first = Tied(2, 0.1).double()
    plan = {"stages": 4, "mesh": {"tp": 2}, "parameters": TENSOR, "schedule": "zbv", "at_once": 2}
    serial, step = step_of(copy.deepcopy(first), None), step_of(first, plan)
    for i in range(2):
        wanted, loss = losses(i, serial, step)
        alike(loss, wanted)
    alike(step.state_dict()["model"], serial.state_dict()["model"])
    with alone(step):
        alike(step.evaluate(**batch(9)), serial.evaluate(**batch(9)))


def traced(step: mycel.Step) -> None:
    """Every rank knows what each did when: all steps of the schedule, none before what it waits for."""
    with step.trace() as trace:
        losses(5, step)
    times = trace.measured
    ran = [x for order in times.schedule.orders for x in order]
    assert {x.microbatch for x in ran} == set(range(4)) and {x.stage for x in ran} == set(range(4))
    assert all(times.end[a] <= times.end[x] for x in ran for a in times.schedule.awaited(x) if a in times.end)
    assert "measured " in step.explain() and len(trace.spans) == WORLD


def turned_exact(folder: Path) -> None:
    """Where a plan turns exact, the first step sends what was lost before, in every stage: it is one of torch's, with
    that added to its gradients.  So is a step that goes on from a checkpoint, under a plan without codecs."""

    def make_step(compress: dict) -> mycel.Step:
        torch.manual_seed(0)
        model = Tied(2, width=48)
        plan = {"stages": ["embed", "layers.1"], "mesh": {"dp": 2}, "batch": ["dp"], "microbatches": 2}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return mycel.train_step(model, optimizer, compile=False, plan={**plan, "compress": compress})

    def flushed(step: mycel.Step, state: dict) -> None:
        """One step from a state, against torch's."""
        plain, whole = Tied(2, width=48), batch(3)
        plain.load_state_dict(state["model"])
        plain(**whole).backward()
        errors = {name.removeprefix("error.dp."): x for name, x in state["messages"].items()}
        assert sum(float(x.abs().sum()) for x in errors.values()) > 0.01, "something was lost"
        assert {"layers.0.up.weight", "layers.1.up.weight"} <= errors.keys(), "in both stages"
        step(**whole)
        assert not step.messages.held and not step.messages.lossy
        after = step.state_dict()["model"]
        for name, p in plain.named_parameters():
            assert p.grad is not None
            wanted = p.detach() - 0.1 * (p.grad + errors.get(name, 0.0))
            torch.testing.assert_close(after[name], wanted, rtol=1e-4, atol=1e-5)

    step = make_step({"dp": ["topk(0.05)+ef until 2", "exact"]})
    for i in range(2):
        step(**batch(i))
    step.save(folder)
    state = copy.deepcopy(step.state_dict())
    flushed(step, state)
    step(**batch(4))
    assert "encode" not in step.entries[0].source
    again = make_step({})
    again.prepare(**batch(3)).load(folder)
    flushed(again, state)


def replicas(folder: Path) -> None:
    """Two pipelines that take steps of their own, and are made one model after two: as plain torch does it; and the
    same to the bit where they go on from what was saved."""
    plan = {
        "stages": ["embed", "layers.1"], "mesh": {"dp": 2}, "batch": ["dp"],
        "sync": {"dp": "diloco(H=2, lr=0.5, momentum=0.8)"},
    }  # fmt: skip
    torch.manual_seed(0)
    first = Tied(2).double()
    models = [copy.deepcopy(first) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in models]
    anchors = [p.detach().clone() for p in first.parameters()]
    momenta = [torch.zeros_like(x) for x in anchors]
    step, replica, after = step_of(first, plan), RANK % 2, []
    for i in range(5):
        whole, wanted = batch(i), []
        for r, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            wanted.append(model(**{name: x[4 * r : 4 * r + 4] for name, x in whole.items()}))
            wanted[r].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        for k, held in enumerate(zip(*(model.parameters() for model in models), strict=True) if i % 2 else ()):
            difference = anchors[k] - torch.stack([p.detach() for p in held]).mean(0)
            momenta[k] = 0.8 * momenta[k] + difference
            anchors[k] = anchors[k] - 0.5 * (difference + 0.8 * momenta[k])
            for p in held:
                p.data.copy_(anchors[k])
        loss = step(**whole)
        torch.testing.assert_close(loss, wanted[replica].detach(), rtol=1e-6, atol=1e-6)
        after.append(loss)
        if i == 2:
            step.save(folder)
    mean = {
        n: (p.detach() + dict(models[1].named_parameters())[n].detach()) / 2 for n, p in models[0].named_parameters()
    }
    for name, x in step.state_dict()["model"].items():
        torch.testing.assert_close(x, mean[name], rtol=1e-5, atol=1e-6)
    first = Tied(2).double()
    first.load_state_dict(mean, strict=False)
    with alone(step):  # each rank has the mean of its stages
        torch.testing.assert_close(step.evaluate(**batch(9)), first(**batch(9)).detach(), rtol=1e-5, atol=1e-6)
    again = step_of(Tied(2).double(), plan)
    again.prepare(**batch(0)).load(folder)
    assert [again(**batch(i)) for i in (3, 4)] == after[3:]


def refused() -> None:
    for plan, words in (
        ({"stages": WORLD, "schedule": "zigzag"}, "schedule: 'zigzag'"),
        ({"stages": 2 * WORLD + 1, "schedule": "zbv"}, "gives each rank 2"),
        ({"stages": WORLD, "mesh": {"pp": WORLD + 1}}, f"are {WORLD} ranks"),
    ):
        try:
            mycel.Plan.read(plan)
        except PlanError as e:
            assert words in str(e), e
        else:
            raise AssertionError(plan)
    model = Tied()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), plan={"stages": WORLD}, compile=False)
    try:
        step(**batch(0))
    except PlanError as e:
        assert "microbatches: 2, or more" in str(e), e
    else:
        raise AssertionError("one microbatch")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(240, exit=True)  # no test waits for ever
    main(Path(sys.argv[1]))
