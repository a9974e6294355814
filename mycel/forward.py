"""The loss of a batch, or what else a function makes of it with the model, without a step: under the plan of a step, in
its precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel import plan, transform
from mycel.capture import MISS, Captured, Facts, bind, make_room
from mycel.capture import capture as capture_call
from mycel.capture.arguments import device_with_data
from mycel.capture.bind import Call
from mycel.changing_values import CompiledValues
from mycel.feed import Fed, Feed, Local, feed_of, from_anywhere, refuse_without_data, refusing_parts, without_host_data
from mycel.host_parameters import HostParameters
from mycel.ir import HOST, Block, Program, Var, check
from mycel.local_forward import local_forward
from mycel.ops.product_speed import slow_products
from mycel.parts import ShardedModel, UnshardedStep, roles_of
from mycel.run import load, moves


@dataclass(frozen=True)
class Signature:
    """What was compiled for one form of the arguments: `call` takes them whole, `local` this rank's part."""

    call: Call
    local: Call
    feed: Feed
    facts: tuple[Facts, ...] = ()
    of_stages: bool = False  # was it known who holds which stages?


class Forward:
    """A function of the model without gradients, compiled once for each signature; `prepared` makes the program of what
    was captured."""

    def __init__(
        self,
        fn: Callable[..., Any],
        model: torch.nn.Module,
        prepared: Callable[[Captured], Program],
        parts: ShardedModel | None,
        in_parts: bool = False,
        strict: bool = False,
        host: HostParameters | None = None,
        changed: Callable[[Captured], Captured] | None = None,
        hardware_of: Callable[[torch.device], plan.Hardware] = plan.hardware_of,
    ) -> None:
        self.fn, self.model, self.prepared, self.parts, self.strict = fn, model, prepared, parts, strict
        self.host = host or HostParameters()  # where parameters may live
        self.changed = changed or (lambda captured: captured)
        self.hardware_of = hardware_of
        self.in_parts = in_parts  # are results that are rows of the batch this rank's alone?
        self.entries: list[Signature] = []
        self._compiled_values = CompiledValues("the evaluation")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for entry in filter(self.usable, self.entries):
            out = entry.call(args, kwargs)
            if out is not MISS:
                return out
        refuse_without_data(args, kwargs, self.model)
        out = self.prepare(*args, **kwargs).entries[0].call(args, kwargs)
        self._compiled_values.add(args, kwargs)
        return out

    def local(self, *args: Any, **kwargs: Any) -> Local:
        """The same, called with this rank's part of batches like this one, which needs no data: see `Step.local`."""
        return Local(self, args, kwargs)

    def usable(self, entry: Signature) -> bool:
        """Does this rank hold what it held when that was compiled?"""
        return entry.of_stages == self._of_stages

    @property
    def _of_stages(self) -> bool:
        return self.parts is not None and bool(self.parts.owners)

    def refuse_call(self) -> None:
        pass

    def prepare(self, *args: Any, **kwargs: Any) -> Forward:
        """Compile for such a batch; tensors of its shapes need no data (device="meta")."""
        entry = self._compiled(args, kwargs)
        make_room(self.entries, lambda e: e.facts, entry.facts)
        self.entries.insert(0, entry)
        return self

    def _loaded(self, program: Program, device: torch.device) -> Callable[..., Any]:
        """The code of a program, which finds its parameters where they live."""
        as_run = check(transform.wide_products(program, slow_products(device, transform.halves(program))))
        code = load(as_run, device, reuse=True)[0]
        if self.host.space is None or not moves(program):
            return code
        return self.host.space.connected(code)

    def _compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        parts = self.parts
        data = args, kwargs
        with self.host.shown():
            args, kwargs = without_host_data(args, kwargs, device_of(self.model))
        with self.host.shown(), parts.whole() if parts is not None else contextlib.nullcontext():
            known = roles_of(self.model)
            captured = self.changed(capture_call(self.fn, args, kwargs, known=known, data=data, strict=self.strict))
            program = self.prepared(captured)
            unsharded = UnshardedStep(captured, program, (), len(program.results), program.entry)
        if parts is None:
            local = self.host.streamed(program, captured.device)
            run, feed = self._loaded(local, captured.device), feed_of(captured, program)
            is_whole = False
        else:
            done = local_forward(parts, unsharded, self.hardware_of(captured.device), self.in_parts)
            parts.split(captured.device)
            parts.ranks.connect(done.program)
            local, is_whole = self.host.streamed(done.program, captured.device), done.is_whole
            run = parts.connected(self._loaded(local, captured.device), "a forward pass")
            feed = parts.feed(unsharded, done.spread)
            run = parts.without_padding(run, unsharded, done.rows) if done.rows else run
        at = {v.name: i for i, v in enumerate(captured.program.inputs)}
        wanted = [at[v.name] for v in local.inputs]

        def bound(batch: tuple[Var, ...], fed: Fed) -> Call:
            def without_gradients(*inputs: Any) -> Any:
                with torch.no_grad():
                    values = fed(inputs)
                    return run(*(values[i] for i in wanted))[: unsharded.results]

            call = bind(replace(called(captured, batch, local), effects=()), without_gradients)[0]
            return call if parts is None else parts.evaluating(call, is_whole)

        whole = bound(feed.inputs, feed.cut)
        if captured.facts and parts is not None:
            return Signature(whole, refusing_parts(captured.facts), feed, captured.facts, self._of_stages)
        return Signature(whole, bound(feed.parts(), feed.pad), feed, captured.facts, self._of_stages)


def called(captured: Captured, batch: Iterable[Var], local: Program) -> Captured:
    """What was captured, as this rank calls it: it is given such a batch, and holds the state that `local` takes, where
    that has it."""
    held = {**{v.name: v for v in local.inputs}, **{v.name: v for v in batch}}
    inputs = tuple(held.get(v.name) or _as_held(captured, v) for v in captured.program.inputs)
    program = Program({"main": Block(inputs, (), captured.program.results)}, roles=captured.program.roles)
    given = from_anywhere(captured)
    on_host = {v.name: torch.device("cpu") for v in local.inputs if v.type.space == HOST and v.name in given.devices}
    return replace(given, program=program, devices={**given.devices, **on_host})


def _as_held(captured: Captured, v: Var) -> Var:
    """State that a rank's program does not take: of whatever shape its part of it has."""
    held = captured.state[v.name][0].read() if v.name in captured.state else None
    return Var(v.name, replace(v.type, shape=tuple(held.shape))) if isinstance(held, torch.Tensor) else v


def device_of(model: torch.nn.Module) -> torch.device:
    """Where the model is."""
    return device_with_data(p.device for p in model.parameters())


@contextlib.contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; after, every part trains or not as it did."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
