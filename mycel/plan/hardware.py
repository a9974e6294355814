"""What a device can do: operations and bytes a second, by size where measured, and the wires to others.

Presets, and over them what `mycel probe` measured.

probe file      $MYCEL_PROBE (empty: none), else probe.yaml in $XDG_CACHE_HOME/mycel or ~/.cache/mycel; used for the
                device it names

device: CPU                                     as `Hardware.name`
processes: 4                                    that measured at once, each with so many `threads`
memory: 150754820096                            on a GPU: its bytes
launch_s: 3.1e-06
host_bytes_s: 9.0e+09                           copies between host and device, each way while the other is as busy
busy_host_bytes_s: 7.0e+09                      the same while the host updates parameters
update_bytes_s: 8.0e+09                         of the host's memory, by an update of parameters there beside copies
update_half_bytes_s: 6.0e+09                    the same of parameters in 16 bits
unaligned: [0.15, 0.28, 0.6]                    on a GPU: the share left to bf16 products with rows of odd length,
                                                of 2, of 4
rates:                                          [work, work a second], by work: bytes, or floating-point operations
  memory: [[65536, 4.1e+10], [67108864, 9.2e+09]]
  product.fp32: [[1e+05, 2.0e+10], [1e+09, 9.1e+10]]       also attention, conv; also .bf16; product.fp8
levels:                                         innermost first: groups of up to so many consecutive ranks
- {name: host, ranks: 4, busy: 0.9, messages: {all_reduce: [[2, 4096, 1.0e-04], …]}}
                                                messages: [ranks, bytes each puts in, seconds]
"""

from __future__ import annotations

import bisect
import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from mycel.errors import PlanError
from mycel.ir import Mesh
from mycel.ops.narrow_products import HALVES
from mycel.ops.product_speed import slow_products
from mycel.plan.links import CPU_LINK, GPU_LINK, Link, Links, fitted

INSIDE = "host"  # the level of ranks that share one
Curve = tuple[tuple[float, float], ...]  # (work, work a second), by rising work
HOST_MEMORY = 50e9  # bytes a second of a host's memory, where nobody measured it: half of what eight channels give


