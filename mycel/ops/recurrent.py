"""Recurrent layers, LSTM and GRU: what runs from step to step is one operator, the rest are plain products.

    x = linear(rows, w_ih) + b_ih + b_hh           t b g    one product for all steps
    y, c, gates = lstm_steps(x, w_hh, h0, c0)      t b h, t b h, t b g

A GRU's hidden bias stands inside its candidate, so it goes with the steps.  What backward needs of a step does not
depend on other steps but by the cotangents of its state: all of that is computed at once before the way back.  In
fp32 on a CPU each step does what is between its products in one pass, in C (`recurrent.c`); on a GPU in one kernel
(`triton_recurrent.py`).
"""

from __future__ import annotations

import torch

from mycel.ir import op
from mycel.ops.capture_rules import captures, draw
from mycel.ops.random import dropout
from mycel.ops.rules import o


def _flops(d):
    return 2 * d.t * d.b * d.g * d.h


def _steps(x, *_):
    return x.shape[0]


def _row(x, i):
    """Step i of what has steps first."""
    shape = x.shape[1:]
    return o.reshape(o.slice(x, dim=0, start=i, stop=i + 1), shape=tuple(shape))


def _part(x, i, n):
    """The i-th of parts of n along the last dim."""
    return o.slice(x, dim=x.ndim - 1, start=i * n, stop=(i + 1) * n)


def _before(first, xs):
    """What each step begins with: `first`, then all but the last of xs."""
    t, b, n = xs.shape
    return o.cat(o.reshape(first, shape=(1, b, n)), o.slice(xs, dim=0, start=0, stop=t - 1), dim=0)


def _zeros(like):
    return o.full(0.0, shape=tuple(like.shape), dtype=like.dtype)


def _filled(gs, outs):
    """Cotangents that are not there are zeros."""
    return [_zeros(y) if g is None else g for g, y in zip(gs, outs, strict=True)]


def _slope(y):
    """Of a sigmoid, by its value."""
    return o.mul(y, o.sub(1.0, y))


def _tanh_slope(y):
    return o.sub(1.0, o.mul(y, y))


def _is_recorded(*xs):
    """Does torch's autograd follow?  It knows no gradient of what is written in place."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


def _native(*xs):
    """The functions in C where these may be their operands; code that has left this package does without."""
    if not all(x.is_cpu and x.dtype is torch.float32 for x in xs):
        return None
    try:
        from mycel.ops.native_recurrent import steps_in_c
    except ImportError:
        return None
    return steps_in_c()


def _on_gpu(*xs):
    """The kernels of Triton where these may be their operands."""
    if not all(x.is_cuda and x.dtype.itemsize <= 4 for x in xs):
        return None
    from mycel.ops import triton_recurrent

    return triton_recurrent


def _addresses(*xs):
    """Of each step's part of tensors with steps first, from the first step on."""
    return zip(*(range(x.data_ptr(), x.data_ptr() + x.numel() * 4, x[0].numel() * 4) for x in xs), strict=True)


# -- LSTM -------------------------------------------------------------------------------------------------------------


def _lstm_in_operators(x, w, h, c):
    n, ys, cs, gates = w.shape[1], [], [], []
    for step in range(x.shape[0]):
        z = o.add(_row(x, step), o.linear(h, w))
        i, f, a, out = ((o.tanh if k == 2 else o.sigmoid)(_part(z, k, n)) for k in range(4))
        c = o.add(o.mul(f, c), o.mul(i, a))
        h = o.mul(out, o.tanh(c))
        ys.append(h)
        cs.append(c)
        gates.append(o.cat(i, f, a, out, dim=1))
    return o.stack(*ys, dim=0), o.stack(*cs, dim=0), o.stack(*gates, dim=0)


def _lstm_grad_in_operators(gy, gc, w, c0, c, gates, g_gates=None):
    """`g_gates`: a cotangent of the gates themselves, which second derivatives have."""
    n = w.shape[1]
    i, f, a, out = (_part(gates, k, n) for k in range(4))
    tanh = o.tanh(c)
    by_c = o.cat(o.mul(a, _slope(i)), o.mul(_before(c0, c), _slope(f)), o.mul(i, _tanh_slope(a)), dim=2)
    by_h, through = o.mul(tanh, _slope(out)), o.mul(out, _tanh_slope(tanh))
    slopes = o.cat(_slope(i), _slope(f), _tanh_slope(a), _slope(out), dim=2)
    dh, dc, rows = _zeros(c0), _zeros(c0), []
    for step in reversed(range(c.shape[0])):
        dh = o.add(dh, _row(gy, step))
        dc = o.add(o.add(dc, _row(gc, step)), o.mul(dh, _row(through, step)))
        factors = _row(by_c, step)
        dz = o.cat(*[o.mul(_part(factors, k, n), dc) for k in range(3)], o.mul(_row(by_h, step), dh), dim=1)
        if g_gates is not None:
            dz = o.add(dz, o.mul(_row(g_gates, step), _row(slopes, step)))
        rows.append(dz)
        dc = o.mul(dc, _row(f, step))
        dh = o.matmul(dz, w)
    return o.stack(*reversed(rows), dim=0), dh, dc


