"""Types of values: a dtype and a static shape, e.g. `bf16[64,4096]`; `stack(f32[2])` is a loop's stack of such values,
`host(bf16[64,4096])` lies in the host's memory instead of the device's."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

NAMES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.bool: "bool",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
DEVICE, HOST = "device", "host"  # where a value lies


@dataclass(frozen=True, slots=True)
class Type:
    """What a value is.  `depth` counts how many loop stacks are wrapped around it (0: a plain tensor); `space` is where
    it lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    depth: int = 0
    space: str = DEVICE

    @property
    def ndim(self) -> int:
        """Its number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The memory that its elements take."""
        return self.numel * self.dtype.itemsize

    def on(self, space: str) -> Type:
        """The same in another memory space."""
        return replace(self, space=space)

    def __str__(self) -> str:
        text = f"{NAMES[self.dtype]}[{','.join(map(str, self.shape))}]"
        text = "stack(" * self.depth + text + ")" * self.depth
        return text if self.space == DEVICE else f"{self.space}({text})"


def type_of(x: torch.Tensor) -> Type:
    """The type of a tensor."""
    return Type(x.dtype, tuple(x.shape))


def is_float(dtype: torch.dtype) -> bool:
    """Can a value of this dtype carry a gradient?"""
    return dtype.is_floating_point or dtype.is_complex


def promote(*inputs: object) -> torch.dtype:
    """torch's result dtype: tensors with dims outrank 0-dim tensors, which outrank Python scalars, within a kind."""
    ranked: list[torch.dtype | None] = [None, None, None]
    for x in inputs:
        if x is None:
            continue
        if isinstance(x, Type):
            rank, dtype = (0 if x.shape else 1), x.dtype
        else:
            rank, dtype = 2, _scalar_dtype(x)
        before = ranked[rank]
        ranked[rank] = dtype if before is None else torch.promote_types(before, dtype)
    out: torch.dtype | None = None
    for candidate in ranked:
        if candidate is not None and (out is None or _kind(candidate) > _kind(out)):
            out = candidate if out is None else _raise_kind(out, candidate)
    assert out is not None, "promote needs an input"
    return out


def _kind(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


def _raise_kind(low: torch.dtype, high: torch.dtype) -> torch.dtype:
    """A lower-ranked operand of a higher kind lifts the result: a float to complex of its own width, all else to the
    operand's dtype."""
    return low.to_complex() if high.is_complex and low.is_floating_point else high


def _scalar_dtype(x: object) -> torch.dtype:
    match x:
        case bool():
            return torch.bool
        case int():
            return torch.int64
        case float():
            return torch.get_default_dtype()
        case complex():
            return torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
    raise TypeError(f"not a scalar: {x!r}")
