"""Elements a second that a codec encodes, with what is left over in the same pass, and decodes, on one core.

    python bench/codecs.py                    all codecs, out of the caches and out of memory
    python bench/codecs.py int8 int4          these

`+ef` adds the old error and writes the new one over the gradient, which nobody reads any more: what a step does.
`apart` writes it to new memory.  `add` decodes two ranks' rows and adds them up.
`touch` is what this core can do at all: it reads two tensors and writes their sum over one of them, which is what
`+ef` must move but for its codes; `copy` copies one.  All of a row go in turns, so that who else uses the machine takes
from all alike, and the best of many rounds counts.  Where there is a GPU, its kernels as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from mycel.ops import o
from mycel.run import keep_freed_memory

CODECS = ("int8", "int8(block=512)", "int4", "fp8", "bf16", "sign", "topk(0.01)")
SIZES = {"L2": 1 << 15, "cache": 1 << 17, "shared": 1 << 20, "memory": 1 << 24}
SECONDS, IN_A_TURN, BAR = 2.0, 4, 1.5
Run = Callable[[], Any]


def best(runs: list[Run], device: str) -> list[float]:
    """Seconds of the quickest run of each, in turns of a few runs."""
    quickest = [float("inf")] * len(runs)
    end, rounds = time.perf_counter() + SECONDS, 0
    while time.perf_counter() < end or rounds < 3:
        rounds += 1
        for i, run in enumerate(runs):
            for _ in range(IN_A_TURN):
                begun = time.perf_counter()
                run()
                if device != "cpu":
                    torch.cuda.synchronize()
                quickest[i] = min(quickest[i], time.perf_counter() - begun)
    return quickest


def fed_back(x: torch.Tensor, e: torch.Tensor, how: dict[str, Any], over: bool) -> Run:
    """Encode a gradient with the error of the round before; as a sum they change places, so that it stays."""
    kept = [e]

    def run() -> None:
        _, kept[0] = o.encode_residual.kernel(kept[0], x, None, **how, over=over)

    return run


def row_of(name: str, n: int, device: str) -> list[float]:
    """Billions of elements a second, by column."""
    x, e = torch.randn(n, device=device), torch.randn(n, device=device) * 0.01
    how = {"codec": name, "rows": 1, "row": n}
    code, total = o.encode(x, None, **how), torch.empty_like(x)
    two = torch.cat([code, code])
    runs: list[Run] = [
        lambda: o.encode(x, None, **how),
        fed_back(x.clone(), e.clone(), how, over=True),
        fed_back(x.clone(), e.clone(), how, over=False),
        lambda: o.decode(code, None, codec=name, row=n, shape=(n,)),
        lambda: o.decode_sum(two, None, codec=name, row=n, shape=(n,)),
        lambda: e.add_(x),
        lambda: total.copy_(x),
    ]
    return [n / s / 1e9 for s in best(runs, device)]


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as a step does
    print("G elements/s                     encode      +ef    apart   decode      add    touch     copy")
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        for where, n in SIZES.items() if device == "cpu" else [("device", 1 << 26)]:
            for name in names:
                rates = row_of(name, n, device)
                reached = f"   int8+ef {rates[1]:.2f}, bar {BAR}: {'holds' if rates[1] >= BAR else 'missed'}"
                rows = " ".join(f"{r:8.2f}" for r in rates)
                print(f"{device:4} {name:16} {where:7}  {rows}{reached if name == 'int8' else ''}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(CODECS))
