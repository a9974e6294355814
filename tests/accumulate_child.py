"""What a rank does in the test of calls that are added up:  python accumulate_child.py FOLDER.  It trains in parts
beside torch on the whole."""

from __future__ import annotations

import copy
import faulthandler
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from optimising import Shampoo, Whitened, rows, small, trained
from pipelining import Tied
from stepping import plain_step

import mycel
from mycel import Mesh
from mycel.errors import PlanError
from mycel.run.rendezvous import seat

DATA = {"mesh": {"dp": 2}, "batch": ["dp"]}
Batch = dict[str, torch.Tensor]
ZERO1, ZERO3 = ({**DATA, "zero": f"{level} over dp"} for level in (1, 3))
TENSOR = {"mesh": {"tp": 2}, "parameters": {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}}
STAGES = {"stages": 2, "microbatches": 2}
PLACES = {"place": {"down": [1], "*": [0]}, "microbatches": 2}
KINDS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02, amsgrad=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02, weight_decay=0.1),
    "Whitened": lambda params: Whitened(params, lr=0.02),  # torch's to update
}


def main(folder: Path) -> None:
    for plan in (DATA, ZERO1, ZERO3, TENSOR, PLACES):
        several_calls(plan, small(""), rows)
    several_calls(ZERO3, small(""), rows, "Adafactor")
    for kind in ("AdamW", "Whitened"):
        several_calls(STAGES, tied(), texts, kind)
    state_of_torch(folder)
    for plan in (DATA, ZERO3):
        hooked(plan)
    (folder / f"{seat().rank}.txt").write_text(refusals())


def tied() -> torch.nn.Module:
    """A head that is the embedding: both stages hold it."""
    torch.manual_seed(0)
    return Tied(2).double()


