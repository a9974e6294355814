"""Every optimiser is torch's: alone, on simulated ranks, on real ones; its state is torch's own and survives another
mesh."""

from __future__ import annotations

import functools
import inspect
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import part_of, place, together
from distributing import OneDevice, compared, random_plan, start_values, tensors
from optimising import CASES, ONE_EACH, SPREAD, rows, small, trained
from stepping import Both, agree, beside, bitwise, both, frozen_copy, plain_step

import mycel
from examples import parse_example
from mycel.ir import Mesh
from mycel.launch import launch
from mycel.message_state import MessageState
from mycel.ops.optimisers import OPTIMISERS
from mycel.parts import ShardedModel
from mycel.plan import Plan
from mycel.run.checkpoint import Saver, load_parts
from mycel.run.shards import read_manifest
from mycel.train import state

PLANS = [
    Plan(Mesh(dp=2), batch=["dp"]),
    Plan(Mesh(dp=2), batch=["dp"], zero=1, over=("dp",)),
    Plan(Mesh(dp=2, tp=2), {"up.weight": ["tp", "-"], "down.weight": ["-", "tp"]}, ["dp"], zero=3, over=("dp",)),
    Plan(Mesh(tp=4), {"up.weight": ["-", "tp"], "down.weight": ["tp", "-"]}, []),
    Plan(Mesh(dp=3), batch=["-"], zero=2, over=("dp",)),  # nothing divides
]


def pair(name: str, **settings) -> Both:
    return beside(lambda: small(name), lambda m: CASES[name](trained(m)), rows, steps=4, **settings)


def same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Each tensor of state, of the same name, has the same values."""
    held, wanted = (optimizer.state_dict()["state"] for optimizer in (ours, theirs))
    assert held.keys() == wanted.keys()
    for i, mine in held.items():
        other = wanted[i]
        assert mine.keys() == other.keys()
        for slot in mine:
            torch.testing.assert_close(
                mine[slot], torch.as_tensor(other[slot], dtype=mine[slot].dtype), rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("name", CASES, ids=str)
def test_four_steps_are_torchs(name):
    both = agree(pair(name), loss=1e-9, params=1e-9)
    same_state(both.optimizer, both.plain)


@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
@pytest.mark.filterwarnings("error:.*runs as it is")
def test_options_of_how_torch_computes_are_known(option):
    """The update stays part of the program and is the same: on a CPU torch itself has no steps that can be captured."""
    kinds = {"AdamW": {"amsgrad": True}, "Adam": {}, "SGD": {"momentum": 0.9}, "RMSprop": {"centered": True}}
    kinds |= {name: {} for name in ("NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "Rprop")}
    tried = [name for name in kinds if option in inspect.signature(getattr(torch.optim, name)).parameters]
    assert len(tried) > 2
    for name in tried:
        make = lambda m, **more: getattr(torch.optim, name)(trained(m), **kinds[name], **more)
        lr = torch.tensor(0.02) if option != "foreach" and name in ("Adam", "AdamW") else 0.02
        both_ = both(lambda: small(""), lambda m: make(m, lr=lr, **{option: True}))
        both_.plain = make(both_.twin, lr=0.02)
        for i in range(4):
            both_.further(rows(i))
        agree(both_, loss=1e-6, params=1e-6)
        assert len(both_.step.entries) == 1 and both_.step.updating.by_rule
        assert both_.optimizer.state_dict()["state"][0].keys() == both_.plain.state_dict()["state"][0].keys()


@pytest.mark.parametrize("name", ONE_EACH.values(), ids=ONE_EACH)
def test_clipping_and_parts_of_a_batch(name):
    """The norm that gradients are clipped by is a number in fp32."""
    agree(pair(name, clip_norm=0.1, accumulate=2), loss=1e-6, params=1e-6)


@pytest.mark.parametrize("name", ONE_EACH.values(), ids=ONE_EACH)
def test_plain_torch_goes_on_where_a_step_stopped_and_back(name):
    both = pair(name)
    for i in range(4, 8):
        both.losses.append(plain_step(both.model, both.optimizer, rows(i)))
        both.wanted.append(plain_step(both.twin, both.plain, rows(i)))
    both.further(rows(9))
    agree(both, loss=1e-9, params=1e-9)


@pytest.mark.parametrize("name", ONE_EACH.values(), ids=ONE_EACH)
def test_a_skipped_step_changes_nothing(name):
    both = pair(name)
    before = frozen_copy(both.model, both.optimizer)
    batch = rows(0)
    both.step(batch["x"] * torch.inf, batch["y"])
    assert both.step.skipped == 1 and bitwise(before, frozen_copy(both.model, both.optimizer))


@pytest.mark.parametrize("name", ONE_EACH.values(), ids=ONE_EACH)
def test_hyper_parameters_are_read_at_every_step(name):
    def change(i, model, optimizer):
        optimizer.param_groups[0].update(lr=0.01 * (i + 1), weight_decay=0.05 * i)

    both = agree(pair(name, change=change), loss=1e-9, params=1e-9)
    assert len(both.step.entries) == 1


@pytest.mark.parametrize("name", ONE_EACH.values(), ids=ONE_EACH)
def test_the_code_needs_torch_alone(name):
    """The rule stands in the source, as a function of torch's."""
    source = pair(name).step.source
    kept = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert kept == ["import math", "import torch"]


