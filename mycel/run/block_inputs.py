"""What blocks will be called with: how tensors lie in memory, found by running the program on fake ones.

A compiler needs more than types: strides.  Each distinct block is run once for each way in which its inputs lie; what
cannot be run so (messages, kernels of our own) is taken to be contiguous.  It is a prediction: whoever uses it
looks at what really comes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mycel.ir import DEVICE, Eqn, Program, Type, Var, call, cond, custom, loop, scan
from mycel.ops import o
from mycel.run.block_worker import Strided

Signature = tuple[Strided | None, ...]


def signature(values: Sequence[Any]) -> Signature:
    return tuple(map(Strided.of, values))


def block_inputs(
    program: Program, names: Collection[str], inputs: Sequence[Any], device: torch.device
) -> dict[str, list[Signature]]:
    """The signatures with which the blocks `names` are called, when the program is given these inputs."""
    walker = _Walker(program, names, device)
    with torch.no_grad(), without_launches(device), walker.fake:
        values = [x.empty() if (x := Strided.of(value)) else value for value in inputs]
        walker.run(program.entry, values)
    return {name: list(calls) for name, calls in walker.calls.items()}


@contextlib.contextmanager
def without_launches(device: torch.device) -> Iterator[None]:
    """Triton launches a kernel on whatever it is given, also on fake tensors, whose addresses are 0: meanwhile it
    raises in this thread."""
    if device.type != "cuda":
        yield
        return
    from triton.runtime.jit import JITFunction  # type: ignore[import-not-found]  # where there is a GPU

    run, mine = JITFunction.run, threading.get_ident()

    def run_elsewhere(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == mine:
            raise RuntimeError("a kernel is not launched on fake tensors")
        return run(kernel, *args, **kwargs)

    with mock.patch.object(JITFunction, "run", run_elsewhere):
        yield


class _Walker:
    def __init__(self, program: Program, names: Collection[str], device: torch.device) -> None:
        self.program, self.names, self.device = program, names, device
        self.fake = FakeTensorMode()
        self.calls: dict[str, dict[Signature, None]] = {}
        self.known: dict[tuple[str, Signature], list[Any]] = {}

    def run(self, name: str, inputs: list[Any]) -> list[Any]:
        """Outputs of a block; nothing is computed twice for inputs that lie alike."""
        given = signature(inputs)
        if name in self.names:
            self.calls.setdefault(name, {})[given] = None
        if (name, given) not in self.known:
            self.known[name, given] = self._outputs(name, inputs)
        return self.known[name, given]

    def _outputs(self, name: str, inputs: list[Any]) -> list[Any]:
        block = self.program.blocks[name]
        values: dict[Var, Any] = dict(zip(block.inputs, inputs, strict=True))
        value = lambda x: values[x] if isinstance(x, Var) else x
        for eqn in block.eqns:
            values.update(zip(eqn.outputs, self._results(eqn, list(map(value, eqn.inputs))), strict=True))
        return [value(x) for x in block.outputs]

    def _results(self, eqn: Eqn, args: list[Any]) -> list[Any]:
        p = eqn.params
        n = p.get("consts", 0)
        if eqn.op is call or eqn.op is custom:
            return self.run(p["block" if eqn.op is call else "forward"], args)
        if eqn.op is cond:
            return [self.run(p[branch], args[1:]) for branch in ("orelse", "then")][1]
        if eqn.op is loop:
            return [self.run(p[block], args) for block in ("test", "body")][1]
        if eqn.op is scan:
            m = n + p.get("carry", 0)
            state = self.run(p["body"], [*args[:m], *(x[0] for x in args[m:])])[: m - n] if p["length"] else args[n:m]
            return [*state, *(self._contiguous(v.type) for v in eqn.outputs[m - n :])]
        if eqn.op.inplace is not None:
            return args[: len(eqn.outputs)]
        return self._kernel(eqn, args)

    def _kernel(self, eqn: Eqn, args: list[Any]) -> list[Any]:
        op, types = eqn.op, [v.type for v in eqn.outputs]
        if op is not o.const and (op.compiles or op is o.opaque):
            extra = {"device": self.device} if "device" in op.defaults else {}
            with contextlib.suppress(Exception):  # what cannot be known is no fault of the program
                outs = op.kernel(*args, **eqn.params, **extra)
                results = list(outs) if isinstance(outs, (tuple, list)) else [outs]
                if [tuple(x.shape) for x in results] == [t.shape for t in types]:
                    return results
        return [self._contiguous(t) for t in types]

    def _contiguous(self, t: Type) -> torch.Tensor:
        return torch.empty(t.shape, dtype=t.dtype, device=self.device if t.space == DEVICE else "cpu")
