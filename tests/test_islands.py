"""Islands: what cannot be captured stays Python, as one equation, and everything else is what torch computes."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import random
import warnings

import numpy as np
import pytest
import torch
from distributing import OneDevice, step_equals
from models import same
from stepping import agree, beside, both, sgd
from torch import nn

import mycel
from mycel.ir import Mesh
from mycel.plan import Plan

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


class Shrink(nn.Module):
    """Stops when its weights say so, counts in a buffer and in Python, keeps what it saw."""

    def __init__(self, keeps=False):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.6 + 0.05)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.last, self.keeps = 0, None, keeps

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        power = self.weight
        while power.detach().abs().max().numpy() > 0.3:
            x, power = x @ self.weight, power @ self.weight
        if self.keeps:
            self.last = x.detach() * 2
        return x, "done"


class Model(nn.Module):
    """An island between captured layers."""

    def __init__(self, keeps=False):
        super().__init__()
        self.before, self.inside, self.behind = nn.Linear(4, 4), Shrink(keeps), nn.Linear(4, 3)

    def forward(self, x):
        y, word = self.inside(self.before(x).tanh())
        assert word == "done"
        return self.behind(y).square().mean()


def twins(make=Model):
    torch.manual_seed(0)
    model = make().double()
    return model, copy.deepcopy(model)


def islands(program):
    return [e.params["name"] for b in program.blocks.values() for e in b.eqns if e.op.name == "island"]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*runs as plain Python")
        yield


def test_the_smallest_call_with_static_results_is_the_island():
    model, twin = twins(lambda: Model(keeps=True))
    fast = mycel.jit(model)
    for i in range(3):
        same(fast(X * i), twin(X * i))
        same((model.inside.seen, model.inside.last), (twin.inside.seen, twin.inside.last))
    assert model.inside.calls == twin.inside.calls and len(fast.entries) == 1
    assert [name.split()[0] for name in islands(fast.program(X))] == ["Shrink"]


def test_gradients_of_any_order_are_torchs():
    model, twin = twins()
    value, grads = mycel.value_and_grad(lambda x: model(x), wrt=model)(X)
    loss = twin(X)
    loss.backward()
    same(value, loss.detach())
    same(grads, {k: p.grad for k, p in twin.named_parameters()})
    assert model.inside.calls == twin.inside.calls  # once for a call, though backward runs it again
    row = X[:1]
    same(mycel.hessian(model)(row), torch.autograd.functional.hessian(twin, row))
    fast = mycel.jit(model)(X)  # torch's autograd records what is generated
    model.zero_grad()
    fast.backward()
    same({k: p.grad for k, p in model.named_parameters()}, {k: p.grad for k, p in twin.named_parameters()})


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "clip_norm": 0.1}])
def test_training_steps_equal_torchs(settings):
    pair = both(lambda: Model().double(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.05), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accumulate: whether an island sums over the batch is not known
        for i in range(3):
            pair.further((X * (i + 1),))
    assert max(abs(a - b) for a, b in zip(pair.losses, pair.wanted, strict=True)) < 1e-9
    assert "of the step" in pair.step.explain() and "Shrink" in pair.step.explain()
    assert len(pair.step.entries) == 1


@pytest.mark.parametrize("plan", ["dp", "tp"])
def test_ranks_keep_islands_whole(plan):
    model, _ = twins()
    split = {"before.weight": ["a", "-"], "behind.weight": ["-", "a"], "inside.weight": ["a", "-"]}
    written = Plan(Mesh(a=2), {} if plan == "dp" else split, ["a"] if plan == "dp" else [])
    step_equals(OneDevice.of(model, {"x": X}), written)


class Noisy(nn.Module):
    """Draws from all generators, in code that cannot be captured."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        if self.weight.detach().sum().numpy() > 0:
            x = x * torch.rand(4) * random.choice([1.0, 2.0]) * float(np.random.rand(1)[0])
        return (x * self.weight).sum()


def test_random_numbers_follow_the_key_and_backward_draws_the_same():
    model = Noisy()
    step = mycel.value_and_grad(lambda x: model(x), wrt=model)
    state, plain = random.getstate(), np.random.get_state()[2]
    torch.manual_seed(0)
    first = [step(X.float()) for _ in range(3)]
    torch.manual_seed(0)
    again = [step(X.float()) for _ in range(3)]
    same(first, again)
    for value, grads in first:
        same(grads["weight"].sum(), value)  # linear: the gradient of other draws would be another sum
    assert len({v.item() for v, _ in first}) == 3
    assert random.getstate() == state and np.random.get_state()[2] == plain


