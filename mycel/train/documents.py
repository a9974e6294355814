"""What is in a data file: segments of text with and without loss, or an array of token ids.

    text     the file is one document
    jsonl    {"text": …}                      a document
             {"prompt": …, "response": …}     loss on the response only
             {"messages": [{role, content}]}  loss on the assistant's turns only, written out by the tokenizer's chat
                                              template
    json     a list of such objects
    csv      a line of names, then rows of such fields; .tsv has tabs
    parquet  rows of such fields; and arrow, as Hugging Face's datasets are saved on disk
    tokens   .npy of one dim (a stream) or two (rows are sequences);  .bin, flat, uint16 unless a JSON beside it says
             {"dtype": …}

Text, JSON and CSV may be compressed (.gz, .zst).  Parquet, arrow and .zst are read by pyarrow.  Long text comes in
several segments, cut after a line's end, so that no file but a JSON list is ever whole in memory.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from mycel.errors import TrainError
from mycel.train.sources import DataFile, is_compressed, reading, suffix_of
from mycel.train.tokenize import Part, Tokenizer

PIECE_BYTES = 4 << 20
ROWS = 1024  # of a table, in memory at once

DOCUMENT_FIELDS = ("text", "prompt", "response", "messages")
FIELDS = {key: key for key in (*DOCUMENT_FIELDS, "label", "chosen", "rejected")}


@dataclass(frozen=True)
class Segment:
    """A piece of a document; `marked`: it has its own marks of begin and end, and gets no bos and eos."""

    text: str
    loss: bool = True
    opens: bool = True
    closes: bool = True
    marked: bool = False


def segments(source: DataFile, fields: Mapping[str, str], tokenizer: Tokenizer) -> Iterator[Segment]:
    """The documents of a text or JSONL file, in order."""
    if source.format == "text":
        return text_pieces(source.path)
    rows = records(source.path, source.format)
    return (s for record, where in rows for s in _of_record(record, where, fields, tokenizer))


def records(path: Path, format: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The objects of a file, each with where it is."""
    readers = {"jsonl": _json_lines, "json": _json_list, "csv": _rows, "parquet": _parquet, "arrow": _arrow}
    return readers[format](path)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed where they are compressed."""
    with reading(path):
        try:
            file: Any
            with _decompressing(path) as file:
                yield file
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise _damaged(path, e) from None


def _decompressing(path: Path) -> Any:
    """The file, its bytes as they were before they were compressed."""
    if not is_compressed(path):
        return path.open("rb")
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rb")
    return io.BufferedReader(_Zstd(path))


class _Zstd(io.RawIOBase):
    """The bytes of a .zst file."""

    def __init__(self, path: Path) -> None:
        self.path, self.stream = path, arrow_library(path).input_stream(str(path), compression="zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self.stream.read(len(buffer))
        except OSError as e:
            if e.errno is not None:
                raise
            raise _damaged(self.path, e) from None
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self.stream.close()
        super().close()


def _damaged(path: Path, error: Exception) -> TrainError:
    tool = "gzip" if path.suffix.lower() == ".gz" else "zstd"
    return TrainError(
        f"the compressed file is damaged or cut short: {str(error).splitlines()[0]}\n  at        {path}\n"
        f"  try       {tool} -t {path.name}"
    )


def arrow_library(path: Path) -> Any:
    """pyarrow; TrainError where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise TrainError(
            f"{path.suffix} files are read by pyarrow, which is not installed\n  at        {path}\n"
            "  try       pip install 'mycel[data]'"
        ) from None
    return pyarrow


