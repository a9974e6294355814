"""Codecs in C, where there is a compiler (`native_library.py`): int8 and int4 in `codec_kernels.c`, others in
`codec_forms.c`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from mycel.ops.native_library import native_library

# as torch computes: no product and sum in one, no reordering
EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-funroll-loops")
BITS = {"int8": 8, "int4": 4}
FORMS_IN_C = ("bf16", "fp16", "fp8", "sign", "topk")  # numbered as in the file
POINTER, NUMBER, SIZE, SEED = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32


class NativeCodecs:
    """The functions of a library; `numbers(codec)`: what tells it the codec, of these types."""

    def __init__(self, library: ctypes.CDLL, types, numbers) -> None:
        self.library, self.numbers = library, numbers
        library.mycel_encode.argtypes = [POINTER] * 4 + [SIZE] * 3 + types + [NUMBER, SEED]
        library.mycel_decode.argtypes = [POINTER] * 2 + [SIZE] * 3 + types + [NUMBER]
        library.mycel_encode.restype = library.mycel_decode.restype = None

    def encode(self, x, e, seed, codec, rows, row, left, over):
        """`over`: what is left is written over x."""
        x = x.contiguous()
        e = None if e is None else e.float().contiguous()
        code = torch.empty(rows, codec.size(row), dtype=torch.uint8)
        rest = None if not left else x if over else torch.empty_like(x)
        error, remains = (None if t is None else t.data_ptr() for t in (e, rest))
        sizes = x.numel(), rows, row, *self.numbers(codec)
        self.library.mycel_encode(x.data_ptr(), error, code.data_ptr(), remains, *sizes, codec.stochastic, seed)
        return code, rest

    def decode(self, code, codec, n, row, added):
        code, y = code.contiguous(), torch.empty(n)
        sizes = n, code.shape[0], row, *self.numbers(codec)
        self.library.mycel_decode(code.data_ptr(), y.data_ptr(), *sizes, added)
        return y

    def averaged(self, e, lost, seed, share, scale, most, dtype):
        """e (1 - share) + lost share in 8 bits."""
        e, lost, y = e.contiguous(), lost.contiguous(), torch.empty(e.shape, dtype=dtype)
        run = self.library.mycel_averaged
        run.argtypes, run.restype = [POINTER] * 3 + [SIZE] + [ctypes.c_float] * 4 + [SEED], None
        run(e.data_ptr(), lost.data_ptr(), y.data_ptr(), y.numel(), 1 - share, share, scale, most, seed)
        return y


@functools.cache
def native(name: str) -> NativeCodecs | None:
    """The library that has a codec; None without a compiler, and for codecs that torch does as well."""
    if name in BITS:
        source, types = "codec_kernels.c", [SIZE, NUMBER]
        numbers: Callable[[Any], tuple[int, ...]] = lambda codec: (codec.block, BITS[codec.name])
    elif name in FORMS_IN_C:
        source, types = "codec_forms.c", [SIZE, SIZE, NUMBER]
        numbers = lambda codec: (codec.block, codec.kept, FORMS_IN_C.index(codec.name))
    else:
        return None
    library = native_library(source, EXACT)
    return None if library is None else NativeCodecs(library, types, numbers)
