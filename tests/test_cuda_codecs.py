"""Codecs on a GPU: the same bytes as on the CPU, from Triton and from torch, and the same of what is decoded."""

from __future__ import annotations

import pytest
import torch
from test_codecs import KEY, NAMES, ROW, ROWS, N, hostile

from mycel.ops import codec_kernels, o
from mycel.ops.codec_kernels import codec_of

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

IN_TRITON = [
    "int8", "int8(block=64)", "int8(block=4096)", "int4", "int4(block=32)", "fp8", "fp8(block=16)", "sign",
    "sign(block=16)", "int8+stochastic", "int4+stochastic",
]  # fmt: skip
GIVEN = {
    **hostile(),
    "nan": torch.full((N,), torch.nan),
    "infinite": hostile()["plain"].index_fill(0, torch.tensor(5), torch.inf),
}
CASES = [(name, "triton") for name in IN_TRITON] + [(name, "torch") for name in NAMES]


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """To the bit; NaN is NaN."""
    return torch.equal(x.cpu().nan_to_num(7.0), y.cpu().nan_to_num(7.0))


@pytest.mark.parametrize("name, kernels", CASES)
@pytest.mark.parametrize("kind", GIVEN)
def test_the_gpu_makes_the_same_bytes(monkeypatch, name, kernels, kind):
    codec, x = codec_of(name), GIVEN[kind]
    if codec.name == "topk" and kind in ("ties", "whole", "zeros", "nan", "denormal"):
        return  # which of equals are kept is the device's choice
    if codec.name in ("fp32", "bf16", "fp16") and kind in ("nan", "infinite"):
        return  # and which bits a NaN has
    if kernels == "torch":
        monkeypatch.setattr(codec_kernels, "on_gpu", lambda codec, device: None)
    else:
        assert codec_kernels.on_gpu(codec, torch.device("cuda", 0)) is not None
    gen = torch.Generator().manual_seed(3)
    for e in (None, torch.randn(N, generator=gen) * x.abs().clamp(max=1.0).nan_to_num()):
        how = {"codec": name, "rows": ROWS, "row": ROW}
        code, left = o.encode_residual(x, e, KEY, **how)
        on_gpu = x.cuda(), None if e is None else e.cuda(), KEY.cuda()
        got, rest = o.encode_residual(*on_gpu, **how)
        assert torch.equal(got.cpu(), code) and same(rest, left)
        assert torch.equal(o.encode(on_gpu[0] if e is None else on_gpu[0] + on_gpu[1], KEY.cuda(), **how), got)
        for read, shape in ((o.decode, (N,)), (o.decode_sum, (ROW,)), (o.decode_sum, (ROW - 9,))):
            want = read(code, KEY, codec=name, row=ROW, shape=shape)
            assert same(read(got, KEY.cuda(), codec=name, row=ROW, shape=shape), want)
        own = x.cuda()
        again, over = o.encode_residual.kernel(own, *on_gpu[1:], **how, over=True)
        assert torch.equal(again, got) and same(over, left)
        assert (over.data_ptr() == own.data_ptr()) == (kernels == "triton")


@pytest.mark.parametrize("share", [0.5, 0.2, 1.0])
@pytest.mark.parametrize("kind", hostile())
def test_what_is_remembered_in_8_bits_is_the_same(kind, share):
    gen = torch.Generator().manual_seed(4)
    e, lost = torch.randn(N, generator=gen) * 0.1, hostile()[kind]
    how = {"axes": ("dp",), "share": share}
    want, got = o.averaged_error(e, lost, KEY, **how), o.averaged_error(e.cuda(), lost.cuda(), KEY.cuda(), **how)
    assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8).cpu(), want.view(torch.uint8))
