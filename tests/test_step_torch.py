"""torch's own objects stay usable around a step: optimisers, schedulers, the model itself, and torch's random
numbers."""

import copy
import warnings

import pytest
import torch
from models import gpt2, llama
from stepping import adam, adamw, agree, beside, bitwise, both, cross_entropy, frozen_copy, mlp, plain_step, rows, sgd
from test_step import text
from torch import nn
from torch.optim import lr_scheduler

import mycel

# -- the optimiser's state

OPTIMISERS = [
    sgd(),
    sgd(momentum=0.9, dampening=0.3),
    sgd(momentum=0.9, nesterov=True),
    adam(weight_decay=0.1),
    adamw(amsgrad=True),
]


@pytest.mark.parametrize("optimizer", OPTIMISERS)
def test_plain_torch_goes_on_where_a_step_stopped_and_back(optimizer):
    """steps of ours, then optimizer.step() of torch on the same objects, then ours again"""
    pair = both(mlp, optimizer, cross_entropy)
    for i in range(12):
        if i % 6 < 3:
            pair.further(rows(i))
        else:
            pair.losses.append(plain_step(pair.model, pair.optimizer, rows(i), cross_entropy))
            pair.wanted.append(plain_step(pair.twin, pair.plain, rows(i), cross_entropy))
    agree(pair, params=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMISERS)
def test_a_saved_state_continues_in_a_fresh_torch_optimiser(optimizer):
    pair = beside(mlp, optimizer, rows, cross_entropy, steps=4)
    fresh = mlp()
    fresh.load_state_dict(pair.model.state_dict())
    other = optimizer(fresh)
    other.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
    for i in range(4, 8):
        pair.further(rows(i))
        loss = plain_step(fresh, other, rows(i), cross_entropy)
        assert loss == pytest.approx(pair.losses[-1], rel=1e-5)
    agree(pair, params=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMISERS)
def test_loading_a_state_midway_goes_back_to_it_bitwise(optimizer):
    pair = beside(mlp, optimizer, rows, cross_entropy, steps=3)
    saved = frozen_copy(pair.model, pair.optimizer)
    first = [pair.step(*rows(i)).item() for i in range(3, 7)]
    pair.model.load_state_dict(saved[0])
    pair.optimizer.load_state_dict(saved[1])
    assert [pair.step(*rows(i)).item() for i in range(3, 7)] == first
    assert len(pair.step.entries) == 1, "nothing is compiled again"


# -- schedulers ------------------------------------------------------------------------------------------------------

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, cycle_momentum="momentum" in o.defaults),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


