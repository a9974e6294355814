"""The law of a training step: it is the plain PyTorch loop, for every model, optimiser, clipping, accumulation and
grouping of parameters."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from models import VOCAB, bert, gpt2, llama
from stepping import adam, adamw, agree, beside, both, cross_entropy, mlp, plain_step, rows, sgd
from torch import nn
from torch._inductor import config

import mycel
from mycel import transform

# -- models: fifty steps, a new batch each, parts of a batch with unequal counts


def text(i):
    """Four texts; a different number of tokens counts in each."""
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(3, VOCAB, (4, 10), generator=g)
    labels = ids.clone()
    for row, ignored in enumerate((0, 7, 3, 9)):
        labels[row, :ignored] = -100
    return {"input_ids": ids, "labels": labels}


def masked(i):
    """Texts with a padding mask, of which a few tokens count; no token of the last one does."""
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(3, VOCAB, (4, 10), generator=g)
    labels = torch.where(torch.rand(4, 10, generator=g) < 0.3, ids, -100)
    labels[0, 0], labels[3] = ids[0, 0], -100
    mask = torch.ones(4, 10, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def image(i):
    g = torch.Generator().manual_seed(i)
    return {"pixel_values": torch.randn(4, 3, 16, 16, generator=g), "labels": torch.randint(0, 2, (4,), generator=g)}


def small_vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ViTForImageClassification(
        ViTConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, image_size=16, patch_size=8)
    )


MODELS = {
    "llama": (lambda: llama(num_hidden_layers=2), text),
    "llama tied": (lambda: llama(num_hidden_layers=2, tie_word_embeddings=True), text),
    "gpt2": (lambda: gpt2(n_layer=2), text),
    "bert": (bert, masked),
    "vit": (small_vit, image),
}


def grouped(model):
    """Weights decay, biases and norms do not and learn faster; the first weight is frozen."""
    params = list(model.parameters())
    params[1].requires_grad_(False)
    flat = [p for p in params if p.ndim < 2]
    deep = [p for p in params if p.ndim >= 2]
    return torch.optim.AdamW(
        [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-3
    )


FORMS = {
    "plain": (adamw(lr=1e-3), {}),
    "clipped": (adamw(lr=1e-3, weight_decay=0.1), {"clip_norm": 0.5}),
    "two parts, clipped": (sgd(lr=0.05, momentum=0.9, nesterov=True), {"accumulate": 2, "clip_norm": 1.0}),
    "four parts in groups": (grouped, {"accumulate": 4}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_fifty_steps_are_those_of_pytorch(name, form):
    make, batches = MODELS[name]
    optimizer, settings = FORMS[form]
    pair = agree(beside(make, optimizer, batches, steps=50, **settings))
    assert pair.step.skipped == 0
    assert len(pair.step.entries) == 1, "compiled once for all batches of one shape"


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}])
def test_a_large_vocabulary_is_trained_through_the_joined_head(settings):
    """Enough logits that the last product and its loss are one operator."""

    def batches(i):
        ids = torch.randint(3, 2048, (4, 20), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": torch.where(ids % 3 == 0, -100, ids)}

    for model in (
        lambda: llama(num_hidden_layers=1, vocab_size=2048),
        lambda: llama(num_hidden_layers=1, vocab_size=2048, tie_word_embeddings=True),
    ):
        pair = agree(beside(model, adamw(lr=1e-3), batches, steps=8, clip_norm=1.0, **settings))
        assert "linear_cross_entropy" in str(pair.step.program)


# -- optimisers: torch's, with all of their options

OPTIMISERS = {
    "sgd": sgd(),
    "sgd decay": sgd(weight_decay=0.1),
    "sgd momentum": sgd(momentum=0.9),
    "sgd nesterov": sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd dampening": sgd(momentum=0.9, dampening=0.5),
    "sgd maximize": sgd(lr=1e-3, momentum=0.9, weight_decay=0.1, maximize=True),
    "adam": adam(),
    "adam decay": adam(weight_decay=0.1),
    "adam amsgrad": adam(amsgrad=True),
    "adam maximize": adam(lr=1e-3, weight_decay=0.1, maximize=True),
    "adamw": adamw(betas=(0.8, 0.95), eps=1e-6),
    "adamw amsgrad": adamw(weight_decay=0.2, amsgrad=True),
    "adamw maximize": adamw(lr=1e-3, maximize=True),
    "adamw with lr a tensor": adamw(lr=torch.tensor(0.01)),
    "adamw fused": adamw(fused=True),
    "adamw foreach": adamw(foreach=True),
}


@pytest.mark.parametrize(
    "settings", [{}, {"clip_norm": 0.1}, {"accumulate": 2}, {"accumulate": 4, "clip_norm": 0.2}], ids=str
)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser(name, settings):
    pair = agree(beside(mlp, OPTIMISERS[name], rows, cross_entropy, steps=20, **settings), params=1e-6)
    ours, wanted = pair.optimizer.state_dict(), pair.plain.state_dict()
    assert ours["state"].keys() == wanted["state"].keys()
    for k, state in wanted["state"].items():
        assert ours["state"][k].keys() == state.keys()
        for slot, value in state.items():
            torch.testing.assert_close(ours["state"][k][slot], value, rtol=1e-4, atol=1e-6)
    assert ours["param_groups"] == wanted["param_groups"]


def test_the_norm_of_the_gradients_is_reported_before_clipping():
    for settings in ({}, {"clip_norm": 0.1}, {"accumulate": 4}):
        pair = beside(mlp, sgd(), rows, cross_entropy, steps=1, **settings)
        norm = torch.nn.utils.get_total_norm([p.grad for p in pair.twin.parameters()])
        if "clip_norm" not in settings:
            torch.testing.assert_close(pair.step.grad_norm, norm)
        else:
            assert norm <= 0.1001 < pair.step.grad_norm


class Odd(nn.Module):
    """Parameters of all kinds: a number, a transposed one, none at all, one nobody uses, wide ones."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(5, 6).t())
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.unused = nn.Parameter(torch.ones(3))
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x):
        return (x @ self.turned * self.number + self.nothing.sum() + self.wide).float()


