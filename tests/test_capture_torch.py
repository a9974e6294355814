"""What torch's own machinery does inside captured code: contexts, transforms, factories, constants, caches."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from models import same, state
from test_capture import X, agrees
from test_capture_modules import rand
from torch import nn
from torch.utils.checkpoint import checkpoint

import mycel
from mycel.ir import walk


def test_no_grad_inside():
    def fn(x):
        with torch.no_grad():
            y = x * 2
        with torch.inference_mode(False), torch.enable_grad(), torch.set_grad_enabled(True):
            return y + x

    agrees(fn, X)
    assert any(e.op.name == "stop_gradient" for _, e in walk(mycel.capture(fn, X)))

    @torch.no_grad()
    def whole(x):
        return x * 2

    agrees(whole, X)


def test_autocast_inside():
    layer = nn.Linear(3, 3)

    def fn(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
            with torch.autocast("cpu", enabled=False):
                z = layer(y.float())
            w = F.softmax(y @ y.T, -1)
        return y, z, w, layer(x)

    agrees(fn, X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        agrees(layer, X)


def test_autocast_around_is_another_signature():
    layer = nn.Linear(3, 3)
    fast = mycel.jit(layer)
    same(fast(X), layer(X))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(fast(X), layer(X))
        same(mycel.jit(layer)(X), layer(X))
    same(fast(X), layer(X))
    assert len(fast.entries) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside(reentrant):
    layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) for _ in range(3)])

    def fn(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    agrees(fn, X.clone().requires_grad_())
    assert sum(e.op.name == "call" for _, e in walk(mycel.capture(fn, X))) == 3


def test_functional_call_inside():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def fn(weights, x):
        return torch.func.functional_call(model, weights, (x,))

    weights = {k: v.detach() * 2 for k, v in model.named_parameters()}
    wanted = copy.deepcopy(model)
    fast = mycel.jit(fn)
    same(fast(weights, X), torch.func.functional_call(wanted, weights, (X,)))
    assert "0.weight" in dict(model.named_parameters())
    same(state(model), state(wanted))


def test_vmap_inside():
    weight = rand(4, 3)
    agrees(lambda x: torch.vmap(lambda row: torch.softmax(weight @ row, 0) + row.sum())(x), X)
    agrees(lambda x: torch.vmap(torch.vmap(torch.sin))(x), X)
    agrees(lambda x, y: torch.vmap(torch.dot, in_dims=(0, None))(x, y), X, X[0])


def test_function_transforms_inside():
    agrees(lambda x: torch.func.grad(lambda y: (y.sin() * y).sum())(x), X)
    agrees(lambda x: torch.func.vmap(torch.func.grad(lambda r: (r**3).sum()))(x), X)


def test_gradients_of_torch_inside():
    def fn(x):
        y = x.detach().clone().requires_grad_()
        return torch.autograd.grad((y**3).sum(), y)[0]

    agrees(fn, X)
    with pytest.raises(mycel.CaptureError, match="depends on nothing that requires a gradient"):
        mycel.jit(lambda x: x.sum().backward())(X)


def test_autograd_functions_inside():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    agrees(lambda x: Double.apply(x) + 1, X)


def test_meta_models_are_captured_without_allocating():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.BatchNorm1d(1 << 20), nn.Dropout())
    x = torch.empty(4, 1 << 20, device="meta")
    program = mycel.capture(model, x)
    assert program.inputs[1].shape == (1 << 20, 1 << 20)
    real = mycel.capture(model, torch.empty(4, 1 << 20))
    assert [(e.op, e.params) for e in real.main.eqns] == [(e.op, e.params) for e in program.main.eqns]
    assert mycel.jit(model).program(x).inputs == program.inputs


def test_named_results_of_torch():
    def fn(x):
        top = x.topk(2)
        high, low = torch.max(x, 1), torch.sort(x, descending=True)
        return (
            top.values + low.values[:, :2],
            top.indices,
            high.values,
            high,
            torch.linalg.qr(x).Q,
            torch.frexp(x).mantissa,
            x.median(1),
        )

    agrees(fn, X)


def test_factories_follow_the_default_dtype_and_device():
    def fn(x):
        tensors = [
            torch.zeros(2),
            torch.tensor([1.5, 2]),
            torch.arange(3),
            torch.linspace(0, 1, 3),
            torch.eye(2),
            x.new_full((2,), 3),
        ]
        tensors += [
            torch.tensor(True),
            torch.as_tensor(2.5),
            torch.asarray([1, 2]),
            torch.empty(0),
            torch.tril_indices(2, 2),
        ]
        return [*tensors, torch.full((2,), 1), torch.Tensor([1, 2])]

    agrees(fn, X)


def test_distributions_inside():
    def fn(x):
        normal = torch.distributions.Normal(x, 1.0)
        entropy = torch.distributions.Categorical(logits=x).entropy()
        return normal.log_prob(x + 1), entropy, torch.distributions.kl_divergence(normal, normal)

    agrees(fn, X)


def test_decisions_on_numbers_with_known_bounds():
    """Layers dropped with probability 0 or 1, and counts of indices."""

    def fn(x):
        for probability in (0.0, 1.0):
            if torch.rand([]) < probability:
                x = x + 1
            if not torch.rand([]) >= probability:
                x = x * 2
        return x, torch.bincount(x.topk(2).indices.reshape(-1), minlength=3)

    agrees(fn, X)


def test_einops_like_and_tensor_methods():
    def fn(x):
        y = torch.einsum("ij,kj->ik", x, x)
        z = x.unfold(1, 2, 1).flatten(1).roll(1, 1).repeat(2, 1).tile(1, 2)
        return y, z, x.T, x.size(), len(x), x.dim(), x.is_floating_point(), [r.sum() for r in x]

    agrees(fn, X)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool])
def test_numbers_and_lists_in_subscripts_are_constants(dtype):
    """Not tensors that torch makes of them on the host, unseen, and that a GPU's kernel cannot read."""

    def put(x, mask):
        y = x.clone()
        y[1] = 2.7
        y[mask] = 3
        y[:, None, 0] = True
        y[[0, 1], [1, 2]] = -4
        return y, x[[1, 0]], x[:, [2, 0]], x[[True, False]], x[[[0, 1], [1, 0]], 1]

    x, mask = torch.randn(2, 3).to(dtype), torch.tensor([[True, False, False], [False, False, True]])
    assert [v.name for v in mycel.capture(put, x, mask).inputs] == ["x", "mask"]
    for mine, theirs in zip(mycel.jit(put)(x, mask), put(x, mask), strict=True):
        assert torch.equal(mine, theirs)


