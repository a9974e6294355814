"""More families of Hugging Face models, from tiny configs, captured unchanged: results and buffers as in eager torch,
train and eval."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf
from models import TEXT, VOCAB, same, state
from torch import nn

import mycel

GROUPED = {**TEXT, "num_key_value_heads": 2}
PICTURE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
PAIR = {
    "d_model": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": VOCAB,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
SOUND = {
    **TEXT, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip
STAGES = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
ROUTED = {**GROUPED, "num_experts_per_tok": 2}

torch.manual_seed(0)
IDS, IMAGE, WAVE = torch.randint(3, VOCAB, (2, 12)), torch.randn(2, 3, 32, 32), torch.randn(2, 400)
MASK = (torch.arange(12) < torch.tensor([[12], [9]])).long()
LEFT = MASK.flip(1)
PLACES = torch.arange(12).expand(2, -1)
CLASSES = torch.tensor([0, 1])


def routed(experts):
    """A config class that chooses how experts are computed."""

    def make(cls, **sizes):
        config = cls(**sizes)
        config._experts_implementation = experts
        return config

    return make


def plain(cls, **sizes):
    return cls(**sizes)


# name: model, config, sizes, batch, how the config is made
FAMILIES = {
    "llama-left-padding": (
        "LlamaForCausalLM",
        "LlamaConfig",
        GROUPED,
        {"input_ids": IDS, "attention_mask": LEFT, "position_ids": PLACES},
    ),
    "llama-loss": (
        "LlamaForCausalLM",
        "LlamaConfig",
        GROUPED,
        {"input_ids": IDS, "attention_mask": MASK, "labels": IDS},
    ),
    "llama-everything": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**GROUPED, "attn_implementation": "eager"},
        {"input_ids": IDS, "output_attentions": True, "output_hidden_states": True},
    ),
    "llama-embeds": (
        "LlamaModel",
        "LlamaConfig",
        GROUPED,
        {"inputs_embeds": torch.randn(2, 12, 32), "return_dict": False},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 8},
        {"input_ids": IDS},
    ),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {**GROUPED, "sliding_window": 8},
        {"input_ids": IDS, "attention_mask": MASK},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "pad_token_id": 0}, {"input_ids": IDS}),
    "cohere": ("CohereForCausalLM", "CohereConfig", GROUPED, {"input_ids": IDS}),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB},
        {"input_ids": IDS, "attention_mask": MASK},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
        {"input_ids": IDS},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": VOCAB,
            "word_embed_proj_dim": 32,
        },
        {"input_ids": IDS, "attention_mask": MASK},
    ),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": VOCAB},
        {"input_ids": IDS},
    ),
    "mixtral-router-loss": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**ROUTED, "num_local_experts": 4},
        {"input_ids": IDS, "labels": IDS, "output_router_logits": True},
        routed("batched_mm"),
    ),
    "mixtral-grouped": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**ROUTED, "num_local_experts": 4},
        {"input_ids": IDS},
        routed("grouped_mm"),
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**ROUTED, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8},
        {"input_ids": IDS},
        routed("batched_mm"),
    ),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **ROUTED,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
        {"input_ids": IDS},
        routed("batched_mm"),
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**ROUTED, "num_local_experts": 4, "head_dim": 8, "sliding_window": 8},
        {"input_ids": IDS},
        routed("grouped_mm"),
    ),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", TEXT, {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}, {"input_ids": IDS}),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **TEXT,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 8,
        },
        {"input_ids": IDS, "attention_mask": MASK},
    ),
    "deberta": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        {"input_ids": IDS, "attention_mask": MASK},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        PAIR,
        {"input_ids": IDS, "labels": IDS, "attention_mask": MASK},
    ),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "state_size": 4},
        {"input_ids": IDS, "use_cache": False},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "vocab_size": VOCAB,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 4,
        },
        {"input_ids": IDS, "use_cache": False},
    ),
    "rwkv": (
        "RwkvForCausalLM",
        "RwkvConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB, "attention_hidden_size": 32},
        {"input_ids": IDS, "use_cache": False},
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
        {"pixel_values": IMAGE, "labels": CLASSES},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {**STAGES, "image_size": 32},
        {"pixel_values": IMAGE},
    ),
    "mobilenet": (
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        {"image_size": 32, "depth_multiplier": 0.25},
        {"pixel_values": IMAGE},
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {**STAGES, "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16, "drop_path_rate": 0.0},
        {"pixel_values": IMAGE},
    ),
    "dinov2": (
        "Dinov2ForImageClassification",
        "Dinov2Config",
        {k: v for k, v in PICTURE.items() if k != "intermediate_size"},
        {"pixel_values": IMAGE},
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**TEXT, "eos_token_id": 2}, "vision_config": PICTURE},
        {"input_ids": IDS, "pixel_values": IMAGE, "return_loss": True},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **PAIR,
            "num_mel_bins": 16,
            "max_source_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {"input_features": torch.randn(2, 16, 64), "decoder_input_ids": IDS},
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND, {"input_values": WAVE}),
}


def quiet(model: nn.Module) -> nn.Module:
    """Without dropout, wherever a model keeps its rate."""
    for module in model.modules():
        for name in (
            "p",
            "dropout",
            "attention_dropout",
            "activation_dropout",
            "dropout_rate",
            "attention_dropout_prob",
            "hidden_dropout",
        ):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_of_models(name, training):
    model_class, config_class, sizes, batch, *how = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(hf, model_class)((how or [plain])[0](getattr(hf, config_class), **sizes)).train(training)
    twin = copy.deepcopy(quiet(model))
    fast = mycel.jit(model)
    for _ in range(2):
        with torch.no_grad():
            same(fast(**batch), twin(**batch))
        same(state(model), state(twin))
    assert len(fast.entries) == (2 if (name, training) == ("rwkv", False) else 1)  # it scales its weights in one call
