"""Batches of varying sizes, padded to a few: one program for each bucket instead of one for each size.

    train_step(…, pad={"input_ids": {1: [512, 1024]}})          dim 1 of input_ids becomes 512 or 1024

    input_ids 2 x 700     ──▶  2 x 1024     0 behind the end
    attention_mask        ──▶  2 x 1024     0          a tensor that has as much along the same dim goes with it
    labels                ──▶  2 x 1024     -100

Along dim 0 the last row is repeated, and its labels are -100.  That loss and gradients are those of the unpadded batch
is tried before the first step, on some rows of the first batch, in double precision and with dropout left out; where
they are not, the step is refused.  A step without `pad` that was compiled for many sizes says so, once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mycel.capture import as_leaf
from mycel.errors import TrainError, warn

Key = int | str  # of a batch tensor: its position, or its name
Named = dict[Key, Any]
Objective = Callable[[torch.nn.Module], Callable[..., Any]]

IGNORED = -100  # a label that torch's losses leave out
LABELS = ("label", "labels", "target", "targets", "y")
VALUE = "value"
ROWS = 2  # of the first batch, that are tried
LARGEST_COPY = 4 << 30  # bytes of a model in double precision; a larger one is tried as it is
# as a share; of 16 bits a twentieth; models in double compute some things in single (norms of transformers' Llama)
DIFFERENCE = {torch.float64: 1e-5, torch.float32: 1e-3}
COARSE = 0.05
MANY = 8  # sizes of one dim, for each of which a step was compiled: told of


@dataclass(frozen=True)
class Padding:
    """Of one batch tensor: its sizes by dim, and what it is filled with (None: by its name)."""

    sizes: Mapping[int, tuple[int, ...]]
    value: float | None = None


@dataclass
class Buckets:
    """How batches are padded, and which tensors go with those that are named (known from the first batch on)."""

    named: Mapping[Key, Padding]
    followers: dict[Key, tuple[Key, int]] | None = None  # the tensor that is followed, along which dim
    shown: bool = field(default=False)  # that padding changes neither loss nor gradients

    @staticmethod
    def of(pad: Any) -> Buckets | None:
        """What `train_step(pad=…)` was given."""
        if pad is None:
            return None
        if not isinstance(pad, Mapping) or not pad or not all(isinstance(p, Mapping) for p in pad.values()):
            raise TrainError(f"pad={pad!r}\n  try       pad={{'input_ids': {{1: [512, 1024]}}}}")
        return Buckets({key: _padding(key, given) for key, given in pad.items()})

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The batch, padded to the smallest buckets that hold it."""
        batch = _named(args, kwargs)
        self._refuse_missing(batch)
        if self.followers is None:
            self.followers = dict(self._following(batch))
        sizes = {(key, dim): (batch[key].shape[dim], to) for key, dim, to in self._wanted(batch)}
        for key, (leader, dim) in self.followers.items():
            if key in batch and (leader, dim) in sizes:
                before, to = sizes[leader, dim]
                if not isinstance(batch[key], torch.Tensor) or batch[key].shape[dim] != before:
                    raise TrainError(
                        f"{key!r} has another size along dim {dim} than {leader!r}, which has {before}: in the first "
                        "batch they were the same\n  try       all of them by name in pad"
                    )
                sizes[key, dim] = before, to
        for (key, dim), (_, to) in sizes.items():
            batch[key] = _filled(batch[key], dim, to, self._value(key, batch[key]))
        return tuple(batch[i] for i in range(len(args))), {name: batch[name] for name in kwargs}

    def _refuse_missing(self, batch: Named) -> None:
        for key, padding in self.named.items():
            if not isinstance(batch.get(key), torch.Tensor):
                given = ", ".join(repr(k) for k, x in batch.items() if isinstance(x, torch.Tensor))
                raise TrainError(f"pad: the batch has no tensor {key!r}\n  known     {given}")
            if batch[key].ndim <= max(padding.sizes):
                raise TrainError(f"pad: {key!r} has {batch[key].ndim} dims, and no dim {max(padding.sizes)}")

    def _wanted(self, batch: Named) -> Iterator[tuple[Key, int, int]]:
        """The tensors that are named, their dims, and the sizes these get."""
        for key, padding in self.named.items():
            for dim, sizes in padding.sizes.items():
                size = batch[key].shape[dim]
                if size > sizes[-1]:
                    raise TrainError(
                        f"pad: {key!r} has {size} along dim {dim}, more than the largest bucket, {sizes[-1]}\n"
                        f"  try       pad={{{key!r}: {{{dim}: {[*sizes, size]}}}}}, or shorter rows"
                    )
                yield key, dim, next(to for to in sizes if to >= size)

    def _following(self, batch: Named) -> Iterator[tuple[Key, tuple[Key, int]]]:
        """Tensors with as much along the same dim as one that is named."""
        for key, padding in self.named.items():
            for dim in padding.sizes:
                for other, x in batch.items():
                    if other in self.named or not isinstance(x, torch.Tensor) or x.ndim <= dim:
                        continue
                    if x.shape[: dim + 1] == batch[key].shape[: dim + 1]:
                        yield other, (key, dim)

    def _value(self, key: Key, x: torch.Tensor) -> float | None:
        given = self.named[key].value if key in self.named else None
        return float(IGNORED) if given is None and key in LABELS and not x.is_floating_point() else given

    # -- is it the same? ------------------------------------------------------------------------------------------

    def show(self, model: torch.nn.Module, of: Objective, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """TrainError unless some rows of this batch have the same loss, gradients and buffers when they are padded."""
        if self.shown:
            return
        short = self._short(args, kwargs)
        padded = self(*short)
        try:
            differences, losses = _compared(model, of, short, padded)
        except (RuntimeError, ValueError, IndexError, TypeError) as e:
            raise TrainError(f"pad: the padded batch could not be tried: {e}\n{self._advice()}") from e
        if differences:
            raise TrainError(
                f"pad: padding changes what is learnt: loss {losses[0]:.6g} becomes {losses[1]:.6g}"
                f"\n  differs   {'; '.join(differences[:3])}\n{self._advice()}"
            )
        self.shown = True

    def _advice(self) -> str:
        return (
            "  try       an attention_mask in the batch, labels that are -100 where there is nothing to learn (or\n"
            '            pad={"targets": {1: […], "value": …}}), a loss that is a mean over what counts'
        )

    def _short(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Some rows of the batch, shorter than their buckets along every dim that may be padded."""
        self(args, kwargs)  # knows the followers
        batch = _named(args, kwargs)
        dims = [(key, key, dim) for key, padding in self.named.items() for dim in padding.sizes]
        dims += [(key, leader, dim) for key, (leader, dim) in (self.followers or {}).items()]
        rows = min((x.shape[0] for x in batch.values() if isinstance(x, torch.Tensor) and x.ndim), default=0)
        if not any(dim == 0 for _, _, dim in dims):
            for key, x in batch.items():
                if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == rows:
                    batch[key] = x[:ROWS]
        for key, leader, dim in dims:
            size = batch[key].shape[dim]
            if size in self.named[leader].sizes[dim]:
                batch[key] = batch[key].narrow(dim, 0, max(1, size - max(1, size // 3)))
        return tuple(batch[i] for i in range(len(args))), {name: batch[name] for name in kwargs}


@dataclass
class CompiledSizes:
    """The shapes of batches that a step without buckets was compiled for, by tensor."""

    shapes: dict[Key, list[torch.Size]] = field(default_factory=dict)
    has_warned: bool = False

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One more batch; many sizes of one dim are told of, once, with buckets that would hold them."""
        for key, x in _named(args, kwargs).items():
            if isinstance(x, torch.Tensor):
                self.shapes.setdefault(key, []).append(x.shape)
        varying = next(self._varying(), None)
        if varying is None or self.has_warned:
            return
        self.has_warned = True
        key, dim, sizes = varying
        name = repr(key) if isinstance(key, str) else f"argument {key}"
        largest = 1 << (max(sizes) - 1).bit_length()
        warn(
            f"the step was compiled for {len(sizes)} sizes of {name} along dim {dim} (from {min(sizes)} to "
            f"{max(sizes)}), which takes time and memory for each\n"
            f"  try       train_step(…, pad={{{key!r}: {{{dim}: [{largest // 2}, {largest}]}}}}): padded to two sizes",
        )

    def _varying(self) -> Iterator[tuple[Key, int, set[int]]]:
        for key, shapes in self.shapes.items():
            for dim in range(min(map(len, shapes))):
                sizes = {shape[dim] for shape in shapes}
                if len(sizes) >= MANY:
                    yield key, dim, sizes


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Named:
    """Arguments by position and by name, arrays as the tensors torch makes of them."""
    batch: Named = dict(enumerate(args))
    batch.update(kwargs)
    return {key: x if (leaf := as_leaf(x)) is None else leaf for key, x in batch.items()}


def _padding(key: Key, given: Mapping[Any, Any]) -> Padding:
    sizes, value = {k: v for k, v in given.items() if k != VALUE}, given.get(VALUE)
    usable = all(
        isinstance(dim, int) and dim >= 0 and isinstance(to, Sequence) and to and all(isinstance(n, int) for n in to)
        for dim, to in sizes.items()
    )
    if not sizes or not usable or not isinstance(value, (int, float, type(None))):
        raise TrainError(
            f"pad: {key!r}: {dict(given)!r}\n  try       {{1: [512, 1024]}}: a dim and its sizes; and "
            '"value": what it is filled with'
        )
    return Padding({dim: tuple(sorted(to)) for dim, to in sizes.items()}, value)


def _filled(x: torch.Tensor, dim: int, to: int, value: float | None) -> torch.Tensor:
    """A tensor of size `to` along a dim; without a value that is zeros, or along dim 0 the last row again."""
    missing = to - x.shape[dim]
    if not missing:
        return x
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    more = last.expand(*x.shape[:dim], missing, *x.shape[dim + 1 :])
    if dim or value is not None:
        more = torch.full_like(more, 0 if value is None else value)
    return torch.cat([x, more], dim)


def _compared(model: torch.nn.Module, of: Objective, short: Any, padded: Any) -> tuple[list[str], tuple[float, float]]:
    """What differs, and the two losses: in double precision, where a copy of the model can be that."""
    if sum(p.numel() for p in model.parameters()) * torch.float64.itemsize <= LARGEST_COPY:
        try:
            return _differences(copy.deepcopy(model).double(), of, short, padded)
        except (RuntimeError, TypeError):  # it cannot be copied, or the loss reaches what is in single precision
            pass
    return _differences(model, of, short, padded)


def _differences(
    model: torch.nn.Module, of: Objective, short: Any, padded: Any
) -> tuple[list[str], tuple[float, float]]:
    like = next(iter(model.parameters()))
    state = [(b, b.clone()) for b in model.buffers()]
    results = []
    for args, kwargs in (short, padded):
        try:
            results.append(_learnt(model, of, _as_like(args, like), _as_like(kwargs, like)))
        finally:
            for buffer, before in state:
                buffer.copy_(before)
    one, other = results
    sizes = {name: float(x.double().norm()) for name, x in one.items()}
    apart = {name: float((other[name] - x).double().norm()) for name, x in one.items()}
    share = DIFFERENCE.get(like.dtype, COARSE)
    least = 1e-3 * max(sizes.values())  # what is next to nothing beside the rest is as exact as the rest
    differing = [name for name in one if not apart[name] <= share * (sizes[name] + least)]
    texts = [f"{name} by {apart[name]:.2g} of {sizes[name]:.2g}" for name in differing]
    return texts, (float(one["loss"]), float(other["loss"]))


def _learnt(model: torch.nn.Module, of: Objective, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    """The loss, gradients and buffers of a batch, in plain torch and without dropout."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad(), _WithoutDropout(), torch.random.fork_rng():
        torch.manual_seed(0)
        loss = of(model)(*args, **kwargs)
        gradients = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
    reached = {name: g for name, g in zip(trained, gradients, strict=True) if g is not None}
    buffers = {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}
    return {"loss": loss.detach(), **reached, **buffers}


def _as_like(batch: Any, like: torch.Tensor) -> Any:
    """Tensors where the model is; fractions in double precision, where the model is that."""
    if isinstance(batch, dict):
        return {k: _as_like(x, like) for k, x in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_as_like(x, like) for x in batch)
    if not isinstance(batch, torch.Tensor):
        return batch
    wide = like.dtype is torch.float64 and batch.is_floating_point()
    return batch.to(like.device, torch.float64 if wide else None)


class _WithoutDropout(TorchFunctionMode):
    """Nothing is dropped: padded tensors would draw other numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:])[: len(args)]
            kwargs = {**kwargs, "dropout_p": 0.0} if len(args) <= 4 else kwargs
        return func(*args, **kwargs)


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.feature_dropout,
}  # fmt: skip
