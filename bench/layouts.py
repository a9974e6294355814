"""Layouts of random small programs against all layouts there are: meshes of one to three axes, with and without a limit
of memory.

    python bench/layouts.py [programs] [combinations]

Each program with its mesh and given layouts is solved twice; both times the answer must be the least of all
combinations, and the bound no more.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import brute


def main() -> None:
    programs, brute.MOST = (*map(int, sys.argv[1:3]), *(2000, 3000)[len(sys.argv) - 1 :])
    rng, start, axes = random.Random(0), time.perf_counter(), Counter[int]()
    for k in range(1, programs + 1):
        case, every = brute.random_case(rng)
        sizes = [size for _, size in every]
        brute.compare(case, every, None)
        brute.compare(case, every, min(sizes) + rng.random() * (max(sizes) - min(sizes)))
        axes[len(case.mesh.axes)] += 2
        if k % 100 == 0 or k == programs:
            print(
                (
                    f"{2 * k} solved, all of them the least; axes {dict(sorted(axes.items()))}   "
                    f"{time.perf_counter() - start:.0f} s"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