def _lstm_vjp(g, outs, x, w, h0, c0):
    y, c, gates = outs
    gy, gc = _filled(g[:2], outs[:2])
    gradient = lstm_steps_grad if g[2] is None else lambda *operands: _lstm_grad_in_operators(*operands, g_gates=g[2])
    dx, dh, dc = gradient(gy, gc, w, c0, c, gates)
    return dx, o.linear_weight(dx, _before(h0, y)), dh, dc


@op(
    "t^ b g^, g^ h^, b h^, b h^ -> t^ b h^, t^ b h^, t^ b g^",
    vjp=_lstm_vjp,
    expand=_lstm_in_operators,
    flops=_flops,
    product=True,
    rate="product",
    apart=True,
    compiles=False,
    precision="low",
    turns=_steps,
    scratch=lambda x, w, h0, c0: w.bytes + 2 * h0.bytes,
    examples=["f[3,2,16], f[16,4], f[2,4], f[2,4]", "f[1,3,8], f[8,2], f[3,2], f[3,2]"],
)
def lstm_steps(x, w, h0, c0):
    """(hidden state, cell state, gates: input, forget, cell, output) of all steps; x: what comes to the gates from
    outside."""
    if _is_recorded(x, w, h0, c0):
        return _lstm_in_operators(x, w, h0, c0)
    t, b, g = x.shape
    n = w.shape[1]
    y, c, gates = x.new_empty(t, b, n), x.new_empty(t, b, n), x.new_empty(t, b, g)
    turned, h, cell = w.t().contiguous(), h0, c0.contiguous()  # as the product of a few rows reads it fastest
    native = _native(x, w, h0, c0)
    if native is not None and y.numel():
        before = cell.data_ptr()
        for xs, ys, z, (to_y, to_c, to_z) in zip(x, y, gates, _addresses(y, c, gates), strict=True):
            torch.addmm(xs, h, turned, out=z)
            native.mycel_lstm_step(to_z, before, to_c, to_y, b, n)
            h, before = ys, to_c
        return y, c, gates
    kernels = _on_gpu(x, w, h0, c0)
    if kernels is not None and y.numel():
        gates.copy_(x)
        for ys, cs, z in zip(y, c, gates, strict=True):
            z.addmm_(h, turned)
            kernels.lstm_step(z, cell, cs, ys)
            h, cell = ys, cs
        return y, c, gates
    for xs, ys, cs, z in zip(x, y, c, gates, strict=True):
        torch.addmm(xs, h, turned, out=z)
        i, f, a, out = z.split(n, 1)
        new = a.tanh()
        z.sigmoid_()
        a.copy_(new)
        torch.mul(i, a, out=cs)
        cs.addcmul_(f, cell)
        torch.tanh(cs, out=ys)
        ys.mul_(out)
        h, cell = ys, cs
    return y, c, gates


