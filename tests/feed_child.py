"""What a rank does in the test of batches given in parts:  python feed_child.py.

For each plan: the losses of one device, of ranks given the whole batch, and of ranks given their parts alone, of which
the bytes are counted.
"""

from __future__ import annotations

import copy
import faulthandler
import os

import torch
from torch import nn

import mycel
from mycel import feed
from mycel.errors import PlanError, TrainError

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 3

MOVED: list[int] = []  # bytes of the tensors that went to the device


def counted(x: torch.Tensor, device: torch.device, plain=feed.moved) -> torch.Tensor:
    MOVED.append(x.numel() * x.element_size())
    return plain(x, device)


class Words(nn.Module):
    """Tokens and their labels -> a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, ids, labels, weight):
        logits = self.down(torch.tanh(self.up(self.embed(ids)))) * weight
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 12, (2, rows, length), generator=g)
    labels = torch.where(torch.rand(rows, length, generator=g) < 0.2, -100, ids[1])
    return {"ids": ids[0], "labels": labels, "weight": torch.tensor(1.5 + step, dtype=torch.float64)}


def without_data(rows: int, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.empty_like(x, device="meta") for name, x in batch(0, rows, length).items()}


def step_of(model: nn.Module, **settings) -> mycel.Step:
    return mycel.train_step(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), compile=False, clip_norm=1.0, **settings
    )


def close(got: list[float], wanted: list[float]) -> bool:
    return all(abs(a - b) < 1e-10 for a, b in zip(got, wanted, strict=True))


def part(step: mycel.Step, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x[step.slices(name, x.shape)] for name, x in whole.items()}


def trained(mesh: dict, plan: object, rows: int, length: int, share: int, **more) -> None:
    """`share`: the bytes that a rank moves in a step."""
    torch.manual_seed(0)
    models = [Words().double()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    serial = step_of(models[0], plan=None, **more)
    wanted = [float(serial(**batch(i, rows, length))) for i in range(STEPS)]
    settings = {"mesh": mycel.Mesh(mesh), "plan": plan, **more}
    whole = step_of(models[1], **settings)
    MOVED.clear()
    got = [float(whole(**batch(i, rows, length))) for i in range(STEPS)]
    assert close(got, wanted), (mesh, plan, got, wanted)
    assert sum(MOVED) == share * STEPS, (mesh, plan, MOVED, share)
    step = step_of(models[2], **settings)
    read = step.rows(rows)  # before anything is compiled
    take = step.local(**without_data(rows, length))
    MOVED.clear()
    got = []
    for i in range(STEPS):
        mine = part(step, batch(i, rows, length))
        assert len(mine["ids"]) == len(read) == len(step.rows(rows)), (mesh, plan, read)
        got.append(float(take(**mine)))
        if i == 1:
            models[2].eval()  # compiled again, from what is known of the whole
    assert close(got, wanted), (mesh, plan, "in parts", got, wanted)
    assert sum(MOVED) == share * STEPS, (mesh, plan, MOVED, share)
    assert step.local(**without_data(rows, length)).feed == take.feed and len(step.entries) == 2, (
        "an entry is used again"
    )
    forward = step.forward().local(**without_data(rows, length))(**part(step, batch(9, rows, length)))
    assert abs(float(forward) - models[0](**batch(9, rows, length)).item()) < 1e-10, (mesh, plan, forward)
    refused(step, take, rows, length)


def refused(step: mycel.Step, take: feed.Local, rows: int, length: int) -> None:
    """What is no part of the batch is told, with what would be, before any message is sent."""
    mine = part(step, batch(0, rows, length))
    shape = list(mine["ids"].shape)
    for wrong in (
        {**mine, "ids": torch.zeros(shape[0] + 1, shape[1], dtype=torch.int64)},
        {**mine, "labels": mine["labels"].int()},
        {**mine, "labels": mine["labels"][:, :-1]},
        {"ids": mine["ids"]},
        {},
    ):
        try:
            take(**wrong)
        except TrainError as e:
            assert f"this is not rank {RANK}'s part of the batch" in str(e), e
            assert (
                f"expected  ids: i64[{shape[0]},{shape[1]}], labels: i64[{shape[0]},{shape[1]}], weight: f64[]"
                in str(e)
            ), e
            assert f"of        ids: i64[{rows},{length}]" in str(e), e
        else:
            raise AssertionError(f"{wrong} is taken")


def named(rows: int = 8, length: int = 4) -> None:
    """A plan that names its tensors may give them different rows."""
    torch.manual_seed(0)
    model, settings = (
        Words().double(),
        {"mesh": mycel.Mesh(dp=WORLD), "plan": {"batch": {"ids": ["dp"], "labels": ["-", "dp"]}}},
    )
    whole, step = step_of(copy.deepcopy(model), **settings), step_of(model, **settings)
    try:
        step.rows(rows)
    except PlanError as e:
        assert "different rows" in str(e) and "rows(size, name)" in str(e), e
    else:
        raise AssertionError("one answer for two")
    assert len(step.rows(rows, "ids")) == rows // WORLD and step.rows(rows, "labels") == range(rows)
    take = step.local(**without_data(rows, length))
    wanted = [float(whole(**batch(i, rows, length))) for i in range(STEPS)]
    assert close([float(take(**part(step, batch(i, rows, length)))) for i in range(STEPS)], wanted)


TP = {"up.weight": ["tp", "-"], "up.bias": ["tp"], "down.weight": ["-", "tp"]}
CASES = {
    2: [
        ({"dp": 2}, "zero3", 5, 4, 2 * 3 * 4 * 8, {}),
        ({"tp": 2}, {"parameters": TP}, 4, 4, 2 * 4 * 4 * 8, {}),
        ({"cp": 2}, "cp", 3, 5, 2 * 3 * 3 * 8, {}),
    ],
    4: [
        ({"dp": 4}, "dp", 3, 4, 2 * 4 * 8, {}),
        ({"dp": 2, "tp": 2}, {"parameters": TP, "batch": ["dp"], "zero": "2 over dp"}, 4, 4, 2 * 2 * 4 * 8, {}),
        ({"dp": 2, "cp": 2}, "dp+cp", 4, 6, 2 * 2 * 3 * 8, {"accumulate": 2}),
    ],
}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)  # no test waits for ever
    torch.set_num_threads(1)
    feed.moved = counted
    for mesh, plan, rows, length, share, more in CASES[WORLD]:
        trained(mesh, plan, rows, length, share, **more)
    named()
