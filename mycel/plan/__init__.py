"""Reads a program and a device, returns a Plan.  Deciding never rewrites."""

from mycel.plan.cost import PRODUCTS, Costs
from mycel.plan.hardware import CPU, Hardware, hardware_of
from mycel.plan.memory import Footprint, footprint
from mycel.plan.plan import Plan, decide
from mycel.plan.residuals import Decision, Residuals, backward_part, handed, paired, residuals

__all__ = [
    "CPU", "PRODUCTS", "Costs", "Decision", "Footprint", "Hardware", "Plan", "Residuals", "backward_part", "decide", "footprint", "handed",
    "hardware_of", "paired", "residuals",
]  # fmt: skip