@op(
    "t^ b h^, t^ b h^, g^ h^, b h^, t^ b h^, t^ b g^ -> t^ b g^, b h^, b h^",
    expand=_lstm_grad_in_operators,
    flops=_flops,
    linear=((0, 1),),
    product=True,
    rate="product",
    apart=True,
    compiles=False,
    turns=_steps,
    scratch=lambda gy, gc, w, c0, c, gates: gy.bytes if gy.dtype == torch.float32 else gates.bytes,
    examples=[
        "f64[3,2,4], f64[3,2,4], f64[16,4], f64[2,4], f64[3,2,4], f64[3,2,16]",
        "f64[1,3,2], f64[1,3,2], f64[8,2], f64[3,2], f64[1,3,2], f64[1,3,8]",
    ],
)
def lstm_steps_grad(gy, gc, w, c0, c, gates):
    """Cotangents of what comes from outside, and of both states before the first step."""
    if _is_recorded(gy, gc, w, c0, c, gates):
        return _lstm_grad_in_operators(gy, gc, w, c0, c, gates)
    n = w.shape[1]
    dh, dc, dx = gy.new_zeros(c0.shape), gc.new_zeros(c0.shape), gates.new_empty(gates.shape)
    native = _native(gy, gc, w, c0, c, gates)
    if native is not None and dx.numel():
        gy, gc, c, gates, first = (x.contiguous() for x in (gy, gc, c, gates, c0))
        each = [*_addresses(gates, c, gy, gc, dx)]
        before = [first.data_ptr(), *(at_c for _, at_c, *_ in each[:-1])]
        for row, c_before, (at, at_c, at_gy, at_gc, to) in zip(
            reversed(dx.unbind()), reversed(before), reversed(each), strict=True
        ):
            native.mycel_lstm_step_back(at, c_before, at_c, at_gy, at_gc, dh.data_ptr(), dc.data_ptr(), to, len(c0), n)
            torch.mm(row, w, out=dh)
        return dx, dh, dc
    kernels = _on_gpu(gy, gc, w, c0, c, gates)
    if kernels is not None and dx.numel():
        gy, gc, c, gates = (x.contiguous() for x in (gy, gc, c, gates))
        dc = dc.float()
        before = [c0.contiguous(), *c[:-1]]
        for step in reversed(range(len(c))):
            kernels.lstm_step_back(gates[step], before[step], c[step], gy[step], gc[step], dh, dc, dx[step])
            torch.mm(dx[step], w, out=dh)
        return dx, dh, dc.to(gc.dtype)
    i, f, a, out = gates.split(n, 2)
    tanh = c.tanh()
    by_c, by_h = dx[:, :, : 3 * n].unflatten(2, (3, n)), dx[:, :, 3 * n :]  # factors first, then products with them
    torch.mul(a, i - i * i, out=by_c[:, :, 0])
    torch.mul(torch.cat([c0[None], c[:-1]]), f - f * f, out=by_c[:, :, 1])
    torch.mul(i, 1 - a * a, out=by_c[:, :, 2])
    torch.mul(tanh, out - out * out, out=by_h)
    through = out * (1 - tanh * tanh)
    for step in reversed(range(c.shape[0])):
        dh += gy[step]
        dc += gc[step]
        dc.addcmul_(dh, through[step])
        by_c[step].mul_(dc[:, None])
        by_h[step].mul_(dh)
        dc *= f[step]
        torch.mm(dx[step], w, out=dh)
    return dx, dh, dc


# -- GRU --------------------------------------------------------------------------------------------------------------


def _gru_in_operators(x, w, b, h):
    n, ys, gates, candidates = w.shape[1], [], [], []
    for step in range(x.shape[0]):
        outside, inside = _row(x, step), o.add(o.linear(h, w), b)
        r, z = (o.sigmoid(o.add(_part(outside, k, n), _part(inside, k, n))) for k in range(2))
        candidate = _part(inside, 2, n)
        new = o.tanh(o.add(_part(outside, 2, n), o.mul(r, candidate)))
        h = o.add(new, o.mul(z, o.sub(h, new)))
        ys.append(h)
        gates.append(o.cat(r, z, new, dim=1))
        candidates.append(candidate)
    return o.stack(*ys, dim=0), o.stack(*gates, dim=0), o.stack(*candidates, dim=0)


def _gru_grad_in_operators(gy, w, h0, y, gates, candidates, g_gates=None, g_candidates=None):
    """`g_gates`, `g_candidates`: cotangents that second derivatives have."""
    n = w.shape[1]
    r, z, new = (_part(gates, k, n) for k in range(3))
    by_new = o.mul(o.sub(1.0, z), _tanh_slope(new))
    by_z = o.mul(o.sub(_before(h0, y), new), _slope(z))
    of_r = o.mul(candidates, _slope(r))
    dh, outside, inside = _zeros(h0), [], []
    for step in reversed(range(y.shape[0])):
        dh = o.add(dh, _row(gy, step))
        d_new, dz = o.mul(_row(by_new, step), dh), o.mul(_row(by_z, step), dh)
        d_r = None
        if g_gates is not None:
            g_r, g_z, g_new = (_part(_row(g_gates, step), k, n) for k in range(3))
            d_new = o.add(d_new, o.mul(g_new, _row(_tanh_slope(new), step)))
            dz = o.add(dz, o.mul(g_z, _row(_slope(z), step)))
            d_r = o.mul(g_r, _row(_slope(r), step))
        dr = o.mul(_row(of_r, step), d_new)
        dr = dr if d_r is None else o.add(dr, d_r)
        d_candidate = o.mul(_row(r, step), d_new)
        if g_candidates is not None:
            d_candidate = o.add(d_candidate, _row(g_candidates, step))
        outside.append(o.cat(dr, dz, d_new, dim=1))
        inside.append(o.cat(dr, dz, d_candidate, dim=1))
        dh = o.add(o.mul(dh, _row(z, step)), o.matmul(inside[-1], w))
    return o.stack(*reversed(outside), dim=0), o.stack(*reversed(inside), dim=0), dh


