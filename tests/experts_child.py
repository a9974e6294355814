"""What a rank does in the test of experts on processes:  python experts_child.py.  It trains layers with their
experts split, beside torch on the whole; of four ranks, families of the library under ready plans."""

from __future__ import annotations

import copy
import faulthandler
import os
from typing import Any

import torch
from expert_families import family, quiet, text
from experts import Layer, Loop, Mixed, Routed, Shared, Stack, routed
from stepping import plain_step

import mycel
from mycel import Mesh
from mycel.errors import RunError
from mycel.ir import walk
from mycel.run.groups import RankGroup


def alike(a, b) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def trained(experts: int, chosen: int, message: str) -> None:
    """Under a plan that splits tokens and experts, beside the same on one device; `message` is how rows get to their
    experts."""
    twin = Layer(experts)
    model = copy.deepcopy(twin)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    plan = {"batch": ["ep"], "parameters": {"up": ["ep", "-", "-"], "down": ["ep", "-", "-"]}}
    step = mycel.train_step(model, adamw[0], compile=False, plan=plan, mesh=Mesh(ep=2))
    for how in ("random", "one", "few"):
        batch = routed(how, experts, chosen=chosen)
        alike(float(step(**batch)), plain_step(twin, adamw[1], batch))
        load = step.expert_load(**batch)["the model"]
        assert torch.equal(load, torch.bincount(batch["ids"].view(-1), minlength=experts)), load
    sent = {e.params.get("op", e.op.name) for _, e in walk(step.program)}  # of what is begun early its name is a param
    assert message in sent, sorted(sent)
    alike(step.state_dict()["model"], dict(twin.state_dict()))


def listed() -> None:
    """Experts that are modules in a list, of each of which a rank holds a part."""
    twin = Loop("added", experts=4)
    model = copy.deepcopy(twin)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    step = mycel.train_step(model, adamw[0], compile=False, plan="ep", mesh=Mesh(ep=2))
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        alike(float(step(x=x)), plain_step(twin, adamw[1], {"x": x}))
    assert model.experts[0].up.weight.shape == (6, 2)
    alike(step.state_dict()["model"], dict(twin.state_dict()))


def rebalanced() -> None:
    """Experts change ranks between steps: losses go on as on one device, as does what is saved; the busiest rank has
    less to do."""
    twin = Routed(6)
    model = copy.deepcopy(twin)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    plan = {"batch": ["ep"], "parameters": {"up": ["ep", "-", "-"], "down": ["ep", "-", "-"]}}
    plan["zero"] = "1 over ep"
    step = mycel.train_step(model, adamw[0], compile=False, plan=plan, mesh=Mesh(ep=2), expert_load=True)
    x = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for i in range(4):
        alike(float(step(x=x)), plain_step(twin, adamw[1], {"x": x}))
        if i != 1:
            continue
        before, shares = step.expert_load()["the model"], step.rank_load()["the model"]
        alike(sum(shares), float(before.double().sum()))
        (placement,) = step.rebalance()
        assert placement.moves and placement.after < placement.before, placement
        after = step.expert_load()["the model"]
        assert torch.equal(after, before[list(placement.order)])
        alike(max(step.rank_load()["the model"]), placement.after * float(after.double().sum()))
        state = step.state_dict()
        for name, p in twin.named_parameters():
            order = torch.tensor(placement.order if p.shape[0] == 6 else range(len(p)))
            alike(state["model"][name], p.detach()[order])
            held = [state["optimizer"]["state"][k] for k in sorted(state["optimizer"]["state"])]
            at = [n for n, _ in twin.named_parameters()].index(name)
            alike(held[at]["exp_avg"], adamw[1].state[p]["exp_avg"][order])


def measured(plan: dict) -> None:
    """What experts get is the same wherever their layers are: in stages of a pipeline, or in places."""
    twin = Stack()
    model = copy.deepcopy(twin)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    step = mycel.train_step(model, adamw[0], compile=False, plan=plan, expert_load=True)
    serial = mycel.train_step(copy.deepcopy(twin), adamw[1], compile=False, plan="dp", mesh=Mesh(dp=2))
    x = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    alike(float(step(x=x)), plain_step(twin, adamw[1], {"x": x}))
    load, expected = step.expert_load(), serial.expert_load(x=x)
    assert list(load) == ["0", "1", "2", "3"] == list(expected)
    assert all(torch.equal(load[name], expected[name].float()) for name in load), (load, expected)


