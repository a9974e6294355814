"""Random programs of nested if, while, for, break, continue and return, captured once, give what plain Python gives on
every input."""

from __future__ import annotations

import importlib.util
import itertools

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mycel

VARIABLES = ("a", "b", "c")
COUNT = itertools.count()


class Writer:
    """Draws a program and writes its source."""

    def __init__(self, random):
        self.random, self.lines, self.names = random, [], itertools.count()

    def program(self):
        self.lines = ["import torch", "", "", "def fn(x, y, n):", "    a, b, c, k = x * 1, y * 1, x - y, 0"]
        self.block(1, depth=0, loops=0)
        self.lines.append("    return a, b, c, k")
        return "\n".join(self.lines) + "\n"

    def put(self, indent, text):
        self.lines.append("    " * indent + text)

    def block(self, indent, depth, loops):
        for _ in range(self.random.randint(1, 3)):
            self.statement(indent, depth, loops)

    def statement(self, indent, depth, loops):
        kinds = ["assign", "assign", "augment", "swap", "count"]
        if depth < 3:
            kinds += ["if", "if", "while", "for", "choose"]
        if loops:
            kinds += ["break", "continue"]
        if depth:
            kinds.append("return")
        getattr(self, "put_" + self.random.choice(kinds))(indent, depth, loops)

    def put_assign(self, indent, depth, loops):
        self.put(indent, f"{self.variable()} = {self.expression()}")

    def put_augment(self, indent, depth, loops):
        self.put(indent, f"{self.variable()} {self.random.choice(['+=', '*=', '-='])} torch.tanh({self.expression()})")

    def put_swap(self, indent, depth, loops):
        self.put(indent, "a, b = b, a")

    def put_count(self, indent, depth, loops):
        self.put(indent, f"k = k + {self.random.choice(['1', '2', 'n'])}")

    def put_choose(self, indent, depth, loops):
        self.put(indent, f"{self.variable()} = {self.expression()} if {self.condition()} else {self.expression()}")

    def put_if(self, indent, depth, loops):
        self.put(indent, f"if {self.condition()}:")
        self.block(indent + 1, depth + 1, loops)
        if self.random.random() < 0.4:
            self.put(indent, f"elif {self.condition()}:")
            self.block(indent + 1, depth + 1, loops)
        if self.random.random() < 0.6:
            self.put(indent, "else:")
            self.block(indent + 1, depth + 1, loops)

    def put_while(self, indent, depth, loops):
        turn = f"t{next(self.names)}"
        self.put(indent, f"{turn} = 0")
        self.put(indent, f"while {turn} < {self.random.randint(0, 4)} and ({self.condition()}):")
        self.put(indent + 1, f"{turn} += 1")
        self.block(indent + 1, depth + 1, loops + 1)
        self.put_else(indent, depth, loops)

    def put_for(self, indent, depth, loops):
        turn = f"i{next(self.names)}"
        self.put(
            indent,
            (
                f"for {turn} in "
                f"{self.random.choice(['range(n)', 'range(3)', 'range(1, n + 2)', 'range(18)', '(0.5, 1.5)', 'x'])}:"
            ),
        )
        self.put(indent + 1, f"{self.variable()} = {self.expression()} + 0.1 * {turn}")
        self.block(indent + 1, depth + 1, loops + 1)
        self.put_else(indent, depth, loops)

    def put_else(self, indent, depth, loops):
        if self.random.random() < 0.25:
            self.put(indent, "else:")
            self.put_assign(indent + 1, depth, loops)

    def put_break(self, indent, depth, loops):
        self.put_jump(indent, "break")

    def put_continue(self, indent, depth, loops):
        self.put_jump(indent, "continue")

    def put_return(self, indent, depth, loops):
        self.put_jump(indent, f"return {self.variable()} * 2, a, {self.expression()}, k + 1")

    def put_jump(self, indent, text):
        self.put(indent, f"if {self.condition()}:")
        self.put(indent + 1, text)

    def variable(self):
        return self.random.choice(VARIABLES)

    def number(self):
        return self.random.choice(["0.5", "-0.25", "1.5", "2"])

    def expression(self):
        v, w, r = self.variable(), self.variable(), self.number()
        return self.random.choice(
            [
                f"torch.tanh({v} + {w})",
                f"{v} * {r}",
                f"torch.sin({v})",
                f"{v} + {r}",
                (f"torch.cos({v}) * {w}.clamp(-3, 3)"),
                f"-{v}",
                f"({v} - {w}) / 2",
            ]
        )

    def condition(self):
        v, w, r = self.variable(), self.variable(), self.number()
        return self.random.choice(
            [
                f"{v}.sum() > {r}",
                f"{v}[0] < {w}[1]",
                f"n > {self.random.randint(0, 2)}",
                f"not {v}.sum() > {w}.sum()",
                f"-1 < {v}.mean() < {r}",
                f"{v}.sum() > 0 and {w}.max() < {r}",
                f"{v}.sum() > 1 or n == 1",
                "k < 3",
            ]
        )


INPUTS = [
    (
        sign * torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64),
        torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64) * sign,
        n,
    )
    for sign in (1, -1)
    for n in (0, 1, 3)
]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_random_programs(tmp_path_factory, random):
    source = Writer(random).program()
    path = tmp_path_factory.mktemp("random") / f"program_{next(COUNT)}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fast = mycel.jit(module.fn)
    for x, y, n in INPUTS:
        wanted = module.fn(x, y, n)
        results = fast(x, y, torch.tensor(n))
        for a, b in zip(results, wanted, strict=True):
            torch.testing.assert_close(
                torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64), rtol=1e-10, atol=1e-10
            )
    assert len(fast.entries) == 1
    _check_gradients(module.fn)


def _check_gradients(fn):
    """Of all results together, against torch.autograd."""

    def total(x, y, n):
        value = 0.0
        for k, v in enumerate(fn(x, y, n)[:3]):
            value = value + (v * (k + 1)).sum()
        return value

    ours = mycel.grad(total, (0, 1))
    for x, y, n in INPUTS:
        leaves = x.clone().requires_grad_(), y.clone().requires_grad_()
        plain = total(leaves[0] * 1, leaves[1] * 1, n)
        try:
            wanted = torch.autograd.grad(plain, leaves, allow_unused=True) if plain.requires_grad else (None, None)
        except RuntimeError as e:
            assert "modified by an inplace operation" in str(e)  # torch cannot differentiate this one
            continue
        for a, b in zip(ours(x, y, torch.tensor(n)), wanted, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-8, atol=1e-8)
