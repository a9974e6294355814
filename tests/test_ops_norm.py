"""What the laws cannot see of normalisation: gradients through the statistics, running statistics, mixed dtypes."""

from __future__ import annotations

import pytest
import torch

from mycel.ir import Builder, Type
from mycel.ops import RULES, o

F64 = torch.float64


@pytest.mark.parametrize("name, params", [("layer_norm", {"eps": 1e-3}), ("batch_norm", {"eps": 1e-3})])
@pytest.mark.parametrize("given", [(0, 1, 2), (1,), (2,)])
def test_cotangents_of_the_statistics(name, params, given):
    op = getattr(o, name)
    inputs = [torch.randn(s, dtype=F64, requires_grad=True) for s in ((6, 4), (4,), (4,))]
    outs = op.expand(*inputs, **params)
    g = tuple(torch.randn_like(y) if i in given else None for i, y in enumerate(outs))
    want = torch.autograd.grad([outs[i] for i in given], inputs, [g[i] for i in given], allow_unused=True)
    plain = [x.detach() for x in inputs]
    got = op.vjp(g, op(*plain, **params), *plain, **params)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(*(torch.zeros(()) if v is None else v for v in (a, b)))


class Recorder(Builder):
    """A builder that keeps what rules assign."""

    def assign(self, target, value):
        self.assigned = {**getattr(self, "assigned", {}), target.name: value}


@pytest.mark.parametrize("function", [torch.nn.functional.batch_norm, torch.nn.functional.instance_norm])
def test_running_statistics_move_as_torch_moves_them(function):
    x, mean, var = torch.randn(3, 4, 5, dtype=F64), torch.randn(4, dtype=F64), torch.rand(4, dtype=F64)
    b = Recorder()
    ins = [b.input(n, Type(v.dtype, tuple(v.shape))) for n, v in (("x", x), ("mean", mean), ("var", var))]
    last = {"training": True} if function is torch.nn.functional.batch_norm else {"use_input_stats": True}
    with b:
        y = RULES[function](*ins, momentum=0.3, **last)
    env = {"x": x, "mean": mean, "var": var}
    for e in b.eqns:
        outs = e.op.kernel(*(env[a.name] if hasattr(a, "name") else a for a in e.inputs), **e.params)
        env.update(zip([v.name for v in e.outputs], outs if isinstance(outs, tuple) else (outs,), strict=True))
    want = function(x, mean := mean.clone(), var := var.clone(), momentum=0.3, **last)
    torch.testing.assert_close(env[y.name], want)
    torch.testing.assert_close(env[b.assigned["mean"].name], mean)
    torch.testing.assert_close(env[b.assigned["var"].name], var)


@pytest.mark.parametrize("name, params", [("layer_norm", {}), ("batch_norm", {}), ("group_norm", {"groups": 2})])
def test_16_bit_values_with_32_bit_weights(name, params):
    op, params = getattr(o, name), {"eps": 1e-5, **params}
    x, w, b = torch.randn(6, 4).bfloat16(), torch.randn(4), torch.randn(4)
    y, *stats = op(x, w, b, **params)
    assert y.dtype == torch.bfloat16 and {s.dtype for s in stats} == {torch.float32}
    g = torch.randn(6, 4)
    got = op.vjp((g.bfloat16(), None, None), (y, *stats), x, w, b, **params)
    wide = op(x.float(), w, b, **params)
    want = op.vjp((g.bfloat16().float(), None, None), wide, x.float(), w, b, **params)
    assert [v.dtype for v in got] == [torch.bfloat16, torch.float32, torch.float32]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b, atol=5e-2, rtol=2e-2)