def broken(plan: dict, layer: str) -> None:
    """A router that gives what is no number is named by every rank, whoever holds it."""
    model = Stack(2)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, plan=plan)
    x = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    step(x=x)
    x[5:7] = float("nan")
    try:
        step(x=x)
    except RunError as error:
        assert f"the router of {layer} gives weights that are not finite: 4 of 32" in str(error), error
        return
    raise AssertionError("no rank says that a router is broken")


def counted(ranks: int, chosen: int) -> None:
    """A rank puts on the wire what the routing says and no more: with n of its tokens' choices among experts elsewhere,
    and m of others' among its own, forward n rows go and m come back, backward n go with their cotangents and weights,
    and m cotangents of rows and of weights come back."""
    model = Routed(7, chosen=chosen)
    model.router.bias.data /= 4
    x = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ids = model.choices(x)[1].view(ranks, -1) // -(-7 // ranks)  # the ranks of the tokens, and of what they choose
    plan = {"batch": ["ep"], "parameters": {"up": ["ep", "-", "-"], "down": ["ep", "-", "-"]}}
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False, plan=plan, mesh=Mesh(ep=ranks)
    )
    sent, plain = [0], RankGroup.exchange

    def noted(group, out, x, received=(), counts=()):
        sent[0] += x.element_size() * sum(n for i, n in enumerate(counts) if i != group.index)
        return plain(group, out, x, received, counts)

    step.prepare(x=x)
    RankGroup.exchange = noted
    step(x=x)
    RankGroup.exchange = plain
    rank, width = step.state.rank, 4
    n, m = int((ids[rank] != rank).sum()), int((ids == rank).sum() - (ids[rank] == rank).sum())
    assert n != m and sent[0] == 8 * (n * (3 * width + 1) + m * (2 * width + 1)), (sent, n, m)


def begun(twin: Mixed, **more: int) -> None:
    """Rows travel while the experts of another microbatch, or one that all tokens share, compute."""
    model = copy.deepcopy(twin)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    plan = {"batch": ["ep"], "parameters": {"up": ["ep", "-", "-"], "down": ["ep", "-", "-"]}}
    plan |= more
    step = mycel.train_step(model, adamw[0], compile=False, plan=plan, mesh=Mesh(ep=2))
    x = torch.randn(32, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    alike(float(step(x=x)), plain_step(twin, adamw[1], {"x": x}))
    alike(step.state_dict()["model"], dict(twin.state_dict()))
    assert any(e.op.name == "begin" and e.params["op"] == "exchange_rows" for _, e in walk(step.program))


def of_family(name: str, plan: str, sizes: dict[str, int], **more: Any) -> None:
    """A model of the library under a ready plan; norms and routers compute in 32 bits."""
    twin = quiet(family(name, **more).double())
    model = copy.deepcopy(twin)
    adamw = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, twin)]
    step = mycel.train_step(model, adamw[0], compile=False, plan=plan, mesh=Mesh(sizes))
    for _ in range(3):
        ours, theirs = float(step(**text())), plain_step(twin, adamw[1], text())
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    torch.testing.assert_close(step.state_dict()["model"], dict(twin.state_dict()), rtol=1e-5, atol=1e-6)
    assert {"experts", "experts_grad"} <= {e.op.name for _, e in walk(step.program)}


def on_four() -> None:
    of_family("qwen3_moe", "ep", {"ep": 4})  # 5 experts
    of_family("gpt_oss", "ep+tp", {"ep": 2, "tp": 2})
    of_family("deepseek_v3", "zero3+ep", {"dp": 2, "ep": 2})
    of_family("mixtral", "dp+ep", {"dp": 2, "ep": 2})
    counted(4, 2)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(200, exit=True)  # no test waits for ever
    if os.environ["WORLD_SIZE"] == "4":
        raise SystemExit(on_four())
    trained(5, 4, "all_gather")
    trained(5, 1, "exchange_rows")
    listed()
    rebalanced()
    measured({"stages": 2, "microbatches": 4})
    measured({"place": {"1": [0], "*": [1]}})
    rows = {"*.up": ["ep", "-", "-"], "*.down": ["ep", "-", "-"]}
    broken({"mesh": {"ep": 2}, "batch": ["ep"], "parameters": rows}, "0")
    broken({"stages": 2, "microbatches": 4}, "0")
    counted(2, 1)
    begun(Mixed(), microbatches=4, at_once=2)
    begun(Shared())
