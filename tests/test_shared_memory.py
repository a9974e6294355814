"""Tensors outside of the code that share memory, of which it writes one, and views that calls which stay Python are
given: what is written into either shows in both, as in torch."""

import copy

import pytest
import torch
from torch import nn

import mycel

X = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, forward, kind):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
        self.how = forward
        big = torch.zeros(8, 4, dtype=torch.float64)
        match kind:
            case "buffers":
                self.register_buffer("big", big)
                self.register_buffer("row", big[2])
                self.register_buffer("flat", big.view(-1))
                self.register_buffer("column", big[:, 1])
            case "attributes":
                self.big, self.row = big, big[2]
            case "turned":
                self.register_buffer("big", big.view(4, 8).T)
                self.register_buffer("row", self.big[2])
            case "parameter":
                self.register_buffer("flat", self.w.data.view(-1))
            case "detached":
                self.fixed = self.w.detach()
            case "overlapping":
                memory = torch.zeros(10, dtype=torch.float64)
                self.register_buffer("first", memory[:6])
                self.register_buffer("last", memory[4:])

    def forward(self, x):
        return self.how(self, x)

    def out(self, x):
        return x @ self.w.T

    def mean(self, x):
        return self.out(x).detach().mean(0)


def writes_the_whole(m, x):
    m.big.add_(m.mean(x))
    return (m.out(x) - m.row).square().mean()


def writes_a_part(m, x):
    with torch.no_grad():
        m.row.add_(m.mean(x))
    return (m.out(x) - m.big.mean(0)).square().mean()


def writes_between_reads(m, x):
    before = m.row.sum()
    m.big.add_(m.mean(x))
    return (m.out(x) - m.row).square().mean() + before


def two_parts(m, x):
    m.row.copy_(m.mean(x))
    m.column.mul_(0.5).add_(1.0)
    return (m.out(x) - m.flat[8:12]).square().mean() + m.row.sum()


def in_branches(m, x):
    if m.out(x).sum() > 0:
        m.row.add_(1.0)
    else:
        m.big[1:4].add_(m.mean(x))
    for _ in range(2):
        m.row.mul_(0.9)
    return (m.out(x) - m.big.mean(0)).square().mean() + m.row.sum()


def in_a_branch_that_reads_it_first(m, x):
    if m.out(x).sum() > 1e6:
        y = m.row * 2
    else:
        y = m.row + 1
    m.big.add_(m.mean(x))
    return (m.out(x) - m.row).square().mean() + y.sum()


def in_an_island(m, x):
    def inner():
        y = m.mean(x)
        assert str(y)[0] == "t"
        m.big.add_(y)
        return m.row.sum()

    return (m.out(x) - inner() - m.big.mean()).square().mean()


def gets_other_memory(m, x):
    m.big = m.big + m.mean(x)
    return (m.out(x) - m.row + m.big.sum()).square().mean()


def weights_by_a_buffer(m, x):
    m.flat.mul_(0.9)
    return m.out(x).square().mean()


def weights_and_a_buffer(m, x):
    with torch.no_grad():
        m.w.mul_(0.9)
    return m.out(x).square().mean() + m.flat.sum() * m.w.sum()


def weights_by_what_was_detached(m, x):
    m.fixed.mul_(0.9)
    return m.out(x).square().mean() + m.fixed.sum() * m.w.sum()


CASES = [
    (writes_the_whole, "buffers"), (writes_a_part, "buffers"), (writes_between_reads, "buffers"),
    (two_parts, "buffers"), (in_branches, "buffers"), (in_a_branch_that_reads_it_first, "buffers"),
    (in_an_island, "buffers"), (gets_other_memory, "buffers"),
    (writes_the_whole, "attributes"), (writes_a_part, "attributes"),
    (writes_the_whole, "turned"), (writes_a_part, "turned"),
    (weights_by_a_buffer, "parameter"), (weights_and_a_buffer, "parameter"), (weights_by_what_was_detached, "detached"),
]  # fmt: skip


