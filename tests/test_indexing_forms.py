"""Every way Python reads, writes and computes with tensors, captured and compared with eager torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

import mycel
from mycel.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of deprecated forms


def operands(seed=0):
    """The operands by the names the cases use."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 6, 5, generator=gen)
    return {
        "x": x,
        "v": torch.arange(6.0) - 2.5,
        "s": torch.tensor(2.0),
        "k": torch.arange(24).reshape(4, 6) - 7,
        "m": torch.rand(4, 6, generator=gen) > 0.5,
        "b": torch.rand(4, generator=gen) > 0.5,
        "i": torch.tensor([3, 0, -1]),
        "j": torch.tensor([[1], [2], [0]]),
        "n": torch.tensor(1),
        "u": torch.tensor([1, 0, 2], dtype=torch.int32),
        "e": torch.zeros(0, 3),
        "z": torch.complex(x[0], x[1]),
    }


def same(want, got):
    """Same structure, dtypes, shapes and values."""
    a, b = tree_leaves(want), tree_leaves(got)
    assert type(want) is type(got) and len(a) == len(b)
    for p, q in zip(a, b, strict=True):
        if not isinstance(p, torch.Tensor):
            assert p == q
            continue
        assert (p.dtype, p.shape) == (q.dtype, q.shape)
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-6, equal_nan=True)


def check(code):
    """Run `code` (statements that make `y`, or one expression) eagerly and captured, on the same operands."""
    body = code if "\n" in code or ";" in code or not _is_expression(code) else f"y = {code}"
    names = list(operands())
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    source = f"def run({', '.join(names)}):\n    y = None\n{lines}    return y, {', '.join(names)}\n"
    env = {"torch": torch, "F": torch.nn.functional, "math": __import__("math")}
    exec(compile(source, "<form>", "exec"), env)
    eager, captured = operands(), operands()
    want = env["run"](**eager)
    got = mycel.jit(env["run"], strict=True)(**captured)
    same(want, got)
    same(list(eager.values()), list(captured.values()))


def _is_expression(code):
    try:
        compile(code, "<form>", "eval")
    except SyntaxError:
        return False
    return True


KEYS = """
0 | -1 | 3 | : | 1: | :-1 | ::2 | 1:4:2 | -3:-1 | 5:2 | 10: | :100 | -100:2 | ... | None | 0:0 | 0, 1 | -1, -2, -3
0, ... | ..., 0
..., None | None, ..., None | 0, None, 1 | :, 0 | :, -1 | :, :, 0 | 1:3, ::2, -1 | None, 0, None, :, None | ..., 1:3
0, ..., 0
:, None, :, 2 | :, ..., : | 1, 2, 3 | 1, 2, 3, ... | 1:2, 0 | [0, 2] | [1] | [0, 2], [1, 3] | :, [0, 5]
:, :, [4, 0, 0]
[[0, 1], [2, 3]] | [0, 2], :, [1, 3] | 0, [1, 2] | [0, 1], 0 | [-1, -2], ..., 0 | [] | i | :, i | i, i | i, :, i
..., i | j, i | i, j
:, j, i | j | 0, i | i, 0 | i, 1:3 | 1:3, i | None, i | i, None | i, ..., 2 | :, i, None, 1 | 0, :, i | n | n, n
:, n | n, i | i, n
n, ... | ..., n | n, None | n, ..., i | i, n, i | n, :, i | :, n, i | [n, 0] | 0, [n, n] | n: | u | :, u | range(3)
(0, 1)
slice(1, 3) | slice(None), 2 | (slice(None), None, i) | True | False | None, True | (0, [1, 2], slice(None))
torch.arange(3)
torch.tensor([0, 2]) | torch.tensor(2) | :, torch.arange(6) % 2 | torch.tensor([True, False, True, False])
:, torch.arange(6) > 2
"""
READS = [key.strip() for line in KEYS.strip().splitlines() for key in line.split("|")]


@pytest.mark.parametrize("key", READS)
def test_reads(key):
    check(f"x[{key}]")


@pytest.mark.parametrize("key", READS)
def test_assignments(key):
    """A number, a tensor of the part's shape, a broadcast one, and augmented ones; through a view too."""
    check(f"x[{key}] = 1.5\ny = x.sum()")
    if key in ("[0, 2], [1, 3]", "i, i") or "i" not in key:  # an index that names an element twice is undefined
        check(f"w = x * 2\nw[{key}] = x[{key}] + 1\ny = w")
    check(f"w = x * 2\nw[{key}] += 1\ny = w")
    check(f"w = x.clone()\np = w.transpose(0, 0)\np[{key}] *= s\ny = w, p")


