"""A stream of data: the windows are those of all documents joined, whoever asks for which rows of them, and a run on it
goes on to the bit."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import training
from training import TEXT, config, measured

from mycel.errors import TrainError
from mycel.train import stream as streams
from mycel.train.documents import FIELDS
from mycel.train.loop import train
from mycel.train.sources import find
from mycel.train.tokenize import Bytes

disk = training.disk  # a fixture
RECORDS = [{"prompt": f"{i}?", "response": "yes " * (i % 5)} for i in range(9)]


def tokens_and_labels(records) -> tuple[list[int], list[int]]:
    """Tokens and labels of all of them, written down plainly."""
    ids, labels = [], []
    for r in records:
        prompt, response = r["prompt"].encode(), [*r["response"].encode(), 257]
        ids += [*prompt, *response]
        labels += [-100] * len(prompt) + response
    return ids, labels


@pytest.mark.parametrize("together", [1, 50, 1 << 18])
def test_windows_are_the_joined_documents_epoch_after_epoch(tmp_path, together, monkeypatch):
    monkeypatch.setattr(streams, "TOGETHER", together)
    for name, part in (("a.jsonl", RECORDS[:4]), ("b.jsonl", RECORDS[4:])):
        (tmp_path / name).write_text("\n".join(map(json.dumps, part)))
    ids, labels = (np.array(x * 3) for x in tokens_and_labels(RECORDS))
    stream = streams.Stream(find(tmp_path, "auto"), FIELDS, Bytes(), 8)
    count = 2 * len(ids) // 3 // 8
    wanted = [(ids[8 * i : 8 * i + 8], labels[8 * i : 8 * i + 8]) for i in range(count)]
    loud = [w for w in wanted if (w[1][1:] != -100).any()]
    for rows in (range(5), range(5, 9), [7, 8], range(9, 14), range(2)):  # the last: from the start again
        batch = stream.batch(rows)
        for row, i in enumerate(rows):
            assert np.array_equal(batch["input_ids"][row], loud[i][0])
            assert np.array_equal(batch["labels"][row], loud[i][1])
    assert stream.batch(())["input_ids"].shape == (0, 8)


def test_a_run_on_a_stream_goes_on_to_the_bit(disk, tmp_path):
    (tmp_path / "held.txt").write_text(TEXT[:400])
    level = {"schedule": {"kind": "constant", "warmup": 0}, "checkpoint": {"every": 5}}
    data = {"stream": True, "validation": str(tmp_path / "held.txt"), "shuffle_buffer": 7}
    whole, twice = (config(disk, tmp_path / name, data=data, **level) for name in ("whole", "twice"))
    assert train(whole) == 0
    assert train(config(disk, tmp_path / "twice", data=data, train={"steps": 5}, **level)) == 0
    assert train(twice, resume=tmp_path / "twice") == 0
    assert measured(tmp_path / "twice")[-1] == measured(tmp_path / "whole")[-1]


@pytest.mark.parametrize("buffer", [1, 3, 50])
def test_a_mixed_stream_is_the_same_windows_in_another_order(tmp_path, buffer):
    """None is lost or doubled but those that are held back, none comes earlier than the buffer lets it; the order is
    the seed's, wherever one begins to read."""
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 23) for i in range(8 * 71)))
    files = find(tmp_path, "auto")

    def read(seed, first=0, **more):
        stream = streams.Stream(files, FIELDS, Bytes(), 8, **more, seed=seed)
        return [stream.batch([i])["input_ids"].tobytes() for i in range(first, 60)]

    plain = [*read(0)]
    more = streams.Stream(files, FIELDS, Bytes(), 8).batch(range(60 + buffer))["input_ids"]
    mixed = read(1, buffer=buffer)
    assert Counter(mixed) <= Counter(x.tobytes() for x in more)
    assert all(mixed[i] in [x.tobytes() for x in more[: i + 1 + buffer]] for i in range(60))
    assert mixed == read(1, buffer=buffer) and mixed[20:] == read(1, 20, buffer=buffer)
    assert buffer == 1 or (mixed != plain and mixed != read(2, buffer=buffer))


def test_an_empty_stream_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(TrainError, match="the data is empty: no token in 1 file\n"):
        streams.Stream(find(tmp_path, "auto"), FIELDS, Bytes(), 8).batch([0])


def test_a_stream_of_what_is_no_text_or_has_no_tokenizer_is_refused(tmp_path, disk):
    (tmp_path / "a.txt").write_text("some text")
    np.save(tmp_path / "b.npy", np.arange(9))
    for name, tokenizer, says in (
        ("a.txt", None, f"text needs a tokenizer\n  at        {tmp_path}/a.txt\n  try       data.tokenizer: bytes"),
        ("b.npy", "bytes", f"a stream is of text, and {tmp_path}/b.npy holds tokens\n  at        data.stream\n"),
    ):
        data = {"train": str(tmp_path / name), "validation": str(tmp_path / "a.txt"), "stream": True}
        with pytest.raises(TrainError) as error:
            train(config(disk, tmp_path / "run", data={**data, "tokenizer": tokenizer}))
        assert str(error.value).startswith(says)
