"""The batch -> the loss, as one function: what a model returns, or a loss of what it returns.

loss=None          step(**batch)    model(**batch), its `.loss`, or the one scalar it returns among others
loss=f             step(x, y)       f(model(x), y):  f gets the last arguments, as many as it needs (all of them, if it
                                    takes *args); the model the first ones, as many as it takes: what f needs is none
                                    of the model's optional ones.  Arguments by name go to whoever names them
loss=f, whose first argument is called `model`   f(model, *batch): the whole way from the batch to the loss
outputs=True       (loss, the model's output), or what a loss returns besides, as in (loss, {"accuracy": …})
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mycel.buckets import LABELS
from mycel.capture import flatten_arguments, rewritten
from mycel.errors import TrainError, warn
from mycel.ir import Program, Var


def objective(model: torch.nn.Module, loss: Callable[..., Any] | None, outputs: bool = False) -> Callable[..., Any]:
    """The batch -> the loss, as one function; with `outputs`, and what is returned beside it."""
    if loss is None:
        takes = inspect.signature(model.forward).parameters
        labels = next((name for name in LABELS if name in takes), "labels")

        def of_model(*args: Any, **kwargs: Any) -> Any:
            out = model(*args, **kwargs)
            loss = _loss_of(out, labels)
            return (loss, _without_caches(out)) if outputs else loss

        return of_model
    if _first_argument(loss) == "model":

        def of_batch(*args: Any, **kwargs: Any) -> Any:
            value = rewritten(loss)(model, *args, **kwargs)
            return _and_rest(value, None) if outputs else _scalar(value)

        return of_batch
    model_arity, named = _takes(model.forward)
    wanted, asked = _takes(loss.forward if isinstance(loss, torch.nn.Module) else loss)

    def of_loss(*args: Any, **kwargs: Any) -> Any:
        mine = {k: v for k, v in kwargs.items() if asked is not None and k in asked and k != wanted.first}
        unknown = [k for k in kwargs if named is not None and k not in named and k not in mine]
        if unknown:
            raise TrainError(
                f"neither the model nor the loss takes {', '.join(unknown)}\n"
                "  try       names that forward or the loss has; a setting such as outputs=True is train_step's"
            )
        count = model_arity.most
        if wanted.most is not None:  # what the loss needs is no optional argument of the model
            least = max(model_arity.least, 0 if kwargs else 1)  # a wrapper's forward(*args) is given something, too
            left = max(len(args) - max(wanted.least - 1 - len(mine), 0), least)
            count = left if count is None else min(count, left)
        out = model(*args[:count], **{k: v for k, v in kwargs.items() if named is None or k in named})
        try:
            value = rewritten(loss)(out, *wanted.rest_of(args, count, mine), **mine)
        except TypeError as e:
            if not re.search(r"'(Traced|Tensor)' object is not callable", str(e)):
                raise
            raise TrainError(
                f"the loss calls a tensor; {wanted.first}, its first argument, is what the model returned\n"
                "  try       model  as the name of that argument, for a loss that is given the model"
            ) from e
        if outputs:
            return _and_rest(value, out)
        if isinstance(value, (tuple, dict)):
            raise TrainError(
                f"the loss returned a {type(value).__name__}, not a loss alone\n"
                "  try       outputs=True: the step then returns (loss, the rest)"
            )
        return _scalar(value)

    return of_loss


def _first_argument(loss: Callable[..., Any]) -> str:
    """What a loss calls what it is given first."""
    return "" if isinstance(loss, torch.nn.Module) else next(iter(inspect.signature(loss).parameters), "")


@dataclass(frozen=True)
class Arity:
    """How many positional arguments a function needs and takes (None: any number), and the name of the first."""

    least: int
    most: int | None
    first: str

    def rest_of(self, args: tuple[Any, ...], model_count: int | None, named: dict[str, Any]) -> tuple[Any, ...]:
        """What a loss gets of the batch besides the output: the last ones, as many as it needs, and whatever the model
        did not take."""
        if self.most is None:
            return args
        left = 0 if model_count is None else max(len(args) - model_count, 0)
        if left > self.most - 1:
            raise TrainError(
                f"the batch has {len(args)} arguments; the model takes {model_count}, the loss {self.most - 1} besides "
                "the output"
            )
        count = max(left, self.least - 1 - len(named))
        return args[max(len(args) - count, 0) :] if count > 0 else ()


def _takes(fn: Callable[..., Any]) -> tuple[Arity, set[str] | None]:
    """Positional arguments, and names (None: any)."""
    ps = list(inspect.signature(fn).parameters.values())
    plain = [p for p in ps if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = any(p.kind is p.VAR_POSITIONAL for p in ps)
    names = (
        None
        if any(p.kind is p.VAR_KEYWORD for p in ps)
        else {p.name for p in ps if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    )
    return Arity(
        sum(p.default is p.empty for p in plain), None if rest else len(plain), plain[0].name if plain else ""
    ), names


def _and_rest(value: Any, out: Any) -> tuple[torch.Tensor, Any]:
    """What a loss returned, and beside it what it returned more, or the model's output."""
    if isinstance(value, tuple) and value:
        return _scalar(value[0]), value[1] if len(value) == 2 else value[1:]
    if isinstance(value, dict):
        return _loss_of(value), value
    return _scalar(value), _without_caches(out)


