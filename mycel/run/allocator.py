"""Memory of the CPU that a step frees stays with the process: the next step takes it again without asking the system.

By default glibc gives large blocks back when they are freed, and the system hands out zeroed pages for the same blocks
a moment later: some thousand page faults a step.
"""

from __future__ import annotations

import ctypes
import functools
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's names for them, in malloc.h
LARGEST = (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed; elsewhere nothing."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(TRIM_THRESHOLD, LARGEST)
