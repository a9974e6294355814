"""Clusters: presets, files, uneven hosts, what is refused; and which wire an axis of a mesh has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml

from mycel.corrections import Corrections
from mycel.errors import PlanError
from mycel.ir import Mesh
from mycel.plan import hardware_of
from mycel.plan.cluster import KINDS, Cluster
from mycel.plan.hardware import (
    CPU,
    KNOWN,
    OTHER,
    WIRES,
    known_name,
    on_hosts,
    preset_of,
    probed,
    ranks_of_a_host,
    with_rates,
)
from mycel.step.auto_plan import ranks_of


@pytest.mark.parametrize("name", KINDS)
def test_presets(name):
    one, many = Cluster.read(name), Cluster.read(f"{name}x{4 * KINDS[name].devices}")
    assert one.world == 1 and many.hosts == 4 and many.devices == KINDS[name].devices
    assert many.memory == KINDS[name].hardware.memory and many.hardware.half < many.nominal
    inside, between = many.hardware.levels
    assert inside.ranks == many.devices and between.bytes_s <= 1.1 * inside.bytes_s


def test_a_file_and_a_mapping(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("device: h100\ndevices: 4\nhosts: 2\nlevels:\n- {name: wire, bytes_s: 1e9, shared: true}\n")
    cluster = Cluster.read(file)
    assert (cluster.world, cluster.devices, cluster.hosts) == (8, 4, 2)
    assert [(x.name, x.bytes_s) for x in cluster.hardware.levels] == [("wire", 0.25e9)]
    own = {"name": "mine", "half": 1e14, "bytes_s": 1e12, "memory": "16GiB"}
    mine = Cluster.read({"device": own, "devices": 2, "levels": [{"bytes_s": 1e10}]})
    assert mine.memory == 16 << 30 and mine.world == 2 and mine.hardware.single == 0.5e14


def test_of_several_kinds_the_slowest_counts():
    cluster = Cluster.read({"hosts": [{"device": "H100", "hosts": 1}, {"device": "A100-40", "hosts": 2}]})
    assert cluster.world == 24 and cluster.memory == 40 << 30 and cluster.nominal == 312e12
    assert cluster.hardware.half == KINDS["A100-40"].hardware.half
    assert cluster.hardware.levels[-1].bytes_s == 22e9


@pytest.mark.parametrize(
    "counts, devices, hosts", [((8, 4), 4, 3), ((8, 6), 2, 7), ((8, 3), 1, 11), ((16, 8, 8), 8, 4)]
)
def test_of_hosts_of_several_sizes_parts_count_that_lie_in_one_host(counts, devices, hosts):
    cluster = Cluster.read({"hosts": [{"device": "H100", "devices": n} for n in counts]})
    assert (cluster.devices, cluster.hosts, cluster.world) == (devices, hosts, sum(counts))
    first = 0
    for n in counts:  # ranks that are wired as in one host are in one host
        assert first % devices == 0
        first += n
    assert f"hosts of {', '.join(map(str, counts))} as" in str(cluster)
    inside = cluster.hardware.levels[0]
    assert inside.ranks == devices if devices > 1 else [x.name for x in cluster.hardware.levels] == ["network"]
    assert cluster.one_host.world == devices and cluster.times(2).world == 2 * sum(counts)


MEASURED = {
    "device": "CPU",
    "processes": 4,
    "threads": 1,
    "launch_s": 3e-6,
    "host_bytes_s": 9e9,
    "update_bytes_s": 8e9,
    "update_half_bytes_s": 6e9,
    "rates": {"memory": [[65536, 4.1e10], [1 << 26, 9.2e9]], "product.fp32": [[1e5, 2e10], [1e9, 9.1e10]]},
    "levels": [
        {"name": "host", "ranks": 4, "busy": 0.9, "messages": {"all_reduce": [[2, 4096, 1e-4], [4, 4096, 2e-4]]}}
    ],
}


def test_what_the_probe_measured_is_a_cluster(tmp_path):
    file = tmp_path / "probe.yaml"
    file.write_text(yaml.safe_dump(MEASURED))
    cluster = Cluster.read(file)
    assert (cluster.world, cluster.devices, cluster.hosts, cluster.memory) == (4, 4, 1, None)
    assert cluster.hardware == probed(preset_of("CPU"), file.read_text()) != preset_of("CPU")
    assert cluster.hardware.single == 9.1e10 and cluster.hardware.links(Mesh(dp=4)).levels == ("host",)


def test_what_the_probe_measured_over_hosts_of_gpus_is_a_cluster():
    network = {**MEASURED["levels"][0], "name": "network", "ranks": 16}
    levels = [{**MEASURED["levels"][0], "ranks": 8}, network]
    data = {**MEASURED, "device": "NVIDIA H100 80GB HBM3", "memory": 79 << 30, "processes": 16, "levels": levels}
    cluster = Cluster.read(data)
    assert (cluster.world, cluster.devices, cluster.hosts, cluster.memory) == (16, 8, 2, 79 << 30)
    assert cluster.nominal == KINDS["H100"].nominal and cluster.hardware.quarter == KNOWN["H100"].quarter
    assert cluster.one_host.hardware.levels[0].name == "host"
    older = Cluster.read({k: v for k, v in data.items() if k != "memory"})
    assert older.memory == KNOWN["H100"].memory


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"process": 4}, "unknown key 'process'.*try       processes"),
        ({"processes": 6}, "6 processes are not a whole number of hosts of 4"),
        ({"rates": {"memory": "fast"}}, "what the probe measured cannot be read.*mycel probe --out"),
        ({"rates": 3}, "what the probe measured cannot be read"),
    ],
)
def test_what_no_probe_wrote_is_refused(change, says):
    with pytest.raises(PlanError, match="(?s)" + says):
        Cluster.read({**MEASURED, **change})


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Ascend910B3", "Ascend-910B"),
        ("Tesla T4", None),
        ("CPU", None),
    ],
)
def test_devices_are_known_by_what_their_driver_calls_them(driver, name):
    assert known_name(driver) == name
    same = OTHER if name is None else KNOWN[name]
    assert preset_of(driver).half == (CPU if driver == "CPU" else same).half and preset_of(driver).name == driver


@pytest.mark.parametrize("name", KINDS)
def test_what_a_preset_reaches_is_a_share_of_what_it_is_sold_with(name):
    kind = KINDS[name]
    assert kind.hardware is KNOWN[name] and 0.7 <= kind.hardware.half / kind.nominal <= 0.85
    assert kind.hardware.quarter is None or 1.5 <= kind.hardware.quarter / kind.hardware.half <= 1.7


@pytest.mark.parametrize("name", ["rtx4090", "RTX-4090", "rtx_4090", "4090"])
def test_names_as_people_write_them(name):
    """An x before digits may belong to a name."""
    assert Cluster.read(f"{name}x2").hardware.half == KINDS["RTX-4090"].hardware.half
    assert [Cluster.read(f"{name}{counts}").world for counts in ("", "x2", "x4x8")] == [1, 2, 32]


def test_wires_of_axes():
    """Inside a host; between hosts by one wire of each rank; by all of a host's together."""
    hardware = Cluster.read("h100x64").hardware
    links = hardware.links(Mesh(dp=8, tp=8))
    assert [links.of((a,)).name for a in ("dp", "tp")] == ["network", "nvlink"]
    assert links.of(("dp",)).bytes_s == 45e9
    assert hardware.links(Mesh(dp=64)).of(("dp",)).bytes_s == 8 * 45e9
    assert hardware.links(Mesh(dp=32, tp=2)).of(("dp",)).bytes_s == 4 * 45e9
    assert hardware.links(Mesh(tp=2, dp=32)).of(("dp",)).bytes_s == 360e9  # no more than inside
    assert hardware.links(Mesh(tp=2, dp=32)).of(("tp",)).bytes_s == 45e9