def _gru_vjp(g, outs, x, w, b, h0):
    y, gates, candidates = outs
    gy = _zeros(y) if g[0] is None else g[0]
    operands = (gy, w, h0, y, gates, candidates)
    if g[1] is None and g[2] is None:
        dx, inside, dh = gru_steps_grad(*operands)
    else:
        dx, inside, dh = _gru_grad_in_operators(*operands, *_filled(g[1:], outs[1:]))
    return dx, o.linear_weight(inside, _before(h0, y)), o.sum(inside, dims=(0, 1)), dh


@op(
    "t^ b g^, g^ h^, g^, b h^ -> t^ b h^, t^ b g^, t^ b h^",
    vjp=_gru_vjp,
    expand=_gru_in_operators,
    flops=_flops,
    product=True,
    rate="product",
    apart=True,
    compiles=False,
    precision="low",
    turns=_steps,
    scratch=lambda x, w, b, h0: w.bytes + 2 * x.bytes // x.shape[0],
    examples=["f[3,2,12], f[12,4], f[12], f[2,4]", "f[1,3,6], f[6,2], f[6], f[3,2]"],
)
def gru_steps(x, w, b, h0):
    """(hidden state, gates: reset, update, new, the candidate before its reset) of all steps."""
    if _is_recorded(x, w, b, h0):
        return _gru_in_operators(x, w, b, h0)
    t, rows, g = x.shape
    n = w.shape[1]
    y, gates, candidates = x.new_empty(t, rows, n), x.new_empty(t, rows, g), x.new_empty(t, rows, n)
    turned, h = w.t().contiguous(), h0.contiguous()
    native = _native(x, w, b, h0)
    if native is not None and y.numel():
        x, before = x.contiguous(), h.data_ptr()
        for ys, (at, to_y, to_gates, to_candidate) in zip(y, _addresses(x, y, gates, candidates), strict=True):
            inside = torch.addmm(b, h, turned)
            native.mycel_gru_step(at, inside.data_ptr(), before, to_gates, to_candidate, to_y, rows, n)
            h, before = ys, to_y
        return y, gates, candidates
    kernels = _on_gpu(x, w, b, h0)
    if kernels is not None and y.numel():
        for xs, ys, z, candidate in zip(x.contiguous(), y, gates, candidates, strict=True):
            kernels.gru_step(xs, torch.addmm(b, h, turned), h, z, candidate, ys)
            h = ys
        return y, gates, candidates
    for xs, ys, z, candidate in zip(x, y, gates, candidates, strict=True):
        inside = torch.addmm(b, h, turned)
        torch.add(xs[:, : 2 * n], inside[:, : 2 * n], out=z[:, : 2 * n]).sigmoid_()
        candidate.copy_(inside[:, 2 * n :])
        reset, update, new = z.split(n, 1)
        torch.addcmul(xs[:, 2 * n :], reset, candidate, out=new).tanh_()
        torch.lerp(new, h, update, out=ys)
        h = ys
    return y, gates, candidates


