"""Text to token ids and back: plain bytes, or the tokenizer of a Hugging Face folder.

`load_tokenizer("bytes")` needs nothing; `load_tokenizer(folder)` reads local files only and runs no code from the
folder.  A tokenizer's fingerprint is a hash of all that decides its ids, so that tokens cached under it are never
served for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mycel.errors import TrainError

Ids = npt.NDArray[np.integer[Any]]
Part = tuple[str, bool]  # a piece of a document, and whether its tokens carry loss

# Files that hold a vocabulary, and those that change what it gives.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)
SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class Tokenizer(Protocol):
    """What data needs of a tokenizer."""

    @property
    def vocab(self) -> int: ...  # all ids are below it
    @property
    def eos(self) -> int | None: ...
    @property
    def bos(self) -> int | None: ...
    @property
    def adds_bos(self) -> bool: ...  # whether its texts begin with bos
    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str) -> Ids: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
    def decode(self, ids: Sequence[int] | Ids) -> str: ...
    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[Part]: ...  # ValueError: why it cannot
    def ask(self, messages: Sequence[Mapping[str, Any]]) -> str: ...  # up to where the assistant takes over


def needs_tokenizer(where: object) -> TrainError:
    """Of text without one."""
    return TrainError(f"text needs a tokenizer\n  at        {where}\n  try       data.tokenizer: bytes, or a folder")


@dataclass(frozen=True)
class Bytes:
    """UTF-8 bytes as ids 0..255, then bos and eos."""

    vocab: int = 258
    bos: int = 256
    eos: int = 257
    adds_bos: bool = False
    fingerprint: str = "bytes-258"

    def encode(self, text: str) -> Ids:
        """The bytes of the text, without marks."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Each text's bytes."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text; marks are left out, a broken character becomes U+FFFD."""
        ids = np.asarray(ids, np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[Part]:
        """Bytes know no turns."""
        raise ValueError("the bytes tokenizer has no chat template")

    def ask(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Bytes know no turns."""
        raise ValueError("the bytes tokenizer has no chat template")


class Folder:
    """The tokenizer of a Hugging Face folder."""

    adds_bos: bool

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fingerprint = _fingerprint(path)
        self._tokenizer = _from_folder(path)
        self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._backend is not None:  # tokenizer.json may carry limits of the run it was saved in
            self._backend.no_truncation()
            self._backend.no_padding()
        self.bos: int | None = self._tokenizer.bos_token_id
        self.eos: int | None = self._tokenizer.eos_token_id
        self.adds_bos = self.bos is not None and self._tokenizer("a")["input_ids"][:1] == [self.bos]
        self.vocab: int = max(len(self._tokenizer), 1 + max(self._tokenizer.get_vocab().values(), default=-1))

    def encode(self, text: str) -> Ids:
        """The text's ids, without marks."""
        return self.encode_batch([text])[0].astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Each text's ids, on all cores."""
        if self._backend is not None:
            encoded = [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        else:
            encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [np.array(ids, np.uint32) for ids in encoded]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[Part]:
        """The chat as the template writes it, cut where the assistant takes over (no loss) and where its turn ends
        (loss)."""
        if not self._tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        parts: list[Part] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked = self._render(messages[:i], True) if i else ""  # templates write nothing for no messages
            answered = self._render(messages[: i + 1], False)
            if not asked.startswith(done) or not answered.startswith(asked):
                raise ValueError(
                    "the tokenizer's chat template rewrites earlier turns, so what the assistant wrote cannot be "
                    "told apart"
                )
            parts += [(asked[len(done) :], False), (answered[len(asked) :], True)]
            done = answered
        return parts

    def ask(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The chat as the template writes it, up to where the assistant takes over."""
        if not self._tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        return self._render(messages, True)

    def _render(self, messages: Sequence[Mapping[str, Any]], ask: bool) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask))
        except Exception as e:  # the template is a program of the folder's author, it raises what it likes
            raise ValueError(f"the tokenizer's chat template refuses these messages: {e}") from e


def load_tokenizer(name: str | Path) -> Tokenizer:
    """`bytes`, or the tokenizer in a folder."""
    if str(name) == "bytes":
        return Bytes()
    path = Path(name).expanduser()
    if not path.is_dir():
        raise TrainError(f"no tokenizer folder: {path}\n  try       tokenizer: bytes, or a folder with tokenizer.json")
    if not any((path / f).is_file() for f in VOCABULARIES):
        there = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
        raise TrainError(
            f"no tokenizer files in the folder; it has {there}\n  at        {path}\n"
            "  try       a folder with tokenizer.json"
        )
    return Folder(path)


def _from_folder(path: Path) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise TrainError(
            f"a tokenizer folder needs transformers: {e}\n  at        {path}\n  try       pip install transformers"
        ) from e
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as e:  # transformers raises many kinds for files it cannot read
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise TrainError(
            f"the tokenizer cannot be loaded: {reason}\n  at        {path}\n"
            "  try       saving it again with save_pretrained"
        ) from e


def _fingerprint(path: Path) -> str:
    """A hash over the tokenizer's files."""
    digest = hashlib.blake2b(digest_size=16)
    for name in (*VOCABULARIES, *SETTINGS):
        if (path / name).is_file():
            content = (path / name).read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()
