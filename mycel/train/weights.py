"""The weights of a Hugging Face folder: found, checked, loaded; whole into a module, or by slices into the parts that
ranks hold.

    files  ──map──▶  names and shapes against the configuration  ──convert, copy──▶  a module on the device
    files  ──map──▶  slices  ──copy──▶  a rank's part of a tensor
    parts  ──gather, one tensor at a time──▶  files

The files are first mapped as they are: no byte of a tensor is read until every name and shape fits, and of a part none
that the rank does not hold.  Only safetensors are read; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mycel.errors import TrainError
from mycel.run.folder import explain
from mycel.run.shards import Part, Shard
from mycel.sizes import counted
from mycel.train.cutting import Cuts

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHERS = ("pytorch_model*.bin", "*.safetensors", "consolidated*.pth", "tf_model.h5", "flax_model.msgpack", "*.gguf")
MAX_SHARD_BYTES = 4_000_000_000
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def find(path: Path) -> list[Path]:
    """The safetensors files of a folder, none if it has no weights; weights in any other form are refused."""
    if (path / ONE).is_file():
        return [path / ONE]
    index = path / INDEX
    if not index.is_file():
        if others := sorted({file.name for pattern in OTHERS for file in path.glob(pattern)}):
            what = f"weights in a form that is not read: {some(others)}; expected {ONE}, or shards with {INDEX}"
            raise refusal(
                what,
                path,
                "load the model with transformers where you trust it, and save_pretrained; or weights: scratch",
            )
        return []
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise refusal(
            f"the index of the shards is damaged: {one_line(error)}", index, "copy the folder again"
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (path / name).is_file():
            raise refusal(f"the index names {name!r}, which is no file of the folder", index, "copy the folder again")
    return [path / name for name in names]


def load(
    path: Path,
    files: Sequence[Path],
    kind: Any,
    settings: Any,
    dtype: torch.dtype,
    device: torch.device,
    cuts: Cuts | None = None,
    before: tuple[Any, int] | None = None,
    seed: int = 0,
) -> tuple[Any, list[str]]:
    """A module of class `kind` with a folder's weights, and notes on what was left over; with `cuts`, only a rank's
    parts of them are read.

    `before`: the class that the weights were saved from, and its number of labels; layers that it does not have are
    fresh."""
    stored = stored_dtype(files)
    module, report = _mapped(kind, path, settings, stored, seed)
    fresh = _fresh_names(report, kind, settings, *before) if before is not None else []
    first = {name: module.get_parameter(name).detach() for name in fresh}
    if wrong := sorted(each for each in report["mismatched_keys"] if each[0] not in first):
        rows = [
            f"\n  {name}: {list(shape)} in the files, {list(wanted)} by the configuration"
            for name, shape, wanted in wrong[:4]
        ]
        more = f"\n  and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        what = f"{len(wrong)} weights do not have the shape that config.json gives them{''.join(rows)}{more}"
        raise refusal(what, path, "the config.json the weights were saved with")
    if missing := sorted({*report["missing_keys"]} - {*fresh}):
        what = f"{len(missing)} weights of {kind.__name__} are not in the files: {some(missing)}"
        raise refusal(what, path, "architectures in config.json: the class they were saved from; or weights: scratch")
    if cuts is not None:
        cuts.cut(
            module,
            lambda x, is_parameter: x.to(
                device, dtype if is_parameter and x.is_floating_point() else x.dtype, copy=True
            ),
        )
    elif stored != dtype:
        module, report = _mapped(kind, path, settings, dtype, seed)
        for name, x in first.items():
            module.get_parameter(name).data = x.to(dtype)
    # what was not converted is still mapped from the files: a file that changes later must not change the model
    for tensor in (*module.parameters(), *module.buffers()) if cuts is None else ():
        tensor.data = tensor.data.to(device, copy=True)
    left = sorted(report["unexpected_keys"])
    are = "is" if len(left) == 1 else "are"
    notes = [f"fresh layers for {kind.__name__}, by the seed: {some(fresh)}"] if fresh else []
    if left:
        notes += [f"{counted(len(left), 'tensor')} of {path} {are} not part of {kind.__name__}: {some(left)}"]
    return module, notes


def _fresh_names(report: Any, kind: Any, settings: Any, saved: Any, labels: int) -> list[str]:
    """What the class that the weights were `saved` from does not have, or has for other labels; what it has and is not
    in its files is lost, not fresh."""
    relabelled = [
        name
        for name, shape, wanted in report["mismatched_keys"]
        if (shape[0], wanted[0]) == (labels, settings.num_labels) and shape[1:] == wanted[1:]
    ]
    if saved is None or saved is kind:
        return relabelled
    with torch.device("meta"):
        held = saved._from_config(copy.deepcopy(settings)).state_dict()
    plain: Callable[[str], str] = lambda name: name.removeprefix(f"{kind.base_model_prefix}.")
    known = {*map(plain, held)}
    return [*relabelled, *(name for name in sorted(report["missing_keys"]) if plain(name) not in known)]


def stored_dtype(files: Sequence[Path]) -> torch.dtype:
    """The floating dtype in which most numbers of the files are stored; damaged files are refused."""
    counts: Counter[str] = Counter()
    for file in files:
        with mapped(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                part = tensors.get_slice(name)
                counts[part.get_dtype()] += torch.Size(part.get_shape()).numel()
    if odd := [name for name in counts if name.startswith("F") and name not in DTYPES]:
        raise refusal(f"weights stored as {odd[0]} cannot be trained", files[0].parent, "the model before quantisation")
    return next((DTYPES[name] for name, _ in counts.most_common() if name in DTYPES), torch.float32)


@contextlib.contextmanager
def mapped(file: Path) -> Iterator[Any]:
    """A safetensors file, open: its header read, its tensors mapped; one that is damaged is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError, ValueError) as error:
        what = f"the weights are damaged or cut short, {file.stat().st_size} bytes: {one_line(error)}"
        raise refusal(what, file, "copy the file again") from None
    except RuntimeError as error:  # torch's, where the system has no room for it
        raise refusal(
            f"the file cannot be mapped: {one_line(error)}", file, "smaller files: save_pretrained with max_shard_size"
        ) from None


