"""Pipelines, and sub-models on meshes of their own, in processes: the steps of one device, their state, checkpoints
under other plans, what is refused, and what is said when a stage dies."""

from __future__ import annotations

import re
from pathlib import Path

from mycel.launch import launch

WORLD = 4  # the plans of 2 are those of the simulator, and take as long


def test_in_processes(tmp_path, capfd):
    """All that is compared holds; then a stage is killed, and those that wait for it name their own stage, the step and
    the line of the model that made what does not come."""
    child = str(Path(__file__).parent / "pipeline_child.py")
    env = {"OMP_NUM_THREADS": "1", "MYCEL_TIMEOUT": "60"}
    code = launch([str(tmp_path)], WORLD, program=[child], env=env, logs=tmp_path / "logs")
    assert {p.name for p in tmp_path.glob("done-*")} == {f"done-{rank}" for rank in range(WORLD)}
    assert code == 137
    stderr = capfd.readouterr().err
    assert "rank 2 was killed by SIGKILL" in stderr
    assert re.search(r"at +stage 1, backward of microbatch 0, tests/placing.py:\d+ .*in a message from rank 2", stderr)
