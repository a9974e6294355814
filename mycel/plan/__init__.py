"""Reads a program and a device, returns a Plan.  Deciding never rewrites."""

from mycel.plan.choices import Layouts
from mycel.plan.clock import Clock, Times, clock
from mycel.plan.cost import Costs
from mycel.plan.decide import decide
from mycel.plan.decided import BlockLayouts, Decided, Predicted, digest
from mycel.plan.hardware import CPU, Hardware, hardware_of, probe_path, probe_text
from mycel.plan.idle_experts import refuse_idle
from mycel.plan.links import Links
from mycel.plan.plan import Plan, ready_plans
from mycel.plan.residuals import Decision, Residuals, backward_inputs, backward_part, paired, residuals
from mycel.plan.solve import Solved, parameter_layouts, solve

__all__ = [
    "CPU", "BlockLayouts", "Clock", "Costs", "Decided", "Decision", "Hardware", "Layouts", "Links", "Plan",
    "Predicted", "Residuals", "Solved", "Times", "backward_inputs", "backward_part", "clock", "decide", "digest",
    "hardware_of", "paired", "parameter_layouts", "probe_path", "probe_text", "ready_plans", "refuse_idle", "residuals",
    "solve",
]  # fmt: skip
