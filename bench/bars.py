"""What a benchmark has to keep, said the same way by all of them."""

from __future__ import annotations


def kept(said: str, bar: str, is_met: bool) -> bool:
    """Print what was measured, its bar, and whether that is met: which is what it returns."""
    print(f"{said}   (bar {bar}: {'met' if is_met else 'MISSED'})", flush=True)
    return is_met
