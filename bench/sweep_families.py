"""Families of Hugging Face for `sweep.py`: each from its own configuration, made small by the names of its fields.

A family is tried with one head, that of the first kind it has: causal, masked, text, seq2seq, vision, segment, video,
audio, ctc, pairs (an image and a text); with `--heads` with all of them, and with those of further kinds: token, qa,
choice, sentences, restored (masked images), detect, speech, frames, speaker.  One that torch itself cannot run that way
is left out of the count.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, dict[str, Any]]

# the first pattern that fits a field's name gives its value
SMALL: list[tuple[str, int]] = [
    (r"max.*positions?(_embeddings)?|n_positions|n_ctx|context_length|seq_length|max_seq_len", 64),
    (r"vocab_size_per_layer_input", 99),
    (r"(type_|text_|src_|tgt_|unpadded_|padded_)?vocab(ulary)?_size|.*_vocab_size", 99),
    (r"type_vocab_size", 2),
    (r"((global|local|q|k|v|qk_nope|mamba|ssm)_)?head_dim|d_kv|attention_head_size", 8),
    (r"qk_rope_head_dim", 8),
    (r"rotary_dim", 4),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 16),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num", 2),
    (r"(.*_)?(num_attention_heads|n_heads?|num_heads|attention_heads)", 4),
    (r"(.*_)?(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_decoder_layers)", 2),
    (r"num_encoder_layers|num_block(s|_layers)?|depth|num_mtp.*", 2),
    (r"(.*_)?(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|n_inner|mlp_dim|ffn_size)", 48),
    (r"moe_(shared_expert_)?intermediate_size|shared_expert_intermediate_size|expert_dim", 16),
    (r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|emb_dim|hidden_dim|embedding_size|projection_dim)|dim|width", 32),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k|num_selected_experts|moe_top_k|top_k_experts", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|first_k_dense_replace", 1),
    (r"(.*_)?image_size|input_size|crop_size", 32),
    (r"patch_size", 8),
    (r"num_frames", 4),
    (r"num_channels", 3),
    (r"num_mel_bins|feature_size", 16),
    (r"num_queries", 6),
    (r"state_size|mamba_d_state|ssm_state_size", 4),
    (r"(mamba_|linear_)?(num_|n_)(key_|value_)?heads", 4),
    (r"pad_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id", 2),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups", 4),
]
LISTS: list[tuple[str, Callable[[list[Any]], list[Any]]]] = [
    (r"depths?|layers|num_layers", lambda xs: [1] * len(xs)),
    (r"neck_hidden_sizes|conv_dim|tdnn_dim", lambda xs: [16] * len(xs)),
    (r"(encoder_)?hidden_sizes|embed_dims?|stage_.*_channels", lambda xs: [x // 8 if x >= 32 else x for x in xs]),
]
QUIET = re.compile(r".*(dropout|drop_path|layerdrop|pdrop|drop_rate|jitter|mask_time_prob|mask_feature_prob).*")


def small(config: Any) -> Any:
    """A configuration with small sizes wherever it has a field of such a name."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            small(value)
        elif QUIET.fullmatch(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, name, type(value)(0))
        elif QUIET.fullmatch(name) and isinstance(value, (list, tuple)):
            setattr(config, name, type(value)(0.0 for _ in value))
        elif name in ("depth_multiplier", "width_coefficient", "depth_coefficient"):
            setattr(config, name, 0.25)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((n for pattern, n in SMALL if re.fullmatch(pattern, name)), None)
            if size is not None and (value > size or name.endswith("token_id")):
                _set(config, name, size)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(x, int) for x in value):
            rule = next((f for pattern, f in LISTS if re.fullmatch(pattern, name)), None)
            if rule is not None:
                _set(config, name, type(value)(rule(list(value))))
    return _consistent(config)


def _set(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, NotImplementedError, ValueError):
        setattr(config, name, value)


