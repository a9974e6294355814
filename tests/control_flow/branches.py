"""Branches: `if` in all its forms, and the logic of conditions."""

from __future__ import annotations

import torch

from control_flow.case import N, T, X, Y, case

# -- if --------------------------------------------------------------------------------------------------------------


@case((X,), (-X,), has={"cond"})
def if_else(x):
    if x.sum() > 0:
        y = x * 2
    else:
        y = -x
    return y + 1


@case((X,), (-X,), has={"cond"})
def if_only(x):
    if x.sum() > 0:
        x = x * 3
    return x.sin()


@case((X,), (X - 1,), (X - 5,), has={"cond"})
def elif_chain(x):
    s = x.sum()
    if s > 0.5:
        y = x.exp()
    elif s > -3:
        y = x * x
    elif s > -100:
        y = x.cos()
    else:
        y = x
    return y


@case((X, Y), (-X, Y), (X, -Y), (-X, -Y), has={"cond"})
def nested_if(x, y):
    if x.sum() > 0:
        if y.sum() > 0:
            z = x + y
        else:
            z = x - y
        z = z * 2
    else:
        z = x * y if y.sum() > 0 else x / (y + 3)
    return z


@case((X,), (-X,), has={"cond"})
def early_return(x):
    if x.sum() > 0:
        return x * 2
    return x.exp()


@case((X,), (X - 1,), (X - 5,), has={"cond"})
def many_returns(x):
    if x.sum() > 0.5:
        return x
    y = x * 2
    if y.sum() > -10:
        return y.sin()
    z = y + 1
    return z.cos()


@case((X,), (-X,), (X + 5,), has={"cond"})
def return_in_the_middle(x):
    if x.sum() > 0:
        x = x * 2
        if x.sum() > 10:
            return x - 1
        x = x + 1
    return x * 3


@case((X,), (-X,), has={"cond"})
def return_tuples(x):
    if x.sum() > 0:
        return x, x * 2, {"a": x.sum()}
    return -x, x + 1, {"a": x.mean()}


@case((X,), (-X,), has={"cond"})
def conditional_expression(x):
    return x * 2 if x.sum() > 0 else x.exp()


@case((X,), (-X,), has={"where"})
def conditional_number(x):
    return x * (2 if x.sum() > 0 else 0.5)


@case((X,), (-X,), has={"where"})
def numbers_of_branches(x):
    if x[0] > 0:
        sign, n = 1.0, 3
    else:
        sign, n = -1.0, 5
    return x * sign + n / 7


@case((X,), (X.abs(),), (-X,), has={"cond"})
def alike(x):
    w = torch.ones(3, requires_grad=True)[0]
    same = torch.equal(x * w, x.abs() * w)
    near = torch.allclose(x * w, -x.abs(), atol=0.5)
    if same and not near:
        return x.exp()
    return x * 3 if torch.equal(x[:1], x) else x * (2 if near else 5)


@case((X,), (-X,), has={"cond"})
def number_or_tensor(x):
    scale = 1.5
    if x.sum() > 0:
        scale = x.abs().sum()
    return x * scale


@case((X,), (-X,), has={"cond"})
def first_defined_in_branches(x):
    if x.sum() > 0:
        a, b = x, x * 2
    else:
        b, a = x.sin(), x + 1
    return a * b


@case((X,), (-X,), has={"cond"})
def temporary_in_one_branch(x):
    if x.sum() > 0:
        t = x.exp()
        y = t * t
    else:
        y = x
    return y


@case((X,), (-X,), has={"cond"})
def unpacking_in_branches(x):
    if x.sum() > 0:
        (a, b), *rest = (x, x + 1), x * 2, x * 3
    else:
        (a, b), *rest = (x - 1, x), x * 5, x * 7
    return a + b * rest[0] - rest[1]


@case((X,), (-X,), has={"cond"})
def augmented(x):
    y = x.clone()
    z = y
    if x.sum() > 0:
        y += 1
        y *= 2
    else:
        y -= x
    return y + z


@case((X,), (-X,), has={"cond"})
def in_place_in_a_branch(x):
    y = torch.zeros(4, dtype=x.dtype)
    if x.sum() > 0:
        y[1:] = x
        y[0].add_(x.sum())
    else:
        y[:3].copy_(x * 2)
    return y * 2


@case((X,), (-X,), has={"cond"})
def same_python_value(x):
    if x.sum() > 0:
        kind, y = "a", x
    else:
        kind, y = "a", -x
    return y * len(kind)


@case((X,), (-X,), has={"cond"})
def pass_and_nothing(x):
    if x.sum() > 0:
        pass
    else:
        x = x - 1
    return x


@case((X,), (-X,), has=())
def static_conditions(x, flag=True, mode="b"):
    if flag and mode == "b":
        x = x * 2
    if not flag or mode is None:
        x = x * 100
    return x


@case((X,), (-X,), has=())
def known_tensors_are_static(x):
    if torch.ones(3).sum() > 2:
        x = x * 2
    return x


# -- logic -----------------------------------------------------------------------------------------------------------


@case((X, Y), (-X, Y), (X, -Y), (-X, -Y), has={"cond"})
def and_or_not(x, y):
    a, b = x.sum() > 0, y.sum() > 0
    if a and not b or b and not a:
        return x + y
    return x * y


@case((T(0.5),), (T(-0.5),), (T(3.0),), has={"cond"})
def chained_comparison(x):
    if 0 < x < 1:
        return x * 2
    return x / 3


@case((T(0.5), T(2.0)), (T(-0.5), T(1.0)), (T(3.0), T(2.0)), (T(3.0), T(3.0)), has={"cond"})
def long_chain(x, y):
    return x * 2 if -1 < x <= y != 3 else y


@case((X, N(0)), (X, N(2)), (X, N(5)), has={"cond"})
def lazy_and(x, i):
    if i < 3 and x[i] > 0:
        return x * 2
    return x


@case((X,), (-X,), has={"cond"})
def python_and_tensor(x, flag=True):
    if flag and x.sum() > 0:
        x = x * 2
    if x is not None and (x.sum() > 0 or not flag):
        x = x + 1
    return x


@case((X,), (-X,), (X * 0 - 0.1,), has={"cond"})
def any_all(x):
    if any(v > 1.5 for v in x):
        return x * 2
    if all(v < 0 for v in x):
        return x * 3
    return x


@case((T(0.5), T(2.0)), (T(2.0), T(0.5)), has={"cond"})
def max_min(x, y):
    return max(x, y) * 2 + min(x, y, x * y) * 3


@case((T(0.5), T(2.0)), (T(2.0), T(0.5)), has={"cond"})
def max_min_of_what_is_made_one_by_one(x, y):
    named = {"x": x, "y": y, "both": x * y}
    return max(v * 2 for v in named.values()) + min(named.values()) * 3 - max(map(torch.square, (x, y)), default=x)


@case((X,), (-X,), has={"cond"})
def not_of_a_tensor(x):
    if not x.sum() > 0:
        return x * 2
    return x


@case((X,), (X * 0,), has={"cond"})
def truth_of_a_float(x):
    if x.abs().sum():
        return x * 2 + 1
    return x


@case((X[:1],), (-X[:1],), has={"cond"})
def one_element(x):
    if x > 0:
        return x * 2
    return x * 3


@case((X,), (-X,), has={"cond"})
def walrus(x):
    if (s := x.sum()) > 0 and (m := x.max()) > 1:
        return x * s * m
    return x + s
