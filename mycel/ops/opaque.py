"""Operators of torch that have no paragraph of their own: torch's kernel, kept whole.

    y = opaque(x, target="aten.foo.default", args=(("x", 0), 3), kwargs=())

`args` mirrors torch's argument list; ("x", i) stands for input i, ("l", …) for a list.  Types come from torch's meta
kernel.
"""

from __future__ import annotations

import functools
import re

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mycel.errors import GradientError
from mycel.ir import Type, is_float, op, type_of
from mycel.ops.capture_rules import resolve
from mycel.ops.rules import o

_NOT_BY = re.compile(r"not differentiable with respect to argument '(\w+)'")


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
        return inputs[rest[0]].contiguous()  # torch's kernels may rely on a layout their callers made
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
        flat.extend(y if isinstance(y, (list, tuple)) else [y] if y is not None else [])
    return tuple(flat) if len(flat) != 1 else flat[0]


def output_mask(func, args):
    """The argument that says which outputs an operator gives, where it asks for some alone."""
    at = next((i for i, a in enumerate(func._schema.arguments) if a.name == "output_mask"), len(args))
    return args[at] if at < len(args) and not all(args[at]) else None


@functools.cache
def _types(types, target, args, kwargs):
    """Output types by torch's meta kernel, or by its CPU kernel on zeros where torch has no meta kernel.

    Only functions of tensors are asked: a program read from a file must not do anything before it is run.
    """
    schema = resolve(target)._schema
    if not types or schema.is_mutable:
        raise ValueError(f"{target} is no function of tensors")
    last: Exception | None = None
    for device in ("meta", "cpu"):
        try:
            output_types = _types_for(0, device, types, target, args, kwargs)
        except (RuntimeError, NotImplementedError) as e:
            last = e
            continue
        if device == "cpu" and _by_ones(types, target, args, kwargs) not in (output_types, None):
            raise ValueError("its shape depends on the values of its input; a program has static shapes")
        return output_types
    raise ValueError(str(last))


def _types_for(value, device, types, target, args, kwargs):
    """Output types of torch's kernel on tensors filled with one value; the random numbers it draws are not missed."""
    with _disable_current_modes():
        state = torch.default_generator.get_state()
        try:
            outs = _run([torch.full(t.shape, value, dtype=t.dtype, device=device) for t in types], target, args, kwargs)
        finally:
            torch.default_generator.set_state(state)
    outs = outs if isinstance(outs, tuple) else (outs,)
    if any(y.layout != torch.strided for y in outs):
        raise ValueError("it returns a sparse tensor; a program has dense ones")
    return tuple(map(type_of, outs))


def _by_ones(types, target, args, kwargs):
    """Output types on ones, as a check of those on zeros; None where ones are no valid input."""
    try:
        return _types_for(1, "cpu", types, target, args, kwargs)
    except (RuntimeError, NotImplementedError, IndexError):
        return None


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


def _opaque_vjp(g, y, *inputs, target, args, kwargs=()):
    """torch's own gradient of its operator."""
    how = {"target": target, "args": args, "kwargs": kwargs}
    types = tuple(Type(x.dtype, tuple(x.shape)) for x in inputs)
    _check_differentiable(types, **how)
    ys, gs = (y, g) if isinstance(y, tuple) else ((y,), (g,))
    filled = [zeros_like(v) if d is None else d for v, d in zip(ys, gs, strict=True) if is_float(v.dtype)]
    grads = o.opaque_grad(*inputs, *filled, **how, arity=(len(inputs),), fixed=_fixed(types, **how))
    return in_places(grads, inputs)


@functools.cache
def _check_differentiable(types, target, args, kwargs):
    """torch says so when an operator has no derivative: asked on tensors without data."""
    outs = [t for t in _types(types, target, args, kwargs) if is_float(t.dtype)]
    blank = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (*types, *outs)]
    fixed = _fixed(types, target, args, kwargs)
    try:
        with torch.enable_grad():
            levels(blank, lambda xs: _run(xs, target, args, kwargs), (len(types),), fixed=fixed)
    except (RuntimeError, NotImplementedError) as e:
        if "derivative" in str(e):
            raise GradientError(f"torch has no derivative for {target}") from e


@functools.cache
def _fixed(types, target, args, kwargs):
    """Inputs that no derivative is taken of, as torch says on tensors without data: tolerances and the like."""
    fixed: set[int] = set()
    names = [a.name for a in resolve(target)._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    while True:
        blank = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in types]
        for i, x in enumerate(blank):
            x.requires_grad_(is_float(x.dtype) and i not in fixed)
        try:
            with torch.enable_grad():
                _run(blank, target, args, kwargs)
        except RuntimeError as e:  # others are told of where it runs
            said = _NOT_BY.search(str(e))
            at = given.get(said[1]) if said is not None else None
            if isinstance(at, tuple) and at[0] == "x" and at[1] not in fixed:
                fixed.add(at[1])
                continue
        return tuple(sorted(fixed))


