"""Sparse matrices that are arguments, or made of traced indices and values: these are what a program has of them.

    A [5,7], sparse_coo        =>        A.0 i64[2,nnz], A.1 f64[nnz]
    A @ x                      =>        zeros[5,n].index_add(0, rows, values * x[columns])

Code gets a `SparseMatrix` in the tensor's place, of which products with dense tensors are captured.  Whatever else is
asked of it makes an island of the call, which finds the tensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mycel.capture.fence import refuse

PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}
PRODUCTS = {torch.mm, torch.matmul, torch.sparse.mm, torch.spmm, torch.Tensor.mm, torch.Tensor.matmul}


@dataclass(frozen=True)
class SparseForm:
    """What of a sparse tensor is no tensor; `coalesce`: it is what coalesce() makes of the tensor."""

    layout: torch.layout
    shape: torch.Size
    coalesced: bool
    coalesce: bool = False

    def build(self, parts: Sequence[Any]) -> Any:
        """The sparse tensor of these; of traced ones, what stands for it."""
        if any(type(x) is not torch.Tensor for x in parts):
            return SparseMatrix(self, parts)
        if self.layout == torch.sparse_coo:
            indices, values = parts
            coalesced = self.coalesced or None
            matrix = torch.sparse_coo_tensor(
                indices, values, self.shape, is_coalesced=coalesced, check_invariants=False
            )
            return matrix.coalesce() if self.coalesce else matrix
        starts, others, values = parts
        return torch.sparse_compressed_tensor(
            starts, others, values, self.shape, layout=self.layout, check_invariants=False
        )


def form_of(x: Any) -> SparseForm | None:
    """Of a sparse matrix; None for all else."""
    if type(x) is SparseMatrix:
        return x.form
    if type(x) is not torch.Tensor or x.layout not in PARTS or x.ndim != 2 or x.dense_dim():
        return None
    return SparseForm(x.layout, x.shape, x.layout != torch.sparse_coo or x.is_coalesced())


def parts_of(x: Any) -> Sequence[torch.Tensor]:
    """The tensors that a sparse tensor consists of."""
    if type(x) is SparseMatrix:
        return x.parts
    return [getattr(x, name)() for name in PARTS[x.layout]]


def coo_matrix(indices: Any, values: Any, size: Any = None, **more: Any) -> SparseMatrix | None:
    """torch.sparse_coo_tensor of traced indices and values; None where it is no matrix of them."""
    tensors = isinstance(indices, torch.Tensor) and isinstance(values, torch.Tensor)
    if more or not tensors or size is None or len(size) != 2 or indices.ndim != 2 or values.ndim != 1:
        return None
    return SparseMatrix(SparseForm(torch.sparse_coo, torch.Size(size), False), (indices, values))


class SparseMatrix:
    """Stands for a sparse matrix while code is captured."""

    def __init__(self, form: SparseForm, parts: Sequence[torch.Tensor]) -> None:
        self.form, self.parts = form, parts
        self.shape, self.layout, self.ndim, self.is_sparse = form.shape, form.layout, 2, form.layout == torch.sparse_coo
        self.dtype, self.device, self.requires_grad = parts[-1].dtype, parts[-1].device, False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and len(args) == 2 and not kwargs and isinstance(args[0], cls):
            return args[0] @ args[1]
        raise cls.refusal(f"{getattr(func, '__name__', func)} of a sparse tensor")

    @staticmethod
    def refusal(what: str) -> Exception:
        return refuse(f"{what} is not captured", "a product with a dense tensor, A @ x, or to_dense() before the call")

    def __matmul__(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.ndim not in (1, 2) or x.dtype != self.dtype:
            raise self.refusal("a product of a sparse tensor and what is no dense matrix of its dtype")
        rows, columns, values = self._coordinates()
        picked = x[columns] * (values if x.ndim == 1 else values[:, None])
        return torch.zeros((self.shape[0], *x.shape[1:]), dtype=x.dtype, device=x.device).index_add(0, rows, picked)

    def coalesce(self) -> SparseMatrix:
        """No different in a product."""
        return SparseMatrix(replace(self.form, coalesce=not self.form.coalesced), self.parts)

    def to_dense(self) -> Any:
        rows, columns, values = self._coordinates()
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return dense.index_put((rows, columns), values, accumulate=True)

    def mm(self, x: Any) -> Any:
        return self @ x

    def matmul(self, x: Any) -> Any:
        return self @ x

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def _nnz(self) -> int:
        """How many elements it has; coalesced, those of one place are one."""
        if not self.form.coalesce:
            return self.parts[-1].shape[0]
        rows, columns, _ = self._coordinates()
        return torch.unique(rows * self.shape[1] + columns).shape[0]

    def _coordinates(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row, column and value of each element."""
        if self.layout == torch.sparse_coo:
            return self.parts[0][0], self.parts[0][1], self.parts[1]
        starts, others, values = self.parts
        at = torch.arange(values.shape[0], device=values.device, dtype=starts.dtype)
        lines = torch.searchsorted(starts, at, right=True) - 1
        return (lines, others, values) if self.layout == torch.sparse_csr else (others, lines, values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"a sparse tensor has no attribute {name}")
        raise self.refusal(f".{name} of a sparse tensor")
