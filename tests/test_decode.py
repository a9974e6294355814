"""Text by generated code over a static cache is the text that transformers' `generate` writes; a cache that grows is
given such code as a static one of more places, or runs as it is."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
import transformers
from golden import golden

import mycel
from mycel import growing_cache
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
    monkeypatch.setattr(decode, "LEAST_IN_C", 8)
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
    monkeypatch.setattr(decode, "LEAST_IN_C", 16)
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


@pytest.mark.parametrize(
    "how", [{"prompt_lookup_num_tokens": 2}, {"generation_config": {"use_cache": False}}, {"assistant_model": True}]
)
def test_generate_of_a_jitted_model_has_another_cache_where_that_is_asked_for(how):
    model = model_of("llama", **FAMILIES["llama"])
    if "generation_config" in how:
        how = {"generation_config": transformers.GenerationConfig(**how["generation_config"], pad_token_id=0)}
    if "assistant_model" in how:
        how = {"assistant_model": model_of("llama", **FAMILIES["llama"])}
    ids = torch.tensor([[5, 7, 11, 5, 7]])
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, **how)
    assert torch.equal(mycel.jit(model).generate(ids, max_new_tokens=8, do_sample=False, **how), wanted)


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


GROWING = {
    "one text": {},
    "drawn": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several at once": {"num_return_sequences": 2, "do_sample": True},
}


@pytest.mark.parametrize("how", GROWING)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_growing_cache_is_a_static_one_of_more_places(family, how, monkeypatch):
    """transformers' own `generate` of a model with a jitted forward, which is what makes the cache: the same text, by
    one capture for each size, two here, with rows of other lengths."""
    monkeypatch.setattr(growing_cache, "LEAST", 8)
    model = model_of(family, **FAMILIES[family])
    ids = torch.tensor([[0, 0, 5, 7, 11], [1, 2, 3, 4, 5]])
    given = {"do_sample": False, **GROWING[how], "attention_mask": (ids > 0).long(), "max_new_tokens": 11}
    generated = lambda: torch.manual_seed(1) and model.generate(ids, **given)
    wanted = generated()
    fast = model.forward = mycel.jit(model.forward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert torch.equal(generated(), wanted)
    assert len(fast.entries) == 2, "of 8 places and of 16"


def growing_by(call, cache, tokens):
    return [call(torch.tensor([[t]]), past_key_values=cache).logits for t in tokens]


def test_a_growing_cache_holds_what_it_would_hold():
    """Also after it was cut, copied, or given to the model itself; what it showed before stays as it was."""
    model = model_of("llama", **FAMILIES["llama"])
    fast, caches = mycel.jit(model), [transformers.DynamicCache(), transformers.DynamicCache()]
    seen, logits = [[], []], [[], []]
    with torch.no_grad():
        for call, cache, showed, out in zip((fast, model), caches, seen, logits, strict=True):
            out += [call(torch.tensor([[3, 4, 5]]), past_key_values=cache).logits]
            out += growing_by(call, cache, [7, 8, 9])
            showed += [cache.layers[1].keys, cache.layers[1].keys.clone()]
            other = copy.deepcopy(cache)
            cache.crop(-2)
            out += growing_by(call, cache, [1, 2]) + growing_by(call, other, [6]) + growing_by(model, cache, [5])
            result = call(input_ids=torch.tensor([[6, 7]]), past_key_values=cache, return_dict=False)
            assert result[1] is cache and cache.get_seq_length() == 9 and other.get_seq_length() == 7
            out += [result[0]]
            with torch.inference_mode():
                out += [x.clone() for x in growing_by(call, cache, [5])]
            out += growing_by(call, cache, [4])
            showed += [x for layer in (*cache.layers, *other.layers) for x in (layer.keys, layer.values)]
    torch.testing.assert_close(logits[0], logits[1])
    assert torch.equal(*seen[0][:2]), "a place is written once"
    torch.testing.assert_close(seen[0], seen[1])
    assert fast.entries and call(torch.tensor([[1]]), past_key_values=cache).past_key_values is cache


def test_a_static_cache_that_is_free_serves_the_next():
    model = model_of("llama", **FAMILIES["llama"])
    fast, kept = mycel.jit(model), []
    with torch.no_grad():
        for keep in (False, True, False):
            cache = transformers.DynamicCache()
            fast(torch.tensor([[3, 4, 5]]), past_key_values=cache)
            growing_by(fast, cache, [7])
            kept += [cache.layers[0].keys] * keep
            assert len(fast._twins.twins) == 1
            at = fast._twins.twins[0].cache.layers[0].keys.data_ptr()
            kept.append(at)
            del cache
            gc.collect()
    first, showed, second, third = kept
    assert first == second != third, "what somebody still sees is left to them"
    torch.testing.assert_close(showed, model(torch.tensor([[3, 4, 5, 7]])).past_key_values.layers[0].keys)


def test_a_call_that_breaks_leaves_a_growing_cache_as_it_was():
    model = model_of("llama", **FAMILIES["llama"])
    fast, cache = mycel.jit(model), transformers.DynamicCache()

    def broken(**named):
        fast(**named)
        raise KeyboardInterrupt

    with torch.no_grad():
        fast(torch.tensor([[3, 4, 5]]), past_key_values=cache)
        growing_by(fast, cache, [7])
        given = {"input_ids": torch.tensor([[9]]), "past_key_values": cache}
        with pytest.raises(KeyboardInterrupt):
            growing_cache.with_twin(broken, model, fast._twins, (), given)
        got = growing_by(fast, cache, [8])[0]
        torch.testing.assert_close(got, model(torch.tensor([[3, 4, 5, 7, 8]])).logits[:, -1:])


def test_a_growing_cache_runs_as_it_is_and_says_so():
    """Where autograd records, and where the cache is of another kind."""
    model = model_of("llama", **FAMILIES["llama"])
    fast, cache, token = mycel.jit(model), transformers.DynamicCache(), torch.tensor([[9]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            out = fast(token, past_key_values=cache)
        sliding = model_of("mistral", **FAMILIES["mistral"])
        with torch.no_grad():
            mycel.jit(sliding)(token, past_key_values=transformers.DynamicCache(config=sliding.config))
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


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.9999])
def test_of_the_likeliest_alone(top_p):
    """Those that together have the chance, and no more: also where they are many, or one."""
    g = torch.Generator().manual_seed(0)
    for width in (5, 3000):
        for spread in (0.01, 1.0, 8.0):
            logits = spread * torch.randn(width, generator=g)
            chances = torch.softmax(logits.double(), -1)
            ordered, at = chances.sort(descending=True)
            wanted = set(at[ordered.cumsum(0) - ordered < top_p].tolist())
            assert set(sample._likeliest(chances, top_p).nonzero().flatten().tolist()) == wanted
            drawn = {sample.draw(logits, 1.0, g, top_p) for _ in range(50)}
            assert drawn <= wanted
