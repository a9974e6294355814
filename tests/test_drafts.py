"""Tokens drafted by weights in 8 bits: the text is the one without, whatever is drafted; products of bytes are what
torch makes of them; drafts are made where they pay, and as far."""

from __future__ import annotations

import pytest
import torch
import transformers
from golden import change

from mycel import Program, jit, transform
from mycel.ops import few_rows, o
from mycel.ops.few_rows import product_of_bytes, rounded
from mycel.rounded_call import RoundedCall
from mycel.run import interpret
from mycel.train import decode
from mycel.train.draft import RARELY, Pace
from mycel.train.generate import Sampling, stream

FAMILIES = {
    "llama": {"hidden_size": 256, "intermediate_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gemma": {"hidden_size": 256, "intermediate_size": 300, "num_attention_heads": 4, "num_key_value_heads": 1},
    "gpt_neox": {"hidden_size": 256, "intermediate_size": 300, "num_attention_heads": 4},
}
PROMPT = [3, 1, 4, 1, 5, 9]
HOW = {
    "greedy": Sampling(40, 0.0),
    "drawn": Sampling(40, 1.0, seed=3),
    "of the likeliest": Sampling(40, 0.7, top_p=0.8, seed=5),
}


def model_of(family: str):
    torch.manual_seed(0)
    more = {"vocab_size": 300, "num_hidden_layers": 2, "max_position_embeddings": 256, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **more, eos_token_id=None, **FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # so that it is the model that decides, and not the dice
    return model


@pytest.fixture
def at_once(monkeypatch):
    """Drafts of small models, of 1 to 4 tokens in turns, from the first token on and into caches that grow."""
    monkeypatch.setattr(decode, "BYTES", 0)
    monkeypatch.setattr(decode, "MAKING", 0)
    monkeypatch.setattr(decode, "LEAST_IN_C", 16)
    monkeypatch.setattr(Pace, "ahead", lambda pace, guessed: 1 + pace.drafted % pace.most)


def text_of(decoder: decode.Decoder, how: Sampling) -> list[int]:
    return [*stream(decoder.module, PROMPT, how, [], decoder)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_text(family, how, at_once):
    model = model_of(family)
    plain = decode.Decoder(model, 256, guess=False, draft=False)
    drafting = decode.Decoder(model, 256, guess=False)
    for _ in range(2):  # the second begins with what the first has left
        assert text_of(drafting, HOW[how]) == text_of(plain, HOW[how])
    assert plain.calls == 40 and plain.pace.drafted == 0
    assert drafting.calls < 34 and drafting.pace.right > 0.6 * drafting.pace.drafted > 0
    program = drafting.draft.entries[0].program
    products = [e.op for e in program.main.eqns if e.op.product]
    assert products.count(o.linear_rounded) >= 4, "its weights are in 8 bits"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wrong", ["random", "not finite"])
def test_a_wrong_draft_changes_no_text(how, wrong, at_once, monkeypatch):
    def spoilt(w):
        codes, scale = rounded(w)
        return (codes[torch.randperm(len(codes))], scale) if wrong == "random" else (codes, scale * torch.nan)

    monkeypatch.setattr("mycel.rounded_call.rounded", spoilt)
    model = model_of("llama")
    plain = decode.Decoder(model, 256, guess=False, draft=False)
    drafting = decode.Decoder(model, 256)
    assert text_of(drafting, HOW[how]) == text_of(plain, HOW[how])
    assert drafting.draft.entries and drafting.pace.right <= 0.2 * drafting.pace.drafted
    assert wrong == "random" or drafting.pace.drafted == 0


def test_drafts_up_to_the_last_place(at_once):
    model = model_of("gpt2")
    texts = [text_of(decode.Decoder(model, 37, guess=False, draft=draft), HOW["greedy"]) for draft in (False, True)]
    assert texts[0] == texts[1] and len(texts[0]) == 31


def test_a_draft_that_was_not_drawn_for_is_of_the_likeliest(at_once):
    """As who gives a text token by token uses it."""
    model, text = model_of("llama"), text_of(decode.Decoder(model_of("llama"), 256, draft=False), HOW["greedy"])
    decoder = decode.Decoder(model, 256, guess=False)
    with torch.no_grad():
        decoder.start(PROMPT)
        rows = [decoder.after(token) for token in text]
        wanted = model(torch.tensor([PROMPT + text])).logits[0, len(PROMPT) :]
    torch.testing.assert_close(torch.stack(rows), wanted, rtol=1e-4, atol=1e-4)
    assert decoder.calls < 34


def test_drafts_begin_where_they_pay(monkeypatch):
    monkeypatch.setattr(decode, "BYTES", 0)
    decoder = decode.Decoder(model_of("llama"), 256, guess=False)
    with torch.no_grad():
        decoder.start(PROMPT, 100)
        for seen, one_s, before_s, pays in ((6, 0.03, 0.0, False), (6, 0.1, 0.0, True), (90, 0.1, 0.0, False),
                                            (90, 0.1, 2.5, True)):  # fmt: skip
            decoder.pace, decoder._making_s, decoder._before_s = Pace(4, one_s=one_s), 1.0, before_s
            assert bool(decoder._to_draft(seen, [])) is pays
    monkeypatch.setattr(decode, "BYTES", 1 << 40)
    assert decode.Decoder(model_of("llama"), 256).draft is None, "its weights lie in caches"
    monkeypatch.setattr(decode, "BYTES", 0)
    assert decode.Decoder(model_of("llama").bfloat16(), 256).draft is None
    monkeypatch.setattr(few_rows, "library", lambda: None)
    assert decode.Decoder(model_of("llama"), 256).draft is None, "there is no compiler"


def test_as_far_as_it_pays():
    pace = Pace(4, one_s=0.025, several_s=0.03, draft_s=0.008)
    assert pace.ahead(None) == 4
    assert pace.ahead(0.5) == 4 and pace.ahead(3.5) is None, "a guess that brings more"
    for _ in range(2):
        pace.judge(4, 1)
    assert pace.ahead(None) in (1, 2, 3)
    for _ in range(4):
        pace.judge(1, 0)
    tries = [i for i in range(600) if pace.ahead(None)]
    assert len(tries) == 5 and tries[1] - tries[0] == 2 * RARELY[0], "less and less often"
    for _ in range(20):
        pace.judge(1, 1)
    assert pace.ahead(None) >= 3 and pace.right == 22 and pace.drafted == 32
    slow = Pace(4, one_s=0.025, several_s=0.03, draft_s=0.02)
    assert [slow.ahead(None) for _ in range(8)] == [0] * 8, "drafts that cost nearly as much"
    assert [pace.ahead(None) for _ in range(2 * RARELY[1])].count(0) == 2, "to measure the other way again"


def test_seconds_are_averages():
    pace = Pace(4)
    for s in (1.0, 2.0):
        pace.took("draft", s)
    assert pace.draft_s == pytest.approx(1.2) and pace.one_s is None


@pytest.mark.parametrize("rows", range(1, 10))
def test_products_of_bytes(rows, monkeypatch):
    """In C what torch computes, to the rounding of its sums; 9 rows, other memory and no compiler go by torch."""
    g = torch.Generator().manual_seed(rows)
    for n, k in ((1, 1), (7, 33), (130, 64), (97, 300), (200, 768)):
        x, w, b = (torch.randn(s, generator=g) for s in ((rows, k), (n, k), (n,)))
        codes, scale = rounded(w)
        assert codes.dtype == torch.int8 and ((codes * scale[:, None] - w).abs() <= scale[:, None] * 0.501).all()
        wanted = (x.double() @ (codes.double() * scale.double()[:, None]).T).float()
        near = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(product_of_bytes(x, codes, scale), wanted, **near)
        torch.testing.assert_close(product_of_bytes(x[None], codes, scale, b)[0], wanted + b, **near)
        torch.testing.assert_close(product_of_bytes(x.T.contiguous().T, codes, scale), wanted, **near)
        with monkeypatch.context() as m:
            m.setattr(few_rows, "library", lambda: None)
            torch.testing.assert_close(product_of_bytes(x, codes, scale), wanted, **near)


def test_rows_of_zeros_are_rounded_to_zeros():
    codes, scale = rounded(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert codes.tolist() == [[0, 0], [64, -127]] and scale[0] == 1


BEFORE = """\
def main(x: f32[1,256], e: f32[300,256] = parameter embed, w: f32[300,256] = parameter up, b: f32[300] = parameter bias,
         v: f32[300,256] = parameter down, t: f32[300,256], ids: i64[1]):
  r: f32[1,256] = embedding(e, ids)
  s: f32[1,256] = add(x, r)
  y: f32[1,300] = linear_few_rows(s, w, b)
  z: f32[1,256] = matmul(y, v)
  l: f32[1,300] = linear_few_rows(z, e)
  k: f32[1,300] = linear_few_rows(z, w)
  u: f32[1,300] = linear_few_rows(z, t)
  return l, k, u
"""


def test_rounded_weights():
    """Parameters alone; one in a product with its transpose; one with another reader; one of two products."""
    before = Program.parse(BEFORE)
    after, turned = transform.rounded_weights(before)
    change("rounded_weights", before, after)
    assert turned == {"w": False, "v": True, "e": False}
    torch.manual_seed(0)
    given = [torch.randn(v.shape) for v in before.inputs[:-1]] + [torch.tensor([7])]
    by_name = dict(zip("xewbvt", given, strict=False))
    more = [x for name, is_turned in turned.items() for x in rounded(by_name[name].T if is_turned else by_name[name])]
    for got, wanted in zip(interpret(after, [*given, *more]), interpret(before, given), strict=True):
        assert 0 < (got - wanted).norm() < 0.03 * wanted.norm()


def test_a_rounded_call_follows_its_weights():
    layer = torch.nn.Linear(256, 256)
    fast = jit(layer)
    near, x = RoundedCall(fast), torch.randn(1, 256)
    with torch.no_grad():
        for _ in range(3):
            error = (near(x) - layer(x)).norm() / layer(x).norm()
            assert 0 < error < 0.02
            layer.weight.mul_(2.0)
            layer.weight[0] += 1.0
        layer.weight.data = torch.randn(256, 256)
        assert (near(x) - layer(x)).norm() < 0.02 * layer(x).norm()
    assert len(near.entries) == 1 and len(near._rounded) == 1
