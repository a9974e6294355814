"""What torch's products and attention become, and what the laws do not see of attention: low precision, lse, rows that
see nothing."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import mycel
from mycel import transform
from mycel.ir import walk
from mycel.ops import o
from mycel.ops.few_rows import product_of_few
from mycel.ops.sdpa import counted


def tensors(*shapes, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype) for s in shapes]


A, B, W, V = (2, 3, 4), (2, 4, 5), (6, 4), (4,)

PRODUCTS = {
    "linear": (lambda x, w: F.linear(x, w, w[:, 0]), A, W),
    "linear vector": (lambda x, w: F.linear(x, w) + F.linear(w[:3], x).sum(), V, W),
    "module": (lambda x, w: torch.nn.functional.linear(x, w).sigmoid(), A, W),
    "matmul": (lambda x, y: x @ y + torch.matmul(x, y) + x.matmul(y) + torch.bmm(x, y), A, B),
    "matmul vectors": (lambda x, y: (x @ y) + (y @ y) + torch.dot(y, y) + torch.mv(x[0], y).sum(), A, V),
    "addmm": (
        lambda x, y: torch.addmm(x[0, :, :1], x[0], y[0], beta=2, alpha=3) + torch.baddbmm(x[:, :, :1], x, y, beta=0),
        A,
        B,
    ),
    "addbmm": (
        lambda x, y: (
            torch.addbmm(x[0, :, :1], x, y) + torch.addmv(x[0, :, :1, None][..., 0, 0], x[0], y[0, :, 0])[:, None]
        ),
        A,
        B,
    ),
    "outer": (lambda x, y: torch.outer(x, y) + torch.addr(y, x, y, alpha=2) + torch.ger(x, y) + torch.vdot(x, y), V, V),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y) + torch.einsum("...ij, ...jk", x, y), A, B),
    "einsum implicit": (lambda x, y: torch.einsum("bij,bjk", x, y) + torch.einsum("ba", y[:, :, 0]).sum(), A, B),
    "einsum ellipsis": (lambda x, y: torch.einsum("...ij,kj->...ki", x, y) + torch.einsum("i...,j->", x, y[0]), A, W),
    "einsum diagonal": (lambda x, y: torch.einsum("iij,ji->ij", x, y) + torch.einsum("aab->ab", x), (3, 3, 4), (4, 3)),
    "einsum broadcast": (lambda x, y: torch.einsum("bij,bij->bj", x, y), (2, 1, 4), (1, 3, 4)),
    "einsum three": (lambda x, y: torch.einsum("bij,bjk,bk->bi", [x, y, y[:, 0]]), A, B),
    "einsum one": (lambda x, y: torch.einsum("bij->jbi", x) + torch.einsum("bij->j", x)[:, None, None], A, B),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([0, -1], [0, 1])) + torch.tensordot(x[0], y[0], 1), A, B),
    "bilinear": (lambda x, y: F.bilinear(x, x[..., :3], y.reshape(2, 4, 5)[:, :, :3]), A, B),
    "chain": (lambda x, y: torch.linalg.multi_dot([x[0], y[0], y[0].T]), A, B),
    "kron": (lambda x, y: torch.kron(x[0], y[0]) + torch.cdist(x, x).sum(), A, B),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_captured_whole(name):
    f, *shapes = PRODUCTS[name]
    args = tensors(*shapes)
    fast = mycel.jit(f)
    torch.testing.assert_close(fast(*args), f(*args), rtol=1e-10, atol=1e-10)
    assert name == "kron" or "opaque" not in str(fast.program(*args))


ATTENTION = {
    "plain": ({}, (2, 4, 6, 8), (2, 4, 3, 8)),
    "causal": ({"is_causal": True}, (2, 4, 6, 8), (2, 4, 3, 8)),
    "grouped": ({"enable_gqa": True, "scale": 0.2}, (2, 4, 6, 8), (2, 2, 3, 8)),
    "three dims": ({"is_causal": True}, (2, 6, 8), (2, 6, 8)),
    "two dims": ({}, (6, 8), (3, 8)),
    "five dims": ({}, (2, 3, 4, 6, 8), (2, 3, 4, 3, 8)),
    "broadcast": ({}, (2, 4, 6, 8), (1, 1, 3, 8)),
    "three dims, mask": ({"mask": (2, 6, 3)}, (2, 6, 8), (2, 3, 8)),
    "mask of rows": ({"mask": (6, 1)}, (2, 4, 6, 8), (2, 4, 3, 8)),
    "five dims, mask": ({"mask": (2, 1, 4, 6, 3)}, (2, 3, 4, 6, 8), (2, 3, 4, 3, 8)),
    "five dims, one mask": ({"mask": (1, 1, 1, 6, 3)}, (2, 3, 4, 6, 8), (2, 3, 4, 3, 8)),
}


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_torchs(name, kind):
    options, q, k = ATTENTION[name]
    args = tensors(q, k, k)
    options = dict(options)
    if shape := options.pop("mask", None):
        (mask,) = tensors(shape)
        options["attn_mask"] = mask > -0.5 if kind == "bool" else mask
    f = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)
    fast = mycel.jit(f)
    torch.testing.assert_close(fast(*args), f(*args), rtol=1e-10, atol=1e-10)
    text = str(mycel.capture(f, *args))
    assert "attention(" in text and "opaque" not in text


def test_causal_with_a_mask_is_both():
    q, k, v, mask = tensors((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), (6, 6))
    for m in (mask, mask > 0):
        both = (
            m & torch.ones(6, 6, dtype=torch.bool).tril()
            if m.dtype == torch.bool
            else m + torch.full((6, 6), -math.inf).triu(1)
        )
        got = mycel.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=True))(q, k, v)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, attn_mask=both))


def test_dropout_in_attention_keeps_the_mean():
    q, k, v = tensors((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    fast = mycel.jit(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3))
    mean = fast(*(x.expand(4000, -1, -1, -1) for x in (q, k, v))).mean(0, keepdim=True)
    torch.testing.assert_close(mean, F.scaled_dot_product_attention(q, k, v), rtol=0, atol=0.05)


def reference(q, k, v, mask, causal, scale=None):
    """Attention in f64, differentiable."""
    q = q.double()
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), -math.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.double()
    lse = torch.logsumexp(s, -1)
    return torch.exp(s - torch.where(lse == -math.inf, 0, lse)[..., None]) @ v, lse


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
KERNELS = [
    ((2, 4, 70, 64), (2, 4, 70, 64), None, True), ((2, 4, 64, 64), (2, 2, 96, 64), None, False),
    ((2, 4, 40, 64), (2, 2, 70, 64), None, True), ((2, 4, 33, 64), (2, 4, 45, 64), "bool", False),
    ((2, 4, 33, 64), (2, 2, 45, 64), "added", False), ((2, 4, 33, 12), (2, 2, 45, 12), None, True),
    ((2, 4, 33, 16), (2, 1, 45, 16), "column", False),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("q, k, kind, causal", KERNELS)
def test_attention_kernels_and_gradients_are_close_to_f64(q, k, kind, causal, dtype, device):
    rows, columns = q[2], k[2]
    q, k, v, g = (x.to(device) for x in tensors(q, k, k, q, dtype=dtype))
    (mask,) = tensors((2, 1, rows, columns))
    mask = {None: None, "bool": mask > 0, "added": mask.to(dtype), "column": mask[:, :, :, :1].to(dtype)}[kind]
    if kind == "bool":
        mask[0, 0, 5] = False
    mask = mask if mask is None else mask.to(device)
    y, lse = o.attention(q, k, v, mask, causal=causal)
    assert lse.dtype == torch.float32 and y.dtype == dtype
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want, want_lse = reference(*wide, mask, causal)
    grads = torch.autograd.grad(want, wide, g.double())
    tol = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(y.double(), want, rtol=tol, atol=tol)
    torch.testing.assert_close(lse.double(), want_lse, rtol=tol, atol=tol)
    for got, exact in zip(o.attention_grad(g, q, k, v, mask, y, lse, causal=causal), grads, strict=True):
        assert got.dtype == dtype and got.shape == exact.shape
        assert (got.double() - exact).norm() <= tol * exact.norm()


CHANGED = [
    ((2, 4, 70, 64), (2, 2, 70, 64), None, {"causal": True, "dropout": 0.2}),
    ((2, 4, 33, 48), (2, 4, 45, 48), "bool", {"cap": 1.5, "dropout": 0.3}),
    ((1, 4, 90, 192), (1, 1, 90, 192), None, {"window": (20, 0), "cap": 2.0}),
    ((2, 2, 40, 16), (2, 2, 40, 16), "added", {"dropout": 0.1}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q, k, kind, how", CHANGED)
def test_attention_with_capped_scores_and_dropped_weights(q, k, kind, how, dtype, device):
    """Against products in f64 whose weights `dropout` drops with the same key."""
    weights, key = (*q[:3], k[2]), torch.tensor(3, device=device)
    q, k, v, g, mask = (x.to(device) for x in tensors(q, k, k, q, weights[2:], dtype=dtype))
    mask = {None: None, "bool": mask > 0, "added": mask}[kind]
    draws = (counted(q, k, key, 5),) if "dropout" in how else ()
    y, lse = o.attention(q, k, v, mask, *draws, **how)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    wq, wk, wv = wide[0], *(x.repeat_interleave(weights[1] // x.shape[1], 1) for x in wide[1:])
    s = wq @ wk.mT * wq.shape[3] ** -0.5
    s = how["cap"] * torch.tanh(s / how["cap"]) if "cap" in how else s
    row, column = torch.arange(weights[2], device=device)[:, None], torch.arange(weights[3], device=device)
    if "window" in how or "causal" in how:
        s = s.masked_fill((column > row) | (column < row - how.get("window", (math.inf,))[0]), -math.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if kind == "bool" else s + mask.double()
    p = torch.softmax(s, 3) * o.dropout(torch.ones_like(s), key, 0, p=how.get("dropout", 0.0), site=5)
    want = p @ wv
    tol = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert (y.double() - want).norm() <= tol * want.norm()
    torch.testing.assert_close(lse.double(), torch.logsumexp(s, 3), rtol=tol, atol=tol)
    exact = torch.autograd.grad(want, wide, g.double())
    for a, b in zip(o.attention_grad(g, q, k, v, mask, y, lse, *draws, **how), exact, strict=True):
        assert a.dtype == dtype and (a.double() - b).norm() <= tol * b.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_gradients_do_not_depend_on_how_operands_lie_in_memory(dtype, device):
    shapes = (2, 4, 32, 64), (2, 2, 32, 64), (2, 2, 32, 64), (2, 4, 32, 64)
    plain = [x.to(device) for x in tensors(*shapes, dtype=dtype)]
    lain = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    wide = [torch.cat([x, x], 3)[..., ::2] for x in plain[:3]] + [plain[3][:, :, :1].expand(shapes[3])]
    for q, k, v, g in (plain, [*plain[:3], lain[3]], lain, [*lain[:3], plain[3]], wide):
        y, lse = o.attention(q, k, v, None, causal=True)
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        want = torch.autograd.grad(reference(*exact, None, True)[0], exact, g.double())
        for ys in (y, y.contiguous(), y.transpose(1, 2).contiguous().transpose(1, 2)):
            for a, b in zip(o.attention_grad(g, q, k, v, None, ys, lse, causal=True), want, strict=True):
                assert (a.double() - b).norm() <= 2e-2 * b.norm()


@pytest.mark.parametrize(
    "mask", [None, torch.randn(1, 2, 6, 6, dtype=torch.float64), torch.ones(6, 6, dtype=torch.bool).tril(-1)]
)
def test_cotangents_of_lse(mask):
    inputs = [x.requires_grad_() for x in tensors((2, 2, 6, 8), (2, 1, 6, 8), (2, 1, 6, 8))]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.clone().requires_grad_()
    want = reference(*inputs, mask, causal=False)
    keep = torch.isfinite(want[1])
    gy, g_lse = tensors(want[0].shape, want[1].shape)
    learned = [x for x in (*inputs, mask) if x is not None and x.requires_grad]
    plain = [None if x is None else x.detach() for x in (*inputs, mask)]
    outs = tuple(x.detach() for x in want)
    for gs in ((gy, torch.where(keep, g_lse, 0)), (None, torch.where(keep, g_lse, 0))):
        loss = torch.where(keep, want[1], 0).mul(gs[1]).sum() + (0 if gs[0] is None else (want[0] * gs[0]).sum())
        exact = torch.autograd.grad(loss, learned, retain_graph=True, allow_unused=True)
        got = [
            d
            for d, x in zip(o.attention.vjp(gs, outs, *plain), (*inputs, mask), strict=True)
            if x is not None and x.requires_grad
        ]
        for a, b in zip(got, exact, strict=True):
            assert (a is None and b is None) or torch.allclose(a, torch.zeros_like(a) if b is None else b, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", range(1, 10))
def test_products_of_few_rows(rows, dtype):
    """In C, where there is a compiler: what torch computes, to the rounding of its sums; 9 rows, and memory that does
    not lie in order, go by torch."""
    g = torch.Generator().manual_seed(rows)
    for n, k in ((1, 1), (7, 33), (130, 64), (97, 100)):
        x, w, b = (torch.randn(s, generator=g).to(dtype) for s in ((rows, k), (n, k), (n,)))
        wanted = x.double() @ w.double().T
        near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(product_of_few(x, w).double(), wanted, **near)
        torch.testing.assert_close(product_of_few(x[None], w, b)[0].double(), wanted + b.double(), rtol=2e-2, atol=5e-2)
        torch.testing.assert_close(product_of_few(x, w.T.contiguous().T).double(), wanted, **near)
    odd = torch.full((1, 40), torch.inf, dtype=dtype)
    assert product_of_few(odd, torch.zeros(3, 40, dtype=dtype)).isnan().all()


def test_a_product_of_few_rows_is_written_outside_of_autograd():
    layer = torch.nn.Linear(256, 256)
    fast, x = mycel.jit(layer), torch.randn(3, 256)
    program = transform.few_rows(fast.program(x))
    assert [e.op for _, e in walk(program)] == [o.linear_few_rows]
    assert [e.op for _, e in walk(transform.few_rows(fast.program(torch.randn(9, 256))))] == [o.linear_bias]
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layer(x))
    fast(x).sum().backward()
    assert layer.weight.grad is not None


OF_TWO_DTYPES = r"a product of f64 by f32, which torch refuses\n  at .*test_ops_products.py:\d+\n.*\n  try .*float\(\)"


def test_a_product_of_two_dtypes_is_refused_with_its_line():
    """A batch that comes from NumPy is in f64; what torch promotes, or the precision of the step casts, is not."""
    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4)
    image, kernel = torch.randn(1, 2, 5, 5, dtype=torch.float64), torch.randn(3, 2, 3, 3)
    wrong = [
        lambda: mycel.jit(F.linear)(x, w),
        lambda: mycel.jit(lambda a, b: a @ b.T)(x, w),
        lambda: mycel.jit(lambda a, b: torch.einsum("ik,jk->ij", a, b))(x, w),
        lambda: mycel.jit(F.conv2d)(image, kernel),
        lambda: mycel.jit(F.scaled_dot_product_attention)(image, *[image.float()] * 2),
    ]
    for call in wrong:
        with pytest.raises(RuntimeError, match=OF_TWO_DTYPES):
            call()
    torch.testing.assert_close(mycel.jit(torch.outer)(x[0], w[0]), torch.outer(x[0], w[0]))
    pairs = mycel.jit(lambda a, b: torch.einsum("ik,ik->ik", a, b))
    torch.testing.assert_close(pairs(x, w[:3]), x * w[:3])

    def step(precision, dtype=torch.float32):
        model = torch.nn.Linear(4, 2, dtype=dtype)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return mycel.train_step(model, sgd, F.mse_loss, compile=False, precision=precision)

    assert step("bf16", torch.bfloat16)(x.float(), x[:, :2].float()).isfinite()
    with pytest.raises(mycel.CaptureError, match=OF_TWO_DTYPES):
        step("fp32")(x, x[:, :2])
