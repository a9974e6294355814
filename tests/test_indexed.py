"""What is known of a tensor as a function of its index stays so where it is looked up by other such tensors."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mycel
from mycel.ir import Eqn, Params, Type, Var, walk
from mycel.ops import o
from mycel.transform.fold import LIMIT
from mycel.transform.indexed import Either, of_equation
from mycel.transform.regions import Affine, half


def tensor_of(a: Affine, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers that an Affine is."""
    x = torch.full(shape, a.offset)
    for d, (step, n) in enumerate(zip(a.steps, shape, strict=True)):
        x = x + step * torch.arange(n).reshape([n if k == d else 1 for k in range(len(shape))])
    return x


@st.composite
def lookups(draw):
    """(x, its value, indices with theirs, the dims they are of)"""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    x = Affine(draw(st.integers(-3, 3)), tuple(draw(st.integers(-2, 2)) for _ in shape))
    at = tuple(sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))))
    common = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    indices = []
    for _ in at:
        own = tuple(n if draw(st.booleans()) else 1 for n in common)
        own = own[draw(st.integers(0, len(own))) :]
        indices.append((own, Affine(draw(st.integers(-1, 2)), tuple(draw(st.integers(-1, 1)) for _ in own))))
    return shape, x, indices, at


@settings(max_examples=400, deadline=None)
@given(lookups(), st.booleans())
def test_lookups(case, is_region):
    shape, affine, indices, at = case
    tensors = [tensor_of(a, own) for own, a in indices]
    places = [tensors[at.index(d)] if d in at else None for d in range(len(shape))]
    x = tensor_of(affine, shape)
    value = Either(half(affine, shape), True, False) if is_region else affine
    x = x >= 0 if is_region else x
    operands = [
        Var("x", Type(x.dtype, shape)),
        *(Var(f"i{k}", Type(torch.int64, t.shape)) for k, t in enumerate(tensors)),
    ]
    if any(bool((t < -n).any() | (t >= n).any()) for t, n in zip(tensors, (shape[d] for d in at), strict=True)):
        return  # where the program fails
    expected = torch.ops.aten.index(x, places)  # x[…] would take a tensor without dims for a number
    types = [v.type for v in operands]
    (out,) = o.index.infer(types, Params({"at": at}))
    known = of_equation(
        Eqn(o.index, tuple(operands), Params({"at": at}), (Var("y", out),)), (value, *(a for _, a in indices))
    )
    if known is None:
        return
    if isinstance(known, Affine):
        seen = tensor_of(known, out.shape)
    else:
        inside = [tensor_of(a, out.shape) >= 0 for a in known.region.halves]
        empty = torch.full(out.shape, known.region.every)
        reduce = torch.logical_and if known.region.every else torch.logical_or
        for each in inside:
            empty = reduce(empty, each)
        seen = torch.where(empty, torch.tensor(known.yes), torch.tensor(known.no))
    assert torch.equal(seen.expand(expected.shape).to(expected.dtype), expected)


def test_lookups_in_range_are_known():
    """The indices of a whole row and column, as Hugging Face looks positions up."""
    at = Params({"at": (0, 1)})
    operands = tuple(Var(n, Type(torch.int64, s)) for n, s in (("x", (1, 5000)), ("b", (1, 1)), ("i", (5000, 1))))
    (out,) = o.index.infer([v.type for v in operands], at)
    known = of_equation(
        Eqn(o.index, operands, at, (Var("y", out),)), (Affine(3, (0, 1)), Affine(0, (0, 0)), Affine(0, (1, 0)))
    )
    assert known == Affine(3, (1, 0))


def test_long_sequences_have_no_mask():
    """Longer than what constants are computed of."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=64,
        num_hidden_layers=2, max_position_embeddings=2 * LIMIT, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model, ids = LlamaForCausalLM(config), torch.zeros(1, LIMIT + 8, dtype=torch.int64)
    step = mycel.train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    program = step.unsharded(input_ids=ids, labels=ids).program
    attentions = [e for _, e in walk(program) if e.op.name == "attention"]
    assert attentions and all(e.inputs[3] is None and e.params["causal"] for e in attentions)
    assert max(v.type.numel for _, e in walk(program) for v in e.outputs) < (LIMIT + 8) ** 2
