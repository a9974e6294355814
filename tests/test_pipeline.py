"""Pipelines, and sub-models on meshes of their own, in processes: the steps of one device, their state, checkpoints
under other plans, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mycel.launch import launch


@pytest.mark.parametrize("world", [4])  # the plans of 2 are those of the simulator, and take as long
def test_in_processes(world, tmp_path):
    child = str(Path(__file__).parent / "pipeline_child.py")
    env = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    assert launch([str(tmp_path)], world, program=[child], env=env, logs=tmp_path / "logs") == 0
