"""Batches in parts: which rows are a rank's, what it is fed of the whole and of its part, on simulated ranks and in
processes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from distributing import OneDevice, random_plan, ready_to_run, start_values, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import meshes
from torch import nn

import mycel
from mycel.capture import capture
from mycel.feed import feed_of, from_anywhere, moved, padded, without_host_data
from mycel.ir import type_of
from mycel.launch import launch
from mycel.parts import ShardedModel
from mycel.plan import Plan
from mycel.run import interpret, simulate
from mycel.run.simulate import put_together, spread_out


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.second(torch.relu(self.first(x))).flatten(0, 1), y.flatten())


def batch(rows: int, length: int = 3) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, length, 6, generator=g, dtype=torch.float64),
        "y": torch.randint(0, 5, (rows, length), generator=g),
    }


def ranks_of(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[ShardedModel]:
    return [ShardedModel(model, optimizer, plan, SimpleNamespace(rank=rank)) for rank in range(plan.mesh.world)]


@settings(deadline=None)
@given(meshes(24), st.integers(0, 40), st.data())
def test_every_row_is_some_ranks_and_ranks_that_differ_along_other_axes_have_the_same(mesh, size, data):
    axes = data.draw(st.permutations(mesh.axes).flatmap(lambda axes: st.integers(0, len(axes)).map(lambda n: axes[:n])))
    plan = Plan(mesh, batch=[".".join(axes) or "-"])
    model = nn.Linear(1, 1)
    rows = [parts.rows(size) for parts in ranks_of(plan, model, torch.optim.SGD(model.parameters()))]
    by_index = {mesh.index(rank, tuple(axes)): rows[rank] for rank in range(mesh.world)}
    if size == 1:  # a dim of one element is whole everywhere
        assert set(rows) == {range(1)}
        return
    assert [i for index in sorted(by_index) for i in by_index[index]] == list(range(size))
    assert all(rows[rank] == by_index[mesh.index(rank, tuple(axes))] for rank in range(mesh.world))


@pytest.mark.parametrize("seed", range(12))
def test_a_part_is_fed_as_the_whole_is_and_gives_the_results_of_one_device(seed):
    rng = random.Random(seed)
    model = Rows().double()
    accumulate = rng.choice([1, 1, 2])
    data = batch(rng.choice([2, 3, 4, 7]) * accumulate)
    one = OneDevice.of(model, data, accumulate=accumulate)
    plan = random_plan(tensors(model), 2, rng)
    distributed = one.under(plan)
    values, fed = start_values(one, seed), []
    for rank, parts in enumerate(ranks_of(plan, model, one.optimizer)):
        layouts = dict(zip((v.name for v in distributed.whole.inputs), distributed.inputs, strict=True))
        feed = feed_of(one.unsharded.captured, one.unsharded.program, layouts, plan.mesh, rank)
        mine = [data[v.name][parts.slices(v.name, v.shape)] for v in feed.inputs]
        assert [type_of(x) for x in mine] == [v.type for v in feed.parts()]
        assert len(mine[0]) == len(parts.rows(len(data["x"])))
        from_part, from_whole = feed.pad([*mine, "state"]), feed.cut([*data.values(), "state"])
        assert from_part[2] == from_whole[2] == "state"
        assert all(torch.equal(a, b) for a, b in zip(from_part[:2], from_whole[:2], strict=True))
        assert [type_of(x) for x in from_part[:2]] == [v.type for v in distributed.local.inputs[:2]]
        fed.append(from_part[:2])
    state = [spread_out(x, layout, plan.mesh) for x, layout in zip(values[2:], distributed.inputs[2:], strict=True)]
    got = simulate(ready_to_run(distributed), plan.mesh, [*map(list, zip(*fed, strict=True)), *state])
    for want, parts, layout in zip(interpret(one.unsharded.program, values), got, distributed.outputs, strict=True):
        torch.testing.assert_close(put_together(parts, layout, type_of(want), plan.mesh), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world", [2, 4])
def test_losses_and_bytes_of_ranks_given_parts(tmp_path, world):
    child = str(Path(__file__).parent / "feed_child.py")
    assert (
        launch([], world, program=[child], env={"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "120"}, logs=tmp_path / "logs")
        == 0
    )


def test_one_device_has_all_rows_and_takes_a_part_for_the_whole():
    model = Rows()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    assert step.rows(7) == range(7) and step.slices("x", (7, 3)) == (slice(0, 7), slice(0, 3))
    data = {name: x.float() if x.is_floating_point() else x for name, x in batch(4).items()}
    take = step.local(**{name: torch.empty_like(x, device="meta") for name, x in data.items()})
    expected = model(**data).item()
    assert float(take(**data)) == pytest.approx(expected, rel=1e-6)
    assert float(step(**data)) < expected and len(step.entries) == 1, "prepared without data, called with the whole"
    with pytest.raises(mycel.errors.TrainError, match=r"not rank 0's part of the batch: x f32\[3,3,6\]"):
        take(**{name: x[:3] for name, x in data.items()})


def test_padding_is_zero_and_what_needs_none_is_itself():
    x = torch.ones(0, 2, dtype=torch.int64)
    assert padded(x, (3, 2)).tolist() == [[0, 0]] * 3
    assert padded(x, (0, 2)) is x and moved(x, x.device) is x


def test_a_batch_on_the_host_is_captured_without_data_for_a_program_elsewhere():
    x, scalar = torch.ones(4, 2), torch.tensor(2.0)
    (a, b), kwargs = without_host_data((x, scalar), {"same": [x]}, torch.device("cuda"))
    assert a.device.type == "meta" and a.shape == x.shape and b is scalar and kwargs["same"][0] is a
    assert without_host_data((x,), {}, torch.device("cpu"))[0][0] is x
    captured = capture(lambda x, s: x * s, (x, scalar), {})
    cpu, there = torch.device("cpu"), {"x": torch.device("meta"), "s": torch.device("cpu")}
    assert from_anywhere(replace(captured, device=torch.device("cuda"), devices=there)).devices == {"x": None, "s": cpu}
    assert from_anywhere(replace(captured, devices=there)).devices == {"x": cpu, "s": cpu}
