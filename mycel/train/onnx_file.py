"""A causal model as an ONNX file, for runtimes without Python: tokens in, logits out, any batch and any length.

    input_ids: i64[batch, length]  ──▶  logits: f32[batch, length, vocab]

It is written by torch.onnx, and where onnxruntime is installed, held against the model on a batch that it has not seen.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mycel.errors import TrainError
from mycel.forward import evaluating
from mycel.train.sample import causal_config
from mycel.train.weights import one_line

CLOSE = 1e-3  # of the largest logit: other kernels add in another order


class TokensToLogits(nn.Module):
    """A causal model as a function of its tokens alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(input_ids=input_ids, use_cache=False).logits
        return logits


def write_onnx(module: nn.Module, path: Path, say: Callable[[str], None]) -> Path:
    """The file, beside it its weights where they are large."""
    vocab = causal_config(module, "--to onnx", "--to hf, safetensors or program").vocab_size
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise TrainError(
            "an ONNX file is written with onnx and onnxscript, which are not installed\n"
            "  try       pip install 'mycel[onnx]'"
        ) from None
    example = torch.arange(2 * 7).reshape(2, 7) % vocab
    named = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
    with evaluating(module), torch.no_grad(), _quietly():
        wrapped = TokensToLogits(module).eval()
        try:
            program: Any = torch.onnx.export(
                wrapped, (example,), input_names=["input_ids"], output_names=["logits"], dynamic_shapes=named,
                dynamo=True, verbose=False,
            )  # fmt: skip
        except Exception as e:  # torch's exporter raises many kinds
            raise TrainError(
                f"torch cannot write this model as ONNX: {one_line(e)}\n  at        {type(module).__name__}\n"
                "  try       --to hf, or --to program"
            ) from e
        path.parent.mkdir(parents=True, exist_ok=True)
        program.save(str(path))
        _check(wrapped, path, vocab, say)
    return path


def _check(module: nn.Module, path: Path, vocab: int, say: Callable[[str], None]) -> None:
    """The same logits in onnxruntime, for another batch and length."""
    try:
        import onnxruntime
    except ImportError:
        say("not checked: onnxruntime is not installed (pip install 'mycel[onnx]')")
        return
    ids = torch.randint(0, vocab, (3, 11), generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    got = torch.from_numpy(session.run(["logits"], {"input_ids": ids.numpy()})[0])
    wanted = module(ids.to(next(module.parameters()).device)).cpu()
    worst = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-30))
    if not worst < CLOSE:
        raise TrainError(
            f"the ONNX file gives other logits than the model, by {worst:.1e} of the largest\n  at        {path}\n"
            "  try       --to hf, and another exporter"
        )
    say(f"checked with onnxruntime: the model's logits to {worst:.0e}")


@contextlib.contextmanager
def _quietly() -> Any:
    """The exporter's own talk is left out."""
    was = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(was)
