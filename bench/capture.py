"""Capture time of a 32-layer Hugging Face Llama against running it once on fake tensors, in the same run.

    python bench/capture.py [--layers 32]

Prints the median of several runs of each, their ratio, what checking costs, and how the text grows with the layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

import mycel
from mycel import transform
from mycel.capture import capture as capture_call
from mycel.ir import check


def llama(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval()


def seconds(fn: Callable[[], Any], repeats: int = 5) -> float:
    """The median; the first run warms up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    layers = parser.parse_args().layers
    model = llama(layers)
    ids = torch.zeros(2, 256, dtype=torch.long, device="meta")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with FakeTensorMode() as mode:
        state = {k: torch.empty(tuple(v.shape), dtype=v.dtype) for k, v in tensors.items()}
        fake_ids = torch.zeros(2, 256, dtype=torch.long)

    def fake() -> None:
        with mode, torch.no_grad():
            torch.func.functional_call(model, state, (fake_ids,))

    fake_s = seconds(fake)
    capture_s = seconds(lambda: mycel.capture(model, ids))
    program = mycel.capture(model, ids)
    check_s = seconds(lambda: check(program))
    double = mycel.capture(llama(2 * layers), torch.zeros(2, 256, dtype=torch.long, device="meta"))
    grown = len(double.main.eqns) - len(program.main.eqns)
    print(f"fake run   {fake_s * 1e3:8.1f} ms")
    print(f"capture    {capture_s * 1e3:8.1f} ms   {capture_s / fake_s:.2f}x of the fake run (bar: 3x)")
    print(f"check      {check_s * 1e3:8.1f} ms   {check_s / capture_s:.1%} of capture (bar: 10%)")
    loss = lambda: model(ids).logits.float().mean()
    captured = capture_call(loss, (), {}).program
    weights = [i for i, v in enumerate(captured.inputs) if v.dtype.is_floating_point]
    loss_s = seconds(lambda: mycel.capture(loss))
    derive_s = seconds(lambda: transform.value_and_grad(captured, weights))
    backward = str(transform.value_and_grad(captured, weights)).count("def llama_decoder_layer_backward")
    print(
        f"gradient   {derive_s * 1e3:8.1f} ms   {derive_s / loss_s:.2f}x of its capture (bar: 0.5x), {backward} "
        "decoder layer backward block"
    )
    print(
        f"text: {len(str(program).splitlines())} lines, {str(program).count('def llama_decoder_layer')} decoder "
        "layer block"
    )
    print(f"twice the layers add {grown} equations to main, and {len(double.blocks) - len(program.blocks)} blocks")


if __name__ == "__main__":
    main()
