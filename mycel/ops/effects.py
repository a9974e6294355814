"""Operators that are run for what they do."""

from __future__ import annotations

import torch

from mycel.ir import Type, op


@op("... -> ...", dtype=torch.bool, effect=True)
def assert_true(test, *, message, source=""):
    """Stops the program with the user's message and line where the test does not hold."""
    if not test:
        from mycel.errors import RunError

        raise RunError(message + ("\n  at        " + source if source else ""))
    return test


@op(types=lambda *values, **_: Type(torch.bool, ()), effect=True)
def show(*values, parts, sep=" ", end="\n", forms=()):
    """Prints, when the program runs: `parts` is text, with the number of a value where that stands.  `forms`, of each
    value: text (of a tensor), format (as in an f-string) or number (Python's own)."""
    written = {"text": str, "format": format, "number": lambda x: x.item()}
    texts = [written[form](x) for form, x in zip(forms or ["text"] * len(values), values, strict=True)]
    print(*[texts[p] if isinstance(p, int) else p for p in parts], sep=sep, end=end)
    return torch.tensor(True)


@op(types=lambda *values, **_: Type(torch.bool, ()), effect=True)
def pause(*values, names, source=""):
    """Stops in the debugger, when the program runs, where the user's code has a breakpoint(): `values` are its tensors
    by name."""
    values = dict(zip(names, values, strict=True))
    breakpoint()
    return torch.tensor(True)
