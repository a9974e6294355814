"""Small models of the families of mixtures of experts in use.

FAMILIES     name -> (class of the model, sizes of its config)
family       one of them, its experts computed in a way that transformers has
written_out  a layer of experts alone, of families that have the loop of others
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from models import TEXT, VOCAB
from torch import nn

ROUTED = {**TEXT, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {**ROUTED, "num_local_experts": 4, "output_router_logits": True}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**ROUTED, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**ROUTED, "num_experts": 5, "moe_intermediate_size": 16, "head_dim": 8}),
    "olmoe": ("OlmoeForCausalLM", {**ROUTED, "num_experts": 4, "num_experts_per_tok": 3}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**ROUTED, **LATENT, "num_key_value_heads": 4}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**ROUTED, **LATENT, "num_key_value_heads": 4}),
    "gpt_oss": ("GptOssForCausalLM", {**ROUTED, "num_local_experts": 4, "head_dim": 8}),
    "granitemoe": ("GraniteMoeForCausalLM", {**ROUTED, "num_local_experts": 4}),
    "phimoe": ("PhimoeForCausalLM", {**ROUTED, "num_local_experts": 4}),
    "jamba": (
        "JambaForCausalLM",
        {**ROUTED, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1,
         "expert_layer_offset": 0, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        {**ROUTED, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "head_dim": 8},
    ),
}  # fmt: skip


def family(name: str, experts: str = "eager", **more: Any) -> nn.Module:
    """A small model of a family."""
    model, sizes = FAMILIES[name]
    config = getattr(hf, model).config_class(**{**sizes, "pad_token_id": 0, **more})
    config._experts_implementation = experts
    torch.manual_seed(0)
    module: nn.Module = getattr(hf, model)(config)
    for p in module.parameters():  # biases and the like begin as zeros: they are to count
        torch.nn.init.normal_(p, std=0.2) if p.ndim < 2 or not p.any() else None
    return module


def text(rows: int = 4, length: int = 6) -> dict[str, Any]:
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def quiet(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


def written_out(name: str) -> nn.Module:
    from transformers.models.longcat_flash import LongcatFlashConfig
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
    from transformers.models.step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

    model: nn.Module
    if name == "step3p7":
        config = Step3p7TextConfig(hidden_size=12, moe_intermediate_size=10, num_local_experts=8)
        model = Step3p7Experts(config, swiglu_limit=0.5)
    else:
        sizes = {"hidden_size": 12, "expert_ffn_hidden_size": 10, "n_routed_experts": 5, "zero_expert_num": 3}
        model = LongcatFlashExperts(LongcatFlashConfig(**sizes))
    return model
