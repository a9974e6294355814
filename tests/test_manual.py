"""Manual regions: what a rank does with its parts, written by hand, is the plain code's step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributing import spread
from torch import nn
from torch.nn import functional as F

import mycel
from mycel import comm, lower, transform
from mycel.ir import Mesh, check, runs, type_of, walk
from mycel.launch import launch
from mycel.plan import Plan
from mycel.run import interpret, simulate
from mycel.run.simulate import put_together, spread_out


def rows():
    torch.manual_seed(0)
    return {"x": torch.randn(4, 6, dtype=torch.float64), "target": torch.randint(0, 5, (4,))}


def step_and_unsharded(model, batch, mesh, written, **settings):
    """A model's training step, and it as one program."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = mycel.train_step(
        model, optimizer, mesh=mesh, plan=written if mesh is not None else "auto", compile=False, **settings
    )
    return step, step.unsharded(**batch)


def values_of(unsharded, batch):
    """Inputs by name: the batch, the state, and numbers by chance for the optimiser's."""
    c = unsharded.captured
    gen = torch.Generator().manual_seed(0)
    values = {v.name: batch[unsharded.program.role(v).name] for v in unsharded.program.inputs_of("batch")}
    values |= {name: places[0].read().detach() for name, places in c.state.items()}
    for v in sorted(unsharded.program.inputs, key=lambda v: v.name):
        if v.name not in values:
            integer = not v.dtype.is_floating_point
            values[v.name] = (
                torch.zeros((), dtype=v.dtype)
                if integer
                else torch.rand(v.shape, generator=gen, dtype=v.dtype) * 0.1 + 0.01
            )
    return values


def named_outputs(program, outs):
    n = len(program.results)
    return {**{str(i): x for i, x in enumerate(outs[:n])}, **dict(zip(program.updates, outs[n:], strict=True))}


def step_is_plain(make, plain, batch, mesh, written, **settings):
    """A step of a model with manual regions on simulated ranks equals one of plain code: loss, norm, parameters,
    state."""
    torch.manual_seed(0)
    model, other = make().double(), plain().double()
    other.load_state_dict(model.state_dict())
    step, unsharded = step_and_unsharded(model, batch, mesh, Plan.read(written, mesh), **settings)
    _, simple = step_and_unsharded(other, batch, None, None, **settings)
    values = values_of(simple, batch)
    wanted = named_outputs(simple.program, interpret(simple.program, [values[v.name] for v in simple.program.inputs]))
    given, gathered = step.parts.given(unsharded)
    distributed = spread(unsharded.program, step.written, given, gathered)
    local = check(lower.overlap(check(lower.hoist(transform.simplify(distributed.local)))))
    inputs = [
        spread_out(values[v.name], layout, mesh)
        for v, layout in zip(unsharded.program.inputs, distributed.inputs, strict=True)
    ]
    parts = simulate(local, mesh, inputs)
    for (name, got), layout in zip(named_outputs(unsharded.program, parts).items(), distributed.outputs, strict=True):
        whole = put_together(got, layout, type_of(wanted[name]), mesh)
        assert torch.allclose(whole, wanted[name], rtol=1e-10, atol=1e-10, equal_nan=True), (
            name,
            (whole - wanted[name]).abs().max(),
        )
    return distributed


class Plain(nn.Module):
    """Two products with an activation between, and a loss."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False), nn.Linear(6, 5)

    def middle(self, x):
        return F.linear(torch.tanh(F.linear(x, self.up.weight)), self.down.weight)

    def forward(self, x, target):
        h = x + self.middle(x)
        return F.cross_entropy(self.head(h), target)


class Decorated(Plain):
    def middle(self, x):
        @mycel.manual("tp", ins=[None, ("tp", None), (None, "tp")])
        def megatron(x, up, down):
            h = torch.tanh(F.linear(x, up))
            assert h.shape[-1] * comm.size("tp") == 8
            return comm.all_reduce(F.linear(h, down), "tp")

        return megatron(x, self.up.weight, self.down.weight)


class Block(Plain):
    def middle(self, x):
        with mycel.manual("tp"):
            up, down = comm.part(self.up.weight, "tp"), comm.part(self.down.weight, "tp", dim=1)
            y = comm.all_reduce(F.linear(torch.tanh(F.linear(x, up)), down), "tp")
        return y


class Sequence(Plain):
    """Rows in parts outside, columns inside: gather before, reduce-scatter behind."""

    def middle(self, x):
        @mycel.manual("tp", ins=[("tp", None), ("tp", None), (None, "tp")], outs=("tp", None))
        def region(x, up, down):
            whole = comm.all_gather(x, "tp", dim=0)
            return comm.reduce_scatter(F.linear(torch.tanh(F.linear(whole, up)), down), "tp", dim=0)

        return region(x, self.up.weight, self.down.weight)


class Ring(Plain):
    """Each rank has rows of the second product's weight; partial results go round."""

    def middle(self, x):
        @mycel.manual("tp", ins=[None, ("tp", None), (None, "tp")])
        def region(x, up, down):
            mine = F.linear(torch.tanh(F.linear(x, up)), down)
            total = mine
            for _ in range(comm.size("tp") - 1):
                mine = comm.permute(mine, "tp")
                total = total + mine
            return total

        return region(x, self.up.weight, self.down.weight)


