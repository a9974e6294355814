"""Generated code -> the calls of a step: guarded, each input of the program given its value by its role.

arguments ─guards─▶ captured inputs, cut or padded ─▶ + counters, messages, optimiser's state, places of gradients
          ─▶ code ─▶ what messages lost, first steps that were skipped, torch's own update ─▶ results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mycel import optimizers, transform
from mycel.capture import bind
from mycel.capture.bind import Call
from mycel.errors import PlanError
from mycel.feed import Fed, Feed, refusing_parts
from mycel.forward import called
from mycel.host_parameters import HostParameters
from mycel.ir import DEVICE, Program, Role, Var
from mycel.message_state import KINDS, MessageState, lossy_of
from mycel.ops.optimisers import is_group_update
from mycel.outer_steps import OuterSteps
from mycel.parts import ShardedModel, UnshardedStep
from mycel.step.counters import Counters
from mycel.step.expert_loads import ExpertLoads
from mycel.step.updating import Updating

BY_REPLICA = 0x5851F42D4C957F2D  # between the keys of two replicas
Reader = tuple[list[Role], Callable[[], list[Any]]]  # roles, and what gives them their values


@dataclass(frozen=True)
class StepCalls:
    """What calls of a step read and change besides their arguments; `pending_errors`: parameters whose gradients are
    sent with what was lost of them before; `finished` is told the gradient norm of a step that was taken."""

    optimizer: torch.optim.Optimizer
    updating: Updating
    parts: ShardedModel | None
    outer: OuterSteps | None
    messages: MessageState
    counters: Counters
    loads: ExpertLoads
    host: HostParameters
    pending_errors: frozenset[str]
    finished: Callable[[torch.Tensor], None]

    def bound(
        self, unsharded: UnshardedStep, program: Program, code: Callable[..., Any], feed: Feed
    ) -> tuple[Call, Call]:
        """Of a whole batch and of a part: they read what the program's inputs are, each by its role, and run the
        code."""
        captured = unsharded.captured
        if captured.inside and self.parts is not None:
            part, whole = (getattr(captured.inside[0], k).name for k in ("part", "whole"))
            raise PlanError(
                f"{part} lies in the memory of {whole}, and the model writes one of them: on several ranks tensors lie "
                f"apart\n  try       a clone() where {part} is made, or a view that forward makes of {whole}"
            )
        run = self._run(unsharded, program, code)

        def bound(batch: Sequence[Var], fed: Fed) -> Call:
            call = bind(called(captured, batch, program), lambda *inputs: run(inputs, fed))[0]
            return self.loads.noted(call)

        whole = bound(feed.inputs, feed.cut)
        if captured.facts and self.parts is not None:
            return whole, refusing_parts(captured.facts)
        return whole, bound(feed.parts(), feed.pad)

    def _run(
        self, unsharded: UnshardedStep, program: Program, code: Callable[..., Any]
    ) -> Callable[[Sequence[Any], Fed], Any]:
        """Inputs of a call, and how they are fed -> results of a step."""
        inputs_of_call, groups, results = unsharded.captured.program.inputs, unsharded.groups, unsharded.results
        optimizer, counters, messages, outer, pending_errors = (
            self.optimizer, self.counters, self.messages, self.outer, self.pending_errors,
        )  # fmt: skip
        readers = self._readers(unsharded, program)
        given = [unsharded.program.role(v) for v in inputs_of_call]
        arranged = _arranged(
            [*given, *(role for roles, _ in readers for role in roles)], [program.role(v) for v in program.inputs]
        )
        keys = [i for i, role in enumerate(given) if role.kind == "key"]
        lossy = lossy_of({unsharded.program.role(v) for v in unsharded.program.inputs})
        leaves_gradients = bool(program.inputs_of("gradient"))

        def run(inputs: Sequence[Any], fed: Fed) -> Any:
            if outer is not None:
                outer.before_step()
            with torch.inference_mode(False), torch.no_grad():
                first = [g for g in groups if g.is_first(optimizer)]
                before = counters.skipped if first or pending_errors else 0
                values = fed(inputs)
                if outer is not None:  # each replica draws its own
                    for i in keys:
                        values[i] = values[i] + outer.parts.replica * BY_REPLICA
                for _, read in readers:
                    values += read()
                outs = code(*(values if arranged is None else arranged(values)))
                for g in first if counters.skipped > before else counters.unused(first):
                    g.forget(optimizer)  # one that was not taken is followed by the first
                if lossy:
                    messages.note(lossy)
                if pending_errors and counters.skipped == before:
                    messages.drop(pending_errors)
                if leaves_gradients:
                    unused = {p for g in counters.unused(groups) for p in g.params}
                    self.updating.finish(unsharded, outs, unused, self.parts)
            self.finished(outs[results])
            return outs[:results]

        return run

    def _readers(self, unsharded: UnshardedStep, program: Program) -> list[Reader]:
        """What gives the program's inputs besides those of the call their values, and the roles of these: in the order
        in which the passes add inputs, so that values need no rearranging at each call."""
        device = unsharded.captured.device

        def counted(v: Var) -> Reader:
            role = program.role(v)
            return [role], lambda: [self.counters.on(device, role.name, v.shape)]

        counters = program.inputs_of("counter")
        return [
            *(counted(v) for v in counters if program.role(v) == transform.LOSS_SCALE),
            *self._of_messages(program, device),
            *self._of_groups(unsharded, program, device),
            *self._of_gradients(unsharded, program),
            *(counted(v) for v in counters if program.role(v) != transform.LOSS_SCALE),
        ]

    def _of_messages(self, program: Program, device: torch.device) -> list[Reader]:
        """What messages keep."""
        kept = [(program.role(v), v.type) for v in program.inputs if program.role(v).kind in KINDS]

        def read() -> list[torch.Tensor]:
            return [self.messages.value(role, type, device) for role, type in kept]

        return [([role for role, _ in kept], read)] if kept else []

    def _of_groups(self, unsharded: UnshardedStep, program: Program, device: torch.device) -> list[Reader]:
        """State and hyper-parameters of the optimiser, group by group."""
        on_host = [program.role(v) for v in program.inputs if v.type.space != DEVICE]
        homes = {role: self.host.space.homes[role] for role in on_host} if self.host.space is not None else {}
        read_by_equations = {v for e in program.main.eqns if not is_group_update(e.op) for v in e.vars}
        as_tensors = {program.role(v) for v in program.inputs_of("hyper") if v in read_by_equations}

        def read(group: optimizers.Bound) -> list[Any]:
            hyper = group.hyper(self.optimizer)  # before its state is made: a first step is one without
            if as_tensors:
                named = zip(group.group.hyper_roles(), hyper, strict=True)
                hyper = [torch.as_tensor(x, dtype=torch.float64) if role in as_tensors else x for role, x in named]
            if self.parts is None:
                return [*group.state(self.optimizer, homes, device), *hyper]
            return [*self.parts.state(group, homes, device), *hyper]

        return [([*g.group.state_roles(), *g.group.hyper_roles()], partial(read, g)) for g in unsharded.groups]

    def _of_gradients(self, unsharded: UnshardedStep, program: Program) -> list[Reader]:
        """Places for the gradients that the program leaves."""
        params = {name: p for g in unsharded.groups for p, name in zip(g.params, g.group.params, strict=True)}
        left = [program.role(v) for v in program.inputs_of("gradient")]

        def read() -> list[torch.Tensor]:
            return [self.updating.gradient(params[role.of], role.of) for role in left]

        return [(left, read)] if left else []


def _arranged(given: Sequence[Role], wanted: Sequence[Role]) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
    """Values of the roles `given` -> those of `wanted`, in their order; None where nothing is to be done."""
    at = {role: i for i, role in enumerate(given)}
    order = [at[role] for role in wanted]
    if order == list(range(len(given))):
        return None
    return lambda values: [values[i] for i in order]
