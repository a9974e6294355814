"""The laws every codec keeps, in one loop over all of them, and the same bytes from C as from torch."""

from __future__ import annotations

import pytest
import torch

from mycel.ops import codec_kernels, native_codecs, o
from mycel.ops.codec_kernels import (
    EIGHT_BITS,
    EIGHT_BITS_SCALE,
    averaged_in_eight_bits,
    blocks_of,
    codec_of,
    in_eight_bits,
)
from mycel.ops.codecs import Compression

NAMES = [
    "fp32", "bf16", "fp16", "fp8", "int8", "int8(block=64)", "int4", "int4(block=32)", "sign", "topk(0.05)",
    "randomk(0.1)", "bf16+stochastic", "int8+stochastic", "int4+stochastic", "randomk(0.1)+stochastic",
]  # fmt: skip
IN_C = ("int8", "int4", "bf16", "fp16", "fp8", "sign", "topk")
CASES = [(name, "torch") for name in NAMES] + [(name, "C") for name in NAMES if name.startswith(IN_C)]
CHANCE = [(name, by) for name, by in CASES if codec_of(name).stochastic]
every_codec = pytest.mark.parametrize("name, kernels", CASES, indirect=["kernels"])
ROWS, ROW, N = 3, 700, 2050  # neither rows nor all of them are whole blocks
KEY = torch.tensor(0x1234_5678_9ABC)


def hostile() -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    plain = torch.randn(N, generator=gen)
    huge = plain.clone()
    huge[7] = -3.2e38
    return {
        "plain": plain,
        "zeros": torch.zeros(N),
        "one huge": huge,
        "denormal": plain * 1e-41,
        "tiny": plain * 1e-34,
        "of all sizes": plain * torch.logspace(-30, 30, N),
        "ties": plain.sign() * 0.25,
        "whole": torch.arange(N).float() % 5 - 2,
    }


def encoded(x, name, key=KEY, e=None, rows=ROWS, row=ROW):
    return o.encode_residual(x, e, key, codec=name, rows=rows, row=row)


def decoded(code, name, shape=(N,), key=KEY, row=ROW):
    return o.decode(code, key, codec=name, row=row, shape=shape)


@pytest.fixture
def kernels(request, monkeypatch):
    """By way of C, where there is a compiler, or without."""
    if request.param == "torch":
        monkeypatch.setattr(codec_kernels, "native", lambda name: None)
    elif native_codecs.native("int8") is None:
        pytest.skip("no C compiler here")
    return request.param


@every_codec
@pytest.mark.parametrize("kind", hostile())
def test_what_is_decoded_is_within_the_stated_error(kernels, name, kind):
    codec, x = codec_of(name), hostile()[kind]
    code, left = encoded(x, name)
    assert code.shape == (ROWS, codec.size(ROW)) and code.dtype == torch.uint8
    y = decoded(code, name)
    assert torch.isfinite(y).all()
    bound = codec.bound(blocks_of(x, codec, ROWS, ROW)).reshape(ROWS, -1)[:, :ROW].reshape(-1)[:N]
    worst = ((y - x).abs() - bound).max()
    assert worst <= 0, worst
    assert torch.equal(left, x - y)  # what is left over and what was sent are all of it


@every_codec
@pytest.mark.parametrize("strange", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_does_not_get_lost(kernels, name, strange):
    for at in (0, 5, N - 1):
        x = torch.randn(N)
        x[at] = strange
        code, _ = encoded(x, name)
        assert not torch.isfinite(decoded(code, name)).all()


@pytest.mark.parametrize("name, kernels", CHANCE, indirect=["kernels"])
def test_by_chance_the_mean_over_keys_is_what_was_encoded(kernels, name):
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(96, generator=gen)
    keys = torch.randint(-(2**62), 2**62, (300,), generator=gen)
    ys = torch.stack([decoded(encoded(x, name, k, rows=1, row=96)[0], name, (96,), k, 96) for k in keys])
    mean, deviation = ys.double().mean(0), ys.double().std(0)
    assert ((mean - x).abs() <= 5.5 * deviation.max() / len(keys) ** 0.5).all()
    assert (ys != ys[0]).any()


@pytest.mark.parametrize("name", [n for n in NAMES if codec_of(n).share < 1 or codec_of(n).name == "sign"])
def test_what_is_left_over_is_smaller_than_what_was_given(name):
    """Then errors that are fed back stay bounded.  (Not so where chance makes up for what is left out.)"""
    x = torch.randn(N)
    _, left = encoded(x, name)
    assert left.norm() < x.norm() or codec_of(name).stochastic


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith(IN_C)])
@pytest.mark.parametrize("kind", [*hostile(), "nan"])
@pytest.mark.parametrize("fed_back", [False, True])
def test_c_and_torch_make_the_same_bytes(monkeypatch, name, kind, fed_back):
    if native_codecs.native("int8") is None:
        pytest.skip("no C compiler here")
    x = hostile().get(kind, torch.full((N,), torch.nan))
    e = torch.randn(N) * x.abs().clamp(max=1.0).nan_to_num() if fed_back else None
    by_c = encoded(x, name, e=e)
    sums_c = o.decode_sum(by_c[0], None, codec=name, row=ROW, shape=(ROW,))
    monkeypatch.setattr(codec_kernels, "native", lambda name: None)
    by_torch = encoded(x, name, e=e)
    assert torch.equal(by_c[0], by_torch[0])
    assert torch.equal(by_c[1], by_torch[1]) or kind == "nan"
    sums = o.decode_sum(by_torch[0], None, codec=name, row=ROW, shape=(ROW,))
    assert torch.equal(sums_c, sums) or kind == "nan"


