"""The loss of a batch, or what else a function makes of it with the model, without a step: under the plan of a step, in its precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from mycel import lower, plan, transform
from mycel.capture import MISS, Captured, bind
from mycel.capture import capture as capture_call
from mycel.ir import Block, Program, check
from mycel.parts import Joined, Parts, roles_of
from mycel.planning import Task, with_layouts
from mycel.run import load


class Forward:
    """A function of the model without gradients, compiled once for each signature; `prepared` makes the program of what was captured."""

    def __init__(self, fn: Callable[..., Any], model: torch.nn.Module, prepared: Callable[[Captured], Program], parts: Parts | None) -> None:
        self.fn, self.model, self.prepared, self.parts = fn, model, prepared, parts
        self.calls: list[Callable[[tuple[Any, ...], dict[str, Any]], Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for call in self.calls:
            out = call(args, kwargs)
            if out is not MISS:
                return out
        self.calls.insert(0, self._compiled(args, kwargs))
        return self.calls[0](args, kwargs)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        parts = self.parts
        with parts.whole() if parts is not None else nullcontext():
            captured = capture_call(self.fn, args, kwargs, known=roles_of(self.model))
            program = self.prepared(captured)
            made = Joined(captured, program, (), len(program.results), program.entry)
        if parts is None:
            run, local = load(program, captured.device, reuse=True)[0], program
        else:
            inputs, gathered = parts.given(made)
            task = Task(program, program.entry, plan.hardware_of(captured.device), False, inputs, gathered)
            spread = with_layouts(task, parts.plan.given)[1]
            assert spread is not None
            parts.split(captured.device)
            local = check(lower.overlap(check(lower.hoist(transform.simplify(spread.local)))))
            run = parts.taken(load(local, captured.device, reuse=True)[0], spread, local)

        def without_gradients(*inputs: Any) -> Any:
            with torch.no_grad():
                return run(*inputs)[: made.results]

        return bind(replace(called(captured, program, local), effects=()), without_gradients)[0]


def called(captured: Captured, whole: Program, local: Program) -> Captured:
    """What was captured, as this rank calls it: it is given the whole batch, as `whole` has it, and holds the state that `local` takes."""
    batch, held = {v.name: v for v in whole.inputs}, {v.name: v for v in local.inputs}
    inputs = tuple(batch[v.name] if whole.role(v).kind == "batch" else held.get(v.name, v) for v in captured.program.inputs)
    return replace(captured, program=Program({"main": Block(inputs, (), captured.program.results)}, roles=captured.program.roles))
