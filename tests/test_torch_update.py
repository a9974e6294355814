"""Steps whose update torch takes: any optimiser, hooks on gradients; and gradients that a step leaves in p.grad."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from distributing import OneDevice, step_equals
from golden import golden
from optimising import EightBit, Lion, Shampoo, Whitened, rows, small, trained
from stepping import agree, beside, both, cross_entropy, mlp, plain_step
from stepping import rows as batches
from torch import nn

import mycel
from mycel.errors import PlanError, TrainError
from mycel.ir import Mesh, Role
from mycel.plan import Plan
from mycel.torch_update import refuse_split


class Own(torch.optim.AdamW):
    """Overrides the update."""

    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.mul_(0.999)


class Slowed(torch.optim.SGD):
    """Overrides the update by itself."""

    def step(self, closure=None):
        super().step()


class Renamed(torch.optim.AdamW):
    """Overrides nothing of the update."""

    def __init__(self, params, **more):
        super().__init__(params, lr=0.02, **more)


class Warmup:
    """Holds an optimiser, and changes its learning rate before each step."""

    def __init__(self, optimizer):
        self.inner, self.steps = optimizer, 0

    @property
    def param_groups(self):
        return self.inner.param_groups

    def zero_grad(self, set_to_none):
        self.inner.zero_grad(set_to_none)

    def step(self):
        self.steps += 1
        for group in self.inner.param_groups:
            group["lr"] = 0.02 / self.steps
        self.inner.step()


class Rising(torch.optim.SGD):
    """Changes the learning rate, then takes torch's step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.steps
        super().step(closure)


class Alternating:
    """Holds two, which take turns."""

    def __init__(self, params):
        self.parts = [torch.optim.Adam(params[::2], lr=0.02), torch.optim.SGD(params[1::2], lr=0.02)]
        self.steps = 0

    @property
    def param_groups(self):
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none):
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self):
        self.parts[self.steps % 2].step()
        self.steps += 1


