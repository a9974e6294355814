"""PyTorch code -> Program.  `function` runs the code once; `trace` turns what it does into equations; `repeats` finds
blocks; `bind` calls it."""

from mycel.capture.autograd import differentiate_with
from mycel.capture.bind import MISS, bind, draw_key
from mycel.capture.caches import growing, is_static_cache
from mycel.capture.changed import changed
from mycel.capture.custom import trace_custom
from mycel.capture.experts import no_such_expert, traced_gate, traced_layer
from mycel.capture.facts import Facts, all_ones, make_room
from mycel.capture.fence import refuse
from mycel.capture.function import TRACING, Captured, capture, paused
from mycel.capture.inline import input_tensors, input_values, results, splice, splice_program
from mycel.capture.island import mark_island
from mycel.capture.mixed_products import refuse_mixed_products
from mycel.capture.nested import succeeds
from mycel.capture.region import Open, checked, closed, divided, meshed, opened
from mycel.capture.syntax import each, rewritten
from mycel.capture.trace import CAPTURING, is_traced_here
from mycel.capture.tree import LEAF, Tree, as_leaf, flatten, flatten_arguments
from mycel.ops.python_calls import PythonCall

__all__ = [
    "CAPTURING",
    "LEAF",
    "MISS",
    "TRACING",
    "Captured",
    "Facts",
    "Open",
    "PythonCall",
    "Tree",
    "all_ones",
    "as_leaf",
    "bind",
    "capture",
    "changed",
    "checked",
    "closed",
    "differentiate_with",
    "divided",
    "draw_key",
    "each",
    "flatten",
    "flatten_arguments",
    "growing",
    "input_tensors",
    "input_values",
    "is_static_cache",
    "is_traced_here",
    "make_room",
    "mark_island",
    "meshed",
    "no_such_expert",
    "opened",
    "paused",
    "refuse",
    "refuse_mixed_products",
    "results",
    "rewritten",
    "splice",
    "splice_program",
    "succeeds",
    "trace_custom",
    "traced_gate",
    "traced_layer",
]
