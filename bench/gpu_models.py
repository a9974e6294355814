"""The models that are measured on a GPU, in bf16, without dropout unless their name says so, and a batch of each."""

from __future__ import annotations

from types import SimpleNamespace

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
TINY = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def decoder(width: int, inner: int, layers: int, heads: int, shared: int, vocabulary: int, length: int) -> dict:
    """The sizes of a decoder, as Hugging Face has them."""
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": shared, "vocab_size": vocabulary, "max_position_embeddings": length, "use_cache": False,
    }  # fmt: skip


def recurrent(vocabulary: int, width: int):
    """A language model of two layers of LSTM."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(vocabulary, width)
            self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
            self.head = nn.Linear(width, vocabulary)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
            logits = self.head(self.layers(self.embed(input_ids))[0])
            return SimpleNamespace(loss=cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

    return Recurrent()


def packed(ids):
    """Positions of documents of 512 tokens on the mean, one behind the other, each from 0 on."""
    import torch

    gen = torch.Generator().manual_seed(0)
    begins = (torch.rand(ids.shape, generator=gen, device="cpu") < 1 / 512).to(ids.device)
    places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return places - (places * begins).cummax(1)[0]


def _model(name: str):
    """(the model, the sizes of a batch: vocabulary, rows and length of text, or the number of images)"""
    import transformers as hf

    match name:
        case "llama-1.1b":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder(2048, 5632, 22, 32, 4, 32000, 2048))), (32000, 8, 2048)
        case "1b" | "packed-1b":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder(2048, 5632, 22, 32, 4, 32000, 2048))), (32000, 16, 2048)
        case "3b":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder(3072, 8192, 28, 24, 8, 32000, 4096))), (32000, 4, 4096)
        case "tiny":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder(256, 704, 4, 8, 2, 32000, 256))), (32000, 4, 256)
        case "mistral":
            sizes = decoder(2048, 5632, 22, 16, 4, 32000, 4096)
            return hf.MistralForCausalLM(hf.MistralConfig(**sizes, sliding_window=1024)), (32000, 4, 4096)
        case "gemma2":
            config = hf.Gemma2Config(**decoder(1536, 6144, 16, 8, 4, 64000, 2048), head_dim=192, sliding_window=1024)
            return hf.Gemma2ForCausalLM(config), (64000, 4, 2048)
        case "gemma3":
            sizes = decoder(1536, 6144, 16, 8, 4, 64000, 2048)
            return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, head_dim=192, sliding_window=512)), (
                64000,
                4,
                2048,
            )
        case "qwen3-0.6b":
            sizes = decoder(1024, 3072, 28, 16, 8, 151936, 2048)
            config = hf.Qwen3Config(**sizes, head_dim=128, tie_word_embeddings=True)
            return hf.Qwen3ForCausalLM(config), (151936, 8, 2048)
        case "phi-0.5b":
            return hf.PhiForCausalLM(hf.PhiConfig(**decoder(1536, 6144, 16, 24, 24, 51200, 2048))), (51200, 6, 1536)
        case "gpt2-medium" | "gpt2-dropout":
            sizes = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024, "use_cache": False}
            rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1 if name == "gpt2-dropout" else 0.0)
            return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **rates)), (50257, 16, 1024)
        case "opt-350m":
            sizes = {"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
            config = hf.OPTConfig(**sizes, vocab_size=50272, dropout=0.0, attention_dropout=0.0, use_cache=False)
            return hf.OPTForCausalLM(config), (50272, 12, 1024)
        case "bert-large" | "bert-mask" | "bert-dropout":
            config = hf.BertConfig(**LARGE, **({} if name == "bert-dropout" else QUIET))
            return hf.BertForMaskedLM(config), (30522, 32, 512)
        case "t5-base":
            sizes = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "dropout_rate": 0.0}
            config = hf.T5Config(**sizes, decoder_start_token_id=0, use_cache=False)
            return hf.T5ForConditionalGeneration(config), (32128, 32, 512)
        case "whisper-small":
            sizes = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "num_mel_bins": 80}
            heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
            widths = {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
            config = hf.WhisperConfig(**sizes, **heads, **widths, vocab_size=51865, use_cache=False)
            return hf.WhisperForConditionalGeneration(config), (51865, 16, 448)
        case "lstm":
            return recurrent(10000, 1024), (10000, 64, 128)
        case "vit-large":
            return hf.ViTForImageClassification(hf.ViTConfig(**LARGE, **QUIET, num_labels=1000)), (64,)
        case "deit-tiny":
            return hf.DeiTForImageClassification(hf.DeiTConfig(**TINY, **QUIET, num_labels=1000)), (32,)
        case "swin":
            return hf.SwinForImageClassification(hf.SwinConfig(drop_path_rate=0.0, num_labels=1000)), (64,)
        case "convnext":
            return hf.ConvNextForImageClassification(hf.ConvNextConfig(num_labels=1000)), (64,)
        case "resnet-50":
            return hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=1000)), (128,)
    raise ValueError(f"no model {name}")


def model_and_batch(name: str, device: str = "cuda"):
    """(module, batch by name) of a case; `name@4`: four rows, or images."""
    import torch

    with torch.device(device):
        name, _, rows = name.partition("@")
        model, sizes = _model(name)
        if rows:
            sizes = (int(rows),) if len(sizes) == 1 else (sizes[0], int(rows), sizes[2])
        if len(sizes) == 1:
            pixels = torch.randn(*sizes, 3, 224, 224, dtype=torch.bfloat16)
            batch = {"pixel_values": pixels, "labels": torch.randint(0, 1000, sizes)}
        else:
            ids = torch.randint(0, sizes[0], sizes[1:])
            batch = {"input_ids": ids, "labels": ids}
        if name == "whisper-small":
            batch = {"input_features": torch.randn(sizes[1], 80, 3000, dtype=torch.bfloat16), "labels": ids}
        if name == "bert-mask":
            batch["attention_mask"] = torch.ones_like(ids)
        if name == "packed-1b":
            batch["position_ids"] = packed(ids)
    return model.to(torch.bfloat16), batch
