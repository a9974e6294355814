"""From files to batches: what is in a sequence, what carries loss, what is kept for validation, and what is refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
import sysconfig
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mycel.errors import TrainError
from mycel.train import documents, sources, store
from mycel.train.data import check_vocab, prepare
from mycel.train.tokenize import Bytes, load_tokenizer

EOS = 257
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # laws write and sync many small files
law = settings(max_examples=40, deadline=None)
texts = st.text(st.characters(codec="utf-8"), max_size=30)
examples = st.lists(
    st.one_of(
        texts.map(lambda t: {"text": t}), st.tuples(texts, texts).map(lambda p: {"prompt": p[0], "response": p[1]})
    ),
    max_size=12,
)


@pytest.fixture
def make(tmp_path):
    """`make(files, …)`: prepare data from files of these contents; one named held.* is for validation, `use` names the
    others if not all."""

    def run(files, use=None, **options):
        for name, content in files.items():
            write(tmp_path / "data" / name, content)
        held = [tmp_path / "data" / name for name in files if name.startswith("held")]
        named = [tmp_path / "data" / name for name in use or files if not name.startswith("held")]
        return prepare(
            named,
            **{"validation": held or None, "length": 8, "tokenizer": Bytes(), "cache": tmp_path / "cache", **options},
        )

    return run


def write(path: Path, content) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, np.ndarray):
        np.save(path, content) if path.suffix == ".npy" else content.tofile(path)
    elif isinstance(content, list):
        path.write_text("\n".join(json.dumps(x) for x in content) + "\n")
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def in_temporary(files, **options):
    """As `make`, for hypothesis."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        paths = [write(Path(folder) / "data" / name, content) for name, content in files.items()]
        held = write(Path(folder) / "data" / "held.txt", "validation, and enough of it")
        data = prepare(paths, **{"validation": held, "tokenizer": Bytes(), "cache": Path(folder) / "cache", **options})
        return data, everything(data.train)


def everything(split):
    return split.batch(np.arange(len(split)))


def reference(example) -> list[tuple[int, bool]]:
    """The (token, loss) pairs of an example, written down plainly."""
    prompt, response = (example["prompt"], example["response"]) if "prompt" in example else ("", example["text"])
    pairs = [(b, False) for b in prompt.encode()] + [(b, True) for b in response.encode()]
    return [*pairs, (EOS, True)] if pairs else []


def rows(pairs, length):
    ids = [t for t, _ in pairs] + [0] * (length - len(pairs))
    labels = [t if loss else -100 for t, loss in pairs] + [-100] * (length - len(pairs))
    return ids, labels


@law
@given(examples, st.integers(2, 20))
def test_packed_windows_are_the_joined_documents(records, length):
    stream = [pair for r in records for pair in reference(r)]
    windows = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)] or [stream]
    windows = [w for w in windows if any(loss for _, loss in w[1:])]
    assume(windows)
    _, got = in_temporary({"a.jsonl": records}, length=length)
    assert set(got) == {"input_ids", "labels"} and all(
        v.dtype == np.int64 and v.shape == (len(windows), length) for v in got.values()
    )
    assert [(list(i), list(l)) for i, l in zip(got["input_ids"], got["labels"], strict=True)] == [
        rows(w, length) for w in windows
    ]


@law
@given(examples, st.integers(2, 20))
def test_rows_keep_the_response_as_far_as_it_fits(records, length):
    expected = []
    for pairs in map(reference, records):
        head = next((i for i, (_, loss) in enumerate(pairs) if loss), 0)
        skipped = max(0, min(len(pairs) - length, head - 1))
        row = pairs[skipped : skipped + length]
        if any(loss for _, loss in row[1:]):
            expected.append(row)
    assume(expected)
    data, got = in_temporary({"a.jsonl": records}, length=length, pack=False)
    assert [(list(i), list(l)) for i, l in zip(got["input_ids"], got["labels"], strict=True)] == [
        rows(r, length) for r in expected
    ]
    assert got["attention_mask"].sum(1).tolist() == [len(r) for r in expected]
    longer = sum(len(reference(r)) > length for r in records)
    assert any(f"{longer} of" in line for line in data.report) == bool(longer)