@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "clip_norm": 0.2}], ids=str)
@pytest.mark.parametrize("optimizer", [adamw(weight_decay=0.1), sgd(momentum=0.9, weight_decay=0.1)])
def test_odd_parameters(optimizer, settings):
    pair = agree(beside(Odd, optimizer, rows, cross_entropy, **settings), params=1e-6)
    assert bool((pair.model.unused == 1).all()), "what the loss does not use does not decay either"


@pytest.mark.parametrize("dtype, size", [(torch.float32, 1e21), (torch.float64, 1e41)])
def test_large_finite_gradients_are_no_reason_to_skip(dtype, size):
    def batches(i):
        x, y = rows(i)
        return x.to(dtype), y

    agree(
        beside(
            lambda: mlp().to(dtype), sgd(lr=0.1 / size), batches, lambda out, y: cross_entropy(out, y) * size, steps=3
        )
    )


# -- accumulation: the loss and gradient of the whole batch, whatever the loss is

WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.3, 0.7])
W = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


def mean_of_kept(out, y):
    keep = y >= 0
    return (cross_entropy(out, y.clamp(min=0), reduction="none") * keep).sum() / keep.sum()


LOSSES = {
    "mean": cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "smoothed": lambda out, y: cross_entropy(out, y, label_smoothing=0.1),
    "weighted": nn.CrossEntropyLoss(weight=WEIGHT),
    "weighted and smoothed": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2),
    "nll": lambda out, y: F.nll_loss(F.log_softmax(out, -1), y),
    "mean of what counts": mean_of_kept,
    "mean of all": lambda out, y: (out - y[:, None]).square().mean() * 1e-4,
    "two terms": lambda out, y: cross_entropy(out, y) + 0.1 * out.square().mean() - 0.2 * mean_of_kept(out, y) / 3,
    "times a tensor": lambda out, y: cross_entropy(out, y) * torch.tensor(2.0) / torch.tensor(3.0),
}
LOSSES |= {
    "sum": lambda out, y: cross_entropy(out, y, reduction="sum") * 0.1,
    "sum of squares": lambda out, y: (out - 1).square().sum() * 0.01,
    "Python's sum": lambda out, y: sum([cross_entropy(out, y), out.square().mean()]),
    "plus a number": lambda out, y: cross_entropy(out, y) + 1.0,
    "mean of a scalar": lambda out, y: cross_entropy(out, y).mean(),
    "another dtype": lambda out, y: cross_entropy(out, y).double(),
    "negated": lambda out, y: 1e-2 * cross_entropy(out, y).neg(),
    "count of at least one": lambda out, y: (
        (F.cross_entropy(out, y.clamp(min=0), reduction="none") * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1)
    ),
    "mean and sum": lambda out, y: cross_entropy(out, y) + 1e-3 * out.square().sum(),
    "mean of sums": lambda out, y: out.square().sum(1).mean(),
}
LOSSES |= {
    "sum over rows": lambda out, y: out.square().sum() / len(out),
    "sum of shares": lambda out, y: (out.square() / len(out)).sum(),
    "losses over rows": lambda out, y: cross_entropy(out, y, reduction="sum") / y.numel(),
    "mean over the batch": lambda out, y: F.kl_div(
        out.log_softmax(-1), torch.full_like(out, 0.2), reduction="batchmean"
    ),
}


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("error")
def test_parts_give_the_loss_of_the_whole_batch(name, parts):
    agree(beside(mlp, sgd(), rows, LOSSES[name], accumulate=parts), params=1e-5)


