"""torch's dropouts in operators: each element, each channel, or SELU's kind; and ReLU with a random slope."""

from __future__ import annotations

import math

import torch

from mycel.ops.capture_rules import captures, draw
from mycel.ops.random import affine, bernoulli, dropout, fresh, uniform
from mycel.ops.rules import o


def _check_probability(p):
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: probability has to be between 0 and 1, but got {p}")


@captures(torch.nn.functional.dropout, torch.dropout, "aten.dropout.default")
def _dropout(input, p=0.5, training=True, inplace=False, *, train=None):
    _check_probability(p)
    if not (training if train is None else train) or p == 0:
        return input
    if inplace:
        return NotImplemented
    key, site = draw()
    return dropout(input, key, 0, p=float(p), site=site)


@captures("aten.native_dropout.default")
def _native_dropout(x, p, train):
    ones = o.full(1.0, shape=tuple(x.shape), dtype=torch.float32)
    if train is False or p == 0:
        return x, o.ne(ones, 0)
    key, site = draw()
    params = {"p": float(p), "site": site}
    return dropout(x, key, 0, **params), o.ne(dropout(ones, key, 0, **params), 0)


def _noise(x, p, feature):
    """1 where kept, for each element or for each channel (dims 0 and 1) of x."""
    shape = tuple(n if d < 2 else 1 for d, n in enumerate(x.shape)) if feature else tuple(x.shape)
    key, site = draw()
    return bernoulli(key, 0, 1.0 - p, shape=shape, dtype=x.dtype, site=site)


def _feature_dropout(x, p):
    return o.mul(x, 0.0 if p == 1 else o.mul(_noise(x, p, feature=True), 1.0 / (1.0 - p)))


def _alpha_dropout(x, p, feature):
    """Dropped elements take SELU's negative limit; an affine map keeps mean 0 and variance 1."""
    if p == 1:
        return o.mul(x, 0.0)
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    noise = _noise(x, p, feature)
    shift = affine(noise, alpha * a, alpha * a * (p - 1.0))
    return o.add(o.mul(x, o.mul(noise, a)), shift)


@captures(torch.feature_dropout, torch.nn.functional.dropout2d)
def _dropout_channels(input, p=0.5, training=True, inplace=False, *, train=None):
    _check_probability(p)
    if not (training if train is None else train) or p == 0:
        return input
    return NotImplemented if inplace else _feature_dropout(input, p)


@captures(torch.nn.functional.dropout1d)
def _dropout1d(input, p=0.5, training=True, inplace=False):
    return _with_batch(_dropout_channels, 3, input, p, training, inplace)


@captures(torch.nn.functional.dropout3d)
def _dropout3d(input, p=0.5, training=True, inplace=False):
    return _with_batch(_dropout_channels, 5, input, p, training, inplace)


def _with_batch(rule, ndim, x, p, training, inplace):
    """The rule on x with a batch dim, where it has none."""
    if x.ndim == ndim or inplace or not training or p == 0:
        return rule(x, p, training, inplace)
    return o.reshape(rule(o.reshape(x, shape=(1, *x.shape)), p, training), shape=tuple(x.shape))


@captures(torch.nn.functional.alpha_dropout, torch.alpha_dropout)
def _alpha(input, p=0.5, training=False, inplace=False, *, train=None):
    _check_probability(p)
    if not (training if train is None else train) or p == 0:
        return input
    return NotImplemented if inplace else _alpha_dropout(input, p, feature=False)


@captures(torch.nn.functional.feature_alpha_dropout, torch.feature_alpha_dropout)
def _feature_alpha(input, p=0.5, training=False, inplace=False, *, train=None):
    _check_probability(p)
    if not (training if train is None else train) or p == 0:
        return input
    return NotImplemented if inplace else _alpha_dropout(input, p, feature=True)


@captures(torch.nn.functional.rrelu)
def _rrelu(input, lower=1.0 / 8, upper=1.0 / 3, training=False, inplace=False):
    """A leaky ReLU whose slope is drawn for each element."""
    if inplace:
        return NotImplemented
    if not training:
        return o.leaky_relu(input, slope=(lower + upper) / 2)
    slope = affine(fresh(uniform, input.shape, input.dtype), upper - lower, lower)
    return o.where(o.le(input, 0), o.mul(input, slope), input)
