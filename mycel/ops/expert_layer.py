"""A layer of experts as one operator: what ranks share of a mixture of experts.

    y[t] = Σ_j weights[t,j] · down[i] @ gate(up[i] @ x[t] + up_bias[i]) + down_bias[i]          i = ids[t,j]

Its letters say how it is divided, whatever the routing:

    n     tokens: each rank its own, with all experts
    e     experts: each rank goes through all tokens and computes what its experts are chosen for; results are partial
          sums.  Where tokens are split over the same axis they are gathered and the sums scattered: for k choices of a
          token and r ranks that sends r/k of what an exchange of rows would
    n e   tokens and experts over the same ranks: rows travel to the ranks of their experts and back
          (`expert_exchange.py`)
    f     the inner width, where up's columns lie in its order (not in halves); results are partial sums

Where there are no ranks its meaning in smaller operators (`experts.py`) takes its place, before it is differentiated.
Here backward computes the hidden rows again: only tokens, routing and weights are kept.
"""

from __future__ import annotations

import functools

import torch

from mycel.ir import OPS, SplitRule, Type, op
from mycel.ops.expert_exchange import exchanged, exchanged_grad
from mycel.ops.experts import dispatch, grouped_matmul, grouped_rows, grouped_sum, grouped_weight, route
from mycel.ops.gated_rows import FORM, GATE, cast_to, gated_matmul, weighted
from mycel.ops.gates import FORMS, Evaluation, from_parts, parts
from mycel.ops.rules import o

# -- its meaning in smaller operators ---------------------------------------------------------------------------


def at_hand(ids, weights, experts, elsewhere):
    """The choices among experts that are here, others with a weight of zero; and which are here (None: all)."""
    if not elsewhere:
        return ids, weights, None
    hit = o.logical_and(o.ge(ids, 0), o.lt(ids, experts))
    return o.clamp(ids, 0, experts - 1), o.where(hit, weights, 0.0), hit


class Rows:
    """Rows sorted by expert, `counts` of each, up to what the gate gives; of tensors, or of Vars as equations."""

    def __init__(self, x, counts, up, up_bias, *, gate, form, transposed=False):
        self.x, self.counts, self.transposed, self.form = x, counts, transposed, form
        self.hidden, self.expression = self.product(x, up, up_bias), gate

    @functools.cached_property
    def gate(self):
        """What the gate makes of hidden rows, and how."""
        return Evaluation(self.expression, parts(self.hidden, self.form))

    def product(self, rows, w, bias):
        y = grouped_matmul(rows, w, self.counts, transposed=self.transposed)
        return y if bias is None else o.add(y, self.each(bias))

    def each(self, bias):
        """An expert's row of a bias for each of its rows."""
        return grouped_rows(bias, self.counts, rows=self.x.shape[0])

    def back(self, g, w):
        """The cotangent of a product's rows."""
        return grouped_matmul(g, w, self.counts, transposed=not self.transposed)

    def pulled(self, g):
        """The cotangent of hidden rows, from that of what the gate gives."""
        return from_parts(self.gate.pulled(g), self.form)

    def weight(self, g, rows):
        """The cotangent of a product's weights."""
        return grouped_weight(*((rows, g) if self.transposed else (g, rows)), self.counts)


def sorted_rows(x, ids, weights, up, up_bias, **params):
    """The rows of x for the experts they chose, the weight of each row, and the order they are in."""
    order, counts = route(ids, experts=up.shape[0])
    scale = dispatch(o.reshape(weights, shape=(ids.shape[0] * ids.shape[1], 1)), order, chosen=1)
    return Rows(dispatch(x, order, chosen=ids.shape[1]), counts, up, up_bias, **params), scale, order


def layer_expand(x, ids, weights, up, down, up_bias, down_bias, *, elsewhere=0, **params):
    """A router's weight goes on what the gate gives, not on an expert's result: that is as a rule wider, and backward
    would need it for the weight's gradient."""
    ids, weights, _ = at_hand(ids, weights, up.shape[0], elsewhere)
    rows, scale, order = sorted_rows(x, ids, weights, up, up_bias, **params)
    if (rows.expression, rows.form) == (GATE, FORM):
        y = gated_matmul(rows.hidden, down, scale, rows.counts, transposed=rows.transposed)
    else:
        y = rows.product(weighted(rows.gate.value, scale), down, None)
    y = y if down_bias is None else o.add(y, weighted(rows.each(down_bias), scale))
    return o.collect(y, order, chosen=ids.shape[1])


