"""Any code in manual regions: control flow, updates in place, random numbers; and chains of messages by chance against
finite differences."""

from __future__ import annotations

import random

import pytest
import torch
from distributing import spread
from test_manual import SPLIT, Plain, rows, step_is_plain
from torch.nn import functional as F

import mycel
from mycel import comm, lower, transform
from mycel.capture import meshed
from mycel.ir import Layout, Mesh, Program, check
from mycel.plan import Plan
from mycel.run import simulate
from mycel.run.simulate import put_together, spread_out


class Loop(Plain):
    def middle(self, x):
        with mycel.manual("tp"):
            h = F.linear(x, comm.part(self.up.weight, "tp"))
            n = torch.tensor(0)
            while n < 3:
                h = torch.tanh(h) + comm.all_reduce(h.mean(-1, keepdim=True), "tp") / comm.size("tp")
                n = n + 1
            y = comm.all_reduce(F.linear(h, comm.part(self.down.weight, "tp", dim=1)), "tp")
        return y


class PlainLoop(Plain):
    def middle(self, x):
        h = F.linear(x, self.up.weight)
        for _ in range(3):
            h = torch.tanh(h) + h.mean(-1, keepdim=True)
        return F.linear(h, self.down.weight)


class Decision(Plain):
    def middle(self, x):
        with mycel.manual("tp"):
            h = F.linear(x, comm.part(self.up.weight, "tp"))
            s = comm.all_reduce(h.sum(), "tp")
            if s > 0:
                h = torch.tanh(h) * self.head.bias.sum()
            else:
                h = torch.sin(h)
            y = comm.all_reduce(F.linear(h, comm.part(self.down.weight, "tp", dim=1)), "tp")
        return y


class PlainDecision(Plain):
    def middle(self, x):
        h = F.linear(x, self.up.weight)
        h = torch.tanh(h) * self.head.bias.sum() if h.sum() > 0 else torch.sin(h)
        return F.linear(h, self.down.weight)


class InABranch(Plain):
    def middle(self, x):
        if x.sum() > 0:
            with mycel.manual("tp"):
                h = torch.tanh(F.linear(x, comm.part(self.up.weight, "tp")))
                y = comm.all_reduce(F.linear(h, comm.part(self.down.weight, "tp", dim=1)), "tp")
        else:
            y = torch.sin(x)
        return y


class PlainInABranch(Plain):
    def middle(self, x):
        return F.linear(torch.tanh(F.linear(x, self.up.weight)), self.down.weight) if x.sum() > 0 else torch.sin(x)


