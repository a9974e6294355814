"""Masks of packed documents are found in the program, whatever code wrote them, and masks that are more than that stay;
either way results and gradients are torch's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, create_mask, flex_attention

import mycel
from mycel.errors import CaptureError, RunError
from mycel.ir import check, walk
from mycel.transform import simplify

N = 192
EOS = 3


def at():
    return torch.arange(N)


def below():
    return at()[:, None] >= at()[None, :]


def ahead():
    return at()[:, None] - at()[None, :]


def same(ids):
    return ids[:, None, :, None] == ids[:, None, None, :]


def by_hand(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, same(ids) & below())


def both_ways(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, same(ids))


def in_a_window(q, k, v, ids):
    near = (ahead() < 20) & below()
    return F.scaled_dot_product_attention(q, k, v, torch.logical_and(near, same(ids)))


def in_a_wide_window(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, (ahead().abs() < 180) & same(ids))


def three_dims(q, k, v, ids):
    seen = (ids[:, :, None] == ids[:, None, :]) & torch.ones(N, N, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, seen.unsqueeze(1))


def expanded(q, k, v, ids):
    b, n = ids.shape
    rows, columns = ids.unsqueeze(2).expand(b, n, n), ids.unsqueeze(1).expand(b, n, n)
    seen = (rows == columns)[:, None].expand(b, q.shape[1], n, n) * below()
    return F.scaled_dot_product_attention(q, k, v, seen)


def turned(q, k, v, ids):
    """Documents as [places, batch]."""
    ids = ids.t()
    seen = (ids[:, None] == ids[None, :]).permute(2, 0, 1)
    return F.scaled_dot_product_attention(q, k, v, seen[:, None] & below())


def by_difference(q, k, v, ids):
    apart = (ids[:, None, :, None] - ids[:, None, None, :]) != 0
    return F.scaled_dot_product_attention(q, k, v, ~(apart | ~below()))


def written_out(q, k, v, ids):
    s = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    s = s.masked_fill(~below(), -math.inf).masked_fill(~same(ids), -math.inf)
    return s.softmax(-1) @ v


def added(q, k, v, ids):
    mask = torch.zeros(ids.shape[0], 1, N, N, dtype=q.dtype).masked_fill(~(same(ids) & below()), -math.inf)
    return F.scaled_dot_product_attention(q, k, v, mask)


def least_number(q, k, v, ids):
    mask = torch.where(same(ids) & below(), 0.0, torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype))
    return (q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) + mask).softmax(-1) @ v


def sum_of_masks(q, k, v, ids):
    documents = torch.where(same(ids), 0.0, -math.inf).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, documents + torch.where(below(), 0.0, -math.inf).to(q.dtype))


def counted_ends(q, k, v, ids):
    """Documents end at a token."""
    ids = (ids.roll(-1, 1) != ids).long().mul(EOS)
    ids = (ids == EOS).cumsum(1) - (ids == EOS).long()
    return by_hand(q, k, v, ids)


def counted_starts(q, k, v, ids):
    """Documents begin at position zero."""
    begins = F.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)
    position = at() - torch.where(begins, at(), 0).cummax(1).values
    return by_hand(q, k, v, (position == 0).cumsum(-1))


def by_ends(q, k, v, ids):
    """Lengths as cu_seqlens has them, of the first sample."""
    ends = torch.tensor([0, 5, 6, 100, N])
    ids = torch.searchsorted(ends, at(), right=True).expand(ids.shape[0], N)
    return by_hand(q, k, v, ids)


def one_for_all(q, k, v, ids):
    """The same documents in each sample."""
    return F.scaled_dot_product_attention(q, k, v, (ids[0, :, None] == ids[0, None, :]) & below())


def as_a_function(q, k, v, ids):
    """As FlexAttention has it."""

    def seen(b, h, row, column):
        return (ids[b, row] == ids[b, column]) & (row >= column)

    return F.scaled_dot_product_attention(q, k, v, create_mask(seen, q.shape[0], 1, N, N, device="cpu"))


def flex(q, k, v, ids):
    """FlexAttention itself."""

    def seen(b, h, row, column):
        return (ids[b, row] == ids[b, column]) & (row >= column)

    return flex_attention(q, k, v, block_mask=create_block_mask(seen, q.shape[0], None, N, N, device="cpu"))


def flex_with_scores(q, k, v, ids):
    """Scores that are capped."""

    def changed(score, b, h, row, column):
        return 5.0 * torch.tanh(score / 5.0)

    def seen(b, h, row, column):
        return (ids[b, row] == ids[b, column]) & (row >= column)

    mask = create_block_mask(seen, q.shape[0], None, N, N, device="cpu")
    return flex_attention(q, k, v, score_mod=changed, block_mask=mask, scale=1.0)


def indexed(q, k, v, ids):
    """As transformers has it."""
    b, row, column = torch.arange(len(ids))[:, None, None, None], at()[None, None, :, None], at()[None, None, None, :]
    seen = (column <= row) & (ids[b, row] == ids[b, column])
    return F.scaled_dot_product_attention(q, k, v, seen.expand(len(ids), -1, N, N))


def with_padding(q, k, v, ids):
    kept = (ids > 0)[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, same(ids) & kept & below())


def padding_both_ways(q, k, v, ids):
    kept = ids != 0
    seen = same(ids) & kept[:, None, :, None] & kept[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, seen)


def padded(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, (ids > 0)[:, None, None, :] & below())


def two_numbers(q, k, v, ids):
    turns = at() // 3 + ids
    return F.scaled_dot_product_attention(q, k, v, same(ids) & same(turns) & below())


def capped(q, k, v, ids):
    s = 5.0 * torch.tanh(q @ k.transpose(2, 3) / 5.0)
    return s.masked_fill(~(same(ids) & below()), -math.inf).softmax(-1) @ v


def positions(ids):
    """They go on by one in a document, and start anew anywhere."""
    return at() - 90 * ids


def same_run(p):
    """As transformers finds documents in positions."""
    return same((torch.diff(p, prepend=p[:, :1] - 1, dim=-1) != 1).cumsum(-1))


def rows_and_columns(p):
    return p[:, None, :, None], p[:, None, None, :]


def by_positions(q, k, v, ids):
    p = positions(ids)
    row, column = rows_and_columns(p)
    return F.scaled_dot_product_attention(q, k, v, same_run(p) & (column <= row))


def positions_in_a_window(q, k, v, ids):
    p = positions(ids)
    row, column = rows_and_columns(p)
    near = (column > row - 20) & (column <= row)
    return F.scaled_dot_product_attention(q, k, v, near & same_run(p))


def positions_both_ways(q, k, v, ids):
    p = positions(ids)
    row, column = rows_and_columns(p)
    mask = torch.where(same_run(p) & ((row - column).abs() <= 20), 0.0, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype))


CAUSAL, ALL = ("causal", 1), ("all", 1)
FORMS = {
    by_hand: CAUSAL, both_ways: ALL, in_a_window: ((19, 0), 1), in_a_wide_window: ((179, 179), 1), three_dims: CAUSAL,
    expanded: CAUSAL, turned: CAUSAL, by_difference: CAUSAL, written_out: CAUSAL, added: CAUSAL, least_number: CAUSAL,
    sum_of_masks: CAUSAL, counted_ends: CAUSAL, counted_starts: CAUSAL, by_ends: CAUSAL, one_for_all: CAUSAL,
    as_a_function: CAUSAL, flex: CAUSAL, flex_with_scores: CAUSAL, indexed: CAUSAL,
    with_padding: ("causal", 2), padding_both_ways: ("all", 3),
    padded: CAUSAL, two_numbers: ("causal", 2), capped: CAUSAL,
    by_positions: CAUSAL, positions_in_a_window: ((19, 0), 1), positions_both_ways: ((20, 20), 1),
}  # fmt: skip


# -- what is more than that


def either(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, same(ids) | below())


def by_head(q, k, v, ids):
    ids = torch.stack([ids, ids // 2], 1)
    return F.scaled_dot_product_attention(q, k, v, (ids[..., :, None] == ids[..., None, :]) & below())


def later_documents(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, (ids[:, None, :, None] >= ids[:, None, None, :]) & below())


def every_second(q, k, v, ids):
    return F.scaled_dot_product_attention(q, k, v, same(ids) & below() & (ahead() % 2 == 0))


def least_number_and_padding(q, k, v, ids):
    """Rows of padding look at everything: the least number hides nothing from them."""
    seen = same(ids) & (ids > 0)[:, None, None, :] & below()
    mask = torch.where(seen, 0.0, torch.tensor(torch.finfo(q.dtype).min, dtype=q.dtype))
    return (q @ k.transpose(2, 3) + mask).softmax(-1) @ v


def padding_alone(q, k, v, ids):
    """It broadcasts as it is."""
    return F.scaled_dot_product_attention(q, k, v, (ids > 0)[:, None, None, :].expand(len(ids), 1, N, N))


def of_floats(q, k, v, ids):
    """Not a number equals nothing."""
    return F.scaled_dot_product_attention(q, k, v, same(ids / ids.clamp(max=1)) | below().logical_not() | below())


def positions_alone(q, k, v, ids):
    row, column = rows_and_columns(positions(ids))
    return F.scaled_dot_product_attention(q, k, v, column <= row)


def positions_or_documents(q, k, v, ids):
    p = positions(ids)
    row, column = rows_and_columns(p)
    return F.scaled_dot_product_attention(q, k, v, same_run(p) | (column <= row))


def positions_of_others(q, k, v, ids):
    """Runs of one tensor say nothing of the numbers of another."""
    row, column = rows_and_columns(positions(ids) // 2)
    return F.scaled_dot_product_attention(q, k, v, same_run(positions(ids)) & (column < row + 3))


def positions_from_a_number(q, k, v, ids):
    """Where a document starts is not known."""
    p = positions(ids)
    row, column = rows_and_columns(p)
    return F.scaled_dot_product_attention(q, k, v, same_run(p) & (column + row <= 300))


OTHERS = [
    either, by_head, later_documents, every_second, positions_alone, positions_or_documents, positions_of_others,
    positions_from_a_number, least_number_and_padding, padding_alone, of_floats,
]  # fmt: skip


def batch(seed=0):
    """q, k, v and documents: of several sizes, the first 0."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, N, 8, generator=gen, dtype=torch.float64) for _ in range(3))
    ids = torch.tensor([[0] * 7 + [1] + [2] * 80 + [5] * (N - 88), [0] * 64 + list(range(1, N - 63))])
    return q, k, v, ids


