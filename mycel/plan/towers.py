"""Sub-models of a step that wait for none of the others: those that `place` may put on ranks of their own.

    vision_model ── visual_projection ─┐            towers:  vision_model, visual_projection
                                       ├─ loss               text_model, text_projection
    text_model ──── text_projection ───┘

A module's values come from the modules before it.  One that has none before it is a *source*, and what comes from one
source alone is that source's tower; what comes from several (a loss that compares them) belongs to none.
"""

from __future__ import annotations

from dataclasses import dataclass

from mycel.ir import Program, Var

DEEPEST = 3  # words of a module's name


@dataclass(frozen=True)
class Tower:
    """Modules by name, and the elements of their parameters."""

    modules: tuple[str, ...]
    elements: int


def towers(program: Program) -> tuple[Tower, ...]:
    """Of a step in one microbatch, the smallest first; nothing where each part of it waits for another."""
    names = [program.role(v).name for v in program.inputs_of("parameter")]
    depth = next((n for n in range(1, DEEPEST) if len({_module(name, n) for name in names}) > 1), DEEPEST)
    before = _modules_before(program, depth)
    sources = {name for name, others in before.items() if others == {name}}
    if len(sources) < 2:
        return ()
    elements: dict[str, int] = {}
    for v in program.inputs_of("parameter"):
        module = _module(program.role(v).name, depth)
        elements[module] = elements.get(module, 0) + v.type.numel
    candidates = []
    for source in sources:
        modules = tuple(name for name in before if before[name] & sources == {source})
        candidates.append(Tower(modules, sum(elements[name] for name in modules)))
    return tuple(sorted(candidates, key=lambda t: (t.elements, t.modules)))


def _module(parameter: str, depth: int) -> str:
    """The first words of a parameter's name."""
    return ".".join(parameter.split(".")[:depth])


def _modules_before(program: Program, depth: int) -> dict[str, set[str]]:
    """By module, in the order of the program: those that its values come from, itself among them."""
    weights: dict[Var, dict[str, int]] = {}  # of what is made of parameters alone: elements of each module
    come_from: dict[Var, frozenset[str]] = {}  # of what is made of the batch
    for v in program.inputs:
        role = program.role(v)
        if role.kind == "parameter":
            weights[v] = {_module(role.name, depth): v.type.numel}
        elif role.kind in ("batch", "key"):
            come_from[v] = frozenset()
    before: dict[str, set[str]] = {}
    for eqn in program.main.eqns:
        if eqn.phase != "forward":
            continue
        read: dict[str, int] = {}
        for v in eqn.vars:
            for name, count in weights.get(v, {}).items():
                read[name] = read.get(name, 0) + count
        if not any(v in come_from for v in eqn.vars):
            weights.update(dict.fromkeys(eqn.outputs, read))
            continue
        modules = {name for v in eqn.vars for name in come_from.get(v, ())}
        if read:  # of several modules the one with most elements, as an equation's place is chosen
            most = max(read, key=lambda name: (read[name], name))
            modules.add(most)
            before.setdefault(most, set()).update(modules)
        come_from.update(dict.fromkeys(eqn.outputs, frozenset(modules)))
    return before