MORE_ASSIGNMENTS = [
    "x[m] = 0",
    "x[m] = s",
    "x[b] = -1.0",
    "x[:, 0][b] = 3",
    "x[~m] = 7.0; y = x",
    "k[k < 0] = 0",
    "k[m] = 9",
    "x[0] = v[:5]",
    "x[:, 1] = 0.0",
    "x[..., 0] = v",
    "x[1:3] = v[None, :, None]",
    "x[:] = 0",
    "x[...] = s",
    "x[()] = s",
    "x[i] = x[0].clone()",
    "x[[n, 2]] = 3.0",
    "x[n, :, i] = 2.0",
    "x[n][n] = 1.0",
    "x[n].zero_(); y = x",
    ("w = x[:, n]; x[0] = 0; w += 1; y = w"),
    "x[n, 1] += v[:5]",
    "x[:, i] = 1.0",
    "x[n] = 0",
    "x[0, n] = v[:5]",
    "x[0][1][2] = 5.0",
    "x[0][1:3] += v[:2, None]",
    "x[:, ::2] -= 1",
    "x.t_ if 0 else None; w = k.t(); w[0] = 1; y = k",
    "w = x.view(-1); w[3] = 9; w[-1] += 1; y = x",
    "w = x.permute(2, 0, 1); w[0, 1:] *= 2; y = x",
    "w = x[1]; x[1] = 0; y = w",
    "w = x[0]; w.zero_(); y = x",
    "x[0].fill_(2); y = x",
    "w = x.flatten(1)[:, 3:5]; w.add_(1); y = x",
    "a, c = x.chunk(2, 1); a.mul_(2); y = x, c",
    "for r in x: r.mul_(2)",
    "w = x.diagonal(0, 0, 1); w.zero_(); y = x",
    "w = x.unsqueeze(0).squeeze(); w += 1; y = x",
    "w = x.select(1, 2); w.copy_(x[:, 0]); y = x",
    "w = x.narrow(1, 1, 2); w.neg_(); y = x",
    ("w = z.real; w[0] = 0; y = z"),
    "w = torch.view_as_real(z); w[..., 0] += 1; y = z",
    "x.index_put_((i,), s); y = x",
    "x.unfold(1, 2, 3).mul_(3); y = x",
    "z = x.clone(); z.as_strided((2, 2), (7, 3), 1).add_(1); y = z",
    "x.index_fill_(1, i % 6, 0.5)",
    "x.index_add_(0, i % 4, x[:3] + 1)",
    "x.index_copy_(0, torch.tensor([1, 2]), x[2:] * 2)",
    "x.masked_fill_(m[..., None], 0)",
    "k.scatter_(1, (k % 6), 5)",
    "x.scatter_add_(0, torch.zeros(1, 6, 5, dtype=torch.long), x[:1] * 2)",
    "x.swapaxes(0, 1)[0] = 4.0",
    "del v; v = x; v[0] = 1; y = x is v",
    "x[k[:, :1] % 4, i % 6] = 0.0",
    "x.expand(2, 4, 6, 5)[0].sum()",
    "x[0, 0], x[1, 1] = x[1, 1], x[0, 0]",
]


@pytest.mark.parametrize("code", MORE_ASSIGNMENTS)
def test_more_assignments(code):
    check(code)


