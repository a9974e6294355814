"""Reads a program and a device, returns a Plan.  Deciding never rewrites."""

from mycel.plan.choices import Layouts
from mycel.plan.clock import Clock, Times, clock
from mycel.plan.cost import Costs
from mycel.plan.decide import LESS, decide, ladder
from mycel.plan.decided import BlockLayouts, Decided, Predicted, digest
from mycel.plan.hardware import CPU, Hardware, hardware_of, probe_path, probe_text
from mycel.plan.links import Links
from mycel.plan.offload import (
    Absence,
    MovedValue,
    Offload,
    Offloaded,
    StreamedInput,
    absences,
    chunk_bytes,
    equation_key,
    moves_of,
    state_inputs,
    streams_of,
)
from mycel.plan.plan import Plan, ready_plans
from mycel.plan.residuals import (
    Decision,
    Residuals,
    backward_inputs,
    backward_part,
    expressions,
    paired,
    residuals,
    twins,
)
from mycel.plan.solve import Solved, parameter_layouts, solve
from mycel.plan.travels import travels

__all__ = [
    "CPU", "LESS", "Absence", "BlockLayouts", "Clock", "Costs", "Decided", "Decision", "Hardware", "Layouts",
    "Links", "MovedValue", "Offload", "Offloaded", "Plan", "Predicted", "Residuals", "Solved", "StreamedInput",
    "Times", "absences", "backward_inputs", "backward_part", "chunk_bytes", "clock", "decide", "digest",
    "equation_key", "expressions", "hardware_of", "ladder", "moves_of", "paired", "parameter_layouts", "probe_path",
    "probe_text", "ready_plans", "residuals", "solve", "state_inputs", "streams_of", "travels", "twins",
]  # fmt: skip
