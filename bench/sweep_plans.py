"""Serial = parallel: a training step of a model with a loss, under a mesh and a plan by chance, is that of one device.

    python bench/sweep_plans.py                        3,000 cases
    python bench/sweep_plans.py --first 9000           others: those that begin with case 9000
    python bench/sweep_plans.py --part 1/4             every fourth of them: shards for several processes
    python bench/sweep_plans.py --case 1234            one of them, with its error in full

A case draws a body (products, convolutions, norms, recurrent cells, attention, lookups, experts), a loss of
torch.nn.functional with its weights, smoothing, ignored targets and reduction, rows that need not divide, parts to
accumulate over, a mesh and a plan: layouts of parameters, rows and sequence of the batch, ZeRO.  It is laid out

    ranks     on these ranks
    host      there, and all that can be is kept on the host
    stages    in stages of a pipeline that begin anywhere
    planned   as the planner decides it, for a CPU or a GPU that compiles, what else a plan may say drawn as well: what
              backward computes again, levels of ZeRO by parameter, wide sums, exact codecs, two microbatches at once,
              stages, the host

On one device loss and new parameters are those of torch and its AdamW; on simulated ranks loss, new parameters, buffers
and optimiser state are those of one device.  A case is right, refused with a reason, wrong, or fails with an exception
that is none of Mycel's.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mycel
from mycel.errors import IRError, MycelError
from mycel.parts import ShardedModel
from mycel.plan import CPU, Offload, Plan, hardware
from mycel.plan.schedule import NAMED, named, stages_a_rank
from mycel.plan.stages import StepFlow
from mycel.planning import Task, planned
from mycel.run import interpret

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from distributing import OneDevice, compared, random_plan, start_values, step_equals, tensors
from pipelining import local_program, pipeline_equals, stages_equal

CLASSES, WIDTH = 5, 6
Loss = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


# -- bodies: rows x[n,4,WIDTH] and tokens -> scores[n,CLASSES]


class Body(nn.Module):
    """One of several, of which each reads rows of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = BODIES[kind]()
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.out(getattr(self, f"_{self.kind}")(x, ids))

    def _mlp(self, x, ids):
        return self.inner(x[:, 0])

    def _norms(self, x, ids):
        return self.inner(x).mean(1)

    def _batch_norm(self, x, ids):
        return self.inner(x[:, 0])

    def _conv(self, x, ids):
        return self.inner(x.transpose(1, 2)).amax(-1)

    def _cells(self, x, ids):
        return self.inner(x)[0][:, -1]

    def _lstm(self, x, ids):
        return self.inner(x)[1][0].sum(0)

    def _attention(self, x, ids):
        return self.inner(x, x, x, need_weights=False)[0].sum(1)

    def _encoder(self, x, ids):
        return self.inner(x)[:, 0]

    def _lookup(self, x, ids):
        return self.inner(ids).mean(1) + x[:, 1]

    def _gates(self, x, ids):
        return (self.inner(x[:, 0]).softmax(-1).unsqueeze(-1) * x).sum(1)

    def _causal(self, x, ids):
        q, k, v = (h.view(*x.shape[:2], 2, -1).transpose(1, 2) for h in self.inner(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).mean(1)

    def _experts(self, x, ids):
        return self.inner(x[:, 0])

    def _loop(self, x, ids):
        return self.inner(x[:, 0])


class Routed(nn.Module):
    """Some of two to seven experts for each row: any, or few of them have all rows."""

    def __init__(self) -> None:
        super().__init__()
        n = int(torch.randint(2, 8, ()))
        self.router, self.chosen = nn.Linear(WIDTH, n), int(torch.randint(1, min(n, 4), ()))
        self.router.bias.data += float(torch.randint(0, 3, ())) * 9 * torch.arange(n)
        self.up, self.down = nn.Parameter(torch.randn(n, 8, WIDTH) / 3), nn.Parameter(torch.randn(n, WIDTH, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.chosen)
        return x + mycel.experts(x, ids, weights, self.up, self.down, gate=F.gelu)


class Loop(nn.Module):
    """Two of three to five experts, which are modules in a list."""

    def __init__(self) -> None:
        super().__init__()
        n = int(torch.randint(3, 6, ()))
        self.router, mlp = nn.Linear(WIDTH, n), BODIES["mlp"]
        self.experts = nn.ModuleList(mlp() for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, place = torch.where(ids == i)
            y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return y


BODIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH)),
    "batch_norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()),
    "conv": lambda: nn.Sequential(nn.Conv1d(WIDTH, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv1d(8, WIDTH, 1)),
    "cells": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 3, 8, 0.0, batch_first=True),
    "lookup": lambda: nn.Embedding(11, WIDTH, padding_idx=0),
    "gates": lambda: nn.Linear(WIDTH, 4),
    "causal": lambda: nn.Linear(WIDTH, 3 * WIDTH),
    "experts": Routed,
    "loop": Loop,
}


