"""A page that needs nothing but itself, light or dark as its reader's screen is: text and pictures (SVG, written here)
take their colours from the variables below, and what is coloured in can be told apart on either ground.
"""

from __future__ import annotations

import html

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #222; --quiet: #6b6b6b; --rule: #ddd; --best: #e9f4e9;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171b; --ink: #e4e6e9; --quiet: #a0a6ae; --rule: #3b4048; --best: #1d3324; }
}
body {
  font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1340px; padding: 0 1rem;
  background: var(--paper); color: var(--ink);
}
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem .7rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
td:first-child, th:first-child, td:last-child, th:last-child { text-align: left; }
.scroll td:first-child, .scroll td:nth-last-child(-n+2) { white-space: normal; min-width: 11rem; }
tr.best { background: var(--best); } .scroll { overflow-x: auto; } .quiet { color: var(--quiet); }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--ink); }
svg .step { stroke: var(--paper); stroke-width: .4; } svg text.name { font-size: 10px; fill: #fff; }
svg .mark { stroke: var(--quiet); }
.cuts { display: flex; flex-wrap: wrap; gap: 1.2rem; } figure { margin: 0; } figcaption { font-size: 12px; }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""


def html_page(title: str, body: str) -> str:
    """The whole page around its body."""
    head = (
        '<meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'
