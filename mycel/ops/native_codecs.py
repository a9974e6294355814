"""int8 and int4 in C (`codec_kernels.c`), where there is a compiler (`native_library.py`)."""

from __future__ import annotations

import ctypes
import functools

import torch

from mycel.ops.native_library import native_library

# as torch computes: no product and sum in one, no reordering
EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-funroll-loops")
BITS = {"int8": 8, "int4": 4}


class NativeCodecs:
    """The functions of the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.library.mycel_encode.argtypes = [pointer] * 4 + [size] * 4 + [number, number, ctypes.c_uint32]
        self.library.mycel_decode.argtypes = [pointer] * 2 + [size] * 4 + [number, number]
        self.library.mycel_encode.restype = self.library.mycel_decode.restype = None

    def encode(self, x, e, seed, codec, rows, row, left, over):
        """`over`: what is left is written over x."""
        x = x.contiguous()
        e = None if e is None else e.float().contiguous()
        code = torch.empty(rows, codec.size(row), dtype=torch.uint8)
        rest = None if not left else x if over else torch.empty_like(x)
        self.library.mycel_encode(
            x.data_ptr(),
            None if e is None else e.data_ptr(),
            code.data_ptr(),
            None if rest is None else rest.data_ptr(),
            x.numel(),
            rows,
            row,
            codec.block,
            BITS[codec.name],
            codec.stochastic,
            seed,
        )
        return code, rest

    def decode(self, code, codec, n, row, added):
        code, y = code.contiguous(), torch.empty(n)
        bits = BITS[codec.name]
        self.library.mycel_decode(code.data_ptr(), y.data_ptr(), n, code.shape[0], row, codec.block, bits, added)
        return y


@functools.cache
def native() -> NativeCodecs | None:
    """The codecs in C; None without a compiler."""
    library = native_library("codec_kernels.c", EXACT)
    return None if library is None else NativeCodecs(library)
