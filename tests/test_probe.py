"""The probe measures, and planning can read what it wrote."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from mycel.cli import app
from mycel.ir import OPS, Mesh
from mycel.launch import launch
from mycel.plan import CPU, hardware_of
from mycel.plan.cluster import Cluster
from mycel.plan.hardware import probed
from mycel.plan.links import Link, fitted
from mycel.run import probe as measuring

TINY = {
    "memory": [1 << 10, 1 << 14],
    "product": [4, 8, 16],
    "attention": [(1, 2, 8, 8)],
    "conv": [(1, 2, 4)],
    "conv_point": [(1, 2, 4)],
    "message": [(1 << 8, 1), (1 << 10, 1)],
}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(measuring.SIZES, "cpu", TINY)
    monkeypatch.setattr(measuring, "LEAST_S", 0.0)


def test_one_process_measures_its_device(quick, tmp_path, monkeypatch):
    file = tmp_path / "deep" / "probe.yaml"
    ran = CliRunner().invoke(app, ["probe", "--device", "cpu", "--out", str(file)])
    assert ran.exit_code == 0 and str(file) in ran.output
    data = yaml.safe_load(file.read_text())
    assert "levels" not in data and data["processes"] == 1
    assert all(math.isfinite(y) and y > 0 and x > 0 for curve in data["rates"].values() for x, y in curve)
    monkeypatch.setenv("MYCEL_PROBE", str(file))
    device = hardware_of(torch.device("cpu"))
    kinds = (
        "product",
        "conv",
        "conv_point",
        "attention",
        "attention_grad",
        "attention_causal",
        "attention_grad_causal",
    )
    assert {f"{kind}.fp32" for kind in kinds} <= device.rates.keys()
    assert device.links(Mesh(dp=2)) == CPU.links(Mesh(dp=2)), "without a level, the preset"


def test_without_a_file_it_says_so(monkeypatch):
    ran = CliRunner().invoke(app, ["probe", "--device", "cpu"])  # the tests set MYCEL_PROBE to nothing
    assert ran.exit_code == 1 and "--out FILE" in ran.output


@pytest.mark.parametrize("device", ["mars", "cuda:x", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device, tmp_path):
    done = CliRunner().invoke(app, ["probe", "--device", device, "--out", str(tmp_path / "probe.yaml")])
    assert done.exit_code == 1 and f"device {device!r} " in done.output and "at        --device" in done.output
    assert not (tmp_path / "probe.yaml").exists()


def test_what_is_measured_is_what_messages_are_called():
    """A collective that is not measured by itself takes the numbers of its link."""
    assert set(measuring.COLLECTIVES) <= {name for name, op in OPS.items() if op.collective is not None}


@pytest.mark.slow
def test_processes_measure_the_links_between_them(tmp_path):
    file = tmp_path / "probe.yaml"
    child = tmp_path / "child.py"
    child.write_text(
        "import sys, yaml\nfrom mycel.run import probe as measuring\n"
        f"measuring.SIZES['cpu'] = {TINY!r}\nmeasuring.LEAST_S = 0.0\nmeasuring.CROWDED_S = 0.01\n"
        "data = measuring.probe('cpu')\n"
        "open(sys.argv[1], 'w').write(yaml.safe_dump(data)) if measuring.seat().rank == 0 else None\n"
    )
    assert launch([str(file)], 4, program=[str(child)]) == 0
    device = probed(CPU, file.read_text())
    (level,) = device.levels
    data = yaml.safe_load(file.read_text())["levels"][0]
    assert level == fitted("host", 4, data["busy"], data["messages"]) and 0 <= level.busy <= 1
    assert Link.read(level.data()) == level
    seconds = [s for points in data["messages"].values() for *_, s in points]
    assert min(seconds) >= 0 < max(seconds)
    assert {name for name, *_ in level.measured} == set(measuring.COLLECTIVES)
    assert {k for points in data["messages"].values() for k, _, _ in points} == {2, 4}
    assert device.links(Mesh(dp=2, tp=2)).levels == ("host",)


@pytest.mark.slow
@pytest.mark.parametrize("sizes, host", [((2, 2), 2), ((2, 1, 1), 1)])
def test_processes_on_several_hosts_measure_the_links_between_them(sizes, host, tmp_path):
    """As torchrun starts them, also on hosts of different sizes, of which parts that are all as large count as hosts;
    what is planned by the file afterwards is the same on all ranks, and computes what one device does."""
    file, child = tmp_path / "probe.yaml", str(Path(__file__).parent / "probe_child.py")
    (tmp_path / "tiny.yaml").write_text(
        yaml.safe_dump({k: [list(x) if isinstance(x, tuple) else x for x in v] for k, v in TINY.items()})
    )
    local = ",".join(str(n) for n in sizes for _ in range(n))
    env = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "100", "LOCAL_SIZES": local, "TINY": str(tmp_path / "tiny.yaml")}
    logs = tmp_path / "logs"
    code = launch(["probe", "--device", "cpu", "--out", str(file)], 4, program=[child], env=env, logs=logs)
    assert code == 0, "\n".join(x.read_text() for x in sorted(logs.rglob("*")) if x.is_file())
    levels = {level["name"]: level for level in yaml.safe_load(file.read_text())["levels"]}
    assert {name: level["ranks"] for name, level in levels.items()} == ({"host": host} if host > 1 else {}) | {
        "network": 4
    }
    groups = {name: {k for points in x["messages"].values() for k, *_ in points} for name, x in levels.items()}
    assert groups == ({"host": {2}} if host > 1 else {}) | {"network": {4 // host, 4}}
    cluster = Cluster.read(file)
    assert (cluster.devices, cluster.hosts, cluster.world) == (host, 4 // host, 4)
    links = cluster.hardware.links(Mesh(dp=4 // host, tp=host))
    assert links.of(("dp",)).name == "network" and (host == 1 or links.of(("tp",)).name == "host")


def test_a_file_that_cannot_be_written_is_found_before_measuring(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(measuring, "probe", lambda *given: pytest.fail("it was measured"))
    for out in (tmp_path / "file" / "probe.yaml", tmp_path):
        done = CliRunner().invoke(app, ["probe", "--device", "cpu", "--out", str(out)])
        assert done.exit_code == 1 and "cannot write what is measured" in done.output, done.output