class Crossed(Plain):
    """Features in parts become rows in parts and go back; a hidden unit is chosen by the rank's index."""

    def middle(self, x):
        with mycel.manual("tp"):
            h = torch.tanh(F.linear(x, comm.part(self.up.weight, "tp")))
            h = comm.all_to_all(h, "tp", split=0, join=1)
            start = comm.index("tp") * h.shape[0]
            own = torch.index_select(x, 0, start + torch.arange(h.shape[0]))
            y = F.linear(h, self.down.weight) + 0 * own
            y = comm.all_gather(y, "tp", dim=0)
        return y


class Softmax(Plain):
    """A softmax over parts of the hidden units, by the largest and the sum of all."""

    def middle(self, x):
        with mycel.manual("tp"):
            h = F.linear(x, comm.part(self.up.weight, "tp"))
            top = comm.all_reduce(h.amax(-1, keepdim=True), "tp", op="max")
            e = torch.exp(h - top)
            p = e / comm.all_reduce(e.sum(-1, keepdim=True), "tp")
            y = comm.all_reduce(F.linear(p, comm.part(self.down.weight, "tp", dim=1)), "tp")
        return y


class PlainSoftmax(Plain):
    def middle(self, x):
        return self.down(torch.softmax(self.up(x), -1))


REGIONS = [
    (Decorated, Plain),
    (Block, Plain),
    (Sequence, Plain),
    (Ring, Plain),
    (Crossed, Plain),
    (Softmax, PlainSoftmax),
]
MESHES = [Mesh(tp=2), Mesh(tp=4), Mesh(dp=2, tp=2), Mesh(tp=2, dp=3), Mesh(dp=2, tp=1)]
SPLIT = {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("make, plain", REGIONS, ids=lambda c: c.__name__)
def test_regions_are_the_plain_code(make, plain, mesh):
    for parameters in ({}, SPLIT):
        batch = ["dp"] if "dp" in mesh else []
        for zero in ("", "3 over dp") if "dp" in mesh else ("",):
            step_is_plain(make, plain, rows(), mesh, {"parameters": parameters, "batch": batch, "zero": zero})


@pytest.mark.parametrize("make, plain", REGIONS, ids=lambda c: c.__name__)
def test_regions_with_a_batch_in_parts_and_clipping(make, plain):
    step_is_plain(
        make, plain, rows(), Mesh(dp=2, tp=2), {"parameters": SPLIT, "batch": ["dp"]}, accumulate=2, clip_norm=0.1
    )


@pytest.mark.parametrize("make, plain", REGIONS, ids=lambda c: c.__name__)
def test_on_one_device_regions_are_nothing(make, plain):
    torch.manual_seed(0)
    model, other = make().double(), plain().double()
    other.load_state_dict(model.state_dict())
    assert torch.allclose(model(**rows()), other(**rows()), rtol=1e-12)
    _, unsharded = step_and_unsharded(model, rows(), None, None)
    assert not any(e.op.by_rank for b in unsharded.program.blocks.values() for e in b.eqns)


class Layer(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inner, self.norm, self.drop = make(), nn.LayerNorm(6), nn.Dropout(0.3)

    def forward(self, x):
        h = F.gelu(self.norm(x)) + torch.sin(x)
        return torch.tanh(x + self.drop(self.inner.middle(h))) * 0.5 + torch.cos(h)


class Layers(nn.Module):
    """A region in a repeated layer."""

    def __init__(self, make):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 5)
        self.layers = nn.ModuleList(Layer(make) for _ in range(3))

    def forward(self, x, target):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), target)


