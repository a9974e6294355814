"""Products with sums: linear, matmul and einsum, each multilinear, so each is the others' gradient.

y = linear(x, w):     dx = matmul(g, w)     dw = linear_weight(g, x)
y = einsum(x, z):     dx = einsum(g, z) with the subscripts swapped
"""

from __future__ import annotations

import math

import torch

from mycel.ir import is_float, op
from mycel.ops.capture_rules import captures
from mycel.ops.rules import cast_like, conj, letters, normal_dim, o, unbroadcast


def every_letter(d):
    """Two operations for each point of the whole index space."""
    return 2 * math.prod(vars(d).values())


@op(
    "... k+, n k+ -> ... n",
    vjp=lambda g, y, x, w: (o.matmul(g, conj(w)), o.linear_weight(g, conj(x))),
    flops=every_letter,
    fresh=True,
    linear=((0,), (1,)),
    examples=["f[2,3,4], f[6,4]", "f[4], f[6,4]", "f[6,4], f[1,4]", "c128[2,4], c128[3,4]", "i64[2,3], i64[4,3]"],
    product=True,
    rate="product",
    apart=True,
    precision="low",
)
def linear(x, w):
    """x @ w.T"""
    return torch.nn.functional.linear(x, w)


def _linear_weight_dims(g, x):
    rows = " ".join(f"r{i}+" for i in range(g.ndim - 1))
    return f"{rows} n, {rows} k -> n k"


@op(
    _linear_weight_dims,
    vjp=lambda h, y, g, x: (linear(conj(x), h), o.matmul(conj(g), h)),
    flops=every_letter,
    linear=((0,), (1,)),
    examples=["f[2,3,4], f[2,3,6]", "f[4], f[6]", "f[6,4], f[6,3]", "c128[2,4], c128[2,3]"],
    product=True,
    rate="product",
    apart=True,
    fresh=True,
)
def linear_weight(g, x):
    """The gradient of linear's weight: rows of g against rows of x, summed over all rows."""
    return torch.mm(g.t(), x) if g.ndim == 2 else torch.mm(g.reshape(-1, g.shape[-1]).t(), x.reshape(-1, x.shape[-1]))


@op(
    "... k^, n k^, n -> ... n",
    expand=lambda x, w, b: o.add(linear(x, w), b),
    flops=every_letter,
    fresh=True,
    examples=["f[2,3,4], f[6,4], f[6]", "f[4], f[6,4], f[6]"],
    product=True,
    rate="product",
    apart=True,
)
def linear_bias(x, w, b):
    """x @ w.T + b; written by late fusion alone"""
    return torch.nn.functional.linear(x, w, b)


@captures(torch.nn.functional.linear, "aten.linear.default")
def _linear(input, weight, bias=None):
    y = linear(input, weight) if weight.ndim == 2 else matmul(input, weight)
    return y if bias is None else o.add(y, bias)


def swap(x):
    """The last two dims swapped."""
    lead = tuple(range(x.ndim - 2))
    return o.permute(x, dims=(*lead, x.ndim - 1, x.ndim - 2))


def _matmul_vjp(g, y, a, b):
    if a.ndim == 1 and b.ndim == 1:
        return o.mul(g, conj(b)), o.mul(g, conj(a))
    lead = tuple(y.shape[: y.ndim - (a.ndim > 1) - (b.ndim > 1)])
    m, n = a.shape[-2:-1] or (1,), b.shape[-1:] if b.ndim > 1 else (1,)
    a2 = a if a.ndim > 1 else o.reshape(a, shape=(1, *a.shape))
    b2 = b if b.ndim > 1 else o.reshape(b, shape=(*b.shape, 1))
    g2 = g if a.ndim > 1 and b.ndim > 1 else o.reshape(g, shape=(*lead, *m, *n))
    da, db = _matrix_cotangents(g2, a2, b2)
    return tuple(d if d.shape == x.shape else o.reshape(d, shape=tuple(x.shape)) for d, x in ((da, a), (db, b)))


def _matrix_cotangents(g, a, b):
    """Of matmul of operands with two or more dims; a matrix shared by a batch is summed over it at once."""
    if b.ndim == 2:
        return linear(g, conj(b)), linear_weight(conj(a), g)
    db = unbroadcast(matmul(conj(swap(a)), g), b)
    if a.ndim == 2:
        batch = "".join(letters(b.ndim - 2, skip="mkn"))
        return einsum(g, conj(b), equation=f"{batch}mn,{batch}kn->mk"), db
    return unbroadcast(matmul(g, conj(swap(b))), a), db


def _matmul_dims(a, b):
    left = "... m k+" if a.ndim > 1 else "k+"
    right = "... k+ n" if b.ndim > 1 else "k+"
    batch = "..." if max(a.ndim, b.ndim) > 1 else ""
    return f"{left}, {right} -> {batch}{' m' * (a.ndim > 1)}{' n' * (b.ndim > 1)}"


