"""Tokens a second of one stream of text: ours (generated code over a static cache) against transformers' `generate`,
taking turns in the same run, both always with the likeliest token; and the products with the weights alone, one token
at a time, which bound every way from below that does not guess.  Random weights soon repeat themselves, so guesses are
mostly right here: how often they are in a text of people's is what `--guess FILE` counts, as if a model wrote it.

python bench/generate.py [--tokens 128] [--rounds 3] [--device cpu|cuda] [--model 100m|1b] [--dtype float32|bfloat16]
python bench/generate.py --guess FILE … [--prompt 256] [--tokens 512]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mycel
from mycel.run import CudaGraph
from mycel.train.decode import Decoder
from mycel.train.generate import Sampling, decoder_of, stream
from mycel.train.guess import Guesses

SIZES = {
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
}


def model_of(size: str, device: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, max_position_embeddings=2048, tie_word_embeddings=True, **SIZES[size])
    with torch.device(device):
        return LlamaForCausalLM(config).eval().to(dtype)


def reader(model: Any, device: torch.device) -> Callable[[], Any]:
    """What no code for one token can be faster than: one product with each matrix; on a GPU one graph of them all."""
    pairs = [(p, torch.ones_like(p[:1])) for p in model.parameters() if p.ndim == 2]
    if device.type == "cpu":
        return lambda: [torch.mv(p, ones[0]) for p, ones in pairs]
    products = lambda: [torch.nn.functional.linear(ones, p) for p, ones in pairs]
    with torch.no_grad():
        products()  # libraries get ready
        return CudaGraph(products, (), device).replay


def guessed(file: Path, vocabulary: int, prompt: int, tokens: int) -> float:
    """Tokens of a text for each call of a model that would write it, after a prompt of its own beginning.  Its tokens
    are byte pairs merged in all the texts beside it."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    beside = [str(f) for f in file.parent.glob(f"*{file.suffix}")]
    tokenizer.train(beside, vocab_size=vocabulary, show_progress=False)
    ids = tokenizer.encode(file.read_text()).ids
    guesses, calls = Guesses(ids[:prompt]), 0
    rest = ids[prompt : prompt + tokens]
    at = 0
    while at < len(rest):
        guesses.add(rest[at])
        ahead = guesses.next()
        at, calls, right = at + 1, calls + 1, 0
        while right < len(ahead) and at < len(rest) and ahead[right] == rest[at]:
            guesses.add(rest[at])
            at, right = at + 1, right + 1
        if ahead:
            guesses.judge(right)
    return len(rest) / max(calls, 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--guess", type=Path, nargs="+")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=[*SIZES], default="100m")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    for file in args.guess or ():
        print(f"{file.name:32} {guessed(file, 8192, args.prompt, args.tokens):5.2f} tokens a call")
    if args.guess:
        return
    model = model_of(args.model, args.device, getattr(torch, args.dtype))
    device = model.device
    read = reader(model, device)
    ids = torch.randint(0, 32000, (1, 16), device=args.device)
    fast, decoder, how = mycel.jit(model), decoder_of(model), Sampling(args.tokens, 0.0)
    plain = Decoder(model, decoder.places, guess=False)
    asked = {"max_new_tokens": args.tokens, "min_new_tokens": args.tokens, "do_sample": False, "pad_token_id": 0}

    ways = {
        "transformers' generate": lambda: model.generate(ids, **asked)[0, ids.shape[1] :].tolist(),
        "the same, jitted": lambda: fast.generate(ids, **asked)[0, ids.shape[1] :].tolist(),
        "mycel, without guesses": lambda: [*stream(model, ids[0].tolist(), how, [], plain)],
        "mycel generate": lambda: [*stream(model, ids[0].tolist(), how, [], decoder)],
        "reading weights, no more": lambda: [read() and -1 for _ in range(args.tokens)],
    }
    texts, seconds = {}, {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(args.rounds + 1):  # the first makes the code
            for name, way in ways.items():
                start = time.perf_counter()
                texts[name] = way()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - start)
    reference = next(iter(ways))
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {args.dtype}, {args.tokens} tokens")
    for name, times in seconds.items():
        rate = args.tokens / statistics.median(times[1:])
        ratio = statistics.median(a / b for a, b in zip(seconds[reference][1:], times[1:], strict=True))
        same = sum(a == b for a, b in zip(texts[name], texts[reference], strict=True))
        told = f"{same} of {args.tokens} tokens the same" if texts[name][0] >= 0 else ""
        print(f"{name:24} {rate:8.1f} tokens/s  {ratio:5.2f}x  first call {times[0]:6.2f} s  {told}")
    print(f"{args.tokens} tokens by {decoder.calls} calls of the model")


if __name__ == "__main__":
    main()