@every_codec
def test_what_is_left_may_be_written_over_what_was_given(kernels, name):
    x, e = hostile()["plain"], hostile()["ties"]
    code, left = encoded(x, name, e=e)
    own = x.clone()
    same, over = o.encode_residual.kernel(own, e, KEY, codec=name, rows=ROWS, row=ROW, over=True)
    assert torch.equal(same, code) and torch.equal(over, left)
    assert (over.data_ptr() == own.data_ptr()) == (kernels == "C")


@every_codec
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_are_parts_of_a_dim_and_sums_are_sums(kernels, name, dim):
    """Every rank's row i, brought together and added up, is part i of the sum of what all ranks decode."""
    shape, ranks = (5, 7, 9), 3
    gen = torch.Generator().manual_seed(0)
    xs = [torch.randn(shape, generator=gen) for _ in range(ranks)]
    part = -(-shape[dim] // ranks)
    row = part * (5 * 7 * 9 // shape[dim])
    both = [o.encode_residual(x, None, KEY, codec=name, rows=ranks, row=row, dim=dim) for x in xs]
    assert all(
        torch.equal(c, o.encode(x, KEY, codec=name, rows=ranks, row=row, dim=dim))
        for (c, _), x in zip(both, xs, strict=True)
    )
    whole = sum(x - left for x, (_, left) in zip(xs, both, strict=True))
    own = tuple(part if d == dim else n for d, n in enumerate(shape))
    for i in range(ranks):
        come = torch.stack([code[i] for code, _ in both])
        got = o.decode_sum(come, KEY, codec=name, row=row, shape=own, dim=dim)
        n = max(0, min(part, shape[dim] - i * part))
        torch.testing.assert_close(got.narrow(dim, 0, n), whole.narrow(dim, i * part, n), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["C", "torch"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_are_encoded_too_and_what_is_left_is_wide(kernels, dtype):
    x = torch.randn(N).to(dtype)
    code, left = encoded(x, "int8")
    assert left.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(left, x.to(left.dtype) - decoded(code, "int8").to(left.dtype), rtol=0, atol=0)


def test_what_is_remembered_in_8_bits_is_near_finite_and_on_average_what_it_was():
    gen = torch.Generator().manual_seed(2)
    keys = torch.randint(-(2**62), 2**62, (400,), generator=gen)
    for kind, x in hostile().items():
        y = in_eight_bits(x, keys[0]).float() / EIGHT_BITS_SCALE
        within = x.abs() <= torch.finfo(EIGHT_BITS).max / EIGHT_BITS_SCALE
        assert torch.isfinite(y).all() and (y.abs() <= 1.75).all(), kind
        assert ((y - x).abs() <= x.abs() * (0.25 + 1e-3) + 2.0**-31)[within].all(), kind
    x = torch.randn(96, generator=gen) * torch.logspace(-8, -1, 96)
    ys = torch.stack([in_eight_bits(x, k).double() / EIGHT_BITS_SCALE for k in keys])
    most = (x.abs() * 0.25 + 2.0**-31) / 2  # half of what is between two neighbours: no deviation is larger
    assert ((ys.mean(0) - x).abs() <= 5.5 * most / len(keys) ** 0.5 + x.abs() * 2.0**-10).all()
    assert (ys != ys[0]).any()


@pytest.mark.parametrize(
    "text",
    [
        "int4+loco",
        "int4+loco(0.2)",
        "topk(0.01)+dgc",
        "sign+adam",
        "int8+ef",
        "int4(block=64)+stochastic",
        "topk(0.01)+ef21",
        "bf16",
        "randomk(0.5)+ef",
    ],
)
def test_a_compression_is_its_text(text):
    assert str(Compression.parse(text)) == text


@pytest.mark.parametrize("text, why", [
    ("int9", "there is no codec"), ("topk+ef", "more than 0"), ("topk(1.5)+ef", "more than 0"),
    ("int8(block=100)", "multiple of 16"), ("int8(7)", "takes no"), ("fp32+stochastic", "does not round"),
    ("topk(0.01)", r"topk\(0.01\)\+ef"), ("sign", r"sign\+ef"), ("", "no codec"),
    ("randomk(0.1)+stochastic+ef", "by itself"), ("int8+loco(2)", "between 0 and 1"), ("int8+ef(0.5)", "no number"),
    ("topk(0.1)+dgc(1)", "between 0 and 1"), ("int8+dgc", r"topk\(0.01\)\+dgc"), ("powersgd(2)+dgc", "has a rank"),
])  # fmt: skip
def test_refusals_say_what_is_wrong(text, why):
    with pytest.raises(ValueError, match=why):
        Compression.parse(text)


@pytest.mark.parametrize("kind", [*hostile(), "nan"])
def test_errors_are_averaged_to_the_same_8_bits_in_c(monkeypatch, kind):
    if native_codecs.native("fp8") is None:
        pytest.skip("no C compiler here")
    e, lost = hostile()["plain"], hostile().get(kind, torch.full((N,), torch.nan))
    by_c = averaged_in_eight_bits(e, lost, KEY, 0.3)
    monkeypatch.setattr(codec_kernels, "native", lambda name: None)
    by_torch = averaged_in_eight_bits(e, lost, KEY, 0.3)
    assert by_c.dtype == by_torch.dtype == EIGHT_BITS
    assert torch.equal(by_c.view(torch.uint8), by_torch.view(torch.uint8))
