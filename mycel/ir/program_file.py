"""A program on disk: one safetensors file, its text and a checksum in the metadata, its constants as tensors.

Loading reads and parses; it never unpickles or evaluates.  A damaged file gives LoadError.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from mycel.errors import IRError, LoadError, TextError
from mycel.ir.program import Program
from mycel.ir.text import to_text

FORMAT = "mycel-program-1"


def save(program: Program, path: str | os.PathLike[str]) -> None:
    """Write the program to `path`, atomically."""
    text = to_text(program)
    consts = {k: c.detach().cpu().contiguous() for k, c in program.consts.items()}
    metadata = {"format": FORMAT, "program": text, "sha256": _digest(text, consts)}
    partial = Path(f"{path}.part{os.getpid()}")
    try:
        partial.write_bytes(safetensors.torch.save(consts, metadata))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Program:
    """The program saved at `path`."""
    if not Path(path).is_file():
        raise LoadError(f"no saved program at {path}")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            consts = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as e:
        raise LoadError(f"{path} is damaged or truncated: {e}") from e
    if metadata.get("format") != FORMAT:
        raise LoadError(f"{path} is not a saved program (format {metadata.get('format')!r}, expected {FORMAT!r})")
    text = metadata.get("program", "")
    if metadata.get("sha256") != _digest(text, consts):
        raise LoadError(f"{path} is damaged: its checksum does not match its content")
    try:
        return Program.parse(text, consts)
    except (TextError, IRError) as e:
        raise LoadError(f"{path} does not hold a program this version reads: {e}") from e


def _digest(text: str, consts: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(consts.items()):
        digest.update(name.encode())
        digest.update(str((tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
