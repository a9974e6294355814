"""Tokens a second of one stream of text: ours (generated code over a static cache) against transformers' `generate`,
taking turns in the same run, both always with the likeliest token; and the products with the weights alone, one token
at a time, which bound every way from below that does not guess.  `prompt` is the time to the first token, `a token`
that of each further one.

How often guesses are right depends on the text, and random weights soon repeat themselves.  So the same model is also
timed as if it wrote other texts, whose tokens it is given one by one: pages of docs/ (text of people), and what a small
model writes that was trained on them for a minute (at temperature 0.8).  `--guess FILE` only counts, in your own text.

It fails where a bar is missed: twice the tokens of transformers' `generate`, and a jitted forward faster than eager.

python bench/generate.py [--prompt 16] [--tokens 128] [--rounds 3] [--device cpu|cuda] [--model 100m|1b]
                         [--dtype float32|bfloat16] [--train 60]
python bench/generate.py --guess FILE … [--prompt 256] [--tokens 512]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bars import kept
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


DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


def pages() -> tuple[list[list[int]], int]:
    """The tokens of each page of the docs, byte pairs merged in all of them; and how many ids there are."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(f) for f in DOCS], vocab_size=2048, show_progress=False)
    return [tokenizer.encode(f.read_text()).ids for f in DOCS], tokenizer.get_vocab_size()


def written(texts: list[list[int]], vocabulary: int, seconds: float, prompt: int, tokens: int) -> list[list[int]]:
    """What a small model writes that was trained so long on these texts, after their beginnings; and its last loss."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=2048, **sizes))
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=1e-3), clip_norm=1.0)
    joined, start, steps = torch.tensor([i for text in texts for i in text]), time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        at = torch.randint(0, len(joined) - 128, (8,))
        ids = joined[at[:, None] + torch.arange(128)]
        loss, steps = step(input_ids=ids, labels=ids), steps + 1
    print(f"a model of {vocabulary} ids, trained for {steps} steps on {len(joined):,} tokens, loss {float(loss):.2f}")
    model.eval()
    return [
        [*text[:prompt], *stream(model, text[:prompt], Sampling(tokens, 0.8, seed=i), [])]
        for i, text in enumerate(texts)
    ]


def followed(decoder: Decoder, text: list[int], prompt: int) -> list[int]:
    """A text as if the model of the decoder wrote it: its logits are computed, its tokens given."""
    decoder.start(text[:prompt])
    for token in text[prompt:-1]:
        decoder.after(token)
    return text[prompt:]


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
    parser.add_argument("--prompt", type=int, help="its tokens: 16, for --guess 256")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=[*SIZES], default="100m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--train", type=float, default=60, help="seconds for the small model")
    args = parser.parse_args()
    for file in args.guess or ():
        print(f"{file.name:32} {guessed(file, 8192, args.prompt or 256, args.tokens):5.2f} tokens a call")
    if args.guess:
        return
    model = model_of(args.model, args.device, getattr(torch, args.dtype))
    device = model.device
    read = reader(model, device)
    ids = torch.randint(0, 32000, (1, args.prompt or 16), device=args.device)
    fast, decoder = mycel.jit(model), decoder_of(model)
    plain = Decoder(model, decoder.places, guess=False)

    def of_transformers(generate: Callable[..., Any], tokens: int) -> list[int]:
        asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return generate(ids, **asked)[0, ids.shape[1] :].tolist()

    ways: dict[str, Callable[[int], list[int]]] = {
        "transformers' generate": lambda tokens: of_transformers(model.generate, tokens),
        "the same, jitted": lambda tokens: of_transformers(fast.generate, tokens),
        "mycel, without guesses": lambda tokens: [*stream(model, ids[0].tolist(), Sampling(tokens, 0.0), [], plain)],
        "mycel generate": lambda tokens: [*stream(model, ids[0].tolist(), Sampling(tokens, 0.0), [], decoder)],
        "reading weights, no more": lambda tokens: [read() and -1 for _ in range(tokens)],
    }
    (docs, vocabulary), n = pages(), ids.shape[1]
    docs = [text for text in docs if len(text) >= n + args.tokens]
    own = written(docs, vocabulary, args.train, n, args.tokens)
    others = {"of docs/": [text[: n + args.tokens] for text in docs], "of a trained model": own}
    texts, seconds, prompts = {}, {name: [] for name in ways}, {name: [] for name in ways}

    def timed(name: str, tokens: int) -> float:
        start = time.perf_counter()
        texts[name] = ways[name](tokens)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with torch.no_grad():
        for k in range(args.rounds + 1):  # the first makes the code
            for name in ways:
                if k:
                    prompts[name].append(timed(name, 1))
                seconds[name].append(timed(name, args.tokens))
    reference, are_met = next(iter(ways)), True
    bars = {"mycel generate": 2.0, "the same, jitted": 1.0}
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {args.dtype}"
    print(f"{size}, a prompt of {ids.shape[1]} tokens and {args.tokens} more")
    for name, times in seconds.items():
        whole, prompt = statistics.median(times[1:]), statistics.median(prompts[name])
        ratio = statistics.median(a / b for a, b in zip(seconds[reference][1:], times[1:], strict=True))
        same = sum(a == b for a, b in zip(texts[name], texts[reference], strict=True))
        alike = f"{same} of {args.tokens} tokens the same" if texts[name][0] >= 0 else ""
        each = (whole - prompt) / (args.tokens - 1) * 1e3
        print(
            f"{name:24} {args.tokens / whole:7.1f} tokens/s {ratio:6.2f}x   prompt {prompt:7.2f} s   "
            f"a token {each:7.1f} ms   first call {times[0]:6.2f} s   {alike}"
        )
        if name in bars:
            bar = bars[name]
            are_met &= kept(f"{name}: {ratio:.2f} of transformers' tokens/s", f"{bar} or more", ratio >= bar)
    print(f"{args.tokens} tokens by {decoder.calls} calls of the model")
    with torch.no_grad():
        for what, all_of_them in others.items():
            rates, calls = [], []
            for text in all_of_them:
                start = time.perf_counter()
                of_transformers(model.generate, args.tokens)
                between = time.perf_counter()
                followed(decoder, text, n)
                rates.append((between - start) / (time.perf_counter() - between))
                calls.append(args.tokens / decoder.calls)
            print(
                f"as if it wrote text {what:19} {statistics.median(rates):6.2f}x transformers' "
                f"({min(rates):.2f} to {max(rates):.2f}), {statistics.mean(calls):.2f} tokens a call"
            )
    sys.exit(not are_met)


if __name__ == "__main__":
    main()