def in_layers(make, mesh):
    written = {
        "batch": ["dp"] if "dp" in mesh else [],
        "parameters": {"layers.*.up.weight": ["tp", "-"], "layers.*.down.weight": ["-", "tp"]},
    }
    return step_is_plain(lambda: Layers(make), lambda: Layers(Plain), rows(), mesh, written)


@pytest.mark.parametrize("make", [Decorated, Block, Sequence, Crossed, Ring], ids=lambda c: c.__name__)
def test_regions_in_repeated_layers(make):
    distributed = in_layers(make, Mesh(dp=2, tp=2))
    assert 3 in runs(distributed.whole).values(), "the layer is one block"


def test_a_region_sends_what_megatron_sends():
    """For each layer one sum of activations forward and one backward: the cotangent of what all ranks were given alike
    needs none."""
    distributed = in_layers(Decorated, Mesh(tp=2))
    often = runs(distributed.whole)
    assert sum(often[name] for name, eqn in walk(distributed.whole) if eqn.op.name == "all_reduce") == 6


class Hints(Plain):
    """Hints around and inside of a region."""

    def middle(self, x):
        x = mycel.shard(x, None, "tp")
        with mycel.manual("tp"):
            h = torch.tanh(F.linear(x, comm.part(self.up.weight, "tp")))
            h = mycel.shard(h, "dp", None)
            y = comm.all_reduce(F.linear(h, comm.part(self.down.weight, "tp", dim=1)), "tp")
        return mycel.shard(y, ("tp", "dp"), None)


def test_hints_and_pins_in_regions():
    """What a plan says of a value by its name holds inside of a region along other axes alone."""
    mesh = Mesh(dp=2, tp=2)
    for activations in ({}, {"h": ["dp", "tp"], "y": ["tp", "-"]}):
        step_is_plain(Hints, Plain, rows(), mesh, {"batch": ["dp"], "activations": activations})


class TwoAxes(Plain):
    """A region over two axes: rows over one, a product's inner dim over both, in either order."""

    def middle(self, x):
        @mycel.manual("a", "b", ins=[None, (("b", "a"), None), (None, ("b", "a"))])
        def region(x, up, down):
            y = F.linear(torch.tanh(F.linear(x, up)), down)
            return comm.all_reduce(comm.all_reduce(y, "a"), "b")

        return region(x, self.up.weight, self.down.weight)


class Nested(Plain):
    """A region in a region."""

    def middle(self, x):
        with mycel.manual("a"):
            h = torch.tanh(F.linear(x, comm.part(self.up.weight, "a")))
            with mycel.manual("b"):
                rows = comm.part(h, "b", dim=0)
                h = comm.all_gather(rows * 1.0, "b", dim=0)
            y = comm.all_reduce(F.linear(h, comm.part(self.down.weight, "a", dim=1)), "a")
        return y


class OneDim(Plain):
    """Tensors of one dim, a number, and a branch on one."""

    def middle(self, x):
        with mycel.manual("a", "b"):
            scale = comm.part(self.head.bias[:4].repeat(2), "a") * 2
            whole = comm.all_gather(scale, "a").sum() + comm.all_reduce(scale.sum(), "a")
            if whole > 0:
                y = x * whole
            else:
                y = torch.sin(x) * whole
        return y + self.down(torch.tanh(self.up(x)))


class PlainOneDim(Plain):
    def middle(self, x):
        scale = self.head.bias[:4].repeat(2) * 2
        whole = scale.sum() * 2
        y = x * whole if whole > 0 else torch.sin(x) * whole
        return y + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize(
    "make, plain", [(TwoAxes, Plain), (Nested, Plain), (OneDim, PlainOneDim)], ids=lambda c: c.__name__
)
def test_two_axes(make, plain):
    for mesh in (Mesh(a=2, b=2), Mesh(b=2, a=2), Mesh(a=2, dp=2, b=2), Mesh(a=2, b=1)):
        batch = ["dp"] if "dp" in mesh else []
        step_is_plain(make, plain, rows(), mesh, {"batch": batch, "parameters": {"up.weight": ["a.b", "-"]}})


# -- real processes --------------------------------------------------------------------------------------------------


def test_a_step_with_regions_in_two_processes(tmp_path):
    child = str(Path(__file__).parent / "manual_child.py")
    assert (
        launch(
            [str(tmp_path)],
            2,
            program=[child],
            env={"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"},
            logs=tmp_path / "logs",
        )
        == 0
    )
    first, second = ((tmp_path / f"explained-{rank}").read_text() for rank in range(2))
    assert first == second
    assert "sent by a rank   tp " in first and "all_reduce(" in first