def grad_expand(g, x, ids, weights, up, down, up_bias, down_bias, *, elsewhere=0, **params):
    ids, weights, hit = at_hand(ids, weights, up.shape[0], elsewhere)
    rows, scale, order = sorted_rows(x, ids, weights, up, up_bias, **params)
    dy = dispatch(g, order, chosen=ids.shape[1])
    da = rows.back(dy, down)
    common = o.sum(cast_to(o.mul(da, rows.gate.value), weights.dtype), dims=(1,), keepdim=True)
    if down_bias is not None:
        more = cast_to(o.mul(dy, rows.each(down_bias)), weights.dtype)
        common = o.add(common, o.sum(more, dims=(1,), keepdim=True))
    dweights = o.reshape(o.collect(common, order, chosen=1), shape=tuple(weights.shape))
    dh = rows.pulled(weighted(da, scale))
    grads = [o.collect(rows.back(dh, up), order, chosen=ids.shape[1])]
    grads += [dweights if hit is None else o.where(hit, dweights, 0.0)]
    grads += [rows.weight(dh, rows.x), rows.weight(dy, weighted(rows.gate.value, scale))]
    grads += [] if up_bias is None else [grouped_sum(dh, rows.counts)]
    return *grads, *([] if down_bias is None else [grouped_sum(weighted(dy, scale), rows.counts)])


# -- its kernels: the rows whose experts are here, and no others -----------------------------------------------------


def rows_here(ids, experts, elsewhere):
    """The choices among experts that are here, sorted by expert, and how many each has."""
    flat = ids.reshape(-1)
    if not elsewhere:
        return flat.argsort(stable=True), torch.bincount(flat, minlength=experts)
    here = ((flat >= 0) & (flat < experts)).nonzero().squeeze(1)
    mine = flat[here]
    return here[mine.argsort(stable=True)], torch.bincount(mine, minlength=experts)


def layer_kernel(x, ids, weights, up, down, up_bias, down_bias, elsewhere, **how):
    order, counts = rows_here(ids, up.shape[0], elsewhere)
    token = order // ids.shape[1]
    rows = Rows(x.index_select(0, token), counts, up, up_bias, **how)
    y = rows.product(rows.gate.value, down, down_bias) * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(x, dtype=y.dtype).index_add(0, token, y).to(x.dtype)


def grad_kernel(g, x, ids, weights, up, down, up_bias, down_bias, elsewhere, **how):
    """A weight's cotangent is what its row's result and the token's cotangent have in common: what the gate gave and
    the cotangent taken back through `down` have it too."""
    order, counts = rows_here(ids, up.shape[0], elsewhere)
    token, scale = order // ids.shape[1], weights.reshape(-1)[order].unsqueeze(1)
    rows = Rows(x.index_select(0, token), counts, up, up_bias, **how)
    g = g.index_select(0, token)
    da = rows.back(g, down)
    common = (da * rows.gate.value).sum(1, dtype=weights.dtype)
    if down_bias is not None:
        common = common + (g * rows.each(down_bias)).sum(1, dtype=weights.dtype)
    dy, dh = (g * scale).to(x.dtype), rows.pulled((da * scale).to(x.dtype))
    grads = [
        torch.zeros_like(x).index_add_(0, token, rows.back(dh, up)),
        weights.new_zeros(weights.numel()).index_copy_(0, order, common).view_as(weights),
        rows.weight(dh, rows.x),
        rows.weight(dy, rows.gate.value),
    ]
    grads += [] if up_bias is None else [grouped_sum(dh, counts)]
    return *grads, *([] if down_bias is None else [grouped_sum(dy, counts)])


def layer_dims(x, ids, weights, up, down, up_bias, down_bias, *, form, transposed=False, elsewhere=0, **_):
    """Letters of the operands; the hidden width u is f, (c f) or (f c) for c parts of f each.  How many experts are
    elsewhere is no dim, but a size that costs ask for."""
    u = {"whole": "f^", "halves": "(c^ f^)", "pairs": "(f^ c^)"}[form]
    weight = [f"e^ d^ {u}", "e^ f^ d^"] if transposed else [f"e^ {u} d^", "e^ d^ f^"]
    biases = ["" if up_bias is None else f"e^ {u}", "" if down_bias is None else "e^ d^"]
    return weight, biases, {"elsewhere": elsewhere, **({} if form == "whole" else {"c": FORMS[form]})}


def experts_dims(*operands, **params):
    weight, biases, sizes = layer_dims(*operands, **params)
    return ", ".join(["n d^", "n k^", "n k^", *weight, *biases]) + " -> n d", sizes


def experts_grad_dims(g, *operands, **params):
    weight, biases, sizes = layer_dims(*operands, **params)
    outs = ["n d", "n k", *weight, *filter(None, biases)]
    ins = ["n+ d^", "n+ d^", "n+ k^", "n+ k^", *weight, *biases]
    return ", ".join(ins) + " -> " + ", ".join(outs), sizes


def experts_flops(d):
    """Tokens choose all experts alike."""
    return 2 * d.n * d.k * d.d * d.f * (getattr(d, "c", 1) + 1) * d.e / (d.e + d.elsewhere)


