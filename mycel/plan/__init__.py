"""Reads a program and a device, returns a Plan.  Deciding never rewrites."""

from mycel.plan.choices import Layouts
from mycel.plan.clock import Clock, StreamShare, Times, clock
from mycel.plan.cost import Costs
from mycel.plan.cuts import best_cut, cut_blocks
from mycel.plan.decide import decide
from mycel.plan.decided import BlockLayouts, Decided, Predicted, digest
from mycel.plan.hardware import CPU, Hardware, hardware_of, probe_path, probe_text
from mycel.plan.links import Links
from mycel.plan.plan import STAGE_AXIS, Plan, ready_plans
from mycel.plan.residuals import Decision, Residuals, backward_inputs, backward_part, paired, residuals
from mycel.plan.schedule import PipelineSchedule, StageCosts, orders_text, searched, timeline
from mycel.plan.solve import Solved, parameter_layouts, solve
from mycel.plan.stages import StepBody, StepFlow, starts_of

__all__ = [
    "CPU", "STAGE_AXIS", "BlockLayouts", "Clock", "Costs", "Decided", "Decision", "Hardware", "Layouts", "Links",
    "PipelineSchedule", "Plan", "Predicted", "Residuals", "Solved", "StageCosts", "StepBody", "StepFlow",
    "StreamShare", "Times", "backward_inputs", "backward_part", "best_cut", "clock", "cut_blocks", "decide", "digest",
    "hardware_of", "orders_text", "paired", "parameter_layouts", "probe_path", "probe_text", "ready_plans",
    "residuals", "searched", "solve", "starts_of", "timeline",
]  # fmt: skip
