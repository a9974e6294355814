"""What torch's schemas say of an ATen overload: what it writes, what it views, its functional form; and which rule
captures it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mycel.ir import OPS
from mycel.ops import RULES
from mycel.ops.capture_rules import resolve


@dataclass
class Schema:
    """Facts of an ATen overload: its rule, the arguments it writes, its functional form, the argument it views."""

    rule: Callable[..., Any] | None
    written: list[tuple[int, str]]
    outs: set[str]
    functional: Any
    view_of: int | None
    dynamic: bool
    mask_index: bool
    strided: bool
    reads: str | None  # the read of a Python value that it is; "" if it returns nothing
    composite: bool  # torch has only its meaning in other operators, and we have no rule


_BY_ATEN: dict[Any, Callable[..., Any]] = {}


def _aten_rules() -> dict[Any, Callable[..., Any]]:
    """ATen overloads named by operators' `aten` fields."""
    if not _BY_ATEN:
        for op in OPS.values():
            for name in op.aten:
                _BY_ATEN[resolve(f"aten.{name}")] = op
    return _BY_ATEN


@functools.cache
def schema_of(func: Any) -> Schema:
    schema = func._schema
    written, outs, view_of = [], set(), None
    for i, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            written.append((i, arg.name))
            if arg.kwarg_only:
                outs.add(arg.name)
    if not written:
        for i, arg in enumerate(schema.arguments):
            if arg.alias_info is not None and any(r.alias_info is not None for r in schema.returns):
                view_of = i
                break
    rule = RULES.get(func) or _aten_rules().get(func)
    functional = _functional_form(func) if written else None
    dynamic = torch.Tag.dynamic_output_shape in func.tags and rule is None
    composite = rule is None and (functional is None or schema_of(functional).composite) and _is_composite(func)
    strided = schema.name.startswith("aten::as_strided")
    reads = None if rule or written else _READ_BY_RETURN.get(str(schema.returns[0].type) if schema.returns else "")
    return Schema(
        rule,
        written,
        outs,
        functional,
        view_of,
        dynamic,
        func in _BY_MASKS,
        strided,
        reads,
        composite,
    )


_BY_MASKS = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)
_READ_BY_RETURN = {"": "", "bool": "__bool__", "int": "__int__", "float": "__float__", "number": "item"}


def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _functional_form(func: Any) -> Any:
    """aten.add_.Tensor and aten.add.out -> aten.add.Tensor: same namespace, same arguments, nothing written."""
    namespace, name = func._schema.name.split("::")
    outs = {
        a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write and a.kwarg_only
    }
    want = [a.name for a in func._schema.arguments if a.name not in outs]
    exact: list[Any] = []
    others: list[Any] = []
    for base in (
        name.replace("__i", "__") if name.startswith("__i") else name.removesuffix("_"),
        name,
        name + "functional",
    ):
        packet = getattr(getattr(torch.ops, namespace), base, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            other = getattr(packet, overload)
            args = other._schema.arguments
            own = [a.name for a in args if not outs or a.name not in _OF_FACTORIES or a.name in want]
            if own == want and not any(a.alias_info is not None and a.alias_info.is_write for a in args):
                same = (
                    overload == func._overloadname or outs or overload.replace("_functional", "") == func._overloadname
                )
                if _types_match(func, other, outs):
                    (exact if same else others).append(other)
    return next(
        iter((*exact, *others)), None
    )  # an overload of another name (bernoulli_.float, bernoulli.p) where none has the same


_OF_FACTORIES = {"dtype", "layout", "device", "pin_memory"}  # torch.eye(3, out=x) has those of x


def _types_match(func: Any, other: Any, outs: set[str]) -> bool:
    mine = {a.name: str(a.type) for a in func._schema.arguments if a.name not in outs}
    return mine.items() <= {a.name: str(a.type) for a in other._schema.arguments}.items()