# -- losses: scores[n,CLASSES] and what a batch holds -> a number or, without reduction, numbers


def losses(dtype: torch.dtype) -> dict[str, Loss]:
    """All of torch.nn.functional's, with the options they have."""
    weight = torch.linspace(0.2, 1.4, CLASSES, dtype=dtype)
    known: dict[str, Loss] = {}
    for reduction in ("mean", "sum", "none"):
        how: dict[str, Any] = {"reduction": reduction}
        for w in (None, weight):
            for smoothing in (0.0, 0.1):
                for ignored in (-100, 2):
                    name = f"cross_entropy {reduction}{' weights' * (w is not None)} {smoothing} {ignored}"
                    known[name] = lambda p, b, w=w, s=smoothing, i=ignored, how=how: F.cross_entropy(
                        p, b["label"], w, ignore_index=i, label_smoothing=s, **how
                    )
                name = f"cross_entropy of chances {reduction}{' weights' * (w is not None)} {smoothing}"
                known[name] = lambda p, b, w=w, s=smoothing, how=how: F.cross_entropy(
                    p, b["other"].softmax(-1), w, label_smoothing=s, **how
                )
            for ignored in (-100, 2):
                known[f"nll_loss {reduction}{' weights' * (w is not None)} {ignored}"] = (
                    lambda p, b, w=w, i=ignored, how=how: F.nll_loss(
                        F.log_softmax(p, -1), b["label"], w, ignore_index=i, **how
                    )
                )
            mark = f"{reduction}{' weights' * (w is not None)}"
            known[f"binary_cross_entropy {mark}"] = lambda p, b, w=w, how=how: F.binary_cross_entropy(
                p.sigmoid(), b["yes"], w, **how
            )
            known[f"with_logits {mark}"] = lambda p, b, w=w, how=how: F.binary_cross_entropy_with_logits(
                p, b["yes"], w, **how
            )
            known[f"with_logits positive {mark}"] = lambda p, b, w=w, how=how: F.binary_cross_entropy_with_logits(
                p, b["yes"], pos_weight=w, **how
            )
            known[f"multi_margin {mark}"] = lambda p, b, w=w, how=how: F.multi_margin_loss(
                p, b["label"], weight=w, **how
            )
            known[f"multilabel_soft_margin {mark}"] = lambda p, b, w=w, how=how: F.multilabel_soft_margin_loss(
                p, b["yes"], w, **how
            )
        known |= {
            f"mse {reduction}": lambda p, b, how=how: F.mse_loss(p, b["other"], **how),
            f"l1 {reduction}": lambda p, b, how=how: F.l1_loss(p, b["other"], **how),
            f"smooth_l1 {reduction}": lambda p, b, how=how: F.smooth_l1_loss(p, b["other"], beta=0.3, **how),
            f"huber {reduction}": lambda p, b, how=how: F.huber_loss(p, b["other"], delta=0.4, **how),
            f"poisson {reduction}": lambda p, b, how=how: F.poisson_nll_loss(p, b["yes"], full=True, **how),
            f"gaussian {reduction}": lambda p, b, how=how: F.gaussian_nll_loss(
                p, b["other"], b["other"].square() + 0.1, full=True, **how
            ),
            f"hinge {reduction}": lambda p, b, how=how: F.hinge_embedding_loss(p, 2 * b["yes"] - 1, 0.7, **how),
            f"cosine {reduction}": lambda p, b, how=how: F.cosine_embedding_loss(
                p, b["other"], 2 * b["yes"][:, 0] - 1, 0.1, **how
            ),
            f"ranking {reduction}": lambda p, b, how=how: F.margin_ranking_loss(
                p[:, 0], p[:, 1], 2 * b["yes"][:, 0] - 1, 0.1, **how
            ),
            f"triplet {reduction}": lambda p, b, how=how: F.triplet_margin_loss(
                p, b["other"], b["other"].flip(1), swap=True, **how
            ),
            f"triplet with distance {reduction}": lambda p, b, how=how: F.triplet_margin_with_distance_loss(
                p, b["other"], b["other"].flip(1), distance_function=lambda x, y: (x - y).abs().sum(-1), **how
            ),
            f"multilabel_margin {reduction}": lambda p, b, how=how: F.multilabel_margin_loss(p, b["several"], **how),
            f"soft_margin {reduction}": lambda p, b, how=how: F.soft_margin_loss(p, 2 * b["yes"] - 1, **how),
            f"kl_div {reduction}": lambda p, b, how=how: F.kl_div(F.log_softmax(p, -1), b["other"].softmax(-1), **how),
        }
    known["kl_div batchmean of logarithms"] = lambda p, b: F.kl_div(
        F.log_softmax(p, -1), F.log_softmax(b["other"], -1), reduction="batchmean", log_target=True
    )
    known["cross_entropy of places"] = lambda p, b: F.cross_entropy(
        p.unsqueeze(-1) * torch.ones(1, 1, 3, dtype=p.dtype), b["places"], ignore_index=1
    )
    known["ctc"] = lambda p, b: F.ctc_loss(
        F.log_softmax(p, -1).unsqueeze(0).expand(6, -1, -1),
        b["places"].clamp(min=1),
        torch.full((len(p),), 6),
        torch.full((len(p),), 2),
    )
    return known