def in_places(grads, inputs):
    """One cotangent for each input: those of floats in order, None for the rest."""
    rest = iter(grads if isinstance(grads, tuple) else (grads,))
    return tuple(next(rest) if is_float(x.dtype) else None for x in inputs)


def zeros_like(x):
    """Zeros of a value's type."""
    return o.full(0.0, shape=tuple(x.shape), dtype=x.dtype)


@op(
    _opaque_dims,
    types=_opaque_types,
    vjp=_opaque_vjp,
    examples=[
        'f[4,4], target="aten.matrix_exp.default", args=(("x", 0),)',
        'c64[3,4], c64[3,4], target="aten.addcmul.default", args=(("x", 0), ("x", 1), ("x", 1))',
    ],
    apart=True,
    foreign=True,
    precision="high",
)
def opaque(*inputs, target, args, kwargs=()):
    """torch's own operator `target`."""
    return _run(inputs, target, args, kwargs)


def _grad_vjp(g, y, *operands, arity, **params):
    ys, gs = (y, g) if isinstance(y, tuple) else ((y,), (g,))
    filled = [zeros_like(v) if d is None else d for v, d in zip(ys, gs, strict=True)]
    grads = o.opaque_grad(*operands, *filled, arity=(*arity, len(operands)), **params)
    return in_places(grads, operands)


def _grad_types(*operands, arity, **_):
    return tuple(t for t in operands[: arity[-1]] if is_float(t.dtype))


def levels(operands, run, arity, more=False, fixed=()):
    """The float outputs of `run` (no arity left), or the cotangents of one level down, with torch's graph kept if
    there is one `more` level up; zeros for operands that are `fixed`."""
    if not arity:
        outs = run(operands)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return [y for y in outs if y.is_floating_point() or y.is_complex()]
    inner = [x.detach() if i in fixed else _differentiated(x) for i, x in enumerate(operands[: arity[-1]])]
    outs = levels(inner, run, arity[:-1], more=True, fixed=fixed)
    wanted = [x for x in inner if x.requires_grad]
    pairs = [(y, g) for y, g in zip(outs, operands[arity[-1] :], strict=True) if y.requires_grad]
    ys, gs = zip(*pairs, strict=True) if pairs else ((), ())
    grads = torch.autograd.grad(ys, wanted, gs, create_graph=more, allow_unused=True) if pairs else [None] * len(wanted)
    by_input = {id(x): g for x, g in zip(wanted, grads, strict=True)}
    floats = [x for x in inner if x.is_floating_point() or x.is_complex()]
    return [torch.zeros_like(x) if (g := by_input.get(id(x))) is None else g for x in floats]


def _differentiated(x):
    """x as a value that torch takes derivatives of, where it has any."""
    has_none = x.requires_grad or not (x.is_floating_point() or x.is_complex())
    return x if has_none else x.detach().requires_grad_()


def torch_gradients(operands, run, arity, fixed=()):
    """Gradients of `run` by torch; where torch's autograd records, so that it can go on from them."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
        # each by itself, whether or not one was made of another
        return tuple(levels([x.view_as(x) for x in operands], run, arity, more=True, fixed=fixed))
    # a view of a parameter made without autograd says it needs a gradient, and has no graph
    operands = [x.detach() for x in operands]
    with torch.enable_grad():
        return tuple(g.detach() for g in levels(operands, run, arity, fixed=fixed))


@op(
    lambda *operands, **p: whole(operands, _grad_types(*operands, **p)),
    types=_grad_types,
    vjp=_grad_vjp,
    compiles=False,
    examples=['f64[4,4], f64[4,4], target="aten.matrix_exp.default", args=(("x", 0),), arity=(1,)'],
    apart=True,
    foreign=True,
)
def opaque_grad(*operands, target, args, kwargs=(), arity, fixed=()):
    """torch's gradient of its operator: operands are its inputs, then cotangents; each further `arity` is one more
    derivative; zeros for inputs that are `fixed`."""
    grads = torch_gradients(operands, lambda xs: _run(xs, target, args, kwargs), arity, fixed)
    return grads if len(grads) != 1 else grads[0]


@op(
    _random_dims,
    types=lambda key, *inputs, site=0, **p: _opaque_types(*inputs, **p),
    compiles=False,
    examples=['i64[], f[2,3]>0, target="aten.poisson.default", args=(("x", 0),)'],
    apart=True,
    waits=True,
    foreign=True,
)
def opaque_random(key, *inputs, target, args, kwargs=(), site=0):
    """torch's own random operator `target`, its generator seeded by the key: the same key draws the same numbers."""
    with torch.random.fork_rng(devices=[x.device for x in inputs if x.is_cuda]):
        torch.manual_seed((int(key) * 0x9E3779B97F4A7C15 + site) % 2**63)
        return _run(inputs, target, args, kwargs)
