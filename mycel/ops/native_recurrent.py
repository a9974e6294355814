"""Steps of recurrent layers in C (`recurrent.c`)."""

from __future__ import annotations

import ctypes
import functools

from mycel.ops.native_library import native_library

POINTERS = {"lstm_step": 4, "lstm_step_back": 8, "gru_step": 6, "gru_step_back": 7}


@functools.cache
def steps_in_c() -> ctypes.CDLL | None:
    """The functions of `recurrent.c`, with torch's threads where the compiler knows OpenMP; None without a compiler."""
    flags = ("-fno-trapping-math", "-fno-math-errno")  # so that comparisons are computed in vectors
    library = native_library("recurrent.c", (*flags, "-fopenmp")) or native_library("recurrent.c", flags)
    if library is None:
        return None
    for name, count in POINTERS.items():
        function = getattr(library, f"mycel_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p] * count + [ctypes.c_int64] * 2, None
    return library
