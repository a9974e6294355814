"""torch's optimisers as groups of a step: which state they keep, which hyper-parameters they read, and where both live.

State stays in torch's own objects (`optimizer.state[p]`), created as torch would; hyper-parameters are read at every call.  So
`optimizer.state_dict()`, schedulers and a later `optimizer.step()` work as if torch had taken the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.errors import TrainError
from mycel.ir import NAMES
from mycel.transform import Group

ADAM = ("lr", "beta1", "beta2", "eps", "weight_decay")
SGD = ("lr", "momentum", "dampening", "weight_decay", "first_step")
FLAGS = ("nesterov", "amsgrad", "maximize", "decoupled_weight_decay")
SUPPORTED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def refuse_unsupported(optimizer: Any) -> None:
    """Only optimisers whose update is an operator."""
    if type(optimizer) not in SUPPORTED:
        names = ", ".join(f"torch.optim.{c.__name__}" for c in SUPPORTED)
        raise TrainError(
            f"train_step was given {type(optimizer).__module__}.{type(optimizer).__qualname__} as optimizer\n"
            f"  known     {names}\n  try       one of these, or mycel.value_and_grad(loss, wrt=model) with your own update"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise TrainError("an optimizer with differentiable=True\n  try       leave it out: train_step takes the step outside of autograd")


@dataclass(frozen=True)
class Bound:
    """One group of a step: the group as the program sees it, its parameters, and the torch group it reads."""

    group: Group
    params: tuple[torch.nn.Parameter, ...]
    index: int  # among optimizer.param_groups

    def hyper(self, optimizer: torch.optim.Optimizer) -> list[float]:
        """The hyper-parameters as they are now."""
        values = optimizer.param_groups[self.index]
        if self.group.kind == "sgd":
            return [float(values["lr"]), values["momentum"], values["dampening"], values["weight_decay"], float(self.is_first(optimizer))]
        beta1, beta2 = values["betas"]
        return [float(values["lr"]), float(beta1), float(beta2), values["eps"], values["weight_decay"]]

    def is_first(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is this the first step of momentum that is dampened?  It is not dampened then; without dampening, buffers of zeros do the same."""
        if not self.group.slots or self.group.kind != "sgd" or not optimizer.param_groups[self.index]["dampening"]:
            return False
        new = [p for p in self.params if "momentum_buffer" not in optimizer.state[p]]
        if new and len(new) < len(self.params):
            raise TrainError(
                "some parameters of a group with dampening have momentum, others have none yet\n  try       a group of their own, or dampening=0"
            )
        return bool(new)

    def state(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The state tensors, slot by slot, made where there are none yet."""
        return [_slot(optimizer.state[p], name, p) for name in self.group.slots for p in self.params]


def _slot(state: dict[str, Any], name: str, p: torch.nn.Parameter) -> torch.Tensor:
    found = state.get(name)
    if found is None:
        found = torch.zeros((), device=p.device) if name == "step" else torch.zeros_like(p, memory_format=torch.preserve_format)
        state[name] = found.detach()
    elif name == "step" and (not isinstance(found, torch.Tensor) or found.device != p.device or found.dtype != torch.float32):
        state[name] = torch.as_tensor(found, dtype=torch.float32).to(p.device)  # torch keeps it on the host, its fused kernels on the device
    return state[name]


def refuse_hooks(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Hooks that run inside of torch's backward or step would not be called."""
    found = [f"parameter {n}" for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    found += [f"module {n or type(m).__name__}" for n, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    found += ["the optimizer"] if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks else []
    if found:
        raise TrainError(
            f"a hook on backward or on the step: {', '.join(found[:5])}\n  try       remove it: the step is one program and calls no such hooks"
        )


def refuse_dtypes(params: Sequence[torch.nn.Parameter]) -> None:
    if any(p.dtype.is_complex for p in params):
        raise TrainError("train_step was given complex parameters\n  try       real parameters, and torch.view_as_complex in the model")


def bind_groups(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> list[Bound]:
    """The groups of an optimiser over those of its parameters (by id) that are inputs of a program, and their names.  Dtypes are kept apart."""
    found = []
    for index, values in enumerate(optimizer.param_groups):
        mine = [p for p in values["params"] if id(p) in names]
        for i, dtype in enumerate(dict.fromkeys(p.dtype for p in mine)):
            params = tuple(p for p in mine if p.dtype == dtype)
            group = _group(type(optimizer), values, tuple(names[id(p)] for p in params))
            name = f"{index}.{NAMES[dtype]}" if i else str(index)
            found.append(Bound(replace(group, name=name), params, index))
    return found


def _group(kind: type, values: dict[str, Any], params: tuple[str, ...]) -> Group:
    if kind is torch.optim.SGD:
        buffers = ("momentum_buffer",) if values["momentum"] else ()
        flags = {"momentum": bool(values["momentum"]), "nesterov": bool(values["nesterov"]), "maximize": bool(values["maximize"])}
        return Group("sgd", params, buffers, SGD, tuple(flags.items()))
    decoupled = values.get("decoupled_weight_decay", kind is torch.optim.AdamW)
    top = ("max_exp_avg_sq",) if values["amsgrad"] else ()
    flags = {"decoupled": bool(decoupled), "amsgrad": bool(values["amsgrad"]), "maximize": bool(values["maximize"])}
    return Group("adam", params, ("exp_avg", "exp_avg_sq", *top, "step"), ADAM, tuple(flags.items()))


def signature(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What of an optimiser a program depends on: its parameters, which of them train, and the flags that change the update."""
    flags = [tuple(g.get(flag) for flag in FLAGS) for g in optimizer.param_groups]
    params = [tuple((id(p), p.requires_grad) for p in g["params"]) for g in optimizer.param_groups]
    momentum = [bool(g.get("momentum")) for g in optimizer.param_groups]
    return tuple(zip(params, momentum, flags, strict=True))


def trainable(optimizer: torch.optim.Optimizer) -> Sequence[torch.nn.Parameter]:
    """Parameters the optimiser may change."""
    return [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
