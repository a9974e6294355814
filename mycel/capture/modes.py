"""The two modes that catch what traced code does, and torch functions that need more than a rule.

A torch-function mode sees calls as the user wrote them; a dispatch mode sees ATen operators, after torch has taken its
composites apart.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mycel.capture.autograd import (
    as_leaf,
    leaf_grad,
    requires_grad,
    set_leaf_grad,
    set_recorded,
    traced_backward,
    traced_grad,
)
from mycel.capture.bounds import bounds
from mycel.capture.chosen_places import possible_places
from mycel.capture.custom import trace_custom
from mycel.capture.fence import READS, refuse, refuse_read
from mycel.capture.hooks import hook_value
from mycel.capture.packed import packed, packed_layers, padded
from mycel.capture.record import Traced
from mycel.capture.rows import ChosenRows, RowsAt, RowsShape
from mycel.capture.sparse import SparseMatrix, coo_matrix
from mycel.capture.trace import SPECIAL, Tracer, tensors_in
from mycel.capture.weak import as_number, as_numbers
from mycel.ops import o

MOST_NUMBERS = 64  # in the list that a tensor becomes


class DispatchMode(TorchDispatchMode):
    """Sends ATen operators to the tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, seconds, to wrap this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tracer.dispatch(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Sends torch functions to the tracer; opens those written in Python, so that what they call is seen too."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.open: list[Any] = []

    def __torch_function__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if SparseMatrix in types_:
            with self:
                return SparseMatrix.__torch_function__(func, types_, args, kwargs)
        if self.tracer.numbers and any(type(a) is Traced and a.weak for a in args[:2]):
            func, args, weak = as_numbers(func, name, args)
            out = self._call(func, getattr(func, "__name__", ""), args, kwargs)
            if weak:
                out.weak = True
            return out
        return self._call(func, name, args, kwargs)

    def _call(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.tracer.rows and (name in _SIZES or name == "__get__") and type(args[0]) is Traced:
            rows = self.tracer.rows.get(args[0].cell.read())
            if rows is not None and (name in _SIZES or func.__self__ is torch.Tensor.shape):
                count = functools.partial(_number_of_rows, self.tracer, rows)
                return _SIZES.get(name, _shape)(RowsShape(args[0].cell.var.shape, rows, count), *args[1:], **kwargs)
        if name == "__get__":
            if func.__self__ is torch.Tensor.grad and self.has_traced_grad(args[0]):
                return leaf_grad(self.tracer, args[0])
            if func.__self__ in _RECORDED and type(args[0]) is Traced:
                return _RECORDED[func.__self__](
                    requires_grad(self.tracer, args[0]), any(x is args[0] for x in self.tracer.leaves)
                )
            return args[0].detach() if func.__self__ is torch.Tensor.data else func(*args, **kwargs)
        if (
            name == "__set__"
            and func.__self__ in _SETTERS
            and (func.__self__ in _OF_ANY or type(args[0]) is Traced or self.has_traced_grad(args[0]))
        ):
            return _SETTERS[func.__self__](self, *args)
        if kwargs.get("requires_grad") is True and func is not torch.Tensor.requires_grad_:
            kwargs = {k: v for k, v in kwargs.items() if k != "requires_grad"}
            return _requires_grad(self, torch.Tensor.requires_grad_, self._call(func, name, args, kwargs))
        if name in READS and isinstance(args[0] if args else None, torch.Tensor):
            return _read(self.tracer, name, *args, **kwargs)
        special = _FUNCTIONS.get(name)
        if special is not None and getattr(func, "__module__", None) in _TORCH_MODULES:
            return special(self, func, *args, **kwargs)
        return self.traced(func, args, kwargs)

    def has_traced_grad(self, x: torch.Tensor) -> bool:
        """Is x.grad what the trace says?"""
        return type(x) is Traced or id(x) in self.tracer.leaf_grads

    def traced(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What the tracer's rule makes of a function, or its own code."""
        out = self.tracer.function(func, args, kwargs)
        if out is not NotImplemented:
            return out
        if _is_written_in_python(func) and func not in self.open:
            self.open.append(func)  # one that still asks for the mode is not opened again
            try:
                with self:
                    return _opened(func)(*args, **kwargs)
            finally:
                self.open.remove(func)
        return func(*args, **kwargs)


@functools.cache
def _is_written_in_python(func: Any) -> bool:
    """One of torch's Python functions that ask for a torch-function mode; methods of Tensor hand on to C and stay
    closed."""
    if (
        not isinstance(func, types.FunctionType)
        or not func.__module__.startswith("torch.")
        or func.__module__ == "torch._tensor"
    ):
        return False
    return "has_torch_function" in str(func.__code__.co_names)


@functools.cache
def _opened(func: types.FunctionType) -> Callable[..., Any]:
    """A Python-written torch function whose own torch-function check is off, so that its body runs under the mode."""
    blind = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
    clone = types.FunctionType(
        func.__code__, {**func.__globals__, **blind}, func.__name__, func.__defaults__, func.__closure__
    )
    clone.__kwdefaults__ = func.__kwdefaults__
    return clone


def _no(*_: Any) -> bool:
    return False


_TORCH_MODULES = ("torch", "torch._C", "torch._tensor", None, "torch.functional", "torch.autograd")


def _make_constant(mode: FunctionMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.tensor(data) and its like: a constant of the program, unless data is already a tensor."""
    data = args[0] if args else kwargs.get("data")
    if isinstance(data, torch.Tensor):
        if kwargs.get("dtype") is not None:
            return data.to(kwargs["dtype"])
        return data.clone() if func is torch.tensor else data
    if tensors_in(data if isinstance(data, (list, tuple)) else ()):
        return _stacked(mode, data, kwargs.get("dtype"))
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad")}
    tracer = mode.tracer
    tracer.here()
    with _disable_current_modes(), tracer:
        return tracer.wrap(tracer.constant(func(*args, **kwargs)))


def _stacked(mode: FunctionMode, data: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """torch.tensor([x, [1, y]]): numbers, of which some are values of tensors; no gradient flows there."""
    if isinstance(data, (list, tuple)):
        parts = [_stacked(mode, x, dtype) for x in data]
        common = functools.reduce(torch.promote_types, (p.dtype for p in parts))
        return torch.stack([p.to(common) for p in parts])
    if not isinstance(data, torch.Tensor):
        number: torch.Tensor = _make_constant(mode, torch.tensor, data, dtype=dtype)
        return number
    if data.numel() != 1:
        raise refuse("a tensor is made from traced tensors of several elements by torch.tensor", "torch.stack([...])")
    plain = torch.get_default_dtype() if data.is_floating_point() else data.dtype if data.dtype == torch.bool else None
    return data.detach().reshape(()).to(dtype or plain or torch.int64)


def _ctc_loss(
    mode: FunctionMode, func: Any, log_probs: torch.Tensor, targets: torch.Tensor, *lengths: Any, **k: Any
) -> Any:
    """Targets one after the other: how long each is decides which are whose."""
    if targets.ndim != 1 or k.keys() & {"input_lengths", "target_lengths"}:
        return mode.traced(func, (log_probs, targets, *lengths), k)
    known = [mode.tracer.asked(x, "ctc_loss") if isinstance(x, torch.Tensor) else x for x in lengths[:2]]
    with _disable_current_modes():
        known = [x.tolist() if isinstance(x, torch.Tensor) else x for x in known]
    return mode.traced(func, (log_probs, targets, *known, *lengths[2:]), k)


def _packed(mode: FunctionMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Sequences of known lengths, one after the other."""
    rows = (packed if func.__name__ == "_pack_padded_sequence" else padded)(mode.tracer, *args, **kwargs)
    return mode.traced(func, args, kwargs) if rows is None else rows


def _recurrent(mode: FunctionMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Layers of packed rows have the number of rows of each step as their second operand."""
    rest = args[1:3]
    if len(rest) == 2 and isinstance(rest[0], torch.Tensor) and len(args) > 3 and isinstance(args[3], (list, tuple)):
        states = rest[1] if isinstance(rest[1], (list, tuple)) else [rest[1]]
        layers = packed_layers(mode.tracer, func.__name__, args[0], rest[0], states, *args[3:], **kwargs)
        if layers is not None:
            return layers
    return mode.traced(func, args, kwargs)


def _gradient(mode: FunctionMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's autograd sees nothing of a capture: gradients are those of the trace; inside transforms of torch.func it
    is their business."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if torch._C._functorch.maybe_current_level() is not None or any(map(wrapped, tensors_in(args[:1]))):
        return func(*args, **kwargs)
    if func is torch.autograd.grad:
        return traced_grad(mode.tracer, *args, **kwargs)
    if "grad_tensors" in kwargs:  # torch.autograd.backward
        kwargs["gradient"] = kwargs.pop("grad_tensors")
    return traced_backward(mode.tracer, *args, **kwargs)


def _new_tensor(
    mode: FunctionMode, func: Any, x: torch.Tensor, data: Any, *, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    """x.new_tensor(data): a constant in the dtype of x."""
    return _make_constant(mode, torch.tensor, data, dtype=dtype or x.dtype)


def _sparse_matrix(mode: FunctionMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    return coo_matrix(*args, **kwargs) or mode.traced(func, args, kwargs)


def _get_item(mode: FunctionMode, func: Any, x: torch.Tensor, key: Any) -> Any:
    return func(*mode.tracer.opened(x, _with_constants(mode, key)))


def _set_item(mode: FunctionMode, func: Any, x: torch.Tensor, key: Any, value: Any) -> None:
    if isinstance(value, (bool, int, float, complex)):  # torch would make a tensor of it, on the host, unseen
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    func(*mode.tracer.opened(x, _with_constants(mode, key)), value)


def _with_constants(mode: FunctionMode, key: Any) -> Any:
    """A subscript in which lists of numbers are constants of the program: torch would make tensors of them unseen.  A
    list of lists by itself is a tuple, as in torch."""
    if isinstance(key, list) and any(isinstance(k, list) for k in key):
        key = tuple(key)
    if isinstance(key, tuple):
        return tuple(_make_constant(mode, torch.tensor, k) if _is_numbers(k) else k for k in key)
    return _make_constant(mode, torch.tensor, key) if _is_numbers(key) else key


def _is_numbers(key: Any) -> bool:
    return isinstance(key, list) and bool(key) and all(isinstance(k, (bool, int)) or _is_numbers(k) for k in key)


def _roll(mode: FunctionMode, func: Any, x: torch.Tensor, shifts: Any, dims: Any = ()) -> Any:
    """torch.roll; by numbers that are not known, elements are taken from where they were."""
    shifts, dims = (v if isinstance(v, (tuple, list)) else (v,) for v in (shifts, dims))
    if not any(type(s) is Traced for s in shifts):
        return mode.traced(func, (x, shifts, dims), {})
    if not dims:
        return _roll(mode, func, x.flatten(), shifts, 0).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        x = x.index_select(dim, (torch.arange(size, device=x.device) - shift) % size)
    return x


def _requires_grad(mode: FunctionMode, func: Any, x: torch.Tensor, requires_grad: bool = True) -> Any:
    if requires_grad and type(x) is Traced and torch._C._functorch.maybe_current_level() is None:
        as_leaf(mode.tracer, x)
    elif id(x) in mode.tracer.places.tensors:
        set_recorded(mode.tracer, x, requires_grad)
    return func(x, requires_grad)


def _register_hook(mode: FunctionMode, func: Any, x: torch.Tensor, hook: Callable[..., Any]) -> Any:
    return hook_value(mode.tracer, x, hook)


def _retain_grad(mode: FunctionMode, func: Any, x: torch.Tensor) -> None:
    """x.retain_grad(): backward() leaves its gradient there, too."""
    if type(x) is Traced:
        mode.tracer.retained.append(x)


def _set_requires_grad(mode: FunctionMode, x: torch.Tensor, value: bool) -> None:
    _requires_grad(mode, torch.Tensor.requires_grad_, x, value)


class GradientNode:
    """x.grad_fn of a traced tensor: that it is there is all there is to know."""

    def __getattr__(self, name: str) -> Any:
        raise refuse(f"grad_fn.{name} was asked of a traced tensor", "torch.autograd.grad, or looking at it outside")


def _number_of_rows(tracer: Tracer, rows: ChosenRows, all_rows: int) -> Any:
    """How many of all elements belong to rows that count: a number that Python may compute with."""
    tracer.here()
    tracer.counted_rows.add(rows.source)
    with tracer:
        number = tracer.wrap(RowsAt(tracer, rows).share(all_rows, torch.int64))
    number.weak = tracer.numbers = True
    return number


def _shape(shape: RowsShape, dim: int | None = None) -> Any:
    return shape if dim is None else shape[dim]


# what asks for sizes: of rows that a mask chose all are known but their number
_SIZES: dict[str, Callable[..., Any]] = {
    "size": _shape, "__len__": lambda shape: shape[0], "numel": RowsShape.numel, "nelement": RowsShape.numel,
}  # fmt: skip
_DATA: Any = torch.Tensor.data
# what torch's graph would say of a tensor: does it ask for a gradient, and is it one that code asked it for?
_RECORDED: dict[Any, Callable[[bool, bool], Any]] = {
    torch.Tensor.requires_grad: lambda asks, leaf: asks,
    torch.Tensor.is_leaf: lambda asks, leaf: leaf or not asks,
    torch.Tensor.grad_fn: lambda asks, leaf: GradientNode() if asks and not leaf else None,
}
_OF_ANY = (_DATA, torch.Tensor.requires_grad)  # set also of tensors that the code reaches
_SETTERS: dict[Any, Callable[..., None]] = {
    _DATA: lambda mode, x, other: mode.tracer.rebind(x, other),
    torch.Tensor.grad: lambda mode, x, grad: set_leaf_grad(mode.tracer, x, grad),
    torch.Tensor.requires_grad: _set_requires_grad,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "tensor": _make_constant, "as_tensor": _make_constant, "from_numpy": _make_constant, "new_tensor": _new_tensor,
    "backward": _gradient, "grad": _gradient, "__getitem__": _get_item, "__setitem__": _set_item,
    "register_hook": _register_hook, "requires_grad_": _requires_grad, "retain_grad": _retain_grad,
    "ctc_loss": _ctc_loss, "roll": _roll,
    "_pack_padded_sequence": _packed, "_pad_packed_sequence": _packed, "sparse_coo_tensor": _sparse_matrix,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
}  # fmt: skip


def _lift_fresh(tracer: Tracer, x: torch.Tensor) -> Any:
    tracer.here()
    if type(x) is Traced:
        return x
    with tracer:
        return tracer.wrap(tracer.constant(x))


def _read(tracer: Tracer, name: str, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A Python value asked of a tensor: known for constants, a fact where the batch decides, else refused.  Text and
    addresses are no part of what is computed: they decide nothing."""
    if name in ("__format__", "__repr__"):
        return _text(tracer, name, x, *args, **kwargs)
    if name == "__contains__":
        with tracer.mode:
            return _read(tracer, "__bool__", (x == args[0]).any())
    if name == "tolist" and (places := possible_places(tracer, x, as_numbers=True)) is not None:
        return places
    value = tracer.concrete(x) if name == "data_ptr" else tracer.fact(x)
    if value is None and name == "item" and x.numel() == 1:
        return as_number(tracer, x)
    if value is None and name == "tolist" and x.numel() <= MOST_NUMBERS:
        return _numbers(tracer, x)
    if value is None:
        raise refuse_read(name, routed=tracer.has_choices())
    with _disable_current_modes():
        return getattr(torch.Tensor, name)(value, *args, **kwargs)


def _text(tracer: Tracer, name: str, x: torch.Tensor, form: str = "", **kwargs: Any) -> str:
    """Text of a tensor, which is that of each call, also where it is one that the code reaches."""
    is_format = name == "__format__" and (x.ndim == 0 or type(x) is Traced)
    known = tracer.concrete(x) if type(x) is Traced and form else None
    known = x if type(x) is not Traced and id(x) not in tracer.places.tensors else known
    if known is not None:
        with _disable_current_modes():
            return format(known, form) if is_format else repr(known)
    if is_format:
        return tracer.text_of(x, f"format:{form}" if form else "format")
    kind = "Parameter containing:\n" if name == "__format__" and isinstance(x, torch.nn.Parameter) else ""
    return kind + tracer.text_of(x, "trained" if x.requires_grad else "text")


def _numbers(tracer: Tracer, x: torch.Tensor) -> Any:
    """x.tolist() of a tensor whose values are not known."""
    return [_numbers(tracer, row) for row in x.unbind(0)] if x.ndim else as_number(tracer, x)


def _bincount(tracer: Tracer, x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """`minlength` counts where no value can ask for more."""
    known = bounds(tracer.cell(x).read(), tracer.producers)
    if weights is not None:
        return tracer._dynamic(torch.ops.aten.bincount.default, (x, weights, minlength), {})
    if known is None or not 0 <= known[0] <= known[1] < minlength:
        with tracer.mode:
            largest = x.max() if x.numel() else None
        minlength = minlength if largest is None else max(minlength, int(tracer.asked(largest, "bincount")) + 1)
    tracer.here()
    with tracer:
        index = o.cast(tracer.value(x), dtype=torch.int64)
        counts = o.full(0, shape=(minlength,), dtype=torch.int64)
        return tracer.wrap(o.scatter_add(counts, index, o.full(1, shape=index.shape, dtype=torch.int64), dim=0))


def _is_all_true(tracer: Tracer, x: torch.Tensor) -> Any:
    """torch._check_tensor_all: the code is right to assume it."""
    with tracer:
        return tracer.wrap(o.full(True, shape=(), dtype=torch.bool))


def _zero_tangent(tracer: Tracer, size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """What torch's forward mode has where there is no tangent."""
    tracer.here()
    with tracer:
        return tracer.wrap(o.full(0.0, shape=tuple(size), dtype=dtype or torch.get_default_dtype()))


def _standard_gamma(tracer: Tracer, x: torch.Tensor, generator: Any = None) -> Any:
    """Draws through which gradients flow, by torch's own rule."""

    def forward(given: tuple[Any, ...]) -> tuple[Any, list[torch.Tensor]]:
        func = torch.ops.aten._standard_gamma.default
        return tracer.wrap(tracer._opaque(func, (*given, generator) if generator is not None else given, {})), []

    def backward(given: tuple[Any, ...], drawn: Any, _: list[torch.Tensor], cotangents: list[Any]) -> Any:
        return cotangents[0] * torch._standard_gamma_grad(given[0], drawn)

    with tracer.mode:
        return trace_custom(tracer, forward, backward, (x,))


SPECIAL.update(
    {
        torch.ops.aten.bincount.default: _bincount,
        torch.ops.aten._is_all_true.default: _is_all_true,
        torch.ops.aten.lift_fresh.default: _lift_fresh,
        torch.ops.aten.is_nonzero.default: lambda tracer, x: _read(tracer, "__bool__", x),
        torch.ops.aten._has_same_storage_numel.default: lambda tracer, x, y: x.numel() == y.numel(),
        torch.ops.aten.is_same_size.default: lambda tracer, x, y: x.shape == y.shape,
        torch.ops.aten._standard_gamma.default: _standard_gamma,
        torch.ops.aten._efficientzerotensor.default: _zero_tangent,
    }
)
