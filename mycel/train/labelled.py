"""Examples with an answer of their own, by `train.task`: what a batch of them is, and what is learnt from it.

    classify   {"text": …, "label": …}                      input_ids, attention_mask, labels: classes by their names,
                                                            their numbers, or as a saved dataset calls them
               a folder of images for each class            pixel_values, labels
    reward     {"prompt": …, "chosen": …, "rejected": …}    input_ids [pairs, 2, length] …: the preferred one first;
                                                            texts, or chats: lists of messages, the prompt before them
    dpo        the same                                     and `reference`: log-likelihoods under the model as it began

A row of a batch is one example, so that ranks and parts of a batch take rows of it as they do of sequences.  Texts are
tokenised when a run starts and held in memory; images are read when their batch comes.  Of a text that is too long the
start of the prompt is left out, then the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mycel.errors import TrainError
from mycel.sizes import counted
from mycel.train.data import Data, Names
from mycel.train.documents import class_names, records
from mycel.train.sources import IMAGES, RECORDS, SUFFIXES, find, near, suffix_of
from mycel.train.split import NO_LOSS, drawn, undivided
from mycel.train.tokenize import Tokenizer, needs_tokenizer

Arrays = dict[str, npt.NDArray[Any]]
PAIR = '{"prompt": …, "chosen": …, "rejected": …}'
LABELLED = '{"text": …, "label": …}'


@dataclass(frozen=True)
class Examples:
    """Rows of arrays, all of one length: what texts have become."""

    arrays: Arrays
    length: int
    hashes: npt.NDArray[np.uint64]
    classes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        return len(self.hashes)

    def __len__(self) -> int:
        return self.count

    @property
    def tokens(self) -> int:
        """Tokens in all rows, padding not counted."""
        return int(self.arrays["attention_mask"].sum())

    @property
    def each(self) -> tuple[str, int, str]:
        """What a row is counted in, how many of it, and why."""
        ids = self.arrays["input_ids"]
        pair = "2 (texts of a pair) x " if ids.ndim == 3 else ""
        return "tokens", int(np.prod(ids.shape[1:])), f"{pair}{self.length} (length)"

    def batch(self, indices: Sequence[int] | npt.NDArray[Any]) -> Arrays:
        """The rows at `indices`."""
        at = np.asarray(indices, np.int64)
        return {name: x[at] for name, x in self.arrays.items()}

    def lengths(self, indices: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """How many tokens each row has, padding not counted; of a pair, the longer text."""
        mask = self.arrays["attention_mask"][np.asarray(indices, np.int64)]
        lengths: npt.NDArray[np.int64] = mask.sum(-1).reshape(len(mask), -1).max(1, initial=0)
        return lengths

    def loud(self, index: int, first: int) -> int:
        """Every example weighs the same."""
        return 1

    def rows(self, at: npt.NDArray[Any]) -> Examples:
        """Some of them."""
        return Examples({name: x[at] for name, x in self.arrays.items()}, self.length, self.hashes[at], self.classes)

    def with_array(self, name: str, values: npt.NDArray[Any]) -> Examples:
        return Examples({**self.arrays, name: values}, self.length, self.hashes, self.classes)


@dataclass(frozen=True)
class Images:
    """Files, and the number of the class that each is in; `mean` and `deviation` are of pixels from 0 to 1."""

    files: tuple[Path, ...]
    labels: npt.NDArray[np.int64]
    size: int
    hashes: npt.NDArray[np.uint64]
    classes: tuple[str, ...]
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)
    length: int = 1

    @property
    def count(self) -> int:
        return len(self.files)

    def __len__(self) -> int:
        return self.count

    @property
    def tokens(self) -> int:
        return self.count

    @property
    def each(self) -> tuple[str, int, str]:
        return "images", 1, f"1 ({self.size} x {self.size} pixels)"

    def batch(self, indices: Sequence[int] | npt.NDArray[Any]) -> Arrays:
        """The images at `indices`, resized."""
        pixels = np.zeros((len(indices), 3, self.size, self.size), np.float32)
        for row, index in enumerate(indices):
            pixels[row] = self._pixels(self.files[int(index)])
        return {"pixel_values": pixels, "labels": self.labels[np.asarray(indices, np.int64)]}

    def _pixels(self, path: Path) -> npt.NDArray[np.float32]:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as image:
                small = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR)
        except (OSError, UnidentifiedImageError) as e:
            raise TrainError(f"not an image, or a damaged one: {e}\n  at        {path}") from None
        values = (np.asarray(small, np.float32) / 255 - np.array(self.mean)) / np.array(self.deviation)
        return values.transpose(2, 0, 1).astype(np.float32)

    def loud(self, index: int, first: int) -> int:
        return 1

    def rows(self, at: npt.NDArray[Any]) -> Images:
        """Some of them."""
        where = np.flatnonzero(at) if at.dtype == bool else at
        files = tuple(self.files[int(i)] for i in where)
        return Images(files, self.labels[where], self.size, self.hashes[where], self.classes, self.mean, self.deviation)


def labelled_data(
    task: str,
    sources: Names,
    validation: Names | None,
    *,
    split: float,
    seed: int,
    format: str,
    fields: Mapping[str, str],
    tokenizer: Tokenizer | None,
    length: int,
    pad: int,
    image: Mapping[str, Any] | None,
    classes: Sequence[str] | None = None,
) -> Data:
    """The examples of a task; `image`: size, mean and deviation, where the model takes images; `classes`: what it calls
    its own, which are those of the data if they have these names."""

    def read(named: Names, classes: Sequence[str] | None, only: bool) -> Any:
        return examples(task, named, format, fields, tokenizer, length, pad, image, classes, only)

    given = read(sources, classes, False)
    if validation is None:
        least = np.ones(given.count, np.int64)
        target = max(1, round(split * given.count))
        held = drawn(given.hashes, least, target, 1, seed) if given.count > 1 else None
        if held is None:
            raise undivided(given.hashes, target, "data.train")
        train, kept = given.rows(~held), given.rows(held)
    else:
        train, kept = given, read(validation, given.classes or None, True)
    if train.classes and len(train.classes) < 2:
        raise TrainError(f"there is one class: {train.classes[0]}\n  at        data.train\n  try       two or more")
    noun, of = ("example", f" of {len(train.classes)} classes") if task == "classify" else ("pair", "")
    report = tuple(f"{name}: {counted(x.count, noun)}{of}" for name, x in (("train", train), ("validation", kept)))
    identity = [task, length, train.hashes.tolist(), kept.hashes.tolist(), train.classes]
    fingerprint = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
    return Data(train, kept, report, fingerprint, ())


def examples(
    task: str,
    named: Names,
    format: str,
    fields: Mapping[str, str],
    tokenizer: Tokenizer | None,
    length: int,
    pad: int,
    image: Mapping[str, Any] | None,
    classes: Sequence[str] | None = None,
    only: bool = True,
) -> Any:
    """All examples of some files; `classes`: as a trained model numbers them, and there are no others if `only` these;
    else as they are in the data."""
    if image is not None:
        return _images(named, image, classes, only)
    if tokenizer is None:
        raise needs_tokenizer("data")
    if task == "classify":
        return _labelled(named, format, fields, tokenizer, length, pad, classes, only)
    return _pairs(named, format, fields, tokenizer, length, pad)


def _numbered(
    labels: Sequence[str], own: Sequence[str], known: Sequence[str] | None, only: bool, named: Names
) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """The number of each label's class, and what the classes are called: as is `known`, if labels are such names or
    numbers; or as the data's `own`."""
    if known is not None and not any(name.isdecimal() for name in known) and all(label.isdecimal() for label in labels):
        numbers = np.array([int(label) for label in labels], np.int64)
        if numbers.max() < len(known):
            return numbers, tuple(known)
    classes = tuple(known if known is not None and (only or {*labels} <= {*known}) else own)
    at = {name: i for i, name in enumerate(classes)}
    if strange := [label for label in labels if label not in at]:
        raise TrainError(
            f"the label {strange[0]!r} is none of the classes: {', '.join(classes)}\n"
            f"  at        {', '.join(map(str, _paths(named)))}\n  try       the labels that the model is trained with"
        )
    return np.array([at[label] for label in labels], np.int64), classes


