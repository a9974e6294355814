"""In which dtypes of 16 bits this processor multiplies slower than in 32: measured once, and remembered.

torch has products of 16 bits on every CPU, but where the processor has no instructions for them they take up to 100
times as long as those of 32.  What was measured lies beside the kernels in C (`native_library.py`), under a name of
the processor and of torch: all ranks and all later runs do the same, to the bit.  Of which equations that holds says
`narrow_products.py`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import torch

from mycel.ops.native_library import library_folder, processor

ROWS = (1, 16, 64, 256)  # AVX-512 without bf16: hardly slower at 16 rows, six times at 256
SIZE = 256  # of the weight's dims
MARGIN = 2.0  # how many times as long it must take: chance does not decide
ROUNDS = 8  # of which the quickest counts: what others do to the machine only adds


def slow_products(device: torch.device, dtypes: Collection[torch.dtype]) -> dict[torch.dtype, int]:
    """Of these dtypes those that are faster in 32 bits, casts included; and from how many rows on."""
    if device.type != "cpu":
        return {}
    rows = {dtype: _slow_from(dtype) for dtype in dtypes}
    return {dtype: least for dtype, least in rows.items() if least}


@functools.cache
def _slow_from(dtype: torch.dtype) -> int:
    """One of ROWS, or 0: at no number of rows."""
    folder = library_folder()
    if folder is None:
        return _measured(dtype)
    name = hashlib.sha256(f"{processor()}|{torch.__version__}|{MARGIN}|{ROWS}".encode()).hexdigest()[:16]
    path = folder / f"products-{str(dtype).removeprefix('torch.')}-{name}.json"
    try:
        return _kept(path) if path.is_file() else _kept(_written(path, _measured(dtype)))
    except (OSError, ValueError, KeyError, TypeError):  # a folder that cannot be written, a file that cannot be read
        return _measured(dtype)


def _kept(path: Path) -> int:
    return int(json.loads(path.read_text())["slow_from_rows"])


def _written(path: Path, rows: int) -> Path:
    """The first to come writes; others read what it wrote."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json") as aside:
        json.dump({"slow_from_rows": rows}, aside)
        aside.flush()
        with contextlib.suppress(FileExistsError):
            os.link(aside.name, path)
    return path


def _measured(dtype: torch.dtype) -> int:
    """The least of ROWS from which on all are slow."""
    slow = [*itertools.takewhile(partial(_is_slow, dtype), reversed(ROWS))]
    return slow[-1] if slow else 0


def _is_slow(dtype: torch.dtype, rows: int) -> bool:
    """Do products of so many rows take MARGIN times as long as in 32 bits?  On one thread: threads wait for each other
    where others use the machine."""
    threads, narrow, wide = torch.get_num_threads(), [], []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch says that it is slow
        torch.set_num_threads(1)
        try:
            for _ in range(ROUNDS):  # in turns
                narrow.append(_seconds(dtype, rows, lambda x: x))
                wide.append(_seconds(dtype, rows, torch.Tensor.float))
        finally:
            torch.set_num_threads(threads)
    return min(narrow) > MARGIN * min(wide)


def _seconds(dtype: torch.dtype, rows: int, as_used: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Of a product and both its gradients."""
    x, g, w = (torch.ones(n, SIZE).to(dtype) for n in (rows, rows, SIZE))
    start = time.perf_counter()
    torch.mm(as_used(x), as_used(w).t()).to(dtype)
    torch.mm(as_used(g), as_used(w)).to(dtype)
    torch.mm(as_used(g).t(), as_used(x)).to(dtype)
    return time.perf_counter() - start