def test_factories_that_write_into_a_tensor():
    agrees(lambda x: x @ torch.eye(3, out=torch.empty_like(x[:1] * torch.ones(3, 1))), X[:, :3])
    agrees(lambda x: x + torch.arange(3, out=torch.empty(3, dtype=x.dtype)), X[:, :3])


def caught_view(x):
    try:
        return x.view(3, 5)
    except RuntimeError:
        return x.reshape(-1) * 2


def caught_product(x):
    try:
        y = x @ x
    except RuntimeError:
        y = x @ x.t()
    return y


def caught_strides(x):
    try:
        return x.t().view(-1)
    except RuntimeError:
        return x.reshape(-1) * 3


@pytest.mark.parametrize("fn", [caught_view, caught_product, caught_strides])
def test_what_torch_refuses_may_be_caught(fn):
    fast = mycel.jit(fn)
    same(fast(X), fn(X))
    with pytest.raises(RuntimeError):
        mycel.jit(lambda x: x.view(3, 5))(X)


def test_a_number_made_on_the_host_is_one_of_the_program():
    """As in a model's layer drop on a GPU: torch mixes tensors without dims, of whichever device they are."""

    def drop(x):
        return x * torch.full([], 2.0, device="cpu") + (torch.rand([], device="cpu") < 0.5)

    program = mycel.capture(drop, torch.empty(2, 3, device="meta"))
    assert [v.type.shape for v in program.results] == [(2, 3)]
    with pytest.raises(mycel.CaptureError, match="made on cpu in a program on meta"):
        mycel.capture(lambda x: x + torch.ones(3, device="cpu"), torch.empty(2, 3, device="meta"))


