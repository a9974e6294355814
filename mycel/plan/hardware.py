"""What a device can do: operations and bytes a second, and memory.  Only ratios matter for decisions; a probe refines the table."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Hardware:
    """One device.  `half` and `single`: reachable operations a second in 16 and 32 bits; `launch_s`: the cost of starting one kernel."""

    name: str
    half: float
    single: float
    bytes_s: float
    launch_s: float
    memory: int | None = None

    def flops(self, dtype: torch.dtype) -> float:
        return self.half if dtype.itemsize == 2 else self.single


# Reachable, not nominal: about 80 % of the tensor-core peak in large products, 85 % of the memory's.
KNOWN = {
    "H200": Hardware("H200", 790e12, 390e12, 4.0e12, 4e-6),
    "H100": Hardware("H100", 750e12, 370e12, 2.8e12, 4e-6),
    "A100": Hardware("A100", 250e12, 125e12, 1.6e12, 5e-6),
    "L40S": Hardware("L40S", 290e12, 145e12, 0.7e12, 5e-6),
    "4090": Hardware("4090", 260e12, 130e12, 0.85e12, 5e-6),
}
CPU = Hardware("CPU", 100e9, 100e9, 10e9, 2e-6)
OTHER = Hardware("GPU", 100e12, 50e12, 0.8e12, 5e-6)


def hardware_of(device: torch.device) -> Hardware:
    """What is known of a device."""
    if device.type != "cuda":
        return CPU
    properties = torch.cuda.get_device_properties(device)
    found = next((h for key, h in KNOWN.items() if key in properties.name), OTHER)
    return Hardware(properties.name, found.half, found.single, found.bytes_s, found.launch_s, properties.total_memory)
