"""The IR: five records, the dims language, the checker, text, and one walker.  Imports nothing of ours but errors."""

from mycel.ir.arena import GRAIN, Arena, arenas, host_alive, host_bytes, host_held, packed, rounded
from mycel.ir.build import Builder
from mycel.ir.check import check, unchecked
from mycel.ir.control import CONTROL, atom_type, call, cond, custom, loop, scan
from mycel.ir.layout import MEAN, Axes, Layout, Mesh, extent, is_even, parse_typed, part, read_dims, read_layout, typed
from mycel.ir.op import BUILDERS, OPS, Collective, Cost, Op, SplitRule, op
from mycel.ir.program import PHASES, Atom, Block, Eqn, Params, Program, Ref, Var
from mycel.ir.role import HELD, Role
from mycel.ir.types import DEVICE, DTYPES, HOST, NAMES, Type, is_float, promote, type_of
from mycel.ir.walk import Chain, chains, lifetimes, lookup, order, prune, rewrite, runs, substitute, walk

__all__ = [
    "BUILDERS",
    "CONTROL",
    "DEVICE",
    "DTYPES",
    "GRAIN",
    "HELD",
    "HOST",
    "MEAN",
    "NAMES",
    "OPS",
    "PHASES",
    "Arena",
    "Atom",
    "Axes",
    "Block",
    "Builder",
    "Chain",
    "Collective",
    "Cost",
    "Eqn",
    "Layout",
    "Mesh",
    "Op",
    "Params",
    "Program",
    "Ref",
    "Role",
    "SplitRule",
    "Type",
    "Var",
    "arenas",
    "atom_type",
    "call",
    "chains",
    "check",
    "cond",
    "custom",
    "extent",
    "host_alive",
    "host_bytes",
    "host_held",
    "is_even",
    "is_float",
    "lifetimes",
    "lookup",
    "loop",
    "op",
    "order",
    "packed",
    "parse_typed",
    "part",
    "promote",
    "prune",
    "read_dims",
    "read_layout",
    "rewrite",
    "rounded",
    "runs",
    "scan",
    "substitute",
    "type_of",
    "typed",
    "unchecked",
    "walk",
]