LOSSES = {dtype: losses(dtype) for dtype in (torch.float64, torch.float32)}


class Case(nn.Module):
    """A body with a loss."""

    def __init__(self, body: str, loss: str) -> None:
        super().__init__()
        self.body, self.loss = Body(body), loss

    def forward(self, x: torch.Tensor, ids: torch.Tensor, **batch: torch.Tensor) -> torch.Tensor:
        return LOSSES[x.dtype][self.loss](self.body(x, ids), batch).mean()


def batch_of(rows: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    several = torch.stack([torch.randperm(CLASSES, generator=g) for _ in range(rows)])
    several[:, 2] = -1  # what follows does not count
    return {
        "x": torch.randn(rows, 4, WIDTH, generator=g, dtype=torch.float64),
        "ids": torch.randint(0, 11, (rows, 3), generator=g),
        "label": torch.randint(0, CLASSES, (rows,), generator=g),
        "other": torch.randn(rows, CLASSES, generator=g, dtype=torch.float64),
        "yes": torch.randint(0, 2, (rows, CLASSES), generator=g).double(),
        "several": several,
        "places": torch.randint(0, CLASSES, (rows, 3), generator=g),
    }


# -- one model under several plans

PLANS = 4  # for each model: cases 4 i … 4 i + 3
KINDS = ["ranks", "ranks", "planned", "planned", "host", "stages"]
GPU = hardware.KNOWN["H200"]
SEQUENCE = ("x", "ids", "places")  # tensors of a batch that have a second dim to split


def in_stages(one: OneDevice, written: Plan, rng: random.Random) -> None:
    """The step in stages that begin anywhere, under a schedule by chance, each stage laid out by the plan."""
    known, ranks = local_program(one, written), rng.randint(2, 3)
    flow = StepFlow(known[0], one.unsharded.body)
    schedule = named(rng.choice([*NAMED]), ranks, flow.body.length)
    if schedule.stages > len(flow.units):
        schedule = named("1f1b", min(ranks, len(flow.units)), flow.body.length)
    pipeline_equals(one, schedule, rng, written, known=known)


def with_host(one: OneDevice, written: Plan) -> None:
    """The step whose ranks keep on the host all that can be there."""
    inputs, gathered = ShardedModel(one.model, one.optimizer, written).given(one.unsharded)
    task = Task(one.unsharded.program, one.unsharded.body, CPU, False, inputs, gathered)
    lowered = planned(task, replace(written, offload=Offload("host", "host", "host", "host")))[1]
    assert lowered.spread is not None
    compared(one.unsharded.program, lowered.spread, written.mesh, start_values(one), lowered.program)


def as_planned(one: OneDevice, written: Plan, parts: int, rng: random.Random) -> None:
    """The step as the planner decides it for a CPU, or for a GPU on which it is compiled."""
    plan = more_by_chance(one.model, written, parts, rng)
    if plan.compress:
        one = in_single(one, plan, parts)
    compiled = rng.random() < 0.5
    given = ShardedModel(one.model, one.optimizer, plan.inside).given(one.unsharded)
    task = Task(one.unsharded.program, one.unsharded.body, GPU if compiled else CPU, compiled, *given)
    done = planned(task, plan)[1]
    mesh = plan.inside.mesh
    if done.pipeline is not None:
        stages_equal(one, done.pipeline.programs, done.spread, mesh)
    elif done.spread is not None:
        compared(one.unsharded.program, done.spread, mesh, start_values(one), done.program)


def more_by_chance(model: nn.Module, written: Plan, parts: int, rng: random.Random) -> Plan:
    """A plan with some of what else it may say."""
    more: dict[str, Any] = {"recompute": rng.choice(["auto", "none", "full"]), "microbatches": parts}
    names = [name for name, p in model.named_parameters()]
    if written.zero and rng.random() < 0.5:
        more["levels"] = {name: rng.randint(0, written.zero) for name in names if rng.random() < 0.5}
    if rng.random() < 0.3:
        more["sums"] = rng.choice(["fp32", "added in fp32"])
    axes = [axis for axis in written.batch_axes() if axis in written.mesh]
    if axes and rng.random() < 0.2:
        matrices = [name for name, p in model.named_parameters() if p.ndim == 2]
        more["compress"] = {rng.choice(axes): dict.fromkeys(matrices, "fp32")}
    if parts % 2 == 0 and rng.random() < 0.4:
        more["at_once"] = 2
    elif rng.random() < 0.3:
        more["offload"] = Offload(*(rng.choice(["host", "auto", "none"]) for _ in range(4)))
    if parts > 1 and rng.random() < 0.5:
        more["schedule"] = rng.choice([*NAMED])
        more["stages"] = stages_a_rank(more["schedule"]) * 2
    return replace(written, **more)


def in_single(one: OneDevice, plan: Plan, parts: int) -> OneDevice:
    """The step in 32 bits, of which a codec of 32 loses nothing, with the gradients that a plan compresses."""
    model = copy.deepcopy(one.model).float()
    batch = {name: x.float() if x.is_floating_point() else x for name, x in one.batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = mycel.train_step(model, optimizer, plan=plan, accumulate=parts, compile=False)
    return OneDevice(model, batch, optimizer, step.unsharded(**batch))


def plan_by_chance(model: nn.Module, batch: dict[str, torch.Tensor], rng: random.Random, most: int) -> Plan:
    """Now and then an axis splits the sequence, too."""
    written = random_plan(tensors(model), 1, rng, most)
    free = [axis for axis in written.mesh.axes if axis not in written.batch[0].split(".")]
    if not free or rng.random() < 0.5:
        return written
    along = rng.choice(free)
    return replace(written, batch={k: [written.batch[0], *[along] * (k in SEQUENCE)] for k in batch})


def tried(model_number: int, only: int | None = None) -> Iterator[tuple[int, str, str]]:
    """For each plan its case, a verdict (right, refused, wrong or failed), what the case was and what it said."""
    rng = random.Random(model_number)
    torch.manual_seed(model_number)
    body, loss = rng.choice([*BODIES]), rng.choice([*LOSSES[torch.float64]])
    rows, parts = rng.choice([4, 6, 7, 8, 12]), rng.choice([1, 1, 1, 2, 3])
    parts = parts if rows % parts == 0 and body != "batch_norm" else 1  # parts of a batch have norms of their own
    model = Case(body, loss).double()
    batch = batch_of(rows, model_number)
    one: OneDevice | None = None
    for i in range(PLANS):
        kind = rng.choice(KINDS[: -1 if parts == 1 else None])  # one part at a time is no pipeline
        number, written = PLANS * model_number + i, plan_by_chance(model, batch, rng, 12 if kind == "ranks" else 4)
        if only not in (None, number):
            continue
        what = f"{body}, {loss}, {rows} rows, accumulate={parts}, {kind}, {' '.join(str(written).split())}"
        try:
            one = one or on_one_device(model, batch, parts)
            if kind == "stages":
                in_stages(one, written, random.Random(number))
            elif kind == "host":
                with_host(one, written)
            elif kind == "planned":
                as_planned(one, written, parts, random.Random(number))
            else:
                step_equals(one, written)
        except AssertionError:
            yield number, "wrong", f"{what}\n{traceback.format_exc()}"
        except IRError:
            yield number, "failed", f"{what}\n{traceback.format_exc()}"
        except MycelError as error:
            yield number, "refused", f"{what}\n{error}"
        except Exception:
            yield number, "failed", f"{what}\n{traceback.format_exc()}"
        else:
            yield number, "right", what


def on_one_device(model: nn.Module, batch: dict[str, torch.Tensor], parts: int) -> OneDevice:
    """The step on one device, whose loss and new parameters are torch's."""
    wanted = model(**batch)
    one = OneDevice.of(model, batch, accumulate=parts)
    program, values = one.unsharded.program, start_values(one)
    state = {str(program.role(v)): x.clone() for v, x in zip(program.inputs, values, strict=True)}
    results = interpret(program, values)
    news = dict(zip(program.updates, results[len(program.results) :], strict=True))
    as_torch("the loss", results[0], wanted.detach())
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.01, 0.01), eps=0.01, weight_decay=0.01)
    for name, p in twin.named_parameters():
        optimizer.state[p] = {k: state[f"state {k} of {name}"] for k in ("exp_avg", "exp_avg_sq", "step")}
    twin(**batch).backward()
    optimizer.step()
    for name, p in twin.named_parameters():
        as_torch(name, news[f"model.{name}"], p.detach())
    return one


def as_torch(name: str, x: torch.Tensor, wanted: torch.Tensor) -> None:
    close = torch.allclose(x, wanted, rtol=1e-8, atol=1e-8, equal_nan=True)
    assert close, f"{name} on one device is not torch's: {x.flatten()[:4].tolist()}, {wanted.flatten()[:4].tolist()}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--case", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.case is not None:
        for _, *outcome in tried(args.case // PLANS, args.case):
            print(*outcome, sep="\n")
        return
    part, of = map(int, args.part.split("/"))
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    first = args.first // PLANS
    for model_number in range(first + part - 1, first - (-args.cases // PLANS), of):
        if time.perf_counter() - start > args.seconds:
            break
        for number, verdict, outcome in tried(model_number):
            counts[verdict] += 1
            if verdict != "right":
                lines = outcome.strip().splitlines()
                print(f"{verdict}: case {number}: {lines[0]} | {lines[-1]}", flush=True)
        if (model_number - first) % 25 == part - 1:
            print(f"{sum(counts.values())} cases in {time.perf_counter() - start:.0f} s: {dict(counts)}", flush=True)
    print(f"{sum(counts.values())} cases in {time.perf_counter() - start:.0f} s: {dict(counts)}")


if __name__ == "__main__":
    main()
