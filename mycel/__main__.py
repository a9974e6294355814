"""`mycel`, and `python -m mycel`: the command line, which Ctrl-C ends quietly, also while its modules are imported.

An interrupt during an import can come out of it as any error, or be lost in it: it ends the process there and then.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

IMPORTING = "<frozen importlib._bootstrap>"
INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """The entry point."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as nohup may have it
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from mycel.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    above = frame
    while above is not None:
        if above.f_code.co_filename == IMPORTING:
            os._exit(INTERRUPTED)
        above = above.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