@pytest.mark.parametrize("optimizer", [sgd(momentum=0.9), adamw(), adamw(lr=torch.tensor(0.01))])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, optimizer):
    """Hyper-parameters are read at every step; nobody warns of an order of calls; nothing is compiled again."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")
        pair = both(mlp, optimizer, cross_entropy)
        plans = [SCHEDULERS[name](o) for o in (pair.optimizer, pair.plain)]
        for i in range(10):
            pair.further(rows(i))
            for plan in plans:
                plan.step(*([round(pair.wanted[-1], 3)] if name == "plateau" else []))
    agree(pair, params=1e-5)
    assert len(pair.step.entries) == 1


# -- changes on the way


def by_hand(i, model, optimizer):
    group = optimizer.param_groups[0]
    group["lr"], group["weight_decay"] = 0.01 * (i + 1), 0.01 * i
    if "betas" in group:
        group["betas"], group["eps"] = (0.9 - 0.02 * i, 0.99), 1e-8 * (i + 1)
    else:
        group["momentum"], group["dampening"] = 0.9 if 2 < i < 6 else 0.0, 0.1 * (i % 3)


def freeze(i, model, optimizer):
    model[0].weight.requires_grad_(i < 3)


def thaw(i, model, optimizer):
    model[0].weight.requires_grad_(i >= 3)


def flip(i, model, optimizer):
    optimizer.param_groups[0]["maximize"] = i % 3 == 2


def disturb(i, model, optimizer):
    with torch.no_grad():
        model[0].weight.mul_(1.01)
        model[2].bias.data = torch.full((5,), float(i))


def swap_head(i, model, optimizer):
    if i == 4:
        torch.manual_seed(5)
        model[2] = nn.Linear(8, 5)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})


def decouple(i, model, optimizer):
    optimizer.param_groups[0]["decoupled_weight_decay"] = i >= 3


@pytest.mark.parametrize(
    "optimizer", [sgd(momentum=0.9, weight_decay=0.1), adam(weight_decay=0.1), adamw()], ids=["sgd", "adam", "adamw"]
)
@pytest.mark.parametrize("change", [by_hand, freeze, thaw, flip, disturb, swap_head])
def test_changes_on_the_way(change, optimizer):
    agree(beside(mlp, optimizer, rows, cross_entropy, change=change), params=1e-5)


def test_decay_is_decoupled_on_the_way():
    agree(beside(mlp, adam(weight_decay=0.2), rows, cross_entropy, change=decouple), params=1e-5)


def test_a_group_added_on_the_way():
    def add(i, model, optimizer):
        if i == 4:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05, "weight_decay": 0.3})

    agree(
        beside(mlp, lambda m: torch.optim.Adam(m[2].parameters(), lr=0.01), rows, cross_entropy, change=add),
        params=1e-5,
    )


def test_batches_of_other_shapes_and_dtypes():
    pair = agree(beside(mlp, adamw(), lambda i: rows(i, 8 + 4 * (i % 3)), cross_entropy, accumulate=4), params=1e-5)
    assert len(pair.step.entries) == 3, "compiled once for each shape"


def test_a_last_batch_that_is_smaller_takes_part():
    """The last one used is tried first: order of entries does not matter."""
    sizes = [8, 8, 8, 6, 8, 6]
    agree(beside(mlp, sgd(momentum=0.9), lambda i: rows(i, sizes[i]), cross_entropy, steps=6), params=1e-5)


# -- the model -------------------------------------------------------------------------------------------------------


def test_the_model_is_trained_in_place():
    """generate, eval and state_dict see the trained weights; they are the same tensors."""
    pair = both(lambda: llama(num_hidden_layers=1), adamw(lr=0.05))
    held = {k: v.data_ptr() for k, v in pair.model.state_dict().items()}
    kept = pair.model.state_dict()
    prompt = torch.tensor([[5, 6, 7]])
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for i in range(6):
        pair.further(text(0))
        if i == 3:
            pair.model.eval()
            assert torch.equal(pair.model.generate(prompt, **settings), pair.twin.eval().generate(prompt, **settings))
            pair.model.train()
            pair.twin.train()
    agree(pair)
    assert {k: v.data_ptr() for k, v in pair.model.state_dict().items()} == held
    assert bitwise(kept, pair.model.state_dict())
    assert all(p.grad is None for p in pair.model.parameters())
    assert all(p.requires_grad and p.is_leaf for p in pair.model.parameters())


def test_preparing_changes_nothing():
    """Neither weights nor statistics, optimiser or random numbers; the first step is then the same as without."""
    losses = []
    for prepared in (False, True):
        pair = both(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5)),
            adamw(),
            cross_entropy,
        )
        torch.manual_seed(3)
        before = frozen_copy(pair.model, pair.optimizer, torch.get_rng_state())
        if prepared:
            pair.step.prepare(*rows(0))
            assert bitwise(frozen_copy(pair.model, pair.optimizer, torch.get_rng_state()), before)
        losses.append([pair.step(*rows(i)).item() for i in range(3)])
    assert losses[0] == losses[1]


def test_train_and_eval_mode_are_seen():
    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 5))

    agree(beside(make, sgd(), rows, cross_entropy, change=lambda i, m, o: m.train(i % 4 < 2)), params=1e-5)


def test_batch_norm_with_a_cumulative_average():
    agree(
        beside(
            lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 5)),
            sgd(),
            rows,
            cross_entropy,
        )
    )


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_sync_batch_norm_is_a_batch_norm(momentum):
    """Also where ranks are there, of which torch's own asks for GPUs; so under a mesh, whose program is the same."""

    def make(norm):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), norm(8, momentum=momentum), nn.Linear(8, 5))

    sync, plain = make(nn.SyncBatchNorm), make(nn.BatchNorm1d)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sync, plain)]
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        step = mycel.train_step(sync, optimizers[0], loss=cross_entropy, compile=False)
        for i in range(4):
            for m in (sync, plain):
                m.train(i < 3)
            wanted = plain_step(plain, optimizers[1], rows(i), cross_entropy)
            assert step(*rows(i)).item() == pytest.approx(wanted, rel=1e-5)
        same = [str(mycel.capture(m.train(), rows(0)[0])) for m in (sync, plain)]
    finally:
        torch.distributed.destroy_process_group()
    for name, value in sync.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert same[0] == same[1]


