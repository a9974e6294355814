"""torch's optimisers as groups of a step: which state they keep, which hyper-parameters they read, and where both live.

State stays in torch's own objects (`optimizer.state[p]`), created as torch would; hyper-parameters are read at every
call.  So `optimizer.state_dict()`, schedulers and a later `optimizer.step()` work as if torch had taken the steps.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mycel.errors import TrainError
from mycel.ir import NAMES, Role
from mycel.ops.optimisers import OPTIMISERS, Optimiser, StateSlot
from mycel.ops.optimisers.paragraph import INDIFFERENT
from mycel.ops.space import settle_hosts
from mycel.several_optimizers import SeveralOptimizers, each_of, owner
from mycel.transform import ParameterGroup
from mycel.wrapped_optimizer import WrappedOptimizer, name_of


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Its class in the words of paragraphs: the one of torch's whose update it takes, or a name that is taken from
    anywhere; empty: neither."""
    kind: Any = type(optimizer)
    return _class_of(kind)


@functools.cache
def _class_of(kind: Any) -> str:
    if any(known.foreign and kind.__name__ in known.classes for known in OPTIMISERS.values()):
        return kind.__name__
    base: Any = next(base for base in kind.__mro__ if getattr(torch.optim, base.__name__, None) is base)
    same = inspect.unwrap(kind.step) is inspect.unwrap(base.step)
    return base.__name__ if same and getattr(kind, "_init_group", None) is getattr(base, "_init_group", None) else ""


def paragraph(optimizer: torch.optim.Optimizer) -> Optimiser | None:
    """What Mycel knows of the update an optimiser takes; None: nothing."""
    kind = class_of(optimizer)
    return next((known for known in OPTIMISERS.values() if kind in known.classes), None)


def known_of(optimizer: torch.optim.Optimizer) -> Optimiser:
    """The paragraph of an optimiser that has one."""
    known = paragraph(optimizer)
    assert known is not None, type(optimizer)
    return known


