"""Rows that a mask chooses, without a shape that depends on values: all rows, of which some count.

    h[mask]               ─▶  where(mask, h, one of the chosen rows)     N rows, marked as `ChosenRows`
    f(h[mask])            ─▶  f of all of them, where f treats each row by itself: the row's letter passes through
    f(h[mask]).mean()     ─▶  sum(where(mask, …, 0)) / sum(mask)         a sum, a maximum; others by `Op.of_rows`
    y[mask] = f(h[mask])  ─▶  where(mask, …, y)
    nonzero(mask)         ─▶  all places; those that do not count are one of those that do
    f(h[any(m, -1)], w[m])     ─▶  f(h[any(m, -1)], (sum of w where m, over the last dim)[any(m, -1)])
    for i in nonzero(mask): f(i)   ─▶  if mask[0]: f(0); if mask[1]: f(1); …

What does not count is a copy of a row that does: whatever is computed of it is a number where the chosen rows give
numbers, and no gradient comes from it.  Whether an operator treats rows by themselves is read from its dims.  What asks
for the number of rows where Python needs it, mixes them in another way, or leaves the program cannot be written so: the
line is captured once more without it, by a fact or an island.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mycel.capture.fence import refuse
from mycel.errors import CaptureError
from mycel.ir import CONTROL, Eqn, Op, Type, Var, is_float
from mycel.ops import o

_WARNED: set[str] = set()  # lines that were told of

if TYPE_CHECKING:
    from mycel.capture.record import Record


@dataclass(frozen=True)
class ChosenRows:
    """Along `dim`, rows count where `keep` holds; `mask` and `spread` tell whose rows they are, `source` which line
    chose them."""

    keep: Var
    dim: int
    mask: Var
    spread: tuple[tuple[int, int], ...]  # joined with other dims since: how many are before and behind
    source: str

    def goes_with(self, other: ChosenRows) -> bool:
        return self.mask == other.mask and self.spread == other.spread


@dataclass(frozen=True)
class RowsAt:
    """What an operator's `of_rows` is told: where rows are, and which count."""

    record: Record
    rows: ChosenRows

    def covered(self, x: Var, value: Any) -> Var:
        """x with a value in the rows that do not count."""
        mine = self.record.rows[x]
        lane: Var = o.reshape(mine.keep, shape=tuple(n if d == mine.dim else 1 for d, n in enumerate(x.shape)))
        covered: Var = o.where(lane, x, value)
        del self.record.rows[covered]  # all of its rows may be used
        return covered

    def plain(self, x: Any) -> Any:
        """All rows of x as they are, to be used as any other tensor."""
        return unmarked(self.record, x, x.shape) if self.has(x) else x

    def expanded(self, x: Var, dim: int) -> Any:
        """What has a number for each place of x along a dim, of which x is an expansion; None where it is none."""
        eqn = self.record.producers.get(x)
        column: Any = eqn.inputs[0] if eqn is not None and eqn.op in (o.expand, o.repeat) else None
        sizes = tuple(n if d == dim else 1 for d, n in enumerate(x.shape))
        return column if column is not None and tuple(column.shape) == sizes else None

    def has(self, x: Any) -> bool:
        return isinstance(x, Var) and x in self.record.rows

    def refusal(self, what: str) -> CaptureError:
        return refuse_rows(self.rows.source, f"{what} takes them")

    def share(self, n: int, dtype: torch.dtype) -> Var:
        """How many of n elements count, of n that are all rows times something."""
        mask = self.rows.mask
        count = o.sum(o.cast(_flat(mask), dtype=torch.int64), dims=(0,))
        share: Var = o.cast(o.mul(count, n // mask.type.numel), dtype=dtype)
        return share


def refuse_rows(source: str, why: str) -> CaptureError:
    """It cannot be written with all rows: `capture` tries again without."""
    error = refuse(f"rows that a mask chose: {why}", "torch.where(mask, x, 0) instead of x[mask]", source)
    error.chosen_at = source
    return error


def warn_of_experts(source: str) -> None:
    """Once for a line: a loop over experts that picks the tokens of each computes all tokens for each."""
    if source in _WARNED:
        return
    _WARNED.add(source)
    warnings.warn(
        "the rows that are picked here, after a topk, are all rows of which some count: a loop over experts computes "
        f"every one for each of them\n  at        {source}\n"
        "  try       mycel.experts(x, ids, weights, up, down, gate=…), which computes those that are chosen",
        stacklevel=2,
    )


def counts_rows(func: Any) -> bool:
    """Does torch's own code divide by sizes there, unseen?"""
    return func in (torch.ops.aten.cov.default, torch.ops.aten.corrcoef.default)


# -- choosing


def choose(record: Record, x: Var, mask: Var, front: int, source: str) -> Var:
    """x[..., mask], the mask over dims from `front` on, as all rows."""
    if mask in record.rows:  # of rows chosen before: those of both masks
        x, mask = _chosen_again(record, x, mask, front)
    record.refuse_rows([x], "another mask chooses of them")
    behind = x.shape[front + mask.ndim :]
    n = mask.type.numel
    rows = o.reshape(x, shape=(*x.shape[:front], n, *behind))
    mask = known_mask(record, mask)
    keep = _flat(mask)
    lane = o.reshape(keep, shape=(n, *(1 for _ in behind)))
    first = o.reshape(o.argmax(o.cast(keep, dtype=torch.int64), dim=0), shape=(1,))
    one = o.stop_gradient(o.index_select(rows, first, dim=front))
    nothing = o.full(0.5 if is_float(x.dtype) else 0, shape=(), dtype=x.dtype)  # where none is chosen
    one = o.where(o.any(keep, dims=(0,)), one, nothing)
    out: Var = o.where(lane, rows, one)
    record.rows[keep] = ChosenRows(keep, 0, mask, (), source)
    record.rows[out] = ChosenRows(keep, front, mask, (), source)
    return out


def _chosen_again(record: Record, x: Var, mask: Var, front: int) -> tuple[Var, Var]:
    """Rows and a mask over them -> all rows, and a mask that holds where both do."""
    rows = record.rows[mask]
    mine = record.rows.get(x)
    if mine is None or not mine.goes_with(rows) or mine.dim != front or mask.ndim != 1:
        raise refuse_rows(rows.source, "a mask of them chooses of others")
    keep = unmarked(record, rows.keep, rows.keep.shape)
    return unmarked(record, x, x.shape), o.logical_and(keep, unmarked(record, mask, mask.shape))


def places(record: Record, x: Var, source: str) -> Var:
    """nonzero(x)"""
    mask = x if x.dtype == torch.bool else o.ne(x, 0)
    at: Var = o.iota(shape=(x.type.numel,), dim=0, dtype=torch.int64)
    columns = []
    for n in reversed(x.shape):
        columns.append(o.remainder(at, n))
        at = o.floor_divide(at, n)
    return choose(record, o.reshape(o.stack(*reversed(columns), dim=1), shape=(*x.shape, x.ndim)), mask, 0, source)


def all_of_chosen(record: Record, x: Var) -> tuple[Var, Var] | None:
    """Chosen rows -> all rows of which they were chosen, and which count; None where more was done with them than
    changes of shape."""
    rows = record.rows[x]
    if rows.dim or rows.spread:
        return None
    steps: list[tuple[Eqn, int]] = []
    v = x
    while (eqn := record.producers.get(v)) is not None and eqn.op in (o.reshape, o.unbind, o.select, o.cast):
        steps.append((eqn, eqn.outputs.index(v)))
        v = next(eqn.vars)
    if eqn is None or eqn.op is not o.where or v.shape[0] != rows.keep.shape[0]:
        return None
    every: Any = eqn.inputs[1]
    for step, i in reversed(steps):
        outs = step.op(every, **step.params)
        every = outs[i] if isinstance(outs, tuple) else outs
    return every, unmarked(record, rows.keep, rows.keep.shape)


def together(record: Record, op: Op, inputs: Sequence[Any]) -> Sequence[Any]:
    """Operands of which some are rows, all of them rows of one mask: of m and any(m, -1), torch has as many where m
    holds at most once for each of the others."""
    masks = {record.rows[x].mask: x for x in inputs if isinstance(x, Var) and x in record.rows}
    if len(masks) < 2 or op in CONTROL:
        return inputs
    fewest = record.rows[min(masks.values(), key=lambda x: record.rows[x].mask.ndim)]
    is_other = lambda x: isinstance(x, Var) and x in record.rows and record.rows[x].mask != fewest.mask
    return [_one_of_each(record, op, x, fewest.mask) if is_other(x) else x for x in inputs]


def _one_of_each(record: Record, op: Op, x: Var, mask: Var) -> Var:
    """Rows of a mask -> rows of another, which tells where that holds for one of its last dim."""
    rows = record.rows[x]
    n, k = mask.type.numel, rows.mask.shape[-1]
    whether = record.producers.get(_unshaped(record, mask))
    asked = whether.inputs[0] if whether is not None and whether.op is o.any and rows.mask.ndim > 1 else None
    is_any = asked is not None and whether is not None and whether.params["dims"] == (rows.mask.ndim - 1,)
    if not is_any or not _is_same(record, asked, rows.mask) or rows.spread or x.dtype == torch.bool:
        raise refuse_rows(rows.source, f"{op.name} takes them, and rows that another mask chose")
    chosen = all_of_chosen(record, x)
    every = unmarked(record, x, x.shape) if chosen is None else chosen[0]
    front, behind = x.shape[: rows.dim], x.shape[rows.dim + 1 :]
    holds = o.reshape(rows.mask, shape=(n, k, *(1 for _ in behind)))
    parts = o.where(holds, o.reshape(every, shape=(*front, n, k, *behind)), 0)
    return choose(record, o.sum(parts, dims=(rows.dim + 1,)), _flat(mask), rows.dim, rows.source)


def put(record: Record, x: Var, mask: Var, front: int, value: Var, accumulate: bool) -> Var:
    """x[..., mask] = value, the rows of that mask."""
    rows = record.rows[value]
    behind = x.shape[front + mask.ndim :]
    if rows.mask != known_mask(record, mask) or rows.spread or rows.dim != value.ndim - len(behind) - 1:
        raise refuse_rows(rows.source, "they are written where another mask holds")
    mask = o.cast(mask, dtype=torch.bool) if mask.dtype == torch.uint8 else mask
    value = unmarked(record, value, (*value.shape[: rows.dim], *mask.shape, *value.shape[rows.dim + 1 :]))
    lane = o.reshape(mask, shape=(*mask.shape, *(1 for _ in behind)))
    value = o.cast(value, dtype=x.dtype) if value.dtype != x.dtype else value
    out: Var = o.where(lane, o.add(x, value) if accumulate else value, x)
    return out


def unmarked(record: Record, value: Var, shape: Sequence[int]) -> Var:
    """All rows as they are, in another shape."""
    types = o.reshape.infer([value.type], {"shape": tuple(shape)})
    return record.write(o.reshape, (value,), {"shape": tuple(shape)}, types)


def known_mask(record: Record, mask: Var) -> Var:
    """The mask, or one with the same value, perhaps in another shape, that rows were chosen by before."""
    mask = o.cast(mask, dtype=torch.bool) if mask.dtype == torch.uint8 else mask
    unshaped = _unshaped(record, mask)
    for rows in record.rows.values():
        if _is_same(record, _unshaped(record, rows.mask), unshaped) and rows.mask.type.numel == mask.type.numel:
            return rows.mask
    return mask


def _unshaped(record: Record, x: Var) -> Var:
    """What x is but for its shape."""
    while (eqn := record.producers.get(x)) is not None and eqn.op is o.reshape and isinstance(eqn.inputs[0], Var):
        x = eqn.inputs[0]
    return x


def _is_same(record: Record, a: Any, b: Any, depth: int = 8) -> bool:
    """Do both have the same value, for they are computed alike?"""
    if a == b:
        return True
    if not (isinstance(a, Var) and isinstance(b, Var)) or not depth or a.type != b.type:
        return False
    x, y = record.producers.get(a), record.producers.get(b)
    if x is None or y is None or x.op is not y.op or x.params != y.params or x.op.effect or x.op in CONTROL:
        return False
    same_place = x.outputs.index(a) == y.outputs.index(b) and len(x.inputs) == len(y.inputs)
    return same_place and all(_is_same(record, v, w, depth - 1) for v, w in zip(x.inputs, y.inputs, strict=True))


def _flat(mask: Var) -> Var:
    flat: Var = o.reshape(mask, shape=(mask.type.numel,))
    return flat


# -- what operators make of them


def write_rows(record: Record, op: Op, inputs: tuple[Any, ...], params: dict[str, Any], types: Sequence[Type]) -> Any:
    """An equation on rows: as it is where it treats each by itself, else on what is left of those that do not count."""
    given = {i: record.rows[x] for i, x in enumerate(inputs) if isinstance(x, Var) and x in record.rows}
    rows = next(iter(given.values()))
    if op is o.cond and 0 not in given:  # its branches know them by the same names, and give none (`nested.py`)
        return record.write(op, inputs, params, types)
    if op.dims is None or op in CONTROL or not all(r.goes_with(rows) for r in given.values()):
        raise refuse_rows(rows.source, f"{op.name} takes them")
    fit = op.fit([x.type if isinstance(x, Var) else x for x in inputs], params)
    letters = {(fit.ins[i] or ())[r.dim] for i, r in given.items()}
    (dim,) = letters if len(letters) == 1 else ((),)
    if len(dim) != 1:
        raise refuse_rows(rows.source, f"{op.name} takes them apart")
    (letter,) = dim
    for i, item in enumerate(fit.ins):
        if i not in given and any(letter in d for d in item or ()) and not _is_uniform(record, inputs[i]):
            raise refuse_rows(rows.source, f"{op.name} takes as many others")
    flag = fit.flags.get(letter, "")
    at = RowsAt(record, rows)
    if flag and op.of_rows is not None:
        outs = op.of_rows(at, *inputs, **params)
    elif not flag:
        outs = record.write(op, inputs, params, types)
    elif flag == "+" and (op.linear == "all" or any((i,) in op.linear for i in given)):
        outs = record.write(op, _covered(at, inputs, given, lambda t: False if t == torch.bool else 0), params, types)
    elif flag in "<>":
        outs = record.write(op, _covered(at, inputs, given, lambda t: _last(t, flag)), params, types)
    else:
        raise refuse_rows(rows.source, f"{op.name} mixes them")
    for out, item in zip(outs if isinstance(outs, tuple) else (outs,), fit.outs, strict=True):
        record.rows.pop(out, None)
        for d, dim_letters in enumerate(item):
            if letter in dim_letters:
                record.rows[out] = _joined(record, rows, d, dim_letters, letter, fit.sizes)
    return outs


def _covered(at: RowsAt, inputs: Sequence[Any], given: Any, value: Any) -> tuple[Any, ...]:
    return tuple(at.covered(x, value(x.dtype)) if i in given else x for i, x in enumerate(inputs))


def _last(dtype: torch.dtype, flag: str) -> Any:
    """What is never the largest, or the smallest."""
    if dtype == torch.bool:
        return flag == "<"
    if is_float(dtype):
        return -math.inf if flag == ">" else math.inf
    info = torch.iinfo(dtype)
    return info.min if flag == ">" else info.max


def _joined(
    record: Record, rows: ChosenRows, d: int, dim_letters: Any, letter: str, sizes: dict[str, int]
) -> ChosenRows:
    """Rows whose dim became dim `d`, perhaps joined with others to a longer one."""
    at = dim_letters.index(letter)
    before, behind = (math.prod(sizes[c] for c in part) for part in (dim_letters[:at], dim_letters[at + 1 :]))
    if before == behind == 1:
        return ChosenRows(rows.keep, d, rows.mask, rows.spread, rows.source)
    n = rows.keep.shape[0]
    keep = unmarked(record, rows.keep, (1, n, 1))
    keep = o.reshape(o.expand(keep, shape=(before, n, behind)), shape=(before * n * behind,))
    spread = (*rows.spread, (before, behind))
    record.rows[keep] = ChosenRows(keep, 0, rows.mask, spread, rows.source)
    return ChosenRows(keep, d, rows.mask, spread, rows.source)


def _is_uniform(record: Record, x: Any) -> bool:
    """The same number everywhere, however many there are."""
    eqn = record.producers.get(x) if isinstance(x, Var) else None
    return not isinstance(x, Var) or (eqn is not None and eqn.op is o.full)


class RowsShape:
    """What code is told of the shape of chosen rows: every size, but their number is a number of the program, which
    `count` makes of the number of all."""

    def __init__(self, shape: Sequence[int], rows: ChosenRows, count: Callable[[int], Any]) -> None:
        self.shape, self.rows, self.count = tuple(shape), rows, count

    def __getitem__(self, at: Any) -> Any:
        asked = range(len(self.shape))[at]
        if isinstance(asked, range) and self.rows.dim in asked:
            raise self._unknown()
        return self.count(self.shape[at]) if asked == self.rows.dim else self.shape[at]

    def __iter__(self) -> Any:
        raise self._unknown()

    def __len__(self) -> int:
        return len(self.shape)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowsShape) and self.rows.goes_with(other.rows):
            return self.shape == other.shape
        raise self._unknown()

    def __hash__(self) -> int:
        raise self._unknown()

    def numel(self) -> Any:
        return self.count(math.prod(self.shape))

    def _unknown(self) -> CaptureError:
        return refuse_rows(self.rows.source, "their number was asked for")