def test_ranks_of_a_run_lie_on_hosts(monkeypatch):
    """As whoever started them says; their wires as probed, else as presets have them."""
    monkeypatch.setattr("mycel.corrections.from_first", lambda make: make())  # nobody to ask
    monkeypatch.setattr("mycel.corrections.ranks_on_a_host", lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cluster = ranks_of("cpu", 8, Corrections())
    assert (cluster.devices, cluster.hosts, cluster.groups) == (4, 2, (4,))
    links = hardware_of(torch.device("cpu")).links(Mesh(dp=2, tp=4))  # what a step asks knows it, too
    assert [links.of((a,)).name for a in ("dp", "tp")] == ["network", "host"]
    assert links.of(("dp",)).bytes_s < links.of(("tp",)).bytes_s
    assert [x.name for x in on_hosts(KNOWN["H100"], 4, 8).levels] == ["host", "network"]
    assert on_hosts(KNOWN["H100"], 4, 8).levels[0].bytes_s == WIRES["H100"][0].bytes_s
    network = {**MEASURED["levels"][0], "name": "network", "ranks": 8}
    seen = with_rates(preset_of("CPU"), {**MEASURED, "levels": [MEASURED["levels"][0], network]})
    assert ranks_of_a_host(8, seen) == 4 and on_hosts(seen, 2, 8).levels[0] == replace(seen.levels[0], ranks=2)
    assert on_hosts(seen, 2, 8).levels[1] == seen.levels[1] and on_hosts(seen, 8, 8) is seen
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two hosts of six ranks, 2 and 4: both ranks see the same
    ours = ranks_of("cpu", 6, Corrections())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_of("cpu", 6, Corrections()) == ours and ours.hosts == 3
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert (
        ranks_of("cpu", 8, Corrections()).hosts == 1 and ranks_of_a_host(8, seen) == 4 and ranks_of_a_host(6, seen) == 6
    )


FOUR = [
    {"name": "island", "devices": 4, "bytes_s": 4e11, "start_s": 1e-6},
    {"name": "host", "devices": 8, "bytes_s": 5e10, "start_s": 2e-6},
    {"name": "rack", "devices": 32, "bytes_s": 2e10, "start_s": 5e-6},
    {"name": "spine", "bytes_s": 1.6e11, "start_s": 1e-5, "shared": True},
]


def test_more_levels_than_hosts_and_their_network():
    """Each axis lies in the innermost level that has all its ranks; by each level those of a group go together."""
    cluster = Cluster.read({"device": "H100", "devices": 8, "hosts": 8, "levels": FOUR})
    assert [(x.name, x.ranks) for x in cluster.hardware.levels[:3]] == [("island", 4), ("host", 8), ("rack", 32)]
    assert cluster.groups == (4, 8, 32) and cluster.one_host.groups == (4,)

    def wires(**sizes: int) -> dict[str, tuple[str, float]]:
        links = cluster.hardware.links(Mesh(sizes))
        return {axis: (links.of((axis,)).name, links.of((axis,)).bytes_s) for axis in sizes}

    assert wires(a=2, b=4, c=2, d=4) == {
        "a": ("spine", 5e9), "b": ("rack", 2e10), "c": ("host", 5e10), "d": ("island", 4e11),
    }  # fmt: skip
    assert wires(a=8, b=8) == {"a": ("spine", 2e10), "b": ("host", 2e11)}  # 4 of a rack; 4 of an island
    assert wires(a=64) == {"a": ("spine", 1.6e11)} and wires(a=32, b=2)["a"] == ("spine", 8e10)
    few = Cluster.read({"device": "H100", "devices": 8, "levels": FOUR})
    assert [x.name for x in few.hardware.levels] == ["island", "host"] and few.groups == (4,)
    uneven = Cluster.read(
        {"hosts": [{"device": "H100", "devices": 8}, {"device": "H200", "devices": 8}], "levels": FOUR}
    )
    assert [x.name for x in uneven.hardware.levels] == ["island", "host", "rack"]


def test_groups_that_lie_in_two_hosts_speak_over_the_network():
    links = Cluster.read("h100x2x3").hardware.links(Mesh(dp=3, tp=2))
    assert links.of(("tp",)).name == "network"  # ranks 2 and 3 are of two hosts
    assert Cluster.read("h100x2x3").hardware.links(Mesh(dp=2, tp=3)).of(("tp",)).name == "nvlink"


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        ([FOUR[1], FOUR[0], FOUR[3]], "levels.1.: devices is 4, of the level before 8.*try       the innermost first"),
        ([FOUR[0], {**FOUR[1], "devices": 4}, FOUR[3]], "levels.1.: devices is 4, of the level before 4"),
        ([FOUR[0], {**FOUR[1], "devices": 6}, FOUR[3]], "levels.1.: devices is 6, of the level before 4.*devices: 8"),
        ([{**FOUR[0], "devices": 3}, FOUR[1], FOUR[3]], "levels.0.: devices is 3, and a host has 8"),
        ([{**FOUR[0], "devices": 0}, FOUR[3]], "levels.0.: devices is 0.*at least 1"),
        ([FOUR[0], FOUR[1], {**FOUR[2], "devices": 24}, FOUR[3]], "levels.2.: devices is 24, the cluster has 64"),
        ([FOUR[0], {"bytes_s": 1e10}, FOUR[3]], "levels.1.: 3 levels, and nothing says how many.*try       devices: 8"),
        ([FOUR[0], FOUR[1]], "the outermost level joins 8 devices, the cluster has 64.*one more level"),
        ([FOUR[0], {**FOUR[3], "name": "island"}], "two levels are called 'island'"),
        ([{**FOUR[0], "device": 4}, FOUR[3]], "unknown key 'device'.*try       devices"),
    ],
)  # fmt: skip
def test_levels_that_make_no_cluster(levels, says):
    with pytest.raises(PlanError, match="(?s)" + says):
        Cluster.read({"device": "H100", "devices": 8, "hosts": 8, "levels": levels})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("h10x8", "there is no device 'h10'.*try       H100"),
        ("rtx5090x2", "there is no device 'rtx5090'.*try       RTX-4090"),
        ("", "there is no device ''"),
        ("h100x12", "12 devices are not a whole number of hosts of 8.*try       h100x16"),
        ("h100x0", "devices is 0.*at least 1"),
        ({"devices": 8}, "no device is given"),
        ({"device": "H100", "host": 2}, "unknown key 'host'.*try       hosts"),
        ({"device": "H100", "hosts": 0}, "hosts is 0.*at least 1"),
        ({"device": {"name": "x", "bytes_s": 1e12, "memory": "1GiB"}}, "device has no half"),
        ({"device": {"half": -1, "bytes_s": 1e12, "memory": "1GiB"}}, "half is -1.*a number above 0"),
        ({"device": {"half": 1e12, "bytes_s": 1e12, "memory": "lots"}}, "memory is 'lots'"),
        ({"device": {"half": 1e12, "bytes_s": 1e12, "memory": "1GiB"}, "devices": 2}, "no levels are given"),
        ({"device": "H100", "levels": [{"name": "x"}]}, "no bytes_s"),
        ("nowhere.yaml", "there is no cluster nowhere.yaml.*try"),
    ],
)
def test_nonsense_is_refused(given, says):
    with pytest.raises(PlanError, match="(?s)" + says):
        Cluster.read(given)