def through_numpy(x):
    return torch.from_numpy(np.sort(x.detach().numpy(), axis=1)) + x


def test_a_call_is_marked_by_hand_without_a_warning():
    marked = mycel.island(through_numpy)
    weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = mycel.jit(lambda x: marked(x * weight) * 2)
    same(fast(X), through_numpy(X * weight) * 2)
    assert len(islands(fast.program(X))) == 1
    same(marked(X), through_numpy(X))
    model, twin = twins()
    model.behind = mycel.island(model.behind)
    assert len(islands(mycel.jit(model).program(X))) == 2
    same(mycel.jit(model)(X), twin(X))


def test_strict_refuses_and_says_why():
    model, _ = twins()
    for call in (mycel.jit(model, strict=True), mycel.grad(model, strict=True)):
        with pytest.raises(mycel.CaptureError, match="a NumPy array was asked"):
            call(X)
    with pytest.raises(mycel.CaptureError, match="a NumPy array was asked"):
        mycel.capture(model, X)
    with pytest.raises(mycel.CaptureError, match="a NumPy array was asked"):
        mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), strict=True)(X)
    assert model.inside.calls == 0


def test_the_warning_names_line_and_reason_once():
    weight = nn.Parameter(torch.ones(()))

    def scaled(x):
        return x * float(weight.detach().numpy())

    with pytest.warns(UserWarning, match=r"scaled at (.|\n)*a NumPy array was asked(.|\n)*return x \* float") as caught:
        mycel.jit(lambda x: scaled(x) + 1)(X)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mycel.jit(lambda x: scaled(x) + 2)(X)


def chosen(x, weight):
    return x[weight > 0]


def summed(x, weight):
    return chosen(x, weight).sort().values.sum() * 2


def test_where_shapes_depend_on_values_the_call_around_is_the_island():
    weight = nn.Parameter(torch.linspace(-1, 2, 4, dtype=torch.float64))
    fast = mycel.jit(lambda x: summed(x[0], weight))
    same(fast(X), summed(X[0], weight))
    assert [name.split()[0] for name in islands(fast.program(X))] == ["summed"]
    with pytest.raises(mycel.CaptureError, match=r"no call around it can stay Python: what .* returns depends on"):
        mycel.jit(lambda x: chosen(x, weight))(X[0])


def test_errors_of_the_code_itself_stay_what_they_are():
    def wrong(x):
        return x @ torch.ones(3, 3, dtype=x.dtype)

    with pytest.raises(mycel.CaptureError, match=r"linear|matmul|mm"):
        mycel.jit(lambda x: wrong(x))(X)

    def raises(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mycel.jit(lambda x: raises(x))(X)


def test_results_of_other_types_are_named_when_they_come():
    table = [torch.zeros(2), torch.zeros(3)]
    weight = nn.Parameter(torch.ones(()))

    def either(x, at):
        return table[int(at.sum())] + float(weight.detach())

    fast = mycel.jit(mycel.island(either))
    same(fast(X, torch.zeros(1, dtype=torch.int64)), torch.ones(2))
    with pytest.raises(mycel.RunError, match=r"an island, either(.|\n)*a larger part"):
        fast(X, torch.ones(1, dtype=torch.int64))


def test_layers_of_one_class_are_islands_together():
    model, twin = twins(lambda: nn.Sequential(*(Shrink() for _ in range(4))))

    class Stack(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)[0]
            return x

    fast, plain = mycel.jit(Stack(model)), Stack(twin)
    same(fast(X), plain(X))
    assert len(islands(fast.program(X))) == 4


def test_packed_sequences_stay_inside_of_an_island():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 1)

        def encoded(self, x, lengths):
            lengths = lengths + (self.head.bias > 9).long()  # not known, since weights decide
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=3)[0]

        def forward(self, x, lengths):
            return self.head(self.encoded(x, lengths)).square().mean()

    torch.manual_seed(0)
    model = Packed().double()
    twin = copy.deepcopy(model)
    x = torch.randn(3, 3, 4, dtype=torch.float64)
    fast = mycel.value_and_grad(lambda x, lengths: model(x, lengths), wrt=model)
    for lengths in (torch.tensor([3, 1, 2]), torch.tensor([1, 1, 2])):
        twin.zero_grad()
        loss = twin(x, lengths)
        loss.backward()
        value, grads = fast(x, lengths)
        same(value, loss.detach())
        same(grads, {k: p.grad for k, p in twin.named_parameters()})


