"""A step over several calls: gradients of each are added up, and one update is taken, that of one batch of all of them.

    loss = step.accumulate(**batch)        forward and backward; the gradient is added to those before
    loss = step.accumulate(**another)      of another size, say
    step.apply()                           clip, update

A call weighs what its loss is a mean over: tokens whose labels count, rows, elements; a sum weighs as it is.  That is
read off the program of the loss, beside that of a batch twice as large (`transform.weighing`).  A loss that is several
means over things that do not grow alike from call to call cannot be weighed by one number: the first counts, with a
warning.

The update is torch's (`torch_update.py`), on whole parameters; of parts and stages it is a program
(`step/applying.py`).  Where all of a batch is at hand at once, `accumulate=k` is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.capture import Captured, flatten_arguments
from mycel.errors import TrainError, warn
from mycel.ir import Var
from mycel.run import interpret
from mycel.transform import Weighing, simplify, weighing

ALIKE = 1e-6  # weights of two terms that differ by no more grow alike


class Accumulation:
    """The weighted sum of gradients so far, by parameter, and the weights of the calls; none for a loss that is a
    sum."""

    def __init__(self) -> None:
        self.sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.weights: list[tuple[float, ...]] = []

    def add(self, gradients: Iterable[tuple[torch.nn.Parameter, torch.Tensor]], weights: Sequence[float]) -> None:
        """One more call's."""
        self.weights.append(tuple(weights))
        weight = weights[0] if weights else 1.0
        for p, g in gradients:
            if not weight:  # a mean over nothing is no number
                self.sums.setdefault(p, torch.zeros_like(g))
            elif p in self.sums:
                self.sums[p].add_(g, alpha=weight)
            else:
                self.sums[p] = g * weight

    def mean(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Of all calls since the last time, which are then forgotten."""
        if not self.weights:
            raise TrainError("there is nothing to apply\n  try       step.accumulate(batch) before")
        self._compare()
        whole = sum(w[0] for w in self.weights if w) or 1.0
        gradients = {p: total.div_(whole) for p, total in self.sums.items()}
        self.sums, self.weights = {}, []
        return gradients

    def _compare(self) -> None:
        """A warning where terms of the loss weigh the calls differently."""
        counted = [w for w in self.weights if w and w[0]]
        shares = [[x / w[0] for x in w] for w in counted]
        alike = all(abs(x - y) <= ALIKE * abs(y) for s in shares for x, y in zip(s, shares[0], strict=False))
        if not alike or 0 < len([w for w in self.weights if w]) < len(self.weights):
            warn(
                "accumulate: the loss is a mean over several things, of which calls have unequal shares: they are "
                "weighed by the first\n  try       calls of one size, or train_step(…, accumulate=k)",
            )


@dataclass
class CallWeights:
    """What a call weighs, for each term of its loss; `capture` is of arguments, `trained` names what is."""

    capture: Callable[[tuple[Any, ...], dict[str, Any]], Captured]
    trained: Callable[[Captured], Collection[str]]
    known: list[tuple[Any, Captured, Weighing]] = field(default_factory=list)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
        leaves: list[torch.Tensor] = []
        form = (flatten_arguments((args, kwargs), leaves), [(x.shape, x.dtype) for x in leaves])
        for known, captured, weighed in self.known:
            if known == form and _facts_hold(captured, leaves):
                return _weights(captured, weighed, leaves)
        captured, weighed = self._weighed(args, kwargs)
        self.known.append((form, captured, weighed))
        if weighed.unseen:
            warn(
                f"accumulate: no sum or mean over the batch, so calls weigh by their rows: {'; '.join(weighed.unseen)}",
            )
        return _weights(captured, weighed, leaves)

    def _weighed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Captured, Weighing]:
        leaves: list[torch.Tensor] = []
        tree = flatten_arguments((args, kwargs), leaves)
        rows = next((x.shape[0] for x in leaves if x.ndim), 0)
        twice = [torch.cat([x, x]) if x.ndim and x.shape[0] == rows else x for x in leaves]
        captured, larger = self.capture(args, kwargs), self.capture(*tree.unflatten(iter(twice)))
        split = {name for x, name in zip(leaves, captured.leaves, strict=True) if x.ndim and x.shape[0] == rows}
        programs = (simplify(captured.program), simplify(larger.program))
        return captured, weighing(*programs, self.trained(captured), split, rows)


def _facts_hold(captured: Captured, leaves: Sequence[torch.Tensor]) -> bool:
    given = dict(zip(captured.leaves, leaves, strict=True))
    return all(set(f.inputs) <= given.keys() and f.hold(*(given[k] for k in f.inputs)) for f in captured.facts)


def _weights(captured: Captured, weighed: Weighing, leaves: Sequence[torch.Tensor]) -> list[float]:
    given: dict[str, Any] = dict(zip(captured.leaves, leaves, strict=True))
    counts: Sequence[Any] = ()
    if any(isinstance(x, Var) for x in weighed.counting.results):
        inputs: list[Any] = [given.get(v.name) for v in weighed.counting.inputs]
        counts = interpret(weighed.counting, inputs)
    return [float(counts[term]) if isinstance(term, int) else term for term in weighed.terms]
