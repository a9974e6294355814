"""torch's optimisers as groups of a step: which state they keep, which hyper-parameters they read, and where both live.

State stays in torch's own objects (`optimizer.state[p]`), created as torch would; hyper-parameters are read at every
call.  So
`optimizer.state_dict()`, schedulers and a later `optimizer.step()` work as if torch had taken the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mycel.errors import TrainError
from mycel.ir import NAMES
from mycel.ops.optimisers import OPTIMISERS, Optimiser, StateSlot
from mycel.ops.optimisers.paragraph import INDIFFERENT
from mycel.transform import ParameterGroup


def paragraph(optimizer: torch.optim.Optimizer) -> Optimiser | None:
    """What Mycel knows of an optimiser: of exactly torch's classes, or of any class by its name where the paragraph
    takes such."""
    kind = type(optimizer)
    for known in OPTIMISERS.values():
        if kind.__name__ in known.classes and (known.foreign or kind is getattr(torch.optim, kind.__name__, None)):
            return known
    return None


def known_of(optimizer: torch.optim.Optimizer) -> Optimiser:
    """The paragraph of an optimiser that was not refused."""
    known = paragraph(optimizer)
    assert known is not None, type(optimizer)
    return known


def refuse_unsupported(optimizer: Any) -> None:
    """Only optimisers with a paragraph, and of their options only those the paragraph understands."""
    known = paragraph(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    if known is None:
        raise TrainError(
            f"train_step was given {type(optimizer).__module__}.{type(optimizer).__qualname__} as optimizer\n"
            f"  known     {', '.join(_names())}\n"
            "  try       one of these, or mycel.value_and_grad(loss, wrt=model) with your own update"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise TrainError(
                "an optimizer with differentiable=True\n"
                "  try       leave it out: train_step takes the step outside of autograd"
            )
        options = known.options(type(optimizer).__name__, group)
        missing = sorted(known.known - {*options, *INDIFFERENT, "first_step", ""})
        if missing:
            raise TrainError(
                f"{type(optimizer).__qualname__} has no option {missing[0]!r}\n  known     {', '.join(_names())}"
            )
        for name in known.off.keys() | (optimizer.defaults.keys() - known.known):
            _refuse_option(optimizer, group, name, known.off.get(name))


def _refuse_option(optimizer: torch.optim.Optimizer, group: dict[str, Any], name: str, off: Any) -> None:
    """An option (or an attribute that stands for one) that is not switched off."""
    value = group.get(name, getattr(optimizer, name, off))
    if value != off and (off is not None or value):
        raise TrainError(
            f"{type(optimizer).__qualname__} with {name}={value!r}\n"
            f"  known     {', '.join(sorted(known_of(optimizer).known - {*INDIFFERENT, ''}))}\n"
            f"  try       {name}={off!r}, or leave it out"
        )


def _names() -> list[str]:
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

    def hyper(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        """The hyper-parameters as they are now: numbers, or tensors for a rule that may have been lowered in smaller
        operators."""
        known = known_of(optimizer)
        options = {
            **known.options(type(optimizer).__name__, optimizer.param_groups[self.index]),
            "first_step": self.is_first(optimizer),
        }
        numbers = [_number(options, option, self.params[0].dtype) for option in known.hyper.values()]
        return numbers if known.pointwise else [torch.tensor(x, dtype=torch.float64) for x in numbers]

    def is_first(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is this a first step that differs from later ones?  With dampening it does: momentum is not dampened then,
        buffers of zeros would be."""
        first = known_of(optimizer).first
        if not first or not self.group.slots or not optimizer.param_groups[self.index][first]:
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
        fill: Callable[[torch.nn.Parameter, StateSlot, float], torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """The state tensors, slot by slot, made where there are none yet (by `fill`, where a rank holds parts)."""
        options = optimizer.param_groups[self.index]
        return [
            _slot(optimizer.state[p], self.group.slot(name), p, options, fill or whole_slot)
            for name in self.group.slots
            for p in self.params
        ]


def _number(options: Mapping[str, Any], option: str, dtype: torch.dtype) -> float:
    """An option as a number: "betas.0" is the first of two."""
    name, _, at = option.partition(".")
    value = options[name][int(at)] if at else options[name]
    return torch.finfo(dtype).eps if value is None else float(value)


def whole_slot(p: torch.nn.Parameter, slot: StateSlot, value: float) -> torch.Tensor:
    """New state for a parameter that is whole."""
    if slot.scalar or slot.ones:
        return torch.full(slot.shape(p.shape), value, dtype=slot.dtype(p.dtype), device=p.device)
    return torch.full_like(p, value, memory_format=torch.preserve_format).detach()


def _slot(
    state: dict[str, Any],
    slot: StateSlot,
    p: torch.nn.Parameter,
    options: Mapping[str, Any],
    fill: Callable[..., torch.Tensor],
) -> torch.Tensor:
    held = state.get(slot.name)
    if held is None:
        state[slot.name] = fill(p, slot, slot.value(options))
    elif slot.scalar and (not isinstance(held, torch.Tensor) or held.device != p.device or held.dtype != torch.float32):
        state[slot.name] = torch.as_tensor(held, dtype=torch.float32).to(
            p.device
        )  # torch keeps it on the host, its fused kernels on the device
    return state[slot.name]


def refuse_hooks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Hooks that run after torch's backward or around its step would not be called; those on gradients are captured."""
    hooked = [f"parameter {n}" for n, p in model.named_parameters() if p._post_accumulate_grad_hooks]
    hooked += ["the optimizer"] if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks else []
    if hooked:
        raise TrainError(
            f"a hook on accumulated gradients or on the step: {', '.join(hooked[:5])}\n"
            "  try       remove it: the step is one program and calls no such hooks"
        )


def refuse_dtypes(params: Sequence[torch.nn.Parameter]) -> None:
    if any(p.dtype.is_complex for p in params):
        raise TrainError(
            "train_step was given complex parameters\n"
            "  try       real parameters, and torch.view_as_complex in the model"
        )


def bind_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[Bound]:
    """The groups of an optimiser over those of its parameters (by id) that are inputs of a program, and their names.
    Dtypes, and parameters of
    different kinds, are kept apart."""
    known, groups = known_of(optimizer), []
    for index, values in enumerate(optimizer.param_groups):
        fixed = known.params(known.options(type(optimizer).__name__, values))
        mine: dict[Any, list[torch.nn.Parameter]] = {}
        for p in values["params"]:
            if id(p) in names:
                mine.setdefault((p.dtype, tuple(known.kinds(p).items())), []).append(p)
        for i, ((dtype, kinds), params) in enumerate(mine.items()):
            flags = {**dict(kinds), **fixed}
            slots = tuple(slot.name for slot in known.present(flags))
            name = ".".join([str(index), *([NAMES[dtype]] if i else []), *(k for k, v in kinds if v and i)])
            group = ParameterGroup(
                known.op.name,
                tuple(names[id(p)] for p in params),
                slots,
                tuple(known.hyper),
                tuple(flags.items()),
                name,
            )
            groups.append(Bound(group, tuple(params), index))
    return groups


def signature(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What of an optimiser a program depends on: its parameters, which of them train, and the options that change the
    update."""
    known, kind = known_of(optimizer), type(optimizer).__name__
    flags = [tuple(known.params(known.options(kind, g)).values()) for g in optimizer.param_groups]
    params = [tuple((id(p), p.requires_grad) for p in g["params"]) for g in optimizer.param_groups]
    return tuple(zip(params, flags, strict=True))


def trainable(optimizer: torch.optim.Optimizer) -> Sequence[torch.nn.Parameter]:
    """Parameters the optimiser may change."""
    return [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
