"""Control flow in capture: the source of the user's functions is rewritten so that decisions on tensors become `cond`,
`loop` and `scan`."""

from mycel.capture.syntax.runtime import call as rewritten
from mycel.capture.syntax.runtime import enter, rewritten_forward

__all__ = ["enter", "rewritten", "rewritten_forward"]