@dataclass(frozen=True)
class Hardware:
    """One device.

    half, single    reachable operations a second in 16 and 32 bits, in large products of aligned sizes
    quarter         the same in 8 bits; None: it multiplies none
    launch_s        from one kernel to the next
    reach           the share of `bytes_s`, which a plain addition has, that kernels of a step reach
    attends         the share of `half` and `single` that attention reaches, where it was not measured
    unaligned       the share that products in 16 bits reach whose rows have a length divisible by no more than 1, 2, 4
    changes         the share of what attention reaches that is left where scores are changed or weights dropped, where
                    that was not measured
    rates           operations or bytes a second by size, where measured
    levels          the wires to other ranks, innermost first
    host_bytes_s    copies between host and device, each way while the other is as busy; `busy_host_bytes_s`: the same
                    while the host updates parameters, None: as fast; `host_memory`: bytes of the host, where known
    update_bytes_s  of the host's memory, that updates of parameters there read and write beside such copies;
                    `update_half_bytes_s`: of parameters in 16 bits; None: not measured
    widens          dtypes of 16 bits whose products are computed in 32, on copies of their operands; from how many
                    rows on
    """

    name: str
    half: float
    single: float
    bytes_s: float
    launch_s: float
    memory: int | None = None
    host_bytes_s: float = 25e9
    busy_host_bytes_s: float | None = None
    host_memory: int | None = None
    update_bytes_s: float | None = None
    update_half_bytes_s: float | None = None
    reach: float = 1.0
    attends: float = 1.0
    unaligned: tuple[float, ...] = (1.0, 1.0, 1.0)
    changes: float = 1.0
    quarter: float | None = None
    rates: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    levels: tuple[Link, ...] = ()
    widens: Mapping[torch.dtype, int] = field(default_factory=dict, hash=False)

    def flops(self, dtype: torch.dtype, kind: str = "", work: float = math.inf, alignment: int = 8) -> float:
        """Operations a second of a kernel of so many; `kind`: as `Op.rate_of` has it, or the
        first words of that, where they were measured."""
        if kind == "product_fp8":
            curve = self.rates.get("product.fp8")
            return rate(curve, work) if curve else self.quarter or self.single
        narrow = dtype.itemsize == 2
        curve = self._curve(kind, "bf16" if narrow else "fp32")
        reached = rate(curve, work) if curve else self.half if narrow else self.single
        if kind == "product" and narrow and alignment < 8:
            return reached * self.unaligned[alignment.bit_length() - 1]
        if kind.endswith(("_capped", "_dropped")) and f"{kind}.{'bf16' if narrow else 'fp32'}" not in self.rates:
            reached *= self.changes
        return reached * self.attends if kind.startswith("attention") and not curve else reached

    def _curve(self, kind: str, dtype: str) -> Curve | None:
        while kind and f"{kind}.{dtype}" not in self.rates:
            kind = kind.rpartition("_")[0]
        return self.rates.get(f"{kind}.{dtype}")

    def bandwidth(self, size: float) -> float:
        """Bytes a second of a kernel that reads and writes so many."""
        curve = self.rates.get("memory")
        return self.reach * (rate(curve, size) if curve else self.bytes_s)

    def started(self, seconds: float) -> float:
        """Seconds of a kernel that runs so long, with its start.  A GPU starts kernels that wait in a queue: of short
        ones less is seen (hundreds of kernels for the statistics of ResNet-50's norms take 2 to 3 us each)."""
        if not self.memory:
            return seconds + self.launch_s
        return seconds + self.launch_s * seconds / ((seconds + self.launch_s) or 1.0)

    def move_s(self, size: float, updating: bool = False) -> float:
        """Seconds of copying so many bytes between host and device, while the host updates parameters or not."""
        busy = self.busy_host_bytes_s if updating else None
        return size / (busy or self.host_bytes_s) + self.launch_s

    def update_s(self, size: float, dtype: torch.dtype) -> float:
        """Seconds of an update on the host that reads and writes so many bytes, of parameters of this dtype."""
        half = self.update_half_bytes_s if dtype in HALVES else None
        return size / (half or self.update_bytes_s or HOST_MEMORY) + self.launch_s

    @property
    def wires(self) -> tuple[Link, ...]:
        """The levels, or the one that is taken where nobody has said any."""
        return self.levels or (GPU_LINK if self.memory else CPU_LINK,)

    def links(self, mesh: Mesh) -> Links:
        """The wires of a mesh whose last axis is the fastest: each axis has the innermost level in which its ranks
        lie.  Several ranks of a group in one host reach other hosts by as many wires at once, up to what they reach
        each other by; so do ranks of each level those of the next."""
        levels = self.wires
        named, stride = dict[str, Link](), 1
        for axis in reversed(mesh.axes):
            ranks = stride * mesh[axis]  # one behind the other, of which a group is some
            inside = (i for i, x in enumerate(levels) if x.ranks % ranks == 0 or x.ranks >= max(ranks, mesh.world))
            n = next(inside, len(levels) - 1)
            named[axis], stride = _wires(levels[: n + 1], stride), ranks
        return Links(mesh, levels[-1], {axis: named[axis] for axis in mesh.axes})


