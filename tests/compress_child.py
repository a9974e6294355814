"""What a rank does in the test of compressed steps:  python compress_child.py FOLDER.  Trains, saves in the middle, and
goes on from there in a step of its own."""

from __future__ import annotations

import copy
import faulthandler
import sys
from pathlib import Path

import torch
from test_compress import Small
from torch import nn

import mycel
from mycel import Mesh
from mycel.errors import MycelError
from mycel.plan import compression
from mycel.run.rendezvous import seat
from mycel.step import priced_link

MIXED = {"up.weight": "int8+ef", "down.weight": "int4+loco", "head.weight": "topk(0.1)+ef21"}
PLANS = {
    "mixed": {"compress": {"dp": MIXED}, "zero": "2 over dp", "gather": {"dp": {"up.weight": "int4+ef"}}},
    "dgc": {"compress": {"dp": {"*.weight": "topk(0.1)+dgc"}}},
    "one bit": {"compress": {"dp": "1bit-adam(2)"}},
}


def make_step(plan):
    torch.manual_seed(0)
    model = Small()
    is_sgd = "dgc" in str(plan)
    optimizer = (torch.optim.SGD if is_sgd else torch.optim.AdamW)(model.parameters(), lr=0.02)
    return mycel.train_step(model, optimizer, compile=False, plan={"batch": ["dp"], **plan}, mesh=Mesh(dp=2))


def batch(i):
    gen = torch.Generator().manual_seed(i)
    return {"x": torch.randn(24, 40, generator=gen), "y": torch.randint(0, 5, (24,), generator=gen)}


def chosen_by_measurement() -> None:
    """`auto` measures the link: all ranks choose the same, and say what they have seen."""
    step = make_step({"compress": {"dp": "auto"}}).prepare(**batch(0))
    axis, link = step.link.axis, step.link.link
    assert axis == "dp" and link.bytes_s > 1e5 and {name for name, *_ in link.measured} >= {"all_reduce"}
    assert step.plan.decided.links["dp"] == link
    timed = step.link.codec_rates
    assert {"residual_int8.fp32", "added_int4.fp32"} <= timed.keys()
    assert all(rate > 1e5 for curve in timed.values() for _, rate in curve)
    assert step.plan.compress_text().startswith("along dp exact"), step.plan.compress_text()  # nothing is large here
    priced_anew(step)


def priced_anew(step) -> None:
    """A link that slows for one of two ranks is no reason, for both it is: from the next step on."""
    priced_link.WATCHED_EVERY = 2
    watch, rank = step.link.watch, seat().rank
    for slow_ranks, measured in (((0,), 1), ((0, 1), 2)):
        watch.reference_s = 1e-9 if rank in slow_ranks else 1e9
        entry = step.entries[0] if step.entries else None
        for i in range(2):
            assert step.link.count == 1 and step.entries[0] is entry
            step(**batch(i))
        assert step.link.count == measured and (step.link.link is None) == (measured == 2)
    step(**batch(2))
    assert step.entries[0] is not entry and step.link.link is not None and step.link.watch is not watch
    assert "priced anew 1 time(s), since the link had slowed" in step.explain()


class Fixed(nn.Module):
    """Gradients are what it is given, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(40, 40))

    def forward(self, x):
        return (x * self.w).sum((1, 2)).mean()


def turned_exact(folder: Path) -> None:
    """Where a plan turns exact, the first step sends what was lost before: then all that there was has come.  A step
    that is skipped does not; one that goes on from a checkpoint, under a plan without codecs, does."""
    batches = [{"x": torch.randn(4, 40, 40, generator=torch.Generator().manual_seed(i))} for i in range(4)]

    def step_of(compress):
        model = Fixed()
        plan = {"batch": ["dp"], "compress": compress}
        return model, mycel.train_step(
            model, torch.optim.SGD(model.parameters(), lr=1.0), compile=False, plan=plan, mesh=Mesh(dp=2)
        )

    def away(model, count):
        whole = -sum(b["x"].mean(0) for b in batches[:count])
        return float((model.w.detach() - whole).abs().max())

    for codec in ("int4+ef", "topk(0.1)+ef"):
        model, step = step_of({"dp": [f"{codec} until 2", "exact"]})
        for b in batches[:2]:
            step(**b)
        step.save(folder / codec)
        assert away(model, 2) > 1e-2 and len(step.messages.held) == 1
        step(x=torch.full((4, 40, 40), torch.nan))
        assert step.skipped == 1 and len(step.messages.held) == 1 and away(model, 2) > 1e-2
        step(**batches[2])
        assert not step.messages.held and "encode" in step.entries[0].source
        assert away(model, 3) < 1e-5, codec
        step(**batches[3])
        assert away(model, 4) < 1e-5 and "encode" not in step.entries[0].source
        other, again = step_of({})
        again.prepare(**batches[2]).load(folder / codec)
        again(**batches[2])
        assert torch.equal(again.state_dict()["model"]["w"], other.w) and away(other, 3) < 1e-5
        assert not again.messages.held


def disagreeing() -> None:
    """Ranks that do not encode alike are told so, with the parameter, before anything is sent."""
    step = make_step({"compress": {"dp": {"up.weight": ("int8+ef", "int4+ef")[seat().rank]}}})
    try:
        step.prepare(**batch(0))
    except MycelError as error:
        assert all(word in str(error) for word in ("compressed", "up.weight", "int8", "int4")), error
    else:
        raise AssertionError("nobody objected")


def main(folder: Path) -> None:
    chosen_by_measurement()
    disagreeing()
    turned_exact(folder)
    for name, plan in PLANS.items():
        step = make_step(plan)
        for i in range(3):
            step(**batch(i))
        step.save(folder / name)
        whole = copy.deepcopy(step.state_dict())
        with step.whole() as model, torch.no_grad():
            alone = float(model(**batch(9)))
        assert abs(float(step.evaluate(**batch(9))) - alone) < 1e-5, name
        losses = [float(step(**batch(i))) for i in (3, 4, 5)]
        again = make_step(plan).prepare(**batch(0))
        again.load(folder / name)
        assert [float(again(**batch(i))) for i in (3, 4, 5)] == losses, name
        mine, theirs = step.messages.tensors(), again.messages.tensors()
        assert mine and all(torch.equal(x.float(), theirs[k].float()) for k, x in mine.items()), name
        errors = [x.float() for k, x in mine.items() if k.startswith(("error", "velocity"))]
        assert all(x.abs().max() > 0 for x in errors)

        torch.save(step.state_dict()["model"], folder / f"{name}-{seat().rank}.pt")
        if name != "mixed":
            continue
        loaded = make_step(plan)  # from the whole, before anything is in parts: the same sum, held otherwise
        loaded.load_state_dict(whole)
        loaded.prepare(**batch(3))
        assert abs(float(loaded(**batch(3))) - losses[0]) < 1e-6, name
        loaded.load(folder / name)
        sums = loaded.state_dict()["messages"]
        assert all(torch.allclose(x.float(), sums[k].float(), atol=1e-6) for k, x in whole["messages"].items()), name


if __name__ == "__main__":
    compression.SMALL = 1000  # the matrices of `Small` count
    faulthandler.dump_traceback_later(100, exit=True)  # no test waits for ever
    main(Path(sys.argv[1]))
