"""What the experts of a model get, step by step and of a batch that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from mycel import routing, transform
from mycel.capture import MISS, Captured
from mycel.capture.bind import Call
from mycel.errors import TrainError
from mycel.expert_placement import SharedExperts, shared_experts
from mycel.expert_rows import ExpertLayer, expert_layers
from mycel.forward import Forward
from mycel.ir import Program
from mycel.parts import ShardedModel
from mycel.routing import SeenRouting

LOAD = "expert_load"  # the counter of what experts get
Routers = Callable[[Callable[[Captured], Captured]], Forward]  # what a step computes of a batch, changed as said


class ExpertLoads:
    """How many choices each expert of each layer gets; their moving average is one of the step's `counters`."""

    def __init__(self, counters: MutableMapping[str, torch.Tensor]) -> None:
        self.counters = counters
        self.seen = SeenRouting()  # of each step
        self._asked: tuple[SeenRouting, Forward] | None = None  # of a batch that is asked for
        self._routed: torch.Tensor | None = None  # in the last step
        self._layers: list[ExpertLayer] = []

    def noted(self, call: Call) -> Call:
        """A call whose last result says where tokens went, which is kept here; as it is, if the model has no
        experts."""
        if not self.seen.layers:
            return call

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = call(args, kwargs)
            if out is MISS:
                return out
            value, self._routed = out
            average = self.counters.get(LOAD)
            if average is None or average.shape != self._routed.shape:
                self.counters[LOAD] = self._routed.to(torch.float32, copy=True)
            else:
                average.lerp_(self._routed.float(), transform.SHARE)
            return value

        return run

    def of_batch(self, routers: Routers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """By layer; RunError where a router gives what is no number."""
        seen, out = self._run_routers(routers, args, kwargs)
        if not seen.layers:
            raise routing.refuse_no_layers()
        routed = out.cpu()
        seen.check(routed)
        return seen.by_layer(routed)

    def check(self, routers: Routers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """RunError where a router gives what is no number for a batch, as far as layers are seen."""
        seen, out = self._run_routers(routers, args, kwargs)
        if seen.layers:
            seen.check(out.cpu())

    def _run_routers(self, routers: Routers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[SeenRouting, Any]:
        """The layers of the model, and where the tokens of a batch go; captured once."""
        if self._asked is None:
            seen = SeenRouting()
            self._asked = seen, routers(partial(seen.added, alone=True))
        seen, run = self._asked
        return seen, run(*args, **kwargs)

    def average(self, has_run: bool) -> dict[str, torch.Tensor]:
        """Over about ten steps, by layer."""
        if has_run and not self.seen.layers:
            raise routing.refuse_no_layers()
        if self._routed is not None:
            self.seen.check(self._routed.cpu())
        average = self.counters.get(LOAD)
        return {} if average is None or not self.seen.layers else self.seen.by_layer(average.to("cpu", copy=True))

    def broken(self) -> str:
        """Whose router gave weights that are no numbers in the last step; empty: none."""
        return self.seen.broken(self._routed.cpu()) if self._routed is not None else ""

    def shared(
        self, loads: dict[str, torch.Tensor], parts: ShardedModel, captured: Program
    ) -> list[tuple[SharedExperts, list[int]]]:
        """Layers of experts with their loads, and how many experts each rank has."""
        self._layers = self._layers or expert_layers(captured)
        if len(self._layers) != len(loads):
            raise TrainError(f"loads of {len(loads)} layers of experts, but the step has {len(self._layers)}")
        layouts = parts.plan.parameter_layouts(parts.shapes)
        return [(g, g.sizes(layouts, parts.plan.mesh)) for g in shared_experts(self._layers, loads)]

    def reorder(self, orders: Mapping[str, Sequence[int]]) -> None:
        """What steps have measured follows the experts."""
        average, self._routed = self.counters.get(LOAD), None
        if average is None or not self.seen.layers:
            return
        for name, part in self.seen.by_layer(average).items():
            if order := orders.get(name):
                part.copy_(part[torch.tensor(order, device=part.device)])