NO_SUMS = {
    "stacked": lambda out, y: torch.stack([cross_entropy(out, y), out.square().mean()]).sum(),
    "clamped": lambda out, y: cross_entropy(out, y).clamp(max=100.0),
    "root": lambda out, y: mean_of_kept(out, y).sqrt(),
    "norm": lambda out, y: out.norm(),
    "worst": lambda out, y: out.square().max(),
}


@pytest.mark.parametrize("name", NO_SUMS)
@pytest.mark.filterwarnings("error")
def test_a_loss_that_is_no_sum_over_the_batch_is_that_of_all_of_it(name):
    agree(beside(mlp, sgd(), rows, NO_SUMS[name], accumulate=2), params=1e-5)


@pytest.mark.parametrize("count", [5, torch.tensor(5)])
def test_parts_with_the_count_of_the_whole_batch_given(count):
    """As Hugging Face's models take num_items_in_batch."""

    def loss(out, y, n):
        return cross_entropy(out, y, reduction="sum") / n

    agree(beside(mlp, sgd(), lambda i: (*rows(i), count), loss, accumulate=2), params=1e-5)


class Lookup(nn.Module):
    """Features beside rows of a table that is an argument."""

    def __init__(self, look_up):
        super().__init__()
        self.look_up, self.up, self.down = look_up, nn.Linear(6 + 3, 8), nn.Linear(8, 5)

    def forward(self, x, ids, table):
        return self.down(self.up(torch.cat([x, self.look_up(ids, table)], -1)).tanh())


