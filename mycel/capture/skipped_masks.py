"""Masks that transformers leaves out: a causal one without padding is None, and the attention layer's own `is_causal`
stands for it; code that is compiled always gets the mask.

Where the config says that layers are not causal by themselves (`use_bidirectional_attention`), None and the mask are
two kinds of attention.  There the question is answered as in plain Python: whether anything is padded is a fact of the
batch (`facts.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mycel.capture.trace import Patch

FIRST, TRACED = "_preprocess_mask_arguments", "is_tracing"  # what making a mask begins with; is code compiled?


def skipped_masks() -> list[Patch]:
    """Of transformers, where it is loaded and asks so."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, FIRST) or not hasattr(masks, TRACED):
        return []
    answers = _Answers(getattr(masks, FIRST), getattr(masks, TRACED))
    return [Patch(masks, FIRST, answers.begin), Patch(masks, TRACED, answers.is_tracing)]


class _Answers:
    """What is said while one mask after the other is made."""

    def __init__(self, begin: Callable[..., Any], is_tracing: Callable[..., bool]) -> None:
        self._begin, self._is_tracing, self._is_causal = begin, is_tracing, True

    def begin(self, config: Any, *args: Any, **kwargs: Any) -> Any:
        self._is_causal = not getattr(config, "use_bidirectional_attention", False)
        return self._begin(config, *args, **kwargs)

    def is_tracing(self, tensor: Any = None) -> bool:
        return self._is_causal and self._is_tracing(tensor)
