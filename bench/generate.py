"""Tokens a second of one stream of text: ours (generated code over a static cache) against transformers' `generate`,
taking turns in the same run, both always with the likeliest token; and the products with the weights alone, one token
at a time, which bound every way from below that neither guesses nor drafts.  `prompt` is the time to the first token,
`a token` that of each further one.

How often guesses are right depends on the text, and random weights soon repeat themselves.  So the same model is also
timed as if it wrote pages of docs/ (text of people), whose tokens it is given one by one: nothing like what it would
write, so that its drafts are wrong.  Then it is trained on them (`--train` seconds) and really writes, at temperature
0.8: what follows the beginnings of pages, against transformers' `generate` of as many tokens at the same temperature.
`repeated`: tokens that had followed the two before them the last time these stood there.  `--guess FILE` only counts,
in your own text.

It fails where a bar is missed: twice the tokens of transformers' `generate`, also by the trained model; a jitted
forward faster than eager; and the text by drafts being the text without.

python bench/generate.py [--prompt 16] [--tokens 128] [--rounds 3] [--device cpu|cuda] [--model 100m|1b]
                         [--dtype float32|bfloat16] [--train 60] [--kept FILE]
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


WARM = 2  # texts that make the code
DOCS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


def pages() -> list[list[int]]:
    """The tokens of each page of the docs, byte pairs merged in all of them."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(f) for f in DOCS], vocab_size=2048, show_progress=False)
    return [tokenizer.encode(f.read_text()).ids for f in DOCS]


def train(model: Any, texts: list[list[int]], seconds: float) -> None:
    """Some steps on the texts."""
    torch.manual_seed(0)
    model.train()
    step = mycel.train_step(model, torch.optim.AdamW(model.parameters(), lr=3e-4), clip_norm=1.0)
    joined, start, steps = torch.tensor([i for text in texts for i in text]), time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        at = torch.randint(0, len(joined) - 128, (4,))
        ids = joined[at[:, None] + torch.arange(128)].to(model.device)
        loss, steps = step(input_ids=ids, labels=ids), steps + 1
    print(f"trained for {steps} steps on {len(joined):,} tokens, loss {float(loss):.2f}")
    model.eval()


def repeated(text: list[int], prompt: int) -> int:
    """Tokens behind the prompt that had followed the two before them when those stood there last."""
    behind: dict[tuple[int, int], int] = {}
    count = 0
    for i in range(2, len(text)):
        count += i >= prompt and behind.get((text[i - 2], text[i - 1])) == text[i]
        behind[text[i - 2], text[i - 1]] = text[i]
    return count


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


def of_drafts(decoder: Decoder) -> str:
    """What its drafts came to."""
    pace = decoder.pace
    each = f", {pace.draft_s * 1e3:.1f} ms each" if pace.draft_s is not None else ""
    return f"{pace.right} of {pace.drafted} drafted tokens right{each}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--guess", type=Path, nargs="+")
    parser.add_argument("--prompt", type=int, help="its tokens: 16, for --guess 256")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=[*SIZES], default="100m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--train", type=float, default=60, help="seconds")
    parser.add_argument("--kept", type=Path, help="the trained weights: read where the file is there, else written")
    parser.add_argument("--pages", type=int, default=4, help="how many texts")
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
    plain = Decoder(model, decoder.places, guess=False, draft=False)
    drafting = Decoder(model, decoder.places, guess=False)

    def of_transformers(generate: Callable[..., Any], tokens: int, given: Any = ids, **how: Any) -> list[int]:
        asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0, **how}
        return generate(given, **asked)[0, given.shape[1] :].tolist()

    def of_ours(tokens: int, decoder: Decoder) -> list[int]:
        return [*stream(model, ids[0].tolist(), Sampling(tokens, 0.0), [], decoder)]

    ways: dict[str, Callable[[int], list[int]]] = {
        "transformers' generate": lambda tokens: of_transformers(model.generate, tokens),
        "the same, jitted": lambda tokens: of_transformers(fast.generate, tokens),
        "mycel, a token a reading": lambda tokens: of_ours(tokens, plain),
        "mycel, drafts alone": lambda tokens: of_ours(tokens, drafting),
        "mycel generate": lambda tokens: of_ours(tokens, decoder),
        "reading weights, no more": lambda tokens: [read() and -1 for _ in range(tokens)],
    }
    n = ids.shape[1]
    docs = [text for text in pages() if len(text) >= n + args.tokens]
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
    for what, one in (("drafts alone", drafting), ("mycel generate", decoder)):
        print(f"{what}: {args.tokens} tokens by {one.calls} calls of the model; in all, {of_drafts(one)}")

    def timed_text(make: Callable[[], list[int]]) -> tuple[list[int], float]:
        start = time.perf_counter()
        text = make()
        return text, time.perf_counter() - start

    given_text = Decoder(model, decoder.places)
    with torch.no_grad():
        for k, text in enumerate([*docs[:1] * WARM, *docs[: args.pages]]):
            _, theirs = timed_text(lambda: of_transformers(model.generate, args.tokens))
            _, ours = timed_text(lambda text=text: followed(given_text, text[: n + args.tokens], n))
            if k >= WARM:
                calls = f"{args.tokens / given_text.calls:.2f} tokens a call"
                print(f"as if it wrote a page: {theirs / ours:5.2f}x, {calls}; in all, {of_drafts(given_text)}")
    if args.kept and args.kept.exists():
        model.load_state_dict(torch.load(args.kept))
    else:
        train(model, docs, args.train)
        if args.kept:
            torch.save(model.state_dict(), args.kept)
    writing, rates = Decoder(model, decoder.places), []
    with torch.no_grad():
        for seed, text in enumerate([*docs[:1] * WARM, *docs[: args.pages]]):
            how, begun = Sampling(args.tokens, 0.8, seed=seed), torch.tensor([text[:n]], device=device)
            drawn = {"do_sample": True, "temperature": 0.8, "top_k": 0}
            _, theirs = timed_text(lambda b=begun, d=drawn: of_transformers(model.generate, args.tokens, b, **d))
            alone, without = timed_text(lambda t=text, h=how: [*stream(model, t[:n], h, [], plain)])
            ours, with_drafts = timed_text(lambda t=text, h=how: [*stream(model, t[:n], h, [], writing)])
            if alone != ours:
                are_met = kept(f"text {seed} is another by drafts", "the same text", False)
            if seed < WARM:
                continue
            rates.append(theirs / with_drafts)
            print(
                f"trained, at temperature 0.8: transformers {theirs:.2f} s, a token a reading {without:.2f} s, ours "
                f"{with_drafts:.2f} s: {rates[-1]:5.2f}x; {args.tokens / writing.calls:.2f} tokens a call, "
                f"{repeated([*text[:n], *ours], n)} repeated; in all, {of_drafts(writing)}"
            )
    rate = statistics.median(rates)
    said = f"what a trained model writes: {rate:.2f} of transformers' tokens/s, {min(rates):.2f} to {max(rates):.2f}"
    are_met &= kept(said, "2.0 or more", rate >= 2)
    sys.exit(not are_met)


if __name__ == "__main__":
    main()