@op(
    _matmul_dims,
    vjp=_matmul_vjp,
    flops=every_letter,
    fresh=True,
    linear=((0,), (1,)),
    examples=[
        "f[2,4], f[4,6]", "f[2,3,4], f[2,4,6]", "f[2,3,4], f[4,6]", "f[3,4], f[2,4,6]", "f[2,1,3,4], f[6,4,2]",
        "f[4], f[4]", "f[4], f[4,6]", "f[4], f[2,3,4,6]", "f[3,4], f[4]", "f[2,3,4], f[4]",
        "c128[2,3], c128[3,4]", "c128[2,2,3], c128[2,3,4]", "i64[2,3], i64[3,4]",
    ],
    product=True, rate="product", apart=True, precision="low",
)  # fmt: skip
def matmul(a, b):
    """torch.matmul: the last dim of a against the second last of b, batch dims broadcast, vectors allowed"""
    return torch.matmul(a, b)


@captures(
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, "aten.matmul.default", "aten.mm.default",
    "aten.bmm.default", "aten.mv.default", "aten.dot.default",
)  # fmt: skip
def _matmul(input, other):
    return matmul(input, other)


@captures(torch.Tensor.__rmatmul__)
def _rmatmul(self, other):
    return matmul(other, self)


@captures("aten.mm.dtype", "aten.bmm.dtype")
def _matmul_wide(a, b, out_dtype):
    return matmul(o.cast(a, dtype=out_dtype), o.cast(b, dtype=out_dtype))


@captures("aten.vdot.default")
def _vdot(a, b):
    return matmul(conj(a), b)


@captures("aten.outer.default", "aten.ger.default")
def _outer(a, b):
    return o.mul(o.reshape(a, shape=(*a.shape, 1)), b)


def weighted(x, y, beta, alpha):
    """beta * x + alpha * y; beta = 0 forgets x, NaNs too; numbers are taken as the dtype of y has them"""
    if not is_float(y.dtype):
        kind = bool if y.dtype == torch.bool else int
        beta, alpha = kind(beta), kind(alpha)
    y = y if alpha == 1 else o.mul(y, alpha)
    if beta == 0:
        return y
    return o.add(x if beta == 1 else o.mul(x, beta), y)


@captures("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default")
def _addmm(x, a, b, *, beta=1, alpha=1):
    return weighted(x, matmul(a, b), beta, alpha)


@captures("aten.addmm.dtype", "aten.baddbmm.dtype")
def _addmm_wide(x, a, b, out_dtype, *, beta=1, alpha=1):
    return weighted(o.cast(x, dtype=out_dtype), _matmul_wide(a, b, out_dtype), beta, alpha)


@captures("aten._addmm_activation.default")
def _addmm_activation(x, a, b, *, beta=1, alpha=1, use_gelu=False):
    y = weighted(x, matmul(a, b), beta, alpha)
    return o.gelu(y, approximate="tanh") if use_gelu else o.relu(y)


@captures("aten.addbmm.default")
def _addbmm(x, a, b, *, beta=1, alpha=1):
    return weighted(x, einsum(a, b, equation="bmk,bkn->mn"), beta, alpha)


@captures("aten.addr.default")
def _addr(x, a, b, *, beta=1, alpha=1):
    y = weighted(x, _outer(a, b), beta, alpha)
    return y if y.shape == (*a.shape, *b.shape) else o.expand(y, shape=(*a.shape, *b.shape))


def subscripts(equation):
    """ "ij,jk->ik" -> (["ij", "jk"], "ik")"""
    left, _, right = equation.partition("->")
    return left.split(","), right


def _einsum_dims(*types, equation):
    operands, out = subscripts(equation)
    if any(len(set(s)) < len(s) for s in operands):
        raise ValueError(f"einsum {equation!r}: a letter twice in one operand; take its diagonal first")

    def dims(subscript):
        return " ".join(c if c in out else f"{c}+" for c in subscript)

    return f"{', '.join(map(dims, operands))} -> {dims(out)}"


def _einsum_vjp(g, y, *xs, equation):
    operands, out = subscripts(equation)
    if len(xs) == 1:
        return (_einsum_cotangent([g], [out], xs[0], operands[0]),)
    cotangents = []
    for i, x in enumerate(xs):
        others = [conj(z) for j, z in enumerate(xs) if j != i]
        names = [s for j, s in enumerate(operands) if j != i]
        cotangents.append(_einsum_cotangent([g, *others], [out, *names], x, operands[i]))
    return tuple(cotangents)


def _einsum_cotangent(terms, names, x, subscript):
    """The product of terms as x is subscripted; letters of x alone were summed: expand."""
    known = "".join(c for c in subscript if any(c in name for name in names))
    cotangent = terms[0] if names == [known] else einsum(*terms, equation=f"{','.join(names)}->{known}")
    if known != subscript:
        shape = tuple(n if c in known else 1 for c, n in zip(subscript, x.shape, strict=True))
        cotangent = o.expand(o.reshape(cotangent, shape=shape), shape=tuple(x.shape))
    return cast_like(cotangent, x)


