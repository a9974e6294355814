"""Steps in 16 bits stay within the noise of torch's autocast; steps whose gradients are not finite change nothing at
all."""

import copy
import importlib

import pytest
import torch
from models import gpt2, llama
from stepping import adam, adamw, bitwise, both, cross_entropy, frozen_copy, mlp, plain_loss, rows, sgd
from test_step import image, small_vit, text
from torch import nn

import mycel

MODELS = {
    "llama": (lambda: llama(num_hidden_layers=2), text),
    "gpt2": (lambda: gpt2(n_layer=2), text),
    "vit": (small_vit, image),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 30
SEEDS = 4  # of fewer, chance decides: losses drift apart by what AdamW makes of the last digit


def autocast_curve(model, batches, dtype):
    """torch's own loop in this precision (None: fp32), its loss scaled where that is half."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for i in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = plain_loss(model, batches(i), None)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return torch.tensor(losses)


NEAR = {"bf16": 1.5, "fp16": 2.0}


class Layer(nn.Module):
    """Two products and a row are added: the gradients of their biases are one value, or views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.row = nn.Parameter(torch.zeros(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.left(nn.functional.gelu(y)) + self.right(y.tanh()) + self.row


def noise_of(name, precision, **settings):
    """How far from fp32: ours and autocast's, on the mean over a few seeds and thirty steps; and the steps that each
    skipped."""
    make, batches = MODELS[name]
    ours, noise = [], []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        models = [make()]
        models += [copy.deepcopy(models[0]) for _ in range(2)]

        def shifted(i, seed=seed):
            return batches(100 * seed + i)

        exact = autocast_curve(models[0], shifted, None)
        noise.append((autocast_curve(models[1], shifted, DTYPES[precision]) - exact).abs().mean())
        step = mycel.train_step(
            models[2],
            torch.optim.AdamW(models[2].parameters(), lr=1e-3),
            precision=precision,
            compile=False,
            **settings,
        )
        curve = torch.stack([step(**shifted(i)) for i in range(STEPS)])
        assert curve.dtype == torch.float32
        assert all(p.dtype == torch.float32 for p in models[2].parameters())
        assert all(v.dtype == torch.float32 for s in step.optimizer.state.values() for v in s.values()), (
            "weights and their moments stay in fp32"
        )
        ours.append((curve - exact).abs().mean())
    return torch.stack(ours).mean().item(), torch.stack(noise).mean().item()


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_sixteen_bits_are_near_to_fp32_as_autocast_is(name, precision):
    """Within one and a half times its noise (fp16, whose noise is tiny: twice), over a few seeds."""
    ours, noise = noise_of(name, precision)
    assert ours <= NEAR[precision] * noise


@pytest.mark.parametrize("precision", DTYPES)
def test_sixteen_bits_in_parts(precision):
    ours, noise = noise_of("llama", precision, accumulate=2)
    assert ours <= NEAR[precision] * noise


def test_the_loss_scale_grows_and_shrinks_as_gradscaler_does(monkeypatch):
    """Half after a skipped step, twice after an interval of good ones."""
    monkeypatch.setattr(importlib.import_module("mycel.transform.optimise"), "INTERVAL", 3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    pair = both(mlp, sgd(), cross_entropy, precision="fp16")
    for i, factor in enumerate((1, 1, 1, 1, 1e9, 1, 1, 1, 1, 1e9, 1e9, 1, 1, 1)):
        x, y = rows(i)
        pair.step(x * factor, y)
        pair.plain.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(pair.twin(x * factor), y)
        scaler.scale(loss).backward()
        scaler.step(pair.plain)
        scaler.update()
        assert pair.step.counters()["loss_scale"].item() == scaler.get_scale(), f"step {i}"
    assert pair.step.skipped >= 3


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_gradients_in_the_same_memory_are_scaled_once(kind, accumulate):
    """However many groups update what they belong to: torch's kernels write back what they divide."""

    def groups(names):
        def make(model):
            each = [[p for n, p in model.named_parameters() if name in n] for name in names]
            return getattr(torch.optim, kind)([{"params": params} for params in each], lr=0.1)

        return make

    ours = []
    for names in ([""], ["norm", "left", "right", "row"]):
        make = lambda: nn.Sequential(*(Layer() for _ in range(4)))
        pair = both(make, groups(names), cross_entropy, precision="fp16", accumulate=accumulate)
        gen = torch.Generator().manual_seed(0)
        losses = [pair.step(torch.randn(6, 8, generator=gen), torch.randint(8, (6,), generator=gen)) for _ in range(3)]
        assert any(len({*block.outputs}) < len(block.outputs) for block in pair.step.program.blocks.values())
        ours.append([*losses, *(p.detach() for p in pair.model.parameters())])
    assert all(map(torch.equal, *ours))


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"accumulate": 2}], ids=str)
def test_an_overflow_in_half_skips_the_step_and_recovers(settings):
    """A scale so large that the gradients of half precision overflow: it halves until they do not."""
    pair = both(mlp, adam(), cross_entropy, precision="fp16", **settings)
    x, y = rows(0)
    pair.step(x, y)
    state = pair.step.counters()
    pair.step.set_counters({**state, "loss_scale": torch.tensor(2.0**24)})
    before = frozen_copy(pair.model, pair.optimizer)
    scale, skipped = 2.0**24, 0
    while True:
        pair.step(x, y)
        if pair.step.skipped == skipped:
            break
        skipped, scale = skipped + 1, scale / 2
        assert pair.step.skipped == skipped
        assert pair.step.counters()["loss_scale"].item() == scale
        assert bitwise(frozen_copy(pair.model, pair.optimizer), before), "a skipped step changes nothing"
    assert skipped >= 1
    assert not bitwise(frozen_copy(pair.model, pair.optimizer), before), "and training goes on"


def test_the_loss_scale_leaves_gradients_as_they_are():
    """clip_norm and grad_norm are those of the gradients, not of the scaled ones."""
    norms = []
    for precision in ("fp32", "fp16"):
        pair = both(mlp, sgd(), cross_entropy, precision=precision, clip_norm=0.1)
        pair.step(*rows(0))
        norms.append(pair.step.grad_norm)
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-2, atol=0)