def test_tied_weights_stay_tied():
    pair = agree(beside(lambda: gpt2(n_layer=1), adamw(lr=1e-2), text, clip_norm=0.5))
    assert pair.model.lm_head.weight is pair.model.transformer.wte.weight
    assert torch.equal(pair.model.lm_head.weight, pair.model.transformer.wte.weight)


def test_hooks_of_forward_are_seen():
    def hooked():
        model = mlp()
        model[0].register_forward_hook(lambda m, i, out: out * 0.5)
        model[2].register_forward_pre_hook(lambda m, i: (i[0] + 1,))
        return model

    agree(beside(hooked, sgd(), rows, cross_entropy), params=1e-5)


@pytest.mark.parametrize(
    "kind", ["gradient of a parameter", "after accumulation", "backward of a module", "step of the optimiser"]
)
@pytest.mark.filterwarnings("ignore:.*runs as it is", "ignore:.*runs as plain Python")
def test_hooks_of_backward_are_called_or_refused(kind):
    import mycel

    calls = []
    pair = both(mlp, sgd(), cross_entropy)
    match kind:
        case "gradient of a parameter":
            pair.model[0].weight.register_hook(lambda g: calls.append(1))
        case "after accumulation":
            pair.model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
        case "backward of a module":
            pair.model[0].register_full_backward_hook(lambda m, i, o: calls.append(1))
        case "step of the optimiser":
            pair.optimizer.register_step_post_hook(lambda *a: calls.append(1))
    try:
        pair.step(*rows(0))
    except mycel.errors.MycelError:
        return
    assert calls


# -- random numbers --------------------------------------------------------------------------------------------------


def dropped(rate=0.5):
    return nn.Sequential(nn.Linear(6, 32), nn.Dropout(rate), nn.Linear(32, 5))


@pytest.mark.parametrize(
    "settings", [{}, {"accumulate": 4}, {"precision": "bf16"}, {"precision": "fp16", "accumulate": 2}], ids=str
)
def test_dropout_follows_the_seed(settings):
    curves = []
    for seed in (7, 7, 8):
        pair = both(dropped, sgd(), cross_entropy, **settings)
        torch.manual_seed(seed)
        curves.append([pair.step(*rows(i)).item() for i in range(4)])
    assert curves[0] == curves[1] != curves[2]


class Masked(nn.Module):
    """Its gradient shows how often each weight was let through."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(256))
        self.v = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return (nn.functional.dropout(x * self.w, 0.5) + self.v).mean()


@pytest.mark.parametrize("parts", [1, 4])
def test_masks_differ_between_rows_parts_and_steps(parts):
    pair = both(Masked, sgd(lr=256.0), accumulate=parts)
    torch.manual_seed(0)
    seen = []
    for _ in range(3):
        before = pair.model.w.detach().clone()
        pair.step(torch.ones(4, 256))
        seen.append(before - pair.model.w.detach())
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2]), "other masks at another step"
    for passed in seen:
        assert len(passed.unique()) == 5, (
            "each weight passes 0 to 4 times: with one mask for all rows or parts, never or always"
        )


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.act = nn.Parameter(torch.zeros(256)), nn.Sigmoid()

    def forward(self, x):
        return nn.functional.dropout(self.act(x) * self.w, 0.5)


class Outer(nn.Module):
    """The first part of the batch sees the inner dropout, the second one the outer."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.w = nn.Parameter(torch.zeros(256))

    def forward(self, x, first, second):
        return ((self.inner(x) * first) + nn.functional.dropout(x * self.w, 0.5) * second).sum()


def test_masks_of_different_places_in_different_parts_differ():
    pair = both(Outer, sgd(lr=1.0), accumulate=2)
    pair.step(torch.full((2, 256), 1.0), torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]]))
    assert not torch.equal(pair.model.inner.w.detach() != 0, pair.model.w.detach() != 0)


def test_one_parameter_in_parts():
    agree(beside(lambda: nn.Linear(6, 5, bias=False), sgd(), rows, cross_entropy, accumulate=2))


def test_the_gradient_of_dropout_uses_the_mask_of_forward():
    """loss = mean of dropout(x) * w: the gradient of w is what forward let through."""
    model = nn.Linear(32, 1, bias=False)
    nn.init.ones_(model.weight)

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(torch.nn.functional.dropout(x, 0.5)).mean()

    pair = both(Dropped, sgd(lr=1.0))
    before = pair.model.inner.weight.detach().clone()
    loss = pair.step(torch.ones(1, 32))
    assert loss.item() == pytest.approx((before - pair.model.inner.weight).sum().item(), rel=1e-5)
