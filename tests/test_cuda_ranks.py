"""Many ranks on one GPU: lowered programs on simulated ranks there, NCCL's calls in a world of one."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from distributing import OneDevice, start_values, step_equals
from torch import distributed as dist

from mycel.ir import Mesh, check
from mycel.plan import Plan
from mycel.run import interpret, simulate
from mycel.run.collectives import begin, finish
from mycel.run.simulate import spread_out

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

PLANS = [
    ("dp", {"dp": 2}),
    ("zero3", {"dp": 3}),
    ("tp", {"tp": 2}),
    ("tp2d", {"tx": 2, "ty": 2}),
    ("cp", {"cp": 2}),
    ("zero1+tp+cp", {"dp": 2, "tp": 2, "cp": 2}),
]


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def llama(dtype=torch.float32, heads=4, width=256):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = torch.randint(0, 97, (6, 128), device="cuda")
    return LlamaForCausalLM(config).to("cuda", dtype), {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("names, sizes", PLANS, ids=str)
def test_a_step_on_simulated_ranks(names, sizes):
    step_equals(OneDevice.of(*llama(torch.float64), clip_norm=1.0), Plan.read(names, Mesh(sizes)))


@pytest.mark.parametrize("names, sizes", PLANS, ids=str)
def test_a_step_in_16_bits(names, sizes):
    """With the kernels of attention that a GPU has for 16 bits; the loss up to their rounding, gradients through the
    norm of them all."""
    one = OneDevice.of(*llama(), precision="bf16", clip_norm=1.0)
    mesh = Mesh(sizes)
    distributed = one.under(Plan.read(names, mesh))
    values = start_values(one)
    serial = interpret(one.unsharded.program, values)
    parts = [spread_out(x, layout, mesh) for x, layout in zip(values, distributed.inputs, strict=True)]
    got = simulate(check(distributed.local), mesh, parts)
    for i in (0, 1):  # the loss, the norm
        assert all(torch.allclose(x, serial[i], rtol=1e-2) for x in got[i]), (i, got[i], serial[i])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_nccl_alone(dtype):
    """Each collective in a world of one is what it should be there: torch's calls take what we give them."""
    from mycel.run.groups import Nccl

    group = Nccl(dist.HashStore(), 0, 1, timedelta(seconds=60))
    x = torch.arange(12, device="cuda").reshape(3, 4).to(dtype)
    y = torch.ones(2, 2, device="cuda").to(dtype)

    def ran(name, xs, **how):
        messages = begin(group, name, xs, how)
        for work in next(messages):
            work.wait()
        return finish(messages)

    for name, how in {
        "all_reduce": {}, "all_gather": {"dim": [1, 0]}, "reduce_scatter": {"dim": [1, 0]},
    }.items():  # fmt: skip
        if dtype == torch.bool and name != "all_gather":
            continue
        for a, b in zip(ran(name, [x, y], **how), (x, y), strict=True):
            assert a.dtype == dtype and torch.equal(a, b), name
    assert torch.equal(ran("all_to_all", [x], split=0, join=1)[0], x)
    assert torch.equal(ran("permute", [x], to=(0,))[0], x)