# -- texts


def _pairs(
    named: Names, format: str, fields: Mapping[str, str], tokenizer: Tokenizer, length: int, pad: int
) -> Examples:
    """A preferred and a rejected text after the same prompt."""
    rows, hashes = [], []
    for record, where in (row for file in _tables(named, format) for row in records(*file)):
        if isinstance(record.get(fields["chosen"]), list):
            names = fields["chosen"], fields["rejected"]
            texts = [_chat(tokenizer, record, fields["prompt"], name, where) for name in names]
        else:
            prompt, *answers = (_text(record, key, fields, where, PAIR) for key in ("prompt", "chosen", "rejected"))
            texts = [(prompt, answer, False) for answer in answers]
        if texts[0] == texts[1]:
            raise TrainError(f"chosen and rejected are the same text\n  at        {where}\n  try       leaving it out")
        rows.append([_row(tokenizer, *text, length, pad) for text in texts])
        hashes.append(_hash(*(part for text in texts for part in text[:2])))
    _some(rows, named, PAIR)
    kinds = ("input_ids", "labels", "attention_mask")
    arrays = {kind: np.array([[text[i] for text in pair] for pair in rows], np.int64) for i, kind in enumerate(kinds)}
    return Examples(arrays, length, np.array(hashes, np.uint64))