@law
@given(examples, st.integers(2, 20), st.booleans(), st.integers(0, 3))
def test_tokens_with_loss_are_counted_without_reading(records, length, pack, first):
    data, got = in_temporary({"a.jsonl": [*records, {"prompt": "who", "response": "me"}]}, length=length, pack=pack)
    assert [data.train.loud(i, first) for i in range(len(data.train))] == (got["labels"][:, first:] != -100).sum(
        1
    ).tolist()


@law
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(2, 12),
    st.floats(0.01, 0.99),
    st.integers(0, 5),
    st.booleans(),
)
def test_no_document_or_window_is_on_both_sides(sizes, length, share, seed, pack):
    """Document i is made of one character of its own, so that it is known wherever it shows up."""
    records = [{"text": chr(33 + i) * n} for i, n in enumerate(sizes)]
    stream = [t for r in records for t, _ in reference(r)]
    assume(len(stream) >= 2 * length if pack else len(sizes) > 1)
    data, train = in_temporary({"a.jsonl": records}, length=length, pack=pack, validation=None, split=share, seed=seed)
    held = everything(data.validation)
    assert len(data.train) > 0 and len(data.validation) > 0
    if any("end of the data" in line for line in data.report):
        together = np.concatenate([train["input_ids"], held["input_ids"]]).reshape(-1).tolist()
        assert together == stream[: len(together)] and len(together) == len(stream) // length * length
        return
    marks = [set(b["input_ids"].reshape(-1)) - {0, EOS} for b in (train, held)]
    assert not marks[0] & marks[1]
    total, part = (len(stream), data.tokens["validation"]) if pack else (len(sizes), len(data.validation))
    assert part <= 2 * max(share * total, length if pack else 1)


def test_equal_documents_fall_on_one_side(make):
    records = [{"text": f"document {i % 7} " * 5} for i in range(70)]
    data = make({"a.jsonl": records}, pack=False, length=80, split=0.3)
    sides = [{bytes(row[:12].tolist()) for row in everything(s)["input_ids"]} for s in (data.train, data.validation)]
    assert not sides[0] & sides[1] and len(sides[0]) + len(sides[1]) == 7


def test_the_seed_and_nothing_else_changes_the_division(make):
    files = {"a.jsonl": [{"text": f"document {i}"} for i in range(60)]}
    first, again, other = (everything(make(files, split=0.2, seed=s).validation)["input_ids"] for s in (0, 0, 1))
    assert (first == again).all() and not np.array_equal(first, other)


@law
@given(st.text(st.characters(codec="utf-8"), min_size=1), st.integers(5, 9))
def test_long_text_read_in_pieces_is_the_same_text(text, piece):
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, pytest.MonkeyPatch.context() as patch:
        path = write(Path(folder) / "a.txt", text)
        patch.setattr(documents, "PIECE_BYTES", piece)
        parts = list(documents.segments(sources.DataFile(path, "text", "", (0,)), {}, Bytes()))
    assert "".join(s.text for s in parts) == text.removeprefix("\ufeff")
    assert [s.opens for s in parts] == [True] + [False] * (len(parts) - 1) and [s.closes for s in parts][::-1] == [
        True
    ] + [False] * (len(parts) - 1)
    assert all(a.text.endswith("\n") or "\n" not in a.text for a, _ in pairwise(parts))


def test_order_of_batch_rows_is_the_order_asked_for(make):
    data = make({"a.txt": "abcdefgh" * 20})
    whole = everything(data.train)["input_ids"]
    asked = np.array([3, 0, 3, 5])
    assert (data.train.batch(asked)["input_ids"] == whole[asked]).all()
    with pytest.raises(IndexError):
        data.train.batch([len(data.train)])