@op(
    "t^ b h^, g^ h^, b h^, t^ b h^, t^ b g^, t^ b h^ -> t^ b g^, t^ b g^, b h^",
    expand=_gru_grad_in_operators,
    flops=_flops,
    linear=((0,),),
    product=True,
    rate="product",
    apart=True,
    compiles=False,
    turns=_steps,
    scratch=lambda gy, *_: gy.bytes,
    examples=[
        "f64[3,2,4], f64[12,4], f64[2,4], f64[3,2,4], f64[3,2,12], f64[3,2,4]",
        "f64[1,3,2], f64[6,2], f64[3,2], f64[1,3,2], f64[1,3,6], f64[1,3,2]",
    ],
)
def gru_steps_grad(gy, w, h0, y, gates, candidates):
    """Cotangents of what comes from outside, of the hidden state's product, and of the state before the first step."""
    if _is_recorded(gy, w, h0, y, gates, candidates):
        return _gru_grad_in_operators(gy, w, h0, y, gates, candidates)
    n = w.shape[1]
    dh, inside = gy.new_zeros(h0.shape), gates.new_empty(gates.shape)
    native = _native(gy, w, h0, y, gates, candidates)
    if native is not None and inside.numel():
        gy, y, gates, candidates, first = (x.contiguous() for x in (gy, y, gates, candidates, h0))
        outside = torch.empty_like(inside)
        each = [*_addresses(gates, candidates, y, gy, outside, inside)]
        before = [first.data_ptr(), *(at_y for _, _, at_y, *_ in each[:-1])]
        for row, h_before, (at, at_candidate, _, at_gy, to, to_inside) in zip(
            reversed(inside.unbind()), reversed(before), reversed(each), strict=True
        ):
            native.mycel_gru_step_back(at, at_candidate, h_before, at_gy, dh.data_ptr(), to, to_inside, len(h0), n)
            dh.addmm_(row, w)
        return outside, inside, dh
    kernels = _on_gpu(gy, w, h0, y, gates, candidates)
    if kernels is not None and inside.numel():
        gy, gates, candidates = (x.contiguous() for x in (gy, gates, candidates))
        outside = torch.empty_like(inside)
        before = [h0.contiguous(), *y.contiguous()[:-1]]
        for step in reversed(range(len(y))):
            last = gates[step], candidates[step], before[step], gy[step], dh, outside[step], inside[step]
            kernels.gru_step_back(*last)
            dh.addmm_(inside[step], w)
        return outside, inside, dh
    r, z, new = gates.split(n, 2)
    by_new = (1 - z) * (1 - new * new)
    torch.mul(by_new * candidates, r - r * r, out=inside[:, :, :n])
    torch.mul(torch.cat([h0[None], y[:-1]]) - new, z - z * z, out=inside[:, :, n : 2 * n])
    torch.mul(by_new, r, out=inside[:, :, 2 * n :])
    factors = inside.unflatten(2, (3, n))  # products with them, from here on
    for step in reversed(range(y.shape[0])):
        dh += gy[step]
        factors[step].mul_(dh[:, None])
        by_new[step].mul_(dh)
        dh = torch.addmm(dh * z[step], inside[step], w)
    outside = inside.clone()
    outside[:, :, 2 * n :] = by_new
    return outside, inside, dh


# -- torch's layers ---------------------------------------------------------------------------------------------------


@captures(torch.lstm)
def _lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first=None):
    if batch_first is None or hx[0].shape[-1] != hx[1].shape[-1]:
        return NotImplemented  # packed sequences; a projection of what goes from step to step
    h0, c0 = hx

    def layer(x, at, w_ih, w_hh, b_ih=None, b_hh=None):
        x = o.linear(x, w_ih)
        x = x if b_ih is None else o.add(x, o.add(b_ih, b_hh))
        y, c, _ = lstm_steps(x, w_hh, _row(h0, at), _row(c0, at))
        return y, _row(y, y.shape[0] - 1), _row(c, c.shape[0] - 1)

    return _stacked(layer, input, params, has_biases, num_layers, dropout if train else 0.0, bidirectional, batch_first)


@captures(torch.gru)
def _gru(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first=None):
    if batch_first is None:
        return NotImplemented  # packed sequences

    def layer(x, at, w_ih, w_hh, b_ih=None, b_hh=None):
        x = o.linear(x, w_ih)
        x = x if b_ih is None else o.add(x, b_ih)
        hidden = o.full(0.0, shape=(w_hh.shape[0],), dtype=w_hh.dtype) if b_hh is None else b_hh
        y, _, _ = gru_steps(x, w_hh, hidden, _row(hx, at))
        return y, _row(y, y.shape[0] - 1)

    return _stacked(layer, input, params, has_biases, num_layers, dropout if train else 0.0, bidirectional, batch_first)


def _stacked(layer, x, params, has_biases, layers, p, bidirectional, batch_first):
    """Layers on layers, each in one way or both: the last one's output, and the last states of all."""
    if x.shape[1 if batch_first else 0] == 0:
        raise ValueError("a recurrent layer has to be given at least one step, but the sequence has length 0")
    ways, each = 1 + bidirectional, 4 if has_biases else 2
    x = o.permute(x, dims=(1, 0, 2)) if batch_first else x
    states = []
    for number in range(layers):
        if number and p > 0:
            key, site = draw()
            x = dropout(x, key, 0, p=float(p), site=site)
        outs = []
        for way in range(ways):
            at = number * ways + way
            y, *last = layer(o.flip(x, dims=(0,)) if way else x, at, *params[at * each : (at + 1) * each])
            outs.append(o.flip(y, dims=(0,)) if way else y)
            states.append(last)
        x = o.cat(*outs, dim=2) if bidirectional else outs[0]
    x = o.permute(x, dims=(1, 0, 2)) if batch_first else x
    return x, *(o.stack(*each_state, dim=0) for each_state in zip(*states, strict=True))
