"""The command line on ranks that torch's own launcher starts: `torchrun --nproc-per-node 2 -m mycel …`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import training
import yaml
from test_processes import free_port
from test_train_ranks import MODEL, QUIET, losses
from training import config, nothing_left, settings

from mycel.plan.cluster import Cluster
from mycel.run.checkpoint import latest, load
from mycel.train.loop import train

disk = training.disk  # fixture
STEPS = 4
ENV = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "100"}


def torchrun(*arguments: object, folder: Path) -> str:
    """What two ranks print, which have to end well."""
    start = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m", "mycel"]
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *start, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, **ENV, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("plan", ["auto", "zero3"])
def test_a_run_is_that_of_one_process(plan, disk, tmp_path):
    """Under the plan that the ranks find and under a ready one; and it goes on."""
    sections = {"model": MODEL, "train": {"steps": STEPS}, **QUIET}
    assert train(config(disk, tmp_path / "alone", **sections)) == 0
    written = settings(disk, tmp_path / "ranks", parallel={"plan": plan}, **sections)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
    said = torchrun("train", tmp_path / "run.yaml", folder=tmp_path)
    assert said.count("2 ranks, ") == 1  # one of them speaks
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert load(latest(tmp_path / "ranks" / "checkpoints")).plan is not None and nothing_left(tmp_path / "ranks")
    torchrun("train", "--resume", tmp_path / "ranks", f"train.steps={STEPS + 2}", folder=tmp_path)
    assert len(losses(tmp_path / "ranks")) == STEPS + 2


@pytest.mark.slow
def test_a_probe_measures_the_link_between_the_ranks(tmp_path):
    torchrun("probe", "--device", "cpu", "--out", tmp_path / "probe.yaml", folder=tmp_path)
    cluster = Cluster.read(tmp_path / "probe.yaml")
    assert (cluster.devices, cluster.hosts) == (2, 1)
    (level,) = cluster.hardware.levels
    assert level.ranks == 2 and level.bytes_s > 0 and {"memory", "product.fp32"} <= cluster.hardware.rates.keys()