@functools.cache
def ramp(n: int) -> torch.Tensor:
    return torch.arange(n) / n


TABLES: dict[int, torch.Tensor] = {}


class Caches(nn.Module):
    """Keeps what it computes once: under functools.cache, in a property, in a dict outside, by a hook."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), {}
        self.linear.register_forward_hook(lambda module, args, out: FEATURES.update(out=out))

    @functools.cached_property
    def scale(self):
        return torch.linspace(1, 2, 4)

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def mask(self, n):
        return torch.ones(n, n).tril()

    def forward(self, x):
        if len(x) not in TABLES:
            TABLES[len(x)] = torch.arange(len(x)).float()
        y = self.linear(x) * ramp(4) * self.scale * self.mask(len(x))[0, 0]
        return y * TABLES[len(x)][:, None] + FEATURES["out"]


FEATURES: dict[str, torch.Tensor] = {}


def test_caches_of_tensors():
    """What is kept while code is captured is right in what is captured or computed next."""
    torch.manual_seed(0)
    model = Caches()
    twin, fast = copy.deepcopy(model), mycel.jit(model)
    for rows in (3, 2, 3):
        x = rand(rows, 4)
        got = fast(x)
        TABLES.pop(rows, None)
        same(got, twin(x))
        assert all(type(v) is torch.Tensor for v in (*TABLES.values(), *FEATURES.values(), ramp(4), model.mask(2)))


class Ramps(nn.Module):
    """Reads a constant that it makes itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        mask = torch.ones(4, 4).tril()
        scale = torch.full((), 3).item() if mask.sum() > 3 else 1
        return (self.linear(x) @ mask * torch.arange(4) * scale).square().mean()


def test_constants_have_values_under_a_device_that_has_none():
    with torch.device("meta"):
        model = Ramps()
        step = mycel.train_step(model, torch.optim.SGD(model.parameters(), 0.1), compile=False, strict=True)
        text = str(step.unsharded(torch.empty(2, 4)).program)
    assert "const(" in text and "cond(" not in text


def test_nothing_is_scattered_where_a_mask_holds_nowhere():
    x, mask = rand(3, 4), torch.zeros(3, 4, dtype=torch.bool)
    agrees(lambda x: x.masked_scatter(mask, x[mask] * 2) + 1, x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.hann_window(8),
        lambda: torch.hamming_window(8, periodic=False, dtype=torch.float64),
        lambda: torch.blackman_window(8),
        lambda: torch.bartlett_window(8),
        lambda: torch.kaiser_window(8, True, 5.0),
        lambda: torch.signal.windows.gaussian(8, std=2.0),
        lambda: torch.signal.windows.general_cosine(8, a=[0.5, 0.3]),
        lambda: torch.fft.fftfreq(8) + torch.fft.rfftfreq(14),
        lambda: torch.tril_indices(4, 4)[0, :8].double() + torch.triu_indices(4, 4)[1, :8],
        lambda: torch.logspace(0, 2, 8),
    ],
)
def test_what_is_made_of_numbers_alone(make):
    agrees(lambda x: x[0, 0] * make(), X)


def test_sizes_that_are_tensors_are_read():
    """torch reads an integer of a 0-dim tensor where it asks for a size; of the batch that is a fact."""

    def narrowed(x, mask):
        n = mask.sum()
        return x.narrow(1, n, x.size(1) - n) * 2 + n

    run, x = mycel.jit(narrowed, strict=True), rand(3, 4)
    for mask in (torch.tensor([1, 0, 0]), torch.tensor([1, 1, 0])):
        torch.testing.assert_close(run(x, mask), narrowed(x, mask))
