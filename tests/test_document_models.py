"""Packed batches of transformers' models: the step has documents instead of masks, and its losses are torch's."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import transformers
from distributing import OneDevice, step_equals
from test_document_masks import attentions, largest, structure

import mycel
from mycel.ir import Mesh, walk
from mycel.plan import Plan

N = 192
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
MODELS = {
    "llama": (transformers.LlamaConfig, LLAMA, {("causal", 1)}),
    "llama, written out": (transformers.LlamaConfig, {**LLAMA, "attn_implementation": "eager"}, {("causal", 1)}),
    "qwen3": (transformers.Qwen3Config, LLAMA, {("causal", 1)}),
    "mistral": (transformers.MistralConfig, {**LLAMA, "sliding_window": 24}, {((23, 0), 1)}),
    "gemma2": (
        transformers.Gemma2Config,
        {**LLAMA, **LOCAL, "attn_implementation": "eager", "query_pre_attn_scalar": 8},
        {("causal", 1), ((23, 0), 1)},
    ),
    "gpt2": (
        transformers.GPT2Config,
        {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {("causal", 1)},
    ),
}


def packed(seed, batch=2):
    """Sequences of several documents each, as position_ids tell."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (batch, N), generator=gen)
    samples = []
    for _ in range(batch):
        cuts = torch.randperm(N - 1, generator=gen)[:5].add(1).sort().values.tolist()
        edges = [0, *cuts, N]
        samples.append(torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(edges)]))
    return {"input_ids": ids, "labels": ids, "position_ids": torch.stack(samples)}


@pytest.mark.parametrize("name", MODELS)
def test_packed_models(name):
    make, sizes, kinds = MODELS[name]
    torch.manual_seed(0)
    config = make(**sizes, use_cache=False)
    dtype = (
        torch.float32 if "attn_implementation" in sizes else torch.float64
    )  # the softmax that they write is in 32 bits
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-10}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    other = copy.deepcopy(model)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    for seed in range(3):
        batch = packed(seed)
        loss, want = step(**batch), other(**batch).loss
        assert torch.allclose(loss, want, **close), seed
        theirs.zero_grad()
        want.backward()
        theirs.step()
    for mine, whole in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, whole, **close)
    assert {structure(eqn) for eqn in attentions(step.program)} == kinds
    assert any(len(e.inputs) == 10 for _, e in walk(step.program) if e.op.name == "attention_grad")
    assert largest(step.program) < N * N
    assert len(step.entries) == 1


@pytest.mark.parametrize("names, sizes", [("cp", {"cp": 2}), ("cp", {"cp": 4}), ("zero3+tp", {"dp": 2, "tp": 2})])
def test_packed_models_on_ranks(names, sizes):
    """Documents go with what is split: simulated ranks equal one device."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    one = OneDevice.of(model, packed(0))
    assert {structure(eqn) for eqn in attentions(one.unsharded.program)} == {("causal", 1)}
    step_equals(one, Plan.read(names, Mesh(sizes)))


def test_padding_is_documents_where_there_is_some():
    """Causal attention over padded sequences; without padding there is nothing but the triangle."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, use_cache=False)).double()
    other, shown = copy.deepcopy(model), []
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for padding in (0, 50, 7):
        batch = packed(padding)
        del batch["position_ids"]
        batch["attention_mask"] = (torch.arange(N) < torch.tensor([[N], [N - padding]])).long()
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
        assert torch.allclose(step(**batch), other(**batch).loss, rtol=1e-9)
        shown.append({structure(eqn) for eqn in attentions(step.program)})
    assert shown == [{None}, {("causal", 1)}, {("causal", 1)}]