@op(
    _einsum_dims,
    vjp=_einsum_vjp,
    flops=every_letter,
    linear=((0,), (1,), (2,)),
    examples=[
        'f[2,3,4], f[2,4,6], equation="bij,bjk->bik"', 'f[2,3], f[4,3,6], f[2,6], equation="bi,oij,bj->bo"',
        'f[2,3,4], equation="abc->cb"', 'f[2,3], equation="ab->"', 'f[2,3], f[3,4], equation="ab,bc->c"',
        'f[2,3], f[4,2], equation="ab,cd->bd"', 'c128[2,3], c128[3,4], equation="ab,bc->ca"',
        'f[], f[2], equation=",a->a"',
    ],
    apart=True, rate="product", precision="low",
)  # fmt: skip
def einsum(*xs, equation):
    """torch.einsum with every letter written out, none twice in one operand"""
    return torch.einsum(equation, *xs)


@captures(torch.functional.einsum)
def _einsum(*args):
    """Ellipsis, implicit outputs, diagonals and size-one dims that broadcast become plain letters."""
    equation, *xs = args
    if not isinstance(equation, str):
        return NotImplemented
    xs = list(xs[0]) if len(xs) == 1 and isinstance(xs[0], (list, tuple)) else xs
    left, arrow, out = equation.replace(" ", "").partition("->")
    names = left.split(",")
    if len(names) != len(xs):
        raise ValueError(f"einsum {equation!r}: {len(names)} subscripts for {len(xs)} operands")
    ranks = [x.ndim - len(s.replace("...", "")) if "..." in s else 0 for x, s in zip(xs, names, strict=True)]
    dots = "".join(letters(max(ranks, default=0), skip=equation))
    names = [s.replace("...", dots[len(dots) - r :]) for s, r in zip(names, ranks, strict=True)]
    used = "".join(names)
    once = sorted(c for c in set(used) - set(dots) if used.count(c) == 1)
    out = out.replace("...", dots) if arrow else dots + "".join(once)
    return _plain_einsum(equation, xs, names, out)


@captures("aten.einsum.default")
def _aten_einsum(equation, tensors, *, path=None):
    return _einsum(equation, *tensors)


def _plain_einsum(equation, xs, names, out):
    sizes = {}
    for x, s in zip(xs, names, strict=True):
        if len(s) != x.ndim:
            raise ValueError(f"einsum {equation!r}: subscript {s!r} for an operand of shape {list(x.shape)}")
        for c, n in zip(s, x.shape, strict=True):
            if sizes.get(c, 1) != 1 and n not in (1, sizes[c]):
                raise ValueError(f"einsum {equation!r}: {c} is {sizes[c]} and {n}")
            sizes[c] = max(n, sizes.get(c, 1)) if n else 0
    pairs = [_distinct(*_squeeze_broadcast(x, s, sizes)) for x, s in zip(xs, names, strict=True)]
    xs, names = [x for x, _ in pairs], [s for _, s in pairs]
    if len(xs) == 1 and sorted(names[0]) == sorted(out):
        dims = tuple(names[0].index(c) for c in out)
        return xs[0] if dims == tuple(range(len(out))) else o.permute(xs[0], dims=dims)
    return einsum(*xs, equation=f"{','.join(names)}->{out}")


def _squeeze_broadcast(x, s, sizes):
    """Drop the dims of size one that another operand makes larger."""
    keep = [i for i, c in enumerate(s) if x.shape[i] == sizes[c]]
    if len(keep) == len(s):
        return x, s
    return o.reshape(x, shape=tuple(x.shape[i] for i in keep)), "".join(s[i] for i in keep)


def _distinct(x, s):
    """Take the diagonal of letters that are there twice; the diagonal becomes the last dim."""
    while len(set(s)) < len(s):
        c = next(c for c in s if s.count(c) > 1)
        i = s.index(c)
        j = s.index(c, i + 1)
        x, s = o.diagonal(x, offset=0, dim1=i, dim2=j), s[:i] + s[i + 1 : j] + s[j + 1 :] + c
    return x, s


@captures(torch.functional.tensordot)
def _tensordot(a, b, dims=2, out=None):
    if out is not None or not isinstance(dims, (int, list, tuple)):
        return NotImplemented
    if isinstance(dims, int):
        dims = (range(a.ndim - dims, a.ndim), range(dims))
    left, right = ([d] if isinstance(d, int) else list(d) for d in dims)
    names = letters(a.ndim + b.ndim)
    s, t = names[: a.ndim], names[a.ndim :]
    for i, j in zip(left, right, strict=True):
        t[normal_dim(j, b.ndim)] = s[normal_dim(i, a.ndim)]
    shared = set(s) & set(t)
    kept = "".join(c for c in s + t if c not in shared)
    return _plain_einsum("tensordot", [a, b], ["".join(s), "".join(t)], kept)


@captures("aten._trilinear.default")
def _trilinear(x, y, z, expand1, expand2, expand3, sumdim, unroll_dim=1):
    names = letters(x.ndim + len(expand1))
    terms = ["".join(c for i, c in enumerate(names) if i not in gone) for gone in (expand1, expand2, expand3)]
    out = "".join(c for i, c in enumerate(names) if i not in sumdim)
    return _plain_einsum("trilinear", [x, y, z], terms, out)
