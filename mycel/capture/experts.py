"""Layers of experts of model libraries: one operator, whichever way the library would compute them.

transformers' experts keep all weights of a layer in one tensor and choose an implementation by a setting: a loop over
the experts that were hit (whose shapes depend on the routing), a product for each token and choice (with a copy of its
expert's weights), grouped products.  All mean the same; while code is traced it is `experts` (`ops/expert_layer.py`).
What an expert does between its two products is read from its own code, traced by itself.  A layer that does more than
that is left to the library.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from mycel.capture.bounds import bounds
from mycel.capture.branches import branch
from mycel.capture.fence import refuse
from mycel.capture.trace import TRACING, Tracer
from mycel.ir import Eqn, Var
from mycel.ir.types import NAMES
from mycel.ops import o

LIBRARY = "transformers.integrations.moe"
DENSE = "transformers.models.llama4.modeling_llama4"
SWITCH = "transformers.models.switch_transformers.modeling_switch_transformers"
STEP = "transformers.models.step3p7.modeling_step3p7"
LONGCAT = "transformers.models.longcat_flash.modeling_longcat_flash"
Forward = Callable[..., torch.Tensor]


Gate = tuple[str, str]  # what is done with the parts of a hidden row, as text; what the parts are (`ops/gates.py`)


@contextlib.contextmanager
def as_one_operator() -> Iterator[None]:
    """In here layers of experts that are traced become one operator each."""
    library: Any = sys.modules.get(LIBRARY)
    dense: Any = sys.modules.get(DENSE)
    switch: Any = sys.modules.get(SWITCH)
    step: Any = sys.modules.get(STEP)
    longcat: Any = sys.modules.get(LONGCAT)
    with (
        _replaced(library and library.ExpertsInterface, "get_interface", _chosen),
        _replaced(dense and dense.Llama4TextMoe, "forward", _of_chosen_alone),
        _replaced(switch and switch.SwitchTransformersExperts, "forward", _one_by_one),
        _replaced(switch and switch.SwitchTransformersTop1Router, "forward", _with_capacity),
        _replaced(step and step.Step3p7Experts, "forward", _written_out),
        _replaced(longcat and longcat.LongcatFlashExperts, "forward", _written_out),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """A method of a class that is loaded, replaced by another made of it."""
    if not owner:
        yield
        return
    plain = getattr(owner, name)
    setattr(owner, name, by(plain))
    try:
        yield
    finally:
        setattr(owner, name, plain)


def _chosen(plain: Any) -> Any:
    """The library's choice of an implementation: ours, where it can be."""

    def chosen(interface: Any, implementation: str, default: Forward) -> Forward:
        other = plain(interface, implementation, default)

        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            gate = gate_of_module(TRACING[-1], module) if TRACING and len(args) == 3 and not kwargs else None
            return other(module, *args, **kwargs) if gate is None else as_module(TRACING[-1], module, gate, *args)

        return forward

    return chosen


