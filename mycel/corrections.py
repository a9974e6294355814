"""What earlier runs here took against what figures say (`plan/ledger.py`), as all ranks of a run see it: whatever a run
decides and predicts is priced by figures that are corrected so.

    corrections = Corrections()
    hardware = corrections.hardware(device, ranks)      what is known of a device, corrected by runs of as many ranks

Rank 0 looks it up, and the others have it from the store at which they meet: files differ between hosts, and another
run may end meanwhile.  It is asked once for each device and number of ranks; a run that goes on takes what it began
with (`data`, `read`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from mycel import plan
from mycel.plan import Correction, Hardware
from mycel.run.rendezvous import from_first, ranks_on_a_host


@dataclass
class Corrections:
    """By device, ranks and figures; None: nothing is known.  `begun`: what rank 0 takes without looking it up."""

    begun: Mapping[str, Correction | None] = field(default_factory=dict)
    known: dict[str, Correction | None] = field(default_factory=dict)

    def hardware(self, device: torch.device, ranks: int) -> Hardware:
        figures = self.figures(device, ranks)
        known = self.of(figures, ranks)
        return figures if known is None else known.applied(figures)

    def figures(self, device: torch.device, ranks: int) -> Hardware:
        """The same without what runs took."""
        return plan.hardware_of(device, self.ranks_on_a_host if ranks > 1 else 0)

    @cached_property
    def ranks_on_a_host(self) -> int:
        """The same number on all, also where hosts have different ones; 0: nobody says."""
        return ranks_on_a_host()

    def of(self, figures: Hardware, ranks: int) -> Correction | None:
        basis = plan.basis_of(figures)
        key = f"{figures.name}, {ranks} ranks, {basis}"
        if key not in self.known:
            find = lambda: self.begun[key] if key in self.begun else plan.correction(figures.name, ranks, basis)
            self.known[key] = _read(json.loads(from_first(lambda: _text(find())))) if ranks > 1 else find()
        return self.known[key]

    def data(self) -> dict[str, Any]:
        return {key: known and asdict(known) for key, known in self.known.items()}

    @staticmethod
    def read(data: Mapping[str, Any]) -> Corrections:
        return Corrections({key: _read(each) for key, each in data.items()})


def _text(known: Correction | None) -> str:
    return json.dumps(known and asdict(known))


def _read(data: Any) -> Correction | None:
    return Correction(**data) if data else None