def texts(i: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(i)
    ids, labels = torch.randint(0, 12, (2, 8, 3), generator=g)
    return {"ids": ids, "labels": torch.where(torch.rand(8, 3, generator=g) < 0.3, -100, labels)}


def mesh_of(plan: dict) -> Mesh | None:
    return Mesh(plan["mesh"]) if "mesh" in plan else None


def several_calls(plan: dict, model: torch.nn.Module, batch_of: Callable[[int], Batch], kind: str = "AdamW") -> None:
    """Calls of unequal size are one batch, as torch has it; then a step, and one whose gradients are no numbers.  Also
    p.grad, as clipped."""
    twin = copy.deepcopy(model)
    optimizer, plain = (KINDS[kind](trained(m)) for m in (model, twin))
    step = mycel.train_step(model, optimizer, compile=False, plan=plan, mesh=mesh_of(plan), clip_norm=0.1, grads=True)
    for turn, sizes in enumerate(((6, 2), (2, 6))):
        batch = batch_of(turn)
        for parts in zip(*(x.split(sizes) for x in batch.values()), strict=True):
            part = dict(zip(batch, parts, strict=True))
            torch.testing.assert_close(step.accumulate(**part), twin(**part).detach(), rtol=1e-9, atol=1e-9)
        step.apply()
        plain_step(twin, plain, batch, clip_norm=0.1)
        alike(step, twin, grads=True)
        batch = batch_of(7 + turn)
        assert abs(float(step(**batch)) - plain_step(twin, plain, batch, clip_norm=0.1)) < 1e-6, (plan, kind)
        alike(step, twin)
    state, wanted = step.state_dict()["optimizer"]["state"], plain.state_dict()["state"]
    torch.testing.assert_close(in_f64(state), in_f64(wanted), rtol=1e-4, atol=1e-8)
    assert step.steps == 4 and step.skipped == 0
    with step.whole():
        next(iter(model.parameters())).data.flatten()[0] = torch.inf
    step.accumulate(**batch_of(3))
    before = copy.deepcopy(step.state_dict()["model"])
    step.apply()
    assert step.skipped == 1
    torch.testing.assert_close(step.state_dict()["model"], before, rtol=0, atol=0)


def state_of_torch(folder: Path) -> None:
    """Lists and numbers that an optimiser of one's own keeps of stages are in checkpoints, and whole in state_dict."""
    new = lambda model: (model, Shampoo(trained(model)))
    model, optimizer = new(tied())
    twin, plain = new(copy.deepcopy(model))
    step = mycel.train_step(model, optimizer, compile=False, plan=STAGES)
    for i in range(2):
        assert abs(float(step(**texts(i))) - plain_step(twin, plain, texts(i))) < 1e-9
    step.save(folder)
    others = [mycel.train_step(*new(tied()), compile=False, plan=STAGES) for _ in range(2)]
    for other in others:
        other.prepare(**texts(0))
    others[0].load(folder)
    others[1].load_state_dict(step.state_dict())
    for each in (step, *others):
        torch.testing.assert_close(each.state_dict()["optimizer"]["state"], plain.state_dict()["state"])
    wanted = plain_step(twin, plain, texts(2))
    assert all(abs(float(each(**texts(2))) - wanted) < 1e-9 for each in (step, *others))


def in_f64(state: dict) -> dict:
    return {
        i: {slot: x.double() if isinstance(x, torch.Tensor) else x for slot, x in slots.items()}
        for i, slots in state.items()
    }


def alike(step: mycel.Step, twin: torch.nn.Module, grads: bool = False) -> None:
    torch.testing.assert_close(step.state_dict()["model"], dict(twin.state_dict()), rtol=1e-6, atol=1e-6)
    for (name, p), q in zip(step.model.named_parameters(), twin.parameters(), strict=True):
        if grads and step.parts.is_own(name):
            whole = step.parts.gather(p.grad, step.parts.layouts[name], q.shape)
            torch.testing.assert_close(whole, q.grad, rtol=1e-5, atol=1e-7)


def halved(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)


def hooked(plan: dict) -> None:
    """Hooks on gradients are part of the program, and see those of the whole batch, or of each of its parts as in the
    loop that calls backward for each; those on accumulated gradients are torch's, on whole parameters."""
    for kind, count in (("gradient", 1), ("gradient", 2), ("accumulated", 1), ("accumulated", 2)):
        if kind == "accumulated" and plan != DATA:
            continue
        model = small("")
        twin = copy.deepcopy(model)
        for m in (model, twin):
            if kind == "gradient":
                m.up.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
            else:
                m.up.weight.register_post_accumulate_grad_hook(halved)
        optimizer, plain = (torch.optim.SGD(trained(m), lr=0.1, momentum=0.9) for m in (model, twin))
        settings = {"accumulate": count, "grads": True, "compile": False}
        step = mycel.train_step(model, optimizer, plan=plan, mesh=Mesh(plan["mesh"]), **settings)
        for i in range(2):
            loss, parts = float(step(**rows(i))), count if kind == "gradient" else 1
            plain.zero_grad()
            losses = [
                twin(x, y) / parts for x, y in zip(*(rows(i)[name].chunk(parts) for name in ("x", "y")), strict=True)
            ]
            for part in losses:
                part.backward()
            plain.step()
            assert abs(loss - float(sum(losses))) < 1e-9, (plan, kind, count, i, loss, losses)
            alike(step, twin, grads=True)
        assert kind == "accumulated" or model.up.weight.grad.abs().max() <= count * 0.01 + 1e-12


def refusals() -> str:
    """What cannot be, as every rank says it: gradients in parts for an update or a hook that wants whole ones."""
    texts = []
    for plan, kind in ((ZERO3, Whitened), (ZERO1, torch.optim.AdamW), (TENSOR, Whitened)):
        model = small("")
        if kind is torch.optim.AdamW:
            model.up.weight.register_post_accumulate_grad_hook(lambda p: None)
        step = mycel.train_step(model, kind(trained(model), lr=0.02), compile=False, plan=plan, mesh=mesh_of(plan))
        for call in (step, step.accumulate):
            try:
                call(**rows(0))
            except PlanError as error:
                texts.append(str(error))
    model, replicas = small(""), {**DATA, "sync": {"dp": "diloco(H=2)"}}
    step = mycel.train_step(model, torch.optim.AdamW(trained(model)), compile=False, plan=replicas)
    try:
        step.accumulate(**rows(0))
    except PlanError as error:
        texts.append(str(error))
    return "\n\n".join(dict.fromkeys(texts))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # no test waits for ever
    main(Path(sys.argv[1]))