def refuse_unusable(optimizer: Any) -> None:
    """What no step can be taken with: no optimiser, one that asks for the loss itself, for gradients of another form,
    or to be differentiated."""
    for each in each_of(optimizer) if isinstance(optimizer, SeveralOptimizers) else ():
        refuse_unusable(each)
    kind = name_of(optimizer)
    if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        raise TrainError(
            f"train_step was given {kind} as optimizer, which is a scheduler\n"
            "  try       train_step(model, optimizer), and scheduler.step() after each step, as always"
        )
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise TrainError(
            f"train_step was given the class {name} as optimizer\n  try       {name}(model.parameters(), lr=…)"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = "None" if optimizer is None else "parameters" if isinstance(optimizer, Iterator) else kind
        raise TrainError(
            f"train_step was given {given} as optimizer\n"
            f"  known     {', '.join(known_names())}\n"
            "  try       one of these, made with model.parameters(); any other torch.optim.Optimizer runs as it is,\n"
            "            and so does an object with a step() that holds one in an attribute"
        )
    if isinstance(optimizer, WrappedOptimizer):
        return refuse_unusable(optimizer.held)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TrainError(
            f"{kind} computes the loss several times a step: it needs a closure\n"
            "  try       mycel.value_and_grad(loss, wrt=model) in a closure of your own, or torch.optim.AdamW"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise TrainError(
            "torch.optim.SparseAdam needs sparse gradients, those of a step are dense\n"
            "  try       torch.optim.Adam, and sparse=False in nn.Embedding"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise TrainError(
            "an optimizer with differentiable=True\n"
            "  try       leave it out: train_step takes the step outside of autograd"
        )


def without_rule(optimizer: torch.optim.Optimizer) -> str:
    """Why the update of an optimiser cannot be made part of the program; empty: it can."""
    if isinstance(optimizer, SeveralOptimizers):
        reasons = ((each, without_rule(each)) for each in optimizer.optimizers)
        return next((f"of {type(each).__qualname__}, {why}" for each, why in reasons if why), "")
    known = paragraph(optimizer)
    if known is None:
        return "Mycel has no rule for it"
    for group in optimizer.param_groups:
        options = known.options(class_of(optimizer), group)
        missing = sorted(known.known - {*options, *INDIFFERENT, "first_step", ""})
        if missing:
            return f"it has no option {missing[0]}"
        for name in sorted(known.off.keys() | (optimizer.defaults.keys() - known.known)):
            off = known.off.get(name)
            value = group.get(name, getattr(optimizer, name, off))
            if value != off and (off is not None or value):
                return f"Mycel's rule for it knows no {name}={value!r}"
    return ""


def known_names() -> list[str]:
    """The optimisers there are, as one writes them."""
    classes = [(name, known.foreign) for known in OPTIMISERS.values() for name in known.classes]
    return sorted(
        f"any {name}" if foreign else f"torch.optim.{name}"
        for name, foreign in classes
        if foreign or hasattr(torch.optim, name)
    )


@dataclass(frozen=True)
class Bound:
    """One group of a step: the group as the program sees it, its parameters, and the torch group it reads."""

    group: ParameterGroup
    params: tuple[torch.nn.Parameter, ...]
    index: int  # among optimizer.param_groups
    _looked_up: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def hyper(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """The hyper-parameters as they are now: numbers, or tensors for a rule that may have been lowered in smaller
        operators."""
        if not self.group.kind:
            return []
        mine = owner(optimizer, self.index)
        known = known_of(mine)
        options = {
            **known.options(class_of(mine), optimizer.param_groups[self.index]),
            "first_step": self.is_first(optimizer),
        }
        numbers = [_number(options, option, self.params[0].dtype) for option in known.hyper.values()]
        return numbers if known.pointwise else [torch.tensor(x, dtype=torch.float64) for x in numbers]

    def is_first(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is this a first step that differs from later ones?  With dampening it does: momentum is not dampened then,
        buffers of zeros would be."""
        first = known_of(owner(optimizer, self.index)).first if self.group.slots else ""
        if not first or not optimizer.param_groups[self.index][first]:
            return False
        new = [p for p in self.params if self.group.slots[0] not in optimizer.state[p]]
        if new and len(new) < len(self.params):
            raise TrainError(
                f"some parameters of a group with {first} have momentum, others have none yet\n"
                f"  try       a group of their own, or {first}=0"
            )
        return bool(new)

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """A first step was skipped: the next one is the first."""
        for p in self.params:
            del optimizer.state[p][self.group.slots[0]]

    def state(
        self,
        optimizer: torch.optim.Optimizer,
        homes: Mapping[Role, torch.Tensor],
        device: torch.device,
        fill: Callable[[torch.nn.Parameter, StateSlot, float], torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The state tensors, slot by slot, made where there are none yet (by `fill`, where a rank holds parts), on the
        device that updates them; those that live on the host, in their `homes`."""
        if not self.group.slots:
            return []
        options, states = optimizer.param_groups[self.index], self._states(optimizer)
        tensors: list[torch.Tensor] = []
        for slot in map(self.group.slot, self.group.slots):
            held: list[Any] = [state.get(slot.name) for state in states]
            if homes or slot.scalar or not _at_hand(held, device):
                make = fill or functools.partial(whole_slot, device=device)
                of = zip(states, self.params, self.group.params, strict=True)
                held = [
                    _slot(state, slot, p, options, make, homes.get(Role("state", slot.name, of=name)), device)
                    for state, p, name in of
                ]
            tensors += held
        return tensors

    def _states(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """What the optimiser keeps of each parameter.  Asked for at every step, so looked up anew only where one of
        its dicts is another than before: a tensor is slow as a key."""
        now = [*map(id, optimizer.state.values())]
        if self._looked_up.get("for") != now or not now:
            self._looked_up["states"] = [optimizer.state[p] for p in self.params]
            self._looked_up["for"] = [*map(id, optimizer.state.values())]
        return self._looked_up["states"]


def _at_hand(held: Sequence[Any], device: torch.device) -> bool:
    """Is a slot there for all parameters, on the device?  It lived on the host under another plan otherwise."""
    return type(None) not in map(type, held) and (not held or held[0].device == device)


def _number(options: Mapping[str, Any], option: str, dtype: torch.dtype) -> float:
    """An option as a number: "betas.0" is the first of two."""
    name, _, at = option.partition(".")
    value = options[name][int(at)] if at else options[name]
    return torch.finfo(dtype).eps if value is None else float(value)


def whole_slot(p: torch.nn.Parameter, slot: StateSlot, value: float, device: torch.device) -> torch.Tensor:
    """New state for a parameter that is whole."""
    if slot.scalar or slot.ones:
        return torch.full(slot.shape(p.shape), value, dtype=slot.dtype(p.dtype), device=device)
    return torch.full_like(p, value, device=device, memory_format=torch.preserve_format).detach()


def _slot(
    state: dict[str, Any],
    slot: StateSlot,
    p: torch.nn.Parameter,
    options: Mapping[str, Any],
    fill: Callable[..., torch.Tensor],
    home: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    held = state.get(slot.name)
    if home is not None:
        if held is not home:  # new, or loaded
            settle_hosts()
            state[slot.name] = home.fill_(slot.value(options)) if held is None else home.copy_(held)
    elif held is None:
        state[slot.name] = fill(p, slot, slot.value(options))
    elif slot.scalar and (not isinstance(held, torch.Tensor) or held.device != device or held.dtype != torch.float32):
        settle_hosts()  # torch keeps it on the host, its fused kernels on the device
        state[slot.name] = torch.as_tensor(held, dtype=torch.float32).to(device)
    elif not slot.scalar and held.device != device:  # it lived on the host under another plan
        settle_hosts()
        state[slot.name] = held.to(device)
    return state[slot.name]


def left_to_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Why torch has to take the step: a hook after its backward or around its step (those on gradients are captured),
    parameters for which there are no rules; empty: nothing."""
    if _is_hooked(optimizer):
        return "it has a hook on its step"
    names = [n for n, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    if names:
        return f"there is a hook on the accumulated gradient of {', '.join(names[:3])}"
    return "it has complex parameters" if any(p.dtype.is_complex for p in trainable(optimizer)) else ""


def bind_groups(
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    by_rule: bool = True,
    counters: Mapping[str, tuple[str, int | None]] | None = None,
) -> list[Bound]:
    """The groups of an optimiser over those of its parameters (by id) that are inputs of a program, and their names.
    Dtypes, and parameters of different kinds or with `counters` of their uses, are kept apart.  Not `by_rule`: groups
    without an update."""
    counter_of = {id_: (counters or {}).get(name, ("", None)) for id_, name in names.items()}
    groups = []
    if not by_rule:
        for index, values in enumerate(optimizer.param_groups):
            used: dict[tuple[str, int | None], list[torch.nn.Parameter]] = {}
            for p in values["params"]:
                if id(p) in names:
                    used.setdefault(counter_of[id(p)], []).append(p)
            for counter, params in used.items():
                name = ".".join([str(index), *_counter_name(*counter)])
                own = tuple(names[id(p)] for p in params)
                groups.append(Bound(ParameterGroup("", own, (), (), (), name, *counter), tuple(params), index))
        return groups
    for index, values in enumerate(optimizer.param_groups):
        mine_of = owner(optimizer, index)
        known = known_of(mine_of)
        fixed = known.params(known.options(class_of(mine_of), values))
        mine: dict[Any, list[torch.nn.Parameter]] = {}
        for p in values["params"]:
            if id(p) in names:
                mine.setdefault((p.dtype, tuple(known.kinds(p).items()), counter_of[id(p)]), []).append(p)
        for i, ((dtype, kinds, counter), params) in enumerate(mine.items()):
            flags = {**dict(kinds), **fixed}
            slots = tuple(slot.name for slot in known.present(flags))
            parts = [NAMES[dtype], *(k for k, v in kinds if v), *_counter_name(*counter)] if i else []
            name = ".".join([str(index), *parts])
            group = ParameterGroup(
                known.op.name,
                tuple(names[id(p)] for p in params),
                slots,
                tuple(known.hyper),
                tuple(flags.items()),
                name,
                *counter,
            )
            groups.append(Bound(group, tuple(params), index))
    return groups


def _counter_name(counter: str, number: int | None) -> list[str]:
    """What tells groups with counters of their uses apart."""
    return [counter, *([str(number)] if number is not None else [])] if counter else []


def signature(optimizer: torch.optim.Optimizer, by_rule: bool = True) -> tuple[Any, ...]:
    """What of an optimiser a program depends on: its parameters, which of them train, whether hooks leave the update to
    torch, and, where the program takes it, the options that change it."""
    flags: list[tuple[Any, ...]] = [()] * len(optimizer.param_groups)
    if by_rule:
        for i, group in enumerate(optimizer.param_groups):
            known, kind = known_of(owner(optimizer, i)), class_of(owner(optimizer, i))
            flags[i] = tuple(known.params(known.options(kind, group)).values())
    params = [
        tuple((id(p), p.requires_grad, bool(p._post_accumulate_grad_hooks)) for p in g["params"])
        for g in optimizer.param_groups
    ]
    return (_is_hooked(optimizer), *zip(params, flags, strict=True))


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Is there a hook on its step?"""
    kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(each, kind, None) for each in each_of(optimizer) for kind in kinds)


def trainable(optimizer: torch.optim.Optimizer) -> Sequence[torch.nn.Parameter]:
    """Parameters the optimiser may change."""
    return [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
