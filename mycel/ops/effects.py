"""Operators that are run for what they do.

Those that say something have `parts`, text with the number of a value where that stands, and `forms`, how each value is
written: text (of a tensor), trained (of one that asks for a gradient), number (Python's own), or format, as in an
f-string, with its specification behind a colon (format:.3f).
"""

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


def texts_of(values, parts, forms=()):
    """The parts, each as text."""
    texts = [text_in_form(x, form) for form, x in zip(forms or ["text"] * len(values), values, strict=True)]
    return [texts[p] if isinstance(p, int) else p for p in parts]


def text_in_form(x, form):
    kind, _, specification = form.partition(":")
    match kind:
        case "format":
            return format(x, specification)
        case "number":
            return str(x.item())
        case "trained":
            return str(x.detach().requires_grad_())
    return str(x)


@op(types=lambda *values, **_: Type(torch.bool, ()), effect=True, says=True)
def show(*values, parts, sep=" ", end="\n", forms=(), stream="stdout", flush=False):
    """Prints, when the program runs."""
    import sys

    print(*texts_of(values, parts, forms), sep=sep, end=end, file=getattr(sys, stream), flush=flush)
    return torch.tensor(True)


@op(types=lambda *values, **_: Type(torch.bool, ()), effect=True, says=True)
def write_log(*values, parts, logger, level, file, line, function="", forms=()):
    """Logs, when the program runs, as the user's line would."""
    import logging

    log = logging.getLogger(logger)
    if log.isEnabledFor(level):
        text = "".join(texts_of(values, parts, forms))
        log.handle(log.makeRecord(log.name, level, file, line, text, (), None, function))
    return torch.tensor(True)


@op(types=lambda *values, **_: Type(torch.bool, ()), effect=True, says=True)
def write_warning(*values, parts, category, file, line, module, forms=()):
    """Warns, when the program runs, as the user's line would; `category` is module:class."""
    import pkgutil
    import sys
    import warnings

    text = "".join(texts_of(values, parts, forms))
    registry = vars(sys.modules[module]).setdefault("__warningregistry__", {}) if module in sys.modules else None
    warnings.warn_explicit(text, pkgutil.resolve_name(category), file, line, module, registry)
    return torch.tensor(True)


@op(types=lambda *values, **_: Type(torch.bool, ()), effect=True, says=True)
def pause(*values, names, source=""):
    """Stops in the debugger, when the program runs, where the user's code has a breakpoint(): `values` are its tensors
    by name."""
    values = dict(zip(names, values, strict=True))
    breakpoint()
    return torch.tensor(True)