def _without_caches(out: Any) -> Any:
    """A model's output without what is no tensor and holds some, such as keys and values for the next token."""
    if not isinstance(out, dict):
        return out
    plain = (torch.Tensor, tuple, list, dict, str, int, float, complex, type(None))
    kept = {k: v for k, v in out.items() if isinstance(v, plain)}
    if len(kept) == len(out):
        return out
    return kept if type(out) is dict else type(out)(**kept)


def _loss_of(out: Any, labels: str = "labels") -> torch.Tensor:
    """The loss a model returned: itself, its `loss`, or of several values the first if it is a scalar, else the one
    that is."""
    if isinstance(out, torch.Tensor):
        if out.ndim:
            raise TrainError(
                f"the model returned {out.dtype} of shape {tuple(out.shape)}, which is no loss\n"
                "  try       give train_step loss=f(output, *batch), or return the loss from forward"
            )
        return _scalar(out)
    loss = out.get("loss") if isinstance(out, dict) else getattr(out, "loss", None)
    if loss is None and isinstance(out, (tuple, list)):
        scalars = [x for x in out if isinstance(x, torch.Tensor) and x.ndim == 0 and x.is_floating_point()]
        if scalars and (out[0] is scalars[0] or len(scalars) == 1):
            loss = scalars[0]
        elif scalars:
            raise TrainError(
                f"the model returned {len(out)} values, {len(scalars)} of them scalars: none of them is said to be the "
                "loss\n  try       a dict with loss, or give train_step loss=lambda out, *batch: out[1]"
            )
    if loss is None:
        raise TrainError(
            f"the model returned {type(out).__name__} without a loss\n"
            f"  try       pass {labels} in the batch, or give train_step loss=f(output, *batch)"
        )
    return _scalar(loss)


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0 or not loss.is_floating_point():
        shown = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        hint = ".mean() or .sum() at the end of the loss"
        if isinstance(loss, (int, float)):
            hint = "a loss that stays a tensor: no float(), no .item()"
        elif isinstance(loss, torch.Tensor) and not loss.is_floating_point():
            hint = "a loss in floating point: counts, such as of right answers, have no gradient"
        raise TrainError(f"the loss is {shown}, not a floating point scalar\n  try       {hint}")
    return loss


MORE = 8  # times as many parts as asked for: more of them are told of, for a batch of another size is faster


class Batch:
    """The arguments of a call, and the first of the `parts` they are split into: as many as asked for, or where rows do
    not divide, the next number that divides them.  So parts weigh the same, and none is larger than was meant.
    `without_rows`: tensors, by their places among those of the arguments, that are no rows of it, however long."""

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int, without_rows: Collection[int] = ()
    ) -> None:
        self.args, self.kwargs, self.parts = args, kwargs, parts
        self.leaves: list[torch.Tensor] = []
        self.tree = flatten_arguments((args, kwargs), self.leaves)
        if parts > 1 and self.tree.has_sparse:
            raise TrainError(
                f"accumulate={parts} splits the batch by its rows, and a sparse tensor of it has none\n"
                "  try       accumulate=1, or a batch of dense tensors"
            )
        in_rows = [x for i, x in enumerate(self.leaves) if x.ndim and i not in without_rows]
        self.rows = in_rows[0].shape[0] if in_rows else None
        self.in_rows = {id(x) for x in in_rows if x.shape[0] == self.rows}
        if parts > 1 and self.rows is not None:
            self.parts = next((k for k in range(min(parts, self.rows), self.rows + 1) if k and self.rows % k == 0), 0)
        if parts > 1 and not (self.rows and self.parts):
            raise TrainError(
                f"accumulate={parts} splits the first dim of the batch, which is {self.rows}\n"
                "  try       a batch with rows"
            )
        if self.rows and self.parts > MORE * parts:
            message = (
                f"accumulate={parts} of a batch of {self.rows} rows: parts are of one size, so these are {self.parts} "
                f"of {self.rows // self.parts}\n"
                f"  try       a batch of {self.rows - self.rows % parts} rows: it is faster"
            )
            warn(message)

    def is_split(self, x: torch.Tensor) -> bool:
        return self.parts > 1 and id(x) in self.in_rows

    def part(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for one part."""
        if self.parts == 1:
            return self.args, self.kwargs
        assert self.rows is not None
        slices = {id(x): x[: self.rows // self.parts] if self.is_split(x) else x for x in self.leaves}
        return self.tree.unflatten(iter([slices[id(x)] for x in self.leaves]))

    def split(self, names: Sequence[str]) -> set[str]:
        """Which inputs of the program are split; `names`: of the inputs that its tensors are."""
        return {name for x, name in zip(self.leaves, names, strict=True) if self.is_split(x)}


def refuse_outputs(part: Program, whole: Program, parts: int) -> None:
    """TrainError for a result of a part that is neither rows of the batch nor can be summed up."""
    for x, y in zip(part.results, whole.results, strict=True):
        if not isinstance(x, Var) or not isinstance(y, Var):
            continue
        joins = x.ndim == y.ndim and x.shape != () and (x.shape[0] * parts, *x.shape[1:]) == y.shape
        if not joins and (x.shape != y.shape or x.dtype == torch.bool):
            raise TrainError(
                f"with accumulate={parts} an output is {x.type} for a part, {y.type} for the batch: parts of it cannot "
                "be put together\n  try       outputs whose first dim is the batch's, numbers, or accumulate=1"
            )
