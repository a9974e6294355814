"""Families of Hugging Face that read images in a text, for `sweep.py`: kind `captions`.

How many tokens an image takes is the model's own business: a batch is tried, and what the model says of its features
gives the next.  `pixel_values` are images, or patches in a row with a grid (`image_grid_thw`), by what `forward` takes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sweep_families import LARGEST, Made, small
from torch import nn

TOKENS = re.compile(r"(.*_)?token_(id|index)|image_token|.*_(start|end)_id")
MISMATCH = re.compile(r"tokens:? (?:tensor\()?(\d+)\)?.*?features:? (?:torch\.Size\(\[)?(\d+)", re.DOTALL)
SIDE = 32
# what the names of fields do not tell, by path
OWN: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "gemma3": {"mm_tokens_per_image": 4},
    "internvl": {"vision_config.image_size": (32, 32)},
    "llava_next": {"image_grid_pinpoints": [[32, 32]]},
    "llava_next_video": {"image_grid_pinpoints": [[32, 32]]},
    "llava_onevision": {"image_grid_pinpoints": [[32, 32]]},
    "minimax_m3_vl": {"merged_hidden_size": 128},
    "qianfan_ocr": {"vision_config.image_size": (32, 32)},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p7": {"text_config.sliding_window": 6},
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "vipllava": {"vision_feature_layers": [-1, -2]},
}
# images of a text in a dim of their own, one of them or, cut into tiles, two
TILED = {"idefics": 1, "idefics2": 1, "idefics3": 1, "smolvlm": 1, "granite_docling": 1} | {
    "llava_next": 2, "llava_next_video": 2, "llava_onevision": 2,
}  # fmt: skip


def parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside of it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts(value)


def image_token(config: Any) -> int:
    """Special tokens, each with a number of its own that is small; that of an image."""
    numbers: dict[str, int] = {}
    for part in parts(config):
        for field, value in list(vars(part).items()):
            if TOKENS.fullmatch(field) and isinstance(value, int) and value > 2:
                numbers.setdefault(field, 98 - len(numbers))
                setattr(part, field, numbers[field])
    names = ("image_token_id", "image_token_index", "image_patch_id", "image_token", "media_placeholder_token_id")
    return next((getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), 98)


def rotary(config: Any) -> None:
    """Sections of a rotation over time, height and width, for heads that are small now."""
    for part in parts(config):
        rope = getattr(part, "rope_parameters", None) or getattr(part, "rope_scaling", None) or {}
        for each in (rope, *(r for r in rope.values() if isinstance(r, dict))):
            if "mrope_section" in each or "mrope_section" in getattr(part, "ignore_keys_at_rope_validation", ()):
                half = getattr(part, "head_dim", None) or part.hidden_size // part.num_attention_heads
                half = int(half * each.get("partial_rotary_factor", 1.0)) // 2
                each["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]


def model_of(name: str) -> tuple[nn.Module, Any, int]:
    import transformers as hf
    from transformers.models.auto import modeling_auto

    config = small(hf.AutoConfig.for_model(name))
    token = image_token(config)
    rotary(config)
    for part in parts(config):
        part._attn_implementation = "sdpa"  # in double precision, where attention that is written out has 32 bits
    for path, value in OWN.get(name, {}).items():
        *way, field = path.split(".")
        part = config
        for step in way:
            part = getattr(part, step)
        setattr(part, field, value)
    cls = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    if not cls._supports_sdpa:
        for part in parts(config):
            part._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"not made small: {size:,} parameters")
    return cls(config), config, token


def pixels(model: nn.Module, config: Any) -> dict[str, Any]:
    """Two images, as the model takes them."""
    takes = inspect.signature(model.forward).parameters
    vision = getattr(config, "vision_config", config)
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    patch = getattr(vision, "patch_size", 8)
    if "image_grid_thw" in takes:
        times = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
        flat = torch.randn(2 * 16, channels * times * patch * patch)
        if config.model_type == "kimi_k25":
            flat = flat.unflatten(1, (channels, patch, patch))
        return {"pixel_values": flat, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    if "spatial_shapes" in takes:
        batch = {"pixel_values": torch.randn(2, 16, channels * patch * patch)}
        return {
            **batch, "spatial_shapes": torch.tensor([[4, 4]] * 2), "pixel_attention_mask": torch.ones(2, 16).long()
        }  # fmt: skip
    batch: dict[str, Any]
    size = getattr(vision, "image_size", None) or SIDE
    high, wide = size if isinstance(size, (list, tuple)) else (size, size)
    tiles = TILED.get(config.model_type)
    batch = {"pixel_values": torch.randn(*((2, tiles) if tiles else (2,)), channels, high, wide)}
    if config.model_type == "idefics":
        batch["image_attention_mask"] = torch.ones(2, 10, 1).long()
    if "image_sizes" in takes and getattr(vision, "model_type", "") != "clip_vision_model" or tiles == 2:
        batch["image_sizes"] = torch.tensor([[high, wide]] * 2)
    if "target_sizes" in takes:
        batch["target_sizes"] = torch.tensor([[high // patch, wide // patch]] * 2, dtype=torch.int32)
    return batch


def words(token: int, count: int, types: bool) -> dict[str, Any]:
    ids = torch.randint(3, 60, (2, count + 6))
    ids[:, 2 : 2 + count] = token
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.where(ids != token, -100)}
    return {**batch, "mm_token_type_ids": (ids == token).int()} if types else batch


def captions(name: str) -> Made:
    """A small model of a family, with two images in two texts."""
    model, config, token = model_of(name)
    images = pixels(model, config)
    types = "mm_token_type_ids" in inspect.signature(model.forward).parameters
    count, seen = 4, 0
    while True:
        batch = {**words(token, count, types), **images}
        try:
            model(**batch)
            return model, batch
        except (ValueError, RuntimeError, AssertionError) as e:
            said = MISMATCH.search(str(e))
            if said is None or seen == 2:
                raise
            count, seen = max(1, round(count * int(said[2]) / int(said[1]))), seen + 1


def captioned() -> dict[str, Callable[[], Made]]:
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return {f"captions/{name}": lambda name=name: captions(name) for name in names}
