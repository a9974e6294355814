"""Choice of kernels, last before running: two equations that one kernel does better.

h: f32[4,8] = linear(x, w)
y: f32[4,8] = add(h, b)                                         =>  y: f32[4,8] = linear_bias(x, w, b)

c: f32[2,8,5,5] = conv(x, w, …)
y: f32[2,8,5,5] = add(c, reshape(b, shape=(8,1,1)))             =>  y: f32[2,8,5,5] = conv_bias(x, w, b, …)

y: f32[2,4,8,16], lse: f32[2,4,8] = attention(q, k, v, mask)    =>  y: f32[2,4,8,16] = sdpa(q, k, v, mask)
                                                                    (if lse is not used; no window, cap or dropout)
"""

from __future__ import annotations

import functools
from dataclasses import replace

from mycel.ir import OPS, Block, Chain, Eqn, Program, Var, chains, rewrite
from mycel.ops import o


def fuse(program: Program, recorded: bool = False) -> Program:
    """add(linear) => linear_bias, add(conv) => conv_bias, attention without lse => sdpa.  `recorded`: torch's autograd
    takes gradients of what runs, so what only they see stays."""
    return rewrite(program, functools.partial(_fuse, recorded=recorded))


def _fuse(block: Block, recorded: bool) -> Block:
    uses = chains(block)
    producers = {v: eqn for eqn in block.eqns for v in eqn.outputs}
    gone: set[int] = set()
    eqns = []
    for eqn in block.eqns:
        new = eqn
        if eqn.op is o.carry and not recorded:  # gradients have been taken: only the value is left
            new = replace(eqn, op=OPS["stop_gradient"], inputs=eqn.inputs[:1])
        elif eqn.op is o.attention and _unused(uses[eqn.outputs[1]]) and _is_sdpa(eqn):
            new = replace(eqn, op=OPS["sdpa"], outputs=eqn.outputs[:1])
        elif eqn.op is o.add:
            for product, other in (eqn.inputs, eqn.inputs[::-1]):
                if not isinstance(product, Var) or not isinstance(other, Var):
                    continue
                inner = producers.get(product)
                if inner is None or id(inner) in gone:
                    continue
                bias = _bias(inner, other, producers)
                if bias is None or len(uses[product].uses) != 1 or uses[product].is_output or product == other:
                    continue
                fused = replace(
                    inner, op=OPS[f"{inner.op.name}_bias"], inputs=(*inner.inputs, bias), outputs=eqn.outputs
                )
                if fused.op.infer(fused.input_types, fused.params) == (eqn.outputs[0].type,):
                    gone.add(id(inner))
                    new = replace(fused, source=inner.source or eqn.source, phase=eqn.phase)
                    break
        eqns.append((eqn, new))
    kept = tuple(new for old, new in eqns if id(old) not in gone)
    return Block(block.inputs, kept, block.outputs)


def _bias(product: Eqn, other: Var, producers: dict[Var, Eqn]) -> Var | None:
    """The 1-D bias that `other` adds to every row of a linear, or to every channel of a conv."""
    out = product.outputs[0]
    if product.op is o.linear and out.ndim > 1 and other.shape == out.shape[-1:] and other.dtype == out.dtype:
        return other
    if product.op is o.conv and "conv_bias" in OPS:
        view = producers.get(other)
        channels = out.shape[1:2] + (1,) * (out.ndim - 2)
        if view is not None and view.op is o.reshape and other.shape in (channels, (1, *channels)):
            (bias,) = view.inputs
            if isinstance(bias, Var) and bias.shape == out.shape[1:2] and bias.dtype == out.dtype:
                return bias
    return None


def _is_sdpa(eqn: Eqn) -> bool:
    """Is it attention as torch has it: nothing but a mask, causal and scaled?"""
    return len(eqn.inputs) == 4 and not any(eqn.params.get(name) for name in ("window", "cap", "dropout"))


def _unused(chain: Chain) -> bool:
    return not chain.uses and not chain.is_output
