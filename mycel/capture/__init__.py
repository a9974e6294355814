"""PyTorch code -> Program.  `function` runs the code once; `trace` turns what it does into equations; `repeats` finds blocks; `bind` makes it callable."""

from mycel.capture.bind import MISS, bind, draw_key
from mycel.capture.function import TRACING, Captured, capture

__all__ = ["MISS", "TRACING", "Captured", "bind", "capture", "draw_key"]