def split_layer(name, exchanged):
    """How a rank computes its share of the layer, whichever letters are split; `exchanged`: where tokens and experts
    are split over the same axes."""

    def write(at, *operands, elsewhere=0, **params):
        *before, ids, weights, up, down, up_bias, down_bias = operands
        if at.axes("f") and down_bias is not None:  # added once
            down_bias = o.only_first(down_bias, axes=at.axes("f"), count=at.count("f"))
        if set(at.axes("e")) & set(at.axes("n")):  # split together
            ids, weights, hit = at_hand(ids, weights, at.sizes["e"], elsewhere)
            return exchanged(at, *before, ids, weights, up, down, up_bias, down_bias, hit=hit, **params)
        if at.axes("e"):
            ids, elsewhere = o.sub(ids, at.start("e")), elsewhere + at.sizes["e"] - at.local("e")
            real = at.valid("e")  # behind them lies padding, whose experts are another rank's
            ids = ids if isinstance(real, int) else o.where(o.lt(ids, real), ids, -1)
        return OPS[name](*before, ids, weights, up, down, up_bias, down_bias, elsewhere=elsewhere, **params)

    return write


def experts_vjp(g, y, x, ids, weights, up, down, up_bias, down_bias, **params):
    dx, dweights, dup, ddown, *biases = experts_grad(g, x, ids, weights, up, down, up_bias, down_bias, **params)
    dup_bias = None if up_bias is None else biases.pop(0)
    return dx, None, dweights, dup, ddown, dup_bias, None if down_bias is None else biases.pop(0)


split_experts = split_layer("experts", exchanged)
split_grad = split_layer("experts_grad", exchanged_grad)
HALVES = 'gate="mul(silu(a), b)", form="halves"'
EXAMPLES = [
    f"f[4,3], i64[4,2]<3, f[4,2], f[3,8,3], f[3,3,4], None, None, {HALVES}",
    "f[6,4], i64[6,2]<2, f[6,2], f[4,4,8], f[4,4,4], f[4,8], f[4,4], "
    'gate="mul(add(b, 1), mul(a, sigmoid(mul(a, 1.7))))", form="pairs", transposed=True',
    'f[4,3], i64[4,1]<1, f[4,1], f[2,4,3], f[2,3,4], None, None, gate="relu(a)", form="whole"',
    f"f[4,3], i64[4,2]<6, f[4,2], f[3,8,3], f[3,3,4], None, None, {HALVES}, elsewhere=3",
]


@op(
    experts_dims,
    vjp=experts_vjp,
    expand=layer_expand,
    dtype="first",
    flops=experts_flops,
    fresh=True,
    product=True, rate="product", compiles=False, apart=True, waits=True, for_ranks=True, precision="low", kept=(2,),
    parts={
        "e": SplitRule(split_experts, partial="+", uneven=True),
        "f": SplitRule(split_experts, partial="+"),
        "n e": SplitRule(split_experts, uneven=True, outer="n"),
    },
    examples=EXAMPLES,
)  # fmt: skip
def experts(x, ids, weights, up, down, up_bias, down_bias, *, gate, form, transposed=False, elsewhere=0):
    """Each token through the experts it chose, the sum of what they give by their weights; `elsewhere`: how many
    experts are not here; their numbers are out of range, and they count nothing"""
    from mycel.ops.expert_layer import layer_kernel  # generated code has no classes beside it

    how = {"gate": gate, "form": form, "transposed": transposed}
    return layer_kernel(x, ids, weights, up, down, up_bias, down_bias, elsewhere, **how)


@op(
    experts_grad_dims,
    expand=grad_expand,
    types=lambda g, x, ids, weights, up, down, up_bias, down_bias, **_: (
        x, weights, up, down, *(t for t in (up_bias, down_bias) if isinstance(t, Type))
    ),
    flops=lambda d: 3 * experts_flops(d),
    again=1 / 3,
    fresh=True,
    linear=((0,),),
    product=True, rate="product", compiles=False, apart=True, waits=True,
    parts={
        "e": SplitRule(split_grad, partial="+", uneven=True),
        "f": SplitRule(split_grad, partial=("+", "+", "", "", "", "")),
        "n e": SplitRule(split_grad, partial="+", uneven=True, outer="n"),
    },
    followed=0,
    examples=[f"f[{e[2:5]}], {e}" for e in EXAMPLES],
)  # fmt: skip
def experts_grad(g, x, ids, weights, up, down, up_bias, down_bias, *, gate, form, transposed=False, elsewhere=0):
    """The gradients of `experts` for x, weights, up, down and the biases there are; hidden rows are computed again"""
    from mycel.ops.expert_layer import grad_kernel

    how = {"gate": gate, "form": form, "transposed": transposed}
    return grad_kernel(g, x, ids, weights, up, down, up_bias, down_bias, elsewhere, **how)