def _labelled(
    named: Names,
    format: str,
    fields: Mapping[str, str],
    tokenizer: Tokenizer,
    length: int,
    pad: int,
    classes: Sequence[str] | None,
    only: bool,
) -> Examples:
    """Texts with the class they are in; classes in the order of their names, of their numbers, or of a saved
    dataset."""
    rows: list[Any] = []
    labels, hashes, said = [], [], dict[str, None]()
    for path, kind in _tables(named, format):
        names = class_names(path, kind).get(fields["label"], [])
        said.update(dict.fromkeys(names))
        for record, where in records(path, kind):
            text = _text(record, "text", fields, where, LABELLED)
            label = _label(record, fields, names, where)
            rows.append(_row(tokenizer, "", text, False, length, pad))
            labels.append(label)
            hashes.append(_hash(text, label))
    _some(rows, named, LABELLED)
    counted = [str(i) for i in range(1 + max(map(int, labels)))] if all(map(str.isdecimal, labels)) else None
    numbers, known = _numbered(labels, [*said] or counted or sorted({*labels}), classes, only, named)
    arrays = {
        "input_ids": np.array([ids for ids, _, _ in rows], np.int64),
        "attention_mask": np.array([mask for _, _, mask in rows], np.int64),
        "labels": numbers,
    }
    return Examples(arrays, length, np.array(hashes, np.uint64), known)


def _label(record: Mapping[str, Any], fields: Mapping[str, str], names: Sequence[str], where: str) -> str:
    """The class of a text, by its name if it has one."""
    label = record.get(fields["label"])
    if fields["label"] not in record:
        raise _no_field(record, "label", fields, where, LABELLED)
    if isinstance(label, bool) or not isinstance(label, (int, str)):
        raise TrainError(
            f"the label is {label!r}, no text and no whole number\n  at        {where}\n  try       {LABELLED}"
        )
    return names[label] if isinstance(label, int) and 0 <= label < len(names) else str(label)


