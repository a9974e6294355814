"""Optimisers, one paragraph each: state, hyper-parameters, update rule.  Importing this fills the table `OPTIMISERS`."""

from mycel.ops.optimisers import adam, factored, lion, muon, scaled, sgd
from mycel.ops.optimisers.paragraph import OPTIMISERS, Optimiser, Slot, optimiser

__all__ = ["OPTIMISERS", "Optimiser", "Slot", "adam", "factored", "lion", "muon", "optimiser", "scaled", "sgd"]
