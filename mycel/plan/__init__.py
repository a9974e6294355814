"""Reads a program and a device, returns a Plan.  Deciding never rewrites."""

from mycel.plan.choices import Layouts
from mycel.plan.cost import Costs
from mycel.plan.decide import decide
from mycel.plan.decided import BlockLayouts, Decided, Predicted, digest
from mycel.plan.hardware import CPU, Hardware, hardware_of
from mycel.plan.links import Links, links_between
from mycel.plan.memory import Footprint, footprint
from mycel.plan.record import Plan, ready_plans
from mycel.plan.residuals import Decision, Residuals, backward_part, handed, paired, residuals
from mycel.plan.solve import Solved, solve

__all__ = [
    "CPU", "BlockLayouts", "Costs", "Decided", "Decision", "Footprint", "Hardware", "Layouts", "Links",
    "Plan", "Predicted", "Residuals", "Solved", "backward_part", "decide", "digest", "footprint", "handed",
    "hardware_of", "links_between", "paired", "ready_plans", "residuals", "solve",
]  # fmt: skip
