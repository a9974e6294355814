"""Gradients through Python control flow: the whole zoo against torch.autograd of the plain function and against finite
differences."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from control_flow import CASES

import mycel

MODES = ["graph", "eager"]


def floats(args):
    return [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]


def leaves(out):
    if isinstance(out, torch.Tensor):
        return [out]
    values = out.values() if isinstance(out, dict) else out if isinstance(out, (tuple, list)) else ()
    return [x for v in values for x in leaves(v)]


def summed(fn):
    """One number of all float results."""

    def total(*args):
        value = torch.zeros((), dtype=torch.float64)
        for k, x in enumerate(leaves(fn(*args))):
            if x.is_floating_point():
                value = value + ((k + 1) * x * x.detach().cos() + x).sum()
        return value

    return total


def function(case):
    """(the function of a case, one that does the same without changing its state, a reset): some are modules, to be
    made."""
    if not isinstance(case.fn, type):
        return case.fn, case.fn, lambda: None
    module = case.fn().double()
    again = copy.deepcopy(module)

    def reset():
        for mine, old in zip(module.modules(), again.modules(), strict=True):
            mine.load_state_dict(copy.deepcopy(old.state_dict()))
            vars(mine).update({k: v.clone() for k, v in vars(old).items() if isinstance(v, torch.Tensor)})

    return module, lambda *args: copy.deepcopy(again)(*args), reset


def fresh(args):
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


def autograd(total, args, at):
    own = fresh(args)
    for i in at:
        own[i].requires_grad_()
    # an in-place update of a leaf is the function's business, not autograd's
    value = total(*(a * 1 if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in own))
    if not value.requires_grad:
        return value, [torch.zeros_like(own[i]) for i in at]
    grads = torch.autograd.grad(value, [own[i] for i in at], allow_unused=True)
    return value.detach(), [torch.zeros_like(own[i]) if g is None else g for i, g in zip(at, grads, strict=True)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_autograds(name, mode):
    case = CASES[name]
    at = floats(case.arguments[0])
    if not at:
        return
    fn, plain, reset = function(case)
    ours = mycel.value_and_grad(summed(fn), tuple(at), mode=mode)
    for args in case.arguments:
        want, theirs = autograd(summed(plain), args, at)
        reset()
        value, grads = ours(*fresh(args))
        assert torch.allclose(value, want, rtol=1e-12, atol=1e-12)
        for g, t in zip(grads, theirs, strict=True):
            assert torch.allclose(g, t, rtol=1e-10, atol=1e-10), (name, args)


STOPPED = {"with_no_grad", "library_decorator"}  # no_grad() hides dependence from the gradient, not from differences
CHAOTIC = {"for_long_range"}  # 40 turns of a chaotic map: a difference says nothing


@pytest.mark.parametrize("name", [n for n in CASES if n not in STOPPED | CHAOTIC])
def test_gradients_are_finite_differences(name):
    case = CASES[name]
    at = floats(case.arguments[0])
    fn, same, reset = function(case)
    plain = lambda *args: sum(
        float(((k + 1) * x + x.sin()).sum()) for k, x in enumerate(leaves(same(*args))) if x.is_floating_point()
    )

    def total(*args):
        value = torch.zeros((), dtype=torch.float64)
        for k, x in enumerate(leaves(fn(*args))):
            if x.is_floating_point():
                value = value + ((k + 1) * x + x.sin()).sum()
        return value

    if not at:
        return
    ours = mycel.grad(total, tuple(at))
    gen = torch.Generator().manual_seed(0)
    eps = 1e-6
    for given in case.arguments:
        # off the points where a decision tips
        args = [a * 1.0137 + 0.00731 * (i + 1) if i in at else a for i, a in enumerate(given)]
        reset()
        grads = ours(*fresh(args))
        vs = [torch.randn(args[i].shape, generator=gen, dtype=args[i].dtype) for i in at]
        sides = []
        for sign in (1, -1):
            moved = fresh(args)
            for i, v in zip(at, vs, strict=True):
                moved[i] = moved[i] + sign * eps * v
            sides.append(plain(*moved))
        exact = sum(float((g * v).sum()) for g, v in zip(grads, vs, strict=True))
        if abs(exact) < 1e6:  # beyond, a step of 1e-6 is not small
            assert math.isclose((sides[0] - sides[1]) / (2 * eps), exact, rel_tol=1e-4, abs_tol=1e-5), (name, args)


SECOND = [name for i, name in enumerate(CASES) if i % 3 == 0]


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives(name):
    """d/dx of |gradient|^2, and forward over reverse, against nested autograd."""
    case = CASES[name]
    at = floats(case.arguments[0])
    if not at:
        return
    i = at[0]
    fn, plain, reset = function(case)

    def squares(fn):
        def total(*args):
            value = torch.zeros((), dtype=torch.float64)
            for x in leaves(fn(*args)):
                if x.is_floating_point():
                    value = value + (x * x).sum()
            return value

        return total

    total = squares(fn)
    ours = mycel.grad(lambda *args: (mycel.grad(total, i)(*args) ** 2).sum(), i)
    for args in case.arguments:
        own = fresh(args)
        own[i].requires_grad_()
        moved = [a * 1 if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in own]
        value = squares(plain)(*moved)
        first = (
            torch.autograd.grad(value, own[i], create_graph=True, allow_unused=True)[0] if value.requires_grad else None
        )
        want = torch.zeros_like(own[i])
        if first is not None and first.requires_grad:
            second = torch.autograd.grad((first**2).sum(), own[i], allow_unused=True)[0]
            want = want if second is None else second
        reset()
        assert torch.allclose(ours(*fresh(args)), want, rtol=1e-8, atol=1e-8), (name, args)
        reset()
        t = torch.linspace(-1, 1, args[i].numel(), dtype=args[i].dtype).reshape(args[i].shape)
        pushed = mycel.jvp(lambda x, args=args: total(*args[:i], x, *args[i + 1 :]), (fresh(args)[i],), (t,))[1]
        along = torch.zeros(()) if first is None else (first.detach() * t).sum()
        assert torch.allclose(pushed, along.to(pushed.dtype), rtol=1e-8, atol=1e-8), (name, args)


def test_the_zoo_is_large():
    assert len(CASES) >= 80
