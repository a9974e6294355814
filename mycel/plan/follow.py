"""Layouts for a block whose inputs are laid out: each equation in turn takes the label that costs least as its operands
lie, axis by axis."""

from __future__ import annotations

from collections.abc import Sequence

from mycel.ir import Layout, Program, Type, Var
from mycel.plan.choices import SAME, Choice, Label, Laid, Options
from mycel.plan.layouts import slowest_first
from mycel.plan.moves import Moves


def follow(program: Program, name: str, inputs: Sequence[Layout], outputs: Sequence[Layout], moves: Moves) -> Laid:
    """Greedy, for straight-line blocks: the meaning of an operator in smaller ones."""
    block = program.blocks[name]
    lies: dict[Var, Layout] = dict(zip(block.inputs, inputs, strict=True))
    choices = []
    for eqn in block.eqns:
        given = [lies[x] if isinstance(x, Var) else None for x in eqn.inputs]
        choice = nearest(Options.of(eqn), given, moves)
        lies.update(zip(eqn.outputs, choice.outs, strict=True))
        choices.append(choice)
    return Laid(tuple(inputs), tuple(choices), tuple(outputs))


def nearest(options: Options, given: Sequence[Layout | None], moves: Moves) -> Choice:
    """The choice that costs least to reach from these layouts, splitting as much as it can for nothing."""
    mesh = moves.mesh
    labels: dict[str, Label] = {}
    used = [a for a in mesh.axes if any(x is not None and a in x.axes for x in given)]
    for axis in slowest_first(used, [x for x in given if x is not None]):
        before: dict[str, tuple[str, ...]] = {}
        for a, label in labels.items():
            before.update((k, (*before.get(k, ()), a)) for k in label.letter.split())

        def cost(label: Label, axis: str = axis) -> tuple[float, int]:
            choice = options.choice({**labels, axis: label})
            wanted = [
                (t, have, want)
                for t, have, want in zip(options.inputs, given, choice.ins, strict=True)
                if isinstance(t, Type)
            ]
            seconds = sum(
                moves.seconds(t, _only(have, {*labels, axis}), want)
                for t, have, want in wanted
                if have is not None and want is not None
            )
            return seconds, label == SAME

        labels[axis] = min(options.labels(mesh, axis, before), key=cost)
    return options.choice(labels)


def _only(layout: Layout, axes: set[str]) -> Layout:
    """A layout as far as it concerns some axes."""
    for axis in layout.axes - axes:
        layout = layout.without(axis)
    return layout