EXPRESSIONS = """
2 ** x.abs() | x ** 2 | x ** -1 | 2 ** k.abs() | (-2.0) ** k.abs() | x ** s | s ** x | 1 - x | 1 / x | x / 3
3 // v | v // 2 | v // -2
k // 4 | -7 // (k + 50) | k % 3 | -k % 3 | v % 2 | 5 % (v + 9) | k / 2 | k + 1.5 | 1.5 - k | k * True | True + k
-x | +x | abs(x)
abs(k) | ~m | ~k | m & (k > 0) | m | (k > 0) | m ^ True | True & m | k & 3 | 3 | k | k ^ 5 | k << 1 | k >> 1
1 << (k % 5) | k // n
x @ v[:5] | v[:4] @ x[:, 0] | x @ x.mT | v @ v | x == 0 | 0 < x | x >= s | k != 3 | x > k[..., None]
x + k[..., None] | k + m | m + m
m * 2 | m.float() - 1 | s + k | s * k | x + 1j | z * 2 | z / z.abs() | z == z.conj() | math.pi * x | torch.pi - x
x.sum() * k
k.sum() / 2 | k.float().mean() - k | (x > 0) * x | x - (x > 0).int() | x.half() * 2 | x.half() + x
x.bfloat16() + s | len(x)
x.shape[0] * x | x.size(-1) | x.size() | x.numel() | x.dim() + x | x.ndim | list(x.shape) | tuple(x.stride()) | x.dtype
x.is_floating_point() | x.element_size() | m.any() | k.all() | x.view(-1, 4) | x.view((24, 5)) | x.view(4, -1)
x.view(torch.int32)
x.reshape(-1) | x.reshape((5, -1)) | x.permute(2, 0, 1) | x.permute((1, 0, 2)) | x.permute(-1, 0, 1)
x.transpose(0, -1) | x.T | k.T
k.mT | k.t() | x.movedim(0, -1) | x.swapdims(0, 1) | x.unsqueeze(-1) | x.squeeze() | x[:, :1].squeeze(1)
x.flatten() | x.flatten(0, 1)
x.unflatten(1, (2, -1)) | x.sum((0, 1)) | x.sum(0) | x.sum(dim=(0, -1), keepdim=True) | x.sum(-1, True)
x.sum(dtype=torch.float64)
k.sum() | m.sum() | m.sum(1) | k.sum(0, dtype=torch.int32) | x.mean(dim=[1, 2]) | x.prod(1) | x.max() | x.max(dim=1)
x.max(1).values
x.max(1)[1] | x.max(1, keepdim=True).indices | x.min(-1) | x.amax((0, 2)) | torch.max(x, s)
torch.min(k, k.flip(1)) | x.aminmax(dim=0)
x.max(x) | x.sort() | x.sort(descending=True).values | x.sort(0)[1] | x.sort(dim=-1, stable=True) | x.argsort(-1)
x.topk(2)
x.topk(2, 0, False).values | torch.topk(x, k=3, dim=1).indices | x.kthvalue(2) | x.median(1).values
x.cummax(1).values | x.cumsum(-1)
k.cumsum(0) | m.cumsum(1) | x.var() | x.var(0) | x.std((0, 1), unbiased=False) | x.var(1, correction=0)
torch.var_mean(x, 1)
x.norm() | x.norm(2, 1) | x.norm(p=1, dim=0) | x.argmax() | x.argmax(1) | k.argmin(0, keepdim=True)
x.logsumexp((0, 1))
x.softmax(-1) | x.log_softmax(dim=1) | k.float().softmax(0, dtype=torch.float64) | x.any(1) | x.all()
m.all(0, keepdim=True)
x.to(torch.float64) | x.to(dtype=torch.int64) | x.to("cpu") | x.to(torch.device("cpu"), torch.float16) | x.to(k)
x.to(z) | x.double()
x.long() | x.int() | x.bool() | k.float() | m.int() | x.type(torch.float64) | x.type_as(k)
x.to("cpu", torch.float64, copy=True)
x.to(memory_format=torch.contiguous_format) | x.cpu() | x.float() | k.char() | k.byte() | k.short() | x.clone()
x.detach()
x.contiguous() | x.bfloat16() | torch.where(m[..., None], x, 0) | torch.where(m, k, -1) | torch.where(m, 1.0, s)
torch.where(m, 1, 0)
x.where(x > 0, s) | torch.where(x > 0, x, x.new_zeros(())) | x.clamp(0) | x.clamp(-1, 1) | x.clamp(min=s)
x.clamp(max=v[:5])
torch.clamp(x, None, 0.5) | k.clamp(0, 5) | k.clamp(-1.5, 2.5) | x.clip(-0.1, 0.1) | x.clamp_min(0) | x.relu()
x.masked_fill(m[..., None], -1e9) | k.masked_fill(m, 3) | torch.cat([x, x], -1) | torch.cat((x[0], x[1]), dim=0)
torch.stack([v, v * 2]) | torch.stack([v, v], dim=1) | torch.hstack([v, v]) | torch.vstack([v, v]) | torch.cat([e, e])
torch.cat([k, x[..., 0]]) | torch.concat([v, v]) | x.split(2) | x.split([1, 3]) | x.split(4, dim=1) | x.chunk(3, 1)
x.unbind(1)
x.tensor_split(3, 1) | [*x][0] | list(v)[2] | sum(v) | max(x.shape) | torch.tensor_split(x, (1, 3), dim=1) | x.hsplit(2)
x.unbind()[-1] | x.repeat(2, 1, 1) | x.repeat(1, 2, 1, 1) | x.expand(2, -1, -1, -1) | s.expand(3) | x.tile(2)
x.tile((2, 1, 1))
x.flip(0) | x.flip(0, 1) | x.flip([-1]) | x.roll(1) | x.roll((1, -2), (0, 1)) | x.rot90()
x.repeat_interleave(2, 0) | F.pad(x, (1, 2))
F.pad(x, (0, 1, 2, 0), value=3.0) | F.pad(x, (-1, 1)) | F.pad(x, (1, 1), mode="reflect")
F.pad(x, (2, 2), mode="circular")
F.pad(x, (1, 1), "replicate") | F.one_hot(k % 5, 5) | F.one_hot(i % 4, num_classes=4)
x.gather(1, k[:, :2, None].expand(4, 2, 5) % 6)
x.take_along_dim(x.argsort(1), 1) | x.take(i) | x.index_select(1, i % 6) | torch.take(x, j) | x.diagonal()
torch.diag(v)
torch.tril(k) | k.triu(1) | k.tril(-1) | torch.trace(k) | torch.zeros(3, 4) + s | torch.zeros((3, 4))
torch.ones_like(x)
x.new_zeros(2, 3) | x.new_full((2,), 3.0) | x.new_tensor([1, 2]) | torch.arange(5) | torch.arange(1, 10, 3)
torch.arange(0.0, 1.0, 0.25) | torch.arange(5, 0, -2) | torch.linspace(0, 1, 5) | torch.full((2, 3), 7)
torch.full_like(k, 2)
torch.eye(3) | torch.eye(3, 4, dtype=torch.bool) | torch.tensor([[1, 2], [3, 4]]) | torch.tensor(3.5) * x
torch.as_tensor(2) + k
torch.empty(2, 0).sum() | torch.meshgrid(v, v[:2], indexing="ij") | e.sum() | e.sum(0) | e.mean(1) | e.reshape(3, 0)
e + 1
e @ x[0, :3] | x[0:0].sum((0, 1)) | e.t() @ e | torch.cat([e, x[0, :2, :3]]) | x[:, 0:0].amax(2) | s.sum()
s.unsqueeze(0) | s.max()
s[...] | s[None] | s.view(1, 1) | s.sort().values | s.flatten() | z.real | z.imag | z.conj() | z.abs() | z.angle()
z @ z.mH
torch.view_as_real(z) | torch.polar(x, x) | z.exp() | z.sum() | z.conj().real | z.H | torch.fft.fft(v)
torch.fft.rfft(x, dim=1).abs()
torch.fft.irfft(torch.fft.rfft(v)) | z * x[0] | z.mean(0) | x.add(1) | x.add(x, alpha=2) | torch.add(x, 1, alpha=3)
x.sub(1, alpha=2)
torch.rsub(x, 1) | x.mul(2).div(3, rounding_mode="floor") | x.div(2, rounding_mode="trunc")
torch.addcmul(x, x, x, value=0.5)
torch.lerp(x, x * 2, 0.3) | torch.pow(2, v) | torch.einsum("abc,adc->abd", x, x) | torch.einsum("ii->i", k[:, :4])
torch.einsum("...c,c->...", x, v[:5]) | torch.matmul(v, v) | torch.tensordot(x, x, dims=([1], [1])) | torch.outer(v, v)
torch.bmm(x, x.mT) | torch.kron(k, k[:2]) | torch.cdist(x, x) | torch.cumprod(v, 0) | torch.diff(v)
torch.bucketize(v, v)
torch.searchsorted(v, v) | torch.isin(k, k[0]) | torch.unravel_index(i % 20, (4, 5)) | torch.broadcast_to(v, (2, 6))
torch.logical_and(m, k) | torch.allclose(torch.ones(2), torch.ones(2)) | x.nansum() | x.nan_to_num(0.0)
"""
FORMS = [form.strip() for line in EXPRESSIONS.strip().splitlines() for form in line.split(" | ")]