def _of_chosen_alone(plain: Forward) -> Forward:
    """Llama 4 sends each token, times its score, through all experts; those not chosen get zeros and give zeros."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if not TRACING:  # in an island
            return plain(self, hidden_states)
        tracer, up = TRACING[-1], self.experts.gate_up_proj
        gate = traced_gate(tracer, lambda h: _gated(self.experts.act_fn, h), up.shape[2], up.dtype)
        if gate is None:
            return plain(self, hidden_states)
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        score, ids = torch.topk(scores, self.top_k, dim=1)
        rows = (x.unsqueeze(1) * score.unsqueeze(2)).flatten(0, 1)
        operands = rows, ids.reshape(-1, 1), torch.ones_like(rows[:, :1]), up, self.experts.down_proj, None, None
        routed = traced_layer(tracer, operands, gate, transposed=True)
        return self.shared_expert(x) + routed.unflatten(0, (-1, self.top_k)).sum(1), logits

    return forward


def _written_out(plain: Forward) -> Forward:
    """Step 3.7 and LongCat-Flash have the library's loop without its choice of an implementation; LongCat's last
    experts have no weights of their own and give back what they get."""

    def forward(self: Any, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        up, down = self.gate_up_proj, self.down_proj
        if not TRACING or up is None:
            return plain(self, hidden_states, ids, weights)
        apply = getattr(self, "_apply_gate", None) or (lambda h: _gated(self.act_fn, h))
        gate = traced_gate(TRACING[-1], apply, up.shape[1], up.dtype)
        if gate is None:
            return plain(self, hidden_states, ids, weights)
        experts, idle = down.shape[0], up.shape[0] > down.shape[0]
        operands = hidden_states, ids, weights, up[:experts] if idle else up, down, None, None
        y = traced_layer(TRACING[-1], operands, gate, transposed=False, elsewhere=idle)
        if not idle:
            return y
        back = torch.where(ids < experts, 0.0, weights).sum(-1, keepdim=True)
        return y + (hidden_states * back).to(y.dtype)

    return forward


def _one_by_one(plain: Forward) -> Forward:
    """Switch Transformers go through the experts that were hit, whose names are data; here through all, and over those
    that were not.  That is a loop that becomes one operator (`expert_loops.py`), with its capacity."""

    def forward(self: Any, hidden_states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> Any:
        if not TRACING:  # in an island
            return plain(self, hidden_states, selected, weights)
        y, mask = torch.zeros_like(hidden_states), selected.permute(2, 1, 0)

        for i in range(self.num_experts):

            def add(i: int = i) -> None:
                place, token = torch.where(mask[i])
                rows = self[f"expert_{i}"](hidden_states[token]) * weights[token, place, None]
                y.index_add_(0, token, rows.to(y.dtype))

            branch(TRACING[-1], mask[i].sum() > 0, add, lambda: None, ())
        return y

    return forward


def _with_capacity(plain: Forward) -> Forward:
    """A router whose experts take some tokens."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if self.expert_capacity < 1:
            raise refuse(
                f"expert_capacity={self.expert_capacity}: every token would be dropped",
                "expert_capacity=64 in the config",
            )
        return plain(self, hidden_states)

    return forward


