"""Text by generated code over a static cache is the text that transformers' `generate` writes; caches that grow run as
they are."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from golden import golden

import mycel
from mycel.errors import CaptureError, TrainError
from mycel.train import decode, sample
from mycel.train.generate import Sampling, stream
from mycel.train.guess import Guesses

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of(family: str, **more):
    torch.manual_seed(0)
    auto = transformers.AutoConfig.for_model(family, **{**SMALL, "pad_token_id": 0, "eos_token_id": None, **more})
    return transformers.AutoModelForCausalLM.from_config(auto).eval()


FAMILIES = {
    "llama": {"num_key_value_heads": 2, "max_position_embeddings": 256},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "mistral": {"sliding_window": 8, "num_key_value_heads": 2},  # a cache that keeps count in Python
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_text_beyond_the_first_cache(family, monkeypatch):
    monkeypatch.setattr(decode, "LEAST", 8)
    model, ids = model_of(family, **FAMILIES[family]), [5, 7, 11]
    with torch.no_grad():
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=11, do_sample=False)[0, 3:].tolist()
    decoder = decode.Decoder(model, 256)
    for _ in range(2):
        assert [*stream(model, ids, Sampling(11, 0.0), [], decoder)] == wanted
    plain = decode.Decoder(model, 256, guess=False)
    assert [*stream(model, ids, Sampling(11, 0.0), [], plain)] == wanted
    assert len(plain.fast.entries) == (0 if family == "mistral" else 2)  # of 8 places and of 16


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_guesses_change_no_text(temperature, monkeypatch):
    """Right or wrong, into a cache that grows meanwhile and up to the last place that the model has."""
    monkeypatch.setattr(decode, "LEAST", 16)
    model, ids, how = model_of("llama", **FAMILIES["llama"]), [5, 7, 11, 2, 5, 7], Sampling(34, temperature)
    plain, guessing = (decode.Decoder(model, 40, guess=guess) for guess in (False, True))
    for _ in range(2):  # the second begins with what the first has left
        assert [*stream(model, ids, how, [], guessing)] == [*stream(model, ids, how, [], plain)]
    assert plain.calls == 34 and guessing.calls <= (20 if temperature == 0 else 34)


def test_what_followed_before_is_guessed():
    guesses = Guesses([1, 2, 3, 4, 5, 6, 1, 2])
    assert guesses.next() == [3, 4, 5, 6]
    guesses.add(9)
    assert guesses.next() == []
    assert Guesses([8, 8, 8]).next() == [8] * 4 and Guesses([7]).next() == []
    round_again = Guesses([3, 4, 3, 4])
    assert round_again.next() == [3, 4, 3, 4]
    for _ in range(8):
        round_again.judge(0)
    assert [bool(round_again.next()) for _ in range(16)].count(True) == 2  # one in eight


def test_generate_of_a_jitted_model_has_a_static_cache_and_one_capture():
    model = model_of("llama", **FAMILIES["llama"])
    ids = torch.tensor([[5, 7, 11], [1, 2, 3]])
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False)
    fast = mycel.jit(model)
    for _ in range(2):
        assert torch.equal(fast.generate(ids, max_new_tokens=12, do_sample=False), wanted)
    assert len(fast._forward.entries) == 1 and "forward" not in vars(model)
    sampled = [m.generate(ids, max_new_tokens=12, do_sample=True) for m in (model, fast) if torch.manual_seed(1)]
    assert torch.equal(*sampled)


def test_a_cache_is_written_in_place_where_it_lies():
    model = model_of("llama", **FAMILIES["llama"])
    fast, plain = mycel.jit(model), transformers.StaticCache(model.config, max_cache_len=16)
    cache = transformers.StaticCache(model.config, max_cache_len=16)
    ids, token = torch.tensor([[5, 7, 11]]), torch.tensor([[9]])
    with torch.no_grad():
        fast(ids, past_key_values=cache)  # makes its tensors
        model(ids, past_key_values=plain)
        at = [layer.keys.data_ptr() for layer in cache.layers]
        for _ in range(3):
            out, wanted = fast(token, past_key_values=cache), model(token, past_key_values=plain)
            torch.testing.assert_close(out.logits, wanted.logits)
    assert [layer.keys.data_ptr() for layer in cache.layers] == at
    assert [layer.keys.data_ptr() for layer in out.past_key_values.layers] == at
    assert int(cache.layers[1].cumulative_length) == 6
    for mine, theirs in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close((mine.keys, mine.values), (theirs.keys, theirs.values))
    assert len(fast.entries) == 1


def test_of_an_encoder_and_a_decoder_text_is_that_of_transformers_and_it_says_how():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    torch.manual_seed(0)
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.tensor([[0, 5, 6], [3, 4, 5]])
    how = {"attention_mask": (ids != 0).long(), "max_new_tokens": 5, "do_sample": False}
    with pytest.warns(UserWarning, match="an EncoderDecoderCache is no input .*\n.* text is written as without jit"):
        text = mycel.jit(model).generate(ids, **how)
    assert torch.equal(text, model.generate(ids, **how))


def test_a_growing_cache_runs_as_it_is_and_says_so():
    model = model_of("llama", **FAMILIES["llama"])
    fast, cache, token = mycel.jit(model), transformers.DynamicCache(), torch.tensor([[9]])
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            out = fast(token, past_key_values=cache)
    assert out.past_key_values.get_seq_length() == 3 and not fast.entries
    with pytest.raises(CaptureError) as refused:
        mycel.capture(model, token, past_key_values=cache)
    text = "\n\n".join([*(str(w.message) for w in caught), str(refused.value).split("\n  at")[0]])
    golden("cache_messages", text + "\n  try " + str(refused.value).split("\n  try ")[1])


def test_an_update_reads_what_was_there_before():
    """What reads the old value after the write, and a result that is the new one."""
    rows = torch.arange(3)

    def swap(x, new):
        old = x * 1
        x.index_copy_(0, rows, new)
        return old.sum(0), x, x * 2

    fast = mycel.jit(swap)
    with torch.no_grad():
        for grad in (False, True):
            x, new = torch.randn(5, 4), torch.randn(3, 4)
            y, other = x.clone(), new.clone()
            got, wanted = fast(x, new), swap(y, other)
            torch.testing.assert_close((*got, x), (*wanted, y))
            assert got[1] is x or not grad


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_finite_are_refused(temperature):
    draw = lambda logits: sample.draw(torch.tensor(logits), temperature, torch.Generator().manual_seed(0))
    for logits in ([1.0, float("nan"), 2.0], [float("inf"), 1.0, 2.0], [-float("inf")] * 3):
        with pytest.raises(TrainError, match="not finite"):
            draw(logits)
    assert draw([-float("inf"), 3.0, -float("inf")]) == 1
    assert temperature or draw([2.0, 3.0, 3.0]) == 1  # the first of those that tie