def attentions(program):
    return [eqn for _, eqn in walk(program) if eqn.op.name == "attention"]


def structure(eqn):
    """(positions, how many numbers a document has), or None with a mask"""
    if eqn.inputs[3] is not None or len(eqn.inputs) < 7:
        return None
    positions = "causal" if eqn.params.get("causal") else eqn.params.get("window", "all")
    return positions, eqn.inputs[5].shape[2]


def largest(program):
    """Elements of the largest bool or integer value."""
    return max((v.type.numel for _, e in walk(program) for v in e.outputs if not v.dtype.is_floating_point), default=0)


@pytest.mark.parametrize("form", [*FORMS, *OTHERS], ids=lambda f: f.__name__)
def test_documents_are_found(form):
    args = batch()
    program = check(simplify(mycel.capture(form, *args)))
    (eqn,) = attentions(program)
    assert structure(eqn) == FORMS.get(form)
    if form in FORMS:
        assert largest(program) < N * N

    assert torch.allclose(mycel.jit(form)(*args), form(*args), rtol=1e-10, atol=1e-10)


SAME_AS = {flex: by_hand, flex_with_scores: capped}  # torch has no gradient of it on a CPU


@pytest.mark.parametrize("form", [*FORMS, *OTHERS[:8]], ids=lambda f: f.__name__)
def test_gradients_of_documents(form):
    def loss(*args, form=form):
        return (form(*args) * torch.arange(8)).square().sum()

    args = batch()
    inputs = [x.clone().requires_grad_() for x in args[:3]]
    want = loss(*inputs, args[3], form=SAME_AS.get(form, form))
    value, grads = mycel.value_and_grad(loss, argnums=(0, 1, 2))(*args)
    assert torch.allclose(value, want, rtol=1e-10)
    for mine, theirs in zip(grads, torch.autograd.grad(want, inputs), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def test_what_stops_the_program_is_not_tried_while_masks_are_read():
    def sorted_documents(q, ids):
        if not torch.all(ids[:-1] <= ids[1:]):
            raise ValueError("documents are not sorted")
        return F.scaled_dot_product_attention(q, q, q, attn_mask=ids[:, None] == ids)

    q, ids = torch.randn(1, 1, 4, 8), torch.tensor([0, 0, 1, 1])
    fast = mycel.jit(sorted_documents)
    assert torch.allclose(fast(q, ids), sorted_documents(q, ids))
    with pytest.raises(RunError, match="documents are not sorted"):
        fast(q, ids.flip(0))


def test_text_of_documents_is_read_back():
    program = simplify(mycel.capture(with_padding, *batch()))
    assert mycel.Program.parse(str(program)) == program


def test_layers_with_other_windows_are_blocks_of_their_own():
    """One mask for each kind of layer, made outside of the layers; as in models with local and global attention."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(16, 16, dtype=torch.float64) for _ in range(6))

        def forward(self, x, mask):
            q, k, v = (part(x).unflatten(2, (2, 8)).transpose(1, 2) for part in self.parts[:3])
            mask = torch.where(mask, 0.0, -math.inf).to(x.dtype).expand(-1, 2, -1, -1)
            x = x + self.parts[3](F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))
            return x + self.parts[4](self.parts[5](x).relu())

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x, ids):
            whole = same(ids) & below()
            masks = [whole, whole & (ahead() < 9) & (ids > 0)[:, None, None, :]]
            for i, layer in enumerate(self.layers):
                x = layer(x, masks[i % 2])
            return x

    torch.manual_seed(0)
    model, x, ids = Layers(), torch.randn(2, N, 16, dtype=torch.float64), batch()[3]
    with torch.no_grad():
        assert torch.allclose(mycel.jit(model)(x, ids), model(x, ids), rtol=1e-10)
        program = check(simplify(mycel.capture(model, x, ids)))
    assert {structure(eqn) for eqn in attentions(program)} == {("causal", 1), ((8, 0), 2)}
    assert len(attentions(program)) == 2 and largest(program) < N * N


def test_what_is_not_captured_of_flex_attention_is_refused():
    def largest(q, k, v):
        return flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))[0]

    with pytest.raises(CaptureError, match="largest score of each row"):
        mycel.capture(largest, *(torch.randn(1, 2, 16, 8) for _ in range(3)))