def _chat(tokenizer: Tokenizer, record: Mapping[str, Any], prompt: str, name: str, where: str) -> tuple[str, str, bool]:
    """A chat up to its last answer, that answer, and that both have their own marks."""
    before = record.get(prompt) if isinstance(record.get(prompt), list) else []
    given = record.get(name)
    messages = [*(before or []), *(given if isinstance(given, list) else [])]
    sound = all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    if not messages or not sound or messages[-1]["role"] != "assistant":
        raise TrainError(
            f"{name} is no chat that ends with the assistant's turn\n  at        {where}\n"
            '  try       [{"role": "user", "content": …}, {"role": "assistant", "content": …}]'
        )
    try:
        *earlier, (answer, _) = tokenizer.chat(messages)
    except ValueError as e:
        raise TrainError(f"messages cannot be used: {e}\n  at        {where}\n  try       texts: {PAIR}") from None
    return "".join(text for text, _ in earlier), answer, True


def _row(
    tokenizer: Tokenizer, prompt: str, answer: str, marked: bool, length: int, pad: int
) -> tuple[list[int], list[int], list[int]]:
    """Ids, labels and mask of a prompt and what follows it; `marked`: they have their own begin and end."""
    before, after = ([int(i) for i in tokenizer.encode(text)] for text in (prompt, answer))
    begins = tokenizer.adds_bos and not marked and tokenizer.bos is not None
    before = [*([tokenizer.bos] if begins and tokenizer.bos is not None else []), *before]
    after = [*after, *([tokenizer.eos] if tokenizer.eos is not None and not marked else [])][:length]
    before = before[max(0, len(before) + len(after) - length) :]
    rest = length - len(before) - len(after)
    return (
        [*before, *after, *[pad] * rest],
        [*[NO_LOSS] * len(before), *after, *[NO_LOSS] * rest],
        [*[1] * (len(before) + len(after)), *[0] * rest],
    )


def _tables(named: Names, format: str) -> Iterator[tuple[Path, str]]:
    """The files of records, and their formats."""
    for path, kind in find(named, format):
        if kind in ("text", "tokens"):
            raise TrainError(
                f"the task needs records, {path.name} is {kind}\n  at        {path}\n"
                "  try       .jsonl, .json, .csv, .parquet or .arrow"
            )
        yield path, kind


def _text(record: Mapping[str, Any], key: str, fields: Mapping[str, str], where: str, form: str) -> str:
    text = record.get(fields[key])
    if not isinstance(text, str):
        raise _no_field(record, key, fields, where, form)
    return text


def _no_field(record: Mapping[str, Any], key: str, fields: Mapping[str, str], where: str, form: str) -> TrainError:
    """For a record without a field that a task needs; where others could be meant, how to say so."""
    name, there = fields[key], ", ".join(map(repr, record)) or "none"
    what = f"field {name!r} is no text" if name in record else f"no field {name!r}"
    free = [each for each in record if each not in fields.values()]
    hint = f"data.fields.{key}={free[0]}, or {form}" if free and name not in record else form
    return TrainError(f"{what}; fields there are: {there}\n  at        {where}\n  try       {hint}")


def _some(rows: Sequence[Any], named: Names, form: str) -> None:
    if not rows:
        raise TrainError(f"the data is empty: no record\n  at        {named}\n  try       {form}")


def _hash(*texts: str) -> int:
    data = json.dumps(texts).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


# -- images


