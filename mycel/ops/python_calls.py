"""The Python that islands run (`ops/island.py`), by the names their equations have."""

from __future__ import annotations

import contextlib
import random
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction

from mycel.errors import RunError
from mycel.ir import Type, is_float, type_of
from mycel.ops.opaque import torch_gradients


class PlainCode(Protocol):
    """The user's code on its operands; `again`: for a gradient, so that what it changes in Python is changed once."""

    def __call__(self, operands: Sequence[torch.Tensor], again: bool) -> list[torch.Tensor]: ...

    def laid(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Operands that share memory in the user's code, where it writes that, share it."""
        ...

    def placed(self, operands: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
        """In here the operands lie where the code finds them."""
        ...

    def is_like(self, other: Any) -> bool:
        """Does it run the same code in the same way?"""
        ...


@dataclass(eq=False)
class PythonCall:
    """What an island runs: `call(operands, again)` gives its results.  `draws`: its first operand is a key, from which
    all random numbers follow."""

    name: str
    source: str  # the user's line
    reason: str
    call: PlainCode
    written: frozenset[int]  # operands the code changes in place: it is given copies
    asking: frozenset[int] = frozenset()  # operands that say requires_grad: the code may take gradients itself
    draws: bool = False
    grad: bool = True  # was torch.is_grad_enabled() where it was called?
    calls: int = field(default=0)
    seconds: float = field(default=0.0)

    def same_signature(self, other: PythonCall) -> bool:
        """Does it take and change the same operands?"""
        return all(getattr(self, k) == getattr(other, k) for k in ("written", "asking", "draws", "grad"))

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        wrt: Sequence[int],
        again: bool,
        behind: contextlib.ExitStack | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Its results, in memory of their own.  `behind`: for so long its operands lie where it found them, too."""
        start = time.perf_counter()
        given = [x if i in wrt else x.detach().requires_grad_(i in self.asking) for i, x in enumerate(inputs)]
        given = [x.clone() if i in self.written else x for i, x in enumerate(given)]
        given = [*given[: self.draws], *self.call.laid(given[self.draws :])]
        with seeded(inputs[0]) if self.draws else contextlib.nullcontext():
            outs = self.call(given[self.draws :], again)
        if behind is not None:
            behind.enter_context(self.call.placed(given[self.draws :]))
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return _apart(inputs, outs)


CALLS: weakref.WeakValueDictionary[str, PythonCall] = weakref.WeakValueDictionary()  # kept by what was captured


def find(name: str) -> PythonCall:
    known = CALLS.get(name)
    if known is None:
        raise RunError(
            f"the program has an island, {name}, whose Python is not part of it\n"
            "  try       capturing the code in this process; strict=True refuses islands"
        )
    return known


@contextlib.contextmanager
def seeded(key: Any) -> Iterator[None]:
    """Torch's, Python's and NumPy's random numbers follow from the key in here, and go on as before afterwards."""
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy else None
    seed = (int(key) * 0x9E3779B97F4A7C15 + 1) % 2**63
    try:
        with torch.random.fork_rng(devices=[key.device] if key.is_cuda else []):
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(python)
        if numpy:
            numpy.random.set_state(arrays)


def _apart(inputs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Results that share memory with no operand and with no other result, and whose elements share none."""
    held = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
    results = []
    for y in outs:
        if y.numel() and (y.untyped_storage().data_ptr() in held or 0 in y.stride()):
            y = y.clone(memory_format=torch.contiguous_format)
        held.add(y.untyped_storage().data_ptr())
        results.append(y)
    return tuple(results)


def run(
    inputs: Sequence[torch.Tensor], name: str, types: Sequence[Type], wrt: Sequence[int], counted: Sequence[int] = ()
) -> Any:
    """What an island gives.  Where torch's autograd records, it records this, too; else nothing of it is kept, but code
    that takes gradients itself can do so, and what it used of operands that are `counted` can be told."""
    known = find(name)
    if torch.is_grad_enabled():
        with torch.set_grad_enabled(known.grad):
            outs = known.run(inputs, wrt, again=False)
        if any(isinstance(node, BackwardCFunction) for node in _nodes(outs, inputs)):
            outs = RunAgain.of(name, types, wrt, inputs, outs)
        uses = [1 for _ in counted]
    else:
        leaves = [x.detach().requires_grad_(i in known.asking or i in wrt) for i, x in enumerate(inputs)]
        with torch.set_grad_enabled(known.grad):
            outs = known.run(leaves, wrt, again=False)
        reached = _reached(outs) if counted else set()
        uses = [int(id(leaves[i]) in reached) for i in counted]
        outs = tuple(y.detach() for y in outs)
    _check(known, outs, types)
    if counted:
        outs = (*outs, torch.tensor(uses, device=inputs[counted[0]].device))
    return outs if len(outs) != 1 else outs[0]


def _reached(results: Sequence[torch.Tensor]) -> set[int]:
    """The leaves (by id) to which a gradient of these results goes."""
    return {id(node.variable) for node in _nodes(results) if hasattr(node, "variable")}


def _nodes(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor] = ()) -> set[Any]:
    """The graph behind results, as far as to inputs."""
    seen: set[Any] = {x.grad_fn for x in inputs}
    ends = set(seen)
    nodes = [y.grad_fn for y in results]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [inner for inner, _ in node.next_functions]
    return seen - ends


class RunAgain(torch.autograd.Function):
    """Results whose gradient is that of another run: Python of theirs reads in backward what lay in its place in
    forward."""

    @staticmethod
    def of(
        name: str, types: Sequence[Type], wrt: Sequence[int], inputs: Sequence[torch.Tensor], outs: Sequence[Any]
    ) -> tuple[torch.Tensor, ...]:
        plain = [y.detach() for y in outs]
        results: tuple[torch.Tensor, ...] = RunAgain.apply(name, types, wrt, plain, *inputs)
        return results

    @staticmethod
    def forward(ctx: Any, name: str, types: Any, wrt: Any, outs: Any, *inputs: Any) -> Any:
        ctx.params, ctx.python_call = (name, types, wrt), find(name)  # which stays as long as this does
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(*(y for y in outs if not is_float(y.dtype)))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        name, types, wrt = ctx.params
        inputs = ctx.saved_tensors
        gs = [g for g, t in zip(cotangents, types, strict=True) if is_float(t.dtype)]
        grads = gradients([*inputs, *gs], name, types, wrt, (len(inputs),))
        rest = iter(grads if isinstance(grads, tuple) else (grads,))
        return None, None, None, None, *(next(rest) if i in wrt else None for i in range(len(inputs)))


def gradients(
    operands: Sequence[torch.Tensor], name: str, types: Sequence[Type], wrt: Sequence[int], arity: Sequence[int]
) -> Any:
    """Its gradient by torch, of what `wrt` names; with a further `arity` for each derivative more, of all floats."""
    known = find(name)

    def forward(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outs = known.run(inputs, wrt, again=True, behind=behind)
        _check(known, outs, types)
        return outs

    with contextlib.ExitStack() as behind:
        grads = torch_gradients(operands, forward, arity)
    kept = is_wanted(operands[: arity[-1]], wrt, arity)
    grads = _apart(operands, [g for g, k in zip(grads, kept, strict=True) if k])
    return grads if len(grads) != 1 else grads[0]


def _check(known: PythonCall, outs: Sequence[torch.Tensor], types: Sequence[Type]) -> None:
    actual = [type_of(y) for y in outs]
    if actual != list(types):
        raise RunError(
            f"an island, {known.name}, gave {', '.join(map(str, actual))}; it was captured with "
            f"{', '.join(map(str, types))}\n"
            "  at        " + known.source + "\n"
            "  try       mycel.island around a larger part, whose results have the same shapes whatever the values"
        )


def is_wanted(operands: Sequence[Any], wrt: Sequence[int], arity: Sequence[int]) -> list[bool]:
    """For each float among the operands: is its gradient a result?"""
    return [len(arity) > 1 or i in wrt for i, x in enumerate(operands) if is_float(x.dtype)]


def types_of(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> tuple[Type, ...]:
    """The types an equation's params name."""
    return tuple(Type(d, tuple(s)) for d, s in zip(dtypes, shapes, strict=True))