# Arrays.


def test_arrays_are_used_where_they_lie(make, tmp_path):
    flat = np.arange(1000, dtype=np.uint32)
    data = make({"a.npy": flat, "b.bin": (flat % 500).astype(np.uint16), "held.txt": "validation"})
    assert (everything(data.train)["input_ids"].reshape(-1) == np.concatenate([flat, flat % 500])).all()
    assert {p.stat().st_size for p in (tmp_path / "cache").rglob("tokens.bin")} == {0, 2 * len("validation") + 2}


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
@pytest.mark.parametrize("beside", ["a.json", "a.bin.json"])
def test_the_json_beside_a_bin_says_its_dtype(make, dtype, beside):
    ids = np.arange(96, dtype=dtype)
    data = make({"a.bin": ids, beside: json.dumps({"dtype": dtype}), "held.npy": ids}, use=["a.bin"])
    assert (everything(data.train)["input_ids"].reshape(-1) == ids).all()
    other = make({"a.bin": ids, beside: json.dumps({"dtype": "uint8"}), "held.npy": ids}, use=["a.bin"])
    assert other.tokens["train"] == ids.nbytes and other.fingerprint != data.fingerprint


@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_rows_of_an_array_are_sequences(make, monkeypatch, chunk):
    monkeypatch.setattr(store, "CHUNK", chunk)
    table = np.arange(200).reshape(10, 20)
    held = table[:2] + 300
    packed = make({"a.npy": table, "t.txt": "text too", "held.npy": held})
    windows = everything(packed.train)["input_ids"]
    assert (windows[:20] == table[:, :16].reshape(20, 8)).all() and windows[20].tolist() == list(b"text too")
    assert any("40 tokens at the ends of array rows" in line for line in packed.report)
    padded = make({"a.npy": table, "held.npy": held}, pack=False, length=24)
    got = everything(padded.train)
    assert (
        (got["input_ids"][:, :20] == table).all()
        and (got["attention_mask"].sum(1) == 20).all()
        and (got["labels"][:, 20:] == -100).all()
    )
    divided = make({"a.npy": table}, pack=False, length=24, split=0.3)
    assert (
        len(divided.validation) == 3
        and len(np.unique(np.concatenate([everything(s)["input_ids"] for s in (divided.train, divided.validation)])))
        == 200
    )


def test_a_stream_gives_its_end_for_validation(make):
    data = make({"a.npy": np.arange(100)}, split=0.25)
    assert (everything(data.train)["input_ids"].reshape(-1) == np.arange(72)).all()
    assert (everything(data.validation)["input_ids"].reshape(-1) == np.arange(72, 96)).all()
    assert data.tokens == {"train": 72, "validation": 24}


def test_arrays_need_no_tokenizer(make):
    assert make({"a.npy": np.arange(100)}, tokenizer=None).tokens["train"] == 88


# Where data is.


def test_folders_globs_and_lists_name_the_same_files(make, tmp_path):
    files = {
        "b.txt": "second " * 5,
        "a.txt": "first " * 5,
        "deep/c.py": "third " * 5,
        ".hidden": b"\xff",
        "held/h.txt": "validation",
    }
    make(files, use=["a.txt"])
    options = {"length": 8, "tokenizer": Bytes(), "cache": tmp_path / "cache", "validation": tmp_path / "data/held"}
    for name in [f for f in files if f.startswith("held")]:
        (tmp_path / "data" / name).rename(write(tmp_path / "held" / "h.txt", ""))
    (tmp_path / "data/held").rmdir()
    options["validation"] = tmp_path / "held"
    root = str(tmp_path / "data")
    named = [[root], f"{root}/**/*.*", [f"{root}/a.txt", f"{root}/b.txt", f"{root}/deep"], [f"{root}/a.txt", root]]
    assert len({prepare(n, **options).fingerprint for n in named}) == 1
    assert prepare([f"{root}/b.txt", root], **options).fingerprint != prepare(root, **options).fingerprint