# without a fused kernel of torch's
BY_RULE = [known.op for known in OPTIMISERS.values() if isinstance(known.op.inplace, functools.partial)]


@pytest.mark.parametrize("op", BY_RULE, ids=repr)
def test_16_bits_are_updated_in_32_and_rounded_once(op):
    example = parse_example(op.examples[0])
    narrow = [x.to(torch.bfloat16) if isinstance(x, torch.Tensor) and x.ndim else x for x in example.make("f32")]
    wide = [x.float() if isinstance(x, torch.Tensor) and x.ndim else x for x in narrow]
    for got, want in zip(op.kernel(*narrow, **example.params), op.kernel(*wide, **example.params), strict=True):
        # a last bit: sums in another order
        torch.testing.assert_close(got.float(), want.to(got.dtype).float(), rtol=2**-8, atol=0)


# -- on ranks --------------------------------------------------------------------------------------------------------


def ready(name: str) -> tuple[OneDevice, list[torch.Tensor]]:
    """A step on one device after two of its kind, and the inputs of the third."""
    model = small(name)
    optimizer = CASES[name](trained(model))
    step = mycel.train_step(model, optimizer, compile=False, clip_norm=0.5)
    for i in range(2):
        step(**rows(i))
    one = OneDevice.of(model, rows(2), optimizer, clip_norm=0.5)
    kept = {}
    for bound in one.unsharded.groups:
        kept |= zip(bound.group.state_roles(), bound.state(optimizer, {}, torch.device("cpu")), strict=True)
        kept |= {
            role: torch.as_tensor(x, dtype=torch.float64)
            for role, x in zip(bound.group.hyper_roles(), bound.hyper(optimizer), strict=True)
        }
    program = one.unsharded.program
    given = zip(program.inputs, start_values(one), strict=True)
    return one, [kept.get(program.role(v), x) for v, x in given]


@pytest.mark.parametrize("written", PLANS, ids=lambda p: f"{p.mesh} zero{p.zero}")
@pytest.mark.parametrize("name", SPREAD.values(), ids=SPREAD)
def test_simulated_ranks_take_the_step_of_one_device(name, written):
    one, values = ready(name)
    compared(one.unsharded.program, one.under(written), written.mesh, values)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SPREAD.values(), ids=SPREAD)
def test_under_any_plan(name, seed):
    one, values = ready(name)
    written = random_plan(tensors(one.model), 1, random.Random(seed), most=8)
    compared(one.unsharded.program, one.under(written), written.mesh, values)


def test_in_two_processes(tmp_path):
    child = str(Path(__file__).parent / "optimisers_child.py")
    assert (
        launch([], 2, program=[child], env={"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}, logs=tmp_path / "logs") == 0
    )


# -- checkpoints -----------------------------------------------------------------------------------------------------


def held(name: str, written: Plan, one: OneDevice) -> SimpleNamespace:
    """What a run holds under a plan, as far as `train.state` asks."""
    parts = ShardedModel(one.model, one.optimizer, written)
    parts.given(one.unsharded)
    step = SimpleNamespace(parts=parts, counters=dict, messages=MessageState(parts))
    return SimpleNamespace(module=one.model, optimizer=one.optimizer, step=step)


@pytest.mark.parametrize("name", ["Adafactor", "Adagrad", "NAdam", "Muon"])
@pytest.mark.parametrize("before, after", [(2, 3), (3, 1), (4, 2)])
def test_state_saved_under_one_mesh_is_loaded_under_another(name, before, after):
    one, _ = ready(ONE_EACH[name])
    whole = state.tensors(held(name, PLANS[before], one), [], [])
    old, new = (held(name, PLANS[i], one) for i in (before, after))
    lain = state.layouts(old, whole)
    mesh = PLANS[before].mesh
    assert any(
        len(layout.dims) > 1 and not layout.is_whole for k, (layout, _) in lain.items() if k.startswith("optimizer.")
    )
    with place() as folder:

        def save(ranks):
            with Saver(folder, asynchronous=False, ranks=ranks) as saver:
                mine = {
                    k: part_of(x.detach(), lain[k][0], mesh, ranks.rank) if k in lain else x.detach()
                    for k, x in whole.items()
                }
                saver.save(1, mine, {}, layouts=lain)
            assert saver.poll() == []
            return saver.last

        (path,) = set(together(mesh, save))
        wanted = state.wanted(new, read_manifest(path))
        for rank in range(PLANS[after].mesh.world):
            loaded = load_parts(path, wanted, PLANS[after].mesh, rank)
            for k, x in whole.items():
                assert torch.equal(loaded[k], part_of(x.detach(), wanted[k][0], PLANS[after].mesh, rank)), k
        split = [k for k in whole if k.startswith("optimizer.") and not wanted[k][0].is_whole]
        assert split or PLANS[after].zero == 0


def test_every_optimiser_is_tried():
    tried = {name.partition("{")[0] for name in CASES}
    assert tried == {
        name for known in OPTIMISERS.values() for name in known.classes if known.foreign or hasattr(torch.optim, name)
    }
