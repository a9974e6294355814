"""Operators that are run for what they do."""

from __future__ import annotations

import torch

from mycel.ir import op


@op("... -> ...", dtype=torch.bool, effect=True)
def assert_true(test, *, message, source=""):
    """Stops the program with the user's message and line where the test does not hold."""
    if not test:
        from mycel.errors import RunError

        raise RunError(message + ("\n  at        " + source if source else ""))
    return test
