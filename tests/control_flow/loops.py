"""Loops: `while` and `for`, their exits, and the state they carry."""

from __future__ import annotations

import torch

from control_flow.case import N, T, X, case

# -- while -----------------------------------------------------------------------------------------------------------


@case((X,), (-X,), (X + 50,), has={"loop"})
def while_tensor(x):
    while x.sum() < 10:
        x = x * 1.5 + 1
    return x


@case((X,), (-X,), (X + 50,), has={"loop"})
def while_counter(x):
    n = 0
    while x.sum() < 10:
        x = x + 1
        n += 1
    return x * n


@case((X, N(0)), (X, N(1)), (X, N(7)), has={"loop"})
def while_python_counter(x, n):
    i = 0
    while i < n:
        x = x + i * 0.1
        i = i + 1
    return x / (i + 1)


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_two(x):
    y = x
    while x.sum() < 20 and y.sum() < 100:
        x, y = x + 1, y + x.abs()
    return x - y


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_break(x):
    while True:
        x = x * 1.5 + 0.5
        if x.abs().sum() > 30:
            break
        x = x + 0.1
    return x


@case((X,), (X * 3,), (X + 50,), has={"loop", "cond"})
def while_break_middle(x):
    n = 0
    while n < 12:
        if x.sum() > 20:
            break
        x = x + 1
        n = n + 1
    return x * n


@case((X,), (X * 3,), (X + 50,), has={"loop", "cond"})
def while_continue(x):
    n = (x.sum() * 0).long()
    while n < 9:
        n = n + 1
        if x.sum() > 10:
            continue
        x = x + n
    return x


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_return(x):
    while x.sum() < 40:
        if x.max() > 12:
            return x * 2
        x = x + 1
    return x - 7


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_else(x):
    while x.sum() < 15:
        x = x + 1
        if x[0] > 4:
            break
    else:
        x = x * 2
    return x


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def while_walrus(x):
    while (s := x.sum()) < 15:
        x = x + 1
    return x * s


@case((X,), (X + 5,), has={"loop"})
def nested_while(x):
    total = x * 0
    while x.sum() < 12:
        y = x
        while y.max() < 6:
            y = y + 1
        total = total + y
        x = x + 1.25
    return total


@case((X,), (-X,), (X + 30,), has={"loop"})
def while_float_counter(x):
    scale = 1.0
    while x.sum() * scale < 5:
        scale = scale * 1.5
        x = x + 1
    return x * scale


@case((X,), (X * 3,), has={"loop"})
def fixed_point(x):
    y = x
    delta = T(1.0)
    while delta > 1e-3:
        new = (y + x.abs() / (y.abs() + 1)) * 0.5
        delta = (new - y).abs().max()
        y = new
    return y


@case((T(2.0),), (T(5.0),), (T(0.1),), has={"loop"})
def newton(x):
    root = x
    for _ in range(100):
        step = (root * root - x) / (2 * root)
        root = root - step
        if step.abs() < 1e-9:
            break
    return root


@case((X,), (X + 5,), has={"loop"})
def while_tuple_state(x):
    state = (x, x.sum())
    while state[1] < 12:
        a, _ = state
        state = (a + 1, (a + 1).sum())
    return state[0] * state[1]


@case((X,), (X + 5,), has={"loop"})
def while_dict_state(x):
    state = {"x": x, "n": 0}
    while state["x"].sum() < 12:
        state["x"] = state["x"] + 1
        state["n"] += 1
    return state["x"] * state["n"]


@case((X,), (X + 5,), has={"loop"})
def while_list_items(x):
    state = [x, 0.5]
    while state[0].sum() < 12:
        state[0] = state[0] + state[1]
        state[1] = state[1] * 1.1
    return state[0] * state[1]


@case((X,), (X + 5,), has={"loop"})
def while_in_place(x):
    y = x.clone()
    alias = y
    while y.sum() < 12:
        y += 1
        y[0] *= 1.1
    return y * alias


@case((X,), (X + 5,), has={"loop"})
def while_temporary(x):
    while x.sum() < 12:
        t = x * 2
        x = t - x + 1
    return x


@case((X, N(1)), (X, N(4)), has={"loop"})
def defined_in_the_loop(x, n):
    i = 0
    while i < n:
        y = x * i
        i += 1
    return y


# -- for -------------------------------------------------------------------------------------------------------------


@case((X, N(0)), (X, N(1)), (X, N(6)), has={"loop"})
def for_tensor_range(x, n):
    for i in range(n):
        x = x + i * x.sin()
    return x


@case((X, N(0), N(9)), (X, N(3), N(4)), (X, N(5), N(2)), has={"loop"})
def for_range_bounds(x, a, b):
    for i in range(a, b, 2):
        x = x + i
    return x


