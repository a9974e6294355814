"""Elements a second that a codec encodes, with what is left over in the same pass, and decodes, on one core.

    python bench/codecs.py                    all codecs, out of the cache and out of memory
    python bench/codecs.py int8 int4          these

`+ef` adds the old error and writes the new one, which is what a step does; `over` writes it over the old one.  The best
of many rounds counts: others on the machine only take away.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from mycel.ops import codec_kernels, native_codecs, o
from mycel.ops.codec_kernels import codec_of

CODECS = ("int8", "int8(block=512)", "int4", "fp8", "bf16", "sign", "topk(0.01)")
SIZES = {"cache": 1 << 17, "memory": 1 << 24}
SECONDS = 0.5


def best(run: Callable[[], Any]) -> float:
    """Seconds of the quickest round."""
    run()
    quickest, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        begun = time.perf_counter()
        run()
        quickest = min(quickest, time.perf_counter() - begun)
    return quickest


def fed_back(x: torch.Tensor, e: torch.Tensor, how: dict[str, Any]) -> Callable[[], None]:
    """Encode with the error that the round before has left."""
    kept = [e, e]

    def run() -> None:
        _, left = o.encode_residual(x, kept[0], None, **how)
        kept[:] = left, kept[0]  # a step holds the old one until it knows that it is not skipped

    return run


def over(x: torch.Tensor, e: torch.Tensor, name: str, code: torch.Tensor) -> Callable[[], None] | None:
    """Encode in C, the new error over the old one."""
    native, codec = native_codecs.native(), codec_of(name)
    if native is None or codec.name not in codec_kernels.LEVELS:
        return None
    bits = 8 if codec.name == "int8" else 4

    def run() -> None:
        at = [t.data_ptr() for t in (x, e, code, e)]
        native.library.mycel_encode(*at, x.numel(), 1, x.numel(), codec.block, bits, 0, 0)

    return run


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    print("G elements/s              encode      +ef     over   decode")
    for where, n in SIZES.items():
        x, e = torch.randn(n), torch.randn(n) * 0.01
        for name in names:
            how = {"codec": name, "rows": 1, "row": n}
            code = o.encode(x, None, **how)
            runs = [
                lambda how=how: o.encode(x, None, **how),
                fed_back(x, e, how),
                over(x, e.clone(), name, code.clone()),
                lambda name=name, code=code: o.decode(code, None, codec=name, row=n, shape=(n,)),
            ]
            rates = [f"{n / best(run) / 1e9:8.2f}" if run is not None else "       -" for run in runs]
            print(f"{name:16} {where:6}  {' '.join(rates)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(CODECS))