def table(form: str, records: list[dict]) -> bytes:
    """Records as parquet, or as arrow's file or stream."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows, out = arrow.Table.from_pylist(records), arrow.BufferOutputStream()
    if form == "parquet":
        parquet.write_table(rows, out, row_group_size=1)
    else:
        with (arrow.ipc.new_file if form == "file" else arrow.ipc.new_stream)(out, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=1)
    return out.getvalue().to_pybytes()


RECORDS = [{"prompt": 'a, "b"\n', "response": "c\td é"}, {"prompt": "", "response": "x"}]


@pytest.mark.parametrize("form", ["parquet", "file", "stream", "saved"])
def test_tables_are_read_as_their_records(make, form):
    content = table("stream" if form == "saved" else form, RECORDS)
    files = {"a.parquet" if form == "parquet" else "a.arrow": content}
    if form == "saved":  # as Hugging Face's save_to_disk leaves it, with what a map has cached
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        files = {"data-00000-of-00001.arrow": content, "cache-1.arrow": b"old", "state.json": json.dumps(state)}
    held = {"held.txt": "validation, and enough of it"}
    got = make({**{f"d/{name}": x for name, x in files.items()}, **held}, use=["d"], length=32)
    wanted = everything(make({"b.jsonl": RECORDS, **held}, length=32).train)
    assert all(np.array_equal(everything(got.train)[name], wanted[name]) for name in wanted)


def test_what_datasets_saves_is_read(make, tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "data" / "saved", num_shards=2)
    held = {"held.txt": "validation, and enough of it"}
    got = everything(make(held, use=["saved"], length=32).train)
    assert np.array_equal(got["labels"], everything(make({"b.jsonl": RECORDS, **held}, length=32).train)["labels"])


def test_zstandard_is_read_in_pieces(make, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    monkeypatch.setattr(documents, "PIECE_BYTES", 100)
    content = "".join(f"line {i}\n" for i in range(400))
    packed = arrow.compress(content.encode(), codec="zstd", asbytes=True)
    held = {"held.txt": "validation, and enough of it"}
    got = everything(make({"d/a.txt.zst": packed, **held}, use=["d"]).train)
    assert np.array_equal(got["input_ids"], everything(make({"b.txt": content, **held}).train)["input_ids"])


def test_without_pyarrow_it_says_what_to_install(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = r"which is not installed\n  at .*\n  try       pip install 'mycel\[data\]'"
    for name in ("a.parquet", "a.arrow", "a.txt.zst"):
        with pytest.raises(TrainError, match=message):
            make({name: b"x" * 20})


@pytest.mark.parametrize("form", ["json", "csv", "tsv", "jsonl.gz", "json.gz", "csv.gz"])
def test_the_same_records_in_any_form_are_the_same_tokens(make, form):
    records = RECORDS
    kind = form.removesuffix(".gz")
    if kind == "json":
        text = json.dumps(records)
    elif kind == "jsonl":
        text = "\n".join(map(json.dumps, records))
    else:
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, ["prompt", "response"], delimiter="\t" if kind == "tsv" else ",")
        writer.writeheader()
        writer.writerows(records)
        text = "\ufeff" + out.getvalue()
    content = gzip.compress(text.encode()) if form.endswith(".gz") else text.encode()
    held = {"held.txt": "validation, and enough of it"}
    got = everything(make({f"a.{form}": content, **held}, length=32).train)
    wanted = everything(make({"b.jsonl": records, **held}, length=32).train)
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_compressed_text_is_text(make):
    content = "line\n" * 40
    held = {"held.txt": "validation, and enough of it"}
    got = everything(make({"d/a.txt.gz": gzip.compress(content.encode()), **held}, use=["d"]).train)
    assert np.array_equal(got["input_ids"], everything(make({"b.txt": content, **held}).train)["input_ids"])


def test_a_folder_with_jsonl_gives_only_that(make, tmp_path):
    data = make(
        {"d/README.md": "no data", "d/a.jsonl": [{"text": "some data here"}], "held.txt": "validation"}, use=["d"]
    )
    assert data.tokens["train"] == 8 and bytes(everything(data.train)["input_ids"][0].tolist()) == b"some dat"


def test_the_standard_library_is_data(tmp_path):
    files = sources.find("stdlib", "auto")
    assert files == sources.find(["stdlib"], "auto") and sum(p.stat().st_size for p, _ in files) <= sources.STDLIB_BYTES
    names = [p.relative_to(sysconfig.get_paths()["stdlib"]) for p, _ in files]
    assert {"abc.py", "json/decoder.py", "asyncio/events.py"} <= {str(n) for n in names}
    assert not {"test", "site-packages", "__pycache__"}.intersection(part for n in names for part in n.parts)


def test_an_installation_without_source_text_is_told(monkeypatch, tmp_path):
    write(tmp_path / "lib" / "abc.pyc", b"")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    with pytest.raises(TrainError, match=r"(?s)ships no source text .*0 bytes.*try       data.train"):
        sources.find("stdlib", "auto")


# Reports and fingerprints.


def test_the_report_says_what_was_left_out(make):
    records = [
        {"prompt": "why? " * 4, "response": "because"},
        {"text": ""},
        {"text": "x" * 40},
        {"prompt": "", "response": ""},
        {"text": "short"},
    ]
    data = make({"a.jsonl": records, "held.jsonl": [{"text": "short"}]}, pack=False, tokenizer=Bytes(), length=16)
    assert data.report == (
        "train: 38 tokens, 3 sequences of 16",
        "validation: 6 tokens, 1 sequence of 16",
        "2 empty documents left out",
        "2 of 3 examples are longer than 16 tokens and were truncated",
        "1 of 1 validation documents are in the training data too",
    )


def test_the_fingerprint_follows_the_data_and_not_the_place(make, tmp_path):
    files = {"a.jsonl": [{"text": f"document {i}"} for i in range(20)]}
    data = make(files)
    moved = prepare(
        write(tmp_path / "elsewhere/x.jsonl", files["a.jsonl"]), tokenizer=Bytes(), length=8, cache=tmp_path / "other"
    )
    assert moved.fingerprint == data.fingerprint
    changed = [make(files, length=9), make(files, pack=False), make(files, split=0.2), make(files, seed=1)]
    changed += [make({"a.jsonl": files["a.jsonl"][1:]}), make({"held.txt": "validation", **files})]
    assert len({d.fingerprint for d in [data, *changed]}) == 7


def test_progress_ends_at_the_whole(make):
    reports = []
    make({f"{i}.txt": "x" * 400_000 for i in range(6)}, progress=lambda *a: reports.append(a))
    done = [d for _, d, _ in reports]
    assert len(done) >= 3 and done == sorted(done) and reports[-1] == ("tokenising", 2_400_000, 2_400_000)


# What is refused.

LINES = [{"text": "a good line"}] * 3
REFUSED = {
    "missing file": ({}, ["dta.txt"], {}, r"no such data file: .*dta.txt\n  at .*data\n  try"),
    "near name": ({"data.txt": "x"}, ["dta.txt"], {}, r"try       data.txt"),
    "glob": ({"a.txt": "x"}, ["*.jsonl"], {}, r"no file matches the pattern .*\*.jsonl"),
    "empty folder": ({"d/.hidden": "x"}, ["d"], {}, r"no text file among its 0 files"),
    "two formats": ({"d/a.npy": np.arange(9), "d/b.jsonl": LINES}, ["d"], {}, r"several formats: jsonl and tokens"),
    "json": ({"a.json": '{"text": "x"}'}, None, {}, r"not a list of JSON objects but an object\n.*\n.*format: jsonl"),
    "json of numbers": ({"a.json": "[1]"}, None, {}, r"not a list of JSON objects but a number"),
    "json lines": ({"a.json": '{"text": "x"}\n{"text": "y"}'}, None, {}, r"not JSON: Extra data, line 2\n.*\n.*jsonl"),
    "csv of another width": ({"a.csv": "text,id\na\n"}, None, {}, r"as many cells as .* has 2\n  at .*a.csv:2"),
    "csv in Latin-1": ({"a.csv": b"text\n\xff\n"}, None, {}, r"not a CSV file in UTF-8"),
    "csv without the field": ({"a.csv": "body\na\n"}, None, {}, r"no field 'text'; fields there are: 'body'"),
    "cut gzip": ({"a.txt.gz": gzip.compress(b"some text")[:-9]}, None, {}, r"damaged or cut short.*\n  at .*a.txt.gz"),
    "no gzip": ({"a.jsonl.gz": b"some text"}, None, {}, r"damaged or cut short"),
    "damaged parquet": ({"a.parquet": b"PAR1"}, None, {}, r"not a parquet file, or a damaged one.*\n  at .*a.parquet"),
    "damaged arrow": ({"d/a.arrow": b"ARROW1xxx"}, ["d"], {}, r"not an arrow file, or a damaged one.*\n  at .*a.arrow"),
    "damaged zstandard": ({"a.txt.zst": b"x" * 40}, None, {}, r"damaged or cut short.*\n  at .*\n  try       zstd -t"),
    "parquet in gzip": ({"a.parquet.gz": b"x"}, None, {}, r"its own compression.*\n  at .*\n  try       gunzip"),
    "xz": ({"a.txt.xz": b"x"}, None, {}, r"\.xz files are not read\n.*\n  try       unxz"),
    "images": (
        {"d/cat/1.png": b"\x89PNG"},
        ["d"],
        {},
        r"\.png files are not read\n.*1.png\n  try       train.task=classify",
    ),
    "several datasets": (
        {"d/dataset_dict.json": '{"splits": ["train", "test"]}', "d/train/a.arrow": b"x"},
        ["d"],
        {},
        r"several datasets: train, test\n  at .*\n  try       .*d/train",
    ),
    "format": ({"a.txt": "x"}, None, {"format": "xml"}, r"no such data format: 'xml'\n  try       one of auto, text"),
    "no array": ({"a.txt": "x"}, None, {"format": "tokens"}, r"from .npy and .bin files, not from .txt"),
    "empty file": (
        {"a.txt": ""},
        None,
        {},
        r"the data is empty: no token in 1 file\n  at .*a.txt\n  try       a file with",
    ),
    "empty records": (
        {"a.jsonl": [{"text": ""}]},
        None,
        {},
        r"the data is empty: no token in 1 file\n  at .*a.jsonl\n  try       text in its records, and in chats",
    ),
    "empty lines": ({"a.jsonl": "\n\n"}, None, {}, r"the data is empty"),
    "empty array": ({"a.npy": np.zeros(0, np.int64)}, None, {}, r"the data is empty"),
    "empty bin": ({"a.bin": b""}, None, {}, r"the data is empty"),
    "bytes": ({"a.txt": b"good text\n\xff\xfe"}, None, {}, r"not UTF-8 text: byte 0xff at offset 10\n  at .*a.txt"),
    "cut character": ({"a.txt": "gut ü".encode()[:-1]}, None, {}, r"byte 0xc3 at offset 4"),
    "bytes in a line": ({"a.jsonl": b'{"text": "a"}\n{"text": "\xff"}'}, None, {}, r"byte 0xff at offset 24"),
    "bad json": (
        {"a.jsonl": '{"text": "a"}\n{"text": }\n'},
        None,
        {},
        r"not a JSON object: Expecting value, column 10\n  at .*a.jsonl:2\n",
    ),
    "deep json": ({"a.jsonl": "[" * 100_000}, None, {}, r"not a JSON object: .*\n  at .*a.jsonl:1\n"),
    "no object": ({"a.jsonl": "[1]"}, None, {}, r"not a JSON object but a list\n  at .*:1"),
    "no field": (
        {"a.jsonl": [*LINES, {"body": "x", "id": 3}]},
        None,
        {},
        r"no field 'text'; fields there are: 'body', 'id'\n  at .*:4\n  try       data\.fields\.text=body$",
    ),
    "half a pair": (
        {"a.jsonl": [{"prompt": "x", "text": "y"}]},
        None,
        {},
        r"no field 'response'; fields there are: 'prompt', 'text'\n  at .*\n  try       data\.fields\.response=text$",
    ),
    "a choice of two": (
        {"a.jsonl": [{"prompt": "x", "chosen": "y", "rejected": "z"}]},
        None,
        {},
        r"no field 'response'.*\n.*\n  try       train\.task=dpo or train\.task=reward, which learn from pairs$",
    ),
    "a pair by other names": (
        {"a.jsonl": [{"id": "7", "prompt": "x", "completion": "y"}]},
        None,
        {},
        r"no field 'response'.*\n.*\n  try       data\.fields\.response=id or data\.fields\.response=completion$",
    ),
    "no text": (
        {"a.jsonl": [{"text": 3}]},
        None,
        {},
        r"'text' is a number, not text\n  at .*:1\n  try .*in each record$",
    ),
    "half a character": (
        {"a.jsonl": '{"text": "\\ud800"}'},
        None,
        {},
        r"half a character, U\+D800, in the text\n  at .*:1",
    ),
    "messages": (
        {"a.jsonl": [{"messages": [{"role": "user", "content": "x"}]}]},
        None,
        {},
        r"bytes tokenizer has no chat template\n  at .*:1\n  try",
    ),
    "odd messages": ({"a.jsonl": [{"messages": ["x"]}]}, None, {}, r"messages are a list of .*, this is not"),
    "float array": ({"a.npy": np.ones(9)}, None, {}, r"must be integers, the array has dtype float64"),
    "deep array": ({"a.npy": np.ones((2, 2, 2), int)}, None, {}, r"this has shape \(2, 2, 2\)"),
    "columns": ({"a.npy": np.asfortranarray(np.ones((4, 9), int))}, None, {}, r"stored by columns"),
    "pickle": ({"a.npy": np.array([{}], object)}, None, {}, r"no .npy array, or a damaged one"),
    "damaged array": ({"a.npy": b"\x93NUMPY"}, None, {}, r"no .npy array, or a damaged one"),
    "negative id": ({"a.npy": np.array([1, 2, -7, 3] * 9)}, None, {}, r"-7 is no token id\n  at .*a.npy, token 2\n"),
    "huge id": ({"a.npy": np.array([1, 2**31, 3])}, None, {}, r"2147483648 is no token id\n  at .*, token 1\n"),
    "odd bin": ({"a.bin": b"abc"}, None, {}, r"3 bytes are no whole number of uint16 ids"),
    "bin dtype": (
        {"a.bin": b"abcd", "a.json": '{"dtype": "float16"}'},
        ["a.bin"],
        {},
        r"no dtype for tokens: 'float16'\n  at .*a.json",
    ),
    "bin json": ({"a.bin": b"abcd", "a.json": "{}"}, ["a.bin"], {}, r"no dtype is said for a.bin\n  at .*a.json"),
    "narrow rows": (
        {"a.npy": np.ones((9, 6), int)},
        None,
        {},
        r"rows have 6 tokens, fewer than data.length 8\n  at .*a.npy\n  try       length: 6",
    ),
    "no tokenizer": ({"a.txt": "x" * 40}, None, {"tokenizer": None}, r"text needs a tokenizer\n  at .*a.txt"),
    "little data": (
        {"a.txt": "x" * 12},
        None,
        {},
        r"too little data for a training and a validation sequence of 8 tokens: 13 tokens of 16\n  at .*\n  try",
    ),
    "one example": ({"a.jsonl": LINES[:1]}, None, {"pack": False}, r"1 usable examples of 2"),
    "equal examples": ({"a.jsonl": LINES}, None, {"pack": False}, r"all 3 examples are equal"),
    "length": ({"a.txt": "x" * 40}, None, {"length": 1}, r"at least 2 tokens, data.length is 1"),
    "split": ({"a.txt": "x" * 40}, None, {"split": 1.0}, r"between 0 and 1, not 1.0"),
    "no list": ({}, [], {}, r"the list of data files is empty"),
    "nothing to predict": (
        {"a.npy": np.array([1]), "held.txt": "x" * 40},
        None,
        {},
        r"the train data is empty: .*\n  at .*a.npy",
    ),
    "nothing to check": (
        {"a.txt": "x" * 40, "held.npy": np.array([1])},
        None,
        {},
        r"the validation data is empty: .*\n  at .*held.npy",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_data_is_refused_with_what_where_and_what_to_try(make, tmp_path, case):
    if case in ("damaged parquet", "damaged arrow", "damaged zstandard"):
        pytest.importorskip("pyarrow")
    files, use, options, message = REFUSED[case]
    with pytest.raises(TrainError, match=message):
        make(files, use=use, **options) if use != [] else prepare([], length=8, tokenizer=Bytes(), cache=tmp_path)
    assert not list(tmp_path.glob("cache/.*"))


def test_a_validation_file_in_the_training_data_is_refused(make, tmp_path):
    make(files := {"a.txt": "x" * 40, "b.txt": "y" * 40})
    with pytest.raises(TrainError, match=r"a validation file is training data too\n  at .*b.txt"):
        make(files, validation=f"{tmp_path}/data/../data/b.txt")


def test_special_files_are_refused(make, tmp_path):
    with pytest.raises(TrainError, match="not a regular file"):
        prepare("/dev/null", length=8, tokenizer=Bytes(), cache=tmp_path)


def test_ids_the_model_does_not_have_are_found(make, monkeypatch):
    monkeypatch.setattr(store, "CHUNK", 7)
    ids = np.arange(100) % 50
    ids[[60, 61]] = 777, 999
    data = make({"t.txt": "text" * 10, "good.npy": np.arange(100), "bad.npy": ids, "held.txt": "validation"})
    check_vocab(data, 1000)
    with pytest.raises(
        TrainError,
        match=(
            r"token id 777 is out of range: the model has ids 0 to 776\n  at .*bad.npy, token 60\n  try       the "
            r"tokenizer"
        ),
    ):
        check_vocab(data, 777)
    with pytest.raises(TrainError, match=r"token id 257 .*0 to 256\n  at .*t.txt, token 40"):
        check_vocab(data, 257)
    with pytest.raises(TrainError, match=r"held.txt"):
        check_vocab(make({"a.npy": np.arange(100), "held.txt": "validation"}), 120)


def test_neither_torch_nor_transformers_is_imported(tmp_path):
    code = """
import sys
from pathlib import Path
from mycel.train.data import prepare
from mycel.train.tokenize import load_tokenizer
prepare(sys.argv[1], length=8, tokenizer=load_tokenizer("bytes"), cache=Path(sys.argv[2]))
print({"torch", "transformers", "tokenizers"} & set(sys.modules))
"""
    path = write(tmp_path / "a.txt", "text " * 20)
    done = subprocess.run(
        [sys.executable, "-c", code, path, tmp_path / "cache"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "set()\n", done.stderr


@law
@given(st.text(st.characters(codec="utf-8")))
def test_bytes_go_there_and_back(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert (
        tokenizer.decode(ids) == tokenizer.decode([tokenizer.bos, *ids, tokenizer.eos]) == text
        and (ids < tokenizer.vocab).all()
    )
    assert (tokenizer.encode_batch(["", text])[1] == ids).all()