@case((X, N(0)), (X, N(7)), has={"loop"})
def for_range_down(x, n):
    for i in range(n, 0, -2):
        x = x * 1.1 + i
    return x


@case((X, N(0)), (X, N(7)), has={"loop"})
def for_range_sum(x, n):
    total = 0.0
    for i in range(n):
        total = total + x.sum() * i
    return x * total


@case((X,), has=())
def for_short_range(x):
    for i in range(5):
        x = x + i
    return x


@case((X,), (-X,), has={"scan"})
def for_long_range(x):
    for i in range(40):
        x = x + i * 0.1 * x.cos()
    return x


@case((X,), has={"scan"})
def for_long_sum(x):
    total = 0
    for i in range(3, 60, 2):
        total = total + x * i
    return total


@case((X,), has={"scan"})
def for_long_division(x):
    s = 0.0
    for i in range(1, 30):
        s += 1 / i
    for i in range(1, 30):
        x = x + s / i * x.sin() + i // 3 - i % 4 + 0.5**i
    return x


@case((X,), (X * 3,), has={"scan", "cond"})
def for_long_continue(x):
    for i in range(30):
        if x.sum() > 5 + i:
            continue
        x = x + 1
    return x


@case((X,), (X * 3,), (X + 50,), has={"loop"})
def for_long_break(x):
    for i in range(60):
        if x.sum() > 30:
            break
        x = x + i * 0.5
    return x * i


@case((X, N(20)), (X * 3, N(20)), (X + 50, N(2)), (X, N(2)), has={"loop"})
def for_tensor_break(x, n):
    for _ in range(n):
        x = x + 1
        if x.sum() > 15:
            break
    else:
        x = x * 100
    return x


@case((X,), (X * 3,), (X + 50,), has={"cond"})
def for_short_break(x):
    for i in range(6):
        if x.sum() > 6:
            break
        x = x + i
    return x


@case((X,), (X * 3,), (X + 50,), has={"cond"})
def for_short_return(x):
    for i in range(6):
        if x.sum() > 6:
            return x * i
        x = x + 1
    return x - 1


@case((X,), (X * 3,), (X + 50,), has={"cond"})
def for_list_break(x):
    for w in [1.0, 2.0, 3.0]:
        x = x * w
        if x.sum() > 6:
            break
    return x


@case((X,), (X * 3,), has={"cond"})
def for_zip_enumerate(x):
    for i, (a, b) in enumerate(zip([1.0, 2.0, 3.0], [x, x + 1, x * 2], strict=True)):
        if b.sum() > 2:
            x = x + a * b + i
    return x


@case((X,), (X * 3,), has={"cond"})
def for_dict(x):
    for name, w in {"a": 1.0, "bb": 2.0}.items():
        if x.sum() > w:
            x = x - w * len(name)
    return x


@case((X,), (-X,), has=())
def for_rows(x):
    total = 0
    for row in torch.stack([x, x * 2, x.sin()]):
        total = total + row * row
    return total


@case(
    (torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(20, 3),),
    (torch.linspace(2, 1, 60, dtype=torch.float64).reshape(20, 3),),
    has={"scan"},
)
def for_many_rows(xs):
    h = torch.zeros(3, dtype=torch.float64)
    for x in xs:
        h = torch.tanh(h * 0.5 + x)
    return h


@case(
    (torch.linspace(-1, 1, 20, dtype=torch.float64),),
    (torch.linspace(2, 1, 20, dtype=torch.float64),),
    has={"scan", "cond"},
)
def for_numbers_of_a_tensor(xs):
    s = T(0.0)
    for x in xs:
        if x > 0:
            s = s + x * x
        else:
            s = s - x
    return s


@case((X,), (X * 3,), has={"scan"})
def nested_for(x):
    for i in range(20):
        for j in range(3):
            x = x + i * j * 0.01
    return x


@case((X, N(2)), (X, N(5)), has={"loop"})
def triangle(x, n):
    for i in range(n):
        for j in range(i):
            x = x + j * x.sin() * 0.1
    return x


@case((X, N(2)), (X, N(5)), has={"loop"})
def for_indexing(x, n):
    y = torch.zeros(8, dtype=x.dtype)
    for i in range(n):
        y[i] = x[i % 3] * i
    return y


@case((X, N(0)), (X, N(3)), has={"loop"})
def loop_variable_afterwards(x, n):
    i = 10
    for i in range(n):  # noqa: B007
        x = x + 1
    return x * i


@case((X,), has={"scan"})
def lists_of_long_loops(x):
    table = [k * 0.5 for k in range(30)]
    for _ in range(20):
        x = x + 0.1
    for k in range(30):
        table[k] = table[k] + 1
    return x * table[7]