@pytest.mark.parametrize("forward, kind", CASES, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
def test_what_is_written_shows_in_all_that_share_its_memory(forward, kind):
    (called, plain), (model, twin) = ([Net(forward, kind) for _ in range(2)] for _ in range(2))
    fast = mycel.jit(called)
    for _ in range(3):
        torch.testing.assert_close(fast(X), plain(X))
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        wanted = twin(X)
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(step(X), wanted.detach())
    for ours, theirs in ((called, plain), (model, twin)):
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_what_no_longer_shares_memory_is_captured_again():
    model = Net(writes_the_whole, "buffers")
    fast, plain = mycel.jit(model), copy.deepcopy(model)
    torch.testing.assert_close(fast(X), plain(X))
    for m in (model, plain):
        m.row = m.row.clone()
    for _ in range(2):
        torch.testing.assert_close(fast(X), plain(X))
    assert len(fast.entries) == 2


def test_what_is_only_read_stays_inputs_of_their_own():
    model = Net(lambda m, x: (m.out(x) - m.big.mean(0) - m.row).square().mean(), "buffers")
    assert {v.name for v in mycel.jit(model).program(X).inputs} >= {"big", "row"}


def test_columns_that_lie_between_one_another_share_none():
    """Their places in memory overlap, their elements do not."""
    model = Net(lambda m, x: m.out(x).sum(), "attributes")
    model.left, model.right = model.big[:, :2], model.big[:, 2:]
    del model.big, model.row

    def forward(m, x):
        m.left.add_(1.0)
        return m.out(x).sum() * m.right.sum() + m.left.sum()

    model.how = forward
    twin = copy.deepcopy(model)
    torch.testing.assert_close(mycel.jit(model, strict=True)(X), twin(X))


@pytest.mark.parametrize("written", ["first", "last"])
def test_what_overlaps_without_lying_inside_is_refused(written):
    """Also where the code around could stay Python: that would be given both apart."""

    def forward(m, x):
        getattr(m, written).add_(m.mean(x).sum())
        return (m.out(x) * m.first.sum()).square().mean() + m.last.sum()

    with pytest.raises(mycel.CaptureError, match="share memory, of which the code writes a part"):
        mycel.jit(Net(forward, "overlapping"))(X)


def test_one_of_which_the_other_is_not_used_is_written():
    def forward(m, x):
        m.first.add_(m.mean(x).sum())
        return (m.out(x) * m.first.sum()).square().mean()

    model, twin = Net(forward, "overlapping"), Net(forward, "overlapping")
    fast = mycel.jit(model, strict=True)
    for _ in range(2):
        torch.testing.assert_close(fast(X), twin(X))
    torch.testing.assert_close(model.last, twin.last)


def test_other_memory_for_a_weight_that_shares_it_is_refused():
    def forward(m, x):
        m.w.data = m.w.data / 2
        return m.out(x).sum() + m.fixed.sum()

    with pytest.raises(mycel.CaptureError, match=r"w gets other memory .* fixed shares"):
        mycel.jit(Net(forward, "detached"))(X)


def add(h, part):
    assert str(h)[0] == "t"
    h.add_(1)
    return part.sum()


def triple(a, b):
    assert str(a)[0] == "t"
    a.mul_(3)
    return b.sum()


def a_tensor_and_its_row(w):
    h = (X @ w.T) * 2
    row = h[1]
    s = add(h, row)
    return h.square().mean() + s * row.sum()


def two_parts_of_one(w):
    h = (X @ w.T) * 2
    return triple(h[1:3], h[2]) + h.square().mean()


def two_parts_apart(w):
    h = (X @ w.T) * 2
    return triple(h[1:3], h[4]) + h.square().mean()


@pytest.mark.parametrize("fn", [a_tensor_and_its_row, two_parts_of_one, two_parts_apart], ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:.*runs as plain Python")
def test_an_island_that_writes_what_it_is_given_parts_of(fn):
    ours, theirs = (torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for _ in "ab")
    wanted = fn(theirs.requires_grad_())
    wanted.backward()
    value, gradient = mycel.value_and_grad(fn)(ours)
    torch.testing.assert_close((value, gradient), (wanted.detach(), theirs.grad))
    mycel.jit(fn)(ours.requires_grad_()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
