"""Sparse matrices that are arguments, or made in captured code, give what torch gives; products are captured, all else
is an island."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from distributing import OneDevice, step_equals
from torch import nn

import mycel
from mycel import Mesh, Plan
from mycel.capture.sparse import parts_of
from mycel.errors import PlanError, TrainError
from mycel.replica_batch import own_batch


def twice(a):
    """Each element, and another at its place."""
    indices, values = a.indices(), a.values()
    return torch.sparse_coo_tensor(torch.cat([indices, indices.flip(1)], 1), torch.cat([values, values]), a.shape)


LAYOUTS = {
    "coo": lambda a: a.to_sparse_coo(),
    "uncoalesced": lambda a: twice(a.to_sparse_coo()),
    "csr": lambda a: a.to_sparse_csr(),
    "csc": lambda a: a.to_sparse_csc(),
}


def adjacency(seed=0, elements=7):
    """A matrix [5,4] with so many elements."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.zeros(20, dtype=torch.float64)
    dense[torch.randperm(20, generator=generator)[:elements]] = torch.rand(elements, generator=generator).double() + 0.5
    return dense.reshape(5, 4)


class Graph(nn.Module):
    """A layer of a graph, whose neighbours are the elements of a matrix."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.weight = nn.Linear(3, 3), nn.Linear(3, 2), nn.Parameter(torch.ones(4))

    def forward(self, x, matrix):
        h = torch.sparse.mm(matrix, self.a(x)).tanh()
        return (self.b(h).square().mean(-1) + matrix @ self.weight + torch.mm(matrix, x).sum(-1)).sum() / matrix.size(0)


class Weighed(Graph):
    """Makes its matrix itself, of values it trains."""

    def forward(self, x, edges):
        values = self.weight[edges[1]] * x[edges[1], 0]
        matrix = torch.sparse_coo_tensor(edges, values, (5, 4))
        return (matrix.coalesce() @ self.a(x)).square().sum() + matrix.to_dense().tanh().sum()


class Inner(nn.Module):
    def forward(self, matrix, x):
        return torch.sparse.sum(matrix * 2.0, 1).to_dense() * x.sum()


class Other(Graph):
    """Asks for what is not captured, in a layer."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x, matrix):
        return (self.inner(matrix, self.a(x)) + (matrix @ self.a(x)).sum(-1)).square().sum()


def trained(make, *batches):
    """Losses of forward and steps, beside torch's."""
    torch.manual_seed(0)
    model = make().double()
    like, fast = copy.deepcopy(model), mycel.jit(model)
    ways = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, like)]
    step = mycel.train_step(model, ways[0])
    for batch in batches:
        wanted = like(*batch)
        ways[1].zero_grad()
        wanted.backward()
        torch.testing.assert_close(fast(*batch).detach(), wanted.detach())
        ways[1].step()
        torch.testing.assert_close(step(*batch), wanted.detach())
    for mine, theirs in zip(model.parameters(), like.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    return step


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_argument(layout):
    """Other values, and another number of elements."""
    x = torch.randn(4, 3, dtype=torch.float64)
    matrices = [adjacency(), adjacency(1), adjacency(2, 9), adjacency(3)]
    step = trained(Graph, *((x, LAYOUTS[layout](a)) for a in matrices))
    assert len(step.entries) == 2 and not step.entries[0].islands


def test_a_matrix_of_the_code_itself():
    x, edges = torch.randn(4, 3, dtype=torch.float64), torch.tensor([[0, 1, 1, 4, 0], [3, 2, 2, 0, 1]])
    step = trained(Weighed, (x, edges), (x + 1, edges.flip(1)))
    assert not step.entries[0].islands


@pytest.mark.parametrize("layout", ["coo", "uncoalesced"])
def test_what_else_is_asked_of_it_is_an_island(layout):
    x = torch.randn(4, 3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*runs as plain Python")
        step = trained(Other, *((x, LAYOUTS[layout](adjacency(i))) for i in range(2)))
    assert [call.name.split()[0] for call in step.entries[0].islands] == ["Inner"]


class Counted(nn.Module):
    """Asks how many elements the matrix has that it made of a buffer's places."""

    def __init__(self, coalesced):
        super().__init__()
        self.coalesced, self.weight = coalesced, nn.Parameter(torch.ones(7))
        self.register_buffer("edges", twice(adjacency().to_sparse_coo().coalesce())._indices()[:, :7] % 2)

    def forward(self, x):
        matrix = torch.sparse_coo_tensor(self.edges, self.weight, (5, 4))
        matrix = matrix.coalesce() if self.coalesced else matrix
        return torch.sparse.mm(matrix, x).square().sum() / matrix._nnz()


@pytest.mark.parametrize("coalesced", [False, True])
def test_how_many_elements_it_has(coalesced):
    model, x = Counted(coalesced).double(), torch.rand(4, 3, dtype=torch.float64)
    loss = model(x)
    loss.backward()
    wanted = (loss.detach(), {"weight": model.weight.grad})
    torch.testing.assert_close(mycel.value_and_grad(lambda x: model(x), wrt=model)(x), wanted)


def test_it_is_returned_as_it_is():
    matrix = adjacency().to_sparse_coo()
    again, doubled = mycel.jit(lambda a: (a, a @ torch.eye(4, dtype=torch.float64)))(matrix)
    torch.testing.assert_close(again, matrix)
    torch.testing.assert_close(doubled, matrix.to_dense())


@pytest.mark.parametrize("names, sizes", [("dp", {"dp": 2}), ("zero3", {"dp": 3}), ("tp", {"tp": 2})])
@pytest.mark.parametrize("layout", ["uncoalesced", "csr"])
def test_ranks_give_what_one_device_does(layout, names, sizes):
    x, matrix = torch.randn(4, 3, dtype=torch.float64), LAYOUTS[layout](adjacency())
    model = Graph().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    unsharded = mycel.train_step(model, optimizer, compile=False).unsharded(x, matrix)
    given = [unsharded.program.role(v).name for v in unsharded.program.inputs_of("batch")]
    batch = dict(zip(given, [x, *parts_of(matrix)], strict=True))
    step_equals(OneDevice(model, batch, optimizer, unsharded), Plan.read(names, Mesh(sizes)))


def test_replicas_have_no_part_of_it():
    plan = Plan.read({"mesh": {"dp": 2}, "batch": ["dp"], "sync": {"dp": "diloco(H=4)"}})
    with pytest.raises(PlanError, match="replicas have rows of the batch, and a sparse tensor of it has none"):
        own_batch(plan, 0, (torch.randn(4, 3), adjacency().to_sparse_coo()), {})


def test_parts_of_a_batch_with_a_sparse_tensor_are_refused():
    model = Graph().double()
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
    with pytest.raises(TrainError, match="accumulate=2 splits the batch by its rows, and a sparse tensor"):
        step(torch.randn(4, 3, dtype=torch.float64), adjacency().to_sparse_coo())