class OwnSchedule:
    """Holds an optimiser, but takes no step of it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] *= 0.5


AS_IT_IS = {
    "a wrapper": lambda ps: Warmup(torch.optim.Adam(ps)),
    "a wrapper of a wrapper": lambda ps: Warmup(Warmup(torch.optim.SGD(ps, momentum=0.9))),
    "a wrapper of several": lambda ps: Alternating([*ps]),
    "a subclass that changes the learning rate": lambda ps: Rising(ps, lr=0.02, momentum=0.9),
    "one's own": Whitened,
    "Shampoo, with groups": lambda ps: Shampoo([{"params": [*ps][:2]}, {"params": [*ps][2:], "lr": 0.01, "every": 1}]),
    "state in 8 bits": EightBit,
    "a subclass with its own update": lambda ps: Own(ps, lr=0.02),
    "an option no rule knows": lambda ps: Lion(ps, lr=0.02, use_triton=True),
    "a class without what its name promises": lambda ps: type("Lion", (Whitened,), {})(ps),
}
QUIET = pytest.mark.filterwarnings("ignore:.*runs as it is")


@QUIET
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "clip_norm": 0.1}], ids=str)
@pytest.mark.parametrize("make", AS_IT_IS.values(), ids=AS_IT_IS)
def test_any_optimiser_takes_the_steps_it_would_in_plain_torch(make, settings):
    pair = beside(lambda: small(""), lambda m: make(trained(m)), rows, steps=4, **settings)
    agree(pair, loss=1e-9, params=1e-9)
    assert all(p.grad is None for p in pair.model.parameters()) and not pair.step.updating.by_rule


OF_LIBRARIES = {
    "torchao.optim": lambda of, ps: of.AdamW8bit(ps, lr=0.02, block_size=64),
    "bitsandbytes": lambda of, ps: of.optim.AdamW8bit(ps, lr=0.02, min_8bit_size=64),
    "torch_optimizer": lambda of, ps: of.Shampoo(ps, lr=0.02),
    "pytorch_optimizer": lambda of, ps: of.SOAP(ps, lr=0.02),
    "accelerate": lambda of, ps: of.Accelerator(cpu=True).prepare(torch.optim.AdamW(ps, lr=0.02)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", OF_LIBRARIES)
def test_optimisers_of_libraries_where_they_are_installed(library, tmp_path):
    """They take their own steps, and go on from a checkpoint."""
    of = pytest.importorskip(library)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4))

    def batch(i: int) -> list[torch.Tensor]:
        return [*torch.randn(16, 68, generator=torch.Generator().manual_seed(i)).split([64, 4], 1)]

    make = lambda model: OF_LIBRARIES[library](of, model.parameters())
    model, twin, other = net(), net(), net()
    step, again = (mycel.train_step(m, make(m), loss=nn.functional.mse_loss) for m in (model, other))
    plain = make(twin)
    for i in range(4):
        if i == 2:
            step.save(tmp_path)
            again.load(tmp_path)
        plain.zero_grad()
        x, y = batch(i)
        loss = nn.functional.mse_loss(twin(x), y)
        loss.backward()
        plain.step()
        assert float(step(x, y)) == pytest.approx(loss.item(), rel=1e-6)
        if i >= 2:
            assert float(again(x, y)) == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dict(other.state_dict()), dict(twin.state_dict()), rtol=1e-5, atol=1e-5)


@QUIET
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_it_is_the_update_of_the_program(precision):
    """The loss scale is taken off before anyone sees a gradient."""
    plain, own = (
        beside(
            mlp,
            lambda m, kind=kind: kind(m.parameters(), lr=0.1, momentum=0.9),
            batches,
            cross_entropy,
            steps=4,
            precision=precision,
            clip_norm=0.5,
            grads=True,
        )
        for kind in (torch.optim.SGD, Slowed)
    )
    assert plain.step.updating.by_rule and not own.step.updating.by_rule
    assert own.losses == pytest.approx(plain.losses, rel=1e-5)
    for p, q in zip(own.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_a_subclass_that_keeps_the_update_is_part_of_the_program():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = beside(lambda: small(""), lambda m: Renamed(trained(m), amsgrad=True, fused=False), rows, steps=3)
    agree(pair, loss=1e-9, params=1e-9)
    assert "adam(" in str(pair.step.program)


@QUIET
def test_a_skipped_step_does_not_reach_the_optimiser():
    pair = both(lambda: small(""), lambda m: Whitened(trained(m)))
    before = [p.detach().clone() for p in pair.model.parameters()]
    batch = rows(0)
    pair.step(batch["x"] * torch.inf, batch["y"])
    assert pair.step.skipped == 1 and not pair.optimizer.state
    assert all(torch.equal(p, q) for p, q in zip(pair.model.parameters(), before, strict=True))


def test_it_is_said_once():
    pair = both(lambda: small(""), lambda m: Whitened(trained(m)))
    with pytest.warns(UserWarning) as caught:
        for i in range(2):
            pair.step(**rows(i))
        pair.step(**{k: x[:4] for k, x in rows(2).items()})
    assert len(caught) == 1 and caught[0].filename == __file__
    golden("told_as_it_is", str(caught[0].message))


def test_of_an_optimiser_of_torchs_with_a_hook_it_is_said_which_hook_keeps_it_out():
    pair = both(lambda: small(""), lambda m: torch.optim.SGD(trained(m), lr=0.1))
    pair.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.warns(UserWarning) as caught:
        pair.step(**rows(0))
    told = "torch.optim.SGD runs as it is, on gradients that the step returns: it has a hook on its step; "
    assert [str(w.message) for w in caught] == [f"{told}an update inside of the program is faster"]


class Sharpness(torch.optim.SGD):
    """Asks for a closure only when it steps."""

    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("Sharpness requires closure")


class Curvature(torch.optim.SGD):
    """Differentiates gradients."""

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        torch.autograd.grad([p.grad for p in params], params, [torch.ones_like(p) for p in params])


@QUIET
def test_messages():
    model = nn.Linear(2, 2)
    texts = []
    for make in (torch.optim.LBFGS, torch.optim.SparseAdam, lambda ps: list(ps),
                 lambda ps: ps, lambda ps: torch.optim.AdamW, lambda ps: None):  # fmt: skip
        with pytest.raises(TrainError) as refused:
            mycel.train_step(model, make(model.parameters()))
        texts.append(str(refused.value))
    for kind in (Sharpness, Curvature):
        step = mycel.train_step(model, kind(model.parameters(), lr=0.1), loss=nn.functional.mse_loss)
        with pytest.raises(TrainError) as refused:
            step(torch.ones(2, 2), torch.ones(2, 2))
        texts.append(str(refused.value))
    optimizer = Whitened(model.parameters())
    for plan, split in ((Plan(Mesh(tp=2)), ["weight"]), (Plan(Mesh(dp=2), batch=["dp"], zero=1, over=("dp",)), [])):
        with pytest.raises(PlanError) as plain:
            refuse_split(optimizer, "Mycel has no rule for it", plan, split)
        texts.append(str(plain.value))
    golden("refusal_optimizers", "\n\n".join(texts))


# -- hooks -----------------------------------------------------------------------------------------------------------


@QUIET
@pytest.mark.parametrize("kind", ["gradient", "accumulated", "step"])
def test_hooks_see_and_change_what_they_would_in_torch(kind):
    calls: list[str] = []

    def halved(p: torch.Tensor) -> None:
        calls.append("seen")
        p.grad.mul_(0.5)

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(trained(model), lr=0.02)
        match kind:
            case "gradient":
                model.up.weight.register_hook(lambda g: calls.append("seen") or g * 0.5)
            case "accumulated":
                model.up.weight.register_post_accumulate_grad_hook(halved)
            case "step":
                optimizer.register_step_post_hook(lambda *a: calls.append("seen"))
        return optimizer

    agree(beside(lambda: small(""), hooked, rows, steps=3, clip_norm=0.1), loss=1e-6, params=1e-6)
    assert len(calls) == 6 or kind == "gradient"  # which is captured


@QUIET
@pytest.mark.parametrize("kind", ["accumulated", "step"])
def test_hooks_may_come_and_go_between_steps(kind):
    calls: list[int] = []
    pair = both(lambda: small(""), lambda m: torch.optim.SGD(trained(m), lr=0.02))

    def change(i: int) -> None:
        if i == 1 and kind == "accumulated":
            hooks.append(pair.model.up.weight.register_post_accumulate_grad_hook(lambda p: calls.append(i)))
        if i == 1 and kind == "step":
            hooks.append(pair.optimizer.register_step_pre_hook(lambda *_: calls.append(i)))
        if i == 3:
            hooks.pop().remove()

    hooks: list[Any] = []
    for i in range(4):
        change(i)
        pair.step(**rows(i))
        assert len(calls) == (0, 1, 2, 2)[i]


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: its weight is complex."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, 3, dtype=torch.complex128))
        self.head = nn.Linear(2, 2).double()

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        low = torch.zeros_like(spectrum)
        low[:, :, :3] = torch.einsum("bik,iok->bok", spectrum[:, :, :3], self.weight)
        return self.head(torch.fft.irfft(low, n=x.shape[-1]).transpose(1, 2)).square().mean()


@QUIET
def test_complex_parameters_are_torchs_to_change():
    def batch(i: int):
        return {"x": torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i))}

    agree(
        beside(Spectral, lambda m: torch.optim.AdamW(m.parameters(), lr=0.02), batch, steps=3, clip_norm=0.5),
        loss=1e-9,
        params=1e-9,
    )


# -- gradients that are left, clipping by value ------------------------------------------------------------------------


def gradients(model: nn.Module, batch) -> dict[str, torch.Tensor]:
    loss = model(**batch)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


@QUIET
@pytest.mark.parametrize("make", [lambda ps: torch.optim.AdamW(ps, lr=0.02), Whitened], ids=["rule", "as it is"])
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.1}, {"clip_value": 0.05}], ids=str)
def test_gradients_are_left_as_clipped(make, clip):
    pair = both(lambda: small(""), lambda m: make(trained(m)), grads=True, **clip)
    for i in range(2):
        wanted = gradients(pair.model, rows(i))
        params = [nn.Parameter(torch.zeros_like(g)) for g in wanted.values()]
        for p, g in zip(params, wanted.values(), strict=True):
            p.grad = g.clone()
        if "clip_norm" in clip:
            nn.utils.clip_grad_norm_(params, clip["clip_norm"])
        if "clip_value" in clip:
            nn.utils.clip_grad_value_(params, clip["clip_value"])
        pair.step(**rows(i))
        for p, q in zip(pair.model.parameters(), params, strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-9)


def test_clipping_by_value_is_torchs():
    model, twin = small(""), small("")
    step = mycel.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), compile=False, clip_value=0.02
    )
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for p in twin.parameters():
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
    for i in range(4):
        assert abs(float(step(**rows(i))) - plain_step(twin, plain, rows(i))) < 1e-9


@pytest.mark.parametrize(
    "written",
    [
        Plan(Mesh(dp=2, tp=2), {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}, ["dp"], zero=3, over=("dp",)),
        Plan(Mesh(dp=3), batch=["dp"], zero=2, over=("dp",)),  # nothing divides
    ],
    ids=lambda p: f"{p.mesh} zero{p.zero}",
)
def test_gradients_of_ranks_lie_as_their_parameters(written):
    one = OneDevice.of(small(""), rows(0), grads=True, clip_value=0.05)
    laid = step_equals(one, written)
    by_role = {laid.whole.role(v): layout for v, layout in zip(laid.whole.inputs, laid.inputs, strict=True)}
    assert by_role[Role("gradient", of="up.weight")] == by_role[Role("parameter", "up.weight")]


# -- several optimisers ----------------------------------------------------------------------------------------------


def matrices_apart(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.05)]


def test_several_optimisers_take_one_step():
    model, twin = small(""), small("")
    mine, plain = matrices_apart(model), matrices_apart(twin)
    step = mycel.train_step(model, mine, compile=False)
    schedules = [torch.optim.lr_scheduler.LinearLR(each[0], 0.5, total_iters=3) for each in (mine, plain)]
    for i in range(4):
        if i == 2:  # state goes out and in
            step.load_state_dict(copy.deepcopy(step.state_dict()))
        for each in plain:
            each.zero_grad()
        wanted = twin(**rows(i))
        wanted.backward()
        for each in plain:
            each.step()
        assert abs(float(step(**rows(i))) - wanted.item()) < 1e-9
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-9, atol=1e-9)
    assert mine[0].state[model.up.weight].keys() == {"momentum_buffer"} and step.updating.by_rule


@QUIET
def test_one_of_several_that_runs_as_it_is_takes_all_along():
    model, twin = small(""), small("")
    split = lambda m: ([m.up.weight], [p for p in m.parameters() if p is not m.up.weight])
    mine, plain = ([Whitened(a), torch.optim.SGD(b, lr=0.1)] for a, b in map(split, (model, twin)))
    step = mycel.train_step(model, mine, compile=False)
    for i in range(3):
        for each in plain:
            each.zero_grad()
        loss = twin(**rows(i))
        loss.backward()
        for each in plain:
            each.step()
        assert abs(float(step(**rows(i))) - loss.item()) < 1e-9
    with pytest.raises(TrainError, match="share a parameter"):
        mycel.train_step(model, [Whitened(model.parameters()), torch.optim.SGD(model.parameters())])


@QUIET
def test_a_wrapper_keeps_its_optimisers_state():
    model = small("")
    inner = torch.optim.Adam(model.parameters())
    step = mycel.train_step(model, Warmup(inner))
    step(**rows(0))
    state = step.state_dict()
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.02 and len(inner.state) == len(state["optimizer"]["state"])
    step(**rows(1))
    step.load_state_dict(state)
    assert inner.param_groups[0]["lr"] == 0.02
    assert all(
        torch.equal(inner.state[p]["exp_avg"], state["optimizer"]["state"][i]["exp_avg"])
        for i, p in enumerate(model.parameters())
    )


@QUIET
def test_a_wrapper_beside_an_optimiser():
    def make(m):
        first, *rest = trained(m)
        return [Warmup(torch.optim.Adam([first])), torch.optim.SGD(rest, lr=0.02)]

    model, twin = small(""), small("")
    twin.load_state_dict(model.state_dict())
    step, ours = mycel.train_step(model, make(model)), make(twin)
    for i in range(3):
        loss = twin(**rows(i))
        loss.backward()
        for each in ours:
            each.step()
        twin.zero_grad()
        assert step(**rows(i)).item() == pytest.approx(loss.item(), abs=1e-9)


def test_what_holds_no_optimiser_or_takes_no_step_is_refused():
    model = small("")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TrainError, match="which is a scheduler"):
        mycel.train_step(model, torch.optim.lr_scheduler.StepLR(sgd, 1))
    with pytest.raises(TrainError, match=r"an object with a step\(\) that holds one"):
        mycel.train_step(model, object())
    with pytest.raises(TrainError, match=r"SparseAdam needs sparse gradients.*\n.*torch.optim.Adam"):
        mycel.train_step(model, Warmup(torch.optim.SparseAdam(list(model.parameters()))))
    with pytest.raises(TrainError, match=r"OwnSchedule.step\(\) took no step"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mycel.train_step(model, OwnSchedule(sgd))(**rows(0))