def _consistent(config: Any) -> Any:
    """Fields that say something of each layer, for as many layers as there are now."""
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in list(vars(config).items()):
        if (
            isinstance(value, list)
            and isinstance(layers, int)
            and re.fullmatch(r".*layer_types|layers_block_type", name)
        ):
            kinds = list(dict.fromkeys(value))  # one of each kind
            _set(config, name, [kinds[i % len(kinds)] for i in range(layers)])
    if isinstance(getattr(config, "qk_rope_head_dim", None), int):  # one head of keys and values for each of queries
        _set(config, "head_dim", config.qk_rope_head_dim)
        _set(config, "num_key_value_heads", config.num_attention_heads)
    if getattr(config, "num_key_value_heads", 0) is None:
        _set(config, "num_key_value_heads", 2)
    if getattr(config, "head_dim", 0) is None and isinstance(getattr(config, "hidden_size", None), int):
        _set(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if isinstance(rope := getattr(config, "rope_parameters", None), dict) and rope.get("rope_theta", 0) is None:
        rope["rope_theta"] = 10000.0
    _set(config, "use_cache", False)
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def text(vocab: int = 99) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, min(vocab, 90), (2, 12))
    ids[:, [3, 7, 11]] = 2  # ends of sentences, and separators: some heads look for them
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _images(config: Any, frames: int = 0) -> torch.Tensor:
    size = getattr(config, "image_size", None) or 32
    high, wide = size if isinstance(size, (list, tuple)) else (size, size)
    lead = (2, frames) if frames else (2,)
    return torch.randn(*lead, getattr(config, "num_channels", 3), high, wide)


def _sound(config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    name = model.main_input_name
    if name == "input_values" and not hasattr(config, "num_mel_bins"):
        return {name: torch.randn(2, 800)}
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", 16)
    return {name: torch.randn(2, getattr(config, "max_length", None) or 64, bins)}


def _batch(kind: str, config: Any, model: nn.Module) -> dict[str, Any]:
    classes = torch.tensor([1, 3])
    match kind:
        case "causal" | "masked":
            words = text()
            return {**words, "labels": words["input_ids"]}
        case "text":
            return {**text(), "labels": torch.tensor([0, 1])}
        case "seq2seq":
            words = text()
            own = getattr(config, "is_encoder_decoder", False)
            return {**words, "labels": torch.randint(3, 90, (2, 7)) if own else words["input_ids"]}
        case "vision":
            return {"pixel_values": _images(config), "labels": classes}
        case "segment":
            pixels = _images(config)
            return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2, *pixels.shape[-2:]))}
        case "video":
            return {"pixel_values": _images(config, getattr(config, "num_frames", 4)), "labels": classes}
        case "audio":
            return {**_sound(config, model), "labels": classes}
        case "ctc":
            return {**_sound(config, model), "labels": torch.randint(3, 30, (2, 3))}
        case "token":
            return {**text(), "labels": torch.randint(0, 5, (2, 12))}
        case "qa":
            return {**text(), "start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 9])}
        case "choice":
            return {**{k: v[:, None].repeat(1, 3, 1) for k, v in text().items()}, "labels": torch.tensor([0, 2])}
        case "sentences":
            return {**text(), "labels": torch.tensor([0, 1])}
        case "restored":
            pixels, side = _images(config), config.image_size // config.patch_size
            return {"pixel_values": pixels, "bool_masked_pos": (torch.arange(side * side) % 3 == 0).repeat(2, 1)}
        case "detect":
            boxes = torch.tensor([[0.4, 0.4, 0.3, 0.2], [0.6, 0.5, 0.2, 0.4], [0.3, 0.7, 0.1, 0.1]])
            objects = [{"class_labels": classes[:n], "boxes": boxes[:n]} for n in (2, 1)]
            return {"pixel_values": torch.randn(2, 3, 64, 64), "labels": objects}
        case "speech":
            return {**_sound(config, model), "labels": torch.randint(3, 30, (2, 5))}
        case "frames":
            frames = int(model._get_feat_extract_output_lengths(torch.tensor(800)))
            return {**_sound(config, model), "labels": F.one_hot(torch.randint(0, 5, (2, frames)), 5)}
        case "speaker":
            return {**_sound(config, model), "labels": classes}
        case "pairs":
            return {**text(), "pixel_values": _images(config.vision_config), "return_loss": True}
    raise ValueError(kind)


MAPPINGS = {
    "causal": "CAUSAL_LM",
    "masked": "MASKED_LM",
    "text": "SEQUENCE_CLASSIFICATION",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "vision": "IMAGE_CLASSIFICATION",
    "segment": "SEMANTIC_SEGMENTATION",
    "video": "VIDEO_CLASSIFICATION",
    "audio": "AUDIO_CLASSIFICATION",
    "ctc": "CTC",
    "pairs": "ZERO_SHOT_IMAGE_CLASSIFICATION",
}
HEADS = {
    "token": "TOKEN_CLASSIFICATION",
    "qa": "QUESTION_ANSWERING",
    "choice": "MULTIPLE_CHOICE",
    "sentences": "NEXT_SENTENCE_PREDICTION",
    "restored": "MASKED_IMAGE_MODELING",
    "detect": "OBJECT_DETECTION",
    "speech": "SPEECH_SEQ_2_SEQ",
    "frames": "AUDIO_FRAME_CLASSIFICATION",
    "speaker": "AUDIO_XVECTOR",
}
# what the names of fields do not tell
OWN: dict[str, dict[str, Any]] = {
    "swin": {"embed_dim": 24, "window_size": 2, "depths": [1, 1], "num_heads": [3, 6], "patch_size": 4},
    "swinv2": {"embed_dim": 24, "window_size": 4, "depths": [1, 1], "num_heads": [3, 6], "patch_size": 4},
    "donut-swin": {"embed_dim": 24, "window_size": 2, "depths": [1, 1], "num_heads": [3, 6], "patch_size": 4},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 2},
    "cvt": {"embed_dim": [16, 32, 48], "num_heads": [1, 2, 3], "depth": [1, 1, 2], "drop_path_rate": [0.0] * 3},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_ssm": 64, "head_dim": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bailing_hybrid": {"v_head_dim": 8, "qk_nope_head_dim": 8, "n_group": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n": {"num_kv_shared_layers": 0},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "inkling_text": {"swa_num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_head_dim": 8},
    "inkling2_text": {"swa_num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_head_dim": 8},
    "kimi_linear": {"n_group": 1, "num_experts": 4, "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_nope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4]},
    "xmod": {"default_language": "en_XX"},
    "efficientnet": {"image_size": 32, "width_coefficient": 1.0, "depth_coefficient": 0.3, "hidden_dim": 1280},
    "mobilevitv2": {"image_size": 64},
    "vit": {"encoder_stride": 8},
    "deit": {"encoder_stride": 8},
    "d_fine": {"encoder_in_channels": [64, 128, 256], "decoder_in_channels": [32] * 3, "feat_channels": [32] * 3},
    "deimv2": {"encoder_in_channels": [64, 128, 256], "decoder_in_channels": [32] * 3, "feat_channels": [32] * 3},
    "rt_detr": {"feat_channels": [32] * 3, "decoder_in_channels": [32] * 3, "encoder_in_channels": [64, 128, 256]},
    "rt_detr_v2": {"feat_channels": [32] * 3, "decoder_in_channels": [32] * 3, "encoder_in_channels": [64, 128, 256]},
}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 16, 24, 32], "depths": [1] * 4, "layer_type": "basic"}
HGNET = {
    "stem_channels": [3, 8, 16], "stage_in_channels": [16, 32, 64, 128], "stage_mid_channels": [8, 16, 16, 32],
    "stage_out_channels": [32, 64, 128, 256], "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [2] * 4,
}  # fmt: skip
LARGEST = 30_000_000  # parameters: what is larger was not made small


