"""Attention that is written out becomes one operator, so that its scores are never whole.

    s: f32[2,4,64,64] = matmul(q, kt)                 k: f32[2,4,64,8] = permute(kt, dims=(0, 1, 3, 2))
    t: f32[2,4,64,64] = mul(s, 0.5)               =>  y, lse           = attention(q, k, v, seen, scale=0.5)
    m: f32[2,4,64,64] = where(seen, t, -inf)
    p: f32[2,4,64,64] = softmax(m, dim=3)
    y: f32[2,4,64,8]  = matmul(p, v)

Between the two products, which may be einsums, scores may be scaled, capped (c tanh(s / c)), then added to and masked,
and cast, weights may be dropped, and nobody else sees them.  Then the pass `causal` asks whether the mask is a function
of positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mycel.ir import Block, Builder, Chain, Eqn, Program, Var, chains, is_float, rewrite
from mycel.ops import o
from mycel.ops.sdpa import counted

LEAST = 1 << 14  # scores below which nothing is gained
LOW = -1e30  # what is as good as minus infinity, added or put in


@dataclass
class _Scores:
    """What is done to scores, found from the softmax backwards: their scale and cap, and before that in program order,
    what they are added to and where they are hidden; and how their weights are dropped."""

    product: _Product | None = None
    weighted: _Product | None = None
    scale: float = 1.0
    cap: float | None = None
    dropped: Eqn | None = None
    added: list[Var] = field(default_factory=list)
    hidden: list[tuple[Var, bool, float]] = field(default_factory=list)  # a condition, where it holds or not, by what


def attend(program: Program) -> Program:
    """matmul(softmax(scale · matmul(q, kᵀ) + mask), v) => attention(q, k, v, mask, scale=scale)"""
    return rewrite(program, _attend)


def _attend(block: Block) -> Block:
    products = {id(e) for e in block.eqns if e.op in (o.matmul, o.einsum) and e.outputs[0].ndim in (3, 4)}
    if len(products) < 2:
        return block
    uses = chains(block)
    producers = {v: eqn for eqn in block.eqns for v in eqn.outputs}
    b = Builder(names_of=block)
    for eqn in block.eqns:
        scores = _scores(eqn, producers, uses) if id(eqn) in products else None
        if scores is None:
            b.eqns.append(eqn)
        else:
            b.at(eqn)
            _write(b, eqn, scores)
    return Block(block.inputs, tuple(b.eqns), block.outputs)


def _alone(x: Any, uses: dict[Var, Chain]) -> bool:
    """Has a value one reader?"""
    return isinstance(x, Var) and len(uses[x].uses) == 1 and not uses[x].is_output


@dataclass(frozen=True)
class _Product:
    """Rows times columns, over equal leading dims: operands as they are to be permuted for it, and the result."""

    left: Var
    right: Var
    left_dims: tuple[int, ...]
    right_dims: tuple[int, ...]
    out_dims: tuple[int, ...]


def _product(eqn: Eqn, weights: Var | None = None) -> _Product | None:
    """A product as (…, i, d) times (…, j, d), or with `weights` as these, (…, i, j), times (…, j, d)."""
    if len(eqn.inputs) != 2 or not all(isinstance(x, Var) for x in eqn.inputs):
        return None
    x, y = eqn.inputs
    assert isinstance(x, Var) and isinstance(y, Var)
    n = eqn.outputs[0].ndim
    if not x.ndim == y.ndim == n:
        return None
    if eqn.op is o.matmul:
        plain = tuple(range(n))
        turned = plain if weights is not None else (*plain[:-2], n - 1, n - 2)
        return _Product(x, y, plain, turned, plain) if weights in (None, x) else None
    terms, _, out = eqn.params["equation"].partition("->")
    one, _, two = terms.partition(",")
    if any(len(set(t)) != n or not t.isalpha() for t in (one, two, out)):
        return None
    return _weighted(weights, x, y, one, two, out) if weights is not None else _scored(x, y, one, two, out)


def _scored(x: Var, y: Var, one: str, two: str, out: str) -> _Product | None:
    """An einsum whose result is (…, i, j), of operands that have i or j, and one more letter to sum over."""
    lead, i, j = out[:-2], out[-2], out[-1]
    if i in two:
        x, y, one, two = y, x, two, one
    inner = set(one) - set(out)
    if len(inner) != 1 or set(one) != {*lead, i, *inner} or set(two) != {*lead, j, *inner}:
        return None
    (d,) = inner
    dims = [tuple(term.index(k) for k in (*lead, mine, d)) for term, mine in ((one, i), (two, j))]
    return _Product(x, y, dims[0], dims[1], tuple(range(len(out))))


def _weighted(weights: Var, x: Var, y: Var, one: str, two: str, out: str) -> _Product | None:
    """An einsum of weights (…, i, j) and values that have j, and one more letter."""
    if y == weights:
        x, y, one, two = y, x, two, one
    lead, i, j = one[:-2], one[-2], one[-1]
    inner = set(two) - set(one)
    if x != weights or len(inner) != 1 or set(two) != {*lead, j, *inner} or set(out) != {*lead, i, *inner}:
        return None
    (d,) = inner
    letters = (*lead, i, d)
    values = tuple(two.index(k) for k in (*lead, j, d))
    return _Product(x, y, tuple(range(len(one))), values, tuple(letters.index(k) for k in out))


def _weights(eqn: Eqn, producers: dict[Var, Eqn], uses: dict[Var, Chain]) -> tuple[Var, Eqn, Eqn | None] | None:
    """The operand of a product that is a softmax over the last dim, which nobody else sees; that; and what drops some
    of it on the way."""
    for weights in eqn.inputs:
        x: Any = weights
        dropped: Eqn | None = None
        while _alone(x, uses) and x in producers:
            before = producers[x]
            if before.op is o.dropout and dropped is None and before.inputs[2] == 0 and "strides" not in before.params:
                dropped = before
            elif before.op is not o.cast:
                break
            x = before.inputs[0]
        last = producers.get(x) if _alone(x, uses) else None
        if last is not None and last.op is o.softmax and last.params["dim"] == x.ndim - 1:
            assert isinstance(weights, Var)
            return weights, last, dropped
    return None


def _scores(eqn: Eqn, producers: dict[Var, Eqn], uses: dict[Var, Chain]) -> _Scores | None:
    """What leads to the weights of a product, if it is attention."""
    dropping = _weights(eqn, producers, uses)
    if dropping is None or dropping[0].type.numel < LEAST:
        return None
    weights, last, dropped = dropping
    scores, weighted = _Scores(dropped=dropped), _product(eqn, weights)
    if weighted is None or not _follow(last.inputs[0], scores, producers, uses) or scores.product is None:
        return None
    scores.weighted = weighted
    dtypes = {scores.product.left.dtype, scores.product.right.dtype, weighted.right.dtype, eqn.outputs[0].dtype}
    lead = {
        tuple(x.shape[d] for d in dims[:-2])
        for x, dims in (
            (scores.product.left, scores.product.left_dims),
            (scores.product.right, scores.product.right_dims),
            (weighted.right, weighted.right_dims),
        )
    }
    return scores if len(dtypes) == len(lead) == 1 and is_float(*dtypes) else None


def _follow(x: Any, scores: _Scores, producers: dict[Var, Eqn], uses: dict[Var, Chain]) -> bool:
    """Goes back from a value to the product of scores, and notes what is on the way."""
    while _alone(x, uses) and x in producers:
        eqn = producers[x]
        if eqn.op in (o.matmul, o.einsum):
            scores.product = _product(eqn)
            return scores.product is not None
        if eqn.op is o.cast and _widens(eqn):
            x = eqn.inputs[0]
        elif eqn.op in (o.mul, o.div) and (number := _number(eqn.inputs[1])) is not None:
            scores.scale *= number if eqn.op is o.mul else 1 / number
            x = eqn.inputs[0]
        elif eqn.op is o.tanh and scores.cap is None and scores.scale > 0:
            scores.cap, scores.scale = scores.scale, 1.0
            x = eqn.inputs[0]
        elif scores.scale != 1.0 or scores.cap is not None:  # only what comes behind scaling can be said
            return False
        elif eqn.op is o.where:
            at = _hides(eqn, x)
            if at is None:
                return False
            condition, low = eqn.inputs[0], _number(eqn.inputs[3 - at])
            assert isinstance(condition, Var) and low is not None
            scores.hidden.append((condition, at == 2, low))
            x = eqn.inputs[at]
        elif eqn.op is o.add:
            at = next((i for i in (0, 1) if _leads(eqn.inputs[i], x, producers, uses)), None)
            if at is None or not _broadcasts(eqn.inputs[1 - at], x):
                return False
            scores.added.append(eqn.inputs[1 - at])  # type: ignore[arg-type]
            x = eqn.inputs[at]
        else:
            return False
    return False


def _widens(cast: Eqn) -> bool:
    (x,), (y,) = cast.inputs, cast.outputs
    return isinstance(x, Var) and is_float(x.dtype) and is_float(y.dtype) and y.dtype.itemsize >= x.dtype.itemsize


def _number(x: Any) -> float | None:
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) and x != 0 else None


def _hides(eqn: Eqn, x: Var) -> int | None:
    """The operand of a `where` that is scores, if the other one is a number that hides them."""
    for at in (1, 2):
        low = _number(eqn.inputs[3 - at])
        scores = eqn.inputs[at]
        if low is not None and low <= LOW and isinstance(scores, Var) and scores.type == x.type:
            return at if _broadcasts(eqn.inputs[0], x) else None
    return None


def _leads(y: Any, x: Var, producers: dict[Var, Eqn], uses: dict[Var, Chain]) -> bool:
    """Does a value of the shape of the scores come from a product?"""
    return isinstance(y, Var) and y.shape == x.shape and _follow(y, _Scores(), producers, uses)


def _broadcasts(mask: Any, scores: Var) -> bool:
    """Is it a mask of these scores?"""
    pairs = zip(reversed(mask.shape), reversed(scores.shape), strict=False) if isinstance(mask, Var) else ()
    return isinstance(mask, Var) and 0 < mask.ndim <= scores.ndim and all(n in (1, m) for n, m in pairs)


def _write(b: Builder, eqn: Eqn, scores: _Scores) -> None:
    product, weighted = scores.product, scores.weighted
    assert product is not None and weighted is not None
    with b:
        q, k = _turned(product.left, product.left_dims), _turned(product.right, product.right_dims)
        v, mask = _turned(weighted.right, weighted.right_dims), _mask(scores, q)
        rows = q.shape[:-1]
        if q.ndim == 3:  # one head
            q, k, v = (o.reshape(x, shape=(x.shape[0], 1, *x.shape[1:])) for x in (q, k, v))
            if mask is not None and mask.ndim == 3:
                mask = o.reshape(mask, shape=(mask.shape[0], 1, *mask.shape[1:]))
        scale = scores.scale * (scores.cap or 1.0)
        draws, share = _draws(scores.dropped, q, k)
        y, _ = o.attention(q, k, v, mask, *draws, scale=scale, cap=scores.cap, dropout=share)
        y = y if len(rows) == 3 else o.reshape(y, shape=(*rows, v.shape[-1]))
        y = _turned(y, weighted.out_dims)
    at = next(i for i in reversed(range(len(b.eqns))) if y in b.eqns[i].outputs)
    outs = tuple(eqn.outputs[0] if w == y else w for w in b.eqns[at].outputs)
    b.eqns[at] = replace(b.eqns[at], outputs=outs)


def _draws(dropped: Eqn | None, q: Any, k: Any) -> tuple[tuple[Any, ...], float]:
    """The counts at which rows draw what the dropout of all weights did, and the share that it drops."""
    if dropped is None:
        return (), 0.0
    counts = counted(q, k, dropped.inputs[1], dropped.params.get("site", 0))
    return (counts,), float(dropped.params["p"])


def _turned(x: Any, dims: tuple[int, ...]) -> Any:
    return x if dims == tuple(range(len(dims))) else o.permute(x, dims=dims)


def _mask(scores: _Scores, q: Var) -> Any:
    """One mask of all that is added and hidden, the first in program order being the last found."""
    mask: Any = None
    for x in reversed(scores.added):
        x = x if x.dtype == q.dtype else o.cast(x, dtype=q.dtype)
        mask = x if mask is None else o.add(mask, x)
    infinite = all(low == -float("inf") for _, _, low in scores.hidden)
    for condition, where_true, low in reversed(scores.hidden):
        if mask is None and infinite:
            mask = o.logical_not(condition) if where_true else condition
        elif mask is not None and mask.dtype == condition.dtype:
            mask = o.logical_and(mask, o.logical_not(condition) if where_true else condition)
        else:
            seen = o.full(0.0, shape=(), dtype=q.dtype) if mask is None else mask
            mask = o.where(condition, low, seen) if where_true else o.where(condition, seen, low)
    return mask
