"""What messages of a step keep from one to the next: errors of compression, what has been received so far.  By role, as
this rank holds it; part of every checkpoint.

    error.dp.up.weight         error of up.weight over dp        each rank's own: its whole is the sum over dp
    velocity.dp.up.weight      velocity of up.weight over dp     as well
    delayed.dp.up.weight       delayed of up.weight over dp      as well
    outer.received.up.weight   outer received of up.weight       lies as the optimiser's state of up.weight
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from mycel.ir import Layout, Role, Type
from mycel.ops.codec_kernels import EIGHT_BITS, EIGHT_BITS_SCALE
from mycel.parts import ShardedModel
from mycel.run import part_of

OVER_AXIS = ("error", "velocity", "delayed")  # of each rank along an axis its own
KINDS = (*OVER_AXIS, "outer")
Tensors = dict[str, torch.Tensor]


class MessageState:
    """The tensors by role; `whole`: those that were loaded before it was known how ranks hold them; `lossy`: parameters
    of which something may be lost that is to be sent, and along which axis, on all ranks the same, whoever holds it."""

    def __init__(self, parts: ShardedModel | None) -> None:
        self.parts = parts
        self.held: dict[Role, torch.Tensor] = {}
        self.whole: set[Role] = set()
        self.lossy: dict[str, str] = {}
        if parts is not None:
            parts.messages = self

    def value(self, role: Role, type: Type, device: torch.device) -> torch.Tensor:
        """This rank's own, of this type: zeros at first.  Errors are kept in 8 bits or more, as it says."""
        if role in self.whole and self.parts is not None:
            layout, _ = self.parts.slots[role]
            self.held[role] = part_of(self.held[role], layout, self.parts.plan.mesh, self.parts.ranks.rank).clone()
        self.whole.discard(role)
        if role not in self.held:
            self.held[role] = torch.zeros(type.shape, dtype=type.dtype)
        elif self.held[role].dtype != type.dtype:
            self.held[role] = _as_kind(self.held[role], type.dtype)
        self.held[role] = self.held[role].to(device)
        return self.held[role]

    def note(self, axes: Mapping[str, str]) -> None:
        """A step has sent gradients of these parameters along these axes, and lost something of them."""
        self.lossy |= axes

    def drop(self, names: Collection[str]) -> None:
        """What is kept of these parameters' messages."""
        self.lossy = {name: axis for name, axis in self.lossy.items() if name not in names}
        for role in [role for role in self.held if role.kind in ("error", "velocity") and role.of in names]:
            del self.held[role]
            self.whole.discard(role)

    def tensors(self) -> Tensors:
        """As they are held, by the names they have in a checkpoint, in the same order on all ranks."""
        return {name_of(role): self.held[role] for role in sorted(self.held, key=name_of)}

    def layouts(self) -> dict[str, tuple[Layout, tuple[int, ...]]]:
        """How they lie on the mesh, with the shapes of the whole."""
        slots = self.parts.slots if self.parts is not None else {}
        return {name_of(role): (slots[role][0], slots[role][1].shape) for role in self.held if role in slots}

    def gathered(self) -> Tensors:
        """Whole, on every rank; all of them call this."""
        tensors = {}
        for role, x in self.held.items():
            known = self.parts.slots.get(role) if self.parts is not None and role not in self.whole else None
            tensors[name_of(role)] = (
                x if known is None or self.parts is None else self.parts.gather(x, known[0], known[1].shape)
            )
        return tensors

    def take(
        self, tensors: Mapping[str, torch.Tensor], whole: bool, tell: Callable[[Any], list[Any]] = lambda own: [own]
    ) -> None:
        """Continue from these; what is not among them starts anew.  `whole`: they are not this rank's parts.  `tell`:
        what each rank says, where ranks hold different ones."""
        self.held = {role: x for name, x in tensors.items() if (role := role_of(name)) is not None}
        self.whole = set(self.held) if whole else set()
        self.lossy = {name: axis for own in tell(lossy_of(self.held)) for name, axis in own.items()}


def lossy_of(roles: Collection[Role]) -> dict[str, str]:
    """Parameters of which something was lost that is to be sent, and along which axis.  (Of EF21 the error is what was
    said so far.)"""
    errors = [role for role in roles if role.kind == "error"]
    return {role.of: role.over for role in errors if Role("outer", "received", of=role.of) not in roles}


def _as_kind(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An error in 8 bits, or one that was; both in the units of a gradient."""
    wide = x.float() / EIGHT_BITS_SCALE if x.dtype == EIGHT_BITS else x
    if dtype != EIGHT_BITS:
        return wide.to(dtype)
    most = torch.finfo(EIGHT_BITS).max
    return (wide * EIGHT_BITS_SCALE).clamp(-most, most).to(EIGHT_BITS)


def name_of(role: Role) -> str:
    return f"{role.kind}.{role.over or role.name}.{role.of}"


def role_of(name: str) -> Role | None:
    """The role of a tensor in a checkpoint; None for what is none of a message's."""
    kind, _, rest = name.partition(".")
    first, _, of = rest.partition(".")
    fields: dict[str, Any] = {"over": first} if kind in OVER_AXIS else {"name": first}
    return Role(kind, of=of, **fields) if kind in KINDS and of else None