def _mapped(kind: Any, path: Path, settings: Any, dtype: torch.dtype, seed: int) -> tuple[Any, Any]:
    """transformers' loading (its renamings and ties), in memory only where the dtype changes; and its report."""
    options = {
        "local_files_only": True,
        "use_safetensors": True,
        "ignore_mismatched_sizes": True,
        "output_loading_info": True,
    }
    try:
        with torch.random.fork_rng(devices=[]):  # what is missing is initialised: fresh, or refused afterwards
            torch.default_generator.manual_seed(seed)
            return kind.from_pretrained(path, config=settings, dtype=dtype, **options)
    except Exception as error:  # transformers and models raise many kinds
        raise refusal(f"{kind.__name__} cannot be loaded: {one_line(error)}", path) from error


# -- written ---------------------------------------------------------------------------------------------------------


def write_gathered(
    folder: Path,
    names: Iterable[str],
    whole: Callable[[str], torch.Tensor | None],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Tensors that ranks hold in parts, as the safetensors files of a folder; at most one of them and one file are in
    memory.

    All ranks call this with the same names: `whole(name)` gathers a tensor, and returns it on the rank that writes,
    None on the others.
    """
    files, failed = Files(folder, max_shard_bytes), None
    for name in names:
        x = whole(name)  # also after a failure: the other ranks are waiting for this one
        try:
            if x is not None and failed is None:
                files.add(name, x)
        except OSError as error:
            failed = error
    try:
        if failed is None:
            files.close()
    except OSError as error:
        failed = error
    if failed is not None:
        files.discard()
        why, hint = explain(failed, folder, files.total_bytes)
        raise refusal(f"the weights cannot be written: {why}", folder, hint) from failed


class Files:
    """The safetensors files of a folder to be, written one after the other, and the index over them if there are
    several."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        self.parts: list[Part] = []
        self.names: list[list[str]] = []  # of each file that is written
        self.total_bytes = 0

    def add(self, name: str, x: torch.Tensor) -> None:
        """One more tensor; those that are waiting are written if there is no room for it beside them."""
        x = x.detach().cpu().contiguous()
        if self.parts and sum(part.nbytes for _, _, part in self.parts) + x.nbytes > self.max_shard_bytes:
            self._write()
        self.parts.append((name, (0,) * x.dim(), x))
        self.total_bytes += x.nbytes

    def close(self) -> None:
        """Write the last, and give all their names."""
        if self.parts:
            self._write()
        count = len(self.names)
        final = [ONE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        for i, name in enumerate(final):
            (self.folder / _unnamed(i)).rename(self.folder / name)
        if count > 1:
            index = {
                "metadata": {"total_size": self.total_bytes},
                "weight_map": {x: final[i] for i, names in enumerate(self.names) for x in names},
            }
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def discard(self) -> None:
        """Leave nothing."""
        for i in range(len(self.names) + 1):
            (self.folder / _unnamed(i)).unlink(missing_ok=True)

    def _write(self) -> None:
        Shard(_unnamed(len(self.names)), self.parts).write(self.folder)
        self.names.append([name for name, _, _ in self.parts])
        self.parts = []


def _unnamed(i: int) -> str:
    """A file is called `2 of 3` only once it is known that there are 3."""
    return f".{i:05d}.part"


# -- words -----------------------------------------------------------------------------------------------------------


def refusal(what: str, where: object, hint: str = "") -> TrainError:
    """An error in the form all of them have: what, where, what to try."""
    return TrainError(f"{what}\n  at        {where}" + (f"\n  try       {hint}" if hint else ""))


def one_line(error: BaseException) -> str:
    """What an error says, in one line; with its kind where it says a single word."""
    text = " ".join(str(error).split())[:300]
    return text if " " in text else f"{type(error).__name__} {text}".strip()


def some(names: Sequence[str], shown: int = 4) -> str:
    """The first few names, and how many more."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """transformers without its progress bars and warnings: what matters of them is told by us."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
