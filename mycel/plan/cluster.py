"""The devices to plan for: what kind, how many in a host, how many hosts, and the wires between them.

    Cluster.read("h100x64")         a preset and a count: eight hosts of eight
    Cluster.read("probe.yaml")      what `mycel probe` measured: its processes are the devices
    Cluster.read("cluster.yaml")    a file:

        device: H100                               a preset, or its figures (below)
        devices: 8                                 in each host
        hosts: 8                                   or kinds of hosts: [{device: H100, devices: 8, hosts: 2}, …]
        levels:                                    the wires, innermost first; those of the preset where left out
        - {name: nvlink, bytes_s: 3.6e+11, start_s: 3.0e-06}
        - {name: network, bytes_s: 4.5e+10, start_s: 1.0e-05}      of each device; shared: true: of each host

        levels:                                    where there are more than two: how many devices each joins
        - {name: island, devices: 4, bytes_s: 3.6e+11}
        - {name: host, devices: 8, bytes_s: 5.0e+10}
        - {name: rack, devices: 32, bytes_s: 4.5e+10}
        - {name: spine, bytes_s: 2.5e+11, shared: true}            of each rack: of each group of the level before

        device:                                    a device that is no preset
          name: mine
          half: 3.0e+14                            operations a second that large products reach, in 16 bits
          single: 1.5e+14                          in 32 bits
          quarter: 4.5e+14                         in 8 bits, where it has such products
          bytes_s: 1.5e+12                         of its memory
          memory: 64GiB

Every rank runs the same program: where hosts differ, all wait for the slowest, and none can hold more than the
smallest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mycel.errors import PlanError, TrainError
from mycel.plan.hardware import ALIASES, KNOWN, SEEN, WIRES, Hardware, known_name, preset_of, with_rates
from mycel.plan.ledger import Correction, basis_of, correction
from mycel.plan.links import Link
from mycel.plan.mapping_file import read_mapping
from mycel.sizes import parse_bytes, shown

KEYS = ("name", "device", "devices", "hosts", "levels")
DEVICE_KEYS = (
    "name", "half", "single", "quarter", "bytes_s", "memory", "host_bytes_s", "busy_host_bytes_s", "update_bytes_s",
    "update_half_bytes_s", "launch_s",
)  # fmt: skip
FIGURES = tuple(name for name in DEVICE_KEYS if name not in ("name", "half", "single", "bytes_s", "memory"))  # optional
PROBE_KEYS = (
    "device", "processes", "threads", "memory", "launch_s", "host_bytes_s", "busy_host_bytes_s", "update_bytes_s",
    "update_half_bytes_s", "unaligned", "rates", "levels",
)  # fmt: skip
LEVEL_KEYS = ("name", "devices", "bytes_s", "start_s", "shared")


@dataclass(frozen=True)
class Kind:
    """A device as it is sold: its figures, how many a host has, and the wires inside a host and between hosts."""

    hardware: Hardware
    nominal: float
    devices: int
    wires: tuple[Link, Link]


def _kind(name: str, nominal: float, devices: int = 8) -> Kind:
    return Kind(KNOWN[name], nominal, devices, WIRES[name])


# As sold, dense in 16 bits with sums in 32.
KINDS = {
    each.hardware.name: each
    for each in (
        _kind("A100-40", 312e12),
        _kind("A100-80", 312e12),
        _kind("H100", 989e12),
        _kind("H200", 989e12),
        _kind("B200", 2250e12),
        _kind("L40S", 362e12),
        _kind("RTX-4090", 165e12),
        _kind("Ascend-910B", 313e12),
        _kind("Ascend-910C", 752e12),  # packages of two dies, which drivers show as two devices of half of that
    )
}


def _plain(name: str) -> str:
    """As it is compared: small letters and digits alone."""
    return re.sub(r"[\W_]", "", name.lower())


KNOWN_NAMES = {_plain(k): v for k, v in ({k: k for k in KINDS} | ALIASES).items()}


@dataclass(frozen=True)
class Cluster:
    """Hosts of devices.  `hardware` is the slowest of all kinds, with the wires as its levels.  Of hosts with different
    numbers of devices (`sizes`) parts count as hosts, so large that none lies in two: ranks are numbered host by host,
    and what is fast between parts of one is not counted on."""

    name: str
    hardware: Hardware
    devices: int
    hosts: int
    nominal: float  # operations a second in 16 bits, as sold: what MFU is a share of
    sizes: tuple[int, ...] = ()
    correction: Correction | None = None  # in `hardware`: what earlier runs here took
    basis: str = ""  # the figures that it corrects

    @property
    def world(self) -> int:
        return self.devices * self.hosts

    @property
    def memory(self) -> int | None:
        return self.hardware.memory

    @property
    def groups(self) -> tuple[int, ...]:
        """How many devices the levels join that do not join all; one host, where that is all there is to say."""
        inner = tuple(x.ranks for x in self.hardware.levels[:-1] if 1 < x.ranks < self.world)
        return inner or (self.devices,)

    @property
    def one_host(self) -> Cluster:
        """The devices of a single one."""
        inside = tuple(level for level in self.hardware.levels if level.ranks <= self.devices)
        levels = inside or self.hardware.levels[:1]
        return replace(
            self, name=f"one host of {self.name}", hosts=1, sizes=(), hardware=replace(self.hardware, levels=levels)
        )

    def times(self, count: int) -> Cluster:
        """So many times as many hosts, on the same wires."""
        levels = self.hardware.levels
        if levels:
            levels = (*levels[:-1], replace(levels[-1], ranks=1 << 30))
        return replace(
            self, hosts=self.hosts * count, sizes=self.sizes * count, hardware=replace(self.hardware, levels=levels)
        )

    @property
    def corrected(self) -> Cluster:
        """The same, by what earlier runs on as many ranks of it took against these figures."""
        return self.corrected_by(correction(self.hardware.name, self.world, basis_of(self.hardware)))

    def corrected_by(self, known: Correction | None) -> Cluster:
        if known is None:
            return self
        return replace(self, hardware=known.applied(self.hardware), correction=known, basis=basis_of(self.hardware))

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts of {self.devices}" if self.hosts > 1 else f"{self.devices} in one host"
        if self.sizes:
            hosts = f"hosts of {', '.join(map(str, self.sizes))} as {hosts}"
        memory = f", {shown(self.memory)} each" if self.memory else ""
        if self.world == 1:
            return f"{self.name}: one device{memory.removesuffix(' each')}"
        return f"{self.name}: {self.world} devices, {hosts}{memory}"

    @staticmethod
    def read(source: str | Path | Mapping[str, Any]) -> Cluster:
        """A preset with a count, a YAML file, or what one would hold."""
        if isinstance(source, Mapping):
            return _cluster(dict(source), "the cluster")
        text = str(source)
        if text.endswith((".yaml", ".yml")) or Path(text).is_file():
            return _cluster(read_mapping(Path(text), "cluster", "device: H100, devices: 8, hosts: 2"), text)
        name, counts = _preset(text)
        kind = _named(name, "the cluster")
        if len(counts) == 2:  # h100x8x4: hosts x devices
            return _cluster({"device": name, "hosts": counts[0], "devices": counts[1]}, text)
        world = _count(counts[0] if counts else 1, f"{text}: devices")
        devices = min(kind.devices, world)
        if world % devices:
            inside = max(n for n in range(1, kind.devices) if world % n == 0)
            raise PlanError(
                f"{text}: {world} devices are not a whole number of hosts of {kind.devices}\n"
                f"  try       {name}x{-(-world // kind.devices) * kind.devices}, or {name}x{world // inside}x"
                f"{inside}: {world // inside} hosts of {inside}"
            )
        return _cluster({"name": text, "device": name, "devices": devices, "hosts": world // devices}, text)


def _cluster(data: dict[str, Any], where: str) -> Cluster:
    if "rates" in data:
        return _measured(data, where)
    _refuse_unknown(data, KEYS, where)
    if isinstance(data.get("hosts"), list):
        return _uneven(data, where)
    kind, hardware = _device(data.get("device"), where)
    devices = _count(data.get("devices", kind.devices if kind else 1), f"{where}: devices")
    hosts = _count(data.get("hosts", 1), f"{where}: hosts")
    nominal = kind.nominal if kind is not None else hardware.half
    levels = _levels(data.get("levels"), kind, devices, hosts, where)
    return Cluster(str(data.get("name") or where), replace(hardware, levels=levels), devices, hosts, nominal)


def _measured(data: dict[str, Any], where: str) -> Cluster:
    """The devices that a probe measured (`hardware.py` has its file)."""
    _refuse_unknown(data, PROBE_KEYS, where)
    world = _count(data.get("processes", 1), f"{where}: processes")
    try:
        name = str(data["device"])
        known = preset_of(name)
        hardware = with_rates(replace(known, memory=int(data.get("memory", 0)) or known.memory), data)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise PlanError(
            f"{where}: what the probe measured cannot be read: {e}\n  try       mycel probe --out {where}"
        ) from e
    devices = next((level.ranks for level in hardware.levels if level.name == "host"), 1)
    if world % devices:
        raise PlanError(
            f"{where}: {world} processes are not a whole number of hosts of {devices} ranks\n"
            f"  try       mycel probe --out {where}"
        )
    return Cluster(where, hardware, devices, world // devices, nominal_of(hardware))


def nominal_of(hardware: Hardware) -> float:
    """Operations a second in 16 bits as a device is sold; of one that is no preset what it reaches."""
    kind = KINDS.get(known_name(hardware.name) or "")
    return kind.nominal if kind is not None else hardware.half


def _uneven(data: dict[str, Any], where: str) -> Cluster:
    """Several kinds of hosts: all wait for the slowest."""
    parts = []
    for i, each in enumerate(data["hosts"]):
        if not isinstance(each, dict):
            raise PlanError(f"{where}: hosts[{i}] is {each!r}\n  try       {{device: H100, devices: 8, hosts: 2}}")
        parts.append(_cluster({**each, **({"levels": data["levels"]} if "levels" in data else {})}, f"{where}: hosts"))
    first, devices = parts[0].hardware, math.gcd(*(p.devices for p in parts))
    slowest = replace(
        first,
        name=" + ".join(dict.fromkeys(p.hardware.name for p in parts)),
        half=min(p.hardware.half for p in parts),
        single=min(p.hardware.single for p in parts),
        quarter=min(p.hardware.quarter or 0.0 for p in parts) or None,
        bytes_s=min(p.hardware.bytes_s for p in parts),
        memory=min((p.hardware.memory for p in parts if p.hardware.memory), default=None),
        host_bytes_s=min(p.hardware.host_bytes_s for p in parts),
        launch_s=max(p.hardware.launch_s for p in parts),
    )
    hosts = sum(p.hosts * p.devices // devices for p in parts)
    inside = min((p.hardware.levels[0] for p in parts), key=lambda x: x.bytes_s)
    between = min((p.hardware.levels[-1] for p in parts), key=lambda x: x.bytes_s)
    if len(first.levels) == 1 and hosts > 1 and "levels" not in data:  # one host of each kind: the presets' networks
        kinds = [_device(each.get("device"), where)[0] for each in data["hosts"]]
        between = min((k.wires[1] for k in kinds if k), key=lambda x: x.bytes_s)
    levels: tuple[Link, ...] = (inside,)
    if hosts > 1:
        levels = replace(inside, ranks=devices), replace(between, ranks=1 << 30)
    if hosts > 1 and devices == 1:
        levels = levels[1:]
    if len(data.get("levels") or ()) > 2:
        levels = _levels(data["levels"], None, devices, hosts, where)
    sizes = tuple(n for p in parts for n in [p.devices] * p.hosts)
    return Cluster(
        str(data.get("name") or where),
        replace(slowest, levels=levels),
        devices,
        hosts,
        min(p.nominal for p in parts),
        sizes if {*sizes} != {devices} else (),
    )


def _device(given: Any, where: str) -> tuple[Kind | None, Hardware]:
    if given is None:
        raise PlanError(f"{where}: no device is given\n  try       device: one of {', '.join(KINDS)}, or its figures")
    if not isinstance(given, Mapping):
        kind = _named(str(given), where)
        return kind, kind.hardware
    _refuse_unknown(given, DEVICE_KEYS, f"{where}: device")
    missing = [k for k in ("half", "bytes_s", "memory") if k not in given]
    if missing:
        raise PlanError(
            f"{where}: device has no {missing[0]}\n  try       half: operations a second in 16 bits, bytes_s: of its "
            "memory, memory: 80GiB"
        )
    half = _positive(given["half"], f"{where}: device: half")
    figures = {k: _positive(given[k], f"{where}: device: {k}") for k in FIGURES if k in given}
    single = _positive(given.get("single", half / 2), f"{where}: device: single")
    bytes_s = _positive(given["bytes_s"], f"{where}: device: bytes_s")
    try:
        memory = parse_bytes(given["memory"])
    except (TypeError, TrainError) as e:
        raise PlanError(f"{where}: device: memory is {given['memory']!r}\n  try       80GiB") from e
    return None, Hardware(str(given.get("name", "device")), half, single, bytes_s, memory=memory, **{**SEEN, **figures})


def _preset(text: str) -> tuple[str, list[int]]:
    """A device's name, and up to two counts behind it; a name may itself hold an x before digits."""
    for counts in (0, 1, 2):
        match = re.fullmatch("(.+)" + r"x(\d+)" * counts, text)
        if match and _plain(match[1]) in KNOWN_NAMES:
            return match[1], [int(n) for n in match.groups()[1:]]
    return re.sub(r"(x\d{1,3}){0,2}$", "", text), []


