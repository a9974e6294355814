"""Kernels in C, compiled once for this machine by the compiler that is there; None where there is none.

A library lies in `$MYCEL_KERNELS`, else `~/.cache/mycel/kernels`, under a name of its source, the compiler, its options
and the processor; `MYCEL_KERNELS=` (empty) leaves C out.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")
INCLUDED = re.compile(r'^#include "(.+)"$', re.MULTILINE)
WIDE = ("-mprefer-vector-width=512",)  # of x86 alone


def native_library(source: str, more: Sequence[str] = ()) -> ctypes.CDLL | None:
    """A file of C beside this one as a library."""
    file = Path(__file__).with_name(source)
    return library_of(file.read_text(), file.stem, more)


def library_of(text: str, name: str, more: Sequence[str] = ()) -> ctypes.CDLL | None:
    """A text of C, which may include headers that lie here, as a library, compiled where it is not there yet; None
    without a compiler, or where it fails."""
    text = INCLUDED.sub(lambda m: Path(__file__).with_name(m[1]).read_text(), text)
    folder = library_folder()
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if folder is None or not compiler:
        return None
    flags = [*FLAGS, *more, *(WIDE if platform.machine() == "x86_64" else ())]
    identity = [text.encode().hex(), compiler, *flags, platform.machine(), processor()]
    path = folder / f"{name}-{hashlib.sha256('|'.join(identity).encode()).hexdigest()[:16]}.so"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as aside:  # ranks compile at the same time
                library = Path(aside) / "library.so"
                command = [compiler, *flags, "-x", "c", "-", "-o", str(library), "-lm"]
                subprocess.run(command, check=True, capture_output=True, timeout=60, input=text.encode())
                library.rename(path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def library_folder() -> Path | None:
    """Where libraries lie, and what was measured of this processor; None: nowhere."""
    folder = os.environ.get("MYCEL_KERNELS", str(Path.home() / ".cache" / "mycel" / "kernels"))
    return Path(folder) if folder else None


def processor() -> str:
    """What the processor can do: a home folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