class InPlace(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def middle(self, x):
        with mycel.manual("tp"):
            v = x.view(-1, 3, 2)
            h = torch.tanh(F.linear(v.reshape(-1, 6), comm.part(self.up.weight, "tp")))
            h[:, 0] = h[:, 0] * 1.0
            h.mul_(1.0)
            y = comm.all_reduce(F.linear(h, comm.part(self.down.weight, "tp", dim=1)), "tp")
            self.seen.add_(y.detach().mean(0))
        return y


class PlainInPlace(InPlace):
    def middle(self, x):
        y = F.linear(torch.tanh(F.linear(x, self.up.weight)), self.down.weight)
        self.seen.add_(y.detach().mean(0))
        return y


class Random(Plain):
    def middle(self, x):
        with mycel.manual("tp"):
            h = torch.tanh(F.linear(F.dropout(x, 0.5), comm.part(self.up.weight, "tp")))
            y = comm.all_reduce(F.linear(h, comm.part(self.down.weight, "tp", dim=1)), "tp")
        return F.dropout(y, 0.5)


class PlainRandom(Plain):
    def middle(self, x):
        return F.dropout(F.linear(torch.tanh(F.linear(F.dropout(x, 0.5), self.up.weight)), self.down.weight), 0.5)


class Integers(Plain):
    def middle(self, x):
        with mycel.manual("tp"):
            h = comm.all_gather(F.linear(x, comm.part(self.up.weight, "tp")), "tp", dim=-1)
            k = h.argmax(-1)
            m = h > 0
        return F.linear(torch.where(m, h, 0.0) + F.one_hot(k, 8).to(h.dtype), self.down.weight)


class PlainIntegers(Plain):
    def middle(self, x):
        h = F.linear(x, self.up.weight)
        k, m = h.argmax(-1), h > 0
        return F.linear(torch.where(m, h, 0.0) + F.one_hot(k, 8).to(h.dtype), self.down.weight)


class Rows(Plain):
    def middle(self, x):
        with mycel.manual("tp"):
            w, d = comm.part(self.up.weight, "tp"), comm.part(self.down.weight, "tp", dim=1)
            ys = []
            for row in x:
                ys.append(comm.all_reduce(F.linear(torch.tanh(F.linear(row, w)), d), "tp"))
            y = torch.stack(ys)
        return y


class Results(Plain):
    """Two results, a structure of tensors, and one that goes through."""

    def middle(self, x):
        @mycel.manual("tp", ins=[None, ("tp", None), None], outs=[(None, "tp"), None])
        def f(x, up, more):
            return torch.tanh(F.linear(x, up)), more["x"]

        h, again = f(x, self.up.weight, {"x": x})
        return F.linear(h, self.down.weight) + 0 * again


CODE = [
    (Loop, PlainLoop),
    (Decision, PlainDecision),
    (InABranch, PlainInABranch),
    (InPlace, PlainInPlace),
    (Random, PlainRandom),
    (Integers, PlainIntegers),
    (Rows, Plain),
    (Results, Plain),
]


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp=2, tp=2)], ids=str)
@pytest.mark.parametrize("make, plain", CODE, ids=lambda c: c.__name__)
def test_code_in_regions_is_the_plain_code(make, plain, mesh):
    step_is_plain(make, plain, rows(), mesh, {"batch": ["dp"] if "dp" in mesh else [], "parameters": SPLIT})