def _named(name: str, where: str) -> Kind:
    if _plain(name) not in KNOWN_NAMES:
        close = get_close_matches(_plain(name), KNOWN_NAMES, 1)
        raise PlanError(
            f"{where}: there is no device {name!r}\n  known     {', '.join(KINDS)}\n"
            f"  try       {KNOWN_NAMES[close[0]] if close else 'one of these, or its figures in a file'}"
        )
    return KINDS[KNOWN_NAMES[_plain(name)]]


def _levels(given: Any, kind: Kind | None, devices: int, hosts: int, where: str) -> tuple[Link, ...]:
    if given is None and kind is None and devices * hosts > 1:
        raise PlanError(
            f"{where}: no levels are given for a device that is no preset\n"
            "  try       levels: [{name: network, bytes_s: 1.0e+10, start_s: 1.0e-05}]"
        )
    if given is None:
        return _joined(kind.wires if kind is not None else (), [devices], devices * hosts)
    if not isinstance(given, list) or not all(isinstance(x, Mapping) for x in given) or not given:
        raise PlanError(f"{where}: levels is {given!r}\n  try       a list, innermost first: {{name, bytes_s, …}}")
    sizes = _sizes(given, devices, hosts, where)
    names = [str(x.get("name") or _level_name(i, sizes, devices)) for i, x in enumerate(given)]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), ""):
        raise PlanError(f"{where}: two levels are called {twice!r}\n  try       a name for each")
    below = [sizes[0] if sizes else devices, *sizes]  # devices that share a wire of each level
    links = [_level(x, names[i], below[i], f"{where}: levels[{i}]") for i, x in enumerate(given)]
    return _joined(links, sizes, devices * hosts)