def _images(named: Names, image: Mapping[str, Any], known: Sequence[str] | None, only: bool) -> Images:
    """The images below a folder, each in a folder that has the name of its class."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise TrainError(f"images are read by pillow\n  at        {named}\n  try       pip install pillow") from None
    folders = _paths(named)
    files: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            what, hint = ("a file", "a folder") if folder.exists() else ("not there", near(folder))
            raise TrainError(
                f"images are in a folder, with one below it for each class: {folder} is {what}\n"
                f"  at        {folder.absolute().parent}\n  try       {hint}, with FOLDER/cat/1.png, FOLDER/dog/2.png …"
            )
        files += _image_files(folder)
    if not files:
        raise TrainError(
            f"no image in a folder of its class\n  at        {folders[0]}\n"
            f"  try       FOLDER/cat/1.png, FOLDER/dog/2.png …; known are {', '.join(IMAGES)}"
        )
    names = [_class_of(path, folders) for path in files]
    labels, classes = _numbered(names, sorted({*names}), known, only, named)
    hashes = np.array(
        [_hash(name, path.name, str(path.stat().st_size)) for name, path in zip(names, files, strict=True)]
    )
    return Images(
        tuple(files), labels, int(image["size"]), hashes.astype(np.uint64), classes,
        tuple(image["mean"]), tuple(image["deviation"]),
    )  # fmt: skip


def _paths(named: Names) -> list[Path]:
    return [Path(x).expanduser() for x in ([named] if isinstance(named, (str, Path)) else named)]


def _image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*/**/*") if p.suffix.lower() in IMAGES and p.is_file())


def refuse_images(named: Names, model: str, hint: str) -> None:
    """Images are not for a model of text; `hint`: how another one is named here."""
    for folder in _paths(named):
        if folder.is_dir() and (images := _image_files(folder)):
            raise TrainError(
                f"the data is images, and {model} takes no image\n  at        {images[0]}\n  try       {hint}"
            )


def images_alone(named: Names) -> Path | None:
    """The first of images that lie in folders of their classes, where there is nothing else to read."""
    folders = _paths(named)
    if not all(folder.is_dir() for folder in folders):
        return None
    images = [image for folder in folders for image in _image_files(folder)]
    others = any(suffix_of(p) in SUFFIXES for folder in folders for p in folder.rglob("*"))
    return images[0] if images and not others else None


def labelled_record(named: Names, format: str, fields: Mapping[str, str]) -> str | None:
    """Where the first record is, if it has a text and a label."""
    tables = (file for file in find(named, format) if file[1] in RECORDS)
    record, where = next((row for file in tables for row in records(*file)), ({}, ""))
    return where if {fields["text"], fields["label"]} <= {*record} else None


def _class_of(path: Path, folders: Iterable[Path]) -> str:
    """The name of the folder just below the one that was named."""
    base = next(folder for folder in folders if path.is_relative_to(folder))
    return path.relative_to(base).parts[0]


# -- what is learnt of them


def reward_loss(model: Any, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
    """-log sigmoid(score of the preferred - score of the other)"""
    from torch.nn import functional as F

    return -F.logsigmoid(reward_margins(model, input_ids, labels, attention_mask)).mean()


def reward_margins(model: Any, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
    """By how much the preferred text of each pair scores higher."""
    scores = _flat(model, input_ids, attention_mask).logits.reshape(len(input_ids), 2, -1)[..., 0]
    return scores[:, 0] - scores[:, 1]


def dpo_loss(beta: float) -> Callable[..., Any]:
    """-log sigmoid(beta (how much likelier the preferred has become - how much likelier the other has))"""

    def loss(model: Any, input_ids: Any, labels: Any, attention_mask: Any, reference: Any) -> Any:
        from torch.nn import functional as F

        gain = log_likelihoods(model, input_ids, labels, attention_mask) - reference
        return -F.logsigmoid(beta * (gain[:, 0] - gain[:, 1])).mean()

    return loss


def log_likelihoods(model: Any, input_ids: Any, labels: Any, attention_mask: Any) -> Any:
    """log p(answer | prompt) of both texts of each pair, a sum over the answer's tokens."""
    from torch.nn import functional as F

    logits = _flat(model, input_ids, attention_mask).logits[:, :-1]
    following = labels.reshape(-1, labels.shape[-1])[:, 1:]
    each = F.cross_entropy(logits.transpose(1, 2).float(), following, reduction="none", ignore_index=NO_LOSS)
    return -each.sum(-1).reshape(len(input_ids), 2)


def _flat(model: Any, input_ids: Any, attention_mask: Any) -> Any:
    """The model on both texts of each pair, one row each."""
    width = input_ids.shape[-1]
    return model(input_ids=input_ids.reshape(-1, width), attention_mask=attention_mask.reshape(-1, width))
