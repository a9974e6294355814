"""What holds of every page that is written."""

from __future__ import annotations

import re


def brightness(color: str) -> float:
    return sum(int(color[i : i + 2], 16) * weight for i, weight in ((1, 0.3), (3, 0.59), (5, 0.11)))


def check_colors(page: str) -> None:
    """Text, lines and ground have the colours of the reader's screen; those that mean something are of a middle
    brightness, and can be seen on white and on black."""
    style, body = re.search(r"<style>(.*)</style>(.*)", page, re.DOTALL).groups()
    assert "@media (prefers-color-scheme: dark)" in style and "background: var(--paper)" in style
    colors = {*re.findall(r"#[0-9a-f]{3,8}\b", body)}
    assert colors and all(len(color) == 7 and 90 < brightness(color) < 170 for color in colors), colors
    assert not re.search(r'[":](white|black)', body)