def _joined(links: Sequence[Link], sizes: Sequence[int], world: int) -> tuple[Link, ...]:
    """The levels as far as there are devices that they join; the last joins all."""
    inner = list(itertools.takewhile(lambda link: link.ranks < world, map(_with_ranks, links, sizes)))
    return (*inner, links[len(inner)]) if links else ()


def _with_ranks(link: Link, ranks: int) -> Link:
    return replace(link, ranks=ranks)


def _sizes(given: Sequence[Mapping[str, Any]], devices: int, hosts: int, where: str) -> list[int]:
    """How many devices each level but the last joins: the first those of a host, where nothing is said."""
    sizes: list[int] = []
    for i, level in enumerate(given):
        at, count = f"{where}: levels[{i}]", level.get("devices")
        if count is None and i == len(given) - 1:
            break
        if count is None and len(given) > 2:
            hint = f"devices: {devices}" if not sizes else f"devices: {sizes[-1] * 2}, a multiple of {sizes[-1]}"
            raise PlanError(
                f"{at}: {len(given)} levels, and nothing says how many devices this one joins\n  try       {hint}"
            )
        size = devices if count is None else _count(count, f"{at}: devices")
        before = sizes[-1] if sizes else 1
        if sizes and (size <= before or size % before):
            raise PlanError(
                f"{at}: devices is {size}, of the level before {before}: each level joins several groups of the one "
                f"before\n  try       the innermost first; devices: {before * max(2, size // before)}"
            )
        if devices % size and size % devices:
            raise PlanError(
                f"{at}: devices is {size}, and a host has {devices}: neither divides the other\n"
                f"  try       devices: {next(n for n in range(min(size, devices), 0, -1) if devices % n == 0)}"
            )
        if size < devices * hosts and devices * hosts % size:
            raise PlanError(
                f"{at}: devices is {size}, the cluster has {devices * hosts}, which are no whole number of these\n"
                f"  try       devices: {math.gcd(size, devices * hosts)}"
            )
        sizes.append(size)
    if len(sizes) == len(given) and sizes[-1] < devices * hosts:
        raise PlanError(
            f"{where}: the outermost level joins {sizes[-1]} devices, the cluster has {devices * hosts}\n"
            "  try       one more level, or none of `devices` at the last"
        )
    return sizes


def _level_name(i: int, sizes: Sequence[int], devices: int) -> str:
    """Of a level that has none."""
    return "network" if i == len(sizes) else "host" if sizes[i] == devices else f"groups of {sizes[i]}"


def _level(data: Mapping[str, Any], name: str, sharing: int, where: str) -> Link:
    _refuse_unknown(data, LEVEL_KEYS, where)
    if "bytes_s" not in data:
        raise PlanError(f"{where}: no bytes_s\n  try       bytes_s: 5.0e+10, a second and device")
    bytes_s = _positive(data["bytes_s"], f"{where}: bytes_s") / (sharing if data.get("shared") else 1)
    return Link(bytes_s, _positive(data.get("start_s", 1e-5), f"{where}: start_s"), name)


def _refuse_unknown(data: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in data:
        if key not in keys:
            close = get_close_matches(str(key), keys, 1)
            raise PlanError(f"{where}: unknown key {key!r}\n  try       {close[0] if close else ', '.join(keys)}")


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{where} is {value!r}\n  try       a whole number, at least 1")
    return value


def _positive(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 < number < float("inf"):
        raise PlanError(f"{where} is {value!r}\n  try       a number above 0, such as 1.5e+12")
    return number