@pytest.mark.parametrize("code", FORMS)
def test_expressions(code):
    check(code)


STATEMENTS = [
    "x += 1; y = x",
    "x -= x.mean(); y = x",
    "x *= k[..., None]; y = x",
    "x /= 2",
    "x **= 2",
    "k //= 2",
    "k %= 3",
    "m &= k > 0",
    "m |= True",
    "m ^= m.flip(0)",
    "k <<= 1",
    "x @= x.mT[..., :5] if 0 else torch.eye(5); y = x",
    "w = torch.empty(4, 6, 5); torch.mul(x, 2, out=w); y = w",
    "torch.add(v, 1, out=v)",
    "w = torch.empty(0); torch.sum(x, 0, out=w); y = w",
    "w = x.new_empty(4, 5); torch.amax(x, 1, out=w); y = w",
    "a, c = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.long); torch.max(x, 2, out=(a, c)); y = a, c",
    "torch.cat([v, v], out=(w := torch.empty(12))); y = w",
    "x.add_(1).mul_(2); y = x",
    ("x.relu_(); F.relu(x, inplace=True); y = x"),
    "x.clamp_(0, 1); x.sqrt_()",
    "x.copy_(v[:, None])",
    "x.copy_(k[..., None])",
    "k.copy_(x[..., 0])",
    "x.zero_(); y = x + 1",
    "x.fill_(s)",
    "w = x.t_ and x * 1; w.transpose_(0, 1); w[0] = 0; y = w",
    ("w = v * 1; w.unsqueeze_(0); w.squeeze_(0); y = w"),
    "w = x * 1; w.resize_as_(x) if 0 else None; y = w",
    "w = v * 1; w.data = v + 1; y = w",
    "x.data += 1; y = x",
    "x.data.mul_(2); y = x",
    "w = x.detach(); w += 1; y = x",
    "with torch.no_grad():\n    x += 1\ny = x",
    "w = {}; w['a'] = x + 1; y = w",
    "y = [x[t] * t for t in range(len(x))]",
    "y = sum(r.sum() for r in x)",
    "a, *c = x; y = c[-1]",
    "values, indices = x.max(dim=1); y = values, indices",
    "r = x.sort(); y = r.values + r.indices",
    "y = torch.return_types.max if 0 else torch.max(x, 0)",
    ("w = torch.zeros(3, 5); w[0] = v[:5]; w[1:] = x[0, :2]; y = w"),
    "w = torch.zeros(6, dtype=torch.long); w[i % 6] = i; y = w",
    "w = [v]; w.append(v * 2); y = torch.stack(w)",
    "x[0] = x[1]; x[1] = x[0] * 2; y = x",
    "w = x.view(4, 30); x[0] = 0; y = w",
    "w = x; x = x + 1; w += 1; y = x, w",
    "w = x.expand(4, 6, 5); w += 1; y = x",
    "y = x.apply_ and x.requires_grad",
    "y = x.shape + (1,)",
    "assert x.shape[0] == 4; y = x",
    "y = x if x.ndim == 3 else None",
    "y = F.embedding(k % 4, x[:, 0])",
    "y = torch.nn.functional.embedding_bag(k % 4, x[:, 0], mode='mean')",
    "y = torch.narrow(x, 1, n, 2)",
    "y = x.narrow(0, -2, 2)",
]


@pytest.mark.parametrize("code", STATEMENTS)
def test_statements(code):
    check(code)


# answered from the operands, which are the batch: the program is one for these values
FACTS = [
    "x[m]",
    "x.nonzero()",
    "torch.where(m)",
    "k.unique()",
    "x.sum().item()",
    "x.tolist()",
    "float(s)",
    "x[int(n)]",
    "range(n)",
    "torch.equal(x, x)",
    "torch.allclose(x, x)",
    "x.numpy().tolist()",
    "x[m] += 1; y = x",
    "torch.repeat_interleave(v, k[0].abs())",
]


@pytest.mark.parametrize("code", FACTS)
def test_values_of_operands(code):
    check(code)


REFUSED = {
    "x.unsqueeze_(0)": "an argument of another shape",
    "x.unfold(1, 2, 1).mul_(3)": "elements that may share memory",
    "x.T.as_strided((2, 2), (1, 2))": "strides of the user",
    "x.to_sparse()": "a sparse tensor",
}


@pytest.mark.parametrize("code", REFUSED)
def test_refusals_name_the_line(code):
    with pytest.raises(CaptureError) as caught:
        check(code)
    assert "<form>" in str(caught.value) and "try" in str(caught.value)
