"""A model as an ONNX file, for runtimes without Python: tokens or pixels in, logits out, any batch and any length.

    a causal model             input_ids: i64[batch, length]                    ──▶  logits: f32[batch, length, vocab]
    of classes, or a reward    input_ids, attention_mask: i64[batch, length]    ──▶  logits: f32[batch, labels]
    of images                  pixel_values: f32[batch, 3, size, size]          ──▶  logits: f32[batch, labels]

It is written by torch.onnx, and where onnxruntime is installed, held against the model on a batch that it has not seen.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mycel.errors import TrainError
from mycel.forward import evaluating
from mycel.train.sample import causal
from mycel.train.weights import one_line

CLOSE = 1e-3  # of the largest logit: other kernels add in another order
Inputs = dict[str, torch.Tensor]
DIMS = {  # those that a file leaves open
    "pixel_values": ("batch",), "input_ids": ("batch", "length"), "attention_mask": ("batch", "length"),
    "decoder_input_ids": ("batch", "decoder_length"),
}  # fmt: skip


class InputsToLogits(nn.Module):
    """A model as a function of its inputs in an order, which gives logits alone."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.module, self.names = module, tuple(names)
        self.options = {"use_cache": False} if "use_cache" in _arguments(module) else {}

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(**dict(zip(self.names, inputs, strict=True)), **self.options).logits
        return logits


def write_onnx(module: nn.Module, path: Path, say: Callable[[str], None], *, image_size: int) -> Path:
    """The file, beside it its weights where they are large."""
    example = example_inputs(module, 2, 7, image_size)
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise TrainError(
            "an ONNX file is written with onnx and onnxscript, which are not installed\n"
            "  try       pip install 'mycel[onnx]'"
        ) from None
    dims = {name: torch.export.Dim(name) for name in sorted({dim for name in example for dim in DIMS[name]})}
    shapes = tuple({i: dims[dim] for i, dim in enumerate(DIMS[name])} for name in example)
    with evaluating(module), torch.no_grad(), _quietly():
        wrapped = InputsToLogits(module, example).eval()
        try:
            with _experts_in_products(module):
                program: Any = torch.onnx.export(
                    wrapped, tuple(example.values()), input_names=[*example], output_names=["logits"],
                    dynamic_shapes=(shapes,), dynamo=True, verbose=False,
                )  # fmt: skip
        except Exception as e:  # torch's exporter raises many kinds
            raise TrainError(
                f"torch cannot write this model as ONNX: {one_line(e)}\n  at        {type(module).__name__}\n"
                "  try       --to hf, or --to program"
            ) from e
        path.parent.mkdir(parents=True, exist_ok=True)
        program.save(str(path))
        _check(wrapped, path, example_inputs(module, 3, 11, image_size), say)
    return path


def example_inputs(module: nn.Module, rows: int, length: int, image_size: int) -> Inputs:
    """A batch as the model takes it; where it takes a mask, one text of it is shorter."""
    takes = _arguments(module)
    generator = torch.Generator().manual_seed(rows)
    if "input_ids" not in takes and "pixel_values" in takes:
        return {"pixel_values": torch.randn(rows, 3, image_size, image_size, generator=generator)}
    if "input_ids" not in takes:
        raise TrainError(
            f"an ONNX file is written of models of text and of images: {type(module).__name__} takes "
            f"{next(iter(takes))}\n  at        --to onnx\n  try       --to hf or safetensors"
        )
    config: Any = module.config
    settings = config.get_text_config()
    ids = torch.randint(0, settings.vocab_size, (rows, length), generator=generator)
    if causal(module):
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    ids[0, length // 2 :], mask[0, length // 2 :] = getattr(settings, "pad_token_id", None) or 0, 0
    more = {"decoder_input_ids": ids[:, 2:].clone()} if settings.is_encoder_decoder else {}
    return {"input_ids": ids, "attention_mask": mask, **more}


def _arguments(module: nn.Module) -> Iterable[str]:
    return inspect.signature(module.forward).parameters


def _check(module: nn.Module, path: Path, inputs: Inputs, say: Callable[[str], None]) -> None:
    """The same logits in onnxruntime, for another batch and length."""
    try:
        import onnxruntime
    except ImportError:
        say("not checked: onnxruntime is not installed (pip install 'mycel[onnx]')")
        return
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    got = torch.from_numpy(session.run(["logits"], {name: x.numpy() for name, x in inputs.items()})[0])
    device = next(module.parameters()).device
    wanted = module(*(x.to(device) for x in inputs.values())).cpu()
    worst = float((got.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-30))
    if not worst < CLOSE:
        raise TrainError(
            f"the ONNX file gives other logits than the model, by {worst:.1e} of the largest\n  at        {path}\n"
            "  try       --to hf, and another exporter"
        )
    say(f"checked with onnxruntime: the model's logits to {worst:.0e}")


@contextlib.contextmanager
def _experts_in_products(module: nn.Module) -> Any:
    """Experts as a product for each token: ONNX has none of groups of rows, which transformers takes by itself."""
    config: Any = module.config
    usual = getattr(config, "_experts_implementation", None)
    if usual is not None:
        config._experts_implementation = "batched_mm"
    try:
        yield
    finally:
        if usual is not None:
            config._experts_implementation = usual


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