# As published, dense: operations a second in 16 bits (sums in 32) and in 8, bytes a second of memory, gigabytes of it,
# bytes a second to other devices of a host (each way) and between hosts, where systems are sold with it.
#   NVIDIA A100 Tensor Core GPU data sheet (June 2021; SXM): 312 TFLOPS BF16, 1,555 and 2,039 GB/s, NVLink 600 GB/s both
#   ways; DGX A100: 200 Gb/s InfiniBand a GPU
#   NVIDIA H100 Tensor Core GPU data sheet (SXM5): 1,979 TFLOPS BF16 and 3,958 FP8 with sparsity, 3.35 TB/s, NVLink
#   900 GB/s both ways; DGX H100: 400 Gb/s a GPU
#   NVIDIA H200 Tensor Core GPU data sheet (SXM): as H100, with 141 GB at 4.8 TB/s
#   NVIDIA HGX B200 data sheet, of 8: 36 PFLOPS BF16 and 72 FP8 with sparsity, 1,440 GB at 8 TB/s each, NVLink 1.8 TB/s
#   NVIDIA L40S data sheet: 362.05 TFLOPS BF16, 733 FP8, 48 GB at 864 GB/s, PCIe Gen4 x16 64 GB/s both ways
#   NVIDIA Ada GPU architecture white paper, RTX 4090: 165.2 TFLOPS FP16 with FP32 sums, 330.3 FP8, 24 GB at 1,008 GB/s
#   Huawei Ascend 910B as in "Serving Large Language Models on Huawei CloudMatrix384" (arXiv 2506.12708), and Atlas 800
#   A2: 313 TFLOPS FP16 (910B3), 64 GB at 1.6 TB/s, HCCS 392 GB/s both ways; 910C, of two dies: 752 TFLOPS, 128 GB at
#   3.2 TB/s, 392 GB/s each way
PUBLISHED = {
    "A100-40": (312e12, None, 1.555e12, 40, 300e9, 25e9), "A100-80": (312e12, None, 2.039e12, 80, 300e9, 25e9),
    "H100": (989.5e12, 1979e12, 3.35e12, 80, 450e9, 50e9), "H200": (989.5e12, 1979e12, 4.8e12, 141, 450e9, 50e9),
    "B200": (2250e12, 4500e12, 8e12, 180, 900e9, 50e9), "L40S": (362.05e12, 733e12, 0.864e12, 48, 32e9, None),
    "RTX-4090": (165.2e12, 330.3e12, 1.008e12, 24, 32e9, None), "Ascend-910B": (313e12, None, 1.6e12, 64, 196e9, None),
    "Ascend-910C": (752e12, None, 3.2e12, 128, 392e9, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_what_data_sheets_say(name):
    """What is sold is the sheet's; what is reached is less, and not by much."""
    kind, (half, quarter, bytes_s, gigabytes, inside, between) = KINDS[name], PUBLISHED[name]
    hardware = kind.hardware
    assert kind.nominal == pytest.approx(half, rel=2e-3) and 0.7 * half < hardware.half < 0.85 * half
    assert (quarter is None) == (hardware.quarter is None)
    assert quarter is None or 0.5 * quarter < hardware.quarter < 0.7 * quarter
    assert 0.75 * bytes_s < hardware.bytes_s <= 0.87 * bytes_s
    assert hardware.memory == gigabytes << 30
    assert 0.3 * inside <= kind.wires[0].bytes_s <= 0.85 * inside
    assert between is None or 0.8 * between < kind.wires[1].bytes_s < between
    assert KINDS.keys() == PUBLISHED.keys() == KNOWN.keys()


@pytest.mark.parametrize(
    "name, near", [("h20", "H200"), ("a100-60", "A100-80"), ("910d", "Ascend-910"), ("l40", "L40S")]
)
def test_names_near_an_unknown_one_are_offered(name, near):
    with pytest.raises(PlanError, match=f"(?s)there is no device '{name}'.*known .*H100.*try .*{near}"):
        Cluster.read(f"{name}x8")
