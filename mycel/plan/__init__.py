"""Reads a program and a device, returns a Plan.  Deciding never rewrites."""

from mycel.plan.cost import PRODUCTS, Costs
from mycel.plan.decide import Decided, decide
from mycel.plan.hardware import CPU, Hardware, hardware_of
from mycel.plan.memory import Footprint, footprint
from mycel.plan.residuals import Decision, Residuals, backward_part, handed, paired, residuals
from mycel.plan.written import Plan, ready_plans

__all__ = [
    "CPU", "PRODUCTS", "Costs", "Decided", "Decision", "Footprint", "Hardware", "Plan", "Residuals", "backward_part", "decide", "footprint", "handed",
    "hardware_of", "paired", "ready_plans", "residuals",
]  # fmt: skip
