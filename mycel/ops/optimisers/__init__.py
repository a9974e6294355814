"""Optimisers, one paragraph each: state, hyper-parameters, update rule.  Importing this fills the table
`OPTIMISERS`."""

from mycel.ops.optimisers import adam, factored, lion, muon, rprop, scaled, sgd
from mycel.ops.optimisers.paragraph import OPTIMISERS, Optimiser, StateSlot, is_group_update, optimiser, optimiser_of

__all__ = [
    "OPTIMISERS", "Optimiser", "StateSlot", "adam", "factored", "is_group_update", "lion", "muon", "optimiser",
    "optimiser_of", "rprop", "scaled", "sgd",
]  # fmt: skip
