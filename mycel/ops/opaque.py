"""Operators of torch that have no paragraph of their own: torch's kernel, kept whole.

    y = opaque(x, target="aten.foo.default", args=(("x", 0), 3), kwargs=())

`args` mirrors torch's argument list; ("x", i) stands for input i, ("l", …) for a list.  Types come from torch's meta kernel.
"""

from __future__ import annotations

import functools

import torch

from mycel.ir import Type, op, type_of
from mycel.ops.capture_rules import resolve


def encode(value, inputs):
    """torch arguments -> static form; tensors are appended to `inputs`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        inputs.append(value)
        return ("x", len(inputs) - 1)
    if isinstance(value, (list, tuple)):
        return ("l", *(encode(v, inputs) for v in value))
    if isinstance(value, (torch.memory_format, torch.layout)):
        return None
    if isinstance(value, torch.device):
        return ("device",)
    return value


def decode(value, inputs, device):
    """Static form -> torch arguments."""
    if not isinstance(value, tuple):
        return value
    tag, *rest = value
    if tag == "x":
        return inputs[rest[0]]
    return device if tag == "device" else [decode(v, inputs, device) for v in rest]


def _run(inputs, target, args, kwargs):
    device = next((x.device for x in inputs), None)
    outs = resolve(target)(
        *(decode(a, inputs, device) for a in args), **{k: decode(v, inputs, device) for k, v in kwargs}
    )
    if isinstance(outs, torch.Tensor):
        return outs
    flat = []
    for y in outs:
        flat.extend(y if isinstance(y, (list, tuple)) else [y])
    return tuple(flat) if len(flat) != 1 else flat[0]


@functools.cache
def _types(types, target, args, kwargs):
    """Output types by torch's meta kernel, or by its CPU kernel on zeros where torch has no meta kernel."""
    last: Exception | None = None
    for device in ("meta", "cpu"):
        try:
            inputs = [torch.zeros(t.shape, dtype=t.dtype, device=device) for t in types]
            outs = _run(inputs, target, args, kwargs)
            return tuple(map(type_of, outs)) if isinstance(outs, tuple) else (type_of(outs),)
        except (RuntimeError, NotImplementedError) as e:
            last = e
    raise ValueError(f"{target}: {last}")


def _opaque_types(*inputs, target, args, kwargs=()):
    return _types(tuple(x for x in inputs if isinstance(x, Type)), target, args, kwargs)


def _opaque_dims(*inputs, target, args, kwargs=()):
    """Kept whole."""
    return whole(inputs, _opaque_types(*inputs, target=target, args=args, kwargs=kwargs))


def _random_dims(key, *inputs, site=0, **params):
    return whole((key, *inputs), _opaque_types(*inputs, **params))


def whole(inputs, outs):
    """Dims that keep everything whole: every dim of every operand is its own `^` letter."""
    count = 0
    sides, sizes = [], {}
    for group in (inputs, outs):
        items = []
        for t in group:
            names = [f"w{count + i}" for i in range(t.ndim)]
            sizes.update(zip(names, t.shape, strict=True))
            count += t.ndim
            items.append(" ".join(f"{n}^" for n in names))
        sides.append(", ".join(items))
    return " -> ".join(sides), sizes


@op(
    _opaque_dims,
    types=_opaque_types,
    examples=[
        'f[4,4], target="aten.matrix_exp.default", args=(("x", 0),)',
        'c64[3,4], c64[3,4], target="aten.addcmul.default", args=(("x", 0), ("x", 1), ("x", 1))',
    ],
)
def opaque(*inputs, target, args, kwargs=()):
    """torch's own operator `target`."""
    return _run(inputs, target, args, kwargs)


@op(
    _random_dims,
    types=lambda key, *inputs, site=0, **p: _opaque_types(*inputs, **p),
    examples=['i64[], f[2,3]>0, target="aten.poisson.default", args=(("x", 0),)'],
)
def opaque_random(key, *inputs, target, args, kwargs=(), site=0):
    """torch's own random operator `target`, its generator seeded by the key: the same key draws the same numbers."""
    with torch.random.fork_rng(devices=[x.device for x in inputs if x.is_cuda]):
        torch.manual_seed((int(key) * 0x9E3779B97F4A7C15 + site) % 2**63)
        return _run(inputs, target, args, kwargs)
