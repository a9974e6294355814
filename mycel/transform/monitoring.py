"""What a plan watches of gradients (`monitor`), as counters of the step; each is a moving average over about ten steps.

    small_k = k Σ |g_i|²         over the k ranks of an axis, whose shares g_i add up to the gradient: the mean square
                                 of a rank's own gradient
    large_k = |Σ g_i|²           of the gradient
    error   = Σ |e_i|²           of each optimiser's group: what compressing has left behind

All of it is of matrices, if there are any: sums of small gradients may be shared before they are measured.  As a rule
there is one k; sub-models on meshes of their own may have several.  From these come the variance of gradients and the
noise scale (McCandlish et al. 2018), in units of the batch, with large the sum of all large_k:

    variance = Σ (small_k - large_k) / (k - 1)  what the whole batch leaves of it
    noise    = variance / (large - variance)    so many batches as large as this one would still pay
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mycel.ir import Builder, Program, Role, Type, Var
from mycel.ops import o
from mycel.transform.scaling import LOSS_SCALE

SMALL, LARGE, ERROR = "gradient_squares", "mean_gradient_squares", "error_squares"
SHARE = 0.1  # of a new value in an average


def monitor_ranks(program: Program, ranks: Sequence[int], results: int, axis: str) -> Program:
    """results[results:] are gradients, before they are compressed, each the sum over so many ranks of an axis: their
    squares on these."""
    watch = _Watching(program)
    with watch.b:
        for k, gradients in _by_ranks(program.main.outputs[results:], ranks).items():
            squares = watch.total([o.rank_squares(g, axes=(axis,)) for g in gradients])
            watch.average(f"{SMALL}_{k}", watch.unscaled(o.mul(squares, float(k))))
    return watch.program()


def monitor_sums(
    program: Program, ranks: Sequence[int], names: Sequence[Sequence[str]], results: int, axis: str, errors: bool
) -> Program:
    """What has come of them, and with `errors`, of each group what compressing has left behind."""
    watch, inputs = _Watching(program), program.by_role()
    new = dict(zip(program.updates, program.main.outputs[len(program.results) :], strict=True))
    with watch.b:
        for k, sums in _by_ranks(program.main.outputs[results:], ranks).items():
            norm = o.cast(o.global_norm(*sums), dtype=torch.float32)
            watch.average(f"{LARGE}_{k}", watch.unscaled(o.square(norm)))
        for i, group in enumerate(names if errors else ()):
            left = [new[inputs[role].name] for name in group if (role := Role("error", of=name, over=axis)) in inputs]
            if left:
                watch.average(f"{ERROR}_{i}", watch.total([o.rank_squares(e, axes=(axis,)) for e in left]))
    return watch.program()


def _by_ranks(gradients: Sequence[Any], ranks: Sequence[int]) -> dict[int, list[Var]]:
    """Those that count, by the number of ranks they are summed over: matrices, or all, if none is one."""
    there = [(g, k) for g, k in zip(gradients[: len(ranks)], ranks, strict=True) if isinstance(g, Var) and k > 1]
    there = [(g, k) for g, k in there if g.type.ndim > 1] or there
    by_ranks: dict[int, list[Var]] = {}
    for g, k in there:
        by_ranks.setdefault(k, []).append(g)
    return by_ranks


class _Watching:
    def __init__(self, program: Program) -> None:
        main = program.main
        self.before, self.b, self.roles = program, Builder.after(main, phase="update"), dict(program.roles)
        self.updates: dict[str, Any] = {}

    def total(self, squares: Sequence[Any]) -> Any:
        return o.total(*(o.cast(s, dtype=torch.float32) for s in squares))

    def unscaled(self, x: Any) -> Any:
        scale = self.before.by_role().get(LOSS_SCALE)
        return x if scale is None else o.div(x, o.square(o.cast(scale, dtype=torch.float32)))

    def average(self, name: str, x: Any) -> None:
        old = self.b.input(name, Type(torch.float32, ()))
        self.roles[old.name] = Role("counter", name)
        self.updates[old.name] = o.add(o.mul(old, 1.0 - SHARE), o.mul(x, SHARE))

    def program(self) -> Program:
        main = self.before.main
        block = replace(
            main,
            inputs=tuple(self.b.inputs),
            eqns=tuple(self.b.eqns),
            outputs=(*main.outputs, *self.updates.values()),
        )
        return replace(
            self.before,
            blocks={**self.before.blocks, self.before.entry: block},
            updates=(*self.before.updates, *self.updates),
            roles=self.roles,
        )
