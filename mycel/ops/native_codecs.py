"""int8 and int4 in C (`codec_kernels.c`), compiled once for this machine by the compiler that is there; None where
there is none.

The library lies in `$MYCEL_KERNELS`, else `~/.cache/mycel/kernels`, under a name of its source, the compiler and the
processor; `MYCEL_KERNELS=` (empty) leaves C out.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("codec_kernels.c")
# as torch computes: no product and sum in one, no reordering; the rest is speed
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
WIDE = ("-mprefer-vector-width=512",)  # of x86 alone


class NativeCodecs:
    """The functions of the library."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.library.mycel_encode.argtypes = [pointer] * 4 + [size] * 4 + [number, number, ctypes.c_uint32]
        self.library.mycel_decode.argtypes = [pointer] * 2 + [size] * 4 + [number, number]
        self.library.mycel_encode.restype = self.library.mycel_decode.restype = None

    def encode(self, x, e, seed, codec, rows, row, left):
        x, e = x.contiguous(), None if e is None else e.float().contiguous()
        code = torch.empty(rows, codec.size(row), dtype=torch.uint8)
        rest = torch.empty_like(x) if left else None
        at_e, at_rest = (None if y is None else y.data_ptr() for y in (e, rest))
        bits = 8 if codec.name == "int8" else 4
        self.library.mycel_encode(
            x.data_ptr(),
            at_e,
            code.data_ptr(),
            at_rest,
            x.numel(),
            rows,
            row,
            codec.block,
            bits,
            codec.stochastic,
            seed,
        )
        return code, rest

    def decode(self, code, codec, n, row, added):
        code, y = code.contiguous(), torch.empty(n)
        self.library.mycel_decode(
            code.data_ptr(), y.data_ptr(), n, code.shape[0], row, codec.block, 8 if codec.name == "int8" else 4, added
        )
        return y


@functools.cache
def native() -> NativeCodecs | None:
    """The library, compiled where it is not there yet; None without a compiler, or where it fails."""
    folder = os.environ.get("MYCEL_KERNELS", str(Path.home() / ".cache" / "mycel" / "kernels"))
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not folder or not compiler:
        return None
    wide = WIDE if platform.machine() == "x86_64" else ()
    identity = [SOURCE.read_bytes().hex(), compiler, *FLAGS, *wide, platform.machine(), _processor()]
    path = Path(folder) / f"codecs-{hashlib.sha256('|'.join(identity).encode()).hexdigest()[:16]}.so"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as aside:  # ranks compile at the same time
                made = Path(aside) / "codecs.so"
                subprocess.run(
                    [compiler, *FLAGS, *wide, str(SOURCE), "-o", str(made)], check=True, capture_output=True, timeout=60
                )
                made.rename(path)
        return NativeCodecs(path)
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    """What the processor can do: a home folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
