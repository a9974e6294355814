"""Models made in their parts: each rank has, bit for bit, its part of what one device would have, and never much
more."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from mycel.ir import Mesh
from mycel.plan import Plan
from mycel.run import part_of
from mycel.train import models
from mycel.train.cutting import Cuts, outline

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 258,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 258,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 1,
    },
    "bert": SMALL,
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 258},
    "mamba": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 258},
    "qwen2_moe": {
        **SMALL,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
}
PLANS = {"zero3": {"dp": 3}, "zero3+tp": {"dp": 2, "tp": 2}}


def fresh(kind: str, device: str) -> nn.Module:
    return models._fresh(
        models._from_mapping({"model_type": kind, **FAMILIES[kind]})[0], torch.float32, torch.device(device), 3
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_parts_are_those_of_the_whole(kind):
    whole, drawn = fresh(kind, "cpu"), torch.get_rng_state()
    meta = outline(lambda: fresh(kind, "meta"))
    for plan, axes in PLANS.items():
        mesh = Mesh(axes)
        for rank in range(mesh.world):
            cuts = Cuts(meta, Plan.read(plan, mesh), mesh, rank)
            model = cuts.built(lambda: fresh(kind, "cpu"))
            for name, x in itertools.chain(
                whole.named_parameters(remove_duplicate=False), whole.named_buffers(remove_duplicate=False)
            ):
                assert torch.equal(attribute(model, name), part_of(x.detach(), cuts.layouts[name], mesh, rank)), name
            assert not cuts.notes and same_ties(model, whole)
    assert torch.equal(torch.get_rng_state(), drawn)


def attribute(module: nn.Module, name: str) -> torch.Tensor:
    above, _, last = name.rpartition(".")
    return getattr(module.get_submodule(above), last)


def same_ties(a: nn.Module, b: nn.Module) -> bool:
    groups = lambda module: [
        [n for n, y in module.named_parameters(remove_duplicate=False) if y is x] for x in module.parameters()
    ]
    return groups(a) == groups(b)


class Reads(nn.Module):
    """A constructor that asks for what it has made before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.b.weight.copy_(2 * self.a.weight)


def test_a_constructor_that_reads_what_it_made_is_told_and_right():
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Reads()

    mesh = Mesh(dp=2)
    for rank in range(2):
        cuts = Cuts(outline(Reads), Plan.read("zero3", mesh), mesh, rank)
        model, whole = cuts.built(make), make()
        assert "reads a parameter that it has made before" in cuts.notes[0]
        assert torch.equal(model.b.weight, 2 * model.a.weight) and torch.equal(
            model.a.weight, part_of(whole.a.weight, cuts.layouts["a.weight"], mesh, rank)
        )


def test_no_more_is_held_than_parts_and_the_largest_tensors():
    """Counted by torch's allocator, which reports to its profiler what it gives and takes back."""

    def made_of(layers: int) -> nn.Module:
        return nn.Sequential(*(nn.Linear(128, 128) for _ in range(layers)))

    mesh = Mesh(dp=4)
    for layers, stages in ((16, 1), (64, 1), (64, 4)):
        foreign = [f"{i}.{name}" for i in range(layers // stages, layers) for name in ("weight", "bias")]
        plan = Plan.read("zero3" if stages == 1 else {"mesh": {"dp": 4}}, mesh)
        cuts = Cuts(outline(lambda n=layers: made_of(n)), plan, mesh, 1, foreign)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            held = cuts.built(lambda n=layers: made_of(n))
        events = sorted(
            (e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"
        )
        most = max(itertools.accumulate(n for _, n in events))
        parts = sum(p.untyped_storage().nbytes() for p in held.parameters())
        assert parts <= layers // stages * 128 * 129 * 4 + 4 * len(foreign)  # of a parameter of another stage, a number
        assert parts <= most <= parts + 3 * cuts.largest_bytes
