"""Plain values that Python keeps, which calls that stay Python change, or gradient functions do: other code finds them
as it does in torch."""

import copy

import pytest
import torch
from torch import nn

import mycel

pytestmark = pytest.mark.filterwarnings("ignore:.*runs as plain Python")
X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.how = nn.Linear(3, 3, dtype=torch.float64), how
        self.calls, self.later, self.text = 0, 0, "a"

    def forward(self, x):
        return self.how(self, x)

    def python_state(self):
        return self.calls, self.later, self.text


def counted(m, y):
    assert str(y)[0] == "t"
    m.calls += 1
    return y.sum()


def lengthened(m, y):
    assert str(y)[0] == "t"
    m.text = m.text + "b"
    return y.sum()


def counts_too(m, x):
    m.calls += 1
    y = m.linear(x)
    return y.square().mean() + counted(m, y)


def reads_behind(m, x):
    y = m.linear(x)
    s = counted(m, y)
    return y.square().mean() * m.calls + s


def reads_before(m, x):
    y = m.linear(x) * (m.calls + 1)
    return y.square().mean() + counted(m, y)


def reads_text(m, x):
    y = m.linear(x)
    s = lengthened(m, y)
    return y.square().mean() * len(m.text) + s


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.save_for_backward(x)
        ctx.model = m
        m.calls += 1
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        ctx.model.later += 1
        return g * x.cos(), None


def counts_in_backward(m, x):
    return Counts.apply(m.linear(x), m).square().mean()


def reads_what_backward_counts(m, x):
    return Counts.apply(m.linear(x), m).square().mean() * (1 + m.later)


ALL = [counts_too, reads_behind, reads_before, reads_text, counts_in_backward, reads_what_backward_counts]


@pytest.mark.parametrize("how", ALL, ids=lambda f: f.__name__)
def test_calls_and_steps_are_those_of_torch(how):
    model, trained = Net(how), Net(how)
    twin, plain = copy.deepcopy(model), copy.deepcopy(trained)
    fast = mycel.jit(model)
    step = mycel.train_step(trained, torch.optim.SGD(trained.parameters(), lr=0.1), compile=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        torch.testing.assert_close(fast(X), twin(X))
        optimizer.zero_grad()
        wanted = plain(X)
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(step(X), wanted.detach())
        assert model.python_state() == twin.python_state()
        assert trained.python_state() == plain.python_state()
    assert len(fast.entries) <= 2 and len(step.entries) <= 2


def test_backward_of_a_jitted_call_counts_when_it_runs():
    model = Net(reads_what_backward_counts)
    twin = copy.deepcopy(model)
    fast = mycel.jit(model)
    for _ in range(3):
        ours, theirs = fast(X), twin(X)
        assert model.python_state() == twin.python_state()
        ours.backward()
        theirs.backward()
        torch.testing.assert_close(ours, theirs)
        assert model.python_state() == twin.python_state()


def test_a_gradient_function_that_changes_what_python_keeps_is_refused_without_islands():
    with pytest.raises(mycel.CaptureError, match=r"a gradient function changes later, which Python keeps"):
        mycel.jit(Net(counts_in_backward), strict=True)(X)


def test_a_number_that_nobody_else_asks_for_is_no_part_of_the_program():
    def alone(m, y):
        assert str(y)[0] == "t"
        m.seen += 1
        return y.sum()

    model = Net(lambda m, x: m.linear(x).square().mean() + alone(m, x @ m.linear.weight))
    model.seen = 0
    fast = mycel.jit(model)
    for k in (1, 2, 3):
        fast(X)
        assert model.seen == k
    assert len(fast.entries) == 1
    assert not fast.program(X).updates