def _wires(levels: Sequence[Link], stride: int) -> Link:
    """The outermost of some levels, as ranks that are so far apart reach each other by it."""
    link = levels[-1]
    if link.measured or len(levels) == 1:
        return link
    together = [1, *(max(1, level.ranks // stride) for level in levels[:-1])]  # ranks of a group that share each level
    reached = [n * level.bytes_s for n, level in zip(together, levels, strict=True)]
    used = [x for x, n in zip(reached, [*together[1:], 2], strict=True) if n > 1]  # where a group has several ranks
    return replace(link, bytes_s=min(used))


def with_link(hardware: Hardware, mesh: Mesh, axis: str, link: Link) -> Hardware:
    """The same, whose wire along an axis is as was measured."""
    name = hardware.links(mesh).of((axis,)).name
    return replace(hardware, levels=tuple(link if level.name == name else level for level in hardware.wires))


def rate(curve: Curve, work: float) -> float:
    """Between two measured sizes on the line between them, in logarithms; beyond the last, as there."""
    at = bisect.bisect(curve, (work, math.inf))
    if at == 0 or at == len(curve):
        return curve[min(at, len(curve) - 1)][1]
    (x0, y0), (x1, y1) = curve[at - 1 : at + 1]
    share = math.log(work / x0) / math.log(x1 / x0)
    return float(y0 ** (1 - share) * y1**share)


# Reachable, not nominal: about 76 % of what the vendor says of dense products in 16 bits with sums in 32 (in 8 bits,
# scaled by row, 60 %: 1150 to 1350 TFLOP/s of an H200), 85 % of the memory's.  An RTX 4090 is sold with 165e12:
# twice that sums in 16 bits, which training does not.  What kernels of a step reach of that was seen on an H200, over
# Llama, GPT-2, BERT, ViT and Qwen3 (python bench/clock.py --device cuda --parts); other GPUs are taken to be alike.
SEEN: dict[str, Any] = {
    "launch_s": 8e-6, "reach": 0.65, "attends": 0.6, "unaligned": (0.15, 0.33, 0.33), "changes": 0.45,
}  # fmt: skip


def _known(
    name: str, half: float, bytes_s: float, memory: int, single: float | None = None, **figures: float
) -> Hardware:
    return Hardware(name, half, single or half / 2, bytes_s, memory=memory << 30, **{**SEEN, **figures})


KNOWN = {
    each.name: each
    for each in (
        _known("A100-40", 250e12, 1.3e12, 40),
        _known("A100-80", 250e12, 1.6e12, 80),
        _known("H100", 720e12, 2.8e12, 80, 355e12, host_bytes_s=50e9, quarter=1150e12),
        _known("H200", 750e12, 4.0e12, 141, 370e12, host_bytes_s=49e9, quarter=1200e12),
        _known("B200", 1700e12, 6.8e12, 180, host_bytes_s=50e9, quarter=2700e12),
        _known("L40S", 290e12, 0.7e12, 48, quarter=440e12),
        _known("RTX-4090", 130e12, 0.85e12, 24, quarter=200e12),
        # 910B3: 20 cores of 8,192 operations a cycle at 1.8 GHz, 313e12 with vectors, 64 GB at 1.6 TB/s (CANN's
        # platform_config; gitcode.com/cann/ops-cv issue 997); 1.3 TB/s and 149 GB/s between 8 were measured
        # (github.com/gameofdimension/limulidae).  910C: two dies, 752e12, 128 GB at 3.2 TB/s, 392 GB/s each way, 8 to
        # a host (arXiv 2506.12708)
        _known("Ascend-910B", 240e12, 1.3e12, 64),
        _known("Ascend-910C", 560e12, 2.6e12, 128),
    )
}
ALIASES = {"A100": "A100-80", "4090": "RTX-4090", "910B": "Ascend-910B", "910C": "Ascend-910C"}


def _wired(inside: str, bytes_s: float, start_s: float, network: float) -> tuple[Link, Link]:
    return Link(bytes_s, start_s, inside), Link(network, 10e-6, "network")


# Inside a host and between hosts: what collectives reach, each way, bytes a second of each device.
WIRES = {
    "A100-40": _wired("nvlink", 230e9, 4e-6, 22e9),
    "A100-80": _wired("nvlink", 230e9, 4e-6, 22e9),
    "H100": _wired("nvlink", 360e9, 3e-6, 45e9),
    "H200": _wired("nvlink", 360e9, 3e-6, 45e9),
    "B200": _wired("nvlink", 720e9, 3e-6, 45e9),
    "L40S": _wired("pcie", 20e9, 8e-6, 22e9),
    "RTX-4090": _wired("pcie", 10e9, 10e-6, 1.2e9),
    "Ascend-910B": _wired("hccs", 150e9, 8e-6, 22e9),
    "Ascend-910C": _wired("hccs", 300e9, 8e-6, 45e9),
}
NETWORK = Link(1.2e9, 50e-6, "network")  # of a host, where nobody knows more: 10 Gbit/s
CPU = Hardware("CPU", 100e9, 100e9, 10e9, 2e-6)
OTHER = Hardware("GPU", 100e12, 50e12, 0.8e12, **SEEN)


def known_name(device: str) -> str | None:
    """The preset of a device as its driver calls it: "NVIDIA A100-SXM4-80GB" is an A100-80."""
    names = {name: name for name in KNOWN} | ALIASES
    return next((names[name] for name in names if all(word in device for word in name.split("-"))), None)


def preset_of(device: str) -> Hardware:
    """What is known of a device of such a name, unmeasured."""
    if device == CPU.name:
        return replace(CPU, widens=slow_products(torch.device("cpu"), HALVES))
    return replace(KNOWN.get(known_name(device) or "", OTHER), name=device)


def hardware_of(device: torch.device, local: int = 0) -> Hardware:
    """What is known of a device: the preset, and over it what was measured of a device of this name; its wires as the
    ranks of this run lie on hosts, `local` on each: where 0, as this host says."""
    if device.type != "cuda":
        known = probed(preset_of(CPU.name), probe_text())
    else:
        properties = torch.cuda.get_device_properties(device)
        known = probed(replace(preset_of(properties.name), memory=properties.total_memory), probe_text())
    text = os.environ.get("WORLD_SIZE", "")
    world = int(text) if text.isdigit() else 1
    return on_hosts(known, local or ranks_of_a_host(world, known), world)


def ranks_of_a_host(world: int, known: Hardware) -> int:
    """Of so many ranks of a run: as whoever started them says, else as a probe over several hosts saw it."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local):
        return math.gcd(int(local), world)
    inside = next((x.ranks for x in known.levels[:-1] if x.name == INSIDE), world)
    return inside if world % inside == 0 else world


def on_hosts(known: Hardware, local: int, world: int) -> Hardware:
    """A device whose wires are those of a run, so many ranks of which are on each host; not measured, as presets have
    them."""
    if local == world:
        return known
    inside, between = WIRES.get(known_name(known.name) or "", (GPU_LINK if known.memory else CPU_LINK, NETWORK))
    between = replace(between, bytes_s=between.bytes_s / local) if between is NETWORK else between
    at = next((i for i, x in enumerate(known.levels) if x.name == INSIDE), -1)
    inside = replace(known.levels[at] if at >= 0 else inside, name=INSIDE, ranks=local)
    outer = known.levels[at + 1 :] or (between,)
    return replace(known, levels=(*([inside] if local > 1 else []), *outer))


def probe_path() -> Path | None:
    """Where the probe writes, and planning reads; None: nowhere."""
    given = os.environ.get("MYCEL_PROBE")
    if given is not None:
        return Path(given).expanduser() if given else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mycel" / "probe.yaml"


def probe_text() -> str:
    """What a probe wrote here; nothing, if none did.  A file that is named and not there is an error."""
    path = probe_path()
    if path is not None and path.is_file():
        return path.read_text(errors="replace")  # what is no text is no YAML, and told of as such
    if path is not None and os.environ.get("MYCEL_PROBE"):
        raise PlanError(
            f"no file {path}\n  at        the environment: MYCEL_PROBE\n"
            f"  try       mycel probe --out {path}, or MYCEL_PROBE= for none"
        )
    return ""


@functools.lru_cache(maxsize=16)
def probed(preset: Hardware, text: str) -> Hardware:
    """A device with what a probe measured of it; the preset itself, if the text is of another device."""
    if not text:
        return preset
    try:
        data = yaml.safe_load(text)
        return with_rates(preset, data) if data["device"] == preset.name else preset
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as e:
        raise PlanError(
            f"what the probe measured cannot be read: {e}\n  at        {probe_path()}\n  try       mycel probe"
        ) from e


def with_rates(preset: Hardware, data: Mapping[str, Any]) -> Hardware:
    """A device with what was measured of it, as a probe file has it."""
    rates: dict[str, Curve] = {name: _curve(points) for name, points in data["rates"].items()}
    fastest = {name: max(y for _, y in curve) for name, curve in rates.items()}
    single = fastest.get("product.fp32", preset.single)
    return replace(
        preset,
        single=single,
        half=fastest.get("product.bf16", single),
        quarter=fastest.get("product.fp8", preset.quarter),
        bytes_s=rates["memory"][-1][1] if "memory" in rates else preset.bytes_s,
        launch_s=float(data["launch_s"]),
        host_bytes_s=float(data.get("host_bytes_s", preset.host_bytes_s)),
        busy_host_bytes_s=float(data.get("busy_host_bytes_s", 0)) or preset.busy_host_bytes_s,
        update_bytes_s=float(data["update_bytes_s"]) if "update_bytes_s" in data else preset.update_bytes_s,
        update_half_bytes_s=float(data.get("update_half_bytes_s", 0)) or preset.update_half_bytes_s,
        unaligned=tuple(float(x) for x in data.get("unaligned", preset.unaligned)),
        rates=rates,
        levels=tuple(
            fitted(level["name"], int(level["ranks"]), float(level["busy"]), level["messages"])
            for level in data.get("levels", ())
        ),
    )


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return tuple(sorted((float(x), float(y)) for x, y in points))
