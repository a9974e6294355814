"""What a rank does in the test of calls that are added up:  python accumulate_child.py FOLDER.  It trains in parts
beside torch on the whole."""

from __future__ import annotations

import copy
import faulthandler
import sys
from pathlib import Path

import torch
from optimising import Whitened, rows, small, trained
from stepping import plain_step

import mycel
from mycel import Mesh
from mycel.errors import PlanError
from mycel.run.rendezvous import seat

DATA = {"mesh": {"dp": 2}, "batch": ["dp"]}
ZERO1, ZERO3 = ({**DATA, "zero": f"{level} over dp"} for level in (1, 3))
TENSOR = {"mesh": {"tp": 2}, "parameters": {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}}


def main(folder: Path) -> None:
    for plan, kind in ((DATA, "AdamW"), (ZERO1, "AdamW"), (ZERO3, "AdamW"), (TENSOR, "AdamW"), (ZERO3, "Adafactor")):
        several_calls(plan, kind)
    for plan in (DATA, ZERO3):
        hooked(plan)
    (folder / f"{seat().rank}.txt").write_text(refusals())


def whole(step: mycel.Step, name: str, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """What lies as a parameter does, in one piece."""
    return step.parts.gather(x, step.parts.layouts[name], shape)


def several_calls(plan: dict, kind: str) -> None:
    """Calls of unequal size are one batch, as torch has it; then a step, and one whose gradients are no numbers.  Also
    p.grad, as clipped."""
    model = small(kind)
    twin = copy.deepcopy(model)
    options = {"AdamW": {"amsgrad": True}, "Adafactor": {"weight_decay": 0.1}}[kind]
    optimizer, plain = (getattr(torch.optim, kind)(trained(m), lr=0.02, **options) for m in (model, twin))
    step = mycel.train_step(
        model, optimizer, compile=False, plan=plan, mesh=Mesh(plan["mesh"]), clip_norm=0.1, grads=True
    )
    for turn, sizes in enumerate(((6, 2), (2, 6))):
        batch = rows(turn)
        parts = zip(batch["x"].split(sizes), batch["y"].split(sizes), strict=True)
        for x, y in parts:
            torch.testing.assert_close(step.accumulate(x=x, y=y), twin(x, y).detach(), rtol=1e-9, atol=1e-9)
        step.apply()
        plain_step(twin, plain, batch, clip_norm=0.1)
        alike(step, twin, grads=True)
        assert abs(float(step(**rows(7 + turn))) - plain_step(twin, plain, rows(7 + turn), clip_norm=0.1)) < 1e-6
        alike(step, twin)
    assert step.steps == 4 and step.skipped == 0
    step.accumulate(**{name: x[:6] * torch.inf for name, x in rows(3).items()})
    step.apply()
    assert step.skipped == 1
    alike(step, twin)


def alike(step: mycel.Step, twin: torch.nn.Module, grads: bool = False) -> None:
    for (name, p), q in zip(step.model.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(whole(step, name, p.data, q[1].shape), q[1].data, rtol=1e-6, atol=1e-6)
        if grads:
            torch.testing.assert_close(whole(step, name, p.grad, q[1].shape), q[1].grad, rtol=1e-5, atol=1e-7)


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
        step = mycel.train_step(model, kind(trained(model), lr=0.02), compile=False, plan=plan, mesh=Mesh(plan["mesh"]))
        for call in (step, step.accumulate):
            try:
                call(**rows(0))
            except PlanError as error:
                texts.append(str(error))
    model, two = small(""), {"stages": 2, "microbatches": 2}
    step = mycel.train_step(model, torch.optim.AdamW(trained(model)), compile=False, plan=two)
    try:
        step.accumulate(**rows(0))
    except PlanError as error:
        texts.append(str(error))
    return "\n\n".join(dict.fromkeys(texts))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # no test waits for ever
    main(Path(sys.argv[1]))