# -- what is not finite is skipped


class Normed(nn.Module):
    """A model with statistics, and a count of its calls."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return self.body(x)


FORMS = [
    {},
    {"clip_norm": 0.5},
    {"accumulate": 2},
    {"accumulate": 4, "clip_norm": 0.5},
    {"precision": "bf16"},
    {"precision": "fp16"},
]


@pytest.mark.parametrize("settings", FORMS, ids=str)
@pytest.mark.parametrize("optimizer", [adamw(amsgrad=True), sgd(momentum=0.9)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(bad, optimizer, settings):
    pair = both(Normed, optimizer, cross_entropy, **settings)
    for i in range(6):
        x, y = rows(i)
        if i in (2, 3):
            x[-1, 2] = bad
        before = frozen_copy(pair.model, pair.optimizer)
        loss = pair.step(x, y)
        changed = not bitwise(frozen_copy(pair.model, pair.optimizer), before)
        assert changed == (i not in (2, 3)), f"step {i}"
        assert loss.isfinite() == (i not in (2, 3)), "the loss is what it is"
    assert pair.step.skipped == 2


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}], ids=str)
def test_a_batch_without_tokens_is_skipped(settings):
    """All labels ignored: the mean of nothing is NaN."""
    pair = both(lambda: llama(num_hidden_layers=1), adamw(), **settings)
    batch = text(0)
    pair.step(**batch)
    before = frozen_copy(pair.model, pair.optimizer)
    assert pair.step(**{**batch, "labels": torch.full_like(batch["labels"], -100)}).isnan()
    assert pair.step.skipped == 1
    assert bitwise(frozen_copy(pair.model, pair.optimizer), before)


def first_is_bad(optimizer):
    """A curve whose first step is skipped, beside torch's without that step."""
    pair = both(mlp, optimizer, cross_entropy)
    x, y = rows(0)
    pair.step(x * float("nan"), y)
    for i in range(1, 6):
        pair.further(rows(i))
    for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_first_step_that_is_skipped_is_as_if_it_had_not_been():
    for momentum in ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}, {}):
        first_is_bad(sgd(**momentum))
    first_is_bad(adam())
    first_is_bad(adamw(amsgrad=True))


def test_the_count_of_skipped_steps_is_kept():
    pair = both(mlp, sgd(), cross_entropy, precision="fp16")
    x, y = rows(0)
    pair.step(x * float("inf"), y)
    other = both(mlp, sgd(), cross_entropy, precision="fp16").step
    other.set_counters(pair.step.counters())
    assert other.skipped == 1
    other(x, y)
    assert other.counters()["loss_scale"].item() == 2.0**15
    assert pair.step.skipped == 1, "a loaded state is a copy"