def _parquet(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The rows of a parquet file, one group after the other."""
    library = arrow_library(path)
    from pyarrow import parquet

    return _batches(path, library, lambda: parquet.ParquetFile(path).iter_batches(ROWS))


def _arrow(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The rows of an arrow file: a stream, as datasets are saved, or a file with an index."""
    library = arrow_library(path)
    from pyarrow import ipc

    def batches() -> Iterator[Any]:
        with library.memory_map(str(path)) as source:
            if source.read(6) == b"ARROW1":
                file = ipc.open_file(source)
                yield from (file.get_batch(i) for i in range(file.num_record_batches))
            else:
                source.seek(0)
                yield from ipc.open_stream(source)

    return _batches(path, library, batches)


def _batches(path: Path, library: Any, batches: Callable[[], Iterator[Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The rows of arrow's batches."""
    number = 0
    with reading(path):
        try:
            for batch in batches():
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{path}, row {number}"
        except library.ArrowException as e:
            kind = path.suffix.lower().removeprefix(".") or "arrow"
            raise TrainError(
                f"not {'a parquet' if kind == 'parquet' else 'an arrow'} file, or a damaged one: "
                f"{str(e).splitlines()[0]}\n  at        {path}\n  try       writing it again"
            ) from None


def class_names(path: Path, format: str) -> dict[str, list[str]]:
    """The names of the classes whose numbers a file holds, by field: a table says them as `datasets` writes it."""
    if format not in ("parquet", "arrow"):
        return {}
    library = arrow_library(path)
    with reading(path):
        try:
            said = (_schema(path, format).metadata or {}).get(b"huggingface", b"{}")
            features = json.loads(said).get("info", {}).get("features", {})
        except (ValueError, AttributeError, library.ArrowException):  # a damaged file is refused where it is read
            return {}
    return {name: f["names"] for name, f in features.items() if isinstance(f, dict) and f.get("_type") == "ClassLabel"}


def _schema(path: Path, format: str) -> Any:
    """Fields of a table and what is said of them."""
    library = arrow_library(path)
    from pyarrow import ipc, parquet

    if format == "parquet":
        return parquet.read_schema(path)
    with library.memory_map(str(path)) as source:
        whole = source.read(6) == b"ARROW1"
        source.seek(0)
        return (ipc.open_file(source) if whole else ipc.open_stream(source)).schema


def array(path: Path) -> npt.NDArray[Any]:
    """The token ids of a .npy or .bin file, mapped, not read."""
    ids = _bin(path) if path.suffix.lower() == ".bin" else _npy(path)
    if not np.issubdtype(ids.dtype, np.integer):
        raise TrainError(f"token ids must be integers, the array has dtype {ids.dtype}\n  at        {path}")
    if ids.ndim not in (1, 2):
        raise TrainError(f"an array of tokens has 1 or 2 dims, this has shape {ids.shape}\n  at        {path}")
    if not ids.flags.c_contiguous:
        raise TrainError(
            f"the array is stored by columns\n  at        {path}\n  try       saving numpy.ascontiguousarray(array)"
        )
    return ids


def bin_dtype(path: Path) -> np.dtype[Any]:
    """The dtype of a .bin file: what `dtype` in the JSON beside it says, otherwise uint16."""
    for beside in (path.with_suffix(".json"), path.with_name(path.name + ".json")):
        if not beside.is_file():
            continue
        with reading(beside):
            text = beside.read_bytes()
        try:
            name = json.loads(text)["dtype"]
        except (ValueError, KeyError, TypeError):
            raise TrainError(
                f'no dtype is said for {path.name}\n  at        {beside}\n  try       {{"dtype": "uint16"}}'
            ) from None
        if name not in ("uint8", "uint16", "uint32", "int32", "int64"):
            raise TrainError(
                f"no dtype for tokens: {name!r}\n  at        {beside}\n"
                "  try       uint16, uint32, or uint8, int32, int64"
            )
        return np.dtype(name)
    return np.dtype(np.uint16)


def _bin(path: Path) -> npt.NDArray[Any]:
    dtype = bin_dtype(path)
    with reading(path):
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise TrainError(
                f"{size} bytes are no whole number of {dtype} ids\n  at        {path}\n"
                f"  try       the right dtype in {path.stem}.json"
            )
        return np.asarray(np.memmap(path, dtype, "r")) if size else np.zeros(0, dtype)


def _npy(path: Path) -> npt.NDArray[Any]:
    with reading(path):
        try:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (ValueError, EOFError) as e:
            raise TrainError(f"no .npy array, or a damaged one: {str(e).splitlines()[0]}\n  at        {path}") from e


def text_pieces(path: Path) -> Iterator[Segment]:
    """The file's text in pieces that end with a line where that is possible, or between two characters."""
    offset, data = 0, b""
    with opened(path) as file:
        while True:
            chunk = file.read(PIECE_BYTES)
            data, last = data + chunk, len(chunk) < PIECE_BYTES
            cut = len(data) if last else _boundary(data)
            text = _decode(data[:cut], path, offset)
            yield Segment(text.removeprefix("\ufeff") if offset == 0 else text, opens=offset == 0, closes=last)
            if last:
                return
            offset, data = offset + cut, data[cut:]


def _boundary(data: bytes) -> int:
    """Where to cut: after the last line's end, otherwise before the last character's first byte."""
    if line := data.rfind(b"\n") + 1:
        return line
    at = len(data) - 1
    while at > len(data) - 4 and data[at] & 0xC0 == 0x80:
        at -= 1
    return at


def _decode(data: bytes, path: Path, offset: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise TrainError(
            f"not UTF-8 text: byte 0x{data[e.start]:02x} at offset {offset + e.start}\n  at        {path}\n"
            "  try       converting it to UTF-8; other forms of data go by their suffix (.parquet, .npy …)"
        ) from None


def _json_lines(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The object on each line."""
    offset = 0
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            text = _decode(line, path, offset).removeprefix("\ufeff" if number == 1 else "")
            offset += len(line)
            if text.strip():
                yield _object(text, f"{path}:{number}"), f"{path}:{number}"


def _object(line: str, where: str) -> Mapping[str, Any]:
    """One line of JSONL."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as e:
        reason = f"{e.msg}, column {e.colno}" if isinstance(e, json.JSONDecodeError) else str(e)
        raise TrainError(
            f"not a JSON object: {reason}\n  at        {where}\n  try       one whole object on each line"
        ) from None
    if not isinstance(record, dict):
        raise TrainError(
            f"not a JSON object but {_kind(record)}\n  at        {where}\n  try       one object on each line"
        )
    return record


def _json_list(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The objects of a JSON list; a list of them is whole in memory."""
    with opened(path) as file:
        data = _decode(file.read(), path, 0).removeprefix("\ufeff")
    try:
        records = json.loads(data)
    except (ValueError, RecursionError) as e:
        reason = f"{e.msg}, line {e.lineno}" if isinstance(e, json.JSONDecodeError) else str(e)
        hint = "format: jsonl for one object on each line, or format: text"
        raise TrainError(f"not JSON: {reason}\n  at        {path}\n  try       {hint}") from None
    wrong = [x for x in records if not isinstance(x, dict)] if isinstance(records, list) else [records]
    if wrong or not isinstance(records, list):
        raise TrainError(
            f"not a list of JSON objects but {_kind(wrong[0])}\n  at        {path}\n"
            '  try       [{"text": …}, …], or format: jsonl or text'
        )
    yield from ((record, f"{path}, object {i}") for i, record in enumerate(records, 1))


def _rows(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The rows of a CSV file by the names in its first line."""
    with opened(path) as file:
        text = io.TextIOWrapper(file, "utf-8-sig", newline="")
        rows = csv.DictReader(text, delimiter="\t" if suffix_of(path) == ".tsv" else ",", strict=True)
        try:
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    raise TrainError(
                        f"a row has not as many cells as the first line, which has {len(rows.fieldnames or ())}\n"
                        f"  at        {where}\n  try       quotes around cells that hold a comma or a line's end"
                    )
                yield row, where
        except (csv.Error, UnicodeDecodeError) as e:
            raise TrainError(
                f"not a CSV file in UTF-8: {e}\n  at        {path}:{rows.line_num}\n  try       saving it again as such"
            ) from None


def _of_record(
    record: Mapping[str, Any], where: str, fields: Mapping[str, str], tokenizer: Tokenizer
) -> Iterator[Segment]:
    """An object with the fields of a document, as segments."""
    if fields["prompt"] in record or fields["response"] in record:
        yield Segment(_field(record, "prompt", fields, where), loss=False, closes=False)
        yield Segment(_field(record, "response", fields, where), opens=False)
    elif fields["messages"] in record and fields["text"] not in record:
        yield from _chat(record[fields["messages"]], where, tokenizer)
    else:
        yield Segment(_field(record, "text", fields, where))


def _other_field(record: Mapping[str, Any], key: str, fields: Mapping[str, str]) -> str:
    """The setting that names another field of a record: those with text that stand for nothing yet."""
    if {fields.get("chosen"), fields.get("rejected")} <= {*record}:
        return "train.task=dpo or train.task=reward, which learn from pairs"
    texts = [name for name, value in record.items() if isinstance(value, str)]
    free = [name for name in texts if name not in fields.values()]
    free = free or [name for name in texts if name not in (fields["prompt"], fields["response"])]
    return " or ".join(f"data.fields.{key}={name}" for name in free[:3]) or f"{fields[key]!r} with text in each record"


def _field(record: Mapping[str, Any], key: str, fields: Mapping[str, str], where: str) -> str:
    name = fields[key]
    if name not in record:
        there = ", ".join(map(repr, record)) or "none"
        raise TrainError(
            f"no field {name!r}; fields there are: {there}\n  at        {where}\n"
            f"  try       {_other_field(record, key, fields)}"
        )
    text = record[name]
    if not isinstance(text, str):
        hint = _other_field(record, key, fields)
        raise TrainError(f"field {name!r} is {_kind(text)}, not text\n  at        {where}\n  try       {hint}")
    return _sound(text, where)


def _chat(messages: Any, where: str, tokenizer: Tokenizer) -> Iterator[Segment]:
    """A chat as segments; one without a turn of the assistant's is an empty document."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise TrainError(f'messages are a list of {{"role": text, "content": text}}, this is not\n  at        {where}')
    try:
        parts: list[Part] = tokenizer.chat(messages) or [("", False)]
    except ValueError as e:
        raise TrainError(
            f"messages cannot be used: {e}\n  at        {where}\n"
            "  try       prompt and response fields, or another tokenizer"
        ) from e
    for i, (text, loss) in enumerate(parts):
        yield Segment(_sound(text, where), loss, opens=i == 0, closes=i == len(parts) - 1, marked=True)


def _sound(text: str, where: str) -> str:
    r"""The text, unless it has half characters (JSON's \ud800): no tokenizer takes these."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise TrainError(f"half a character, U+{ord(text[e.start]):04X}, in the text\n  at        {where}") from None
    return text


def _kind(value: Any) -> str:
    return {
        "NoneType": "null",
        "bool": "true or false",
        "int": "a number",
        "float": "a number",
        "list": "a list",
        "dict": "an object",
    }.get(type(value).__name__, "text")
