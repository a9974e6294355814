"""Tokenizers of Hugging Face folders: the same ids as transformers gives, chats by their template, and what is
refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mycel.errors import TrainError
from mycel.train.data import prepare
from mycel.train.tokenize import load_tokenizer

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAST_ONLY = "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """`folders(name)`: a folder with a small byte-level BPE; a chat template, bos or limits on request."""
    rust = Rust(models.BPE())
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    corpus = ["the cat sat on the mat and the hat " * 9, "def f(x):\n    return x + 1\n" * 9]
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    rust.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    root = tmp_path_factory.mktemp("tokenizers")

    def make(name, template=None, bos=False, limit=None):
        folder = root / name
        folder.mkdir()
        mine = Rust.from_str(rust.to_str())
        if bos:
            mine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        if limit:
            mine.enable_truncation(limit)
            mine.enable_padding(length=limit)
        mine.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "chat_template": template,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v}))
        return folder

    return make


@pytest.fixture(scope="module")
def plain(folders):
    return load_tokenizer(folders("plain"))


@given(st.text(st.characters(codec="utf-8")), st.text())
@settings(max_examples=30, deadline=None)
def test_ids_are_those_of_transformers(plain, text, other):
    other = other.encode(errors="ignore").decode()
    ids = plain.encode(text)
    assert ids.tolist() == plain._tokenizer(text, add_special_tokens=False)["input_ids"] and ids.dtype == np.int64
    assert [x.tolist() for x in plain.encode_batch([other, text])] == [plain.encode(other).tolist(), ids.tolist()]
    assert (ids < plain.vocab).all()
    if "<" not in text:
        assert plain.decode([*ids, plain.eos]) == text


def test_what_the_folder_says_is_known(plain, folders):
    assert (plain.bos, plain.eos, plain.adds_bos) == (0, 1, False) and 260 < plain.vocab <= 400
    assert load_tokenizer(folders("bos", bos=True)).adds_bos


def test_limits_saved_in_the_folder_do_not_hold(folders, plain):
    limited = load_tokenizer(folders("limited", limit=4))
    assert (
        limited.encode("the cat sat on the mat").tolist() == plain.encode("the cat sat on the mat").tolist()
        and len(limited.encode("a")) == 1
    )


def test_the_fingerprint_follows_the_files(folders):
    paths = [folders("f1"), folders("f2"), folders("f3", template=CHATML), folders("f4", bos=True)]
    prints = [load_tokenizer(f).fingerprint for f in paths]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def documents(split, count):
    """The rows of a split as (token, label) pairs, without padding."""
    got = split.batch(np.arange(count))
    return [
        list(zip(i[m > 0].tolist(), l[m > 0].tolist(), strict=True))
        for i, l, m in zip(*(got[k] for k in ("input_ids", "labels", "attention_mask")), strict=True)
    ]


@pytest.mark.parametrize("bos", [False, True])
def test_documents_begin_and_end_as_the_tokenizer_says(folders, tmp_path, bos):
    tokenizer = load_tokenizer(folders(f"marks{bos}", bos=bos))
    (tmp_path / "a.jsonl").write_text('{"text": "the cat"}\n{"prompt": "the", "response": " mat"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "the hat"}\n')
    data = prepare(
        tmp_path / "a.jsonl",
        validation=tmp_path / "b.jsonl",
        tokenizer=tokenizer,
        length=20,
        pack=False,
        cache=tmp_path / "cache",
    )
    text, pair = documents(data.train, 2)
    begin = [0] if bos else []
    assert [t for t, _ in text] == [*begin, *tokenizer.encode("the cat"), 1] and all(t == label for t, label in text)
    assert [t for t, _ in pair] == [*begin, *tokenizer.encode("the"), *tokenizer.encode(" mat"), 1]
    assert [label for _, label in pair] == [-100] * (len(begin) + len(tokenizer.encode("the"))) + [
        *tokenizer.encode(" mat"),
        1,
    ]


def chats(tmp_path, tokenizer, messages):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(
            json.dumps({"messages": [{"role": r, "content": c} for r, c in messages], "id": name}) + "\n"
        )
    return prepare(
        tmp_path / "a.jsonl",
        validation=tmp_path / "b.jsonl",
        tokenizer=tokenizer,
        length=64,
        pack=False,
        cache=tmp_path / "cache",
    )


def test_in_chats_the_assistant_alone_carries_loss(folders, tmp_path):
    tokenizer = load_tokenizer(folders("chat", template=CHATML, bos=True))
    turns = [("user", "the cat"), ("assistant", "sat"), ("user", "on"), ("assistant", "the mat"), ("user", "left out")]
    (pairs,) = documents(chats(tmp_path, tokenizer, turns).train, 1)
    whole = "<|user|>the cat</s>\n<|assistant|>sat</s>\n<|user|>on</s>\n<|assistant|>the mat</s>\n"
    assert [t for t, _ in pairs] == tokenizer.encode(whole).tolist()
    assert tokenizer._tokenizer.decode([l for _, l in pairs if l != -100]) == "sat</s>\nthe mat</s>\n"


def test_a_chat_may_begin_with_the_assistant(folders, tmp_path):
    tokenizer = load_tokenizer(folders("greeting", template=CHATML))
    (pairs,) = documents(chats(tmp_path, tokenizer, [("assistant", "the cat")]).train, 1)
    assert [t for t, _ in pairs] == [l for _, l in pairs] == tokenizer.encode("<|assistant|>the cat</s>\n").tolist()


@pytest.mark.parametrize(
    ("template", "turns", "why"),
    [
        (None, [("user", "x"), ("assistant", "y")], "the tokenizer has no chat template"),
        (LAST_ONLY, [("user", "x"), ("assistant", "y"), ("user", "z"), ("assistant", "w")], "rewrites earlier turns"),
        (
            "{{ raise_exception('roles must alternate') }}",
            [("user", "x"), ("assistant", "y")],
            "refuses these messages: roles must alternate",
        ),
    ],
)
def test_chats_that_cannot_be_told_apart_are_refused(folders, tmp_path, template, turns, why):
    tokenizer = load_tokenizer(folders(f"refused{abs(hash(why))}", template=template))
    with pytest.raises(TrainError, match=rf"messages cannot be used: .*{why}.*\n  at .*a.jsonl:1\n  try"):
        chats(tmp_path, tokenizer, turns)


def test_folders_without_a_tokenizer_are_refused(tmp_path, folders):
    with pytest.raises(TrainError, match=r"no tokenizer folder: .*gone\n  try       tokenizer: bytes"):
        load_tokenizer(tmp_path / "gone")
    with pytest.raises(TrainError, match=r"no tokenizer files in the folder; it has nothing\n  at "):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrainError, match=r"it has config.json\n"):
        load_tokenizer(tmp_path)
    broken = folders("broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(TrainError, match=r"the tokenizer cannot be loaded: .*\n  at .*broken\n  try"):
        load_tokenizer(broken)
