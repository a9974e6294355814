"""Readable names: a value is called what the user's line calls it (`h = self.fc(x)` gives `h`), else after its
operator."""

from __future__ import annotations

import functools
import linecache
import re
from dataclasses import replace

from mycel.capture.fence import SOURCES
from mycel.ir import DTYPES, Block, Eqn, Var, lookup

_TARGETS = re.compile(r"\s*([A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=]*)?=(?!=)")
_RESERVED = {"True", "False", "None", "inf", "nan", "complex", "def", "return", "stack", *DTYPES}


def rename(block: Block, known: dict[str, str], path: str) -> Block:
    """The block with readable, unique names from `known`; names of parameters relative to the module at `path`."""
    names: dict[str, int] = {}
    new: dict[Var, Var] = {}

    def give(var: Var, hint: str) -> Var:
        hint = clean(hint)
        count = names.get(hint, 0)
        names[hint] = count + 1
        while count:
            tried = f"{hint}_{count}"
            if tried not in names:
                names[tried] = 1
                hint = tried
                break
            count += 1
        new[var] = Var(hint, var.type)
        return new[var]

    for var in block.inputs:
        give(var, known.get(var.name) or (var.name.removeprefix(path + ".") if path else var.name))
    eqns = []
    for eqn in block.eqns:
        inputs = tuple(lookup(x, new) for x in eqn.inputs)  # type: ignore[arg-type]
        outputs = tuple(give(v, known.get(v.name, eqn.op.name)) for v in eqn.outputs)
        eqns.append(replace(eqn, inputs=inputs, outputs=outputs))
    return Block(
        tuple(new[v] for v in block.inputs),
        tuple(eqns),
        tuple(lookup(x, new) for x in block.outputs),  # type: ignore[arg-type]
    )


def clean(name: str) -> str:
    """A name the text can hold."""
    name = re.sub(r"[^\w.]", "_", name, flags=re.ASCII)
    name = ".".join(part or "_" for part in name.split("."))
    if not re.match(r"[A-Za-z_]|\d+(\.\w+)*\.[A-Za-z_]", name):
        name = f"_{name}"
    return f"{name}_" if name in _RESERVED else name


def hints(eqns: list[Eqn], lines: list[tuple[int, str]]) -> dict[str, str]:
    """Names by value: the last equation of a line (in its frame, calls in between aside) defines what the line
    assigns."""
    found: dict[str, str] = {}
    following: dict[int, str] = {}
    for eqn, (frame, line) in zip(reversed(eqns), reversed(lines), strict=True):
        targets = _targets(line) if following.get(frame) != line else ()
        following[frame] = line
        if len(targets) != 1 and len(targets) != len(eqn.outputs):
            targets = ()
        for i, var in enumerate(eqn.outputs):
            found[var.name] = targets[i] if i < len(targets) else eqn.op.name
    return found


@functools.cache
def _targets(source: str) -> tuple[str, ...]:
    """The plain names the user's line assigns."""
    if source not in SOURCES:
        return ()
    m = _TARGETS.match(linecache.getline(*SOURCES[source]))
    return tuple(t.strip() for t in m[1].split(",")) if m else ()
