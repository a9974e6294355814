"""Models to try Mycel on, from tiny configs, and what it means that two of their results are the same.

MODELS     name -> Model: those every capture must get right; `Model()` makes the module, `Model.inputs()` a batch of
           keyword arguments
same       two results are equal within 1e-5 relative, structure and classes included
state      what a module holds: copies of its parameters and buffers by name
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

VOCAB = 97
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Model:
    """A module, a batch for it, and how many layers repeat as which block."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    layers: int = 0
    block: str = ""

    def __call__(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def inputs(self) -> dict[str, Any]:
        torch.manual_seed(1)
        return self.batch()


# -- batches ---------------------------------------------------------------------------------------------------------


def ids() -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 12))


def text() -> dict[str, Any]:
    return {"input_ids": ids(), "use_cache": False}


def padded() -> dict[str, Any]:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 9:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def seq2seq() -> dict[str, Any]:
    return {"input_ids": ids(), "labels": ids(), "use_cache": False}


def image() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def features(*shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"x": torch.randn(*shape)}


# -- Hugging Face models


def llama(**more: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT, "num_key_value_heads": 2, **more}))


def qwen3() -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True))


def gpt2(**more: Any) -> nn.Module:
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**{**sizes, **quiet, **more}))


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, **QUIET))


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 3, "num_heads": 4, "vocab_size": VOCAB}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def vit() -> nn.Module:
    sizes = {k: v for k, v in TEXT.items() if k not in ("vocab_size", "max_position_embeddings")}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **QUIET, image_size=32, patch_size=8))


def resnet() -> nn.Module:
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[3, 2], layer_type="basic")
    return hf.ResNetForImageClassification(config)


def mixtral(experts: str = "batched_mm") -> nn.Module:
    config = hf.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4, router_jitter_noise=0.0)
    config._experts_implementation = experts
    return hf.MixtralForCausalLM(config)


# -- plain PyTorch ---------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """An LSTM written out: gates from one linear layer, a Python loop over time."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.embed, self.gates, self.head = nn.Linear(5, size), nn.Linear(2 * size, 4 * size), nn.Linear(size, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        h = c = x.new_zeros(x.shape[0], self.head.in_features)
        outputs = []
        for t in range(x.shape[1]):
            i, f, g, o = self.gates(torch.cat([self.embed(x[:, t]), h], -1)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(self.head(h))
        return torch.stack(outputs, 1), {"h": h, "c": c}


class Twice(nn.Module):
    """convolution, norm, activation; twice"""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs), nn.ReLU(inplace=True),
            nn.Conv2d(outs, outs, 3, padding=1), nn.GroupNorm(2, outs), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class UNet(nn.Module):
    """Down, up, and across; a time embedding as diffusion models have it."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([Twice(3, width), Twice(width, 2 * width), Twice(2 * width, 4 * width)])
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4 * width))
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.mix = nn.ModuleList([Twice(4 * width, 2 * width), Twice(2 * width, width)])
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None].float() * torch.exp(-torch.arange(4, device=t.device) / 2)
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        skips = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        x = skips.pop() + time[:, :, None, None]
        for up, mix in zip(self.up, self.mix, strict=True):
            x = mix(torch.cat([skips.pop(), up(x)], 1))
        return self.out(F.interpolate(x, scale_factor=2.0, mode="bilinear"))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock(16, width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).mT
        return self.head(self.norm(self.blocks(x)).mean(1))


MODELS = {
    "llama": Model(llama, text, 3, "llama_decoder_layer"),
    "qwen3": Model(qwen3, text, 3, "qwen3_decoder_layer"),
    "gpt2": Model(gpt2, text, 3, "gpt2_block"),
    "bert": Model(bert, padded, 3, "bert_layer"),
    "t5": Model(t5, seq2seq),
    "vit": Model(vit, image, 3, "vit_layer"),
    "resnet": Model(resnet, image),
    "mixtral": Model(mixtral, text, 3, "mixtral_decoder_layer"),
    "recurrent": Model(Recurrent, features(2, 6, 5)),
    "unet": Model(UNet, lambda: {"x": torch.randn(2, 3, 16, 16), "t": torch.tensor([3, 50])}),
    "mixer": Model(Mixer, features(2, 3, 32, 32), 3, "mixer_block"),
}


# -- comparing -------------------------------------------------------------------------------------------------------


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers, those left out of state_dict included."""
    return {k: v.detach().clone() for k, v in (*module.named_parameters(), *module.named_buffers())}


def same(actual: Any, wanted: Any, tolerance: float = 1e-5, at: str = "result") -> None:
    """The same structure of the same classes; tensors of the same dtype and shape, equal within `tolerance` of their
    largest element."""
    assert type(actual) is type(wanted) or isinstance(wanted, nn.Parameter), f"{at}: {type(actual)}, not {type(wanted)}"
    if isinstance(wanted, torch.Tensor):
        assert (actual.dtype, actual.shape, actual.device) == (wanted.dtype, wanted.shape, wanted.device), at
        same_values(actual.detach(), wanted.detach(), tolerance, at)
    elif isinstance(wanted, dict):
        assert list(actual) == list(wanted), at
        for key in wanted:
            same(actual[key], wanted[key], tolerance, f"{at}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(actual) == len(wanted), at
        for i, (f, w) in enumerate(zip(actual, wanted, strict=True)):
            same(f, w, tolerance, f"{at}[{i}]")
    elif dataclasses.is_dataclass(wanted) or type(wanted).__module__.startswith("transformers"):
        same(vars(actual), vars(wanted), tolerance, f"{at}.")
    else:
        assert actual == wanted, f"{at}: {actual!r}, not {wanted!r}"


def same_values(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float, at: str) -> None:
    if not wanted.is_floating_point() and not wanted.is_complex():
        assert torch.equal(actual, wanted), at
        return
    scale = wanted[wanted.isfinite()].abs().max().item() if wanted.isfinite().any() else 0.0
    if wanted.is_floating_point():
        actual, wanted = actual.double(), wanted.double()
    torch.testing.assert_close(
        actual, wanted, rtol=0, atol=tolerance * scale, equal_nan=True, msg=lambda m: f"{at}: {m}"
    )
