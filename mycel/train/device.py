"""Where training runs: which device, what it is called, how fast it can be at best, how much memory is in use.

`PEAKS` holds the makers' dense figures (no sparsity, fp32 accumulation) in TFLOP/s; MFU is measured against them.  A
device that is not in the table has no known peak: better no MFU than a wrong one.
"""

from __future__ import annotations

import os
import platform
import random
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mycel.errors import TrainError

if TYPE_CHECKING:
    import torch

# bf16 and fp16, tf32, fp32, from NVIDIA's and AMD's data sheets; 0: the device has no such unit.
PEAKS: dict[str, tuple[float, float, float]] = {
    "GB200": (2500, 1250, 80),
    "B200": (2250, 1125, 75),
    "B100": (1750, 875, 60),
    "GH200": (989.4, 494.7, 66.9),
    "H200": (989.4, 494.7, 66.9),
    "H200 NVL": (835.5, 417.5, 60),
    "H100": (989.4, 494.7, 66.9),
    "H100 NVL": (835.5, 417.5, 60),
    "H100 PCIe": (756, 378, 51.2),
    "H800": (989.4, 494.7, 66.9),
    "H20": (148, 74, 44),
    "A100": (312, 156, 19.5),
    "A100 PCIe": (312, 156, 19.5),
    "A800": (312, 156, 19.5),
    "A800 PCIe": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165, 82, 10.3),
    "A10": (125, 62.5, 31.2),
    "A10G": (70, 35, 35),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "RTX A6000": (154.8, 77.4, 38.7),
    "RTX 6000 Ada": (364.2, 182.1, 91.1),
    "RTX 5090": (209.5, 104.8, 104.8),
    "RTX 5080": (112.6, 56.3, 56.3),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 4080": (97.5, 48.7, 48.7),
    "RTX 3090": (71, 35.6, 35.6),
    "RTX 3090 Ti": (80, 40, 40),
    "RTX 3080": (59.5, 29.8, 29.8),
    "V100": (125, 0, 15.7),
    "V100 PCIe": (112, 0, 14),
    "T4": (65, 0, 8.1),
    "MI300X": (1307.4, 653.7, 163.4),
    "MI325X": (1307.4, 653.7, 163.4),
}
UNITS = {"bf16": 0, "fp16": 0, "fp8": 0, "tf32": 1, "fp32": 2}  # fp8: of 16 bits, in which most of a model is
NO_BF16 = {"V100", "V100 PCIe", "T4"}
# A word that makes it another device: with one of these in its name, only an entry that has it too is meant.
VARIANTS = {"ti", "super", "laptop", "mig", "grid", "d", "max", "q", "pcie", "nvl"}


def choose(name: str, at: str = "train.device") -> torch.device:
    """auto, cpu, cuda or cuda:1 => the device, if it is there; auto takes the first GPU, or else the CPU.  `at`: where
    it was asked for."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = ("cuda" if gpus else "cpu") if name == "auto" else name
    if wanted == "cpu":
        return torch.device("cpu")
    asked = re.fullmatch(r"cuda(?::(\d+))?", wanted)
    if asked is None:
        raise TrainError(f"device {name!r} is not known\n  at        {at}\n  try       auto, cpu, cuda or cuda:1")
    if not gpus:
        raise TrainError(
            f"device {name!r} was asked for, but {_why_no_gpu()}\n  at        {at}\n  try       {at}=auto, or cpu"
        )
    index = int(asked[1] or 0)
    if index >= gpus:
        there = "cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}"
        raise TrainError(
            f"device {name!r} was asked for, but there is only {there}\n  at        {at}\n  try       {there}"
        )
    return torch.device("cuda", index)


def _why_no_gpu() -> str:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for the CPU alone"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"torch sees no GPU (CUDA_VISIBLE_DEVICES={hidden!r})"
    return f"torch {torch.__version__} finds no GPU or no driver for it"


def describe(device: torch.device) -> str:
    """The device in words: `cuda:0, NVIDIA H200, 139.8 GiB` or `cpu, AMD EPYC 7763, 8 threads`."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{device}, {properties.name}, {properties.total_memory / 2**30:.1f} GiB"
    threads = torch.get_num_threads()
    return f"{device}, {_processor()}, {threads} thread{'s' if threads != 1 else ''}"


def _processor() -> str:
    """The processor's name as the system gives it."""
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return " ".join(named[1].split()) if named else platform.processor() or platform.machine()


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Floating point operations a second at best in bf16, fp16, tf32 or fp32; None where that is not known (and for
    CPUs)."""
    import torch

    return peak_of(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None


def peak_of(name: str, precision: str) -> float | None:
    """The peak of a device by its full name: the entry with most words among those whose every word is in the name."""
    words = set(re.split(r"[\s-]+", name.lower()))
    fitting = [entry for entry in PEAKS if set(entry.lower().split()) <= words]
    entry = max(fitting, key=lambda e: len(e.split()), default="")
    if (
        not entry
        or words & VARIANTS - set(entry.lower().split())
        or precision not in UNITS
        or (precision in ("bf16", "fp8") and entry in NO_BF16)
    ):
        return None
    return PEAKS[entry][UNITS[precision]] * 1e12 or None


def memory_total(device: torch.device) -> int | None:
    """Bytes that there are: of a GPU, or of the machine; None where the system does not say."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def memory_peak(device: torch.device) -> int:
    """The most bytes that were in use at once: of tensors on a GPU, of the whole process on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _most_resident()


def _most_resident() -> int:
    """Of this process, as /proc/self/status has it; else as the system keeps it (on Linux a parent's counts in it)."""
    try:
        match = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, those of all GPUs too."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
