"""Any mesh, any layout on it, any tensors: what laws of checkpoints and weights are tried on."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from mycel.ir import Layout, Mesh

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]


@st.composite
def meshes(draw, most: int) -> Mesh:
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3).filter(
            lambda sizes: math.prod(sizes) <= most
        )
    )
    return Mesh(dict(zip("abc", sizes, strict=False)))


@st.composite
def layouts(draw, mesh: Mesh, ndim: int) -> Layout:
    """Each axis on some dim, before or behind others, or on none."""
    dims: list[list[str]] = [[] for _ in range(ndim + 1)]
    for axis in draw(st.permutations(mesh.axes)):
        dims[draw(st.integers(0, ndim))].append(axis)
    return Layout(tuple(map(tuple, dims[:ndim])))


@st.composite
def trees(draw) -> dict[str, torch.Tensor]:
    """Some tensors, of any bits."""
    tensors = {}
    for i in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 7), max_size=3))
        random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        data = torch.randint(
            0,
            2 if dtype is torch.bool else 256,
            (math.prod(shape) * dtype.itemsize,),
            generator=random,
            dtype=torch.uint8,
        )
        tensors[f"t{i}"] = data.view(dtype).reshape(shape)
    return tensors
