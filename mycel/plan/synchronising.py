"""What a plan says of how often models of ranks along an axis are made one again:

    sync: {dp: every step}                  gradients are summed at each step: the default
    sync: {dp: local(H=8, overlap=0)}       each takes steps of its own; every H steps models are averaged.  What is
                                            sent after a step is waited for `overlap` steps later, and brings what the
                                            others did; what a rank did meanwhile it keeps
    sync: {dp: diloco(H=50, overlap=0, lr=0.7, momentum=0.9)}
                                            what H steps have changed is the gradient of an outer step: SGD with
                                            Nesterov momentum
    sync: {dp: streaming(H=100, fragments=4, overlap=5, mixing=0.5, lr=0.7, momentum=0.9)}
                                            the same, a fragment of the model after another; of what a rank has when
                                            its message comes it keeps `mixing`
    sync: {dp: gossip(H=1, overlap=1)}      pairs average their models, other pairs each time (AD-PSGD)
    sync: {dp: sma(alpha=0.1, H=1)}         models are drawn to their average by `alpha`
    sync: {dp: delayed(ahead=1)}            all ranks have one model; a step is taken with the gradients of the one
                                            before, whose sum travels meanwhile; parameters are held `ahead` by what
                                            momentum will do until it comes (transform/delaying.py)

Of all but the last: ranks that differ along the axis are *replicas*: each is a world of its own, with its own part of
the batch, in which tensors lie over the other axes as ever and all sums are exact.  With `compress` along the same
axis, what replicas send each other is encoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mycel.errors import PlanError
from mycel.ir import Layout, Mesh
from mycel.plan.compression import CompressedAxis
from mycel.plan.names import near
from mycel.sizes import span

EVERY_STEP = "every step"
OUTER = {"lr": 0.7, "momentum": 0.9}
# by policy its options, and what they are where they are left out; None: must be said
POLICIES: dict[str, dict[str, float | None]] = {
    "local": {"H": None, "overlap": 0},
    "diloco": {"H": None, "overlap": 0, **OUTER},
    "streaming": {"H": None, "fragments": 4, "overlap": 1, "mixing": 0.5, **OUTER},
    "gossip": {"H": 1, "overlap": 1},
    "sma": {"alpha": 0.1, "H": 1},
    "delayed": {"ahead": 1},
}
WHOLE = ("H", "fragments", "overlap")  # options that are whole numbers
_TEXT = re.compile(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*")


@dataclass(frozen=True)
class SyncPolicy:
    """How replicas along an axis become one model."""

    axis: str
    kind: str
    options: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value:g}' for name, value in self.options.items())})"

    @property
    def has_replicas(self) -> bool:
        """Do ranks have models of their own?"""
        return self.kind != "delayed"

    @property
    def every(self) -> int:
        """Steps between two messages about the same parameter."""
        return int(self.options["H"])

    @property
    def overlap(self) -> int:
        """Steps between sending and waiting for it."""
        return int(self.options.get("overlap", 0))

    @property
    def fragments(self) -> int:
        return int(self.options.get("fragments", 1))

    @property
    def has_outer_step(self) -> bool:
        return "momentum" in self.options

    def starts(self, fragment: int) -> int:
        """After which of `every` steps a fragment is sent: they are spread evenly, the last at the end."""
        return self.every * (fragment + 1) // self.fragments % self.every

    def is_sent(self, fragment: int, steps: int) -> bool:
        """Is a fragment sent after so many steps?"""
        return steps > 0 and steps % self.every == self.starts(fragment)

    def delay(self, part: int, parts: int) -> int:
        """How many steps after it was sent a part of a message has its turn: the last one after `overlap`."""
        return part * self.overlap // max(parts - 1, 1)


def read_sync(entry: Any, mesh: Mesh, batch_axes: Sequence[str]) -> SyncPolicy | None:
    """What `sync` says; None where all ranks step together.  PlanError says what is wrong with it."""
    if not entry:
        return None
    if not isinstance(entry, Mapping):
        raise PlanError(f"sync: {entry!r}\n  try       an axis and a policy, such as  sync: {{dp: diloco(H=50)}}")
    axis, *others = entry
    if others:
        raise PlanError(
            f"sync: names {', '.join(map(str, entry))}\n"
            "  try       one axis, that of the slowest link: along others ranks step together"
        )
    policy = read_policy(axis, entry[axis])
    hint = f"sync: {{{batch_axes[0]}: diloco(H=50)}}" if batch_axes else f"batch: [{axis}, -]  beside it"
    if axis not in mesh:
        raise PlanError(
            f"sync: there is no axis {axis!r}\n  the mesh  {mesh}\n  try       {near(axis, mesh.axes, hint)}"
        )
    if axis not in batch_axes:
        raise PlanError(
            f"sync: {axis} does not split the batch: ranks along it hold parts of one model, and step together\n"
            f"  try       {hint}"
        )
    return policy


def read_policy(axis: str, text: Any) -> SyncPolicy | None:
    """The policy of such a text; None: every step."""
    where = f"sync: {axis}: {text}"
    if text == EVERY_STEP:
        return None
    match = _TEXT.fullmatch(str(text))
    kind = match[1] if match else ""
    if match is None or kind not in POLICIES:
        known = ", ".join((EVERY_STEP, *(f"{name}(…)" for name in POLICIES)))
        raise PlanError(
            f"{where}: there is no policy {kind or text!r}\n  known     {known}\n"
            f"  try       {sample(near(kind, POLICIES, 'diloco'))}"
        )
    options = dict(POLICIES[kind])
    for word in filter(None, (w.strip() for w in (match[2] or "").split(","))):
        name, _, value = (w.strip() for w in word.partition("="))
        if name not in options:
            raise PlanError(
                f"{where}: {kind} has no option {name!r}\n  known     {', '.join(options)}\n"
                f"  try       {near(name, options)}"
            )
        options[name] = _number(name, value, where)
    if missing := [name for name, value in options.items() if value is None]:
        raise PlanError(f"{where}: {missing[0]} is not said\n  try       {kind}({missing[0]}=50)")
    policy = SyncPolicy(axis, kind, {name: value for name, value in options.items() if value is not None})
    if not policy.has_replicas:
        return policy
    if policy.overlap > policy.every:
        raise PlanError(
            f"{where}: overlap is {policy.overlap} steps, but a fragment is sent again after {policy.every}\n"
            f"  try       overlap={policy.every}"
        )
    if policy.fragments > policy.every:
        raise PlanError(
            f"{where}: {policy.fragments} fragments, but H is {policy.every}: each has a step of its own\n"
            f"  try       fragments={policy.every}"
        )
    return policy


def sample(kind: str) -> str:
    """A policy with the options that must be said, for a hint."""
    return f"{kind}(H=50)" if POLICIES[kind].get("H", 0) is None else kind


def _number(name: str, text: str, where: str) -> float:
    """An option's value; PlanError for what it cannot be."""
    least, most, kind = (1, 1 << 30, int) if name in WHOLE else (0.0, 1.0, float)
    least, most = (0, most) if name == "overlap" else (0.0, 100.0) if name == "lr" else (least, most)
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        what = f"a whole number, at least {least}" if kind is int else f"a number from {least:g} to {most:g}"
        raise PlanError(f"{where}: {name} is {text or 'nothing'}\n  try       {what}")
    return value


