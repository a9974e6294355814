"""Reads a program and a device, returns a Plan.  Deciding never rewrites."""

from mycel.plan.choices import Layouts
from mycel.plan.clock import COMPUTE, Clock, StreamShare, Times, clock
from mycel.plan.compression import CANDIDATES
from mycel.plan.cost import Costs
from mycel.plan.cuts import StageCutter, block_memory, cut_blocks
from mycel.plan.decide import decide, ladder, last_that_fits, less, of_stages
from mycel.plan.decided import BlockLayouts, Decided, Predicted, digest
from mycel.plan.fp8_products import Fp8Products, fp8_products, refuse_without_fp8
from mycel.plan.hardware import CPU, Hardware, hardware_of, probe_path, probe_text, with_link, with_rates
from mycel.plan.host_update import HostUpdate, host_updates, leaving_gradients, needed_last
from mycel.plan.idle_experts import EXPERT_AXIS, expert_weights, refuse_idle, warn_of_unsplit
from mycel.plan.known import KnownLayouts
from mycel.plan.ledger import (
    BLOCK,
    Correction,
    ErrorBars,
    Measured,
    PartTimes,
    basis_of,
    correction,
    error_bars,
    is_corrected,
    part_bars,
    write_down,
)
from mycel.plan.links import Links
from mycel.plan.list_schedules import searched
from mycel.plan.offload import (
    AUTO,
    KINDS,
    UPDATE,
    Absence,
    Copies,
    MovedValue,
    Offload,
    Offloaded,
    StreamedInput,
    Visit,
    absences,
    chunk_bytes,
    close_names,
    equation_key,
    handed_to,
    parameter_inputs,
    state_inputs,
    visits,
)
from mycel.plan.places import PLACE_AXIS, Place
from mycel.plan.plan import STAGE_AXIS, Plan
from mycel.plan.plan_file import ready_plans
from mycel.plan.residuals import (
    Decision,
    KeepChoices,
    Residuals,
    backward_inputs,
    backward_part,
    expressions,
    paired,
    residuals,
    twins,
)
from mycel.plan.schedule import (
    PipelineSchedule,
    StageCosts,
    orders_text,
    splits,
    step_names,
    timeline,
)
from mycel.plan.solve import Solved, parameter_layouts, solve
from mycel.plan.stage_costs import BUBBLE, beside_each_other, message_bytes, stage_costs, step_seconds
from mycel.plan.stages import StepBody, StepFlow, modules_around, refuse_unknown_stages, starts_of
from mycel.plan.synchronising import SyncPolicy
from mycel.plan.travels import staying, travels

__all__ = [
    "AUTO", "BLOCK", "BUBBLE", "CANDIDATES", "COMPUTE", "CPU", "EXPERT_AXIS", "KINDS", "PLACE_AXIS", "STAGE_AXIS",
    "UPDATE", "Absence", "BlockLayouts", "Clock", "Copies", "Correction", "Costs", "Decided", "Decision", "ErrorBars",
    "Fp8Products", "Hardware", "HostUpdate", "KeepChoices", "KnownLayouts", "Layouts", "Links", "Measured",
    "MovedValue", "Offload", "Offloaded", "PartTimes", "PipelineSchedule", "Place", "Plan", "Predicted", "Residuals",
    "Solved", "StageCosts", "StageCutter", "StepBody", "StepFlow", "StreamShare", "StreamedInput", "SyncPolicy",
    "Times", "Visit", "absences", "backward_inputs", "backward_part", "basis_of", "beside_each_other", "block_memory",
    "chunk_bytes", "clock", "close_names", "correction", "cut_blocks", "decide", "digest", "equation_key",
    "error_bars", "expert_weights", "expressions", "fp8_products", "handed_to", "hardware_of", "host_updates",
    "is_corrected", "ladder", "last_that_fits", "leaving_gradients", "less", "message_bytes", "modules_around",
    "needed_last", "of_stages", "orders_text", "paired", "parameter_inputs", "parameter_layouts", "part_bars",
    "probe_path", "probe_text", "ready_plans", "refuse_idle", "refuse_unknown_stages", "refuse_without_fp8",
    "residuals", "searched", "solve", "splits", "stage_costs", "starts_of", "state_inputs", "staying", "step_names",
    "step_seconds", "timeline", "travels", "twins", "visits", "warn_of_unsplit", "with_link", "with_rates",
    "write_down",
]  # fmt: skip