def test_what_is_as_long_as_the_batch_by_chance_is_given_to_each_part():
    """Class weights, scales of features, tables, also in front of what has rows; and what a loss mixes has rows."""

    def weighed(out, y, weight):
        return cross_entropy(out, y, weight=weight)

    agree(beside(mlp, sgd(), lambda i: (*rows(i, 5), WEIGHT), weighed, accumulate=5), params=1e-5)

    def scaled(out, y, scale):
        return cross_entropy(out * scale, y)

    agree(beside(mlp, sgd(), lambda i: (*rows(i, 5), WEIGHT), scaled, accumulate=5), params=1e-5)

    def mixed(model, x, y, ids, table):
        return cross_entropy(model(x, ids, table), y)

    def mixed_table_first(model, table, ids, x, y):
        return cross_entropy(model(x, ids, table), y)

    for length in (6, 4):
        table = torch.randn(length, 3, generator=torch.Generator().manual_seed(3))
        ids = torch.tensor([3, 0, 1, 1, 2, 3])

        def batches(i, ids=ids, table=table):
            x, y = rows(i, 6)
            return x, y, ids, table

        def table_first(i, ids=ids, table=table):
            x, y = rows(i, 6)
            return table, ids, x, y

        looked_up = (lambda ids, table: table[ids], F.embedding)
        orders = ((mixed, batches), (mixed_table_first, table_first))
        for look_up, (loss, given) in itertools.product(looked_up, orders):
            pair = both(functools.partial(Lookup, look_up), sgd(), loss, accumulate=3)
            for i in range(3):
                ours = pair.step(*given(i)).item()
                pair.plain.zero_grad()
                value = loss(pair.twin, *given(i))
                value.backward()
                pair.plain.step()
                assert ours == pytest.approx(value.item(), rel=1e-5)


def test_what_is_looked_up_in_may_be_the_batch():
    """Mixup; and features that meet the batch's in a product alone are rows, too."""

    def mixed(x, y, permutation, share):
        out = (torch.lerp(x, x[permutation], share) @ W).log_softmax(-1)
        return F.nll_loss(out, y[permutation]) + F.nll_loss(out, y)

    def met(x, y):
        return cross_entropy(x @ y.T, torch.arange(len(x)))

    def at_own_place(x, actions, y):
        return (x[torch.arange(len(x)), actions] * y).mean()

    def pooled(ids, x):  # as CLIP takes the features at the end of each text
        features = W[:, ids % 3].movedim(0, -1)
        return met(features[torch.arange(len(ids)), ids.argmax(-1)], x)

    x, y = rows(0, 6)
    mixing = mycel.capture(mixed, x, y.clamp(min=0), torch.randperm(6), torch.tensor(0.3))
    meeting = mycel.capture(met, x, x.flip(0))
    placing = mycel.capture(at_own_place, x, torch.zeros(6, dtype=torch.long), torch.ones(6))
    pooling = mycel.capture(pooled, torch.randint(0, 3, (6, 4)), torch.randn(6, len(W)))
    for program in (mixing, meeting, placing, pooling):
        names = [v.name for v in program.inputs_of("batch")]
        assert transform.without_rows(program, names) == set()


def test_what_is_not_a_batch_is_given_to_each_part():
    def loss(out, y, weight, factor):
        return cross_entropy(out * factor, y, weight=weight)

    agree(beside(mlp, sgd(), lambda i: (*rows(i), WEIGHT, torch.tensor(0.5)), loss, accumulate=4), params=1e-5)


def test_parts_of_a_loss_times_a_tensor_of_the_batch():
    def loss(out, y, factor):
        return cross_entropy(out, y) * factor

    agree(beside(mlp, sgd(), lambda i: (*rows(i), torch.tensor(0.5)), loss, accumulate=4), params=1e-5)


# -- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "precision": "bf16", "clip_norm": 1.0}], ids=str)
def test_compiled_steps_are_those_of_pytorch(settings):
    """In fp32 the same curve; in bf16 what torch's compiler rounds differently stays within its own noise."""
    bf16 = settings.get("precision") == "bf16"
    with config.patch(compile_threads=4):  # at once, on whatever machine
        pair = beside(lambda: llama(num_hidden_layers=2), adamw(lr=1e-3), text, steps=10, compile=True, **settings)
    agree(pair, *((5e-3, 1e-2) if bf16 else ()))
    blocks = pair.step.entries[0].code.blocks
    assert blocks and all(block.checked for block in blocks.values()), "something was compiled, and ran"


def test_a_plain_step_leaves_out_what_is_not_finite():
    """The law's other side, so that it can fail."""
    model = mlp()
    before = [p.clone() for p in model.parameters()]
    x, y = rows(0)
    plain_step(model, torch.optim.SGD(model.parameters(), lr=0.1), (x * float("nan"), y), cross_entropy)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