def refuse_layouts(policy: SyncPolicy, parameters: Mapping[str, Layout], batch: Sequence[Layout], zero: str) -> None:
    """PlanError for layouts that replicas cannot have; `zero`: what splits state over their axis."""
    axis = policy.axis
    for name, layout in parameters.items():
        if axis in layout.axes:
            raise PlanError(
                f"sync: {axis}: {policy.kind}, but {axis} splits parameters ({name}): ranks that hold parts of one "
                f"model step together\n  try       sync over another axis, or layouts without {axis}"
            )
    if zero:
        raise PlanError(
            f"sync: {axis}: {policy.kind}, but {zero} is over {axis}: each replica holds all of its state\n"
            f"  try       zero over another axis, or sync: {{{axis}: {EVERY_STEP}}}"
        )
    for axes in (axes for layout in batch for axes in layout.dims):
        if axis in axes[1:]:
            raise PlanError(
                f"sync: {axis}: replicas have parts of the batch that lie together, but a dim of it is split over "
                f"{'.'.join(axes)}\n  try       {axis} first"
            )


def refuse_codec(policy: SyncPolicy, encoded: CompressedAxis | None) -> None:
    """PlanError for messages between replicas that cannot be encoded so."""
    axis = policy.axis
    if encoded is not None and not policy.has_outer_step:
        raise PlanError(
            f"compress: {axis}, but {policy} averages models, not what has changed: they travel exactly\n"
            f"  try       sync: {{{axis}: diloco(H={policy.every}, lr=1, momentum=0)}}, which sends differences"
        )
    memories = [how.memory for _, how in encoded.patterns if how is not None] if encoded is not None else []
    odd = next((memory for memory in memories if memory not in ("", "ef")), "")
    if encoded is not None and (encoded.auto or odd):
        raise PlanError(
            f"compress: {axis}: {'auto' if encoded.auto else odd}, but what outer steps send is encoded as said\n"
            f"  try       compress: {{{axis}: int8+ef}}"
        )


def sync_text(policy: SyncPolicy, seconds: float, sent_bytes: float) -> str:
    """What a policy costs, for people: seconds of a step, and bytes that a rank sends for each."""
    return f"along {policy.axis} {policy}: {sent_bytes:,.0f} bytes and {span(seconds)} for each step"