def _gated(act: Callable[..., torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    a, b = h.chunk(2, dim=-1)
    return b * act(a)


def gate_of_module(tracer: Tracer, module: Any) -> Gate | None:
    """What a layer of the library does between its products; None if it does more than that, with more than a row."""
    fields = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
    if getattr(module, "_is_expert_parallel", False) or not all(hasattr(module, name) for name in fields):
        return None  # of another version of the library
    up = module.gate_up_proj if module.has_gate else module.up_proj
    width = up.shape[2] if module.is_transposed else up.shape[1]
    return traced_gate(tracer, module._apply_gate if module.has_gate else module.act_fn, width, up.dtype)


def as_module(
    tracer: Tracer, module: Any, gate: Gate, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """A layer of the library as one equation; one whose experts' results are normed before they are weighed and added
    (`post_expert_norm`): that of a token for each choice, and the norm."""
    up = module.gate_up_proj if module.has_gate else module.up_proj
    bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias) if module.has_bias else None
    down_bias = module.down_proj_bias if module.has_bias else None
    rest = up, module.down_proj, bias, down_bias
    if not getattr(module, "has_post_expert_norm", False):
        return traced_layer(tracer, (x, ids, weights, *rest), gate, bool(module.is_transposed))
    chosen, each = ids.shape[-1], torch.ones_like(weights).reshape(-1, 1)
    operands = x.repeat_interleave(chosen, dim=0), ids.reshape(-1, 1), each, *rest
    rows = module.post_expert_norm(traced_layer(tracer, operands, gate, bool(module.is_transposed)))
    return (rows * weights.reshape(-1, 1)).unflatten(0, (-1, chosen)).sum(1).to(x.dtype)


def traced_layer(
    tracer: Tracer, operands: Sequence[Any], gate: Gate, transposed: bool, capacity: int | None = None,
    elsewhere: bool = False,
) -> torch.Tensor:  # fmt: skip
    """A layer of experts as one equation, its tokens in the dtype of its weights; `capacity`: of the choices of an
    expert the first so many count, others are of an expert that is nowhere; `elsewhere`: some choices are of such."""

    def rule(x: Var, ids: Var, weights: Var, up: Var, *rest: Any) -> Any:
        ids = ids if ids.dtype == torch.int64 else o.cast(ids, dtype=torch.int64)
        if not elsewhere:
            _check_choices(tracer, ids, up.shape[0])
        rows = x if x.dtype == up.dtype else o.cast(x, dtype=up.dtype)
        more = {"elsewhere": 1} if elsewhere or capacity is not None else {}
        if capacity is not None:
            ids = within(ids, up.shape[0], capacity)
        y = o.experts(rows, ids, weights, up, *rest, gate=gate[0], form=gate[1], transposed=transposed, **more)
        return y if y.dtype == x.dtype else o.cast(y, dtype=x.dtype)

    y: torch.Tensor = tracer.wrap(tracer.apply(rule, operands, {}))
    return y


def _check_choices(tracer: Tracer, ids: Var, experts: int) -> None:
    """A check at run time that choices are of experts that are there, unless that is known: those of a topk are."""
    known = bounds(ids, tracer.producers)
    if known is not None and 0 <= known[0] <= known[1] < experts:
        return
    is_there = o.logical_and(o.ge(ids, 0), o.lt(ids, experts))
    message = no_such_expert(tracer.regions[-1].path, experts, tracer.source)
    o.assert_true(o.all(is_there, dims=tuple(range(ids.ndim))), message=message)


def no_such_expert(layer: str, experts: int, source: str = "") -> str:
    """What is said where a layer's choices are not among its experts."""
    return (
        f"{layer or 'the layer of experts'}: choices of experts that are not there: ids must be 0 to {experts - 1}\n"
        + (f"  at        {source}\n" if source else "")
        + "  try       ids from torch.topk over as many scores as there are experts"
    )


def within(ids: Var, experts: int, capacity: int) -> Any:
    """Choices of experts, those beyond an expert's capacity of none: the first tokens have theirs."""
    order, counts = o.route(ids, experts=experts)
    starts = o.sub(o.cumsum(counts, dim=0), counts)
    flat = o.reshape(ids, shape=(ids.type.numel,))
    place = o.sub(o.inverse_order(order), o.index_select(starts, flat, dim=0))
    kept = o.reshape(o.lt(place, capacity), shape=tuple(ids.shape))
    return o.where(kept, ids, experts)


def traced_gate(tracer: Tracer, fn: Callable[..., Any], width: int, dtype: torch.dtype) -> Gate | None:
    """What a function does with a hidden row, traced by itself; None if it is not made of operators on elements."""
    before, region = len(tracer.eqns), tracer.regions[-1]
    children, sites = len(region.children), region.sites
    h = torch.zeros(1, width, dtype=dtype, device=tracer.device)
    start = len(tracer.eqns)
    out = fn(h)
    gate = expression(tracer.eqns[start:], tracer.cell(h).read(), tracer.cell(out).read())
    tracer.undo(before)
    del region.children[children:]
    region.sites = sites
    return gate


def expression(eqns: Sequence[Eqn], h: Var, out: Var) -> Gate | None:
    """Equations on one row as text of its parts, and what the parts are."""
    texts: dict[Any, str] = {}
    form = ""
    for eqn in eqns:
        part = parts_of(eqn, h)
        if part is not None:
            texts.update(part[0])
            form = part[1] if form in ("", part[1]) else "mixed"
        elif eqn.op.vjp is not None and len(eqn.outputs) == 1 and eqn.op.on_elements:
            if h in eqn.inputs:
                texts[h], form = "a", "whole" if form in ("", "whole") else "mixed"
            if not all(v in texts for v in eqn.vars):
                return None
            operands = [texts[x] if isinstance(x, Var) else repr(x) for x in eqn.inputs]
            operands += [f"{k}={NAMES.get(v, repr(v))}" for k, v in eqn.params.items()]
            texts[eqn.outputs[0]] = f"{eqn.op.name}({', '.join(operands)})"
        else:
            return None
    return (texts[out], form) if out in texts and form not in ("", "mixed") else None


def parts_of(eqn: Eqn, h: Var) -> tuple[dict[Var, str], str] | None:
    """The parts of a row that an equation gives: its halves, its even or odd elements."""
    p, n = eqn.params, h.shape[-1]
    if not eqn.inputs or eqn.inputs[0] != h or p.get("dim") != h.ndim - 1:
        return None
    if eqn.op is o.split and tuple(p["sizes"]) == (n // 2, n // 2):
        return dict(zip(eqn.outputs, "ab", strict=True)), "halves"
    if eqn.op is not o.slice:
        return None
    where = p["start"], min(p["stop"], n), p.get("step", 1)
    known = {(0, n // 2, 1): "a", (n // 2, n, 1): "b", (0, n, 2): "a", (1, n, 2): "b"}
    return ({eqn.outputs[0]: known[where]}, "halves" if where[2] == 1 else "pairs") if where in known else None
