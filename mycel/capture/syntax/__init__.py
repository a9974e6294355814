"""Control flow in capture: the source of the user's functions is rewritten so that decisions on tensors become `cond`,
`loop` and `scan`."""

from mycel.capture.syntax.draws import drawn_state, refuse_draws
from mycel.capture.syntax.runtime import call as rewritten
from mycel.capture.syntax.runtime import each, enter, rewritten_forward, rewritten_method

__all__ = ["drawn_state", "each", "enter", "refuse_draws", "rewritten", "rewritten_forward", "rewritten_method"]
