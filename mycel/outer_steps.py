"""What replicas do after steps of their own (`sync` of a plan): the messages of `lower/outer.py`, when they are due.

    step  1  2  3  4  5  6  7  8        streaming(H=4, fragments=2, overlap=1)
    send     a     b     a     b
    wait        a     b     a

How many steps were taken is a counter of the step (`taken`), what is kept between messages is its state
(`message_state.py`): a run that goes on sends what it would have sent.  A message that was under way when a checkpoint
was saved is sent again from what was noted, and is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.ir import Program, Role, Type, Var
from mycel.lower import SENT_AT, OuterMessage, outer_messages
from mycel.message_state import KINDS, MessageState
from mycel.parts import ShardedModel, UnshardedStep
from mycel.plan import SyncPolicy
from mycel.run import load
from mycel.run.processes import Pending

TAKEN = "taken"  # the counter of steps
Code = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class LoadedMessage:
    """A message as code, and the programs it was made of."""

    message: OuterMessage
    takes: Code | None
    parts: tuple[Code, ...]


@dataclass
class MessageUnderWay:
    """How many of its parts have run, and what they returned, by name."""

    done: int = 0
    values: dict[str, Any] = field(default_factory=dict)


class OuterSteps:
    """Of one step."""

    def __init__(self, policy: SyncPolicy, parts: ShardedModel, messages: MessageState) -> None:
        self.policy, self.parts, self.messages = policy, parts, messages
        self.steps = 0
        self.fragments: list[list[LoadedMessage]] = []
        self.under_way: dict[int, MessageUnderWay] = {}  # by fragment
        self.device = torch.device("cpu")

    def prepare(self, unsharded: UnshardedStep, layouts: Mapping[int, Any]) -> None:
        """Make the messages, once: a model has the same parameters whatever the batch.  A rank of a pipeline says
        something about those that it holds, and knows of all how they lie."""
        if self.fragments:
            return
        self.device = unsharded.captured.device
        shapes = {unsharded.program.role(v): v.type for v in unsharded.program.inputs}
        for each in outer_messages(unsharded.program, layouts, self.parts.plan, self.parts.is_own):
            self.fragments.append([self._loaded(message) for message in each])
        for each in outer_messages(unsharded.program, layouts, self.parts.plan):
            for v in each[0].whole.inputs:
                role = each[0].whole.role(v)
                if role.kind in KINDS:
                    of = next(shapes[held] for held in shapes if held.name == role.of and held.kind != "batch")
                    self.parts.slots[role] = self._layout(role), Type(v.dtype, of.shape)

    def _layout(self, role: Role) -> Any:
        layout = self.parts.layouts[role.of]
        if role.kind == "error":
            return layout.with_partial(role.over, "+")
        return self.parts.apart(layout) if role.name == "sent" else layout

    def _loaded(self, message: OuterMessage) -> LoadedMessage:
        code = lambda program: self.parts.connected(load(program, self.device, donate=True)[0])
        takes = None if message.takes is None else code(message.takes)
        return LoadedMessage(message, takes, tuple(map(code, message.parts)))

    def before_step(self) -> None:
        """Outer steps start from where the model is."""
        held = dict(self.parts.tensors()) if self.policy.has_outer_step else {}
        for message in (each[0].message.whole for each in self.fragments if each) if held else ():
            for v in message.inputs:
                role = message.role(v)
                if role.kind == "outer" and role.name == "anchor" and role not in self.messages.held:
                    self.messages.held[role] = held[role.of].detach().to(v.dtype, copy=True)

    def after_step(self) -> None:
        """Receive and send what is due."""
        self.steps += 1
        self.parts.moved()
        for i, each in enumerate(self.fragments):
            count = len(each[0].parts) if each else 0
            for part in range(1, count):
                then = self.steps - self.policy.delay(part, count)
                if self.policy.is_sent(i, then):
                    self._run_until(part, i, self._round(each, then), then)
            if each and self.policy.is_sent(i, self.steps):
                message = self._round(each, self.steps)
                if message.takes is not None and message.message.takes is not None:
                    self._run(message.takes, message.message.takes, self.steps, {})
                self._run_until(0, i, message, self.steps)

    def _run_until(self, part: int, fragment: int, message: LoadedMessage, sent_at: int) -> None:
        """A part of a message, and those before it where they have not run: so it is after a resume."""
        message_now = self.under_way.setdefault(fragment, MessageUnderWay())
        for k in range(message_now.done, part + 1):
            program = message.message.parts[k]
            results = self._run(message.parts[k], program, sent_at, message_now.values)
            message_now.done = k + 1
            if message_now.done == len(message.parts):
                del self.under_way[fragment]
            else:
                names = (v.name for v in program.main.outputs if isinstance(v, Var))
                message_now.values |= dict(zip(names, results, strict=True))

    def go_on(self, steps: int) -> None:
        """From another state, after so many steps: what is under way is of the one that was left."""
        for message in self.under_way.values():
            for token in message.values.values():
                if isinstance(token, Pending):
                    self.parts.ranks.wait(token)
        self.under_way.clear()
        self.parts.moved()
        self.steps = steps

    def _round(self, each: Sequence[LoadedMessage], steps: int) -> LoadedMessage:
        return each[steps // self.policy.every % len(each)]

    def _run(self, code: Code, program: Program, sent_at: int, passed: Mapping[str, Any]) -> Sequence[Any]:
        """`passed`: what parts before it returned, by name."""
        tensors = dict(self.parts.tensors())
        values = []
        for v in program.inputs:
            role = program.role(v)
            if v.name in passed:
                values.append(passed[v.name])
            elif role.kind in KINDS:
                values.append(self.messages.value(role, v.type, self.device))
            elif role == SENT_AT:
                values.append(torch.tensor(sent_at, device=self.device))
            else:
                values.append(tensors[role.name].data)
        with torch.no_grad():
            return code(*values)