def family(kind: str, name: str) -> Made:
    """A small model of a family, and a batch for it."""
    import transformers as hf
    from transformers.models.auto import modeling_auto

    config = small(hf.AutoConfig.for_model(name))
    for field, value in OWN.get(name, {}).items():
        setattr(config, field, value)
    backbone = getattr(config, "backbone_config", None)
    if backbone is not None and backbone.model_type == "timm_backbone":  # the same network without that library
        stages = [f"stage{i}" for i in backbone.out_indices]
        config.backbone_config = hf.ResNetConfig(**RESNET, out_features=stages)
    elif backbone is not None and backbone.model_type == "hgnet_v2":
        for field, value in HGNET.items():
            setattr(backbone, field, value)
    if kind == "causal" and not hasattr(config, "vocab_size"):
        config = config.get_text_config()
    config.num_labels = 2 if kind == "qa" else 5
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    if kind == "text" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    mapping = getattr(modeling_auto, f"MODEL_FOR_{(MAPPINGS | HEADS)[kind]}_MAPPING")
    entry = mapping[type(config)]
    cls = entry[0] if isinstance(entry, (list, tuple)) else entry
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"not made small: {size:,} parameters")
    model = cls(config)
    return model, _batch(kind, config, model)


def families(heads: bool = False) -> dict[str, Callable[[], Made]]:
    """Every family of the installed transformers, with one head, or with all `heads`."""
    from transformers.models.auto import modeling_auto

    known: dict[str, Callable[[], Made]] = {}
    tried: set[str] = set()
    for kind, mapping in (MAPPINGS | HEADS if heads else MAPPINGS).items():
        for name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"):
            if heads or name not in tried:
                tried.add(name)
                known[f"{kind}/{name}"] = lambda kind=kind, name=name: family(kind, name)
    return known