class InTuples(nn.Module):
    """Reaches its weights by way of a tuple, and constants by way of its class."""

    SCALE = torch.full((), 2.0, dtype=torch.float64)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1, 4))
        self.pair = (self.weight, "name")

    def forward(self, x):
        if self.pair[0].detach().sum().numpy() > 0:
            x = x * self.pair[0] * self.SCALE
        return x.square().sum()


def test_weights_in_tuples_get_their_gradients():
    model, twin = twins(InTuples)
    model.pair, twin.pair = (model.weight, "name"), (twin.weight, "name")
    _, grads = mycel.value_and_grad(lambda x: model(x), wrt=model)(X)
    twin(X).backward()
    same(grads["weight"], twin.weight.grad)
    assert model.pair[0] is model.weight


def test_what_captured_code_is_the_first_to_import_is_real(tmp_path, monkeypatch):
    (tmp_path / "made_by_islands_test.py").write_text("import torch\nTABLE = torch.arange(4.0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def fn(x):
        from made_by_islands_test import TABLE

        return x * TABLE

    same(mycel.jit(fn, strict=True)(X), fn(X))


class Queue(nn.Module):
    """The last rows it saw, at places that a buffer counts; a second encoder that follows the first."""

    def __init__(self):
        super().__init__()
        self.encoder, self.slow = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
        self.slow.load_state_dict(self.encoder.state_dict())
        self.register_buffer("queue", torch.linspace(-1, 1, 24).reshape(3, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        for p, q in zip(self.encoder.parameters(), self.slow.parameters(), strict=True):
            q.data = q.data * 0.9 + p.data * 0.1

    @torch.no_grad()
    def enqueue(self, keys):
        first = int(self.place)
        last = min(first + len(keys), 8)
        self.queue[:, first:last] = keys[: last - first].T
        self.place[0] = last % 8

    def forward(self, x):
        self.follow()
        keys = self.slow(x)
        scores = torch.cat([(self.encoder(x) * keys).sum(1, keepdim=True), self.encoder(x) @ self.queue.clone()], 1)
        self.enqueue(keys)
        return -scores.log_softmax(1)[:, 0].mean()


def test_a_place_that_code_counts_itself_is_written_by_an_island_alone():
    """Of several functions under one decorator that one is plain Python."""
    with pytest.warns(UserWarning, match=r"enqueue at .* runs as plain Python") as caught:
        pair = beside(lambda: Queue().double(), sgd(), lambda i: (X[:5] + i,), steps=3)
    assert len([w for w in caught if "plain Python" in str(w.message)]) == 1 and pair.model.place == 5


def test_an_iterator_of_a_partial_is_a_refusal_with_its_reason():
    """Why there would be an island, and why there is none: an error of ours, not the search's own."""
    layer, factor = nn.Linear(3, 3), functools.partial(next, iter([2.0, 3.0]))

    def f(x):
        scale = torch.unique(layer(x)).shape[0]
        return x * scale * factor()

    reason = r"(?s)_unique2 has a shape.*no call around it can stay Python: .* reaches an iterator"
    with pytest.raises(mycel.errors.CaptureError, match=reason):
        mycel.jit(f)(torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*runs as plain Python")  # where the loop looks at its signal handler, in text
def test_branches_that_an_event_loop_runs():
    """A coroutine runs once: the call it is given to is no island, but the one around it may be."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        async def branch(self, layer, x):
            await asyncio.sleep(0)
            return layer(x).exp()

        async def all(self, x):
            return await asyncio.gather(self.branch(self.a, x), self.branch(self.b, x))

        def forward(self, x):
            a, b = asyncio.run(self.all(x))
            return (a * b).mean()

    agree(beside(lambda: Branches().double(), sgd(), lambda _: (X,), steps=2))


def test_an_exception_that_a_value_raises_is_caught_where_the_code_catches_it():
    def small(h):
        if h.mean() > 0:
            raise ValueError("large")
        return h

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            h = self.layer(x)
            try:
                h = small(h)
            except Exception:
                h = h * 3
            return (h + 1).square().mean()

    with pytest.warns(UserWarning, match="a value decides whether ValueError is raised, which is caught"):
        pair = beside(lambda: Catches().double(), sgd(), lambda i: (X * (-2) ** i + 0.3,), steps=4)
    agree(pair)


class Remembered:
    """An object that the captured code makes; what it computes, it keeps."""

    def __init__(self, x):
        self.x = x

    def root(self):
        if "kept" not in vars(self):
            self.kept = self.x.sqrt()
        return self.kept


def test_what_an_object_of_the_code_keeps_is_that_of_each_call():
    fast = mycel.jit(lambda x: mycel.island(Remembered(x.exp()).root)() * x)
    for x in (X, X + 1):
        assert torch.allclose(fast(x), x.exp().sqrt() * x)


class Chosen(nn.Module):
    """One of two layers, or neither, as an array says; a third whose gradient is cut off."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.cut, self.behind = (nn.Linear(4, 4) for _ in range(4))

    def pick(self, x):
        total = x.detach().numpy().sum()
        y = x + self.cut(x).detach()
        return self.a(y) if total > 4 else self.b(y) if total < -4 else y

    def forward(self, x):
        return self.behind(self.pick(x * (1 + self.behind.bias.sum()))).square().mean()


@pytest.mark.parametrize("parts", [1, 2])
def test_what_an_island_does_not_use_is_left_alone_until_it_does(parts):
    """Whichever layer was chosen while it was captured."""
    model, like = twins(Chosen)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1) for m in (model, like)]
    step = mycel.train_step(model, optimizers[0], accumulate=parts)
    for shift in (0, -1, 1, 1, 0, -1):
        optimizers[1].zero_grad()
        wanted = sum(like(x) for x in (X + shift).chunk(parts)) / parts
        wanted.backward()
        assert like.cut.weight.grad is None
        optimizers[1].step()
        torch.testing.assert_close(step(X + shift), wanted)
    same(model.state_dict(), like.state_dict())


class Summed(nn.Module):
    """An island whose gradients are one number, expanded, and one tensor for two operands."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.sums = nn.Linear(4, 4), nn.Linear(4, 4), mycel.island(lambda x, y: (x + y).sum() * 2)

    def forward(self, x):
        y, z = self.a(x), self.b(x)
        return self.sums(y, z) + (y.sin() * z.cos()).mean() + self.sums(z, x)


def test_gradients_of_an_island_are_memory_of_their_own():
    """Others are added to them in place."""
    pair = both(lambda: Summed().double(), sgd())
    pair.further((X,))
    agree(pair)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


CHANGES = {
    "another layer": lambda m: setattr(m.inside, "layer", nn.Linear(4, 4)),
    "another class": lambda m: setattr(m.inside, "layer", Doubled(4, 4)),
    "several": lambda m: setattr(m.inside, "layer", nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4))),
    "wrapped": lambda m: setattr(m.inside, "layer", nn.Sequential(m.inside.layer, nn.Tanh())),
    "by its dict": lambda m: m.inside._modules.update(act=nn.ReLU()),
    "another weight": lambda m: setattr(m.inside.layer, "weight", nn.Parameter(torch.randn(4, 4))),
    "no bias": lambda m: setattr(m.inside.layer, "bias", None),
    "the island": lambda m: setattr(m, "inside", Noted()),
    "none": lambda m: setattr(m, "inside", nn.Linear(4, 4)),
    "forward": lambda m: setattr(m.inside.layer, "forward", lambda x: x * 3),
    "a hook": lambda m: m.inside.layer.register_forward_hook(lambda module, args, y: y * 3),
}


class Noted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        return self.act(self.layer(x)) * float(np.sign(x.detach().numpy().sum() + 100))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.inside = nn.Linear(4, 4), Noted()

    def forward(self, x):
        return self.inside(self.before(x)).square().mean()


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_are_replaced_between_calls(change):
    """In an island as elsewhere: the new one computes, and trains."""
    model, like = twins(Around)
    ways = [(m, torch.optim.AdamW(m.parameters(), lr=0.1)) for m in (model, like)]
    step, forward = mycel.train_step(model, ways[0][1]), mycel.jit(model)
    for i in range(3):
        if i == 1:
            for m, optimizer in ways:
                torch.manual_seed(5)
                known = set(m.parameters())
                CHANGES[change](m.double())
                new = [p for p in m.double().parameters() if p not in known]
                if new:
                    optimizer.add_param_group({"params": new})
        ways[1][1].zero_grad()
        wanted = like(X)
        wanted.backward()
        torch.testing.assert_close(forward(X), wanted)
        ways[1][1].step()
        torch.testing.assert_close(step(X), wanted)
    same(model.state_dict(), like.state_dict())


class Again(torch.autograd.Function):
    """Keeps the module, not what it computed: backward runs it again, with the weights the module has then."""

    @staticmethod
    def forward(ctx, module, x, *weights):
        ctx.module = module
        ctx.save_for_backward(x, *weights)
        return module(x)

    @staticmethod
    def backward(ctx, g):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grads = torch.autograd.grad(ctx.module(x), (x, *weights), g, allow_unused=True)
        return (None, *grads)


class Scaled(nn.Module):
    """Made in forward: one of its weights is a parameter, the other computed."""

    def __init__(self, weight, scale):
        super().__init__()
        self.weight, self.scale = weight, scale

    def forward(self, x):
        return (x * self.weight).sin() * self.scale


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        scaled = Scaled(self.weight, self.layer(x).tanh())
        return mycel.island(lambda x: Again.apply(scaled, x, scaled.weight, scaled.scale))(x).square().mean()


def test_what_the_backward_of_an_island_reads_is_what_its_forward_read():
    model, twin = twins(Recomputed)
    loss = twin(X)
    loss.backward()
    wanted = {k: p.grad for k, p in twin.named_parameters()}
    same(mycel.value_and_grad(lambda x: model(x), wrt=model)(X), (loss.detach(), wanted))
    mycel.jit(model)(X).backward()
    same({k: p.grad for k, p in model.named_parameters()}, wanted)


def own_gradient(net, x):
    """Gradients that the code takes itself, as numbers."""
    with torch.enable_grad():
        grads = torch.autograd.grad(net(x).square().sum(), tuple(net.parameters()))
    return sum(g.detach().square().sum() for g in grads)


@pytest.mark.parametrize("grad", [True, False])
def test_an_island_that_takes_a_gradient_itself_finds_parameters_that_ask_for_one(grad):
    def loss(net, x):
        with torch.set_grad_enabled(grad):
            scale = mycel.island(own_gradient)(net, x)
        return (net(x) * scale).square().mean()

    net, twin = twins(lambda: nn.Linear(4, 3))
    with torch.set_grad_enabled(grad):
        scale = own_gradient(twin, X)
    wanted = (twin(X) * scale).square().mean()
    wanted.backward()
    grads = {k: p.grad for k, p in twin.named_parameters()}
    same(mycel.value_and_grad(lambda x: loss(net, x), wrt=net)(X), (wanted.detach(), grads))
    mycel.jit(loss)(net, X).backward()
    same({k: p.grad for k, p in net.named_parameters()}, grads)


class Later(Again):
    """Its backward is an island, in which a parameter is both what was saved and what the module holds."""

    @staticmethod
    def backward(ctx, g):
        x, *weights = ctx.saved_tensors
        return (None, *mycel.island(Later.gradients)(ctx.module, x, g, tuple(weights)))

    @staticmethod
    def gradients(module, x, g, weights):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(module(x), (x, *weights), g, allow_unused=True)


def test_a_parameter_that_a_function_saves_is_that_of_its_module():
    model, twin = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    loss = Later.apply(twin, X, *twin.parameters()).square().mean()
    loss.backward()
    wanted = {k: p.grad for k, p in twin.named_parameters()}

    def ours(x):
        return Later.apply(model, x, *model.parameters()).square().mean()

    same(mycel.value_and_grad(ours, wrt=model)(X), (loss.detach(), wanted))
    result = mycel.jit(ours)(X)
    gc.collect()  # the graph alone holds what was captured
    result.backward()
    same({k: p.grad for k, p in model.named_parameters()}, wanted)