class Mlp(torch.nn.Module):
    """A hint and a region in one layer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)

    def forward(self, x):
        x = mycel.shard(x, "dp", None)
        with mycel.manual("tp"):
            up, bias = mycel.comm.part(self.up.weight, "tp"), mycel.comm.part(self.up.bias, "tp")
            h = torch.relu(torch.nn.functional.linear(x, up, bias))
            y = mycel.comm.all_reduce(h @ mycel.comm.part(self.down.weight, "tp", dim=1).T, "tp")
        return y + self.down.bias


def test_a_layer_with_a_hint_and_a_region():
    class Written(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = Mlp()

        def forward(self, x, target):
            return F.mse_loss(self.mlp(x), target)

    class Simple(Written):
        def forward(self, x, target):
            return F.mse_loss(self.mlp.down(torch.relu(self.mlp.up(x))), target)

    batch = {"x": torch.randn(4, 64, dtype=torch.float64), "target": torch.randn(4, 64, dtype=torch.float64)}
    step_is_plain(
        Written, Simple, batch, Mesh(dp=2, tp=2), {"parameters": {"mlp.up.weight": ["tp", "-"]}, "batch": ["dp"]}
    )


# -- chains of messages


def chain(seed: int, ins: list, outs: object, count: int):
    """A function of local tensors by chance: what ranks hold may differ where the result is taken from the first."""

    @mycel.manual("a", ins=ins, outs=outs)
    def region(x, w):
        rng = random.Random(seed)
        h = x[..., :2, :2] if x.shape[-1] > 2 else x
        h = torch.sin(h.sum() + torch.ones(4, 4, dtype=x.dtype) * torch.arange(4)) + F.pad(
            h, (0, 4 - h.shape[1], 0, 4 - h.shape[0])
        )
        for _ in range(count):
            match rng.randrange(9):
                case 0:
                    h = torch.tanh(h) * w
                case 1:
                    h = comm.all_reduce(h, "a") * 0.3
                case 2:
                    h = h - comm.all_reduce(h, "a", op="max")
                case 3:
                    h = comm.part(torch.sin(comm.all_gather(h, "a", dim=1)), "a", dim=0).reshape(4, 4)
                case 4:
                    h = h + comm.permute(h * w, "a")
                case 5:
                    h = comm.all_gather(comm.reduce_scatter(h, "a", dim=1), "a", dim=1)
                case 6:
                    h = comm.all_to_all(h, "a", split=0, join=1).reshape(4, 4) * 1.5
                case 7:
                    h = h * (comm.index("a") + 1)
                case 8:
                    h = comm.permute(h, "a", to=[-1, 0, *range(2, comm.size("a"))]) + torch.cos(h)
        return h

    def loss(x, w, c):
        y = region(x, w)
        return (torch.sin(y) * c[: y.shape[0], : y.shape[1]]).sum()

    return loss


@pytest.mark.parametrize("seed", range(24))
def test_gradients_of_chains_are_finite_differences(seed):
    rng = random.Random(seed)
    gen = torch.Generator().manual_seed(seed)
    mesh = rng.choice([Mesh(a=2), Mesh(a=4), Mesh(a=2, b=2), Mesh(b=3, a=2)])
    split = [None, ("a", None), (None, "a")]
    loss = chain(seed, [rng.choice(split), None], rng.choice(split), rng.randint(1, 6))
    values = [
        torch.rand(4, 4, generator=gen, dtype=torch.float64),
        torch.rand(4, 4, generator=gen, dtype=torch.float64),
        torch.rand(16, 16, generator=gen, dtype=torch.float64),
    ]
    with meshed(mesh):
        program = mycel.capture(loss, *values)
    program = transform.simplify(check(transform.value_and_grad(transform.simplify(program), [0, 1])))
    other = [a for a in mesh.axes if a != "a"]
    given = {i: Layout((tuple(other), ()) if rng.random() < 0.5 else ((), tuple(mesh.axes))) for i in range(2)}
    distributed = spread(program, Plan(mesh), given)
    local = check(lower.overlap(check(lower.hoist(transform.simplify(distributed.local)))))

    def run(xs):
        return simulate(
            local, mesh, [spread_out(x, layout, mesh) for x, layout in zip(xs, distributed.inputs, strict=True)]
        )

    outs = run(values)
    assert all(torch.equal(outs[0][0], part) for part in outs[0])
    for i in range(2):
        gradient = put_together(outs[1 + i], distributed.outputs[1 + i], program.inputs[i].type, mesh)
        way = torch.randn(4, 4, generator=gen, dtype=torch.float64)
        e = 1e-6
        ahead, behind = (run([x + s * e * way if k == i else x for k, x in enumerate(values)])[0][0] for s in (1, -1))
        slope = float((ahead - behind) / (2 * e))
        assert float((gradient * way).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-7), (i, str(mesh))


@pytest.mark.parametrize("seed", range(8))
def test_tangents_of_chains_are_finite_differences_and_their_text_reads_back(seed):
    gen = torch.Generator().manual_seed(seed)
    mesh, split = Mesh(a=2, b=2), [None, ("a", None), (None, "a")]
    values = [torch.rand(n, n, generator=gen, dtype=torch.float64) for n in (4, 4, 16)]
    with meshed(mesh):
        program = transform.simplify(mycel.capture(chain(seed, [split[seed % 3], None], split[seed // 3], 4), *values))
    assert Program.parse(str(program), program.consts) == program

    def run(program, xs):
        distributed = spread(program, Plan(mesh), {})
        return simulate(
            check(transform.simplify(distributed.local)),
            mesh,
            [spread_out(x, at, mesh) for x, at in zip(xs, distributed.inputs, strict=True)],
        )

    way, e = torch.randn(4, 4, generator=gen, dtype=torch.float64), 1e-6
    tangent = float(run(check(transform.jvp(program, [0])), [*values, way])[1][0])
    ahead, behind = (run(program, [values[0] + s * e * way, *values[1:]])[0][0] for s in (1, -1))
    assert tangent == pytest.approx(float((ahead - behind) / (2 * e)), rel=1e-6, abs=1e-7)
